"""Answers as the model wrote them: token ids, and a message for people and chat templates.

The ids are what is trained on. Text cannot take their place: decoding drops special tokens,
templates strip white space and leave out the reasoning of earlier turns, and a tokenizer may divide
the same text into other tokens.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from ...inference.text.messages import check_conversation, user_turns
from ...options import shown
from ..config import SelfMadeConfig
from .chat_template import REASONING_TAGS, whole_text
from .conversations import distinct_share, open_file
from .token_cache import UnusedRow

PROMPT_END = 32
"""Tokens at the end of a prompt that are searched for a tag that opens the reasoning."""
HARMONY_PART = re.compile(
    r"(?:<\|channel\|>(?P<channel>\w+)[^<]*)?(?:<\|constrain\|>[^<]*)?<\|message\|>(?P<text>.*?)"
    r"(?=<\|(?:start|end|return|call|channel)\|>|\Z)",
    re.DOTALL,
)
"""A part of an answer in OpenAI's Harmony format, with its channel: analysis, commentary or
final."""
TOOL_CALLS = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<|call|>", "<｜tool▁calls▁begin｜>")
"""What opens a tool call in the answers of Qwen and Hermes, Mistral, Llama, gpt-oss, and
DeepSeek."""


@dataclass(frozen=True)
class Answer:
    """One answer of the model."""

    message: dict[str, Any]
    """The answer as a message of the assistant."""
    finished: bool
    """Whether the model ended it by itself."""
    calls_tool: bool
    """Whether it calls a tool, after which the tool's result must follow, and not the user."""
    length: int
    """Number of tokens that the model wrote."""
    prompt: list[int] = field(default_factory=list)
    """Token ids after which it was written."""
    tokens: list[int] = field(default_factory=list)
    """Token ids that the model wrote, its end-of-turn token included; empty where only the text is
    known."""


@dataclass
class Conversation:
    """A conversation whose turns the model answers one after the other."""

    columns: dict[str, Any]
    """Columns that its rows have besides the answers."""
    turns: list[list[dict[str, Any]]]
    """What is said before each answer."""
    tools: list[Any] | None = None
    """Tools that the chat template describes."""
    answers: list[Answer] = field(default_factory=list)
    """The answers so far."""
    ended: bool = False
    """True once no more turns are answered, because an answer was not usable."""

    @property
    def goes_on(self) -> bool:
        """Whether there is a turn to answer, and nothing prevents it."""
        if self.ended or len(self.answers) == len(self.turns):
            return False
        # After an answer that was cut off, or that waits for a tool, the user says nothing.
        return not self.answers or (self.answers[-1].finished and not self.answers[-1].calls_tool)

    @property
    def history(self) -> list[dict[str, Any]]:
        """All messages up to the next answer, or up to the last one."""
        messages: list[dict[str, Any]] = []
        # turn 0, answer 0, turn 1, answer 1, turn 2 (which is to be answered)
        for number, turn in enumerate(self.turns[: len(self.answers) + 1]):
            messages += turn
            if number < len(self.answers):
                messages.append(self.answers[number].message)
        return messages

    def token_rows(self, tokenizer: str) -> list[dict[str, Any]]:
        """Return the conversation's rows in the file: as few token sequences as possible.

        Together they hold every answer after its own prompt. A sequence holds several answers where
        the prompt of a later one begins with the tokens of the earlier one. A template that renders
        an earlier turn differently once later ones follow begins another sequence, and row.
        `tokenizer` is the tokenizer's fingerprint, of `tokenizer_provenance`.
        """
        rows: list[dict[str, Any]] = []
        ids: list[int] = []
        mask: list[int] = []
        messages: list[dict[str, Any]] = []
        for turn, answer in zip(self.turns, self.answers, strict=False):
            messages = [*messages, *turn, answer.message]
            # Does this answer's prompt go on from the last sequence?
            #     last row  p p a a         mask 0 0 1 1
            #     this row  p p a a q a     mask 0 0 1 1 0 1, in its place
            if ids and answer.prompt[: len(ids)] == ids:
                rows.pop()
            else:
                mask = []
            unwritten = [0] * (len(answer.prompt) - len(mask))
            mask = [*mask, *unwritten, *([1] * len(answer.tokens))]
            ids = [*answer.prompt, *answer.tokens]
            row = {
                **self.columns,
                "finished": answer.finished,
                "tokens": sum(mask),
                "messages": messages,
            }
            rows.append({**row, "input_ids": ids, "loss_mask": mask, "tokenizer": tokenizer})
        # By these numbers a reader puts the rows of a conversation together again.
        if len(rows) > 1:
            rows = [
                {**row, "sequence": number, "sequences": len(rows)}
                for number, row in enumerate(rows, start=1)
            ]
        return rows

    def text_row(self) -> dict[str, Any]:
        """Return its row in the file where no token ids are known."""
        messages: list[dict[str, Any]] = []
        for turn, answer in zip(self.turns, self.answers, strict=False):
            messages += [*turn, answer.message]
        length = sum(answer.length for answer in self.answers)
        finished = self.answers[-1].finished
        return {**self.columns, "finished": finished, "tokens": length, "messages": messages}


def turns_to_answer(messages: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Split a conversation into the messages before each answer, and drop its own answers.

    Those are another model's, and each turn is answered anew on the new history. The last turn is
    the one before the first tool result: it belongs to a call that this model may not make.
    """
    # system user assistant user assistant tool user  ->  [system user] [user]
    turns: list[list[dict[str, Any]]] = [[]]
    for message in messages:
        if message["role"] == "tool":
            break
        if message["role"] != "assistant":
            turns[-1].append(message)
        elif _holds_user(turns[-1]):
            turns.append([])
    return turns if _holds_user(turns[-1]) else turns[:-1]


def _holds_user(messages: list[dict[str, Any]]) -> bool:
    return any(message["role"] == "user" for message in messages)


def readable(
    tokenizer: PreTrainedTokenizerBase, prompt: list[int], tokens: list[int], ends: frozenset[int]
) -> dict[str, Any]:
    """Decode an answer to a message of the assistant.

    The reasoning is separated, as `reasoning_content`, if the answer holds it between tags that the
    template knows (<think> and </think>), or in the channels of Harmony. White space stays as it
    was written, except the line breaks around reasoning, which templates add.

    Args:
        prompt: token ids before the answer; some templates open the reasoning there.
        ends: tokens that end a turn.
    """
    body = tokens[:-1] if tokens and tokens[-1] in ends else tokens
    text = whole_text(tokenizer, body)
    template = str(tokenizer.chat_template)
    reasoning = ""
    content = text
    # Harmony: <|channel|>analysis<|message|>...<|end|> and others; the analysis is the reasoning.
    if "<|channel|>" in template and "<|message|>" in text:
        parts = list(HARMONY_PART.finditer(text))
        thoughts = [part["text"] for part in parts if part["channel"] == "analysis"]
        others = [part["text"] for part in parts if part["channel"] != "analysis"]
        reasoning = "\n".join(thoughts)
        content = "\n".join(others)
    # Tags: the answer opens them itself, or the end of its prompt has done so.
    for first, last in REASONING_TAGS:
        if last not in template:
            continue
        opened = whole_text(tokenizer, prompt[-PROMPT_END:]).rstrip().endswith(first)
        if opened or text.lstrip().startswith(first):
            inside = text if opened else text.lstrip().removeprefix(first)
            reasoning, _, content = inside.partition(last)
            content = content.lstrip("\n")
    # As decoding with `skip_special_tokens` does.
    special = _special_tokens(tokenizer)
    message = {"role": "assistant", "content": special.sub("", content)}
    reasoning = special.sub("", reasoning).strip("\n")
    return {**message, "reasoning_content": reasoning} if reasoning else message


@lru_cache(maxsize=4)
def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """A pattern of the special tokens in a text."""
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    special |= set(tokenizer.all_special_tokens)
    # A pattern takes the first alternative that fits, so a token that begins like a shorter one
    # must come before it. Without special tokens the pattern fits nothing.
    longest_first = sorted(map(re.escape, special), key=len, reverse=True)
    return re.compile("|".join(longest_first) or r"(?!)")


def calls_tool(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> bool:
    """Whether an answer calls a tool, after which its result must follow, and not the user."""
    text = whole_text(tokenizer, tokens)
    return any(mark in text for mark in TOOL_CALLS)


def is_usable(text: str, units: Sequence[object], finished: bool, config: SelfMadeConfig) -> bool:
    """Whether to keep an answer: it is not empty, not degenerate and, where required, not cut off.

    Args:
        text: content and reasoning.
        units: its tokens, or else its words, of which enough n-grams must be distinct.
        finished: whether the model ended it by itself.
    """
    if not text.strip() or distinct_share(units) < config.min_distinct:
        return False
    return finished or config.unfinished == "keep"


def text_of(message: dict[str, Any]) -> str:
    """Return reasoning and content of a message."""
    return message.get("reasoning_content", "") + (message.get("content") or "")


def read_prompts_to_answer(
    path: str | Path, limit: int | None = None
) -> tuple[list[dict[str, Any]], list[UnusedRow]]:
    """Read the rows of a file of prompts, each with the `turns` to answer, and list rejected rows.

    A row is a conversation in any format, {"turns": [...]} as in Spec-Bench, or {"prompt": ...}.
    The text `follow_up` is one more turn of the user. A row that cannot be answered has no turns.
    """
    rows: list[dict[str, Any]] = []
    rejected: list[UnusedRow] = []
    for number, (where, row) in enumerate(itertools.islice(open_file(str(path)).read_all(), limit)):
        try:
            if isinstance(row, ValueError):  # not JSON
                raise row
            turns = _turns_of(row, where)
            rows.append({**row, **turns, "where": where})
        except ValueError as error:
            # It keeps its place, so that batches do not depend on what is rejected.
            rows.append({"turns": [], "where": where})
            rejected.append(rejection(rows[-1], number, path, error))
    if not rows:
        raise ValueError(f"{path}: no prompts: it is empty")
    return rows, rejected


def rejection(
    prompt: dict[str, Any], number: int, path: str | Path, error: ValueError | str
) -> UnusedRow:
    """Name a prompt that cannot be answered."""
    where = prompt["where"]
    return UnusedRow(number, where, str(path), "rejected", str(error).removeprefix(f"{where}: "))


def _turns_of(row: Any, where: str) -> dict[str, Any]:
    """Return the `turns` of a row of prompts, and its `tools` if there are any."""
    # 1. The user's words alone, or a conversation whose answers are dropped.
    texts = user_turns(row)
    if texts and all(isinstance(text, str) for text in texts):
        said = [{"role": "user", "content": text} for text in texts]
        conversation = check_conversation({"messages": said, "tools": row.get("tools")}, where)
        turns = [[message] for message in said]
    else:
        conversation = check_conversation(row, where)
        turns = turns_to_answer(conversation["messages"])
    if not turns:
        raise ValueError(f"{where}: no message of the user that could be answered")

    # 2. One more turn, if the row asks for it.
    follow_up = row.get("follow_up")
    if follow_up is not None:
        if not isinstance(follow_up, str):
            raise ValueError(f"{where}: 'follow_up' must be a text, not {shown(follow_up)}")
        turns.append([{"role": "user", "content": follow_up}])

    # 3. JSON may hold half of a surrogate pair, which UTF-8 cannot.
    try:
        json.dumps([turns, conversation.get("tools")], ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where}: half a character, which neither tokenizers nor servers read: {error}"
        ) from error

    # 4. A row may have a temperature of its own.
    temperature = row.get("temperature", 0.0)
    if (
        isinstance(temperature, bool)
        or not isinstance(temperature, int | float)
        or not 0 <= temperature < math.inf
    ):
        raise ValueError(
            f"{where}: 'temperature' must be a number of at least 0, not {shown(temperature)}"
        )
    return {"turns": turns, "tools": conversation.get("tools")}
