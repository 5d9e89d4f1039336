"""A smaller draft model: the original speculative decoding (arXiv:2211.17192, 2302.01318).

It has the interface of a head, so every tree and every acceptance rule fits it. Its KV cache
follows the accepted text: after each step it reads what was emitted, whose last token is the next
root, and from there drafts level by level; drafted entries lie after the text until the next step
overwrites them.

A parallel draft model (PARD, arXiv:2504.18583) is trained to draft all levels at once: it reads
mask tokens after the text, in the same forward, and the logits at the newest token and at the masks
are those of the next tokens. After "the cat" and with 3 levels it reads

    the   cat   MASK  MASK
          sat   on    a         what it drafts there

Letters in tensor names: B batch, A accepted, C tokens that are read, K levels that are drafted at
once, W frontier, M drafted nodes, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

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
    root_BKV: Tensor
    """Logits after the newest token, and, of a parallel model, after each mask."""
    nodes: int
    """Nodes of the largest draft tree."""
    seen_BWM: Tensor | None = None
    """Attention mask of the newest frontier over the drafted nodes; None before the root was
    expanded."""
    depths_BM: Tensor | None = None
    """Positions of the drafted nodes after the text."""
    level: int = 0
    """Levels of a parallel model that were expanded."""
    is_full: bool = False
    """Whether the text has become longer than the model can read."""

    def select(self, rows_R: Tensor) -> AssistantState:
        self.cache.select(rows_R)
        return dataclasses.replace(self, root_BKV=self.root_BKV[rows_R])

    def resume(self, tokens: int | None, capacity: int) -> AssistantState:
        if tokens is None:
            return self
        # Erased: entries after the shared text may hold NaN.
        self.cache.lengths_B = self.cache.lengths_B.clamp(max=tokens)
        self.cache.erase_uncommitted(tokens)
        is_full = self.is_full and tokens > self.longest
        return dataclasses.replace(self, longest=min(self.longest, tokens), is_full=is_full)

    def replace(self, rows_R: Tensor, other: AssistantState) -> AssistantState:
        self.cache.replace(rows_R, other.cache)
        root_BKV = self.root_BKV.index_copy(0, rows_R, other.root_BKV)
        return dataclasses.replace(
            self,
            longest=max(self.longest, other.longest),
            root_BKV=root_BKV,
            is_full=self.is_full or other.is_full,
        )


def within(model: Target, tokens: Tensor) -> Tensor:
    """Tokens that a model can read: its last one in place of those that it does not have.

    Models of one tokenizer may pad their embeddings to different sizes. Whatever a draft model
    reads there changes its drafts alone.
    """
    return tokens.clamp(max=len(model.model.get_input_embeddings().weight) - 1)


def mask_token(model: Target) -> int | None:
    """The token by which a parallel draft model drafts; None for an ordinary model.

    Raises:
        ValueError: the model's config names no token of its vocabulary.
    """
    config = model.model.config
    if getattr(config, "spd_type", None) != "pard":
        return None
    token = getattr(config, "pard_token", None)
    most = len(model.model.get_input_embeddings().weight)
    if type(token) is not int or not 0 <= token < most:
        raise ValueError(
            f"the config of the parallel draft model {model.name!r} has pard_token {token!r}; it"
            f" must be one of its {most} tokens"
        )
    return token


class AssistantModel:
    """A smaller model with the interface of `DraftModel`."""

    feature_layers: tuple[int, ...] = ()
    reads_from_start = True

    def __init__(self, model: Target, target: TargetInfo, max_depth: int) -> None:
        """Hold a smaller model, to draft up to `max_depth` tokens of a target.

        It is a parallel one if its config names a `pard_token`.
        """
        self.model = model
        self.mask_token = mask_token(model)
        self.levels = 1 if self.mask_token is None else max_depth
        """Levels that one forward drafts."""
        self.target = target
        self.max_depth = max_depth
        self.draft_vocab_size = min(model.info.vocab_size, target.vocab_size)

    def begin(
        self, modules: TargetModules, batch_size: int, capacity: int, max_depth: int, nodes: int
    ) -> AssistantState:
        shape = (batch_size, self.levels, self.draft_vocab_size)
        root_BKV = torch.zeros(shape, dtype=self.model.dtype, device=self.model.device)
        if self.levels > 1:
            nodes = max(nodes, 2 * self.levels + 1)  # padding of a round, and the masks after it
        return AssistantState(self.model.engine.new_cache(batch_size), 0, root_BKV, nodes)

    def _has_positions(self, tokens: int) -> bool:
        """Whether the model can read a text of so many tokens.

        Most are told their positions, and past the last one it is told again. A model that counts
        them itself would look beyond the end of its table.
        """
        return not self.model.engine.chains_only or tokens <= self.model.max_positions

    def observe(
        self, state: AssistantState, features_BAF: Tensor, tokens_BA: Tensor, lengths_B: Tensor
    ) -> AssistantState:
        accepted = tokens_BA.shape[1]
        # 1. Padding is read, too. Nothing sees it, but it may be a token for which the model
        #    computes NaN: the row's last token takes its place.
        last_B1 = (lengths_B - 1).clamp(min=0)[:, None]
        read_BA = torch.minimum(counting(accepted, tokens_BA.device), last_B1)
        tokens_BC = tokens_BA.gather(1, read_BA)
        # 2. After a chunk of a prompt there is always more, so its logits are not computed. A round
        #    emits max_depth + 1 tokens at most; the first token of a text is one more.
        #    (Beside a history, which `make_drafter` never builds, it may emit more: the old logits
        #    would stay, and the next drafts be lost.)
        computes_logits = accepted <= self.max_depth + 2
        if computes_logits and self.mask_token is not None:
            # Masks in place of padding, and after each row's last token as many as are needed.
            tokens_BC = F.pad(tokens_BC, (0, self.levels - 1))
            places_C = counting(tokens_BC.shape[1], tokens_BC.device)
            tokens_BC = tokens_BC.where(places_C < lengths_B[:, None], self.mask_token)
        positions_K = None  # logits at all positions
        if not computes_logits:
            positions_K = torch.empty(0, dtype=torch.int64, device=tokens_BA.device)
        if state.is_full or not self._has_positions(state.longest + tokens_BC.shape[1]):
            uniform_BKV = torch.zeros_like(state.root_BKV)
            return AssistantState(
                state.cache, state.longest, uniform_BKV, state.nodes, is_full=True
            )
        # 3. Read what was accepted. The drafts of the round before may hold NaN, which a weight of
        #    0 does not remove, so they are erased.
        cache = state.cache
        cache.erase_next(min(state.nodes, cache.capacity - state.longest))
        output = self.model.engine.forward_chain(
            within(self.model, tokens_BC), state.longest, cache, (), positions_K
        )
        cache.advance(lengths_B)
        # 4. The logits after each row's last token, from which its root is expanded.
        root_BKV = state.root_BKV
        if computes_logits:
            drafted_BK = last_B1 + counting(self.levels, last_B1.device)
            root_BKV = output.logits_BNV.take_along_dim(drafted_BK[..., None], dim=1)
            root_BKV = root_BKV[..., : self.draft_vocab_size]
        # sync: right after the loop's own, which waited for everything before
        longest = int(cache.lengths_B.max())
        return AssistantState(cache, longest, root_BKV, state.nodes)

    def expand(
        self, state: AssistantState, tokens_BW: Tensor, parents_BW: Tensor
    ) -> tuple[Tensor, AssistantState]:
        batch, width = tokens_BW.shape
        if self.mask_token is not None:
            # The same logits for all nodes of a level, whatever stands before them.
            logits_B1V = state.root_BKV[:, state.level : state.level + 1]
            return logits_B1V, dataclasses.replace(state, level=state.level + 1)
        # The root has been read already: its logits are there, and no node is drafted yet (M = 0).
        if state.seen_BWM is None or state.depths_BM is None:
            nothing = torch.zeros(batch, 1, 0, dtype=torch.bool, device=tokens_BW.device)
            root = dataclasses.replace(state, seen_BWM=nothing, depths_BM=tokens_BW[:, :0])
            return state.root_BKV, root
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
        grown = dataclasses.replace(state, seen_BWM=seen_BWM, depths_BM=depths_BM)
        if state.is_full or not self._has_positions(state.longest + depths_BM.shape[1]):
            return torch.zeros_like(state.root_BKV[:, :1]).expand(-1, width, -1), grown
        nodes = NewNodes(within(self.model, tokens_BW), framed(seen_BWM), depths_BM)
        output = self.model.engine.forward_nodes(nodes, state.longest, state.cache, ())
        return output.logits_BNV[..., : self.draft_vocab_size], grown

    def target_tokens(self, draft_tokens: Tensor) -> Tensor:
        return draft_tokens
