"""Costs of rounds that are replayed: those of the device, without the calls that compile and
record."""

from __future__ import annotations

import copy

import pytest
from helpers import DEVICE, head_for

from headstart.inference import SpeculativeLM
from headstart.inference.drafters.costs import measured_costs
from headstart.inference.engines.fused_decoder import FusedDecoder
from headstart.inference.engines.model_engine import ModelEngine
from headstart.inference.tuning import machine

if DEVICE != "sim":
    pytest.skip("by a clock that the simulated device moves", allow_module_level=True)
import simulated  # changes a process in which it is imported

FORWARD, OTHER = 0.01, 0.002
"""Seconds of a forward that is replayed, and of anything else."""


def test_slow_first_calls_do_not_count(there, on_cpu, monkeypatch, tmp_path):
    """A forward that is run, or recorded, takes ten seconds: it would be all that fits into the
    time."""
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path))
    monkeypatch.setattr(machine, "in_memory", {})
    head = copy.deepcopy(head_for(on_cpu, "eagle3")).to(there.device)
    there.compile(False)
    lm = SpeculativeLM.from_pretrained(there, head, tree="chain:3", adaptive=False)
    clock = [0.0]
    forwards = set()
    replay, record = simulated.SimGraph.replay, simulated.SimGraph.record

    def slow(forward):
        def call(*given):
            clock[0] += 10.0
            forwards.add(simulated._recorder)
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
    costs = measured_costs(lm.target, head)
    assert costs.forward == pytest.approx(dict.fromkeys(costs.forward, FORWARD))
    # a token is read, a chain drafted
    assert costs.draft == pytest.approx(2 * OTHER / min(head.max_depth, 4))
    there.compile(False)
