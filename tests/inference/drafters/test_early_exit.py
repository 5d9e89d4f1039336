"""Chains that stop where the draft is unsure: exact, and no longer than they should be."""

from __future__ import annotations

import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper

from headstart.heads import build_head
from headstart.inference import SpeculativeLM, tree_policy
from headstart.inference.drafters.by_name import make_drafter, tree_drafter
from headstart.inference.drafters.early_exit import confidence
from headstart.inference.trees.tree_spec import EarlyExitShape, spec_of
from headstart.inference.trees.verify import RULES, choose_rule

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


@pytest.mark.parametrize("acceptance", [word for word, rule in RULES.items() if not rule.lossy])
@pytest.mark.parametrize("tree", ["stop:0.5:drawn:chain:2", "stop:0.4:drawn:chain:2"])
def test_what_is_drawn_has_the_targets_distribution(tiny_target, tools, tree, acceptance):
    target = tiny_target(vocab_size=3)
    processors = LogitsProcessorList([TemperatureLogitsWarper(0.8)])
    drafter = make_drafter(target, tiny_target(vocab_size=3, layers=1, seed=3), tree)
    rule, prompt, lengths = (
        choose_rule(acceptance, drafter.kind, lossy=False),
        torch.tensor([1, 2, 1]),
        set(),
    )
    # which draws at every node, so that there are more branches
    new = 2 if acceptance == "point_mass" else 3

    def run(draw):
        rows, stats = tools.write(target, drafter, rule, [prompt], processors, draw, new)
        lengths.update(record.drafted for record in stats.rows[0])
        return tuple(rows[0])

    found = tools.every_branch(run)
    assert len(lengths) > 1  # some chains stop, and others do not
    for text, weight in tools.exactly(target, prompt, new, 0.8).items():
        assert found.get(text, 0.0) == pytest.approx(weight, abs=1e-9)


@pytest.mark.parametrize(
    ("markov", "acceptance"),
    [("vanilla", word) for word, rule in RULES.items() if not rule.lossy]
    + [("gated", "token"), ("rnn", "token")],
)
def test_a_block_that_ends_by_its_own_estimate_has_the_targets_distribution(
    tiny_target, tools, markov, acceptance
):
    """DSpark: the estimate sees the tokens drawn before, by which some chains end and others do
    not."""
    target = tiny_target(vocab_size=3, layers=3)
    torch.manual_seed(5)
    head = build_head(
        "dspark",
        {"block_size": 2, "markov": markov, "markov_rank": 4, "num_layers": 1},
        target.info,
    )
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    torch.nn.init.zeros_(head.confidence_head["proj"].bias)
    # of the token before
    torch.nn.init.normal_(head.confidence_head["proj"].weight[:, -4:], std=9.0)
    drafter = tree_drafter(
        head.to(target.dtype).eval(), tree_policy("stop:0.5:drawn:chain:2"), target.modules
    )
    rule, lengths, prompt = (
        choose_rule(acceptance, drafter.kind, lossy=False),
        set(),
        torch.tensor([1, 2, 1]),
    )
    new = 2 if acceptance == "point_mass" else 3

    def run(draw):
        rows, stats = tools.write(target, drafter, rule, [prompt], LogitsProcessorList(), draw, new)
        lengths.update(record.drafted for record in stats.rows[0])
        return tuple(rows[0])

    found = tools.every_branch(run)
    for text, weight in tools.exactly(target, prompt, new, 1.0).items():
        assert found.get(text, 0.0) == pytest.approx(weight, abs=1e-9)
    assert len(lengths) > 1  # some blocks end, and others do not


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
