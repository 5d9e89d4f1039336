"""What a round costs on this machine: forwards of the target over so many tokens, and drafts of a head.

Measured in about a second when they are first asked for, and kept (see `machine`) for all models of these dimensions:
so a tree can fit the machine although nobody calibrated it there.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...heads import DraftHead
from ...heads.base import dtype_name
from ..compiled.cpu_kernels import version
from ..drafters.base import DraftContext, PrefillChunk
from ..drafters.tree_drafting import drafter_of
from ..logits import RandomSampler
from ..loop import PREFILL_TOKENS
from ..models.encoder_decoder import Seq2SeqTarget
from ..target import Target
from ..tuning.tree_spec import TreeShape
from .machine import measured_once, positive, seconds_in_turns

SIZES = (1, 2, 4, 8, 16, 32)
"""Tokens of the forwards that are timed."""
TEXT = 16
"""Tokens behind which they are."""
DEPTH = 4
"""Of the chain by which drafts are timed, at most."""
REPEATS, LIMIT = 5, 0.8
"""Calls of each, at most, and seconds after which there are no more."""


@dataclass(frozen=True)
class RoundCosts:
    """Seconds of the parts of a round."""

    forward: dict[int, float]
    """Of a forward of the target, by its tokens."""
    draft: float
    """Of one draft step, a depth of the tree, with its share of what the head reads after a round; 0 without a head."""

    def seconds(self, nodes: int, depth: int) -> float:
        """A round with a tree of so many nodes and so deep: straight between the sizes, and on beyond the last one.

        Args:
            nodes: the root counted.
            depth: 0 for a plain step.
        """
        sizes = list(self.forward)
        after = min(max(next((i for i, size in enumerate(sizes) if size >= nodes), len(sizes)), 1), len(sizes) - 1)
        low, high = sizes[after - 1], sizes[after]
        slope = (self.forward[high] - self.forward[low]) / (high - low)
        return self.forward[low] + slope * (nodes - low) + self.draft * depth

    @classmethod
    def read(cls, kept: Any) -> RoundCosts:
        """From what the machine's file holds.

        Raises:
            ValueError: it holds no costs.
        """
        forward = {int(size): positive(seconds) for size, seconds in kept["forward"].items()}
        if tuple(forward) != SIZES:
            raise ValueError(f"costs of {list(forward)} tokens, not of {list(SIZES)}")
        return cls(forward, positive(kept["draft"]) if kept["draft"] else 0.0)


def measured_costs(target: Target, head: DraftHead | None = None) -> RoundCosts:
    """What rounds cost here: as it was measured before, or measured now.

    Args:
        target: whose forwards; of the same dimensions all models cost the same.
        head: whose drafts; None for plain steps, or for what drafts without a head.
    """
    name = f"seconds of a round: {_dimensions(target)}; {_dimensions_of(head)}"
    return measured_once(target.device, name, lambda: asdict(_measured(target, head)), RoundCosts.read)


def _dimensions(target: Target) -> str:
    """All that a forward's price depends on, but for the values of its weights."""
    info, model = target.info, target.model
    kinds = ", ".join(sorted({type(weight).__name__ for weight in model.parameters()}))
    return (
        f"{type(model).__name__}, {info.num_layers} layers of {info.hidden_size} and {info.intermediate_size}, "
        f"{info.num_attention_heads} heads in {info.num_key_value_heads} groups of {info.head_dim}, "
        f"{info.vocab_size} tokens, {sum(weight.numel() for weight in model.parameters())} weights ({kinds}), "
        f"{dtype_name(target.dtype)}, {model.config._attn_implementation}, "
        + ("eager" if not target.compiled else "compiled" if target.graph is not None else f"kernels {version()}")
    )


def _dimensions_of(head: DraftHead | None) -> str:
    if head is None:
        return "no head"
    weights = sum(weight.numel() for weight in head.parameters())
    return f"{type(head).__name__}, {weights} weights, depth {head.max_depth}, layers {list(head.feature_layers)}"


@torch.inference_mode()
def _measured(target: Target, head: DraftHead | None) -> RoundCosts:
    random = torch.Generator().manual_seed(0)
    text_1T = torch.randint(target.info.vocab_size, (1, TEXT), generator=random).to(target.device)
    if isinstance(target, Seq2SeqTarget):
        target.encode(text_1T, None)  # a generation shows it its own text
    check = checker(target, text_1T, () if head is None else head.feature_layers)
    calls: dict[int, Callable[[], object]] = {size: partial(check, size) for size in SIZES}
    depth = 0 if head is None else min(head.max_depth, DEPTH)
    if head is not None:
        calls[0] = _drafting(target, head, text_1T, depth)
    taken = {call: statistics.median(times) for call, times in seconds_in_turns(calls, REPEATS, LIMIT).items()}
    # More tokens never take less time: where the clock says so, it was disturbed.
    forward = dict(zip(SIZES, itertools.accumulate((taken[size] for size in SIZES), max), strict=True))
    return RoundCosts(forward, taken[0] / depth if depth else 0.0)


def _drafting(target: Target, head: DraftHead, text_1T: Tensor, depth: int) -> Callable[[], None]:
    """What shows the head a token, as after a round, and drafts a chain."""
    drafter = drafter_of(head, TreeShape.chain(depth), target.modules)
    length, one_1 = text_1T.shape[1], torch.ones(1, dtype=torch.int64, device=target.device)
    drafter.begin(DraftContext(1, length + REPEATS + 1 + drafter.max_nodes, RandomSampler(None), None))
    output = target.read_chunk(text_1T, length, target.new_cache(1), head.feature_layers, [])
    drafter.read(PrefillChunk(text_1T[:, :-1], text_1T[:, 1:], output.features_BNF[:, :-1], one_1 * (length - 1)))
    after_round = PrefillChunk(text_1T[:, -1:], text_1T[:, :1], output.features_BNF[:, -1:], one_1)

    def draft() -> None:
        drafter.read(after_round)
        drafter.propose(text_1T[:, 0]).tokens_BN[0, -1].item()  # sync: a time is asked for

    return draft


def forward_seconds(
    target: Target, text_1T: Tensor, sizes: Sequence[int], layers: tuple[int, ...], repeats: int = 9
) -> dict[int, float]:
    """Seconds of a forward over chains of so many nodes behind a text, in turns; by size."""
    check = checker(target, text_1T, layers)
    taken = seconds_in_turns({size: partial(check, size) for size in sizes}, repeats)
    return {size: statistics.median(times) for size, times in taken.items()}


@torch.inference_mode()
def checker(target: Target, text_BT: Tensor, layers: tuple[int, ...]) -> Callable[[int], None]:
    """What runs a forward over chains of so many nodes behind texts of one length, which are read before."""
    length, cache = text_BT.shape[1], target.new_cache(len(text_BT))
    for chunk_BT in text_BT.split(PREFILL_TOKENS, dim=1):
        target.read_chunk(chunk_BT, length, cache, layers, [])

    @torch.inference_mode()
    def check(size: int) -> None:
        # Its own tokens: of one token alone, a mixture of experts would ask the same few.
        tokens_BN = text_BT[:, torch.arange(size, device=text_BT.device) % length]
        logits = target.forward_chain(tokens_BN, length, cache, layers).logits_BNV
        logits[0, -1, 0].item()  # sync: a time is asked for

    return check
