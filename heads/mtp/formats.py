"""How projects write this head: every key of config.json and every tensor."""

from __future__ import annotations

from ..checkpoints.tables import SPECULATORS, Format, Key, Row, layer_rows

FORMATS: dict[str, Format] = {
    "speculators-mtp": Format(
        ("mtp",),
        {
            **SPECULATORS,
            "speculators_model_type": Key("mtp"),
            "transformer_layer_config": Key(
                "the target's text config, which says of what kind the layer is", kind="object"
            ),
            "num_nextn_predict_layers": Key("layers", 1, kind="size"),
        },
        {
            "mtp_layers.{l}.input_proj.weight": Row("joins embedding and state"),
            "mtp_layers.{l}.token_layernorm.weight": Row("norm of the embedding"),
            "mtp_layers.{l}.hidden_layernorm.weight": Row("norm of the state"),
            "mtp_layers.{l}.final_layernorm.weight": Row("norm of the output"),
            **layer_rows("mtp_layers.{l}", "mtp_layers.{l}"),
        },
        ignored=("embed_tokens.", "lm_head."),
    ),
}
"""By the name that `headstart import` reports."""
