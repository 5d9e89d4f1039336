"""Heads of other projects: told apart by their files, and read by the tables of `formats.py`.

Nothing is guessed. A key or a tensor that no table has, a value that no head here can have, layer numbers that
contradict each other, ids where offsets belong: each is an error that names it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..base import DraftHead, TargetInfo
from ..by_name import build_head
from .formats import FORMATS, Format, places
from .import_formats import READERS, Keys

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""The formats that a head's weights may have."""


@dataclass(frozen=True)
class Imported:
    """A head that another project wrote."""

    head: DraftHead
    form: str
    """The row of `FORMATS` that it was read by."""
    remarks: list[str]
    """What its user should know."""


def recognise(config: dict[str, Any], names: set[str]) -> str:
    """The row of `FORMATS` that files are written by.

    Raises:
        ValueError: none is.
    """
    kind = config.get("speculators_model_type")
    if kind is not None:
        words = {"eagle3": "speculators", "eagle": "speculators-eagle"}
        if kind not in words:
            raise ValueError(f"speculators_model_type {kind!r} is not supported; choose from {', '.join(words)}")
        return words[kind]
    tests: dict[str, Callable[[str], Any]] = {
        "hydra": lambda name: name.startswith("hydra_"),
        "fasterdecoding": lambda name: re.fullmatch(r"(medusa_head\.)?\d+\.\d+(\.linear)?\.(weight|bias)", name),
        "medusa": lambda name: name.startswith("blocks.0.layers."),
        "eagle3": lambda name: name.endswith(".hidden_norm.weight"),
        "eagle": lambda name: name == "fc.weight",
    }
    for word, belongs in tests.items():
        if any(map(belongs, names)):
            return word
    shown = ", ".join(sorted(names)[:5]) or "nothing"
    raise ValueError(f"no head that is known here: its tensors are {shown}, ...; known are {', '.join(FORMATS)}")


def import_head(
    config: dict[str, Any], tensors: dict[str, Tensor], target: TargetInfo, embedding_VD: Tensor | None = None
) -> Imported:
    """A head from another project's config.json and weights.

    Args:
        config: the parsed config.json.
        tensors: the weights by name.
        target: the model that it drafts for.
        embedding_VD: the target's embedding: copies of it in the file are left out.

    Raises:
        ValueError: anything in it that is unknown, missing, contradictory or impossible here; named.
    """
    word = recognise(config, set(tensors))
    form, remarks = FORMATS[word], list[str]()
    tensors = {
        name.removeprefix("medusa_head.") if word == "fasterdecoding" else name: t for name, t in tensors.items()
    }
    if any(name.startswith("model.") for name in tensors) and word == "fasterdecoding":
        remarks.append("the file holds a whole model that was trained with its heads: they draft for that model")
        tensors = {name: tensor for name, tensor in tensors.items() if name[0].isdigit()}
    keys = Keys(form.keys, config, word)
    name, options = READERS[word](keys, tensors, target, remarks)
    assert name in form.heads
    embedding = _embedding(form, tensors, embedding_VD, target, options, remarks)
    _change_ids(tensors, options, target, remarks)
    if word == "eagle3" and "midlayer.hidden_norm.weight" not in tensors:  # ModelOpt's newer name of the first layer
        tensors = {re.sub(r"^layers\.0\.", "midlayer.", name): tensor for name, tensor in tensors.items()}
    head = build_head(name, {key: value for key, value in options.items() if value is not None}, target)
    _fill(head, form, tensors | embedding)
    return Imported(head, word, remarks)


def _embedding(
    form: Format,
    tensors: dict[str, Tensor],
    target_VD: Tensor | None,
    target: TargetInfo,
    options: dict[str, Any],
    remarks: list[str],
) -> dict[str, Tensor]:
    """The file's embedding, taken out of `tensors`, if the head needs one of its own."""
    own_VD = tensors.pop("embed_tokens.weight", None)
    if own_VD is None:
        return {}
    same = target_VD is not None and own_VD.shape == target_VD.shape and torch.equal(own_VD, target_VD.to(own_VD.dtype))
    if same:
        remarks.append("its embedding is the target's and left out")
    elif "embed_tokens.weight" in form.tensors:
        options["own_embedding"] = options["hidden_size"] is None
        return {"embed_tokens.weight": own_VD}
    elif target_VD is not None:
        raise ValueError(f"its embedding is not that of the target {target.name!r}: it was made for another model")
    return {}


def _change_ids(tensors: dict[str, Tensor], options: dict[str, Any], target: TargetInfo, remarks: list[str]) -> None:
    """Check a draft vocabulary's offsets; sort it, as it is here, or drop it if it is the whole vocabulary."""
    offsets_V = tensors.get("d2t")
    if options.get("draft_vocab_size") == target.vocab_size:
        options["draft_vocab_size"] = None
        if offsets_V is not None and offsets_V.any():
            raise ValueError("d2t moves ids although the draft vocabulary is the target's whole one")
        for name in ("d2t", "t2d"):
            tensors.pop(name, None)
    elif offsets_V is not None:
        ids_V = torch.arange(len(offsets_V)) + offsets_V.long()
        if not _different(ids_V, target.vocab_size):
            absolute = "; its values look like target ids, and d2t holds these minus the draft id"
            raise ValueError(
                f"d2t does not lead to different ids below {target.vocab_size}"
                + (absolute if _different(offsets_V.long(), target.vocab_size) else "")
            )
        chosen_V = torch.zeros(target.vocab_size, dtype=torch.bool).index_fill(0, ids_V, True)
        if "t2d" in tensors and not torch.equal(tensors["t2d"].bool(), chosen_V):
            raise ValueError("d2t and t2d name different draft vocabularies")
        tensors["t2d"] = chosen_V
        order = ids_V.argsort()
        if not torch.equal(order, torch.arange(len(order))):
            remarks.append("the draft vocabulary is sorted, the LM head with it")
            tensors["lm_head.weight"] = tensors["lm_head.weight"][order]
        tensors["d2t"] = ids_V[order] - torch.arange(len(order))


def _different(ids_V: Tensor, vocab_size: int) -> bool:
    return bool((ids_V >= 0).all() and (ids_V < vocab_size).all() and len(ids_V.unique()) == len(ids_V))


def _fill(head: DraftHead, form: Format, tensors: dict[str, Tensor]) -> None:
    """Give a head its weights, each of which must be in the table and in the file."""
    state, problems, rest = {}, [], dict(tensors)
    for place in places(form, head):
        tensor = rest.pop(place.theirs, None)
        if tensor is None:
            problems.append(f"missing tensor {place.theirs!r} ({place.row.meaning})")
        elif tuple(tensor.shape) != place.shape:
            problems.append(f"tensor {place.theirs!r} of shape {tuple(tensor.shape)} instead of {place.shape}")
        elif place.row.dtype == "float" and tensor.dtype not in FLOATS:
            problems.append(f"tensor {place.theirs!r} of {tensor.dtype} instead of {', '.join(map(str, FLOATS))}")
        elif place.row.dtype == "float" and not tensor.isfinite().all():
            problems.append(f"tensor {place.theirs!r} has values that are no numbers or infinite")
        else:
            state[place.ours] = tensor
    problems += [f"unknown tensor {name!r}" for name in rest if not name.startswith(form.ignored or ("\0",))]
    if problems:
        raise ValueError("; ".join(problems))
    for name, parameter in head.named_parameters():
        parameter.data = parameter.data.to(state[name].dtype)
    head.load_state_dict(state)
