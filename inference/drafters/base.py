"""The drafter interfaces: two methods for a user's own drafter, more for those in the loop.

`Drafter` is the interface of a user's own drafter, which runs inside a fence (`validated`).
`BatchDrafter` is that of the loop: it also begins, reads prompts, and follows the rows of a batch
that come and go.

Letters in tensor names: B batch, T time, A accepted, N nodes, R selected rows, V vocabulary, F
width of the chosen layers side by side.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self, TypeVar, runtime_checkable

from torch import Tensor

from ..trees.sampling import RandomSampler
from ..trees.tree import DraftTree
from ..trees.tree_spec import ROOT, TreeKind
from .round import Round

Value = TypeVar("Value")


@dataclass(frozen=True)
class DraftContext:
    """Settings of a generation, given to a drafter when it begins."""

    batch_size: int
    capacity: int
    """Largest number of tokens in a row: the longest prompt, all new tokens, and a tree after
    them."""
    sampler: RandomSampler
    """Draws sampled drafts."""
    draft_probs: Callable[[Tensor], Tensor] | None
    """Maps draft logits [..., V] to the probabilities to sample from, at the user's settings; None
    in greedy decoding."""
    gumbel: Callable[[int], Tensor] | None = None
    """Gumbel noise [B, count, V] of the next `count` positions, where sampling uses fixed random
    numbers for each position. Added to the draft logits, it makes the token that will be sampled
    likely to be the best one. None where the noise is not known."""
    rows: Sequence[int] = ()
    """Numbers of the batch's rows in the call."""
    prompt_tokens: int = 0
    """Tokens of the longest prompt of these rows; 0 if unknown."""
    new_tokens: int | None = None
    """Most tokens that each row may get; None if unknown."""


@dataclass(frozen=True)
class PrefillChunk:
    """Tokens of the prompts that the target has just read, with its features."""

    tokens_BT: Tensor
    next_tokens_BT: Tensor
    """The token that follows each token."""
    features_BTF: Tensor
    lengths_B: Tensor
    """Valid tokens of each row, the rest is padding; 0 where the prompt ended in an earlier
    chunk."""

    def of(self, chosen: Any, lengths_B: Tensor) -> PrefillChunk:
        """The chosen tokens of the chunk, or rows: an index of all its tensors [B, T]."""
        return PrefillChunk(
            self.tokens_BT[chosen],
            self.next_tokens_BT[chosen],
            self.features_BTF[chosen],
            lengths_B,
        )


def tokens_added(chunk: PrefillChunk, empty: Sequence[bool]) -> list[list[int]]:
    """The tokens that a chunk adds to each row's text; `empty` says which texts have none yet."""
    tokens_of_rows = chunk.tokens_BT.tolist()
    following_of_rows = chunk.next_tokens_BT.tolist()
    added = []
    for row, length in enumerate(chunk.lengths_B.tolist()):
        # The first token of a prompt is no other token's successor.
        first = tokens_of_rows[row][:1] if empty[row] else []
        added.append([*first, *following_of_rows[row][:length]])
    return added


@runtime_checkable
class Drafter(Protocol):
    """A source of draft trees, to be written by a user: `max_nodes` and two methods.

    It makes top-k drafts, on any device. Whatever it does, the output is the target's: after an
    error or an invalid tree the text is decoded without drafts, with a warning. On a GPU a row that
    has ended may keep its slot in a batch: its rounds then emit no tokens, and its drafts are
    dropped.

    It may also have the attribute `feature_layers`, the target's layers whose features it reads,
    and these methods:

        begin(context)          forget the last generation; `context` is a `DraftContext`
        prefill(chunk)          read the prompts, which end with the token that the target chose;
                                `chunk` is a `PrefillChunk`
        select(rows_R)          keep some rows, if it keeps a state of each row of a batch
        replace(rows_R, other)  overwrite some rows

    For rows that join a batch a shallow copy of it begins anew.
    """

    max_nodes: int
    """Size of its largest tree, the root counted."""

    def propose(self, roots_B: Tensor) -> DraftTree:
        """Draft what follows each row's newest token [B], the root of its tree."""
        raise NotImplementedError

    def observe(self, finished: Round) -> None:
        """Read what a round emitted; of its drafts a part may have been verified, see `Round`."""
        return None


class BatchDrafter(Drafter):
    """A drafter as the decoding loop calls it.

    Methods that a subclass does not override do nothing. A drafter that wraps others names them in
    `parts` and calls them itself. Its life in a generation of rows that come and go:

        begin(context)  or  resume(context, ...)     the first rows, or a text that goes on
        prefill(chunk) ...                           their prompts
        ┌─► propose(roots)                           a round
        │   [observe_ahead(round) [take_back()]]     only where the device replays, and so is
        │   [propose_ahead(roots)]                   the next proposal, in place of `propose`
        │   observe(round)
        │   other = fresh(): begin, prefill ...      waiting rows are read by a second drafter
        │   replace(rows, other)                     and take the places of rows that ended
        └── select(rows)                             or the batch shrinks
        saved_state()                                for a later `resume`
    """

    feature_layers: tuple[int, ...] = ()
    """The target's layers whose features it reads."""
    kind: TreeKind = "top_k"
    """How the children of a node are made, which decides the acceptance rules that are exact."""
    parts: Sequence[BatchDrafter] = ()
    """The drafters that it wraps."""

    def __repr__(self) -> str:
        parts = " + ".join(map(repr, self.parts))
        return f"{type(self).__name__}({parts or f'{self.max_nodes} nodes'})"

    def begin(self, context: DraftContext) -> None:
        """Forget the last generation and begin another."""

    def resume(self, context: DraftContext, kept: PrefillChunk, state: Any, whole: bool) -> None:
        """Begin a generation whose text starts like an earlier one's.

        Args:
            context: as for `begin`.
            kept: the tokens that both have in common, without features.
            state: what `saved_state` returned at the end of the earlier one.
            whole: whether `kept` is all of the earlier text.
        """
        self.begin(context)
        self.prefill(kept)

    def saved_state(self) -> Any:
        """State from which a later generation can `resume`.

        None if it keeps no state: a drafter that reads features then gets the text from its start.
        """
        return None

    def can_resume(self, state: Any) -> bool:
        """Whether `resume` can continue from what `saved_state` returned.

        The features of the earlier text are not available then.
        """
        return not self.feature_layers or state is not None

    def prefill(self, chunk: PrefillChunk) -> None:
        """Read a chunk of the prompts; the last one ends with the token that the target chose."""

    @abstractmethod
    def propose(self, roots_B: Tensor) -> DraftTree:
        """Draft a tree after each row's newest token [B], on the device of the roots."""

    def observe_ahead(self, finished: Round) -> None:
        """Launch what `observe` will do on the device, before the host knows the round's tokens.

        The `observe` of that round, which follows unless `take_back` does, must not repeat it.
        """

    def propose_ahead(self, roots_B: Tensor) -> DraftTree | None:
        """Launch the next proposal after `observe_ahead`, before the host knows the round's tokens.

        It is dropped where a row has ended: `propose` follows. None if the drafter needs tokens on
        the host, or random numbers.
        """
        return None

    def take_back(self) -> None:
        """Undo `observe_ahead` and `propose_ahead`: the round is repeated."""

    def observe(self, finished: Round) -> None:
        """Read what a round emitted."""

    def select(self, rows_R: Tensor) -> None:
        """Keep only these rows [R], in this order.

        An index may repeat: `replace` then overwrites the copies.
        """

    def replace(self, rows_R: Tensor, other: Self) -> None:
        """Overwrite these rows by those of another drafter, which has read their prompts."""

    def fresh(self) -> Self:
        """A drafter of the same kind for other rows; neither changes the other's state."""
        return copy.copy(self)

    def nested(self) -> Iterator[BatchDrafter]:
        """This drafter and everything that it wraps."""
        yield self
        for part in self.parts:
            yield from part.nested()


class NoDraft(BatchDrafter):
    """Autoregressive decoding by the same loop: one token a step."""

    max_nodes = 1

    def __init__(self, fallback: str = "") -> None:
        """Decode without drafts, by choice or in place of a drafter; see `DraftTree.fallback`."""
        self.fallback = fallback

    def propose(self, roots_B: Tensor) -> DraftTree:
        tree = DraftTree.of_shape(ROOT, roots_B[:, None])
        if not self.fallback:
            return tree
        return replace(tree, fallback=self.fallback)

    def propose_ahead(self, roots_B: Tensor) -> DraftTree:
        return self.propose(roots_B)


def selected_rows(values: Sequence[Value], rows_R: Tensor) -> list[Value]:
    """The values of these rows, in this order."""
    return [values[row] for row in rows_R.tolist()]


def replaced_rows(values: Sequence[Value], rows_R: Tensor, others: Sequence[Value]) -> list[Value]:
    """The values of all rows, after those of these rows were replaced by `others`."""
    merged = list(values)
    for row, other in zip(rows_R.tolist(), others, strict=True):
        merged[row] = other
    return merged
