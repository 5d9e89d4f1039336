"""A head's tree and looked-up branches in one: the union of their paths, whoever drafted them."""

from __future__ import annotations

import random

import pytest
import torch

from headstart.inference import DraftTree
from headstart.inference.drafters.head_and_lookup import joined
from headstart.inference.drafters.prompt_lookup import Trie, draft_tree

CPU = torch.device("cpu")


def random_trie(chance: random.Random, root: int, paths: int) -> Trie:
    trie = Trie([root])
    for _ in range(paths):
        trie.add([chance.randrange(3) for _ in range(chance.randrange(1, 5))])
    return trie


def paths_of(tokens: list[int], parents: list[int]) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        found.append((*found[parent], token))
    return found


@pytest.mark.parametrize("seed", range(50))
def test_all_paths_are_there_once(seed):
    chance = random.Random(seed)
    roots = [chance.randrange(3) for _ in range(chance.randrange(1, 4))]
    heads = [random_trie(chance, root, chance.randrange(4)) for root in roots]
    sources = [random_trie(chance, root, chance.randrange(4)) for root in roots]
    tree = draft_tree(heads, CPU)
    joint = joined(tree, sources)
    assert torch.equal(joint.tokens_BN[:, : tree.tokens_BN.shape[1]][:, 0], torch.tensor(roots))
    for row, (head, source) in enumerate(zip(heads, sources, strict=True)):
        size = int(joint.sizes_B[row])
        found = paths_of(
            joint.tokens_BN[row, :size].tolist(), joint.parents_BN[row, :size].tolist()
        )
        ours, theirs = (set(paths_of(each.tokens, each.parents)) for each in (head, source))
        assert len(found) == len(set(found)) and set(found) == ours | theirs
        assert found[: len(ours)] == paths_of(head.tokens, head.parents)
        assert all(
            0 <= parent < node
            for node, parent in enumerate(joint.parents_BN[row, :size].tolist())
            if node
        )
        assert joint.max_depth >= max(map(len, found))


def test_a_source_that_finds_nothing_leaves_the_tree_as_it_is():
    tree = draft_tree([Trie([1])], CPU)
    assert isinstance(tree, DraftTree) and joined(tree, [Trie([1])]) is tree
