"""Whether to guess, and with which tree: by a clock that the test winds, and never by what is right."""

from __future__ import annotations

import warnings
from collections import deque

import pytest
import torch

from headstart.heads.checkpoint import build_head
from headstart.inference import DraftTree, SpeculativeLM, TreeShape
from headstart.inference import choosing as module
from headstart.inference.choosing import Bandit, Fallback, chosen_from
from headstart.inference.drafters import draft_model, drafter_from

VOCAB, STEP, NODE = 20, 1.0, 0.1


class Clock:
    """A forward takes a step, and a tenth of one for each node beyond the first."""

    def __init__(self, target, monkeypatch):
        self.now, original = 0.0, target.forward_nodes

        def forward(tokens_BN, *rest):
            self.now += STEP + NODE * (tokens_BN.shape[1] - 1)
            return original(tokens_BN, *rest)

        monkeypatch.setattr(target, "forward_nodes", forward)
        monkeypatch.setattr(module.time, "perf_counter", lambda: self.now)


@pytest.fixture
def target(tiny_target):
    return tiny_target(vocab_size=VOCAB)


@pytest.fixture
def clock(target, monkeypatch):
    return Clock(target, monkeypatch)


def written(lm, tokens=150, start=1):
    return lm.generate(torch.tensor([[start, 2, 3]]), max_new_tokens=tokens, do_sample=False)


def plainly(target, tokens=150, start=1):
    settings = {"attention_mask": torch.ones(1, 3, dtype=torch.int64), "max_new_tokens": tokens, "do_sample": False}
    return target.model.generate(torch.tensor([[start, 2, 3]]), **settings)


class Useless:
    """The same wrong token, again and again."""

    feature_layers, max_nodes, origin = (), 8, "picked"

    def nothing(self, *_):
        """All that there is to do."""

    begin = read = observe = compile = select = replace = nothing

    def propose(self, roots_B):
        tokens = torch.full((len(roots_B), 8), VOCAB - 1)
        tokens[:, 0] = roots_B
        parents = torch.arange(-1, 7).expand(len(roots_B), -1)
        return DraftTree(tokens, parents, torch.full_like(roots_B, 8), max_depth=7)


def test_a_useless_drafter_costs_no_more_than_three_percent(target, clock):
    lm = SpeculativeLM(target, Fallback(Useless()))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for start in range(5):
            before = clock.now
            output = written(lm, start=start)
            assert torch.equal(output.sequences, plainly(target, start=start))
            assert clock.now - before <= 1.03 * 149 * STEP
    assert len(told) == 1 and "speculation does not pay" in str(told[0].message)
    assert lm.drafter.fallbacks > 0
    wasted = SpeculativeLM(target, Useless())
    before = clock.now
    written(wasted)
    assert clock.now - before > 1.3 * 149 * STEP  # without the fallback


def test_many_short_streams_lose_no_more_than_a_long_one(target, clock):
    lm = SpeculativeLM(target, Fallback(Useless()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(40):
            written(lm, tokens=9, start=number % 5)
    assert clock.now <= 1.03 * 40 * 8 * STEP
    assert lm.drafter.fallbacks > 0


def test_a_gain_is_not_lent_without_end(target, clock, tools):
    """After a long time of right guesses, wrong ones cost a few steps."""
    truth = plainly(target)[0, 3:].tolist()
    oracle = tools.Oracle(TreeShape.chain(4), [truth], VOCAB, wrong=0.0)
    changing = Fallback(oracle)
    lm = SpeculativeLM(target, changing)
    for _ in range(20):
        written(lm)
    oracle.wrong = 1.0
    before = clock.now
    with pytest.warns(UserWarning, match="does not pay"):
        written(lm)
    lost = clock.now - before - 149 * STEP
    assert lost <= (module.STEPS_KEPT + module.STEPS_LENT + 0.01 * 149 + 0.5) * STEP


def test_a_price_is_asked_again_over_short_streams_too(target, clock, monkeypatch):
    monkeypatch.setitem(globals(), "NODE", 0.02)
    useless = Fallback(Useless())
    useless.account.plain_seconds[1] = deque([2 * STEP] * 5, maxlen=module.PLAIN_ROUNDS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(40):
            written(SpeculativeLM(target, useless), tokens=8, start=number % 5)
    assert clock.now <= 1.03 * 40 * 7 * STEP


def test_a_pause_of_the_machine_does_not_end_good_guesses(target, clock, tools):
    class Interrupted(tools.Oracle):
        calls = 0

        def propose(self, roots_B):
            self.calls += 1
            clock.now += 15 * STEP * (self.calls == 10)
            return super().propose(roots_B)

    truth = plainly(target)[0, 3:].tolist()
    lm = SpeculativeLM(target, Fallback(Interrupted(TreeShape.chain(4), [truth], VOCAB, wrong=0.0)))
    for _ in range(2):
        before = clock.now
        written(lm)
    assert clock.now - before < 0.4 * 149 * STEP


def test_a_machine_that_becomes_faster_is_no_gain_of_the_guesses(target, clock, monkeypatch):
    monkeypatch.setitem(globals(), "NODE", 0.02)
    useless = Fallback(Useless())
    useless.account.plain_seconds[1] = deque([2 * STEP] * 5, maxlen=module.PLAIN_ROUNDS)
    before = clock.now
    written(SpeculativeLM(target, useless))
    assert clock.now - before <= 1.03 * 149 * STEP


def test_a_good_drafter_is_left_alone_and_one_that_becomes_good_is_found(target, clock, tools):
    truth = plainly(target)[0, 3:].tolist()
    chain = TreeShape.chain(4)
    good = Fallback(tools.Oracle(chain, [truth], VOCAB, wrong=0.0))
    good.account.plain_seconds[1] = deque([STEP] * 3)
    before = clock.now
    written(SpeculativeLM(target, good))
    assert clock.now - before < 0.4 * 149 * STEP and good.fallbacks == 0

    class Late(tools.Oracle):
        """Wrong in the first half of the text."""

        def propose(self, roots_B):
            self.wrong = 1.0 if len(self.written[0]) < 75 else 0.0
            return super().propose(roots_B)

    late = Fallback(Late(chain, [truth], VOCAB, wrong=1.0))
    late.account.plain_seconds[1] = deque([STEP] * 3)
    before = clock.now
    with pytest.warns(UserWarning, match="does not pay"):
        written(SpeculativeLM(target, late))
    assert clock.now - before < 0.85 * 149 * STEP


@pytest.mark.parametrize("slots", [None, 2])
def test_what_was_written_plainly_is_shown_later(target, clock, slots):
    """A model that drafts for itself stays right about everything after plain rounds."""
    drafter = Fallback(draft_model(target, target, "chain:3"))
    drafter.account.plain_seconds = {rows: deque([STEP] * 3) for rows in (1, 2, 3)}
    choices = iter([True, *[False] * 9, True, False, True, True, False] * 100)
    drafter._pays = lambda: next(choices)
    rows = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    with pytest.warns(UserWarning, match="does not pay"):
        stats = (
            SpeculativeLM(target, drafter)
            .generate(rows, attention_mask=torch.ones_like(rows), max_new_tokens=41, do_sample=False, slots=slots)
            .stats
        )
    assert {record.returned for row in stats.rows for record in row[:-1]} == {1, 4}


def test_a_bandit_finds_the_fastest_tree(target, clock):
    bandit = chosen_from(draft_model(target, target, "chain:8").head, "root|chain:1|chain:8|branch:3x3", target.ends)
    assert isinstance(bandit, Bandit)
    original = target.forward_nodes
    lm = SpeculativeLM(target, bandit)
    for start in range(3):
        assert torch.equal(written(lm, start=start).sequences, plainly(target, start=start))
    # A model that drafts for itself is always right; its own forwards cost as much as the target's.
    rounds = [rate.rounds for rate in bandit.rates]
    rates = [rate.tokens / rate.seconds for rate in bandit.rates]
    assert bandit.rates[rates.index(max(rates))].rounds == max(rounds) and min(rounds) > 0
    assert original is target.forward_nodes


@pytest.mark.parametrize("tree", ["chain:1|chain:3", "auto"])
@pytest.mark.parametrize("drafter", ["prompt-lookup", "ngram:2", None])
def test_everything_falls_back(target, clock, tree, drafter):
    """A hybrid, a choice of trees, a source: rounds that they did not guess in are not theirs to count."""
    head = None
    if drafter != "ngram:2":
        torch.manual_seed(0)
        head = build_head("medusa", {"num_heads": 3}, target.info).double()
        head.initialize(target.ends, torch.ones(VOCAB, dtype=torch.int64))
    lm = SpeculativeLM.from_pretrained(target, head, tree=tree, drafter=drafter, fallback=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for start in range(3):
            assert torch.equal(written(lm, start=start).sequences, plainly(target, start=start))


def test_what_is_given_and_would_be_ignored_is_refused(target):
    with pytest.raises(ValueError, match="needs something to fall back from"):
        SpeculativeLM.from_pretrained(target, fallback=True)
    with pytest.raises(ValueError, match="a drafter that is made already"):
        SpeculativeLM.from_pretrained(target, drafter=Useless(), tree="chain:3")


def test_a_drafter_of_somebody_elses_may_not_draw(target):
    class Odd(Useless):
        origin = "chain"

    with pytest.raises(ValueError, match="must pick its guesses, and Odd says that they are 'chain'"):
        SpeculativeLM.from_pretrained(target, drafter=Odd())


def test_trees_that_do_not_go_together_are_refused(target):
    with pytest.raises(ValueError, match="different rules"):
        drafter_from("ngram:2", target, "chain:2|drawn:chain:2")
    first, second = (build_head("medusa", {"num_heads": 2}, target.info).double() for _ in range(2))
    arms = [SpeculativeLM.from_pretrained(target, head, tree="chain:1").drafter for head in (first, second)]
    with pytest.raises(ValueError, match="of the same head"):
        Bandit(arms)
    with pytest.raises(ValueError, match="two or more"):
        Bandit(arms[:1])


@pytest.mark.parametrize("where", ["begin", "read", "propose", "observe"])
def test_a_drafter_that_raises_is_reported_once_and_nothing_is_lost(target, where):
    class Broken(Useless):
        calls = 0

        def fail(self, *_):
            Broken.calls += 1
            raise RuntimeError("its file is gone")

    setattr(Broken, where, Broken.fail)
    lm = SpeculativeLM.from_pretrained(target, drafter=Broken())
    for _ in range(2):
        Broken.calls = 0
        with pytest.warns(UserWarning, match="the drafter Broken failed.*its file is gone") as told:
            assert torch.equal(written(lm, 20).sequences, plainly(target, 20))
        assert len(told) == 1 and Broken.calls == 1


def tree(tokens, parents, depth, size=None):
    sizes_B = torch.tensor([len(tokens) if size is None else size])
    return DraftTree(torch.tensor([tokens]), torch.tensor([parents]), sizes_B, max_depth=depth)


@pytest.mark.parametrize(
    ("proposed", "message"),
    [
        (lambda root: tree([root, VOCAB], [-1, 0], 1), f"node 1 is token {VOCAB}; the target has {VOCAB}"),
        (lambda root: tree([root, -1], [-1, 0], 1), "node 1 is token -1"),
        (lambda root: tree([root] * 9, list(range(-1, 8)), 8), "9 nodes, and at most 8 were announced"),
        (lambda root: tree([root, 1, 2], [-1, 2, 0], 2), "node 1 lies below node 2"),
        (lambda root: tree([(root + 1) % VOCAB, 1], [-1, 0], 1), "not the root"),
        (lambda root: tree([root, 1, 2], [-1, 0, 1], 1), "is 2 deep and has 3 nodes, and 1 was said"),
        (lambda root: tree([root, 1, 1], [-1, 0, 0], 1), "the same token as its sibling"),
        (lambda root: tree([root], [-1], 3), "is 0 deep and has 1 nodes, and 3 was said"),
        (lambda root: tree([root, 1], [-1, 0], 1, size=3), "said to have 3 nodes, of 2"),
        (lambda root: tree([root, 1], [-1, 0], 1, size=0), "said to have 0 nodes, of 2"),
    ],
)
def test_what_is_no_tree_is_not_decoded_with(target, proposed, message):
    class Odd(Useless):
        def propose(self, roots_B):
            return proposed(int(roots_B[0]))

    lm = SpeculativeLM.from_pretrained(target, drafter=Odd())
    with pytest.warns(UserWarning, match=message):
        assert torch.equal(written(lm, 20).sequences, plainly(target, 20))


@pytest.mark.filterwarnings("error")
def test_padding_may_repeat_a_token(target):
    class Ragged(Useless):
        def propose(self, roots_B):
            return tree([int(roots_B[0]), 1, 1], [-1, 0, 0], 1, size=2)

    lm = SpeculativeLM.from_pretrained(target, drafter=Ragged())
    assert torch.equal(written(lm, 20).sequences, plainly(target, 20))
