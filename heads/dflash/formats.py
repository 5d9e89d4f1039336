"""How each project writes this head: every key of its config.json, every tensor, and the reader."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from typing import Any

from ..checkpoints.reading import Source, feature_layers, layer_keys, llama_options
from ..checkpoints.tables import LLAMA, SPECULATORS, Format, Key, Row, layer_rows

DFLASH = {
    "block_size": Key("slots of a block, the root's included", kind="size", option="block_size"),
    "draft_vocab_size": Key(
        "size of the draft vocabulary; null or absent for the target's", None, kind="size"
    ),
    "sample_from_anchor": Key("whether the root's slot drafts", False, option="sample_from_anchor"),
}
DFLASH_NATIVE = {
    "num_target_layers": Key("blocks of the target", None, kind="size"),
    "aux_hidden_state_layer_ids": Key(
        "feature layers once more, each by the block whose input it is", None, kind="numbers"
    ),
    "eagle_aux_hidden_state_layer_ids": Key("the same", None, kind="numbers"),
    "is_causal": Key(
        "whether slots see only those before them; absent: where layers slide",
        None,
        only=(None, False),
    ),
}
"""Keys of the form that servers read."""
DFLASH_CONFIG = {
    "mask_token_id": Key("token of the slots after the root", kind="id"),
    "target_layer_ids": Key("feature layers, each by the block whose output it is", kind="numbers"),
    "sample_from_anchor": Key("as at the top level", None, kind="flag"),
    "block_size": Key("as at the top level", None, kind="size"),
    "causal": Key("as is_causal at the top level", None, only=(None, False)),
    "use_swa": Key(
        "whether all layers see a window of the context, if layer_types names none", False
    ),
    "swa_window_size": Key("the window; sliding_window where absent", None, kind="size"),
    "attention_sink_bias": Key(
        "learned sinks of attention, the tensors self_attn.sinks", False, only=(False, None)
    ),
    "projector_type": Key("another way to join features", None, only=(None,)),
}
"""Keys of `dflash_config`."""
SPECULATORS_BLOCK = {
    "transformer_layer_config": Key(
        "the decoder layers: what differs from the defaults of their class", kind="object"
    ),
    "aux_hidden_state_layer_ids": Key(
        "feature layers, each by the block whose input it is", kind="numbers"
    ),
    "mask_token_id": Key("token of the slots after the root", kind="id"),
    "target_hidden_size": Key("width of the target; hidden_size where absent", None, kind="size"),
    "sliding_window_non_causal": Key("whether slots of sliding layers see those after them", False),
}
"""Keys of the package speculators for heads that draft a block, DSpark too."""
DFLASH_TENSORS = {
    "fc.weight": Row("joins the features, the shallowest first"),
    "hidden_norm.weight": Row("norm of the context"),
    **layer_rows("layers.{l}", "layers.{l}"),
    "norm.weight": Row("norm before the LM head"),
    "lm_head.weight": Row("LM head over the draft vocabulary"),
    "d2t": Row("target id minus draft id"),
    "t2d": Row("whether a target id is in the draft vocabulary"),
}


def dflash_options(source: Source) -> dict[str, Any]:
    """Return the options of a DFlash head from its config.json and tensors."""
    keys = source.keys
    tensors = source.tensors
    target = source.target
    remarks = source.remarks

    # 1. The decoder layers, as wide as the target.
    native = not source.form.startswith("speculators")
    options = llama_options(keys if native else layer_keys(source), source, windows=True)
    if options.pop("hidden_size") is not None or keys.get("target_hidden_size") not in (
        None,
        target.hidden_size,
    ):
        raise ValueError(
            f"{keys.where}: a DFlash head is as wide as its target, which is {target.hidden_size}"
            " wide"
        )

    # 2. Keys that a DFlash file may have twice: at the top level and in `dflash_config`.
    nested = keys
    if source.form == "dflash":
        nested = source.read(DFLASH_CONFIG, keys["dflash_config"], "dflash_config")

    def agreed(name: str) -> Any:
        """A key's value; where dflash_config has it too, they must not contradict each other."""
        top = keys.config.get(name)
        other = nested.config.get(name)
        if top is not None and other is not None and top != other:
            raise ValueError(
                f"{keys.where}: {name} is {top!r} at the top level, and {other!r} in {nested.where}"
            )
        # The first that is set; the last is the table's default.
        return next((value for value in (top, other, keys[name]) if value is not None), None)

    # 3. Feature layers, by blocks' inputs under two names or by their outputs.
    inputs = keys.get("aux_hidden_state_layer_ids")
    outputs = agreed("target_layer_ids") if native else None
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

    # 4. The sliding window, which speculators describes with the layers.
    layer: Mapping[str, Any] = keys
    if not native:
        absent: dict[str, Any] = {"layer_types": None, "sliding_window": None}
        layer = ChainMap(keys["transformer_layer_config"], absent)

    # 5. The draft vocabulary, by the rows of the LM head where no size is written.
    size = keys["draft_vocab_size"]
    if size is None and "lm_head.weight" in tensors:
        size = len(tensors["lm_head.weight"])
    return (
        options
        | _window_options(layer, keys, nested)
        | {
            "block_size": agreed("block_size"),
            "draft_vocab_size": size,
            "feature_layers": feature_layers(
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
    kinds = layer["layer_types"] or []
    causal = not keys.get("sliding_window_non_causal", False)
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ValueError(
            f"layer_types has {min(unknown)!r}; a head here has full_attention and"
            " sliding_attention"
        )
    sliding: list[int] | None = [
        number for number, kind in enumerate(kinds) if kind == "sliding_attention"
    ]
    # Without sliding layers by type, `use_swa` makes all layers slide, with slots that see all of
    # their block.
    if not sliding:
        if not nested.get("use_swa"):
            return {}
        sliding = None
        causal = False
    if False in (keys.get("is_causal"), nested.get("causal")):
        causal = False
    window = nested.get("swa_window_size") or layer["sliding_window"]
    if window is None:
        raise ValueError(
            "layers have a sliding window, but neither sliding_window nor swa_window_size says how"
            " wide"
        )
    return {"sliding_window": window, "sliding_layers": sliding, "sliding_causal": causal}


FORMATS: dict[str, Format] = {
    "dflash": Format(
        ("dflash",),
        {
            **LLAMA,
            **DFLASH,
            **DFLASH_NATIVE,
            "mask_token_id": Key("as in dflash_config", None, kind="id"),
            "target_layer_ids": Key("as in dflash_config", None, kind="numbers"),
            "dflash_config": Key("more options", kind="object"),
        },
        DFLASH_TENSORS,
        ignored=("embed_tokens.",),
        read=dflash_options,
    ),
    "speculators-dflash": Format(
        ("dflash",),
        {
            **SPECULATORS,
            **DFLASH,
            "speculators_model_type": Key("dflash"),
            **SPECULATORS_BLOCK,
        },
        DFLASH_TENSORS,
        ignored=("embed_tokens.",),
        read=dflash_options,
    ),
}
"""By the name that `headstart import` reports."""
