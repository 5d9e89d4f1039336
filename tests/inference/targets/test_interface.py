"""Whatever a version of transformers calls the cache and counts as a hidden state, heads read the
right block."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers import build_model, generated, head_for
from messages import refused
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.utils.generic import ModelOutput

from headstart.inference import SpeculativeLM, Target

pytestmark = pytest.mark.versions
VOCAB = 40
LAYERS = 4
TOKENS_BT = torch.tensor([[3, 9, 27, 1, 5], [8, 2, 4, 6, 7]])
NAME = next(
    name
    for name in ("cache", "past_key_values")
    if name in inspect.signature(LlamaForCausalLM.forward).parameters
)
"""The cache's name in the installed transformers."""


def with_embedding(states: tuple[Tensor, ...], chosen: list[int]) -> tuple[Tensor | None, ...]:
    """Entry i is the input of block i; as transformers 5.23 counts."""
    return tuple(state if i in chosen else None for i, state in enumerate(states))


def without_embedding(states: tuple[Tensor, ...], chosen: list[int]) -> tuple[Tensor | None, ...]:
    """Entry i is the output of block i; as transformers 5.17 to 5.22 count."""
    return tuple(state if i in chosen else None for i, state in enumerate(states[1:]))


def all_of_them(states: tuple[Tensor, ...], chosen: list[int]) -> tuple[Tensor, ...]:
    """A list counts as True; as before transformers 5.17."""
    return states


def one_block_late(states: tuple[Tensor, ...], chosen: list[int]) -> tuple[Tensor | None, ...]:
    """Entries of no known meaning."""
    return tuple(
        state if i in chosen else None for i, state in enumerate((*states[1:], states[-1]))
    )


@dataclass
class Output(ModelOutput):
    """What the model of `wrapped` returns."""

    logits: Tensor | None = None
    kv_states: Any = None
    hidden_states: Any = None


def plain_model() -> LlamaForCausalLM:
    return build_model(VOCAB, layers=LAYERS, dtype=torch.float32)


def wrapped(
    counting=with_embedding, taken: str = "kv_states", returns_cache: bool = True
) -> LlamaForCausalLM:
    """A tiny Llama whose cache is called kv_states, and which counts hidden states by
    `counting`."""
    model = plain_model()
    own = model.forward

    def forward(
        input_ids=None,
        kv_states=None,
        attention_mask=None,
        position_ids=None,
        use_cache=None,
        logits_to_keep=0,
        output_hidden_states=False,
    ):
        output = own(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            output_hidden_states=bool(output_hidden_states),
            **{NAME: kv_states},
        )
        states = output.get("hidden_states")
        if isinstance(output_hidden_states, list):
            states = counting(states, output_hidden_states)
        return Output(output.logits, output.get(NAME) if returns_cache else None, states)

    if taken != "kv_states":
        parameters = inspect.signature(forward).parameters.values()
        renamed = [
            each.replace(name=taken) if each.name == "kv_states" else each for each in parameters
        ]
        forward.__signature__ = inspect.Signature(renamed)
    model.forward = forward
    return model


def block_outputs(model: LlamaForCausalLM, tokens_BT: Tensor) -> list[Tensor]:
    """The state after each block, by hooks."""
    outputs: list[Tensor] = []

    def keep(module, inputs, output):
        outputs.append(output[0] if isinstance(output, tuple) else output)

    handles = [block.register_forward_hook(keep) for block in model.model.layers]
    with torch.no_grad():
        model(input_ids=tokens_BT, use_cache=False)
    for handle in handles:
        handle.remove()
    return outputs


@pytest.mark.parametrize("counting", [with_embedding, without_embedding, all_of_them, None])
@pytest.mark.parametrize("layers", [(0,), (1,), (0, 2), (2, -1), (-1,), (1, 1), ()])
def test_features_are_the_states_after_the_blocks_bit_for_bit(counting, layers):
    model = plain_model() if counting is None else wrapped(counting)
    target = Target(model)
    expected = block_outputs(model, TOKENS_BT)
    with torch.no_grad():
        expected[-1] = model.model.norm(expected[-1])  # -1 is after the final norm
    features_BTF, last_BTD = target.read(TOKENS_BT, layers)
    wanted = [expected[layer] for layer in layers]
    assert torch.equal(features_BTF, torch.cat(wanted, dim=-1) if wanted else last_BTD[..., :0])
    assert torch.equal(last_BTD, expected[-1])
    with torch.inference_mode():
        decoded = target.engine.forward_chain(
            TOKENS_BT, 0, target.engine.new_cache(len(TOKENS_BT)), layers
        )
    torch.testing.assert_close(decoded.features_BNF, features_BTF, rtol=1e-4, atol=1e-4)


def test_a_model_of_one_block_has_one_feature_layer():
    model = build_model(VOCAB, layers=1, dtype=torch.float32)
    with torch.no_grad():
        expected = model.model.norm(block_outputs(model, TOKENS_BT)[0])
    assert torch.equal(Target(model).read(TOKENS_BT, (-1,))[0], expected)


@pytest.mark.parametrize(
    ("kind", "options"), [("eagle3", {"feature_layers": [0, 1, 2]}), ("medusa", {})]
)
@pytest.mark.parametrize("counting", [with_embedding, without_embedding, all_of_them])
def test_a_cache_by_any_name_and_any_count_decode_alike(counting, kind, options):
    plain = Target(plain_model())
    named = Target(wrapped(counting))
    assert (plain.cache_interface.name, named.cache_interface.name) == (NAME, "kv_states")
    assert named.engine.state_shapes == plain.engine.state_shapes
    outputs = []
    for target in (plain, named):
        head = head_for(target, kind, **options)
        lm = SpeculativeLM.from_pretrained(target, head, compile=False, adaptive=False)
        outputs.append(generated(lm, TOKENS_BT, max_new_tokens=12))
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    # features of another block would be accepted less
    assert outputs[0].stats.rounds == outputs[1].stats.rounds


def test_hidden_states_that_are_no_blocks_are_refused():
    with refused("5 hidden states 4 blocks"):
        Target(wrapped(one_block_late)).read(TOKENS_BT, (1,))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"returns_cache": False}, "LlamaForCausalLM cache logits"),
        ({"taken": "memory"}, "'kv_states' memory"),
    ],
)
def test_a_model_without_a_cache_of_one_name_is_refused(options, words):
    with refused(words):
        Target(wrapped(**options)).engine.new_cache(1)
