"""Training-time test (EAGLE-3, arXiv:2503.01840, section 3.2).

This is the attention of a head that feeds on its own outputs in training.

At step 0, position t reads true features and attends causally to its sequence. At step s, position
t stands for position t + s, reached from t by s drafts: it attends to step 0 up to t, and to its
own earlier drafts, one key a step.

Attention over the sequence gives an output o and the log-sum-exp l of its scores. The few drafts,
with scores z_i = q k_i / sqrt(E), join this softmax afterwards:

    L = log(exp(l) + sum_i exp(z_i))
    out = exp(l - L) o + sum_i exp(z_i - L) v_i

So the sequence is read by a fused kernel that stores no scores: on a CPU torch's flash attention,
whose backward is exact if it is given `out` and L instead of o and l, on CUDA flex_attention.
Elsewhere scores are computed in chunks.

Letters in tensor names: B batch, T time, N draft positions, C positions of a chunk, H query heads,
G key-value heads, E head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import flex_attention as flex_module
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils.checkpoint import checkpoint

from ..base import TargetFeatures
from .chunk_size import SCORES_ON_CPU, chunk_elements
from .compiled import compiles_on

SMALLEST_FLEX = 16
"""Smallest head size for which flex_attention compiles."""
BLOCK = 128
"""Tokens of a block of flex_attention's masks."""
FLEX_FORMATS = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes for which it does."""
compiled_flex = lru_cache(maxsize=1)(partial(torch.compile, flex_attention, dynamic=True))
"""Compiles on its first call: torch's compiler takes long to import."""
Spans = list[tuple[slice, slice]]
"""Rows and columns of each sequence of a batch."""


def causal_blocks(
    sequences_BT: Tensor, whole_rows: bool = False, window: int | None = None
) -> BlockMask:
    """Return the causal block mask of flex_attention for sequences in packed rows.

    Each token attends within its sequence and within the window. With `whole_rows` each row is one
    sequence, and the mask of one row serves any number of them. A window counts a token's own key.

    `sequences_BT` numbers the sequences of each row in ascending order, so that the first and the
    last number of a block of 128 tokens tell which blocks it attends to. `create_block_mask` finds
    the same by a mask of T x T, of which it makes several copies in int64: 2.6 GiB at 16,384
    tokens.
    """
    # 1. First and last sequence of each block: N blocks of queries, M blocks of keys, BLOCK tokens
    #    each. Padding has number -1, which is no block's maximum.
    time = sequences_BT.shape[1]
    count = -(-time // BLOCK)
    padded_BT = F.pad(sequences_BT, (0, count * BLOCK - time), value=-1)
    blocks_BNX = padded_BT.unflatten(1, (count, BLOCK))
    first_BN = blocks_BNX[..., 0]
    last_BN = blocks_BNX.amax(-1)

    # 2. Pairs of blocks by distance. Tokens of blocks d apart are d * 128 - 127 to d * 128 + 127
    #    apart: `near` if the closest pair lies in the window, `inside` if the farthest does.
    number_N = torch.arange(count, device=sequences_BT.device)
    earlier_NM = number_N[:, None] > number_N
    near_NM = torch.ones_like(earlier_NM)
    inside_NM = near_NM
    if window is not None:
        distance_NM = (number_N[:, None] - number_N) * BLOCK
        near_NM = distance_NM - (BLOCK - 1) < window
        inside_NM = distance_NM + (BLOCK - 1) < window

    # 3. Pairs with at least one attending token: the keys' last sequence is, or follows, the
    #    queries' first.
    reached_BNM = last_BN[:, None, :] >= first_BN[..., None]
    some_BNM = (earlier_NM | (number_N[:, None] == number_N)) & near_NM & reached_BNM

    # 4. Pairs in which every token attends to every other, so that no mask is needed: one and the
    #    same sequence, an earlier block. A block with padding is not whole: the kernel must not
    #    read past the end.
    whole_N = (number_N + 1) * BLOCK <= time
    single_BN = (first_BN == last_BN) & whole_N
    same_BNM = (
        single_BN[..., None] & single_BN[:, None, :] & (first_BN[..., None] == first_BN[:, None, :])
    )
    all_BNM = earlier_NM & inside_NM & same_BNM

    # 5. The mask of a token, for the other pairs; flex_attention calls it by index.
    def allowed(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = query >= key
        if window is not None:
            seen = seen & (key > query - window)
        if not whole_rows:
            seen = seen & (sequences_BT[row, query] == sequences_BT[row, key])
        return seen

    return BlockMask.from_kv_blocks(
        *listed((some_BNM & ~all_BNM)[:, None]),
        *listed(all_BNM[:, None]),
        BLOCK,
        allowed,
        seq_lengths=(time, time),
    )


def listed(chosen_BHNM: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many key blocks each query block attends to, and the numbers of all key blocks.

    The blocks attended to come first.
    """
    # Chosen [0, 1, 0, 1] gives a count of 2 and the order [1, 3, 0, 2].
    order_BHNM = torch.argsort(chosen_BHNM.to(torch.int8), dim=-1, descending=True, stable=True)
    return chosen_BHNM.sum(-1, dtype=torch.int32), order_BHNM.to(torch.int32).contiguous()


@lru_cache(maxsize=64)
def _causal_rows(time: int, device: torch.device, window: int | None = None) -> BlockMask:
    """Block mask of rows that each are one sequence."""
    rows_1T = torch.zeros(1, time, dtype=torch.int64, device=device)
    return causal_blocks(rows_1T, whole_rows=True, window=window)


class TrainingTimeTest:
    """Keys and values of every step, and a batch's sequences in the forms that kernels need.

    Where only some drafts are judged, only what they attend to is computed at the other positions:
    step 0 up to the keys and values of the last layer.
    """

    def __init__(
        self,
        num_layers: int,
        sequences_BT: Tensor | None = None,
        drafts_N: Tensor | None = None,
        window: int | None = None,
    ) -> None:
        """Begin at step 0.

        `sequences_BT` numbers the sequences of packed rows. `drafts_N` are the positions among the
        flattened [B * T] at which drafts are judged, None for all: step 0 takes states [B, T, D]
        and returns [1, N, D], as later steps do. `window` is the number of newest positions that
        are seen, the own included: at least the number of steps.
        """
        self.sequences_BT = sequences_BT
        self.drafts_N = drafts_N
        self.window = window
        self._block_masks: dict[int | None, BlockMask] = {}
        self.steps: list[dict[int, tuple[Tensor, Tensor]]] = [{} for _ in range(num_layers)]
        """Keys and values by step, for each layer."""

    @cached_property
    def spans(self) -> Spans:
        """Span of every sequence, for a CPU, where reading `sequences_BT` waits for no device."""
        if self.sequences_BT is None:
            return [(slice(None), slice(None))]  # all rows at once
        spans = []
        for row, numbers_T in enumerate(self.sequences_BT):
            # Numbers [1, 1, 1, 2, 2] have lengths [3, 2] and the columns 0 to 3 and 3 to 5.
            start = 0
            for length in numbers_T.unique_consecutive(return_counts=True)[1].tolist():
                spans.append((slice(row, row + 1), slice(start, start + length)))
                start += length
        return spans

    def first_step_window(self, step: int, time: int) -> int | None:
        """Newest keys of step 0 that a position t sees at a step; None for all of them.

        It stands for position t + step, and its own drafts lie between.
        """
        # Window 8, step 2: position t stands for t + 2 and sees t - 5 to t + 2, of which its drafts
        # are t + 1 and t + 2. Six keys of step 0 are left.
        if self.window is None or self.window - step >= time:
            return None
        return self.window - step

    def block_mask(self, window: int | None = None) -> BlockMask:
        """Return the causal block mask of flex_attention for packed rows.

        Each token attends within its sequence and within the window.
        """
        assert self.sequences_BT is not None
        if window not in self._block_masks:
            self._block_masks[window] = causal_blocks(self.sequences_BT, window=window)
        return self._block_masks[window]

    def at(self, step: int) -> TrainingStep:
        """The KV view of one step, which may run again to recompute activations."""
        return TrainingStep(self, step, self.drafts_N)

    def at_drafts(self, states_BT: Tensor) -> Tensor:
        """[B, T, ...] at the draft positions, [1, N, ...]."""
        return states_BT if self.drafts_N is None else states_BT.flatten(0, 1)[self.drafts_N][None]

    def outputs(
        self,
        run: Callable[..., Tensor],
        features: TargetFeatures,
        state_BTD: Tensor,
        steps: int,
        recompute: bool,
        fed_back: Callable[[Tensor], Tensor] | None = None,
    ) -> list[Tensor]:
        """Return the outputs of every step, teacher-forced on the text.

        They are [B, T, D], or [1, N, D] at the draft positions. `run` is called with next tokens,
        states (`state_BTD` at step 0), positions, the KV view and the target's modules. `fed_back`
        maps its output to the state that the next step reads; None for the identity.
        """
        if recompute and torch.is_grad_enabled():
            run = partial(checkpoint, run, use_reentrant=False)
        outputs: list[Tensor] = []
        for step in range(steps):
            # At step s, position t reads the token at t + 1 + s and stands for position t + s.
            next_tokens_BT = features.next_tokens_BT(step)
            positions_BT = features.position_ids_BT + step
            # Step 0 runs at all T positions, later steps at the N draft positions.
            if step > 0:
                next_tokens_BT = self.at_drafts(next_tokens_BT)
                positions_BT = self.at_drafts(positions_BT)
                state_BTD = outputs[-1] if fed_back is None else fed_back(outputs[-1])
            outputs.append(
                run(next_tokens_BT, state_BTD, positions_BT, self.at(step), features.modules)
            )
        return outputs


@dataclass
class TrainingStep:
    """KV view of one step of training-time test."""

    test: TrainingTimeTest
    step: int
    drafts_N: Tensor | None

    def attend(
        self, layer: int, query_BHTE: Tensor, key_BGTE: Tensor, value_BGTE: Tensor
    ) -> Tensor:
        test = self.test
        steps = test.steps[layer]

        # 1. From the draft positions [1, X, N, E] to all positions [B, X, T, E], zeros at the
        #    others: each query must meet the key of step 0 at its own position. X is H or G.
        if self.step > 0 and self.drafts_N is not None:
            batch, _, time, size = steps[0][0].shape
            whole = []
            for states_1XNE in (query_BHTE, key_BGTE, value_BGTE):
                zeros = states_1XNE.new_zeros(batch * time, states_1XNE.shape[1], size)
                spread = zeros.index_copy(0, self.drafts_N, states_1XNE[0].transpose(0, 1))
                whole.append(spread.unflatten(0, (batch, time)).transpose(1, 2))
            query_BHTE, key_BGTE, value_BGTE = whole

        # 2. Attention over the keys of step 0 and of every step up to this one. By step number, not
        #    appended: recomputing activations runs a step again.
        steps[self.step] = key_BGTE, value_BGTE
        keys, values = zip(*(steps[i] for i in range(self.step + 1)), strict=True)
        out_BHTE = attend_step(query_BHTE, keys, values, test)

        # 3. Back to the draft positions. At step 0 the next layer still needs keys and values of
        #    all positions.
        if self.step == 0 and layer < len(test.steps) - 1:
            return out_BHTE
        return test.at_drafts(out_BHTE.transpose(1, 2)).transpose(1, 2)


def attend_step(
    query_BHTE: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], test: TrainingTimeTest
) -> Tensor:
    """Attention output [B, H, T, E] of the newest step, with the rows' sequences of `test`.

    Keys and values are [B, G, T, E] of each step: step 0 is attended to causally, later ones at the
    query's position.
    """
    device = query_BHTE.device
    # Autocast casts the inputs of torch's own attention, but not those of ours.
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
        query_BHTE = query_BHTE.to(dtype)
        keys = [key_BGTE.to(dtype) for key_BGTE in keys]
        values = [value_BGTE.to(dtype) for value_BGTE in values]
    window = test.first_step_window(len(keys) - 1, query_BHTE.shape[2])
    # Step 0 of rows that are one sequence each is plain causal attention.
    if len(keys) == 1 and test.sequences_BT is None and window is None:
        return F.scaled_dot_product_attention(
            query_BHTE, keys[0], values[0], is_causal=True, enable_gqa=True
        )
    # torch's flash attention on a CPU has no window.
    if device.type == "cpu" and window is None:
        return _FlashOnCpu.apply(test.spans, query_BHTE, *keys, *values)
    if flex_compiles(query_BHTE):
        return by_flex(compiled_flex(), query_BHTE, keys, values, test)
    return by_chunks(query_BHTE, keys, values, test.sequences_BT, window)


def flex_compiles(query: Tensor) -> bool:
    """Whether flex_attention compiles for queries [..., E] where they are."""
    fits = query.dtype in FLEX_FORMATS and query.shape[-1] >= SMALLEST_FLEX
    return fits and compiles_on(query.device)


def by_flex(
    attention: Callable[..., Any],
    query_BHTE: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    test: TrainingTimeTest,
) -> Tensor:
    """`attend_step` by flex_attention, compiled or not: one mask and one shape serve all steps."""
    time = query_BHTE.shape[2]
    window = test.first_step_window(len(keys) - 1, time)
    whole_rows = test.sequences_BT is None
    mask = _causal_rows(time, query_BHTE.device, window) if whole_rows else test.block_mask(window)
    # The kernel reads step 0 alone; own drafts join its softmax afterwards, by the log-sum-exp of
    # its scores. torch 2.8 has an older option for that.
    request = getattr(flex_module, "AuxRequest", None)
    with_lse = {"return_lse": True} if request is None else {"return_aux": request(lse=True)}
    out_BHTE, auxiliary = attention(
        query_BHTE, keys[0], values[0], block_mask=mask, enable_gqa=True, **with_lse
    )
    if len(keys) == 1:
        return out_BHTE
    lse_BHT = auxiliary if isinstance(auxiliary, Tensor) else auxiliary.lse
    return _Joined.apply(query_BHTE, out_BHTE, lse_BHT, *keys[1:], *values[1:])


def _spread(states_BGTE: Tensor, heads: int) -> Tensor:
    """Keys or values of the groups, repeated for each of their heads."""
    groups = states_BGTE.shape[1]
    return states_BGTE if groups == heads else states_BGTE.repeat_interleave(heads // groups, 1)


def _own_scores(query_BHTE: Tensor, keys: Sequence[Tensor]) -> list[Tensor]:
    """Scores [B, H, T] of each position with its own key of every step, in at least float32."""
    heads, scale = query_BHTE.shape[1], query_BHTE.shape[-1] ** -0.5
    dtype = torch.promote_types(query_BHTE.dtype, torch.float32)
    return [scale * torch.linalg.vecdot(query_BHTE, _spread(key, heads)).to(dtype) for key in keys]


def _join(
    out_BHTE: Tensor, lse_BHT: Tensor, scores: Sequence[Tensor], values: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Return attention over the sequence and own drafts, and the log-sum-exp of all scores."""
    heads = out_BHTE.shape[1]
    # L = log(exp(l) + sum_i exp(z_i))
    all_BHT = torch.stack([lse_BHT.to(scores[0].dtype), *scores]).logsumexp(0)
    # out = exp(l - L) o + sum_i exp(z_i - L) v_i
    joined_BHTE = (lse_BHT - all_BHT).exp()[..., None] * out_BHTE
    for score_BHT, value in zip(scores, values, strict=True):
        joined_BHTE = joined_BHTE + (score_BHT - all_BHT).exp()[..., None] * _spread(value, heads)
    return joined_BHTE.to(out_BHTE.dtype), all_BHT


class _Joined(torch.autograd.Function):
    """Joins own drafts to attention over the sequence; saves a group's keys once."""

    @staticmethod
    def forward(
        ctx: Any, query_BHTE: Tensor, out_BHTE: Tensor, lse_BHT: Tensor, *drafts: Tensor
    ) -> Tensor:
        # autograd passes tensors one by one: the keys of all later steps, then their values
        count = len(drafts) // 2
        keys = drafts[:count]
        values = drafts[count:]
        joined_BHTE, all_BHT = _join(out_BHTE, lse_BHT, _own_scores(query_BHTE, keys), values)
        ctx.save_for_backward(query_BHTE, out_BHTE, lse_BHT, joined_BHTE, all_BHT, *drafts)
        return joined_BHTE

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of a softmax of which the sequence is one term."""
        (grad_BHTE,) = gradients
        query_BHTE, out_BHTE, lse_BHT, joined_BHTE, all_BHT, *drafts = ctx.saved_tensors
        # For a softmax w with output sum_j w_j v_j, the gradient of score j is
        # w_j (grad . v_j - grad . output). Here term j is the sequence, with v_j its output o.
        mean_BHT = torch.linalg.vecdot(grad_BHTE, joined_BHTE).to(all_BHT.dtype)
        pull_BHT = torch.linalg.vecdot(grad_BHTE, out_BHTE).to(all_BHT.dtype) - mean_BHT
        weight_BHT = (lse_BHT - all_BHT).exp()
        out_grad = (weight_BHT[..., None] * grad_BHTE).to(out_BHTE.dtype)
        # The other terms are the own drafts.
        count = len(drafts) // 2
        query_grad, *draft_grads = _own_gradients(
            grad_BHTE, mean_BHT, query_BHTE, all_BHT, drafts[:count], drafts[count:]
        )
        return query_grad, out_grad, (weight_BHT * pull_BHT).to(lse_BHT.dtype), *draft_grads


class _FlashOnCpu(torch.autograd.Function):
    """torch's flash attention on a CPU for every sequence, joined with the own drafts."""

    @staticmethod
    def forward(ctx: Any, spans: Spans, query_BHTE: Tensor, *states: Tensor) -> Tensor:
        # the keys of all steps, then their values
        count = len(states) // 2
        keys = states[:count]
        values = states[count:]
        # 1. Step 0, sequence by sequence: without dropout (0.0), causal (True).
        parts = [
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*sequence, 0.0, True)
            for sequence in _split(spans, query_BHTE, keys[0], values[0])
        ]
        out_BHTE = _whole(spans, query_BHTE, [output for output, _ in parts])
        all_BHT = _whole(spans, query_BHTE, [log_sum_exp for _, log_sum_exp in parts])
        # 2. The own drafts of later steps.
        if len(keys) > 1:
            out_BHTE, all_BHT = _join(
                out_BHTE, all_BHT, _own_scores(query_BHTE, keys[1:]), values[1:]
            )
        ctx.spans = spans
        ctx.save_for_backward(query_BHTE, *states, out_BHTE, all_BHT)
        return out_BHTE

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients, computed by flash attention's backward.

        It recomputes exp(z - L), the weights of the joined softmax, from L.
        """
        query_BHTE, *states, out_BHTE, all_BHT = ctx.saved_tensors
        count = len(states) // 2
        keys = states[:count]
        values = states[count:]
        grad_BHTE = gradients[0].to(query_BHTE.dtype)

        # 1. Step 0. Given the joined output and L, the kernel's gradients are those of its part in
        #    the joined softmax.
        parts = []
        inputs = _split(ctx.spans, query_BHTE, keys[0], values[0])
        outputs = _split(ctx.spans, grad_BHTE, out_BHTE, all_BHT)
        for (query, key, value), (grad, out, log_sum_exp) in zip(inputs, outputs, strict=True):
            parts.append(
                torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    grad, query, key, value, out, log_sum_exp, 0.0, True
                )
            )
        query_grad = _whole(ctx.spans, query_BHTE, [part[0] for part in parts])
        first_key_grad = _whole(ctx.spans, keys[0], [part[1] for part in parts])
        first_value_grad = _whole(ctx.spans, values[0], [part[2] for part in parts])
        if count == 1:
            return None, query_grad, first_key_grad, first_value_grad

        # 2. The own drafts, which the queries read too.
        mean_BHT = torch.linalg.vecdot(grad_BHTE, out_BHTE).to(all_BHT.dtype)
        more_query_grad, *draft_grads = _own_gradients(
            grad_BHTE, mean_BHT, query_BHTE, all_BHT, keys[1:], values[1:]
        )
        key_grads = (first_key_grad, *draft_grads[: count - 1])
        value_grads = (first_value_grad, *draft_grads[count - 1 :])
        return None, query_grad + more_query_grad, *key_grads, *value_grads


def _own_gradients(
    grad_BHTE: Tensor,
    mean_BHT: Tensor,
    query_BHTE: Tensor,
    all_BHT: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
) -> list[Tensor]:
    """Gradients through the own drafts: of the queries, of each key, of each value.

    `mean_BHT` is the product of the output and its gradient, `all_BHT` the log-sum-exp of all
    scores.
    """
    heads = query_BHTE.shape[1]
    groups = keys[0].shape[1]
    scale = query_BHTE.shape[-1] ** -0.5
    query_grad = torch.zeros_like(query_BHTE)
    key_grads: list[Tensor] = []
    value_grads: list[Tensor] = []
    for score_BHT, key, value in zip(_own_scores(query_BHTE, keys), keys, values, strict=True):
        weight_BHT = (score_BHT - all_BHT).exp()
        # The gradient of the score: w (grad . v - grad . output), here before the weight.
        pull_BHT = (
            torch.linalg.vecdot(grad_BHTE, _spread(value, heads)).to(all_BHT.dtype) - mean_BHT
        )
        pull_BHT1 = (scale * weight_BHT * pull_BHT)[..., None].to(key.dtype)
        query_grad += pull_BHT1 * _spread(key, heads)
        # A group's key and value get the sum over its query heads.
        for grads, of_heads in (
            (key_grads, pull_BHT1 * query_BHTE),
            (value_grads, weight_BHT[..., None].to(key.dtype) * grad_BHTE),
        ):
            if groups == heads:
                grads.append(of_heads)
            else:
                grads.append(of_heads.unflatten(1, (groups, -1)).sum(2))
    return [query_grad, *key_grads, *value_grads]


def _split(spans: Spans, *whole: Tensor) -> list[list[Tensor]]:
    """Each sequence's part of tensors [B, X, T, ...]."""
    return [[states[rows, :, columns] for states in whole] for rows, columns in spans]


def _whole(spans: Spans, like: Tensor, parts: list[Tensor]) -> Tensor:
    """The sequences' parts put back into rows, [B, X, T, ...] with B and T of `like`."""
    # One part that is the whole batch needs no copy.
    if len(parts) == 1 and parts[0].shape[2] == like.shape[2] and len(parts[0]) == len(like):
        return parts[0]
    whole = parts[0].new_empty(len(like), parts[0].shape[1], like.shape[2], *parts[0].shape[3:])
    for (rows, columns), part in zip(spans, parts, strict=True):
        whole[rows, :, columns] = part
    return whole


def by_chunks(
    query_BHTE: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    sequences_BT: Tensor | None,
    window: int | None = None,
) -> Tensor:
    """`attend_step` with the scores of one chunk of positions at a time.

    With `window`, a position sees that many keys of step 0, and a chunk's scores are computed for
    no others.
    """
    batch, heads, time, _ = query_BHTE.shape
    elements = chunk_elements(query_BHTE.device, SCORES_ON_CPU)
    size = max(1, elements // (batch * heads * time))
    if window is not None:  # a chunk as long as the window: twice the window's keys
        size = max(1, min(window, elements // (batch * heads * 2 * window)))
    if size >= time:
        return _chunk(query_BHTE, keys, values, sequences_BT, 0, window)
    parts = [
        # Recomputed in the backward pass, so that memory grows with T, not with T squared.
        checkpoint(_chunk, query, keys, values, sequences_BT, start, window, use_reentrant=False)
        for query, start in zip(query_BHTE.split(size, 2), range(0, time, size), strict=True)
    ]
    return torch.cat(parts, dim=2)


def _chunk(
    query_BHCE: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    sequences_BT: Tensor | None,
    start: int,
    window: int | None,
) -> Tensor:
    """The output at positions `start` to start + C."""
    batch, heads, chunk, size = query_BHCE.shape
    groups = keys[0].shape[1]
    stop = start + chunk
    repeat = heads // groups

    # 1. The keys of step 0 that the chunk may see, [first, stop). Positions 6 and 7 with a window
    #    of 4: keys 3 to 7, five columns.
    first = 0 if window is None else max(0, start - window + 1)
    seen = stop - first
    # A group's queries side by side, [B, G, repeat * C, E]: one product with the group's keys.
    query = (query_BHCE * size**-0.5).reshape(batch, groups, repeat * chunk, size)

    # 2. What is hidden, [B or 1, C, seen]: later positions, positions before the window, other
    #    sequences. In the example above row 0 is [0, 0, 0, 0, 1] and row 1 [1, 0, 0, 0, 0].
    everywhere = torch.ones(chunk, seen, dtype=torch.bool, device=query.device)
    hidden = everywhere.triu(start - first + 1)[None]
    if window is not None:
        hidden = hidden | everywhere.tril(start - first - window)
    if sequences_BT is not None:
        hidden = hidden | (sequences_BT[:, start:stop, None] != sequences_BT[:, None, first:stop])

    # 3. Scores of step 0, then one column for each own draft, and one softmax over both.
    scores = (query @ keys[0][:, :, first:stop].mT).masked_fill(
        hidden[:, None].repeat(1, 1, repeat, 1), float("-inf")
    )
    draft_scores = [
        (query * key[:, :, start:stop].repeat(1, 1, repeat, 1)).sum(-1, keepdim=True)
        for key in keys[1:]
    ]
    weights = torch.cat([scores, *draft_scores], dim=-1).softmax(-1).to(values[0].dtype)

    # 4. The weighted values, with the heads of a group apart again.
    out = weights[..., :seen] @ values[0][:, :, first:stop]
    for column, value in enumerate(values[1:], start=seen):
        out = out + weights[..., column, None] * value[:, :, start:stop].repeat(1, 1, repeat, 1)
    return out.reshape(batch, heads, chunk, size)
