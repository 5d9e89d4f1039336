"""A stopper for a head's chains: a logistic regression that says whether the next draft is worth making.

    headstart tree --stopper --target MODEL --head HEAD --prompts FILE

The target's answers are decoded with whole chains, and every draft that was judged is an example: what the head's
distribution looked like, and whether its best token was accepted. The threshold is the one that would have written
these answers fastest at the prices of this machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headstart.heads import DraftHead
from headstart.inference import SpeculativeLM, Stats, Target
from headstart.inference.drafters.base import StepResult
from headstart.inference.drafters.early_exit import EarlyExitChain, confidence
from headstart.inference.tuning.tree_spec import EXIT_FEATURES, EarlyExitShape
from headstart.scripts.measuring.tree_costs import check_seconds

THRESHOLDS = tuple(i / 20 for i in range(20))
"""That are tried."""


@dataclass(frozen=True)
class Judged:
    """A round with a whole chain."""

    signs_KX: Tensor
    """At each depth."""
    accepted: int


class Recorder(EarlyExitChain):
    """A chain that never stops, and what became of it; one row at a time."""

    def __init__(self, head: DraftHead, target: Target) -> None:
        super().__init__(head, EarlyExitShape(head.max_depth, 0.0), target.modules)
        self.features_K = []
        self.rounds: list[Judged] = []

    def observe(self, step: StepResult) -> None:
        """As ever, and remember."""
        assert self.features_K is not None
        signs_KX = torch.cat(self.features_K)
        self.rounds.append(Judged(signs_KX.cpu(), int(step.verdict.lengths_B[0]) - 1))
        super().observe(step)


def fit(rounds: list[Judged]) -> tuple[float, ...]:
    """Weights for `confidence`, by maximum likelihood with a little ridge, which a separable set needs.

    Raises:
        ValueError: drafts that were all accepted, or none: there is nothing to tell apart.
    """
    judged = [(each.signs_KX[: each.accepted + 1], each.accepted) for each in rounds]
    signs_NX = torch.cat([signs for signs, _ in judged]).double()
    right_N = torch.cat([torch.arange(len(signs)) < accepted for signs, accepted in judged]).double()
    if right_N.min() == right_N.max():
        raise ValueError(
            f"all {len(right_N)} drafts were {'right' if right_N[0] else 'wrong'}: no stopper can be trained"
        )
    weights_X = torch.zeros(EXIT_FEATURES, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights_X], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = torch.nn.functional.binary_cross_entropy_with_logits(signs_NX @ weights_X, right_N)
        value = value + 1e-4 * weights_X.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return tuple(weights_X.tolist())


@dataclass(frozen=True)
class Prices:
    """Seconds on this machine."""

    draft: float
    """One draft."""
    check: dict[int, float]
    """A forward, by its nodes."""
    rest: float
    """The rest of a round."""


def simulated(
    rounds: list[Judged], weights: tuple[float, ...] | None, threshold: float, prices: Prices
) -> tuple[float, float]:
    """Tokens a round, and tokens a second, had these rounds' chains been stopped."""
    tokens, seconds = 0, 0.0
    for each in rounds:
        sure_K = confidence(each.signs_KX, weights).tolist()
        drafted = next((depth for depth, value in enumerate(sure_K) if value < threshold), len(sure_K))
        tokens += min(each.accepted, drafted) + 1
        seconds += min(drafted + 1, len(sure_K)) * prices.draft + prices.check[drafted + 1] + prices.rest
    return tokens / len(rounds), tokens / seconds


def train_stopper(
    target: Target, head: DraftHead, prompts: list[Tensor], settings: dict[str, Any], step: dict[str, float]
) -> tuple[EarlyExitShape, float, float]:
    """Decode with whole chains, fit, choose the threshold; the policy with its expected tokens a round and a second.

    Args:
        target: the model.
        head: what drafts.
        prompts: token ids, each [1, time].
        settings: of `generate`.
        step: the parts of a plain step.
    """
    recorder = Recorder(head, target)
    lm = SpeculativeLM(target, recorder)
    outputs = [lm.generate(ids, **settings) for ids in prompts]
    stats = Stats.merged(output.stats for output in outputs)
    weights = fit(recorder.rounds)
    longest = max((output.sequences for output in outputs), key=lambda ids: ids.shape[1])
    prices = Prices(
        stats.seconds["draft"] / stats.rounds / head.max_depth,
        check_seconds(target, longest, range(1, head.max_depth + 2), head.feature_layers, step),
        sum(seconds for part, seconds in stats.round_parts.items() if part not in ("draft", "target")),
    )
    threshold = max(THRESHOLDS, key=lambda each: simulated(recorder.rounds, weights, each, prices)[1])
    policy = EarlyExitShape(head.max_depth, threshold, weights=tuple(round(weight, 4) for weight in weights))
    return policy, *simulated(recorder.rounds, policy.weights, threshold, prices)
