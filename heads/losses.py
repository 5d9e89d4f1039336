"""Training objectives over the vocabulary, for every head, computed chunk by chunk.

With the target's distribution p and the draft's q over the draft vocabulary, per position:

    ce           -log q(x), x the token of the data
    soft_ce      -sum p log q             p renormalised on the draft vocabulary
                                          (EAGLE-3, arXiv:2503.01840)
    kl           sum p log(p / q)         the same gradient as soft_ce, and 0 where they agree
    reverse_kl   sum q log(q / p)         for mixes of speculators, whose rkl it is
    tv           1 - sum min(p, q)        one minus the acceptance rate of exact verification;
                                          DSpark is trained on 0.1 ce + 0.9 tv
    lk_alpha     -log sum min(p, q)       (LK losses, arXiv:2602.23881)
    lk_lambda    s kl + (1 - s) tv,  s = exp(-3 sum min(p, q)) held constant: kl first, then
                 acceptance itself
    smooth_l1    between predicted and true features, for heads that predict features
                 (EAGLE-1, arXiv:2401.15077)
    confidence   cross-entropy of a head's estimate of its acceptance rate with sum min(p, q),
                 held constant (DSpark)

tv, lk and confidence use p over all tokens: one outside the draft vocabulary is never accepted.
The other losses need no target logits outside it, which are most of the cost. Positions whose true
token lies outside carry no loss.

`depth_loss` is a pure function of a chunk of positions at one depth. `draft_loss` differentiates it
chunk by chunk, so that no [positions, vocabulary] tensor outlives its chunk.

Letters in tensor names: N draft positions, K depths, S states of the target that may judge drafts,
U states that judge a chunk, D hidden size, V vocabulary, I ranks, and in the target's distribution
T its tokens: the draft vocabulary, or the most likely ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from .base import HeadOutput, TargetFeatures, TargetModules
from .draft_positions import DraftPositions
from .layers.chunk_size import VOCABULARY_ON_CPU, chunk_elements
from .layers.compiled import fused_on_gpu
from .layers.constants import upload
from .layers.decoder_layer import at_least_fp32
from .layers.draft_vocab import draft_ids
from .objective import Objective

NEED_ENTROPY = {"kl", "lk_lambda"}
"""Losses with the target's entropy, which does not depend on the draft."""
FEWEST = 64
"""Minimum number of positions in a chunk, however large the vocabulary."""


BY_POSITION = ("hidden_ND", "latent_NR", "confidence_N")
"""Fields of `Draft` with a row for each position; all positions share the others."""


@dataclass(frozen=True)
class Draft:
    """Inputs of the draft at one depth: all that its loss may be differentiated by."""

    hidden_ND: Tensor
    """Input of the LM head."""
    weight_VD: Tensor
    """The LM head."""
    is_target_head: bool
    """Whether that is the target's LM head, which may have a bias and a scale."""
    latent_NR: Tensor | None = None
    correction_VR: Tensor | None = None
    """`correction_VR latent` is added to the logits."""
    confidence_N: Tensor | None = None
    """Logits of the estimated acceptance rate."""

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are there, by field."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def at(self, rows: slice) -> Draft:
        """The draft at some of the positions."""
        chosen: dict[str, Any] = {}
        for name, tensor in self.tensors().items():
            if name in BY_POSITION:
                chosen[name] = tensor[rows]
        return replace(self, **chosen)

    def products(self, modules: TargetModules) -> tuple[Tensor, Tensor | None]:
        """logits_NV in the dtype of the product, and what a correction adds to them."""
        if self.is_target_head:
            logits_NV = modules.logits(self.hidden_ND, self.weight_VD, modules.lm_head.bias)
        else:
            logits_NV = F.linear(self.hidden_ND, self.weight_VD)
        if self.latent_NR is None or self.correction_VR is None:
            return logits_NV, None
        return logits_NV, F.linear(self.latent_NR, self.correction_VR)


class TargetProbs(NamedTuple):
    """The target's probabilities of the draft vocabulary, or of its most likely tokens."""

    renormalised_NT: Tensor
    """Probabilities that sum to one."""
    tokens_NT: Tensor | None
    """Draft ids of the tokens; None for the whole draft vocabulary."""
    log_NT: Tensor | None
    """Logarithm of the probabilities, if a loss needs it."""
    plogp_N: Tensor | None
    """sum p log p, if a loss needs it."""
    mass_N1: Tensor | None
    """Probability of these tokens together, if a loss needs it."""

    def at(self, index: slice | Tensor) -> TargetProbs:
        """The probabilities at some of these positions."""
        return TargetProbs._make(None if tensor is None else tensor[index] for tensor in self)


@dataclass(frozen=True)
class Truth:
    """Target distribution, true tokens and weights by which the drafts of one depth are judged."""

    target: TargetProbs | None
    """None if no loss needs the target's distribution."""
    labels_N: Tensor
    """Draft ids of the true tokens, -1 outside the draft vocabulary."""
    judged_N: Tensor
    """Whether there is a draft to judge."""
    valid_N: Tensor
    """Whether there is one and the true token can be drafted."""
    weights_N: Tensor
    """Weight of each position's loss; 0 where not valid."""
    confidence_weight: float
    """Weight of the depth in the loss `confidence`."""


class DepthMetrics(NamedTuple):
    """Sums over the positions of a chunk at one depth."""

    loss: Tensor
    """The unweighted loss."""
    hits_I: Tensor
    """How often the true token was the i-th best draft."""


def corrected(logits_NV: Tensor, correction_NV: Tensor | None) -> Tensor:
    """The draft's logits in at least float32."""
    logits_NV = at_least_fp32(logits_NV)
    return logits_NV if correction_NV is None else logits_NV + correction_NV


@fused_on_gpu
def depth_loss(
    logits_NV: Tensor,
    correction_NV: Tensor | None,
    confidence_N: Tensor | None,
    truth: Truth,
    objective: Objective,
    ranks: int,
) -> tuple[Tensor, DepthMetrics]:
    """The weighted loss of a chunk of positions at one depth, summed over them, and its metrics.

    Positions without a draft get a weight of 0: they are few, at the ends of answers, and to leave
    them out the host would have to wait for the accelerator.
    """
    # 1. The draft's distribution q.
    wide_NV = corrected(logits_NV, correction_NV)
    hits_I = _hits(wide_NV.detach(), truth, ranks)
    log_q_NV = wide_NV.log_softmax(-1)

    # 2. The losses over the vocabulary, mixed by the objective's weights. The reported loss leaves
    #    out the weights of positions and depths.
    loss_N = log_q_NV.new_zeros(len(log_q_NV))
    for name in objective.over_vocabulary:
        term_N = _loss(name, log_q_NV, truth.labels_N, truth.target)
        loss_N = loss_N + objective.loss[name] * term_N
    loss = (loss_N * truth.weights_N).sum()
    unweighted = (loss_N.detach() * truth.valid_N).sum()

    # 3. The estimate of the acceptance rate, if the head makes one. It counts at every judged
    #    position: the rate is known even where the true token cannot be drafted.
    if confidence_N is not None:
        rate_N = _overlap(log_q_NV, truth.target).detach()
        confidence_N = confidence_N.to(rate_N.dtype)
        wrong_N = F.binary_cross_entropy_with_logits(confidence_N, rate_N, reduction="none")
        wrong = objective.loss["confidence"] * (wrong_N * truth.judged_N).sum()
        loss = loss + truth.confidence_weight * wrong
        unweighted = unweighted + wrong.detach()
    return loss, DepthMetrics(unweighted, hits_I)


def _hits(logits_NV: Tensor, truth: Truth, ranks: int) -> Tensor:
    """How often the true token was the i-th best draft, hits_I."""
    if ranks == 1:  # an argmax takes a fraction of the time of `topk`
        best_NI = logits_NV.argmax(-1, keepdim=True)
    else:
        best_NI = logits_NV.topk(min(ranks, logits_NV.shape[-1]), dim=-1).indices
    hit_NI = (best_NI == truth.labels_N[:, None]) & truth.valid_N[:, None]
    # Zeros for ranks beyond the size of the draft vocabulary.
    return F.pad(hit_NI.sum(0), (0, ranks - hit_NI.shape[1]))


def draft_loss(
    hiddens: Sequence[Tensor],
    lm_heads: Sequence[Tensor],
    vocabulary_V: Tensor | None,
    features: TargetFeatures,
    positions: DraftPositions,
    objective: Objective,
    ranks: int = 1,
    corrections: Sequence[Mapping[str, Tensor]] = (),
) -> HeadOutput:
    """The loss of drafts at all depths, except `smooth_l1`, which `with_feature_loss` adds.

    Gradients are computed here, chunk by chunk; the backward pass only scales them.

    Args:
        hiddens: hidden_ND of each depth, the input of its LM head at every draft position.
        lm_heads: weight_VD of each depth; depths may share a tensor.
        vocabulary_V: sorted target ids of the draft vocabulary; None for all tokens.
        features: the batch.
        positions: its draft positions.
        objective: losses and their weights.
        ranks: number of best tokens of a draft that are counted as hits.
        corrections: further fields of `Draft` by depth, of a head that corrects its drafts by the
            token before each (DSpark). The loss `confidence` has the depth weights of `decay` and
            counts where the true token cannot be drafted, too.
    """
    modules = features.modules
    device = hiddens[0].device
    depths = len(hiddens)

    # 1. The tensors: `drafts` are in the graph of the head, `inputs` are their detached copies in
    #    the dtype of the products, and `learning` are those of `drafts` that need gradients.
    drafts = []
    for k, (hidden_ND, weight_VD) in enumerate(zip(hiddens, lm_heads, strict=True)):
        more = corrections[k] if corrections else {}
        drafts.append(Draft(hidden_ND, weight_VD, weight_VD is modules.lm_head.weight, **more))
    learning: dict[Tensor, None] = {}  # each once, in the order of depths
    if torch.is_grad_enabled():
        for draft in drafts:
            for tensor in draft.tensors().values():
                if tensor.requires_grad:
                    learning[tensor] = None
    gradients: dict[Tensor, Tensor] = {}
    inputs = _in_product_dtype(drafts)

    # 2. Positions of a chunk. The target's logits of a chunk serve all depths: with `judged_by` 3,
    #    a draft position needs those of 3 states on average.
    draft_vocab_size = max(len(weight_VD) for weight_VD in lm_heads)
    target_logits = objective.target_logits(len(modules.lm_head.weight), draft_vocab_size)
    target = target_distribution(features, vocabulary_V, objective) if target_logits else None
    size = positions_at_once(device, max(target_logits * positions.judged_by, draft_vocab_size))

    # 3. Loss and gradients, chunk by chunk and depth by depth.
    dtype = at_least_fp32(hiddens[0][:0]).dtype
    loss = torch.zeros((), dtype=dtype, device=device)
    losses_K = torch.zeros(depths, dtype=dtype, device=device)
    hits_KI = torch.zeros(depths, ranks, dtype=torch.int64, device=device)
    count = len(positions.index_N)
    for start in range(0, count, size):
        rows = slice(start, min(start + size, count))
        chunk = [draft.at(rows) for draft in inputs]
        truths = _truths(chunk, rows, positions, features, vocabulary_V, target, objective)
        for k in range(depths):
            tensors = drafts[k].tensors()
            learned = [name for name, tensor in tensors.items() if tensor in learning]
            value, metrics, chunk_gradients = _value_and_gradients(
                chunk[k], learned, truths[k], objective, modules, ranks
            )
            _add(gradients, tensors, chunk_gradients, rows)
            del chunk_gradients  # as large as an LM head
            loss += value
            losses_K[k] += metrics.loss
            hits_KI[k] += metrics.hits_I

    # 4. Attach the gradients to the loss, so that `backward` continues from them into the head.
    for tensor in learning:
        # Zeros where a batch has nothing to learn: every rank must give every parameter a gradient.
        gradient = gradients.pop(tensor, None)
        if gradient is None:
            gradient = torch.zeros_like(tensor)
        loss = _WithGradient.apply(loss, tensor, gradient)
    return HeadOutput(loss, losses_K, positions.valid_NK.sum(0), hits_KI)


def with_feature_loss(
    output: HeadOutput,
    hiddens: Sequence[Tensor],
    features: TargetFeatures,
    positions: DraftPositions,
    objective: Objective,
) -> HeadOutput:
    """Add `smooth_l1` to the output of `draft_loss`, if the objective has it.

    It is the smooth L1 distance between the feature [N, D] that a head predicts at step k and the
    target's at t + 1 + k, the mean over D (EAGLE-1, arXiv:2401.15077, section 4.2).
    """
    share = objective.loss.get("smooth_l1", 0.0)
    if share == 0:
        return output
    true_SD = at_least_fp32(features.last_BTD.flatten(0, 1))
    loss = output.loss
    losses = []
    for k, hidden_ND in enumerate(hiddens):
        true_ND = true_SD[positions.rows_NK[:, k]]
        distance_ND = F.smooth_l1_loss(at_least_fp32(hidden_ND), true_ND, reduction="none")
        losses.append(share * (distance_ND.mean(-1) * positions.valid_NK[:, k]).sum())
        # D numbers a position are few: autograd keeps this loss's graph.
        loss = loss + objective.decay**k * losses[-1]
    return output._replace(loss=loss, losses_K=output.losses_K + torch.stack(losses).detach())


def positions_at_once(device: torch.device, vocab_size: int) -> int:
    """Positions of a chunk of the loss, for the larger of the target's and the draft's logits."""
    return max(FEWEST, chunk_elements(device, VOCABULARY_ON_CPU) // vocab_size)


def _add(
    gradients: dict[Tensor, Tensor],
    tensors: dict[str, Tensor],
    chunk_gradients: dict[str, Tensor],
    rows: slice,
) -> None:
    """Add a chunk's gradients by the fields of a draft to those of the chunks before."""
    for name, gradient in chunk_gradients.items():
        tensor = tensors[name]
        # The first gradient of an LM head, or the only chunk: take it over instead of adding it to
        # zeros.
        if tensor not in gradients and gradient.shape == tensor.shape:
            gradients[tensor] = gradient.to(tensor.dtype)
            continue
        if tensor not in gradients:
            gradients[tensor] = torch.zeros_like(tensor)
        total = gradients[tensor]
        part = total[rows] if name in BY_POSITION else total
        part += gradient  # in place: `part` is a view


def _in_product_dtype(drafts: list[Draft]) -> list[Draft]:
    """The drafts without graphs, cast to autocast's dtype once instead of for each chunk."""
    device = drafts[0].hidden_ND.device.type
    autocast = torch.is_autocast_enabled(device)
    cast: dict[Tensor, Tensor] = {}  # depths share the LM head
    cast_drafts = []
    for draft in drafts:
        changed: dict[str, Any] = {}
        for name, tensor in draft.tensors().items():
            if tensor not in cast:
                cast[tensor] = tensor.detach()
                # The confidence is not multiplied with anything.
                if autocast and tensor.dtype != torch.float64 and name != "confidence_N":
                    cast[tensor] = cast[tensor].to(torch.get_autocast_dtype(device))
            changed[name] = cast[tensor]
        cast_drafts.append(replace(draft, **changed))
    return cast_drafts


def _value_and_gradients(
    draft: Draft,
    learned: list[str],
    truth: Truth,
    objective: Objective,
    modules: TargetModules,
    ranks: int,
) -> tuple[Tensor, DepthMetrics, dict[str, Tensor]]:
    """`depth_loss`, and its gradients by the fields of the draft that are `learned`.

    As `torch.func.grad_and_value`, which refuses to run under hooks for saved tensors. Those are
    set where activations are counted, offloaded or recomputed.
    """
    leaves = {name: getattr(draft, name).detach().requires_grad_() for name in learned}
    with torch.set_grad_enabled(bool(learned)):
        leaf = replace(draft, **leaves)
        products = leaf.products(modules)
        loss, metrics = depth_loss(*products, leaf.confidence_N, truth, objective, ranks)
    # No graph in evaluation, nor where the objective has only losses that are added elsewhere
    # (smooth_l1).
    if not learned or not loss.requires_grad:
        return loss.detach(), metrics, {}
    gradients = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    return loss.detach(), metrics, dict(zip(learned, gradients, strict=True))


class _WithGradient(torch.autograd.Function):
    """A loss whose gradient by a tensor is known already: the backward pass scales it.

    One tensor each, so that a scaled gradient takes the place of a known one before the next is
    made.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, tensor: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return loss.view_as(loss)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return scale, gradient * scale, None


def _truths(
    chunk: list[Draft],
    rows: slice,
    positions: DraftPositions,
    features: TargetFeatures,
    vocabulary_V: Tensor | None,
    target: Callable[[Tensor], TargetProbs] | None,
    objective: Objective,
) -> list[Truth]:
    """The truth at a chunk of positions, by depth."""
    # 1. The true tokens, their weights, and where there is a loss.
    rows_NK = positions.rows_NK[rows]
    judged_NK = positions.valid_NK[rows]
    #    The token after each state; a row's last state, where no draft is judged, gets the first
    #    token of the next row.
    true_NK = features.tokens_BT.flatten().roll(-1)[rows_NK]
    labels_NK = draft_ids(true_NK, vocabulary_V)
    valid_NK = judged_NK & (labels_NK >= 0)
    weights_NK = _depth_weights(chunk, labels_NK, valid_NK, objective, features.modules)

    # 2. The target's distributions. Depths of neighbouring positions are judged by the same states,
    #    so each of the U states is computed once.
    probs_by_depth: list[TargetProbs | None] = [None] * len(chunk)
    if target is not None:
        judging_U, indices_by_depth = _judging(positions, rows)
        probs_U = target(judging_U)
        probs_by_depth = [probs_U.at(index_N) for index_N in indices_by_depth]

    # 3. One `Truth` for each depth.
    truths = []
    for k, probs in enumerate(probs_by_depth):
        truth = Truth(
            target=probs,
            labels_N=labels_NK[:, k],
            judged_N=judged_NK[:, k],
            valid_N=valid_NK[:, k],
            weights_N=weights_NK[:, k],
            confidence_weight=objective.decay**k,
        )
        truths.append(truth)
    return truths


def _judging(positions: DraftPositions, rows: slice) -> tuple[Tensor, list[slice | Tensor]]:
    """Return the states that judge a chunk, and each depth's indices among them.

    The states are numbered as in `rows_NK`.
    """
    rows_NK = positions.rows_NK
    count, depths = rows_NK.shape
    device = rows_NK.device
    if positions.on_host_NK is None:
        # Draft k of position n is judged where draft 0 of position n + k is. Positions 4 to 7 and 3
        # depths: the states of positions 4 to 9, of which depth 2 reads the last four.
        index_U = torch.arange(rows.start, rows.stop + depths - 1, device=device)
        judging_U = rows_NK[index_U.clamp(max=count - 1), 0]
        return judging_U, [slice(k, k + rows.stop - rows.start) for k in range(depths)]
    # Where positions were left out: rows [[5, 6], [6, 7]] give states [5, 6, 7] and indices
    # [[0, 1], [1, 2]]. On the host, since the number of states is a shape.
    judging_U, indices_NK = positions.on_host_NK[rows].unique(return_inverse=True)
    return upload(judging_U, device), list(upload(indices_NK, device).unbind(1))


@torch.no_grad()
def _depth_weights(
    chunk: list[Draft],
    labels_NK: Tensor,
    valid_NK: Tensor,
    objective: Objective,
    modules: TargetModules,
) -> Tensor:
    """Weights [N, K] of the loss at each draft position and depth, 0 where there is no loss."""
    depths = len(chunk)

    # decay: 1, 0.8, 0.64, ... at every position
    if objective.depth_weights == "decay":
        dtype = at_least_fp32(chunk[0].hidden_ND[:0]).dtype
        depth_K = torch.arange(depths, device=valid_NK.device)
        decay_K = torch.full_like(depth_K, objective.decay, dtype=dtype).pow(depth_K)
        return decay_K * valid_NK

    # d_pace: q_k, the draft's probability of the true token at each depth
    true_probs = []
    for k, draft in enumerate(chunk):
        log_q_NV = corrected(*draft.products(modules)).log_softmax(-1)
        true_probs.append((-_loss("ce", log_q_NV, labels_NK[:, k], None)).exp())
    smoothing = objective.d_pace_smoothing
    smoothed_NK = smoothing + (1 - smoothing) * torch.stack(true_probs, dim=1)
    # Probability that the draft path reaches each depth: q [0.5, 0.4, 0.5] gives
    # [0.5, 0.2, 0.1].
    reach_NK = torch.where(valid_NK, smoothed_NK, 0).cumprod(-1)
    # Sum over this depth and all deeper ones, by a cumulative sum from the end: [0.8, 0.3, 0.1].
    return reach_NK.flip(-1).cumsum(-1).flip(-1) * valid_NK


def target_distribution(
    features: TargetFeatures, vocabulary_V: Tensor | None, objective: Objective
) -> Callable[[Tensor], TargetProbs]:
    """The target's distribution at some states [U] of a batch, as an objective's losses need it."""
    modules = features.modules
    states_SD = features.last_BTD.flatten(0, 1)
    weight_VD: Tensor = modules.lm_head.weight.detach()
    bias_V: Tensor | None = modules.lm_head.bias
    # Without the mass of the draft vocabulary, logits outside of it are not needed: take its rows
    # of the LM head.
    if vocabulary_V is not None and not objective.needs_mass:
        weight_VD = weight_VD[vocabulary_V]
        bias_V = None if bias_V is None else bias_V[vocabulary_V]
        vocabulary_V = None

    @torch.no_grad()
    def at(rows_U: Tensor) -> TargetProbs:
        states_UD = states_SD[rows_U].to(weight_VD.dtype)
        logits_UV = modules.logits(states_UD, weight_VD, bias_V)
        return probabilities(logits_UV, vocabulary_V, objective)

    return at


@fused_on_gpu
def probabilities(
    logits_UV: Tensor, vocabulary_V: Tensor | None, objective: Objective
) -> TargetProbs:
    """The target's probabilities from its logits: those of all tokens if losses need the mass."""
    # 1. The sum over all tokens, if the losses need the mass.
    all_U1 = None
    if objective.needs_mass:
        all_U1 = at_least_fp32(logits_UV).logsumexp(-1, keepdim=True)

    # 2. The part that drafts are compared with: the draft vocabulary, or its T likeliest tokens.
    if vocabulary_V is not None:
        logits_UV = logits_UV.index_select(1, vocabulary_V)
    tokens_UT = None
    if objective.target_top_k is not None:
        count = min(objective.target_top_k, logits_UV.shape[-1])
        logits_UV, tokens_UT = logits_UV.topk(count, sorted=False)
    logits_UT = at_least_fp32(logits_UV)
    mass_U1 = None
    if all_U1 is not None:
        mass_U1 = (logits_UT.logsumexp(-1, keepdim=True) - all_U1).exp()

    # 3. Probabilities, renormalised on that part, and what else the losses need.
    losses = objective.over_vocabulary
    log_UT = logits_UT.log_softmax(-1)
    probs_UT = log_UT.exp()
    # Finite even where p is 0: then p log p is 0, not NaN.
    log_UT = log_UT.clamp(min=math.log(torch.finfo(log_UT.dtype).tiny))
    plogp_U = None
    if not NEED_ENTROPY.isdisjoint(losses):
        plogp_U = torch.linalg.vecdot(probs_UT, log_UT)
    needed_log_UT = log_UT if "reverse_kl" in losses else None
    return TargetProbs(probs_UT, tokens_UT, needed_log_UT, plogp_U, mass_U1)


def _loss(name: str, log_q_NV: Tensor, labels_N: Tensor, target: TargetProbs | None) -> Tensor:
    """One of `LOSSES` at each position; `ce` needs no target."""
    if name == "ce":
        return F.nll_loss(log_q_NV, labels_N, ignore_index=-1, reduction="none")
    assert target is not None
    probs_NT = target.renormalised_NT
    if name == "reverse_kl":
        assert target.log_NT is not None
        return torch.linalg.vecdot(log_q_NV.exp(), log_q_NV - target.log_NT)
    log_q_NT = _of_target_tokens(log_q_NV, target)
    if name == "soft_ce":
        return -torch.linalg.vecdot(probs_NT, log_q_NT)
    if name == "kl":
        assert target.plogp_N is not None
        return target.plogp_N - torch.linalg.vecdot(probs_NT, log_q_NT)
    overlap_N = _overlap(log_q_NV, target)
    if name == "tv":
        return 1 - overlap_N
    if name == "lk_alpha":
        return -overlap_N.clamp(min=torch.finfo(log_q_NV.dtype).tiny).log()
    assert name == "lk_lambda", name
    # No overlap: kl alone. Full overlap: 5 % kl, 95 % tv.
    share_N = (-3 * overlap_N.detach()).exp()
    kl_N = _loss("kl", log_q_NV, labels_N, target)
    return share_N * kl_N + (1 - share_N) * (1 - overlap_N)


def _overlap(log_q_NV: Tensor, target: TargetProbs | None) -> Tensor:
    """Sum min(p, q), the probability with which exact verification accepts a sampled draft."""
    assert target is not None and target.mass_N1 is not None
    probs_NT = target.renormalised_NT * target.mass_N1  # p itself, which need not sum to 1
    return torch.minimum(probs_NT, _of_target_tokens(log_q_NV, target).exp()).sum(-1)


def _of_target_tokens(log_q_NV: Tensor, target: TargetProbs) -> Tensor:
    """Return the draft's log-probabilities of the tokens that `target` is truncated to."""
    return log_q_NV if target.tokens_NT is None else log_q_NV.gather(1, target.tokens_NT)
