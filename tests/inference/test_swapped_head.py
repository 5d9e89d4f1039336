"""A head that takes another's place between two generations."""

from __future__ import annotations

import sys
import threading

import pytest
import torch
from helpers import EachRound, build_model, head_for

from headstart.inference import Conversation, SpeculativeLM, Target


@pytest.fixture(scope="module")
def target():
    return Target(build_model().requires_grad_(False))


def head_of(target, kind, seed):
    return head_for(target, kind, 0.3, seed=seed)


def decoder(target, head, tree="chain:2", **options):
    tree = "auto" if "drafter" in options and head is None else tree
    return SpeculativeLM.from_pretrained(target, head, tree=tree, adaptive=False, **options)


PROMPT = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
GREEDY = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": [], "pad_token_id": 0}


@pytest.mark.parametrize("drafter", [None, "prompt-lookup"])
def test_the_next_generation_drafts_with_the_new_head(target, drafter):
    old, new = head_of(target, "medusa", 1), head_of(target, "eagle3", 2)
    lm = decoder(target, old, drafter=drafter)
    expected = [
        decoder(target, head, drafter=drafter).generate(PROMPT, **GREEDY) for head in (old, new)
    ]
    first = lm.generate(PROMPT, **GREEDY)
    lm.generate(PROMPT, **GREEDY, tree="chain:1")
    lm.use_head(new)
    assert lm.head is new
    second = lm.generate(PROMPT, **GREEDY)
    third = lm.generate(PROMPT, **GREEDY, tree="chain:1")
    lm.use_head(old)
    assert lm.head is old
    fourth = lm.generate(PROMPT, **GREEDY)
    for found, wanted in zip(
        (first, second, fourth), (expected[0], expected[1], expected[0]), strict=True
    ):
        assert torch.equal(found.sequences, wanted.sequences)
        assert found.stats.rows == wanted.stats.rows
    other = decoder(target, new, "chain:1", drafter=drafter)
    assert third.stats.rows == other.generate(PROMPT, **GREEDY).stats.rows, (
        "trees of single calls are made anew"
    )


def test_a_conversation_goes_on_with_the_new_head(target):
    texts = []
    for swaps in (False, True):
        lm = decoder(target, head_of(target, "eagle", 1))
        past, text_1T = Conversation(), PROMPT
        for turn in range(3):
            text_1T = torch.cat(
                [lm.generate(text_1T, past_key_values=past, **GREEDY).sequences, PROMPT[:, :2]],
                dim=1,
            )
            if swaps:
                lm.use_head(head_of(target, "medusa" if turn else "eagle", 5 + turn))
        texts.append(text_1T.tolist())
    assert texts[0] == texts[1]


def test_it_waits_for_a_running_generation_and_is_refused_inside_one(target):
    old, new = head_of(target, "medusa", 1), head_of(target, "medusa", 2)
    lm = decoder(target, old)
    expected = lm.generate(PROMPT, **GREEDY)
    began, may_go_on = threading.Event(), threading.Event()
    found = []

    def pause(sequences):
        if not began.is_set():
            with pytest.raises(
                ValueError, match="use_head was called inside a generation with the same target"
            ):
                lm.use_head(new)
            began.set()
            may_go_on.wait(60)

    lm.observers.append(EachRound(pause))
    running = threading.Thread(target=lambda: found.append(lm.generate(PROMPT, **GREEDY)))
    running.start()
    assert began.wait(60)
    swapping = threading.Thread(target=lm.use_head, args=(new,))
    swapping.start()
    swapping.join(0.3)
    assert lm.head is old, "the generation has not ended"
    may_go_on.set()
    running.join()
    swapping.join()
    assert lm.head is new
    assert found[0].stats.rows == expected.stats.rows


@pytest.mark.parametrize("tree", [None, "chain:1"])
def test_a_call_that_waits_while_the_head_is_swapped_drafts_with_the_new_one(target, tree):
    old, new = head_of(target, "medusa", 1), head_of(target, "medusa", 2)
    lm = decoder(target, old)
    lm.generate(PROMPT, **GREEDY, tree=tree)
    expected = decoder(target, new).generate(PROMPT, **GREEDY, tree=tree)
    found = []
    with target.lock:
        waiting = threading.Thread(
            target=lambda: found.append(lm.generate(PROMPT, **GREEDY, tree=tree))
        )
        waiting.start()
        waiting.join(0.3)
        lm.use_head(new)
        old.requires_grad_(False)
        for parameter in old.parameters():
            parameter.fill_(torch.nan)  # a call that drafted with it would say so
    waiting.join()
    assert found[0].stats.rows == expected.stats.rows


def test_what_does_not_fit_is_refused_and_changes_nothing(target, tmp_path):
    old = head_of(target, "medusa", 1)
    lm = decoder(target, old)
    expected = lm.generate(PROMPT, **GREEDY)
    wider = Target(build_model(vocab_size=300).requires_grad_(False))
    with pytest.raises(ValueError, match="vocab size 300"):
        lm.use_head(head_of(wider, "medusa", 1))
    with pytest.raises(ValueError, match="no head"):
        lm.use_head(tmp_path)
    with pytest.raises(ValueError, match="convert the head"):
        lm.use_head(head_of(target, "medusa", 1).float())
    assert lm.generate(PROMPT, **GREEDY).stats.rows == expected.stats.rows
    with pytest.raises(ValueError, match="use_head needs a decoder with a head"):
        decoder(target, None, drafter="prompt-lookup").use_head(old)


class Interruption(BaseException):
    """Ctrl-C."""


def interrupted_at(line_number):
    """A trace function that interrupts `use_head` before its n-th line; `reached` says whether it
    came so far."""
    state = {"lines": 0, "reached": False}

    def in_frame(frame, event, argument):
        if event == "line":
            state["lines"] += 1
            if state["lines"] == line_number:
                state["reached"] = True
                raise Interruption
        return in_frame

    def trace(frame, event, argument):
        if frame.f_code is SpeculativeLM.use_head.__code__ and not state["reached"]:
            return in_frame
        return None

    return trace, state


def test_an_interruption_at_any_line_leaves_one_head_or_the_other(target):
    """Whole: the drafter, its rule, the trees of single calls and what the next swap goes on
    from."""
    old, new = head_of(target, "medusa", 1), head_of(target, "eagle", 2)
    expected = {}
    for head in (old, new):
        lm = decoder(target, head)
        calls = [lm.generate(PROMPT, **GREEDY), lm.generate(PROMPT, **GREEDY, tree="chain:1")]
        expected[head] = [call.stats.rows for call in calls]
    lm = decoder(target, old)
    number = 0
    kept = []
    while True:
        number += 1
        lm.use_head(old)
        lm.generate(PROMPT, **GREEDY, tree="chain:1")
        trace, state = interrupted_at(number)
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            lm.use_head(new)
        except Interruption:
            pass
        finally:
            sys.settrace(before)
        if not state["reached"]:
            break
        head = lm.head
        calls = [lm.generate(PROMPT, **GREEDY), lm.generate(PROMPT, **GREEDY, tree="chain:1")]
        assert [call.stats.rows for call in calls] == expected[head], f"at line {number}"
        kept.append(head)
    assert kept.count(old) > 8 and kept[0] is old
