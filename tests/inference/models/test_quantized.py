"""Quantised targets: as far as their packages are here they write what `generate` writes, else the package is named."""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch
import transformers as tf

from headstart.inference import SpeculativeLM

CONFIG = {
    "vocab_size": 60,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
}


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**CONFIG))
    for parameter in model.parameters():
        parameter.data *= 4 if parameter.ndim > 1 else 1
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def named_in_its_config(folder, quantization):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization}))


def check_identity(lm):
    prompt = torch.randint(1, 60, (1, 12), generator=torch.Generator().manual_seed(0))
    settings = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    expected = lm.target.model.generate(prompt, **settings)
    assert torch.equal(lm.generate(prompt, **settings).sequences, expected)


def needs(package):
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


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
    lm = SpeculativeLM.from_pretrained(folder, drafter="prompt-lookup", fallback=False, quantization_config=given)
    assert lm.target.provenance["quantization"] is not None
    check_identity(lm)


def test_fp8_weights_are_made_wide_where_there_is_no_gpu(folder):
    named_in_its_config(
        folder, {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    )
    check_identity(SpeculativeLM.from_pretrained(folder, drafter="prompt-lookup", fallback=False))


@pytest.mark.skipif(torch.cuda.is_available(), reason="other packages serve a GPU")
@pytest.mark.parametrize(
    ("quantization", "packages"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False}, ("optimum", "gptqmodel")),
        ({"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True}, ("gptqmodel",)),
        (
            {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}},
            ("compressed.tensors",),
        ),
    ],
)
def test_a_missing_package_is_named(folder, quantization, packages):
    missing = [name for name in packages if importlib.util.find_spec(name.replace(".", "_")) is None]
    if not missing:
        pytest.skip(f"{', '.join(packages)} is installed")
    named_in_its_config(folder, quantization)
    with pytest.raises(ValueError, match=f"no target model at .*{missing[0]}"):
        SpeculativeLM.from_pretrained(folder)
