"""The example of reinforcement learning, with TRL where it is installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from headstart.heads import CheckpointMetadata, build_head
from headstart.heads.checkpoints.save_load import save_head
from headstart.inference import Target

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("adapt", ["true", "false"])
def test_grpo_runs_with_rollouts_of_headstart(taught, tmp_path, adapt):
    pytest.importorskip("trl")
    target = Target.from_pretrained(str(taught), torch.float32)
    head = build_head("medusa", {"num_heads": 2}, target.info)
    head.initialize(target.modules, torch.ones(target.info.vocab_size, dtype=torch.int64))
    save_head(head, tmp_path / "head", CheckpointMetadata())
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"question_id": number, "category": "chat", "turns": [f"say {number}"]} for number in range(4)]
    prompts.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    command = [sys.executable, str(ROOT / "examples" / "rl" / "grpo.py")]
    command += ["--target", str(taught), "--head", str(tmp_path / "head"), "--prompts", str(prompts), "--adapt", adapt]
    command += [
        "--steps",
        "3",
        "--prompts-per-step",
        "1",
        "--generations",
        "2",
        "--new-tokens",
        "6",
        "--tree",
        "chain:2",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count(" a round") == 3
