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
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Dataset

from ..heads.checkpoint import build_head, head_config
from ..inference import Target, load_tokenizer
from .config import LoopConfig, TrainConfig, dtype_of
from .console import Stopped, StopRequest, progress_bar
from .data import (
    Batch,
    Example,
    LengthGroupedBatches,
    check_tokenizer,
    collate,
    count_answer_tokens,
    encode,
    read_conversations,
    split_held_out,
)
from .evaluate import eval_prompts, evaluate
from .features import online_features
from .optim import build_optimizer
from .run import Report, Run, due, flat

PRECISION = {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}


def train(config: TrainConfig) -> Path:
    """Run or continue a training run; return its folder.

    Raises:
        ValueError: anything wrong with the options, the data, or the run that is to be continued.
        Stopped: Ctrl-C or SIGTERM, once a checkpoint has been written.
    """
    accelerator = Accelerator(
        mixed_precision=PRECISION[config.loop.precision],
        log_with=None if config.loop.tracker == "none" else config.loop.tracker,
        project_dir=config.output,
    )
    set_seed(config.loop.seed)
    run = Run(Path(config.output), accelerator)
    run.claim(config)
    if run.last.exists():
        accelerator.print(f"{run.folder} is finished: its heads are {run.best} and {run.last}")
        return run.folder
    kind = config.head["type"]
    options = {name: value for name, value in config.head.items() if name != "type"}
    head_config(kind, options)  # a mistake in the options or the data is told before a model is loaded
    limit = config.data.max_conversations
    conversations = [row for source in config.data.sources for row in read_conversations(source, limit)][:limit]
    target = Target.from_pretrained(
        config.target, dtype_of(config.target_dtype), accelerator.device, config.target_revision
    )
    head = build_head(kind, options, target.info)
    target.check_layers(head.feature_layers)
    training, held_out = split_examples(conversations, config, target)
    eval_prompts(target, held_out, config.eval)  # told now and not at the first evaluation, if there are none
    head.initialize(target.ends, count_answer_tokens(training, target.info.vocab_size))

    batches = LengthGroupedBatches(
        [len(example.tokens) for example in training], config.loop.batch_size, config.loop.seed
    )
    loader = accelerator.prepare(
        DataLoader(cast(Dataset[Example], training), batch_sampler=batches, collate_fn=collate)
    )
    steps_per_epoch = math.ceil(len(loader) / config.loop.accumulation)
    steps = config.loop.max_steps or math.ceil(config.loop.epochs * steps_per_epoch)
    optimizer, schedule = build_optimizer(head.to(accelerator.device), config.optim, steps)
    module, optimizer = accelerator.prepare(head, optimizer)
    accelerator.register_for_checkpointing(schedule)
    accelerator.init_trackers("headstart", config=flat(dataclasses.asdict(config)))
    progress = run.resume()
    accelerator.print(
        f"{type(head).__name__}: {sum(parameter.numel() for parameter in head.parameters()):,} parameters; "
        f"{len(training)} sequences to train on, {len(held_out)} held out; step {progress.step} of {steps}"
    )

    def judge() -> None:
        """Measure real acceptance; keep the head if it is the best so far."""
        found = evaluate(target, accelerator.unwrap_model(module), held_out, config.eval)
        run.judged(progress, accelerator.unwrap_model(module), found, config, last=progress.step == steps)

    report = Report(run, config.loop.log_every, steps, progress)
    with StopRequest() as stop, progress_bar() as bar:
        task = bar.add_task("training", total=steps, completed=progress.step, note="")
        for group in batches_from(progress.step, loader, batches, config.loop, steps_per_epoch):
            if progress.step == steps:
                break
            report.start_step()
            own = [sum(int(batch.loss_mask_BT.sum()) for batch in group), int(stop.wanted)]
            # sync: once a step, for the mean over all ranks, and so that all of them stop at the same step
            answer_tokens, stopping = accelerator.reduce(torch.tensor(own, device=accelerator.device), "sum").tolist()
            if stopping:
                break
            outputs = []
            for batch in group:
                output = module(online_features(target, head, batch))  # `prepare` autocasts the head, and it alone
                # DDP averages gradients over processes; the loss is a mean over all answer tokens of the step.
                accelerator.backward(output.loss * accelerator.num_processes / answer_tokens)
                outputs.append(output)
            norm = accelerator.clip_grad_norm_(module.parameters(), config.optim.clip)
            lr = float(schedule.get_last_lr()[0])
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            progress.step += 1
            progress.answer_tokens += answer_tokens
            report.end_step(outputs, float(norm), lr)
            bar.update(task, completed=progress.step, note=report.note)
            if due(progress.step, config.loop.eval_every) and progress.step < steps:
                judge()
            if due(progress.step, config.loop.save_every) and progress.step < steps:
                run.save(progress, config.loop.keep)
    run.save(progress, config.loop.keep)
    if progress.step == steps:
        judge()
    accelerator.end_training()
    if progress.step < steps:
        raise Stopped(f"stopped at step {progress.step} of {steps}; the same command goes on from there")
    return run.folder


def split_examples(
    conversations: list[dict[str, Any]], config: TrainConfig, target: Target
) -> tuple[list[Example], list[Example]]:
    """Render and tokenize the conversations; some to train on, some held out.

    Raises:
        ValueError: data or a tokenizer that cannot be used; named.
    """
    tokenizer = load_tokenizer(config.target, config.target_revision)
    check_tokenizer(tokenizer, config.target)
    eos = target.end_tokens | {tokenizer.eos_token_id}
    length = min(config.data.max_length, target.max_positions)
    encoded = []
    for number, row in enumerate(conversations):
        try:
            encoded.append(encode(row, tokenizer, eos, length))
        except ValueError as error:
            raise ValueError(f"conversation {number}: {error}") from error
    training, held_out = split_held_out(
        [examples for examples in encoded if examples], config.data.held_out, config.loop.seed
    )
    return list(itertools.chain.from_iterable(training)), list(itertools.chain.from_iterable(held_out))


def batches_from(
    step: int,
    loader: DataLoader[Batch],
    batches: LengthGroupedBatches,
    config: LoopConfig,
    steps_per_epoch: int,
) -> Iterator[list[Batch]]:
    """Groups of `accumulation` batches, epoch after epoch, from where step number `step` left off."""
    for epoch in itertools.count(step // steps_per_epoch):
        # accelerate sets the epoch of what it can reach anew at each start, counting from 0 in a resumed run
        cast(DataLoaderShard, loader).set_epoch(epoch)
        batches.set_epoch(epoch)
        done = step % steps_per_epoch if epoch == step // steps_per_epoch else 0
        rest = itertools.islice(iter(loader), done * config.accumulation, None)
        while group := list(itertools.islice(rest, config.accumulation)):
            yield group
