"""Find a head's draft tree: `headstart tree --target MODEL --head FOLDER --prompts FILE.jsonl`.

The target answers the prompts. How often the token at each depth is the head's i-th best gives the
best static tree of every size and depth (Medusa, arXiv:2401.10774, section 2.3.3), and the head's
own candidates along the answers give the acceptance of every dynamic tree. With the measured costs
of a round, the tree of each kind with the most expected tokens per second is tried; the faster one
is saved with the head and used wherever the tree is `auto`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headstart.console import console, counted, log
from headstart.options import limited
from headstart.scripts.command_line import DecodingOptions, PromptFiles, options

if TYPE_CHECKING:
    from torch import Tensor

    from headstart.heads import DraftHead
    from headstart.inference import SpeculativeLM, Stats, Target, TreePolicy
    from headstart.inference.drafters.acceptance import Answered
    from headstart.inference.tuning.round_costs import RoundCosts

SIZES = (2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
"""Sizes of trees that are considered if none is given."""
WIDTHS = (2, 4, 8)
"""Widths of dynamic trees that are considered."""
TIMED_PROMPTS = 3
"""Prompts with the longest answers, on which the parts of a round are timed."""


@dataclass(frozen=True)
class TreeConfig(PromptFiles, DecodingOptions):
    """The draft tree that is fastest for a head on this machine."""

    required = ("target", "head", "prompts")
    most_used = ("target", "head", "prompts", "nodes", "max_new_tokens")

    head: str = ""
    """The head's checkpoint folder; the tree is written into it."""
    max_new_tokens: int = limited(64, minimum=2)
    """Tokens of each answer."""
    nodes: int | None = limited(None, minimum=2)
    """Size of the tree, the root counted; null for the one that is fastest here."""


def main(arguments: list[str]) -> None:
    """Run `headstart tree` with these command-line arguments."""
    calibrate(options(TreeConfig, "tree", __doc__, arguments, first="head"))


def calibrate(config: TreeConfig) -> TreePolicy:
    """Find a head's fastest tree and save it in the head's checkpoint."""
    from headstart.heads.checkpoints.save_load import load_head
    from headstart.scripts.measuring.comparison import load_with_prompts, read_prompt_files

    messages = read_prompt_files(config.prompts, config.limit)
    if not Path(config.head).is_dir():
        raise ValueError(
            f"no head folder at {config.head!r}; the tree is written into it, so a Hub id will"
            " not do"
        )
    # Loaded twice: first for its errors, before the model, then for the model and its dtype.
    load_head(config.head)
    lm, _, encoded = load_with_prompts(config, messages)
    prompts = list(itertools.chain(*encoded.values()))
    head, _ = load_head(config.head, lm.target.info, lm.target.dtype)
    return fastest(lm, head.to(lm.target.device).eval(), prompts, config.as_loaded(lm))


def fastest(
    lm: SpeculativeLM, head: DraftHead, prompts: list[Tensor], config: TreeConfig
) -> TreePolicy:
    """Predict the speed of the head's trees, try the best of each kind, and save the fastest one.

    `lm` answers the prompts, token ids [1, time]; how it drafts does not matter.
    """
    from headstart.heads.checkpoints.save_load import save_tree
    from headstart.inference import DynamicShape, TreeShape, spec_of
    from headstart.inference.drafters.acceptance import accuracy_by_rank
    from headstart.inference.drafters.costs import costs_of_rounds, timed_trees
    from headstart.inference.targets.provenance import hardware
    from headstart.inference.trees.stats import acceptance_figures
    from headstart.inference.tuning.machine import machine_key
    from headstart.inference.tuning.tree_search import by_speed
    from headstart.scripts.measuring.comparison import answer_settings, answered

    target = lm.target
    answers = answered(lm, prompts, answer_settings(config.max_new_tokens, config.temperature))
    if max(answer.new_tokens for answer in answers) < 2:
        files = ", ".join(config.prompts)
        raise ValueError(
            f"no answer to {files} is longer than one token: there is nothing to draft"
        )

    # 1. What would each tree accept?
    accuracy_KI = accuracy_by_rank(target, head, counted(answers, "accuracy, by answers"))
    sizes = SIZES if config.nodes is None else (config.nodes,)
    lengths = expected_lengths(target, head, accuracy_KI, answers, sizes)

    # 2. What would its rounds cost? A few trees are timed on the prompts with the longest answers,
    # and the costs of the others follow from them.
    by_length = sorted(range(len(answers)), key=lambda number: -answers[number].new_tokens)
    longest = by_length[:TIMED_PROMPTS]
    timed_prompts = [prompts[number] for number in longest]
    timed = decode_with(target, head, [None, *timed_trees(head)], timed_prompts, config)
    costs = costs_of_rounds(target, head, timed, answers[longest[0]].tokens_T[None], sizes)
    ordered = by_speed(lengths, costs)
    _print_best_trees(ordered, lengths, costs)

    # 3. Try the tree of each kind that should be fastest.
    tried: dict[str, TreePolicy] = {
        "static": next(tree for tree in ordered if isinstance(tree, TreeShape)),
        "dynamic": next(tree for tree in ordered if isinstance(tree, DynamicShape)),
    }
    stats = decode_with(target, head, [None, *tried.values()], prompts, config)
    plain_speed = _tokens_per_second(stats[None])
    speedups = {name: _tokens_per_second(stats[tree]) / plain_speed for name, tree in tried.items()}
    expected = {name: costs.rate(tree, lengths[tree]) * costs.plain for name, tree in tried.items()}
    for name, tree in tried.items():
        log.info(
            f"{_described(tree)}: acceptance length {stats[tree].acceptance_length:.2f} "
            f"(expected {lengths[tree]:.2f}), {_tokens_per_second(stats[tree]):.1f} tokens/s, "
            f"{speedups[name]:.2f} times plain decoding (expected {expected[name]:.2f})"
        )

    # 4. Save the faster one with the head.
    best = max(speedups, key=lambda name: speedups[name])
    measured = {
        "prompts": len(prompts),
        "new_tokens": config.max_new_tokens,
        "accuracy": accuracy_KI,
        "hardware": hardware() + (", compiled" if config.compile else ""),
        "expected_speedup": expected[best],
        "speedup": speedups[best],
        "trees": {
            name: {"nodes": tree.size, **acceptance_figures(stats[tree])}
            for name, tree in tried.items()
        },
    }
    save_tree(
        config.head,
        spec_of(tried[best]),
        measured,
        machine_key(target.device, config.compile is True),
    )
    log.info(f"the {best} tree is saved in {config.head}")
    return tried[best]


def expected_lengths(
    target: Target,
    head: DraftHead,
    accuracy_KI: list[list[float]],
    answers: list[Answered],
    sizes: Sequence[int],
) -> dict[TreePolicy, float]:
    """Return the acceptance lengths of the best static trees and of all dynamic trees.

    There is one static tree for every size and depth, the best one.
    """
    from headstart.inference import DynamicShape
    from headstart.inference.drafters.acceptance import dynamic_lengths
    from headstart.inference.tuning.tree_search import best_static_tree, expected_length

    lengths: dict[TreePolicy, float] = {}
    for size in sizes:
        for depth in range(1, head.max_depth + 1):
            shape = best_static_tree(accuracy_KI[:depth], size)
            lengths[shape] = expected_length(shape, accuracy_KI)
    for width in sorted({min(width, head.draft_vocab_size) for width in WIDTHS}):
        progress = counted(answers, f"trees of width {width}, by answers")
        for (size, depth), length in dynamic_lengths(target, head, width, progress, sizes).items():
            # Nodes that such a tree can have: the root, `width` children of it, and at each depth
            # after that `width` children of `width` nodes. Width 2, depth 3: 1 + 2 + 4 + 4 = 11.
            most = 1 + width + (depth - 1) * width**2
            # A path to the depth alone has depth + 1 nodes.
            if depth < size:
                lengths[DynamicShape(min(size, most), depth, width)] = length
    return lengths


def _tokens_per_second(stats: Stats) -> float:
    """Return the tokens per second of rounds, the prefill left out."""
    return stats.acceptance_length / sum(stats.round_parts.values())


def _print_best_trees(
    ordered: list[TreePolicy], lengths: Mapping[TreePolicy, float], costs: RoundCosts
) -> None:
    """Print the best tree of each size; `ordered` are all trees, the fastest first."""
    from rich.table import Table

    table = Table(
        "tree", "expected tokens", "round, ms", "of it target", "expected tokens/s", "vs plain"
    )
    for size in sorted({tree.size for tree in ordered}):
        tree = next(tree for tree in ordered if tree.size == size)
        # Expected tokens per second, and so the seconds of a round: tokens / rate.
        rate = costs.rate(tree, lengths[tree])
        table.add_row(
            _described(tree),
            f"{lengths[tree]:.2f}",
            f"{1000 * lengths[tree] / rate:.1f}",
            f"{1000 * costs.forward_seconds(size):.1f}",
            f"{rate:.1f}",
            f"{rate * costs.plain:.2f}",
        )
    console.print(table)


def _described(tree: TreePolicy) -> str:
    from headstart.inference import spec_of

    spec = spec_of(tree)
    return spec if isinstance(spec, str) else f"static, {tree.size} nodes, depth {tree.depth}"


def decode_with(
    target: Target,
    head: DraftHead,
    trees: Sequence[TreePolicy | None],
    prompts: list[Tensor],
    config: TreeConfig,
) -> dict[TreePolicy | None, Stats]:
    """Answer the prompts with each tree, and, for None, without drafts; return the statistics."""
    from headstart.inference import SpeculativeLM
    from headstart.inference.drafters.by_name import tree_drafter
    from headstart.scripts.measuring.comparison import answer_settings, in_turns

    engines: dict[TreePolicy | None, SpeculativeLM] = {}
    for tree in trees:
        drafter = None if tree is None else tree_drafter(head, tree, target.draft_modules)
        engines[tree] = SpeculativeLM(target, drafter)
    return in_turns(engines, prompts, answer_settings(config.max_new_tokens, config.temperature))
