"""The objective of training a head: losses with their weights, and the weights of depths.

An objective is an option of training. The losses are defined in `losses.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ..options import check_values, limited

LOSSES = ("ce", "soft_ce", "kl", "reverse_kl", "tv", "lk_alpha", "lk_lambda")
"""Losses over the vocabulary."""
NEED_HEAD = {
    "smooth_l1": "predicts no features",
    "confidence": "does not estimate its acceptance rate",
}
"""Losses that only some heads have, and what is said of the others."""
NEED_MASS = {"tv", "lk_alpha", "lk_lambda", "confidence"}
"""Losses that use the target's probabilities as they are, and so its logits of the whole
vocabulary."""


@dataclass(frozen=True)
class Objective:
    """A weighted mix of losses, and the weights of depths."""

    loss: dict[str, float] = field(default_factory=lambda: {"soft_ce": 1.0})
    """Losses and their weights; see losses.py."""
    depth_weights: Literal["decay", "d_pace"] = "decay"
    """decay: decay ** depth. d_pace: the derivative of the expected number of accepted tokens by a
    token's log-probability, sum_{k >= j} prod_{i <= k} q_i with q_i the draft's probability of the
    true token (arXiv:2605.18810), by which speculators and NVIDIA train DFlash. The losses of
    NEED_HEAD keep decay."""
    decay: float = limited(0.8, above=0)
    """Loss weight of a depth relative to the one before, for depth_weights: decay."""
    target_top_k: int | None = limited(None, minimum=1)
    """Number of the target's most likely tokens to which its distribution is truncated,
    renormalised where the loss renormalises; None for the whole draft vocabulary."""
    d_pace_smoothing: float = limited(0.0, minimum=0, maximum=1)
    """Smoothing a of d_pace, from 0 to 1: a + (1 - a) q_i takes the place of q_i, so that deep
    tokens count early."""

    @property
    def over_vocabulary(self) -> list[str]:
        """The weighted losses over the vocabulary, which every head has."""
        return [name for name, weight in self.loss.items() if weight > 0 and name in LOSSES]

    @property
    def needs_mass(self) -> bool:
        """Whether a loss uses the target's probabilities without renormalising them."""
        return any(self.loss.get(name, 0) > 0 for name in NEED_MASS)

    def target_logits(self, vocab_size: int, draft_vocab_size: int) -> int:
        """Number of the target's logits that are computed at a position."""
        # The mass of the draft vocabulary takes the logits of all tokens to compute.
        if self.needs_mass:
            return vocab_size
        # ce reads the true tokens only.
        if self.over_vocabulary in ([], ["ce"]):
            return 0
        return draft_vocab_size

    def check(self, head: str, extra: tuple[str, ...] = ()) -> None:
        """Refuse losses and weights that a head cannot be trained on.

        Args:
            head: name of the head, for errors.
            extra: losses of `NEED_HEAD` that the head can be trained on.

        Raises:
            ValueError: a loss that the head cannot have, or a value that is out of range.
        """
        # 1. The losses and their weights.
        known = (*LOSSES, *extra)
        valid = ", ".join(known)
        for name, weight in self.loss.items():
            if name in NEED_HEAD and name not in extra:
                raise ValueError(
                    f"{head} cannot have the loss {name!r}: it {NEED_HEAD[name]}; choose from"
                    f" {valid}"
                )
            if name not in known:
                raise ValueError(f"unknown {head} loss {name!r}; choose from {valid}")
            is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
            if not is_number or weight < 0:
                raise ValueError(
                    f"{head} loss {name!r} needs a weight of at least 0, not {weight!r}"
                )
        if not any(self.loss.values()):
            raise ValueError(f"{head} needs a loss with a weight above 0; choose from {valid}")

        # 2. The weights of depths, and the target's distribution.
        check_values(self, f"{head} ")
        if self.target_top_k is not None and self.loss.get("reverse_kl"):
            raise ValueError(
                f"{head} cannot have both target_top_k and reverse_kl, which is infinite where p"
                " is 0"
            )
