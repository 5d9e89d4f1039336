"""Options that no head can have: each head says which, what was given, and what is valid."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from helpers import INFO, SIZES
from messages import refused
from transformers import AutoConfig

from headstart.heads import build_head
from headstart.inference.targets.info import target_info

LAYER = SIZES | {"num_hidden_layers": 3, "vocab_size": 13}
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "medusa": [
        ({"num_head": 3}, "unknown 'num_head' bias draft_vocab_size lm_head num_heads num_layers"),
        ({"lm_head": "onw"}, "'lm_head' own shared 'onw'"),
        ({"num_heads": 0}, "medusa num_heads 1 0"),
        ({"num_layers": 0}, "medusa num_layers 1 0"),
        ({"draft_vocab_size": 8, "lm_head": "shared"}, "draft_vocab_size lm_head own"),
        ({"draft_vocab_size": 0}, "draft_vocab_size 0 40"),
        ({"draft_vocab_size": 41}, "draft_vocab_size 41 1 40"),
        ({"loss": {"kl": 1.0}}, "loss objective.loss"),
        ({"num_heads": "four"}, "num_heads 'four'"),
        ({"num_layers": 1.5}, "num_layers 1.5"),
        ({"draft_vocab_size": "8k"}, "draft_vocab_size '8k'"),
        ({"bias": "no"}, "bias 'no'"),
    ],
    "eagle3": [
        ({"layers": 1}, "unknown eagle3 'layers' attention_bias depth"),
        ({"feature_layers": [1, 2, 11]}, "feature_layers [1, 2, 11] 12 0 10"),
        ({"feature_layers": [1, -2]}, "feature_layers [1, -2]"),
        ({"feature_layers": [2, 2, 3]}, "feature_layers [2, 2, 3]"),
        ({"feature_layers": []}, "feature_layers []"),
        ({"draft_vocab_size": 41}, "draft_vocab_size 41 40"),
        ({"start": "first"}, "start random last 'first'"),
        ({"start": 1.5}, "start 1.5"),
        ({"depth": 0}, "eagle3 depth 1 0"),
        ({"num_layers": 0}, "eagle3 num_layers 1 0"),
        ({"train_steps": 0}, "eagle3 train_steps 1 0"),
        ({"train_steps": 3, "depth": 2}, "eagle3 train_steps 2 3"),
        ({"num_attention_heads": 3}, "num_attention_heads 3 num_key_value_heads 2"),
        ({"num_attention_heads": 0}, "eagle3 num_attention_heads 1 0"),
        ({"hidden_size": 0}, "eagle3 hidden_size 1 0"),
        ({"intermediate_size": -1}, "eagle3 intermediate_size 1 -1"),
        ({"head_dim": 0}, "eagle3 head_dim 1 0"),
    ],
    "dflash": [
        ({"block_size": 1}, "block_size 2"),
        ({"block_size": 513}, "block_size 513 512"),
        ({"num_layers": 0}, "dflash num_layers 1 0"),
        ({"mask_token_id": 40}, "mask_token_id 40"),
        ({"feature_layers": [3, 1]}, "feature_layers [3, 1]"),
        ({"feature_layers": [11]}, "feature_layers [11] 0 10"),
        ({"sliding_window": 0}, "dflash sliding_window 1 0"),
        ({"sliding_layers": [0]}, "dflash sliding_layers [0] sliding_window"),
        ({"sliding_layers": [2], "sliding_window": 5}, "sliding_layers [2] 0 1"),
        ({"start": "first"}, "start random last 'first'"),
    ],
    "dspark": [
        ({"markov": "bigram"}, "'markov' vanilla gated rnn 'bigram'"),
        ({"markov_rank": 0}, "dspark markov_rank 1 0"),
        ({"markov": "rnn", "sample_from_anchor": False}, "markov rnn sample_from_anchor"),
        ({"block_size": 1}, "dspark block_size 2"),
    ],
    "mtp": [
        ({"depth": 0}, "mtp depth 1 0"),
        ({"num_layers": 2, "depth": 3}, "depth num_layers 3 2"),
        ({"num_layers": 3, "train_steps": 2}, "train_steps 3"),
        ({"train_steps": 4}, "mtp train_steps 3 4"),
        ({"start": "first"}, "start random last 'first'"),
        ({"layer": {"model_type": "llama"}, "qk_norm": True}, "qk_norm layer"),
        ({"layer": {"model_type": "unheard"}}, "'unheard'"),
        ({"layer": {"model_type": "gpt2"}}, "'gpt2'"),
        ({"layer": LAYER | {"model_type": "gemma2"}}, "Gemma2Attention"),
        ({"layer": LAYER | {"model_type": "llama", "hidden_size": 64}}, "'tiny' 32"),
    ],
}
"""By head, options and what the error names."""
TARGETS = {"mtp": target_info(AutoConfig.for_model("llama", **LAYER), "tiny", 13, 3)}


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [(kind, *case) for kind, cases in REFUSED.items() for case in cases],
    ids=str,
)
def test_options_that_no_head_can_have_are_refused_by_name(
    kind: str, options: dict[str, Any], words: str
) -> None:
    with refused(words):
        build_head(kind, options, TARGETS.get(kind, INFO))


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_default_layers_that_coincide_are_refused(blocks: int) -> None:
    info = replace(INFO, num_layers=blocks)
    with refused("feature_layers default"):
        build_head("eagle3", {}, info)
    assert build_head("eagle3", {"feature_layers": [-1]}, info).feature_layers == (-1,)


def test_options_at_their_limits_are_taken() -> None:
    head = build_head("medusa", {"num_heads": 1, "num_layers": 1, "draft_vocab_size": 40}, INFO)
    assert head.max_depth == 1 and head.draft_vocab_size == 40
