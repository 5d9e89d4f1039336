"""Conversations without a data set: the model generates prompts and answers them, or answers given prompts.

A prompt is the model's continuation of its own chat template, truncated right behind the user tag (Magpie,
arXiv:2406.08464).

Batch i depends on the seed, on i and on the prompts before it, none of which comes twice. A batch is written whole or
not at all, so a run that is stopped, even inside a batch, resumes and ends with the same file.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ...heads.base import dtype_name
from ...inference import SpeculativeLM
from ...inference.sequences import Sequences
from ..config import SelfMadeConfig
from ..console import ProgressBar, Stopped, StopRequest, log
from ..engine import Shared, load
from ..files import check_options, write_whole
from .chat_template import check_lengths, prompt_ids, render
from .conversations import RESUME_ADVICE, Messages, distinct_share, read_prompts

MIN_PROMPT_TOKENS = 4
"""Shorter prompts are dropped."""
WAVES = 8
"""Conversations that each row of the batch generates, one after the other, between two writes to the file."""
ENOUGH = 8
"""Conversations that are made even if the time is over."""
EMPTY_BATCHES = 20
"""Batches in a row without a usable text after which the command fails."""


@dataclass
class Progress:
    """Progress of the file, kept in a state file beside it."""

    batches: int = 0
    """Batches made."""
    conversations: int = 0
    """Conversations written."""
    tokens: int = 0
    """Answer tokens written."""
    size: int = 0
    """Bytes of the file that belong to whole batches."""
    ended: bool = False
    """Whether the time was over before all conversations were made."""


class _TimeIsOver(Exception):
    """Raised inside a batch, with the rows that have ended; the others are empty."""

    def __init__(self, rows: Sequence[list[int]] = ()) -> None:
        self.rows = rows


def make_conversations(config: SelfMadeConfig, deadline: float = math.inf, shared: Shared | None = None) -> Path:
    """Write the file, or resume it; return its path.

    Args:
        config: of the command.
        deadline: on `time.monotonic`'s clock; finished conversations of the batch in progress are kept, and the file is
            complete with at least `ENOUGH`.
        shared: target and tokenizer, if other commands of this process use them too.

    Raises:
        ValueError: options that do not match the file that is there, unusable prompts or tokenizer.
        Stopped: Ctrl-C or SIGTERM; the batch in progress is lost.
    """
    if config.server is not None:
        from .server_answers import ask_server  # needs the package openai, which nothing else does

        return ask_server(config)
    path = Path(config.output)
    config, progress, seen = _resume(path, config)
    prompts = read_prompts(config.prompts) if config.prompts else None
    if _finished(progress, config, prompts):
        log.info(f"{path} is finished: {progress.conversations} conversations")
        return path
    lm, tokenizer = load(config.target, config.head, config.target_dtype, shared)
    became: Any = dtype_name(lm.target.dtype)
    config = dataclasses.replace(config, target_dtype=became)
    if prompts is not None:
        ids = [prompt_ids(tokenizer, messages) for messages in prompts[: config.conversations]]
        check_lengths(ids, config.answer_tokens, lm.target.max_positions, str(config.prompts))
    with StopRequest() as stop:
        with _Watch(progress, config, prompts, deadline) as watch, suppress(_TimeIsOver, Stopped):
            lm.round_listeners.append(watch)
            empty = 0
            while not _finished(progress, config, prompts):
                watch.begin_batch()
                with stop.at_once():
                    rows = _make_batch(lm, tokenizer, config, progress.batches, prompts, seen)
                rows = rows[: config.conversations - progress.conversations]
                with path.open("ab") as file:
                    file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
                    file.flush()
                    os.fsync(file.fileno())
                    progress.size = file.tell()
                progress.batches += 1
                empty = 0 if rows else empty + 1
                if empty == EMPTY_BATCHES:
                    raise ValueError(
                        f"{empty} batches in a row gave no usable text: the model does not end its prompts, or repeats "
                        "itself; try other temperatures, a larger prompt_tokens, or a smaller min_distinct"
                    )
                progress.conversations += len(rows)
                progress.tokens += sum(row["tokens"] for row in rows)
                _write_state(path, config, progress, seen)
        written = f"{path}: {progress.conversations} conversations, {progress.tokens} answer tokens"
        if not _finished(progress, config, prompts):
            if stop.wanted:
                raise Stopped(f"stopped; {written}; the same command resumes from there")
            progress.ended = True
            _write_state(path, config, progress, seen)
            written += ", as many as there was time for"
        log.info(written)
    return path


class _Watch:
    """Called after every round: shows the progress of the batch, and ends it when the time is over."""

    def __init__(
        self, progress: Progress, config: SelfMadeConfig, prompts: list[Messages] | None, deadline: float
    ) -> None:
        self.progress, self.config, self.prompts, self.deadline = progress, config, prompts, deadline
        self.total = config.conversations if prompts is None else min(config.conversations, len(prompts))
        self.bar = ProgressBar("conversations", self.total, min(_done(progress, config, prompts), self.total))
        self.parts = ["answers"] if prompts is not None else ["prompts", "answers"]  # of a batch
        self.began, self.tokens = time.monotonic(), 0
        self.batch_began, self.batches = self.began, -1
        self.generations: list[Sequences] = []  # of the batch in progress

    def __enter__(self) -> _Watch:
        self.bar.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.bar.__exit__(*error)

    def begin_batch(self) -> None:
        """Start counting a batch.

        Raises:
            _TimeIsOver: less time is left than half of what a batch has taken so far.
        """
        self.tokens += sum(out.tokens for out in self.generations)
        self.batch_began, self.batches, self.generations = time.monotonic(), self.batches + 1, []
        half = (self.batch_began - self.began) / self.batches / 2 if self.batches else 0.0
        if self.progress.conversations >= ENOUGH and self.batch_began + half > self.deadline:
            raise _TimeIsOver

    def __call__(self, out: Sequences) -> None:
        """Show the progress after a round.

        Raises:
            _TimeIsOver: the time of this part of the batch is over. Half of the first rows must have ended, or only
                short texts would be kept.
        """
        if not self.generations or out is not self.generations[-1]:
            self.generations.append(out)
        now, part = time.monotonic(), len(self.generations)
        tokens = self.tokens + sum(each.tokens for each in self.generations)
        share = (part - 1 + len(out.ended) / len(out.rows)) / len(self.parts)
        done = _done(self.progress, self.config, self.prompts) + share * _at_once(self.config)
        self.bar.update(
            min(done, self.total),
            f"{tokens / (now - self.began):.0f} tokens/s; {self.parts[part - 1]} of this batch: "
            f"{len(out.ended)}/{len(out.rows)}",
        )
        until = self.batch_began + (self.deadline - self.batch_began) * part / len(self.parts)
        enough = self.progress.conversations >= ENOUGH or 2 * len(out.ended) >= len(out.rows)
        if now > until and enough:
            raise _TimeIsOver([tokens if row in out.ended else [] for row, tokens in enumerate(out.rows)])


def user_prefix(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the chat template's text before the user's words.

    Raises:
        ValueError: a template that changes the user's words.
    """
    marker = "USER-WORDS-BEGIN-HERE"
    text = render(tokenizer, [{"role": "user", "content": marker}])
    if marker not in text:
        raise ValueError("the chat template changes the user's words, so it cannot be cut before them; give --prompts")
    return text[: text.index(marker)]


def _make_batch(
    lm: SpeculativeLM,
    tokenizer: PreTrainedTokenizerBase,
    config: SelfMadeConfig,
    batch: int,
    prompts: list[Messages] | None,
    seen: set[str],
) -> list[dict[str, Any]]:
    generator = torch.Generator(lm.target.device).manual_seed(config.seed * 1_000_003 + batch)
    if prompts is None:
        asked = _generate_prompts(lm, tokenizer, config, generator, seen)
    else:
        asked = prompts[batch * _at_once(config) : (batch + 1) * _at_once(config)]
    if not asked:
        return []
    texts = [render(tokenizer, messages, add_generation_prompt=True) for messages in asked]
    sampling = {"temperature": config.temperature, "top_k": 0, "top_p": 1.0} if config.temperature > 0 else {}
    answers = _continue(
        lm,
        tokenizer,
        texts,
        config.batch_size,
        config.answer_tokens,
        generator,
        do_sample=config.temperature > 0,
        **sampling,
    )
    rows = []
    for messages, (answer, finished) in zip(asked, answers, strict=True):
        text = str(tokenizer.decode(answer, skip_special_tokens=True)).strip()
        if not text or distinct_share(answer) < config.min_distinct:
            continue
        rows.append(
            {
                "source": "self-made" if prompts is None else Path(str(config.prompts)).name,
                "temperature": config.temperature,
                "finished": finished,
                "tokens": len(answer),
                "messages": [*messages, {"role": "assistant", "content": text}],
            }
        )
    return rows


def _generate_prompts(
    lm: SpeculativeLM,
    tokenizer: PreTrainedTokenizerBase,
    config: SelfMadeConfig,
    generator: torch.Generator,
    seen: set[str],
) -> list[Messages]:
    """Generate a batch of prompts: ended by the model, not degenerate, not seen before."""
    prefix = user_prefix(tokenizer)
    drawn = _continue(
        lm,
        tokenizer,
        [prefix] * _at_once(config),
        config.batch_size,
        config.prompt_tokens,
        generator,
        do_sample=True,
        temperature=config.prompt_temperature,
        min_p=config.prompt_min_p,
        top_k=0,
        top_p=1.0,
    )
    prompts: list[Messages] = []
    for tokens, finished in drawn:
        text = str(tokenizer.decode(tokens, skip_special_tokens=True)).strip()
        if finished and len(tokens) >= MIN_PROMPT_TOKENS and distinct_share(tokens) >= config.min_distinct:
            normalized = " ".join(text.lower().split())
            if normalized not in seen:
                prompts.append([{"role": "user", "content": text}])
            seen.add(normalized)
    return prompts


def _continue(
    lm: SpeculativeLM,
    tokenizer: PreTrainedTokenizerBase,
    texts: list[str],
    slots: int,
    new_tokens: int,
    generator: torch.Generator,
    **sampling: Any,
) -> list[tuple[list[int], bool]]:
    """Continue each text; new tokens without the end token, and whether the model ended by itself."""
    encoded = tokenizer(texts, add_special_tokens=False, return_tensors="pt", padding=True, padding_side="left")
    device = lm.target.device
    rows: Sequence[list[int]]
    try:
        output = lm.generate(
            encoded["input_ids"].to(device),
            attention_mask=encoded["attention_mask"].to(device),
            max_new_tokens=new_tokens,
            generator=generator,
            slots=slots,
            pad_token_id=tokenizer.pad_token_id,
            **sampling,
        )
        rows = output.sequences[:, encoded["input_ids"].shape[1] :].tolist()
    except _TimeIsOver as over:
        rows = over.rows
    ends = lm.target.end_tokens
    written = []
    for row in rows:
        stop = next((i for i, token in enumerate(row) if token in ends), None)
        written.append((row[:stop], stop is not None))
    return written


def _resume(path: Path, config: SelfMadeConfig) -> tuple[SelfMadeConfig, Progress, set[str]]:
    """Start the file, or cut off a half-written batch; the options, with the dtype that the file was begun with."""
    state_path = _state_path(path)
    if not state_path.exists():
        if path.exists():
            raise ValueError(f"{path} exists and was not written by this command; choose another output")
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_state(path, config, Progress(), set())
        path.touch()
        return config, Progress(), set()
    state = json.loads(state_path.read_text(encoding="utf-8"))
    before, progress = state["options"], Progress(**state["progress"])
    if config.target_dtype == "auto":
        config = dataclasses.replace(config, target_dtype=before["target_dtype"])
    if progress.batches:
        now = dataclasses.asdict(config)
        asked = {name: now[name] for name in before}  # options that are newer than the file are not compared
        check_options(f"{path} was started with", before, asked, RESUME_ADVICE, ("output",))
    if not path.exists() and progress.size == 0:
        path.touch()
    if not path.exists() or path.stat().st_size < progress.size:
        raise ValueError(f"{path} lost what was written to it; remove {state_path} to start anew")
    os.truncate(path, progress.size)
    return config, progress, set(state["seen"])


def _write_state(path: Path, config: SelfMadeConfig, progress: Progress, seen: set[str]) -> None:
    state = {"options": dataclasses.asdict(config), "progress": dataclasses.asdict(progress), "seen": sorted(seen)}
    write_whole(_state_path(path), json.dumps(state))


def _state_path(path: Path) -> Path:
    return path.with_name(path.name + ".state.json")


def _done(progress: Progress, config: SelfMadeConfig, prompts: list[Messages] | None) -> int:
    """Conversations made, or given prompts answered."""
    return progress.conversations if prompts is None else progress.batches * _at_once(config)


def _finished(progress: Progress, config: SelfMadeConfig, prompts: list[Messages] | None) -> bool:
    if progress.ended or progress.conversations >= config.conversations:
        return True
    return prompts is not None and _done(progress, config, prompts) >= len(prompts)


def _at_once(config: SelfMadeConfig) -> int:
    """Prompts between two writes to the file: `WAVES` for each row of the batch, but at most a quarter of all."""
    return max(config.batch_size, min(WAVES * config.batch_size, config.conversations // 4))
