"""A second, smaller model as a draft: what speculative decoding began with (arXiv:2211.17192, 2302.01318).

It is asked as a head is, so every tree and every acceptance rule is its own too: chains and trees, picked or drawn.
Its cache follows the accepted text: each round it reads what was emitted, whose last token is the next root, and from
there guesses level by level; guesses lie behind the text until the next round writes over them.

Letters in tensor names: B batch, A accepted, W frontier, M guessed nodes, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from ...heads import TargetInfo, TargetModules
from ..kv_cache import TreeCache
from ..target import Target
from ..tree import framed


@dataclass(frozen=True)
class AssistantState:
    """What the small model has read, and what it has guessed behind that."""

    cache: TreeCache
    longest: int
    """Tokens of the longest row."""
    root_BV: Tensor
    """Logits after the newest token."""
    seen_BWM: Tensor | None = None
    """Which guesses each node of the newest frontier sees; None before the root was expanded."""
    depths_BM: Tensor | None = None
    """Their places behind the text."""

    def select(self, rows_R: Tensor) -> AssistantState:
        """These rows only, right after an `observe`."""
        self.cache.select(rows_R)
        return dataclasses.replace(self, root_BV=self.root_BV[rows_R])

    def resume(self, tokens: int | None, capacity: int) -> AssistantState:
        """Of a text that goes on; see `heads.DraftState`."""
        if tokens is None:
            return self
        self.cache.rewind(self.cache.lengths_B.clamp(max=tokens))
        return dataclasses.replace(self, longest=min(self.longest, tokens))

    def replace(self, rows_R: Tensor, other: AssistantState) -> AssistantState:
        """With another one's rows in the places of these, both right after an `observe`."""
        self.cache.replace(rows_R, other.cache)
        root_BV = self.root_BV.index_copy(0, rows_R, other.root_BV)
        return dataclasses.replace(self, longest=max(self.longest, other.longest), root_BV=root_BV)


class AssistantModel:
    """A model whose next-token distribution is the draft; see `heads.DraftHead` for who calls what."""

    feature_layers: tuple[int, ...] = ()
    reads_from_start = True

    def __init__(self, model: Target, target: TargetInfo, max_depth: int) -> None:
        """Hold the model.

        Args:
            model: the smaller one.
            target: whose tokens it guesses.
            max_depth: tokens of the longest draft.
        """
        self.model, self.target, self.max_depth = model, target, max_depth
        self.draft_vocab_size = min(model.info.vocab_size, target.vocab_size)

    def compile(self) -> None:
        """Each of its forwards in a graph."""
        self.model.compile()

    def cache_bytes(self, rows: int, tokens: int) -> int:
        """Of its keys and values."""
        return self.model.cache_bytes(rows, tokens)

    def begin(
        self, modules: TargetModules, batch_size: int, capacity: int, max_depth: int, nodes: int
    ) -> AssistantState:
        """Nothing read."""
        root_BV = torch.zeros(batch_size, self.draft_vocab_size, dtype=self.model.dtype, device=self.model.device)
        return AssistantState(self.model.new_cache(batch_size), 0, root_BV)

    def observe(
        self, state: AssistantState, features_BAF: Tensor, tokens_BA: Tensor, lengths_B: Tensor
    ) -> AssistantState:
        """Read what was committed; row b's first `lengths_B[b]` tokens count."""
        accepted = tokens_BA.shape[1]
        # Behind a passage of a prompt there is always more, so its logits are not wanted.
        wanted = accepted <= self.max_depth + 2
        kept_K = None if wanted else torch.empty(0, dtype=torch.int64, device=tokens_BA.device)
        output = self.model.forward_chain(tokens_BA, state.longest, state.cache, (), kept_K)
        state.cache.commit(lengths_B)
        root_BV = state.root_BV
        if wanted:
            last_B11 = (lengths_B - 1).clamp(min=0)[:, None, None]
            root_BV = output.logits_BNV.take_along_dim(last_B11, dim=1)[:, 0, : self.draft_vocab_size]
        longest = int(state.cache.lengths_B.max())  # sync: right after the loop's own, for which all has been computed
        return AssistantState(state.cache, longest, root_BV)

    def expand(self, state: AssistantState, tokens_BW: Tensor, parents_BW: Tensor) -> tuple[Tensor, AssistantState]:
        """Logits of the children of a frontier; the root's are known already."""
        batch, width = tokens_BW.shape
        if state.seen_BWM is None or state.depths_BM is None:
            nothing = torch.zeros(batch, 1, 0, dtype=torch.bool, device=tokens_BW.device)
            root = dataclasses.replace(state, seen_BWM=nothing, depths_BM=tokens_BW[:, :0])
            return state.root_BV[:, None], root
        before_BWM = state.seen_BWM.take_along_dim(parents_BW[..., None], dim=1)
        myself = torch.eye(width, dtype=torch.bool, device=tokens_BW.device).expand(batch, -1, -1)
        seen_BWM = torch.cat([before_BWM, myself], dim=-1)
        depth_BW = before_BWM.sum(-1)  # as many guesses as lie before it
        depths_BM = torch.cat([state.depths_BM, depth_BW], dim=1)
        output = self.model.forward_nodes(tokens_BW, framed(seen_BWM), depths_BM, state.longest, state.cache, ())
        grown = dataclasses.replace(state, seen_BWM=seen_BWM, depths_BM=depths_BM)
        return output.logits_BNV[..., : self.draft_vocab_size], grown

    def target_tokens(self, draft_tokens: Tensor) -> Tensor:
        """Its ids are the target's."""
        return draft_tokens
