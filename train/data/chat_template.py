"""Chat template and loss mask: conversations as token sequences.

A conversation is {"messages": [{"role": ..., "content": ...}, ...]}. The loss mask covers exactly
the tokens that the assistant generated: from the first one after the generation prompt to the
end-of-turn token, both included, in every turn. A sequence holds the tokens that the model read and
wrote at that turn: the prompt is rendered and tokenized as for generation, and the answer follows
it. So templates may render the past in another way than the present (drop its reasoning, move the
system prompt): such a conversation becomes several sequences.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from ...inference.text.chat_template import (
    GENERATION_TAG,
    TEMPLATE_ERRORS,
    message_forms,
    reasoning_of,
    render,
)
from ...options import template_variables

REASONING_TAGS = (
    ("<think>", "</think>"),
    ("<thought>", "</thought>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
)
"""Tags around an answer's reasoning. Some generation prompts end in the first."""


@dataclass(frozen=True)
class Example:
    """One sequence to train on."""

    tokens: list[int]
    loss_mask: list[bool]
    """True where the assistant generated the token."""
    conversation: int = -1
    """Index of its conversation, over all sources."""

    @classmethod
    def of_row(cls, row: dict[str, Any]) -> Example:
        """Take the sequence of a row with `input_ids` and a `loss_mask` of zeros and ones."""
        return cls(list(row["input_ids"]), [bool(mark) for mark in row["loss_mask"]])

    @property
    def prompt(self) -> list[int]:
        """The tokens before the first answer."""
        return self.tokens[: self.loss_mask.index(True)]

    def truncated(self, length: int) -> Example:
        """Cut the sequence to its first `length` tokens."""
        return Example(self.tokens[:length], self.loss_mask[:length], self.conversation)


def encode(
    conversation: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    eos: frozenset[int],
    max_length: int,
    thinking: bool | None = None,
    template_kwargs: dict[str, Any] | None = None,
) -> list[Example]:
    """Tokenize a conversation into sequences of at most `max_length` tokens with loss masks.

    The arguments are those of `whole_sequences`. A sequence of which no answer token is left is
    left out.
    """
    whole = whole_sequences(conversation, tokenizer, eos, thinking, template_kwargs)
    return cut_to(whole, max_length)


def cut_to(examples: Sequence[Example], length: int) -> list[Example]:
    """Cut sequences to `length` tokens; those without an answer token there are left out."""
    return [each.truncated(length) for each in examples if any(each.loss_mask[:length])]


def whole_sequences(
    conversation: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    eos: frozenset[int],
    thinking: bool | None = None,
    template_kwargs: dict[str, Any] | None = None,
) -> list[Example]:
    """Tokenize a conversation into sequences with loss masks.

    The result is one sequence if the chat template renders earlier turns the same once later ones
    follow. Some templates do not (they drop the reasoning of earlier turns): then an answer has a
    sequence of its own, with the prompt as it was when the assistant generated it.
    `"finished": false` in the conversation says that its last answer was truncated, so that the
    end-of-turn token there is the template's and not the assistant's. An assistant message with
    `"weight": 0` is read and not trained on. `eos` are the tokens that end a turn.

    A row of tokens, `input_ids` and `loss_mask`, becomes one sequence unchanged. Without a chat
    template, a `prompt` and its `completion`, both texts, are tokenized without rendering.

    Raises:
        ValueError: the template refuses the conversation, or the assistant's tokens cannot be told
            apart.
    """
    if conversation.get("input_ids") is not None:
        return [Example.of_row(conversation)]
    truncated = conversation.get("finished") is False
    if not tokenizer.chat_template:
        return [_completion(conversation, tokenizer, truncated)]
    messages = conversation["messages"]
    tools = conversation.get("tools")
    variables = template_variables(thinking, template_kwargs)
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    sequences: list[Example] = []
    written = 0  # tokens of the last sequence up to the end of its last answer
    for turn in turns:
        # 1. Tokenize the prompt as the model read it, and the answer after it.
        prompt, answer = _prompt_and_answer(tokenizer, messages[: turn + 1], variables, tools)
        prompt_tokens, answer_tokens = joined(tokenizer, prompt, answer)

        # 2. The model wrote the answer up to its end-of-turn token. What follows is the template's,
        # as the line feed in "Hi <|im_end|> \n".
        end = next((i for i, token in enumerate(answer_tokens) if token in eos), None)
        stop = len(answer_tokens)
        if end is not None:
            stop = end if truncated and turn == turns[-1] else end + 1
        trained = messages[turn].get("weight") != 0
        tokens = prompt_tokens + answer_tokens
        mask = [False] * len(prompt_tokens)
        mask += [trained and i < stop for i in range(len(answer_tokens))]

        # 3. If this sequence begins with all of the last one, it takes that one's place:
        #     last   user answer             mask 0 1
        #     this   user answer user answer mask 0 0 0 1  ->  0 1 0 1
        if sequences and tokens[:written] == sequences[-1].tokens[:written]:
            mask[:written] = sequences[-1].loss_mask[:written]
            sequences.pop()
        sequences.append(Example(tokens, mask))
        written = len(prompt_tokens) + stop
    return [example for example in sequences if any(example.loss_mask)]


def _completion(
    conversation: dict[str, Any], tokenizer: PreTrainedTokenizerBase, truncated: bool
) -> Example:
    """Tokenize a prompt and its completion, both texts, without a chat template."""
    prompt = conversation.get("prompt")
    completion = conversation.get("completion")
    if not isinstance(prompt, str) or not isinstance(completion, str):
        raise ValueError(f"the tokenizer has no chat template{NEEDS_NO_TEMPLATE}")
    prompt_tokens, answer_tokens = joined(tokenizer, prompt, completion, add_special_tokens=True)
    # No template ends the turn, so that a finished answer gets its end token here.
    if not truncated and tokenizer.eos_token_id is not None:
        answer_tokens = [*answer_tokens, tokenizer.eos_token_id]
    mask = [False] * len(prompt_tokens) + [True] * len(answer_tokens)
    return Example(prompt_tokens + answer_tokens, mask)


def _prompt_and_answer(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    variables: dict[str, Any],
    tools: list[Any] | None,
) -> tuple[str, str]:
    """Return the text that the model read before the last message, and the text it then wrote.

    What it wrote runs to the end of the rendering, so the template's text after the end of the turn
    comes with it.
    """
    before = messages[:-1]
    message = messages[-1]
    # The same conversation twice: with a generation prompt, and with the answer.
    #     prompt  <user>Hi<assistant>
    #     full    <user>Hi<assistant>Hello<end>
    prompt = render(tokenizer, before, True, tools=tools, template_kwargs=variables)
    full, marked = _marked(tokenizer, messages, variables, tools)
    # The tags of a prompt that opens the reasoning, such as <assistant><think>.
    tags = next((tags for tags in REASONING_TAGS if prompt.rstrip().endswith(tags[0])), None)

    # 1. Most templates: the rendering begins with the prompt. A template may put an empty block of
    # reasoning between the two, which the model read and did not write.
    if full.startswith(prompt):
        answer = full[len(prompt) :]
        skipped = _added_reasoning(answer, message, tags)
        if marked is not None and marked > len(prompt) and full[len(prompt) : marked].strip():
            skipped = max(skipped, marked - len(prompt))
        return prompt + answer[:skipped], answer[skipped:]

    # 2. The template says where the answer begins.
    if marked is not None:
        return prompt, full[marked:]

    # 3. The prompt opens the reasoning, which the rendering leaves out.
    if tags is not None:
        beginning = prompt[: prompt.rindex(tags[0])]
        if full.startswith(beginning):
            rendered = full[len(beginning) :]
            space = prompt[len(beginning) + len(tags[0]) :]
            return prompt, _opened(rendered, message, tags, space)

    # 4. The past is rendered in another way. Look for the prompt's end, from the words of the last
    # message on, before the answer's last occurrence.
    last = before[-1].get("content") if before else None
    words = last.strip() if isinstance(last, str) else ""
    if words and words in prompt:
        tail = prompt[prompt.rindex(words) :]
        content = message.get("content")
        stop = len(full)
        if isinstance(content, str) and content.strip():
            found_at = full.rfind(content.strip())
            stop = found_at if found_at >= 0 else len(full)
        start = full.rfind(tail, 0, stop)
        if start >= 0:
            return prompt, full[start + len(tail) :]
    raise ValueError(
        "the chat template does not continue its own generation prompt with the answer, so the"
        f" assistant's tokens cannot be told apart: {prompt[-60:]!r} is followed by"
        f" {full[max(0, len(prompt) - 60) :][:60]!r}; give rows of tokens (input_ids and loss_mask,"
        " as `headstart data` writes them), or a template that marks what the assistant writes"
        " with {% generation %}"
    )


def _added_reasoning(answer: str, message: dict[str, Any], opened: tuple[str, str] | None) -> int:
    """Return the length of the empty reasoning block that a template put before an answer.

    In characters; 0 without such a block.

    Raises:
        ValueError: the generation prompt opened the block.
    """
    content = message.get("content") or ""
    if reasoning_of(message).strip():
        return 0
    for first, last in REASONING_TAGS:
        # "<think>\n\n</think>\n\n", or the same without its first tag if the prompt has it.
        block = re.match(rf"\s*({re.escape(first)}\s*)?{re.escape(last)}\s*", answer)
        if block is None or last in content:
            continue
        if opened is not None:
            raise _no_reasoning(opened[0])
        return block.end()
    return 0


def _opened(rendered: str, message: dict[str, Any], tags: tuple[str, str], space: str) -> str:
    """Return the text that the model wrote after a generation prompt that opened the reasoning.

    `rendered` is the template's rendering of the answer, without its reasoning; `space` follows the
    tag in the prompt.
    """
    first, last = tags
    # 1. The reasoning and the answer: two fields of the message, or one text with tags.
    content = message.get("content") or ""
    reasoning = reasoning_of(message)
    if reasoning.strip():
        thoughts = reasoning if reasoning.endswith(space) else reasoning + space
        answer = content
    elif last in content:
        thoughts, _, answer = content.partition(last)
        thoughts = thoughts.split(first)[-1].removeprefix(space)
    else:
        raise _no_reasoning(first)

    # 2. What the template renders of the answer, end-of-turn token included.
    rest = re.sub(rf"^\s*({re.escape(first)}\s*)?{re.escape(last)}", "", rendered)

    # 3. The space after the last tag. Where the message does not tell, models that write a line
    # feed after the first tag write two after the last.
    between = answer[: len(answer) - len(answer.lstrip())]
    if not between and reasoning.strip():
        between = 2 * space
    return thoughts + last + between + rest.lstrip()


def _no_reasoning(tag: str) -> ValueError:
    return ValueError(
        f"the generation prompt ends in {tag}, and the answer holds no reasoning, so the model did"
        " not write it after this prompt; give the reasoning as reasoning_content, give rows of"
        " tokens (input_ids and loss_mask, as `headstart data` writes them), or set data.thinking"
        " or data.template_kwargs so that the template opens none"
    )


def _marked(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    variables: dict[str, Any],
    tools: list[Any] | None,
) -> tuple[str, int | None]:
    """Render messages, and find where the last span that the template marks begins.

    The template marks what the assistant writes. The index counts characters; None without a mark.
    """
    text = render(tokenizer, messages, tools=tools, template_kwargs=variables)
    template = tokenizer.get_chat_template(None, tools)
    if not GENERATION_TAG.search(template):
        return text, None
    # Templates differ in the form of messages that they take, see `message_forms`.
    for form in message_forms(messages):
        try:
            rendered: Any = render_jinja_template(
                conversations=[form],
                tools=tools,
                chat_template=template,
                return_assistant_tokens_mask=True,
                **{**tokenizer.special_tokens_map, **variables},
            )
        except TEMPLATE_ERRORS:
            continue
        # The texts and marked spans of several conversations, here of one.
        (form_text,), (spans,) = rendered
        if form_text == text and spans:
            return text, int(spans[-1][0])
    return text, None


def joined(
    tokenizer: PreTrainedTokenizerBase, prompt: str, answer: str, add_special_tokens: bool = False
) -> tuple[list[int], list[int]]:
    """Tokenize a prompt as for generation, and the answer after it.

    Where one token would span both, the answer is tokenized alone: the model began it after the
    prompt's last token. `add_special_tokens` adds the tokenizer's own at the beginning of the
    prompt.
    """
    # 1. Tokenize both together, and split after the prompt's tokens.
    texts = [prompt, prompt + answer]
    try:
        prompt_tokens, whole = tokenizer(texts, add_special_tokens=add_special_tokens)["input_ids"]
    except TypeError as error:  # half of a surrogate pair, which JSON may hold and UTF-8 may not
        raise ValueError(
            f"the tokenizer {tokenizer.name_or_path!r} cannot read the text: {error}"
        ) from error
    if whole[: len(prompt_tokens)] == prompt_tokens:
        return prompt_tokens, whole[len(prompt_tokens) :]

    # 2. A token spans both, such as "\n\n" where each has one of the line feeds. Tokenize the
    # answer alone. Some tokenizers add a space to the beginning of a text: then it stands after an
    # anchor that keeps its own token. The text must come out the same.
    expected = whole_text(tokenizer, whole)
    for anchor in ("", "\n", tokenizer.eos_token or ""):
        first, both = tokenizer([anchor, anchor + answer], add_special_tokens=False)["input_ids"]
        answer_tokens = both[len(first) :]
        text = whole_text(tokenizer, prompt_tokens + answer_tokens)
        if both[: len(first)] == first and text == expected:
            return prompt_tokens, answer_tokens
    raise ValueError(
        f"the tokenizer joins the end of the prompt, {prompt[-20:]!r}, with the beginning of the"
        f" answer, {answer[:20]!r}, and cannot tokenize them apart; give rows of tokens (input_ids"
        " and loss_mask)"
    )


def whole_text(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> str:
    """Decode tokens to their whole text, special tokens included."""
    return str(
        tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    )


NEEDS_NO_TEMPLATE = (
    "; give rows of tokens (input_ids and loss_mask), or of a prompt and a completion, both texts,"
    " which are tokenized as they are"
)
"""What can be trained on without a chat template."""
