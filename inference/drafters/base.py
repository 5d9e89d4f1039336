"""The drafter interface: drafters, what they read of the prompts, and what they learn from each step.

A subclass of `Drafter` needs `max_nodes` and `propose`; one that remembers the text also `begin`, `prefill` and
`observe`. One that is not ours runs inside a `ValidatedDrafter`, so that nothing it does can change the output.

Letters in tensor names: B batch, T time, A accepted, N nodes, R selected rows, V vocabulary, F width of the chosen
layers side by side.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from ..logits import Sampler
from ..target import TargetOutput
from ..tree import DraftTree
from ..tuning.tree_spec import ROOT, TreeKind


@dataclass(frozen=True)
class DraftContext:
    """Settings of a generation, given to a drafter when it begins."""

    batch_size: int
    capacity: int
    """Largest number of tokens in a row: the longest prompt, all new tokens, and a tree beyond them."""
    sampler: Sampler
    """Draws sampled drafts."""
    draft_probs: Callable[[Tensor], Tensor] | None
    """Draft logits [..., V] to the probabilities to sample from, at the user's settings; None for greedy decoding."""
    gumbel: Callable[[int], Tensor] | None = None
    """Gumbel noise [B, count, V] for the next `count` positions, where sampling uses fixed random numbers for each
    position. Added to the draft logits, it makes the token that will be sampled likely to be the best one. None where
    the noise is not known."""


@dataclass(frozen=True)
class PrefillChunk:
    """Tokens of the prompts that the target has just read, with its features."""

    tokens_BT: Tensor
    next_tokens_BT: Tensor
    """The token that follows each token."""
    features_BTF: Tensor
    lengths_B: Tensor
    """Valid tokens of each row, the rest is padding; 0 where the prompt ended in an earlier chunk."""

    def select(self, rows_R: Tensor) -> PrefillChunk:
        return PrefillChunk(*(tensor[rows_R] for tensor in vars(self).values()))

    def last_tokens(self, before: Sequence[int]) -> list[int]:
        """Each row's last token, on the host; `before` for a row without valid tokens."""
        # sync: once for 2048 tokens of the prompts
        rows = zip(self.next_tokens_BT.tolist(), self.lengths_B.tolist(), before, strict=True)
        return [tokens[length - 1] if length else last for tokens, length, last in rows]


@dataclass(frozen=True)
class StepResult:
    """A finished speculation step."""

    tree: DraftTree
    output: TargetOutput
    path_BA: Tensor
    """The accepted nodes, see `VerifyResult`."""
    lengths_B: Tensor
    """Valid nodes of each path."""
    next_tokens_B: Tensor
    """The bonus token of each row."""
    emitted_BA: Tensor
    """The emitted tokens: after each node of `path_BA`, the token that follows it."""
    features_BAF: Tensor
    """The accepted nodes' features."""
    finite_BA: Tensor
    """Whether the accepted nodes' scores are finite for at least one token, and not NaN."""
    tokens: Sequence[list[int]] = ()
    """On the host: each row's emitted tokens, without padding. Copied with all else that the host needs of a step, in
    one synchronization."""
    host_values: Sequence[list[int]] = ()
    """On the host: each row of what `Drafter.host_values` returned."""


class Drafter:
    """A source of draft trees for a batch of rows, which `select` and `replace` change."""

    feature_layers: tuple[int, ...] = ()
    """The target's layers whose features it reads."""
    max_nodes: int
    """Size of its largest tree, the root counted."""
    kind: TreeKind = "top_k"
    """How the children of a node are made, which decides the acceptance rules that are exact."""

    needs_host_values: bool = False
    """Whether `host_values` is called in each step."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.max_nodes} nodes)"

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
        """State from which a later generation can `resume`; None if there is none.

        A drafter that reads features and returns None is given the text from its start again.
        """

    def cache_bytes(self, rows: int, tokens: int) -> int:
        """Bytes of device memory for `rows` × `tokens`."""
        return 0

    def prefill(self, chunk: PrefillChunk) -> None:
        """Read a chunk of the prompts; the last one ends with the token that the target chose."""

    def propose(self, roots_B: Tensor) -> DraftTree:
        """Draft what follows each row's newest token; the tree lies on the device of the roots."""
        raise NotImplementedError

    def host_values(self, step: StepResult) -> Tensor | None:
        """Integers [B, K] that `observe` needs on the host; they arrive as `StepResult.host_values`."""

    def observe(self, step: StepResult) -> None:
        """Read what a step emitted."""

    def compile(self) -> None:
        """Draft in compiled functions from now on, where that is possible."""

    def select(self, rows_R: Tensor) -> None:
        """Keep these rows only."""

    def replace(self, rows_R: Tensor, other: Drafter) -> None:
        """Put another drafter's rows, whose prompts it has read, in the places of these."""

    def fresh(self) -> Self:
        """A drafter of the same kind for other rows; neither changes the other's state."""
        return copy.copy(self)

    def nested(self) -> Iterator[Drafter]:
        """This drafter and all that it wraps."""
        yield self


class NoDraft(Drafter):
    """Autoregressive decoding by the same loop: one token a step."""

    max_nodes = 1

    def propose(self, roots_B: Tensor) -> DraftTree:
        return DraftTree.of_shape(ROOT, roots_B[:, None])


def _forwarded(method: str) -> Callable[..., None]:
    return lambda self, *arguments: self._forward(method, *arguments)


class DrafterWrapper(Drafter):
    """Forwards every call to the drafters that it wraps; a subclass overrides what it changes."""

    def __init__(self, *parts: Drafter) -> None:
        self.parts = parts
        self.feature_layers, self.max_nodes, self.kind = parts[0].feature_layers, parts[0].max_nodes, parts[0].kind
        self.needs_host_values = any(part.needs_host_values for part in parts)

    def _forward(self, method: str, *arguments: Any) -> None:
        for part in self.parts:
            getattr(part, method)(*arguments)

    begin, prefill, observe, compile, select = map(_forwarded, ("begin", "prefill", "observe", "compile", "select"))

    def resume(self, context: DraftContext, kept: PrefillChunk, state: Any, whole: bool) -> None:
        for part, its in zip(self.parts, state, strict=True):
            part.resume(context, kept, its, whole)

    def saved_state(self) -> list[Any] | None:
        states = [part.saved_state() for part in self.parts]
        lost = (part.feature_layers and state is None for part, state in zip(self.parts, states, strict=True))
        return None if any(lost) else states

    def cache_bytes(self, rows: int, tokens: int) -> int:
        return sum(part.cache_bytes(rows, tokens) for part in self.parts)

    def propose(self, roots_B: Tensor) -> DraftTree:
        return self.parts[0].propose(roots_B)

    def host_values(self, step: StepResult) -> Tensor | None:
        return self.parts[0].host_values(step)

    def replace(self, rows_R: Tensor, other: Drafter) -> None:
        assert isinstance(other, DrafterWrapper)
        for part, its in zip(self.parts, other.parts, strict=True):
            part.replace(rows_R, its)

    def fresh(self) -> Self:
        other = copy.copy(self)
        other.parts = tuple(part.fresh() for part in self.parts)
        return other

    def nested(self) -> Iterator[Drafter]:
        yield self
        for part in self.parts:
            yield from part.nested()


class RootTracker(DrafterWrapper):
    """A wrapper of one drafter that knows each row's newest token, the root of the next tree, on the host."""

    roots: list[int]

    def begin(self, context: DraftContext) -> None:
        self.roots = [0] * context.batch_size
        super().begin(context)

    resume, saved_state = Drafter.resume, Drafter.saved_state

    def prefill(self, chunk: PrefillChunk) -> None:
        self.roots = chunk.last_tokens(self.roots)
        super().prefill(chunk)

    def observe(self, step: StepResult) -> None:
        self.roots = [tokens[-1] for tokens in step.tokens]
        super().observe(step)

    def select(self, rows_R: Tensor) -> None:
        self.roots = [self.roots[row] for row in rows_R.tolist()]
        super().select(rows_R)

    def replace(self, rows_R: Tensor, other: Drafter) -> None:
        assert isinstance(other, RootTracker)
        for row, root in zip(rows_R.tolist(), other.roots, strict=True):
            self.roots[row] = root
        self._forward("replace", rows_R, other.parts[0])


class ValidatedDrafter(RootTracker):
    """A drafter of the user's own: after an error, or a tree that is none, the text is decoded without drafts."""

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        """Wrap a drafter.

        Args:
            drafter: of any class; its drafts must be top-k, for with wrong draft probabilities sampling would not be
                exact.
            vocab_size: of the target.

        Raises:
            ValueError: a drafter whose drafts are sampled.
        """
        if drafter.kind != "top_k":
            raise ValueError(
                f"a drafter of your own must make top-k drafts, and {type(drafter).__name__} says that they are "
                f"{drafter.kind!r}: with wrong draft probabilities the output would not be the target's"
            )
        super().__init__(drafter)
        self.vocab_size, self.failed = vocab_size, False

    def _forward(self, method: str, *arguments: Any) -> Any:
        """The drafter's answer; None after its first error, which is reported once per text."""
        if self.failed:
            return None
        drafter = self.parts[0]
        try:
            answer = getattr(drafter, method)(*arguments)
            if method == "propose":
                self._check_tree(answer)
            if method == "host_values":
                self._check_host_values(answer)
            return answer
        except Exception as error:  # of code that is not ours
            self.failed = True
            name = type(drafter).__name__
            warnings.warn(f"the drafter {name} failed; the rest is decoded without drafts: {error!r}", stacklevel=3)
            return None

    def begin(self, context: DraftContext) -> None:
        self.failed = False
        super().begin(context)

    def propose(self, roots_B: Tensor) -> DraftTree:
        tree = self._forward("propose", roots_B)
        return NoDraft().propose(roots_B) if tree is None else tree.to(roots_B.device)

    def host_values(self, step: StepResult) -> Tensor | None:
        values_BK: Tensor | None = self._forward("host_values", step)
        return values_BK

    def compile(self) -> None:
        self.parts[0].compile()

    def replace(self, rows_R: Tensor, other: Drafter) -> None:
        assert isinstance(other, ValidatedDrafter)
        self.failed = self.failed or other.failed
        super().replace(rows_R, other)

    def _check_host_values(self, values_BK: Tensor | None) -> None:
        if values_BK is not None and (values_BK.shape[:-1] != (len(self.roots),) or values_BK.dtype != torch.int64):
            raise ValueError(
                f"host_values returned {list(values_BK.shape)} of {values_BK.dtype}, and [{len(self.roots)}, K] of "
                "torch.int64 is needed"
            )

    def _check_tree(self, tree: DraftTree) -> None:
        nodes = tree.tokens_BN.shape[1]
        if nodes > self.max_nodes:
            raise ValueError(f"a tree of {nodes} nodes, and at most {self.max_nodes} were announced")
        # sync: for a tree that was not made on the host
        columns = (tree.tokens_BN.tolist(), tree.parents_BN.tolist(), self.roots, tree.sizes_B.tolist())
        for tokens, parents, root, size in zip(*columns, strict=True):
            if not 1 <= size <= nodes:
                raise ValueError(f"a row's tree is said to have {size} nodes, of {nodes}")
            if tokens[0] != root or parents[0] != -1:
                raise ValueError(
                    f"the tree's first node is {tokens[0]} below {parents[0]}, not the root {root} below -1"
                )
            depths = [0]
            for node in range(1, nodes):
                if not 0 <= tokens[node] < self.vocab_size:
                    raise ValueError(f"node {node} is token {tokens[node]}; the target has {self.vocab_size}")
                if not 0 <= parents[node] < node:
                    raise ValueError(f"node {node} lies below node {parents[node]}, which does not stand before it")
                depths.append(depths[parents[node]] + 1)
            if len(set(zip(parents[:size], tokens[:size], strict=True))) < size:
                raise ValueError("two siblings are the same token: both would be sampled for")
            if not max(depths) <= tree.max_depth < nodes:
                raise ValueError(
                    f"the tree is {max(depths)} deep and has {nodes} nodes, and max_depth is {tree.max_depth}"
                )
