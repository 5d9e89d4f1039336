"""Is the installed wheel whole? Run by its environment's Python, elsewhere: check_wheel.py
REPOSITORY."""

import importlib
import sys
from pathlib import Path

import headstart
from headstart.files import example

repository = Path(sys.argv[1]).resolve()
modules = 0
for name in ("heads", "inference", "train", "addons", "scripts"):
    package = importlib.import_module(f"headstart.{name}")
    installed = Path(package.__file__).resolve().parent
    assert not installed.is_relative_to(repository), (
        f"{package.__name__} is {installed}, not the wheel's"
    )
    patterns = ("*.py", "*.cpp", "*.html", "*.css", "*.js")
    sources = (path for pattern in patterns for path in (repository / name).rglob(pattern))
    wanted = {path.relative_to(repository / name) for path in sources}
    missing = sorted(str(path) for path in wanted if not (installed / path).is_file())
    assert not missing, f"the wheel's headstart.{name} lacks {', '.join(missing)}"
    modules += len(wanted)
assert (Path(headstart.__file__).parent / "py.typed").is_file(), (
    "type checkers take no hints without py.typed"
)
ours = {path.name for path in (Path(headstart.__file__).parent / "configs").glob("*")}
wanted_configs = {path.name for path in (repository / "configs").glob("*.yaml")}
assert wanted_configs <= ours, f"the wheel lacks configs: {wanted_configs - ours}"
for name in ("examples/prompts.jsonl", "examples/smollm2-135m-eagle3/model.safetensors"):
    assert Path(example(name)).is_file(), f"the wheel lacks {name}"
print(f"headstart {headstart.__version__}: 4 packages imported, {modules} modules in the wheel")
