"""Head checkpoints: config.json, model.safetensors and a model card in one folder.

config.json holds the keys that serving engines read and a `headstart` section that they ignore: which head it is,
its options, its target, its draft tree and how it was trained. Loading is strict, and a save that fails leaves what
was there before.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from torch import Tensor

from .. import HEADS
from ..base import DraftHead, TargetInfo, build_config, dtype_name
from .files import CONFIG_FILE, WEIGHTS_FILE, read_json, read_weights
from .hub import local_folder
from .model_card import Listing, model_card
from .quantized import assign, plain_tensors, quantized_tensors, unread_by

SHARD = "5GB"
"""Size above which weights are cut into several files."""
CARD_FILE = "README.md"
ADAPTER_FOLDER = "adapter"
GENERATE_FILE = "custom_generate/generate.py"
GENERATE = '''"""Plain transformers with this head: model.generate(..., custom_generate=HEAD, trust_remote_code=True).

HEAD is this repository or folder; the package headstart does the work.
"""

import inspect

from headstart.inference import generate_from


def generate(model, **arguments):
    """What `model.generate` calls, with its own arguments."""
    # transformers runs a copy of this file and does not say where it came from: only its caller knows.
    head = inspect.currentframe().f_back.f_locals["custom_generate"]
    return generate_from(head, model, **arguments)
'''
"""The file by which transformers takes a head's repository as a decoding method."""


@dataclass(frozen=True)
class CheckpointMetadata:
    """What travels with a head's weights besides its options."""

    tree: str | list[list[int]] | None = None
    """The draft tree that was found best for it: paths of ranks, or a word such as dynamic:24:6:8; null if none."""
    training: dict[str, Any] = field(default_factory=dict)
    """The resolved training config, git revision and package versions."""
    measured: dict[str, Any] = field(default_factory=dict)
    """Acceptance as evaluation measured it, by tree."""
    origin: dict[str, Any] = field(default_factory=dict)
    """What it was trained against, to be compared with what it is used on: see `differences`."""
    adapted: bool = False
    """Whether it drafts for the target with the peft adapter that lies in the checkpoint."""


def head_config(name: str, options: dict[str, Any]) -> Any:
    """The options of a head by its word in `HEADS`; needs no target, so it can be asked before one is loaded.

    Raises:
        ValueError: an unknown head or option, or a value that the head refuses.
    """
    if name not in HEADS:
        raise ValueError(f"unknown head {name!r}; choose from {', '.join(sorted(HEADS))}")
    return build_config(HEADS[name].config_class, options, f"{name} head")


def build_head(name: str, options: dict[str, Any], target: TargetInfo) -> DraftHead:
    """A new head by its word in `HEADS`.

    Raises:
        ValueError: as `head_config`, or options that do not fit the target.
    """
    config = head_config(name, options)
    return HEADS[name](config, target)


def word_of(head: DraftHead) -> str:
    """A head's word in `HEADS`."""
    return next(word for word, head_class in HEADS.items() if type(head) is head_class)


def save_head(head: DraftHead, folder: str | Path, metadata: CheckpointMetadata, adapter: Any = None) -> None:
    """Write a head's checkpoint; `folder` changes only when everything has been written.

    Args:
        head: its weights and options.
        folder: where to.
        facts: what travels with it; `metadata.adapted` says whether there is an adapter.
        adapter: the peft model that the head drafts for.
    """
    assert metadata.adapted == (adapter is not None)
    section = json_ready(
        {
            "head": word_of(head),
            "options": dataclasses.asdict(head.config),
            "target": dataclasses.asdict(head.target),
            **dataclasses.asdict(metadata),
            "unread_by": unread_by(head),
        }
    )
    state = {key: value.detach().cpu().contiguous() for key, value in plain_tensors(head.state_dict()).items()}
    dtype = dtype_name(next(head.parameters()).dtype)
    config = {**head.server_config(), "torch_dtype": dtype, "headstart": section}
    with new_folder(folder) as partial:
        try:
            save_torch_state_dict(state, partial, max_shard_size=SHARD)
        except SafetensorError as error:  # a full disk, for one
            raise OSError(f"{partial / WEIGHTS_FILE} cannot be written: {error}") from error
        (partial / CONFIG_FILE).write_text(json.dumps(config, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        (partial / CARD_FILE).write_text(model_card(section), encoding="utf-8")
        (partial / GENERATE_FILE).parent.mkdir()
        (partial / GENERATE_FILE).write_text(GENERATE, encoding="utf-8")
        if adapter is not None:
            adapter.save_pretrained(partial / ADAPTER_FOLDER)


def save_tree(folder: str | Path, tree: str | list[list[int]], calibration: dict[str, Any], machine: str) -> None:
    """Change the draft tree of a checkpoint, and note what it was found by; the weights stay as they are.

    On other machines it is the one to begin with, on machines with a tree of their own theirs stays.
    """
    config = _read_config(Path(folder))
    section = config["headstart"]
    section["tree"] = tree
    section["measured"]["calibration"] = json_ready(calibration)
    section["measured"].setdefault("fastest", {})[machine] = tree
    card = model_card(section)
    for name, text in ((CARD_FILE, card), (CONFIG_FILE, json.dumps(config, indent=2, allow_nan=False) + "\n")):
        partial = Path(folder) / (name + ".partial")
        partial.write_text(text, encoding="utf-8")
        partial.replace(Path(folder) / name)


def adapter_of(source: str | Path, revision: str | None = None) -> Path:
    """The folder of the peft adapter in a head's checkpoint."""
    return local_folder(source, revision) / ADAPTER_FOLDER


def copy_weights(head: DraftHead, source: str | Path) -> CheckpointMetadata:
    """Start a head from another one's checkpoint, draft vocabulary included.

    Raises:
        ValueError: another kind of head, or a tensor that is missing, extra or of another shape; each named.
    """
    other, metadata = load_head(source, head.target)
    if type(other) is not type(head):
        raise ValueError(f"{str(source)!r} holds a {type(other).__name__}, not a {type(head).__name__}")
    _fit(head, other.state_dict(), str(source))
    return metadata


def differences(trained: dict[str, Any], used: dict[str, Any]) -> list[str]:
    """In what the things that a head was trained against differ from those it is used on; only what both know."""
    left_out = {"target", "revision"}
    if "float16" in (trained.get("dtype"), used.get("dtype")) and trained.get("dtype") != used.get("dtype"):
        left_out.add("weights")  # their hash is over values rounded to bfloat16, which float16 rounds before
    return [
        f"{name.replace('_', ' ')} {trained[name]!r} (trained against) and {used[name]!r} (in use)"
        for name in trained.keys() & used.keys()
        if name not in left_out and trained[name] != used[name]
    ]


def load_head(
    source: str | Path,
    target: TargetInfo | None = None,
    dtype: torch.dtype | None = None,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | Path | None = None,
) -> tuple[DraftHead, CheckpointMetadata]:
    """Load a head from a folder or a Hub id, strictly.

    Args:
        source: the checkpoint.
        target: the model that it is to draft for, whose dimensions must match; None to skip the check.
        dtype: of the parameters; None keeps the saved one.
        revision: of a Hub id.
        token: for a private one.
        cache_dir: where it is kept; None for the Hub's own place.

    Raises:
        ValueError: no head checkpoint at `source`, a target that does not match, or a tensor that is missing, extra
            or of another shape; each named.
    """
    folder = local_folder(source, revision, token, cache_dir)
    config = _read_config(folder)
    section = config["headstart"]
    saved_target = TargetInfo(**section["target"])
    if target is not None:
        saved_target.check(target)
    head = build_head(section["head"], section["options"], saved_target)
    _check_served(head, config, folder)
    _load_weights(head, folder)
    metadata = CheckpointMetadata(**{key.name: section[key.name] for key in dataclasses.fields(CheckpointMetadata)})
    return head.to(dtype=dtype) if dtype else head, metadata


def publishable(source: Path, folder: Path, listing: Listing, shared: dict[str, Tensor]) -> None:
    """Copy a checkpoint to where it is pushed from: with what servers look for, and a card that knows its place."""
    shutil.copytree(source, folder)
    section = _read_config(folder)["headstart"]
    (folder / CARD_FILE).write_text(model_card(section, listing), encoding="utf-8")
    if shared:
        saved = read_weights(folder, (WEIGHTS_FILE,))
        dtype = next(tensor.dtype for tensor in saved.values() if tensor.is_floating_point())
        for path in folder.glob("model*"):
            path.unlink()
        saved |= {name: tensor.to("cpu", dtype).contiguous() for name, tensor in shared.items()}
        save_torch_state_dict(saved, folder, max_shard_size=SHARD)


class new_folder:
    """A folder that appears whole or not at all: written beside its final place under another name, then renamed."""

    def __init__(self, final: str | Path) -> None:
        self.final = Path(final)
        self.partial = self.final.with_name(self.final.name + ".partial")

    def __enter__(self) -> Path:
        finish_replacing(self.final)
        shutil.rmtree(self.partial, ignore_errors=True)
        self.partial.mkdir(parents=True)
        return self.partial

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        if error_type is not None:
            shutil.rmtree(self.partial, ignore_errors=True)
            return
        replaced = _replaced(self.final)
        shutil.rmtree(replaced, ignore_errors=True)
        try:
            if self.final.exists():
                self.final.rename(replaced)
            self.partial.rename(self.final)
        except OSError:
            finish_replacing(self.final)
            shutil.rmtree(self.partial, ignore_errors=True)
            raise
        shutil.rmtree(replaced, ignore_errors=True)


def finish_replacing(folder: Path) -> None:
    """Put back what a process was replacing when it was killed between taking away the old and placing the new."""
    if _replaced(folder).exists() and not folder.exists():
        _replaced(folder).rename(folder)


def _replaced(folder: Path) -> Path:
    return folder.with_name(folder.name + ".replaced")


def json_ready(value: Any) -> Any:
    """Tuples as lists, and null for what strict JSON has no number for: a mean over nothing."""
    if isinstance(value, dict):
        return {key: json_ready(child) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_ready(child) for child in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    config = read_json(path)
    if not isinstance(config.get("headstart"), dict):
        raise ValueError(
            f"{path} has no 'headstart' section: it was not written by headstart. `headstart import` reads the heads "
            "of other projects"
        )
    missing = {"head", "options", "target", *(key.name for key in dataclasses.fields(CheckpointMetadata))} - set(
        config["headstart"]
    )
    if missing:
        raise ValueError(f"{path}: the 'headstart' section lacks {', '.join(sorted(missing))}")
    names, given = {key.name for key in dataclasses.fields(TargetInfo)}, config["headstart"]["target"]
    if not isinstance(given, dict) or set(given) != names:
        raise ValueError(f"{path}: the section's target needs exactly {', '.join(sorted(names))}")
    return config


def _check_served(head: DraftHead, config: dict[str, Any], folder: Path) -> None:
    """Servers read other keys than we do: refuse a checkpoint that would be another head there."""
    expected = {**json_ready(head.server_config()), "torch_dtype": config.get("torch_dtype")}
    found = {name: value for name, value in config.items() if name != "headstart"}
    for name in sorted(expected.keys() | found.keys()):
        if name not in found and expected[name] in (None, False):
            continue  # as servers read it: written before there was such an option
        if expected.get(name, "absent") != found.get(name, "absent"):
            raise ValueError(
                f"{folder / CONFIG_FILE}: {name} is {found.get(name, 'absent')!r} for servers, and by the section "
                f"'headstart' {expected.get(name, 'absent')!r}: one of them was changed"
            )


def _load_weights(head: DraftHead, folder: Path) -> None:
    saved = read_weights(folder, (WEIGHTS_FILE,))
    for name in head.served_names:  # a copy of the target's, for servers
        saved.pop(name, None)
    try:
        packed = quantized_tensors(saved, head)
    except ValueError as error:
        raise ValueError(f"{folder / WEIGHTS_FILE}: {error}") from error
    for name, parameter in head.named_parameters():
        if name in saved:
            parameter.data = parameter.data.to(saved[name].dtype)
    _fit(head, saved | {name: head.state_dict()[name] for name in packed}, str(folder / WEIGHTS_FILE))
    assign(head, packed)
    try:
        head.check_loaded()
    except ValueError as error:
        raise ValueError(f"{folder / WEIGHTS_FILE}: {error}") from error


def _fit(head: DraftHead, saved: dict[str, Tensor], where: str) -> None:
    """Load tensors that must be exactly the head's own."""
    expected = head.state_dict()
    problems = [f"missing tensor {name!r}" for name in expected if name not in saved]
    problems += [f"unknown tensor {name!r}" for name in saved if name not in expected]
    problems += [
        f"tensor {name!r} of shape {tuple(saved[name].shape)} instead of {tuple(expected[name].shape)}"
        for name in expected
        if name in saved and saved[name].shape != expected[name].shape
    ]
    if problems:
        raise ValueError(f"{where}: " + "; ".join(problems))
    head.load_state_dict(saved)
