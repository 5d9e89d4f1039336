"""Chat template and loss mask: conversations as token sequences.

A conversation is {"messages": [{"role": ..., "content": ...}, ...]}. The loss mask covers exactly the tokens that the
assistant generated: from the first one after the generation prompt to the end-of-turn token, both included, in every
turn.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
from jinja2 import Environment, TemplateError
from jinja2.meta import find_undeclared_variables
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ...heads.checkpoints.save_load import differences
from ...inference import tokenizer_provenance
from ..config import template_variables
from ..console import log

GIVEN_BY_TRANSFORMERS = {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}
"""Variables and functions that transformers gives to every chat template."""


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
    template_kwargs: dict[str, Any] | None = None,
) -> list[Example]:
    """Tokenize a conversation into sequences of at most `max_length` tokens with loss masks.

    One sequence if the chat template renders earlier turns the same once later ones follow. Some templates do not
    (they drop the reasoning of earlier turns): then one sequence per answer, rendered as when the assistant generated
    it. `"finished": false` in the conversation says that its last answer was truncated, so that the end-of-turn token
    there is the template's and not the assistant's. `eos` are the tokens that end a turn.

    A row of tokens, `input_ids` and `loss_mask`, is one sequence as it is: nothing is rendered.
    """
    if conversation.get("input_ids") is not None:
        mask = [bool(own) for own in conversation["loss_mask"][:max_length]]
        return [Example(conversation["input_ids"][:max_length], mask)] if any(mask) else []
    messages, tools = conversation["messages"], conversation.get("tools")
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        return []
    spans: list[tuple[int, int]] = []
    texts: list[str] = []
    for turn in turns:
        prompt = render(tokenizer, messages[:turn], True, thinking, tools, template_kwargs)
        text = render(tokenizer, messages[: turn + 1], False, thinking, tools, template_kwargs)
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
    template_kwargs: dict[str, Any] | None = None,
) -> str:
    """Render messages as the text that the model reads; `template_kwargs` are further variables for the template."""
    variables = template_variables(thinking, template_kwargs)
    try:
        text = tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt, **variables
        )
    except (TemplateError, TypeError) as error:
        raise ValueError(f"the chat template refuses a conversation: {error}") from error
    assert isinstance(text, str)
    return text


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    thinking: bool | None = None,
    template_kwargs: dict[str, Any] | None = None,
    tools: list[Any] | None = None,
) -> Tensor:
    """Token ids, [1, time], after which the assistant answers the messages."""
    text = render(tokenizer, messages, True, thinking, tools, template_kwargs)
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


def data_origin(
    tokenizer: PreTrainedTokenizerBase, thinking: bool | None, template_kwargs: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Identity of the tokenizer and template options, which a head's checkpoint records.

    The same variables have the same origin, whichever of the two options set enable_thinking.
    """
    variables = template_variables(thinking, template_kwargs)
    enabled = variables.pop("enable_thinking", None)
    return {**tokenizer_provenance(tokenizer), "thinking": enabled, "template_kwargs": variables}


def warn_of_other_data(
    trained: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    thinking: bool | None,
    template_kwargs: dict[str, Any] | None = None,
) -> None:
    """Warn if prompts are tokenized or rendered otherwise than the head's training data."""
    if "thinking" in trained:  # a head that was trained before template_kwargs existed had none
        trained = {"template_kwargs": {}, **trained}
    for difference in differences(trained, data_origin(tokenizer, thinking, template_kwargs)):
        warnings.warn(f"the head may accept less here: {difference}", stacklevel=2)


def warn_of_unread_variables(
    tokenizer: PreTrainedTokenizerBase, thinking: bool | None, template_kwargs: dict[str, Any] | None = None
) -> None:
    """Log a warning, of one line, that names the variables that this tokenizer's chat template never reads."""
    variables = template_variables(thinking, template_kwargs)
    if not variables or not tokenizer.chat_template:
        return
    read = variables_read(tokenizer)
    unread = [f"{name} = {value!r}" for name, value in variables.items() if name not in read]
    if unread:
        others = ", ".join(sorted(read - GIVEN_BY_TRANSFORMERS - set(tokenizer.special_tokens_map))) or "none"
        log.warning(
            f"this tokenizer's chat template does not read {', '.join(unread)}, which changes nothing; variables that "
            f"it reads: {others}"
        )


def variables_read(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Names of the variables that the tokenizer's chat templates read and do not set themselves."""
    templates = tokenizer.chat_template
    texts = list(templates.values()) if isinstance(templates, dict) else [templates]
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    read: set[str] = set()
    for text in texts:
        plain = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", str(text))  # a tag of transformers' own
        read |= find_undeclared_variables(environment.parse(plain))
    return read


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Refuse a tokenizer from which no loss mask can be made."""
    if not tokenizer.chat_template:
        raise ValueError(f"the tokenizer of {name!r} has no chat template; conversations cannot be rendered for it")
    if not tokenizer.is_fast:
        raise ValueError(f"the tokenizer of {name!r} gives no character offsets; a fast tokenizer is needed")
