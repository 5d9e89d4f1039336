"""Adapters of the package peft that a target carries, and compiled models: which can be decoded.

LoRA and its relatives are weights in the layers: every forward applies them, ours too. Adapters
that act outside of the layers, or only on some tokens or rows, are refused, each with its name.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable
from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedModel

ROW_HOOK = "_adapter_names_pre_forward_hook"
"""The hook by which peft's `generate(adapter_names=...)` gives each row its adapter."""
CALL_HOOKS = (ROW_HOOK, "_alora_offsets_pre_forward_hook")
"""The hooks of one call of peft's generate, which it leaves where that call ends by an error."""


def unwrapped(source: Any) -> Any:
    """Return the model inside a `PeftModel` or a `torch.compile`d one; anything else as it is.

    A compiled model's own forward is not called: forwards over trees have other shapes.

    Raises:
        ValueError: an adapter that `check_adapters` refuses.
    """
    source = getattr(source, "_orig_mod", source)
    if not hasattr(source, "peft_config") or not hasattr(source, "get_base_model"):
        return source
    check_prompt_learning(source)
    return source.get_base_model()


def active_adapters(model: PreTrainedModel) -> Hashable:
    """Return a value that changes with each layer's active and merged peft adapters."""
    return tuple(
        (tuple(layer.active_adapters), layer.disable_adapters, tuple(layer.merged_adapters))
        for layer in _adapted_layers(model)
    )


def check_adapters(model: PreTrainedModel) -> None:
    """Refuse adapters that a forward over drafts cannot apply as `model.generate` would.

    Called before each generation: peft prepares the model anew for each of its own.

    Raises:
        ValueError: prompt learning, an adapter that begins at an invocation, or one for each row.
    """
    # 1. Prompt learning acts in the PeftModel around the model. While a PeftModel generates, the
    # model has a method of it in place of its own, which shows that it is there.
    prepares = getattr(model.prepare_inputs_for_generation, "__self__", model)
    if prepares is not model and hasattr(prepares, "peft_config"):
        check_prompt_learning(prepares)
    if sys.modules.get("peft") is None:
        return

    # 2. What acts in the layers: adapters with invocation tokens, and hooks that give each row its
    # adapter.
    active: set[str] = set()
    for layer in _adapted_layers(model):
        if not layer.disable_adapters:
            active.update(layer.active_adapters)
    configs = getattr(model, "peft_config", None) or {}
    hooks: set[str] = set()
    for module in model.modules():
        hooks.update(_name(hook) for hook in module._forward_pre_hooks.values())
    reason = ""
    if ROW_HOOK in hooks:
        reason = (
            "adapter_names gives each row an adapter of its own, and rows are decoded together"
            " with one; call generate for each adapter, after set_adapter"
        )
    for name in sorted(active):
        if getattr(configs.get(name), "alora_invocation_tokens", None):
            reason = (
                f"the adapter {name!r} is an activated LoRA, whose weights act from its invocation"
                " tokens on and not before: drafts are verified with the same weights at every"
                " token; give a model with a LoRA of another kind, or without an adapter"
            )
    if reason:
        # peft leaves its hooks when a call ends by an error, and the next call would run them.
        for module in model.modules():
            for number, hook in list(module._forward_pre_hooks.items()):
                if _name(hook) in CALL_HOOKS:
                    del module._forward_pre_hooks[number]
                    module._forward_pre_hooks_with_kwargs.pop(number, None)
        raise ValueError(reason)


def check_prompt_learning(model: Any) -> None:
    """Refuse a `PeftModel` whose active adapter is outside of the layers.

    Raises:
        ValueError: prompt tuning or a relative; names it.
    """
    config = model.active_peft_config
    disabled = getattr(model, "_adapters_disabled", False)
    if config.is_prompt_learning and not disabled:
        raise ValueError(
            f"the adapter of {type(model).__name__} is of kind {config.peft_type}, which adds"
            " tokens of its own to every text and not weights to the layers; give a model with"
            " LoRA or the like, or without an adapter"
        )


def _adapted_layers(model: nn.Module) -> list[Any]:
    """The layers of a model to which peft has added adapters."""
    # Importing peft takes a second. Whoever made a model with adapters has imported it.
    if sys.modules.get("peft") is None:
        return []
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [module for module in model.modules() if isinstance(module, BaseTunerLayer)]


def _name(hook: Any) -> str:
    """The name of a hook's function, to which arguments may be bound."""
    function = hook.func if isinstance(hook, partial) else hook
    return getattr(function, "__name__", "")
