"""`headstart adapt`: a head learns from recorded answers, and a worse one is never taken."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest
import torch

from headstart.files import recorded_files
from headstart.heads import CheckpointMetadata, build_head
from headstart.heads.checkpoints.save_load import load_head, save_head
from headstart.inference import SpeculativeLM, Target, load_tokenizer
from headstart.inference.recorded_folder import recorded_row
from headstart.scripts.__main__ import COMMANDS
from headstart.stopping import Stopped
from headstart.train import adapting
from headstart.train.adapting import adapt
from headstart.train.config import AdaptConfig

NEW_TOKENS = 12


@pytest.fixture(scope="module")
def begun(taught, tmp_path_factory):
    """A target, an untrained head, and recorded answers of two kinds; the newest are to other prompts."""
    folder = tmp_path_factory.mktemp("adapting")
    tokenizer = load_tokenizer(taught)
    target = Target.from_pretrained(str(taught), torch.float32)
    torch.manual_seed(0)
    head = build_head("medusa", {"num_heads": 2}, target.info)
    head.initialize(target.modules, torch.ones(target.info.vocab_size, dtype=torch.int64))
    save_head(head, folder / "head", CheckpointMetadata())
    lm = SpeculativeLM.from_pretrained(target, head, tree="chain:2", fallback=False)
    settings = {"do_sample": False, "eos_token_id": [], "pad_token_id": 0, "max_new_tokens": NEW_TOKENS}
    for name, words in (("recorded", ("count to", "say")), ("older", ("tell",))):
        with lm.record(folder / name, format="float32", tokenizer=tokenizer) as running:
            for number in range(16):
                kind = words[number % len(words)]
                ids = tokenizer(f"{kind} {number % 7 + 3} {'please' * (number // 7)}", return_tensors="pt").input_ids
                lm.generate(ids, kind=kind, **settings)
        assert running.written == 16
    return folder


@pytest.fixture
def config(begun, taught, tmp_path):
    return AdaptConfig(
        target=str(taught),
        head=str(begun / "head"),
        recorded=str(begun / "recorded"),
        output=str(tmp_path / "new"),
        steps=30,
        batch_size=4,
        lr=1e-2,
        held_out=0.35,
        new_tokens=NEW_TOKENS,
    )


def test_a_head_that_drafts_better_on_newer_answers_is_taken(config, begun, tmp_path, monkeypatch):
    config = dataclasses.replace(config, replay=str(begun / "older"), replay_share=0.4)
    with monkeypatch.context() as patch:
        patch.setattr(Target, "load", None)
        folder = adapt(config)
    assert folder == tmp_path / "new" / "best"
    report = (tmp_path / "new" / "report.md").read_text()
    assert f"Taken: {folder}" in report
    rows = [line.split(" | ") for line in report.splitlines() if line.startswith("| ")][1:]
    assert [row[0] for row in rows] == ["| all", "| count to", "| say"]
    assert float(rows[0][3]) > float(rows[0][2])
    metadata = load_head(folder)[1]
    assert metadata.training["config"]["init_from"] == config.head
    names = {}
    for name in ("training", "judged", "replay"):
        lines = (tmp_path / "new" / "recorded" / f"{name}.jsonl").read_text().splitlines()
        names[name] = [json.loads(line) for line in lines]
    newest = json.dumps(names["judged"][-1]["input_ids"])
    paths = recorded_files(begun / "recorded")
    assert newest == json.dumps(recorded_row(paths[-1])["input_ids"])
    assert len(names["judged"]) == 6 and len(names["replay"]) == 16
    again = adapt(config)
    assert again == folder, "what is finished is found"
    with pytest.raises(ValueError, match=r"new was begun with recorded = '.*recorded', not '.*older'; continue with"):
        adapt(dataclasses.replace(config, recorded=str(begun / "older")))


def test_the_recorded_target_may_be_named_otherwise(config, taught, tmp_path):
    """Such as a policy that was trained in memory, under its first name, and saved for `adapt`."""
    saved = tmp_path / "saved policy"
    shutil.copytree(taught, saved)
    adapt(dataclasses.replace(config, target=str(saved), steps=2))
    assert (tmp_path / "new" / "report.md").exists()


def test_a_head_that_is_not_better_is_not_taken_and_says_so(config, tmp_path, monkeypatch):
    same = dataclasses.replace(config, steps=1, lr=1e-12)
    assert adapt(same) is None
    report = (tmp_path / "new" / "report.md").read_text()
    assert "Not taken: the difference, +0.00 to +0.00, does not exclude that nothing is gained" in report
    assert not (tmp_path / "new" / "best").exists()


def test_a_head_that_accepts_less_is_not_taken(config, begun, taught, tmp_path, monkeypatch):
    """The trained head is made worse before it is judged."""
    good = tmp_path / "good"
    assert adapt(dataclasses.replace(config, replay=str(begun / "older"), steps=60, output=str(good))) is not None
    given = dataclasses.replace(config, head=str(good / "best"))
    spoiled = begun / "head"
    monkeypatch.setattr(adapting, "train", lambda run: shutil.copytree(spoiled, tmp_path / "run" / "best").parent)
    assert adapt(given) is None
    assert "Not taken: the new head accepts less. Stay with" in (tmp_path / "new" / "report.md").read_text()


def test_too_few_answers_and_other_folders_are_refused(config, begun, tmp_path):
    with pytest.raises(ValueError, match=r"no recorded answers in '.*nothing'; `headstart chat --record FOLDER`"):
        adapt(dataclasses.replace(config, recorded=str(tmp_path / "nothing")))
    few = tmp_path / "few"
    shutil.copytree(begun / "recorded", few)
    for path in recorded_files(few)[:-5]:
        path.unlink()
    with pytest.raises(ValueError, match="holds 5 different answers; a head is adapted from 8 or more"):
        adapt(dataclasses.replace(config, recorded=str(few), output=str(tmp_path / "2")))
    manifest = json.loads((few / "manifest.json").read_text())
    (few / "manifest.json").write_text(json.dumps({**manifest, "tokenizer": "another"}))
    with pytest.raises(ValueError, match=r"holds states with tokenizer = 'another', and .* replay a recording of the"):
        adapt(dataclasses.replace(config, replay=str(few), output=str(tmp_path / "3")))
    with pytest.raises(ValueError, match=r"held_out is a share between 0 and 1, not 1\.5"):
        dataclasses.replace(config, held_out=1.5)
    assert "adapt" in COMMANDS


def test_a_stopped_run_resumes_although_its_answers_have_given_way(config, begun, tmp_path, monkeypatch, stop_after):
    copied = tmp_path / "copied"
    shutil.copytree(begun / "recorded", copied)
    config = dataclasses.replace(config, recorded=str(copied), steps=12)
    with monkeypatch.context() as patch:
        stop_after(patch, 5)
        with pytest.raises(Stopped, match="stopped at step 5 of 12"):
            adapt(config)
    for path in recorded_files(copied):
        path.unlink()
    adapt(config)
    assert (tmp_path / "new" / "report.md").exists()
