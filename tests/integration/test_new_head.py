"""The extension story: a class and a row of `HEADS` are all that training, checkpoints, decoding
and commands need."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from helpers import check_identity
from runs import changed, losses_of
from torch import Tensor, nn

from headstart.heads import (
    HEADS,
    DraftHead,
    DraftState,
    HeadOutput,
    TargetFeatures,
    TargetInfo,
    TargetModules,
)
from headstart.heads.checkpoints.save_load import load_head
from headstart.heads.draft_positions import DraftPositions
from headstart.heads.losses import draft_loss
from headstart.heads.objective import Objective
from headstart.inference import SpeculativeLM, Target
from headstart.train.config import TrainConfig
from headstart.train.loop import train

# A head that exists only here.


@dataclass(frozen=True)
class BigramConfig:
    """Options of a bigram head."""

    depth: int = 3
    """Most tokens after the root that are drafted."""
    width: int = 24
    """Of the embedding."""
    feature_layers: list[int] = field(default_factory=list)
    """A bigram needs no features at all."""


class BigramHead(DraftHead):
    """Drafts the next token from the current one alone: logits = lm_head(embed(token)), at every
    depth."""

    config_class: ClassVar[type[Any]] = BigramConfig

    def __init__(self, config: BigramConfig, target: TargetInfo) -> None:
        super().__init__(config, target)
        self.max_depth, self.feature_layers = config.depth, tuple(config.feature_layers)
        self.embed = nn.Embedding(target.vocab_size, config.width)
        self.lm_head = nn.Linear(config.width, target.vocab_size, bias=False)

    def initialize(self, modules: TargetModules, token_counts_V: Tensor) -> None:
        nn.init.normal_(self.embed.weight)

    def forward(
        self, features: TargetFeatures, objective: Objective | None = None, ranks: int = 1
    ) -> HeadOutput:
        objective = objective or self.default_objective(self.config)
        positions = DraftPositions.of(features, self.max_depth)
        tokens_NK = features.tokens_BT.flatten()[positions.rows_NK]
        hiddens = [self.embed(tokens_NK[:, depth]) for depth in range(self.max_depth)]
        heads = [self.lm_head.weight] * self.max_depth
        return draft_loss(hiddens, heads, None, features, positions, objective, ranks)

    def begin(
        self, modules: TargetModules, batch_size: int, capacity: int, max_depth: int, nodes: int
    ) -> DraftState:
        return DraftState(modules, 0)

    def observe(
        self, state: DraftState, features_BAF: Tensor, next_tokens_BA: Tensor, lengths_B: Tensor
    ) -> DraftState:
        return replace(state, depth=0)

    def expand(
        self, state: DraftState, tokens_BW: Tensor, parents_BW: Tensor
    ) -> tuple[Tensor, DraftState]:
        return self.lm_head(self.embed(tokens_BW)), replace(state, depth=state.depth + 1)

    def server_config(self) -> dict[str, Any]:
        return {}


@pytest.fixture
def in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that the project is told of the new head."""
    monkeypatch.setitem(HEADS, "bigram", BigramHead)


def test_a_new_head_is_trained_measured_saved_loaded_and_decoded_with(
    taught: Path, short: TrainConfig, in_the_table: None
) -> None:
    head_options = {"type": "bigram", "width": 16}
    folder = train(changed(short, head=head_options, optim={"lr": 0.05}, loop={"max_steps": 24}))
    losses, (evaluation,) = losses_of(folder)
    assert len(losses) == 24
    assert all(last < 0.7 * first for first, last in zip(losses[0], losses[-1], strict=True))
    measured = evaluation["eval"]
    assert max(stats["acceptance_length"] for stats in measured.values()) > 1.2

    target = Target.from_pretrained(taught, torch.float64)
    head, metadata = load_head(folder / "best", target.info, torch.float64)
    assert type(head) is BigramHead and head.config == BigramConfig(width=16)
    assert metadata.training["config"]["head"] == head_options
    assert metadata.measured["trees"].keys() == measured.keys()

    prompts = [torch.tensor([65, 66, 67, 68]), torch.tensor([70, 71])]
    assert metadata.tree is not None
    for tree in (metadata.tree, "chain:3", [[0], [1], [0, 0], [1, 0], [0, 0, 0]], "dynamic:8:3:3"):
        lm = SpeculativeLM.from_pretrained(target, head=head, tree=tree, adaptive=False)
        check_identity(lm, prompts)
