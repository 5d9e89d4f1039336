"""Chains that end where the draft is no longer sure of itself.

Whether the next token is drafted is decided from the draft's own distribution before that token is picked or drawn:
from what stands in the chain already, and from nothing that the target has said of it. So every rule stays exact; a
token that was drawn is never taken back (to drop an unsure one would favour the sure ones).

Letters in tensor names: B batch, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from ...heads import TargetModules
from ...heads.layers.decoder_layer import at_least_fp32
from ..tree import DraftTree
from ..tuning.tree_spec import EarlyExitShape, TreeShape
from .base import DraftContext
from .draft_model import AssistantModel
from .head_drafter import DraftModel, HeadDrafter, NoDraft, drawn_children, lucky


def signs(logits_BV: Tensor, depth: int) -> Tensor:
    """Of a draft's next token, [B, 4]: log-probability of the best one, entropy, depth, and 1."""
    log_q_BV = at_least_fp32(logits_BV).log_softmax(-1)
    entropy_B = -(log_q_BV.exp() * log_q_BV.nan_to_num(neginf=0.0)).sum(-1)
    depth_B = torch.full_like(entropy_B, depth)
    return torch.stack([log_q_BV.amax(-1), entropy_B, depth_B, torch.ones_like(depth_B)], dim=-1)


def sureness(signs_BX: Tensor, weights: tuple[float, ...] | None) -> Tensor:
    """Probability that the next token is accepted: by a logistic regression, or the draft's own for its best token."""
    if weights is None:
        return signs_BX[:, 0].exp()
    return (signs_BX @ _on(weights, signs_BX.dtype, signs_BX.device)).sigmoid()


@lru_cache(maxsize=64)
def _on(weights: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(weights, dtype=dtype, device=device)


class EarlyExitChain(HeadDrafter):
    """A chain of up to so many tokens; it goes on while any row of the batch is sure enough.

    A CPU is asked after each token whether to draft the next one. On an accelerator, which would have to be waited for,
    the whole chain is drafted, and what lies behind its end is no part of the tree.
    """

    def __init__(
        self, head: DraftModel, shape: EarlyExitShape, modules: TargetModules, budget: int | None = None
    ) -> None:
        """Hold a head; see `EarlyExitShape` and `drafter_of`."""
        super().__init__(head, modules, shape.depth, shape.expanded, shape.size)
        self.shape, self.budget = shape, budget
        self.kind = "sampled_chain" if shape.drawn else "top_k"
        self.seen: list[Tensor] | None = None
        """The signs at each depth of the last chain, for whoever trains a stopper; None to keep none."""

    def begin(self, start: DraftContext) -> None:
        """An empty state; how to draw."""
        super().begin(start)
        self._draw = start.draw
        self._probs_of = start.draft_probs if self.shape.drawn else None

    def compile(self) -> None:
        """How far a chain goes is not known before: nothing is put in one graph but what a model does by itself."""
        if isinstance(self.head, AssistantModel):
            super().compile()

    def propose(self, roots_B: Tensor) -> DraftTree:
        """Token by token."""
        tokens, drawn_from = [roots_B], []
        on_cpu, goes_on, size = roots_B.device.type == "cpu", None, torch.ones_like(roots_B[0])
        state, parents_B1 = self.state, torch.full_like(roots_B[:, None], -1)
        if self.seen is not None:
            self.seen.clear()
        longest = self.depth if self.budget is None else min(self.depth, self.budget // len(roots_B) - 1)
        gumbel_BKD = self.gumbel(longest) if longest > 0 else None
        for depth in range(longest):
            logits_B1V, state = self.head.expand(state, tokens[-1][:, None], parents_B1)
            logits_B1V = lucky(logits_B1V, gumbel_BKD, depth)
            found_BX = signs(logits_B1V[:, 0], depth)
            if self.seen is not None:
                self.seen.append(found_BX)
            sure = (sureness(found_BX, self.shape.weights) >= self.shape.threshold).any()
            goes_on = sure if goes_on is None else goes_on & sure
            if on_cpu and not goes_on:
                break
            size = size + goes_on
            if self._probs_of is None:
                tokens.append(self.head.target_tokens(logits_B1V[:, 0].argmax(-1)))
            else:
                drawn_B11, probs_B1V = drawn_children(self.head, logits_B1V, 1, 1, self._probs_of, self._draw)
                tokens.append(drawn_B11[:, 0, 0])
                drawn_from.append(torch.where(goes_on, probs_B1V, 0.0))  # what was not drawn has no probability
            parents_B1 = torch.zeros_like(parents_B1)
        if len(tokens) == 1:
            return NoDraft().propose(roots_B)
        shape, tokens_BN = TreeShape.chain(len(tokens) - 1), torch.stack(tokens, dim=1)
        probs_BNV = None
        if drawn_from:
            probs_BNV = torch.cat([*drawn_from, torch.zeros_like(drawn_from[0])], dim=1)  # nothing below the last token
        tree = DraftTree.of_shape(shape, tokens_BN, self.kind if drawn_from else "top_k", probs_BNV)
        return replace(tree, sizes_B=size.expand(len(roots_B)), padding=True)
