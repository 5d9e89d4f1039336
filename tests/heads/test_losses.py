"""Chunked cross-entropy: plain cross-entropy, without the [positions x vocabulary] tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headstart.heads.losses import linear_cross_entropy

N, D, V = 37, 6, 29


def build(labels_from: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, nn.Linear, Tensor]:
    """States that want gradients, an LM head, and labels; from -1 on, some rows have none."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, D, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()
    lm_head = nn.Linear(D, V, bias=False)
    lm_head.weight.data = torch.randn(V, D, dtype=torch.float64, generator=generator).to(dtype)
    return hidden, lm_head, torch.randint(labels_from, V, (N,), generator=generator)


@pytest.mark.parametrize("chunk", [1, 4, N - 1, N, N + 1, 1024])
@pytest.mark.parametrize("labels_from", [0, -1], ids=["labelled", "some ignored"])
def test_values_and_gradients_are_those_of_plain_cross_entropy(chunk: int, labels_from: int) -> None:
    hidden, lm_head, labels = build(labels_from)
    labels[3] = labels_from
    loss, _ = linear_cross_entropy(hidden, lm_head, labels, chunk=chunk)
    expected = F.cross_entropy(lm_head(hidden), labels, ignore_index=-1, reduction="sum")
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    ours = torch.autograd.grad(3 * loss, [hidden, lm_head.weight])
    plain = torch.autograd.grad(3 * expected, [hidden, lm_head.weight])
    for found, wanted in zip(ours, plain, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)
    assert (ours[0][labels == -1] == 0).all()


@pytest.mark.parametrize("chunk", [5, 1024])
@pytest.mark.parametrize("ranks", [1, 7, V, V + 3])
def test_hits_count_how_often_the_label_is_the_ith_best(chunk: int, ranks: int) -> None:
    hidden, lm_head, labels = build(-1)
    _, hits = linear_cross_entropy(hidden, lm_head, labels, ranks=ranks, chunk=chunk)
    expected = [0] * (V + 3)
    for logits, label in zip(lm_head(hidden), labels.tolist(), strict=True):
        if label != -1:
            expected[int((logits > logits[label]).sum())] += 1
    assert hits.dtype == torch.int64
    assert hits.tolist() == expected[:ranks]


def test_no_positions_give_no_loss_and_zero_gradients() -> None:
    """A step of which a head sees no position must still reach its parameters: DDP waits for every gradient."""
    _, lm_head, _ = build()
    hidden = torch.empty(0, D, dtype=torch.float64, requires_grad=True)
    loss, hits = linear_cross_entropy(hidden, lm_head, torch.empty(0, dtype=torch.int64), ranks=3)
    loss.backward()
    assert loss == 0 and hits.tolist() == [0, 0, 0]
    assert lm_head.weight.grad is not None and not lm_head.weight.grad.any()


@pytest.mark.parametrize(
    ("dtype", "wanted"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64,) * 2,
    ],
    ids=str,
)
def test_the_loss_is_at_least_float32(dtype: torch.dtype, wanted: torch.dtype) -> None:
    """And summed there: a loss of several hundred has no digits left in bfloat16."""
    hidden, lm_head, labels = build(dtype=dtype)
    loss, _ = linear_cross_entropy(hidden, lm_head, labels, chunk=8)
    assert loss.dtype == wanted
    expected = F.cross_entropy(lm_head(hidden).double(), labels, reduction="sum")
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation returns, backward included."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = function(*arguments, **(options or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return result


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_logits_live_for_one_chunk_only(dtype: torch.dtype) -> None:
    """No operation makes logits of more than a chunk, and nothing that the forward saves has a vocabulary's width."""
    positions, width, vocabulary, chunk = 64, 4, 300, 8
    hidden = torch.randn(positions, width, dtype=dtype, requires_grad=True)
    lm_head = nn.Linear(width, vocabulary, bias=False).to(dtype)
    labels = torch.randint(vocabulary, (positions,))
    saved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    with Largest() as largest:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss, _ = linear_cross_entropy(hidden, lm_head, labels, chunk=chunk)
        loss.backward()
    assert hidden.grad is not None and lm_head.weight.grad is not None
    assert chunk * vocabulary <= largest.elements < 2 * chunk * vocabulary
    assert sum(saved) < positions * vocabulary / 2, f"saved for the backward: {saved}"
