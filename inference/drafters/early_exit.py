"""Chains that end where the draft is no longer confident.

Whether the next token is drafted is decided from the draft's own distribution before that token is chosen or sampled:
from the chain so far, and never from the target. So every acceptance rule stays exact; a token that was sampled is
never taken back, which would favour confident ones.

Letters in tensor names: B batch, V vocabulary, X features of the classifier, K depths.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ...heads import TargetModules
from ...heads.layers.decoder_layer import at_least_fp32
from ..tree import DraftTree
from ..tuning.tree_spec import EarlyExitShape, TreeShape
from .base import NoDraft, constant
from .tree_policies import DraftModel, HeadDrafter


def exit_features(logits_BV: Tensor, depth: int, confidence_B: Tensor | None = None) -> Tensor:
    """Features of a draft's next token, [B, 4]: log-probability of its acceptance, entropy, depth, and 1.

    The first is the head's own estimate if it makes one, `confidence_B` (its logits), which the logistic regression
    then calibrates, depth by depth; else it is the log-probability of the draft's best token.
    """
    log_q_BV = at_least_fp32(logits_BV).log_softmax(-1)
    entropy_B = -(log_q_BV.exp() * log_q_BV.nan_to_num(neginf=0.0)).sum(-1)
    depth_B = torch.full_like(entropy_B, depth)
    log_rate_B = log_q_BV.amax(-1) if confidence_B is None else logsigmoid(at_least_fp32(confidence_B))
    return torch.stack([log_rate_B, entropy_B, depth_B, torch.ones_like(depth_B)], dim=-1)


def confidence(features_BX: Tensor, weights: tuple[float, ...] | None) -> Tensor:
    """Probability that the next token is accepted: by logistic regression, or as the draft itself estimates it."""
    if weights is None:
        return features_BX[:, 0].exp()
    return (features_BX @ constant(weights, features_BX.dtype, features_BX.device)).sigmoid()


class EarlyExitChain(HeadDrafter):
    """A chain that is continued while any row of the batch is confident enough.

    On a CPU the decision is made after each token. On an accelerator, where that would be a synchronization, the whole
    chain is drafted, and what lies behind its end is padding of the tree.
    """

    shape: EarlyExitShape

    def __init__(
        self, head: DraftModel, tree: EarlyExitShape, modules: TargetModules, budget: int | None = None
    ) -> None:
        super().__init__(head, tree, modules, budget)
        self.kind = "sampled_chain" if tree.sampled else "top_k"
        self.features_K: list[Tensor] | None = None
        """Features at each depth of the last chain, to train a classifier; None to keep none."""

    def propose(self, roots_B: Tensor) -> DraftTree:
        tokens, probs = [roots_B], []
        on_cpu, goes_on, size = roots_B.device.type == "cpu", None, torch.ones_like(roots_B[0])
        state, parents_B1 = self.catch_up(), torch.full_like(roots_B[:, None], -1)
        if self.features_K is not None:
            self.features_K.clear()
        longest = self.depth if self.budget is None else min(self.depth, self.budget // len(roots_B) - 1)
        gumbel_BKD = self.gumbel_noise(longest) if self._gumbel is not None and longest > 0 else None
        for depth in range(longest):
            logits_B1V, state = self.runner(self.head.expand, (), state, tokens[-1][:, None], parents_B1)
            if gumbel_BKD is not None:
                logits_B1V = logits_B1V + gumbel_BKD[:, depth : depth + 1]
            estimated_BW = getattr(state, "confidence_BW", None)  # which other models' states lack
            features_BX = exit_features(logits_B1V[:, 0], depth, None if estimated_BW is None else estimated_BW[:, 0])
            if self.features_K is not None:
                self.features_K.append(features_BX)
            confident = (confidence(features_BX, self.shape.weights) >= self.shape.threshold).any()
            goes_on = confident if goes_on is None else goes_on & confident
            if on_cpu and not goes_on:
                break
            size = size + goes_on
            if self._draft_probs is None:
                tokens.append(self.head.target_tokens(logits_B1V[:, 0].argmax(-1)))
            else:
                sampled_B11, probs_B1V = self.sample_children(logits_B1V, 1, 1)
                tokens.append(sampled_B11[:, 0, 0])
                probs.append(torch.where(goes_on, probs_B1V, 0.0))  # behind the end nothing was sampled
            parents_B1 = torch.zeros_like(parents_B1)
        if len(tokens) == 1:
            return NoDraft().propose(roots_B)
        shape, tokens_BN = TreeShape.chain(len(tokens) - 1), torch.stack(tokens, dim=1)
        probs_BNV = torch.cat([*probs, torch.zeros_like(probs[0])], dim=1) if probs else None  # the last has no child
        tree = DraftTree.of_shape(shape, tokens_BN, self.kind if probs else "top_k", probs_BNV)
        return replace(tree, sizes_B=size.expand(len(roots_B)), padding=True)
