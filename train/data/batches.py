"""Batches: padding and packing, the order of the data, the share of each process, reading ahead.

A step trains on `loop.batch_size` rows, whatever the number of processes: each takes its share, in
forwards of `loop.micro_batch` rows. One config thus gives the same steps on any number of
processes, and a stopped run resumes at the same place in the data on another number.

A row is one conversation or, packed, as many short ones as fit in `data.pack` tokens. With
`loop.batch_tokens` a step has as many rows of similar length as fit in that many tokens, padding
included. Workers of torch's DataLoader read and pad the batches of later steps while a step is
computed.
"""

from __future__ import annotations

import bisect
import itertools
import math
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from ..config import LoopConfig
from .chat_template import Example
from .token_cache import answers_of

Row = list[int]
"""Indices of the conversations in a row."""

WINDOW = 32
"""Steps whose conversations are sorted by length together: little padding, and another order every
epoch."""
EQUAL_SHARES = 8
"""A step of `loop.batch_tokens` has a multiple of so many rows, if it has as many: 2, 4 or 8
processes then get equally many. It is not their number, on which steps must not depend."""
LOST = (ConnectionError, EOFError, FileNotFoundError)
"""Errors of reading a batch whose worker died after announcing it and before handing it over."""
AHEAD = 2
"""Steps that each worker of the loader prepares ahead."""


@dataclass(frozen=True)
class Batch:
    """Right-padded rows of one or, packed, several sequences. B batch, T time."""

    tokens_BT: Tensor
    loss_mask_BT: Tensor
    lengths: tuple[tuple[int, ...], ...]
    """Tokens of each sequence, by row."""
    conversations: tuple[int, ...] = ()
    """Index of each sequence's conversation in the data."""
    states_BTLD: Tensor | None = None
    """The target's hidden states as a cache stores them, if they were read ahead."""
    scales_BTL: Tensor | None = None
    """Scales of states in int8."""
    failure: str | None = None
    """Why states that must be read could not be."""

    def places(self) -> Iterator[tuple[int, slice]]:
        """Row of every sequence and its slice of the row."""
        for row, lengths in enumerate(self.lengths):
            # Lengths 3, 2, 4 stop at 3, 5, 9: the slices 0:3, 3:5, 5:9.
            for stop, length in zip(itertools.accumulate(lengths), lengths, strict=True):
                yield row, slice(stop - length, stop)

    @cached_property
    def positions_BT(self) -> Tensor | None:
        """Position ids within each sequence; None if no row holds several."""
        if all(len(row) <= 1 for row in self.lengths):
            return None
        # Count again from 0 where a sequence begins. Lengths 3 and 2 in a row of 7:
        #     0 1 2 3 4 5 6  ->  0 1 2 0 1 2 3
        # The padding at the end counts on after the last sequence.
        positions_BT = torch.arange(self.tokens_BT.shape[1]).repeat(len(self.lengths), 1)
        for row, span in self.places():
            positions_BT[row, span.start :] -= int(positions_BT[row, span.start])
        return positions_BT

    @property
    def documents_BT(self) -> Tensor | None:
        """Number of each token's sequence in its row; None if no row holds several."""
        # Each position 0 begins another: 0 1 2 0 1 2 3  ->  1 1 1 2 2 2 2.
        return None if self.positions_BT is None else (self.positions_BT == 0).cumsum(1)

    def pin_memory(self) -> Batch:
        """Copy to pinned memory; torch's DataLoader calls it."""
        # The mask stays: a head reads it on the host.
        copies: dict[str, Any] = {}
        for name in ("tokens_BT", "states_BTLD", "scales_BTL"):
            tensor = getattr(self, name)
            if tensor is not None:
                copies[name] = tensor.pin_memory()
        pinned = replace(self, **copies)
        if self.positions_BT is not None:
            # `cached_property` keeps its value here.
            pinned.__dict__["positions_BT"] = self.positions_BT.pin_memory()
        return pinned


def collate(examples: Sequence[Example]) -> Batch:
    """Pad sequences on the right, one in each row."""
    return collate_rows([[example] for example in examples])


def collate_rows(rows: list[list[Example]], least: int = 1) -> Batch:
    """Pad rows on the right, to at least `least` tokens.

    The padding is outside the loss mask. Without rows, the batch is one row of padding.
    """
    # Begin with a row of padding: `pad_sequence` pads to the longest row, now at least `least`.
    tokens = [torch.zeros(least, dtype=torch.int64)]
    masks = [torch.zeros(least, dtype=torch.bool)]
    for row in rows:
        tokens.append(torch.tensor([token for example in row for token in example.tokens]))
        mask: list[bool] = []
        for number, example in enumerate(row):
            # The first token of a later sequence cannot be drafted from the one before it in the
            # row, which is another sequence's.
            mask += [False, *example.loss_mask[1:]] if number else example.loss_mask
        masks.append(torch.tensor(mask))
    # Drop that row again, unless it is the only one.
    wanted = slice(1 if rows else 0, None)
    lengths = tuple(tuple(len(example.tokens) for example in row) for row in rows)
    return Batch(
        pad_sequence(tokens, batch_first=True)[wanted],
        pad_sequence(masks, batch_first=True)[wanted],
        lengths or ((),),
        tuple(example.conversation for row in rows for example in row),
    )


@dataclass(frozen=True)
class Share:
    """Share of one process in every step."""

    process: int
    processes: int
    forwards: int
    """Forwards of a process in a step."""

    @classmethod
    def of(cls, batch_size: int, micro_batch: int | None, process: int, processes: int) -> Share:
        """Divide a step evenly among processes and forwards.

        For example, 32 rows on 4 processes in forwards of 2 rows are 4 forwards on each.
        """
        # Without micro_batch a process runs its rows in one forward.
        rows, rest = divmod(batch_size, processes)
        forwards, left = divmod(rows, micro_batch or max(rows, 1))
        if rest or left or forwards == 0:
            problem = f"loop.batch_size {batch_size} cannot be divided among {processes} processes"
            if micro_batch is not None:
                problem += f" in forwards of loop.micro_batch {micro_batch}"
            unit = processes * (micro_batch or 1)
            raise ValueError(
                f"{problem}; choose a multiple of {unit}, such as"
                f" {max(1, round(batch_size / unit)) * unit}"
            )
        return cls(process, processes, forwards)

    @classmethod
    def of_loop(cls, loop: LoopConfig, process: int, processes: int) -> Share:
        """Divide a step by the options.

        A step of `batch_tokens` has enough forwards to keep each at about `micro_tokens`.
        """
        if loop.batch_tokens is None:
            return cls.of(loop.batch_size, loop.micro_batch, process, processes)
        micro_tokens = loop.micro_tokens or loop.batch_tokens
        return cls(process, processes, math.ceil(loop.batch_tokens / processes / micro_tokens))

    def of_step(self, rows: list[Row]) -> list[list[Row]]:
        """Return the rows of each of this process's forwards.

        A short step, such as an epoch's last one, may leave some of them empty.
        """
        # Rows are dealt like cards to the forwards of all processes. With 2 processes of 2 forwards
        # process 0 gets the parts 0 and 2: rows 0, 4, 8, ... and rows 2, 6, 10, ... A step's rows
        # come sorted by length, unless packed, so the parts have about equally many tokens.
        parts = self.processes * self.forwards
        return [rows[i::parts] for i in range(self.process, parts, self.processes)]


@dataclass
class Order:
    """The steps of every epoch, by a seed.

    The conversations are shuffled, sorted by length within windows, divided into steps, and the
    steps shuffled.
    """

    lengths: list[int]
    """Tokens of every conversation."""
    batch_size: int
    seed: int
    pack: int | None = None
    """Tokens of a row of several conversations; None for one in each row."""
    sources: list[int] | None = None
    """Index of each conversation's source."""
    weights: list[float] | None = None
    """Passes of an epoch over each source; below 1, each epoch takes other conversations."""
    batch_tokens: int | None = None
    """Tokens of a step, padding included, instead of `batch_size` rows."""

    def __post_init__(self) -> None:
        self._weights = self.weights or [1.0]
        self._lengths_N = np.asarray(self.lengths, dtype=np.int64)
        sources_N = np.asarray(self.sources or [0] * len(self.lengths))
        self._of_source = [
            np.flatnonzero(sources_N == source) for source in range(len(self._weights))
        ]
        self._counted: dict[int, int] = {}

    def from_step(self, step: int) -> Iterator[tuple[int, list[Row]]]:
        """Epoch and rows of every step from number `step` on, without end."""
        for epoch in itertools.count():
            # Pass over the epochs before the first step, without building them where possible.
            steps = self.steps_in(epoch)
            if steps <= step:
                step -= steps
                continue
            for rows in self.epoch(epoch)[step:]:
                yield epoch, rows
            step = 0  # later epochs are read from their beginning

    def count(self, epochs: float) -> int:
        """Number of steps of some epochs, the last perhaps in part."""
        rest, whole = math.modf(epochs)
        steps = sum(self.steps_in(epoch) for epoch in range(int(whole)))
        if rest:
            steps += math.ceil(rest * self.steps_in(int(whole)))
        return steps

    def steps_in(self, epoch: int) -> int:
        """Return the number of steps in an epoch.

        It is computed if steps have a fixed number of rows; otherwise the epoch is built to count
        them.
        """
        if self.pack is None and self.batch_tokens is None:
            if set(self._weights) == {1.0}:
                count = len(self.lengths)
            else:
                count = sum(last - first for first, last in self._laps(epoch))
            return math.ceil(count / self.batch_size)
        if epoch not in self._counted:
            self.epoch(epoch)
        return self._counted[epoch]

    def epoch(self, number: int) -> list[list[Row]]:
        """Rows of every step of an epoch."""
        # 1. Shuffle. The seed depends on run and epoch only, so that a run which resumes gets the
        # same steps; the factor keeps the seeds of other runs' epochs apart.
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        order = self._shuffled(number, generator)

        # 2. Sort by length within windows of about WINDOW steps, and divide them into rows. With
        # `batch_tokens` the rows of a step are estimated from the mean length.
        step_rows = self.batch_size
        if self.batch_tokens is not None:
            step_rows = max(1, self.batch_tokens * len(self.lengths) // int(self._lengths_N.sum()))
        rows: list[Row] = []
        steps: list[list[Row]] = []
        for start in range(0, len(order), WINDOW * step_rows):
            window_N = np.asarray(order[start : start + WINDOW * step_rows], dtype=np.int64)
            window = window_N[np.argsort(self._lengths_N[window_N], kind="stable")].tolist()
            if self.batch_tokens is not None:
                for step in budgeted(window, self.lengths, self.batch_tokens, EQUAL_SHARES):
                    steps.append([[i] for i in step])
            elif self.pack is not None:
                rows += packed(window, self.lengths, self.pack)
            else:
                rows += [[i] for i in window]

        # 3. Divide the rows into steps of `batch_size`. With `batch_tokens` there are no rows left.
        steps += [rows[i : i + self.batch_size] for i in range(0, len(rows), self.batch_size)]
        self._counted[number] = len(steps)

        # 4. Shuffle the steps: otherwise a window's would go from short to long.
        return [steps[i] for i in torch.randperm(len(steps), generator=generator).tolist()]

    def _laps(self, epoch: int) -> list[tuple[int, int]]:
        """Return the half-open range of positions in each source that an epoch covers.

        Endless passes over a source are divided into epochs of `weight` passes. With a weight of
        0.4, epochs of a source of 10 conversations cover 0:4, 4:8, 8:12 and so on, where 8:12 ends
        pass 0 and begins pass 1.
        """
        laps = []
        for weight, conversations_N in zip(self._weights, self._of_source, strict=True):
            size = len(conversations_N)
            laps.append((round(epoch * weight * size), round((epoch + 1) * weight * size)))
        return laps

    def _shuffled(self, number: int, generator: torch.Generator) -> list[int]:
        """Conversations of an epoch, shuffled."""
        if set(self._weights) == {1.0}:
            return torch.randperm(len(self.lengths), generator=generator).tolist()
        chosen: list[int] = []
        for source, (first, last) in enumerate(self._laps(number)):
            conversations_N = self._of_source[source]
            size = len(conversations_N)
            # Walk the range pass by pass. In a source of 10, the range 8:12 is 8:10 of pass 0 and
            # 0:2 of pass 1. Each pass has an order of its own, the same in every epoch that takes
            # a part of it: no conversation comes twice before all have come once.
            while first < last:
                lap, begin = divmod(first, size)
                generator_of_lap = torch.Generator().manual_seed(
                    (self.seed * 1_000_003 + lap) * 1_009 + source
                )
                stop = min(size, begin + last - first)
                order_N = torch.randperm(size, generator=generator_of_lap)
                chosen += conversations_N[order_N[begin:stop].numpy()].tolist()
                first += stop - begin
        return [chosen[i] for i in torch.randperm(len(chosen), generator=generator).tolist()]


def budgeted(
    conversations: list[int], lengths: list[int], budget: int, multiple: int = 1
) -> list[list[int]]:
    """Split conversations, sorted by length, into batches of at most `budget` padded tokens.

    A conversation that is longer makes a batch alone. Batches of at least `multiple` conversations
    have a multiple of it, where the next one has room for the rest.
    """
    # Lengths 2 3 4 9 with a budget of 10: [2 3] pads to 2 * 3 = 6 tokens, and [2 3 4] would pad to
    # 12. So the batches are [2 3], [4] and [9].
    batches: list[list[int]] = []
    for i in conversations:
        rest: list[int] = []
        if batches:
            # Sorted either way, the longest of a batch is its first or its newest.
            batch = batches[-1]
            longest = max(lengths[batch[0]], lengths[i])
            if (len(batch) + 1) * longest <= budget:
                batch.append(i)
                continue
            # Of 19 conversations and a multiple of 8, three go into the next batch.
            over = len(batch) % multiple
            if 0 < over < len(batch) and (over + 1) * longest <= budget:
                rest = batch[-over:]
                del batch[-over:]
        batches.append([*rest, i])
    return batches


def packed(conversations: list[int], lengths: list[int], budget: int) -> list[Row]:
    """Pack conversations into rows of at most `budget` tokens by best-fit decreasing.

    Longest first, each goes into the fullest row that has room for it.
    """
    rows: list[Row] = []
    rooms: list[tuple[int, int]] = []  # tokens left in each row, and its number; sorted
    for i in sorted(conversations, key=lambda i: -lengths[i]):
        # The first entry with at least this much room: with rooms 1 3 8 and a length of 3, the 3.
        fullest = bisect.bisect_left(rooms, (lengths[i], 0))
        if fullest < len(rooms):
            room, number = rooms.pop(fullest)
            rows[number].append(i)
        else:
            room = budget
            number = len(rows)
            rows.append([i])
        bisect.insort(rooms, (room - lengths[i], number))
    return rows


@dataclass(frozen=True)
class Step:
    """The data of a process for one step."""

    epoch: int
    batches: list[Batch]
    """One for each of its forwards."""
    answer_tokens: int
    """Answer tokens of all processes together."""

    def pin_memory(self) -> Step:
        """Copy to pinned memory; torch's DataLoader calls it."""
        return replace(self, batches=[batch.pin_memory() for batch in self.batches])


class Steps(Dataset[Step]):
    """Dataset of steps, indexed by epoch and rows.

    Workers of the loader collate the batches, and `read` adds what it can.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        share: Share,
        least: int,
        read: Callable[[list[Batch], int], list[Batch]] | None = None,
    ) -> None:
        self.examples = examples
        self.share = share
        self.read = read
        self.least = least  # tokens of the shortest batch
        # Of each conversation: its answer tokens, and whether its first token is one.
        self._answers_N, self._opens_N = answers_of(examples)

    def __getitem__(self, key: tuple[int, list[Row]]) -> Step:
        epoch, rows = key
        batches: list[Batch] = []
        for part in self.share.of_step(rows):
            examples = [[self.examples[i] for i in row] for row in part]
            batches.append(collate_rows(examples, self.least))
        # All of the step's at once: a server answers many requests as fast as one.
        if self.read is not None:
            batches = self.read(batches, epoch)
        # Count the answer tokens of all processes from the lengths alone: nothing is exchanged. As
        # in collating, the first tokens of later sequences in a row do not count.
        everyone = [i for row in rows for i in row]
        later = [i for row in rows for i in row[1:]]
        answers = self._answers_N[everyone].sum() - self._opens_N[later].sum()
        return Step(epoch, batches, int(answers))


def loaded(steps: Steps, order: Order, first: int, workers: int, pin: bool) -> Generator[Step]:
    """Yield every step from number `first` on, in order and without end.

    `workers` processes read ahead; with 0 this process reads.
    """
    options: dict[str, Any] = {"multiprocessing_context": "fork", "prefetch_factor": AHEAD}
    loader = DataLoader(
        steps,
        sampler=order.from_step(first),
        batch_size=None,  # an item is a step already
        num_workers=workers,
        pin_memory=pin,
        # The loader draws a seed. From the global generator, it would change the heads' draws.
        generator=torch.Generator(),
        worker_init_fn=_leave_signals,
        **(options if workers else {}),
    )
    reading: Any = iter(loader)
    with worker_deaths_explained(*(LOST if workers else ())):
        try:
            yield from reading
        finally:
            # Otherwise they live as long as an error's traceback refers to the iterator, and the
            # process waits for them at its end, since they ignore SIGTERM.
            if workers:
                reading._shutdown_workers()
                for worker in reading._workers:
                    worker.kill()  # one that waits for a server would be waited for
                    worker.join()


@contextmanager
def worker_deaths_explained(*others: type[Exception]) -> Iterator[None]:
    """Explain the death of a loader's worker in a RuntimeError with advice.

    Torch reports it wherever the main process is at that moment.

    `others` are exceptions besides torch's own that mean a worker's death here.
    """
    caught: tuple[type[Exception], ...] = (RuntimeError, *others)
    try:
        yield
    except caught as error:
        if not isinstance(error, others) and not str(error).startswith("DataLoader worker"):
            raise
        raise RuntimeError(
            "a data loading process died, perhaps out of (shared) memory:"
            f" {error}; lower data.workers (0 for none); the same command resumes from the newest"
            " checkpoint"
        ) from error


def _leave_signals(worker: int) -> None:
    """Ignore SIGINT and SIGTERM, which the whole process group gets.

    The main process stops at the end of a step, and stops its workers.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
