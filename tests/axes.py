"""The axes of decoding, and cases in which every two of their values meet.

A value is a name and what builds it. A new value of an axis needs nothing else: `cases` makes the
cases that pair it with every value of the other axes, and `check` compares them with transformers'
`generate`. Two values that do not go together stand in `REFUSED`, with the words by which the
decoder says so.
"""

from __future__ import annotations

import copy
import functools
import itertools
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from helpers import (
    DEVICE,
    PromptOracle,
    accepted,
    build_t5,
    padded_batch,
    parallel_model,
    race_numbers,
    written_alone,
)
from torch import Tensor
from transformers import LogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper

from headstart.heads import HEADS, build_head
from headstart.inference import Conversation, Drafter, DraftTree, SpeculativeLM, Target, TreeShape
from headstart.inference.drafters.base import DraftContext, PrefillChunk
from headstart.inference.drafters.history import HistoryDrafter
from headstart.inference.drafters.round import Round
from headstart.inference.drafters.text_index import SEPARATOR, TextIndex
from headstart.inference.engines import cpu_kernels
from headstart.inference.engines.encoder_decoder import Seq2SeqTarget

Case = dict[str, str]
"""A value of each axis."""
SEED = 0
"""Says which values of the other axes a pair of values meets."""
VOCAB = 7
"""Few tokens, so that drafts of untrained heads are now and then right."""
BORDER = 24
"""Tokens after which a text's rotary angles or queries change, within many texts here."""
BORDERS = ("border", "steps")
"""Targets that change there."""
SETTINGS: dict[str, Any] = {"max_new_tokens": 14, "repetition_penalty": 1.2, "pad_token_id": 0}
WARPERS = (TemperatureLogitsWarper(1.3), TopKLogitsWarper(3))
SAMPLING = {"do_sample": True, "temperature": 1.3, "top_k": 3}

# Targets.

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3] * 4,
    "long_factor": [20.0, 30.0, 8.0, 5.0] * 4,
    "original_max_position_embeddings": BORDER,
}


def dense() -> tf.PreTrainedModel:
    return tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES))


def windows() -> tf.PreTrainedModel:
    """A layer that sees the whole text, and two with windows shorter than a tree is deep."""
    sliding = {"sliding_window": 3, "use_sliding_window": True, "max_window_layers": 1}
    return tf.Qwen2ForCausalLM(tf.Qwen2Config(**SIZES, **sliding))


def border() -> tf.PreTrainedModel:
    return tf.Phi3ForCausalLM(
        tf.Phi3Config(
            **SIZES,
            rope_parameters=LONGROPE,
            original_max_position_embeddings=BORDER,
            sliding_window=None,
        )
    )


def steps() -> tf.PreTrainedModel:
    """Layers that see a chunk of the text, and layers whose queries grow in steps."""
    sizes = {**SIZES, "num_hidden_layers": 4, "intermediate_size_mlp": 64, "head_dim": 32}
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    scales = {"attn_temperature_tuning": True, "attn_scale": 2.0, "floor_scale": BORDER}
    config = tf.Llama4TextConfig(**sizes, **experts, **scales, attention_chunk_size=10)
    model = tf.Llama4ForCausalLM(config)
    model.set_experts_implementation("eager")  # the faster ones know no float64
    return model


def chains_only() -> tf.PreTrainedModel:
    """Counts positions by its cache."""
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    return tf.BloomForCausalLM(
        tf.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=3, n_head=4, **special)
    )


def states() -> tf.PreTrainedModel:
    """A layer with a recurrent state and a convolution, and one of attention."""
    sizes = {**SIZES, "hidden_size": 32, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"linear_num_value_heads": 2, "linear_num_key_heads": 1}
    widths = {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    kinds = {"layer_types": ["linear_attention", "full_attention"]}
    return tf.Qwen3_5ForCausalLM(tf.Qwen3_5TextConfig(**sizes, **heads, **widths, **kinds))


def convolution() -> tf.PreTrainedModel:
    """A layer with a convolution alone, which any of its tokens may be the last to enter."""
    sizes = {**SIZES, "num_hidden_layers": 2, "block_auto_adjust_ff_dim": False}
    return tf.Lfm2ForCausalLM(tf.Lfm2Config(**sizes, layer_types=["conv", "full_attention"]))


NAMES_OF_GGUF = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def written_as_gguf(model: tf.PreTrainedModel, path: Path) -> None:
    """A Llama's weights in blocks of eight bits; its attention is that of other weights."""
    gguf = pytest.importorskip("gguf")
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    eight_bits = gguf.GGMLQuantizationType.Q8_0
    for name, weight in model.state_dict().items():
        layer = name.removesuffix(".weight")
        place = ""
        if layer.startswith("model.layers."):
            _, _, number, layer = layer.split(".", 3)
            place = f"blk.{number}."
        values = weight.float().numpy()
        name = f"{place}{NAMES_OF_GGUF[layer]}.weight"
        if values.ndim == 2:
            packed = gguf.quants.quantize(values, eight_bits)
            writer.add_tensor(name, packed, raw_dtype=eight_bits)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def lively_model(build: Callable[[], tf.PreTrainedModel], scale: float = 5.0) -> tf.PreTrainedModel:
    """A random model whose next token depends on its prefix."""
    torch.manual_seed(0)
    model = build()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data *= scale
    return model


def from_gguf() -> tf.PreTrainedModel:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        written_as_gguf(lively_model(dense), path)
        return Target.from_pretrained(path, torch.float32).model


TARGETS: dict[str, Callable[[], tf.PreTrainedModel]] = {
    "dense": lambda: lively_model(dense),
    "windows": lambda: lively_model(windows),
    "border": lambda: lively_model(border),
    "steps": lambda: lively_model(steps),
    "chains only": lambda: lively_model(chains_only),
    "hybrid": lambda: lively_model(states, 3.0),
    "convolution": lambda: lively_model(convolution),
    "encoder-decoder": lambda: build_t5(VOCAB),
    "gguf": from_gguf,
}

# Engines: where, whether compiled, and in which format.

ENGINES: dict[str, tuple[str, bool, torch.dtype]] = {
    "eager": ("cpu", False, torch.float64),
    "kernels": ("cpu", True, torch.float32),
    "recorded": (DEVICE, True, torch.float64),
}


@functools.cache
def target_of(name: str, engine: str) -> tuple[Target, Target]:
    """The target of a case, and the same one as transformers decodes it, on the CPU."""
    place, compiled, dtype = ENGINES[engine]
    if engine == "kernels" and cpu_kernels.library() is None:
        pytest.skip("no C++ compiler: there are no kernels")
    try:
        model = TARGETS[name]()
    except AttributeError as error:
        pytest.skip(f"this version of transformers cannot build it: {error}")
    model = model.to(dtype).eval().requires_grad_(False)
    model.generation_config = tf.GenerationConfig(pad_token_id=0, decoder_start_token_id=0)
    kind = Seq2SeqTarget if model.config.is_encoder_decoder else Target
    there = model if place == "cpu" else copy.deepcopy(model).to(torch.device(place, 0))
    target = kind(there)
    if compiled:
        target.compile()
    return target, kind(copy.deepcopy(model))


# Drafters: arguments of `SpeculativeLM.from_pretrained`, by the target and its copy on the CPU.

HEAD_OPTIONS: dict[str, dict[str, Any]] = {
    "dflash": {"block_size": 4},
    "dspark": {"block_size": 3, "markov_rank": 4},
    "eagle": {"depth": 3},
    "eagle3": {"depth": 3, "feature_layers": [0, -1], "draft_vocab_size": 5},
    "hydra": {"num_heads": 3},
    "hydra++": {"num_heads": 3},
    "medusa": {"num_heads": 3, "draft_vocab_size": 5},
    "mtp": {"depth": 3},
}
TREE_OF_ONES_OWN = TreeShape.from_paths([(0,), (1,), (0, 0), (1, 0), (1, 1), (1, 0, 0), (0, 0, 0)])


def with_head(kind: str, **more: Any) -> Callable[[Target, Target], dict[str, Any]]:
    """An untrained head."""

    def build(target: Target, reference: Target) -> dict[str, Any]:
        torch.manual_seed(1)
        head = build_head(kind, HEAD_OPTIONS.get(kind, {}), target.info)
        head = head.to(target.device).to(target.dtype)
        counts_V = torch.arange(target.info.vocab_size, device=target.device) + 1
        head.initialize(target.modules, counts_V)
        for parameter in head.parameters():
            noise = torch.randn(parameter.shape, dtype=torch.float64)
            parameter.data += 0.2 * noise.to(parameter.device, parameter.dtype)
        return {"head": head.eval(), **more}

    return build


def draft_model(target: Target, reference: Target) -> dict[str, Any]:
    """Nearly the target itself, so that drafts of all ranks and depths are accepted."""
    model = copy.deepcopy(reference.model)
    if target.stateful is not None:
        model = lively_model(dense).to(target.dtype).eval()
    torch.manual_seed(1)
    for parameter in model.requires_grad_(False).parameters():
        parameter += 0.15 * parameter.std(correction=0) * torch.randn_like(parameter)
    return {"drafter": type(target)(model.to(target.device))}


def retrieval(target: Target, reference: Target) -> dict[str, Any]:
    chance = random.Random(0)
    corpus = TextIndex(1000)
    for _ in range(20):
        corpus.add([*[chance.randrange(VOCAB) for _ in range(30)], SEPARATOR])
    return {"drafter": HistoryDrafter(12, 6, corpus=corpus)}


def parallel(target: Target, reference: Target) -> dict[str, Any]:
    model = parallel_model(VOCAB, VOCAB - 1).to(target.device, target.dtype)
    return {"drafter": Target(model)}


class OnesOwn(Drafter):
    """A drafter of a user's own, made on the host, which mostly knows what will be written."""

    def __init__(self) -> None:
        self.oracle = PromptOracle(TREE_OF_ONES_OWN, {}, VOCAB, wrong=0.2)
        self.max_nodes = self.oracle.max_nodes

    def begin(self, context: DraftContext) -> None:
        self.oracle = copy.copy(self.oracle)  # that of the rows which this one joins stays
        self.oracle.begin(context)

    def prefill(self, chunk: PrefillChunk) -> None:
        self.oracle.prefill(chunk)

    def propose(self, roots_B: Tensor) -> DraftTree:
        return self.oracle.propose(roots_B)

    def observe(self, finished: Round) -> None:
        self.oracle.observe(finished)

    def select(self, rows_R: Tensor) -> None:
        self.oracle.select(rows_R)

    def replace(self, rows_R: Tensor, other: Any) -> None:
        self.oracle.replace(rows_R, other.oracle)


DRAFTERS: dict[str, Callable[[Target, Target], dict[str, Any]]] = {
    "nothing": lambda *_: {},
    **{kind: with_head(kind) for kind in sorted(HEADS)},
    "prompt-lookup": lambda *_: {"drafter": "prompt-lookup"},
    "history": lambda *_: {"drafter": "history"},
    "retrieval": retrieval,
    "model": draft_model,
    "parallel model": parallel,
    "head and history": with_head("eagle", drafter="history"),
    "one's own": lambda *_: {"drafter": OnesOwn()},
}

# Trees and rules: arguments of `SpeculativeLM.from_pretrained`.

TREES: dict[str, dict[str, Any]] = {
    "own": {"adaptive": False},
    "adaptive": {"adaptive": True},
    "chain": {"tree": "chain:3", "adaptive": False},
    "branches": {"tree": "branch:3x2", "adaptive": False},
    "dynamic": {"tree": "dynamic:9:3:3", "adaptive": False},
    "early exit": {"tree": "stop:0.1:chain:3", "adaptive": False},
    "several": {"tree": "chain:2|branch:2x1", "adaptive": False},
    "drawn chain": {"tree": "drawn:chain:3", "adaptive": False},
    "drawn branches": {"tree": "drawn:branch:2x2", "adaptive": False},
    "independent": {"tree": "independent:branch:2x2", "adaptive": False},
}
DRAWN = ("drawn chain", "drawn branches", "independent")
RULES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {},
    "typical": {"acceptance": "typical", "lossy": True},
}

# Batches: lengths of the prompts, the side of the padding, slots, and tokens that end a text.

BATCHES: dict[str, tuple[list[int], str, int | None, list[int]]] = {
    "one row": ([15], "left", None, []),
    "padded left": ([3, 16, 7], "left", None, [5]),
    "padded right": ([16, 1, 7], "right", None, [5]),
    "slots": ([7, 3, 16, 5, 2], "left", 2, [5]),
}
CALLS: dict[str, list[tuple[int | None, list[int]]]] = {
    "one call": [(0, [])],
    "asked again": [(0, []), (None, [])],
    "conversation": [(0, []), (0, [4, 2, 6]), (6, [3]), (40, [1, 5])],
}
"""For each call how many tokens of the text so far are taken back, None for the whole answer, and
what is added."""

AXES: dict[str, dict[str, Any]] = {
    "drafter": DRAFTERS,
    "engine": ENGINES,
    "target": TARGETS,
    "tree": TREES,
    "rule": RULES,
    "batch": BATCHES,
    "calls": CALLS,
}

# What is not supported.

NO_TREES = ("branches", "dynamic", "several", "drawn branches", "independent")
NAMED = tuple(name for name, options in TREES.items() if "tree" in options)
MADE = ("retrieval", "one's own")
WITH_HEADS = (*sorted(HEADS), "head and history")
SEVERAL_ROWS = ("padded left", "padded right", "slots")
REFUSED: dict[tuple[str, str], tuple[tuple[str, ...], tuple[str, ...], str]] = {
    ("an encoder-decoder as the target", "a draft head"): (
        ("encoder-decoder",),
        WITH_HEADS,
        "encoder-decoder heads drafter",
    ),
    (
        "an encoder-decoder, or a model that counts positions by its cache",
        "a tree with branches that is named",
    ): (("encoder-decoder", "chains only"), NO_TREES, "tree chain:LENGTH"),
    ("an encoder-decoder as the target", "a batch of several rows"): (
        ("encoder-decoder",),
        SEVERAL_ROWS,
        "T5ForConditionalGeneration row",
    ),
    ("an encoder-decoder as the target", "a `Conversation`"): (
        ("encoder-decoder",),
        ("conversation",),
        "past_key_values encoder-decoder",
    ),
    ("an encoder-decoder as the target", "a draft model that drafts all depths at once"): (
        ("encoder-decoder",),
        ("parallel model",),
        "LlamaForCausalLM T5ForConditionalGeneration draft",
    ),
    ("a `Conversation`", "a batch of several rows"): (
        ("conversation",),
        SEVERAL_ROWS,
        "past_key_values row batch",
    ),
    ("`prompt-lookup`, `history`", "a named tree"): (
        ("prompt-lookup", "history"),
        NAMED,
        "drafter tree",
    ),
    ("a drafter that you made", "a named tree"): (MADE, NAMED, "tree drafter"),
    ("a head beside a history", "drawn and independent trees"): (
        ("head and history",),
        DRAWN,
        "sampled history tree",
    ),
}
"""By how docs/models.md calls the two: two kinds of values, and words of the refusal."""


def refusals() -> dict[frozenset[str], str]:
    """The words of the refusal, by the two values."""
    found = {}
    for ones, others, words in REFUSED.values():
        for pair in itertools.product(ones, others):
            found[frozenset(pair)] = words
    return found


def pairs_of(case: Case) -> set[frozenset[str]]:
    """All pairs of values that meet in a case."""
    return {frozenset(pair) for pair in itertools.combinations(case.values(), 2)}


def every_pair() -> set[frozenset[str]]:
    """All pairs of values of two axes."""
    found = set()
    for one, other in itertools.combinations(AXES.values(), 2):
        found |= {frozenset(pair) for pair in itertools.product(one, other)}
    return found


def completed(case: Case, missing: set[frozenset[str]], chance: random.Random) -> Case | None:
    """The case with a value of each axis: of those that go together, the ones of most missing
    pairs."""
    open_axes = [axis for axis in AXES if axis not in case]
    if not open_axes:
        return case
    axis = chance.choice(open_axes)
    met = {value: {frozenset((value, other)) for other in case.values()} for value in AXES[axis]}
    fitting = [value for value in met if not met[value] & refusals().keys()]
    chance.shuffle(fitting)
    for value in sorted(fitting, key=lambda value: -len(met[value] & missing)):
        whole = completed({**case, axis: value}, missing, chance)
        if whole is not None:
            return whole
    return None


def axis_of(value: str) -> str:
    """Names of values are unique."""
    (axis,) = [axis for axis, values in AXES.items() if value in values]
    return axis


def cases(seed: int = SEED) -> Iterator[Case]:
    """Cases in which every pair of values occurs that is supported; on a CPU, too, if it can."""
    chance = random.Random(seed)
    supported = every_pair() - refusals().keys()
    on_a_cpu = set()
    for case in covering(supported, {}, chance):
        if cases_on_cpu([case]):
            on_a_cpu |= pairs_of(case)
        yield case
    elsewhere = {name for name, (place, _, _) in ENGINES.items() if place != "cpu"}
    left = {pair for pair in supported - on_a_cpu if not pair & elsewhere}
    yield from covering(left, {"engine": "eager"}, chance)


def covering(missing: set[frozenset[str]], fixed: Case, chance: random.Random) -> Iterator[Case]:
    """Cases in which every one of these pairs occurs, with fixed values of some axes."""
    missing = set(missing)
    while missing:
        pair = chance.choice(sorted(map(sorted, missing)))
        case = completed(fixed | {axis_of(value): value for value in pair}, missing, chance)
        assert case is not None, f"{pair} go together with no value of some axis"
        missing -= pairs_of(case)
        yield case


def case_name(case: Case) -> str:
    return "-".join(case[axis] for axis in AXES)


def cases_on_cpu(cases: list[Case]) -> list[Case]:
    """Those of the cases whose engine runs on a CPU."""
    return [case for case in cases if ENGINES[case["engine"]][0] == "cpu"]


def refused_cases() -> Iterator[tuple[Case, str]]:
    """A case on a CPU for each pair that is not supported, and the words of its refusal."""
    for pair, words in refusals().items():
        case = {axis_of(value): value for value in pair}
        whole = completed({"engine": "eager", **case}, set(), random.Random(0))
        assert whole is not None
        yield whole, words


# A case.


class Raced(LogitsProcessor):
    """Leaves the token that sampling chooses by the numbers of a row's seed."""

    def __init__(self, seed: int, prompt: int) -> None:
        self.seed = seed
        self.prompt = prompt

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = warped(input_ids, scores)
        numbers = race_numbers(self.seed, input_ids.shape[1] - self.prompt, scores.shape[-1])
        token = (numbers / scores[0].softmax(-1)).argmin()
        return torch.full_like(scores, -torch.inf).index_fill(1, token[None], 0.0)


class Along(LogitsProcessor):
    """Leads `generate` along a text, and keeps the tokens that it could have drawn."""

    def __init__(self, tokens: list[int], prompt: int) -> None:
        self.tokens = tokens
        self.prompt = prompt
        self.possible: list[list[int]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        possible = warped(input_ids, scores)[0].isfinite()
        self.possible.append(possible.nonzero().flatten().tolist())
        token = self.tokens[input_ids.shape[1] - self.prompt]
        return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([token]), 0.0)


def warped(input_ids: Tensor, scores: Tensor) -> Tensor:
    for warper in WARPERS:
        scores = warper(input_ids, scores)
    return scores


def case_prompt(length: int, number: int) -> list[int]:
    chance = torch.Generator().manual_seed(100 * number + length)
    return torch.randint(1, VOCAB, (length,), generator=chance).tolist()


def stock_text(model: tf.PreTrainedModel, prompt: list[int], **more: Any) -> list[int]:
    """What transformers writes after a prompt by itself."""
    ids = torch.tensor(prompt)
    settings = {**SETTINGS, "do_sample": False, **more}
    if not model.config.is_encoder_decoder:
        return written_alone(model, ids, **settings)
    return model.generate(ids[None], **settings)[0, 1:].tolist()


@functools.cache
def expected_text(
    target: str,
    engine: str,
    ends: tuple[int, ...],
    row: tuple[int, ...],
    race: tuple[int, int] | None = None,
) -> list[int]:
    """What transformers writes after a row, greedily or by the arguments of `Raced`; cases have
    many rows in common."""
    _, reference = target_of(target, engine)
    more = {} if race is None else {"logits_processor": [Raced(*race)]}
    return stock_text(reference.model, list(row), eos_token_id=list(ends), **more)


def keeps_drafts(case: Case) -> bool:
    """Whether what is drafted depends on the row's text alone."""
    # Histories remember answers, and clocks choose between several trees. A head goes on with the
    # features of the segment in which a text was read.
    if case["drafter"] not in (*HEADS, "model", "parallel model") or case["target"] in BORDERS:
        return False
    # A GPU draws other numbers, and a head's own tree there is another.
    if case["engine"] == "recorded" and case["tree"] in (*DRAWN, "own"):
        return False
    # Fewer rows at a time leave more of the budget of a head's own tree, and draw in another order.
    if case["batch"] == "slots" and case["tree"] in (*DRAWN, "own"):
        return False
    return case["tree"] not in ("adaptive", "several")


def fresh_decoder(case: Case) -> SpeculativeLM:
    """A new decoder of a case: by kernels, whose drafts are rounded, or operation by operation."""
    target, reference = target_of(case["target"], case["engine"])
    kernels = case["engine"] == "kernels"
    target = target if kernels else reference
    options = DRAFTERS[case["drafter"]](target, reference) | TREES[case["tree"]]
    return SpeculativeLM.from_pretrained(target, compile=kernels, **options, **RULES[case["rule"]])


def check(case: Case) -> None:
    """Decode a case, and compare each row with transformers' `generate` for it alone."""
    lengths, side, slots, ends = BATCHES[case["batch"]]
    target, reference = target_of(case["target"], case["engine"])
    model = reference.model
    drafter = DRAFTERS[case["drafter"]](target, reference)
    options = drafter | TREES[case["tree"]] | RULES[case["rule"]]
    _, compiled, _ = ENGINES[case["engine"]]
    lm = SpeculativeLM.from_pretrained(target, compile=compiled, **options)
    past = Conversation() if case["calls"] == "conversation" else None
    prompts = [case_prompt(length, number) for number, length in enumerate(lengths)]
    rows = prompts
    for turn, (back, added) in enumerate(CALLS[case["calls"]]):
        if back is None:
            rows = prompts
        else:
            rows = [[*row[: max(len(row) - back, 2 if turn else len(row))], *added] for row in rows]
        padded, mask = padded_batch([torch.tensor(row) for row in rows], side)
        settings: dict[str, Any] = {**SETTINGS, "eos_token_id": ends, "do_sample": False}
        generator = torch.Generator().manual_seed(turn)
        seeds = torch.randint(-(2**63), 2**63 - 1, (len(rows),), generator=generator).tolist()
        start = [0 if model.config.is_encoder_decoder else len(row) for row in rows]
        start = [max(length, 1) for length in start]
        # 1. What is expected, if that is known.
        alone = functools.partial(expected_text, case["target"], case["engine"], tuple(ends))
        expected = None
        if case["rule"] == "greedy":
            expected = [alone(tuple(row)) for row in rows]
        elif case["rule"] == "sampled" and case["tree"] not in DRAWN:
            races = zip(seeds, start, strict=True)
            expected = [alone(tuple(row), race) for row, race in zip(rows, races, strict=True)]
        # 2. One's own drafter is told.
        if case["drafter"] == "one's own":
            told = expected or [alone(tuple(row)) for row in rows]
            asked = [[0]] if model.config.is_encoder_decoder else rows
            for row, text in zip(asked, told, strict=True):
                drafter["drafter"].oracle.by_prompt[tuple(row)] = text
        # 3. Ours.
        if case["rule"] != "greedy":
            settings |= SAMPLING
        output = lm.generate(
            padded.to(target.device),
            attention_mask=mask.to(target.device),
            max_batch_size=slots,
            past_key_values=past,
            generator=torch.Generator().manual_seed(turn),
            **settings,
        )
        width = 1 if model.config.is_encoder_decoder else padded.shape[1]
        found = output.sequences[:, width:].tolist()
        texts = []
        for number, row in enumerate(found):
            length = 1 + sum(record.returned for record in output.stats.rows[number])
            texts.append(row[:length])
            assert not any(row[length:]), "something follows a text's end"
            assert length == SETTINGS["max_new_tokens"] or row[length - 1] in ends
            for record in output.stats.rows[number]:
                assert record.returned <= record.accepted + 1 <= record.drafted + 1
        # 4. Compared.
        if expected is not None:
            assert texts == expected
            if case["drafter"] == "one's own" and case["tree"] == "own":
                assert output.stats.acceptance_length > 1.3  # so drafts decided
        else:
            for row, text, length in zip(rows, texts, start, strict=True):
                along = Along(text, length)
                stock_text(
                    model, row, eos_token_id=[], max_new_tokens=len(text), logits_processor=[along]
                )
                for token, possible in zip(text, along.possible, strict=True):
                    assert token in possible
        # 5. The drafts are those of a fresh call, without slots and padded on the left.
        if keeps_drafts(case):
            fresh = fresh_decoder(case)
            padded, mask = padded_batch([torch.tensor(row) for row in rows])
            again = fresh.generate(
                padded.to(fresh.target.device),
                attention_mask=mask.to(fresh.target.device),
                generator=torch.Generator().manual_seed(turn),
                **settings,
            )
            assert accepted(output) == accepted(again)
        rows = [row + text for row, text in zip(rows, texts, strict=True)]
