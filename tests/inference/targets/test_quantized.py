"""Quantised targets: as far as their packages are here they write what `generate` writes, else the
package is named."""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch
import transformers as tf
from helpers import build_model, check_identity, head_for
from safetensors.torch import load_file, save_file

from headstart.inference import SpeculativeLM, Target


@pytest.fixture
def folder(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    build_model(60, dtype=torch.float32, **sizes).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def named_in_its_config(folder, quantization):
    path = folder / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization})
    )


def check(lm):
    prompt = torch.randint(1, 60, (12,), generator=torch.Generator().manual_seed(0))
    check_identity(lm, [prompt])


def needs(package):
    return pytest.mark.skipif(
        importlib.util.find_spec(package) is None, reason=f"{package} is not installed"
    )


# Checkpoints whose weights are packed, as the formats' packages write them.

GROUP = 32
"""Inputs that share a scale."""


def rounded(weight_OI, bits, group):
    """Whole numbers [O, I] around 0 and their scales [O, groups], symmetric."""
    grouped_OGI = weight_OI.unflatten(1, (-1, group))
    largest = 2 ** (bits - 1) - 1
    scale_OG = grouped_OGI.abs().amax(-1) / largest
    return (grouped_OGI / scale_OG[..., None]).round().flatten(1).int(), scale_OG


def eight_in_one(numbers):
    """Numbers [..., 8 N] of 4 bits, from 0 on, as int32 [..., N], the first in the lowest bits."""
    packed = torch.zeros_like(numbers[..., ::8])
    for place in range(8):
        packed |= numbers[..., place::8] << (4 * place)
    return packed.int()


def packed_by_compressed_tensors(weight_OI):
    numbers_OI, scale_OG = rounded(weight_OI, 4, GROUP)
    return {
        "weight_packed": eight_in_one(numbers_OI + 8),
        "weight_scale": scale_OG,
        "weight_shape": torch.tensor(weight_OI.shape),
    }


def int8_by_compressed_tensors(weight_OI):
    numbers_OI, scale_OG = rounded(weight_OI, 8, weight_OI.shape[1])
    return {"weight": numbers_OI.to(torch.int8), "weight_scale": scale_OG}


def fp8_by_compressed_tensors(weight_OI):
    scale_O1 = weight_OI.abs().amax(-1, keepdim=True) / 448
    return {"weight": (weight_OI / scale_O1).to(torch.float8_e4m3fn), "weight_scale": scale_O1}


def compressed(form, bits, kind, strategy, activations=None):
    weights = {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy}
    if strategy == "group":
        weights["group_size"] = GROUP
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": form,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


BY_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
"""Inputs of matrices rounded as well, each token by itself."""
FLOAT_BY_TOKEN = BY_TOKEN | {"type": "float"}


@needs("compressed_tensors")
@pytest.mark.parametrize(
    ("pack", "quantization"),
    [
        (packed_by_compressed_tensors, compressed("pack-quantized", 4, "int", "group")),
        (int8_by_compressed_tensors, compressed("int-quantized", 8, "int", "channel", BY_TOKEN)),
        (
            fp8_by_compressed_tensors,
            compressed("float-quantized", 8, "float", "channel", FLOAT_BY_TOKEN),
        ),
    ],
    ids=["w4a16", "w8a8", "fp8"],
)
def test_checkpoints_with_packed_weights(folder, pack, quantization):
    """Lookups, and a head in chains and trees, after the trial of the architecture."""
    tensors = load_file(folder / "model.safetensors")
    whole = tensors["model.layers.0.mlp.up_proj.weight"]
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        beginning = name.removesuffix("weight")
        parts = pack(tensors.pop(name))
        tensors |= {beginning + part: tensor for part, tensor in parts.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    named_in_its_config(folder, quantization)
    target = Target.from_pretrained(folder, torch.float32)
    assert target.provenance["quantization"] is not None
    check_the_weights(target, whole)
    settings = {"adaptive": False, "compile": False}
    head = head_for(target, "eagle3", seed=1, depth=4)
    check(SpeculativeLM.from_pretrained(target, drafter="prompt-lookup", **settings))
    for tree in ("chain:4", "dynamic:12:4:3"):
        check(SpeculativeLM.from_pretrained(target, head, tree=tree, **settings))


def check_the_weights(target, whole_OI):
    """The weights were read as they were packed: a matrix computes nearly what it did."""
    up_proj = target.model.model.layers[0].mlp.up_proj
    x_BI = torch.randn(8, whole_OI.shape[1], generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        found_BO = up_proj(x_BI).float()
    assert (found_BO - x_BI @ whole_OI.T).norm() < 0.2 * found_BO.norm()


# Weights that are packed while they are loaded.


def bitsandbytes(bits):
    return tf.BitsAndBytesConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8)


def torchao():
    from torchao.quantization import Int8WeightOnlyConfig

    return tf.TorchAoConfig(Int8WeightOnlyConfig())


@pytest.mark.parametrize(
    "quantization",
    [
        pytest.param(lambda: bitsandbytes(4), marks=needs("bitsandbytes")),
        pytest.param(lambda: bitsandbytes(8), marks=needs("bitsandbytes")),
        pytest.param(torchao, marks=needs("torchao")),
    ],
)
def test_weights_that_are_quantized_on_loading(folder, quantization):
    given = quantization()
    lm = SpeculativeLM.from_pretrained(
        folder, drafter="prompt-lookup", adaptive=False, quantization_config=given
    )
    assert lm.target.provenance["quantization"] is not None
    check(lm)


def test_fp8_weights_are_made_wide_where_there_is_no_gpu(folder):
    named_in_its_config(
        folder,
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    )
    check(SpeculativeLM.from_pretrained(folder, drafter="prompt-lookup", adaptive=False))


@pytest.mark.skipif(torch.cuda.is_available(), reason="other packages serve a GPU")
@pytest.mark.parametrize(
    ("quantization", "packages"),
    [
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False},
            ("optimum", "gptqmodel"),
        ),
        ({"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True}, ("gptqmodel",)),
        (
            {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}},
            ("compressed.tensors",),
        ),
    ],
)
def test_a_missing_package_is_named(folder, quantization, packages):
    missing = [
        name for name in packages if importlib.util.find_spec(name.replace(".", "_")) is None
    ]
    if not missing:
        pytest.skip(f"{', '.join(packages)} is installed")
    named_in_its_config(folder, quantization)
    with pytest.raises(ValueError, match=f"no target model at .*{missing[0]}"):
        SpeculativeLM.from_pretrained(folder)
