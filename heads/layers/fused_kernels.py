"""The operations of fused_reference.py as Triton kernels.

Letters in tensor names: R rows (B * N), D width of a row, H query heads, G heads of keys and
values, E head size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .fused_reference import Norm, Place, Projected

CHUNK = 2048
"""Logits of which one program finds the best."""


@triton.jit
def _rounded(x, dtype):  # type: ignore[no-untyped-def]
    """A float32 value as a number of this dtype would hold it."""
    return x.to(dtype).to(tl.float32)


@triton.jit
def _add_norm(  # type: ignore[no-untyped-def]
    x,
    out,
    weight,
    sums,
    normed,
    epsilon,
    x_row,
    out_row,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ADDS: tl.constexpr,
):
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    in_row = column < WIDTH
    dtype = x.dtype.element_ty
    value = tl.load(x + row * x_row + column, mask=in_row, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=in_row, other=0.0).to(tl.float32)
    # The sum is rounded before it is normed, as if it had been stored and read.
    if ADDS:
        value += tl.load(out + row * out_row + column, mask=in_row, other=0.0).to(tl.float32)
        value = _rounded(value, dtype)
        tl.store(sums + row * WIDTH + column, value.to(dtype), mask=in_row)
    # Padded columns hold 0 and add nothing.
    mean = tl.sum(value * value, 0) / WIDTH
    scaled = _rounded(value * tl.rsqrt(mean + epsilon), dtype)
    tl.store(normed + row * WIDTH + column, (scale * scaled).to(dtype), mask=in_row)


def add_norm(x_BND: Tensor, out_BND: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
    """`fused_reference.add_norm`."""
    width = x_BND.shape[-1]
    x_RD = x_BND.reshape(-1, width)
    out_RD = x_RD if out_BND is None else out_BND.reshape(-1, width)
    assert x_RD.stride(1) == out_RD.stride(1) == norm.weight_D.stride(0) == 1
    normed_BND = torch.empty(x_BND.shape, dtype=x_BND.dtype, device=x_BND.device)
    sums_BND = x_BND if out_BND is None else torch.empty_like(normed_BND)
    padded = triton.next_power_of_2(width)
    _add_norm[(len(x_RD),)](
        x_RD,
        out_RD,
        norm.weight_D,
        sums_BND,
        normed_BND,
        norm.epsilon,
        x_RD.stride(0),
        out_RD.stride(0),
        WIDTH=width,
        PADDED=padded,
        ADDS=out_BND is not None,
        num_warps=max(1, min(16, padded // 512)),
    )
    return normed_BND, sums_BND


@triton.jit
def _finite(x):  # type: ignore[no-untyped-def]
    """The value, or 0 where it is NaN or infinite."""
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)


@triton.jit
def _rotated(  # type: ignore[no-untyped-def]
    states,
    weight,
    cos,
    sin,
    epsilon,
    at,
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
    NORM: tl.constexpr,
):
    """Return both halves of one head after norm and rotary embedding, rounded.

    `cos` and `sin` point to those of the head's row.
    """
    dtype = states.dtype.element_ty
    column = tl.arange(0, PADDED)
    in_half = column < HALF
    # The embedding turns number i of the first half with number i of the second.
    first = tl.load(states + at + column, mask=in_half, other=0.0).to(tl.float32)
    second = tl.load(states + at + HALF + column, mask=in_half, other=0.0).to(tl.float32)
    if NORM:
        mean = (tl.sum(first * first, 0) + tl.sum(second * second, 0)) / (2 * HALF)
        factor = tl.rsqrt(mean + epsilon)
        weight_first = tl.load(weight + column, mask=in_half, other=0.0).to(tl.float32)
        weight_second = tl.load(weight + HALF + column, mask=in_half, other=0.0).to(tl.float32)
        first = _rounded(weight_first * _rounded(first * factor, dtype), dtype)
        second = _rounded(weight_second * _rounded(second * factor, dtype), dtype)
    cos_first = tl.load(cos + column, mask=in_half, other=0.0).to(tl.float32)
    cos_second = tl.load(cos + HALF + column, mask=in_half, other=0.0).to(tl.float32)
    sin_first = tl.load(sin + column, mask=in_half, other=0.0).to(tl.float32)
    sin_second = tl.load(sin + HALF + column, mask=in_half, other=0.0).to(tl.float32)
    turned_first = _rounded(first * cos_first, dtype) + _rounded(-second * sin_first, dtype)
    turned_second = _rounded(second * cos_second, dtype) + _rounded(first * sin_second, dtype)
    return turned_first, turned_second


@triton.jit
def _rotary_store(  # type: ignore[no-untyped-def]
    query,
    key,
    value,
    cos,
    sin,
    query_weight,
    key_weight,
    query_out,
    keys,
    values,
    slots,
    query_epsilon,
    key_epsilon,
    nodes,
    query_row,
    key_row,
    value_row,
    cos_batch,
    cos_node,
    state_batch,
    state_group,
    state_slot,
    slots_batch,
    slots_node,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
    NORM: tl.constexpr,
    FINITE: tl.constexpr,
):
    """One program for a head of a token: of queries, then keys, then values."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    batch = row // nodes
    node = row % nodes
    column = tl.arange(0, PADDED)
    in_half = column < HALF
    angles = batch * cos_batch + node * cos_node
    # Program numbers of 4 query heads and 2 groups: 0 to 3 queries, 4 and 5 keys, 6 and 7 values.
    if head < HEADS:
        at = row.to(tl.int64) * query_row + head * 2 * HALF
        first, second = _rotated(
            query, query_weight, cos + angles, sin + angles, query_epsilon, at, HALF, PADDED, NORM
        )
        to = query_out + (row.to(tl.int64) * HEADS + head) * 2 * HALF + column
        tl.store(to, first.to(query_out.dtype.element_ty), mask=in_half)
        tl.store(to + HALF, second.to(query_out.dtype.element_ty), mask=in_half)
    else:
        group = (head - HEADS) % GROUPS
        slot = tl.load(slots + batch * slots_batch + node * slots_node).to(tl.int64)
        place = batch.to(tl.int64) * state_batch + group * state_group + slot * state_slot + column
        if head < HEADS + GROUPS:
            at = row.to(tl.int64) * key_row + group * 2 * HALF
            first, second = _rotated(
                key, key_weight, cos + angles, sin + angles, key_epsilon, at, HALF, PADDED, NORM
            )
            if FINITE:
                first = _finite(first)
                second = _finite(second)
            tl.store(keys + place, first.to(keys.dtype.element_ty), mask=in_half)
            tl.store(keys + place + HALF, second.to(keys.dtype.element_ty), mask=in_half)
        else:
            at = row.to(tl.int64) * value_row + group * 2 * HALF
            first = tl.load(value + at + column, mask=in_half, other=0.0).to(tl.float32)
            second = tl.load(value + at + HALF + column, mask=in_half, other=0.0).to(tl.float32)
            if FINITE:
                first = _finite(first)
                second = _finite(second)
            tl.store(values + place, first.to(values.dtype.element_ty), mask=in_half)
            tl.store(values + place + HALF, second.to(values.dtype.element_ty), mask=in_half)


def rotary_store(
    projected: Projected,
    rotary: tuple[Tensor, Tensor],
    place: Place,
    norms: tuple[Norm, Norm] | None,
) -> Tensor:
    """`fused_reference.rotary_store`."""
    batch, nodes, width = projected.query_BNX.shape
    groups = place.keys_BGSE.shape[1]
    size = place.keys_BGSE.shape[3]
    heads = width // size
    query_RX = projected.query_BNX.reshape(batch * nodes, -1)
    key_RX = projected.key_BNX.reshape(batch * nodes, -1)
    value_RX = projected.value_BNX.reshape(batch * nodes, -1)
    cos_BNE, sin_BNE = (part.expand(batch, nodes, size) for part in rotary)
    query_norm, key_norm = (None, None) if norms is None else norms
    # The kernel takes one set of strides for cosines and sines, and one for keys and values.
    assert cos_BNE.stride() == sin_BNE.stride() and cos_BNE.stride(2) == 1
    assert place.keys_BGSE.stride() == place.values_BGSE.stride() and place.keys_BGSE.stride(3) == 1
    output_BNHE = torch.empty(
        batch, nodes, heads, size, dtype=query_RX.dtype, device=query_RX.device
    )
    _rotary_store[(batch * nodes, heads + 2 * groups)](
        query_RX,
        key_RX,
        value_RX,
        cos_BNE,
        sin_BNE,
        query_RX if query_norm is None else query_norm.weight_D,
        key_RX if key_norm is None else key_norm.weight_D,
        output_BNHE,
        place.keys_BGSE,
        place.values_BGSE,
        place.slots_BN,
        0.0 if query_norm is None else query_norm.epsilon,
        0.0 if key_norm is None else key_norm.epsilon,
        nodes,
        query_RX.stride(0),
        key_RX.stride(0),
        value_RX.stride(0),
        *cos_BNE.stride()[:2],
        *place.keys_BGSE.stride()[:3],
        *place.slots_BN.stride(),
        HEADS=heads,
        GROUPS=groups,
        HALF=size // 2,
        PADDED=triton.next_power_of_2(size // 2),
        NORM=norms is not None,
        FINITE=place.finite,
        num_warps=1,
    )
    return output_BNHE.transpose(1, 2)


@triton.jit
def _silu_product(gate, up, output, gate_row, up_row, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program for a block of a row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_row = column < WIDTH
    g = tl.load(gate + row * gate_row + column, mask=in_row, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_row + column, mask=in_row, other=0.0).to(tl.float32)
    dtype = output.dtype.element_ty
    activated = _rounded(g / (1.0 + tl.exp(-g)), dtype)
    tl.store(output + row * WIDTH + column, (activated * u).to(dtype), mask=in_row)


def silu_product(gate_BNI: Tensor, up_BNI: Tensor) -> Tensor:
    """`fused_reference.silu_product`."""
    width = gate_BNI.shape[-1]
    gate_RI = gate_BNI.reshape(-1, width)
    up_RI = up_BNI.reshape(-1, width)
    output_BNI = torch.empty(gate_BNI.shape, dtype=gate_BNI.dtype, device=gate_BNI.device)
    block = 1024
    _silu_product[(len(gate_RI), triton.cdiv(width, block))](
        gate_RI,
        up_RI,
        output_BNI,
        gate_RI.stride(0),
        up_RI.stride(0),
        WIDTH=width,
        BLOCK=block,
        num_warps=4,
    )
    return output_BNI


@triton.jit
def _top_of_chunk(  # type: ignore[no-untyped-def]
    logits,
    best,
    columns,
    highest,
    sums,
    logits_row,
    vocab_size,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Store the WIDTH best logits of a chunk of a row, and the chunk's softmax sum.

    The chunks' sums together normalise the softmax of the row.
    """
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    in_row = column < vocab_size
    value = tl.load(
        logits + row.to(tl.int64) * logits_row + column, mask=in_row, other=float("-inf")
    ).to(tl.float32)
    is_number = value < float("inf")  # neither NaN nor inf
    value = tl.where(is_number, value, float("-inf"))
    # 1. The sum of exp(logit - highest), as a softmax over all chunks needs it.
    high = tl.max(value, 0)
    reference = tl.where(high == float("-inf"), 0.0, high)
    total = tl.sum(tl.exp(value - reference), 0)
    invalid = tl.sum(tl.where(is_number, 0, 1), 0)
    total = tl.where(invalid > 0, float("nan"), total)
    place = row * CHUNKS + chunk
    tl.store(highest + place, high)
    tl.store(sums + place, total)
    # 2. The best, one after another: each is taken out before the next is looked for.
    for rank in tl.static_range(WIDTH):
        at = tl.argmax(value, 0)  # the leftmost of equal ones, which lies in the row
        tl.store(best + place * WIDTH + rank, tl.max(value, 0))
        tl.store(columns + place * WIDTH + rank, chunk * CHUNK + at)
        value = tl.where(tl.arange(0, CHUNK) == at, float("-inf"), value)


@triton.jit
def _top_of_row(  # type: ignore[no-untyped-def]
    best,
    columns,
    highest,
    sums,
    values,
    indices,
    CHUNKS: tl.constexpr,
    PADDED_CHUNKS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Store the WIDTH best log-probabilities of a row, from the best of all its chunks.

    They are -inf where the row's logits hold NaN or inf.
    """
    row = tl.program_id(0)
    chunk = tl.arange(0, PADDED_CHUNKS)
    is_chunk = chunk < CHUNKS
    high = tl.load(highest + row * CHUNKS + chunk, mask=is_chunk, other=float("-inf"))
    total = tl.load(sums + row * CHUNKS + chunk, mask=is_chunk, other=0.0)
    # 1. The log-sum-exp of the row, from those of its chunks.
    reference = tl.max(high, 0)
    reference = tl.where(reference == float("-inf"), 0.0, reference)
    log_sum = reference + tl.log(tl.sum(total * tl.exp(high - reference), 0))
    # 2. The best of the chunks' best.
    candidate = tl.arange(0, PADDED)
    is_candidate = candidate < CHUNKS * WIDTH
    value = tl.load(best + row * CHUNKS * WIDTH + candidate, mask=is_candidate, other=float("-inf"))
    for rank in tl.static_range(WIDTH):
        at = tl.argmax(value, 0)
        log_probability = tl.max(value, 0) - log_sum
        # Only NaN differs from itself.
        log_probability = tl.where(
            log_probability == log_probability, log_probability, float("-inf")
        )
        tl.store(values + row * WIDTH + rank, log_probability)
        tl.store(
            indices + row * WIDTH + rank, tl.load(columns + row * CHUNKS * WIDTH + at).to(tl.int64)
        )
        value = tl.where(candidate == at, float("-inf"), value)


def top_log_probs(logits_BWV: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """`fused_reference.top_log_probs`."""
    vocab_size = logits_BWV.shape[-1]
    logits_RV = logits_BWV.reshape(-1, vocab_size)
    assert logits_RV.stride(1) == 1
    rows = len(logits_RV)
    chunks = triton.cdiv(vocab_size, CHUNK)
    best = torch.empty(rows, chunks, width, dtype=torch.float32, device=logits_RV.device)
    columns = torch.empty(rows, chunks, width, dtype=torch.int32, device=logits_RV.device)
    highest, sums = torch.empty(2, rows, chunks, dtype=torch.float32, device=logits_RV.device)
    _top_of_chunk[(rows, chunks)](
        logits_RV,
        best,
        columns,
        highest,
        sums,
        logits_RV.stride(0),
        vocab_size,
        CHUNKS=chunks,
        CHUNK=CHUNK,
        WIDTH=width,
        num_warps=4,
    )
    shape = (*logits_BWV.shape[:-1], width)
    values = torch.empty(shape, dtype=torch.float32, device=logits_RV.device)
    indices = torch.empty(shape, dtype=torch.int64, device=logits_RV.device)
    _top_of_row[(rows,)](
        best,
        columns,
        highest,
        sums,
        values,
        indices,
        CHUNKS=chunks,
        PADDED_CHUNKS=triton.next_power_of_2(chunks),
        WIDTH=width,
        PADDED=triton.next_power_of_2(chunks * width),
        num_warps=4,
    )
    return values, indices
