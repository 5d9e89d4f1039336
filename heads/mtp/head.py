"""MTP, multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2).

The head is a decoder layer of the target's own kind.

With h_t the target's state after its final norm, x the tokens and E the target's embedding:

    z_t = proj([norm_e(E(x_{t+1})), norm_h(h_t)])     proj: 2 D -> D, no bias
    y_t = norm_out(block(z_t))
    logits of x_{t+2} = lm_head(y_t)                  embedding and LM head are the target's, frozen

One layer is used again and again: deeper drafts put y, its own output, in the place of h, and so
does training (FastMTP, arXiv:2509.18362). Several layers draft one depth each, as DeepSeek-V3 was
trained: layer k reads y^{k-1}_t and x_{t+1+k}. Its keys and values of the text therefore come from
layer k - 1 at *one token before*, and `observe` runs all layers over what was accepted.

Many models bring such a head in their own checkpoint: `heads.mtp.native` reads and writes it.
Tensor names are those of the package speculators.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..base import (
    DraftHead,
    DraftState,
    DraftTreeState,
    HeadOutput,
    TargetFeatures,
    TargetInfo,
    TargetModules,
)
from ..checkpoints.tables import SERVERS, speculators_keys
from ..draft_positions import DraftPositions
from ..eagle.head import STEP
from ..layers.constants import counting
from ..layers.decoder_layer import KVView, LayerShape, at_least_fp32
from ..layers.draft_cache import DraftCache, KVEntries
from ..layers.starting_values import block_tensors, required_gain, start_layer
from ..layers.target_layer import build_layers
from ..layers.training_time_test import TrainingTimeTest
from ..losses import draft_loss, with_feature_loss
from ..objective import Objective
from .config import OF_LLAMA, MtpConfig

STEPS = 3
"""Steps of training-time test unless a config says otherwise; FastMTP's K."""
BESIDE_THE_LAYER = ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm")
"""Modules of an MTP layer that a decoder layer does not have."""
OUTPUTS = {"o_proj", "down_proj"}
"""Modules and parameters of a layer whose outputs are added to the residual stream, those of
experts too."""


@dataclass(frozen=True, kw_only=True)
class MtpDepthsState(DraftTreeState):
    """State of a head with one layer per depth.

    The layers also run on all nodes above the frontier. Keys and values of committed tokens and
    nodes lie in the cache as usual. After those of all layers the cache has the outputs of all
    layers but the last, which the next layer reads one token later.
    """

    tokens_BN: Tensor
    """Tokens of all nodes below the root."""
    positions_BN: Tensor
    above_BN: Tensor
    """Slot of each node's parent."""
    mask_BNS: Tensor
    """True at the slots that each node attends to: the text, its ancestors and itself."""
    frontier: int
    """Slot of the first node of the newest frontier."""


def no_nodes(batch: int, device: torch.device) -> dict[str, Any]:
    """The fields that `MtpDepthsState` adds, before anything is drafted after the root."""
    none_BN = torch.zeros(batch, 0, dtype=torch.int64, device=device)
    return {
        "tokens_BN": none_BN,
        "positions_BN": none_BN,
        "above_BN": none_BN,
        "mask_BNS": none_BN[..., None].bool(),
        "frontier": 0,
    }


class MtpHead(DraftHead):
    """Drafts with decoder layers of the target's kind: one for all depths, or one for each."""

    config_class = MtpConfig
    config: MtpConfig
    computes = ("hidden_first", "zero_first", "norm_output")

    def __init__(self, config: MtpConfig, target: TargetInfo) -> None:
        super().__init__(config, target)
        self.max_depth = config.depth
        self.feature_layers = (-1,)
        self.cached_layers = config.num_layers

        # 1. Decoder layers of transformers' own class for this kind of target.
        kind = config.layer or llama_layer(config, target)
        draft_layers = build_layers(kind, config.num_layers)
        built = draft_layers.config
        if built.hidden_size != target.hidden_size:
            raise ValueError(
                f"an MTP head is as wide as its target {target.name!r}, {target.hidden_size}, and"
                f" mtp layer has hidden_size {built.hidden_size}"
            )
        self.shape = LayerShape(
            hidden_size=built.hidden_size,
            intermediate_size=built.intermediate_size,
            num_attention_heads=built.num_attention_heads,
            num_key_value_heads=draft_layers.groups,
            head_dim=draft_layers.head_dim,
            hidden_act=draft_layers.hidden_act,
            rms_norm_eps=draft_layers.eps,
            qk_norm=config.qk_norm,
        )
        self.draft_layers = draft_layers

        # 2. What an MTP layer has and a decoder layer has not: `proj` and three norms.
        width = target.hidden_size
        self.mtp_layers = draft_layers.blocks
        for layer in self.mtp_layers:
            # Among the decoder layer's own modules, because that is where checkpoints name them.
            layer.add_module("input_proj", nn.Linear(2 * width, width, bias=False))
            for name in BESIDE_THE_LAYER[1:]:
                layer.add_module(name, draft_layers.norm())
        self.kind: str = kind["model_type"]
        reason = (
            "it reads MTP heads in their model's own checkpoint alone: `headstart export --to"
            " checkpoint`"
        )
        self.unread_by = dict.fromkeys(SERVERS, reason)

    @classmethod
    def options_for(cls, options: dict[str, Any], target_config: dict[str, Any]) -> dict[str, Any]:
        # An option of Llama's layer asks for that layer; without one the layer is the target's.
        for name in (*OF_LLAMA, "qk_norm", "layer"):
            if options.get(name) not in (None, False):
                return options
        return {**options, "layer": target_config}

    @torch.no_grad()
    def initialize(self, modules: TargetModules, token_counts_V: Tensor) -> None:
        start = self.config.start
        # 1. The last norm starts as the target's, since the LM head was made for its output.
        for layer in self.mtp_layers:
            norm = layer.get_submodule("final_layernorm")
            if type(norm) is type(modules.norm):
                norm.load_state_dict(block_tensors(modules.norm))
        if start == "random":
            return

        # 2. The layers start as one of the target's blocks.
        number = -1 if start == "last" else int(start)
        if not -len(modules.blocks) <= number < len(modules.blocks):
            raise ValueError(
                f"mtp cannot start from block {number}: the target has {len(modules.blocks)}"
            )
        where = f"mtp cannot start from {self.target.name!r}: its norm"
        gain_D = at_least_fp32(required_gain(modules.norm, self.target.hidden_size, where))
        # Gains near 0 are raised to 0.01, with their sign: weights are divided by them.
        gain_D = gain_D.abs().clamp(min=1e-2).copysign(gain_D)
        for k, layer in enumerate(self.mtp_layers):
            self._start_from(layer, modules.blocks[number])
            self._read_state_alone(k, gain_D)

    def _read_state_alone(self, k: int, gain_D: Tensor) -> None:
        """Make layer k read the target's state as its blocks do, and of the embedding nothing.

        With h = g x / rms(x), g being the gain of the target's final norm, the block is to read x:
        its direction is h / g. The block's own norms take the size out of what it reads, so it
        moves the residual stream by STEP, as blocks do, if either its outputs are made small or x
        is made large. The outputs, unless norms follow them: beside a large x, what the embedding
        adds is learned slowly.
        """
        # 1. `proj` [D, 2 D]: zero on the embedding. On the state 1 / g, times the root mean square
        #    of g, so that x is about as large as h.
        layer: Any = self.mtp_layers[k]
        weight = layer.input_proj.weight
        weight.zero_()
        part = slice(0, len(gain_D)) if self.config.hidden_first else slice(len(gain_D), None)
        weight[:, part].copy_((1 / gain_D).diag() * gain_D.square().mean().sqrt())

        # 2. Make the layer's outputs smaller by what it moves too far.
        moved = self._moved(k, part, gain_D)
        outputs = [
            tensor
            for name, tensor in layer.named_parameters()
            if not OUTPUTS.isdisjoint(name.split("."))
        ]
        before = [tensor.clone() for tensor in outputs]
        for tensor in outputs:
            tensor.mul_(STEP / moved)

        # 3. Where norms follow the outputs, that had no effect: make x larger instead.
        if not STEP / 2 < self._moved(k, part, gain_D) < 2 * STEP:
            for tensor, old in zip(outputs, before, strict=True):
                tensor.copy_(old)
            weight.mul_(moved / STEP)

    def _moved(self, k: int, part: slice, gain_D: Tensor) -> float:
        """Return how far layer k moves the residual stream of random states.

        The distance is relative to the stream's norm.
        """
        layer: Any = self.mtp_layers[k]
        weight = layer.input_proj.weight
        draw = torch.Generator().manual_seed(0)
        # 64 states as the target's final norm would leave them: g times unit normal numbers
        hidden_BTD = gain_D.cpu() * torch.randn(
            1, 64, len(gain_D), generator=draw, dtype=torch.float32
        )
        z_BTD = nn.functional.linear(layer.hidden_layernorm(hidden_BTD.to(weight)), weight[:, part])
        positions_BT = torch.arange(64, device=weight.device)[None]
        attend = partial(TrainingTimeTest(len(self.mtp_layers)).at(0).attend, k)
        out_BTD = self.draft_layers.run(layer, z_BTD, positions_BT, attend)
        return float((out_BTD - z_BTD).norm() / z_BTD.norm())

    def _start_from(self, layer: nn.Module, block: nn.Module) -> None:
        """Copy the weights of one of the target's blocks, which must be of the layer's kind."""
        tensors = block_tensors(block)
        names = {name for name in layer.state_dict() if name.split(".")[0] not in BESIDE_THE_LAYER}
        in_one = sorted(names ^ tensors.keys())
        if in_one:
            raise ValueError(
                f"mtp cannot start from a block of {self.target.name!r}, a {type(block).__name__}:"
                f" {in_one[0]!r} is in only one of it and {type(layer).__name__}; choose start:"
                " random"
            )
        start_layer(layer, tensors, "a layer", "mtp")

    @classmethod
    def default_objective(cls, config: MtpConfig) -> Objective:
        """FastMTP's: the true tokens, each depth weighted 0.6 of the one before."""
        return Objective({"ce": 1.0}, decay=0.6)

    @classmethod
    def extra_losses(cls, config: MtpConfig) -> tuple[str, ...]:
        return ("smooth_l1",)

    @property
    def test_steps(self) -> int:
        if self.config.num_layers > 1:
            return 1
        return self.config.train_steps or min(STEPS, self.max_depth)

    def forward(
        self, features: TargetFeatures, objective: Objective | None = None, ranks: int = 1
    ) -> HeadOutput:
        objective = objective or self.default_objective(self.config)
        # One layer may train for fewer steps than it drafts; of several layers each has its depth.
        steps = self.max_depth
        if self.training and self.config.num_layers == 1:
            steps = self.test_steps
        positions = DraftPositions.of(features, steps)
        weight = features.modules.lm_head.weight
        hiddens = [
            state_BTD.flatten(0, 1)[positions.index_N] for state_BTD in self.drafts(features, steps)
        ]
        # The LM head may have a narrower dtype than the head.
        inputs = [hidden_ND.to(weight.dtype) for hidden_ND in hiddens]
        output = draft_loss(inputs, [weight] * steps, None, features, positions, objective, ranks)
        return with_feature_loss(output, hiddens, features, positions, objective)

    def drafts(self, features: TargetFeatures, steps: int) -> list[Tensor]:
        """Teacher-forced outputs y [B, T, D] of every step; step k at t predicts x_{t+2+k}."""
        test = TrainingTimeTest(self.config.num_layers, features.sequences_BT)
        state_BTD = features.features_BTF
        # One layer, again and again: training-time test.
        if self.config.num_layers == 1:
            fed_back = partial(self._fed_back, 0)
            outputs = test.outputs(
                partial(self._run, 0), features, state_BTD, steps, self.recompute, fed_back
            )
            return [self._normed(0, out_BTD) for out_BTD in outputs]
        # Several layers: each runs once, over all positions, on the outputs of the one before.
        outputs = []
        for k in range(steps):
            run: Callable[..., Tensor] = partial(self._run, k)
            if self.recompute and torch.is_grad_enabled():
                run = partial(checkpoint, run, use_reentrant=False)
            positions_BT = features.position_ids_BT + k
            out_BTD = run(
                features.next_tokens_BT(k), state_BTD, positions_BT, test.at(0), features.modules
            )
            outputs.append(self._normed(k, out_BTD))
            state_BTD = self._fed_back(k, out_BTD)
        return outputs

    def _run(
        self,
        k: int,
        next_tokens_BT: Tensor,
        hidden_BTD: Tensor,
        positions_BT: Tensor,
        kv: KVView,
        modules: TargetModules,
    ) -> Tensor:
        """Return the output of layer k before its last norm.

        `hidden_BTD` holds the target's states or a layer's outputs.
        """
        layer: Any = self.mtp_layers[k]
        dtype = layer.input_proj.weight.dtype
        embeds_BTD = modules.embed(next_tokens_BT).to(dtype)
        if self.config.zero_first:  # MiMo blanks the embedding at position 0
            embeds_BTD = embeds_BTD.masked_fill((positions_BT == 0)[..., None], 0.0)
        embeds_BTD = layer.token_layernorm(embeds_BTD)
        hidden_BTD = layer.hidden_layernorm(hidden_BTD.to(dtype))
        halves = [hidden_BTD, embeds_BTD] if self.config.hidden_first else [embeds_BTD, hidden_BTD]
        z_BTD = layer.input_proj(torch.cat(halves, dim=-1))
        return self.draft_layers.run(layer, z_BTD, positions_BT, partial(kv.attend, k))

    def _normed(self, k: int, out_BTD: Tensor) -> Tensor:
        """The output y of layer k, as the LM head reads it."""
        layer: Any = self.mtp_layers[k]
        return layer.final_layernorm(out_BTD)

    def _fed_back(self, k: int, out_BTD: Tensor) -> Tensor:
        """The output of layer k as the next step reads it."""
        return self._normed(k, out_BTD) if self.config.norm_output else out_BTD

    # Drafting.

    def begin(
        self, modules: TargetModules, batch_size: int, capacity: int, max_depth: int, nodes: int
    ) -> DraftState:
        state = super().begin(modules, batch_size, capacity, max_depth, nodes)
        if self.config.num_layers == 1:
            return state
        return MtpDepthsState(**vars(state), **no_nodes(batch_size, next(self.parameters()).device))

    def empty_cache(self, batch_size: int, nodes: int, capacity: int) -> DraftCache:
        cache = super().empty_cache(batch_size, nodes, capacity)
        like = next(self.parameters())
        # After the keys and values of all layers: outputs [B, 1, S, D] of all but the last, stored
        # as keys with values of width 0.
        for _ in range(self.config.num_layers - 1):
            cache.keys.append(
                like.new_zeros(batch_size, 1, nodes + capacity, self.shape.hidden_size)
            )
            cache.values.append(like.new_zeros(batch_size, 1, nodes + capacity, 0))
        return cache

    def cache_bytes(self, rows: int, tokens: int) -> int:
        width = (self.config.num_layers - 1) * self.shape.hidden_size
        output_bytes = rows * tokens * width * next(self.parameters()).element_size()
        return super().cache_bytes(rows, tokens) + output_bytes

    def observe(
        self, state: DraftState, features_BAF: Tensor, next_tokens_BA: Tensor, lengths_B: Tensor
    ) -> DraftTreeState:
        assert isinstance(state, DraftTreeState)
        positions_BA, kv = state.cache.commit(state.lengths_B, next_tokens_BA.shape[1])
        if not isinstance(state, MtpDepthsState):
            out_BAD = self._run(0, next_tokens_BA, features_BAF, positions_BA, kv, state.modules)
            return state.committed(out_BAD, lengths_B)

        # Several layers: layer k reads, at position t, the output of layer k - 1 at t - 1.
        assert kv.slots_BT is not None and kv.mask_BTS is not None
        # Slot of the newest token so far. Without one, what layers read there is seen by no draft:
        # see `_seen_by`.
        before_B1 = (state.cache.nodes + state.lengths_B - 1)[:, None]
        hidden_BAD = features_BAF
        first_BAD = None
        for k in range(self.config.num_layers):
            mask_BAS = self._seen_by(k, kv.mask_BTS, kv.slots_BT, state)
            view = replace(kv, mask_BTS=mask_BAS)
            out_BAD = self._run(k, next_tokens_BA, hidden_BAD, positions_BA, view, state.modules)
            first_BAD = out_BAD if first_BAD is None else first_BAD
            if k + 1 < self.config.num_layers:
                # Outputs o0, o1, o2 of the new tokens become [o before them, o0, o1].
                before_B1D = self._outputs(k, state, before_B1)
                kv.store(self.config.num_layers + k, out_BAD[:, None], out_BAD[:, None, :, :0])
                hidden_BAD = self._fed_back(k, torch.cat([before_B1D, out_BAD[:, :-1]], dim=1))
        # The root's children are drafted from the first layer's output.
        assert first_BAD is not None
        rooted = replace(state, **no_nodes(len(next_tokens_BA), next_tokens_BA.device))
        return rooted.committed(first_BAD, lengths_B)

    def expand(
        self, state: DraftState, tokens_BW: Tensor, parents_BW: Tensor
    ) -> tuple[Tensor, DraftTreeState]:
        assert isinstance(state, DraftTreeState)
        k = 0
        if state.depth > 0:  # `observe` has run the root's own step
            if isinstance(state, MtpDepthsState):
                k = state.depth
                state = self._expand_by(k, state, tokens_BW, parents_BW)
            else:
                # Each node reads its parent's output.
                width = state.hidden_BWD.shape[-1]
                above_BWD = state.hidden_BWD.gather(1, parents_BW[..., None].expand(-1, -1, width))
                positions_BW, kv, state = state.below(parents_BW)
                out_BWD = self._run(
                    0, tokens_BW, self._fed_back(0, above_BWD), positions_BW, kv, state.modules
                )
                state = replace(state, hidden_BWD=out_BWD)
        logits_BWV = state.modules.logits(self._normed(k, state.hidden_BWD))
        return logits_BWV, replace(state, depth=state.depth + 1)

    def _expand_by(
        self, k: int, state: MtpDepthsState, tokens_BW: Tensor, parents_BW: Tensor
    ) -> MtpDepthsState:
        """Run layer k on all nodes down to the frontier at depth k.

        It has no keys and values for the nodes above the frontier yet.
        """
        # 1. The frontier's slots and mask. The parent of a node at depth 1 is the root, the newest
        #    committed token; a deeper one's lies in the previous frontier.
        before = state
        positions_BW, kv, below = state.below(parents_BW)
        assert isinstance(below, MtpDepthsState) and kv.mask_BTS is not None
        if k == 1:
            above_BW = (before.cache.nodes + before.lengths_B - 1)[:, None].expand_as(parents_BW)
        else:
            above_BW = before.frontier + parents_BW

        # 2. All nodes so far, the frontier last.
        drafted = before.tokens_BN.shape[1]
        nodes = replace(
            below,
            tokens_BN=torch.cat([before.tokens_BN, tokens_BW], dim=1),
            positions_BN=torch.cat([before.positions_BN, positions_BW], dim=1),
            above_BN=torch.cat([before.above_BN, above_BW], dim=1),
            mask_BNS=torch.cat([before.mask_BNS, kv.mask_BTS], dim=1) if drafted else kv.mask_BTS,
            frontier=before.nodes,
        )

        # 3. Layer k over all of them, each on the output of layer k - 1 at its parent.
        slots_BN = counting(nodes.nodes, tokens_BW.device).expand_as(nodes.tokens_BN)
        view = KVEntries(nodes.cache, self._seen_by(k, nodes.mask_BNS, slots_BN, nodes), None)
        hidden_BND = self._fed_back(k - 1, self._outputs(k - 1, nodes, nodes.above_BN))
        out_BND = self._run(k, nodes.tokens_BN, hidden_BND, nodes.positions_BN, view, nodes.modules)
        if k + 1 < self.config.num_layers:
            view.store(self.config.num_layers + k, out_BND[:, None], out_BND[:, None, :, :0])

        # 4. Only the frontier drafts.
        return replace(nodes, hidden_BWD=out_BND[:, out_BND.shape[1] - tokens_BW.shape[1] :])

    def _outputs(self, k: int, state: MtpDepthsState, slots_BT: Tensor) -> Tensor:
        """Outputs [B, T, D] of layer k in some slots."""
        outputs_BSD = state.cache.keys[self.config.num_layers + k][:, 0]
        slots_BT = slots_BT.clamp(min=0)
        return outputs_BSD.gather(1, slots_BT[..., None].expand(-1, -1, outputs_BSD.shape[-1]))

    def _seen_by(self, k: int, mask_BTS: Tensor, slots_BT: Tensor, state: MtpDepthsState) -> Tensor:
        """The part of a mask that layer k sees: it has no true entries at the first k tokens.

        At a position t its entry is made of x_{t+1} and the state at t - k. Every query sees
        itself, so that none sees nothing.
        """
        # Position of each slot's token: the text's by its slot, a node's by its depth.
        slot_S = counting(mask_BTS.shape[-1], mask_BTS.device)
        position_BS = (slot_S - state.cache.nodes).expand(len(mask_BTS), -1)
        drafted = state.positions_BN.shape[1]
        if drafted:
            position_BS = torch.cat([state.positions_BN, position_BS[:, drafted:]], dim=1)
        true_BS = position_BS >= k
        return mask_BTS & (true_BS[:, None] | (slot_S == slots_BT[..., None]))

    def server_config(self) -> dict[str, Any]:
        layer = dict(self.config.layer or llama_layer(self.config, self.target))
        architectures = layer.get("architectures") or []
        return {
            **speculators_keys("mtp", "0.9.0", ["MTPDraftModel"], self, architectures),
            "transformer_layer_config": layer,
            "num_nextn_predict_layers": self.config.num_layers,
        }


def llama_layer(config: MtpConfig, target: TargetInfo) -> dict[str, Any]:
    """Return the config of Llama's layer, or of Qwen3's if queries and keys have norms.

    Dimensions are the target's, except those that the head sets.
    """
    shape = asdict(LayerShape.of(target, config))
    qk_norm = shape.pop("qk_norm")
    return {
        "model_type": "qwen3" if qk_norm else "llama",
        **shape,
        "num_hidden_layers": target.num_layers,
        "vocab_size": target.vocab_size,
        "max_position_embeddings": target.max_positions,
        "rope_parameters": dict(config.rope_parameters or target.rope_parameters),
    }
