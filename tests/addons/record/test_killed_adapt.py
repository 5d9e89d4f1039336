"""Adapting a head, killed at any moment: the same command goes on, and the end is the same."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from helpers import saved_head
from messages import refused

from headstart.addons.record import adapt_data
from headstart.addons.record.adapt import adapt, alone_in
from headstart.files import text_shards
from headstart.inference import Target

pytestmark = pytest.mark.long


@pytest.fixture
def better(config, begun):
    """Options with which the new head is better."""
    return replace(config, replay=str(begun / "older"), replay_share=0.4, steps=100)


def killed(job, tmp_path):
    """What the processes of a job ended with."""
    path = tmp_path / "job.json"
    path.write_text(json.dumps({**job, "report": str(tmp_path / "found.json")}))
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    command = [sys.executable, str(Path(__file__).with_name("killed.py")), str(path)]
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return json.loads((tmp_path / "found.json").read_text())


@pytest.mark.parametrize(
    "every", [pytest.param(31, id="some"), pytest.param(1, id="all", marks=pytest.mark.slow)]
)
def test_a_run_that_is_killed_at_any_change_ends_as_one_that_is_not(better, tmp_path, every):
    job = {"config": asdict(better), "every": every}
    whole, *others = killed(job, tmp_path)
    assert len(others) >= 5
    for other in others:
        assert other["files"] == whole["files"], other["point"]


def test_recorded_texts_stay_in_a_folder_that_nobody_else_can_read(config, tmp_path, monkeypatch):
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    output = tmp_path / "new"
    monkeypatch.setenv("HEADSTART_NO_RECORD", "1")
    with refused(f"HEADSTART_NO_RECORD {config.recorded!r}"):
        adapt(config)
    assert not output.exists()
    monkeypatch.setenv("HEADSTART_NO_RECORD", "0")
    umask = os.umask(0)
    try:
        adapt(config)
    finally:
        os.umask(umask)
    assert output.stat().st_mode & 0o077 == 0
    assert [(output / name).stat().st_mode & 0o077 for name in ("recorded", "training")] == [0, 0]
    assert not (tmp_path / "cache" / "data").exists(), (
        "tokenized texts are not left in the cache of all runs"
    )


def test_two_processes_do_not_adapt_in_one_folder(config, tmp_path):
    output = tmp_path / "new"
    output.mkdir()
    with alone_in(output), refused(f"process {str(output)!r}"):
        adapt(config)
    assert sorted(path.name for path in output.iterdir()) in ([], ["adapt.lock"])


def test_a_recording_of_another_target_or_layers_is_refused(
    config, taught, target_folder, tmp_path
):
    with refused(f"{str(target_folder)!r} {str(taught)!r}"):
        adapt(replace(config, target=str(target_folder)))
    target = Target.from_pretrained(str(taught), torch.float32)
    saved_head(tmp_path / "eagle3", target, "eagle3", feature_layers=[0, -1], depth=2)
    with refused("layers [-1] [0, -1]"):
        adapt(replace(config, head=str(tmp_path / "eagle3"), output=str(tmp_path / "3")))


def test_a_disk_that_is_full_leaves_nothing_half_copied(better, tmp_path, monkeypatch):
    """The recording lies on another disk, so that files cannot be linked; the disk is full in the
    third one."""
    made = []

    def link(source, place):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    def full(source, place):
        made.append(place)
        Path(place).write_bytes(Path(source).read_bytes()[: 100 if len(made) == 3 else None])
        if len(made) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(adapt_data.os, "link", link)
    with monkeypatch.context() as patch:
        patch.setattr(adapt_data.shutil, "copyfile", full)
        with pytest.raises(OSError, match="No space left on device"):
            adapt(better)
    states = tmp_path / "new" / "recorded" / "states"
    assert len(text_shards(states)) == len(list(states.iterdir())) == 2
    assert adapt(better) is not None
