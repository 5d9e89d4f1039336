"""Conversations without a data set: the model answers its own prompts, or those of a file.

A prompt is the model's continuation of its own chat template, cut right after the user tag (Magpie,
arXiv:2406.08464).

Batch i depends on the seed, on i and on the prompts before it, none of which comes twice. A batch
has one temperature and is written whole or not at all, so a run that is stopped, or killed, resumes
and ends with the same file.
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

from ...console import ProgressBar, log
from ...files import naming, reading_back, require_regular, write_whole
from ...heads.base import dtype_name
from ...inference.drafters.round import Round
from ...inference.load import load_speculative_lm
from ...inference.rounds.observers import DecodingCall, RoundObserver
from ...inference.rounds.sequences import Sequences, left_padded
from ...inference.speculative_lm import SpeculativeLM
from ...inference.targets.loading import target_facts, tokenizer_provenance
from ...inference.text.chat_template import load_chat_tokenizer, prompt_ids, render
from ...options import check_options
from ...stopping import StopFlag, Stopped, stop_on_signals
from ..config import SelfMadeConfig
from .answer_file import (
    check_fingerprint,
    lines_of,
    read_state,
    state_path,
    with_defaults,
)
from .answers import (
    Answer,
    Conversation,
    calls_tool,
    is_usable,
    read_prompts_to_answer,
    readable,
    rejection,
    text_of,
)
from .bad_rows import report_rejected_prompts
from .conversations import RESUME_ADVICE, distinct_share
from .token_cache import UnusedRow

MIN_PROMPT_TOKENS = 4
"""Shorter prompts are dropped."""
WAVES = 8
"""Conversations that each row of the batch generates, one after another, between two writes."""
EMPTY_BATCHES = 20
"""Batches in a row without a usable text after which the command fails."""
FREE_TO_CHANGE = ("output", "bad_rows", "bad_rows_limit")
"""Options that may differ when the command resumes."""


@dataclass
class FileProgress:
    """Progress of the file, kept in a state file beside it."""

    batches: int = 0
    conversations: int = 0
    tokens: int = 0
    """Answer tokens."""
    unfinished: int = 0
    """Answers that were cut off."""
    size: int = 0
    """Bytes of the file that belong to whole batches."""


class ConversationFile:
    """The file of conversations, and the state file beside it, by which it resumes."""

    def __init__(self, config: SelfMadeConfig, prompts: list[dict[str, Any]] | None) -> None:
        """Start the file, or cut off a half-written batch."""
        # 1. What does not depend on an earlier start.
        self.path = require_regular(Path(config.output))
        self.state_path = state_path(self.path)
        self.progress = FileProgress()
        self.seen = set[str]()
        self.tokenizer: str | None = None
        self.config = config
        self.given = prompts is not None  # False if the model makes the prompts, too
        self.total = config.conversations
        if prompts is not None:
            self.total = min(config.conversations, len(prompts))
        # Prompts between two writes: `WAVES` for each row of the batch, but at most a quarter of
        # all.
        self.at_once = max(
            config.batch_size, min(WAVES * config.batch_size, config.conversations // 4)
        )
        self.batches = _batches(prompts or [], self.at_once, config.temperature)

        # 2. A new file. The state comes first: with it, an empty file is known as ours.
        if not self.state_path.exists():
            if self.path.exists():
                raise ValueError(
                    f"{self.path} exists and was not written by this command; choose another output"
                )
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.write_state()
            self.path.touch()
            return

        # 3. A file that was begun: take up its state, and compare the options.
        state = read_state(self.state_path)
        if "progress" not in state:
            raise ValueError(
                f"{self.path} was begun with answers from elsewhere, not the model's in this"
                f" process; {RESUME_ADVICE}"
            )
        with reading_back(self.state_path, f"remove it and {self.path} to start anew"):
            self.progress = FileProgress(**state["progress"])
            self.seen = set(state["seen"])
            for number in dataclasses.astuple(self.progress):
                if type(number) is not int or number < 0:
                    raise ValueError(f"its progress has {number!r}")
        self.tokenizer = state.get("tokenizer")
        before = with_defaults(state["options"])
        # "fastest" and "auto" depend on the machine: go on with what they were.
        if config.dtype in ("fastest", "auto"):
            self.config = dataclasses.replace(config, dtype=before["dtype"])
        # Before the first batch options may change freely.
        if self.progress.batches:
            now = dataclasses.asdict(self.config)
            check_options(
                f"{self.path} was started with", before, now, RESUME_ADVICE, FREE_TO_CHANGE
            )

        # 4. Cut off what a killed process wrote of a batch: the state says how much is whole.
        if not self.path.exists() and self.progress.size == 0:
            self.path.touch()
        if not self.path.exists() or self.path.stat().st_size < self.progress.size:
            raise ValueError(
                f"{self.path} lost what was written to it; remove {self.state_path} to start anew"
            )
        os.truncate(self.path, self.progress.size)

    def claim(self, tokenizer: str) -> None:
        """Take the tokenizer's fingerprint, which must be that of the rows that are there."""
        if self.progress.batches:
            check_fingerprint(self.tokenizer, tokenizer, self.path)
        self.tokenizer = tokenizer

    def state(self) -> tuple[int, bool]:
        """Return how many conversations are made, or prompts answered, and whether that is all."""
        progress = self.progress
        enough = progress.conversations >= self.config.conversations
        if not self.given:
            return progress.conversations, enough
        answered = sum(len(batch) for batch in self.batches[: progress.batches])
        return answered, enough or progress.batches >= len(self.batches)

    def add(self, conversations: list[Conversation]) -> None:
        """Write the conversations of a batch."""
        assert self.tokenizer is not None
        rows: list[dict[str, Any]] = []
        for conversation in conversations:
            rows += conversation.token_rows(self.tokenizer)
        # The rows are on disk before the state counts them: killed between the two, the next start
        # cuts the rows off and makes the batch again.
        with naming(self.path), self.path.open("ab") as file:
            file.write(lines_of(rows).encode())
            file.flush()
            os.fsync(file.fileno())
            self.progress.size = file.tell()
        self.progress.batches += 1
        self.progress.conversations += len(conversations)
        self.progress.tokens += sum(row["tokens"] for row in rows)
        self.progress.unfinished += sum(not row["finished"] for row in rows)
        self.write_state()

    def write_state(self) -> None:
        """Write options, tokenizer, progress and the prompts seen."""
        state = {
            "options": dataclasses.asdict(self.config),
            "tokenizer": self.tokenizer,
            "progress": dataclasses.asdict(self.progress),
            "seen": sorted(self.seen),
        }
        write_whole(self.state_path, json.dumps(state))


def _batches(
    prompts: list[dict[str, Any]], size: int, temperature: float
) -> list[list[dict[str, Any]]]:
    """Divide prompts into batches of one temperature each, in the order of their first prompts."""
    # Temperatures 0 1 0 0 1 in batches of two: prompts [0 2] [1 4] [3].
    batches: list[list[dict[str, Any]]] = []
    filling: dict[float, list[dict[str, Any]]] = {}  # batches with room, by temperature
    for prompt in prompts:
        batch = filling.setdefault(prompt.get("temperature", temperature), [])
        if not batch:
            batches.append(batch)
        batch.append(prompt)
        if len(batch) == size:
            del filling[prompt.get("temperature", temperature)]
    return batches


def make_conversations(config: SelfMadeConfig, observers: Sequence[RoundObserver] = ()) -> Path:
    """Write the file, or resume it; return its path.

    `observers` watch the model in this process.

    Raises:
        ValueError: invalid prompts or options, or a file that cannot be resumed.
        Stopped: Ctrl-C or SIGTERM; the batch in progress is thrown away.
    """
    # 1. Read the prompts, and the file so far.
    prompts: list[dict[str, Any]] | None = None
    rejected: list[UnusedRow] = []
    if config.prompts:
        prompts, rejected = read_prompts_to_answer(config.prompts)
    output = ConversationFile(config, prompts)
    path = output.path
    progress = output.progress
    if output.state()[1]:
        log.info(f"{path} is finished: {progress.conversations} conversations")
        return path

    # 2. Reject prompts before the model is loaded: those that the template refuses, and those that
    # are too long, if the model's config files tell its positions.
    tokenizer = load_chat_tokenizer(config.target)
    output.claim(tokenizer_provenance(tokenizer)["tokenizer"])
    if prompts is None:
        user_prefix(tokenizer)  # for its error
    numbered = list(enumerate((prompts or [])[: config.conversations]))
    lengths: dict[int, int] = {}
    for number, prompt in numbered:
        if not prompt["turns"]:
            continue
        try:
            conversation = Conversation({}, prompt["turns"], prompt["tools"])
            lengths[number] = len(_prompt_of(tokenizer, conversation, config))
        except ValueError as error:
            prompt["turns"] = []
            rejected.append(rejection(prompt, number, str(config.prompts), error))
    facts = target_facts(config.target)  # None where only loading the model tells
    if facts is not None:
        rejected += _too_long(numbered, lengths, config, facts.max_positions)
    report_rejected_prompts(rejected, len(prompts or []), config)

    # 3. Load the model, which may have fewer positions than its files tell.
    lm, _ = load_speculative_lm(
        config.target, config.head, output.config.dtype, allow_adapter=config.allow_adapter
    )
    lm.observers += observers
    dtype: Any = dtype_name(lm.target.dtype)
    output.config = config = dataclasses.replace(config, dtype=dtype)
    beyond = _too_long(numbered, lengths, config, lm.target.max_positions)
    if beyond:
        report_rejected_prompts([*rejected, *beyond], len(prompts or []), config)

    # 4. Make batch after batch. Each is written whole.
    watch = _Watch(output)
    lm.observers.append(watch)
    with stop_on_signals() as stop, watch.bar:
        empty = 0
        while not output.state()[1] and not stop.wanted:
            watch.begin_batch()
            made = _make_batch(lm, tokenizer, output, stop)
            if stop.wanted:  # the batch may be incomplete
                break
            empty = 0 if made else empty + 1
            if empty == EMPTY_BATCHES:
                raise ValueError(
                    f"{empty} batches in a row gave no usable text: the model does not end its"
                    " prompts, or repeats itself; try other temperatures, a larger prompt_tokens,"
                    " or a smaller min_distinct"
                )
            output.add(made[: config.conversations - progress.conversations])
    written = (
        f"{path}: {progress.conversations} conversations, {progress.tokens} answer tokens, "
        f"{progress.unfinished} cut off after {config.max_new_tokens}"
    )
    if not output.state()[1]:
        raise Stopped(f"stopped; {written}; the same command resumes from there")
    log.info(written)
    return path


class _Watch(RoundObserver):
    """Shows the progress of the batch after every round."""

    def __init__(self, output: ConversationFile) -> None:
        self.output = output
        done = min(output.state()[0], output.total)
        self.bar = ProgressBar("conversations", output.total, done)
        self.began = time.monotonic()
        self.tokens = 0  # of the batches before this one
        self.generations: list[Sequences] = []  # of this batch, in the order of `parts`
        self.parts: list[str] = []  # what the generations of this batch are called

    def begin_batch(self) -> None:
        """Start counting a batch."""
        self.tokens += sum(out.tokens for out in self.generations)
        self.generations = []
        self.parts = ["answers"]
        if not self.output.given:
            self.parts = ["prompts", "answers"]
            return
        prompts = self.output.batches[self.output.progress.batches]
        most = max(len(prompt["turns"]) for prompt in prompts)
        for turn in range(2, most + 1):
            self.parts.append(f"answers to turn {turn}")

    def begin(self, call: DecodingCall) -> None:
        """Count a generation."""
        self.generations.append(call.sequences)

    def round(self, finished: Round) -> None:
        """Show the progress after a round."""
        out = self.generations[-1]
        part = len(self.generations)
        tokens = self.tokens + sum(generation.tokens for generation in self.generations)
        ended = len(out.ended)
        rows = len(out.rows)
        # Parts count alike: in the second of three, with half of the rows ended, it is 1.5 / 3.
        share = (part - 1 + ended / rows) / len(self.parts)
        done = self.output.state()[0] + share * self.output.at_once
        rate = tokens / (time.monotonic() - self.began)
        note = f"{rate:.0f} tokens/s; {self.parts[part - 1]} of this batch: {ended}/{rows}"
        self.bar.update(min(done, self.output.total), note)


def _too_long(
    prompts: list[tuple[int, dict[str, Any]]],
    lengths: dict[int, int],
    config: SelfMadeConfig,
    positions: int,
) -> list[UnusedRow]:
    """Name the prompts that leave no room for their answers, and take their turns from them."""
    rejected: list[UnusedRow] = []
    for number, prompt in prompts:
        if prompt["turns"] and lengths[number] + config.max_new_tokens > positions:
            prompt["turns"] = []
            reason = (
                f"the prompt has {lengths[number]} tokens, which with {config.max_new_tokens} new"
                f" ones do not fit the model's {positions} positions"
            )
            rejected.append(rejection(prompt, number, str(config.prompts), reason))
    return rejected


def _prompt_of(
    tokenizer: PreTrainedTokenizerBase, conversation: Conversation, config: SelfMadeConfig
) -> list[int]:
    """Return the token ids after which the next turn of a conversation is answered."""
    ids_1T = prompt_ids(
        tokenizer, conversation.history, config.thinking, config.template_kwargs, conversation.tools
    )
    ids: list[int] = ids_1T[0].tolist()
    return ids


def user_prefix(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the chat template's text before the user's words."""
    marker = "USER-WORDS-BEGIN-HERE"
    text = render(tokenizer, [{"role": "user", "content": marker}])
    if marker not in text:
        raise ValueError(
            "the chat template alters the user's text, so prompts cannot be generated from it; give"
            " --prompts"
        )
    return text[: text.index(marker)]


def _make_batch(
    lm: SpeculativeLM, tokenizer: PreTrainedTokenizerBase, output: ConversationFile, stop: StopFlag
) -> list[Conversation]:
    """Generate the usable conversations of the next batch; not all of them if a stop is wanted."""
    config = output.config
    batch = output.progress.batches
    # 1. A generator for this batch alone: a run that resumes with it draws the same.
    generator = torch.Generator(lm.target.device).manual_seed(config.seed * 1_000_003 + batch)
    if output.given:
        prompts = output.batches[batch]
    else:
        prompts = _generate_prompts(lm, tokenizer, output, generator)
    if not prompts:
        return []
    temperature = prompts[0].get("temperature", config.temperature)
    source = Path(str(config.prompts)).name if output.given else "self-made"

    # 2. Begin a conversation with each prompt.
    conversations: list[Conversation] = []
    for prompt in prompts:
        if not prompt["turns"]:  # it cannot be answered
            continue
        kind = {"kind": prompt["kind"]} if "kind" in prompt else {}
        columns = {"source": source, "temperature": temperature, **kind}
        conversations.append(Conversation(columns, prompt["turns"], prompt.get("tools")))

    # 3. Answer turn by turn, all conversations together. Some have more turns than others.
    asked = conversations
    while not stop.wanted:
        asked = [conversation for conversation in asked if conversation.goes_on]
        if not asked:
            break
        _answer(lm, tokenizer, asked, temperature, config, generator)
    return [conversation for conversation in conversations if conversation.answers]


def _answer(
    lm: SpeculativeLM,
    tokenizer: PreTrainedTokenizerBase,
    conversations: list[Conversation],
    temperature: float,
    config: SelfMadeConfig,
    generator: torch.Generator,
) -> None:
    """Answer the next turn of each conversation, or end the conversation.

    It ends if its prompt does not fit or its answer is not usable.
    """
    asked: list[Conversation] = []
    prompts: list[list[int]] = []
    for conversation in conversations:
        try:
            prompt = _prompt_of(tokenizer, conversation, config)
        except ValueError:  # a template that refuses a later turn
            prompt = []
        if not prompt or len(prompt) + config.max_new_tokens > lm.target.max_positions:
            conversation.ended = True
            continue
        asked.append(conversation)
        prompts.append(prompt)
    if not asked:
        return
    # The distribution itself: the checkpoint's own top_k and top_p do not apply.
    sampling = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature > 0 else {}
    sampling["do_sample"] = temperature > 0
    answers = continue_prompts(
        lm, prompts, config.batch_size, config.max_new_tokens, generator, **sampling
    )
    for conversation, prompt, (tokens, finished) in zip(asked, prompts, answers, strict=True):
        message = readable(tokenizer, prompt, tokens, lm.target.end_tokens)
        if not is_usable(text_of(message), tokens, finished, config):
            conversation.ended = True
            continue
        called = calls_tool(tokenizer, tokens)
        conversation.answers.append(Answer(message, finished, called, len(tokens), prompt, tokens))


def _generate_prompts(
    lm: SpeculativeLM,
    tokenizer: PreTrainedTokenizerBase,
    output: ConversationFile,
    generator: torch.Generator,
) -> list[dict[str, Any]]:
    """Generate a batch of prompts: ended by the model, not degenerate, not seen before."""
    config = output.config
    seen = output.seen
    # All rows begin alike, and differ by what is drawn.
    prefix = tokenizer(user_prefix(tokenizer), add_special_tokens=False)["input_ids"]
    sampling = {
        "temperature": config.prompt_temperature,
        "min_p": config.prompt_min_p,
        "top_k": 0,
        "top_p": 1.0,
    }
    generated = continue_prompts(
        lm,
        [list(prefix)] * output.at_once,
        config.batch_size,
        config.prompt_tokens,
        generator,
        do_sample=True,
        **sampling,
    )
    prompts: list[dict[str, Any]] = []
    for tokens, finished in generated:
        words = [token for token in tokens if token not in lm.target.end_tokens]
        text = str(tokenizer.decode(words, skip_special_tokens=True)).strip()
        if (
            finished
            and len(words) >= MIN_PROMPT_TOKENS
            and distinct_share(words) >= config.min_distinct
        ):
            # Texts that differ in case or white space count as the same.
            normalized = " ".join(text.lower().split())
            if normalized not in seen:
                prompts.append({"turns": [[{"role": "user", "content": text}]]})
            seen.add(normalized)
    return prompts


def continue_prompts(
    lm: SpeculativeLM,
    prompts: list[list[int]],
    slots: int,
    new_tokens: int,
    generator: torch.Generator,
    **sampling: Any,
) -> list[tuple[list[int], bool]]:
    """Continue each prompt; return the new tokens, and whether the model ended by itself.

    The tokens include the end token.
    """
    # The first `slots` rows are generated together: sorted by length they need little padding.
    longest_first = sorted(range(len(prompts)), key=lambda row: -len(prompts[row]))
    ids_BT, mask_BT = left_padded(
        [torch.tensor(prompts[row]) for row in longest_first], lm.target.device
    )
    output = lm.generate(
        ids_BT,
        attention_mask=mask_BT,
        max_new_tokens=new_tokens,
        generator=generator,
        max_batch_size=slots,
        pad_token_id=0,  # it is masked, and many tokenizers have no token for it
        **sampling,
    )
    # Cut each row after its end token, and put the rows back in the order of the prompts.
    rows = output.sequences[:, ids_BT.shape[1] :].tolist()
    ends = lm.target.end_tokens
    written: list[tuple[list[int], bool]] = [([], False)] * len(prompts)
    for row, tokens in zip(longest_first, rows, strict=True):
        stop = next((i for i, token in enumerate(tokens) if token in ends), None)
        written[row] = (tokens, False) if stop is None else (tokens[: stop + 1], True)
    return written
