"""Answers as token ids: what is trained on is what the model wrote, whatever the chat template makes of its text."""

from __future__ import annotations

import json

import pytest
from helpers import build_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from headstart.inference import tokenizer_provenance
from headstart.train.config import SelfMadeConfig
from headstart.train.data import self_made
from headstart.train.data.answers import (
    Answer,
    Conversation,
    calls_tool,
    read_prompt_conversations,
    readable,
    turns_to_answer,
)
from headstart.train.data.chat_template import encode, prompt_ids
from headstart.train.data.conversations import check_conversation, check_row
from headstart.train.data.self_made import make_conversations

SPECIAL = (
    *("<|im_start|>", "<|im_end|>", "<s>", "</s>", "[INST]", "[/INST]", "<|User|>", "<|Assistant|>"),
    *("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"),
)
"""Special tokens, which decoding leaves out of the text."""
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRIPPED = CHATML.replace("{{ m.content }}", "{{ m.content | trim }}")
"""White space at the ends of earlier answers is dropped."""
QWEN3 = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}"
    "<think>\n{{ m.reasoning_content | default('') }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""Earlier reasoning is dropped, and an empty block is written where none is wanted."""
PREFILLED = (
    "{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}"
    "{% else %}<|Assistant|>{{ m.content.split('</think>')[-1] }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
"""The prompt opens the reasoning (DeepSeek-R1, QwQ), which the rendering of an answer lacks."""
SWITCHED = (
    "{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}"
    "{% else %}<|Assistant|></think>{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|>{{ '<think>' if thinking else '</think>' }}{% endif %}"
)
"""A variable of its own opens or closes the reasoning (DeepSeek-V3.1)."""
SYSTEM_LAST = (
    "{% set sys = messages[0].content if messages[0].role == 'system' else none %}"
    "{% set rest = messages[1:] if sys is not none else messages %}<s>"
    "{% for m in rest %}{% if m.role == 'user' %}[INST] {% if loop.last and sys is not none %}{{ sys }}\n\n{% endif %}"
    "{{ m.content }}[/INST]{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
"""The system prompt stands in the last turn of the user (Mistral)."""
HARMONY = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
"""Special tokens make up the channels of an answer, and earlier analysis is dropped (gpt-oss)."""
THOUGHT = "<|channel|>analysis<|message|>6*2 it is<|end|><|start|>assistant<|channel|>final<|message|>12 eggs<|return|>"
SYSTEM = {"role": "system", "content": "Be short."}


def build(template, eos="<|im_end|>"):
    """A tokenizer of bytes and special tokens, without a token for padding."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos)
    fast.chat_template = template
    return fast


def ids_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def user(text):
    return {"role": "user", "content": text}


def made_with(template, eos, writes, row, tmp_path, monkeypatch, **options):
    """The rows that the command writes if the model writes one text after the other, and the tokenizer."""
    tokenizer = build(template, eos)
    model = build_model(vocab_size=len(tokenizer))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    (tmp_path / "prompts.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    texts = iter(writes)

    def written(lm, prompts, *_, **__):
        answers = [ids_of(tokenizer, next(texts)) for _ in prompts]
        return [(tokens, tokens[-1] == tokenizer.eos_token_id) for tokens in answers]

    monkeypatch.setattr(self_made, "_continue", written)
    config = SelfMadeConfig(
        target=str(tmp_path / "target"),
        output=str(tmp_path / "answers.jsonl"),
        prompts=str(tmp_path / "prompts.jsonl"),
        target_dtype="float32",
        min_distinct=0.0,
        **options,
    )
    lines = make_conversations(config).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines], tokenizer


@pytest.mark.parametrize(
    ("template", "eos", "writes", "rows", "options", "system"),
    [
        (CHATML, "<|im_end|>", [" a b \n<|im_end|>", "no<|im_end|>"], 1, {}, []),
        (STRIPPED, "<|im_end|>", [" a<|im_end|>", "no<|im_end|>"], 2, {}, []),
        (
            QWEN3,
            "<|im_end|>",
            ["<think>\nhm\n</think>\n\nyes<|im_end|>", "<think>\n\n</think>\n\nno<|im_end|>"],
            2,
            {},
            [],
        ),
        (QWEN3, "<|im_end|>", ["yes<|im_end|>", "no<|im_end|>"], 2, {"thinking": False}, []),
        (PREFILLED, "<|im_end|>", ["hm\n</think>\n\nyes<|im_end|>", "so\n</think>\n\nno<|im_end|>"], 2, {}, []),
        (SWITCHED, "<|im_end|>", ["yes<|im_end|>", "no<|im_end|>"], 1, {"template_kwargs": {"thinking": False}}, []),
        (SWITCHED, "<|im_end|>", ["h</think>yes<|im_end|>"] * 2, 2, {"template_kwargs": {"thinking": True}}, []),
        (SYSTEM_LAST, "</s>", [" It is.</s>", " No.</s>"], 2, {}, [SYSTEM]),
        (SYSTEM_LAST, "</s>", [" It is.</s>", " No.</s>"], 2, {}, []),  # the template adds a space of its own
        (HARMONY, "<|return|>", [THOUGHT, THOUGHT], 2, {}, []),
        (HARMONY, "<|return|>", [THOUGHT, "<|channel|>analysis<|message|>cut off he"], 2, {}, []),
    ],
)
def test_what_is_trained_on_is_what_the_model_wrote(
    tmp_path, monkeypatch, template, eos, writes, rows, options, system
):
    row = {"messages": [*system, user("one"), {"role": "assistant", "content": "another model's"}, user("two")]}
    found, tokenizer = made_with(template, eos, writes, row, tmp_path, monkeypatch, **options)
    assert len(found) == rows
    thinking, variables = options.get("thinking"), options.get("template_kwargs")
    history = [*system, user("one")]
    for number, text in enumerate(writes):
        written = ids_of(tokenizer, text)
        prompt = prompt_ids(tokenizer, history, thinking, variables)[0].tolist()
        holder = found[min(number, rows - 1)]
        assert holder["input_ids"][: len(prompt) + len(written)] == prompt + written
        assert holder["loss_mask"][len(prompt) : len(prompt) + len(written)] == [1] * len(written)
        history = [*history, found[-1]["messages"][len(history)], user("two")]
    for row in found:
        (example,) = encode(check_row(row, "here"), tokenizer, frozenset({tokenizer.eos_token_id}), 10_000)
        assert (example.tokens, example.loss_mask) == (row["input_ids"], [bool(own) for own in row["loss_mask"]])
        assert row["tokenizer"] == tokenizer_provenance(tokenizer)["tokenizer"]
        check_conversation({"messages": row["messages"]}, "here")
    masked = sum(sum(row["loss_mask"]) for row in found)
    assert masked == sum(len(ids_of(tokenizer, text)) for text in writes)  # each answer once, and nothing else
    assert [row.get("sequence") for row in found] == ([1, 2] if rows == 2 else [None])
    assert "another model's" not in json.dumps(found)
    assert [row["finished"] for row in found][-1] == writes[-1].endswith(eos)


@pytest.mark.parametrize(
    ("template", "prompt", "text", "message"),
    [
        (CHATML, "hi", " yes \n", {"content": " yes \n"}),
        (CHATML, "hi", "<think>no</think>yes", {"content": "<think>no</think>yes"}),  # words that the template lacks
        (QWEN3, "hi", "<think>\na\nb\n</think>\n\nyes", {"content": "yes", "reasoning_content": "a\nb"}),
        (QWEN3, "hi", "<think>\n\n</think>\n\nyes", {"content": "yes"}),
        (QWEN3, "hi", "<think>\ncut off", {"content": "", "reasoning_content": "cut off"}),
        (QWEN3, "<think>\n\n</think>\n\n", "yes </think>", {"content": "yes </think>"}),
        (PREFILLED, "<|Assistant|><think>\n", "a\n</think>\n\nyes", {"content": "yes", "reasoning_content": "a"}),
        (PREFILLED, "<|Assistant|><think>\n", "cut off", {"content": "", "reasoning_content": "cut off"}),
        (HARMONY, "<|start|>assistant", THOUGHT, {"content": "12 eggs", "reasoning_content": "6*2 it is"}),
        (
            HARMONY,
            "<|start|>assistant",
            "<|channel|>commentary<|message|>Wait.<|end|><|start|>assistant<|channel|>final<|message|>Done.<|return|>",
            {"content": "Wait.\nDone."},
        ),
        (HARMONY, "hi", "<|channel|>analysis<|message|>cut", {"content": "", "reasoning_content": "cut"}),
    ],
)
def test_an_answer_can_be_read(template, prompt, text, message):
    eos = "<|return|>" if template == HARMONY else "<|im_end|>"
    tokenizer = build(template, eos)
    tokens = ids_of(tokenizer, text if text.endswith(eos) else text + eos)
    ends = frozenset({tokenizer.eos_token_id})
    assert readable(tokenizer, ids_of(tokenizer, prompt), tokens, ends) == {"role": "assistant", **message}


def test_an_end_token_that_is_an_ordinary_word_is_not_part_of_the_message():
    tokenizer = build(CHATML)
    (end,) = ids_of(tokenizer, "\n")
    assert readable(tokenizer, [], [*ids_of(tokenizer, "yes"), end], frozenset({end}))["content"] == "yes"


@pytest.mark.parametrize(
    "mark", ["<tool_call>{}</tool_call>", "<|channel|>commentary to=functions.f<|message|>{}<|call|>"]
)
def test_a_conversation_stops_where_a_tools_result_must_follow(tmp_path, monkeypatch, mark):
    eos = "<|call|>" if "<|call|>" in mark else "<|im_end|>"
    row = {"messages": [user("one"), user("two")], "follow_up": "three"}
    found, tokenizer = made_with(CHATML, eos, [mark.removesuffix(eos) + eos], row, tmp_path, monkeypatch)
    assert len(found) == 1 and calls_tool(tokenizer, found[0]["input_ids"])
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
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    found = read_prompt_conversations(path)
    said = [[[message["content"] for message in turn] for turn in row["turns"]] for row in found]
    assert said == [[["a"], ["b"]], [["a"], ["b"], ["c"]], [["a"], ["b"]], [["a"], ["b"]], [["a"]], [["a"]]]
    assert found[2]["tools"] == [{"type": "function"}] and found[0]["kind"] == "short"
    for row, words in [
        ({"messages": [TOOL, user("a")]}, "no message of the user that could be answered"),
        ({"prompt": "a", "follow_up": 3}, "'follow_up' must be a text, not 3"),
        ({"turns": ["a", 5]}, "no conversation in any format"),
    ]:
        path.write_text(json.dumps(row) + "\n", encoding="utf-8")
        with pytest.raises(ValueError, match=rf"prompts\.jsonl, line 1: .*{words}"):
            read_prompt_conversations(path)


def test_tools_reach_the_prompt(tmp_path, monkeypatch):
    template = "{% if tools %}<s>{{ tools | tojson }}</s>{% endif %}" + CHATML
    row = {"messages": [user("one")], "tools": [{"name": "f"}]}
    (found,), tokenizer = made_with(template, "<|im_end|>", ["yes<|im_end|>"], row, tmp_path, monkeypatch)
    prompt = prompt_ids(tokenizer, [user("one")], tools=[{"name": "f"}])[0].tolist()
    assert found["input_ids"][: len(prompt)] == prompt
    assert prompt != prompt_ids(tokenizer, [user("one")])[0].tolist()


def test_a_later_prompt_that_begins_with_an_answer_is_the_same_sequence():
    answers = [
        Answer(A, True, False, 2, [1, 2], [3, 4]),
        Answer(A, True, False, 1, [1, 2, 3, 4, 5], [6]),
        Answer(A, True, False, 2, [1, 2, 9, 5, 6], [7, 8]),
    ]
    conversation = Conversation({"number": 7}, [[user("a")], [user("b")], [user("c")]], None, answers)
    first, second = conversation.token_rows("print")
    assert (first["input_ids"], first["loss_mask"]) == ([1, 2, 3, 4, 5, 6], [0, 0, 1, 1, 0, 1])
    assert (second["input_ids"], second["loss_mask"]) == ([1, 2, 9, 5, 6, 7, 8], [0, 0, 0, 0, 0, 1, 1])
    assert [len(row["messages"]) for row in (first, second)] == [4, 6]
    assert (first["number"], first["tokens"], first["sequences"], second["sequence"]) == (7, 3, 2, 2)
