"""headstart COMMAND: make data, train a draft head, find its tree, decode, measure, publish."""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.metadata
import os
import sys

from headstart.extras import named

GROUPS = {
    "decode": {
        "generate": ("generate", "answer a prompt with a head, streaming"),
        "chat": ("chat", "talk to a model in the terminal"),
        "bench": ("bench", "compare generate, plain decoding and speculation"),
        "tree": ("tree", "find a head's fastest draft tree on this machine"),
        "trace": ("trace", "record a generation as a page that plays it"),
        "datastore": ("datastore", "index a corpus from which drafts are retrieved"),
    },
    "train": {
        "data": ("data", "make conversations that the model answers"),
        "features": ("features", "write the target's hidden states to disk"),
        "train": ("train", "train a draft head on a frozen model"),
        "adapt": ("adapt", "let a head learn from recorded answers"),
    },
    "share": {
        "push": ("push", "publish a head on the Hugging Face Hub"),
        "import": ("import_head", "convert a head of another project to ours"),
        "export": ("export", "convert a head to another project's format"),
    },
    "check": {
        "verify": ("verify", "check a head against its target"),
        "certify": ("certify", "certify that an engine's output is the target's own"),
        "serve-check": ("serve_check", "compare a head in vLLM with the same head here"),
        "doctor": ("doctor", "describe this installation for a bug report"),
    },
}
"""Commands by what they are for: the module and the purpose of each."""
COMMANDS = {command: row for group in GROUPS.values() for command, row in group.items()}


def overview() -> str:
    """Return one screen of text: every command in its group."""
    lines = ["usage: headstart COMMAND [OPTIONS]    (headstart COMMAND --help: its options)"]
    lines.append("       headstart --version")
    for group, commands in GROUPS.items():
        lines.append(f"{group}:")
        for command, (_, purpose) in commands.items():
            lines.append(f"  {command:<12} {purpose}")
    return "\n".join(lines)


def main() -> None:
    """Run one of the commands."""
    if "_ARGCOMPLETE" in os.environ:
        complete()
        return
    command, *arguments = sys.argv[1:] or ["--help"]
    if command in ("-h", "--help"):
        print(overview())
    elif command == "--version":
        print(f"headstart {importlib.metadata.version('headstart')}")
    elif command in COMMANDS:
        run_command(command, arguments)
    else:
        nearest = difflib.get_close_matches(command, COMMANDS, n=3)
        advice = "no command has a similar name"
        if nearest:
            advice = f"the nearest: {', '.join(nearest)}"
        print(
            f"error: unknown command {command!r}",
            advice,
            "`headstart --help` lists all",
            sep="\n",
            file=sys.stderr,
        )
        sys.exit(2)


def complete() -> None:
    """Answer a press of Tab: the package argcomplete has put the line into the environment."""
    line = os.environ["COMP_LINE"]
    command, *rest = line.split(" ")[1:] or [""]
    if command in COMMANDS and rest:
        # The parser of the command completes what follows the command, which is word 2.
        os.environ["_ARGCOMPLETE"] = "2"
        run_command(command, [])
        return
    import argcomplete

    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=list(COMMANDS))
    argcomplete.autocomplete(parser)


def run_command(command: str, arguments: list[str]) -> None:
    """Import a command's module, which needs the packages of an extra, and run it."""
    module, _ = COMMANDS[command]
    try:
        from headstart.scripts.command_line import run

        run(importlib.import_module(f"headstart.scripts.{module}").main, arguments)
    except ModuleNotFoundError as error:
        # A package of an extra is named with the command that installs it; any other module is a
        # fault of ours.
        missing = named(error, f"headstart {command}")
        if missing is error:
            raise
        sys.exit(f"error: {missing}")


if __name__ == "__main__":
    main()
