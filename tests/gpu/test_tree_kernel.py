"""The tree kernel against a softmax over all slots, on a GPU; tests/inference/engines interprets it on a CPU."""

import pytest
import torch
from helpers import DEVICE, attended_slots

pytestmark = pytest.mark.gpu
if DEVICE != "cuda":
    pytest.skip("the kernel is for CUDA", allow_module_level=True)

from headstart.inference.engines.tree_kernel import tree_attention  # noqa: E402 - imports Triton

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [64, 96, 128, 256])
@pytest.mark.parametrize(("batch", "heads", "groups"), [(1, 32, 8), (3, 8, 8)])
@pytest.mark.parametrize(("nodes", "uncommitted"), [(1, 1), (8, 8), (60, 60), (5, 9)])
@pytest.mark.parametrize("window", [None, 300])
def test_it_is_the_softmax_over_what_a_node_sees(dtype, size, batch, heads, groups, nodes, uncommitted, window):
    case = attended_slots(batch, heads, groups, nodes, uncommitted, size, 2000, window, dtype)
    given = [tensor.cuda() if isinstance(tensor, torch.Tensor) else tensor for tensor in case.given]
    found = tree_attention(*given).cpu()
    assert found.shape == (batch, nodes, heads, size) and found.dtype == dtype
    torch.testing.assert_close(found.double(), case.expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_nan_stays_nan():
    case = attended_slots(1, 8, 2, 4, 4, 64, 200, None, torch.float32)
    query, *rest = [tensor.cuda() if isinstance(tensor, torch.Tensor) else tensor for tensor in case.given]
    query[0, 3, 2] = torch.nan
    found = tree_attention(query, *rest)
    assert found[0, 2, 3].isnan().all() and found.isnan().sum() == 64
