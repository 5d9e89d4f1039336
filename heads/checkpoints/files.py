"""The files of a checkpoint that somebody else wrote, read without trusting them.

Pickles are read by `torch.load(weights_only=True)`, which runs no code; files lie in the folder itself, and a config
is small.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
CONFIG_LIMIT = 2**22
"""Bytes of a JSON file; a larger one is none of a head's."""
WEIGHT_FILES = (
    WEIGHTS_FILE,
    "medusa_lm_head.safetensors",
    "pytorch_model.bin",
    "medusa_lm_head.pt",
    "hydra_lm_head.pt",
)
"""Where weights may be, the first that is there being taken; each may be cut into parts."""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ValueError: no such file, too large, or no JSON object.
    """
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
    """All tensors of a checkpoint, on the CPU.

    Args:
        folder: the checkpoint.
        names: where they may be.

    Raises:
        ValueError: no weights, a file outside of the folder, a broken file, or a pickle with more than tensors.
    """
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
    path = inside(folder, name)
    try:
        found = load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
    except (SafetensorError, EOFError, RuntimeError) as error:
        raise ValueError(f"{path} cannot be read, or was cut: {error}") from error
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} is a pickle that holds more than tensors, which could run anything: it is not opened. Ask its "
            "author for safetensors"
        ) from error
    if not isinstance(found, dict) or not all(isinstance(tensor, Tensor) for tensor in found.values()):
        raise ValueError(f"{path} holds no tensors by name")
    return found


def inside(folder: Path, name: str) -> Path:
    """A file of a folder.

    Raises:
        ValueError: it is not there, or the name or a link leads out of the folder.
    """
    path = folder / name
    if not path.is_file():
        raise ValueError(f"{path} is missing")
    # The Hub's cache is made of links to files beside the folder.
    home = folder.resolve()
    homes = [home, *([home.parents[1] / "blobs"] if home.parent.name == "snapshots" else [])]
    if not any(path.resolve().is_relative_to(place) for place in homes):
        raise ValueError(f"{path} leads out of its folder, to {path.resolve()}: it is not opened")
    return path
