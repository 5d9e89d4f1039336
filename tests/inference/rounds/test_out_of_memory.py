"""A generation that runs out of memory: smaller trees, then none, and the same text."""

from __future__ import annotations

import pytest
import torch
from helpers import check_identity, continued, head_for, limited, warnings_of, written_alone
from messages import warned

from headstart.inference import Conversation, SpeculativeLM

PROMPTS = [torch.arange(3, 9), torch.arange(9, 15)]
# Nodes, and those that are left with a limit of 1, 2 and 3.
TREES = {
    "chain:3": (4, 1, 2, 2),
    "branch:2x2x1": (11, 1, 2, 2),
    "dynamic:12:3:4": (12, 1, 1, 3),
    "independent:branch:2": (3, 1, 1, 3),
}


@pytest.fixture
def eagle_head(target):
    return head_for(target, "eagle")


@pytest.fixture
def chain_lm(target, eagle_head):
    return SpeculativeLM.from_pretrained(target, eagle_head, tree="chain:3", adaptive=False)


@pytest.mark.parametrize(
    ("tree", "nodes", "adaptive"),
    [
        *((tree, nodes, False) for tree in TREES for nodes in (1, 2, 3)),
        *((tree, 2, True) for tree in TREES),
    ],
)
def test_smaller_trees_give_the_same_text(target, eagle_head, monkeypatch, tree, nodes, adaptive):
    whole, *left = TREES[tree]
    lm = SpeculativeLM.from_pretrained(target, eagle_head, tree=tree, adaptive=adaptive)
    sizes = limited(monkeypatch, lm, nodes)
    outputs = []
    told = warnings_of(lambda: outputs.append(continued(lm, PROMPTS)))
    [(texts, output)] = outputs
    monkeypatch.undo()
    assert texts == [written_alone(target.model, prompt) for prompt in PROMPTS]
    failed = [size for size in sizes if size > nodes]
    assert failed == sorted(set(failed), reverse=True)  # no size is tried a second time
    assert output.stats.tokens == 2 * 19
    if adaptive:  # drafts may never be tried
        return
    assert bool(told) == (whole > nodes)
    assert set(sizes) - set(failed) == {left[nodes - 1]}
    fallbacks = {record.fallback for row in output.stats.rows for record in row}
    assert fallbacks == {"out_of_memory" if left[nodes - 1] == 1 else ""}


def test_rows_that_wait_and_a_conversation_go_on(target, chain_lm, monkeypatch):
    sizes = limited(monkeypatch, chain_lm, 2)
    past = Conversation()
    with warned("memory"):
        check_identity(chain_lm, PROMPTS, max_batch_size=1)
    with warned("memory"):
        output = check_identity(chain_lm, PROMPTS[:1], past_key_values=past)
    monkeypatch.undo()
    check_identity(chain_lm, [output.sequences[0]], past_key_values=past)
    assert max(sizes) == 4


def failing(monkeypatch, owner, name, *numbers):
    """Make some calls of a method run out of memory; returns a list with an entry for each call."""
    calls = []
    original = getattr(owner, name)

    def fails(self, *arguments):
        calls.append(1)
        if len(calls) in numbers:
            raise torch.OutOfMemoryError("simulated")
        return original(self, *arguments)

    monkeypatch.setattr(owner, name, fails)
    return calls


def test_a_draft_that_fails_midway_is_made_smaller(eagle_head, chain_lm, monkeypatch):
    failing(monkeypatch, type(eagle_head), "expand", 5, 9)
    with warned("memory"):
        check_identity(chain_lm, PROMPTS)


def test_an_error_that_plain_decoding_has_is_raised(chain_lm, monkeypatch):
    limited(monkeypatch, chain_lm, 0)
    with pytest.raises(torch.OutOfMemoryError), warned("memory"):
        continued(chain_lm, PROMPTS)


@pytest.mark.parametrize("tree", ["drawn:chain:3", "independent:branch:2x2", "drawn:branch:2x2"])
def test_a_sampled_draft_that_fails_midway_is_not_cut_but_dropped(
    target, eagle_head, monkeypatch, tree
):
    """A part of a sampled tree would have another distribution."""
    lm = SpeculativeLM.from_pretrained(target, eagle_head, tree=tree, adaptive=False)
    calls = failing(monkeypatch, type(eagle_head), "expand", 5)
    with warned("memory 1"):
        _, output = continued(lm, PROMPTS, do_sample=True)
    assert output.stats.rows[0][-1].fallback == "out_of_memory" and len(calls) == 5


def test_what_fails_behind_the_commit_is_raised(eagle_head, chain_lm, monkeypatch):
    calls = failing(monkeypatch, type(eagle_head), "observe", 5)
    with pytest.raises(torch.OutOfMemoryError):
        continued(chain_lm, PROMPTS)
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
