"""A seeded text is a function of the target and the seed: neither drafts nor the batch's order change it."""

from __future__ import annotations

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from headstart.inference import SpeculativeLM, TreeShape
from headstart.inference.drafters import draft_model, drafter_from

VOCAB, NEW = 20, 24
ROWS = [torch.tensor(row) for row in ([1, 2, 3], [4, 5, 6, 7, 8], [9])]
SETTINGS = {"max_new_tokens": NEW, "do_sample": True, "temperature": 0.8, "top_k": 7, "pad_token_id": 0}
NO_ENDS = {"eos_token_id": None}
ENDS = {"eos_token_id": [3, 7, 11]}  # rows end at different times, and others take their places


@pytest.fixture
def target(tiny_target):
    return tiny_target(vocab_size=VOCAB)


def sampled(target, drafter, slots=None, **settings):
    input_ids = pad_sequence(ROWS, batch_first=True, padding_side="left")
    mask = pad_sequence([torch.ones_like(row) for row in ROWS], batch_first=True, padding_side="left")
    generator = torch.Generator().manual_seed(5)
    lm = SpeculativeLM(target, drafter)
    output = lm.generate(input_ids, attention_mask=mask, generator=generator, slots=slots, **SETTINGS, **settings)
    return output.sequences[:, input_ids.shape[1] :].tolist(), output.stats


def inverted(target, row, uniforms):
    """The text by the definition: each token is where the cumulative distribution passes its place's number."""
    text = row.tolist()
    for uniform in uniforms.tolist():
        scores = target.model(torch.tensor([text])).logits[0, -1] / SETTINGS["temperature"]
        scores[scores < scores.topk(SETTINGS["top_k"]).values[-1]] = -torch.inf
        cumulative = scores.softmax(-1).cumsum(-1)
        text.append(int((cumulative <= uniform * cumulative[-1]).sum()))
    return text[len(row) :]


DRAFTERS = {
    "no drafts": lambda target, tools: None,
    "a chain": lambda target, tools: draft_model(target, target, "chain:3"),
    "a tree": lambda target, tools: draft_model(target, target, "branch:3x2x1"),
    "a tree that reaches past the end": lambda target, tools: draft_model(target, target, f"chain:{NEW + 2}"),
    "a dynamic tree": lambda target, tools: draft_model(target, target, "dynamic:9:4:3"),
    "lookup": lambda target, tools: drafter_from("prompt-lookup", target),
    "random": lambda target, tools: drafter_from("random", target, "branch:4x4"),
}


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("slots", [None, 1, 2])
@torch.inference_mode()
def test_every_token_is_drawn_by_the_number_of_its_row_and_place(target, tools, name, slots):
    """Independent uniform numbers, each inverted once: the distribution is the target's, whatever the drafts are."""
    uniforms = torch.rand(NEW, len(ROWS), dtype=torch.float64, generator=torch.Generator().manual_seed(5)).T
    texts, stats = sampled(target, DRAFTERS[name](target, tools), slots, **NO_ENDS)
    assert texts == [inverted(target, row, uniforms_P) for row, uniforms_P in zip(ROWS, uniforms, strict=True)]
    if "tree" in name or "chain" in name:
        assert stats.acceptance_length > 1.2  # so drafts decided


@pytest.mark.parametrize("slots", [None, 1, 2])
def test_rows_that_end_leave_the_others_theirs(target, tools, slots):
    first, _ = sampled(target, None, **ENDS)
    assert len({len(row) - row.count(0) for row in first}) > 1
    for make in DRAFTERS.values():
        assert sampled(target, make(target, tools), slots, **ENDS)[0] == first


def test_a_longer_answer_begins_as_the_shorter_one(target):
    generators = [torch.Generator().manual_seed(3) for _ in range(2)]
    short, long = (
        SpeculativeLM(target)
        .generate(ROWS[0][None], generator=generator, **(SETTINGS | {"max_new_tokens": count}))
        .sequences[0]
        .tolist()
        for generator, count in zip(generators, (6, 20), strict=True)
    )
    assert long[: len(short)] == short


@pytest.mark.parametrize("tree", ["drawn:chain:2", "drawn:branch:2x2"])
def test_a_seed_gives_drawn_trees_one_text_too(target, tree):
    """They take numbers of the generator round by round."""
    first, second = (sampled(target, drafter_from("random", target, tree))[0] for _ in range(2))
    assert first == second


def test_an_oracle_with_branches_changes_nothing(target, tools):
    truth, _ = sampled(target, None)
    for wrong in (0.0, 0.5):
        oracle = tools.Oracle(TreeShape.branching([3, 2, 1]), truth, VOCAB, wrong)
        assert sampled(target, oracle)[0] == truth
