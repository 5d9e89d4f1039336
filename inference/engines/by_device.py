"""The choice of an engine."""

from __future__ import annotations

from ..targets.target_model import TargetModel
from . import cuda_graph
from .base import Engine
from .cpu import cpu_engine
from .cuda_graph import GraphRunner
from .eager import EagerEngine


def chosen_engine(target: TargetModel, mode: bool, eager: type[EagerEngine], packed: type[EagerEngine]) -> Engine:
    """The engine for a target on its device.

    Args:
        target: the target, whose weights are read where they lie, or copied.
        mode: False for forwards as they are. True for our kernels on a CPU, and for CUDA graphs on a GPU, which are
            recorded within the first rounds; other accelerators run forwards as they are.
        eager: the class for forwards as they are.
        packed: the class for forwards with linear layers in our CPU kernels.
    """
    engine = _chosen(target, mode, eager, packed)
    engine.mode = mode
    return engine


def _chosen(target: TargetModel, mode: bool, eager: type[EagerEngine], packed: type[EagerEngine]) -> Engine:
    if not mode:
        return eager(target)
    if target.device.type == "cpu":
        return cpu_engine(target, eager, packed)
    runner = GraphRunner(target.device) if cuda_graph.records(target.device) else None
    return eager(target, runner)
