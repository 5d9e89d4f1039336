"""Recording of answers while they are decoded: their tokens, and the target's states that pass through the loop.

    with lm.record("recorded"):
        lm.generate(...)

`RecordingDrafter` stands between the loop and the drafter of a generation. It asks the target for the recorded layers
too, and keeps what drafters are shown: the features of the prompts' tokens, and those of the accepted nodes of every
round. A `Recording` takes each answer as it ends, and a thread of its own writes it to a `RecordedFolder`. Decoding
never waits for the disk: answers that the thread cannot keep up with are dropped and counted.

Letters in tensor names: B batch, T time, A accepted tokens or nodes of a path, L recorded layers, D hidden size,
F width of the chosen layers side by side, N nodes.
"""

from __future__ import annotations

import atexit
import os
import threading
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from .decoding import Decoding
from .drafters.base import BatchDrafter, DraftContext, PrefillChunk, replaced_rows, selected_rows
from .feature_cache import FORMATS, cache_manifest, kept_layers
from .models.encoder_decoder import Seq2SeqTarget
from .models.loading import tokenizer_provenance
from .recorded_folder import AnswerMarks, End, RecordedFolder
from .round import Round
from .sequences import Conversation, Sequences
from .streaming import StreamClosed
from .target import Target
from .tree import DraftTree

NO_RECORD = "HEADSTART_NO_RECORD"
"""Environment variable that switches all recording off, unless it is empty or 0."""
MAX_BYTES = 4 * 2**30
"""Bytes on disk of a recording, by default."""
MAX_LENGTH = 1024
"""Tokens of a recorded text, by default: as many as `data.max_length` in training."""
WAITING_BYTES = 2**30
"""States in memory that wait to be written, beyond which answers are dropped."""
_CHECKED: WeakKeyDictionary[Target, str] = WeakKeyDictionary()
"""Targets that were found to decode with the features that training computes, and the engine that did."""
OTHER_WEIGHTS = "the target's weights are not those with which the recording began"
"""Why an answer is left out whose states would be those of another model."""


def recording_is_off() -> bool:
    """Whether the environment forbids all recording."""
    return os.environ.get(NO_RECORD, "0") not in ("", "0")


def refuse_if_off(what: str) -> None:
    """Refuse what keeps copies of recorded texts, where the environment forbids all recording.

    Raises:
        ValueError: it does.
    """
    if recording_is_off():
        raise ValueError(f"{NO_RECORD} is set, and {what} would keep copies of recorded texts; unset it to allow that")


@dataclass
class Text:
    """The states of one row's text, as far as they are known."""

    pieces: list[Tensor] = field(default_factory=list)
    """[T, L, D] each, one after the other."""
    length: int = 0
    """Tokens whose states are known."""
    begun_before: bool = False
    """Whether its first tokens were read before this recording began, so that their states are lost."""

    def first(self, length: int) -> Text:
        """The states of the first tokens."""
        pieces = []
        left = length
        for piece_TLD in self.pieces:
            if left <= 0:
                break
            pieces.append(piece_TLD[:left])
            left -= len(piece_TLD)
        return Text(pieces, length, self.begun_before)


@dataclass(frozen=True)
class Answer:
    """An answer that has ended and waits to be written."""

    tokens: list[int]
    """Its prompt and itself, cut to what is recorded."""
    prompt: int
    """Tokens of the prompt."""
    pieces: list[Tensor]
    """Its states, as those of a `Text`."""
    marks: AnswerMarks
    size: int
    """Bytes of its states in memory."""


class Recording:
    """Records answers from `SpeculativeLM.record` to `stop`; a context manager that stops at its end."""

    def __init__(
        self,
        target: Target,
        folder: RecordedFolder | None,
        kind: str,
        max_length: int,
        running: list[Recording],
    ) -> None:
        """Begin to record a target as it is now; with None as folder, record nothing.

        `running` are the recordings of the decoder, of which this one becomes one until it stops.
        """
        self.folder = folder
        self.kind = kind
        self.max_length = max_length
        self.texts: WeakKeyDictionary[Conversation, tuple[list[int], Text]] = WeakKeyDictionary()
        """The text of each conversation, and its states: a later turn goes on from them."""
        self.written = 0
        """Answers that are in the folder, or were."""
        self.bytes = 0
        """Bytes that were written."""
        self.dropped = 0
        """Answers that came faster than they could be written."""
        self.skipped: Counter[str] = Counter()
        """Answers that could not be recorded, by the reason."""
        self.failure: str | None = None
        """Why recording has ended by itself, such as a full disk."""
        self._target = ref(target)
        self._version = None if folder is None else target.version
        """State of the target's weights with which it began."""
        self._running = running
        self._waiting: SimpleQueue[Answer | None] = SimpleQueue()
        self._waiting_bytes = 0
        self._lock = threading.Lock()
        self._stopped = folder is None
        self._thread = threading.Thread(target=self._write_all, name="headstart recording", daemon=True)
        if folder is not None:
            running.append(self)
            self._thread.start()
            atexit.register(self.stop)

    def __repr__(self) -> str:
        return f"Recording({self.summary()})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the recording once all answers so far are on disk; answers that are being decoded are left out."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
        atexit.unregister(self.stop)
        self._running.remove(self)
        self._waiting.put(None)
        self._thread.join()
        self.texts.clear()
        self._check_weights()

    def leave_out(self, reason: str) -> None:
        """Count an answer that cannot be recorded; say it aloud if the weights have changed, the first time."""
        if reason == OTHER_WEIGHTS and not self.skipped[reason]:
            assert self.folder is not None
            warnings.warn(
                f"{reason}: answers are not recorded in {str(self.folder.folder)!r}, as a folder belongs to one state "
                "of the weights. Stop this recording, and begin another one in a folder of its own",
                stacklevel=2,
            )
        self.skipped[reason] += 1

    def is_of(self, target: Target) -> bool:
        """Whether the target has the weights and active adapters with which the recording began, as it seems."""
        return target.version == self._version

    def _check_weights(self) -> None:
        """Warn of writes to weights that `Target.version` has not shown, such as through `.data` on a GPU."""
        target = self._target()
        if target is None or self.folder is None or self.written == 0 or not self.is_of(target):
            return
        if target.current_provenance()["weights"] != self.folder.weights:
            warnings.warn(
                f"the target's weights were changed during the recording in {str(self.folder.folder)!r} by writes that "
                "are not noticed on this device (through .data): it may hold states of both, remove it. Call "
                "lm.refresh() after such writes, or stop recording before them",
                stacklevel=3,
            )

    def summary(self) -> str:
        """A line about the answers that were recorded, and those that were not."""
        if self.folder is None:
            return f"off by {NO_RECORD}"
        parts = [f"{self.written} answers, {self.bytes / 2**20:.1f} MiB, in {self.folder.folder}"]
        if self.dropped:
            parts.append(f"{self.dropped} dropped, faster than the disk")
        parts += [f"{count} not recorded: {reason}" for reason, count in self.skipped.items()]
        if self.failure is not None:
            parts.append(f"ended by itself: {self.failure}")
        return "; ".join(parts)

    @contextmanager
    def following(
        self,
        drafter: BatchDrafter,
        decoding: Decoding,
        sequences: Sequences,
        past: Conversation | None,
        lossy: bool,
    ) -> Iterator[BatchDrafter]:
        """A drafter to decode with in place of another, which records what is decoded inside the block."""
        samples = decoding.verification.samples
        assert self.folder is not None
        marks = AnswerMarks(
            kind=self.kind,
            temperature=decoding.process_logits.temperature if samples else 0.0,
            lossy=samples and lossy,
            ended="complete",
            cut=False,
            tokenizer=self.folder.tokenizer,
            rounds={},
        )
        recorder = RecordingDrafter(drafter, self, self.folder.layers, decoding, sequences, past, marks)
        try:
            yield recorder
        except BaseException as error:
            left = isinstance(error, StreamClosed | KeyboardInterrupt)
            recorder.end("stopped" if left else "failed")
            raise
        recorder.end("complete")

    def put(self, answer: Answer) -> None:
        """Have an answer written; it is dropped if too much waits already."""
        with self._lock:
            full = self._waiting_bytes > 0 and self._waiting_bytes + answer.size > WAITING_BYTES
            if full or self._stopped or self.failure is not None:
                self.dropped += 1
                return
            self._waiting_bytes += answer.size
            self._waiting.put(answer)

    @torch.inference_mode()
    def _write_all(self) -> None:
        """Write what is put, in a thread of its own, until `stop`."""
        while (answer := self._waiting.get()) is not None:
            if self.failure is not None:
                self.dropped += 1
                continue
            try:
                self._write(answer)
            except OSError as error:
                self.failure = str(error)
                warnings.warn(f"recording stops, decoding goes on: {error}", stacklevel=2)
            except Exception as error:  # a fault of ours must not end the program that decodes
                self.failure = repr(error)
                warnings.warn(f"recording stops, decoding goes on: {error!r}", stacklevel=2)
            finally:
                with self._lock:
                    self._waiting_bytes -= answer.size

    def _write(self, answer: Answer) -> None:
        assert self.folder is not None
        length = len(answer.tokens)
        states_TLD = torch.cat(answer.pieces)[:length]
        if not bool(states_TLD.isfinite().all()):
            self.skipped["its states are not finite"] += 1
            return
        if len(states_TLD) < length:  # the target has not read the last token, and training does not use its state
            states_TLD = torch.cat([states_TLD, torch.zeros_like(states_TLD[:1])])
        size = self.folder.write(answer.tokens, answer.prompt, states_TLD, answer.marks)
        if size == 0:
            self.skipped["it alone is larger than max_bytes"] += 1
            return
        self.written += 1
        self.bytes += size


class RecordingDrafter(BatchDrafter):
    """A drafter that keeps the states of all texts of a generation, and leaves drafting to another."""

    def __init__(
        self,
        drafter: BatchDrafter,
        recording: Recording,
        layers: Sequence[int],
        decoding: Decoding,
        sequences: Sequences,
        past: Conversation | None,
        marks: AnswerMarks,
    ) -> None:
        """Record `layers`, whichever of them `drafter` reads itself."""
        self.drafter = drafter
        self.recording = recording
        self.target = decoding.target
        self.sequences = sequences
        self.past = past
        self.marks = marks
        self.parts = (drafter,)
        self.kind = drafter.kind
        self.max_nodes = drafter.max_nodes
        more = [layer for layer in layers if layer not in drafter.feature_layers]
        self.feature_layers = (*drafter.feature_layers, *more)
        self.columns = [self.feature_layers.index(layer) for layer in layers]
        assert recording.folder is not None
        self.dtype = FORMATS.get(recording.folder.format) if recording.folder.format != "int8" else None
        """Dtype of the states that are kept; None for the target's own."""
        self.rows: list[int] = []
        """Rows of the call that are decoded, by their place in the batch."""
        self.texts: dict[int, Text] = {}
        """Of the rows that have begun and not ended."""
        self.rounds: dict[int, dict[str, list[int]]] = {}
        """Of the rows that have begun, see `AnswerMarks.rounds`."""
        self.lengths: list[int] = []
        """Of each row that is decoded, the tokens that its answer had before this step."""
        self.ended: list[int] = []
        """Rows that have ended, whose last states an accelerator may still be copying."""
        self.unread = "images" if decoding.prompt_inputs is not None else None

    def __repr__(self) -> str:
        return repr(self.drafter)

    def begin(self, context: DraftContext) -> None:
        self._enter(context.rows, Text())
        self.drafter.begin(context)

    def resume(self, context: DraftContext, kept: PrefillChunk, state: Any, whole: bool) -> None:
        self._enter(context.rows, self._text_before(kept.tokens_BT[0].tolist()))
        self.drafter.resume(context, kept, state, whole)

    def can_resume(self, state: Any) -> bool:
        return self.drafter.can_resume(state)

    def saved_state(self) -> Any:
        return self.drafter.saved_state()

    def prefill(self, chunk: PrefillChunk) -> None:
        self._keep(chunk.features_BTF, chunk.lengths_B.tolist())  # sync: once for 2048 tokens of the prompts
        self.drafter.prefill(replace(chunk, features_BTF=self._own(chunk.features_BTF)))

    def propose(self, roots_B: Tensor) -> DraftTree:
        self.lengths = [len(self.sequences.rows[row]) for row in self.rows]
        return self.drafter.propose(roots_B)

    def observe(self, step: Round) -> None:
        # The host has waited for this step's tokens, and so for the states of all steps before.
        self._hand_over("complete")
        self._count(step.verified)
        self._keep(step.verdict.features_BAF, [len(tokens) for tokens in step.tokens])
        features_BNF = self._own(step.output.features_BNF)
        output = replace(step.output, features_BNF=features_BNF)
        verdict = replace(step.verdict, features_BAF=self._own(step.verdict.features_BAF))
        self.drafter.observe(replace(step, output=output, verdict=verdict))

    def select(self, rows_R: Tensor) -> None:
        self.rows = selected_rows(self.rows, rows_R)
        self.drafter.select(rows_R)

    def replace(self, rows_R: Tensor, other: Self) -> None:
        self.rows = replaced_rows(self.rows, rows_R, other.rows)
        self.drafter.replace(rows_R, other.drafter)

    def fresh(self) -> Self:
        """A drafter for other rows of the same generation: the texts are those of both."""
        other = super().fresh()
        other.drafter = self.drafter.fresh()
        other.parts = (other.drafter,)
        other.rows = []
        return other

    def end(self, ended: End) -> None:
        """Hand over all answers, those that have not ended too: how the generation did."""
        if self.target.device.type != "cpu":
            torch.get_device_module(self.target.device).current_stream(self.target.device).synchronize()
        self._hand_over("complete")
        self.ended += list(self.texts)
        self._hand_over(ended)

    def _enter(self, rows: Sequence[int], text: Text) -> None:
        """Begin the texts of these rows, with what is known of them."""
        self.rows = list(rows)
        for row in rows:
            self.texts[row] = Text([*text.pieces], text.length, text.begun_before)
            self.rounds[row] = {}

    def _text_before(self, tokens: list[int]) -> Text:
        """The states of a conversation's tokens that are not read again, as far as they are known."""
        before = None if self.past is None else self.recording.texts.get(self.past)
        if before is not None:
            known, text = before
            if known[: len(tokens)] == tokens and text.length >= len(tokens):
                return text.first(len(tokens))
        return Text(begun_before=True)

    def _own(self, features: Tensor) -> Tensor:
        """The part of the features that the drafter has asked for."""
        own = len(self.drafter.feature_layers)
        every = len(self.feature_layers)
        if own == every:
            return features
        return features[..., : features.shape[-1] // every * own].contiguous()

    def _count(self, tree: DraftTree) -> None:
        """Count a round, and the tokens that it has added to each row."""
        nodes = str(tree.tokens_BN.shape[1])
        for row, length in zip(self.rows, self.lengths, strict=True):
            if row in self.texts:
                counts = self.rounds[row].setdefault(nodes, [0, 0])
                counts[0] += 1
                counts[1] += len(self.sequences.rows[row]) - length

    def _keep(self, features_BTF: Tensor, lengths: list[int]) -> None:
        """Keep the states of the next tokens of each row: the first ones of its features."""
        longest = max(lengths)
        every = len(self.feature_layers)
        states_BTLD = features_BTF[:, :longest].unflatten(-1, (every, -1))
        if self.columns != list(range(every)):
            states_BTLD = states_BTLD[:, :, self.columns]
        # Without waiting: the memory that an accelerator copies to is read after its next tokens have arrived.
        states_BTLD = states_BTLD.to("cpu", self.dtype or states_BTLD.dtype, non_blocking=True)
        for row, states_TLD, length in zip(self.rows, states_BTLD.unbind(), lengths, strict=True):
            text = self.texts.get(row)
            if text is None:
                continue
            if text.length < self.recording.max_length:
                text.pieces.append(states_TLD[:length])
            text.length += length
            if row in self.sequences.ended and row not in self.ended:
                self.ended.append(row)

    def _hand_over(self, ended: End) -> None:
        """Have the answers written that have ended."""
        if not self.ended:
            return
        same_weights = self.recording.is_of(self.target)
        for row in self.ended:
            text = self.texts.pop(row)
            answer = self._answer(row, text, ended) if same_weights else OTHER_WEIGHTS
            if isinstance(answer, str):
                self.recording.leave_out(answer)
            elif answer is not None:
                self.recording.put(answer)
        self.ended.clear()

    def _answer(self, row: int, text: Text, ended: End) -> Answer | str | None:
        """An answer to be written, or why it cannot be; None if there is none yet."""
        prompt = self.sequences.prompts[row].tolist()
        tokens = prompt + self.sequences.rows[row]
        if self.past is not None:
            self.recording.texts[self.past] = (tokens, text)
        # The newest token has no state yet. An error in a round leaves more tokens without one.
        length = min(len(tokens), text.length + 1, self.recording.max_length)
        if len(tokens) == len(prompt):
            return None
        if text.begun_before:
            return "its text was begun before the recording"
        if length <= len(prompt):
            return f"its prompt is as long as max_length, {self.recording.max_length} tokens"
        if self.unread is not None:
            return f"its prompt holds {self.unread}"
        if self._crosses_border(len(prompt), length):
            return "the target computes its first tokens otherwise than its last (longrope)"
        return Answer(
            tokens[:length],
            len(prompt),
            text.pieces,
            replace(self.marks, ended=ended, cut=length < len(tokens), rounds=self.rounds[row]),
            sum(states_TLD.nbytes for states_TLD in text.pieces),
        )

    def _crosses_border(self, prompt: int, length: int) -> bool:
        """Whether a text's states are not those that the target computes when it reads the whole text."""
        segments = self.target.segments
        return segments is not None and segments.by_last and segments.of(prompt - 1) != segments.of(length - 1)


def start_recording(
    target: Target,
    layers: Sequence[int],
    folder: str | Path,
    kind: str,
    max_bytes: int,
    format: str,
    max_length: int,
    tokenizer: Any,
    running: list[Recording],
) -> Recording:
    """Begin to record a target's answers, with the features of `layers` and the states after the final norm.

    The other arguments are those of `SpeculativeLM.record` and `Recording`.
    """
    if recording_is_off():
        warnings.warn(f"{NO_RECORD} is set: nothing is recorded in {str(folder)!r}", stacklevel=3)
        return Recording(target, None, kind, max_length, running)
    if running:
        at = running[0].folder
        assert at is not None
        raise ValueError(f"answers are recorded in {str(at.folder)!r} already; stop that recording first")
    if isinstance(target, Seq2SeqTarget):
        raise ValueError(f"{target.name!r} is an encoder-decoder, for which no head is trained: it is not recorded")
    if format not in FORMATS:
        raise ValueError(f"unknown format {format!r} of recorded states; choose from {', '.join(FORMATS)}")
    if max_length < 2 or max_bytes < 1:
        raise ValueError(
            f"a recording needs a max_length of at least 2 tokens and max_bytes of at least 1, not {max_length} and "
            f"{max_bytes}"
        )
    if _CHECKED.get(target) != target.engine.name:
        target.check_features()
        _CHECKED[target] = target.engine.name
    provenance = {**target.current_provenance(), **tokenizer_provenance(tokenizer)}
    manifest = cache_manifest(provenance, kept_layers(layers), target.info.hidden_size, format)
    return Recording(target, RecordedFolder(Path(folder), manifest, max_bytes), kind, max_length, running)
