"""What users put on a model of `changed_weights`: hooks, forwards, parts, values of its config.

Each change returns the function that takes it back.
"""

from __future__ import annotations

import types

import torch
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize


def noisy(states):
    """States with the same noise each time."""
    noise = torch.randn(states.shape[-1], generator=torch.Generator().manual_seed(3))
    return states + 5 * noise.to(states)


def shifted(module, inputs, output):
    """A hook that changes what a module returns."""
    if isinstance(output, tuple):
        return (noisy(output[0]), *output[1:])
    return noisy(output)


def on_inputs(module, inputs):
    return (noisy(inputs[0]), *inputs[1:])


def forward_replaced(module):
    """Another forward in the place of a module's own; returns the function that takes it away."""
    original = module.forward

    def forward(self, *inputs, **named):
        return shifted(self, inputs, original(*inputs, **named))

    module.forward = types.MethodType(forward, module)
    return lambda: vars(module).pop("forward")


def hooked(module):
    return module.register_forward_hook(shifted).remove


def hooked_before(module):
    return module.register_forward_pre_hook(on_inputs).remove


def hooked_everywhere(kind):
    """A hook on all modules of the process, which acts on those of a class."""

    def shifted_there(module, inputs, output):
        return shifted(module, inputs, output) if type(module) is kind else None

    return register_module_forward_hook(shifted_there).remove


def other_method(kind):
    """Another forward of a class."""
    original = kind.forward
    kind.forward = lambda self, *inputs, **named: noisy(original(self, *inputs, **named))

    def take_away():
        kind.forward = original

    return take_away


class Flipped(torch.nn.Module):
    def forward(self, weight):
        return 30 * weight.flip(0)


def parametrized(module):
    parametrize.register_parametrization(module, "weight", Flipped())
    return lambda: parametrize.remove_parametrizations(module, "weight", leave_parametrized=False)


def other_value(module, name, value):
    """Another value of an attribute or a part."""
    original = getattr(module, name)
    setattr(module, name, value)
    return lambda: setattr(module, name, original)


CHANGES = {
    "block": lambda model: hooked(model.model.layers[1]),
    "block's attention": lambda model: hooked(model.model.layers[1].self_attn),
    "mlp's input": lambda model: hooked_before(model.model.layers[1].mlp),
    "linear layer": lambda model: hooked(model.model.layers[1].mlp.down_proj),
    "embedding": lambda model: hooked(model.model.embed_tokens),
    "final norm": lambda model: hooked(model.model.norm),
    "LM head's input": lambda model: hooked_before(model.lm_head),
    "forward of an mlp": lambda model: forward_replaced(model.model.layers[1].mlp),
    "forward of a linear layer": lambda model: forward_replaced(
        model.model.layers[1].self_attn.q_proj
    ),
    "forward of a norm": lambda model: forward_replaced(model.model.norm),
    "forward of a class": lambda model: other_method(type(model.model.norm)),
    "hook on all modules": lambda model: hooked_everywhere(type(model.model.norm)),
    "parametrization": lambda model: parametrized(model.model.layers[1].mlp.down_proj),
    "scale of attention": lambda model: other_value(
        model.model.layers[0].self_attn, "scaling", 5.0
    ),
    "another part": lambda model: other_value(
        model.model.layers[1],
        "mlp",
        torch.nn.Linear(*[model.config.hidden_size] * 2, device=model.device),
    ),
    "fewer layers": lambda model: other_value(model.model, "layers", model.model.layers[:1]),
    "number of layers": lambda model: other_value(model.config, "num_hidden_layers", 1),
    "sliding window": lambda model: other_value(model.config, "sliding_window", 2),
}
