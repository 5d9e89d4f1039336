"""Where the tests of this room run, and a tiny target there."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from accelerator_helpers import DEVICE, VOCAB

from headstart.inference import Target


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return True if not DEVICE and collection_path.name.startswith("test_") else None


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device(DEVICE, 0)


@pytest.fixture(scope="session")
def on_cpu() -> Target:
    """A tiny target in float64, whose rows never end by themselves."""
    from conftest import build_model

    return Target(build_model(vocab_size=VOCAB, layers=8).requires_grad_(False))


@pytest.fixture(scope="session")
def there(on_cpu, device) -> Target:
    """The same one on the accelerator."""
    return Target(copy.deepcopy(on_cpu.model).to(device))
