"""Outputs of `generate`: the sequences of a batch, with what was measured and kept of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers.generation.utils import GenerateDecoderOnlyOutput

from .rounds.sequences import Sequences
from .trees.stats import Stats


class GenerateOutput(tuple[Tensor, ...]):
    """Output of `SpeculativeLM.generate`: one sequence [time] for each row, with statistics.

    It has the length, the rows and the indices of `sequences`, the tensor [batch, time] that
    transformers' `generate` returns: `out[0]` is the first row, `out[:, 5:]` leaves out the first
    five tokens of each, and a tokenizer decodes it:

    texts = tokenizer.batch_decode(lm.generate(input_ids))
    """

    def __new__(cls, sequences: Tensor, *args: Any, **kwargs: Any) -> GenerateOutput:
        return super().__new__(cls, sequences)

    def __init__(
        self,
        sequences: Tensor,
        stats: Stats,
        scores: tuple[Tensor, ...] | None = None,
        logits: tuple[Tensor, ...] | None = None,
    ) -> None:
        self.sequences = sequences
        """The prompts as given, followed by the new tokens, padded on the right [batch, time]."""
        self.stats = stats
        """Acceptance and timings."""
        self.scores = scores
        """With `output_scores`: the processed scores of each new token, [batch, V]; 0 after the row
        has finished."""
        self.logits = logits
        """With `output_logits`: the raw logits of each new token, [batch, V]; 0 after the row has
        finished."""

    def __getitem__(self, index: Any) -> Tensor:  # type: ignore[override]  # as the tensor's
        return self.sequences[index]

    def __getnewargs__(self) -> tuple[Any, ...]:
        return (self.sequences,)

    def __repr__(self) -> str:
        return f"GenerateOutput(sequences={self.sequences}, stats={self.stats})"


@dataclass
class GenerateDictOutput(GenerateDecoderOnlyOutput):
    """Output of `model.generate` with `return_dict_in_generate`, with statistics added.

    The other fields are those of transformers' own output of plain `model.generate`.
    """

    stats: Stats | None = None
    """Acceptance and timings."""

    @classmethod
    def of(cls, output: GenerateOutput) -> GenerateDictOutput:
        """The same as `SpeculativeLM.generate` returns it."""
        fields: dict[str, Any] = {
            "sequences": output.sequences,
            "scores": output.scores,
            "logits": output.logits,
        }
        return cls(**fields, stats=output.stats)


def collected(
    input_ids: Tensor, sequences: Sequences, padding: int, stats: Stats
) -> GenerateOutput:
    """Return prompts [batch, time] with new tokens, right-padded, and the scores that were kept."""
    rows = [torch.tensor(row, dtype=torch.int64) for row in sequences.rows]
    new_BT = pad_sequence(rows, batch_first=True, padding_value=padding).to(
        input_ids.device, input_ids.dtype
    )
    return GenerateOutput(
        sequences=torch.cat([input_ids, new_BT], dim=1),
        stats=stats,
        scores=by_token(sequences.scores),
        logits=by_token(sequences.logits),
    )


def by_token(scores: list[list[Tensor]] | None) -> tuple[Tensor, ...] | None:
    """Scores of each row's rounds [tokens, V] as one tensor [batch, V] for each new token.

    For example, row 0 got 2 and 1 tokens in two rounds and row 1 got 2 in one: the result is 3
    tensors [2, V], of which the last holds 0 for row 1.
    """
    if scores is None:
        return None
    rows = [torch.cat(rounds) for rounds in scores]
    # [tokens, batch, V], padded with 0
    return pad_sequence(rows).unbind(0)
