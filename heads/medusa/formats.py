"""How each project writes this head: every key of its config.json, every tensor, and the reader."""

from __future__ import annotations

from typing import Any

from ..checkpoints.reading import Source, count_of, layers_in_file, report_repeated
from ..checkpoints.tables import TRANSFORMERS, WHOLE_MODEL, Format, Key, Row


def medusa_options(source: Source) -> dict[str, Any]:
    """Return the options of a Medusa head as vLLM reads it from its config.json and tensors."""
    keys = source.keys
    target = source.target
    tensors = source.tensors
    keys.check_target(target, "hidden_size", "vocab_size")
    size = keys["truncated_vocab_size"]
    # Every head has a first block.
    heads = count_of(tensors, r"blocks\.(\d+)\.layers\.0\.weight")
    if "num_heads" in keys.config and keys["num_heads"] != heads:
        raise ValueError(
            f"num_heads is {keys['num_heads']}, and the file holds {heads} of"
            " blocks.N.layers.0.weight"
        )
    return {
        "num_heads": heads,
        "num_layers": layers_in_file(source, keys, r"blocks\.0\.layers\.(\d+)\."),
        "lm_head": "shared" if keys["original_lm_head"] else "own",
        "draft_vocab_size": None if size == target.vocab_size else size,
    }


def fasterdecoding_options(source: Source) -> dict[str, Any]:
    """Return the options of a Medusa head of its authors' from its config.json and tensors."""
    keys = source.keys
    tensors = source.tensors
    remarks = source.remarks
    keys.check_target(source.target, "hidden_size", "vocab_size")
    # Head 2 with one block has 2.0.linear.weight, the block, and 2.1.weight, its LM head.
    heads = count_of(tensors, r"(\d+)\.0\.linear\.weight")
    blocks = count_of(tensors, r"0\.(\d+)\.linear\.weight")
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
        report_repeated(tensors, [f"0.{i}.linear.weight" for i in range(blocks)], remarks)
    return {
        "num_heads": heads,
        "num_layers": blocks,
        "bias": "0.0.linear.bias" in tensors,
        "lm_head": "own" if f"0.{blocks}.weight" in tensors else "shared",
    }


FORMATS: dict[str, Format] = {
    "medusa": Format(
        ("medusa",),
        {
            **TRANSFORMERS,
            "hidden_size": Key("width of the head", kind="size"),
            "vocab_size": Key("size of the target's vocabulary", kind="size"),
            "truncated_vocab_size": Key(
                "size of the draft vocabulary; null or absent for the target's", None, kind="size"
            ),
            "num_heads": Key("heads", 5, kind="size", option="num_heads"),
            "num_hidden_layers": Key(
                "blocks of each head, or of the target in its own config",
                1,
                kind="size",
                option="num_layers",
            ),
            "medusa_fc_bias": Key("whether the blocks have a bias", False, option="bias"),
            "original_lm_head": Key("whether one LM head serves all heads", False),
            "max_paths": Key("of a tree, not read any more", 64),
            "topk": Key("of a tree, not read any more", 10),
            "max_seq_len": Key("longest text that a server allows", None),
            "logit_scale": Key("factor of the logits", 1.0, only=(1.0,)),
        },
        {
            "blocks.{h}.layers.{l}.weight": Row("a residual block"),
            "blocks.{h}.layers.{l}.bias": Row("its bias"),
            "lm_heads.{h}.weight": Row("LM head"),
            "token_map": Row("target ids of the draft vocabulary"),
        },
        read=medusa_options,
    ),
    "fasterdecoding": Format(
        ("medusa",),
        {
            **TRANSFORMERS,
            "medusa_num_heads": Key(
                "heads; published files have more than they say, so tensors are counted", None
            ),
            "medusa_num_layers": Key("blocks of each head; tensors are counted", 1),
            **WHOLE_MODEL,
            "version": Key("2 for heads without an LM head of their own", None),
        },
        {
            "{h}.{l}.linear.weight": Row("a residual block", "blocks.{h}.layers.{l}.weight"),
            "{h}.{l}.linear.bias": Row("its bias", "blocks.{h}.layers.{l}.bias"),
            "{h}.{blocks}.weight": Row("LM head", "lm_heads.{h}.weight"),
        },
        read=fasterdecoding_options,
    ),
}
"""By the name that `headstart import` reports."""
