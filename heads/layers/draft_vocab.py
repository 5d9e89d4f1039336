"""The draft vocabulary: the target tokens that a head can draft, the most frequent ones of its training data.

A draft id is an index into `vocabulary_V`, the sorted target ids.
"""

from __future__ import annotations

import torch
from torch import Tensor


def most_frequent(token_counts_V: Tensor, size: int, head: str) -> Tensor:
    """The `size` most frequent tokens as sorted target ids, with a ValueError if the data has fewer.

    Of tokens that are as frequent, the lower ids come first: tokenizers number tokens as they merge them, the most
    frequent ones first.
    """
    seen = int((token_counts_V > 0).sum())
    if seen < size:
        raise ValueError(
            f"{head} draft_vocab_size {size} is larger than the {seen} different answer tokens of the training data; "
            "choose a smaller one, or null for the whole vocabulary"
        )
    return token_counts_V.sort(descending=True, stable=True).indices[:size].sort().values


def favouring(token_counts_V: Tensor, vocabulary_V: Tensor) -> Tensor:
    """Counts by which, of two tokens that are as frequent, the one of an earlier draft vocabulary is chosen.

    Every token counts for something: a draft vocabulary may be larger than the earlier one and the data together.
    """
    favoured_V = token_counts_V.double() + 0.25
    favoured_V[vocabulary_V] += 0.5
    return favoured_V


def check_ids(ids_V: Tensor, vocab_size: int, name: str) -> None:
    """Refuse a draft vocabulary that is not made of sorted target ids, with a ValueError that names its tensor."""
    # Each id by itself: differences of extreme numbers wrap around.
    in_range = bool(((ids_V >= 0) & (ids_V < vocab_size)).all())
    if not in_range or not bool((ids_V.diff() > 0).all()):
        raise ValueError(f"{name} does not lead to different, sorted target ids below {vocab_size}")


def draft_ids(tokens: Tensor, vocabulary_V: Tensor | None) -> Tensor:
    """Target ids to draft ids, -1 outside the draft vocabulary; None for a draft vocabulary of all tokens."""
    if vocabulary_V is None:
        return tokens
    ids = torch.searchsorted(vocabulary_V, tokens).clamp(max=len(vocabulary_V) - 1)
    return torch.where(vocabulary_V[ids] == tokens, ids, -1)
