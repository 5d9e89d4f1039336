"""Tiny random models of the families that people use, by the names of transformers' types."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from tiny_models import tiny_model
from transformers import PreTrainedModel

from headstart.inference import Target

VOCAB = 37
WINDOWS = {"sliding_window": 3}
"""Shorter than the texts, and than the trees are deep."""
ATTENTION: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": WINDOWS,
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {},
    "mixtral": {},
    "gemma2": {**WINDOWS, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    "gemma3_text": WINDOWS,
    "phi3": {},
    "olmo2": {},
    "granite": {"logits_scaling": 2.0, "residual_multiplier": 0.7},
    "gpt_neox": {},
    "gpt2": {},
    "falcon": {},
    "stablelm": {},
    "cohere": {},
    "phi": {},
}
"""Families whose layers are attention, and what differs from the type's tiny config."""
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": {},
    "qwen3_5_text": {},
    "olmo_hybrid": {},
    "kimi_linear": {},
    "lfm2": {},
    "lfm2_moe": {},
    "granitemoehybrid": {"num_local_experts": 4, "logits_scaling": 2.0},
    "falcon_h1": {"lm_head_multiplier": 0.7},
    "nemotron_h": {},
    "bamba": {},
    "zamba2": {},
    "mamba2": {},
}
"""Families whose layers keep states."""
FAMILIES = ATTENTION | HYBRIDS
SCALES = {"cohere": 4.0, "lfm2": 5.0, "lfm2_moe": 5.0, "falcon_h1": 5.0}
"""Of the random weights, where 3 gives a model that repeats one token."""


def family_model(
    family: str, dtype: torch.dtype = torch.float64, **options: Any
) -> PreTrainedModel:
    """A model whose next token depends on its prefix, by way of its states."""
    options = {"vocab_size": VOCAB, **FAMILIES[family], **options}
    model = tiny_model(family, SCALES.get(family, 3.0), **options).to(dtype)
    for name, parameter in model.named_parameters():
        if name.endswith(".D"):  # what passes a recurrence by would hide its state
            parameter *= 0.1
        if name.endswith(".dt_bias"):  # long steps: the newest tokens make most of the state
            parameter += 1.0
    return model


def family_target(family: str, attention: str = "eager") -> Target:
    """A model as a target; one that an old transformers lacks, or does not decode, is skipped."""
    may_lack = family in HYBRIDS and Version(transformers.__version__) < Version("5.16")
    try:
        model = family_model(family)
    except Exception as error:  # the model, or a name in its config, is newer than this version
        if not may_lack:
            raise
        pytest.skip(f"cannot be built: {error}")
    if family != "mamba2":  # which has no attention
        model.set_attn_implementation(attention)
    target = Target(model)
    if may_lack:  # modules that keep states are right, or refused
        try:
            target.check_decoding()
        except ValueError as error:
            pytest.skip(f"refused by name: {error}")
    return target
