"""Models with states, node by node: the logits after any rounds are those of the whole text, read
at once."""

from __future__ import annotations

import random

import pytest
import torch
from families import VOCAB, family_model
from helpers import check_identity, head_for, limited
from messages import refused
from tiny_models import tiny_model

from headstart.inference import DraftTree, SpeculativeLM, Target, TreeShape
from headstart.inference.engines.stateful import StatefulEngine, leaf_paths
from headstart.inference.targets.states import check_states, states_follow_chunks

KINDS = (
    "qwen3_5_text",
    "kimi_linear",
    "lfm2",
    "granitemoehybrid",
    "falcon_h1",
    "mamba2",
)
"""One family of each kind of state."""
RECURRENT = [family for family in KINDS if family != "lfm2"]
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
"""Recurrences are computed in float32."""


@pytest.fixture(scope="module")
def targets():
    """Each family's target, made once."""
    made = {}

    def target_of(family):
        if family not in made:
            made[family] = Target(family_model(family))
        made[family].engine.most_pending = 8
        return made[family]

    return target_of


def logits_of_whole(target, text):
    """The model's logits after every token of a text, read at once without a cache."""
    with torch.no_grad():
        return target.model(input_ids=torch.tensor([text]), use_cache=False).logits[0]


def filled(target, texts):
    """A cache that holds texts of one length, and their features of block 0 and after the final
    norm."""
    cache = target.engine.new_cache(len(texts), 64)
    target.engine.read_chunk(torch.tensor(texts), len(texts[0]), cache, (0, -1), [])
    return cache


def draft(random_tokens, shape, roots):
    """A tree of random tokens after each row's root."""
    tokens = [
        [root, *[random_tokens.randrange(1, VOCAB) for _ in range(shape.size - 1)]]
        for root in roots
    ]
    return DraftTree.of_shape(shape, torch.tensor(tokens))


def check_nodes(target, cache, tree, texts, layers=()):
    """Compare a forward over a tree with the whole text of every node."""
    output = target.engine.forward_tree(tree, max(map(len, texts)), cache, layers)
    for row, text in enumerate(texts):
        for path in leaf_paths(tree)[row]:
            tokens = tree.tokens_BN[row, path].tolist()
            expected = logits_of_whole(target, [*text, *tokens])[len(text) :]
            torch.testing.assert_close(
                output.logits_BNV[row, path].to(expected.dtype), expected, **CLOSE
            )
            if layers:
                read_BTF, _ = target.read(torch.tensor([[*text, *tokens]]), layers)
                features = output.features_BNF[row, path]
                wanted = read_BTF[0, len(text) :].to(features.dtype)
                torch.testing.assert_close(features, wanted, **CLOSE)


@torch.inference_mode()
def rounds(target, texts, seed, count=8, check=True):
    """Rounds with random trees and random acceptance; returns the cache and the texts that it
    holds."""
    numbers = random.Random(seed)
    cache = filled(target, texts)
    texts = [list(text) for text in texts]
    for _ in range(count):
        shape = numbers.choice(
            [
                TreeShape.chain(numbers.randint(1, 4)),
                TreeShape.from_paths([]),
                TreeShape.from_paths([[0], [1], [0, 0], [1, 0], [1, 1], [1, 0, 0]]),
            ]
        )
        tree = draft(numbers, shape, [numbers.randrange(1, VOCAB) for _ in texts])
        if check:
            check_nodes(target, cache, tree, texts, (0, 1, -1))
        else:
            target.engine.forward_tree(tree, max(map(len, texts)), cache, ())
        paths, lengths = [], []
        for row, leaves in enumerate(leaf_paths(tree)):
            path = numbers.choice(leaves)
            length = numbers.choice([len(path), numbers.randint(1, len(path))])
            texts[row] += tree.tokens_BN[row, path[:length]].tolist()
            paths.append([*path, *[shape.size - 1] * (shape.depth + 1 - len(path))])
            lengths.append(length)
        cache.accept(torch.tensor(paths), torch.tensor(lengths), tree.in_order)
    return cache, texts


@pytest.fixture
def stateful(targets, family):
    """The target of a test's family."""
    return targets(family)


def accept_chain(cache, accepted):
    """Accept so many nodes of a chain of four."""
    cache.accept(torch.arange(4)[None], torch.tensor([accepted]), in_order=True)


TEXT = [3, 1, 4, 1, 5]
ROOT_ALONE = TreeShape.from_paths([])
FAMILIES = pytest.mark.parametrize("family", KINDS)


@FAMILIES
@pytest.mark.parametrize("most_pending", [1, 3, 100])
def test_every_node_has_the_logits_of_its_text(stateful, most_pending):
    """In batches, where each row accepts another number of tokens: padding on the right of
    lanes."""
    stateful.engine.most_pending = most_pending
    rounds(stateful, [TEXT, [9, 2, 6, 5, 3], [8, 9, 7, 9, 3]], seed=most_pending)


@FAMILIES
@torch.inference_mode()
def test_rows_with_fewer_drafts_and_more_pending_tokens(stateful):
    """Lanes are equally long, and the rows' nodes do not begin at the same place in them."""
    stateful.engine.most_pending = 100
    texts = [TEXT, [9, 2, 6, 5, 3]]
    cache = filled(stateful, texts)
    for sizes, accepted in (
        ([2, 2], [1, 2]),
        ([1, 2], [1, 1]),
        ([2, 1], [2, 1]),
        ([3, 2], [1, 2]),
    ):
        nodes = max(sizes)
        tokens = torch.arange(2 * nodes).view(2, nodes) + len(texts[0])
        parents = torch.arange(-1, nodes - 1).expand(2, -1)
        tree = DraftTree(tokens, parents, torch.tensor(sizes), nodes - 1)
        check_nodes(stateful, cache, tree, texts)
        cache.accept(torch.arange(nodes).expand(2, -1), torch.tensor(accepted))
        texts = [[*text, *tokens[row, : accepted[row]].tolist()] for row, text in enumerate(texts)]


@FAMILIES
@torch.inference_mode()
def test_what_is_pending_is_bounded_and_a_whole_path_leaves_nothing(stateful, family):
    stateful.engine.most_pending = 4
    numbers = random.Random(0)
    cache = filled(stateful, [TEXT])
    length = len(TEXT)
    for accepted in (4, 2, 1, 2, 4, 3, 3):
        tree = draft(numbers, TreeShape.chain(3), [7])
        stateful.engine.forward_tree(tree, length, cache, ())
        accept_chain(cache, accepted)
        length += accepted
        cache.take_snapshots()
        (pending,) = cache.pending()
        if accepted == 4 or family not in RECURRENT:
            assert pending == 0
        else:
            assert 0 < pending < 4 + 4


@FAMILIES
@torch.inference_mode()
def test_a_round_that_is_repeated_begins_where_it_began(stateful):
    """As after NaN, or memory that ran out: what was committed is taken back, whole or in part."""
    numbers = random.Random(1)
    cache, (text,) = rounds(stateful, [TEXT], seed=1, check=False)
    before_B = cache.lengths_B
    for kept in (0, 2):
        tree = draft(numbers, TreeShape.chain(3), [7])
        stateful.engine.forward_tree(tree, len(text), cache, ())
        accept_chain(cache, 4)
        cache.lengths_B = before_B + kept
        text = [*text, *cache.tokens_BS[0, len(text) : len(text) + kept].tolist()]
        cache.erase_uncommitted(len(text))
        check_nodes(stateful, cache, draft(numbers, TreeShape.chain(2), [8]), [text])


@FAMILIES
@torch.inference_mode()
def test_a_plain_step_that_is_repeated_finds_the_states_as_they_were(stateful):
    """A single token is read by kernels that write to the states in place."""
    cache = filled(stateful, [TEXT])
    before_B = cache.lengths_B
    for _ in range(2):
        check_nodes(stateful, cache, draft(random.Random(0), ROOT_ALONE, [7]), [TEXT])
        cache.accept(torch.zeros(1, 1, dtype=torch.int64), torch.tensor([1]), in_order=True)
        cache.lengths_B = before_B


@FAMILIES
@torch.inference_mode()
def test_a_text_goes_back_as_far_as_its_states_allow(stateful, family):
    numbers = random.Random(4)
    cache = filled(stateful, [TEXT])
    cache.keep_snapshot()
    text = list(TEXT)
    # the first leaves a snapshot at 9, the second two pending tokens or none
    for accepted in (4, 2):
        tree = draft(numbers, TreeShape.chain(3), [7])
        stateful.engine.forward_tree(tree, len(text), cache, ())
        accept_chain(cache, accepted)
        text += tree.tokens_BN[0, :accepted].tolist()
    cache.take_snapshots()
    # What is pending can be taken back one by one; a snapshot cannot, but for the one that was
    # kept.
    back = [(10, 10), (8, 5), (3, 0)] if family in RECURRENT else [(10, 5), (3, 0)]
    for tokens, stays in back:
        assert cache.rewind(tokens) == stays
        if stays:
            tree = draft(numbers, TreeShape.chain(2), [8])
            check_nodes(stateful, cache, tree, [text[:stays]])


@pytest.mark.filterwarnings("ignore:memory ran out")
@pytest.mark.parametrize("family", ["granitemoehybrid", "lfm2"])
def test_memory_that_runs_out_does_not_change_the_text(stateful, monkeypatch):
    head = head_for(stateful, "eagle3", depth=3)
    options = {"tree": "branch:2x2", "adaptive": False, "compile": False}
    lm = SpeculativeLM.from_pretrained(stateful, head, **options)
    sizes = limited(monkeypatch, lm, 3)
    check_identity(lm, [torch.tensor(TEXT)], repetition_penalty=1.3, max_new_tokens=12)
    assert max(sizes) > 3


def test_a_module_that_begins_each_chunk_with_an_empty_state_is_found_and_refused():
    model = tiny_model("mamba", 1.0)
    assert not states_follow_chunks(model)
    with refused("MambaForCausalLM verified"):
        check_states(model)


def test_a_model_that_fails_with_its_own_cache_is_refused_with_what_it_said(monkeypatch):
    model = family_model("lfm2")

    def forward(*_, **__):
        raise AttributeError("no such cache")

    monkeypatch.setattr(model.model, "forward", forward)
    with refused("Lfm2ForCausalLM AttributeError: no such cache"):
        Target(model)


def test_a_draft_model_with_states_is_refused(targets, tiny_target):
    target = tiny_target(vocab_size=VOCAB)
    with refused("draft convolution recurrent state"):
        SpeculativeLM.from_pretrained(target, drafter=targets("qwen3_5_text").model)


@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2"])
def test_the_default_tree_is_a_chain_as_paths_are_lanes(stateful):
    head = head_for(stateful, "eagle3", depth=3)
    lm = SpeculativeLM.from_pretrained(stateful, head, compile=False)
    shapes = [drafter.shape for drafter in lm.drafter.nested() if hasattr(drafter, "shape")]
    assert shapes
    assert all(isinstance(shape, TreeShape) and shape.is_chain for shape in shapes)


def chunk_sizes(model):
    return {module.chunk_size for module in model.modules() if hasattr(module, "chunk_size")}


@torch.inference_mode()
def test_mamba_2_reads_short_chunks_in_our_copy_alone():
    target = Target(family_model("granitemoehybrid", torch.float32))
    for module in target.model.modules():
        if hasattr(module, "chunk_size"):
            module.chunk_size = 256
    target.engine = StatefulEngine(target, packed=True)
    cache = filled(target, [TEXT])
    check_nodes(target, cache, draft(random.Random(0), TreeShape.chain(9), [7]), [TEXT])
    assert chunk_sizes(target.model) == {256}
    assert chunk_sizes(target.engine.model) == {16}
