"""The message of a process when another one of its launch has died, or waits elsewhere."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from accelerate import Accelerator

OF_GLOO = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "gloo",
)
"""Words in the RuntimeErrors of gloo; those of NCCL have a class of their own."""
PACKAGES = ("heads", "inference", "train", "scripts")
"""Folders of this project; others beside them, such as an environment's, are not its own."""


@contextmanager
def lost_processes_explained(
    accelerator: Accelerator, newest: Callable[[], Path | None]
) -> Iterator[None]:
    """Explain in one message that another process has died, or did not come to an exchange in time.

    `newest` returns the checkpoint from which the run would resume.

    Raises:
        ConnectionError: with the place where this process waited.
    """
    try:
        yield
    except RuntimeError as error:
        # An error of this process's own is passed on unchanged.
        if accelerator.num_processes == 1 or not of_other_processes(error):
            raise
        raise ConnectionError(
            f"rank {accelerator.process_index} lost contact with another process at"
            f" {own_place(error)}: that process died, or did not respond within loop.timeout"
            f" ({' '.join(str(error).split())[:160]}); the same command resumes from"
            f" {newest() or 'the start: there is no checkpoint yet'}"
        ) from error


def of_other_processes(error: RuntimeError) -> bool:
    """Whether an error of torch's exchange means that another process is gone, or late."""
    return isinstance(error, torch.distributed.DistError) or any(
        words in str(error) for words in OF_GLOO
    )


def own_place(error: BaseException) -> str:
    """Return the innermost line of this project in an error's traceback.

    For example, train/engines.py:216 in any_process.
    """
    root = Path(__file__).resolve().parents[1]
    innermost = "an unknown place"
    # From the outermost frame to the innermost.
    for frame in traceback.extract_tb(error.__traceback__):
        path = Path(frame.filename).resolve()
        if any(path.is_relative_to(root / package) for package in PACKAGES):
            innermost = f"{path.relative_to(root)}:{frame.lineno} in {frame.name}"
    return innermost
