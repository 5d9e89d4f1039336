"""N-gram models as drafts: probabilities from counts, so that every tree and every acceptance rule fits them.

P(w | h) = (count(h w) + types(h) P(w | h')) / (count(h) + types(h))

with h' the context h without its first token and types(h) the number of different tokens that followed h: Witten-Bell
smoothing (Chen and Goodman, 1999, section 2.6), down to 1 / V. Order 0 is the uniform distribution.

Counting runs on the host; for a target on another device a `HostDrafter` grows the trees there.

Letters in tensor names: B batch, A accepted, W frontier, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ...heads import TargetInfo, TargetModules
from ..logits import RandomSampler
from ..tree import DraftTree
from .base import DraftContext, Drafter, NoDraft, PrefillChunk, RootTracker, StepResult
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
        """Set the limits.

        Args:
            target: the model whose tokens are drafted.
            order: tokens of the longest n-gram that is counted; 0 for the uniform distribution.
            max_depth: tokens of the longest draft.
            corpus: texts that are counted beside the row's own.

        Raises:
            ValueError: an order that is negative or too long.
        """
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


class HostDrafter(RootTracker):
    """A drafter that reads no features, on the host: its trees are grown there and uploaded at once.

    The loop knows on the host what the drafter needs of a step, so nothing waits for the device.
    """

    def begin(self, context: DraftContext) -> None:
        assert isinstance(context.sampler, RandomSampler)
        # Gumbel noise lies on the device: to copy it would be a synchronization.
        super().begin(dataclasses.replace(context, sampler=context.sampler.on_host(), gumbel=None))

    def propose(self, roots_B: Tensor) -> DraftTree:
        return self.parts[0].propose(torch.tensor(self.row_states)).to(roots_B.device)

    def observe(self, step: StepResult) -> None:
        emitted_BA = pad_sequence([torch.tensor(tokens) for tokens in step.tokens], batch_first=True)
        roots = NoDraft().propose(torch.tensor(self.row_states))
        on_host = dataclasses.replace(
            step,
            tree=dataclasses.replace(roots, max_depth=step.tree.max_depth),
            lengths_B=torch.tensor([len(tokens) for tokens in step.tokens]),
            emitted_BA=emitted_BA,
            features_BAF=torch.empty(*emitted_BA.shape, 0),
        )
        super().observe(on_host)

    def _call(self, part: Drafter, method: str, *arguments: Any) -> Any:
        """Call with tensors and prompts on the host."""
        on_host: list[Any] = []
        for each in arguments:
            if isinstance(each, PrefillChunk):
                on_host.append(PrefillChunk(*(tensor.cpu() for tensor in vars(each).values())))
            else:
                on_host.append(each.cpu() if isinstance(each, Tensor) else each)
        return super()._call(part, method, *on_host)
