"""Training engines, of which the launch file chooses one, and the arithmetic of the head.

    DDP         every process holds the head; gradients are averaged
    ZeRO-1, 2   DeepSpeed shards the optimizer, and with 2 the gradients (arXiv:1910.02054)
    FSDP2       torch's fully_shard of optimizer, gradients and weights

Decisions that processes must share are made by the main process (`from_main`), or by any of them
(`any_process`).

Arithmetic is bfloat16 (torch's autocast) where that is faster than float32, which is measured once
on each machine. The target then keeps its checkpoint's own dtype; otherwise it is in float32. A run
that resumes keeps its dtypes.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    broadcast_object_list,
    gather_object,
)
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from ..heads.base import dtype_name
from ..inference.targets.dtypes import SLOW, dtype_named, fits, own_dtype
from ..inference.tuning.machine import measured_once, positive, seconds_in_turns, tell_once
from .checkpoint_writer import Sharded
from .config import TrainConfig
from .data.batches import Share
from .machines import GROUPS, shard_mesh
from .optim import check_muon

ROWS, WIDTH, INNER = 512, 512, 2048
"""Tokens of the training step that is timed for "auto", and the widths of its two linear layers."""
REPEATS, LIMIT = 7, 1.0
"""Most timed steps in each dtype, and seconds after which no more are started."""
NOT_TAKEN = {
    "ACCELERATE_DYNAMO_BACKEND": ("dynamo_backend", "no", "a head is trained uncompiled"),
    "ACCELERATE_FP8_BACKEND": ("fp8_backend", "no", "a head is not trained in 8 bits"),
    "ACCELERATE_USE_MEGATRON_LM": ("megatron_lm", "false", "Megatron-LM trains no head"),
    "ACCELERATE_USE_PARALLELISM_CONFIG": (
        "parallelism_config",
        "false",
        "a head is trained by DDP, FSDP2 or DeepSpeed alone",
    ),
    "FSDP_OFFLOAD_PARAMS": ("fsdp_offload_params", "false", "a head is not offloaded"),
    "FSDP_ACTIVATION_CHECKPOINTING": (
        "fsdp_activation_checkpointing",
        "false",
        "loop.recompute decides what is computed again",
    ),
    "FSDP_IGNORED_MODULES": ("fsdp_ignored_modules", "none", "a head is sharded as a whole"),
}
"""Variables by which accelerate hands on settings that a run does not take: their names in a launch
file, the value that asks for nothing, and why not. What changes neither results nor the engine,
such as how FSDP wraps modules, is not here."""
DECIDED_SECTIONS = (
    "optimizer",
    "scheduler",
    "bf16",
    "bfloat16",
    "fp16",
    "amp",
    "data_types",
    "torch_autocast",
    "compression_training",
    "curriculum_learning",
    "data_efficiency",
    "elasticity",
    "progressive_layer_drop",
    "quantize_training",
)
"""Sections of a DeepSpeed file that would change what the config says of steps."""
Item = TypeVar("Item")
Result = TypeVar("Result")
Value = TypeVar("Value")


def start(config: TrainConfig) -> tuple[Accelerator, Share]:
    """Join the other processes, if any; return the accelerator and this process's share of steps.

    `check_launch` has refused what the environment alone decides.

    Raises:
        ValueError: the launch file contradicts the config, or its engine cannot train it.
    """
    # 1. Set the environment that accelerate, DeepSpeed and transformers read.
    os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    on_cpu = not torch.accelerator.is_available()
    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    group = InitProcessGroupKwargs(
        backend="gloo" if on_cpu else None, timeout=timedelta(minutes=config.loop.timeout)
    )
    if on_cpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # With this on, transformers would load the target's weights on the first process only.
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    # 2. Join the processes. For FSDP2 accelerate joins them as for DDP; `shard` shards later.
    fsdp = os.environ.pop("ACCELERATE_USE_FSDP", None)
    try:
        accelerator = Accelerator(
            # Otherwise several processes on CPUs would not know of each other.
            cpu=on_cpu and not deepspeed,
            # `autocast` does it instead: accelerate's way keeps the weights in 16 bits.
            mixed_precision="no",
            # `gradients` does it: accelerate would divide the loss once more
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
            log_with=None if config.loop.tracker == "none" else config.loop.tracker,
            project_dir=config.output,
            # DDP's buckets are the gradients themselves, not a second copy of them.
            kwargs_handlers=(
                [group, DistributedDataParallelKwargs(gradient_as_bucket_view=True)]
                if several
                else []
            ),
        )
    finally:
        if fsdp is not None:
            os.environ["ACCELERATE_USE_FSDP"] = fsdp
    if torch.distributed.is_initialized():
        GROUPS.append(torch.distributed.group.WORLD)

    # 3. Check what the processes turned out to be.
    share = Share.of_loop(config.loop, accelerator.process_index, accelerator.num_processes)
    check_engine(requested_engine(accelerator), config)
    check_accumulation(share)
    if deepspeed:
        unset_hf_deepspeed_config()  # otherwise transformers would shard the target as it loads
        configure_deepspeed(accelerator.state.deepspeed_plugin.deepspeed_config, config, share)
    return accelerator, share


def check_launch(config: TrainConfig) -> None:
    """Refuse settings of a launch file, or left in the environment, that a run does not take."""
    requested = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if requested not in ("no", {"bfloat16": "bf16"}.get(config.loop.precision)):
        raise ValueError(
            f"the launch file has mixed_precision {requested!r}, the config loop.precision"
            f" {config.loop.precision!r}; leave the launch file's at 'no': the config decides"
        )
    fsdp = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    for variable, (name, harmless, reason) in NOT_TAKEN.items():
        value = os.environ.get(variable, harmless)
        if value.lower() != harmless and (fsdp or not variable.startswith("FSDP_")):
            raise ValueError(
                f"the launch file has {name} {value!r} ({variable} in the environment), but"
                f" {reason}; set it to {harmless!r}"
            )
    if fsdp and os.environ.get("FSDP_VERSION", "1") != "2":
        raise ValueError(
            "the launch file asks for FSDP1; the head is sharded by FSDP2: set fsdp_version to 2"
        )
    if fsdp and int(os.environ.get("WORLD_SIZE", "1")) == 1:
        raise ValueError(
            "the launch file asks for FSDP2, and one process has nothing to shard; launch several"
        )


def check_accumulation(share: Share) -> None:
    """Refuse a launch that accumulates gradients over another number of forwards than the run."""
    variable = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
    steps = os.environ.get(variable, "auto")
    if steps not in ("auto", "1", str(share.forwards)):
        raise ValueError(
            f"the launch file has gradient_accumulation_steps {steps} ({variable} in the"
            f" environment), but the config decides the number of forwards a step, {share.forwards}"
            " here; set it to 1, and choose loop.micro_batch or loop.micro_tokens"
        )


def check_engine(engine: str, config: TrainConfig) -> None:
    """Raise a ValueError for options that an engine cannot train with."""
    whole = "choose one process, DDP, ZeRO-1 or ZeRO-2"
    if engine == "ZeRO-3":
        raise ValueError(
            "ZeRO-3 saves nothing here: the losses read the whole head in every forward; choose"
            " ZeRO-2 or FSDP2"
        )
    if config.optim.name == "muon":
        check_muon()
    if engine not in ("one process", "DDP") and config.optim.name == "muon":
        raise ValueError(
            f"Muon needs whole matrices, which {engine} shards; choose optim.name adamw, one"
            " process or DDP"
        )
    if engine == "FSDP2" and config.adapter.rank > 0:
        raise ValueError(f"{engine} would shard the adapter inside the target; {whole}")


def requested_engine(accelerator: Accelerator) -> str:
    """Name the launch file's engine: "one process", or as in this module's docstring."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return f"ZeRO-{accelerator.state.deepspeed_plugin.zero_stage}"
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        return "FSDP2"
    return "one process" if accelerator.num_processes == 1 else "DDP"


def actual_engine(module: nn.Module) -> str:
    """Name the engine that really drives a module."""
    stage: Any = getattr(module, "zero_optimization_stage", None)  # DeepSpeed's engine has it
    if stage is not None:
        return f"ZeRO-{stage()}"
    if isinstance(module, FSDPModule):
        return "FSDP2"
    return "DDP" if isinstance(module, DistributedDataParallel) else "one process"


def shard(
    accelerator: Accelerator, module: nn.Module, over: Literal["machine", "all"] = "machine"
) -> None:
    """Shard the module's parameters, if the engine is FSDP2; called before the optimizer is made.

    `over` names the processes that divide them, see `shard_mesh`. The head is one unit: heads call
    parts of a layer outside of its forward (DFlash the projections of its context), where a unit of
    the layer would not be gathered. Gradients are reduced in float32, as by DDP, so that a run has
    the same weights with each engine.

    Accelerate could shard, but disables FSDP2 without a GPU, and on a GPU fails on plain buffers (a
    truncated vocabulary) while it loads weights from the first process:
    huggingface/accelerate#3898.
    """
    if requested_engine(accelerator) == "FSDP2":
        # All processes start from the same weights, as with DDP and DeepSpeed.
        for tensor in (*module.parameters(), *module.buffers()):
            torch.distributed.broadcast(tensor.data, src=0)
        fully_shard(module, mesh=shard_mesh(accelerator, over))


def prepare(
    accelerator: Accelerator, module: nn.Module, optimizer: Optimizer, precision: str
) -> tuple[nn.Module, Optimizer]:
    """Hand module and optimizer to the engine of the launch file; return both as it drives them.

    `precision` is float32 or bfloat16.
    """
    if isinstance(module, FSDPModule):
        # `shard` has done the work. Checkpoints hold each process's shards.
        sharded = Sharded(module, optimizer)
        accelerator.register_for_checkpointing(sharded)
        accelerator.register_load_state_pre_hook(sharded.load)
    else:
        # DeepSpeed runs its own autocast, see `autocast`.
        if accelerator.distributed_type == DistributedType.DEEPSPEED:
            accelerator.state.deepspeed_plugin.deepspeed_config["torch_autocast"] = {
                "enabled": precision == "bfloat16",
                "dtype": "bfloat16",
                # Modules that exchange gradients in bfloat16: none, since DDP uses float32.
                "lower_precision_safe_modules": [],
            }
        module, optimizer = accelerator.prepare(module, optimizer)
    # An engine can fall back to another without an error.
    if actual_engine(module) != requested_engine(accelerator):
        raise ValueError(
            f"the launch file asks for {requested_engine(accelerator)} and got"
            f" {actual_engine(module)}"
        )
    return module, optimizer


def autocast(accelerator: Accelerator, precision: str) -> AbstractContextManager[Any]:
    """Run a module's forward, and only that, in bfloat16 arithmetic; its weights stay float32.

    On a GPU DeepSpeed disables an autocast around it; `prepare` configures its own.
    """
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return nullcontext()
    return torch.autocast(
        accelerator.device.type, dtype_named(precision), enabled=precision == "bfloat16"
    )


def state_dtype(precision: str, target_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a head reads the target's states.

    bfloat16 if target and head both compute in it, else float32.
    """
    same = precision == "bfloat16" and target_dtype == torch.bfloat16
    return torch.bfloat16 if same else torch.float32


def from_main(accelerator: Accelerator, value: Value) -> Value:
    """Send the main process's value to every process.

    Values that each process computes itself may differ in the last digit.
    """
    # A list of one: broadcast_object_list replaces its items in place on the other processes.
    values: list[Any] = [value if accelerator.is_main_process else None]
    decided: Value = broadcast_object_list(values)[0]
    return decided


def any_process(accelerator: Accelerator, flag: bool) -> bool:
    """Whether a flag is set on any process; every process must call this."""
    if accelerator.num_processes == 1:
        return flag
    count = accelerator.reduce(torch.tensor(int(flag), device=accelerator.device), "sum")
    return bool(count > 0)  # sync: the host decides by it


def all_agree(accelerator: Accelerator, check: Callable[[], None]) -> None:
    """Run a check that may differ between processes; if one refuses, all raise its error.

    Raises:
        ValueError: the error of the first process that raised one.
    """
    refused: str | None = None
    try:
        check()
    except ValueError as error:
        # Raised only after the exchange: the other processes wait there for this one.
        refused = str(error)
    everyone: list[str | None] = gather_object([refused])
    for message in everyone:
        if message is not None:
            raise ValueError(message)


def end_together(accelerator: Accelerator) -> None:
    """Wait for all processes and leave their groups; every process calls this last.

    The threads of gloo free the Python objects of what was exchanged. One that does so while
    Python ends aborts the process (pytorch/pytorch#179291), so they end here: a group that nothing
    refers to joins its threads.
    """
    accelerator.wait_for_everyone()
    accelerator.end_training()
    # DDP's references go first, see `GROUPS`.
    accelerator.free_memory()
    gc.collect()
    GROUPS.clear()


def distributed(
    accelerator: Accelerator,
    items: Sequence[Item],
    work: Callable[[Sequence[Item]], list[Result]],
    together: bool = False,
) -> list[Result]:
    """Distribute work on items over the processes; return all results on each process.

    Args:
        work: gets consecutive items, perhaps none.
        together: every process does all of the work, because its parts need all processes.

    Returns:
        The results in the order of the items.
    """
    if together:
        return work(items)
    processes = accelerator.num_processes
    # Consecutive parts of nearly equal size: 10 items on 4 processes are 0:2, 2:5, 5:7, 7:10.
    first = len(items) * accelerator.process_index // processes
    last = len(items) * (accelerator.process_index + 1) // processes
    parts: list[list[Result]] = gather_object([work(items[first:last])])
    return [result for part in parts for result in part]


def configure_deepspeed(options: dict[str, Any], config: TrainConfig, share: Share) -> None:
    """Fill in the DeepSpeed options that the config decides.

    Raises:
        ValueError: the DeepSpeed file contradicts the config.
    """
    # 1. Refuse sections that would compete with the config, and offloading.
    for section in DECIDED_SECTIONS:
        # A section counts as enabled unless it says otherwise.
        if options.get(section, {}).get("enabled", section in options):
            raise ValueError(
                f"the DeepSpeed file has a section {section!r}, which the config decides; remove it"
            )
    zero = options.get("zero_optimization", {})
    for name in ("offload_optimizer", "offload_param", "cpu_offload", "cpu_offload_params"):
        asked = zero.get(name) or {}
        if asked is True or (asked and asked.get("device", "none") != "none"):
            raise ValueError(
                f"the DeepSpeed file has {name}, but a head is not offloaded; remove it"
            )

    # 2. Set the sizes. DeepSpeed wants train_batch_size to be the product of the other two and
    # the number of processes; batches reach it ready-made.
    parts = share.processes * share.forwards
    micro_batch = max(1, config.loop.batch_size // parts)  # unused with loop.batch_tokens
    decided = {
        "train_batch_size": micro_batch * parts,
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": share.forwards,
        "gradient_clipping": config.optim.clip,
    }
    for name, value in decided.items():
        if options.get(name, "auto") not in ("auto", value):
            raise ValueError(
                f"the DeepSpeed file has {name} {options[name]}, which does not fit the config's"
                f" {value}; write 'auto'"
            )
        options[name] = value
    # The optimizer is one of ours or torch's, not one that DeepSpeed made.
    options["zero_allow_untested_optimizer"] = True


def resolved(config: TrainConfig, accelerator: Accelerator) -> TrainConfig:
    """Replace "fastest" and "auto" by dtypes, the same on every process."""
    dtypes = formats(config, accelerator.device) if accelerator.is_main_process else ("", "")
    return with_formats(config, *from_main(accelerator, dtypes))


def with_formats(config: TrainConfig, target: Any, head: Any) -> TrainConfig:
    """Set the names of the dtypes of the target's weights and of the head's arithmetic."""
    return dataclasses.replace(
        config, dtype=target, loop=dataclasses.replace(config.loop, precision=head)
    )


def formats(config: TrainConfig, device: torch.device) -> tuple[str, str]:
    """Name the dtypes of the target's weights and of the head's arithmetic on a device."""
    target = str(config.dtype)
    head = str(config.loop.precision)

    # 1. The target, "auto": the dtype of its checkpoint.
    if target == "auto":
        checkpoint_dtype, _ = own_dtype(config.target, config.target_revision)
        target = dtype_name(checkpoint_dtype)
        if head == "float32" and target != "float32":
            raise ValueError(
                f"loop.precision float32 needs dtype float32, not auto, which is {target} here"
            )

    # 2. The head, "auto": the faster one, unless the target is in 16 bits already. Float32 would
    # then compute with rounded features.
    if head != "auto":
        _warn_if_slow(head, device)
    elif target in ("bfloat16", "float16"):
        head = "bfloat16"
    else:
        head = "bfloat16" if _over_float32(device) < 1 else "float32"

    # 3. The target, "fastest": it follows the head. On a CPU, float16 is slow and float32 exact,
    # if there is memory for it.
    if target != "fastest":
        return target, head
    checkpoint_dtype, shape = own_dtype(config.target, config.target_revision)
    half_on_cpu = device.type == "cpu" and checkpoint_dtype == torch.float16
    if head == "float32" or (half_on_cpu and shape is not None and fits(shape)):
        return "float32", head
    return dtype_name(checkpoint_dtype), head


def _over_float32(device: torch.device) -> float:
    """Return the time of a training step in bfloat16 over that in float32.

    It is measured on CPUs only. For accelerators it is 0.5, or 2 on a CUDA GPU without native
    bfloat16.
    """
    if device.type != "cpu":
        # A plan may be for a GPU that this machine lacks.
        present = device.type == "cuda" and torch.cuda.is_available()
        if present and not torch.cuda.is_bf16_supported(including_emulation=False):
            return 2.0
        return 0.5
    return measured_once(
        device,
        f"training step of {ROWS} rows in bfloat16 over float32",
        bfloat16_step_ratio,
        positive,
    )


def _warn_if_slow(precision: str, device: torch.device) -> None:
    """Warn, once, if the other arithmetic is much faster on this CPU."""
    if device.type != "cpu" or precision not in ("float32", "bfloat16"):
        return
    ratio = _over_float32(device)
    if precision == "bfloat16":
        slower = ratio
        other = "float32"
    else:
        slower = 1 / ratio
        other = "bfloat16"
    if slower >= SLOW:
        tell_once(
            f"on this machine training steps take {slower:.1f} times as long in {precision} as in"
            f" {other}; a new run with loop.precision auto takes that"
        )


def bfloat16_step_ratio() -> float:
    """Return the time of a training step under autocast over that without it.

    The step is a forward and a backward of two linear layers; times are medians.
    """
    # An MLP block, up and down again: [R, WIDTH] -> [R, INNER] -> [R, WIDTH].
    weights = [
        torch.full(shape, 1 / INNER, dtype=torch.float32, requires_grad=True)
        for shape in ((INNER, WIDTH), (WIDTH, INNER))
    ]
    rows_RD = torch.ones(ROWS, WIDTH, dtype=torch.float32)

    def step(enabled: bool) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out_RD = rows_RD
            for weight_OI in weights:
                out_RD = F.linear(out_RD, weight_OI)
        torch.autograd.grad(out_RD.float().sum(), weights)

    # In turns: other load on the machine slows both alike.
    taken = seconds_in_turns(
        {enabled: partial(step, enabled) for enabled in (True, False)}, REPEATS, LIMIT
    )
    return statistics.median(taken[True]) / statistics.median(taken[False])
