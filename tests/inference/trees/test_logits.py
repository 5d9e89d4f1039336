"""Processors over trees: each node with the scores that `generate` would compute for its own
text."""

from __future__ import annotations

import pytest
import torch
from messages import refused
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as known

from headstart.inference import DraftTree
from headstart.inference.trees.logits import PREFIX_FREE, TreeLogitsProcessor
from headstart.inference.trees.sampling import RandomSampler

V = 11


def test_draws_follow_the_probabilities_and_never_an_impossible_class():
    probs = torch.tensor([0.0, 0.5, 0.0, 0.3, 0.2, 0.0], dtype=torch.float64)
    draws = RandomSampler(torch.Generator().manual_seed(0)).categorical(probs.expand(20_000, 1, -1))
    shares = torch.bincount(draws.flatten(), minlength=6) / 20_000
    assert (shares - probs).abs().max() < 0.015
    assert set(draws.unique().tolist()) == {1, 3, 4}


def test_a_draw_of_exactly_zero_falls_on_the_first_possible_class(monkeypatch):
    monkeypatch.setattr(
        torch, "rand", lambda shape, **options: torch.zeros(shape, dtype=torch.float64)
    )
    assert RandomSampler().categorical(torch.tensor([[0.0, 0.0, 0.7, 0.3]])).tolist() == [2]
    assert RandomSampler().accept(torch.tensor([0.0, 1e-9])).tolist() == [False, True]


def test_a_certain_thing_is_always_accepted_and_an_impossible_one_never():
    sampler = RandomSampler(torch.Generator().manual_seed(0))
    accepted = sampler.accept(torch.tensor([0.0, 1.0, 0.25]).expand(20_000, -1)).double().mean(0)
    assert accepted[:2].tolist() == [0, 1]
    assert abs(accepted[2] - 0.25) < 0.015


def test_distinct_draws_come_one_after_the_other_without_replacement():
    probs = torch.tensor([0.0, 0.5, 0.3, 0.2], dtype=torch.float64)
    drawn = RandomSampler(torch.Generator().manual_seed(0)).distinct(probs.expand(40_000, -1), 2)
    for first, second in [(1, 2), (1, 3), (2, 1), (3, 1), (3, 2)]:
        share = ((drawn[:, 0] == first) & (drawn[:, 1] == second)).double().mean()
        assert abs(share - probs[first] * probs[second] / (1 - probs[first])) < 0.01
    alone = RandomSampler(torch.Generator().manual_seed(0)).distinct(probs.expand(40_000, -1), 1)
    assert alone.shape == (40_000, 1)
    assert torch.allclose(alone[:, 0].bincount().double() / 40_000, probs, atol=0.01)
    filled = RandomSampler(torch.Generator().manual_seed(0)).distinct(probs[None], 4)
    assert sorted(filled[0].tolist()) == [0, 1, 2, 3]
    assert filled[0, 3] == 0  # the impossible one comes last


TEXTS = [torch.tensor([3, 4, 3, 7]), torch.tensor([1, 2, 3, 2, 3, 2])]
"""Two rows with prompts of 3 and 5 tokens, and one that was written."""
PADDINGS = [2, 0]
ACTIVE = [1, 0]
"""The second row is decoded at place 0."""
TREE = DraftTree(
    tokens_BN=torch.tensor([[2, 3, 5, 2, 9, 3], [7, 3, 4, 7, 0, 0]]),
    parents_BN=torch.tensor([[-1, 0, 0, 1, 2, 3], [-1, 0, 1, 1, 0, 0]]),
    sizes_B=torch.tensor([6, 4]),
    max_depth=3,
)
"""Another tree in each row; every token smaller than V, roots as the texts end."""


def random_logits(*shape):
    return torch.randn(*shape, V, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def tree_scores(processors, logits_BNV):
    process = TreeLogitsProcessor(LogitsProcessorList(processors), PADDINGS)
    return process(logits_BNV, TREE, TEXTS.__getitem__, ACTIVE)


def nodes_of_both_rows():
    for place, size in enumerate(TREE.sizes_B.tolist()):
        for node in range(size):
            yield place, node


PROCESSORS = {
    "temperature": [known.TemperatureLogitsWarper(0.7)],
    "top-k, top-p, min-p": [
        known.TopKLogitsWarper(6),
        known.TopPLogitsWarper(0.8),
        known.MinPLogitsWarper(0.05),
    ],
    "typical": [known.TypicalLogitsWarper(0.6)],
    "eta": [known.EtaLogitsWarper(0.05)],
    "epsilon": [known.EpsilonLogitsWarper(0.05)],
    "top-h": [known.TopHLogitsWarper(0.9)],
    "mended": [known.InfNanRemoveLogitsProcessor()],
    "suppressed": [known.SuppressTokensLogitsProcessor([1, 4])],
    "renormalised": [known.TopKLogitsWarper(4), known.LogitNormalization()],
    "repetition": [known.RepetitionPenaltyLogitsProcessor(1.7)],
    "repetition after the prompt": [known.RepetitionPenaltyLogitsProcessor(1.7, 2)],
    "n-grams": [known.NoRepeatNGramLogitsProcessor(2)],
    "bad words": [known.NoBadWordsLogitsProcessor([[4], [2, 3], [3, 2, 9]])],
    "bias": [known.SequenceBiasLogitsProcessor({(3, 5): 4.0, (1,): -2.0})],
    "minimum length": [known.MinLengthLogitsProcessor(8, 3)],
    "forced first": [known.ForcedBOSTokenLogitsProcessor(4)],
    "watermark": [known.WatermarkLogitsProcessor(V, "cpu", greenlist_ratio=0.4)],
    "mixed, in this order": [
        known.RepetitionPenaltyLogitsProcessor(1.3),
        known.TemperatureLogitsWarper(0.5),
        known.NoRepeatNGramLogitsProcessor(3),
        known.TopKLogitsWarper(5),
    ],
}


def path(place, node):
    """The nodes from below the root to this one."""
    nodes = []
    while node > 0:
        nodes.insert(0, node)
        node = int(TREE.parents_BN[place, node])
    return nodes


@pytest.mark.parametrize("name", PROCESSORS)
def test_every_node_is_scored_as_generate_scores_its_text(name):
    processors = LogitsProcessorList(PROCESSORS[name])
    logits = random_logits(2, 6)
    scores = tree_scores(processors, logits.clone())
    judged = 0
    for place, node in nodes_of_both_rows():
        nodes = path(place, node)
        tokens = TREE.tokens_BN[place, nodes]
        steps = zip([0, *nodes], tokens)  # from each parent to a token below it
        if any(scores[place, parent, token] == -torch.inf for parent, token in steps):
            continue  # cannot be reached
        text = torch.cat([TEXTS[ACTIVE[place]], tokens])
        expected = processors(text[None], logits[place, node][None].clone())[0]
        torch.testing.assert_close(scores[place, node], expected, rtol=0, atol=1e-12)
        judged += 1
    assert judged >= 4


@pytest.mark.parametrize(
    "processor",
    [
        lambda: known.MinNewTokensLengthLogitsProcessor(5, 3, 2),
        lambda: known.SuppressTokensAtBeginLogitsProcessor([2], 5),
        lambda: known.ForcedEOSTokenLogitsProcessor(9, 2),
        lambda: known.ExponentialDecayLengthPenalty((1, 1.5), 2, 5),
    ],
)
def test_lengths_are_counted_as_generate_counted_them_over_the_padded_prompt(processor):
    """Both rows have written one token after a padded prompt of five: they must be treated
    alike."""
    logits = random_logits(1, 1).expand(2, 6, -1).clone()
    scores = tree_scores([processor()], logits)
    for place, node in nodes_of_both_rows():
        text = torch.zeros(1, 6 + len(path(place, node)), dtype=torch.int64)
        expected = processor()(text, logits[place, node][None].clone())[0]
        if all(scores[place, int(TREE.parents_BN[place, node])].isfinite()) or node == 0:
            torch.testing.assert_close(scores[place, node], expected)


def test_a_constraint_is_asked_for_its_row_about_the_root_alone():
    """Nodes below are scored when they are known to be accepted."""
    asked = []

    def allowed(row, text):
        asked.append((row, text.tolist()))
        return [2, 3, 9] if row == 1 else [3]

    processors = LogitsProcessorList([known.PrefixConstrainedLogitsProcessor(allowed, 1)])
    process = TreeLogitsProcessor(processors, PADDINGS)
    scores = process(torch.zeros(2, 6, V), TREE, TEXTS.__getitem__, ACTIVE)
    one, two = TEXTS
    assert process.one_by_one and process.calls == 2
    assert asked == [(1, two.tolist()), (0, one.tolist())]
    assert scores[1, 0].isfinite().nonzero().flatten().tolist() == [3]


def test_repetition_penalty_does_not_see_what_generate_says_is_padding():
    logits = random_logits(2, 6)
    told = known.RepetitionPenaltyLogitsProcessor(1.5, torch.tensor(PADDINGS))
    alone = known.RepetitionPenaltyLogitsProcessor(1.5)
    assert torch.equal(tree_scores([told], logits.clone()), tree_scores([alone], logits.clone()))


@pytest.mark.parametrize(
    ("given", "expected"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)]
)
@pytest.mark.parametrize("processors", [[], [known.RepetitionPenaltyLogitsProcessor(1.5)]])
def test_scores_are_at_least_float32(given, expected, processors):
    assert tree_scores(processors, torch.zeros(2, 6, V, dtype=given)).dtype == expected


def test_drafts_are_warped_as_the_target_is_but_for_what_reads_the_text():
    logits = torch.randn(2, V)
    warpers = LogitsProcessorList(PROCESSORS["top-k, top-p, min-p"])
    processors = LogitsProcessorList([known.RepetitionPenaltyLogitsProcessor(1.5), *warpers])
    found = TreeLogitsProcessor(processors, [0]).draft_probs(logits)
    assert torch.equal(found, warpers(None, logits.clone()).softmax(-1))


def test_every_processor_that_is_run_without_its_text_is_shown_above_not_to_need_it():
    shown = {type(processor) for processors in PROCESSORS.values() for processor in processors}
    assert set(PREFIX_FREE) <= shown


def test_a_temperature_that_makes_scores_infinite_is_refused():
    TreeLogitsProcessor(LogitsProcessorList([known.TemperatureLogitsWarper(1e-30)]), [0])
    with refused("temperature 1e-45 1e-38"):
        TreeLogitsProcessor(LogitsProcessorList([known.TemperatureLogitsWarper(1e-45)]), [0])


def test_a_processor_of_the_users_own_may_write_to_the_scores():
    class InPlace(LogitsProcessor):
        def __call__(self, input_ids, scores):
            scores[:, input_ids[0, -1]] = -torch.inf
            return scores

    logits = torch.zeros(2, 6, V)
    process = TreeLogitsProcessor(LogitsProcessorList([InPlace()]), PADDINGS)
    scores = process(logits, TREE, TEXTS.__getitem__, ACTIVE)
    after = process.score_next(1, torch.tensor([5, 2]), logits[0, 2])
    assert (logits == 0).all()
    assert (scores[0, 0] == -torch.inf).nonzero().flatten().tolist() == [int(TEXTS[1][-1])]
    assert (after == -torch.inf).nonzero().flatten().tolist() == [2]


@pytest.mark.parametrize(
    "processor",
    [
        known.EncoderNoRepeatNGramLogitsProcessor(2, torch.tensor([[1, 2]])),
        known.UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, None),
    ],
)
def test_a_processor_that_needs_more_than_a_rows_text_is_refused_by_name(processor):
    with refused(type(processor).__name__, "EpsilonLogitsWarper"):
        TreeLogitsProcessor(LogitsProcessorList([processor]), [0])
