"""Self-made conversations: the same file for a seed, whatever happened while it was written."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal

import pytest
import torch
from helpers import Ended
from messages import refused
from runs import Killed, write_prompts, write_rows

from headstart.inference import load_tokenizer, tokenizer_provenance
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
def config(talker, tmp_path):
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


def changed(config, **changes):
    return SelfMadeConfig(**{**vars(config), **changes})


def made(config, **changes):
    """The bytes that a run writes."""
    return make_conversations(changed(config, **changes)).read_bytes()


def elsewhere(config):
    return {"output": config.output.replace("out.jsonl", "whole.jsonl")}


def rows_of(content):
    return [json.loads(line) for line in content.decode().splitlines()]


def die(*_):
    raise Killed


def killed_at(monkeypatch, config, state_write, after):
    """Run until a write of the state file, and die before or after it."""
    original, calls = selfmade._Output.write_state, []

    def write(*given):
        calls.append(given)
        if len(calls) == state_write and not after:
            raise Killed
        original(*given)
        if len(calls) == state_write:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(selfmade._Output, "write_state", write)
        with pytest.raises(Killed):
            make_conversations(config)


def test_the_file_holds_whole_conversations_of_the_models_own(config, tokenizer):
    rows = rows_of(made(config))
    assert len(rows) == 7
    prompts = [row["messages"][0]["content"] for row in rows]
    assert len({prompt.lower() for prompt in prompts}) == 7
    for row in rows:
        assert [message["role"] for message in check_conversation(row, "here")["messages"]] == [
            "user",
            "assistant",
        ]
        assert row["tokens"] == sum(row["loss_mask"]) <= 14
        assert row["finished"] or row["tokens"] == 14
        # the model's own end token
        assert row["finished"] == (row["input_ids"][-1] == tokenizer.eos_token_id)
        prompt = prompt_ids(tokenizer, row["messages"][:1])[0].tolist()
        assert row["input_ids"][: len(prompt)] == prompt
        assert row["loss_mask"] == [0] * len(prompt) + [1] * row["tokens"]
        answer = tokenizer.decode(row["input_ids"][len(prompt) :], skip_special_tokens=True)
        assert row["messages"][1] == {"role": "assistant", "content": answer}
        assert row["tokenizer"] == tokenizer_provenance(tokenizer)["tokenizer"]
    assert {row["finished"] for row in rows} == {True, False}  # both kinds were seen


def test_a_file_is_written_in_four_parts_at_least(config, monkeypatch):
    sizes, original = [], selfmade._batches
    monkeypatch.setattr(
        selfmade, "_batches", lambda *given: sizes.append(given[1]) or original(*given)
    )
    made(config, conversations=8, batch_size=1)
    assert sizes == [2]


@pytest.mark.parametrize("thinking", [None, False])
def test_thinking_is_for_the_template_of_every_turn(config, monkeypatch, tmp_path, thinking):
    asked, encoded = [], selfmade.prompt_ids
    monkeypatch.setattr(
        selfmade, "prompt_ids", lambda *given: asked.append(given[2:4]) or encoded(*given)
    )
    row = {"messages": [{"role": "user", "content": "a"}], "follow_up": "b"}
    made(
        config,
        prompts=write_rows(tmp_path / "prompts.jsonl", [row]),
        thinking=thinking,
        template_kwargs={"effort": "high"},
        max_new_tokens=120,
    )
    # before the model is loaded, and for each turn
    assert asked == [(thinking, {"effort": "high"})] * 3


def test_observers_watch_the_generations(config):
    ended = Ended()
    rows = rows_of(make_conversations(config, [ended]).read_bytes())
    tokens = sum(stats.tokens for stats in ended.stats)
    assert tokens >= sum(row["tokens"] - 1 for row in rows) > 0  # each prefill's token is left out


def test_a_seed_decides_the_file(config):
    first = made(config, seed=1)
    assert made(config, **elsewhere(config), seed=1) == first
    assert made(config, output=config.output + "2", seed=2) != first


def test_no_batch_of_a_seed_is_one_of_another(config):
    each = {"conversations": 2, "batch_size": 1}
    rows = [
        rows_of(made(config, output=f"{config.output}{seed}", seed=seed, **each)) for seed in (1, 2)
    ]
    assert rows[0][1]["messages"] != rows[1][0]["messages"]


def test_killed_in_the_middle_of_a_line_the_file_comes_out_the_same(config, monkeypatch):
    whole = made(config, **elsewhere(config))
    killed_at(monkeypatch, config, 2, after=True)
    with open(config.output, "ab") as file:
        file.write(b'{"source": "self-made", "mess')
    assert made(config) == whole


def fake_model(monkeypatch, tokenizer):
    """Prompts out of a small set, and one answer in three is empty: repeats and drops happen all
    the time."""

    def write(lm, prompts, slots, new_tokens, generator, **sampling):
        draws = torch.randint(30, (len(prompts),), generator=generator).tolist()
        if "min_p" in sampling:
            return [(tokenizer.encode(f"tell me {draw}"), True) for draw in draws]
        return [(tokenizer.encode(f"no {draw}") if draw % 3 else [], True) for draw in draws]

    monkeypatch.setattr(selfmade, "_continue", write)


def prompt_file(tmp_path, count):
    return write_prompts(tmp_path / "prompts.jsonl", [f"abc {i}" for i in range(count)])


def prompts_in(content):
    return [row["messages"][0]["content"] for row in rows_of(content)]


def test_given_prompts_are_answered_once_each_and_in_order(config, tmp_path):
    config = changed(config, prompts=prompt_file(tmp_path, 10), conversations=100, min_distinct=0.0)
    found = prompts_in(made(config))
    expected = [f"abc {i}" for i in range(10)]
    assert found == [prompt for prompt in expected if prompt in found]
    assert len(found) >= 8  # an answer may be empty


def test_as_many_given_prompts_are_answered_as_conversations_are_asked_for(
    config, tmp_path, monkeypatch, tokenizer
):
    def answered(lm, prompts, *_, **__):
        texts = [tokenizer.decode(prompt) for prompt in prompts]
        return [([] if "abc 1" in text else tokenizer.encode("yes"), True) for text in texts]

    monkeypatch.setattr(selfmade, "_continue", answered)
    config = changed(config, prompts=prompt_file(tmp_path, 10), conversations=3)
    assert prompts_in(made(config)) == [
        "abc 0",
        "abc 2",
        "abc 3",
    ]  # one answer was dropped, and there were more prompts


@pytest.mark.parametrize("first", [3, 5, 8])
def test_asking_for_more_conversations_later_skips_no_given_prompt(
    config, tmp_path, monkeypatch, tokenizer, first
):
    def answered(lm, prompts, *_, **__):
        return [(tokenizer.encode("yes"), True) for _ in prompts]

    monkeypatch.setattr(selfmade, "_continue", answered)
    config = changed(config, prompts=prompt_file(tmp_path, 10))
    made(config, conversations=first)
    refused = re.compile(f"conversations = {first}, not 10")  # that would be right as well
    try:
        found = made(config, conversations=10)
    except ValueError as error:
        if not refused.search(str(error)):
            raise
    else:
        assert prompts_in(found) == [f"abc {i}" for i in range(10)]


@pytest.fixture
def mixed(config, tmp_path):
    """Prompts of two temperatures in any order, some with a second turn."""
    rows = [
        {
            "kind": "even" if i % 2 == 0 else "odd",
            "temperature": 0.0 if i % 3 == 0 else 0.9,
            "prompt": f"question {i}",
        }
        | ({"follow_up": "why?"} if i % 4 == 0 else {})
        for i in range(24)
    ]
    path = write_rows(tmp_path / "mixed.jsonl", rows)
    return changed(config, prompts=path, conversations=24, min_distinct=0.0, max_new_tokens=40)


def test_each_prompt_is_answered_at_its_temperature_and_asked_on(mixed, monkeypatch, tokenizer):
    def answered(lm, prompts, slots, new_tokens, generator, **sampling):
        answer = f"at {sampling['temperature']}" if sampling["do_sample"] else "greedy"
        return [(tokenizer.encode(answer), True) for _ in prompts]

    monkeypatch.setattr(selfmade, "_continue", answered)
    rows = rows_of(made(mixed))
    assert sorted(row["messages"][0]["content"] for row in rows) == sorted(
        f"question {i}" for i in range(24)
    )
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
    config, mixed, monkeypatch, tokenizer, what, state_write, after
):
    """Prompts whose answers were dropped are remembered, too."""
    if what == "two temperatures":
        config = mixed
    elif what == "dropped answers":
        fake_model(monkeypatch, tokenizer)
        config = changed(config, conversations=16)
    whole = made(config, **elsewhere(config))
    killed_at(monkeypatch, config, state_write, after)
    assert made(config) == whole


def test_answers_that_were_cut_off_are_dropped_where_wished_and_counted(mixed, capsys):
    kept = rows_of(made(mixed))
    cut = sum(not row["finished"] for row in kept)
    assert 0 < cut < len(kept)
    assert f"{cut} cut off after 40" in capsys.readouterr().out
    finished = rows_of(made(mixed, **elsewhere(mixed), unfinished="drop"))
    assert all(row["finished"] for row in finished) and 0 < len(finished) < len(kept)
    assert "0 cut off after 40" in capsys.readouterr().out


def test_a_finished_file_is_left_alone(config, monkeypatch):
    content = made(config)
    monkeypatch.setattr(selfmade, "load_speculative_lm", lambda *_: pytest.fail("loaded something"))
    assert made(config) == content


@pytest.mark.parametrize(
    ("option", "value"), [("seed", 5), ("temperature", 0.25), ("batch_size", 2)]
)
def test_a_file_of_other_options_is_refused_with_both_values(config, monkeypatch, option, value):
    killed_at(monkeypatch, config, 2, after=True)
    with refused(f"{option} = {getattr(config, option)} {value}"):
        made(config, **{option: value})


def test_a_file_that_another_wrote_is_refused_and_kept(config):
    with open(config.output, "w", encoding="utf-8") as file:
        file.write("precious\n")
    with refused("out.jsonl"):
        made(config)
    with open(config.output, encoding="utf-8") as file:
        assert file.read() == "precious\n"


@pytest.mark.parametrize("damage", ["removed", "shortened"])
def test_a_file_that_lost_what_was_written_is_refused(config, monkeypatch, damage):
    killed_at(monkeypatch, config, 2, after=True)
    if damage == "removed":
        os.remove(config.output)
    else:
        os.truncate(config.output, 10)
    with refused("out.jsonl"):
        made(config)


# of all rounds: in prompts and answers of any batch
@pytest.mark.parametrize("place", [0.0, 0.4, 0.9])
def test_a_batch_in_which_a_stop_is_wanted_is_thrown_away(config, monkeypatch, place):
    original, rounds, after = selfmade._Watch.round, [], 0

    def watch(self, out):
        original(self, out)
        rounds.append(out)
        if len(rounds) == after:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(selfmade._Watch, "round", watch)
    whole = made(config, **elsewhere(config))
    after = 1 + int(place * len(rounds))
    rounds.clear()
    with pytest.raises(Stopped, match="the same command resumes"):
        made(config)
    with open(config.output, "rb") as file:
        written = file.read()
    assert whole.startswith(written) and len(written) < len(whole)
    rounds.clear()
    after = 0
    assert made(config) == whole


def test_degenerate_texts_are_dropped(config, monkeypatch, tokenizer):
    texts = iter(["a b c d " * 20, "tell me of ten good things", "and of some others too"])
    answers = iter(["x" * 60, "one two three four five"])

    def write(lm, given, slots, new_tokens, generator, **sampling):
        source = texts if "min_p" in sampling else answers
        return [(tokenizer.encode(next(source)), True) for _ in given]

    monkeypatch.setattr(selfmade, "_continue", write)
    config = changed(config, batch_size=3, conversations=1)
    (row,) = rows_of(made(config))
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


def test_a_tokenizer_without_a_padding_token_will_do(config, talker, tmp_path):
    whole = made(config, **elsewhere(config))
    folder = tmp_path / "unpadded"
    shutil.copytree(talker, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["pad_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "special_tokens_map.json").unlink(missing_ok=True)
    assert load_tokenizer(folder).pad_token is None
    assert made(config, target=str(folder)) == whole


@pytest.mark.parametrize(
    ("template", "prompts", "words"),
    [
        (None, None, "chat template"),
        ("{{ messages[0]['content'] | lower }}", None, "alters --prompts"),
        (
            "{{ raise_exception('no') }}",
            [{"prompt": "a"}, {"prompt": "b"}],
            "prompts.jsonl 1 refuses",
        ),
        ("{{ messages[0]['content'] }}", [{"prompt": "a"}, {"prompt": "b" * 1020}], "2 1020"),
    ],
)
def test_what_the_tokenizer_tells_comes_before_the_model_is_loaded(
    config, talker, tmp_path, monkeypatch, template, prompts, words
):
    folder = tmp_path / "other"
    shutil.copytree(talker, folder)
    (folder / "chat_template.jinja").unlink()
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    monkeypatch.setattr(selfmade, "load_speculative_lm", lambda *_: pytest.fail("loaded something"))
    path = write_rows(tmp_path / "prompts.jsonl", prompts or [])
    with refused(words):
        made(config, target=str(folder), prompts=prompts and path)


def test_prompts_that_cannot_be_answered_are_named_and_skipped(config, talker, tmp_path, capsys):
    folder = tmp_path / "other"
    shutil.copytree(talker, folder)
    template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    refuses = "{% if 'refused' in messages[0].content %}{{ raise_exception('no') }}{% endif %}"
    (folder / "chat_template.jinja").write_text(refuses + template, encoding="utf-8")
    lines = [json.dumps({"prompt": f"question {i}"}) for i in range(40)]
    lines[3:4] = ["{broken", json.dumps({"prompt": "refused"}), json.dumps({"prompt": "x" * 1020})]
    path = write_rows(tmp_path / "prompts.jsonl", lines)
    options = {
        "target": str(folder),
        "prompts": path,
        "conversations": 42,
        "min_distinct": 0.0,
    }
    asked = prompts_in(made(config, **options))
    assert len(asked) >= 30 and set(asked) <= {f"question {i}" for i in range(40) if i != 3}
    told = capsys.readouterr().out
    assert "3 of 42 rows (7.1%) cannot be answered and are skipped" in told
    assert "line 4: not JSON" in told and "line 5: the chat template refuses" in told
    assert "line 6: the prompt has" in told
    rejected = rows_of((tmp_path / "out.jsonl.rejected.jsonl").read_bytes())
    assert [row["where"] for row in rejected] == [f"{path}, line {number}" for number in (4, 5, 6)]
    with refused("3 42 bad_rows"):
        made(config, **options, **elsewhere(config), bad_rows="refuse")
    with refused("bad_rows_limit 0.01"):
        made(config, **options, **elsewhere(config), bad_rows_limit=0.01)


def as_begun_by(config, change):
    """Change the state of the file as another version would have written it."""
    path = config.output + ".state.json"
    with open(path, encoding="utf-8") as file:
        state = json.load(file)
    change(state)
    with open(path, "w", encoding="utf-8") as file:
        json.dump(state, file)


def test_options_that_the_file_did_not_know_yet_count_as_their_defaults(config, monkeypatch):
    whole = made(config, **elsewhere(config))
    killed_at(monkeypatch, config, 2, after=True)
    as_begun_by(config, lambda state: state["options"].pop("template_kwargs"))
    with refused("template_kwargs None {'effort': 'high'}"):
        made(config, template_kwargs={"effort": "high"})
    assert made(config) == whole


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state.update(tokenizer="0123"), "0123"),  # of another tokenizer
        (lambda state: state.pop("progress"), "elsewhere"),  # of servers
    ],
)
def test_tokens_of_something_else_are_not_added_to(config, monkeypatch, change, words):
    killed_at(monkeypatch, config, 2, after=True)
    as_begun_by(config, change)
    with refused(words):
        made(config)
