from __future__ import annotations

import axes
import pytest
import torch
from helpers import build_model, build_t5

from headstart.inference import DraftTree, Target
from headstart.inference.cache.kv_cache import BUCKET

VOCAB = 31


def tokens(*shape, seed=0):
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def path_to(parents, node):
    return [] if node < 0 else [*path_to(parents, parents[node]), node]


@pytest.mark.parametrize("lengths", [(5,), (3, 9), (BUCKET - 3, 2)])
def test_a_tree_forward_is_a_causal_forward_for_every_path(tiny_target, tools, lengths):
    target = tiny_target(vocab_size=VOCAB, layers=3)
    layers = (-1, 0, 1)
    shape = tools.random_shape(1, max_nodes=14)
    prompts = [tokens(1, length, seed=length)[0] for length in lengths]
    guesses = tokens(len(lengths), shape.size, seed=7)
    tree = DraftTree(
        guesses,
        torch.tensor([shape.parents] * len(lengths)),
        torch.tensor([shape.size] * len(lengths)),
        shape.depth,
    )
    cache = target.engine.new_cache(len(lengths))
    padded = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True)
    with torch.no_grad():
        halves, kept = (
            (padded[:, : max(lengths) // 2], padded[:, max(lengths) // 2 :]),
            [*range(padded.shape[1])],
        )
        read = []
        for chunk in (half for half in halves if half.shape[1]):
            read.append(
                target.engine.read_chunk(chunk, max(lengths), cache, layers, kept[: chunk.shape[1]])
            )
        logits_BTV = torch.cat([chunk.logits_BNV for chunk in read], dim=1)
        features_BTF = torch.cat([chunk.features_BNF for chunk in read], dim=1)
        cache.lengths_B = torch.tensor(lengths)
        output = target.engine.forward_tree(tree, max(lengths), cache, layers)
        for row, own in enumerate(prompts):
            alone = target.model(own[None], output_hidden_states=True)
            assert torch.allclose(logits_BTV[row, : len(own)], alone.logits[0], atol=1e-12)
            hidden = torch.cat([alone.hidden_states[i] for i in (3, 1, 2)], dim=-1)
            assert torch.allclose(features_BTF[row, : len(own)], hidden[0], atol=1e-12)
            for node in range(shape.size):
                text = torch.cat([own, guesses[row, path_to(shape.parents, node)]])
                alone = target.model(text[None], output_hidden_states=True)
                assert torch.allclose(output.logits_BNV[row, node], alone.logits[0, -1], atol=1e-12)
                hidden = torch.cat([alone.hidden_states[i][0, -1] for i in (3, 1, 2)])
                assert torch.allclose(output.features_BNF[row, node], hidden, atol=1e-12)


def test_windows_count_positions_and_not_places_in_the_tree():
    target, _ = axes.target_of("windows", "eager")
    own = tokens(1, 7) % axes.VOCAB
    # nodes 2, 4, 5, 6, 7 are a path deeper than the window is wide
    parents = (-1, 0, 0, 0, 2, 4, 5, 6)
    guesses = tokens(1, len(parents), seed=1) % axes.VOCAB
    tree = DraftTree(guesses, torch.tensor([parents]), torch.tensor([len(parents)]), max_depth=5)
    cache = target.engine.new_cache(1)
    with torch.no_grad():
        target.engine.read_chunk(own, 7, cache, (), [])
        logits_NV = target.engine.forward_tree(tree, 7, cache, ()).logits_BNV[0]
        for node in range(len(parents)):
            text = torch.cat([own[0], guesses[0, path_to(parents, node)]])
            alone_V = target.model(text[None]).logits[0, -1]
            assert torch.allclose(logits_NV[node], alone_V, atol=1e-9)


@pytest.mark.parametrize("layer", [-2, 1, 7])
def test_layers_out_of_range_are_refused_with_the_range(tiny_target, layer):
    with pytest.raises(
        ValueError, match=f"feature layer {layer} is out of range .* choose from 0 to 0"
    ):
        tiny_target(layers=2).check_layers((layer,))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (
            lambda: build_t5(9),
            "encoder-decoder",
        ),
        (
            lambda: build_model(attn_implementation="flex_attention"),
            "attention 'flex_attention', whose CPU kernels",
        ),
    ],
)
def test_models_that_cannot_be_asked_for_trees_are_refused_with_the_reason(model, reason):
    with pytest.raises(ValueError, match=reason):
        Target(model())


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("package:no_such_package", "the Python package 'no_such_package' is not installed"),
        ("package:json", "holds 0 GGUF files"),
        ("missing.gguf", "no GGUF file at 'missing.gguf'"),
        ("no/such-model", "no target model at 'no/such-model'"),
        ("nowhere", "no target model at 'nowhere'"),
    ],
)
def test_nothing_to_load_is_said(source, message):
    for dtype in ("fastest", "auto", "float32"):
        with pytest.raises(ValueError, match=message):
            Target.from_pretrained(source, dtype)


def test_a_saved_target_loads_in_the_dtype_that_is_asked_for(target_folder):
    assert Target.from_pretrained(target_folder).dtype == torch.float32
    target = Target.from_pretrained(target_folder, dtype=torch.bfloat16)
    assert target.dtype == torch.bfloat16
    assert target.name == str(target_folder)
    assert target.end_tokens == {257}
