"""Two machines, played by two launchers on this one: the same losses, and folders that they do not
share."""

from __future__ import annotations

import dataclasses
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from runs import log_of, write_config

from headstart.train import loop
from headstart.train.config import FeaturesConfig
from headstart.train.loop import train

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
STEPS = 8


@pytest.fixture(scope="module")
def options(run_options, tmp_path_factory):
    config = run_options(tmp_path_factory.mktemp("machines") / "alone", STEPS)
    return dataclasses.replace(
        config,
        head={"type": "eagle3", "depth": 2, "feature_layers": [0, -1], "draft_vocab_size": 8},
        loop=dataclasses.replace(
            config.loop, batch_size=8, eval_every=0, save_every=4, timeout=2.0
        ),
    )


@pytest.fixture(scope="module")
def alone(options):
    """The run of one process."""
    return train(options)


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def on_two_machines(configs, file, processes):
    """Launch a config on either machine; return the exit statuses and what the machines said."""
    port = str(free_port())
    machines = []
    for rank, config in enumerate(configs):
        path = write_config(config, Path(config.output).with_suffix(f".{rank}.yaml"))
        command = [
            sys.executable,
            "-m",
            "headstart.scripts.launch",
            "--config_file",
            f"configs/accelerate/{file}.yaml",
        ]
        command += ["--machine_rank", str(rank), "--num_processes", str(processes)]
        command += ["--main_process_ip", "127.0.0.1", "--main_process_port", port]
        machines.append(
            subprocess.Popen(
                [*command, "scripts/train.py", "--config", path],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        said = [machine.communicate(timeout=240)[0] for machine in machines]
    finally:
        for machine in machines:
            machine.kill()
    return [machine.returncode for machine in machines], said


def losses(folder):
    return [[*row["loss"], row["gradient_norm"]] for row in log_of(folder) if "loss" in row]


NEEDS_COMPILER = pytest.mark.skipif(
    shutil.which("g++") is None, reason="DeepSpeed compiles its exchange for CPUs"
)


@pytest.mark.parametrize(
    ("file", "processes", "placement"),
    [
        pytest.param("two-nodes", 2, "whole", id="DDP"),
        pytest.param(
            "two-nodes-zero2", 2, "whole", id="ZeRO-2", marks=[NEEDS_COMPILER, pytest.mark.slow]
        ),
        pytest.param("two-nodes-fsdp2", 4, "shard", id="FSDP2 within a machine"),
    ],
)
def test_two_machines_have_the_losses_of_one_process(
    options, alone, tmp_path, file, processes, placement
):
    config = dataclasses.replace(options, output=str(tmp_path / "run"), target_placement=placement)
    status, said = on_two_machines([config, config], file, processes)
    assert status == [0, 0], "\n".join(each[-3000:] for each in said)
    ours, theirs = losses(config.output), losses(alone)
    assert len(ours) == len(theirs) == STEPS
    for own, other in zip(ours, theirs, strict=True):
        assert own == pytest.approx(other, rel=1e-4)


def test_a_folder_that_the_machines_do_not_share_is_refused_at_the_start(
    options, tmp_path, monkeypatch
):
    configs = []
    for machine in ("a", "b"):
        features = FeaturesConfig(mode="cached", folder=str(tmp_path / machine / "states"))
        configs.append(
            dataclasses.replace(options, output=str(tmp_path / "run"), features=features)
        )
    status, said = on_two_machines(configs, "two-nodes", 2)
    assert status == [2, 2]
    words = (
        "error: features.folder must be a folder that all machines share: process 1 on"
        f" {socket.gethostname()} ({tmp_path / 'b' / 'states'})"
    )
    assert all(words in each and "Traceback" not in each for each in said), said
    assert not list(tmp_path.rglob(".seen-by-all-*")) and not list(tmp_path.rglob("config.yaml"))
    # The run's own folder is looked at in the same way.
    looked_at = []
    monkeypatch.setattr(
        loop, "require_shared", lambda _, folder, option: looked_at.append((str(folder), option))
    )
    config = dataclasses.replace(configs[0], loop=dataclasses.replace(options.loop, max_steps=1))
    train(config)
    assert looked_at == [
        (config.output, "output"),
        (config.features.folder, "features.folder"),
    ]


def test_the_job_script_starts_the_machines_with_what_they_need(tmp_path):
    """With a scheduler of two lines."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    fakes = {
        "scontrol": "printf 'node7\\nnode8\\n'",
        "srun": 'shift; for id in 0 1; do SLURM_NODEID=$id "$@"; done',
        "python": 'echo "$@"',
    }
    for name, body in fakes.items():
        path = bin_folder / name
        path.write_text(f"#!/usr/bin/env bash\n{body}\n")
        path.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{bin_folder}:{os.environ['PATH']}",
        "PYTHON": "python",
        "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_NNODES": "2",
    }
    script = ROOT / "examples" / "slurm" / "train.sbatch"
    done = subprocess.run(
        ["bash", str(script), "--config", "a b.yaml"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    common = (
        "-m headstart.scripts.launch --config_file configs/accelerate/two-nodes-fsdp2.yaml"
        " --num_machines 2"
    )
    ends = (
        "--num_processes 16 --main_process_ip node7 --main_process_port 29500 --machine_rank {}"
        " scripts/train.py"
    )
    lines = done.stdout.splitlines()
    assert lines == [f"{common} {ends.format(rank)} --config a b.yaml" for rank in (0, 1)]
    assert (ROOT / "configs" / "accelerate" / "two-nodes-fsdp2.yaml").is_file()
