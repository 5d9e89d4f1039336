"""DFlash: a block in training is the block of decoding, anchors are a fair part of all, and options are checked."""

from __future__ import annotations

import dataclasses

import helpers
import pytest
import torch
from torch import Tensor, nn

from headstart.heads import DFlashHead, TargetFeatures, TargetModules, build_head
from headstart.heads.losses import LOSSES, DraftPositions

VOCAB, WIDTH, TIME = 23, 12, 19
INFO = dataclasses.replace(
    helpers.INFO, hidden_size=WIDTH, vocab_size=VOCAB, num_attention_heads=2, num_key_value_heads=1, head_dim=6
)
OPTIONS = [
    {"block_size": 4},
    {"block_size": 3, "sample_from_anchor": True, "draft_vocab_size": 9, "num_layers": 1},
    {"block_size": 5, "num_layers": 3, "qk_norm": False, "mask_token_id": 4, "feature_layers": [0, 7]},
]


def build(options: dict[str, object], **more: object) -> DFlashHead:
    torch.manual_seed(0)
    head = build_head("dflash", {**options, **more}, INFO).double()
    assert isinstance(head, DFlashHead)
    for parameter in head.parameters():
        nn.init.normal_(parameter)
    if head.config.draft_vocab_size is not None:
        head.choose_vocabulary(torch.arange(head.config.draft_vocab_size) * 2 + 1)
    return head


def modules() -> TargetModules:
    torch.manual_seed(1)
    embed, lm_head = nn.Embedding(VOCAB, WIDTH).double(), nn.Linear(WIDTH, VOCAB, bias=False).double()
    return TargetModules(embed.requires_grad_(False), lm_head.requires_grad_(False), nn.Identity(), ())


def batch(head: DFlashHead, positions_BT: Tensor | None = None) -> TargetFeatures:
    torch.manual_seed(2)
    mask_BT = torch.ones(3, TIME, dtype=torch.bool)
    mask_BT[0, :6] = mask_BT[1, 12:] = False
    return TargetFeatures(
        features_BTF=torch.randn(3, TIME, WIDTH * len(head.feature_layers)).double(),
        last_BTD=torch.randn(3, TIME, WIDTH).double(),
        tokens_BT=torch.randint(VOCAB, (3, TIME)),
        loss_mask_BT=mask_BT,
        modules=modules(),
        positions_BT=positions_BT,
    )


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_block_in_training_is_the_block_of_decoding(options, packed, monkeypatch):
    head = build(options).eval()
    starts = (0, 5, 13) if packed else (0,)
    positions_T = torch.arange(TIME) - torch.tensor([max(s for s in starts if s <= t) for t in range(TIME)])
    features = batch(head, positions_T.expand(3, -1) if packed else None)
    slots = []
    monkeypatch.setattr(head, "_block", lambda *given: slots.append(DFlashHead._block(head, *given)) or slots[-1])
    head(features)
    found = DraftPositions.of(features, head.max_depth)
    with torch.no_grad():
        for number, index in enumerate(found.index_N.tolist()):
            row, time = divmod(index, TIME)
            first = max(start for start in starts if start <= time)
            own = slice(first, time + 1)
            state = head.begin(features.modules, 1, 40, head.max_depth, 1)
            next_1A = features.tokens_BT[row, first + 1 : time + 2][None]
            length_1 = torch.tensor([time + 1 - first])
            state = head.observe(state, features.features_BTF[row, own][None], next_1A, length_1)
            for depth in range(head.max_depth):
                _, state = head.expand(state, next_1A[:, -1:], torch.full((1, 1), -1))
                torch.testing.assert_close(state.slots_BKD[0, depth], slots[0][number, depth], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("weights", ["decay", "d_pace"])
@pytest.mark.parametrize("options", OPTIONS)
def test_as_many_anchors_as_there_are_give_the_loss_of_all(options, weights):
    head = build(options, loss=dict.fromkeys(LOSSES, 1.0), depth_weights=weights)
    features = batch(head)
    whole, some = head.eval()(features), head.train()(features)
    assert all(torch.allclose(one, other, rtol=1e-9) for one, other in zip(whole, some, strict=True))
    assert some.loss > 0


def test_anchors_are_drawn_anew_in_each_step_and_as_many_as_wished():
    features = batch(build(OPTIONS[0]))
    whole = DraftPositions.of(features, 3)
    seen = set()
    for _ in range(60):
        some = DraftPositions.of(features, 3, at_most=4)
        assert some.per_row == tuple(min(4, count) for count in whole.per_row) and not some.all
        places = {index: place for place, index in enumerate(whole.index_N.tolist())}
        chosen = [places[index] for index in some.index_N.tolist()]
        assert chosen == sorted(set(chosen))
        assert torch.equal(some.rows_NK, whole.rows_NK[chosen]) and torch.equal(some.valid_NK, whole.valid_NK[chosen])
        seen |= set(chosen)
    assert seen == set(places.values())


def test_a_row_without_an_answer_has_no_anchor():
    head = build(OPTIONS[0]).train()
    features = batch(head)
    features.loss_mask_BT[1] = False
    output = head(features)
    output.loss.backward()
    assert output.counts_K[0] == sum(DraftPositions.of(features, 3).per_row) and bool(output.loss.isfinite())
    features.loss_mask_BT[:] = False
    assert float(head(features).loss.detach()) == 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 1}, "block_size of at least 2"),
        ({"num_layers": 0}, "num_layers and max_anchors of at least 1"),
        ({"mask_token_id": VOCAB}, f"mask_token_id {VOCAB} is out of range: choose one of the target's {VOCAB} tokens"),
        ({"feature_layers": [3, 1]}, r"feature_layers \[3, 1\] are out of range, out of order or coincide"),
        ({"feature_layers": [11]}, "choose different numbers from 0 to 10, in order"),
        ({"start": "first"}, "start must be random, last or the number of a block"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        build_head("dflash", options, INFO)
