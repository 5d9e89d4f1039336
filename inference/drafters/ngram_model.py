"""N-gram models as drafts: probabilities from counts, so that every tree and every acceptance rule fits them.

P(w | h) = (count(h w) + types(h) P(w | h')) / (count(h) + types(h))

with h' the context h without its first token and types(h) the number of different tokens that followed h: Witten-Bell
smoothing (Chen and Goodman, 1999, section 2.6), down to 1 / V. Order 0 is the uniform distribution.

Counting runs on the host; for a target on another device a `HostDrafter` of `base` grows the trees there.

Letters in tensor names: B batch, A accepted, W frontier, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...heads.base import TargetInfo, TargetModules
from .ngram_index import SORTED_TOKENS, Corpus, NgramIndex


@dataclass(frozen=True)
class NgramState:
    """Each row's text, which grows in place."""

    texts: list[NgramIndex]
    dtype: torch.dtype
    contexts: list[list[tuple[int, ...]]] | None = None
    """Context of the children of each node of the frontier; None before the root was expanded."""

    def select(self, rows_R: Tensor) -> NgramState:
        return dataclasses.replace(self, texts=[self.texts[row] for row in rows_R.tolist()])

    def replace(self, rows_R: Tensor, other: NgramState) -> NgramState:
        for row, text in zip(rows_R.tolist(), other.texts, strict=True):
            self.texts[row] = text
        return self


class NgramModel:
    """An n-gram model with the interface of `DraftModel`."""

    feature_layers: tuple[int, ...] = ()
    reads_from_start = True

    def __init__(self, target: TargetInfo, order: int, max_depth: int, corpus: Corpus | None = None) -> None:
        """Count n-grams of up to `order` tokens, in `corpus` too, to draft up to `max_depth` tokens of a target."""
        if not 0 <= order <= SORTED_TOKENS:
            raise ValueError(f"an n-gram model needs an order from 0 to {SORTED_TOKENS}, not {order}")
        self.target, self.order, self.max_depth, self.corpus = target, order, max_depth, corpus
        self.draft_vocab_size = target.vocab_size

    def begin(self, modules: TargetModules, batch_size: int, capacity: int, max_depth: int, nodes: int) -> NgramState:
        texts = [NgramIndex(max(self.order - 1, 0)) for _ in range(batch_size)]
        double = modules.lm_head.weight.dtype == torch.float64
        return NgramState(texts, torch.float64 if double else torch.float32)

    def observe(self, state: NgramState, features_BAF: Tensor, tokens_BA: Tensor, lengths_B: Tensor) -> NgramState:
        for text, tokens, length in zip(state.texts, tokens_BA.tolist(), lengths_B.tolist(), strict=True):
            text.append(tokens[:length])
        return dataclasses.replace(state, contexts=None)

    def expand(self, state: NgramState, tokens_BW: Tensor, parents_BW: Tensor) -> tuple[Tensor, NgramState]:
        kept = max(self.order, 1)  # tokens of a context
        if state.contexts is None:
            contexts = [[tuple(text.tokens[-kept:])] for text in state.texts]
        else:
            rows = zip(state.contexts, tokens_BW.tolist(), parents_BW.tolist(), strict=True)
            contexts = [
                [(*before[parent], token)[-kept:] for token, parent in zip(tokens, parents, strict=True)]
                for before, tokens, parents in rows
            ]
        probs = [
            [self.probabilities(text, context) for context in row]
            for text, row in zip(state.texts, contexts, strict=True)
        ]
        logits_BWV = torch.from_numpy(np.log(np.array(probs))).to(tokens_BW.device, state.dtype)
        return logits_BWV, dataclasses.replace(state, contexts=contexts)

    def probabilities(self, text: NgramIndex, context: Sequence[int]) -> np.ndarray:
        """Probabilities [V] of the next token after a context, counted in the text and the corpus."""
        probs = np.full(self.target.vocab_size, 1 / self.target.vocab_size)
        for size in range(min(len(context) + 1, self.order)):
            gram = context[len(context) - size :]
            for counted in (self.corpus, text):
                if counted is not None:
                    tokens, counts = counted.following(gram)
                    types, total = len(tokens), counts.sum()
                    if types > 0:
                        probs *= types / (total + types)
                        probs[tokens] += counts / (total + types)
        return probs

    def target_tokens(self, draft_tokens: Tensor) -> Tensor:
        return draft_tokens
