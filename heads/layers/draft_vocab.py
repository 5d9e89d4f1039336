"""The draft vocabulary: the target tokens that a head can draft.

They are the most frequent tokens of its training data.

A draft id is an index into `vocabulary_V`, the sorted target ids.
"""

from __future__ import annotations

import torch
from torch import Tensor

RIDGE = 1e-3
"""Penalty of the map in `with_trained_rows`, as a share of the mean variance along a direction."""


def most_frequent(token_counts_V: Tensor, size: int, head: str) -> Tensor:
    """Return the `size` most frequent tokens as sorted target ids.

    A ValueError is raised if the data has fewer different tokens. Of tokens that are as frequent,
    the lower ids come first: tokenizers number tokens as they merge them, the most frequent ones
    first.
    """
    # A token that never occurs would get no training.
    seen = int((token_counts_V > 0).sum())
    if seen < size:
        raise ValueError(
            f"{head} draft_vocab_size {size} is larger than the {seen} different answer tokens of"
            " the training data; choose a smaller one, or null for the whole vocabulary"
        )
    return token_counts_V.sort(descending=True, stable=True).indices[:size].sort().values


def favouring(token_counts_V: Tensor, vocabulary_V: Tensor) -> Tensor:
    """Return counts that break ties in favour of the tokens of an earlier draft vocabulary.

    Every token counts for something: a draft vocabulary may be larger than the earlier one and the
    data together.
    """
    # Counts are whole numbers, so less than 1 changes no order but that of ties.
    favoured_V = token_counts_V.double() + 0.25
    favoured_V[vocabulary_V] += 0.5
    return favoured_V


def check_ids(ids_V: Tensor, vocab_size: int, name: str) -> None:
    """Refuse a draft vocabulary that does not consist of distinct, sorted target ids.

    The ValueError names its tensor.
    """
    # Each id by itself: differences of extreme numbers wrap around.
    in_range = bool(((ids_V >= 0) & (ids_V < vocab_size)).all())
    if not in_range or not bool((ids_V.diff() > 0).all()):
        raise ValueError(f"{name} does not lead to different, sorted target ids below {vocab_size}")


def draft_ids(tokens: Tensor, vocabulary_V: Tensor | None) -> Tensor:
    """Convert target ids to draft ids, -1 outside the draft vocabulary.

    If `vocabulary_V` is None, the draft vocabulary has all tokens.
    """
    if vocabulary_V is None:
        return tokens
    # Vocabulary [2, 5, 7]: token 5 is found at 1, and so is token 4, which is not there.
    ids = torch.searchsorted(vocabulary_V, tokens).clamp(max=len(vocabulary_V) - 1)
    return torch.where(vocabulary_V[ids] == tokens, ids, -1)


def with_trained_rows(rows_VD: Tensor, common_V: Tensor, trained_KD: Tensor) -> Tensor:
    """Extend to all rows of an output layer what training has changed in K of them.

    Another head has trained the K rows. Nothing has lowered the logit of a token that was never
    trained where that token is wrong. Most are rare, and would be drafted in the place of likely
    ones. So the change of a row is estimated as a linear function of the row, fitted to the K
    common ones (ridge regression).

    Args:
        rows_VD: as a new head begins.
        common_V: which of the tokens the other head drafts, too.
        trained_KD: its rows of these, in their order.

    Returns:
        All rows [V, D]: the trained ones unchanged, the others changed by that function.
    """
    # 1. The common rows are the trained ones.
    extended_VD = rows_VD.clone()
    extended_VD[common_V] = trained_KD.to(rows_VD)
    if common_V.all() or not common_V.any():
        return extended_VD

    # 2. Fit change = mean change + (row - centre) map to them, by ridge regression.
    before_KD = rows_VD[common_V].float()
    change_KD = trained_KD.float() - before_KD
    centre_D = before_KD.mean(0)
    mean_change_D = change_KD.mean(0)
    centred_KD = before_KD - centre_D
    products_DD = centred_KD.T @ centred_KD
    # a single row has no variance
    products_DD.diagonal().add_(RIDGE * products_DD.diagonal().mean() + 1e-6)
    map_DD = torch.linalg.solve(products_DD, centred_KD.T @ (change_KD - mean_change_D))

    # 3. Apply it to the U other rows.
    others_UD = rows_VD[~common_V].float()
    changed_UD = others_UD + mean_change_D + (others_UD - centre_D) @ map_DD
    extended_VD[~common_V] = changed_UD.to(rows_VD)
    return extended_VD
