"""A row that cannot be used costs that row: all are named at one start, before a model is
loaded."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers import build_tokenizer, calls_of
from messages import lacking, refused
from runs import changed, rows_of, write_rows

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
    "other turns": ({"conversations": [{"from": "robot", "value": "a"}]}, "'conversations'"),
    "a null answer": (messages({"role": "assistant", "content": None}), "1 needs"),
    "an image": (
        messages({"role": "assistant", "content": [{"type": "image_url"}]}),
        "1 'image_url'",
    ),
    "a long role": (messages({"role": "x" * 9000, "content": "a"}), "1 role"),
    "other columns": ({"prompt": "a", "completion": "b"}, "'prompt/completion'"),
    "no messages": ({"messages": []}, "'messages' empty"),
    "no JSON": ("{broken", "JSON"),
    "no object": ("17", "conversation"),
    "half a character": (messages({"role": "assistant", "content": "\ud83d"}), "tokenizer read"),
    "refused by the template": (
        {"messages": [{"role": "assistant", "content": "I start"}]},
        "refuses",
    ),
    "too deep": ("[" * 100_000, "JSON"),
    "tokens without a mask": ({"input_ids": [1, 2], "loss_mask": [1]}, "'input_ids' 2"),
    "a token beyond the embedding": ({"input_ids": [1, 258], "loss_mask": [0, 1]}, "258"),
}
LONG = {
    "messages": [{"role": "user", "content": "long " * 40}, {"role": "assistant", "content": "a"}]
}
"""An answer that begins after 64 tokens."""


@pytest.fixture
def run_over(short, tmp_path):
    """The options of a step over these rows: `run_over(rows, **options of data)`."""

    def of(rows: list[Any], **data: Any) -> Any:
        sources = [write_rows(tmp_path / "rows.jsonl", rows)]
        given = {"sources": sources, "cache": str(tmp_path / "cache"), **data}
        return changed(short, data=given, loop={"max_steps": 1})

    return of


def cache_beside(path: str) -> TokenCache:
    """The cache of a source, beside it."""
    tokenizer = build_tokenizer()
    how = Rendering(tokenizer, frozenset({tokenizer.eos_token_id}), 100, None, vocab_size=258)
    return cached_sequences(open_sources([path]), how, str(Path(path).parent / "cache"), None)


@pytest.mark.parametrize("first", [False, True], ids=["among good rows", "first"])
@pytest.mark.parametrize(("row", "words"), BROKEN.values(), ids=BROKEN)
def test_a_row_that_cannot_be_used_costs_that_row(tmp_path, row, words, first):
    rows = [row, GOOD, GOOD, GOOD] if first else [GOOD, GOOD, row, GOOD]
    # The first row's format is that of the source, and a file that begins so deep is an array.
    if first and row in [BROKEN[what][0] for what in ("other turns", "other columns", "too deep")]:
        rows = [GOOD, row, GOOD, GOOD]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    cache = cache_beside(path)
    (unused,) = cache.unused
    assert (unused.why, unused.source) == ("rejected", path)
    assert unused.where == f"{path}, line {rows.index(row) + 1}"
    assert not lacking(unused.reason, words) and len(unused.reason) < 1000
    assert sorted(cache.conversations_N.tolist()) == [i for i in range(4) if i != rows.index(row)]
    # What a cache remembers is what was found.
    assert cache_beside(path).unused == cache.unused


@pytest.mark.parametrize("num_proc", [None, 3])
def test_of_200_rows_with_ten_broken_ones_one_start_uses_190_and_names_ten(
    run_over, tmp_path, capsys, num_proc
):
    rows: list[Any] = [GOOD] * 200
    broken = list(BROKEN.values())[:10]
    for place, (row, _) in enumerate(broken):
        rows[7 + 19 * place] = row
    config = run_over(rows, num_proc=num_proc)
    train(config)
    rejected = tmp_path / "run" / "rejected.jsonl"
    told = capsys.readouterr().out
    assert not lacking(told, f"200 190 0 data.max_length 10 {rejected}")
    for place, (line, (_, words)) in enumerate(zip(rows_of(rejected), broken, strict=True)):
        where = f"{config.data.sources[0]}, line {8 + 19 * place}"
        assert (line["source"], line["where"]) == (config.data.sources[0], where)
        assert not lacking(line["reason"], words)
        assert not lacking(told, f"{8 + 19 * place}:")


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        # 2 of 21 are 0.0952...; the limit that would allow them is rounded up
        ({"bad_rows_limit": 0.04}, "data.bad_rows_limit 0.04 0.096"),
        ({"bad_rows": "refuse"}, "data.bad_rows skip"),
        ({"bad_rows_limit": 0.0}, "data.bad_rows_limit 0.0 0.096"),
    ],
)
def test_too_many_are_named_in_one_error_before_the_target_is_loaded(
    run_over, tmp_path, monkeypatch, limit, words
):
    monkeypatch.setattr(inputs, "load_target", lambda *_: pytest.fail("loaded the target"))
    rows: list[Any] = [GOOD] * 21
    rows[4] = rows[9] = "{broken"
    config = run_over(rows, **limit)
    with refused(f"2 21 (9.5%) {words} {config.data.sources[0]}, 5: 10:"):
        train(config)
    assert len(rows_of(tmp_path / "run" / "rejected.jsonl")) == 2


@pytest.mark.parametrize(("broken", "more"), [(20, []), (25, ["5"])])
def test_twenty_rows_are_named_and_the_others_counted(run_over, broken, more):
    with refused(f"{broken} rejected.jsonl", *more) as error:
        train(run_over([GOOD] * 5 + ["{broken"] * broken))
    assert str(error.value).count("JSON:") == 20


@pytest.mark.parametrize(
    ("rows", "number"),
    [(10, 1), (20, 2), (100, 10), (200, 10), (1000, 10), (5000, 50), (100_000, 1000)],
)
def test_without_a_limit_a_percent_or_ten_that_are_few_are_allowed(rows, number):
    assert allowed(DataConfig(), rows) == pytest.approx(number)
    assert allowed(DataConfig(bad_rows="refuse"), rows) == 0


def test_answers_beyond_the_longest_sequence_and_rows_without_one_are_counted(run_over, capsys):
    cut = messages({"role": "assistant", "content": "word " * 40})
    asked = {"messages": [USER]}
    train(run_over([GOOD] * 4 + [LONG] * 3 + [cut] * 2 + [asked], max_length=64))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "10 rows read" in line]
    # read, used, truncated, the limit, dropped, without an answer, skipped
    assert re.findall(r"\d+", line) == ["10", "6", "2", "64", "3", "1", "0"]


def test_no_answer_within_the_longest_sequence_is_an_error_that_names_it(run_over):
    with refused("5 data.max_length 64 larger"):
        train(run_over([LONG] * 5, max_length=64))
    with refused("5"):
        train(run_over([LONG] * 5 + [GOOD], max_length=64))


def test_rows_of_tokens_need_no_chat_template(target_folder, run_over, tmp_path):
    folder = shutil.copytree(target_folder, tmp_path / "base")
    for path in folder.glob("chat_template*"):
        path.unlink()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokens = {"input_ids": [5, 6, 7, 8, 9], "loss_mask": [0, 0, 1, 1, 1]}
    for number, row in enumerate((tokens, {"prompt": "one", "completion": " two"})):
        train(changed(run_over([row] * 4), target=str(folder), output=str(tmp_path / str(number))))
    with refused("base' input_ids loss_mask completion"):
        train(changed(run_over([GOOD] * 4), target=str(folder), output=str(tmp_path / "refused")))


def test_several_rows_of_tokens_are_one_conversation(tmp_path, run_over):
    """None of them is held out while another is trained on."""
    rows = []
    for number in range(20):
        for sequence in (1, 2, 3):
            tokens = {"input_ids": [number, sequence, 7], "loss_mask": [0, 0, 1]}
            rows.append({**tokens, "sequence": sequence, "sequences": 3})
    # a column of something else
    rows.append({"input_ids": [99, 0, 7], "loss_mask": [0, 0, 1], "sequence": "1"})
    cache = cache_beside(write_rows(tmp_path / "rows.jsonl", rows))
    assert cache.conversations_N.tolist() == [3 * (i // 3) for i in range(60)] + [60]
    training, held_out = split_cache(cache, run_over(rows, held_out=0.3))
    both = {each.tokens[0] for each in training} & {each.tokens[0] for each in held_out}
    assert not both and len(held_out) > 3


def test_a_target_whose_configs_do_not_say_all_is_read_for_again(run_over, monkeypatch):
    """As where transformers changes the end tokens while loading: the data are as the loaded target
    says."""
    monkeypatch.setattr(Target, "end_tokens", frozenset({5}))
    seen = calls_of(monkeypatch, inputs, "load_data")
    train(run_over([GOOD] * 4))
    assert [5 in given[3].eos for given in seen] == [False, True]


def test_token_ids_of_another_tokenizer_are_refused_by_both_fingerprints(tmp_path):
    own = tokenizer_provenance(build_tokenizer())["tokenizer"]
    other = "0123456789abcdef"
    tokens = {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}
    named = [{**tokens, "tokenizer": name} for name in (own, other, None, "a name")]
    cache = cache_beside(write_rows(tmp_path / "rows.jsonl", [*named, tokens, GOOD]))
    (row,) = cache.unused
    assert row.row == 1 and not lacking(row.reason, f"{other} {own}")
    with refused(f"1 6 {other}"):
        report_unused_rows(cache, DataConfig(bad_rows="refuse"), 100, None)
