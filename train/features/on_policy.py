"""On-policy distillation: a head learns from its own rejected drafts, which a recording holds.

In ordinary training-time test the draft that begins at position t reads the text: at step k the token at t + 1 + k,
judged by the target's distribution after it. A head that decodes reads its own drafts instead. Where a recorded round
began at t, steps from the first rejected draft on read what was drafted, and are judged by what the target computed
there. Steps beyond the recorded drafts are not judged. All other positions and steps are those of the text.

Letters in tensor names: B batch, T time, M rejected drafts, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from ...files import recorded_files
from ...heads.base import DraftHead
from ...inference.feature_cache import key_of
from ...inference.recorded_folder import RecordedDrafts, recorded_drafts, recorded_row
from ..data.batches import Batch, BatchDrafts

GOLDEN = 0.6180339887498949
"""Multiples of it, modulo 1, are spread evenly from 0 to 1: they choose a share of the rounds, always the same ones."""


def check_on_policy(head: DraftHead, name: str) -> None:
    """Refuse a head that reads no drafts of its own in training."""
    if head.test_steps < 2:
        raise ValueError(
            f"features.on_policy trains a head on its own drafts, which {name} with these options does not read in "
            "training; choose eagle3, or eagle or mtp with one layer and head.train_steps of at least 2, or "
            "features.on_policy 0"
        )


class RecordedRounds:
    """The rejected drafts of the sequences in a folder of recorded answers."""

    def __init__(self, folder: Path, max_length: int, share: float) -> None:
        """Read a folder for sequences that are cut to `max_length` tokens, and a share of the rounds with rejections.

        Raises:
            ValueError: a folder that was recorded without drafts.
        """
        self.share = share
        self._paths: dict[bytes, Path] = {}
        """By the key of a sequence, cut as in training, its file."""
        for path in recorded_files(folder):
            tokens = recorded_row(path)["input_ids"][:max_length]
            self._paths.setdefault(key_of(torch.tensor(tokens)), path)
        if not any(recorded_drafts(path) is not None for path in self._paths.values()):
            raise ValueError(
                f"features.on_policy finds no drafts in {str(folder)!r}; record them with lm.record(..., drafts=True) "
                "or --record_drafts, with a head that drafts, or choose features.on_policy 0"
            )

    def beside(self, read: Callable[[Batch, int], Batch]) -> Callable[[Batch, int], Batch]:
        """A function that reads a batch ahead as `read` does, and adds the rejected drafts of its sequences."""

        def both(batch: Batch, epoch: int) -> Batch:
            return self.add_to(read(batch, epoch))

        return both

    def add_to(self, batch: Batch) -> Batch:
        """The batch with the rejected drafts of its sequences, sorted by depth."""
        positions = []
        parts = []
        try:
            for row, place in batch.places():
                drafts = self._drafts_of(batch.tokens_BT[row, place])
                if drafts is not None:
                    parts.append(drafts)
                    positions.append(row * batch.tokens_BT.shape[1] + place.start + drafts.roots_M - 1)
        except ValueError as error:  # the step raises it, in the process that the user sees
            return replace(batch, failure=str(error))
        if not parts:
            return batch
        depths_M = torch.cat([part.depths_M for part in parts])
        order_M = depths_M.argsort(stable=True)
        scales = [part.scales_M for part in parts if part.scales_M is not None]
        together = BatchDrafts(
            positions_M=torch.cat(positions)[order_M],
            depths_M=depths_M[order_M],
            tokens_M=torch.cat([part.tokens_M for part in parts])[order_M],
            next_tokens_M=torch.cat([part.next_tokens_M for part in parts])[order_M],
            states_MD=torch.cat([part.states_MD for part in parts])[order_M],
            scales_M=torch.cat(scales)[order_M] if scales else None,
        )
        return replace(batch, drafts=together)

    def _drafts_of(self, tokens_T: torch.Tensor) -> RecordedDrafts | None:
        """The rejected drafts of a sequence, as far as it goes; None if none are known."""
        path = self._paths.get(key_of(tokens_T))
        drafts = None if path is None else recorded_drafts(path)
        if drafts is None:
            return None
        chosen_M = (drafts.roots_M + drafts.depths_M + 1 < len(tokens_T)) & (drafts.roots_M * GOLDEN % 1 < self.share)
        scales_M = None if drafts.scales_M is None else drafts.scales_M[chosen_M]
        return RecordedDrafts(drafts.numbers_4M[:, chosen_M], drafts.states_MD[chosen_M], scales_M)
