"""Where a result comes from: versions, hardware, and the revision of the code."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from ..inference.models.loading import default_device
from ..inference.tuning import machine

PACKAGES = ("headstart", "torch", "transformers", "accelerate", "datasets", "safetensors")


def provenance() -> dict[str, Any]:
    """Package versions, processor or GPU, threads, and the git revision if the code lies in a checkout."""
    return {
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "hardware": hardware(),
        "git_revision": _git_revision(),
    }


def hardware() -> str:
    """The first GPU's name; or the processor's, its instruction set as torch uses it, and torch's threads."""
    return machine.hardware(torch.device(default_device()))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_revision() -> str | None:
    command = ["git", "-C", str(Path(__file__).resolve().parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
