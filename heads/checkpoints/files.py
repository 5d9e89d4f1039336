"""Files of checkpoints: untrusted when read, written whole or not at all.

Pickles are read by `torch.load(weights_only=True)`, which runs no code. Files must lie in the folder itself.
"""

from __future__ import annotations

import json
import math
import pickle
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
CONFIG_LIMIT = 2**22
"""Most bytes of a JSON file."""
WEIGHT_FILES = (
    WEIGHTS_FILE,
    "medusa_lm_head.safetensors",
    "pytorch_model.bin",
    "medusa_lm_head.pt",
    "hydra_lm_head.pt",
)
"""Names of weight files, each possibly sharded; the first that exists is read."""


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of at most `CONFIG_LIMIT` bytes."""
    if not path.is_file():
        raise ValueError(f"no head in {str(path.parent)!r}: it has no {path.name}")
    size = path.stat().st_size
    if size > CONFIG_LIMIT:
        raise ValueError(f"{path} has {size:,} bytes, and a head's {path.name} at most {CONFIG_LIMIT:,}")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__} and no JSON object")
    return found


def read_weights(folder: Path, names: tuple[str, ...] = WEIGHT_FILES) -> dict[str, Tensor]:
    """Read all tensors of a checkpoint to the CPU, from the first of `names` that exists."""
    for name in names:
        index = folder / f"{name}.index.json"
        if (folder / name).exists():
            return _read_file(folder, name)
        if index.exists():
            parts = read_json(index).get("weight_map")
            if not isinstance(parts, dict) or not all(isinstance(part, str) for part in parts.values()):
                raise ValueError(f"{index} has no weight_map of tensors to files")
            found: dict[str, Tensor] = {}
            for part in sorted(set(parts.values())):
                found |= _read_file(folder, part)
            if found.keys() != parts.keys():
                wrong = sorted(found.keys() ^ parts.keys())[0]
                raise ValueError(f"{index} and its files differ by tensor {wrong!r}")
            return found
    raise ValueError(f"no head in {str(folder)!r}: it has no {' or '.join(names)}")


def _read_file(folder: Path, name: str) -> dict[str, Tensor]:
    path = folder / name
    if not path.is_file():
        raise ValueError(f"{path} is missing")
    home = folder.resolve()
    # Files in the Hub's cache are links into a folder beside the snapshots.
    allowed = [home, home.parents[1] / "blobs"] if home.parent.name == "snapshots" else [home]
    if not any(path.resolve().is_relative_to(place) for place in allowed):
        raise ValueError(f"{path} leads out of its folder, to {path.resolve()}: it is not opened")
    try:
        found = load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
    except (SafetensorError, EOFError, RuntimeError) as error:
        raise ValueError(f"{path} cannot be read, or was truncated: {error}") from error
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} is a pickle that holds more than tensors, which could run anything: it is not opened. Ask its "
            "author for safetensors"
        ) from error
    if not isinstance(found, dict) or not all(isinstance(tensor, Tensor) for tensor in found.values()):
        raise ValueError(f"{path} holds no tensors by name")
    return found


@contextmanager
def new_folder(final: str | Path) -> Iterator[Path]:
    """A folder that appears whole or not at all: written beside its final path under another name, then renamed."""
    final = Path(final)
    partial, replaced = (final.with_name(f"{final.name}.{suffix}") for suffix in ("partial", "replaced"))
    finish_replacing(final)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        shutil.rmtree(replaced, ignore_errors=True)
        if final.exists():
            final.rename(replaced)
        partial.rename(final)
    except BaseException:
        finish_replacing(final)
        shutil.rmtree(partial, ignore_errors=True)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def finish_replacing(folder: Path) -> None:
    """Restore the previous `folder` if a process was killed between moving it away and placing the new one."""
    replaced = folder.with_name(folder.name + ".replaced")
    if replaced.exists() and not folder.exists():
        replaced.rename(folder)


def json_ready(value: Any) -> Any:
    """Convert for strict JSON: tuples become lists; NaN and infinities, such as a mean over nothing, become null."""
    if isinstance(value, dict):
        return {key: json_ready(child) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_ready(child) for child in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
