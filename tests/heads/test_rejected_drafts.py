"""Rejected drafts in the place of the text: what a step reads, and what it is judged by, is what decoding would see."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import build_model
from torch import Tensor

from headstart.heads import DraftHead, HeadOutput, TargetFeatures, build_head, losses
from headstart.heads.base import RejectedDrafts
from headstart.heads.objective import Objective
from headstart.inference import Target

VOCAB, DEPTH, TIME = 61, 4, 12
HEADS: dict[str, dict[str, Any]] = {
    "eagle": {"depth": DEPTH, "train_steps": DEPTH, "noise": 0.0},
    "eagle3": {"depth": DEPTH, "feature_layers": [0, 1, -1], "draft_vocab_size": 40},
    "mtp": {"depth": DEPTH, "train_steps": DEPTH},
}
DRAFTS = [
    (0, 3, [True, False, False, False]),
    (0, 5, [False, False]),  # shorter than the head's steps: deeper ones are not judged
    (0, 6, [False, False, False]),
    (1, 2, [True, True, True, False]),  # as deep as the head is trained, so nothing changes
    (1, 4, [False, False, False, False, False]),  # deeper than that
    (1, 9, [False, False, False]),  # beyond the end
]
"""Row, position t of the newest feature, and of each draft after the root whether it is the text's."""


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(build_model(vocab_size=VOCAB, layers=3).requires_grad_(False))


def build(kind: str, target: Target) -> DraftHead:
    torch.manual_seed(0)
    head = build_head(kind, HEADS[kind], target.info).to(torch.float64)
    head.initialize(target.modules, torch.arange(VOCAB))
    for parameter in head.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return head.train()


def paths(tokens_BT: Tensor) -> list[tuple[int, int, list[int]]]:
    """Row, t and drafted tokens."""
    found = []
    for row, t, same in DRAFTS:
        drafts = []
        for depth, equal in enumerate(same, start=1):
            place = t + 1 + depth
            true = int(tokens_BT[row, place]) if place < TIME else 0
            drafts.append(true if equal else (true + depth + t) % (VOCAB - 1) + (depth + t == 0))
        found.append((row, t, drafts))
    return found


def rejected_of(target: Target, tokens_BT: Tensor, drafted: list[tuple[int, int, list[int]]]) -> RejectedDrafts:
    """What a recording holds: read from the target, path by path."""
    entries = []
    for row, t, drafts in drafted:
        text = tokens_BT[row].tolist()
        _, last_1TD = target.read(torch.tensor([[*text[: t + 2], *drafts]]), (-1,))
        equal = 0
        while equal < len(drafts) and text[t + 2 + equal : t + 3 + equal] == drafts[equal : equal + 1]:
            equal += 1
        for depth in range(equal + 1, len(drafts) + 1):
            state_D = last_1TD[0, t + 1 + depth]
            best = int(target.modules.logits(state_D).argmax())
            entries.append((depth, row * tokens_BT.shape[1] + t, drafts[depth - 1], best, state_D))
    entries.sort(key=lambda entry: entry[0])
    depths, positions, tokens, best, states = zip(*entries, strict=True)
    return RejectedDrafts(
        torch.tensor(positions), torch.tensor(depths), torch.tensor(tokens), torch.tensor(best), torch.stack(states)
    )


def batch(target: Target, head: DraftHead, on_policy: bool = True) -> TargetFeatures:
    torch.manual_seed(1)
    tokens_BT = torch.randint(0, VOCAB, (2, TIME))
    mask_BT = torch.ones(2, TIME, dtype=torch.bool)
    mask_BT[0, :3] = False
    mask_BT[1, 11] = False
    features_BTF, last_BTD = target.read(tokens_BT, head.feature_layers)
    rejected = rejected_of(target, tokens_BT, paths(tokens_BT)) if on_policy else None
    return TargetFeatures(features_BTF, last_BTD, tokens_BT, mask_BT, target.modules, rejected=rejected)


def by_hand(head: DraftHead, target: Target, features: TargetFeatures, objective: Objective) -> HeadOutput:
    """The same loss by decoding: position by position, each draft fed to the head and each prefix to the target."""
    drafted = {(row, t): drafts for row, t, drafts in paths(features.tokens_BT)}
    vocabulary_V = head.vocabulary()
    losses_K = torch.zeros(DEPTH, dtype=torch.float64)
    counts_K = torch.zeros(DEPTH, dtype=torch.int64)
    hits_K1 = torch.zeros(DEPTH, 1, dtype=torch.int64)
    for row in range(len(features.tokens_BT)):
        text = features.tokens_BT[row].tolist()
        answer = features.loss_mask_BT[row].tolist()
        for t in range(TIME - 2):
            drafts = drafted.get((row, t), [])
            state = head.begin(target.modules, 1, 64, DEPTH, DEPTH)
            tokens_1A = torch.tensor([text[1 : t + 2]])
            state = head.observe(state, features.features_BTF[row : row + 1, : t + 1], tokens_1A, torch.tensor([t + 1]))
            for k in range(DEPTH):
                if t + 2 + k >= TIME or not all(answer[t + 1 : t + 3 + k]):
                    break
                true_path = text[t + 2 : t + 2 + k]
                off_text = drafts[:k] != true_path[: len(drafts)]
                if off_text and len(drafts) < k:
                    break  # the target has not verified as much
                path = drafts[:k] if off_text else true_path
                fed = path[-1] if k > 0 else text[t + 1]
                parent = torch.tensor([[-1 if k == 0 else 0]])
                logits_11V, state = head.expand(state, torch.tensor([[fed]]), parent)
                log_q_V = logits_11V[0, 0].log_softmax(-1)
                _, last_1TD = target.read(torch.tensor([[*text[: t + 2], *path]]), (-1,))
                logits_V = target.modules.logits(last_1TD[0, -1])
                true = int(logits_V.argmax()) if off_text else text[t + 2 + k]
                counts_K[k] += 1
                if true not in vocabulary_V.tolist():
                    continue
                label = vocabulary_V.tolist().index(true)
                loss = torch.zeros((), dtype=torch.float64)
                p_V = logits_V[vocabulary_V].softmax(-1)
                for name, weight in objective.loss.items():
                    if name == "smooth_l1":
                        continue
                    loss = loss + weight * (-log_q_V[label] if name == "ce" else -(p_V * log_q_V).sum())
                losses_K[k] += loss
                hits_K1[k] += int(log_q_V.argmax()) == label
    decay_K = objective.decay ** torch.arange(DEPTH, dtype=torch.float64)
    return HeadOutput((losses_K * decay_K).sum(), losses_K, counts_K, hits_K1)


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize("kind", [*HEADS])
@torch.no_grad()
def test_the_loss_is_that_of_the_heads_own_drafts(
    target: Target, kind: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "positions_at_once", lambda *_: size)
    head = build(kind, target)
    objective = Objective({"soft_ce": 1.0, "ce": 0.3})
    features = batch(target, head)
    found = head(features, objective)
    expected = by_hand(head, target, features, objective)
    torch.testing.assert_close(found.losses_K, expected.losses_K)
    torch.testing.assert_close(found.loss, expected.loss)
    assert torch.equal(found.counts_K, expected.counts_K) and torch.equal(found.hits_KI, expected.hits_KI)
    text = head(replace(features, rejected=None), objective)
    assert torch.equal(found.losses_K[0], text.losses_K[0]) or size != 1000
    assert (found.losses_K[1:] != text.losses_K[1:]).all()
    assert (found.counts_K < text.counts_K).tolist() == [False, False, False, True]


@pytest.mark.parametrize("kind", [*HEADS])
def test_without_rejected_drafts_the_loss_and_gradients_are_bit_for_bit_those_of_the_text(
    target: Target, kind: str
) -> None:
    head = build(kind, target)
    features = batch(target, head, on_policy=False)
    nothing = RejectedDrafts(
        *torch.zeros(4, 0, dtype=torch.int64).unbind(), torch.zeros(0, target.info.hidden_size, dtype=torch.float64)
    )
    found = []
    for rejected in (None, nothing):
        head.zero_grad()
        output = head(replace(features, rejected=rejected))
        output.loss.backward()
        found.append([output.loss, output.losses_K, *(parameter.grad for parameter in head.parameters())])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize("loss", ["soft_ce", "kl", "tv", "lk_lambda", "ce"])
@pytest.mark.parametrize("kind", [*HEADS])
def test_drafts_that_are_the_texts_give_its_loss(target: Target, kind: str, loss: str) -> None:
    """As entries that a recording would leave out: the same tokens, the same states."""
    head = build(kind, target)
    features = batch(target, head, on_policy=False)
    entries = [(depth, row * TIME + t) for depth in (1, 2, 3) for row in (0, 1) for t in range(2, 7)]
    depths_M, positions_M = torch.tensor(entries).T
    at_M = positions_M + 1 + depths_M
    same = RejectedDrafts(
        positions_M,
        depths_M,
        features.tokens_BT.flatten()[at_M],
        features.tokens_BT.flatten()[at_M + 1],
        features.last_BTD.flatten(0, 1)[at_M],
    )
    expected = head(features, Objective({loss: 1.0}))
    found = head(replace(features, rejected=same), Objective({loss: 1.0}))
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other)


@torch.no_grad()
def test_predicted_features_are_compared_with_the_rejected_drafts(target: Target) -> None:
    """EAGLE's smooth L1 loss: at a rejected draft the target's feature is that of the drafted prefix."""
    head = build("eagle", target)
    features = batch(target, head)
    rejected = features.rejected
    assert rejected is not None
    objective = Objective({"smooth_l1": 1.0})
    before = head(features, objective)
    entries = rejected.at_depth(1)
    moved_MD = rejected.last_MD.clone()
    moved_MD[entries] += 100.0
    after = head(replace(features, rejected=replace(rejected, last_MD=moved_MD)), objective)
    changed_K = after.losses_K - before.losses_K
    count = entries.stop - entries.start - 1  # the last path begins at an answer's end
    assert changed_K[[0, 2, 3]].abs().max() < 1e-9
    assert 90 * count < changed_K[1] < 110 * count


@pytest.mark.parametrize("kind", [*HEADS])
def test_packed_rows_have_the_loss_of_separate_ones(target: Target, kind: str) -> None:
    head = build(kind, target).eval()
    features = batch(target, head)
    assert features.rejected is not None
    apart = head(features)
    positions_1T = torch.arange(TIME).repeat(2)[None]
    packed = TargetFeatures(
        features.features_BTF.flatten(0, 1)[None],
        features.last_BTD.flatten(0, 1)[None],
        features.tokens_BT.flatten()[None],
        features.loss_mask_BT.flatten()[None] & (positions_1T > 0),
        target.modules,
        positions_1T,
        rejected=features.rejected,  # positions in the flattened tokens are the same
    )
    together = head(packed)
    torch.testing.assert_close(together.losses_K, apart.losses_K)
    assert torch.equal(together.counts_K, apart.counts_K)
