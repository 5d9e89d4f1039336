"""Positions of a training batch at which drafts are judged."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from .base import TargetFeatures
from .layers.constants import upload


@dataclass(frozen=True)
class DraftPositions:
    """Positions of a batch where drafts are judged, as indices into its flattened [B * T] tokens.

    A draft position is the position t of the newest feature. The root of its tree is the token at
    t + 1. The draft at depth k, counted from 0, is judged by the target's state at t + 1 + k and by
    the token at t + 2 + k.

    Draft positions are sorted. If no position is left out, draft k of position n, where valid, is
    judged where draft 0 of position n + k is. The target's distributions at `rows_NK[:, 0]` are
    then enough for all depths.
    """

    index_N: Tensor
    rows_NK: Tensor
    """Position in the flattened tokens whose state judges the draft."""
    valid_NK: Tensor
    """True where the root and all drafts up to depth k lie in one answer."""
    on_host_N: Tensor | None = None
    """`index_N` where the loss mask is, which in training is the host."""
    on_host_NK: Tensor | None = None
    """`rows_NK` on the host, unless all positions with a draft are included."""
    judged_by: int = 1
    """Distinct states that judge the drafts of a position, on average, rounded up."""

    @classmethod
    def of(
        cls,
        features: TargetFeatures,
        depths: int,
        at_most: int | None = None,
        generator: torch.Generator | None = None,
    ) -> DraftPositions:
        """The positions of a batch with at least one draft to judge.

        With `at_most`, that many positions of each sequence, chosen at random by `generator`, or by
        torch's global one.
        """
        # 1. Valid drafts: the tokens from the root at t + 1 to the draft's own at t + 2 + k all
        #    belong to an answer. With loss mask [0, 1, 1, 1] and 2 depths, position 0 has both
        #    drafts, position 1 the first, and the others none.
        loss_mask_BT = features.loss_mask_BT
        batch, time = loss_mask_BT.shape
        padded = F.pad(loss_mask_BT, (0, depths + 1))
        answers = []  # answers[k - 1]_BT: whether the token at t + k belongs to an answer
        for k in range(1, depths + 2):
            answers.append(padded[:, k : k + time])
        valid_BTK = torch.stack(answers, dim=-1).cumprod(-1)[..., 1:].bool()
        has_draft_BT = valid_BTK[..., 0]

        # 2. A random choice of them, if there is a limit.
        every = True
        if at_most is not None:
            documents_BT = features.documents_BT
            if documents_BT is None and features.sequences_BT is not None:
                documents_BT = features.sequences_BT.cpu()  # sync: training gives them on the host
            chosen_BT = _some_of_each(has_draft_BT, documents_BT, at_most, generator)
            every = torch.equal(chosen_BT, has_draft_BT)
            has_draft_BT = chosen_BT

        # 3. Indices into the flattened batch: with T = 4, column 1 of row 2 is 9, and its drafts
        #    are judged by states 10, 11, ...
        index_N = has_draft_BT.flatten().nonzero()[:, 0]
        depth_K = torch.arange(depths, device=index_N.device)
        # Past the end any row serves: no draft is valid there.
        rows_NK = (index_N[:, None] + 1 + depth_K).clamp(max=batch * time - 2)
        valid_NK = valid_BTK.flatten(0, 1)[index_N]

        # 4. Where positions were left out, neighbours share fewer states: 3 positions judged by 9
        #    distinct states have `judged_by` 3.
        on_host_NK = None
        judged_by = 1
        if not every:
            on_host_NK = rows_NK
            judged_by = -(-len(rows_NK.unique()) // max(len(index_N), 1))
        positions = cls(index_N, rows_NK, valid_NK, index_N, on_host_NK, judged_by)
        return positions._to(features.tokens_BT.device)

    @classmethod
    def of_answers(cls, features: TargetFeatures) -> DraftPositions:
        """Return the positions before answer tokens, at one depth.

        They judge a model on its own next token.
        """
        # Loss mask [0, 0, 1, 1] gives positions 1 and 2.
        before_BT = F.pad(features.loss_mask_BT[:, 1:], (0, 1))
        index_N = before_BT.flatten().nonzero()[:, 0]
        valid_N1 = torch.ones_like(index_N[:, None], dtype=torch.bool)
        return cls(index_N, index_N[:, None], valid_N1)._to(features.tokens_BT.device)

    def _to(self, device: torch.device) -> DraftPositions:
        """Copy to a device without waiting for it: the positions were counted on the host."""
        return replace(
            self,
            index_N=upload(self.index_N, device),
            rows_NK=upload(self.rows_NK, device),
            valid_NK=upload(self.valid_NK, device),
        )


def _some_of_each(
    has_draft_BT: Tensor,
    documents_BT: Tensor | None,
    at_most: int,
    generator: torch.Generator | None,
) -> Tensor:
    """Choose at most so many positions of each sequence, by a generator on the host.

    A packed row holds several sequences, numbered in order; None where every row is one sequence.
    """
    batch, time = has_draft_BT.shape
    sequences_BT = documents_BT
    if sequences_BT is None:
        sequences_BT = torch.zeros(batch, time, dtype=torch.int64)

    # 1. Drafts of each sequence, by its number, from 0 to T. Where none has too many, draw no
    #    random number.
    zeros_BS = torch.zeros(batch, time + 1, dtype=torch.int64)
    counts_BS = zeros_BS.scatter_add(1, sequences_BT, has_draft_BT.long())
    if int(counts_BS.max()) <= at_most:
        return has_draft_BT

    # 2. Sort by sequence, then at random, with positions that have no draft last: a draw is below
    #    1, so sequence 1 has keys from 2 to 3. The double argsort turns an order into ranks.
    draws_BT = torch.rand(batch, time, dtype=torch.float32, generator=generator)
    draws_BT = draws_BT.masked_fill(~has_draft_BT, 1.0).double()
    order_BT = (2 * sequences_BT + draws_BT).argsort(1)
    ranks_BT = order_BT.argsort(1)

    # 3. The rank in the row minus the size of the sequences before is the rank in the sequence.
    sizes_BS = zeros_BS.scatter_add(1, sequences_BT, torch.ones_like(ranks_BT))
    first_BS = sizes_BS.cumsum(1) - sizes_BS
    return has_draft_BT & (ranks_BT - first_BS.gather(1, sequences_BT) < at_most)
