"""A seeded text is a function of the target and the seed: neither drafts nor the batch's order
change it."""

from __future__ import annotations

import pytest
import torch
from helpers import other_model, padded_batch

from headstart.inference import SpeculativeLM
from headstart.inference.drafters.by_name import make_drafter
from headstart.inference.engines import cpu_kernels
from headstart.inference.rounds.noise import PositionNoise, exponential
from headstart.inference.trees.sampling import PositionSampler, RandomSampler

VOCAB, NEW = 20, 24
ROWS = [torch.tensor(row) for row in ([1, 2, 3], [4, 5, 6, 7, 8], [9])]
SETTINGS = {
    "max_new_tokens": NEW,
    "do_sample": True,
    "temperature": 0.8,
    "top_k": 7,
    "pad_token_id": 0,
}
NO_ENDS = {"eos_token_id": None}


@pytest.fixture
def target(tiny_target):
    return tiny_target(vocab_size=VOCAB)


def sampled(target, drafter, slots=None, **settings):
    input_ids, mask = padded_batch(ROWS)
    generator = torch.Generator().manual_seed(5)
    lm = SpeculativeLM(target, drafter)
    settings = {**SETTINGS, **settings}
    output = lm.generate(
        input_ids, attention_mask=mask, generator=generator, max_batch_size=slots, **settings
    )
    return output.sequences[:, input_ids.shape[1] :].tolist(), output.stats


@pytest.mark.parametrize("kernels", [False, True])
def test_numbers_are_exponential_and_independent(monkeypatch, kernels):
    """Kolmogorov and Smirnov, correlations between neighbours, and how often a race is won."""
    monkeypatch.setattr(
        cpu_kernels, "in_use", lambda device: kernels and cpu_kernels.library() is not None
    )
    noise = PositionNoise(
        RandomSampler(torch.Generator().manual_seed(0)),
        [[0] * 7] * 50,
        40,
        200,
        torch.device("cpu"),
    )
    noise.move_to(range(50))
    found_BKV = noise.next(40)
    count, sorted_N = found_BKV.numel(), found_BKV.flatten().double().sort().values
    reached = (torch.arange(count) + 0.5) / count
    assert (-torch.expm1(-sorted_N) - reached).abs().max() < 1.95 / count**0.5  # one in a thousand
    for one, other in (
        (found_BKV[1:], found_BKV[:-1]),
        (found_BKV[:, 1:], found_BKV[:, :-1]),
        (found_BKV[..., 1:], found_BKV[..., :-1]),
    ):
        assert (
            torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1].abs()
            < 3.5 / one.numel() ** 0.5
        )
    probs_V = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03, 0.0]).expand(50, 40 * 33, -1)
    wins_V = (
        PositionSampler(exponential_BNV=found_BKV[..., :198].reshape(50, -1, 6))
        .categorical(probs_V)
        .flatten()
        .bincount(minlength=6)
    )
    expected_V = probs_V[0, 0] * wins_V.sum()
    # chi squared, 4 degrees
    assert wins_V[5] == 0 and ((wins_V - expected_V)[:5] ** 2 / expected_V[:5]).sum() < 18.5


def test_kernels_and_torch_compute_the_same_numbers(monkeypatch):
    if cpu_kernels.library() is None:
        pytest.skip("no compiler")
    keys_BK, found = torch.randint(-(2**63), 2**63 - 1, (3, 4))[:, :1], []
    for kernels in (False, True):
        monkeypatch.setattr(cpu_kernels, "in_use", lambda device, kernels=kernels: kernels)
        found.append(exponential(keys_BK, 1001))
    assert torch.equal(*found)
    assert found[0].isfinite().all() and (found[0] > 0).all()


@pytest.mark.parametrize("tree", ["chain:3", "branch:2x2x2", "dynamic:9:3:3", "stop:0:chain:3"])
def test_a_draft_that_is_the_target_is_drawn_alike(target, tree):
    """By the same numbers: what is guessed is what is drawn."""
    settings = {"top_k": 0, **NO_ENDS}
    drafter = make_drafter(target, target, tree)
    _, stats = sampled(target, drafter, **settings)
    if "dynamic" in tree:  # which may have no room for the path that is right
        assert stats.acceptance_length > 2.5
        return
    assert {record.returned for row in stats.rows for record in row[:-1]} == {4}
    drafter.rows.model = Permuted(drafter.head)
    _, stats = sampled(target, drafter, **settings)
    assert stats.acceptance_length > 2.5  # but for the tokens that it cannot guess


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


@pytest.mark.parametrize("tree", ["drawn:chain:2", "drawn:branch:2x2", "independent:branch:2x2"])
def test_a_seed_gives_drawn_trees_one_text_too(target, tree):
    """They take numbers of the generator round by round."""
    first, second = (
        sampled(target, make_drafter(target, other_model(target), tree))[0] for _ in range(2)
    )
    assert first == second
