"""Fused operations: the Triton kernels, interpreted on a CPU, against the torch operations that
they stand for."""

import pytest
import torch
from helpers import run_interpreted
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from headstart.heads.layers import fused
from headstart.heads.layers.fused_reference import Norm, Place, Projected

PROGRAM = """
import warnings
import torch
from headstart.heads.layers import fused_kernels
from headstart.heads.layers import fused_reference as fused
from headstart.heads.layers.fused_reference import Norm, Place, Projected
warnings.simplefilter("ignore")
torch.manual_seed(0)
def close(computed, expected, dtype):
    tolerance = 1e-6 if dtype == torch.float32 else 2e-3
    limits = {"rtol": tolerance, "atol": tolerance, "equal_nan": True}
    torch.testing.assert_close(computed.float(), expected.float(), **limits)
for dtype in (torch.float32, torch.float16):
    for batch, nodes, width in ((1, 1, 64), (2, 5, 96)):
        x, out = torch.randn(2, batch, nodes, width).to(dtype)
        norm = Norm(torch.randn(width).to(dtype), 1e-5)
        for other in (None, out):
            for computed, expected in zip(fused_kernels.add_norm(x, other, norm),
                                          fused.add_norm(x, other, norm), strict=True):
                close(computed, expected, dtype)
        gate, up = torch.randn(2, batch, nodes, 3 * width).to(dtype)
        close(fused_kernels.silu_product(gate, up), fused.silu_product(gate, up), dtype)
        for case in ((4, 2, 32, False, False), (4, 1, 96, True, True)):
            heads, groups, size, normed, finite = case
            widths = (heads * size, groups * size, groups * size)
            projected = Projected(*(torch.randn(batch, nodes, width).to(dtype) for width in widths))
            if finite:
                projected.key_BNX[0, 0, 3] = torch.nan
                projected.value_BNX[0, 0, 5] = torch.inf
            angles = torch.randn(2, 1, nodes, size).to(dtype)
            rotary = tuple(angles.expand(-1, batch, -1, -1))
            norms = None
            if normed:
                norms = tuple(Norm(torch.randn(size).to(dtype), 1e-6) for _ in range(2))
            slots = torch.randint(50, (batch, 1)) + torch.arange(nodes)
            written = []
            for operation in (fused.rotary_store, fused_kernels.rotary_store):
                block = torch.zeros(2, batch, groups, 60, size, dtype=dtype)
                query = operation(projected, rotary, Place(*block, slots, finite), norms)
                written.append((query, block))
            for computed, expected in zip(*written, strict=True):
                close(computed, expected, dtype)
    for rows, vocab in ((1, 5000), (6, 4096), (3, 77)):
        logits = torch.randn(1, rows, vocab).to(dtype) * 3
        logits += torch.arange(vocab) * 1e-5  # hardly any are equal
        logits[0, 0, vocab // 2 :] = -torch.inf
        values, indices = fused_kernels.top_log_probs(logits, 10)
        expected, _ = fused.top_log_probs(logits, 10)
        torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-4)
        chosen = logits.float().log_softmax(-1).gather(-1, indices)
        torch.testing.assert_close(chosen, expected, rtol=1e-4, atol=1e-4)
        assert all(len(set(row)) == 10 for row in indices[0].tolist())
for number in (torch.nan, torch.inf):
    logits = torch.randn(1, 2, 3000)
    logits[0, 1, 2500] = number
    values, indices = fused_kernels.top_log_probs(logits, 4)
    assert values[0, 0].isfinite().all() and (values[0, 1] == -torch.inf).all()
    assert indices.max() < 3000
"""


def test_kernels_compute_what_the_torch_operations_say():
    pytest.importorskip("triton")
    run_interpreted(PROGRAM)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_they_are_those_of_transformers_to_the_last_bit(dtype):
    """The same roundings in the same order, so that a fused layer's logits are the model's."""
    torch.manual_seed(0)
    batch, nodes, heads, groups, size = 2, 3, 4, 2, 16
    x, out = torch.randn(2, batch, nodes, 64).to(dtype)
    norm = LlamaRMSNorm(64, eps=1e-5).to(dtype)
    norm.weight.data.normal_()
    normed, total = fused.add_norm(x, out, Norm(norm.weight, 1e-5))
    assert torch.equal(total, x + out)
    assert torch.equal(normed, norm(x + out))

    projected = Projected(
        *(torch.randn(batch, nodes, count * size).to(dtype) for count in (heads, groups, groups))
    )
    rotary = tuple(torch.randn(batch, nodes, size).to(dtype) for _ in range(2))
    keys, values = torch.zeros(2, batch, groups, 9, size, dtype=dtype)
    slots = torch.tensor([[2, 3, 4], [5, 6, 7]])
    query = fused.rotary_store(projected, rotary, Place(keys, values, slots))
    split = [
        states.unflatten(-1, (-1, size)).transpose(1, 2) for states in vars(projected).values()
    ]
    wanted_query, wanted_key = apply_rotary_pos_emb(split[0], split[1], *rotary)
    assert torch.equal(query, wanted_query)
    assert torch.equal(keys[0, :, 2:5], wanted_key[0]) and torch.equal(
        keys[1, :, 5:8], wanted_key[1]
    )
    assert torch.equal(values[1, :, 5:8], split[2][1]) and not values[1, :, :5].any()
