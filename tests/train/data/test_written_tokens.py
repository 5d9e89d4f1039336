"""What is trained on are the tokens that the model read and wrote, whatever its template does with
them later."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from messages import refused
from templates import ARGUMENTS, CALL, FAMILIES, TOOLS, Family, end_tokens, tokenizer_of
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers import decoders as token_decoders
from transformers import PreTrainedTokenizerFast

from headstart.inference.text.chat_template import prompt_ids
from headstart.train.data.chat_template import Example, encode, joined

REASONING = "one and two add\n\nthe numbers"
CONTENT = "the sum is three"

Turn = tuple[str, bool]
"""Words of an answer, and whether it calls a tool."""


def messages_of(
    family: Family, turns: list[Turn], form: str
) -> tuple[list[dict[str, Any]], list[str]]:
    """A conversation, and what the model wrote at each of its turns; `form` says how answers hold
    their reasoning, whether there is a system prompt, and whether a user has the last word."""
    messages: list[dict[str, Any]] = []
    if form != "no system":
        messages.append({"role": "system", "content": "add the numbers"})
    written = []
    for number, (content, calls) in enumerate(turns):
        if not messages or messages[-1]["role"] != "tool":
            messages.append({"role": "user", "content": f"one and two {number}?"})
        answer: dict[str, Any] = {"role": "assistant", "content": content}
        if family.reasons:
            if form == "tags":
                answer["content"] = f"<think>\n{REASONING}\n</think>\n\n{content}"
                if family.template == FAMILIES["deepseek-v3.1"].template:
                    answer["content"] = f"<think>{REASONING}</think>{content}"
            elif form == "tag of the prompt left out":
                answer["content"] = family.written(REASONING, content, False)
                for end in family.ends:
                    answer["content"] = answer["content"].removesuffix(end)
            else:
                answer["reasoning_content"] = REASONING
        if calls:
            answer["tool_calls"] = [CALL if form != "arguments as text" else AS_TEXT]
        messages.append(answer)
        written.append(family.written(REASONING if family.reasons else "", content, calls))
        if calls:
            messages.append({"role": "tool", "content": "3", "tool_call_id": CALL["id"]})
    if messages[-1]["role"] == "tool":
        messages.pop()
    if form == "open end":
        messages.append({"role": "user", "content": "and now?"})
    return messages, written


AS_TEXT = {**CALL, "function": {**CALL["function"], "arguments": ARGUMENTS}}


def asked(answer: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "one"}, {"role": "assistant", "content": answer}]


SHAPES: dict[str, list[Turn]] = {
    "one turn": [(CONTENT, False)],
    "three turns": [("one", False), (CONTENT, False), ("three\n\nthree", False)],
    "beyond ASCII": [("né 🎈🎈 日本", False)],
    "a tool": [("", True), (CONTENT, False)],
    "a turn, then a tool": [(CONTENT, False), ("", True), ("three", False)],
}
FORMS = (
    "apart",
    "no system",
    "open end",
    "tags",
    "tag of the prompt left out",
    "arguments as text",
)


def fitting_cases() -> list[tuple[str, str, str]]:
    """Families, shapes and forms that go together."""
    found = []
    for name, shape, form in itertools.product(FAMILIES, SHAPES, FORMS):
        family = FAMILIES[name]
        calls = any(calls for _, calls in SHAPES[shape])
        if (calls and not family.tools) or (form == "arguments as text" and not calls):
            continue
        if form == "tags" and (not family.reasons or "harmony" in name):
            continue
        if form == "tag of the prompt left out" and not (family.prefilled and family.reasons):
            continue
        found.append((name, shape, form))
    return found


def spans(example: Example) -> list[tuple[int, int]]:
    """First and last place of each run of answer tokens."""
    runs, place = [], 0
    for own, run in itertools.groupby(example.loss_mask):
        length = len(list(run))
        runs += [(place, place + length)] if own else []
        place += length
    return runs


def sequences(
    family: Family, messages: list[dict[str, Any]], tools: list[Any] | None = None
) -> list[tuple[str, list[str]]]:
    """The texts of a conversation's sequences, and of the answers in each."""
    tokenizer = tokenizer_of(family)
    found = []
    for example in encoded_by(family, tokenizer, {"messages": messages, "tools": tools}):
        parts = [example.tokens[start:stop] for start, stop in spans(example)]
        found.append((tokenizer.decode(example.tokens), [*map(tokenizer.decode, parts)]))
    return found


def encoded_by(family: Family, tokenizer: Any, row: dict[str, Any]) -> list[Example]:
    ends = end_tokens(family, tokenizer)
    return encode(row, tokenizer, ends, 10_000, template_kwargs=family.variables)


@pytest.mark.parametrize(("name", "shape", "form"), fitting_cases(), ids=lambda part: part)
def test_each_answer_is_trained_on_as_it_was_generated(name: str, shape: str, form: str) -> None:
    family = FAMILIES[name]
    tokenizer = tokenizer_of(family)
    messages, written = messages_of(family, SHAPES[shape], form)
    tools = TOOLS if family.tools else None
    expected = []
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    for turn, text in zip(turns, written, strict=True):
        prompt = prompt_ids(tokenizer, messages[:turn], None, family.variables, tools)[0].tolist()
        expected.append((prompt, tokenizer(text, add_special_tokens=False)["input_ids"]))
    examples = encoded_by(family, tokenizer, {"messages": messages, "tools": tools})
    found = [
        (example.tokens[:start], example.tokens[start:stop])
        for example in examples
        for start, stop in spans(example)
    ]
    assert found == expected, [tuple(map(tokenizer.decode, pair)) for pair in found]


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.prefilled])
def test_an_answer_without_reasoning_after_a_prompt_that_opened_it_is_refused(name: str) -> None:
    with refused("reasoning_content"):
        sequences(FAMILIES[name], asked(CONTENT))


def test_an_empty_block_of_reasoning_that_the_template_writes_is_not_the_models() -> None:
    empty = "<think>\n\n</think>\n\n"
    ((text, (answer,)),) = sequences(FAMILIES["qwen3"], asked(CONTENT))
    assert answer == CONTENT + "<|im_end|>" and (empty + answer) in text
    # Where the answer's text has the block, the model wrote it.
    ((_, (answer,)),) = sequences(FAMILIES["qwen3"], asked(empty + CONTENT))
    assert answer == f"{empty}{CONTENT}<|im_end|>"


def test_an_answer_of_weight_0_is_read_and_not_trained_on() -> None:
    messages, _ = messages_of(FAMILIES["chatml"], SHAPES["three turns"], "no system")
    messages[3]["weight"] = 0
    ((text, answers),) = sequences(FAMILIES["chatml"], messages)
    assert answers == ["one<|im_end|>", "three\n\nthree<|im_end|>"] and CONTENT in text
    messages[1]["weight"] = messages[5]["weight"] = 0
    assert sequences(FAMILIES["chatml"], messages) == []


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"a":1,  "unit":null}', '{"a":1,  "unit":null}'),
        ({"a": 1, "unit": None}, '{"a": 1, "unit": null}'),
    ],
)
def test_a_template_that_shows_arguments_as_they_are_gets_their_json_text(arguments, shown) -> None:
    template = (
        "{% for m in messages %}<s>{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments }}{% endfor %}"
        "</s>{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"
    )
    family = Family(template, lambda _, content, calls: content, ("</s>",))
    messages = asked("")
    function = {"name": "add", "arguments": arguments}
    messages[1]["tool_calls"] = [{"type": "function", "function": function}]
    ((text, _),) = sequences(family, messages)
    assert text == f"<s>one</s><s>{shown}</s>"


def test_words_that_look_like_arguments_do_not_change_their_form() -> None:
    family = FAMILIES["qwen3, no thinking"]
    messages, _ = messages_of(family, SHAPES["a tool"], "no system")
    messages[0]["content"] = f"add {CALL['function']['arguments']}"
    (text, _), *_ = sequences(family, messages[:2])
    assert '"arguments": {"a": 1, "unit": null}' in text


def word_tokenizer(prepend: str) -> PreTrainedTokenizerFast:
    """A tokenizer whose words carry their space, as SentencePiece's: `prepend` to each text, or the
    first."""
    merges = [("o", "n"), ("on", "e"), ("t", "w"), ("tw", "o"), ("▁", "one"), ("▁", "two")]
    words = ["<unk>", "▁", "\n", *"onetw", *(first + second for first, second in merges)]
    vocabulary = {word: i for i, word in enumerate(words)}
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend)
    backend.decoder = token_decoders.Metaspace(prepend_scheme=prepend)
    backend.add_special_tokens(["<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


@pytest.mark.parametrize("prepend", ["always", "first", "never"])
@pytest.mark.parametrize(
    ("prompt", "answer"), [("<s>one", " two</s>"), ("one ", "two</s>"), ("<s>one </s>", "two")]
)
def test_a_tokenizer_that_adds_spaces_gives_the_prompts_own_tokens_and_the_whole_text(
    prepend, prompt, answer
):
    tokenizer = word_tokenizer(prepend)
    first, rest = joined(tokenizer, prompt, answer)
    assert first == tokenizer(prompt, add_special_tokens=False)["input_ids"]
    whole = tokenizer(prompt + answer, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(first + rest) == tokenizer.decode(whole)


@pytest.mark.parametrize("bos", [True, False])
def test_without_a_template_a_completion_follows_its_prompt_as_in_generation(bos: bool) -> None:
    family = FAMILIES["llama3"]
    tokenizer = tokenizer_of(family)
    tokenizer.chat_template = None
    if bos:
        tokenizer.bos_token = "<s>"
        tokenizer.add_bos_token = True
    row = {"prompt": "one and", "completion": " two", "messages": []}
    prompt = tokenizer("one and")["input_ids"]
    answer = tokenizer(" two", add_special_tokens=False)["input_ids"]
    (example,) = encode(row, tokenizer, frozenset(), 100)
    assert example.tokens == [*prompt, *answer, tokenizer.eos_token_id]
    assert spans(example) == [(len(prompt), len(example.tokens))]
    (cut,) = encode({**row, "finished": False}, tokenizer, frozenset(), 100)
    assert cut.tokens == [*prompt, *answer]
    with refused("input_ids loss_mask"):
        encode({"messages": [{"role": "user", "content": "hi"}]}, tokenizer, frozenset(), 100)
