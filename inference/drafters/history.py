"""Drafts from what was said before: in the text itself, in earlier answers, in a corpus.

Prompt lookup (Saxena, 2023) searches the text itself, suffix decoding (arXiv:2411.04975) earlier
answers too, retrieval (REST, arXiv:2311.08252) a corpus; here one index serves all three. The
longest match of the text's end decides what is drafted. Its continuations are merged into a tree
whose best nodes are kept. For example, the text ends with "a cat", which was followed by "sat by"
once and by "sat on" twice:

    cat ── sat ──┬── on        2 of 3
                 └── by        1 of 3

How likely a draft is accepted is learned from every step of the text, drafted or not: of the
tokens that came after a match of so many tokens, the share that it foretold. So each round can
compare what the history expects with what drafts otherwise, a head or nothing, and a round in which
it promises less costs a search on the host, some 20 microseconds a row.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from ...heads.layers.constants import upload
from ..trees.tree import DraftTree
from ..tuning.round_costs import RoundCosts
from .adaptive import AdaptiveDrafter
from .base import (
    BatchDrafter,
    DraftContext,
    NoDraft,
    PrefillChunk,
    replaced_rows,
    selected_rows,
    tokens_added,
)
from .round import Round
from .text_index import LONGEST, SEPARATOR, Match, TextIndex

EARLIER_TOKENS = 1 << 20
"""Tokens of earlier answers that are kept, at most; the oldest are forgotten first."""
EXPECTED = 4
"""Tokens that the first guess of an acceptance rate counts for."""
REMEMBERED = 256
"""Tokens that an acceptance rate is averaged over, about."""
AVERAGED_ROUNDS = 32
"""Rounds over which the tokens of other drafts are averaged, about."""
MOST_ROWS = 16
"""Rows of a batch up to which matches are searched: in a larger one a round has little room for
drafts, and the search of all rows would be felt."""
FREE = RoundCosts({1: 1.0, 2: 1.0}, draft=0.0)
"""Costs of rounds that all take the same time."""


class Rates:
    """The share of foretold tokens, by the length of the match that foretold them."""

    def __init__(self) -> None:
        # Matches of n tokens foretell about 1 - 1 / n of the next ones, until more is known.
        self._tried = [float(EXPECTED)] * (LONGEST + 1)
        self._right = [EXPECTED * max(1 - 1 / max(n, 1), 0.0) for n in range(LONGEST + 1)]

    def of(self, length: int) -> float:
        """The share after a match of `length` tokens."""
        length = min(length, LONGEST)
        return self._right[length] / self._tried[length]

    def learn(self, match: Match, emitted: Sequence[int]) -> None:
        """Compare what followed a match with what its occurrences foretold.

        Each token that was foretold makes the match longer by one.
        """
        alive = match.continuations
        for place, token in enumerate(emitted):
            alive = [path for path in alive if len(path) > place]
            if not alive:
                return
            alive = [path for path in alive if path[place] == token]
            length = min(match.length + place, LONGEST)
            self._tried[length] += 1
            self._right[length] += bool(alive)
            if self._tried[length] > REMEMBERED:
                self._tried[length] /= 2
                self._right[length] /= 2

    def most(self, match: Match, tokens: int) -> float:
        """Tokens that a round after this match is expected to emit if all continuations agree."""
        expected = 1.0
        reached = 1.0
        for place in range(min(tokens, max(map(len, match.continuations), default=0))):
            reached *= self.of(match.length + place)
            expected += reached
        return expected


class Found(NamedTuple):
    """The longest match of a row's text, and what such matches have foretold."""

    match: Match
    rates: Rates


@dataclass(eq=False)
class Row:
    """A row of the batch."""

    text: TextIndex
    answer: int = 0
    """Position in the text where its answer begins."""
    found: Found | None = None
    """The match of its newest tokens; None if there is none."""
    ended: bool = False
    """Whether it has ended, and keeps its slot."""


def best_tree(
    root: int, found: Found, size: int, costs: RoundCosts, rows: int, path_only: bool
) -> tuple[Trie, float]:
    """The tree below a root that emits the most tokens for its time, and its tokens a plain step.

    It has up to `size` nodes, the root counted; with `path_only` each has one child at most.
    """
    # 1. All continuations in one tree. A node's value is the expected share of rounds that reach
    #    it: the rates of the matches up to it, times the share of continuations that have it.
    whole = Trie([root])
    shares: dict[int, int] = {}
    for path in found.match.continuations:
        for node in whole.add(path):
            shares[node] = shares.get(node, 0) + 1
    values = [1.0]
    above = [len(found.match.continuations)]  # continuations that have each node
    depths = whole.depths()
    for node in range(1, len(whole.tokens)):
        parent = whole.parents[node]
        rate = found.rates.of(found.match.length + depths[node] - 1)
        values.append(values[parent] * rate * shares[node] / above[parent])
        above.append(shares[node])
    # 2. The best nodes first. No node is worth more than its parent, which comes earlier, so any
    #    number of them is a tree.
    order = sorted(range(1, len(values)), key=lambda node: (-values[node], node))
    if path_only:
        order = _one_path(order, whole.parents)
    # 3. As many as pay.
    plain = costs.forward_seconds(rows)
    best, best_rate, expected = 0, 0.0, 1.0
    for count, node in enumerate(order[: size - 1], start=1):
        expected += values[node]
        rate = expected * plain / costs.forward_seconds((count + 1) * rows)
        if rate > best_rate:
            best, best_rate = count, rate
    kept = [0, *sorted(order[:best])]
    node_in_part = {node: place for place, node in enumerate(kept)}
    parents = [-1, *[node_in_part[whole.parents[node]] for node in kept[1:]]]
    return Trie([whole.tokens[node] for node in kept], parents), best_rate


def _one_path(order: Sequence[int], parents: Sequence[int]) -> list[int]:
    """The nodes, in this order, that continue the path of the ones before."""
    path = [0]
    for node in order:
        if parents[node] == path[-1]:
            path.append(node)
    return path[1:]


class HistoryDrafter(BatchDrafter):
    """Drafts what followed the text's end before, where that promises more than other drafts."""

    def __init__(
        self,
        nodes: int = 12,
        length: int = 10,
        earlier: TextIndex | None = None,
        corpus: TextIndex | None = None,
        other: BatchDrafter | None = None,
        costs: RoundCosts | None = None,
        path_only: bool = False,
    ) -> None:
        """Search each row's own text, and what else is named.

        Args:
            nodes: nodes of a tree, the root counted, at most.
            length: tokens of a continuation, at most.
            earlier: answers of earlier generations, to which those of this drafter are added; None
                to keep none.
            corpus: texts that stay as they are.
            other: what drafts in the other rounds; None for plain steps.
            costs: what rounds cost on this machine; None to count tokens alone, as if all rounds
                took the same time.
            path_only: whether trees are paths.

        Raises:
            ValueError: no room for a draft, or another drafter whose drafts are sampled: trees of
                both kinds have different rules.
        """
        if nodes < 2 or length < 1:
            raise ValueError(
                f"a history needs at least 2 nodes and continuations of 1 token, not {nodes} and"
                f" {length}"
            )
        self.other = NoDraft() if other is None else other
        if self.other.kind != "top_k":
            raise ValueError(
                "sampled drafts cannot take turns with those of a history; use a tree of top-k"
                " drafts"
            )
        self.nodes = nodes
        self.length = length
        self.earlier = earlier
        self.corpus = corpus
        self.costs = costs
        self.path_only = path_only
        self.parts = (self.other,)
        self.feature_layers = self.other.feature_layers
        self.max_nodes = max(nodes, self.other.max_nodes)
        self.rates = (Rates(), Rates(), Rates())
        """Of a row's own text, of earlier answers, of the corpus."""
        self.rows: list[Row] = []
        self._searched = False
        """Whether the matches of all rows are those of their newest tokens."""
        self._usual = 1.0 if isinstance(self.other, NoDraft) else math.inf
        """Mean tokens that a row got in rounds of the other drafter; inf before the first."""
        self._proposed: DraftTree | None = None
        """The newest tree that the history had a part in."""

    def forget(self) -> None:
        """Forget all answers."""
        self.rows = []
        if self.earlier is not None:
            self.earlier.clear()

    def begin(self, context: DraftContext) -> None:
        self._begin(context)
        self.other.begin(context)

    def resume(self, context: DraftContext, kept: PrefillChunk, state: Any, whole: bool) -> None:
        self._begin(context)
        self._read(kept)
        self.other.resume(context, kept, state, whole)

    def _begin(self, context: DraftContext) -> None:
        self._take_rows([Row(TextIndex(context.capacity)) for _ in range(context.batch_size)])

    def saved_state(self) -> Any:
        """The other drafter's; a history reads its text again."""
        return self.other.saved_state()

    def prefill(self, chunk: PrefillChunk) -> None:
        self._read(chunk)
        self.other.prefill(chunk)

    def _read(self, chunk: PrefillChunk) -> None:
        added = tokens_added(chunk, [row.text.end == 0 for row in self.rows])
        for row, tokens in zip(self.rows, added, strict=True):
            row.text.add(tokens)
            row.answer = max(row.text.end - 1, 0)  # the newest token is the answer's first
        self._searched = False

    def propose(self, roots_B: Tensor) -> DraftTree:
        if not self._searched:
            self._search()
        tries = self._tries(roots_B.device)
        if not any(tries):
            return self.other.propose(roots_B)
        # Recorded forwards serve one size: where rounds are recorded, on GPUs, there is one.
        size = 0 if roots_B.device.type == "cpu" else self.nodes
        pairs = list(zip(tries, self.rows, strict=True))
        if all(trie or row.ended for trie, row in pairs):
            # All rows draft from the history: the other drafter has nothing to do.
            if isinstance(self.other, AdaptiveDrafter):
                self.other.stand_aside()
            ours = [trie or Trie(row.text.last(1)) for trie, row in pairs]
            self._proposed = draft_tree(ours, roots_B.device, size)
        else:
            self._proposed = with_tries(self.other.propose(roots_B), tries, size)
        return self._proposed

    def propose_ahead(self, roots_B: Tensor) -> DraftTree | None:
        # The matches are those of the round that the host has not read: where one is worth a draft,
        # so will be that of the next round, more often than not.
        if any(self._tries(roots_B.device)):
            return None
        return self.other.propose_ahead(roots_B)

    def _tries(self, device: torch.device) -> list[Trie | None]:
        """For each row its draft; None where the other drafter promises more."""
        usual = self._usual
        if self.costs is not None and isinstance(self.other, AdaptiveDrafter):
            usual = self.other.tokens_a_plain_step(len(self.rows), device)
        tries = []
        for row in self.rows:
            found = row.found
            trie = None
            # A bound that needs no tree.
            if found is not None and found.rates.most(found.match, self.nodes - 1) > usual:
                root = row.text.last(1)[0]
                trie, tokens = best_tree(
                    root, found, self.nodes, self.costs or FREE, len(self.rows), self.path_only
                )
                if tokens <= usual:
                    trie = None
            tries.append(trie)
        return tries

    def _search(self) -> None:
        """Find the longest match of each row: of equal ones that in its own text."""
        for row in self.rows:
            row.found = None
            if row.ended or len(self.rows) > MOST_ROWS:
                continue
            tail = row.text.last(LONGEST)
            longest = 0
            indexes = (row.text, self.earlier, self.corpus)
            for index, rates in zip(indexes, self.rates, strict=True):
                if index is None:
                    continue
                match = index.search(tail, self.length)
                if match.length > longest:
                    longest = match.length
                    row.found = Found(match, rates)
        self._searched = True

    def observe_ahead(self, finished: Round) -> None:
        self.other.observe_ahead(finished)

    def take_back(self) -> None:
        self.other.take_back()

    def observe(self, finished: Round) -> None:
        self.other.observe(finished)
        emitted = [len(tokens) for tokens in finished.tokens if tokens]
        if emitted and finished.proposed is not self._proposed:
            mean = sum(emitted) / len(emitted)
            usual = mean if self._usual == math.inf else self._usual
            self._usual = usual + (mean - usual) / AVERAGED_ROUNDS
        for row, tokens in zip(self.rows, finished.tokens, strict=True):
            row.ended = not tokens
            if self._searched and row.found is not None:
                row.found.rates.learn(row.found.match, tokens)
            row.text.add(tokens)
        self._search()

    def select(self, rows_R: Tensor) -> None:
        self._take_rows(selected_rows(self.rows, rows_R))
        self.other.select(rows_R)

    def replace(self, rows_R: Tensor, other: Self) -> None:
        self._take_rows(replaced_rows(self.rows, rows_R, other.rows))
        self.other.replace(rows_R, other.other)

    def _take_rows(self, rows: list[Row]) -> None:
        """Go on with these rows, and remember the answers of those that have left."""
        left = [row for row in self.rows if all(row is not other for other in rows)]
        if self.earlier is not None:
            for row in left:
                # With the end of the prompt, by which the answer's beginning is found.
                tokens = row.text.last(row.text.end - max(row.answer - LONGEST, 0))
                self.earlier.add([*tokens, SEPARATOR])
        self.rows = rows
        self._searched = False

    def fresh(self) -> Self:
        other = copy.copy(self)
        other.other = self.other.fresh()
        other.parts = (other.other,)
        other.rows = []
        return other


@dataclass
class Trie:
    """A tree of token paths, whose common prefixes are shared."""

    tokens: list[int]
    """Of each node, the root first."""
    parents: list[int] = field(default_factory=lambda: [-1])
    """Of each node; the root's is -1."""
    children: dict[tuple[int, int], int] = field(default_factory=dict)
    """(Node, token) to its child with that token."""

    def add(self, path: Sequence[int], parent: int = 0) -> list[int]:
        """Add a path below a node; return its nodes."""
        nodes = []
        for token in path:
            node = self.children.get((parent, token))
            if node is None:
                node = len(self.tokens)
                self.children[parent, token] = node
                self.tokens.append(token)
                self.parents.append(parent)
            nodes.append(node)
            parent = node
        return nodes

    def depths(self) -> list[int]:
        """Depth of each node."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return depths


def draft_tree(tries: Sequence[Trie], device: torch.device, size: int = 0) -> DraftTree:
    """Return tries as one batch, each padded with its root to the largest size, or to `size`.

    The root is a token of the text: the target's embedding of another one might contain NaN.
    """
    nodes = max(size, *[len(trie.tokens) for trie in tries])
    depth = 0
    columns = []  # of each row: N tokens, N parents and the size, uploaded as one
    for trie in tries:
        size = len(trie.tokens)
        tokens = [*trie.tokens, *[trie.tokens[0]] * (nodes - size)]
        parents = [*trie.parents, *[0] * (nodes - size)]
        columns.append([*tokens, *parents, size])
        depth = max(depth, *trie.depths())
    tokens_BN, parents_BN, sizes_B1 = upload(columns, device).split([nodes, nodes, 1], dim=1)
    return DraftTree(tokens_BN, parents_BN, sizes_B1[:, 0], max_depth=depth)


def with_tries(tree: DraftTree, tries: Sequence[Trie | None], size: int) -> DraftTree:
    """A batch's tree, in which the rows that have a trie are replaced by it; `size` nodes or more.

    Short rows are padded with their roots.
    """
    device = tree.tokens_BN.device
    nodes = tree.tokens_BN.shape[1]
    size = max(size, nodes)
    ours = draft_tree([trie or Trie([0]) for trie in tries], device, size)
    ours_B1 = upload([[int(trie is not None)] for trie in tries], device) > 0
    padding = ours.tokens_BN.shape[1] - nodes
    roots_BN = tree.tokens_BN[:, :1].expand(-1, padding)
    tokens_BN = torch.cat([tree.tokens_BN, roots_BN], dim=1)
    parents_BN = torch.cat([tree.parents_BN, torch.zeros_like(roots_BN)], dim=1)
    return DraftTree(
        torch.where(ours_B1, ours.tokens_BN, tokens_BN),
        torch.where(ours_B1, ours.parents_BN, parents_BN),
        torch.where(ours_B1[:, 0], ours.sizes_B, tree.sizes_B),
        max_depth=max(ours.max_depth, tree.max_depth),
    )
