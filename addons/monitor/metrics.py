"""Prometheus metrics of generations, from their `Stats`.

    monitor = Monitor(model="Qwen/Qwen3-8B", head="USER/NAME")
    lm.observers.append(monitor)
    monitor.serve(9464)    # http://127.0.0.1:9464/metrics

With $PROMETHEUS_MULTIPROC_DIR, the processes of one machine are served together.
"""

from __future__ import annotations

import copy
import os
import threading
from collections import deque
from typing import Any, Self

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from prometheus_client.multiprocess import MultiProcessCollector

from ...inference.rounds.observers import RoundObserver
from ...inference.trees.stats import RoundRecord, Stats

LABELS = ("model", "head", "drafter")
WINDOW = 1000
"""Latest rounds over which the gauges of acceptance are taken."""
TOKEN_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
FIRST_TOKEN_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of the histograms' buckets."""
COUNTERS = {
    "generations": ("Calls of generate.", ()),
    "tokens": ("Tokens that rounds returned; those of the prefill are not counted.", ()),
    "rounds": ("Rounds of a sequence: one forward of the target each.", ()),
    "plain_rounds": ("Rounds without drafts.", ()),
    "drafts": ("Rounds with drafts.", ()),
    "draft_tokens": ("Depth of each round's draft tree; on a chain, the drafted tokens.", ()),
    "draft_tokens_per_position": (
        "Rounds whose draft tree reaches this depth, counted from 0.",
        ("position",),
    ),
    "accepted_tokens": ("Drafted tokens that were accepted.", ()),
    "accepted_tokens_per_position": (
        "Rounds that accepted a token at this depth, counted from 0.",
        ("position",),
    ),
    "fallback_rounds": ("Rounds in which a drafter was not used, and why.", ("reason",)),
    "part_seconds": ("Time by part of the work.", ("part",)),
}
"""Name, without prefix and suffix, to help and additional labels."""
FALLBACKS = (
    "slower",
    "drafter_failed",
    "large_batch",
    "out_of_memory",
    "not_finite",
    "segment_border",
)
"""Reasons of `DraftTree.fallback`."""


class Monitor(RoundObserver):
    """Metrics of one decoder, or of several by their labels; threads may share it."""

    def __init__(
        self,
        model: str = "",
        head: str = "",
        drafter: str = "",
        registry: CollectorRegistry | None = None,
    ) -> None:
        """Register the metrics; the names are the values of their labels.

        Args:
            registry: where to register; None for a registry of its own.

        Raises:
            ValueError: the registry has a monitor already; see `labelled`.
        """
        self.registry = CollectorRegistry() if registry is None else registry
        self.values = (model, head, drafter)
        options: dict[str, Any] = {"namespace": "headstart", "registry": self.registry}
        self.counters = {
            name: Counter(name, about, (*LABELS, *more), **options)
            for name, (about, more) in COUNTERS.items()
        }
        of_process: dict[str, Any] = {**options, "multiprocess_mode": "liveall"}
        window = f"over the latest {WINDOW} rounds with drafts."
        self.length = Gauge(
            "acceptance_length", f"Tokens per round, {window}", LABELS, **of_process
        )
        self.rate = Gauge(
            "acceptance_rate", f"Share of draft tokens accepted, {window}", LABELS, **of_process
        )
        about = "KV cache of the target, in the latest generation."
        self.cache = Gauge(
            "kv_cache_bytes", about, LABELS, **{**options, "multiprocess_mode": "livesum"}
        )
        about = "Time per returned token: its round's, over the tokens that the round returned."
        self.token = Histogram(
            "time_per_output_token_seconds", about, LABELS, buckets=TOKEN_SECONDS, **options
        )
        about = "Time to the first token of a generation, in which its prompts were read."
        self.first = Histogram(
            "time_to_first_token_seconds", about, LABELS, buckets=FIRST_TOKEN_SECONDS, **options
        )
        # Threads that decode add rounds, and read all of them for the gauges.
        self._latest: deque[RoundRecord] = deque(maxlen=WINDOW)
        self._lock = threading.Lock()
        self._begin_at_zero()

    def _begin_at_zero(self) -> None:
        """Show the counters at 0: Prometheus sees no increase in a counter that appears at 1."""
        for name, (_, more) in COUNTERS.items():
            if not more:
                self.counters[name].labels(*self.values)
        for reason in FALLBACKS:
            self.counters["fallback_rounds"].labels(*self.values, reason)

    def labelled(self, model: str = "", head: str = "", drafter: str = "") -> Self:
        """Return the same metrics for another decoder of the process."""
        # A shallow copy shares the metrics; the window of rounds is each decoder's own.
        other = copy.copy(self)
        other.values = (model, head, drafter)
        other._latest = deque(maxlen=WINDOW)
        other._lock = threading.Lock()
        other._begin_at_zero()
        return other

    def end(self, stats: Stats, error: BaseException | None) -> None:
        """Count a generation, also one that was stopped early: what it has decoded until then."""
        self.add(stats)

    def add(self, stats: Stats) -> None:
        """Add a generation's tokens, rounds, drafts and seconds to the counters."""
        # 1. Counters: amounts by the metric's name and its additional label.
        records = [record for row in stats.rows for record in row]
        amounts: dict[tuple[str, ...], float] = {
            ("generations",): 1,
            ("tokens",): stats.tokens,
            ("rounds",): stats.rounds,
            ("plain_rounds",): stats.plain_rounds,
            ("drafts",): stats.rounds - stats.plain_rounds,
            ("draft_tokens",): sum(record.drafted for record in records),
            ("accepted_tokens",): sum(record.accepted for record in records),
        }
        for depth in range(stats.max_depth):
            position = str(depth)
            amounts["draft_tokens_per_position", position] = sum(
                record.drafted > depth for record in records
            )
            amounts["accepted_tokens_per_position", position] = sum(
                record.accepted > depth for record in records
            )
        for reason in {record.fallback for record in records} - {""}:
            amounts["fallback_rounds", reason] = sum(
                record.fallback == reason for record in records
            )
        amounts |= {("part_seconds", part): seconds for part, seconds in stats.seconds.items()}
        for (name, *more), amount in amounts.items():
            self.counters[name].labels(*self.values, *more).inc(amount)

        # 2. Histograms.
        for histogram, values in (
            (self.token, stats.token_seconds),
            (self.first, stats.first_token_seconds),
        ):
            child = histogram.labels(*self.values)
            for seconds in values:
                child.observe(seconds)

        # 3. Gauges. The cache's size is known where a generation was not stopped early.
        if stats.cache_bytes:
            self.cache.labels(*self.values).set(stats.cache_bytes)
        with self._lock:
            self._latest += [record for record in records if record.drafted]
            if self._latest:
                rounds = len(self._latest)
                drafted = sum(record.drafted for record in self._latest)
                returned = sum(record.returned for record in self._latest)
                accepted = sum(record.accepted for record in self._latest)
                self.length.labels(*self.values).set(returned / rounds)
                self.rate.labels(*self.values).set(accepted / drafted)

    def serve(self, port: int, address: str = "127.0.0.1") -> int:
        """Answer scrapes at /metrics in a thread.

        The address "0.0.0.0" also admits scrapes from other machines.

        Returns:
            The port, which is a free one if 0 was given.

        Raises:
            ValueError: a port or an address that cannot be listened on.
        """
        registry = self.registry
        # Collect what all processes have written to that folder.
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)
        try:
            server, _ = start_http_server(port, address, registry)
        except (OSError, OverflowError) as error:
            raise ValueError(
                f"metrics cannot be served on port {port} of {address}: {error}"
            ) from error
        return server.server_port
