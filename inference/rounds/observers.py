"""`RoundObserver`: the one way in for whatever watches a generation.

    class Progress(RoundObserver):
        def begin(self, call: DecodingCall) -> None:
            self.sequences = call.sequences

        def round(self, finished: Round) -> None:
            print(f"{self.sequences.tokens} tokens so far")

    lm.observers.append(Progress())

Observers run in the thread that generates, one after the other, outside of the time that is
measured for a round. They read what was computed anyway: the text and the drafts are the same with
them and without them. An exception of theirs ends the generation. A tensor that they get is valid
until the method returns: the next round may overwrite it.

Letters in tensor names: B batch, T time, N nodes, A accepted, V vocabulary, F width of the layers
side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from ..drafters.base import BatchDrafter, PrefillChunk
from ..drafters.round import Round
from ..engines.target import Target
from ..trees.logits import TreeLogitsProcessor
from ..trees.sampling import RandomSampler
from ..trees.stats import Stats
from ..trees.verify import AcceptanceRule
from .noise import PositionNoise
from .sequences import Conversation, Sequences


@dataclass(frozen=True)
class DecodingCall:
    """A call of `generate`: everything that stays the same from its first token to its last."""

    target: Target
    drafter: BatchDrafter
    rule: AcceptanceRule
    process_logits: TreeLogitsProcessor
    sampler: RandomSampler
    """Source of randomness for drafts and for the acceptance rule."""
    sequences: Sequences
    """The rows, live: `prompts` and new tokens (`rows`) by their number in the call, and which of
    them are `active`: `active[b]` is the row in place b of a round's batch."""
    past: Conversation | None = None
    """The conversation that the call continues, before it is updated."""
    prompt_inputs: dict[str, Any] | None = None
    """What `model.generate` prepared for a prompt with images; None for text alone."""
    observers: Sequence[RoundObserver] = ()
    """What watches the call."""
    feature_layers: tuple[int, ...] = ()
    """The layers whose features stand side by side in `features_BTF`, `features_BAF` and
    `output.features_BNF`: those of the drafter first, then those that observers asked for. Empty
    without observers, where they are the drafter's."""
    noise: PositionNoise | None = None
    """Random numbers that are fixed for each position of each row, whatever was drafted; None where
    the rule draws anew in each round."""
    stats: Stats = field(default_factory=Stats)
    """The call's statistics so far, live: in `round` the newest round is counted."""

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that the target computes features of."""
        return self.feature_layers or self.drafter.feature_layers

    @property
    def adds_layers(self) -> bool:
        """Whether observers read layers that the drafter does not."""
        return len(self.feature_layers) > len(self.drafter.feature_layers)

    def of_drafter(self, features: Tensor) -> Tensor:
        """The columns of features [..., F] that the drafter asked for: the first ones."""
        if not self.adds_layers:
            return features
        # Every layer has the same width: with layers (1, 12, 20), of which the drafter reads the
        # first two, its features are the first two thirds.
        width = features.shape[-1] // len(self.feature_layers)
        return features[..., : width * len(self.drafter.feature_layers)].contiguous()


class RoundObserver(Protocol):
    """An observer of generations: subclasses override the methods they need, others do nothing."""

    feature_layers: tuple[int, ...] = ()
    """The target's layers whose features it reads, in any order; `DecodingCall.feature_layers` says
    where they are."""

    def begin(self, call: DecodingCall) -> None:
        """A call begins: its prompts are known, and will be read next."""
        return None

    def prefill(self, rows: Sequence[int], starts: Sequence[int], chunk: PrefillChunk) -> None:
        """The target has read a chunk of the prompts.

        A row's chunks follow one another. The last one holds its last prompt token, with the first
        new token after it.

        Args:
            rows: the rows [B] of the chunk, by their number in the call.
            starts: the position [B] in its text of each row's first token in the chunk. In a row's
                first chunk it is 0, or where the text of a conversation goes on that the target
                knows already.
            chunk: tokens and features.
        """
        return None

    def round(self, finished: Round) -> None:
        """A round has ended, whose tokens have been appended."""
        return None

    def end(self, stats: Stats, error: BaseException | None) -> None:
        """A call that has begun ends.

        Args:
            stats: the call's statistics, of the rounds that have ended.
            error: why it ended early: what was raised, `StreamClosed` where the reader of a stream
                has left. None if every row is complete.
        """
        return None


@contextmanager
def observing(observer: RoundObserver, call: DecodingCall) -> Iterator[None]:
    """Tell an observer of a call's begin and end."""
    observer.begin(call)  # an observer whose `begin` fails gets no `end`
    try:
        yield
    except BaseException as error:
        observer.end(call.stats, error)
        raise
    observer.end(call.stats, None)
