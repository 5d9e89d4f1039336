"""OpenTelemetry spans, one per generation: `lm.observers.append(Spans(model="Qwen/Qwen3-8B"))`.

Needs `pip install headstart[otel]` and a tracer provider of the application's. A span is a child of
the one that is current where `generate` is called; it covers prefill and rounds.
"""

from __future__ import annotations

import math
import time

from opentelemetry import trace

from ...inference.rounds.observers import RoundObserver
from ...inference.trees.stats import Stats


class Spans(RoundObserver):
    """Writes a span when a generation has ended."""

    def __init__(
        self,
        model: str = "",
        head: str = "",
        drafter: str = "",
        provider: trace.TracerProvider | None = None,
    ) -> None:
        """Name the decoder, as for `Monitor`; `provider` defaults to OpenTelemetry's global one."""
        self.tracer = trace.get_tracer("headstart", tracer_provider=provider)
        self.names = {
            "gen_ai.request.model": model,
            "headstart.head": head,
            "headstart.drafter": drafter,
        }

    def end(self, stats: Stats, error: BaseException | None) -> None:
        """Write a generation's span, with OpenTelemetry's standard attributes where they exist."""
        # The span ends now and began when the prefill did.
        seconds = stats.seconds.get("prefill", 0.0) + sum(stats.round_seconds)
        end = time.time_ns()
        attributes: dict[str, str | int | float] = {
            **{name: value for name, value in self.names.items() if value},
            "gen_ai.operation.name": "text_completion",
            # Each prefill returns a token, too.
            "gen_ai.usage.output_tokens": stats.tokens + len(stats.rows),
            "headstart.sequences": len(stats.rows),
            "headstart.rounds": stats.rounds,
            "headstart.plain_rounds": stats.plain_rounds,
            "headstart.kv_cache_bytes": stats.cache_bytes,
            **{f"headstart.seconds.{part}": value for part, value in stats.seconds.items()},
        }
        if not math.isnan(stats.acceptance_length):
            attributes["headstart.acceptance_length"] = stats.acceptance_length
        span = self.tracer.start_span(
            "headstart.generate", start_time=end - int(seconds * 1e9), attributes=attributes
        )
        span.end(end_time=end)
