"""What trees would be accepted, and what their rounds would cost: the two sides of choosing one.

A dynamic tree of a smaller size or depth is a part of the largest one that the head looks at, so one pass over the
target's own answers tells the acceptance of all of them. Costs are measured on this machine, not assumed: a forward
over n nodes, a draft of depth d, and what verification and cache take (Sequoia, arXiv:2402.12374, section 4.2).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headstart.heads import DraftHead
from headstart.inference import DynamicShape, Stats, Target, TreePolicy, TreeShape
from headstart.inference.drafters.base import DraftContext, PrefillChunk
from headstart.inference.drafters.head_drafter import DynamicTree
from headstart.inference.logits import RandomSampler
from headstart.inference.target import TargetOutput
from headstart.inference.tuning.costs import forward_seconds
from headstart.inference.tuning.tree_search import best_static_tree, expected_length
from headstart.inference.tuning.tree_spec import EarlyExitShape
from headstart.train.console import counted
from headstart.train.data.chat_template import Example

TIMED, TIMED_DEPTH, TIMED_WIDTHS = 8, 4, (2, 8)
"""Size, largest depth, and widths of the trees by which drafting is timed; costs of deeper ones are extrapolated."""
WIDTHS = (2, 4, 8)
"""Widths of dynamic trees that are considered."""


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


@torch.inference_mode()
def dynamic_lengths(
    target: Target, head: DraftHead, width: int, examples: Sequence[Example], sizes: Sequence[int]
) -> dict[tuple[int, int], float]:
    """Tokens a round, the bonus token counted, of dynamic trees: greedy decoding would find the same.

    Args:
        target: whose answers they are.
        head: what guesses.
        width: of the trees.
        examples: the answers.
        sizes: of the trees, the root counted.

    Returns:
        by size and depth, for every depth that the head has.
    """
    depths = range(1, head.max_depth + 1)
    drafter = DynamicTree(head, DynamicShape(max(sizes), head.max_depth, width), target.modules)
    lengths: dict[tuple[int, int], list[int]] = {(size, depth): [] for size in sizes for depth in depths}
    for example in counted(examples, f"trees of width {width}, by answers"):
        text_1T = torch.tensor([example.tokens], device=target.device)
        length, first = text_1T.shape[1], example.loss_mask.index(True)
        output = target.read_chunk(text_1T, length, target.new_cache(1), head.feature_layers, [0])
        drafter.begin(DraftContext(1, length + drafter.max_nodes, RandomSampler(None), None))
        drafter.prefill(_passage(text_1T, output, 0, first))
        accepted: dict[tuple[int, int], list[int]] = {key: [] for key in lengths}
        for place in range(first, length - 1):
            tokens_1C, parents_1C, values_1C = drafter.candidates(drafter.catch_up(), text_1T[:, place], head.max_depth)
            truth = example.tokens[place + 1 : place + 1 + head.max_depth]
            found = _on_the_way(truth, tokens_1C[0].tolist(), parents_1C[0].tolist())
            for depth in depths:
                seen_C = values_1C[0, : 1 + drafter.width + (depth - 1) * drafter.width**2]
                # A child is worth no more than its parent, so the ranks along the path never fall.
                ranks = [
                    int((seen_C > seen_C[node]).sum() + (seen_C[:node] == seen_C[node]).sum()) for node in found[:depth]
                ]
                for size in sizes:
                    accepted[size, depth].append(sum(rank < size for rank in ranks))
            drafter.prefill(_passage(text_1T, output, place, place + 1))
        for key, found_P in accepted.items():
            lengths[key] += _rounds(found_P)
    return {key: statistics.mean(found) for key, found in lengths.items()}


def _rounds(accepted_P: list[int]) -> list[int]:
    """Tokens of each round through an answer, from what would be accepted at each of its places."""
    place, returned = 0, []
    while place < len(accepted_P):
        returned.append(min(accepted_P[place] + 1, len(accepted_P) - place))
        place += returned[-1]
    return returned


def _passage(text_1T: Tensor, output: TargetOutput, start: int, stop: int) -> PrefillChunk:
    """A part of a text that the target has read whole."""
    count_1 = torch.tensor([stop - start], device=text_1T.device)
    return PrefillChunk(
        text_1T[:, start:stop], text_1T[:, start + 1 : stop + 1], output.features_BNF[:, start:stop], count_1
    )


def _on_the_way(truth: list[int], tokens: list[int], parents: list[int]) -> list[int]:
    """The candidates that are the true continuation, from the root on."""
    path: list[int] = []
    above = 0
    for token in truth:
        below = [node for node, parent in enumerate(parents) if parent == above and tokens[node] == token]
        if not below:
            break
        above = below[0]
        path.append(above)
    return path


Shape = TreeShape | DynamicShape | EarlyExitShape
"""Trees whose rounds have a price."""


@dataclass(frozen=True)
class Costs:
    """Seconds of the parts of a round on this machine."""

    target: dict[int, float]
    """A forward, by its nodes."""
    draft: tuple[float, float, float]
    """A draft with what the head observes: whatever its tree, for each depth, for each node that is expanded."""
    other: float
    """Verification and cache."""
    plain: float
    """A whole plain step."""

    def parts(self, policy: Shape) -> tuple[float, float, float]:
        """Check, draft and the rest of a round; a forward costs what the next measured size does."""
        check = self.target[min(size for size in self.target if size >= policy.size)]
        base, level, node = self.draft
        return check, base + level * policy.depth + node * policy.expanded, self.other

    def rate(self, policy: Shape, length: float) -> float:
        """Tokens a second of rounds that emit `length` tokens."""
        return length / sum(self.parts(policy))


def timed_trees(head: DraftHead) -> list[DynamicShape]:
    """By whose rounds drafts are priced: a shallow one, a deeper one, and one that expands more nodes."""
    depth = min(head.max_depth, TIMED_DEPTH)
    narrow, at_least_fp32 = (min(width, head.draft_vocab_size) for width in TIMED_WIDTHS)
    return [DynamicShape(TIMED, *each) for each in ((1, narrow), (depth, narrow), (depth, at_least_fp32))]


def measured_costs(
    target: Target, head: DraftHead, timed: dict[TreePolicy | None, Stats], text_1T: Tensor, sizes: Sequence[int]
) -> Costs:
    """What rounds consist of.

    Args:
        target: whose forwards are timed.
        head: whose drafts are.
        timed: what rounds with the `timed_trees` took, and, at None, plain ones.
        text_1T: behind whose end forwards are timed.
        sizes: of the trees.
    """
    trees = timed_trees(head)
    shallow, deep, at_least_fp32 = (timed[tree].round_parts for tree in trees)
    step = timed[None].round_parts
    levels, nodes = trees[1].depth - 1, trees[2].expanded - trees[1].expanded
    node = max(0.0, at_least_fp32["draft"] - deep["draft"]) / nodes if nodes else 0.0
    more = deep["draft"] - shallow["draft"] - node * (trees[1].expanded - trees[0].expanded)
    level = max(0.0, more) / levels if levels else 0.0
    others = [sum(parts.values()) - parts["draft"] - parts["target"] for parts in (shallow, deep, at_least_fp32)]
    return Costs(
        target=check_seconds(target, text_1T, sizes, head.feature_layers, step),
        draft=(shallow["draft"] - level - node, level, node),
        other=statistics.mean(others),
        plain=sum(step.values()),
    )


def check_seconds(
    target: Target, text_1T: Tensor, sizes: Sequence[int], layers: tuple[int, ...], step: dict[str, float]
) -> dict[int, float]:
    """Seconds of a round's forward, by its nodes.

    Forwards are timed alone. In rounds they cost as many times a plain one; on a GPU, where a round's parts are
    launches, what they cost alone.

    Args:
        target: whose forwards.
        text_1T: behind whose end.
        sizes: numbers of nodes.
        layers: whose states the head reads.
        step: the parts of a plain step in rounds.
    """
    alone = forward_seconds(target, text_1T, (1, *sizes), layers)
    scale = step["target"] / alone[1] if target.device.type == "cpu" else 1.0
    return {size: scale * alone[size] for size in sizes}
