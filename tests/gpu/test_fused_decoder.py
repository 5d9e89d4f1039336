"""Text through the tree kernel and the fused decoder: that of `generate`, for known families,
trees, batches, windows.

Other tests here decode in float64, which neither takes on a GPU; on the simulated device torch
operations stand for the kernels.
"""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import DEVICE, VOCAB, calls_of, continued, head_for, written_alone
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from headstart.inference import SpeculativeLM, Target
from headstart.inference.engines.fused_decoder import FusedDecoder, row_reader
from headstart.inference.rounds import prefill

pytestmark = pytest.mark.gpu
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": None,
}
WINDOWS = ["full_attention", "sliding_attention"] * 4
FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "llama, large heads": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, head_dim=256)),
    "mistral, window": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=12)),
    "qwen2, biases": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen2, layers with a window": lambda: Qwen2ForCausalLM(
        Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=12, layer_types=WINDOWS)
    ),
    "qwen3, norms": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=32)),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16) if DEVICE == "cuda" else (torch.float32,)
TREES = ("chain:3", "dynamic:20:5:4")


def following_model(family: str, dtype: torch.dtype):
    """A random model that follows a permutation of its tokens by a wide margin, so that rounding
    decides nothing."""
    torch.manual_seed(0)
    model = FAMILIES[family]().eval().requires_grad_(False)
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight.mul_(50)
        model.lm_head.weight.copy_(embedding[torch.randperm(VOCAB)]).mul_(0.02)
    return model.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_text_is_that_of_generate(device, family, dtype):
    model = following_model(family, dtype).to(device)
    target = Target(model)
    target.compile(True)
    head = copy.deepcopy(head_for(Target(following_model(family, torch.float32)), "eagle3")).to(
        device, dtype
    )
    prompts = [torch.arange(3, 3 + length) * 7 % VOCAB for length in (5, 31, 18)]
    expected = [written_alone(model, prompt.to(device), max_new_tokens=40) for prompt in prompts]
    for tree in TREES:
        lm = SpeculativeLM.from_pretrained(target, head, tree=tree, compile=True, adaptive=False)
        assert target.engine.decoder is not None
        alone = [continued(lm, [prompt], max_new_tokens=40)[0][0] for prompt in prompts]
        assert alone == expected
        assert continued(lm, prompts, max_new_tokens=40)[0] == expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_whole_rows_are_read_as_by_the_model(device, family, dtype):
    """The states that heads train on: padded rows and packed ones, without and with gradients."""
    target = Target(following_model(family, dtype).to(device))
    fused = target.attention_kinds == ("full_attention",)
    assert (row_reader(target) is not None) == fused
    tokens_BT = torch.arange(40, device=device).view(2, 20) * 11 % VOCAB
    tokens_BT[1, 13:] = 0
    expected = target.model(tokens_BT, use_cache=False, output_hidden_states=True).hidden_states
    # After block 5 comes block 6's input, number 6; the last state is normed.
    expected_BTF = torch.cat([expected[2], expected[6], expected[-1]], dim=-1)
    tolerance = 3e-2 if dtype.itemsize == 2 else 1e-5
    for layers in ((1, 5), ()):
        features_BTF, last_BTD = target.read(tokens_BT, layers)
        if layers:
            assert_near(features_BTF, expected_BTF[..., :128], tolerance)
        assert features_BTF.shape[-1] == 64 * len(layers)
        assert_near(last_BTD, expected_BTF[..., 128:], tolerance)

    # Two sequences in a row, of 12 and 8 tokens.
    positions_BT = torch.tensor([[*range(12), *range(8)]])
    packed_BTF, _ = target.read(tokens_BT[:1], (1, 5), positions_BT)
    for part in (slice(0, 12), slice(12, 20)):
        alone_BTF, _ = target.read(tokens_BT[:1, part], (1, 5))
        assert_near(packed_BTF[:, part], alone_BTF, tolerance)

    target.model.model.layers[2].mlp.up_proj.weight.requires_grad_()
    features_BTF, _ = target.states(tokens_BT, (1, 5))
    assert features_BTF.requires_grad


def assert_near(computed, expected, tolerance):
    computed, expected = computed.cpu().double(), expected.cpu().double()
    assert (computed - expected).abs().max() <= tolerance * expected.abs().max()


def test_rows_are_read_with_the_hooks_and_weights_of_now(device):
    target = Target(following_model("llama", DTYPES[0]).to(device))
    tokens_1T = torch.arange(9, device=device)[None]
    before, _ = target.read(tokens_1T, (1,))
    handle = target.model.model.layers[0].register_forward_hook(lambda *_: (_[2] * 0,)[0])
    hooked, _ = target.read(tokens_1T, (1,))
    handle.remove()
    again, _ = target.read(tokens_1T, (1,))
    assert not torch.equal(hooked, before)
    assert torch.equal(again, before)


def test_prompts_are_read_by_the_fused_decoder(device, monkeypatch):
    """In chunks, of a batch, and what a conversation adds."""
    target = Target(following_model("llama", DTYPES[0]).to(device))
    lm = SpeculativeLM(target)
    lm.compile(True)
    prompts = [torch.arange(30), torch.arange(7)]
    expected, _ = continued(lm, prompts)
    calls = calls_of(monkeypatch, FusedDecoder, "__call__")
    monkeypatch.setattr(prefill, "PREFILL_TOKENS", 16)
    target.compile(False)
    target.compile(True)
    assert continued(lm, prompts)[0] == expected
    assert 14 in [tokens_BN.shape[1] for _, tokens_BN, *_ in calls]  # the second chunk of 30 tokens
