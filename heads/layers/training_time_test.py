"""Attention of training-time test, in which every position sees a text up to itself and its own earlier drafts.

What a position finds in the text, out, with the log-sum-exp of its scores there, lse, is one softmax; the few drafts
join it afterwards (i counts drafts, z_i = q k_i / sqrt(E)):

    L = log(exp(lse) + sum_i exp(z_i))
    found = exp(lse - L) out + sum_i exp(z_i - L) v_i

So the text is read by a fused kernel that makes no scores: on a CPU torch's flash attention, whose backward is exact
if it is given `found` and L instead of `out` and lse; on CUDA flex_attention, compiled, with a block mask of texts that
are packed into one row. Elsewhere scores are made, chunk by chunk of positions.

Letters in tensor names: B batch, T time, C positions of a chunk, H heads, G key-value heads, E head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils._triton import has_triton
from torch.utils.checkpoint import checkpoint

from .chunks import SCORES_ON_CPU, chunk_elements

SMALLEST_FLEX = 16
"""Head size from which flex_attention compiles."""
FLEX_FORMATS = (torch.float32, torch.bfloat16, torch.float16)
"""Formats in which it does."""


class PackedTexts:
    """The texts that rows consist of, in the forms that the kernels need; each form is made once a batch."""

    def __init__(self, sequences_BT: Tensor | None) -> None:
        """Take rows as they are.

        Args:
            sequences_BT: which text each token is of, numbered from left to right; None where every row is one.
        """
        self.sequences_BT = sequences_BT
        self._block_masks: dict[tuple[int, torch.device], BlockMask] = {}

    @cached_property
    def places(self) -> list[tuple[slice, slice]]:
        """Rows and columns of every text: on a CPU, where looking at `sequences_BT` makes nobody wait."""
        if self.sequences_BT is None:
            return [(slice(None), slice(None))]
        found = []
        for row, numbers_T in enumerate(self.sequences_BT):
            lengths = numbers_T.unique_consecutive(return_counts=True)[1].tolist()
            stop = 0
            for length in lengths:
                start, stop = stop, stop + length
                found.append((slice(row, row + 1), slice(start, stop)))
        return found

    def block_mask(self, time: int, device: torch.device) -> BlockMask:
        """Which blocks of keys a block of queries reads."""
        if self.sequences_BT is None:
            return _causal_blocks(time, device)
        if (time, device) not in self._block_masks:
            numbers_BT = self.sequences_BT

            def own_text(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
                return (query >= key) & (numbers_BT[b, query] == numbers_BT[b, key])

            mask = create_block_mask(own_text, len(numbers_BT), None, time, time, device=device)
            self._block_masks[time, device] = mask
        return self._block_masks[time, device]


@lru_cache(maxsize=64)
def _causal_blocks(time: int, device: torch.device) -> BlockMask:
    return create_block_mask(
        lambda b, h, query, key: query >= key,
        None,
        None,
        time,
        time,
        device=device,
    )


def attend_step(query_BHTE: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], texts: PackedTexts) -> Tensor:
    """What every position finds in its text up to itself, and at itself in each later step, [B, H, T, E].

    Args:
        query_BHTE: of the newest step.
        keys: of each step, [B, G, T, E]; those of step 0 are the text's.
        values: likewise.
        texts: of the rows.
    """
    device = query_BHTE.device
    if torch.is_autocast_enabled(device.type):  # as it does for torch's own attention
        dtype = torch.get_autocast_dtype(device.type)
        query_BHTE, keys, values = query_BHTE.to(dtype), [k.to(dtype) for k in keys], [v.to(dtype) for v in values]
    if len(keys) == 1 and texts.sequences_BT is None:
        return F.scaled_dot_product_attention(query_BHTE, keys[0], values[0], is_causal=True, enable_gqa=True)
    if _get_current_dispatch_mode() is not None:  # who counts arithmetic sees no fused kernel
        return by_chunks(query_BHTE, keys, values, texts.sequences_BT)
    if device.type == "cpu":
        found: Tensor = _OnCpu.apply(texts.places, query_BHTE, *keys, *values)
        return found
    if device.type == "cuda" and compiles(query_BHTE.dtype, query_BHTE.shape[-1]):
        return by_flex(_compiled_flex(), query_BHTE, keys, values, texts)
    return by_chunks(query_BHTE, keys, values, texts.sequences_BT)


def compiles(dtype: torch.dtype, head_size: int) -> bool:
    """Whether flex_attention can be compiled for such states on CUDA."""
    return dtype in FLEX_FORMATS and head_size >= SMALLEST_FLEX and has_triton()


@lru_cache(maxsize=1)
def _compiled_flex() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=True)


def by_flex(
    attention: Callable[..., Any],
    query_BHTE: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    texts: PackedTexts,
) -> Tensor:
    """As `attend_step`, the text read by flex_attention: one mask and one shape serve all steps.

    Args:
        attention: flex_attention, compiled or not.
        query_BHTE: see `attend_step`.
        keys: likewise.
        values: likewise.
        texts: likewise.
    """
    mask = texts.block_mask(query_BHTE.shape[2], query_BHTE.device)
    out_BHTE, more = attention(
        query_BHTE, keys[0], values[0], block_mask=mask, enable_gqa=True, return_aux=AuxRequest(lse=True)
    )
    if len(keys) == 1:
        found: Tensor = out_BHTE
        return found
    joined: Tensor = _Joined.apply(query_BHTE, out_BHTE, more.lse, *keys[1:], *values[1:])
    return joined


def _own_scores(query_BHTE: Tensor, keys: Sequence[Tensor]) -> list[Tensor]:
    """Of each position with its own keys, one [B, H, T] a step, in at least float32."""
    heads, size = query_BHTE.shape[1], query_BHTE.shape[-1]
    return [size**-0.5 * torch.linalg.vecdot(query_BHTE, _spread(key, heads)).to(_wide(key)) for key in keys]


def _joined(
    out_BHTE: Tensor, lse_BHT: Tensor, scores: Sequence[Tensor], values: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """What is found in the text and at own drafts together, and the log-sum-exp of all scores."""
    heads = out_BHTE.shape[1]
    all_BHT = torch.stack([lse_BHT.to(scores[0].dtype), *scores]).logsumexp(0)
    found_BHTE = (lse_BHT - all_BHT).exp()[..., None] * out_BHTE
    for score_BHT, value in zip(scores, values, strict=True):
        found_BHTE = found_BHTE + (score_BHT - all_BHT).exp()[..., None] * _spread(value, heads)
    return found_BHTE.to(out_BHTE.dtype), all_BHT


def _spread(states_BGTE: Tensor, heads: int) -> Tensor:
    """A group's keys or values for each of its heads, [B, H, T, E]."""
    groups = states_BGTE.shape[1]
    return states_BGTE if groups == heads else states_BGTE.repeat_interleave(heads // groups, 1)


def _summed(states_BHTE: Tensor, groups: int) -> Tensor:
    """The gradients of a group's heads together: what undoes `_spread`."""
    return states_BHTE if groups == states_BHTE.shape[1] else states_BHTE.unflatten(1, (groups, -1)).sum(2)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


class _Joined(torch.autograd.Function):
    """Own drafts joined to what was found in the text; a group's keys are not kept once a head."""

    @staticmethod
    def forward(ctx: Any, query_BHTE: Tensor, out_BHTE: Tensor, lse_BHT: Tensor, *own: Tensor) -> Tensor:
        """Of `out_BHTE` and `lse_BHT`, found in the text; `own` are all own keys and then all own values."""
        keys, values = _halves(own)
        found_BHTE, all_BHT = _joined(out_BHTE, lse_BHT, _own_scores(query_BHTE, keys), values)
        ctx.save_for_backward(query_BHTE, out_BHTE, lse_BHT, found_BHTE, all_BHT, *own)
        return found_BHTE

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """As of any softmax, the text being one of its terms."""
        (grad_BHTE,) = gradients
        query_BHTE, out_BHTE, lse_BHT, found_BHTE, all_BHT, *own = ctx.saved_tensors
        mean_BHT = _product(grad_BHTE, found_BHTE, all_BHT)
        weight_BHT = (lse_BHT - all_BHT).exp()
        lse_grad = (weight_BHT * (_product(grad_BHTE, out_BHTE, all_BHT) - mean_BHT)).to(lse_BHT.dtype)
        out_grad = (weight_BHT[..., None] * grad_BHTE).to(out_BHTE.dtype)
        query_grad, own_grads = _own_gradients(grad_BHTE, mean_BHT, query_BHTE, all_BHT, *_halves(own))
        return query_grad, out_grad, lse_grad, *own_grads


class _OnCpu(torch.autograd.Function):
    """Torch's flash attention of a CPU for every text, and the own drafts joined to it."""

    @staticmethod
    def forward(ctx: Any, places: list[tuple[slice, slice]], query_BHTE: Tensor, *states: Tensor) -> Tensor:
        """See `attend_step`; `states` are all keys and then all values."""
        keys, values = _halves(states)
        parts = [
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*text, 0.0, True)
            for text in _of_texts(places, query_BHTE, keys[0], values[0])
        ]
        found_BHTE, all_BHT = (_laid(places, query_BHTE, [part[i] for part in parts]) for i in (0, 1))
        if len(keys) > 1:
            found_BHTE, all_BHT = _joined(found_BHTE, all_BHT, _own_scores(query_BHTE, keys[1:]), values[1:])
        ctx.places = places
        ctx.save_for_backward(query_BHTE, *states, found_BHTE, all_BHT)
        return found_BHTE

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Flash attention's own backward makes exp(z - L) again, the weights of the joined softmax, from L."""
        query_BHTE, *states, found_BHTE, all_BHT = ctx.saved_tensors
        keys, values = _halves(states)
        grad_BHTE = gradients[0].to(query_BHTE.dtype)
        parts = [
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, *text, found, all_of_text, 0.0, True
            )
            for text, (grad, found, all_of_text) in zip(
                _of_texts(ctx.places, query_BHTE, keys[0], values[0]),
                _of_texts(ctx.places, grad_BHTE, found_BHTE, all_BHT),
                strict=True,
            )
        ]
        query_grad, first_key, first_value = (
            _laid(ctx.places, whole, [part[i] for part in parts])
            for i, whole in enumerate((query_BHTE, keys[0], values[0]))
        )
        if len(keys) == 1:
            return None, query_grad, first_key, first_value
        mean_BHT = _product(grad_BHTE, found_BHTE, all_BHT)
        more, own = _own_gradients(grad_BHTE, mean_BHT, query_BHTE, all_BHT, keys[1:], values[1:])
        return None, query_grad + more, first_key, *_halves(own)[0], first_value, *_halves(own)[1]


def _own_gradients(
    grad_BHTE: Tensor,
    mean_BHT: Tensor,
    query_BHTE: Tensor,
    all_BHT: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
) -> tuple[Tensor, list[Tensor]]:
    """Gradients by way of the own drafts: of the queries; of all keys and then all values.

    Args:
        grad_BHTE: of what was found.
        mean_BHT: its product with what was found.
        query_BHTE: the queries.
        all_BHT: the log-sum-exp of all scores.
        keys: the own ones.
        values: likewise.
    """
    heads, groups, scale = query_BHTE.shape[1], keys[0].shape[1], query_BHTE.shape[-1] ** -0.5
    query_grad = torch.zeros_like(query_BHTE)
    key_grads, value_grads = [], []
    for score_BHT, key, value in zip(_own_scores(query_BHTE, keys), keys, values, strict=True):
        weight_BHT = (score_BHT - all_BHT).exp()
        pull_BHT = _product(grad_BHTE, _spread(value, heads), all_BHT) - mean_BHT
        pull_BHT1 = (scale * weight_BHT * pull_BHT)[..., None].to(key.dtype)
        query_grad += pull_BHT1 * _spread(key, heads)
        key_grads.append(_summed(pull_BHT1 * query_BHTE, groups))
        value_grads.append(_summed(weight_BHT[..., None].to(key.dtype) * grad_BHTE, groups))
    return query_grad, [*key_grads, *value_grads]


def _halves(states: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Keys and values."""
    return states[: len(states) // 2], states[len(states) // 2 :]


def _product(one: Tensor, other: Tensor, like: Tensor) -> Tensor:
    """Of two states at each position, in the format of `like`."""
    return torch.linalg.vecdot(one, other).to(like.dtype)


def _of_texts(places: list[tuple[slice, slice]], *whole: Tensor) -> Iterator[list[Tensor]]:
    """The part of each text of some tensors [B, X, T, ...]."""
    for rows, columns in places:
        yield [states[rows, :, columns] for states in whole]


def _laid(places: list[tuple[slice, slice]], like: Tensor, parts: list[Tensor]) -> Tensor:
    """The texts' parts put into whole rows again."""
    if len(parts) == 1 and parts[0].shape[2] == like.shape[2] and len(parts[0]) == len(like):
        return parts[0]
    whole = parts[0].new_empty(len(like), parts[0].shape[1], like.shape[2], *parts[0].shape[3:])
    for (rows, columns), part in zip(places, parts, strict=True):
        whole[rows, :, columns] = part
    return whole


def by_chunks(
    query_BHTE: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], sequences_BT: Tensor | None
) -> Tensor:
    """As `attend_step`, with scores of a chunk of positions at a time."""
    batch, heads, time, _ = query_BHTE.shape
    size = max(1, chunk_elements(query_BHTE.device, SCORES_ON_CPU) // (batch * heads * time))
    if size >= time:
        return _chunk(query_BHTE, keys, values, sequences_BT, 0)
    parts = [
        # What is recomputed in the backward pass is not kept until then: memory grows with T, not with T squared.
        checkpoint(_chunk, query, keys, values, sequences_BT, start, use_reentrant=False)
        for query, start in zip(query_BHTE.split(size, 2), range(0, time, size), strict=True)
    ]
    return torch.cat(parts, dim=2)


def _chunk(
    query_BHCE: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], sequences_BT: Tensor | None, start: int
) -> Tensor:
    """What positions `start` to start + C find: in step 0 up to themselves, and in each later step at themselves."""
    batch, heads, chunk, size = query_BHCE.shape
    groups, stop = keys[0].shape[1], start + chunk
    repeat = heads // groups
    # A group's queries side by side, [B, G, repeat * C, E]: one product with the group's keys.
    query = (query_BHCE * size**-0.5).reshape(batch, groups, repeat * chunk, size)
    hidden = torch.ones(chunk, stop, dtype=torch.bool, device=query.device).triu(start + 1)[None]
    if sequences_BT is not None:
        hidden = hidden | (sequences_BT[:, start:stop, None] != sequences_BT[:, None, :stop])
    first = (query @ keys[0][:, :, :stop].mT).masked_fill(hidden[:, None].repeat(1, 1, repeat, 1), float("-inf"))
    own = [(query * key[:, :, start:stop].repeat(1, 1, repeat, 1)).sum(-1, keepdim=True) for key in keys[1:]]
    weights = torch.cat([first, *own], dim=-1).softmax(-1).to(values[0].dtype)
    found = weights[..., :stop] @ values[0][:, :, :stop]
    for place, value in enumerate(values[1:], start=stop):
        found = found + weights[..., place, None] * value[:, :, start:stop].repeat(1, 1, repeat, 1)
    return found.reshape(batch, heads, chunk, size)
