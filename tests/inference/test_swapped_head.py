"""A head that takes another's place between two generations."""

from __future__ import annotations

import threading

import pytest
import torch

from headstart.heads import build_head
from headstart.inference import Conversation, SpeculativeLM, Target


@pytest.fixture(scope="module")
def target():
    from helpers import build_model

    return Target(build_model().requires_grad_(False))


def head_of(target, kind, seed, **options):
    torch.manual_seed(seed)
    head = build_head(kind, options, target.info).to(target.dtype)
    head.initialize(target.modules, torch.ones(target.info.vocab_size, dtype=torch.int64))
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return head.eval()


def decoder(target, head, tree="chain:2", **options):
    tree = "auto" if "drafter" in options and head is None else tree
    return SpeculativeLM.from_pretrained(target, head, tree=tree, fallback=False, **options)


PROMPT = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
GREEDY = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": [], "pad_token_id": 0}


@pytest.mark.parametrize("drafter", [None, "prompt-lookup"])
def test_the_next_generation_drafts_with_the_new_head(target, drafter):
    old, new = head_of(target, "medusa", 1), head_of(target, "eagle3", 2, feature_layers=[0, -1])
    lm = decoder(target, old, drafter=drafter)
    expected = [decoder(target, head, drafter=drafter).generate(PROMPT, **GREEDY) for head in (old, new)]
    first = lm.generate(PROMPT, **GREEDY)
    lm.generate(PROMPT, **GREEDY, tree="chain:1")
    assert lm.swap_head(new) is old
    second = lm.generate(PROMPT, **GREEDY)
    third = lm.generate(PROMPT, **GREEDY, tree="chain:1")
    assert lm.swap_head(old) is new
    fourth = lm.generate(PROMPT, **GREEDY)
    for found, wanted in zip((first, second, fourth), (expected[0], expected[1], expected[0]), strict=True):
        assert torch.equal(found.sequences, wanted.sequences)
        assert found.stats.rows == wanted.stats.rows
    other = decoder(target, new, "chain:1", drafter=drafter)
    assert third.stats.rows == other.generate(PROMPT, **GREEDY).stats.rows, "trees of single calls are made anew"


def test_a_conversation_goes_on_with_the_new_head(target):
    texts = []
    for swaps in (False, True):
        lm = decoder(target, head_of(target, "eagle", 1))
        past, text_1T = Conversation(), PROMPT
        for turn in range(3):
            text_1T = torch.cat([lm.generate(text_1T, past_key_values=past, **GREEDY).sequences, PROMPT[:, :2]], dim=1)
            if swaps:
                lm.swap_head(head_of(target, "medusa" if turn else "eagle", 5 + turn))
        texts.append(text_1T.tolist())
    assert texts[0] == texts[1]


def test_it_waits_for_a_running_generation_and_is_refused_inside_one(target):
    old, new = head_of(target, "medusa", 1), head_of(target, "medusa", 2)
    lm = decoder(target, old)
    expected = lm.generate(PROMPT, **GREEDY)
    began, may_go_on = threading.Event(), threading.Event()
    found, told = [], []

    def pause(sequences):
        if not began.is_set():
            with pytest.raises(ValueError, match="swap_head was called inside a generation with the same target"):
                lm.swap_head(new)
            began.set()
            may_go_on.wait(60)

    lm.round_callbacks.append(pause)
    running = threading.Thread(target=lambda: found.append(lm.generate(PROMPT, **GREEDY)))
    running.start()
    assert began.wait(60)
    swapping = threading.Thread(target=lambda: told.append(lm.swap_head(new)))
    swapping.start()
    swapping.join(0.3)
    assert told == [], "the generation has not ended"
    may_go_on.set()
    running.join()
    swapping.join()
    assert told == [old]
    assert found[0].stats.rows == expected.stats.rows


def test_what_does_not_fit_is_refused_and_changes_nothing(target, tools, tmp_path):
    old = head_of(target, "medusa", 1)
    lm = decoder(target, old)
    expected = lm.generate(PROMPT, **GREEDY)
    wider = Target(tools.build_model(vocab_size=300).requires_grad_(False))
    with pytest.raises(ValueError, match="vocab size 300"):
        lm.swap_head(head_of(wider, "medusa", 1))
    with pytest.raises(ValueError, match="no head"):
        lm.swap_head(tmp_path)
    with pytest.raises(ValueError, match="convert the head"):
        lm.swap_head(head_of(target, "medusa", 1).float())
    assert lm.generate(PROMPT, **GREEDY).stats.rows == expected.stats.rows
    with pytest.raises(ValueError, match="swap_head needs a decoder with a head"):
        decoder(target, None, drafter="prompt-lookup").swap_head(old)
