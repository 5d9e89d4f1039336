"""Files that survive a kill: written whole or not at all, and continued only with the options they were begun with."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`: it becomes `path` as the block ends, and is removed if the block raises."""
    partial = path.with_suffix(".partial")
    try:
        yield partial
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_whole(path: Path, text: str) -> None:
    """Write a text file that a reader, or a process that resumes, never finds half-written."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def check_options(
    holder: str, before: Mapping[str, Any], now: Mapping[str, Any], advice: str, free: Sequence[str] = ()
) -> None:
    """Refuse to continue work with other options than it was begun with.

    Args:
        holder: begins the error's text, such as "runs/x holds a run with".
        before: the options of the earlier start, by dotted names.
        now: the options of this one.
        advice: ends the error's text.
        free: options, or groups of them, that may differ.

    Raises:
        ValueError: naming the first option that differs, with both values.
    """
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name) and not {name, name.split(".")[0]} & set(free):
            raise ValueError(f"{holder} {name} = {before.get(name)!r}, not {now.get(name)!r}; {advice}")


def whole_lines(path: Path) -> list[bytes]:
    """Cut off the last line of a file if it is half-written; return the others."""
    text = path.read_bytes()
    length = text.rfind(b"\n") + 1
    os.truncate(path, length)
    return text[:length].splitlines()
