"""Drafters that count on the host, for a target on another device: drafts are grown on the host and uploaded at once.

What they need of a round the loop knows anyway, so they make nobody wait.
"""

from __future__ import annotations

import copy
import dataclasses

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..logits import RandomSampler
from ..tree import DraftTree
from .base import DraftContext, Drafter, PrefillChunk, StepResult
from .head_drafter import NoDraft


class HostDrafter(Drafter):
    """A drafter that reads no features, kept on the host."""

    def __init__(self, drafter: Drafter) -> None:
        """Hold a drafter."""
        self.drafter = drafter
        self.max_nodes, self.kind = drafter.max_nodes, drafter.kind
        self.newest: list[int] = []
        """Each row's last token."""

    def __copy__(self) -> HostDrafter:
        """One for other rows."""
        return HostDrafter(copy.copy(self.drafter))

    def begin(self, start: DraftContext) -> None:
        """With draws on the host."""
        assert isinstance(start.draw, RandomSampler)
        self.newest = [0] * start.batch_size
        # The numbers of places are on the device, of which the host would have to wait for all.
        self.drafter.begin(dataclasses.replace(start, draw=start.draw.on_host(), gumbel=None))

    def read(self, passage: PrefillChunk) -> None:
        """A part of the prompts."""
        here = PrefillChunk(*(tensor.cpu() for tensor in vars(passage).values()))
        self.newest = here.newest(self.newest)
        self.drafter.read(here)

    def propose(self, roots_B: Tensor) -> DraftTree:
        """Grown on the host."""
        return self.drafter.propose(torch.tensor(self.newest)).to(roots_B.device)

    def observe(self, finished: StepResult) -> None:
        """The same on the host."""
        emitted_BA = pad_sequence([torch.tensor(tokens) for tokens in finished.tokens], batch_first=True)
        lengths_B = torch.tensor([len(tokens) for tokens in finished.tokens])
        roots = NoDraft().propose(torch.tensor(self.newest))
        here = dataclasses.replace(
            finished,
            tree=dataclasses.replace(roots, max_depth=finished.tree.max_depth),
            verdict=dataclasses.replace(finished.verdict, lengths_B=lengths_B),
            emitted_BA=emitted_BA,
            features_BAF=torch.empty(*emitted_BA.shape, 0),
        )
        self.newest = [tokens[-1] for tokens in finished.tokens]
        self.drafter.observe(here)

    def select(self, rows_R: Tensor) -> None:
        """These rows only."""
        here_R = rows_R.cpu()
        self.newest = [self.newest[row] for row in here_R.tolist()]
        self.drafter.select(here_R)

    def replace(self, rows_R: Tensor, other: Drafter) -> None:
        """Take over other rows."""
        assert isinstance(other, HostDrafter)
        here_R = rows_R.cpu()
        for row, newest in zip(here_R.tolist(), other.newest, strict=True):
            self.newest[row] = newest
        self.drafter.replace(here_R, other.drafter)
