"""vLLM's, SGLang's and llama.cpp's own reading of a head's folder, by names and shapes, after their
code and not ours.

A parameter that a file does not fill stays as it was drawn, and SGLang skips what it does not know:
neither tells, and the head is never right. Here both are failures. llama.cpp's converter refuses a
tensor that it has no name for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import INFO

from headstart.heads import CheckpointMetadata, build_head
from headstart.heads.checkpoints.files import read_weights
from headstart.heads.checkpoints.model_card import Listing
from headstart.heads.checkpoints.save_load import publishable, save_head
from headstart.heads.checkpoints.tables import SERVERS

Shapes = dict[str, tuple[int, ...]]


@dataclass
class Reading:
    """What a server makes of a folder."""

    parameters: Shapes
    """All that it has to fill, by the names in the file."""
    optional: set[str] = field(default_factory=set)
    """What it takes from the target, or does without, where the file has none."""
    skipped: set[str] = field(default_factory=set)
    """Names in a file that it passes over, and rightly."""
    layers: list[int] | None = None
    """The target's blocks whose input it shows the head."""


def llama_layer(config: dict[str, Any], name: str, width: int) -> Shapes:
    """A decoder layer whose attention reads states of a width."""
    hidden, middle = config["hidden_size"], config["intermediate_size"]
    size = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries = size * config["num_attention_heads"]
    keys = size * config.get("num_key_value_heads", config["num_attention_heads"])
    shapes: Shapes = {
        "self_attn.q_proj": (queries, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (middle, hidden),
        "mlp.up_proj": (middle, hidden),
        "mlp.down_proj": (hidden, middle),
        "post_attention_layernorm": (hidden,),
    }
    return {f"{name}.{part}.weight": shape for part, shape in shapes.items()}


def fused(config: dict[str, Any]) -> int:
    """How many features both servers believe to be fused."""
    listed = config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
    return config.get("num_aux_hidden_states") or (len(listed) if listed else 3)


def eagle3_common(config: dict[str, Any]) -> Shapes:
    hidden, wide = config["hidden_size"], config.get("target_hidden_size", config["hidden_size"])
    drafts = config.get("draft_vocab_size") or config["vocab_size"]
    shapes = {
        "fc.weight": (hidden, fused(config) * wide),
        "norm.weight": (hidden,),
        "lm_head.weight": (drafts, hidden),
        "embed_tokens.weight": (config["vocab_size"], hidden),
        "d2t": (drafts,),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.input_layernorm.weight": (hidden,),
        **llama_layer(config, "midlayer", 2 * hidden),
    }
    if config.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (wide,) for i in range(fused(config))}
    return shapes


def eagle3_optional(config: dict[str, Any]) -> set[str]:
    """Ids are the target's own where all are drafted; the embedding is the target's where it is as
    wide."""
    whole = config.get("draft_vocab_size") in (None, config["vocab_size"])
    same = config["hidden_size"] == config.get("target_hidden_size", config["hidden_size"])
    return ({"d2t"} if whole else set()) | ({"embed_tokens.weight"} if same else set())


def vllm_eagle3(config: dict[str, Any]) -> Reading:
    """llama_eagle3.py and eagle3_utils.py: layers by the top-level list, each by the block whose
    input it is."""
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    shapes = eagle3_common(config)
    if config.get("eagle_config", {}).get("norm_before_fc", config.get("norm_before_fc")):
        shapes["input_norm.weight"] = (shapes["fc.weight"][1],)
    for layer in range(1, config["num_hidden_layers"]):
        shapes |= llama_layer(config, f"layers.{layer}", config["hidden_size"])
        shapes[f"layers.{layer}.input_layernorm.weight"] = (config["hidden_size"],)
    return Reading(
        shapes, eagle3_optional(config), {"t2d"}, config["eagle_aux_hidden_state_layer_ids"]
    )


def sglang_eagle3(config: dict[str, Any]) -> Reading:
    """llama_eagle3.py: layers by the list in eagle_config, each by the block whose output it is."""
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["num_hidden_layers"] == 1
    assert config["tie_word_embeddings"] is False and "draft_vocab_size" in config
    listed = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    return Reading(
        eagle3_common(config), eagle3_optional(config), {"t2d"}, [layer + 1 for layer in listed]
    )


def eagle1(bias: bool, architecture: str) -> Callable[[dict[str, Any]], Reading]:
    def read(config: dict[str, Any]) -> Reading:
        assert config["architectures"] == [architecture]
        hidden = config["hidden_size"]
        shapes: Shapes = {
            "fc.weight": (hidden, 2 * hidden),
            **({"fc.bias": (hidden,)} if bias else {}),
        }
        for layer in range(config["num_hidden_layers"]):
            shapes |= llama_layer(config, f"layers.{layer}", hidden)
            shapes |= {f"layers.{layer}.input_layernorm.weight": (hidden,)} if layer else {}
        return Reading(shapes, skipped={"embed_tokens.weight"})

    return read


def vllm_medusa(config: dict[str, Any]) -> Reading:
    """medusa.py; one LM head for all is the first's, and its rows are the target's tokens or those
    of token_map.

    LM heads of their own have all of the target's tokens, whatever token_map says (0.32.0).
    """
    assert config["architectures"] == ["MedusaModel"] and config["model_type"] == "medusa"
    hidden, whole = config["hidden_size"], config["vocab_size"]
    drafts = config.get("truncated_vocab_size") or whole
    shapes: Shapes = {"token_map": (drafts,)} if drafts < whole else {}
    for head in range(config["num_heads"]):
        for layer in range(config["num_hidden_layers"]):
            shapes[f"blocks.{head}.layers.{layer}.weight"] = (hidden, hidden)
            if config.get("medusa_fc_bias"):
                shapes[f"blocks.{head}.layers.{layer}.bias"] = (hidden,)
        if head == 0 or not config.get("original_lm_head"):
            shapes[f"lm_heads.{head}.weight"] = (
                drafts if config.get("original_lm_head") else whole,
                hidden,
            )
    return Reading(shapes)


def vllm_dflash(config: dict[str, Any]) -> Reading:
    """qwen3_dflash.py; layers by the block whose output it is, each key and query with a norm."""
    nested = config["dflash_config"]
    assert config["architectures"] == ["DFlashDraftModel"] and config["model_type"] == "qwen3"
    assert (
        not nested.get("sample_from_anchor")
        and not config["sample_from_anchor"]
        and "mask_token_id" in nested
    )
    hidden, drafts = config["hidden_size"], config["draft_vocab_size"]
    size = config.get("head_dim") or hidden // config["num_attention_heads"]
    shapes: Shapes = {
        "fc.weight": (hidden, len(nested["target_layer_ids"]) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        "embed_tokens.weight": (config["vocab_size"], hidden),
        "lm_head.weight": (drafts, hidden),
        "d2t": (drafts,),
    }
    for layer in range(config["num_hidden_layers"]):
        shapes |= llama_layer(config, f"layers.{layer}", hidden)
        shapes[f"layers.{layer}.input_layernorm.weight"] = (hidden,)
        shapes |= {f"layers.{layer}.self_attn.{part}_norm.weight": (size,) for part in "qk"}
    whole = {"lm_head.weight", "d2t"} if drafts == config["vocab_size"] else set()
    layers = [layer + 1 for layer in nested["target_layer_ids"]]
    return Reading(shapes, {"embed_tokens.weight"} | whole, {"t2d"}, layers)


def llama_cpp_eagle3(config: dict[str, Any]) -> Reading:
    """conversion/llama.py and src/models/eagle3.cpp (b11434); layers by the top-level list."""
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["num_hidden_layers"] == 1
    assert "draft_vocab_size" in config and not config["norm_output"] and not config["fc_norm"]
    shapes, layers = eagle3_common(config), config["eagle_aux_hidden_state_layer_ids"]
    assert len(layers) == 3
    if config["norm_before_fc"]:
        shapes["input_norm.weight"] = (shapes["fc.weight"][1],)
    return Reading(shapes, eagle3_optional(config), {"t2d"}, layers)


def llama_cpp_dflash(config: dict[str, Any]) -> Reading:
    """DFlashModel of conversion/qwen.py and src/models/dflash.cpp (b11434): it has no place for d2t
    and t2d."""
    reading = vllm_dflash(config)
    assert config["draft_vocab_size"] == config["vocab_size"]
    del reading.parameters["d2t"]
    reading.skipped.clear()
    return reading


def llama_cpp_dspark(config: dict[str, Any]) -> Reading:
    """DSparkModel of the same files: its draft vocabulary has a place, and its slots begin where
    the config says."""
    assert (
        config["architectures"] == ["Qwen3DSparkModel"] and config["markov_head_type"] == "vanilla"
    )
    nested = {name: config[name] for name in ("mask_token_id", "target_layer_ids")}
    as_dflash = config | {
        "architectures": ["DFlashDraftModel"],
        "dflash_config": nested,
        "sample_from_anchor": False,
    }
    reading = vllm_dflash(as_dflash)
    rank, hidden = config["markov_rank"], config["hidden_size"]
    reading.parameters |= {
        "markov_head.markov_w1.weight": (config["vocab_size"], rank),
        "markov_head.markov_w2.weight": (config["draft_vocab_size"], rank),
        "confidence_head.proj.weight": (1, hidden + rank),
        "confidence_head.proj.bias": (1,),
    }
    reading.optional |= {"confidence_head.proj.weight", "confidence_head.proj.bias"}
    return reading


def vllm_dspark(config: dict[str, Any]) -> Reading:
    """qwen3_dspark.py: the same names, and layers counted in the same way."""
    assert config["architectures"] == ["Qwen3DSparkModel"] and config["model_type"] == "qwen3"
    reading = llama_cpp_dspark(config)
    estimate = config["hidden_size"] + config["confidence_head_with_markov"] * config["markov_rank"]
    reading.parameters["confidence_head.proj.weight"] = (1, estimate)
    return reading


READERS: dict[tuple[str, str], Callable[[dict[str, Any]], Reading]] = {
    ("vllm", "eagle3"): vllm_eagle3,
    ("sglang", "eagle3"): sglang_eagle3,
    ("vllm", "eagle"): eagle1(False, "LlamaForCausalLM"),
    ("sglang", "eagle"): eagle1(True, "LlamaForCausalLM"),
    ("vllm", "medusa"): vllm_medusa,
    ("vllm", "dflash"): vllm_dflash,
    ("vllm", "dspark"): vllm_dspark,
    ("llama.cpp", "eagle3"): llama_cpp_eagle3,
    ("llama.cpp", "dflash"): llama_cpp_dflash,
    ("llama.cpp", "dspark"): llama_cpp_dspark,
}
HEADS: list[tuple[str, dict[str, Any]]] = [
    ("eagle3", {}),
    ("eagle3", {"draft_vocab_size": 20, "fc_norm": True, "norm_output": True}),
    (
        "eagle3",
        {"feature_layers": [1, 4], "hidden_size": 8, "num_attention_heads": 2},
    ),
    ("eagle3", {"own_embedding": True, "norm_before_residual": True}),
    ("eagle3", {"norm_before_fc": True, "num_layers": 2}),
    ("eagle3", {"sliding_window": 100}),
    ("eagle", {}),
    ("eagle", {"num_layers": 2}),
    ("eagle", {"fc_bias": True}),
    ("dflash", {}),
    (
        "dflash",
        {"draft_vocab_size": 20, "num_layers": 3, "sliding_window": 4, "sliding_layers": [1]},
    ),
    ("dflash", {"qk_norm": False}),
    ("dflash", {"sample_from_anchor": True}),
    ("dspark", {"markov_rank": 4}),
    ("dspark", {"markov_rank": 4, "draft_vocab_size": 20, "sample_from_anchor": False}),
    ("dspark", {"markov_rank": 4, "confidence": False}),
    ("dspark", {"markov_rank": 4, "confidence_with_markov": False}),
    ("dspark", {"markov": "rnn"}),
    ("medusa", {"num_heads": 3, "num_layers": 2}),
    ("mtp", {}),
    ("medusa", {"bias": False, "lm_head": "shared", "num_heads": 2}),
    ("medusa", {"draft_vocab_size": 20}),
]


def uploaded_head(kind: str, options: dict[str, Any], folder: Path) -> Any:
    """What `headstart push` would upload."""
    head = build_head(kind, options, INFO)
    save_head(head, folder / "saved", CheckpointMetadata())
    shared = {name: torch.zeros(INFO.vocab_size, INFO.hidden_size) for name in head.served_names}
    publishable(folder / "saved", folder / "head", Listing("me/head"), shared)
    return head


def problems(server: str, kind: str, folder: Path) -> list[str]:
    """What a server would half-load, and say nothing about: names with what is wrong."""
    reading = READERS[server, kind](json.loads((folder / "config.json").read_text()))
    found = {name: tuple(tensor.shape) for name, tensor in read_weights(folder).items()}
    needed = reading.parameters
    missing = needed.keys() - found.keys() - reading.optional
    unknown = found.keys() - needed.keys() - reading.skipped
    reshaped = [name for name in needed.keys() & found.keys() if found[name] != needed[name]]
    return [
        *(f"{name} missing" for name in missing),
        *(f"{name} unknown" for name in unknown),
        *(f"{name} {found[name]} for {needed[name]}" for name in reshaped),
    ]


@pytest.mark.parametrize(("kind", "options"), HEADS)
@pytest.mark.parametrize("server", SERVERS)
def test_a_server_loads_a_head_whole_or_the_card_says_that_it_does_not(
    server, kind, options, tmp_path
):
    head = uploaded_head(kind, options, tmp_path)
    if server in head.unread_by:
        card = (tmp_path / "head" / "README.md").read_text()
        assert head.unread_by[server] in card
        return
    assert problems(server, kind, tmp_path / "head") == []
    layers = READERS[server, kind](
        json.loads((tmp_path / "head" / "config.json").read_text())
    ).layers
    if layers is not None:
        assert layers == [layer + 1 for layer in head.feature_layers]


@pytest.mark.parametrize(
    ("server", "kind", "options", "reason"),
    [
        ("sglang", "eagle3", {"norm_before_fc": True}, "input_norm.weight unknown"),
        ("sglang", "eagle", {}, "fc.bias missing"),
        ("vllm", "eagle", {"fc_bias": True}, "fc.bias unknown"),
        ("vllm", "medusa", {"draft_vocab_size": 20}, "lm_heads.0.weight (20, 16) for (40, 16)"),
        ("llama.cpp", "eagle3", {"qk_norm": True}, "midlayer.self_attn.k_norm.weight unknown"),
        (
            "llama.cpp",
            "dspark",
            {"confidence_with_markov": False},
            "confidence_head.proj.weight (1, 16) for (1, 272)",
        ),
    ],
)
def test_what_the_card_says_is_so(server, kind, options, reason, tmp_path):
    head = uploaded_head(kind, options, tmp_path)
    assert server in head.unread_by
    assert reason in problems(server, kind, tmp_path / "head")


def test_the_card_says_nothing_of_servers_that_read_the_head():
    for kind, options, servers in [
        ("eagle3", {}, {"sglang", "vllm", "llama.cpp"}),
        ("dflash", {}, {"vllm", "llama.cpp"}),
        ("dspark", {"markov_rank": 4}, {"vllm", "llama.cpp"}),
    ]:
        assert not servers & build_head(kind, options, INFO).unread_by.keys()
