"""How long answers are: what the prefill of a head costs is earned back by the tokens to come."""

from __future__ import annotations


class AnswerLengths:
    """How many tokens answers have: every token is the last one with the same probability."""

    def __init__(self) -> None:
        self.tokens = 0
        """Tokens of all answers so far."""
        self.ended = 0
        """Answers that ended before their limit."""

    def add(self, tokens: int, limit: float) -> None:
        """Note an answer that has ended, or was cut at the limit."""
        self.tokens += tokens
        self.ended += 0 < tokens < limit

    def expected(self, limit: float) -> float:
        """Tokens that an answer is expected to go on for, of which `limit` are allowed."""
        if self.ended == 0:
            return limit
        ending = self.ended / self.tokens
        return (1 - (1 - ending) ** limit) / ending
