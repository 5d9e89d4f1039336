"""Every option of a training run, its default and its unit, in one place.

A YAML file sets them, the command line overrides them with dots (`--optim.lr 1e-3`), and the resolved values are
saved with every checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""The words for dtypes in configs and on the command line."""


def dtype_of(word: str) -> torch.dtype:
    """A dtype by its word.

    Raises:
        ValueError: an unknown word.
    """
    if word not in DTYPES:
        raise ValueError(f"unknown dtype {word!r}; choose from {', '.join(DTYPES)}")
    return DTYPES[word]


@dataclass(frozen=True)
class DataConfig:
    """Where conversations come from and how they are cut."""

    sources: list[str] = field(default_factory=list)
    """JSONL files or Hub data sets (NAME or NAME:SPLIT) of conversations with a `messages` list."""
    max_length: int = 1024
    """Tokens after which a conversation is cut."""
    held_out: float = 0.02
    """Share of the conversations that is kept from training and measured on."""
    max_conversations: int | None = None
    """Use only so many, the first ones; null for all."""


@dataclass(frozen=True)
class OptimConfig:
    """AdamW with linear warm-up and cosine decay."""

    lr: float = 1e-3
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of AdamW's running means."""
    weight_decay: float = 0.0
    """Decoupled weight decay per step, times the learning rate."""
    warmup: float = 0.1
    """Share of the steps over which the learning rate rises."""
    clip: float = 1.0
    """Gradient norm above which gradients are scaled down."""


@dataclass(frozen=True)
class LoopConfig:
    """How long, how much at once, and what is written down when."""

    epochs: float = 2.0
    """Passes over the training conversations."""
    max_steps: int | None = None
    """Stop after so many optimizer steps; null for all of `epochs`."""
    batch_size: int = 8
    """Conversations per forward on each process."""
    accumulation: int = 1
    """Forwards per optimizer step."""
    precision: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Of the head's arithmetic; its weights and the optimizer stay float32."""
    seed: int = 0
    """Of the data order and of anything drawn at random."""
    log_every: int = 10
    """Steps between two lines of losses."""
    eval_every: int = 200
    """Steps between two evaluations of real acceptance; 0 for only the last."""
    save_every: int = 200
    """Steps between two checkpoints to resume from; 0 for only the last."""
    keep: int = 2
    """How many of these checkpoints are kept."""
    tracker: Literal["none", "wandb", "tensorboard", "trackio"] = "none"
    """Where accelerate sends the numbers."""


@dataclass(frozen=True)
class EvalConfig:
    """Real acceptance on held-out conversations, through the decoder itself."""

    prompts: int = 16
    """Held-out prompts that are answered with the head."""
    new_tokens: int = 64
    """Tokens of each answer."""
    conversations: int = 64
    """Held-out conversations on which the accuracies behind the static tree are measured."""
    nodes: int = 16
    """Size of the static tree that is saved with the head, the root counted."""


@dataclass(frozen=True)
class TrainConfig:
    """One training run."""

    target: str = ""
    """The frozen model: a folder, a Hub id, a GGUF file, or package:NAME for the GGUF file of a Python package."""
    output: str = ""
    """Folder of the run: checkpoints, the best head, the last head."""
    head: dict[str, Any] = field(default_factory=lambda: {"type": "medusa"})
    """`type`, a word of the HEADS table, and that head's own options."""
    target_dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Of the frozen model's weights."""
    target_revision: str | None = None
    """Revision of the target's Hub id."""
    data: DataConfig = field(default_factory=DataConfig)
    """Conversations."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """Optimizer and schedule."""
    loop: LoopConfig = field(default_factory=LoopConfig)
    """Duration, batches, precision, checkpoints."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    """Measuring while training."""

    def __post_init__(self) -> None:
        """Refuse, before any long work, what cannot run.

        Raises:
            ValueError: naming the option, what was given and what is valid.
        """
        for name, value in (("target", self.target), ("output", self.output), ("data.sources", self.data.sources)):
            if not value:
                raise ValueError(f"option {name!r} is required and was not given")
        if "type" not in self.head:
            raise ValueError("option 'head.type' is required: a word of the HEADS table, such as medusa")
        if not 0 < self.data.held_out < 1:
            raise ValueError(f"data.held_out is a share between 0 and 1, not {self.data.held_out}")
        minima = {
            "data.max_length": (self.data.max_length, 3),
            "loop.batch_size": (self.loop.batch_size, 1),
            "loop.accumulation": (self.loop.accumulation, 1),
            "loop.keep": (self.loop.keep, 1),
            "loop.log_every": (self.loop.log_every, 1),
            "loop.eval_every": (self.loop.eval_every, 0),
            "loop.save_every": (self.loop.save_every, 0),
            "eval.prompts": (self.eval.prompts, 1),
            "eval.new_tokens": (self.eval.new_tokens, 1),
            "eval.conversations": (self.eval.conversations, 1),
            "eval.nodes": (self.eval.nodes, 2),
        }
        for name, (number, least) in minima.items():
            if number < least:
                raise ValueError(f"{name} must be at least {least}, not {number}")
        if self.loop.epochs <= 0 or self.optim.lr <= 0 or self.optim.clip <= 0:
            raise ValueError("loop.epochs, optim.lr and optim.clip must be above 0")
        if self.loop.precision == "float32" and self.target_dtype != "float32":
            raise ValueError(
                f"loop.precision float32 needs target_dtype float32, not {self.target_dtype}: the head's arithmetic "
                "would otherwise run on rounded features"
            )
