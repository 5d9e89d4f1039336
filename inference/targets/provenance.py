"""Provenance of a figure: package versions, hardware, git revision."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from ..tuning import machine
from .loading import default_device

PACKAGES = ("headstart", "torch", "transformers", "accelerate", "datasets", "safetensors")
"""Packages whose versions are saved with every result."""


def provenance() -> dict[str, Any]:
    """Return package versions, the hardware, and the git revision of a checkout.

    The hardware is the processor or GPU with its threads.
    """
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        # None for a package that is not installed.
        distributions = importlib.metadata.distributions(name=name)
        versions[name] = next((installed.version for installed in distributions), None)
    # An installed package, not a checkout, has no revision.
    command = ["git", "-C", str(Path(__file__).resolve().parent), "rev-parse", "HEAD"]
    try:
        revision = subprocess.run(
            command, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        revision = None
    return {"versions": versions, "hardware": hardware(), "git_revision": revision}


def hardware() -> str:
    """Return the name of the first GPU, or of the processor.

    With the processor come the instruction set that torch uses, and torch's threads.
    """
    return machine.hardware(torch.device(default_device()))
