"""Whether to draft, and with which tree: by a clock that the test winds, and never by what is
right."""

from __future__ import annotations

import copy
import itertools
import random

import block_heads
import pytest
import torch
from helpers import Useless

from headstart.heads import CheckpointMetadata, build_head
from headstart.inference import DynamicShape, SpeculativeLM, TreeShape
from headstart.inference.drafters import model_rows
from headstart.inference.drafters.adaptive import (
    MARGIN,
    PRIOR_STEPS,
    PROBE_SHARE,
    PROBE_STEPS,
    AdaptiveDrafter,
    Candidate,
    Speeds,
    candidate_trees,
)
from headstart.inference.drafters.by_name import auto_trees, make_drafter
from headstart.inference.drafters.validated import validated
from headstart.inference.trees.tree_spec import EarlyExitShape
from headstart.inference.tuning.round_costs import RoundCosts
from headstart.inference.tuning.tree_search import default_length

VOCAB, STEP, NODE, ANSWER = 20, 1.0, 0.1, 128


class Machine:
    """What rounds take: `cost[i]` steps for candidate i, times how slow the machine is just now."""

    def __init__(self, cost, slow=lambda written: 1.0, first=20.0):
        self.cost, self.slow, self.first = cost, slow, first

    def seconds(self, candidate, written):
        return self.cost[candidate] * self.slow(written)


def candidates(machine, costs=None):
    """Plain steps and trees, whose costs are only assumed if none are given."""
    assumed = costs or [1.0, *(1.4 + 0.3 * i for i in range(len(machine.cost) - 1))]
    lengths = [1.0, *(2.0 + 0.3 * i for i in range(len(machine.cost) - 1))]
    return Speeds(
        [Candidate(*pair) for pair in zip(assumed, lengths, strict=True)], 0, costs is not None
    )


def decode(speeds, machine, emitted, tokens, fresh=None):
    """Seconds for so many tokens, and how often each candidate ran; `emitted(candidate, written)` a
    round.

    The first round of each candidate takes `first` times as long, which is not counted: it is the
    program's, not the choice's.
    """
    fresh = set() if fresh is None else fresh
    taken, written, rounds = 0.0, 0, [0] * len(machine.cost)
    while written < tokens:
        chosen = speeds.choose()
        seconds = machine.seconds(chosen, written)
        count = 1 if chosen == 0 else emitted(chosen, written)
        speeds.record(seconds * (1.0 if chosen in fresh else machine.first), count)
        fresh.add(chosen)
        taken, written = taken + seconds * min(1, (tokens - written) / count), written + count
        rounds[chosen] += 1
    return taken, rounds


COSTS = [[1.0, 1.4], [1.0, 1.7, 2.2, 2.9], [1.0, 2.8, 4.5, 7.5]]


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("known", [False, True], ids=["assumed", "measured"])
@pytest.mark.parametrize("emitted", [1, 1.2])
def test_drafts_that_never_pay_cost_less_than_three_percent(cost, known, emitted):
    """Over 12 answers, and over one of a new process where rounds cost what they usually do."""
    machine, chance = Machine(cost), random.Random(0)
    speeds = candidates(machine, cost if known else None)
    right = lambda *_: 1 + (chance.random() < emitted - 1)  # noqa: E731
    first, fresh = 0.0, set()
    total = first = decode(speeds, machine, right, ANSWER, fresh)[0]
    total += sum(decode(speeds, machine, right, ANSWER, fresh)[0] for _ in range(11))
    assert total <= 1.03 * 12 * ANSWER
    if cost is not COSTS[-1] or known:
        assert first <= (1.03 if len(cost) == 2 or known else 1.06) * ANSWER


@pytest.mark.parametrize("known", [False, True], ids=["assumed", "measured"])
@pytest.mark.parametrize(
    ("cost", "emitted"), [([1.0, 1.2], [1, 3]), ([1.0, 1.2, 1.3, 1.6], [1, 2.0, 3.0, 3.1])]
)
def test_drafts_that_always_pay_lose_little_to_measuring_plain_steps(known, cost, emitted):
    machine, chance = Machine(cost), random.Random(1)
    speeds = candidates(machine, cost if known else None)

    def found(candidate, _):
        mean = emitted[candidate]
        return int(mean) + (chance.random() < mean % 1)

    seconds, rounds = decode(speeds, machine, found, 20 * ANSWER)
    best = min(price / mean for price, mean in zip(cost, emitted, strict=True))
    assert seconds <= (1.03 if known else 1.05) * best * 20 * ANSWER
    assert rounds[0] > 1  # plain steps were measured again
    assert rounds[0] * (1 / best - 1) <= 0.02 * 20 * ANSWER


@pytest.mark.parametrize("pays_first", [False, True])
def test_what_changes_is_found(pays_first):
    """A text on which drafts are right, and one on which they are wrong, in turns of 1000
    tokens."""
    machine = Machine([1.0, 1.5])
    speeds = candidates(machine)
    pays = lambda written: (written // 1000) % 2 == (not pays_first)  # noqa: E731
    seconds, _ = decode(speeds, machine, lambda _, written: 3 if pays(written) else 1, 6000)
    ideal = 3000 * 1.0 + 3000 * 0.5
    assert seconds <= ideal + 3 * (128 * 0.5 + 0.03 * 1000 + 10)


@pytest.mark.parametrize(("emitted", "ideal"), [(3, 0.5), (1, 1.0), (2, 0.75)])
@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_a_machine_that_changes_its_speed_is_measured_anew(emitted, ideal, factor):
    """Half or twice as slow from the middle on: neither is what pays left for long, nor what does
    not pay taken up."""
    machine = Machine([1.0, 1.5], slow=lambda written: factor if written > 1500 else 1.0)
    speeds = candidates(machine)
    seconds, _ = decode(speeds, machine, lambda *_: emitted, 3000)
    assert seconds <= 1.04 * ideal * 1500 * (1 + factor)


@pytest.mark.parametrize("when", [1, 2, 5, 40])
@pytest.mark.parametrize("emitted", [1, 3])
def test_one_slow_round_does_not_decide(when, emitted):
    """A pause, or something that is compiled, fifty times as long as a round, whichever round it
    falls on."""
    machine, calls = Machine([1.0, 1.5]), itertools.count()
    machine.seconds = lambda candidate, _: (
        machine.cost[candidate] * (50 if next(calls) == when else 1)
    )
    seconds, _ = decode(candidates(machine), machine, lambda *_: emitted, 1000)
    assert seconds <= 1.03 * 1000 * (1.5 / emitted if emitted > 1.5 else 1.0) + 50 * 1.5 + 64


def test_the_first_steps_of_a_text_do_not_decide_alone():
    """Drafts that pay, but are wrong five times at first, as chance has it on one text in
    thirty-two."""
    machine, count = Machine([1.0, 1.3], first=1.0), itertools.count()
    _, rounds = decode(
        candidates(machine, machine.cost), machine, lambda *_: 1 + (next(count) >= 5), ANSWER
    )
    assert rounds[0] == 0


def test_a_tree_that_is_dear_to_probe_does_not_hold_up_the_others():
    machine = Machine([1.0, 1.45, 5.0], first=1.0)
    _, rounds = decode(candidates(machine, machine.cost), machine, lambda *_: 1.6, 900)
    assert rounds[0] >= 3 * PROBE_STEPS


def test_a_cost_that_was_measured_decides_the_first_choice():
    cost = [1.0, 1.2, 1.25, 1.8]
    assert candidates(Machine(cost), cost).choose() == 2
    assert candidates(Machine(cost), [1.0, 6.0, 7.0, 8.0]).choose() == 0


@pytest.mark.parametrize("cost", [1.2, 3.0, 5.0, 20.0])
@pytest.mark.parametrize("reading", [0.0, 30.0])
def test_looks_lose_what_was_put_by_for_them_however_dear_they_are(cost, reading):
    """`reading` is what a head takes, when it is asked again, to read what it was not shown."""

    class Reading(Machine):
        asked = 0

        def seconds(self, candidate, written):
            self.asked = (self.asked + 1) * candidate
            return self.cost[candidate] + reading * (self.asked == 1)

    machine, tokens = Reading([1.0, cost], first=1.0), 40_000
    seconds, rounds = decode(candidates(machine, machine.cost), machine, lambda *_: 1, tokens)
    look = (PROBE_STEPS * cost + reading) * (1 + MARGIN) - PROBE_STEPS
    # The first time is the program's; what was expected counts as PRIOR_STEPS, each a token too
    # many.
    assert seconds - tokens <= PROBE_SHARE * tokens + look + reading + PRIOR_STEPS
    assert rounds[1] >= PROBE_STEPS * (PROBE_SHARE * tokens // look - 1) > 0


# The engine, with a clock of the test's own.


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
def target(tiny_target):
    return tiny_target(vocab_size=VOCAB)


@pytest.fixture
def clock(target, monkeypatch):
    return Clock(target, monkeypatch)


def written(lm, tokens=ANSWER, start=1):
    return lm.generate(torch.tensor([[start, 2, 3]]), max_new_tokens=tokens, do_sample=False)


def plainly(target, tokens=ANSWER, start=1):
    settings = {
        "attention_mask": torch.ones(1, 3, dtype=torch.int64),
        "max_new_tokens": tokens,
        "do_sample": False,
    }
    return target.model.generate(torch.tensor([[start, 2, 3]]), **settings)


def a_head(target, kind="medusa", **options):
    torch.manual_seed(0)
    head = build_head(kind, options or {"num_heads": 3}, target.info).double()
    head.initialize(target.modules, torch.ones(VOCAB, dtype=torch.int64))
    return head


def useless():
    return validated(Useless(), VOCAB)


@pytest.mark.filterwarnings("error")
def test_a_useless_drafter_costs_no_more_than_three_percent(target, clock):
    lm = SpeculativeLM(target, AdaptiveDrafter([useless()], clock=clock))
    for start in range(5):
        before = clock.now
        output = written(lm, start=start)
        assert torch.equal(output.sequences, plainly(target, start=start))
        assert clock.now - before <= 1.03 * (ANSWER - 1) * STEP
        assert output.stats.plain_rounds >= 0.95 * output.stats.rounds
    before = clock.now
    assert written(SpeculativeLM(target, Useless())).stats.plain_rounds == 0
    assert clock.now - before > 1.3 * (ANSWER - 1) * STEP


def test_many_short_streams_lose_no_more_than_a_long_one(target, clock):
    lm = SpeculativeLM(target, AdaptiveDrafter([useless()], clock=clock))
    for number in range(40):
        written(lm, tokens=9, start=number % 5)
    assert clock.now <= 1.03 * 40 * 8 * STEP


def test_a_good_drafter_is_left_alone_and_one_that_becomes_good_is_found(target, clock, tools):
    truth = plainly(target)[0, 3:].tolist()
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

    truth, before = plainly(target, 4 * ANSWER)[0, 3:].tolist(), clock.now
    late = AdaptiveDrafter([Late(chain, [truth], VOCAB, wrong=1.0)], clock=clock)
    written(SpeculativeLM(target, late), 4 * ANSWER)
    assert clock.now - before < 0.7 * 4 * ANSWER * STEP


@pytest.mark.parametrize("slots", [None, 2])
@pytest.mark.parametrize("held", [2, 8192])
def test_what_was_read_and_written_plainly_is_shown_later(target, clock, monkeypatch, slots, held):
    """A model that drafts for itself stays right about everything, whenever it is asked, and
    whoever has ended."""
    choices = itertools.cycle([*[0] * 9, 1, 1, 0, 1, 1, 0])

    def choose(self, *_):
        self.running = next(choices)
        return self.running

    monkeypatch.setattr(Speeds, "choose", choose)
    monkeypatch.setattr(model_rows, "PENDING_TOKENS", held)
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
    text = written(SpeculativeLM(target), 41).sequences[0, 3:].tolist()
    end = next(
        token for place, token in enumerate(text) if place == text.index(token) and place > 2
    )
    lm = SpeculativeLM(
        target, AdaptiveDrafter([make_drafter(target, target, "chain:3")], clock=clock)
    )
    stats = lm.generate(rows, **settings, eos_token_id=end, pad_token_id=0).stats
    assert {record.returned for row in stats.rows for record in row[:-1]} == {1, 4}
    assert len({len(row) for row in stats.rows}) > 1, "all rows end together"


def test_of_several_trees_the_fastest_is_found(target, clock):
    drafter = make_drafter(target, target, "root|chain:1|chain:8|branch:3x3")
    assert isinstance(drafter, AdaptiveDrafter) and not drafter.plain
    drafter.clock = clock
    lm = SpeculativeLM(target, drafter)
    for start in range(5):
        assert torch.equal(written(lm, start=start).sequences, plainly(target, start=start))
    # A model that drafts for itself is always right, but its own forwards cost as much as the
    # target's: a token takes 1 step without drafts, 1.1 in a chain of 1, 1.2 in one of 8, 2.1 in a
    # branch.
    assert drafter.speeds[False, 1].leader == 0


def test_sampled_texts_tell_nothing_of_greedy_ones(target, clock):
    drafter = AdaptiveDrafter([make_drafter(target, target, "chain:3")], clock=clock)
    lm, row = SpeculativeLM(target, drafter), torch.tensor([[1, 2, 3]])
    written(lm)
    before = copy.deepcopy(drafter.speeds)
    lm.generate(
        row, attention_mask=torch.ones_like(row), do_sample=True, max_new_tokens=30, pad_token_id=0
    )
    assert drafter.speeds[False, 1].candidates == before[False, 1].candidates
    assert drafter.speeds[True, 1].candidates != before[False, 1].candidates


@pytest.mark.parametrize("tree", ["chain:1|chain:3", "auto"])
@pytest.mark.parametrize("drafter", ["prompt-lookup", "ngram:2", None])
@pytest.mark.parametrize("slots", [None, 2])
def test_everything_adapts(target, tree, drafter, slots):
    """A hybrid, a choice of trees, a source: whatever is drafted, and wherever rows begin and
    end."""
    if drafter == "prompt-lookup" and tree != "auto":
        tree = "chain:1|chain:3"
    head = None if drafter == "ngram:2" else a_head(target)
    lm = SpeculativeLM.from_pretrained(target, head, tree=tree, drafter=drafter)
    assert isinstance(lm.drafter, AdaptiveDrafter) and lm.drafter.plain
    rows = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    settings = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": [3, 7], "pad_token_id": 0}
    for _ in range(2):
        found = lm.generate(
            rows, attention_mask=torch.ones_like(rows), max_batch_size=slots, **settings
        ).sequences
        for row, text in zip(rows, found.tolist(), strict=True):
            stock = target.model.generate(
                row[None], attention_mask=torch.ones_like(row)[None], **settings
            )[0].tolist()
            assert text[: len(stock)] == stock


def test_adaptive_drafting_is_the_default_and_can_be_switched_off(target):
    head = a_head(target)
    assert SpeculativeLM.from_pretrained(target).drafter.max_nodes == 1
    for options in (
        {"head": head},
        {"head": head, "tree": "chain:2"},
        {"drafter": "ngram:2"},
        {"drafter": Useless()},
    ):
        assert isinstance(SpeculativeLM.from_pretrained(target, **options).drafter, AdaptiveDrafter)
        off = SpeculativeLM.from_pretrained(target, fallback=False, **options)
        assert not isinstance(off.drafter, AdaptiveDrafter)
        assert written(off, 20).stats.plain_rounds == 0
    several = SpeculativeLM.from_pretrained(target, head, tree="chain:1|chain:3", fallback=False)
    assert written(several, 40).stats.plain_rounds == 0
    own = AdaptiveDrafter([useless()])
    assert SpeculativeLM.from_pretrained(target, drafter=own).drafter is own


def test_trees_of_one_head_share_its_state_and_have_room_in_it(target):
    drafter = make_drafter(target, tree="chain:1|branch:2x2x1", head=a_head(target))
    first, second = drafter.trees
    assert first.rows is second.rows and not first.rows.lazy
    assert (first.rows.depth, first.rows.expanded) == (3, 7)
    fresh_first, fresh_second = drafter.fresh().trees
    assert fresh_first.rows is fresh_second.rows and fresh_first.rows is not first.rows
    assert (fresh_first.shape, fresh_second.shape) == (first.shape, second.shape)
    assert AdaptiveDrafter(drafter.trees).trees[1].rows.lazy


def test_a_drafter_by_object_takes_no_tree(target):
    with pytest.raises(ValueError, match="a drafter that is made already"):
        SpeculativeLM.from_pretrained(target, drafter=Useless(), tree="chain:3")


def test_trees_that_do_not_go_together_are_refused(target):
    with pytest.raises(ValueError, match="different rules"):
        make_drafter(target, "ngram:2", "chain:2|drawn:chain:2")
    trees = [
        SpeculativeLM.from_pretrained(
            target, a_head(target), tree="chain:1", fallback=False
        ).drafter
        for _ in range(2)
    ]
    with pytest.raises(ValueError, match="of the same head"):
        AdaptiveDrafter(trees)
    with pytest.raises(ValueError, match="needs a drafter"):
        AdaptiveDrafter([])


def test_the_candidates_fit_the_head_and_the_machine(target):
    head = a_head(target, num_heads=4)
    cheap, dear = RoundCosts({1: 1.0, 2: 1.0}, 0.01), RoundCosts({1: 1.0, 2: 2.0}, 0.5)
    sizes = lambda *given: sorted(tree.size for tree in candidate_trees(head, *given))  # noqa: E731
    assert sizes(None, RoundCosts.assumed(torch.device("cpu"))) == [2, 4, 8, 16]
    assert sizes(None, cheap) == [2, 4, 8, 16, 32, 60]
    assert sizes(None, RoundCosts({1: 1.0, 32: 1.5, 64: 3.0}, 0.01)) == [2, 4, 8, 16, 32]
    assert sizes(DynamicShape(12, 7, 4), RoundCosts.assumed(torch.device("cpu"))) == [2, 4, 8, 12]
    assert sorted(tree.depth for tree in candidate_trees(head, None, cheap)) == [1, 3, 4, 4, 4, 4]
    assert (
        candidate_trees(head, None, dear)[0].size == 2
        and candidate_trees(head, None, cheap)[0].size == 60
    )
    short = a_head(target, num_heads=1)
    assert {tree.depth for tree in candidate_trees(short, None, cheap)} == {1}


def test_a_head_that_estimates_its_acceptance_offers_a_chain_that_ends_where_a_token_does_not_pay():
    # each token of a chain costs 0.15 plain steps
    costs = RoundCosts({1: 1.0, 2: 1.1, 8: 1.7}, 0.05)
    sure, unsure = (
        candidate_trees(block_heads.build({"block_size": 4, **options}, name="dspark"), None, costs)
        for options in ({}, {"confidence": False})
    )
    (chain,) = [tree for tree in sure if tree not in unsure]
    assert (
        isinstance(chain, EarlyExitShape)
        and chain.depth == 4
        and chain.threshold == pytest.approx(0.15)
    )


def test_a_tree_of_another_machine_is_only_a_hint(target):
    head, costs = a_head(target), RoundCosts.assumed(torch.device("cpu"))
    metadata = CheckpointMetadata(tree="chain:2", measured={"fastest": {"here": "chain:3"}})
    assert auto_trees(head, metadata, "here", costs) == [TreeShape.chain(3)]
    assert TreeShape.chain(3) not in auto_trees(head, metadata, "elsewhere", costs)


def test_expected_lengths_are_those_of_the_model():
    assert default_length(TreeShape.chain(2)) == pytest.approx(1 + 0.5 + 0.5 * 0.4)
    assert default_length(TreeShape.from_paths([[0], [1]])) == pytest.approx(1 + 0.5 + 0.25)
    assert default_length(DynamicShape(4, 3)) == pytest.approx(1 + 0.5 + 0.25 + 0.5 * 0.4)


@pytest.mark.parametrize("pay", [True, False])
@pytest.mark.parametrize("slots", [None, 1, 2])
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

    lm = SpeculativeLM.from_pretrained(target, drafter="random", tree="chain:2|branch:3x2")
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
        drafted = getattr(self.drafter, "_drafted", False)
        self.now += (0.1 if self.pay else 10.0) if drafted else 1.0
        return self.now


@pytest.mark.parametrize("tree", ["drawn:chain:2", "drawn:chain:2|drawn:chain:1"])
def test_of_drawn_trees_sampling_takes_the_first_each_round(target, tree):
    """Their text hangs on their shape, so the clock may not choose; greedy decoding picks, and
    may."""
    lm = SpeculativeLM.from_pretrained(target, drafter="random", tree=tree)
    alone = SpeculativeLM.from_pretrained(
        target, drafter="random", tree="drawn:chain:2", fallback=False
    )
    row = torch.tensor([[1, 2, 3]])
    settings = {"max_new_tokens": 40, "do_sample": True}
    one, other = (
        each.generate(row, generator=torch.Generator().manual_seed(1), **settings)
        for each in (lm, alone)
    )
    assert torch.equal(one.sequences, other.sequences) and one.stats.plain_rounds == 0
    assert written(lm, 60).stats.plain_rounds > 0
