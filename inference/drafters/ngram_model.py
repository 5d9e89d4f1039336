"""N-gram models as drafts: probabilities from counts fit every tree and every acceptance rule.

P(w | h) = (count(h w) + types(h) P(w | h')) / (count(h) + types(h))

with h' the context h without its first token and types(h) the number of different tokens that
followed h: Witten-Bell smoothing (Chen and Goodman, 1999, section 2.6), down to 1 / V. Order 0 is
the uniform distribution. For example, h was followed by a three times and by b once: count(h) = 4,
types(h) = 2, and P(a | h) = (3 + 2 P(a | h')) / 6.

Counting runs on the host; for a target on another device a `HostDrafter` grows the trees there.

Letters in tensor names: B batch, A accepted, W frontier, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...heads.base import TargetInfo, TargetModules
from .base import replaced_rows, selected_rows

LONGEST_GRAM = 16
"""Tokens of the longest n-gram that is counted."""


class NgramIndex:
    """A text that grows, with an index of its n-grams."""

    def __init__(self, longest: int) -> None:
        """An empty text; `longest` is the length of the n-grams that can be searched for."""
        self.longest = longest
        self.tokens: list[int] = []
        self._positions: dict[tuple[int, ...], list[int]] = defaultdict(list)
        """Positions after each n-gram, the newest last."""

    def append(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            # The new token follows every n-gram at the text's end, the empty one included: after
            # 5 7, a new token at position 2 follows (), (7) and (5, 7).
            end = len(self.tokens)
            for length in range(min(self.longest, end) + 1):
                self._positions[tuple(self.tokens[end - length :])].append(end)
            self.tokens.append(token)

    def following(self, gram: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """The tokens that follow the n-gram, and how often each does."""
        following = [self.tokens[i] for i in self._positions.get(tuple(gram), [])]
        return np.unique(np.array(following, dtype=np.int64), return_counts=True)


@dataclass(frozen=True)
class NgramState:
    """Each row's text, which grows in place."""

    texts: list[NgramIndex]
    dtype: torch.dtype
    contexts: list[list[tuple[int, ...]]] | None = None
    """Context of the children of each node of the frontier; None before the root was expanded."""

    def select(self, rows_R: Tensor) -> NgramState:
        return dataclasses.replace(self, texts=selected_rows(self.texts, rows_R))

    def replace(self, rows_R: Tensor, other: NgramState) -> NgramState:
        return dataclasses.replace(self, texts=replaced_rows(self.texts, rows_R, other.texts))


class NgramModel:
    """An n-gram model with the interface of `DraftModel`."""

    feature_layers: tuple[int, ...] = ()
    reads_from_start = True

    def __init__(self, target: TargetInfo, order: int, max_depth: int) -> None:
        """Count n-grams of up to `order` tokens, to draft up to `max_depth` tokens of a target."""
        if not 0 <= order <= LONGEST_GRAM:
            raise ValueError(
                f"an n-gram model needs an order from 0 to {LONGEST_GRAM}, not {order}"
            )
        self.target = target
        self.order = order
        self.max_depth = max_depth
        self.draft_vocab_size = target.vocab_size

    def begin(
        self, modules: TargetModules, batch_size: int, capacity: int, max_depth: int, nodes: int
    ) -> NgramState:
        texts = [NgramIndex(max(self.order - 1, 0)) for _ in range(batch_size)]
        double = modules.lm_head.weight.dtype == torch.float64
        return NgramState(texts, torch.float64 if double else torch.float32)

    def observe(
        self, state: NgramState, features_BAF: Tensor, tokens_BA: Tensor, lengths_B: Tensor
    ) -> NgramState:
        for text, tokens, length in zip(
            state.texts, tokens_BA.tolist(), lengths_B.tolist(), strict=True
        ):
            text.append(tokens[:length])
        return dataclasses.replace(state, contexts=None)

    def expand(
        self, state: NgramState, tokens_BW: Tensor, parents_BW: Tensor
    ) -> tuple[Tensor, NgramState]:
        contexts = self._contexts(state, tokens_BW.tolist(), parents_BW.tolist())
        probs = []
        for text, contexts_of_row in zip(state.texts, contexts, strict=True):
            probs.append([self.probabilities(text, context) for context in contexts_of_row])
        logits_BWV = torch.from_numpy(np.log(np.array(probs))).to(tokens_BW.device, state.dtype)
        return logits_BWV, dataclasses.replace(state, contexts=contexts)

    def _contexts(
        self, state: NgramState, tokens: list[list[int]], parents: list[list[int]]
    ) -> list[list[tuple[int, ...]]]:
        """The newest tokens before the children of each node of a frontier, row by row."""
        # A model of order n looks back n - 1 tokens; one token is kept even for order 0.
        longest = max(self.order, 1)
        # The root's children follow the text.
        if state.contexts is None:
            return [[tuple(text.tokens[-longest:])] for text in state.texts]
        # Those of another node follow its parent's context and the node itself.
        contexts = []
        for row, before in enumerate(state.contexts):
            of_row = []
            for token, parent in zip(tokens[row], parents[row], strict=True):
                of_row.append((*before[parent], token)[-longest:])
            contexts.append(of_row)
        return contexts

    def probabilities(self, text: NgramIndex, context: Sequence[int]) -> np.ndarray:
        """Return next-token probabilities [V] after a context, counted in the text."""
        # From the shortest context, none at all, to the longest: `probs` is P(. | h') before each
        # step and P(. | h) after it.
        probs = np.full(self.target.vocab_size, 1 / self.target.vocab_size)
        for size in range(min(len(context) + 1, self.order)):
            gram = context[len(context) - size :]
            tokens, counts = text.following(gram)
            types = len(tokens)
            # An n-gram that never occurred says nothing.
            if types > 0:
                total = counts.sum() + types
                probs *= types / total
                probs[tokens] += counts / total
        return probs

    def target_tokens(self, draft_tokens: Tensor) -> Tensor:
        return draft_tokens
