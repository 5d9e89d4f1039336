"""Which conversations every step trains on, and which of them are this process's.

A step trains on `loop.batch_size` rows, however many processes there are: each takes its share, in forwards of
`loop.micro_batch` rows. So one config gives the same steps on any number of processes, and a run that was stopped goes
on at the same place in the data on another number.

A row is one conversation or, packed, as many short ones as fit in `data.pack` tokens.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

Row = list[int]
"""The numbers of the conversations that stand in it."""

WINDOW = 32
"""Steps whose conversations are sorted by length together: little padding, and still another order every epoch."""


@dataclass(frozen=True)
class Share:
    """What one process does of every step."""

    process: int
    processes: int
    forwards: int
    """Forwards that a process makes in a step."""

    @classmethod
    def of(cls, batch_size: int, micro_batch: int | None, process: int, processes: int) -> Share:
        """The share of a process.

        Raises:
            ValueError: a step that cannot be divided evenly.
        """
        rows, rest = divmod(batch_size, processes)
        forwards, left = divmod(rows, micro_batch or max(rows, 1))
        if rest or left or forwards == 0:
            asked = f"loop.batch_size {batch_size} cannot be divided among {processes} processes"
            if micro_batch is not None:
                asked += f" in forwards of loop.micro_batch {micro_batch}"
            unit = processes * (micro_batch or 1)
            raise ValueError(f"{asked}; choose a multiple of {unit}, such as {max(1, round(batch_size / unit)) * unit}")
        return cls(process, processes, forwards)

    def of_step(self, rows: list[Row]) -> list[list[Row]]:
        """The rows of each of this process's forwards; the last step of an epoch may leave some empty."""
        parts = self.processes * self.forwards
        return [rows[i::parts] for i in range(self.process, parts, self.processes)]


class Order:
    """The steps of every epoch, the same for the same seed.

    The conversations are shuffled, sorted by length within windows, cut into steps, and the steps shuffled.
    """

    def __init__(
        self,
        lengths: list[int],
        batch_size: int,
        seed: int,
        pack: int | None = None,
        sources: list[int] | None = None,
        weights: list[float] | None = None,
    ) -> None:
        """Name the data.

        Args:
            lengths: tokens of every conversation.
            batch_size: rows of a step.
            seed: of the order.
            pack: tokens of a row that holds several conversations; None for one in each.
            sources: which source each conversation is from.
            weights: how often an epoch passes over each source; a share below 1 takes other ones every epoch.
        """
        self.lengths, self.batch_size, self.seed, self.pack = lengths, batch_size, seed, pack
        self.sources, self.weights = sources or [0] * len(lengths), weights or [1.0]

    def from_step(self, step: int) -> Iterator[tuple[int, list[Row]]]:
        """The epoch and the rows of every step from step number `step` on, without end."""
        for epoch in itertools.count():
            steps = self.epoch(epoch)
            for rows in steps[step:]:
                yield epoch, rows
            step = max(0, step - len(steps))

    def count(self, epochs: float) -> int:
        """Steps of so many epochs, the last perhaps in part."""
        rest, whole = math.modf(epochs)
        steps = sum(len(self.epoch(epoch)) for epoch in range(int(whole)))
        return steps + (math.ceil(rest * len(self.epoch(int(whole)))) if rest else 0)

    def epoch(self, number: int) -> list[list[Row]]:
        """The rows of every step of an epoch."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        order = self._drawn(number, generator)
        span = WINDOW * self.batch_size
        rows: list[Row] = []
        for start in range(0, len(order), span):
            window = sorted(order[start : start + span], key=lambda i: self.lengths[i])
            rows += [[i] for i in window] if self.pack is None else packed(window, self.lengths, self.pack)
        steps = [rows[i : i + self.batch_size] for i in range(0, len(rows), self.batch_size)]
        return [steps[i] for i in torch.randperm(len(steps), generator=generator).tolist()]

    def _drawn(self, number: int, generator: torch.Generator) -> list[int]:
        """The conversations of an epoch, shuffled."""
        if set(self.weights) == {1.0}:
            return torch.randperm(len(self.lengths), generator=generator).tolist()
        drawn: list[int] = []
        for source, weight in enumerate(self.weights):
            own = [i for i, other in enumerate(self.sources) if other == source]
            # As if passes over the source, each in another order, were cut into epochs of `weight` passes.
            first, last = round(number * weight * len(own)), round((number + 1) * weight * len(own))
            while first < last:
                lap, place = divmod(first, len(own))
                shuffled = torch.Generator().manual_seed((self.seed * 1_000_003 + lap) * 1_009 + source)
                stop = min(len(own), place + last - first)
                drawn += [own[i] for i in torch.randperm(len(own), generator=shuffled)[place:stop].tolist()]
                first += stop - place
        return [drawn[i] for i in torch.randperm(len(drawn), generator=generator).tolist()]


def packed(conversations: list[int], lengths: list[int], budget: int) -> list[Row]:
    """Conversations in rows of at most `budget` tokens, the longest first, each where the least room is left."""
    rows: list[Row] = []
    room: list[int] = []
    for i in sorted(conversations, key=lambda i: -lengths[i]):
        fitting = [number for number, left in enumerate(room) if left >= lengths[i]]
        if fitting:
            best = min(fitting, key=lambda number: room[number])
            rows[best].append(i)
            room[best] -= lengths[i]
        else:
            rows.append([i])
            room.append(budget - lengths[i])
    return rows
