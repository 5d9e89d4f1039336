"""Files of prompts: JSON Lines, or one JSON array, compressed or not."""

from __future__ import annotations

import codecs
import io
import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import fsspec

from ...files import example
from .messages import Messages, check_conversation, user_turns

COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd"}
"""Compressions by the extensions of file names."""
UTF_16_AND_32 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)
"""Byte order marks of encodings that are not read."""


def read_prompts(path: str | Path, limit: int | None = None) -> list[Messages]:
    """Read the prompts of a file, each as the messages before an answer."""
    return [row["messages"] for row in read_prompt_rows(path, limit)]


def read_prompt_rows(path: str | Path, limit: int | None = None) -> list[dict[str, Any]]:
    """Read the rows of a file of prompts, whose `messages` are those before an answer.

    A row is a conversation in any format (a last assistant message is left out), {"turns": [...]}
    as in Spec-Bench (the first turn is the prompt), or {"prompt": ...}.
    """
    rows: list[dict[str, Any]] = []
    for where, row in itertools.islice(_rows(str(path)), limit):
        # Only the first turn is a prompt: a later one needs the answer to the one before it.
        turns = user_turns(row)
        if turns and isinstance(turns[0], str):
            rows.append({**row, "messages": [{"role": "user", "content": turns[0]}]})
            continue
        row = check_conversation(row, where)
        messages = row["messages"]
        if messages[-1]["role"] == "assistant":  # the answer, which is left out
            messages = messages[:-1]
        rows.append({**row, "messages": messages})
    return rows


def _rows(name: str) -> Iterator[tuple[str, Any]]:
    """Place of every row of a file, for error messages, and its value."""
    name = example(name)
    if name.endswith(".parquet"):
        raise ValueError(
            f"{name}: prompts are read from JSON Lines or a JSON array, not from Parquet"
        )
    if holds_array(name):
        for number, row in enumerate(json_array(name)):
            yield f"{name}, row {number}", row
        return
    # As bytes: in a text, U+2028 and the like would end a line as well.
    with open_bytes(name) as file:
        for number, text in enumerate(file, start=1):
            if not text.strip():
                continue
            where, row = parsed_line(name, number, text)
            if isinstance(row, ValueError):
                raise row
            yield where, row


def holds_array(name: str) -> bool:
    """Whether a file holds one JSON array, by its first line; else it has a row in each line.

    Raises:
        ValueError: no file, or one that cannot be read.
    """
    if not Path(name).is_file():
        raise ValueError(f"no file at {name!r}")
    with open_bytes(name) as file:
        first = next((text.lstrip() for text in file if text.strip()), b"")
    # ASCII in UTF-16 or UTF-32 has zero bytes: "[" is 5B 00.
    if first.startswith(UTF_16_AND_32) or b"\0" in first[:4]:
        raise ValueError(
            f"{name} is in UTF-16 or UTF-32; convert it to UTF-8: iconv -f UTF-16 -t UTF-8 {name} >"
            " converted.jsonl"
        )
    return first.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def json_array(name: str) -> list[Any]:
    """Elements of the JSON array in a file."""
    try:
        with open_bytes(name) as file:
            elements: list[Any] = json.loads(file.read())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name}: begins with '[' and is not a JSON array: {error}") from error
    return elements


def parsed_line(name: str, number: int, text: bytes) -> tuple[str, Any]:
    """Place and value of a line; its error if it is not JSON."""
    where = f"{name}, line {number}"
    try:
        return where, json.loads(text)
    except (ValueError, RecursionError) as error:
        return where, ValueError(f"{where}: not JSON: {error}")


def compression(name: str) -> str | None:
    """Name of a file's compression; None if it is not compressed.

    Raises:
        ValueError: a compression for which a package is missing.
    """
    method = COMPRESSIONS.get(Path(name).suffix)
    if method is not None and method not in fsspec.available_compressions():
        raise ValueError(
            f"{name}: reading {method} needs the package zstandard: pip install zstandard"
        )
    return method


@contextmanager
def open_bytes(name: str) -> Iterator[IO[bytes]]:
    """Open a file for reading, decompressed.

    Raises:
        ValueError: what it holds cannot be decompressed.
    """
    method = compression(name)
    if method is None:
        with Path(name).open("rb") as file:
            yield file
        return
    try:
        packed: Any = fsspec.open(str(Path(name).absolute()), "rb", compression=method).open()
        with io.BufferedReader(packed) as file:  # zstandard's reader cannot read line by line
            yield file
    except ValueError:
        raise
    except Exception as error:  # each compression has errors of its own
        if isinstance(error, OSError) and error.errno is not None:  # of the disk
            raise
        raise ValueError(f"{name}: cannot be read: {error}") from error


def without_compression(name: str) -> str:
    """A file's name without the extension of its compression."""
    return name.removesuffix(Path(name).suffix) if Path(name).suffix in COMPRESSIONS else name
