"""Which classes of transformers an installed vLLM lists, and with an EAGLE-3 head: writes
served_by_vllm.json.

    .venv/bin/python tests/census/served_by_vllm.py \\
        .venv-vllm/lib/python3.11/site-packages      # after `make peers`

Read from its source: its registry of models by architecture, and the interface `SupportsEagle3`
among the bases of their classes. Nothing is run.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path

SERVED = Path(__file__).parent / "served_by_vllm.json"
TABLES = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS")
INTERFACE = "SupportsEagle3"


def architectures(registry: Path) -> dict[str, tuple[str, str]]:
    """Module and class of each architecture in vLLM's tables of generating models."""
    found: dict[str, tuple[str, str]] = {}
    for statement in ast.parse(registry.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and getattr(statement.targets[0], "id", "") in TABLES:
            found |= ast.literal_eval(statement.value)
    return found


def bases_by_class(models: Path) -> dict[tuple[str, str], list[str]]:
    """The names of each class's bases, by the module and name of the class."""
    found: dict[tuple[str, str], list[str]] = {}
    for path in models.rglob("*.py"):
        module = ".".join(path.relative_to(models).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found[module, node.name] = [ast.unparse(base).split("[")[0] for base in node.bases]
    return found


def supports_eagle3(place: tuple[str, str], bases: dict[tuple[str, str], list[str]]) -> bool:
    """Whether a class, or one from which it inherits, has the interface; bases are looked up in all
    modules."""
    waiting = [place]
    seen: set[tuple[str, str]] = set()
    while waiting:
        here = waiting.pop()
        if here in seen:
            continue
        seen.add(here)
        for base in bases.get(here, []):
            if base == INTERFACE:
                return True
            own = (here[0], base)
            waiting += [own] if own in bases else [other for other in bases if other[1] == base]
    return False


def main() -> None:
    """Write the table of the vLLM in a folder of packages."""
    packages = Path(sys.argv[1])
    (metadata,) = packages.glob("vllm*.dist-info")
    version = re.fullmatch(r"vllm[a-z_]*-([\d.]+)\.dist-info", metadata.name)
    assert version is not None, metadata
    models = packages / "vllm/model_executor/models"
    bases = bases_by_class(models)
    served = {}
    for architecture, place in architectures(models / "registry.py").items():
        served[architecture] = "EAGLE-3" if supports_eagle3(place, bases) else "listed"
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(served[name])}" for name in sorted(served))
    SERVED.write_text(
        f'{{"version": "{version[1]}", "architectures": {{\n{lines}\n}}}}\n', encoding="utf-8"
    )


if __name__ == "__main__":
    main()
