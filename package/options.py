"""Shared parts of command and training options: required ones, limits, dtypes, template variables.

Nothing here imports torch: a command shows its help, or refuses an option, before it loads
anything.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal

from .files import at_home

Dtype = Literal["fastest", "auto", "float32", "bfloat16", "float16"]

RESERVED = frozenset(
    (
        "conversation",
        "messages",
        "tools",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "sanitize_control_tokens",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    )
)
"""Arguments of transformers' `apply_chat_template`, which are not variables of a template."""


@dataclass(frozen=True)
class CommandOptions:
    """Options of a command, checked when they are created.

    A ValueError names the invalid option, its value and what is valid.
    """

    required: ClassVar[tuple[str, ...]] = ()
    """Options without which nothing can run, those of groups by dotted names."""
    minimum: ClassVar[dict[str, float]] = {}
    """Smallest valid value of numeric options."""
    most_used: ClassVar[tuple[str, ...]] = ()
    """Options that `--help` shows before all others, up to five, those of groups by dotted
    names."""
    texts: ClassVar[tuple[str, ...]] = ()
    """Options whose values may begin with ~ and are no paths."""

    def __post_init__(self) -> None:
        for option in dataclasses.fields(self):
            if option.name not in self.texts:
                value = getattr(self, option.name)
                object.__setattr__(self, option.name, with_home(value))
        check_types(self)
        for name in self.required:
            if not attrgetter(name)(self):
                raise ValueError(f"option {name!r} is required and was not given")
        for name, least in self.minimum.items():
            value = attrgetter(name)(self)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}")


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """The end of a refusal of a name: the most similar valid one, or all of them."""
    similar = difflib.get_close_matches(name, valid, n=1)
    if similar:
        return f"; did you mean {similar[0]!r}?"
    return f"; choose from {', '.join(sorted(valid))}"


def check_types(options: Any, before: str = "") -> None:
    """Refuse a value of another type in options that are numbers or flags, NaN too.

    A command line and a file are checked as they are parsed, Python's arguments here.
    """
    hints = typing.get_type_hints(type(options))
    for option in dataclasses.fields(options):
        name, value = before + option.name, getattr(options, option.name)
        if dataclasses.is_dataclass(value):
            check_types(value, f"{name}.")
        hint = hints[option.name]
        kinds = set(typing.get_args(hint)) if isinstance(hint, UnionType) else {hint}
        if value is None and NoneType in kinds:
            continue
        if kinds <= {bool, NoneType} and type(value) is not bool:
            raise ValueError(f"{name} must be true or false, not {value!r}")
        if kinds <= {int, NoneType} and type(value) is not int:
            raise ValueError(f"{name} must be a whole number, not {value!r}")
        if kinds <= {float, NoneType} and (type(value) not in (int, float) or math.isnan(value)):
            raise ValueError(f"{name} must be a number, not {value!r}")


def with_home(value: Any) -> Any:
    """Return an option's value with the home folder in its paths, see `at_home`."""
    if isinstance(value, str):
        return at_home(value)
    if isinstance(value, list):
        return [with_home(element) for element in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        options = {option.name: getattr(value, option.name) for option in dataclasses.fields(value)}
        changed = {name: with_home(option) for name, option in options.items()}
        return value if changed == options else dataclasses.replace(value, **changed)
    return value


def template_variables(
    thinking: bool | None, template_kwargs: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the chat template's variables: `template_kwargs`, and `thinking` as enable_thinking.

    Raises:
        ValueError: the options contradict each other, or a name is not a template's own to read.
    """
    variables = dict(template_kwargs or {})
    if reserved := sorted(RESERVED & variables.keys()):
        raise ValueError(
            f"template_kwargs {reserved[0]} = {variables[reserved[0]]!r} is set by headstart"
            " itself; give only variables that the chat template reads, such as enable_thinking or"
            " reasoning_effort"
        )
    if thinking is None:
        return variables
    if variables.get("enable_thinking", thinking) != thinking:
        raise ValueError(
            f"thinking {thinking} and template_kwargs enable_thinking"
            f" {variables['enable_thinking']!r} contradict each other; give one of them"
        )
    return {**variables, "enable_thinking": thinking}


def check_options(
    holder: str,
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    advice: str,
    free: Sequence[str] = (),
) -> None:
    """Raise a ValueError with the dotted name of the first option that changed since work began.

    `holder` begins its text, such as "runs/x holds a run with", and `advice` ends it. The options
    in `free`, or the groups of options, may differ.
    """
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name) and not named_by(free, name):
            raise ValueError(
                f"{holder} {name} = {before.get(name)!r}, not {now.get(name)!r}; {advice}"
            )


def named_by(options: Sequence[str], name: str) -> bool:
    """Whether an option, by its dotted name, is among some options, or in a group of them."""
    return any(name == option or name.startswith(f"{option}.") for option in options)
