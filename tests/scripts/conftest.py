"""A head that several commands are given, and the metrics that they serve."""

from __future__ import annotations

import re
import urllib.request

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


@pytest.fixture
def generations():
    """The generations that are counted at the address which a command printed, by drafter."""

    def read(printed):
        (url,) = re.findall(r"metrics: (\S+)", printed)
        with urllib.request.urlopen(url) as response:
            text = response.read().decode()
        counted = re.findall(r'^headstart_generations_total{drafter="(.*?)",.*} (.*)$', text, re.M)
        return {drafter: float(count) for drafter, count in counted}

    return read
