"""What all commands share: options from a dataclass, YAML and dotted overrides; errors as one line."""

from __future__ import annotations

import sys
from collections.abc import Callable
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
    parsed = parser.instantiate_classes(parser.parse_args(arguments))
    values = {name: value for name, value in vars(parsed).items() if name != "config"}
    return kind(**values)


def run(main: Callable[[list[str]], None], arguments: list[str]) -> None:
    """Run a command; a user's mistake ends it with one line on standard error and status 2, a wish to stop with 0."""
    try:
        main(arguments)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except Stopped as stopped:
        print(stopped)
