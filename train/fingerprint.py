"""A few guesses along a fixed text, saved with a head: read otherwise, by a layer or a norm, it guesses otherwise.

Acceptance cannot tell a head that was misread a little from one that was trained a little less. The head's own
guesses can: they are made again by `headstart verify` and compared.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from ..heads import DraftHead
from ..heads.layers.decoder_layer import at_least_fp32
from ..inference import Target

ENDS = (9, 20, 33, 64)
"""The guesses follow these many tokens of the text, and go along it."""
NOISE = 0.06
"""By how much log-probabilities of the same head differ at most, in the mean, between formats and machines."""
OTHERS = 0.15
"""Of how many guesses near a tie may go another way."""


@torch.inference_mode()
def probe(target: Target, head: DraftHead) -> dict[str, list[float]]:
    """The head's best guess at every depth, the text's own tokens before it given, and its log-probability."""
    served = copy.deepcopy(head).to(target.device, target.dtype).eval()
    vocab = target.info.vocab_size
    length = ENDS[-1] + head.max_depth
    text_1T = torch.tensor([[(7919 * i + 31) % vocab for i in range(length)]], device=target.device)
    output = target.read_chunk(text_1T, length, target.new_cache(1), head.feature_layers, [0])
    tokens: list[float] = []
    scores: list[float] = []
    for end in ENDS:
        state = served.begin(target.modules, 1, length, head.max_depth, head.max_depth)
        read_B = torch.tensor([end - 1], device=target.device)
        state = served.observe(state, output.features_BNF[:, : end - 1], text_1T[:, 1:end], read_B)
        for depth in range(head.max_depth):
            parent_11 = torch.full_like(text_1T[:, :1], 0 if depth else -1)
            logits_11V, state = served.expand(state, text_1T[:, end - 1 + depth : end + depth], parent_11)
            best = at_least_fp32(logits_11V).log_softmax(-1).max(-1)
            tokens.append(int(served.target_tokens(best.indices)))  # sync: once a head, not in a loop that counts
            scores.append(float(best.values))
    return {"tokens": tokens, "scores": scores}


def apart(found: dict[str, Any], saved: dict[str, Any]) -> tuple[float, float]:
    """The share of other guesses, and the mean difference of their log-probabilities."""
    others = [one != other for one, other in zip(found["tokens"], saved["tokens"], strict=True)]
    differences = [abs(ours - theirs) for ours, theirs in zip(found["scores"], saved["scores"], strict=True)]
    return sum(others) / len(others), sum(differences) / len(differences)
