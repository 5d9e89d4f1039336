"""Tables of how a project writes draft heads: every key of its config.json, every tensor.

A head's own tables stand in its folder, in `formats.py`. In names {l} counts decoder layers or
blocks, {i} fused features and {h} heads; {next} is l + 1, {blocks} the number of blocks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from ..base import DraftHead

SERVERS = ("vllm", "sglang", "llama.cpp")
"""Projects for which a model card says whether they read the head."""
NEEDED: Any = ...
"""The default of a key without one."""


@dataclass(frozen=True)
class Key:
    """A key of a config.json."""

    meaning: str
    default: Any = NEEDED
    """Value that the format's readers take where the key is absent."""
    only: tuple[Any, ...] = ()
    """Values that a head here can have; all if empty."""
    kind: str = ""
    """Kind of its values, see `KINDS`; with "", of the default where that is true, false or a
    number."""
    option: str = ""
    """Option of the head that it holds, see `written`; "" for what is computed."""


def written(table: dict[str, Key], config: Any) -> dict[str, Any]:
    """The keys of a table that hold options of a head's config; `Keys.options` reads them back."""
    return {name: getattr(config, key.option) for name, key in table.items() if key.option}


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "size": ("a whole number of at least 1", lambda value: _whole(value) and value >= 1),
    "id": ("a whole number of at least 0", lambda value: _whole(value) and value >= 0),
    "positive": (
        "a number above 0",
        lambda value: (
            isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf
        ),
    ),
    "flag": ("true or false", lambda value: isinstance(value, bool)),
    "text": ("a text", lambda value: isinstance(value, str)),
    "object": ("an object", lambda value: isinstance(value, dict)),
    "numbers": (
        "a list of whole numbers",
        lambda value: isinstance(value, list) and all(map(_whole, value)),
    ),
    "texts": (
        "a list of texts",
        lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value),
    ),
}
"""What a key's value must be, and the test of it; null is always allowed where the key may be left
out."""
MAY_COMPUTE = re.compile(
    r"softcap|multiplier|scal(e|ing)|rotary|rope|alibi|causal|window|sink"
    r"|norm|bias|residual|parallel|logit|clip|clamp"
    r"|(^|_)act(_|$)|act_fn|activation|temperature|query_pre|interleave|nope|eps(ilon)?$"
)
"""Names of keys by which a layer may compute something else without having other tensors."""
OF_TENSORS = re.compile(
    r"expert|router|routed|moe|topk|top_k|lora|vision|visual|image|video|audio"
    r"|token|quantization|dropout|initializer|loss"
)
"""Names of keys that speak of tensors, by which they are judged, of text or of training."""
EVIDENCE = {r"sink": r"sink", r"qk_?(layer)?norm": r"\.q_norm\.", r"bias": r"\.bias$"}
"""Names of flags, and of the tensors that a file has where they are set; the first that fits
counts: attention_sink_bias is a sink."""


def may_compute(name: str, value: Any, tensors: Collection[str]) -> bool:
    """Whether an unknown key may change what a draft layer computes.

    By its name, unless its value says that it is off. Whatever adds weights shows in the tensors of
    a file, of which each must have its place.
    """
    # 0 and 1 change nothing: a scale of 1, no bias.
    off = not value if isinstance(value, bool) else value in (None, 0, 1, "", "none", [], {})
    if off or MAY_COMPUTE.search(name) is None or OF_TENSORS.search(name) is not None:
        return False
    # A flag that is set shows in the tensors, each of which is checked: qkv_bias in names that end
    # in `.bias`.
    for flag, pattern in EVIDENCE.items():
        if value is True and re.search(flag, name):
            return not any(re.search(pattern, tensor) for tensor in tensors)
    return True


class Row(NamedTuple):
    """A tensor, or one for each layer, feature or head."""

    meaning: str
    ours: str = ""
    """Name in our state_dict; "" for the same."""


@dataclass(frozen=True)
class Format:
    """The format of one project for one family of heads."""

    heads: tuple[str, ...]
    """Names in `HEADS` that it can hold."""
    keys: dict[str, Key]
    tensors: dict[str, Row]
    """By their names in the file."""
    ignored: tuple[str, ...] = ()
    """Prefixes of tensors that are copies of the target's."""
    read: Callable[[Any], dict[str, Any]] | None = None
    """Returns a head's options from its `reading.Source`; None where its tensors say all."""


OWN = "of transformers, irrelevant for the head"
TRANSFORMERS = dict.fromkeys(
    (
        *("architectures", "auto_map", "bos_token_id", "dtype", "eos_token_id", "model_type"),
        *("initializer_range", "pad_token_id", "torch_dtype", "transformers_version"),
        *("use_cache", "_name_or_path"),
    ),
    Key(OWN, None),
)
WHOLE_MODEL = {
    "hidden_size": Key("width of the head, in a whole model's config", None, kind="size"),
    "vocab_size": Key(
        "size of the target's vocabulary, in a whole model's config", None, kind="size"
    ),
    "base_model_name_or_path": Key("the target", None),
}
LLAMA = {
    **TRANSFORMERS,
    "rope_theta": Key(
        "base of the rotary positions, and not the target's where it is absent",
        10000.0,
        kind="positive",
    ),
    "rope_scaling": Key("scaling of the rotary positions", None, kind="object"),
    "rope_parameters": Key("both, as transformers 5 writes them", None, kind="object"),
    "partial_rotary_factor": Key(
        "share of a head's width that has rotary positions", 1.0, only=(1.0, None)
    ),
    "hidden_size": Key("width of the head", kind="size"),
    "intermediate_size": Key("width of the MLP", kind="size"),
    "num_attention_heads": Key("query heads", kind="size"),
    "num_key_value_heads": Key(
        "key and value heads; as many as query heads where absent", None, kind="size"
    ),
    "head_dim": Key(
        "width of an attention head; hidden_size / query heads where absent", None, kind="size"
    ),
    "hidden_act": Key("activation of the MLP", "silu", kind="text"),
    "rms_norm_eps": Key("of all norms", 1e-6, kind="positive"),
    "num_hidden_layers": Key(
        "decoder layers, or the target's blocks in a config made from the target's", 1, kind="size"
    ),
    "vocab_size": Key("size of the target's vocabulary", kind="size"),
    "max_position_embeddings": Key("longest text that a server allows", 2048),
    "tie_word_embeddings": Key(
        "whether the LM head is the embedding, unless it has weights of its own", False
    ),
    "attention_bias": Key("bias in attention", False),
    "qkv_bias": Key("bias of queries, keys and values, SafeAILab's key", False),
    "attention_dropout": Key("training only", 0.0),
    "mlp_bias": Key("bias in the MLP", False, only=(False,)),
    "logit_scale": Key("factor of the logits", 1.0, only=(1.0, None)),
    "pretraining_tp": Key("of transformers, has no effect", 1),
    "sliding_window": Key("tokens that a query of a sliding layer sees", None, kind="size"),
    "use_sliding_window": Key("whether there are such layers", False),
    "max_window_layers": Key("of sliding_window", None),
    "layer_types": Key(
        "attention of each layer: full_attention or sliding_attention", None, kind="texts"
    ),
}
SPECULATORS = {
    **dict.fromkeys(
        (
            *("architectures", "auto_map", "dtype", "model_type", "torch_dtype"),
            *("transformers_version", "speculators_version"),
        ),
        Key(OWN, None),
    ),
    "speculators_config": Key("how it drafts, and the verifier's name and architecture"),
    "tie_word_embeddings": LLAMA["tie_word_embeddings"],
}
"""Keys of all of its kinds."""


def speculators_keys(
    kind: str, version: str, classes: list[str], head: DraftHead, architectures: list[str]
) -> dict[str, Any]:
    """The keys of `SPECULATORS` by which the package and vLLM tell kind, length and verifier."""
    return {
        "architectures": classes,
        "speculators_model_type": kind,
        "speculators_version": version,
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": head.max_depth}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": head.target.name, "architectures": architectures},
        },
        "tie_word_embeddings": False,
    }


def layer_rows(theirs: str, ours: str) -> dict[str, Row]:
    """Rows of a decoder layer's tensors, with its prefix in the format and the one it has here."""
    meanings = {
        "self_attn.q_proj": "queries",
        "self_attn.k_proj": "keys",
        "self_attn.v_proj": "values",
        "self_attn.o_proj": "attention's output",
        "self_attn.q_norm": "norm of each query",
        "self_attn.k_norm": "norm of each key",
        "mlp.gate_proj": "the MLP's gate",
        "mlp.up_proj": "into the MLP",
        "mlp.down_proj": "out of the MLP",
        "input_layernorm": "norm before attention; in the first layer, of the embedding",
        "post_attention_layernorm": "norm before the MLP",
    }
    names = {f"{name}.weight": meaning for name, meaning in meanings.items()}
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
        names[f"{name}.bias"] = f"bias of the {meanings[name]}"
    return {f"{theirs}.{name}": Row(names[name], f"{ours}.{name}") for name in names}


class Place(NamedTuple):
    """A tensor of a head, with its names in a format and here."""

    theirs: str
    ours: str
    meaning: str
    tensor: Tensor


def places(form: Format, head: DraftHead) -> Iterator[Place]:
    """Every tensor of a head that a format has a name for."""
    state = head.state_dict()
    for theirs, row in form.tensors.items():
        # "blocks.{h}.join" becomes the pattern blocks\.(?P<h>\d+)\.join
        pattern = re.compile(
            re.sub(r"\\\{(\w)\\\}", r"(?P<\1>\\d+)", re.escape(row.ours or theirs))
        )
        for ours, tensor in state.items():
            if match := pattern.fullmatch(ours):
                numbers = {letter: int(number) for letter, number in match.groupdict().items()}
                name = theirs.format(
                    **numbers, next=numbers.get("l", 0) + 1, blocks=head.config.num_layers
                )
                # Hydra++ counts the dropout before each module: 0, 1, 2 become 1, 3, 5.
                if getattr(head.config, "prefix_layer", False):
                    name = re.sub(
                        r"^(hydra_mlp\.\d+)\.(\d+)",
                        lambda old: f"{old[1]}.{2 * int(old[2]) + 1}",
                        name,
                    )
                    name = re.sub(r"^(hydra_lm_head\.\d+)", r"\1.1", name)
                yield Place(name, ours, row.meaning, tensor)
