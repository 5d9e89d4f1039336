"""Chains that end where the draft is no longer confident.

Whether the next token is drafted is decided from the draft's own distribution before that token is
chosen or sampled: from the chain so far, and never from the target. So every acceptance rule stays
exact; a token that was sampled is never taken back, which would favour confident ones.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...heads.layers.decoder_layer import at_least_fp32
from ..trees.tree import DraftTree
from ..trees.tree_spec import EarlyExitShape, TreeKind, TreeShape
from .base import NoDraft
from .model_rows import ModelRows
from .tree_policies import HeadDrafter


def confidence(logits_BV: Tensor, estimate_B: Tensor | None = None) -> Tensor:
    """Probability that a draft's next token is accepted, [B].

    It is the head's own estimate if it makes one (`estimate_B`, its logits), else the probability
    of the draft's best token.
    """
    if estimate_B is not None:
        return at_least_fp32(estimate_B).sigmoid()
    return at_least_fp32(logits_BV).softmax(-1).amax(-1)


class EarlyExitChain(HeadDrafter):
    """A chain that is continued while any row of the batch is confident enough.

    On a CPU the decision is made after each token. On an accelerator, where that would be a
    synchronization, the whole chain is drafted, and the tokens after its end are padding of the
    tree.
    """

    shape: EarlyExitShape

    def __init__(self, rows: ModelRows, tree: EarlyExitShape, budget: int | None = None) -> None:
        super().__init__(rows, tree, budget)
        self.kind = "sampled_chain" if tree.sampled else "top_k"

    def propose(self, roots_B: Tensor) -> DraftTree:
        # 1. The longest chain that fits the budget: the root takes one node of each row's share.
        on_cpu = roots_B.device.type == "cpu"
        longest = self.depth
        if self.budget is not None:
            longest = min(longest, self.budget // len(roots_B) - 1)
        gumbel_BKD = self.gumbel_noise(longest) if longest > 0 else None

        # 2. Draft token by token. `size` and `goes_on` are scalars on the device, so that an
        #    accelerator need not tell the host where the chain ends.
        state = self.rows.catch_up()
        parents_B1 = torch.full_like(roots_B[:, None], -1)
        tokens = [roots_B]
        probs = []
        size = torch.ones_like(roots_B[0])
        goes_on = torch.ones_like(size, dtype=torch.bool)
        for depth in range(longest):
            inputs = (state, tokens[-1][:, None], parents_B1)
            logits_B1V, state = self.rows.runner(self.rows.expand, (), *inputs)
            if gumbel_BKD is not None:
                logits_B1V = logits_B1V + gumbel_BKD[:, depth : depth + 1]
            estimate_BW = getattr(state, "confidence_BW", None)  # not every model's state has one
            estimate_B = None if estimate_BW is None else estimate_BW[:, 0]
            confidence_B = confidence(logits_B1V[:, 0], estimate_B)
            # Once False it stays False: a chain has no gaps.
            goes_on = goes_on & (confidence_B >= self.shape.threshold).any()
            if on_cpu and not goes_on:
                break
            size = size + goes_on
            if self._draft_probs is None:
                tokens.append(self.head.target_tokens(logits_B1V[:, 0].argmax(-1)))
            else:
                sampled_B11, probs_B1V = self.sample_children(logits_B1V, 1, 1)
                tokens.append(sampled_B11[:, 0, 0])
                # After the end nothing counts as sampled: the distribution is 0 there.
                probs.append(torch.where(goes_on, probs_B1V, 0.0))
            parents_B1 = torch.zeros_like(parents_B1)  # from now on the frontier's only node

        # 3. The tree: all drafted tokens; those after the first `size` are padding.
        if len(tokens) == 1:
            return NoDraft().propose(roots_B)
        shape = TreeShape.chain(len(tokens) - 1)
        tokens_BN = torch.stack(tokens, dim=1)
        kind: TreeKind = "top_k"
        probs_BNV = None
        if probs:
            kind = self.kind
            # Nothing was sampled after the last node.
            probs_BNV = torch.cat([*probs, torch.zeros_like(probs[0])], dim=1)
        tree = DraftTree.of_shape(shape, tokens_BN, kind, probs_BNV)
        return replace(tree, sizes_B=size.expand(len(roots_B)), padding=True)
