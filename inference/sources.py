"""Where targets come from: a folder, a Hub id, a GGUF file, or the one in an installed Python package."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoTokenizer, GgufConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..heads.base import dtype_name

PACKAGE = "package:"
"""Prefix of a target that lies as a GGUF file in an installed Python package."""


def locate(source: str | Path) -> tuple[str, str | None]:
    """Where a target lies: a folder or Hub id, and the name of a GGUF file in it or None.

    Raises:
        ValueError: a package or file that is not there, or a package with no or several GGUF files.
    """
    text = str(source)
    if text.startswith(PACKAGE):
        return _gguf_of_package(text.removeprefix(PACKAGE))
    if text.endswith(".gguf"):
        path = Path(text)
        if not path.is_file():
            raise ValueError(f"no GGUF file at {text!r}")
        return str(path.parent), path.name
    return text, None


def _gguf_of_package(package: str) -> tuple[str, str]:
    try:
        spec = importlib.util.find_spec(package)
    except (ModuleNotFoundError, ValueError):
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"the Python package {package!r} is not installed, so no target can be loaded from it")
    folder = Path(next(iter(spec.submodule_search_locations)))
    files = sorted(path.name for path in folder.glob("*.gguf"))
    if len(files) != 1:
        raise ValueError(f"the Python package {package!r} holds {len(files)} GGUF files; a target needs exactly one")
    return str(folder), files[0]


def default_device() -> str:
    """The first GPU, or the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def load_model(
    loader: Any,
    source: str | Path,
    dtype: torch.dtype,
    where: str | torch.device | dict[str, Any],
    revision: str | None = None,
) -> PreTrainedModel:
    """A target's model, frozen and in eval mode.

    Args:
        loader: transformers' class that loads it.
        source: see `Target.from_pretrained`.
        dtype: of the weights.
        where: a device, or accelerate's map of modules to devices.
        revision: of a Hub id.

    Raises:
        ValueError: nothing to load at `source`.
    """
    folder, gguf = locate(source)
    packing = {"gguf_file": gguf, "quantization_config": GgufConfig(dequantize=True)} if gguf else {}
    spread = {"device_map": where} if isinstance(where, dict) else {}
    try:
        model = loader.from_pretrained(folder, dtype=dtype, revision=revision, **packing, **spread)
    except OSError as error:
        raise ValueError(f"no target model at {str(source)!r}: {error}") from error
    placed = model if spread else model.to(where)
    return cast(PreTrainedModel, placed.eval().requires_grad_(False))


def load_tokenizer(source: str | Path, revision: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of a target, from the same places as `Target.from_pretrained`.

    Raises:
        ValueError: nothing to load at `source`.
    """
    folder, gguf = locate(source)
    try:
        return AutoTokenizer.from_pretrained(folder, gguf_file=gguf, revision=revision)
    except (OSError, ValueError) as error:
        raise ValueError(f"no tokenizer at {str(source)!r}: {error}") from error


def tokenizer_origin(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """What a head remembers of the tokenizer and chat template that its data went through."""

    def short_hash(text: str) -> str:
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return {
        "tokenizer": short_hash(repr(vocabulary)),
        "chat_template": short_hash(str(tokenizer.chat_template)),
    }


def refuse_loading_options(loaded: torch.dtype, dtype: torch.dtype | str, device: Any, revision: str | None) -> None:
    """A target that is loaded already stays as it is.

    Raises:
        ValueError: naming the option that would be ignored; of a dtype, the model's own too.
    """
    if dtype not in ("auto", loaded, dtype_name(loaded)):
        raise ValueError(
            f"dtype {dtype} was given with a target that is loaded already, in {loaded}; load it so instead"
        )
    for name, given in (("device", device), ("revision", revision)):
        if given is not None:
            raise ValueError(f"{name} {given} was given with a target that is loaded already; load it so instead")
