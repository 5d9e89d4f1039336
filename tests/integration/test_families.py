"""Every family of models, tiny and random, in float64: greedy, row by row what `generate` writes
for the row alone.

`HEADSTART_FUZZ=500` makes the random test at the end try as many cases, and tells how many it tries
in a second.
"""

from __future__ import annotations

import functools
import time

import pytest
import random_cases
import torch
import transformers as tf
from hybrids import HYBRIDS, hybrid
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version
from torch.testing._internal.two_tensor import TwoTensor

from headstart.heads import TargetFeatures, build_head
from headstart.heads.objective import Objective
from headstart.inference import Target, TreeShape
from headstart.inference.engines.masks import in_window

VOCAB = 37
WINDOW = 3
"""Shorter than any text here, and than the trees are deep."""
BASE = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
BASE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
BASE |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
HEAD = {**BASE, "head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
ALTERNATING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}
FAMILIES = {
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**BASE)),
    "mistral, windowed": lambda: tf.MistralForCausalLM(
        tf.MistralConfig(**HEAD, sliding_window=WINDOW)
    ),
    "qwen2": lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**BASE)),
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**HEAD)),
    "qwen3-moe": lambda: tf.Qwen3MoeForCausalLM(tf.Qwen3MoeConfig(**HEAD, **EXPERTS)),
    "mixtral": lambda: tf.MixtralForCausalLM(
        tf.MixtralConfig(**HEAD, num_local_experts=4, sliding_window=None)
    ),
    "gemma2, soft-capped and alternating": lambda: tf.Gemma2ForCausalLM(
        tf.Gemma2Config(
            **HEAD, **ALTERNATING, attn_logit_softcapping=5.0, final_logit_softcapping=3.0
        )
    ),
    "gemma3, alternating": lambda: tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**HEAD, **ALTERNATING)),
    "phi-3": lambda: tf.Phi3ForCausalLM(tf.Phi3Config(**BASE, sliding_window=None)),
    "olmo-2": lambda: tf.Olmo2ForCausalLM(tf.Olmo2Config(**BASE)),
    "granite": lambda: tf.GraniteForCausalLM(
        tf.GraniteConfig(**BASE, logits_scaling=2.0, residual_multiplier=0.7)
    ),
    "gpt-neox": lambda: tf.GPTNeoXForCausalLM(
        tf.GPTNeoXConfig(**{**BASE, "num_key_value_heads": 4})
    ),
    "gpt-2": lambda: tf.GPT2LMHeadModel(
        tf.GPT2Config(
            vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None
        )
    ),
    "falcon, rotary": lambda: tf.FalconForCausalLM(
        tf.FalconConfig(
            **{name: value for name, value in BASE.items() if name != "num_key_value_heads"},
            alibi=False,
        )
    ),
    "stablelm": lambda: tf.StableLmForCausalLM(tf.StableLmConfig(**BASE)),
    "cohere": lambda: tf.CohereForCausalLM(tf.CohereConfig(**BASE)),
    "phi": lambda: tf.PhiForCausalLM(tf.PhiConfig(**{**BASE, "num_key_value_heads": 4})),
    **HYBRIDS,
}
SHAPES = {
    "chain": TreeShape.chain(4),
    "tree": TreeShape.from_paths([[0], [1], [0, 0], [1, 0], [1, 1], [1, 0, 0], [1, 0, 0, 0]]),
}


def build(family, attention="eager"):
    """A model whose next token depends on its prefix."""
    if family in HYBRIDS:
        old = Version(tf.__version__) < Version("5.16")
        try:
            model = hybrid(family)
        except Exception as error:  # the model, or a name in its config, is newer than this version
            if not old:
                raise
            pytest.skip(f"cannot be built: {error}")
        model.set_attn_implementation(attention)
        if old:  # modules that keep states are right, or refused
            try:
                Target(model).check_decoding()
            except ValueError as error:
                pytest.skip(f"refused by name: {error}")
        return Target(model)
    torch.manual_seed(0)
    model = FAMILIES[family]().double().eval()
    model.set_attn_implementation(attention)
    model.set_experts_implementation("eager")  # the faster ones know no float64
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data *= 4 if family == "cohere" else 3
    model.generation_config = tf.GenerationConfig(pad_token_id=0)
    return Target(model)


def rows_of(lengths, vocab=VOCAB):
    return [
        torch.randint(1, vocab, (length,), generator=torch.Generator().manual_seed(length))
        for length in lengths
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_ends_give_the_models_own_logits(family):
    """Scaled, bent and with their bias, for training's targets and for heads that share the LM
    head."""
    target, tokens_BT = build(family), torch.stack(rows_of([7, 7]))
    bias = target.model.get_output_embeddings().bias
    if bias is not None:
        torch.nn.init.normal_(bias)
    features_BTF, last_BTD = target.read(tokens_BT, (-1,))
    expected_BTV = target.model(tokens_BT).logits
    # some compute theirs in float32 always
    close = 1e-6 if expected_BTV.dtype == torch.float64 else 1e-5
    expected_BTV = expected_BTV.double()
    torch.testing.assert_close(
        target.modules.logits(last_BTD), expected_BTV, rtol=close, atol=close
    )
    batch = TargetFeatures(
        features_BTF,
        last_BTD,
        tokens_BT,
        torch.ones_like(tokens_BT, dtype=torch.bool),
        target.modules,
    )
    # A new head of Medusa says again what the target says, whose distribution at the next place it
    # is taught.
    head = build_head("medusa", {"num_heads": 1, "lm_head": "shared"}, target.info).double()
    found = head.observe(
        head.begin(target.modules, 2, 7, 1, 1), features_BTF, tokens_BT, torch.tensor([7, 7])
    )
    torch.testing.assert_close(found.logits_BKV[:, 0], expected_BTV[:, -1], rtol=close, atol=close)
    p_BTV, log_q_BTV = expected_BTV[:, 1:-1].softmax(-1), expected_BTV[:, :-2].log_softmax(-1)
    loss = head.eval()(batch, Objective({"soft_ce": 1.0})).losses_K[0]
    torch.testing.assert_close(loss, -(p_BTV * log_q_BTV).sum(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_starts_from_a_block_of_its_own_computation_alone(family):
    target = build(family)
    layers = {"feature_layers": [0, -1]}
    head = build_head("eagle3", {**layers, "start": "last"}, target.info).double()
    if family in ("llama", "mistral, windowed"):
        head.initialize(target.modules, torch.ones(VOCAB))
        return
    with pytest.raises(ValueError, match=r"eagle3 cannot start .*choose start: random"):
        head.initialize(target.modules, torch.ones(VOCAB))


def test_flex_attention_gets_the_same_mask():
    """Its kernels run on GPUs; here the mask is compared with the additive one."""
    target = build("gemma3, alternating")
    seen_BNS = torch.rand(2, 5, 16, generator=torch.Generator().manual_seed(0)) < 0.5
    positions_BN, slots_BS = torch.arange(5).expand(2, -1), torch.arange(16).expand(2, -1)
    seen = dict.fromkeys(target.attention_kinds, seen_BNS)
    seen["sliding_attention"] = in_window(target, positions_BN, slots_BS, seen_BNS)
    additive = target.engine._masks(seen)
    target.engine.flex = True
    for kind, blocks in target.engine._masks(seen).items():
        row, node, slot = torch.meshgrid(
            torch.arange(2), torch.arange(5), torch.arange(16), indexing="ij"
        )
        assert torch.equal(
            blocks.mask_mod(row, torch.zeros(()), node, slot), additive[kind][:, 0] == 0
        )


def test_weights_packed_for_one_kernel_are_known_by_what_they_are_packed_in():
    class Packed(TwoTensor):
        def dequantize(self):
            raise NotImplementedError

    model = FAMILIES["llama"]().eval()
    layer = model.model.layers[0].mlp.up_proj
    plain, found = layer.weight.detach(), set()
    for parts in ((plain, plain), (plain, plain + 1), (plain + 1, plain)):
        layer.weight = torch.nn.Parameter(Packed(*parts))
        found.add(Target(model).provenance["weights"])
    assert len(found) == 3


@functools.cache
def built(family):
    return build(family)


@pytest.fixture(scope="module")
def rate(request):
    """The beginnings of all cases; tells at the end how many were tried in a second."""
    begun = []
    yield begun
    if len(begun) > 1:
        seconds = time.perf_counter() - begun[0]
        with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            print(f"\n{len(begun)} cases, {len(begun) / seconds:.2f} a second")


@pytest.mark.filterwarnings("ignore:Unfeasible length constraints")
@random_cases.as_many_as(100)
@given(
    case=random_cases.cases(family=st.sampled_from(sorted(FAMILIES))), chosen=random_cases.SETTINGS
)
def test_no_random_case_differs_from_generate(monkeypatch, rate, case, chosen):
    rate.append(time.perf_counter())
    random_cases.check(built(case["family"]), case, chosen, monkeypatch)
