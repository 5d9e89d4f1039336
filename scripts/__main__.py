"""headstart COMMAND: make data, train a draft head, find its tree, decode, measure, publish."""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import sys

from headstart.extras import named

COMMANDS = {
    "prompts": ("prompts", "make a mix of prompts by kind, with some of each held out"),
    "data": ("data", "make conversations: the model generates prompts and answers, or answers given prompts"),
    "plan-data": ("plan_data", "plan how much data a head needs, by a law and by what was recorded"),
    "features": ("features", "write the target's hidden states to disk, for training to read"),
    "train": ("train", "train a draft head on a frozen model"),
    "adapt": ("adapt", "let a head learn from recorded answers, and take it only if it is better"),
    "tree": ("tree", "find the draft tree that is fastest for a head on this machine"),
    "datastore": ("datastore", "index a corpus, from which drafts are retrieved"),
    "generate": ("generate", "answer a prompt with a head, streaming"),
    "chat": ("chat", "talk to a model in the terminal, with drafts or without"),
    "trace": ("trace", "record a generation as a page that plays it, or a report of what is rejected"),
    "bench": ("bench", "compare stock generate, plain decoding and speculation on the same prompts"),
    "certify": ("certify", "certify that an engine's output is the target's own, or say what differs"),
    "verify": ("verify", "check a head against its target"),
    "serve-check": ("serve_check", "compare a head in vLLM with the same head here"),
    "push": ("push", "publish a head on the Hugging Face Hub"),
    "import": ("import_head", "convert a head of another project to ours"),
    "export": ("export", "convert a head to another project's format"),
    "demo": ("demo", "all of it on a small real model, in a few minutes"),
}
"""Module and purpose of each command."""


def main() -> None:
    """Run one of the commands."""
    command, *arguments = sys.argv[1:] or ["--help"]
    if command in ("-h", "--help"):
        print("usage: headstart COMMAND [OPTIONS]\n       headstart --version\n\ncommands:")
        for name, (_, purpose) in COMMANDS.items():
            print(f"  {name:<12} {purpose}")
        print("\nheadstart COMMAND --help lists a command's options.")
    elif command == "--version":
        print(f"headstart {importlib.metadata.version('headstart')}")
    elif command in COMMANDS:
        run_command(command, arguments)
    else:
        nearest = difflib.get_close_matches(command, COMMANDS, n=3)
        told = f"the nearest: {', '.join(nearest)}" if nearest else "no command has a similar name"
        print(f"error: unknown command {command!r}", told, "`headstart --help` lists all", sep="\n", file=sys.stderr)
        sys.exit(2)


def run_command(command: str, arguments: list[str]) -> None:
    """Import a command's module, which needs the packages of an extra, and run it."""
    module, _ = COMMANDS[command]
    try:
        from headstart.scripts.command_line import run

        run(importlib.import_module(f"headstart.scripts.{module}").main, arguments)
    except ModuleNotFoundError as error:
        missing = named(error, f"headstart {command}")
        if missing is error:
            raise
        sys.exit(f"error: {missing}")


if __name__ == "__main__":
    main()
