"""Logits to scores and probabilities, by transformers' own processors, and the draws from them."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ..heads.base import wide

PREFIX_FREE = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)
"""Processors whose result depends on the logits alone, so that all nodes of a tree can be processed at once."""


class Draw(Protocol):
    """Where verifiers get their randomness, so that a test can enumerate instead of sampling."""

    def categorical(self, probs: Tensor) -> Tensor:
        """One class per distribution: [..., V] to [...]."""

    def accept(self, probs: Tensor) -> Tensor:
        """True with each of these probabilities; same shape."""

    def distinct(self, probs: Tensor, count: int) -> Tensor:
        """`count` classes per distribution, one after the other without replacement: [..., V] to [..., count].

        A distribution with fewer possible classes is filled up with impossible ones.
        """


class RandomDraw:
    """Draws by inverting the cumulative distribution; from a `torch.Generator`, or the global one if None."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator

    def categorical(self, probs: Tensor) -> Tensor:
        """One class per distribution: [..., V] to [...]."""
        cumulative = probs.cumsum(-1, dtype=torch.float64)
        uniform = torch.rand((*probs.shape[:-1], 1), dtype=torch.float64, device=probs.device, generator=self.generator)
        # right=True: the first class whose cumulative mass exceeds the draw, so never one of probability 0
        drawn = torch.searchsorted(cumulative, uniform * cumulative[..., -1:], right=True).squeeze(-1)
        return drawn.clamp(max=probs.shape[-1] - 1)  # probabilities that are no numbers are found by the caller

    def accept(self, probs: Tensor) -> Tensor:
        """True with each of these probabilities; same shape."""
        return torch.rand(probs.shape, dtype=torch.float64, device=probs.device, generator=self.generator) < probs

    def distinct(self, probs: Tensor, count: int) -> Tensor:
        """The first `count` arrivals of a race in which class v arrives at rate probs[v]: Gumbel-top-k."""
        times = torch.empty_like(probs).exponential_(generator=self.generator)
        return (probs / times).topk(count, dim=-1).indices


def check_processors(processors: LogitsProcessorList) -> None:
    """Refuse a processor that would need each node's own prefix.

    Raises:
        ValueError: naming it.
    """
    for processor in processors:
        if not isinstance(processor, PREFIX_FREE):
            raise ValueError(
                f"{type(processor).__name__} is not supported; choose from "
                + ", ".join(kind.__name__ for kind in PREFIX_FREE)
            )


def process(logits: Tensor, processors: LogitsProcessorList) -> Tensor:
    """Scores of any number of distributions, [..., V] to [..., V] in at least float32."""
    flat = wide(logits).reshape(-1, logits.shape[-1])
    no_prefix: Any = torch.empty(len(flat), 0, dtype=torch.int64, device=flat.device)
    return processors(no_prefix, flat).reshape(logits.shape)
