"""Attention of training-time test: softmax written out, by every kernel, packed rows or not;
gradients too."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from helpers import LargestTensor
from torch import Tensor
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
Kernel = Callable[[Tensor, list[Tensor], list[Tensor], "Tensor | None"], Tensor]


@pytest.mark.parametrize(
    ("window", "chunk", "sequences_BT"),
    [
        (4, None, PACKED),
        (5, 7, None),
        (60, 40, PACKED),
        (149, 7, None),
        (149, 7, PACKED),
        (500, None, None),
    ],
)
def test_a_window_hides_what_lies_further_back_than_the_drafted_position(
    window: int, chunk: int | None, sequences_BT: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Position t at step s stands for t + s and sees keys after t + s - window, its own drafts
    among them."""
    monkeypatch.setattr(flex, "_validate_device", lambda query, key, value: None)
    steps = 4
    query, keys, values = random_states(steps)
    numbers_BT = torch.ones(2, TIME) if sequences_BT is None else sequences_BT
    batch, groups = 2, HEADS // GROUPS
    wanted = []
    for step in range(1, steps + 1):
        here = torch.arange(TIME)
        seen_BTT = (here[:, None] >= here) & (numbers_BT[:, :, None] == numbers_BT[:, None])
        seen_BTT = seen_BTT & (here > here[:, None] + step - 1 - window)
        scores = query @ keys[0].repeat_interleave(groups, 1).mT
        scores = scores.masked_fill(~seen_BTT[:, None], -math.inf)
        own = [
            (query * key.repeat_interleave(groups, 1)).sum(-1, keepdim=True) for key in keys[1:step]
        ]
        weights = (torch.cat([scores, *own], -1) / math.sqrt(SIZE)).softmax(-1)
        rows = weights[..., :TIME] @ values[0].repeat_interleave(groups, 1)
        for number, value in enumerate(values[1:step]):
            rows = rows + weights[..., TIME + number, None] * value.repeat_interleave(groups, 1)
        wanted.append(rows)
    if chunk is not None:
        monkeypatch.setattr(
            step_attention, "SCORES_ON_CPU", chunk * batch * HEADS * min(2 * window, TIME)
        )
    leaves = [query, *keys, *values]
    scale = torch.randn_like(query)
    for step in (1, steps):
        test = TrainingTimeTest(1, sequences_BT, window=window)
        given = (query, keys[:step], values[:step])
        for found in (attend_step(*given, test), by_flex(flex.flex_attention, *given, test)):
            torch.testing.assert_close(found, wanted[step - 1], rtol=0, atol=1e-10)
    found = attend_step(query, keys, values, test)
    mine, plain = (
        torch.autograd.grad((side * scale).sum(), leaves) for side in (found, wanted[-1])
    )
    for one, other in zip(mine, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_a_window_makes_no_scores_beyond_it() -> None:
    """Time and memory of a long text grow with it, not with its square."""
    states = random_states(2)
    with LargestTensor(torch.ops.aten.bmm.default) as largest:
        attend_step(*states, TrainingTimeTest(1, window=10))
    assert largest.elements <= 2 * HEADS * 10 * 20


def test_layers_remember_apart() -> None:
    torch.manual_seed(0)
    entries = [
        [torch.randn(1, heads, 3, SIZE).double() for heads in (HEADS, GROUPS, GROUPS)]
        for _ in range(6)
    ]
    both = TrainingTimeTest(2)
    mixed = [both.at(i // 2).attend(i % 2, *entry) for i, entry in enumerate(entries)]
    for layer in range(2):
        alone = TrainingTimeTest(1)
        for step, entry in enumerate(entries[layer::2]):
            expected = alone.at(step).attend(0, *entry)
            torch.testing.assert_close(mixed[2 * step + layer], expected, rtol=0, atol=1e-12)


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
    query: Tensor, keys: list[Tensor], values: list[Tensor], sequences_BT: Tensor | None
) -> Tensor:
    return by_flex(flex.flex_attention, query, keys, values, TrainingTimeTest(1, sequences_BT))


def usual(
    query: Tensor, keys: list[Tensor], values: list[Tensor], sequences_BT: Tensor | None
) -> Tensor:
    return attend_step(query, keys, values, TrainingTimeTest(1, sequences_BT))


def recomputed(
    query: Tensor, keys: list[Tensor], values: list[Tensor], sequences_BT: Tensor | None
) -> Tensor:
    found: Tensor = checkpoint(usual, query, keys, values, sequences_BT, use_reentrant=False)
    return found


@pytest.mark.parametrize("sequences_BT", [None, PACKED], ids=["whole", "packed"])
@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("kernel", [usual, recomputed, uncompiled])
def test_every_kernel_finds_what_plain_scores_find(
    kernel: Kernel, steps: int, sequences_BT: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A CPU has no backward of flex_attention; uncompiled it is made of operations that all have
    # one.
    monkeypatch.setattr(flex, "_validate_device", lambda query, key, value: None)
    given = random_states(steps)
    leaves = [given[0], *given[1], *given[2]]
    scale = torch.randn(
        2, HEADS, TIME, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(9)
    )
    sides = []
    for one in (kernel, by_chunks):
        found = one(*given, sequences_BT)
        sides.append((found, *torch.autograd.grad((found * scale).sum(), leaves)))
    for mine, plain in zip(*sides, strict=True):
        torch.testing.assert_close(mine, plain, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_narrow_formats_round_as_plain_scores_do(dtype: torch.dtype) -> None:
    exact = usual(*random_states(3), PACKED)
    found, plain = (kernel(*random_states(3, dtype), PACKED) for kernel in (usual, by_chunks))
    assert found.dtype == dtype
    errors = [(side.double() - exact).abs().mean() for side in (found, plain)]
    assert errors[0] < 1.5 * errors[1]


def test_autocast_decides_the_format() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert usual(*random_states(2, torch.float32), None).dtype == torch.bfloat16


@pytest.mark.parametrize("sequences_BT", [None, PACKED], ids=["whole", "packed"])
def test_a_cpu_makes_no_scores(sequences_BT: Tensor | None) -> None:
    states = random_states(3)
    with LargestTensor() as largest:
        found = usual(*states, sequences_BT)
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
