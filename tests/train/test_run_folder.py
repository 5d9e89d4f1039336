"""A run's folder belongs to the first options that really trained, not to a typo."""

from __future__ import annotations

import pytest
import yaml
from accelerate import Accelerator

from headstart.heads.checkpoints.files import finish_replacing
from headstart.train.config import DataConfig, SelfMadeConfig, TrainConfig
from headstart.train.data.self_made import make_conversations
from headstart.train.run_folder import RunFolder


def config(target, folder):
    return TrainConfig(target=target, output=str(folder), data=DataConfig(sources=["data.jsonl"]))


def test_options_that_never_trained_do_not_claim_the_folder(tmp_path):
    run = RunFolder(tmp_path / "run", Accelerator())
    run.claim(config("typo", run.folder))
    run.claim(config("right", run.folder))
    assert yaml.safe_load((run.folder / "config.yaml").read_text())["target"] == "right"
    (run.checkpoints / "step-00000001").mkdir(parents=True)
    with pytest.raises(ValueError, match="holds a run with target = 'right', not 'typo'"):
        run.claim(config("typo", run.folder))


def test_options_that_made_no_conversation_do_not_claim_the_file(tmp_path):
    output = str(tmp_path / "made.jsonl")
    for target in ("no/such-model", "no/other-model"):
        with pytest.raises(ValueError, match=f"no tokenizer at '{target}'"):
            make_conversations(SelfMadeConfig(target=target, output=output))


def test_a_log_without_a_checkpoint_starts_anew(tmp_path):
    run = RunFolder(tmp_path / "run", Accelerator())
    run.folder.mkdir()
    run.log({"step": 10})
    assert run.resume("one process").step == 0
    assert (run.folder / "log.jsonl").read_text() == ""


def test_a_folder_that_a_kill_left_half_replaced_comes_back(tmp_path):
    folder = tmp_path / "best"
    folder.mkdir()
    (folder / "file").touch()
    folder.rename(tmp_path / "best.replaced")
    finish_replacing(folder)
    assert (folder / "file").exists()
