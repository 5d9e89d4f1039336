"""MTP heads: what they compute, against transformers' own MTP model; options; starting values."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import helpers
import pytest
import torch
from helpers import leaving_out
from messages import refused
from runs import same_tensors
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from headstart.heads import CheckpointMetadata, MtpHead, TargetFeatures, build_head
from headstart.heads.checkpoints.files import read_weights
from headstart.heads.checkpoints.import_formats import import_head
from headstart.heads.checkpoints.save_load import save_head
from headstart.heads.eagle.head import STEP
from headstart.heads.layers.target_layer import described
from headstart.heads.mtp.head import OUTPUTS
from headstart.heads.mtp.native import read_native_mtp, write_native_mtp
from headstart.inference import SpeculativeLM, Target
from headstart.inference.targets.info import target_info, target_modules
from headstart.train.config import DataConfig, TrainConfig
from headstart.train.head import head_of
from headstart.train.inputs import warm_start

modeling = pytest.importorskip("transformers.modeling_layers")
needs_mtp = pytest.mark.skipif(
    not hasattr(modeling, "MtpModel"), reason="this version of transformers has no MtpModel"
)

SIZES = helpers.SIZES | {"num_hidden_layers": 3, "pad_token_id": None, "tie_word_embeddings": False}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
ROUTED = EXPERTS | {"n_routed_experts": 4, "topk_group": 1, "first_k_dense_replace": 1}
RANKS = {"q_lora_rank": 12, "kv_lora_rank": 8}
WIDTHS = {"head_dim": 4, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
LATENT = RANKS | WIDTHS | {"num_key_value_heads": 4}
ATTENTION = {"layer_types": ["full_attention"] * 3}
DENSE_BLOCKS = {"moe_k": 2, "moe_num_experts": 4, "moe_layer_start_index": 2}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_next": ATTENTION | EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 16},
    "qwen3_5_text": ATTENTION,
    "glm4_moe": ROUTED | {"n_group": 1},
    "deepseek_v3": ROUTED | LATENT | {"n_group": 2},
    # The last layer is a mixture of experts, and MTP layers are dense.
    "ernie4_5_moe": DENSE_BLOCKS | {"moe_intermediate_size": 16},
}
"""Options of tiny models by type; hybrids have attention alone."""
MAMBA = {"mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8, "chunk_size": 4}
NEMOTRON: dict[str, Any] = (
    EXPERTS
    | MAMBA
    | {
        "layers_block_type": ["mamba", "attention", "moe"],
        "n_routed_experts": 4,
        "moe_shared_expert_intermediate_size": 16,
        "n_groups": 2,
    }
)
"""Options of a tiny Nemotron-H, whose MTP layer transformers' MTP model cannot have: it is two of
its blocks."""
TOKENS_BT = helpers.random_ids(13, 2, 12, seed=2)
FIRST_LAYER = 3
"""Number by which a checkpoint of DeepSeek's or GLM's family calls its first MTP layer: that of the
model's blocks."""


def tiny_model_of(kind: str, vocab_size: int = 13) -> PreTrainedModel:
    """A random model of a type in float32."""
    torch.manual_seed(0)
    options = NEMOTRON if kind == "nemotron_h" else KINDS.get(kind, {})
    config = AutoConfig.for_model(kind, **(SIZES | options | {"vocab_size": vocab_size}))
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        # Mamba's step sizes stay within its bounds, which its modules apply to several tokens and
        # not to one.
        if parameter.ndim > 1 and "mixer.in_proj" not in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval().requires_grad_(False)


def random_mtp(model: PreTrainedModel, **options: Any) -> MtpHead:
    """An MTP head of the model's own kind, of whose weights none is silent."""
    torch.manual_seed(1)
    info = target_info(model.config, "tiny", model.config.vocab_size, 3)
    head = build_head("mtp", MtpHead.options_for(options, described(model.config)), info)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3 if parameter.ndim > 1 else 0.5)
    assert isinstance(head, MtpHead)
    return head.to(model.dtype).eval()


@torch.no_grad()
def features_after(model: PreTrainedModel, tokens_BT: torch.Tensor) -> TargetFeatures:
    """What the head reads, from the model itself: hybrids are no targets for trees."""
    last_BTD = model(tokens_BT, output_hidden_states=True).hidden_states[-1]
    mask_BT = torch.ones_like(tokens_BT, dtype=torch.bool)
    return TargetFeatures(last_BTD, last_BTD, tokens_BT, mask_BT, target_modules(model))


def assert_same_logits(found_BTV: torch.Tensor, expected_BTV: torch.Tensor) -> None:
    """Up to rounding in float32."""
    largest = float(expected_BTV.abs().max())
    assert largest > 0.5
    torch.testing.assert_close(found_BTV, expected_BTV, rtol=1e-5, atol=1e-5 * largest)


def mtp_model_of(model: PreTrainedModel, head: MtpHead) -> Any:
    """transformers' MTP model with a head's weights."""
    model.config.num_mtp_layers = head.config.num_layers
    for kinds in ("layer_types", "mlp_layer_types"):
        if getattr(model.config, kinds, None) is not None:
            setattr(
                model.config,
                f"mtp_{kinds}",
                [getattr(model.config, kinds)[-1]] * head.config.num_layers,
            )
    theirs = modeling.MtpModel(model, head.config.num_layers).to(model.dtype).eval()
    names = {"token_layernorm": "enorm", "hidden_layernorm": "hnorm", "input_proj": "eh_proj"}
    names["final_layernorm"] = "post_norm"
    state = {}
    for name, tensor in head.state_dict().items():
        _, layer, part, *rest = name.split(".")
        own = names.get(part)
        state[".".join(["layers", layer, *([own] if own else ["mtp_block", part]), *rest])] = tensor
    missing = theirs.load_state_dict(state, strict=False)
    assert not missing.unexpected_keys
    assert not [name for name in missing.missing_keys if name.startswith("layers.")]
    return theirs


@needs_mtp
@pytest.mark.parametrize("kind", list(KINDS))
def test_draft_logits_are_those_of_transformers_mtp_model(kind: str) -> None:
    """Every depth, at every position, of a head with a layer for each."""
    model = tiny_model_of(kind)
    head = random_mtp(model, num_layers=2, depth=2)
    theirs = mtp_model_of(model, head)
    features = features_after(model, TOKENS_BT)
    expected_BTD = features.features_BTF
    with torch.no_grad():
        for k, draft_BTD in enumerate(head.drafts(features, 2)):
            next_BT = F.pad(TOKENS_BT[:, 1 + k :], (0, 1 + k))
            positions_BT = torch.arange(1 + k, 13 + k).expand(2, -1)
            expected_BTD = theirs.forward_layer(
                k, expected_BTD, positions_BT, None, input_ids=next_BT
            )
            true = slice(0, 11 - k)
            found_BTV = features.modules.logits(draft_BTD)[:, true]
            assert_same_logits(found_BTV, theirs._project_to_logits(expected_BTD)[:, true])


def test_draft_logits_of_nemotron_are_those_of_its_own_blocks() -> None:
    """A block with attention, which has no positions, and one with experts, run by transformers
    over the whole text."""
    model = tiny_model_of("nemotron_h")
    head = random_mtp(model)
    features = features_after(model, TOKENS_BT)
    layer = head.mtp_layers[0]
    blocks: Any = model.model.layers[1:]
    blocks.load_state_dict(layer.blocks.state_dict())

    def norm(own: Any, x_BTD: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x_BTD, (32,), own.weight, model.config.layer_norm_epsilon)

    tokens_BTD = norm(layer.token_layernorm, features.modules.embed(TOKENS_BT[:, 1:]))
    hidden_BTD = norm(layer.hidden_layernorm, features.features_BTF[:, :-1])
    causal_mask = torch.full((11, 11), -torch.inf).triu(1)[None, None]
    with torch.no_grad():
        expected_BTD = layer.input_proj(torch.cat([tokens_BTD, hidden_BTD], dim=-1))
        for block in blocks:
            expected_BTD = block(expected_BTD, attention_mask=causal_mask)
        expected_BTV = features.modules.logits(norm(layer.final_layernorm, expected_BTD))
        found_BTV = features.modules.logits(head.drafts(features, 1)[0])[:, :-1]
    assert_same_logits(found_BTV, expected_BTV)


# Heads in a model's own checkpoint.

NAMES = {
    "qwen": {
        "input_proj": "mtp.fc",
        "final_layernorm": "mtp.norm",
        "hidden_layernorm": "mtp.pre_fc_norm_hidden",
        "token_layernorm": "mtp.pre_fc_norm_embedding",
        "": "mtp.layers.0",
    },
    "deepseek": {
        "input_proj": "model.layers.{n}.eh_proj",
        "final_layernorm": "model.layers.{n}.shared_head.norm",
        "hidden_layernorm": "model.layers.{n}.hnorm",
        "token_layernorm": "model.layers.{n}.enorm",
        "": "model.layers.{n}",
    },
    "mimo": {"": "model.mtp_layers.{l}"},
    "ernie": {
        "input_proj": "model.mtp_linear_proj.{l}",
        "hidden_layernorm": "model.mtp_hidden_norm.{l}",
        "token_layernorm": "model.mtp_emb_norm.{l}",
        "": "model.mtp_block.{l}",
    },
    "nemotron": {
        "input_proj": "mtp.layers.0.eh_proj",
        "final_layernorm": "mtp.layers.1.final_layernorm",
        "hidden_layernorm": "mtp.layers.0.hnorm",
        "token_layernorm": "mtp.layers.0.enorm",
        "blocks": "mtp.layers",
    },
    "speculators": {"": "mtp_layers.{l}"},
}
"""How families call the parts of an MTP layer; "" is all that the decoder layer has itself."""


def as_named(head: MtpHead, family: str) -> dict[str, torch.Tensor]:
    """A head's tensors by a family's names, each expert by itself."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in head.state_dict().items():
        _, layer, part, *rest = name.split(".")
        names = NAMES[family]
        if family == "ernie" and part == "final_layernorm":  # that of the model itself
            continue
        place = names.get(part, names.get("", "")).format(l=layer, n=FIRST_LAYER + int(layer))
        tail = rest if part in names else [part, *rest]
        if "experts" not in tail or family == "speculators":
            found[".".join([place, *tail])] = tensor.clone()
            continue
        for number, matrix in enumerate(tensor):
            parts = {tail[-1]: matrix}
            if tail[-1] == "gate_up_proj":
                parts = {"gate_proj": matrix[:16], "up_proj": matrix[16:]}
            for kind, weight in parts.items():
                found[".".join([place, *tail[:-1], str(number), kind, "weight"])] = weight.clone()
    return found


def save_with(
    model: PreTrainedModel, tensors: dict[str, torch.Tensor], folder: Path, shards: bool = True
) -> None:
    """A model's checkpoint that brings an MTP head, in a file of its own or all in one."""
    model.save_pretrained(folder)
    saved = load_file(folder / "model.safetensors")
    if not shards:
        save_file(saved | tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    (folder / "model.safetensors").unlink()
    save_file(saved, folder / "model-00001-of-00002.safetensors", metadata={"format": "pt"})
    save_file(tensors, folder / "model-00002-of-00002.safetensors", metadata={"format": "pt"})
    files = dict.fromkeys(saved, "model-00001-of-00002.safetensors")
    files |= dict.fromkeys(tensors, "model-00002-of-00002.safetensors")
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def read_head(model: PreTrainedModel, folder: Path) -> MtpHead:
    info = target_info(model.config, str(folder), model.config.vocab_size, 3)
    return read_native_mtp(folder, info, described(model.config))


@pytest.mark.parametrize(
    ("kind", "family", "layers", "shards"),
    [
        ("qwen3_next", "qwen", 1, True),
        ("qwen3_5_text", "qwen", 1, False),
        ("deepseek_v3", "deepseek", 1, True),
        ("glm4_moe", "deepseek", 2, False),
        ("qwen2", "mimo", 3, True),
        ("ernie4_5_moe", "ernie", 1, True),
        ("ernie4_5_moe", "ernie", 2, False),
        ("nemotron_h", "nemotron", 1, True),
        ("qwen3", "speculators", 1, True),
    ],
)
def test_the_head_in_a_models_checkpoint_is_read_by_its_familys_names(
    kind, family, layers, shards, tmp_path
) -> None:
    model = tiny_model_of(kind)
    order = {"hidden_first": True, "zero_first": True} if family == "mimo" else {}
    head = random_mtp(model, num_layers=layers, depth=layers, **order)
    if family == "ernie":
        share_the_norm(head, model)
    tensors = as_named(head, family)
    if family == "deepseek":  # copies of the model's own
        tensors["model.layers.3.embed_tokens.weight"] = torch.zeros(2, 2)
        tensors["model.layers.3.shared_head.head.weight"] = torch.zeros(2, 2)
    save_with(model, tensors, tmp_path, shards)
    found = read_head(model, tmp_path)
    assert found.config.num_layers == layers
    assert found.config.hidden_first == found.config.zero_first == (family == "mimo")
    assert same_tensors(found.state_dict(), head.state_dict())


def share_the_norm(head: MtpHead, model: PreTrainedModel) -> None:
    """Give a head the last norm of its model, as ERNIE's has it."""
    norm: Any = model.get_decoder().norm
    torch.nn.init.normal_(norm.weight, std=0.5)
    for layer in head.mtp_layers:
        layer.get_submodule("final_layernorm").load_state_dict(norm.state_dict())


@pytest.mark.parametrize(
    ("kind", "family", "norm"),
    [
        ("glm4_moe", "deepseek", "model.layers.3.hnorm.weight"),
        ("qwen3_next", "qwen", "mtp.norm.weight"),
        ("nemotron_h", "nemotron", "mtp.layers.1.final_layernorm.weight"),
        ("nemotron_h", "nemotron", "mtp.layers.1.norm.weight"),
        ("ernie4_5_moe", "ernie", "model.mtp_emb_norm.0.weight"),
    ],
)
def test_what_is_wrong_with_a_models_mtp_tensors_is_told_by_the_names_there(
    kind, family, norm, tmp_path
) -> None:
    model = tiny_model_of(kind)
    tensors = as_named(random_mtp(model), family)
    sinks = "model.mtp.layers.0.pre_mlp_layernorm.weight"
    cases = {
        f"missing '{norm}'": leaving_out(tensors, norm),
        f"'{norm}' shape (31,) (32,)": tensors | {norm: torch.ones(31)},
        f"'{norm}' infinite": tensors | {norm: torch.full((32,), torch.nan)},
        f"unknown '{norm[:-6]}bias'": tensors | {f"{norm[:-6]}bias": torch.ones(32)},
        "no MTP": {},
        "mtp.strange.weight": {"mtp.strange.weight": torch.ones(2)},
        "sliding window sinks": {
            sinks: torch.ones(32),
            "model.mtp.layers.0.eh_proj.weight": torch.ones(32, 64),
        },
    }
    expert = next((name for name in tensors if name.endswith("experts.2.up_proj.weight")), None)
    if expert is not None:
        cases["experts.2.up_proj.weight'"] = leaving_out(tensors, expert)
        cases["MTP read"] = tensors | {expert: tensors[expert][:, :5].clone()}
    for number, (words, wrong) in enumerate(cases.items()):
        save_with(model, wrong, tmp_path / str(number), shards=number % 2 == 0)
        with refused(words):
            read_head(model, tmp_path / str(number))


def test_experts_of_a_head_in_fp8_are_scaled_by_their_blocks(tmp_path) -> None:
    model = tiny_model_of("glm4_moe")
    head = random_mtp(model)
    tensors = as_named(head, "deepseek")
    name = "model.layers.3.eh_proj.weight"
    scale = torch.tensor([[0.5]])
    tensors |= {f"{name}_scale_inv": scale, name: (tensors[name] / 0.5).to(torch.float8_e4m3fn)}
    save_with(model, tensors, tmp_path)
    found = read_head(model, tmp_path).state_dict()["mtp_layers.0.input_proj.weight"]
    torch.testing.assert_close(
        found.float(), head.state_dict()["mtp_layers.0.input_proj.weight"], rtol=0.1, atol=0.01
    )


def test_a_layer_of_blocks_with_a_state_is_refused() -> None:
    model = tiny_model_of("nemotron_h")
    model.config.mtp_layers_block_type = model.config.layers_block_type
    with refused("attention state"):
        random_mtp(model)


# Decoding with the target's own head.


@needs_mtp
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe"])
def test_chains_take_as_many_rounds_as_transformers_and_trees_fewer(kind, layers, tmp_path) -> None:
    """The same tokens as `generate(use_mtp=True)`, by the same drafts; a tree accepts more of
    them."""
    model = tiny_model_of(kind, vocab_size=4)
    save_with(
        model, as_named(random_mtp(model, num_layers=layers, depth=layers), "deepseek"), tmp_path
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    model.config.num_mtp_layers = layers
    model._keys_to_ignore_on_load_unexpected = [
        rf"model\.layers\.{FIRST_LAYER + k}\..*" for k in range(layers)
    ]
    prompt_1T = torch.tensor([[3, 1, 0, 1, 2, 3, 2, 0]])
    settings = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    settings["attention_mask"] = torch.ones_like(prompt_1T)
    forwards: list[int] = []
    hook = model.model.register_forward_pre_hook(lambda *_: forwards.append(1))
    theirs = model.generate(prompt_1T, use_mtp=True, **settings)
    hook.remove()
    rounds = len(forwards) - 1  # the first reads the prompt
    # Without kernels, which round a head's weights to 8 bits.
    lm = SpeculativeLM.from_pretrained(
        model, "mtp", tree=f"chain:{layers}", adaptive=False, compile=False
    )
    chain = lm.generate(prompt_1T, **settings)
    assert torch.equal(chain.sequences, theirs)
    assert chain.stats.rounds == rounds < 39, "no draft was accepted, so nothing was shown"
    tree = SpeculativeLM.from_pretrained(
        model, "mtp", tree=f"dynamic:10:{layers}:3", adaptive=False
    )
    output = tree.generate(prompt_1T, **settings)
    assert torch.equal(output.sequences, theirs)
    assert output.stats.rounds < rounds


def test_what_brings_no_head_is_refused_before_the_first_token(tmp_path, monkeypatch) -> None:
    model = tiny_model_of("llama")
    folder = tmp_path / "plain"
    model.save_pretrained(folder)
    with refused("MTP --head.type"):
        SpeculativeLM.from_pretrained(folder, "mtp")
    with refused("'LlamaForCausalLM'"):
        SpeculativeLM.from_pretrained(model, "mtp")
    with refused("revision"):
        SpeculativeLM.from_pretrained(folder, "mtp", head_revision="main")
    monkeypatch.chdir(tmp_path)
    Path("mtp").mkdir()
    Path("mtp/config.json").write_text("{}")
    with refused("'./mtp'"):
        SpeculativeLM.from_pretrained(folder, "mtp")


# Heads written back, imported, and started from.


@pytest.mark.parametrize(
    ("kind", "family", "shards"),
    [
        ("deepseek_v3", "deepseek", False),
        ("qwen3_next", "qwen", True),
        ("nemotron_h", "nemotron", True),
    ],
)
def test_a_head_is_written_into_its_models_checkpoint_and_read_again(
    kind, family, shards, tmp_path
) -> None:
    """By the names of the family; all other tensors are what they were, and the model is loaded as
    before."""
    model = tiny_model_of(kind)
    head = random_mtp(model)
    save_with(model, as_named(head, family), tmp_path / "before", shards)
    tuned = random_mtp(model)
    for parameter in tuned.parameters():
        parameter.data += 1
    write_native_mtp(tuned, tmp_path / "before", tmp_path / "after")
    write_native_mtp(tuned, tmp_path / "before", tmp_path / "after")  # over an earlier one
    assert same_tensors(read_head(model, tmp_path / "after").state_dict(), tuned.state_dict())
    assert read_weights(tmp_path / "after").keys() == read_weights(tmp_path / "before").keys()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "after", dtype=torch.float32)
    assert same_tensors(again.state_dict(), model.state_dict())
    plain = tmp_path / "plain"
    model.save_pretrained(plain)
    with refused("MTP"):
        write_native_mtp(tuned, plain, tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()
    with refused("MTP"):
        write_native_mtp(tuned, tmp_path / "before", plain)


def test_a_head_that_uses_its_models_norm_is_written_only_with_that_norm(tmp_path) -> None:
    model = tiny_model_of("ernie4_5_moe")
    head = random_mtp(model)
    share_the_norm(head, model)
    save_with(model, as_named(head, "ernie"), tmp_path / "before")
    head.state_dict()["mtp_layers.0.input_proj.weight"].add_(1)
    write_native_mtp(head, tmp_path / "before", tmp_path / "after")
    assert torch.equal(
        read_head(model, tmp_path / "after").mtp_layers[0].input_proj.weight,
        head.mtp_layers[0].input_proj.weight,
    )
    head.state_dict()["mtp_layers.0.final_layernorm.weight"].add_(1)
    with refused("'mtp_layers.0.final_layernorm.weight'"):
        write_native_mtp(head, tmp_path / "before", tmp_path / "other")


def test_a_saved_head_is_a_folder_of_speculators_and_imported_from_one(tmp_path) -> None:
    """The folder that `save_head` writes, without the section that only headstart reads."""
    model = tiny_model_of("qwen3")
    head = random_mtp(model, depth=4)
    save_head(head, tmp_path, CheckpointMetadata())
    config = json.loads((tmp_path / "config.json").read_text())
    del config["headstart"]
    info = target_info(model.config, "tiny", 13, 3)
    found, source = import_head(config, load_file(tmp_path / "model.safetensors"), info)
    assert source.form == "speculators-mtp" and found.max_depth == 8
    assert same_tensors(found.state_dict(), head.state_dict())
    config["transformer_layer_config"]["hidden_size"] = 64
    with refused("hidden_size 64 'tiny' 32"):
        import_head(config, load_file(tmp_path / "model.safetensors"), info)


def test_training_starts_from_the_head_that_the_target_brings(tmp_path) -> None:
    model = tiny_model_of("glm4_moe")
    native = random_mtp(model)
    save_with(model, as_named(native, "deepseek"), tmp_path)
    target = Target.from_pretrained(tmp_path, torch.float32)
    config = TrainConfig(
        target=str(tmp_path), output="run", data=DataConfig(["data"]), head={"type": "mtp"}
    )
    head = head_of(config, target.info, target.config)
    assert isinstance(head, MtpHead) and head.kind == "glm4_moe"
    warm_start(head, "mtp", target, torch.ones(13), {"tokenizer": "any"})
    assert same_tensors(head.state_dict(), native.state_dict())
    other = dataclasses.replace(config, head={"type": "mtp", "hidden_first": True})
    different = head_of(other, target.info, target.config)
    with refused("hidden_first False True"):
        warm_start(different, "mtp", target, torch.ones(13), {"tokenizer": "any"})


@pytest.mark.parametrize(
    ("kind", "scaled"), [("llama", True), ("qwen3_next", True), ("olmo2", False)]
)
def test_a_layer_starts_as_the_targets_block_and_moves_the_stream_as_blocks_do(
    kind, scaled
) -> None:
    """The block's outputs are made small, so that the embedding counts soon; norms after them would
    undo that."""
    model = tiny_model_of(kind)
    head = random_mtp(model, start="last")
    head.initialize(target_modules(model), torch.ones(13))
    block, layer = model.model.layers[-1].state_dict(), head.mtp_layers[0].state_dict()
    for name, tensor in block.items():
        if scaled and not OUTPUTS.isdisjoint(name.split(".")):
            factor = layer[name].norm() / tensor.norm()
            assert not torch.isclose(factor, torch.ones_like(factor))
            torch.testing.assert_close(layer[name], factor * tensor)
        else:
            assert torch.equal(layer[name], tensor)
    assert torch.equal(layer["final_layernorm.weight"], model.model.norm.weight)
    features = features_after(model, TOKENS_BT)
    moved: list[float] = []
    run = head.draft_layers.run

    def noted(own: Any, z_BTD: torch.Tensor, *given: Any) -> torch.Tensor:
        out_BTD = run(own, z_BTD, *given)
        moved.append(((out_BTD - z_BTD).norm() / z_BTD.norm()).item())
        return out_BTD

    head.draft_layers.run = noted
    head.drafts(features, 1)
    assert STEP / 3 < moved[0] < 3 * STEP
