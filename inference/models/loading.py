"""Where targets come from: a folder, a Hub id, a GGUF file, or the one in an installed Python package."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path
from typing import Any, cast

import torch
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ...heads.base import dtype_name

PACKAGE = "package:"
"""Prefix of a target that lies as a GGUF file in an installed Python package."""

MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
"""Words for how accelerate spreads a model over devices."""
CONFIG_OPTIONS = (
    "cache_dir",
    "code_revision",
    "force_download",
    "local_files_only",
    "proxies",
    "subfolder",
    "token",
    "trust_remote_code",
)
"""Options of transformers' `from_pretrained` that say where a model's files are and whose code is run."""
MODEL_OPTIONS = (
    *CONFIG_OPTIONS,
    "attn_implementation",
    "experts_implementation",
    "max_memory",
    "offload_buffers",
    "offload_folder",
    "quantization_config",
    "use_safetensors",
    "variant",
)
"""And all that a target's weights are loaded with."""


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
    """The first GPU, an Apple one too, or the CPU."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def without_peft(source: Any) -> Any:
    """A `PeftModel`'s own model, into whose layers the adapters are built; anything else as it is.

    Raises:
        ValueError: an adapter that is no part of the layers (prompt tuning).
    """
    if not hasattr(source, "peft_config") or not hasattr(source, "get_base_model"):
        return source
    kinds = [str(config.peft_type) for config in source.peft_config.values() if config.is_prompt_learning]
    if kinds:
        raise ValueError(
            f"the adapter of {type(source).__name__} is of kind {kinds[0]}, which adds tokens of its own to every text "
            "and not weights to the layers; give a model with LoRA or the like, or without an adapter"
        )
    return source.get_base_model()


def check_model_options(options: dict[str, Any]) -> None:
    """Refuse what transformers would not understand, before anything is loaded.

    Raises:
        ValueError: an unknown option; named.
    """
    unknown = sorted(options.keys() - set(MODEL_OPTIONS))
    if unknown:
        raise ValueError(f"unknown option {unknown[0]!r} for a target; choose from {', '.join(sorted(MODEL_OPTIONS))}")


def config_of(
    source: str | Path, revision: str | None = None, options: dict[str, Any] | None = None
) -> PreTrainedConfig | None:
    """A target's config; None of a GGUF file.

    Args:
        source: see `Target.from_pretrained`.
        revision: of a Hub id.
        options: of `MODEL_OPTIONS`.

    Raises:
        ValueError: no config at `source`.
    """
    folder, gguf = locate(source)
    if gguf is not None:
        return None
    given = {name: value for name, value in (options or {}).items() if name in CONFIG_OPTIONS}
    try:
        return AutoConfig.from_pretrained(folder, revision=revision, **given)
    except OSError as error:
        raise ValueError(f"no target model at {str(source)!r}: {error}") from error


def load_model(
    loader: Any,
    source: str | Path,
    dtype: torch.dtype,
    where: str | torch.device | dict[str, Any],
    revision: str | None = None,
    options: dict[str, Any] | None = None,
) -> PreTrainedModel:
    """A target's model, frozen and in eval mode.

    Args:
        loader: transformers' class that loads it.
        source: see `Target.from_pretrained`.
        dtype: of the weights.
        where: a device, or accelerate's map of modules to devices, or a word for one such as "auto".
        revision: of a Hub id.
        options: more of transformers' own, of `MODEL_OPTIONS`.

    Raises:
        ValueError: nothing to load at `source`.
    """
    folder, gguf = locate(source)
    given: dict[str, Any] = dict(options or {})
    if gguf:
        given |= {"gguf_file": gguf, "quantization_config": GgufConfig(dequantize=True)}
    if isinstance(where, dict) or where in MAPS:
        given["device_map"] = where
    elif "quantization_config" in given and not gguf:  # weights are packed where they go
        given["device_map"] = {"": where}
    try:
        model = loader.from_pretrained(folder, dtype=dtype, revision=revision, **given)
    except OSError as error:
        raise ValueError(f"no target model at {str(source)!r}: {error}") from error
    placed = model if "device_map" in given else model.to(where)
    return cast(PreTrainedModel, placed.eval().requires_grad_(False))


def load_tokenizer(source: str | Path, revision: str | None = None, **options: Any) -> PreTrainedTokenizerBase:
    """The tokenizer of a target, from the same places as `Target.from_pretrained`.

    Args:
        source: see there.
        revision: of a Hub id.
        options: token, cache_dir, trust_remote_code and others of `CONFIG_OPTIONS`.

    Raises:
        ValueError: nothing to load at `source`.
    """
    folder, gguf = locate(source)
    try:
        return AutoTokenizer.from_pretrained(folder, gguf_file=gguf, revision=revision, **options)
    except (OSError, ValueError) as error:
        raise ValueError(f"no tokenizer at {str(source)!r}: {error}") from error


def tokenizer_origin(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Fingerprints of a tokenizer and its chat template, which a head remembers of its training data."""

    def short_hash(text: str) -> str:
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return {
        "tokenizer": short_hash(repr(vocabulary)),
        "chat_template": short_hash(str(tokenizer.chat_template)),
    }


def refuse_loading_options(
    loaded: torch.dtype,
    dtype: torch.dtype | str,
    device: Any,
    revision: str | None,
    options: dict[str, Any] | None = None,
) -> None:
    """A target that is loaded already stays as it is.

    Raises:
        ValueError: naming the option that would be ignored; of a dtype, the model's own too.
    """
    if dtype not in ("auto", loaded, dtype_name(loaded)):
        raise ValueError(
            f"dtype {dtype} was given with a target that is loaded already, in {loaded}; load it so instead"
        )
    for name, given in {"device": device, "revision": revision, **(options or {})}.items():
        if given is not None:
            raise ValueError(f"{name} {given} was given with a target that is loaded already; load it so instead")
