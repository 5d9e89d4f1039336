"""EAGLE-3: one decoder layer on fused features that feeds on its own output.

Li et al. 2025, arXiv:2503.01840.

With f_t the target's features after three of its blocks, and x the tokens:

    g_t = fc(f_t)                                   3 D_target -> D
    h_t = layer([input_norm(embed(x_{t+1})),        queries, keys, values read both halves,
                 hidden_norm(g_t)], g_t)            the residual stream is g_t alone
    logits of x_{t+2} = lm_head(norm(h_t))

Deeper drafts put h, the layer's own output, in the place of g, and so does training (training-time
test, section 3.2): step s reads the true token at t + 1 + s and the output of step s - 1. EAGLE-3.1
(arXiv:2605.09992) adds `fc_norm` and `norm_output`. Tensor names are those that vLLM and SGLang
read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..base import (
    DraftState,
    DraftTreeState,
    HeadOutput,
    OffsetVocabularyHead,
    TargetFeatures,
    TargetInfo,
    TargetModules,
)
from ..checkpoints.tables import SERVERS, written
from ..draft_positions import DraftPositions
from ..layers.decoder_layer import (
    Attention,
    DecoderLayer,
    GatedMLP,
    KVView,
    LayerShape,
    RMSNorm,
    Rotary,
    llama_config,
    sliding_keys,
)
from ..layers.draft_vocab import most_frequent
from ..layers.starting_values import norm_gain, start_as_identity, start_layer, target_layer_weights
from ..layers.training_time_test import TrainingTimeTest
from ..losses import draft_loss
from ..objective import Objective
from .config import Eagle3Config
from .formats import EAGLE3

UNKNOWN = {
    "sglang": ("norm_before_fc", "norm_before_residual", "qk_norm"),
    "llama.cpp": ("fc_norm", "norm_output", "qk_norm", "sliding_window"),
}
"""Options that a server does not know."""


class FusionLayer(nn.Module):
    """The first layer: attention reads [embedding, state], the residual is the state alone."""

    def __init__(self, shape: LayerShape, norm_before_residual: bool) -> None:
        super().__init__()
        self.norm_before_residual = norm_before_residual
        width = shape.hidden_size
        eps = shape.rms_norm_eps
        self.input_layernorm = RMSNorm(width, eps=eps)
        self.hidden_norm = RMSNorm(width, eps=eps)
        self.self_attn = Attention(shape, 2 * width)
        self.post_attention_layernorm = RMSNorm(width, eps=eps)
        self.mlp = GatedMLP(shape)

    def forward(
        self, embeds_BTD: Tensor, state_BTD: Tensor, rotary: tuple[Tensor, Tensor], kv: KVView
    ) -> Tensor:
        """The residual stream after the layer, at the positions that `kv` returns."""
        normed_BTD = self.hidden_norm(state_BTD)
        both = torch.cat([self.input_layernorm(embeds_BTD), normed_BTD], dim=-1)  # [B, T, 2 D]
        out_BTD = self.self_attn(both, rotary, kv, 0)
        residual_BTD = normed_BTD if self.norm_before_residual else state_BTD
        # In training the last layer returns the draft positions only, [1, N, D]. Take the residual
        # stream at the same positions.
        if out_BTD.shape != residual_BTD.shape:
            residual_BTD = residual_BTD.flatten(0, 1)[kv.drafts_N][None]
        state_BTD = residual_BTD + out_BTD
        return state_BTD + self.mlp(self.post_attention_layernorm(state_BTD))


class Eagle3Head(OffsetVocabularyHead):
    """Drafts token by token with a decoder layer on features of several target layers."""

    config_class = Eagle3Config
    config: Eagle3Config
    computes = ("norm_before_residual", "norm_output")
    attends_by_slots = True

    def __init__(self, config: Eagle3Config, target: TargetInfo) -> None:
        super().__init__(config, target)
        self.max_depth = config.depth

        # 1. The target layers that it reads. No head reads the state after the last block, before
        #    the final norm: with 16 blocks, layers are 0 to 14, and -1.
        blocks = target.num_layers
        last = blocks - 2
        if config.feature_layers is None:
            layers: tuple[int, ...] = (1, blocks // 2 - 1, blocks - 4)
            if blocks < 7:  # they would coincide
                layers = (0, last // 2, last)
        else:
            layers = tuple(config.feature_layers)
        if not layers or min(layers) < -1 or max(layers) > last or len(set(layers)) < len(layers):
            default = ", the default," if config.feature_layers is None else ""
            raise ValueError(
                f"eagle3 feature_layers {list(layers)}{default} are out of range or coincide for"
                f" {target.name!r} with {blocks} blocks; choose different numbers from 0 to {last}"
                " for a block's output, or -1 for the state after the final norm"
            )
        # Modulo the number of blocks, -1 becomes the deepest layer.
        depths = [layer % blocks for layer in layers]
        if depths != sorted(depths):
            raise ValueError(
                f"eagle3 feature_layers {list(layers)} are not in order: servers join features by"
                " depth"
            )
        self.feature_layers = layers

        # 2. The modules. Attribute names are the tensor names of published checkpoints.
        shape = LayerShape.of(target, config)
        self.shape = shape
        self.cached_layers = config.num_layers
        self.window = config.sliding_window
        fused = len(self.feature_layers)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                RMSNorm(target.hidden_size, eps=shape.rms_norm_eps) for _ in range(fused)
            )
        if config.norm_before_fc:
            self.input_norm = RMSNorm(fused * target.hidden_size, eps=shape.rms_norm_eps)
        self.fc = nn.Linear(fused * target.hidden_size, shape.hidden_size, bias=False)
        self.midlayer = FusionLayer(shape, config.norm_before_residual)
        # Servers count the first layer as layers.0.
        self.layers = nn.ModuleDict(
            {str(i): DecoderLayer(shape) for i in range(1, config.num_layers)}
        )
        self.norm = RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, self.draft_vocab_size, bias=False)
        # The target's embedding only fits a head of the same width.
        self.own_embedding = config.own_embedding or shape.hidden_size != target.hidden_size
        if self.own_embedding:
            self.embed_tokens = nn.Embedding(target.vocab_size, shape.hidden_size)
        self.rotary = Rotary(target, shape.head_dim, config.rope_parameters)

        # 3. The servers that cannot read it. Two options rule out all of them.
        if -1 in layers:
            self.unread_by = dict.fromkeys(SERVERS, "it reads no features after the final norm")
            return
        if config.attention_bias:
            self.unread_by = dict.fromkeys(
                SERVERS, "it has no biases of queries, keys and values alone"
            )
            return
        for server, names in UNKNOWN.items():
            unknown = [name for name in names if getattr(config, name)]
            if config.num_layers > 1:
                unknown.append("num_layers above 1")
            if server == "llama.cpp" and fused != 3:
                unknown.append(f"{fused} feature_layers, where it has 3")
            if unknown:
                self.unread_by[server] = f"it does not know {', '.join(unknown)}"
            elif server == "sglang" and config.sliding_window is not None:
                self.unread_by[server] = (
                    "it reads no window from a checkpoint; a version that has the option needs "
                    f"--speculative-draft-window-size {config.sliding_window}"
                )

    @torch.no_grad()
    def initialize(self, modules: TargetModules, token_counts_V: Tensor) -> None:
        # 1. The draft vocabulary: the most frequent tokens of the answers.
        if self.config.draft_vocab_size is not None:
            self.choose_vocabulary(most_frequent(token_counts_V, self.draft_vocab_size, "eagle3"))

        # 2. Embedding and LM head, copied from the target where the widths agree.
        same_width = self.shape.hidden_size == self.target.hidden_size
        if self.config.own_embedding and same_width:
            tokens_V = torch.arange(self.target.vocab_size, device=self.embed_tokens.weight.device)
            self.embed_tokens.weight.copy_(modules.embed(tokens_V))
        if self.config.start_lm_head and same_width:
            self.lm_head.weight.copy_(modules.lm_head_rows(self.vocabulary_V))
            # The LM head was made for states that the target's final norm has scaled.
            gain_D = norm_gain(modules.norm, self.target.hidden_size)
            if gain_D is not None:
                self.norm.weight.copy_(gain_D)
        if self.config.start == "random":
            return

        # 3. The layers, each a copy of one of the target's blocks.
        number = -1 if self.config.start == "last" else int(self.config.start)
        block = target_layer_weights(modules.blocks, number, self.target, "eagle3")
        fusion = {**block, "hidden_norm.weight": block["input_layernorm.weight"]}
        for name in [f"self_attn.{kind}_proj.weight" for kind in "qkv"]:
            # The half that reads the state is the target's; the half that reads the embedding
            # starts silent: [out, D] becomes [out, 2 D].
            fusion[name] = torch.cat([torch.zeros_like(block[name]), block[name]], dim=1)
        start_layer(self.midlayer, fusion, "the first layer", "eagle3")
        for name, layer in self.layers.items():
            start_layer(layer, block, f"layer {name}", "eagle3")

        # 4. `fc` [D, 3 D]: the identity on the deepest feature, zero on the others.
        start_as_identity(self.fc)

    @property
    def test_steps(self) -> int:
        return self.config.train_steps or self.max_depth

    def forward(
        self, features: TargetFeatures, objective: Objective | None = None, ranks: int = 1
    ) -> HeadOutput:
        objective = objective or self.default_objective(self.config)
        # Training may unroll fewer steps than decoding drafts; evaluation judges every depth.
        steps = self.test_steps if self.training else self.max_depth
        positions = DraftPositions.of(features, steps)
        test = TrainingTimeTest(
            self.config.num_layers,
            features.sequences_BT,
            positions.index_N,
            self.config.sliding_window,
        )
        # [N, D] of each step, at the N draft positions of the whole batch
        hiddens = [self.norm(state_1ND[0]) for state_1ND in self.drafts(features, test, steps)]
        heads = [self.lm_head.weight] * steps  # one LM head for all depths
        return draft_loss(hiddens, heads, self.vocabulary_V, features, positions, objective, ranks)

    def drafts(self, features: TargetFeatures, test: TrainingTimeTest, steps: int) -> list[Tensor]:
        """Return the teacher-forced outputs of every step.

        They are [B, T, D], or [1, N, D] at the draft positions of `test`.
        """
        fed_back = self.norm if self.config.norm_output else None
        return test.outputs(
            self._run, features, self._fuse(features.features_BTF), steps, self.recompute, fed_back
        )

    def observe(
        self, state: DraftState, features_BAF: Tensor, next_tokens_BA: Tensor, lengths_B: Tensor
    ) -> DraftTreeState:
        assert isinstance(state, DraftTreeState)
        # The cache takes all A tokens of every row. Row b counts its first lengths_B[b]; the rest
        # is padding that the next commit overwrites.
        positions_BA, kv = state.cache.commit(
            state.lengths_B, next_tokens_BA.shape[1], state.first_B
        )
        out_BAD = self._run(
            next_tokens_BA, self._fuse(features_BAF), positions_BA, kv, state.modules
        )
        return state.committed(out_BAD, lengths_B)

    def expand(
        self, state: DraftState, tokens_BW: Tensor, parents_BW: Tensor
    ) -> tuple[Tensor, DraftTreeState]:
        assert isinstance(state, DraftTreeState)
        if state.depth > 0:  # `observe` has run the root's own step
            # Each node reads its parent's output: with parents [0, 0, 1] the three nodes read
            # outputs 0, 0 and 1 of the previous frontier.
            fed_BWD = state.hidden_BWD.gather(
                1, parents_BW[..., None].expand(-1, -1, state.hidden_BWD.shape[-1])
            )
            fed_BWD = self.norm(fed_BWD) if self.config.norm_output else fed_BWD
            positions_BW, kv, state = state.below(parents_BW)
            state = replace(
                state, hidden_BWD=self._run(tokens_BW, fed_BWD, positions_BW, kv, state.modules)
            )
        return self.lm_head(self.norm(state.hidden_BWD)), replace(state, depth=state.depth + 1)

    def _fuse(self, features_BTF: Tensor) -> Tensor:
        """Map the chosen layers' features [B, T, F] to one state [B, T, D]."""
        if self.config.fc_norm:  # EAGLE-3.1: one norm for each layer's features
            parts = features_BTF.chunk(len(self.feature_layers), dim=-1)
            features_BTF = torch.cat(
                [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1
            )
        elif self.config.norm_before_fc:  # one norm for the features of all layers together
            features_BTF = self.input_norm(features_BTF)
        return self.fc(features_BTF)

    def _run(
        self,
        next_tokens_BT: Tensor,
        state_BTD: Tensor,
        positions_BT: Tensor,
        kv: KVView,
        modules: TargetModules,
    ) -> Tensor:
        """One step of all decoder layers, on fused features or on the head's own output."""
        embed = self.embed_tokens if self.own_embedding else modules.embed
        embeds_BTD = embed(next_tokens_BT)
        rotary = self.rotary(positions_BT, state_BTD.dtype)
        state_BTD = self.midlayer(embeds_BTD, state_BTD, rotary, kv)
        # Only the first layer reads the embedding.
        for i, layer in enumerate(self.layers.values(), start=1):
            state_BTD = layer(state_BTD, rotary, kv, i)
        return state_BTD

    def server_config(self) -> dict[str, Any]:
        layers = self.config.num_layers
        window = self.config.sliding_window
        windowed = {} if window is None else sliding_keys(["sliding_attention"] * layers, window)
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            **llama_config(self.shape, layers, self.target, self.config.rope_parameters),
            **windowed,
            "target_hidden_size": self.target.hidden_size,
            "draft_vocab_size": self.lm_head.out_features,
            **written(EAGLE3, self.config),
            "num_aux_hidden_states": len(self.feature_layers),
            # Here layers are counted by a block's input, in `eagle_config` by its output: layer 1
            # is 2 here and 1 there.
            "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in self.feature_layers],
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": list(self.feature_layers),
                "use_aux_hidden_state": True,
            },
        }
