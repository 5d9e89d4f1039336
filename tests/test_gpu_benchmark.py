"""The GPU benchmark runs anywhere on a tiny model, and says what is forced and what went wrong."""

from __future__ import annotations

import json

import gpu
import gpu_kernels
import pytest
import torch
from messages import lacking
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.heads import build_head
from headstart.inference import Target

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def report_folder(tmp_path_factory):
    """What the benchmark leaves of a tiny model."""
    folder = tmp_path_factory.mktemp("gpu")
    sizes = {"texts": [40], "long_texts": [80], "training": [2, 32], "tiny": True}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "TURNS", 2)
        patch.setattr(gpu, "TREES_BY_ROWS", {8: {1: 0, 16: 3}})
        gpu.bench_gpu(gpu.Options(str(folder), **sizes, parts=tuple(gpu.PARTS.keys() - {"head"})))
    return folder


@pytest.fixture
def report(report_folder):
    return json.loads((report_folder / "gpu.json").read_text())


def test_every_part_is_measured_and_every_text_is_that_of_generate(report, report_folder):
    rows = [row for part in report.values() if isinstance(part, list) for row in part]
    assert not [row for row in rows if "failed" in row]
    assert all(row["equal"] for row in rows if "equal" in row)
    assert [step["way"] for step in report["training"]] == [*gpu.TRAINING_WAYS]
    assert all(step["tokens_per_second"] > 0 < step["teraflops"] for step in report["training"])
    assert {row["way"] for row in report["compared"]} == gpu.WAYS.keys()
    assert {row["nodes"] for row in report["kernels"]} == {1, 60}
    page = (report_folder / "gpu.md").read_text()
    assert not lacking(page, "forced, not measured | eager | 40 | 60 |")
    assert "**no**" not in page


def test_acceptance_is_what_is_forced(report):
    rounds = {(row["engine"], row["nodes"]): row for row in report["rounds"]}
    # of `generate`, of eager forwards and of this CPU's kernels
    assert len(rounds) == 1 + 2 * len(gpu.TREES)
    for (engine, nodes), row in rounds.items():
        if engine != "transformers generate":
            expected = 1 + gpu.TREES[nodes]
            assert row["acceptance_length"] == pytest.approx(expected, abs=0.2)
            share = row["limit_ms"] / row["round_ms"]
            assert row["share_of_limit"] == pytest.approx(share, rel=0.2, abs=0.002)
    for row in report["batches"]:
        expected = {1: 1, 16: 4}[row["nodes"]]
        assert row["acceptance_length"] == pytest.approx(expected, abs=0.3)


def test_bytes_of_a_round_are_those_of_the_published_shape():
    """Llama-3.1-8B without its embedding is 15.01 GB; a head of depth 7 adds 5.34."""
    with torch.device("meta"):
        target = Target(LlamaForCausalLM(LlamaConfig(**gpu.LLAMA_8B)).to(torch.bfloat16))
        options = {"depth": 7, "draft_vocab_size": 32000, "start": "random"}
        head = build_head("eagle3", options, target.info).to(torch.bfloat16)
    assert gpu.read_bytes(target, head, 1, 0, 1) / 1e9 == pytest.approx(15.01, abs=0.005)
    assert gpu.read_bytes(target, head, 60, 0, 1) / 1e9 == pytest.approx(15.01 + 5.34, abs=0.01)
    of_the_text = gpu.read_bytes(target, head, 1, 4096, 2) - gpu.read_bytes(target, head, 1, 0, 2)
    # rows, tokens, layers, keys and values, groups, size, bytes
    assert of_the_text == 2 * 4096 * 32 * 2 * 8 * 128 * 2


def event(category, name, ts, dur, **args):
    """An event of a trace, with microseconds."""
    return {"ph": "X", "cat": category, "name": name, "ts": ts, "dur": dur, "args": args}


def annotation(name, ts, dur):
    return event("user_annotation", gpu_kernels.PREFIX + name, ts, dur)


def graph_launch(correlation, ts):
    return event("cuda_runtime", "cudaGraphLaunch", ts, 2, correlation=correlation)


def kernel(correlation, ts, dur, name="gemm"):
    return event("kernel", name, ts, dur, correlation=correlation)


def test_kernels_of_a_replayed_graph_belong_to_the_range_that_launched_it():
    events = [
        {"ph": "M", "name": "process_name"},
        annotation("forward", 0, 10),
        graph_launch(1, 5),
        annotation("draft", 20, 10),
        graph_launch(2, 25),
        graph_launch(3, 40),
        # The device runs behind the host: what was launched within "forward" runs during "draft".
        kernel(1, 22, 6),
        kernel(1, 29, 4, "norm"),
        kernel(1, 33, 6),
        kernel(2, 44, 10),
        kernel(3, 60, 1, "copy"),
        {**kernel(2, 43, 30, gpu_kernels.PREFIX + "draft"), "cat": "gpu_user_annotation"},
    ]
    table = gpu_kernels.kernel_table(events, rounds=2)
    rows = {(row["range"], row["kernel"]): row for row in table}
    assert list(rows)[:3] == [("forward", "all"), ("forward", "gemm"), ("forward", "norm")]
    assert rows["forward", "gemm"]["count"] == 1
    assert rows["forward", "gemm"]["us_each"] == 6
    assert rows["forward", "all"]["ms_a_round"] == 0.008
    assert rows["forward", "all"]["idle_before_ms"] == 0.0005
    assert rows["draft", "gemm"]["count"] == 0.5
    assert rows["draft", "all"]["idle_before_ms"] == 0.0025
    assert rows["between", "copy"]["idle_before_ms"] == 0.003
    assert rows["all", "all"]["share"] == 1
    assert rows["all", "all"]["idle_before_ms"] == 0.006
