"""Logits processors for trees.

    a processor reads             it runs                                    on
    logits (temperature, top-p)   once per round                             all nodes at once
    text (repetition penalty)     once per row and depth of the tree         the nodes of the depth
    text, and may keep a state    once per token, as in plain decoding       accepted nodes alone
    (a grammar, the user's own)

A node's text is the one that it would have if its path were accepted. Processors run in their
order, on rows without padding. If any of them keeps a state, all run token by token; else if any
reads text, all run depth by depth.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerBase
from transformers.generation import logits_process as known

from ...heads.layers.constants import upload
from ...heads.layers.decoder_layer import at_least_fp32
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
"""Processors that compare the text's length with one that `generate` counted over the padded
prompt."""
READS_TEXT = (
    known.ForcedBOSTokenLogitsProcessor,
    known.MinLengthLogitsProcessor,
    known.NoBadWordsLogitsProcessor,
    known.NoRepeatNGramLogitsProcessor,
    known.RepetitionPenaltyLogitsProcessor,
    known.SequenceBiasLogitsProcessor,
    known.WatermarkLogitsProcessor,
)
"""Processors that read the tokens before the one that is scored."""
CALLS_USER = (known.PrefixConstrainedLogitsProcessor,)
"""Processors that call a function of the user's, which may keep a state."""
SMALLEST_TEMPERATURE = 1e-38
"""About the smallest normal number in float32; smaller ones have few digits, or are 0."""


class TreeLogitsProcessor:
    """Applies a call's logits processors to the nodes of a tree, each node with its own prefix."""

    def __init__(
        self,
        processors: LogitsProcessorList,
        paddings: Sequence[int],
        min_length_counts_padding: bool = False,
    ) -> None:
        """Check the processors that `generate` prepared for prompts with padding.

        `paddings` holds the number of padding tokens of each row.

        Raises:
            ValueError: a processor that depends on more than one row's text and logits, or one of
                the user's own that cannot be copied for each row of a batch; named.
        """
        # 1. Refuse what depends on more than one row, such as beam search's processors.
        supported = (*PREFIX_FREE, *READS_LENGTH, *READS_TEXT, *CALLS_USER)
        for processor in processors:
            if _is_transformers(processor) and not isinstance(processor, supported):
                names = sorted(kind.__name__ for kind in supported)
                raise ValueError(
                    f"{type(processor).__name__} is not supported; choose from {', '.join(names)},"
                    " or a processor of your own that maps one row's text and logits to scores"
                )

        # 2. Note how they must be called. Those that count are given as much padding as `generate`
        # counted when it made them.
        self.processors = processors
        self._paddings = paddings
        self._counting: tuple[type[LogitsProcessor], ...] = READS_LENGTH
        if min_length_counts_padding:
            self._counting += (known.MinLengthLogitsProcessor,)
        self.reads_text = not all(_reads_logits_alone(processor) for processor in processors)
        """Whether any processor reads the text, which makes the host wait in every round."""
        self.one_by_one = any(
            not _is_transformers(processor) or isinstance(processor, CALLS_USER)
            for processor in processors
        )
        """Whether a processor may keep a state, so that it must be called once for each token, in
        the text's order, and never with a draft that is rejected."""
        self.calls = 0
        """Tokens that were scored one by one."""
        self._wants_numbers = not any(
            isinstance(processor, known.InfNanRemoveLogitsProcessor) for processor in processors
        )
        self._own_of_rows = {
            id(processor): processors_of_rows(processor, len(paddings))
            for processor in processors
            if not _is_transformers(processor)
        }
        """By the user's own processor: the one of each row."""

        # 3. Temperatures multiply, whatever runs in between. Too small a one is refused.
        self.temperature = math.prod(
            float(processor.temperature)
            for processor in processors
            if isinstance(processor, known.TemperatureLogitsWarper)
        )
        if self.temperature < SMALLEST_TEMPERATURE:
            raise ValueError(
                f"temperature {self.temperature:.2g} is below {SMALLEST_TEMPERATURE}, so that"
                " scores are infinite; do_sample=False takes the best token"
            )
        self._on: dict[
            torch.device, tuple[LogitsProcessorList, list[list[tuple[LogitsProcessor, int]]]]
        ] = {}
        """By the logits' device: the processors that read logits alone, and for each row all of its
        processors, each with the number of padding tokens that it counts."""

    def __call__(
        self,
        logits_BNV: Tensor,
        tree: DraftTree,
        text_of: Callable[[int], Tensor],
        rows: Sequence[int | None],
    ) -> Tensor:
        """Score every node, in at least float32.

        Args:
            logits_BNV: the target's logits at each node.
            tree: the tree.
            text_of: returns a row's text [T], which ends with the tree's root.
            rows: the call's row in each row of the batch; None for an idle one, for which no
                processor that reads text is called.

        Returns:
            Scores [B, N, V]. With processors that run `one_by_one` only the roots are scored, and
            the loop scores each accepted node: see `rounds.loop`.
        """
        # 1. No processor reads text: all nodes at once.
        if not self.reads_text:
            return self._flat(logits_BNV)
        scores_BNV = at_least_fp32(logits_BNV).clone()

        # 2. Some processor may keep a state: it must not see a draft, so it sees the root alone.
        if self.one_by_one:
            for slot, row in enumerate(rows):
                if row is not None:
                    scores_BNV[slot, 0] = self.score_next(row, text_of(row), scores_BNV[slot, 0])
            return scores_BNV

        # 3. Some processor reads text: row by row, depth by depth.
        # sync: processors that read text may read it on the host
        tokens_BN = tree.tokens_BN.tolist()
        parents_BN = tree.parents_BN.tolist()
        sizes = tree.sizes_B.tolist()
        by_row = self._for(logits_BNV.device)[1]
        for slot, row in enumerate(rows):
            if row is None:
                continue
            nodes = slice(sizes[slot])  # without padding
            text_T = text_of(row).to(logits_BNV.device)
            self._score_row(
                scores_BNV[slot],
                tokens_BN[slot][nodes],
                parents_BN[slot][nodes],
                text_T,
                by_row[row],
            )
        return scores_BNV

    def score_next(self, row: int, text_T: Tensor, logits_V: Tensor) -> Tensor:
        """Return scores [V] of the token after a row's text, by all processors.

        They are called as `generate` calls them for that row.
        """
        # sync: these processors run on the host
        if self._wants_numbers and bool(logits_V.isnan().any()):
            # Return the NaN for the caller to handle. A processor with a state that had seen this
            # text could not see it again.
            return logits_V
        self.calls += 1
        # A copy, since the user's processors may write to it.
        scores_1V = at_least_fp32(logits_V).clone()[None]
        text_1T = text_T.to(logits_V.device)[None]
        for processor, padding in self._for(logits_V.device)[1][row]:
            # A processor that counts padding gets as much, on the left.
            scores_1V = processor(F.pad(text_1T, (padding, 0)), scores_1V)
        return scores_1V[0]

    def draft_probs(self, logits: Tensor) -> Tensor:
        """Draft logits [..., V] to sampling probabilities, by the processors that read no text."""
        return self._flat(logits).softmax(-1)

    def _flat(self, logits: Tensor) -> Tensor:
        if not self.processors:
            return at_least_fp32(logits)
        # Processors take [rows, V]: every node is a row, with an empty text, which none reads.
        flat = at_least_fp32(logits).reshape(-1, logits.shape[-1])
        no_text: Any = torch.empty(len(flat), 0, dtype=torch.int64, device=flat.device)
        return self._for(logits.device)[0](no_text, flat).reshape(logits.shape)

    def _for(
        self, device: torch.device
    ) -> tuple[LogitsProcessorList, list[list[tuple[LogitsProcessor, int]]]]:
        """Return `_on[device]`: copies of the processors with their tensors on that device.

        `generate` made the processors on the inputs' device.
        """
        if device not in self._on:
            alone = [
                _moved(processor, device)
                for processor in self.processors
                if _reads_logits_alone(processor)
            ]
            by_row = []
            for row in range(len(self._paddings)):
                by_row.append(
                    [self._of_row(processor, row, device) for processor in self.processors]
                )
            self._on[device] = (LogitsProcessorList(alone), by_row)
        return self._on[device]

    def _of_row(
        self, processor: LogitsProcessor, row: int, device: torch.device
    ) -> tuple[LogitsProcessor, int]:
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

        A node that its parent's scores forbid can never be accepted. It is skipped: a constraint
        need not know how to continue a text that it forbids.
        """
        # The nodes of one depth, each with the tokens after the root on the path to it. The text
        # ends with the root, so its path is empty. For the tree in `tree.py`:
        #     {0: []}, then {1: [cat], 2: [dog]}, then {3: [cat, sat], 4: [dog, ran]}
        paths: dict[int, list[int]] = {0: []}
        while paths:
            # 1. The text of each node: the row's, then the node's path. Here N are these nodes.
            nodes = list(paths)
            path_ND = upload(list(paths.values()), text_T.device, text_T.dtype)
            texts_NT = torch.cat(
                [text_T.expand(len(nodes), -1), path_ND.reshape(len(nodes), -1)], dim=1
            )

            # 2. Score the nodes together, as rows of one batch.
            processed_NV = scores_NV[nodes]
            for processor, padding in processors:
                processed_NV = processor(F.pad(texts_NT, (padding, 0)), processed_NV)
            scores_NV[nodes] = processed_NV

            # 3. Go on to their children, except those that they forbid: the score of a child's
            # token at its parent is then -inf.
            # sync: one for each depth
            children = [node for node, parent in enumerate(parents) if parent in paths]
            child_parents = [parents[node] for node in children]
            child_tokens = [tokens[node] for node in children]
            child_scores = scores_NV[child_parents, child_tokens].tolist()
            children_paths: dict[int, list[int]] = {}
            for node, score in zip(children, child_scores, strict=True):
                if score > -torch.inf:
                    children_paths[node] = [*paths[parents[node]], tokens[node]]
            paths = children_paths


def _is_transformers(processor: LogitsProcessor) -> bool:
    """Whether its class is one of transformers, so that what it reads is known."""
    return type(processor).__module__ == known.__name__


def _reads_logits_alone(processor: LogitsProcessor) -> bool:
    return _is_transformers(processor) and isinstance(processor, PREFIX_FREE)


def processors_of_rows(processor: Any, rows: int) -> list[LogitsProcessor]:
    """Return the user's processor for each row of a batch, so that any state belongs to one text.

    A single row gets the user's object itself. In a batch each row gets what
    `processor.for_row(row)` returns, or else a deep copy, which shares models and tokenizers.

    Raises:
        ValueError: it cannot be copied, and has no `for_row`.
    """
    # 1. One row: the user can read the object's state after the call.
    if rows == 1:
        return [processor]
    # 2. The user's way to make one for each row.
    if callable(getattr(processor, "for_row", None)):
        return [processor.for_row(row) for row in range(rows)]
    # 3. xgrammar's, whose matchers cannot be copied; before its first call it has none.
    if (
        isinstance(getattr(processor, "compiled_grammars", None), list)
        and getattr(processor, "matchers", None) == []
    ):
        return [_xgrammar_of_row(processor, row) for row in range(rows)]
    # 4. Deep copies. A memo that holds a value already makes deepcopy share it.
    shared: dict[int, Any] = {}
    for value in getattr(processor, "__dict__", {}).values():
        if isinstance(value, (nn.Module, PreTrainedTokenizerBase)):
            shared[id(value)] = value
    try:
        return [copy.deepcopy(processor, dict(shared)) for _ in range(rows)]
    except Exception as error:
        name = type(processor).__name__
        raise ValueError(
            f"the logits processor {name} cannot be copied for each of {rows} rows ({error}), and"
            " shared it would mix their texts; give it a method for_row(row) that returns the"
            " processor of one row (itself, if it keeps no state), or decode rows one at a time"
        ) from error


def _xgrammar_of_row(processor: Any, row: int) -> LogitsProcessor:
    """Return one row's part of an unused `xgrammar.contrib.hf.LogitsProcessor`.

    The processor holds one grammar, or one for each row. It makes its matchers, which cannot be
    copied, at its first call.
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
    # `generate` passes the penalty the padding's length as a tensor, the user's own choice as an
    # integer.
    ignored = getattr(processor, "prompt_ignore_length", None)
    if isinstance(processor, known.RepetitionPenaltyLogitsProcessor) and isinstance(
        ignored, Tensor
    ):
        return known.RepetitionPenaltyLogitsProcessor(processor.penalty)
    if isinstance(processor, known.PrefixConstrainedLogitsProcessor):
        # The user's function takes the row's index in the batch, which would be 0 here.
        allowed = processor._prefix_allowed_tokens_fn
        return known.PrefixConstrainedLogitsProcessor(
            lambda _, text: allowed(row, text), num_beams=1
        )
    return processor
