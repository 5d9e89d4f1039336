"""Models whose layers, cache, logits or class are unlike Llama's, tiny and random: greedy is what
`generate` writes.

Configs of layers that differ in width, layers that share keys or have none, a forward that does not
know `logits_to_keep`, two layers in a block, logits that are made by more than a matrix, and text
models in multimodal ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf
from helpers import Oracle, padded_batch, written_alone
from packaging.version import Version

from headstart.heads import build_head
from headstart.inference import SpeculativeLM, Target, TreeShape

VOCAB = 40
WINDOW = 6
KINDS = ["sliding_attention", "full_attention"] * 2
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BERT = {name: value for name, value in BASE.items() if name != "num_key_value_heads"} | {
    "is_decoder": True
}
GEMMA = {
    **BASE,
    "head_dim": 8,
    "layer_types": KINDS,
    "sliding_window": WINDOW,
    "vocab_size_per_layer_input": VOCAB,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 16,
}


def gemma4(**options: Any) -> Any:
    """A Gemma 4, whose full attention has wider heads."""
    own = {"global_head_dim": 16, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0}
    return tf.Gemma4ForCausalLM(tf.Gemma4TextConfig(**{**GEMMA, **own, **options}))


def gemma3n() -> Any:
    """A Gemma 3n, whose last layers use the keys of others, and whose widths are lists."""
    own = {
        "intermediate_size": [48] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
        "num_kv_shared_layers": 2,
        "altup_num_inputs": 2,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
    }
    return tf.Gemma3nForCausalLM(tf.Gemma3nTextConfig(**{**GEMMA, **own}))


def mllama() -> Any:
    """The text model of Llama 3.2 Vision, whose cross-attention has no keys without an image."""
    return tf.MllamaForCausalLM(
        tf.models.mllama.MllamaTextConfig(**BASE, cross_attention_layers=[1, 3])
    )


def longcat() -> Any:
    """Two layers of attention in each block, which the config counts both."""
    own = {
        "num_layers": 2,
        "ffn_hidden_size": 48,
        "expert_ffn_hidden_size": 24,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "head_dim": 8,
        "n_routed_experts": 4,
        "zero_expert_num": 2,
        "moe_topk": 2,
    }
    left_out = ("num_hidden_layers", "intermediate_size", "num_key_value_heads")
    sizes = {name: value for name, value in BASE.items() if name not in left_out}
    return tf.LongcatFlashForCausalLM(tf.LongcatFlashConfig(**sizes, **own))


def modernbert() -> Any:
    """A dense layer and a norm before the LM head's matrix."""
    kinds = ["full_attention", "sliding_attention"] * 2
    left_out = ("num_key_value_heads", "bos_token_id", "eos_token_id")
    sizes = {name: value for name, value in BASE.items() if name not in left_out}
    config = tf.ModernBertDecoderConfig(
        **sizes, layer_types=kinds, local_attention=12, cls_token_id=1, sep_token_id=2
    )
    return tf.ModernBertDecoderForCausalLM(config)


def qwen2_audio() -> Any:
    """A forward without `logits_to_keep`."""
    audio = {
        "d_model": 32,
        "encoder_layers": 1,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
    }
    config = tf.Qwen2AudioConfig(
        audio_config=tf.Qwen2AudioEncoderConfig(**audio, num_mel_bins=16),
        text_config=tf.Qwen2Config(**BASE),
        audio_token_index=5,
    )
    return tf.Qwen2AudioForConditionalGeneration(config)


def aya_vision() -> Any:
    """A logit scale in the text model's config, which the multimodal model does not apply."""
    config = tf.AyaVisionConfig(
        text_config=tf.Cohere2Config(
            **BASE, logit_scale=0.25, sliding_window=WINDOW, layer_types=KINDS
        ),
        vision_config=tf.SiglipVisionConfig(**VISION),
        image_token_index=5,
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
        downsample_factor=1,
    )
    return tf.AyaVisionForConditionalGeneration(config)


def granite_without_states() -> Any:
    """A Granite 4 of attention alone, whose class is stateful."""
    state = {
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_chunk_size": 8,
        "mamba_n_groups": 1,
    }
    experts = {"num_local_experts": 0, "shared_intermediate_size": 48}
    config = tf.GraniteMoeHybridConfig(
        **BASE, **state, **experts, layer_types=["full_attention"] * 4
    )
    return tf.GraniteMoeHybridForCausalLM(config)


MODELS: dict[str, tuple[str, Callable[[], Any]]] = {
    "gemma 4": ("Gemma4ForCausalLM", gemma4),
    "gemma 4, sharing keys": ("Gemma4ForCausalLM", lambda: gemma4(num_kv_shared_layers=2)),
    "gemma 3n": ("Gemma3nForCausalLM", gemma3n),
    "llama 3.2 vision": ("MllamaForCausalLM", mllama),
    "longcat": ("LongcatFlashForCausalLM", longcat),
    "modernbert": ("ModernBertDecoderForCausalLM", modernbert),
    "qwen 2 audio": ("Qwen2AudioForConditionalGeneration", qwen2_audio),
    "aya vision": ("AyaVisionForConditionalGeneration", aya_vision),
    "granite 4 without states": ("GraniteMoeHybridForCausalLM", granite_without_states),
    "bert": ("BertLMHeadModel", lambda: tf.BertLMHeadModel(tf.BertConfig(**BERT))),
    "megatron-bert": (
        "MegatronBertForCausalLM",
        lambda: tf.MegatronBertForCausalLM(tf.MegatronBertConfig(**BERT)),
    ),
    "roberta": ("RobertaForCausalLM", lambda: tf.RobertaForCausalLM(tf.RobertaConfig(**BERT))),
}
"""The class that a version of transformers must have, and how to build the model."""
NO_STATES = ("gemma 3n", "llama 3.2 vision")
"""Models that do not return the state after each block."""
MORE_THAN_A_MATRIX = ("roberta",)
"""Models whose logits the modules do not make."""
CAUSAL_FROM = {"megatron-bert": Version("5.18")}
"""Versions of transformers before which a model reads a whole text otherwise than token by token,
and is refused."""
TREE = TreeShape.from_paths([[0], [1], [0, 0], [1, 0], [1, 1], [1, 0, 0], [1, 0, 0, 0]])


def target_of(name: str, attention: str = "sdpa") -> Target:
    """A model whose next token depends on its prefix, with norms that are not 1."""
    needed, build = MODELS[name]
    if not hasattr(tf, needed):
        pytest.skip(f"this version of transformers has no {needed}")
    torch.manual_seed(0)
    model = build().double().eval()
    model.set_attn_implementation(attention)
    model.set_experts_implementation("eager")  # the faster ones know no float64
    for key, parameter in model.named_parameters():
        if parameter.ndim > 1:
            parameter.data *= 4
        elif "norm" in key.lower():
            parameter.data += 0.2 * torch.rand_like(parameter)
    model.generation_config = tf.GenerationConfig(pad_token_id=0)
    return Target(model.requires_grad_(False))


def is_causal(name: str) -> bool:
    """Whether a model is causal in this version of transformers."""
    return name not in CAUSAL_FROM or Version(tf.__version__) >= CAUSAL_FROM[name]


def rows_of(*lengths: int) -> list[torch.Tensor]:
    """Random prompts."""
    rows = []
    for length in lengths:
        generator = torch.Generator().manual_seed(length)
        rows.append(torch.randint(10, VOCAB, (length,), generator=generator))
    return rows


@pytest.mark.versions
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_every_row_is_generate_for_it_alone(name: str, attention: str) -> None:
    target = target_of(name, attention)
    if not is_causal(name):
        with pytest.raises(ValueError, match="cannot be decoded with drafts"):
            target.check_decoding()
        return
    settings: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": []}
    settings |= {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2}
    for rows in (rows_of(11), rows_of(9, 2, 5)):
        truths = [written_alone(target.model, row, **settings) for row in rows]
        assert len(set(map(tuple, truths))) == len(rows)
        assert len(set(truths[0])) > 2, "the model says nothing"
        padded, mask = padded_batch(rows)
        for shape in (TREE, TreeShape.chain(4)):
            lm = SpeculativeLM(target, Oracle(shape, truths, VOCAB, wrong=0.1))
            output = lm.generate(padded, attention_mask=mask, **settings)
            assert output.sequences[:, padded.shape[1] :].tolist() == truths
            assert output.stats.acceptance_length > 1.3


@pytest.mark.versions
@pytest.mark.parametrize("name", MODELS)
def test_heads_learn_from_the_models_own_logits_or_training_refuses(name: str) -> None:
    target = target_of(name)
    if name in NO_STATES:
        with pytest.raises(ValueError, match="a head cannot read features of its blocks"):
            target.check_features()
        return
    if not is_causal(name):
        with pytest.raises(ValueError, match="reads a whole text otherwise than generate does"):
            target.check_features()  # in both directions
        return
    if name in MORE_THAN_A_MATRIX:
        with pytest.raises(ValueError, match="makes its logits by more than its LM head"):
            target.check_features()
        return
    target.check_features()
    tokens_BT = torch.stack(rows_of(9) * 2)
    features_BTF, last_BTD = target.read(tokens_BT, (0, -1))
    expected_BTV = target.model(tokens_BT).logits
    torch.testing.assert_close(target.modules.logits(last_BTD), expected_BTV, rtol=1e-6, atol=1e-6)
    # What decoding reads is what training reads.
    cache = target.engine.new_cache(2, 16)
    output = target.engine.read_chunk(tokens_BT, 9, cache, (0, -1), [8])
    torch.testing.assert_close(output.features_BNF, features_BTF, rtol=1e-9, atol=1e-9)


def test_a_model_that_reads_a_whole_text_otherwise_than_generate_is_refused_for_training() -> None:
    """As versions of transformers do whose BERT is causal only with a mask that `generate`
    makes."""
    target = target_of("bert")
    forward = target.model.forward

    @functools.wraps(forward)
    def shifted(*given: Any, **named: Any) -> Any:
        if named.get("position_ids") is None:
            named["position_ids"] = torch.arange(3, 3 + named["input_ids"].shape[1])[None]
        return forward(*given, **named)

    target.model.forward = shifted
    target.check_decoding()
    with pytest.raises(ValueError, match="reads a whole text otherwise than generate does"):
        target.check_features()


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "medusa", "hydra"])
@pytest.mark.parametrize("name", [name for name in MODELS if name not in NO_STATES])
def test_heads_of_their_dimensions_draft_for_them(name: str, kind: str) -> None:
    target = target_of(name)
    options = {"eagle3": {"depth": 3, "feature_layers": [0, -1]}}
    torch.manual_seed(1)
    head = build_head(kind, options.get(kind, {}), target.info).double()
    head.initialize(target.modules, torch.ones(VOCAB))
    lm = SpeculativeLM.from_pretrained(target, head.eval(), adaptive=False, compile=False)
    (row,) = rows_of(7)
    settings: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": []}
    expected = target.model.generate(
        row[None], attention_mask=torch.ones_like(row[None]), **settings
    )
    assert lm.generate(row[None], **settings).sequences.tolist() == expected.tolist()


@pytest.mark.parametrize("name", NO_STATES)
def test_a_head_for_a_model_that_does_not_return_its_states_is_refused_by_name(name: str) -> None:
    target = target_of(name)
    head = build_head("eagle3", {"depth": 3, "feature_layers": [0, -1]}, target.info).double()
    with pytest.raises(ValueError, match="a head cannot read features of its blocks"):
        SpeculativeLM.from_pretrained(target, head, compile=False).generate(
            rows_of(7)[0][None], max_new_tokens=4
        )


def test_a_model_without_a_cache_is_refused_by_name() -> None:
    config = tf.OpenAIGPTConfig(vocab_size=VOCAB, n_embd=32, n_layer=1, n_head=4, n_positions=64)
    with pytest.raises(ValueError, match="OpenAIGPTLMHeadModel returns no KV cache"):
        SpeculativeLM.from_pretrained(
            tf.OpenAIGPTLMHeadModel(config).eval(), drafter="prompt-lookup"
        )
