from __future__ import annotations

import json

import pytest
import torch
from helpers import one_row_tree, random_shape
from messages import refused

from headstart.inference import DynamicShape, TreeShape, tree_policy
from headstart.inference.trees.tree_spec import EarlyExitShape, spec_of


def ancestors(parents, node):
    return {node} if node == 0 else {node} | ancestors(parents, parents[node])


@pytest.mark.parametrize("seed", range(20))
def test_masks_depths_and_levels_agree_with_a_walk(seed):
    shape = random_shape(seed)
    parents = shape.parents
    tree = one_row_tree([0] * shape.size, parents, shape.depth)
    for node in range(shape.size):
        seen = set(tree.structure.ancestors_BNN[0, node].nonzero().flatten().tolist())
        assert seen == ancestors(parents, node)
        assert tree.structure.depths_BN[0, node] == len(seen) - 1
    assert all(parent < node for node, parent in enumerate(parents))
    assert shape.depth == max(map(len, shape.paths), default=0)
    # levels: following frontier and picks rebuilds the paths
    rebuilt, frontier = [()], [()]
    for level in shape.levels:
        nodes = [(*frontier[pick // level.width], pick % level.width) for pick in level.picks]
        rebuilt += nodes
        assert [frontier[i] for i in level.parents] == [nodes[i][:-1] for i in level.frontier]
        frontier = [nodes[i] for i in level.frontier]
    assert rebuilt == [(), *shape.paths]


def test_paths_are_given_in_a_file_or_themselves_in_any_order(tmp_path):
    paths = [[1], [0, 2], [0]]
    (tmp_path / "tree.json").write_text(json.dumps(paths))
    for given in (str(tmp_path / "tree.json"), paths):
        assert tree_policy(given).paths == ((0,), (1,), (0, 2))


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        ([[0, 0]], "[0, 0] parent [0]"),
        ([[0], [0]], "twice [0]"),
        ([[-1]], "[-1] integer 0"),
        ([[]], "[] rank"),
        ([["0"]], "['0'] integer"),
        ([["0" * 9000]], "integer"),
    ],
)
def test_paths_that_are_no_tree_are_refused(paths, words):
    with refused(words) as refusal:
        TreeShape.from_paths(paths)
    assert len(str(refusal.value)) < 500


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("dynamic", DynamicShape()),
        ("dynamic:24", DynamicShape(size=24)),
        ("dynamic:24:6", DynamicShape(size=24, depth=6)),
        ("dynamic:24:6:8", DynamicShape(size=24, depth=6, width=8)),
        ("chain:0", TreeShape(())),
        ("root", TreeShape(())),
        ([], TreeShape(())),
        ("chain:2", TreeShape.from_paths([[0], [0, 0]])),
        ("stop:0.3:chain:2", EarlyExitShape(2, 0.3)),
    ],
)
def test_words_for_policies(text, policy):
    assert tree_policy(text) == policy


@pytest.mark.parametrize(
    "policy",
    [
        DynamicShape(24, 6, 8),
        TreeShape.chain(3),
        TreeShape(()),
        TreeShape.from_paths([[0], [2], [2, 1]]),
        *map(tree_policy, ("stop:0.3:chain:4", "stop:0.2:drawn:chain:3", "stop:1:chain:3")),
    ],
)
def test_a_policy_is_taken_as_it_is_and_its_word_is_read_back(policy):
    assert tree_policy(policy) is policy
    assert tree_policy(json.loads(json.dumps(spec_of(policy)))) == policy


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("dynamic:1", "nodes depth width 2 1"),
        ("dynamic:24:0", "nodes depth width 24 0"),
        ("dynamic:24:6:0", "nodes depth width 24 6 0"),
        ("stop:1.5:chain:3", "threshold 0 1 3 1.5"),
    ],
)
def test_numbers_that_no_tree_has_are_refused(text, words):
    with refused(words):
        tree_policy(text)


@pytest.mark.parametrize(
    "content",
    [
        *("[3]", "null", "[[0], 1]", '{"paths": [[0]]}', "[[0]", "[[0, 0]]", '[["0"]]', ""),
        *("[" * 100_000, "[[{}]]", "[[[]]]", "[[NaN]]", "\xff", "[" + "9" * 5000 + "]"),
    ],
)
def test_files_that_hold_no_tree_are_refused(content, tmp_path):
    path = tmp_path / "tree.json"
    path.write_bytes(content.encode("latin-1"))
    with refused(str(path), "list of paths"):
        tree_policy(str(path))


@pytest.mark.parametrize(
    "text",
    [
        *("medusa", "chain", "chain:x", "chain:-1", "chain:1:2", "root:3", "missing.json"),
        *("dynamic:", "dynamic:24:6:8:1", "dynamic:-3", "dynamic:2.5", "stop:x:chain:3"),
    ],
)
def test_unknown_words_for_a_tree_are_refused_with_the_valid_ones(text):
    with refused(f"'{text}' auto root chain:LENGTH"):
        tree_policy(text)


def test_a_tree_takes_its_draft_probabilities_to_another_device():
    drafts = {"kind": "sampled_chain", "draft_probs_BNV": torch.ones(1, 2, 5)}
    tree = one_row_tree([0, 4], [-1, 0], 1, **drafts)
    moved = tree.to(torch.device("meta"))
    assert {moved.tokens_BN.device.type, moved.draft_probs_BNV.device.type} == {"meta"}
    picked = one_row_tree([0, 4], [-1, 0], 1).to(torch.device("meta"))
    assert picked.tokens_BN.device.type == "meta" and picked.draft_probs_BNV is None
