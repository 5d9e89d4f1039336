"""OpenTelemetry spans of generations."""

from __future__ import annotations

import pytest
import torch

from headstart.inference import SpeculativeLM

pytest.importorskip("opentelemetry.sdk.trace")


def test_each_generation_is_a_span_below_the_callers(tiny_target):
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from headstart.addons.monitor.spans import Spans

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    lm = SpeculativeLM.from_pretrained(
        tiny_target(vocab_size=20), drafter="prompt-lookup", adaptive=False
    )
    lm.observers.append(Spans(model="tiny", drafter="prompt-lookup", provider=provider))
    with provider.get_tracer("test").start_as_current_span("request"):
        stats = lm.generate(
            torch.tensor([[1, 2, 1], [3, 2, 3]]), max_new_tokens=10, do_sample=False
        ).stats
    span, request = exporter.get_finished_spans()
    assert span.name == "headstart.generate"
    assert span.parent is not None and span.parent.span_id == request.context.span_id
    assert request.start_time < span.start_time < span.end_time < request.end_time
    assert span.attributes["gen_ai.usage.output_tokens"] == 20
    assert span.attributes["gen_ai.request.model"] == "tiny"
    assert "headstart.head" not in span.attributes
    assert span.attributes["headstart.rounds"] == stats.rounds
    assert span.attributes["headstart.acceptance_length"] == stats.acceptance_length
