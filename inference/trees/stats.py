"""Acceptance statistics by one definition, used in training, decoding and benchmarks.

acceptance length tau      tokens emitted per round, the bonus token counted; the prefill and its
                           token left out, the last round counting what is returned
acceptance rate, depth d   how often the accepted path reaches depth d + 1, given that it
                           reached d
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

PARTS = ("draft", "target", "processors", "verify", "cache", "host")
"""Parts of a round: the draft and `observe`, the target's forward with its mask, the logits
processors, the acceptance rule, the compaction of the KV cache (a part of the rule in a CUDA
graph), and synchronization and bookkeeping on the host."""


@dataclass(frozen=True)
class RoundRecord:
    """One row's part in one round."""

    accepted: int
    """Drafted tokens that were accepted."""
    returned: int
    """Tokens that were returned to the user: accepted + 1, or fewer in a row's last round."""
    drafted: int = 0
    """Depth of the round's trees, its draft length on a chain; 0 for a plain round."""
    number: int = field(default=0, compare=False)
    """Which round it was, as an index into `Stats.round_seconds`."""
    fallback: str = field(default="", compare=False)
    """Why the round had no drafts, see `DraftTree.fallback`; empty if it had, or if there was
    nothing to draft."""
    nodes: int = field(default=1, compare=False)
    """Nodes of the round's trees, the root counted; 1 for a plain round."""


@dataclass
class Stats:
    """Statistics of one or more generations: `rows[i]` holds the rounds of one prompt."""

    rows: list[list[RoundRecord]] = field(default_factory=list)
    max_depth: int = 0
    """Depth of the draft trees."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall-clock time by part of the work: prefill, and of rounds `PARTS`."""
    round_seconds: list[float] = field(default_factory=list)
    """Duration of every round, over all rows of its batch."""
    first_token_seconds: list[float] = field(default_factory=list)
    """For each generation, the time in which its first prompts were read, up to their first
    tokens."""
    cache_bytes: int = 0
    """Memory of the target's KV cache; the largest one if there were several generations."""

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the time spent inside to `seconds[part]`.

        On a GPU this is the time to launch the work, except for the part that waits for its result.
        """
        start = time.perf_counter()
        yield
        self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - start

    def drop_unfinished(self) -> None:
        """Drop what is counted of a round that an error ended."""
        for row in self.rows:
            # A round's duration is added when it has ended: records beyond have none.
            if row and row[-1].number >= len(self.round_seconds):
                row.pop()

    @property
    def rounds(self) -> int:
        """Speculation rounds, summed over rows."""
        return sum(map(len, self.rows))

    @property
    def plain_rounds(self) -> int:
        """Rounds without drafts, summed over rows."""
        return sum(record.drafted == 0 for row in self.rows for record in row)

    @property
    def tokens(self) -> int:
        """Tokens that rounds returned; the prefill's token is not one of them."""
        return sum(record.returned for row in self.rows for record in row)

    @property
    def tokens_and_rounds(self) -> list[list[int]]:
        """Tokens that rounds returned, and rounds, of each row."""
        return [[sum(record.returned for record in row), len(row)] for row in self.rows]

    @property
    def acceptance_length(self) -> float:
        """Tokens per round; NaN without a round."""
        return self.tokens / self.rounds if self.rounds else float("nan")

    @property
    def acceptance_length_interval(self) -> tuple[float, float]:
        """95 % confidence interval of the acceptance length.

        A ratio estimate over clusters: rows (prompts) if there are several, since rounds of one
        text resemble each other; else rounds. NaN with fewer than two clusters.
        """
        clusters = [[tokens, rounds] for tokens, rounds in self.tokens_and_rounds if rounds]
        if len(clusters) == 1:
            clusters = [[record.returned, 1] for row in self.rows for record in row]
        count = len(clusters)
        mean = self.acceptance_length
        if count < 2:
            return float("nan"), float("nan")
        # Linearised variance of sum(tokens) / sum(rounds): with t_i tokens in r_i rounds,
        # 1.96 sqrt(n / (n - 1) sum (t_i - mean r_i)^2) / sum r_i on either side.
        squares = sum((tokens - mean * rounds) ** 2 for tokens, rounds in clusters)
        half = 1.96 * (squares * count / (count - 1)) ** 0.5 / self.rounds
        return mean - half, mean + half

    @property
    def acceptance_rate_by_depth(self) -> list[float]:
        """Acceptance rate for each depth from the root; NaN where no path reached it.

        A row's last round may return fewer tokens than were accepted: it counts for the depths that
        were returned, not for the next one.
        """
        # 2 tokens accepted, 3 returned: accepted at depths 0 and 1, and reached at 2, where the
        # draft was rejected. 2 accepted, 2 returned (the text ended): depth 2 is unknown.
        reached = [0] * self.max_depth
        accepted = [0] * self.max_depth
        for row in self.rows:
            for record in row:
                successes = min(record.accepted, record.returned)
                truncated = record.returned <= record.accepted
                for depth in range(self.max_depth):
                    reached[depth] += depth < successes or (depth == successes and not truncated)
                    accepted[depth] += depth < successes
        return [
            hits / tries if tries else float("nan")
            for hits, tries in zip(accepted, reached, strict=True)
        ]

    @property
    def round_parts(self) -> dict[str, float]:
        """Mean seconds of a round, over all rows of its batch, by part."""
        rounds = len(self.round_seconds)
        return {part: self.seconds.get(part, 0.0) / rounds for part in PARTS} if rounds else {}

    @property
    def token_seconds(self) -> list[float]:
        """Seconds per returned token.

        It is the round's time over the number of tokens that the round returned in the token's row.
        """
        seconds: list[float] = []
        if not self.round_seconds:
            return seconds
        for row in self.rows:
            for record in row:
                # 3 tokens of a round of 60 ms: 20 ms each. A round that returned none adds none.
                for _ in range(record.returned):
                    seconds.append(self.round_seconds[record.number] / record.returned)
        return seconds

    def summary(self) -> str:
        """Two lines of text: acceptance, and where the time went."""
        if not self.rounds:
            return "no rounds"
        low, high = self.acceptance_length_interval
        spread = "" if math.isnan(low) else f" ({low:.2f} to {high:.2f})"
        rates = ", ".join(
            "-" if math.isnan(rate) else f"{rate:.2f}" for rate in self.acceptance_rate_by_depth
        )
        parts = ", ".join(
            f"{part} {1000 * seconds:.1f}" for part, seconds in self.round_parts.items()
        )
        seconds = sum(self.round_seconds)
        prefill = self.seconds.get("prefill", 0.0)
        rate = self.tokens / seconds if seconds else math.nan
        return (
            f"{len(self.rows) + self.tokens} tokens: {len(self.rows)} by prefill, {self.tokens} in"
            f" {self.rounds} rounds ({self.plain_rounds} without drafts); acceptance length"
            f" {self.acceptance_length:.2f}{spread}; acceptance rate by depth {rates or '-'}\n"
            f"{rate:.1f} tokens/s after {prefill:.2f} s of prefill; a round, in ms: {parts}"
        )

    @classmethod
    def merged(cls, parts: Iterable[Stats]) -> Stats:
        """Return the statistics of several generations together."""
        whole = cls()
        for part in parts:
            # Rounds are numbered on: a part's round 0 comes after all rounds before it.
            before = len(whole.round_seconds)
            for row in part.rows:
                whole.rows.append(
                    [replace(record, number=before + record.number) for record in row]
                )
            whole.round_seconds += part.round_seconds
            whole.max_depth = max(whole.max_depth, part.max_depth)
            whole.first_token_seconds += part.first_token_seconds
            whole.cache_bytes = max(whole.cache_bytes, part.cache_bytes)
            for name, seconds in part.seconds.items():
                whole.seconds[name] = whole.seconds.get(name, 0.0) + seconds
        return whole


def acceptance_figures(stats: Stats) -> dict[str, Any]:
    """Acceptance statistics as plain numbers, as reports and checkpoints hold them."""
    return {
        "acceptance_length": stats.acceptance_length,
        "interval": list(stats.acceptance_length_interval),
        "acceptance_rate_by_depth": stats.acceptance_rate_by_depth,
        "rounds": stats.rounds,
        "plain_rounds": stats.plain_rounds,
    }
