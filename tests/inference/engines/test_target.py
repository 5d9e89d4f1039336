from __future__ import annotations

import axes
import pytest
import torch
from helpers import build_model, build_t5, one_row_tree, padded_batch, random_ids, random_shape
from messages import refused

from headstart.inference import DraftTree, Target
from headstart.inference.cache.kv_cache import BUCKET

VOCAB = 31


def path_to(parents, node):
    return [] if node < 0 else [*path_to(parents, parents[node]), node]


def check_close(outputs_NF, expected_TF, atol=1e-12):
    torch.testing.assert_close(outputs_NF, expected_TF, rtol=0, atol=atol)


def last_features(alone):
    """The features of the layers -1, 0 and 1 of three at each token."""
    return torch.cat([alone.hidden_states[i][0] for i in (3, 1, 2)], dim=-1)


@pytest.mark.parametrize("lengths", [(5,), (3, 9), (BUCKET - 3, 2)])
def test_a_tree_forward_is_a_causal_forward_for_every_path(tiny_target, lengths):
    target = tiny_target(vocab_size=VOCAB, layers=3)
    layers = (-1, 0, 1)
    shape = random_shape(1, max_nodes=14)
    prompts = [random_ids(VOCAB, length, seed=length) for length in lengths]
    guesses = random_ids(VOCAB, len(lengths), shape.size, seed=7)
    longest = max(lengths)
    cache = target.engine.new_cache(len(lengths))
    padded, _ = padded_batch(prompts, "right")
    with torch.no_grad():
        # 1. The prompts, in two pieces.
        read = []
        for chunk in padded.tensor_split([longest // 2], dim=1):
            kept = list(range(chunk.shape[1]))
            read.append(target.engine.read_chunk(chunk, longest, cache, layers, kept))
        logits_BTV = torch.cat([chunk.logits_BNV for chunk in read], dim=1)
        features_BTF = torch.cat([chunk.features_BNF for chunk in read], dim=1)
        # 2. A tree after each.
        cache.lengths_B = torch.tensor(lengths)
        tree = DraftTree.of_shape(shape, guesses)
        output = target.engine.forward_tree(tree, longest, cache, layers)
        # 3. The same token by token.
        for row, own in enumerate(prompts):
            alone = target.model(own[None], output_hidden_states=True)
            check_close(logits_BTV[row, : len(own)], alone.logits[0])
            check_close(features_BTF[row, : len(own)], last_features(alone))
            for node in range(shape.size):
                text = torch.cat([own, guesses[row, path_to(shape.parents, node)]])
                alone = target.model(text[None], output_hidden_states=True)
                check_close(output.logits_BNV[row, node], alone.logits[0, -1])
                check_close(output.features_BNF[row, node], last_features(alone)[-1])


def test_windows_count_positions_and_not_places_in_the_tree():
    target, _ = axes.target_of("windows", "eager")
    own = random_ids(axes.VOCAB, 1, 7)
    # nodes 2, 4, 5, 6, 7 are a path deeper than the window is wide
    parents = (-1, 0, 0, 0, 2, 4, 5, 6)
    guesses = random_ids(axes.VOCAB, len(parents), seed=1)
    tree = one_row_tree(guesses.tolist(), parents, max_depth=5)
    cache = target.engine.new_cache(1)
    with torch.no_grad():
        target.engine.read_chunk(own, 7, cache, (), [])
        logits_NV = target.engine.forward_tree(tree, 7, cache, ()).logits_BNV[0]
        for node in range(len(parents)):
            text = torch.cat([own[0], guesses[path_to(parents, node)]])
            check_close(logits_NV[node], target.model(text[None]).logits[0, -1], atol=1e-9)


@pytest.mark.parametrize("layer", [-2, 1, 7])
def test_layers_out_of_range_are_refused_with_the_range(tiny_target, layer):
    with refused(f"layer {layer} 0"):
        tiny_target(layers=2).check_layers((layer,))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: build_t5(9), "encoder-decoder"),
        (lambda: build_model(attn_implementation="flex_attention"), "'flex_attention' sdpa"),
    ],
)
def test_models_that_cannot_be_asked_for_trees_are_refused_with_the_reason(model, words):
    with refused(words):
        Target(model())


@pytest.mark.parametrize("dtype", ["fastest", "auto", "float32"])
@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("package:no_such_package", "package 'no_such_package'"),
        ("package:json", "0 GGUF files"),
        ("missing.gguf", "'missing.gguf'"),
        ("no/such-model", "'no/such-model'"),
        ("nowhere", "'nowhere'"),
    ],
)
def test_nothing_to_load_is_said(source, words, dtype):
    with refused(words):
        Target.from_pretrained(source, dtype)


def test_a_saved_target_loads_in_the_dtype_that_is_asked_for(target_folder):
    assert Target.from_pretrained(target_folder).dtype == torch.float32
    target = Target.from_pretrained(target_folder, dtype=torch.bfloat16)
    assert target.dtype == torch.bfloat16
    assert target.name == str(target_folder)
    assert target.end_tokens == {257}
