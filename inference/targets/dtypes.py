"""The dtype that a model runs in: `dtype="fastest"` is the fastest exact one on this machine.

    checkpoint    on a CPU                                       on an accelerator
    bfloat16      float32 if that is as fast and fits, or it     bfloat16
    float16       float32 if that is as fast and fits, or it     float16
    float32       float32                                        float32
    GGUF          float32, which alone holds its weights         float32

A dtype is exact if it holds every weight of the checkpoint: its own dtype, and float32 for 16-bit
numbers. "auto" is the checkpoint's own dtype everywhere.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedConfig

from ...heads.base import dtype_name
from ..cache.kv_cache import free_memory
from ..tuning.machine import measured_once, positive, seconds_in_turns, tell_once
from .loading import config_of, locate, model_loader

log = logging.getLogger("headstart.inference")

HALVES = (torch.bfloat16, torch.float16)
"""Dtypes that float32 holds exactly and that may be slow on a CPU."""
WIDTH = 1024
INNER = 4096
LAYERS = 4
"""Sizes and number of the linear layers that are timed: as in a model of half a billion parameters,
and together larger than most processors' caches."""
ROWS = (1, 8)
"""Tokens of the forwards that are timed: a plain step, and the verification of a small tree."""
REPEATS = 7
LIMIT = 1.0
"""Most calls of each, and seconds after which no further one starts."""
SLOW = 1.25
"""Least ratio of the time in a named dtype to that in the fastest exact one that gives a
warning."""
ROOM = 0.8
"""Share of the free memory that weights in float32 may take; the rest is for caches and a head."""


def dtype_named(dtype: torch.dtype | str) -> torch.dtype:
    """Return the torch dtype of a name such as bfloat16."""
    named = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(named, torch.dtype) or not named.is_floating_point:
        raise ValueError(
            f"unknown dtype {dtype!r}; choose from fastest, auto, float64, float32, bfloat16,"
            " float16"
        )
    return named


def chosen_dtype(
    dtype: torch.dtype | str,
    source: str | Path,
    device: torch.device | None,
    revision: str | None = None,
    options: dict[str, Any] | None = None,
) -> torch.dtype | str:
    """Return the dtype to load a checkpoint in; "auto" lets transformers read it from there.

    A named dtype that is slow here is warned of; a "fastest" one that is not the checkpoint's is
    told in one line.

    Args:
        dtype: a dtype, its name, "auto" or "fastest".
        source: as in `Target.from_pretrained`, as for `revision` and `options`.
        device: where the model goes; None for one on several devices.

    Raises:
        ValueError: an unknown name for `dtype`, or no config at `source`.
    """
    on_cpu = device is not None and device.type == "cpu"

    # 1. "auto": the checkpoint's own.
    if dtype == "auto":
        _, gguf = locate(source)
        return "auto" if gguf is None else torch.float32

    # 2. "fastest": measured, and told if it is another than the checkpoint's.
    if dtype == "fastest":
        own, config = own_dtype(source, revision, options)
        quantized = getattr(config, "quantization_config", None)
        quantized = quantized or (options or {}).get("quantization_config")
        if config is None or quantized or own not in HALVES or not on_cpu:
            return own
        # Float32 must be as fast, which takes a second to measure, and fit in memory.
        if against_float32(own) < 1 or not fits(config):
            return own
        log_once(
            f"{source} runs in float32, as exact as its checkpoint's {dtype_name(own)} and not"
            " slower on this CPU; dtype='auto' takes the checkpoint's"
        )
        return torch.float32

    # 3. A named dtype is taken, with a warning if it is slow here.
    named = dtype_named(dtype)
    if on_cpu and named in (torch.float32, *HALVES):
        own, _ = own_dtype(source, revision, options)
        warn_if_slow(named, own)
    return named


@cache
def log_once(message: str) -> None:
    """Log a line at level WARNING, once per process.

    This level is shown even where logging is not configured.
    """
    log.warning(message)


def own_dtype(
    source: str | Path, revision: str | None = None, options: dict[str, Any] | None = None
) -> tuple[torch.dtype, PreTrainedConfig | None]:
    """A checkpoint's own dtype, float32 by default, and its config, None for a GGUF file."""
    config = config_of(source, revision, options)
    if config is None:
        return torch.float32, None
    own: Any = config.dtype or config.get_text_config().dtype or torch.float32
    if not isinstance(own, torch.dtype):
        raise ValueError(f"{source}: the dtype of its config.json is not a dtype's name: {own!r}")
    return own, config


def fits(config: PreTrainedConfig) -> bool:
    """Whether this machine's free memory holds a model's weights in float32."""
    # On "meta" a model has shapes and no memory.
    with torch.device("meta"):
        model = model_loader(config).from_config(config)
    weights = sum(weight.numel() for weight in model.parameters())
    return torch.float32.itemsize * weights < ROOM * free_memory(torch.device("cpu"))


def warn_if_slow(named: torch.dtype, own: torch.dtype) -> None:
    """Warn once if another exact dtype is faster on this machine's CPU than the user's `named`."""
    # Exact dtypes other than the named one; `-` binds tighter than `&`.
    others = {torch.float32, own} & {torch.float32, *HALVES} - {named}
    if not others:
        return
    taken: dict[torch.dtype, float] = {}  # time relative to float32
    for dtype in (named, *others):
        taken[dtype] = 1.0 if dtype == torch.float32 else against_float32(dtype)
    best = min(others, key=lambda dtype: taken[dtype])
    if taken[named] >= SLOW * taken[best]:
        tell_once(
            f"on this machine linear layers take {taken[named] / taken[best]:.1f} times as long in"
            f" {dtype_name(named)} as in {dtype_name(best)}, which is as exact for this model;"
            " dtype='fastest' takes it"
        )


def against_float32(dtype: torch.dtype) -> float:
    """Return the time of linear layers in `dtype` relative to float32, on this machine's CPU.

    It is measured once.
    """
    name = f"linear of {ROWS} rows in {dtype_name(dtype)} over float32"
    return measured_once(torch.device("cpu"), name, lambda: time_over_float32(dtype), positive)


@torch.inference_mode()
def time_over_float32(dtype: torch.dtype) -> float:
    """The sum over `ROWS` of the median seconds in a dtype, relative to float32."""

    def forward(rows_RD: Tensor, weights: list[Tensor]) -> None:
        for weight_OI in weights:
            rows_RD = F.linear(rows_RD, weight_OI)

    # As in an MLP: up, down, up, down. Both dtypes are timed in turns, so that a busy moment of the
    # machine meets both.
    shapes = [(INNER, WIDTH), (WIDTH, INNER)] * (LAYERS // 2)
    calls: dict[tuple[torch.dtype, int], Callable[[], None]] = {}
    for kind in (torch.float32, dtype):
        weights = [torch.full(shape, 1 / INNER, dtype=kind) for shape in shapes]
        for rows in ROWS:
            inputs_RD = torch.ones(rows, WIDTH, dtype=kind)
            calls[kind, rows] = partial(forward, inputs_RD, weights)
    taken = {
        call: statistics.median(times)
        for call, times in seconds_in_turns(calls, REPEATS, LIMIT).items()
    }
    in_float32 = sum(taken[torch.float32, rows] for rows in ROWS)
    in_dtype = sum(taken[dtype, rows] for rows in ROWS)
    return in_dtype / in_float32
