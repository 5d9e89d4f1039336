"""Losses over a vocabulary, computed in chunks of positions.

No [positions x vocabulary] tensor outlives its chunk: the forward of a chunk is run again in the backward.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .base import wide


def linear_cross_entropy(
    hidden_ND: Tensor,
    lm_head: Callable[[Tensor], Tensor],
    labels_N: Tensor,
    ranks: int = 1,
    chunk: int = 1024,
) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy of `lm_head(hidden)` against labels, and how often the label is the i-th best.

    Args:
        hidden_ND: states, one row a position.
        lm_head: states to logits.
        labels_N: the true class of each row; -1 where the head cannot say it: no loss there, and never a hit.
        ranks: how many of the best classes are counted.
        chunk: positions whose logits exist at the same time.

    Returns:
        The scalar sum in at least float32, and int64 hits_I of length `ranks`.
    """
    loss = hidden_ND.new_zeros((), dtype=torch.promote_types(hidden_ND.dtype, torch.float32))
    hits_I = torch.zeros(ranks, dtype=torch.int64, device=hidden_ND.device)

    def of_chunk(hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = wide(lm_head(hidden))
        best = logits.detach().topk(min(ranks, logits.shape[-1]), dim=-1).indices
        hits = F.pad((best == labels[:, None]).sum(0), (0, ranks - best.shape[-1]))
        return F.cross_entropy(logits, labels, ignore_index=-1, reduction="sum"), hits

    for hidden, labels in zip(hidden_ND.split(chunk), labels_N.split(chunk), strict=True):
        chunk_loss, chunk_hits = checkpoint(of_chunk, hidden, labels, use_reentrant=False)
        loss = loss + chunk_loss
        hits_I += chunk_hits
    return loss, hits_I
