"""The training loop: conversations -> the frozen target's features -> the head's loss -> a step.

    accelerate launch scripts/train.py --config configs/smollm2-medusa.yaml

A run's folder holds `best/` and `last/` (head checkpoints), `checkpoints/` (everything needed to go on), `log.jsonl`
and `config.yaml`. Started again, a run goes on from its newest checkpoint and ends with the weights that it would
have had without the interruption.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, set_seed
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ..heads import CheckpointMetadata, DraftHead, HeadOutput, build_head
from .callbacks import Callback, Callbacks
from .config import TrainConfig, dtype_of
from .console import ProgressBar, Stopped, StopRequest, log
from .data.batches import Batch, Order, Share, Steps, loaded, worker_deaths_explained
from .data.chat_template import Example
from .data.token_cache import digest_of, lengths_of
from .engine import Shared
from .engines import (
    alone,
    autocast,
    end_together,
    engine_got,
    exchanged,
    from_main,
    gradient_scale,
    prepare,
    shard,
    start,
    whole_state,
)
from .evaluate import Evaluation, eval_prompts, evaluate
from .features.online import FeatureSource, OnlineFeatures, feature_source
from .fingerprint import probe
from .optim import build_optimizer
from .precision import as_begun, resolved
from .provenance import provenance
from .report import Report, count_flops, due
from .run_folder import Progress, Run
from .samples import Sample, sample_answers, tokenizer_of
from .setup import Setup, head_options, set_up, split_as_begun
from .tracking import check_tracker

TIMED_STEPS = 3
"""By which the time of a step is told."""
SAMPLE = 4
"""Sequences on which a step's arithmetic is counted."""


def train(
    config: TrainConfig,
    deadline: float = math.inf,
    shared: Shared | None = None,
    callbacks: Sequence[Callback] = (),
) -> Path:
    """Run or continue a training run; return its folder.

    Args:
        config: of the run.
        deadline: on the main process's `time.monotonic`; a run begins no step after it and judges the head as it then
            is.
        shared: the target, if others use it too.
        callbacks: are called between steps, on the main process.

    Raises:
        ValueError: anything wrong with the options, the data, the tracker, or the run that is to be continued.
        Stopped: Ctrl-C or SIGTERM, once a checkpoint has been written.
        Exception: what a callback raised, once a checkpoint has been written.
    """
    config = split_as_begun(as_begun(config))
    accelerator, share = start(config)
    config = resolved(config, accelerator)
    set_seed(config.loop.seed)
    run = Run(Path(config.output), accelerator)
    run.claim(config)
    if from_main(accelerator, run.last.exists()):
        log.info(f"{run.folder} is finished: its heads are {run.best} and {run.last}")
        if not (run.folder / "report.md").exists():
            report_on(run)
        end_together(accelerator)
        return run.folder
    check_tracker(config)
    called, failed = Callbacks(callbacks, accelerator.is_main_process), True
    try:
        run_steps(run, share, config, deadline, shared, called)
        failed = False
    except Stopped:
        failed = False
        called.check()
        raise
    finally:
        run.tracker.close(run.best, failed)
        if not failed:
            accelerator.end_training()
    called.check()
    return run.folder


def run_steps(
    run: Run, share: Share, config: TrainConfig, deadline: float, shared: Shared | None, callbacks: Callbacks
) -> None:
    """Make the steps that a run has left, evaluations and checkpoints among them; see `train`."""
    accelerator = run.accelerator
    setup = set_up(config, accelerator, shared)
    head, training = setup.head.to(accelerator.device), setup.training
    check_same_everywhere(accelerator, training)
    size = sum(parameter.numel() for parameter in head.parameters())
    order = order_of(setup, config)
    steps = config.loop.max_steps or order.count(config.loop.epochs)
    flops = count_flops(
        setup.target, head, training[:SAMPLE], cached=config.features.mode == "cached", adapted=config.adapter.rank > 0
    )
    engine = build_engine(accelerator, share, run, setup, config, steps)
    run.tracker.start(config, run.id, run.newest_step)
    torch.manual_seed(config.loop.seed + share.process)  # what heads draw while training differs between processes
    progress = run.resume(engine_got(engine.module))
    if 0 < config.loop.patience <= progress.falling:  # it had stopped early, and was killed before its last evaluation
        steps = progress.step
    log.info(
        f"{type(head).__name__}: {size:,} parameters; its {head.draft_vocab_size:,} tokens cover {setup.coverage:.2%} "
        f"of the answers; {len(training)} sequences to train on, {len(setup.held_out)} held out; {progress.engine}; "
        f"step {progress.step} of {steps}"
    )
    epochs = steps / order.steps_in(0)
    run.epochs_per_step = epochs / steps
    features = feature_source(accelerator, setup.target, head, setup.provenance, training, config, epochs)
    report = Report(run, config.loop.log_every, steps, progress, flops)
    joint_from = round(config.adapter.heads_first * steps)
    # As long as the deepest draft, so that every depth gives every process a gradient.
    reader = Steps(training, share, head.max_depth + 2, features.read_ahead)
    on_cuda = accelerator.device.type == "cuda"
    workers = (2 if accelerator.device.type != "cpu" else 0) if config.data.workers is None else config.data.workers

    def save() -> None:
        features.settle(accelerator)  # a run that goes on from here finds the states that it has trained on
        run.save(progress, config.loop.keep)
        callbacks.call("on_save", progress, run.checkpoint(progress.step), stop)

    with StopRequest() as stop, worker_deaths_explained():
        with (
            ProgressBar("training steps", steps, progress.step) as bar,
            closing(loaded(reader, order, progress.step, workers, pin=on_cuda)) as batches,
            suppress(Stopped),
        ):
            last_epoch, stopping = None, False
            while True:
                if due(progress.step, config.loop.eval_every) and progress.judged < progress.step < steps:
                    found = judge(engine, setup, config, progress, stop, callbacks)
                    if from_main(accelerator, stops_early(progress, found, config.loop.patience)):
                        steps = progress.step
                if due(progress.step, config.loop.save_every) and 0 < progress.step < steps:
                    save()
                if progress.step > 0 and deadline < math.inf and from_main(accelerator, time.monotonic() > deadline):
                    steps = progress.step
                if progress.step == steps:
                    break
                if stopping or (alone(accelerator) and stop.wanted):
                    break
                report.start_step()
                data = next(batches)
                if data.epoch != last_epoch:
                    features.settle(accelerator)
                last_epoch = data.epoch
                lr = float(engine.schedule.get_last_lr()[0])
                adapt = progress.step >= joint_from
                with stop.at_once(alone(accelerator)), drawn_again_if_stopped():
                    outputs, norm, stopping = gradients(
                        engine, data.batches, features, data.answer_tokens, report, adapt, stop.wanted
                    )
                update(engine)
                progress.step += 1
                progress.answer_tokens += data.answer_tokens
                row = report.end_step(outputs, norm, lr)
                callbacks.call("on_step", progress, row, stop)
                bar.update(progress.step, report.note)
        save()
        if progress.step < steps:
            raise Stopped(f"stopped at step {progress.step} of {steps}; the same command goes on from there")
        judge(engine, setup, config, progress, stop, callbacks, last=True)
        with stop.at_once(alone(accelerator)):
            report_on(run)
        callbacks.call("on_end", progress, run.folder)
        end_together(accelerator)


def report_on(run: Run) -> None:
    """Write the page on a finished run, by the main process."""
    if run.accelerator.is_main_process:
        from .final_report import write_report  # brings matplotlib along

        log.info(f"the report: {write_report(run.folder)}")


def seconds_per_step(config: TrainConfig, shared: Shared | None = None) -> float:
    """What a step of a run takes here: the mean of a few, which change nothing, after one to be warm.

    Raises:
        ValueError: anything wrong with the options or the data.
    """
    accelerator, share = start(config)
    config = resolved(config, accelerator)
    setup = set_up(config, accelerator, shared)
    run, training = Run(Path(config.output), accelerator), setup.training
    engine = build_engine(accelerator, share, run, setup, config, steps=1)
    report, features = Report(run, 0, 1, Progress(), 0.0), OnlineFeatures(setup.target, setup.head)
    order, reader = order_of(setup, config), Steps(training, share, setup.head.max_depth + 2)
    taken = []
    for rows in itertools.islice(order.from_step(0), 1 + TIMED_STEPS):
        began = time.monotonic()
        gradients(engine, reader[rows].batches, features, 1, report, adapt=False)
        taken.append(time.monotonic() - began)
    return statistics.mean(taken[1:])


def order_of(setup: Setup, config: TrainConfig) -> Order:
    """The order of the data that the options ask for."""
    data, loop = config.data, config.loop
    lengths = lengths_of(setup.training)
    return Order(lengths, loop.batch_size, loop.seed, data.pack, setup.sources, data.weights, loop.batch_tokens)


@dataclass(frozen=True)
class Engine:
    """What makes steps: the module as an engine drives it, and all that belongs to it."""

    accelerator: Accelerator
    share: Share
    run: Run
    head: DraftHead
    module: nn.Module
    """The head as the engine drives it, with the adapter if there is one."""
    adapted: nn.Module | None
    """The target with its adapter, if there is one; the module then reads the target itself."""
    averaged: AveragedModel | None
    """The running mean of the head's weights, if one is kept."""
    optimizer: Optimizer
    schedule: LRScheduler
    precision: str
    clip: float


def build_engine(
    accelerator: Accelerator, share: Share, run: Run, setup: Setup, config: TrainConfig, steps: int
) -> Engine:
    """Hand head and optimizer to the engine that the launch file chose."""
    trained: nn.Module = setup.head
    adapted, slower = None, {}
    if config.adapter.rank > 0:
        from .adapter import JointModule  # brings peft along, whose import takes a second

        trained = joint = JointModule(setup.target, setup.head, config.adapter)
        adapted = joint.peft
        slower = {id(weight): config.adapter.head_lr_ratio for weight in joint.adapter.values()}
    trained = trained.to(accelerator.device)
    shard(accelerator, trained)
    optimizer, schedule = build_optimizer(trained, config.optim, steps, slower)
    module, optimizer = prepare(accelerator, trained, optimizer, config.loop.precision)
    accelerator.register_for_checkpointing(schedule)
    averaged = None
    if config.optim.ema > 0:
        averaged = AveragedModel(setup.head, multi_avg_fn=get_ema_multi_avg_fn(config.optim.ema))
        accelerator.register_for_checkpointing(averaged)
    return Engine(
        accelerator,
        share,
        run,
        setup.head,
        module,
        adapted,
        averaged,
        optimizer,
        schedule,
        config.loop.precision,
        config.optim.clip,
    )


def gradients(
    engine: Engine,
    group: list[Batch],
    features: FeatureSource,
    answer_tokens: int,
    report: Report,
    adapt: bool,
    stop: bool = False,
) -> tuple[list[HeadOutput], float, bool]:
    """Forwards and backwards of a step. Weights do not change, unless the engine is DeepSpeed.

    Returns:
        the outputs, the gradient norm, and whether any process was asked to stop.

    Raises:
        ValueError: a loss or a gradient that is no number.
    """
    accelerator, module, step = engine.accelerator, engine.module, report.progress.step + 1
    scale = gradient_scale(accelerator, engine.share) / max(answer_tokens, 1)  # the loss is a mean over these tokens
    deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
    outputs: list[HeadOutput] = []
    loss, stopping = 0.0, False
    for place, batch in enumerate(group, start=1):
        with exchanged(accelerator, module, last=place == len(group)):
            report.part("target")
            given = (batch, adapt) if engine.adapted else (features(batch),)
            report.part("head")
            with autocast(accelerator, engine.precision):
                output = module(*given)
            outputs.append(output)
            if deepspeed and place == len(group):  # it takes its step in the backward
                loss, _, stopping = agreed(accelerator, outputs, stop)
                check_loss(loss, group, step, engine.run)
            accelerator.backward(output.loss * scale)
    report.part("optimizer")
    found = accelerator.clip_grad_norm_(module.parameters(), engine.clip)
    if deepspeed:
        norm = float(found)
    else:
        loss, norm, stopping = agreed(accelerator, outputs, stop, found)
        check_loss(loss, group, step, engine.run)
    check_norm(accelerator, norm, group, step, engine.run)
    return outputs, norm, stopping


def update(engine: Engine) -> None:
    """The optimizer's step."""
    engine.optimizer.step()
    if engine.averaged:
        engine.averaged.update_parameters(engine.head)
    engine.schedule.step()
    engine.optimizer.zero_grad()


@contextmanager
def drawn_again_if_stopped() -> Iterator[None]:
    """Of a step that is cut off, random draws are undone: the run goes on with this very step."""
    host, devices = torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    try:
        yield
    except Stopped:
        torch.set_rng_state(host)
        torch.cuda.set_rng_state_all(devices)
        raise


def judge(
    engine: Engine,
    setup: Setup,
    config: TrainConfig,
    progress: Progress,
    stop: StopRequest,
    callbacks: Callbacks,
    last: bool = False,
) -> Evaluation:
    """Measure real acceptance; keep the head if it is the best so far, or the last.

    Raises:
        Stopped: Ctrl-C or SIGTERM, before anything is kept.
    """
    copy = build_head(*head_options(config), setup.target.info)
    copy.load_state_dict(whole_state(engine.averaged.module if engine.averaged else engine.head))
    copy = copy.to(engine.accelerator.device, dtype_of(config.loop.save_dtype))
    found = evaluate(setup.target, copy, setup.held_out, config.eval, engine.accelerator, stop)
    found = from_main(engine.accelerator, found)  # what is best, and when to stop, is decided by it
    with stop.at_once(alone(engine.accelerator)):
        samples = answers_to_show(setup, copy, found, config)
    metadata = CheckpointMetadata(
        tree=found.tree,
        training={**provenance(), "config": dataclasses.asdict(config), **dataclasses.asdict(progress)},
        measured={"coverage": setup.coverage, "probe": probe(setup.target, copy), **found.measured(config.eval)},
        provenance=setup.provenance,
        adapted=engine.adapted is not None,
    )
    row = engine.run.judged(progress, copy, found, metadata, engine.adapted, last, samples)
    progress.judged = progress.step
    callbacks.call("on_evaluation", progress, row, stop)
    return found


def answers_to_show(setup: Setup, head: DraftHead, found: Evaluation, config: TrainConfig) -> list[Sample]:
    """Sample answers for the tracker, if there is one, with the tree of the longest acceptance."""
    if config.loop.tracker == "none" or config.tracking.samples == 0:
        return []
    prompts = eval_prompts(setup.target, setup.held_out, config.eval)[: config.tracking.samples]
    tokenizer = tokenizer_of(config.target, config.target_revision)
    return sample_answers(setup.target, head, found.policies[found.best], prompts, config.eval.new_tokens, tokenizer)


def stops_early(progress: Progress, found: Evaluation, patience: int) -> bool:
    """Whether real acceptance fell in `patience` evaluations in a row while the held-out loss still sank."""
    loss = sum(found.loss_K)
    sank, progress.held_out_loss = loss < progress.held_out_loss, loss
    progress.falling = progress.falling + 1 if sank and progress.best_step < progress.step else 0
    return 0 < patience <= progress.falling


def agreed(
    accelerator: Accelerator, outputs: list[HeadOutput], stop: bool, norm: Tensor | None = None
) -> tuple[float, float, bool]:
    """The loss of all processes together, the gradient norm, and whether any process was asked to stop."""
    loss = torch.stack([output.loss.detach() for output in outputs]).sum()
    # Filled on the device: a tensor that is copied there would be waited for.
    everyone = accelerator.reduce(torch.stack([loss, torch.full_like(loss, float(stop))]), "sum")
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    norm = torch.zeros_like(loss) if norm is None else norm.to(loss)
    # sync: once a step, so that no step spoils the weights and all processes stop at the same one
    total, own, stopping = torch.cat([everyone[:1], norm[None], everyone[1:]]).tolist()
    return total, own, stopping > 0


def check_loss(loss: float, group: list[Batch], step: int, run: Run) -> None:
    """Stop before a step that would spoil the weights.

    Raises:
        ValueError: naming the step, this process's conversations, and where the run can be continued from.
    """
    if not math.isfinite(loss):
        raise ValueError(f"step {step}: the loss is {loss}; {_where_it_stands(group, run)}")


def check_norm(accelerator: Accelerator, norm: float, group: list[Batch], step: int, run: Run) -> None:
    """As `check_loss`, of the gradient.

    Raises:
        ValueError: see `check_loss`.
    """
    if not math.isfinite(norm):
        raise ValueError(f"step {step}: the gradient norm is {norm}; {_where_it_stands(group, run)}")


def _where_it_stands(group: list[Batch], run: Run) -> str:
    numbers = sorted(number for batch in group for number in batch.conversations)
    return (
        f"training stops. Its batch held the conversations {numbers} (counted from 0 over all sources). The newest "
        f"checkpoint is {run.newest or 'not yet written'}; a lower optim.lr or a larger optim.warmup often helps"
    )


def check_same_everywhere(accelerator: Accelerator, examples: Sequence[Example]) -> None:
    """Refuse processes that read different data: their shares would not make up steps.

    Raises:
        ValueError: naming a process whose data differs from the first one's.
    """
    own = torch.tensor([len(examples), int.from_bytes(digest_of(examples), "big")], device=accelerator.device)
    everyone = accelerator.gather(own).view(-1, 2).tolist()
    for process, (count, found) in enumerate(everyone):
        if [count, found] != everyone[0]:
            raise ValueError(
                f"process {process} reads other data than process 0: {count} and {everyone[0][0]} sequences to train "
                "on; give every process the same data.sources, tokenizer and options"
            )
