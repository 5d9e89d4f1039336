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

tv and lk use p as it is: what lies outside the draft vocabulary can never be accepted. Positions whose token lies
outside carry no loss. Of answers that the target sampled, the expected soft_ce is then -sum p log q with p as it is,
and of greedy ones it leaves out those whose best token cannot be drafted; neither asks for the target's logits outside
the draft vocabulary, most of what they cost.

Letters in tensor names: N anchors, K depths, R positions of the flattened batch, U those of them that judge a chunk,
D hidden size, V vocabulary, and of the target's distribution the tokens that are looked at: the draft vocabulary, or
the most likely ones of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .base import HeadOutput, TargetFeatures, at_least_fp32
from .draft_vocab import draft_ids
from .layers.chunks import VOCABULARY_ON_CPU, chunk_elements

FEWEST = 64
"""Positions of a chunk at least, however large the vocabulary."""


@dataclass(frozen=True)
class Objective:
    """A weighted mix of losses, and how depths are weighted against each other."""

    loss: dict[str, float]
    """Weights by the words of this module's docstring."""
    depth_weights: str
    """decay: decay ** depth. d_pace: by how much a token's log-probability moves the expected number of accepted
    tokens, sum_{k >= j} prod_{i <= k} q_i with q_i the draft's probability of the true token (arXiv:2605.18810)."""
    decay: float
    """Loss weight of a depth relative to the one before."""
    target_top_k: int | None = None
    """How many of the target's most likely tokens stand for its distribution, renormalised where the loss
    renormalises; None for the whole draft vocabulary."""

    @property
    def over_vocabulary(self) -> list[str]:
        """The losses that this module computes."""
        return [name for name, weight in self.loss.items() if weight > 0 and name in LOSSES]

    def target_logits(self, vocab_size: int, draft_vocab_size: int) -> int:
        """How many logits of the target are made at a position: all, those of the draft vocabulary, or none."""
        if self.over_vocabulary in ([], ["ce"]):
            return 0
        return draft_vocab_size if NEED_MASS.isdisjoint(self.over_vocabulary) else vocab_size

    def check(self, head: str, predicts_features: bool = False) -> None:
        """Refuse what the head cannot be trained on.

        Raises:
            ValueError: naming the loss or weight, and what is valid.
        """
        words = (*LOSSES, "smooth_l1") if predicts_features else tuple(LOSSES)
        for name, weight in self.loss.items():
            if name == "smooth_l1" and not predicts_features:
                raise ValueError(
                    f"{head} cannot have the loss 'smooth_l1': it predicts no features; choose from {', '.join(words)}"
                )
            if name not in words:
                raise ValueError(f"unknown {head} loss {name!r}; choose from {', '.join(words)}")
            if isinstance(weight, bool) or not isinstance(weight, (int, float)) or weight < 0:
                raise ValueError(f"{head} loss {name!r} needs a weight of at least 0, not {weight!r}")
        if not any(self.loss.values()):
            raise ValueError(f"{head} needs a loss with a weight above 0; choose from {', '.join(words)}")
        if self.depth_weights not in ("decay", "d_pace"):
            raise ValueError(f"unknown {head} depth_weights {self.depth_weights!r}; choose from decay, d_pace")
        if self.decay <= 0:
            raise ValueError(f"{head} decay must be above 0, not {self.decay}")
        if self.target_top_k is None:
            return
        if self.target_top_k < 1:
            raise ValueError(f"{head} target_top_k must be at least 1, or null for all, not {self.target_top_k}")
        if self.loss.get("reverse_kl"):
            raise ValueError(f"{head} cannot have both target_top_k and reverse_kl, which is infinite where p is 0")


@dataclass(frozen=True)
class DraftPositions:
    """The positions of a batch from which drafts are judged, as indices into its flattened [B * T] tokens.

    An anchor is the position t of the newest feature. The root of its tree is the token at t + 1; the draft at depth
    k (from 0) is judged by the target's state at t + 1 + k and by the token at t + 2 + k.

    Anchors are sorted, and all positions of an answer that judge a deeper draft judge the first draft of another anchor
    as well. So draft k of anchor n, where valid, is judged at the same position as draft 0 of anchor n + k, and the
    target's distributions at `rows_NK[:, 0]` are all that is needed, without looking anything up.
    """

    index_N: Tensor
    rows_NK: Tensor
    """The position whose target state judges the draft; the token after it is the true one."""
    valid_NK: Tensor
    """True where the root and all drafts up to depth k lie in one answer."""

    @classmethod
    def of(cls, features: TargetFeatures, depths: int) -> DraftPositions:
        """The anchors of a batch that have at least one draft to judge."""
        loss_mask_BT = features.loss_mask_BT
        batch, time = loss_mask_BT.shape
        padded = F.pad(loss_mask_BT, (0, depths + 1))
        answers = [padded[:, k : k + time] for k in range(1, depths + 2)]  # answers[k - 1]_BT: the token at t + k
        valid_BTK = torch.stack(answers, dim=-1).cumprod(-1)[..., 1:].bool()
        index_N = valid_BTK[..., 0].flatten().nonzero()[:, 0]
        # Past the end any row serves: nothing there is valid.
        rows_NK = (index_N[:, None] + 1 + torch.arange(depths, device=index_N.device)).clamp(max=batch * time - 2)
        return cls(index_N, rows_NK, valid_BTK.flatten(0, 1)[index_N])._beside(features)

    @classmethod
    def of_answers(cls, features: TargetFeatures) -> DraftPositions:
        """For a model that is judged on its own next token: the positions before answer tokens, at one depth."""
        before_BT = F.pad(features.loss_mask_BT[:, 1:], (0, 1))
        index_N = before_BT.flatten().nonzero()[:, 0]
        valid_N1 = torch.ones_like(index_N[:, None], dtype=torch.bool)
        return cls(index_N, index_N[:, None], valid_N1)._beside(features)

    def _beside(self, features: TargetFeatures) -> DraftPositions:
        """On the device of the batch, which is not waited for: how many there are was found out on the host."""
        device = features.tokens_BT.device
        tensors = [self.index_N, self.rows_NK, self.valid_NK]
        if device.type == "cuda":  # a copy from other memory may wait for what the device is doing
            tensors = [tensor.pin_memory() for tensor in tensors]
        return DraftPositions(*(tensor.to(device, non_blocking=True) for tensor in tensors))


def draft_loss(
    hiddens: Sequence[Tensor],
    lm_heads: Sequence[Tensor],
    vocabulary_V: Tensor | None,
    features: TargetFeatures,
    anchors: DraftPositions,
    objective: Objective,
    ranks: int = 1,
) -> HeadOutput:
    """The loss of drafts at all depths.

    Gradients are computed in the forward, chunk by chunk, so that no [positions, vocabulary] tensor outlives its
    chunk, and the target's distribution is computed once for all depths. The backward only scales them.

    Args:
        hiddens: for each depth, hidden_ND: the draft state of every anchor, the input of its LM head.
        lm_heads: for each depth, the weight [V, D] of its LM head; the same tensor may stand for several.
        vocabulary_V: sorted target ids of the draft vocabulary; None for all.
        features: the batch.
        anchors: of the batch, for as many depths.
        objective: `smooth_l1` is not computed here.
        ranks: how many of a head's best tokens are counted as hits.
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
    wanted, widths = objective.over_vocabulary, [len(weight) for weight in weights]
    target_logits = objective.target_logits(len(modules.lm_head.weight), max(widths))
    judge = _TargetJudge(features, vocabulary_V, objective) if target_logits else None
    tokens_R = features.tokens_BT.flatten()
    size = positions_at_once(device, max(target_logits, *widths))
    count = len(anchors.index_N)

    def logits(k: int, hidden_ND: Tensor, weight_VD: Tensor) -> Tensor:
        if shared[k]:
            return at_least_fp32(modules.scaled(F.linear(hidden_ND, weight_VD, modules.lm_head.bias)))
        return at_least_fp32(F.linear(hidden_ND, weight_VD))

    def of_chunk(start: int, hidden: Sequence[Tensor], heads: Sequence[Tensor]) -> Iterator[Tensor]:
        """The weighted loss of each depth, one after the other.

        Anchors that have no draft at a depth are computed all the same, with a weight of 0: they are few, at the ends
        of answers, and to pick out the others an accelerator's host would have to wait.
        """
        stop = min(start + size, count)
        labels_NK = draft_ids(tokens_R[anchors.rows_NK[start:stop] + 1], vocabulary_V)
        valid_NK = anchors.valid_NK[start:stop] & (labels_NK >= 0)
        probs_U = None
        if judge:
            places_U = torch.arange(start, stop + depths - 1, device=device).clamp(max=count - 1)
            probs_U = judge.at(anchors.rows_NK[places_U, 0])
        of_depths = (logits(k, hidden[k][start:stop], heads[k]) for k in range(depths))
        weights_NK = _depth_weights(objective, of_depths, labels_NK, valid_NK, dtype) * valid_NK
        for k in range(depths):
            logits_NV = logits(k, hidden[k][start:stop], heads[k])
            labels_N, valid_N = labels_NK[:, k], valid_NK[:, k]
            best_NI = _best(logits_NV.detach(), ranks)
            hits_KI[k, : best_NI.shape[1]] += ((best_NI == labels_N[:, None]) & valid_N[:, None]).sum(0)
            target = probs_U.part(k, stop - start) if probs_U else None
            log_q_NV = logits_NV.log_softmax(-1)
            loss_N = log_q_NV.new_zeros(stop - start)
            for name in wanted:
                loss_N = loss_N + objective.loss[name] * LOSSES[name](log_q_NV, labels_N, target)
            losses_K[k] += (loss_N.detach() * valid_N).sum()
            yield (loss_N * weights_NK[:, k]).sum()

    def run(leaves: Sequence[Tensor]) -> Iterator[Tensor]:
        hidden, heads = leaves[:depths], [leaves[depths + i] for i in which]
        for start in range(0, count, size):
            yield from of_chunk(start, hidden, heads)

    loss = _Summed.apply(run, torch.is_grad_enabled(), *hiddens, *weights)
    return HeadOutput(loss, losses_K, anchors.valid_NK.sum(0), hits_KI)


def positions_at_once(device: torch.device, vocab_size: int) -> int:
    """Positions of a chunk of the loss, for the larger of the target's and the draft's vocabulary."""
    return max(FEWEST, chunk_elements(device, VOCABULARY_ON_CPU) // vocab_size)


def _best(logits_NV: Tensor, ranks: int) -> Tensor:
    """The ids of the `ranks` best tokens, best_NI; an argmax takes a fraction of `topk`'s time."""
    if ranks == 1:
        return logits_NV.argmax(-1, keepdim=True)
    return logits_NV.topk(min(ranks, logits_NV.shape[-1]), dim=-1).indices


@dataclass(frozen=True)
class TargetProbs:
    """The target's distribution at some positions, over the tokens that are looked at."""

    renormalised_NV: Tensor
    """Sums to one."""
    tokens_NV: Tensor | None
    """Draft ids of these tokens; None for the whole draft vocabulary."""
    log_NV: Tensor | None
    """Its logarithm, where a loss asks for it."""
    plogp_N: Tensor | None
    """sum p log p of it, where a loss asks."""
    mass_N1: Tensor | None
    """What the target gives to these tokens, where a loss asks."""

    def part(self, first: int, count: int) -> TargetProbs:
        """At `count` of these positions from the `first` on; nothing is copied."""

        def cut(tensor: Any) -> Any:
            return None if tensor is None else tensor[first : first + count]

        return TargetProbs(*(cut(getattr(self, field.name)) for field in fields(self)))

    def of_these(self, values_NV: Tensor) -> Tensor:
        """Of what there is for each token of the draft vocabulary, that of the tokens that are looked at."""
        return values_NV if self.tokens_NV is None else values_NV.gather(1, self.tokens_NV)


class _TargetJudge:
    """Makes the target's distributions, once for all depths."""

    def __init__(self, features: TargetFeatures, vocabulary_V: Tensor | None, objective: Objective) -> None:
        lm_head, self.modules = features.modules.lm_head, features.modules
        self.states_RD = features.last_BTD.flatten(0, 1)
        self.wanted, self.top_k = objective.over_vocabulary, objective.target_top_k
        self.needs_mass = not NEED_MASS.isdisjoint(self.wanted)
        self.vocabulary_V = vocabulary_V
        self.weight_VD: Tensor = lm_head.weight.detach()
        self.bias_V: Tensor | None = lm_head.bias
        if vocabulary_V is not None and not self.needs_mass:  # then the other tokens' logits are not asked for
            self.weight_VD = self.weight_VD[vocabulary_V]
            self.bias_V = None if self.bias_V is None else self.bias_V[vocabulary_V]
            self.vocabulary_V = None

    @torch.no_grad()
    def at(self, rows_U: Tensor) -> TargetProbs:
        """At these positions of the flattened batch."""
        states_UD = self.states_RD[rows_U].to(self.weight_VD.dtype)
        logits_UV = self.modules.scaled(F.linear(states_UD, self.weight_VD, self.bias_V))
        all_U1 = at_least_fp32(logits_UV).logsumexp(-1, keepdim=True) if self.needs_mass else None
        if self.vocabulary_V is not None:
            logits_UV = logits_UV.index_select(1, self.vocabulary_V)
        tokens_UV = None
        if self.top_k is not None:
            logits_UV, tokens_UV = logits_UV.topk(min(self.top_k, logits_UV.shape[-1]), sorted=False)
        logits_UV = at_least_fp32(logits_UV)
        mass_U1 = None if all_U1 is None else (logits_UV.logsumexp(-1, keepdim=True) - all_U1).exp()
        log_UV = logits_UV.log_softmax(-1)
        probs_UV = log_UV.exp()
        log_UV = log_UV.clamp_(min=math.log(torch.finfo(log_UV.dtype).tiny))  # 0 log 0 is 0
        plogp_U = None if NEED_ENTROPY.isdisjoint(self.wanted) else torch.linalg.vecdot(probs_UV, log_UV)
        return TargetProbs(probs_UV, tokens_UV, log_UV if "reverse_kl" in self.wanted else None, plogp_U, mass_U1)


def _ce(log_q_NV: Tensor, labels_N: Tensor, target: Any) -> Tensor:
    return F.nll_loss(log_q_NV, labels_N, ignore_index=-1, reduction="none")


def _soft_ce(log_q_NV: Tensor, labels_N: Tensor, target: TargetProbs) -> Tensor:
    return -torch.linalg.vecdot(target.renormalised_NV, target.of_these(log_q_NV))


def _kl(log_q_NV: Tensor, labels_N: Tensor, target: TargetProbs) -> Tensor:
    assert target.plogp_N is not None
    return target.plogp_N + _soft_ce(log_q_NV, labels_N, target)


def _reverse_kl(log_q_NV: Tensor, labels_N: Tensor, target: TargetProbs) -> Tensor:
    assert target.log_NV is not None
    return torch.linalg.vecdot(log_q_NV.exp(), log_q_NV - target.log_NV)


def _overlap(log_q_NV: Tensor, target: TargetProbs) -> Tensor:
    """The acceptance rate of exact verification: sum min(p, q), at least, of the tokens that are looked at."""
    assert target.mass_N1 is not None
    return torch.minimum(target.renormalised_NV * target.mass_N1, target.of_these(log_q_NV).exp()).sum(-1)


def _tv(log_q_NV: Tensor, labels_N: Tensor, target: TargetProbs) -> Tensor:
    return 1 - _overlap(log_q_NV, target)


def _lk_alpha(log_q_NV: Tensor, labels_N: Tensor, target: TargetProbs) -> Tensor:
    return -_overlap(log_q_NV, target).clamp(min=torch.finfo(log_q_NV.dtype).tiny).log()


def _lk_lambda(log_q_NV: Tensor, labels_N: Tensor, target: TargetProbs) -> Tensor:
    overlap_N = _overlap(log_q_NV, target)
    share_N = (-3 * overlap_N.detach()).exp()
    return share_N * _kl(log_q_NV, labels_N, target) + (1 - share_N) * (1 - overlap_N)


LOSSES: dict[str, Callable[[Tensor, Tensor, Any], Tensor]] = {
    "ce": _ce,
    "soft_ce": _soft_ce,
    "kl": _kl,
    "reverse_kl": _reverse_kl,
    "tv": _tv,
    "lk_alpha": _lk_alpha,
    "lk_lambda": _lk_lambda,
}
"""Words and their losses: (log_q_NV, labels_N, target) -> loss_N."""
NEED_MASS = {"tv", "lk_alpha", "lk_lambda"}
"""Those that take the target's probabilities as they are."""
NEED_ENTROPY = {"kl", "lk_lambda"}
"""Those that subtract the target's entropy, which does not depend on the draft."""


def _depth_weights(
    objective: Objective, of_depths: Iterator[Tensor], labels_NK: Tensor, valid_NK: Tensor, dtype: torch.dtype
) -> Tensor:
    """weights_NK of the loss at each anchor and depth; `of_depths` gives each depth's logits_NV."""
    with torch.no_grad():
        if objective.depth_weights == "decay":
            depth_K = torch.arange(valid_NK.shape[1], device=valid_NK.device)
            return torch.full_like(depth_K, objective.decay, dtype=dtype).pow(depth_K).expand_as(valid_NK)
        nll_NK = torch.stack(
            [_ce(logits.log_softmax(-1), labels_NK[:, k], None) for k, logits in enumerate(of_depths)], dim=1
        )
        reach_NK = torch.where(valid_NK, (-nll_NK).exp(), 0).cumprod(-1)
        return reach_NK.flip(-1).cumsum(-1).flip(-1)


class _Summed(torch.autograd.Function):
    """The sum of the losses that `run` yields, each differentiated as soon as it is there."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[Sequence[Tensor]], Iterator[Tensor]], train: bool, *leaves: Tensor) -> Tensor:
        """The sum; the leaves' gradients are kept for `backward`."""
        needed = [train and asked for asked in ctx.needs_input_grad[2:]]
        copies = [leaf.detach().requires_grad_(asked) for leaf, asked in zip(leaves, needed, strict=True)]
        total = leaves[0].new_zeros((), dtype=torch.promote_types(leaves[0].dtype, torch.float32))
        with torch.set_grad_enabled(train):
            for loss in run(copies):
                total += loss.detach()
                if loss.requires_grad:
                    loss.backward()
        ctx.gradients = [_gradient(copy) for copy in copies]
        return total

    @staticmethod
    def backward(ctx: Any, *scales: Tensor) -> tuple[Tensor | None, ...]:
        """What `forward` found, scaled."""
        gradients = [None if own is None else own.mul_(scales[0]) for own in ctx.gradients]
        del ctx.gradients
        return (None, None, *gradients)


def _gradient(leaf: Tensor) -> Tensor | None:
    """Zeros where a batch had nothing to learn: every rank must hand every parameter a gradient."""
    if not leaf.requires_grad:
        return None
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
