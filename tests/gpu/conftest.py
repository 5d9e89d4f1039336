"""Decoding and training on an accelerator: HEADSTART_TEST_DEVICE is "sim", or "cuda" (`make
test-gpu`).

The simulated device changes the process that registers it, so these tests run in a process of their
own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import DEVICE, VOCAB, build_model, head_for

from headstart.heads import DraftHead
from headstart.inference import SpeculativeLM, Target

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
def kept_there(on_cpu, device) -> Target:
    return Target(copy.deepcopy(on_cpu.model).to(device))


@pytest.fixture
def there(kept_there) -> Iterator[Target]:
    """The same one on the accelerator; nothing is recorded yet."""
    kept_there.compile(False)
    yield kept_there
    kept_there.compile(False)


@pytest.fixture
def head_there(on_cpu, device) -> Callable[..., DraftHead]:
    """Builds a head on the accelerator: `head_there(kind)`."""
    return lambda kind: copy.deepcopy(head_for(on_cpu, kind)).to(device)


@pytest.fixture
def lms(on_cpu, there, head_there) -> Callable[..., tuple[SpeculativeLM, SpeculativeLM]]:
    """Builds a decoder on the CPU, operation by operation, and one there, whose rounds are recorded
    or not: `lms(kind, compile=..., tree=...)`."""

    def build(
        kind: str | None = None, compile: bool = True, **options: Any
    ) -> tuple[SpeculativeLM, SpeculativeLM]:
        options = {"adaptive": False, **options}
        head = None if kind is None else head_for(on_cpu, kind)
        away = None if kind is None else head_there(kind)
        return (
            SpeculativeLM.from_pretrained(on_cpu, head, compile=False, **options),
            SpeculativeLM.from_pretrained(there, away, compile=compile, **options),
        )

    return build
