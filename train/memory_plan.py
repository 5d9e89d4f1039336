"""Memory plan of a run, computed before anything is loaded: `headstart train --config ... --plan`.

Parameters are counted on models without weights. Activations are counted on a head of the same kind
that is a fraction as wide, which keeps tensors for its backward in the same proportion.
"""

from __future__ import annotations

import math
import shlex
import weakref
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import init_empty_weights
from rich.table import Table
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..console import console, log
from ..files import free_bytes
from ..heads.base import DraftHead, TargetFeatures, TargetInfo, TargetModules
from ..heads.by_name import build_head, head_config
from ..heads.layers.decoder_layer import LayerShape
from ..heads.losses import positions_at_once
from ..heads.objective import Objective
from ..inference.engines.target import Target
from ..inference.replay import BEYOND, TOKENS_AT_ONCE
from ..inference.rounds.prefill import PREFILL_TOKENS
from ..inference.targets.dtypes import dtype_named
from .config import TrainConfig, head_options
from .data.batches import Share
from .engines import check_engine, formats, state_dtype, with_formats
from .evaluate import NODES_AT_ONCE, forward_tokens
from .features.by_mode import needs_no_target
from .features.online import cache_bytes
from .features.placement import empty_model, packing_of
from .head import head_of, objective_of
from .optim import matrices_of

SCALE = 16
"""Ratio of the head's width to that of the narrow head on which activations are counted."""
SAMPLE = 32
"""Tokens of the shorter of the narrow head's two rows, beyond those that may all be anchors."""
MLP_COPIES = 3
"""Tensors of the width of a block's MLP that are alive at once in a forward of the target."""
STATES_KEPT = 3
"""Tensors of its hidden size."""
LOGIT_COPIES = 3
"""Tensors in float32 beside the logits of a tree's nodes: scores, probabilities, random numbers."""
CHUNK_COPIES = 5
"""Tensors of a chunk's size that are alive at once: draft logits, their softmax, its gradient, the
target's probabilities and a product of two of them."""
BUCKET = 50_000_000
"""reduce_bucket_size of the files in configs/deepspeed."""
PACKED_BITS = {"int4": 4.5, "mxfp4": 4.25, "nvfp4": 4.5, "fp8": 8.0, "float8": 8.0, "int8": 8.0}
"""Bits of a weight, scales included, by words in the name of a quantization."""
FLOAT = 4
"""Bytes of a float32: weights, gradients and optimizer states of a head."""
ENGINES = {
    "one": "one process",
    "ddp": "DDP",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "fsdp2": "FSDP2",
}
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
    """While training."""
    moments: dict[str, int]
    """All together while training, evaluating and saving; the largest is what a process needs."""
    cache_bytes: int
    """Bytes of a token's states, if they are kept on disk."""
    checkpoint_bytes: int
    """Bytes of a checkpoint to resume from."""
    copied_bytes: int = 0
    """Bytes of the copy in host memory from which such a checkpoint is written in the background;
    with DDP only the main process has one."""
    replay_bytes: int = 0
    """Bytes in host memory of the states that evaluations replay, from the first one on."""


def plan_run(config: TrainConfig, device: torch.device | None = None) -> Plan:
    """Plan the memory of the launch that `config.plan` names.

    `device` is what the processes run on; None for the CPU if there is one process and no
    accelerator here, else CUDA.

    Raises:
        ValueError: an unknown launch or invalid options.
    """
    # 1. The launch: zero2:8 is ZeRO-2 on 8 processes.
    launch, _, number = str(config.plan).partition(":")
    processes = int(number or 1) if (number or "1").isdigit() else 0
    if launch not in ENGINES or processes < 1 or (launch == "one") != (processes == 1):
        raise ValueError(
            f"plan {config.plan!r} is not a launch; choose one, or ddp, zero1, zero2, fsdp2 with"
            " their number of processes, such as zero2:8"
        )
    engine = ENGINES[launch]
    check_engine(engine, config)

    # 2. The largest forward: `rows` rows of `length` tokens.
    share = Share.of_loop(config.loop, 0, processes)
    length = config.data.pack or config.data.max_length
    step_rows = config.loop.batch_size
    if config.loop.batch_tokens is not None:
        step_rows = config.loop.batch_tokens // length
    rows = max(1, step_rows // (processes * share.forwards))
    tokens = rows * length

    # 3. Target and head, without weights.
    on_cpu = processes == 1 and not torch.accelerator.is_available()
    here = device or torch.device("cpu" if on_cpu else "cuda")
    config = with_formats(config, *formats(config, here))
    dtype = dtype_named(config.dtype)
    model = empty_model(config, dtype)
    target = Target(model, config.target)
    with init_empty_weights():
        head = head_of(config, target.info, target.config)
    whole = sum(parameter.numel() for parameter in model.parameters())
    size = sum(parameter.numel() for parameter in head.parameters())

    # 4. The target on each process.
    sizes = packed_bytes(model, packing_of(config), dtype)
    on_device = sum(sizes.values())
    if needs_no_target(config):
        modules = target.modules
        # A module list counts a weight that embedding and LM head share once.
        outer = nn.ModuleList([cast(nn.Module, modules.embed), modules.norm, modules.lm_head])
        on_device = sum(weight.numel() for weight in outer.parameters()) * dtype.itemsize
    elif config.target_placement == "shard":
        blocks = []
        for block in target.modules.blocks:
            blocks.append(sum(sizes[id(weight)] for weight in block.parameters()))
        # A share of the blocks, and one block gathered at a time.
        on_device += -sum(blocks) + sum(blocks) // processes + max(blocks)

    # 5. The head and its optimizer: AdamW keeps two numbers for each weight, Muon one.
    weights = FLOAT * size
    muon = 0
    if config.optim.name == "muon":
        muon = sum(matrix.numel() for matrix in matrices_of(head))
    states = FLOAT * (2 * (size - muon) + muon)
    shards = engine_memory(engine, processes, weights, states, here)

    # 6. A forward of training: the target's states and, if the head reads another dtype, their
    # copy in that.
    info = target.info
    width = (len(head.feature_layers) + 1) * info.hidden_size
    read_in = state_dtype(config.loop.precision, dtype).itemsize
    bytes_per_number = dtype.itemsize
    if read_in != dtype.itemsize:
        bytes_per_number += read_in
    features = tokens * width * bytes_per_number
    # Autocast keeps the weights in 16 bits for the backward.
    in_16_bits = 0 if config.loop.precision == "float32" else 2 * size

    # 7. All together.
    memory = {
        "target": on_device,
        "features": features,
        **shards,
        "activations": activations(config, info, rows, length) + in_16_bits,
        "loss": loss_chunk(
            head, objective_of(config), judged(config, head, tokens), dtype.itemsize, here
        ),
    }
    # Is a checkpoint written in the background while steps go on? DeepSpeed's never is.
    between = config.loop.save_minutes is not None or config.loop.save_every > 0
    copied = 0
    if between and config.loop.save_in_background and "ZeRO" not in engine:
        copied = (weights + states) // (processes if engine == "FSDP2" else 1)
    replay = table_bytes(config, target, head, processes)
    if here.type == "cpu" and copied > 0:
        memory["copy to save"] = copied
    if here.type == "cpu" and config.loop.eval_every > 0:
        memory["replayed answers"] = replay

    # 8. What stays between steps. DDP keeps its buckets.
    standing = on_device + memory["head"] + memory["optimizer"]
    if engine == "DDP":
        standing += memory["exchange"]
    # An evaluation copies the head to host memory, for which FSDP2 gathers it, and from there to
    # the device in the target's dtype.
    evaluating = size * dtype.itemsize + evaluation(config, target, head, processes, here)
    if engine == "FSDP2":
        evaluating = max(evaluating, weights)
    if here.type == "cpu":
        evaluating += weights + replay
    moments = {
        "training": sum(memory.values()),
        "evaluation": standing + evaluating,
        "saving": standing,
    }
    return Plan(
        engine,
        processes,
        target_parameters=whole,
        head_parameters=size,
        target_dtype=config.dtype,
        precision=config.loop.precision,
        memory=memory,
        moments=moments,
        cache_bytes=cache_bytes(head, config.features.format),
        checkpoint_bytes=weights + states,
        copied_bytes=copied,
        replay_bytes=replay,
    )


def engine_memory(
    engine: str, processes: int, weights: int, states: int, device: torch.device
) -> dict[str, int]:
    """Bytes of an engine for a head in float32, measured by benchmarks/memory_plan.py.

    Args:
        engine: its name, as `requested_engine` gives it.
        weights: bytes of the head's weights, and of their gradients.
        states: bytes of the optimizer's states.
    """
    shard = weights // processes
    # One process: gradients are as large as the weights.
    head = weights
    gradients = weights
    optimizer = states
    exchange = 0
    if engine == "DDP":
        # The reducer's buckets, which hold the gradients (gradient_as_bucket_view). A weight that
        # several steps of training-time test read has a gradient of its own until they are summed.
        exchange = weights
    elif engine.startswith("ZeRO"):
        # deepspeed/runtime/zero/stage_1_and_2.py: float32 master weights of this process's part
        # (`single_partition_of_fp32_ groups`), its averaged gradients, and buffers of
        # reduce_bucket_size numbers that `setup_buckets` allocates whole, two of them with
        # overlap_comm. A CPU has pages of them only where gradients were moved to.
        optimizer = states // processes + shard
        gradients = weights + shard
        exchange = 0 if device.type == "cpu" else FLOAT * BUCKET * (2 if engine == "ZeRO-2" else 1)
    elif engine == "FSDP2":
        # torch/distributed/fsdp/_fully_shard: weights are whole for a step, and freed before
        # `foreach_reduce` copies whole gradients into its input, which is as large.
        head = shard
        optimizer = states // processes
        gradients = weights + shard
        exchange = weights
    return {"head": head, "gradients": gradients, "optimizer": optimizer, "exchange": exchange}


def packed_bytes(
    model: PreTrainedModel, packing: dict[str, Any], dtype: torch.dtype
) -> dict[int, int]:
    """Return the bytes of each parameter of the target, by its id.

    The weights of linear layers are packed if `packing` is not empty.

    bitsandbytes keeps a float32 scale for 64 weights in 4 bits (arXiv:2305.14314, section 3), 0.127
    bits each with double quantization; GPTQ and AWQ keep a 16-bit scale and a zero for each group.
    The LM head is not packed.
    """
    bits = packed_bits(packing)
    head = model.get_output_embeddings()
    linear = [
        module for module in model.modules() if isinstance(module, nn.Linear) and module is not head
    ]
    packed = {id(module.weight) for module in linear}
    sizes = {}
    for parameter in model.parameters():
        in_bits = bits if bits is not None and id(parameter) in packed else 8 * dtype.itemsize
        sizes[id(parameter)] = round(parameter.numel() * in_bits / 8)
    return sizes


def packed_bits(packing: dict[str, Any]) -> float | None:
    """Bits of a packed weight with its share of the scales; None if weights are not packed."""
    if not packing:
        return None
    method = str(packing.get("quant_method", "")).lower()
    # bitsandbytes
    if packing.get("load_in_4bit") or packing.get("_load_in_4bit"):
        return 4 + (0.127 if packing.get("bnb_4bit_use_double_quant") else 32 / 64)
    if packing.get("load_in_8bit") or packing.get("_load_in_8bit"):
        return 8
    # GPTQ and AWQ: 4 bits in groups of 128 take 4 + (16 + 4) / 128 = 4.16.
    if "bits" in packing or "w_bit" in packing:
        width = int(packing["bits"] if "bits" in packing else packing["w_bit"])
        group = int(packing.get("group_size", packing.get("q_group_size", 128)))
        return width + (0 if group <= 0 else (16 + width) / group)
    # Others are told by words in the name.
    text = f"{method} {packing.get('quant_type', '')} {packing.get('format', '')}".lower()
    for words, bits in PACKED_BITS.items():
        if words in text:
            return bits
    log.warning(
        f"the quantization {packing} is unknown to the plan, which counts the weights as not packed"
    )
    return None


def judged(config: TrainConfig, head: DraftHead, tokens: int) -> int:
    """Positions with drafts: all, or the anchors of sequences of `data.max_length` tokens."""
    anchors = getattr(head.config, "max_anchors", None)
    if anchors is None:
        return tokens
    return min(tokens, max(1, tokens // config.data.max_length) * int(anchors))


def loss_chunk(
    head: DraftHead,
    objective: Objective,
    tokens: int,
    itemsize: int,
    device: torch.device,
    backward: bool = True,
) -> int:
    """Count the bytes of one chunk of the loss.

    The target's logits are in its dtype, the draft's and their copies in float32. Without a
    backward these are draft logits and their softmax, and the target's probabilities twice.
    """
    drafted = head.draft_vocab_size
    target = objective.target_logits(head.target.vocab_size, drafted)
    copies = CHUNK_COPIES
    if not backward:
        copies = 4 if target else 2
    positions = min(tokens, positions_at_once(device, max(target, drafted)))
    return positions * (target * itemsize + copies * FLOAT * drafted)


def block_width(shape: TargetInfo | LayerShape) -> int:
    """Numbers that exist at once for a token while a decoder block runs without a backward."""
    return MLP_COPIES * shape.intermediate_size + STATES_KEPT * shape.hidden_size


def replayed(config: TrainConfig, processes: int) -> tuple[int, int]:
    """Prompts that a process answers in an evaluation, and their tokens with the answers."""
    prompts = config.eval.prompts
    if config.target_placement != "shard":
        prompts = math.ceil(prompts / processes)
    return prompts, config.data.max_length + config.eval.max_new_tokens + BEYOND


def table_bytes(config: TrainConfig, target: Target, head: DraftHead, processes: int) -> int:
    """Count the host bytes of the states that evaluations replay (`ReplayTarget.table`)."""
    # An adapter changes the target, and without its blocks states come from elsewhere.
    if config.adapter.rank > 0 or needs_no_target(config):
        return 0
    prompts, tokens = replayed(config, processes)
    width = len({*head.feature_layers, -1}) * target.info.hidden_size
    return prompts * tokens * width * target.dtype.itemsize


def evaluation(
    config: TrainConfig, target: Target, head: DraftHead, processes: int, device: torch.device
) -> int:
    """Estimate the bytes of the largest part of an evaluation, beside the copies of the head."""
    info = target.info
    itemsize = target.dtype.itemsize
    prompts, answered = replayed(config, processes)
    features = len(head.feature_layers) * info.hidden_size
    in_block = block_width(info)

    def forward(tokens: int) -> int:
        """Bytes of a forward that returns features: those of blocks are collected, then joined."""
        collected = info.hidden_size * sum(layer != -1 for layer in head.feature_layers)
        joined = collected + features + info.hidden_size
        return tokens * itemsize * max(collected + in_block, joined)

    # 1. Teacher-forced losses: keys and values of all tokens, in training-time test those of every
    # step, and the drafts of every depth. A layer runs before the loss.
    tokens = max(forward_tokens(config), config.data.max_length)
    drafted = judged(config, head, tokens)
    in_layer = STATES_KEPT * info.hidden_size
    cached = 0
    if head.cached_layers:
        in_layer = block_width(head.shape)
        cached = 2 * head.cached_layers * head.shape.num_key_value_heads * head.shape.head_dim
    unrolled = head.max_depth if hasattr(head, "test_steps") else 1
    block = getattr(head.config, "block_size", 1)
    in_layers = itemsize * in_layer * (drafted * block if block > 1 else tokens)
    loss = loss_chunk(head, objective_of(config), drafted, itemsize, device, backward=False)
    read = tokens * itemsize * (features + info.hidden_size)
    kept = itemsize * (unrolled * cached * tokens + head.max_depth * drafted * info.hidden_size)
    forced = read + kept + max(in_layers, loss)
    if needs_no_target(config):
        return forced + read

    # 2. Plain answers: the KV cache, and a forward that reads a chunk of the prompts, without
    # features.
    texts = min(prompts * answered, max(TOKENS_AT_ONCE, answered))
    rows = texts // answered
    chunk = min(texts, rows * PREFILL_TOKENS)
    plain = target.cache_bytes(1, texts) + chunk * itemsize * (info.hidden_size + in_block)

    # 3. Drafts: the head's cache, into which it reads the prompts, and logits of a tree's nodes.
    # Before its first prompt a forward reads prompts and answers.
    drafts = head.cache_bytes(rows, answered) * itemsize // FLOAT
    nodes = max(config.eval.nodes, min(rows * config.eval.nodes, NODES_AT_ONCE))
    logits = nodes * info.vocab_size * (itemsize + LOGIT_COPIES * FLOAT)
    heads_prefill = chunk * itemsize * (features + in_layer)
    drafts += max(forward(texts), heads_prefill, logits)
    return max(forced, forward(tokens), plain, drafts)


def activations(config: TrainConfig, info: TargetInfo, rows: int, length: int) -> int:
    """Estimate the bytes that the head keeps for its backward, weights in 16 bits left out.

    On short rows of a narrow head they are b + a x tokens; both grow with the width. b is that of
    the anchors of a block head, of which longer sequences have no more. No attention keeps scores.
    Packed rows count as sequences of `data.max_length`.
    """
    if config.data.pack is not None:
        rows *= max(1, length // config.data.max_length)
        length = min(length, config.data.max_length)
    anchors = getattr(head_config(*head_options(config)), "max_anchors", 0)
    short = anchors + SAMPLE
    first = kept(config, info, short)
    # Two row lengths give the slope a: (a * (S + 32) + b) - (a * S + b) = a * 32.
    slope = (kept(config, info, short + SAMPLE) - first) / SAMPLE
    if anchors == 0:
        return round(SCALE * slope * rows * length)
    # Two rows less one leave out what rows share.
    if length <= short:
        in_row = float(kept(config, info, length, rows=2) - kept(config, info, length))
    else:
        in_row = kept(config, info, short, rows=2) - first + slope * (length - short)
    return round(SCALE * rows * in_row)


def kept(
    config: TrainConfig, info: TargetInfo, time: int, scale: int = SCALE, rows: int = 1
) -> int:
    """Count the bytes that a narrow head keeps for the backward of rows of `time` tokens.

    The head has 1/`scale` of the real width.
    """
    # 1. A head of the same kind and depth, 1/scale as wide, on a target with 8 tokens.
    kind, options = head_options(config)
    widths = ("hidden_size", "intermediate_size", "head_dim")
    narrow = replace(info, vocab_size=8, **{name: getattr(info, name) // scale for name in widths})
    options |= {name: options[name] // scale for name in widths if options.get(name)}
    options |= {"draft_vocab_size": None} if "draft_vocab_size" in options else {}
    head = build_head(kind, options, narrow)
    head.recompute = config.loop.recompute

    # 2. Features of zeros: only shapes matter.
    modules = TargetModules(
        nn.Embedding(8, narrow.hidden_size, dtype=torch.float32).requires_grad_(False),
        nn.Linear(narrow.hidden_size, 8, bias=False, dtype=torch.float32).requires_grad_(False),
        nn.Identity(),
        (),
    )
    features = TargetFeatures(
        features_BTF=torch.zeros(
            rows, time, len(head.feature_layers) * narrow.hidden_size, dtype=torch.float32
        ),
        last_BTD=torch.zeros(rows, time, narrow.hidden_size, dtype=torch.float32),
        tokens_BT=torch.zeros(rows, time, dtype=torch.int64),
        loss_mask_BT=torch.ones(rows, time, dtype=torch.bool),
        modules=modules,
    )

    # 3. Watch which tensors autograd saves, by their storage: views share one. Weights are counted
    # elsewhere.
    of_weights = {
        parameter.untyped_storage().data_ptr()
        for parameter in (*head.parameters(), *modules.lm_head.parameters())
    }
    saved: weakref.WeakSet[Tensor] = weakref.WeakSet()  # the loss's chunks free theirs again

    def keep(tensor: Tensor) -> Tensor:
        view = tensor.detach()
        saved.add(view)
        return view

    hooks: Any = torch.autograd.graph.saved_tensors_hooks(keep, lambda view: view)
    with hooks, torch.autocast("cpu", torch.bfloat16, enabled=config.loop.precision == "bfloat16"):
        output = head(features, objective_of(config))
    assert output.loss.requires_grad  # the tensors that it keeps are counted while it is alive
    storages = [tensor.untyped_storage() for tensor in saved]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return sum(size for address, size in sizes.items() if address not in of_weights)


def show_plan(config: TrainConfig, arguments: list[str]) -> None:
    """Print the plan, and the command that begins the run.

    `arguments` are those of the command line.
    """
    # 1. Memory.
    plan = plan_run(config)
    log.info(
        f"{config.target}: {plan.target_parameters:,} parameters; {config.head['type']}:"
        f" {plan.head_parameters:,}; {plan.engine}, {plan.processes}"
        f" {'process' if plan.processes == 1 else 'processes'}, target {config.target_placement} in"
        f" {plan.target_dtype}, arithmetic in {plan.precision}"
    )
    table = Table("on each process", "GiB")
    for name, size in plan.memory.items():
        table.add_row(name, f"{size / 2**30:.2f}")
    for moment, size in plan.moments.items():
        most = size == max(plan.moments.values())
        table.add_row(f"together, {moment}", f"{size / 2**30:.2f}", style="bold" if most else None)
    console.print(table)

    # 2. Disk.
    output = Path(config.output)
    log.info(
        f"a checkpoint takes {plan.checkpoint_bytes / 2**30:.2f} GiB on disk, loop.keep"
        f" {config.loop.keep} of them and one that is written"
        f" {(config.loop.keep + 1) * plan.checkpoint_bytes / 2**30:.2f}; {output} has"
        f" {free_bytes(output) / 2**30:.2f} GiB free"
    )
    if plan.copied_bytes > 0:
        copied = f"{plan.copied_bytes / 2**30:.2f} GiB of host memory"
        log.info(f"{copied} hold the copy of which one is written while steps go on")
    if plan.replay_bytes > 0:
        log.info(
            f"{plan.replay_bytes / 2**30:.2f} GiB of host memory hold the states of the prompts"
            " and answers of evaluations"
        )
    if config.features.mode != "online":
        folder = Path(config.features.folder or output / "features")
        free = free_bytes(folder)
        log.info(
            f"states on disk: {plan.cache_bytes:,} bytes a token; {folder} has {free / 2**30:.2f}"
            f" GiB free, for {free // plan.cache_bytes:,} tokens"
        )

    # 3. The command: the same one without `--plan=zero2:8`, or `--plan zero2:8`.
    index = next(
        i for i, argument in enumerate(arguments) if argument.partition("=")[0] == "--plan"
    )
    after = index + (1 if "=" in arguments[index] else 2)
    others = shlex.join(arguments[:index] + arguments[after:])
    begin = "headstart train"
    if plan.processes > 1:
        file = f"configs/accelerate/{str(config.plan).partition(':')[0]}.yaml"
        begin = (
            f"accelerate launch --config_file {file} --num_processes {plan.processes}"
            " scripts/train.py"
        )
    log.info(f"to begin: {begin} {others}")
