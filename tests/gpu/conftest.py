"""Decoding and training on an accelerator: HEADSTART_TEST_DEVICE is "sim", or "cuda" (`make
test-gpu`).

The simulated device changes the process that registers it, so these tests run in a process of their
own.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from helpers import DEVICE, VOCAB, build_model

from headstart.inference import Target

if DEVICE == "sim":
    import simulated  # registers the device

    from headstart.heads.layers import tree_slots
    from headstart.inference.engines import cuda_graph

    cuda_graph.GRAPHS["sim"] = simulated.SimGraph
    # by the reference of the kernel
    tree_slots.KERNEL_DTYPES["sim"] = (torch.float32, torch.float64)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return True if not DEVICE and collection_path.name.startswith("test_") else None


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device(DEVICE, 0)


@pytest.fixture(scope="session")
def on_cpu() -> Target:
    """A tiny target in float64, whose rows never end by themselves."""
    return Target(build_model(vocab_size=VOCAB, layers=8).requires_grad_(False))


@pytest.fixture(scope="session")
def there(on_cpu, device) -> Target:
    """The same one on the accelerator."""
    return Target(copy.deepcopy(on_cpu.model).to(device))
