"""The verification step: its random numbers, and what greedy decoding leaves alone."""

from __future__ import annotations

import pytest
import torch
from helpers import other_model

from headstart.inference import SpeculativeLM
from headstart.inference.trees.sampling import PrecomputedSampler
from headstart.inference.trees.verify import RULES


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
def test_enough_numbers_are_drawn_for_every_rule(tiny_target, rule):
    """A wide tree and a deep one, or a chain where a rule is for chains alone."""
    target = tiny_target(vocab_size=20)
    wide = "sampled_without_replacement" in RULES[rule].kinds
    for tree in ("drawn:branch:6", "drawn:branch:1x2x1") if wide else ("drawn:chain:4",):
        lm = SpeculativeLM.from_pretrained(
            target,
            drafter=other_model(target),
            tree=tree,
            acceptance=rule,
            lossy=True,
            adaptive=False,
        )
        row = torch.arange(9)[None].expand(2, -1)
        settings = {"max_new_tokens": 9, "do_sample": True, "pad_token_id": 0}
        lm.generate(row, attention_mask=torch.ones_like(row), **settings)


@pytest.mark.parametrize("options", [{"drafter": "prompt-lookup"}, {"tree": "drawn:branch:2x1"}])
def test_greedy_decoding_draws_nothing(tiny_target, options):
    """A seed set before means the same after it; a tree that would be drawn is picked."""
    target = tiny_target(vocab_size=20)
    lm = SpeculativeLM.from_pretrained(target, adaptive=False, **{"drafter": target} | options)
    row, before = torch.arange(9)[None], torch.get_rng_state()
    lm.generate(row, attention_mask=torch.ones_like(row), max_new_tokens=9, do_sample=False)
    assert torch.equal(torch.get_rng_state(), before)
