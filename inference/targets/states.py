"""Layers that keep a state: a convolution's window, a recurrence, or both.

Such a layer may have keys and values as well.

A state follows one text and cannot be taken back. `state_cache` decodes with drafts all the same,
if a model's modules read several tokens from a state as they would read them one by one. Not all of
them do, and none says so: `check_states` tries it.

Letters in tensor names: T time, V vocabulary.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers import __version__ as transformers_version
from transformers.cache_utils import Cache, CacheLayerMixin

from ...files import BROKEN, one_line
from ..cache.kv_cache import CacheInterface
from ..cache.state_cache import RECURRENCE, WINDOW, CachedLayer, StatefulInterface
from .interface import shape_of

STATE_LAYERS = ("conv", "linear_attention", "mamba", "hybrid", "hybrid_sliding")
"""transformers' names of layers with a state; older versions say mamba for linear_attention."""
ATTENTION_KIND = {
    "attention": "full_attention",  # in older versions
    "full_attention": "full_attention",
    "hybrid": "full_attention",
    "sliding_attention": "sliding_attention",
    "hybrid_sliding": "sliding_attention",
}
"""The mask that a layer with keys and values needs, by transformers' name of the layer."""
WITHOUT_CACHE = ("moe", "mlp", "dummy")
"""transformers' names of layers that keep nothing."""
READ_AT_ONCE = 5
"""Tokens that the trial reads from a state: more than a convolution's window, fewer than any chunk
of a recurrence."""
READ_BEFORE = 6
"""Tokens that the trial reads before those, to have a state."""
STATE_TOLERANCE = 0.05
"""Largest relative difference of states. An empty state makes one of 0.3 and more. Nemotron-H and
Zamba2 bound the step size of the recurrence from below where several tokens are read, and not for a
single one: up to 0.006."""


def keeps_states(model: PreTrainedModel) -> bool:
    """Whether some layer keeps a state, by layer names, or by the model's class without any."""
    layer_types = getattr(model.config.get_text_config(), "layer_types", None)
    if layer_types is None:
        return bool(getattr(model, "_is_stateful", False))
    return any(name in STATE_LAYERS for name in layer_types)


def kinds_beside_states(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the attention masks that a model with states needs; none if no layer attends.

    Raises:
        ValueError: a layer of another kind.
    """
    layer_types = getattr(model.config.get_text_config(), "layer_types", None) or ()
    known = (*ATTENTION_KIND, *STATE_LAYERS, *WITHOUT_CACHE)
    unknown = sorted(set(layer_types) - set(known))
    if unknown:
        raise ValueError(
            f"{type(model).__name__} has layers of kind {unknown[0]!r}; beside layers with a"
            " convolution or recurrent state, a target's layers must be full_attention or"
            " sliding_attention"
        )
    return tuple(sorted({ATTENTION_KIND[name] for name in layer_types if name in ATTENTION_KIND}))


def stateful_interface(model: PreTrainedModel) -> StatefulInterface:
    """How the model takes its cache, by a forward over one token.

    Raises:
        ValueError: its states do not lie in a cache of transformers where they can be set, with the
            reason.
    """
    # 1. A forward over one token.
    name = type(model).__name__
    token_11 = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    try:
        with torch.no_grad():
            output = model(input_ids=token_11, **_positions(model, 0, 1), use_cache=True)
    except torch.OutOfMemoryError:
        raise
    except (LookupError, NotImplementedError, RuntimeError, *BROKEN) as error:
        raise ValueError(
            f"{name} of transformers {transformers_version} fails on one token with a cache of its"
            f" own, with {type(error).__name__}: {one_line(error)}; try another version of"
            " transformers"
        ) from error

    # 2. Its cache must be transformers' own, returned and taken by one name.
    taken = inspect.signature(model.forward).parameters
    returned = [key for key, value in output.items() if isinstance(value, Cache) and key in taken]
    if not returned:
        raise ValueError(
            f"{name} keeps its recurrent state in its own modules or in a form of its own, not in a"
            f" transformers Cache (its outputs are {', '.join(output)}): the state cannot be put"
            " back after a rejected draft"
        )
    own_class = type(output[returned[0]])
    if own_class.__module__ != Cache.__module__:
        raise ValueError(
            f"{name} keeps its recurrent state in a cache of its own ({own_class.__name__}) and"
            " takes no other, so the state cannot be put back after a rejected draft"
        )

    # 3. What each layer keeps; of those that attend, keys come first, then values.
    cache_layers = output[returned[0]].layers
    layers = [_cached_layer(model, layer) for layer in cache_layers]
    attending = [layer for layer, known in zip(cache_layers, layers, strict=True) if known.has_keys]
    keys_and_values = [layer.keys for layer in attending] + [layer.values for layer in attending]
    shapes = [shape_of(tensor, model) for tensor in keys_and_values]
    return StatefulInterface(CacheInterface(returned[0], shapes), layers)


def _cached_layer(model: PreTrainedModel, layer: Any) -> CachedLayer:
    windows: dict[int, Tensor | None] = getattr(layer, "conv_states", {})
    recurrences: dict[int, Tensor | None] = getattr(layer, "recurrent_states", {})
    if not isinstance(windows, dict) or not isinstance(recurrences, dict):
        raise ValueError(
            f"{type(model).__name__} keeps a recurrent state, which transformers"
            f" {transformers_version} hands over in a way that cannot be put back after a rejected"
            " draft; update transformers to 5.14 or later"
        )
    states = {}
    for kind, by_number in ((WINDOW, windows), (RECURRENCE, recurrences)):
        for number, state in by_number.items():
            if state is not None:
                states[kind, number] = state.new_empty(0, *state.shape[1:])  # no rows
    has_keys = isinstance(layer, CacheLayerMixin) and getattr(layer, "keys", None) is not None
    return CachedLayer(has_keys, states)


def states_follow_chunks(model: PreTrainedModel) -> bool:
    """Whether reading several tokens from a state equals reading them one by one.

    Both the logits and the states must agree.

    Modules of some families, and of others in older versions of transformers, read several tokens
    as if they began a text. The states are compared too, roughly: in a model whose logits hardly
    depend on them, such a fault shows there alone.
    """
    embedding: Any = model.get_input_embeddings()
    vocab_size = embedding.weight.shape[0]
    length = READ_BEFORE + READ_AT_ONCE
    tokens = [(7919 * i + 31) % vocab_size for i in range(length)]
    tokens_1T = torch.tensor([tokens], device=model.device)

    # 6 tokens and then 5 single ones is what `generate` does. It is compared with 6 tokens and then
    # 5 at once, as a round reads them, and with all 11 at once.
    expected_TV, expected_states = _read_by_parts(
        model, tokens_1T, [READ_BEFORE, *[1] * READ_AT_ONCE]
    )
    # Recurrences are computed in float32 at most.
    eps = max(torch.finfo(model.dtype).eps, torch.finfo(torch.float32).eps)
    for sizes in ([READ_BEFORE, READ_AT_ONCE], [length]):
        found_TV, found_states = _read_by_parts(model, tokens_1T, sizes)
        difference_T = _difference(found_TV[-READ_AT_ONCE:], expected_TV[-READ_AT_ONCE:])
        # In a 16-bit format a mixture of experts may send a token or two to other experts.
        logits_differ = difference_T.max() if model.dtype.itemsize > 2 else difference_T.median()
        if not bool(logits_differ <= eps**0.5):  # NaN, too
            return False
        for found, expected in zip(found_states, expected_states, strict=True):
            difference = _difference(found.flatten()[None], expected.flatten()[None])
            if not bool(difference <= STATE_TOLERANCE):  # NaN, too
                return False
    return True


def _difference(found_TX: Tensor, expected_TX: Tensor) -> Tensor:
    """Return the largest difference in each row, relative to the row's largest value, [T].

    It is 0 in rows of zeros.
    """
    size_T = expected_TX.abs().amax(-1).clamp(min=torch.finfo(torch.float32).tiny)
    return (found_TX - expected_TX).abs().amax(-1) / size_T


def _read_by_parts(
    model: PreTrainedModel, tokens_1T: Tensor, sizes: list[int]
) -> tuple[Tensor, list[Tensor]]:
    """Logits [T, V] and last states of a text that is read in parts, one after the other."""
    cache: dict[str, Any] = {}
    logits = []
    start = 0
    for size in sizes:
        part_1T = tokens_1T[:, start : start + size]
        with torch.no_grad():
            output = model(
                input_ids=part_1T, **_positions(model, start, size), **cache, use_cache=True
            )
        cache = {key: value for key, value in output.items() if isinstance(value, Cache)}
        logits.append(output.logits[0].float())
        start += size
    states: list[Tensor] = []
    for layers_cache in cache.values():
        for layer in layers_cache.layers:
            for name in ("conv_states", "recurrent_states"):
                by_number = getattr(layer, name, {})
                states += [state.float() for state in by_number.values() if state is not None]
    return torch.cat(logits), states


def _positions(model: PreTrainedModel, start: int, size: int) -> dict[str, Tensor]:
    """Explicit positions for a model that takes them: some count from 0 in every forward."""
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return {}
    return {"position_ids": torch.arange(start, start + size, device=model.device)[None]}


def check_states(model: PreTrainedModel) -> None:
    """Refuse a model with states whose modules read several tokens from a state wrongly.

    Raises:
        ValueError: the model cannot be decoded with drafts, with the reason.
    """
    if not states_follow_chunks(model):
        raise ValueError(
            f"{type(model).__name__} of transformers {transformers_version} computes other logits"
            " for several tokens read at once after a text than for the same tokens one by one"
            " (its modules begin with an empty state), so drafts cannot be verified"
        )
