"""Parts of the site that are made when it is built: options of commands and heads, and the pages of
benchmarks/."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from headstart.heads import HEADS
from headstart.scripts.__main__ import COMMANDS, GROUPS
from headstart.scripts.command_line import options

ROOT = Path(__file__).parent.parent


class Option(NamedTuple):
    """A field of a dataclass of options."""

    name: str
    """Dotted, as on the command line."""
    type: str
    default: Any
    text: str


class _Asked(Exception):
    """Ends a command where it would parse its arguments."""


def asked(command: str, arguments: Iterable[str] = ()) -> Callable[[], Any]:
    """The call by which a command would parse these arguments; the command itself does not run."""
    module = importlib.import_module(f"headstart.scripts.{COMMANDS[command][0]}")
    with patch.object(module, "options", side_effect=_Asked) as parse, suppress(_Asked):
        module.main(list(arguments))
    return partial(options, *parse.call_args.args, **parse.call_args.kwargs)


def documented_options(kind: type, before: str = "") -> Iterator[Option]:
    """Every option of a dataclass, those of its groups by dotted names, with the docstring under
    the field."""
    told = {}
    for base in reversed([base for base in kind.__mro__ if dataclasses.is_dataclass(base)]):
        (body,) = (node.body for node in ast.parse(inspect.getsource(base)).body)
        told |= {
            node.target.id: text.value.value
            for node, text in itertools.pairwise(body)
            if isinstance(node, ast.AnnAssign) and isinstance(text, ast.Expr)
        }
    for field in dataclasses.fields(kind):
        made = field.default_factory
        if dataclasses.is_dataclass(made):
            yield from documented_options(made, f"{before}{field.name}.")
        else:
            default = made() if callable(made) else field.default
            yield Option(before + field.name, str(field.type), default, told[field.name])


def table(kind: type) -> str:
    """Markdown table of options."""
    rows = ["| option | type | default | |", "|---|---|---|---|"]
    for name, annotation, default, text in documented_options(kind):
        shown = "" if default in ("", dataclasses.MISSING) else f"`{default}`"
        cells = (f"`{name}`", f"`{annotation}`", shown, " ".join(text.split()))
        rows.append("| " + " | ".join(escaped(cell) for cell in cells) + " |")
    return "\n".join(rows)


def escaped(cell: str) -> str:
    """A cell of a table whose | divides no columns; Markdown takes a | in `code` as it is."""
    parts = cell.split("`")
    for number in range(0, len(parts), 2):  # the parts outside of code
        parts[number] = parts[number].replace("|", "\\|")
    return "`".join(parts)


def commands_page() -> str:
    """What commands have in common, and a link to the page of each."""
    parts = [
        "# Commands\n\n`headstart COMMAND --config FILE.yaml --OPTION VALUE`: a YAML file sets"
        " options, the command line overrides it, and an unknown option is an error. `headstart"
        " COMMAND --help` shows the text of the command's page.\n\nWith the package argcomplete"
        " (`pip install '.[completion]'`) the shell completes commands and options; for bash put"
        " this line into ~/.bashrc:\n\n```bash\n"
        'eval "$(register-python-argcomplete headstart)"\n```'
    ]
    for group, commands in GROUPS.items():
        rows = [f"| [{name}](commands/{name}.md) | {row[1]} |" for name, row in commands.items()]
        parts.append("\n".join([f"## {group.capitalize()}\n", "| | |", "|---|---|", *rows]))
    return "\n\n".join(parts)


def command_page(command: str) -> str:
    """A command, its purpose and its options."""
    module, purpose = COMMANDS[command]
    about = inspect.getdoc(importlib.import_module(f"headstart.scripts.{module}"))
    options_table = table(asked(command).args[0])
    return (
        f"# headstart {command}\n\n{purpose[0].upper()}{purpose[1:]}.\n\n{about}\n\n{options_table}"
    )


def heads_page() -> str:
    """Every head type and its options."""
    parts = [
        "# Options of heads\n\n`head.type` names the head, and `head.OPTION` sets an option of it."
    ]
    parts += [
        f"## {name}\n\n{inspect.getdoc(head)}\n\n{table(head.config_class)}"
        for name, head in HEADS.items()
    ]
    return "\n\n".join(parts)


def with_options(markdown: str) -> str:
    """A page with a table of options in the place of each `<!-- options: HEAD -->`."""

    def options_of_head(comment: re.Match[str]) -> str:
        return table(HEADS[comment[1]].config_class)

    return re.sub(r"<!-- options: (\S+) -->", options_of_head, markdown)


def on_config(config: Any) -> Any:
    """Give the commands a tab, with a page each."""
    pages = [{command: f"commands/{command}.md"} for command in COMMANDS]
    place = next(number for number, tab in enumerate(config.nav) if "Reference" in tab)
    config.nav.insert(place, {"Commands": [{"All commands": "commands.md"}, *pages]})
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made here, those of benchmarks/, and the files of examples/ that they
    show."""
    from mkdocs.structure.files import File

    beside = [
        *ROOT.glob("benchmarks/*.md"),
        *ROOT.glob("examples/monitoring/*"),
        *ROOT.glob("examples/serving/*.yaml"),
    ]
    beside += ROOT.glob("examples/slurm/*")
    pages = {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in beside}
    pages |= {"commands.md": commands_page(), "options.md": heads_page()}
    pages |= {f"commands/{command}.md": command_page(command) for command in COMMANDS}
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to folders beside docs/ hold in the repository, and on the site, where `on_files` puts
    them into it."""
    markdown = with_options(markdown)
    markdown = markdown.replace("](../benchmarks/", "](benchmarks/").replace(
        "](../examples/", "](examples/"
    )
    # of pages of docs/heads/
    markdown = markdown.replace("](../../benchmarks/", "](../benchmarks/")
    return markdown.replace("](../docs/", "](../")  # of pages of benchmarks/
