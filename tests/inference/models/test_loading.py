"""Where a target's files came from is remembered: the commit of a Hub id, whatever the config says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import build_model
from loopback_hub import Hub

from headstart.inference import Target
from headstart.inference.models.loading import downloaded_commit

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


def test_the_revision_of_a_target_is_the_commit_that_was_downloaded(
    repository: tuple[Path, str], tmp_path: Path
) -> None:
    folder, commit = repository
    for revision in (None, "main", commit):
        target = Target.from_pretrained("me/model", torch.float32, "cpu", revision)
        assert target.provenance["revision"] == commit
    assert Target.from_pretrained(folder, torch.float32, "cpu").provenance["revision"] is None
    elsewhere = tmp_path / "snapshots" / "cache"
    target = Target.from_pretrained("me/model", torch.float32, "cpu", cache_dir=str(elsewhere))
    assert target.provenance["revision"] == commit


def test_what_is_not_in_the_cache_has_no_commit(hub: Hub) -> None:
    assert downloaded_commit("me/other") is None
