"""A stopper learns which drafts are accepted, and where to stop is what would have been fastest."""

from __future__ import annotations

import pytest
import torch

from headstart.heads import build_head
from headstart.inference import SpeculativeLM
from headstart.inference.drafters.early_exit import EarlyExitChain, confidence
from headstart.scripts.measuring.early_exit import ChainRound, fit, simulated, train_stopper
from headstart.scripts.measuring.tree_costs import Costs


def rounds(count=400, depth=4):
    """Drafts are accepted with the probability that their distribution says, less the deeper they lie."""
    draw = torch.Generator().manual_seed(0)
    found = []
    for _ in range(count):
        sure_K = 0.05 + 0.9 * torch.rand(depth, generator=draw)
        right = (torch.rand(depth, generator=draw) < sure_K * 0.9 ** torch.arange(depth)).tolist()
        accepted = right.index(False) if False in right else depth
        places_K = torch.arange(depth, dtype=torch.float32)
        signs_KX = torch.stack([sure_K.log(), -sure_K.log(), places_K, torch.ones(depth)], dim=-1)
        found.append(ChainRound(signs_KX, accepted))
    return found


def test_it_tells_drafts_that_are_accepted_from_others():
    weights = fit(rounds())
    judged = [(each.features_KX[: each.accepted + 1], each.accepted) for each in rounds()]
    right, wrong = [], []
    for signs_KX, accepted in judged:
        sure_K = confidence(signs_KX, weights)
        right += sure_K[:accepted].tolist()
        wrong += sure_K[accepted:].tolist()
    mean = len(right) / (len(right) + len(wrong))
    assert sum(right) / len(right) > mean + 0.1 > sum(wrong) / len(wrong) + 0.2
    assert sum(right + wrong) / len(right + wrong) == pytest.approx(mean, abs=0.01)  # and it is calibrated


def test_stopped_chains_are_counted_and_priced():
    prices = Costs({1: 10.0, 2: 11.0, 3: 12.0}, (0.0, 1.0, 0.0), other=2.0, plain=10.0)
    sure = torch.tensor([[0.0, 0, 0, 0], [-2.0, 0, 0, 0]])  # e^0 = 1, then 0.14
    judged = [ChainRound(sure, 2), ChainRound(sure, 0)]
    assert simulated(judged, None, 0.0, prices) == (pytest.approx(2.0), pytest.approx(4 / (2 * (2 + 12 + 2))))
    # With the threshold in between one draft is made, and a second one was looked at.
    assert simulated(judged, None, 0.5, prices) == (pytest.approx(1.5), pytest.approx(3 / (2 * (2 + 11 + 2))))


def test_a_stopper_is_trained_on_the_targets_own_answers(tiny_target):
    """By a model of the target's first block, which is right about some of them."""
    target = tiny_target(vocab_size=20)
    head = build_head("cut", {"depth": 3, "num_layers": 1}, target.info).double()
    head.initialize(target.modules, torch.ones(20, dtype=torch.int64))
    prompts = [torch.tensor([[start, 2, 3]]) for start in range(6)]
    policy, tokens, rate = train_stopper(
        target, head, prompts, {"max_new_tokens": 40, "do_sample": False}, {"target": 0.01}
    )
    assert policy.depth == 3 and len(policy.weights) == 4 and tokens >= 1 and rate > 0
    lm = SpeculativeLM(target, EarlyExitChain(head, policy, target.modules))
    for ids in prompts:
        settings = {"max_new_tokens": 20, "do_sample": False, "attention_mask": torch.ones_like(ids)}
        assert torch.equal(lm.generate(ids, **settings).sequences, target.model.generate(ids, **settings))


def test_nothing_is_learned_from_drafts_that_are_all_alike():
    with pytest.raises(ValueError, match="all 4 drafts were right: no classifier can be trained"):
        fit([ChainRound(torch.zeros(2, 4), 2)] * 2)
