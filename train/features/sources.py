"""Where the states of a head's training come from if no target computes them here: the interface of all sources."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from ..data.chat_template import Example

States = tuple[Tensor, Tensor | None]
"""States [T, L, D] of a sequence, and the scales [T, L] of those in int8."""


class StateSource(ABC):
    """Gives the states of sequences, in any process."""

    layers: tuple[int, ...]
    """Feature layers of the states, in their order; one of them is -1."""
    before_norm: bool = False
    """Whether -1 is the stream that leaves the last block, to which the final norm is still to be applied."""

    greedy: bool = False
    """Whether it has answers of the target, and not only those of the conversations."""

    @abstractmethod
    def states(self, tokens_T: Tensor, conversation: int) -> States:
        """The states of a sequence; a ValueError if there are none, or not those of these tokens."""

    def many(self, sequences: Sequence[tuple[Tensor, int]]) -> list[States]:
        """The states of several sequences, each with its conversation."""
        return [self.states(tokens_T, conversation) for tokens_T, conversation in sequences]

    def text_of(self, example: Example) -> Tensor | None:
        """The text [T] with a held-out prompt that an evaluation replays; None if the target is asked for it then.

        It is the conversation's own first answer, where a source has no answers of the target.
        """
        return own_answer(example)

    def answer(self, example: Example, new_tokens: int) -> tuple[Tensor, States]:
        """The text [T] with a held-out prompt that an evaluation replays, and its states."""
        tokens_T = self.text_of(example)
        assert tokens_T is not None
        return tokens_T, self.states(tokens_T, example.conversation)

    def probe(self, tokens_T: Tensor) -> States | None:
        """The states of the text by which a head is recognised; None if they are not known."""
        return None


def own_answer(example: Example) -> Tensor:
    """A conversation's tokens up to the end of its first answer."""
    begin = example.loss_mask.index(True)
    end = next((t for t in range(begin, len(example.tokens)) if not example.loss_mask[t]), len(example.tokens))
    return torch.tensor(example.tokens[:end])
