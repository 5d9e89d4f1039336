"""Trial of a model's architecture: a forward over a small draft tree against its `generate`.

A forward over a tree needs a mask and positions that are inputs, and a cache that keeps every
token. No config tells for certain that a model has them: it may build a mask of its own, or count
tokens in the cache. So before its first token every architecture is tried:

    ours        reads a short text in two parts, then a tree of two paths in one forward
    generate    is made to write the same two paths, token by token
    compared    the logits after the text and at every node

The result is kept with this machine's measurements, by the model's config, dtype and attention, and
by the versions of transformers and headstart.

A text must be longer than the model's windows of local attention for them to matter. Windows that a
model reads from its config in every forward are shortened for the trial, in a copy that shares all
weights. If the copy fails, the model itself is tried on a text longer than its windows.

Letters in tensor names: B paths, N nodes, T tokens of the text, D tokens of a path, V vocabulary.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.metadata
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from ...heads.base import dtype_name
from ..targets.states import check_states
from ..targets.target_model import TargetModel
from ..targets.twin import twin_of
from ..trees.tree import DraftTree
from ..trees.tree_spec import TreeShape
from ..tuning.machine import measured_once
from .base import Engine

BRANCHING = TreeShape.from_paths([[0], [1], [0, 0], [1, 0], [0, 0, 0], [1, 0, 0]])
"""Two paths from the root, whose nodes lie side by side in the cache."""
CHAIN = TreeShape.chain(3)
TEXT = 18
"""Tokens of the text, if no window is longer."""
SHORT_WINDOW = 6
"""Length to which windows are shortened: shorter than the text, longer than the paths."""
SHORTENED = ("sliding_window", "attention_chunk_size")
"""Windows that models read from their config in every forward, by its keys."""
LOCAL = ("window", "local", "chunk")
"""Words in the keys of other windows, for which the text must be longer."""
LONGEST_LOCAL = 512
"""Longest window that is found by these words: the text grows by as much."""
LONGEST_TEXT = 8192
"""Most tokens of a text on which a model is tried as it is."""
ROUNDING = {torch.float64: 1e-4, torch.float32: 1e-3}
"""Largest difference by rounding at any node, relative to the spread of the logits; `generate`
returns float32."""
ROUNDING_IN_16_BITS = 0.05
"""The same for 16-bit formats and quantized weights, at the median node: at a single node rounding
may choose another expert."""
MORE = 3
"""How many times as large a difference by rounding may be after a long text as after a short
one."""
FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What a model's code raises for inputs that it does not expect."""
WITHOUT_EFFECT = (
    "_name_or_path",
    "architectures",
    "dtype",
    "id2label",
    "label2id",
    "torch_dtype",
    "transformers_version",
)
"""Keys of a config that change nothing that is computed."""


PlainEngine = Callable[[PreTrainedModel], Engine]
"""Makes the engine that runs a model as it is, and its target."""


@dataclass(frozen=True)
class Trial:
    """The text and the paths that a model is tried on."""

    text_1T: Tensor
    paths_BD: Tensor
    """The root, and the tokens below it."""
    shape: TreeShape

    @property
    def tree(self) -> DraftTree:
        """The tree of the paths."""
        # The shape's node [1, 0] is the second token after the root of path 1.
        paths_BD = self.paths_BD.tolist()
        tokens = [paths_BD[0][0]]
        for path in self.shape.paths:
            tokens.append(paths_BD[path[0]][len(path)])
        return DraftTree.of_shape(self.shape, torch.tensor([tokens], device=self.text_1T.device))


def check_architecture(target: TargetModel, plain_engine: PlainEngine) -> None:
    """Refuse a model, in eval mode, whose logits at a tree's nodes differ from those one by one.

    `plain_engine` makes the engines of models that share its weights.

    Raises:
        ValueError: what was compared, how far off it is, and what to do.
    """
    model = target.model
    # Without weights there is nothing to compare; without positions no room for a text and a tree.
    if model.device.type == "meta" or target.max_positions < 2 * CHAIN.size + 2:
        return
    measure = partial(run_trial, target, plain_engine)
    measured_once(
        target.device, f"trial of {architecture(model)}", measure, read_difference, timing=False
    )


def run_trial(target: TargetModel, plain_engine: PlainEngine) -> float | None:
    """Return the difference with which a model passes the trial; see `tree_difference`.

    The text has the length that the model's windows need.

    Raises:
        ValueError: the difference is larger than rounding makes it.
    """
    model = target.model
    allowed = tolerance(model)
    # 1. A recurrence must read several tokens as it reads single ones.
    if target.stateful is not None:
        check_states(model)
    config = model.config.get_text_config()
    windows = [getattr(config, key, None) or 0 for key in SHORTENED]
    windows = [window for window in windows if window > SHORT_WINDOW]
    # accelerate's hooks are bound to the original model: a copy with short windows cannot run.
    hooked = any(hasattr(module, "_hf_hook") for module in model.modules())

    # 2. No window to shorten: the model itself, on a short text.
    if hooked or not windows:
        # Texts longer than long windows would take too long in a model that accelerate spreads or
        # offloads.
        window = max((window for window in windows if window <= LONGEST_LOCAL), default=0)
        length = window + TEXT
        difference = tree_difference(plain_engine(model), length)
        if difference is not None and difference > allowed:
            raise ValueError(refusal(target, difference, length))
        return difference

    # 3. A copy with short windows.
    shortened = with_short_windows(model)  # held here: its target holds it weakly
    difference = tree_difference(plain_engine(shortened), TEXT)
    if difference is None or difference <= allowed:
        return difference

    # 4. The copy fails as well if the model does not read its windows from the config in every
    # forward. So the model itself decides, on a text that is longer than its windows.
    length = 2 * max(windows) + TEXT
    if length > LONGEST_TEXT:
        raise ValueError(refusal(target, difference, TEXT))
    short = tree_difference(plain_engine(model), TEXT)
    difference = tree_difference(plain_engine(model), length)
    if short is None or difference is None:
        return None
    # Little of what a token attends to lies outside a long window, so that a mask that lacks the
    # window makes a small difference: at most `MORE` times that after a short text may be rounding.
    if difference > min(allowed, max(MORE * short, ROUNDING[torch.float32])):
        raise ValueError(refusal(target, difference, length))
    return difference


def read_difference(kept: Any) -> float | None:
    """Parse a kept difference; a ValueError for anything else has the trial made again."""
    if kept is not None and not isinstance(kept, float | int):
        raise ValueError(f"{kept!r} is not a difference")
    return kept


def architecture(model: PreTrainedModel) -> str:
    """All that decides how a model computes, besides its weights."""
    config = {
        key: value for key, value in model.config.to_dict().items() if key not in WITHOUT_EFFECT
    }
    text = json.dumps(config, sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    attention = model.config._attn_implementation
    experts = getattr(model.config, "_experts_implementation", None)
    how = ", ".join(str(part) for part in (dtype_name(model.dtype), attention, experts) if part)
    versions = (
        f"transformers {transformers.__version__}, headstart"
        f" {importlib.metadata.version('headstart')}"
    )
    return f"{type(model).__module__}.{type(model).__qualname__} {digest} in {how}, {versions}"


def tolerance(model: PreTrainedModel) -> float:
    """The largest difference of logits that rounding explains."""
    if getattr(model.config, "quantization_config", None):
        return ROUNDING_IN_16_BITS
    return ROUNDING.get(model.dtype, ROUNDING_IN_16_BITS)


def refusal(target: TargetModel, difference: float, length: int) -> str:
    """Why a model cannot be decoded, and what to do."""
    model = target.model
    return (
        f"{type(model).__name__} ({target.name!r}) cannot be decoded with drafts: after a text of"
        f" {length} tokens, one forward over a tree of {BRANCHING.size} gives other logits than"
        f" generate gives for its tokens one by one, by {difference:.2g} of their spread, where"
        f" rounding in {dtype_name(model.dtype)} makes at most {tolerance(model):.0e}. Its layers"
        " see a text in a way that its config does not tell, or differ with and without a KV"
        " cache; choose a target of another family, or another version of transformers than"
        f" {transformers.__version__}"
    )


@torch.inference_mode()
def tree_difference(engine: Engine, length: int) -> float | None:
    """Return how far a tree's logits after a text are from `generate`'s, relative to their spread.

    This is the largest difference over the nodes, or the median where rounding may choose other
    experts. None where no logits are finite.

    Raises:
        ValueError: what failed, in `generate` or in our forward.
    """
    target = engine.target
    model = target.model
    # 0. The text is longer where local windows must be exceeded that `SHORTENED` lacks, found by
    # words in the config's keys, and shorter where the positions end.
    for key, value in target.config.to_dict().items():
        named = any(word in str(key) for word in LOCAL)
        if named and key not in SHORTENED and type(value) is int and 1 < value <= LONGEST_LOCAL:
            length = max(length, value + TEXT)
    longest = min(length, target.max_positions - 2 * CHAIN.size)
    trial = trial_of(target, longest, CHAIN if engine.chains_only else BRANCHING)
    # 1. The model's own logits. If its `generate` fails, there is nothing to compare with.
    try:
        expected_NV = generated_logits(model, trial)
    except torch.OutOfMemoryError:
        raise
    except FAILURES as error:
        raise ValueError(
            f"{type(model).__name__} ({target.name!r}) cannot be tried: its own generate fails on a"
            f" text of {longest} tokens with {in_short(error)}"
        ) from error

    # 2. Ours. A ValueError is a refusal that says already what is wrong.
    try:
        tree_NV = tree_logits(engine, trial)
    except torch.OutOfMemoryError:
        raise
    except ValueError:
        raise
    except FAILURES as error:
        raise ValueError(
            f"{type(model).__name__} ({target.name!r}) cannot be decoded with drafts: a forward"
            f" over a text of {longest} tokens and a tree of {trial.shape.size}, with our KV cache"
            f" and masks, fails in the model with {in_short(error)}; choose a target of another"
            f" family, or another version of transformers than {transformers.__version__}"
        ) from error
    return relative_difference(
        tree_NV, expected_NV, at_median=tolerance(model) == ROUNDING_IN_16_BITS
    )


def in_short(error: Exception) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def relative_difference(found_NV: Tensor, expected_NV: Tensor, at_median: bool) -> float | None:
    """Return the largest RMS difference of a node's logits, relative to their spread.

    The spread is the root mean square of the expected logits around their mean. With `at_median`
    the median over the nodes is returned; None if no expected logits are finite.
    """
    # 1. Some models mask logits with -inf: compare what is finite, at nodes that have any.
    found_NV = found_NV.double()
    expected_NV = expected_NV.double()
    known_NV = expected_NV.isfinite()
    rows_N = known_NV.any(-1)
    if not bool(rows_N.any()):
        return None

    # 2. Sums of squares at each node: of the logits around their mean, and of the differences. NaN
    # of ours where the model's logits are finite is an infinite difference.
    count_N = known_NV.sum(-1).clamp(min=1)
    mean_N1 = expected_NV.where(known_NV, 0).sum(-1, keepdim=True) / count_N[:, None]
    spread_N = ((expected_NV - mean_N1).where(known_NV, 0) ** 2).sum(-1)
    error_N = ((found_NV - expected_NV).where(known_NV, 0) ** 2).sum(-1)
    error_N = error_N.nan_to_num(nan=torch.inf)
    size_N = (expected_NV.where(known_NV, 0) ** 2).sum(-1)

    # 3. Their ratio. If all logits of a node are the same, the spread is 0, and differences are
    # measured by float32's rounding of the logits instead.
    least_N = size_N * torch.finfo(torch.float32).eps ** 2
    divisor_N = (spread_N + least_N).clamp(min=torch.finfo(torch.float32).tiny)
    relative_N = (error_N / divisor_N).sqrt()[rows_N]
    return float(relative_N.median() if at_median else relative_N.max())


def with_short_windows(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a model that shares its weights, with short windows in its config.

    These have `SHORT_WINDOW` tokens.
    """
    config = copy.deepcopy(model.config)
    text_config = config.get_text_config()
    for key in SHORTENED:
        value = getattr(text_config, key, None)
        if value is not None and value > SHORT_WINDOW:
            setattr(text_config, key, SHORT_WINDOW)
    # Modules hold the config, or the text config in it: give each the copy of what it holds.
    configs = {id(model.config.get_text_config()): text_config, id(model.config): config}
    twin: Any = twin_of(model, lambda module: None)
    for module in twin.modules():
        for name, value in list(vars(module).items()):
            if id(value) in configs:
                vars(module)[name] = configs[id(value)]
    return twin


def trial_of(target: TargetModel, length: int, shape: TreeShape) -> Trial:
    """A text of ordinary tokens, and two paths that go on differently after the root."""
    embedding = target.model.get_input_embeddings()
    size = min(target.info.vocab_size, getattr(embedding, "num_embeddings", target.info.vocab_size))
    special = set(special_tokens(target.model.config.to_dict()))
    ordinary = [token for token in range(size) if token not in special] or list(range(size))
    # Tokens that do not repeat soon: steps of a prime through the vocabulary.
    paths = 2 if shape is BRANCHING else 1
    depth = shape.depth + 1
    count = length + paths * depth
    tokens = [ordinary[(7919 * index + 31) % len(ordinary)] for index in range(count)]
    text_1T = torch.tensor([tokens[:length]], device=target.device)
    paths_BD = torch.tensor(tokens[length:], device=target.device).view(paths, depth)
    paths_BD[:, 0] = paths_BD[0, 0].clone()  # both begin at the same root
    return Trial(text_1T, paths_BD, shape)


def special_tokens(config: dict[str, Any]) -> Iterator[int]:
    """Yield the tokens that a config names.

    They may stand for an image, or for padding that a model masks.
    """
    for key, value in config.items():
        if isinstance(value, dict):
            yield from special_tokens(value)
        elif "token" in str(key):
            listed = value if isinstance(value, list | tuple) else [value]
            yield from (token for token in listed if type(token) is int)


class _Forced(LogitsProcessor):
    """Makes `generate` write given tokens: all other scores are -inf."""

    def __init__(self, paths_BD: Tensor, length: int) -> None:
        self.paths_BD = paths_BD
        self.length = length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        step = input_ids.shape[1] - self.length
        forced = torch.full_like(scores, -torch.inf)
        return forced.scatter_(1, self.paths_BD[:, step : step + 1].to(scores.device), 0)


def generated_logits(model: Any, trial: Trial) -> Tensor:
    """Return the model's own logits [1 + N, V] after the text and at every node.

    The model computes them token by token, with its own KV cache.
    """
    paths, depth = trial.paths_BD.shape
    length = trial.text_1T.shape[1]
    text_BT = trial.text_1T.expand(paths, -1)
    # The logits at a path's last token take one step more; what that step writes does not matter.
    forced_BD = torch.cat([trial.paths_BD, trial.paths_BD[:, -1:]], dim=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        output = model.generate(
            text_BT,
            attention_mask=torch.ones_like(text_BT),
            logits_processor=LogitsProcessorList([_Forced(forced_BD, length)]),
            max_new_tokens=depth + 1,
            do_sample=False,
            num_beams=1,
            use_cache=True,
            eos_token_id=[],
            pad_token_id=0,
            stop_strings=None,
            disable_compile=True,
            output_logits=True,
            return_dict_in_generate=True,
        )
    # logits_BDV[b, d] are those before token d of path b was written: after the text at d = 0, at
    # the root at d = 1, and at the path's n-th token after the root at d = n + 1.
    logits_BDV = torch.stack(output.logits, dim=1)
    rows = [logits_BDV[0, 0], logits_BDV[0, 1]]
    for path in trial.shape.paths:
        rows.append(logits_BDV[path[0], 1 + len(path)])
    return torch.stack(rows)


def tree_logits(engine: Engine, trial: Trial) -> Tensor:
    """Return our logits [1 + N, V] after the text and at every node of the tree.

    The text is read in two parts.
    """
    # The second part finds a cache with tokens in it, as later chunks of a prompt do.
    length = trial.text_1T.shape[1]
    first = length - length // 3
    cache = engine.new_cache(1, length + trial.shape.size)
    engine.read_chunk(trial.text_1T[:, :first], length, cache, (), [])
    read = engine.read_chunk(trial.text_1T[:, first:], length, cache, (), [length - first - 1])
    output = engine.forward_tree(trial.tree, length, cache, ())
    return torch.cat([read.logits_BNV[0], output.logits_BNV[0]])
