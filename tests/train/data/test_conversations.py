"""Sources and formats: what people have becomes messages, and what is none is named by file and
row."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import pickle
import shutil
from pathlib import Path

import pytest
import yaml
from datasets import Dataset, DatasetDict
from messages import refused
from runs import write_rows

from headstart.inference.text.messages import check_conversation
from headstart.train.data.conversations import (
    check_row,
    open_source,
    open_sources,
    parsed_name,
    read_conversations,
)

USER = {"role": "user", "content": "hi"}
MESSAGES = [USER, {"role": "assistant", "content": "yo"}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
PAIR = {"prompt": "hi", "completion": "yo"}


ROWS = {
    "messages": {"messages": MESSAGES},
    "ShareGPT": {
        "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]
    },
    "conversations of messages": {"id": "0", "conversations": MESSAGES},
    "mixed turns": {
        "conversations": [
            {"role": "human", "content": "hi"},
            {"from": "gpt", "value": "yo", "role": None},
        ]
    },
    "prompt and completion": PAIR,
    "the same as messages": {"prompt": MESSAGES[:1], "completion": MESSAGES[1:]},
    "parts": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": part} for part in "hi"]},
            {"role": "assistant", "content": [{"type": "text", "text": "yo"}]},
        ]
    },
    "messages first": {"prompt": "another column", "messages": MESSAGES},
    "null": {"conversations": None, "messages": MESSAGES},
}


@pytest.fixture
def source_of(tmp_path):
    """Writes rows as a source, and names it: `source_of("parquet", rows)`."""

    def write(kind, rows):
        path = tmp_path / f"data.{kind}"
        if kind == "jsonl":
            write_rows(path, rows)
        elif kind == "json":
            path.write_text("\n " + json.dumps(rows), encoding="utf-8")
        elif kind == "parquet":
            Dataset.from_list(rows).to_parquet(str(path))
        elif kind == "folder of a file":
            path.mkdir()
            write_rows(path / "data.jsonl", rows)
        else:
            Dataset.from_list(rows).save_to_disk(path)
        return str(path)

    return write


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "saved"])
def test_every_format_in_every_kind_of_source_becomes_messages(source_of, row, kind):
    name = source_of(kind, [row, row])
    assert [each["messages"] for each in read_conversations(name)] == [MESSAGES, MESSAGES]
    assert len(read_conversations(name, 1)) == 1


def test_sharegpt_has_other_roles_and_a_system_prompt_beside_the_turns():
    speakers = {"human": "user", "gpt": "assistant", "observation": "tool"}
    turns = [{"from": speaker, "value": "a"} for speaker in speakers]
    row = check_conversation({"system": "s", "conversations": turns}, "here")
    system, *rest = row["messages"]
    assert (system["role"], system["content"]) == ("system", "s")
    assert [message["role"] for message in rest] == list(speakers.values())
    row = check_conversation({"system": "", "conversations": MESSAGES}, "here")
    assert row["messages"] == MESSAGES


@pytest.mark.parametrize(
    "turn",
    [
        {"from": "function_call", "value": json.dumps(CALL["function"])},
        {"from": "function_call", "value": json.dumps([CALL["function"]])},
        {"role": "tool_call", "content": json.dumps(CALL["function"])},
        {"role": "assistant", "content": None, "function_call": CALL["function"]},
        {"role": "assistant", "tool_calls": [CALL]},
        CALLED,
    ],
)
@pytest.mark.parametrize(
    "answer",
    [{"from": "observation", "value": "2"}, {"role": "function", "name": "add", "content": "2"}],
)
@pytest.mark.parametrize("tools", [[CALL], json.dumps([CALL]), [json.dumps(CALL)]])
def test_calls_and_their_results_in_the_forms_of_other_trainers(turn, answer, tools):
    turns = [{"from": "human", "value": "1 + 1?"}, turn, answer, {"from": "gpt", "value": "2"}]
    row = check_conversation({"conversations": turns, "tools": tools}, "here")
    asked, called, told, said = row["messages"]
    assert called == CALLED
    assert (asked["role"], told["role"], told["content"]) == ("user", "tool", "2")
    assert said == {"role": "assistant", "content": "2"} and row["tools"] == [CALL]


def test_arguments_that_are_text_stay_text():
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    row = check_conversation({"messages": [USER, CALLED | {"tool_calls": [call]}]}, "here")
    assert row["messages"][1]["tool_calls"] == [call]


def test_keys_that_only_other_rows_have_do_not_come_back_from_arrow_as_nulls(source_of):
    rows = [{"messages": MESSAGES}, {"messages": [USER, CALLED]}]
    found = read_conversations(source_of("parquet", rows))
    assert [row["messages"] for row in found] == [row["messages"] for row in rows]


def answered(**answer):
    return {"messages": [USER, {"role": "assistant", **answer}]}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (answered(tool_calls=[{"name": "f", "arguments": "{"}]), "JSON"),
        (answered(content=None, tool_calls=3), "1 'tool_calls' 3"),
        (answered(content=None, function_call={"arguments": "{}"}), "1 'name'"),
        ({"messages": [{"role": ["user"], "content": "a"}]}, "0 ['user']"),
        ({"messages": MESSAGES, "tools": "{"}, "'tools' JSON"),
        ({"messages": MESSAGES, "tools": ["{"]}, "there 'tools' JSON"),
        ({"messages": MESSAGES, "tools": "[" * 100_000}, "'tools' JSON"),
        ({"conversations": [{"from": "robot", "value": "x"}]}, "0 'robot'"),
        ({"conversations": [{"from": "gpt"}]}, "0 needs 'from' 'value'"),
        ({"conversations": "hi"}, "'conversations' {'from' 'value' ...}"),
        ({"conversations": [{"role": "robot", "content": "x"}]}, "0 'robot'"),
        ({"conversations": [{"role": "user", "content": 1}]}, "0 needs 'role'"),
        ({"conversations": [{"from": "function_call", "value": "add(1)"}]}, "0 function_call JSON"),
        ({"prompt": 3, "completion": "x"}, "'prompt'"),
        (
            {"instruction": "a", "completion": "b"},
            "'instruction' 'completion' 'messages' 'conversations' prompt/completion 'prompt'",
        ),
    ],
)
def test_what_is_no_conversation_is_named_with_what_is_missing(row, words):
    with refused("there", words):
        check_conversation(row, "there")


TOKENS = {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_row_of_tokens_comes_before_its_text_and_without_tokens_the_text_counts(source_of, kind):
    both = TOKENS | {"messages": MESSAGES}
    rows = [both, {"input_ids": None, "loss_mask": None, "messages": MESSAGES}, TOKENS]
    source = open_source(source_of(kind, rows))
    first, second, third = (check_row(row, where, "tokens") for where, row in source.read())
    for row in (first, third):
        assert (row["input_ids"], row["loss_mask"]) == ([5, 6, 7], [0, 1, 1])
    assert second.get("input_ids") is None and second["messages"] == MESSAGES
    # Whoever asks for text gets the text.
    assert check_conversation(both, "here")["messages"] == MESSAGES


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"loss_mask": [0, 1]}, "'input_ids' 3 'loss_mask' 2"),
        ({"input_ids": [5, -1, 7]}, "'input_ids' -1 1"),
        ({"input_ids": [5, 6.0, 7]}, "'input_ids' 6.0 1"),
        ({"input_ids": [5, True, 7]}, "'input_ids' True 1"),
        ({"input_ids": [5, None, 7]}, "'input_ids' None 1"),
        ({"input_ids": "5 6 7"}, "'input_ids'"),
        ({"input_ids": "x" * 9000}, "'input_ids'"),
        ({"input_ids": [5, "x" * 9000, 7]}, "'input_ids' 1"),
        ({"loss_mask": [0, "x" * 9000, 1]}, "'loss_mask' 1"),
        ({"loss_mask": [0, 2, 1]}, "'loss_mask' 2 1 0"),
        ({"loss_mask": [0, 0.5, 1]}, "'loss_mask' 0.5 1 0"),
        ({"loss_mask": [0, 0, 0]}, "'loss_mask' 1"),
        ({"input_ids": [], "loss_mask": []}, "'loss_mask' 1"),
    ],
)
def test_a_row_of_tokens_that_is_wrong_is_named_with_what_is_wrong(change, words):
    with refused("there", words) as caught:
        check_row(TOKENS | change, "there")
    assert len(str(caught.value)) < 1000


OTHER = [{"question": "a", "answer": "b"}]
BROKEN: dict[str, tuple[bytes | None, str]] = {
    "none.jsonl": (None, "none.jsonl"),
    "no-such-owner/no-such-data-set": (None, "no-such-owner/no-such-data-set"),
    "cut.json": (b'[{"messages": []}', "cut.json '[' JSON"),
    "no-gzip.jsonl.gz": (b"{}", "no-gzip.jsonl.gz"),
    "other.jsonl": (json.dumps(OTHER[0]).encode(), "'question' 'answer' 'messages' 'completion'"),
    **{
        f"{encoding}.jsonl": ("{}".encode(encoding), f"{encoding}.jsonl UTF-16 UTF-32 UTF-8")
        for encoding in ("utf-16", "utf-16-le", "utf-16-be", "utf-32")
    },
}
"""Contents by the name of a file, and what the error names."""


@pytest.mark.parametrize("name", BROKEN)
def test_a_source_that_cannot_be_read_is_named(tmp_path, monkeypatch, name):
    content, words = BROKEN[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    with refused(words):
        read_conversations(name)


def test_a_folder_and_columns_of_no_format_are_refused(tmp_path):
    with refused(f"'{tmp_path}'"):
        read_conversations(str(tmp_path))
    Dataset.from_list(OTHER).to_parquet(str(tmp_path / "other.parquet"))
    with refused("'question' 'answer' 'messages' 'completion'"):
        read_conversations(str(tmp_path / "other.parquet"))


def test_lines_of_nothing_are_no_rows_and_are_counted(tmp_path):
    path = tmp_path / "data.jsonl"
    good = json.dumps({"messages": MESSAGES}).encode()
    path.write_bytes(b"\r\n" + good + b"\r\n   \n\n  " + good + b"\n\t\n{broken")
    found = open_source(str(path)).read()
    assert [next(found)[0][-6:], next(found)[0][-6:]] == ["line 2", "line 5"]
    with refused("7 JSON"):
        next(found)


def test_only_a_line_feed_ends_a_line(tmp_path):
    text = "one\u2028two\u0085three\x0bfour\x1cfive"
    rows = [{"messages": [USER, {"role": "assistant", "content": text}]}, {"messages": MESSAGES}]
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    assert read_conversations(str(path)) == rows


def test_places_do_not_depend_on_how_much_is_searched_at_once(source_of, monkeypatch):
    rows = [{"messages": MESSAGES, "n": "x" * i} for i in range(50)]
    path = source_of("jsonl", rows)
    monkeypatch.setattr("headstart.train.data.conversations.SCANNED", 7)
    assert read_conversations(path) == rows


COMPRESSED = {"jsonl.gz": gzip.compress, "jsonl.bz2": bz2.compress, "jsonl.xz": lzma.compress}


@pytest.mark.parametrize("kind", COMPRESSED)
@pytest.mark.parametrize("array", [False, True])
def test_compressed_json_is_read_and_trained_on_as_the_plain_file(
    tmp_path, monkeypatch, kind, array
):
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    rows = [{"messages": MESSAGES, "n": i} for i in range(5)]
    text = json.dumps(rows) if array else "\n".join(map(json.dumps, rows))
    path = tmp_path / f"data.{kind}"
    path.write_bytes(COMPRESSED[kind](text.encode()))
    assert read_conversations(str(path)) == rows
    (source,) = open_sources([str(path)], 4)
    batch = source.rows[1:4]
    reader = pickle.loads(pickle.dumps(source.reader))  # as another process gets it
    assert [row["n"] for _, row in reader.values(batch, [1, 2, 3])] == [1, 2, 3]
    assert next(where for where, _ in reader.values(batch, [1, 2, 3])).startswith(f"{path}, ")
    del source
    assert not list((tmp_path / "cache").glob("decompressed-*"))  # nothing of it stays


def test_a_compression_whose_package_is_missing_names_it(tmp_path, monkeypatch):
    monkeypatch.setattr("fsspec.available_compressions", lambda: ["gzip"])
    with refused("data.jsonl.zst needs"):
        read_conversations(write_rows(tmp_path / "data.jsonl.zst", ["x"]))


def test_a_pattern_stands_for_its_files_in_their_order(tmp_path):
    for name in ("b", "a", "c"):
        write_rows(tmp_path / f"{name}.jsonl", [{"messages": MESSAGES}] * 2)
    names = [str(tmp_path / name) for name in ("[ab].jsonl", "c.jsonl", "*.jsonl")]
    found = [f"{source.entry}{Path(source.name).stem}" for source in open_sources(names)]
    assert found == ["0a", "0b", "1c", "2a", "2b", "2c"]
    assert [len(source.rows) for source in open_sources(names[:1], 3)] == [2, 1]
    pattern = str(tmp_path / "none-*.jsonl")
    with refused(repr(pattern)):
        open_sources([names[0], pattern])


@pytest.mark.parametrize("array", [False, True])
def test_a_byte_order_mark_of_utf_8_is_no_part_of_the_data(tmp_path, array):
    rows = [{"messages": MESSAGES}] * 2
    text = json.dumps(rows) if array else "\n".join(map(json.dumps, rows))
    path = tmp_path / "data.json"
    path.write_text(text, encoding="utf-8-sig")
    assert read_conversations(str(path)) == rows


@pytest.mark.parametrize("kind", ["jsonl", "folder of a file", "parquet"])
def test_a_null_that_was_meant_stays(source_of, kind):
    """`datasets` keeps what differs between rows as JSON, and a text is one; only structs are
    filled with nulls."""
    functions = [
        {"name": "add", "arguments": {"a": 1, "unit": None}},
        {"name": "mul", "arguments": {"b": [{"x": None}, 2]}},
    ]
    rows = []
    for function in functions:
        if kind == "parquet":
            function["arguments"] = json.dumps(function["arguments"])
        call = {"type": "function", "function": function}
        rows.append({"messages": [USER, CALLED | {"tool_calls": [call]}]})
    for row, expected in zip(read_conversations(source_of(kind, rows)), rows, strict=True):
        assert row["messages"][1]["tool_calls"] == expected["messages"][1]["tool_calls"]


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("owner/name", ("owner/name", None, None, None)),
        ("owner/name:test", ("owner/name", None, None, "test")),
        ("owner/name:main:train", ("owner/name", None, "main", "train")),
        ("owner/name:train[:10%]", ("owner/name", None, None, "train[:10%]")),
        ("owner/name:main:train[5:10]", ("owner/name", None, "main", "train[5:10]")),
        ("owner/name@v1:main:train", ("owner/name", "v1", "main", "train")),
    ],
)
def test_a_name_may_have_a_revision_a_config_and_a_split(name, parts):
    assert parsed_name(name) == parts


@pytest.fixture
def local_data_set(tmp_path):
    """A folder as on the Hub, with two configs; `short` has the splits train and test."""
    folder = tmp_path / "set"
    folder.mkdir()
    for name in ("short-train", "short-test", "long-train"):
        rows = [{"prompt": name, "completion": str(i)} for i in range(4)]
        Dataset.from_list(rows).to_parquet(folder / f"{name}.parquet")
    splits = [{"split": part, "path": f"short-{part}.parquet"} for part in ("train", "test")]
    configs = [
        {"config_name": "short", "data_files": splits},
        {"config_name": "long", "data_files": "long-train.parquet"},
    ]
    page = f"---\n{yaml.safe_dump({'configs': configs})}---\n"
    (folder / "README.md").write_text(page, encoding="utf-8")
    return str(folder)


@pytest.mark.parametrize("limit", [None, 2])  # 2: streamed
@pytest.mark.parametrize("words", ["short:test", "short:train", "long:train"])
def test_a_data_set_has_configs_and_splits_and_may_be_streamed(local_data_set, words, limit):
    rows = read_conversations(f"{local_data_set}:{words}", limit)
    prompts = [row["messages"][0]["content"] for row in rows]
    assert prompts == [words.replace(":", "-")] * (limit or 4)


@pytest.mark.parametrize("limit", [None, 2])
@pytest.mark.parametrize(
    ("words", "valid"),
    [
        (":short:nope", ["train", "test"]),
        (":nope:train", ["short", "long"]),
        ("", ["short", "long"]),
    ],
)
def test_a_config_or_split_that_is_missing_is_refused_with_those_that_there_are(
    local_data_set, words, valid, limit
):
    with refused(*map(repr, valid)):
        read_conversations(local_data_set + words, limit)


def test_a_saved_data_set_has_splits_too(tmp_path):
    rows = [{"messages": MESSAGES}]
    splits = {"a": Dataset.from_list(rows), "b": Dataset.from_list(rows * 2)}
    DatasetDict(splits).save_to_disk(tmp_path / "saved")
    assert len(read_conversations(f"{tmp_path / 'saved'}:b")) == 2
    with refused("'train' a b"):
        read_conversations(str(tmp_path / "saved"))


@pytest.mark.parametrize(
    ("split", "file", "text"),
    [
        ("", "state.json", ""),
        ("", "state.json", '{"_data_files": 3}'),
        ("", "dataset_info.json", "3"),
        ("", "data-00000-of-00001.arrow", "{}"),
        ("train", "state.json", "{}"),
        ("train", "dataset_info.json", ""),
        ("train", "data-00000-of-00001.arrow", ""),
    ],
)
def test_a_broken_data_set_is_named(tmp_path, split, file, text):
    rows = Dataset.from_list([PAIR])
    (DatasetDict({split: rows}) if split else rows).save_to_disk(tmp_path / "data")
    (tmp_path / "data" / split / file).write_text(text)
    with refused(f"{tmp_path / 'data'}") as caught:
        read_conversations(str(tmp_path / "data"))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


@pytest.mark.parametrize("place", ["/elsewhere.arrow", "../elsewhere.arrow", "pipe"])
def test_a_data_set_opens_no_file_elsewhere_and_waits_for_no_pipe(tmp_path, place):
    folder = tmp_path / "data"
    Dataset.from_list([PAIR]).save_to_disk(folder)
    shutil.copy(next(folder.glob("*.arrow")), tmp_path / "elsewhere.arrow")
    if place == "pipe":
        os.mkfifo(folder / "pipe")
    name = f"{tmp_path}{place}" if place.startswith("/") else place
    state = json.loads((folder / "state.json").read_text())
    state["_data_files"] = [{"filename": name}]
    (folder / "state.json").write_text(json.dumps(state))
    with refused("pipe" if place == "pipe" else "elsewhere"):
        read_conversations(str(folder))


def test_a_broken_parquet_file_is_one_line(tmp_path):
    path = tmp_path / "d.parquet"
    Dataset.from_list([PAIR] * 9).to_parquet(str(path))
    whole = path.read_bytes()
    messages = []
    for place in range(10, len(whole), 97):
        path.write_bytes(whole[:place] + b"\xff" * 9 + whole[place + 9 :])
        try:
            read_conversations(str(path))
        except ValueError as error:
            messages.append(str(error))
    assert messages
    assert all(str(path) in message and "\n" not in message for message in messages)
