"""The state file next to a file of answers, NAME.jsonl.state.json.

It holds the options and the tokenizer with which the file was begun.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ...files import read_json
from ...options import by_new_names
from ..config import SelfMadeConfig


def state_path(path: Path) -> Path:
    """Return the path of the state of a file of answers."""
    return path.with_name(path.name + ".state.json")


def read_state(path: Path) -> dict[str, Any]:
    """Read the state of a file of answers, which has its options at least.

    Raises:
        ValueError: a file of something else.
    """
    state = read_json(path)
    if not isinstance(state, dict) or not isinstance(state.get("options"), dict):
        raise ValueError(f"{path} is not the state of a file of answers; choose another output")
    return state


def lines_of(rows: Iterable[dict[str, Any]]) -> str:
    """Return rows as JSON lines.

    Lone surrogates, which a model can write but UTF-8 cannot encode, are escaped.
    """
    lines: list[str] = []
    for row in rows:
        # As readable text where UTF-8 can hold it; \uXXXX escapes where it cannot.
        line = json.dumps(row, ensure_ascii=False)
        try:
            line.encode()
        except UnicodeEncodeError:
            line = json.dumps(row)
        lines.append(line + "\n")
    return "".join(lines)


def with_defaults(options: dict[str, Any]) -> dict[str, Any]:
    """Complete the options of an earlier version with defaults for those that it lacked."""
    defaults = {option.name: option.default for option in dataclasses.fields(SelfMadeConfig)}
    return {**defaults, **by_new_names(options, warn=False)}


def check_fingerprint(before: str | None, now: str | None, path: Path) -> None:
    """Refuse to continue a file whose token ids are those of another tokenizer."""
    if before != now:
        raise ValueError(
            f"{path} holds token ids of a tokenizer with the fingerprint {before}, and the target's"
            f" tokenizer now has {now}; choose another output, or the target with which it was"
            " begun"
        )
