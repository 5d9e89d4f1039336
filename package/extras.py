"""Packages that only some parts of headstart need, and the extra that installs each."""

from __future__ import annotations

import importlib.util
from pathlib import Path

EXTRAS = {
    "accelerate": "train",
    "datasets": "train",
    "matplotlib": "train",
    "peft": "train",
    "pyarrow": "train",
    "jsonargparse": "cli",
    "rich": "cli",
    "yaml": "cli",
    "gguf": "gguf",
    "prometheus_client": "metrics",
    "opentelemetry": "otel",
    "torchao": "int8",
    "wandb": "wandb",
}
"""By import name; the extras are those of pyproject.toml."""


def install_command(extra: str) -> str:
    """The command that installs an extra: from the clone that runs, else by the package's name."""
    clone = Path(__file__).resolve().parent.parent
    is_clone = (clone / "pyproject.toml").is_file()
    return f"pip install '{clone if is_clone else 'headstart'}[{extra}]'"


def missing_extra(package: str, what: str) -> ImportError:
    """Return the error for a missing package: what needs it, and the command that installs it."""
    return ImportError(
        f"{what} needs the package {package!r}, which is not installed; install it with: "
        f"{install_command(EXTRAS[package])}",
        name=package,
    )


def require_extra(package: str, what: str) -> None:
    """Refuse to go on without a package, before a long load fails for the lack of it.

    Raises:
        ImportError: it is not installed.
    """
    if importlib.util.find_spec(package) is None:
        raise missing_extra(package, what)


def named(error: ModuleNotFoundError, what: str) -> ImportError:
    """The error of a failed import, with the extra to install if it is for the lack of one."""
    package = (error.name or "").partition(".")[0]
    return missing_extra(package, what) if package in EXTRAS else error
