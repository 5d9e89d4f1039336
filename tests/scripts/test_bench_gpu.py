"""The GPU benchmark runs anywhere, on a shape that is small; figures that are drawn are called so."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from transformers import LlamaConfig

from headstart.inference import DraftTree, TreeShape, kv_cache
from headstart.inference.logits import RandomSampler
from headstart.scripts.measuring import bench_gpu as module
from headstart.scripts.measuring.bench_gpu import GpuBenchConfig, bench_gpu


def tiny():
    return LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
    )


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SHAPES", {"tiny": tiny})
    return GpuBenchConfig(
        str(tmp_path), ["tiny"], batches=[1, 2], contexts=[40], nodes=[1, 4, 12], repeats=2, training=[2, 24]
    )


def test_every_size_is_measured_and_what_is_synthetic_is_called_so(config, tmp_path):
    report = bench_gpu(config)
    saved = json.loads((tmp_path / "rounds.json").read_text())
    assert saved["shapes"] == report["shapes"] and "drawn, not measured" in saved["synthetic"]
    rows = [row for row in saved["shapes"]["tiny"] if "nodes" in row]
    assert [(row["batch"], row["nodes"]) for row in rows] == [(b, n) for b in (1, 2) for n in (1, 4, 12)]
    for row in rows:
        assert row["round"] == pytest.approx(sum(row["milliseconds"].values())) and row["bandwidth_share"] > 0
        assert 1 <= row["synthetic_tokens"] <= min(row["nodes"], 8)
    assert {row["transformers"] for row in saved["shapes"]["tiny"] if "step" in row} >= {"eager"}
    assert "synthetic" in (tmp_path / "rounds.md").read_text()
    step = saved["training"]["tiny"]
    assert (step["rows"], step["length"]) == (2, 24) and step["tokens_per_second"] > 0 and step["teraflops"] > 0
    assert set(step["milliseconds"]) == {"batch", "target", "head", "loss", "backward", "optimizer"}
    assert "tiny, training, 2 rows of 24" in (tmp_path / "rounds.md").read_text()


def test_what_does_not_fit_or_is_late_is_left_out(config, monkeypatch, capsys):
    monkeypatch.setattr(kv_cache, "free_memory", lambda device: 1000.0)
    assert bench_gpu(config)["shapes"]["tiny"] == []
    assert "left out" in capsys.readouterr().out
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"training needs a number of rows and of tokens, or nothing, not \[3\]"):
        bench_gpu(dataclasses.replace(config, shapes=["qwen3-8b"], training=[3]))
    with pytest.raises(ValueError, match="unknown shape 'huge'; choose from llama"):
        bench_gpu(GpuBenchConfig(output="o", shapes=["huge"]))


def test_synthetic_acceptance_has_its_rate():
    shape = TreeShape.chain(7)
    parents = torch.tensor(shape.parents).expand(2000, -1)
    tree = DraftTree(torch.zeros_like(parents), parents, torch.full((2000,), 8), 7)
    lengths = module.synthetic(tree, torch.zeros(2000, 8, 3), RandomSampler(torch.Generator().manual_seed(0))).lengths_B
    expected = 1 + sum(module.RATE**depth for depth in range(1, 8))
    assert lengths.float().mean() == pytest.approx(expected, abs=0.15) and 6 < expected < 6.5
