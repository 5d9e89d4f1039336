"""Options of `scripts/bench_gpu.py`."""

from __future__ import annotations

from dataclasses import dataclass, field

from .commands import Command


@dataclass(frozen=True)
class GpuBenchConfig(Command):
    """What rounds and a training step cost on this device, for large models with random weights."""

    required = ("output",)

    output: str = ""
    """Folder for rounds.json and rounds.md, which hold the training step, too."""
    shapes: list[str] = field(default_factory=lambda: ["llama-3.1-8b", "qwen3-8b", "llama-3.3-70b"])
    """Models; those that do not fit are left out."""
    batches: list[int] = field(default_factory=lambda: [1, 4, 16])
    """Rows."""
    contexts: list[int] = field(default_factory=lambda: [512, 4096, 32768])
    """Tokens of each row before the round."""
    nodes: list[int] = field(default_factory=lambda: [1, 4, 16, 32, 60])
    """Sizes of trees, the root counted; 1 is a plain step."""
    repeats: int = 20
    """Rounds of each, whose median counts."""
    training: list[int] = field(default_factory=lambda: [4, 2048])
    """Rows of a training step, and tokens of each, for the first shape that fits; an empty list leaves it out."""
    minutes: float = 9.0
    """After which the rest is left out."""
