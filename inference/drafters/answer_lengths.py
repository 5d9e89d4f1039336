"""Answer lengths: whether reading a prompt pays off depends on the tokens to come."""

from __future__ import annotations

from collections import deque

REMEMBERED_ANSWERS = 32
"""Answers by whose lengths that of the next one is expected."""


class AnswerLengths:
    """A geometric model of answer lengths: each token is the last with the same probability."""

    def __init__(self) -> None:
        self.answers: deque[tuple[int, bool]] = deque(maxlen=REMEMBERED_ANSWERS)
        """Tokens of the newest answers, and whether each ended before its limit."""
        self.ending = 0.0
        """Probability that an answer ends with its next token."""

    def add(self, tokens: int, limit: float) -> None:
        """Note an answer that has ended, or was cut at the limit."""
        if tokens < 1:
            return
        self.answers.append((tokens, tokens < limit))
        ended = sum(by_itself for _, by_itself in self.answers)
        self.ending = ended / sum(length for length, _ in self.answers)

    def expected(self, limit: float) -> float:
        """Tokens that an answer is expected to go on for, of which `limit` are allowed."""
        if self.ending == 0:
            return limit
        return (1 - (1 - self.ending) ** limit) / self.ending
