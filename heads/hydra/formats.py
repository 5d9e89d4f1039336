"""How each project writes this head: every key of its config.json, every tensor, and the reader."""

from __future__ import annotations

from typing import Any

from ..checkpoints.reading import Source, count_of, report_repeated
from ..checkpoints.tables import TRANSFORMERS, WHOLE_MODEL, Format, Key, Row, layer_rows


def hydra_options(source: Source) -> dict[str, Any]:
    """Return the options of a Hydra head from its config.json and tensors."""
    tensors = source.tensors
    blocks = source.keys["hydra_num_layers"]
    source.keys.check_target(source.target, "hidden_size", "vocab_size")
    prefix = source.keys["hydra_head_arch"] == "prefix-mlp"
    held = count_of(tensors, r"hydra_mlp\.0\.(\d+)\.linear\.weight")
    if blocks != held:
        raise ValueError(
            f"hydra_num_layers is {blocks}, and the file holds {held} of"
            " hydra_mlp.0.N.linear.weight"
        )
    # The blocks after the first, which joins: 1, 2, ... or, with dropout between, 3, 5, ...
    if blocks > 2:
        later = [
            f"hydra_mlp.0.{2 * i + 3 if prefix else i + 1}.linear.weight" for i in range(blocks - 1)
        ]
        report_repeated(tensors, later, source.remarks)
    return {
        "num_heads": count_of(tensors, r"hydra_lm_head\.(\d+)\..*weight"),
        "num_layers": blocks,
        "prefix_layer": prefix,
        "prefix_norm": prefix,
        "bias": True,
    }


FORMATS: dict[str, Format] = {
    "hydra": Format(
        ("hydra", "hydra++"),
        {
            **TRANSFORMERS,
            "hydra_num_heads": Key("heads; tensors are counted", None),
            "hydra_num_layers": Key("blocks of each head", 1, kind="size"),
            "hydra_head_arch": Key("mlp or prefix-mlp", "mlp", only=("mlp", "prefix-mlp")),
            **WHOLE_MODEL,
            "grounded_heads": Key("whether heads see the path", False, only=(True,)),
            "hidden_state_offset": Key("which state they read, from the last", 0, only=(0,)),
        },
        {
            "hydra_mlp.{h}.0.linear.weight": Row(
                "joins state and path", "blocks.{h}.join.linear.weight"
            ),
            "hydra_mlp.{h}.0.linear.bias": Row("its bias", "blocks.{h}.join.linear.bias"),
            "hydra_mlp.{h}.0.res_connection.weight": Row(
                "its residual", "blocks.{h}.join.res.weight"
            ),
            "hydra_mlp.{h}.0.res_connection.bias": Row(
                "the residual's bias", "blocks.{h}.join.res.bias"
            ),
            "hydra_mlp.{h}.{next}.linear.weight": Row(
                "a residual block", "blocks.{h}.layers.{l}.weight"
            ),
            "hydra_mlp.{h}.{next}.linear.bias": Row("its bias", "blocks.{h}.layers.{l}.bias"),
            "hydra_lm_head.{h}.weight": Row("LM head", "lm_heads.{h}.weight"),
            "hydra_lm_head.{h}.bias": Row("its bias", "lm_heads.{h}.bias"),
            **layer_rows("prefix_embeding_layer.layers.0", "prefix"),
            "prefix_embeding_layer.norm.weight": Row("norm after the prefix", "prefix_norm.weight"),
        },
        ignored=(
            "input_embed_fn.",
            "prefix_embeding_layer.embed_tokens.",
            "prefix_embeding_layer.layers.0.self_attn.rotary_emb.",
            "lm_head.",
        ),
        read=hydra_options,
    ),
}
"""By the name that `headstart import` reports."""
