"""What a tree is grown from: children that are drawn."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from headstart.inference.drafters.head_drafter import sample_children
from headstart.inference.logits import RandomSampler


@pytest.mark.parametrize("left", [0.75, 0.0])
def test_what_processors_leave_to_other_tokens_is_not_drawn_from(left):
    """Else the residual of a rejected draft would be taken from what was never drawn."""
    logits = torch.randn(1, 1, 4, dtype=torch.float64)
    head = SimpleNamespace(
        draft_vocab_size=4, target_tokens=lambda tokens: 3 * tokens + 1, target=SimpleNamespace(vocab_size=12)
    )  # the draft's tokens are 1, 4, 7 and 10

    def probs_of(whole_BWV):
        probs = left * whole_BWV.softmax(-1)
        probs[..., [0, 2]] = (1 - left) / 2
        return probs

    tokens_BWR, drawn_from_BWV = sample_children(head, logits, 3, 2, probs_of, RandomSampler())
    assert tokens_BWR.shape == (1, 3, 2) and set(tokens_BWR.flatten().tolist()) <= {1, 4, 7, 10}
    expected = torch.zeros(1, 3, 12, dtype=torch.float64)
    expected[..., [1, 4, 7, 10]] = logits.softmax(-1) if left else 0.0
    assert torch.allclose(drawn_from_BWV, expected)
