"""Decoder layers of any transformers model, run as a draft's.

Their attention reads keys and values through a KV view.

transformers' layers call the attention function that their config names. Ours hands queries, keys
and values to the KV view of the forward, so that one class serves training-time test and the draft
cache alike:

    layers = build_layers({"model_type": "deepseek_v3", ...}, 1)
    layers.run(layers.blocks[0], x_BTD, positions_BT, partial(kv.attend, 0))

Letters in tensor names: B batch, T time, H query heads, G key-value heads, E head size, D hidden
size.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import CONFIG_MAPPING, AttentionInterface, AutoConfig, AutoModel, PreTrainedConfig

from ...options import shown

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`KVView.attend` of one layer: queries, keys and values to [B, H, T, E]."""
ATTENTION = "headstart_draft"
"""Name of our attention function for transformers."""
CANNOT = {
    "softcap": "caps its attention scores",
    "s_aux": "has attention sinks",
    "sliding_window": "attends to a sliding window",
}
"""Arguments of an attention function that a KV view has no counterpart for, if they are not
None."""
MOST_LAYERS = 2**12
"""Most blocks of a target. Transformers makes lists as long as a config says."""
UNLIKE_A_DECODER = (
    AttributeError,
    IndexError,
    KeyError,
    NotImplementedError,
    RuntimeError,
    StrictDataclassError,
    TypeError,
)
"""What building or calling layers raises where a model is of another kind."""
OF_LOADING = (
    "_name_or_path",
    "auto_map",
    "dtype",
    "quantization_config",
    "torch_dtype",
    "transformers_version",
)
"""Keys of a config that say how a model is stored."""
ALIASES = {"mimo": "qwen2"}
"""Model types that transformers reads by a repository's own code alone, and those whose decoder
layer they have."""
ATTENTION_KINDS = ("full_attention", "attention")
"""How versions of transformers call a Nemotron-H block with attention."""
RECURRENT_KINDS = ("linear_attention", "mamba")
"""And one with a state."""


def draft_attention(
    module: nn.Module,
    query_BHTE: Tensor,
    key_BGTE: Tensor,
    value_BGTE: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    draft_attend: Attend | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention [B, T, H, E] through the KV view of this forward, as transformers calls it.

    Keys and values of different widths (multi-head latent attention) are padded with zeros to one
    width.
    """
    assert draft_attend is not None and attention_mask is None
    for name, what in CANNOT.items():
        if others.get(name) is not None:
            raise ValueError(f"{type(module).__name__} {what}, which a draft layer does not")
    width = query_BHTE.shape[-1]
    value_width = value_BGTE.shape[-1]
    size = max(width, value_width)
    # A KV view scales by 1 / sqrt(size). Scale the queries so that the product is `scaling`.
    scale = (width**-0.5 if scaling is None else scaling) * size**0.5
    query_BHTE = _widened(query_BHTE * scale, size)
    out_BHTE = draft_attend(query_BHTE, _widened(key_BGTE, size), _widened(value_BGTE, size))
    return out_BHTE[..., :value_width].transpose(1, 2), None


AttentionInterface.register(ATTENTION, draft_attention)


def _widened(states: Tensor, size: int) -> Tensor:
    """States [..., E] with zeros up to a width."""
    missing = size - states.shape[-1]
    return states if missing == 0 else F.pad(states, (0, missing))


class JoinedBlocks(nn.Module):
    """Blocks that make one layer together: Nemotron-H's have either attention or an MLP."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x_BTD: Tensor, **others: Any) -> Tensor:
        for block in self.blocks:
            x_BTD = block(x_BTD, **others)
        return x_BTD


class DraftLayers:
    """Decoder layers of a transformers class, which a head registers, and what they share."""

    def __init__(self, config: PreTrainedConfig, groups: int, head_dim: int) -> None:
        """Build the layers of a config with as many layers, on the default device."""
        # A whole model is built for its layers: they need its config, norm and rotary embedding.
        model = _model_of(config)
        self.config = model.config
        self._experts = getattr(self.config, "_experts_implementation", None)
        self.blocks: nn.ModuleList = _layers_of(model)
        self.groups = groups
        """Key and value heads that a KV cache holds."""
        self.head_dim = head_dim
        """Width of a cached head: the larger one of keys and values."""
        # Nemotron-H calls these three `mlp_hidden_act`, `layer_norm_epsilon` and `norm_f`.
        self.hidden_act: str = (
            getattr(self.config, "hidden_act", None) or self.config.mlp_hidden_act
        )
        self.eps: float = (
            getattr(self.config, "rms_norm_eps", None) or self.config.layer_norm_epsilon
        )
        self._norm_class: Any = type(getattr(model, "norm", None) or model.norm_f)
        # Not registered by a head: its frequencies must stay float32 and out of checkpoints.
        self._rotary = _Rotary(model)

    def norm(self) -> nn.Module:
        """A new norm of the model's own class."""
        return self._norm_class(self.config.hidden_size, eps=self.eps)

    def run(self, block: nn.Module, x_BTD: Tensor, positions_BT: Tensor, attend: Attend) -> Tensor:
        """The residual stream after a block."""
        # The kernels that transformers chooses for experts know no float64.
        self.config._experts_implementation = (
            "eager" if x_BTD.dtype == torch.float64 else self._experts
        )
        output = block(
            x_BTD,
            attention_mask=None,
            position_ids=positions_BT,
            draft_attend=attend,
            **self._rotary.of(x_BTD, positions_BT),
        )
        return output[0] if isinstance(output, tuple) else output


class _Rotary:
    """The rotary embedding of a model, if it has one."""

    def __init__(self, model: Any) -> None:
        self._module: nn.Module | None = getattr(model, "rotary_emb", None)
        self._options: dict[str, Any] = {}
        # Some families have other frequencies for other kinds of layers.
        if (
            self._module is not None
            and "layer_type" in inspect.signature(self._module.forward).parameters
        ):
            self._options["layer_type"] = model.config.layer_types[0]

    def of(self, x_BTD: Tensor, positions_BT: Tensor) -> dict[str, Any]:
        """Arguments of a block that tell positions, by name."""
        if self._module is None:
            return {}
        if any(buffer.device != x_BTD.device for buffer in self._module.buffers()):
            self._module.to(x_BTD.device)
        return {
            "position_embeddings": self._module(x_BTD, position_ids=positions_BT, **self._options)
        }


def check_layers(config: Mapping[str, Any], where: str) -> None:
    """Refuse a config of more layers than any model has; errors begin with `where`.

    Raises:
        ValueError: the number.
    """
    layers = config.get("num_hidden_layers")
    if isinstance(layers, int) and layers > MOST_LAYERS:
        raise ValueError(
            f"{where} has num_hidden_layers {layers:.6g}, and a model may have {MOST_LAYERS:,}"
        )


def described(config: PreTrainedConfig) -> dict[str, Any]:
    """Return a text config as JSON, in the form that `build_layers` takes.

    It holds the model type, and what differs from the defaults of the config's class.
    """
    keys = {name: value for name, value in config.to_diff_dict().items() if name not in OF_LOADING}
    whole: dict[str, Any] = json.loads(json.dumps(keys, default=str))
    return whole | {"model_type": config.model_type}


def build_layers(target_config: dict[str, Any], count: int) -> DraftLayers:
    """Build layers of the kind that a target's config describes.

    They are in float32 and have the starting values of transformers. A hybrid's are those with
    attention. Their MLP is that of the target's last layer, dense or a mixture of experts.

    Args:
        target_config: the target's text config with its model_type, as `PreTrainedConfig.to_dict`
            writes it.
        count: number of layers.

    Raises:
        ValueError: a model type that transformers does not know, or whose layers cannot be run
            here, with the reason.
    """
    name = target_config.get("model_type")
    try:
        config = layers_config(target_config, count)
        with torch.device("meta"):
            model = _model_of(config)
            groups, head_dim = _cached_shape(model)
    except ValueError as error:
        raise ValueError(
            f"no draft layer can be made of the layers of {name!r}: {error}"
        ) from error
    except UNLIKE_A_DECODER as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(
            f"no draft layer can be made of the layers of {name!r}: they are not run as those of a"
            f" decoder with rotary positions ({reason})"
        ) from error
    return DraftLayers(config, groups, head_dim)


def layers_config(target_config: dict[str, Any], count: int) -> PreTrainedConfig:
    """Return the config of a model of `count` draft layers of a target's kind.

    Its vocabulary has one token.
    """
    # 1. Fewer layers, one token: no memory for an embedding. Special tokens would lie outside it.
    whole = _config_of(target_config)
    full = whole.to_dict()
    last = whole.num_hidden_layers - 1
    changes: dict[str, Any] = {"num_hidden_layers": count, "vocab_size": 1}
    changes |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))

    # 2. Full attention, where a model has one list or number for the kinds of all its layers.
    if full.get("layer_types"):
        changes["layer_types"] = (full.get("mtp_layer_types") or ["full_attention"] * count)[:count]
    elif full.get("sliding_window") is not None:  # a draft layer attends to all of the text
        changes["sliding_window"] = None
    if full.get("mtp_layers_block_type"):  # an MTP layer of Nemotron-H is several of its blocks
        full.pop("layer_types", None)
        changes.pop("layer_types", None)
        changes["layers_block_type"] = list(full["mtp_layers_block_type"]) * count

    # 3. The MLP of the model's last layer, dense or of experts, in each family's own spelling.
    #    ERNIE's MTP layers are dense, whatever its last layer is.
    if "moe_layer_start_index" in full:
        changes["moe_layer_start_index"] = count
    if full.get("mlp_layer_types"):
        kinds = full.get("mtp_mlp_layer_types") or [full["mlp_layer_types"][last]] * count
        changes["mlp_layer_types"] = kinds[:count]
    if full.get("first_k_dense_replace") is not None:  # DeepSeek: the first k layers are dense
        changes["first_k_dense_replace"] = 0 if last >= full["first_k_dense_replace"] else count
    # Qwen: every `decoder_sparse_step`-th layer has experts, except those listed.
    if "mlp_only_layers" in full:
        step = full.get("decoder_sparse_step") or 1
        dense = last in (full["mlp_only_layers"] or []) or (last + 1) % step > 0
        changes["mlp_only_layers"] = list(range(count)) if dense else []
        changes["decoder_sparse_step"] = 1
    return _config_of(full | changes)


def _config_of(config: dict[str, Any]) -> PreTrainedConfig:
    """A transformers config from its model_type and keys."""
    keys = dict(config)
    kind = str(keys.pop("model_type", None))
    known = ALIASES.get(kind, kind)
    if known not in CONFIG_MAPPING:
        raise ValueError(f"this version of transformers knows no model_type {shown(kind)}")
    check_layers(keys, f"its model of type {known!r}")
    return AutoConfig.for_model(known, **keys)


def _model_of(config: PreTrainedConfig) -> Any:
    """The decoder of a config, whose layers attend through a KV view."""
    # `eager` suits every model; ours takes its place below.
    model = AutoModel.from_config(config, attn_implementation="eager")
    parts = ["layers", "norm", "rotary_emb"]
    if config.model_type == "nemotron_h":  # has no positions: its states know the order
        parts = ["layers", "norm_f"]
    for part in parts:
        if getattr(model, part, None) is None:
            raise ValueError(f"{type(model).__name__} has no {part}")
    model.config._attn_implementation = ATTENTION
    return model


def _layers_of(model: Any) -> nn.ModuleList:
    """A model's decoder layers, each of which attends once."""
    kinds = getattr(model.config, "mtp_layers_block_type", None)
    if not kinds:
        return model.layers
    attending = sum(kind in ATTENTION_KINDS for kind in kinds)
    recurrent = any(kind in RECURRENT_KINDS for kind in kinds)
    if attending != 1 or recurrent:
        raise ValueError(
            f"an MTP layer of blocks {', '.join(kinds)} is not one with attention once and no state"
            " besides"
        )
    # Blocks [attention, mlp] and 4 of the model's layers: (0, 1) and (2, 3).
    return nn.ModuleList(
        JoinedBlocks(model.layers[start : start + len(kinds)])
        for start in range(0, len(model.layers), len(kinds))
    )


def _cached_shape(model: Any) -> tuple[int, int]:
    """Return the number and width of the heads that attention caches.

    They are found by a forward of the first layer's attention over one token.
    """
    layer = _layers_of(model)[0]
    attention = getattr(layer, "self_attn", None)
    if isinstance(layer, JoinedBlocks):
        attention = next(
            block.mixer for block in layer.blocks if block.block_type in ATTENTION_KINDS
        )
    if attention is None:
        raise ValueError(f"{type(layer).__name__} has no self_attn")
    shapes: list[tuple[int, int]] = []

    # In the place of a KV view: it notes what it is given.
    def attend(query_BHTE: Tensor, key_BGTE: Tensor, value_BGTE: Tensor) -> Tensor:
        shapes.append((key_BGTE.shape[1], key_BGTE.shape[-1]))
        return value_BGTE.new_empty(*query_BHTE.shape[:-1], value_BGTE.shape[-1])

    x_11D = torch.empty(1, 1, model.config.hidden_size, dtype=torch.float32)
    position_11 = torch.zeros(1, 1, dtype=torch.int64)
    attention(
        hidden_states=x_11D,
        attention_mask=None,
        position_ids=position_11,
        draft_attend=attend,
        **_Rotary(model).of(x_11D, position_11),
    )
    if len(shapes) != 1:
        raise ValueError(f"{type(attention).__name__} attends {len(shapes)} times in one forward")
    return shapes[0]
