"""How each project writes this head: every key of its config.json, every tensor, and the reader."""

from __future__ import annotations

from typing import Any

from ..checkpoints.reading import Reader, Source
from ..checkpoints.tables import LLAMA, SPECULATORS, Format, Key, Row
from ..dflash.formats import (
    DFLASH,
    DFLASH_CONFIG,
    DFLASH_NATIVE,
    DFLASH_TENSORS,
    SPECULATORS_BLOCK,
    dflash_options,
)

DSPARK = {
    "markov_rank": Key("width of the dependence on the token before; 0 would be DFlash", kind="id"),
    "markov_head_type": Key("its kind: vanilla, gated or rnn", "vanilla", kind="text"),
    "enable_confidence_head": Key("whether the head estimates its acceptance rate", False),
    "confidence_head_with_markov": Key("whether that estimate sees the token before", False),
}
DSPARK_TENSORS = {
    **DFLASH_TENSORS,
    "markov_head.markov_w1.weight": Row(
        "markov_head.markov_w1.weight", "embedding of the token before a draft"
    ),
    "markov_head.markov_w2.weight": Row(
        "markov_head.markov_w2.weight", "correction of the logits by it"
    ),
    "markov_head.gate_proj.weight": Row("markov_head.gate_proj.weight", "gate of the correction"),
    "markov_head.gate_proj.bias": Row("markov_head.gate_proj.bias", "its bias"),
    "markov_head.joint_proj.weight": Row(
        "markov_head.joint_proj.weight", "gate, candidate and output of the RNN"
    ),
    "markov_head.joint_proj.bias": Row("markov_head.joint_proj.bias", "their bias"),
    "confidence_head.proj.weight": Row(
        "confidence_head.proj.weight", "estimate of the acceptance rate"
    ),
    "confidence_head.proj.bias": Row("confidence_head.proj.bias", "its bias"),
}
FORMATS: dict[str, Format] = {
    "dspark": Format(
        ("dspark",),
        {
            **LLAMA,
            **DFLASH,
            **DSPARK,
            "sample_from_anchor": Key("whether the root's slot drafts", True),
            **DFLASH_NATIVE,
            "mask_token_id": DFLASH_CONFIG["mask_token_id"],
            "target_layer_ids": DFLASH_CONFIG["target_layer_ids"],
            "num_anchors": Key("training only", None),
        },
        DSPARK_TENSORS,
        ignored=("embed_tokens.",),
    ),
    "speculators-dspark": Format(
        ("dspark",),
        {
            **SPECULATORS,
            **DFLASH,
            **DSPARK,
            "sample_from_anchor": Key("whether the root's slot drafts", True),
            "speculators_model_type": Key("dspark"),
            **SPECULATORS_BLOCK,
        },
        DSPARK_TENSORS,
        ignored=("embed_tokens.",),
    ),
}
"""By the name that `headstart import` reports."""


def dspark_options(source: Source) -> dict[str, Any]:
    """Return the options of a DSpark head from its config.json and tensors."""
    # DFlash's options, and those of the correction and the estimate.
    keys = source.keys
    return dflash_options(source) | {
        "markov": keys["markov_head_type"],
        "markov_rank": keys["markov_rank"],
        "confidence": bool(keys["enable_confidence_head"]),
        "confidence_with_markov": bool(keys["confidence_head_with_markov"]),
    }


READERS: dict[str, Reader] = {
    "dspark": dspark_options,
    "speculators-dspark": dspark_options,
}
"""By format, what reads the options of a head."""
