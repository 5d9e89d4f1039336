"""Chunk sizes: today's constants on a CPU, a share of the free memory on an accelerator."""

from __future__ import annotations

import pytest
import torch

from headstart.heads.layers import chunk_size
from headstart.heads.layers.chunk_size import LARGEST, SHARE, chunk_elements
from headstart.heads.losses import FEWEST, positions_at_once

CUDA = torch.device("cuda")


@pytest.fixture
def free(monkeypatch):
    """An accelerator with so many bytes free."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return lambda size: monkeypatch.setattr(chunk_size, "free_bytes", lambda device: size)


@pytest.mark.parametrize("gigabytes", [2, 8, 24, 60, 140])
def test_an_accelerator_gives_a_share_of_what_is_free(free, gigabytes):
    free(gigabytes * 10**9)
    found = chunk_elements(CUDA, 2**22)
    wanted = SHARE * gigabytes * 10**9 / 4
    assert found == LARGEST or wanted / 2 < found <= wanted
    assert found.bit_count() == 1, (
        "a power of two, so that slightly more free memory changes nothing"
    )


def test_a_cpu_and_a_full_accelerator_keep_the_constants_and_an_absent_one_is_the_largest(
    free, monkeypatch
):
    assert chunk_elements(torch.device("cpu"), 2**22) == 2**22
    free(0)
    assert chunk_elements(CUDA, 2**22) == 2**22
    assert positions_at_once(CUDA, 128_256) == 65 and positions_at_once(CUDA, 2**24) == FEWEST
    free(60 * 10**9)
    assert positions_at_once(CUDA, 128_256) > 1000
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert chunk_elements(CUDA, 2**22) == LARGEST  # a plan for it
