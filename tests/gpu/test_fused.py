"""The fused kernels against the torch operations that they stand for, on a GPU; tests/heads/layers
interprets them."""

import pytest
import torch
from helpers import DEVICE

from headstart.heads.layers import fused
from headstart.heads.layers.fused_reference import Norm, Place, Projected

pytestmark = pytest.mark.gpu
if DEVICE != "cuda":
    pytest.skip("the kernels are for CUDA", allow_module_level=True)

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
"""Two roundings."""


def on_both(operation, *inputs):
    """What an operation returns on the CPU, and on the GPU."""

    def moved(value):
        if isinstance(value, torch.Tensor):
            return value.cuda()
        if isinstance(value, tuple):
            return tuple(map(moved, value))
        if hasattr(value, "__dataclass_fields__"):
            return type(value)(**{name: moved(field) for name, field in vars(value).items()})
        return value

    return operation(*inputs), operation(*map(moved, inputs))


def check_close(expected, computed, dtype):
    torch.testing.assert_close(
        computed.cpu(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype], equal_nan=True
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("batch", "nodes", "width"), [(1, 1, 4096), (2, 60, 576), (1, 8, 14336)])
def test_norm_and_activation(dtype, batch, nodes, width):
    torch.manual_seed(0)
    x, out = torch.randn(2, batch, nodes, width).to(dtype)
    norm = Norm(torch.randn(width).to(dtype), 1e-5)
    for added in (None, out):
        expected, computed = on_both(fused.add_norm, x, added, norm)
        check_close(expected[0], computed[0], dtype)
        assert torch.equal(computed[1].cpu(), expected[1])
    check_close(*on_both(fused.silu_product, x, out), dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("batch", "nodes", "heads", "groups", "size"), [(1, 1, 32, 8, 128), (2, 60, 9, 3, 64)]
)
def test_rotary_and_store(dtype, normed, batch, nodes, heads, groups, size):
    torch.manual_seed(0)
    projected = Projected(
        *(torch.randn(batch, nodes, count * size).to(dtype) for count in (heads, groups, groups))
    )
    projected.key_BNX[0, 0, 3] = torch.nan
    angles = torch.rand(batch, nodes, size)
    rotary = (angles.cos().to(dtype), angles.sin().to(dtype))
    norms = tuple(Norm(torch.randn(size).to(dtype), 1e-6) for _ in range(2)) if normed else None
    slots = torch.randint(300, (batch, 1)) + torch.arange(nodes)

    def run(projected, rotary, slots, norms):
        block = torch.zeros(2, batch, groups, 400, size, dtype=dtype, device=slots.device)
        query = fused.rotary_store(
            projected, rotary, Place(block[0], block[1], slots, finite=True), norms
        )
        return query, block

    expected, computed = on_both(run, projected, rotary, slots, norms)
    for wanted, found in zip(expected, computed, strict=True):
        check_close(wanted, found, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "vocab"), [(1, 32000), (10, 32000), (3, 77), (4, 151936)])
def test_top_log_probs(dtype, rows, vocab):
    torch.manual_seed(0)
    logits = torch.randn(1, rows, vocab).to(dtype) * 3
    logits[0, 0, vocab // 2] = torch.inf if rows == 3 else 20
    (expected, _), (values, indices) = on_both(fused.top_log_probs, logits, 10)
    torch.testing.assert_close(values.cpu(), expected, rtol=1e-4, atol=1e-4)
    chosen = logits.float().log_softmax(-1).gather(-1, indices.cpu()).nan_to_num(nan=-torch.inf)
    torch.testing.assert_close(chosen, expected, rtol=1e-4, atol=1e-4)
    assert all(len(set(row)) == 10 for row in indices[0].tolist())
