"""Prompts of five kinds out of a file of many, chosen by their words, for `machines.py`.

    python benchmarks/kinds.py prompts.jsonl kinds/

Reads rows {"source": ..., "messages": [...]} and writes translation, summaries, context, questions and instructions
.jsonl: of instructions T0 and Alpaca, each prompt in the first kind that it fits.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

SOURCES = ("self-instruct-t0", "llamafactory-alpaca-en-demo")
LONG = 300
"""Characters from which a prompt may hold a context."""


def main() -> None:
    """One file for each kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--limit", type=int, default=40)
    options = parser.parse_args()
    kinds = defaultdict(list)
    with options.prompts.open(encoding="utf-8") as file:
        for line in file:
            kinds[kind(json.loads(line))].append(line)
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, lines in kinds.items():
        if name:
            (options.folder / f"{name}.jsonl").write_text("".join(lines[: options.limit]), encoding="utf-8")


def kind(row: dict[str, Any]) -> str:
    """The kind of a prompt; empty for none of the five."""
    text = row["messages"][0]["content"]
    if row["source"] not in SOURCES:
        return ""
    if re.search(r"\btranslate\b|\btranslation", text, re.IGNORECASE):
        return "translation"
    if re.search(r"summar", text, re.IGNORECASE):
        return "summaries"
    if len(text) >= LONG and re.search(r"\b(passage|context|article|paragraph|document)\b", text, re.IGNORECASE):
        return "context"
    if len(text) < LONG and text.rstrip().endswith("?"):
        return "questions"
    return "instructions" if row["source"] == SOURCES[1] else ""


if __name__ == "__main__":
    main()
