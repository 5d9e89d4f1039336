"""The structure: imports run one way and never in a circle, folders stay small, and the wheel lists
them all."""

from __future__ import annotations

import ast
import functools
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ORDER = ("heads", "inference", "train", "addons", "scripts")
"""Each imports only from itself and from those before it."""
CORE = ("heads", "inference", "train")
LAYERS = ("trees", "tuning", "cache", "targets", "engines", "drafters", "rounds", "text")
"""The folders of inference, each of which imports from itself and from those before it; its own
files from all."""
FILES = sorted(path for package in ORDER for path in (ROOT / package).rglob("*.py"))


def module_of(path: Path) -> str:
    """heads/layers/attention.py as heads.layers.attention, and heads/__init__.py as heads."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in FILES}


def imported(source: str, module: str, is_package: bool = False) -> Iterator[str]:
    """Absolute dotted names of everything that a module imports, wherever in the file and in
    whatever form."""
    package = (
        f"headstart.{module}".split(".") if is_package else f"headstart.{module}".split(".")[:-1]
    )
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{name}.{alias.name}" for alias in node.names)


def forbidden(source: str, module: str, is_package: bool = False) -> list[str]:
    """Imports of packages to the right, and of our packages under bare names, which other
    distributions own."""
    allowed = (
        "console",
        "extras",
        "files",
        "options",
        "plots",
        "rows",
        "stopping",
        *ORDER[: ORDER.index(module.split(".")[0]) + 1],
    )
    wrong = []
    for name in imported(source, module, is_package):
        first, *rest = name.split(".")
        if first in ORDER or (first == "headstart" and (not rest or rest[0] not in allowed)):
            wrong.append(name)
    return wrong


def defining_module(name: str) -> str | None:
    """The module of ours that an import of headstart.X.Y.name runs: the longest part of it that is
    a file."""
    parts = name.removeprefix("headstart.").split(".")
    known = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return (
        next((module for module in known if module in MODULES), None)
        if name.startswith("headstart.")
        else None
    )


def circle(arrows: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle, in its order, or an empty list."""
    done: set[str] = set()

    def walk(module: str, path: list[str]) -> list[str]:
        if module in path:
            return path[path.index(module) :]
        if module not in done:
            for other in sorted(arrows[module]):
                if found := walk(other, [*path, module]):
                    return found
            done.add(module)
        return []

    return next((found for module in arrows if (found := walk(module, []))), [])


def test_imports_run_one_way() -> None:
    for module, path in MODULES.items():
        wrong = forbidden(path.read_text(encoding="utf-8"), module, path.stem == "__init__")
        assert not wrong, (
            f"{module} must not import {wrong}: heads <- inference <- train <- addons <- scripts"
        )


@functools.cache
def all_arrows() -> dict[str, set[str]]:
    """The modules that each module imports; imports in functions and under TYPE_CHECKING count."""
    arrows: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        names = imported(path.read_text(encoding="utf-8"), module, path.stem == "__init__")
        others = {defining_module(name) for name in names}
        arrows[module] = {other for other in others if other not in (None, module)}
    return arrows


def layer_of(module: str) -> int:
    """The layer of a module of inference; that of the user's API is the last."""
    parts = module.split(".")
    return LAYERS.index(parts[1]) if len(parts) > 1 and parts[1] in LAYERS else len(LAYERS)


def runs_up(module: str, other: str) -> bool:
    """Whether a module of inference imports another of a higher layer."""
    both_decode = module.split(".")[0] == other.split(".")[0] == "inference"
    return both_decode and layer_of(other) > layer_of(module)


def test_the_folders_of_inference_are_layers() -> None:
    folders = {path.parent.name for path in (ROOT / "inference").glob("*/__init__.py")}
    assert folders == set(LAYERS)
    arrows = all_arrows().items()
    up = [
        f"{module} -> {other}"
        for module, others in arrows
        for other in others
        if runs_up(module, other)
    ]
    assert not up, f"{', '.join(up)}: {' <- '.join(LAYERS)} <- the user's API"
    assert runs_up("inference.trees.verify", "inference.engines.base")
    assert runs_up("inference.text.chat", "inference.speculative_lm") and not runs_up(
        "inference", "inference.inputs"
    )


def test_no_imports_run_in_a_circle() -> None:
    found = circle(all_arrows())
    assert not found, " -> ".join([*found, found[0]])


def reached(module: str, arrows: dict[str, set[str]]) -> set[str]:
    """The modules that a module imports, and those that they import."""
    found: set[str] = set()
    rest = [module]
    while rest:
        for other in arrows[rest.pop()] - found:
            found.add(other)
            rest.append(other)
    return found


@pytest.mark.parametrize(
    "command",
    [
        "generate",
        "chat",
        "trace",
        "bench",
        "tree",
        "certify",
        "verify",
        "serve_check",
        "export",
        "import_head",
        "push",
    ],
)
def test_a_command_that_does_not_train_imports_nothing_of_train(command: str) -> None:
    found = {
        module
        for module in reached(f"scripts.{command}", all_arrows())
        if module.split(".")[0] == "train"
    }
    assert not found, (
        f"scripts.{command} needs {sorted(found)}: what decoding needs stands in inference"
    )


def test_packages_are_those_of_pyproject() -> None:
    """A subpackage that pyproject does not list works in an editable install and is missing from
    the wheel."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
        "setuptools"
    ]
    folders = sorted(f"headstart.{module_of(path)}" for path in FILES if path.name == "__init__.py")
    assert sorted(config["packages"]) == sorted(
        ["headstart", "headstart.configs", "headstart.examples", *folders]
    )
    for package, folder in config["package-dir"].items():
        assert package == ("headstart" if folder == "package" else f"headstart.{folder}")
    assert {path.parent for path in FILES} == {
        path.parent for path in FILES if path.name == "__init__.py"
    }
    data = (".cpp", ".h", ".html", ".css", ".js")
    for path in (
        path for package in ORDER for path in (ROOT / package).rglob("*") if path.suffix in data
    ):
        assert path.name in config["package-data"][f"headstart.{module_of(path.parent)}"], (
            f"the wheel lacks {path}"
        )
    assert config["package-data"]["headstart.configs"] == ["*.yaml"], "taken by name"
    assert not (ROOT / "headstart").exists(), (
        "headstart is a namespace: a folder of that name would shadow it"
    )


def test_modules_and_public_names_have_docstrings_that_begin_with_the_thing() -> None:
    """Ruff asks for docstrings on public names; none may begin with a word that only points
    elsewhere."""
    wrong = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                words = (ast.get_docstring(node) or "-").split()
                if words[0].rstrip(",:") in ("See", "Of", "What", "As"):
                    wrong.append(
                        f"{path.relative_to(ROOT)}: {getattr(node, 'name', 'module')}:"
                        f" {' '.join(words[:6])}"
                    )
    assert not wrong, "\n".join(wrong)


def test_the_core_does_not_name_an_addon() -> None:
    """Neither in code nor in a comment: an add-on can be lifted out without a trace."""
    core = [path for path in FILES if path.relative_to(ROOT).parts[0] in CORE]
    naming = [
        str(path.relative_to(ROOT)) for path in core if "addons" in path.read_text(encoding="utf-8")
    ]
    assert not naming, f"{', '.join(naming)} should know nothing of what is built on the core"


def test_new_tensors_do_not_take_torchs_default_dtype() -> None:
    """A program may have set another one, and kernels of ours write to the memory of a tensor."""
    makers = ("zeros", "ones", "empty", "rand", "randn", "linspace", "eye")
    unnamed = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {
                f"torch.{maker}" for maker in makers
            }:
                names = {keyword.arg for keyword in node.keywords}
                if "dtype" not in names:
                    unnamed.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not unnamed, f"name the dtype: {', '.join(unnamed)}"
