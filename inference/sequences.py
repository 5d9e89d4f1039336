"""The host's side of a generation: what each row has written, when it ends, and who is told."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from .drafters.base import StepResult
from .stats import RoundRecord, Stats


class Streamer(Protocol):
    """What transformers' streamers offer."""

    def put(self, value: Tensor) -> None:
        """Take new tokens."""

    def end(self) -> None:
        """There are no more."""


class Sequences:
    """The texts of a batch. Rows that have ended leave `active`; all per-row lists keep every row of the call."""

    def __init__(
        self,
        prompts: list[Tensor],
        new_tokens: int,
        eos: frozenset[int],
        criteria: Sequence[Callable[..., Any]] = (),
        streamer: Streamer | None = None,
        keep_scores: bool = False,
        keep_logits: bool = False,
        slots: int | None = None,
        listeners: Sequence[Callable[[Sequences], None]] = (),
    ) -> None:
        """Begin.

        Args:
            prompts: the unpadded tokens of each row.
            new_tokens: at most as many are written in each row.
            eos: a row ends with any of these.
            criteria: and where one of these stopping criteria says so, asked after each token of a row by itself.
            streamer: gets the tokens as they are accepted; one row only.
            keep_scores: whether the processed scores of every written token are kept.
            keep_logits: whether its raw logits are.
            slots: rows that are decoded at once, the others waiting until one ends; None for all.
            listeners: called after prompts were read, and after every round.
        """
        self.prompts, self.listeners = prompts, listeners
        self.new_tokens, self.eos, self.criteria, self.streamer = new_tokens, eos, criteria, streamer
        self.rows: list[list[int]] = [[] for _ in prompts]
        self.active = list(range(len(prompts)))[:slots]
        """The rows of the batch that is being decoded, by their number in the call."""
        self.waiting = deque(range(len(self.active), len(prompts)))
        """The rows that have not begun."""
        self.scores: list[list[Tensor]] | None = [[] for _ in prompts] if keep_scores else None
        """For each row, [tokens, V] per round."""
        self.logits: list[list[Tensor]] | None = [[] for _ in prompts] if keep_logits else None
        self._committed = [len(prompt) for prompt in prompts]
        self.ended: set[int] = set()
        """Of all rows of the call."""
        self._leaving: set[int] = set()

    @property
    def longest(self) -> int:
        """Length of the longest row in the cache."""
        return max(self._committed[row] for row in self.active)

    @property
    def tokens(self) -> int:
        """New tokens of all rows."""
        return sum(map(len, self.rows))

    def text(self, row: int) -> Tensor:
        """A row's tokens, prompt and written, as [T]."""
        prompt = self.prompts[row]
        return torch.cat([prompt, torch.tensor(self.rows[row], dtype=prompt.dtype, device=prompt.device)])

    def first(self, roots_B: Tensor, scores_B1V: Tensor, logits_B1V: Tensor) -> None:
        """Take the tokens that follow the prompts."""
        finite_B = scores_B1V[:, 0].amax(-1).isfinite()
        tokens, finite = torch.stack([roots_B, finite_B.long()]).tolist()  # sync: the first tokens, once a call
        for place, (row, token, fine) in enumerate(zip(self.active, tokens, finite, strict=True)):
            if not fine:
                self._refuse(row, 0, logits_B1V[place, 0])
            self._append(row, [token])
            self._keep(row, scores_B1V[place], logits_B1V[place])
        self._tell()

    def add(self, finished: StepResult, scores_BNV: Tensor, stats: Stats, asked_BK: Tensor | None = None) -> StepResult:
        """Take what a round emitted.

        Args:
            finished: as the rule left it.
            scores_BNV: of all nodes.
            stats: get a record for each row.
            asked_BK: what the drafter wants to know.

        Returns:
            the round with what the host knows of it now.

        Raises:
            ValueError: the target's logits are no numbers, or the processors left no token.
        """
        verdict, emitted_BA = finished.verdict, finished.emitted_BA
        columns = [verdict.lengths_B[:, None], finished.finite_BA, emitted_BA]
        columns += [] if asked_BK is None else [asked_BK]
        # sync: the only one of a round; the host must know what to return and when to stop
        rows = torch.cat(columns, dim=1).tolist()
        most = emitted_BA.shape[1]
        emitted = [row[1 + most : 1 + most + row[0]] for row in rows]
        for place, (row, (length, *told)) in enumerate(zip(self.active, rows, strict=True)):
            self._committed[row] += length
            fine = sum(accumulate(told[:most], min))  # up to the first that is no number
            count = self._append(row, emitted[place][:fine])
            if fine < length and row not in self.ended:  # behind a row's end nobody asks
                node = verdict.path_BA[place, fine]
                self._refuse(row, len(self.rows[row]), finished.output.logits_BNV[place, node])
            if self.scores is not None or self.logits is not None:
                path_A = verdict.path_BA[place, :count]
                self._keep(row, scores_BNV[place, path_A], finished.output.logits_BNV[place, path_A])
            record = RoundRecord(length - 1, count, finished.tree.max_depth, number=len(stats.round_seconds))
            stats.rows[row].append(record)
        self._tell()
        return replace(finished, tokens=emitted, host_values=[row[1 + 2 * most :] for row in rows])

    def ended_places(self) -> list[int]:
        """The places in the batch of rows that have ended."""
        return [place for place, row in enumerate(self.active) if row in self._leaving]

    def drop_ended(self) -> list[int] | None:
        """Take the rows that have ended out of `active`; the places of the others in the batch, None for all."""
        if not self._leaving:
            return None
        places = [place for place, row in enumerate(self.active) if row not in self._leaving]
        self.active = [self.active[place] for place in places]
        self._leaving = set()
        return places

    def padded(self, padding: int) -> Tensor:
        """What was written, [B, longest], padded on the right."""
        rows = [torch.tensor(row, dtype=torch.int64) for row in self.rows]
        return pad_sequence(rows, batch_first=True, padding_value=padding)

    def _append(self, row: int, tokens: list[int]) -> int:
        """Cut where the row ends; return how many tokens were taken."""
        written = self.rows[row]
        count = 0
        for token in tokens:
            written.append(token)
            count += 1
            if token in self.eos or len(written) == self.new_tokens or self._stopped(row):
                self.ended.add(row)
                self._leaving.add(row)
                break
        if self.streamer is not None:
            self.streamer.put(torch.tensor(tokens[:count]))
        return count

    def _tell(self) -> None:
        for listener in self.listeners:
            listener(self)

    def _stopped(self, row: int) -> bool:
        """Whether a criterion ends the row after its newest token."""
        if not self.criteria:
            return False
        text_1T = self.text(row)[None]
        return any(bool(criterion(text_1T, None)) for criterion in self.criteria)

    def _keep(self, row: int, scores_AV: Tensor, logits_AV: Tensor) -> None:
        for kept, tensor in ((self.scores, scores_AV), (self.logits, logits_AV)):
            if kept is not None:
                kept[row].append(tensor.clone())

    def _refuse(self, row: int, place: int, logits_V: Tensor) -> None:
        if logits_V.isnan().any():
            raise ValueError(
                f"the target's logits for new token {place} of row {row} are no numbers (NaN): the model's weights "
                "or its number format are broken, so nothing can be drawn from them"
            )
        raise ValueError(
            f"the logits processors forbid every token at new token {place} of row {row}; leave at least one allowed"
        )
