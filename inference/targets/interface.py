"""Arguments and outputs of a model's forward, found by trying it on one token.

Versions of transformers name the KV cache differently (`past_key_values`, then `cache`), and count
the states that `output_hidden_states=[...]` selects with or without the embedding. A trial does not
depend on the version.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import EncoderDecoderCache, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from ...heads.base import TargetModules
from ..cache.kv_cache import CacheInterface, StateShape

CACHE_NAMES = ("cache", "past_key_values")
"""Names of the KV cache that transformers is known to use; only for error messages."""


def cache_interface(model: PreTrainedModel, **one_token: Tensor) -> CacheInterface:
    """Find the interface of a model's cache by a forward over one token, `input_ids` [1, 1].

    Raises:
        ValueError: the model has no cache that it returns and takes by one name.
    """
    with torch.no_grad():
        output = model(**one_token, use_cache=True)
    name = _cache_name(model, output)
    cache = output[name]
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    # Keys of all layers, then values. Layers that use another's keys have none.
    states = [getattr(layer, "keys", None) for layer in cache.layers]
    states += [getattr(layer, "values", None) for layer in cache.layers]
    return CacheInterface(name, [shape_of(state, model) for state in states])


def shape_of(state: Tensor | None, model: PreTrainedModel) -> StateShape:
    """Return the shape of a layer's keys or values; empty if it has none or uses another's."""
    if state is None:
        return StateShape(0, 0, model.dtype, model.device)
    return StateShape(state.shape[1], state.shape[3], state.dtype, state.device)  # [B, G, S, E]


def logit_scales(config: Any) -> list[float]:
    """Return the factors on the LM head's output that a config may mean.

    A trial tells whether the model applies them.
    """
    scales = [1.0]
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        value = getattr(config, name, None)
        if value:
            scales.append(float(value))
    if getattr(config, "logits_scaling", None):
        scales.append(1 / config.logits_scaling)
    return scales


def fitting_logits(
    model: PreTrainedModel, modules: TargetModules, before: nn.Module | None, tokens_BT: Tensor
) -> TargetModules | None:
    """Return the modules with the scale and soft cap that yield the model's logits, or None.

    A config that has a scale or a cap does not say that the model applies it: multimodal models may
    not. `before` are the layers between the final norm and the LM head.
    """
    with torch.inference_mode():
        # 1. The model's logits, and the states that the LM head reads.
        output = model(input_ids=tokens_BT, use_cache=False, output_hidden_states=True)
        if not output.hidden_states:
            return None
        last = output.hidden_states[-1]
        states = last if before is None else before(last)
        if states.shape[-1] != modules.lm_head.weight.shape[-1]:
            return None
        states = states.to(modules.lm_head.weight.device)
        expected = output.logits.float()

        # 2. The first of all scales and caps that reproduces the logits; the config's come first.
        tolerance = torch.finfo(model.dtype).eps ** 0.5 * expected.abs().max()
        for scale in (modules.logit_scale, *logit_scales(model.config.get_text_config())):
            for cap in dict.fromkeys((modules.logit_cap, None)):
                tried = replace(modules, logit_scale=scale, logit_cap=cap)
                computed = tried.logits(states).float().to(expected.device)
                if bool((computed - expected).abs().max() <= tolerance):
                    return tried
    return None


def first_block_index(model: PreTrainedModel, layers: int, **one_token: Tensor) -> int:
    """Return the index of the state after block 0, where `output_hidden_states` lists indices.

    The state after block i is i entries on; the last one is the state after the final norm. For a
    model of two blocks, by the way of counting:

        index returned    entries of `hidden_states`
        1                 embedding, block 0, block 1 and final norm
        0                 block 0, block 1 and final norm

    It is found by comparing with the states that a forward over one token returns if all are asked
    for.

    Raises:
        ValueError: the model's hidden states are not those of its `layers` blocks.
    """

    def hidden_states(chosen: bool | list[int]) -> tuple[Tensor | None, ...]:
        """The states that the forward returns for this choice of `output_hidden_states`."""
        with torch.no_grad():
            returned: tuple[Tensor | None, ...] = model(
                **one_token, use_cache=False, output_hidden_states=chosen
            ).hidden_states
        return returned

    everything = hidden_states(True)  # the embedding, then the state after each block
    if len(everything) == layers + 1:
        # Both ways of counting return all entries up to the last one, with None where a state was
        # not asked for.
        index = len(hidden_states([0])) - layers
        if index in (0, 1):
            state = hidden_states([index])[index]
            expected = everything[1]
            if (
                state is not None
                and expected is not None
                and state.ndim == 3
                # bit for bit; NaN equals NaN
                and torch.isclose(state, expected, rtol=0, atol=0, equal_nan=True).all()
            ):
                return index
    raise ValueError(
        f"{type(model).__name__} returns {len(everything)} hidden states for {layers} blocks, and"
        " with output_hidden_states=[index] none of them is the state after the first block,"
        " [batch, time, width], so a head cannot read features of its blocks; decode it with a"
        " drafter without a head"
    )


def filled_cache(inputs: dict[str, Any]) -> Cache | None:
    """Return the KV cache with tokens among a forward's inputs, whatever its name, or None."""
    for value in inputs.values():
        if not isinstance(value, Cache):
            continue
        # The cache of an encoder-decoder has no layers but two caches, and knows its length. One of
        # recurrent states alone does not know how many tokens it has seen.
        layers = getattr(value, "layers", None)
        recurrent = layers and not any(isinstance(layer, CacheLayerMixin) for layer in layers)
        holds_tokens = value.has_previous_state() if recurrent else value.get_seq_length() > 0
        if holds_tokens:
            return value
    return None


def _cache_name(model: PreTrainedModel, output: Any) -> str:
    """The name by which the forward returned its cache, which it must also take."""
    name = type(model).__name__
    returned = [key for key, value in output.items() if isinstance(value, Cache)]
    if not returned:
        raise ValueError(
            f"{name} returns no KV cache: none of its outputs ({', '.join(output)}) is a"
            f" transformers Cache, where {' or '.join(map(repr, CACHE_NAMES))} was looked for;"
            " without one it cannot be decoded"
        )
    taken = inspect.signature(model.forward).parameters
    for key in returned:
        if key in taken:
            return key
    raise ValueError(
        f"{name} returns its KV cache as {returned[0]!r} and takes none of that name; its forward"
        f" takes {', '.join(taken)}"
    )
