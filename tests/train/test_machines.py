"""Two machines, played by two launchers on this one: the same losses, and folders that they do not
share."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import calls_of
from messages import lacking
from runs import assert_same_curve, changed, write_config

from headstart.train import loop
from headstart.train.config import FeaturesConfig
from headstart.train.loop import train

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
STEPS = 8


@pytest.fixture(scope="module")
def eight_steps(run_options, tmp_path_factory):
    return changed(
        run_options(tmp_path_factory.mktemp("machines") / "one-process", STEPS),
        head={"type": "eagle3", "depth": 2, "feature_layers": [0, -1], "draft_vocab_size": 8},
        loop={"batch_size": 8, "eval_every": 0, "save_every": 4, "timeout": 2.0},
    )


@pytest.fixture(scope="module")
def one_process(eight_steps):
    return train(eight_steps)


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def on_two_machines(configs, file, processes):
    """Launch a config on either machine; return the exit statuses and what the machines said."""
    launch = [sys.executable, "-m", "headstart.scripts.launch"]
    launch += ["--config_file", f"configs/accelerate/{file}.yaml"]
    launch += ["--num_processes", str(processes), "--main_process_ip", "127.0.0.1"]
    launch += ["--main_process_port", str(free_port())]
    machines = []
    for rank, config in enumerate(configs):
        path = write_config(config, Path(config.output).with_suffix(f".{rank}.yaml"))
        script = ["--machine_rank", str(rank), "scripts/train.py", "--config", path]
        machines.append(
            subprocess.Popen(
                [*launch, *script],
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
    eight_steps, one_process, tmp_path, file, processes, placement
):
    config = changed(eight_steps, output=str(tmp_path / "run"), target_placement=placement)
    status, said = on_two_machines([config, config], file, processes)
    assert status == [0, 0], "\n".join(each[-3000:] for each in said)
    assert_same_curve(config.output, one_process)


def test_a_folder_that_the_machines_do_not_share_is_refused_at_the_start(
    eight_steps, tmp_path, monkeypatch
):
    configs = []
    for machine in ("a", "b"):
        features = FeaturesConfig(mode="cached", folder=str(tmp_path / machine / "states"))
        configs.append(changed(eight_steps, output=str(tmp_path / "run"), features=features))
    status, said = on_two_machines(configs, "two-nodes", 2)
    assert status == [2, 2]
    words = f"error: features.folder 1 {socket.gethostname()} {tmp_path / 'b' / 'states'}"
    for each in said:
        assert not lacking(each, words) and "Traceback" not in each
    assert not list(tmp_path.rglob(".seen-by-all-*")) and not list(tmp_path.rglob("config.yaml"))
    # The run's own folder is looked at in the same way.
    looked_at = calls_of(monkeypatch, loop, "require_shared")
    config = changed(configs[0], loop={"max_steps": 1})
    train(config)
    assert [(str(folder), option) for _, folder, option in looked_at] == [
        (config.output, "output"),
        (config.features.folder, "features.folder"),
    ]


def test_the_job_script_starts_the_machines_with_what_they_need(tmp_path):
    """With a scheduler of two lines."""
    fakes = {
        "scontrol": "printf 'node7\\nnode8\\n'",
        "srun": 'shift; for id in 0 1; do SLURM_NODEID=$id "$@"; done',
        "python": 'echo "$@"',
    }
    for name, body in fakes.items():
        path = tmp_path / name
        path.write_text(f"#!/usr/bin/env bash\n{body}\n")
        path.chmod(0o755)
    nodes = {"SLURM_JOB_NODELIST": "node[7-8]", "SLURM_NNODES": "2"}
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": "python"}
    done = subprocess.run(
        ["bash", str(ROOT / "examples" / "slurm" / "train.sbatch"), "--config", "a b.yaml"],
        env={**os.environ, **nodes, **path},
        capture_output=True,
        text=True,
        check=True,
    )
    file = "configs/accelerate/two-nodes-fsdp2.yaml"
    launch = f"-m headstart.scripts.launch --config_file {file} --num_machines 2"
    launch += " --num_processes 16 --main_process_ip node7 --main_process_port 29500"
    assert done.stdout.splitlines() == [
        f"{launch} --machine_rank {rank} scripts/train.py --config a b.yaml" for rank in (0, 1)
    ]
    assert (ROOT / file).is_file()
