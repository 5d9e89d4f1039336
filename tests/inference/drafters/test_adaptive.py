"""Adaptive drafting in the decoder: whatever the clock says, the text is the same, and in time."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers import Useless, check_identity, head_for, other_model, written_alone

from headstart.inference import SpeculativeLM, TreeShape
from headstart.inference.drafters import adaptive, draft_model_state
from headstart.inference.drafters.adaptive import AdaptiveDrafter
from headstart.inference.drafters.by_name import make_drafter
from headstart.inference.drafters.next_step import Choice
from headstart.inference.drafters.validated import validated


@pytest.fixture(autouse=True)
def steps_take_what_is_assumed() -> None:
    """Not here: costs and clocks are what is tested."""


def adaptive_of(lm):
    """The part of a decoder's drafter that chooses by the clock; None without one."""
    parts = lm.drafter.nested()
    return next((part for part in parts if isinstance(part, AdaptiveDrafter)), None)


VOCAB = 20
STEP = 1.0
NODE = 0.1
ANSWER = 128


class Clock:
    """A forward takes a step, and a tenth of one for each node beyond the first."""

    def __init__(self, target, monkeypatch):
        self.now = 0.0
        engine = target.engine
        forward_tree, forward_nodes = engine.forward_tree, engine.forward_nodes

        def over_a_tree(tree, *rest):
            self.now += STEP + NODE * (tree.tokens_BN.shape[1] - 1)
            return forward_tree(tree, *rest)

        def over_nodes(nodes, *rest):
            self.now += STEP + NODE * (nodes.tokens_BN.shape[1] - 1)
            return forward_nodes(nodes, *rest)

        monkeypatch.setattr(engine, "forward_tree", over_a_tree)
        monkeypatch.setattr(engine, "forward_nodes", over_nodes)

    def __call__(self):
        return self.now


@pytest.fixture
def clock(target, monkeypatch):
    return Clock(target, monkeypatch)


def written(lm, tokens=ANSWER, start=1):
    return check_identity(lm, [torch.tensor([start, 2, 3])], max_new_tokens=tokens)


def truth_of(target, tokens):
    settings = {"max_new_tokens": tokens, "do_sample": False}
    return written_alone(target.model, torch.tensor([1, 2, 3]), **settings)


def useless():
    return validated(Useless(), VOCAB)


@pytest.mark.filterwarnings("error")
def test_a_useless_drafter_costs_no_more_than_three_percent(target, clock):
    lm = SpeculativeLM(target, AdaptiveDrafter([useless()], clock=clock))
    for start in range(5):
        before = clock.now
        output = written(lm, start=start)
        assert clock.now - before <= 1.03 * (ANSWER - 1) * STEP
        assert output.stats.plain_rounds >= 0.95 * output.stats.rounds
    before = clock.now
    assert written(SpeculativeLM(target, Useless())).stats.plain_rounds == 0
    assert clock.now - before > 1.3 * (ANSWER - 1) * STEP


def test_a_good_drafter_is_left_alone_and_one_that_becomes_good_is_found(target, clock, tools):
    truth = truth_of(target, ANSWER)
    chain = TreeShape.chain(4)
    lm = SpeculativeLM(
        target, AdaptiveDrafter([tools.Oracle(chain, [truth], VOCAB, wrong=0.0)], clock=clock)
    )
    written(lm)
    before = clock.now
    stats = written(lm).stats
    assert clock.now - before < 0.31 * (ANSWER - 1) * STEP and stats.plain_rounds <= 2

    class Late(tools.Oracle):
        """Wrong in the first quarter of the text."""

        def propose(self, roots_B):
            self.wrong = 1.0 if len(self.written[0]) < ANSWER else 0.0
            return super().propose(roots_B)

    truth, before = truth_of(target, 4 * ANSWER), clock.now
    late = AdaptiveDrafter([Late(chain, [truth], VOCAB, wrong=1.0)], clock=clock)
    written(SpeculativeLM(target, late), 4 * ANSWER)
    assert clock.now - before < 0.7 * 4 * ANSWER * STEP


@pytest.mark.parametrize("slots", [None, 2])
@pytest.mark.parametrize("held", [2, 8192])
def test_what_was_read_and_written_plainly_is_shown_later(target, clock, monkeypatch, slots, held):
    """A model that drafts for itself stays right about everything, whenever it is asked, and
    whoever has ended."""
    choices = itertools.cycle([*[0] * 9, 1, 1, 0, 1, 1, 0])
    monkeypatch.setattr(adaptive, "choose", lambda record: Choice(next(choices)))
    monkeypatch.setattr(draft_model_state, "PENDING_TOKENS", held)
    rows, mask = (
        torch.tensor([[1, 2, 3], [0, 5, 6], [7, 8, 9]]),
        torch.tensor([[1, 1, 1], [0, 1, 1], [1, 1, 1]]),
    )
    settings = {
        "attention_mask": mask,
        "max_new_tokens": 41,
        "do_sample": False,
        "max_batch_size": slots,
    }
    text = truth_of(target, 41)
    end = next(
        token for place, token in enumerate(text) if place == text.index(token) and place > 2
    )
    lm = SpeculativeLM(
        target, AdaptiveDrafter([make_drafter(target, target, "chain:3")], clock=clock)
    )
    stats = lm.generate(rows, **settings, eos_token_id=end, pad_token_id=0).stats
    assert {record.returned for row in stats.rows for record in row[:-1]} == {1, 4}
    assert len({len(row) for row in stats.rows}) > 1, "all rows end together"


def test_sampled_texts_tell_nothing_of_greedy_ones(target, clock):
    drafter = AdaptiveDrafter([make_drafter(target, target, "chain:3")], clock=clock)
    lm, row = SpeculativeLM(target, drafter), torch.tensor([[1, 2, 3]])
    written(lm)
    greedy = drafter.records[False, 1]
    lm.generate(
        row, attention_mask=torch.ones_like(row), do_sample=True, max_new_tokens=30, pad_token_id=0
    )
    assert drafter.records[False, 1].candidates == greedy.candidates
    assert drafter.records[True, 1].candidates != greedy.candidates


def test_adaptive_drafting_is_the_default_and_can_be_switched_off(target):
    head = head_for(target, "medusa", num_heads=3)
    assert SpeculativeLM.from_pretrained(target).drafter.max_nodes == 1
    for options in (
        {"head": head},
        {"head": head, "tree": "chain:2"},
        {"drafter": other_model(target)},
        {"drafter": Useless()},
    ):
        assert adaptive_of(SpeculativeLM.from_pretrained(target, **options))
        off = SpeculativeLM.from_pretrained(target, adaptive=False, **options)
        assert adaptive_of(off) is None
        assert written(off, 20).stats.plain_rounds == 0
    several = SpeculativeLM.from_pretrained(target, head, tree="chain:1|chain:3", adaptive=False)
    assert written(several, 40).stats.plain_rounds == 0
    own = AdaptiveDrafter([useless()])
    assert SpeculativeLM.from_pretrained(target, drafter=own).drafter is own


def test_trees_of_one_head_share_its_state_and_have_room_in_it(target):
    drafter = make_drafter(
        target, tree="chain:1|branch:2x2x1", head=head_for(target, "medusa", num_heads=3)
    )
    first, second = drafter.trees
    assert first.model_state is second.model_state and not first.model_state.lazy
    assert (first.model_state.depth, first.model_state.expanded) == (3, 7)
    fresh_first, fresh_second = drafter.fresh().trees
    assert (
        fresh_first.model_state is fresh_second.model_state
        and fresh_first.model_state is not first.model_state
    )
    assert (fresh_first.shape, fresh_second.shape) == (first.shape, second.shape)
    assert AdaptiveDrafter(drafter.trees).trees[1].model_state.lazy


def test_trees_that_do_not_go_together_are_refused(target):
    with pytest.raises(ValueError, match="different rules"):
        make_drafter(target, target, "chain:2|drawn:chain:2")
    trees = [
        SpeculativeLM.from_pretrained(
            target, head_for(target, "medusa", num_heads=3), tree="chain:1", adaptive=False
        ).drafter
        for _ in range(2)
    ]
    with pytest.raises(ValueError, match="of the same head"):
        AdaptiveDrafter(trees)
    with pytest.raises(ValueError, match="needs a drafter"):
        AdaptiveDrafter([])


@pytest.mark.parametrize("pay", [True, False])
@pytest.mark.parametrize("slots", [None, 2])
def test_a_seeded_text_does_not_hang_on_the_clock(target, pay, slots):
    """Picked trees, with clocks by which drafts always pay, or never."""
    rows = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    settings = {
        "attention_mask": torch.ones_like(rows),
        "max_new_tokens": 30,
        "do_sample": True,
        "top_k": 6,
    }

    def text(lm):
        return lm.generate(
            rows, generator=torch.Generator().manual_seed(4), max_batch_size=slots, **settings
        )

    lm = SpeculativeLM.from_pretrained(
        target, drafter=other_model(target), tree="chain:2|branch:3x2"
    )
    lm.drafter.clock = clock = Wound(lm.drafter, pay)
    found = text(lm)
    assert torch.equal(found.sequences, text(SpeculativeLM(target)).sequences)
    plain = found.stats.plain_rounds / found.stats.rounds
    assert clock.asked and (plain < 0.3 if pay else plain > 0.5)


class Wound:
    """A clock by which rounds with drafts take a tenth or ten times as long as plain ones."""

    def __init__(self, drafter, pay):
        self.drafter, self.pay, self.now, self.asked = drafter, pay, 0.0, 0

    def __call__(self):
        self.asked += 1
        choice = self.drafter.choice
        drafted = choice is not None and choice.candidate > 0
        self.now += (0.1 if self.pay else 10.0) if drafted else 1.0
        return self.now


@pytest.mark.parametrize("tree", ["drawn:chain:2", "drawn:chain:2|drawn:chain:1"])
def test_of_drawn_trees_sampling_takes_the_first_each_round(target, tree):
    """Their text hangs on their shape, so the clock may not choose; greedy decoding picks, and
    may."""
    lm = SpeculativeLM.from_pretrained(target, drafter=other_model(target), tree=tree)
    alone = SpeculativeLM.from_pretrained(
        target, drafter=other_model(target), tree="drawn:chain:2", adaptive=False
    )
    row = torch.tensor([[1, 2, 3]])
    settings = {"max_new_tokens": 40, "do_sample": True}
    one, other = (
        each.generate(row, generator=torch.Generator().manual_seed(1), **settings)
        for each in (lm, alone)
    )
    assert torch.equal(one.sequences, other.sequences) and one.stats.plain_rounds == 0
    assert written(lm, 60).stats.plain_rounds > 0
