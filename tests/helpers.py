"""Tiny seeded models, a tokenizer and heads; drafters and samplers that drive the decoder into
every corner."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from headstart.heads import CheckpointMetadata, DraftHead, TargetInfo, build_head
from headstart.heads.checkpoints.save_load import save_head
from headstart.heads.layers.tree_slots import TreeSlots
from headstart.inference import (
    Drafter,
    DraftTree,
    GenerateOutput,
    SpeculativeLM,
    Stats,
    Target,
    TreeShape,
)
from headstart.inference.drafters.base import BatchDrafter, DraftContext, PrefillChunk
from headstart.inference.drafters.round import Round
from headstart.inference.engines.base import TargetOutput
from headstart.inference.rounds.loop import speculate
from headstart.inference.rounds.observers import DecodingCall, RoundObserver
from headstart.inference.rounds.sequences import Sequences
from headstart.inference.trees.logits import TreeLogitsProcessor
from headstart.inference.trees.stats import RoundRecord
from headstart.train.config import TrainConfig
from headstart.train.data.chat_template import Example
from headstart.train.data.split import rendering, split_held_out

DEVICE = os.environ.get("HEADSTART_TEST_DEVICE", "")
"""Where tests/gpu runs: "sim", "cuda", or "" for nowhere."""
VOCAB = 40
"""Vocabulary of the targets in tests/gpu."""
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content']"
    " }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|im_start|>", "<|im_end|>")
INFO = TargetInfo(
    name="some/target",
    hidden_size=16,
    vocab_size=40,
    num_layers=12,
    intermediate_size=24,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    hidden_act="silu",
    rms_norm_eps=1e-6,
    max_positions=512,
    rope_parameters={"rope_type": "default", "rope_theta": 5e5},
)
"""Dimensions of a target that needs no weights."""


SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": None,
}
"""Of tiny models, as their configs name them."""


def build_tokenizer(chat_template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """256 bytes and two special tokens: V = 258."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    fast.chat_template = chat_template
    return fast


def cleaning(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """One that removes spaces before punctuation, as for models that are not BPE."""
    other = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    other.clean_up_tokenization_spaces = True
    other.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    return other


def pairs(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Few cases, a value of each axis, in which every two values of different axes meet."""
    values = [list(axis) for axis in axes]
    cases = list(itertools.product(*(range(len(axis)) for axis in values)))
    meetings = {case: set(itertools.combinations(enumerate(case), 2)) for case in cases}
    missing = set().union(*meetings.values())
    chosen = []
    while missing:
        best = max(cases, key=lambda case: len(meetings[case] & missing))
        missing -= meetings[best]
        chosen.append(tuple(axis[place] for axis, place in zip(values, best, strict=True)))
    return chosen


def warnings_of(call: Callable[[], Any]) -> list[str]:
    """What a call warns of."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        call()
    return [str(each.message) for each in told]


def build_model(
    vocab_size: int = 258,
    seed: int = 0,
    layers: int = 2,
    dtype: torch.dtype = torch.float64,
    **sizes: Any,
) -> LlamaForCausalLM:
    """A random Llama whose next token really depends on its prefix; others of `SIZES` by name."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=vocab_size, num_hidden_layers=layers, **SIZES | sizes)
    )
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data *= 4
    return model.to(dtype).eval()


def build_t5(vocab_size: int, seed: int = 0, layers: int = 2, **options: Any) -> Any:
    """A random T5 whose next token depends on its prefix and its input, in float64."""
    torch.manual_seed(seed)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": layers, "num_heads": 4}
    distances = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 16}
    special = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    config = T5Config(
        vocab_size=vocab_size, **sizes, **distances, **{"dropout_rate": 0.0} | special | options
    )
    model = T5ForConditionalGeneration(config).double().eval()
    for parameter in model.parameters():
        parameter.data *= 3 if parameter.ndim > 1 else 1
    return model.requires_grad_(False)


def leaving_out(values: dict[str, Any], *names: str) -> dict[str, Any]:
    """A dict without these keys."""
    return {name: value for name, value in values.items() if name not in names}


@contextmanager
def changed_json(path: Path) -> Iterator[Any]:
    """What a file of JSON holds, which the block changes there."""
    content = json.loads(path.read_text(encoding="utf-8"))
    yield content
    path.write_text(json.dumps(content), encoding="utf-8")


def write_files(folder: Path, texts: dict[str, str]) -> None:
    """Files of a folder and below it, by their paths there."""
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def padded_batch(prompts: list[Tensor], side: str = "left") -> tuple[Tensor, Tensor]:
    """Prompts of different lengths as `generate` takes them: token ids [batch, time] and their
    mask."""
    ones = [torch.ones_like(prompt) for prompt in prompts]
    mask = pad_sequence(ones, batch_first=True, padding_side=side)
    return pad_sequence(prompts, batch_first=True, padding_side=side), mask


GREEDY: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
"""Settings of `generate` for tests that need no others."""


def written_alone(model: PreTrainedModel, prompt: Tensor, **settings: Any) -> list[int]:
    """The new tokens that the model's own `generate` writes after one prompt, which no other row
    pads; greedily, unless `settings` say otherwise."""
    settings = {**GREEDY, "attention_mask": torch.ones_like(prompt)[None], **settings}
    return model.generate(prompt[None], **settings)[0, len(prompt) :].tolist()


def continued(
    lm: SpeculativeLM, rows: list[Tensor], side: str = "left", **settings: Any
) -> tuple[list[list[int]], GenerateOutput]:
    """The new tokens of each row of a padded batch, and the output; greedily, unless `settings` say
    otherwise."""
    ids_BT, mask_BT = padded_batch(rows, side)
    device = lm.target.device
    settings = {**GREEDY, "attention_mask": mask_BT.to(device), **settings}
    output = lm.generate(ids_BT.to(device), **settings)
    return output.sequences[:, ids_BT.shape[1] :].tolist(), output


def random_ids(vocab_size: int, *shape: int, seed: int = 0, first: int = 0) -> Tensor:
    """Token ids of a shape, from `first` on."""
    return torch.randint(first, vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def random_rows(vocab_size: int, lengths: Iterable[int]) -> list[Tensor]:
    """Texts of these lengths, from token 1 on; one of the same length is the same text."""
    return [random_ids(vocab_size, length, seed=length, first=1) for length in lengths]


def generated(lm: SpeculativeLM, ids_BT: Tensor, **settings: Any) -> GenerateOutput:
    """What a decoder writes after rows of one length: greedily and without an end, unless
    `settings` say otherwise."""
    usual = {"do_sample": False, "eos_token_id": [], "pad_token_id": 0}
    return lm.generate(ids_BT, attention_mask=torch.ones_like(ids_BT), **usual | settings)


def one_row_tree(
    tokens: Sequence[int], parents: Sequence[int], max_depth: int, **more: Any
) -> DraftTree:
    """A tree of one row without padding."""
    size_1 = torch.tensor([len(tokens)])
    return DraftTree(torch.tensor([tokens]), torch.tensor([parents]), size_1, max_depth, **more)


def accepted(output: GenerateOutput) -> list[list[int]]:
    """How many drafts were accepted, of each row round by round."""
    return [[record.accepted for record in row] for row in output.stats.rows]


def parallel_model(vocab_size: int, mask: Any) -> LlamaForCausalLM:
    """A draft model that drafts all depths in one forward, after mask tokens."""
    model = build_model(vocab_size, seed=3, layers=1).requires_grad_(False)
    model.config.spd_type = "pard"
    model.config.pard_token = mask
    return model


def other_model(target: Target, layers: int = 1) -> Target:
    """A random model with a target's vocabulary: as a drafter it is right by chance alone."""
    model = build_model(target.info.vocab_size, seed=3, layers=layers, dtype=target.dtype)
    return Target(model.to(target.device).requires_grad_(False))


def head_for(
    target: Target, kind: str, noise: float = 0.0, seed: int = 0, **options: Any
) -> DraftHead:
    """A head on the CPU, initialized from the target so that its drafts vary.

    With noise in its weights it is now right, now wrong.
    """
    torch.manual_seed(seed)
    if kind == "eagle3" and target.info.num_layers < 6:  # too few blocks for its own choice
        options = {"feature_layers": [0, -1]} | options
    head = build_head(kind, options, target.info).to(target.dtype)
    head.initialize(target.modules, torch.arange(target.info.vocab_size) + 1)
    for parameter in head.parameters():
        parameter.data += noise * torch.randn_like(parameter)
    return head.eval()


def saved_head(
    folder: Path,
    target: Any,
    kind: str = "medusa",
    metadata: CheckpointMetadata | None = None,
    **options: Any,
) -> DraftHead:
    """An untrained head that is saved in a folder; it begins as the target's own LM head, if its
    kind can."""
    torch.manual_seed(0)
    head = build_head(kind, options, target.info)
    head.initialize(target.modules, torch.ones(target.info.vocab_size, dtype=torch.int64))
    save_head(head, folder, metadata or CheckpointMetadata())
    return head


def run_interpreted(program: str) -> None:
    """Run a program whose Triton kernels are interpreted on the CPU."""
    path = os.pathsep.join(filter(None, sys.path))
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path}
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stderr[-2000:]


OF_OURS = ("max_batch_size", "past_key_values", "tree", "streamer")
"""Options that transformers' own `generate` lacks, or means otherwise."""


def check_identity(
    lm: SpeculativeLM, rows: list[Tensor], side: str = "left", **settings: Any
) -> GenerateOutput:
    """Decode rows as one padded batch: each writes what `generate` writes for it alone.

    `settings` are those of `generate`, in place of twenty greedy tokens.
    """
    texts, output = continued(lm, rows, side, **settings)
    plain = {name: value for name, value in settings.items() if name not in OF_OURS}
    truths: dict[tuple[int, ...], list[int]] = {}
    for row, found in zip(rows, texts, strict=True):
        prompt = tuple(row.tolist())
        if prompt not in truths:
            truths[prompt] = written_alone(lm.target.model, row.to(lm.target.device), **plain)
        truth = truths[prompt]
        assert found[: len(truth)] == truth
        assert set(found[len(truth) :]) <= {settings.get("pad_token_id", 0)}
    return output


class Oracle(BatchDrafter):
    """Drafts trees of a shape that hold the true continuation, but for a share of wrong tokens.

    `truths` are the continuations of each row; past its end, or where a text has left it, guesses
    are random.
    """

    def __init__(
        self,
        shape: TreeShape,
        truths: list[list[int]],
        vocab_size: int,
        wrong: float,
        seed: int = 0,
    ) -> None:
        self.shape, self.truths, self.vocab_size, self.wrong = shape, truths, vocab_size, wrong
        self.max_nodes = shape.size
        self.random = torch.Generator().manual_seed(seed)

    def begin(self, context: DraftContext) -> None:
        self.rows = list(range(context.batch_size))
        self.written: list[list[int]] = []

    def prefill(self, chunk: PrefillChunk) -> None:
        """The last chunk ends with the target's own choice."""
        self.written = [[root] for root in chunk.next_tokens_BT[:, -1].tolist()]

    def replace(self, rows_R: Tensor, other: Any) -> None:
        raise AssertionError("an oracle knows its texts by their place in the first batch")

    def select(self, rows_R: Tensor) -> None:
        self.rows = [self.rows[row] for row in rows_R.tolist()]
        self.written = [self.written[row] for row in rows_R.tolist()]

    def propose(self, roots_B: Tensor) -> DraftTree:
        truths = [self.truths[row] for row in self.rows]
        rows = [
            self._row(root, written, truth)
            for root, written, truth in zip(roots_B.tolist(), self.written, truths)
        ]
        batch = len(rows)
        parents = torch.tensor(self.shape.parents).expand(batch, -1)
        return DraftTree(
            torch.tensor(rows), parents, torch.full((batch,), self.shape.size), self.shape.depth
        )

    def observe(self, finished: Round) -> None:
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


class PromptOracle(Oracle):
    """An oracle that knows its texts by their prompts, so that rows may be read in any order, and
    join a batch.

    `truths` are the continuations by prompt, a tuple of tokens.
    """

    def __init__(
        self,
        shape: TreeShape,
        truths: dict[tuple[int, ...], list[int]],
        vocab_size: int,
        wrong: float,
        seed: int = 0,
    ) -> None:
        super().__init__(shape, [], vocab_size, wrong, seed)
        self.by_prompt = truths

    def begin(self, context: DraftContext) -> None:
        self.prompts: list[list[int]] = [[] for _ in range(context.batch_size)]
        self.written = [[] for _ in self.prompts]

    def prefill(self, chunk: PrefillChunk) -> None:
        for row, length in enumerate(chunk.lengths_B.tolist()):
            self.prompts[row].extend(chunk.tokens_BT[row, :length].tolist())
            if length:
                self.written[row] = [int(chunk.next_tokens_BT[row, length - 1])]

    def replace(self, rows_R: Tensor, other: Any) -> None:
        for place, row in enumerate(rows_R.tolist()):
            self.prompts[row] = other.prompts[place]
            self.written[row] = other.written[place]

    def select(self, rows_R: Tensor) -> None:
        self.prompts = [list(self.prompts[row]) for row in rows_R.tolist()]
        self.written = [list(self.written[row]) for row in rows_R.tolist()]

    def propose(self, roots_B: Tensor) -> DraftTree:
        self.truths = [self.by_prompt.get(tuple(prompt), []) for prompt in self.prompts]
        self.rows = list(range(len(self.prompts)))
        return super().propose(roots_B)


class Useless(Drafter):
    """Always drafts a chain of the same wrong token: the last of a small vocabulary."""

    max_nodes, vocab_size = 8, 20

    def propose(self, roots_B):
        tokens = torch.full((len(roots_B), 8), self.vocab_size - 1)
        tokens[:, 0] = roots_B
        parents = torch.arange(-1, 7).expand(len(roots_B), -1)
        return DraftTree(tokens, parents, torch.full_like(roots_B, 8), max_depth=7)


class LargestTensor(TorchDispatchMode):
    """Notes the most elements of a tensor that an operation makes; of these operations alone, if
    there are some."""

    def __init__(self, *operations: Any) -> None:
        super().__init__()
        self.operations = operations
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if self.operations and function not in self.operations:
            return made
        for each in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(each, Tensor):
                self.elements = max(self.elements, each.numel())
        return made


class Branch:
    """One path through a tree of random choices; `every_branch` takes them all."""

    def __init__(self, script: list[tuple[int, int]]) -> None:
        self.script, self.place, self.weight = script, 0, 1.0

    def categorical(self, probs: Tensor) -> Tensor:
        return torch.tensor(
            [self._choose(row) for row in probs.reshape(-1, probs.shape[-1])]
        ).reshape(probs.shape[:-1])

    def accept(self, probs: Tensor) -> Tensor:
        known = probs.nan_to_num(0.0)  # as `RandomSampler` rejects NaN
        chances = [torch.stack([1 - prob, prob]) for prob in known.flatten()]
        return torch.tensor([self._choose(row) == 1 for row in chances]).reshape(probs.shape)

    def distinct(self, probs: Tensor, count: int) -> Tensor:
        return torch.tensor(
            [self._choose_distinct(row, count) for row in probs.reshape(-1, probs.shape[-1])],
            dtype=torch.int64,
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
        row = row.nan_to_num(0.0)
        options = row.nonzero().flatten().tolist()
        # nothing can be drawn: `RandomSampler` returns the last, and its caller detects it
        if not options:
            return len(row) - 1
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


def random_shape(
    seed: int, max_nodes: int = 12, max_depth: int = 4, max_children: int = 3
) -> TreeShape:
    """A random static tree."""
    random = torch.Generator().manual_seed(seed)
    paths: list[tuple[int, ...]] = [()]
    for _ in range(int(torch.randint(1, max_nodes, (), generator=random))):
        parent = paths[int(torch.randint(len(paths), (), generator=random))]
        children = sum(path[:-1] == parent and path != () for path in paths)
        if len(parent) < max_depth and children < max_children:
            paths.append((*parent, children))
    return TreeShape.from_paths(paths[1:])


def limited(monkeypatch: Any, lm: SpeculativeLM, nodes: int) -> list[int]:
    """Make memory run out in forwards of trees with more nodes than this; returns the sizes of all
    trees so far."""
    engine = lm.target.engine
    whole = engine.forward_tree
    sizes: list[int] = []

    def forward_tree(tree: DraftTree, *arguments: Any) -> TargetOutput:
        sizes.append(tree.tokens_BN.shape[1])
        output = whole(tree, *arguments)  # has written to the cache
        if sizes[-1] > nodes:
            raise torch.OutOfMemoryError("simulated")
        return output

    monkeypatch.setattr(engine, "forward_tree", forward_tree)
    return sizes


def calls_of(monkeypatch: Any, owner: Any, name: str) -> list[tuple[Any, ...]]:
    """The arguments of all calls of a method from now on."""
    calls: list[tuple[Any, ...]] = []
    original = getattr(owner, name)

    def noted(*given: Any, **named: Any) -> Any:
        calls.append(given)
        return original(*given, **named)

    monkeypatch.setattr(owner, name, noted)
    return calls


class EachRound(RoundObserver):
    """Calls a function with the sequences after every round."""

    def __init__(self, after: Callable[[Sequences], Any]) -> None:
        self.after = after

    def begin(self, call: DecodingCall) -> None:
        self.sequences = call.sequences

    def round(self, finished: Round) -> None:
        self.after(self.sequences)


class Proposals(RoundObserver):
    """Keeps the tokens of every round's tree, as it was drafted."""

    def __init__(self) -> None:
        self.drafts: list[list[list[int]]] = []

    def round(self, finished: Round) -> None:
        self.drafts.append(finished.proposed.tokens_BN.tolist())


class Ended(RoundObserver):
    """Keeps the statistics of generations that have ended, and why they ended early."""

    def __init__(self) -> None:
        self.stats: list[Stats] = []
        self.errors: list[BaseException | None] = []

    def end(self, stats: Stats, error: BaseException | None) -> None:
        self.stats.append(stats)
        self.errors.append(error)


def write(
    target: Target,
    drafter: Any,
    rule: Any,
    prompts: list[Tensor],
    processors: Any,
    sampler: Any,
    new_tokens: int,
    slots: int | None = None,
) -> tuple[list[list[int]], Stats]:
    """The loop by itself, with a draw of the test's own: the new tokens of each row."""
    sequences = Sequences(prompts, new_tokens, frozenset(), max_batch_size=slots)
    process_logits = TreeLogitsProcessor(processors, [0] * len(prompts))
    call = DecodingCall(target, drafter, rule, process_logits, sampler, sequences)
    return sequences.rows, speculate(call)


def splitmix(counter: Any) -> Any:
    """SplitMix64, by numpy's own integers of 64 bits."""
    with np.errstate(over="ignore"):
        z = (counter ^ (counter >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def race_numbers(seed: int, place: int, vocab_size: int) -> Tensor:
    """The exponential numbers of a place of a seeded text, one for each token."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        key = splitmix(np.array(seed, dtype=np.int64).astype(np.uint64) + np.uint64(place) * golden)
        bits = splitmix(key + np.arange(vocab_size, dtype=np.uint64) * golden)
    uniform = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return -torch.log1p(torch.tensor(-uniform, dtype=torch.float32))


def exactly(
    target: Target, prompt: Tensor, new_tokens: int, processors: Sequence[Any] = ()
) -> dict[tuple[int, ...], float]:
    """The target's own distribution of the next tokens, by one forward for every token of every
    text."""
    process = LogitsProcessorList(processors)
    weights = {}
    for text in itertools.product(range(target.info.vocab_size), repeat=new_tokens):
        weight, ids = 1.0, prompt.tolist()
        for token in text:
            with torch.no_grad():
                logits_1V = target.model(torch.tensor([ids])).logits[:, -1]
            weight *= float(process(torch.tensor([ids]), logits_1V)[0].softmax(-1)[token])
            ids.append(token)
            if weight == 0:  # what would follow may be no number
                break
        weights[text] = weight
    return weights


def check_distribution(
    target: Target,
    make_drafter: Callable[[], Any],
    rule: Any,
    prompts: list[Tensor],
    new_tokens: int,
    processors: Sequence[Any] = (),
    slots: int | None = None,
    close: float = 1e-9,
) -> list[RoundRecord]:
    """By every outcome of every draw, the rows' texts have the target's distribution, each row
    independently of the others; returns what all rounds did."""
    records: list[RoundRecord] = []

    def run(draw: Branch) -> tuple[tuple[int, ...], ...]:
        process = LogitsProcessorList(processors)
        rows, stats = write(target, make_drafter(), rule, prompts, process, draw, new_tokens, slots)
        records.extend(itertools.chain.from_iterable(stats.rows))
        return tuple(map(tuple, rows))

    found = every_branch(run)
    alone = [exactly(target, prompt, new_tokens, processors).items() for prompt in prompts]
    for texts in itertools.product(*alone):
        weight = math.prod(weight for _, weight in texts)
        difference = found.get(tuple(text for text, _ in texts), 0.0) - weight
        assert abs(difference) <= close, texts
    return records


@dataclass
class AttendedSlots:
    """Arguments of `tree_attention`, and the softmax over all slots in float64."""

    given: tuple
    expected: torch.Tensor

    def on(self, device) -> tuple:
        """The arguments on another device."""
        *states, slots = self.given
        moved = {
            name: each.to(device)
            for name, each in vars(slots).items()
            if isinstance(each, torch.Tensor)
        }
        return *(each.to(device) for each in states), dataclasses.replace(slots, **moved)


def attended_slots(
    batch, heads, groups, nodes, uncommitted, size, slots, window, dtype, nodes_first=False
) -> AttendedSlots:
    """A random tree after texts of different lengths, in a cache with other numbers after it.

    The nodes follow each row's text, as in the target's cache, or come first, as in a head's.
    """
    random = torch.Generator().manual_seed(heads + nodes)
    query = torch.randn(batch, nodes, heads, size, generator=random).to(dtype).transpose(1, 2)
    block = torch.randn(2, batch, groups, slots + 56, size, generator=random).to(dtype)
    keys, values = block[:, :, :, :slots]
    lengths = torch.randint(1, slots - uncommitted, (batch,), generator=random)
    lengths[0] = slots - uncommitted
    parents = [
        -1,
        *(int(torch.randint(node, (1,), generator=random)) for node in range(1, uncommitted)),
    ]
    above = torch.eye(uncommitted, dtype=torch.bool)
    for node, parent in enumerate(parents[1:], start=1):
        above[node] |= above[parent]
    depths = above.sum(-1) - 1
    first = uncommitted - nodes
    seen = torch.zeros(batch, nodes, slots, dtype=torch.bool)
    positions = torch.arange(slots).repeat(batch, 1)
    for row, length in enumerate(lengths.tolist()):
        seen[row, :, :length] = True
        seen[row, :, length : length + uncommitted] = above[first:]
        positions[row, length : length + uncommitted] = length + depths
    if window is not None:
        own = lengths[:, None] + depths[first:]
        seen &= positions[:, None] > own[..., None] - window
    every_key, every_value = (
        states.double().repeat_interleave(heads // groups, 1) for states in (keys, values)
    )
    scores = (query.double() @ every_key.mT * size**-0.5).masked_fill(~seen[:, None], -torch.inf)
    expected = (scores.softmax(-1) @ every_value).transpose(1, 2)
    ancestors = above[first:].expand(batch, -1, -1)
    seen_slots = TreeSlots(ancestors, lengths, depths.expand(batch, -1), window)
    if nodes_first:
        order = torch.arange(slots).repeat(batch, 1)
        for row, length in enumerate(lengths.tolist()):
            order[row, :uncommitted] = torch.arange(length, length + uncommitted)
            order[row, uncommitted : uncommitted + length] = torch.arange(length)
        rows = torch.arange(batch)[:, None]
        block[:, :, :, :slots] = block.transpose(2, 3)[:, rows, order].transpose(2, 3)
        seen_slots = dataclasses.replace(seen_slots, text_slot=uncommitted, node_slot=0)
    given = (query, keys, values, seen_slots)
    return AttendedSlots(given, expected)


def split_examples(
    conversations: list[dict[str, Any]],
    config: TrainConfig,
    target: Target,
    tokenizer: PreTrainedTokenizerFast,
) -> tuple[list[Example], ...]:
    """The sequences to train on and those that are held out, without the token cache."""
    how = rendering(config, target, tokenizer)
    groups: dict[int, list[Example]] = {}  # by conversation: several rows of tokens may be one
    for number, row in enumerate(conversations):
        for example in how.encode(row, f"conversation {number}", number):
            groups.setdefault(example.conversation, []).append(example)
    data = config.data
    parts = split_held_out(
        list(groups.values()), data.held_out, config.loop.seed, data.held_out_limit
    )
    return tuple(list(itertools.chain.from_iterable(part)) for part in parts)
