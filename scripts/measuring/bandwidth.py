"""Lower bounds of a round: the target's bare forward, and reading its bytes from memory."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import Tensor

from headstart.inference import SpeculativeLM, Stats, Target
from headstart.inference.drafters.costs import forward_seconds
from headstart.inference.tuning.machine import seconds_in_turns

READ_BYTES = {"cuda": 2**31, "cpu": 2**28}
"""Bytes that are read to measure a device's bandwidth: far more than its caches hold."""
REPEATS = 15


def now(device: torch.device) -> float:
    """Clock in seconds, once the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def memory_bandwidth(device: torch.device) -> float:
    """Bytes per second that a sum over a large tensor reads."""
    read = torch.zeros(READ_BYTES.get(device.type, 2**28) // 4, dtype=torch.float32, device=device)
    taken = seconds_in_turns({"sum": lambda: read.sum().item()}, REPEATS)["sum"]
    return read.numel() * 4 / statistics.median(taken)


def weight_bytes(target: Target) -> int:
    """Bytes of weights that a step reads: all but an embedding that is not also the LM head."""
    embedding = target.model.get_input_embeddings().weight
    every = sum(weight.numel() * weight.element_size() for weight in target.model.parameters())
    return (
        every
        if embedding is target.modules.lm_head.weight
        else every - embedding.numel() * embedding.element_size()
    )


@torch.inference_mode()
def profile(lm: SpeculativeLM, stats: Stats, text_1T: Tensor) -> dict[str, Any]:
    """Return the milliseconds of a round's parts, next to the round's two lower bounds.

    The batch size is 1; the lower bounds hold after `text_1T`.
    """
    target = lm.target
    nodes = lm.drafter.max_nodes
    parts = {part: 1000 * seconds for part, seconds in stats.round_parts.items()}
    forward = 1000 * forward_seconds(target, text_1T, [nodes], lm.drafter.feature_layers)[nodes]
    bandwidth = memory_bandwidth(target.device)
    read = weight_bytes(target) + target.cache_bytes(1, text_1T.shape[1])
    whole = sum(parts.values())
    return {
        "nodes": nodes,
        "milliseconds": parts,
        "round": whole,
        "floors": {"forward": forward, "bytes": 1000 * read / bandwidth},
        "of_the_round": {"forward": forward / whole, "bytes": 1000 * read / bandwidth / whole},
        "bytes_read": read,
        "bytes_per_second": bandwidth,
    }
