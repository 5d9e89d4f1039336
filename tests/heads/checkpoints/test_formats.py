"""Other projects' heads: every key and tensor has a row, what is written is read back, and mistakes
are found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import INFO, leaving_out
from messages import lacking, refused
from runs import same_tensors
from torch import Tensor
from transformers import LlamaConfig

from headstart.heads import DraftHead, build_head
from headstart.heads.checkpoints.export_formats import PROJECTS, export_head
from headstart.heads.checkpoints.files import read_json, read_weights
from headstart.heads.checkpoints.formats import FORMATS
from headstart.heads.checkpoints.import_formats import import_head, recognise
from headstart.heads.checkpoints.reading import TargetParts
from headstart.heads.checkpoints.tables import may_compute, places
from headstart.heads.eagle3.formats import EAGLE_CONFIG

LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
VARIANTS: dict[str, dict[str, list[dict[str, Any]]]] = {
    "eagle3": {
        "eagle3": [
            {},
            {"draft_vocab_size": 7, "num_layers": 3, "qk_norm": True, "fc_norm": True},
            {"norm_output": True, "attention_bias": True, "hidden_act": "gelu"},
            {"hidden_size": 8, "head_dim": 2, "feature_layers": [0, 5]},
            {"norm_before_residual": True, "own_embedding": True, "norm_before_fc": True},
            {"intermediate_size": 20, "rms_norm_eps": 1e-3, "rope_parameters": LINEAR},
            {"sliding_window": 9, "num_layers": 2},
        ]
    },
    "dflash": {
        "dflash": [
            {},
            {"sliding_window": 5, "sliding_layers": [0], "num_layers": 3},
            {"draft_vocab_size": 7, "block_size": 5, "mask_token_id": 3},
            {"sliding_window": 5, "sliding_causal": False, "sample_from_anchor": True},
            {"feature_layers": [0, 5], "num_layers": 1, "intermediate_size": 20},
            {"qk_norm": False, "rope_parameters": LINEAR},
        ]
    },
    "speculators-dflash": {
        "dflash": [
            {"sliding_window": 5, "sliding_layers": [1], "num_layers": 3},
            {"sliding_window": 4, "sliding_causal": False, "sample_from_anchor": True},
            {"feature_layers": [2], "num_layers": 2, "head_dim": 2, "draft_vocab_size": 7},
            {"block_size": 3, "mask_token_id": 0, "qk_norm": False},
        ]
    },
    "dspark": {
        "dspark": [
            {},
            {"draft_vocab_size": 7, "block_size": 3, "mask_token_id": 3},
            {"markov": "gated", "markov_rank": 5},
            {"sample_from_anchor": False, "confidence": False, "num_layers": 1},
        ]
    },
    "speculators-dspark": {
        "dspark": [
            {"markov_rank": 3, "confidence_with_markov": False},
            {"draft_vocab_size": 7, "markov": "rnn", "feature_layers": [2]},
            {"sample_from_anchor": False, "markov_rank": 2},
        ]
    },
    "eagle": {
        "eagle": [
            {},
            {"num_layers": 2, "fc_bias": True, "num_key_value_heads": 1},
            {"attention_bias": True, "fc_bias": True},
        ]
    },
    "medusa": {
        "medusa": [
            {},
            {"num_heads": 2, "num_layers": 3, "bias": False, "draft_vocab_size": 9},
            {"lm_head": "shared"},
        ]
    },
    "fasterdecoding": {"medusa": [{"num_layers": 2}, {"lm_head": "shared", "num_heads": 1}]},
    "speculators": {
        "eagle3": [
            {"draft_vocab_size": 7},
            {"qk_norm": True, "norm_before_residual": True, "norm_before_fc": True},
            {"feature_layers": [2]},
            {"hidden_size": 8, "head_dim": 2, "num_layers": 2, "sliding_window": 9},
        ]
    },
    "speculators-eagle": {"eagle": [{}, {"fc_bias": True}]},
    "speculators-mtp": {"mtp": [{"depth": 8, "qk_norm": True}, {"depth": 2, "num_layers": 2}]},
    "hydra": {
        "hydra": [{"bias": True, "num_layers": 2}],
        "hydra++": [{"bias": True, "prefix_norm": True}],
    },
}
"""Options of heads that a format can hold, by format and kind of head."""
EACH = [
    pytest.param(form, kind, options, id=f"{form}, {options}")
    for form, kinds in VARIANTS.items()
    for kind in kinds
    for options in kinds[kind]
]


def lively_head(kind: str, options: dict[str, Any]) -> DraftHead:
    """A head of random weights, a truncated vocabulary spread out."""
    torch.manual_seed(0)
    head = build_head(kind, options, INFO)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    if size := options.get("draft_vocab_size"):
        ids_V = torch.arange(size) * 5 + 1
        state = head.state_dict()
        if "d2t" in state:
            state["d2t"].copy_(ids_V - torch.arange(size))
            state["t2d"].copy_(torch.zeros(40, dtype=torch.bool).index_fill(0, ids_V, True))
        else:
            state["token_map"].copy_(ids_V)
    return head


EMBEDDING = torch.randn(40, 16, generator=torch.Generator().manual_seed(1))
LM_HEAD = torch.randn(40, 16, generator=torch.Generator().manual_seed(2))


def target_parts(moved: int = 0, **config: Any) -> TargetParts:
    """The target's embedding, LM head and config."""
    return TargetParts(EMBEDDING + moved, LM_HEAD, config)


def by_table(form: str, head: DraftHead) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors of a head in a format that is not exported to, from the table alone."""
    state = head.state_dict()
    tensors = {place.theirs: state[place.ours].clone() for place in places(FORMATS[form], head)}
    config = head.server_config()
    if form == "hydra":
        arch = "prefix-mlp" if head.config.prefix_layer else "mlp"
        config = {
            "hydra_num_heads": 4,
            "hydra_num_layers": head.config.num_layers,
            "hydra_head_arch": arch,
        }
        config |= {"grounded_heads": True, "base_model_name_or_path": "some/target"}
        tensors["input_embed_fn.weight"] = EMBEDDING.clone()
    return config, tensors


def exported(form: str, head: DraftHead, folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The files of a head in a format."""
    for project, heads in PROJECTS.items():
        if heads.get(type(head)) == form and project != "safeailab":
            export_head(head, project, folder, EMBEDDING)
            return read_json(folder / "config.json"), read_weights(folder)
    return by_table(form, head)


def same_head(found: DraftHead, head: DraftHead) -> None:
    assert type(found) is type(head)
    assert same_tensors(found.state_dict(), head.state_dict())
    assert found.feature_layers == head.feature_layers
    assert found.server_config() == head.server_config()


@pytest.mark.parametrize(("form", "kind", "options"), EACH)
def test_a_round_trip_gives_the_same_head_and_a_missing_or_unknown_tensor_or_key_is_refused(
    form: str, kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    head = lively_head(kind, options)
    config, tensors = exported(form, head, tmp_path / "out")
    assert recognise(config, set(tensors)) == form
    assert config.keys() <= FORMATS[form].keys.keys()
    assert config.get("eagle_config", {}).keys() <= EAGLE_CONFIG.keys()
    same_head(import_head(config, dict(tensors), INFO, target_parts())[0], head)

    # Without an embedding the target's is meant, t2d follows from d2t, one head without a bias is
    # another head, and an LM head over the whole vocabulary may be the target's.
    optional = {"embed_tokens.weight", "t2d"}
    if form == "fasterdecoding" and len(tensors) == 2:
        optional |= tensors.keys()
    if kind == "eagle3" and options.get("draft_vocab_size") is None:
        optional.add("lm_head.weight")
    for place in places(FORMATS[form], head):
        if place.theirs not in optional:
            with refused():
                import_head(config, leaving_out(tensors, place.theirs), INFO, target_parts())
    with refused("unknown 'another.weight'"):
        import_head(config, {**tensors, "another.weight": torch.zeros(2)}, INFO, target_parts())

    found, source = import_head({**config, "something": 5}, dict(tensors), INFO, target_parts())
    same_head(found, head)
    assert source.unread == {"something": 5}
    assert not lacking(" ".join(source.remarks), "something")
    with refused("unknown 'residual_multiplier' 0.5"):
        import_head({**config, "residual_multiplier": 0.5}, tensors, INFO, target_parts())
    for name, key in FORMATS[form].keys.items():
        if key.default is ... and name != "speculators_model_type":
            with refused(f"'{name}' missing"):
                import_head(leaving_out(config, name), tensors, INFO, target_parts())


def eagle3_files(**options: Any) -> tuple[DraftHead, dict[str, Any], dict[str, Tensor]]:
    head = lively_head("eagle3", {"draft_vocab_size": 7, **options})
    return head, *by_table("eagle3", head)


def absolute_ids(tensors: dict[str, Tensor]) -> None:
    del tensors["t2d"]
    tensors["d2t"] += torch.arange(7) + 8


FC = "fc.weight"
MISTAKES: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "ids for offsets": (absolute_ids, "target"),
    "transposed": (lambda tensors: tensors.update({FC: tensors[FC].T}), "fc.weight 16"),
    "a vocabulary off by one": (lambda tensors: tensors["d2t"].add_(1), "d2t t2d"),
    "infinite": (
        lambda tensors: tensors.update({FC: (tensors[FC] * 1e6).half()}),
        "'fc.weight' infinite",
    ),
    "another dtype": (
        lambda tensors: tensors.update({FC: tensors[FC].to(torch.int8)}),
        "'fc.weight' torch.int8",
    ),
}


@pytest.mark.parametrize(("mistake", "told"), MISTAKES.values(), ids=MISTAKES)
def test_a_planted_mistake_is_refused(
    mistake: Callable[[dict[str, Tensor]], object], told: str
) -> None:
    _, config, tensors = eagle3_files()
    mistake(tensors)
    with refused(told):
        import_head(config, tensors, INFO, target_parts())


INHERITED: dict[str, dict[str, Any]] = {
    "a target whose embedding is tied": {"tie_word_embeddings": True, "model_type": "phi3"},
    "the target's blocks": {"num_hidden_layers": INFO.num_layers},
    "experts": {"num_local_experts": 16, "norm_topk_prob": True, "n_shared_experts": 1},
    "routers": {"router_aux_loss_coef": 0.1, "output_router_logits": True, "n_group": 8},
    "scaled experts": {"routed_scaling_factor": 2.5},
    "latent attention": {"kv_lora_rank": 512, "q_lora_rank": None, "v_head_dim": 128},
    "vision": {"target_model_type": "qwen2_5_vl", "vision_config": {"depth": 3}},
    "images": {"image_token_id": 5, "modal_type": "LLM"},
    "positions in three dimensions": {"rope_scaling": {"type": "mrope", "mrope_section": [8, 8]}},
    "training": {"embd_pdrop": 0.1, "output_attentions": True, "training_seq_len": 4096},
    "flags that are off": {"use_qk_norm": False, "attn_logit_softcapping": None, "x_bias": 0},
    "a factor of one": {"residual_multiplier": 1.0},
}


@pytest.mark.parametrize("keys", INHERITED.values(), ids=INHERITED)
def test_a_key_that_says_nothing_of_the_draft_layer_is_a_remark(keys: dict[str, Any]) -> None:
    head, config, tensors = eagle3_files()
    if "rope_scaling" in keys:
        config = leaving_out(config, "rope_parameters", "rope_scaling")
    found, source = import_head(config | keys, tensors, INFO, target_parts())
    same_head(found, head)
    assert source.unread == leaving_out(keys, *FORMATS["eagle3"].keys)
    assert not lacking(" ".join(source.remarks), *source.unread)


@pytest.mark.parametrize("nested", [False, True])
def test_a_key_that_computes_something_is_a_remark_where_the_target_has_it_too(
    nested: bool,
) -> None:
    """The draft layer's readers are Llama layers, which do not read it; written for the head itself
    it is refused."""
    head, config, tensors = eagle3_files()
    (config["eagle_config"] if nested else config)["attention_multiplier"] = 0.5
    found, source = import_head(config, dict(tensors), INFO, target_parts(attention_multiplier=0.5))
    same_head(found, head)
    assert source.unread == {"attention_multiplier": 0.5}
    for other in ({}, {"attention_multiplier": 0.25}):
        with refused("unknown 'attention_multiplier' 0.5"):
            import_head(config, dict(tensors), INFO, target_parts(**other))


def test_a_bias_somewhere_is_no_evidence_of_a_sink() -> None:
    assert may_compute("attention_sink_bias", True, ["fc.bias"])
    assert not may_compute("attention_sink_bias", True, ["self_attn.attention_sink_bias"])


COMPUTED: dict[str, tuple[dict[str, Any], str]] = {
    "soft caps": ({"attn_logit_softcapping": 50.0}, "unknown 'attn_logit_softcapping' 50.0"),
    "half of a head rotated": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    "a factor of the logits": ({"logit_scale": 0.06}, "logit_scale 0.06"),
    "layers without positions": ({"no_rope_layers": [1, 0]}, "unknown 'no_rope_layers'"),
    "norms without tensors": ({"use_qk_norm": True}, "unknown 'use_qk_norm' True"),
    "sinks without tensors": ({"attention_sink": True}, "unknown 'attention_sink' True"),
    "biases without tensors": ({"qkv_bias": True}, "qkv_bias True self_attn.q_proj.bias"),
    "biases that are not read": ({"attention_bias": True}, "attention_bias True"),
    "a layer id off by one": (
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 6, 9]}},
        "[2 6 9] eagle_config",
    ),
    "a bias of the MLP": ({"mlp_bias": True}, "mlp_bias True"),
    "layers that are not there": ({"num_hidden_layers": 2}, "num_hidden_layers 2 1"),
    "features that are not there": (
        {"num_aux_hidden_states": 4},
        "num_aux_hidden_states 4 [1 5 8] 3",
    ),
    "a state before the final norm": (
        {"eagle_aux_hidden_state_layer_ids": [2, 6, 12], "eagle_config": {}},
        "11",
    ),
    "a feature before the first block": (
        {"eagle_aux_hidden_state_layer_ids": [0, 6, 9], "eagle_config": {}},
        "[0 6 9]",
    ),
    "a width of the MLP": (
        {"intermediate_size": 7},
        "'midlayer.mlp.gate_proj.weight' shape config.json intermediate_size 7",
    ),
    "rotary positions by layer": (
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
        "full_attention",
    ),
    "an unknown rotary scaling": (
        {"rope_scaling": {"type": "spiral"}, "rope_parameters": None},
        "used",
    ),
    "a size in words": ({"hidden_size": "16"}, "hidden_size '16' 1"),
    "a true size": ({"head_dim": True}, "head_dim True"),
    "a negative eps": ({"rms_norm_eps": -1.0}, "rms_norm_eps -1.0 0"),
    "a base in words": ({"rope_theta": "x"}, "rope_theta 'x' 0"),
    "layers in words": (
        {"eagle_aux_hidden_state_layer_ids": ["2", "6", "9"]},
        "eagle_aux_hidden_state_layer_ids",
    ),
    "a list of options": ({"eagle_config": []}, "eagle_config"),
    "an unknown activation": ({"hidden_act": "os.system"}, "unknown hidden_act 'os.system'"),
    "a huge size": ({"intermediate_size": 10**12}, ""),
    "huge heads": ({"head_dim": 10**9}, ""),
}


@pytest.mark.parametrize(("keys", "told"), COMPUTED.values(), ids=COMPUTED)
def test_a_key_that_changes_the_computation_or_contradicts_the_tensors_is_refused(
    keys: dict[str, Any], told: str
) -> None:
    _, config, tensors = eagle3_files()
    with refused(told):
        import_head(config | keys, tensors, INFO, target_parts())


def test_a_width_that_was_inherited_gives_way_to_the_tensors() -> None:
    head, config, tensors = eagle3_files(intermediate_size=20)
    found, source = import_head(
        config | {"intermediate_size": INFO.intermediate_size}, tensors, INFO, target_parts()
    )
    same_head(found, head)
    assert not lacking(" ".join(source.remarks), "MLP 20")


@pytest.mark.parametrize("form", ["eagle", "eagle3"])
@pytest.mark.parametrize("flags", [{"qkv_bias": True}, {"attention_bias": True}, {}])
def test_biases_are_read_whichever_key_says_so(form: str, flags: dict[str, Any]) -> None:
    head = lively_head(form, {"attention_bias": True})
    config = leaving_out(head.server_config(), "qkv_bias", "attention_bias")
    same_head(import_head(config | flags, head.state_dict(), INFO)[0], head)
    with refused("attention_bias False k_proj.bias'"):
        import_head(config | {"attention_bias": False}, head.state_dict(), INFO)


def test_an_lm_head_that_is_not_in_the_file_is_the_targets_if_it_can_be() -> None:
    _, config, tensors = eagle3_files(draft_vocab_size=None)
    del tensors["lm_head.weight"]
    found, source = import_head(config, dict(tensors), INFO, target_parts())
    assert torch.equal(found.get_parameter("lm_head.weight"), LM_HEAD)
    assert not lacking(" ".join(source.remarks), "LM target's")
    tied, source = import_head(
        config | {"tie_word_embeddings": True}, dict(tensors), INFO, target_parts()
    )
    assert torch.equal(tied.get_parameter("lm_head.weight"), EMBEDDING)
    own = {**tensors, "embed_tokens.weight": EMBEDDING + 1}
    tied, _ = import_head(config | {"tie_word_embeddings": True}, own, INFO, target_parts())
    assert torch.equal(tied.get_parameter("lm_head.weight"), EMBEDDING + 1)
    with refused("missing 'lm_head.weight'"):
        import_head(config, tensors, INFO)


@pytest.mark.parametrize("form", ["eagle", "dflash"])
def test_a_copy_of_the_targets_lm_head_is_left_out_and_another_refused(form: str) -> None:
    head = lively_head(form, {})
    config, tensors = by_table(form, head)
    tensors["lm_head.weight"] = LM_HEAD
    found, source = import_head(config, dict(tensors), INFO, target_parts())
    same_head(found, head)
    assert not lacking(" ".join(source.remarks), "LM target's")
    with refused("LM 'some/target'"):
        import_head(config, {**tensors, "lm_head.weight": LM_HEAD + 1}, INFO, target_parts())


@pytest.mark.parametrize("form", ["medusa", "fasterdecoding"])
def test_a_whole_models_config_beside_medusa_heads_is_read_as_that(form: str) -> None:
    head = lively_head("medusa", {"num_heads": 3})
    config, tensors = by_table(form, head)
    if form == "fasterdecoding":
        config = {}
    model = LlamaConfig(
        hidden_size=16, num_attention_heads=4, vocab_size=40, num_hidden_layers=INFO.num_layers
    ).to_dict()
    found, source = import_head(
        model | config | {"num_hidden_layers": INFO.num_layers}, dict(tensors), INFO, target_parts()
    )
    same_head(found, head)
    assert "intermediate_size" in source.unread
    with refused("hidden_size 17 16"):
        import_head(model | config | {"hidden_size": 17}, dict(tensors), INFO, target_parts())
    if form == "medusa":
        with refused("num_hidden_layers 5 1"):
            import_head(config | {"num_hidden_layers": 5}, dict(tensors), INFO, target_parts())
        with refused("num_heads 5 3 blocks.N.layers"):
            import_head(config | {"num_heads": 5}, dict(tensors), INFO, target_parts())


DFLASH = {"draft_vocab_size": 7, "feature_layers": [1, 6], "sliding_window": 5}
DSPARK = DFLASH | {"markov_rank": 4}
BLOCKS: dict[str, dict[str, Any]] = {
    "dflash": DFLASH,
    "speculators-dflash": DFLASH,
    "dspark": DSPARK,
    "speculators-dspark": DSPARK,
}
"""Heads that draft blocks, by format."""


LAYERS = "target_layer_ids"
"""What some formats call `aux_hidden_state_layer_ids`."""


def change_keys(config: dict[str, Any], keys: dict[str, Any]) -> None:
    """Change keys of a config where its format keeps them: at its top, among the options of its
    block draft, or among the sizes of its decoder layers."""
    parts = [config, config.get("dflash_config", {}), config.get("transformer_layer_config", {})]
    for name, value in keys.items():
        names = (name, "aux_hidden_state_layer_ids") if name == LAYERS else (name,)
        holding = [(part, key) for part in parts for key in names if key in part]
        for part, key in holding or [(parts[1] or config, name)]:
            part[key] = value


LONGER = INFO.max_positions + 1
LAYER_TYPES = {"layer_types": ["chunked_attention", "full_attention"]}
BLOCK_KEYS: dict[str, tuple[dict[str, Any], str]] = {
    "no mask token": ({"mask_token_id": None}, "'mask_token_id' missing"),
    "a mask token beyond the vocabulary": ({"mask_token_id": 40}, "mask_token_id 40 range"),
    "a block longer than any text": ({"block_size": LONGER}, f"block_size {LONGER}"),
    "no block size": ({"block_size": None}, "'block_size' missing"),
    "a layer after the last block": ({LAYERS: [2, 30]}, "feature_layers range"),
    "a layer before the first block": ({LAYERS: [-1, 6]}, "begin"),
    "a layer too many": ({LAYERS: [2, 6, 9]}, "'fc.weight' shape 16 32 48"),
    "another target": ({"vocab_size": 41}, "vocab_size 41 40"),
    "another width": ({"hidden_size": 8}, "wide target"),
    "a layer less than there is": ({"num_hidden_layers": 1}, "num_hidden_layers 1"),
    "a window without a width": ({"sliding_window": None}, "wide"),
    "attention of another kind": (LAYER_TYPES, "layer_types 'chunked_attention'"),
}
"""Keys of a config that any format of a block draft refuses."""
DFLASH_KEYS: dict[str, tuple[dict[str, Any], str]] = {
    "attention sinks": ({"attention_sink_bias": True}, "attention_sink_bias True"),
}
DSPARK_KEYS: dict[str, tuple[dict[str, Any], str]] = {
    "a rank of 0": ({"markov_rank": 0}, "markov_rank 1 0"),
    "another rank": ({"markov_rank": 3}, "'markov_head.markov_w1.weight' shape"),
    "another kind": ({"markov_head_type": "gated"}, "missing 'markov_head.gate_proj"),
    "a kind that nobody has": ({"markov_head_type": "bigram"}, "'bigram'"),
    "an estimate that is not read": (
        {"enable_confidence_head": False},
        "unknown 'confidence_head.proj",
    ),
    "an estimate that does not see the token": (
        {"confidence_head_with_markov": False},
        "'confidence_head.proj.weight' shape 1 20 16",
    ),
}


@pytest.mark.parametrize(
    ("form", "keys", "told"),
    [
        pytest.param(form, *mistake, id=f"{form}, {what}")
        for form in BLOCKS
        for what, mistake in (
            BLOCK_KEYS | (DSPARK_KEYS if "dspark" in form else DFLASH_KEYS)
        ).items()
    ],
)
def test_a_wrong_key_of_a_block_draft_is_refused(
    form: str, keys: dict[str, Any], told: str, tmp_path: Path
) -> None:
    head = lively_head(FORMATS[form].heads[0], BLOCKS[form])
    config, tensors = exported(form, head, tmp_path / "out")
    change_keys(config, keys)
    with refused(told):
        import_head(config, tensors, INFO)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"mask_token_id": 38}, "mask_token_id 38 39 dflash_config"),
        ({"target_layer_ids": [2, 7]}, "target_layer_ids [2 7] [1 6] dflash_config"),
        ({"aux_hidden_state_layer_ids": [1, 6]}, "[1 6] target_layer_ids"),
        ({"eagle_aux_hidden_state_layer_ids": [3, 8]}, "first second"),
        (
            {"aux_hidden_state_layer_ids": [2, 7], "eagle_aux_hidden_state_layer_ids": [1, 6]},
            ("aux_hidden_state_layer_ids [2 7] eagle_aux_hidden_state_layer_ids [1 6]"),
        ),
        ({"sample_from_anchor": True}, "sample_from_anchor True False dflash_config"),
        ({"block_size": 5}, "block_size 5 8 dflash_config"),
        ({"num_target_layers": 11}, "num_target_layers 11 12"),
    ],
)
def test_two_forms_in_one_config_that_contradict_each_other_are_refused(
    keys: dict[str, Any], told: str
) -> None:
    head = lively_head("dflash", {"feature_layers": [1, 6]})
    config, tensors = by_table("dflash", head)
    config["dflash_config"] |= {"sample_from_anchor": False, "block_size": 8}
    agreeing = {
        "mask_token_id": 39,
        "aux_hidden_state_layer_ids": [2, 7],
        "target_layer_ids": [1, 6],
    }
    same_head(import_head(config | agreeing, dict(tensors), INFO)[0], head)
    with refused(told):
        import_head(config | keys, tensors, INFO)


@pytest.mark.parametrize(
    "config", [{"speculators_model_type": "peagle"}, {"parallel_drafting": True}]
)
def test_p_eagle_is_refused_by_name(config: dict[str, Any]) -> None:
    _, tensors = by_table("eagle3", lively_head("eagle3", {}))
    with refused("P-EAGLE"):
        import_head(config, tensors | {"mask_hidden": torch.zeros(1, 1, 48)}, INFO)


@pytest.mark.parametrize("counting", ["eagle_aux_hidden_state_layer_ids", "eagle_config"])
def test_layers_mean_the_same_whichever_way_they_are_counted(counting: str) -> None:
    head, config, tensors = eagle3_files(feature_layers=[2, 5, 8])
    same_head(import_head(leaving_out(config, counting), tensors, INFO)[0], head)


def test_feature_layers_that_are_not_written_are_the_authors_own() -> None:
    _, config, tensors = eagle3_files()
    del config["eagle_aux_hidden_state_layer_ids"], config["eagle_config"]
    found, source = import_head(config, tensors, INFO)
    assert found.feature_layers == (1, 5, 8)
    assert not lacking(source.remarks[0], "feature layers")


def test_an_unordered_vocabulary_is_sorted_with_its_lm_head() -> None:
    head, config, tensors = eagle3_files()
    order = torch.tensor([3, 0, 6, 1, 2, 5, 4])
    ids_V = torch.arange(7) + tensors["d2t"]
    tensors["d2t"] = ids_V[order] - torch.arange(7)
    tensors["lm_head.weight"] = tensors["lm_head.weight"][order]
    same_head(import_head(config, tensors, INFO)[0], head)


def test_a_rotary_base_that_is_not_written_is_the_readers_default_and_told() -> None:
    _, config, tensors = eagle3_files()
    for name in ("rope_theta", "rope_scaling", "rope_parameters"):
        del config[name]
    found, source = import_head(config, tensors, INFO)
    assert found.config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    assert not lacking(" ".join(source.remarks), "rotary 10000.0 500000.0 default")
    _, source = import_head(config | {"rope_theta": 2e4}, tensors, INFO)
    assert not lacking(" ".join(source.remarks), "rotary 20000.0 500000.0")


def test_modelopts_newer_names_and_unordered_layers_are_read() -> None:
    head, config, tensors = eagle3_files(num_layers=2)
    del tensors["t2d"], config["eagle_aux_hidden_state_layer_ids"]
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [1, 8, 5]
    config["eagle_config"] |= {
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
    }
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    found, source = import_head(config, tensors, INFO)
    same_head(found, head)
    assert not lacking(" ".join(source.remarks), "sorted")


def test_an_embedding_that_is_the_targets_is_left_out_and_another_kept() -> None:
    head, config, tensors = eagle3_files()
    tensors["embed_tokens.weight"] = EMBEDDING
    same_head(import_head(config, dict(tensors), INFO, target_parts())[0], head)
    kept = import_head(config, dict(tensors), INFO, target_parts(1))[0]
    assert torch.equal(kept.state_dict()["embed_tokens.weight"], EMBEDDING)
    eagle = lively_head("eagle", {})
    config, tensors = by_table("eagle", eagle)
    with refused("'some/target'"):
        import_head(config, {**tensors, "embed_tokens.weight": EMBEDDING + 1}, INFO, target_parts())


def test_medusa_heads_are_counted_and_repeated_blocks_told() -> None:
    head = lively_head("medusa", {"num_heads": 5, "num_layers": 2})
    state = head.state_dict()
    for h in range(5):
        for kind in ("weight", "bias"):
            state[f"blocks.{h}.layers.1.{kind}"].copy_(state[f"blocks.{h}.layers.0.{kind}"])
    _, tensors = by_table("fasterdecoding", head)
    found, source = import_head({"medusa_num_heads": 2, "medusa_num_layers": 1}, tensors, INFO)
    same_head(found, head)
    assert not lacking(source.remarks[0], "config.json 2 5")
    assert not lacking(source.remarks[1], "2 blocks")


def test_the_heads_of_a_whole_medusa_model_are_taken_out_of_it() -> None:
    head = lively_head("medusa", {})
    _, tensors = by_table("fasterdecoding", head)
    whole = {f"medusa_head.{name}": tensor for name, tensor in tensors.items()}
    found, source = import_head({}, {**whole, "model.norm.weight": torch.ones(16)}, INFO)
    same_head(found, head)
    assert not lacking(source.remarks[0], "model")


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_layers_that_no_model_has_are_refused_before_they_are_listed(
    tmp_path: Path, kind: str
) -> None:
    config, tensors = exported(
        "speculators", lively_head("eagle3", {"draft_vocab_size": 7}), tmp_path
    )
    config["transformer_layer_config"] |= {"num_hidden_layers": 10**9, "model_type": kind}
    with refused("transformer_layer_config num_hidden_layers 1e+09"):
        import_head(config, tensors, INFO)
    layer = {"model_type": kind, "num_hidden_layers": 10**9}
    with refused("num_hidden_layers 1e+09"):
        build_head("mtp", {"layer": layer}, INFO)


def test_a_speculators_layer_has_its_classs_defaults_where_nothing_is_written(
    tmp_path: Path,
) -> None:
    head = lively_head("eagle3", {"draft_vocab_size": 7})
    config, tensors = exported("speculators", head, tmp_path / "out")
    layer, default = config["transformer_layer_config"], LlamaConfig()
    for name in ("hidden_act", "rms_norm_eps"):
        assert layer.pop(name) == getattr(default, name) == getattr(INFO, name)
    same_head(import_head(config, dict(tensors), INFO, target_parts())[0], head)
    # without its class, its defaults are unknown
    del layer["model_type"]
    with refused("model_type None qwen3"):
        import_head(config, tensors, INFO)


@pytest.mark.parametrize(
    ("project", "kind", "options", "told"),
    [
        ("speculators", "medusa", {}, "MedusaHead"),
        ("fasterdecoding", "medusa", {"draft_vocab_size": 7}, "draft_vocab_size"),
        ("fasterdecoding", "medusa", {"bias": False}, "false written"),
        ("safeailab", "eagle3", {"fc_norm": True}, "SafeAILab's fc_norm"),
        ("safeailab", "eagle3", {"feature_layers": [0, 1, 2]}, "feature_layers [0 1 2]"),
        ("speculators", "eagle", {"num_layers": 2}, "layers.1"),
        ("safe", "eagle", {}, "unknown 'safe'"),
    ],
)
def test_what_a_project_cannot_say_is_refused(
    project: str, kind: str, options: dict[str, Any], told: str, tmp_path: Path
) -> None:
    with refused(told):
        export_head(lively_head(kind, options), project, tmp_path / "out", EMBEDDING)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_safeailabs_files_are_read_back_and_hold_the_targets_embedding(
    kind: str, tmp_path: Path
) -> None:
    head = lively_head(kind, {})
    export_head(head, "safeailab", tmp_path / "out", EMBEDDING)
    tensors = read_weights(tmp_path / "out")
    assert torch.equal(tensors["embed_tokens.weight"], EMBEDDING)
    same_head(
        import_head(read_json(tmp_path / "out" / "config.json"), tensors, INFO, target_parts())[0],
        head,
    )
    with refused("safeailab embedding"):
        export_head(head, "safeailab", tmp_path / "other")


@pytest.mark.parametrize("config", ['{"model_type": "llama"}', '{"architectures": ', None])
def test_an_export_replaces_an_earlier_one_and_nothing_else(config: str | None, tmp_path: Path):
    export_head(lively_head("eagle3", {}), "speculators", tmp_path, EMBEDDING)
    export_head(lively_head("eagle3", {}), "speculators", tmp_path, EMBEDDING)
    if config is None:
        (tmp_path / "config.json").unlink()
    else:
        (tmp_path / "config.json").write_text(config)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with refused(str(tmp_path)):
        export_head(lively_head("eagle3", {}), "speculators", tmp_path, EMBEDDING)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_every_head_of_a_format_is_tried() -> None:
    for name, form in FORMATS.items():
        assert VARIANTS[name].keys() == set(form.heads)


def test_a_folder_of_something_else_is_no_head() -> None:
    with refused("model.embed_tokens.weight"):
        import_head({}, {"model.embed_tokens.weight": torch.ones(2, 2)}, INFO)
