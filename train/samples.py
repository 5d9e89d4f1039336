"""Answers to some held-out prompts with the accepted draft tokens marked: what acceptance looks like in a text."""

from __future__ import annotations

import copy
import html
import itertools
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..heads import DraftHead
from ..inference import Target, TreePolicy, load_tokenizer
from ..inference.metrics import RoundRecord
from .evaluate import greedy_answers

COLUMNS = ("prompt", "answer, accepted drafts in ⟦⟧", "acceptance length")
"""Of a table of samples."""


@dataclass(frozen=True)
class Sample:
    """A prompt and its answer."""

    prompt: str
    pieces: list[tuple[str, bool]]
    """The answer in pieces of text, each with whether its tokens were drafts that the target accepted."""
    acceptance_length: float
    """Tokens per round."""

    def marked(self) -> str:
        """The answer with accepted drafts in brackets, ⟦so⟧."""
        return "".join(f"⟦{text}⟧" if accepted else text for text, accepted in self.pieces)

    def html(self, tag: str) -> str:
        """Prompt and answer with accepted drafts inside of a tag, such as mark or strong."""
        answer = "".join(
            f"<{tag}>{html.escape(text)}</{tag}>" if accepted else html.escape(text) for text, accepted in self.pieces
        )
        return f"<p>{html.escape(self.prompt)}</p><p>{answer}</p><p>acceptance length {self.acceptance_length:.2f}</p>"


def sample_answers(
    target: Target,
    head: DraftHead,
    tree: TreePolicy,
    prompts: list[Tensor],
    new_tokens: int,
    tokenizer: PreTrainedTokenizerBase,
) -> list[Sample]:
    """Answer prompts greedily with a copy of the head in the target's dtype.

    Args:
        target: the frozen model.
        head: drafts.
        tree: that it drafts.
        prompts: token ids, each [time].
        new_tokens: of each answer, at most.
        tokenizer: of the target.
    """
    served = copy.deepcopy(head).to(target.dtype).eval()
    out = greedy_answers(target, served, tree, prompts, new_tokens)
    width = max(map(len, prompts))  # prompts are padded on the left to the longest
    return [
        Sample(
            str(tokenizer.decode(prompt)),
            marked(row[width:].tolist(), records, tokenizer),
            sum(record.returned for record in records) / max(len(records), 1),
        )
        for prompt, row, records in zip(prompts, out.sequences, out.stats.rows, strict=True)
    ]


def marked(tokens: list[int], records: list[RoundRecord], tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, bool]]:
    """An answer in pieces, each with whether its tokens were accepted drafts.

    Args:
        tokens: of the answer, and padding after it; the first is the prefill's.
        records: of its rounds, each of which returned accepted drafts and then, unless it was cut off, a bonus token.
        tokenizer: of the target.
    """
    accepted = [False]
    for record in records:
        drafts = min(record.accepted, record.returned)
        accepted += [True] * drafts + [False] * (record.returned - drafts)
    pieces, begin, length = [], 0, 0
    for is_draft, run in itertools.groupby(accepted[: len(tokens)]):
        length += len(list(run))
        # A text up to here, not the piece alone: a tokenizer may drop the space that a lone piece begins with. Bytes
        # of a character that the next piece completes are that piece's.
        end = len(str(tokenizer.decode(tokens[:length])).rstrip("\ufffd"))
        pieces.append((begin, end, is_draft))
        begin = end
    text = str(tokenizer.decode(tokens[:length]))
    return [(text[begin:end], is_draft) for begin, end, is_draft in pieces if end > begin]


@lru_cache(maxsize=1)
def tokenizer_of(target: str, revision: str | None) -> PreTrainedTokenizerBase:
    """The target's tokenizer, loaded once for all evaluations of a run."""
    return load_tokenizer(target, revision)
