"""What a head carries whose layers read their own outputs: EAGLE's of every version, and a model cut out of the target.

`observe` runs the layers on the committed tokens and keeps the last output, from which the root's children are drafted;
each `expand` below runs them on a frontier, whose nodes see the committed tokens and their own paths.

Letters in tensor names: B batch, A accepted tokens, W width of the tree's frontier, N nodes, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..base import DraftState, TargetModules
from .decoder_layer import DraftCache, KVView


@dataclass(frozen=True)
class DraftTreeState(DraftState):
    """The KV cache, and the states from which the next drafts go on."""

    cache: DraftCache
    lengths_B: Tensor
    """Committed tokens of each row."""
    nodes: int
    """Nodes in the cache since the last `observe`."""
    hidden_BWD: Tensor
    """The frontier's outputs: at the root the last committed one."""
    seen_BWN: Tensor
    """The nodes in the cache that lie on the path to each frontier node."""

    @classmethod
    def empty(
        cls, modules: TargetModules, like: Tensor, size: int, cache: DraftCache, max_depth: int, nodes: int
    ) -> DraftTreeState:
        """Nothing committed.

        Args:
            modules: the target's embedding and LM head.
            like: whose device and dtype the states have.
            size: their width.
            cache: an empty one.
            max_depth: expansions of a round, at most.
            nodes: nodes that a round expands, at most.
        """
        batch_size = cache.batch_size
        return cls(
            modules,
            depth=0,
            max_depth=max_depth,
            cache=cache,
            lengths_B=torch.zeros(batch_size, dtype=torch.int64, device=like.device),
            nodes=0,
            hidden_BWD=torch.zeros(batch_size, 1, size, dtype=like.dtype, device=like.device),
            seen_BWN=torch.zeros(batch_size, 1, nodes, dtype=torch.bool, device=like.device),
        )

    def committing(self, accepted: int) -> tuple[Tensor, KVView]:
        """Where so many tokens of every row lie that are to be committed: positions_BA, and what their layers read."""
        positions_BA = self.lengths_B[:, None] + torch.arange(accepted, device=self.lengths_B.device)
        return positions_BA, self.cache.commit(self.lengths_B, accepted)

    def committed(self, out_BAD: Tensor, lengths_B: Tensor) -> DraftTreeState:
        """After the layers ran on them: row b's first `lengths_B[b]` count, and guesses are forgotten."""
        last_B11 = (lengths_B - 1).clamp(min=0)[:, None, None]
        return replace(
            self,
            depth=0,
            lengths_B=self.lengths_B + lengths_B,
            nodes=0,
            hidden_BWD=out_BAD.gather(1, last_B11.expand(-1, 1, out_BAD.shape[-1])),
            seen_BWN=torch.zeros_like(self.seen_BWN[:, :1]),
        )

    def hidden_of(self, parents_BW: Tensor) -> Tensor:
        """The outputs of a new frontier's parents."""
        return _of_parents(self.hidden_BWD, parents_BW)

    def below(self, parents_BW: Tensor) -> tuple[Tensor, KVView, DraftTreeState]:
        """A frontier below this one: positions_BW, what its layers read, and the state that lacks their outputs."""
        width = parents_BW.shape[1]
        place_N = torch.arange(self.seen_BWN.shape[-1], device=parents_BW.device)
        myself_WN = place_N == self.nodes + torch.arange(width, device=parents_BW.device)[:, None]
        seen_BWN = _of_parents(self.seen_BWN, parents_BW) | myself_WN
        positions_BW = (self.lengths_B[:, None] + self.depth - 1).expand_as(parents_BW)
        memory = self.cache.draft(self.lengths_B, self.nodes, seen_BWN)
        return positions_BW, memory, replace(self, nodes=self.nodes + width, seen_BWN=seen_BWN)


def _of_parents(values_BWX: Tensor, parents_BW: Tensor) -> Tensor:
    return values_BWX.gather(1, parents_BW[:, :, None].expand(-1, -1, values_BWX.shape[-1]))
