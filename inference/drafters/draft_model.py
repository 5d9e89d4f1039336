"""A smaller draft model: the original speculative decoding (arXiv:2211.17192, 2302.01318).

It has the interface of a head, so every tree and every acceptance rule fits it. Its KV cache
follows the accepted text: after each step it reads what was emitted, whose last token is the next
root, and from there drafts level by level; drafted entries lie after the text until the next step
overwrites them.

Letters in tensor names: B batch, A accepted, W frontier, M drafted nodes, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from ...heads.base import TargetInfo, TargetModules
from ...heads.layers.constants import counting
from ..cache.kv_cache import TreeCache
from ..engines.target import Target
from ..trees.tree import NewNodes, framed


@dataclass(frozen=True)
class AssistantState:
    """The KV cache of the small model, and the tree that it has drafted after the text."""

    cache: TreeCache
    longest: int
    """Tokens of the longest row."""
    root_BV: Tensor
    """Logits after the newest token."""
    nodes: int
    """Nodes of the largest draft tree."""
    seen_BWM: Tensor | None = None
    """Attention mask of the newest frontier over the drafted nodes; None before the root was
    expanded."""
    depths_BM: Tensor | None = None
    """Positions of the drafted nodes after the text."""

    def select(self, rows_R: Tensor) -> AssistantState:
        self.cache.select(rows_R)
        return dataclasses.replace(self, root_BV=self.root_BV[rows_R])

    def resume(self, tokens: int | None, capacity: int) -> AssistantState:
        if tokens is None:
            return self
        # Erased: entries after the shared text may hold NaN.
        self.cache.lengths_B = self.cache.lengths_B.clamp(max=tokens)
        self.cache.erase_uncommitted(tokens)
        return dataclasses.replace(self, longest=min(self.longest, tokens))

    def replace(self, rows_R: Tensor, other: AssistantState) -> AssistantState:
        self.cache.replace(rows_R, other.cache)
        root_BV = self.root_BV.index_copy(0, rows_R, other.root_BV)
        return dataclasses.replace(self, longest=max(self.longest, other.longest), root_BV=root_BV)


def within(model: Target, tokens: Tensor) -> Tensor:
    """Tokens that a model can read: its last one in place of those that it does not have.

    Models of one tokenizer may pad their embeddings to different sizes. Whatever a draft model
    reads there changes its drafts alone.
    """
    return tokens.clamp(max=len(model.model.get_input_embeddings().weight) - 1)


class AssistantModel:
    """A smaller model with the interface of `DraftModel`."""

    feature_layers: tuple[int, ...] = ()
    reads_from_start = True

    def __init__(self, model: Target, target: TargetInfo, max_depth: int) -> None:
        """Hold a smaller model, to draft up to `max_depth` tokens of a target."""
        self.model = model
        self.target = target
        self.max_depth = max_depth
        self.draft_vocab_size = min(model.info.vocab_size, target.vocab_size)

    def begin(
        self, modules: TargetModules, batch_size: int, capacity: int, max_depth: int, nodes: int
    ) -> AssistantState:
        root_BV = torch.zeros(
            batch_size, self.draft_vocab_size, dtype=self.model.dtype, device=self.model.device
        )
        return AssistantState(self.model.engine.new_cache(batch_size), 0, root_BV, nodes)

    def observe(
        self, state: AssistantState, features_BAF: Tensor, tokens_BA: Tensor, lengths_B: Tensor
    ) -> AssistantState:
        accepted = tokens_BA.shape[1]
        # 1. Padding is read, too. Nothing sees it, but it may be a token for which the model
        #    computes NaN: the row's last token takes its place.
        last_B1 = (lengths_B - 1).clamp(min=0)[:, None]
        read_BA = torch.minimum(counting(accepted, tokens_BA.device), last_B1)
        tokens_BA = tokens_BA.gather(1, read_BA)
        # 2. After a chunk of a prompt there is always more, so its logits are not computed. A round
        #    emits max_depth + 1 tokens at most; the first token of a text is one more.
        computes_logits = accepted <= self.max_depth + 2
        positions_K = None  # logits at all positions
        if not computes_logits:
            positions_K = torch.empty(0, dtype=torch.int64, device=tokens_BA.device)
        # 3. Read what was accepted. The drafts of the round before may hold NaN, which a weight of
        #    0 does not remove, so they are erased.
        cache = state.cache
        cache.erase_next(min(state.nodes, cache.capacity - state.longest))
        output = self.model.engine.forward_chain(
            within(self.model, tokens_BA), state.longest, cache, (), positions_K
        )
        cache.advance(lengths_B)
        # 4. The logits after each row's last token, from which its root is expanded.
        root_BV = state.root_BV
        if computes_logits:
            last_BV = output.logits_BNV.take_along_dim(last_B1[..., None], dim=1)[:, 0]
            root_BV = last_BV[:, : self.draft_vocab_size]
        # sync: right after the loop's own, which waited for everything before
        longest = int(cache.lengths_B.max())
        return AssistantState(cache, longest, root_BV, state.nodes)

    def expand(
        self, state: AssistantState, tokens_BW: Tensor, parents_BW: Tensor
    ) -> tuple[Tensor, AssistantState]:
        batch, width = tokens_BW.shape
        # The root has been read already: its logits are there, and no node is drafted yet (M = 0).
        if state.seen_BWM is None or state.depths_BM is None:
            nothing = torch.zeros(batch, 1, 0, dtype=torch.bool, device=tokens_BW.device)
            root = dataclasses.replace(state, seen_BWM=nothing, depths_BM=tokens_BW[:, :0])
            return state.root_BV[:, None], root
        # A node sees what its parent sees, and itself. Below the root, nodes 0 and 1, and now 2 and
        # 3 below node 1:
        #     seen by 0 and 1    1 0           seen by 2 and 3    0 1 | 1 0
        #                        0 1                              0 1 | 0 1
        before_BWM = state.seen_BWM.take_along_dim(parents_BW[..., None], dim=1)
        itself_BWW = torch.eye(width, dtype=torch.bool, device=tokens_BW.device)
        itself_BWW = itself_BWW.expand(batch, -1, -1)
        seen_BWM = torch.cat([before_BWM, itself_BWW], dim=-1)
        depth_BW = before_BWM.sum(-1)  # its ancestors among the drafted nodes
        depths_BM = torch.cat([state.depths_BM, depth_BW], dim=1)
        nodes = NewNodes(within(self.model, tokens_BW), framed(seen_BWM), depths_BM)
        output = self.model.engine.forward_nodes(nodes, state.longest, state.cache, ())
        grown = dataclasses.replace(state, seen_BWM=seen_BWM, depths_BM=depths_BM)
        return output.logits_BNV[..., : self.draft_vocab_size], grown

    def target_tokens(self, draft_tokens: Tensor) -> Tensor:
        return draft_tokens
