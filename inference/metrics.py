"""What a serving team reads: the same figures as a dictionary, for a callback, and as Prometheus text.

meter = Meter()
lm.listeners.append(meter.add)      # called with the statistics of every generation
print(meter.text())
"""

from __future__ import annotations

from collections import Counter, deque

import numpy as np

from .stats import Stats

TOKENS_KEPT = 10_000
"""Latest tokens whose latencies a meter remembers."""


def metrics(stats: Stats) -> dict[str, float]:
    """The figures of one or more generations, in tokens and seconds; NaN where nothing happened."""
    records = [record for row in stats.rows for record in row]
    drafted, accepted = sum(record.drafted for record in records), sum(record.accepted for record in records)
    guessing = [record for record in records if record.drafted > 0]
    busy = sum(seconds for part, seconds in stats.seconds.items() if part != "prefill")
    latencies = stats.token_seconds
    return {
        "acceptance_rate": _share(accepted, drafted),
        "acceptance_length": stats.acceptance_length,
        "draft_length": _share(drafted, len(guessing)),
        "inter_token_seconds_median": float(np.median(latencies)) if latencies else float("nan"),
        "inter_token_seconds_p99": float(np.quantile(latencies, 0.99)) if latencies else float("nan"),
        "tokens_per_second": _share(stats.tokens, busy),
        "draft_share": _share(stats.seconds.get("draft", 0.0), busy),
        "plain_rounds": stats.plain_rounds,
    }


def _share(part: float, whole: float) -> float:
    return part / whole if whole else float("nan")


class Meter:
    """Counts over the life of a process."""

    def __init__(self) -> None:
        """Nothing happened yet."""
        self.counts: Counter[str] = Counter()
        self.latencies: deque[float] = deque(maxlen=TOKENS_KEPT)

    def add(self, stats: Stats) -> None:
        """Take in a generation."""
        for row in stats.rows:
            for record in row:
                self.counts["rounds_total"] += 1
                self.counts["plain_rounds_total"] += record.drafted == 0
                self.counts["tokens_total"] += record.returned
                self.counts["draft_tokens_total"] += record.drafted
                self.counts["accepted_tokens_total"] += record.accepted
                for depth in range(record.accepted):
                    self.counts[f'accepted_tokens_per_position_total{{position="{depth}"}}'] += 1
        for part, seconds in stats.seconds.items():
            self.counts[f'seconds_total{{part="{part}"}}'] += seconds  # type: ignore[assignment]  # floats count too
        self.latencies.extend(stats.token_seconds)

    def text(self) -> str:
        """Prometheus' text format, version 0.0.4; latencies are of the latest tokens."""
        lines = []
        for name in sorted({key.partition("{")[0] for key in self.counts}):
            lines.append(f"# TYPE headstart_{name} counter")
            lines += [f"headstart_{key} {value}" for key, value in sorted(self.counts.items()) if key.startswith(name)]
        lines.append("# TYPE headstart_inter_token_seconds summary")
        for quantile in (0.5, 0.99) if self.latencies else ():
            value = float(np.quantile(list(self.latencies), quantile))
            lines.append(f'headstart_inter_token_seconds{{quantile="{quantile}"}} {value}')
        return "\n".join(lines) + "\n"
