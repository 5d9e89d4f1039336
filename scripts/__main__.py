"""headstart COMMAND: data, features, train, tree, datastore, generate, bench, verify, push, import, export, demo."""

from __future__ import annotations

import importlib
import sys

from headstart.scripts.command import run

COMMANDS = {
    "data": "make conversations: the model writes prompts, or answers given ones",
    "features": "write the target's states to disk, for training to read",
    "train": "train a draft head on a frozen model",
    "tree": "find the draft tree that is fastest for a head on this machine",
    "datastore": "sort a corpus, for guesses that are looked up",
    "generate": "answer a prompt with a head, streaming",
    "bench": "compare stock generate, the plain engine and speculation on the same prompts",
    "verify": "check a head against its target",
    "push": "put a head on the Hugging Face Hub",
    "import": "read a head of another project",
    "export": "write a head as another project does",
    "demo": "all of it on a small real model, in some minutes",
}


def main() -> None:
    """Dispatch to one of the commands."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: headstart COMMAND [OPTIONS]\n\ncommands:")
        for name, purpose in COMMANDS.items():
            print(f"  {name:<10} {purpose}")
        print("\nheadstart COMMAND --help tells a command's options.")
        return
    if arguments[0] not in COMMANDS:
        print(f"error: unknown command {arguments[0]!r}; choose from {', '.join(COMMANDS)}", file=sys.stderr)
        sys.exit(2)
    file = {"import": "import_head"}.get(arguments[0], arguments[0])  # Python has a word `import` of its own
    run(importlib.import_module(f"headstart.scripts.{file}").main, arguments[1:])


if __name__ == "__main__":
    main()
