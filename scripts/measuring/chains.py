"""Gain of chains of each length: by the formulas, and measured.

    headstart tree --explain --target MODEL --head HEAD --prompts FILE
    headstart tree --explain --target MODEL --drafter model:SMALLER --prompts FILE

Acceptance rates are those of the longest chain, costs those of this machine: `time_factor` and `operations_factor`
(Leviathan et al., arXiv:2211.17192) with the measured cost of verifying n tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from torch import Tensor, nn

from headstart.heads import DraftHead
from headstart.inference import SpeculativeLM, Target
from headstart.inference.drafters.base import Drafter
from headstart.inference.drafters.draft_model import AssistantModel
from headstart.inference.drafters.head_drafter import DraftModel
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
    """Speedup over plain decoding (arXiv:2211.17192, theorem 3.8, with measured verification).

    Args:
        rates: see `chain_length`.
        gamma: draft length.
        draft_cost: time of one draft step in plain steps (the paper's c).
        check_cost: time of a target forward by its tokens, in plain steps; 1 in the paper.
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
    target: Target,
    chain_of: Callable[[int], Drafter],
    depth: int,
    prompts: list[Tensor],
    settings: dict[str, Any],
    draft_operations: float | None = None,
) -> list[Explained]:
    """Answer the prompts plainly and with a chain of every length; print the expected and the measured gain."""
    lengths = range(1, min(depth, LONGEST) + 1)
    engines = {0: SpeculativeLM(target)} | {gamma: SpeculativeLM(target, chain_of(gamma)) for gamma in lengths}
    answered = in_turns(engines, prompts, settings)
    plain, shortest, deepest = (answered[gamma].round_parts for gamma in (0, 1, max(lengths)))
    rates = [0.0 if rate != rate else rate for rate in answered[max(lengths)].acceptance_rate_by_depth]
    step = sum(plain.values())
    # The cost of a draft is the slope over their number, without the constant part of a round.
    more = max(0.0, deepest["draft"] - shortest["draft"])
    draft = more / (max(lengths) - 1) if max(lengths) > 1 else shortest["draft"]
    sides = sum(shortest.values()) - shortest["target"] - draft
    text_1T = SpeculativeLM(target).generate(prompts[0], **settings).sequences
    sizes = [gamma + 1 for gamma in lengths]
    draft_cost = draft / step
    forwards = forward_costs(target, text_1T, sizes, chain_of(1).feature_layers, plain)

    def check_cost(nodes: int) -> float:
        return 1.0 if nodes == 1 else (forwards[nodes] + sides) / step

    found = [
        Explained(
            gamma,
            chain_length(rates, gamma),
            answered[gamma].acceptance_length,
            time_factor(rates, gamma, draft_cost, check_cost),
            step * answered[gamma].acceptance_length / sum(answered[gamma].round_parts.values()),
            None if draft_operations is None else operations_factor(rates, gamma, draft_operations),
        )
        for gamma in lengths
    ]
    _print(found, rates, draft_cost, best_draft_length(rates, draft_cost, check_cost, max(lengths)))
    return found


def _print(found: list[Explained], rates: list[float], draft_cost: float, best: int) -> None:
    table = Table("drafts", "expected tokens", "measured", "expected vs plain", "measured", "operations vs plain")
    for row in found:
        figures = (row.expected_tokens, row.tokens, row.expected_factor, row.factor, row.operations)
        table.add_row(str(row.gamma), *map(number, figures))
    console.print(table)
    by_depth = " ".join(f"{rate:.2f}" for rate in rates)
    log.info(f"acceptance rate by depth {by_depth}; a draft costs {draft_cost:.3f} plain steps; best: {best} drafts")
