"""Measure what this GPU makes of headstart, in under ten minutes and without a network; writes a page of results.

    headstart bench-gpu --output benchmarks --tests tests/gpu

In this order, each part whatever became of the others: the tests for a GPU; whether texts are those of transformers'
`generate`; attention of a tree by kernel; rounds of a model with the shape of Llama-3.1-8B and an EAGLE-3 head, by
engine, tree and text, beside `generate`; a training step.

Weights are random, so acceptance is FORCED, never measured: the true continuation is put into the head's tree, so that
a given number of its drafts is accepted. The head's drafts cost what they cost. The model follows a permutation of its
tokens by a wide margin, so that rounding decides nothing, and every text is compared with that of `generate`.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM, LlamaConfig

from headstart.console import log
from headstart.heads import build_head
from headstart.heads.checkpoints.files import json_ready
from headstart.heads.eagle3 import Eagle3Head
from headstart.heads.layers.training_time_test import TrainingTimeTest
from headstart.heads.objective import Objective
from headstart.inference import Conversation, DraftTree, DynamicShape, SpeculativeLM, Target, TreeShape
from headstart.inference.drafters.base import BatchDrafter, DraftContext, PrefillChunk, StepResult
from headstart.inference.drafters.by_name import tree_drafter
from headstart.inference.engines.attention import has_tree_kernel
from headstart.inference.provenance import provenance
from headstart.inference.tuning.tree_search import best_static_tree, default_accuracy
from headstart.options import CommandOptions
from headstart.scripts.command_line import options, run
from headstart.scripts.measuring.bandwidth import now
from headstart.train.config import OptimConfig
from headstart.train.data.batches import collate
from headstart.train.data.chat_template import Example
from headstart.train.features.online import online_features
from headstart.train.optim import build_optimizer
from headstart.train.report import count_flops, peak_tflops

LLAMA_8B: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "bos_token_id": None,
    "eos_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}
TINY = LLAMA_8B | {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8}
TINY |= {"num_attention_heads": 8}
DEPTH, WIDTH = 7, 10
"""Depth and width of the trees, as in EAGLE-2 (arXiv:2406.16858)."""
TREES = {1: 0, 4: 2, 8: 3, 60: 4}
"""Nodes of a round, of which so many drafts are accepted; up to eight nodes form a chain."""
GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": [], "pad_token_id": 0}
"""Settings of every answer: greedy, and without an end."""
TOKENS = 150
"""New tokens that are timed."""
TRAINING_STEPS = 5
"""Training steps that are timed."""
OBJECTIVE = Objective()


@dataclass(frozen=True)
class BenchGpuConfig(CommandOptions):
    """Measure rounds and a training step on this device, for a large model with random weights."""

    required = ("output",)
    most_used = ("output", "tests", "minutes")

    output: str = ""
    """Folder for gpu.md, the page, and gpu.json."""
    tests: str | None = None
    """Folder of the project's tests for a GPU, which run first; null for none."""
    texts: list[int] = dataclasses.field(default_factory=lambda: [512, 4096, 16384])
    """Tokens before the rounds that are timed."""
    compiled: bool = True
    """Also measure rounds whose forward torch.compile has fused; this takes a minute or two."""
    training: list[int] = dataclasses.field(default_factory=lambda: [4, 2048])
    """Rows of a training step, and tokens of each."""
    minutes: float = 9.0
    """After which no other part begins."""
    tiny: bool = False
    """Measure a tiny model, on any device: to try the command out."""


def main(arguments: list[str]) -> None:
    """Parse and measure."""
    bench_gpu(options(BenchGpuConfig, "bench-gpu", __doc__, arguments))


def bench_gpu(config: BenchGpuConfig) -> dict[str, Any]:
    """Measure, log, and write the page after every part."""
    bench = Bench(config)
    for name, part in PARTS.items():
        if time.monotonic() > bench.deadline:
            log.info(f"{config.minutes:g} minutes are over: {name} is left out")
            continue
        try:
            part(bench)
        except Exception as error:  # what can be measured is worth having
            traceback.print_exc()
            bench.add(name, failed=repr(error)[:300])
        gc.collect()
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()
    return bench.report


class Bench:
    """Results so far, and the device."""

    def __init__(self, config: BenchGpuConfig) -> None:
        if len(config.training) != 2 or min(config.training) < 1:
            raise ValueError(f"training needs a number of rows and of tokens, not {config.training}")
        if min(config.texts, default=0) < 1:
            raise ValueError(f"texts needs lengths of at least one token, not {config.texts}")
        self.config = config
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.deadline = time.monotonic() + 60 * config.minutes
        self.report: dict[str, Any] = {**provenance(), "acceptance": "forced, not measured: weights are random"}

    def add(self, part: str, **row: Any) -> None:
        """Log a row and write everything."""
        self.report.setdefault(part, []).append(row)
        log.info(f"{part}: " + ", ".join(f"{name} {value}" for name, value in row.items()))
        folder = Path(self.config.output)
        folder.mkdir(parents=True, exist_ok=True)
        whole = json.dumps(json_ready(self.report), indent=1)
        (folder / "gpu.json").write_text(whole + "\n", encoding="utf-8")
        (folder / "gpu.md").write_text(page(self.report), encoding="utf-8")

    def pair(
        self, dtype: torch.dtype, layers: int | None = None, groups: int | None = None
    ) -> tuple[Target, Eagle3Head]:
        """A target whose next token is a permutation of its newest by a wide margin, and a random head for it."""
        torch.manual_seed(0)
        shape = LlamaConfig(**(TINY if self.config.tiny else LLAMA_8B))
        shape.num_hidden_layers = layers or shape.num_hidden_layers
        shape.num_key_value_heads = groups or shape.num_key_value_heads
        with self.device, torch.no_grad():
            model = AutoModelForCausalLM.from_config(shape, dtype=dtype).eval().requires_grad_(False)
            embedding = model.model.embed_tokens.weight.mul_(50)
            for block in model.model.layers:
                block.self_attn.o_proj.weight.mul_(0.02)
                block.mlp.down_proj.weight.mul_(0.02)
            model.lm_head.weight.copy_(embedding[torch.randperm(shape.vocab_size)]).mul_(0.02)
        target = Target(model)
        return target, self.new_head(target, dtype).eval().requires_grad_(False)

    def new_head(self, target: Target, dtype: torch.dtype) -> Eagle3Head:
        """An EAGLE-3 head as published: seven steps, 32,000 draft tokens."""
        vocabulary = target.info.vocab_size
        shape = {"depth": DEPTH, "draft_vocab_size": min(32000, vocabulary), "start": "random"}
        with self.device:
            head = build_head("eagle3", shape, target.info).to(dtype)
            head.initialize(target.modules, torch.ones(vocabulary, dtype=torch.int64))
        assert isinstance(head, Eagle3Head)
        return head

    def prompt(self, target: Target, length: int, rows: int = 1, seed: int = 1) -> Tensor:
        """Random tokens [rows, length]."""
        random = torch.Generator().manual_seed(seed)
        return torch.randint(target.info.vocab_size, (rows, length), generator=random).to(self.device)


def answer(lm: SpeculativeLM, prompt_BT: Tensor, tokens: int, **more: Any) -> Any:
    """The output of so many tokens, greedy and without an end."""
    mask_BT = torch.ones_like(prompt_BT)
    return lm.generate(prompt_BT, attention_mask=mask_BT, max_new_tokens=tokens, **GREEDY, **more)


def reference(target: Target, prompt_BT: Tensor, tokens: int) -> Tensor:
    """The same of transformers."""
    mask_BT = torch.ones_like(prompt_BT)
    written: Tensor = target.model.generate(prompt_BT, attention_mask=mask_BT, max_new_tokens=tokens, **GREEDY)
    return written


class ForcedDrafter(BatchDrafter):
    """A head's trees, with the true continuation on one path, so that a given number of drafts is accepted."""

    def __init__(self, head: BatchDrafter, shape: TreeShape, truth_T: Tensor, accepted: int, vocabulary: int) -> None:
        self.head = head
        self.parts = (head,)
        self.feature_layers = head.feature_layers
        self.shape = shape
        self.max_nodes = shape.size
        nodes = [(), *shape.paths]
        longest = max(shape.paths, key=len)
        path = [nodes.index(longest[:depth]) for depth in range(1, len(longest) + 1)]
        self.path_K = torch.tensor(path, device=truth_T.device)
        depths_K = torch.arange(len(path), device=truth_T.device)
        positions_T1 = torch.arange(len(truth_T), device=truth_T.device)[:, None]
        ahead_TK = truth_T[(positions_T1 + depths_K).clamp(max=len(truth_T) - 1)]
        self.forced_TK = torch.where(depths_K < accepted, ahead_TK, (ahead_TK + 1) % vocabulary)
        """By new tokens so far: the tokens on the path."""
        self.parents_1N = torch.tensor([shape.parents], device=truth_T.device)
        self.written = 0

    def begin(self, context: DraftContext) -> None:
        self.head.begin(context)

    def prefill(self, chunk: PrefillChunk) -> None:
        self.head.prefill(chunk)
        self.written = 1

    def propose(self, roots_B: Tensor) -> DraftTree:
        tree = self.head.propose(roots_B)
        tokens_BN = tree.tokens_BN.index_copy(1, self.path_K, self.forced_TK[self.written : self.written + 1])
        if self.shape.is_chain:
            return DraftTree.of_shape(self.shape, tokens_BN)
        sizes_B = torch.full_like(roots_B, self.shape.size)
        return DraftTree(tokens_BN, self.parents_1N, sizes_B, self.shape.depth, padding=False)

    def observe(self, step: StepResult) -> None:
        self.head.observe(step)
        self.written += len(step.tokens[0])


def forced(target: Target, head: Eagle3Head, truth_T: Tensor, nodes: int, accepted: int) -> SpeculativeLM:
    """A decoder whose rounds of so many nodes accept so many drafts; of one node it decodes plainly."""
    if nodes == 1:
        return SpeculativeLM(target)
    chain = TreeShape.chain(nodes - 1)
    if nodes <= DEPTH + 1:
        drafter, shape = tree_drafter(head, chain, target.draft_modules), chain
    else:
        drafter = tree_drafter(head, DynamicShape(nodes, DEPTH, WIDTH), target.draft_modules)
        shape = best_static_tree(default_accuracy(DEPTH, WIDTH), nodes)
    return SpeculativeLM(target, ForcedDrafter(drafter, shape, truth_T, accepted, target.info.vocab_size))


def run_tests(bench: Bench) -> None:
    """The project's tests on this device."""
    if bench.config.tests is None:
        return
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "--tb=short"]
    command += [bench.config.tests, "-n", "auto", "--dist", "worksteal"]
    environment = {**os.environ, "HEADSTART_TEST_DEVICE": bench.device.type}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    lines = done.stdout.strip().splitlines()
    (Path(bench.config.output) / "gpu_tests.txt").write_text(done.stdout, encoding="utf-8")
    bench.add("tests", result=lines[-1] if lines else done.stderr[-300:])


def identity(bench: Bench) -> None:
    """Greedy texts against those of `generate`: engines, trees, batches, and turns that begin anywhere."""
    layers = 8
    target, head = bench.pair(torch.float32, layers)
    prompt_1T = bench.prompt(target, 77)
    expected = reference(target, prompt_1T, 48)
    truth_T = F.pad(expected[0, 77:], (0, 16))
    modes: tuple[bool | str, ...] = (False, "auto")
    for mode, nodes in itertools.product(modes, (1, 8, 60)):
        target.compile(mode)
        output = answer(forced(target, head, truth_T, nodes, TREES[nodes]), prompt_1T, 48)
        equal = torch.equal(output.sequences, expected)
        length = round(output.stats.acceptance_length, 2)
        bench.add(
            "identity", what=f"float32, {nodes} nodes, {target.engine.name}", equal=equal, acceptance_length=length
        )
    rows = [bench.prompt(target, length, seed=length)[0] for length in (77, 20, 45)]
    padded_BT = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side="left")
    mask_BT = torch.nn.utils.rnn.pad_sequence(list(map(torch.ones_like, rows)), batch_first=True, padding_side="left")
    lm = SpeculativeLM(target, tree_drafter(head, DynamicShape(60, DEPTH, WIDTH), target.draft_modules))
    written = lm.generate(padded_BT, attention_mask=mask_BT, max_new_tokens=24, **GREEDY).sequences[:, 77:]
    alone = [reference(target, row[None], 24)[0, len(row) :] for row in rows]
    bench.add("identity", what="float32, three rows", equal=torch.equal(written, torch.stack(alone)))
    many = target.info.num_attention_heads
    for dtype, groups in itertools.product((torch.float32, torch.bfloat16), (many // 4, many)):
        target, head = bench.pair(dtype, layers, groups)
        target.compile("auto")
        lm = SpeculativeLM(target, tree_drafter(head, TreeShape.chain(3), target.draft_modules))
        past, text_1T, equal = Conversation(), bench.prompt(target, 21), True
        for more in (5, 6, 7, 9, 300):  # what is kept is no multiple of eight: attention begins anywhere
            written = answer(lm, text_1T, 6, past_key_values=past).sequences
            equal = equal and torch.equal(written, reference(target, text_1T, 6))
            text_1T = torch.cat([written, bench.prompt(target, more)], dim=1)
        bench.add("identity", what=f"five turns, {dtype}, {groups} heads of keys", equal=equal)


def attention(bench: Bench) -> None:
    """Microseconds of a layer's attention over a tree, by kernel."""
    if not has_tree_kernel(bench.device, torch.bfloat16, 128):
        return
    for slots in (512, 4096, 32768):
        caches = torch.randn(32, 2, 1, 8, slots, 128, device=bench.device, dtype=torch.bfloat16)
        for nodes in (1, 8, 60):
            bench.add("attention", slots=slots, nodes=nodes, **attention_us(caches, nodes))


def attention_us(caches: Tensor, nodes: int) -> dict[str, float | None]:
    """By kernel, the microseconds of a layer, from a graph over the caches of all layers [L, 2, B, G, S, E]."""
    from headstart.inference.engines.tree_kernel import tree_attention

    slots, device = caches.shape[4], caches.device
    query = torch.randn(1, nodes, 32, 128, device=device, dtype=caches.dtype).transpose(1, 2)
    grouped = torch.randn(1, 8, 4 * nodes, 128, device=device, dtype=caches.dtype)
    mask = torch.zeros(1, 1, 4 * nodes, slots, device=device, dtype=caches.dtype)
    above = torch.ones(1, nodes, nodes, dtype=torch.bool, device=device).tril()
    depths = torch.arange(nodes, device=device)[None]
    lengths = torch.tensor([slots - nodes], device=device)

    def by_kernel() -> None:
        for keys, values in caches:
            tree_attention(query, keys, values, above, depths, lengths)

    def by_sdpa(backend: SDPBackend, given: Tensor | None) -> None:
        with sdpa_kernel([backend]):
            for keys, values in caches:
                F.scaled_dot_product_attention(grouped, keys, values, attn_mask=given)

    calls: dict[str, Callable[[], None]] = {
        "tree kernel": by_kernel,
        "cuDNN, masked": partial(by_sdpa, SDPBackend.CUDNN_ATTENTION, mask),
        "efficient, masked": partial(by_sdpa, SDPBackend.EFFICIENT_ATTENTION, mask),
        "flash, no mask": partial(by_sdpa, SDPBackend.FLASH_ATTENTION, None),
    }
    found: dict[str, float | None] = {}
    for name, call in calls.items():
        try:
            found[name] = round(1000 * graph_ms(call) / len(caches), 1)
        except RuntimeError:  # a kernel that this card lacks
            found[name] = None
    return found


def graph_ms(call: Callable[[], Any], times: int = 9) -> float:
    """Median milliseconds of a replay of a CUDA graph of a call."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        call()
    taken = []
    for _ in range(times):
        begin = now(torch.device("cuda"))
        graph.replay()
        taken.append(now(torch.device("cuda")) - begin)
    return 1000 * statistics.median(taken)


def rounds(bench: Bench) -> None:
    """Rounds by engine, text and tree, and the tokens that they give a second, beside `generate`."""
    target, head = bench.pair(torch.bfloat16)
    modes: list[bool | str] = [False, "auto", *([True] if bench.config.compiled else [])]
    truths: dict[int, Tensor] = {}
    for length in bench.config.texts:
        prompt_1T = bench.prompt(target, length)
        target.compile("auto")
        truths[length] = F.pad(answer(SpeculativeLM(target), prompt_1T, TOKENS).sequences[0, length:], (0, 16))
    first = bench.config.texts[0]
    prompt_1T = bench.prompt(target, first)
    target.compile(False)
    with seconds() as whole:
        written = reference(target, prompt_1T, 66)
    with seconds() as begun:
        reference(target, prompt_1T, 2)
    equal = torch.equal(written[0, first:], truths[first][:66])
    rate = round(64 / (whole[0] - begun[0]), 1)
    bench.add("rounds", engine="transformers generate", text=first, nodes=1, tokens_per_second=rate, equal=equal)
    for mode in modes:
        target.compile(mode)
        # Eager rounds take as long after any text: what takes time is to launch them.
        for length in bench.config.texts if mode == "auto" else bench.config.texts[:1]:
            for nodes, accepted in TREES.items():
                if time.monotonic() > bench.deadline:
                    return
                lm = forced(target, head, truths[length], nodes, accepted)
                bench.add(
                    "rounds", engine=target.engine.name, text=length, nodes=nodes, **timed(bench, lm, length, truths)
                )


def timed(bench: Bench, lm: SpeculativeLM, length: int, truths: dict[int, Tensor]) -> dict[str, Any]:
    """Rounds of one case: the first generation records or compiles, the second is timed, the third is profiled."""
    prompt_1T = bench.prompt(lm.target, length)
    with seconds() as first:
        answer(lm, prompt_1T, 40)
    output = answer(lm, prompt_1T, TOKENS)
    stats = output.stats
    return {
        "tokens_per_second": round(stats.tokens / sum(stats.round_seconds), 1),
        "acceptance_length": round(stats.acceptance_length, 2),
        "round_ms": round(1000 * statistics.median(stats.round_seconds), 2),
        "first_s": round(first[0], 1),
        "equal": torch.equal(output.sequences[0, length:], truths[length][:TOKENS]),
        **profiled(bench, lm, prompt_1T),
    }


def profiled(bench: Bench, lm: SpeculativeLM, prompt_1T: Tensor, skip: int = 5, count: int = 8) -> dict[str, Any]:
    """Launches, graphs, waits and busy milliseconds of a round, by torch's profiler."""
    if bench.device.type != "cuda":
        return {}
    from torch.profiler import ProfilerActivity, profile

    profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
    seen = itertools.count(1)

    def step(_: Any) -> None:
        number = next(seen)
        if number == skip:
            torch.cuda.synchronize()
            profiler.start()
        elif number == skip + count:
            torch.cuda.synchronize()
            profiler.stop()

    lm.round_callbacks.append(step)
    try:
        answer(lm, prompt_1T, TOKENS)
    finally:
        lm.round_callbacks.remove(step)
    if next(seen) <= skip + count:
        return {}
    events = profiler.key_averages()

    def calls(*names: str) -> float:
        return sum(event.count for event in events if event.key.startswith(names)) / count

    busy = sum(event.self_device_time_total for event in events if "cuda" in str(event.device_type).lower())
    return {
        "launches": calls("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync"),
        "graphs": calls("cudaGraphLaunch"),
        "waits": calls("cudaStreamSynchronize", "cudaEventSynchronize"),
        "busy_ms": round(busy / count / 1000, 2),
    }


@contextmanager
def seconds() -> Iterator[list[float]]:
    """A list to which the seconds that the block took are added."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    taken: list[float] = []
    begin = now(device)
    yield taken
    taken.append(now(device) - begin)


def training(bench: Bench) -> None:
    """A training step on the device, and its share of the peak arithmetic."""
    target, _ = bench.pair(torch.bfloat16)
    rows, length = (2, 32) if bench.config.tiny else bench.config.training
    bench.add("training", **training_of(bench, target, rows, length))


def training_of(bench: Bench, target: Target, rows: int, length: int) -> dict[str, Any]:
    """Time training steps; shares of a peak are None where it is unknown, the peak of memory is None on a CPU."""
    device = target.device
    torch.manual_seed(0)
    head = bench.new_head(target, torch.float32).train()
    optimizer, _ = build_optimizer(head, OptimConfig(), 100, {})
    tokens_BT = torch.randint(target.info.vocab_size, (rows, length), generator=torch.Generator().manual_seed(0))
    examples = [Example(row, [True] * length) for row in tokens_BT.tolist()]
    flops = count_flops(partial(online_features, target, head), head, OBJECTIVE, examples[:1], False, False)
    flops *= length * rows
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    timed_step(target, head, optimizer, examples)  # warms up
    turns = [timed_step(target, head, optimizer, examples) for _ in range(TRAINING_STEPS)]
    start = now(device)
    for _ in range(TRAINING_STEPS):
        timed_step(target, head, optimizer, examples, apart=False)
    seconds = (now(device) - start) / TRAINING_STEPS
    tflops = flops / seconds / 1e12
    peak = peak_tflops(torch.cuda.get_device_name()) if device.type == "cuda" else None
    return {
        "rows": rows,
        "length": length,
        "tokens_per_second": rows * length / seconds,
        "teraflops": tflops,
        "model_flop_utilisation": None if peak is None else tflops / peak,
        "milliseconds": {part: 1000 * statistics.median(turn[part] for turn in turns) for part in turns[0]},
        "peak_memory_GB": torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else None,
    }


def timed_step(
    target: Target, head: Eagle3Head, optimizer: torch.optim.Optimizer, examples: list[Example], apart: bool = True
) -> dict[str, float]:
    """Make a step; the seconds of its parts if `apart`.

    The time of the loss is that of the head's forward less that of its layers, which run a second time to be timed.
    """
    device = target.device
    clock: Callable[[], float] = (lambda: now(device)) if apart else (lambda: 0.0)
    marks = [clock()]
    batch = collate(examples)
    batch.tokens_BT.to(device)
    marks.append(clock())
    features = online_features(target, head, batch)
    marks.append(clock())
    with torch.autocast(device.type, torch.bfloat16):
        if apart:
            with torch.no_grad():
                head.drafts(features, TrainingTimeTest(head.config.num_layers), head.max_depth)
        marks.append(clock())
        output = head(features, OBJECTIVE)
    marks.append(clock())
    (output.loss / max(batch.loss_mask_BT.numel(), 1)).backward()
    marks.append(clock())
    torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    marks.append(clock())
    parts = ("batch", "target", "head", "loss", "backward", "optimizer")
    seconds = dict(zip(parts, (b - a for a, b in itertools.pairwise(marks)), strict=True))
    seconds["loss"] = max(seconds["loss"] - seconds["head"], 0.0)
    return seconds


def page(report: dict[str, Any]) -> str:
    """The page of results."""
    lines = [
        "# On a GPU",
        "",
        f"{report['hardware']}; torch {report['versions']['torch']}, transformers "
        f"{report['versions']['transformers']}. Made by `headstart bench-gpu --output benchmarks --tests tests/gpu`. "
        "The model has the shape of Llama-3.1-8B and random weights, so acceptance is forced, not measured: of a "
        "round's nodes a given number is accepted, and the head drafts at its full cost.",
    ]
    for note in report.get("notes", []):
        lines += ["", note]
    for part in PARTS:
        rows = report.get(part, [])
        if not rows:
            continue
        lines += ["", f"## {part.capitalize()}", "", (PARTS[part].__doc__ or "").strip(), ""]
        columns = list(dict.fromkeys(name for row in rows for name in row if name != "milliseconds"))
        lines.append("| " + " | ".join(name.replace("_", " ") for name in columns) + " |")
        lines.append("|---" * len(columns) + "|")
        for row in rows:
            lines.append("| " + " | ".join(shown(row.get(name)) for name in columns) + " |")
        for row in rows:
            if "milliseconds" in row:
                parts = ", ".join(f"{name} {value:.1f}" for name, value in row["milliseconds"].items())
                lines += ["", f"Milliseconds of a step's parts, each waited for: {parts}."]
    return "\n".join(lines) + "\n"


def shown(value: Any) -> str:
    """A cell of a table."""
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return "" if value is None else str(value)


PARTS: dict[str, Callable[[Bench], None]] = {
    "tests": run_tests,
    "identity": identity,
    "attention": attention,
    "rounds": rounds,
    "training": training,
}
"""What is measured, in this order."""

if __name__ == "__main__":
    run(main, sys.argv[1:])
