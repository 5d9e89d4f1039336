"""One process or many: which engine trains the head, and all that differs between engines.

    accelerate launch --config_file configs/accelerate/zero2.yaml scripts/train.py --config configs/x.yaml

The launch file chooses the engine, the config says what is trained, and neither needs to know the other:

    DDP            every process holds the head; gradients are averaged
    ZeRO-1, 2, 3   DeepSpeed shards optimizer, gradients, weights (arXiv:1910.02054)
    FSDP2          torch's fully_shard does all three

accelerate leaves FSDP2 out where there is no GPU and gives DDP instead; then the head is sharded here.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, InitProcessGroupKwargs
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from .batches import Share
from .config import TrainConfig, dtype_of

PATIENCE = timedelta(minutes=30)
"""How long a process waits for the others: as long as the slowest evaluation or checkpoint may take."""


def start(config: TrainConfig) -> tuple[Accelerator, Share]:
    """Join the other processes, if there are any.

    Returns:
        accelerate's object, and this process's share of every step.

    Raises:
        ValueError: a launch file that contradicts the config, or cannot train what it asks for.
    """
    asked = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if asked not in ("no", {"bfloat16": "bf16", "float16": "fp16"}.get(config.loop.precision)):
        raise ValueError(
            f"the launch file has mixed_precision {asked!r}, the config loop.precision {config.loop.precision!r}; "
            "leave the launch file's at 'no': the config decides"
        )
    os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
    on_cpu = not torch.accelerator.is_available()
    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    group = InitProcessGroupKwargs(backend="gloo" if on_cpu else None, timeout=PATIENCE)
    if on_cpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    accelerator = Accelerator(
        cpu=on_cpu and not deepspeed,  # else several processes on CPUs would not know of each other
        # bfloat16 is autocast by the loop: the engines' own ways keep the weights in 16 bits.
        mixed_precision="fp16" if config.loop.precision == "float16" else "no",
        log_with=None if config.loop.tracker == "none" else config.loop.tracker,
        project_dir=config.output,
        kwargs_handlers=[group] if several else [],
    )
    share = Share.of_loop(config.loop, accelerator.process_index, accelerator.num_processes)
    check_engine(engine_asked(accelerator), config)
    if deepspeed:
        unset_hf_deepspeed_config()  # else transformers would shard the target as it loads
        configure_deepspeed(accelerator.state.deepspeed_plugin.deepspeed_config, config, share)
    return accelerator, share


def check_engine(engine: str, config: TrainConfig) -> None:
    """Refuse what an engine cannot train.

    Raises:
        ValueError: with the engines that can.
    """
    if engine not in ("one process", "DDP") and config.optim.name == "muon":
        raise ValueError(f"Muon turns whole matrices, which {engine} cuts; choose optim.name adamw, one process or DDP")
    whole = "choose one process, DDP, ZeRO-1 or ZeRO-2"
    if engine in ("ZeRO-3", "FSDP2") and config.adapter.rank > 0:
        raise ValueError(f"{engine} would shard the adapter inside the target; {whole}")
    if engine in ("ZeRO-3", "FSDP2") and config.optim.ema > 0:
        raise ValueError(f"{engine} holds no whole weights to average, as optim.ema {config.optim.ema} asks; {whole}")
    if engine.startswith("ZeRO") and config.loop.precision == "float16":
        raise ValueError(f"{engine} would keep the head's weights in float16; choose loop.precision bfloat16")


def engine_asked(accelerator: Accelerator) -> str:
    """The engine that the launch file chose, by its word in this module's docstring."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return f"ZeRO-{accelerator.state.deepspeed_plugin.zero_stage}"
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
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
    if engine_asked(accelerator) == "FSDP2" and accelerator.distributed_type != DistributedType.FSDP:
        fully_shard(module)


def prepare(accelerator: Accelerator, module: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
    """Hand both to the engine.

    Raises:
        ValueError: the engine is another than the launch file asked for.
    """
    if isinstance(module, FSDPModule):
        accelerator.register_for_checkpointing(_Sharded(module, optimizer))
    else:
        head = module
        module, optimizer = accelerator.prepare(module, optimizer)
        if engine_asked(accelerator) == "ZeRO-3":
            from deepspeed.runtime.zero import register_external_parameter

            # The losses read the LM head's weight without calling its module: the head is gathered as a whole.
            for parameter in head.parameters():
                register_external_parameter(head, parameter)
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


def autocast(accelerator: Accelerator, precision: str) -> torch.autocast:
    """Around a module's forward, and around it alone: its arithmetic in 16 bits, its weights untouched."""
    return torch.autocast(accelerator.device.type, dtype_of(precision), enabled=precision == "bfloat16")


def gradient_scale(accelerator: Accelerator, share: Share) -> int:
    """What a loss is multiplied by so that the engine's mean over processes and forwards becomes a sum."""
    deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
    return share.processes * (share.forwards if deepspeed else 1)


def whole_state(head: nn.Module) -> dict[str, Tensor]:
    """A copy of the head's whole weights, on every process."""
    with _gathered(head.parameters()):
        state = {
            name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            for name, tensor in head.state_dict().items()
        }
        return {name: tensor.detach().clone() for name, tensor in state.items()}


def _gathered(parameters: Iterable[nn.Parameter]) -> contextlib.AbstractContextManager[Any]:
    """Inside, weights that ZeRO-3 shards are whole."""
    sharded = [parameter for parameter in parameters if hasattr(parameter, "ds_id")]
    if not sharded:
        return contextlib.nullcontext()
    from deepspeed.runtime.zero import GatheredParameters

    context: contextlib.AbstractContextManager[Any] = GatheredParameters(sharded)
    return context


def configure_deepspeed(options: dict[str, Any], config: TrainConfig, share: Share) -> None:
    """Fill in what the config decides.

    Raises:
        ValueError: the DeepSpeed file decides it otherwise.
    """
    for section in ("optimizer", "scheduler", "bf16", "fp16", "amp"):
        if options.get(section, {}).get("enabled", section in options):
            raise ValueError(f"the DeepSpeed file has a section {section!r}, which the config decides; remove it")
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
