"""Options with which a run resumes although it began with others: `--resume_with optim.lr=5e-4`."""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Sequence
from typing import Any, Literal, TypeVar, Union

import yaml

from .config import TrainConfig

Options = TypeVar("Options")

FIXED = ("head", "adapter", "optim.name", "optim.ema", "output", "plan", "resume_with")
"""Options, or groups of them, that cannot change: a checkpoint holds other tensors, or they say which run it is."""


def with_changes(config: TrainConfig, changes: str | Sequence[str] | None) -> TrainConfig:
    """Apply changes, each NAME=VALUE with a dotted name and a value in YAML.

    Raises:
        ValueError: a change of another form, an unknown option, one that cannot change, or a value of another type.
    """
    for change in named(changes):
        name, _, text = change.partition("=")
        if {name, name.split(".")[0]} & set(FIXED):
            raise ValueError(
                f"resume_with cannot change {name}: what a checkpoint holds follows from it; begin a new run, with "
                "init_from to start from this one's head"
            )
        config = replaced(config, name.split("."), parsed(text), name)
    return config


def named(changes: str | Sequence[str] | None) -> list[str]:
    """The changes as a list; a ValueError for one that is not NAME=VALUE."""
    given = [changes] if isinstance(changes, str) else list(changes or ())
    for change in given:
        if not re.match(r"[\w.]+=", change):
            raise ValueError(f"resume_with takes NAME=VALUE, such as optim.lr=5e-4, not {change!r}")
    return given


def names_of(changes: str | Sequence[str] | None) -> list[str]:
    """The names of the options that change."""
    return [change.partition("=")[0] for change in named(changes)]


def parsed(text: str) -> Any:
    """Parse a value as YAML does; 1e-3, which has no dot, is a number here."""
    return float(text) if re.fullmatch(r"[-+]?\d+[eE][-+]?\d+", text) else yaml.safe_load(text)


def replaced(owner: Options, path: list[str], value: Any, name: str) -> Options:
    """Replace the option at a path in nested dataclasses; `name` is its whole name, for errors."""
    first, *rest = path
    fields = [field.name for field in dataclasses.fields(owner)]  # type: ignore[arg-type]
    if first not in fields:
        nearest = difflib.get_close_matches(first, fields, n=3)
        raise ValueError(f"resume_with: unknown option {name}; choose from {', '.join(nearest or fields)}")
    held = getattr(owner, first)
    if dataclasses.is_dataclass(held):
        if not rest:
            raise ValueError(f"resume_with: {name} is a group of options; name one of them, such as optim.lr=5e-4")
        value = replaced(held, rest, value, name)
    elif rest:
        raise ValueError(f"resume_with: {name}: {first} is no group of options")
    else:
        hint = typing.get_type_hints(type(owner))[first]
        if typing.get_origin(hint) is tuple and isinstance(value, list):
            value = tuple(value)
        if not fits(value, hint):
            raise ValueError(f"resume_with: {name} cannot be {value!r}; its type is {getattr(hint, '__name__', hint)}")
    return dataclasses.replace(owner, **{first: value})  # type: ignore[type-var]


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is of an option's type; the items of lists and mappings are not looked at."""
    origin = typing.get_origin(hint)
    if hint is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(fits(value, part) for part in typing.get_args(hint))
    if origin is Literal:
        return value in typing.get_args(hint)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, origin or hint)
