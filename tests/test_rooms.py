"""The structure: imports run one way and never in a circle, folders are layers, and the wheel lists
them all."""

from __future__ import annotations

import ast
import functools
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import ROOT

ORDER = ("heads", "inference", "train", "addons", "scripts")
"""Each imports only from itself and from those before it."""
COMMON = ("console", "extras", "files", "options", "plots", "rows", "stopping")
"""Modules of package/, from which all may import."""
LAYERS = ("trees", "tuning", "cache", "targets", "engines", "drafters", "rounds", "text")
"""The folders of inference, each of which imports from itself and from those before it; its own
files from all."""
FILES = sorted(path for package in ORDER for path in (ROOT / package).rglob("*.py"))
CODE = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}


def module_of(path: Path) -> str:
    """heads/layers/attention.py as heads.layers.attention, and heads/__init__.py as heads."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in FILES}


def imported(module: str) -> Iterator[str]:
    """Absolute dotted names of everything that a module imports, wherever in the file and in
    whatever form."""
    path = MODULES[module]
    package = f"headstart.{module}".split(".")
    if path.stem != "__init__":
        package.pop()
    for node in ast.walk(CODE[path]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{name}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("package", ORDER)
def test_imports_run_one_way(package: str) -> None:
    """Nor are packages of ours imported under bare names, which other distributions own."""
    allowed = (*COMMON, *ORDER[: ORDER.index(package) + 1])
    for module in MODULES:
        if module.split(".")[0] == package:
            for name in imported(module):
                first, _, rest = name.partition(".")
                assert first not in ORDER, f"{module} imports {name}"
                ours = first == "headstart"
                assert not ours or rest.split(".")[0] in allowed, f"{module} imports {name}"


def defining_module(name: str) -> str | None:
    """The module of ours that an import of headstart.X.Y.name runs: the longest part of it that is
    a file."""
    first, *parts = name.split(".")
    for length in range(len(parts), 0, -1):
        module = ".".join(parts[:length])
        if first == "headstart" and module in MODULES:
            return module
    return None


@functools.cache
def all_arrows() -> dict[str, set[str]]:
    """The modules that each module imports; imports in functions and under TYPE_CHECKING count."""
    arrows: dict[str, set[str]] = {}
    for module in MODULES:
        others = {defining_module(name) for name in imported(module)}
        arrows[module] = {other for other in others if other not in (None, module)}
    return arrows


def reached(module: str) -> set[str]:
    """The modules that a module imports, and those that they import."""
    found: set[str] = set()
    rest = [module]
    while rest:
        for other in all_arrows()[rest.pop()] - found:
            found.add(other)
            rest.append(other)
    return found


def inference_layer(module: str) -> int:
    """The layer of a module of inference; that of the user's API is the last."""
    parts = module.split(".")
    return LAYERS.index(parts[1]) if len(parts) > 1 and parts[1] in LAYERS else len(LAYERS)


def test_the_folders_of_inference_are_layers() -> None:
    folders = {path.parent.name for path in (ROOT / "inference").glob("*/__init__.py")}
    assert folders == set(LAYERS)
    for module, others in all_arrows().items():
        for other in others:
            both_decode = module.split(".")[0] == other.split(".")[0] == "inference"
            up = both_decode and inference_layer(other) > inference_layer(module)
            assert not up, f"{module} -> {other}: {' <- '.join(LAYERS)} <- the user's API"


def test_no_imports_run_in_a_circle() -> None:
    circles = [module for module in MODULES if module in reached(module)]
    assert not circles, f"these import each other: {', '.join(circles)}"


WITHOUT_TRAINING = (
    "generate chat trace bench tree certify verify serve_check export import_head push"
)


@pytest.mark.parametrize("command", WITHOUT_TRAINING.split())
def test_a_command_that_does_not_train_imports_nothing_of_train(command: str) -> None:
    modules = reached(f"scripts.{command}")
    assert not [module for module in modules if module.split(".")[0] == "train"]


def test_packages_are_those_of_pyproject() -> None:
    """A subpackage that pyproject does not list works in an editable install and is missing from
    the wheel."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    config = tomllib.loads(text)["tool"]["setuptools"]
    folders = [path.parent for path in FILES if path.name == "__init__.py"]
    assert set(folders) == {path.parent for path in FILES}
    names = [f"headstart.{module_of(folder)}" for folder in folders]
    packages = ["headstart", "headstart.configs", "headstart.examples", *names]
    assert sorted(config["packages"]) == sorted(packages)
    for package, folder in config["package-dir"].items():
        assert package == ("headstart" if folder == "package" else f"headstart.{folder}")
    for folder in folders:
        listed = config["package-data"].get(f"headstart.{module_of(folder)}", [])
        for path in folder.iterdir():
            if path.suffix in (".cpp", ".h", ".html", ".css", ".js"):
                assert path.name in listed, f"the wheel lacks {path}"
    assert config["package-data"]["headstart.configs"] == ["*.yaml"], "taken by name"
    assert not (ROOT / "headstart").exists(), "it would shadow the namespace of that name"


def test_the_core_does_not_name_an_addon() -> None:
    """Neither in code nor in a comment: an add-on can be lifted out without a trace."""
    for module, path in MODULES.items():
        in_core = module.split(".")[0] in ("heads", "inference", "train")
        assert not in_core or "addons" not in path.read_text(encoding="utf-8"), module


def test_new_tensors_do_not_take_torchs_default_dtype() -> None:
    """A program may have set another one, and kernels of ours write to the memory of a tensor."""
    makers = ("zeros", "ones", "empty", "rand", "randn", "linspace", "eye")
    names = {f"torch.{maker}" for maker in makers}
    for path, code in CODE.items():
        for node in ast.walk(code):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in names:
                given = {keyword.arg for keyword in node.keywords}
                assert "dtype" in given, f"name the dtype: {path}:{node.lineno}"
