"""A drafter that counts on the host, for a target on another device.

Its trees are grown on the host, and each is uploaded in one transfer. The loop has on the host what
the drafter needs of a round, so that nothing waits for the device.

Letters in tensor names: B batch, A accepted, R selected rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..trees.sampling import RandomSampler
from ..trees.tree import DraftTree
from .base import BatchDrafter, DraftContext, NewestTokens, NoDraft, PrefillChunk
from .round import Round


class HostDrafter(BatchDrafter):
    """A drafter that reads no features and gets tensors on the host only."""

    def __init__(self, drafter: BatchDrafter) -> None:
        assert not drafter.feature_layers
        self.drafter = drafter
        self.parts = (drafter,)
        self.max_nodes = drafter.max_nodes
        self.kind = drafter.kind
        self._newest = NewestTokens()

    def begin(self, context: DraftContext) -> None:
        self._newest.begin(context)
        assert isinstance(context.sampler, RandomSampler)
        sampler = context.sampler.on_host()
        # Gumbel noise lies on the device: copying it would be a synchronization.
        self.drafter.begin(replace(context, sampler=sampler, gumbel=None))

    def prefill(self, chunk: PrefillChunk) -> None:
        on_host = PrefillChunk(
            chunk.tokens_BT.cpu(),
            chunk.next_tokens_BT.cpu(),
            chunk.features_BTF.cpu(),
            chunk.lengths_B.cpu(),
        )
        self._newest.prefill(on_host)
        self.drafter.prefill(on_host)

    def propose(self, roots_B: Tensor) -> DraftTree:
        tree = self.drafter.propose(torch.tensor(self._newest.tokens))
        return tree.to(roots_B.device)

    def observe(self, finished: Round) -> None:
        # The round as it would be on the host. Its tree is made of the roots alone: the drafter
        # reads nothing else of it but the roots and whether drafts were verified.
        roots = NoDraft().propose(torch.tensor(self._newest.tokens))
        self._newest.observe(finished)
        rows = [torch.tensor(tokens, dtype=torch.int64) for tokens in finished.tokens]
        emitted_BA = pad_sequence(rows, batch_first=True)
        verdict = replace(
            finished.verdict,
            path_BA=torch.zeros_like(emitted_BA),
            lengths_B=torch.tensor([len(tokens) for tokens in finished.tokens]),
            emitted_BA=emitted_BA,
            # it reads none
            features_BAF=torch.empty(*emitted_BA.shape, 0, dtype=torch.float32),
        )
        verified = replace(roots, max_depth=finished.verified.max_depth)
        self.drafter.observe(replace(finished, verified=verified, verdict=verdict))

    def select(self, rows_R: Tensor) -> None:
        on_host = rows_R.cpu()  # sync: when rows end
        self._newest.select(on_host)
        self.drafter.select(on_host)

    def replace(self, rows_R: Tensor, other: Self) -> None:
        on_host = rows_R.cpu()  # sync: when rows begin
        self._newest.replace(on_host, other._newest)
        self.drafter.replace(on_host, other.drafter)

    def fresh(self) -> Self:
        return type(self)(self.drafter.fresh())
