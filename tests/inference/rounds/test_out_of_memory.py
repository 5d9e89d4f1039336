"""A generation that runs out of memory: smaller trees, then none, and the same text."""

from __future__ import annotations

import warnings

import pytest
import torch
from helpers import head_for, limited
from messages import warned

from headstart.inference import Conversation, SpeculativeLM

PROMPTS = torch.arange(3, 15).reshape(2, 6)
# Nodes, and those that are left with a limit of 1, 2 and 3.
TREES = {
    "chain:3": (4, 1, 2, 2),
    "branch:2x2x1": (11, 1, 2, 2),
    "dynamic:12:3:4": (12, 1, 1, 3),
    "independent:branch:2": (3, 1, 1, 3),
}


@pytest.mark.parametrize(
    ("tree", "nodes", "adaptive"),
    [
        *((tree, nodes, False) for tree in TREES for nodes in (1, 2, 3)),
        *((tree, 2, True) for tree in TREES),
    ],
)
def test_smaller_trees_give_the_same_text(tiny_target, monkeypatch, tree, nodes, adaptive):
    target = tiny_target(vocab_size=40)
    lm = SpeculativeLM.from_pretrained(
        target, head=head_for(target, "eagle"), tree=tree, adaptive=adaptive
    )
    expected = SpeculativeLM(target).generate(PROMPTS, max_new_tokens=20, do_sample=False).sequences
    sizes = limited(monkeypatch, lm, nodes)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = lm.generate(PROMPTS, max_new_tokens=20, do_sample=False)
    if not adaptive:  # else drafts may never be tried
        assert bool(told) == (TREES[tree][0] > nodes)
    assert torch.equal(found.sequences, expected)
    failed = [size for size in sizes if size > nodes]
    assert failed == sorted(set(failed), reverse=True)  # no size is tried a second time
    assert found.stats.tokens == 2 * 19
    records = [record for row in found.stats.rows for record in row]
    if not adaptive:
        assert set(sizes) - set(failed) == {TREES[tree][nodes]}
        assert all(
            record.fallback == ("out_of_memory" if TREES[tree][nodes] == 1 else "")
            for record in records
        )


def test_rows_that_wait_and_a_conversation_go_on(tiny_target, monkeypatch):
    target = tiny_target(vocab_size=40)
    lm = SpeculativeLM.from_pretrained(
        target, head=head_for(target, "eagle"), tree="chain:3", adaptive=False
    )
    expected = lm.generate(PROMPTS, max_new_tokens=20, do_sample=False).sequences
    sizes, past = limited(monkeypatch, lm, 2), Conversation()
    with warned("memory"):
        found = lm.generate(PROMPTS, max_new_tokens=20, do_sample=False, max_batch_size=1).sequences
    assert torch.equal(found, expected)
    with warned("memory"):
        lm.generate(PROMPTS[:1], max_new_tokens=8, do_sample=False, past_key_values=past)
    monkeypatch.undo()
    longer = lm.generate(
        expected[:1, :16], max_new_tokens=10, do_sample=False, past_key_values=past
    ).sequences
    assert torch.equal(longer, expected[:1])
    assert max(sizes) == 4


def failing(monkeypatch, owner, name, *numbers):
    """Make some calls of a method run out of memory; returns a list with an entry for each call."""
    calls, original = [], getattr(owner, name)

    def fails(self, *arguments):
        calls.append(1)
        if len(calls) in numbers:
            raise torch.OutOfMemoryError("simulated")
        return original(self, *arguments)

    monkeypatch.setattr(owner, name, fails)
    return calls


def test_a_draft_that_fails_midway_and_an_error_that_plain_decoding_has(tiny_target, monkeypatch):
    target = tiny_target(vocab_size=40)
    head = head_for(target, "eagle")
    lm = SpeculativeLM.from_pretrained(target, head=head, tree="chain:3", adaptive=False)
    expected = lm.generate(PROMPTS, max_new_tokens=20, do_sample=False).sequences
    failing(monkeypatch, type(head), "expand", 5, 9)
    with warned("memory"):
        assert torch.equal(
            lm.generate(PROMPTS, max_new_tokens=20, do_sample=False).sequences, expected
        )
    limited(monkeypatch, lm, 0)
    with pytest.raises(torch.OutOfMemoryError), warned("memory"):
        lm.generate(PROMPTS, max_new_tokens=20, do_sample=False)


@pytest.mark.parametrize("tree", ["drawn:chain:3", "independent:branch:2x2", "drawn:branch:2x2"])
def test_a_sampled_draft_that_fails_midway_is_not_cut_but_dropped(tiny_target, monkeypatch, tree):
    """A part of a sampled tree would have another distribution."""
    target = tiny_target(vocab_size=40)
    head = head_for(target, "eagle")
    lm = SpeculativeLM.from_pretrained(target, head=head, tree=tree, adaptive=False)
    calls = failing(monkeypatch, type(head), "expand", 5)
    with warned("memory 1"):
        stats = lm.generate(PROMPTS, max_new_tokens=20, do_sample=True).stats
    assert stats.rows[0][-1].fallback == "out_of_memory" and len(calls) == 5


def test_what_fails_behind_the_commit_is_raised(tiny_target, monkeypatch):
    target = tiny_target(vocab_size=40)
    head = head_for(target, "eagle")
    lm = SpeculativeLM.from_pretrained(target, head=head, tree="chain:3", adaptive=False)
    calls = failing(monkeypatch, type(head), "observe", 5)
    with pytest.raises(torch.OutOfMemoryError):
        lm.generate(PROMPTS, max_new_tokens=20, do_sample=False)
    assert len(calls) == 5


def test_a_cache_that_could_not_grow_is_as_before(tiny_target, monkeypatch):
    cache = tiny_target().engine.new_cache(1, 10, 1)
    cache.ensure_capacity(10)

    def fails(*_):
        raise torch.OutOfMemoryError("simulated")

    monkeypatch.setattr(cache.pool, "take", fails)
    with pytest.raises(torch.OutOfMemoryError):
        cache.ensure_capacity(600)
    monkeypatch.undo()
    cache.ensure_capacity(600)
    assert cache.blocks[0].shape[3] > 600
