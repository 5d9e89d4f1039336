"""Truncated model as a draft: the target's first blocks, distilled.

They run between the target's own embedding and LM head.

    h = blocks(E(x_1 .. x_t))            embedding and LM head are the target's, frozen
    logits of x_{t+1} = lm_head(norm(h_t))

The draft model of the first speculative decoders (arXiv:2211.17192, 2302.01318), for a target that
has no smaller sibling. It reads tokens and no features: `headstart export --to model` saves it as a
model of its own. Its name in configs and checkpoints is `cut`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..base import (
    DraftHead,
    DraftState,
    DraftTreeState,
    HeadOutput,
    TargetFeatures,
    TargetInfo,
    TargetModules,
)
from ..draft_positions import DraftPositions
from ..layers.decoder_layer import DecoderLayer, KVView, LayerShape, RMSNorm, Rotary, llama_config
from ..layers.starting_values import required_gain, start_layer, target_layer_weights
from ..layers.training_time_test import TrainingTimeTest
from ..losses import draft_loss
from ..objective import Objective
from .config import TruncatedConfig


class TruncatedHead(DraftHead):
    """Truncated draft model."""

    config_class = TruncatedConfig
    config: TruncatedConfig
    attends_by_slots = True
    reads_from_start = True

    def __init__(self, config: TruncatedConfig, target: TargetInfo) -> None:
        super().__init__(config, target)
        self.max_depth = config.depth
        self.feature_layers = ()
        self.num_layers = config.num_layers or max(1, target.num_layers // 7)
        self.shape = LayerShape.of(target)
        self.cached_layers = self.num_layers
        self.layers = nn.ModuleList(DecoderLayer(self.shape) for _ in range(self.num_layers))
        self.norm = RMSNorm(target.hidden_size, eps=target.rms_norm_eps)
        self.rotary = Rotary(target, target.head_dim)
        self.unread_by = dict.fromkeys(
            ("vllm", "sglang", "llama.cpp"),
            "it shares the target's embedding and LM head; `headstart export --to model` writes it"
            " as a draft model",
        )

    @torch.no_grad()
    def initialize(self, modules: TargetModules, token_counts_V: Tensor) -> None:
        if self.config.start == "first":
            for i, layer in enumerate(self.layers):
                weights = target_layer_weights(modules.blocks, i, self.target, "cut")
                start_layer(layer, weights, f"layer {i}", "cut")
            where = f"cut cannot start from {self.target.name!r}: its norm"
            gain_D = required_gain(modules.norm, self.target.hidden_size, where)
            self.norm.load_state_dict({"weight": gain_D})

    @classmethod
    def default_objective(cls, config: TruncatedConfig) -> Objective:
        return Objective(decay=1.0)

    def forward(
        self, features: TargetFeatures, objective: Objective | None = None, ranks: int = 1
    ) -> HeadOutput:
        objective = objective or self.default_objective(self.config)
        # A model of its own reads true tokens only: the loss of depth k at t is that of depth 0 at
        # t + k, so training needs one.
        steps = 1 if self.training else self.max_depth
        positions = DraftPositions.of(features, steps)
        kv = TrainingTimeTest(self.num_layers, features.sequences_BT).at(0)
        out_BTD = self._run(features.tokens_BT, features.position_ids_BT, kv, features.modules)
        weight = features.modules.lm_head.weight
        # The output at the state that judges a draft predicts the same token as that state.
        hiddens = [
            out_BTD.flatten(0, 1)[rows_N].to(weight.dtype) for rows_N in positions.rows_NK.unbind(1)
        ]
        return draft_loss(hiddens, [weight] * steps, None, features, positions, objective, ranks)

    def observe(
        self, state: DraftState, features_BAF: Tensor, next_tokens_BA: Tensor, lengths_B: Tensor
    ) -> DraftTreeState:
        assert isinstance(state, DraftTreeState)
        positions_BA, kv = state.cache.commit(state.lengths_B, next_tokens_BA.shape[1])
        out_BAD = self._run(next_tokens_BA, positions_BA, kv, state.modules)
        return state.committed(out_BAD, lengths_B)

    def expand(
        self, state: DraftState, tokens_BW: Tensor, parents_BW: Tensor
    ) -> tuple[Tensor, DraftTreeState]:
        assert isinstance(state, DraftTreeState)
        if state.depth > 0:  # `observe` has read the root
            positions_BW, kv, state = state.below(parents_BW)
            state = replace(state, hidden_BWD=self._run(tokens_BW, positions_BW, kv, state.modules))
        return state.modules.logits(state.hidden_BWD), replace(state, depth=state.depth + 1)

    def _run(
        self, tokens_BT: Tensor, positions_BT: Tensor, kv: KVView, modules: TargetModules
    ) -> Tensor:
        """The input of the LM head."""
        x_BTD = modules.embed(tokens_BT).to(self.norm.weight.dtype)
        rotary = self.rotary(positions_BT, x_BTD.dtype)
        for i, layer in enumerate(self.layers):
            x_BTD = layer(x_BTD, rotary, kv, i)
        return self.norm(x_BTD)

    def server_config(self) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"],
            **llama_config(self.shape, self.num_layers, self.target, None),
        }
