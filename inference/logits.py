"""Logits processors for trees, and the samplers that draw from the probabilities.

A processor that reads the logits alone runs on all nodes of a tree at once. One that reads the text runs once per row
and depth of the tree, each node with the text that it would have if its path were accepted. One that may keep a state
(a grammar's matcher, any of the user's own) runs once per token, on accepted nodes alone, as in plain decoding. All run
in their order, on rows without padding.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerBase
from transformers.generation import logits_process as known

from ..heads.layers.constants import constants, counting, upload
from ..heads.layers.decoder_layer import at_least_fp32
from .engines import cpu_kernels
from .tree import DraftTree

PREFIX_FREE = (
    known.EpsilonLogitsWarper,
    known.EtaLogitsWarper,
    known.InfNanRemoveLogitsProcessor,
    known.LogitNormalization,
    known.MinPLogitsWarper,
    known.SuppressTokensLogitsProcessor,
    known.TemperatureLogitsWarper,
    known.TopHLogitsWarper,
    known.TopKLogitsWarper,
    known.TopPLogitsWarper,
    known.TypicalLogitsWarper,
)
"""Processors whose result depends on the logits alone."""
READS_LENGTH = (
    known.ExponentialDecayLengthPenalty,
    known.ForcedEOSTokenLogitsProcessor,
    known.MinNewTokensLengthLogitsProcessor,
    known.SuppressTokensAtBeginLogitsProcessor,
)
"""Processors that compare the text's length with one that `generate` counted over the padded prompt."""
READS_TEXT = (
    known.ForcedBOSTokenLogitsProcessor,
    known.MinLengthLogitsProcessor,
    known.NoBadWordsLogitsProcessor,
    known.NoRepeatNGramLogitsProcessor,
    known.RepetitionPenaltyLogitsProcessor,
    known.SequenceBiasLogitsProcessor,
    known.WatermarkLogitsProcessor,
)
"""Processors that read the tokens before."""
CALLS_USER = (known.PrefixConstrainedLogitsProcessor,)
"""Processors that call a function of the user's, which may keep a state."""


SMALLEST_TEMPERATURE = 1e-38
"""About the smallest normal number in float32; what lies below rounds to few digits, or to 0."""


def finest(device: torch.device) -> torch.dtype:
    """float64, or float32 on a device that has no other: Apple's."""
    return torch.float32 if device.type == "mps" else torch.float64


@dataclass(eq=False)
class RandomSampler:
    """Source of randomness for drafts and acceptance rules: a `torch.Generator`, or the global one if None."""

    generator: torch.Generator | None = None
    live: tuple[bool, ...] | None = field(default=None, init=False)
    """For each place of the batch, whether its row is being decoded; None if all are. An idle row gets the numbers of
    the first that is: those of the others are as without it."""

    def draw_for(self, live: tuple[bool, ...] | None) -> None:
        """Draw for these places of the batch from now on."""
        self.live = live

    def uniform(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Uniform numbers in [0, 1), float64 where the device has it."""
        drawn = torch.rand(self._drawn(shape), dtype=finest(device), device=device, generator=self.generator)
        return self._in_places(drawn)

    def _drawn(self, shape: Sequence[int]) -> Sequence[int]:
        """The shape of numbers for the rows that are being decoded, of a shape for the whole batch."""
        return shape if self.live is None else (sum(self.live), *shape[1:])

    def _in_places(self, drawn: Tensor) -> Tensor:
        """The numbers of each row in its place of the batch."""
        return drawn if self.live is None else drawn[_rank_among_live(self.live, drawn.device)]

    def on_host(self) -> RandomSampler:
        """A sampler for tensors on the host, seeded from this one."""
        if self.generator is None or self.generator.device.type == "cpu":
            return self
        seed = torch.randint(2**62, (), device=self.generator.device, generator=self.generator)
        return RandomSampler(torch.Generator().manual_seed(int(seed)))  # sync: once a call

    def from_start(self) -> RandomSampler:
        """A sampler whose numbers begin again, where they are fixed."""
        return self

    def categorical(self, probs: Tensor) -> Tensor:
        """One class per distribution, [..., V] to [...], by inverse transform sampling."""
        cumulative = probs.cumsum(-1, dtype=finest(probs.device))
        uniform = self.uniform((*probs.shape[:-1], 1), probs.device)
        # right=True: the first class whose cumulative mass exceeds the draw, so never one of probability 0
        drawn = torch.searchsorted(cumulative, uniform * cumulative[..., -1:], right=True).squeeze(-1)
        return drawn.clamp(max=probs.shape[-1] - 1)  # for NaN probabilities, which the caller detects

    def accept(self, probs: Tensor) -> Tensor:
        """True with each of these probabilities; same shape."""
        return self.uniform(probs.shape, probs.device) < probs

    def distinct(self, probs: Tensor, count: int) -> Tensor:
        """`count` classes per distribution without replacement, in draw order: [..., V] to [..., count].

        Gumbel-top-k (1903.06059): the first arrivals of a race in which class v arrives at rate probs[v]. Impossible
        classes come last.
        """
        if count == 1:
            return self.categorical(probs)[..., None]
        times = self._in_places(probs.new_empty(self._drawn(probs.shape)).exponential_(generator=self.generator))
        return (probs / times).topk(count, dim=-1).indices


@constants
def _rank_among_live(live: tuple[bool, ...], device: torch.device) -> Tensor:
    """For each place of a batch, how many rows before it are being decoded; 0 for an idle one."""
    ranks = [sum(live[:place]) if live[place] else 0 for place in range(len(live))]
    return upload(ranks, device)


Sampler = RandomSampler
"""The interface of samplers; a test's enumerates instead of sampling."""
SPLITMIX = np.array([0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB], dtype=np.uint64)
"""SplitMix64 (Steele, Lea, Flood 2014): the increment of its counter, and the two factors that mix it."""
GOLDEN, MIX_1, MIX_2 = SPLITMIX
SIGNED_GOLDEN, *SIGNED_MIX = SPLITMIX.view(np.int64).tolist()
"""The same bits as torch's int64."""


class PositionNoise:
    """For each position of each row, and each token v, a number E_v, exponential of rate 1 and independent.

    The token at a position is the v with the least E_v / p_v: it has the distribution p, whatever was drawn elsewhere,
    and depends on no draft. A draft that takes the least E_v / q_v, by the same numbers, agrees with it with a
    probability of at least (1 - TV) / (1 + TV) (Daliri, Musco, Suresh, arXiv:2408.07978).

    The numbers are computed from one seed a row and not stored: they are the same on every device.
    """

    def __init__(
        self, sampler: RandomSampler, texts: list[list[int]], positions: int, vocab_size: int, device: torch.device
    ) -> None:
        """Draw a seed for each row; `texts` are their new tokens, of which one step decides `positions` at most."""
        source = device if sampler.generator is None else sampler.generator.device
        bounds = -(2**63), 2**63 - 1
        seeds_R = torch.randint(*bounds, (len(texts),), generator=sampler.generator, device=source)
        self._seeds_R = seeds_R.cpu().numpy().astype(np.uint64)  # sync: once a call
        self._ahead_P = np.arange(positions, dtype=np.uint64)
        self._texts, self._vocab_size, self._device = texts, vocab_size, device

    def move_to(self, rows: Sequence[int]) -> None:
        """Move to the next position of each row of the batch."""
        next_B = np.array([len(self._texts[row]) for row in rows], dtype=np.uint64)
        z_BP = self._seeds_R[np.array(rows), None] + (next_B[:, None] + self._ahead_P) * GOLDEN
        z_BP = (z_BP ^ (z_BP >> 30)) * MIX_1
        z_BP = (z_BP ^ (z_BP >> 27)) * MIX_2
        keys_BP = (z_BP ^ (z_BP >> 31)).astype(np.int64)
        self._keys_BP = upload(keys_BP, self._device)
        self._ready_BKV = torch.empty(len(rows), 0, self._vocab_size, device=self._device)

    def next(self, count: int) -> Tensor:
        """E_BKV of the next K = `count` positions of each row; float32."""
        known = self._ready_BKV.shape[1]
        if known < count:
            more_BKV = exponential(self._keys_BP[:, known:count], self._vocab_size)
            self._ready_BKV = more_BKV if known == 0 else torch.cat([self._ready_BKV, more_BKV], dim=1)
        return self._ready_BKV[:, :count]

    def sampler(self, tree: DraftTree) -> PositionSampler:
        """The sampler of a tree's nodes: one at depth d of a row with n new tokens decides the token at n + d."""
        numbers_BKV = self.next(tree.max_depth + 1)
        if tree.in_order:
            return PositionSampler(exponential_BNV=numbers_BKV)
        rows_B1 = counting(len(tree.structure.depths_BN), tree.structure.depths_BN.device, column=True)
        return PositionSampler(exponential_BNV=numbers_BKV[rows_B1, tree.structure.depths_BN])


@constants
def _steps(width: int, device: torch.device) -> Tensor:
    """Offsets of SplitMix64's counter for `width` numbers."""
    return torch.arange(width, device=device) * SIGNED_GOLDEN


def exponential(keys_BK: Tensor, width: int) -> Tensor:
    """Exponential numbers of rate 1, float32 [B, K, width]: -log(1 - u), u SplitMix64's in (0, 1) from each key on."""
    if cpu_kernels.in_use(keys_BK.device):
        minus_u = cpu_kernels.minus_uniform(keys_BK.flatten(), width).reshape(*keys_BK.shape, width)
    else:
        z = keys_BK[..., None] + _steps(width, keys_BK.device)
        for shift, factor in zip((30, 27), SIGNED_MIX, strict=True):
            z = (z ^ ((z >> shift) & (2 ** (64 - shift) - 1))) * factor  # >> keeps the sign
        z = (((z ^ ((z >> 31) & (2**33 - 1))) >> 11) & (2**53 - 1)).to(finest(z.device))
        minus_u = ((z + 0.5) * -(2.0**-53)).float()
    # u that rounds to 1 would be infinite, and all tokens alike
    return minus_u.clamp_(min=-(1 - 2.0**-24)).log1p_().neg_()


@dataclass(eq=False)
class PositionSampler(RandomSampler):
    """One draw per node, a race by the random numbers of the node's position; see `PositionNoise`."""

    exponential_BNV: Tensor = field(kw_only=True)

    def categorical(self, probs: Tensor) -> Tensor:
        return (probs / self.exponential_BNV).argmax(-1)


@dataclass(eq=False)
class PrecomputedSampler(RandomSampler):
    """Samples with precomputed uniform numbers, each used once; the batch is the first dimension."""

    uniform_BU: Tensor = field(kw_only=True)
    used: int = 0

    def uniform(self, shape: Sequence[int], device: torch.device) -> Tensor:
        count = math.prod(shape[1:])
        taken_BU = self.uniform_BU[:, self.used : self.used + count]
        self.used += count
        return taken_BU.reshape(shape)

    def from_start(self) -> PrecomputedSampler:
        return PrecomputedSampler(uniform_BU=self.uniform_BU)


def sampler_by(numbers: Tensor) -> PositionSampler | PrecomputedSampler:
    """The sampler that uses random numbers: exponential ones by position [B, N, V], or uniform ones [B, U]."""
    if numbers.ndim == 3:
        return PositionSampler(exponential_BNV=numbers)
    return PrecomputedSampler(uniform_BU=numbers)


class TreeLogitsProcessor:
    """Applies a call's logits processors to the nodes of a tree, each node with its own prefix."""

    def __init__(
        self, processors: LogitsProcessorList, paddings: Sequence[int], min_length_counts_padding: bool = False
    ) -> None:
        """Check the processors that `generate` prepared for prompts with this many padding tokens in each row.

        Raises:
            ValueError: a processor that depends on more than one row's text and logits, or one of the user's own that
                cannot be copied for each row of a batch; named.
        """
        supported = (*PREFIX_FREE, *READS_LENGTH, *READS_TEXT, *CALLS_USER)
        for processor in processors:
            if _is_transformers(processor) and not isinstance(processor, supported):
                names = sorted(kind.__name__ for kind in supported)
                raise ValueError(
                    f"{type(processor).__name__} is not supported; choose from {', '.join(names)}, or a processor of "
                    "your own that maps one row's text and logits to scores"
                )
        self.processors, self._paddings = processors, paddings
        self._counting = READS_LENGTH + ((known.MinLengthLogitsProcessor,) if min_length_counts_padding else ())
        self._reads_text = not all(_reads_logits_alone(processor) for processor in processors)
        self.one_by_one = any(_may_keep_state(processor) for processor in processors)
        """Whether a processor may keep a state, so that it must be called once for each token, in the text's order, and
        never with a draft that is rejected."""
        self.calls = 0
        """Tokens that were scored one by one."""
        self._wants_numbers = not any(isinstance(each, known.InfNanRemoveLogitsProcessor) for each in processors)
        own = [processor for processor in processors if not _is_transformers(processor)]
        self._own_of_rows = {id(processor): processors_of_rows(processor, len(paddings)) for processor in own}
        """By the user's own processor: the one of each row."""
        warpers = [each for each in processors if isinstance(each, known.TemperatureLogitsWarper)]
        self.temperature = math.prod(float(each.temperature) for each in warpers)
        if self.temperature < SMALLEST_TEMPERATURE:
            raise ValueError(
                f"temperature {self.temperature:.2g} is below {SMALLEST_TEMPERATURE}, so that scores are infinite; "
                "do_sample=False takes the best token"
            )
        self._on: dict[torch.device, tuple[LogitsProcessorList, list[list[tuple[LogitsProcessor, int]]]]] = {}
        """By the logits' device: the processors that read logits alone, and for each row all of its processors, each
        with the number of padding tokens that it counts."""

    def __call__(
        self, logits_BNV: Tensor, tree: DraftTree, text_of: Callable[[int], Tensor], rows: Sequence[int | None]
    ) -> Tensor:
        """Scores of every node, in at least float32; `text_of` a row [T] ends with the tree's root.

        Where None stands in the place of a row, processors that read text are not called.
        With processors that run `one_by_one`, only the roots are scored: see `loop.score_accepted`.
        """
        if not self._reads_text:
            return self._flat(logits_BNV)
        scores_BNV = at_least_fp32(logits_BNV).clone()
        if self.one_by_one:
            for slot, row in enumerate(rows):
                if row is not None:
                    scores_BNV[slot, 0] = self.score_next(row, text_of(row), scores_BNV[slot, 0])
            return scores_BNV
        # sync: processors that read text run depth by depth, and may read it on the host
        tokens_BN, parents_BN, sizes = tree.tokens_BN.tolist(), tree.parents_BN.tolist(), tree.sizes_B.tolist()
        by_row = self._for(logits_BNV.device)[1]
        for slot, row in enumerate(rows):
            if row is None:
                continue
            nodes, text_T = slice(sizes[slot]), text_of(row).to(logits_BNV.device)
            self._score_row(scores_BNV[slot], tokens_BN[slot][nodes], parents_BN[slot][nodes], text_T, by_row[row])
        return scores_BNV

    def score_next(self, row: int, text_T: Tensor, logits_V: Tensor) -> Tensor:
        """Scores [V] of the token after a row's text, by all processors, as `generate` calls them for that row."""
        if self._wants_numbers and bool(logits_V.isnan().any()):  # sync: these processors run on the host
            return logits_V  # the caller tells that; a processor that has seen the text could not see it again
        self.calls += 1
        scores_1V = at_least_fp32(logits_V).clone()[None]  # the user's processors may write to it
        text_1T = text_T.to(logits_V.device)[None]
        for processor, padding in self._for(logits_V.device)[1][row]:
            scores_1V = processor(F.pad(text_1T, (padding, 0)), scores_1V)
        return scores_1V[0]

    @property
    def reads_text(self) -> bool:
        """Whether any processor reads the text, which makes the host wait in every round."""
        return self._reads_text

    def draft_probs(self, logits: Tensor) -> Tensor:
        """Draft logits [..., V] to sampling probabilities, by the processors that read no text."""
        return self._flat(logits).softmax(-1)

    def _flat(self, logits: Tensor) -> Tensor:
        if not self.processors:
            return at_least_fp32(logits)
        flat = at_least_fp32(logits).reshape(-1, logits.shape[-1])
        no_text: Any = torch.empty(len(flat), 0, dtype=torch.int64, device=flat.device)
        return self._for(logits.device)[0](no_text, flat).reshape(logits.shape)

    def _for(self, device: torch.device) -> tuple[LogitsProcessorList, list[list[tuple[LogitsProcessor, int]]]]:
        """`_on[device]`: copies with their tensors on that device; `generate` made them on the inputs' device."""
        if device not in self._on:
            alone = [_moved(processor, device) for processor in self.processors if _reads_logits_alone(processor)]
            by_row = [[self._of_row(p, row, device) for p in self.processors] for row in range(len(self._paddings))]
            self._on[device] = LogitsProcessorList(alone), by_row
        return self._on[device]

    def _of_row(self, processor: LogitsProcessor, row: int, device: torch.device) -> tuple[LogitsProcessor, int]:
        """The processor of one row, and the number of padding tokens that it counts."""
        if id(processor) in self._own_of_rows:
            return self._own_of_rows[id(processor)][row], 0
        padding = self._paddings[row] if isinstance(processor, self._counting) else 0
        return _for_row(_moved(processor, device), row), padding

    @staticmethod
    def _score_row(
        scores_NV: Tensor,
        tokens: list[int],
        parents: list[int],
        text_T: Tensor,
        processors: list[tuple[LogitsProcessor, int]],
    ) -> None:
        """Process one row's nodes in place, depth by depth.

        A node that its parent's scores forbid can never be accepted. It is skipped: a constraint need not know how to
        continue a text that it forbids.
        """
        paths: dict[int, list[int]] = {0: []}
        while paths:
            nodes = list(paths)
            more_ND = upload(list(paths.values()), text_T.device, text_T.dtype)
            texts_NT = torch.cat([text_T.expand(len(nodes), -1), more_ND.reshape(len(nodes), -1)], dim=1)
            found_NV = scores_NV[nodes]
            for processor, padding in processors:
                found_NV = processor(F.pad(texts_NT, (padding, 0)), found_NV)
            scores_NV[nodes] = found_NV
            children = [node for node, parent in enumerate(parents) if parent in paths]
            own = scores_NV[[parents[node] for node in children], [tokens[node] for node in children]].tolist()
            allowed = [node for node, score in zip(children, own, strict=True) if score > -torch.inf]
            paths = {node: [*paths[parents[node]], tokens[node]] for node in allowed}


def _is_transformers(processor: LogitsProcessor) -> bool:
    """Whether it is of a class of transformers' own, whose reading is known."""
    return type(processor).__module__ == known.__name__


def _may_keep_state(processor: LogitsProcessor) -> bool:
    return not _is_transformers(processor) or isinstance(processor, CALLS_USER)


def _reads_logits_alone(processor: LogitsProcessor) -> bool:
    return _is_transformers(processor) and isinstance(processor, PREFIX_FREE)


def processors_of_rows(processor: Any, rows: int) -> list[LogitsProcessor]:
    """A processor of the user's own for each row of a batch, so that a state that it keeps is that of one text.

    A single row gets the user's object itself. In a batch each row gets what `processor.for_row(row)` returns, or else
    a deep copy, which shares models and tokenizers.

    Raises:
        ValueError: it cannot be copied, and has no `for_row`.
    """
    if rows == 1:
        return [processor]
    if callable(getattr(processor, "for_row", None)):
        return [processor.for_row(row) for row in range(rows)]
    if isinstance(getattr(processor, "compiled_grammars", None), list) and getattr(processor, "matchers", None) == []:
        return [_xgrammar_of_row(processor, row) for row in range(rows)]
    attributes = getattr(processor, "__dict__", {}).values()
    heavy = [value for value in attributes if isinstance(value, (nn.Module, PreTrainedTokenizerBase))]
    try:
        return [copy.deepcopy(processor, {id(value): value for value in heavy}) for _ in range(rows)]
    except Exception as error:
        name = type(processor).__name__
        raise ValueError(
            f"the logits processor {name} cannot be copied for each of {rows} rows ({error}), and shared it would mix "
            "their texts; give it a method for_row(row) that returns the processor of one row (itself, if it keeps no "
            "state), or decode rows one at a time"
        ) from error


def _xgrammar_of_row(processor: Any, row: int) -> LogitsProcessor:
    """One row's part of an unused `xgrammar.contrib.hf.LogitsProcessor`, which holds one grammar, or one for each row.

    It makes its matchers, which no copy can have, at its first call.
    """
    part = copy.copy(processor)
    grammars = processor.compiled_grammars
    part.compiled_grammars = [grammars[row if len(grammars) > 1 else 0]]
    return part


def _moved(processor: LogitsProcessor, device: torch.device) -> LogitsProcessor:
    """A copy of transformers' processor with its tensors on a device."""
    other = copy.copy(processor)
    for name, value in vars(other).items():
        if isinstance(value, Tensor):
            setattr(other, name, value.to(device))
    return other


def _for_row(processor: LogitsProcessor, row: int) -> LogitsProcessor:
    """The processor as `generate` would make it for one row by itself, without padding."""
    # `generate` passes the penalty the padding's length as a tensor, the user's own choice as an integer.
    ignored = getattr(processor, "prompt_ignore_length", None)
    if isinstance(processor, known.RepetitionPenaltyLogitsProcessor) and isinstance(ignored, Tensor):
        return known.RepetitionPenaltyLogitsProcessor(processor.penalty)
    if isinstance(processor, known.PrefixConstrainedLogitsProcessor):
        allowed = processor._prefix_allowed_tokens_fn
        return known.PrefixConstrainedLogitsProcessor(lambda _, text: allowed(row, text), num_beams=1)
    return processor
