"""Size of the chunks in which the largest tensors of a training step are made, from the device's memory.

Scores over the vocabulary, [positions, V], and attention scores, [heads, queries, keys], would not fit as a whole;
chunk by chunk only one piece of each exists at a time. A chunk should be as large as memory allows on an accelerator,
where every chunk costs launches and one pass over the LM head's gradient, and small enough for the caches of a CPU.
"""

from __future__ import annotations

from functools import lru_cache

import torch

VOCABULARY_ON_CPU = 2**23
"""Elements of a [positions, vocabulary] chunk on a CPU: 32 MiB in float32."""
SCORES_ON_CPU = 2**22
"""Elements of a chunk of attention scores where there is no fused kernel, on a CPU."""
SHARE = 1 / 32
"""Part of an accelerator's free memory that one such tensor in float32 may take: about five are alive at once, and
gradients and the optimizer's states are still to come when the first chunk is made."""
LARGEST = 2**28
"""Elements of a chunk at most, 1 GiB in float32: beyond a thousand positions a chunk is no faster."""


def chunk_elements(device: torch.device, on_cpu: int) -> int:
    """Elements of the largest tensor that a training step makes at once on `device`.

    Args:
        device: of the tensor. A device that is not there, for which a run is planned, is taken to have much memory.
        on_cpu: what is made at once on a CPU, and at least elsewhere.
    """
    if device.type != "cuda":
        return on_cpu
    if not torch.cuda.is_available():
        return LARGEST
    return max(on_cpu, elements_of(_free_bytes(device)))


def elements_of(free: float) -> int:
    """Elements of a chunk on an accelerator with so many bytes free.

    A power of two, so that a run that is resumed beside slightly more or less free memory still rounds as before.
    """
    wanted = int(SHARE * free / 4)
    return min(LARGEST, 1 << max(0, wanted.bit_length() - 1))


@lru_cache(maxsize=8)
def _free_bytes(device: torch.device) -> int:
    """Bytes that tensors could take when first asked: free, or reserved by torch and unused.

    Asked once: chunks of one size from the first step to the last add up in the same order.
    """
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
