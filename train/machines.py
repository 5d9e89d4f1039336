"""Several machines: which processes share one, and folders that all of them must see."""

from __future__ import annotations

import os
import socket
import time
import uuid
from pathlib import Path
from typing import Any, Literal

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

SECONDS = 20.0
"""Longest time in which a file must appear on another machine; network file systems keep listings
for seconds."""
GROUPS: list[Any] = []
"""Process groups that were joined. DDP drops its own reference while it holds Python's lock: if
that were the last one, it would wait for gloo's thread, which may wait for the lock. `end_together`
drops them without the lock."""


def shard_mesh(accelerator: Accelerator, over: Literal["machine", "all"]) -> DeviceMesh:
    """Return the mesh of processes over which a module is sharded.

    It is sharded within a machine, whose devices exchange weights fast, with a copy on every
    machine (HSDP); or over all processes.
    """
    processes = accelerator.num_processes
    local = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    kind = accelerator.device.type
    if over == "all" or processes % local != 0 or local == processes:
        return init_device_mesh(kind, (processes,), mesh_dim_names=("shard",))
    # Two machines of four processes: a mesh [2, 4], whose rows are machines.
    return init_device_mesh(
        kind, (processes // local, local), mesh_dim_names=("replicate", "shard")
    )


def require_shared(accelerator: Accelerator, folder: Path, option: str) -> None:
    """Refuse a folder that is not the same one on all machines.

    The main process writes a file, which every process must see.

    Raises:
        ValueError: naming the processes that do not see it, their machines, and the option.
    """
    if accelerator.num_processes == 1:
        return
    # 1. The main process writes a file under a name that nothing else has.
    host = socket.gethostname()
    name: list[str] = [f".seen-by-all-{uuid.uuid4().hex}"]
    broadcast_object_list(name)
    path = folder / name[0]
    if accelerator.is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
        path.touch()
    accelerator.wait_for_everyone()

    # 2. Every process waits until it sees the file.
    deadline = time.monotonic() + SECONDS
    seen = path.exists()
    while not seen and time.monotonic() < deadline:
        time.sleep(0.2)
        seen = path.exists()

    # 3. All learn who has seen it.
    everyone: list[tuple[int, str, str, bool]] = gather_object(
        [(accelerator.process_index, host, str(folder), seen)]
    )
    if accelerator.is_main_process:
        path.unlink(missing_ok=True)
    blind = [
        f"process {process} on {machine} ({name_there})"
        for process, machine, name_there, saw in everyone
        if not saw
    ]
    if blind:
        _, main_host, main_place, _ = everyone[0]
        raise ValueError(
            f"{option} must be a folder that all machines share: {', '.join(blind)} did not find"
            f" within {SECONDS:g} s what process 0 on {main_host} wrote to {main_place}"
        )
