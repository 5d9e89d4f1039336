"""A small model cut out of the target: its first blocks, distilled, between its own embedding and LM head.

    h = blocks(E(x_1 .. x_t))            embedding and LM head are the target's, frozen
    logits of x_{t+1} = lm_head(norm(h_t))

The draft of the first speculative decoders (arXiv:2211.17192, 2302.01318) for a target that has no smaller sibling. It
reads tokens and no features, so it is a model by itself: `headstart export --to model` writes it as one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from .base import DraftHead, DraftState, HeadOutput, TargetFeatures, TargetInfo, TargetModules
from .layers.decoder_layer import (
    DecoderLayer,
    DraftCache,
    KVView,
    LayerShape,
    RMSNorm,
    Rotary,
    TrainingTimeTest,
    llama_config,
    required_gain,
    start_layer,
    target_layer_weights,
)
from .layers.draft_cache import DraftTreeState
from .losses import DraftPositions, Objective, draft_loss


@dataclass(frozen=True)
class TruncatedConfig:
    """Options of a model cut out of the target."""

    depth: int = 8
    """Tokens after the root that may be guessed."""
    num_layers: int | None = None
    """Blocks; null for a seventh of the target's."""
    start: str = "first"
    """Starting values: first (the target's first blocks, and its final norm) or random."""
    loss: dict[str, float] = field(default_factory=lambda: {"soft_ce": 1.0})
    """Losses and their weights; see losses.py."""
    target_top_k: int | None = None
    """How many of the target's most likely tokens the losses look at; null for the whole vocabulary."""

    def __post_init__(self) -> None:
        """Refuse what cannot be cut."""
        if self.depth < 1 or (self.num_layers is not None and self.num_layers < 1):
            raise ValueError(f"cut needs a depth and num_layers of at least 1, not {self.depth} and {self.num_layers}")
        if self.start not in ("first", "random"):
            raise ValueError(f"cut start must be first or random, not {self.start!r}")
        self.objective.check("cut")

    @property
    def objective(self) -> Objective:
        """What it is trained on."""
        return Objective(self.loss, "decay", 1.0, self.target_top_k)


class TruncatedHead(DraftHead):
    """See the module's docstring."""

    config_class = TruncatedConfig
    config: TruncatedConfig
    reads_from_start = True

    def __init__(self, config: TruncatedConfig, target: TargetInfo) -> None:
        super().__init__(config, target)
        self.max_depth = config.depth
        self.feature_layers = ()
        self.num_layers = config.num_layers or max(1, target.num_layers // 7)
        self.shape, self.cached_layers = LayerShape.of(target), self.num_layers
        self.layers = nn.ModuleList(DecoderLayer(self.shape) for _ in range(self.num_layers))
        self.norm = RMSNorm(target.hidden_size, eps=target.rms_norm_eps)
        self.rotary = Rotary(target, target.head_dim)

    @torch.no_grad()
    def initialize(self, modules: TargetModules, token_counts_V: Tensor) -> None:
        """Start from the target's first blocks if so asked; the vocabulary is the target's own."""
        if self.config.start == "first":
            for i, layer in enumerate(self.layers):
                start_layer(layer, target_layer_weights(modules.blocks, i, self.target, "cut"), f"layer {i}", "cut")
            self.norm.load_state_dict({"weight": required_gain(modules.norm, self.target, "cut")})

    def forward(self, features: TargetFeatures, ranks: int = 1) -> HeadOutput:
        """See `DraftHead.forward`: one depth while training, for all are the same; each while evaluating."""
        steps = 1 if self.training else self.max_depth
        anchors = DraftPositions.of(features, steps)
        memory = TrainingTimeTest(self.num_layers, features.sequences_BT).at(0)
        out_BTD = self._run(features.tokens_BT, features.places_BT, memory, features.modules)
        weight = features.modules.lm_head.weight
        hiddens = [out_BTD.flatten(0, 1)[rows_N].to(weight.dtype) for rows_N in anchors.rows_NK.unbind(1)]
        return draft_loss(hiddens, [weight] * steps, None, features, anchors, self.config.objective, ranks)

    def begin(
        self, modules: TargetModules, batch_size: int, capacity: int, max_depth: int, nodes: int
    ) -> DraftTreeState:
        """See `DraftHead.begin`."""
        cache = DraftCache(self.num_layers, batch_size, nodes, capacity)
        return DraftTreeState.empty(modules, self.norm.weight, self.shape.hidden_size, cache, max_depth, nodes)

    def observe(
        self, state: DraftState, features_BAF: Tensor, next_tokens_BA: Tensor, lengths_B: Tensor
    ) -> DraftTreeState:
        """See `DraftHead.observe`: the committed tokens, the text's first one too."""
        assert isinstance(state, DraftTreeState)
        positions_BA, memory = state.committing(next_tokens_BA.shape[1])
        out_BAD = self._run(next_tokens_BA, positions_BA, memory, state.modules)
        return state.committed(out_BAD, lengths_B)

    def expand(self, state: DraftState, tokens_BW: Tensor, parents_BW: Tensor) -> tuple[Tensor, DraftTreeState]:
        """See `DraftHead.expand`; the root was read by `observe`."""
        assert isinstance(state, DraftTreeState)
        if state.depth > 0:
            state = self._step(state, tokens_BW, parents_BW)
        return state.modules.logits(state.hidden_BWD), replace(state, depth=state.depth + 1)

    def _step(self, state: DraftTreeState, tokens_BW: Tensor, parents_BW: Tensor) -> DraftTreeState:
        """Run the layers on a frontier below the root."""
        positions_BW, memory, below = state.below(parents_BW)
        return replace(below, hidden_BWD=self._run(tokens_BW, positions_BW, memory, state.modules))

    def _run(self, tokens_BT: Tensor, positions_BT: Tensor, memory: KVView, modules: TargetModules) -> Tensor:
        """The input of the LM head: training and decoding both come here."""
        x_BTD = modules.embed(tokens_BT).to(self.norm.weight.dtype)
        rotary = self.rotary(positions_BT, x_BTD.dtype)
        for i, layer in enumerate(self.layers):
            x_BTD = layer(x_BTD, rotary, memory, i)
        return self.norm(x_BTD)

    def unread_by(self) -> dict[str, str]:
        """See `DraftHead.unread_by`."""
        reason = (
            "it shares the target's embedding and LM head; `headstart export --to model` writes it as a draft model"
        )
        return {"vllm": reason, "sglang": reason}

    def server_config(self) -> dict[str, Any]:
        """The keys of a Llama with as many layers."""
        return {"architectures": ["LlamaForCausalLM"], **llama_config(self.shape, self.num_layers, self.target, None)}
