"""Our kernels for linear layers and attention in a compiled graph on a CPU, in place of oneDNN's and torch's.

A check of a few tokens is a pass over the target's weights: how fast they come from memory is its price. oneDNN reads
the layers of a small model at about half of that speed, and each token beyond the first costs it time; `kernels.cpp`
reads at nearly all of it, and a dozen tokens take half as long again as one. It computes each row alike, however many
there are and wherever the slots lie that it sees.
"""

from __future__ import annotations

import hashlib
import warnings
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._inductor.codecache import CppCodeCache
from torch._inductor.custom_graph_pass import CustomGraphPass

SOURCE = Path(__file__).with_name("kernels.cpp")
WHOLE = 32
"""Heads must be rows of so many numbers: what a register of any CPU holds, or several."""


@cache
def loaded() -> bool:
    """Whether the kernels could be compiled for this machine; torch keeps the library on disk."""
    try:
        CppCodeCache.load(SOURCE.read_text(encoding="utf-8"), "cpu")
    except Exception as error:  # whatever a compiler or a loader may say
        reason = str(error).strip().split("\n")[0]
        warnings.warn(f"graphs keep torch's kernels: {SOURCE.name} could not be compiled: {reason}", stacklevel=2)
        return False

    @torch.library.register_fake("headstart::linear")
    def _(rows: Tensor, packed: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
        return rows.new_empty(*rows.shape[:-1], outputs)

    @torch.library.register_fake("headstart::attention")
    def _(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
        return query.new_empty(query.shape)

    return True


class OwnKernels(CustomGraphPass):
    """Puts our kernels where a frozen graph in bfloat16 has oneDNN's linear layers and torch's attention."""

    def __call__(self, graph: fx.Graph) -> None:
        """Changes the graph in place."""
        linear = torch.ops.mkldnn._linear_pointwise.default
        attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        linears = [node for node in graph.find_nodes(op="call_function", target=linear) if _plain_linear(node)]
        attentions = [node for node in graph.find_nodes(op="call_function", target=attention) if _masked(node)]
        if (linears or attentions) and loaded():
            for node in linears:
                _swap_linear(graph, node)
            for node in attentions:
                _swap_attention(graph, node)

    def uuid(self) -> bytes:
        """What a graph on disk is known by."""
        return hashlib.sha256(SOURCE.read_bytes() + Path(__file__).read_bytes()).digest()


def _plain_linear(node: fx.Node) -> bool:
    """Whether a layer is in bfloat16, has frozen weights and no activation of its own."""
    weight, activation = node.args[1], node.args[3]
    frozen = isinstance(weight, fx.Node) and weight.op == "get_attr"
    return frozen and activation == "none" and node.meta["val"].dtype == torch.bfloat16


def _masked(node: fx.Node) -> bool:
    """Whether it is attention in bfloat16 with an additive mask, without dropout, by heads of a fitting size."""
    query, mask = _value(node.args[0]), node.kwargs.get("attn_mask")
    fits = query.dtype == torch.bfloat16 and query.shape[-1] % WHOLE == 0
    found_alone = all(user.args[1] == 0 for user in node.users)  # the other result is for training
    masked = isinstance(mask, fx.Node) and _value(mask).dtype == query.dtype
    return fits and masked and found_alone and not any(node.args[3:])


def _value(node: Any) -> Tensor:
    """A node's value, without numbers in it."""
    value: Tensor = node.meta["val"]
    return value


def _swap_linear(graph: fx.Graph, node: fx.Node) -> None:
    module: Any = graph.owning_module
    rows, weight, bias = cast(tuple[fx.Node, fx.Node, fx.Node | None], node.args[:3])
    name = str(weight.target)
    dense = getattr(module, name).to_dense()
    module.register_buffer(f"{name}_packed", torch.ops.headstart.pack(dense))
    with graph.inserting_before(node):
        given = (rows, graph.get_attr(f"{name}_packed"), bias, dense.shape[0])
        own = graph.call_function(torch.ops.headstart.linear.default, given)
    _replace(node, own)
    if not weight.users:  # oneDNN's copy is not kept beside ours
        graph.erase_node(weight)
        delattr(module, name)


def _swap_attention(graph: fx.Graph, node: fx.Node) -> None:
    query, key, value = node.args[:3]
    scale = node.kwargs.get("scale") or _value(query).shape[-1] ** -0.5
    with graph.inserting_before(node):
        given = (query, key, value, node.kwargs["attn_mask"], scale)
        own = graph.call_function(torch.ops.headstart.attention.default, given)
    for found in [*node.users]:
        _replace(found, own)
    graph.erase_node(node)


def _replace(node: fx.Node, own: fx.Node) -> None:
    own.meta.update(node.meta)
    node.replace_all_uses_with(own)
    node.graph.erase_node(node)
