"""Launches of several processes that make training runs, for the benchmarks that compare
engines."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from accelerate.state import AcceleratorState, GradientState, PartialState

from headstart.train.config import TrainConfig

ROOT = Path(__file__).resolve().parents[1]


def write_config(config: TrainConfig, path: Path) -> str:
    """Write the options of a run to a YAML file; return its path for --config."""
    plain = json.loads(json.dumps(dataclasses.asdict(config)))
    path.write_text(yaml.safe_dump(plain), encoding="utf-8")
    return str(path)


def launch(
    launcher: str, engine: str, processes: int, program: str, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a program as the processes of a launch file, each with one thread; return its status and
    what it said.

    Args:
        launcher: a module, accelerate.commands.launch or headstart.scripts.launch.
        engine: the name of a file in configs/accelerate.
        processes: how many there are.
        program: the file that each of them runs.
        arguments: those of the program.
        environment: variables besides those of this process.
    """
    command = [sys.executable, "-m", launcher]
    command += [
        "--config_file",
        f"configs/accelerate/{engine}.yaml",
        "--num_processes",
        str(processes),
    ]
    command += ["--main_process_port", "0", program, *arguments]
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def forget_launch() -> None:
    """Let the processes of a launch make another run: accelerate reads the launch file anew, the
    group stays joined."""
    leave: Any = lambda *_: None  # noqa: E731
    PartialState.destroy_process_group = leave
    AcceleratorState._reset_state()
    GradientState._reset_state()
