"""Recording of answers while they are decoded: their tokens and the target's states.

    with record(lm, "recorded"):
        lm.generate(...)

A `Recording` observes the decoder, which computes features of the recorded layers for it. Of each
call a `RecordedCall` keeps those of the prompts' tokens and of the accepted nodes of every round.
The recording takes each answer as it ends, and a thread of its own writes it to a `RecordedFolder`.
Decoding never waits for the disk: answers that the thread cannot keep up with are dropped and
counted.

Letters in tensor names: B batch, T time, A accepted nodes of a path, L recorded layers, D hidden
size, F width of the chosen layers side by side.
"""

from __future__ import annotations

import atexit
import os
import threading
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Self
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ...files import at_home
from ...inference.drafters.base import PrefillChunk
from ...inference.drafters.costs import head_shape
from ...inference.drafters.round import Round
from ...inference.engines.encoder_decoder import Seq2SeqTarget
from ...inference.engines.target import Target
from ...inference.feature_cache import FORMATS, cache_manifest, kept_layers
from ...inference.rounds.observers import DecodingCall, RoundObserver
from ...inference.rounds.sequences import Conversation
from ...inference.speculative_lm import SpeculativeLM
from ...inference.targets.as_loaded import as_loaded
from ...inference.targets.loading import tokenizer_provenance
from ...inference.text.streaming import StreamClosed
from ...inference.trees.stats import Stats
from ...inference.trees.verify import greedy, is_lossy_rule
from ...inference.tuning.machine import hardware
from .folder import AnswerMarks, End, RecordedFolder, check_kind, keep_costs, machine_costs

NO_RECORD = "HEADSTART_NO_RECORD"
"""Environment variable that switches all recording off, unless it is empty or 0."""
MAX_BYTES = 4 * 2**30
"""Bytes on disk of a recording, by default."""
MAX_LENGTH = 1024
"""Tokens of a recorded text, by default: as many as `data.max_length` in training."""
WAITING_BYTES = 2**30
"""Bytes of states in memory that wait to be written, beyond which answers are dropped."""
_CHECKED: WeakKeyDictionary[Target, str] = WeakKeyDictionary()
"""Targets that were found to decode with the features that training computes, and the engine that
did."""
OTHER_WEIGHTS = "the target's weights are not those with which the recording began"
"""Why an answer is left out whose states would be those of another model."""


def record(
    lm: SpeculativeLM,
    folder: str | Path,
    *,
    kind: str = "",
    max_bytes: int = MAX_BYTES,
    format: str = "bfloat16",
    max_length: int = MAX_LENGTH,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Recording:
    """Record all answers of a decoder from now on, for a head to be trained on them.

    Written are the tokens of prompts and answers, and the target's states that the head reads,
    which pass through the loop anyway; and what rounds cost on this machine, if that was measured,
    for `headstart adapt` to predict speed. Answers stay the same, and decoding does not wait for
    the disk.

    with record(lm, "recorded") as recording:
        lm.generate(...)
    print(recording.summary())

    With the environment variable HEADSTART_NO_RECORD=1 nothing is recorded, and a warning says so.

    Args:
        lm: the decoder, which the recording observes until it stops.
        folder: where to write a file for each answer; several processes may write to one. Readable
            by its owner alone, if it is made here: it holds all texts, as tokens.
        kind: label of the prompts' kind, for these answers to be judged by themselves.
        max_bytes: space on disk. When it is used up, the oldest answers of the kind that takes most
            give way.
        format: of the states: bfloat16, float32, or int8 with a scale for each token and layer.
        max_length: tokens that are kept of a prompt and its answer, the first ones.
        tokenizer: the target's, whose fingerprint is kept; loaded if the target has a name.

    Returns:
        the recording, which runs until its `stop`, or to the end of a `with` block.

    Raises:
        ValueError: a recording that runs already, a folder of another target, tokenizer, format or
            layers, or a target on which no head can be trained.
    """
    target = lm.target
    if recording_is_off():
        warnings.warn(f"{NO_RECORD} is set: nothing is recorded in {str(folder)!r}", stacklevel=2)
        return Recording(target, None, kind, max_length, lm.observers)

    # 1. Refuse what cannot be recorded.
    if isinstance(target, Seq2SeqTarget):
        raise ValueError(
            f"{target.name!r} is an encoder-decoder, for which no head is trained: it is not"
            " recorded"
        )
    if format not in FORMATS:
        raise ValueError(
            f"unknown format {format!r} of recorded states; choose from {', '.join(FORMATS)}"
        )
    if max_length < 2 or max_bytes < 1:
        raise ValueError(
            "a recording needs a max_length of at least 2 tokens and max_bytes of at least 1, not "
            f"{max_length} and {max_bytes}"
        )
    check_kind(kind, "a recording")

    # 2. Begin while no answer is being decoded, with the model as it was loaded.
    tokenizer = tokenizer or target.tokenizer
    layers = kept_layers(lm.drafter.feature_layers)
    with target.lock, as_loaded(target.model):
        for observer in lm.observers:
            if isinstance(observer, Recording):
                assert observer.folder is not None
                raise ValueError(
                    f"answers are recorded in {str(observer.folder.folder)!r} already; stop that"
                    " recording first"
                )
        # Once for each engine: does it yield the features that training would compute?
        if _CHECKED.get(target) != target.engine.name:
            target.check_features()
            _CHECKED[target] = target.engine.name
        provenance = {**target.current_provenance(), **tokenizer_provenance(tokenizer)}
        manifest = cache_manifest(provenance, layers, target.info.hidden_size, format)
        recorded = RecordedFolder(Path(at_home(folder)), manifest, max_bytes)
        recording = Recording(target, recorded, kind, max_length, lm.observers)

    # 3. Keep what rounds cost here, if this machine has measured it.
    costs = None if lm.head is None else machine_costs(target, lm.head)
    if lm.head is not None and costs is not None:
        with suppress(OSError):  # the first answer will tell of a full disk
            keep_costs(recorded.folder, head_shape(lm.head), costs, hardware(target.device))
    return recording


def recording_is_off() -> bool:
    """Whether the environment forbids all recording."""
    return os.environ.get(NO_RECORD, "0") not in ("", "0")


def refuse_if_off(what: str) -> None:
    """Refuse what keeps copies of recorded texts, where the environment forbids all recording.

    Raises:
        ValueError: it does.
    """
    if recording_is_off():
        raise ValueError(
            f"{NO_RECORD} is set, and {what} would keep copies of recorded texts; unset it to allow"
            " that"
        )


@dataclass
class Text:
    """The states of one row's text, as far as they are known."""

    pieces: list[Tensor] = field(default_factory=list)
    """[T, L, D] each, one after the other."""
    length: int = 0
    """Tokens whose states are known."""
    begun_before: bool = False
    """Whether its first tokens were read before this recording began: their states are lost."""

    def first(self, length: int) -> Text:
        """Take the states of the first tokens."""
        # Pieces of 5, 1, 2 tokens cut to 7: pieces of 5, 1, 1.
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


class Recording(RoundObserver):
    """Records a decoder's answers from `record` to `stop`; a context manager stops at its end."""

    def __init__(
        self,
        target: Target,
        folder: RecordedFolder | None,
        kind: str,
        max_length: int,
        observers: list[RoundObserver],
    ) -> None:
        """Begin to record a target as it is now; with None as folder, record nothing.

        `observers` are those of the decoder, of which this one becomes one until it stops.
        """
        self.folder = folder
        self.kind = kind
        self.max_length = max_length
        # The text of each conversation, and its states: a later turn goes on from them.
        self.texts: WeakKeyDictionary[Conversation, tuple[list[int], Text]] = WeakKeyDictionary()
        # What became of the answers: written, with the bytes on disk; dropped, because they came
        # faster than they could be written; or skipped, by the reason.
        self.written = 0
        self.bytes = 0
        self.dropped = 0
        self.skipped: Counter[str] = Counter()
        # Why recording has ended by itself, such as a full disk.
        self.failure: str | None = None
        # Weak: a recording that is forgotten must not keep a model in memory.
        self._target = ref(target)
        # State of the target's weights with which the recording began.
        self._version = None if folder is None else target.version
        self._observers = observers
        # Calls that have begun, the innermost last: a streamer or a processor may generate.
        self._calls: list[RecordedCall] = []
        # From the thread that decodes to the one that writes; None ends it.
        self._waiting: SimpleQueue[Answer | None] = SimpleQueue()
        self._waiting_bytes = 0
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._warned_of_fork = False
        self._stopped = folder is None
        self._thread = threading.Thread(
            target=self._write_all, name="headstart recording", daemon=True
        )
        if folder is not None:
            self.feature_layers = folder.layers
            observers.append(self)
            self._thread.start()
            atexit.register(self.stop)

    def __repr__(self) -> str:
        return f"Recording({self.summary()})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the recording once all answers so far are on disk.

        Answers that are being decoded are left out. In a forked process nothing is waited for: the
        thread that writes is not there.
        """
        if os.getpid() != self._process:
            if self in self._observers:
                self._observers.remove(self)
            return
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
        atexit.unregister(self.stop)
        if self in self._observers:
            self._observers.remove(self)
        # The thread writes all that waits before it, and then ends.
        self._waiting.put(None)
        self._thread.join()
        self.texts.clear()
        self._check_weights()

    def leave_out(self, reason: str) -> None:
        """Count an answer that cannot be recorded; warn once if the weights have changed."""
        if reason == OTHER_WEIGHTS and not self.skipped[reason]:
            assert self.folder is not None
            warnings.warn(
                f"{reason}: answers are not recorded in {str(self.folder.folder)!r}, as a folder"
                " belongs to one state of the weights. Stop this recording, and begin another one"
                " in a folder of its own",
                stacklevel=2,
            )
        self.skipped[reason] += 1

    def is_of(self, target: Target) -> bool:
        """Whether the target's version is still that with which the recording began."""
        return target.version == self._version

    def _check_weights(self) -> None:
        """Warn of writes that `Target.version` has not shown, such as through `.data` on a GPU."""
        target = self._target()
        if target is None or self.folder is None or self.written == 0 or not self.is_of(target):
            return
        if target.current_provenance()["weights"] != self.folder.weights:
            warnings.warn(
                "the target's weights were changed during the recording in"
                f" {str(self.folder.folder)!r} by writes that are not noticed on this device"
                " (through .data): it may hold states of both, remove it. Call lm.refresh() after"
                " such writes, or stop recording before them",
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

    def _forked(self) -> bool:
        """Whether this is a forked process, whose answers nothing writes; the first one is told."""
        if os.getpid() == self._process:
            return False
        if not self._warned_of_fork and self.folder is not None:
            self._warned_of_fork = True
            warnings.warn(
                "this process was forked from one that records, and its answers are not recorded:"
                " call the recording's stop() here, and record again, in"
                f" {str(self.folder.folder)!r} if you like",
                stacklevel=2,
            )
        return True

    def begin(self, call: DecodingCall) -> None:
        if not self._forked():
            self._calls.append(RecordedCall(self, call))

    def prefill(self, rows: Sequence[int], starts: Sequence[int], chunk: PrefillChunk) -> None:
        if not self._forked():
            self._calls[-1].prefill(rows, starts, chunk)

    def round(self, finished: Round) -> None:
        if not self._forked():
            self._calls[-1].round(finished)

    def end(self, stats: Stats, error: BaseException | None) -> None:
        if self._forked():
            return
        call = self._calls.pop()
        if error is None:
            call.end("complete")
        elif isinstance(error, StreamClosed | KeyboardInterrupt):
            call.end("stopped")
        else:
            call.end("failed")

    def put(self, answer: Answer) -> None:
        """Have an answer written; it is dropped if too much waits already."""
        with self._lock:
            # One answer is always taken, however large.
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
            # After a failure the queue is only emptied.
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
        """Write an answer to the folder, or count why it was not."""
        assert self.folder is not None
        length = len(answer.tokens)
        states_TLD = torch.cat(answer.pieces)[:length]
        if not bool(states_TLD.isfinite().all()):
            self.skipped["its states are not finite"] += 1
            return
        if len(states_TLD) < length:
            # The target has not read the last token, and training does not use its state.
            states_TLD = torch.cat([states_TLD, torch.zeros_like(states_TLD[:1])])
        size = self.folder.write(answer.tokens, answer.prompt, states_TLD, answer.marks)
        if size == 0:
            self.skipped["it alone is larger than max_bytes"] += 1
            return
        self.written += 1
        self.bytes += size


class RecordedCall:
    """One call of the decoder: the states of its rows' texts, and the answers that have ended."""

    def __init__(self, recording: Recording, call: DecodingCall) -> None:
        """Begin to keep the recorded layers of a call, whichever of them its drafter reads."""
        folder = recording.folder
        assert folder is not None
        self.recording = recording
        self.call = call
        # The call's features may hold more layers than are recorded, in another order.
        self.columns = [call.feature_layers.index(layer) for layer in folder.layers]
        # Dtype of the states that are kept; None for the target's own, from which int8 is made.
        self.dtype = None if folder.format == "int8" else FORMATS[folder.format]
        sampled = call.rule is not greedy
        self.marks = AnswerMarks(
            kind=recording.kind,
            temperature=call.process_logits.temperature if sampled else 0.0,
            lossy=is_lossy_rule(call.rule),
            ended="complete",
            cut=False,
            tokenizer=folder.tokenizer,
        )
        # Of the rows that have begun, until their answers are handed over.
        self.texts: dict[int, Text] = {}
        # Rows that have ended, whose last states an accelerator may still be copying.
        self.ended: list[int] = []

    def prefill(self, rows: Sequence[int], starts: Sequence[int], chunk: PrefillChunk) -> None:
        """Keep the states of a chunk of the prompts."""
        for row, start in zip(rows, starts, strict=True):
            if row not in self.texts:  # its first chunk
                self.texts[row] = Text() if start == 0 else self._text_before(row, start)
        # sync: once for 2048 tokens of the prompts
        self._keep(rows, chunk.features_BTF, chunk.lengths_B.tolist())

    def round(self, finished: Round) -> None:
        """Keep the states of the accepted nodes."""
        # The host has waited for this round's tokens, and so for the states of all earlier rounds.
        self._hand_over("complete")
        lengths = [len(tokens) for tokens in finished.tokens]
        self._keep(self.call.sequences.active, finished.verdict.features_BAF, lengths)

    def end(self, ended: End) -> None:
        """Hand over all answers, also those that end with the call."""
        device = self.call.target.device
        # sync: the last copies must have arrived
        if device.type != "cpu":
            torch.get_device_module(device).current_stream(device).synchronize()
        self._hand_over("complete")
        self.ended += list(self.texts)
        self._hand_over(ended)

    def _text_before(self, row: int, length: int) -> Text:
        """Return the known states of a conversation's first tokens, which are not read again."""
        past = self.call.past
        recorded = None if past is None else self.recording.texts.get(past)
        if recorded is not None:
            known, text = recorded
            # The same tokens, not just as many: the conversation may have been changed.
            tokens = self.call.sequences.prompts[row][:length].tolist()
            if known[:length] == tokens and text.length >= length:
                return text.first(length)
        return Text(begun_before=True)

    def _keep(self, rows: Sequence[int], features_BTF: Tensor, lengths: list[int]) -> None:
        """Keep the states of the next tokens of each row: the first ones of its features."""
        longest = max(lengths)
        layers = len(self.call.feature_layers)
        # [B, T, L * D] -> [B, T, L, D], of the recorded layers
        states_BTLD = features_BTF[:, :longest].unflatten(-1, (layers, -1))
        if self.columns != list(range(layers)):
            states_BTLD = states_BTLD[:, :, self.columns]
        # Without waiting: the memory that an accelerator copies to is read after its next tokens
        # have arrived.
        states_BTLD = states_BTLD.to("cpu", self.dtype or states_BTLD.dtype, non_blocking=True)
        for row, states_TLD, length in zip(rows, states_BTLD.unbind(), lengths, strict=True):
            text = self.texts.get(row)
            if text is None:  # an idle row
                continue
            if text.length < self.recording.max_length:
                text.pieces.append(states_TLD[:length])
            text.length += length
            if row in self.call.sequences.ended and row not in self.ended:
                self.ended.append(row)

    def _hand_over(self, ended: End) -> None:
        """Have the answers written that have ended."""
        if not self.ended:
            return
        same_weights = self.recording.is_of(self.call.target)
        for row in self.ended:
            text = self.texts.pop(row)
            answer = self._answer(row, text, ended) if same_weights else OTHER_WEIGHTS
            if isinstance(answer, str):
                self.recording.leave_out(answer)
            elif answer is not None:
                self.recording.put(answer)
        self.ended.clear()

    def _answer(self, row: int, text: Text, ended: End) -> Answer | str | None:
        """Return an answer to be written, or why it cannot be; None if nothing was generated."""
        call = self.call
        prompt = call.sequences.prompts[row].tolist()
        tokens = prompt + call.sequences.rows[row]
        if call.past is not None:
            self.recording.texts[call.past] = (tokens, text)
        # The newest token has no state yet. An error in a round leaves more tokens without one.
        length = min(len(tokens), text.length + 1, self.recording.max_length)
        if len(tokens) == len(prompt):
            return None
        if text.begun_before:
            return "its text was begun before the recording"
        if length <= len(prompt):
            return f"its prompt is as long as max_length, {self.recording.max_length} tokens"
        if call.prompt_inputs is not None:
            return "its prompt holds images"
        # Would the target compute other states if it read the whole text at once?
        segments = call.target.segments
        if (
            segments is not None
            and segments.by_last
            and segments.of(len(prompt) - 1) != segments.of(length - 1)
        ):
            return "the target computes its first tokens otherwise than its last (longrope)"
        return Answer(
            tokens[:length],
            len(prompt),
            text.pieces,
            replace(self.marks, ended=ended, cut=length < len(tokens)),
            sum(states_TLD.nbytes for states_TLD in text.pieces),
        )
