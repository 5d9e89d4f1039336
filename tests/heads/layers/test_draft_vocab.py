"""Rows of an output layer for tokens that an earlier head could not draft."""

from __future__ import annotations

import pytest
import torch

from headstart.heads.layers.draft_vocab import with_trained_rows

TOKENS, WIDTH = 60, 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_training_did_to_rows_is_done_to_those_that_it_never_saw(dtype: torch.dtype) -> None:
    """Training has lowered some tokens by a direction of their rows, and moved all: the others
    follow."""
    torch.manual_seed(0)
    rows_VD = torch.randn(TOKENS, WIDTH)
    lowering_DD = torch.eye(WIDTH) - 0.9 * torch.outer(torch.eye(WIDTH)[0], torch.eye(WIDTH)[2])
    after_VD = rows_VD @ lowering_DD + torch.randn(WIDTH)
    common_V = torch.arange(TOKENS) < 40
    found_VD = with_trained_rows(rows_VD.to(dtype), common_V, after_VD[common_V])
    assert found_VD.dtype == dtype
    assert torch.equal(found_VD[common_V], after_VD[common_V].to(dtype))
    error = (found_VD.float() - after_VD)[~common_V].abs().max()
    assert error < (0.01 if dtype == torch.float32 else 0.05)


def test_rows_that_tell_nothing_of_trained_ones_begin_in_their_midst() -> None:
    """As where a new head begins at random: what it would have of its own is noise."""
    torch.manual_seed(0)
    rows_VD = torch.randn(3000, WIDTH)
    trained_KD = torch.randn(2900, WIDTH) + 3
    found_VD = with_trained_rows(rows_VD, torch.arange(3000) < 2900, trained_KD)
    assert torch.allclose(found_VD[2900:], trained_KD.mean(0).expand(100, -1), atol=0.3)


def test_few_common_tokens_move_all_rows_together() -> None:
    """One tells no more, and without any the rows stay."""
    rows_VD = torch.randn(5, WIDTH)
    common_V = torch.arange(5) == 1
    found_VD = with_trained_rows(rows_VD, common_V, rows_VD[1:2] + 2)
    assert torch.allclose(found_VD, rows_VD + 2, atol=1e-5)
    assert torch.equal(with_trained_rows(rows_VD, common_V & False, rows_VD[:0]), rows_VD)
