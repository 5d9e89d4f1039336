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
from torch.distributed.fsdp import FSDPModule
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
    any_process,
    autocast,
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
    eval_prompts,
    evaluate,
    forward_tokens,
    judged,
    sample_answers,
    try_evaluation,
)
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
        self, name: str, progress: Progress, argument: Any, stop: StopFlag | None = None
    ) -> None:
        """Call a method of all callbacks, on the main process.

        The first exception sets `stop`, and no callback is called after it.
        """
        if not self.main_process:
            return
        for callback in self.callbacks:
            if self.error is not None:
                return
            try:
                # A copy: a callback that writes to its state must not change the run's.
                getattr(callback, name)(dataclasses.replace(progress), argument)
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
    """Do the work of `train` once all processes have been joined."""
    accelerator = run.accelerator
    config = resolved(config, accelerator)
    # Before the head is built: its first weights come from torch's global generator.
    set_seed(config.loop.seed)

    # 1. The folders must be the same ones on every machine.
    require_shared(accelerator, run.folder, "output")
    if config.features.mode != "online" and config.features.folder is not None:
        require_shared(accelerator, Path(config.features.folder), "features.folder")
    # 2. Take the folder, or check that the run in it has these options.
    run.claim(config)

    # 3. A finished run has nothing to do. It may have been killed before its report was written.
    if from_main(accelerator, run.last.exists()):
        log.info(f"{run.folder} is finished: its heads are {run.best} and {run.last}")
        if accelerator.is_main_process and not (run.folder / "report.md").exists():
            log.info(f"the report: {write_report(run.folder)}")
        end_together(accelerator)
        return run.folder

    # 4. Train. The tracker learns of a failure, whatever raised it.
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

    # 5. Tell the caller why the run stopped. A callback's own exception comes first.
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
        How far the run has come if it was stopped, once a checkpoint has been written; else None.
    """
    accelerator = run.accelerator

    # 1. Load the data, the target and the head, and compare them with those of an earlier start.
    inputs = load_inputs(config, accelerator, run.folder, outside=source)
    run.settle(config, inputs.digests)
    target = inputs.target
    head = inputs.head.to(accelerator.device)
    training = inputs.training
    size = sum(parameter.numel() for parameter in head.parameters())
    steps = config.loop.max_steps or inputs.order.count(config.loop.epochs)

    # 2. Build the module and its optimizer.
    state = build_state(run, share, inputs, config, steps)
    run.check_space(checkpoint_bytes(state.module), config.loop.keep)
    # The first evaluation may be hours away: what would end it is to end the run now.
    if from_main(accelerator, run.newest() is None):
        copy, read = copied_head(state)
        try_evaluation(
            inputs.replay or target,
            copy,
            inputs.objective,
            inputs.held_out,
            config.eval,
            read,
            forward_tokens(config),
        )
        del copy, read
    # Heads that draw while they train must not draw the same on every process.
    torch.manual_seed(config.loop.seed + share.process)

    # 3. Continue from the newest checkpoint, if there is one. It replaces weights, optimizer,
    # schedule and random state. The options of the optimizer are those of this start.
    settings = settings_of(state.schedule)
    progress = run.resume(actual_engine(state.module))
    apply_settings(state.schedule, settings)
    tracker.start(config, progress.step)
    # The run had already stopped early, and was killed before its last evaluation: no step is left.
    if 0 < config.loop.patience <= progress.falling:
        steps = progress.step
    log.info(
        f"{type(head).__name__}: {size:,} parameters; its {head.draft_vocab_size:,} tokens cover"
        f" {inputs.coverage:.2%} of the answers; {len(training)} sequences to train on,"
        f" {len(inputs.held_out)} held out; {progress.engine}; step {progress.step} of {steps}"
    )

    # 4. Open what yields the target's features, and the instruments that watch the steps.
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
    cached = config.features.mode in ("cached", "stored", "served")
    adapted = config.adapter.rank > 0
    # Counting must not fill the cache of features, so a loaded target computes its own for it.
    features_of = partial(online_features, target, head) if inputs.source is None else features
    flops = count_flops(features_of, head, inputs.objective, training[:SAMPLE], cached, adapted)
    metrics = MetricsLogger(
        run, tracker, config.loop.log_every, steps, epochs / steps, progress, flops
    )
    # Steps before this one train the head alone; from it on, the adapter learns too.
    joint_from = round(config.adapter.heads_first * steps)
    profiler = StepProfiler(
        config.loop.profile, run.folder / "profile", accelerator.process_index, progress.step + 1
    )
    # A batch's shortest row: depth d predicts the token at t + 2 + d, so that a row of
    # max_depth + 2 tokens gives every depth a gradient on every process.
    reader = Steps(training, share, head.max_depth + 2, features.read_ahead)
    workers = config.data.workers
    if workers is None:
        # On a CPU workers take cores from the steps, which pays only for states that are served:
        # a worker then waits for the network.
        workers = 2 if accelerator.device.type != "cpu" or config.features.mode == "served" else 0

    saved_at = time.monotonic()

    def save(background: bool) -> None:
        nonlocal saved_at
        # A run that resumes from here must find the states that it has trained on.
        features.settle(accelerator)
        # One write at a time.
        run.wait()
        tell_of_saves()  # of the last checkpoint, before the next one may remove it
        run.save(progress, config.loop.keep, background)
        tell_of_saves()
        saved_at = time.monotonic()

    def tell_of_saves() -> None:
        for saved, checkpoint in run.written():
            callbacks.call("on_save", saved, checkpoint, stop)

    def save_is_due() -> bool:
        minutes = config.loop.save_minutes
        return minutes is not None and time.monotonic() - saved_at >= 60 * minutes

    # 5. Make the steps.
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
                # 5a. Evaluate between steps. A run that resumes at a step that it has already
                # evaluated (`progress.judged`) does not do so again, and the last step has an
                # evaluation of its own below.
                if (
                    due(progress.step, config.loop.eval_every)
                    and progress.judged < progress.step < steps
                ):
                    evaluation = evaluate_and_save(state, metrics, stop, callbacks)
                    if evaluation is None:
                        break
                    stops = stops_early(progress, evaluation, config.loop.patience)
                    if from_main(accelerator, stops):
                        steps = progress.step

                # 5b. Save after the evaluation, so that the checkpoint knows of it.
                if (
                    saving or due(progress.step, config.loop.save_every)
                ) and 0 < progress.step < steps:
                    save(config.loop.save_in_background)

                # 5c. Stop? Several processes have agreed on it during the last step; one alone
                # can look now, and so before its first step.
                if accelerator.num_processes == 1:
                    stopping = stop.wanted
                if progress.step == steps or stopping:
                    break

                # 5d. One optimizer step. Steps count from 1; `progress.step` are made so far.
                profiler.begin(progress.step + 1)
                metrics.start_step()
                data = next(batches)
                # A source that fails costs no step: the state between two steps is saved.
                if inputs.source is not None:
                    failed = [batch.failure for batch in data.batches if batch.failure]
                    if any_process(accelerator, bool(failed)):
                        if progress.step > 0:
                            save(background=False)
                        raise ValueError(failed[0] if failed else "another process has no states")
                # States that were computed in one epoch are read in the next.
                if data.epoch != last_epoch:
                    features.settle(accelerator)
                last_epoch = data.epoch
                number = progress.step + 1
                adapt = progress.step >= joint_from
                # Processes agree on both wishes in the sum of the loss: the one exchange that a
                # step has anyway.
                wishes = Wishes(stop.wanted, save_is_due() or run.failed())
                outputs, norm, agreement = gradients(
                    state, data, features, metrics.clock, number, adapt, wishes
                )
                stopping = agreement.stop
                saving = agreement.save
                lr = update(state)

                # 5e. Count the step only now that weights, optimizer and schedule include it.
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

        # 6. Save before the last evaluation: killed during it, the run resumes with no step left.
        save(background=False)
        if progress.step < steps:
            return (
                f"stopped at step {progress.step} of {steps}; the same command resumes from there"
            )
        if evaluate_and_save(state, metrics, stop, callbacks, last=True) is None:
            return "stopped in the last evaluation; the same command resumes from there"

        # 7. All steps are done, and best/ and last/ are written.
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

    Args:
        config: options of the run.
        accelerator: the processes that load together.
        folder: where rows that cannot be used are written to a file; None writes none.
        outer: True loads the target's outer modules only (no blocks), and opens no source of
            states; None does what `features.mode` says.
        outside: opens the source of states; None for what `features` names.

    Raises:
        ValueError: invalid options or data, before the target is loaded.
    """
    if outer is None:
        check_outside_source(config, outside)

    # 1. What costs nothing comes first: mistakes in the options are reported within seconds.
    objective = objective_of(config)
    sources = open_sources(config.data.sources, config.data.max_conversations)
    tokenizer = load_tokenizer(config.target, config.target_revision)
    check_renders(tokenizer, sources, config.target)
    if accelerator.is_main_process:
        warn_of_unread_variables(tokenizer, config.data.thinking, config.data.template_kwargs)

    # 2. The data, before the target, whose loading takes minutes. How they are rendered follows
    # from facts in the target's config files; if those say too little, the target comes first.
    without_blocks = needs_no_target(config) if outer is None else outer
    load = partial(load_target, config, accelerator, without_blocks)
    known = target_facts(config.target, config.target_revision) or load()
    how = rendering(config, known, tokenizer)
    cache, training, held_out = load_data(config, accelerator, sources, how, folder)

    # 3. The target. What it says once loaded outranks its config files.
    target = known if isinstance(known, Target) else load()
    actual = rendering(config, target, tokenizer)
    if actual != how:
        cache, training, held_out = load_data(config, accelerator, sources, actual, folder)

    # 4. The head, and whether this target can train it and decode with it.
    head = head_of(config, target.info, target.config)
    head.recompute = config.loop.recompute
    target.check_layers(head.feature_layers)
    target.check_features()
    target.check_decoding()
    origin = data_origin(tokenizer, config.data.thinking, config.data.template_kwargs)
    provenance = {**target.provenance, **origin}

    # 5. The target as evaluations see it: its plain answers are computed once and replayed.
    replay: ReplayTarget | None = None
    source: StateSource | None = None
    if not isinstance(target, OuterTarget):
        # An adapter changes the target, and with it the answers, from one evaluation to the next.
        # A sharded target is replayed too: plain answers take a fixed number of forwards, whatever
        # a process computes. With drafts, a token that rounding decides would give one process a
        # round more than the others, in which it waits for ever.
        replay = None if config.adapter.rank > 0 else ReplayTarget(target)
    elif outer is None:
        # No blocks are here: the states come from elsewhere, for evaluations too.
        source = open_source(config, accelerator, target, head, provenance, outside)
        held_out = judged(held_out, config.eval)
        check_source(source, accelerator, target, training, held_out)
        replay = StoredReplay(target, source, held_out)
    # Called for its error, which should come now and not at the first evaluation.
    eval_prompts(replay or target, held_out, config.eval)

    # 6. The first weights, and the draft vocabulary: the most frequent tokens of the answers.
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

    # 7. The order of the sequences: which of them each step trains on.
    data = config.data
    loop = config.loop
    sources_of_rows = cache.sources_of(training.conversations)
    lengths = lengths_of(training)
    order = Order(
        lengths,
        loop.batch_size,
        loop.seed,
        data.pack,
        sources_of_rows,
        data.weights,
        loop.batch_tokens,
    )

    # 8. Digests, by which a run that resumes notices that its inputs have changed. The source of a
    # sequence matters only where sources have weights.
    weighted = "" if data.weights is None else str(sources_of_rows)
    digests = {
        "data": hashlib.sha256(digest_of(training) + weighted.encode()).hexdigest()[:16],
        # Unknown where blocks are not loaded and the files name their weights differently.
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
    """Start from the weights of another head, or of the target's own MTP head ("mtp").

    The draft vocabulary follows the data: it is the most frequent tokens of these answers, then
    those of the other head. A token that the other head cannot draft begins with the weights that
    training is expected to have given it (`with_trained_rows`).

    Raises:
        ValueError: the other head does not fit this one.
    """
    if source == NATIVE:
        other: DraftHead = native_head(target)
        metadata = CheckpointMetadata()
    else:
        other, metadata = load_head(source, head.target)

    # Refuse a head of another algorithm, tokenizer or computation.
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
        # Among tokens that the answers hold equally often, those of the other head come first.
        head.initialize(target.modules, favouring(counts_V, other.vocabulary()))
    # Options that change what a head computes, so that the weights would mean something else.
    for name in head.computes:
        ours = getattr(head.config, name)
        theirs = getattr(other.config, name)
        if ours != theirs:
            raise ValueError(
                f"init_from {source!r} was made with head.{name} {theirs!r}, and this head has"
                f" {ours!r}"
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

    # 1. What is trained: the head, or one module of head and adapter, since an engine drives one.
    trained: nn.Module = inputs.head
    adapted: nn.Module | None = None
    slower: dict[int, float] = {}  # by parameter id: what its learning rate is divided by
    if config.adapter.rank > 0:
        from .adapter import JointModule  # imports peft, which takes a second

        trained = joint = JointModule(inputs.target, inputs.head, inputs.objective, config.adapter)
        adapted = joint.peft
        slower = {id(weight): config.adapter.head_lr_ratio for weight in joint.adapter.values()}

    # 2. Shard before the optimizer is made: it must hold the sharded parameters.
    trained = trained.to(accelerator.device)
    shard(accelerator, trained, config.loop.shard_over)
    optimizer, schedule = build_optimizer(trained, config.optim, steps, slower)
    module, optimizer = prepare(accelerator, trained, optimizer, config.loop.precision)

    # 3. What a checkpoint holds besides module and optimizer.
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

    Weights do not change, unless the engine is DeepSpeed, whose last backward makes the step.

    Args:
        state: what is trained.
        data: this process's batches of the step.
        features: computes or reads the target's features of a batch.
        clock: told which part of the step runs.
        step: number of the step, for errors.
        adapt: whether the adapter is trained too.
        wishes: what this process wishes for the end of the step.

    Returns:
        The outputs of the forwards, the gradient norm, and what any process wishes.
    """
    accelerator = state.run.accelerator
    module = state.module
    batches = data.batches
    deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
    # A step's loss is the mean over the answer tokens of all its batches, on all processes. A
    # batch's loss is a sum over its tokens, but engines average gradients over processes, and
    # DeepSpeed over forwards too. The scale undoes these averages:
    #     scale = processes * (forwards with DeepSpeed, else 1) / answer tokens
    # For example, 2 processes and 100 tokens: each gradient is scaled by 2 / 100, and averaged.
    averaged_over = state.share.processes
    if deepspeed:
        averaged_over *= state.share.forwards
    scale = averaged_over / max(data.answer_tokens, 1)
    outputs: list[HeadOutput] = []
    arguments: tuple[Any, ...]
    loss = 0.0

    # 1. Forwards and backwards, batch by batch; gradients add up.
    for number, batch in enumerate(batches, start=1):
        last = number == len(batches)
        accelerator.sync_gradients = last  # gradients are exchanged once a step
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(last)  # accelerate does not know of it
        with nullcontext() if last else accelerator.no_sync(module):
            clock.part("target")
            with record_function("target"):
                if state.adapted:
                    # The joint module runs the target itself, whose adapter needs gradients.
                    arguments = (batch, adapt)
                else:
                    dtype = state_dtype(state.config.loop.precision, state.inputs.target.dtype)
                    arguments = (features(batch, dtype), state.inputs.objective)
            clock.part("head")
            with autocast(accelerator, state.config.loop.precision), record_function("head"):
                output = module(*arguments)
            outputs.append(output)
            # DeepSpeed's last backward makes the optimizer step: a loss that is not finite must be
            # noticed before it.
            if deepspeed and last:
                loss, _, wishes = agreed(accelerator, outputs, wishes)
                check_finite("loss", loss, batches, step, state)
            with record_function("head, backward"):
                accelerator.backward(output.loss * scale)

    # 2. Clip, and agree with the other processes.
    clock.part("optimizer")
    clipped = accelerator.clip_grad_norm_(module.parameters(), state.config.optim.clip)
    if deepspeed:
        norm = float(clipped)
    else:
        loss, norm, wishes = agreed(accelerator, outputs, wishes, clipped)
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


def copied_head(state: TrainState) -> tuple[DraftHead, StoredFeatures | None]:
    """Copy the head, whole and in the dtype in which it is saved, to host memory.

    Returns:
        The copy, and what reads the target's states for it, unless the target computes them.
    """
    inputs = state.inputs
    target = inputs.target
    copy = head_of(state.config, target.info, target.config)
    trained = state.averaged.module if state.averaged else inputs.head
    # An engine may have sharded the weights, so that all processes gather them here.
    copy.load_state_dict(
        get_model_state_dict(trained, options=StateDictOptions(full_state_dict=True))
    )
    copy = copy.to(dtype_named(state.config.loop.save_dtype))
    if isinstance(target, OuterTarget) and inputs.source is not None:
        return copy, StoredFeatures(target, copy, inputs.source)
    return copy, None


def evaluate_and_save(
    state: TrainState,
    metrics: MetricsLogger,
    stop: StopFlag,
    callbacks: Callbacks,
    last: bool = False,
) -> Evaluation | None:
    """Measure the head's acceptance; save the head if it is the best so far, or the last.

    Its adapter, if there is one, is saved with it.

    Returns:
        The evaluation; None, on all processes, if it was stopped.
    """
    run = state.run
    inputs = state.inputs
    config = state.config
    progress = metrics.progress
    accelerator = run.accelerator
    target = inputs.target

    # 1. Copy the head: what is measured is what is served.
    copy, read = copied_head(state)

    # 2. Measure it on the held-out conversations.
    replay = inputs.replay or target
    evaluation = evaluate(
        replay,
        copy,
        inputs.objective,
        inputs.held_out,
        config.eval,
        accelerator,
        stop,
        read,
        forward_tokens(config),
    )
    if evaluation is None:
        return None
    # The best head and early stopping follow from the figures, which may differ between processes
    # in the last digit.
    evaluation = from_main(accelerator, evaluation)
    samples = []
    if config.loop.tracker != "none" and config.tracking.samples > 0:
        prompts = eval_prompts(replay, inputs.held_out, config.eval)[: config.tracking.samples]
        tree = evaluation.policies[evaluation.best]
        samples = sample_answers(
            replay, copy, tree, prompts, config.eval.new_tokens, inputs.tokenizer
        )

    # 3. Write down what a checkpoint says of itself. The probe holds a few drafts, by which a
    # loader can check that it computes the same.
    measured = {"coverage": inputs.coverage, **evaluation.measured(config.eval)}
    probe = replay.probe(copy) if isinstance(replay, StoredReplay) else probe_drafts(target, copy)
    if probe is not None:
        measured["probe"] = probe
    metadata = CheckpointMetadata(
        tree=evaluation.tree,
        training=training_record(run, config, progress),
        measured=measured,
        provenance=inputs.provenance,
        adapted=state.adapted is not None,
    )

    # 4. Is it the best? Yes, unless its acceptance is shorter beyond chance: of heads that cannot
    # be told apart the later one is kept. The main process decides, since others may look for
    # best/ after it has been saved.
    better = from_main(
        accelerator, not evaluation.shorter_than(progress.longest_prompts) or not run.best.exists()
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
    row = metrics.log_evaluation(evaluation, samples)
    for folder, wanted in ((run.best, better), (run.last, last)):
        if wanted and accelerator.is_main_process:
            save_head(copy, folder, metadata, state.adapted)
    progress.judged = progress.step
    callbacks.call("on_evaluation", progress, row, stop)
    return evaluation


def training_record(run: RunFolder, config: TrainConfig, progress: Progress) -> dict[str, Any]:
    """Return how a head was trained, for its checkpoint.

    The record holds versions, options, the options that changed on the way, and progress.
    """
    so_far = dataclasses.asdict(progress)
    del so_far["longest_prompts"]  # a pair of numbers for each prompt, of no use to a reader
    record = {**provenance(), "config": dataclasses.asdict(config), **so_far}
    changes = run.changes()
    return {**record, "changes": changes} if changes else record


def stops_early(progress: Progress, evaluation: Evaluation, patience: int) -> bool:
    """Whether acceptance has stayed below its best while the held-out loss fell.

    It must have done so in `patience` evaluations in a row, which `progress` counts. A patience of
    0 never stops early.
    """
    loss = sum(evaluation.loss_K)
    fell = loss < progress.held_out_loss
    progress.held_out_loss = loss
    shorter = evaluation.acceptance_length < progress.longest_length
    progress.falling = progress.falling + 1 if fell and shorter else 0
    return 0 < patience <= progress.falling


def agreed(
    accelerator: Accelerator, outputs: list[HeadOutput], wishes: Wishes, norm: Tensor | None = None
) -> tuple[float, float, Wishes]:
    """Return the loss summed over processes, the gradient norm, and what any process wishes."""
    loss = torch.stack([output.loss.detach() for output in outputs]).sum()
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


def check_finite(
    what: str, value: float, batches: list[Batch], step: int, state: TrainState
) -> None:
    """Raise a ValueError before a step that would spoil the weights."""
    if math.isfinite(value):
        return
    numbers = sorted(number for batch in batches for number in batch.conversations)
    # A checkpoint may still be being written in the background; the message names the newest.
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
    # [number of sequences, digest of their tokens], gathered to [processes, 2]
    count_and_digest = torch.tensor(
        [len(examples), int.from_bytes(digest_of(examples), "big")], device=accelerator.device
    )
    everyone = accelerator.gather(count_and_digest).view(-1, 2).tolist()
    for process, (count, digest) in enumerate(everyone):
        if [count, digest] != everyone[0]:
            raise ValueError(
                f"process {process} reads other data than process 0: {count} and {everyone[0][0]}"
                " sequences to train on; give every process the same data.sources, tokenizer and"
                " options"
            )
