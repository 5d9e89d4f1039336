"""What "auto" means for a training run: the format of the target's weights, and of the head's arithmetic.

Arithmetic is in bfloat16 (torch's autocast) where that is faster than float32, which is asked of the machine once; the
target then keeps its checkpoint's own format, and is in float32 otherwise. A run that goes on takes what it began with.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch.nn import functional as F

from ..heads.base import dtype_name
from ..inference.models.dtypes import SLOW, fits, own_dtype
from ..inference.tuning.machine import measured_once, positive, seconds_in_turns, tell_once
from .config import TrainConfig
from .run_folder import earlier_options

ROWS, WIDTH, INNER = 512, 512, 2048
"""Tokens of the training step that is timed, and the widths of its two linear layers."""
REPEATS, LIMIT = 7, 1.0
"""Calls of each, at most, and seconds after which there are no more."""


def as_begun(config: TrainConfig) -> TrainConfig:
    """The config of a run that goes on: with what "auto" meant when it began."""
    before = earlier_options(Path(config.output))
    target, head = config.target_dtype, config.loop.precision
    return with_formats(
        config,
        before.get("target_dtype", target) if target == "auto" else target,
        before.get("loop.precision", head) if head == "auto" else head,
    )


def resolved(config: TrainConfig, accelerator: Accelerator) -> TrainConfig:
    """The config without "auto", the same on every process.

    Raises:
        ValueError: no target.
    """
    words: list[Any] = [formats(config, accelerator.device) if accelerator.is_main_process else None]
    return with_formats(config, *broadcast_object_list(words)[0])


def with_formats(config: TrainConfig, target: Any, head: Any) -> TrainConfig:
    """The config with these words for the target's weights and the head's arithmetic."""
    return dataclasses.replace(config, target_dtype=target, loop=dataclasses.replace(config.loop, precision=head))


def formats(config: TrainConfig, device: torch.device) -> tuple[str, str]:
    """Words for the target's weights and the head's arithmetic, on such a device.

    Raises:
        ValueError: no target.
    """
    target, head = str(config.target_dtype), str(config.loop.precision)
    if head != "auto":
        _warn_if_slow(head, device)
    elif target in ("bfloat16", "float16"):
        head = "bfloat16"  # in float32 it would run on rounded features
    else:
        head = "bfloat16" if _over_float32(device) < 1 else "float32"
    if target != "auto":
        return target, head
    own, shape = own_dtype(config.target, config.target_revision)
    if head == "float32" or (device.type == "cpu" and own == torch.float16 and shape is not None and fits(shape)):
        return "float32", head
    return dtype_name(own), head


def _over_float32(device: torch.device) -> float:
    """How many times as long as in float32 a training step takes in bfloat16; on an accelerator only below 1 or above.

    A plan may ask for an accelerator that is not here.
    """
    if device.type != "cpu":
        lacking = device.type == "cuda" and torch.cuda.is_available()
        return 2.0 if lacking and not torch.cuda.is_bf16_supported(including_emulation=False) else 0.5
    return measured_once(device, f"training step of {ROWS} rows in bfloat16 over float32", _timed, positive)


def _warn_if_slow(precision: str, device: torch.device) -> None:
    """Warn, once, of arithmetic that another kind is much faster than on this CPU."""
    if device.type != "cpu" or precision not in ("float32", "bfloat16"):
        return
    ratio = _over_float32(device)
    slower, other = (ratio, "float32") if precision == "bfloat16" else (1 / ratio, "bfloat16")
    if slower >= SLOW:
        tell_once(
            f"on this machine training steps take {slower:.1f} times as long in {precision} as in {other}; "
            "a new run with loop.precision auto takes that"
        )


def _timed() -> float:
    """A forward and a backward of two linear layers under autocast, over the same without it."""
    weights = [torch.full(shape, 1 / INNER, requires_grad=True) for shape in ((INNER, WIDTH), (WIDTH, INNER))]
    rows_RD = torch.ones(ROWS, WIDTH)

    def step(enabled: bool) -> Callable[[], None]:
        def run() -> None:
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                out_RD = rows_RD
                for weight_OI in weights:
                    out_RD = F.linear(out_RD, weight_OI)
            torch.autograd.grad(out_RD.float().sum(), weights)

        return run

    taken = seconds_in_turns({enabled: step(enabled) for enabled in (True, False)}, REPEATS, LIMIT)
    return statistics.median(taken[True]) / statistics.median(taken[False])
