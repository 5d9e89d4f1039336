"""DSpark: DFlash whose drafts depend on the token before them, with an acceptance estimate.

With h_k the backbone's output at slot k of a block, and x the token before the draft (the root, or
the parent node):

    e      = w1[x]                                          w1 [V, r], over the target's vocabulary
    z      = e                                              markov: vanilla
    z      = sigmoid(gate [h_k, e]) * e                     markov: gated
    g, c, o = joint [s, e, h_k];                            markov: rnn, s_0 = 0
              s = sigmoid(g) s + (1 - sigmoid(g)) tanh(c);
              z = tanh(o)
    logits = lm_head(h_k) + w2 z                            w2 [V, r], over the draft vocabulary
    rate   = sigmoid(proj [h_k, e])                         estimate of sum min(p, q)

Children of different nodes differ, so the draft is a tree and not a product of independent slots. A
chain may end where the estimated rate is low, `stop:...`: the estimate is made before its token is
drawn, so the rules stay exact. Definitions are those of DeepSeek's DeepSpec; tensor names those
that vLLM reads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..base import DraftState, HeadOutput, TargetFeatures, TargetInfo, TargetModules
from ..checkpoints.tables import written
from ..dflash.head import DFlashHead, DFlashState
from ..losses import draft_loss
from ..objective import Objective
from .config import DSparkConfig
from .formats import DSPARK


@dataclass(frozen=True)
class DSparkState(DFlashState):
    """A block's state, and what the nodes of the frontier carry."""

    memory_BWR: Tensor
    """The state s of the RNN after each node of the frontier; its last dimension is 0 without
    one."""


class MarkovHead(nn.Module):
    """Correction of logits by the token before a draft."""

    def __init__(self, config: DSparkConfig, target: TargetInfo, draft_vocab_size: int) -> None:
        super().__init__()
        rank = config.markov_rank
        width = target.hidden_size
        self.markov_w1 = nn.Embedding(target.vocab_size, rank)
        nn.init.normal_(self.markov_w1.weight, std=0.01)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)
        self.memory = rank if config.markov == "rnn" else 0
        if config.markov == "gated":
            self.gate_proj = nn.Linear(width + rank, rank)
        elif config.markov == "rnn":
            self.joint_proj = nn.Linear(2 * rank + width, 3 * rank)

    def forward(
        self, embed_WR: Tensor, hidden_WD: Tensor, memory_WR: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the input of `markov_w2` and the memory, both after each embedded token.

        The input is [..., W, R].
        """
        if self.memory:  # rnn
            joined = torch.cat([memory_WR, embed_WR, hidden_WD], dim=-1)  # [..., W, 2 R + D]
            gate_WR, new_WR, out_WR = self.joint_proj(joined).chunk(3, -1)
            share_WR = gate_WR.sigmoid()
            return out_WR.tanh(), share_WR * memory_WR + (1 - share_WR) * new_WR.tanh()
        if hasattr(self, "gate_proj"):  # gated
            gate_WR = self.gate_proj(torch.cat([hidden_WD, embed_WR], dim=-1)).sigmoid()
            return gate_WR * embed_WR, memory_WR
        return embed_WR, memory_WR  # vanilla


class DSparkHead(DFlashHead):
    """DFlash, each draft corrected by the token before it; may estimate its acceptance rate."""

    config_class = DSparkConfig
    config: DSparkConfig
    vocabulary_layers: tuple[str, ...] = ("lm_head", "markov_head.markov_w2")

    def __init__(self, config: DSparkConfig, target: TargetInfo) -> None:
        super().__init__(config, target)
        self.markov_head = MarkovHead(config, target, self.draft_vocab_size)
        self.estimates_acceptance = config.confidence
        if config.confidence:
            width = target.hidden_size + config.confidence_with_markov * config.markov_rank
            self.confidence_head = nn.ModuleDict({"proj": nn.Linear(width, 1)})
        # What rules out DFlash in these two servers does not rule out DSpark.
        if config.qk_norm:
            self.unread_by.pop("llama.cpp", None)
            self.unread_by.pop("vllm", None)
        if config.confidence and not config.confidence_with_markov:
            self.unread_by["llama.cpp"] = (
                "its estimate of the acceptance rate sees the token before the draft"
            )
        if config.markov != "vanilla":
            reason = f"its DSpark is vanilla, and this head's markov is {config.markov}"
            self.unread_by |= dict.fromkeys(("vllm", "llama.cpp"), reason)

    @classmethod
    def default_objective(cls, config: DSparkConfig) -> Objective:
        loss = {"ce": 0.1, "tv": 0.9}
        if config.confidence:
            loss["confidence"] = 1.0
        return Objective(loss)

    @classmethod
    def extra_losses(cls, config: DSparkConfig) -> tuple[str, ...]:
        return ("confidence",) if config.confidence else ()

    def forward(
        self, features: TargetFeatures, objective: Objective | None = None, ranks: int = 1
    ) -> HeadOutput:
        objective = objective or self.default_objective(self.config)
        # 1. The backbone's outputs for all depths, as in DFlash.
        positions, slots_NKD = self.training_blocks(features)

        # 2. The correction by the true token before each draft: before the first it is the root.
        true_before_NK = features.tokens_BT.flatten()[positions.rows_NK]
        embed_NKR = self.markov_head.markov_w1(true_before_NK)
        memory_NR = embed_NKR.new_zeros(len(embed_NKR), self.markov_head.memory)
        weight_VR = self.markov_head.markov_w2.weight
        corrections: list[dict[str, Tensor]] = []
        for k in range(self.max_depth):
            latent_NR, memory_NR = self.markov_head(embed_NKR[:, k], slots_NKD[:, k], memory_NR)
            corrections.append({"latent_NR": latent_NR, "correction_VR": weight_VR})

        # 3. The estimate of the acceptance rate, if it is trained.
        if self.config.confidence and objective.loss.get("confidence", 0) > 0:
            rates = self._confidence(slots_NKD, embed_NKR).unbind(1)
            for correction, rates_N in zip(corrections, rates, strict=True):
                correction["confidence_N"] = rates_N
        heads = self._lm_heads(slots_NKD, features)
        return draft_loss(*heads, features, positions, objective, ranks, corrections)

    def begin(
        self, modules: TargetModules, batch_size: int, capacity: int, max_depth: int, nodes: int
    ) -> DSparkState:
        begun = super().begin(modules, batch_size, capacity, max_depth, nodes)
        return DSparkState(
            **vars(begun),
            memory_BWR=begun.slots_BKD.new_zeros(batch_size, 1, self.markov_head.memory),
        )

    def observe(
        self, state: DraftState, features_BAF: Tensor, next_tokens_BA: Tensor, lengths_B: Tensor
    ) -> DSparkState:
        assert isinstance(state, DSparkState)
        seen = super().observe(state, features_BAF, next_tokens_BA, lengths_B)
        assert isinstance(seen, DSparkState)
        return replace(
            seen, memory_BWR=torch.zeros_like(state.memory_BWR[:, :1]), confidence_BW=None
        )

    def expand(
        self, state: DraftState, tokens_BW: Tensor, parents_BW: Tensor
    ) -> tuple[Tensor, DSparkState]:
        # DFlash's logits are the same for all nodes of a depth; what is added below is not.
        logits_B1V, state = super().expand(state, tokens_BW, parents_BW)
        assert isinstance(state, DSparkState)
        # That call has raised the depth: the slot in use is the one before.
        hidden_BWD = state.slots_BKD[:, state.depth - 1 : state.depth].expand(
            -1, tokens_BW.shape[1], -1
        )
        embed_BWR = self.markov_head.markov_w1(tokens_BW)
        # Each node goes on from its parent's memory; the root's parent, -1, is clamped to the one
        # memory there is.
        width = state.memory_BWR.shape[-1]
        memory_BWR = state.memory_BWR.gather(
            1, parents_BW.clamp(min=0)[..., None].expand(-1, -1, width)
        )
        latent_BWR, memory_BWR = self.markov_head(embed_BWR, hidden_BWD, memory_BWR)
        rates_BW = self._confidence(hidden_BWD, embed_BWR) if self.config.confidence else None
        state = replace(state, memory_BWR=memory_BWR, confidence_BW=rates_BW)
        return logits_B1V + self.markov_head.markov_w2(latent_BWR), state

    def _confidence(self, hidden_WD: Tensor, embed_WR: Tensor) -> Tensor:
        """Logits [..., W] of the estimated acceptance rate."""
        inputs = [hidden_WD, embed_WR] if self.config.confidence_with_markov else [hidden_WD]
        return self.confidence_head["proj"](torch.cat(inputs, dim=-1))[..., 0]

    def server_config(self) -> dict[str, Any]:
        shared = super().server_config()
        return {
            **shared.pop("dflash_config"),
            **shared,
            "architectures": ["Qwen3DSparkModel"],
            **written(DSPARK, self.config),
        }
