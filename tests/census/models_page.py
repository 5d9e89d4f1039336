"""Writes the tables of docs/models.md, between two comments, from the results of the census.

.venv/bin/python tests/census/models_page.py        # after a change of the page alone; `make
census` does it too
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs/models.md"
BEGIN = "<!-- census: written by `make census` -->"
END = "<!-- end of the census -->"
DECODED = {"trees": "trees", "chains": "chains only"}
FAULTS = ("wrong", "error")


def results() -> dict[str, Any]:
    """The results of the last census."""
    found: dict[str, Any] = json.loads((HERE / "results.json").read_text(encoding="utf-8"))
    return found


def tables(census: dict[str, Any]) -> str:
    """The part of the page that the results decide."""
    served = json.loads((HERE / "served_by_vllm.json").read_text(encoding="utf-8"))
    by_outcome: dict[str, list[dict[str, Any]]] = {}
    for record in census["records"]:
        by_outcome.setdefault(record["outcome"], []).append(record)
    parts = [_summary(by_outcome, census["made_by"]["transformers"]), _decoded(by_outcome, served)]
    parts.append(_reasons("## Refused, with the reason", "why", by_outcome.get("refused", [])))
    faults = [record for outcome in FAULTS for record in by_outcome.get(outcome, [])]
    if faults:
        parts.append(_reasons("## Known faults", "what happens", faults))
    parts.append(_not_loaded(by_outcome))
    not_built = ", ".join(f"`{record['name']}`" for record in by_outcome.get("not built", []))
    parts.append(
        "## Not tried\n\nOf these the census builds no small model that writes text from text"
        " alone: a package that is missing here, a config that cannot be shrunk, or a model that"
        f" needs an image or a sound.\n\n{not_built}"
    )
    return "\n\n".join(parts) + "\n"


def _summary(by_outcome: dict[str, list[dict[str, Any]]], version: str) -> str:
    counts = {outcome: len(records) for outcome, records in by_outcome.items()}
    rows = [
        ("identical, in trees and chains", counts.get("trees", 0)),
        ("identical, in chains alone", counts.get("chains", 0)),
        ("refused, with the reason", counts.get("refused", 0)),
        ("other tokens, or another exception", sum(counts.get(outcome, 0) for outcome in FAULTS)),
        ("not tried", counts.get("not built", 0)),
    ]
    table = "\n".join(f"| {what} | {count} |" for what, count in rows if count)
    return f"Types and variants in transformers {version}:\n\n| | types |\n|---|---|\n{table}"


def _decoded(by_outcome: dict[str, list[dict[str, Any]]], served: dict[str, Any]) -> str:
    records = [record for outcome in DECODED for record in by_outcome.get(outcome, [])]
    rows = []
    for record in sorted(records, key=lambda record: record["name"]):
        heads = "trains" if record["heads"] == "trains" else "no"
        vllm = served["architectures"].get(record["kind"], "")
        rows.append(f"| {_name(record)} | {DECODED[record['outcome']]} | {heads} | {vllm} |")
    untaught = [record for record in records if record["heads"] not in ("", "trains")]
    why = _grouped({**record, "reason": record["heads"]} for record in untaught)
    notes = "".join(f"\n\nNo head for {types}: {reason}." for reason, types in why)
    return (
        f"## Identical\n\nIn the last column *EAGLE-3* means that vLLM {served['version']} lists"
        " the architecture with support for such heads, *listed* that it serves it without.\n\n|"
        " type | drafts | EAGLE-3 head | vLLM |\n|---|---|---|---|\n" + "\n".join(rows) + notes
    )


def _reasons(title: str, column: str, records: list[dict[str, Any]]) -> str:
    rows = "\n".join(f"| {types} | {reason} |" for reason, types in _grouped(records))
    return f"{title}\n\n| types | {column} |\n|---|---|\n{rows}"


def _not_loaded(by_outcome: dict[str, list[dict[str, Any]]]) -> str:
    """Types that decode as a loaded model, and not by the name of a folder."""
    records = [record for outcome in DECODED for record in by_outcome.get(outcome, [])]
    failed = [
        {**record, "reason": record["folder"]}
        for record in records
        if record["folder"] not in ("", "loads")
    ]
    if not failed:
        return (
            "## From a folder\n\nAll types that decode also load from a folder, and so by Hub id."
        )
    return _reasons("## Loaded models alone", "why a folder does not load", failed)


def _grouped(records: Iterable[dict[str, Any]]) -> list[tuple[str, str]]:
    """Reasons with the types that have them in common, most types first; the class's name is left
    out of a reason."""
    found: dict[str, list[str]] = {}
    for record in records:
        kind = record["kind"]
        reason = re.sub(rf"^{kind}\b( \('{kind}'\))?", "the model", record["reason"])
        reason = reason.replace(f" ('{kind}')", "")
        reason = re.sub(r"\b\d+ of (its|the) \d+ layers", r"some of \1 layers", reason)
        found.setdefault(reason.replace("|", "\\|"), []).append(_name(record))
    ordered = sorted(found.items(), key=lambda item: (-len(item[1]), item[0]))
    return [(reason, ", ".join(sorted(names))) for reason, names in ordered]


def _name(record: dict[str, Any]) -> str:
    model_type, _, variant = record["name"].partition("@")
    return f"`{model_type}` {variant}".rstrip()


def with_tables(page: str, census: dict[str, Any]) -> str:
    """A page with the tables of these results in place of the old ones."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tables(census)}\n{END}{after}"


def write() -> None:
    """Write the page."""
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(with_tables(page, results()), encoding="utf-8")


if __name__ == "__main__":
    write()
