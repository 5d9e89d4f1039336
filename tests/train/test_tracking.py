"""What trackers get, read back from their files, and what happens when they fail."""

from __future__ import annotations

import dataclasses
import json
import struct
import sys
from pathlib import Path

import accelerate.tracking
import pytest
import wandb
from accelerate import Accelerator
from accelerate.utils import LoggerType
from messages import refused
from runs import last_weights, log_of, same_tensors
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
def tracked(short, changed):
    """Builds the options of a tracked run with evaluations: `tracked("wandb", project="x")`."""

    def build(tracker, **names):
        config = changed(short, loop={"tracker": tracker, "eval_every": 5})
        return dataclasses.replace(config, tracking=TrackingConfig(**names))

    return build


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
        found = list(records(path))
        (self.run,) = (record.run for record in found if record.WhichOneof("record_type") == "run")
        updates = [
            record.config for record in found if record.WhichOneof("record_type") == "config"
        ]
        self.config = {
            item.key: json.loads(item.value_json) for update in updates for item in update.update
        }
        self.rows = [
            {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            for record in found
            if record.WhichOneof("record_type") == "history"
        ]
        artifacts = [
            record.artifact for record in found if record.WhichOneof("record_type") == "artifact"
        ]
        artifacts += [record.request.log_artifact.artifact for record in found]
        self.heads = [artifact for artifact in artifacts if artifact.type == "model"]
        self.axes = {
            record.metric.glob_name or record.metric.name: record.metric.step_metric
            for record in found
            if record.WhichOneof("record_type") == "metric"
        }
        (exit_,) = (record.exit for record in found if record.WhichOneof("record_type") == "exit")
        self.exit_code = exit_.exit_code


def runs(folder):
    wandb.teardown()  # its service has written everything when it has ended
    return [WandbRun(path) for path in sorted(folder.glob("offline-run-*"))]


def test_wandb_gets_numbers_options_and_the_best_head(tracked, offline, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "of-the-environment")
    monkeypatch.setenv("WANDB_ENTITY", "a-team")
    monkeypatch.setenv("WANDB_RUN_GROUP", "a-group")
    monkeypatch.setenv("WANDB_NAME", "a-name")
    monkeypatch.setenv("WANDB_TAGS", "one,two")
    config = tracked("wandb")
    folder = train(config)
    (found,) = runs(offline)
    assert (found.run.project, found.run.entity, found.run.run_group) == (
        "of-the-environment",
        "a-team",
        "a-group",
    )
    assert found.run.display_name == "a-name" and list(found.run.tags) == ["one", "two"]
    assert (
        found.config["optim"]["lr"] == config.optim.lr
        and found.config["loop"]["precision"] == "float32"
    )
    assert found.axes["*"] == "step" and found.exit_code == 0

    logged = log_of(folder)
    steps = [row for row in found.rows if "train/loss/0" in row]
    assert [row["step"] for row in steps] == list(range(1, 13))
    for row, line in zip(steps, (line for line in logged if "loss" in line)):
        assert [row["train/loss/0"], row["train/loss/1"]] == line["loss"]
        for name in ("target", "head", "optimizer", "data"):
            assert row[f"train/step_seconds/{name}"] == line["step_seconds"][name]
        assert row["epoch"] == line["epoch"] and row["answer_tokens"] == line["answer_tokens"]
        assert row["train/costs/peak_memory_gib_by_process/0"] > 0 and "train/lr" in row

    evaluations = [row for row in found.rows if "eval/loss/0" in row]
    assert [row["step"] for row in evaluations] == [5, 10, 12]
    for row, line in zip(evaluations, (line for line in logged if "eval" in line)):
        assert [row["eval/loss/0"], row["eval/loss/1"]] == line["held_out_loss"]
        assert row["eval/chain/acceptance_length"] == line["eval"]["chain"]["acceptance_length"]
        assert (
            row["eval/chain/acceptance_rate_by_depth/0"]
            == line["eval"]["chain"]["acceptance_rate_by_depth"][0]
        )
        assert 0 <= row["eval/accuracy/0"] <= 1
        assert row["epoch"] > 0 and row["answer_tokens"] > 0

    (artifact,) = found.heads
    assert "best" in artifact.aliases
    assert {"config.json", "model.safetensors", "README.md"} <= {
        entry.path for entry in artifact.manifest.contents
    }


def test_options_come_before_the_environment_and_a_continued_run_keeps_its_id(
    tracked, offline, monkeypatch, stopped_at
):
    monkeypatch.setenv("WANDB_PROJECT", "of-the-environment")
    config = tracked("wandb", project="of-the-options", entity="e", group="g", name="n", tags=["t"])
    stopped_at(3, config)
    train(dataclasses.replace(config, tracking=dataclasses.replace(config.tracking, upload=False)))
    first, second = runs(offline)
    assert (first.run.project, first.run.entity, first.run.run_group) == (
        "of-the-options",
        "e",
        "g",
    )
    assert first.run.display_name == "n" and list(first.run.tags) == ["t"]
    assert first.run.run_id == second.run.run_id and first.run.run_id.startswith("run-")
    assert [row["step"] for row in first.rows + second.rows if "train/lr" in row] == list(
        range(1, 13)
    )
    assert not first.heads  # there is no best head yet
    assert not second.heads  # upload=False


def test_tensorboard_gets_numbers_and_what_a_killed_run_told_twice_once(
    tracked, changed, monkeypatch
):
    config = changed(tracked("tensorboard", project="a-project"), loop={"save_every": 4})

    with monkeypatch.context() as patch:
        original, steps = loop.Trainer.update, []

        def update(trainer):
            lr = original(trainer)
            steps.append(0)
            if len(steps) == 7:
                raise KeyboardInterrupt
            return lr

        patch.setattr(loop.Trainer, "update", update)
        with pytest.raises(KeyboardInterrupt):
            train(config)
    found = EventAccumulator(str(train(config) / "a-project")).Reload()
    names = {"train/loss/0", "eval/loss/1", "eval/static/acceptance_length", "epoch"}
    assert names <= set(found.Tags()["scalars"])
    assert [event.step for event in found.Scalars("train/lr")] == list(range(1, 13))


def test_trackio_gets_numbers_names_and_options(tracked, monkeypatch, tmp_path):
    """The package itself needs other versions than ours: a stand-in with its interface."""
    package = tmp_path / "site" / "trackio"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "calls = []\n"
        "class Run:\n"
        "    def log(self, values, step=None): calls.append((step, values))\n"
        "    def finish(self): calls.append('finished')\n"
        "def init(project, name=None, group=None, resume='never'):\n"
        "    calls.append((project, name, group, resume))\n"
        "    return Run()\n"
        "class config:\n"
        "    update = staticmethod(lambda values, **_: calls.append(values))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    for module in (tracking, accelerate.tracking):
        monkeypatch.setattr(module, "get_available_trackers", lambda: [LoggerType.TRACKIO])
    train(tracked("trackio", project="p", name="n", group="g"))
    calls = sys.modules.pop("trackio").calls
    assert calls[0] == ("p", "n", "g", "allow") and calls[1]["optim.lr"] == 3e-3
    assert [step for step, values in calls[2:-1] if "train/lr" in values] == list(range(1, 13))
    assert calls[-1] == "finished"


# Trackers that fail.


def lost(*given, **more):
    raise ConnectionError("no route to the tracker")


@pytest.mark.parametrize("where", ["init_trackers", "log"])
def test_a_tracker_that_cannot_be_reached_does_not_stop_the_run(
    short, tracked, changed, monkeypatch, capsys, where
):
    plain = last_weights(
        train(changed(short, loop={"eval_every": 5}, output=short.output + "-plain"))
    )
    monkeypatch.setattr(Accelerator, where, lost)
    kept = last_weights(train(tracked("tensorboard")))
    assert same_tensors(kept, plain)
    said = capsys.readouterr().out
    told = (
        "the tracker tensorboard cannot be reached: no route to the tracker. Training continues"
        " without it"
    )
    assert said.count(told) == 1


def test_an_upload_that_fails_ends_nothing(tracked, offline, monkeypatch, capsys):
    monkeypatch.setattr(tracking, "_upload", lost)
    train(tracked("wandb"))
    (found,) = runs(offline)
    assert found.exit_code == 0 and [
        row["step"] for row in found.rows if "train/lr" in row
    ] == list(range(1, 13))
    assert "did not take all that was sent; training continues: no route" in capsys.readouterr().out


def test_a_run_that_fails_is_shown_as_failed(tracked, offline, monkeypatch):
    def broken(*given):
        raise ValueError("no number")

    monkeypatch.setattr(loop.Trainer, "check_finite", broken)
    with pytest.raises(ValueError, match="no number"):
        train(tracked("wandb"))
    (found,) = runs(offline)
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
    def loaded(*given):
        pytest.fail("the target was loaded")

    monkeypatch.setattr(loop, "load_inputs", loaded)
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("NETRC", str(offline / "none"))
    with refused("loop.tracker WANDB_API_KEY WANDB_MODE=offline"):
        train(tracked("wandb"))
    monkeypatch.setattr(tracking, "get_available_trackers", lambda: [])
    with refused("[wandb]'"):
        train(tracked("wandb"))


def test_a_server_of_wandb_that_is_down_ends_no_run(tracked, offline, monkeypatch, capsys):
    for name, value in {
        "MODE": "online",
        "API_KEY": 40 * "0",
        "BASE_URL": "http://127.0.0.1:9",
        "INIT_TIMEOUT": "2",
    }.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    monkeypatch.setenv("NETRC", str(offline / "none"))
    wandb.teardown()
    assert (train(tracked("wandb")) / "last").is_dir()
    said = capsys.readouterr().out
    assert (
        said.count("the tracker wandb cannot be reached") == 1
        and "WANDB_MODE=offline keeps a run" in said
    )


def test_options_that_a_tracker_does_not_know_are_refused(tracked):
    with refused("loop.tracker 'wandbb'"):
        tracked("wandbb")
    with refused("tracking.entity 'me'"):
        tracked("tensorboard", entity="me")
    tracked("none", entity="me")  # switched off


# What is sent.


def test_what_is_not_set_is_not_sent():
    assert flat({"a": {"b": 1.5, "c": None}, "d": [0.5, None]}) == {"a.b": 1.5, "d.0": 0.5}
    tracker, sent = Tracker(Accelerator(), Path("best")), []
    tracker.accelerator.log = lambda values, step: sent.append((values, step))
    tracker._sends = True
    tracker.log({"eval": {"chain": [0.5, float("nan")]}}, 3)
    assert sent == [({"eval/chain/0": 0.5}, 3)]
