from __future__ import annotations

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from headstart.inference.sampling import RandomDraw, check_processors, process


def test_draws_follow_the_probabilities_and_never_an_impossible_class():
    probs = torch.tensor([0.0, 0.5, 0.0, 0.3, 0.2, 0.0], dtype=torch.float64)
    draws = RandomDraw(torch.Generator().manual_seed(0)).categorical(probs.expand(20_000, 1, -1))
    shares = torch.bincount(draws.flatten(), minlength=6) / 20_000
    assert (shares - probs).abs().max() < 0.015
    assert set(draws.unique().tolist()) == {1, 3, 4}


def test_a_draw_of_exactly_zero_falls_on_the_first_possible_class(monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda shape, **options: torch.zeros(shape, dtype=torch.float64))
    assert RandomDraw().categorical(torch.tensor([[0.0, 0.0, 0.7, 0.3]])).tolist() == [2]


def test_the_same_generator_draws_the_same():
    probs = torch.rand(3, 4, 7).softmax(-1)
    first, second = (RandomDraw(torch.Generator().manual_seed(5)).categorical(probs) for _ in range(2))
    assert torch.equal(first, second)


def test_processors_run_on_all_nodes_as_on_each_alone():
    processors = LogitsProcessorList([TemperatureLogitsWarper(0.7), TopKLogitsWarper(4), TopPLogitsWarper(0.8)])
    logits = torch.randn(2, 5, 9, generator=torch.Generator().manual_seed(0))
    together = process(logits, processors)
    for row in range(2):
        for node in range(5):
            assert torch.equal(together[row, node], processors(torch.zeros(1, 3), logits[row, node][None])[0])


@pytest.mark.parametrize(("given", "expected"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
def test_scores_are_at_least_float32(given, expected):
    assert process(torch.zeros(1, 1, 3, dtype=given), LogitsProcessorList()).dtype == expected


def test_a_processor_that_reads_the_prefix_is_refused_by_name():
    with pytest.raises(ValueError, match="RepetitionPenaltyLogitsProcessor is not supported"):
        check_processors(LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.2)]))
