"""The choice of an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import cuda_graph
from .base import Engine
from .cpu import cpu_engine
from .cuda_graph import GraphRunner
from .eager import EagerEngine

if TYPE_CHECKING:
    from ..target import Target


def chosen_engine(target: Target, mode: bool | str) -> Engine:
    """The engine for a target on its device.

    Args:
        target: the target, whose weights are read where they lie, or copied.
        mode: False for forwards as they are. "auto" and True for our kernels on a CPU, and for CUDA graphs on a GPU,
            which are recorded within the first rounds; with True the recorded forward has been fused by torch.compile
            before, which takes minutes, and other accelerators run it without graphs.
    """
    if mode is False:
        return target.eager_engine(target)
    if target.device.type == "cpu":
        return cpu_engine(target)
    runner = GraphRunner(target.device) if cuda_graph.records(target.device) else None
    if mode == "auto" or target.eager_engine is not EagerEngine:
        return target.eager_engine(target, runner)
    from .inductor import InductorEngine  # imports torch's compiler

    return InductorEngine(target, runner)


def speeds_up(device_type: str) -> bool:
    """Whether "auto" chooses anything but forwards as they are."""
    return device_type == "cpu" or device_type in cuda_graph.GRAPHS
