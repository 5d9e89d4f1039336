"""EAGLE-3 heads: training's steps are the drafts of decoding, and the checkpoint is what servers
read."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refused
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.heads import CheckpointMetadata, DraftState, Eagle3Head, TargetFeatures, build_head
from headstart.heads.checkpoints.save_load import save_head
from headstart.heads.layers.training_time_test import TrainingTimeTest
from headstart.heads.objective import Objective
from headstart.inference import Target

VOCAB, WIDTH, BLOCKS, DEPTH = 47, 32, 7, 4
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "3.1": {"fc_norm": True, "norm_output": True},
    "qk_norm": {"qk_norm": True},
    "two layers": {"num_layers": 2},
    "truncated": {"draft_vocab_size": 20},
    "narrow": {
        "hidden_size": 16,
        "intermediate_size": 20,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 4,
    },
    "two features": {"feature_layers": [4, -1]},
    "started": {"start": "last"},
    "everything": {
        "num_layers": 3,
        "draft_vocab_size": 20,
        "hidden_size": 24,
        "qk_norm": True,
        "fc_norm": True,
        "norm_output": True,
        "feature_layers": [0, 2, 5, -1],
    },
}


@pytest.fixture(scope="module")
def target() -> Target:
    """Seven blocks, so that EAGLE-3's own choice of layers exists: 1, 2 and 3."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=40,
        num_hidden_layers=BLOCKS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        parameter.data = parameter.data + 0.1 * torch.randn_like(parameter)
    return Target(model.requires_grad_(False), "made-up/target")


def build(
    name: str, target: Target, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Eagle3Head:
    """A head away from its starting values, with a draft vocabulary of random tokens."""
    torch.manual_seed(seed)
    head = build_head("eagle3", {"depth": DEPTH, **OPTIONS[name]}, target.info)
    assert isinstance(head, Eagle3Head)
    head.initialize(target.modules, torch.randperm(VOCAB) + 1)
    for parameter in head.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return head.to(dtype).eval()


def read(
    target: Target, head: Eagle3Head, tokens_BT: Tensor, mask_BT: Tensor | None = None
) -> TargetFeatures:
    """The batch as training sees it; all of it answer unless a mask says otherwise."""
    features_BTF, last_BTD = target.read(tokens_BT, head.feature_layers)
    dtype = head.fc.weight.dtype
    modules = target.modules
    if dtype != target.dtype:
        modules = replace(modules, embed=lambda tokens: target.modules.embed(tokens).to(dtype))
    mask_BT = torch.ones_like(tokens_BT, dtype=torch.bool) if mask_BT is None else mask_BT
    return TargetFeatures(features_BTF.to(dtype), last_BTD.to(dtype), tokens_BT, mask_BT, modules)


@torch.no_grad()
def trained_logits(head: Eagle3Head, features: TargetFeatures) -> Tensor:
    """What training judges at every position and step: logits_BTKV."""
    states = head.drafts(features, TrainingTimeTest(head.config.num_layers), head.max_depth)
    return torch.stack([head.lm_head(head.norm(state_BTD)) for state_BTD in states], dim=2)


def start(
    head: Eagle3Head, features: TargetFeatures, nodes: int = 8, capacity: int = 40
) -> DraftState:
    return head.begin(features.modules, len(features.tokens_BT), capacity, head.max_depth, nodes)


def committed(
    head: Eagle3Head,
    state: DraftState,
    features: TargetFeatures,
    before: list[int],
    lengths: list[int],
) -> DraftState:
    """`observe` of each row's next tokens; what lies behind a row's length is rubbish, as after a
    rejected path."""
    width = max(max(lengths), 1)
    features_BAF = 10 * torch.randn(len(lengths), width, features.features_BTF.shape[-1]).to(
        features.features_BTF
    )
    tokens_BA = torch.randint(VOCAB, (len(lengths), width))
    for row, (first, length) in enumerate(zip(before, lengths, strict=True)):
        features_BAF[row, :length] = features.features_BTF[row, first : first + length]
        tokens_BA[row, :length] = features.tokens_BT[row, first + 1 : first + 1 + length]
    return head.observe(state, features_BAF, tokens_BA, torch.tensor(lengths))


@torch.no_grad()
def chain_logits(head: Eagle3Head, state: DraftState, path_BK: Tensor) -> tuple[Tensor, DraftState]:
    """What decoding drafts from, along one path for each row, the root first: logits_BKV, and the
    state after it."""
    logits = []
    for depth in range(path_BK.shape[1]):
        parents_B1 = torch.full_like(path_BK[:, :1], -1 if depth == 0 else 0)
        logits_B1V, state = head.expand(state, path_BK[:, depth : depth + 1], parents_B1)
        logits.append(logits_B1V[:, 0])
    return torch.stack(logits, dim=1), state


def draft(head: Eagle3Head, state: DraftState) -> DraftState:
    """A round's drafts, a tree that is then rejected: a root, three children, two grandchildren."""
    batch = 3
    with torch.no_grad():
        for width, above in ((1, None), (3, 1), (2, 3)):
            parents_BW = (
                torch.full((batch, 1), -1)
                if above is None
                else torch.randint(above, (batch, width))
            )
            _, state = head.expand(state, torch.randint(VOCAB, (batch, width)), parents_BW)
    return state


# Training and drafting are the same function.


@pytest.mark.parametrize(
    ("dtype", "close"), [(torch.float32, 1e-5), (torch.float64, 1e-12)], ids=["single", "double"]
)
@pytest.mark.parametrize("name", OPTIONS)
def test_every_trained_step_is_a_draft_of_decoding(
    name: str, dtype: torch.dtype, close: float, target: Target
) -> None:
    """After every round, along the true text; rows commit different numbers of tokens, and one
    ends."""
    head = build(name, target, dtype)
    torch.manual_seed(1)
    features = read(target, head, torch.randint(VOCAB, (3, 26)))
    expected_BTKV = trained_logits(head, features)
    state, before = start(head, features), [0, 0, 0]
    for lengths in ([4, 9, 1], [1, 3, 5], [5, 1, 2], [2, 0, 1], [1, 0, 4]):
        state = committed(head, state, features, before, lengths)
        before = [first + length for first, length in zip(before, lengths)]
        path_BK = torch.stack(
            [row[first : first + DEPTH] for row, first in zip(features.tokens_BT, before)]
        )
        drafted_BKV, after = chain_logits(head, state, path_BK)
        for row, (first, length) in enumerate(zip(before, lengths)):
            if length:  # what is drafted for a row that has ended does not matter
                wanted_KV = expected_BTKV[row, first - 1]
                torch.testing.assert_close(drafted_BKV[row], wanted_KV, rtol=close, atol=close)
        state = draft(head, state) if before[0] % 2 else after  # either way `observe` forgets it
    steps = expected_BTKV[:, :10].unbind(2)
    assert not any(
        torch.allclose(one, other, atol=1e-2) for one, other in itertools.pairwise(steps)
    )


@pytest.mark.parametrize("name", OPTIONS)
def test_paths_that_are_expanded_side_by_side_are_chains_of_their_own(
    name: str, target: Target
) -> None:
    """Other paths in every row, of which some part late; each is what it would be alone, and as
    training sees it."""
    head = build(name, target, torch.float64)
    torch.manual_seed(2)
    features = read(target, head, torch.randint(VOCAB, (3, 14)))
    lengths = [5, 2, 8]
    # parents of each row's frontier, level by level
    levels: list[list[list[int]]] = [[[0], [0], [0]]]
    levels += [
        [[0, 0, 0]] * 3,
        [[2, 0, 0, 1], [0, 1, 2, 2], [1, 1, 1, 0]],
        [[3, 0], [1, 1], [2, 3]],
    ]
    tokens = [features.tokens_BT[torch.arange(3), torch.tensor(lengths)][:, None]]
    tokens += [torch.randint(VOCAB, (3, len(level[0]))) for level in levels[1:]]
    nodes = 1 + sum(len(level[0]) for level in levels[1:])
    state = committed(head, start(head, features, nodes), features, [0, 0, 0], lengths)
    paths: list[list[list[int]]] = [[[]] for _ in range(3)]
    for depth, (level, tokens_BW) in enumerate(zip(levels, tokens, strict=True)):
        parents_BW = torch.tensor(level) - int(depth == 0)
        with torch.no_grad():
            logits_BWV, state = head.expand(state, tokens_BW, parents_BW)
        paths = [
            [[*above[parent], token] for parent, token in zip(parents, own)]
            for above, parents, own in zip(paths, level, tokens_BW.tolist())
        ]
        for place in range(tokens_BW.shape[1]):
            path_BK = torch.tensor([own[place] for own in paths])
            alone = committed(head, start(head, features), features, [0, 0, 0], lengths)
            expected_BV = chain_logits(head, alone, path_BK)[0][:, depth]
            torch.testing.assert_close(logits_BWV[:, place], expected_BV, rtol=0, atol=1e-12)
            if depth == DEPTH - 1:
                text_BT = torch.zeros(3, max(lengths) + DEPTH, dtype=torch.int64)
                for row, length in enumerate(lengths):
                    text_BT[row, :length] = features.tokens_BT[row, :length]
                    text_BT[row, length : length + DEPTH] = path_BK[row]
                trained_BTKV = trained_logits(head, read(target, head, text_BT))
                wanted_BV = trained_BTKV[torch.arange(3), torch.tensor(lengths) - 1, depth]
                torch.testing.assert_close(logits_BWV[:, place], wanted_BV, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["plain", "truncated", "everything"])
def test_the_loss_at_every_position_is_that_of_the_logits_that_draft_there(
    name: str, target: Target
) -> None:
    """Positions are singled out by masks; the token is the label, so that nothing of the target's
    enters."""
    head = build(name, target, torch.float64)
    objective = Objective({"ce": 1.0})
    torch.manual_seed(3)
    tokens_BT = torch.randint(VOCAB, (1, 8))
    drafted = head.target_tokens(torch.arange(head.draft_vocab_size)).tolist()
    for place in range(6):
        features = read(target, head, tokens_BT)
        state = committed(head, start(head, features), features, [0], [place + 1])
        (logits_KV,), _ = chain_logits(head, state, tokens_BT[:, place + 1 : place + 1 + DEPTH])
        for depth in range(min(DEPTH, 6 - place)):
            mask_BT = torch.zeros(1, 8, dtype=torch.bool)
            mask_BT[:, place + 1 : place + 3 + depth] = True
            output = head(
                replace(features, loss_mask_BT=mask_BT), objective, ranks=head.draft_vocab_size
            )
            assert output.counts_K[depth] == 1
            token = int(tokens_BT[0, place + 2 + depth])
            if token not in drafted:
                assert output.losses_K[depth] == 0 and not output.hits_KI[depth].any()
                continue
            label = drafted.index(token)
            expected = F.cross_entropy(logits_KV[depth], torch.tensor(label))
            torch.testing.assert_close(output.losses_K[depth], expected, rtol=0, atol=1e-10)
            rank = int((logits_KV[depth] > logits_KV[depth, label]).sum())
            assert output.hits_KI[depth].nonzero().flatten().tolist() == [rank]


@pytest.mark.parametrize("steps", [None, 1, 3, DEPTH])
def test_as_many_steps_are_trained_as_asked_and_all_are_evaluated(
    steps: int | None, target: Target
) -> None:
    head = build("plain", target)
    head.config = replace(head.config, train_steps=steps)
    features = read(target, head, torch.randint(VOCAB, (2, 9)))
    evaluated, trained = head.eval()(features, ranks=2), head.train()(features, ranks=2)
    count = steps or DEPTH
    assert trained.losses_K.shape == (count,) and trained.hits_KI.shape == (count, 2)
    assert torch.equal(evaluated.losses_K[:count], trained.losses_K)
    assert evaluated.counts_K.tolist() == [2 * (7 - depth) for depth in range(DEPTH)]


@pytest.mark.parametrize("name", OPTIONS)
def test_training_reaches_every_parameter_and_leaves_the_target_alone(
    name: str, target: Target
) -> None:
    head = build(name, target).train()
    mask_BT = torch.rand(2, 12) < 0.9
    mask_BT[:, 4:8] = True
    head(read(target, head, torch.randint(VOCAB, (2, 12)), mask_BT)).loss.backward()
    for key, parameter in head.named_parameters():
        assert parameter.grad is not None and parameter.grad.any(), key
    assert all(parameter.grad is None for parameter in target.model.parameters())
    frozen = {id(tensor) for tensor in target.model.parameters()}
    assert not any(id(parameter) in frozen for parameter in head.parameters())
    places = [parameter.data_ptr() for parameter in head.parameters()]
    assert len(set(places)) == len(places)


def test_a_batch_without_an_answer_still_gives_every_parameter_a_gradient(target: Target) -> None:
    head = build("everything", target).train()
    output = head(
        read(target, head, torch.randint(VOCAB, (2, 6)), torch.zeros(2, 6, dtype=torch.bool))
    )
    output.loss.backward()
    assert output.loss == 0 and not output.counts_K.any()
    assert all(
        parameter.grad is not None and not parameter.grad.any() for parameter in head.parameters()
    )


# The draft vocabulary.


@pytest.mark.parametrize("size", [1, 20, VOCAB - 1, VOCAB])
def test_both_maps_name_the_most_frequent_tokens(size: int, target: Target) -> None:
    head = build_head("eagle3", {"draft_vocab_size": size}, target.info)
    assert isinstance(head, Eagle3Head)
    counts_V = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(size)) + 1
    head.initialize(target.modules, counts_V)
    chosen = sorted(sorted(range(VOCAB), key=lambda token: -int(counts_V[token]))[:size])
    assert head.d2t.dtype == torch.int64 and head.t2d.dtype == torch.bool
    assert head.d2t.tolist() == [token - i for i, token in enumerate(chosen)]
    assert head.t2d.shape == (VOCAB,) and head.t2d.nonzero().flatten().tolist() == chosen
    assert head.draft_vocab_size == size and head.lm_head.weight.shape == (size, WIDTH)
    assert head.target_tokens(torch.arange(size)).tolist() == chosen
    assert head.target_tokens(torch.tensor([[0], [size - 1]])).tolist() == [
        [chosen[0]],
        [chosen[-1]],
    ]
    assert torch.equal(head.lm_head.weight, target.modules.lm_head.weight[chosen])


def test_a_new_heads_maps_agree_before_any_data_is_seen(target: Target) -> None:
    head = build_head("eagle3", {"draft_vocab_size": 5}, target.info)
    assert isinstance(head, Eagle3Head)
    assert head.target_tokens(torch.arange(5)).tolist() == head.t2d.nonzero().flatten().tolist()


def test_the_whole_vocabulary_needs_no_maps(target: Target) -> None:
    head = build("plain", target)
    assert head.draft_vocab_size == VOCAB and not dict(head.named_buffers())
    assert head.target_tokens(torch.arange(VOCAB)).tolist() == list(range(VOCAB))


# How a head begins.


@pytest.mark.parametrize(("start_at", "block"), [("last", BLOCKS - 1), (0, 0), (3, 3)])
@pytest.mark.parametrize("layers", [1, 3])
def test_a_head_may_begin_with_the_weights_of_a_block(
    start_at: str | int, block: int, layers: int, target: Target
) -> None:
    head = build_head("eagle3", {"start": start_at, "num_layers": layers}, target.info)
    assert isinstance(head, Eagle3Head)
    head.initialize(target.modules, torch.ones(VOCAB))
    theirs = target.model.model.layers[block].state_dict()
    first = head.midlayer.state_dict()
    for kind in "qkv":
        weight = first.pop(f"self_attn.{kind}_proj.weight")
        assert not weight[:, :WIDTH].any() and torch.equal(
            weight[:, WIDTH:], theirs[f"self_attn.{kind}_proj.weight"]
        )
    assert torch.equal(first.pop("hidden_norm.weight"), theirs["input_layernorm.weight"])
    assert first and all(torch.equal(tensor, theirs[key]) for key, tensor in first.items())
    assert len(head.layers) == layers - 1
    for layer in head.layers.values():
        assert all(torch.equal(tensor, theirs[key]) for key, tensor in layer.state_dict().items())
    fused = torch.randn(2, 3 * WIDTH)
    assert torch.equal(head.fc(fused), fused[:, -WIDTH:])


@pytest.mark.parametrize("layer", [3, 4])
def test_a_head_that_begins_with_a_block_is_that_block(layer: int, target: Target) -> None:
    """Fed with the output of the block before it, its first step is the block's own output,
    whatever the tokens."""
    head = build_head("eagle3", {"start": layer + 1, "feature_layers": [2, layer]}, target.info)
    assert isinstance(head, Eagle3Head)
    head.initialize(target.modules, torch.ones(VOCAB))
    tokens_BT = torch.randint(VOCAB, (2, 10))
    with torch.no_grad():
        first, *_ = head.drafts(read(target, head, tokens_BT), TrainingTimeTest(1), 1)
    theirs, _ = target.read(tokens_BT, (layer + 1,))
    torch.testing.assert_close(first, theirs, rtol=1e-4, atol=1e-5)


def test_the_lm_head_and_the_final_norm_begin_as_the_targets_unless_told_otherwise(
    target: Target,
) -> None:
    for asked in (True, False):
        head = build_head("eagle3", {"start_lm_head": asked}, target.info)
        assert isinstance(head, Eagle3Head)
        head.initialize(target.modules, torch.ones(VOCAB))
        assert torch.equal(head.lm_head.weight, target.modules.lm_head.weight) == asked
        assert torch.equal(head.norm.weight, target.modules.norm.weight) == asked
        assert head.lm_head.weight.data_ptr() != target.modules.lm_head.weight.data_ptr()


def test_a_narrower_head_keeps_its_own_lm_head_and_embedding(target: Target) -> None:
    head = build_head("eagle3", OPTIONS["narrow"], target.info)
    assert isinstance(head, Eagle3Head)
    before = head.lm_head.weight.clone()
    head.initialize(target.modules, torch.ones(VOCAB))
    assert torch.equal(head.lm_head.weight, before) and head.embed_tokens.weight.shape == (
        VOCAB,
        16,
    )


@pytest.mark.parametrize(
    ("blocks", "layers"),
    [(4, (0, 1, 2)), (5, (0, 1, 3)), (6, (0, 2, 4)), (7, (1, 2, 3)), (30, (1, 14, 26))],
)
def test_the_default_layers_are_an_early_a_middle_and_a_late_one(
    blocks: int, layers: tuple[int, ...], target: Target
) -> None:
    assert (
        build_head("eagle3", {}, replace(target.info, num_layers=blocks)).feature_layers == layers
    )


# What servers read.


@pytest.mark.parametrize("name", OPTIONS)
def test_config_has_the_keys_of_servers_with_both_ways_of_counting_layers(
    name: str, target: Target, tmp_path: Path
) -> None:
    options = OPTIONS[name]
    save_head(build(name, target), tmp_path / "head", CheckpointMetadata())
    config = json.loads((tmp_path / "head" / "config.json").read_text(encoding="utf-8"))
    layers = options.get("feature_layers", [1, 2, 3])
    section = config.pop("headstart")
    assert section["head"] == "eagle3" and options.items() <= section["options"].items()
    rope = target.info.rope_parameters
    assert config == {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": options.get("hidden_size", WIDTH),
        "target_hidden_size": WIDTH,
        "intermediate_size": options.get("intermediate_size", 40),
        "num_attention_heads": options.get("num_attention_heads", 4),
        "num_key_value_heads": options.get("num_key_value_heads", 2),
        "head_dim": options.get("head_dim", 8),
        "hidden_act": "silu",
        "rms_norm_eps": target.info.rms_norm_eps,
        "num_hidden_layers": options.get("num_layers", 1),
        "vocab_size": VOCAB,
        "draft_vocab_size": options.get("draft_vocab_size", VOCAB),
        "tie_word_embeddings": False,
        "max_position_embeddings": 128,
        "rope_theta": 10000.0,
        "rope_scaling": {key: value for key, value in rope.items() if key != "rope_theta"},
        "rope_parameters": rope,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": options.get("fc_norm", False),
        "norm_output": options.get("norm_output", False),
        "num_aux_hidden_states": len(layers),
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in layers],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": layers, "use_aux_hidden_state": True},
        "torch_dtype": "float32",
    }


def test_a_rotary_embedding_without_scaling_is_said_to_have_none(target: Target) -> None:
    info = replace(target.info, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    config = build_head("eagle3", {}, info).server_config()
    assert (config["rope_scaling"], config["rope_theta"]) == (None, 5e5)


# What is refused.


def test_a_draft_vocabulary_larger_than_the_data_is_refused(target: Target) -> None:
    head = build_head("eagle3", {"draft_vocab_size": 6}, target.info)
    counts_V = torch.zeros(VOCAB, dtype=torch.int64)
    counts_V[10:15] = 3
    with refused("eagle3 draft_vocab_size 6 larger 5"):
        head.initialize(target.modules, counts_V)
    counts_V[2] = 1
    head.initialize(target.modules, counts_V)
    assert head.target_tokens(torch.arange(6)).tolist() == [2, 10, 11, 12, 13, 14]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_dim": 4}, "self_attn"),
        ({"intermediate_size": 24}, "24 32 40"),
        ({"hidden_size": 16}, "first layer"),
        ({"num_key_value_heads": 4}, "self_attn.k_proj.weight 32 64 16"),
    ],
    ids=str,
)
def test_a_start_from_a_block_of_other_dimensions_is_refused(
    options: dict[str, int], message: str, target: Target
) -> None:
    head = build_head("eagle3", {"start": "last", **options}, target.info)
    with refused(message):
        head.initialize(target.modules, torch.ones(VOCAB))


@pytest.mark.parametrize("block", [BLOCKS, 99, -BLOCKS - 1])
def test_a_start_from_a_block_that_is_not_there_is_refused(block: int, target: Target) -> None:
    head = build_head("eagle3", {"start": block}, target.info)
    with refused(f"eagle3 {block} {BLOCKS}"):
        head.initialize(target.modules, torch.ones(VOCAB))
