"""What all commands share: options from a dataclass, YAML and dotted overrides; errors as one line."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import re
import sys
import typing
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import yaml
from jsonargparse import ArgumentParser, set_parsing_settings

from headstart.train.console import Stopped, show_on_console

Options = TypeVar("Options")

set_parsing_settings(docstring_parse_attribute_docstrings=True)


def options(
    kind: type[Options], command: str, description: str, arguments: list[str] | None, first: str | None = None
) -> Options:
    """A command's options, from `--config FILE.yaml` and the command line, as the dataclass that holds their defaults.

    With `first`, `headstart push RUN --repo ...` means `--run RUN`: the option that may go without its name.

    Exits with status 2 and a message if an option is unknown or its value has the wrong type.
    """
    parser = ArgumentParser(prog=f"headstart {command}", description=description)
    parser.add_argument("--config", action="config", help="YAML file of options; the command line overrides it")
    parser.add_class_arguments(kind)
    arguments = sys.argv[1:] if arguments is None else arguments
    if first and arguments and not arguments[0].startswith("-"):
        arguments = [f"--{first}", *arguments]
    given = spelled_out(arguments, set(options_of_type(kind, list)), set(options_of_type(kind, bool)))
    parsed = parser.instantiate(parser.parse_args(given))
    values = {name: _plain(value) for name, value in vars(parsed).items() if name != "config"}
    return kind(**values)


def _plain(value: Any, inside: bool = False) -> Any:
    """Texts inside of mappings without a type (`--head.loss.ce 0.5`) as what YAML reads in them."""
    if isinstance(value, dict):
        return {name: _plain(child, inside=True) for name, child in value.items()}
    if not inside or not isinstance(value, str):
        return value
    # YAML takes 1e-3 for a text, for want of a dot.
    return float(value) if re.fullmatch(r"[-+]?\d+[eE][-+]?\d+", value) else yaml.safe_load(value)


def options_of_type(kind: type, wanted: type, before: str = "") -> Iterator[str]:
    """Dotted names of the options that are of a type, such as list."""
    for name, hint in typing.get_type_hints(kind).items():
        if wanted in (hint, typing.get_origin(hint), *typing.get_args(hint)):
            yield before + name
        elif isinstance(hint, type) and dataclasses.is_dataclass(hint):
            yield from options_of_type(hint, wanted, f"{before}{name}.")


def spelled_out(arguments: list[str], lists: set[str], flags: set[str]) -> list[str]:
    """As the parser takes them: `--max-new-tokens 8` with underscores, `--prompts a b` as `--prompts '["a", "b"]'`.

    And a yes or no that stands alone, `--compare`, as `--compare true`.
    """
    plain: list[str] = []
    rest = list(arguments)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if not name.startswith("--"):
            plain.append(name + equals + value)
            continue
        option = name.replace("-", "_").replace("__", "--", 1)
        plain.append(option + equals + value)
        if option.removeprefix("--") in lists and not equals:
            values = list(itertools.takewhile(lambda word: not word.startswith("--"), rest))
            del rest[: len(values)]
            plain.extend(values if len(values) == 1 and values[0].startswith("[") else [json.dumps(values)])
        if option.removeprefix("--") in flags and not equals and (not rest or rest[0].startswith("--")):
            plain.append("true")
    return plain


def run(main: Callable[[list[str]], None], arguments: list[str]) -> None:
    """Run a command; what goes wrong ends it with one line on standard error.

    The exit status is 2 after a user's mistake, 1 after a failing disk, and 0 after a wish to stop.
    """
    show_on_console()
    try:
        main(arguments)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ValueError) else 1)
    except Stopped as stopped:
        print(stopped)
        gc.freeze()  # Python's last collection would take a second, or several on a busy machine
