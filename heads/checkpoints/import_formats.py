"""A config.json of another project as the options of a head, by the tables of `formats.py`."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config

from ..base import TargetInfo
from .formats import EAGLE_CONFIG, LLAMA, NEEDED, Key


class Keys:
    """A config.json, read by a table."""

    def __init__(self, table: dict[str, Key], config: dict[str, Any], where: str) -> None:
        self.table, self.config, self.where = table, config, where
        check_known(table, config, where)
        for name, key in table.items():
            if self[name] is NEEDED:
                raise ValueError(f"{where}: config key {name!r} ({key.meaning}) is missing")
            if key.only and self[name] not in key.only:
                allowed = " or ".join(map(repr, key.only))
                raise ValueError(f"{where}: {name} is {self[name]!r} ({key.meaning}); a head here has {allowed}")

    def __getitem__(self, name: str) -> Any:
        return self.config.get(name, self.table[name].default)


def check_known(table: dict[str, Key], config: dict[str, Any], where: str) -> None:
    """Refuse a key that a table does not have.

    Raises:
        ValueError: naming it.
    """
    unknown = sorted(config.keys() - table.keys())
    if unknown:
        raise ValueError(f"{where}: unknown config key {unknown[0]!r}; known are {', '.join(sorted(table))}")


def _eagle3_options(
    keys: Keys, tensors: dict[str, Tensor], target: TargetInfo, remarks: list[str]
) -> tuple[str, dict[str, Any]]:
    nested = Keys(EAGLE_CONFIG, keys["eagle_config"] or {}, "eagle_config")
    options = _llama_options(keys, target, remarks) | _eagle3_flags(keys, tensors)
    options["norm_before_fc"] = keys["norm_before_fc"] or nested["norm_before_fc"]
    outputs = nested["eagle_aux_hidden_state_layer_ids"]
    options["feature_layers"] = _layers(keys["eagle_aux_hidden_state_layer_ids"], outputs, target, remarks)
    _check_width(keys, tensors, target, len(options["feature_layers"]))
    return "eagle3", options


def _speculators_options(
    keys: Keys, tensors: dict[str, Tensor], target: TargetInfo, remarks: list[str]
) -> tuple[str, dict[str, Any]]:
    options = _llama_options(_layer_keys(keys), target, remarks) | _eagle3_flags(keys, tensors)
    options["feature_layers"] = _layers(keys["eagle_aux_hidden_state_layer_ids"], None, target, remarks)
    _check_width(keys, tensors, target, len(options["feature_layers"]))
    if "norm_before_residual" not in keys.config:
        remarks.append("norm_before_residual is missing: read as false, speculators' own default; vLLM reads true")
    return "eagle3", options


def _eagle_options(
    keys: Keys, tensors: dict[str, Tensor], target: TargetInfo, remarks: list[str]
) -> tuple[str, dict[str, Any]]:
    llama = _layer_keys(keys) if keys.where == "speculators-eagle" else keys
    options = _llama_options(llama, target, remarks)
    options.pop("hidden_size")
    name, key = ("fusion_fc.bias", "fusion_bias") if llama is not keys else ("fc.bias", "bias")
    bias = tensors.get(name)
    if bias is not None and not bias.any():
        tensors.pop(name)
        remarks.append(f"{name} is zero and left out")
    elif bias is not None:
        options["fc_bias"] = True
        remarks.append("fc has a bias: SGLang reads such a head, vLLM does not")
    elif keys.config.get(key):
        raise ValueError(f"{keys.where}: {key} is true and the tensor {name!r} is missing")
    return "eagle", options


def _medusa_options(
    keys: Keys, tensors: dict[str, Tensor], target: TargetInfo, remarks: list[str]
) -> tuple[str, dict[str, Any]]:
    for name, own in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        if keys[name] != own:
            raise ValueError(f"medusa: {name} is {keys[name]}, and {own} in the target {target.name!r}")
    size = keys["truncated_vocab_size"]
    return "medusa", {
        "num_heads": keys["num_heads"],
        "num_layers": keys["num_hidden_layers"],
        "bias": keys["medusa_fc_bias"],
        "lm_head": "shared" if keys["original_lm_head"] else "own",
        "draft_vocab_size": None if size == target.vocab_size else size,
    }


def _fasterdecoding_options(
    keys: Keys, tensors: dict[str, Tensor], target: TargetInfo, remarks: list[str]
) -> tuple[str, dict[str, Any]]:
    heads = _count(tensors, r"(\d+)\.0\.linear\.weight")
    blocks = _count(tensors, r"0\.(\d+)\.linear\.weight")
    if keys["medusa_num_heads"] not in (None, heads):
        remarks.append(f"config.json says {keys['medusa_num_heads']} heads, the file holds {heads}: all are taken")
    if blocks > 1:
        _say_repeated(tensors, [f"0.{i}.linear.weight" for i in range(blocks)], remarks)
    own = f"0.{blocks}.weight" in tensors
    return "medusa", {
        "num_heads": heads,
        "num_layers": blocks,
        "bias": "0.0.linear.bias" in tensors,
        "lm_head": "own" if own else "shared",
    }


def _hydra_options(
    keys: Keys, tensors: dict[str, Tensor], target: TargetInfo, remarks: list[str]
) -> tuple[str, dict[str, Any]]:
    prefix = keys["hydra_head_arch"] == "prefix-mlp"
    heads, blocks = _count(tensors, r"hydra_lm_head\.(\d+)\..*weight"), keys["hydra_num_layers"]
    later = [f"hydra_mlp.0.{2 * i + 3 if prefix else i + 1}.linear.weight" for i in range(blocks - 1)]
    if blocks > 2:
        _say_repeated(tensors, later, remarks)
    return "hydra++" if prefix else "hydra", {
        "num_heads": heads,
        "num_layers": blocks,
        "prefix_layer": prefix,
        "prefix_norm": prefix,
        "bias": True,
    }


READERS = {
    "eagle3": _eagle3_options,
    "eagle": _eagle_options,
    "medusa": _medusa_options,
    "fasterdecoding": _fasterdecoding_options,
    "speculators": _speculators_options,
    "speculators-eagle": _eagle_options,
    "hydra": _hydra_options,
}
"""By a row of `FORMATS`: its config and tensors as the word and the options of a head."""


def _count(tensors: dict[str, Tensor], pattern: str) -> int:
    found = {int(match[1]) for name in tensors if (match := re.fullmatch(pattern, name))}
    return len(found)


def _say_repeated(tensors: dict[str, Tensor], names: list[str], remarks: list[str]) -> None:
    """The authors' `[ResBlock(D)] * n` is one block n times; its copies are what was trained."""
    first = tensors.get(names[0])
    if first is not None and all(name in tensors and torch.equal(tensors[name], first) for name in names):
        remarks.append(f"the {len(names)} blocks of a head are one, repeated, as its authors' code makes them: kept")


def _layer_keys(keys: Keys) -> Keys:
    """The decoder layer of a speculators config: what is not written there has its class's default."""
    given = dict(keys["transformer_layer_config"])
    classes = {"llama": LlamaConfig, "qwen3": Qwen3Config}
    kind = given.get("model_type")
    if kind not in classes:
        raise ValueError(
            f"{keys.where}: transformer_layer_config has model_type {kind!r}, by which its defaults are chosen; it "
            f"must be {' or '.join(classes)}"
        )
    check_known(LLAMA, given, "transformer_layer_config")  # before the class adds keys of its own
    full = classes[kind](**given).to_dict()
    return Keys(LLAMA, {name: full[name] for name in LLAMA.keys() & full.keys()}, "transformer_layer_config")


def _llama_options(keys: Keys, target: TargetInfo, remarks: list[str]) -> dict[str, Any]:
    """Options of Llama-like layers; null where they equal the target's."""
    heads, width = keys["num_attention_heads"], keys["hidden_size"]
    if keys["vocab_size"] != target.vocab_size:
        raise ValueError(
            f"{keys.where}: vocab_size is {keys['vocab_size']}, and {target.vocab_size} in the target {target.name!r}"
        )
    if keys["hidden_act"] != target.hidden_act:
        raise ValueError(
            f"{keys.where}: hidden_act is {keys['hidden_act']!r}; a head here has the target's, {target.hidden_act!r}"
        )
    if set(keys["layer_types"] or ()) - {"full_attention"}:
        raise ValueError(f"{keys.where}: layer_types are {keys['layer_types']}; a head here has full_attention alone")
    asked = {
        "hidden_size": width,
        "intermediate_size": keys["intermediate_size"],
        "num_attention_heads": heads,
        "num_key_value_heads": keys["num_key_value_heads"] or heads,
        "head_dim": keys["head_dim"] or width // heads,
    }
    options = {name: None if value == getattr(target, name) else value for name, value in asked.items()}
    options["num_layers"] = keys["num_hidden_layers"]
    eps = keys["rms_norm_eps"]
    options["rms_norm_eps"] = None if abs(eps / target.rms_norm_eps - 1) < 1e-3 else eps
    rope, own = _rope(keys), {"rope_type": "default", **target.rope_parameters}
    options["rope_parameters"] = None if rope == own else rope
    if rope["rope_theta"] != own["rope_theta"]:
        given = "" if "rope_theta" in keys.config or keys["rope_parameters"] else " (none is written: the default)"
        remarks.append(f"rotary base {rope['rope_theta']}{given}, and {own['rope_theta']} in the target: kept")
    return options


def _rope(keys: Keys) -> dict[str, Any]:
    rope = {"rope_theta": keys["rope_theta"], **(keys["rope_scaling"] or {}), **(keys["rope_parameters"] or {})}
    rope["rope_type"] = rope.pop("type", rope.get("rope_type", "default"))
    return rope


def _eagle3_flags(keys: Keys, tensors: dict[str, Tensor]) -> dict[str, Any]:
    size = keys["draft_vocab_size"]
    if size is None and "lm_head.weight" in tensors:
        size = len(tensors["lm_head.weight"])
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    return {
        "draft_vocab_size": size,
        "qk_norm": any(name.endswith("q_norm.weight") for name in tensors),
        **{name: bool(keys[name]) for name in flags},
    }


def _layers(inputs: list[int] | None, outputs: list[int] | None, target: TargetInfo, remarks: list[str]) -> list[int]:
    """Feature layers in our count, by a block's output, from either way of counting."""
    if inputs is not None and outputs is not None and [layer - 1 for layer in inputs] != outputs:
        raise ValueError(
            f"eagle_aux_hidden_state_layer_ids are {inputs} at the top level, which counts inputs of blocks, and "
            f"{outputs} in eagle_config, which counts outputs: the first must be one more than the second"
        )
    if inputs is None and outputs is None:
        middle = target.num_layers // 2
        outputs = [1, middle - 1, target.num_layers - 4]
        remarks.append(f"no feature layers are written: EAGLE-3's own, the outputs of blocks {outputs}, are taken")
    layers = outputs if outputs is not None else [layer - 1 for layer in inputs or ()]
    if min(layers, default=0) < 0:
        raise ValueError(f"feature layers {inputs or outputs} begin before the first block: no head here reads that")
    if layers != sorted(layers):
        remarks.append(f"feature layers {layers} are sorted: their features are joined by depth")
    return sorted(layers)


def _check_width(keys: Keys, tensors: dict[str, Tensor], target: TargetInfo, count: int) -> None:
    stated = keys["target_hidden_size"]
    if stated not in (None, target.hidden_size):
        raise ValueError(f"target_hidden_size is {stated}, and {target.hidden_size} in the target {target.name!r}")
    weight = tensors.get("fc.weight")
    if weight is not None and weight.shape[1] != count * target.hidden_size:
        raise ValueError(
            f"fc.weight reads {weight.shape[1]} values, and {count} feature layers of the target {target.name!r} are "
            f"{count} x {target.hidden_size}"
        )
