"""One process or many: which engine trains the head, and all that differs between engines.

    accelerate launch --config_file configs/accelerate/zero2.yaml scripts/train.py --config configs/x.yaml

The launch file chooses the engine, the config says what is trained, and neither needs to know the other:

    DDP         every process holds the head; gradients are averaged
    ZeRO-1, 2   DeepSpeed shards the optimizer, and with 2 the gradients (arXiv:1910.02054)
    FSDP2       torch's fully_shard of optimizer, gradients and weights

The head is sharded here and not by accelerate, which leaves FSDP2 out where there is no GPU, and on one fails on plain
buffers (a truncated vocabulary) while it loads weights from the first process: huggingface/accelerate#3898.

What processes must agree on is decided once, by the main process (`from_main`), or asked of all (`any_process`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, InitProcessGroupKwargs, broadcast_object_list, gather_object
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from .config import TrainConfig, dtype_of
from .console import Stopped, StopRequest
from .data.batches import Share

GROUPS: list[Any] = []
"""Process groups that were joined. DDP drops its own reference while it holds Python's lock: were that the last one, it
would wait for gloo's thread, which may wait for the lock."""
Item = TypeVar("Item")
Result = TypeVar("Result")
Value = TypeVar("Value")


def start(config: TrainConfig) -> tuple[Accelerator, Share]:
    """Join the other processes, if there are any.

    Returns:
        accelerate's object, and this process's share of every step.

    Raises:
        ValueError: a launch file that contradicts the config, or cannot train what it asks for.
    """
    asked = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if asked not in ("no", {"bfloat16": "bf16"}.get(config.loop.precision)):
        raise ValueError(
            f"the launch file has mixed_precision {asked!r}, the config loop.precision {config.loop.precision!r}; "
            "leave the launch file's at 'no': the config decides"
        )
    os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
    check_fsdp()
    on_cpu = not torch.accelerator.is_available()
    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    group = InitProcessGroupKwargs(backend="gloo" if on_cpu else None, timeout=timedelta(minutes=config.loop.timeout))
    if on_cpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with _without_fsdp():
        accelerator = Accelerator(
            cpu=on_cpu and not deepspeed,  # else several processes on CPUs would not know of each other
            mixed_precision="no",  # see `autocast`: accelerate's way keeps the weights in 16 bits
            log_with=None if config.loop.tracker == "none" else config.loop.tracker,
            project_dir=config.output,
            kwargs_handlers=[group] if several else [],
        )
    if torch.distributed.is_initialized():
        GROUPS.append(torch.distributed.group.WORLD)
    share = Share.of_loop(config.loop, accelerator.process_index, accelerator.num_processes)
    check_engine(engine_asked(accelerator), config)
    if deepspeed:
        unset_hf_deepspeed_config()  # else transformers would shard the target as it loads
        configure_deepspeed(accelerator.state.deepspeed_plugin.deepspeed_config, config, share)
    return accelerator, share


def check_fsdp() -> None:
    """Refuse what a launch file of FSDP asks for and the head would not get.

    Raises:
        ValueError: FSDP1, or offloading.
    """
    if not _fsdp_asked():
        return
    if os.environ.get("FSDP_VERSION", "1") != "2":
        raise ValueError("the launch file asks for FSDP1; the head is sharded by FSDP2: set fsdp_version to 2")
    if os.environ.get("FSDP_OFFLOAD_PARAMS", "false").lower() == "true":
        raise ValueError("the launch file has fsdp_offload_params, but a head is not offloaded; set it to false")
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        raise ValueError("the launch file asks for FSDP2, and one process has nothing to shard; launch several")


def _fsdp_asked() -> bool:
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


@contextlib.contextmanager
def _without_fsdp() -> Iterator[None]:
    """Inside, accelerate joins the processes as for DDP: the head is sharded by `shard`, and nothing else is."""
    # With this, transformers would leave the target's weights out on all processes but the first.
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    asked = os.environ.get("ACCELERATE_USE_FSDP")
    os.environ["ACCELERATE_USE_FSDP"] = "false"
    try:
        yield
    finally:
        if asked is None:
            del os.environ["ACCELERATE_USE_FSDP"]
        else:
            os.environ["ACCELERATE_USE_FSDP"] = asked


def check_engine(engine: str, config: TrainConfig) -> None:
    """Refuse what an engine cannot train.

    Raises:
        ValueError: with the engines that can.
    """
    whole = "choose one process, DDP, ZeRO-1 or ZeRO-2"
    if engine == "ZeRO-3":
        raise ValueError(
            "ZeRO-3 saves nothing here: the losses read the whole head in every forward; choose ZeRO-2 or FSDP2"
        )
    if engine not in ("one process", "DDP") and config.optim.name == "muon":
        raise ValueError(f"Muon turns whole matrices, which {engine} cuts; choose optim.name adamw, one process or DDP")
    if engine == "FSDP2" and config.adapter.rank > 0:
        raise ValueError(f"{engine} would shard the adapter inside the target; {whole}")
    if engine == "FSDP2" and config.optim.ema > 0:
        raise ValueError(f"{engine} holds no whole weights to average, as optim.ema {config.optim.ema} asks; {whole}")


def engine_asked(accelerator: Accelerator) -> str:
    """The engine that the launch file chose, by its word in this module's docstring."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return f"ZeRO-{accelerator.state.deepspeed_plugin.zero_stage}"
    if _fsdp_asked():
        return "FSDP2"
    return "one process" if accelerator.num_processes == 1 else "DDP"


def alone(accelerator: Accelerator) -> bool:
    """Whether no other process waits for this one, nor an engine for the end of its step."""
    return bool(accelerator.distributed_type == DistributedType.NO) and engine_asked(accelerator) == "one process"


def engine_got(module: nn.Module) -> str:
    """The engine that really drives a module."""
    stage: Any = getattr(module, "zero_optimization_stage", None)  # DeepSpeed's engine has it
    if stage is not None:
        return f"ZeRO-{stage()}"
    if isinstance(module, FSDPModule):
        return "FSDP2"
    return "DDP" if isinstance(module, DistributedDataParallel) else "one process"


def shard(accelerator: Accelerator, module: nn.Module) -> None:
    """Before the optimizer is made: what an engine must do to the module's parameters itself."""
    if engine_asked(accelerator) == "FSDP2":
        for tensor in (*module.parameters(), *module.buffers()):  # as DDP and DeepSpeed do: all start from the same
            torch.distributed.broadcast(tensor.data, src=0)
        fully_shard(module)


def prepare(
    accelerator: Accelerator, module: nn.Module, optimizer: Optimizer, precision: str
) -> tuple[nn.Module, Optimizer]:
    """Hand both to the engine.

    Args:
        accelerator: knows which one was asked for.
        module: whose forward is the loss.
        optimizer: of its parameters.
        precision: of its arithmetic, which is no longer auto.

    Raises:
        ValueError: the engine is another than the launch file asked for.
    """
    if isinstance(module, FSDPModule):
        accelerator.register_for_checkpointing(_Sharded(module, optimizer))
    else:
        if accelerator.distributed_type == DistributedType.DEEPSPEED:
            options = accelerator.state.deepspeed_plugin.deepspeed_config
            options["torch_autocast"] = deepspeed_autocast(precision)
        module, optimizer = accelerator.prepare(module, optimizer)
    if engine_got(module) != engine_asked(accelerator):
        raise ValueError(f"the launch file asks for {engine_asked(accelerator)} and got {engine_got(module)}")
    return module, optimizer


class _Sharded:
    """Weights and optimizer of a module that was sharded here, whole when they are saved."""

    OPTIONS = StateDictOptions(full_state_dict=True)

    def __init__(self, module: nn.Module, optimizer: Optimizer) -> None:
        self.module, self.optimizer = module, optimizer

    def state_dict(self) -> dict[str, Any]:
        """Both, whole on every process."""
        weights, optimizer = get_state_dict(self.module, self.optimizer, options=self.OPTIONS)
        return {"weights": weights, "optimizer": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Put back what `state_dict` gave."""
        set_state_dict(
            self.module,
            self.optimizer,
            model_state_dict=state_dict["weights"],
            optim_state_dict=state_dict["optimizer"],
            options=self.OPTIONS,
        )


@contextlib.contextmanager
def exchanged(accelerator: Accelerator, module: nn.Module, last: bool) -> Iterator[None]:
    """Around a forward and its backward: gradients are exchanged in a step's last one only."""
    accelerator.sync_gradients = last
    with contextlib.nullcontext() if last else accelerator.no_sync(module):
        yield


def autocast(accelerator: Accelerator, precision: str) -> contextlib.AbstractContextManager[Any]:
    """Around a module's forward, and around it alone: its arithmetic in 16 bits, its weights untouched.

    DeepSpeed's engine turns off on a GPU what is autocast around it, and does it itself, by `deepspeed_autocast`.
    """
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return contextlib.nullcontext()
    return torch.autocast(accelerator.device.type, dtype_of(precision), enabled=precision == "bfloat16")


def gradient_scale(accelerator: Accelerator, share: Share) -> int:
    """What a loss is multiplied by so that the engine's mean over processes and forwards becomes a sum."""
    deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
    return share.processes * (share.forwards if deepspeed else 1)


def whole_state(head: nn.Module) -> dict[str, Tensor]:
    """A copy of the head's whole weights, on every process."""
    state = {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in head.state_dict().items()
    }
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def from_main(accelerator: Accelerator, value: Value) -> Value:
    """The main process's value, on every process: what each of them found by itself may differ in a last digit."""
    values: list[Any] = [value if accelerator.is_main_process else None]
    decided: Value = broadcast_object_list(values)[0]
    return decided


def any_process(accelerator: Accelerator, flag: bool) -> bool:
    """Whether a flag is up on any process; every process must ask."""
    if accelerator.num_processes == 1:
        return flag
    up = accelerator.reduce(torch.tensor(int(flag), device=accelerator.device), "sum")
    return bool(up > 0)  # sync: the answer decides what the host does


def end_together(accelerator: Accelerator) -> None:
    """Called by every process as the last thing that it does.

    Gloo's thread frees the Python objects of the last exchange, and aborts a process that is ending by then; behind a
    barrier, which has none, nothing is left to free.
    """
    accelerator.wait_for_everyone()


def shared_out(
    accelerator: Accelerator,
    items: Sequence[Item],
    work: Callable[[Sequence[Item], Callable[[], None]], list[Result]],
    stop: StopRequest,
    together: bool = False,
) -> list[Result]:
    """The results of work on items, of which each process does a part; every process gets all, in the items' order.

    Args:
        accelerator: of the processes.
        items: the same on every process.
        work: takes items that stand one after the other, perhaps none, and a function to call between its parts.
        stop: Ctrl-C or SIGTERM, which end the work: at once, or, done together, between two parts.
        together: every process does all of the work, since its parts need all processes.

    Raises:
        Stopped: on every process, if any of them was stopped.
    """
    stopped = Stopped("stopped; the same command goes on from there")

    def agree() -> None:
        if any_process(accelerator, stop.wanted):
            raise stopped

    if together:
        return work(items, agree)
    processes, process = accelerator.num_processes, accelerator.process_index
    first, last = (len(items) * place // processes for place in (process, process + 1))
    own: list[Result] | None = None
    with suppress(Stopped), stop.at_once():
        own = work(items[first:last], lambda: None)
    parts: list[list[Result] | None] = gather_object([own])
    whole = [part for part in parts if part is not None]
    if len(whole) < len(parts):
        accelerator.wait_for_everyone()  # as at the end of `train`: the process may end now
        raise stopped
    return [result for part in whole for result in part]


def configure_deepspeed(options: dict[str, Any], config: TrainConfig, share: Share) -> None:
    """Fill in what the config decides.

    Raises:
        ValueError: the DeepSpeed file decides it otherwise.
    """
    for section in ("optimizer", "scheduler", "bf16", "fp16", "amp", "torch_autocast"):
        if options.get(section, {}).get("enabled", section in options):
            raise ValueError(f"the DeepSpeed file has a section {section!r}, which the config decides; remove it")
    for name in ("offload_optimizer", "offload_param"):
        if options.get("zero_optimization", {}).get(name, {}).get("device", "none") != "none":
            raise ValueError(f"the DeepSpeed file has {name}, but a head is not offloaded; remove it")
    parts = share.processes * share.forwards
    micro_batch = max(1, config.loop.batch_size // parts)  # with loop.batch_tokens it is not asked for
    decided = {
        "train_batch_size": micro_batch * parts,
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": share.forwards,
        "gradient_clipping": config.optim.clip,
    }
    for name, value in decided.items():
        if options.get(name, "auto") not in ("auto", value):
            raise ValueError(
                f"the DeepSpeed file has {name} {options[name]}, which does not fit the config's {value}; write 'auto'"
            )
        options[name] = value
    options["zero_allow_untested_optimizer"] = True


def deepspeed_autocast(precision: str) -> dict[str, Any]:
    """The section of DeepSpeed's config that does what `autocast` does elsewhere."""
    return {
        "enabled": precision == "bfloat16",
        "dtype": "bfloat16",
        "lower_precision_safe_modules": [],  # modules whose gradients are exchanged in bfloat16; DDP's are in float32
    }
