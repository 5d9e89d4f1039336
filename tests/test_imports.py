"""The house: packages import one way, stay flat, and every public part says what it is."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ORDER = ("heads", "inference", "train", "scripts")
"""Each imports only from itself and from those before it."""
FILES = sorted(path for package in ORDER for path in (ROOT / package).rglob("*.py"))


def imported(source: str, package: str) -> Iterator[str]:
    """Dotted names of all modules that a file of `package` imports, wherever in the file and in whatever form."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ["headstart", package][: 3 - node.level] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{name}.{alias.name}" for alias in node.names)


def forbidden(source: str, package: str) -> list[str]:
    """Imports of packages to the right, and of our packages under bare names, which other distributions own."""
    allowed = ORDER[: ORDER.index(package) + 1]
    wrong = []
    for name in imported(source, package):
        first, *rest = name.split(".")
        if first in ORDER or (first == "headstart" and (not rest or rest[0] not in allowed)):
            wrong.append(name)
    return wrong


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_run_one_way(path: Path) -> None:
    wrong = forbidden(path.read_text(encoding="utf-8"), path.relative_to(ROOT).parts[0])
    assert not wrong, f"{name_of(path)} must not import {wrong}: heads <- inference <- train <- scripts"


@pytest.mark.parametrize(
    ("package", "line"),
    [
        ("heads", "from ..inference import Target"),
        ("heads", "from .. import train"),
        ("heads", "import headstart.scripts.command"),
        ("heads", "def late():\n    from headstart import inference"),
        ("inference", "from headstart.train.config import TrainConfig as Config"),
        ("inference", "from ..train.data import Batch"),
        ("train", "from ..scripts import command"),
        ("train", "import heads"),
        ("scripts", "from inference.target import Target"),
    ],
)
def test_a_wrong_import_is_found_in_every_form(package: str, line: str) -> None:
    assert forbidden(line, package)


@pytest.mark.parametrize(
    ("package", "line"),
    [
        ("heads", "from . import HEADS\nfrom .base import wide\nimport torch.inference"),
        ("inference", "from ..heads import DraftHead\nfrom .tree import DraftTree"),
        ("train", "from ..heads.checkpoint import load_head\nfrom ..inference import Target"),
        ("scripts", "from headstart.train.config import TrainConfig\nfrom headstart import heads"),
    ],
)
def test_a_right_import_is_not(package: str, line: str) -> None:
    assert not forbidden(line, package)


def test_packages_are_those_of_pyproject_and_flat() -> None:
    """A subpackage would work in an editable install and be missing from the wheel."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    assert (
        sorted(config["packages"])
        == sorted(config["package-dir"])
        == sorted(("headstart", *(f"headstart.{name}" for name in ORDER)))
    )
    for package, folder in config["package-dir"].items():
        assert package == ("headstart" if folder == "package" else f"headstart.{folder}")
        assert (ROOT / folder / "__init__.py").is_file()
    nested = [name_of(path) for path in FILES if len(path.relative_to(ROOT).parts) > 2]
    assert not nested
    assert not (ROOT / "headstart").exists(), "headstart is a namespace: a folder of that name would shadow it"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_what_is_public_says_what_it_is(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), f"{name_of(path)} has no docstring"
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    public = [node for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")]
    silent = [node.name for node in public if not ast.get_docstring(node)]
    assert not silent, f"{name_of(path)}: no docstring on {silent}"
