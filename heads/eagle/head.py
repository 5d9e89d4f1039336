"""EAGLE: one decoder layer that predicts the target's next feature.

Li et al. 2024, arXiv:2401.15077.

With f_t the target's state after its final norm, x the tokens and E the target's embedding:

    f'_{t+1} = layers(fc([E(x_{t+1}), f_t]))        fc: 2 D -> D, no bias;
                                                    the first layer has no input norm
    logits of x_{t+2} = lm_head(f'_{t+1})           embedding and LM head are the target's, frozen

Deeper drafts put the predicted feature f' in the place of f. Training minimises smooth_l1(f'_{t+1},
f_{t+1}) + 0.1 soft_ce on true features, with noise that stands for the head's own errors. EAGLE-2
(arXiv:2406.16858) is the same head with a dynamic tree, `tree: dynamic:...`. Tensor names are those
that vLLM reads.
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
from ..layers.decoder_layer import (
    DecoderLayer,
    KVView,
    LayerShape,
    Rotary,
    at_least_fp32,
    llama_config,
)
from ..layers.starting_values import (
    required_gain,
    start_as_identity,
    start_layer,
    target_layer_weights,
)
from ..layers.training_time_test import TrainingTimeTest
from ..losses import draft_loss, with_feature_loss
from ..objective import Objective
from .config import EagleConfig

OUTPUTS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
"""The linear maps of a layer whose outputs are added to the residual stream."""
STEP = 0.25
"""Norm of a block's output relative to its residual stream's; a fifth to a half in trained
models."""


class EagleHead(DraftHead):
    """EAGLE and EAGLE-2 head."""

    config_class = EagleConfig
    config: EagleConfig
    attends_by_slots = True

    def __init__(self, config: EagleConfig, target: TargetInfo) -> None:
        super().__init__(config, target)
        self.max_depth = config.depth
        self.feature_layers = (-1,)
        # without norms of queries and keys: servers read a plain Llama layer
        shape = LayerShape.of(target, config)
        self.shape = shape
        self.cached_layers = config.num_layers
        self.fc = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=config.fc_bias)
        # The first layer reads features, not a residual stream, and has no input norm.
        self.layers = nn.ModuleList(
            DecoderLayer(shape, input_norm=i > 0) for i in range(config.num_layers)
        )
        self.rotary = Rotary(target, shape.head_dim, config.rope_parameters)
        if config.fc_bias:
            self.unread_by = {"vllm": "its fc has no bias, and this one has"}
        else:
            self.unread_by = {"sglang": "its fc has a bias, drawn at random where a file has none"}
        self.unread_by["llama.cpp"] = "it has no EAGLE-1"
        if config.attention_bias:
            self.unread_by |= dict.fromkeys(
                ("vllm", "sglang"), "it has no biases of queries, keys and values alone"
            )

    @torch.no_grad()
    def initialize(self, modules: TargetModules, token_counts_V: Tensor) -> None:
        if self.config.start == "random":
            return
        # Every layer starts as the target's block, turned from the residual stream x to features:
        # with g the final norm's gain and s the size of the stream, f = g x / s. `fc` starts as the
        # identity on f.

        # 1. The block's weights, and g, with gains near 0 raised to 0.01: it is divided by.
        number = -1 if self.config.start == "last" else int(self.config.start)
        weights = target_layer_weights(modules.blocks, number, self.target, "eagle")
        where = f"eagle cannot start from {self.target.name!r}: its norm"
        gain_D = at_least_fp32(required_gain(modules.norm, self.target.hidden_size, where))
        gain_D = gain_D.abs().clamp(min=1e-2).copysign(gain_D)
        block = {name: at_least_fp32(tensor) for name, tensor in weights.items()}

        # 2. Outputs are added to f, not to x: times g, row by row.
        into_D = block["input_layernorm.weight"] / gain_D
        for name in OUTPUTS:
            block[name] = gain_D[:, None] * block[name]
        # 3. Norms read f, not x: divided by g, at the same size.
        for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            block[name] = block[name] / gain_D * gain_D.square().mean().sqrt()
        # 4. The first layer has no input norm: its gain goes into queries, keys and values, column
        #    by column.
        without_norm = {f"self_attn.{kind}_proj.weight": into_D for kind in "qkv"}

        # 5. `fc` [D, 2 D] and the layers.
        start_as_identity(self.fc)
        for i, layer in enumerate(self.layers):
            gains = without_norm if i == 0 else {}
            start_layer(
                layer,
                {name: gains.get(name, 1) * tensor for name, tensor in block.items()},
                f"layer {i}",
                "eagle",
            )
            self._resize(layer, gain_D, i)

    def _resize(self, layer: nn.Module, gain_D: Tensor, i: int) -> None:
        """Scale a layer's output maps so that the layer moves features by STEP.

        This divides them by s, the size of the residual stream, which the weights do not show.
        """
        # 64 features as the target's final norm would leave them: g times unit normal numbers.
        draw = torch.Generator().manual_seed(0)
        features_BTD = gain_D.cpu() * torch.randn(
            1, 64, len(gain_D), generator=draw, dtype=torch.float32
        )
        features_BTD = features_BTD.to(self.fc.weight)
        rotary = self.rotary(torch.arange(64, device=features_BTD.device)[None], features_BTD.dtype)
        kv = TrainingTimeTest(self.config.num_layers).at(0)
        moved = (layer(features_BTD, rotary, kv, i) - features_BTD).norm() / features_BTD.norm()
        for name in OUTPUTS:
            layer.get_parameter(name).mul_(STEP / moved)

    @classmethod
    def default_objective(cls, config: EagleConfig) -> Objective:
        return Objective({"smooth_l1": 1.0, "soft_ce": 0.1})

    @classmethod
    def extra_losses(cls, config: EagleConfig) -> tuple[str, ...]:
        return ("smooth_l1",)

    @property
    def test_steps(self) -> int:
        return self.config.train_steps

    def forward(
        self, features: TargetFeatures, objective: Objective | None = None, ranks: int = 1
    ) -> HeadOutput:
        objective = objective or self.default_objective(self.config)
        steps = self.test_steps if self.training else self.max_depth
        positions = DraftPositions.of(features, steps)
        test = TrainingTimeTest(self.config.num_layers, features.sequences_BT, positions.index_N)
        hiddens = [state_1ND[0] for state_1ND in self.drafts(features, test, steps)]
        weight = features.modules.lm_head.weight
        # The LM head may have a narrower dtype than the features; the target's logits are computed
        # in it too.
        inputs = [hidden_ND.to(weight.dtype) for hidden_ND in hiddens]
        output = draft_loss(inputs, [weight] * steps, None, features, positions, objective, ranks)
        return with_feature_loss(output, hiddens, features, positions, objective)

    def drafts(self, features: TargetFeatures, test: TrainingTimeTest, steps: int) -> list[Tensor]:
        """Return the teacher-forced features of every step.

        They are [B, T, D], or [1, N, D] at the draft positions of `test`. Step k at t predicts t +
        1 + k.
        """
        state_BTD = features.features_BTF
        if self.training and self.config.noise > 0:  # from torch's global generator, as published
            # Uniform in (-reach, reach), smaller in longer rows.
            reach = self.config.noise * 512 / state_BTD.shape[1]
            state_BTD = state_BTD + (2 * torch.rand_like(state_BTD) - 1) * reach
        return test.outputs(self._run, features, state_BTD, steps, self.recompute)

    def observe(
        self, state: DraftState, features_BAF: Tensor, next_tokens_BA: Tensor, lengths_B: Tensor
    ) -> DraftTreeState:
        assert isinstance(state, DraftTreeState)
        positions_BA, kv = state.cache.commit(state.lengths_B, next_tokens_BA.shape[1])
        out_BAD = self._run(next_tokens_BA, features_BAF, positions_BA, kv, state.modules)
        return state.committed(out_BAD, lengths_B)

    def expand(
        self, state: DraftState, tokens_BW: Tensor, parents_BW: Tensor
    ) -> tuple[Tensor, DraftTreeState]:
        assert isinstance(state, DraftTreeState)
        if state.depth > 0:  # `observe` has run the root's own step
            # Each node reads its parent's feature: with parents [0, 0, 1] the three nodes read
            # features 0, 0 and 1 of the previous frontier.
            fed_BWD = state.hidden_BWD.gather(
                1, parents_BW[..., None].expand(-1, -1, state.hidden_BWD.shape[-1])
            )
            positions_BW, kv, state = state.below(parents_BW)
            state = replace(
                state, hidden_BWD=self._run(tokens_BW, fed_BWD, positions_BW, kv, state.modules)
            )
        return state.modules.logits(state.hidden_BWD), replace(state, depth=state.depth + 1)

    def _run(
        self,
        next_tokens_BT: Tensor,
        state_BTD: Tensor,
        positions_BT: Tensor,
        kv: KVView,
        modules: TargetModules,
    ) -> Tensor:
        """The next features, from true ones or from the head's own."""
        embeds_BTD = modules.embed(next_tokens_BT).to(self.fc.weight.dtype)
        state_BTD = self.fc(torch.cat([embeds_BTD, state_BTD], dim=-1))
        rotary = self.rotary(positions_BT, state_BTD.dtype)
        for i, layer in enumerate(self.layers):
            state_BTD = layer(state_BTD, rotary, kv, i)
        return state_BTD

    def server_config(self) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"],
            **llama_config(
                self.shape, self.config.num_layers, self.target, self.config.rope_parameters
            ),
            "bias": self.config.fc_bias,  # for SafeAILab's code, as qkv_bias
            **({"qkv_bias": True} if self.config.attention_bias else {}),
        }
