"""MTP heads: what they compute, against transformers' own MTP model; options; starting values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from headstart.heads import MtpConfig, MtpHead, TargetFeatures, build_head
from headstart.heads.checkpoints.native_mtp import read_native_mtp
from headstart.heads.layers.target_layer import build_layers, described
from headstart.inference import SpeculativeLM, Target
from headstart.inference.models.info import target_info, target_modules

modeling = pytest.importorskip("transformers.modeling_layers")
needs_mtp = pytest.mark.skipif(not hasattr(modeling, "MtpModel"), reason="this version of transformers has no MtpModel")

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 13,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_next": EXPERTS
    | {"num_experts": 4, "shared_expert_intermediate_size": 16, "layer_types": ["full_attention"] * 3},
    "qwen3_5_text": {"layer_types": ["full_attention"] * 3},
    "glm4_moe": EXPERTS | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "deepseek_v3": EXPERTS
    | {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4}
    | {
        "head_dim": 4,
        "q_lora_rank": 12,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
    },
}
"""Options of tiny models by type; hybrids have attention alone."""
FIRST_LAYER = 3
"""Number by which a checkpoint of DeepSeek's or GLM's family calls its first MTP layer: that of the model's blocks."""


def tiny_model(kind: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A random model of a type, peaked so that drafts are accepted."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(SIZES | KINDS[kind]))
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval().requires_grad_(False)


def random_mtp(model: PreTrainedModel, **options: Any) -> MtpHead:
    """An MTP head of the model's own kind, of whose weights none is silent."""
    torch.manual_seed(1)
    info = target_info(model.config, "tiny", model.config.vocab_size)
    head = build_head("mtp", MtpHead.options_for(options, described(model.config)), info)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3 if parameter.ndim > 1 else 0.5)
    assert isinstance(head, MtpHead)
    return head.to(model.dtype).eval()


@torch.no_grad()
def features_of(model: PreTrainedModel, tokens_BT: torch.Tensor) -> TargetFeatures:
    """What the head reads, from the model itself: hybrids are no targets for trees."""
    last_BTD = model(tokens_BT, output_hidden_states=True).hidden_states[-1]
    mask_BT = torch.ones_like(tokens_BT, dtype=torch.bool)
    return TargetFeatures(last_BTD, last_BTD, tokens_BT, mask_BT, target_modules(model))


def mtp_model_of(model: PreTrainedModel, head: MtpHead) -> Any:
    """transformers' MTP model with a head's weights."""
    model.config.num_mtp_layers = head.config.num_layers
    for kinds in ("layer_types", "mlp_layer_types"):
        if getattr(model.config, kinds, None) is not None:
            setattr(model.config, f"mtp_{kinds}", [getattr(model.config, kinds)[-1]] * head.config.num_layers)
    theirs = modeling.MtpModel(model, head.config.num_layers).to(model.dtype).eval()
    names = {"token_layernorm": "enorm", "hidden_layernorm": "hnorm", "input_proj": "eh_proj"}
    names["final_layernorm"] = "post_norm"
    state = {}
    for name, tensor in head.state_dict().items():
        _, layer, part, *rest = name.split(".")
        own = names.get(part)
        state[".".join(["layers", layer, *([own] if own else ["mtp_block", part]), *rest])] = tensor
    missing = theirs.load_state_dict(state, strict=False)
    assert not missing.unexpected_keys
    assert not [name for name in missing.missing_keys if name.startswith("layers.")]
    return theirs


@needs_mtp
@pytest.mark.parametrize("kind", list(KINDS))
def test_draft_logits_are_those_of_transformers_mtp_model(kind: str) -> None:
    """Every depth, at every position, of a head with a layer for each."""
    model = tiny_model(kind)
    head = random_mtp(model, num_layers=2, depth=2)
    theirs = mtp_model_of(model, head)
    tokens_BT = torch.randint(13, (2, 12), generator=torch.Generator().manual_seed(2))
    features = features_of(model, tokens_BT)
    expected_BTD = features.features_BTF
    with torch.no_grad():
        drafts = head.drafts(features, 2)
        for k, draft_BTD in enumerate(drafts):
            next_BT = F.pad(tokens_BT[:, 1 + k :], (0, 1 + k), value=int(tokens_BT[0, -1]))
            positions_BT = torch.arange(1 + k, 13 + k).expand(2, -1)
            expected_BTD = theirs.forward_layer(k, expected_BTD, positions_BT, None, input_ids=next_BT)
            true = slice(0, 11 - k)
            found_BTV = features.modules.logits(draft_BTD)[:, true]
            expected_BTV = theirs._project_to_logits(expected_BTD)[:, true]
            assert expected_BTV.abs().max() > 0.5
            torch.testing.assert_close(found_BTV, expected_BTV, rtol=1e-5, atol=1e-5 * float(expected_BTV.abs().max()))
