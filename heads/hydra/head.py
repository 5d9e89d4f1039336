"""Hydra and Hydra++: Medusa's heads, each of which reads the path before it.

Ankner et al. 2024, arXiv:2402.05109.

Head i reads the target's final-norm state h_t and the embeddings E(x) of all tokens after it, the
root x_{t+1} first, and drafts the token at t + 2 + i:

    z_i      = [h_t, E(x_{t+1}), ..., E(x_{t+1+i})]         (i + 2) D wide
    logits_i = lm_head_i(blocks_i(join_i(z_i)))
    join(z)  = R z + SiLU(W z + b)                          (i + 2) D -> D, R a learned residual
    block(x) = x + SiLU(W x + b), repeated

Hydra++ has deeper heads, learns from the target's distribution instead of the text, and reads
prefix(h)_t in place of h_t: the output of a decoder layer that attends to the whole text up to t.
No server reads these heads, so the parameter names are our own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..base import DraftHead, DraftState, HeadOutput, TargetFeatures, TargetInfo, TargetModules
from ..checkpoints.tables import SERVERS
from ..draft_positions import DraftPositions
from ..layers.decoder_layer import DecoderLayer, LayerShape, RMSNorm, Rotary
from ..layers.draft_vocab import most_frequent
from ..layers.training_time_test import TrainingTimeTest
from ..losses import draft_loss
from ..objective import Objective
from .config import HydraConfig, HydraPlusPlusConfig


@dataclass(frozen=True)
class HydraState(DraftState):
    """The state that all heads read, and the path to each node of the frontier.

    `cache` belongs to the prefix layer, which reads committed tokens only, no drafts.
    """

    lengths_B: Tensor
    """Committed tokens of each row."""
    state_B1D: Tensor
    """The state at the last committed position."""
    path_BWP: Tensor
    """Tokens from the root to each frontier node; none before the root's `expand`."""


class HydraBlocks(nn.Module):
    """One head up to its LM head: R z + SiLU(W z + b), then x + SiLU(W x + b), repeated.

    R starts as the identity on the state, the first part of z, and every W at zero: a new head is
    its LM head.
    """

    def __init__(self, width: int, parts: int, count: int, bias: bool) -> None:
        super().__init__()
        res = nn.Linear(parts * width, width, bias=bias)
        self.join = nn.ModuleDict({"res": res, "linear": nn.Linear(parts * width, width)})
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count - 1))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)
        nn.init.eye_(res.weight)

    def forward(self, z: Tensor) -> Tensor:
        x = self.join["res"](z) + F.silu(self.join["linear"](z))
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class HydraHead(DraftHead):
    """Medusa's heads, each of which also reads the tokens drafted before it."""

    config_class: ClassVar[type[Any]] = HydraConfig
    config: HydraConfig
    vocabulary_layers: tuple[str, ...] = ("lm_heads",)

    def __init__(self, config: HydraConfig, target: TargetInfo) -> None:
        super().__init__(config, target)
        size = config.draft_vocab_size
        width = target.hidden_size
        self.max_depth = config.num_heads
        self.feature_layers = (-1,)
        if config.prefix_layer:
            self.shape = LayerShape.of(target)
            self.cached_layers = 1
            self.prefix = DecoderLayer(self.shape)
            # The layer starts as the identity, so that a new head is its LM head here too.
            nn.init.zeros_(self.prefix.self_attn.o_proj.weight)
            nn.init.zeros_(self.prefix.mlp.down_proj.weight)
            self.rotary = Rotary(target, self.shape.head_dim)
            self.prefix_norm = (
                RMSNorm(width, eps=self.shape.rms_norm_eps) if config.prefix_norm else nn.Identity()
            )
        # Head i reads i + 2 vectors: the state, the root and the i tokens drafted before.
        self.blocks = nn.ModuleList(
            HydraBlocks(width, i + 2, config.num_layers, config.bias)
            for i in range(config.num_heads)
        )
        if config.lm_head == "own":
            self.lm_heads = nn.ModuleList(
                nn.Linear(width, self.draft_vocab_size, bias=config.bias)
                for _ in range(config.num_heads)
            )
        if size is not None:
            self.token_map = torch.arange(size)  # filled in by `initialize`
        self.unread_by = dict.fromkeys(SERVERS, "it has no Hydra")

    def initialize(self, modules: TargetModules, token_counts_V: Tensor) -> None:
        if self.token_map is not None:
            self.token_map.copy_(
                most_frequent(token_counts_V, self.draft_vocab_size, self.config.name)
            )
        if self.config.lm_head == "own":
            rows = modules.lm_head_rows(self.token_map)
            for lm_head in self.lm_heads:
                zero = {"bias": rows.new_zeros(len(rows))} if self.config.bias else {}
                lm_head.load_state_dict({"weight": rows, **zero})

    @classmethod
    def default_objective(cls, config: HydraConfig) -> Objective:
        return Objective({"ce": 1.0})

    def forward(
        self, features: TargetFeatures, objective: Objective | None = None, ranks: int = 1
    ) -> HeadOutput:
        objective = objective or self.default_objective(self.config)
        positions = DraftPositions.of(features, self.max_depth)
        index_N = positions.index_N
        tokens_BT = features.tokens_BT
        states_BTD = features.last_BTD

        # 1. The state that all heads read, at each draft position.
        if self.config.prefix_layer:
            # The layer attends to all positions and returns the draft positions, [1, N, D].
            kv = TrainingTimeTest(1, features.sequences_BT, index_N).at(0)
            rotary = self.rotary(features.position_ids_BT, states_BTD.dtype)
            states_ND = self.prefix_norm(self.prefix(states_BTD, rotary, kv, 0))[0]
        else:
            states_ND = states_BTD.flatten(0, 1)[index_N]

        # 2. The true tokens after it: head i reads the first i + 1. Past the end of a row any token
        #    serves: no such draft is judged.
        rows_NK = index_N[:, None] + 1 + torch.arange(self.max_depth, device=tokens_BT.device)
        path_NK = tokens_BT.flatten()[rows_NK.clamp(max=tokens_BT.numel() - 1)]
        hiddens = [
            self._draft(i, states_ND, path_NK[:, : i + 1], features.modules)
            for i in range(self.max_depth)
        ]

        # 3. The LM heads. `draft_loss` takes weights only, so a bias becomes the weight of a
        #    constant input 1: [D] and [V, D] become [D + 1] and [V, D + 1].
        shared = self.config.lm_head == "shared"
        lm_heads = [features.modules.lm_head] * self.max_depth if shared else [*self.lm_heads]
        heads = [lm_head.weight for lm_head in lm_heads]
        if self.config.bias and not shared:
            hiddens = [F.pad(hidden_ND, (0, 1), value=1.0) for hidden_ND in hiddens]
            heads = [
                torch.cat([lm_head.weight, lm_head.bias[:, None]], dim=1) for lm_head in lm_heads
            ]
        # A shared LM head may have a narrower dtype than the states; the target's logits are
        # computed in it too.
        hiddens = [
            hidden_ND.to(weight.dtype) for hidden_ND, weight in zip(hiddens, heads, strict=True)
        ]
        return draft_loss(hiddens, heads, self.token_map, features, positions, objective, ranks)

    def begin(
        self, modules: TargetModules, batch_size: int, capacity: int, max_depth: int, nodes: int
    ) -> HydraState:
        weight = self.blocks[0].get_parameter("join.res.weight")
        return HydraState(
            modules,
            depth=0,
            cache=self.empty_cache(batch_size, 0, capacity) if self.config.prefix_layer else None,
            lengths_B=torch.zeros(batch_size, dtype=torch.int64, device=weight.device),
            state_B1D=weight.new_zeros(batch_size, 1, self.target.hidden_size),
            path_BWP=torch.zeros(batch_size, 1, 0, dtype=torch.int64, device=weight.device),
        )

    def observe(
        self, state: DraftState, features_BAF: Tensor, next_tokens_BA: Tensor, lengths_B: Tensor
    ) -> HydraState:
        assert isinstance(state, HydraState)
        out_BAD = features_BAF
        if state.cache is not None:
            positions_BA, kv = state.cache.commit(state.lengths_B, next_tokens_BA.shape[1])
            rotary = self.rotary(positions_BA, features_BAF.dtype)
            out_BAD = self.prefix_norm(self.prefix(features_BAF, rotary, kv, 0))
        # The newest state of each row: index 2 of A for a row that commits 3 tokens.
        last_B11 = (lengths_B - 1).clamp(min=0)[:, None, None]
        return replace(
            state,
            depth=0,
            lengths_B=state.lengths_B + lengths_B,
            state_B1D=out_BAD.gather(1, last_B11.expand(-1, 1, out_BAD.shape[-1])),
            path_BWP=next_tokens_BA.new_zeros(len(lengths_B), 1, 0),
        )

    def expand(
        self, state: DraftState, tokens_BW: Tensor, parents_BW: Tensor
    ) -> tuple[Tensor, HydraState]:
        assert isinstance(state, HydraState)
        # A node's path is its parent's and its own token: paths [[7, 1], [7, 2]] with parents
        # [0, 1, 1] and tokens [3, 4, 5] become [[7, 1, 3], [7, 2, 4], [7, 2, 5]]. The root's parent
        # is -1; its path is empty, so any index serves.
        parents_BWP = parents_BW.clamp(min=0)[..., None].expand(-1, -1, state.depth)
        path_BWP = torch.cat([state.path_BWP.gather(1, parents_BWP), tokens_BW[..., None]], dim=-1)
        # All nodes read the state at the last committed position.
        state_BWD = state.state_B1D.expand(-1, tokens_BW.shape[1], -1)
        hidden_BWD = self._draft(state.depth, state_BWD, path_BWP, state.modules)
        if self.config.lm_head == "shared":
            logits_BWV = state.modules.logits(hidden_BWD)
        else:
            logits_BWV = self.lm_heads[state.depth](hidden_BWD)
        return logits_BWV, replace(state, depth=state.depth + 1, path_BWP=path_BWP)

    def _draft(self, depth: int, state: Tensor, path: Tensor, modules: TargetModules) -> Tensor:
        """Return an LM head's input [..., D] from states [..., D] and paths [..., depth + 1]."""
        # embeddings [..., depth + 1, D] side by side, [..., (depth + 1) D]
        tokens = modules.embed(path).flatten(-2).to(state.dtype)
        return self.blocks[depth](torch.cat([state, tokens], dim=-1))

    def server_config(self) -> dict[str, Any]:
        layer: dict[str, Any] = {"hidden_size": self.target.hidden_size}
        if self.config.prefix_layer:
            layer = {name: value for name, value in vars(self.shape).items() if name != "qk_norm"}
            layer |= {"rope_parameters": self.target.rope_parameters}
            layer |= {"max_position_embeddings": self.target.max_positions}
        return {
            "architectures": ["HydraModel"],
            "model_type": "hydra",
            **layer,
            "vocab_size": self.target.vocab_size,
            "truncated_vocab_size": self.draft_vocab_size,
            "num_heads": self.config.num_heads,
            "num_hidden_layers": self.config.num_layers,
            "original_lm_head": self.config.lm_head == "shared",
            "prefix_layer": self.config.prefix_layer,
        }


class HydraPlusPlusHead(HydraHead):
    """Hydra++ head: Hydra with other defaults."""

    config_class = HydraPlusPlusConfig

    @classmethod
    def default_objective(cls, config: HydraConfig) -> Objective:
        return Objective({"soft_ce": 1.0})
