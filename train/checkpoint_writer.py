"""Checkpoints to resume from: each process's part, and the agreement that all parts are written.

A thread may write a copy of the state in host memory while training goes on. It exchanges errors
with the threads of other processes in a process group of its own, since exchanges of training steps
would mix with them. Files have the names and contents that accelerate's `load_state` reads.

`torch.distributed.checkpoint` writes the shards of FSDP2, and nothing else. Its `async_save` was
compared for whole checkpoints: one process resumed exactly, and other numbers of processes read
what two wrote. But objects under one name are stored once, so that of two processes the first
resumed with the random state of the second. And a save that is killed leaves a folder without an
index, which raises when it is read, where a rename would have left the older checkpoint the newest.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import (
    OPTIMIZER_NAME,
    RNG_STATE_NAME,
    SAFE_WEIGHTS_NAME,
    clean_state_dict_for_safetensors,
    patch_environment,
)
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.optim import Optimizer

from .lost_processes import of_other_processes
from .machines import GROUPS

INDEX_FILE = ".metadata"
"""The index of a folder of shards, a pickle."""
IN_INDEX = {
    "pathlib": ("PosixPath",),
    "torch": ("Size", *(name for name, value in vars(torch).items() if type(value) is torch.dtype)),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.serialization": ("_get_layout",),
}
"""What an index may name, by module."""


class IndexReader(pickle.Unpickler):
    """Reads the index of shards, and nothing that torch does not write there."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in IN_INDEX.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no index needs")
        return super().find_class(module, name)


@dataclass
class Sharded:
    """Weights and optimizer of an FSDP2 module for checkpoints, by torch.distributed.checkpoint.

    Every process writes and reads its own shards, in the folder FOLDER of a checkpoint; nothing is
    gathered, and another number of processes reads what it needs of them.
    """

    FOLDER = "sharded"

    module: nn.Module
    optimizer: Optimizer

    def load(self, models: Any, folder: str) -> None:
        """Read the shards; accelerate calls it as a hook of `load_state`."""
        # Pickles run code: nothing but what torch writes may stand in the index and the shards.
        shards = Path(folder) / self.FOLDER
        with (shards / INDEX_FILE).open("rb") as index:
            IndexReader(index).load()
        # The states tell the loader which part of each tensor this process needs.
        states = self.states()
        with patch_environment(TORCH_FORCE_WEIGHTS_ONLY_LOAD="1"):
            load_shards(states, checkpoint_id=shards)
        set_state_dict(
            self.module,
            self.optimizer,
            model_state_dict=states["weights"],
            optim_state_dict=states["optimizer"],
        )

    def states(self) -> dict[str, Any]:
        """This process's shards, of which the writer of checkpoints makes files."""
        weights, optimizer = get_state_dict(self.module, self.optimizer)
        return {"weights": weights, "optimizer": optimizer}

    def state_dict(self) -> dict[str, Any]:
        """Return nothing, since `states` has the shards; accelerate asks for a state_dict."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load nothing, since `load` has read the shards."""


@dataclass(frozen=True)
class TrainingState:
    """A process's part of a checkpoint; its tensors are those of training, or a copy of them."""

    files: dict[str, Any]
    """Contents by name of the file: weights in .safetensors, other objects by `torch.save`."""
    shards: dict[str, Any]
    """This process's part of what FSDP2 shards, for torch.distributed.checkpoint; empty with other
    engines."""

    @classmethod
    def of(cls, accelerator: Accelerator) -> TrainingState:
        """Collect all that was prepared or registered, as accelerate's `save_state` does.

        Not for DeepSpeed, which writes its own files.
        """
        # Random draws differ by process. All else is the same everywhere, and written once.
        files: dict[str, Any] = {
            f"{RNG_STATE_NAME}_{accelerator.process_index}.pkl": random_states(accelerator.step)
        }
        shards: dict[str, Any] = {}
        for item in accelerator._custom_objects:
            if isinstance(item, Sharded):
                shards = item.states()
        # The names are those that `load_state` looks for. One model and one optimizer are prepared,
        # so that the first of each is all.
        if accelerator.is_main_process:
            for model in accelerator._models:
                weights = accelerator.get_state_dict(model, unwrap=False)
                files[SAFE_WEIGHTS_NAME] = clean_state_dict_for_safetensors(weights)
            for optimizer in accelerator._optimizers:
                files[f"{OPTIMIZER_NAME}.bin"] = optimizer.state_dict()
            for number, item in enumerate(accelerator._custom_objects):
                files[f"custom_checkpoint_{number}.pkl"] = item.state_dict()
        return cls(files, shards)

    def copied(self) -> TrainingState:
        """Copy all tensors to host memory, so that later steps do not change them."""
        stager = BlockingAsyncStager()
        return TrainingState(stager.stage(self.files), stager.stage(self.shards))

    def write(self, folder: Path, group: Any = None) -> None:
        """Write shards, with all processes of the group, and then this process's files.

        Raises:
            OSError, RuntimeError, SafetensorError, CheckpointException: they cannot be written, as
            on a full disk.
        """
        # Shards come first: a process whose files cannot be written would leave the others waiting
        # for it there.
        if self.shards:
            save_shards(self.shards, checkpoint_id=folder / Sharded.FOLDER, process_group=group)
        self.write_files(folder)

    def write_files(self, folder: Path) -> None:
        """Write what is not sharded."""
        for name, content in self.files.items():
            path = folder / name
            if path.suffix == ".safetensors":
                save_file(content, path, metadata={"format": "pt"})
            else:
                torch.save(content, path)


def random_states(step: int) -> dict[str, Any]:
    """Return the states of this process's random generators, and accelerate's step count.

    The keys are accelerate's.
    """
    states = {
        "step": step,
        "random_state": random.getstate(),
        "numpy_random_seed": np.random.get_state(),
        "torch_manual_seed": torch.get_rng_state(),
    }
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        module = torch.get_device_module(accelerator)
        # MPS, for one, has no states of several devices.
        if hasattr(module, "get_rng_state_all"):
            states[f"torch_{accelerator.type}_manual_seed"] = module.get_rng_state_all()
    return states


def writers_group(minutes: float) -> Any:
    """Make the process group in which writers exchange what happened; None for one process.

    All processes call this. `minutes` is how long one waits for the others.
    """
    if not torch.distributed.is_initialized():
        return None
    group = torch.distributed.new_group(backend="gloo", timeout=timedelta(minutes=minutes))
    GROUPS.append(group)
    return group


def together(work: Callable[[], None], group: Any) -> None:
    """Do this process's part of some work, and wait for the others; if one fails, all raise.

    A process may have nothing to do.

    Raises:
        OSError: what could not be written, of the first process that failed.
    """
    cause: BaseException | None = None
    failure: str | None = None
    # 1. Work. An error waits until all have met.
    try:
        work()
    except CheckpointException as error:  # not an Exception but a BaseException
        cause = error
        messages = [str(failed) for failed, _ in error.failures.values()]
        failure = "; ".join(dict.fromkeys(messages))
    # A full disk is an error of one of these kinds: Python's, torch's or safetensors'.
    except (OSError, RuntimeError, SafetensorError) as error:
        # Another process is lost: there is nobody to meet.
        if isinstance(error, RuntimeError) and of_other_processes(error):
            raise
        cause = error
        failure = str(error)

    # 2. Meet. Every process learns what failed on any.
    failures = [failure]
    if group is not None:
        failures = [None] * group.size()
        torch.distributed.all_gather_object(failures, failure, group=group)
        # After it gloo's thread has no Python objects left to free, see `end_together`.
        torch.distributed.barrier(group)

    # 3. The first failure is everyone's. Only where it happened is there a cause.
    for message in failures:
        if message is not None:
            raise OSError(message) from cause
