"""What every row of `HEADS` must keep: it learns and decodes alike however rows, chunks and
checkpoints part its work."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import helpers
import pytest
import torch
from messages import refused
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

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
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "dflash": {
        "plain": {"block_size": DEPTH + 1},
        "from the anchor": {"block_size": DEPTH, "sample_from_anchor": True, "num_layers": 1},
        "truncated": {"block_size": DEPTH + 1, "draft_vocab_size": 3, "num_layers": 2},
        "windowed": {
            "block_size": DEPTH + 1,
            "num_layers": 2,
            "sliding_window": 3,
            "sliding_layers": [1],
        },
        "a window both ways": {
            "block_size": DEPTH + 1,
            "sliding_window": 2,
            "sliding_causal": False,
        },
        "as Llama": {
            "block_size": DEPTH + 2,
            "qk_norm": False,
            "mask_token_id": 2,
            "num_key_value_heads": 1,
        },
    },
    "dspark": {
        "plain": {"block_size": DEPTH, "markov_rank": 4},
        "gated": {
            "block_size": DEPTH,
            "markov_rank": 2,
            "markov": "gated",
            "confidence_with_markov": False,
        },
        "not from the anchor": {
            "block_size": DEPTH + 1,
            "sample_from_anchor": False,
            "markov_rank": 4,
        },
        "rnn, truncated": (
            {"block_size": DEPTH, "markov": "rnn", "markov_rank": 4}
            | {"draft_vocab_size": 3, "num_layers": 1, "confidence": False}
        ),
    },
    # Noise would make training's states other than decoding's, as it is meant to.
    "eagle": {
        "plain": {"depth": DEPTH, "noise": 0.0},
        "three steps": {
            "depth": DEPTH + 1,
            "noise": 0.0,
            "train_steps": 3,
            "num_layers": 2,
            "num_key_value_heads": 1,
        },
        "as first published": {"depth": DEPTH, "noise": 0.0, "fc_bias": True},
    },
    "eagle3": {
        "plain": {"depth": DEPTH, "feature_layers": [0, 1, -1]},
        "all norms": (
            {"depth": DEPTH + 1, "feature_layers": [0, 1], "train_steps": 3, "num_layers": 2}
            | {"draft_vocab_size": 3, "fc_norm": True, "norm_output": True, "qk_norm": True}
        ),
        "own width": {"depth": DEPTH, "feature_layers": [0], "hidden_size": 12, "head_dim": 6},
        "as speculators": (
            {
                "depth": DEPTH,
                "feature_layers": [0, 1, -1],
                "norm_before_fc": True,
                "own_embedding": True,
            }
            | {
                "norm_before_residual": True,
                "rope_parameters": {"rope_type": "default", "rope_theta": 77.0},
            }
        ),
        "windowed": {
            "depth": DEPTH,
            "feature_layers": [0, -1],
            "sliding_window": DEPTH + 1,
            "num_layers": 2,
        },
    },
    "hydra": {
        "plain": {"num_heads": DEPTH},
        "prefix, shared LM head": {"num_heads": DEPTH, "prefix_layer": True, "lm_head": "shared"},
        "truncated": {"num_heads": DEPTH, "num_layers": 3, "draft_vocab_size": 3},
        "as the authors'": {
            "num_heads": DEPTH,
            "prefix_layer": True,
            "prefix_norm": True,
            "bias": True,
        },
    },
    "hydra++": {
        "plain": {"num_heads": DEPTH},
        "truncated": {"num_heads": DEPTH, "num_layers": 1, "draft_vocab_size": 3},
    },
    "medusa": {
        "plain": {"num_heads": DEPTH},
        "shared LM head": {"num_heads": DEPTH, "lm_head": "shared", "bias": False},
        "truncated": {"num_heads": DEPTH, "num_layers": 2, "draft_vocab_size": 3},
    },
    "mtp": {
        "plain": {"depth": DEPTH},
        "as MiMo": {
            "depth": DEPTH + 1,
            "train_steps": 3,
            "hidden_first": True,
            "zero_first": True,
            "head_dim": 4,
        },
        "before the norm": {
            "depth": DEPTH,
            "norm_output": False,
            "start": "last",
            "qk_norm": False,
        },
        "a layer for each depth": {"depth": DEPTH, "num_layers": DEPTH, "layer": QWEN3_NEXT},
        "as DeepSeek": {"depth": DEPTH, "layer": DEEPSEEK},
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


def random_head(name: str, options: dict[str, Any], target: Target) -> DraftHead:
    """With weights of which none is silent; a draft vocabulary, where there is one, is 1, 3 and
    5."""
    torch.manual_seed(1)
    head = build_head(name, options, target.info).to(target.dtype)
    token_V = torch.arange(target.info.vocab_size)
    head.initialize(target.modules, 100 - token_V + 100 * (token_V % 2))
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.2 if parameter.ndim > 1 else 0.5)
    return head


def features_of(
    target: Target, head: DraftHead, tokens_BT: Tensor, loss_mask_BT: Tensor
) -> TargetFeatures:
    return TargetFeatures(
        *target.read(tokens_BT, head.feature_layers), tokens_BT, loss_mask_BT, target.modules
    )


# What a step costs in memory does not change what it learns.


def gradients(head: DraftHead, features: TargetFeatures) -> tuple[Tensor, list[Tensor]]:
    output = head.train()(features)
    head.zero_grad()
    output.loss.backward()
    return output.losses_K, [
        parameter.grad for parameter in head.parameters() if parameter.grad is not None
    ]


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
    head = random_head(name, options, target)
    generator = torch.Generator().manual_seed(4)
    texts = [torch.randint(7, (length,), generator=generator) for length in (9, 6, 11, 7)]
    masks = [torch.arange(len(text)) >= 2 for text in texts]
    pad = torch.nn.utils.rnn.pad_sequence
    apart = features_of(target, head, pad(texts, batch_first=True), pad(masks, batch_first=True))
    rows = [[0, 1], [2, 3]]
    tokens_BT, mask_BT, positions_BT = (
        pad([torch.cat([part[i] for i in row]) for row in rows], batch_first=True)
        for part in (texts, masks, [torch.arange(len(text)) for text in texts])
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
    head = random_head(name, options, target)
    tokens_BT = torch.randint(7, (2, 13), generator=torch.Generator().manual_seed(5))
    features = features_of(target, head, tokens_BT, torch.ones_like(tokens_BT, dtype=torch.bool))
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
    head = random_head(name, options, target).train()
    mask_BT = torch.rand(2, 14, generator=torch.Generator().manual_seed(6)) < 0.8
    features = features_of(target, head, torch.ones(2, 14, dtype=torch.int64), mask_BT)
    drafts = len(DraftPositions.of(features, head.max_depth).index_N)
    seen: list[int] = []
    for module in head.modules():
        if isinstance(module, GatedMLP):
            module.register_forward_pre_hook(
                lambda _, given: seen.append(given[0].shape[:-1].numel())
            )
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
    seen: list[Any] = []
    module = sys.modules[type(head).forward.__module__]
    loss = module.draft_loss  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.setattr(module, "draft_loss", lambda *given: seen.append(given) or loss(*given))
        head(features)
    ((hiddens, lm_heads, vocabulary_V, _, positions, _, _, *block),) = seen
    corrections = (
        [0.0] * len(hiddens)
        if not block
        else [F.linear(each["latent_NR"], each["correction_VR"]) for each in block[0]]
    )
    drafted = (
        torch.arange(features.modules.lm_head.out_features)
        if vocabulary_V is None
        else vocabulary_V
    )
    assert torch.equal(head.target_tokens(torch.arange(head.draft_vocab_size)), drafted)
    time = features.tokens_BT.shape[1]
    return {
        (*divmod(int(place), time), depth): (F.linear(hidden_ND, weight) + correction)[i].detach()
        for depth, (hidden_ND, weight, correction) in enumerate(zip(hiddens, lm_heads, corrections))
        for i, place in enumerate(positions.index_N)
        if positions.valid_NK[i, depth]
    }


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
    batch, rows = len(tokens_BT), torch.arange(len(tokens_BT))
    lengths = [0] * batch
    state = head.begin(
        features.modules, batch, capacity, head.max_depth, 1 + (head.max_depth - 1) * WIDTH
    )
    for number, commit in enumerate(commits):
        features_BAF = 3 * torch.randn(
            batch, max(commit), features.features_BTF.shape[-1], generator=random
        )
        features_BAF = features_BAF.to(features.features_BTF.dtype)
        next_BA = torch.randint(vocab, (batch, max(commit)), generator=random)
        for row, (start, count) in enumerate(zip(lengths, commit)):
            features_BAF[row, :count] = features.features_BTF[row, start : start + count]
            next_BA[row, :count] = tokens_BT[row, start + 1 : start + count + 1]
        counts_B = torch.tensor(commit)
        state = head.observe(state, features_BAF, next_BA, counts_B)
        lengths = [start + count for start, count in zip(lengths, commit)]
        grown = state
        width, true_B = 1, torch.zeros(batch, dtype=torch.int64)
        for depth in range(head.max_depth):
            tokens_B = tokens_BT[
                rows, (torch.tensor(lengths) + depth).clamp(max=tokens_BT.shape[1] - 1)
            ]
            if depth == 0:
                tokens_BW, parents_BW = tokens_B[:, None], torch.full((batch, 1), -1)
            else:
                tokens_BW = torch.randint(vocab, (batch, WIDTH), generator=random)
                parents_BW = torch.randint(width, (batch, WIDTH), generator=random)
                place_B = torch.randint(WIDTH, (batch,), generator=random)
                tokens_BW[rows, place_B], parents_BW[rows, place_B] = tokens_B, true_B
                width, true_B = WIDTH, place_B
            logits_BWV, grown = head.expand(grown, tokens_BW, parents_BW)
            assert logits_BWV.shape in (
                (batch, width, head.draft_vocab_size),
                (batch, 1, head.draft_vocab_size),
            )
            for row in rows.tolist():
                if commit[row]:  # what is drafted for a row that has ended does not matter
                    yield (
                        (row, lengths[row] - 1, depth),
                        logits_BWV.expand(-1, width, -1)[row, true_B[row]],
                    )
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
    name: str,
    options: dict[str, Any],
    training: bool,
    tiny_target: Callable[..., Target],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = tiny_target(vocab_size=11, layers=3, dtype=torch.float32)
    head = random_head(name, options, target).train(training)
    mask_BT = torch.ones(3, TIME, dtype=torch.bool)
    mask_BT[2, 8:11] = False  # two answers in one row
    features = features_of(target, head, torch.randint(11, (3, TIME)), mask_BT)
    trained = training_logits(head, features, monkeypatch)
    depths = {depth for *_, depth in trained}
    steps = (
        options.get("train_steps", 1)
        if name == "eagle"
        else options.get("train_steps") or head.max_depth
    )
    assert depths == set(range(steps if training else head.max_depth))
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
    name: str, options: dict[str, Any], tiny_target: Callable[..., Target]
) -> None:
    """Processes that train together wait for each other's gradients."""
    target = tiny_target(vocab_size=11, layers=3, dtype=torch.float32)
    head = random_head(name, options, target).train()
    tokens_BT = torch.randint(11, (2, 12))
    answer_BT = torch.ones(2, 12, dtype=torch.bool)
    for tokens, mask, learns in [
        (tokens_BT, answer_BT, True),
        (tokens_BT, ~answer_BT, False),
        (tokens_BT[:, :2], answer_BT[:, :2], False),  # a root, but no draft to judge
        (tokens_BT[:, :1], answer_BT[:, :1], False),
    ]:
        head.zero_grad()
        output = head(features_of(target, head, tokens, mask), ranks=4)
        output.loss.backward()
        assert (
            (output.counts_K > 0).all()
            if learns
            else not output.counts_K.any() and output.loss == 0
        )
        for path, parameter in head.named_parameters():
            assert parameter.grad is not None, f"no gradient reaches {path}"
            assert parameter.grad.isfinite().all() and parameter.grad.any() == learns, path
    weights = [weight for _, weight in head.named_parameters(remove_duplicate=False)]
    places = [weight.data_ptr() for weight in (*weights, *target.model.parameters())]
    assert len(set(places)) == len(places), "weights are shared with another layer or the target"


@every_head
def test_a_loaded_head_drafts_the_same_and_what_does_not_fit_is_refused_by_name(
    name: str, options: dict[str, Any], tiny_target: Callable[..., Target], tmp_path: Path
) -> None:
    target = tiny_target(vocab_size=11, layers=3, dtype=torch.float32)
    head = random_head(name, options, target).eval()
    save_head(head, tmp_path, CheckpointMetadata())
    loaded, _ = load_head(tmp_path, target.info)
    assert type(loaded) is HEADS[name] and loaded.config == head.config
    state = head.state_dict()
    assert list(loaded.state_dict()) == list(state)
    for key, tensor in loaded.state_dict().items():
        assert tensor.dtype == state[key].dtype and torch.equal(tensor, state[key]), key
    features = features_of(
        target, head, torch.randint(11, (3, TIME)), torch.ones(3, TIME, dtype=torch.bool)
    )
    drafts, again = (
        list(decoding_logits(one, features, *SCHEDULES["rows part"]))
        for one in (head, loaded.eval())
    )
    assert all(
        torch.equal(before[1], after[1]) for before, after in zip(drafts, again, strict=True)
    )

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
def test_the_state_of_the_last_token_changes_no_gradient(
    name: str, options: dict[str, Any], tiny_target: Callable[..., Target]
) -> None:
    target = tiny_target(vocab_size=6, layers=4)
    head = random_head(name, options, target)
    tokens_BT = torch.randint(6, (2, 12), generator=torch.Generator().manual_seed(2))
    mask_BT = torch.arange(12).expand(2, -1) >= 4
    features = features_of(target, head, tokens_BT, mask_BT)
    torch.manual_seed(0)
    expected = gradients(head, features)
    assert float(expected[0].sum()) != 0
    features.features_BTF[:, -1] = 0
    features.last_BTD[:, -1] = 0
    torch.manual_seed(0)
    assert_same_step(gradients(head, features), expected, options)
