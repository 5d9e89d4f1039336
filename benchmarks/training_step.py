"""A training step on one device: its memory against the plan and against a naive step, and the
price of the target.

    python benchmarks/training_step.py --conversations conversations.jsonl

1. What `headstart train --plan one` promises, against one optimizer step on rows of the greatest
   length: tensors that stay are counted one by one; the peak of the others comes from the profiler.
2. The peak of an EAGLE-3 step by sequence length, with activations kept and recomputed, and against
   the same step written naively over a vocabulary of 128,256: float32, D = 576, 7
   training-time-test steps, random weights; without parameters, gradients and optimizer state.
3. Training on cached target states against computing them. Every step is made by each side in turn,
   with a head of its own, on the same batch: states computed online, read from a cache in each
   format, and held in memory, which is training without the target's forward. Losses are compared
   with the online side's at the same step.
4. Where the time of an EAGLE-3 step goes: data, target, each step of training-time test, LM head
   and loss, backward, optimizer. `--parts` prints this table alone.
"""

from __future__ import annotations

import copy
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from accelerate import Accelerator
from common import arguments, save
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from headstart.console import console
from headstart.heads import TargetFeatures, TargetInfo, TargetModules, build_head, eagle3
from headstart.heads.eagle3 import Eagle3Head
from headstart.heads.layers.training_time_test import TrainingTimeTest
from headstart.heads.losses import draft_loss
from headstart.inference.feature_cache import FORMATS, FeatureCache, kept_layers
from headstart.inference.targets.provenance import hardware
from headstart.inference.tuning.machine import turns
from headstart.scripts.command_line import options
from headstart.scripts.measuring.comparison import quartiles
from headstart.train.config import TrainConfig
from headstart.train.data.batches import Batch, Order, Row, collate
from headstart.train.data.token_cache import lengths_of
from headstart.train.engines import autocast, resolved
from headstart.train.features.online import CachedFeatures, cache_bytes, online_features
from headstart.train.features.placement import load_target
from headstart.train.head import head_of, objective_of
from headstart.train.inputs import Inputs, load_inputs
from headstart.train.memory_plan import plan_run
from headstart.train.optim import build_optimizer

STAYS = ("target", "head", "gradients", "optimizer")
WIDTH, VOCABULARY, DRAFT_VOCABULARY, DEPTH = 576, 128_256, 8192, 7
LENGTHS = (512, 1024, 2048, 4096, 8192)
NAIVE_TOKENS = 1024
WARM_UP = 3
"""Steps that are not timed."""


def main() -> None:
    """Three tables and a ratio."""
    parser = arguments(__doc__, "training_step.md")
    parser.add_argument("--config", default="configs/smollm2-eagle3.yaml")
    parser.add_argument("--conversations", required=True, help="JSONL file to train on")
    parser.add_argument("--steps", type=int, default=60, help="on cached states")
    parser.add_argument(
        "--parts", action="store_true", help="only the parts of a step, of --steps steps"
    )
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[*LENGTHS], help="tokens of a sequence"
    )
    args = parser.parse_args()
    if args.parts:
        save(args.output, step_parts(args.config, args.conversations, args.steps))
        return
    lines = plan_against_step(args.config) + peaks(args.lengths) + naive()
    lines += cached_states(args.config, args.conversations, args.steps)
    save(args.output, lines + step_parts(args.config, args.conversations, args.steps))


def plan_against_step(path: str) -> list[str]:
    """A row for each kind of tensor."""
    given = [
        "--config",
        path,
        "--data.sources",
        "[unused.jsonl]",
        "--output",
        "unused",
        "--plan",
        "one",
    ]
    config = resolved(options(TrainConfig, "train", "", given), Accelerator())
    planned = plan_run(config).memory
    planned.pop("copy to save", None)  # no checkpoint is written here
    stays, comes = allocated(config)
    temporary = sum(bytes for name, bytes in planned.items() if name not in STAYS)
    rows = [(name, planned[name], stays[name]) for name in STAYS] + [
        ("temporary", temporary, comes)
    ]
    rows.append(("together", sum(planned.values()), sum(stays.values()) + comes))
    return [
        f"Hardware: {hardware()}. {path}",
        "",
        "| | planned, MiB | measured, MiB | planned / measured |",
        "|---|---|---|---|",
        *(f"| {name} | {a / 2**20:,.0f} | {b / 2**20:,.0f} | {a / b:.3f} |" for name, a, b in rows),
    ]


def allocated(config: TrainConfig) -> tuple[dict[str, int], int]:
    """Bytes that stay, by what they hold, and the peak of the others."""
    accelerator = Accelerator()
    target = load_target(config, accelerator)
    head = head_of(config, target.info, target.config)
    counts_V = torch.arange(target.info.vocab_size).flip(0) + 1
    head.initialize(target.modules, counts_V)
    head.recompute = config.loop.recompute
    optimizer, _ = build_optimizer(head, config.optim, 10, {})
    rows, length = config.loop.micro_batch or config.loop.batch_size, config.data.max_length
    tokens_BT = torch.randint(head.draft_vocab_size, (rows, length))
    batch = Batch(tokens_BT, torch.ones(rows, length, dtype=torch.bool), ((length,),) * rows)

    def step() -> None:
        features = online_features(target, head, batch)
        with autocast(accelerator, config.loop.precision):
            output = head(features, objective_of(config))
        (output.loss / tokens_BT.numel()).backward()
        optimizer.step()

    most = peak_of(step, optimizer)
    parts = getattr(optimizer, "parts", {"": optimizer}).values()
    states = [value for part in parts for state in part.state.values() for value in state.values()]
    return {
        "target": size(target.model.parameters()),
        "head": size(head.parameters()),
        "gradients": size(
            parameter.grad for parameter in head.parameters() if parameter.grad is not None
        ),
        "optimizer": size(value for value in states if torch.is_tensor(value)),
    }, most


def size(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors."""
    return sum(tensor.nbytes for tensor in tensors)


def peaks(lengths: list[int]) -> list[str]:
    """A row for each sequence length."""
    lines = [
        "",
        f"Hardware: {hardware()}. A draft vocabulary of {DRAFT_VOCABULARY:,}.",
        "",
        "| tokens | MiB | KiB a token | recomputed, MiB | KiB a token |",
        "|---|---|---|---|---|",
    ]
    for tokens in lengths:
        row = []
        for recompute in (False, True):
            head, features = random_step(DRAFT_VOCABULARY, tokens)
            head.recompute = recompute
            found = peak(head, partial(our_loss, head, features))
            row += [f"{found / 2**20:,.0f}", f"{found / 2**10 / tokens:,.0f}"]
        lines.append(f"| {tokens:,} | " + " | ".join(row) + " |")
    return lines


def naive() -> list[str]:
    """Both peaks and their ratio."""
    head, features = random_step(VOCABULARY, NAIVE_TOKENS)
    ours, naive = (peak(head, partial(loss, head, features)) for loss in (our_loss, naive_loss))
    return [
        "",
        (
            f"Hardware: {hardware()}. A draft vocabulary of {VOCABULARY:,}, {NAIVE_TOKENS:,}"
            f" tokens: {ours / 2**20:,.0f} MiB, naive {naive / 2**20:,.0f} MiB, ratio"
            f" {ours / naive:.3f}."
        ),
    ]


def random_step(vocabulary: int, tokens: int) -> tuple[Eagle3Head, TargetFeatures]:
    """A head of SmolLM2's dimensions with another vocabulary, and one sequence of random
    features."""
    target = TargetInfo(
        name="random",
        hidden_size=WIDTH,
        vocab_size=vocabulary,
        num_layers=30,
        intermediate_size=1536,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        hidden_act="silu",
        rms_norm_eps=1e-5,
        max_positions=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    )
    embed = torch.nn.Embedding(vocabulary, WIDTH).requires_grad_(False)
    lm_head = torch.nn.Linear(WIDTH, vocabulary, bias=False).requires_grad_(False)
    head = build_head("eagle3", {"depth": DEPTH}, target)
    assert isinstance(head, Eagle3Head)
    features = TargetFeatures(
        features_BTF=torch.randn(1, tokens, 3 * WIDTH),
        last_BTD=torch.randn(1, tokens, WIDTH),
        tokens_BT=torch.randint(0, vocabulary, (1, tokens)),
        loss_mask_BT=torch.ones(1, tokens, dtype=torch.bool),
        modules=TargetModules(embed, lm_head, torch.nn.Identity(), ()),
    )
    return head, features


def our_loss(head: Eagle3Head, features: TargetFeatures) -> Tensor:
    """Loss of the training loop."""
    return head(features).loss


def naive_loss(head: Eagle3Head, features: TargetFeatures) -> Tensor:
    """The same number from whole [tokens, vocabulary] tensors, one after the other as the paper
    writes it."""
    loss = torch.zeros(())
    time = features.tokens_BT.shape[1]
    for step, state_BTD in enumerate(head.drafts(features, TrainingTimeTest(1), DEPTH)):
        # the draft positions whose drafts, up to this depth, lie in the text
        length = time - 2 - step
        target_TV = features.modules.lm_head(
            features.last_BTD[0, 1 + step : 1 + step + length]
        ).softmax(-1)
        draft_TV = head.lm_head(head.norm(state_BTD[0, :length])).log_softmax(-1)
        loss = loss - 0.8**step * (target_TV * draft_TV).sum()
    return loss


def peak(head: Eagle3Head, loss: Callable[[], Tensor]) -> int:
    """The peak of an optimizer's step; see `peak_of`."""
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-5)

    def step() -> None:
        value = loss()
        value.backward()
        optimizer.step()

    return peak_of(step, optimizer)


def peak_of(step: Callable[[], None], optimizer: torch.optim.Optimizer) -> int:
    """Bytes of tensors alive at once in the second of two steps, beyond those that were there
    before it."""
    step()  # now gradients and optimizer state exist
    optimizer.zero_grad(set_to_none=False)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        step()
    changes = [
        event for event in trace.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    alive = most = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        most = max(most, alive)
    return most


def opened_run(
    path: str, conversations: str, number: int
) -> tuple[Accelerator, TrainConfig, Inputs, list[list[Row]]]:
    """A run's inputs, loaded, and the rows of its first steps."""
    given = ["--config", path, "--data.sources", f"[{conversations}]", "--output", "unused"]
    accelerator = Accelerator()
    config = resolved(options(TrainConfig, "train", "", given), accelerator)
    inputs = load_inputs(config, accelerator)
    order = Order(lengths_of(inputs.training), config.loop.batch_size, config.loop.seed)
    steps = itertools.islice((rows for _, rows in order.from_step(0)), number)
    return accelerator, config, inputs, list(steps)


def cached_states(path: str, conversations: str, number: int) -> list[str]:
    """A row for each source of states."""
    accelerator, config, inputs, steps = opened_run(path, conversations, number)
    target, training = inputs.target, inputs.training
    batches = [collate([training[i] for row in rows for i in row]) for rows in steps]
    with tempfile.TemporaryDirectory() as folder:
        sources: dict[str, Callable[[Batch], TargetFeatures]] = {
            "online": partial(online_features, target, inputs.head)
        }
        for name in FORMATS:
            manifest = {"format": name, "layers": kept_layers(inputs.head.feature_layers)}
            cache = FeatureCache(Path(folder) / name, manifest)
            sources[name] = CachedFeatures(target, inputs.head, cache)
            for batch in batches:
                sources[name](batch)
            cache.flush()
            sources[name] = CachedFeatures(
                target, inputs.head, FeatureCache(Path(folder) / name, manifest)
            )
        held = {id(batch): online_features(target, inputs.head, batch) for batch in batches}
        sources["left out"] = lambda batch: held[id(batch)]
        seconds, losses = steps_of(sources, batches, inputs.head, config, accelerator)
    lines = [
        "",
        f"Hardware: {hardware()}. {len(batches)} steps of {config.loop.batch_size} conversations.",
        "",
        (
            "| states | bytes a token | answer tokens/s | of the rate with the target left out |"
            " largest relative difference of a loss |"
        ),
        "|---|---|---|---|---|",
    ]
    tokens = [int(batch.loss_mask_BT.sum()) for batch in batches]
    for name in sources:
        size = f"{cache_bytes(inputs.head, name):,}" if name in FORMATS else "-"
        pairs = list(zip(tokens, seconds[name], seconds["left out"], strict=True))[WARM_UP:]
        rate = quartiles([count / own for count, own, _ in pairs])
        share = quartiles([out / own for _, own, out in pairs])
        apart = max(abs(a - b) / b for a, b in zip(losses[name], losses["online"], strict=True))
        lines.append(
            f"| {name} | {size} | {rate['median']:.0f} | {share['median']:.3f}"
            f" ({share['lower_quartile']:.3f} to {share['upper_quartile']:.3f}) | {apart:.1e} |"
        )
    return lines


def steps_of(
    sources: dict[str, Callable[[Batch], TargetFeatures]],
    batches: list[Batch],
    start: torch.nn.Module,
    config: TrainConfig,
    accelerator: Accelerator,
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds and loss of every step, by side; each step begins with another side."""
    heads = {name: copy.deepcopy(start) for name in sources}
    optimizers = {
        name: build_optimizer(head, config.optim, len(batches), {}) for name, head in heads.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in sources}
    losses: dict[str, list[float]] = {name: [] for name in sources}
    for number, batch in enumerate(batches):
        for name in turns([*sources], number):
            began = time.perf_counter()
            features = sources[name](batch)
            with autocast(accelerator, config.loop.precision):
                output = heads[name](features, objective_of(config))
            (output.loss / batch.loss_mask_BT.sum()).backward()
            torch.nn.utils.clip_grad_norm_(heads[name].parameters(), config.optim.clip)
            optimizer, schedule = optimizers[name]
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            seconds[name].append(time.perf_counter() - began)
            losses[name].append(float(output.losses_K.sum() / output.counts_K.sum()))
        console.print(f"step {number + 1} of {len(batches)}", end="\r")
    return seconds, losses


def step_parts(path: str, conversations: str, number: int) -> list[str]:
    """A row for each part of a step: median of its milliseconds and its share, over all steps but
    the first ones."""
    accelerator, config, inputs, steps = opened_run(path, conversations, number)
    head = inputs.head
    assert isinstance(head, Eagle3Head)
    optimizer, schedule = build_optimizer(head, config.optim, len(steps), {})
    moments: list[tuple[str, float]] = []  # what ended, and when

    def ends(what: str) -> None:
        moments.append((what, time.perf_counter()))

    def timed_loss(*given: Any) -> Any:
        ends("norms of the outputs")
        output = draft_loss(*given)
        ends("LM head and loss, with its gradients")
        return output

    head.midlayer.register_forward_pre_hook(lambda *_: ends("fusion, embedding and rotary"))
    head.midlayer.register_forward_hook(
        lambda *_: ends(f"training-time test {1 + calls('training-time test')}")
    )

    def calls(what: str) -> int:
        return sum(name.startswith(what) for name, _ in moments)

    found: list[dict[str, float]] = []
    tokens = 0
    with patch.object(eagle3, "draft_loss", timed_loss):
        for rows in steps:
            moments.clear()
            ends("begin")
            batch = collate([inputs.training[i] for row in rows for i in row])
            ends("data")
            features = online_features(inputs.target, head, batch)
            ends("target's forward")
            with autocast(accelerator, config.loop.precision):
                output = head(features, inputs.objective)
            (output.loss / batch.loss_mask_BT.sum()).backward()
            ends("backward")
            torch.nn.utils.clip_grad_norm_(head.parameters(), config.optim.clip)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            ends("optimizer")
            seconds: dict[str, float] = {}
            for (_, begin), (what, end) in itertools.pairwise(moments):
                seconds[what] = seconds.get(what, 0.0) + end - begin
            found.append(seconds)
            tokens = max(tokens, batch.tokens_BT.numel())
            console.print(f"step {len(found)} of {len(steps)}", end="\r")
    timed = found[WARM_UP:] or found
    medians = {what: statistics.median(step[what] for step in timed) for what in found[0]}
    whole = sum(medians.values())
    lines = [
        "",
        (
            f"Hardware: {hardware()}. {path}, {len(timed)} steps of {config.loop.batch_size}"
            f" conversations, at most {tokens:,} tokens; target in {config.dtype}, head in"
            f" {config.loop.precision}."
        ),
        "",
        "| part of a step | ms | share |",
        "|---|---|---|",
    ]
    lines += [
        f"| {what} | {1000 * own:,.0f} | {own / whole:.1%} |" for what, own in medians.items()
    ]
    return [*lines, f"| together | {1000 * whole:,.0f} | |"]


if __name__ == "__main__":
    main()
