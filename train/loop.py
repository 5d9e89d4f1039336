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
import hashlib
import math
import time
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, set_seed
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.profiler import record_function
from transformers import PreTrainedTokenizerBase

from ..console import ProgressBar, log
from ..heads.base import CheckpointMetadata, DraftHead, HeadOutput
from ..heads.checkpoints.save_load import copy_weights, load_head, save_head
from ..heads.layers.draft_vocab import favouring
from ..heads.mtp.native import NATIVE
from ..heads.objective import Objective
from ..inference.engines.target import Target
from ..inference.head_loading import native_head
from ..inference.outer_modules import OuterTarget
from ..inference.probe import probe_drafts
from ..inference.replay import ReplayTarget
from ..inference.targets.dtypes import dtype_named
from ..inference.targets.loading import load_tokenizer, target_facts
from ..inference.targets.provenance import provenance
from ..inference.text.chat_template import data_origin, warn_of_unread_variables
from ..stopping import StopFlag, Stopped, stop_on_signals
from .config import TrainConfig
from .data.bad_rows import settle_unused_rows
from .data.batches import Batch, Order, Share, Step, Steps, loaded, worker_deaths_explained
from .data.chat_template import Example
from .data.conversations import Source, open_sources
from .data.split import check_renders, rendering, split_cache
from .data.token_cache import (
    Rendering,
    TokenCache,
    TokenizedSequences,
    cached_sequences,
    count_answer_tokens,
    digest_of,
    lengths_of,
)
from .engines import (
    actual_engine,
    autocast,
    end_together,
    from_main,
    prepare,
    resolved,
    shard,
    start,
    state_dtype,
)
from .evaluate import Evaluation, eval_prompts, evaluate, judged, sample_answers
from .features.by_mode import (
    check_outside_source,
    check_source,
    feature_source,
    needs_no_target,
    open_source,
)
from .features.online import OnlineFeatures, online_features
from .features.placement import load_target
from .features.sources import OpenSource, StateSource
from .features.stored import StoredFeatures, StoredReplay
from .head import head_of, objective_of
from .lost_processes import lost_processes_explained
from .machines import require_shared
from .optim import apply_settings, build_optimizer, settings_of
from .profiling import StepProfiler
from .report import MetricsLogger, StepClock, count_flops, due, write_report
from .run_folder import Progress, RunFolder, as_begun
from .tracking import Tracker, check_tracker

TIMED_STEPS = 3
"""Steps whose mean time is a step's time."""
SAMPLE = 4
"""Sequences on which a step's arithmetic is counted."""


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

        The best head has been saved by then.

        The row holds `eval`, `held_out_loss` and `tree`.
        """

    def on_save(self, progress: Progress, checkpoint: Path) -> None:
        """Called after a checkpoint to resume from has been written, with the state that it holds.

        Some steps later, if it was written in the background (`loop.save_in_background`).
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

    def call(self, name: str, progress: Progress, given: Any, stop: StopFlag | None = None) -> None:
        """Call a method of all callbacks, on the main process.

        The first exception sets `stop`, and no callback is called after it.
        """
        for callback in self.callbacks if self.main_process else ():
            if self.error is not None:
                return
            try:
                getattr(callback, name)(dataclasses.replace(progress), given)
            except Exception as error:
                self.error = error
                log.warning(f"{type(callback).__name__}.{name} ends the run: {error!r}")
                if stop is not None:
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
    config = as_begun(config)
    accelerator, share = start(config)
    run = RunFolder(Path(config.output), accelerator, config.loop.timeout)
    with lost_processes_explained(accelerator, run.newest):
        return train_in(run, share, config, callbacks, source)


def train_in(
    run: RunFolder,
    share: Share,
    config: TrainConfig,
    callbacks: Sequence[Callback],
    source: OpenSource | None,
) -> Path:
    """`train`, with the processes that have been joined."""
    accelerator = run.accelerator
    config = resolved(config, accelerator)
    set_seed(config.loop.seed)
    require_shared(accelerator, run.folder, "output")
    if config.features.mode != "online" and config.features.folder is not None:
        require_shared(accelerator, Path(config.features.folder), "features.folder")
    run.claim(config)
    if from_main(accelerator, run.last.exists()):
        log.info(f"{run.folder} is finished: its heads are {run.best} and {run.last}")
        if accelerator.is_main_process and not (run.folder / "report.md").exists():
            log.info(f"the report: {write_report(run.folder)}")
        end_together(accelerator)
        return run.folder
    check_tracker(config)
    tracker = Tracker(accelerator)
    called = Callbacks(callbacks, accelerator.is_main_process)
    failed = True
    try:
        unfinished = run_steps(run, share, config, tracker, called, source)
        failed = False
    finally:
        run.close()
        tracker.close(run.best, failed)
    accelerator.end_training()
    if called.error is not None:
        raise called.error
    if unfinished is not None:
        raise Stopped(unfinished)
    return run.folder


def run_steps(
    run: RunFolder,
    share: Share,
    config: TrainConfig,
    tracker: Tracker,
    callbacks: Callbacks,
    source: OpenSource | None,
) -> str | None:
    """Make a run's remaining steps, with evaluations and checkpoints between them.

    Ctrl-C and SIGTERM set a flag, which is looked at after each step and between the parts of an
    evaluation.

    Returns:
        How far the run is if it was stopped, once a checkpoint has been written; else None.
    """
    accelerator = run.accelerator
    inputs = load_inputs(config, accelerator, run.folder, outside=source)
    run.settle(config, inputs.digests)
    target, head, training = inputs.target, inputs.head.to(accelerator.device), inputs.training
    size = sum(parameter.numel() for parameter in head.parameters())
    steps = config.loop.max_steps or inputs.order.count(config.loop.epochs)
    state = build_state(run, share, inputs, config, steps)
    run.check_space(checkpoint_bytes(state.module), config.loop.keep)
    # random draws of heads while training differ by process
    torch.manual_seed(config.loop.seed + share.process)
    settings = settings_of(state.schedule)
    progress = run.resume(actual_engine(state.module))
    apply_settings(state.schedule, settings)
    tracker.start(config, progress.step)
    # it had stopped early, and was killed before its last evaluation
    if 0 < config.loop.patience <= progress.falling:
        steps = progress.step
    log.info(
        f"{type(head).__name__}: {size:,} parameters; its {head.draft_vocab_size:,} tokens cover"
        f" {inputs.coverage:.2%} of the answers; {len(training)} sequences to train on,"
        f" {len(inputs.held_out)} held out; {progress.engine}; step {progress.step} of {steps}"
    )
    epochs = steps / inputs.order.steps_in(0)
    features = feature_source(
        accelerator,
        target,
        head,
        inputs.provenance,
        training,
        config,
        epochs,
        inputs.source,
        source,
    )
    cached, adapted = (
        config.features.mode in ("cached", "stored", "served"),
        config.adapter.rank > 0,
    )
    # Of a target that is here, without its cache, which counting must not fill.
    features_of = partial(online_features, target, head) if inputs.source is None else features
    flops = count_flops(features_of, head, inputs.objective, training[:SAMPLE], cached, adapted)
    metrics = MetricsLogger(
        run, tracker, config.loop.log_every, steps, epochs / steps, progress, flops
    )
    joint_from = round(config.adapter.heads_first * steps)
    profiler = StepProfiler(
        config.loop.profile, run.folder / "profile", accelerator.process_index, progress.step + 1
    )
    # As long as the deepest draft, so that every depth gives every process a gradient.
    reader = Steps(training, share, head.max_depth + 2, features.read_ahead)
    workers = config.data.workers
    if workers is None:
        workers = 2 if accelerator.device.type != "cpu" or config.features.mode == "served" else 0

    saved_at = time.monotonic()

    def save(background: bool) -> None:
        nonlocal saved_at
        # a run that resumes from here finds the states that it has trained on
        features.settle(accelerator)
        run.wait()
        tell_of_saves()  # before the next one removes an older one
        run.save(progress, config.loop.keep, background)
        tell_of_saves()
        saved_at = time.monotonic()

    def tell_of_saves() -> None:
        for saved, checkpoint in run.written():
            callbacks.call("on_save", saved, checkpoint, stop)

    def save_is_due() -> bool:
        minutes = config.loop.save_minutes
        return minutes is not None and time.monotonic() - saved_at >= 60 * minutes

    with stop_on_signals() as stop, worker_deaths_explained():
        with (
            ProgressBar("training steps", steps, progress.step) as bar,
            closing(
                loaded(
                    reader, inputs.order, progress.step, workers, accelerator.device.type == "cuda"
                )
            ) as batches,
        ):
            last_epoch = None
            stopping = saving = False
            while True:
                if (
                    due(progress.step, config.loop.eval_every)
                    and progress.judged < progress.step < steps
                ):
                    found = evaluate_and_save(state, metrics, stop, callbacks)
                    if found is None:
                        break
                    if from_main(accelerator, stops_early(progress, found, config.loop.patience)):
                        steps = progress.step
                if (
                    saving or due(progress.step, config.loop.save_every)
                ) and 0 < progress.step < steps:
                    save(config.loop.save_in_background)
                if accelerator.num_processes == 1:
                    stopping = stop.wanted
                if progress.step == steps or stopping:
                    break
                profiler.begin(progress.step + 1)
                metrics.start_step()
                data = next(batches)
                if data.epoch != last_epoch:
                    features.settle(accelerator)
                last_epoch = data.epoch
                number = progress.step + 1
                adapt = progress.step >= joint_from
                # Processes agree on both in the sum of the loss: the one exchange that a step has
                # anyway.
                wishes = Wishes(stop.wanted, save_is_due() or run.failed())
                outputs, norm, agreement = gradients(
                    state, data, features, metrics.clock, number, adapt, wishes
                )
                stopping = agreement.stop
                saving = agreement.save
                lr = update(state)
                progress.step = number
                progress.answer_tokens += data.answer_tokens
                callbacks.call("on_step", progress, metrics.end_step(outputs, norm, lr), stop)
                tell_of_saves()
                profiler.end(progress.step)
                bar.update(progress.step, metrics.note)
        profiler.close()
        if inputs.source is not None and metrics.stepped > 0:
            log.info(
                f"steps waited {metrics.waited:.1f} of {metrics.stepped:.1f} s for their states"
            )
        save(background=False)
        if progress.step < steps:
            return (
                f"stopped at step {progress.step} of {steps}; the same command resumes from there"
            )
        if evaluate_and_save(state, metrics, stop, callbacks, last=True) is None:
            return "stopped in the last evaluation; the same command resumes from there"
        if accelerator.is_main_process:
            log.info(f"the report: {write_report(run.folder)}")
        callbacks.call("on_end", progress, run.folder)
        end_together(accelerator)
    return None


@dataclass(frozen=True)
class Inputs:
    """Target, head and data of a run, loaded and checked."""

    target: Target
    head: DraftHead
    objective: Objective
    tokenizer: PreTrainedTokenizerBase
    provenance: dict[str, Any]
    """Identity of target and tokenizer, saved with the head."""
    training: Sequence[Example]
    """Read from the cache as they are accessed."""
    held_out: list[Example]
    order: Order
    """Order of the training sequences, by steps."""
    coverage: float
    """Share of the answers' tokens that are in the draft vocabulary."""
    digests: dict[str, str]
    """Of the sequences to train on, the target's weights and the tokenizer."""
    replay: ReplayTarget | None = None
    """The target for evaluations; None where training changes it."""
    source: StateSource | None = None
    """Where all states come from, if the target's blocks are not loaded."""


def load_inputs(
    config: TrainConfig,
    accelerator: Accelerator,
    folder: Path | None = None,
    outer: bool | None = None,
    outside: OpenSource | None = None,
) -> Inputs:
    """Load data, target and head.

    Invalid options or data raise a ValueError before the target is loaded.

    Rows that cannot be used are written to a file in `folder`, if one is given. `outer` loads no
    more of the target than its outer modules, and opens no source of states; None does as
    `features.mode` says, with the source from `outside` if it is given.
    """
    if outer is None:
        check_outside_source(config, outside)
    # mistakes in the options are reported before a model is loaded
    objective = objective_of(config)
    sources = open_sources(config.data.sources, config.data.max_conversations)
    tokenizer = load_tokenizer(config.target, config.target_revision)
    check_renders(tokenizer, sources, config.target)
    if accelerator.is_main_process:
        warn_of_unread_variables(tokenizer, config.data.thinking, config.data.template_kwargs)
    # The data before the target, whose loading takes minutes, unless only loading it tells how they
    # are read.
    without_blocks = needs_no_target(config) if outer is None else outer
    load = partial(load_target, config, accelerator, without_blocks)
    known = target_facts(config.target, config.target_revision) or load()
    how = rendering(config, known, tokenizer)
    cache, training, held_out = load_data(config, accelerator, sources, how, folder)
    target = known if isinstance(known, Target) else load()
    if (actual := rendering(config, target, tokenizer)) != how:  # its configs did not say all
        cache, training, held_out = load_data(config, accelerator, sources, actual, folder)
    head = head_of(config, target.info, target.config)
    head.recompute = config.loop.recompute
    target.check_layers(head.feature_layers)
    target.check_features()
    target.check_decoding()
    origin = data_origin(tokenizer, config.data.thinking, config.data.template_kwargs)
    provenance = {**target.provenance, **origin}
    replay: ReplayTarget | None = None
    source: StateSource | None = None
    if not isinstance(target, OuterTarget):
        # A sharded target, too: plain answers take a fixed number of forwards, whatever a process
        # computes. With drafts a token that rounding decides would give one process a round more,
        # in which it waits for ever.
        replay = None if config.adapter.rank > 0 else ReplayTarget(target)
    elif outer is None:
        source = open_source(config, accelerator, target, head, provenance, outside)
        held_out = judged(held_out, config.eval)
        check_source(source, accelerator, target, training, held_out)
        replay = StoredReplay(target, source, held_out)
    # fails now and not at the first evaluation
    eval_prompts(replay or target, held_out, config.eval)
    counts_V = count_answer_tokens(training, target.info.vocab_size)
    if config.init_from is None:
        head.initialize(target.modules, counts_V)
    else:
        warm_start(head, config.init_from, target, counts_V, provenance)
    mask_token = getattr(head, "mask_token", None)
    if mask_token is not None and counts_V[mask_token]:
        log.info(
            f"the mask token, {mask_token}, stands {int(counts_V[mask_token])} times in the"
            " answers: better head.mask_token_id is a token that no text holds"
        )
    covered = counts_V[head.vocabulary()].sum() / counts_V.sum()
    data, loop, own = config.data, config.loop, cache.sources_of(training.conversations)
    lengths = lengths_of(training)
    order = Order(
        lengths, loop.batch_size, loop.seed, data.pack, own, data.weights, loop.batch_tokens
    )
    # which source a sequence is of matters for nothing else
    weighted = "" if data.weights is None else str(own)
    digests = {
        "data": hashlib.sha256(digest_of(training) + weighted.encode()).hexdigest()[:16],
        # by names that files of some models lack
        "weights": str(provenance.get("weights", "unknown")),
        "tokenizer": str(provenance["tokenizer"]),
    }
    return Inputs(
        target,
        head,
        objective,
        tokenizer,
        provenance,
        training,
        held_out,
        order,
        float(covered),
        digests,
        replay,
        source,
    )


def load_data(
    config: TrainConfig,
    accelerator: Accelerator,
    sources: list[Source],
    how: Rendering,
    folder: Path | None,
) -> tuple[TokenCache, TokenizedSequences, list[Example]]:
    """Tokenize the sources, check their rows, and split off the held-out sequences."""
    cache = cached_sequences(sources, how, config.data.cache, config.data.num_proc)
    settle_unused_rows(cache, config.data, how.max_length, folder, accelerator.is_main_process)
    training, held_out = split_cache(cache, config)
    check_same_everywhere(accelerator, training)
    return cache, training, held_out


def warm_start(
    head: DraftHead, source: str, target: Target, counts_V: Tensor, provenance: dict[str, Any]
) -> None:
    """Start from the weights of another head, or of the MTP head that the target brings, "mtp".

    A ValueError if it does not fit.

    The draft vocabulary follows the data: it is the most frequent tokens of these answers, then
    those of the other head. A token that the other head cannot draft begins as training is expected
    to have left it.
    """
    if source == NATIVE:
        other: DraftHead = native_head(target)
        metadata = CheckpointMetadata()
    else:
        other, metadata = load_head(source, head.target)
    if type(other) is not type(head):
        raise ValueError(f"{source!r} holds a {type(other).__name__}, not a {type(head).__name__}")
    trained = metadata.provenance.get("tokenizer")
    if trained not in (None, provenance["tokenizer"]):
        raise ValueError(
            f"init_from {source!r} was trained with tokenizer {trained}, not"
            f" {provenance['tokenizer']}: its draft vocabulary means other tokens; choose a head of"
            " the same tokenizer, or null"
        )
    if (
        head.draft_vocab_size < head.target.vocab_size
        or other.draft_vocab_size < other.target.vocab_size
    ):
        head.initialize(target.modules, favouring(counts_V, other.vocabulary()))
    for name in head.computes:
        own, theirs = (getattr(each.config, name) for each in (head, other))
        if own != theirs:
            raise ValueError(
                f"init_from {source!r} was made with head.{name} {theirs!r}, and this head has"
                f" {own!r}"
            )
    try:
        copy_weights(head, other)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error


@dataclass(frozen=True)
class TrainState:
    """The module, its optimizer and schedule, as an engine drives them."""

    run: RunFolder
    share: Share
    inputs: Inputs
    config: TrainConfig
    module: nn.Module
    """The head as the engine drives it, with the adapter if there is one."""
    adapted: nn.Module | None
    """The target with its adapter, if there is one; the module then runs the target itself."""
    averaged: AveragedModel | None
    """The exponential moving average of the head's weights, if optim.ema is set."""
    optimizer: Optimizer
    schedule: LRScheduler


def build_state(
    run: RunFolder, share: Share, inputs: Inputs, config: TrainConfig, steps: int
) -> TrainState:
    """Hand head and optimizer to the engine that the launch file chose."""
    accelerator = run.accelerator
    trained: nn.Module = inputs.head
    adapted, slower = None, {}
    if config.adapter.rank > 0:
        from .adapter import JointModule  # imports peft, which takes a second

        trained = joint = JointModule(inputs.target, inputs.head, inputs.objective, config.adapter)
        adapted = joint.peft
        slower = {id(weight): config.adapter.head_lr_ratio for weight in joint.adapter.values()}
    trained = trained.to(accelerator.device)
    shard(accelerator, trained, config.loop.shard_over)
    optimizer, schedule = build_optimizer(trained, config.optim, steps, slower)
    module, optimizer = prepare(accelerator, trained, optimizer, config.loop.precision)
    accelerator.register_for_checkpointing(schedule)
    averaged = None
    if config.optim.ema > 0:
        averaged = AveragedModel(inputs.head, multi_avg_fn=get_ema_multi_avg_fn(config.optim.ema))
        accelerator.register_for_checkpointing(averaged)
    return TrainState(run, share, inputs, config, module, adapted, averaged, optimizer, schedule)


@dataclass(frozen=True)
class Wishes:
    """Wishes of a process, or of any process, for the end of a step."""

    stop: bool = False
    save: bool = False


NO_WISHES = Wishes()


def checkpoint_bytes(module: nn.Module) -> int:
    """Estimate a checkpoint's bytes on disk: trained weights with two optimizer states for each."""
    return sum(
        3 * weight.numel() * weight.element_size()
        for weight in module.parameters()
        if weight.requires_grad
    )


def gradients(
    state: TrainState,
    data: Step,
    features: OnlineFeatures,
    clock: StepClock,
    step: int,
    adapt: bool,
    wishes: Wishes = NO_WISHES,
) -> tuple[list[HeadOutput], float, Wishes]:
    """Run the forwards and backwards of a step.

    Weights do not change, unless the engine is DeepSpeed.

    `adapt` trains the adapter too, `step` numbers the step in errors. Returns the outputs, the
    gradient norm, and what any process wishes, as this one does `wishes`.
    """
    accelerator, module, batches = state.run.accelerator, state.module, data.batches
    deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
    # The loss is a mean over the step's answer tokens. Engines average gradients over processes,
    # DeepSpeed over forwards, too; the scale turns that into a sum.
    scale = (
        state.share.processes
        * (state.share.forwards if deepspeed else 1)
        / max(data.answer_tokens, 1)
    )
    outputs: list[HeadOutput] = []
    given: tuple[Any, ...]
    loss = 0.0
    for number, batch in enumerate(batches, start=1):
        last = number == len(batches)
        accelerator.sync_gradients = last  # gradients are exchanged once a step
        with nullcontext() if last else accelerator.no_sync(module):
            clock.part("target")
            with record_function("target"):
                if state.adapted:
                    given = (batch, adapt)
                else:
                    dtype = state_dtype(state.config.loop.precision, state.inputs.target.dtype)
                    given = (features(batch, dtype), state.inputs.objective)
            clock.part("head")
            with autocast(accelerator, state.config.loop.precision), record_function("head"):
                output = module(*given)
            outputs.append(output)
            if deepspeed and last:  # its backward makes the optimizer step
                loss, _, wishes = agreed(accelerator, outputs, wishes)
                check_finite("loss", loss, batches, step, state)
            with record_function("head, backward"):
                accelerator.backward(output.loss * scale)
    clock.part("optimizer")
    found = accelerator.clip_grad_norm_(module.parameters(), state.config.optim.clip)
    if deepspeed:
        norm = float(found)
    else:
        loss, norm, wishes = agreed(accelerator, outputs, wishes, found)
        check_finite("loss", loss, batches, step, state)
    check_finite("gradient norm", norm, batches, step, state)
    return outputs, norm, wishes


def update(state: TrainState) -> float:
    """Step the optimizer, the weight average and the schedule; return the step's learning rate."""
    lr = float(state.schedule.get_last_lr()[0])
    with record_function("optimizer"):
        state.optimizer.step()
    if state.averaged:
        state.averaged.update_parameters(state.inputs.head)
    state.schedule.step()
    state.optimizer.zero_grad()
    return lr


def evaluate_and_save(
    state: TrainState,
    metrics: MetricsLogger,
    stop: StopFlag,
    callbacks: Callbacks,
    last: bool = False,
) -> Evaluation | None:
    """Measure the head's acceptance; save the head if it is the best so far, or the last.

    Its adapter, if there is one, is saved with it.

    None if the evaluation was stopped, on all processes.
    """
    run, inputs, config, progress = state.run, state.inputs, state.config, metrics.progress
    accelerator, target = run.accelerator, inputs.target
    copy = head_of(config, target.info, target.config)
    trained = state.averaged.module if state.averaged else inputs.head
    copy.load_state_dict(
        get_model_state_dict(trained, options=StateDictOptions(full_state_dict=True))
    )
    copy = copy.to(accelerator.device, dtype_named(config.loop.save_dtype))
    replay = inputs.replay or target
    read = None
    if isinstance(target, OuterTarget) and inputs.source is not None:
        read = StoredFeatures(target, copy, inputs.source)
    found = evaluate(
        replay, copy, inputs.objective, inputs.held_out, config.eval, accelerator, stop, read
    )
    if found is None:
        return None
    # the best head and early stopping follow from it, on all processes
    found = from_main(accelerator, found)
    samples = []
    if config.loop.tracker != "none" and config.tracking.samples > 0:
        prompts = eval_prompts(replay, inputs.held_out, config.eval)[: config.tracking.samples]
        tree = found.policies[found.best]
        samples = sample_answers(
            replay, copy, tree, prompts, config.eval.new_tokens, inputs.tokenizer
        )
    measured = {"coverage": inputs.coverage, **found.measured(config.eval)}
    probe = replay.probe(copy) if isinstance(replay, StoredReplay) else probe_drafts(target, copy)
    if probe is not None:
        measured["probe"] = probe
    metadata = CheckpointMetadata(
        tree=found.tree,
        training=training_record(run, config, progress),
        measured=measured,
        provenance=inputs.provenance,
        adapted=state.adapted is not None,
    )
    # Other processes may look for it once the main process has saved it already.
    better = from_main(
        accelerator, not found.shorter_than(progress.longest_prompts) or not run.best.exists()
    )
    if better:
        progress.best_step, progress.best_length = progress.step, found.acceptance_length
    if found.acceptance_length > progress.longest_length:
        progress.longest_length, progress.longest_prompts = found.acceptance_length, found.prompts
    row = metrics.log_evaluation(found, samples)
    for folder, wanted in ((run.best, better), (run.last, last)):
        if wanted and accelerator.is_main_process:
            save_head(copy, folder, metadata, state.adapted)
    progress.judged = progress.step
    callbacks.call("on_evaluation", progress, row, stop)
    return found


def training_record(run: RunFolder, config: TrainConfig, progress: Progress) -> dict[str, Any]:
    """Return how a head was trained, for its checkpoint.

    The record holds versions, options, the options that changed on the way, and progress.
    """
    so_far = dataclasses.asdict(progress)
    del so_far["longest_prompts"]
    record = {**provenance(), "config": dataclasses.asdict(config), **so_far}
    changes = run.changes()
    return {**record, "changes": changes} if changes else record


def stops_early(progress: Progress, found: Evaluation, patience: int) -> bool:
    """Whether acceptance has stayed below its best while the held-out loss fell.

    It must have done so in `patience` evaluations in a row, which `progress` counts.
    """
    loss = sum(found.loss_K)
    fell, progress.held_out_loss = loss < progress.held_out_loss, loss
    shorter = found.acceptance_length < progress.longest_length
    progress.falling = progress.falling + 1 if fell and shorter else 0
    return 0 < patience <= progress.falling


def agreed(
    accelerator: Accelerator, outputs: list[HeadOutput], wishes: Wishes, norm: Tensor | None = None
) -> tuple[float, float, Wishes]:
    """Return the loss summed over processes, the gradient norm, and what any process wishes."""
    loss = torch.stack([output.loss.detach() for output in outputs]).sum()
    # Filled on the device: a copy from the host would wait for it.
    flags = [torch.full_like(loss, float(wish)) for wish in (wishes.stop, wishes.save)]
    everyone = accelerator.reduce(torch.stack([loss, *flags]), "sum")
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    norm = torch.zeros_like(loss) if norm is None else norm.to(loss)
    # sync: once a step, so that no step spoils the weights and all processes stop at the same one
    total, stopping, saving, own = torch.cat([everyone, norm[None]]).tolist()
    return total, own, Wishes(stopping > 0, saving > 0)


def check_finite(
    what: str, value: float, batches: list[Batch], step: int, state: TrainState
) -> None:
    """Raise a ValueError before a step that would spoil the weights."""
    if math.isfinite(value):
        return
    numbers = sorted(number for batch in batches for number in batch.conversations)
    state.run.close()
    newest = state.run.newest()
    lower = f"{state.config.optim.lr / 2:g}"
    advice = (
        "a lower optim.lr or a larger optim.warmup often helps: to resume from there, set optim.lr"
        f" to {lower} in {state.run.folder / 'config.yaml'} and give the same command with"
        f" --optim.lr {lower}"
    )
    if newest is None:
        advice = (
            "a lower optim.lr or a larger optim.warmup often helps: nothing was saved yet, so begin"
            " with that"
        )
    raise ValueError(
        f"step {step}: the {what} is {value}; training stops. Its batch held the conversations"
        f" {numbers} (counted from 0 over all sources). The newest checkpoint is"
        f" {newest or 'not yet written'}; {advice}"
    )


def check_same_everywhere(accelerator: Accelerator, examples: Sequence[Example]) -> None:
    """Raise a ValueError if processes read different data: their shares would not make up steps."""
    own = torch.tensor(
        [len(examples), int.from_bytes(digest_of(examples), "big")], device=accelerator.device
    )
    everyone = accelerator.gather(own).view(-1, 2).tolist()
    for process, (count, found) in enumerate(everyone):
        if [count, found] != everyone[0]:
            raise ValueError(
                f"process {process} reads other data than process 0: {count} and {everyone[0][0]}"
                " sequences to train on; give every process the same data.sources, tokenizer and"
                " options"
            )
