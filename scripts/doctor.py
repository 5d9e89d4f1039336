"""Describe this installation for a bug report: `headstart doctor`.

Versions, processor or GPU, C++ compiler, caches, free disk, and whether the Hub knows you, in one
block to paste. It loads no model and asks no network.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

from headstart.console import console
from headstart.options import CommandOptions
from headstart.scripts.command_line import options


@dataclass(frozen=True)
class DoctorConfig(CommandOptions):
    """No options: everything is shown."""


def main(arguments: list[str]) -> None:
    """Run `headstart doctor` with these command-line arguments."""
    describe(options(DoctorConfig, "doctor", __doc__, arguments))


def describe(config: DoctorConfig) -> None:
    """Print the facts for a bug report."""
    for name, value in installation().items():
        console.print(f"{name + ':':<16}{value}", markup=False, highlight=False, soft_wrap=True)


def installation() -> dict[str, str]:
    """Facts for a bug report, by name."""
    import torch
    from huggingface_hub import constants, get_token

    from headstart.files import cache_folder, free_bytes
    from headstart.inference.engines import cpu_kernels
    from headstart.inference.targets.provenance import provenance
    from headstart.inference.tuning.machine import hardware

    # 1. Versions. torch's own says which build it is: +cpu, +cu130.
    known = provenance()
    found = {name: version for name, version in known["versions"].items() if version is not None}
    versions = found | {"torch": torch.__version__}
    described = {
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "revision": known["git_revision"] or "an installed package",
        "system": f"{platform.platform()}, {platform.machine()}",
    }

    # 2. What computes.
    described["processor"] = hardware(torch.device("cpu"))
    described["memory"] = f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 1e9:.0f} GB"
    described["GPUs"] = "none that torch can use"
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        described["GPUs"] = f"{', '.join(names)}; CUDA {torch.version.cuda}"
    elif torch.backends.mps.is_available():
        described["GPUs"] = "Apple's (MPS)"
    kernels = "built" if cpu_kernels.library() is not None else "not built: see the warning above"
    described["CPU kernels"] = kernels

    # 3. What is kept on disk, and the Hub.
    folders = {"cache": cache_folder(), "Hub's cache": Path(constants.HF_HUB_CACHE)}
    for name, folder in folders.items():
        described[name] = f"{folder}, {free_bytes(folder) / 1e9:.0f} GB free"
    described["Hub"] = (
        "a token is stored" if get_token() else "no token: `hf auth login` stores one"
    )
    if constants.HF_HUB_OFFLINE:
        described["Hub"] += "; offline, by HF_HUB_OFFLINE"
    return described
