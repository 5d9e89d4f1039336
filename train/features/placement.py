"""Loading the frozen target: whole on each process, sharded over all, or spread over one's devices.

`shard` shards every decoder block over the processes (torch's fully_shard, whatever engine trains
the head): a block is gathered while the one before it runs, and freed after it. `spread` places
whole blocks on one device after the other. Embedding, final norm and LM head stay whole on every
process, since heads read their weights.
"""

from __future__ import annotations

import itertools
from typing import Any, cast

import torch
from accelerate import Accelerator, infer_auto_device_map
from accelerate.utils import get_balanced_memory
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import PreTrainedModel

from ...inference.engines.target import Target
from ...inference.outer_modules import OuterTarget
from ...inference.targets.dtypes import dtype_named
from ...inference.targets.loading import config_of, load_config, unloaded_model
from ..config import TrainConfig
from ..engines import from_main
from ..machines import shard_mesh


def load_target(config: TrainConfig, accelerator: Accelerator, outer: bool = False) -> Target:
    """Load the config's target, placed by `target_placement`.

    With `outer` only its embedding, final norm and LM head are loaded, whole on every process.

    Raises:
        ValueError: the placement does not fit this launch, or the target.
    """
    dtype = dtype_named(config.dtype)
    placement = config.target_placement
    options = loading_options(config)
    if outer:
        return OuterTarget.load(
            config.target, dtype, accelerator.device, config.target_revision, options
        )
    if placement == "whole":
        return Target.load(
            config.target, dtype, accelerator.device, config.target_revision, options
        )

    # What remains is a target on several devices: of several processes (shard), or of one (spread).
    if (placement == "shard") != (accelerator.num_processes > 1):
        other = "spread" if placement == "shard" else "shard"
        raise ValueError(
            f"target_placement {placement!r} does not fit a run of {accelerator.num_processes}"
            f" processes; choose {other!r}, or 'whole' if the target fits on one device"
        )
    if config.adapter.rank > 0:
        raise ValueError(
            f"an adapter needs target_placement 'whole', not {placement!r}: it changes the target's"
            " blocks"
        )
    if placement == "shard" and (packing := packing_of(config)):
        raise ValueError(
            f"the weights of {config.target!r} are packed"
            f" ({packing.get('quant_method', 'quantization_config')}), and packed weights are not"
            " split: choose target_placement 'whole' or 'spread', not 'shard'"
        )
    return _sharded(config, dtype, accelerator) if placement == "shard" else _spread(config, dtype)


def loading_options(config: TrainConfig) -> dict[str, Any]:
    """Return the config's options for transformers' `from_pretrained` that are not null."""
    options = {
        "attn_implementation": config.target_attention,
        "quantization_config": config.target_quantization,
    }
    return {name: value for name, value in options.items() if value is not None}


class ShardedTarget(Target):
    """A target each of whose forwards needs all processes, from which its blocks are gathered."""

    def forwards(self, needed: int) -> int:
        count = torch.tensor(needed, device=self.device)
        torch.distributed.all_reduce(count, torch.distributed.ReduceOp.MAX)
        return int(count)  # sync: packed rows of other processes may need more forwards


def is_sharded(target: Target) -> bool:
    """Whether every forward needs all processes, from which its blocks are gathered."""
    return any(isinstance(module, FSDPModule) for module in target.model.modules())


def _sharded(config: TrainConfig, dtype: torch.dtype, accelerator: Accelerator) -> Target:
    """Load a target on the main process only; the others get their shards from it."""
    # 1. The main process loads the weights into host memory. The others build the model on torch's
    # meta device, with its buffers, such as rotary frequencies, which no checkpoint holds.
    weights: dict[str, Any] = {}
    provenance: dict[str, Any] = {}
    if accelerator.is_main_process:
        whole = Target.load(
            config.target, dtype, "cpu", config.target_revision, loading_options(config)
        )
        whole.check_decoding()  # forwards of a sharded target need all processes
        model = whole.model
        weights = whole.model.state_dict()
        provenance = whole.provenance
    else:
        model = empty_model(config, dtype)

    # 2. Shard, and make room on the devices. `to_empty` loses values: keep those of the buffers.
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    shard_blocks(model, shard_mesh(accelerator, config.loop.shard_over))
    model.to_empty(device=accelerator.device)
    model.tie_weights()
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])

    # 3. Send every process its shards.
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, weights, options=options)
    target = ShardedTarget(model.eval().requires_grad_(False), str(config.target))
    target.was_tried()
    target.provenance = from_main(accelerator, provenance)

    # 4. Run the whole model once. FSDP2 finds the root of its modules in the first forward, so that
    # of a block alone, as when a head starts from the target's weights, must not come first.
    target.read(torch.zeros(1, 1, dtype=torch.int64, device=accelerator.device), ())
    return target


def shard_blocks(model: PreTrainedModel, mesh: DeviceMesh | None = None) -> None:
    """Shard every block over a mesh's processes, to be gathered while the block before it runs.

    Without a mesh, these are all processes.
    """
    # 1. The blocks. Their weights are freed again after each forward.
    modules = Target(model).modules
    blocks = cast(list[FSDPModule], list(modules.blocks))
    for block in modules.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)

    # 2. The model, although nothing else of it is sharded: without a wrapped module around them,
    # blocks would each wait for all work launched before, and gathering would not overlap with
    # computing. Its decoder stays unwrapped: transformers looks up its class to return hidden
    # states.
    of_blocks = {id(parameter) for block in modules.blocks for parameter in block.parameters()}
    whole = {parameter for parameter in model.parameters() if id(parameter) not in of_blocks}
    fully_shard(model, mesh=mesh, reshard_after_forward=True, ignored_params=whole)

    # 3. While a block runs, the next one is gathered.
    for current, following in itertools.pairwise(blocks):
        current.set_modules_to_forward_prefetch([following])


def _spread(config: TrainConfig, dtype: torch.dtype) -> Target:
    """Place whole blocks on one device after the other.

    Blocks that fit on no device stay in host memory.
    """
    # 1. Plan, for a model without weights: about as much on each device, and no block divided.
    model = empty_model(config, dtype)
    undivided = model._no_split_modules
    memory = get_balanced_memory(model, no_split_module_classes=undivided, dtype=dtype)
    devices = infer_auto_device_map(model, memory, undivided)

    # 2. Move embedding, LM head and final norm to the first device, where the head trains.
    first = next(iter(devices.values()))
    outer_modules = (
        model.get_input_embeddings(),
        model.get_output_embeddings(),
        Target(model).modules.norm,
    )
    outer = {id(part) for part in outer_modules}
    devices |= {name: first for name, part in model.named_modules() if id(part) in outer}
    return Target.load(
        config.target, dtype, devices, config.target_revision, loading_options(config)
    )


def packing_of(config: TrainConfig) -> dict[str, Any]:
    """Return the quantization of the target's weights; empty if they are not packed.

    The config decides it, otherwise the checkpoint.
    """
    if config.target_quantization:
        return config.target_quantization
    shape = config_of(config.target, config.target_revision)
    if shape is None:
        return {}  # unpacked as it is loaded
    packing = getattr(shape, "quantization_config", None)
    if not packing:
        return {}
    return dict(packing if isinstance(packing, dict) else packing.to_dict())


def empty_model(config: TrainConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Build the model without weights, its buffers computed."""
    shape = load_config(config.target, config.target_revision)
    options = loading_options(config)
    options.pop("quantization_config", None)
    return unloaded_model(config.target, shape, dtype, **options)
