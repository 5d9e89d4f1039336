"""What stays of a tree in the cache."""

from __future__ import annotations

import gc
import importlib.util
import math
import weakref
from itertools import product

import pytest
import torch
from helpers import LargestTensor, calls_of

from headstart.inference.cache import kv_cache
from headstart.inference.cache.kv_cache import BUCKET, STEP, StateShape, TreeCache, slots_for

NODES = 4
PATHS = [(0, *rest) for rest in product(range(1, NODES), repeat=2) if rest[0] < rest[1]]
COMMITTED = (5, 9)
"""Tokens of each row before the tree."""


def empty_cache(layers, rows, size=1, **options):
    cpu = torch.device("cpu")
    return TreeCache([StateShape(1, size, torch.float32, cpu)] * (2 * layers), rows, cpu, **options)


def cache_with_trees(rows):
    """Entries say in which slot they were written; in the second row they are negative."""
    cache = empty_cache(2, rows)
    cache.lengths_B = torch.tensor(COMMITTED[:rows])
    cache.reserve(NODES, max(COMMITTED))
    for states in (*cache.keys, *cache.values):
        for row in range(rows):
            states[row, 0, :, 0] = torch.arange(cache.capacity) * (1, -1)[row]
    return cache


def test_the_cache_grows_in_buckets_and_keeps_what_it_holds():
    cpu = torch.device("cpu")
    cache = TreeCache([StateShape(3, 4, torch.float32, cpu)] * 4, 1, cpu)
    random = torch.Generator().manual_seed(0)
    written = []
    for length in (5, BUCKET - 6, 4, 1):
        states = torch.randn(2, 1, 3, length, 4, generator=random)
        cache.reserve(length, sum(part.shape[3] for part in written))
        for layer in range(2):
            cache.layers[layer].update(states[layer], -states[layer])
        cache.accept(torch.arange(length)[None], torch.tensor([length]))
        written.append(states)
        whole = torch.cat(written, dim=3)
        assert torch.equal(torch.stack(cache.keys)[:, :, :, : whole.shape[3]], whole)
        assert torch.equal(torch.stack(cache.values)[:, :, :, : whole.shape[3]], -whole)
        assert (
            cache.bucketed_length - STEP < whole.shape[3] <= cache.bucketed_length
            and cache.bucketed_length % STEP == 0
        )
        assert (
            cache.bucketed_length < cache.capacity <= cache.bucketed_length + BUCKET
            and cache.capacity % BUCKET == 0
        )


def test_a_capacity_that_doubles_is_the_least_power_of_two():
    assert [slots_for(tokens, "buckets") for tokens in (300, 800, 1100)] == [512, 1024, 1280]
    assert [slots_for(tokens, "doubling") for tokens in (300, 800, 1100)] == [1024, 1024, 2048]


def test_a_dropped_cache_frees_its_memory_at_once():
    cache = cache_with_trees(2)
    block = weakref.ref(cache.keys[0].untyped_storage())
    gc.disable()
    try:
        del cache
        assert block() is None
    finally:
        gc.enable()


def test_the_free_memory_of_a_system_other_than_linux(monkeypatch, tmp_path):
    monkeypatch.setattr(kv_cache, "MEMINFO", tmp_path / "none")
    assert 0 < kv_cache.free_host_memory() < math.inf
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert kv_cache.free_host_memory() == math.inf


def test_selecting_rows_copies_no_more_than_a_layer_at_once():
    cache = cache_with_trees(2)
    expected = [layer[[1, 0]] for layer in (*cache.keys, *cache.values)]
    with LargestTensor(torch.ops.aten.index.Tensor, torch.ops.aten.clone.default) as largest:
        cache.select(torch.tensor([1, 0]))
    assert all(
        torch.equal(layer, rows)
        for layer, rows in zip((*cache.keys, *cache.values), expected, strict=True)
    )
    assert 0 < largest.elements <= cache.keys[0].numel()


@pytest.mark.parametrize("rows", [1, 2])
def test_every_path_of_any_length_is_kept(rows):
    for paths in product(PATHS, repeat=rows):
        for kept in product(range(1, 4), repeat=rows):
            cache = cache_with_trees(rows)
            cache.accept(torch.tensor(paths), torch.tensor(kept))
            for row, (path, length) in enumerate(zip(paths, kept, strict=True)):
                slots = [*range(COMMITTED[row]), *(COMMITTED[row] + node for node in path[:length])]
                assert cache.lengths_B[row] == len(slots)
                for states in (*cache.keys, *cache.values):
                    assert states[row, 0, : len(slots), 0].tolist() == [
                        (1, -1)[row] * slot for slot in slots
                    ]


def test_a_path_that_lies_where_it_should_is_not_moved(monkeypatch):
    moved = calls_of(monkeypatch, TreeCache, "compact")
    for path_BA, lengths_B in (([[0, 1, 2], [0, 1, 3]], [3, 2]), ([[0, 3, 0], [0, 0, 0]], [1, 1])):
        cache_with_trees(2).accept(torch.tensor(path_BA), torch.tensor(lengths_B))
    assert not moved
    cache_with_trees(2).accept(torch.tensor([[0, 1, 2], [0, 1, 3]]), torch.tensor([2, 3]))
    assert len(moved) == 1
