"""Training objectives over the vocabulary, for every head, computed chunk by chunk.

With the target's distribution p and the draft's q over the draft vocabulary, per position:

    ce           -log q(x), x the token of the data
    soft_ce      -sum p log q             p renormalised on the draft vocabulary (EAGLE-3, arXiv:2503.01840)
    kl           sum p log(p / q)         the same gradient as soft_ce, and 0 where they agree
    reverse_kl   sum q log(q / p)
    tv           1 - sum min(p, q)        one minus the acceptance rate of exact verification
    lk_alpha     -log sum min(p, q)       (LK losses, arXiv:2602.23881)
    lk_lambda    s kl + (1 - s) tv,  s = exp(-3 sum min(p, q)) held constant: kl first, then acceptance itself
    smooth_l1    between predicted and true features, for heads that predict features (EAGLE-1, arXiv:2401.15077)
    confidence   cross-entropy of a head's estimate of its acceptance rate with sum min(p, q), held constant (DSpark)

tv, lk and confidence use p as it is: what lies outside the draft vocabulary can never be accepted. The others need no
logits of the target outside it, which are most of the cost. Positions whose token lies outside carry no loss.

Letters in tensor names: N draft positions, K depths, R positions of the flattened batch, U those that judge a chunk,
D hidden size, V vocabulary, and in the target's distribution its tokens: the draft vocabulary or the most likely ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .base import HeadOutput, TargetFeatures
from .layers.chunk_size import VOCABULARY_ON_CPU, chunk_elements
from .layers.decoder_layer import at_least_fp32
from .layers.draft_vocab import draft_ids

FEWEST = 64
"""Minimum number of positions in a chunk, however large the vocabulary."""


@dataclass(frozen=True)
class Objective:
    """A weighted mix of losses, and the weights of depths: options of every head that is trained on them."""

    loss: dict[str, float] = field(default_factory=lambda: {"soft_ce": 1.0})
    """Losses and their weights; see losses.py."""
    depth_weights: str = "decay"
    """decay: decay ** depth. d_pace: the derivative of the expected number of accepted tokens by a token's
    log-probability, sum_{k >= j} prod_{i <= k} q_i with q_i the draft's probability of the true token
    (arXiv:2605.18810)."""
    decay: float = 0.8
    """Loss weight of a depth relative to the one before, for depth_weights: decay."""
    target_top_k: int | None = None
    """Number of the target's most likely tokens to which its distribution is truncated, renormalised where the loss
    renormalises; null for the whole draft vocabulary."""
    d_pace_smoothing: float = 0.0
    """Smoothing a of d_pace, from 0 to 1: a + (1 - a) q_i takes the place of q_i, so that deep tokens count early."""

    @property
    def over_vocabulary(self) -> list[str]:
        """The weighted losses that this module computes: all but smooth_l1."""
        return [name for name, weight in self.loss.items() if weight > 0 and name in LOSSES]

    def target_logits(self, vocab_size: int, draft_vocab_size: int) -> int:
        """Number of the target's logits that are computed at a position."""
        if self.needs_mass:
            return vocab_size
        return 0 if self.over_vocabulary in ([], ["ce"]) else draft_vocab_size

    @property
    def needs_mass(self) -> bool:
        """Whether a loss uses the target's probabilities as they are, and so its logits of the whole vocabulary."""
        return any(self.loss.get(name, 0) > 0 for name in NEED_MASS)

    def check(self, head: str, *own: str) -> None:
        """Refuse losses and weights that the head cannot be trained on, with a ValueError that names them.

        `own` are losses from `NEED_HEAD` that it can have.
        """
        valid = ", ".join((*LOSSES, *own))
        for name, weight in self.loss.items():
            if name in NEED_HEAD and name not in own:
                raise ValueError(f"{head} cannot have the loss {name!r}: it {NEED_HEAD[name]}; choose from {valid}")
            if name not in (*LOSSES, *own):
                raise ValueError(f"unknown {head} loss {name!r}; choose from {valid}")
            if isinstance(weight, bool) or not isinstance(weight, (int, float)) or weight < 0:
                raise ValueError(f"{head} loss {name!r} needs a weight of at least 0, not {weight!r}")
        if not any(self.loss.values()):
            raise ValueError(f"{head} needs a loss with a weight above 0; choose from {valid}")
        if self.depth_weights not in ("decay", "d_pace"):
            raise ValueError(f"unknown {head} depth_weights {self.depth_weights!r}; choose from decay, d_pace")
        if not 0 <= self.d_pace_smoothing <= 1:
            raise ValueError(f"{head} d_pace_smoothing must be from 0 to 1, not {self.d_pace_smoothing}")
        if self.decay <= 0:
            raise ValueError(f"{head} decay must be above 0, not {self.decay}")
        if self.target_top_k is not None and self.target_top_k < 1:
            raise ValueError(f"{head} target_top_k must be at least 1, or null for all, not {self.target_top_k}")
        if self.target_top_k is not None and self.loss.get("reverse_kl"):
            raise ValueError(f"{head} cannot have both target_top_k and reverse_kl, which is infinite where p is 0")


@dataclass(frozen=True)
class DraftPositions:
    """Positions of a batch at which drafts are judged, as indices into its flattened [B * T] tokens.

    A draft position is the position t of the newest feature. The root of its tree is the token at t + 1; the draft at
    depth k, from 0, is judged by the target's state at t + 1 + k and by the token at t + 2 + k.

    Draft positions are sorted. If they are `all` that there are, draft k of position n, where valid, is judged where
    draft 0 of position n + k is, so that the target's distributions at `rows_NK[:, 0]` are enough.
    """

    index_N: Tensor
    rows_NK: Tensor
    """The position whose target state judges the draft; the token after it is the true one."""
    valid_NK: Tensor
    """True where the root and all drafts up to depth k lie in one answer."""
    per_row: tuple[int, ...] = ()
    """Draft positions of each row of the batch, if the loss mask is on the host, as in training."""
    judged_U: Tensor | None = None
    """The different positions in `rows_NK`, sorted, where some draft positions are left out; else None."""
    places_NK: Tensor | None = None
    """Where each of `rows_NK` stands in `judged_U`, on the host."""

    @property
    def all(self) -> bool:
        """Whether no position that has a draft to judge is left out."""
        return self.judged_U is None

    @classmethod
    def of(cls, features: TargetFeatures, depths: int, at_most: int | None = None) -> DraftPositions:
        """The positions of a batch that have at least one draft to judge, or `at_most` of each sequence, at random."""
        loss_mask_BT = features.loss_mask_BT
        batch, time = loss_mask_BT.shape
        padded = F.pad(loss_mask_BT, (0, depths + 1))
        answers = [padded[:, k : k + time] for k in range(1, depths + 2)]  # answers[k - 1]_BT: the token at t + k
        valid_BTK = torch.stack(answers, dim=-1).cumprod(-1)[..., 1:].bool()
        has_draft_BT = valid_BTK[..., 0]
        every = True
        if at_most is not None:
            documents_BT = features.documents_BT
            if documents_BT is None and features.sequences_BT is not None:
                documents_BT = features.sequences_BT.cpu()  # sync: training gives them on the host
            chosen_BT = _some_of_each(has_draft_BT, documents_BT, at_most)
            every = torch.equal(chosen_BT, has_draft_BT)
            has_draft_BT = chosen_BT
        index_N = has_draft_BT.flatten().nonzero()[:, 0]
        # Past the end any row serves: nothing is valid there.
        rows_NK = (index_N[:, None] + 1 + torch.arange(depths, device=index_N.device)).clamp(max=batch * time - 2)
        per_row = tuple(has_draft_BT.sum(1).tolist()) if has_draft_BT.device.type == "cpu" else ()
        judged = () if every else rows_NK.unique(return_inverse=True)
        positions = cls(index_N, rows_NK, valid_BTK.flatten(0, 1)[index_N], per_row, *judged)
        return positions._to(features.tokens_BT.device)

    @classmethod
    def of_answers(cls, features: TargetFeatures) -> DraftPositions:
        """The positions before answer tokens, at one depth: for a model that is judged on its own next token."""
        before_BT = F.pad(features.loss_mask_BT[:, 1:], (0, 1))
        index_N = before_BT.flatten().nonzero()[:, 0]
        valid_N1 = torch.ones_like(index_N[:, None], dtype=torch.bool)
        return cls(index_N, index_N[:, None], valid_N1)._to(features.tokens_BT.device)

    def _to(self, device: torch.device) -> DraftPositions:
        """Copied to a device without waiting for it: their number was found on the host."""
        tensors = {name: getattr(self, name) for name in ("index_N", "rows_NK", "valid_NK", "judged_U")}
        given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        if device.type == "cuda":  # a copy from pageable memory may wait for what the device is doing
            given = {name: tensor.pin_memory() for name, tensor in given.items()}
        moved: Any = {name: tensor.to(device, non_blocking=True) for name, tensor in given.items()}
        return replace(self, **moved)


def _some_of_each(has_draft_BT: Tensor, documents_BT: Tensor | None, at_most: int) -> Tensor:
    """At most so many of the positions of each sequence, at random, by torch's global generator on the host.

    A packed row holds several sequences, numbered in their order; None where every row is one.
    """
    batch, time = has_draft_BT.shape
    sequences_BT = torch.zeros(batch, time, dtype=torch.int64) if documents_BT is None else documents_BT
    counts_BS = torch.zeros(batch, time + 1, dtype=torch.int64).scatter_add_(1, sequences_BT, has_draft_BT.long())
    if int(counts_BS.max()) <= at_most:
        return has_draft_BT
    # Sorted by sequence, then at random with the positions that have no draft last: the rank in the row, less those of
    # the sequences before, is the rank in the sequence.
    draws_BT = torch.rand(batch, time).masked_fill(~has_draft_BT, 1.0).double()
    order_BT = (2 * sequences_BT + draws_BT).argsort(1)
    ranks_BT = order_BT.argsort(1)
    sizes_BS = torch.zeros(batch, time + 1, dtype=torch.int64).scatter_add_(1, sequences_BT, torch.ones_like(ranks_BT))
    first_BS = sizes_BS.cumsum(1) - sizes_BS
    return has_draft_BT & (ranks_BT - first_BS.gather(1, sequences_BT) < at_most)


class BlockTerms(NamedTuple):
    """Terms of a head that corrects its drafts by the token before each (DSpark)."""

    latents: list[Tensor]
    """latent_NR of each depth: weight_VR latent is added to the logits."""
    weight_VR: Tensor
    confidences: list[Tensor]
    """Logits [N] of the head's estimate of its acceptance rate, by depth; empty without one."""


def draft_loss(
    hiddens: Sequence[Tensor],
    lm_heads: Sequence[Tensor],
    vocabulary_V: Tensor | None,
    features: TargetFeatures,
    positions: DraftPositions,
    objective: Objective,
    ranks: int = 1,
    block: BlockTerms | None = None,
) -> HeadOutput:
    """The loss of drafts at all depths, but for `smooth_l1`.

    Gradients are computed in the forward, chunk by chunk, so that no [positions, vocabulary] tensor outlives its
    chunk, and the target's distribution is computed once for all depths. The backward only scales them.

    `hiddens` holds hidden_ND of each depth, the input of its LM head at every draft position; `lm_heads` the weights
    [V, D], where depths may share a tensor. `vocabulary_V` are the sorted target ids of the draft vocabulary, None for
    all. The `ranks` best tokens of a draft are counted as hits. `block` corrects the logits, and adds the loss
    `confidence`, which has the depth weights of `decay` and counts where the true token cannot be drafted, too.
    """
    depths = len(hiddens)
    weights = list({id(weight): weight for weight in lm_heads}.values())
    which = [next(i for i, weight in enumerate(weights) if weight is own) for own in lm_heads]
    modules = features.modules
    shared = [own is modules.lm_head.weight for own in lm_heads]  # the target's, with its bias and its scale
    dtype = at_least_fp32(hiddens[0][:0]).dtype
    device = hiddens[0].device
    losses_K = torch.zeros(depths, dtype=dtype, device=device)
    hits_KI = torch.zeros(depths, ranks, dtype=torch.int64, device=device)
    widest = max(map(len, weights))
    target_logits = objective.target_logits(len(modules.lm_head.weight), widest)
    target_probs = _target_probs(features, vocabulary_V, objective) if target_logits else None
    tokens_R = features.tokens_BT.flatten()
    size = positions_at_once(device, max(target_logits * (1 if positions.all else depths), widest))
    count = len(positions.index_N)

    terms = [] if block is None else [*block.latents, block.weight_VR, *block.confidences]

    def of_chunk(start: int, leaves: Sequence[Tensor]) -> Iterator[Tensor]:
        """The weighted loss of each depth, one after the other.

        Positions without a draft at a depth get a weight of 0: they are few, at the ends of answers, and to leave them
        out the host would have to wait for the accelerator.
        """
        hidden, heads = leaves[:depths], [leaves[depths + i] for i in which]
        rest = leaves[depths + len(weights) :]
        latents, corrections = rest[:depths], rest[depths:]
        stop = min(start + size, count)

        def logits(k: int) -> Tensor:
            hidden_ND, weight_VD = hidden[k][start:stop], heads[k]
            if shared[k]:
                logits_NV = at_least_fp32(modules.logits(hidden_ND, weight_VD, modules.lm_head.bias))
            else:
                logits_NV = at_least_fp32(F.linear(hidden_ND, weight_VD))
            return logits_NV + F.linear(latents[k][start:stop], corrections[0]) if latents else logits_NV

        labels_NK = draft_ids(tokens_R[positions.rows_NK[start:stop] + 1], vocabulary_V)
        valid_NK = positions.valid_NK[start:stop] & (labels_NK >= 0)
        probs_U, places_NK = None, None
        if target_probs is not None:
            if positions.judged_U is None or positions.places_NK is None:
                judging_U = torch.arange(start, stop + depths - 1, device=device).clamp(max=count - 1)
                probs_U = target_probs(positions.rows_NK[judging_U, 0])
            else:
                places_NK = positions.places_NK[start:stop]
                first, last = int(places_NK[0, 0]), int(places_NK[-1, -1])  # on the host; they grow with n and k
                probs_U = target_probs(positions.judged_U[first : last + 1])
                places_NK = (places_NK - first).to(device)
        of_depths = (logits(k) for k in range(depths))
        weights_NK = _depth_weights(objective, of_depths, labels_NK, valid_NK, dtype) * valid_NK
        for k in range(depths):
            logits_NV = logits(k)
            labels_N, valid_N = labels_NK[:, k], valid_NK[:, k]
            if ranks == 1:  # an argmax takes a fraction of the time of `topk`
                best_NI = logits_NV.detach().argmax(-1, keepdim=True)
            else:
                best_NI = logits_NV.detach().topk(min(ranks, logits_NV.shape[-1]), dim=-1).indices
            hits_KI[k, : best_NI.shape[1]] += ((best_NI == labels_N[:, None]) & valid_N[:, None]).sum(0)
            its = slice(k, k + stop - start) if places_NK is None else places_NK[:, k]
            probs_N = probs_U and TargetProbs._make(each if each is None else each[its] for each in probs_U)
            log_q_NV = logits_NV.log_softmax(-1)
            loss_N = log_q_NV.new_zeros(stop - start)
            for name in objective.over_vocabulary:
                loss_N = loss_N + objective.loss[name] * _loss(name, log_q_NV, labels_N, probs_N)
            losses_K[k] += (loss_N.detach() * valid_N).sum()
            loss = (loss_N * weights_NK[:, k]).sum()
            if corrections[1:]:
                confidence_N, rate_N = corrections[1 + k][start:stop], _overlap(log_q_NV, probs_N).detach()
                wrong_N = F.binary_cross_entropy_with_logits(confidence_N.to(dtype), rate_N, reduction="none")
                wrong = objective.loss["confidence"] * (wrong_N * positions.valid_NK[start:stop, k]).sum()
                losses_K[k] += wrong.detach()
                loss = loss + objective.decay**k * wrong
            yield loss

    loss = _Summed.apply(of_chunk, range(0, count, size), torch.is_grad_enabled(), *hiddens, *weights, *terms)
    return HeadOutput(loss, losses_K, positions.valid_NK.sum(0), hits_KI)


def positions_at_once(device: torch.device, vocab_size: int) -> int:
    """Positions of a chunk of the loss, for the larger of the target's and the draft's logits."""
    return max(FEWEST, chunk_elements(device, VOCABULARY_ON_CPU) // vocab_size)


class TargetProbs(NamedTuple):
    """The target's probabilities at some positions: of the draft vocabulary, or of its most likely tokens."""

    renormalised_NV: Tensor
    """Probabilities that sum to one."""
    tokens_NV: Tensor | None
    """Draft ids of the tokens; None for the whole draft vocabulary."""
    log_NV: Tensor | None
    """Logarithm of the probabilities, if a loss needs it."""
    plogp_N: Tensor | None
    """sum p log p, if a loss needs it."""
    mass_N1: Tensor | None
    """Probability of these tokens together, if a loss needs it."""


def _target_probs(
    features: TargetFeatures, vocabulary_V: Tensor | None, objective: Objective
) -> Callable[[Tensor], TargetProbs]:
    """A function from positions of the flattened batch to the target's probabilities there, for all depths."""
    modules, losses = features.modules, objective.over_vocabulary
    states_RD = features.last_BTD.flatten(0, 1)
    needs_mass = objective.needs_mass
    weight_VD: Tensor = modules.lm_head.weight.detach()
    bias_V: Tensor | None = modules.lm_head.bias
    if vocabulary_V is not None and not needs_mass:
        weight_VD = weight_VD[vocabulary_V]
        bias_V = None if bias_V is None else bias_V[vocabulary_V]
        vocabulary_V = None

    @torch.no_grad()
    def at(rows_U: Tensor) -> TargetProbs:
        logits_UV = modules.logits(states_RD[rows_U].to(weight_VD.dtype), weight_VD, bias_V)
        all_U1 = at_least_fp32(logits_UV).logsumexp(-1, keepdim=True) if needs_mass else None
        if vocabulary_V is not None:
            logits_UV = logits_UV.index_select(1, vocabulary_V)
        tokens_UV = None
        if objective.target_top_k is not None:
            logits_UV, tokens_UV = logits_UV.topk(min(objective.target_top_k, logits_UV.shape[-1]), sorted=False)
        logits_UV = at_least_fp32(logits_UV)
        mass_U1 = None if all_U1 is None else (logits_UV.logsumexp(-1, keepdim=True) - all_U1).exp()
        log_UV = logits_UV.log_softmax(-1)
        probs_UV = log_UV.exp()
        log_UV = log_UV.clamp_(min=math.log(torch.finfo(log_UV.dtype).tiny))  # 0 log 0 is 0
        plogp_U = None if NEED_ENTROPY.isdisjoint(losses) else torch.linalg.vecdot(probs_UV, log_UV)
        return TargetProbs(probs_UV, tokens_UV, log_UV if "reverse_kl" in losses else None, plogp_U, mass_U1)

    return at


LOSSES = ("ce", "soft_ce", "kl", "reverse_kl", "tv", "lk_alpha", "lk_lambda")
"""Losses over the vocabulary."""
NEED_HEAD = {"smooth_l1": "predicts no features", "confidence": "does not estimate its acceptance rate"}
"""Losses that only some heads have, and what is said of the others."""
NEED_MASS = {"tv", "lk_alpha", "lk_lambda", "confidence"}
"""Losses that use the target's probabilities as they are, and so its logits of the whole vocabulary."""
NEED_ENTROPY = {"kl", "lk_lambda"}
"""Losses with the target's entropy, which does not depend on the draft."""


def _loss(name: str, log_q_NV: Tensor, labels_N: Tensor, target: TargetProbs | None) -> Tensor:
    """One of `LOSSES` at each position; `ce` needs no target."""
    if name == "ce":
        return F.nll_loss(log_q_NV, labels_N, ignore_index=-1, reduction="none")
    assert target is not None
    probs_NV = target.renormalised_NV
    if name == "reverse_kl":
        assert target.log_NV is not None
        return torch.linalg.vecdot(log_q_NV.exp(), log_q_NV - target.log_NV)
    # Of the target's most likely tokens alone, where its distribution is truncated to them.
    log_q_NT = log_q_NV if target.tokens_NV is None else log_q_NV.gather(1, target.tokens_NV)
    if name == "soft_ce":
        return -torch.linalg.vecdot(probs_NV, log_q_NT)
    if name == "kl":
        assert target.plogp_N is not None
        return target.plogp_N - torch.linalg.vecdot(probs_NV, log_q_NT)
    overlap_N = _overlap(log_q_NV, target)
    if name == "tv":
        return 1 - overlap_N
    if name == "lk_alpha":
        return -overlap_N.clamp(min=torch.finfo(log_q_NV.dtype).tiny).log()
    share_N = (-3 * overlap_N.detach()).exp()
    return share_N * _loss("kl", log_q_NV, labels_N, target) + (1 - share_N) * (1 - overlap_N)


def _overlap(log_q_NV: Tensor, target: TargetProbs | None) -> Tensor:
    """Overlap sum min(p, q), the probability with which exact verification accepts a sampled draft."""
    assert target is not None and target.mass_N1 is not None
    log_q_NT = log_q_NV if target.tokens_NV is None else log_q_NV.gather(1, target.tokens_NV)
    return torch.minimum(target.renormalised_NV * target.mass_N1, log_q_NT.exp()).sum(-1)


def _depth_weights(
    objective: Objective, of_depths: Iterator[Tensor], labels_NK: Tensor, valid_NK: Tensor, dtype: torch.dtype
) -> Tensor:
    """Weights [N, K] of the loss at each draft position and depth; `of_depths` yields each depth's logits_NV."""
    with torch.no_grad():
        if objective.depth_weights == "decay":
            depth_K = torch.arange(valid_NK.shape[1], device=valid_NK.device)
            return torch.full_like(depth_K, objective.decay, dtype=dtype).pow(depth_K).expand_as(valid_NK)
        nll_NK = torch.stack(
            [_loss("ce", logits.log_softmax(-1), labels_NK[:, k], None) for k, logits in enumerate(of_depths)], dim=1
        )
        least = objective.d_pace_smoothing
        reach_NK = torch.where(valid_NK, least + (1 - least) * (-nll_NK).exp(), 0).cumprod(-1)
        return reach_NK.flip(-1).cumsum(-1).flip(-1)


class _Summed(torch.autograd.Function):
    """Sum of the losses that `of_chunk` yields for every start, each differentiated as soon as it is computed."""

    @staticmethod
    def forward(
        ctx: Any,
        of_chunk: Callable[[int, Sequence[Tensor]], Iterator[Tensor]],
        starts: range,
        train: bool,
        *leaves: Tensor,
    ) -> Tensor:
        needed = [train and asked for asked in ctx.needs_input_grad[3:]]
        copies = [leaf.detach().requires_grad_(asked) for leaf, asked in zip(leaves, needed, strict=True)]
        total = leaves[0].new_zeros((), dtype=torch.promote_types(leaves[0].dtype, torch.float32))
        with torch.set_grad_enabled(train):
            for start in starts:
                for loss in of_chunk(start, copies):
                    total += loss.detach()
                    if loss.requires_grad:
                        loss.backward()
        # Zeros where a batch has nothing to learn: every rank must give every parameter a gradient.
        gradients = [torch.zeros_like(copy) if copy.grad is None else copy.grad for copy in copies]
        ctx.gradients = [own if asked else None for own, asked in zip(gradients, needed, strict=True)]
        return total

    @staticmethod
    def backward(ctx: Any, *scales: Tensor) -> tuple[Tensor | None, ...]:
        gradients = [None if own is None else own.mul_(scales[0]) for own in ctx.gradients]
        del ctx.gradients
        return (None, None, None, *gradients)
