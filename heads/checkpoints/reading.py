"""Reading another project's head: its files, checked by a table, and what several heads share.

The tensors decide. A key that contradicts them is an error that names both.
"""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config

from ...options import shown
from ..base import TargetInfo
from ..layers.target_layer import check_layers
from .tables import KINDS, LLAMA, NEEDED, Key, may_compute


@dataclass(frozen=True)
class TargetParts:
    """Parts of a target that stand in for what a head's files leave out."""

    embedding_VD: Tensor | None = None
    lm_head_VD: Tensor | None = None
    """Rows of the LM head that give the target's own logits."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Its config.json: a head's keys with the same values were inherited."""


@dataclass
class Source:
    """The files of a head, and the target that it drafts for."""

    form: str
    """The row of `FORMATS` by which it is read."""
    keys: Keys
    tensors: dict[str, Tensor]
    target: TargetInfo
    parts: TargetParts
    remarks: list[str]
    """Messages for the head's user."""
    unread: dict[str, Any]
    """Keys that say nothing of the draft layer, kept aside."""

    def read(self, table: dict[str, Key], config: dict[str, Any], where: str) -> Keys:
        """Check an object inside of the config by a table of its own."""
        return Keys(table, config, where, self.tensors, self.parts.config, self.unread)


class Keys(ChainMap[str, Any]):
    """A config.json whose keys are checked by a table, over the table's defaults."""

    def __init__(
        self,
        table: dict[str, Key],
        config: dict[str, Any],
        where: str,
        tensors: Collection[str],
        inherited: Mapping[str, Any],
        unread: dict[str, Any],
    ) -> None:
        # Lookups go to the config first, then to the table's defaults.
        super().__init__(config, {name: key.default for name, key in table.items()})
        self.table = table
        self.config = config
        self.where = where

        # 1. Keys that the table does not have.
        unread.update(unknown_keys(table, config, where, tensors, inherited))

        # 2. Values of those that it has: there, allowed, and of the right kind.
        for name, key in table.items():
            if self[name] is NEEDED or (self[name] is None and key.default is NEEDED):
                raise ValueError(f"{where}: config key {name!r} ({key.meaning}) is missing or null")
            if key.only and self[name] not in key.only:
                allowed = " or ".join(map(repr, key.only))
                raise ValueError(
                    f"{where}: {name} is {shown(self[name])} ({key.meaning}); a head here has"
                    f" {allowed}"
                )
            kind = key.kind or ("flag" if isinstance(key.default, bool) else "")
            if kind and self[name] is not None and not KINDS[kind][1](self[name]):
                raise ValueError(
                    f"{where}: {name} is {shown(self[name])} ({key.meaning}); it must be"
                    f" {KINDS[kind][0]}"
                )

    def options(self) -> dict[str, Any]:
        """The options of a head that keys hold as they are; a flag that is null is false."""
        return {
            key.option: bool(self[name]) if isinstance(key.default, bool) else self[name]
            for name, key in self.table.items()
            if key.option
        }

    def check_target(self, target: TargetInfo, *names: str) -> None:
        """Refuse a value that must be the target's and is not."""
        for name in names:
            expected = getattr(target, name)
            if self[name] not in (None, expected):
                raise ValueError(
                    f"{self.where}: {name} is {shown(self[name])}, and {expected!r} in the target"
                    f" {target.name!r}"
                )


def unknown_keys(
    table: dict[str, Key],
    config: dict[str, Any],
    where: str,
    tensors: Collection[str],
    inherited: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the config keys that a table does not have.

    A ValueError refuses one that may change what the draft layer computes.
    """
    unknown = {name: config[name] for name in sorted(config.keys() - table.keys())}
    for name, value in unknown.items():
        # The head's config began as a copy of the target's.
        if name in inherited and inherited[name] == value:
            continue
        if may_compute(name, value, tensors):
            raise ValueError(
                f"{where}: unknown config key {name!r} is {shown(value)}. By its name it changes"
                " what a layer computes, and neither the tensors nor the target's own config"
                f" explain it; known are {', '.join(sorted(table))}"
            )
    return unknown


def count_of(tensors: dict[str, Tensor], pattern: str) -> int:
    """Count the different values of a pattern's first group in the tensors' names.

    The group is empty for a layer without a number.
    """
    # layers.0.mlp.weight, layers.0.norm.weight and layers.1.norm.weight are 2 layers.
    return len({int(match[1] or 0) for name in tensors if (match := re.fullmatch(pattern, name))})


def report_repeated(tensors: dict[str, Tensor], names: list[str], remarks: list[str]) -> None:
    """The authors' `[ResBlock(D)] * n` is one block n times; its copies are what was trained."""
    first = tensors.get(names[0])
    if first is not None and all(
        name in tensors and torch.equal(tensors[name], first) for name in names
    ):
        remarks.append(
            f"the {len(names)} blocks of a head are one, repeated, as its authors' code makes them:"
            " kept"
        )


def layers_in_file(source: Source, keys: Keys, pattern: str) -> int:
    """Return the number of layers, which the tensors decide.

    A config made from the target's states the target's number of blocks; this is not an error.
    """
    held = count_of(source.tensors, rf"{pattern}.*")
    stated = keys["num_hidden_layers"]
    if "num_hidden_layers" not in keys.config or stated == held or not held:
        return held or stated
    # They differ. The target's own number was inherited; any other is a contradiction.
    if stated != source.target.num_layers:
        matches = (re.match(pattern, name) for name in source.tensors)
        names = sorted({match[0].rstrip(".") for match in matches if match})
        raise ValueError(
            f"{keys.where}: num_hidden_layers is {stated}, and the file holds tensors of {held}"
            f" layers, {', '.join(names[:4])}"
        )
    source.remarks.append(
        f"num_hidden_layers is {stated}, as of the target; the file holds {held}: those are read"
    )
    return held


def attention_bias(source: Source) -> bool:
    """Whether queries, keys and values have biases, which the tensors decide.

    A ValueError refuses a key that contradicts them.
    """
    held = sorted(
        name for name in source.tensors if re.search(r"self_attn\.[qkv]_proj\.bias$", name)
    )
    keys = source.keys
    if source.form in ("eagle", "eagle3"):
        layer_config = keys.config
    else:
        layer_config = keys["transformer_layer_config"]
    flags = {
        name: layer_config[name]
        for name in ("qkv_bias", "attention_bias")
        if layer_config.get(name) is not None
    }
    # A flag may be absent, but not contradict the tensors.
    if any(flags.values()) and not held:
        name = next(name for name, value in flags.items() if value)
        raise ValueError(
            f"{keys.where}: {name} is True, and the file has no tensor self_attn.q_proj.bias"
        )
    if flags and not any(flags.values()) and held:
        raise ValueError(
            f"{keys.where}: {next(iter(flags))} is False, and the file has the tensor {held[0]!r}"
        )
    if held:
        source.remarks.append("queries, keys and values have biases: no server reads such a head")
    return bool(held)


def layer_keys(source: Source) -> Keys:
    """Return the decoder layer of a speculators config.

    Absent keys have the defaults of the layer's class.
    """
    where = "transformer_layer_config"
    layer_config = dict(source.keys[where])
    classes = {"llama": LlamaConfig, "qwen3": Qwen3Config}
    kind = layer_config.get("model_type")
    if kind not in classes:
        raise ValueError(
            f"{source.keys.where}: {where} has model_type {shown(kind)}, by which its defaults are"
            f" chosen; it must be {' or '.join(classes)}"
        )
    check_layers(layer_config, f"{source.keys.where}: {where}")
    # Before the class adds keys of its own.
    aside = unknown_keys(LLAMA, layer_config, where, source.tensors, source.parts.config)
    source.unread.update(aside)
    known = {name: value for name, value in layer_config.items() if name not in aside}
    try:
        full = classes[kind](**known).to_dict()
    except (StrictDataclassError, TypeError, KeyError) as error:
        raise ValueError(f"{source.keys.where}: {where}: {error}") from error
    return source.read(LLAMA, {name: full[name] for name in LLAMA.keys() & full.keys()}, where)


LAYERS = {
    "eagle3": r"(?:midlayer|layers\.(\d+))\.",
    "speculators-eagle": r"transformer()\.",
}
"""How the names of a decoder layer's tensors begin, where not with layers.N."""


def llama_options(keys: Keys, source: Source, windows: bool = False) -> dict[str, Any]:
    """Options of Llama-like layers; null where they equal the target's.

    `windows`: layers may have a sliding one.
    """
    target = source.target
    remarks = source.remarks

    # 1. Refuse what a layer here cannot do.
    keys.check_target(target, "vocab_size")
    kinds = keys["layer_types"] or []
    if not windows and (keys["use_sliding_window"] or set(kinds) - {"full_attention"}):
        raise ValueError(
            f"{keys.where}: layer_types are {kinds}, use_sliding_window is"
            f" {keys['use_sliding_window']}; a head of this kind has full_attention alone"
        )

    # 2. Dimensions.
    heads = keys["num_attention_heads"]
    width = keys["hidden_size"]
    sizes = {
        "hidden_size": width,
        "intermediate_size": _mlp_width(keys, source),
        "hidden_act": keys["hidden_act"],
        "num_attention_heads": heads,
        "num_key_value_heads": keys["num_key_value_heads"] or heads,
        "head_dim": keys["head_dim"] or width // heads,
    }
    options = {
        name: None if value == getattr(target, name) else value for name, value in sizes.items()
    }
    options["num_layers"] = layers_in_file(
        source, keys, LAYERS.get(source.form, r"layers\.(\d+)\.")
    )
    # 1e-06 in one file and 9.999999974752427e-07 (float32) in the other are the same.
    eps = keys["rms_norm_eps"]
    options["rms_norm_eps"] = None if abs(eps / target.rms_norm_eps - 1) < 1e-3 else eps

    # 3. Rotary positions, in any of three spellings: the later ones win.
    rope = {
        "rope_theta": keys["rope_theta"],
        **(keys["rope_scaling"] or {}),
        **(keys["rope_parameters"] or {}),
    }
    rope["rope_type"] = rope.pop("type", rope.get("rope_type", "default"))
    if rope["rope_type"] == "mrope":
        rope = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
        remarks.append(
            "rotary positions in several dimensions (mrope) are plain ones for text: read so"
        )
    parts = [name for name, value in rope.items() if isinstance(value, dict)]
    if parts:
        raise ValueError(
            f"{keys.where}: rotary positions differ by layer, {', '.join(parts)}: no head here has"
            " that"
        )
    target_rope = {"rope_type": "default", **target.rope_parameters}
    options["rope_parameters"] = None if rope == target_rope else rope
    if rope["rope_theta"] != target_rope["rope_theta"]:
        is_written = "rope_theta" in keys.config or keys["rope_parameters"]
        origin = "" if is_written else " (none is written: the default)"
        remarks.append(
            f"rotary base {rope['rope_theta']}{origin}, and {target_rope['rope_theta']} in the"
            " target: kept"
        )
    return options


def _mlp_width(keys: Keys, source: Source) -> int:
    """Width of the MLP, which the tensors decide where the config has the target's."""
    stated: int = keys["intermediate_size"]
    held = {
        len(tensor)
        for name, tensor in source.tensors.items()
        if name.endswith("mlp.up_proj.weight")
    }
    if len(held) != 1 or held == {stated} or stated != source.target.intermediate_size:
        return stated
    (width,) = held
    source.remarks.append(
        f"intermediate_size is {stated}, as of the target; the file's MLP has {width}: that is read"
    )
    return width


def feature_layers(
    inputs: list[int] | None,
    outputs: list[int] | None,
    target: TargetInfo,
    remarks: list[str],
    where: str = "eagle_config",
) -> list[int]:
    """Return feature layers counted by the block's output, from either way of counting.

    `where` names the key that counts outputs.
    """
    # 1. From either key: inputs [2, 8, 13] are outputs [1, 7, 12].
    if inputs is not None and outputs is not None and [layer - 1 for layer in inputs] != outputs:
        raise ValueError(
            f"aux_hidden_state_layer_ids are {inputs} at the top level, which counts inputs of"
            f" blocks, and {outputs} in {where}, which counts outputs: the first must be one more"
            " than the second"
        )
    if inputs is None and outputs is None:
        middle = target.num_layers // 2
        outputs = [1, middle - 1, target.num_layers - 4]
        remarks.append(
            f"no feature layers are written: EAGLE-3's own, the outputs of blocks {outputs}, are"
            " taken"
        )
    layers = outputs if outputs is not None else [layer - 1 for layer in inputs or ()]

    # 2. Refuse those that are not there: an input of the first block is the embedding.
    if min(layers, default=0) < 0:
        raise ValueError(
            f"feature layers {inputs or outputs} begin before the first block: no head here reads"
            " that"
        )
    if max(layers, default=0) == target.num_layers - 1:
        raise ValueError(
            f"feature layer {target.num_layers - 1} is the state after the last block of"
            f" {target.name!r} and before the final norm, which no head here reads: choose from 0"
            f" to {target.num_layers - 2}, or -1 for the state after that norm"
        )
    if layers != sorted(layers):
        remarks.append(f"feature layers {layers} are sorted: their features are joined by depth")
    return sorted(layers)
