"""What trackers get, read back from their files, and what happens when they fail."""

from __future__ import annotations

import json
import struct
import sys
from collections import defaultdict
from pathlib import Path

import accelerate.tracking
import pytest
import wandb
from accelerate import Accelerator
from accelerate.utils import LoggerType
from helpers import calls_of
from messages import lacking, refused
from runs import assert_same_weights, changed, log_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2

from headstart.train import loop, tracking
from headstart.train.config import TrackingConfig
from headstart.train.loop import train
from headstart.train.run_folder import flat
from headstart.train.tracking import Tracker


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """wandb as a machine without network has it; its folder."""
    for name in ("ENTITY", "PROJECT", "NAME", "RUN_GROUP", "TAGS", "RUN_ID", "API_KEY"):
        monkeypatch.delenv(f"WANDB_{name}", raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    wandb.teardown()  # it reads its environment once
    yield tmp_path / "wandb"
    wandb.teardown()


@pytest.fixture
def tracked(short):
    """Builds the options of a tracked run with evaluations: `tracked("wandb", project="x")`."""

    def build(tracker, **names):
        names = TrackingConfig(**names)
        return changed(short, loop={"tracker": tracker, "eval_every": 5}, tracking=names)

    return build


STEPS_1_TO_12 = list(range(1, 13))


def records(path):
    """What a .wandb file holds: LevelDB's log format, blocks of 32 KiB, behind a header of 7
    bytes."""
    data, place, whole = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        size, kind = struct.unpack_from("<HB", data, place + 4)
        whole += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # a whole record, or the end of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


class WandbRun:
    """One start of a run, as its folder holds it."""

    def __init__(self, folder):
        (path,) = folder.glob("*.wandb")
        of_type = defaultdict(list)
        for record in records(path):
            kind = record.WhichOneof("record_type")
            of_type[kind].append(getattr(record, kind))
        (self.run,) = of_type["run"]
        self.config = {
            item.key: json.loads(item.value_json)
            for config in of_type["config"]
            for item in config.update
        }
        self.rows = []
        for history in of_type["history"]:
            names = [item.key or "/".join(item.nested_key) for item in history.item]
            values = [json.loads(item.value_json) for item in history.item]
            self.rows.append(dict(zip(names, values, strict=True)))
        artifacts = of_type["artifact"]
        artifacts += [request.log_artifact.artifact for request in of_type["request"]]
        self.heads = [artifact for artifact in artifacts if artifact.type == "model"]
        self.axes = {
            metric.glob_name or metric.name: metric.step_metric for metric in of_type["metric"]
        }
        (ended,) = of_type["exit"]
        self.exit_code = ended.exit_code

    def names(self):
        """Of project, team, group, the run itself, and its tags."""
        run = self.run
        return [run.project, run.entity, run.run_group, run.display_name, *run.tags]

    def steps(self, name="train/lr"):
        return [row["step"] for row in self.rows if name in row]


def wandb_runs(folder):
    wandb.teardown()  # its service has written everything when it has ended
    return [WandbRun(path) for path in sorted(folder.glob("offline-run-*"))]


def test_wandb_gets_numbers_options_and_the_best_head(tracked, offline, monkeypatch):
    names = {"PROJECT": "p", "ENTITY": "e", "RUN_GROUP": "g", "NAME": "n", "TAGS": "one,two"}
    for name, value in names.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    config = tracked("wandb")
    folder = train(config)
    (found,) = wandb_runs(offline)
    assert found.names() == ["p", "e", "g", "n", "one", "two"]
    assert found.config["optim"]["lr"] == config.optim.lr
    assert found.config["loop"]["precision"] == "float32"
    assert found.axes["*"] == "step" and found.exit_code == 0

    assert found.steps() == STEPS_1_TO_12 and found.steps("eval/loss/0") == [5, 10, 12]
    sent = {("eval/loss/0" in row, row["step"]): row for row in found.rows}
    for line in log_of(folder):
        row = sent["eval" in line, line["step"]]
        assert row["epoch"] > 0 and row["answer_tokens"] > 0
        if "loss" in line:
            assert [row["train/loss/0"], row["train/loss/1"]] == line["loss"]
            assert row["train/step_seconds/target"] == line["step_seconds"]["target"]
            assert (row["epoch"], row["answer_tokens"]) == (line["epoch"], line["answer_tokens"])
            assert row["train/costs/peak_memory_gib_by_process/0"] > 0
        else:
            chain = line["eval"]["chain"]
            assert [row["eval/loss/0"], row["eval/loss/1"]] == line["held_out_loss"]
            assert row["eval/chain/acceptance_length"] == chain["acceptance_length"]
            first = row["eval/chain/acceptance_rate_by_depth/0"]
            assert first == chain["acceptance_rate_by_depth"][0]
            assert 0 <= row["eval/accuracy/0"] <= 1

    (artifact,) = found.heads
    assert "best" in artifact.aliases
    files = {entry.path for entry in artifact.manifest.contents}
    assert {"config.json", "model.safetensors", "README.md"} <= files


def test_options_come_before_the_environment_and_a_continued_run_keeps_its_id(
    tracked, offline, monkeypatch, stopped_at
):
    monkeypatch.setenv("WANDB_PROJECT", "of-the-environment")
    config = tracked("wandb", project="of-the-options", entity="e", group="g", name="n", tags=["t"])
    stopped_at(3, config)
    train(changed(config, tracking={"upload": False}))
    first, second = wandb_runs(offline)
    assert first.names() == ["of-the-options", "e", "g", "n", "t"]
    assert first.run.run_id == second.run.run_id and first.run.run_id.startswith("run-")
    assert first.steps() + second.steps() == STEPS_1_TO_12
    assert not first.heads  # there is no best head yet
    assert not second.heads  # upload=False


def test_tensorboard_gets_numbers_and_what_a_killed_run_told_twice_once(tracked, monkeypatch):
    config = changed(tracked("tensorboard", project="a-project"), loop={"save_every": 4})
    original, steps = loop.Trainer.update, []

    def update(trainer):
        lr = original(trainer)
        steps.append(0)
        if len(steps) == 7:
            raise KeyboardInterrupt
        return lr

    with monkeypatch.context() as patch:
        patch.setattr(loop.Trainer, "update", update)
        with pytest.raises(KeyboardInterrupt):
            train(config)
    found = EventAccumulator(str(train(config) / "a-project")).Reload()
    names = {"train/loss/0", "eval/loss/1", "eval/static/acceptance_length", "epoch"}
    assert names <= set(found.Tags()["scalars"])
    assert [event.step for event in found.Scalars("train/lr")] == STEPS_1_TO_12


TRACKIO = """
calls = []

class Run:
    def log(self, values, step=None):
        calls.append((step, values))

    def finish(self):
        calls.append("finished")

def init(project, name=None, group=None, resume="never"):
    calls.append((project, name, group, resume))
    return Run()

class config:
    update = staticmethod(lambda values, **_: calls.append(values))
"""


def test_trackio_gets_numbers_names_and_options(tracked, monkeypatch, tmp_path):
    """The package itself needs other versions than ours: a stand-in with its interface."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "trackio.py").write_text(TRACKIO)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    for module in (tracking, accelerate.tracking):
        monkeypatch.setattr(module, "get_available_trackers", lambda: [LoggerType.TRACKIO])
    train(tracked("trackio", project="p", name="n", group="g"))
    begun, options, *sent, ended = sys.modules.pop("trackio").calls
    assert begun == ("p", "n", "g", "allow") and options["optim.lr"] == 3e-3
    assert [step for step, values in sent if "train/lr" in values] == STEPS_1_TO_12
    assert ended == "finished"


# Trackers that fail.


def lost(*given, **more):
    raise ConnectionError("no route to the tracker")


@pytest.mark.parametrize("where", ["init_trackers", "log"])
def test_a_tracker_that_cannot_be_reached_does_not_stop_the_run(
    tracked, monkeypatch, capsys, where
):
    untracked = tracked("none")
    plain = train(changed(untracked, output=f"{untracked.output}-plain"))
    monkeypatch.setattr(Accelerator, where, lost)
    assert_same_weights(train(tracked("tensorboard")), plain)
    assert capsys.readouterr().out.count("no route to the tracker") == 1


def test_an_upload_that_fails_ends_nothing(tracked, offline, monkeypatch, capsys):
    monkeypatch.setattr(wandb.Artifact, "add_dir", lost)
    train(tracked("wandb"))
    (found,) = wandb_runs(offline)
    assert found.exit_code == 0 and found.steps() == STEPS_1_TO_12
    assert not lacking(capsys.readouterr().out, "wandb no route")


def test_a_run_that_fails_is_shown_as_failed(tracked, offline, monkeypatch):
    def broken(*given):
        raise ValueError("no number")

    monkeypatch.setattr(loop.Trainer, "check_finite", broken)
    with refused("number"):
        train(tracked("wandb"))
    (found,) = wandb_runs(offline)
    assert found.exit_code == 1
    assert wandb.run is None


@pytest.mark.parametrize(
    "error",
    [
        wandb.errors.AuthenticationError("API key must have 40+ characters, has 5."),
        wandb.errors.CommError("It appears that you do not have permission to access"),
        wandb.errors.CommError("returned error 404: entity nobody not found during upsertBucket"),
    ],
)
def test_a_key_or_an_entity_that_is_refused_ends_the_run_before_its_first_step(
    tracked, offline, monkeypatch, error
):
    def init(*given, **more):
        raise error

    monkeypatch.setattr(wandb, "init", init)
    config = tracked("wandb", entity="nobody")
    with refused("loop.tracker refuses"):
        train(config)
    assert not (Path(config.output) / "log.jsonl").exists()


def test_without_a_key_nothing_is_loaded(tracked, offline, monkeypatch):
    monkeypatch.setattr(loop, "load_inputs", lambda *_: pytest.fail("the target was loaded"))
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("NETRC", str(offline / "none"))
    with refused("loop.tracker WANDB_API_KEY WANDB_MODE=offline"):
        train(tracked("wandb"))
    monkeypatch.setattr(tracking, "get_available_trackers", lambda: [])
    with refused("[wandb]'"):
        train(tracked("wandb"))


def test_a_server_of_wandb_that_is_down_ends_no_run(tracked, offline, monkeypatch, capsys):
    nowhere = {"BASE_URL": "http://127.0.0.1:9", "API_KEY": 40 * "0", "INIT_TIMEOUT": "2"}
    for name, value in {"MODE": "online", **nowhere}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    monkeypatch.setenv("NETRC", str(offline / "none"))
    wandb.teardown()
    assert (train(tracked("wandb")) / "last").is_dir()
    assert capsys.readouterr().out.count("WANDB_MODE=offline") == 1


def test_options_that_a_tracker_does_not_know_are_refused(tracked):
    with refused("loop.tracker 'wandbb'"):
        tracked("wandbb")
    with refused("tracking.entity 'me'"):
        tracked("tensorboard", entity="me")
    tracked("none", entity="me")  # switched off


# What is sent.


def test_what_is_not_set_is_not_sent(tracked, monkeypatch, tmp_path):
    assert flat({"a": {"b": 1.5, "c": None}, "d": [0.5, None]}) == {"a.b": 1.5, "d.0": 0.5}
    sent = calls_of(monkeypatch, Accelerator, "log")
    accelerator = Accelerator(log_with="tensorboard", project_dir=tmp_path)
    with Tracker(accelerator, tmp_path / "best") as tracker:
        tracker.start(tracked("tensorboard"), 0)
        tracker.log({"eval": {"chain": [0.5, float("nan")]}}, 3)
    assert [values for _, values in sent] == [{"eval/chain/0": 0.5}]
