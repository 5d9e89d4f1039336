"""Files of prompts: every form that they come in, and what is said of a file that cannot be
read."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma

import pytest
from messages import refused

from headstart.inference.text.prompt_files import read_prompt_rows, read_prompts

ROWS = [
    {"prompt": "one"},
    {"turns": ["two", "not asked"]},
    {
        "messages": [
            {"role": "user", "content": "three"},
            {"role": "assistant", "content": "its answer"},
        ]
    },
    {"conversations": [{"from": "human", "value": "four"}], "system": "be brief"},
    {"prompt": "five", "completion": "its answer"},
]
PROMPTS = [
    [{"role": "user", "content": "one"}],
    [{"role": "user", "content": "two"}],
    [{"role": "user", "content": "three"}],
    [{"role": "system", "content": "be brief"}, {"role": "user", "content": "four"}],
    [{"role": "user", "content": "five"}],
]
LINES = "\n\n".join(json.dumps(row) for row in ROWS).encode()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("lines.jsonl", LINES),
        ("begins with a mark.jsonl", b"\xef\xbb\xbf" + LINES),
        ("an array.json", json.dumps(ROWS).encode()),
        ("a:colon.jsonl", LINES),
        ("packed.jsonl.gz", gzip.compress(LINES)),
        ("packed.json.bz2", bz2.compress(json.dumps(ROWS).encode())),
    ],
)
def test_rows_of_every_format_become_the_messages_before_an_answer(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert read_prompts(tmp_path / name) == PROMPTS
    assert read_prompts(tmp_path / name, 2) == PROMPTS[:2]


def test_other_columns_stay(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "one", "temperature": 0.5}\n')
    assert read_prompt_rows(tmp_path / "p.jsonl") == [
        {"prompt": "one", "temperature": 0.5, "messages": [{"role": "user", "content": "one"}]}
    ]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("p.jsonl", b'{"prompt": "one"}\n{"prompt"\n', "line 2 JSON"),
        ("p.jsonl", b'{"prompt": "one"}\n{"text": "two"}\n', "line 2 conversation"),
        ("p.json", b'[{"prompt": "one"}, {"text": "two"}]', "row 1 conversation"),
        ("p.json", b'[{"prompt": "one"', "'[' JSON array"),
        ("p.jsonl", '{"prompt": "one"}'.encode("utf-16"), "UTF-16 UTF-8"),
        ("p.jsonl.gz", b"not packed", ""),
        ("p.parquet", b"PAR1", "Parquet JSON Lines"),
        ("p.jsonl", None, ""),
    ],
)
def test_what_cannot_be_read_is_named_with_its_place(tmp_path, name, content, words):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with refused(str(path), words):
        read_prompts(path)


@pytest.mark.parametrize(
    ("pack", "kind"), [(gzip.compress, "gz"), (bz2.compress, "bz2"), (lzma.compress, "xz")]
)
@pytest.mark.parametrize("part", [slice(0, 30), slice(5, None)])
def test_what_cannot_be_decompressed_is_named(tmp_path, pack, kind, part):
    path = tmp_path / f"p.jsonl.{kind}"
    packed = pack(LINES)
    for content in (packed[part], packed[:20] + b"\xff" * 20 + packed[40:]):
        path.write_bytes(content)
        with refused(str(path)):
            read_prompts(path)
