"""Shared parts of command and training options: required ones, limits, dtypes, template variables.

Nothing here imports torch: a command shows its help, or refuses an option, before it loads
anything.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import operator
import typing
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, Union

from .files import at_home, one_line

LONGEST_SHOWN = 200
"""Characters of a value that an error shows."""
RENAMED = {
    "fallback": "adaptive",
    "answer_tokens": "max_new_tokens",
    "new_tokens": "max_new_tokens",
    "eval.new_tokens": "eval.max_new_tokens",
    "target_dtype": "dtype",
}
"""Options, those of groups by dotted names, that had another name before version 0.3, which command
lines, files and arguments may still have."""
REMOVED: dict[str, tuple[Any, str]] = {
    "optim.ema": (
        0.0,
        "a moving average of the weights accepted no more tokens (benchmarks/recipes.md); leave it"
        " out, and optim.schedule lowers the learning rate to the same end",
    ),
    "features.repair": (
        False,
        "leave it out; the error about a corrupt shard names the file to remove",
    ),
}
"""Options of earlier versions that are gone: the value that asked for nothing, which files may
still have, and what takes the place of any other."""
Dtype = Literal["fastest", "auto", "float64", "float32", "bfloat16", "float16"]

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


LIMITS: dict[str, tuple[str, Callable[[float, float], bool]]] = {
    "minimum": ("at least", operator.ge),
    "above": ("above", operator.gt),
    "maximum": ("at most", operator.le),
    "below": ("below", operator.lt),
}
"""Limits of numeric options: their words, and whether a value keeps them."""


class TakesOldNames(type):
    """The class of option classes that take old names of their options as keywords, with a
    warning for each."""

    def __call__(cls, *values: Any, **options: Any) -> Any:
        return super().__call__(*values, **by_new_names(options))


@dataclass(frozen=True)
class CommandOptions(metaclass=TakesOldNames):
    """Options of a command, checked when they are created.

    A ValueError names the invalid option, its value and what is valid.
    """

    required: ClassVar[tuple[str, ...]] = ()
    """Options without which nothing can run, those of groups by dotted names."""
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
        for name in self.required:
            if not attrgetter(name)(self):
                raise ValueError(f"option {name!r} is required and was not given")
        check_values(self)


def by_new_names(options: Mapping[str, Any], group: str = "", warn: bool = True) -> dict[str, Any]:
    """Options whose old names (`RENAMED`) have become the new ones, with a warning for each.

    `group` is what comes before their names, such as "eval.".

    Raises:
        ValueError: an option that is gone (`REMOVED`), unless its value asks for nothing.
    """
    renamed = {}
    for name, value in options.items():
        if f"{group}{name}" in REMOVED:
            nothing, instead = REMOVED[f"{group}{name}"]
            if value != nothing:
                raise ValueError(f"option {group}{name} is gone: {instead}")
            continue
        new = RENAMED.get(f"{group}{name}")
        if new is not None and warn:
            warnings.warn(f"{group}{name} is called {new} now", FutureWarning, stacklevel=3)
        renamed[name if new is None else new.removeprefix(group)] = value
    return renamed


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """The end of a refusal of a name: the most similar valid one, or all of them."""
    similar = difflib.get_close_matches(name, valid, n=1)
    if similar:
        return f"; did you mean {similar[0]!r}?"
    return f"; choose from {', '.join(sorted(valid))}"


def limited(default: Any, **limits: float) -> Any:
    """Return the field of a numeric option with limits: those of `LIMITS` that it has."""
    return field(default=default, metadata=limits)


def check_values(options: Any, before: str = "") -> None:
    """Refuse values of other types than those of a dataclass's fields, or beyond their limits.

    A command line and a file are checked for types as they are parsed, Python's arguments here.
    """
    hints = typing.get_type_hints(type(options))
    for option in dataclasses.fields(options):
        name = before + option.name
        value = getattr(options, option.name)
        check_type(name, value, hints[option.name])
        for limit, bound in option.metadata.items():
            words, holds = LIMITS[limit]
            if value is not None and not holds(value, bound):
                raise ValueError(f"{name} must be {words} {bound}, not {value}")
        if dataclasses.is_dataclass(value):
            check_values(value, f"{name}.")


def check_type(name: str, value: Any, hint: Any) -> None:
    """Refuse a value of another type, NaN too; the items of lists and mappings are not checked."""
    if not any(_is_of(value, kind) for kind in parts_of(hint)):
        raise ValueError(f"{name} must be {valid_values(hint)}, not {shown(value)}")


def shown(value: Any) -> str:
    """Return a value for an error, cut where it is long, such as a loaded model."""
    text = repr(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]} ..."


def parts_of(hint: Any) -> tuple[Any, ...]:
    """The types of a union: (str, NoneType) for str | None; a type alone for any other."""
    # A union with a Literal is typing's, any other the interpreter's own.
    is_union = typing.get_origin(hint) in (Union, UnionType)
    return typing.get_args(hint) if is_union else (hint,)


def _is_of(value: Any, kind: Any) -> bool:
    """Whether a value is of a type that is no union. True is no number, although a Python int."""
    origin = typing.get_origin(kind) or kind
    if origin is Any:
        return True
    if origin is Literal:
        return value in typing.get_args(kind)
    if isinstance(value, bool):
        return origin is bool
    if origin is float:
        return isinstance(value, (int, float)) and not math.isnan(value)
    return isinstance(value, (tuple, list) if origin is tuple else origin)


def valid_values(hint: Any) -> str:
    """Describe the valid values of an option of a type."""
    words = {
        str: "a text",
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        NoneType: "null",
    }
    if hint in words:
        return words[hint]
    origin = typing.get_origin(hint)
    if origin is Literal:
        choices = [str(value) for value in typing.get_args(hint)]
        return choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"
    parts = parts_of(hint)
    if len(parts) > 1:
        return " or ".join(map(valid_values, parts))
    if origin in (list, tuple):
        return "a list such as [a, b]"
    return "a mapping such as {name: value}"


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
                f"{holder} {one_line(name)} = {shown(before.get(name))}, not"
                f" {shown(now.get(name))}; {advice}"
            )


def named_by(options: Sequence[str], name: str) -> bool:
    """Whether an option, by its dotted name, is among some options, or in a group of them."""
    return any(name == option or name.startswith(f"{option}.") for option in options)
