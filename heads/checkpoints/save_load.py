"""Head checkpoints: config.json, model.safetensors and a model card in one folder.

config.json holds the keys that servers read and a `headstart` section that they ignore: the head's
name, options, target and `CheckpointMetadata`. Loading is strict; a save that fails leaves the
previous checkpoint as it was.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import tempfile
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor

from ...files import BROKEN, LONGEST_REASON, at_home, one_line, reading_back, write_whole
from ...options import check_type, shown
from ..base import CheckpointMetadata, DraftHead, TargetInfo, dtype_name
from ..by_name import OBJECTIVE_OPTIONS, build_head, head_name
from ..layers.draft_vocab import draft_ids, with_trained_rows
from ..layers.target_layer import MOST_LAYERS
from .files import (
    CONFIG_FILE,
    HEAD,
    WEIGHTS_FILE,
    json_ready,
    leads_out,
    new_folder,
    read_json,
    read_weights,
    weight_files,
    weight_shapes,
)
from .hub import local_folder, push_folder
from .model_card import Listing, model_card
from .public import public

SHARD = "5GB"
"""Largest weight file; a larger head is split over several."""
CARD_FILE = "README.md"
ADAPTER_FOLDER = "adapter"
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
"""Files of a peft adapter."""
SECTION_KEYS = {key.name: key.name for key in dataclasses.fields(CheckpointMetadata)} | {
    "provenance": "origin"
}
"""Field of `CheckpointMetadata` to its key in the `headstart` section."""
GENERATE_FILE = "custom_generate/generate.py"
GENERATE = '''"""This head in plain transformers; the package headstart does the work.

model.generate(..., custom_generate=HEAD, trust_remote_code=True)
"""

from headstart.inference import generate_from

HEAD = {head}
"""The repository or folder of this head: transformers runs a copy of this file elsewhere."""


def generate(model, **arguments):
    """Called by `model.generate` with its own arguments."""
    return generate_from(HEAD, model, **arguments)
'''
"""Source of the file that makes a repository a decoding method of transformers; `head` is its
name."""


def generate_source(head: str) -> str:
    """The source of `GENERATE_FILE` for a head in this repository or folder."""
    return GENERATE.format(head=json.dumps(head, ensure_ascii=False))


FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that other projects' heads have."""
FEW_LAYERS = 64
"""Layers, or heads, that are quick to build: up to this number the error for a file with too few
tensors names those that are missing."""


def load_head(
    source: str | Path,
    target: TargetInfo | None = None,
    dtype: torch.dtype | None = None,
    revision: str | None = None,
    **hub: Any,
) -> tuple[DraftHead, CheckpointMetadata]:
    """Load a head, and what its checkpoint says of it, from a folder or a Hub id, strictly.

    Its dimensions must match those of `target`, if given. A `dtype` of None keeps the saved one.
    `hub` holds options of `hub.HUB_OPTIONS`, such as `token` and `cache_dir`.

    Raises:
        ValueError: no head checkpoint at `source`, a target that does not match, or a tensor that
            is missing, extra or of another shape; each named.
    """
    # 1. config.json, which anybody may have written, and the target that it names.
    folder = local_folder(source, revision, **hub)
    config = _read_config(folder)
    section = config["headstart"]
    saved_target = TargetInfo(**section["target"])
    if target is not None:
        saved_target.check(target, f"the head at {str(source)!r}")

    # 2. Compare shapes by the headers of the files before memory is taken for the head. Older
    #    checkpoints have the training objective among the head's options.
    options = {
        name: value for name, value in section["options"].items() if name not in OBJECTIVE_OPTIONS
    }
    shapes = weight_shapes(folder)
    try:
        unloaded = build_unloaded(section["head"], options, saved_target, len(shapes))
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG_FILE}: {error}") from error
    for name in unloaded.served_names:  # copies of the target's tensors, for servers
        shapes.pop(name, None)
    try:
        _refuse_other_shapes(unloaded, shapes)
    except ValueError as error:
        raise ValueError(f"{folder / WEIGHTS_FILE}: {error}") from error
    head = build_head(section["head"], options, saved_target)
    _check_server_keys(head, config, folder)

    # 3. The weights, in the saved dtypes.
    saved = read_weights(folder, (WEIGHTS_FILE,))
    for name in head.served_names:
        saved.pop(name, None)
    try:
        take_dtypes(head, saved)
        head.load_state_dict(saved)
        head.check_loaded()
    except ValueError as error:
        raise ValueError(f"{folder / WEIGHTS_FILE}: {error}") from error

    # 4. The metadata.
    metadata = CheckpointMetadata(**{name: section[key] for name, key in SECTION_KEYS.items()})
    head.metadata = metadata
    head.folder = folder
    return head.to(dtype=dtype) if dtype else head, metadata


def trained_for(source: str | Path, revision: str | None = None, **hub: Any) -> TargetInfo:
    """The target that a head was trained for, from its config.json alone.

    Raises:
        ValueError: no head checkpoint at `source`.
    """
    # Of a Hub id, the other files follow when the head is loaded.
    config = _read_config(local_folder(source, revision, [CONFIG_FILE], **hub))
    return TargetInfo(**config["headstart"]["target"])


def save_head(
    head: DraftHead,
    folder: str | Path,
    metadata: CheckpointMetadata | None = None,
    adapter: Any = None,
) -> None:
    """Write a head's checkpoint; `folder` changes only when everything has been written.

    Args:
        head: a head of a class in `HEADS`.
        folder: replaced if it holds a head's checkpoint.
        metadata: what the checkpoint says of the head; None for what the head was loaded with.
        adapter: the peft model that the head drafts for, if `metadata.adapted`.

    Raises:
        ValueError: a head that belongs to an adapter, which is not here, or a folder of other
            files.
    """
    if metadata is None:
        metadata = head.metadata or CheckpointMetadata()
    if metadata.adapted and adapter is None:
        raise ValueError(
            "this head needs its adapter; copy the checkpoint folder instead of saving the head"
        )
    # 1. Everything that is written, before the disk is touched.
    section = json_ready(
        {
            "head": head_name(head),
            "options": dataclasses.asdict(head.config),
            "target": dataclasses.asdict(head.target),
            **{SECTION_KEYS[name]: value for name, value in dataclasses.asdict(metadata).items()},
            "unread_by": head.unread_by,
        }
    )
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in head.state_dict().items()}
    dtype = dtype_name(next(head.parameters()).dtype)
    config = {**head.server_config(), "torch_dtype": dtype, "headstart": section}

    # 2. The files, in a folder beside the final one that takes its place at the end of the block.
    with new_folder(folder, HEAD) as partial:
        try:
            save_torch_state_dict(state, partial, max_shard_size=SHARD)
        except SafetensorError as error:  # a full disk, for one
            raise OSError(f"{partial / WEIGHTS_FILE} cannot be written: {error}") from error
        _write_json(partial / CONFIG_FILE, config)
        (partial / CARD_FILE).write_text(model_card(section), encoding="utf-8")
        # It names the final folder, not `partial`.
        home = str(Path(at_home(folder)).resolve())
        (partial / GENERATE_FILE).parent.mkdir()
        (partial / GENERATE_FILE).write_text(generate_source(home), encoding="utf-8")
        if adapter is not None:
            adapter.save_pretrained(partial / ADAPTER_FOLDER)


def save_tree(
    folder: str | Path, tree: str | list[list[int]], calibration: dict[str, Any], machine: str
) -> None:
    """Record a draft tree and its calibration in a checkpoint.

    The tree is recorded for `machine`, and as the default of other machines.
    """
    config = _read_config(Path(folder))
    section = config["headstart"]
    section["tree"] = tree
    section["measured"]["calibration"] = json_ready(calibration)
    section["measured"].setdefault("fastest", {})[machine] = tree
    write_whole(Path(folder) / CONFIG_FILE, _strict_json(config))


def copy_weights(head: DraftHead, other: DraftHead) -> None:
    """Start a head from another one of its class.

    Tokens that the other cannot draft get rows by `with_trained_rows`.
    """
    weights = dict(other.state_dict())
    new_weights = head.state_dict()

    # 1. Rows by token move to their places in the new draft vocabulary. Target ids [0, 3, 4] here
    #    and [3, 4, 9] there: the other's draft ids are [-1, 0, 1].
    ids_V = draft_ids(head.vocabulary(), other.vocabulary())
    common_V = ids_V >= 0
    by_token = tuple(f"{layer}." for layer in head.vocabulary_layers)
    for name in new_weights.keys() & weights.keys():
        if name.startswith(by_token) and new_weights[name].shape[1:] == weights[name].shape[1:]:
            trained_KD = weights[name][ids_V[common_V]].to(new_weights[name].device)
            weights[name] = with_trained_rows(new_weights[name], common_V, trained_KD)

    # 2. The draft vocabulary itself stays the new head's.
    vocabulary = ("token_map", "d2t", "t2d")
    for name in vocabulary:
        weights.pop(name, None)
        if name in new_weights:
            weights[name] = new_weights[name]
    _refuse_other_shapes(head, {name: tuple(weight.shape) for name, weight in weights.items()})
    head.load_state_dict(weights)


def differences(trained: dict[str, Any], used: dict[str, Any]) -> list[str]:
    """Describe each entry of the target's provenance that differs between training and use."""
    # The same weights may lie in another folder or revision. Their hash is compared instead.
    ignored = {"target", "revision"}
    dtypes = (trained.get("dtype"), used.get("dtype"))
    if "float16" in dtypes and dtypes[0] != dtypes[1]:
        # The hash is over values rounded to bfloat16; float16 has rounded them once before.
        ignored.add("weights")
    return [
        f"{name.replace('_', ' ')} {trained[name]!r} (trained against) and {used[name]!r} (in use)"
        for name in trained.keys() & used.keys()
        if name not in ignored and trained[name] != used[name]
    ]


def publishable(
    source: Path, folder: Path, listing: Listing, shared: dict[str, Tensor]
) -> list[str]:
    """Make the folder to upload: only a head's own files, with a card for its repository.

    The card and config.json name what they come from without this machine's paths. `shared` holds
    the target's tensors that servers expect in the head's file, by name.

    Returns:
        One phrase for each file of the source that is left out.
    """
    # 1. Copy the weights and the adapter; everything else is written anew or left out.
    config = _read_config(source)
    section = config["headstart"]
    parts, index = weight_files(source, (WEIGHTS_FILE,))
    weights = [*parts, index] if index else parts
    wanted = list(weights)
    if section["adapted"]:
        wanted += [f"{ADAPTER_FOLDER}/{name}" for name in ADAPTER_FILES]
    for name in wanted:
        if leads_out(source, source / name):
            raise ValueError(
                f"{source / name} leads out of its folder, to {(source / name).resolve()}: it is"
                " not read"
            )
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, folder / name)

    # 2. config.json: the target by its name on the Hub, and no path of this machine. The origin
    # stays: the head may have been trained with another file of the same model.
    if listing.base_model is not None:
        section["target"]["name"] = listing.base_model
        verifier = config.get("speculators_config", {}).get("verifier")
        if verifier is not None:
            verifier["name_or_path"] = listing.base_model
    config = public(config)
    section = config["headstart"]
    _write_json(folder / CONFIG_FILE, config)

    # 3. The adapter's config, the card, and the file for `custom_generate`.
    if section["adapted"]:
        adapter = folder / ADAPTER_FOLDER / ADAPTER_FILES[0]
        described = public(read_json(adapter))
        described["base_model_name_or_path"] = section["target"]["name"]
        _write_json(adapter, described)
    (folder / CARD_FILE).write_text(model_card(section, listing), encoding="utf-8")
    (folder / GENERATE_FILE).parent.mkdir()
    (folder / GENERATE_FILE).write_text(generate_source(listing.repo), encoding="utf-8")

    # 4. The target's tensors beside the head's: the weight files are written again.
    if shared:
        saved = read_weights(folder, (WEIGHTS_FILE,))
        dtype = next(tensor.dtype for tensor in saved.values() if tensor.is_floating_point())
        for old in weights:
            (folder / old).unlink()
        saved |= {name: tensor.to("cpu", dtype).contiguous() for name, tensor in shared.items()}
        save_torch_state_dict(saved, folder, max_shard_size=SHARD)

    # 5. The other files of the source, each with the reason.
    uploaded = {*wanted, CONFIG_FILE, CARD_FILE, GENERATE_FILE}
    rest = []
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source).as_posix()
        if path.is_symlink() and leads_out(source, path):
            rest.append(f"{name}: a link that leads out of the folder")
        elif path.is_file() and name not in uploaded:
            rest.append(f"{name}: not a file of a head")
    return rest


def _strict_json(config: dict[str, Any]) -> str:
    """JSON as all languages read it; NaN and infinity, which Python reads too, are refused."""
    with reading_back("the head's config.json", "write null where there is no number"):
        return json.dumps(config, indent=2, allow_nan=False) + "\n"


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(_strict_json(value), encoding="utf-8")


def push_head(
    head: DraftHead,
    repo: str,
    *,
    private: bool | None = None,
    token: str | None = None,
    branch: str | None = None,
    create_pr: bool = False,
    message: str = "A draft head",
) -> str:
    """Save a head, upload it as one commit and return its URL.

    `headstart push` also adds the tensors that servers need of the target.
    """
    with tempfile.TemporaryDirectory() as scratch:
        saved, ready = Path(scratch) / "saved", Path(scratch) / "head"
        save_head(head, saved)
        publishable(saved, ready, Listing(repo), {})
        return push_folder(ready, repo, private, token, branch, create_pr, message)


def take_dtypes(head: DraftHead, saved: Mapping[str, Tensor]) -> None:
    """Convert a head's parameters to the dtypes of the saved ones.

    Raises:
        ValueError: names saved tensors that are not of a floating-point type.
    """
    parameters = {name: parameter for name, parameter in head.named_parameters() if name in saved}
    packed = [
        f"tensor {name!r} of {saved[name].dtype}, not of a floating-point type"
        for name in parameters
        if not saved[name].is_floating_point()
    ]
    if packed:
        raise ValueError("; ".join(packed))
    for name, parameter in parameters.items():
        parameter.data = parameter.data.to(saved[name].dtype)


def tensor_problem(
    name: str, tensor: Tensor, expected: Tensor, dtypes: tuple[torch.dtype, ...] = FLOATS
) -> str | None:
    """Why a tensor, called `name` in its file, cannot be that of a head; None if it can."""
    if tensor.shape != expected.shape:
        return f"tensor {name!r} of shape {tuple(tensor.shape)} instead of {tuple(expected.shape)}"
    if not expected.is_floating_point():
        return None
    if tensor.dtype not in dtypes:
        return f"tensor {name!r} of {tensor.dtype} instead of {', '.join(map(str, dtypes))}"
    if not tensor.isfinite().all():
        return f"tensor {name!r} has values that are infinite or not numbers"
    return None


def _refuse_other_shapes(head: DraftHead, saved: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse tensors, by names and shapes, that are not the head's own; each is named."""
    expected = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    problems = [f"missing tensor {name!r}" for name in expected if name not in saved]
    problems += [f"unknown tensor {name!r}" for name in saved if name not in expected]
    problems += [
        f"tensor {name!r} of shape {saved[name]} instead of {expected[name]}"
        for name in expected
        if name in saved and saved[name] != expected[name]
    ]
    if problems:
        raise ValueError(one_line("; ".join(problems), 5 * LONGEST_REASON))


def build_unloaded(
    name: str, options: dict[str, Any], target: TargetInfo, tensors: int
) -> DraftHead:
    """Build a head without weights, on the meta device.

    Its shapes are compared with those of a file before memory is taken for them.

    Args:
        name: key in `HEADS`.
        options: of a config.json that anybody may have written.
        target: from the same config.json, or the target itself.
        tensors: number of tensors in the file; a head has at least one for each of its layers and
            heads.

    Raises:
        ValueError: options that no head can have.
    """
    for option in ("num_layers", "num_heads"):
        number = options.get(option)
        if isinstance(number, int) and number > max(tensors, FEW_LAYERS):
            raise ValueError(
                f"{option} is {number}, and the file holds {tensors} tensors: fewer than one for"
                " each"
            )
    try:
        with torch.device("meta"):  # shapes without memory
            return build_head(name, options, target)
    except ValueError:
        raise
    except (StrictDataclassError, RuntimeError, *BROKEN) as error:
        # Sizes whose product no tensor has, a list in place of a number, a rotary embedding of an
        # unknown type.
        reason = one_line(f"{type(error).__name__}: {error}")
        raise ValueError(
            f"options of the {name} head cannot be used ({reason}): {shown(options)}"
        ) from error


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    config = read_json(path)
    section = config.get("headstart")
    if not isinstance(section, dict):
        raise ValueError(
            f"{path} has no 'headstart' section: it was not written by headstart. `headstart"
            " import` reads the heads of other projects"
        )
    missing = {"head", "options", "target", *SECTION_KEYS.values()} - section.keys()
    if missing:
        raise ValueError(f"{path}: the 'headstart' section lacks {', '.join(sorted(missing))}")
    names = {key.name for key in dataclasses.fields(TargetInfo)}
    target = section["target"]
    if not isinstance(target, dict) or set(target) != names:
        raise ValueError(f"{path}: the section's target needs exactly {', '.join(sorted(names))}")
    _check_section(section, f"{path}, in the section 'headstart'")
    return config


LARGEST = {"num_layers": MOST_LAYERS}
"""Largest dimensions of a target; 2^31 for all others. Larger values are mistakes or attacks."""


def _check_section(section: dict[str, Any], where: str) -> None:
    """Refuse values of a section, which anybody may have written; errors begin with `where`."""
    # 1. The section's own entries.
    hints = typing.get_type_hints(CheckpointMetadata)
    types = {"head": str, "options": dict} | {
        key: hints[name] for name, key in SECTION_KEYS.items()
    }
    for key, hint in types.items():
        check_type(f"{where}: {key}", section[key], hint)
    fastest = section["measured"].get("fastest", {})
    check_type(f"{where}: measured.fastest", fastest, dict)
    for tree in fastest.values():
        check_type(f"{where}: the tree in measured.fastest", tree, hints["tree"])

    # 2. The target's dimensions.
    for name, hint in typing.get_type_hints(TargetInfo).items():
        value = section["target"][name]
        check_type(f"{where}: the target's {name}", value, hint)
        largest = LARGEST.get(name, 2**31)
        if hint is int and not 1 <= value <= largest:
            raise ValueError(
                f"{where}: the target's {name} must be from 1 to {largest}, not {shown(value)}"
            )
        if hint is float and not 0 <= value < math.inf:
            raise ValueError(f"{where}: the target's {name} must be at least 0, not {value}")


def _check_server_keys(head: DraftHead, config: dict[str, Any], folder: Path) -> None:
    """Refuse a checkpoint whose server keys describe another head than its `headstart` section."""
    expected = {**json_ready(head.server_config()), "torch_dtype": config.get("torch_dtype")}
    for name in sorted(expected.keys() | config.keys() - {"headstart"}):
        ours = expected.get(name, "absent")
        theirs = config.get(name, "absent")
        if name not in config and ours in (None, False):
            continue  # written before the option existed: servers read the same
        if ours != theirs:
            raise ValueError(
                f"{folder / CONFIG_FILE}: {one_line(name)} is {shown(theirs)} for servers, and by"
                f" the section 'headstart' {shown(ours)}: one of them was changed"
            )
