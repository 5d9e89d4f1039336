"""Tiny seeded targets, a tokenizer, conversations; drafters and draws that drive the decoder into every corner."""

from __future__ import annotations

import atexit
import itertools
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from huggingface_hub import constants
from loopback_hub import Hub
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from headstart.inference import Drafter, DraftTree, Stats, Target, TreeShape
from headstart.inference.drafters.base import DraftContext, PrefillChunk, StepResult
from headstart.inference.logits import RandomSampler, TreeLogitsProcessor
from headstart.inference.loop import Rules, speculate
from headstart.inference.models import dtypes
from headstart.inference.sequences import Sequences
from headstart.inference.tuning import machine
from headstart.inference.verify_step import Decider
from headstart.train.console import show_on_console

pytest_plugins = ["training_fixtures"]
os.environ["HEADSTART_CACHE"] = tempfile.mkdtemp(prefix="headstart-tests-")  # processes that tests start have it too
atexit.register(shutil.rmtree, os.environ["HEADSTART_CACHE"], ignore_errors=True)

show_on_console()  # as commands do: tests read there what a user reads

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|im_start|>", "<|im_end|>")


def build_tokenizer(chat_template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """256 bytes and two special tokens: V = 258."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>")
    fast.chat_template = chat_template
    return fast


def build_model(
    vocab_size: int = 258, seed: int = 0, layers: int = 2, dtype: torch.dtype = torch.float64, head_dim: int = 8
) -> LlamaForCausalLM:
    """A random Llama whose next token really depends on its prefix."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data *= 4
    return model.to(dtype).eval()


@pytest.fixture(autouse=True)
def every_format_as_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """What "auto" takes does not depend on the machine that runs the tests; those about it say what is fast."""
    monkeypatch.setattr(dtypes, "_timed", lambda *_: 1.0)


@pytest.fixture
def nothing_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Nothing of this machine was measured or told yet; the folder where it will be kept."""
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(machine, "_measured", {})
    monkeypatch.setattr(machine, "_told", set())
    return tmp_path / "cache"


@pytest.fixture
def tiny_target() -> Callable[..., Target]:
    """Builds a random target: `tiny_target(vocab_size=..., seed=..., layers=..., dtype=..., head_dim=...)`."""
    return lambda **options: Target(build_model(**options).requires_grad_(False))


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target with its tokenizer, as a folder that every command takes; float32, 258 tokens."""
    folder = tmp_path_factory.mktemp("target")
    tokenizer = build_tokenizer()
    model = build_model(dtype=torch.float32)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def conversations_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 short conversations with answers that can be learned."""
    path = tmp_path_factory.mktemp("data") / "conversations.jsonl"
    rows = []
    for i in range(24):
        messages = [
            {"role": "user", "content": f"count to {i % 5 + 3}"},
            {"role": "assistant", "content": " ".join(str(number) for number in range(1, i % 5 + 4))},
        ]
        rows.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


class Oracle(Drafter):
    """Drafts trees of a shape that hold the true continuation, but for a share of wrong tokens.

    `truths` are the continuations of each row; past its end, or where a text has left it, guesses are random.
    """

    def __init__(self, shape: TreeShape, truths: list[list[int]], vocab_size: int, wrong: float, seed: int = 0) -> None:
        self.shape, self.truths, self.vocab_size, self.wrong = shape, truths, vocab_size, wrong
        self.max_nodes = shape.size
        self.random = torch.Generator().manual_seed(seed)

    def begin(self, start: DraftContext) -> None:
        self.rows = list(range(start.batch_size))
        self.written: list[list[int]] = []

    def read(self, passage: PrefillChunk) -> None:
        """The last passage ends with the target's own choice."""
        self.written = [[root] for root in passage.next_tokens_BT[:, -1].tolist()]

    def replace(self, rows_R: Tensor, other: Any) -> None:
        raise AssertionError("an oracle knows its texts by their place in the first batch")

    def select(self, rows_R: Tensor) -> None:
        self.rows = [self.rows[row] for row in rows_R.tolist()]
        self.written = [self.written[row] for row in rows_R.tolist()]

    def propose(self, roots_B: Tensor) -> DraftTree:
        truths = [self.truths[row] for row in self.rows]
        rows = [self._row(root, written, truth) for root, written, truth in zip(roots_B.tolist(), self.written, truths)]
        batch = len(rows)
        parents = torch.tensor(self.shape.parents).expand(batch, -1)
        return DraftTree(torch.tensor(rows), parents, torch.full((batch,), self.shape.size), self.shape.depth)

    def observe(self, finished: StepResult) -> None:
        for written, tokens in zip(self.written, finished.tokens, strict=True):
            written.extend(tokens)

    def _row(self, root: int, written: list[int], truth: list[int]) -> list[int]:
        """Each node's children are distinct; one of them is true where the parent's path is."""
        tokens, on_truth = {(): root}, {(): truth[: len(written)] == written}
        for parent in ((), *self.shape.paths):
            children = [path for path in self.shape.paths if path[:-1] == parent]
            if not children:
                continue
            place = len(written) + len(parent)
            drawn = torch.randperm(self.vocab_size, generator=self.random).tolist()
            true = truth[place] if on_truth[parent] and place < len(truth) else None
            if true is not None and torch.rand((), generator=self.random) >= self.wrong:
                lucky = int(torch.randint(len(children), (), generator=self.random))
                drawn = [token for token in drawn if token != true]
                drawn.insert(lucky, true)
            for path, token in zip(children, drawn):
                tokens[path], on_truth[path] = token, token == true
        return [tokens[path] for path in ((), *self.shape.paths)]


class AllDraws(RandomSampler):
    """Every outcome of the categorical draws at N nodes at once, as a batch of V^N rows, with its probability."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.ones(())

    def categorical(self, probs: Tensor) -> Tensor:
        nodes, vocab = probs.shape[1:]
        outcomes = torch.tensor(list(itertools.product(range(vocab), repeat=nodes)))
        assert len(outcomes) == len(probs)
        self.weights = probs.gather(2, outcomes[:, :, None])[..., 0].prod(-1)
        return outcomes


class Branch:
    """One path through a tree of random choices; `every_branch` takes them all."""

    def __init__(self, script: list[tuple[int, int]]) -> None:
        self.script, self.place, self.weight = script, 0, 1.0

    def categorical(self, probs: Tensor) -> Tensor:
        return torch.tensor([self._choose(row) for row in probs.reshape(-1, probs.shape[-1])]).reshape(probs.shape[:-1])

    def accept(self, probs: Tensor) -> Tensor:
        chances = [torch.stack([1 - prob, prob]) for prob in probs.flatten()]
        return torch.tensor([self._choose(row) == 1 for row in chances]).reshape(probs.shape)

    def distinct(self, probs: Tensor, count: int) -> Tensor:
        return torch.tensor(
            [self._choose_distinct(row, count) for row in probs.reshape(-1, probs.shape[-1])], dtype=torch.int64
        ).reshape(*probs.shape[:-1], count)

    def _choose_distinct(self, row: Tensor, count: int) -> list[int]:
        chosen: list[int] = []
        while len(chosen) < count:
            rest = row.clone()
            rest[chosen] = 0
            if rest.sum() > 0:
                chosen.append(self._choose(rest / rest.sum()))
            else:
                chosen.append(next(token for token in range(len(row)) if token not in chosen))
        return chosen

    def _choose(self, row: Tensor) -> int:
        options = row.nonzero().flatten().tolist()
        if self.place == len(self.script):
            self.script.append((0, len(options)))
        choice, _ = self.script[self.place]
        self.place += 1
        self.weight *= float(row[options[choice]])
        return int(options[choice])


def every_branch(run: Callable[[Branch], tuple[int, ...]]) -> dict[tuple[int, ...], float]:
    """The exact distribution of what a random program returns."""
    script: list[tuple[int, int]] = []
    found: dict[tuple[int, ...], float] = {}
    while True:
        branch = Branch(script)
        result = run(branch)
        found[result] = found.get(result, 0.0) + branch.weight
        while script and script[-1][0] + 1 == script[-1][1]:
            script.pop()
        if not script:
            return found
        script[-1] = (script[-1][0] + 1, script[-1][1])


def random_shape(seed: int, max_nodes: int = 12, max_depth: int = 4, max_children: int = 3) -> TreeShape:
    """A random static tree."""
    random = torch.Generator().manual_seed(seed)
    paths: list[tuple[int, ...]] = [()]
    for _ in range(int(torch.randint(1, max_nodes, (), generator=random))):
        parent = paths[int(torch.randint(len(paths), (), generator=random))]
        children = sum(path[:-1] == parent and path != () for path in paths)
        if len(parent) < max_depth and children < max_children:
            paths.append((*parent, children))
    return TreeShape.from_paths(paths[1:])


def write(
    target: Target,
    drafter: Any,
    rule: Any,
    prompts: list[Tensor],
    processors: Any,
    draw: Any,
    new_tokens: int,
    slots: int | None = None,
) -> tuple[list[list[int]], Stats]:
    """The loop by itself, with a draw of the test's own: the new tokens of each row."""
    out = Sequences(prompts, new_tokens, frozenset(), slots=slots)
    decide = rule if isinstance(rule, Decider) else Decider(rule)
    rules = Rules(target, decide, TreeLogitsProcessor(processors, [0] * len(prompts)), draw, sampling=True)
    stats = speculate(rules, drafter, out)
    return out.rows, stats


def exactly(target: Target, prompt: Tensor, new_tokens: int, temperature: float) -> dict[tuple[int, ...], float]:
    """The target's own distribution of the next tokens, by one forward for every token of every text."""
    weights = {}
    for text in itertools.product(range(target.info.vocab_size), repeat=new_tokens):
        weight, ids = 1.0, prompt.tolist()
        for token in text:
            logits = target.model(torch.tensor([ids])).logits[0, -1] / temperature
            weight *= float(logits.softmax(-1)[token])
            ids.append(token)
        weights[text] = weight
    return weights


@pytest.fixture
def tools() -> Any:
    """The helpers above, by name."""

    class Tools:
        pass

    Tools.Oracle, Tools.AllDraws = Oracle, AllDraws
    for helper in (every_branch, exactly, random_shape, write):
        setattr(Tools, helper.__name__, staticmethod(helper))
    return Tools


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    server = Hub()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
