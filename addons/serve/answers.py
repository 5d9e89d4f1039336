"""Answers from OpenAI-compatible servers (vLLM, SGLang, llama.cpp): concurrent and resumable.

Requests that fail are retried.

Each server has `batch_size` workers, threads that take one prompt after the other. The prompts of a
server that fails go to the others. A conversation is written as soon as it is answered, with the
number of its prompt. Started again, the command requests the answers that the file lacks.

vLLM (from 0.10.2) and SGLang return the token ids of prompt and answer, `return_token_ids`, and
these are trained on. Of other servers only content and reasoning are known, which training renders
by the chat template: what a template cannot render as it was written is refused.
"""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from transformers import PreTrainedTokenizerBase

from ...console import ProgressBar, log
from ...files import parse_json, require_regular, write_whole
from ...inference.targets.loading import load_tokenizer, tokenizer_provenance
from ...inference.text.chat_template import REASONING_KEYS, prompt_ids
from ...inference.text.messages import check_conversation
from ...options import check_options, template_variables
from ...stopping import StopFlag, Stopped, stop_on_signals
from ...train.data.answer_file import (
    check_fingerprint,
    lines_of,
    read_state,
    state_path,
    with_defaults,
)
from ...train.data.answers import (
    Answer,
    Conversation,
    calls_tool,
    is_usable,
    read_prompts_to_answer,
    readable,
    text_of,
)
from ...train.data.bad_rows import report_rejected_prompts
from ...train.data.chat_template import REASONING_TAGS, encode
from ...train.data.conversations import RESUME_ADVICE
from ..openai_client import OpenAIClient, ServerError
from .options import AnswersConfig

RETRIES = 6
"""Repetitions of a request after a transient error (429, 5xx, no connection), with exponential
backoff."""
FREE_TO_CHANGE = (
    *(
        "output",
        "conversations",
        "batch_size",
        "server",
        "tokenizer",
        "request_seconds",
        "allow_adapter",
    ),
    *("bad_rows", "bad_rows_limit"),
)
"""Options that may differ when the command resumes."""
ENDED = ("stop", "tool_calls", "function_call")
"""Reasons to finish of an answer that the model ended by itself."""
SHOWN = 200
"""Characters of what a server sent that an error shows."""
LONGEST = 2**31
"""Tokens of a sequence that is not to be truncated."""
NOTICE_SECONDS = 0.5
"""Longest time until a stop is noticed."""


@dataclass(frozen=True)
class Reply:
    """A server's answer to one request."""

    content: str
    reasoning: str
    tool_calls: list[Any]
    finished: bool
    """Whether the model ended the answer by itself."""
    length: int | None
    """Tokens of the answer, if the server counted them."""
    prompt: list[int]
    """Token ids of the prompt; empty if the server does not return them."""
    tokens: list[int]
    """Token ids of the answer; empty if the server does not return them."""


class _ServerFailed(ValueError):
    """A server that cannot be asked further, with the reason."""


@dataclass
class _Server:
    """One of the servers."""

    server: OpenAIClient
    failed: bool = False
    returns_tokens: bool = True
    """Whether to ask it for token ids; False once it has refused the option."""
    compared: bool = False
    """Whether one of its answers has been compared with the tokenizer here."""

    @property
    def name(self) -> str:
        """Its address, without user and password."""
        return self.server.name


def ask_servers(config: AnswersConfig) -> Path:
    """Write the file, or resume it; return its path."""
    path = Path(config.output)
    servers = servers_of(config)  # a mistake in them is reported before any work
    prompts, rejected = read_prompts_to_answer(str(config.prompts), config.conversations)
    report_rejected_prompts(rejected, len(prompts), config)
    tokenizer = _tokenizer_of(config)
    fingerprint = None if tokenizer is None else tokenizer_provenance(tokenizer)["tokenizer"]
    options = {
        name: value
        for name, value in dataclasses.asdict(config).items()
        if name not in FREE_TO_CHANGE
    }
    answered: set[int] = set()
    with_tokens: bool | None = None
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(state_path(path), json.dumps({"options": options}))
    elif not state_path(path).exists():
        raise ValueError(
            f"{path} exists and was not written by this command; choose another output"
        )
    else:
        state = read_state(state_path(path))
        if "progress" in state:
            raise ValueError(
                f"{path} was begun with the model in this process, not a server; {RESUME_ADVICE}"
            )
        check_options(
            f"{path} was started with",
            with_defaults(state["options"]),
            options,
            RESUME_ADVICE,
            FREE_TO_CHANGE,
        )
        answered, of_tokenizer = read_answered(path)
        if answered:
            with_tokens = of_tokenizer is not None
        if with_tokens:
            check_fingerprint(of_tokenizer, fingerprint, path)
    given = [(number, prompt) for number, prompt in enumerate(prompts) if prompt["turns"]]
    rest = ((number, prompt) for number, prompt in given if number not in answered)
    bar = ProgressBar("conversations", len(given), len(answered))
    with path.open("a", encoding="utf-8") as file, stop_on_signals() as stop, bar:
        work = _Work(
            config,
            servers,
            rest,
            file,
            stop,
            bar,
            tokenizer,
            fingerprint,
            with_tokens,
            done=len(answered),
        )
        work.written = len(answered)
        work.run()
    why = ""
    if work.unreasoned:
        why = f", {work.unreasoned} of them because their reasoning is not known"
    log.info(
        f"{path}: {work.written} conversations; {work.done - work.written} prompts dropped{why}"
    )
    if stop.wanted and work.done < len(given):
        raise Stopped(
            f"stopped after {work.done} of {len(given)} prompts; the same command resumes from"
            " there"
        )
    return path


def _tokenizer_of(config: AnswersConfig) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer of the servers' model, or return None if there is none at `target`.

    `target` may be a name that only the servers know.
    """
    if config.tokenizer is not None:
        return load_tokenizer(config.tokenizer)
    try:
        return load_tokenizer(config.target)
    except ValueError:
        log.warning(
            f"no tokenizer at {config.target!r}, so that only the text of answers is kept, and"
            " training renders it by the chat template; name the model's folder or Hub id as"
            " tokenizer to keep the token ids that it wrote"
        )
        return None


def read_answered(path: Path) -> tuple[set[int], str | None]:
    """Cut off an incomplete conversation; return the others' numbers and tokenizer fingerprint.

    It is None if the rows hold text alone.
    """
    answered: set[int] = set()
    tokenizer: str | None = None
    position = 0
    whole = 0
    with require_regular(path).open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            position += len(line)
            row = parse_json(line, f"a row of {path}")
            if not isinstance(row, dict) or type(row.get("number")) is not int:
                raise ValueError(f"{path} holds a row that was not written here: choose another")
            tokenizer = row.get("tokenizer")
            if row.get("sequence") == row.get("sequences"):
                answered.add(row["number"])
                whole = position
    os.truncate(path, whole)
    return answered, tokenizer


@dataclass
class _Work:
    """State shared by all servers' workers, which hold `changed` while they read or change it."""

    config: AnswersConfig
    servers: list[_Server]
    prompts: Iterator[tuple[int, dict[str, Any]]]
    file: TextIO
    stop: StopFlag
    bar: ProgressBar
    tokenizer: PreTrainedTokenizerBase | None
    fingerprint: str | None
    with_tokens: bool | None
    """Whether the rows hold token ids; the first answer decides."""
    done: int
    """Prompts that were answered or dropped."""
    written: int = 0
    tokens: int = 0
    failure: Exception | None = None
    began: float = field(default_factory=time.monotonic)
    returned: deque[tuple[int, dict[str, Any]]] = field(default_factory=deque)
    """Prompts that a failed server did not answer."""
    changed: threading.Condition = field(default_factory=threading.Condition)
    """Announces that a prompt was answered or came back."""
    under_way: int = 0
    """Prompts that are being answered, and may come back."""
    with_reasoning: int = 0
    """Answers with reasoning, of those whose text alone is known."""
    unreasoned: int = 0
    """Answers that were dropped because reasoning was asked for and is not known."""

    def run(self) -> None:
        """Answer all prompts, or until none of the servers is left."""
        workers = len(self.servers) * self.config.batch_size
        with ThreadPoolExecutor(workers, thread_name_prefix="answers") as threads:
            working = []
            for server in self.servers:
                for _ in range(self.config.batch_size):
                    working.append(threads.submit(self._work, server))
            # The main thread alone runs signal handlers. A signal that comes just before it waits,
            # or in another thread, does not wake it: without a timeout the stop would be noticed
            # after the last prompt.
            while wait(working, NOTICE_SECONDS).not_done:
                pass
        if self.failure is not None:
            raise self.failure

    def _work(self, server: _Server) -> None:
        while (taken := self._take(server)) is not None:
            number, prompt = taken
            try:
                self._write(self._converse(server, number, prompt))
            except _ServerFailed as error:
                self._give_back(server, taken, error)
                return
            except Exception as error:  # raised by `run`, once all threads have ended
                self.failure = self.failure or error
            with self.changed:
                self.under_way -= 1
                self.changed.notify_all()

    def _take(self, server: _Server) -> tuple[int, dict[str, Any]] | None:
        """Return the next prompt, or None at the end.

        A worker waits as long as prompts may come back from a failed server. Requests that are
        pending when a stop is wanted are still written.
        """
        with self.changed:
            while True:
                if self.stop.wanted or self.failure is not None or server.failed:
                    return None
                taken = self.returned.popleft() if self.returned else next(self.prompts, None)
                if taken is not None:
                    self.under_way += 1
                    return taken
                if self.under_way == 0:
                    return None
                self.changed.wait()

    def _give_back(
        self, server: _Server, taken: tuple[int, dict[str, Any]], error: _ServerFailed
    ) -> None:
        """Leave a failed server's prompt to the others, if there are any."""
        with self.changed:
            if not server.failed:
                server.failed = True
                others = sum(not other.failed for other in self.servers)
                if others == 0:
                    self.failure = self.failure or error
                else:
                    log.warning(f"{error}; the other {others} servers take over what it was asked")
            self.under_way -= 1
            self.returned.append(taken)
            self.changed.notify_all()

    def _write(self, conversation: Conversation) -> None:
        """Write a conversation, if it has an answer, and show the progress."""
        with self.changed:
            self.done += 1
            if conversation.answers:
                if self.with_tokens:
                    assert self.fingerprint is not None
                    rows = conversation.token_rows(self.fingerprint)
                else:
                    rows = [conversation.text_row()]
                self.file.write(lines_of(rows))
                self.file.flush()
                self.written += 1
                self.tokens += sum(row["tokens"] for row in rows)
            rate = self.tokens / (time.monotonic() - self.began)
            self.bar.update(self.done, f"{rate:.0f} answer tokens/s")

    def _converse(self, server: _Server, number: int, prompt: dict[str, Any]) -> Conversation:
        """Answer all turns of a prompt, as far as the answers are usable."""
        columns: dict[str, Any] = {"source": Path(str(self.config.prompts)).name, "number": number}
        if "kind" in prompt:
            columns["kind"] = prompt["kind"]
        columns["temperature"] = prompt.get("temperature", self.config.temperature)
        conversation = Conversation(columns, prompt["turns"], prompt["tools"])
        while conversation.goes_on:
            answer = None
            sent = self._ask(server, conversation)
            if sent is not None:
                with self.changed:  # tokenizers are not for several threads at once, either
                    answer = self._answer(server, conversation, sent)
            if answer is None:  # not usable, or the server refuses the prompt
                conversation.ended = True
            else:
                conversation.answers.append(answer)
        return conversation

    def _answer(self, server: _Server, conversation: Conversation, sent: str) -> Answer | None:
        """Read what a server sent for the next turn; None if it is not usable."""
        number = conversation.columns["number"]
        try:
            reply = parsed_reply(sent)
        except ValueError as error:
            raise _ServerFailed(
                f"{server.name} answered prompt {number} with {_shown(sent)}, which is not a chat"
                f" completion: {error}"
            ) from None  # the error itself holds what the server sent
        if not (reply.content or reply.reasoning or reply.tool_calls):
            return None
        if len(reply.tokens) > self.config.max_new_tokens + 1:  # one that ended it
            raise _ServerFailed(
                f"{server.name} answered prompt {number} with {len(reply.tokens):,} tokens, and was"
                f" asked for {self.config.max_new_tokens:,} at most"
            )
        gives_tokens = self.tokenizer is not None and bool(reply.prompt and reply.tokens)
        if self.with_tokens is None:
            self.with_tokens = gives_tokens
        if self.with_tokens and not gives_tokens:
            raise _ServerFailed(
                f"{server.name} answered prompt {number} without token ids, which the other rows of"
                f" {self.config.output} hold; start it as the server that wrote them, or choose"
                " another output"
            )
        if self.with_tokens:
            answer = self._with_tokens(server, conversation, reply)
        else:
            message: dict[str, Any] = {"role": "assistant", "content": reply.content}
            if reply.reasoning:
                message["reasoning_content"] = reply.reasoning
            if _can_be_read(reply.tool_calls):
                message["tool_calls"] = reply.tool_calls
            length = reply.length if reply.length is not None else len(text_of(message).split())
            answer = Answer(message, reply.finished, bool(reply.tool_calls), length)
        units: list[Any] = list(answer.tokens) or text_of(answer.message).split()
        said = text_of(answer.message) + ("a tool call" if "tool_calls" in answer.message else "")
        if not is_usable(said, units, answer.finished, self.config):
            return None
        return answer if self.with_tokens else self._checked_text(server, conversation, answer)

    def _ask(self, server: _Server, conversation: Conversation) -> str | None:
        """Return the server's raw reply to the next turn; None if it refuses the prompt."""
        config = self.config
        number = conversation.columns["number"]
        body: dict[str, Any] = {
            "model": config.target,
            "messages": conversation.history,
            "temperature": conversation.columns["temperature"],
            "max_tokens": config.max_new_tokens,
            "seed": config.seed + number,
        }
        if variables := template_variables(config.thinking, config.template_kwargs):
            body["chat_template_kwargs"] = variables
        if self.tokenizer is not None and self.with_tokens is not False and server.returns_tokens:
            body["return_token_ids"] = True
        if conversation.tools:
            body["tools"] = conversation.tools
        try:
            return server.server.ask("/chat/completions", body, RETRIES)
        except ServerError as error:
            if error.status != 400:
                raise _ServerFailed(
                    f"{server.name} failed at prompt {number}, after {RETRIES} more tries:"
                    f" {_shown(error)}; what was answered is in {config.output}, and the same"
                    " command resumes from there"
                ) from None
            if "return_token_ids" in body and "return_token_ids" in error.told:
                server.returns_tokens = False  # it refuses options that it does not know
                return self._ask(server, conversation)
            log.info(f"prompt {number} is left out, the server refuses it: {_shown(error.told)}")
            return None

    def _with_tokens(self, server: _Server, conversation: Conversation, reply: Reply) -> Answer:
        """An answer whose token ids are known."""
        tokenizer = self.tokenizer
        assert tokenizer is not None
        size = max(len(tokenizer), tokenizer.vocab_size)
        if max(reply.tokens) >= size:
            raise ValueError(
                f"{server.name} answered with token {max(reply.tokens)}, outside of the"
                f" tokenizer's {size}: name the served model's tokenizer"
            )
        ends = frozenset(reply.tokens[-1:] if reply.finished else [])
        message = readable(tokenizer, reply.prompt, reply.tokens, ends)
        if not server.compared:
            self._compare(server, conversation, reply, message)
            server.compared = True
        if _can_be_read(reply.tool_calls):
            message = {**message, "content": reply.content, "tool_calls": reply.tool_calls}
        called = bool(reply.tool_calls) or calls_tool(tokenizer, reply.tokens)
        return Answer(
            message, reply.finished, called, len(reply.tokens), reply.prompt, reply.tokens
        )

    def _compare(
        self, server: _Server, conversation: Conversation, reply: Reply, message: dict[str, Any]
    ) -> None:
        """Refuse another tokenizer's token ids; warn if the server's chat template differs."""
        tokenizer = self.tokenizer
        config = self.config
        assert tokenizer is not None
        name = config.tokenizer or config.target
        told = _squeezed(reply.content)
        if "\ufffd" not in told and told not in _squeezed(text_of(message)):
            raise ValueError(
                f"the token ids of {server.name} are those of another tokenizer than {name!r}: it"
                f" answered {_shown(reply.content)}, and they decode to {_shown(text_of(message))};"
                " name the served model's tokenizer"
            )
        if not tokenizer.chat_template:
            return
        rendered = prompt_ids(
            tokenizer,
            conversation.history,
            config.thinking,
            config.template_kwargs,
            conversation.tools,
        )[0].tolist()
        if rendered != reply.prompt:
            log.warning(
                f"{server.name} renders prompts otherwise than the chat template of {name!r}: its"
                f" end is {_shown(tokenizer.decode(reply.prompt)[-60:])} there and"
                f" {_shown(tokenizer.decode(rendered)[-60:])} here; training takes the server's,"
                " and decoding here would take the other"
            )

    def _checked_text(
        self, server: _Server, conversation: Conversation, answer: Answer
    ) -> Answer | None:
        """Return the answer if its text holds all that the model wrote.

        None for an answer that lacks the reasoning that others have, or was cut off within it.

        Raises:
            ValueError: the servers keep the reasoning to themselves, or the chat template loses a
                part of the answer.
        """
        config = self.config
        variables = template_variables(config.thinking, config.template_kwargs)
        thinks = variables.get("enable_thinking") is True or variables.get("thinking") is True
        reasoned = "reasoning_content" in answer.message
        reasoned |= any(last in answer.message["content"] for _, last in REASONING_TAGS)
        if thinks and not reasoned:
            if self.with_reasoning == 0:
                raise ValueError(
                    f"{server.name} answered prompt {conversation.columns['number']} without the"
                    " reasoning that was asked for, neither as reasoning_content or reasoning nor"
                    " within the answer, and it cannot be trained on without; start the server so"
                    " that it returns token ids (vLLM, SGLang) or the reasoning"
                    " (--reasoning-parser)"
                )
            self.unreasoned += 1
            return None
        self.with_reasoning += reasoned
        if not answer.message["content"] and not answer.finished:  # cut off inside the reasoning
            self.unreasoned += 1
            return None
        if self.tokenizer is not None and self.tokenizer.chat_template:
            row = dataclasses.replace(
                conversation, answers=[*conversation.answers, answer]
            ).text_row()
            check_rendering(self.tokenizer, row, config)
        return answer


def check_rendering(
    tokenizer: PreTrainedTokenizerBase, row: dict[str, Any], config: AnswersConfig
) -> None:
    """Refuse a conversation whose last answer would lose a part in training's rendering.

    Training renders it by the chat template.
    """
    ends = frozenset() if tokenizer.eos_token_id is None else frozenset({tokenizer.eos_token_id})
    advice = (
        "take a server that returns token ids (vLLM, SGLang), on which training renders nothing"
    )
    name = config.tokenizer or config.target
    try:
        examples = encode(row, tokenizer, ends, LONGEST, config.thinking, config.template_kwargs)
    except ValueError as error:
        raise ValueError(f"the answers are known as text only, and {error}; {advice}") from error
    own: list[int] = []
    for example in examples:
        own += [
            token for token, is_own in zip(example.tokens, example.loss_mask, strict=True) if is_own
        ]
    rendered = _squeezed(str(tokenizer.decode(own)))
    for part in ("reasoning_content", "content"):
        written = row["messages"][-1].get(part) or ""
        if _squeezed(written) not in rendered:
            raise ValueError(
                f"the answers are known as text only, and the chat template of {name!r} leaves out"
                f" their {part}, such as {_shown(written)}; {advice}"
            )


def parsed_reply(text: str) -> Reply:
    """Parse a chat completion; a ValueError says what is wrong with it."""
    reply: Any = parse_json(text, "it")
    if not isinstance(reply, dict):
        raise ValueError("it is not a JSON object")
    choices = reply.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise ValueError(f"choices must be a list of at least one object, not {_shown(choices)}")
    choice = choices[0]
    message = choice.get("message")
    if not isinstance(message, dict):
        raise ValueError(f"its message must be an object, not {_shown(message)}")
    texts: dict[str, str] = {}
    for name in ("content", *REASONING_KEYS):
        value = message.get(name)
        if value is not None and not isinstance(value, str):
            raise ValueError(f"its {name} must be a text, not {_shown(value)}")
        texts[name] = value or ""
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise ValueError(f"its tool_calls must be a list, not {_shown(calls)}")
    usage = reply.get("usage")
    counted = usage.get("completion_tokens") if isinstance(usage, dict) else None
    finished = choice.get("finish_reason") in ENDED
    tokens = _token_ids(choice.get("token_ids"), "token_ids")
    # vLLM names the prompt's once for all choices, SGLang with each choice.
    prompt = _token_ids(
        choice.get("prompt_token_ids") or reply.get("prompt_token_ids"), "prompt_token_ids"
    )
    # vLLM's and SGLang's name of the token that ended it
    stop = choice.get("stop_reason", choice.get("matched_stop"))
    if finished and tokens and type(stop) is int and tokens[-1] != stop:
        tokens = [*tokens, stop]
    return Reply(
        content=texts["content"],
        reasoning=next((texts[name] for name in REASONING_KEYS if texts[name]), ""),
        tool_calls=calls,
        finished=finished,
        length=counted if type(counted) is int and 0 <= counted < 2**31 else None,
        prompt=prompt,
        tokens=tokens,
    )


def _can_be_read(calls: list[Any]) -> bool:
    """Whether there are tool calls, whose arguments are JSON, as those who read the file expect."""
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    try:
        check_conversation({"messages": [message]}, "")
    except ValueError:
        return False
    return bool(calls)


def _token_ids(value: Any, name: str) -> list[int]:
    if value is None:
        return []
    if not isinstance(value, list) or any(
        type(token) is not int or not 0 <= token < 2**31 for token in value
    ):
        raise ValueError(f"its {name} must be a list of token ids, not {_shown(value)}")
    return value


def servers_of(config: AnswersConfig) -> list[_Server]:
    """The servers, each once."""
    urls = config.server if isinstance(config.server, list) else str(config.server).split(",")
    urls = list(dict.fromkeys(url.strip() for url in urls if url.strip()))
    if not urls:
        raise ValueError(f"server must name at least one URL, not {config.server!r}")
    return [_Server(OpenAIClient.at(url, config.request_seconds)) for url in urls]


def _squeezed(text: str) -> str:
    """A text without its white space, which templates change."""
    return "".join(text.split())


def _shown(value: Any) -> str:
    """Quote what a server sent: one line, without control characters."""
    return repr(str(value)[:SHOWN])
