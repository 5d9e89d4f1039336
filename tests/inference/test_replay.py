"""Acceptance over known answers is that of decoding, round by round, and no forward of the target
is spent on it."""

from __future__ import annotations

import pytest
import torch
from helpers import continued, head_for, pairs

from headstart.inference import SpeculativeLM, inputs
from headstart.inference import replay as replay_module
from headstart.inference.replay import BEYOND, ReplayTarget

VOCAB, ANSWER = 12, 24
LENGTHS = (3, 9, 1, 6, 14)
TREES = ("chain:3", "dynamic:8:3:3", [[0], [1], [0, 0], [1, 0], [0, 0, 0]], "stop:0.02:chain:3")
KINDS = ("medusa", "hydra++", "eagle", "eagle3", "dflash", "dspark")


def random_prompts():
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(VOCAB, (length,), generator=generator) for length in LENGTHS]


def answers_with(target, head, tree, texts, **settings):
    lm = SpeculativeLM.from_pretrained(target, head, tree=tree, adaptive=False, compile=False)
    return continued(lm, texts, **{"max_new_tokens": ANSWER} | settings)[1]


def drafting_head(target, kind):
    block = {"mask_token_id": 1, "block_size": 4}
    options = {"dflash": block, "dspark": block, "eagle3": {"feature_layers": [0, -1]}}
    return head_for(target, kind, **options.get(kind, {}))


@pytest.mark.parametrize(("kind", "tree", "max_batch_size"), pairs(KINDS, TREES, [None, 2]))
def test_rounds_are_those_of_decoding(tiny_target, kind, tree, max_batch_size):
    target = tiny_target(vocab_size=VOCAB)
    head, texts = drafting_head(target, kind), random_prompts()
    replay = ReplayTarget(target)
    replay.learn(texts, ANSWER)
    for settings in ({}, {"eos_token_id": [3]}):
        settings |= {"max_batch_size": max_batch_size}
        real = answers_with(target, head, tree, texts, **settings)
        found = answers_with(replay, head, tree, texts, **settings)
        assert torch.equal(found.sequences, real.sequences)
        assert found.stats.rows == real.stats.rows
        assert real.stats.acceptance_length > 1  # or nothing was compared


def test_a_known_answer_takes_no_forward(tiny_target):
    target = tiny_target(vocab_size=VOCAB)
    head, texts = drafting_head(target, "eagle3"), random_prompts()
    replay = ReplayTarget(target)
    replay.learn(texts, ANSWER)
    replay.table(head.feature_layers)
    calls = []
    target.model.register_forward_pre_hook(lambda *_: calls.append(1))
    for tree in TREES[:2]:
        replay.learn(texts[:2], ANSWER)
        answers_with(replay, head, tree, texts)
    assert not calls
    replay.learn([torch.tensor([5, 6])], ANSWER)
    assert calls
    # features of the new text are read, too
    answers_with(replay, head, "chain:3", [*texts, torch.tensor([5, 6])])
    calls.clear()
    replay.learn(texts, ANSWER + BEYOND + 1)
    assert calls  # a longer answer is asked for


def test_an_answer_may_reach_the_last_position(tiny_target):
    target = tiny_target(vocab_size=VOCAB)
    target.max_positions = target.config.max_position_embeddings = 40
    texts = [torch.arange(16) % VOCAB, torch.arange(9) % 7]
    replay, head = ReplayTarget(target), drafting_head(target, "eagle")
    replay.learn(texts, ANSWER)
    found, real = (answers_with(each, head, "dynamic:8:3:3", texts) for each in (replay, target))
    assert torch.equal(found.sequences, real.sequences)
    for ours, theirs in zip(found.stats.rows, real.stats.rows, strict=True):
        assert [record.returned for record in ours] == [record.returned for record in theirs]


def test_prompts_are_answered_as_many_at_once_as_tokens_and_memory_allow(tiny_target, monkeypatch):
    target = tiny_target(vocab_size=VOCAB)
    texts = [*random_prompts(), torch.tensor([5, 6]), torch.tensor([7, 7, 7])]
    whole = ReplayTarget(target)
    whole.learn(texts, ANSWER)
    rows = []
    target.model.register_forward_pre_hook(
        lambda _, args, given: rows.append(len(given["input_ids"])), with_kwargs=True
    )

    def learned():
        rows.clear()
        replay = ReplayTarget(target)
        replay.learn(texts, ANSWER)
        for prompt, text in whole.texts.items():
            assert torch.equal(replay.texts[prompt], text)
        assert not target.pool.blocks  # no cache is left on the device
        return max(rows)

    assert learned() == len(texts)
    longest = max(LENGTHS) + ANSWER + BEYOND + 1
    with monkeypatch.context() as patch:
        patch.setattr(replay_module, "TOKENS_AT_ONCE", 3 * longest + 1)
        assert learned() == 3
    # Room for two rows and a half, of which half may be taken.
    row = target.cache_bytes(1, target.engine.cache_slots(longest))
    with monkeypatch.context() as patch:
        for module in (replay_module, inputs):
            patch.setattr(module, "free_memory", lambda device: 5 * row)
        assert learned() == 2


def test_a_replayed_row_takes_the_memory_of_its_tokens(tiny_target):
    target = tiny_target(vocab_size=VOCAB)
    replay = ReplayTarget(target)
    assert replay.cache_bytes(3, 100) == 2 * 3 * 100 * 8 < target.cache_bytes(3, 100)
    replay.learn(random_prompts(), ANSWER)
    _, features = replay.table((0, -1))
    assert features.device.type == "cpu"
