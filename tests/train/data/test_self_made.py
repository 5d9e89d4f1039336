"""Self-made conversations: the same file for a seed, whatever happened while it was written."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from helpers import calls_of
from messages import lacking, refused
from runs import Killed, changed, rows_of, write_prompts, write_rows

from headstart.inference import load_tokenizer, tokenizer_provenance
from headstart.inference.rounds.observers import RoundObserver
from headstart.inference.text.chat_template import prompt_ids
from headstart.inference.text.messages import check_conversation
from headstart.stopping import Stopped
from headstart.train.config import SelfMadeConfig
from headstart.train.data import self_made as selfmade
from headstart.train.data.conversations import distinct_share
from headstart.train.data.self_made import make_conversations, user_prefix

LIKELY = {" ": 0.25, "<|im_end|>": 0.05, **dict.fromkeys("abcdefghij", 0.07)}


@pytest.fixture(scope="module")
def talker(talking):
    """A target that writes words of ten letters and ends its texts."""
    return talking(LIKELY, 0.05)


@pytest.fixture
def self_made(talker, tmp_path):
    return SelfMadeConfig(
        target=str(talker),
        output=str(tmp_path / "out.jsonl"),
        conversations=7,
        batch_size=4,
        dtype="float32",
        max_new_tokens=14,
        prompt_tokens=40,
        min_distinct=0.2,
    )


def rows_made(config, **changes):
    """The rows that a run writes."""
    return rows_of(make_conversations(changed(config, **changes)))


def bytes_made(config, **changes):
    return make_conversations(changed(config, **changes)).read_bytes()


def bytes_undisturbed(config, **changes):
    """The bytes that a run with nothing in its way writes, to another file."""
    return bytes_made(config, output=f"{config.output}-whole", **changes)


def prompts_in(rows):
    return [row["messages"][0]["content"] for row in rows]


@pytest.fixture
def nothing_loaded(monkeypatch):
    monkeypatch.setattr(selfmade, "load_speculative_lm", lambda *_: pytest.fail("loaded a model"))


@pytest.fixture
def answers(monkeypatch, tokenizer):
    """Has the model write the text that a function of prompt and sampling gives: `answers(write)`.

    The function may also draw from the batch's generator.
    """

    def patch(write):
        def written(lm, prompts, slots, new_tokens, generator, **sampling):
            texts = [write(tokenizer.decode(ids), sampling, generator) for ids in prompts]
            return [(tokenizer.encode(text), True) for text in texts]

        monkeypatch.setattr(selfmade, "continue_prompts", written)

    return patch


def killed_at(config, state_write, after):
    """Run until a write of the state file, and die before or after it."""
    original = selfmade.ConversationFile.write_state
    calls = []

    def write(*given):
        calls.append(given)
        if len(calls) == state_write and not after:
            raise Killed
        original(*given)
        if len(calls) == state_write:
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selfmade.ConversationFile, "write_state", write)
        with pytest.raises(Killed):
            make_conversations(config)


@pytest.fixture
def begun(self_made):
    """The options of a file that a kill left half-written."""
    killed_at(self_made, 2, after=True)
    return self_made


def test_the_file_holds_whole_conversations_of_the_models_own(self_made, tokenizer):
    rows = rows_made(self_made)
    assert len({prompt.lower() for prompt in prompts_in(rows)}) == 7 == len(rows)
    for row in rows:
        asked, answered = check_conversation(row, "here")["messages"]
        assert (asked["role"], answered["role"]) == ("user", "assistant")
        assert row["tokens"] == sum(row["loss_mask"]) <= 14
        assert row["finished"] or row["tokens"] == 14
        # the model's own end token
        assert row["finished"] == (row["input_ids"][-1] == tokenizer.eos_token_id)
        prompt = prompt_ids(tokenizer, [asked])[0].tolist()
        assert row["input_ids"][: len(prompt)] == prompt
        assert row["loss_mask"] == [0] * len(prompt) + [1] * row["tokens"]
        answer = tokenizer.decode(row["input_ids"][len(prompt) :], skip_special_tokens=True)
        assert answered["content"] == answer
        assert row["tokenizer"] == tokenizer_provenance(tokenizer)["tokenizer"]
    assert {row["finished"] for row in rows} == {True, False}  # both kinds were seen


@pytest.mark.parametrize("thinking", [None, False])
def test_thinking_is_for_the_template_of_every_turn(self_made, monkeypatch, tmp_path, thinking):
    asked = calls_of(monkeypatch, selfmade, "prompt_ids")
    row = {"messages": [{"role": "user", "content": "a"}], "follow_up": "b"}
    rows_made(
        self_made,
        prompts=write_rows(tmp_path / "prompts.jsonl", [row]),
        thinking=thinking,
        template_kwargs={"effort": "high"},
        max_new_tokens=120,
    )
    # before the model is loaded, and for each turn
    assert [given[2:4] for given in asked] == [(thinking, {"effort": "high"})] * 3


def test_a_seed_decides_the_file_and_no_batch_of_it_is_one_of_another(self_made):
    first = bytes_made(self_made, seed=1)
    assert bytes_undisturbed(self_made, seed=1) == first
    rows = [
        rows_made(
            self_made, output=f"{self_made.output}{seed}", seed=seed, conversations=2, batch_size=1
        )
        for seed in (1, 2)
    ]
    assert rows[0][0]["messages"] != rows[1][0]["messages"]
    assert rows[0][1]["messages"] != rows[1][0]["messages"]


def repeats_and_drops(prompt, sampling, generator):
    """Prompts out of a small set, and one answer in three is empty."""
    draw = int(torch.randint(30, (), generator=generator))
    if "min_p" in sampling:
        return f"tell me {draw}"
    return f"no {draw}" if draw % 3 else ""


@pytest.mark.parametrize(
    ("conversations", "numbers"), [(3, [0, 2, 3]), (100, [0, 2, 3, 4, 5, 6, 7, 8, 9])]
)
def test_as_many_given_prompts_are_answered_in_order_as_conversations_are_asked_for(
    self_made, tmp_path, answers, conversations, numbers
):
    answers(lambda prompt, *_: "" if "abc 1" in prompt else "yes")  # one answer is dropped
    path = write_prompts(tmp_path / "prompts.jsonl", [f"abc {i}" for i in range(10)])
    rows = rows_made(self_made, prompts=path, conversations=conversations)
    assert prompts_in(rows) == [f"abc {i}" for i in numbers]


@pytest.fixture
def mixed(self_made, tmp_path):
    """Prompts of two temperatures in any order, some with a second turn."""
    rows = []
    for i in range(24):
        row = {
            "kind": "even" if i % 2 == 0 else "odd",
            "temperature": 0.0 if i % 3 == 0 else 0.9,
            "prompt": f"question {i}",
        }
        if i % 4 == 0:
            row["follow_up"] = "why?"
        rows.append(row)
    path = write_rows(tmp_path / "mixed.jsonl", rows)
    return changed(self_made, prompts=path, conversations=24, min_distinct=0.0, max_new_tokens=40)


def test_each_prompt_is_answered_at_its_temperature_and_asked_on(mixed, answers):
    answers(
        lambda _, sampling, __: (
            f"at {sampling['temperature']}" if sampling["do_sample"] else "greedy"
        )
    )
    rows = rows_made(mixed)
    assert sorted(prompts_in(rows)) == sorted(f"question {i}" for i in range(24))
    for row in rows:
        number = int(row["messages"][0]["content"].split()[1])
        assert row["kind"] == ("even" if number % 2 == 0 else "odd")
        answer = {"role": "assistant", "content": "at 0.9" if number % 3 else "greedy"}
        asked_on = [{"role": "user", "content": "why?"}, answer] if number % 4 == 0 else []
        assert row["messages"][1:] == [answer, *asked_on]
        assert row["tokens"] == len(answer["content"]) * (2 if asked_on else 1)  # a token each byte


@pytest.mark.parametrize(
    ("what", "state_write", "after"),
    [
        *(("own", number, after) for number, after in ((1, False), (2, True), (3, False))),
        *(("two temperatures", number, True) for number in (2, 4)),
        *(("dropped answers", number, True) for number in range(2, 9)),
    ],
)
def test_killed_around_a_write_of_the_state_the_file_comes_out_the_same(
    self_made, mixed, answers, what, state_write, after
):
    """Prompts whose answers were dropped are remembered, too."""
    config = mixed if what == "two temperatures" else self_made
    if what == "dropped answers":
        answers(repeats_and_drops)
        config = changed(config, conversations=16)
    killed_at(config, state_write, after)
    assert bytes_made(config) == bytes_undisturbed(config)


def test_answers_that_were_cut_off_are_dropped_where_wished_and_counted(mixed, tmp_path, capsys):
    kept = rows_made(mixed)
    cut = sum(not row["finished"] for row in kept)
    assert 0 < cut < len(kept)
    assert f"{cut} cut off after 40" in capsys.readouterr().out
    finished = rows_made(mixed, output=str(tmp_path / "finished.jsonl"), unfinished="drop")
    assert all(row["finished"] for row in finished) and 0 < len(finished) < len(kept)


def test_a_finished_file_is_left_alone(self_made, request):
    content = bytes_made(self_made)
    request.getfixturevalue("nothing_loaded")
    assert bytes_made(self_made) == content


@pytest.mark.parametrize(
    ("option", "value"),
    [("seed", 5), ("temperature", 0.25), ("batch_size", 2), ("conversations", 8)],
)
def test_a_file_of_other_options_is_refused_with_both_values(begun, option, value):
    with refused(f"{option} = {getattr(begun, option)} {value}"):
        rows_made(begun, **{option: value})


def test_a_file_that_another_wrote_is_refused_and_kept(self_made, tmp_path):
    (tmp_path / "out.jsonl").write_text("precious\n")
    with refused("out.jsonl"):
        rows_made(self_made)
    assert (tmp_path / "out.jsonl").read_text() == "precious\n"


@pytest.mark.parametrize("damage", [os.remove, lambda path: os.truncate(path, 10)])
def test_a_file_that_lost_what_was_written_is_refused(begun, damage):
    damage(begun.output)
    with refused("out.jsonl"):
        rows_made(begun)


class Rounds(RoundObserver):
    """Counts rounds, and asks to stop after one of them."""

    def __init__(self, stop_after=0):
        self.count = 0
        self.stop_after = stop_after

    def round(self, finished):
        self.count += 1
        if self.count == self.stop_after:
            signal.raise_signal(signal.SIGTERM)


# of all rounds: in prompts and answers of any batch
@pytest.mark.parametrize("place", [0.0, 0.4, 0.9])
def test_a_batch_in_which_a_stop_is_wanted_is_thrown_away(self_made, tmp_path, place):
    rounds = Rounds()
    elsewhere = changed(self_made, output=f"{self_made.output}-whole")
    whole = make_conversations(elsewhere, [rounds]).read_bytes()
    stopping = Rounds(stop_after=1 + int(place * rounds.count))
    with refused("resumes", error=Stopped):
        make_conversations(self_made, [stopping])
    written = (tmp_path / "out.jsonl").read_bytes()
    assert whole.startswith(written) and len(written) < len(whole)
    assert bytes_made(self_made) == whole


def test_degenerate_texts_are_dropped(self_made, answers):
    prompts = iter(["a b c d " * 20, "tell me of ten good things", "and of some others too"])
    replies = iter(["x" * 60, "one two three four five"])
    answers(lambda _, sampling, __: next(prompts if "min_p" in sampling else replies))
    (row,) = rows_made(self_made, batch_size=3, conversations=1)
    found = [message["content"] for message in row["messages"]]
    assert found == ["and of some others too", "one two three four five"]


def test_the_distinct_share_counts_n_grams():
    assert distinct_share(list(range(20))) == 1
    assert distinct_share([7] * 20) == 1 / 17
    assert distinct_share([1, 2] * 10) == 2 / 17
    assert distinct_share([1, 2, 3] * 4, n=2) == 3 / 11
    assert distinct_share([7] * 10) == 1  # too short to say


def test_the_user_prefix_ends_where_the_users_words_begin(tokenizer, monkeypatch):
    assert user_prefix(tokenizer) == "<|im_start|>user\n"
    before = "<|im_start|>system\nHelp.<|im_end|>\n["
    monkeypatch.setattr(tokenizer, "chat_template", before + "{{ messages[0]['content'] }}]")
    assert user_prefix(tokenizer) == before


def test_a_tokenizer_without_a_padding_token_will_do(self_made, talker, tmp_path):
    folder = shutil.copytree(talker, tmp_path / "unpadded")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["pad_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "special_tokens_map.json").unlink(missing_ok=True)
    assert load_tokenizer(folder).pad_token is None
    assert bytes_undisturbed(self_made, target=str(folder)) == bytes_made(self_made)


@pytest.mark.parametrize(
    ("template", "prompts", "words"),
    [
        (None, None, "chat template"),
        ("{{ messages[0]['content'] | lower }}", None, "alters --prompts"),
        ("{{ raise_exception('no') }}", ["a", "b"], "prompts.jsonl 1 refuses"),
        ("{{ messages[0]['content'] }}", ["a", "b" * 1020], "2 1020"),
    ],
)
def test_what_the_tokenizer_tells_comes_before_the_model_is_loaded(
    self_made, talker, tmp_path, nothing_loaded, template, prompts, words
):
    folder = shutil.copytree(talker, tmp_path / "other")
    (folder / "chat_template.jinja").unlink()
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    path = prompts and write_prompts(tmp_path / "prompts.jsonl", prompts)
    with refused(words):
        rows_made(self_made, target=str(folder), prompts=path)


def test_prompts_that_cannot_be_answered_are_named_and_skipped(self_made, talker, tmp_path, capsys):
    folder = shutil.copytree(talker, tmp_path / "other")
    template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    refuses = "{% if 'refused' in messages[0].content %}{{ raise_exception('no') }}{% endif %}"
    (folder / "chat_template.jinja").write_text(refuses + template, encoding="utf-8")
    lines = [json.dumps({"prompt": f"question {i}"}) for i in range(40)]
    lines[3:4] = ["{broken", json.dumps({"prompt": "refused"}), json.dumps({"prompt": "x" * 1020})]
    path = write_rows(tmp_path / "prompts.jsonl", lines)
    config = changed(
        self_made, target=str(folder), prompts=path, conversations=42, min_distinct=0.0
    )
    asked = prompts_in(rows_made(config))
    assert len(asked) >= 30 and set(asked) <= {f"question {i}" for i in range(40) if i != 3}
    assert not lacking(capsys.readouterr().out, "3 42 7.1%", "4: JSON", "5: refuses", "6:")
    rejected = rows_of(tmp_path / "out.jsonl.rejected.jsonl")
    assert [row["where"] for row in rejected] == [f"{path}, line {number}" for number in (4, 5, 6)]
    elsewhere = changed(config, output=str(tmp_path / "refused.jsonl"))
    with refused("3 42 bad_rows"):
        rows_made(elsewhere, bad_rows="refuse")
    with refused("bad_rows_limit 0.01"):
        rows_made(elsewhere, bad_rows_limit=0.01)


def as_begun_by(config, change):
    """Change the state of the file as another version would have written it."""
    path = Path(config.output + ".state.json")
    state = json.loads(path.read_text())
    change(state)
    path.write_text(json.dumps(state))


def test_options_that_the_file_did_not_know_yet_count_as_their_defaults(begun):
    as_begun_by(begun, lambda state: state["options"].pop("template_kwargs"))
    with refused("template_kwargs None {'effort': 'high'}"):
        rows_made(begun, template_kwargs={"effort": "high"})
    assert bytes_made(begun) == bytes_undisturbed(begun)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state.update(tokenizer="0123"), "0123"),  # of another tokenizer
        (lambda state: state.pop("progress"), "elsewhere"),  # of servers
    ],
)
def test_tokens_of_something_else_are_not_added_to(begun, change, words):
    as_begun_by(begun, change)
    with refused(words):
        rows_made(begun)
