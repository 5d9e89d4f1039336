"""What a run sends to a tracker: numbers under train/ and eval/, acceptance by depth, sample answers, the best head.

accelerate's trackers send the numbers; what is more than a number goes to wandb or TensorBoard by their own functions.
Training never waits for a tracker that cannot be reached, nor ends because of it: numbers wait for the next attempt,
and all of them are in log.jsonl anyway.
"""

from __future__ import annotations

import dataclasses
import os
import re
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import broadcast_object_list

from ..heads.checkpoints.files import json_ready
from .config import TrainConfig
from .console import log
from .samples import COLUMNS, Sample

if TYPE_CHECKING:
    from wandb.sdk.wandb_run import Run as WandbRun

RETRY_SECONDS = 60.0
"""Between a failure and the next attempt, at least."""
RETRY_SHARE = 0.05
"""Most of a run's time that failing attempts may take: wandb gives up on a server after 90 seconds."""
MISSED = 10_000
"""Rows that wait for a tracker, at most; older ones it never gets."""
REFUSALS = r"\b40[0134]\b|permission|not found"
"""How wandb's server says that a key, an entity or a project is wrong."""


class Tracker:
    """The tracker of a run. Only the main process sends; `start` is called on every process."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self._begin: Callable[[], None] | None = None
        self._reached = self._warned = False
        self._missed: deque[tuple[dict[str, Any], int]] = deque(maxlen=MISSED)
        self._next_attempt = 0.0
        self._name = "none"
        self._upload = False

    def start(self, config: TrainConfig, run_id: str, step: int) -> None:
        """Begin, or continue, the run of this id.

        Args:
            config: the resolved options; the tracker gets all of them.
            run_id: by which the tracker knows the run again.
            step: of the checkpoint that the run continues from.

        Raises:
            ValueError: the tracker refuses a key or an option; on every process.
        """
        if config.loop.tracker == "none":
            return
        refused: list[str | None] = [None]
        if self.accelerator.is_main_process:
            self._name, self._upload = config.loop.tracker, config.tracking.upload
            self._begin = partial(self._init, config, run_id, step)
            try:
                self._attempt()
            except ValueError as error:
                refused, self._begin = [str(error)], None
        if message := broadcast_object_list(refused)[0]:
            raise ValueError(message)

    def log(self, values: dict[str, Any], step: int) -> None:
        """Send numbers, after those that are still waiting.

        Args:
            values: nested; names become `train/loss/0`.
            step: that they belong to.
        """
        if self._begin is not None:
            self._missed.append((slashed(values), step))
            self._attempt()

    def show(self, rates: dict[str, list[float | None]], samples: list[Sample], step: int) -> None:
        """Send what an evaluation found besides numbers; lost if the tracker cannot be reached.

        Args:
            rates: acceptance rate by depth, for each tree.
            samples: answers with their accepted tokens marked.
            step: of the evaluation.
        """
        show = {"wandb": _show_in_wandb, "tensorboard": _show_in_tensorboard}.get(self._name)
        if show is not None and self._reached:
            tracker = self.accelerator.get_tracker(self._name, unwrap=True)
            self._forgiven(lambda: show(tracker, rates, samples, step))

    def close(self, best: Path, failed: bool = False) -> None:
        """Send what is waiting and the best head, and end the tracker's run.

        Args:
            best: the head's folder.
            failed: whether the run ends by an error.
        """
        if self._begin is None:
            return
        self._next_attempt = 0.0
        self._attempt(last=True)
        if self._reached and self._name == "wandb":
            run = self.accelerator.get_tracker("wandb", unwrap=True)
            if self._upload and best.is_dir():
                self._forgiven(lambda: _upload(run, best))
            self._forgiven(lambda: run.finish(exit_code=int(failed)))
        elif self._reached:
            for tracker in self.accelerator.trackers:
                self._forgiven(tracker.finish)
        self.accelerator.trackers, self._begin, self._reached = [], None, False

    def _attempt(self, last: bool = False) -> None:
        """Send all rows that wait, unless an attempt failed a short while ago.

        Raises:
            ValueError: the tracker refuses a key or an option at its first start.
        """
        began = time.monotonic()
        if began < self._next_attempt:
            return
        try:
            if not self._reached:
                assert self._begin is not None
                self._begin()
                self._reached = True
            while self._missed:
                self._send(*self._missed[0])
                self._missed.popleft()
        except Exception as error:  # trackers raise errors of their own, by network, disk or account
            if not self._warned and not self._reached and _refuses(self._name, error):
                raise ValueError(
                    f"loop.tracker {self._name} refuses this run: {error}; correct its key or the options tracking.*, "
                    "or choose WANDB_MODE=offline or loop.tracker none"
                ) from error
            ended = time.monotonic()
            self._next_attempt = ended + max(RETRY_SECONDS, (ended - began) / RETRY_SHARE)
            if last:
                log.warning(f"the tracker {self._name} never got {len(self._missed)} rows; log.jsonl has them: {error}")
            elif not self._warned:
                log.warning(
                    f"the tracker {self._name} cannot be reached; training continues, numbers wait in memory and "
                    f"attempts follow: {error}"
                )
            self._warned = True
            return
        if self._warned:
            log.info(f"the tracker {self._name} is reached again")
        self._warned = False

    def _send(self, values: dict[str, Any], step: int) -> None:
        if self._name == "wandb":  # its own steps may not repeat, as those of a run that was killed do
            self.accelerator.log({"step": step, **values})
        else:
            self.accelerator.log(values, step=step)

    def _init(self, config: TrainConfig, run_id: str, step: int) -> None:
        self.accelerator.trackers = []  # without one that failed to start
        names, options = config.tracking, json_ready(dataclasses.asdict(config))
        given = os.environ.get("WANDB_PROJECT") if self._name == "wandb" else None
        project = names.project or given or "headstart"
        more: dict[str, Any] = {}
        if self._name == "wandb":
            more = {
                "id": os.environ.get("WANDB_RUN_ID") or run_id,
                "resume": "allow",
                "name": names.name or os.environ.get("WANDB_NAME") or run_id,
                "entity": names.entity,
                "group": names.group,
                "tags": names.tags or None,
            }
        elif self._name == "trackio":
            more = {"name": names.name or run_id, "resume": "allow", **({"group": names.group} if names.group else {})}
        elif step > 0:
            more = {"purge_step": step + 1}  # what a killed run wrote after its checkpoint is written again
        self.accelerator.init_trackers(
            project, config=options if self._name == "wandb" else flat(options), init_kwargs={self._name: more}
        )
        if self._name == "wandb":
            self.accelerator.get_tracker("wandb", unwrap=True).define_metric("*", step_metric="step")

    def _forgiven(self, send: Callable[[], object]) -> None:
        try:
            send()
        except Exception as error:  # as in `_attempt`
            log.warning(f"the tracker {self._name} did not take all that was sent; training continues: {error}")


def check_tracker(config: TrainConfig) -> None:
    """Refuse, before any long work, a tracker that cannot work here.

    Raises:
        ValueError: its package is not installed, or wandb has no key.
    """
    name = config.loop.tracker
    if name == "none":
        return
    if name not in map(str, get_available_trackers()):
        package = "headstart[wandb]" if name == "wandb" else name
        raise ValueError(f"loop.tracker {name} needs a package that is not installed: pip install '{package}'")
    if name != "wandb":
        return
    import wandb

    if (os.environ.get("WANDB_MODE") or wandb.setup().settings.mode) not in ("online", "shared"):
        return
    try:
        wandb.login(verify=False)  # whether there is a key, not whether the server can be asked about it
    except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
        raise ValueError(
            f"loop.tracker wandb has no key that it could use: {error} Run `wandb login`, set WANDB_API_KEY, or choose "
            "WANDB_MODE=offline or loop.tracker none"
        ) from error


def _refuses(name: str, error: Exception) -> bool:
    """Whether a failure to start is the user's to mend, and not the network's."""
    if name != "wandb":
        return isinstance(error, (TypeError, ValueError))
    import wandb

    if isinstance(error, (wandb.errors.UsageError, wandb.errors.AuthenticationError)):
        return True
    return isinstance(error, wandb.errors.CommError) and bool(re.search(REFUSALS, str(error), re.IGNORECASE))


def _show_in_wandb(run: WandbRun, rates: dict[str, list[float | None]], samples: list[Sample], step: int) -> None:
    import wandb

    points = [[(depth, rate) for depth, rate in enumerate(curve, 1) if rate is not None] for curve in rates.values()]
    chart = wandb.plot.line_series(
        [[depth for depth, _ in curve] for curve in points],
        [[rate for _, rate in curve] for curve in points],
        keys=list(rates),
        title=f"acceptance rate by depth, step {step}",
        xname="depth",
    )
    shown: dict[str, Any] = {"step": step, "eval/acceptance_rate_by_depth": chart}
    if samples:
        rows = [[step, sample.prompt, sample.marked(), sample.acceptance_length] for sample in samples]
        shown["eval/samples"] = wandb.Table(columns=["step", *COLUMNS], data=rows)
        shown["eval/answers"] = wandb.Html("<hr>".join(sample.html("mark") for sample in samples), inject=False)
    run.log(shown)


def _show_in_tensorboard(writer: Any, rates: dict[str, list[float | None]], samples: list[Sample], step: int) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for tree, curve in rates.items():
        axes.plot(range(1, 1 + len(curve)), [float("nan") if rate is None else rate for rate in curve], label=tree)
    axes.set_xlabel("depth")
    axes.set_ylabel("acceptance rate")
    axes.legend()
    writer.add_figure("eval/acceptance_rate_by_depth", figure, global_step=step)
    if samples:
        writer.add_text("eval/samples", "<hr>".join(sample.html("strong") for sample in samples), global_step=step)
    writer.flush()


def _upload(run: WandbRun, best: Path) -> None:
    import wandb

    name = re.sub(r"[^\w.-]", "-", f"{run.id}-head")
    artifact = wandb.Artifact(name, "model", description="the head with the longest acceptance on held-out prompts")
    artifact.add_dir(str(best))
    run.log_artifact(artifact, aliases=["best"])


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Nested options or numbers as one level of dotted names; those that are not set are left out."""
    if isinstance(value, dict):
        children: Any = value.items()
    elif isinstance(value, list) and any(isinstance(item, float) for item in value):
        children = enumerate(value)
    else:
        plain = value if isinstance(value, (int, float, str, bool)) else str(value)
        return {} if value is None else {name: plain}
    rows: dict[str, Any] = {}
    for key, child in children:
        rows |= flat(child, f"{name}.{key}" if name else str(key))
    return rows


def slashed(values: dict[str, Any]) -> dict[str, Any]:
    """Nested numbers under names by which trackers group them, `train/loss/0`; what was not measured is left out."""
    return {name.replace(".", "/"): value for name, value in flat(json_ready(values)).items()}
