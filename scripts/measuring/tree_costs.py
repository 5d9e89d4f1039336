"""Expected acceptance of draft trees, and the costs of their rounds on this machine.

A dynamic tree of a smaller size or depth is a part of the largest one that the head proposes, so one pass over the
target's own answers gives the acceptance of all of them. Costs are measured, not assumed: a forward over n nodes, a
draft of depth d, and verification with the cache update (Sequoia, arXiv:2402.12374, section 4.2).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headstart.console import counted
from headstart.heads import DraftHead
from headstart.inference import DynamicShape, Stats, Target, TreePolicy, TreeShape
from headstart.inference.drafters.base import DraftContext, PrefillChunk
from headstart.inference.drafters.tree_policies import DynamicTree
from headstart.inference.logits import RandomSampler
from headstart.inference.target import TargetOutput
from headstart.inference.tuning.costs import forward_seconds
from headstart.inference.tuning.tree_search import best_static_tree, expected_length
from headstart.inference.tuning.tree_spec import EarlyExitShape
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
    """Acceptance length of dynamic trees along the target's own answers, by size (the root counted) and depth."""
    depths = range(1, head.max_depth + 1)
    drafter = DynamicTree(head, DynamicShape(max(sizes), head.max_depth, width), target.draft_modules)
    lengths: dict[tuple[int, int], list[int]] = {(size, depth): [] for size in sizes for depth in depths}
    for example in counted(examples, f"trees of width {width}, by answers"):
        text_1T = torch.tensor([example.tokens], device=target.device)
        length, first = text_1T.shape[1], example.loss_mask.index(True)
        output = target.read_chunk(text_1T, length, target.new_cache(1), head.feature_layers, [0])
        drafter.begin(DraftContext(1, length + drafter.max_nodes, RandomSampler(None), None))
        drafter.prefill(_chunk(text_1T, output, 0, first))
        accepted: dict[tuple[int, int], list[int]] = {key: [] for key in lengths}
        for place in range(first, length - 1):
            tokens_1C, parents_1C, values_1C = drafter.candidates(drafter.catch_up(), text_1T[:, place], head.max_depth)
            truth = example.tokens[place + 1 : place + 1 + head.max_depth]
            found = _true_path(truth, tokens_1C[0].tolist(), parents_1C[0].tolist())
            for depth in depths:
                seen_C = values_1C[0, : 1 + drafter.width + (depth - 1) * drafter.width**2]
                # A child is worth no more than its parent, so the ranks along the path never fall.
                ranks = [
                    int((seen_C > seen_C[node]).sum() + (seen_C[:node] == seen_C[node]).sum()) for node in found[:depth]
                ]
                for size in sizes:
                    accepted[size, depth].append(sum(rank < size for rank in ranks))
            drafter.prefill(_chunk(text_1T, output, place, place + 1))
        for key, accepted_P in accepted.items():
            place = 0  # of a round's root in the answer
            while place < len(accepted_P):
                lengths[key].append(min(accepted_P[place] + 1, len(accepted_P) - place))
                place += lengths[key][-1]
    return {key: statistics.mean(found) for key, found in lengths.items()}


def _chunk(text_1T: Tensor, output: TargetOutput, start: int, stop: int) -> PrefillChunk:
    """Part of a text whose features the target has computed."""
    count_1 = torch.tensor([stop - start], device=text_1T.device)
    return PrefillChunk(
        text_1T[:, start:stop], text_1T[:, start + 1 : stop + 1], output.features_BNF[:, start:stop], count_1
    )


def _true_path(truth: list[int], tokens: list[int], parents: list[int]) -> list[int]:
    """Candidates that are the true continuation, from the root on."""
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
"""Trees whose rounds have a known cost."""


@dataclass(frozen=True)
class Costs:
    """Seconds of the parts of a round on this machine."""

    target: dict[int, float]
    """A forward, by number of nodes."""
    draft: tuple[float, float, float]
    """Drafting with the head's update: constant part, for each depth, for each expanded node."""
    other: float
    """Verification and cache update."""
    plain: float
    """A whole plain step."""

    def parts(self, policy: Shape) -> tuple[float, float, float]:
        """Seconds of the target's forward, at the next measured size, of drafting, and of the rest of a round."""
        forward = self.target[min(size for size in self.target if size >= policy.size)]
        base, level, node = self.draft
        return forward, base + level * policy.depth + node * policy.expanded, self.other

    def rate(self, policy: Shape, length: float) -> float:
        """Tokens per second of rounds that emit `length` tokens."""
        return length / sum(self.parts(policy))


def timed_trees(head: DraftHead) -> list[DynamicShape]:
    """Trees by whose rounds drafting is timed: a shallow one, a deeper one, and one that expands more nodes."""
    depth = min(head.max_depth, TIMED_DEPTH)
    narrow, wide = (min(width, head.draft_vocab_size) for width in TIMED_WIDTHS)
    return [DynamicShape(TIMED, *each) for each in ((1, narrow), (depth, narrow), (depth, wide))]


def measured_costs(
    target: Target, head: DraftHead, timed: dict[TreePolicy | None, Stats], text_1T: Tensor, sizes: Sequence[int]
) -> Costs:
    """Derive the costs of rounds from `timed`: statistics with the `timed_trees` and, at None, of plain decoding.

    Forwards over trees of `sizes` nodes are timed after `text_1T`.
    """
    trees = timed_trees(head)
    shallow, deep, wide = (timed[tree].round_parts for tree in trees)
    step = timed[None].round_parts
    levels, nodes = trees[1].depth - 1, trees[2].expanded - trees[1].expanded
    node = max(0.0, wide["draft"] - deep["draft"]) / nodes if nodes else 0.0
    more = deep["draft"] - shallow["draft"] - node * (trees[1].expanded - trees[0].expanded)
    level = max(0.0, more) / levels if levels else 0.0
    others = [sum(parts.values()) - parts["draft"] - parts["target"] for parts in (shallow, deep, wide)]
    return Costs(
        target=forward_costs(target, text_1T, sizes, head.feature_layers, step),
        draft=(shallow["draft"] - level - node, level, node),
        other=statistics.mean(others),
        plain=sum(step.values()),
    )


def forward_costs(
    target: Target, text_1T: Tensor, sizes: Sequence[int], layers: tuple[int, ...], step: dict[str, float]
) -> dict[int, float]:
    """Seconds of the target's forward in a round, by number of nodes.

    Forwards are timed alone, after `text_1T`. On a CPU they are scaled by the ratio of a plain step in rounds, whose
    parts are `step`, to one timed alone; on a GPU, where the parts of a round are launches, they are not.
    """
    alone = forward_seconds(target, text_1T, (1, *sizes), layers)
    scale = step["target"] / alone[1] if target.device.type == "cpu" else 1.0
    return {size: scale * alone[size] for size in sizes}
