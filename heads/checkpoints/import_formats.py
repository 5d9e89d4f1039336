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
from collections import ChainMap
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config

from ..base import DraftHead, TargetInfo
from ..by_name import build_head
from .formats import (
    DFLASH_CONFIG,
    EAGLE_CONFIG,
    FORMATS,
    KINDS,
    LLAMA,
    NEEDED,
    Key,
    may_compute,
    places,
)
from .native_mtp import RECURRENT_DEPTH, find, head_of_tensors
from .save_load import build_unloaded

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
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that a head's weights may have."""


@dataclass(frozen=True)
class TargetParts:
    """Parts of a target, besides its dimensions, for what a head's files leave out."""

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
        tensors: Collection[str] = (),
        inherited: Mapping[str, Any] | None = None,
        unread: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(config, {name: key.default for name, key in table.items()})
        self.config, self.where = config, where
        aside = unknown_keys(table, config, where, tensors, inherited or {})
        if unread is not None:
            unread.update(aside)
        for name, key in table.items():
            if self[name] is NEEDED or (self[name] is None and key.default is NEEDED):
                raise ValueError(f"{where}: config key {name!r} ({key.meaning}) is missing or null")
            if key.only and self[name] not in key.only:
                allowed = " or ".join(map(repr, key.only))
                raise ValueError(
                    f"{where}: {name} is {self[name]!r} ({key.meaning}); a head here has {allowed}"
                )
            kind = key.kind or ("flag" if isinstance(key.default, bool) else "")
            if kind and self[name] is not None and not KINDS[kind][1](self[name]):
                raise ValueError(
                    f"{where}: {name} is {self[name]!r} ({key.meaning}); it must be"
                    f" {KINDS[kind][0]}"
                )

    def check_target(self, target: TargetInfo, *names: str) -> None:
        """Refuse a value that must be the target's and is not."""
        for name in names:
            own = getattr(target, name)
            if self[name] not in (None, own):
                raise ValueError(
                    f"{self.where}: {name} is {self[name]!r}, and {own!r} in the target"
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
        if name in inherited and inherited[name] == value:
            continue
        if may_compute(name, value, tensors):
            raise ValueError(
                f"{where}: unknown config key {name!r} is {value!r}. By its name it changes what a"
                " layer computes, and neither the tensors nor the target's own config explain it;"
                f" known are {', '.join(sorted(table))}"
            )
    return unknown


def recognise(config: dict[str, Any], names: set[str]) -> str:
    """The row of `FORMATS` that a config.json and the names of its tensors belong to."""
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
    for form, key in {"dspark": "markov_rank", "dflash": "dflash_config"}.items():
        if key in config:
            return form
    tests: dict[str, Callable[[str], Any]] = {
        "hydra": lambda name: name.startswith("hydra_"),
        "fasterdecoding": lambda name: re.fullmatch(
            r"(medusa_head\.)?\d+\.\d+(\.linear)?\.(weight|bias)", name
        ),
        "medusa": lambda name: name.startswith("blocks.0.layers."),
        "dspark": lambda name: name.startswith("markov_head."),
        "dflash": lambda name: name == "hidden_norm.weight",
        "eagle3": lambda name: name.endswith(".hidden_norm.weight") or name.startswith("midlayer."),
        "eagle": lambda name: name == "fc.weight",
    }
    for form, belongs in tests.items():
        if any(map(belongs, names)):
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

    Copies of the target's embedding and LM head are left out.

    Returned with its source, which names the format and holds the remarks for the user.

    Raises:
        ValueError: anything in it that is unknown, missing, contradictory or impossible here;
            named.
    """
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
    unread: dict[str, Any] = {}
    # Where a head has no decoder layer, keys of one describe the target: a whole model's
    # config.json lies beside it.
    described = (
        {}
        if form not in LAYERLESS
        else {name: config[name] for name in LLAMA.keys() & config.keys()}
    )
    keys = Keys(FORMATS[form].keys, config, form, tensors, {**parts.config, **described}, unread)
    source = Source(form, keys, dict(tensors), target, parts, remarks, unread)
    options = {} if form == "speculators-mtp" else READERS[form](source)
    if unread:
        remarks.append(
            "config keys that say nothing of the draft layer are kept aside:"
            f" {', '.join(sorted(unread))}"
        )
    if form == "speculators-mtp":
        return _import_mtp(source), source
    _take_lm_head(source, options)
    embedding = _take_embedding(source, options)
    _sort_draft_vocab(source, options)
    tensors = source.tensors | embedding
    # ModelOpt's newer name of the first layer
    if form == "eagle3" and "midlayer.hidden_norm.weight" not in tensors:
        tensors = {
            re.sub(r"^layers\.0\.", "midlayer.", name): tensor for name, tensor in tensors.items()
        }
    name = "hydra++" if options.get("prefix_layer") else FORMATS[form].heads[0]
    options = {key: value for key, value in options.items() if value is not None}
    # Without weights first: only after its shapes were compared with the file's is memory taken for
    # a head.
    state = _matched(build_unloaded(name, options, target, len(tensors)), source, tensors)
    head = build_head(name, options, target)
    for parameter_name, parameter in head.named_parameters():
        parameter.data = parameter.data.to(state[parameter_name].dtype)
    head.load_state_dict(state)
    return head, source


def _import_mtp(source: Source) -> DraftHead:
    """An MTP head, whose layer is of any kind: its tensors are those of that kind's own class."""
    keys = source.keys
    layer = dict(keys["transformer_layer_config"])
    where = f"{keys.where}: transformer_layer_config"
    for name, own in {
        "hidden_size": source.target.hidden_size,
        "vocab_size": source.target.vocab_size,
    }.items():
        if layer.get(name) not in (None, own):
            raise ValueError(
                f"{where} has {name} {layer[name]!r}, and the target {source.target.name!r} has"
                f" {own!r}"
            )
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


# Options of a head, from its config.json and tensors.


def _eagle3_options(source: Source) -> dict[str, Any]:
    keys, tensors, target, remarks = source.keys, source.tensors, source.target, source.remarks
    native = source.form == "eagle3"
    nested = source.read(EAGLE_CONFIG, (native and keys["eagle_config"]) or {}, "eagle_config")
    layer = keys if native else _layer_keys(source)
    options = _llama_options(layer, source, windows=True)
    options["sliding_window"] = _one_window(layer)
    options["attention_bias"] = _attention_bias(source)
    size = keys["draft_vocab_size"]
    if size is None and "lm_head.weight" in tensors:
        size = len(tensors["lm_head.weight"])
    options["draft_vocab_size"] = size
    options["qk_norm"] = any(name.endswith("q_norm.weight") for name in tensors)
    options |= {
        name: bool(keys[name])
        for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    }
    options["norm_before_fc"] = options["norm_before_fc"] or nested["norm_before_fc"]
    inputs, outputs = (
        keys["eagle_aux_hidden_state_layer_ids"],
        nested["eagle_aux_hidden_state_layer_ids"],
    )
    options["feature_layers"] = _feature_layers(inputs, outputs, target, remarks)
    width, count = keys["target_hidden_size"], len(options["feature_layers"])
    if width not in (None, target.hidden_size):
        raise ValueError(
            f"target_hidden_size is {width}, and {target.hidden_size} in the target {target.name!r}"
        )
    if keys["num_aux_hidden_states"] not in (None, count):
        raise ValueError(
            f"num_aux_hidden_states is {keys['num_aux_hidden_states']}, and feature layers "
            f"{options['feature_layers']} are {count}"
        )
    weight = tensors.get("fc.weight")
    if weight is not None and weight.ndim == 2 and weight.shape[1] != count * target.hidden_size:
        raise ValueError(
            f"fc.weight reads {weight.shape[1]} values, and {count} feature layers of the target"
            f" {target.name!r} are {count} x {target.hidden_size}"
        )
    if not native and "norm_before_residual" not in keys.config:
        remarks.append(
            "norm_before_residual is missing: read as false, speculators' own default; vLLM reads"
            " true"
        )
    return options


def _eagle_options(source: Source) -> dict[str, Any]:
    keys, tensors, remarks = source.keys, source.tensors, source.remarks
    native = source.form == "eagle"
    options = _llama_options(keys if native else _layer_keys(source), source)
    options["attention_bias"] = _attention_bias(source)
    width = options.pop("hidden_size")
    if width is not None:
        raise ValueError(
            f"{keys.where}: hidden_size is {width}, and an EAGLE-1 head is as wide as its target "
            f"{source.target.name!r}, {source.target.hidden_size}"
        )
    name, key = ("fc.bias", "bias") if native else ("fusion_fc.bias", "fusion_bias")
    bias = tensors.get(name)
    if bias is not None and not bias.any():
        tensors.pop(name)
        remarks.append(f"{name} is zero and left out")
    elif bias is not None:
        options["fc_bias"] = True
        remarks.append("fc has a bias: SGLang reads such a head, vLLM does not")
    elif keys.config.get(key):
        raise ValueError(f"{keys.where}: {key} is true and the tensor {name!r} is missing")
    return options


def _dflash_options(source: Source) -> dict[str, Any]:
    keys, tensors, target, remarks = source.keys, source.tensors, source.target, source.remarks
    native = not source.form.startswith("speculators")
    options = _llama_options(keys if native else _layer_keys(source), source, windows=True)
    if options.pop("hidden_size") is not None or keys.get("target_hidden_size") not in (
        None,
        target.hidden_size,
    ):
        raise ValueError(
            f"{keys.where}: a DFlash head is as wide as its target, which is {target.hidden_size}"
            " wide"
        )
    nested = keys
    if source.form == "dflash":
        nested = source.read(DFLASH_CONFIG, keys["dflash_config"], "dflash_config")
    size = keys["draft_vocab_size"]
    if size is None and "lm_head.weight" in tensors:
        size = len(tensors["lm_head.weight"])

    def agreed(name: str) -> Any:
        """A key's value; where dflash_config has it too, they must not contradict each other."""
        own, other = keys.config.get(name), nested.config.get(name)
        if own is not None and other is not None and own != other:
            raise ValueError(
                f"{keys.where}: {name} is {own!r} at the top level, and {other!r} in {nested.where}"
            )
        return next((value for value in (own, other, keys[name]) if value is not None), None)

    inputs, outputs = (
        keys.get("aux_hidden_state_layer_ids"),
        (agreed("target_layer_ids") if native else None),
    )
    again = keys.get("eagle_aux_hidden_state_layer_ids")
    if again is not None and inputs not in (None, again):
        raise ValueError(
            f"{keys.where}: aux_hidden_state_layer_ids is {inputs}, and"
            f" eagle_aux_hidden_state_layer_ids is {again}"
        )
    if native and keys["num_target_layers"] not in (None, target.num_layers):
        raise ValueError(
            f"{keys.where}: num_target_layers is {keys['num_target_layers']}, and"
            f" {target.num_layers} in the target {target.name!r}"
        )
    layer = (
        keys
        if native
        else ChainMap(
            keys["transformer_layer_config"], {"layer_types": None, "sliding_window": None}
        )
    )
    return (
        options
        | _window_options(layer, keys, nested)
        | {
            "block_size": agreed("block_size"),
            "draft_vocab_size": size,
            "feature_layers": _feature_layers(
                inputs or again, outputs, target, remarks, "target_layer_ids"
            ),
            "mask_token_id": agreed("mask_token_id"),
            "qk_norm": any(name.endswith("q_norm.weight") for name in tensors),
            "sample_from_anchor": bool(agreed("sample_from_anchor")),
        }
    )


def _window_options(
    layer: Mapping[str, Any], keys: Mapping[str, Any], nested: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the sliding-window options of block drafts.

    `nested` is dflash_config, whose keys decide in vLLM too.
    """
    kinds, causal = layer["layer_types"] or [], not keys.get("sliding_window_non_causal", False)
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ValueError(
            f"layer_types has {min(unknown)!r}; a head here has full_attention and"
            " sliding_attention"
        )
    sliding: list[int] | None = [
        number for number, kind in enumerate(kinds) if kind == "sliding_attention"
    ]
    if not sliding:
        if not nested.get("use_swa"):
            return {}
        sliding, causal = None, False
    if False in (keys.get("is_causal"), nested.get("causal")):
        causal = False
    window = nested.get("swa_window_size") or layer["sliding_window"]
    if window is None:
        raise ValueError(
            "layers have a sliding window, but neither sliding_window nor swa_window_size says how"
            " wide"
        )
    return {"sliding_window": window, "sliding_layers": sliding, "sliding_causal": causal}


def _one_window(layer: Keys) -> int | None:
    """The sliding window of all layers of an EAGLE-3 head; None without one."""
    kinds = set(layer["layer_types"] or [])
    if kinds <= {"full_attention"} and not (layer["use_sliding_window"] and not kinds):
        return None
    window: int | None = layer["sliding_window"]
    if kinds != {"sliding_attention"} or window is None:
        raise ValueError(
            f"{layer.where}: layer_types are {layer['layer_types']}, use_sliding_window is"
            f" {layer['use_sliding_window']} and sliding_window {window}; a head of this kind has"
            " full_attention alone, or sliding_attention alone with the number of tokens in"
            " sliding_window"
        )
    return window


def _dspark_options(source: Source) -> dict[str, Any]:
    keys = source.keys
    return _dflash_options(source) | {
        "markov": keys["markov_head_type"],
        "markov_rank": keys["markov_rank"],
        "confidence": bool(keys["enable_confidence_head"]),
        "confidence_with_markov": bool(keys["confidence_head_with_markov"]),
    }


def _medusa_options(source: Source) -> dict[str, Any]:
    keys, target, tensors = source.keys, source.target, source.tensors
    keys.check_target(target, "hidden_size", "vocab_size")
    size = keys["truncated_vocab_size"]
    heads = _count(tensors, r"blocks\.(\d+)\.layers\.0\.weight")
    if "num_heads" in keys.config and keys["num_heads"] != heads:
        raise ValueError(
            f"num_heads is {keys['num_heads']}, and the file holds {heads} of"
            " blocks.N.layers.0.weight"
        )
    return {
        "num_heads": heads,
        "num_layers": _layers_in_file(source, keys, r"blocks\.0\.layers\.(\d+)\."),
        "bias": keys["medusa_fc_bias"],
        "lm_head": "shared" if keys["original_lm_head"] else "own",
        "draft_vocab_size": None if size == target.vocab_size else size,
    }


def _fasterdecoding_options(source: Source) -> dict[str, Any]:
    keys, tensors, remarks = source.keys, source.tensors, source.remarks
    keys.check_target(source.target, "hidden_size", "vocab_size")
    heads = _count(tensors, r"(\d+)\.0\.linear\.weight")
    blocks = _count(tensors, r"0\.(\d+)\.linear\.weight")
    if keys["medusa_num_heads"] not in (None, heads):
        remarks.append(
            f"config.json says {keys['medusa_num_heads']} heads, the file holds {heads}: all are"
            " taken"
        )
    if "medusa_num_layers" in keys.config and keys["medusa_num_layers"] not in (None, blocks):
        remarks.append(
            f"config.json says {keys['medusa_num_layers']} blocks a head, the file holds {blocks}:"
            " taken"
        )
    if blocks > 1:
        _report_repeated(tensors, [f"0.{i}.linear.weight" for i in range(blocks)], remarks)
    return {
        "num_heads": heads,
        "num_layers": blocks,
        "bias": "0.0.linear.bias" in tensors,
        "lm_head": "own" if f"0.{blocks}.weight" in tensors else "shared",
    }


def _hydra_options(source: Source) -> dict[str, Any]:
    tensors, blocks = source.tensors, source.keys["hydra_num_layers"]
    source.keys.check_target(source.target, "hidden_size", "vocab_size")
    prefix = source.keys["hydra_head_arch"] == "prefix-mlp"
    held = _count(tensors, r"hydra_mlp\.0\.(\d+)\.linear\.weight")
    if blocks != held:
        raise ValueError(
            f"hydra_num_layers is {blocks}, and the file holds {held} of"
            " hydra_mlp.0.N.linear.weight"
        )
    if blocks > 2:
        later = [
            f"hydra_mlp.0.{2 * i + 3 if prefix else i + 1}.linear.weight" for i in range(blocks - 1)
        ]
        _report_repeated(tensors, later, source.remarks)
    return {
        "num_heads": _count(tensors, r"hydra_lm_head\.(\d+)\..*weight"),
        "num_layers": blocks,
        "prefix_layer": prefix,
        "prefix_norm": prefix,
        "bias": True,
    }


READERS: dict[str, Callable[[Source], dict[str, Any]]] = {
    "eagle3": _eagle3_options,
    "eagle": _eagle_options,
    "medusa": _medusa_options,
    "fasterdecoding": _fasterdecoding_options,
    "speculators": _eagle3_options,
    "speculators-eagle": _eagle_options,
    "dflash": _dflash_options,
    "speculators-dflash": _dflash_options,
    "dspark": _dspark_options,
    "speculators-dspark": _dspark_options,
    "hydra": _hydra_options,
}
"""By a row of `FORMATS`."""


def _count(tensors: dict[str, Tensor], pattern: str) -> int:
    """Count the different values of a pattern's first group in the tensors' names.

    The group is empty for a layer without a number.
    """
    return len({int(match[1] or 0) for name in tensors if (match := re.fullmatch(pattern, name))})


def _report_repeated(tensors: dict[str, Tensor], names: list[str], remarks: list[str]) -> None:
    """The authors' `[ResBlock(D)] * n` is one block n times; its copies are what was trained."""
    first = tensors.get(names[0])
    if first is not None and all(
        name in tensors and torch.equal(tensors[name], first) for name in names
    ):
        remarks.append(
            f"the {len(names)} blocks of a head are one, repeated, as its authors' code makes them:"
            " kept"
        )


def _layers_in_file(source: Source, keys: Keys, pattern: str) -> int:
    """Return the number of layers, which the tensors decide.

    A config made from the target's states the target's number of blocks; this is not an error.
    """
    held, stated = _count(source.tensors, rf"{pattern}.*"), keys["num_hidden_layers"]
    if "num_hidden_layers" not in keys.config or stated == held or not held:
        return held or stated
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


def _attention_bias(source: Source) -> bool:
    """Whether queries, keys and values have biases, which the tensors decide.

    A ValueError refuses a key that contradicts them.
    """
    held = sorted(
        name for name in source.tensors if re.search(r"self_attn\.[qkv]_proj\.bias$", name)
    )
    keys = source.keys
    given = keys.config if source.form in ("eagle", "eagle3") else keys["transformer_layer_config"]
    flags = {
        name: given[name] for name in ("qkv_bias", "attention_bias") if given.get(name) is not None
    }
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


def _layer_keys(source: Source) -> Keys:
    """Return the decoder layer of a speculators config.

    Absent keys have the defaults of the layer's class.
    """
    given = dict(source.keys["transformer_layer_config"])
    where = "transformer_layer_config"
    classes = {"llama": LlamaConfig, "qwen3": Qwen3Config}
    kind = given.get("model_type")
    if kind not in classes:
        raise ValueError(
            f"{source.keys.where}: {where} has model_type {kind!r}, by which its defaults are"
            f" chosen; it must be {' or '.join(classes)}"
        )
    # Before the class adds keys of its own.
    aside = unknown_keys(LLAMA, given, where, source.tensors, source.parts.config)
    source.unread.update(aside)
    known = {name: value for name, value in given.items() if name not in aside}
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


def _llama_options(keys: Keys, source: Source, windows: bool = False) -> dict[str, Any]:
    """Options of Llama-like layers; null where they equal the target's.

    `windows`: layers may have a sliding one.
    """
    target, remarks = source.target, source.remarks
    heads, width = keys["num_attention_heads"], keys["hidden_size"]
    keys.check_target(target, "vocab_size")
    kinds = keys["layer_types"] or []
    if not windows and (keys["use_sliding_window"] or set(kinds) - {"full_attention"}):
        raise ValueError(
            f"{keys.where}: layer_types are {kinds}, use_sliding_window is"
            f" {keys['use_sliding_window']}; a head of this kind has full_attention alone"
        )
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
    options["num_layers"] = _layers_in_file(
        source, keys, LAYERS.get(source.form, r"layers\.(\d+)\.")
    )
    eps = keys["rms_norm_eps"]
    options["rms_norm_eps"] = None if abs(eps / target.rms_norm_eps - 1) < 1e-3 else eps
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
    own = {"rope_type": "default", **target.rope_parameters}
    options["rope_parameters"] = None if rope == own else rope
    if rope["rope_theta"] != own["rope_theta"]:
        given = (
            ""
            if "rope_theta" in keys.config or keys["rope_parameters"]
            else " (none is written: the default)"
        )
        remarks.append(
            f"rotary base {rope['rope_theta']}{given}, and {own['rope_theta']} in the target: kept"
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


def _feature_layers(
    inputs: list[int] | None,
    outputs: list[int] | None,
    target: TargetInfo,
    remarks: list[str],
    where: str = "eagle_config",
) -> list[int]:
    """Feature layers by the block's output, as they are counted here, from either way of counting.

    `where` names the key that counts outputs.
    """
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


# Tensors of a head.


def _take_lm_head(source: Source, options: dict[str, Any]) -> None:
    """Add the LM head that an EAGLE-3 file omits; for others, drop a copy of the target's.

    The omitted LM head is the target's, or the head's embedding if they are tied.
    """
    name, tensors, remarks = "lm_head.weight", source.tensors, source.remarks
    layer = (
        source.keys
        if source.form == "eagle3"
        else source.keys.get("transformer_layer_config", source.keys)
    )
    tied = bool(source.keys.get("tie_word_embeddings") or layer.get("tie_word_embeddings"))
    if source.form in ("eagle3", "speculators"):
        whole = options["draft_vocab_size"] in (None, source.target.vocab_size)
        if name in tensors and tied:
            remarks.append(
                "tie_word_embeddings is true, and the file holds an LM head of its own: that is"
                " read"
            )
        elif name not in tensors and whole:
            meant = (
                tensors.get("embed_tokens.weight", source.parts.embedding_VD)
                if tied
                else source.parts.lm_head_VD
            )
            if meant is not None:
                tensors[name] = (
                    meant.to(tensors["fc.weight"].dtype) if "fc.weight" in tensors else meant
                )
                whose = "its embedding, as tie_word_embeddings says" if tied else "the target's"
                remarks.append(f"the file holds no LM head: {whose} is taken")
        return
    shared = "lm_head.weight" in FORMATS[source.form].tensors or source.form == "eagle"
    own_VD, target_VD = tensors.get(name), source.parts.lm_head_VD
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
    tensors, vocab_size = source.tensors, source.target.vocab_size

    def distinct(ids_V: Tensor) -> bool:
        return bool(
            (ids_V >= 0).all() and (ids_V < vocab_size).all() and len(ids_V.unique()) == len(ids_V)
        )

    offsets_V = tensors.get("d2t")
    if options.get("draft_vocab_size") == vocab_size:
        options["draft_vocab_size"] = None
        if offsets_V is not None and offsets_V.any():
            raise ValueError(
                "d2t moves ids although the draft vocabulary is the target's whole one"
            )
        for name in ("d2t", "t2d"):
            tensors.pop(name, None)
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
    state, problems, rest, sizes = {}, [], dict(tensors), False
    for place in places(form, head):
        tensor = rest.pop(place.theirs, None)
        if tensor is None:
            problems.append(f"missing tensor {place.theirs!r} ({place.meaning})")
        elif tensor.shape != place.tensor.shape:
            shape, own = tuple(tensor.shape), tuple(place.tensor.shape)
            problems.append(f"tensor {place.theirs!r} of shape {shape} instead of {own}")
            sizes = True
        elif place.tensor.is_floating_point() and tensor.dtype not in FLOATS:
            problems.append(
                f"tensor {place.theirs!r} of {tensor.dtype} instead of"
                f" {', '.join(map(str, FLOATS))}"
            )
        elif place.tensor.is_floating_point() and not tensor.isfinite().all():
            problems.append(f"tensor {place.theirs!r} has values that are no numbers or infinite")
        else:
            state[place.ours] = tensor
    problems += [
        f"unknown tensor {name!r}" for name in rest if not name.startswith(form.ignored or ("\0",))
    ]
    if sizes:
        layer = source.keys.get("transformer_layer_config", source.keys)
        stated = [f"{name} {layer[name]}" for name in SIZES if layer.get(name) is not None]
        problems.append(f"config.json says {', '.join(stated)}")
    if problems:
        raise ValueError("; ".join(problems))
    return state
