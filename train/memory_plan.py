"""Memory plan of a training run, computed before anything is loaded: `headstart train --config ... --plan`.

Parameters are counted on models without weights. Activations are counted on a head of the same kind that is a
fraction as wide, which keeps tensors for its backward in the same proportion.
"""

from __future__ import annotations

import dataclasses
import shlex
import weakref
from dataclasses import dataclass
from typing import Any, cast

import torch
from accelerate import init_empty_weights
from rich.table import Table
from torch import Tensor, nn

from ..console import console, log
from ..heads.base import DraftHead, TargetFeatures, TargetInfo, TargetModules
from ..heads.by_name import build_head
from ..heads.losses import positions_at_once
from ..heads.objective import Objective
from ..inference.models.dtypes import dtype_named
from ..inference.target import Target
from .config import TrainConfig, head_options
from .data.batches import Share
from .engines import check_engine, formats, with_formats
from .features.by_mode import needs_no_target
from .features.online import cache_bytes
from .features.placement import empty_model
from .head import head_of, objective_of
from .optim import matrices_of

SCALE = 16
"""Ratio of the head's width to that of the narrow head on which activations are counted."""
SAMPLE = 32
"""Tokens of the shorter of the narrow head's two rows."""
CHUNK_COPIES = 5
"""Tensors of a chunk's size that are alive at once: draft logits, their softmax, its gradient, the target's
probabilities and a product of two of them."""
FLOAT = 4
"""Bytes of a float32: weights, gradients and optimizer states of a head."""
ENGINES = {"one": "one process", "ddp": "DDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "fsdp2": "FSDP2"}
"""Launch files of configs/accelerate, and the engines that they give."""


@dataclass(frozen=True)
class Plan:
    """Bytes on each process by what they hold, and the counts behind them."""

    engine: str
    processes: int
    target_parameters: int
    head_parameters: int
    target_dtype: str
    precision: str
    memory: dict[str, int]
    cache_bytes: int
    """Bytes of a token's states, if they are kept on disk."""


def plan_run(config: TrainConfig) -> Plan:
    """Count for the launch that `config.plan` names; an unknown one, or invalid options, raise a ValueError."""
    launch, _, number = str(config.plan).partition(":")
    processes = int(number or 1) if (number or "1").isdigit() else 0
    if launch not in ENGINES or processes < 1 or (launch == "one") != (processes == 1):
        raise ValueError(
            f"plan {config.plan!r} is no launch; choose one, or ddp, zero1, zero2, fsdp2 with their number of "
            "processes, such as zero2:8"
        )
    engine = ENGINES[launch]
    check_engine(engine, config)
    share = Share.of_loop(config.loop, 0, processes)
    length = config.data.pack or config.data.max_length
    step_rows = config.loop.batch_size if config.loop.batch_tokens is None else config.loop.batch_tokens // length
    rows = max(1, step_rows // (processes * share.forwards))
    here = torch.device("cpu") if processes == 1 and not torch.accelerator.is_available() else torch.device("cuda")
    config = with_formats(config, *formats(config, here))
    dtype = dtype_named(config.target_dtype)
    model = empty_model(config, dtype)
    target = Target(model, config.target)
    with init_empty_weights():
        head = head_of(config, target.info, target.config)
    whole = sum(parameter.numel() for parameter in model.parameters())
    blocks = [sum(parameter.numel() for parameter in block.parameters()) for block in target.modules.blocks]
    size = sum(parameter.numel() for parameter in head.parameters())
    on_device = whole
    if needs_no_target(config):
        on_device = outer_size(target.modules)
    elif config.target_placement == "shard":
        on_device = whole - sum(blocks) + sum(blocks) // processes + max(blocks)  # one block is gathered at a time
    stage = int(engine[-1]) if engine.startswith("ZeRO") else 3 if engine == "FSDP2" else 0
    muon = sum(matrix.numel() for matrix in matrices_of(head)) if config.optim.name == "muon" else 0
    states = 2 * (size - muon) + muon
    # Stage 1 shards the optimizer's states, 2 the gradients too, 3 the weights too.
    sharded = [processes if stage >= least_stage else 1 for least_stage in (1, 2, 3)]
    tokens, info = rows * length, target.info
    width = (len(head.feature_layers) + 1) * info.hidden_size
    in_16_bits = 0 if config.loop.precision == "float32" else 2 * size  # what autocast keeps for the backward
    memory = {
        "target": on_device * dtype.itemsize,
        "features": tokens * width * (dtype.itemsize + FLOAT),
        "head": FLOAT * size // sharded[2] + (FLOAT * size if stage == 3 else 0),
        "gradients": FLOAT * size // sharded[1],
        "optimizer": FLOAT * states // sharded[0] + (FLOAT * size if config.optim.ema else 0),
        "activations": activations(config, info, rows, length) + in_16_bits,
        "loss": loss_chunk(head, objective_of(config), tokens, dtype.itemsize, here),
    }
    dtypes, per_token = (config.target_dtype, config.loop.precision), cache_bytes(head, config.features.format)
    return Plan(engine, processes, whole, size, *dtypes, memory, per_token)


def outer_size(modules: TargetModules) -> int:
    """Count the parameters of what a run without the target's blocks loads: embedding, final norm and LM head."""
    outer = (modules.embed, modules.norm, modules.lm_head)
    return sum(weight.numel() for weight in nn.ModuleList(cast(list[nn.Module], outer)).parameters())


def loss_chunk(head: DraftHead, objective: Objective, tokens: int, itemsize: int, device: torch.device) -> int:
    """Count bytes of the loss's chunk: the target's logits in its dtype, the draft's with their copies in float32."""
    drafted = head.draft_vocab_size
    target = objective.target_logits(head.target.vocab_size, drafted)
    positions = min(tokens, positions_at_once(device, max(target, drafted)))
    return positions * (target * itemsize + CHUNK_COPIES * FLOAT * drafted)


def activations(config: TrainConfig, info: TargetInfo, rows: int, length: int) -> int:
    """Estimate the bytes that the head keeps for its backward.

    On short rows of a narrow head they are c + a x tokens: c, weights in 16 bits, is counted by the caller; a grows
    with the width. No attention keeps scores.
    """
    short, long = (kept(config, info, i * SAMPLE) for i in (1, 2))
    return round((long - short) / SAMPLE * SCALE * rows * length)


def kept(config: TrainConfig, info: TargetInfo, time: int, scale: int = SCALE) -> int:
    """Count the bytes that a head of 1/`scale` of the width keeps for the backward of one row of `time` tokens."""
    kind, options = head_options(config)
    widths = ("hidden_size", "intermediate_size", "head_dim")
    narrow = dataclasses.replace(info, vocab_size=8, **{name: getattr(info, name) // scale for name in widths})
    options |= {name: options[name] // scale for name in widths if options.get(name)}
    options |= {"draft_vocab_size": None} if "draft_vocab_size" in options else {}
    head = build_head(kind, options, narrow)
    head.recompute = config.loop.recompute
    modules = TargetModules(
        nn.Embedding(8, narrow.hidden_size).requires_grad_(False),
        nn.Linear(narrow.hidden_size, 8, bias=False).requires_grad_(False),
        nn.Identity(),
        (),
    )
    features = TargetFeatures(
        features_BTF=torch.zeros(1, time, len(head.feature_layers) * narrow.hidden_size),
        last_BTD=torch.zeros(1, time, narrow.hidden_size),
        tokens_BT=torch.zeros(1, time, dtype=torch.int64),
        loss_mask_BT=torch.ones(1, time, dtype=torch.bool),
        modules=modules,
    )
    own = {parameter.untyped_storage().data_ptr() for parameter in (*head.parameters(), *modules.lm_head.parameters())}
    saved: weakref.WeakSet[_Saved] = weakref.WeakSet()  # the loss's chunks free theirs again

    def keep(tensor: Tensor) -> _Saved:
        one = _Saved(tensor, tensor.untyped_storage())
        saved.add(one)
        return one

    hooks: Any = torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one.tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16, enabled=config.loop.precision == "bfloat16"):
        output = head(features, objective_of(config))
    assert output.loss.requires_grad  # the tensors that it keeps are counted while it is alive
    sizes = {one.storage.data_ptr(): one.storage.nbytes() for one in saved}
    return sum(size for place, size in sizes.items() if place not in own)


@dataclass(frozen=True, eq=False)
class _Saved:
    """A tensor that a backward waits for."""

    tensor: Tensor
    storage: torch.UntypedStorage


def show_plan(config: TrainConfig, arguments: list[str]) -> None:
    """Print the plan, and the command that begins the run; `arguments` are those of the command line."""
    plan = plan_run(config)
    log.info(
        f"{config.target}: {plan.target_parameters:,} parameters; {config.head['type']}: {plan.head_parameters:,}; "
        f"{plan.engine}, {plan.processes} {'process' if plan.processes == 1 else 'processes'}, target "
        f"{config.target_placement} in {plan.target_dtype}, arithmetic in {plan.precision}"
    )
    table = Table("on each process", "GiB")
    for name, size in plan.memory.items():
        table.add_row(name, f"{size / 2**30:.2f}")
    table.add_row("together", f"{sum(plan.memory.values()) / 2**30:.2f}", style="bold")
    console.print(table)
    if config.features.mode != "online":
        log.info(f"states on disk: {plan.cache_bytes:,} bytes a token")
    place = next(i for i, argument in enumerate(arguments) if argument.partition("=")[0] == "--plan")
    others = shlex.join(arguments[:place] + arguments[place + (1 if "=" in arguments[place] else 2) :])
    begin = "headstart train"
    if plan.processes > 1:
        file = f"configs/accelerate/{str(config.plan).partition(':')[0]}.yaml"
        begin = f"accelerate launch --config_file {file} --num_processes {plan.processes} scripts/train.py"
    log.info(f"to begin: {begin} {others}")
