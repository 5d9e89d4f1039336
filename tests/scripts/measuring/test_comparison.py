"""Comparisons of decoders: prompts in turns, where two answers differ, quartiles."""

from __future__ import annotations

import pytest
import torch

from headstart.inference import SpeculativeLM
from headstart.scripts.measuring.comparison import first_difference, in_turns, quartiles


def test_engines_answer_each_prompt_in_turns(tiny_target):
    asked = []

    class Noted(SpeculativeLM):
        def generate(self, ids, **settings):
            name = "a" if self is engines["a"] else "b"
            asked.append((name, ids.shape[1]))
            return super().generate(ids, **settings)

    target = tiny_target(vocab_size=24)
    engines = {"a": Noted(target), "b": Noted(target)}
    prompts = [torch.ones(1, length, dtype=torch.int64) for length in (3, 4, 5)]
    found = in_turns(engines, prompts, {"max_new_tokens": 4, "do_sample": False})
    assert "".join(name for name, _ in asked) == "ab" + "ab" + "ba" + "ab"
    assert [length for _, length in asked] == [3, 3, 3, 3, 4, 4, 5, 5]
    # Of the four tokens the first is the prompt's, and the warm-up's do not count.
    assert {name: stats.tokens for name, stats in found.items()} == {"a": 9, "b": 9}


def test_quartiles_of_one_prompt_are_that_prompt():
    assert quartiles([2.5]) == {"median": 2.5, "lower_quartile": 2.5, "upper_quartile": 2.5}
    five = quartiles([5.0, 1.0, 3.0, 2.0, 4.0])
    assert five == {"median": 3, "lower_quartile": 2, "upper_quartile": 4}


def test_a_difference_is_found_where_it_is_with_the_gap_between_the_logits(tiny_target):
    target = tiny_target(vocab_size=20)
    stock = torch.tensor([[3, 1, 4, 1, 5, 9]])
    ours = torch.tensor([[3, 1, 4, 7, 5, 9]])
    with torch.no_grad():
        logits = target.model(stock).logits[0, 2]
    found = first_difference(target, stock, ours, prompt=2)
    assert found == {"token": 1, "logit_gap": pytest.approx(float(logits[1] - logits[7]), rel=1e-5)}
    assert first_difference(target, stock, stock.clone(), prompt=2) is None


@pytest.mark.parametrize("lengths", [(6, 5), (5, 6)])
def test_an_answer_that_stops_too_early_or_too_late_is_a_difference(tiny_target, lengths):
    stock, ours = (torch.tensor([[3, 1, 4, 1, 5, 9]])[:, :length] for length in lengths)
    assert first_difference(tiny_target(vocab_size=20), stock, ours, prompt=2)["token"] == 3
