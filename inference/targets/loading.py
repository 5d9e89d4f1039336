"""Loads targets and tokenizers: from a folder, a Hub id, a GGUF file, or a package with one.

The package is an installed Python package.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import transformers
from huggingface_hub import try_to_load_from_cache
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import CONFIG_NAME
from transformers.utils.import_utils import is_peft_available
from transformers.utils.peft_utils import find_adapter_config_file

from ...extras import require_extra
from ...files import at_home, one_line, read_json, refuse_pipes
from ...heads.base import dtype_name
from ...heads.checkpoints.hub import HUB_OPTIONS
from ...options import did_you_mean, shown

log = logging.getLogger(__name__)

PACKAGE = "package:"
"""Prefix of a target that is a GGUF file in an installed Python package."""

MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
"""Names of accelerate's device maps."""
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
"""Options of transformers' `from_pretrained` for the location of files and for remote code."""
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
"""All options of `from_pretrained` for a target."""
PARTS = re.compile("(layers?|experts|blocks|depth|groups)$")
"""Names of a config's values that say how many modules of a kind are built."""
MOST_PARTS = 10_000
MULTIMODAL = ("AutoModelForMultimodalLM", "AutoModelForImageTextToText")
"""transformers' classes that load a language model with its encoders of images, sound or video, the
widest first."""
_VOCABULARIES: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[int, str]] = WeakKeyDictionary()
"""Number of tokens and hash of the vocabulary of tokenizers, which takes a while."""


def locate(source: str | Path) -> tuple[str, str | None]:
    """The folder or Hub id of a target, and the name of the GGUF file in it, or None."""
    text = at_home(source)
    if text.startswith(PACKAGE) or text.endswith(".gguf"):
        require_extra("gguf", f"the GGUF file of {text!r}")
    if text.startswith(PACKAGE):
        package = text.removeprefix(PACKAGE)
        try:
            spec = importlib.util.find_spec(package)
        except (ModuleNotFoundError, ValueError):
            spec = None
        if spec is None or not spec.submodule_search_locations:
            raise ValueError(
                f"the Python package {package!r} is not installed, so no target can be loaded"
                " from it"
            )
        folder = Path(next(iter(spec.submodule_search_locations)))
        files = sorted(file.name for file in folder.glob("*.gguf"))
        if len(files) != 1:
            raise ValueError(
                f"the Python package {package!r} holds {len(files)} GGUF files; a target needs"
                " exactly one"
            )
        return str(folder), files[0]
    if text.endswith(".gguf"):
        path = Path(text)
        if not path.is_file():
            raise ValueError(f"no GGUF file at {text!r}")
        return str(path.parent), path.name
    return text, None


def default_device() -> str:
    """The first GPU, an Apple one too, or the CPU."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def model_options(options: dict[str, Any], others: Iterable[str] = ()) -> dict[str, Any]:
    """Return the options of a target with whole paths; refuse unknown ones.

    `others` are the parameters that the caller has besides them.
    """
    unknown = sorted(options.keys() - set(MODEL_OPTIONS))
    if unknown:
        valid = [*MODEL_OPTIONS, *others]
        raise ValueError(f"unknown option {unknown[0]!r}{did_you_mean(unknown[0], valid)}")
    folders = [name for name in ("cache_dir", "offload_folder") if options.get(name) is not None]
    return options | {name: at_home(options[name]) for name in folders}


def hub_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return those of a target's options that hold for all that is read from the Hub."""
    return {name: options[name] for name in HUB_OPTIONS if name in options}


def config_of(
    source: str | Path, revision: str | None = None, options: dict[str, Any] | None = None
) -> PreTrainedConfig | None:
    """A target's config, None for a GGUF file; the arguments are those of `load_model`."""
    _, gguf = locate(source)
    return None if gguf is not None else load_config(source, revision, options)


def load_config(
    source: str | Path, revision: str | None = None, options: dict[str, Any] | None = None
) -> PreTrainedConfig:
    """A target's config, that of a GGUF file too; the arguments are those of `load_model`.

    Raises:
        ValueError: nothing to load at `source`, or files that transformers cannot read.
    """
    folder, gguf = locate(source)
    given = {name: value for name, value in (options or {}).items() if name in CONFIG_OPTIONS}
    if gguf is not None:
        given["gguf_file"] = gguf
    with reading("target model", source):
        if Path(folder).is_dir():
            refuse_named_models(folder, revision, given)
        if gguf is None:
            refuse_vast(PreTrainedConfig.get_config_dict(folder, revision=revision, **given)[0])
        config = AutoConfig.from_pretrained(folder, revision=revision, **without_code(given))
        if gguf is not None:
            refuse_vast(config.to_dict())
        return config


def without_code(options: dict[str, Any]) -> dict[str, Any]:
    """Options of `from_pretrained` that run a repository's own code only where they say so.

    Left out, transformers would ask, and read its answer from standard input.
    """
    return {**options, "trust_remote_code": bool(options.get("trust_remote_code"))}


@contextmanager
def reading(what: str, source: str | Path) -> Iterator[None]:
    """Report what cannot be read at `source` in one line, whichever reader of others fails.

    A reason that lists all that transformers knows is cut after its beginning. Characters that
    control a terminal, which it may quote from a file, are left out.

    Raises:
        ValueError: the reason, for any error but a lack of memory.
    """
    refuse_pipes(Path(locate(source)[0]))
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    # tokenizers raises Exception itself; a broken file ends most readers by TypeError or KeyError
    except Exception as error:
        reason = str(error)
        if not isinstance(error, (OSError, ValueError)) or not reason.strip():
            reason = f"{type(error).__name__}: {reason}"
        raise ValueError(
            f"no {what} at {str(source)!r}: {one_line(reason)} (transformers"
            f" {transformers.__version__})"
        ) from error


def refuse_named_models(place: str, revision: str | None, options: dict[str, Any]) -> None:
    """Refuse a peft adapter that names models or adapters elsewhere: transformers would open them.

    An adapter in a model's own folder is read with that model, whichever it names.

    Raises:
        ValueError: the first name.
    """
    if not is_peft_available():  # then transformers reads no adapter
        return
    # It looks in the first place of all, and in the model's own.
    for subfolder in {"", options.get("subfolder") or ""}:
        found = find_adapter_config_file(
            place, revision=revision, subfolder=subfolder, **hub_options(options)
        )
        if found is None:
            continue
        adapter = read_json(Path(found))
        named = list((adapter.get("adapters") or {}).values())  # of X-LoRA
        if not (Path(place) / CONFIG_NAME).is_file():
            named = [adapter["base_model_name_or_path"]]
        if named:
            raise ValueError(
                f"its adapter names {str(named[0])[:100]!r}, which is opened only where you name"
                " it: give a PeftModel of both, or both merged"
            )


def refuse_vast(config: dict[str, Any]) -> None:
    """Refuse more layers or experts than any model has: transformers would build them one by one.

    Raises:
        ValueError: the first such number.
    """
    for name, value in config.items():
        if isinstance(value, dict):  # the config of a part
            refuse_vast(value)
        elif PARTS.search(str(name)) and type(value) is int and value > MOST_PARTS:
            raise ValueError(
                f"{name} of its config is {value:.6g}, and a target may have at most {MOST_PARTS:,}"
            )


def _refuse_larger(config: PreTrainedConfig, folder: Path, gguf: str | None) -> None:
    """Refuse a model that the files here cannot hold.

    Transformers would draw all of it at random before it compares shapes.

    Raises:
        ValueError: the sizes that its config says, and the bytes of its files.
    """
    files = [folder / gguf] if gguf else [*folder.glob("*.safetensors"), *folder.glob("*.bin")]
    size = sum(file.stat().st_size for file in files if file.is_file())
    text = config.get_text_config()
    sizes = {}
    for name in ("hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size"):
        number = getattr(text, name, 0)
        sizes[name] = number if type(number) is int else 0
    # A weight of a matrix takes a bit at least, and each layer has a norm, which is not packed. Of
    # a Hub id no file is here yet, and size is 0.
    width = sizes["hidden_size"]
    layers = sizes["num_hidden_layers"]
    vast = width * max(sizes.values()) > 8 * size or width * layers > size
    if gguf:
        with files[0].open("rb") as file:
            header = file.read(16)  # four letters, four bytes of the version, eight of a number
        vast = vast or layers > int.from_bytes(header[8:], "little")  # of its tensors
    if size and vast:
        raise ValueError(f"its config says {sizes}, and its weight files have {size:,} bytes")


def model_loader(config: PreTrainedConfig) -> Any:
    """Return transformers' class that builds and loads a config's language model.

    This includes multimodal models.

    Raises:
        ValueError: a config of a model that this version of transformers knows under none of these
            classes.
    """
    loaders: list[Any] = [
        AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    ]
    for name in MULTIMODAL:
        if hasattr(transformers, name):  # versions name them differently
            loaders.append(getattr(transformers, name))
    own_code = getattr(config, "auto_map", None) or {}
    for loader in loaders:
        if type(config) in loader._model_mapping or loader.__name__ in own_code:
            return loader
    raise ValueError(
        f"a model of type {config.model_type!r} is not supported as a target: transformers"
        f" {transformers.__version__} loads it neither as a causal language model nor as a"
        " multimodal one"
    )


def unloaded_model(
    source: str | Path, config: PreTrainedConfig, dtype: torch.dtype, **options: Any
) -> PreTrainedModel:
    """Build a target's model without weights, its buffers computed; this needs accelerate.

    Raises:
        ValueError: values of its config that transformers cannot build from.
    """
    from accelerate import init_empty_weights

    with reading("target model", source):
        loader = model_loader(config)
        with init_empty_weights(include_buffers=False):
            model = cast(PreTrainedModel, loader.from_config(config, dtype=dtype, **options))
        model.tie_weights()  # on the meta device shared parameters are made twice
    return model


def downloaded_commit(
    source: str | Path, revision: str | None = None, options: dict[str, Any] | None = None
) -> str | None:
    """Return the commit of a Hub id whose config is cached at this revision.

    None for local files, or if the config is not cached.
    """
    place, _ = locate(source)
    if Path(place).exists():
        return None
    given = options or {}
    file = PurePosixPath(given.get("subfolder") or "", CONFIG_NAME)
    cached = try_to_load_from_cache(
        place, str(file), cache_dir=given.get("cache_dir"), revision=revision
    )
    if not isinstance(cached, str):
        return None
    return Path(cached).parents[len(file.parts) - 1].name  # .../snapshots/COMMIT/FILE


@dataclass(frozen=True)
class TargetFacts:
    """The properties of a target that are known before its weights are loaded.

    They equal those of the loaded `Target`.
    """

    end_tokens: frozenset[int]
    """The tokens at which the model's generation config ends a text."""
    max_positions: int
    vocab_size: int


def target_facts(source: str | Path, revision: str | None = None) -> TargetFacts | None:
    """Read a target's configs; None where the target must be loaded to know.

    An adapter without a model config is such a case.
    """
    try:
        config = load_config(source, revision)
    except ValueError:
        return None
    # a config without one gives what transformers derives, too
    generation = generation_config_of(source, revision)
    if generation is None:
        generation = GenerationConfig.from_model_config(config)
    with reading("target model", source):
        text = config.get_text_config()
        return TargetFacts(
            end_tokens_of(generation),
            getattr(text, "max_position_embeddings", 2**31 - 1),
            int(text.vocab_size),
        )


def generation_config_of(
    source: str | Path, revision: str | None = None
) -> GenerationConfig | None:
    """The generation config of a target; None for one without, as most small models are.

    Raises:
        ValueError: a file that transformers cannot read.
    """
    folder, _ = locate(source)
    with reading("generation config", source):
        try:
            generation = GenerationConfig.from_pretrained(folder, revision=revision or "main")
        except OSError:
            return None
        end_tokens_of(generation)  # refuses what is no token
        return generation


def end_tokens_of(generation: GenerationConfig) -> frozenset[int]:
    """The tokens at which a generation config ends a text.

    Raises:
        ValueError: a token field of the generation config is not a token id or a list of them.
    """
    listed: dict[str, list[Any]] = {}
    for name in ("bos_token_id", "pad_token_id", "decoder_start_token_id", "eos_token_id"):
        configured = getattr(generation, name, None)
        listed[name] = configured if isinstance(configured, list) else [configured]
        if not all(token is None or type(token) is int for token in listed[name]):
            raise ValueError(
                f"{name} of the generation config must be a token id or a list of them, not"
                f" {shown(configured)}"
            )
    return frozenset(token for token in listed["eos_token_id"] if token is not None)


def load_model(
    source: str | Path,
    dtype: torch.dtype | str,
    where: str | torch.device | dict[str, Any],
    revision: str | None = None,
    options: dict[str, Any] | None = None,
) -> PreTrainedModel:
    """Load a target's model, frozen and in eval mode.

    The arguments are those of `Target.from_pretrained`.

    A multimodal model is loaded whole, and decodes as a text model. `options` are named in
    `MODEL_OPTIONS`.

    Raises:
        ValueError: nothing to load at `source`, a model that is no language model, or a GGUF file
            that lacks tensors of the model which its metadata describes.
    """
    mapped = isinstance(where, dict) or where in MAPS
    if mapped:
        require_extra("accelerate", f"device_map {where!r}")
    folder, gguf = locate(source)
    log.info("loading %s", source)
    given = without_code(options or {})
    with reading("target model", source):
        refuse_named_models(folder, revision, given)
    config = load_config(source, revision, options)
    loader: Any = AutoModelForCausalLM
    if gguf is None:
        loader = model_loader(config)
    else:
        given["gguf_file"] = gguf
        given["config"] = config  # transformers would read it a second time, which takes seconds
        if hasattr(transformers, "GgufConfig"):  # older versions always dequantize
            given["quantization_config"] = transformers.GgufConfig(dequantize=True)
    if mapped:
        given["device_map"] = where
    elif "quantization_config" in given and not gguf:  # weights are packed where they go
        given["device_map"] = {"": where}
    with reading("target model", source):
        _refuse_larger(config, Path(folder), gguf)
        model, report = loader.from_pretrained(
            folder, dtype=dtype, revision=revision, output_loading_info=True, **given
        )
        if gguf and report["missing_keys"]:
            raise ValueError(
                f"the file lacks {len(report['missing_keys'])} of the model's tensors, such as"
                f" {min(report['missing_keys'])!r}, which would be random numbers"
            )
        if model.generation_config is not None:
            end_tokens_of(model.generation_config)
    if hasattr(model, "ct_decompress_hook"):
        # compressed-tensors waits for the first forward of the whole model; blocks are read and run
        # before one.
        model.hf_quantizer.compressor.decompress_model(model)
    placed = model if "device_map" in given else model.to(where)
    return cast(PreTrainedModel, placed.eval().requires_grad_(False))


def load_tokenizer(
    source: str | Path, revision: str | None = None, **options: Any
) -> PreTrainedTokenizerBase:
    """The tokenizer of a target.

    Args:
        source: as in `Target.from_pretrained`.
        revision: branch, tag or commit of a Hub id.
        options: token, cache_dir, trust_remote_code and others of `CONFIG_OPTIONS`.

    Raises:
        ValueError: nothing to load at `source`.
    """
    folder, gguf = locate(source)
    with reading("tokenizer", source):
        tokenizer = AutoTokenizer.from_pretrained(
            folder, gguf_file=gguf, revision=revision, **without_code(model_options(options))
        )
        # Transformers takes it as it is and compares it with the length of each text.
        longest = tokenizer.model_max_length
        if not isinstance(longest, (int, float)):
            raise ValueError(
                f"tokenizer_config.json: model_max_length is not a number but {longest!r}"
            )
        return tokenizer


def tokenizer_provenance(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Return hashes of a tokenizer and its chat template.

    They are saved with a head as the provenance of its training data.
    """
    tokens = len(tokenizer)
    known = _VOCABULARIES.get(tokenizer)
    if known is None or known[0] != tokens:
        vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
        known = (tokens, _hashed(repr(vocabulary)))
        _VOCABULARIES[tokenizer] = known
    return {"tokenizer": known[1], "chat_template": _hashed(str(tokenizer.chat_template))}


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def refuse_loading_options(
    loaded: torch.dtype,
    dtype: torch.dtype | str,
    device_map: Any,
    revision: str | None,
    options: dict[str, Any],
) -> None:
    """Refuse options of loading for a target that is loaded already."""
    if dtype not in ("fastest", "auto", loaded, dtype_name(loaded)):
        raise ValueError(
            f"dtype {dtype} was given with a target that is already loaded, in {loaded}; load it in"
            " that dtype instead"
        )
    for name, given in {"device_map": device_map, "revision": revision, **options}.items():
        if given is not None:
            raise ValueError(
                f"{name} {given} was given with a target that is already loaded; load it with that"
                " instead"
            )
