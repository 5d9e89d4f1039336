"""The drafter interface: drafters, what they read of the prompts, and what they learn from each step.

A subclass of `Drafter` needs `max_nodes` and `propose`; one that remembers the text also `begin`, `prefill` and
`observe`, and for batches `select` and `replace`. A drafter of the user's own runs inside a `ValidatedDrafter`, so that
nothing it does can change the output.

Letters in tensor names: B batch, T time, A accepted, N nodes, R selected rows, V vocabulary, F width of the chosen
layers side by side.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ...heads.layers.constants import constants
from ..engines.base import Engine, TargetOutput
from ..logits import RandomSampler, Sampler
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
    """Whether a token can be chosen after each node of the path: no score is NaN, and one is above -inf; in sampling
    none is inf either."""
    tokens: Sequence[list[int]] = ()
    """On the host: each row's emitted tokens, without padding, up to the first that does not follow from finite scores.
    Copied with all else that the host needs of a step, in one synchronization."""
    host_values: Sequence[list[int]] = ()
    """On the host: each row of what `Drafter.host_values` returned."""


class Drafter:
    """A source of draft trees for a batch of rows, which `select` and `replace` change.

    One that wraps others forwards every call to them, unless it overrides it.
    """

    feature_layers: tuple[int, ...] = ()
    """The target's layers whose features it reads."""
    max_nodes: int
    """Size of its largest tree, the root counted."""
    kind: TreeKind = "top_k"
    """How the children of a node are made, which decides the acceptance rules that are exact."""
    needs_host_values: bool = False
    """Whether `host_values` is called in each step."""
    parts: tuple[Drafter, ...] = ()
    """The drafters that it wraps."""
    row_states: Sequence[Any] = ()
    """State of each row, on the host; empty if it has none."""
    tracks_roots: bool = False
    """Whether these are each row's newest token, the root of the next tree."""

    def __init__(self, *parts: Drafter) -> None:
        """Wrap drafters, of which the first one proposes the trees."""
        self.parts = parts
        if parts:
            self.feature_layers, self.max_nodes, self.kind = parts[0].feature_layers, parts[0].max_nodes, parts[0].kind
            self.needs_host_values = any(part.needs_host_values for part in parts)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({' + '.join(map(repr, self.parts)) or f'{self.max_nodes} nodes'})"

    def begin(self, context: DraftContext) -> None:
        """Forget the last generation and begin another."""
        if self.tracks_roots:
            self.row_states = [0] * context.batch_size
        for part in self.parts:
            self._call(part, "begin", context)

    def resume(self, context: DraftContext, kept: PrefillChunk, state: Any, whole: bool) -> None:
        """Begin a generation whose text starts like an earlier one's.

        Args:
            context: as for `begin`.
            kept: the tokens that both have in common, without features.
            state: what `saved_state` returned at the end of the earlier one.
            whole: whether `kept` is all of the earlier text.
        """
        if state is None or not self.parts:
            self.begin(context)
            self.prefill(kept)
        else:
            for part, its in zip(self.parts, state, strict=True):
                part.resume(context, kept, its, whole)

    def saved_state(self) -> Any:
        """State from which a later generation can `resume`; None if there is none.

        A drafter that reads features and returns None is given the text from its start again.
        """
        if self.row_states:  # which are made from the text
            return None
        states = [part.saved_state() for part in self.parts]
        lost = any(part.feature_layers and state is None for part, state in zip(self.parts, states, strict=True))
        return None if lost else states or None

    def cache_bytes(self, rows: int, tokens: int) -> int:
        """Bytes of device memory for `rows` × `tokens`."""
        return sum(part.cache_bytes(rows, tokens) for part in self.parts)

    def prefill(self, chunk: PrefillChunk) -> None:
        """Read a chunk of the prompts; the last one ends with the token that the target chose."""
        if self.tracks_roots:  # sync: once for 2048 tokens of the prompts
            rows = zip(chunk.next_tokens_BT.tolist(), chunk.lengths_B.tolist(), self.row_states, strict=True)
            self.row_states = [tokens[length - 1] if length else before for tokens, length, before in rows]
        for part in self.parts:
            self._call(part, "prefill", chunk)

    def propose(self, roots_B: Tensor) -> DraftTree:
        """Draft what follows each row's newest token; the tree lies on the device of the roots."""
        raise NotImplementedError

    def host_values(self, step: StepResult) -> Tensor | None:
        """Integers [B, K] that `observe` needs on the host; they arrive as `StepResult.host_values`."""
        return self._call(self.parts[0], "host_values", step) if self.parts else None

    def observe(self, step: StepResult) -> None:
        """Read what a step emitted."""
        if self.tracks_roots:
            self.row_states = [tokens[-1] for tokens in step.tokens]
        for part in self.parts:
            self._call(part, "observe", step)

    def use(self, engine: Engine) -> None:
        """Draft as the target's engine runs functions and heads, from the next generation on."""
        for part in self.parts:
            part.use(engine)

    def renew(self, force: bool = False) -> None:
        """Before a generation: copy weights again that have changed, where copies draft; with `force` in any case."""
        for part in self.parts:
            part.renew(force)

    def select(self, rows_R: Tensor) -> None:
        """Keep these rows only, in this order; an index may repeat: `replace` then overwrites the copies."""
        if self.row_states:
            self.row_states = [self.row_states[row] for row in rows_R.tolist()]
        for part in self.parts:
            self._call(part, "select", rows_R)

    def replace(self, rows_R: Tensor, other: Drafter) -> None:
        """Put another drafter's rows, whose prompts it has read, in the places of these."""
        if self.row_states:
            theirs = dict(zip(rows_R.tolist(), other.row_states, strict=True))
            self.row_states = [theirs.get(row, state) for row, state in enumerate(self.row_states)]
        for part, its in zip(self.parts, other.parts, strict=True):
            self._call(part, "replace", rows_R, its)

    def fresh(self) -> Self:
        """A drafter of the same kind for other rows; neither changes the other's state."""
        other = copy.copy(self)
        if self.parts:
            other.parts = tuple(part.fresh() for part in self.parts)
        return other

    def nested(self) -> Iterator[Drafter]:
        """This drafter and all that it wraps."""
        yield self
        for part in self.parts:
            yield from part.nested()

    def _call(self, part: Drafter, method: str, *arguments: Any) -> Any:
        return getattr(part, method)(*arguments)


class NoDraft(Drafter):
    """Autoregressive decoding by the same loop: one token a step."""

    max_nodes = 1

    def __init__(self, fallback: str = "") -> None:
        """Decode plainly, by choice or in place of a drafter; see `DraftTree.fallback`."""
        super().__init__()
        self.fallback = fallback

    def propose(self, roots_B: Tensor) -> DraftTree:
        tree = DraftTree.of_shape(ROOT, roots_B[:, None])
        return replace(tree, fallback=self.fallback) if self.fallback else tree


class ShrunkDrafter(Drafter):
    """A drafter whose trees keep their first `kept` nodes, where memory is too short for all.

    Parents stand before their children, so the first nodes of a top-k tree are a tree.
    """

    def __init__(self, drafter: Drafter, kept: int) -> None:
        super().__init__(drafter)
        self.kept = kept

    def propose(self, roots_B: Tensor) -> DraftTree:
        tree, kept = self.parts[0].propose(roots_B), self.kept
        if tree.tokens_BN.shape[1] <= kept:
            return tree
        tokens_BN, parents_BN = tree.tokens_BN[:, :kept].contiguous(), tree.parents_BN[:, :kept].contiguous()
        sizes_B, depth = tree.sizes_B.clamp(max=kept), min(tree.max_depth, kept - 1)
        return DraftTree(tokens_BN, parents_BN, sizes_B, depth, padding=tree.padding, in_order=tree.in_order)


@constants
def constant(values: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of the same values in each step, uploaded once."""
    return torch.tensor(values, dtype=dtype, device=device)


class HostDrafter(Drafter):
    """A drafter that reads no features, on the host: its trees are grown there and uploaded at once.

    The loop knows on the host what the drafter needs of a step, so nothing waits for the device.
    """

    tracks_roots = True

    def propose(self, roots_B: Tensor) -> DraftTree:
        return self.parts[0].propose(torch.tensor(self.row_states)).to(roots_B.device)

    def observe(self, step: StepResult) -> None:
        emitted_BA = pad_sequence([torch.tensor(tokens) for tokens in step.tokens], batch_first=True)
        roots = NoDraft().propose(torch.tensor(self.row_states))
        on_host = replace(
            step,
            tree=replace(roots, max_depth=step.tree.max_depth),
            lengths_B=torch.tensor([len(tokens) for tokens in step.tokens]),
            emitted_BA=emitted_BA,
            features_BAF=torch.empty(*emitted_BA.shape, 0),
        )
        super().observe(on_host)

    def _call(self, part: Drafter, method: str, *arguments: Any) -> Any:
        """Call with all arguments on the host."""
        on_host = list(arguments)
        for number, each in enumerate(arguments):
            if isinstance(each, Tensor):
                on_host[number] = each.cpu()
            elif isinstance(each, PrefillChunk):
                on_host[number] = PrefillChunk(*(tensor.cpu() for tensor in vars(each).values()))
            elif isinstance(each, DraftContext):
                assert isinstance(each.sampler, RandomSampler)
                # Gumbel noise lies on the device: to copy it would be a synchronization.
                on_host[number] = replace(each, sampler=each.sampler.on_host(), gumbel=None)
        return super()._call(part, method, *on_host)


class ValidatedDrafter(Drafter):
    """A drafter of the user's own: after an error, or a tree that is none, the text is decoded without drafts."""

    tracks_roots = True

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        """Wrap a drafter for a target with `vocab_size` tokens.

        Raises:
            ValueError: a drafter whose drafts are sampled: with wrong draft probabilities sampling would not be exact.
        """
        if drafter.kind != "top_k":
            raise ValueError(
                f"a drafter of your own must make top-k drafts, and {type(drafter).__name__} says that they are "
                f"{drafter.kind!r}: with wrong draft probabilities the output would not be the target's"
            )
        super().__init__(drafter)
        self.vocab_size, self.failed = vocab_size, False

    def _call(self, part: Drafter, method: str, *arguments: Any) -> Any:
        """The drafter's answer; None after its first error, which is reported once per text."""
        self.failed = self.failed and method != "begin"
        if self.failed:
            return None
        try:
            answer = super()._call(part, method, *arguments)
            if method == "propose":
                self._check_tree(answer)
            if method == "host_values" and answer is not None:
                rows = len(self.row_states)
                fits = answer.shape[:-1] == (rows,) and answer.dtype == torch.int64
                if not fits:
                    raise ValueError(
                        f"host_values returned {list(answer.shape)} of {answer.dtype}, and [{rows}, K] of torch.int64 "
                        "is needed"
                    )
            return answer
        except Exception as error:  # of code that is not ours
            self.failed = True
            name = type(part).__name__
            warnings.warn(f"the drafter {name} failed; the rest is decoded without drafts: {error!r}", stacklevel=3)
            return None

    def propose(self, roots_B: Tensor) -> DraftTree:
        tree = self._call(self.parts[0], "propose", roots_B)
        return NoDraft("drafter_failed").propose(roots_B) if tree is None else tree.to(roots_B.device)

    def replace(self, rows_R: Tensor, other: Drafter) -> None:
        assert isinstance(other, ValidatedDrafter)
        self.failed = self.failed or other.failed
        super().replace(rows_R, other)

    def _check_tree(self, tree: DraftTree) -> None:
        nodes = tree.tokens_BN.shape[1]
        if nodes > self.max_nodes:
            raise ValueError(f"a tree of {nodes} nodes, and at most {self.max_nodes} were announced")
        # sync: for a tree that was not made on the host
        columns = (tree.tokens_BN.tolist(), tree.parents_BN.tolist(), self.row_states, tree.sizes_B.tolist())
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
