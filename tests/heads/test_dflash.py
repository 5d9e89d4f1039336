"""DFlash: a block in training is the block of decoding, anchors are a fair part of all, and options
are checked."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from block_heads import INFO, TIME, VOCAB, batch, build, modules
from torch import nn

from headstart.heads import DFlashHead, build_head
from headstart.heads.draft_positions import DraftPositions
from headstart.heads.objective import LOSSES, Objective
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


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_block_in_training_is_the_block_of_decoding(options, packed, monkeypatch):
    head = build(options).eval()
    starts = (0, 5, 13) if packed else (0,)
    positions_T = torch.arange(TIME) - torch.tensor(
        [max(s for s in starts if s <= t) for t in range(TIME)]
    )
    features = batch(head, positions_T.expand(3, -1) if packed else None)
    slots = []
    monkeypatch.setattr(
        head, "_block", lambda *given: slots.append(DFlashHead._block(head, *given)) or slots[-1]
    )
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
                torch.testing.assert_close(
                    state.slots_BKD[0, depth], slots[0][number, depth], rtol=1e-9, atol=1e-9
                )


@pytest.mark.parametrize("weights", ["decay", "d_pace"])
@pytest.mark.parametrize("options", OPTIONS)
def test_as_many_anchors_as_there_are_give_the_loss_of_all(options, weights):
    head = build(options)
    objective = Objective(dict.fromkeys(LOSSES, 1.0), weights)
    features = batch(head)
    whole, some = head.eval()(features, objective), head.train()(features, objective)
    assert all(
        torch.allclose(one, other, rtol=1e-9) for one, other in zip(whole, some, strict=True)
    )
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
        assert torch.equal(some.rows_NK, whole.rows_NK[chosen]) and torch.equal(
            some.valid_NK, whole.valid_NK[chosen]
        )
        seen |= set(chosen)
    assert seen == set(places.values())


@pytest.mark.parametrize("on_host", [True, False])
def test_each_sequence_of_a_packed_row_has_its_own_anchors(on_host):
    """As many as it would have in a row of its own: packing changes no coverage."""
    starts = (0, 5, 9, 13)
    positions_T = torch.arange(TIME) - torch.tensor(
        [max(s for s in starts if s <= t) for t in range(TIME)]
    )
    features = batch(build(OPTIONS[0]), positions_T.expand(3, -1))
    features.loss_mask_BT[:, list(starts)] = False  # as in collating
    if on_host:
        features = replace(features, documents_BT=features.sequences_BT)
    whole = DraftPositions.of(features, 2)
    drawn: set[int] = set()
    for _ in range(60):
        some = DraftPositions.of(features, 2, at_most=2)
        for row in range(3):
            for start, stop in zip(starts, (*starts[1:], TIME)):
                places = range(row * TIME + start, row * TIME + stop)
                wanted = min(2, sum(index in places for index in whole.index_N.tolist()))
                assert sum(index in places for index in some.index_N.tolist()) == wanted
        drawn |= set(some.index_N.tolist())
    assert drawn == set(whole.index_N.tolist())


def test_a_row_without_an_answer_has_no_anchor():
    head = build(OPTIONS[0]).train()
    features = batch(head)
    features.loss_mask_BT[1] = False
    output = head(features)
    output.loss.backward()
    assert output.counts_K[0] == sum(DraftPositions.of(features, 3).per_row) and bool(
        output.loss.isfinite()
    )
    features.loss_mask_BT[:] = False
    assert float(head(features).loss.detach()) == 0.0


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
    ids = torch.tensor([[3, 1, 4, 1]])
    for new in (1, 2, 5, 20):
        settings = {
            "attention_mask": torch.ones_like(ids),
            "max_new_tokens": new,
            "do_sample": False,
        }
        expected = target.model.generate(ids, **settings)
        for tree in ("chain:5", "dynamic:8:5:3"):
            lm = SpeculativeLM.from_pretrained(target, head, tree=tree, fallback=False)
            assert torch.equal(lm.generate(ids, **settings).sequences, expected)


def test_anchors_at_the_end_of_a_row_are_judged_by_what_follows():
    """A row's last anchors have fewer drafts, and these are those of the same text with more behind
    it."""
    head = build(OPTIONS[0]).eval()
    features = batch(head)
    found = DraftPositions.of(features, head.max_depth)
    counts = found.valid_NK.sum(1)
    last = found.index_N == 2 * TIME + TIME - 3  # its root is the last token but one
    assert counts[last].tolist() == [1] and int(found.index_N.max()) == 2 * TIME + TIME - 3
    whole = head(features)
    shorter = replace(
        features,
        **{
            name: getattr(features, name)[:, :-2]
            for name in ("features_BTF", "last_BTD", "tokens_BT", "loss_mask_BT")
        },
    )
    cut = head(shorter)
    masked = replace(features, loss_mask_BT=features.loss_mask_BT.clone())
    masked.loss_mask_BT[:, -2:] = False
    torch.testing.assert_close(head(masked).losses_K, cut.losses_K, rtol=1e-9, atol=1e-9)
    assert bool((whole.counts_K > cut.counts_K).all())


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_a_mask_token_that_answers_hold_is_refused(name):
    head = build_head(name, {"mask_token_id": 4}, INFO)
    counts_V = torch.ones(VOCAB, dtype=torch.int64)
    counts_V[[4, 9]] = torch.tensor([3, 0])
    with pytest.raises(
        ValueError, match=f"{name} mask_token_id 4 stands 3 times in the answers; .* such as 9"
    ):
        head.initialize(modules(), counts_V)
    # all are taken: there is no better one
    head.initialize(modules(), torch.ones(VOCAB, dtype=torch.int64))
    # the last, which nobody asked for: training tells of it
    build_head(name, {}, INFO).initialize(modules(), counts_V)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 1}, "block_size of at least 2"),
        (
            {"block_size": INFO.max_positions + 1},
            f"is larger than the target's {INFO.max_positions} positions",
        ),
        ({"num_layers": 0}, "num_layers and max_anchors of at least 1"),
        (
            {"mask_token_id": VOCAB},
            f"mask_token_id {VOCAB} is out of range: choose one of the target's {VOCAB} tokens",
        ),
        (
            {"feature_layers": [3, 1]},
            r"feature_layers \[3, 1\] are out of range, out of order or coincide",
        ),
        ({"feature_layers": [11]}, "choose different numbers from 0 to 10, in order"),
        (
            {"sliding_window": 0},
            "dflash sliding_window must be at least 1, or null for none, not 0",
        ),
        ({"sliding_layers": [0]}, r"dflash sliding_layers \[0\] need a sliding_window"),
        ({"sliding_layers": [2], "sliding_window": 5}, "and are numbers from 0 to 1"),
        ({"start": "first"}, "start must be random, last or the number of a block"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        build_head("dflash", options, INFO)
