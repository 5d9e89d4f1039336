"""Import of heads from other projects, by the tables of `formats.py`.

The format is recognised from the files.

The tensors decide: each must have its place in a head. A key that a table has is read, or refused
with a value that no head here can have. Any other key was inherited from the target, or is of
training: it is kept aside with a remark, unless its name says that it changes what a layer
computes. A key that contradicts the tensors is an error that names both; so are layer numbers that
contradict each other, and ids where offsets belong.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from ..base import DraftHead, TargetInfo
from ..by_name import build_head
from ..mtp.native import RECURRENT_DEPTH, find, head_of_tensors
from .formats import FORMATS
from .reading import Keys, Source, TargetParts
from .save_load import build_unloaded, take_dtypes, tensor_problem
from .tables import LLAMA, places

LAYERLESS = ("medusa", "fasterdecoding", "hydra")
"""Formats of heads that have no decoder layer, or one with the target's own dimensions."""
SIZES = (
    *(
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
    ),
    *("draft_vocab_size", "truncated_vocab_size", "block_size", "markov_rank"),
)
"""Keys by which tensors have their shapes."""


def recognise(config: dict[str, Any], names: set[str]) -> str:
    """The row of `FORMATS` that a config.json and the names of its tensors belong to."""
    # 1. speculators names the kind in config.json.
    kind = config.get("speculators_model_type")
    if kind == "peagle" or any(name.endswith("mask_hidden") for name in names):
        raise ValueError(
            "P-EAGLE, EAGLE-3 that drafts all depths at once from a mask state (the tensor"
            " 'mask_hidden'), is not supported; heads here that draft in one pass are dflash and"
            " dspark"
        )
    if kind is not None:
        others = ("eagle", "dflash", "dspark", "mtp")
        forms = {"eagle3": "speculators"} | {name: f"speculators-{name}" for name in others}
        if kind not in forms:
            raise ValueError(
                f"speculators_model_type {kind!r} is not supported; choose from {', '.join(forms)}"
            )
        return forms[kind]

    # 2. Others have a key that no other format has, or a tensor. The order counts: DSpark's files
    #    have DFlash's tensors too, and most have an `fc`.
    for form, key in {"dspark": "markov_rank", "dflash": "dflash_config"}.items():
        if key in config:
            return form
    marks = {
        "hydra": r"hydra_.*",
        "fasterdecoding": r"(medusa_head\.)?\d+\.\d+(\.linear)?\.(weight|bias)",
        "medusa": r"blocks\.0\.layers\..*",
        "dspark": r"markov_head\..*",
        "dflash": r"hidden_norm\.weight",
        "eagle3": r".*\.hidden_norm\.weight|midlayer\..*",
        "eagle": r"fc\.weight",
    }
    for form, mark in marks.items():
        if any(re.fullmatch(mark, name) for name in names):
            return form
    shown = ", ".join(sorted(names)[:5]) or "nothing"
    raise ValueError(
        f"no head that is known here: its tensors are {shown}, ...; known are {', '.join(FORMATS)}"
    )


def import_head(
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    target: TargetInfo,
    parts: TargetParts | None = None,
) -> tuple[DraftHead, Source]:
    """Build a head from another project's config.json and weights.

    Copies of the target's embedding and LM head are left out. Returned with its source, which names
    the format and holds the remarks for the user.

    Raises:
        ValueError: anything in it that is unknown, missing, contradictory or impossible here;
            named.
    """
    # 1. The format, and what is left of a file that holds more than a head.
    form = recognise(config, set(tensors))
    parts = parts or TargetParts()
    remarks: list[str] = []
    if form == "fasterdecoding":
        tensors = {name.removeprefix("medusa_head."): tensor for name, tensor in tensors.items()}
        if any(name.startswith("model.") for name in tensors):
            remarks.append(
                "the file holds a whole model that was trained with its heads: they draft for that"
                " model"
            )
            tensors = {name: tensor for name, tensor in tensors.items() if name[0].isdigit()}

    # 2. The config. Where a head has no decoder layer, keys of one describe the target: a whole
    #    model's config.json lies beside it.
    unread: dict[str, Any] = {}
    described = {}
    if form in LAYERLESS:
        described = {name: config[name] for name in LLAMA.keys() & config.keys()}
    row = FORMATS[form]
    keys = Keys(row.keys, config, form, tensors, {**parts.config, **described}, unread)
    source = Source(form, keys, dict(tensors), target, parts, remarks, unread)
    options = keys.options() | ({} if row.read is None else row.read(source))
    if unread:
        remarks.append(
            "config keys that say nothing of the draft layer are kept aside:"
            f" {', '.join(sorted(unread))}"
        )
    if row.read is None:
        return _import_mtp(source), source

    # 3. The tensors that a head may share with its target, and the draft vocabulary.
    _take_lm_head(source, options)
    embedding = _take_embedding(source, options)
    _sort_draft_vocab(source, options)
    tensors = source.tensors | embedding
    # ModelOpt's newer name of the first layer
    if form == "eagle3" and "midlayer.hidden_norm.weight" not in tensors:
        tensors = {
            re.sub(r"^layers\.0\.", "midlayer.", name): tensor for name, tensor in tensors.items()
        }

    # 4. The head. Without weights first: only after its shapes were compared with the file's is
    #    memory taken for it.
    name = "hydra++" if options.get("prefix_layer") else row.heads[0]
    options = {key: value for key, value in options.items() if value is not None}
    state = _matched(build_unloaded(name, options, target, len(tensors)), source, tensors)
    head = build_head(name, options, target)
    take_dtypes(head, state)
    head.load_state_dict(state)
    return head, source


def _import_mtp(source: Source) -> DraftHead:
    """An MTP head, whose layer is of any kind: its tensors are those of that kind's own class."""
    keys = source.keys
    layer = dict(keys["transformer_layer_config"])
    where = f"{keys.where}: transformer_layer_config"
    for name in ("hidden_size", "vocab_size"):
        expected = getattr(source.target, name)
        if layer.get(name) not in (None, expected):
            raise ValueError(
                f"{where} has {name} {layer[name]!r}, and the target {source.target.name!r} has"
                f" {expected!r}"
            )
    # A recurrent layer drafts to any depth: at least as far as its config says.
    methods = keys["speculators_config"].get("proposal_methods") or [{}]
    depth = methods[0].get("speculative_tokens")
    count = keys["num_nextn_predict_layers"]
    found = find(source.tensors, source.target.num_layers, keys.where)
    options = {"depth": count if count > 1 else max(depth or 0, RECURRENT_DEPTH)}
    unknown = sorted(source.tensors.keys() - found.names.keys() - set(found.copies))
    if unknown:
        raise ValueError(f"unknown tensor {unknown[0]!r}")
    tensors = {name: source.tensors[name] for name in found.names}
    return head_of_tensors(found, tensors, source.target, layer, keys.where, options)


def _take_lm_head(source: Source, options: dict[str, Any]) -> None:
    """Add the LM head that an EAGLE-3 file omits; for others, drop a copy of the target's.

    The omitted LM head is the target's, or the head's embedding if they are tied.
    """
    name = "lm_head.weight"
    tensors = source.tensors
    remarks = source.remarks
    layer: Any = source.keys
    if source.form != "eagle3":
        layer = source.keys.get("transformer_layer_config", source.keys)
    tied = bool(source.keys.get("tie_word_embeddings") or layer.get("tie_word_embeddings"))

    # 1. EAGLE-3 has an LM head of its own. A file may omit it for the whole vocabulary.
    if source.form in ("eagle3", "speculators"):
        whole = options["draft_vocab_size"] in (None, source.target.vocab_size)
        if name in tensors and tied:
            remarks.append(
                "tie_word_embeddings is true, and the file holds an LM head of its own: that is"
                " read"
            )
        elif name not in tensors and whole:
            lm_head_VD = source.parts.lm_head_VD
            if tied:
                lm_head_VD = tensors.get("embed_tokens.weight", source.parts.embedding_VD)
            if lm_head_VD is not None:
                if "fc.weight" in tensors:
                    lm_head_VD = lm_head_VD.to(tensors["fc.weight"].dtype)
                tensors[name] = lm_head_VD
                whose = "its embedding, as tie_word_embeddings says" if tied else "the target's"
                remarks.append(f"the file holds no LM head: {whose} is taken")
        return

    # 2. Other heads draft by the target's LM head, unless they have a draft vocabulary. A copy in
    #    the file must be the same.
    shared = "lm_head.weight" in FORMATS[source.form].tensors or source.form == "eagle"
    own_VD = tensors.get(name)
    target_VD = source.parts.lm_head_VD
    if (
        not shared
        or own_VD is None
        or options.get("draft_vocab_size") not in (None, source.target.vocab_size)
    ):
        return
    if target_VD is None or own_VD.shape != target_VD.shape:
        return  # an unknown tensor, which is refused below
    if not torch.equal(own_VD, target_VD.to(own_VD.dtype)):
        raise ValueError(
            f"its tensor {name!r} is not the LM head of the target {source.target.name!r}, by which"
            " such a head drafts: it was made for another model"
        )
    del tensors[name]
    remarks.append("its LM head is the target's and left out")


def _take_embedding(source: Source, options: dict[str, Any]) -> dict[str, Tensor]:
    """Take the embedding out of the file's tensors; return it if the head needs its own."""
    target_VD = source.parts.embedding_VD
    own_VD = source.tensors.pop("embed_tokens.weight", None)
    if own_VD is None:
        return {}
    if (
        target_VD is not None
        and own_VD.shape == target_VD.shape
        and torch.equal(own_VD, target_VD.to(own_VD.dtype))
    ):
        source.remarks.append("its embedding is the target's and left out")
    elif "embed_tokens.weight" in FORMATS[source.form].tensors:
        # A head of another width has an embedding of its own in any case.
        options["own_embedding"] = options["hidden_size"] is None
        return {"embed_tokens.weight": own_VD}
    elif target_VD is not None:
        name = source.target.name
        raise ValueError(
            f"its embedding is not that of the target {name!r}: it was made for another model"
        )
    return {}


def _sort_draft_vocab(source: Source, options: dict[str, Any]) -> None:
    """Check a draft vocabulary's offsets, and sort it or, if it is the whole one, drop it.

    Draft vocabularies are sorted here.
    """
    tensors = source.tensors
    vocab_size = source.target.vocab_size

    def distinct(ids_V: Tensor) -> bool:
        return bool(
            (ids_V >= 0).all() and (ids_V < vocab_size).all() and len(ids_V.unique()) == len(ids_V)
        )

    offsets_V = tensors.get("d2t")
    # 1. The whole vocabulary: no offsets but 0.
    if options.get("draft_vocab_size") == vocab_size:
        options["draft_vocab_size"] = None
        if offsets_V is not None and offsets_V.any():
            raise ValueError(
                "d2t moves ids although the draft vocabulary is the target's whole one"
            )
        for name in ("d2t", "t2d"):
            tensors.pop(name, None)
    # 2. A part of it: offsets [3, 0, 3] lead to target ids [3, 1, 5], which become [1, 3, 5].
    elif offsets_V is not None:
        ids_V = torch.arange(len(offsets_V)) + offsets_V.long()
        if not distinct(ids_V):
            absolute = "; its values look like target ids, and d2t holds these minus the draft id"
            raise ValueError(
                f"d2t does not lead to different ids below {vocab_size}"
                + (absolute if distinct(offsets_V.long()) else "")
            )
        chosen_V = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, ids_V, True)
        if "t2d" in tensors and not torch.equal(tensors["t2d"].bool(), chosen_V):
            raise ValueError("d2t and t2d name different draft vocabularies")
        tensors["t2d"] = chosen_V
        order = ids_V.argsort()
        if not torch.equal(order, torch.arange(len(order))):
            source.remarks.append("the draft vocabulary is sorted, the LM head with it")
            tensors["lm_head.weight"] = tensors["lm_head.weight"][order]
        tensors["d2t"] = ids_V[order] - torch.arange(len(order))


def _matched(head: DraftHead, source: Source, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a head's weights from the tensors of a file.

    Each must be in the table, and in the file with the head's own shape.
    """
    form = FORMATS[source.form]
    state = {}
    problems = []
    rest = dict(tensors)
    sizes = False  # whether a shape differs: then the config's sizes help to see why
    for place in places(form, head):
        tensor = rest.pop(place.theirs, None)
        if tensor is None:
            problems.append(f"missing tensor {place.theirs!r} ({place.meaning})")
            continue
        state[place.ours] = tensor
        sizes = sizes or tensor.shape != place.tensor.shape
        problem = tensor_problem(place.theirs, tensor, place.tensor)
        if problem:
            problems.append(problem)
    problems += [f"unknown tensor {name!r}" for name in rest if not name.startswith(form.ignored)]
    if sizes:
        layer = source.keys.get("transformer_layer_config", source.keys)
        stated = [f"{name} {layer[name]}" for name in SIZES if layer.get(name) is not None]
        problems.append(f"config.json says {', '.join(stated)}")
    if problems:
        raise ValueError("; ".join(problems))
    return state
