"""Quantised targets: as far as their packages are here they write what `generate` writes, else the
package is named."""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch
import transformers as tf
from helpers import build_model, check_identity, head_for, random_ids
from messages import refused
from safetensors.torch import load_file, save_file

from headstart.inference import SpeculativeLM, Target


@pytest.fixture
def model_folder(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    build_model(60, dtype=torch.float32, **sizes).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def named_in_its_config(model_folder, quantization):
    path = model_folder / "config.json"
    config = json.loads(path.read_text()) | {"quantization_config": quantization}
    path.write_text(json.dumps(config))


def check_decodes(lm):
    check_identity(lm, [random_ids(60, 12, first=1)])


def is_installed(package):
    return importlib.util.find_spec(package.replace("-", "_")) is not None


def needs(package):
    return pytest.mark.skipif(not is_installed(package), reason=f"{package} is not installed")


# Checkpoints whose weights are packed, as the formats' packages write them.

GROUP = 32
"""Inputs that share a scale."""


def whole_numbers(weight_OI, bits, group):
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
    numbers_OI, scale_OG = whole_numbers(weight_OI, 4, GROUP)
    return {
        "weight_packed": eight_in_one(numbers_OI + 8),
        "weight_scale": scale_OG,
        "weight_shape": torch.tensor(weight_OI.shape),
    }


def int8_by_compressed_tensors(weight_OI):
    numbers_OI, scale_OG = whole_numbers(weight_OI, 8, weight_OI.shape[1])
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
def test_checkpoints_with_packed_weights(model_folder, pack, quantization):
    """Lookups, and a head in chains and trees, after the trial of the architecture."""
    tensors = load_file(model_folder / "model.safetensors")
    whole = tensors["model.layers.0.mlp.up_proj.weight"]
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        beginning = name.removesuffix("weight")
        parts = pack(tensors.pop(name))
        tensors |= {beginning + part: tensor for part, tensor in parts.items()}
    save_file(tensors, model_folder / "model.safetensors", metadata={"format": "pt"})
    named_in_its_config(model_folder, quantization)
    target = Target.from_pretrained(model_folder, torch.float32)
    assert target.provenance["quantization"] is not None
    check_the_weights(target, whole)
    settings = {"adaptive": False, "compile": False}
    head = head_for(target, "eagle3", seed=1, depth=4)
    check_decodes(SpeculativeLM.from_pretrained(target, drafter="prompt-lookup", **settings))
    for tree in ("chain:4", "dynamic:12:4:3"):
        check_decodes(SpeculativeLM.from_pretrained(target, head, tree=tree, **settings))


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
def test_weights_that_are_quantized_on_loading(model_folder, quantization):
    options = {"adaptive": False, "quantization_config": quantization()}
    lm = SpeculativeLM.from_pretrained(model_folder, drafter="prompt-lookup", **options)
    assert lm.target.provenance["quantization"] is not None
    check_decodes(lm)


def test_fp8_weights_are_made_wide_where_there_is_no_gpu(model_folder):
    blocks = {"activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    named_in_its_config(model_folder, {"quant_method": "fp8", **blocks})
    check_decodes(
        SpeculativeLM.from_pretrained(model_folder, drafter="prompt-lookup", adaptive=False)
    )


BY_GROUP = {"bits": 4, "group_size": 64}


@pytest.mark.skipif(torch.cuda.is_available(), reason="other packages serve a GPU")
@pytest.mark.parametrize(
    ("quantization", "packages"),
    [
        ({"quant_method": "gptq", **BY_GROUP, "desc_act": False}, ["optimum", "gptqmodel"]),
        ({"quant_method": "awq", **BY_GROUP, "zero_point": True}, ["gptqmodel"]),
        (compressed("pack-quantized", 4, "int", "group"), ["compressed-tensors"]),
    ],
)
def test_a_missing_package_is_named(model_folder, quantization, packages):
    missing = [name for name in packages if not is_installed(name)]
    if not missing:
        pytest.skip(f"{', '.join(packages)} is installed")
    named_in_its_config(model_folder, quantization)
    with refused(str(model_folder), missing[0]):
        SpeculativeLM.from_pretrained(model_folder)
