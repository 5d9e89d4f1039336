"""What every row of `HEADS` must keep: it learns and decodes alike however rows, chunks and
checkpoints part its work."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import helpers
import pytest
import torch
from helpers import random_ids
from messages import refused
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from headstart.heads import (
    HEADS,
    CheckpointMetadata,
    DraftHead,
    TargetFeatures,
    build_head,
)
from headstart.heads.checkpoints.save_load import load_head, save_head
from headstart.heads.draft_positions import DraftPositions
from headstart.heads.layers import draft_cache, training_time_test
from headstart.heads.layers.decoder_layer import GatedMLP
from headstart.heads.layers.training_time_test import TrainingTimeTest
from headstart.inference import Target
from headstart.inference.drafters import draft_model_state

DEPTH = 3
WIDTH = 3
"""Nodes of a frontier below the root."""
SIZES = helpers.SIZES | {"num_hidden_layers": 3}
DEEPSEEK = SIZES | {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "head_dim": 4,  # of the rotated part
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
"""Latent attention, whose keys and values differ in width, and a mixture of experts."""
QWEN3_NEXT = SIZES | {
    "model_type": "qwen3_next",
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 0,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}
"""Attention with a gate, norms whose weight is the gain less 1, positions in a part of each
head."""
BLOCK = {"block_size": DEPTH}
LONGER_BLOCK = {"block_size": DEPTH + 1}
# Noise would make training's states other than decoding's, as it is meant to.
NOISELESS = {"depth": DEPTH, "noise": 0.0}
STEPS = {"depth": DEPTH}
STEPS_BEYOND = {"depth": DEPTH + 1, "train_steps": 3}
HEADS_ALONE = {"num_heads": DEPTH}
ALL_NORMS = {"fc_norm": True, "norm_output": True, "qk_norm": True}
OWN_ROPE = {"rope_type": "default", "rope_theta": 77.0}
AS_SPECULATORS = {
    "norm_before_fc": True,
    "own_embedding": True,
    "norm_before_residual": True,
    "rope_parameters": OWN_ROPE,
}
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "dflash": {
        "plain": LONGER_BLOCK,
        "from the anchor": BLOCK | {"sample_from_anchor": True, "num_layers": 1},
        "truncated": LONGER_BLOCK | {"draft_vocab_size": 3, "num_layers": 2},
        "windowed": LONGER_BLOCK | {"num_layers": 2, "sliding_window": 3, "sliding_layers": [1]},
        "a window both ways": LONGER_BLOCK | {"sliding_window": 2, "sliding_causal": False},
        "as Llama": {"block_size": DEPTH + 2, "qk_norm": False, "mask_token_id": 2}
        | {"num_key_value_heads": 1},
    },
    "dspark": {
        "plain": BLOCK | {"markov_rank": 4},
        "gated": BLOCK | {"markov_rank": 2, "markov": "gated", "confidence_with_markov": False},
        "not from the anchor": LONGER_BLOCK | {"sample_from_anchor": False, "markov_rank": 4},
        "rnn, truncated": BLOCK
        | {"markov": "rnn", "markov_rank": 4, "draft_vocab_size": 3, "num_layers": 1}
        | {"confidence": False},
    },
    "eagle": {
        "plain": NOISELESS,
        "three steps": NOISELESS | STEPS_BEYOND | {"num_layers": 2, "num_key_value_heads": 1},
        "as first published": NOISELESS | {"fc_bias": True, "attention_bias": True},
    },
    "eagle3": {
        "plain": STEPS | {"feature_layers": [0, 1, -1]},
        "all norms": STEPS_BEYOND
        | {"feature_layers": [0, 1], "num_layers": 2, "draft_vocab_size": 3}
        | ALL_NORMS,
        "own width": STEPS | {"feature_layers": [0], "hidden_size": 12, "head_dim": 6},
        "as speculators": STEPS | {"feature_layers": [0, 1, -1]} | AS_SPECULATORS,
        "windowed": STEPS
        | {"feature_layers": [0, -1], "sliding_window": DEPTH + 1, "num_layers": 2},
    },
    "hydra": {
        "plain": HEADS_ALONE,
        "prefix, shared LM head": HEADS_ALONE | {"prefix_layer": True, "lm_head": "shared"},
        "truncated": HEADS_ALONE | {"num_layers": 3, "draft_vocab_size": 3},
        "as the authors'": HEADS_ALONE | {"prefix_layer": True, "prefix_norm": True, "bias": True},
    },
    "hydra++": {
        "plain": HEADS_ALONE,
        "truncated": HEADS_ALONE | {"num_layers": 1, "draft_vocab_size": 3},
    },
    "medusa": {
        "plain": HEADS_ALONE,
        "shared LM head": HEADS_ALONE | {"lm_head": "shared", "bias": False},
        "truncated": HEADS_ALONE | {"num_layers": 2, "draft_vocab_size": 3},
    },
    "mtp": {
        "plain": STEPS,
        "as MiMo": STEPS_BEYOND | {"hidden_first": True, "zero_first": True, "head_dim": 4},
        "before the norm": STEPS | {"norm_output": False, "start": "last", "qk_norm": False},
        "a layer for each depth": STEPS | {"num_layers": DEPTH, "layer": QWEN3_NEXT},
        "as DeepSeek": STEPS | {"layer": DEEPSEEK},
    },
}
LONGEST_COMMIT = 10
"""Tokens that these tests commit at once, at most."""
every_head = pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(name, options, id=f"{name}, {what}")
        for name in sorted(HEADS)
        for what, options in OPTIONS.get(name, {"plain": {}}).items()
    ],
)


@pytest.fixture(autouse=True)
def short_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a window's cache be overwritten within texts as short as these."""
    monkeypatch.setattr(draft_cache, "MOST_NEW_TOKENS", LONGEST_COMMIT)
    monkeypatch.setattr(draft_model_state, "CHUNK_TOKENS", LONGEST_COMMIT)


def head_with_noise(name: str, options: dict[str, Any], target: Target) -> DraftHead:
    """With weights of which none is silent; a draft vocabulary, where there is one, is 1, 3 and
    5."""
    torch.manual_seed(1)
    head = build_head(name, options, target.info).to(target.dtype)
    token_V = torch.arange(target.info.vocab_size)
    head.initialize(target.modules, 100 - token_V + 100 * (token_V % 2))
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.2 if parameter.ndim > 1 else 0.5)
    return head


def read_features(
    target: Target, head: DraftHead, tokens_BT: Tensor, loss_mask_BT: Tensor | None = None
) -> TargetFeatures:
    """What a head trains on; every token is an answer's without a mask."""
    if loss_mask_BT is None:
        loss_mask_BT = torch.ones_like(tokens_BT, dtype=torch.bool)
    states = target.read(tokens_BT, head.feature_layers)
    return TargetFeatures(*states, tokens_BT, loss_mask_BT, target.modules)


# What a step costs in memory does not change what it learns.


def gradients(head: DraftHead, features: TargetFeatures) -> tuple[Tensor, list[Tensor]]:
    output = head.train()(features)
    head.zero_grad()
    output.loss.backward()
    found = [parameter.grad for parameter in head.parameters()]
    return output.losses_K, [gradient for gradient in found if gradient is not None]


def assert_same_step(
    one: tuple[Tensor, list[Tensor]], other: tuple[Tensor, list[Tensor]], options: dict[str, Any]
) -> None:
    # transformers' norms compute in float32.
    close = 1e-5 if "layer" in options else 1e-9
    torch.testing.assert_close(one[0], other[0], rtol=close, atol=close)
    assert len(one[1]) == len(other[1])
    for mine, theirs in zip(one[1], other[1], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=10 * close, atol=close)


@every_head
def test_packed_rows_have_the_loss_and_the_gradients_of_rows_of_their_own(
    name, options, tiny_target
):
    """Positions start again with every sequence, and no sequence sees another."""
    target = tiny_target(vocab_size=7, layers=3)
    head = head_with_noise(name, options, target)
    generator = torch.Generator().manual_seed(4)
    texts = [torch.randint(7, (length,), generator=generator) for length in (9, 6, 11, 7)]
    positions = [torch.arange(len(text)) for text in texts]
    masks = [places >= 2 for places in positions]
    apart = read_features(
        target, head, pad_sequence(texts, batch_first=True), pad_sequence(masks, batch_first=True)
    )
    tokens_BT, mask_BT, positions_BT = (
        pad_sequence([torch.cat(part[:2]), torch.cat(part[2:])], batch_first=True)
        for part in (texts, masks, positions)
    )
    states = target.read(tokens_BT, head.feature_layers, positions_BT)
    together = TargetFeatures(*states, tokens_BT, mask_BT, target.modules, positions_BT)
    assert_same_step(gradients(head, together), gradients(head, apart), options)
    # the head alone takes a row for one text
    blind = TargetFeatures(*states, tokens_BT, mask_BT, target.modules)
    if any("attn" in part for part, _ in head.named_modules()):
        with pytest.raises(AssertionError):
            assert_same_step(gradients(head, blind), gradients(head, apart), options)


@every_head
def test_recomputing_and_reading_in_chunks_changes_nothing(name, options, tiny_target, monkeypatch):
    """In chunks as where there is no fused kernel."""
    target = tiny_target(vocab_size=7, layers=3)
    head = head_with_noise(name, options, target)
    features = read_features(target, head, random_ids(7, 2, 13, seed=5))
    plain = gradients(head, features)
    by_chunks = training_time_test.by_chunks
    monkeypatch.setattr(training_time_test, "SCORES_ON_CPU", 40)

    def in_chunks(
        query: Tensor, keys: list[Tensor], values: list[Tensor], test: TrainingTimeTest
    ) -> Tensor:
        window = test.first_step_window(len(keys) - 1, query.shape[2])
        return by_chunks(query, keys, values, test.sequences_BT, window)

    monkeypatch.setattr(training_time_test, "attend_step", in_chunks)
    head.recompute = True
    assert_same_step(gradients(head, features), plain, options)


@pytest.mark.parametrize(
    ("name", "options"),
    [(name, own) for name in ("eagle", "eagle3") for own in OPTIONS[name].values()],
)
def test_only_draft_positions_are_computed_beyond_keys_and_values(name, options, tiny_target):
    """The last MLP sees no other position, nor any MLP after the first step."""
    target = tiny_target(vocab_size=7, layers=3)
    head = head_with_noise(name, options, target).train()
    mask_BT = torch.rand(2, 14, generator=torch.Generator().manual_seed(6)) < 0.8
    features = read_features(target, head, torch.ones(2, 14, dtype=torch.int64), mask_BT)
    drafts = len(DraftPositions.of(features, head.max_depth).index_N)
    seen: list[int] = []

    def count(_: Any, given: tuple[Tensor, ...]) -> None:
        seen.append(given[0].shape[:-1].numel())

    for module in head.modules():
        if isinstance(module, GatedMLP):
            module.register_forward_pre_hook(count)
    head(features)
    layers = head.cached_layers
    assert 0 < drafts < mask_BT.numel()
    assert seen[:layers] == [mask_BT.numel()] * (layers - 1) + [drafts]
    assert set(seen[layers:]) <= {drafts}


# Decoding is training.


def training_logits(
    head: DraftHead, features: TargetFeatures, monkeypatch: pytest.MonkeyPatch
) -> dict[tuple[int, int, int], Tensor]:
    """The logits_V under the loss, by row, position of the newest feature, and depth."""
    module = sys.modules[type(head).forward.__module__]
    with monkeypatch.context() as patch:
        seen = helpers.calls_of(patch, module, "draft_loss")
        head(features)
    ((hiddens, lm_heads, vocabulary_V, _, positions, _, _, *block),) = seen
    drafted = vocabulary_V
    if drafted is None:
        drafted = torch.arange(features.modules.lm_head.out_features)
    assert torch.equal(head.target_tokens(torch.arange(head.draft_vocab_size)), drafted)
    time = features.tokens_BT.shape[1]
    found = {}
    for depth, (hidden_ND, weight) in enumerate(zip(hiddens, lm_heads)):
        logits_NV = F.linear(hidden_ND, weight)
        if block:
            correction = block[0][depth]
            logits_NV = logits_NV + F.linear(correction["latent_NR"], correction["correction_VR"])
        for i, place in enumerate(positions.index_N):
            if positions.valid_NK[i, depth]:
                found[*divmod(int(place), time), depth] = logits_NV[i].detach()
    return found


@torch.no_grad()
def decoding_logits(
    head: DraftHead, features: TargetFeatures, commits: list[list[int]], capacity: int
) -> Iterator[tuple[tuple[int, int, int], Tensor]]:
    """The same, along the true text, from `observe` and `expand`.

    Rows commit different numbers of tokens in each round, with something arbitrary behind each
    row's own. The true node of a frontier stands in another place in each row, among decoys that
    are its siblings or any node's children.
    """
    random = torch.Generator().manual_seed(2)
    tokens_BT, vocab = features.tokens_BT, features.modules.lm_head.out_features
    batch, time = tokens_BT.shape
    rows = torch.arange(batch)
    lengths = [0] * batch
    nodes = 1 + (head.max_depth - 1) * WIDTH
    state = head.begin(features.modules, batch, capacity, head.max_depth, nodes)
    for number, commit in enumerate(commits):
        shape = (batch, max(commit), features.features_BTF.shape[-1])
        features_BAF = 3 * torch.randn(shape, generator=random).to(features.features_BTF.dtype)
        next_BA = torch.randint(vocab, shape[:2], generator=random)
        for row, (start, count) in enumerate(zip(lengths, commit)):
            features_BAF[row, :count] = features.features_BTF[row, start : start + count]
            next_BA[row, :count] = tokens_BT[row, start + 1 : start + count + 1]
        state = head.observe(state, features_BAF, next_BA, torch.tensor(commit))
        lengths = [start + count for start, count in zip(lengths, commit)]
        grown = state
        width, true_B = 1, torch.zeros(batch, dtype=torch.int64)
        for depth in range(head.max_depth):
            tokens_B = tokens_BT[rows, (torch.tensor(lengths) + depth).clamp(max=time - 1)]
            if depth == 0:
                tokens_BW, parents_BW = tokens_B[:, None], torch.full((batch, 1), -1)
            else:
                tokens_BW = torch.randint(vocab, (batch, WIDTH), generator=random)
                parents_BW = torch.randint(width, (batch, WIDTH), generator=random)
                place_B = torch.randint(WIDTH, (batch,), generator=random)
                tokens_BW[rows, place_B], parents_BW[rows, place_B] = tokens_B, true_B
                width, true_B = WIDTH, place_B
            logits_BWV, grown = head.expand(grown, tokens_BW, parents_BW)
            assert logits_BWV.shape[1] in (width, 1)
            logits_BWV = logits_BWV.expand(batch, width, head.draft_vocab_size)
            for row in rows.tolist():
                if commit[row]:  # what is drafted for a row that has ended does not matter
                    yield (row, lengths[row] - 1, depth), logits_BWV[row, true_B[row]]
        if number % 2:
            state = grown  # `observe` must discard the drafts, whichever state it is given


TIME = 22
SCHEDULES = {
    "rows part": ([[9, 2, 5], [3, 1, 4], [1, 4, 1], [2, 2, 4], [1, 3, 2]], 64),
    "rows end": ([[4, 7, 1], [2, 0, 3], [4, 0, 1], [1, 0, 0], [4, 0, 0], [1, 0, 0]], 64),
    "a row ends full": ([[10, 3, 3], [3, 1, 2], [0, 4, 1], [0, 2, 2], [0, 3, 1]], 13),
}
"""Tokens that rows commit in each round, and the room in their caches. A row that has ended full
takes part while others go on, and there is no room after its tokens."""


@every_head
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluating"])
def test_the_loss_is_computed_from_the_logits_that_decoding_drafts_with(
    name, options, training, tiny_target, monkeypatch
):
    target = tiny_target(vocab_size=11, layers=3, dtype=torch.float32)
    head = head_with_noise(name, options, target).train(training)
    mask_BT = torch.ones(3, TIME, dtype=torch.bool)
    mask_BT[2, 8:11] = False  # two answers in one row
    features = read_features(target, head, random_ids(11, 3, TIME, seed=7), mask_BT)
    trained = training_logits(head, features, monkeypatch)
    depths = {depth for *_, depth in trained}
    every_depth = 1 if name == "eagle" else head.max_depth
    steps = options.get("train_steps", every_depth) if training else head.max_depth
    assert depths == set(range(steps))
    largest = max(float(logits_V.abs().max()) for logits_V in trained.values())
    assert largest > 0.3
    for schedule in SCHEDULES.values():
        compared = []
        for place, logits_V in decoding_logits(head, features, *schedule):
            if place in trained:
                compared.append(place)
                assert float((logits_V - trained[place]).abs().max()) <= 1e-5 * largest, place
        assert {depth for *_, depth in compared} == depths and len(compared) >= 8 * len(depths)


# Gradients, checkpoints.


@every_head
def test_every_parameter_gets_a_gradient_even_from_a_batch_without_a_draft_position(
    name, options, tiny_target
):
    """Processes that train together wait for each other's gradients."""
    target = tiny_target(vocab_size=11, layers=3, dtype=torch.float32)
    head = head_with_noise(name, options, target).train()
    tokens_BT = random_ids(11, 2, 12, seed=8)
    answer_BT = torch.ones(2, 12, dtype=torch.bool)
    for tokens, mask, learns in [
        (tokens_BT, answer_BT, True),
        (tokens_BT, ~answer_BT, False),
        (tokens_BT[:, :2], answer_BT[:, :2], False),  # a root, but no draft to judge
        (tokens_BT[:, :1], answer_BT[:, :1], False),
    ]:
        head.zero_grad()
        output = head(read_features(target, head, tokens, mask), ranks=4)
        output.loss.backward()
        assert bool((output.counts_K > 0).all()) == bool(output.counts_K.any()) == learns
        assert bool(output.loss != 0) == learns
        for path, parameter in head.named_parameters():
            assert parameter.grad is not None, f"no gradient reaches {path}"
            assert parameter.grad.isfinite().all() and parameter.grad.any() == learns, path
    weights = [weight for _, weight in head.named_parameters(remove_duplicate=False)]
    places = [weight.data_ptr() for weight in (*weights, *target.model.parameters())]
    assert len(set(places)) == len(places), "weights are shared with another layer or the target"


@every_head
def test_a_loaded_head_drafts_the_same_and_what_does_not_fit_is_refused_by_name(
    name, options, tiny_target, tmp_path
):
    target = tiny_target(vocab_size=11, layers=3, dtype=torch.float32)
    head = head_with_noise(name, options, target).eval()
    save_head(head, tmp_path, CheckpointMetadata())
    loaded, _ = load_head(tmp_path, target.info)
    assert type(loaded) is HEADS[name] and loaded.config == head.config
    state = head.state_dict()
    assert list(loaded.state_dict()) == list(state)
    torch.testing.assert_close(loaded.state_dict(), state, rtol=0, atol=0)
    features = read_features(target, head, random_ids(11, 3, TIME, seed=9))
    drafts, again = (
        dict(decoding_logits(one, features, *SCHEDULES["rows part"]))
        for one in (head, loaded.eval())
    )
    torch.testing.assert_close(again, drafts, rtol=0, atol=0)

    weights = tmp_path / "model.safetensors"
    saved = load_file(weights)
    assert saved.keys() == state.keys()
    for key in (next(iter(saved)), *(buffer for buffer, _ in head.named_buffers())):
        rest = {other: tensor for other, tensor in saved.items() if other != key}
        save_file(rest, weights)
        with refused(f"missing {key!r}"):
            load_head(tmp_path, target.info)
        save_file({**rest, key: torch.cat([saved[key], saved[key]])}, weights)
        with refused(f"{key!r} shape"):
            load_head(tmp_path, target.info)
    save_file({**saved, "bonus": torch.zeros(1)}, weights)
    with refused("unknown 'bonus'"):
        load_head(tmp_path, target.info)


# A recording has no state of a text's last token, which the target has not read when an answer
# ends.


@every_head
def test_the_state_of_the_last_token_changes_no_gradient(name, options, tiny_target):
    target = tiny_target(vocab_size=6, layers=4)
    head = head_with_noise(name, options, target)
    tokens_BT = random_ids(6, 2, 12, seed=2)
    features = read_features(target, head, tokens_BT, torch.arange(12).expand(2, -1) >= 4)
    torch.manual_seed(0)
    expected = gradients(head, features)
    assert float(expected[0].sum()) != 0
    features.features_BTF[:, -1] = 0
    features.last_BTD[:, -1] = 0
    torch.manual_seed(0)
    assert_same_step(gradients(head, features), expected, options)
