"""The training loop: conversations -> frozen target's features -> head's loss -> optimizer step.

    accelerate launch scripts/train.py --config configs/smollm2-medusa.yaml

Started again, a run resumes from its newest checkpoint and ends with the weights that it would have
had without the interruption. Callbacks run code of the caller's own between steps; `train(config,
callbacks=[Stop()])` runs this one:

    class Stop(Callback):
        def on_evaluation(self, progress, row):
            if progress.best_length > 3.0:
                raise Stopped("good enough")
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, set_seed
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from ..console import ProgressBar, log
from ..heads.base import CheckpointMetadata, DraftHead, HeadOutput
from ..heads.by_name import build_head
from ..heads.checkpoints.save_load import save_head
from ..inference.probe import probe_drafts
from ..inference.targets.dtypes import dtype_named
from ..inference.targets.provenance import provenance
from ..stopping import StopFlag, Stopped, stop_on_signals
from .config import TrainConfig, head_options
from .data.batches import Batch, Share, Step, Steps, loaded, worker_deaths_explained
from .engines import (
    actual_engine,
    any_process,
    autocast,
    check_launch,
    end_together,
    from_main,
    prepare,
    resolved,
    shard,
    start,
    state_dtype,
)
from .evaluate import (
    Evaluation,
    evaluate,
    forward_tokens,
    try_evaluation,
)
from .features.by_mode import check_outside_source, feature_source
from .features.sources import OpenSource
from .features.stored import StoredReplay
from .head import objective_of
from .inputs import load_inputs
from .lost_processes import lost_processes_explained
from .machines import require_shared
from .optim import apply_settings, build_optimizer, settings_of
from .profiling import step_profiler
from .report import MetricsLogger, due, write_report
from .run_folder import Progress, RunFolder, as_begun
from .tracking import Tracker, check_tracker


class Callback:
    """Methods that a run calls, on its main process only; a subclass overrides those that it needs.

    Each gets a copy of the run's state. An exception ends the run as Ctrl-C does: `train` writes a
    checkpoint from which the same options resume, and raises it again. A callback raises `Stopped`
    to end the run. Losses and weights do not depend on callbacks, unless they draw from torch's
    global generator.
    """

    def on_step(self, progress: Progress, row: dict[str, Any] | None) -> None:
        """Called after each optimizer step.

        `row` is the step's line of log.jsonl; None if it wrote none (`loop.log_every`).
        """

    def on_evaluation(self, progress: Progress, row: dict[str, Any]) -> None:
        """Called after each evaluation, with its line of log.jsonl.

        The row holds `eval`, `held_out_loss` and `tree`. The best head has been saved by then.
        """

    def on_save(self, progress: Progress, checkpoint: Path) -> None:
        """Called after a checkpoint to resume from has been written, with the state that it holds.

        With `loop.save_in_background` this may be some steps after the checkpoint's own.
        """

    def on_end(self, progress: Progress, folder: Path) -> None:
        """Called once all steps are done, unless the run was stopped.

        best/, last/ and report.md have been written by then.
        """


@dataclass
class Callbacks:
    """The callbacks of a run, with the first exception that one of them raised."""

    callbacks: Sequence[Callback]
    main_process: bool
    error: Exception | None = None

    def call(
        self, method: Callable[..., None], progress: Progress, argument: Any, stop: StopFlag
    ) -> None:
        """Call a method of all callbacks, such as `Callback.on_step`, on the main process.

        The first exception sets `stop`, and no callback is called after it.
        """
        if not self.main_process:
            return
        for callback in self.callbacks:
            if self.error is not None:
                return
            name = method.__name__  # each callback has its own
            try:
                # A copy: a callback that writes to its state must not change the run's.
                getattr(callback, name)(dataclasses.replace(progress), argument)
            except Exception as error:
                self.error = error
                log.warning(f"{type(callback).__name__}.{name} ends the run: {error!r}")
                stop.wanted = True


def train(
    config: TrainConfig, callbacks: Sequence[Callback] = (), source: OpenSource | None = None
) -> Path:
    """Run or resume a training run; return its folder.

    Args:
        config: options of the run.
        callbacks: called between steps, on the main process.
        source: opens where the target's states come from, for `features.mode` served, stored and
            cached; None for the target itself, or the folder of `features`.

    Raises:
        ValueError: invalid options or data, a tracker that cannot run, or a run that cannot be
            resumed.
        Stopped: Ctrl-C or SIGTERM, once a checkpoint has been written.
        Exception: a callback's, once a checkpoint has been written.
    """
    # 1. Refuse what cannot run, before anything is built. Then join the other processes.
    config = as_begun(config)
    check(config, source)
    accelerator, share = start(config)
    run = RunFolder(Path(config.output), accelerator, config.loop.timeout)
    with lost_processes_explained(accelerator, run.newest):
        config = resolved(config, accelerator)
        # Before the head is built: its first weights come from torch's global generator.
        set_seed(config.loop.seed)

        # 2. Take the folder, or check that the run in it has these options. It must be the same
        # one on every machine.
        require_shared(accelerator, run.folder, "output")
        if config.features.mode != "online" and config.features.folder is not None:
            require_shared(accelerator, Path(config.features.folder), "features.folder")
        run.claim(config)

        # 3. A finished run has nothing to do. It may have been killed before its report was
        # written.
        if from_main(accelerator, run.last.exists()):
            log.info(f"{run.folder} is finished: its heads are {run.best} and {run.last}")
            if accelerator.is_main_process and not (run.folder / "report.md").exists():
                log.info(f"the report: {write_report(run.folder)}")
            end_together(accelerator)
            return run.folder

        # 4. Train. The tracker learns of a failure, whatever raised it.
        called = Callbacks(callbacks, accelerator.is_main_process)
        with Tracker(accelerator, run.best) as tracker, closing(run):
            unfinished = Trainer(run, share, config, tracker, called, source).train()
        end_together(accelerator)

    # 5. Tell the caller why the run stopped. A callback's own exception comes first.
    if called.error is not None:
        raise called.error
    if unfinished is not None:
        raise Stopped(unfinished)
    return run.folder


def check(config: TrainConfig, source: OpenSource | None) -> None:
    """Refuse a run that cannot start here; what options alone decide, `TrainConfig` has refused.

    Raises:
        ValueError: what is wrong, and what is valid.
    """
    check_launch(config)  # the launch file, and what is left in the environment
    objective_of(config)  # options of the head, and whether it can be trained on this objective
    check_outside_source(config, source)
    check_tracker(config)  # its package, and its key


@dataclass(frozen=True)
class Wishes:
    """Wishes of a process, or of any process, for the end of a step."""

    stop: bool = False
    save: bool = False


class Trainer:
    """A run from its newest checkpoint, or its first step, to its last: built here, then trained.

    Between two steps it evaluates and saves; `metrics` reports and tracks, `profiler` profiles, and
    `callbacks` are the user's.
    """

    def __init__(
        self,
        run: RunFolder,
        share: Share,
        config: TrainConfig,
        tracker: Tracker,
        callbacks: Callbacks,
        source: OpenSource | None,
    ) -> None:
        accelerator = run.accelerator
        loop = config.loop
        self.run = run
        self.share = share
        self.config = config
        self.callbacks = callbacks

        # 1. The target, the data and the head, compared with those of an earlier start.
        inputs = load_inputs(config, accelerator, run.folder, outside=source)
        run.check_inputs_unchanged(config, inputs.digests)
        self.inputs = inputs
        self.steps = loop.max_steps or inputs.order.count(loop.epochs)
        head = inputs.head.to(accelerator.device)
        size = sum(parameter.numel() for parameter in head.parameters())

        # 2. What is trained: the head, or head and adapter in one module, since an engine drives
        # one.
        trained: nn.Module = head
        self.adapted: nn.Module | None = None  # the target with its adapter
        slower: dict[int, float] = {}  # by parameter id: what its learning rate is divided by
        if config.adapter.rank > 0:
            from .adapter import JointModule  # imports peft, which takes a second

            trained = joint = JointModule(inputs.target, head, inputs.objective, config.adapter)
            self.adapted = joint.peft
            slower = {id(weight): config.adapter.head_lr_ratio for weight in joint.adapter.values()}

        # 3. The engine that the launch file chose, and the optimizer. Sharding comes first: the
        # optimizer must hold the sharded parameters.
        trained = trained.to(accelerator.device)
        shard(accelerator, trained, loop.shard_over)
        optimizer, self.schedule = build_optimizer(trained, config.optim, self.steps, slower)
        self.module, self.optimizer = prepare(accelerator, trained, optimizer, loop.precision)
        # A checkpoint holds it besides module and optimizer.
        accelerator.register_for_checkpointing(self.schedule)
        run.check_space(checkpoint_bytes(self.module), loop.keep)
        # The first evaluation may be hours away: what would end it is to end the run now.
        if from_main(accelerator, run.newest() is None):
            target = inputs.replay or inputs.target
            copy = copied_head(head, config)
            tokens = forward_tokens(config)
            try_evaluation(target, copy, inputs.objective, inputs.held_out, config.eval, tokens)
            del copy
        # Heads that draw while they train must not draw the same on every process.
        torch.manual_seed(loop.seed + share.process)

        # 4. The newest checkpoint, if there is one. It replaces weights, optimizer, schedule and
        # random state. The options of the optimizer are those of this start.
        settings = settings_of(self.schedule)
        self.progress = progress = run.resume(actual_engine(self.module))
        apply_settings(self.schedule, settings)
        tracker.start(config, progress.step)
        # The run had already stopped early, and was killed before its last evaluation: no step is
        # left.
        if 0 < loop.patience <= progress.falling:
            self.steps = progress.step
        # Steps before this one train the head alone; from it on, the adapter learns too.
        self.joint_from = round(config.adapter.heads_first * self.steps)
        log.info(
            f"{type(head).__name__}: {size:,} parameters; its {head.draft_vocab_size:,} tokens"
            f" cover {inputs.coverage:.2%} of the answers; {len(inputs.training)} sequences to"
            f" train on, {len(inputs.held_out)} held out; {progress.engine}; step {progress.step}"
            f" of {self.steps}"
        )

        # 5. What yields the target's features.
        epochs = self.steps / inputs.order.steps_in(0)
        self.features = feature_source(
            accelerator,
            inputs.target,
            head,
            inputs.provenance,
            inputs.training,
            config,
            epochs,
            inputs.source,
            source,
        )

        # 6. What watches the steps.
        self.metrics = MetricsLogger(
            run, tracker, loop.log_every, self.steps, epochs / self.steps, progress
        )
        self.profiler = step_profiler(
            loop.profile, run.folder / "profile", accelerator.process_index, progress.step + 1
        )
        self.stop = StopFlag()
        self.saved_at = time.monotonic()

    def train(self) -> str | None:
        """Make the remaining steps, with evaluations and checkpoints between them.

        Ctrl-C and SIGTERM set a flag, which is looked at after each step and between the parts of
        an evaluation.

        Returns:
            How far the run has come if it was stopped, once a checkpoint has been written; else
            None.
        """
        progress = self.progress
        loop = self.config.loop
        metrics = self.metrics
        epoch = None
        agreed_on = Wishes()
        with stop_on_signals() as self.stop, worker_deaths_explained():
            with (
                ProgressBar("training steps", self.steps, progress.step) as bar,
                closing(self.batches()) as batches,
                self.profiler or nullcontext() as profiler,
            ):
                while True:
                    # 1. Evaluate, and then save, so that the checkpoint knows of the evaluation.
                    if not self.evaluate_if_due():
                        break
                    due_now = agreed_on.save or due(progress.step, loop.save_every)
                    if due_now and 0 < progress.step < self.steps:
                        self.save(loop.save_in_background)

                    # 2. Stop? Several processes have agreed on it during the last step; one alone
                    # can look now, and so before its first step.
                    alone = self.run.accelerator.num_processes == 1
                    stopping = self.stop.wanted if alone else agreed_on.stop
                    if progress.step == self.steps or stopping:
                        break

                    # 3. One optimizer step. Steps count from 1; `progress.step` are made so far.
                    number = progress.step + 1
                    if profiler is not None:
                        profiler.step()
                    metrics.start_step()
                    data = next(batches)
                    self.check_states(data)
                    # States that were computed in one epoch are read in the next.
                    if data.epoch != epoch:
                        self.features.flush(self.run.accelerator)
                    epoch = data.epoch
                    # Processes agree on their wishes in the sum of the loss: the one exchange that
                    # a step has anyway. A checkpoint may be due by the clock, or the last one could
                    # not be written.
                    late = time.monotonic() - self.saved_at >= 60 * (loop.save_minutes or math.inf)
                    wishes = Wishes(self.stop.wanted, late or self.run.failed())
                    outputs, norm, agreed_on = self.gradients(data, wishes)
                    lr = self.update()

                    # 4. Count it only now that weights, optimizer and schedule include it.
                    progress.step = number
                    progress.answer_tokens += data.answer_tokens
                    row = metrics.end_step(outputs, norm, lr)
                    self.callbacks.call(Callback.on_step, progress, row, self.stop)
                    self.tell_of_saves()
                    bar.update(number, metrics.note)
            return self.finish()

    def batches(self) -> Generator[Step]:
        """Read the batches of the remaining steps ahead."""
        config = self.config
        on_cpu = self.run.accelerator.device.type == "cpu"
        workers = config.data.workers
        if workers is None:
            # On a CPU workers take cores from the steps, which pays only for states that are
            # served: a worker then waits for the network.
            workers = 0 if on_cpu and config.features.mode != "served" else 2
        # A batch's shortest row: depth d predicts the token at t + 2 + d, so that a row of
        # max_depth + 2 tokens gives every depth a gradient on every process.
        shortest = self.inputs.head.max_depth + 2
        steps = Steps(self.inputs.training, self.share, shortest, self.features.read_ahead)
        pin = self.run.accelerator.device.type == "cuda"
        return loaded(steps, self.inputs.order, self.progress.step, workers, pin)

    def check_states(self, data: Step) -> None:
        """End the run where its source of states has failed; the state between two steps is saved.

        Raises:
            ValueError: states of these batches are missing, here or in another process.
        """
        if self.inputs.source is None:
            return
        failed = [batch.failure for batch in data.batches if batch.failure]
        if any_process(self.run.accelerator, bool(failed)):
            if self.progress.step > 0:
                self.save(background=False)
            raise ValueError(failed[0] if failed else "another process has no states")

    def gradients(self, data: Step, wishes: Wishes) -> tuple[list[HeadOutput], float, Wishes]:
        """Run the forwards and backwards of a step.

        Weights do not change, unless the engine is DeepSpeed, whose last backward makes the step.

        Args:
            data: batches of the step.
            wishes: what this process wishes for the end of the step.

        Returns:
            The outputs of the forwards, the gradient norm, and what any process wishes.
        """
        accelerator = self.run.accelerator
        config = self.config
        module = self.module
        clock = self.metrics.clock
        batches = data.batches
        deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
        # A step's loss is the mean over the answer tokens of all its batches, on all processes. A
        # batch's loss is a sum over its tokens, but engines average gradients over processes, and
        # DeepSpeed over forwards too. The scale undoes these averages:
        #     scale = processes * (forwards with DeepSpeed, else 1) / answer tokens
        # For example, 2 processes and 100 tokens: each gradient is scaled by 2 / 100, and averaged.
        averaged_over = self.share.processes
        if deepspeed:
            averaged_over *= self.share.forwards
        scale = averaged_over / max(data.answer_tokens, 1)
        outputs: list[HeadOutput] = []
        arguments: tuple[Any, ...]
        loss = 0.0

        # 1. Forwards and backwards, batch by batch; gradients add up.
        for number, batch in enumerate(batches, start=1):
            last = number == len(batches)
            accelerator.sync_gradients = last  # gradients are exchanged once a step
            if isinstance(module, FSDPModule):  # accelerate does not know of it
                module.set_requires_gradient_sync(last)
                module.set_reshard_after_backward(last)  # and weights are gathered once a step
            with nullcontext() if last else accelerator.no_sync(module):
                clock.part("target")
                with record_function("target"):
                    if self.adapted:
                        # The joint module runs the target itself, whose adapter needs gradients.
                        adapt = self.progress.step >= self.joint_from
                        arguments = (batch, adapt)
                    else:
                        dtype = state_dtype(config.loop.precision, self.inputs.target.dtype)
                        arguments = (self.features(batch, dtype), self.inputs.objective)
                clock.part("head")
                with autocast(accelerator, config.loop.precision), record_function("head"):
                    output = module(*arguments)
                # Without the graph, whose views hold keys and values that no backward frees.
                outputs.append(output._replace(loss=output.loss.detach()))
                # DeepSpeed's last backward makes the optimizer step: a loss that is not finite must
                # be noticed before it.
                if deepspeed and last:
                    loss, _, wishes = agreed(accelerator, outputs, wishes)
                    self.check_finite("loss", loss, batches)
                with record_function("head, backward"):
                    accelerator.backward(output.loss * scale)
                del output, arguments  # before the next forward makes its own

        # 2. Clip, and agree with the other processes.
        clock.part("optimizer")
        clipped = accelerator.clip_grad_norm_(module.parameters(), config.optim.clip)
        if deepspeed:
            norm = float(clipped)
        else:
            loss, norm, wishes = agreed(accelerator, outputs, wishes, clipped)
            self.check_finite("loss", loss, batches)
        self.check_finite("gradient norm", norm, batches)
        return outputs, norm, wishes

    def update(self) -> float:
        """Step the optimizer and the schedule; return the step's learning rate."""
        lr = float(self.schedule.get_last_lr()[0])
        with record_function("optimizer"):
            self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return lr

    def check_finite(self, what: str, value: float, batches: list[Batch]) -> None:
        """Raise a ValueError before a step that would spoil the weights."""
        if math.isfinite(value):
            return
        numbers = sorted(number for batch in batches for number in batch.conversations)
        # A checkpoint may still be being written in the background; the message names the newest.
        self.run.close()
        newest = self.run.newest()
        config_file = self.run.folder / "config.yaml"
        lower = f"{self.config.optim.lr / 2:g}"
        how = "nothing was saved yet, so begin with that"
        if newest is not None:
            how = (
                f"to resume from there, set optim.lr to {lower} in {config_file} and give the same"
                f" command with --optim.lr {lower}"
            )
        raise ValueError(
            f"step {self.progress.step + 1}: the {what} is {value}; training stops. Its batch held"
            f" the conversations {numbers} (counted from 0 over all sources). The newest checkpoint"
            f" is {newest or 'not yet written'}; a lower optim.lr or a larger optim.warmup often"
            f" helps: {how}"
        )

    def evaluate_if_due(self) -> bool:
        """Evaluate between two steps; return False, on all processes, if that was stopped."""
        progress = self.progress
        # A run that resumes at a step that it has already evaluated (`progress.judged`) does not do
        # so again, and the last step has an evaluation of its own.
        between = progress.judged < progress.step < self.steps
        if not (between and due(progress.step, self.config.loop.eval_every)):
            return True
        evaluation = self.evaluate_and_save()
        if evaluation is None:
            return False
        # Stop early after `patience` evaluations in a row in which the held-out loss fell and
        # acceptance stayed below its best.
        loss = sum(evaluation.loss_K)
        fell = loss < progress.held_out_loss
        progress.held_out_loss = loss
        shorter = evaluation.acceptance_length < progress.longest_length
        progress.falling = progress.falling + 1 if fell and shorter else 0
        if from_main(self.run.accelerator, 0 < self.config.loop.patience <= progress.falling):
            self.steps = progress.step
        return True

    def evaluate_and_save(self, last: bool = False) -> Evaluation | None:
        """Measure the head's acceptance; save the head if it is the best so far, or the last.

        Its adapter, if there is one, is saved with it.

        Returns:
            The evaluation; None, on all processes, if it was stopped.
        """
        run = self.run
        inputs = self.inputs
        config = self.config
        progress = self.progress
        accelerator = run.accelerator
        target = inputs.target

        # 1. Copy the head: what is measured is what is served. A run that was never evaluated has
        # one to use from now on, whatever becomes of the measurement.
        copy = copied_head(inputs.head, config)
        record = {
            **provenance(),
            "config": dataclasses.asdict(config),
            **dataclasses.asdict(progress),
        }
        del record["longest_prompts"]  # a pair of numbers for each prompt, of no use to a reader
        if changes := run.changes():
            record["changes"] = changes
        metadata = CheckpointMetadata(
            training=record,
            provenance=inputs.provenance,
            adapted=self.adapted is not None,
        )
        if last and accelerator.is_main_process and not run.best.exists():
            save_head(copy, run.best, metadata, self.adapted)
            log.info(
                f"training is done, and the head is {run.best}; its acceptance is measured now"
            )

        # 2. Measure it on the held-out conversations.
        replay = inputs.replay or target
        evaluation = evaluate(
            replay,
            copy,
            inputs.objective,
            inputs.held_out,
            config.eval,
            accelerator,
            self.stop,
            forward_tokens(config),
        )
        if evaluation is None:
            return None
        # The best head and early stopping follow from the figures, which may differ between
        # processes in the last digit.
        evaluation = from_main(accelerator, evaluation)

        # 3. Write down what a checkpoint says of itself. The probe holds a few drafts, by which a
        # loader can check that it computes the same.
        measured = {"coverage": inputs.coverage, **evaluation.measured(config.eval)}
        probe = (
            replay.probe(copy) if isinstance(replay, StoredReplay) else probe_drafts(target, copy)
        )
        if probe is not None:
            measured["probe"] = probe
        metadata = dataclasses.replace(metadata, tree=evaluation.tree, measured=measured)

        # 4. Is it the best? Yes, unless its acceptance is significantly shorter: of heads that
        # cannot be told apart the later one is kept. The main process decides, since others may
        # look for best/ after it has been saved.
        better = from_main(
            accelerator,
            not evaluation.shorter_than(progress.longest_prompts) or not run.best.exists(),
        )
        if better:
            progress.best_step = progress.step
            progress.best_length = evaluation.acceptance_length
        # The comparison is with the longest acceptance so far. best/ may hold a later head that is
        # slightly shorter; were it compared with, best/ could get worse little by little.
        if evaluation.acceptance_length > progress.longest_length:
            progress.longest_length = evaluation.acceptance_length
            progress.longest_prompts = evaluation.prompts

        # 5. Log it, then save.
        row = self.metrics.log_evaluation(evaluation)
        for folder, wanted in ((run.best, better), (run.last, last)):
            if wanted and accelerator.is_main_process:
                save_head(copy, folder, metadata, self.adapted)
        progress.judged = progress.step
        self.callbacks.call(Callback.on_evaluation, progress, row, self.stop)
        return evaluation

    def save(self, background: bool) -> None:
        """Write a checkpoint to resume from."""
        # A run that resumes from here must find the states that it has trained on.
        self.features.flush(self.run.accelerator)
        # One write at a time.
        self.run.wait()
        self.tell_of_saves()  # of the last checkpoint, before the next one may remove it
        self.run.save(self.progress, self.config.loop.keep, background)
        self.tell_of_saves()
        self.saved_at = time.monotonic()

    def tell_of_saves(self) -> None:
        """Tell the callbacks of checkpoints that have become complete."""
        for saved, checkpoint in self.run.written():
            self.callbacks.call(Callback.on_save, saved, checkpoint, self.stop)

    def finish(self) -> str | None:
        """Save; after the last step, evaluate and report too. Return as `train` does."""
        step = self.progress.step
        metrics = self.metrics
        if self.inputs.source is not None and metrics.stepped > 0:
            log.info(
                f"steps waited {metrics.waited:.1f} of {metrics.stepped:.1f} s for their states"
            )
        # Before the last evaluation: killed during it, the run resumes with no step left.
        self.save(background=False)
        if step < self.steps:
            return f"stopped at step {step} of {self.steps}; the same command resumes from there"
        if self.evaluate_and_save(last=True) is None:
            return (
                "stopped in the last evaluation, which the same command begins again;"
                f" {self.run.best} is a head already"
            )
        # best/ and last/ are written.
        if self.run.accelerator.is_main_process:
            log.info(f"the report: {write_report(self.run.folder)}")
        self.callbacks.call(Callback.on_end, self.progress, self.run.folder, self.stop)
        return None


def checkpoint_bytes(module: nn.Module) -> int:
    """Estimate a checkpoint's bytes on disk: trained weights with two optimizer states for each."""
    return sum(
        3 * weight.numel() * weight.element_size()
        for weight in module.parameters()
        if weight.requires_grad
    )


def copied_head(head: DraftHead, config: TrainConfig) -> DraftHead:
    """Copy the head, whole and in the dtype in which it is saved, to host memory."""
    name, _ = head_options(config)  # FSDP2 gives the head's class another name
    copy = build_head(name, dataclasses.asdict(head.config), head.target)
    # An engine may have sharded the weights, so that all processes gather them here.
    copy.load_state_dict(get_model_state_dict(head, options=StateDictOptions(full_state_dict=True)))
    return copy.to(dtype_named(config.loop.save_dtype))


def agreed(
    accelerator: Accelerator, outputs: list[HeadOutput], wishes: Wishes, norm: Tensor | None = None
) -> tuple[float, float, Wishes]:
    """Return the loss summed over processes, the gradient norm, and what any process wishes."""
    loss = torch.stack([output.loss for output in outputs]).sum()
    # Filled on the device: a copy from the host would wait for it.
    flags = [torch.full_like(loss, float(wish)) for wish in (wishes.stop, wishes.save)]
    # One exchange of three numbers: [loss, processes that wish to stop, that wish to save].
    everyone = accelerator.reduce(torch.stack([loss, *flags]), "sum")
    # FSDP2 returns the norm in parts; all engines return that of all processes.
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    norm = torch.zeros_like(loss) if norm is None else norm.to(loss)
    # sync: once a step, so that no step spoils the weights and all processes stop at the same one
    total, stopping, saving, full_norm = torch.cat([everyone, norm[None]]).tolist()
    return total, full_norm, Wishes(stopping > 0, saving > 0)
