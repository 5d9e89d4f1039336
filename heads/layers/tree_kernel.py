"""Tree attention over a long text, as a Triton kernel that reads only the slots in use.

A mask over all slots rules out torch's fast kernels, and makes the number of slots a shape, of
which a CUDA graph knows one. Here a program reads its part of the slots in two loops: the committed
tokens, which every node sees, without a mask, and then the nodes, by the tree's ancestors. The
parts of a text run side by side; each leaves its output and the logarithm of its weights' sum, by
which a second kernel adds them up (Flash-Decoding; in exact arithmetic the softmax over all slots).
Lengths lie on the device.

The slots of a row, in the order in which parts divide them, for a text of 5 tokens and 3 nodes in 2
parts:

    index      0 1 2 3 | 4 5 6 7
    committed  0 1 2 3 | 4                slot = text_slot + index
    nodes              |   0 1 2          slot = node_slot + index - 5, or, where nodes follow
                                          the text, also + 5

Letters in tensor names: B batch, H query heads, G heads of keys and values, R rows of a group (its
query heads times N nodes), N new nodes, M uncommitted nodes, S slots, E head size.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

from .tree_slots import TreeSlots

BLOCK_BYTES = 2**14
"""Bytes of keys that are read at once."""
MOST_ROWS = 64
"""Rows of a group that one program computes."""
SHORT = 2048
"""Slots of a cache up to which half as many rows are faster: there are too few slots to keep all
programs busy. On an H100 a layer's 60 nodes took 15.7 us after 512 tokens, and 21.5 with 64 rows;
after 16,384 tokens 135 and 77."""
PROGRAMS = 264
"""Programs to aim for: two for each multiprocessor of an H100 or H200."""
MOST_PARTS = 64
"""Parts in which a text is read, at most."""
CHANGING = [
    "nodes",
    "uncommitted",
    "window",
    "text_slot",
    "node_slot",
    "ancestors_row",
    "ancestors_node",
    "depths_row",
]
"""Arguments whose values keep changing: no variant of the kernel is compiled for each."""


@triton.jit
def _add_block(scores, values, highest, weights, sums, PRECISION: tl.constexpr, SUMS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add a block of slots to the online softmax, from its scores [R, S].

    A score is -inf where a row does not see a slot.
    """
    higher = tl.maximum(highest, tl.max(scores, 1))
    reference = tl.where(higher == float("-inf"), 0.0, higher)  # a row that has seen nothing yet
    shares = tl.exp(scores - reference[:, None])
    # Sums so far are relative to the highest score so far: a higher one makes them smaller.
    kept = tl.exp(highest - reference)
    weights = weights * kept + tl.sum(shares, 1)
    product = tl.dot(shares.to(values.dtype), values, input_precision=PRECISION, out_dtype=SUMS)
    return higher, weights, sums * kept[:, None] + product


@triton.jit(do_not_specialize=CHANGING)
def attend_to_part(  # type: ignore[no-untyped-def]
    query,
    keys,
    values,
    ancestors,
    depths,
    lengths,
    output,
    log_sums,
    scale,
    window,
    text_slot,
    node_slot,
    nodes,
    uncommitted,
    query_row,
    query_head,
    query_node,
    state_row,
    state_group,
    state_slot,
    ancestors_row,
    ancestors_node,
    depths_row,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    PARTS: tl.constexpr,
    SLIDING: tl.constexpr,
    NODES_FOLLOW: tl.constexpr,
    PRECISION: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Attend from a block of rows to one part of the slots, by an online softmax.

    The kernel writes the part's output and log-sum-exp.
    """
    batch = tl.program_id(0) // GROUPS
    group = tl.program_id(0) % GROUPS
    part = tl.program_id(2)
    rows = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_row = rows < HEADS * nodes
    head = group * HEADS + rows // nodes
    node = rows % nodes
    column = tl.arange(0, PADDED_SIZE)
    in_head = column < HEAD_SIZE

    # 1. The indices of this part, [first, last); a window leaves out what not even the root sees.
    length = tl.load(lengths + batch).to(tl.int32)
    begin = 0
    if SLIDING:
        begin = tl.maximum(length - window + 1, 0)
    total = length - begin + uncommitted
    share = tl.cdiv(tl.cdiv(total, PARTS), BLOCK_SLOTS) * BLOCK_SLOTS
    first = begin + part * share
    last = tl.minimum(first + share, length + uncommitted)
    last_committed = tl.minimum(last, length)

    query_of_row = query + batch * query_row + head * query_head + node * query_node
    q = tl.load(
        query_of_row[:, None] + column[None, :], mask=is_row[:, None] & in_head[None, :], other=0.0
    )
    if SLIDING:
        depth = tl.load(
            depths + batch * depths_row + uncommitted - nodes + node, mask=is_row, other=0
        ).to(tl.int32)
        oldest = length + depth - window
    highest = tl.full([BLOCK_ROWS], float("-inf"), SUMS)
    weights = tl.zeros([BLOCK_ROWS], SUMS)
    sums = tl.zeros([BLOCK_ROWS, PADDED_SIZE], SUMS)
    state = batch.to(tl.int64) * state_row + group * state_group

    # 2. Committed tokens, which every node sees.
    for start in range(first, last_committed, BLOCK_SLOTS):
        index = start + tl.arange(0, BLOCK_SLOTS)
        in_part = index < last_committed
        at = state + (text_slot + index).to(tl.int64)[:, None] * state_slot + column[None, :]
        is_read = in_part[:, None] & in_head[None, :]
        k = tl.load(keys + at, mask=is_read, other=0.0)
        v = tl.load(values + at, mask=is_read, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION, out_dtype=SUMS) * scale
        sees = in_part[None, :]
        if SLIDING:
            sees = sees & (index[None, :] > oldest[:, None])
        scores = tl.where(sees, scores, float("-inf"))
        highest, weights, sums = _add_block(scores, v, highest, weights, sums, PRECISION, SUMS)

    # 3. Nodes, of which each sees its own path.
    slot_of_first = node_slot
    if NODES_FOLLOW:
        slot_of_first = node_slot + length
    for start in range(tl.maximum(first, length) - length, last - length, BLOCK_SLOTS):
        other = start + tl.arange(0, BLOCK_SLOTS)
        in_part = other < last - length
        at = state + (slot_of_first + other).to(tl.int64)[:, None] * state_slot + column[None, :]
        is_read = in_part[:, None] & in_head[None, :]
        k = tl.load(keys + at, mask=is_read, other=0.0)
        v = tl.load(values + at, mask=is_read, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION, out_dtype=SUMS) * scale
        path = ancestors + batch * ancestors_row + node[:, None] * ancestors_node + other[None, :]
        sees = tl.load(path, mask=is_row[:, None] & in_part[None, :], other=0) != 0
        if SLIDING:
            other_depth = tl.load(depths + batch * depths_row + other, mask=in_part, other=0).to(
                tl.int32
            )
            sees = sees & ((length + other_depth)[None, :] > oldest[:, None])
        scores = tl.where(sees, scores, float("-inf"))
        highest, weights, sums = _add_block(scores, v, highest, weights, sums, PRECISION, SUMS)

    # 4. The part's result. Not `weights > 0`: NaN must stay NaN.
    row = (tl.program_id(0) * HEADS * nodes + rows) * PARTS + part
    tl.store(
        log_sums + row,
        tl.where(weights == 0, float("-inf"), highest + tl.log(weights)),
        mask=is_row,
    )
    if first < last:  # the result of an empty part is not read
        result = tl.where(weights[:, None] == 0, 0.0, sums / weights[:, None])
        place = output + row.to(tl.int64)[:, None] * HEAD_SIZE + column[None, :]
        tl.store(place, result, mask=is_row[:, None] & in_head[None, :])


@triton.jit(do_not_specialize=["nodes"])
def _add_parts(  # type: ignore[no-untyped-def]
    parts,
    log_sums,
    output,
    nodes,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Add up the parts of one row, weighted by their log-sum-exp; the output is [B, N, H, E]."""
    row = tl.program_id(0)
    part = tl.arange(0, PARTS)
    column = tl.arange(0, PADDED_SIZE)
    in_head = column < HEAD_SIZE
    logs = tl.load(log_sums + row * PARTS + part)
    has_weight = logs != float("-inf")  # true for NaN
    shares = tl.exp(logs - tl.max(logs, 0))
    at = (row * PARTS + part).to(tl.int64)[:, None] * HEAD_SIZE + column[None, :]
    outputs = tl.load(parts + at, mask=has_weight[:, None] & in_head[None, :], other=0.0)
    mean = tl.sum(outputs * shares[:, None], 0) / tl.sum(shares, 0)
    node = row % nodes
    head = (row // nodes) % (GROUPS * HEADS)
    batch = row // (nodes * GROUPS * HEADS)
    target = (batch * nodes + node) * GROUPS * HEADS + head
    tl.store(output + target * HEAD_SIZE + column, mean.to(output.dtype.element_ty), mask=in_head)


class BlockShape(NamedTuple):
    """How one program of `attend_to_part` computes."""

    rows: int
    slots: int
    stages: int
    """Blocks of keys and values in shared memory: with 2, the next ones are read while one is
    computed with."""

    def shared_bytes(self, padded_size: int, itemsize: int) -> int:
        """Return an upper bound of the shared memory in bytes.

        It counts the queries, the keys and values of every stage, and the weights of a block.
        """
        queries = self.rows * padded_size
        states = 2 * self.stages * self.slots * padded_size
        weights = self.rows * self.slots
        return (queries + states + weights) * itemsize


def block_shape(
    rows: int, slots: int, padded_size: int, itemsize: int, shared_bytes: int
) -> BlockShape:
    """The largest block, up to what is fast, that fits into the shared memory of a card.

    Args:
        rows: of a group, its query heads times the nodes.
        slots: of the cache.
        padded_size: of a head, a power of two.
        itemsize: bytes of a number.
        shared_bytes: that one program may use.
    """
    # 1. What is fast.
    most_rows = MOST_ROWS if slots > SHORT else MOST_ROWS // 2
    if itemsize == 4:  # multiplied without matrix units, in registers, which hold fewer rows
        most_rows = 32 if padded_size <= 128 else 16
    block_rows = max(16, min(most_rows, triton.next_power_of_2(rows)))
    block_slots = max(16, min(64, BLOCK_BYTES // (padded_size * itemsize)))
    # 2. What fits: fewer rows, then fewer slots, down to the 16 that `tl.dot` needs; then no
    #    reading ahead.
    while True:
        shape = BlockShape(block_rows, block_slots, stages=2)
        if shape.shared_bytes(padded_size, itemsize) <= shared_bytes:
            return shape
        if block_rows > 16:
            block_rows //= 2
        elif block_slots > 16:
            block_slots //= 2
        else:
            return shape._replace(stages=1)


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may use on a CUDA device."""
    properties = driver.active.utils.get_device_properties(device.index or 0)
    return int(properties["max_shared_mem"])


def tree_attention(
    query_BHNE: Tensor,
    key_BGSE: Tensor,
    value_BGSE: Tensor,
    slots: TreeSlots,
    scale: float | None = None,
) -> Tensor:
    """Attention of the last N of M uncommitted nodes, [B, N, H, E].

    Args:
        query_BHNE: queries of the new nodes.
        key_BGSE: the cache.
        value_BGSE: laid out as the keys.
        slots: where committed tokens and nodes lie in the cache, and which nodes see each other.
        scale: of the scores; None for 1 / sqrt(E).
    """
    batch, heads, nodes, size = query_BHNE.shape
    groups = key_BGSE.shape[1]
    uncommitted = slots.ancestors_BNM.shape[2]
    ancestors = slots.ancestors_BNM
    if ancestors.dtype == torch.bool:  # the kernel reads bytes
        ancestors = ancestors.view(torch.uint8)
    depths_BM = slots.depths_BM
    if depths_BM is None:
        assert slots.window is None
        depths_BM = slots.lengths_B[:, None]  # never read
    assert (
        key_BGSE.stride() == value_BGSE.stride() and key_BGSE.stride(3) == query_BHNE.stride(3) == 1
    )
    assert ancestors.stride(2) == 1 and slots.lengths_B.is_contiguous()

    # 1. The grid: rows and groups side by side, and so many parts that all multiprocessors work.
    padded_size = triton.next_power_of_2(size)
    rows = heads // groups * nodes
    memory = shared_memory(query_BHNE.device) if query_BHNE.is_cuda else 2**31  # interpreted
    block = block_shape(rows, key_BGSE.shape[2], padded_size, key_BGSE.element_size(), memory)
    blocks = triton.cdiv(rows, block.rows)
    parts = min(MOST_PARTS, triton.next_power_of_2(max(1, PROGRAMS // (batch * groups * blocks))))

    # 2. Each part's output and log-sum-exp, in at least float32, and the kernels.
    sums = torch.promote_types(query_BHNE.dtype, torch.float32)
    part_outputs = torch.empty(
        batch * heads * nodes * parts, size, dtype=sums, device=query_BHNE.device
    )
    log_sums = torch.empty(batch * heads * nodes * parts, dtype=sums, device=query_BHNE.device)
    output_BNHE = torch.empty(
        batch, nodes, heads, size, dtype=query_BHNE.dtype, device=query_BHNE.device
    )
    shape: dict[str, Any] = {
        "GROUPS": groups,
        "HEADS": heads // groups,
        "HEAD_SIZE": size,
        "PADDED_SIZE": padded_size,
        "PARTS": parts,
    }
    attend_to_part[(batch * groups, blocks, parts)](
        query_BHNE,
        key_BGSE,
        value_BGSE,
        ancestors,
        depths_BM,
        slots.lengths_B,
        part_outputs,
        log_sums,
        size**-0.5 if scale is None else scale,
        0 if slots.window is None else slots.window,
        slots.text_slot,
        slots.text_slot if slots.node_slot is None else slots.node_slot,
        nodes,
        uncommitted,
        *query_BHNE.stride()[:3],
        *key_BGSE.stride()[:3],
        *ancestors.stride()[:2],
        depths_BM.stride(0),
        **shape,
        BLOCK_ROWS=block.rows,
        BLOCK_SLOTS=block.slots,
        SLIDING=slots.window is not None,
        NODES_FOLLOW=slots.node_slot is None,
        PRECISION="ieee",
        SUMS=tl.float64 if sums == torch.float64 else tl.float32,
        num_warps=4,
        num_stages=block.stages,
    )
    warps = max(1, min(4, parts * padded_size // 2048))
    _add_parts[(batch * heads * nodes,)](
        part_outputs, log_sums, output_BNHE, nodes, **shape, num_warps=warps
    )
    return output_BNHE
