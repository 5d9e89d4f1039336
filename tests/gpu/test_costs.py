"""Costs of rounds that are replayed: those of the device, without the calls that compile and
record."""

from __future__ import annotations

import pytest
from helpers import DEVICE

from headstart.inference.drafters.costs import measured_costs
from headstart.inference.engines.fused_decoder import FusedDecoder
from headstart.inference.engines.model_engine import ModelEngine
from headstart.inference.tuning import machine

if DEVICE != "sim":
    pytest.skip("by a clock that the simulated device moves", allow_module_level=True)
import simulated  # changes a process in which it is imported

FORWARD, OTHER = 0.01, 0.002
"""Seconds of a forward that is replayed, and of anything else."""


def test_slow_first_calls_do_not_count(lms, monkeypatch, nothing_measured):
    """A forward that is run, or recorded, takes ten seconds: it would be all that fits into the
    time."""
    _, lm = lms("eagle3", tree="chain:3")
    clock = [0.0]
    forwards = set()
    replay, record = simulated.SimGraph.replay, simulated.SimGraph.record

    def slow(forward):
        def call(*given):
            clock[0] += 10.0
            forwards.add(simulated.recorder)
            return forward(*given)

        return call

    def timed_replay(graph):
        clock[0] += FORWARD if graph in forwards else OTHER
        replay(graph)

    def slow_record(graph, call):
        clock[0] += 10.0
        return record(graph, call)

    monkeypatch.setattr(ModelEngine, "model_forward", slow(ModelEngine.model_forward))
    monkeypatch.setattr(FusedDecoder, "__call__", slow(FusedDecoder.__call__))
    monkeypatch.setattr(simulated.SimGraph, "replay", timed_replay)
    monkeypatch.setattr(simulated.SimGraph, "record", slow_record)
    monkeypatch.setattr(machine.time, "perf_counter", lambda: clock[0])
    costs = measured_costs(lm.target, lm.head)
    assert costs.forward == pytest.approx(dict.fromkeys(costs.forward, FORWARD))
    # a token is read, a chain drafted
    assert costs.draft == pytest.approx(2 * OTHER / min(lm.head.max_depth, 4))
