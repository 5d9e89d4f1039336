"""What a verdict holds: the path that is followed, its length, and the token after it.

Exactness is enumerated in test_verify_sampled.py.
"""

from __future__ import annotations

import pytest
import torch
from helpers import one_row_tree, random_shape

from headstart.inference import DraftTree
from headstart.inference.engines.base import TargetOutput
from headstart.inference.rounds.verification import verify
from headstart.inference.trees.verify import VerifyResult, follow, greedy


@pytest.mark.parametrize("seed", range(20))
def test_greedy_follows_the_best_token_as_far_as_the_tree_holds_it(seed):
    """Siblings are distinct tokens of four."""
    shape = random_shape(seed)
    random = torch.Generator().manual_seed(seed)
    paths = [(), *shape.paths]
    tokens = {(): 0}
    for parent in paths:
        siblings = torch.randperm(4, generator=random).tolist()
        tokens |= {path: siblings[path[-1]] for path in shape.paths if path[:-1] == parent}
    scores_1NV = torch.randn(1, shape.size, 4, generator=random, dtype=torch.float64)
    tree = one_row_tree([tokens[path] for path in paths], shape.parents, shape.depth)
    path, expected = (), [0]
    while True:
        best = int(scores_1NV[0, expected[-1]].argmax())
        child = next((p for p in shape.paths if p[:-1] == path and tokens[p] == best), None)
        if child is None:
            break
        path = child
        expected.append(paths.index(child))
    result = greedy(tree, scores_1NV, None)
    assert result.lengths_B.tolist() == [len(expected)]
    assert result.path_BA[0, : len(expected)].tolist() == expected
    assert result.path_BA.shape[1] == shape.depth + 1
    assert result.next_tokens_B.tolist() == [best]


def test_padding_beyond_a_rows_size_never_matches():
    tree = DraftTree(
        torch.tensor([[0, 1], [0, 1]]), torch.tensor([[-1, 0], [-1, 0]]), torch.tensor([2, 1]), 1
    )
    result = follow(tree, torch.tensor([[1, 2], [1, 2]]))
    assert result.lengths_B.tolist() == [2, 1]
    assert result.next_tokens_B.tolist() == [2, 1]


def test_of_equal_siblings_only_the_first_is_followed():
    tree = one_row_tree([0, 4, 4, 5, 6], [-1, 0, 0, 1, 2], 2, kind="sampled_independent")
    # Node 3 follows the first sibling, node 4 the second.
    for choices, path in [([4, 5, 9, 1, 1], [0, 1, 3]), ([4, 9, 6, 1, 1], [0, 1])]:
        result = follow(tree, torch.tensor([choices]))
        assert result.path_BA[0, : int(result.lengths_B)].tolist() == path


def test_emitted_tokens_are_the_path_without_its_root_and_then_the_bonus_token():
    tree = one_row_tree([7, 5, 6, 4], [-1, 0, 0, 2], 2)
    result = VerifyResult(torch.tensor([[0, 2, 3]]), torch.tensor([3]), torch.tensor([9]))
    output = TargetOutput(torch.zeros(1, 4, 1), torch.arange(4.0)[None, :, None])
    verdict = verify(lambda *_: result, tree, output.features_BNF, output.logits_BNV, None)
    assert verdict.emitted_BA.tolist() == [[6, 4, 9]]
    assert verdict.features_BAF.flatten().tolist() == [0, 2, 3]
