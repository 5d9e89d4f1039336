"""What a type checker must find in the installed wheel."""

from headstart.inference import GenerateOutput, SpeculativeLM
from headstart.train import TrainConfig


def answer(lm: SpeculativeLM, config: TrainConfig) -> int:
    """Types of the public names, not `Any`."""
    output: GenerateOutput | None = None
    rounds: int = output.stats.rounds if output is not None else 0
    return rounds + len(config.target) + len(lm.observers)
