"""How each project writes this head: every key of its config.json, every tensor, and the reader."""

from __future__ import annotations

from dataclasses import replace

from ..checkpoints.tables import LLAMA, Format, Key, Row
from ..dflash.formats import DFLASH, DFLASH_CONFIG, DFLASH_NATIVE, DFLASH_TENSORS, dflash_options
from ..dflash.formats import FORMATS as DFLASH_FORMATS

DSPARK = {
    "sample_from_anchor": Key("whether the root's slot drafts", True, option="sample_from_anchor"),
    "markov_rank": Key(
        "width of the dependence on the token before; 0 would be DFlash",
        kind="id",
        option="markov_rank",
    ),
    "markov_head_type": Key(
        "its kind: vanilla, gated or rnn", "vanilla", kind="text", option="markov"
    ),
    "enable_confidence_head": Key(
        "whether the head estimates its acceptance rate", False, option="confidence"
    ),
    "confidence_head_with_markov": Key(
        "whether that estimate sees the token before", False, option="confidence_with_markov"
    ),
}
DSPARK_TENSORS = {
    **DFLASH_TENSORS,
    "markov_head.markov_w1.weight": Row("embedding of the token before a draft"),
    "markov_head.markov_w2.weight": Row("correction of the logits by it"),
    "markov_head.gate_proj.weight": Row("gate of the correction"),
    "markov_head.gate_proj.bias": Row("its bias"),
    "markov_head.joint_proj.weight": Row("gate, candidate and output of the RNN"),
    "markov_head.joint_proj.bias": Row("their bias"),
    "confidence_head.proj.weight": Row("estimate of the acceptance rate"),
    "confidence_head.proj.bias": Row("its bias"),
}
FORMATS: dict[str, Format] = {
    "dspark": Format(
        ("dspark",),
        {
            **LLAMA,
            **DFLASH,
            **DSPARK,
            **DFLASH_NATIVE,
            "mask_token_id": DFLASH_CONFIG["mask_token_id"],
            "target_layer_ids": DFLASH_CONFIG["target_layer_ids"],
            "num_anchors": Key("training only", None),
        },
        DSPARK_TENSORS,
        ignored=("embed_tokens.",),
        read=dflash_options,
    ),
    "speculators-dspark": replace(
        DFLASH_FORMATS["speculators-dflash"],
        heads=("dspark",),
        keys={
            **DFLASH_FORMATS["speculators-dflash"].keys,
            **DSPARK,
            "speculators_model_type": Key("dspark"),
        },
        tensors=DSPARK_TENSORS,
    ),
}
"""By the name that `headstart import` reports."""
