"""What all commands share: options from a dataclass, YAML and dotted overrides; errors as one line."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from typing import TypeVar

from jsonargparse import ArgumentParser, set_parsing_settings

from headstart.train.console import Stopped

Options = TypeVar("Options")

set_parsing_settings(docstring_parse_attribute_docstrings=True)


def options(kind: type[Options], command: str, description: str, arguments: list[str] | None) -> Options:
    """A command's options, from `--config FILE.yaml` and the command line, as the dataclass that holds their defaults.

    Exits with status 2 and a message if an option is unknown or its value has the wrong type.
    """
    parser = ArgumentParser(prog=f"headstart {command}", description=description)
    parser.add_argument("--config", action="config", help="YAML file of options; the command line overrides it")
    parser.add_class_arguments(kind)
    given = spelled_out(sys.argv[1:] if arguments is None else arguments, set(list_options(kind)))
    parsed = parser.instantiate(parser.parse_args(given))
    values = {name: value for name, value in vars(parsed).items() if name != "config"}
    return kind(**values)


def list_options(kind: type, before: str = "") -> Iterator[str]:
    """Dotted names of the options that are lists."""
    for option in dataclasses.fields(kind):
        if option.default_factory is list:
            yield before + option.name
        elif dataclasses.is_dataclass(option.default_factory):
            yield from list_options(option.default_factory, f"{before}{option.name}.")


def spelled_out(arguments: list[str], lists: set[str]) -> list[str]:
    """`--max-new-tokens 8` as `--max_new_tokens 8`, and `--prompts a b` as `--prompts '["a", "b"]'`."""
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
    return plain


def run(main: Callable[[list[str]], None], arguments: list[str]) -> None:
    """Run a command; what goes wrong ends it with one line on standard error.

    The exit status is 2 after a user's mistake, 1 after a failing disk, and 0 after a wish to stop.
    """
    try:
        main(arguments)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ValueError) else 1)
    except Stopped as stopped:
        print(stopped)
