"""Chat template and loss mask: conversations as token sequences.

A conversation is {"messages": [{"role": ..., "content": ...}, ...]}. The loss mask covers exactly the tokens that the
assistant generated: from the first one after the generation prompt to the end-of-turn token, both included, in every
turn.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ...heads.checkpoints.save_load import differences
from ...inference import tokenizer_provenance


@dataclass(frozen=True)
class Example:
    """One sequence to train on."""

    tokens: list[int]
    loss_mask: list[bool]
    """True where the assistant generated the token."""
    conversation: int = -1
    """Index of its conversation, over all sources."""


def encode(
    conversation: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    eos: frozenset[int],
    max_length: int,
    thinking: bool | None = None,
) -> list[Example]:
    """Tokenize a conversation into sequences of at most `max_length` tokens with loss masks.

    One sequence if the chat template renders earlier turns the same once later ones follow. Some templates do not
    (they drop the reasoning of earlier turns): then one sequence per answer, rendered as when the assistant generated
    it. `"finished": false` in the conversation says that its last answer was truncated, so that the end-of-turn token
    there is the template's and not the assistant's. `eos` are the tokens that end a turn.
    """
    messages, tools = conversation["messages"], conversation.get("tools")
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        return []
    spans: list[tuple[int, int]] = []
    texts: list[str] = []
    for turn in turns:
        prompt = render(tokenizer, messages[:turn], True, thinking, tools)
        text = render(tokenizer, messages[: turn + 1], False, thinking, tools)
        if not text.startswith(prompt):
            raise ValueError(
                "the chat template does not continue its own generation prompt with the answer, so the assistant's "
                f"tokens cannot be told apart: {prompt[-60:]!r} is followed by "
                f"{text[max(0, len(prompt) - 60) :][:60]!r}"
            )
        spans.append((len(prompt), len(text)))
        texts.append(text)
    groups = [(text, [span]) for text, span in zip(texts, spans, strict=True)]
    if all(texts[-1].startswith(text) for text in texts):
        groups = [(texts[-1], spans)]
    examples = []
    for text, marked in groups:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        tokens: list[int] = list(encoded["input_ids"])
        starts_T, stops_T = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2).T
        ends_turn_T = np.isin(tokens, list(eos))
        mask_T = np.zeros(len(tokens), dtype=bool)
        for span in marked:
            first, last = span
            # A span runs to the end of what the template adds after the answer; the assistant's own tokens end with
            # the end-of-turn token.
            inside_T = (first <= starts_T) & (starts_T < last) & (stops_T > first)
            ends = np.flatnonzero(inside_T & ends_turn_T)
            if len(ends):
                truncated = conversation.get("finished") is False and span is spans[-1]
                inside_T[ends[0] + (0 if truncated else 1) :] = False
            mask_T |= inside_T
        examples.append(Example(tokens[:max_length], mask_T[:max_length].tolist()))
    return [example for example in examples if any(example.loss_mask)]


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    add_generation_prompt: bool = False,
    thinking: bool | None = None,
    tools: list[Any] | None = None,
) -> str:
    """Render messages as the text that the model reads."""
    options: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
    try:
        text = tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt, **options
        )
    except (TemplateError, TypeError) as error:
        raise ValueError(f"the chat template refuses a conversation: {error}") from error
    assert isinstance(text, str)
    return text


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], thinking: bool | None = None
) -> Tensor:
    """Token ids, [1, time], after which the assistant answers the messages."""
    text = render(tokenizer, messages, True, thinking)
    ids: Tensor = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    return ids


def check_lengths(prompts: list[Tensor], new_tokens: int, positions: int, where: str) -> None:
    """Refuse prompts that leave no room for their answers."""
    for number, ids_1T in enumerate(prompts, start=1):
        if ids_1T.shape[1] + new_tokens > positions:
            raise ValueError(
                f"{where}: prompt {number} has {ids_1T.shape[1]} tokens, which with {new_tokens} new ones do not fit "
                f"the model's {positions} positions"
            )


def data_origin(tokenizer: PreTrainedTokenizerBase, thinking: bool | None) -> dict[str, Any]:
    """Identity of the tokenizer and template options, which a head's checkpoint records."""
    return {**tokenizer_provenance(tokenizer), "thinking": thinking}


def warn_of_other_data(trained: dict[str, Any], tokenizer: PreTrainedTokenizerBase, thinking: bool | None) -> None:
    """Warn if prompts are tokenized or rendered otherwise than the head's training data."""
    for difference in differences(trained, data_origin(tokenizer, thinking)):
        warnings.warn(f"the head may accept less here: {difference}", stacklevel=2)


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Refuse a tokenizer from which no loss mask can be made."""
    if not tokenizer.chat_template:
        raise ValueError(f"the tokenizer of {name!r} has no chat template; conversations cannot be rendered for it")
    if not tokenizer.is_fast:
        raise ValueError(f"the tokenizer of {name!r} gives no character offsets; a fast tokenizer is needed")
