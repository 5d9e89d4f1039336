"""Adaptive drafting in the decoder: whatever the clock says, the text is the same, and in time."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers import (
    Oracle,
    Useless,
    check_identity,
    generated,
    head_for,
    other_model,
    written_alone,
)
from messages import refused

from headstart.inference import SpeculativeLM, TreeShape
from headstart.inference.drafters import adaptive, draft_model_state
from headstart.inference.drafters.adaptive import AdaptiveDrafter
from headstart.inference.drafters.by_name import make_drafter
from headstart.inference.drafters.next_step import Choice
from headstart.inference.drafters.validated import validated

pytestmark = pytest.mark.clock
VOCAB = 20
ANSWER = 128
PROMPT = torch.tensor([1, 2, 3])


def adaptive_part(lm):
    """The part of a decoder's drafter that chooses by the clock; None without one."""
    parts = lm.drafter.nested()
    return next((part for part in parts if isinstance(part, AdaptiveDrafter)), None)


def decoded_stats(lm, tokens=ANSWER, start=1):
    prompt = torch.tensor([start, 2, 3])
    return check_identity(lm, [prompt], max_new_tokens=tokens).stats


def truth_of(target, tokens):
    return written_alone(target.model, PROMPT, max_new_tokens=tokens, do_sample=False)


def useless():
    return validated(Useless(), VOCAB)


@pytest.mark.filterwarnings("error")
def test_a_useless_drafter_costs_no_more_than_three_percent(target, clock):
    lm = SpeculativeLM(target, AdaptiveDrafter([useless()], clock=clock))
    for start in range(5):
        before = clock.now
        stats = decoded_stats(lm, start=start)
        assert clock.now - before <= 1.03 * (ANSWER - 1)
        assert stats.plain_rounds >= 0.95 * stats.rounds
    before = clock.now
    assert decoded_stats(SpeculativeLM(target, Useless())).plain_rounds == 0
    assert clock.now - before > 1.3 * (ANSWER - 1)


def test_a_good_drafter_is_left_alone(target, clock):
    oracle = Oracle(TreeShape.chain(4), [truth_of(target, ANSWER)], VOCAB, wrong=0.0)
    lm = SpeculativeLM(target, AdaptiveDrafter([oracle], clock=clock))
    decoded_stats(lm)
    before = clock.now
    assert decoded_stats(lm).plain_rounds <= 2
    assert clock.now - before < 0.31 * (ANSWER - 1)


@pytest.mark.parametrize("slots", [None, 2])
@pytest.mark.parametrize("held", [2, 8192])
def test_what_was_read_and_written_plainly_is_shown_later(target, clock, monkeypatch, slots, held):
    """A model that drafts for itself stays right about everything, whenever it is asked, and
    whoever has ended."""
    choices = itertools.cycle([*[0] * 9, 1, 1, 0, 1, 1, 0])
    monkeypatch.setattr(adaptive, "choose", lambda record: Choice(next(choices)))
    monkeypatch.setattr(draft_model_state, "PENDING_TOKENS", held)
    text = truth_of(target, 41)
    end = next(token for place, token in enumerate(text) if text.index(token) == place > 2)
    drafter = make_drafter(target, target, "chain:3")
    lm = SpeculativeLM(target, AdaptiveDrafter([drafter], clock=clock))
    rows = [PROMPT, torch.tensor([5, 6]), torch.tensor([7, 8, 9])]
    settings = {"max_new_tokens": 41, "eos_token_id": end, "max_batch_size": slots}
    stats = check_identity(lm, rows, **settings).stats
    assert {record.returned for row in stats.rows for record in row[:-1]} == {1, 4}
    assert len({len(row) for row in stats.rows}) > 1, "all rows end together"


def test_sampled_texts_tell_nothing_of_greedy_ones(target, clock):
    drafter = AdaptiveDrafter([make_drafter(target, target, "chain:3")], clock=clock)
    lm = SpeculativeLM(target, drafter)
    decoded_stats(lm)
    greedy = drafter.records[False, 1]
    generated(lm, PROMPT[None], do_sample=True, max_new_tokens=30)
    assert drafter.records[False, 1].candidates == greedy.candidates
    assert drafter.records[True, 1].candidates != greedy.candidates


def test_adaptive_drafting_is_the_default_and_can_be_switched_off(target, medusa_head):
    for options in (
        {"head": medusa_head},
        {"head": medusa_head, "tree": "chain:2"},
        {"drafter": other_model(target)},
        {"drafter": Useless()},
    ):
        assert adaptive_part(SpeculativeLM.from_pretrained(target, **options))
        off = SpeculativeLM.from_pretrained(target, adaptive=False, **options)
        assert adaptive_part(off) is None
        assert decoded_stats(off, 20).plain_rounds == 0
    several = SpeculativeLM.from_pretrained(
        target, medusa_head, tree="chain:1|chain:3", adaptive=False
    )
    assert decoded_stats(several, 40).plain_rounds == 0
    own = AdaptiveDrafter([useless()])
    assert SpeculativeLM.from_pretrained(target, drafter=own).drafter is own


def test_trees_of_one_head_share_its_state_and_have_room_in_it(target, medusa_head):
    drafter = make_drafter(target, tree="chain:1|branch:2x2x1", head=medusa_head)
    state, other = [tree.model_state for tree in drafter.trees]
    assert state is other and not state.lazy
    assert (state.depth, state.expanded) == (3, 7)
    fresh = drafter.fresh().trees
    assert fresh[0].model_state is fresh[1].model_state is not state
    assert [tree.shape for tree in fresh] == [tree.shape for tree in drafter.trees]
    assert AdaptiveDrafter(drafter.trees).trees[1].model_state.lazy


def test_trees_that_do_not_go_together_are_refused(target):
    with refused("rules"):
        make_drafter(target, target, "chain:2|drawn:chain:2")
    heads = [head_for(target, "medusa", num_heads=3) for _ in range(2)]
    with refused("head"):
        AdaptiveDrafter([make_drafter(target, tree="chain:1", head=head) for head in heads])
    with refused("drafter"):
        AdaptiveDrafter([])


class Wound:
    """A clock by which rounds with drafts take a tenth or ten times as long as plain ones."""

    def __init__(self, drafter, pay):
        self.drafter = drafter
        self.drafted_round = 0.1 if pay else 10.0
        self.now = 0.0

    def __call__(self):
        choice = self.drafter.choice
        drafted = choice is not None and choice.candidate > 0
        self.now += self.drafted_round if drafted else 1.0
        return self.now


@pytest.mark.parametrize("pay", [True, False])
@pytest.mark.parametrize("slots", [None, 2])
def test_a_seeded_text_does_not_hang_on_the_clock(target, pay, slots):
    """Picked trees, with clocks by which drafts always pay, or never."""
    rows = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    settings = {"max_new_tokens": 30, "do_sample": True, "top_k": 6, "max_batch_size": slots}

    def text(decoder):
        return generated(decoder, rows, generator=torch.Generator().manual_seed(4), **settings)

    tree = "chain:2|branch:3x2"
    lm = SpeculativeLM.from_pretrained(target, drafter=other_model(target), tree=tree)
    lm.drafter.clock = Wound(lm.drafter, pay)
    found = text(lm)
    assert torch.equal(found.sequences, text(SpeculativeLM(target)).sequences)
    plain = found.stats.plain_rounds / found.stats.rounds
    assert plain < 0.3 if pay else plain > 0.5


@pytest.mark.parametrize("tree", ["drawn:chain:2", "drawn:chain:2|drawn:chain:1"])
def test_of_drawn_trees_sampling_takes_the_first_each_round(target, tree):
    """Their text hangs on their shape, so the clock may not choose; greedy decoding picks, and
    may."""
    small = other_model(target)
    lm = SpeculativeLM.from_pretrained(target, drafter=small, tree=tree)
    alone = SpeculativeLM.from_pretrained(
        target, drafter=small, tree="drawn:chain:2", adaptive=False
    )
    outputs = []
    for decoder in (lm, alone):
        generator = torch.Generator().manual_seed(1)
        settings = {"max_new_tokens": 40, "do_sample": True, "generator": generator}
        outputs.append(generated(decoder, PROMPT[None], **settings))
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    assert outputs[0].stats.plain_rounds == 0
    assert decoded_stats(lm, 60).plain_rounds > 0
