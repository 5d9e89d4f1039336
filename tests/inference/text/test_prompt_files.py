"""Files of prompts: every form that they come in, and what is said of a file that cannot be
read."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma

import pytest

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
        ("p.jsonl", b'{"prompt": "one"}\n{"prompt"\n', r"p\.jsonl, line 2: not JSON"),
        (
            "p.jsonl",
            b'{"prompt": "one"}\n{"text": "two"}\n',
            r"p\.jsonl, line 2: no conversation in any format",
        ),
        (
            "p.json",
            b'[{"prompt": "one"}, {"text": "two"}]',
            r"p\.json, row 1: no conversation in any format",
        ),
        ("p.json", b'[{"prompt": "one"', r"begins with '\[' and is not a JSON array"),
        ("p.jsonl", '{"prompt": "one"}'.encode("utf-16"), "UTF-16 or UTF-32; convert it to UTF-8"),
        ("p.jsonl.gz", b"not packed", "cannot be read"),
        ("p.parquet", b"PAR1", "from JSON Lines or a JSON array, not from Parquet"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_place(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=words):
        read_prompts(tmp_path / name)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"no file at '.*nowhere\.jsonl'"):
        read_prompts(tmp_path / "nowhere.jsonl")


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
@pytest.mark.parametrize("end", [slice(0, 30), slice(5, None)])
def test_what_cannot_be_decompressed_is_named(tmp_path, pack, end):
    kind = {gzip.compress: "gz", bz2.compress: "bz2", lzma.compress: "xz"}[pack]
    path = tmp_path / f"p.jsonl.{kind}"
    packed = pack(LINES)
    for content in (packed[end], packed[:20] + b"\xff" * 20 + packed[40:]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"{path}: cannot be read"):
            read_prompts(path)
