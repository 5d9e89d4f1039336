"""Experiment trackers: numbers of steps (train/) and evaluations (eval/), and the best head.

accelerate's trackers send the numbers, wandb's own functions the head. A tracker that cannot be
reached does not end training: log.jsonl has all numbers, and wandb's offline mode
(`WANDB_MODE=offline`, then `wandb sync`) is for machines without a network.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator
from accelerate.tracking import get_available_trackers

from ..console import log
from ..extras import install_command
from ..heads.checkpoints.files import json_ready
from .config import TrainConfig
from .engines import from_main
from .run_folder import flat

if TYPE_CHECKING:
    from wandb.sdk.wandb_run import Run as WandbRun

REFUSALS = r"\b40[0134]\b|permission|not found"
"""Patterns of the errors with which wandb's server refuses a key, an entity or a project."""


class Tracker:
    """The tracker that `loop.tracker` names.

    Only the main process sends; `start` is called on every process. After a failure nothing more is
    sent: the run goes on without its tracker, and log.jsonl has all numbers.
    """

    def __init__(self, accelerator: Accelerator, best: Path) -> None:
        """Begin nothing yet; `best` is the folder of the best head, which is sent at the end."""
        self.accelerator = accelerator
        self.best = best
        # The tracker that has begun; "none" without one, and on other processes.
        self._name = "none"
        self._upload = False
        self._sends = False

    def start(self, config: TrainConfig, step: int) -> None:
        """Begin the tracker's run, or resume it at `step`.

        By default its id is the output folder's name and a digest of its path.

        Raises:
            ValueError: the tracker refuses a key or an option; on every process.
        """
        if config.loop.tracker == "none":
            return
        # The main process tries; the others wait for the outcome.
        refused: str | None = None
        if self.accelerator.is_main_process:
            refused = self._begin(config, step)
        refused = from_main(self.accelerator, refused)
        if refused is not None:
            raise ValueError(refused)

    def log(self, values: dict[str, Any], step: int) -> None:
        """Send numbers; nested names become `train/loss/0`, None is left out."""
        if not self._sends:
            return
        numbers = flat(json_ready(values))
        by_name = {name.replace(".", "/"): value for name, value in numbers.items()}
        try:
            # wandb's own steps may not go back. A killed run that resumes makes some steps again,
            # so that the step is sent as a number like others.
            if self._name == "wandb":
                self.accelerator.log({"step": step, **by_name})
            else:
                self.accelerator.log(by_name, step=step)
        # Trackers raise errors of their own classes, for network, disk or account.
        except Exception as error:
            self._go_on_without(self._name, error)

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """Send the best head's folder, and end the tracker's run, as failed or finished."""
        if self._name == "wandb":
            run = self.accelerator.get_tracker("wandb", unwrap=True)
            if self._sends and self._upload and self.best.is_dir():
                self._forgiven(lambda: _upload(run, self.best))
            self._forgiven(lambda: run.finish(exit_code=int(error is not None)))
        else:
            for tracker in self.accelerator.trackers:
                self._forgiven(tracker.finish)
        self.accelerator.trackers = []
        self._name = "none"
        self._sends = False

    def _begin(self, config: TrainConfig, step: int) -> str | None:
        """Begin the tracker's run; return the message of a refusal, else None.

        A refusal is an error of the user's, such as a wrong key.
        """
        name = config.loop.tracker
        folder = Path(config.output)
        digest = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()
        try:
            self._init(config, f"{folder.name}-{digest[:8]}", step)
        except Exception as error:  # as in `log`
            self.accelerator.trackers = []
            if _refuses(name, error):
                return (
                    f"loop.tracker {name} refuses this run: {error}; correct its key or the options"
                    " tracking.*, or choose WANDB_MODE=offline or loop.tracker none"
                )
            self._go_on_without(name, error)
            return None
        self._name = name
        self._upload = config.tracking.upload
        self._sends = True
        return None

    def _go_on_without(self, name: str, error: Exception) -> None:
        """Warn, and send nothing more."""
        self._sends = False
        advice = ""
        if name == "wandb":
            advice = "; WANDB_MODE=offline keeps a run on disk for `wandb sync`"
        log.warning(
            f"the tracker {name} cannot be reached: {error}. Training continues without it, and"
            f" log.jsonl has all numbers{advice}"
        )

    def _init(self, config: TrainConfig, run_id: str, step: int) -> None:
        """Begin the tracker's run by accelerate; raise what the tracker raises."""
        tracker = config.loop.tracker
        names = config.tracking
        options = json_ready(dataclasses.asdict(config))
        from_environment = os.environ.get("WANDB_PROJECT") if tracker == "wandb" else None
        project = names.project or from_environment or "headstart"
        # Each tracker has its own way to go on with the run of the same folder.
        more: dict[str, Any] = {}
        if tracker == "wandb":
            more = {
                "id": os.environ.get("WANDB_RUN_ID") or run_id,
                "resume": "allow",
                "name": names.name or os.environ.get("WANDB_NAME") or run_id,
                "entity": names.entity,
                "group": names.group,
                "tags": names.tags or None,
            }
        elif tracker == "trackio":
            more = {"name": names.name or run_id, "resume": "allow"}
            if names.group:
                more["group"] = names.group
        elif step > 0:
            # TensorBoard drops a killed run's rows after its checkpoint; they are sent again.
            more = {"purge_step": step + 1}
        self.accelerator.init_trackers(
            project,
            config=options if tracker == "wandb" else flat(options),
            init_kwargs={tracker: more},
        )
        if tracker == "wandb":
            # Curves over the number "step", see `log`.
            self.accelerator.get_tracker("wandb", unwrap=True).define_metric(
                "*", step_metric="step"
            )

    def _forgiven(self, send: Callable[[], object]) -> None:
        """Send something that the run can do without."""
        try:
            send()
        except Exception as error:  # as in `log`
            log.warning(
                f"the tracker {self._name} did not take all that was sent; training continues:"
                f" {error}"
            )


def check_tracker(config: TrainConfig) -> None:
    """Refuse a tracker without its package, and wandb without a key, before any long work.

    Raises:
        ValueError: what is missing.
    """
    name = config.loop.tracker
    if name == "none":
        return
    if name not in map(str, get_available_trackers()):
        command = install_command("wandb") if name == "wandb" else f"pip install {name}"
        raise ValueError(f"loop.tracker {name} needs a package that is not installed: {command}")
    if name != "wandb":
        return
    import wandb

    # Offline and disabled runs need no key.
    if (os.environ.get("WANDB_MODE") or wandb.setup().settings.mode) not in ("online", "shared"):
        return
    try:
        wandb.login(verify=False)  # checks that there is a key, without asking the server
    except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
        raise ValueError(
            f"loop.tracker wandb has no key that it could use: {error} Run `wandb login`, set"
            " WANDB_API_KEY, or choose WANDB_MODE=offline or loop.tracker none"
        ) from error


def _refuses(name: str, error: Exception) -> bool:
    """Whether a failure to start is an error of the user's, and not of the network."""
    if name != "wandb":
        return isinstance(error, (TypeError, ValueError))
    import wandb

    if isinstance(error, (wandb.errors.UsageError, wandb.errors.AuthenticationError)):
        return True
    return isinstance(error, wandb.errors.CommError) and bool(
        re.search(REFUSALS, str(error), re.IGNORECASE)
    )


def _upload(run: WandbRun, best: Path) -> None:
    import wandb

    name = re.sub(r"[^\w.-]", "-", f"{run.id}-head")
    artifact = wandb.Artifact(
        name, "model", description="the head with the longest acceptance on held-out prompts"
    )
    artifact.add_dir(str(best))
    run.log_artifact(artifact, aliases=["best"])
