"""A history: it finds what a search finds, learns what its matches are worth, and takes turns with
other drafts by that."""

from __future__ import annotations

import os
import pickle
import random
import sys

import pytest
import torch
from helpers import calls_of, check_identity, generated, written_alone
from messages import refused

from headstart.inference import History, SpeculativeLM
from headstart.inference.drafters import history, text_index
from headstart.inference.drafters.adaptive import AdaptiveDrafter
from headstart.inference.drafters.by_name import make_drafter
from headstart.inference.drafters.history import FREE, Found, HistoryDrafter, Rates, best_tree
from headstart.inference.drafters.next_step import Choice
from headstart.inference.drafters.text_index import CONTINUATIONS, LONGEST, Match, TextIndex
from headstart.inference.tuning.round_costs import RoundCosts

VOCAB = 20
PROMPT = torch.tensor([[4, 8, 15, 16, 2, 3]])


def searched(tokens, tail, length, capacity):
    """The longest match and its continuations, by looking everywhere, the newest first."""
    oldest = max(len(tokens) - capacity, 0)
    longest, found = 0, []
    for position in range(len(tokens) - 2, oldest - 1, -1):
        common = 0
        while (
            common < len(tail)
            and position - common >= oldest
            and tokens[position - common] == tail[-1 - common]
        ):
            common += 1
        if common < 2 or common < longest or tokens[position + 1] == -1:
            continue
        after = tokens[position + 1 : position + 1 + length]
        after = after[: after.index(-1)] if -1 in after else after
        found = [*found, after] if common == longest else [after]
        longest = common
    return Match(longest, found[:CONTINUATIONS])


@pytest.mark.parametrize("many", [1, 4, 1000])
@pytest.mark.parametrize("capacity", [7, 40, 500])
def test_an_index_finds_what_a_search_finds(monkeypatch, many, capacity):
    """However the tokens came, and whatever of them the ring still has."""
    monkeypatch.setattr(text_index, "MANY", many)  # added one by one, or all at once
    monkeypatch.setattr(text_index, "VISITED", 1000)
    chance = random.Random(capacity)
    for _ in range(40):
        index, tokens = TextIndex(capacity), []
        while len(tokens) < 90:
            new = [chance.choice([*range(9), -1]) for _ in range(chance.randrange(1, 12))]
            index.add(new)
            tokens += new
        assert index.last(500) == tokens[-capacity:]
        tail = index.last(min(LONGEST, capacity))
        tail = tail[len(tail) - ([*reversed(tail), -1].index(-1)) :]
        found = index.search(tail, 5)
        expected = searched(tokens, tail, 5, capacity)
        # Four tokens or more are searched first, then two or three.
        assert found == expected


def test_rates_are_the_shares_that_were_foretold():
    rates = Rates()
    assert rates.of(2) < rates.of(3) < rates.of(LONGEST) < 1
    match = Match(3, [[5, 6, 7], [5, 8]])
    before = rates.of(6)
    for _ in range(2000):
        rates.learn(match, [5, 8])  # the second continuation to its end: nothing is known of more
        rates.learn(match, [5, 9])
    assert rates.of(3) > 0.95
    assert rates.of(4) == pytest.approx(0.5, abs=0.05)
    assert rates.of(6) == before
    assert rates.most(match, 1) == pytest.approx(1 + rates.of(3))


def best_tree_of(match, size=8, costs=FREE, path_only=False, rates=None):
    found = Found(match, rates or Rates())
    trie, tokens = best_tree(9, found, size, costs, 1, path_only)
    return trie.tokens, trie.parents, tokens


def test_the_nodes_that_most_continuations_share_are_drafted():
    match = Match(LONGEST, [[1, 2, 3], [4, 5], [4, 6], [4, 5]])
    tokens, _, expected = best_tree_of(match)
    assert sorted(tokens) == [1, 2, 3, 4, 5, 6, 9]
    # 4 has three of four continuations, 5 two of three of those
    rate = Rates().of(LONGEST)
    assert expected == pytest.approx(
        1 + rate + rate**2 * (2 / 4 + 1 / 4 + 1 / 4) + rate**3 * (1 / 4)
    )
    assert best_tree_of(match, size=3)[:2] == ([9, 4, 5], [-1, 0, 1])
    assert best_tree_of(match, path_only=True)[:2] == ([9, 4, 5], [-1, 0, 1])


def test_no_more_nodes_are_drafted_than_pay():
    steep = RoundCosts({1: 1.0, 2: 1.3}, draft=0.0)
    path = Match(4, [[1, 2, 3, 4, 5, 6]])
    assert len(best_tree_of(path)[0]) == 7
    assert 1 < len(best_tree_of(path, costs=steep)[0]) < 7
    hopeless = RoundCosts({1: 1.0, 2: 3.0}, draft=0.0)
    assert best_tree_of(path, costs=hopeless)[2] < 1


def test_earlier_answers_are_drafted_and_an_option_keeps_them_apart(target):
    truth = generated(SpeculativeLM(target), PROMPT, max_new_tokens=40).sequences
    rounds = {}
    for earlier in (True, False):
        source = History(earlier=earlier)
        lm = SpeculativeLM.from_pretrained(target, drafter=source, adaptive=False)
        outputs = [generated(lm, PROMPT, max_new_tokens=40) for _ in range(2)]
        assert all(torch.equal(output.sequences, truth) for output in outputs)
        rounds[earlier] = [output.stats.rounds for output in outputs]
    assert rounds[True][1] < rounds[True][0] / 2
    assert rounds[False][0] == rounds[False][1] == rounds[True][0]


def test_no_text_leaves_the_process(target, medusa_head):
    """No file is opened for writing and nothing is sent while answers are given and searched."""
    lm = SpeculativeLM.from_pretrained(target, medusa_head)
    generated(
        lm, PROMPT, max_new_tokens=20
    )  # imports what is imported late, whose bytecode is written
    watching = True
    noted = []

    def hook(event, arguments):  # cannot be removed again, only told to do nothing
        if not watching:
            return
        writes = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if writes or event in ("socket.connect", "socket.sendto"):
            noted.append((event, arguments))

    sys.addaudithook(hook)
    for _ in range(2):
        generated(lm, PROMPT, max_new_tokens=20)
    watching = False
    assert lm.drafter.earlier.end > 40
    assert not noted


def test_large_batches_are_not_searched(target, monkeypatch):
    lm = SpeculativeLM.from_pretrained(target, drafter=History(earlier=False), adaptive=False)
    rows = torch.tensor([[1, 2, 1, 2, 1]] * 3)
    few = generated(lm, rows, max_new_tokens=30)
    monkeypatch.setattr(history, "MOST_ROWS", 2)
    many = generated(lm, rows, max_new_tokens=30)
    assert torch.equal(few.sequences, many.sequences)
    assert few.stats.acceptance_length > 1 == many.stats.acceptance_length


def test_a_lossy_rule_sees_no_earlier_answers(target, medusa_head):
    """There drafts may change the text."""
    lm = SpeculativeLM.from_pretrained(target, medusa_head, acceptance="typical", lossy=True)
    assert lm.drafter.earlier is None
    assert SpeculativeLM.from_pretrained(target, medusa_head).drafter.earlier is not None


def test_trees_of_single_calls_search_the_same_answers(target, medusa_head):
    lm = SpeculativeLM.from_pretrained(target, medusa_head)
    for tree in ("chain:2", "chain:1", "chain:2", None):
        generated(lm, PROMPT, tree=tree, max_new_tokens=10)
    assert lm.drafter.earlier.end > 10
    end = lm.drafter.earlier.end
    lm.warmup()  # of which nothing is remembered
    assert lm.drafter.earlier.end in (0, end)


def test_memory_does_not_grow_with_answers():
    earlier = TextIndex(1000)
    earlier.add([1])
    size = len(pickle.dumps(earlier))
    chance = random.Random(0)
    for _ in range(10_000):
        earlier.add([chance.randrange(50) for _ in range(9)] + [-1])
    assert earlier.end == 1 + 10_000 * 10
    assert len(pickle.dumps(earlier)) < size + 20
    assert len(earlier.last(10**6)) == 1000


def test_each_row_of_a_batch_is_drafted_for_by_whoever_expects_more(target):
    """The other drafter is always right by three tokens; one row's answer was given before, and
    the history drafts four of its tokens."""
    chance = random.Random(2)
    rows = [
        torch.tensor([5, 6, 7]),
        torch.tensor([chance.randrange(VOCAB) for _ in range(LONGEST)]),
    ]
    settings = {"max_new_tokens": 41, "eos_token_id": [], "pad_token_id": 0}
    truth = written_alone(target.model, rows[1], do_sample=False, **settings)
    other = make_drafter(target, target, "chain:3")
    lm = SpeculativeLM(target, HistoryDrafter(nodes=5, earlier=TextIndex(500), other=other))
    for length in range(LONGEST + 1):  # nothing is expected of a row's own text
        for _ in range(100):
            lm.drafter.rates[0].learn(Match(length, [[0]]), [1])
    lm.drafter.earlier.add([*rows[1].tolist(), *truth, -1])
    output = check_identity(lm, rows, **settings)
    unknown, known = [[record.returned for record in row] for row in output.stats.rows]
    assert unknown == [4] * 10
    assert known == [4] + [5] * 7 + [1]


def test_a_round_of_the_history_is_not_timed_as_one_of_the_others(target, monkeypatch):
    """Not even where the other drafter had proposed a step ahead."""
    answer = generated(SpeculativeLM(target), PROMPT, max_new_tokens=40).sequences[0].tolist()
    other = AdaptiveDrafter([make_drafter(target, target, "chain:3")])
    ours = HistoryDrafter(earlier=TextIndex(500), other=other)
    ours.earlier.add([*answer, -1])
    asked = calls_of(monkeypatch, other, "propose")
    propose = ours.propose
    choices = []

    def after_one_ahead(roots_B):
        asked.clear()
        other.choice = Choice(0)
        tree = propose(roots_B)
        if not asked:  # the tree is the history's alone
            choices.append(other.choice)
        return tree

    monkeypatch.setattr(ours, "propose", after_one_ahead)
    generated(SpeculativeLM(target, ours), PROMPT, max_new_tokens=40)
    assert choices and set(choices) == {None}


def noted_drafts(chain, text_length):
    """The chains that a drafter proposes from now on, each with the text's length."""
    drafts = []
    propose = chain.propose

    def noted(roots_B):
        tree = propose(roots_B)
        drafts.append((text_length(), tree.tokens_BN[0].tolist()))
        return tree

    chain.propose = noted
    return drafts


@pytest.mark.parametrize("lazy", [True, False])
def test_a_head_reads_what_a_history_wrote(target, medusa_head, lazy):
    """Its drafts afterwards are those that it makes after the same text read as a prompt."""
    settings = {"no_repeat_ngram_size": 2}  # so that the text does not go round in circles
    options = {"tree": "chain:3", "adaptive": False}
    lm = SpeculativeLM.from_pretrained(target, medusa_head, drafter="history:4:3", **options)
    lm.drafter.other.model_state.lazy = lazy
    text = generated(lm, PROMPT, max_new_tokens=60, **settings).sequences
    assert len(set(text[0, 26:].tolist())) > 5
    # The history knows how the answer begins, and drafts before the head has read the prompt.
    lm.drafter.forget()
    lm.drafter.earlier.add([*text[0, :26].tolist(), -1])
    drafts = noted_drafts(lm.drafter.other, lambda: lm.drafter.rows[0].text.end)
    assert torch.equal(generated(lm, PROMPT, max_new_tokens=60, **settings).sequences, text)
    assert drafts[0][0] > 20 and len(drafts) > 2
    alone = SpeculativeLM.from_pretrained(target, medusa_head, **options)
    expected = noted_drafts(alone.drafter, lambda: None)
    for length, tokens in drafts:
        expected.clear()
        # The prompt's last token is chosen by the target: one before the root.
        generated(alone, text[:, : length - 1], max_new_tokens=3, **settings)
        assert expected[0] == (None, tokens)


def test_what_does_not_fit_is_refused(target, medusa_head):
    with refused("2 nodes"):
        HistoryDrafter(nodes=1)
    with refused("top-k"):
        HistoryDrafter(other=make_drafter(target, target, "drawn:chain:2"))
    with refused("history prompt-lookup retrieval"):
        SpeculativeLM.from_pretrained(target, medusa_head, drafter="model:small")
    sampled = SpeculativeLM.from_pretrained(target, medusa_head, tree="drawn:chain:2")
    assert not any(isinstance(part, HistoryDrafter) for part in sampled.drafter.nested())
