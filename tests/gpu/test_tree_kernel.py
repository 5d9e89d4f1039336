"""The tree kernel against a softmax over all slots, on a GPU; tests/heads/layers interprets it on a
CPU."""

import dataclasses

import pytest
import torch
from helpers import DEVICE, attended_slots

pytestmark = pytest.mark.gpu
if DEVICE != "cuda":
    pytest.skip("the kernel is for CUDA", allow_module_level=True)

from headstart.heads.layers.tree_kernel import tree_attention  # noqa: E402 - imports Triton

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [64, 96, 128, 256])
@pytest.mark.parametrize(("batch", "heads", "groups"), [(1, 32, 8), (3, 8, 8)])
@pytest.mark.parametrize(("nodes", "uncommitted"), [(1, 1), (8, 8), (60, 60), (5, 9)])
@pytest.mark.parametrize("window", [None, 300])
def test_it_is_the_softmax_over_what_a_node_sees(
    dtype, size, batch, heads, groups, nodes, uncommitted, window
):
    case = attended_slots(batch, heads, groups, nodes, uncommitted, size, 2000, window, dtype)
    found = tree_attention(*case.on("cuda")).cpu()
    assert found.shape == (batch, nodes, heads, size) and found.dtype == dtype
    torch.testing.assert_close(
        found.double(), case.expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("nodes", "uncommitted"), [(1, 1), (10, 61)])
def test_nodes_may_lie_before_the_text(dtype, nodes, uncommitted):
    case = attended_slots(2, 32, 8, nodes, uncommitted, 128, 16500, None, dtype, nodes_first=True)
    found = tree_attention(*case.on("cuda")).cpu()
    torch.testing.assert_close(
        found.double(), case.expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("nodes_first", [False, True])
def test_nothing_that_a_node_does_not_see_reaches_it(nodes_first):
    """Slots after the text and the nodes hold NaN."""
    case = attended_slots(2, 8, 2, 9, 9, 64, 700, None, torch.float32, nodes_first)
    query, keys, values, slots = case.on("cuda")
    for row, length in enumerate(slots.lengths_B.tolist()):
        for states in (keys, values):
            states[row, :, length + 9 :] = torch.nan
    found = tree_attention(query, keys, values, slots).cpu()
    torch.testing.assert_close(found.double(), case.expected, rtol=2e-5, atol=2e-5)


def test_nan_stays_nan():
    case = attended_slots(1, 8, 2, 4, 4, 64, 200, None, torch.float32)
    query, *rest = case.on("cuda")
    query[0, 3, 2] = torch.nan
    found = tree_attention(query, *rest)
    assert found[0, 2, 3].isnan().all() and found.isnan().sum() == 64


def test_a_row_without_text_sees_its_nodes_alone():
    case = attended_slots(1, 8, 2, 4, 4, 64, 200, None, torch.float32)
    query, keys, values, slots = case.on("cuda")
    slots = dataclasses.replace(slots, lengths_B=torch.zeros_like(slots.lengths_B))
    found = tree_attention(query, keys, values, slots)
    assert found.isfinite().all()
    torch.testing.assert_close(found[0, 0], values[0, :, 0].repeat_interleave(4, 0))
