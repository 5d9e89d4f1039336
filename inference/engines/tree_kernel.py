"""Attention of a tree's nodes over a long text, as a Triton kernel: it reads the slots in use and no others.

A mask over all slots rules out torch's fast kernels, and makes the number of slots a shape, of which a CUDA graph knows
one. Here the committed tokens are read without a mask, in parts that run side by side, and the nodes' own slots, which
follow them, by the tree's ancestors. Each part leaves its output and the logarithm of its weights' sum, by which a
second kernel adds the parts up (Flash-Decoding; in exact arithmetic the softmax over all slots). Lengths lie on the
device.

Letters in tensor names: B batch, H query heads, G heads of keys and values, R rows of a group (its query heads times N
nodes), N new nodes, M uncommitted nodes, S slots, E head size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_BYTES = 2**14
"""Bytes of keys that are read at once."""
MOST_ROWS = 64
"""Rows of a group that one program computes."""
PROGRAMS = 264
"""Programs to aim for: two for each multiprocessor of an H100 or H200."""
MOST_PARTS = 64
"""Parts in which a text is read, at most."""
LARGEST_HEAD = 256
"""Largest size of a head; a program holds the sums of its rows in registers."""


CHANGING = ["nodes", "uncommitted", "window", "ancestors_row", "ancestors_node", "depths_row"]
"""Arguments whose values keep changing: no variant of the kernel is compiled for each."""


@triton.jit(do_not_specialize=CHANGING)
def _attend_to_part(  # type: ignore[no-untyped-def]
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
    PRECISION: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Online softmax of a block of rows over one part of the slots; writes output and log-sum-exp of the part."""
    batch = tl.program_id(0) // GROUPS
    group = tl.program_id(0) % GROUPS
    part = tl.program_id(2)
    rows = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_row = rows < HEADS * nodes
    head = group * HEADS + rows // nodes
    node = rows % nodes
    place = tl.arange(0, PADDED_SIZE)
    in_head = place < HEAD_SIZE

    length = tl.load(lengths + batch).to(tl.int32)
    total = length + uncommitted
    share = tl.cdiv(tl.cdiv(total, PARTS), BLOCK_SLOTS) * BLOCK_SLOTS
    first = part * share
    last = tl.minimum(first + share, total)

    query_of_row = query + batch * query_row + head * query_head + node * query_node
    q = tl.load(query_of_row[:, None] + place[None, :], mask=is_row[:, None] & in_head[None, :], other=0.0)
    if SLIDING:
        depth = tl.load(depths + batch * depths_row + uncommitted - nodes + node, mask=is_row, other=0).to(tl.int32)
        oldest = length + depth - window

    highest = tl.full([BLOCK_ROWS], float("-inf"), SUMS)
    weights = tl.zeros([BLOCK_ROWS], SUMS)
    sums = tl.zeros([BLOCK_ROWS, PADDED_SIZE], SUMS)
    state = batch.to(tl.int64) * state_row + group * state_group
    for start in range(first, last, BLOCK_SLOTS):
        slots = start + tl.arange(0, BLOCK_SLOTS)
        in_part = slots < last
        at = state + slots.to(tl.int64)[:, None] * state_slot + place[None, :]
        there = in_part[:, None] & in_head[None, :]
        k = tl.load(keys + at, mask=there, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION, out_dtype=SUMS) * scale
        after = slots - length
        is_node = (after >= 0) & in_part
        above = ancestors + batch * ancestors_row + node[:, None] * ancestors_node + after[None, :]
        on_path = tl.load(above, mask=is_row[:, None] & is_node[None, :], other=0)
        seen = in_part[None, :] & ((after < 0)[None, :] | (on_path != 0))
        if SLIDING:
            node_depth = tl.load(depths + batch * depths_row + after, mask=is_node, other=0).to(tl.int32)
            position = tl.where(is_node, length + node_depth, slots)
            seen = seen & (position[None, :] > oldest[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        reference = tl.where(higher == float("-inf"), 0.0, higher)
        shares = tl.exp(scores - reference[:, None])
        kept = tl.exp(highest - reference)
        v = tl.load(values + at, mask=there, other=0.0)
        weights = weights * kept + tl.sum(shares, 1)
        sums = sums * kept[:, None] + tl.dot(shares.to(v.dtype), v, input_precision=PRECISION, out_dtype=SUMS)
        highest = higher

    # Not `weights > 0`: NaN must stay NaN.
    result = tl.where(weights[:, None] == 0, 0.0, sums / weights[:, None])
    row = (tl.program_id(0) * HEADS * nodes + rows) * PARTS + part
    tl.store(output + row[:, None] * HEAD_SIZE + place[None, :], result, mask=is_row[:, None] & in_head[None, :])
    tl.store(log_sums + row, tl.where(weights == 0, float("-inf"), highest + tl.log(weights)), mask=is_row)


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
    place = tl.arange(0, PADDED_SIZE)
    in_head = place < HEAD_SIZE
    logs = tl.load(log_sums + row * PARTS + part)
    shares = tl.exp(logs - tl.max(logs, 0))
    at = (row * PARTS + part)[:, None] * HEAD_SIZE + place[None, :]
    outputs = tl.load(parts + at, mask=in_head[None, :], other=0.0)
    mean = tl.sum(outputs * shares[:, None], 0) / tl.sum(shares, 0)
    node = row % nodes
    head = (row // nodes) % (GROUPS * HEADS)
    batch = row // (nodes * GROUPS * HEADS)
    target = (batch * nodes + node) * GROUPS * HEADS + head
    tl.store(output + target * HEAD_SIZE + place, mean.to(output.dtype.element_ty), mask=in_head)


def tree_attention(
    query_BHNE: Tensor,
    key_BGSE: Tensor,
    value_BGSE: Tensor,
    ancestors_BNM: Tensor,
    depths_BM: Tensor,
    lengths_B: Tensor,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Attention of the last N of M uncommitted nodes, [B, N, H, E].

    Args:
        query_BHNE: queries of the new nodes.
        key_BGSE: the cache, of which row b's first `lengths_B[b]` slots are committed and the next M the nodes'.
        value_BGSE: laid out as the keys.
        ancestors_BNM: bool, or bytes that are 0 where a new node does not attend to an uncommitted one.
        depths_BM: distance of each uncommitted node from the root.
        lengths_B: committed tokens of each row.
        scale: of the scores; None for 1 / sqrt(E).
        window: positions that a node sees, its own counted; None for all.
    """
    batch, heads, nodes, size = query_BHNE.shape
    groups, uncommitted = key_BGSE.shape[1], depths_BM.shape[1]
    assert key_BGSE.stride() == value_BGSE.stride() and key_BGSE.stride(3) == query_BHNE.stride(3) == 1
    rows = heads // groups * nodes
    block_rows = max(16, min(MOST_ROWS, triton.next_power_of_2(rows)))
    blocks = triton.cdiv(rows, block_rows)
    parts = min(MOST_PARTS, triton.next_power_of_2(max(1, PROGRAMS // (batch * groups * blocks))))
    sums = torch.promote_types(query_BHNE.dtype, torch.float32)
    part_outputs = torch.empty(batch * heads * nodes * parts, size, dtype=sums, device=query_BHNE.device)
    log_sums = torch.empty(batch * heads * nodes * parts, dtype=sums, device=query_BHNE.device)
    output_BNHE = torch.empty(batch, nodes, heads, size, dtype=query_BHNE.dtype, device=query_BHNE.device)
    ancestors = ancestors_BNM.view(torch.uint8) if ancestors_BNM.dtype == torch.bool else ancestors_BNM
    assert ancestors.stride(2) == 1 and depths_BM.stride(1) == 1 and lengths_B.is_contiguous()
    padded = triton.next_power_of_2(size)
    shape = {"GROUPS": groups, "HEADS": heads // groups, "HEAD_SIZE": size, "PADDED_SIZE": padded, "PARTS": parts}
    _attend_to_part[(batch * groups, blocks, parts)](
        query_BHNE,
        key_BGSE,
        value_BGSE,
        ancestors,
        depths_BM,
        lengths_B,
        part_outputs,
        log_sums,
        size**-0.5 if scale is None else scale,
        0 if window is None else window,
        nodes,
        uncommitted,
        *query_BHNE.stride()[:3],
        *key_BGSE.stride()[:3],
        *ancestors.stride()[:2],
        depths_BM.stride(0),
        **shape,
        BLOCK_ROWS=block_rows,
        BLOCK_SLOTS=max(16, min(64, BLOCK_BYTES // (padded * key_BGSE.element_size()))),
        SLIDING=window is not None,
        PRECISION="ieee",
        SUMS=tl.float64 if sums == torch.float64 else tl.float32,
        num_warps=4,
        num_stages=2,
    )
    _add_parts[(batch * heads * nodes,)](part_outputs, log_sums, output_BNHE, nodes, **shape, num_warps=4)
    return output_BNHE
