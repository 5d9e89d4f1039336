"""Drafts along a fixed text: they tell whether a head is read as it was saved.

Acceptance cannot tell a head that was loaded with a wrong layer or norm from one that was trained a
little less, but its drafts can. Training saves them with the head, and `headstart verify` repeats
and compares them.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from ..heads.base import DraftHead
from ..heads.layers.decoder_layer import at_least_fp32
from .engines.target import Target

PROBE_ENDS = (9, 20, 33, 64)
"""Lengths of the text's prefixes after which the head drafts."""
PROBE_NOISE = 0.06
"""Largest mean difference of log-probabilities between two probes of a head, by dtypes and
machines."""
PROBE_TIES = 0.15
"""Largest share of drafts that differ between two probes of a head, where two tokens are nearly
tied."""


def probe_text(vocab_size: int, length: int) -> Tensor:
    """The first tokens [length] of the fixed text."""
    # 7919 is prime, so that the tokens spread over any vocabulary.
    return torch.tensor([(7919 * i + 31) % vocab_size for i in range(length)])


@torch.inference_mode()
def probe_drafts(target: Target, head: DraftHead) -> dict[str, list[float]]:
    """Return the head's best token, and its log-probability, at every depth along a fixed text.

    The head is teacher-forced.
    """
    # A copy in the target's dtype, in which the head is served; training goes on with its own.
    served = copy.deepcopy(head).to(target.device, target.dtype).eval()
    length = PROBE_ENDS[-1] + head.max_depth
    text_1T = probe_text(target.info.vocab_size, length)[None].to(target.device)
    output = target.engine.read_chunk(
        text_1T, length, target.engine.new_cache(1), head.feature_layers, [0]
    )
    tokens: list[float] = []
    scores: list[float] = []
    for end in PROBE_ENDS:
        # The head reads the first `end` tokens: pairs of a token's features and its successor.
        state = served.begin(target.modules, 1, length, head.max_depth, head.max_depth)
        read_B = torch.tensor([end - 1], device=target.device)
        state = served.observe(state, output.features_BNF[:, : end - 1], text_1T[:, 1:end], read_B)
        # It is expanded along the text itself, not along its drafts, so that an early difference
        # does not change all that follow.
        for depth in range(head.max_depth):
            parent_11 = torch.full_like(text_1T[:, :1], 0 if depth else -1)
            logits_11V, state = served.expand(
                state, text_1T[:, end - 1 + depth : end + depth], parent_11
            )
            best = at_least_fp32(logits_11V).log_softmax(-1).max(-1)
            tokens.append(int(served.target_tokens(best.indices)))  # sync: once for each checkpoint
            scores.append(float(best.values))
    return {"tokens": tokens, "scores": scores}


def probe_difference(drafts: dict[str, Any], saved: dict[str, Any]) -> tuple[float, float]:
    """The share of drafts that differ, and the mean difference of their log-probabilities."""
    token_pairs = list(zip(drafts["tokens"], saved["tokens"], strict=True))
    score_pairs = list(zip(drafts["scores"], saved["scores"], strict=True))
    differing = sum(new != old for new, old in token_pairs)
    gap = sum(abs(new - old) for new, old in score_pairs)
    return differing / len(token_pairs), gap / len(score_pairs)
