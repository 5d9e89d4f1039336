"""Find a head's draft tree: `headstart tree --target MODEL --head FOLDER --prompts FILE.jsonl`.

The target answers the prompts. How often the token at each depth is the head's i-th best gives the best static tree
of every size and depth (Medusa, arXiv:2401.10774, section 2.3.3), and the head's own candidates along the answers
give the acceptance of every dynamic tree. A tree of n nodes and depth d, e of them expanded, emits F tokens in
t_draft(d, e) + t_target(n) + the rest of a round (Sequoia, arXiv:2402.12374, section 4.2). The tree of each kind with
the most tokens per second is tried; the faster one is saved with the head and used wherever the tree is `auto`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from headstart.console import console, log
from headstart.scripts.command_line import DecodingOptions, options

if TYPE_CHECKING:
    from torch import Tensor

    from headstart.heads import DraftHead, TargetModules
    from headstart.inference import SpeculativeLM, Stats, Target, TreePolicy
    from headstart.inference.drafters.base import Drafter
    from headstart.inference.drafters.tree_policies import DraftModel
    from headstart.scripts.measuring.tree_costs import Costs, Shape

SIZES = (2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
"""Sizes of trees that are considered if none is given."""
TIMED_PROMPTS = 3
"""Prompts with the longest answers, on which the parts of a round are timed."""


@dataclass(frozen=True)
class TreeConfig(DecodingOptions):
    """The draft tree that is fastest for a head on this machine."""

    required = ("target", "head", "prompts")
    minimum: ClassVar[dict[str, float]] = {"limit": 1, "max_new_tokens": 2, "nodes": 2, "temperature": 0}

    head: str = ""
    """The head's checkpoint folder; the tree is written into it."""
    prompts: list[str] = field(default_factory=list)
    """JSONL files of prompts on whose answers acceptance is measured."""
    limit: int | None = None
    """Use only the first prompts of each file; null for all."""
    max_new_tokens: int = 64
    """Tokens of each answer."""
    nodes: int | None = None
    """Size of the tree, the root counted; null for the one that is fastest here."""


def main(arguments: list[str]) -> None:
    """Parse, then find the tree."""
    calibrate(options(TreeConfig, "tree", __doc__, arguments))


def calibrate(config: TreeConfig) -> TreePolicy:
    """Find a head's fastest tree and save it in the head's checkpoint."""
    from headstart.heads.checkpoints.save_load import load_head
    from headstart.scripts.measuring.comparison import load_with_prompts, read_prompt_files

    messages = read_prompt_files(config.prompts, config.limit)
    if not Path(config.head).is_dir():
        raise ValueError(f"no head folder at {config.head!r}; the tree is written into it, so a Hub id will not do")
    load_head(config.head)  # mistakes are reported before a model is loaded
    lm, encoded = load_with_prompts(config, messages)
    prompts = list(itertools.chain(*encoded.values()))
    head = load_head(config.head, lm.target.info, lm.target.dtype)[0].to(lm.target.device).eval()
    return fastest(lm, head, prompts, config.as_loaded(lm))


def fastest(lm: SpeculativeLM, head: DraftHead, prompts: list[Tensor], config: TreeConfig) -> TreePolicy:
    """Predict the speed of the head's trees, try the best of each kind, and save the fastest one.

    `lm` answers the prompts, token ids [1, time]; how it drafts does not matter.
    """
    from headstart.heads.checkpoints.save_load import save_tree
    from headstart.inference import DynamicShape, TreeShape, spec_of
    from headstart.inference.tuning.machine import machine_key
    from headstart.scripts.measuring import tree_costs
    from headstart.scripts.measuring.comparison import answer_settings, answered
    from headstart.train.evaluate import summary, teacher_forced
    from headstart.train.run_folder import provenance

    target, settings = lm.target, answer_settings(config.max_new_tokens, config.temperature)
    sequences, examples = answered(lm, prompts, settings)
    new_tokens = [row.shape[1] - ids.shape[1] for ids, row in zip(prompts, sequences, strict=True)]
    if max(new_tokens) < 2:
        files = ", ".join(config.prompts)
        raise ValueError(f"no answer to {files} is longer than one token: there is nothing to draft")
    _, accuracy_KI = teacher_forced(target, head, examples)
    sizes = SIZES if config.nodes is None else (config.nodes,)
    lengths = tree_costs.expected_lengths(target, head, accuracy_KI, examples, sizes)
    longest = sorted(range(len(prompts)), key=lambda number: -new_tokens[number])[:TIMED_PROMPTS]
    trees = [None, *tree_costs.timed_trees(head)]
    timed = _decode_with(target, head, trees, [prompts[number] for number in longest], config)
    costs = tree_costs.measured_costs(target, head, timed, sequences[longest[0]], sizes)
    _print_best_trees(lengths, costs)
    rates = {policy: costs.rate(policy, length) for policy, length in lengths.items()}
    kinds: dict[str, type[Shape]] = {"static": TreeShape, "dynamic": DynamicShape}
    tried = {
        name: max((each for each in rates if isinstance(each, kind)), key=lambda each: rates[each])
        for name, kind in kinds.items()
    }
    stats = _decode_with(target, head, [None, *tried.values()], prompts, config)
    speeds = {
        policy: each.acceptance_length / sum(each.round_parts.values())  # tokens per second, without the prefill
        for policy, each in stats.items()
    }
    found = {name: speeds[policy] / speeds[None] for name, policy in tried.items()}
    for name, policy in tried.items():
        log.info(
            f"{_described(policy)}: acceptance length {stats[policy].acceptance_length:.2f} (expected "
            f"{lengths[policy]:.2f}), {speeds[policy]:.1f} tokens/s, {found[name]:.2f} times plain decoding "
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
    save_tree(config.head, spec_of(tried[best]), measured, machine_key(target.device, config.compile is True))
    log.info(f"the {best} tree is saved in {config.head}")
    return tried[best]


def _print_best_trees(lengths: dict[Shape, float], costs: Costs) -> None:
    """Print the best tree of each size."""
    from rich.table import Table

    table = Table("tree", "expected tokens", "target, ms", "draft, ms", "the rest, ms", "expected tokens/s", "vs plain")
    for size in sorted({policy.size for policy in lengths}):
        rates = {policy: costs.rate(policy, lengths[policy]) for policy in lengths if policy.size == size}
        policy = max(rates, key=lambda each: rates[each])
        times = (f"{1000 * seconds:.1f}" for seconds in costs.parts(policy))
        speeds = (f"{rates[policy]:.1f}", f"{rates[policy] * costs.plain:.2f}")
        table.add_row(_described(policy), f"{lengths[policy]:.2f}", *times, *speeds)
    console.print(table)


def _described(policy: Shape) -> str:
    from headstart.inference import spec_of

    name = spec_of(policy)
    return name if isinstance(name, str) else f"static, {policy.size} nodes, depth {policy.depth}"


def _decode_with(
    target: Target, head: DraftHead, policies: Sequence[TreePolicy | None], prompts: list[Tensor], config: TreeConfig
) -> dict[TreePolicy | None, Stats]:
    """Statistics of answering the prompts with each tree, and, for None, plainly."""
    from headstart.inference import SpeculativeLM
    from headstart.scripts.measuring.comparison import answer_settings, in_turns

    compiled = config.compile is True
    engines = {
        policy: SpeculativeLM(target, None if policy is None else _drafter(head, policy, target.modules, compiled))
        for policy in policies
    }
    return in_turns(engines, prompts, answer_settings(config.max_new_tokens, config.temperature))


@lru_cache(maxsize=16)
def _drafter(head: DraftModel, policy: TreePolicy, modules: TargetModules, compiled: bool) -> Drafter:
    """Build the drafter of a tree, once for each, so that nothing is compiled twice."""
    from headstart.inference.drafters.by_name import tree_drafter

    drafter = tree_drafter(head, policy, modules)
    if compiled:
        drafter.compile()
    return drafter
