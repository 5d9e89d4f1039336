"""Hooks and forwards that users put on a model, before it is loaded here or between two calls.

Engines copy modules, or run none of the model's own: the text must be `generate`'s each time.
"""

from __future__ import annotations

import copy

import pytest
import torch
from changed_code import CHANGES, shifted
from changed_weights import PLAIN, ROW, mistral_text, tiny_mistral
from helpers import pairs
from messages import refused

from headstart.inference import SpeculativeLM
from headstart.inference.targets.changes import code_of

ENGINES = {
    "as it is": ({"act": "silu"}, False),
    "kernels": ({"act": "silu"}, True),
    "linear layers in kernels": ({"act": "gelu"}, True),
}
"""The model's options, and whether it is compiled."""


@pytest.mark.parametrize(
    ("engine", "change", "first"), pairs(ENGINES, CHANGES, ["loaded", "changed"])
)
def test_what_is_put_on_a_model_runs(engine, change, first):
    options, compile = ENGINES[engine]
    model = tiny_mistral(**options)
    plain = mistral_text(model)

    def decoder():
        lm = SpeculativeLM.from_pretrained(model, drafter="prompt-lookup", compile=compile)
        lm.generate(ROW, **PLAIN)
        return lm

    lm = decoder() if first == "loaded" else None
    take_away = CHANGES[change](model)
    try:
        changed = mistral_text(model)
        assert not torch.equal(changed, plain), "the change changes nothing"
        lm = lm or decoder()
        assert torch.equal(lm.generate(ROW, **PLAIN).sequences, changed)
    finally:
        take_away()
    assert torch.equal(lm.generate(ROW, **PLAIN).sequences, plain)


def test_what_changes_a_text_is_seen_and_what_does_not_is_not():
    model = tiny_mistral()
    router = model.model.layers[0].mlp
    router.top_k = 2
    model.config.layer_types = ["full_attention"] * 2
    before = code_of(model)
    model.train()
    model.eval().generate(ROW, **PLAIN)  # after which transformers has noted what it prepared
    assert code_of(model) == before
    router.top_k = 1
    fewer_experts = code_of(model)
    model.config.layer_types[1] = "sliding_attention"
    assert len({before, fewer_experts, code_of(model)}) == 3


def test_the_kernels_come_back_when_the_hook_has_gone():
    model = tiny_mistral(act="silu")
    lm = SpeculativeLM.from_pretrained(model, drafter="prompt-lookup")
    lm.generate(ROW, **PLAIN)
    kernels = lm.target.engine.name
    hook = model.model.norm.register_forward_hook(shifted)
    lm.generate(ROW, **PLAIN)
    assert lm.target.engine.name == "eager"
    hook.remove()
    lm.generate(ROW, **PLAIN)
    assert lm.target.engine.name == kernels != "eager"


@pytest.mark.parametrize("holder", ["model", "decoder"])
def test_a_config_that_only_the_model_or_its_decoder_holds_is_refused(holder):
    model = tiny_mistral()
    lm = SpeculativeLM.from_pretrained(model, drafter="prompt-lookup")
    other = copy.deepcopy(model.config)
    other.sliding_window = 3
    (model if holder == "model" else model.model).config = other
    with refused("sliding_window", "3", "decoder"):
        lm.generate(ROW, **PLAIN)
    with refused("sliding_window", "3", "decoder"):
        SpeculativeLM.from_pretrained(model, drafter="prompt-lookup")
