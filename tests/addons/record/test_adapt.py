"""`headstart adapt`: a head learns from recorded answers, and a worse one is never taken."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace

import pytest
import runs
import torch
from helpers import changed_json, saved_head, write_files
from messages import lacking, refused
from recordings import ANSWERS

from headstart.addons.record import adapt as adapting
from headstart.addons.record.adapt import adapt, average_weights
from headstart.addons.record.adapt_data import MOST_JUDGED, divided, rows_of
from headstart.files import text_shards
from headstart.heads import CheckpointMetadata, build_head
from headstart.heads.checkpoints.save_load import load_head, save_head
from headstart.inference import Target, load_tokenizer
from headstart.inference.feature_cache import text_row


def ids_of(rows):
    return [row["input_ids"] for row in rows]


def answer_tokens(rows):
    """The tokens that the model wrote in any of these texts."""
    found = set()
    for row in rows:
        pairs = zip(row["input_ids"], row["loss_mask"], strict=True)
        found |= {token for token, own in pairs if own}
    return found


def prompt_of(row):
    return row["input_ids"][: row["loss_mask"].index(1)]


def test_a_head_that_drafts_better_on_newer_answers_is_taken(config, begun, tmp_path, monkeypatch):
    config = replace(config, replay=str(begun / "older"), replay_share=0.4, steps=150)
    monkeypatch.setattr(Target, "load", None)
    folder = adapt(config)
    assert folder == tmp_path / "new" / "best"
    report = (tmp_path / "new" / "report.md").read_text()
    assert f"Taken: {folder}" in report
    rows = [line.split(" | ") for line in report.splitlines() if line.startswith("| ")][1:]
    assert [row[0] for row in rows] == ["| all", "| count to", "| say", "| (replayed)"]
    # all recorded answers, without those that are replayed
    assert int(rows[0][1]) == int(rows[1][1]) + int(rows[2][1])
    assert float(rows[0][3]) > float(rows[0][2])
    metadata = load_head(folder)[1]
    assert metadata.training["config"]["init_from"] == config.head
    kept = tmp_path / "new" / "recorded"
    training, judged, replay = (
        runs.rows_of(kept / f"{name}.jsonl") for name in ("training", "judged", "replay")
    )
    new = [row for row in judged if "replayed" not in row]
    older = [row for row in judged if "replayed" in row]
    assert len(new) == 18, "0.35 of 24 of each of two kinds"
    assert new[-1]["input_ids"] == text_row(text_shards(begun / "recorded")[-1])["input_ids"]
    for judging, learned in ((new, training), (older, replay)):
        assert not [row for row in judging if row["input_ids"] in ids_of(learned)]
    assert 4 <= len(older) == ANSWERS - len(replay), "about a fifth of them"
    assert adapt(config) == folder, "what is finished is found"
    with refused("recorded older"):
        adapt(replace(config, recorded=str(begun / "older")))


def test_a_series_of_adaptations_stays_near_the_first_head(config, begun, tmp_path, capsys):
    """Else it would forget a little more with each of them."""
    first = tmp_path / "first head"
    shutil.copytree(begun / "head", first)
    once = replace(config, head=str(first), steps=2)
    adapt(once)
    head = str(tmp_path / "new" / "new")
    again = replace(once, head=head, output=str(tmp_path / "again"))
    adapt(again)
    trained, _ = load_head(tmp_path / "again" / "training" / "best")
    new, metadata = load_head(tmp_path / "again" / "new")
    assert metadata.training["first_head"] == str(first)
    weights = load_head(first)[0].state_dict()
    for name, weight in trained.state_dict().items():
        torch.testing.assert_close(new.state_dict()[name], 0.5 * (weight + weights[name]))
    capsys.readouterr()

    shutil.rmtree(first)
    adapt(replace(again, output=str(tmp_path / "lost")))
    assert not lacking(capsys.readouterr().out, "cannot be read (first)")
    with refused("first head"):
        adapt(replace(again, first=str(first), output=str(tmp_path / "named")))


def test_the_first_head_has_the_architecture_of_the_one_that_is_adapted(
    config, begun, taught, tmp_path, capsys
):
    target = Target.from_pretrained(str(taught), torch.float32)
    saved_head(tmp_path / "other", target, num_heads=3)
    with refused("kind target options"):
        adapt(replace(config, first=str(tmp_path / "other")))
    assert not (tmp_path / "new" / "recorded" / "training.jsonl").exists(), "before any work"
    head, _ = load_head(begun / "head")
    metadata = CheckpointMetadata(training={"first_head": str(tmp_path / "other")})
    save_head(head, tmp_path / "told", metadata)
    (tmp_path / "adapt.lock").touch()
    adapt(replace(config, head=str(tmp_path / "told"), steps=2))
    assert "other', which cannot be read" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "named", ["user/first-head", "/", "relative", ["a"], {"a": 1}, 5, True, "\x1b[2J" * 1000]
)
def test_a_name_in_a_strangers_checkpoint_is_not_opened(
    config, begun, tmp_path, monkeypatch, caplog, named
):
    head, _ = load_head(begun / "head")
    save_head(head, tmp_path / "told", CheckpointMetadata(training={"first_head": named}))
    config = replace(config, head=str(tmp_path / "told"))
    old, metadata = load_head(config.head)
    monkeypatch.setattr(adapting, "load_head", None)
    assert adapting.first_head(config, old, metadata) == (config.head, old)
    assert "opened only if" in caplog.text and len(caplog.text) < 1000


def test_nothing_that_others_wrote_is_removed_from_the_output_folder(config, tmp_path):
    config = replace(config, recorded=str(tmp_path / "nothing"))
    output = tmp_path / "new"
    names = (
        ".film.mkv.partial",
        ".thesis.json.partial",
        "deep/.adapt.json.12.0123abcd.partial",
        ".costs.json.partial.0.abc.partial",
    )
    write_files(output, dict.fromkeys(names, ""))
    (output / ".x.partial").mkdir()
    with refused("nothing' headstart --record"):
        adapt(config)
    left = "recorded/states/.manifest.json.12.0123abcd.partial"
    write_files(output, {left: ""})
    with refused("recorded answers"):
        adapt(config)
    assert all((output / name).exists() for name in (*names, ".x.partial"))
    assert not (output / left).exists()


@pytest.mark.parametrize("name", ["recorded", "training", "new", "adapt.json", "report.md"])
def test_an_output_folder_that_holds_such_things_of_others_is_refused(config, tmp_path, name):
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / name).mkdir()
    with refused(f"{name}"):
        adapt(config)
    assert [path.name for path in (tmp_path / "new").iterdir()] == [name]


def test_the_recorded_target_may_be_named_otherwise(config, taught, tmp_path, capsys):
    """Such as a policy that was trained in memory, under its first name, and saved for `adapt`."""
    saved = tmp_path / "saved policy"
    shutil.copytree(taught, saved)
    renamed = replace(config, target=str(saved), steps=2)
    adapt(renamed)
    assert (tmp_path / "new" / "report.md").exists()
    head = str(tmp_path / "new" / "new")
    adapt(replace(renamed, head=head, output=str(tmp_path / "again")))
    assert "cannot be read" not in capsys.readouterr().out
    assert load_head(tmp_path / "again" / "new")[1].training["first_head"] == config.head


def test_a_head_that_is_not_better_is_not_taken_and_says_so(config, tmp_path):
    same = replace(config, steps=1, lr=1e-12)
    assert adapt(same) is None
    report = (tmp_path / "new" / "report.md").read_text()
    assert not lacking(report, "Not taken: difference +0.00")
    assert not (tmp_path / "new" / "best").exists()


def test_too_few_answers_and_other_folders_are_refused(config, begun, tmp_path):
    few = tmp_path / "few"
    shutil.copytree(begun / "recorded", few)
    for path in text_shards(few)[:-5]:
        path.unlink()
    with refused("5 32"):
        adapt(replace(config, recorded=str(few), output=str(tmp_path / "2")))
    with changed_json(few / "manifest.json") as manifest:
        manifest["tokenizer"] = "another"
    with refused("tokenizer 'another'"):
        adapt(replace(config, replay=str(few), output=str(tmp_path / "3")))
    with refused("held_out 1 1.5"):
        replace(config, held_out=1.5)


def test_a_stopped_run_resumes_although_its_answers_have_given_way(
    config, begun, tmp_path, stopped_at
):
    copied = tmp_path / "copied"
    shutil.copytree(begun / "recorded", copied)
    config = replace(config, recorded=str(copied), steps=12)
    stopped_at(5, config, run=adapt)
    for path in text_shards(copied):
        path.unlink()
    adapt(config)
    assert (tmp_path / "new" / "report.md").exists()


def test_the_draft_vocabulary_follows_the_recorded_answers(config, begun, taught, tmp_path):
    """The old head can draft none of their tokens; the new one drafts those of both."""
    used = answer_tokens(map(text_row, text_shards(begun / "recorded")))
    target = Target.from_pretrained(str(taught), torch.float32)
    counts_V = torch.arange(target.info.vocab_size, 0, -1)
    counts_V[list(used)] = 0
    head = build_head("medusa", {"num_heads": 2, "draft_vocab_size": 100}, target.info)
    head.initialize(target.modules, counts_V)
    save_head(head, tmp_path / "narrow", CheckpointMetadata())
    assert not used & set(head.vocabulary().tolist())
    adapt(replace(config, head=str(tmp_path / "narrow")))
    new, _ = load_head(tmp_path / "new" / "training" / "last")
    learned = answer_tokens(runs.rows_of(tmp_path / "new" / "recorded" / "training.jsonl"))
    before = set(head.vocabulary().tolist())
    vocabulary = set(new.vocabulary().tolist())
    assert before <= vocabulary, "no token gives way"
    assert new.draft_vocab_size == len(learned | before)
    assert len(learned & vocabulary) >= 0.9 * len(learned), "a tenth of the answers evaluates"
    report = (tmp_path / "new" / "report.md").read_text()
    assert f"The draft vocabulary has {len(vocabulary - before)} tokens" in report


def test_conversations_of_a_file_are_replayed_with_states_that_the_target_computes(
    config, conversations_file, tmp_path
):
    rows = conversations_file.read_text().splitlines()
    given = tmp_path / "first.jsonl"
    runs.write_rows(given, [*rows[:9], {"messages": [{"role": "nobody", "content": ""}]}])
    config = replace(config, replay=str(given), replay_share=0.4, steps=6)
    adapt(config)
    folder = tmp_path / "new" / "recorded"
    replayed = runs.rows_of(folder / "conversations.jsonl")
    judged = runs.rows_of(folder / "judged.jsonl")
    older = [row for row in judged if "replayed" in row]
    assert len(replayed) + len(older) == 9 and older
    assert not [row for row in older if row["input_ids"] in ids_of(replayed)]
    assert not (folder / "replay.jsonl").exists()
    assert "| (replayed) | " in (tmp_path / "new" / "report.md").read_text()
    shards = set((folder / "states").glob("*.safetensors")) - set(text_shards(folder / "states"))
    assert shards, "their states are in the folder"
    run = load_head(tmp_path / "new" / "training" / "last")[1].training["config"]
    # the target's blocks are loaded for their states alone
    assert run["features"]["mode"] == "stored"
    weight = 0.4 / 0.6 * len(runs.rows_of(folder / "training.jsonl")) / len(replayed)
    assert run["data"]["weights"][1] == pytest.approx(weight)
    given.unlink()
    adapt(config)  # what was taken is kept


def test_what_a_series_has_replayed_is_never_judged_on(config, prepared, tmp_path):
    """Whatever number of steps draws from the file, and however the file grows."""
    tokenizer = load_tokenizer(config.target)

    def numbers(path):
        texts = [tokenizer.decode(row["input_ids"]) for row in runs.rows_of(path)]
        return {int(found[1]) for text in texts if (found := re.search(r"number (\d+)", text))}

    learned, judged = set(), set()
    for steps, size in ((10, 60), (20, 60), (40, 80)):
        rows = []
        for number in range(size):
            question = {"role": "user", "content": f"say {number}"}
            answer = {"role": "assistant", "content": f"number {number}."}
            rows.append({"messages": [question, answer]})
        replay = runs.write_rows(tmp_path / "first.jsonl", rows)
        output = str(tmp_path / f"{steps}-{size}")
        folder = prepared(replace(config, replay=replay, steps=steps, output=output))
        learned |= numbers(folder / "conversations.jsonl")
        judged |= numbers(folder / "judged.jsonl")
    assert not learned & judged
    assert len(learned) > 30 and len(judged) > 5 and min(judged) < 30


def test_what_cannot_be_replayed_is_refused_by_name(config, begun, tmp_path):
    def replaying(replay):
        output = str(tmp_path / "refused")
        adapt(replace(config, replay=str(replay), output=output))

    with refused("replay missing"):
        replaying(tmp_path / "missing")
    states = tmp_path / "states"
    states.mkdir()
    shutil.copy(begun / "recorded" / "manifest.json", states)
    with refused("replay states headstart features"):
        replaying(states)
    row = {"messages": [{"role": "user", "content": "no answer"}]}
    with refused("wrong.jsonl conversation"):
        replaying(runs.write_rows(tmp_path / "wrong.jsonl", [row]))


def test_the_newest_answers_of_each_kind_are_judged_on():
    """A kind that has come last is learned, too, and rare ones together count as one kind."""

    def answers(kind, count):
        return [
            {"kind": kind, "input_ids": [ord(kind), number, 7], "loss_mask": [0, 0, 1]}
            for number in range(count)
        ]

    rows = answers("a", 40) + answers("b", 10) + answers("c", 3) + answers("d", 4)
    training, judged = divided(rows, 0.2)
    assert [(row["kind"], row["input_ids"][1]) for row in judged] == [
        *(("a", number) for number in range(28, 40)),
        *(("b", number) for number in range(7, 10)),
        *(("d", number) for number in range(2, 4)),
    ]
    assert training == [row for row in rows if row not in judged]
    many = [row for kind in "abcdefgh" for row in answers(kind, 500)]
    assert len(divided(many, 0.2)[1]) == MOST_JUDGED


def test_no_prompt_is_both_learned_and_judged_whatever_is_replayed(
    config, begun, prepared, tmp_path
):
    """An older recording may hold the same prompts as the newer one, learned there or judged."""
    older = tmp_path / "older"
    shutil.copytree(begun / "older", older)
    for path in text_shards(begun / "recorded"):
        shutil.copy(path, older / path.name.replace("recorded-0", "recorded-9"))  # as the newest
    folder = prepared(replace(config, replay=str(older)))
    learned, replayed, judged = (
        [prompt_of(row) for row in runs.rows_of(folder / f"{name}.jsonl")]
        for name in ("training", "replay", "judged")
    )
    assert learned and replayed
    assert not [prompt for prompt in judged if prompt in learned + replayed]


def test_recordings_of_one_kind_are_warned_of_before_training(
    config, begun, prepared, tmp_path, capsys
):
    prepared(replace(config, recorded=str(begun / "older")))
    assert not lacking(capsys.readouterr().out, "warning: 48 one kind 'tell'")
    prepared(replace(config, output=str(tmp_path / "several")))
    assert "warning" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "options"), [("medusa", {"num_heads": 2}), ("eagle3", {"feature_layers": [0]})]
)
def test_the_mean_of_two_heads_has_a_share_of_each_weight_and_keeps_new_tokens(
    tiny_target, kind, options
):
    target = tiny_target(layers=2, dtype=torch.float32)
    heads = []
    for seed, tokens in enumerate((range(2, 8), range(12))):
        counts_V = torch.zeros(target.info.vocab_size, dtype=torch.int64)
        counts_V[list(tokens)] = 1
        torch.manual_seed(seed)
        heads.append(build_head(kind, {**options, "draft_vocab_size": len(tokens)}, target.info))
        heads[-1].initialize(target.modules, counts_V)
        for parameter in heads[-1].parameters():
            parameter.data += torch.randn_like(parameter)
    earlier, head = heads
    before = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    average_weights(head, earlier, 0.25)
    old = earlier.state_dict()
    for name, tensor in head.state_dict().items():
        if name in ("token_map", "d2t", "t2d"):
            assert torch.equal(tensor, before[name])
        elif any(name.startswith(layer) for layer in head.vocabulary_layers):
            torch.testing.assert_close(tensor[2:8], 0.25 * old[name] + 0.75 * before[name][2:8])
            assert torch.equal(tensor[[0, 1, 8, 9, 10, 11]], before[name][[0, 1, 8, 9, 10, 11]])
        else:
            torch.testing.assert_close(tensor, 0.25 * old[name] + 0.75 * before[name])


ROW = {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "kind": "a"}


@pytest.mark.parametrize(
    "change",
    [
        {"input_ids": 3},
        {"input_ids": ["x", 2, 3]},
        {"loss_mask": [1, 0, 0]},
        {"loss_mask": [1]},
        {"kind": 3},
    ],
)
def test_rows_of_something_else_are_named(tmp_path, change):
    path = tmp_path / "judged.jsonl"
    path.write_text(json.dumps(ROW) + "\n")
    assert rows_of(path) == [ROW]
    for text in (json.dumps({**ROW, **change}), "{", "3", "[" * 100_000):
        path.write_text(json.dumps(ROW) + "\n" + text + "\n")
        with refused(str(path)):
            rows_of(path)
