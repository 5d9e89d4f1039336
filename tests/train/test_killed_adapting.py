"""Adapting a head, killed at any moment: the same command goes on, and the end is the same."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from recordings import NEW_TOKENS, SETTINGS, record_answers

from headstart.files import recorded_files
from headstart.heads import CheckpointMetadata, build_head
from headstart.heads.checkpoints.save_load import load_head, save_head
from headstart.inference import SpeculativeLM, Target, load_tokenizer
from headstart.train import adapting_data
from headstart.train.adapting import adapt, alone_in
from headstart.train.config import AdaptConfig


@pytest.fixture(scope="module")
def begun(taught, tmp_path_factory):
    return record_answers(taught, tmp_path_factory.mktemp("killed"))


def options(taught, begun, output):
    """Options with which the new head is better."""
    return {
        "target": str(taught),
        "head": str(begun / "head"),
        "recorded": str(begun / "recorded"),
        "output": str(output),
        "replay": str(begun / "older"),
        "replay_share": 0.4,
        "steps": 100,
        "batch_size": 4,
        "lr": 1e-2,
        "held_out": 0.35,
        "new_tokens": NEW_TOKENS,
    }


def killed(job, tmp_path):
    """What the processes of a job ended with."""
    path = tmp_path / "job.json"
    path.write_text(json.dumps({**job, "report": str(tmp_path / "found.json")}))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, str(Path(__file__).with_name("killed.py")), str(path)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-5000:]
    return json.loads((tmp_path / "found.json").read_text())


@pytest.mark.parametrize("every", [pytest.param(31, id="some"), pytest.param(1, id="all", marks=pytest.mark.slow)])
def test_a_run_that_is_killed_at_any_change_ends_as_one_that_is_not(taught, begun, tmp_path, every):
    job = {"config": options(taught, begun, tmp_path / "new"), "every": every}
    whole, *others = killed(job, tmp_path)
    assert len(others) >= 5
    for other in others:
        assert other["files"] == whole["files"], other["point"]


def test_it_learns_in_the_background_is_stopped_goes_on_and_is_taken(taught, begun, tmp_path, steps_logged, wait_for):
    """With the weights that the command ends with in one go."""
    given = options(taught, begun, tmp_path / "at once")
    assert adapt(AdaptConfig(**given)) is not None
    lm = SpeculativeLM.from_pretrained(str(taught), begun / "head", torch.float32, "chain:2", fallback=False)
    more = {name: given[name] for name in given.keys() - {"target", "head", "recorded", "output"}}
    output = tmp_path / "new"

    def begin():
        return lm.adapt_in_background(output, given["recorded"], niceness=0, **more)

    adaptation = begin()
    ids = load_tokenizer(taught)("count to 5 ", return_tensors="pt").input_ids
    before = lm.generate(ids, **SETTINGS)
    wait_for(adaptation._process, lambda: steps_logged(output / "training"), "steps")
    adaptation.stop()
    assert adaptation.state in ("stopped", "taken"), adaptation
    assert steps_logged(output / "training") < 30 or adaptation.state == "taken"
    adaptation = adaptation if adaptation.state == "taken" else begin()
    assert adaptation.wait(200) == "taken", adaptation
    after = lm.generate(ids, **SETTINGS)
    assert torch.equal(after.sequences, before.sequences)
    found, expected = lm._loaded.head.state_dict(), load_head(output / "best")[0].state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    for name in ("best/model.safetensors", "recorded/training.jsonl", "recorded/judged.jsonl"):
        assert (output / name).read_bytes() == (tmp_path / "at once" / name).read_bytes(), name


def test_recorded_texts_stay_in_a_folder_that_nobody_else_can_read(taught, begun, tmp_path, monkeypatch):
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    output = tmp_path / "new"
    config = AdaptConfig(**options(taught, begun, output))
    monkeypatch.setenv("HEADSTART_NO_RECORD", "1")
    with pytest.raises(ValueError, match=r"HEADSTART_NO_RECORD is set, and adapting a head to '.*recorded' would keep"):
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
    assert not (tmp_path / "cache" / "data").exists(), "tokenized texts are not left in the cache of all runs"


def test_two_processes_do_not_adapt_in_one_folder(taught, begun, tmp_path):
    output = tmp_path / "new"
    output.mkdir()
    with (
        alone_in(output),
        pytest.raises(ValueError, match=r"another process adapts a head in '.*new'; wait for its end, or choose"),
    ):
        adapt(AdaptConfig(**options(taught, begun, output)))
    assert sorted(path.name for path in output.iterdir()) in ([], ["adapt.lock"])


def test_a_recording_of_another_target_tokenizer_or_layers_is_refused(taught, target_folder, begun, tmp_path):
    given = options(taught, begun, tmp_path / "1") | {"replay": None}
    with pytest.raises(ValueError, match=r"holds states with (target|weights) = "):
        adapt(AdaptConfig(**given | {"target": str(target_folder)}))
    other = tmp_path / "other tokenizer"
    shutil.copytree(begun / "recorded", other)
    manifest = json.loads((other / "manifest.json").read_text())
    (other / "manifest.json").write_text(json.dumps({**manifest, "tokenizer": "another"}))
    with pytest.raises(ValueError, match="holds states with tokenizer = 'another'"):
        adapt(AdaptConfig(**given | {"recorded": str(other), "output": str(tmp_path / "2")}))
    target = Target.from_pretrained(str(taught), torch.float32)
    head = build_head("eagle3", {"feature_layers": [0, -1], "depth": 2}, target.info)
    head.initialize(target.modules, torch.ones(target.info.vocab_size, dtype=torch.int64))
    save_head(head, tmp_path / "eagle3", CheckpointMetadata())
    with pytest.raises(ValueError, match=r"holds states with layers = \[-1\], not \[0, -1\]"):
        adapt(AdaptConfig(**given | {"head": str(tmp_path / "eagle3"), "output": str(tmp_path / "3")}))
    for number in "123":
        assert not (tmp_path / number / "best").exists()


def test_a_disk_that_is_full_leaves_nothing_half_copied(taught, begun, tmp_path, monkeypatch):
    """The recording lies on another disk, so that files cannot be linked; the disk is full in the third one."""
    given = options(taught, begun, tmp_path / "new")
    made = []

    def link(source, place):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    def full(source, place):
        made.append(place)
        Path(place).write_bytes(Path(source).read_bytes()[: 100 if len(made) == 3 else None])
        if len(made) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(adapting_data.os, "link", link)
    with monkeypatch.context() as patch:
        patch.setattr(adapting_data.shutil, "copyfile", full)
        with pytest.raises(OSError, match="No space left on device"):
            adapt(AdaptConfig(**given))
    states = tmp_path / "new" / "recorded" / "states"
    assert len(recorded_files(states)) == len(list(states.iterdir())) == 2
    assert adapt(AdaptConfig(**given)) is not None


def test_answers_of_one_kind_say_nothing_of_others(taught, begun, tmp_path):
    given = options(taught, begun, tmp_path / "new") | {"recorded": str(begun / "older"), "replay": None, "steps": 1}
    adapt(AdaptConfig(**given))
    page = (tmp_path / "new" / "report.md").read_text()
    assert "All answers are of one kind: what the new head does to others was not measured." in page


PARENT = """
import sys
from headstart.inference import SpeculativeLM
lm = SpeculativeLM.from_pretrained(sys.argv[1], sys.argv[2], "float32", "chain:2", fallback=False)
adaptation = lm.adapt_in_background(sys.argv[4], sys.argv[3], niceness=0, steps=1_000_000, new_tokens=12, held_out=0.35)
print(adaptation._process.pid, flush=True)
adaptation.wait()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_trainer_does_not_outlive_the_program_that_started_it(taught, begun, tmp_path, steps_logged, wait_for):
    """Killed, stopped by SIGTERM, or left by Ctrl-C: whatever is first."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        output = tmp_path / number.name
        given = [taught, begun / "head", begun / "recorded", output]
        command = [sys.executable, "-c", PARENT, *map(str, given)]
        parent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            line = parent.stdout.readline()
            while not line.strip().isdigit():
                assert line, "the program ended early"
                line = parent.stdout.readline()
            stat = Path(f"/proc/{line.strip()}/stat")
            wait_for(parent, partial(steps_logged, output / "training"), "steps")
            parent.send_signal(number)
            parent.wait(60)
        finally:
            parent.kill()
        deadline = time.monotonic() + 60
        while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < deadline, f"it has outlived {number.name}"
            time.sleep(0.05)
        if number != signal.SIGINT:  # whose program waits for no more than seconds
            assert list((output / "training" / "checkpoints").glob("step-*")), "it has saved its state"
