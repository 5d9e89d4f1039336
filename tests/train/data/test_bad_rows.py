"""A row that cannot be used costs that row: all are named at one start, before a model is
loaded."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers import build_tokenizer
from messages import lacking, refused
from runs import write_rows

from headstart.inference import Target, tokenizer_provenance
from headstart.train import inputs
from headstart.train.config import DataConfig
from headstart.train.data.bad_rows import allowed, report_unused_rows
from headstart.train.data.conversations import open_sources
from headstart.train.data.split import split_cache
from headstart.train.data.token_cache import Rendering, TokenCache, cached_sequences
from headstart.train.loop import train

GOOD = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}
USER = GOOD["messages"][0]


def messages(*answers: Any) -> dict[str, Any]:
    return {"messages": [USER, *answers]}


BROKEN: dict[str, tuple[Any, str]] = {
    "a function call": (
        {
            "conversations": [
                {"from": "human", "value": "a"},
                {"from": "function_call", "value": "{}"},
            ]
        },
        "'conversations'",
    ),
    "a function_call of no function": (
        messages({"role": "assistant", "content": None, "function_call": {"arguments": "{}"}}),
        "1 'name'",
    ),
    "a null answer": (messages({"role": "assistant", "content": None}), "1 needs"),
    "an image": (
        messages(
            {"role": "assistant", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
        ),
        "1 'image_url'",
    ),
    "an unknown role": (messages({"role": "robot", "content": "a"}), "1 'robot'"),
    "a long role": (messages({"role": "x" * 9000, "content": "a"}), "1 role"),
    "a role that is a list": (
        {"messages": [{"role": ["user"], "content": "a"}]},
        "message 0 has role ['user']",
    ),
    "other columns": ({"prompt": "a", "completion": "b"}, "'prompt/completion'"),
    "no messages": ({"messages": []}, "'messages' empty"),
    "no JSON": ("{broken", "JSON"),
    "no object": ("17", "conversation"),
    "too deep": ("[" * 100_000, "JSON"),
    "half a character": (messages({"role": "assistant", "content": "\ud83d"}), "tokenizer read"),
    "tool calls that are no list": (
        messages({"role": "assistant", "content": None, "tool_calls": 3}),
        "needs 'tool_calls' 3",
    ),
    "refused by the template": (
        {"messages": [{"role": "assistant", "content": "I start"}]},
        "refuses",
    ),
    "tokens without a mask": ({"input_ids": [1, 2], "loss_mask": [1]}, "'input_ids' 2"),
    "a token beyond the embedding": ({"input_ids": [1, 258], "loss_mask": [0, 1]}, "258"),
}


@pytest.fixture
def options(run_options, changed, tmp_path):
    """The options of a run over these rows."""

    def of(rows: list[Any], **data: Any) -> Any:
        given = {
            "sources": [write_rows(tmp_path / "rows.jsonl", rows)],
            "cache": str(tmp_path / "cache"),
            **data,
        }
        return changed(
            run_options(tmp_path / "run", 1), data=given, loop={"eval_every": 0, "save_every": 0}
        )

    return of


def encoded(path: str, cache: Path, num_proc: int | None = None, **changes: Any) -> TokenCache:
    tokenizer = build_tokenizer()
    given: dict[str, Any] = {"max_length": 100, "vocab_size": 258, **changes}
    how = Rendering(tokenizer, frozenset({tokenizer.eos_token_id}), thinking=None, **given)
    return cached_sequences(open_sources([path]), how, str(cache), num_proc)


@pytest.mark.parametrize("first", [False, True], ids=["among good rows", "first"])
@pytest.mark.parametrize(("row", "words"), BROKEN.values(), ids=BROKEN)
def test_a_row_that_cannot_be_used_costs_that_row(tmp_path, row, words, first):
    rows = [row, GOOD, GOOD, GOOD] if first else [GOOD, GOOD, row, GOOD]
    # The first row's format is that of the source, and a file that begins so deep is an array.
    if first and row in [
        BROKEN[what][0] for what in ("a function call", "other columns", "too deep")
    ]:
        rows = [GOOD, row, GOOD, GOOD]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    cache = encoded(path, tmp_path / "cache")
    (unused,) = cache.unused
    assert (unused.why, unused.source) == ("rejected", path)
    assert unused.where == f"{path}, line {rows.index(row) + 1}"
    assert not lacking(unused.reason, words) and len(unused.reason) < 1000
    assert sorted(cache.conversations_N.tolist()) == [i for i in range(4) if i != rows.index(row)]
    # What a cache remembers is what was found.
    assert encoded(path, tmp_path / "cache").unused == cache.unused


@pytest.mark.parametrize("num_proc", [None, 3])
def test_of_200_rows_with_ten_broken_ones_one_start_uses_190_and_names_ten(
    options, tmp_path, caplog, num_proc
):
    rows: list[Any] = [GOOD] * 200
    broken = list(BROKEN.values())[:10]
    for place, (row, _) in enumerate(broken):
        rows[7 + 19 * place] = row
    caplog.set_level(logging.INFO, "headstart")
    config = options(rows, num_proc=num_proc)
    train(config)
    told = "\n".join(record.getMessage() for record in caplog.records)
    assert "200 rows read, 190 used, 0 of them truncated at data.max_length" in told
    rejected = tmp_path / "run" / "rejected.jsonl"
    assert f"10 skipped ({rejected})" in told
    found = [json.loads(line) for line in rejected.read_text(encoding="utf-8").splitlines()]
    for place, (line, (_, words)) in enumerate(zip(found, broken, strict=True)):
        where = f"{config.data.sources[0]}, line {8 + 19 * place}"
        assert (line["source"], line["where"]) == (config.data.sources[0], where)
        assert not lacking(line["reason"], words)
        assert f"{where}: {line['reason']}" in told


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        (
            {"bad_rows_limit": 0.04},
            "data.bad_rows_limit allows 0.04; mend them, or allow as many with data.bad_rows_limit",
        ),
        ({"bad_rows": "refuse"}, "mend them, or leave them out with data.bad_rows skip"),
        ({"bad_rows_limit": 0.0}, "data.bad_rows_limit allows 0.0"),
    ],
)
def test_too_many_are_named_in_one_error_before_the_target_is_loaded(
    options, tmp_path, monkeypatch, limit, words
):
    monkeypatch.setattr(inputs, "load_target", lambda *_: pytest.fail("loaded the target"))
    rows: list[Any] = [GOOD] * 20
    rows[4] = rows[9] = "{broken"
    config = options(rows, **limit)
    with refused("2 20 (10.0%)") as error:
        train(config)
    assert words in str(error.value)
    for line in (5, 10):
        assert f"{config.data.sources[0]}, line {line}: not JSON" in str(error.value)
    assert len((tmp_path / "run" / "rejected.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("broken", [20, 25])
def test_twenty_rows_are_named_and_the_others_counted(options, broken):
    with refused(f"{broken} rejected.jsonl") as error:
        train(options([GOOD] * 5 + ["{broken"] * broken))
    assert str(error.value).count("not JSON") == 20
    assert ("and 5 more" in str(error.value)) is (broken == 25)


def test_as_many_as_the_error_advises_are_enough():
    for rejected, rows in ((10, 200), (1, 3), (7, 999), (33, 1000)):
        for share in (0.0, 0.001):
            data = DataConfig(bad_rows_limit=share)
            assert allowed(data, rows) < rejected
        needed = -(-1000 * rejected // rows) / 1000
        assert allowed(DataConfig(bad_rows_limit=needed), rows) >= rejected


@pytest.mark.parametrize(
    ("rows", "number"),
    [(10, 1), (20, 2), (100, 10), (200, 10), (1000, 10), (5000, 50), (100_000, 1000)],
)
def test_without_a_limit_a_percent_or_ten_that_are_few_are_allowed(rows, number):
    assert allowed(DataConfig(), rows) == pytest.approx(number)
    assert allowed(DataConfig(bad_rows="refuse"), rows) == 0


def test_answers_beyond_the_longest_sequence_and_rows_without_one_are_counted(options, caplog):
    long = {
        "messages": [
            {"role": "user", "content": "long " * 40},
            {"role": "assistant", "content": "a"},
        ]
    }
    cut = {"messages": [USER, {"role": "assistant", "content": "word " * 40}]}
    asked = {"messages": [USER]}
    caplog.set_level(logging.INFO, "headstart")
    train(options([GOOD] * 4 + [long] * 3 + [cut] * 2 + [asked], max_length=64))
    told = [record.getMessage() for record in caplog.records]
    assert (
        "10 rows read, 6 used, 2 of them truncated at data.max_length 64; 3 dropped whose answers"
        " begin after it; 1 without an answer; 0 skipped" in told
    )


def test_no_answer_within_the_longest_sequence_is_an_error_that_names_it(options):
    long = {
        "messages": [
            {"role": "user", "content": "long " * 40},
            {"role": "assistant", "content": "a"},
        ]
    }
    with refused("5 data.max_length 64 larger"):
        train(options([long] * 5, max_length=64))
    with refused("5"):
        train(options([long] * 5 + [GOOD], max_length=64))


def test_rows_of_tokens_need_no_chat_template(target_folder, options, tmp_path, changed):
    folder = tmp_path / "base"
    shutil.copytree(target_folder, folder)
    for path in folder.glob("chat_template*"):
        path.unlink()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokens = {"input_ids": [5, 6, 7, 8, 9], "loss_mask": [0, 0, 1, 1, 1]}
    for number, row in enumerate((tokens, {"prompt": "one", "completion": " two"})):
        train(changed(options([row] * 4), target=str(folder), output=str(tmp_path / str(number))))
    with refused("base' input_ids loss_mask completion"):
        train(changed(options([GOOD] * 4), target=str(folder), output=str(tmp_path / "refused")))


def test_several_rows_of_tokens_are_one_conversation(tmp_path, options):
    """None of them is held out while another is trained on."""
    rows = []
    for number in range(20):
        for sequence in (1, 2, 3):
            tokens = {"input_ids": [number, sequence, 7], "loss_mask": [0, 0, 1]}
            rows.append({**tokens, "sequence": sequence, "sequences": 3})
    # a column of something else
    rows.append({"input_ids": [99, 0, 7], "loss_mask": [0, 0, 1], "sequence": "1"})
    cache = encoded(write_rows(tmp_path / "rows.jsonl", rows), tmp_path / "cache")
    assert cache.conversations_N.tolist() == [3 * (i // 3) for i in range(60)] + [60]
    training, held_out = split_cache(cache, options(rows, held_out=0.3))
    both = {each.tokens[0] for each in training} & {each.tokens[0] for each in held_out}
    assert not both and len(held_out) > 3


def test_a_target_whose_configs_do_not_say_all_is_read_for_again(options, monkeypatch):
    """As where transformers changes the end tokens while loading: the data are as the loaded target
    says."""
    monkeypatch.setattr(Target, "end_tokens", frozenset({5}))
    seen, original = [], inputs.load_data
    monkeypatch.setattr(
        inputs, "load_data", lambda *given: seen.append(given[3].eos) or original(*given)
    )
    train(options([GOOD] * 4))
    assert len(seen) == 2 and 5 in seen[1] and 5 not in seen[0]


def test_token_ids_of_another_tokenizer_are_refused_by_both_fingerprints(tmp_path):
    tokenizer = build_tokenizer()
    own = tokenizer_provenance(tokenizer)["tokenizer"]
    tokens = {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}
    rows = [
        {**tokens, "tokenizer": named} for named in (own, "0123456789abcdef", None, "a name")
    ] + [tokens, GOOD]
    name = write_rows(tmp_path / "rows.jsonl", rows)
    how = Rendering(tokenizer, frozenset({tokenizer.eos_token_id}), 100, None)
    cache = cached_sequences(open_sources([name]), how, str(tmp_path / "cache"))
    (row,), used = cache.unused, cache.conversations_N.tolist()
    assert used == [0, 2, 3, 4, 5] and row.where == f"{name}, line 2"
    assert (
        f"a tokenizer with the fingerprint 0123456789abcdef, and the target's has {own}; train"
        in row.reason
    )
    with refused("1 6 0123456789abcdef"):
        report_unused_rows(cache, DataConfig(bad_rows="refuse"), 100, None)
