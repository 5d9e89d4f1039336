"""Medusa-1: K heads on the target's last state, each blind to the others.

Cai et al. 2024, arXiv:2401.10774.

Head i reads the final-norm state h_t and drafts the token at t + 2 + i:

    logits_i = lm_head_i(block_i(h_t)),    block(x) = x + SiLU(W x + b), repeated

The target itself gives the token at t + 1, the root of the draft tree. Trained with cross-entropy
weighted by decay^i (section 2.2.1). The loss covers the positions whose root and whole draft path
lie in one answer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..base import DraftHead, DraftState, HeadOutput, TargetFeatures, TargetInfo, TargetModules
from ..checkpoints.tables import written
from ..draft_positions import DraftPositions
from ..layers.draft_vocab import most_frequent
from ..losses import draft_loss
from ..objective import Objective
from .config import MedusaConfig
from .formats import FORMATS


@dataclass(frozen=True)
class MedusaState(DraftState):
    """Logits of all depths, which depend on the last committed feature alone."""

    max_depth: int
    """Depths that a round drafts, at most."""
    logits_BKV: Tensor | None = None


class ResidualBlocks(nn.Module):
    """Blocks x + SiLU(W x + b); W starts at zero (section 2.1.1): a new head is its LM head."""

    def __init__(self, width: int, count: int, bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=bias) for _ in range(count))
        for layer in self.layers:
            for parameter in layer.parameters():
                nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class MedusaHead(DraftHead):
    """Medusa head, with the parameter names of vLLM's `medusa` model."""

    config_class = MedusaConfig
    config: MedusaConfig
    vocabulary_layers: tuple[str, ...] = ("lm_heads",)

    def __init__(self, config: MedusaConfig, target: TargetInfo) -> None:
        super().__init__(config, target)
        size = config.draft_vocab_size
        width = target.hidden_size
        self.max_depth = config.num_heads
        self.feature_layers = (-1,)
        self.blocks = nn.ModuleList(
            ResidualBlocks(width, config.num_layers, config.bias) for _ in range(config.num_heads)
        )
        if config.lm_head == "own":
            self.lm_heads = nn.ModuleList(
                nn.Linear(width, self.draft_vocab_size, bias=False) for _ in range(config.num_heads)
            )
        else:
            self.served_names = ("lm_heads.0.weight",)
        if size is not None:
            self.token_map = torch.arange(size)  # filled in by `initialize`
        self.unread_by = dict.fromkeys(("sglang", "llama.cpp"), "it has no Medusa")
        if config.lm_head == "own" and self.draft_vocab_size < target.vocab_size:
            self.unread_by["vllm"] = (
                "0.32 makes room for whole LM heads alone, and these have a draft vocabulary"
            )

    def initialize(self, modules: TargetModules, token_counts_V: Tensor) -> None:
        if self.token_map is not None:
            self.token_map.copy_(most_frequent(token_counts_V, self.draft_vocab_size, "medusa"))
        if self.config.lm_head == "own":
            rows = modules.lm_head_rows(self.token_map)
            for lm_head in self.lm_heads:
                lm_head.load_state_dict({"weight": rows})

    @classmethod
    def default_objective(cls, config: MedusaConfig) -> Objective:
        return Objective({"ce": 1.0})

    def forward(
        self, features: TargetFeatures, objective: Objective | None = None, ranks: int = 1
    ) -> HeadOutput:
        objective = objective or self.default_objective(self.config)
        positions = DraftPositions.of(features, self.max_depth)
        states_ND = features.last_BTD.flatten(0, 1)[positions.index_N]
        hiddens = [block(states_ND) for block in self.blocks]
        shared = self.config.lm_head == "shared"
        lm_heads = [features.modules.lm_head] * self.max_depth if shared else [*self.lm_heads]
        heads = [lm_head.get_parameter("weight") for lm_head in lm_heads]
        # A shared LM head may have a narrower dtype than the states.
        inputs = [hidden.to(weight.dtype) for hidden, weight in zip(hiddens, heads, strict=True)]
        return draft_loss(inputs, heads, self.token_map, features, positions, objective, ranks)

    def begin(
        self, modules: TargetModules, batch_size: int, capacity: int, max_depth: int, nodes: int
    ) -> MedusaState:
        return MedusaState(modules, depth=0, max_depth=max_depth)

    def observe(
        self, state: DraftState, features_BAF: Tensor, next_tokens_BA: Tensor, lengths_B: Tensor
    ) -> MedusaState:
        assert isinstance(state, MedusaState)
        # The newest feature of each row. All depths are drafted at once: they read nothing else.
        rows = torch.arange(len(lengths_B), device=lengths_B.device)
        last_BF = features_BAF[rows, lengths_B - 1]
        shared = self.config.lm_head == "shared"
        lm_heads = [state.modules.logits] * self.max_depth if shared else self.lm_heads
        logits = [lm_heads[i](self.blocks[i](last_BF)) for i in range(state.max_depth)]
        return MedusaState(
            state.modules, 0, state.max_depth, torch.stack(logits, dim=1) if logits else None
        )

    def expand(
        self, state: DraftState, tokens_BW: Tensor, parents_BW: Tensor
    ) -> tuple[Tensor, MedusaState]:
        assert isinstance(state, MedusaState) and state.logits_BKV is not None
        logits_B1V = state.logits_BKV[:, state.depth : state.depth + 1]
        return logits_B1V, replace(state, depth=state.depth + 1)

    def server_config(self) -> dict[str, Any]:
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": self.target.hidden_size,
            "vocab_size": self.target.vocab_size,
            "truncated_vocab_size": self.draft_vocab_size,
            **written(FORMATS["medusa"].keys, self.config),
            "original_lm_head": self.config.lm_head == "shared",
        }
