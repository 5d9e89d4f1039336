"""Conversations with no data set: the model writes prompts itself and then answers them, or answers given ones.

A prompt is what the model writes after its own chat template, cut right behind the user tag (Magpie, arXiv:2406.08464).

Batch i depends on the seed, on i and on the prompts before it, of which none comes twice. A batch is written whole or
not at all, so a run that is stopped goes on to the same file.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ..inference import SpeculativeLM, load_tokenizer
from .commands import SelfMadeConfig
from .config import dtype_of
from .console import Stopped, StopRequest, console, duration, progress_bar
from .data import check_lengths, check_tokenizer, prompt_ids, read_prompts, render

Messages = list[dict[str, str]]
MIN_PROMPT_TOKENS = 4
"""Shorter prompts say nothing."""
WAVES = 8
"""Between two writes each place of the batch is taken by so many conversations, one after the other."""
EMPTY_BATCHES = 20
"""So many batches in a row without a usable text, and the model is given up on."""


@dataclass
class Progress:
    """How far the file is: what a state file beside it holds."""

    batches: int = 0
    """Batches made."""
    conversations: int = 0
    """Conversations written."""
    tokens: int = 0
    """Answer tokens written."""
    size: int = 0
    """Bytes of the file that are whole."""


def make_conversations(config: SelfMadeConfig) -> Path:
    """Write the file, or go on with it; return its path.

    Raises:
        ValueError: options that do not match the file that is there, unusable prompts or tokenizer.
        Stopped: Ctrl-C or SIGTERM, once the batch has been written.
    """
    if config.server is not None:
        from .served import ask_server  # needs the package openai, which nothing else does

        return ask_server(config)
    path = Path(config.output)
    progress, seen = _claim(path, config)
    prompts = read_prompts(config.prompts) if config.prompts else None
    if _finished(progress, config, prompts):
        console.print(f"{path} is finished: {progress.conversations} conversations")
        return path
    tokenizer = load_tokenizer(config.target)
    check_tokenizer(tokenizer, config.target)
    lm = SpeculativeLM.from_pretrained(config.target, config.head, dtype_of(config.target_dtype))
    if prompts is not None:
        ids = [prompt_ids(tokenizer, messages) for messages in prompts[: config.conversations]]
        check_lengths(ids, config.answer_tokens, lm.target.max_positions, str(config.prompts))
    empty = 0
    started, before = time.perf_counter(), dataclasses.replace(progress)
    total = config.conversations if prompts is None else min(config.conversations, len(prompts))
    with StopRequest() as stop, progress_bar() as bar:
        task = bar.add_task("conversations", total=total, note="")
        while not _finished(progress, config, prompts) and not stop.wanted:
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
            seconds = time.perf_counter() - started
            rate = (progress.tokens - before.tokens) / seconds
            done = min(_done(progress, config, prompts), total)
            bar.update(task, completed=done, note=f"{rate:.0f} answer tokens/s")
            if not console.is_terminal:
                left = seconds / max(done - _done(before, config, prompts), 1) * (total - done)
                console.print(f"{done}/{total}  {rate:.0f} answer tokens/s  {duration(left)} left")
    written = f"{path}: {progress.conversations} conversations, {progress.tokens} answer tokens"
    if not _finished(progress, config, prompts):
        raise Stopped(f"stopped; {written}; the same command goes on from there")
    console.print(written)
    return path


def user_prefix(tokenizer: PreTrainedTokenizerBase) -> str:
    """The chat template's text up to where the user's words begin.

    Raises:
        ValueError: a template that does not show the user's words as they are.
    """
    marker = "USER-WORDS-BEGIN-HERE"
    text = render(tokenizer, [{"role": "user", "content": marker}])
    if marker not in text:
        raise ValueError("the chat template changes the user's words, so it cannot be cut before them; give --prompts")
    return text[: text.index(marker)]


def distinct_share(tokens: Sequence[object], n: int = 4) -> float:
    """Share of a text's n-grams that are distinct; 1 for texts shorter than 8 n-grams, which say nothing."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if len(grams) >= 8 else 1.0


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
        asked = _write_prompts(lm, tokenizer, config, generator, seen)
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
        text = _text(tokenizer, answer)
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


def _write_prompts(
    lm: SpeculativeLM,
    tokenizer: PreTrainedTokenizerBase,
    config: SelfMadeConfig,
    generator: torch.Generator,
    seen: set[str],
) -> list[Messages]:
    """One batch of prompts by the model itself: ended by itself, not degenerate, not seen before."""
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
        text = _text(tokenizer, tokens)
        if finished and len(tokens) >= MIN_PROMPT_TOKENS and distinct_share(tokens) >= config.min_distinct:
            if _normal(text) not in seen:
                prompts.append([{"role": "user", "content": text}])
            seen.add(_normal(text))
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
    """What the model writes after each text, and whether it ended by itself; end tokens left out."""
    encoded = tokenizer(texts, add_special_tokens=False, return_tensors="pt", padding=True, padding_side="left")
    device = lm.target.device
    output = lm.generate(
        encoded["input_ids"].to(device),
        attention_mask=encoded["attention_mask"].to(device),
        max_new_tokens=new_tokens,
        generator=generator,
        slots=slots,
        pad_token_id=tokenizer.pad_token_id,
        **sampling,
    )
    ends = lm.target.end_tokens
    written = []
    for row in output.sequences[:, encoded["input_ids"].shape[1] :].tolist():
        stop = next((i for i, token in enumerate(row) if token in ends), None)
        written.append((row[:stop], stop is not None))
    return written


def _claim(path: Path, config: SelfMadeConfig) -> tuple[Progress, set[str]]:
    """Start the file, or find where it stopped and cut off what was half-written."""
    state_path = _state_path(path)
    if not state_path.exists():
        if path.exists():
            raise ValueError(f"{path} exists and was not written by this command; choose another output")
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_state(path, config, Progress(), set())
        path.touch()
        return Progress(), set()
    state = json.loads(state_path.read_text(encoding="utf-8"))
    now = dataclasses.asdict(config)
    for name, before in state["options"].items():
        if state["progress"]["batches"] and name != "output" and before != now[name]:
            raise ValueError(
                f"{path} was started with {name} = {before!r}, not {now[name]!r}; go on with its own options, or "
                "choose another output"
            )
    progress = Progress(**state["progress"])
    if not path.exists() and progress.size == 0:
        path.touch()
    if not path.exists() or path.stat().st_size < progress.size:
        raise ValueError(f"{path} lost what was written to it; remove {state_path} to start anew")
    os.truncate(path, progress.size)
    return progress, set(state["seen"])


def _write_state(path: Path, config: SelfMadeConfig, progress: Progress, seen: set[str]) -> None:
    state = {"options": dataclasses.asdict(config), "progress": dataclasses.asdict(progress), "seen": sorted(seen)}
    partial = _state_path(path).with_suffix(".partial")
    partial.write_text(json.dumps(state), encoding="utf-8")
    partial.replace(_state_path(path))


def _state_path(path: Path) -> Path:
    return path.with_name(path.name + ".state.json")


def _done(progress: Progress, config: SelfMadeConfig, prompts: list[Messages] | None) -> int:
    """Of what was asked for: conversations, or given prompts."""
    return progress.conversations if prompts is None else progress.batches * _at_once(config)


def _finished(progress: Progress, config: SelfMadeConfig, prompts: list[Messages] | None) -> bool:
    if progress.conversations >= config.conversations:
        return True
    return prompts is not None and _done(progress, config, prompts) >= len(prompts)


def _at_once(config: SelfMadeConfig) -> int:
    """Prompts between two writes to the file: several for each place of the batch, but of few only a quarter."""
    return max(config.batch_size, min(WAVES * config.batch_size, config.conversations // 4))


def _text(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=True)).strip()


def _normal(text: str) -> str:
    return " ".join(text.lower().split())
