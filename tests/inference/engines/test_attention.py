"""The attention that the target's layers are given: a model is left as it was, and asked in its own
words."""

import threading

import pytest
import torch
from accelerate import dispatch_model
from helpers import build_model, check_identity, generated, pairs
from messages import refused
from transformers import LlamaConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import create_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from headstart.inference import Conversation, SpeculativeLM, Target
from headstart.inference.engines import attention
from headstart.inference.engines.attention import NAME, TreeAttention, causal_attention

SIZE, SLOTS = 8, 23


def test_what_it_does_not_do_is_refused():
    states = torch.randn(1, 2, 3, 8)
    attend = TreeAttention()
    with refused("Linear softcap"):
        attend(torch.nn.Linear(1, 1), states, states, states, attend.of_prompt(3, 3), softcap=50.0)


def test_a_mask_that_is_not_ours_gets_transformers_own():
    """In whatever thread, and while a forward of ours runs: with the keys of a group for every
    head."""
    module = torch.nn.Module()
    module.num_key_value_groups, module.is_causal = 3, True
    query = torch.randn(1, 6, 5, 8)
    key, value = torch.randn(2, 1, 2, 5, 8)
    config = LlamaConfig(attn_implementation="sdpa")
    padded = torch.tensor([[0, 0, 1, 1, 1]])
    text = {"inputs_embeds": torch.zeros(1, 5, 8), "past_key_values": None, "position_ids": None}
    for mask in (None, create_causal_mask(config, attention_mask=padded, **text)):
        attended, _ = TreeAttention()(module, query, key, value, mask)
        assert torch.equal(attended, sdpa_attention_forward(module, query, key, value, mask)[0])


def test_transformers_own_attention_is_left_alone(tiny_target):
    """Of the process, and of the user's model: ours runs in a copy, which shares its weights."""
    target = tiny_target()
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward
    assert target.engine.own_attention
    copied = target.engine.model
    assert copied is not target.model and copied.config._attn_implementation == NAME
    assert target.model.config._attn_implementation == "sdpa"
    assert not any(hasattr(module, "tree_attention") for module in target.model.modules())
    for weight, other in zip(copied.parameters(), target.model.parameters(), strict=True):
        assert weight is other


def test_a_hook_and_another_thread_see_the_model_as_it_was(tiny_target):
    """While a forward of ours runs: neither the config nor the class of any module is another."""
    target = tiny_target()
    prompt = torch.arange(1, 9)[None]
    settings = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    expected = target.model.generate(prompt, **settings)
    seen = set()
    written = []

    def generate():
        written.append(target.model.generate(prompt, **settings))

    def look(module, *_):
        seen.add((module.config._attn_implementation, target.model.config._attn_implementation))
        if not written:
            written.append(None)
            thread = threading.Thread(target=generate)
            thread.start()
            thread.join()

    target.model.model.layers[0].self_attn.register_forward_hook(look)
    assert torch.equal(SpeculativeLM(target).generate(prompt, **settings).sequences, expected)
    assert seen == {("sdpa", "sdpa")}
    assert torch.equal(written[1], expected)


@pytest.mark.parametrize(
    ("block", "queries", "shared"),
    pairs([1, 2, 3, 7, 64], [1, 6, 7, SLOTS - 1, SLOTS], [False, True]),
)
def test_a_passage_sees_itself_and_all_before_it(monkeypatch, block, queries, shared):
    heads, groups = (6, 2) if shared else (4, 4)
    monkeypatch.setattr(attention, "BLOCK", block)
    random = torch.Generator().manual_seed(heads + queries)
    query, key, value = (
        torch.randn(2, *shape, SIZE, generator=random, dtype=torch.float64)
        for shape in ((heads, queries), (groups, SLOTS), (groups, SLOTS))
    )
    seen = torch.ones(queries, SLOTS, dtype=torch.bool).tril(SLOTS - queries)
    found = causal_attention(query, key, value, 0.3)
    key, value = (states.repeat_interleave(heads // groups, 1) for states in (key, value))
    expected = (query @ key.mT * 0.3).masked_fill(~seen, float("-inf")).softmax(-1) @ value
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("groups", [2, 8])
def test_every_mask_begins_at_an_address_that_kernels_take(monkeypatch, groups):
    """Over turns that begin anywhere: kernels on CUDA require that addresses are multiples of 16
    bytes."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": groups}
    target = Target(build_model(64, dtype=torch.bfloat16, **heads))
    offsets = set()
    attend = torch.nn.functional.scaled_dot_product_attention

    def looked_at(query, key, value, attn_mask=None, *rest, **named):
        if attn_mask is not None:
            offsets.add(attn_mask.storage_offset() * attn_mask.element_size() % 16)
        return attend(query, key, value, attn_mask, *rest, **named)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", looked_at)
    lm = SpeculativeLM(target)
    past = Conversation()
    text = torch.arange(21)[None]
    for more in (5, 6, 7, 300):
        written = generated(lm, text, max_new_tokens=6, past_key_values=past).sequences
        text = torch.cat([written, torch.arange(more)[None] % 64], dim=1)
    assert offsets == {0}


def test_a_model_whose_layers_have_hooks_that_move_inputs(tiny_target):
    model = tiny_target().model
    hooked = dispatch_model(model, {"": "cpu"}, main_device="cpu", force_hooks=True)
    for compile in (False, True):
        lm = SpeculativeLM.from_pretrained(
            Target(hooked), drafter="prompt-lookup", compile=compile, adaptive=False
        )
        check_identity(lm, [torch.arange(1, 7)])
