"""The choice of an engine.

    device  compile  engine              its runner   what runs the target's layers
    CPU     True     CpuEngine           Runner       PackedLayers (C++), for Llama-like layers
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

from ..targets.changes import has_hooks
from ..targets.target_model import TargetModel
from . import cpu_kernels
from .base import Engine
from .cpu_decoder import cpu_engine
from .cuda_graph import GRAPHS, GraphRunner
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
    # 1. Operation by operation, or recorded.
    if not mode:
        return kind(target)
    if target.device.type != "cpu":
        recorded = target.device.type in GRAPHS
        return kind(target, GraphRunner(target.device) if recorded else None)
    # 2. Our kernels, which need a compiler and would not call the user's hooks.
    if cpu_kernels.library() is None or has_hooks(target.model):
        return kind(target)
    # 3. All layers in the kernels, or linear layers alone: subclasses of `ModelEngine` read texts
    #    in another way than the kernels' decoder.
    decoder = cpu_engine(target) if kind is ModelEngine else None
    return decoder or kind(target, packed=True)
