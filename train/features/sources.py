"""The interface of all sources of states: where they come from if no target computes them here.

A source of another kind is opened by a function that `train` is given, `train(config,
source=open)`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from accelerate import Accelerator
from torch import Tensor

from ...heads.base import TargetInfo
from ...inference.engines.target import Target
from ..data.chat_template import Example

States = tuple[Tensor, Tensor | None]
"""States [T, L, D] of a sequence, and the scales [T, L] of those in int8."""


class StateSource(ABC):
    """Gives the states of sequences, in any process."""

    layers: tuple[int, ...]
    """Feature layers of the states, in their order; one of them is -1."""
    before_norm: bool = False
    """Whether -1 is the stream that leaves the last block, to which the final norm is still to be
    applied."""
    greedy: bool = False
    """Whether it has answers of the target, and not only those of the conversations."""

    def require(  # noqa: B027, many sources cannot tell
        self, accelerator: Accelerator, examples: Sequence[Example], what: str
    ) -> None:
        """Refuse sequences whose states it lacks, if it can tell before it is asked for them.

        `what` ends the error's subject, such as "to train on". Processes may share the work.

        Raises:
            ValueError: naming the first of the sequences.
        """

    def try_first(self, target: Target, example: Example) -> None:  # noqa: B027, nothing to try
        """Try one sequence before the first step, on every process.

        Raises:
            ValueError: what is wrong with its states, and so probably with all.
        """

    @abstractmethod
    def states(self, tokens_T: Tensor, conversation: int) -> States:
        """Return a sequence's states; a ValueError if there are none, or not for these tokens."""

    def many(self, sequences: Sequence[tuple[Tensor, int]]) -> list[States]:
        """The states of several sequences, each with its conversation."""
        return [self.states(tokens_T, conversation) for tokens_T, conversation in sequences]

    def text_of(self, example: Example) -> Tensor | None:
        """Return the text [T] that an evaluation replays: a held-out prompt and its answer.

        The answer is the conversation's own first one where a source has no answers of the target.
        None if the target is asked for it at the evaluation.
        """
        return own_answer(example)

    def answer(self, example: Example, new_tokens: int) -> tuple[Tensor, States]:
        """Return the text [T] that an evaluation replays, as `text_of` does, and its states."""
        tokens_T = self.text_of(example)
        assert tokens_T is not None
        return tokens_T, self.states(tokens_T, example.conversation)

    def probe(self, tokens_T: Tensor) -> States | None:
        """Return the states of the text by which a head is recognised; None if not known."""
        return None


OpenSource = Callable[[TargetInfo, tuple[int, ...]], StateSource]
"""Opens a source of a target's states at some feature layers."""


def own_answer(example: Example) -> Tensor:
    """Return a conversation's tokens up to the end of its first answer."""
    # The mask 0 0 1 1 1 0 0 1 1 ends its first answer before position 5.
    end = example.loss_mask.index(True)
    while end < len(example.tokens) and example.loss_mask[end]:
        end += 1
    return torch.tensor(example.tokens[:end])
