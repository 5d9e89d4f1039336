"""Shared layers: the target's own block where the weights are its own, and memories that show what they should."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from headstart.heads.layers.decoder_layer import (
    Attention,
    DecoderLayer,
    DraftCache,
    LayerShape,
    RMSNorm,
    Rotary,
    TrainingTimeTest,
    target_layer_weights,
)
from headstart.inference import Target

HEADS, GROUPS, SIZE = 4, 2, 8
CLOSE = {"rtol": 0.0, "atol": 1e-12}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "another base": {"rope_type": "default", "rope_theta": 300.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": LLAMA3,
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
SIZES = {
    "vocab_size": 31,
    "hidden_size": HEADS * SIZE,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": SIZE,
    "max_position_embeddings": 512,
}


def build_target(rope: dict[str, Any], qwen: bool = False) -> Target:
    torch.manual_seed(0)
    if qwen:
        return Target(Qwen3ForCausalLM(Qwen3Config(**SIZES, rope_parameters=rope)).double())
    return Target(LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=rope)).double())


def shape_of(target: Target, qk_norm: bool = False) -> LayerShape:
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act")
    given = {name: getattr(target.info, name) for name in names}
    return LayerShape(**given, rms_norm_eps=target.info.rms_norm_eps, qk_norm=qk_norm)


def found_by(query_HE: Tensor, keys_SGE: Tensor, values_SGE: Tensor) -> Tensor:
    """What one position's queries find among explicit keys, head by head: [H, E]."""
    rows = []
    for head, query_E in enumerate(query_HE):
        group = head // (HEADS // GROUPS)
        weights_S = (keys_SGE[:, group] @ query_E / math.sqrt(SIZE)).softmax(-1)
        rows.append(weights_S @ values_SGE[:, group])
    return torch.stack(rows)


# Positions.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ROPES)
def test_the_rotary_embedding_is_the_targets_with_its_scaling(name: str, dtype: torch.dtype) -> None:
    target = build_target(ROPES[name])
    positions_BT = torch.cat([torch.arange(300)[None], torch.randint(512, (1, 300))])
    theirs = target.model.model.rotary_emb(torch.empty(0, dtype=dtype), positions_BT)
    ours = Rotary(target.info, SIZE)(positions_BT, dtype)
    for mine, wanted in zip(ours, theirs, strict=True):
        assert mine.dtype == dtype and torch.equal(mine, wanted)
    plain = Rotary(replace(target.info, rope_parameters=ROPES["default"]), SIZE)(positions_BT, dtype)
    assert torch.equal(ours[0], plain[0]) == (name == "default")


def test_the_rotary_embedding_has_nothing_to_save_and_stays_in_float32() -> None:
    target = build_target(LLAMA3)
    rotary = nn.ModuleList([Rotary(target.info, SIZE)])
    positions_BT = torch.tensor([[1, 100, 511]])
    before = rotary[0](positions_BT, torch.float32)
    after = rotary.to(torch.bfloat16)[0](positions_BT, torch.float32)
    assert not rotary.state_dict() and all(map(torch.equal, before, after))


# Layers.


@pytest.mark.parametrize("block", [0, 1])
@pytest.mark.parametrize("name", ["llama", "llama3", "qwen"])
def test_a_layer_with_the_weights_of_a_targets_block_is_that_block(name: str, block: int) -> None:
    target = build_target(LLAMA3 if name == "llama3" else ROPES["default"], qwen=name == "qwen")
    for parameter in target.model.parameters():
        nn.init.normal_(parameter, std=0.3)
    layer = DecoderLayer(shape_of(target, qk_norm=name == "qwen")).double()
    layer.load_state_dict(target_layer_weights(target.modules.blocks, block, target.info, "some head"))
    tokens_BT = torch.randint(31, (2, 90))
    with torch.no_grad():
        hidden = target.model(tokens_BT, output_hidden_states=True).hidden_states
        rotary = Rotary(target.info, SIZE)(torch.arange(90).expand(2, -1), torch.float64)
        found_BTD = layer(hidden[block], rotary, TrainingTimeTest(1).at(0), 0)
    # transformers' norms compute in float32, whatever they are given
    torch.testing.assert_close(found_BTD, hidden[block + 1], rtol=0, atol=5e-6)


def test_a_layer_may_go_without_its_input_norm() -> None:
    shape = shape_of(build_target(LLAMA3))
    names = set(DecoderLayer(shape).state_dict())
    assert names - set(DecoderLayer(shape, input_norm=False).state_dict()) == {"input_layernorm.weight"}


def test_qk_norm_adds_one_weight_each_of_a_heads_size() -> None:
    shape = shape_of(build_target(LLAMA3))
    plain, normed = (Attention(replace(shape, qk_norm=qk_norm), 24).state_dict() for qk_norm in (False, True))
    assert {name: tuple(normed[name].shape) for name in set(normed) - set(plain)} == {
        "q_norm.weight": (SIZE,),
        "k_norm.weight": (SIZE,),
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_norms_are_torchs_own_and_keep_the_states_format(dtype: torch.dtype) -> None:
    ours, theirs = RMSNorm(12, eps=1e-3), nn.RMSNorm(12, eps=1e-3)
    nn.init.normal_(ours.weight)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(5, 12, dtype=dtype)
    assert ours(x).dtype == dtype
    torch.testing.assert_close(ours(x), theirs.to(dtype)(x), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of num_key_value_heads 3"),
        ({"hidden_size": 0}, "hidden_size must be at least 1, not 0"),
        ({"intermediate_size": -1}, "intermediate_size must be at least 1, not -1"),
        ({"head_dim": 0}, "head_dim must be at least 1, not 0"),
    ],
    ids=str,
)
def test_dimensions_that_fit_no_layer_are_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(shape_of(build_target(LLAMA3)), **change)


def test_a_block_that_is_no_llama_layer_is_refused_with_the_way_out() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=1, n_positions=16))
    with pytest.raises(
        ValueError, match=r"some head cannot start from block 0 of .* a GPT2Block, which .*; choose start: random"
    ):
        target_layer_weights(Target(model).modules.blocks, 0, Target(model).info, "some head")


# Training: whole sequences, step after step.


def attended(memory: TrainingTimeTest, layer: int, entries: list[tuple[Tensor, Tensor, Tensor]]) -> list[Tensor]:
    return [memory.at(step).attend(layer, *entry) for step, entry in enumerate(entries)]


@pytest.mark.parametrize("time", [1, 2, 7])
def test_a_training_step_attends_to_true_features_and_to_its_own_drafts(time: int) -> None:
    """Position t at step s: the keys of step 0 up to t, and of steps 1 to s at t; values and gradients."""
    batch, steps = 2, 4
    torch.manual_seed(0)

    def draw(heads: int) -> Tensor:
        return torch.randn(batch, heads, time, SIZE, dtype=torch.float64).requires_grad_()

    entries = [(draw(HEADS), draw(GROUPS), draw(GROUPS)) for _ in range(steps)]
    found = attended(TrainingTimeTest(1), 0, entries)
    wanted = []
    for step, (query, _, _) in enumerate(entries):
        rows = torch.empty_like(query)
        for row in range(batch):
            for here in range(time):
                first = [(entries[0][1][row, :, i], entries[0][2][row, :, i]) for i in range(here + 1)]
                own = [(key[row, :, here], value[row, :, here]) for _, key, value in entries[1 : step + 1]]
                keys, values = (torch.stack(part) for part in zip(*first, *own, strict=True))
                rows[row, :, here] = found_by(query[row, :, here], keys, values)
        wanted.append(rows)
    scales = [torch.randn_like(rows) for rows in wanted]
    leaves = [leaf for entry in entries for leaf in entry]
    gradients = [
        torch.autograd.grad(sum((rows * scale).sum() for rows, scale in zip(side, scales)), leaves)
        for side in (found, wanted)
    ]
    for ours, plain in ((found, wanted), gradients):
        for mine, theirs in zip(ours, plain, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-11)


def test_layers_remember_apart() -> None:
    torch.manual_seed(0)
    entries = [[torch.randn(1, heads, 3, SIZE).double() for heads in (HEADS, GROUPS, GROUPS)] for _ in range(6)]
    both = TrainingTimeTest(2)
    mixed = [both.at(i // 2).attend(i % 2, *entry) for i, entry in enumerate(entries)]
    for layer in range(2):
        alone = attended(TrainingTimeTest(1), 0, entries[layer::2])
        for mine, theirs in zip(mixed[layer::2], alone, strict=True):
            torch.testing.assert_close(mine, theirs, **CLOSE)


# Decoding: one round after the other.


class Replay:
    """A cache and, beside it, lists of every key and value that should be seen."""

    def __init__(self, batch: int, nodes: int, capacity: int, layers: int = 1, seed: int = 0) -> None:
        self.cache = DraftCache(layers, batch, nodes, capacity)
        self.batch, self.nodes, self.layers = batch, nodes, layers
        self.random = torch.Generator().manual_seed(seed)
        self.committed: list[list[list[tuple[Tensor, Tensor]]]] = [[[] for _ in range(batch)] for _ in range(layers)]
        self.lengths_B = torch.zeros(batch, dtype=torch.int64)
        self.first = 0

    def draw(self, tokens: int) -> list[Tensor]:
        return [
            torch.randn(self.batch, heads, tokens, SIZE, dtype=torch.float64, generator=self.random)
            for heads in (HEADS, GROUPS, GROUPS)
        ]

    def commit(self, lengths: list[int], tokens: int) -> None:
        """`tokens` entries of which each row keeps the first `lengths`; those are compared."""
        memory = self.cache.commit(self.lengths_B, tokens)
        for layer in range(self.layers):
            query, key, value = self.draw(tokens)
            found = memory.attend(layer, query, key, value)
            for row, length in enumerate(lengths):
                kept = self.committed[layer][row]
                for i in range(length):
                    kept.append((key[row, :, i], value[row, :, i]))
                    self.compare(found[row, :, i], query[row, :, i], kept)
        self.lengths_B = self.lengths_B + torch.tensor(lengths)
        self.first, self.paths = 0, [[[()]] * self.batch for _ in range(self.layers)]
        self.seen_BWN = torch.zeros(self.batch, 1, self.nodes, dtype=torch.bool)

    def draft(self, parents_BW: Tensor) -> None:
        """A frontier below the previous one; `parents_BW` says below which of its nodes."""
        width = parents_BW.shape[1]
        own_WN = torch.arange(self.nodes) == self.first + torch.arange(width)[:, None]
        self.seen_BWN = self.seen_BWN.gather(1, parents_BW[..., None].expand(-1, -1, self.nodes)) | own_WN
        memory = self.cache.draft(self.lengths_B, self.first, self.seen_BWN)
        for layer in range(self.layers):
            query, key, value = self.draw(width)
            found = memory.attend(layer, query, key, value)
            frontier = []
            for row in range(self.batch):
                above = self.paths[layer][row]
                own = [(key[row, :, i], value[row, :, i]) for i in range(width)]
                paths = [(*above[parent], node) for parent, node in zip(parents_BW[row].tolist(), own)]
                for i, path in enumerate(paths):
                    self.compare(found[row, :, i], query[row, :, i], [*self.committed[layer][row], *path])
                frontier.append(paths)
            self.paths[layer] = frontier
        self.first += width

    def compare(self, found_HE: Tensor, query_HE: Tensor, entries: list[tuple[Tensor, Tensor]]) -> None:
        keys, values = (torch.stack(part) for part in zip(*entries, strict=True))
        torch.testing.assert_close(found_HE, found_by(query_HE, keys, values), **CLOSE)


@pytest.mark.parametrize("layers", [1, 2])
def test_a_chain_sees_what_is_committed_and_its_own_guesses(layers: int) -> None:
    replay = Replay(batch=3, nodes=4, capacity=30, layers=layers)
    replay.commit([5, 2, 7], 7)
    for lengths in ([1, 4, 2], [3, 1, 1], [4, 4, 4]):
        for _ in range(4):
            replay.draft(torch.zeros(3, 1, dtype=torch.int64))
        replay.commit(lengths, 4)


@pytest.mark.parametrize("seed", range(6))
def test_a_trees_nodes_see_what_is_committed_and_their_own_path(seed: int) -> None:
    """Rows of other lengths and other trees; rounds that accept nothing but the root, and a row that has ended."""
    replay = Replay(batch=3, nodes=11, capacity=30, seed=seed)
    random = torch.Generator().manual_seed(seed)
    replay.commit([1, 6, 3], 6)
    for round_ in range(4):
        above = 1
        for width in (2, 4, 1, 3):
            replay.draft(torch.randint(above, (3, width), generator=random))
            above = width
        accepted = torch.randint(1, 6, (3,), generator=random).tolist()
        replay.commit([accepted[0], accepted[1], accepted[2] if round_ < 2 else 0], 5)


def test_guesses_are_forgotten_with_the_next_commit() -> None:
    """Whatever was guessed in between, the next round is the same; a shorter round finds no rest of a longer one."""

    def last_round(guesses: Callable[[DraftCache, Tensor], None]) -> list[Tensor]:
        random = torch.Generator().manual_seed(0)

        def draw(tokens: int) -> list[Tensor]:
            return [
                torch.randn(2, heads, tokens, SIZE, dtype=torch.float64, generator=random)
                for heads in (HEADS, GROUPS, GROUPS)
            ]

        cache, lengths_B = DraftCache(1, 2, nodes=6, capacity=20), torch.tensor([4, 2])
        cache.commit(torch.zeros_like(lengths_B), 4).attend(0, *draw(4))
        guesses(cache, lengths_B)
        found = [cache.commit(lengths_B, 3).attend(0, *draw(3))]
        root = (torch.arange(6) == 0).expand(2, 1, -1)
        return [*found, cache.draft(lengths_B + 2, 0, root).attend(0, *draw(1))]

    def many(cache: DraftCache, lengths_B: Tensor) -> None:
        memory = cache.draft(lengths_B, 0, torch.eye(6, dtype=torch.bool).expand(2, -1, -1))
        memory.attend(0, *(1e3 * torch.randn(2, heads, 6, SIZE).double() for heads in (HEADS, GROUPS, GROUPS)))

    for mine, theirs in zip(last_round(many), last_round(lambda cache, lengths_B: None), strict=True):
        assert torch.equal(mine, theirs)


def test_the_cache_takes_the_format_of_what_it_is_given() -> None:
    cache = DraftCache(2, 1, nodes=3, capacity=5)
    states = (torch.randn(1, heads, 2, SIZE, dtype=torch.bfloat16) for heads in (HEADS, GROUPS, GROUPS))
    cache.commit(torch.tensor([0]), 2).attend(0, *states)
    assert cache.keys[0].shape == cache.values[0].shape == (1, GROUPS, 3 + 5, SIZE)
    assert cache.keys[0].dtype == cache.values[0].dtype == torch.bfloat16
