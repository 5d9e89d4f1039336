"""An index of a text that grows: where its newest tokens occurred before, and what followed.

As in zlib, every position is linked to the one before it that ends with the same tokens, so that
the occurrences of an n-gram are a chain, the newest first. The tokens lie in a ring: once it is
full, each new token overwrites the oldest one, and chains end where they would leave the ring.

    position     0  1  2  3  4  5  6  7
    token        5  7  9  5  7  8  5  7       chain of "5 7": 7 → 4 → 1
    followed by        9        8             newest first: 8, and before that 9 5 7 8 5 7
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

SEPARATOR = -1
"""Token id between texts."""
GRAMS = (4, 2)
"""Tokens by which positions are linked: the longer ones find the longest matches in a large index
at once, the shorter ones are tried where those do not occur."""
VISITED = 12
"""Positions of a chain that are compared, at most."""
MANY = 64
"""Tokens from which they are added by numpy, all at once."""
LONGEST = 24
"""Tokens of a match that count: longer ones are equally good."""
CONTINUATIONS = 8
"""Continuations that are returned, at most."""
FACTOR = 0x9E3779B97F4A7C15
"""Odd and large: the high bits of its products are spread evenly."""
WORD = (1 << 64) - 1
"""All bits of a product that count."""


class Match(NamedTuple):
    """The longest match of a text's end, and what followed it."""

    length: int
    """Tokens of the match; 0 if there is none."""
    continuations: list[list[int]]
    """What followed each of its newest occurrences, the newest first; none is empty."""


NO_MATCH = Match(0, [])


class TextIndex:
    """The newest tokens of one text, or of several with a `SEPARATOR` between them."""

    def __init__(self, capacity: int) -> None:
        """An empty index that keeps so many tokens, in up to 52 bytes each."""
        self.capacity = capacity
        self.end = 0
        """Tokens that were added."""
        self._shift = 64
        self._ring = array("i")
        """The token of position p at p % capacity."""
        self._newest: list[array[int]] = []
        """By the hash of an n-gram, for each of `GRAMS`: the newest position that ends with it."""
        self._before: list[array[int]] = []
        """At p % capacity: the position before p whose n-gram has the same hash, or -1."""

    def _allocate(self) -> None:
        bits = max(self.capacity - 1, 1).bit_length()
        self._shift = 64 - bits
        self._ring = array("i", bytes(4 * self.capacity))
        self._newest = [array("q", [-1]) * (1 << bits) for _ in GRAMS]
        self._before = [array("q", bytes(8 * self.capacity)) for _ in GRAMS]

    def clear(self) -> None:
        """Forget all tokens."""
        self.end = 0

    @classmethod
    def of(cls, tokens: np.ndarray) -> TextIndex:
        """An index that is full of these tokens."""
        index = cls(len(tokens))
        index._allocate()
        index._add_many(tokens)
        return index

    def add(self, tokens: Sequence[int]) -> None:
        """Add tokens to the text's end."""
        if self.end == 0:
            self._allocate()
        if len(tokens) >= MANY:
            # The ring keeps the last ones only.
            skipped = max(len(tokens) - self.capacity, 0)
            self.end += skipped
            self._add_many(np.asarray(tokens[skipped:], dtype=np.int64))
            return
        # An n-gram may begin before the new tokens.
        text = [*self.last(GRAMS[0] - 1), *tokens]
        for i in range(len(text) - len(tokens), len(text)):
            place = self.end % self.capacity
            self._ring[place] = text[i]
            for gram, newest, before in zip(GRAMS, self._newest, self._before, strict=True):
                if i >= gram - 1:
                    slot = self._slot(text[i - gram + 1 : i + 1])
                    before[place] = newest[slot]
                    newest[slot] = self.end
            self.end += 1

    def _add_many(self, new: np.ndarray) -> None:
        """Add tokens, at most as many as the ring keeps, all at once."""
        tokens = np.concatenate([np.asarray(self.last(GRAMS[0] - 1), dtype=np.int64), new])
        first = self.end + len(new) - len(tokens)  # position of tokens[0]
        self.end += len(new)
        np.frombuffer(self._ring, dtype=np.int32)[
            np.arange(self.end - len(new), self.end) % self.capacity
        ] = new
        words = tokens.astype(np.uint64)
        for gram, newest, before in zip(GRAMS, self._newest, self._before, strict=True):
            # 1. The n-grams that end with a new token: their hashes, and where they end.
            starts = np.arange(max(len(tokens) - len(new) - gram + 1, 0), len(tokens) - gram + 1)
            if len(starts) == 0:
                continue
            hashed = np.zeros(len(starts), dtype=np.uint64)
            for place in range(gram):
                hashed = (hashed + words[starts + place]) * np.uint64(FACTOR)
            slots = (hashed >> np.uint64(self._shift)).astype(np.int64)
            ends = first + starts + gram - 1
            # 2. Of those with the same hash, each is linked to the one before it, the first of them
            #    to the newest so far.
            order = np.argsort(slots, kind="stable")
            slots, ends = slots[order], ends[order]
            newest_so_far = np.frombuffer(newest, dtype=np.int64)
            links = newest_so_far[slots]
            same = slots[1:] == slots[:-1]
            links[1:][same] = ends[:-1][same]
            np.frombuffer(before, dtype=np.int64)[ends % self.capacity] = links
            newest_so_far[slots] = ends  # of several for one slot the last stays, the newest

    def last(self, count: int) -> list[int]:
        """The last `count` tokens, or as many as there are."""
        return self._between(max(self.end - min(count, self.capacity), 0), self.end)

    def search(self, tail: Sequence[int], length: int) -> Match:
        """The longest match of the end of `tail`, with up to `length` tokens that followed it.

        `tail` may be the end of this text itself, which then does not count.
        """
        if self.end == 0:
            return NO_MATCH
        oldest = max(self.end - self.capacity, 0)
        for gram, newest, before in zip(GRAMS, self._newest, self._before, strict=True):
            if len(tail) < gram:
                continue
            longest = 0
            ends: list[int] = []  # of the longest matches
            position = newest[self._slot(tail[-gram:])]
            for _ in range(VISITED):
                if position < oldest:
                    break
                common = self._common(position, tail, oldest, max(longest, gram))
                # Nothing follows the text's end, and nothing of use a text that ended here.
                if common > 0 and self._goes_on(position):
                    if common > longest:
                        longest = common
                        ends = []
                    ends.append(position)
                position = before[position % self.capacity]
            if ends:
                continuations = [self._continuation(end, length) for end in ends[:CONTINUATIONS]]
                return Match(longest, continuations)
        return NO_MATCH

    def _slot(self, gram: Sequence[int]) -> int:
        hashed = 0
        for token in gram:
            hashed = (hashed + token) * FACTOR & WORD
        return hashed >> self._shift

    def _common(self, position: int, tail: Sequence[int], oldest: int, least: int) -> int:
        """Tokens that the texts up to a position and up to the end of `tail` have in common.

        0 if they are fewer than `least`, which one comparison shows of most.
        """
        ring = self._ring
        capacity = self.capacity
        first = position - least + 1
        if first < oldest or ring[first % capacity] != tail[-least]:
            return 0
        common = 0
        for token in reversed(tail):
            if position < oldest or ring[position % capacity] != token:
                break
            common += 1
            position -= 1
        return common if common >= least else 0

    def _goes_on(self, position: int) -> bool:
        following = position + 1
        return following < self.end and self._ring[following % self.capacity] != SEPARATOR

    def _continuation(self, position: int, length: int) -> list[int]:
        """The tokens after a position, up to the end of its text."""
        tokens = self._between(position + 1, min(position + 1 + length, self.end))
        if SEPARATOR in tokens:
            return tokens[: tokens.index(SEPARATOR)]
        return tokens

    def _between(self, first: int, end: int) -> list[int]:
        """The tokens from position `first` to before `end`."""
        start = first % self.capacity
        stop = start + end - first
        if stop <= self.capacity:
            return self._ring[start:stop].tolist()
        return self._ring[start:].tolist() + self._ring[: stop - self.capacity].tolist()
