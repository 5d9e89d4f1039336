"""Head checkpoints: config.json, model.safetensors and a model card in one folder.

config.json holds the keys that servers read and a `headstart` section that they ignore: the head's name, options,
target and `CheckpointMetadata`. Loading is strict; a save that fails leaves the previous checkpoint as it was.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from torch import Tensor, nn

from ..base import CheckpointMetadata, DraftHead, TargetInfo, dtype_name
from ..by_name import build_head, head_name
from ..layers.draft_vocab import draft_ids
from .files import CONFIG_FILE, WEIGHTS_FILE, json_ready, new_folder, read_json, read_weights
from .hub import local_folder, push_folder
from .model_card import Listing, model_card
from .quantized import int8_tensor, plain_tensors, unread_by

SHARD = "5GB"
"""Largest weight file; a larger head is split over several."""
CARD_FILE = "README.md"
ADAPTER_FOLDER = "adapter"
SECTION_KEYS = {key.name: key.name for key in dataclasses.fields(CheckpointMetadata)} | {"provenance": "origin"}
"""Field of `CheckpointMetadata` to its key in the `headstart` section."""
GENERATE_FILE = "custom_generate/generate.py"
GENERATE = '''"""Plain transformers with this head: model.generate(..., custom_generate=HEAD, trust_remote_code=True).

HEAD is this repository or folder; the package headstart does the work.
"""

import inspect

from headstart.inference import generate_from


def generate(model, **arguments):
    """Called by `model.generate` with its own arguments."""
    # transformers runs a copy of this file and does not say where it came from: only its caller knows.
    head = inspect.currentframe().f_back.f_locals["custom_generate"]
    return generate_from(head, model, **arguments)
'''
"""Source of the file that makes a head's repository a decoding method of transformers."""


def load_head(
    source: str | Path,
    target: TargetInfo | None = None,
    dtype: torch.dtype | None = None,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | Path | None = None,
) -> tuple[DraftHead, CheckpointMetadata]:
    """Load a head from a folder or a Hub id, strictly; see `DraftHead.from_pretrained`.

    Its dimensions must match those of `target`, if given. A `dtype` of None keeps the saved one.

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
    _check_server_keys(head, config, folder)
    saved = read_weights(folder, (WEIGHTS_FILE,))
    for name in head.served_names:  # copies of the target's tensors, for servers
        saved.pop(name, None)
    own = head.state_dict()
    try:
        int8 = {name: int8_tensor(saved, name, own[name].shape) for name in own if f"{name}.qdata" in saved}
        for name, parameter in head.named_parameters():
            if name in saved:
                parameter.data = parameter.data.to(saved[name].dtype)
        load_exactly(head, saved | {name: own[name] for name in int8})
        for name, tensor in int8.items():
            module, _, last = name.rpartition(".")
            setattr(head.get_submodule(module), last, nn.Parameter(tensor, requires_grad=False))
        head.check_loaded()
    except ValueError as error:
        raise ValueError(f"{folder / WEIGHTS_FILE}: {error}") from error
    metadata = CheckpointMetadata(**{name: section[key] for name, key in SECTION_KEYS.items()})
    return head.to(dtype=dtype) if dtype else head, metadata


def save_head(head: DraftHead, folder: str | Path, metadata: CheckpointMetadata, adapter: Any = None) -> None:
    """Write a head's checkpoint, with the peft model that it drafts for if `metadata.adapted`.

    `folder` changes only when everything has been written.
    """
    assert metadata.adapted == (adapter is not None)
    section = json_ready(
        {
            "head": head_name(head),
            "options": dataclasses.asdict(head.config),
            "target": dataclasses.asdict(head.target),
            **{SECTION_KEYS[name]: value for name, value in dataclasses.asdict(metadata).items()},
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
    """Record a draft tree in a checkpoint, for `machine` and as the default of others, with its calibration."""
    config = _read_config(Path(folder))
    section = config["headstart"]
    section["tree"] = tree
    section["measured"]["calibration"] = json_ready(calibration)
    section["measured"].setdefault("fastest", {})[machine] = tree
    contents = json.dumps(config, indent=2, allow_nan=False) + "\n"
    for name, text in ((CARD_FILE, model_card(section)), (CONFIG_FILE, contents)):
        partial = Path(folder) / (name + ".partial")
        partial.write_text(text, encoding="utf-8")
        partial.replace(Path(folder) / name)


def copy_weights(head: DraftHead, other: DraftHead) -> None:
    """Start a head from another one of its class.

    Tokens that the other cannot draft keep the rows they have, moved by the mean difference of the rows of common
    tokens: a vector that all rows share changes no probability, so training may have moved them by any.
    """
    weights, own = other.state_dict(), head.state_dict()
    places_V = draft_ids(head.vocabulary(), other.vocabulary())
    common_V = places_V >= 0
    for name in own.keys() & weights.keys():
        by_token = any(name.startswith(f"{layer}.") for layer in head.vocabulary_layers)
        if by_token and own[name].shape[1:] == weights[name].shape[1:]:
            taken = weights[name][places_V[common_V]].to(own[name])
            moved = (taken - own[name][common_V]).mean(0) if len(taken) else 0.0
            weights[name] = own[name] + moved
            weights[name][common_V] = taken
    vocabulary = ("token_map", "d2t", "t2d")
    kept = {name: own[name] for name in vocabulary if name in own}
    load_exactly(head, {name: weights[name] for name in weights if name not in vocabulary} | kept)


def differences(trained: dict[str, Any], used: dict[str, Any]) -> list[str]:
    """One phrase for each entry of the target's provenance that differs between training and use."""
    ignored = {"target", "revision"}
    if "float16" in (trained.get("dtype"), used.get("dtype")) and trained.get("dtype") != used.get("dtype"):
        ignored.add("weights")  # their hash is over values rounded to bfloat16, which float16 rounds before
    return [
        f"{name.replace('_', ' ')} {trained[name]!r} (trained against) and {used[name]!r} (in use)"
        for name in trained.keys() & used.keys()
        if name not in ignored and trained[name] != used[name]
    ]


def publishable(source: Path, folder: Path, listing: Listing, shared: dict[str, Tensor]) -> None:
    """Copy a checkpoint to the folder that is uploaded, with a card for its repository.

    `shared` holds the target's tensors that servers expect in the head's file, by name.
    """
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


def push_head(head: DraftHead, repo: str, *options: Any) -> str:
    """Save a head and upload it with the `options` of `push_folder`; returns the URL of the commit."""
    with tempfile.TemporaryDirectory() as scratch:
        saved, ready = Path(scratch) / "saved", Path(scratch) / "head"
        head.save_pretrained(saved)
        publishable(saved, ready, Listing(repo), {})
        return push_folder(ready, repo, *options)


def load_exactly(head: DraftHead, saved: dict[str, Tensor]) -> None:
    """Load tensors whose names and shapes must be the head's own; the error names all that are not."""
    expected = head.state_dict()
    problems = [f"missing tensor {name!r}" for name in expected if name not in saved]
    problems += [f"unknown tensor {name!r}" for name in saved if name not in expected]
    problems += [
        f"tensor {name!r} of shape {tuple(saved[name].shape)} instead of {tuple(expected[name].shape)}"
        for name in expected
        if name in saved and saved[name].shape != expected[name].shape
    ]
    if problems:
        raise ValueError("; ".join(problems))
    head.load_state_dict(saved)


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    config = read_json(path)
    section = config.get("headstart")
    if not isinstance(section, dict):
        raise ValueError(
            f"{path} has no 'headstart' section: it was not written by headstart. `headstart import` reads the heads "
            "of other projects"
        )
    missing = {"head", "options", "target", *SECTION_KEYS.values()} - section.keys()
    if missing:
        raise ValueError(f"{path}: the 'headstart' section lacks {', '.join(sorted(missing))}")
    names, given = {key.name for key in dataclasses.fields(TargetInfo)}, section["target"]
    if not isinstance(given, dict) or set(given) != names:
        raise ValueError(f"{path}: the section's target needs exactly {', '.join(sorted(names))}")
    return config


def _check_server_keys(head: DraftHead, config: dict[str, Any], folder: Path) -> None:
    """Refuse a checkpoint whose server keys describe another head than its `headstart` section."""
    expected = {**json_ready(head.server_config()), "torch_dtype": config.get("torch_dtype")}
    for name in sorted(expected.keys() | config.keys() - {"headstart"}):
        ours, theirs = expected.get(name, "absent"), config.get(name, "absent")
        if name not in config and ours in (None, False):
            continue  # written before the option existed: servers read the same
        if ours != theirs:
            raise ValueError(
                f"{folder / CONFIG_FILE}: {name} is {theirs!r} for servers, and by the section 'headstart' {ours!r}: "
                "one of them was changed"
            )
