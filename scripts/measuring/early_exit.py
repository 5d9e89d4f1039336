"""Early-exit classifier of a head's chains, by `headstart tree --stopper`: whether to draft another token.

The target's answers are decoded with whole chains, and every verified draft is an example: features of the head's
distribution, and whether its best token was accepted. The classifier is a logistic regression. Its threshold is the one
that would have decoded these answers fastest at the costs of this machine.
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
from headstart.scripts.measuring.tree_costs import Costs, forward_costs

THRESHOLDS = tuple(i / 20 for i in range(20))
"""Thresholds that are tried."""


@dataclass(frozen=True)
class ChainRound:
    """A round with a whole chain: features of the head's distribution at each depth, and the drafts accepted."""

    features_KX: Tensor
    accepted: int


class Recorder(EarlyExitChain):
    """Chain that never stops, and records its rounds; for batch size 1."""

    def __init__(self, head: DraftHead, target: Target) -> None:
        super().__init__(head, EarlyExitShape(head.max_depth, 0.0), target.draft_modules)
        self.features_K = []
        self.rounds: list[ChainRound] = []

    def observe(self, step: StepResult) -> None:
        assert self.features_K is not None
        features_KX = torch.cat(self.features_K)
        self.rounds.append(ChainRound(features_KX.cpu(), int(step.lengths_B[0]) - 1))
        super().observe(step)


def fit(rounds: list[ChainRound]) -> tuple[float, ...]:
    """Fit weights for `confidence` by maximum likelihood, with a small ridge penalty for separable data."""
    examples = [(each.features_KX[: each.accepted + 1], each.accepted) for each in rounds]
    features_NX = torch.cat([features for features, _ in examples]).double()
    right_N = torch.cat([torch.arange(len(features)) < accepted for features, accepted in examples]).double()
    if right_N.min() == right_N.max():
        raise ValueError(
            f"all {len(right_N)} drafts were {'right' if right_N[0] else 'wrong'}: no classifier can be trained"
        )
    weights_X = torch.zeros(EXIT_FEATURES, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights_X], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = torch.nn.functional.binary_cross_entropy_with_logits(features_NX @ weights_X, right_N)
        value = value + 1e-4 * weights_X.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return tuple(weights_X.tolist())


def simulated(
    rounds: list[ChainRound], weights: tuple[float, ...] | None, threshold: float, costs: Costs
) -> tuple[float, float]:
    """Tokens a round and tokens per second that these rounds would have had with chains ended at a threshold."""
    tokens, seconds = 0, 0.0
    for each in rounds:
        confidence_K = confidence(each.features_KX, weights).tolist()
        drafted = next((depth for depth, value in enumerate(confidence_K) if value < threshold), len(confidence_K))
        tokens += min(each.accepted, drafted) + 1
        seconds += min(drafted + 1, len(confidence_K)) * costs.draft[1] + costs.target[drafted + 1] + costs.other
    return tokens / len(rounds), tokens / seconds


def train_stopper(
    target: Target, head: DraftHead, prompts: list[Tensor], settings: dict[str, Any], step: dict[str, float]
) -> tuple[EarlyExitShape, float, float]:
    """Decode with whole chains, fit, choose the threshold, given the seconds of a plain step's parts.

    Returns the policy with its expected tokens a round and tokens per second.
    """
    recorder = Recorder(head, target)
    lm = SpeculativeLM(target, recorder)
    outputs = [lm.generate(ids, **settings) for ids in prompts]
    stats = Stats.merged(output.stats for output in outputs)
    weights = fit(recorder.rounds)
    longest = max((output.sequences for output in outputs), key=lambda ids: ids.shape[1])
    costs = Costs(
        target=forward_costs(target, longest, range(1, head.max_depth + 2), head.feature_layers, step),
        draft=(0.0, stats.seconds["draft"] / stats.rounds / head.max_depth, 0.0),
        other=sum(seconds for part, seconds in stats.round_parts.items() if part not in ("draft", "target")),
        plain=sum(step.values()),
    )
    threshold = max(THRESHOLDS, key=lambda each: simulated(recorder.rounds, weights, each, costs)[1])
    policy = EarlyExitShape(head.max_depth, threshold, weights=tuple(round(weight, 4) for weight in weights))
    return policy, *simulated(recorder.rounds, policy.weights, threshold, costs)
