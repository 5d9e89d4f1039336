"""Gain of chains of each length, by the formulas and measured: `headstart tree --explain`.

Acceptance rates are those of the longest chain, costs those of this machine: `time_factor` and `operations_factor`
(Leviathan et al., arXiv:2211.17192) with the measured cost of verifying n tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from torch import Tensor, nn

from headstart.heads import DraftHead
from headstart.inference import SpeculativeLM, Target
from headstart.inference.drafters.base import Drafter
from headstart.inference.drafters.draft_model import AssistantModel
from headstart.inference.drafters.tree_policies import DraftModel
from headstart.inference.tuning.tree_search import chain_length
from headstart.scripts.measuring.comparison import in_turns
from headstart.scripts.measuring.tree_costs import forward_costs
from headstart.train.console import console, log, number

LONGEST = 8
"""Longest chain that is measured."""


@dataclass(frozen=True)
class Explained:
    """Expected and measured gain of a chain."""

    gamma: int
    expected_tokens: float
    tokens: float
    expected_factor: float
    """Speedup over plain decoding."""
    factor: float
    operations: float | None
    """Ratio to those of plain decoding; None if those of a draft are not known."""


def operations_of(draft: DraftModel, target: Target) -> float | None:
    """Operations of a draft over those of a plain step: weights of linear layers, each used once for a token."""

    def linear(*modules: nn.Module) -> int:
        maps = {id(part): part for module in modules for part in module.modules() if isinstance(part, nn.Linear)}
        return sum(part.weight.numel() for part in maps.values())

    if isinstance(draft, AssistantModel):
        return linear(draft.model.model) / linear(target.model)
    if not isinstance(draft, DraftHead):
        return None
    shared = () if hasattr(draft, "lm_head") else (target.modules.lm_head,)
    return linear(draft, *shared) / linear(target.model)


def time_factor(
    rates: Sequence[float], gamma: int, draft_cost: float, check_cost: Callable[[int], float] = lambda nodes: 1.0
) -> float:
    """Speedup of draft length `gamma` over plain decoding (arXiv:2211.17192, theorem 3.8, with measured verification).

    Costs are in plain steps: of a draft step (the paper's c), and of a target forward by its tokens (1 in the paper).
    """
    return chain_length(rates, gamma) / (gamma * draft_cost + check_cost(gamma + 1))


def operations_factor(rates: Sequence[float], gamma: int, draft_operations: float) -> float:
    """Operations per token, relative to plain decoding (arXiv:2211.17192, theorem 3.11)."""
    return (gamma * draft_operations + gamma + 1) / chain_length(rates, gamma)


def best_draft_length(
    rates: Sequence[float], draft_cost: float, check_cost: Callable[[int], float] = lambda nodes: 1.0, most: int = 32
) -> int:
    """Draft length with the largest `time_factor`; 0 where drafts gain nothing."""
    return max(range(most + 1), key=lambda gamma: time_factor(rates, gamma, draft_cost, check_cost))


def explain(
    target: Target, draft: DraftModel, chains: Mapping[int, Drafter], prompts: list[Tensor], settings: dict[str, Any]
) -> list[Explained]:
    """Answer the prompts plainly and with each of the chains, by length; print the expected and the measured gain."""
    longest = max(chains)
    engines = {0: SpeculativeLM(target)} | {gamma: SpeculativeLM(target, chain) for gamma, chain in chains.items()}
    answered = in_turns(engines, prompts, settings)
    plain, shortest, deepest = (answered[gamma].round_parts for gamma in (0, 1, longest))
    rates = [0.0 if rate != rate else rate for rate in answered[longest].acceptance_rate_by_depth]
    step = sum(plain.values())
    # The cost of a draft is the slope over their number, without the constant part of a round.
    more = max(0.0, deepest["draft"] - shortest["draft"])
    seconds = more / (longest - 1) if longest > 1 else shortest["draft"]
    sides = sum(shortest.values()) - shortest["target"] - seconds
    text_1T = engines[0].generate(prompts[0], **settings).sequences
    draft_cost, operations = seconds / step, operations_of(draft, target)
    forwards = forward_costs(target, text_1T, [gamma + 1 for gamma in chains], chains[1].feature_layers, plain)
    checks = {1: 1.0} | {nodes: (forward + sides) / step for nodes, forward in forwards.items()}
    found = [
        Explained(
            gamma,
            chain_length(rates, gamma),
            answered[gamma].acceptance_length,
            time_factor(rates, gamma, draft_cost, checks.__getitem__),
            step * answered[gamma].acceptance_length / sum(answered[gamma].round_parts.values()),
            None if operations is None else operations_factor(rates, gamma, operations),
        )
        for gamma in chains
    ]
    table = Table("drafts", "expected tokens", "measured", "expected vs plain", "measured", "operations vs plain")
    for row in found:
        figures = (row.expected_tokens, row.tokens, row.expected_factor, row.factor, row.operations)
        table.add_row(str(row.gamma), *map(number, figures))
    console.print(table)
    by_depth = " ".join(f"{rate:.2f}" for rate in rates)
    best = best_draft_length(rates, draft_cost, checks.__getitem__, longest)
    log.info(f"acceptance rate by depth {by_depth}; a draft costs {draft_cost:.3f} plain steps; best: {best} drafts")
    return found
