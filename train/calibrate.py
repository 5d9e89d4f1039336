"""The draft tree that is fastest for a head on this machine, from measured acceptance and measured times.

    headstart tree --target MODEL --head HEAD --prompts FILE

The target answers the prompts. How often the token at each depth is the head's i-th best gives the best static tree
of every size and depth (Medusa, arXiv:2401.10774, section 2.3.3), and the head's own candidates along the answers
give the acceptance of every dynamic tree. A tree of n nodes, of depth d and with e of them expanded, emits F tokens
in t_draft(d, e) + t_target(n) + the rest of a round: the one with the most tokens per second is taken (Sequoia,
arXiv:2402.12374, section 4.2), of either kind; both are then tried, and the better one is saved with the head.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from rich.table import Table
from torch import Tensor

from ..heads import DraftHead, TargetModules
from ..heads.checkpoints.save_load import load_head, save_tree
from ..inference import DynamicShape, SpeculativeLM, Stats, Target, TreePolicy, TreeShape, load_tokenizer, tree_word
from ..inference.drafters.base import Drafter
from ..inference.drafters.tree_drafting import drafter_of
from ..inference.tuning.tree_search import best_static_tree, expected_length, machine
from .commands import TreeConfig
from .console import console, counted, log
from .data.chat_template import Example, check_lengths, check_tokenizer, prompt_ids, read_prompts, warn_of_other_data
from .engine import as_loaded
from .evaluate import answer_settings, in_turns, summary, teacher_forced
from .expected import Costs, Shape, dynamic_lengths, measured_costs, timed_trees
from .provenance import provenance
from .stopper import train_stopper

SIZES = (2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
"""Sizes of trees that are considered if none is asked for."""
TIMED_PROMPTS = 3
"""Prompts with the longest answers, by which the parts of a round are timed."""
WIDTHS = (2, 4, 8)
"""Of dynamic trees."""


def calibrate(config: TreeConfig) -> TreePolicy:
    """Find a head's tree and save it in the head's checkpoint.

    Raises:
        ValueError: a target, head or prompt file that cannot be used.
    """
    by_file = {path: read_prompts(path, config.limit) for path in config.prompts}
    empty = [path for path, rows in by_file.items() if not rows]
    if empty:
        raise ValueError(f"{empty[0]} holds no prompts")
    if not Path(config.head).is_dir():
        raise ValueError(f"no head folder at {config.head!r}; the tree is written into it, so a Hub id will not do")
    load_head(config.head)  # a mistake is told before a model is loaded
    tokenizer = load_tokenizer(config.target)
    check_tokenizer(tokenizer, config.target)
    lm = SpeculativeLM.from_pretrained(config.target, config.head, config.dtype, compile=config.compile)
    config, target = as_loaded(config, lm), lm.target
    head = load_head(config.head, target.info, target.dtype)[0].to(target.device).eval()
    warn_of_other_data(lm.origin, tokenizer, config.thinking)
    prompts = [
        prompt_ids(tokenizer, row, config.thinking).to(target.device) for rows in by_file.values() for row in rows
    ]
    check_lengths(prompts, config.max_new_tokens, target.max_positions, ", ".join(config.prompts))
    return fastest(lm, head, prompts, config)


def fastest(lm: SpeculativeLM, head: DraftHead, prompts: list[Tensor], config: TreeConfig) -> TreePolicy:
    """Expect, try the best of each kind, and save what was faster.

    Args:
        lm: answers the prompts; how it drafts does not matter.
        head: whose tree is looked for.
        prompts: token ids, each [1, time].
        config: of the command.
    """
    target = lm.target
    answered = [lm.generate(ids, **_settings(config)).sequences for ids in counted(prompts, "answers")]
    written = [row.shape[1] - ids.shape[1] for ids, row in zip(prompts, answered, strict=True)]
    if max(written) < 2:
        raise ValueError(
            f"no answer to {', '.join(config.prompts)} is longer than one token: there is nothing to draft"
        )
    examples = [
        Example(row[0].tolist(), [i >= ids.shape[1] for i in range(row.shape[1])])
        for ids, row in zip(prompts, answered, strict=True)
    ]
    _, accuracy_KI = teacher_forced(target, head, examples)
    sizes = SIZES if config.nodes is None else (config.nodes,)
    lengths = expected_lengths(target, head, accuracy_KI, examples, sizes)
    longest = sorted(range(len(prompts)), key=lambda number: -written[number])[:TIMED_PROMPTS]
    timed = _answered(target, head, [None, *timed_trees(head)], [prompts[number] for number in longest], config)
    costs = measured_costs(target, head, timed, answered[longest[0]], sizes)
    _show(lengths, costs)
    rates = {policy: costs.rate(policy, length) for policy, length in lengths.items()}
    kinds: dict[str, type[Shape]] = {"static": TreeShape, "dynamic": DynamicShape}
    tried = {
        name: max((each for each in rates if isinstance(each, kind)), key=lambda each: rates[each])
        for name, kind in kinds.items()
    }
    if config.stopper:
        step = timed[None].round_parts
        stopping, lengths[stopping], rates[stopping] = train_stopper(target, head, prompts, _settings(config), step)
        tried["stopping"] = stopping
    stats = _answered(target, head, [None, *tried.values()], prompts, config)
    found = {name: _rate(stats[policy]) / _rate(stats[None]) for name, policy in tried.items()}
    for name, policy in tried.items():
        log.info(
            f"{_told(policy)}: acceptance length {stats[policy].acceptance_length:.2f} (expected "
            f"{lengths[policy]:.2f}), {_rate(stats[policy]):.1f} tokens/s, {found[name]:.2f} of plain decoding "
            f"(expected {rates[policy] * costs.plain:.2f})"
        )
    best = max(found, key=lambda name: found[name])
    measured = {
        "prompts": len(prompts),
        "new_tokens": config.max_new_tokens,
        "accuracy": accuracy_KI,
        "hardware": provenance()["hardware"] + (", compiled" if config.compile else ""),
        "expected_speedup": rates[tried[best]] * costs.plain,
        "speedup": found[best],
        "trees": {name: {"nodes": policy.size, **summary(stats[policy])} for name, policy in tried.items()},
    }
    save_tree(config.head, tree_word(tried[best]), measured, machine(target.device, config.compile is True))
    log.info(f"the {best} tree is saved in {config.head}")
    return tried[best]


def _show(lengths: dict[Shape, float], costs: Costs) -> None:
    """The best tree of each size."""
    table = Table("tree", "expected tokens", "target, ms", "draft, ms", "the rest, ms", "expected tokens/s", "vs plain")
    for size in sorted({policy.size for policy in lengths}):
        rates = {policy: costs.rate(policy, lengths[policy]) for policy in lengths if policy.size == size}
        policy = max(rates, key=lambda each: rates[each])
        times = (f"{1000 * seconds:.1f}" for seconds in costs.parts(policy))
        speeds = (f"{rates[policy]:.1f}", f"{rates[policy] * costs.plain:.2f}")
        table.add_row(_told(policy), f"{lengths[policy]:.2f}", *times, *speeds)
    console.print(table)


def expected_lengths(
    target: Target, head: DraftHead, accuracy_KI: list[list[float]], examples: list[Example], sizes: Sequence[int]
) -> dict[Shape, float]:
    """Tokens a round of the best static tree of every size and depth, and of every dynamic one."""
    lengths: dict[Shape, float] = {}
    for size in sizes:
        for depth in range(1, head.max_depth + 1):
            shape = best_static_tree(accuracy_KI[:depth], size)
            lengths[shape] = expected_length(shape, accuracy_KI)
    for width in {min(width, head.draft_vocab_size) for width in WIDTHS}:
        found = dynamic_lengths(target, head, width, examples, sizes)
        for (size, depth), length in found.items():
            most = 1 + width + (depth - 1) * width**2
            if depth < size:
                lengths[DynamicShape(min(size, most), depth, width)] = length
    return lengths


def _told(policy: Shape) -> str:
    word = tree_word(policy)
    return word if isinstance(word, str) else f"static, {policy.size} nodes, depth {policy.depth}"


def _settings(config: TreeConfig) -> dict[str, Any]:
    return answer_settings(config.max_new_tokens, config.temperature)


def _answered(
    target: Target,
    head: DraftHead,
    policies: Sequence[TreePolicy | None],
    prompts: list[Tensor],
    config: TreeConfig,
) -> dict[TreePolicy | None, Stats]:
    """The prompts, answered with each tree, and plainly for None."""
    engines = {
        policy: SpeculativeLM(
            target, None if policy is None else _drafter(head, policy, target.modules, config.compile)
        )
        for policy in policies
    }
    return in_turns(engines, prompts, _settings(config))


def _rate(stats: Stats) -> float:
    """Tokens per second of rounds, the prompts' reading left out."""
    return stats.acceptance_length / sum(stats.round_parts.values())


@lru_cache(maxsize=16)
def _drafter(head: DraftHead, policy: TreePolicy, ends: TargetModules, compiled: bool) -> Drafter:
    """One for each tree, so that nothing is compiled twice."""
    drafter = drafter_of(head, policy, ends)
    if compiled:
        drafter.compile()
    return drafter
