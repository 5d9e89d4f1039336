"""The draft's KV cache, and attention over it, against softmax written out."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from headstart.heads.base import DraftTreeState
from headstart.heads.layers import draft_cache
from headstart.heads.layers.draft_cache import DraftCache
from headstart.heads.layers.masked_attention import masked_attention

HEADS, GROUPS, SIZE, SLOTS = 4, 2, 8, 23


def written_out(
    query: Tensor, key: Tensor, value: Tensor, seen_BNS: Tensor, scale: float = SIZE**-0.5
) -> Tensor:
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    scores = (query @ key.mT * scale).masked_fill(~seen_BNS[:, None], float("-inf"))
    return scores.softmax(-1) @ value


@pytest.mark.parametrize("few", [1, 6, 256])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("before", [1, 2, 3], ids="repeated {}".format)
def test_masked_queries_find_what_softmax_finds(
    monkeypatch: pytest.MonkeyPatch, few: int, heads: int, groups: int, queries: int, before: int
) -> None:
    """Also where the mask was repeated before, for groups of this size or of another."""
    monkeypatch.setattr(sys.modules[masked_attention.__module__], "FEW", few)
    random = torch.Generator().manual_seed(heads + queries)
    query, key, value = (
        torch.randn(2, *shape, SIZE, generator=random, dtype=torch.float64)
        for shape in ((heads, queries), (groups, SLOTS), (groups, SLOTS))
    )
    seen = torch.rand(2, queries, SLOTS, generator=torch.Generator().manual_seed(1)) < 0.4
    seen[..., 0] = True
    mask = torch.zeros_like(seen, dtype=torch.float64).masked_fill(~seen, -1e300)[:, None]
    mask = mask.repeat(1, 1, before, 1) if before * queries <= few else mask
    found = masked_attention(query, key, value, mask, 0.3)
    torch.testing.assert_close(
        found, written_out(query, key, value, seen, 0.3), rtol=1e-12, atol=1e-12
    )


# The cache: one round after the other.


def empty_state(
    batch: int, nodes: int, capacity: int, layers: int = 1, window: int | None = None
) -> DraftTreeState:
    """A state of a head whose outputs are one number wide."""
    slots = nodes + DraftCache.slots_for(capacity, window)
    keys, values = (
        [torch.zeros(batch, GROUPS, slots, SIZE, dtype=torch.float64) for _ in range(layers)]
        for _ in range(2)
    )
    return DraftTreeState(
        None,  # type: ignore[arg-type]
        depth=0,
        cache=DraftCache(nodes, keys, values, window=window),
        lengths_B=torch.zeros(batch, dtype=torch.int64),
        hidden_BWD=torch.zeros(batch, 1, 1),
        paths_BWN=torch.zeros(batch, 1, nodes, dtype=torch.bool),
        first_B=torch.zeros(batch, dtype=torch.int64),
    )


class Replay:
    """A cache and, beside it, lists of every key and value that should be seen."""

    def __init__(
        self,
        batch: int,
        nodes: int,
        capacity: int,
        layers: int = 1,
        seed: int = 0,
        window: int | None = None,
    ) -> None:
        self.state = empty_state(batch, nodes, capacity, layers, window)
        self.window = window
        self.lost: list[int] = [0] * batch
        """First tokens of each row that are not in the cache any more, after a crop."""
        self.batch, self.nodes, self.layers = batch, nodes, layers
        self.random = torch.Generator().manual_seed(seed)
        self.committed: list[list[list[tuple[Tensor, Tensor]]]] = [
            [[] for _ in range(batch)] for _ in range(layers)
        ]

    def draw(self, tokens: int) -> list[Tensor]:
        return [
            torch.randn(self.batch, heads, tokens, SIZE, dtype=torch.float64, generator=self.random)
            for heads in (HEADS, GROUPS, GROUPS)
        ]

    def commit(self, lengths: list[int], tokens: int) -> None:
        """`tokens` entries of which each row keeps the first `lengths`; those are compared."""
        before_B = self.state.lengths_B
        positions_BA, kv = self.state.cache.commit(before_B, tokens, self.state.first_B)
        assert torch.equal(positions_BA, before_B[:, None] + torch.arange(tokens))
        for layer in range(self.layers):
            query, key, value = self.draw(tokens)
            found = kv.attend(layer, query, key, value)
            for row, length in enumerate(lengths):
                kept = self.committed[layer][row]
                for i in range(length):
                    kept.append((key[row, :, i], value[row, :, i]))
                    self.compare(found[row, :, i], query[row, :, i], self.seen(row, kept))
        state = self.state.committed(torch.zeros(self.batch, tokens, 1), torch.tensor(lengths))
        # the root's children are drafted from the commit itself
        self.state = replace(state, depth=1)
        self.paths = [[[()]] * self.batch for _ in range(self.layers)]

    def draft(self, parents_BW: Tensor) -> None:
        """A frontier below the previous one; `parents_BW` says below which of its nodes."""
        width = parents_BW.shape[1]
        positions_BW, kv, state = self.state.below(parents_BW)
        assert torch.equal(
            positions_BW, (state.lengths_B + state.depth - 1)[:, None].expand(-1, width)
        )
        self.state = replace(state, depth=state.depth + 1)
        for layer in range(self.layers):
            query, key, value = self.draw(width)
            found = kv.attend(layer, query, key, value)
            frontier = []
            for row in range(self.batch):
                above = self.paths[layer][row]
                own = [(key[row, :, i], value[row, :, i]) for i in range(width)]
                paths = [
                    (*above[parent], node) for parent, node in zip(parents_BW[row].tolist(), own)
                ]
                for i, path in enumerate(paths):
                    text = [*self.committed[layer][row], *path]
                    self.compare(found[row, :, i], query[row, :, i], self.seen(row, text))
                frontier.append(paths)
            self.paths[layer] = frontier

    def crop(self, lengths: list[int]) -> None:
        """Go back to earlier ends of the texts, as a conversation does."""
        window = self.window
        assert window is not None
        for row, length in enumerate(lengths):
            if length < len(self.committed[0][row]):
                overwritten = len(self.committed[0][row]) - window + 1
                self.lost[row] = min(max(self.lost[row], overwritten), length)
            for layer in self.committed:
                del layer[row][length:]
        # `resume` crops all rows to one length: one row at a time, as its lengths say.
        cropped = []
        for row, length in enumerate(lengths):
            one = slice(row, row + 1)
            state = replace(
                self.state, first_B=self.state.first_B[one], lengths_B=self.state.lengths_B[one]
            )
            cropped.append(state.resume(length, 0))
        first_B = torch.cat([state.first_B for state in cropped])
        lengths_B = torch.cat([state.lengths_B for state in cropped])
        self.state = replace(self.state, first_B=first_B, lengths_B=lengths_B)

    def seen(self, row: int, entries: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """Of a token's own text, itself included, what is within the window and not lost."""
        if self.window is None:
            return entries
        return entries[max(len(entries) - self.window, self.lost[row]) :]

    def compare(
        self, found_HE: Tensor, query_HE: Tensor, entries: list[tuple[Tensor, Tensor]]
    ) -> None:
        keys, values = (torch.stack(part) for part in zip(*entries, strict=True))
        key_1GSE, value_1GSE = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
        wanted = written_out(
            query_HE[None, :, None], key_1GSE, value_1GSE, torch.ones(1, 1, len(keys)) > 0
        )
        torch.testing.assert_close(found_HE, wanted[0, :, 0], rtol=0, atol=1e-12)


@pytest.mark.parametrize(("seed", "layers"), [*((seed, 1) for seed in range(5)), (5, 2)])
def test_a_trees_nodes_attend_to_committed_tokens_and_their_own_path(
    seed: int, layers: int
) -> None:
    """Rows of other lengths and other trees; rounds that accept nothing but the root, and a row
    that has ended."""
    replay = Replay(batch=3, nodes=11, capacity=30, layers=layers, seed=seed)
    random = torch.Generator().manual_seed(seed)
    replay.commit([1, 6, 3], 6)
    for round_ in range(4):
        above = 1
        for width in (2, 4, 1, 3):
            replay.draft(torch.randint(above, (3, width), generator=random))
            above = width
        accepted = torch.randint(1, 6, (3,), generator=random).tolist()
        replay.commit([accepted[0], accepted[1], accepted[2] if round_ < 2 else 0], 5)


@pytest.mark.parametrize("window", [4, 5, 9])
def test_a_window_moves_over_texts_longer_than_the_cache(
    window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of different lengths overwrite their oldest tokens, padding included, and go back to
    earlier ends."""
    monkeypatch.setattr(draft_cache, "MOST_NEW_TOKENS", 6)
    replay = Replay(batch=3, nodes=11, capacity=60, seed=window, window=window)
    assert replay.state.cache.slots == 11 + window + 5
    random = torch.Generator().manual_seed(window)
    replay.commit([1, 6, 3], 6)
    for round_ in range(12):
        above = 1
        for width in (2, 4, 1):
            replay.draft(torch.randint(above, (3, width), generator=random))
            above = width
        accepted = torch.randint(1, 6, (3,), generator=random).tolist()
        replay.commit([accepted[0], accepted[1], accepted[2] if round_ < 9 else 0], 5)
        if round_ == 6:
            ends = [len(row) for row in replay.committed[0]]
            replay.crop([ends[0] - 2, ends[1], ends[2] - window - 1])
            replay.commit([2, 1, 3], 4)
