"""Conversations without a data set: the model generates prompts and answers them, or answers given prompts.

A prompt is the model's continuation of its own chat template, truncated right behind the user tag (Magpie,
arXiv:2406.08464).

Batch i depends on the seed, on i and on the prompts before it, none of which comes twice. A batch has one temperature
and is written whole or not at all, so a run that is stopped, even inside a batch, resumes and ends with the same file.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ...heads.base import dtype_name
from ...inference import SpeculativeLM
from ...inference.monitoring import Monitor
from ...inference.sequences import Sequences
from ..config import SelfMadeConfig
from ..console import ProgressBar, Stopped, StopRequest, log
from ..features.placement import SharedTarget, load_speculative_lm
from ..run_folder import check_options, write_whole
from .chat_template import check_lengths, prompt_ids, render
from .conversations import RESUME_ADVICE, distinct_share, read_prompt_rows

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
    conversations: int = 0
    tokens: int = 0
    """Answer tokens."""
    unfinished: int = 0
    """Answers that were cut off."""
    size: int = 0
    """Bytes of the file that belong to whole batches."""
    ended: bool = False
    """Whether the time was over before all conversations were made."""


class _Output:
    """The file of conversations, and the state file beside it, by which it resumes."""

    def __init__(self, config: SelfMadeConfig, prompts: list[dict[str, Any]] | None) -> None:
        """Start the file, or cut off a half-written batch."""
        self.path, self.progress, self.seen = Path(config.output), Progress(), set[str]()
        self.state_path = self.path.with_name(self.path.name + ".state.json")
        self.config, self.given = config, prompts is not None
        self.total = config.conversations if prompts is None else min(config.conversations, len(prompts))
        # Prompts between two writes: `WAVES` for each row of the batch, but at most a quarter of all.
        self.at_once = max(config.batch_size, min(WAVES * config.batch_size, config.conversations // 4))
        self.batches = _batches(prompts or [], self.at_once, config.temperature)
        if not self.state_path.exists():
            if self.path.exists():
                raise ValueError(f"{self.path} exists and was not written by this command; choose another output")
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.write_state()
            self.path.touch()
            return
        state = json.loads(self.state_path.read_text(encoding="utf-8"))
        before, self.progress, self.seen = state["options"], Progress(**state["progress"]), set(state["seen"])
        if config.target_dtype == "auto":
            self.config = dataclasses.replace(config, target_dtype=before["target_dtype"])
        if self.progress.batches:
            now = dataclasses.asdict(self.config)
            compared = {name: now[name] for name in before}  # options that are newer than the file are not compared
            check_options(f"{self.path} was started with", before, compared, RESUME_ADVICE, ("output", "metrics_port"))
        if not self.path.exists() and self.progress.size == 0:
            self.path.touch()
        if not self.path.exists() or self.path.stat().st_size < self.progress.size:
            raise ValueError(f"{self.path} lost what was written to it; remove {self.state_path} to start anew")
        os.truncate(self.path, self.progress.size)

    def state(self) -> tuple[int, bool]:
        """Conversations made, or given prompts answered, and whether that is all."""
        progress = self.progress
        ended = progress.ended or progress.conversations >= self.config.conversations
        if not self.given:
            return progress.conversations, ended
        return sum(map(len, self.batches[: progress.batches])), ended or progress.batches >= len(self.batches)

    def add(self, rows: list[dict[str, Any]]) -> None:
        """Write the conversations of a batch."""
        with self.path.open("ab") as file:
            file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
            file.flush()
            os.fsync(file.fileno())
            self.progress.size = file.tell()
        self.progress.batches += 1
        self.progress.conversations += len(rows)
        self.progress.tokens += sum(row["tokens"] for row in rows)
        self.progress.unfinished += sum(not row["finished"] for row in rows)
        self.write_state()

    def write_state(self) -> None:
        """Write options, progress and the prompts seen."""
        options, progress = dataclasses.asdict(self.config), dataclasses.asdict(self.progress)
        write_whole(self.state_path, json.dumps({"options": options, "progress": progress, "seen": sorted(self.seen)}))


def _batches(prompts: list[dict[str, Any]], size: int, temperature: float) -> list[list[dict[str, Any]]]:
    """Prompts in batches of one temperature each, in the order of their first prompts."""
    batches: list[list[dict[str, Any]]] = []
    filling: dict[float, list[dict[str, Any]]] = {}
    for prompt in prompts:
        batch = filling.setdefault(prompt.get("temperature", temperature), [])
        if not batch:
            batches.append(batch)
        batch.append(prompt)
        if len(batch) == size:
            del filling[prompt.get("temperature", temperature)]
    return batches


class _TimeIsOver(Exception):
    """Raised inside a batch, with its rows of tokens as argument; those that have not ended are empty."""


def make_conversations(config: SelfMadeConfig, deadline: float = math.inf, shared: SharedTarget | None = None) -> Path:
    """Write the file, or resume it; return its path.

    At the deadline, on `time.monotonic`'s clock, the finished conversations of the batch in progress are kept, and the
    file is complete with at least `ENOUGH`. Ctrl-C or SIGTERM loses the batch in progress.
    """
    if config.server is not None:
        from .server_answers import ask_server  # needs the package openai, which nothing else does

        return ask_server(config)
    prompts = read_prompt_rows(config.prompts) if config.prompts else None
    output = _Output(config, prompts)
    path, progress = output.path, output.progress
    if output.state()[1]:
        log.info(f"{path} is finished: {progress.conversations} conversations")
        return path
    monitor = None
    if config.metrics_port is not None:  # before the model is loaded: the port may be taken
        monitor = Monitor(model=config.target, head=config.head or "")
        log.info(f"metrics: http://127.0.0.1:{monitor.serve(config.metrics_port)}/metrics")
    lm, tokenizer = load_speculative_lm(
        config.target, config.head, output.config.target_dtype, shared, allow_adapter=config.allow_adapter
    )
    if monitor is not None:
        lm.callbacks.append(monitor.add)
    dtype: Any = dtype_name(lm.target.dtype)
    output.config = config = dataclasses.replace(config, target_dtype=dtype)
    ids = [
        prompt_ids(tokenizer, prompt["messages"], config.thinking) for prompt in (prompts or ())[: config.conversations]
    ]
    check_lengths(ids, config.answer_tokens, lm.target.max_positions, str(config.prompts))
    with StopRequest() as stop:
        watch = _Watch(output, deadline)
        lm.round_callbacks.append(watch)
        with watch.bar, suppress(_TimeIsOver, Stopped):
            empty = 0
            while not output.state()[1]:
                watch.begin_batch()
                with stop.at_once():
                    rows = _make_batch(lm, tokenizer, output)
                empty = 0 if rows else empty + 1
                if empty == EMPTY_BATCHES:
                    raise ValueError(
                        f"{empty} batches in a row gave no usable text: the model does not end its prompts, or repeats "
                        "itself; try other temperatures, a larger prompt_tokens, or a smaller min_distinct"
                    )
                output.add(rows[: config.conversations - progress.conversations])
        written = (
            f"{path}: {progress.conversations} conversations, {progress.tokens} answer tokens, {progress.unfinished} "
            f"cut off after {config.answer_tokens}"
        )
        if not output.state()[1]:
            if stop.wanted:
                raise Stopped(f"stopped; {written}; the same command resumes from there")
            progress.ended = True
            output.write_state()
            written += ", as many as there was time for"
        log.info(written)
    return path


class _Watch:
    """Called after every round: shows the progress of the batch, and ends it when the time is over."""

    def __init__(self, output: _Output, deadline: float) -> None:
        self.output, self.deadline = output, deadline
        self.bar = ProgressBar("conversations", output.total, min(output.state()[0], output.total))
        self.began, self.tokens = time.monotonic(), 0
        self.batch_began, self.batches = self.began, -1
        self.generations: list[Sequences] = []  # of the batch in progress

    def begin_batch(self) -> None:
        """Start counting a batch, unless less time is left than half of what a batch has taken so far."""
        self.tokens += sum(out.tokens for out in self.generations)
        self.batch_began, self.batches, self.generations = time.monotonic(), self.batches + 1, []
        self.parts = ["answers"] if self.output.given else ["prompts", "answers"]
        if self.output.given and any(
            "follow_up" in prompt for prompt in self.output.batches[self.output.progress.batches]
        ):
            self.parts.append("second turns")
        half = (self.batch_began - self.began) / self.batches / 2 if self.batches else 0.0
        if self.output.progress.conversations >= ENOUGH and self.batch_began + half > self.deadline:
            raise _TimeIsOver

    def __call__(self, out: Sequences) -> None:
        """Show the progress after a round, and end this part of the batch when its time is over.

        Half of the first rows must have ended, or only short texts would be kept.
        """
        if not self.generations or out is not self.generations[-1]:
            self.generations.append(out)
        now, part = time.monotonic(), len(self.generations)
        tokens = self.tokens + sum(each.tokens for each in self.generations)
        share = (part - 1 + len(out.ended) / len(out.rows)) / len(self.parts)
        done = self.output.state()[0] + share * self.output.at_once
        self.bar.update(
            min(done, self.output.total),
            f"{tokens / (now - self.began):.0f} tokens/s; {self.parts[part - 1]} of this batch: "
            f"{len(out.ended)}/{len(out.rows)}",
        )
        until = self.batch_began + (self.deadline - self.batch_began) * part / len(self.parts)
        enough = self.output.progress.conversations >= ENOUGH or 2 * len(out.ended) >= len(out.rows)
        if now > until and enough:
            raise _TimeIsOver([tokens if row in out.ended else [] for row, tokens in enumerate(out.rows)])


def user_prefix(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the chat template's text before the user's words."""
    marker = "USER-WORDS-BEGIN-HERE"
    text = render(tokenizer, [{"role": "user", "content": marker}])
    if marker not in text:
        raise ValueError("the chat template changes the user's words, so no prompt can start there; give --prompts")
    return text[: text.index(marker)]


def _make_batch(lm: SpeculativeLM, tokenizer: PreTrainedTokenizerBase, output: _Output) -> list[dict[str, Any]]:
    """Generate the usable conversations of the next batch."""
    config, batch = output.config, output.progress.batches
    generator = torch.Generator(lm.target.device).manual_seed(config.seed * 1_000_003 + batch)
    prompts = output.batches[batch] if output.given else _generate_prompts(lm, tokenizer, output, generator)
    if not prompts:
        return []
    temperature = prompts[0].get("temperature", config.temperature)
    source = Path(str(config.prompts)).name if output.given else "self-made"
    rows = [
        {"source": source, "temperature": temperature, "finished": False, "tokens": 0}
        | {name: prompt[name] for name in ("kind", "follow_up") if name in prompt}
        | {"messages": list(prompt["messages"])}
        for prompt in prompts
    ]
    rows = _answer(lm, tokenizer, rows, config, generator)
    again = []
    for row in rows:
        follow_up = row.pop("follow_up", None)
        longer = [*row["messages"], {"role": "user", "content": follow_up}]
        room = lm.target.max_positions - config.answer_tokens
        if (
            follow_up is not None
            and row["finished"]
            and prompt_ids(tokenizer, longer, config.thinking).shape[1] <= room
        ):
            row["messages"] = longer
            again.append(row)
    if again:
        _answer(lm, tokenizer, again, config, generator)
    for row in again:
        if row["messages"][-1]["role"] == "user":  # its answer was not usable
            row["messages"].pop()
    return rows


def _answer(
    lm: SpeculativeLM,
    tokenizer: PreTrainedTokenizerBase,
    rows: list[dict[str, Any]],
    config: SelfMadeConfig,
    generator: torch.Generator,
) -> list[dict[str, Any]]:
    """Add an answer to each row; return the rows whose answers are usable, the others stay without one."""
    texts = [render(tokenizer, row["messages"], True, config.thinking) for row in rows]
    temperature = rows[0]["temperature"]
    sampling = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature > 0 else {}
    sampling["do_sample"] = temperature > 0
    answers = _continue(lm, tokenizer, texts, config.batch_size, config.answer_tokens, generator, **sampling)
    usable = []
    for row, (answer, finished) in zip(rows, answers, strict=True):
        text = str(tokenizer.decode(answer, skip_special_tokens=True)).strip()
        degenerate = not text or distinct_share(answer) < config.min_distinct
        if not degenerate and (finished or config.unfinished == "keep"):
            row["messages"].append({"role": "assistant", "content": text})
            row["tokens"], row["finished"] = row["tokens"] + len(answer), finished
            usable.append(row)
    return usable


def _generate_prompts(
    lm: SpeculativeLM, tokenizer: PreTrainedTokenizerBase, output: _Output, generator: torch.Generator
) -> list[dict[str, Any]]:
    """Generate a batch of prompts: ended by the model, not degenerate, not seen before."""
    config, seen, prefixes = output.config, output.seen, [user_prefix(tokenizer)] * output.at_once
    sampling = {"temperature": config.prompt_temperature, "min_p": config.prompt_min_p, "top_k": 0, "top_p": 1.0}
    generated = _continue(
        lm, tokenizer, prefixes, config.batch_size, config.prompt_tokens, generator, do_sample=True, **sampling
    )
    prompts: list[dict[str, Any]] = []
    for tokens, finished in generated:
        text = str(tokenizer.decode(tokens, skip_special_tokens=True)).strip()
        if finished and len(tokens) >= MIN_PROMPT_TOKENS and distinct_share(tokens) >= config.min_distinct:
            normalized = " ".join(text.lower().split())
            if normalized not in seen:
                prompts.append({"messages": [{"role": "user", "content": text}]})
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
    lengths = [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    longest_first = sorted(range(len(texts)), key=lengths.__getitem__, reverse=True)  # little padding among the first
    encoded = tokenizer(
        [texts[row] for row in longest_first],
        add_special_tokens=False,
        return_tensors="pt",
        padding=True,
        padding_side="left",
    )
    device = lm.target.device
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
        rows = over.args[0]
    ends = lm.target.end_tokens
    written: list[tuple[list[int], bool]] = [([], False)] * len(texts)
    for row, tokens in zip(longest_first, rows, strict=True):
        stop = next((i for i, token in enumerate(tokens) if token in ends), None)
        written[row] = tokens[:stop], stop is not None
    return written
