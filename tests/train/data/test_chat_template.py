"""The loss mask against what the assistant wrote, by decoding it; reading; the order of batches."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers import CHATML
from messages import lacking, refused
from templates import Family, tokenizer_of
from tokenizers import processors

from headstart.inference.text.chat_template import (
    data_origin,
    render,
    variables_read,
    warn_of_unread_variables,
)
from headstart.train.data.batches import collate
from headstart.train.data.chat_template import Example, encode
from headstart.train.data.split import split_held_out


def tokenizer_with(template, end="<|im_end|>"):
    return tokenizer_of(Family(template, None, (end,)))


def conversation(turns, **rest):
    return {"messages": [{"role": role, "content": text} for role, text in turns], **rest}


def sequences_of(turns, tokenizer, max_length=10_000, **rest):
    row = conversation(turns, **rest)
    return encode(row, tokenizer, frozenset({tokenizer.eos_token_id}), max_length)


def answers_in(example, tokenizer):
    """The text of each run of masked tokens."""
    pairs = zip(example.tokens, example.loss_mask, strict=True)
    return [
        tokenizer.decode([token for token, _ in run])
        for own, run in itertools.groupby(pairs, lambda p: p[1])
        if own
    ]


def test_a_generation_prompt_that_ends_in_a_space_is_no_answer_even_if_offsets_leave_spaces_out():
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
    template += "{% if add_generation_prompt %}assistant: {% endif %}"
    tokenizer = tokenizer_with(template, "</s>")
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    (example,) = sequences_of([("user", "hi"), ("assistant", "7")], tokenizer)
    assert answers_in(example, tokenizer) == ["7</s>"]


FOUR_TURNS = [("user", "one"), ("assistant", "a whole"), ("user", "two"), ("assistant", "cut o")]


def test_the_end_token_of_a_cut_off_answer_is_not_the_assistants():
    tokenizer = tokenizer_with(CHATML)
    (example,) = sequences_of(FOUR_TURNS, tokenizer, finished=False)
    assert answers_in(example, tokenizer) == ["a whole<|im_end|>", "cut o"]


def test_max_length_cuts_and_a_sequence_without_an_answer_is_left_out():
    tokenizer = tokenizer_with(CHATML)
    (whole,) = sequences_of(FOUR_TURNS, tokenizer)
    prompt = whole.loss_mask.index(True)
    (cut,) = sequences_of(FOUR_TURNS, tokenizer, max_length=prompt + 2)
    assert cut.tokens == whole.tokens[: prompt + 2]
    assert cut.loss_mask == whole.loss_mask[: prompt + 2]
    assert sequences_of(FOUR_TURNS, tokenizer, max_length=prompt) == []
    assert sequences_of([("user", "alone")], tokenizer) == []


def test_what_the_template_puts_before_a_marked_answer_is_not_the_assistants():
    """Also where it follows the generation prompt, as text that the model would have to write."""
    template = "{% for m in messages %}<{{ m['role'] }}>{% if m['role'] == 'assistant' %}Reply: "
    template += "{% generation %}{{ m['content'] }}</s>{% endgeneration %}"
    template += "{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
    template += "{% if add_generation_prompt %}<assistant>{% endif %}"
    tokenizer = tokenizer_with(template, "</s>")
    (example,) = sequences_of([("user", "hi"), ("assistant", "yo")], tokenizer)
    assert tokenizer.decode(example.tokens) == "<user>hi<assistant>Reply: yo</s>"
    assert answers_in(example, tokenizer) == ["yo</s>"]


def test_a_template_that_does_not_continue_its_generation_prompt_is_refused_and_shown():
    template = "{% for m in messages %}{{ {'assistant': 'bot'}.get(m['role'], m['role']) }}: "
    template += "{{ m['content'] }}\n{% endfor %}"
    template += "{% if add_generation_prompt %}assistant:{% endif %}"
    with refused(r"generation prompt \nassistant: \nbot: yo"):
        sequences_of([("user", "hi"), ("assistant", "yo")], tokenizer_with(template))


@pytest.mark.parametrize("template", ["{{ m['content'] }}", "{{ m['content'] | trim }}"])
def test_null_content_is_never_the_word_none_and_tools_reach_the_template(template):
    template = "{{ tools[0]['name'] }}{% for m in messages %}<{{ m['role'] }}>" + template
    template += "{% for c in m['tool_calls'] or [] %}{{ c['name'] }}{% endfor %}</s>{% endfor %}"
    template += "{% if add_generation_prompt %}<assistant>{% endif %}"
    tokenizer = tokenizer_with(template, "</s>")
    called = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
    row = {"messages": [{"role": "user", "content": "hi"}, called], "tools": [{"name": "tool"}]}
    (example,) = encode(row, tokenizer, frozenset({tokenizer.eos_token_id}), 100)
    assert tokenizer.decode(example.tokens) == "tool<user>hi</s><assistant>add</s>"
    assert answers_in(example, tokenizer) == ["add</s>"]


EFFORT = "{% if effort is defined %}<effort {{ effort }}>{% endif %}" + CHATML
"""A template with an option of its own."""


def test_the_origin_of_data_names_each_variable_once():
    tokenizer = tokenizer_with(EFFORT)
    origin = data_origin(tokenizer, None, {"enable_thinking": False, "effort": "high"})
    assert origin == data_origin(tokenizer, False, {"effort": "high"})
    assert (origin["thinking"], origin["template_kwargs"]) == (False, {"effort": "high"})
    with refused("True template_kwargs enable_thinking False"):
        data_origin(tokenizer, True, {"enable_thinking": False})
    with refused("template_kwargs = 1"):
        render(tokenizer, [{"role": "user", "content": "hi"}], template_kwargs={"tools": 1})


@pytest.mark.parametrize(
    ("template", "told"),
    [(EFFORT, False), (CHATML, True), ("{% generation %}{% endgeneration %}" + EFFORT, False)],
)
def test_a_variable_that_the_template_does_not_read_is_told(caplog, template, told):
    tokenizer = tokenizer_with(template)
    warn_of_unread_variables(tokenizer, None, {"effort": "high"})
    assert [lacking(text, "effort = 'high'") for text in caplog.messages] == [[]] * told
    assert ("effort" in variables_read(tokenizer)) is not told


@pytest.mark.parametrize(("max_length", "count"), [(10, 4), (3, 3), (2, 0)])
def test_a_row_of_tokens_is_the_sequence_itself(max_length, count):
    row = conversation([("user", "other words")], input_ids=[5, 6, 7, 8], loss_mask=[0, 0, 1, 1])
    nothing_rendered = tokenizer_with(None)
    found = encode(row, nothing_rendered, frozenset(), max_length)
    whole = Example([5, 6, 7, 8], [False, False, True, True])
    expected = Example(whole.tokens[:count], whole.loss_mask[:count])
    assert found == ([expected] if count else [])


@pytest.mark.parametrize("count", [2, 3, 10, 101])
@pytest.mark.parametrize("share", [0.001, 0.02, 0.5, 0.8, 0.99])
def test_held_out_and_training_examples_are_disjoint_and_neither_is_empty(count, share):
    training, held_out = split_held_out(range(count), share, seed=3)
    assert sorted([*training, *held_out]) == list(range(count))
    assert training and held_out
    assert abs(len(held_out) - share * count) <= 1
    assert (training, held_out) == split_held_out(range(count), share, seed=3)


def test_held_out_examples_depend_on_the_seed_and_one_is_too_few():
    assert split_held_out(range(100), 0.1, 0)[1] != split_held_out(range(100), 0.1, 1)[1]
    with refused("2"):
        split_held_out(range(1), 0.1, 0)


def test_collating_pads_on_the_right_and_padding_is_no_answer():
    batch = collate([Example([5, 6, 7], [False, True, True]), Example([8], [True])])
    assert batch.tokens_BT[0].tolist() == [5, 6, 7]
    assert batch.tokens_BT[1, 0] == 8
    assert batch.loss_mask_BT.tolist() == [[False, True, True], [True, False, False]]
    assert batch.loss_mask_BT.dtype == torch.bool
