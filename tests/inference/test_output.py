"""The interface of `generate` as a transformers user expects it: its output, and the order of its
arguments."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
from helpers import build_tokenizer
from messages import refused
from transformers import (
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    StoppingCriteriaList,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

from headstart.inference import GenerateOutput, SpeculativeLM, custom_generate

PROMPTS = torch.tensor([[65, 66, 67], [70, 71, 72]])
SETTINGS = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": [], "pad_token_id": 257}


@pytest.fixture
def letters_lm(tiny_target):
    return SpeculativeLM.from_pretrained(tiny_target(), drafter="prompt-lookup", adaptive=False)


@pytest.fixture
def out(letters_lm):
    return letters_lm.generate(PROMPTS, **SETTINGS)


def test_the_output_is_indexed_as_the_tensor_of_sequences(letters_lm, out):
    expected = letters_lm.target.model.generate(PROMPTS, **SETTINGS)
    assert torch.equal(out.sequences, expected)
    for index in (0, -1, (slice(None), slice(3, None)), (0, slice(3, None))):
        assert torch.equal(out[index], expected[index])
    assert torch.equal(out[out.sequences[:, 0] == 70], expected[1:])
    assert len(out) == 2
    assert [row.tolist() for row in out] == expected.tolist()
    assert out.stats.rounds > 0
    with pytest.raises(IndexError):
        out[2]


@pytest.mark.versions
def test_the_summary_counts_every_token_that_was_returned(letters_lm):
    out = letters_lm.generate(PROMPTS, max_new_tokens=16, min_new_tokens=16, do_sample=False)
    rows = len(PROMPTS)
    assert f"{16 * rows} tokens: {rows} by prefill, {15 * rows} in " in out.stats.summary()


def test_a_tokenizer_decodes_the_output(out):
    tokenizer = build_tokenizer()
    texts = tokenizer.batch_decode(out, skip_special_tokens=True)
    assert texts == tokenizer.batch_decode(out.sequences, skip_special_tokens=True)
    assert texts == [tokenizer.decode(row, skip_special_tokens=True) for row in out]
    assert texts[0].startswith("bcd")


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda out: pickle.loads(pickle.dumps(out))]
)
def test_a_copy_of_the_output_is_whole(out, copied):
    other = copied(out)
    assert isinstance(other, GenerateOutput) and torch.equal(other.sequences, out.sequences)
    assert torch.equal(other[0], out[0]) and len(other) == 2
    assert other.stats.rounds == out.stats.rounds


def test_positional_arguments_stand_as_in_transformers(letters_lm):
    names = list(inspect.signature(GenerationMixin.generate).parameters)[1:6]
    parameters = inspect.signature(SpeculativeLM.generate).parameters
    positional = [
        name for name, each in parameters.items() if each.kind is each.POSITIONAL_OR_KEYWORD
    ][1:]
    assert positional == names
    assert list(inspect.signature(SpeculativeLM.stream).parameters)[1:3] == names[:2]


class Banned:
    """A processor that bans a token, and a criterion that ends a text with another."""

    def __init__(self, token):
        self.token = token

    def __call__(self, input_ids, scores):
        if scores is not None and torch.is_tensor(scores):
            scores = scores.clone()
            scores[:, self.token] = -torch.inf
            return scores
        return input_ids[:, -1] == self.token


def test_a_call_with_positional_arguments_means_what_it_means_in_transformers(letters_lm):
    row = PROMPTS[:1]
    plain = letters_lm.target.model.generate(row, **SETTINGS)[0, 3:].tolist()
    arguments = [
        row,
        GenerationConfig(max_new_tokens=20, do_sample=False, pad_token_id=257, eos_token_id=None),
        LogitsProcessorList([Banned(plain[1])]),
        StoppingCriteriaList([lambda ids, scores: torch.tensor([ids.shape[1] >= 14])]),
        lambda batch, text: [token for token in range(258) if token != plain[2]],
    ]
    expected = letters_lm.target.model.generate(*arguments)
    assert torch.equal(letters_lm.generate(*arguments).sequences, expected)
    assert expected.shape[1] == 14 and not {plain[1], plain[2]} & {*expected[0, 3:].tolist()}


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        (
            [PROMPTS, torch.ones_like(PROMPTS)],
            {},
            "GenerationConfig Tensor attention_mask=...",
        ),
        ([PROMPTS, {"max_new_tokens": 3}], {}, "GenerationConfig dict"),
        ([PROMPTS], {"input_ids": PROMPTS}, "inputs input_ids"),
        ([], {}, "input_ids tensor NoneType"),
        (
            [PROMPTS],
            {"assistant_model": 1},
            "'assistant_model' drafter",
        ),
        ([PROMPTS], {"slots": 1}, "'slots'"),
        ([PROMPTS], {"temprature": 1.0}, "'temprature' 'temperature'"),
        ([PROMPTS], {"num_assistant_tokens": 3}, "num_assistant_tokens"),
        ([PROMPTS], {"prompt_lookup_num_tokens": 3}, 'drafter="prompt-lookup"'),
        (
            [PROMPTS[:1]],
            {"past_key_values": DynamicCache()},
            "past_key_values DynamicCache headstart.inference.Conversation()",
        ),
        ([PROMPTS[:1]], {"past_key_values": ((1, 2),)}, "tuple headstart.inference.Conversation()"),
    ],
)
def test_arguments_that_cannot_be_meant_are_told(letters_lm, arguments, options, words):
    with refused(words):
        letters_lm.generate(*arguments, **SETTINGS, **options)


def test_plain_generate_returns_what_transformers_does_with_statistics(tiny_target):
    model = tiny_target().model
    method = custom_generate(drafter="prompt-lookup", adaptive=False)
    asked = {"output_scores": True, "return_dict_in_generate": True}
    theirs = model.generate(PROMPTS, **SETTINGS, **asked)
    ours = model.generate(PROMPTS, custom_generate=method, **SETTINGS, **asked)
    assert isinstance(ours, GenerateDecoderOnlyOutput)
    assert torch.equal(ours["sequences"], theirs["sequences"]) and ours.stats.rounds > 0
    close = {"rtol": 0, "atol": 1e-4, "check_dtype": False}
    torch.testing.assert_close(torch.stack(ours.scores), torch.stack(theirs.scores), **close)
    assert torch.is_tensor(model.generate(PROMPTS, custom_generate=method, **SETTINGS))
