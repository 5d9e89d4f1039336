"""The training loop: conversations -> the frozen target's features -> the head's loss -> a step.

    accelerate launch scripts/train.py --config configs/smollm2-medusa.yaml

A run's folder holds `best/` and `last/` (head checkpoints), `checkpoints/` (everything needed to go on), `log.jsonl`
and `config.yaml`. Started again, a run goes on from its newest checkpoint and ends with the weights that it would
have had without the interruption.
"""

from __future__ import annotations

import copy
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
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedTokenizerBase

from ..heads import DraftHead, HeadOutput
from ..heads.checkpoint import HeadFacts, build_head, copy_weights, head_config
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
    data_origin,
    encode,
    read_conversations,
    split_held_out,
)
from .evaluate import eval_prompts, evaluate
from .features import KeptFeatures, online_features
from .optim import build_optimizer
from .provenance import provenance
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
    tokenizer = load_tokenizer(config.target, config.target_revision)
    check_tokenizer(tokenizer, config.target)
    origin = {**target.origin, **data_origin(tokenizer, config.data.thinking)}
    training, held_out = split_examples(conversations, config, target, tokenizer)
    eval_prompts(target, held_out, config.eval)  # told now and not at the first evaluation, if there are none
    counts_V = count_answer_tokens(training, target.info.vocab_size)
    if config.init_from is None:
        head.initialize(target.ends, counts_V)
    else:
        warm_start(head, config.init_from, origin)
    coverage = float(counts_V[head.target_tokens(torch.arange(head.draft_vocab_size))].sum() / counts_V.sum())
    joint, slower = None, {}
    if config.adapter.rank > 0:
        from .adapter import JointModule  # brings peft along, whose import takes a second

        joint = JointModule(target, head, config.adapter)
        slower = {id(weight): config.adapter.head_lr_ratio for weight in joint.adapter.values()}

    batches = LengthGroupedBatches(
        [len(example.tokens) for example in training], config.loop.batch_size, config.loop.seed
    )
    loader = accelerator.prepare(
        DataLoader(cast(Dataset[Example], training), batch_sampler=batches, collate_fn=collate)
    )
    steps_per_epoch = math.ceil(len(loader) / config.loop.accumulation)
    steps = config.loop.max_steps or math.ceil(config.loop.epochs * steps_per_epoch)
    trained = (joint or head).to(accelerator.device)
    optimizer, schedule = build_optimizer(trained, config.optim, steps, slower)
    module, optimizer = accelerator.prepare(trained, optimizer)
    joint_from = round(config.adapter.heads_first * steps)
    accelerator.register_for_checkpointing(schedule)
    accelerator.init_trackers("headstart", config=flat(dataclasses.asdict(config)))
    progress = run.resume()
    accelerator.print(
        f"{type(head).__name__}: {sum(parameter.numel() for parameter in head.parameters()):,} parameters; "
        f"its {head.draft_vocab_size:,} tokens cover {coverage:.2%} of the answers; "
        f"{len(training)} sequences to train on, {len(held_out)} held out; step {progress.step} of {steps}"
    )

    def judge() -> None:
        """Measure real acceptance; keep the head if it is the best so far."""
        kept_head = copy.deepcopy(head).to(dtype_of(config.loop.save_dtype))
        found = evaluate(target, kept_head, held_out, config.eval)
        facts = HeadFacts(
            tree=found.tree,
            training={**provenance(), "config": dataclasses.asdict(config), **dataclasses.asdict(progress)},
            measured={"coverage": coverage, **found.measured(config.eval)},
            origin=origin,
            adapted=joint is not None,
        )
        run.judged(progress, kept_head, found, facts, joint.peft if joint else None, last=progress.step == steps)

    again = config.data.keep_features > 0 and steps > steps_per_epoch  # a conversation is read more than once
    kept = KeptFeatures(target, head, config.data.keep_features) if again else None
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
                # `prepare` autocasts the module, and it alone
                if joint:
                    output = module(batch, progress.step >= joint_from)
                else:
                    output = module(kept.of(batch) if kept else online_features(target, head, batch))
                # DDP averages gradients over processes; the loss is a mean over all answer tokens of the step.
                accelerator.backward(output.loss * accelerator.num_processes / answer_tokens)
                outputs.append(output)
            norm = accelerator.clip_grad_norm_(module.parameters(), config.optim.clip)
            check_finite(accelerator, outputs, norm, group, progress.step + 1, run)
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
    conversations: list[dict[str, Any]],
    config: TrainConfig,
    target: Target,
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[list[Example], list[Example]]:
    """Render and tokenize the conversations; some to train on, some held out.

    Raises:
        ValueError: data that cannot be used; named.
    """
    eos = target.end_tokens | {tokenizer.eos_token_id}
    length = min(config.data.max_length, target.max_positions)
    encoded = []
    for number, row in enumerate(conversations):
        try:
            examples = encode(row, tokenizer, eos, length, config.data.thinking)
            encoded.append([dataclasses.replace(example, conversation=number) for example in examples])
        except ValueError as error:
            raise ValueError(f"conversation {number}: {error}") from error
    training, held_out = split_held_out(
        [examples for examples in encoded if examples], config.data.held_out, config.loop.seed
    )
    return list(itertools.chain.from_iterable(training)), list(itertools.chain.from_iterable(held_out))


def warm_start(head: DraftHead, source: str, origin: dict[str, Any]) -> None:
    """Take the weights and the draft vocabulary of another head.

    Raises:
        ValueError: it does not fit, or its vocabulary belongs to another tokenizer.
    """
    facts = copy_weights(head, source)
    trained = facts.origin.get("tokenizer")
    if trained not in (None, origin["tokenizer"]):
        raise ValueError(
            f"init_from {source!r} was trained with tokenizer {trained}, not {origin['tokenizer']}: its draft "
            "vocabulary means other tokens; choose a head of the same tokenizer, or null"
        )


def check_finite(
    accelerator: Accelerator, outputs: list[HeadOutput], norm: Tensor, group: list[Batch], step: int, run: Run
) -> None:
    """Stop before a step that would spoil the weights.

    Raises:
        ValueError: naming the step, this process's conversations, and where the run can be continued from.
    """
    loss = accelerator.reduce(torch.stack([output.loss.detach() for output in outputs]).sum(), "sum")
    # In float16 the gradient scaler meets infinite gradients by itself, with a smaller scale.
    if torch.isfinite(loss) and (torch.isfinite(norm) or accelerator.mixed_precision == "fp16"):
        return
    numbers = sorted(number for batch in group for number in batch.conversations)
    raise ValueError(
        f"step {step}: the loss is {float(loss)}, the gradient norm {float(norm)}; training stops. Its batch held the "
        f"conversations {numbers} (counted from 0 over all sources). The newest checkpoint is "
        f"{run.newest or 'not yet written'}; a lower optim.lr or a larger optim.warmup often helps"
    )


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
