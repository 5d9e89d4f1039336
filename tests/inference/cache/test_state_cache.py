"""Models with states, node by node: the logits after any rounds are those of the whole text, read
at once."""

from __future__ import annotations

import random
import warnings

import pytest
import torch
from families import VOCAB, family_model
from helpers import check_identity, head_for, limited
from messages import refused
from tiny_models import tiny_model

from headstart.heads import build_head
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
    parents = torch.tensor(shape.parents).expand(len(roots), -1)
    sizes = torch.full((len(roots),), shape.size)
    return DraftTree(torch.tensor(tokens), parents, sizes, shape.depth, in_order=shape.is_chain)


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


@pytest.mark.parametrize("most_pending", [1, 3, 100])
@pytest.mark.parametrize("family", KINDS)
def test_every_node_has_the_logits_of_its_text(targets, family, most_pending):
    """In batches, where each row accepts another number of tokens: padding on the right of
    lanes."""
    target = targets(family)
    target.engine.most_pending = most_pending
    rounds(target, [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3], [8, 9, 7, 9, 3]], seed=most_pending)


@pytest.mark.parametrize("family", KINDS)
def test_rows_with_fewer_drafts_and_more_pending_tokens(targets, family):
    """Lanes are equally long, and the rows' nodes do not begin at the same place in them."""
    target = targets(family)
    target.engine.most_pending = 100
    with torch.inference_mode():
        texts = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]]
        cache = filled(target, texts)
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
            check_nodes(target, cache, tree, texts)
            path = torch.arange(nodes).expand(2, -1)
            cache.accept(path, torch.tensor(accepted))
            texts = [
                [*text, *tokens[row, : accepted[row]].tolist()] for row, text in enumerate(texts)
            ]


@pytest.mark.parametrize("family", KINDS)
def test_what_is_pending_is_bounded_and_a_whole_path_leaves_nothing(targets, family):
    target = targets(family)
    target.engine.most_pending = 4
    numbers = random.Random(0)
    with torch.inference_mode():
        cache = filled(target, [[3, 1, 4, 1, 5]])
        length = 5
        for accepted in (4, 2, 1, 2, 4, 3, 3):
            target.engine.forward_tree(draft(numbers, TreeShape.chain(3), [7]), length, cache, ())
            cache.accept(torch.arange(4)[None], torch.tensor([accepted]), in_order=True)
            length += accepted
            cache.take_snapshots()
            (pending,) = cache.pending()
            assert pending == 0 if accepted == 4 or family not in RECURRENT else 0 < pending < 4 + 4


@pytest.mark.parametrize("family", KINDS)
def test_a_round_that_is_repeated_begins_where_it_began(targets, family):
    """As after NaN, or memory that ran out: what was committed is taken back, whole or in part."""
    target = targets(family)
    numbers = random.Random(1)
    with torch.inference_mode():
        cache, (text,) = rounds(target, [[3, 1, 4, 1, 5]], seed=1, check=False)
        before_B = cache.lengths_B
        for kept in (0, 2):
            target.engine.forward_tree(
                draft(numbers, TreeShape.chain(3), [7]), len(text), cache, ()
            )
            cache.accept(torch.arange(4)[None], torch.tensor([4]), in_order=True)
            cache.lengths_B = before_B + kept
            if kept:
                text = [*text, *cache.tokens_BS[0, len(text) : len(text) + kept].tolist()]
            cache.erase_uncommitted(len(text))
            check_nodes(target, cache, draft(numbers, TreeShape.chain(2), [8]), [text])


@pytest.mark.parametrize("family", KINDS)
def test_a_plain_step_that_is_repeated_finds_the_states_as_they_were(targets, family):
    """A single token is read by kernels that write to the states in place."""
    target = targets(family)
    text = [3, 1, 4, 1, 5]
    with torch.inference_mode():
        cache = filled(target, [text])
        before_B = cache.lengths_B
        for _ in range(2):
            check_nodes(
                target, cache, draft(random.Random(0), TreeShape.from_paths([]), [7]), [text]
            )
            cache.accept(torch.zeros(1, 1, dtype=torch.int64), torch.tensor([1]), in_order=True)
            cache.lengths_B = before_B


@pytest.mark.parametrize("family", KINDS)
def test_a_text_goes_back_as_far_as_its_states_allow(targets, family):
    target = targets(family)
    numbers = random.Random(4)
    with torch.inference_mode():
        cache = filled(target, [[3, 1, 4, 1, 5]])
        cache.keep_snapshot()
        text = [3, 1, 4, 1, 5]
        # the first leaves a snapshot at 9, the second two pending tokens or none
        for accepted in (4, 2):
            tree = draft(numbers, TreeShape.chain(3), [7])
            target.engine.forward_tree(tree, len(text), cache, ())
            cache.accept(torch.arange(4)[None], torch.tensor([accepted]), in_order=True)
            text += tree.tokens_BN[0, :accepted].tolist()
        cache.take_snapshots()
        # What is pending can be taken back one by one; a snapshot cannot, but for the one that was
        # kept.
        back = [(10, 10), (8, 5), (3, 0)] if family in RECURRENT else [(10, 5), (3, 0)]
        for tokens, stays in back:
            assert cache.rewind(tokens) == stays
            if stays:
                check_nodes(target, cache, draft(numbers, TreeShape.chain(2), [8]), [text[:stays]])


@pytest.mark.parametrize("family", KINDS)
def test_training_reads_padded_rows_as_they_are_alone(targets, family):
    target = targets(family)
    padded = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 0, 0, 0]])
    features_BTF, last_BTD = target.read(padded, (0, -1))
    alone_BTF, alone_BTD = target.read(padded[1:, :3], (0, -1))
    torch.testing.assert_close(features_BTF[1, :3], alone_BTF[0], **CLOSE)
    torch.testing.assert_close(last_BTD[1, :3], alone_BTD[0], **CLOSE)


@pytest.mark.parametrize("family", ["granitemoehybrid", "lfm2"])
def test_memory_that_runs_out_does_not_change_the_text(targets, monkeypatch, family):
    target = targets(family)
    head = head_for(target, "eagle3", depth=3)
    lm = SpeculativeLM.from_pretrained(
        target, head, tree="branch:2x2", adaptive=False, compile=False
    )
    sizes = limited(monkeypatch, lm, 3)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        settings = {"repetition_penalty": 1.3, "max_new_tokens": 12}
        check_identity(lm, [torch.tensor([3, 1, 4, 1, 5])], **settings)
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
def test_the_default_tree_is_a_chain_as_paths_are_lanes(targets, family):
    target = targets(family)
    head = build_head("eagle3", {"depth": 3, "feature_layers": [0, -1]}, target.info).double()
    lm = SpeculativeLM.from_pretrained(target, head, compile=False)
    shapes = [drafter.shape for drafter in lm.drafter.nested() if hasattr(drafter, "shape")]
    assert shapes
    assert all(isinstance(shape, TreeShape) and shape.is_chain for shape in shapes)


def test_mamba_2_reads_short_chunks_in_our_copy_alone():
    target = Target(family_model("granitemoehybrid", torch.float32))
    mixers = [module for module in target.model.modules() if hasattr(module, "chunk_size")]
    for mixer in mixers:
        mixer.chunk_size = 256
    copy = StatefulEngine(target, packed=True)
    target.engine = copy
    with torch.inference_mode():
        cache = filled(target, [[3, 1, 4, 1, 5]])
        check_nodes(
            target, cache, draft(random.Random(0), TreeShape.chain(9), [7]), [[3, 1, 4, 1, 5]]
        )
    assert mixers and {mixer.chunk_size for mixer in mixers} == {256}
    assert {
        module.chunk_size for module in copy.model.modules() if hasattr(module, "chunk_size")
    } == {16}
