"""The GPU benchmark runs anywhere on a tiny model, and says what is forced and what went wrong."""

from __future__ import annotations

import dataclasses
import json

import pytest

from headstart.scripts import bench_gpu as module
from headstart.scripts.bench_gpu import BenchGpuConfig, bench_gpu, page


@pytest.fixture
def config(tmp_path):
    return BenchGpuConfig(str(tmp_path), texts=[40], compiled=False, tiny=True)


def test_every_part_is_measured_and_every_text_is_that_of_generate(config, tmp_path):
    report = bench_gpu(config)
    assert json.loads((tmp_path / "gpu.json").read_text())["rounds"] == report["rounds"]
    assert all(row["equal"] is True for part in ("identity", "rounds") for row in report[part])
    rounds = {(row["engine"], row["nodes"]): row for row in report["rounds"]}
    assert len(rounds) == 1 + 2 * len(module.TREES)  # of `generate`, of eager forwards and of this CPU's kernels
    for (engine, nodes), row in rounds.items():
        if engine != "transformers generate":
            assert row["acceptance_length"] == pytest.approx(1 + module.TREES[nodes], abs=0.1)
    (step,) = report["training"]
    assert step["tokens_per_second"] > 0 and step["teraflops"] > 0
    written = (tmp_path / "gpu.md").read_text()
    assert "forced, not measured" in written and "| eager | 40 | 60 |" in written and "**no**" not in written


def test_a_part_that_fails_is_told_and_the_next_begins(config, monkeypatch, capsys):
    def broken(bench):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(module, "PARTS", {"identity": broken, "rounds": lambda bench: bench.add("rounds", engine="x")})
    report = bench_gpu(config)
    assert report["identity"] == [{"failed": "RuntimeError('no such kernel')"}] and report["rounds"]
    assert "no such kernel" in page(report)


def test_what_is_late_is_left_out(config, capsys):
    assert "rounds" not in bench_gpu(dataclasses.replace(config, minutes=0))
    assert "0 minutes are over: rounds is left out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "told"),
    [({"training": [3]}, r"training needs a number of rows and of tokens, not \[3\]"), ({"texts": []}, "texts needs")],
)
def test_impossible_sizes_are_refused(config, changes, told):
    with pytest.raises(ValueError, match=told):
        bench_gpu(dataclasses.replace(config, **changes))
