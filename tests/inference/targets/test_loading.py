"""What is loaded: text models and multimodal ones; and where it came from, the commit of a Hub
id."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers import build_model, check_identity
from loopback_hub import Hub
from messages import refused
from tiny_models import tiny_model

from headstart.inference import SpeculativeLM, Target
from headstart.inference.targets.dtypes import fits
from headstart.inference.targets.loading import config_of, downloaded_commit
from headstart.train.config import DataConfig, TrainConfig
from headstart.train.features.placement import empty_model

pytestmark = pytest.mark.versions


@pytest.fixture
def repository(hub: Hub, tmp_path: Path) -> tuple[Path, str]:
    """A tiny model's folder, which the Hub has as me/model, and its commit."""
    folder = tmp_path / "model"
    build_model(40, dtype=torch.float32).save_pretrained(folder)
    commit = "1234567890abcdef1234567890abcdef12345678"
    hub.repos["me/model"] = {path.name: path.read_bytes() for path in folder.iterdir()}
    hub.commits["me/model"] = [commit]
    return folder, commit


def test_the_revision_of_a_target_is_the_commit_that_was_downloaded(repository, tmp_path):
    folder, commit = repository
    for revision in (None, "main", commit):
        target = Target.from_pretrained("me/model", torch.float32, "cpu", revision)
        assert target.provenance["revision"] == commit
    assert Target.from_pretrained(folder, torch.float32, "cpu").provenance["revision"] is None
    elsewhere = tmp_path / "snapshots" / "cache"
    target = Target.from_pretrained("me/model", torch.float32, "cpu", cache_dir=str(elsewhere))
    assert target.provenance["revision"] == commit


def test_what_is_not_in_the_cache_has_no_commit(hub):
    assert downloaded_commit("me/other") is None


@pytest.fixture(scope="module")
def pixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Mistral 3, which transformers' causal mapping does not have."""
    folder = tmp_path_factory.mktemp("pixtral")
    tiny_model("mistral3", 3.0).float().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("dtype", ["auto", "fastest", torch.float64])
def test_a_multimodal_model_loads_by_its_folder_and_decodes_as_a_text_model(pixtral, dtype):
    lm = SpeculativeLM.from_pretrained(
        pixtral, dtype=dtype, device_map="cpu", drafter="prompt-lookup"
    )
    assert type(lm.target.model).__name__ == "Mistral3ForConditionalGeneration"
    prompt = torch.tensor([17, 18, 19, 17, 18, 19, 17])
    check_identity(lm, [prompt], max_new_tokens=12, eos_token_id=[])


def test_a_model_that_is_loaded_without_weights_is_the_multimodal_one_too(pixtral):
    """For the memory plan, and for training with the target in parts."""
    config = TrainConfig(target=str(pixtral), output="out", data=DataConfig(sources=["rows.jsonl"]))
    model = empty_model(config, torch.float32)
    assert type(model).__name__ == "Mistral3ForConditionalGeneration"
    assert fits(config_of(pixtral))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "vit"}, "'vit'"),
        ({"model_type": "frobnicate"}, "`frobnicate`"),
        ({}, "model_type"),
    ],
)
@pytest.mark.parametrize("dtype", ["auto", "fastest", "float64"])
def test_what_is_no_language_model_is_refused_in_one_line(tmp_path, config, words, dtype):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with refused(words, "target") as refusal:
        Target.from_pretrained(tmp_path, dtype=dtype, device_map="cpu")
    assert len(str(refusal.value)) < 600
    assert "\n" not in str(refusal.value)
