"""Chunk sizes for the largest tensors of a training step, from the device's memory.

Logits [positions, V] and attention scores [heads, queries, keys] would not fit as a whole; chunk by
chunk only a part of each exists at a time. On an accelerator every chunk costs launches and a pass
over the LM head's gradient, so it should be as large as memory allows; on a CPU it should fit the
caches.
"""

from __future__ import annotations

from functools import lru_cache

import torch

VOCABULARY_ON_CPU = 2**23
"""Elements of a [positions, vocabulary] chunk on a CPU: 32 MiB in float32."""
SCORES_ON_CPU = 2**22
"""Elements of a chunk of attention scores on a CPU, where no fused kernel is used."""
SHARE = 1 / 32
"""Part of an accelerator's free memory for one such tensor in float32: about five are alive at
once, and gradients and optimizer states are still to come when the first chunk is computed."""
LARGEST = 2**28
"""Elements of a chunk at most, 1 GiB in float32: beyond a thousand positions a chunk is no
faster."""


def chunk_elements(device: torch.device, on_cpu: int) -> int:
    """Return the elements of the largest tensor that a training step allocates at once.

    This is `on_cpu` on a CPU, and that or more on an accelerator. There it is a power of two, so
    that a run that resumes with slightly more or less free memory still rounds as before, and the
    largest chunk if the accelerator is absent and a run is only planned for it.
    """
    if device.type != "cuda":
        return on_cpu
    if not torch.cuda.is_available():
        return LARGEST
    wanted = int(SHARE * free_bytes(device) / 4)  # 4 bytes of float32
    # The largest power of two up to `wanted`: 1000 gives 512.
    return max(on_cpu, min(LARGEST, 1 << max(0, wanted.bit_length() - 1)))


@lru_cache(maxsize=8)
def free_bytes(device: torch.device) -> int:
    """Free bytes, and those that torch reserved and does not use.

    Read once: chunks of one size from the first step to the last are summed in the same order.
    """
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
