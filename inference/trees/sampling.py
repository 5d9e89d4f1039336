"""Samplers: the randomness of drafts and acceptance rules.

Letters in tensor names: B batch, N nodes, U uniform numbers, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...heads.layers.constants import constants, upload


def finest(device: torch.device) -> torch.dtype:
    """float64, or float32 on Apple's GPUs, which have no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


@dataclass(eq=False)
class RandomSampler:
    """Source of randomness for drafts and acceptance rules: `generator`, or torch's global one.

    Also the interface of samplers: a test's enumerates all outcomes instead.
    """

    generator: torch.Generator | None = None
    live: tuple[bool, ...] | None = field(default=None, init=False)
    """For each row of the batch, whether it is being decoded; None if all are. No numbers are drawn
    for idle rows, so the others get the numbers that they would get without them. An idle row is
    given those of the first live one."""

    def __post_init__(self) -> None:
        if not isinstance(self.generator, torch.Generator | None):
            raise ValueError(f"generator must be a torch.Generator or None, not {self.generator!r}")

    def draw_for(self, live: tuple[bool, ...] | None) -> None:
        """From now on, draw only for the rows of the batch that are live."""
        self.live = live

    def uniform(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Uniform numbers in [0, 1), float64 where the device has it."""
        source = self._source(device)
        drawn = torch.rand(
            self._drawn(shape), dtype=finest(device), device=source, generator=self.generator
        )
        return self._in_places(drawn.to(device))

    def _source(self, device: torch.device) -> torch.device:
        """Where numbers for a device are drawn: the user's generator may be on another one."""
        return device if self.generator is None else self.generator.device

    def _drawn(self, shape: Sequence[int]) -> Sequence[int]:
        """Return the shape of numbers for the rows being decoded, from the whole batch's shape."""
        return shape if self.live is None else (sum(self.live), *shape[1:])

    def _in_places(self, drawn: Tensor) -> Tensor:
        """Give each row of the batch its numbers."""
        return drawn if self.live is None else drawn[_rank_among_live(self.live, drawn.device)]

    def categorical(self, probs: Tensor) -> Tensor:
        """One class per distribution, [..., V] to [...], by inverse transform sampling."""
        cumulative = probs.cumsum(-1, dtype=finest(probs.device))
        uniform = self.uniform((*probs.shape[:-1], 1), probs.device)
        # Probabilities [0.2, 0, 0.8] have the sums [0.2, 0.2, 1.0]. right=True finds the first sum
        # that exceeds the draw: 0.2 gives class 2, never class 1, whose probability is 0. The draw
        # is scaled, since by rounding the last sum may not be 1.
        drawn = torch.searchsorted(cumulative, uniform * cumulative[..., -1:], right=True)
        # NaN probabilities, which the caller detects, would give an index beyond the last class.
        return drawn.squeeze(-1).clamp(max=probs.shape[-1] - 1)

    def accept(self, probs: Tensor) -> Tensor:
        """True with each of these probabilities; same shape."""
        return self.uniform(probs.shape, probs.device) < probs

    def distinct(self, probs: Tensor, count: int) -> Tensor:
        """Draw `count` classes per distribution without replacement: [..., V] to [..., count].

        The classes are in draw order.

        Gumbel-top-k (1903.06059): the first arrivals of a race in which class v arrives at rate
        probs[v]. Impossible classes come last.
        """
        if count == 1:
            return self.categorical(probs)[..., None]
        # v arrives at time E / probs[v] with E exponential of rate 1. The first arrivals have the
        # largest inverse, which is 0 for an impossible class.
        times = torch.empty(
            self._drawn(probs.shape), dtype=probs.dtype, device=self._source(probs.device)
        ).exponential_(generator=self.generator)
        times = self._in_places(times.to(probs.device))
        return (probs / times).topk(count, dim=-1).indices


@constants
def _rank_among_live(live: tuple[bool, ...], device: torch.device) -> Tensor:
    """For each row of a batch, how many live rows stand before it; 0 for an idle one."""
    # (True, False, True): [0, 0, 1], so numbers [a, b] of the live rows become [a, a, b].
    ranks = [sum(live[:row]) if live[row] else 0 for row in range(len(live))]
    return upload(ranks, device)


@dataclass(eq=False)
class PositionSampler(RandomSampler):
    """One draw per node, a race by the random numbers of the node's position; see `noise`."""

    exponential_BNV: Tensor = field(kw_only=True)

    def categorical(self, probs: Tensor) -> Tensor:
        return (probs / self.exponential_BNV).argmax(-1)


@dataclass(eq=False)
class PrecomputedSampler(RandomSampler):
    """Samples with precomputed uniform numbers, each used once.

    Their first dimension is the batch.
    """

    uniform_BU: Tensor = field(kw_only=True)
    used: int = 0

    def uniform(self, shape: Sequence[int], device: torch.device) -> Tensor:
        count = math.prod(shape[1:])
        taken_BU = self.uniform_BU[:, self.used : self.used + count]
        self.used += count
        return taken_BU.reshape(shape)


def sampler_by(numbers: Tensor | RandomSampler | None) -> RandomSampler:
    """Return a sampler that uses these random numbers, from the first one on.

    They are exponential ones by position [B, N, V], or uniform ones [B, U]. A rule that draws none
    gets a sampler that is not asked; a sampler is returned itself.
    """
    if numbers is None:
        return RandomSampler()
    if not isinstance(numbers, Tensor):
        return numbers
    if numbers.ndim == 3:
        return PositionSampler(exponential_BNV=numbers)
    return PrecomputedSampler(uniform_BU=numbers)
