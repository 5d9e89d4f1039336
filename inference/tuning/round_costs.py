"""Costs of the parts of a round, by which trees are chosen.

    seconds of a round = forward(nodes) + draft * depth + node * expanded + rest
    tokens per second  = acceptance length / seconds of a round

All choices of a tree use the same costs.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

import torch

from ..trees.tree_spec import SampledShape, TreePolicy
from .machine import positive

SIZES = (1, 2, 4, 8, 16, 32)
"""Tokens of the forwards whose costs a machine keeps."""


@dataclass(frozen=True)
class RoundCosts:
    """Seconds of the parts of a round; autoregressive steps until they are measured."""

    forward: dict[int, float]
    """A forward of the target by its number of tokens, in rising order; at least two sizes."""
    draft: float
    """A draft step, one for each depth of the tree, with its share of what the head reads after a
    round; 0 without a head."""
    node: float = 0.0
    """What a node that is expanded adds to a draft step."""
    rest: float = 0.0
    """The rest of a round: verification, cache update, and the part of drafting that no depth or
    node adds."""
    plain_step: float | None = None
    """A whole autoregressive step; None for the forward of one token."""
    reading: float = 0.0
    """Reading one token of a prompt by the head, which reads many at once; 0 without a head."""

    @property
    def plain(self) -> float:
        """Seconds of an autoregressive step."""
        return self.seconds(1, 0) if self.plain_step is None else self.plain_step

    def forward_seconds(self, nodes: int) -> float:
        """Seconds of a forward: linear between the measured sizes, and beyond the last."""
        # 6 nodes lie between the sizes 4 and 8, `after` = 3. Clamped, so that beyond the last size,
        # too, the line through the last two is used.
        sizes = list(self.forward)
        after = min(max(bisect_left(sizes, nodes), 1), len(sizes) - 1)
        low = sizes[after - 1]
        high = sizes[after]
        slope = (self.forward[high] - self.forward[low]) / (high - low)
        return self.forward[low] + slope * (nodes - low)

    def seconds(self, nodes: int, depth: int, expanded: int = 0) -> float:
        """Return the seconds of a round with a tree of `nodes`, the root counted.

        `expanded` of the nodes have children drafted.
        """
        return self.forward_seconds(nodes) + self.draft * depth + self.node * expanded + self.rest

    def rate(self, tree: TreePolicy, length: float) -> float:
        """Tokens per second of rounds with a tree that emit `length` tokens."""
        expanded = 0 if isinstance(tree, SampledShape) else tree.expanded
        return length / self.seconds(tree.size, tree.depth, expanded)

    def kept(self) -> dict[str, Any]:
        """Return measured costs as a file keeps them; `read` parses them."""
        return {"forward": self.forward, "draft": self.draft, "reading": self.reading}

    @classmethod
    def read(cls, kept: Any) -> RoundCosts:
        """Parse what `kept` returned.

        Raises:
            ValueError: it holds no costs.
            KeyError: it holds some of them, as an earlier version kept them.
        """
        forward = {int(size): positive(seconds) for size, seconds in kept["forward"].items()}
        if tuple(forward) != SIZES:
            raise ValueError(f"costs of {list(forward)} tokens, not of {list(SIZES)}")
        draft = positive(kept["draft"]) if kept["draft"] else 0.0
        reading = positive(kept["reading"]) if kept["reading"] else 0.0
        return cls(forward, draft, reading=reading)

    @classmethod
    def assumed(cls, device: torch.device) -> RoundCosts:
        """Return assumed costs, in autoregressive steps.

        One more token costs nothing on an accelerator, which is bound by its memory.
        """
        if device.type == "cpu":
            return cls({1: 1.0, 2: 1 + 1 / 16}, draft=1 / 8, reading=1 / 64)
        return cls({1: 1.0, 2: 1.0}, draft=1 / 8)
