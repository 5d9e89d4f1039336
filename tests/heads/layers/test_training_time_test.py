"""Attention of training-time test: softmax written out, by every kernel, packed rows or not;
gradients too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import LargestTensor
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import flex_attention as flex
from torch.utils.checkpoint import checkpoint

from headstart.heads.layers import training_time_test as step_attention
from headstart.heads.layers.training_time_test import (
    TrainingTimeTest,
    attend_step,
    by_chunks,
    by_flex,
    causal_blocks,
)

HEADS, GROUPS, SIZE, TIME = 4, 2, 16, 150
"""More positions than a block of flex_attention's mask."""
PACKED = torch.tensor([[1] * 40 + [2] * 1 + [3] * 109, [1] * 150])
Kernel = Callable[[Tensor, list[Tensor], list[Tensor], TrainingTimeTest], Tensor]


def test_a_window_makes_no_scores_beyond_it() -> None:
    """Time and memory of a long text grow with it, not with its square."""
    states = random_states(2)
    with LargestTensor(torch.ops.aten.bmm.default) as largest:
        attend_step(*states, TrainingTimeTest(1, window=10))
    assert largest.elements <= 2 * HEADS * 10 * 20


def random_states(
    steps: int, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """A query, and keys and values of each step."""
    random = torch.Generator().manual_seed(steps)

    def draw(heads: int) -> Tensor:
        states = torch.randn(2, TIME, heads, SIZE, dtype=torch.float64, generator=random).to(dtype)
        return states.requires_grad_().transpose(1, 2)  # as a head's projections lie

    keys = [draw(GROUPS) for _ in range(steps)]
    return draw(HEADS), keys, [draw(GROUPS) for _ in range(steps)]


def uncompiled(
    query: Tensor, keys: list[Tensor], values: list[Tensor], test: TrainingTimeTest
) -> Tensor:
    return by_flex(flex.flex_attention, query, keys, values, test)


def recomputed(*states_and_test: Any) -> Tensor:
    found: Tensor = checkpoint(attend_step, *states_and_test, use_reentrant=False)
    return found


def plain_scores(
    query: Tensor, keys: list[Tensor], values: list[Tensor], test: TrainingTimeTest
) -> Tensor:
    window = test.first_step_window(len(keys) - 1, TIME)
    return by_chunks(query, keys, values, test.sequences_BT, window)


def written_out(
    query: Tensor, keys: list[Tensor], values: list[Tensor], test: TrainingTimeTest
) -> Tensor:
    """Softmax over what a position sees: step 0 up to its own, and its own place of later steps."""
    here = torch.arange(TIME)
    sequences_BT = torch.ones(2, TIME) if test.sequences_BT is None else test.sequences_BT
    seen_BTT = (here[:, None] >= here) & (sequences_BT[:, :, None] == sequences_BT[:, None])
    if test.window is not None:
        # Position t at step s stands for t + s, and its drafts are within the window.
        seen_BTT &= here > here[:, None] + len(keys) - 1 - test.window
    own_BTT = torch.eye(TIME, dtype=torch.bool).expand(2, -1, -1)
    mask = torch.cat([seen_BTT, *[own_BTT] * (len(keys) - 1)], dim=-1)[:, None]
    every_key = torch.cat(keys, dim=2)
    every_value = torch.cat(values, dim=2)
    return F.scaled_dot_product_attention(query, every_key, every_value, mask, enable_gqa=True)


@pytest.mark.parametrize(
    ("window", "sequences_BT"),
    [(None, None), (None, PACKED), (5, None), (4, PACKED), (149, PACKED), (500, None)],
    ids=["whole", "packed", "5", "4, packed", "149, packed", "500"],
)
@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("kernel", [attend_step, recomputed, uncompiled, plain_scores])
def test_every_kernel_finds_what_softmax_finds(
    kernel: Kernel,
    steps: int,
    window: int | None,
    sequences_BT: Tensor | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A CPU has no backward of flex_attention; uncompiled it is made of operations that all have
    # one.
    monkeypatch.setattr(flex, "_validate_device", lambda query, key, value: None)
    monkeypatch.setattr(step_attention, "SCORES_ON_CPU", 40 * 2 * HEADS * TIME)
    states = random_states(steps)
    leaves = [states[0], *states[1], *states[2]]
    scale = torch.randn(states[0].shape, generator=torch.Generator().manual_seed(9)).double()
    test = TrainingTimeTest(1, sequences_BT, window=window)
    sides = []
    for attend in (kernel, written_out):
        found = attend(*states, test)
        sides.append((found, *torch.autograd.grad((found * scale).sum(), leaves)))
    for ours, expected in zip(*sides, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_narrow_formats_round_as_plain_scores_do(dtype: torch.dtype) -> None:
    test = TrainingTimeTest(1, PACKED)
    exact = attend_step(*random_states(3), test)
    found = attend_step(*random_states(3, dtype), test)
    plain = plain_scores(*random_states(3, dtype), test)
    assert found.dtype == dtype
    error = (found.double() - exact).abs().mean()
    assert error < 1.5 * (plain.double() - exact).abs().mean()


def test_autocast_decides_the_format() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert (
            attend_step(*random_states(2, torch.float32), TrainingTimeTest(1)).dtype
            == torch.bfloat16
        )


@pytest.mark.parametrize("sequences_BT", [None, PACKED], ids=["whole", "packed"])
def test_a_cpu_makes_no_scores(sequences_BT: Tensor | None) -> None:
    states = random_states(3)
    with LargestTensor() as largest:
        found = attend_step(*states, TrainingTimeTest(1, sequences_BT))
    assert largest.elements < 2 * HEADS * TIME * TIME
    kept = [tensor for tensor in found.grad_fn.saved_tensors if isinstance(tensor, Tensor)]  # type: ignore[union-attr]
    assert kept and max(tensor.numel() for tensor in kept) <= 2 * HEADS * TIME * SIZE


@pytest.mark.parametrize(
    ("dtype", "size", "wanted"),
    [
        (torch.bfloat16, 64, True),
        (torch.float32, 128, True),
        (torch.float64, 64, False),
        (torch.float32, 8, False),
    ],
)
def test_flex_attention_is_compiled_for_what_it_can(
    dtype: torch.dtype, size: int, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = torch.empty(1, size, dtype=dtype)
    monkeypatch.setattr(step_attention, "compiles_on", lambda device: True)
    assert step_attention.flex_compiles(query) == wanted
    monkeypatch.setattr(step_attention, "compiles_on", lambda device: False)
    assert not step_attention.flex_compiles(query)


@pytest.mark.parametrize("time", [100, 128, 129, 700, 1024])
@pytest.mark.parametrize("documents", [1, 2, 9])
def test_block_masks_are_those_that_torch_finds_by_trying_every_pair(time, documents):
    torch.manual_seed(time + documents)
    starts_BN = torch.randint(1, time, (3, documents - 1))
    sequences_BT = (torch.arange(time)[None, :, None] >= starts_BN[:, None]).sum(-1)
    ours = causal_blocks(sequences_BT)
    theirs = flex.create_block_mask(
        lambda b, h, query, key: (query >= key) & (sequences_BT[b, query] == sequences_BT[b, key]),
        3,
        None,
        time,
        time,
        device="cpu",
    )
    for counts, numbers in (
        ("kv_num_blocks", "kv_indices"),
        ("full_kv_num_blocks", "full_kv_indices"),
        ("q_num_blocks", "q_indices"),
        ("full_q_num_blocks", "full_q_indices"),
    ):
        count_BHN = getattr(theirs, counts)
        assert torch.equal(getattr(ours, counts), count_BHN), counts
        own_BHNM, other_BHNM = getattr(ours, numbers), getattr(theirs, numbers)
        counted = torch.arange(other_BHNM.shape[-1]) < count_BHN[..., None]
        assert torch.equal(own_BHNM[counted], other_BHNM[counted]), numbers
    assert ours.seq_lengths == theirs.seq_lengths and ours.BLOCK_SIZE == theirs.BLOCK_SIZE


def test_a_block_mask_takes_memory_by_blocks_and_not_by_tokens():
    """Of 65,536 tokens, whose pairs are 4 G."""
    sequences_BT = (torch.arange(65_536) // 3000)[None]
    with LargestTensor() as largest:
        causal_blocks(sequences_BT)
    assert largest.elements <= 4 * (65_536 // 128) ** 2
