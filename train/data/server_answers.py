"""Answers from an OpenAI-compatible server (vLLM, SGLang): concurrent requests, retried, resumable.

A conversation is written as soon as it is answered, with the number of its prompt. Started again, the command requests
the answers that the file lacks.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import parse_qsl, unquote, urlsplit

from openai import APIError, AsyncOpenAI, BadRequestError
from openai.types.chat import ChatCompletion

from ...heads.checkpoints.public import public_url
from ..config import SelfMadeConfig
from ..console import ProgressBar, Stopped, StopRequest, log
from ..run_folder import check_options, whole_lines, write_whole
from .conversations import RESUME_ADVICE, distinct_share, read_prompt_rows

RETRIES = 6
"""Repetitions of a request after a transient error (429, 5xx, no connection), with exponential backoff."""
FREE_TO_CHANGE = ("output", "conversations", "batch_size", "server", "allow_adapter")
"""Options that may differ when the command resumes."""
KEY = "OPENAI_API_KEY"
"""Environment variable that holds the server's API key, if it requires one."""


def _without_keys(text: str, server: str | None) -> str:
    """A text of a server without the key and the password of its address, which it may repeat."""
    secrets = [os.environ.get(KEY), *_secrets_of(server or "")]
    for secret in sorted(filter(None, secrets), key=len, reverse=True):
        text = text.replace(secret, "***")
    return text


def _secrets_of(address: str) -> list[str | None]:
    """Secrets of an address, as they are written and as they are meant: a password, keys in its query."""
    try:
        parts = urlsplit(address)
    except ValueError:
        return []
    user, password = unquote(parts.username or ""), unquote(parts.password or "")
    secrets = [parts.password or parts.username, password or user]
    secrets += [value for _, value in parse_qsl(parts.query) if len(value) > 3]
    if user:  # as the client sends it
        secrets.append(base64.b64encode(f"{user}:{password}".encode()).decode())
    return secrets


def ask_server(config: SelfMadeConfig) -> Path:
    """Write the file, or resume it; return its path."""
    path = Path(config.output)
    prompts = read_prompt_rows(str(config.prompts), config.conversations)
    options = {name: value for name, value in dataclasses.asdict(config).items() if name not in FREE_TO_CHANGE}
    state = path.with_name(path.name + ".state.json")
    answered: set[int] = set()
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(state, json.dumps({"options": options}))
    elif not state.exists():
        raise ValueError(f"{path} exists and was not written by this command; choose another output")
    else:
        before = json.loads(state.read_text(encoding="utf-8"))["options"]
        check_options(f"{path} was started with", before, options, RESUME_ADVICE)
        answered = {json.loads(line)["number"] for line in whole_lines(path)}
    rest = ((number, prompt) for number, prompt in enumerate(prompts) if number not in answered)
    bar = ProgressBar("conversations", len(prompts), len(answered))
    with path.open("a", encoding="utf-8") as file, StopRequest() as stop, bar:
        work = _Work(config, rest, file, stop, bar, done=len(answered), written=len(answered))
        asyncio.run(work.run())
    log.info(f"{path}: {work.written} conversations; {work.done - work.written} prompts dropped")
    if stop.wanted and work.done < len(prompts):
        raise Stopped(f"stopped after {work.done} of {len(prompts)} prompts; the same command resumes from there")
    return path


@dataclass
class _Work:
    """State shared by `batch_size` concurrent workers, each of which takes one prompt after the other."""

    config: SelfMadeConfig
    prompts: Iterator[tuple[int, dict[str, Any]]]
    file: TextIO
    stop: StopRequest
    bar: ProgressBar
    done: int
    written: int
    tokens: int = 0
    failure: ValueError | None = None
    began: float = field(default_factory=time.monotonic)

    async def run(self) -> None:
        """Answer all prompts, or until one fails."""
        async with AsyncOpenAI(
            base_url=self.config.server, api_key=os.environ.get(KEY, "none"), max_retries=RETRIES
        ) as client:
            await asyncio.gather(*(self._work(client) for _ in range(self.config.batch_size)))
        if self.failure is not None:
            raise self.failure

    async def _work(self, client: AsyncOpenAI) -> None:
        for number, prompt in self.prompts:
            if self.stop.wanted or self.failure is not None:  # pending requests of other workers are still written
                return
            try:
                row = await self._converse(client, number, prompt)
            except ValueError as error:
                self.failure = self.failure or error
                return
            if row is not None:
                self.file.write(json.dumps(row, ensure_ascii=False) + "\n")
                self.file.flush()
            self.done += 1
            self.written += row is not None
            self.tokens += row["tokens"] if row else 0
            self.bar.update(self.done, f"{self.tokens / (time.monotonic() - self.began):.0f} answer tokens/s")

    async def _converse(self, client: AsyncOpenAI, number: int, prompt: dict[str, Any]) -> dict[str, Any] | None:
        """The answer, and a second turn if the prompt has a `follow_up`; None if the first answer is not usable."""
        row: dict[str, Any] = {"source": Path(str(self.config.prompts)).name, "number": number}
        row |= {"kind": prompt["kind"]} if "kind" in prompt else {}
        row |= {"temperature": prompt.get("temperature", self.config.temperature), "finished": False, "tokens": 0}
        first = await self._answer(client, row, prompt["messages"])
        if first is None or not first["finished"] or "follow_up" not in prompt:
            return first
        follow_up = {"role": "user", "content": prompt["follow_up"]}
        return await self._answer(client, first, [*first["messages"], follow_up]) or first

    async def _answer(
        self, client: AsyncOpenAI, row: dict[str, Any], messages: list[dict[str, Any]]
    ) -> dict[str, Any] | None:
        """The row with the messages and their answer, or None if that is not usable."""
        config, number = self.config, row["number"]
        template = {} if config.thinking is None else {"chat_template_kwargs": {"enable_thinking": config.thinking}}
        try:
            reply: Any = await client.chat.completions.create(
                model=config.target,
                messages=messages,  # type: ignore[arg-type]
                temperature=row["temperature"],
                max_tokens=config.answer_tokens,
                seed=config.seed + number,
                extra_body=template or None,
            )
        except BadRequestError as error:
            told = _without_keys(error.message, config.server)
            log.info(f"prompt {number} is left out, the server refuses it: {told}")
            return None
        except (APIError, json.JSONDecodeError) as error:
            told = _without_keys(str(error), config.server)
            raise ValueError(
                f"{public_url(str(config.server))} failed at prompt {number}, after {RETRIES} more tries: {told}; what "
                f"was answered is in {config.output}, and the same command resumes from there"
            ) from None  # the error itself holds the request's headers
        if not isinstance(reply, ChatCompletion) or not reply.choices or reply.choices[0].message is None:
            raise ValueError(
                f"{public_url(str(config.server))} answered prompt {number} with "
                f"{_without_keys(str(reply), config.server)[:200]!r}, which is no chat completion"
            )
        choice, usage = reply.choices[0], reply.usage
        text, finished = (choice.message.content or "").strip(), choice.finish_reason == "stop"
        if not text or distinct_share(text.split()) < config.min_distinct:
            return None
        if not finished and config.unfinished == "drop":
            return None
        return row | {
            "finished": finished,
            "tokens": row["tokens"] + (usage.completion_tokens if usage else len(text.split())),
            "messages": [*messages, {"role": "assistant", "content": text}],
        }
