"""The GPU benchmark runs anywhere on a tiny model, and says what is forced and what went wrong."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.heads import build_head
from headstart.inference import Target

pytestmark = pytest.mark.long

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def gpu():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module("gpu")
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def kernels(gpu):
    return sys.modules["gpu_kernels"]


@pytest.fixture
def options(gpu, tmp_path):
    return gpu.Options(str(tmp_path), texts=[40], long_texts=[80], training=[2, 32], tiny=True)


def test_every_part_is_measured_and_every_text_is_that_of_generate(
    gpu, options, tmp_path, monkeypatch
):
    monkeypatch.setattr(gpu, "TURNS", 2)
    monkeypatch.setattr(gpu, "TREES_BY_ROWS", {8: {1: 0, 16: 3}})
    report = gpu.bench_gpu(dataclasses.replace(options, parts=tuple(gpu.PARTS.keys() - {"head"})))
    assert json.loads((tmp_path / "gpu.json").read_text())["rounds"] == report["rounds"]
    assert not [
        row for rows in report.values() if isinstance(rows, list) for row in rows if "failed" in row
    ]
    for part in ("identity", "rounds", "compared", "batches", "sampled", "texts"):
        assert all(row["equal"] is True for row in report[part]), part
    rounds = {(row["engine"], row["nodes"]): row for row in report["rounds"]}
    # of `generate`, of eager forwards and of this CPU's kernels
    assert len(rounds) == 1 + 2 * len(gpu.TREES)
    for (engine, nodes), row in rounds.items():
        if engine != "transformers generate":
            assert row["acceptance_length"] == pytest.approx(1 + gpu.TREES[nodes], abs=0.2)
            assert row["share_of_limit"] == pytest.approx(
                row["limit_ms"] / row["round_ms"], rel=0.2, abs=0.002
            )
    for row in report["batches"]:
        assert row["acceptance_length"] == pytest.approx(
            1 + gpu.TREES_BY_ROWS[row["rows"]][row["nodes"]], abs=0.3
        )
    assert [step["way"] for step in report["training"]] == [*gpu.TRAINING_WAYS]
    assert all(step["tokens_per_second"] > 0 for step in report["training"])
    assert all(step["teraflops"] > 0 for step in report["training"])
    assert {row["way"] for row in report["compared"]} == gpu.WAYS.keys()
    assert {row["nodes"] for row in report["kernels"]} == {1, 60}
    written = (tmp_path / "gpu.md").read_text()
    assert (
        "forced, not measured" in written
        and "| eager | 40 | 60 |" in written
        and "**no**" not in written
    )


def test_bytes_of_a_round_are_those_of_the_published_shape(gpu):
    """Llama-3.1-8B without its embedding is 15.01 GB; a head of depth 7 adds 5.34."""
    with torch.device("meta"):
        target = Target(LlamaForCausalLM(LlamaConfig(**gpu.LLAMA_8B)).to(torch.bfloat16))
        head = build_head(
            "eagle3", {"depth": 7, "draft_vocab_size": 32000, "start": "random"}, target.info
        )
        head.to(torch.bfloat16)
    assert gpu.read_bytes(target, head, 1, 0, 1) / 1e9 == pytest.approx(15.01, abs=0.005)
    assert gpu.read_bytes(target, head, 60, 0, 1) / 1e9 == pytest.approx(15.01 + 5.34, abs=0.01)
    of_the_text = gpu.read_bytes(target, head, 1, 4096, 2) - gpu.read_bytes(target, head, 1, 0, 2)
    # rows, tokens, layers, keys and values, groups, size, bytes
    assert of_the_text == 2 * 4096 * 32 * 2 * 8 * 128 * 2


def event(category, name, ts, dur, **args):
    """An event of a trace, with microseconds."""
    return {"ph": "X", "cat": category, "name": name, "ts": ts, "dur": dur, "args": args}


def launch(correlation, ts):
    return event("cuda_runtime", "cudaGraphLaunch", ts, 2, correlation=correlation)


def kernel(correlation, ts, dur, name="gemm"):
    return event("kernel", name, ts, dur, correlation=correlation)


def test_kernels_of_a_replayed_graph_belong_to_the_range_that_launched_it(kernels):
    def around(name, ts, dur):
        return event("user_annotation", kernels.PREFIX + name, ts, dur)

    events = [
        {"ph": "M", "name": "process_name"},
        *(
            around("forward", 0, 10),
            launch(1, 5),
            around("draft", 20, 10),
            launch(2, 25),
            launch(3, 40),
        ),
        # The device runs behind the host: what was launched within "forward" runs during "draft".
        *(
            kernel(1, 22, 6),
            kernel(1, 29, 4, "norm"),
            kernel(1, 33, 6),
            kernel(2, 44, 10),
            kernel(3, 60, 1, "copy"),
        ),
        {**kernel(2, 43, 30, kernels.PREFIX + "draft"), "cat": "gpu_user_annotation"},
    ]
    rows = {(row["range"], row["kernel"]): row for row in kernels.kernel_table(events, rounds=2)}
    assert list(rows)[:3] == [("forward", "all"), ("forward", "gemm"), ("forward", "norm")]
    assert rows["forward", "gemm"]["count"] == 1 and rows["forward", "gemm"]["us_each"] == 6
    assert (
        rows["forward", "all"]["ms_a_round"] == 0.008
        and rows["forward", "all"]["idle_before_ms"] == 0.0005
    )
    assert (
        rows["draft", "gemm"]["count"] == 0.5 and rows["draft", "all"]["idle_before_ms"] == 0.0025
    )
    assert rows["between", "copy"]["idle_before_ms"] == 0.003
    assert rows["all", "all"]["share"] == 1 and rows["all", "all"]["idle_before_ms"] == 0.006
