"""The loss mask against what the assistant wrote, by decoding it; reading; the order of batches."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from helpers import split_examples
from messages import refused
from templates import CHATML, Family, tokenizer_of
from tokenizers import processors

from headstart.inference.text.chat_template import (
    check_tokenizer,
    data_origin,
    prompt_ids,
    render,
    variables_read,
    warn_of_unread_variables,
)
from headstart.train.config import DataConfig, TrainConfig
from headstart.train.data.batches import collate
from headstart.train.data.chat_template import Example, encode
from headstart.train.data.conversations import read_conversations
from headstart.train.data.split import split_held_out

REASONING = (
    "{% set last = namespace(user=-1) %}{% for m in messages %}{% if m['role'] == 'user' %}{% set"
    " last.user = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{"
    " m['role'] }}\n{% if m['role'] == 'assistant' and loop.index0 < last.user %}{{"
    " m['content'].split('</think>\n\n')[-1] }}{% else %}{{ m['content'] }}{% endif"
    " %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONVERSATIONS = {
    "several turns": [
        ("user", "one"),
        ("assistant", "the first answer"),
        ("user", "the first answer"),
        ("assistant", "b"),
        ("user", "three"),
        ("assistant", "assistant\nuser\n\nline"),
    ],
    "beyond ASCII": [("user", "größe 🎈"), ("assistant", "né 🎈🎈 日本")],
    "open end": [("user", "one"), ("assistant", "first"), ("user", "and now?")],
}


def build_tokenizer(template, end):
    return tokenizer_of(Family(template, None, (end,)))


def conversation(turns, **rest):
    return {"messages": [{"role": role, "content": text} for role, text in turns], **rest}


def encoded(turns, tokenizer, max_length=10_000, **rest):
    return encode(
        conversation(turns, **rest), tokenizer, frozenset({tokenizer.eos_token_id}), max_length
    )


def answers_in(example, tokenizer):
    """The text of each run of masked tokens."""
    pairs = zip(example.tokens, example.loss_mask, strict=True)
    return [
        tokenizer.decode([token for token, _ in run])
        for own, run in itertools.groupby(pairs, lambda p: p[1])
        if own
    ]


@pytest.mark.parametrize("turns", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_the_loss_mask_covers_exactly_what_the_assistant_writes(turns):
    tokenizer = build_tokenizer(CHATML, "<|im_end|>")
    (example,) = encoded(turns, tokenizer)
    assert answers_in(example, tokenizer) == [
        text + "<|im_end|>" for role, text in turns if role == "assistant"
    ]
    messages = conversation(turns)["messages"]
    while messages[-1]["role"] != "assistant":
        messages.pop()
    assert tokenizer.decode(example.tokens) == tokenizer.apply_chat_template(
        messages, tokenize=False
    )


def test_a_generation_prompt_that_ends_in_a_space_is_no_answer_even_if_offsets_leave_spaces_out():
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
    template += "{% if add_generation_prompt %}assistant: {% endif %}"
    tokenizer = build_tokenizer(template, "</s>")
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    (example,) = encoded([("user", "hi"), ("assistant", "7")], tokenizer)
    assert answers_in(example, tokenizer) == ["7</s>"]


def test_the_end_token_of_a_cut_off_answer_is_not_the_assistants():
    tokenizer = build_tokenizer(CHATML, "<|im_end|>")
    turns = [("user", "one"), ("assistant", "whole"), ("user", "two"), ("assistant", "cut o")]
    (example,) = encoded(turns, tokenizer, finished=False)
    assert answers_in(example, tokenizer) == ["whole<|im_end|>", "cut o"]


def test_max_length_cuts_and_a_sequence_without_an_answer_is_left_out():
    tokenizer = build_tokenizer(CHATML, "<|im_end|>")
    turns = [("user", "one"), ("assistant", "a longer answer"), ("user", "two"), ("assistant", "b")]
    (whole,) = encoded(turns, tokenizer)
    prompt = whole.loss_mask.index(True)
    (cut,) = encoded(turns, tokenizer, max_length=prompt + 2)
    assert (cut.tokens, cut.loss_mask) == (
        whole.tokens[: prompt + 2],
        whole.loss_mask[: prompt + 2],
    )
    assert encoded(turns, tokenizer, max_length=prompt) == []
    assert encoded([("user", "alone")], tokenizer) == []


def test_a_template_that_does_not_continue_its_generation_prompt_is_refused_and_shown():
    template = (
        "{% for m in messages %}{{ 'bot' if m['role'] == 'assistant' else m['role'] }}: {{"
        " m['content'] }}\n"
    )
    template += "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    with refused("generation prompt") as error:
        encoded([("user", "hi"), ("assistant", "yo")], build_tokenizer(template, "</s>"))
    assert "assistant:" in str(error.value) and "bot: yo" in str(error.value)


@pytest.mark.parametrize(
    ("template", "turns"),
    [
        (CHATML, [("assistant", "I start")]),
        ("{{ raise_exception('roles must alternate') }}", [("user", "hi"), ("assistant", "yo")]),
    ],
    ids=["no turn before the answer", "the template raises"],
)
def test_a_conversation_that_the_template_refuses_is_a_users_error(template, turns):
    with refused("template"):
        encoded(turns, build_tokenizer(template, "<|im_end|>"))


@pytest.mark.parametrize("template", ["{{ m['content'] }}", "{{ m['content'] | trim }}"])
def test_null_content_is_never_the_word_none_and_tools_reach_the_template(template):
    template = "{{ tools[0]['name'] }}{% for m in messages %}<{{ m['role'] }}>" + template
    template += "{% for c in m['tool_calls'] or [] %}{{ c['name'] }}{% endfor %}</s>{% endfor %}"
    template += "{% if add_generation_prompt %}<assistant>{% endif %}"
    tokenizer = build_tokenizer(template, "</s>")
    called = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
    row = {"messages": [{"role": "user", "content": "hi"}, called], "tools": [{"name": "tool"}]}
    (example,) = encode(row, tokenizer, frozenset({tokenizer.eos_token_id}), 100)
    assert tokenizer.decode(example.tokens) == "tool<user>hi</s><assistant>add</s>"
    assert answers_in(example, tokenizer) == ["add</s>"]


def test_a_tokenizer_without_a_chat_template_is_refused_by_name(tokenizer):
    check_tokenizer(tokenizer, "good")
    with refused("'some/model'"):
        check_tokenizer(build_tokenizer(None, "</s>"), "some/model")


EFFORT = "{% if effort is defined %}<effort {{ effort }}>{% endif %}" + CHATML
"""A template with an option of its own."""


def test_variables_of_the_template_reach_prompts_and_sequences():
    tokenizer = build_tokenizer(EFFORT, "<|im_end|>")
    row = conversation([("user", "hi"), ("assistant", "yo")])
    variables = {"effort": "high"}
    assert render(tokenizer, row["messages"][:1], True, template_kwargs=variables).startswith(
        "<effort high>"
    )
    prompt = prompt_ids(tokenizer, row["messages"][:1], template_kwargs=variables)[0].tolist()
    (example,) = encode(row, tokenizer, frozenset({tokenizer.eos_token_id}), 100, None, variables)
    assert example.tokens[: len(prompt)] == prompt
    assert example.loss_mask.index(True) == len(prompt)


def test_the_origin_of_data_names_each_variable_once():
    tokenizer = build_tokenizer(EFFORT, "<|im_end|>")
    origin = data_origin(tokenizer, None, {"enable_thinking": False, "effort": "high"})
    assert origin == data_origin(tokenizer, False, {"effort": "high"})
    assert (origin["thinking"], origin["template_kwargs"]) == (False, {"effort": "high"})
    with refused("True template_kwargs enable_thinking False contradict"):
        data_origin(tokenizer, True, {"enable_thinking": False})
    with refused("template_kwargs = 1"):
        render(tokenizer, [{"role": "user", "content": "hi"}], template_kwargs={"tools": 1})


@pytest.mark.parametrize(
    ("template", "told"),
    [(EFFORT, False), (CHATML, True), ("{% generation %}{% endgeneration %}" + EFFORT, False)],
)
def test_a_variable_that_the_template_does_not_read_is_told(caplog, template, told):
    tokenizer = build_tokenizer(template, "<|im_end|>")
    warn_of_unread_variables(tokenizer, None, {"effort": "high"})
    assert [record.getMessage() for record in caplog.records] == (
        [
            "this tokenizer's chat template does not read effort = 'high', which changes nothing;"
            " variables that it reads: none"
        ]
        if told
        else []
    )
    assert ("effort" in variables_read(tokenizer)) is not told


def test_a_row_of_tokens_is_the_sequence_itself():
    tokenizer = build_tokenizer(None, "</s>")  # nothing is rendered
    row = {
        "input_ids": [5, 6, 7, 8],
        "loss_mask": [0, 0, 1, 1],
        **conversation([("user", "other words")]),
    }
    assert encode(row, tokenizer, frozenset(), 10) == [
        Example([5, 6, 7, 8], [False, False, True, True])
    ]
    assert encode(row, tokenizer, frozenset(), 3) == [Example([5, 6, 7], [False, False, True])]
    assert encode(row, tokenizer, frozenset(), 2) == []


def test_only_a_line_feed_ends_a_line(tmp_path):
    path = tmp_path / "data.jsonl"
    text = "one\u2028two\u0085three\x0bfour\x1cfive"
    rows = [
        conversation([("user", text), ("assistant", text)]),
        conversation([("user", "b"), ("assistant", "c")]),
    ]
    path.write_text(
        "\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8"
    )
    assert read_conversations(str(path)) == rows
    assert read_conversations(str(path), limit=1) == rows[:1]


def numbered(count):
    return [Example([i, i], [False, True]) for i in range(count)]


@pytest.mark.parametrize("count", [2, 3, 10, 101])
@pytest.mark.parametrize("share", [0.001, 0.02, 0.5, 0.8, 0.99])
def test_held_out_and_training_examples_are_disjoint_and_neither_is_empty(count, share):
    training, held_out = split_held_out(numbered(count), share, seed=3)
    assert sorted(example.tokens[0] for example in training + held_out) == list(range(count))
    assert training and held_out
    assert abs(len(held_out) - share * count) <= 1
    assert (training, held_out) == split_held_out(numbered(count), share, seed=3)


def test_held_out_examples_depend_on_the_seed_and_one_is_too_few():
    assert split_held_out(numbered(100), 0.1, 0)[1] != split_held_out(numbered(100), 0.1, 1)[1]
    with refused("2"):
        split_held_out(numbered(1), 0.1, 0)


def test_no_conversation_is_both_trained_on_and_held_out(tiny_target):
    tokenizer = build_tokenizer(REASONING, "<|im_end|>")  # several sequences a conversation
    rows = [
        conversation(
            [("user", f"name {i}"), *[("assistant", "<think>a</think>\n\nb"), ("user", "c")] * 4]
        )
        for i in range(20)
    ]
    data = DataConfig(sources=["unused"], held_out=0.3)
    config = TrainConfig(target="unused", output="unused", data=data)
    training, held_out = split_examples(rows, config, tiny_target(vocab_size=400), tokenizer)

    def conversations_of(examples):
        return {tokenizer.decode(example.tokens).split("<|im_end|>")[0] for example in examples}

    assert len(conversations_of(training) | conversations_of(held_out)) == 20
    assert not conversations_of(training) & conversations_of(held_out)


def test_collating_pads_on_the_right_and_padding_is_no_answer():
    batch = collate([Example([5, 6, 7], [False, True, True]), Example([8], [True])])
    assert batch.tokens_BT[0].tolist() == [5, 6, 7]
    assert batch.tokens_BT[1, 0] == 8
    assert batch.loss_mask_BT.tolist() == [[False, True, True], [True, False, False]]
    assert batch.loss_mask_BT.dtype == torch.bool
