"""Heads that several commands are given."""

from __future__ import annotations

import pytest
from helpers import saved_head

from headstart.heads import CheckpointMetadata
from headstart.inference import Target


@pytest.fixture(scope="session")
def head_folder(target_folder, tmp_path_factory):
    """Heads that start as the target's own LM head, in a chain of three with a sibling."""
    folder = tmp_path_factory.mktemp("head")
    metadata = CheckpointMetadata(tree=[[0], [1], [0, 0], [0, 0, 0]])
    saved_head(folder, Target.from_pretrained(target_folder), metadata=metadata, num_heads=3)
    return folder
