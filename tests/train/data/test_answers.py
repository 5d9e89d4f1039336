"""Answers as token ids: what is trained on is what the model wrote, whatever the chat template
makes of its text."""

from __future__ import annotations

import json

import pytest
from helpers import build_model
from messages import lacking, refused
from runs import rows_of, write_rows
from templates import FAMILIES, end_tokens, tokenizer_of

from headstart.inference import tokenizer_provenance
from headstart.inference.text.chat_template import prompt_ids
from headstart.inference.text.messages import check_conversation
from headstart.train.config import SelfMadeConfig
from headstart.train.data import self_made
from headstart.train.data.answer_file import lines_of
from headstart.train.data.answers import (
    calls_tool,
    read_prompts_to_answer,
    readable,
    turns_to_answer,
)
from headstart.train.data.chat_template import encode
from headstart.train.data.conversations import check_row
from headstart.train.data.self_made import make_conversations

SYSTEM = {"role": "system", "content": "Be short."}
THOUGHT = "6*2 it is"
CONTENT = " 12 eggs "
"""White space at the ends of an answer is the model's own."""


def ids_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def user(text):
    return {"role": "user", "content": text}


@pytest.fixture
def made_with(tmp_path, monkeypatch):
    """The rows that the command writes if the model writes one text after the other, and the
    tokenizer: `made_with(family, writes, row)`."""

    def make(family, writes, row):
        tokenizer = tokenizer_of(family)
        ends = end_tokens(family, tokenizer)
        model = build_model(vocab_size=len(tokenizer))
        model.generation_config.eos_token_id = sorted(ends)
        model.save_pretrained(tmp_path / "target")
        tokenizer.save_pretrained(tmp_path / "target")
        texts = iter(writes)

        def written(lm, prompts, *_, **__):
            answers = [ids_of(tokenizer, next(texts)) for _ in prompts]
            return [(tokens, tokens[-1] in ends) for tokens in answers]

        monkeypatch.setattr(self_made, "continue_prompts", written)
        config = SelfMadeConfig(
            target=str(tmp_path / "target"),
            output=str(tmp_path / "answers.jsonl"),
            prompts=write_rows(tmp_path / "prompts.jsonl", [row]),
            dtype="float32",
            min_distinct=0.0,
            template_kwargs=family.variables,
        )
        return rows_of(make_conversations(config)), tokenizer

    return make


ENDS = ("finished", "cut off", "cut off in the reasoning")


@pytest.mark.parametrize(
    ("name", "end", "with_system"),
    [
        (name, end, (number + place) % 2 == 1)
        for number, name in enumerate(FAMILIES)
        for place, end in enumerate(ENDS)
    ],
)
def test_what_is_trained_on_is_what_the_model_wrote(made_with, name, end, with_system):
    family = FAMILIES[name]
    system = [SYSTEM] if with_system else []
    writes = [family.written(THOUGHT, CONTENT, False), family.written("so " + THOUGHT, "no", False)]
    if end == "cut off":
        writes[1] = writes[1].removesuffix(family.ends[0])
    elif end == "cut off in the reasoning":
        writes[1] = writes[1].partition(THOUGHT)[0] + "6*2" if family.reasons else "n"
    foreign = {"role": "assistant", "content": "another model's"}
    row = {"messages": [*system, user("one"), foreign, user("two")]}
    found, tokenizer = made_with(family, writes, row)
    history = [*system, user("one")]
    for text in writes:
        written = ids_of(tokenizer, text)
        prompt = prompt_ids(tokenizer, history, None, family.variables)[0].tolist()
        places = range(len(prompt), len(prompt) + len(written))
        holders = [row for row in found if row["input_ids"][: places.stop] == prompt + written]
        assert holders and all(holders[0]["loss_mask"][place] == 1 for place in places)
        history = [*history, found[-1]["messages"][len(history)], user("two")]
    for row in found:
        # nothing is rendered
        (example,) = encode(check_row(row, "here"), tokenizer, frozenset(), 10_000)
        assert (example.tokens, example.loss_mask) == (row["input_ids"], row["loss_mask"])
        assert row["tokenizer"] == tokenizer_provenance(tokenizer)["tokenizer"]
        check_conversation({"messages": row["messages"]}, "here")
    masked = sum(sum(row["loss_mask"]) for row in found)
    # each answer once, and nothing else
    assert masked == sum(len(ids_of(tokenizer, text)) for text in writes)
    assert "another model's" not in json.dumps(found)
    assert found[-1]["finished"] is (end == "finished")


@pytest.mark.parametrize(
    ("name", "content", "system", "rows"),
    [
        ("chatml", CONTENT, [SYSTEM], 1),
        # the whole text has other tokens at the border of prompt and answer
        ("llama3", "12 eggs", [SYSTEM], 2),
        ("llama3", CONTENT, [], 2),  # the template strips earlier answers
        ("qwen3", CONTENT, [], 2),  # and this one drops their reasoning
        # the empty block stands before the last answer only
        ("qwen3, no thinking", CONTENT, [], 2),
        ("deepseek-v3.1", CONTENT, [], 1),
        ("deepseek-v3.1, thinking", CONTENT, [], 2),
        ("mistral", CONTENT, [SYSTEM], 2),  # the system prompt moves on
        ("harmony", CONTENT, [], 2),
    ],
)
def test_answers_share_a_sequence_where_the_template_renders_the_past_as_it_was(
    made_with, name, content, system, rows
):
    family = FAMILIES[name]
    writes = [family.written(THOUGHT, content, False)] * 2
    row = {"messages": [*system, user("one"), user("one more")], "follow_up": "two"}
    found, tokenizer = made_with(family, writes, row)
    numbers = [(row.get("sequence"), row.get("sequences")) for row in found]
    assert numbers == ([(1, 2), (2, 2)] if rows == 2 else [(None, None)])
    assert [len(row["messages"]) for row in found] == [3 + len(system), 5 + len(system)][-rows:]
    written = [len(ids_of(tokenizer, text)) for text in writes]
    assert [row["tokens"] for row in found] == (written if rows == 2 else [sum(written)])


@pytest.mark.parametrize(
    ("name", "prompt", "text", "message"),
    [
        ("chatml", "hi", " yes \n", {"content": " yes \n"}),
        # tags that the template lacks
        ("chatml", "hi", "[THINK]no[/THINK]yes", {"content": "[THINK]no[/THINK]yes"}),
        (
            "qwen3",
            "hi",
            "<think>\na\nb\n</think>\n\nyes",
            {"content": "yes", "reasoning_content": "a\nb"},
        ),
        ("qwen3", "hi", "<think>\n\n</think>\n\nyes", {"content": "yes"}),
        ("qwen3", "hi", "<think>\ncut off", {"content": "", "reasoning_content": "cut off"}),
        ("qwen3", "<think>\n\n</think>\n\n", "yes", {"content": "yes"}),
        (
            "r1",
            "<|Assistant|><think>\n",
            "a\n</think>\n\nyes",
            {"content": "yes", "reasoning_content": "a"},
        ),
        (
            "r1",
            "<|Assistant|><think>\n",
            "cut off",
            {"content": "", "reasoning_content": "cut off"},
        ),
        (
            "harmony",
            "<|start|>assistant",
            FAMILIES["harmony"].written(THOUGHT, "12 eggs", False),
            {"content": "12 eggs", "reasoning_content": THOUGHT},
        ),
        (
            "harmony",
            "<|start|>assistant",
            "<|channel|>commentary<|message|>Wait.<|end|><|start|>assistant<|channel|>final<|message|>Done.<|return|>",
            {"content": "Wait.\nDone."},
        ),
        (
            "harmony",
            "hi",
            "<|channel|>analysis<|message|>cut",
            {"content": "", "reasoning_content": "cut"},
        ),
    ],
)
def test_an_answer_can_be_read(name, prompt, text, message):
    tokenizer = tokenizer_of(FAMILIES[name])
    ends = end_tokens(FAMILIES[name], tokenizer)
    for ending in ("", FAMILIES[name].ends[0]):
        tokens = ids_of(tokenizer, text.removesuffix("<|return|>") + ending)
        assert readable(tokenizer, ids_of(tokenizer, prompt), tokens, ends) == {
            "role": "assistant",
            **message,
        }


def test_an_end_token_that_is_an_ordinary_word_is_not_part_of_the_message():
    tokenizer = tokenizer_of(FAMILIES["chatml"])
    (end,) = ids_of(tokenizer, "\n")
    answer = [*ids_of(tokenizer, "yes"), end]
    assert readable(tokenizer, [], answer, frozenset({end}))["content"] == "yes"


@pytest.mark.parametrize(
    "name", ["qwen3", "qwen3, no thinking", "r1", "deepseek-v3.1, thinking", "mistral", "harmony"]
)
def test_a_conversation_stops_where_a_tools_result_must_follow(made_with, name):
    family = FAMILIES[name]
    row = {"messages": [user("one"), user("two")], "follow_up": "three"}
    (found,), tokenizer = made_with(family, [family.written(THOUGHT, "", True)], row)
    assert len(found["messages"]) == 3
    assert not calls_tool(tokenizer, ids_of(tokenizer, "a tool, call it"))


A = {"role": "assistant", "content": "foreign"}
TOOL = {"role": "tool", "content": "result"}


@pytest.mark.parametrize(
    ("messages", "turns"),
    [
        ([user("a")], [[user("a")]]),
        ([user("a"), A], [[user("a")]]),
        ([SYSTEM, user("a"), A, user("b"), A], [[SYSTEM, user("a")], [user("b")]]),
        ([SYSTEM, A, user("a")], [[SYSTEM, user("a")]]),  # a greeting
        ([user("a"), user("b"), A, user("c")], [[user("a"), user("b")], [user("c")]]),
        ([user("a"), A, SYSTEM], [[user("a")]]),
        ([user("a"), A, A, user("b")], [[user("a")], [user("b")]]),
        ([user("a"), A, user("b"), A, TOOL, A, user("c")], [[user("a")], [user("b")]]),
        ([user("a"), TOOL, A, user("b")], [[user("a")]]),
        ([TOOL, user("a")], []),
        ([SYSTEM], []),
        ([A], []),
    ],
)
def test_a_conversation_is_answered_anew_up_to_the_first_tool_result(messages, turns):
    assert turns_to_answer(messages) == turns


def test_rows_of_prompts_become_turns_to_answer(tmp_path):
    rows = [
        {"prompt": "a", "follow_up": "b", "kind": "short"},
        {"turns": ["a", "b", "c"]},
        {"messages": [user("a"), A, user("b")], "tools": [{"type": "function"}]},
        {"prompt": "a", "tools": "[]", "follow_up": "b"},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "x"}]},
        {"prompt": "a", "completion": "x"},
    ]
    found, rejected = read_prompts_to_answer(write_rows(tmp_path / "prompts.jsonl", rows))
    said = ["".join(message["content"] for (message,) in row["turns"]) for row in found]
    assert said == ["ab", "abc", "ab", "ab", "a", "a"]
    assert found[2]["tools"] == [{"type": "function"}] and found[0]["kind"] == "short"
    assert rejected == []


def test_a_file_without_prompts_is_refused(tmp_path):
    with refused("prompts.jsonl empty"):
        read_prompts_to_answer(write_rows(tmp_path / "prompts.jsonl", []))


BAD_PROMPTS = [
    ('{"messages": [{"role": "tool", "content": "r"}]}', "message answered"),
    ('{"prompt": "a", "follow_up": 3}', "'follow_up' 3"),
    ('{"turns": ["a", 5]}', "conversation format"),
    ('{"prompt": "a", "temperature": "hot"}', "'temperature' 0 'hot'"),
    ('{"prompt": "a", "temperature": -1}', "'temperature' 0 -1"),
    ('{"prompt": "\\ud83d"}', "half character"),
    ("{broken", "JSON"),
    ("17", "conversation"),
]


def test_a_prompt_that_cannot_be_answered_costs_that_prompt(tmp_path):
    lines = ['{"prompt": "a"}', *(line for line, _ in BAD_PROMPTS), '{"prompt": "b"}']
    path = write_rows(tmp_path / "prompts.jsonl", lines)
    found, rejected = read_prompts_to_answer(path)
    assert [len(row["turns"]) for row in found] == [1, *[0] * len(BAD_PROMPTS), 1]
    for number, (row, (_, words)) in enumerate(zip(rejected, BAD_PROMPTS, strict=True), start=1):
        assert (row.row, row.where) == (number, f"{path}, line {number + 1}")
        assert not lacking(row.reason, words)


def test_half_a_character_that_the_model_wrote_is_kept():
    rows = [{"content": "\ud83d é"}, {"content": "é"}]
    text = lines_of(rows)
    assert [json.loads(line) for line in text.encode().decode().splitlines()] == rows
    assert text.endswith('"é"}\n')


def test_tools_reach_the_prompt(made_with):
    row = {"messages": [user("one")], "tools": [{"name": "f"}]}
    (found,), tokenizer = made_with(FAMILIES["qwen3"], ["yes<|im_end|>"], row)
    prompt = prompt_ids(tokenizer, [user("one")], tools=[{"name": "f"}])[0].tolist()
    assert found["input_ids"][: len(prompt)] == prompt
    assert prompt != prompt_ids(tokenizer, [user("one")])[0].tolist()
