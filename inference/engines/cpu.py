"""Forwards of a decoder that runs as a whole in our CPU kernels.

Letters in tensor names: B batch, T time, N nodes, K chosen nodes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...heads.base import DraftHead
from ..cache.kv_cache import StateShape, TreeCache
from ..targets.prompt_inputs import in_one_dimension
from ..targets.target_model import TargetModel
from ..trees.tree import NewNodes
from . import cpu_kernels
from .base import Engine, TargetOutput
from .cpu_decoder import PackedDecoder, packed_head, renew_packed
from .model_engine import PADDING_ON_CPU, visible_slots

PIECE = 512
"""Tokens of a prompt that are read at once, as a chain of nodes."""


class CpuEngine(Engine):
    """A decoder that runs as a whole in the kernels, with its weights in their shortest format.

    The kernels hold a copy of the weights, and of those of heads.
    """

    copies_weights = True
    features_are_free = True
    least_padding = PADDING_ON_CPU

    def __init__(self, target: TargetModel, decoder: PackedDecoder) -> None:
        super().__init__(target)
        self.name = cpu_kernels.kernels_name()
        self.decoder = decoder

    @property
    def state_shapes(self) -> list[StateShape]:
        return self.decoder.state_shapes

    @property
    def lm_head(self) -> nn.Module:
        return self.decoder.lm_head

    def draft_head(self, head: DraftHead) -> DraftHead:
        return packed_head(head)

    def renew_head(self, head: DraftHead, force: bool = False) -> None:
        renew_packed(head, force)

    def logits(self, states: Tensor) -> Tensor:
        return self.decoder.logits(states)

    def read_chunk(
        self,
        tokens_BT: Tensor,
        longest: int,
        cache: TreeCache,
        layers: tuple[int, ...],
        kept: list[int],
    ) -> TargetOutput:
        # 1. The prompt in pieces, to limit memory. Where the rotary frequencies depend on the last
        # position of a forward (longrope), the whole prompt is one.
        size = tokens_BT.shape[1]
        segments = self.target.segments
        piece = size if segments is not None and segments.reads_whole(longest) else PIECE
        cache.reserve(size, max(longest - size, 0))

        # 2. Each piece is a chain of nodes after the tokens before it, committed at once.
        logits: list[Tensor] = []
        features: list[Tensor] = []
        for start, piece_BN in zip(
            range(0, size, piece), tokens_BT.split(piece, dim=1), strict=True
        ):
            nodes = piece_BN.shape[1]
            # Wanted tokens that lie in this piece: of kept = [100, 700] the second has [700 - 512].
            here_K = torch.tensor(
                [index - start for index in kept if start <= index < start + nodes]
            ).long()
            output = self.forward_nodes(
                NewNodes.of_chain(piece_BN), cache.prefilled, cache, layers, here_K
            )
            cache.advance_prompt(nodes)
            logits.append(output.logits_BNV)
            features.append(output.features_BNF)
        return TargetOutput(torch.cat(logits, dim=1), torch.cat(features, dim=1))

    def forward_nodes(
        self,
        nodes: NewNodes,
        longest: int,
        cache: TreeCache,
        layers: tuple[int, ...],
        kept_K: Tensor | None = None,
    ) -> TargetOutput:
        cache.reserve(nodes.tokens_BN.shape[1], longest, nodes.cached)
        positions_BN, visible = visible_slots(
            self.target, nodes, cache.lengths_B, cache.bucketed_length
        )
        # After a prompt with images, positions are not indices.
        rotary_BN = in_one_dimension(positions_BN, cache.position_offsets)
        logits_BKV, features_BNF = self.decoder(
            nodes.tokens_BN, rotary_BN, visible, cache, layers, kept_K
        )
        return TargetOutput(logits_BKV, features_BNF)
