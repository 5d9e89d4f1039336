"""The choice of an engine.

    device  compile  engine              its runner   what runs the target's layers
    CPU     True     CpuEngine           Runner       PackedDecoder (C++), for Llama-like layers
    CPU     True     packed ModelEngine  Planless...  the model, its linear layers in our kernels
    CUDA    True     ModelEngine         GraphRunner  FusedDecoder, for Llama-like layers, or the
                                                      model
    any     False    ModelEngine         Planless...  the model

A `Runner` calls functions; a `PlanlessRunner` does so with kernels that start at once for every
shape; a `GraphRunner` records and replays them.

Models whose layers keep a state, that count positions by their cache, or that have an encoder bring
engines of their own in place of `ModelEngine`: see `engines.target`.
"""

from __future__ import annotations

from ..targets.target_model import TargetModel
from . import cuda_graph
from .base import Engine
from .cpu import cpu_engine
from .cuda_graph import GraphRunner
from .model_engine import ModelEngine


def chosen_engine(target: TargetModel, mode: bool, kind: type[ModelEngine]) -> Engine:
    """Choose the engine for a target on its device.

    Args:
        target: the target, whose weights are read where they lie, or copied.
        mode: False to run the model operation by operation. True for our kernels on a CPU, and for
            CUDA graphs on a GPU, which are recorded within the first rounds. Other accelerators run
            the model operation by operation in either mode.
        kind: the engine for models of its kind.
    """
    engine = _chosen(target, mode, kind)
    engine.mode = mode
    return engine


def _chosen(target: TargetModel, mode: bool, kind: type[ModelEngine]) -> Engine:
    if not mode:
        return kind(target)
    if target.device.type == "cpu":
        return cpu_engine(target, kind)
    runner = GraphRunner(target.device) if cuda_graph.records(target.device) else None
    return kind(target, runner)
