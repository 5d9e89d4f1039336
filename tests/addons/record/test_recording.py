"""Recordings: what is written is what the target read, decoding notices nothing, and folders
survive everything."""

from __future__ import annotations

import errno
import json
import multiprocessing
import threading
import time
import warnings
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from helpers import EachRound, build_model, build_tokenizer, other_model
from messages import lacking, refused, warned
from recordings import SETTINGS, check_states, rows_and_states
from safetensors.torch import load_file, save_file

from headstart.addons.record import record, recording
from headstart.addons.record.folder import HEADER_BYTES, AnswerMarks, RecordedFolder
from headstart.files import text_shards
from headstart.heads import build_head
from headstart.inference import Conversation, SpeculativeLM, Target, feature_cache
from headstart.inference.feature_cache import cache_manifest, text_row

HEADS = {"medusa": {}, "hydra": {}, "eagle": {}, "eagle3": {"feature_layers": [0, -1]}}
"""Heads with one layer, the last one, and with several."""


@pytest.fixture(scope="module")
def target():
    return Target(build_model().requires_grad_(False))


def model_with(target, drafter, tree="chain:3", **options):
    """A decoder with a head of this kind, or with another source of drafts; the same each time."""
    options = {"tree": tree, "adaptive": False, "lossy": True, **options}
    if drafter in ("prompt-lookup", "plain"):
        options["tree"] = "auto"
    if drafter == "model":
        drafter = other_model(target)
    if not isinstance(drafter, str) or drafter not in HEADS:
        return SpeculativeLM.from_pretrained(
            target, drafter=None if drafter == "plain" else drafter, **options
        )
    torch.manual_seed(0)
    head = build_head(drafter, HEADS[drafter], target.info).to(target.dtype)
    head.initialize(target.modules, torch.ones(target.info.vocab_size, dtype=torch.int64))
    return SpeculativeLM.from_pretrained(target, head.eval(), **options)


def prompts(rows, longest=9, seed=0):
    """Prompts of different lengths, padded on the left, with their mask; two of three begin
    alike."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 250, (rows, longest), generator=random)
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, : (3 * row) % 5] = 0
    return {"inputs": ids, "attention_mask": mask}


def greedy(new_tokens=8):
    return {**SETTINGS, "max_new_tokens": new_tokens}


def sampling(new_tokens=8, temperature=0.8):
    settings = {**greedy(new_tokens), "do_sample": True, "temperature": temperature}
    return {**settings, "generator": torch.Generator().manual_seed(3)}


def answers_of(rows):
    return [[t for t, own in zip(row["input_ids"], row["loss_mask"]) if own] for row in rows]


RULES = {
    "greedy": (greedy, {}),
    "exact": (sampling, {}),
    "exact, sampled trees": (sampling, {"tree": "drawn:branch:2x1"}),
    "typical": (sampling, {"acceptance": "typical"}),
}
BATCHES = {"one": (1, None), "padded": (3, None), "slots": (5, 2)}


PAIRS = [
    ("medusa", "greedy", "padded"),
    ("medusa", "exact", "slots"),
    ("medusa", "typical", "padded"),
    ("hydra", "exact", "padded"),
    ("hydra", "greedy", "slots"),
    ("eagle", "exact, sampled trees", "slots"),
    ("eagle", "typical", "one"),
    ("eagle3", "greedy", "slots"),
    ("eagle3", "exact", "one"),
    ("eagle3", "exact, sampled trees", "padded"),
    ("prompt-lookup", "greedy", "padded"),
    ("prompt-lookup", "exact", "slots"),
    ("model", "exact, sampled trees", "slots"),
    ("plain", "greedy", "slots"),
    ("plain", "exact", "padded"),
]
"""Every drafter, rule and batch, and most pairs of them."""


@pytest.mark.parametrize(("drafter", "rule", "batch"), PAIRS)
def test_recording_changes_no_token_and_keeps_the_targets_states(
    target, tokenizer, tmp_path, drafter, rule, batch
):
    settings, options = RULES[rule]
    rows, slots = BATCHES[batch]
    lm = model_with(target, drafter, **options)
    given = {**prompts(rows), "max_batch_size": slots}
    expected = lm.generate(**given, **settings())
    with record(lm, tmp_path, tokenizer=tokenizer, format="float32") as running:
        output = lm.generate(**given, **settings())
    assert torch.equal(output.sequences, expected.sequences)
    assert output.stats.rows == expected.stats.rows, "the same drafts were accepted"
    assert (running.written, running.dropped, running.skipped) == (rows, 0, {})
    recorded = check_states(target, tmp_path)
    assert sorted(answers_of(recorded)) == sorted(expected.sequences[:, 9:].tolist())
    for row in recorded:
        assert row["lossy"] == (rule == "typical")
        assert row["temperature"] == pytest.approx(0.0 if rule == "greedy" else 0.8)
        assert row["ended"] == "complete" and not row["cut"]
    lm.generate(**prompts(1), **settings(2))
    assert len(text_shards(tmp_path)) == rows, "it has stopped"


@pytest.mark.parametrize("drafter", [*HEADS, "prompt-lookup", "plain"])
def test_a_later_turn_has_the_states_of_what_was_read_before(target, tokenizer, tmp_path, drafter):
    lm, again = model_with(target, drafter), model_with(target, drafter)
    more = [torch.tensor([[5, 6, 7]]), torch.tensor([[8]]), torch.tensor([[9, 9]])]

    def talk(decoder):
        past, text_1T, found = Conversation(), prompts(1)["inputs"], []
        for turn, question_1T in enumerate(more):
            text_1T = decoder.generate(text_1T, past_key_values=past, **greedy(7)).sequences
            found.append(text_1T[0].tolist())
            if turn == 1:  # an earlier part of the text is taken up again
                text_1T = text_1T[:, :-3]
            text_1T = torch.cat([text_1T, question_1T], dim=1)
        return found

    expected = talk(again)
    with record(lm, tmp_path, tokenizer=tokenizer, format="float32"):
        assert talk(lm) == expected
    rows = check_states(target, tmp_path)
    assert [row["input_ids"] for row in rows] == expected
    # earlier answers have a row of their own
    assert [len(answer) for answer in answers_of(rows)] == [7, 7, 7]


@pytest.mark.parametrize("drafter", ["eagle3", "medusa", "plain"])
def test_a_conversation_goes_on_when_recording_is_switched(target, tokenizer, tmp_path, drafter):
    """What was read without recording has no states: the turn is left out, and counted."""
    lm, again = model_with(target, drafter), model_with(target, drafter)
    past, other_past = Conversation(), Conversation()
    text_1T = prompts(1)["inputs"]
    for turn in range(6):
        if turn in (1, 4):
            running = record(lm, tmp_path / str(turn), tokenizer=tokenizer)
        expected = again.generate(text_1T, past_key_values=other_past, **greedy(4)).sequences
        found = lm.generate(text_1T, past_key_values=past, **greedy(4)).sequences
        assert torch.equal(found, expected)
        text_1T = torch.cat([found, torch.tensor([[turn]])], dim=1)
        if turn in (2, 5):
            running.stop()
            assert running.skipped == {"its text was begun before the recording": 2}


def test_an_end_token_is_recorded_and_so_is_what_a_criterion_ends(target, tokenizer, tmp_path):
    lm = model_with(target, "medusa")
    whole = lm.generate(**prompts(1), **greedy(20)).sequences[0, 9:].tolist()
    end = whole[6]
    place = whole.index(end) + 1
    criteria = [lambda ids, scores: ids.shape[1] >= 9 + 4]
    with record(lm, tmp_path, tokenizer=tokenizer, format="float32"):
        lm.generate(**prompts(1), **{**greedy(20), "eos_token_id": [end]})
        lm.generate(**prompts(1), **greedy(20), stopping_criteria=criteria)
        lm.generate(**prompts(1), **greedy(1))
    assert answers_of(check_states(target, tmp_path)) == [whole[:place], whole[:4], whole[:1]]


def test_answers_that_were_left_or_failed_are_marked(target, tokenizer, tmp_path):
    lm = model_with(target, "eagle3")
    whole = lm.generate(**prompts(1), **greedy(30)).sequences[0, 9:].tolist()

    def fail(sequences):
        if sequences.tokens >= 8:
            raise RuntimeError("the disk of the caller is full")

    def interrupt(ids, scores):
        if ids.shape[1] >= 9 + 5:
            raise KeyboardInterrupt
        return False

    with record(lm, tmp_path, tokenizer=tokenizer, format="float32"):
        stream = lm.stream(prompts(1)["inputs"], **greedy(30))
        for _ in range(3):
            next(stream)
        stream.close()
        failing = EachRound(fail)
        lm.observers.append(failing)
        with pytest.raises(RuntimeError, match="of the caller"):
            lm.generate(**prompts(2), **greedy(30))
        lm.observers.remove(failing)
        with pytest.raises(KeyboardInterrupt):
            lm.generate(**prompts(1), **greedy(30), stopping_criteria=[interrupt])
    rows = check_states(target, tmp_path)
    assert [row["ended"] for row in rows] == ["stopped", "failed", "failed", "stopped"]
    for row, answer in zip(rows, answers_of(rows)):
        assert len(answer) < 30
        if row is not rows[2]:
            assert answer == whole[: len(answer)]


def test_long_texts_are_cut_and_prompts_that_fill_them_left_out(target, tokenizer, tmp_path):
    lm = model_with(target, "eagle3")
    with record(lm, tmp_path, tokenizer=tokenizer, format="float32", max_length=12) as running:
        lm.generate(**prompts(1), **greedy(20))
        lm.generate(**prompts(1, longest=12), **greedy(20))
        lm.generate(**prompts(1, longest=11), **greedy(1))
    rows = check_states(target, tmp_path)
    assert [(len(row["input_ids"]), row["cut"]) for row in rows] == [(12, True), (12, False)]
    ((reason, count),) = running.skipped.items()
    assert not lacking(reason, "max_length 12") and count == 1


def test_a_long_prompt_is_recorded_chunk_by_chunk(target, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("headstart.inference.rounds.prefill.PREFILL_TOKENS", 16)
    lm = model_with(target, "eagle3")
    ids = prompts(4, longest=70)["inputs"]
    ids[1:3, :50] = ids[0, :50]  # a common prefix is read once
    ids[3] = ids[0]
    mask = torch.ones_like(ids)
    mask[1, :20] = 0
    expected = lm.generate(ids, attention_mask=mask, **greedy(6)).sequences
    with record(lm, tmp_path, tokenizer=tokenizer, format="float32"):
        output = lm.generate(ids, attention_mask=mask, **greedy(6))
    assert torch.equal(output.sequences, expected)
    rows = check_states(target, tmp_path)
    assert sorted(len(row["input_ids"]) for row in rows) == [56, 76, 76, 76]


def test_the_warm_up_is_not_recorded_and_trees_of_single_calls_are(target, tokenizer, tmp_path):
    lm = model_with(target, "eagle3")
    lm.generate(**prompts(1), **greedy(4), tree="chain:2")
    with record(lm, tmp_path, tokenizer=tokenizer, kind="other") as running:
        lm.warmup()
        lm.generate(**prompts(1), **greedy(4), tree="chain:2")
        lm.generate(**prompts(1), **greedy(4))
        assert "eagle" not in repr(running)
    rows = [text_row(path) for path in text_shards(tmp_path)]
    assert [row["kind"] for row in rows] == ["other", "other"]


def test_a_generation_inside_another_is_recorded_too(target, tokenizer, tmp_path):
    lm = model_with(target, "medusa")
    inner = []

    def once(sequences):
        if not inner:
            inner.append(None)
            inner[0] = lm.generate(prompts(1, seed=5)["inputs"], **greedy(4)).sequences[0].tolist()

    lm.observers.append(EachRound(once))
    with record(lm, tmp_path, tokenizer=tokenizer, format="float32"):
        outer = lm.generate(**prompts(1), **greedy(6)).sequences[0].tolist()
    rows = check_states(target, tmp_path)
    assert [row["input_ids"] for row in rows] == [inner[0], outer]


def test_old_answers_give_way_by_kind(target, tokenizer, tmp_path):
    lm = model_with(target, "medusa")
    with record(lm, tmp_path / "one", tokenizer=tokenizer):
        lm.generate(**prompts(1), **greedy())
    (path,) = text_shards(tmp_path / "one")
    many = tmp_path / "many"
    most = 6 * path.stat().st_size + HEADER_BYTES
    sizes = []
    for kind, seeds in (("rare", range(2)), ("often", range(2, 11))):
        with record(lm, many, kind=kind, tokenizer=tokenizer, max_bytes=most) as running:
            for seed in seeds:
                lm.generate(prompts(1, seed=seed)["inputs"], **greedy())
                sizes.append(0)
                for path in text_shards(many):
                    with suppress(FileNotFoundError):  # the writer removes it meanwhile
                        sizes[-1] += path.stat().st_size
        assert running.written == len(seeds)
    assert max(sizes) <= most
    rows = [text_row(path) for path in text_shards(many)]
    kept = [row["kind"] for row in rows]
    assert kept.count("rare") == 2 and kept.count("often") >= 3
    newest = lm.generate(prompts(1, seed=10)["inputs"], **greedy()).sequences[0].tolist()
    assert rows[-1]["input_ids"] == newest
    with record(lm, tmp_path / "none", tokenizer=tokenizer, max_bytes=100) as running:
        lm.generate(**prompts(1), **greedy())
    ((reason, count),) = running.skipped.items()
    assert not lacking(reason, "max_bytes") and count == 1
    assert text_shards(tmp_path / "none") == []


@pytest.mark.parametrize(
    "name",
    [
        "recorded-talk-at-school.safetensors",
        "recorded-mine.safetensors",
        "recorded-2025-backup-of-everything.safetensors",
        "recorded-.safetensors",
    ],
)
def test_files_of_others_do_not_give_way(target, tokenizer, tmp_path, name):
    lm = model_with(target, "medusa")
    with record(lm, tmp_path, tokenizer=tokenizer):
        lm.generate(**prompts(1), **greedy())
    (path,) = text_shards(tmp_path)
    size = path.stat().st_size + HEADER_BYTES
    path.rename(tmp_path / name)
    with record(lm, tmp_path, tokenizer=tokenizer, max_bytes=2 * size) as running:
        for seed in range(1, 5):
            lm.generate(prompts(1, seed=seed)["inputs"], **greedy())
    assert (tmp_path / name).exists()
    assert running.written == 4 and running.failure is None


@pytest.mark.parametrize("kind", [5, None, "x" * 201])
def test_a_kind_that_is_no_short_text_is_refused_at_once(target, tokenizer, tmp_path, kind):
    with refused("200"):
        record(model_with(target, "medusa"), tmp_path, tokenizer=tokenizer, kind=kind)
    assert list(tmp_path.iterdir()) == []


ROWS = {"cut": "{", "a list": "[1]", "missing": None}
PARTS = {
    "mask without an answer": {"loss_mask": lambda mask: mask & False},
    "mask shorter": {"loss_mask": lambda mask: mask[:3]},
    "mask 2-D": {"loss_mask": lambda mask: mask[None]},
    "mask of numbers": {"loss_mask": lambda mask: mask.long()},
    "tokens 2-D": {"tokens": lambda tokens: tokens[None]},
    "tokens negative": {"tokens": lambda tokens: -tokens - 1},
    "tokens float": {"tokens": lambda tokens: tokens.float()},
    "no tokens": {"tokens": lambda tokens: tokens[:0], "loss_mask": lambda mask: mask[:0]},
}


@pytest.fixture
def answer(target, tokenizer, tmp_path):
    lm = model_with(target, "medusa")
    with record(lm, tmp_path / "recorded", tokenizer=tokenizer):
        lm.generate(**prompts(1), **greedy())
    (path,) = text_shards(tmp_path / "recorded")
    return path


def tensors_of(path):
    """The tensors of a file, which can be written again."""
    return {name: tensor.clone() for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("what", [*ROWS, *PARTS])
def test_a_text_that_is_none_is_named_in_one_line(answer, what):
    tensors = tensors_of(answer)
    row = ROWS.get(what, "{}")
    for name, change in PARTS.get(what, {}).items():
        tensors[name] = change(tensors[name]).contiguous()
    save_file(tensors, answer, None if row is None else {"row": row})
    with refused(f"{answer}") as caught:
        text_row(answer)
    assert "\n" not in str(caught.value)


def test_a_row_does_not_take_the_place_of_the_text(answer):
    before = text_row(answer)
    row = {"kind": "", "input_ids": "/etc/passwd", "loss_mask": [1]}
    save_file(tensors_of(answer), answer, {"row": json.dumps(row)})
    assert text_row(answer)["input_ids"] == before["input_ids"]
    assert text_row(answer)["loss_mask"] == before["loss_mask"]


def test_a_slow_disk_drops_answers_and_a_full_one_ends_the_recording(
    target, tokenizer, tmp_path, monkeypatch, nothing_measured
):
    lm = model_with(target, "medusa")
    expected = lm.generate(**prompts(1), **greedy()).sequences
    original, may_write = feature_cache.save_file, threading.Event()

    def slow(*given):
        may_write.wait(60)
        original(*given)

    monkeypatch.setattr(feature_cache, "save_file", slow)
    monkeypatch.setattr(recording, "WAITING_BYTES", 5000)
    running = record(lm, tmp_path / "slow", tokenizer=tokenizer)
    for _ in range(12):
        assert torch.equal(lm.generate(**prompts(1), **greedy()).sequences, expected)
    assert running.dropped > 0, "and nothing has waited"
    may_write.set()
    running.stop()
    assert running.written + running.dropped == 12
    assert running.written == len(text_shards(tmp_path / "slow"))
    assert f"{running.dropped} dropped" in running.summary()

    def full(tensors, path, about):
        Path(path).write_bytes(b"the first half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(feature_cache, "save_file", full)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with record(lm, tmp_path / "full", tokenizer=tokenizer) as running:
            for _ in range(3):
                assert torch.equal(lm.generate(**prompts(1), **greedy()).sequences, expected)
    assert len([each for each in told if "recording stops" in str(each.message)]) == 1
    assert running.written == 0 and "No space left" in running.summary()
    assert sorted(path.name for path in (tmp_path / "full").iterdir()) == ["manifest.json"]


def test_a_folder_of_something_else_is_refused(target, tokenizer, tmp_path):
    lm = model_with(target, "medusa")
    record(lm, tmp_path, tokenizer=tokenizer).stop()
    other = Target(build_model(seed=1).requires_grad_(False))
    with refused("weights"):
        record(model_with(other, "medusa"), tmp_path, tokenizer=tokenizer)
    with refused("layers [-1] [0, -1]"):
        record(model_with(target, "eagle3"), tmp_path, tokenizer=tokenizer)
    with refused("format 'bfloat16' 'int8'"):
        record(lm, tmp_path, tokenizer=tokenizer, format="int8")
    another = build_tokenizer()
    another.add_tokens(["<more>"])
    with refused("tokenizer"):
        record(lm, tmp_path, tokenizer=another)
    with refused("unknown 'int4' bfloat16 float32 int8"):
        record(lm, tmp_path, tokenizer=tokenizer, format="int4")
    with refused("max_length 2 max_bytes 1 5"):
        record(lm, tmp_path, tokenizer=tokenizer, max_length=1, max_bytes=5)
    running = record(lm, tmp_path, tokenizer=tokenizer)
    with refused("recorded stop"):
        record(lm, tmp_path / "2", tokenizer=tokenizer)
    running.stop()
    running.stop()
    more = tmp_path / "more layers"
    record(model_with(target, "eagle3"), more, tokenizer=tokenizer, format="float32").stop()
    with record(lm, more, tokenizer=tokenizer, format="float32"):
        lm.generate(**prompts(1), **greedy())
    check_states(target, more)


def test_the_environment_switches_recording_off(target, tokenizer, tmp_path, monkeypatch):
    lm = model_with(target, "medusa")
    monkeypatch.setenv("HEADSTART_NO_RECORD", "1")
    with warned("HEADSTART_NO_RECORD recorded"):
        running = record(lm, tmp_path / "folder", tokenizer=tokenizer)
    with running:
        lm.generate(**prompts(1), **greedy())
    assert not (tmp_path / "folder").exists()
    assert running.summary() == "off by HEADSTART_NO_RECORD"
    monkeypatch.setenv("HEADSTART_NO_RECORD", "0")
    with record(lm, tmp_path / "folder", tokenizer=tokenizer):
        lm.generate(**prompts(1), **greedy())
    assert len(text_shards(tmp_path / "folder")) == 1
    assert (tmp_path / "folder").stat().st_mode & 0o077 == 0, "others may not read it"


def test_a_later_recording_begins_without_trying_the_target_again(
    target, tokenizer, tmp_path, monkeypatch
):
    """As for the rollouts of each step of a policy in training."""
    lm = model_with(target, "medusa")
    record(lm, tmp_path / "first", tokenizer=tokenizer).stop()
    lm.refresh()
    monkeypatch.setattr(target, "check_features", None)
    record(lm, tmp_path / "second", tokenizer=tokenizer).stop()


def test_states_that_are_not_finite_are_left_out(target, tokenizer, tmp_path):
    lm = model_with(target, "medusa")
    weight = target.model.model.embed_tokens.weight
    token = int(prompts(1)["inputs"][0, 0])
    before = weight.data[token].clone()
    try:
        weight.data[token] = torch.nan
        lm.refresh()
        with record(lm, tmp_path, tokenizer=tokenizer) as running:
            with refused("NaN"):
                lm.generate(**prompts(1), **greedy())
            lm.generate(prompts(1)["inputs"] * 0 + (token + 1) % 250, **greedy())
    finally:
        weight.data[token] = before
        lm.refresh()
    assert running.written == 1, "of the answer that failed no token was chosen"


def write_answers(folder, limit, number, count):
    recorded = RecordedFolder(
        folder, cache_manifest({"tokenizer": "t"}, (-1,), 8, "float32"), limit
    )
    marks = AnswerMarks("", 0.0, False, "complete", False, "t")
    for step in range(count):
        states_TLD = torch.full((4, 1, 8), float(1000 * number + step))
        recorded.write([number, step, 3, 4], 2, states_TLD, marks)


def writers(folder, limit, counts):
    context = multiprocessing.get_context("fork")
    processes = []
    for number, count in enumerate(counts):
        given = (folder, limit, number, count)
        processes.append(context.Process(target=write_answers, args=given))
        processes[-1].start()
    return processes


def all_readable(folder):
    """Every recorded answer can be read, and has its own states."""
    rows = []
    for row, states_TLD in rows_and_states(folder):
        number, step = row["input_ids"][:2]
        assert torch.equal(states_TLD, torch.full((4, 1, 8), float(1000 * number + step)))
        rows.append(row)
    return rows


def test_two_processes_write_to_one_folder(tmp_path):
    for process in writers(tmp_path, 10**9, (20, 20)):
        process.join(100)
        assert process.exitcode == 0
    assert len(all_readable(tmp_path)) == 40
    for process in writers(tmp_path, 20_000, (20, 20)):
        process.join(100)
        assert process.exitcode == 0, "both remove old answers, and find some removed by the other"
    assert 0 < len(all_readable(tmp_path)) < 40


def test_a_killed_process_leaves_whole_answers_alone(tmp_path):
    (process,) = writers(tmp_path, 10**9, (100_000,))
    while len(text_shards(tmp_path)) < 30:
        assert process.is_alive()
        time.sleep(0.001)
    process.kill()
    process.join()
    assert len(all_readable(tmp_path)) >= 30
    next_one = RecordedFolder(tmp_path, json.loads((tmp_path / "manifest.json").read_text()), 10**9)
    assert next_one.layers == (-1,)
