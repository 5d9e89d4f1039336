"""Acceptance that trees would have, from one pass over a target's own answers.

How often the true token at each depth is the head's i-th best gives the acceptance length of every
static tree (see `tree_search`). A dynamic tree of a smaller size or depth is a part of the largest
one that the head proposes, so one pass over the answers gives the acceptance length of all of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...heads.base import DraftHead, TargetFeatures
from ..engines.base import TargetOutput
from ..engines.target import Target
from ..trees.sampling import RandomSampler
from ..trees.tree_spec import DynamicShape
from .base import DraftContext, PrefillChunk
from .draft_model_state import DraftModelState
from .tree_policies import DynamicTree

RANKS = 10
"""Ranks whose accuracy is measured: the most children that a node of a calibrated tree has."""
Sums = tuple[Tensor, Tensor, Tensor]
"""losses_K, counts_K and hits_KI of a batch, on the CPU. K depths, I ranks."""
Size = tuple[int, int]
"""Nodes of a dynamic tree, the root counted, and its depth."""


@dataclass(frozen=True)
class Answered:
    """A prompt with the target's answer."""

    tokens_T: Tensor
    """Both, on the target's device."""
    prompt_length: int

    @property
    def new_tokens(self) -> int:
        """Tokens of the answer."""
        return len(self.tokens_T) - self.prompt_length


@torch.no_grad()
def accuracy_by_rank(
    target: Target, head: DraftHead, answers: Iterable[Answered]
) -> list[list[float]]:
    """Return how often the true token at each depth is the head's i-th best, teacher-forced.

    Returns:
        accuracy_KI: shares of all positions of the answers, by depth and by rank.
    """
    ranks = min(RANKS, head.draft_vocab_size)
    sums: list[Sums] = []
    for answer in answers:
        tokens_1T = answer.tokens_T[None]
        positions_T = torch.arange(len(answer.tokens_T))
        features_1TF, last_1TD = target.read(tokens_1T, head.feature_layers)
        features = TargetFeatures(
            features_BTF=features_1TF.to(target.dtype),
            last_BTD=last_1TD.to(target.dtype),
            tokens_BT=tokens_1T,
            loss_mask_BT=(positions_T >= answer.prompt_length)[None],
            modules=target.modules,
        )
        output = head(features, ranks=ranks)
        sums.append((output.losses_K.cpu(), output.counts_K.cpu(), output.hits_KI.cpu()))
    _, accuracy_KI = means(sums, head.max_depth)
    return accuracy_KI


def means(sums: list[Sums], max_depth: int) -> tuple[list[float], list[list[float]]]:
    """Average the loss per depth, and the accuracy per depth and rank.

    Batches of short conversations have fewer depths.
    """
    all_losses_K = torch.zeros(max_depth, dtype=torch.float32)
    all_counts_K = torch.zeros(max_depth, dtype=torch.float32)
    all_hits_KI = torch.zeros(max_depth, sums[0][2].shape[1], dtype=torch.float32)
    for losses_K, counts_K, hits_KI in sums:
        depths = len(counts_K)
        all_losses_K[:depths] += losses_K
        all_counts_K[:depths] += counts_K
        all_hits_KI[:depths] += hits_KI
    # A depth without a position has loss 0 and accuracy 0.
    all_counts_K = all_counts_K.clamp(min=1)
    accuracy_KI = all_hits_KI / all_counts_K[:, None]
    return (all_losses_K / all_counts_K).tolist(), accuracy_KI.tolist()


@torch.inference_mode()
def dynamic_lengths(
    target: Target, head: DraftHead, width: int, answers: Iterable[Answered], sizes: Sequence[int]
) -> dict[Size, float]:
    """Acceptance length of dynamic trees of a width along the answers, by size and depth."""
    depths = range(1, head.max_depth + 1)
    largest = DynamicShape(max(sizes), head.max_depth, width)
    drafter = DynamicTree(DraftModelState(head, target.draft_modules), largest)
    rounds: dict[Size, list[int]] = {}
    for size in sizes:
        for depth in depths:
            rounds[size, depth] = []
    for answer in answers:
        text_1T = answer.tokens_T[None]
        tokens = answer.tokens_T.tolist()
        length = len(tokens)
        # One forward over prompt and answer gives the features of every position.
        output = target.engine.read_chunk(
            text_1T, length, target.engine.new_cache(1), head.feature_layers, [0]
        )
        drafter.begin(DraftContext(1, length + drafter.max_nodes, RandomSampler(None), None))
        drafter.prefill(_chunk(text_1T, output, 0, answer.prompt_length))
        accepted: dict[Size, list[int]] = {key: [] for key in rounds}
        # Every position of the answer as a root: how many drafts after it would be accepted.
        for position in range(answer.prompt_length, length - 1):
            truth = tokens[position + 1 : position + 1 + head.max_depth]
            candidates = drafter.candidates(
                drafter.model_state.catch_up(), text_1T[:, position], head.max_depth
            )
            tokens_1C, parents_1C, values_1C = candidates
            path = _true_path(truth, tokens_1C[0].tolist(), parents_1C[0].tolist())
            for depth in depths:
                # A tree of this depth has the first candidates only: the root, `width` nodes, and
                # `width` x `width` more at each later depth.
                count = 1 + drafter.width + (depth - 1) * drafter.width**2
                ranks = [_rank(values_1C[0, :count], node) for node in path[:depth]]
                for size in sizes:
                    # A tree of `size` nodes holds the candidates of ranks below it. A child is
                    # worth no more than its parent, so the ranks along the path never fall.
                    accepted[size, depth].append(sum(rank < size for rank in ranks))
            drafter.prefill(_chunk(text_1T, output, position, position + 1))
        for key, accepted_P in accepted.items():
            rounds[key] += _round_lengths(accepted_P)
    return {key: statistics.mean(lengths) for key, lengths in rounds.items()}


def _round_lengths(accepted_P: list[int]) -> list[int]:
    """Return the tokens of each round of an answer, by the drafts accepted from every position."""
    # Drafts accepted [2, 0, 1, 1, 0]: the round at 0 emits 3 tokens, so the next root is at 3. It
    # could emit 2, and the answer ends after these: lengths [3, 2].
    lengths = []
    root = 0  # position of a round's root in the answer
    while root < len(accepted_P):
        lengths.append(min(accepted_P[root] + 1, len(accepted_P) - root))
        root += lengths[-1]
    return lengths


def _chunk(text_1T: Tensor, output: TargetOutput, start: int, stop: int) -> PrefillChunk:
    """Part of a text whose features the target has computed."""
    return PrefillChunk(
        text_1T[:, start:stop],
        text_1T[:, start + 1 : stop + 1],
        output.features_BNF[:, start:stop],
        torch.tensor([stop - start], device=text_1T.device),
    )


def _true_path(truth: list[int], tokens: list[int], parents: list[int]) -> list[int]:
    """Candidates that are the true continuation, from the root on."""
    path: list[int] = []
    above = 0
    for token in truth:
        children = [
            node for node, parent in enumerate(parents) if parent == above and tokens[node] == token
        ]
        if not children:
            break
        above = children[0]
        path.append(above)
    return path


def _rank(values_C: Tensor, node: int) -> int:
    """Rank of a candidate by its value, from 0; of equal ones the first comes first."""
    better = int((values_C > values_C[node]).sum())
    equal_before = int((values_C[:node] == values_C[node]).sum())
    return better + equal_before
