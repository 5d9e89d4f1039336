"""Files of checkpoints: untrusted when read, written whole or not at all.

Pickles are read by `torch.load(weights_only=True)`, which runs no code. Files must lie in the
folder itself. A folder is replaced only if all that it holds was written by what replaces it.
"""

from __future__ import annotations

import math
import pickle
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...files import LONGEST_REASON, at_home, one_line, parse_json, read_bytes
from ...options import shown

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
OF_BROKEN_PICKLES = (
    AssertionError,
    AttributeError,
    LookupError,
    OverflowError,
    TypeError,
    ValueError,
    struct.error,
)
"""What torch's reader of pickles raises for a file with a changed byte, in addition to
`UnpicklingError`."""
CONFIG_LIMIT = 2**22
"""Most bytes of a JSON file."""
INDEX_LIMIT = 2**27
"""Most bytes of an index; that of a model with a hundred thousand experts' matrices has some ten
million."""
WEIGHT_FILES = (
    WEIGHTS_FILE,
    "medusa_lm_head.safetensors",
    "pytorch_model.bin",
    "medusa_lm_head.pt",
    "hydra_lm_head.pt",
)
"""Names of weight files, each possibly sharded; the first that exists is read."""


def read_json(path: Path, limit: int = CONFIG_LIMIT) -> dict[str, Any]:
    """Read the JSON object in a file of a head, of at most `limit` bytes."""
    if not path.is_file():
        # A training's checkpoints hold its whole state, and are called step-00000100.
        of_run = path.parent.name.startswith("step-")
        hint = "; the heads of a run are best and last in its folder" if of_run else ""
        raise ValueError(f"no head in {str(path.parent)!r}: it has no {path.name}{hint}")
    size = path.stat().st_size
    if size > limit:
        raise ValueError(f"{path} has {size:,} bytes, and {path.name} may have at most {limit:,}")
    value = parse_json(read_bytes(path), path)
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__} and no JSON object")
    return value


def read_weights(folder: Path, names: tuple[str, ...] = WEIGHT_FILES) -> dict[str, Tensor]:
    """Read all tensors of a checkpoint to the CPU, from the first of `names` that exists."""
    parts, index = weight_files(folder, names)
    if index is None:
        return _read_file(folder, parts[0])
    tensors: dict[str, Tensor] = {}
    for part in parts:
        tensors |= _read_file(folder, part)
    _check_index(folder, index, tensors.keys())
    return tensors


def weight_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors of a safetensors checkpoint.

    They come from the files' headers: no tensor is read.
    """
    parts, index = weight_files(folder, (WEIGHTS_FILE,))
    shapes: dict[str, tuple[int, ...]] = {}
    for part in parts:
        with open_safetensors(_inside(folder, part)) as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    if index is not None:
        _check_index(folder, index, shapes.keys())
    return shapes


def weight_files(
    folder: Path, names: tuple[str, ...] = WEIGHT_FILES
) -> tuple[list[str], str | None]:
    """Return the names of a checkpoint's weight files, and of their index if they are sharded."""
    for name in names:
        if (folder / name).exists():
            return [name], None
        index = f"{name}.index.json"
        if (folder / index).exists():
            return sorted(set(_weight_map(folder / index).values())), index
    raise ValueError(f"no head in {str(folder)!r}: it has no {' or '.join(names)}")


def files_of_tensors(path: Path) -> dict[str, str]:
    """Map each tensor of a checkpoint to its file.

    `path` is the checkpoint's index or, where it is one safetensors file, that file.
    """
    if path.suffix == ".json":
        return _weight_map(path)
    with open_safetensors(path) as file:
        return dict.fromkeys(file.keys(), path.name)


@contextmanager
def open_safetensors(path: Path) -> Iterator[Any]:
    """Open a safetensors file, whose tensors are read by name.

    A ValueError refuses a file that is missing or truncated, and names of tensors that no model
    has: messages show them.
    """
    if not path.is_file():
        raise ValueError(f"{path} is missing")
    try:
        with safe_open(path, framework="pt") as file:
            _check_names(path, file.keys())
            yield file
    except (SafetensorError, OSError, RuntimeError) as error:
        raise ValueError(f"{path} cannot be read, or was truncated: {one_line(error)}") from error


def _check_names(path: Path, names: Iterable[str]) -> None:
    """Refuse names that no tensor of a model has: messages show them."""
    for name in names:
        if len(name) > LONGEST_REASON or not name.isprintable():
            raise ValueError(f"{path} has a tensor named {shown(name)}")


def _weight_map(index: Path) -> dict[str, str]:
    parts = read_json(index, INDEX_LIMIT).get("weight_map")
    if (
        not isinstance(parts, dict)
        or not parts
        or not all(isinstance(part, str) for part in parts.values())
    ):
        raise ValueError(f"{index} has no weight_map of tensors to files")
    _check_names(index, parts)
    # A name with a NUL is no file's either, and messages would show its control characters.
    elsewhere = [
        part
        for part in parts.values()
        if Path(part).name != part or not part.isprintable() or len(part) > LONGEST_REASON
    ]
    if elsewhere:
        raise ValueError(f"{index} names {shown(elsewhere[0])}, which leads out of its folder")
    return parts


def _check_index(folder: Path, index: str, names: Any) -> None:
    """Refuse files that hold other tensors than their index says."""
    wrong = sorted(names ^ _weight_map(folder / index).keys())
    if wrong:
        raise ValueError(f"{folder / index} and its files differ by tensor {wrong[0]!r}")


def leads_out(folder: Path, path: Path) -> bool:
    """Whether a path in a folder is, or goes through, a link to a place outside of it."""
    home = folder.resolve()
    # In the Hub's cache models--A--B/snapshots/REVISION/config.json is a link into
    # models--A--B/blobs.
    allowed = [home, home.parents[1] / "blobs"] if home.parent.name == "snapshots" else [home]
    return not any(path.resolve().is_relative_to(root) for root in allowed)


def _inside(folder: Path, name: str) -> Path:
    path = folder / name
    if not path.is_file():
        raise ValueError(f"{path} is missing")
    if leads_out(folder, path):
        raise ValueError(f"{path} leads out of its folder, to {path.resolve()}: it is not opened")
    return path


def _read_file(folder: Path, name: str) -> dict[str, Tensor]:
    path = _inside(folder, name)
    try:
        if path.suffix == ".safetensors":
            with open_safetensors(path) as file:
                tensors: Any = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        else:
            tensors = torch.load(path, "cpu", weights_only=True)
    except (EOFError, OSError, RuntimeError, *OF_BROKEN_PICKLES) as error:
        raise ValueError(f"{path} cannot be read, or was truncated: {one_line(error)}") from error
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} is a pickle that holds more than tensors, which could run anything: it is not"
            " opened. Ask its author for safetensors"
        ) from error
    if not isinstance(tensors, dict) or not all(
        isinstance(tensor, Tensor) for tensor in tensors.values()
    ):
        raise ValueError(f"{path} holds no tensors by name")
    return tensors


@dataclass(frozen=True)
class Contents:
    """Files that a folder may hold if it is to be replaced."""

    what: str
    """Its name in messages."""
    files: tuple[str, ...]
    """Patterns of all its files, by their paths from the folder."""
    written_here: Callable[[Path], bool]
    """Whether a folder of such files was written by us: a model has a config.json and a
    model.safetensors too."""

    def foreign(self, folder: Path, whole: bool = True) -> list[str]:
        """Return the files of a folder that do not belong to these contents.

        If the folder was not written by us, these are all its files. `whole` is False for a folder
        that a killed process left half-written.
        """
        names = sorted(path.relative_to(folder).as_posix() for path in _files(folder))
        if whole and names and not self.written_here(folder):
            return names
        foreign = []
        for name in names:
            if not any(fnmatchcase(name, pattern) for pattern in self.files):
                foreign.append(name)
        return foreign


def _files(folder: Path) -> Iterator[Path]:
    """Yield all files below a folder.

    A link counts as a file, wherever it leads, and so does an empty folder.
    """
    for path in folder.iterdir():
        if not path.is_dir() or path.is_symlink():
            yield path
            continue
        below = list(_files(path))
        yield from below or [path]


def section_of(folder: Path) -> dict[str, Any] | None:
    """The `headstart` section of a folder's config.json; None without one."""
    try:
        section = read_json(folder / CONFIG_FILE).get("headstart")
    except (ValueError, OSError):
        return None
    return section if isinstance(section, dict) else None


HEAD = Contents(
    "a head",
    (
        *(CONFIG_FILE, ".config.json.*.partial", "README.md", ".README.md.*.partial", ".DS_Store"),
        *(WEIGHTS_FILE, f"{WEIGHTS_FILE}.index.json", "model-?????-of-?????.safetensors"),
        *("custom_generate", "custom_generate/generate.py", "custom_generate/__pycache__/*"),
        *(
            "adapter",
            "adapter/adapter_config.json",
            "adapter/adapter_model.safetensors",
            "adapter/README.md",
        ),
        *(".gitattributes", ".cache/huggingface/*"),  # of the Hub, beside a downloaded head
    ),
    lambda folder: section_of(folder) is not None,
)
"""A head's checkpoint."""


def refuse_foreign(final: str | Path, contents: Contents) -> None:
    """Refuse a folder for `contents` that holds anything else.

    The same holds for the folders next to it that saving uses.

    Raises:
        ValueError: naming the first of its files, or a file of that name.
    """
    final = Path(at_home(final)).resolve()
    if final.exists() and not final.is_dir():
        raise ValueError(f"{final} is a file: choose another folder for {contents.what}")
    _refuse(final, contents)
    _refuse(final.with_name(f"{final.name}.replaced"), contents)
    _refuse(final.with_name(f"{final.name}.partial"), contents, whole=False)


def _refuse(folder: Path, contents: Contents, whole: bool = True) -> None:
    foreign = contents.foreign(folder, whole) if folder.is_dir() else []
    if foreign:
        more = f" and {len(foreign) - 4} more" if len(foreign) > 4 else ""
        raise ValueError(
            f"{folder} holds files that are not those of {contents.what} written by headstart: "
            f"{', '.join(foreign[:4])}{more}; choose another folder, or move them away"
        )


@contextmanager
def new_folder(final: str | Path, contents: Contents) -> Iterator[Path]:
    """Make a folder that appears whole or not at all.

    It is written next to its final path under another name, then renamed. What was there before
    must be earlier `contents`, see `refuse_foreign`.
    """
    # 1. Clear away what a killed process has left: for head, head.partial and head.replaced.
    final = Path(at_home(final)).resolve()
    refuse_foreign(final, contents)
    partial = final.with_name(f"{final.name}.partial")
    replaced = final.with_name(f"{final.name}.replaced")
    finish_replacing(final)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        # 2. The caller writes.
        yield partial
        # The files may be read by whom the umask lets read: safetensors writes them for their
        # owner alone.
        allowed = partial.stat().st_mode & 0o666
        for path in partial.rglob("*"):
            if path.is_file():
                path.chmod(path.stat().st_mode | allowed)
        # 3. Two renames. Killed between them, `finish_replacing` undoes the first.
        _refuse(final, contents)  # once more: somebody may have put a file there meanwhile
        shutil.rmtree(replaced, ignore_errors=True)
        if final.exists():
            final.rename(replaced)
        partial.rename(final)
    except BaseException:  # an interrupt too
        finish_replacing(final)
        shutil.rmtree(partial, ignore_errors=True)
        raise
    # 4. The new folder is in place: drop the old one.
    shutil.rmtree(replaced, ignore_errors=True)


def finish_replacing(folder: Path) -> None:
    """Restore the previous `folder` if a process was killed between its two renames.

    The first moves the previous folder away, the second moves the new one in.
    """
    replaced = folder.with_name(folder.name + ".replaced")
    if replaced.exists() and not folder.exists():
        replaced.rename(folder)


def json_ready(value: Any) -> Any:
    """Convert for strict JSON: tuples become lists, and NaN and infinities become null.

    A mean over nothing is such a NaN.
    """
    if isinstance(value, dict):
        return {key: json_ready(child) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_ready(child) for child in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
