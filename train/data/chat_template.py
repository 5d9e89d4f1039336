"""Conversations to token batches: the chat template, the loss mask, padding.

A conversation is {"messages": [{"role": ..., "content": ...}, ...]}. The loss mask covers exactly what the assistant
wrote: from the first token after the generation prompt to the end-of-turn token, both included, in every turn.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from jinja2 import TemplateError
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from ...heads.checkpoints.save_load import differences
from ...inference import tokenizer_origin
from .conversations import check_conversation as check_conversation
from .conversations import open_file, open_source

T = TypeVar("T")


@dataclass(frozen=True)
class Example:
    """One sequence to train on."""

    tokens: list[int]
    loss_mask: list[bool]
    """True where the assistant wrote the token."""
    conversation: int = -1
    """Its place in the data, counted from 0 over all sources."""


@dataclass(frozen=True)
class Batch:
    """Right-padded rows of one or, packed, several sequences. B batch, T time."""

    tokens_BT: Tensor
    loss_mask_BT: Tensor
    lengths: tuple[tuple[int, ...], ...]
    """Of the sequences in each row."""
    conversations: tuple[int, ...] = ()
    """Which they are, by their place in the data."""
    states_BTLD: Tensor | None = None
    """The target's states as a cache stores them, if they were read ahead."""
    scales_BTL: Tensor | None = None
    """With states in int8: what their numbers are multiplied by."""

    def places(self) -> Iterator[tuple[int, slice]]:
        """The row and the place in it of every sequence."""
        for row, lengths in enumerate(self.lengths):
            for stop, length in zip(itertools.accumulate(lengths), lengths, strict=True):
                yield row, slice(stop - length, stop)

    @cached_property
    def positions_BT(self) -> Tensor | None:
        """Each token's place in its own sequence; None where every row is one."""
        if all(len(row) <= 1 for row in self.lengths):
            return None
        positions_BT = torch.arange(self.tokens_BT.shape[1]).repeat(len(self.lengths), 1)
        for row, place in self.places():
            positions_BT[row, place.start :] -= int(positions_BT[row, place.start])
        return positions_BT

    def pin_memory(self) -> Batch:
        """A copy from which a GPU reads while it computes; torch's DataLoader asks for it."""
        tensors = ("tokens_BT", "states_BTLD", "scales_BTL")
        found = {name: getattr(self, name) for name in tensors}
        pinned = replace(self, **{name: tensor.pin_memory() for name, tensor in found.items() if tensor is not None})
        if self.positions_BT is not None:
            pinned.__dict__["positions_BT"] = self.positions_BT.pin_memory()  # where cached_property keeps it
        return pinned


def read_conversations(source: str, limit: int | None = None) -> list[dict[str, Any]]:
    """The conversations of a source, as `messages`.

    Args:
        source: see `conversations`.
        limit: read only so many.

    Raises:
        ValueError: nothing at `source`, or something in it that is no conversation, with file and line number.
    """
    rows = itertools.islice(open_source(source, limit).read(), limit)
    return [check_conversation(row, where) for where, row in rows]


def read_sources(sources: list[str], limit: int | None = None) -> tuple[list[dict[str, Any]], list[int]]:
    """The first `limit` conversations of all sources together, and the number of the source of each.

    Raises:
        ValueError: see `read_conversations`.
    """
    rows: list[dict[str, Any]] = []
    numbers: list[int] = []
    for number, source in enumerate(sources):
        found = read_conversations(source, None if limit is None else limit - len(rows))
        rows += found
        numbers += [number] * len(found)
    return rows, numbers


def encode(
    conversation: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    eos: frozenset[int],
    max_length: int,
    thinking: bool | None = None,
) -> list[Example]:
    """A conversation as sequences of tokens with their loss masks.

    One sequence, if the chat template renders earlier turns the same once later ones follow. Some templates do not
    (they drop the reasoning of earlier turns): then one sequence per answer, each rendered as it was when the
    assistant wrote it.

    Args:
        conversation: see the module's docstring. `"finished": false` says that the last answer was cut off, so that
            its end-of-turn token is the template's and not the assistant's.
        tokenizer: with a chat template.
        eos: ids of the tokens that end a turn.
        max_length: tokens after which a sequence is cut.
        thinking: see `render`.

    Raises:
        ValueError: a template whose answers do not start where its generation prompt ends.
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
    cut_off = conversation.get("finished") is False
    if all(texts[-1].startswith(text) for text in texts):
        groups = [(texts[-1], spans)]
    else:
        groups = [(text, [span]) for text, span in zip(texts, spans, strict=True)]
    examples = [_encode_text(text, marked, tokenizer, eos, cut_off and text is texts[-1]) for text, marked in groups]
    cut = [Example(example.tokens[:max_length], example.loss_mask[:max_length]) for example in examples]
    return [example for example in cut if any(example.loss_mask)]


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    add_generation_prompt: bool = False,
    thinking: bool | None = None,
    tools: list[Any] | None = None,
) -> str:
    """Messages as the text that the model sees.

    Args:
        tokenizer: with a chat template.
        messages: see the module's docstring; transformers leaves out what is null, such as content beside tool calls.
        add_generation_prompt: end where the assistant's answer begins.
        thinking: the template's `enable_thinking`; None leaves it out.
        tools: what the assistant may call, as JSON schemas.

    Raises:
        ValueError: the template refuses the messages.
    """
    asked: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
    try:
        text = tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt, **asked
        )
    except (TemplateError, TypeError) as error:
        raise ValueError(f"the chat template refuses a conversation: {error}") from error
    assert isinstance(text, str)
    return text


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], thinking: bool | None = None
) -> Tensor:
    """Messages as the tokens after which the assistant answers: ids_1T."""
    text = render(tokenizer, messages, True, thinking)
    ids: Tensor = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    return ids


def check_lengths(prompts: list[Tensor], new_tokens: int, positions: int, where: str) -> None:
    """Refuse prompts that leave no room for their answers.

    Raises:
        ValueError: naming the first such prompt and the numbers.
    """
    for number, ids_1T in enumerate(prompts, start=1):
        if ids_1T.shape[1] + new_tokens > positions:
            raise ValueError(
                f"{where}: prompt {number} has {ids_1T.shape[1]} tokens, which with {new_tokens} new ones do not fit "
                f"the model's {positions} positions"
            )


def data_origin(tokenizer: PreTrainedTokenizerBase, thinking: bool | None) -> dict[str, Any]:
    """What a head remembers of how its data became tokens."""
    return {**tokenizer_origin(tokenizer), "thinking": thinking}


def warn_of_other_data(trained: dict[str, Any], tokenizer: PreTrainedTokenizerBase, thinking: bool | None) -> None:
    """Say in what prompts reach the model differently than the head's training data did."""
    for difference in differences(trained, data_origin(tokenizer, thinking)):
        warnings.warn(f"the head may accept less here: {difference}", stacklevel=2)


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Refuse a tokenizer from which no loss mask can be made.

    Raises:
        ValueError: no chat template, or no character offsets.
    """
    if not tokenizer.chat_template:
        raise ValueError(f"the tokenizer of {name!r} has no chat template; conversations cannot be rendered for it")
    if not tokenizer.is_fast:
        raise ValueError(f"the tokenizer of {name!r} gives no character offsets; a fast tokenizer is needed")


def split_held_out(examples: Sequence[T], share: float, seed: int, most: int | None = None) -> tuple[list[T], list[T]]:
    """Shuffle once and set a share aside, at most so many; at least one is on each side.

    Raises:
        ValueError: fewer than two examples.
    """
    if len(examples) < 2:
        raise ValueError(f"{len(examples)} conversations with assistant turns; training needs at least 2")
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(seed)).tolist()
    held_out = min(max(1, round(share * len(examples))), len(examples) - 1, most or len(examples))
    return [examples[i] for i in order[held_out:]], [examples[i] for i in order[:held_out]]


def count_answer_tokens(examples: Sequence[Example], vocab_size: int) -> Tensor:
    """How often each token is an answer token: counts_V."""
    tokens = [
        token for example in examples for token, own in zip(example.tokens, example.loss_mask, strict=True) if own
    ]
    return torch.bincount(torch.tensor(tokens, dtype=torch.int64), minlength=vocab_size)


def collate(examples: Sequence[Example]) -> Batch:
    """One sequence in each row; see `collate_rows`."""
    return collate_rows([[example] for example in examples])


def collate_rows(rows: list[list[Example]], least: int = 1) -> Batch:
    """Pad on the right; padding is no answer, and a causal model's earlier tokens never see it.

    Args:
        rows: the sequences that stand in each row; no rows at all give one of nothing but padding.
        least: tokens that a row has at least.
    """
    tokens, masks = [torch.zeros(least, dtype=torch.int64)], [torch.zeros(least, dtype=torch.bool)]
    for row in rows:
        tokens.append(torch.tensor([token for example in row for token in example.tokens]))
        # A sequence's first token cannot be guessed from the one before it in its row.
        own = [[False, *example.loss_mask[1:]] if number else example.loss_mask for number, example in enumerate(row)]
        masks.append(torch.tensor(list(itertools.chain.from_iterable(own))))
    kept = slice(1 if rows else 0, None)  # the row of padding is only there to be as long as `least`
    return Batch(
        pad_sequence(tokens, batch_first=True)[kept],
        pad_sequence(masks, batch_first=True)[kept],
        tuple(tuple(len(example.tokens) for example in row) for row in rows) or ((),),
        tuple(example.conversation for row in rows for example in row),
    )


def read_prompts(path: str | Path, limit: int | None = None) -> list[list[dict[str, str]]]:
    """The prompts of a file, each as the messages before an answer.

    A row is a conversation in any format (a last assistant message is left out), {"turns": [...]} as in Spec-Bench
    (the first turn is the prompt), or {"prompt": ...}.

    Raises:
        ValueError: no file, or a row that is none of these, with its number.
    """
    prompts: list[list[dict[str, str]]] = []
    for where, row in itertools.islice(open_file(str(path)).read(), limit):
        turns = row.get("turns") if isinstance(row, dict) else None
        text = turns[0] if isinstance(turns, list) and turns else row.get("prompt") if isinstance(row, dict) else None
        if isinstance(text, str):
            prompts.append([{"role": "user", "content": text}])
            continue
        messages = check_conversation(row, where)["messages"]
        prompts.append(messages[:-1] if messages[-1]["role"] == "assistant" else messages)
    return prompts


def _encode_text(
    text: str,
    spans: list[tuple[int, int]],
    tokenizer: PreTrainedTokenizerBase,
    eos: frozenset[int],
    cut_off: bool,
) -> Example:
    """Tokenize a rendered conversation and mark the tokens that start within an answer's span of characters.

    A span runs to the end of what the template adds after the answer. What the assistant itself wrote ends with the
    end-of-turn token, so everything behind that is unmarked.
    """
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    tokens: list[int] = list(encoded["input_ids"])
    starts_T, stops_T = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2).T
    ends_turn_T = np.isin(tokens, list(eos))
    mask_T = np.zeros(len(tokens), dtype=bool)
    for number, (first, last) in enumerate(spans):
        inside_T = (first <= starts_T) & (starts_T < last) & (stops_T > first)
        ends = np.flatnonzero(inside_T & ends_turn_T)
        if len(ends):
            is_cut = cut_off and number == len(spans) - 1
            inside_T[ends[0] + (0 if is_cut else 1) :] = False
        mask_T |= inside_T
    return Example(tokens, mask_T.tolist())
