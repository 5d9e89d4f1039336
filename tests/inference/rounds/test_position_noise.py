"""Random numbers: a seeded text is a function of the target and the seed, and each number is used
once."""

from __future__ import annotations

import pytest
import torch
from helpers import continued, other_model

from headstart.inference import SpeculativeLM
from headstart.inference.drafters.by_name import make_drafter
from headstart.inference.engines import cpu_kernels
from headstart.inference.rounds.noise import PositionNoise, exponential
from headstart.inference.trees.sampling import PositionSampler, PrecomputedSampler, RandomSampler
from headstart.inference.trees.verify import RULES

VOCAB = 20
ROWS = [torch.tensor(row) for row in ([1, 2, 3], [4, 5, 6, 7, 8], [9])]
SETTINGS = {"max_new_tokens": 24, "do_sample": True, "temperature": 0.8, "top_k": 0}


def ks_distance(numbers):
    """Kolmogorov's and Smirnov's distance from the exponential distribution."""
    count = numbers.numel()
    sorted_N = numbers.flatten().double().sort().values
    reached_N = (torch.arange(count) + 0.5) / count
    return (-torch.expm1(-sorted_N) - reached_N).abs().max()


def correlation(ones, others):
    return torch.corrcoef(torch.stack([ones.flatten(), others.flatten()]))[0, 1].abs()


@pytest.mark.parametrize("kernels", [False, True])
def test_numbers_are_exponential_and_independent(monkeypatch, kernels):
    """By their distribution, correlations between neighbours, and how often a race is won."""
    kernels = kernels and cpu_kernels.library() is not None
    monkeypatch.setattr(cpu_kernels, "in_use", lambda device: kernels)
    sampler = RandomSampler(torch.Generator().manual_seed(0))
    noise = PositionNoise(sampler, [[0] * 7] * 50, 40, 200, torch.device("cpu"))
    noise.move_to(range(50))
    noise_BKV = noise.next(40)
    assert ks_distance(noise_BKV) < 1.95 / noise_BKV.numel() ** 0.5  # one in a thousand
    for dim, size in enumerate(noise_BKV.shape):
        later = noise_BKV.narrow(dim, 1, size - 1)
        earlier = noise_BKV.narrow(dim, 0, size - 1)
        assert correlation(later, earlier) < 3.5 / later.numel() ** 0.5
    probs_V = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03, 0.0])
    races = PositionSampler(exponential_BNV=noise_BKV[..., :198].reshape(50, -1, 6))
    winners_BN = races.categorical(probs_V.expand(50, 40 * 33, -1))
    wins_V = winners_BN.flatten().bincount(minlength=6)
    expected_V = probs_V * wins_V.sum()
    # chi squared, 4 degrees
    assert wins_V[5] == 0 and ((wins_V - expected_V)[:5] ** 2 / expected_V[:5]).sum() < 18.5


def test_kernels_and_torch_compute_the_same_numbers(monkeypatch):
    if cpu_kernels.library() is None:
        pytest.skip("no compiler")
    keys_BK = torch.randint(-(2**63), 2**63 - 1, (3, 4))[:, :1]
    found = []
    for kernels in (False, True):
        monkeypatch.setattr(cpu_kernels, "in_use", lambda device, kernels=kernels: kernels)
        found.append(exponential(keys_BK, 1001))
    assert torch.equal(*found)
    assert found[0].isfinite().all() and (found[0] > 0).all()


@pytest.mark.parametrize("tree", ["chain:3", "branch:2x2x2", "dynamic:9:3:3", "stop:0:chain:3"])
def test_a_draft_that_is_the_target_is_drawn_alike(target, tree):
    """By the same numbers: what is guessed is what is drawn."""
    drafter = make_drafter(target, target, tree)

    def sampled():
        draws = torch.Generator().manual_seed(5)
        return continued(SpeculativeLM(target, drafter), ROWS, generator=draws, **SETTINGS)[1].stats

    stats = sampled()
    if "dynamic" in tree:  # which may have no room for the path that is right
        assert stats.acceptance_length > 2.5
        return
    assert {record.returned for row in stats.rows for record in row[:-1]} == {4}
    drafter.model_state.model = Permuted(drafter.head)
    assert sampled().acceptance_length > 2.5  # but for the tokens that it cannot guess


class Permuted:
    """A draft that knows fewer tokens than the target, in another order."""

    def __init__(self, head):
        self.head, self.draft_vocab_size = head, VOCAB - 1
        self.order_D = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(0))[1:]

    def __getattr__(self, name):
        return getattr(self.head, name)

    def expand(self, state, tokens_BW, parents_BW):
        logits_BWV, state = self.head.expand(state, tokens_BW, parents_BW)
        return logits_BWV[..., self.order_D], state

    def target_tokens(self, draft_tokens):
        return self.order_D[draft_tokens]


# Numbers of a generator, which rounds of drawn trees take.


def test_every_number_that_was_drawn_is_used_once():
    numbers_BU = torch.arange(14.0).reshape(2, 7)
    sampler = PrecomputedSampler(uniform_BU=numbers_BU)
    used = [
        sampler.uniform(shape, numbers_BU.device) for shape in ((2, 3, 1), (2,), (2, 1), (2, 2))
    ]
    assert torch.equal(torch.cat([part.reshape(2, -1) for part in used], dim=1), numbers_BU)
    with pytest.raises(RuntimeError):
        sampler.uniform((2,), numbers_BU.device)


@pytest.mark.parametrize("rule", RULES)
def test_enough_numbers_are_drawn_for_every_rule(target, rule):
    """A wide tree and a deep one, or a chain where a rule is for chains alone."""
    wide = "sampled_without_replacement" in RULES[rule].kinds
    for tree in ("drawn:branch:6", "drawn:branch:1x2x1") if wide else ("drawn:chain:4",):
        options = {"tree": tree, "acceptance": rule, "lossy": True, "adaptive": False}
        lm = SpeculativeLM.from_pretrained(target, drafter=other_model(target), **options)
        continued(lm, [torch.arange(9)] * 2, max_new_tokens=9, do_sample=True)


@pytest.mark.parametrize("options", [{"drafter": "prompt-lookup"}, {"tree": "drawn:branch:2x1"}])
def test_greedy_decoding_draws_nothing(target, options):
    """A seed set before means the same after it; a tree that would be drawn is picked."""
    lm = SpeculativeLM.from_pretrained(target, adaptive=False, **{"drafter": target} | options)
    before = torch.get_rng_state()
    continued(lm, [torch.arange(9)], max_new_tokens=9)
    assert torch.equal(torch.get_rng_state(), before)
