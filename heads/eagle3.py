"""EAGLE-3 (Li et al. 2025, arXiv:2503.01840): one decoder layer on fused features that feeds on its own output.

With f_t the target's features after three of its blocks, and x the tokens:

    g_t = fc(f_t)                                              3 D_target -> D
    h_t = layer([input_norm(embed(x_{t+1})), hidden_norm(g_t)], g_t)       queries, keys, values read both halves,
    logits of x_{t+2} = lm_head(norm(h_t))                                 the residual stream is g_t alone

Deeper drafts put h, the layer's own output, in the place of g. Training runs these steps too (training-time test,
section 3.2): step s reads the true token at t + 1 + s and the output of step s - 1, and is judged by the target at
t + 1 + s. EAGLE-3.1 (arXiv:2605.09992) normalises each fused feature (`fc_norm`) and feeds back norm(h)
(`norm_output`). Tensor names are those that vLLM and SGLang read.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .base import DraftHead, DraftState, HeadOutput, TargetFeatures, TargetInfo, TargetModules
from .draft_vocab import check_ids, check_size, most_frequent
from .layers.decoder_layer import (
    Attention,
    DecoderLayer,
    DraftCache,
    GatedMLP,
    KVView,
    LayerShape,
    RMSNorm,
    Rotary,
    TrainingTimeTest,
    llama_config,
    norm_gain,
    start_layer,
    target_layer_weights,
)
from .layers.draft_cache import DraftTreeState
from .losses import DraftPositions, Objective, draft_loss


@dataclass(frozen=True)
class Eagle3Config:
    """Options of an EAGLE-3 head; null takes the target's own value."""

    depth: int = 7
    """Tokens after the root that are guessed at most."""
    train_steps: int | None = None
    """Steps of training-time test; null for as many as `depth`."""
    feature_layers: list[int] | None = None
    """Three or another number of blocks whose outputs are fused, counted from 0; null for 1, L/2 - 1 and L - 4."""
    draft_vocab_size: int | None = None
    """Tokens that can be drafted, the most frequent in the training data; null for all of them."""
    num_layers: int = 1
    """Decoder layers; those after the first are plain ones."""
    hidden_size: int | None = None
    """Draft width; where it differs from the target's, the head learns its own embedding."""
    own_embedding: bool = False
    """Whether it learns its own embedding all the same, started from the target's."""
    intermediate_size: int | None = None
    """Width of the MLP."""
    num_attention_heads: int | None = None
    """Query heads."""
    num_key_value_heads: int | None = None
    """Key and value heads."""
    head_dim: int | None = None
    """Width of a head."""
    qk_norm: bool = False
    """RMSNorm on queries and keys, as in Qwen3; false as in Llama."""
    fc_norm: bool = False
    """RMSNorm on each fused feature (EAGLE-3.1)."""
    norm_output: bool = False
    """Feed back the normalised output (EAGLE-3.1)."""
    norm_before_fc: bool = False
    """One RMSNorm on all fused features together (speculators); not with fc_norm."""
    norm_before_residual: bool = False
    """Whether the residual stream begins behind `hidden_norm` and not before it (speculators)."""
    rms_norm_eps: float | None = None
    """Added under the root of every norm."""
    rope_parameters: dict[str, Any] | None = None
    """Rotary positions in transformers' words; null for the target's."""
    start: str | int = "random"
    """Starting values of the decoder layers: random, last (the target's last block), or a block's number."""
    start_lm_head: bool = True
    """Start the LM head and the final norm from the target's."""
    loss: dict[str, float] = field(default_factory=lambda: {"soft_ce": 1.0})
    """Losses and their weights; see losses.py."""
    depth_weights: str = "decay"
    """decay, or d_pace."""
    decay: float = 0.8
    """Loss weight of a step relative to the one before, for depth_weights: decay."""
    target_top_k: int | None = None
    """How many of the target's most likely tokens the losses look at; null for the whole draft vocabulary."""

    def __post_init__(self) -> None:
        """Refuse what no EAGLE-3 head can be."""
        if self.depth < 1 or self.num_layers < 1:
            raise ValueError(
                f"eagle3 needs a depth and num_layers of at least 1, not {self.depth} and {self.num_layers}"
            )
        if self.train_steps is not None and not 1 <= self.train_steps <= self.depth:
            raise ValueError(f"eagle3 train_steps must be from 1 to the depth {self.depth}, not {self.train_steps}")
        if isinstance(self.start, str) and self.start not in ("random", "last"):
            raise ValueError(f"eagle3 start must be random, last or the number of a block, not {self.start!r}")
        if self.fc_norm and self.norm_before_fc:
            raise ValueError("eagle3 fc_norm and norm_before_fc are two ways of one thing; choose one")
        self.objective.check("eagle3")

    @property
    def objective(self) -> Objective:
        """What it is trained on."""
        return Objective(self.loss, self.depth_weights, self.decay, self.target_top_k)


class FusionLayer(nn.Module):
    """The first decoder layer: attention reads [embedding, state], the residual stream is the state alone."""

    def __init__(self, shape: LayerShape, norm_before_residual: bool) -> None:
        super().__init__()
        self.norm_before_residual = norm_before_residual
        width, eps = shape.hidden_size, shape.rms_norm_eps
        self.input_layernorm = RMSNorm(width, eps=eps)
        self.hidden_norm = RMSNorm(width, eps=eps)
        self.self_attn = Attention(shape, 2 * width)
        self.post_attention_layernorm = RMSNorm(width, eps=eps)
        self.mlp = GatedMLP(shape)

    def forward(self, embeds_BTD: Tensor, state_BTD: Tensor, rotary: tuple[Tensor, Tensor], memory: KVView) -> Tensor:
        """The residual stream before the layer, and after it at the positions that `memory` answers."""
        normed_BTD = self.hidden_norm(state_BTD)
        both = torch.cat([self.input_layernorm(embeds_BTD), normed_BTD], dim=-1)
        found_BTD = self.self_attn(both, rotary, memory, 0)
        state_BTD = memory.answered(0, normed_BTD if self.norm_before_residual else state_BTD) + found_BTD
        out: Tensor = state_BTD + self.mlp(self.post_attention_layernorm(state_BTD))
        return out


class Eagle3Head(DraftHead):
    """See the module's docstring."""

    config_class = Eagle3Config
    config: Eagle3Config
    d2t: Tensor
    """What to add to a draft id to get the target's."""
    t2d: Tensor
    """True at the target ids of the draft vocabulary."""

    def __init__(self, config: Eagle3Config, target: TargetInfo) -> None:
        super().__init__(config, target)
        check_size(config.draft_vocab_size, target.vocab_size, "eagle3")
        self.max_depth = config.depth
        self.feature_layers = fused_layers(config.feature_layers, target)
        shape = LayerShape.of(target, config)
        self.shape, self.cached_layers = shape, config.num_layers
        fused = len(self.feature_layers)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(target.hidden_size, eps=shape.rms_norm_eps) for _ in range(fused))
        if config.norm_before_fc:
            self.input_norm = RMSNorm(fused * target.hidden_size, eps=shape.rms_norm_eps)
        self.fc = nn.Linear(fused * target.hidden_size, shape.hidden_size, bias=False)
        self.midlayer = FusionLayer(shape, config.norm_before_residual)
        # Servers count the first layer as layers.0.
        self.layers = nn.ModuleDict({str(i): DecoderLayer(shape) for i in range(1, config.num_layers)})
        self.norm = RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, self.draft_vocab_size, bias=False)
        if self._own_embedding:
            self.embed_tokens = nn.Embedding(target.vocab_size, shape.hidden_size)
        if config.draft_vocab_size is not None:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
            self.register_buffer("t2d", torch.arange(target.vocab_size) < config.draft_vocab_size)
        self.rotary = Rotary(target, shape.head_dim, config.rope_parameters)

    @property
    def _own_embedding(self) -> bool:
        return self.config.own_embedding or self.shape.hidden_size != self.target.hidden_size

    @property
    def draft_vocab_size(self) -> int:
        """Number of tokens that the head can draft."""
        return self.config.draft_vocab_size or self.target.vocab_size

    @property
    def vocabulary_V(self) -> Tensor | None:
        """Sorted target ids of the draft vocabulary; None for all of them."""
        if self.config.draft_vocab_size is None:
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    @torch.no_grad()
    def initialize(self, modules: TargetModules, token_counts_V: Tensor) -> None:
        """Choose the draft vocabulary; start the LM head, and the layers if so asked, from the target's."""
        if self.config.draft_vocab_size is not None:
            chosen = most_frequent(token_counts_V, self.draft_vocab_size, "eagle3").to(self.d2t.device)
            self.d2t.copy_(chosen - torch.arange(len(chosen), device=chosen.device))
            self.t2d.zero_()[chosen] = True
        same_width = self.shape.hidden_size == self.target.hidden_size
        if self.config.own_embedding and same_width:
            tokens_V = torch.arange(self.target.vocab_size, device=self.embed_tokens.weight.device)
            self.embed_tokens.weight.copy_(modules.embed(tokens_V))
        if self.config.start_lm_head and same_width:
            self.lm_head.weight.copy_(modules.lm_head_rows(self.vocabulary_V))
            gain_D = norm_gain(modules.norm, self.target.hidden_size)
            if gain_D is not None:
                self.norm.weight.copy_(gain_D)
        if self.config.start != "random":
            block = -1 if self.config.start == "last" else int(self.config.start)
            self._start_from(target_layer_weights(modules.blocks, block, self.target, "eagle3"))

    def _start_from(self, block: dict[str, Tensor]) -> None:
        """Every layer as the target's block; the last fused feature goes through `fc` unchanged."""
        width = self.shape.hidden_size
        own = {name: tensor for name, tensor in block.items() if not name.startswith("self_attn.")}
        own["hidden_norm.weight"] = own["input_layernorm.weight"]
        for kind in "qkv":
            weight = block[f"self_attn.{kind}_proj.weight"]
            # The half that reads the state is the target's; the half that reads the embedding starts silent.
            own[f"self_attn.{kind}_proj.weight"] = torch.cat([torch.zeros_like(weight), weight], dim=1)
        same = ("self_attn.o_proj", "self_attn.q_norm", "self_attn.k_norm")
        own |= {name: tensor for name, tensor in block.items() if name.startswith(same)}
        start_layer(self.midlayer, own, "the first layer", "eagle3")
        for name, layer in self.layers.items():
            start_layer(layer, block, f"layer {name}", "eagle3")
        self.fc.weight.zero_()
        self.fc.weight[:, -width:].copy_(torch.eye(width))

    def forward(self, features: TargetFeatures, ranks: int = 1) -> HeadOutput:
        """See `DraftHead.forward`; while training, as many depths as training-time test has steps."""
        steps = (self.training and self.config.train_steps) or self.max_depth
        anchors = DraftPositions.of(features, steps)
        memory = TrainingTimeTest(self.config.num_layers, features.sequences_BT, anchors.index_N)
        hiddens = [self.norm(state_1ND[0]) for state_1ND in self.drafts(features, memory, steps)]
        heads = [self.lm_head.weight] * steps
        return draft_loss(hiddens, heads, self.vocabulary_V, features, anchors, self.config.objective, ranks)

    def drafts(self, features: TargetFeatures, memory: TrainingTimeTest, steps: int) -> list[Tensor]:
        """The layer's outputs at every step of training-time test, the true tokens given: [B, T, D], or at anchors."""
        state_BTD = self._fuse(features.features_BTF)
        keep = not (self.recompute and torch.is_grad_enabled())
        run = self._run if keep else partial(checkpoint, self._run, use_reentrant=False)
        states = []
        for step in range(steps):
            next_tokens_BT, positions_BT = features.tokens_after(1 + step), features.places_BT + step
            if step > 0:
                next_tokens_BT, positions_BT = memory.judged(next_tokens_BT), memory.judged(positions_BT)
            state_BTD = run(self._embed(next_tokens_BT, features.modules), state_BTD, positions_BT, memory.at(step))
            states.append(state_BTD)
            state_BTD = self._fed_back(state_BTD)
        return states

    def begin(
        self, modules: TargetModules, batch_size: int, capacity: int, max_depth: int, nodes: int
    ) -> DraftTreeState:
        """See `DraftHead.begin`."""
        cache = DraftCache(self.config.num_layers, batch_size, nodes, capacity)
        return DraftTreeState.empty(modules, self.lm_head.weight, self.shape.hidden_size, cache, max_depth, nodes)

    def observe(
        self, state: DraftState, features_BAF: Tensor, next_tokens_BA: Tensor, lengths_B: Tensor
    ) -> DraftTreeState:
        """See `DraftHead.observe`: step 0 at the committed tokens, with true features."""
        assert isinstance(state, DraftTreeState)
        positions_BA, memory = state.committing(next_tokens_BA.shape[1])
        embeds = self._embed(next_tokens_BA, state.modules)
        out_BAD = self._run(embeds, self._fuse(features_BAF), positions_BA, memory)
        return state.committed(out_BAD, lengths_B)

    def expand(self, state: DraftState, tokens_BW: Tensor, parents_BW: Tensor) -> tuple[Tensor, DraftTreeState]:
        """See `DraftHead.expand`; the root's own step was run by `observe`."""
        assert isinstance(state, DraftTreeState)
        if state.depth > 0:
            state = self._step(state, tokens_BW, parents_BW)
        return self.lm_head(self.norm(state.hidden_BWD)), replace(state, depth=state.depth + 1)

    def _step(self, state: DraftTreeState, tokens_BW: Tensor, parents_BW: Tensor) -> DraftTreeState:
        """Run the layers on a frontier below the root."""
        positions_BW, memory, below = state.below(parents_BW)
        fed_BWD = self._fed_back(state.hidden_of(parents_BW))
        return replace(
            below, hidden_BWD=self._run(self._embed(tokens_BW, state.modules), fed_BWD, positions_BW, memory)
        )

    def _fuse(self, features_BTF: Tensor) -> Tensor:
        """The chosen layers' features as one state."""
        if self.config.fc_norm:
            parts = features_BTF.chunk(len(self.feature_layers), dim=-1)
            features_BTF = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        elif self.config.norm_before_fc:
            features_BTF = self.input_norm(features_BTF)
        state: Tensor = self.fc(features_BTF)
        return state

    def _fed_back(self, state_BTD: Tensor) -> Tensor:
        """What a step hands to the next."""
        fed: Tensor = self.norm(state_BTD) if self.config.norm_output else state_BTD
        return fed

    def _embed(self, tokens_BT: Tensor, modules: TargetModules) -> Tensor:
        embeds: Tensor = self.embed_tokens(tokens_BT) if self._own_embedding else modules.embed(tokens_BT)
        return embeds

    def _run(self, embeds_BTD: Tensor, state_BTD: Tensor, positions_BT: Tensor, memory: KVView) -> Tensor:
        """All decoder layers, at true features or at the head's own: training and decoding both come here."""
        rotary = self.rotary(positions_BT, state_BTD.dtype)
        state_BTD = self.midlayer(embeds_BTD, state_BTD, rotary, memory)
        for i, layer in enumerate(self.layers.values(), start=1):
            state_BTD = layer(state_BTD, rotary, memory, i)
        return state_BTD

    def unread_by(self) -> dict[str, str]:
        """See `DraftHead.unread_by`."""
        options = [name for name in ("norm_before_fc", "norm_before_residual", "qk_norm") if getattr(self.config, name)]
        options += ["num_layers above 1"] if self.config.num_layers > 1 else []
        if -1 in self.feature_layers:
            return dict.fromkeys(("vllm", "sglang"), "it reads no features after the final norm")
        return {"sglang": f"it does not know {', '.join(options)}"} if options else {}

    def server_config(self) -> dict[str, Any]:
        """The keys by which vLLM and SGLang read an EAGLE-3 head.

        They count layers differently: at the top level by the input of a block, in `eagle_config` by its output.
        """
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            **llama_config(self.shape, self.config.num_layers, self.target, self.config.rope_parameters),
            "target_hidden_size": self.target.hidden_size,
            "draft_vocab_size": self.draft_vocab_size,
            "norm_before_residual": self.config.norm_before_residual,
            "norm_before_fc": self.config.norm_before_fc,
            "fc_norm": self.config.fc_norm,
            "norm_output": self.config.norm_output,
            "num_aux_hidden_states": len(self.feature_layers),
            "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in self.feature_layers],
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": list(self.feature_layers),
                "use_aux_hidden_state": True,
            },
        }

    def check_loaded(self) -> None:
        """See `DraftHead.check_loaded`."""
        ids_V = self.vocabulary_V
        if ids_V is not None:
            check_ids(ids_V, self.target.vocab_size, "d2t")
            if not torch.equal(self.t2d.nonzero()[:, 0], ids_V):
                raise ValueError("d2t and t2d name different tokens")

    def target_tokens(self, draft_tokens: Tensor) -> Tensor:
        """See `DraftHead.target_tokens`."""
        return draft_tokens if self.config.draft_vocab_size is None else draft_tokens + self.d2t[draft_tokens]


def fused_layers(asked: list[int] | None, target: TargetInfo) -> tuple[int, ...]:
    """The feature layers of a head: as asked, or EAGLE-3's own choice, an early, a middle and a late block.

    Raises:
        ValueError: layers out of range, coinciding or out of order.
    """
    blocks = target.num_layers
    layers = (1, blocks // 2 - 1, blocks - 4) if asked is None else tuple(asked)
    last = blocks - 2
    if not layers or min(layers) < -1 or max(layers) > last or len(set(layers)) < len(layers):
        given = f"feature_layers {list(layers)}" + (" (1, L/2 - 1 and L - 4)" if asked is None else "")
        raise ValueError(
            f"eagle3 {given} are out of range or coincide for {target.name!r} with {blocks} blocks; choose different "
            f"numbers from 0 to {last} for a block's output, or -1 for the state after the final norm"
        )
    if [layer % blocks for layer in layers] != sorted(layer % blocks for layer in layers):
        raise ValueError(f"eagle3 feature_layers {list(layers)} are not in order: servers join features by depth")
    return layers
