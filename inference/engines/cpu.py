"""Forwards in our CPU kernels: the whole decoder if they support its layers, else linear layers.

Letters in tensor names: B batch, T time, N nodes, K chosen nodes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...heads.base import DraftHead
from ..cache.kv_cache import StateShape, TreeCache
from ..targets.changes import has_hooks
from ..targets.prompt_inputs import in_one_dimension
from ..targets.target_model import TargetModel
from ..trees.tree import DraftTree, NewNodes
from . import cpu_kernels
from .base import Engine, TargetOutput
from .cpu_decoder import PackedDecoder, packed_decoder, packed_head, renew_packed
from .model_engine import PADDING_ON_CPU, ModelEngine, read_by_model, visible_slots

PIECE = 512
"""Tokens of a prompt that are read at once, as a chain of nodes."""


def cpu_engine(target: TargetModel, kind: type[ModelEngine]) -> Engine:
    """Choose the engine for a CPU: our kernels, as far as they know the model and can be built.

        all layers in the kernels        CpuEngine
        linear layers in the kernels     `kind`, with a packed copy of the model
        no compiler, or hooks            `kind`

    Args:
        target: the target.
        kind: the engine for models of its kind. The kernels' decoder may only replace
            `ModelEngine`, since its subclasses read texts in another way.
    """
    # Kernels would not call the user's hooks.
    if cpu_kernels.library() is None or has_hooks(target.model):
        return kind(target)
    decoder = packed_decoder(target.model, target.layer_kinds) if kind is ModelEngine else None
    return kind(target, packed=True) if decoder is None else CpuEngine(target, decoder)


class CpuEngine(Engine):
    """A decoder that runs as a whole in the kernels, with its weights in their shortest format.

    The kernels hold a copy of the weights, and of those of heads.
    """

    copies_weights = True
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

    @property
    def features_are_free(self) -> bool:
        return True

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

    def read_prompt(
        self,
        tokens_1T: Tensor,
        cache: TreeCache,
        layers: tuple[int, ...],
        kept: list[int],
        inputs: dict[str, Any],
    ) -> TargetOutput:
        return read_by_model(self.target, self.target.model, tokens_1T, cache, layers, kept, inputs)

    def forward_tree(
        self, tree: DraftTree, longest: int, cache: TreeCache, layers: tuple[int, ...]
    ) -> TargetOutput:
        return self.forward_nodes(NewNodes.of_tree(tree), longest, cache, layers)

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
