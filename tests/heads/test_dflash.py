"""DFlash: anchors are a fair part of all, and every kernel attends to the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from block_heads import INFO, TIME, VOCAB, WIDTH, block_batch, block_head, modules
from helpers import check_identity
from messages import refused
from torch import nn
from torch.nn.attention import flex_attention as flex

from headstart.heads import TargetFeatures, build_head
from headstart.heads.dflash import head as dflash_head
from headstart.heads.dflash.head import AnchorView
from headstart.heads.draft_positions import DraftPositions
from headstart.inference import SpeculativeLM, Target

OPTIONS = [
    {"block_size": 4},
    {"block_size": 3, "sample_from_anchor": True, "draft_vocab_size": 9, "num_layers": 1},
    {
        "block_size": 5,
        "num_layers": 3,
        "qk_norm": False,
        "mask_token_id": 4,
        "feature_layers": [0, 7],
    },
    {"block_size": 4, "num_layers": 2, "sliding_window": 3, "sliding_layers": [1]},
    {"block_size": 4, "sliding_window": 2, "sliding_causal": False},
]


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("starts", [(0,), (0, 5, 9, 13)], ids=["a sequence a row", "packed"])
def test_each_sequence_has_as_many_anchors_as_wished_drawn_anew_in_each_step(starts, on_host):
    """As many as it would have in a row of its own: packing changes no coverage."""
    positions_T = torch.arange(TIME)
    for start in starts:
        positions_T[start:] = torch.arange(TIME - start)
    features = block_batch(block_head(OPTIONS[0]), positions_T.expand(3, -1))
    features.loss_mask_BT[:, list(starts)] = False  # as in collating
    if on_host:
        features = replace(features, documents_BT=features.sequences_BT)
    whole = DraftPositions.of(features, 2)
    sequence_S = positions_T.eq(0).expand(3, -1).flatten().cumsum(0)
    sequence_N = sequence_S[whole.index_N]
    drawn: set[int] = set()
    for _ in range(60):
        some = DraftPositions.of(features, 2, at_most=2)
        chosen_N = torch.isin(whole.index_N, some.index_N)
        assert torch.equal(some.index_N, whole.index_N[chosen_N])
        assert torch.equal(some.rows_NK, whole.rows_NK[chosen_N])
        assert torch.equal(some.valid_NK, whole.valid_NK[chosen_N])
        wanted = sequence_N.bincount().clamp(max=2)
        assert torch.equal(sequence_N[chosen_N].bincount(minlength=len(wanted)), wanted)
        drawn |= set(some.index_N.tolist())
    assert drawn == set(whole.index_N.tolist())


def test_an_evaluation_has_as_many_anchors_and_the_same_each_time():
    head = block_head({**OPTIONS[0], "max_anchors": 3}).eval()
    features = block_batch(head)
    state = torch.get_rng_state()
    first, second = head(features), head(features)
    assert int(first.counts_K[0]) == 3 * 3 and torch.equal(first.losses_K, second.losses_K)
    assert torch.equal(torch.get_rng_state(), state)


def long_batch(head, packed):
    """Eight sequences of 40 tokens, in a row each or in two."""
    torch.manual_seed(3)
    rows = 2 if packed else 8
    width = WIDTH * len(head.feature_layers)
    positions = torch.arange(40).repeat(8)
    return TargetFeatures(
        features_BTF=torch.randn(320, width).double().view(rows, -1, width),
        last_BTD=torch.randn(320, WIDTH).double().view(rows, -1, WIDTH),
        tokens_BT=torch.randint(VOCAB, (320,)).view(rows, -1),
        loss_mask_BT=(positions > 0).view(rows, -1),
        modules=modules(),
        positions_BT=positions.view(rows, -1) if packed else None,
    )


@pytest.mark.parametrize("options", OPTIONS)
def test_a_packed_row_has_the_loss_of_its_rows_and_keeps_no_more(options):
    head = block_head(options).eval()
    found = []
    for packed in (False, True):
        features = long_batch(head, packed)
        kept = {}

        def keep(tensor, kept=kept):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = head(features)
        found.append((output.loss, sum(storage.nbytes() for storage in kept.values())))
    (loss, rows), (packed_loss, packed) = found
    torch.testing.assert_close(packed_loss, loss, rtol=1e-9, atol=0)
    assert packed < 1.1 * rows


def views_of(options, packed, monkeypatch):
    """The views of a head's forward, and the states of a layer that attends by each."""
    head = block_head(options).eval()
    features = long_batch(head, packed)
    calls = []
    monkeypatch.setattr(
        AnchorView, "attend", lambda view, layer, *own: calls.append((view, layer, own)) or own[0]
    )
    head(features)
    for view, layer, own in calls:
        states = [part.detach().requires_grad_() for part in (*own, *view.context[layer])]
        yield view, states


@pytest.mark.parametrize(
    ("options", "packed"), [(options, number % 2 == 1) for number, options in enumerate(OPTIONS)]
)
def test_scores_in_chunks_and_flex_attention_find_the_same(options, packed, monkeypatch):
    monkeypatch.setattr(flex, "_validate_device", lambda query, key, value: None)
    for view, states in views_of(options, packed, monkeypatch):
        sides = []
        for elements in (2**22, 3 * 8 * 40 * 2):
            monkeypatch.setattr(dflash_head, "SCORES_ON_CPU", elements)
            sides.append(dflash_head.ByChunks.apply(view, *states))
        assert len(list(view.chunks(states[0]))) > 8
        sides.append(view.by_flex(flex.flex_attention, *states))
        weight = torch.randn_like(sides[0])
        grads = [torch.autograd.grad((side * weight).sum(), states) for side in sides]
        for side, grad in zip(sides[1:], grads[1:], strict=True):
            torch.testing.assert_close(side, sides[0], rtol=0, atol=1e-10)
            for one, other in zip(grad, grads[0], strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=1e-9)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_block_mask_leaves_out_no_pair_and_shows_no_other(options, packed, monkeypatch):
    monkeypatch.setattr(dflash_head, "BLOCK", 16)
    for view, states in views_of(options, packed, monkeypatch):
        queries, context = states[0].shape[0] * states[0].shape[2], 8 * 40
        mask = view.block_mask(states[0].shape[2], context)
        query, key = torch.arange(queries)[:, None], torch.arange(queries + context)
        zero = torch.zeros_like(query)
        wide = torch.nn.functional.pad(
            mask.mask_mod(zero, zero, query, key.expand(queries, -1)),
            (0, -(queries + context) % 16, 0, -queries % 16),
        )
        pairs = wide.unflatten(1, (-1, 16)).unflatten(0, (-1, 16)).transpose(1, 2).flatten(2)
        assert torch.equal(wide.any(1)[:queries], torch.ones(queries, dtype=torch.bool))
        listed = torch.zeros(2, *pairs.shape[:2], dtype=torch.bool)
        for side, (counts, numbers) in enumerate(
            ((mask.kv_num_blocks, mask.kv_indices), (mask.full_kv_num_blocks, mask.full_kv_indices))
        ):
            for row, count in enumerate(counts[0, 0].tolist()):
                listed[side, row, numbers[0, 0, row, :count].tolist()] = True
        some, whole = listed
        assert not (some & whole).any()
        assert pairs[whole].all() and not pairs[~(some | whole)].any()
        # Nearly no block is listed for nothing.
        assert int((some & ~pairs.any(-1)).sum()) <= int(some.sum()) // 5


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_a_block_larger_than_what_is_left_drafts_no_further(name, tiny_target):
    """Up to the target's last position, and where fewer tokens are asked for than a block
    drafts."""
    model = tiny_target(vocab_size=VOCAB, layers=3).model
    model.config.max_position_embeddings = 24
    target = Target(model)
    torch.manual_seed(0)
    head = build_head(name, {"block_size": 6, "num_layers": 1}, target.info).to(target.dtype)
    for parameter in head.parameters():
        nn.init.normal_(parameter, std=0.2)
    for new in (1, 2, 5, 20):
        for tree in ("chain:5", "dynamic:8:5:3"):
            lm = SpeculativeLM.from_pretrained(target, head, tree=tree, adaptive=False)
            check_identity(lm, [torch.tensor([3, 1, 4, 1])], max_new_tokens=new)


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_a_mask_token_that_answers_hold_is_refused(name):
    head = build_head(name, {"mask_token_id": 4}, INFO)
    counts_V = torch.ones(VOCAB, dtype=torch.int64)
    counts_V[[4, 9]] = torch.tensor([3, 0])
    with refused(f"{name} mask_token_id 4 3 9"):
        head.initialize(modules(), counts_V)
    # all are taken: there is no better one
    head.initialize(modules(), torch.ones(VOCAB, dtype=torch.int64))
    # the last, which nobody asked for: training tells of it
    build_head(name, {}, INFO).initialize(modules(), counts_V)
