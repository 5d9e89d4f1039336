"""Make conversations to train on: `headstart data --target MODEL --output FILE.jsonl`.

Without any data set, the model generates prompts after the start of its chat template and then
answers them. With `--prompts FILE` it answers those. Started again with the same options, the
command resumes where it stopped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headstart.addons.serve.options import AnswersConfig, options_of
from headstart.console import log
from headstart.scripts.command_line import options
from headstart.train.config import SelfMadeConfig

if TYPE_CHECKING:
    from headstart.inference import RoundObserver


@dataclass(frozen=True)
class DataCommand(AnswersConfig):
    """Conversations that the model generates, or servers of it, and what is seen of it."""

    metrics_port: int | None = None
    """Serve Prometheus metrics at http://127.0.0.1:PORT/metrics; 0 for a free port, null for
    none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.server is not None and self.metrics_port is not None:
            raise ValueError(
                "metrics_port is for the model in this process; the server has its own metrics"
            )


def main(arguments: list[str]) -> None:
    """Run `headstart data` with these command-line arguments."""
    write_conversations(options(DataCommand, "data", __doc__, arguments))


def write_conversations(command: DataCommand) -> None:
    """Write the file, or resume it, and serve what is counted meanwhile."""
    if command.server is not None:
        from headstart.addons.serve.answers import ask_servers

        ask_servers(options_of(command, AnswersConfig))
        return
    # Not before the options are known to be good: these imports take seconds.
    from headstart.train.data.self_made import make_conversations

    # Metrics are served before the model is loaded: the port may be taken.
    observers: list[RoundObserver] = []
    if command.metrics_port is not None:
        from headstart.addons.monitor import Monitor

        monitor = Monitor(model=command.target, head=command.head or "")
        log.info(f"metrics: http://127.0.0.1:{monitor.serve(command.metrics_port)}/metrics")
        observers.append(monitor)
    make_conversations(options_of(command, SelfMadeConfig), observers)
