"""Chains that stop where the draft is unsure: exact, and no longer than they should be."""

from __future__ import annotations

import pytest
import torch

from headstart.inference import SpeculativeLM, tree_policy
from headstart.inference.drafters.by_name import make_drafter
from headstart.inference.drafters.tree_policies import confidence
from headstart.inference.trees.tree_spec import EarlyExitShape, spec_of

VOCAB = 20


def test_a_sure_draft_goes_on_and_an_unsure_one_stops(tiny_target):
    """A model that drafts for itself: each length is where its own distribution first falls below
    the threshold."""
    target = tiny_target(vocab_size=VOCAB)
    threshold, length = 0.118, 5
    lm = SpeculativeLM(target, make_drafter(target, target, f"stop:{threshold}:chain:{length}"))
    output = lm.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=60, do_sample=False)
    ids, place = output.sequences[0].tolist(), 4
    probs_TV = target.model(output.sequences).logits[0].softmax(-1)
    drafted = []
    for record in output.stats.rows[0][:-1]:
        expected = 0
        while expected < length and float(probs_TV[place - 1 + expected].max()) >= threshold:
            expected += 1
        assert record.drafted == record.accepted == expected
        drafted.append(expected)
        place += record.returned
    assert place <= len(ids) and len(set(drafted)) > 2


def test_confidence_is_the_heads_own_estimate_or_the_probability_of_its_best_token():
    logits = torch.tensor([[0.0, 0.0, -torch.inf], [9.0, 0.0, 0.0]])
    assert confidence(logits).tolist() == pytest.approx(logits.softmax(-1).amax(-1).tolist())
    assert confidence(logits, torch.tensor([0.0, 0.0])).tolist() == [0.5, 0.5]


def test_words_and_policies_mean_each_other():
    for word in ("stop:0.3:chain:4", "stop:0.2:drawn:chain:3", "stop:1:chain:3"):
        policy = tree_policy(word)
        assert isinstance(policy, EarlyExitShape) and tree_policy(str(spec_of(policy))) == policy
    with pytest.raises(ValueError, match=r"threshold from 0 to 1, not 3 and 1\.5"):
        tree_policy("stop:1.5:chain:3")
    with pytest.raises(ValueError, match="unknown tree 'stop:x:chain:3'"):
        tree_policy("stop:x:chain:3")
