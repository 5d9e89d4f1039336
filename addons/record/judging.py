"""Judgement of a head that has learned, along answers that neither it nor the old head has seen.

Both draft by replay: in a chain of their depth and in the trees that decoding chooses from. The new
head is taken only if

- its acceptance length in the chain is longer along 16 answers or more, with a 95 % confidence
  interval of the difference that excludes 0,
- its predicted speed is higher, where the costs of rounds are known: the most tokens per second
  with any of the judged trees,
- it is nowhere worse, significantly or by more than 5 %: over all answers, those of a kind or those
  of older data that are replayed, in the chain or in the largest tree.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...console import table_cell
from ...heads.base import DraftHead
from ...heads.checkpoints.save_load import load_head
from ...inference.drafters.by_name import chains_alone
from ...inference.drafters.candidate_trees import candidate_chains, candidate_trees
from ...inference.drafters.costs import head_shape
from ...inference.engines.target import Target
from ...inference.feature_cache import FeatureCache
from ...inference.outer_modules import OuterTarget
from ...inference.speculative_lm import SpeculativeLM
from ...inference.targets.dtypes import dtype_named
from ...inference.targets.loading import default_device, locate
from ...inference.trees.stats import Stats
from ...inference.trees.tree_spec import DynamicShape, TreePolicy, TreeShape
from ...inference.tuning.machine import hardware
from ...inference.tuning.round_costs import RoundCosts
from ...inference.tuning.tree_search import default_dynamic_tree
from ...train.config import EvalConfig
from ...train.data.chat_template import Example
from ...train.evaluate import (
    NODES_AT_ONCE,
    difference_interval,
    greedy_answers,
    prompt_of,
)
from ...train.features.stored import FolderStates, StoredReplay
from .config import AdaptConfig
from .folder import machine_costs, recorded_costs

FEWEST_JUDGED = 16
"""Answers from which a head is judged: of equally good heads 2 to 3 % then seem longer."""
FEWEST_OF_KIND = 8
"""Answers of a kind from which it is judged by itself; the interval of fewer is a guess."""
MARGIN = 0.05
"""Share by which acceptance may fall without being shown to: of 8 answers, whose interval shows a
fall of 9 % in 5 cases of 100, the mean tells it in 85, and of no fall in 14. An interval that ends
above -5 % would have 73 of 100 heads without a fall refused."""
NODES = 16
"""Nodes of the dynamic tree that is judged where decoding chooses from none."""
OLDER = "(replayed)"
"""Name of the kind of all answers that are replayed from older data."""
Lengths = Mapping[TreePolicy, Stats]
"""Statistics of drafts along the same answers, by tree."""


@dataclass(frozen=True)
class KnownCosts:
    """Costs of rounds with each head."""

    old: RoundCosts
    new: RoundCosts
    origin: str
    """Where they come from, for the report."""


@dataclass(frozen=True)
class Comparison:
    """Two heads along the same answers."""

    kind: str
    """Kind of the prompts."""
    old: Lengths
    new: Lengths

    @classmethod
    def merged(
        cls, kind: str, parts: Collection[Comparison], trees: Sequence[TreePolicy]
    ) -> Comparison:
        """Join several comparisons in these trees."""
        old = {tree: Stats.merged(part.old[tree] for part in parts) for tree in trees}
        new = {tree: Stats.merged(part.new[tree] for part in parts) for tree in trees}
        return cls(kind, old, new)

    @property
    def answers(self) -> int:
        """Answers along which the heads drafted."""
        return len(next(iter(self.new.values())).rows)

    def interval(self, tree: TreePolicy, confidence: float = 0.95) -> tuple[float, float]:
        """Confidence interval of the difference in acceptance length, new less old.

        Answers are paired by prompt.
        """
        new = self.new[tree].tokens_and_rounds
        old = self.old[tree].tokens_and_rounds
        return difference_interval(new, old, confidence)

    def better(self, tree: TreePolicy) -> bool:
        """Whether the new head accepts significantly more."""
        return self.answers >= FEWEST_JUDGED and self.interval(tree)[0] > 0

    def worse(self, tree: TreePolicy, confidence: float) -> bool:
        """Whether the new head accepts less, significantly or by more than the margin."""
        new = self.new[tree].acceptance_length
        old = self.old[tree].acceptance_length
        return self.interval(tree, confidence)[1] < 0 or new < (1 - MARGIN) * old

    def speeds(self, costs: KnownCosts) -> tuple[float, float]:
        """Predicted tokens per second of both heads, over that of plain decoding."""
        return predicted_speed(self.old, costs.old), predicted_speed(self.new, costs.new)


@dataclass(frozen=True)
class Judgement:
    """Whether the new head is taken, and all that decides it."""

    whole: Comparison
    """Over all recorded answers."""
    kinds: Sequence[Comparison]
    """By kind, and over the answers of older data that are replayed."""
    chain: TreePolicy
    tree: TreePolicy | None
    """The largest tree; None for a target that checks chains alone."""
    costs: KnownCosts | None
    """None if they are not known: then acceptance alone decides."""
    new_tokens: int = 0
    """Tokens of the draft vocabulary that the old head could not draft."""

    @property
    def trees(self) -> list[TreePolicy]:
        """The trees whose acceptance lengths are compared."""
        return [self.chain] if self.tree is None else [self.chain, self.tree]

    @property
    def longer(self) -> bool:
        """Whether the new head accepts significantly more in the chain."""
        return self.whole.better(self.chain)

    @property
    def faster(self) -> bool:
        """Whether the new head's predicted speed is higher; True if no costs are known."""
        if self.costs is None:
            return True
        old, new = self.whole.speeds(self.costs)
        return new > old

    @property
    def worse(self) -> list[Comparison]:
        """Where the new head accepts less, in the chain or in the tree.

        The intervals are wide enough that all of them hold together in 95 of 100 judgements
        (Bonferroni): otherwise one of ten kinds would look worse by chance in every fourth.
        """
        comparisons = (self.whole, *self.kinds)
        judged = [comparison for comparison in comparisons if comparison.answers >= FEWEST_OF_KIND]
        # Four comparisons in two trees are eight intervals, of 1 - 0.05 / 8 = 99.4 % each.
        confidence = 1 - 0.05 / max(len(judged) * len(self.trees), 1)
        worse = []
        for comparison in judged:
            if any(comparison.worse(tree, confidence) for tree in self.trees):
                worse.append(comparison)
        return worse

    @property
    def taken(self) -> bool:
        """Whether the new head takes the place of the old one."""
        return self.longer and self.faster and not self.worse


def judge(
    config: AdaptConfig, manifest: dict[str, Any], rows: Sequence[dict[str, Any]], new: Path
) -> Judgement:
    """Let the head of a config and a new one draft along recorded answers.

    Args:
        config: names target, old head, and the folder with the recorded states.
        manifest: of the recorded states.
        rows: the answers that are judged on.
        new: the new head's checkpoint.

    Raises:
        ValueError: none of the answers is long enough.
    """
    # 1. Load both heads, and no blocks of the target: all states are recorded.
    recorded = Path(config.output) / "recorded"
    target = outer_modules_of(config, manifest)
    old_head = _loaded(config.head, target)
    new_head = _loaded(new, target)
    costs = known_costs(recorded, target, old_head, new_head)

    # 2. Choose the answers that are long enough to draft along, by kind. Of answers to the same
    # prompt one counts, since prompts are what the statistics are paired by.
    by_prompt = {tuple(Example.of_row(row).prompt): row for row in rows}
    examples = [Example.of_row(row) for row in by_prompt.values()]
    source = FolderStates(FeatureCache(recorded / "states", manifest), target.max_positions)
    wanted = EvalConfig(prompts=len(examples), max_new_tokens=config.max_new_tokens)
    kinds: dict[str, list[Example]] = {}
    for example in StoredReplay(target, source, examples).usable(examples, wanted):
        row = by_prompt[tuple(example.prompt)]
        kind = OLDER if row.get("replayed") else row["kind"]
        kinds.setdefault(kind, []).append(example)

    # 3. Let both heads draft along them.
    trees = judged_trees(target, old_head, None if costs is None else costs.old)
    comparisons = []
    for kind, examples_of_kind in kinds.items():
        heads = [old_head, new_head]
        old_lengths, new_lengths = _lengths(
            target, source, heads, trees, examples_of_kind, config.max_new_tokens
        )
        comparisons.append(Comparison(kind, old_lengths, new_lengths))

    # 4. Join the kinds. Replayed answers are not what the head was adapted to.
    recorded_kinds = [comparison for comparison in comparisons if comparison.kind != OLDER]
    whole = Comparison.merged("all", recorded_kinds, trees)
    chain = trees[0]
    dynamic = [tree for tree in trees if isinstance(tree, DynamicShape)]
    largest = max(dynamic, key=lambda tree: tree.size, default=None)
    exchanged = len(set(new_head.vocabulary().tolist()) - set(old_head.vocabulary().tolist()))
    return Judgement(whole, comparisons, chain, largest, costs, exchanged)


def outer_modules_of(config: AdaptConfig, manifest: dict[str, Any]) -> Target:
    """Load the target without its blocks; a GGUF file whole: its tensors cannot be read alone."""
    _, gguf = locate(config.target)
    loading = OuterTarget if gguf is None else Target
    dtype = dtype_named(manifest["dtype"])
    return loading.load(config.target, dtype, default_device(), manifest["revision"])


def judged_trees(target: Target, head: DraftHead, costs: RoundCosts | None) -> list[TreePolicy]:
    """List a chain as deep as the head, then the trees that decoding chooses from.

    One tree with branches is among them even if none pays here, or if no costs are known.
    """
    chain = TreeShape.chain(head.max_depth)
    others: list[TreePolicy] = []
    if chains_alone(target):
        others = [] if costs is None else candidate_chains(head, costs)
    else:
        others = [] if costs is None else candidate_trees(head, None, costs)
        if not any(isinstance(tree, DynamicShape) for tree in others):
            others.append(default_dynamic_tree(head.max_depth, NODES))
    return [chain, *(tree for tree in others if tree != chain)]


def known_costs(
    recorded: Path, target: Target, old: DraftHead, new: DraftHead
) -> KnownCosts | None:
    """Find the costs of rounds with two heads, on the machine that recorded, else on this one.

    A head of another shape than the old one, whose costs are known, is taken to draft in proportion
    to its weights: on one row, drafts wait for them.

    Args:
        recorded: folder with the costs that the recording brought.
        target: the target; where it is here with its blocks, costs are measured.
        old: the head that was used while recording.
        new: the one that may take its place.

    Returns:
        the costs; None if nobody measured them.
    """
    # 1. The old head's: recorded with the answers, else kept here, else measured now, which takes
    # the target's blocks.
    with_answers = recorded_costs(recorded, head_shape(old))
    if with_answers is not None:
        costs, machine = with_answers
        origin = f"measured where the answers were recorded: {machine}"
    else:
        earlier = machine_costs(target, old)
        if earlier is not None:
            costs = earlier
            origin = f"kept from earlier on this machine: {hardware(target.device)}"
        elif isinstance(target, OuterTarget):
            return None
        else:
            costs = SpeculativeLM.from_pretrained(target, head=old, tree="chain:1").costs
            origin = f"measured now on this machine: {hardware(target.device)}"

    # 2. The new head's.
    if head_shape(new) == head_shape(old):
        return KnownCosts(costs, costs, origin)
    ratio = _weights(new) / _weights(old)
    scaled = replace(costs, draft=costs.draft * ratio, node=costs.node * ratio)
    origin += f"; drafts of the new head by its {ratio:.2f} times as many weights"
    return KnownCosts(costs, scaled, origin)


def predicted_speed(lengths: Lengths, costs: RoundCosts) -> float:
    """Tokens per second with the fastest tree over those of plain decoding; NaN without a round.

    A chain that may end early counts as whole in each round: where the head estimates acceptance,
    the predicted speed is a lower bound.
    """
    rates = []
    for tree, stats in lengths.items():
        if stats.rounds:
            rates.append(costs.rate(tree, stats.acceptance_length))
    return costs.plain * max(rates) if rates else math.nan


def report(config: AdaptConfig, judgement: Judgement) -> str:
    """Write the judgement as a page: what changed for which kind of prompt, and what follows."""
    # 1. A table with a row for each kind, and three columns for each tree.
    columns = ["kind", "answers"]
    for tree in judgement.trees:
        columns += [f"{_named(tree)}: before", "after", "difference, 95 %"]
    if judgement.costs is not None:
        columns += ["predicted speed: before", "after"]
    lines = [
        f"# {config.head} adapted to {config.recorded}",
        "",
        (
            f"Acceptance along {judgement.whole.answers} of the newest answers,"
            f" {config.max_new_tokens} tokens at most."
        ),
        "",
        f"| {' | '.join(columns)} |",
        "|---" * len(columns) + "|",
    ]
    for comparison in (judgement.whole, *judgement.kinds):
        cells = [_kind(comparison), str(comparison.answers)]
        for tree in judgement.trees:
            for lengths in (comparison.old, comparison.new):
                cells.append(f"{lengths[tree].acceptance_length:.2f}")
            low, high = comparison.interval(tree)
            known = comparison.answers > 1 and not math.isnan(low)
            cells.append(f"{low:+.2f} to {high:+.2f}" if known else "-")
        if judgement.costs is not None:
            for speed in comparison.speeds(judgement.costs):
                cells.append("-" if math.isnan(speed) else f"{speed:.2f}")
        lines.append(f"| {' | '.join(cells)} |")

    # 2. Where the speeds come from, what changed, and the verdict.
    lines.append("")
    if judgement.costs is None:
        lines.append(
            "Judged by acceptance alone: no costs of rounds are known for this target and head. A "
            "recording by a decoder that chooses its trees (tree auto) keeps them."
        )
    else:
        lines.append(
            "Predicted speed is relative to plain decoding: tokens per second with the fastest of "
            f"the judged trees, by costs of rounds {judgement.costs.origin}."
        )
    lines += ["", *_changes(judgement), "", _verdict(config, judgement)]
    return "\n".join(lines) + "\n"


def _changes(judgement: Judgement) -> list[str]:
    """List the kinds of prompt by what changed, and other changes, a line each."""
    # 1. Kinds by what changed. Better counts in the chain, worse in the chain or the tree.
    worse = [comparison.kind for comparison in judgement.worse if comparison is not judgement.whole]
    better = "Significantly better"
    lower = "Worse, significantly or by more than 5 %"
    unknown = "Not shown to differ"
    too_few = f"Fewer than {FEWEST_OF_KIND} answers, not judged by themselves"
    groups: dict[str, list[str]] = {better: [], lower: [], unknown: [], too_few: []}
    for comparison in judgement.kinds:
        group = unknown
        if comparison.answers < FEWEST_OF_KIND:
            group = too_few
        elif comparison.kind in worse:
            group = lower
        elif comparison.interval(judgement.chain)[0] > 0:
            group = better
        groups[group].append(_kind(comparison))
    lines = [f"- {name}: {', '.join(kinds)}." for name, kinds in groups.items() if kinds]

    # 2. Other changes.
    if judgement.new_tokens:
        lines.append(
            f"- The draft vocabulary has {judgement.new_tokens} tokens that the old head could not"
            " draft."
        )
    if len(judgement.kinds) == 1:
        lines.append(
            "- All answers are of one kind: what the new head does to others was not measured."
        )
    return lines


def _verdict(config: AdaptConfig, judgement: Judgement) -> str:
    """Say whether the new head is taken; if not, why, and what to do."""
    if judgement.taken:
        return f"Taken: {Path(config.output) / 'best'}"
    # 1. Why not.
    reasons = []
    low, high = judgement.whole.interval(judgement.chain)
    if high < 0:
        reasons.append("the new head accepts less")
    elif judgement.whole.answers < FEWEST_JUDGED:
        reasons.append(
            f"{FEWEST_JUDGED} answers or more judge a head, and {judgement.whole.answers} are there"
        )
    elif not judgement.longer:
        reasons.append(
            f"the difference, {low:+.2f} to {high:+.2f}, does not exclude that nothing is gained"
        )
    worse = [
        _kind(comparison) for comparison in judgement.worse if comparison is not judgement.whole
    ]
    if worse:
        reasons.append(f"it is worse on {', '.join(worse)}")
    elif judgement.worse and high >= 0:
        reasons.append("it accepts less in trees")
    if not judgement.faster:
        reasons.append("its predicted speed is not higher")

    # 2. What to do.
    advice = f"Stay with {config.head}."
    if high >= 0:
        advice = f"Stay with {config.head}, record more, or train longer (steps)."
    if worse:
        advice = (
            f"Stay with {config.head}, record more of what got worse, or name older data (replay)."
        )
    return f"Not taken: {'; '.join(reasons)}. {advice}"


def _kind(comparison: Comparison) -> str:
    return table_cell(comparison.kind) or "(none)"


def _named(tree: TreePolicy) -> str:
    if isinstance(tree, TreeShape) and tree.is_chain:
        return f"chain of {tree.depth}"
    return f"tree of {tree.size}"


def _weights(head: DraftHead) -> int:
    return sum(weight.numel() for weight in head.parameters())


def _loaded(checkpoint: str | Path, target: Target) -> DraftHead:
    head, _ = load_head(checkpoint, target.info, target.dtype)
    return head.to(target.device).eval()


def _lengths(
    target: Target,
    source: FolderStates,
    heads: Sequence[DraftHead],
    trees: Sequence[TreePolicy],
    examples: list[Example],
    new_tokens: int,
) -> list[Lengths]:
    """Measure each head's drafts along answers, of which some are in memory at a time."""
    rows = max(1, NODES_AT_ONCE // max(tree.size for tree in trees))
    stats_of_heads: list[dict[TreePolicy, list[Stats]]] = []
    for _ in heads:
        stats_of_heads.append({tree: [] for tree in trees})
    for start in range(0, len(examples), rows):
        batch = examples[start : start + rows]
        prompts = [prompt_of(example) for example in batch]
        # The states of a batch's texts are read once, for all heads and trees.
        replay = StoredReplay(target, source, batch)
        for head, parts in zip(heads, stats_of_heads, strict=True):
            for tree in trees:
                parts[tree].append(greedy_answers(replay, head, tree, prompts, new_tokens).stats)
    lengths: list[Lengths] = []
    for parts in stats_of_heads:
        lengths.append({tree: Stats.merged(stats) for tree, stats in parts.items()})
    return lengths
