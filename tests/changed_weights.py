"""A small model, and ways in which its weights change between two calls."""

from __future__ import annotations

import torch
from helpers import head_for
from torch import nn
from transformers import MistralConfig, MistralForCausalLM

from headstart.inference import SpeculativeLM, Target

VOCAB = 64
PLAIN = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
ROW = torch.tensor([[5, 6, 7, 8, 9]])


def tiny_mistral(seed=0, act="silu", tie=False) -> MistralForCausalLM:
    torch.manual_seed(seed)
    config = MistralConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=256,
        hidden_act=act,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=tie,
        sliding_window=None,
    )
    model = MistralForCausalLM(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data *= 4
    return model.eval().requires_grad_(False)


def mistral_text(model):
    row = ROW.to(model.device)
    return model.generate(row, attention_mask=torch.ones_like(row), **PLAIN)


def copied(model, other):
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        mine.data.copy_(its)


def replaced(model, other):
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        mine.data = its.data.clone()


def assigned(model, other):
    theirs = dict(other.named_modules())
    for name, module in model.named_modules():
        for own, weight in theirs[name].named_parameters(recurse=False):
            setattr(module, own, nn.Parameter(weight.clone(), requires_grad=False))


def averaged(model, other):
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        mine.data.mul_(0.5).add_(its, alpha=0.5)


def merged(model, other):
    model.model.layers[1].mlp.down_proj.weight.data.add_(
        2 * torch.randn(64, 1) @ torch.randn(1, 64)
    )


def normed(model, other):
    model.model.norm.weight.data.mul_(torch.randn(64))


def headed(model, other):
    model.lm_head.weight.data.copy_(other.lm_head.weight)


def loaded(model, other):
    model.load_state_dict(other.state_dict())


WRITES = {
    each.__name__: each
    for each in (copied, replaced, assigned, averaged, merged, normed, headed, loaded)
}


def with_eagle3(model, compile, tree="chain:2"):
    """A decoder whose head reads two layers."""
    target = Target.from_pretrained(model)
    head = head_for(target, "eagle3", seed=1, depth=3)
    return SpeculativeLM.from_pretrained(target, head, tree=tree, compile=compile, adaptive=False)
