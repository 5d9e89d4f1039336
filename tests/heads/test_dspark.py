"""DSpark: its loss is that of decoding along true paths, and confidence ends a chain."""

from __future__ import annotations

import pytest
import torch
from block_heads import TIME, VOCAB, block_batch, block_head
from messages import refused
from torch import Tensor
from torch.nn import functional as F

from headstart.heads import DSparkHead, TargetFeatures
from headstart.heads.by_name import build_objective
from headstart.heads.draft_positions import DraftPositions
from headstart.heads.objective import Objective
from headstart.inference.drafters.base import DraftContext, PrefillChunk
from headstart.inference.drafters.draft_model_state import DraftModelState
from headstart.inference.drafters.tree_policies import EarlyExitChain
from headstart.inference.trees.sampling import RandomSampler
from headstart.inference.trees.tree_spec import EarlyExitShape

OPTIONS = [
    {"block_size": 4, "markov_rank": 3},
    {
        "block_size": 3,
        "markov_rank": 2,
        "markov": "gated",
        "draft_vocab_size": 9,
        "confidence_with_markov": False,
    },
    {"block_size": 4, "markov_rank": 3, "markov": "rnn"},
    {"block_size": 5, "markov_rank": 3, "sample_from_anchor": False},
]


def decoded(
    head: DSparkHead, features: TargetFeatures, row: int, time: int, depths: int
) -> tuple[Tensor, Tensor]:
    """Logits [K, V] and estimated rates [K] along the text behind the feature at `time`, by
    decoding."""
    tokens_T = features.tokens_BT[row]
    state = head.begin(features.modules, 1, 40, head.max_depth, 1)
    next_1A = tokens_T[1 : time + 2][None]
    state = head.observe(
        state, features.features_BTF[row, : time + 1][None], next_1A, torch.tensor([time + 1])
    )
    logits, rates = [], []
    for depth in range(depths):
        true_11, parent_11 = (
            tokens_T[time + 1 + depth].view(1, 1),
            torch.full((1, 1), 0 if depth else -1),
        )
        logits_11V, state = head.expand(state, true_11, parent_11)
        logits.append(logits_11V[0, 0])
        rates.append(state.confidence_BW[0, 0].sigmoid())
    return torch.stack(logits), torch.stack(rates)


@pytest.mark.parametrize("weights", ["decay", "d_pace"])
@pytest.mark.parametrize("options", OPTIONS)
def test_the_loss_is_that_of_decoding_along_the_text(options, weights):
    head = block_head(options, name="dspark").eval()
    objective = Objective({"tv": 0.7, "ce": 0.2, "confidence": 0.5}, weights, d_pace_smoothing=0.3)
    features = block_batch(head)
    found = DraftPositions.of(features, head.max_depth)
    target_BTV = features.modules.lm_head(features.last_BTD).softmax(-1)
    vocabulary_V = torch.arange(VOCAB) if head.vocabulary_V is None else head.vocabulary_V
    paced, total = weights == "d_pace", 0.0
    for index, depths in zip(found.index_N.tolist(), found.valid_NK.sum(1).tolist()):
        row, time = divmod(index, TIME)
        logits_KV, rate_K = decoded(head, features, row, time, depths)
        log_q_KV, p_KV = (
            logits_KV.log_softmax(-1),
            target_BTV[row, time + 1 :][:depths, vocabulary_V],
        )
        overlap_K = torch.minimum(p_KV, log_q_KV.exp()).sum(-1)
        true_KV = features.tokens_BT[row, time + 2 :][:depths, None] == vocabulary_V
        draftable_K = true_KV.any(1)
        log_true_K = (log_q_KV * true_KV).sum(1)
        reach_K = (draftable_K * (0.3 + 0.7 * log_true_K.exp())).cumprod(0)
        decay_K = objective.decay ** torch.arange(depths).double()
        weight_K = reach_K.flip(0).cumsum(0).flip(0) if paced else decay_K
        total += (draftable_K * weight_K * (0.7 * (1 - overlap_K) - 0.2 * log_true_K)).sum()
        total += (
            0.5
            * (decay_K * F.binary_cross_entropy(rate_K, overlap_K.detach(), reduction="none")).sum()
        )
    torch.testing.assert_close(head(features, objective).loss, total, rtol=1e-9, atol=1e-9)


def test_a_chain_ends_where_the_head_expects_a_rejection():
    head = block_head({"block_size": 5, "markov_rank": 2}, name="dspark").eval()
    torch.nn.init.zeros_(head.confidence_head["proj"].weight)
    features = block_batch(head)
    read = PrefillChunk(
        features.tokens_BT[:1, :4],
        features.tokens_BT[:1, 1:5],
        features.features_BTF[:1, :4],
        torch.tensor([4]),
    )
    for bias, nodes in ((0.5, 6), (-0.5, 1)):
        torch.nn.init.constant_(head.confidence_head["proj"].bias, bias)
        chain = EarlyExitChain(DraftModelState(head, features.modules), EarlyExitShape(5, 0.5))
        chain.begin(DraftContext(1, 40, RandomSampler(), None, None))
        chain.prefill(read)
        assert chain.propose(features.tokens_BT[:1, 4]).tokens_BN.shape == (1, nodes)


def test_only_a_head_that_estimates_its_acceptance_is_trained_to():
    assert build_objective("dspark", {}, {}).loss == {"ce": 0.1, "tv": 0.9, "confidence": 1.0}
    assert build_objective("dspark", {"confidence": False}, {}).loss == {"ce": 0.1, "tv": 0.9}
    with refused("dspark 'confidence'"):
        build_objective("dspark", {"confidence": False}, {"loss": {"ce": 1.0, "confidence": 1.0}})
