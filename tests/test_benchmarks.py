"""Benchmarks are not run by the tests: what they import exists, and each has a page of figures."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
SHARED = {"common", "gpu_kernels", "launches", "process_status"}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_what_it_imports_exists(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("headstart"):
            module = importlib.import_module(node.module)
            missing = [name.name for name in node.names if not hasattr(module, name.name)]
            assert not missing, f"{path.name} imports {missing} from {node.module}"


def test_each_has_a_page_and_each_page_a_script():
    pages = {path.stem for path in FOLDER.glob("*.md")}
    assert {path.stem for path in FOLDER.glob("*.py")} - SHARED == pages
