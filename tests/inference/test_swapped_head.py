"""A head that takes another's place between two generations."""

from __future__ import annotations

import sys
import threading

import pytest
import torch
from helpers import GREEDY, EachRound, build_model, head_for
from messages import refused

from headstart.inference import Conversation, SpeculativeLM, Target

PROMPT = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
SETTINGS = GREEDY | {"max_new_tokens": 8, "eos_token_id": []}


def noisy_head(target, kind, seed):
    return head_for(target, kind, 0.3, seed=seed)


def swapping_lm(target, head, tree="chain:2", **options):
    return SpeculativeLM.from_pretrained(target, head, tree=tree, adaptive=False, **options)


def answers(lm):
    """The text, and the rounds with the decoder's own tree and with that of a call."""
    output = lm.generate(PROMPT, **SETTINGS)
    for_call = lm.generate(PROMPT, **SETTINGS, tree="chain:1")
    return output.sequences.tolist(), output.stats.rows, for_call.stats.rows


@pytest.mark.parametrize("drafter", [None, "prompt-lookup"])
def test_the_next_generation_drafts_with_the_new_head(target, drafter):
    old = noisy_head(target, "medusa", 1)
    new = noisy_head(target, "eagle3", 3)
    lm = swapping_lm(target, old, drafter=drafter)
    expected = {head: answers(swapping_lm(target, head, drafter=drafter)) for head in (old, new)}
    assert answers(lm) == expected[old] != expected[new]
    for head in (new, old):
        lm.use_head(head)
        assert lm.head is head
        assert answers(lm) == expected[head]


def test_a_conversation_goes_on_with_the_new_head(target):
    texts = []
    for swaps in (False, True):
        lm = swapping_lm(target, noisy_head(target, "eagle", 1))
        past = Conversation()
        text_1T = PROMPT
        for turn in range(3):
            answered = lm.generate(text_1T, past_key_values=past, **SETTINGS).sequences
            text_1T = torch.cat([answered, PROMPT[:, :2]], dim=1)
            if swaps:
                lm.use_head(noisy_head(target, "medusa" if turn else "eagle", 5 + turn))
        texts.append(text_1T.tolist())
    assert texts[0] == texts[1]


def test_it_waits_for_a_running_generation_and_is_refused_inside_one(target):
    old = noisy_head(target, "medusa", 1)
    new = noisy_head(target, "medusa", 3)
    lm = swapping_lm(target, old)
    expected = lm.generate(PROMPT, **SETTINGS)
    began = threading.Event()
    may_go_on = threading.Event()
    outputs = []

    def pause(sequences):
        if not began.is_set():
            with refused("use_head generation"):
                lm.use_head(new)
            began.set()
            may_go_on.wait(60)

    lm.observers.append(EachRound(pause))
    running = threading.Thread(target=lambda: outputs.append(lm.generate(PROMPT, **SETTINGS)))
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
    assert outputs[0].stats.rows == expected.stats.rows


@pytest.mark.parametrize("tree", [None, "chain:1"])
def test_a_call_that_waits_while_the_head_is_swapped_drafts_with_the_new_one(target, tree):
    old = noisy_head(target, "medusa", 1)
    new = noisy_head(target, "medusa", 3)
    lm = swapping_lm(target, old)
    settings = {**SETTINGS, "tree": tree}
    lm.generate(PROMPT, **settings)
    expected = swapping_lm(target, new).generate(PROMPT, **settings)
    outputs = []
    with target.lock:
        waiting = threading.Thread(target=lambda: outputs.append(lm.generate(PROMPT, **settings)))
        waiting.start()
        waiting.join(0.3)
        lm.use_head(new)
        old.requires_grad_(False)
        for parameter in old.parameters():
            parameter.fill_(torch.nan)  # a call that drafted with it would say so
    waiting.join()
    assert outputs[0].stats.rows == expected.stats.rows


def test_what_does_not_fit_is_refused_and_changes_nothing(target, tmp_path):
    old = noisy_head(target, "medusa", 1)
    lm = swapping_lm(target, old)
    expected = answers(lm)
    wider = Target(build_model(vocab_size=300).requires_grad_(False))
    with refused("vocab size 300 20"):
        lm.use_head(noisy_head(wider, "medusa", 1))
    with refused(str(tmp_path)):
        lm.use_head(tmp_path)
    with refused("torch.float32 torch.float64"):
        lm.use_head(noisy_head(target, "medusa", 1).float())
    assert answers(lm) == expected
    lookup = SpeculativeLM.from_pretrained(target, drafter="prompt-lookup")
    with refused("use_head head"):
        lookup.use_head(old)


class Interruption(BaseException):
    """Ctrl-C."""


class Interrupted:
    """A trace function that interrupts `use_head` before its n-th line."""

    def __init__(self, line_number):
        self.left = line_number

    def __call__(self, frame, event, argument):
        if frame.f_code is SpeculativeLM.use_head.__code__ and self.left > 0:
            return self.in_frame
        return None

    def in_frame(self, frame, event, argument):
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise Interruption
        return self.in_frame


def use_head_interrupted(lm, head, line_number):
    """Whether `use_head` has so many lines, before the last of which it was interrupted."""
    before = sys.gettrace()
    sys.settrace(Interrupted(line_number))
    try:
        lm.use_head(head)
    except Interruption:
        return True
    finally:
        sys.settrace(before)
    return False


def test_an_interruption_at_any_line_leaves_one_head_or_the_other(target):
    """Whole: the drafter, its rule, the trees of single calls and what the next swap goes on
    from."""
    old = noisy_head(target, "medusa", 1)
    new = noisy_head(target, "eagle3", 3)
    expected = {head: answers(swapping_lm(target, head)) for head in (old, new)}
    lm = swapping_lm(target, old)
    answers(lm)
    left = []
    while use_head_interrupted(lm, new, len(left) + 1):
        assert answers(lm) == expected[lm.head], f"at line {len(left) + 1}"
        left.append(lm.head)
        lm.use_head(old)
        answers(lm)
    assert left.count(old) > 8 and left[0] is old
