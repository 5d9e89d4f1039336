"""Drafters without a head, as a Python program names them: `drafter=History(nodes=24)`.

A command line writes each of them as text, see `SPECS`, which `drafter_spec` parses.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...files import at_home

SPECS = {
    "history": "history[:NODES[:LENGTH]]",
    "prompt-lookup": "prompt-lookup[:NODES[:LENGTH]]",
    "retrieval": "retrieval:FOLDER[:NODES[:LENGTH]]",
    "model": "model:NAME",
}
"""How a command line writes a drafter; FOLDER is what `headstart datastore` made, NAME a smaller
model. prompt-lookup is a history of the text alone, retrieval one with a corpus."""
REMOVED = {
    "lookahead": "history, which is faster and drafts by default beside a head",
    "ngram": "history, which drafts what followed the newest tokens before",
    "random": "history",
}
"""Drafters of earlier versions, and what takes their place."""


@dataclass(frozen=True)
class History:
    """Tokens that followed the newest ones before: in the text, in earlier ones, in a corpus."""

    nodes: int = 12
    """Nodes of a tree, at most."""
    length: int = 10
    """Tokens of a continuation, at most."""
    earlier: bool = True
    """Whether answers of earlier calls, and the ends of their prompts, are searched. Drafts cannot
    change a text, but speed tells that a passage was written before: False keeps users apart."""
    folder: str | Path | None = None
    """A corpus, as `headstart datastore` makes it."""


@dataclass(frozen=True)
class SmallerModel:
    """A smaller model with the target's vocabulary; a loaded one can be `drafter` itself.

    One whose config says `spd_type: pard` drafts all tokens in one forward (PARD,
    arXiv:2504.18583).
    """

    name: str
    """A folder or a Hub id."""


DrafterSpec = History | SmallerModel
"""A drafter without a head."""


def drafter_spec(text: str) -> DrafterSpec:
    """Parse a drafter as a command line writes it.

    Raises:
        ValueError: an unknown drafter, or options that it does not have.
    """
    name, _, options = text.partition(":")
    name = name.replace("_", "-")
    if name == "history":
        return History(*_nodes_and_length(name, options))
    if name == "prompt-lookup":
        return History(*_nodes_and_length(name, options), earlier=False)
    if name == "retrieval":
        folder, numbers = _path_and_numbers(options)
        if not folder:
            raise ValueError(f"the drafter retrieval needs a datastore: {SPECS[name]}")
        return History(*_nodes_and_length(name, numbers), folder=folder)
    if name in REMOVED:
        raise ValueError(f"the drafter {text!r} was removed; use {REMOVED[name]}")
    if name == "model":
        if not options:
            raise ValueError(f"the drafter model needs a model: {SPECS[name]}")
        return SmallerModel(options)
    # A Hub id or a folder is a smaller model, as org/PARD-Qwen3-0.6B.
    if "/" in text or Path(at_home(text)).is_dir():
        return SmallerModel(text)
    raise ValueError(f"unknown drafter {text!r}; choose from {', '.join(SPECS.values())}")


def _nodes_and_length(name: str, options: str) -> tuple[int, int]:
    """The numbers of a history's options, of which the last ones may be left out."""
    numbers = options.split(":") if options else []
    if len(numbers) > 2 or not all(number.isdigit() for number in numbers):
        raise ValueError(f"the drafter {name}:{options} has invalid options; write {SPECS[name]}")
    nodes = int(numbers[0]) if numbers else History.nodes
    length = int(numbers[1]) if len(numbers) > 1 else History.length
    return nodes, length


def _path_and_numbers(options: str) -> tuple[str, str]:
    """Split PATH[:NODES[:LENGTH]]; a path may hold colons, and is taken whole if it exists."""
    # Take numbers from the end: "C:\store:12:10" gives "C:\store" and ["12", "10"].
    numbers: list[str] = []
    path = at_home(options)
    while len(numbers) < 2 and ":" in path and not Path(path).exists():
        before, _, last = path.rpartition(":")
        if not last.isdigit():
            break
        path = before
        numbers.insert(0, last)
    return path, ":".join(numbers)
