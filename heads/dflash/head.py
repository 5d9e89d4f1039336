"""DFlash (arXiv:2602.06036): a block of drafts in one pass, from mask tokens after the root.

With g_t the target's features after some of its blocks, and x_p the root, the newest token:

    c_t = hidden_norm(fc(g_t))                            context, t < p, the same for all layers
    h   = [embed(x_p), embed(MASK), ..., embed(MASK)]     block, at positions p, p + 1, ...
    h   = h + attention(q(norm(h)), k([c, norm(h)]), v([c, norm(h)]));
          h = h + mlp(norm(h))                            in each layer
    logits of slot k = lm_head(norm(h_k))

Slots attend to the whole context and to the whole block; in a layer with a sliding window w to the
w newest tokens of the context, and, unless `sliding_causal` is off, to the slots before them. Slot
k drafts x_{p+k}, slot 0 nothing; with `sample_from_anchor` slot k drafts x_{p+k+1}. Training draws
anchors a, the roots, among the answers' positions; the block after an anchor attends to the
context before it and is judged by the target's distributions along the text. Tensor names are those
that vLLM and SGLang read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import rotate_half

from ..base import (
    DraftState,
    HeadOutput,
    OffsetVocabularyHead,
    TargetFeatures,
    TargetInfo,
    TargetModules,
)
from ..draft_positions import DraftPositions
from ..layers.constants import counting
from ..layers.decoder_layer import (
    DecoderLayer,
    KVView,
    LayerShape,
    RMSNorm,
    Rotary,
    at_least_fp32,
    llama_config,
    sliding_keys,
)
from ..layers.draft_cache import DraftCache, KVEntries
from ..layers.draft_vocab import most_frequent
from ..layers.starting_values import norm_gain, start_layer, target_layer_weights
from ..losses import draft_loss
from ..objective import Objective
from .config import DFlashConfig


@dataclass(frozen=True)
class DFlashState(DraftState):
    """Committed context in the cache, and the block's output after the round's first `expand`."""

    cache: DraftCache = field(kw_only=True)
    lengths_B: Tensor
    """Committed tokens of each row, which is the root's position."""
    slots_BKD: Tensor
    """Final-norm outputs of the block's slots that draft, by depth."""


class DFlashHead(OffsetVocabularyHead):
    """A head that drafts a block of tokens in one pass of a few layers.

    The layers attend to the target's features.
    """

    config_class = DFlashConfig
    config: DFlashConfig
    whole_layers = False

    def __init__(self, config: DFlashConfig, target: TargetInfo) -> None:
        super().__init__(config, target)

        # 1. The block: 8 slots draft 7 tokens, or 8 if the root's own slot drafts too.
        self.max_depth = config.block_size - (not config.sample_from_anchor)
        self.mask_token = target.vocab_size - 1
        if config.mask_token_id is not None:
            self.mask_token = config.mask_token_id
        if not 0 <= self.mask_token < target.vocab_size:
            raise ValueError(
                f"{config.name} mask_token_id {self.mask_token} is out of range: choose one of the"
                f" target's {target.vocab_size} tokens"
            )
        if config.block_size > target.max_positions:
            raise ValueError(
                f"{config.name} block_size {config.block_size} is larger than the target's"
                f" {target.max_positions} positions"
            )

        # 2. The layers, each with or without a sliding window.
        self.feature_layers = _feature_layers(config, target)
        self.shape = LayerShape.of(target, config)
        self.cached_layers = config.num_layers
        sliding_layers = config.sliding_layers
        if sliding_layers is None:
            sliding_layers = list(range(config.num_layers))
        self.sliding = [
            config.sliding_window is not None and i in sliding_layers
            for i in range(config.num_layers)
        ]
        width = target.hidden_size
        eps = self.shape.rms_norm_eps
        self.fc = nn.Linear(len(self.feature_layers) * width, width, bias=False)
        self.hidden_norm = RMSNorm(width, eps=eps)
        self.layers = nn.ModuleList(DecoderLayer(self.shape) for _ in range(config.num_layers))
        self.norm = RMSNorm(width, eps=eps)
        if config.draft_vocab_size is not None:
            self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        self.rotary = Rotary(target, self.shape.head_dim, config.rope_parameters)

        # 3. The servers that cannot read it.
        self.unread_by = {"sglang": "heads of this kind have not been tried there"}
        if not config.qk_norm:
            self.unread_by |= dict.fromkeys(
                ("vllm", "llama.cpp"), "it norms queries and keys, and this head does not"
            )
        elif config.sample_from_anchor:
            self.unread_by |= dict.fromkeys(
                ("vllm", "llama.cpp"), "its DFlash does not draft from the root's slot"
            )
        elif config.draft_vocab_size is not None:
            self.unread_by["llama.cpp"] = (
                "its DFlash drafts from the whole vocabulary, and this head has its own"
            )

    @torch.no_grad()
    def initialize(self, modules: TargetModules, token_counts_V: Tensor) -> None:
        # 1. A mask token that the answers contain would mean two things.
        uses = int(token_counts_V[self.mask_token])
        unused = (token_counts_V == 0).nonzero()[:, 0]
        if self.config.mask_token_id is not None and uses and len(unused):
            raise ValueError(
                f"{self.config.name} mask_token_id {self.mask_token} stands {uses} times in the"
                f" answers; choose a token that they do not hold, such as {int(unused[0])}, or"
                " better one that no text holds"
            )

        # 2. Draft vocabulary, LM head and final norm.
        if self.config.draft_vocab_size is not None:
            self.choose_vocabulary(
                most_frequent(token_counts_V, self.draft_vocab_size, self.config.name)
            )
            self.lm_head.weight.copy_(modules.lm_head_rows(self.vocabulary_V))
        gain_D = norm_gain(modules.norm, self.target.hidden_size)
        if gain_D is not None:
            self.norm.weight.copy_(gain_D)
        if self.config.start == "random":
            return

        # 3. The layers: as many consecutive blocks of the target, the last ones by default.
        first = self.target.num_layers - len(self.layers)
        if self.config.start != "last":
            first = int(self.config.start)
        for number, layer in enumerate(self.layers):
            block = target_layer_weights(
                modules.blocks, first + number, self.target, self.config.name
            )
            start_layer(layer, block, f"layer {number}", self.config.name)

        # 4. `fc` [D, F]: the identity on the deepest feature, zero on the others.
        self.fc.weight.zero_()
        self.fc.weight[:, -self.target.hidden_size :].copy_(
            torch.eye(self.target.hidden_size, dtype=torch.float32)
        )

    def forward(
        self, features: TargetFeatures, objective: Objective | None = None, ranks: int = 1
    ) -> HeadOutput:
        objective = objective or self.default_objective(self.config)
        positions, slots_NKD = self.training_blocks(features)
        return draft_loss(
            *self._lm_heads(slots_NKD, features), features, positions, objective, ranks
        )

    def training_blocks(self, features: TargetFeatures) -> tuple[DraftPositions, Tensor]:
        """Return the draft positions, and the outputs of the slots that draft there.

        In training the positions are limited to the anchors that are drawn. The outputs are
        final-norm states [N, K, D].
        """
        # 1. Draft positions, as row and column: with T = 10, index 23 is row 2, column 3.
        max_anchors = self.config.max_anchors if self.training else None
        positions = DraftPositions.of(features, self.max_depth, max_anchors)
        time = features.tokens_BT.shape[1]
        rows_N = positions.index_N // time
        times_N = positions.index_N % time

        # 2. The context, whose keys and values all blocks of a row share, and what each block sees
        #    of it: its own sequence, up to the feature before its root.
        context = self._context(features.features_BTF, features.position_ids_BT)
        seen_NT = counting(time, rows_N.device) <= times_N[:, None]
        if features.sequences_BT is not None:
            sequences_NT = features.sequences_BT[rows_N]
            same_sequence_NT = sequences_NT == sequences_NT.gather(1, times_N[:, None])
            seen_NT = seen_NT & same_sequence_NT

        # 3. The blocks: the root is the token after the draft position.
        roots_N = features.tokens_BT.flatten()[positions.index_N + 1]
        first_N = features.position_ids_BT.flatten()[positions.index_N] + 1
        views: dict[bool, KVView] = {False: AnchorView(context, seen_NT, positions.per_row)}
        if any(self.sliding):
            assert self.config.sliding_window is not None
            # Window 3 at column 5: columns 3, 4 and 5.
            near_NT = seen_NT & (
                counting(time, rows_N.device) > times_N[:, None] - self.config.sliding_window
            )
            views[True] = AnchorView(
                context, near_NT, positions.per_row, self.config.sliding_causal
            )
        return positions, self._block(roots_N, first_N, views, features.modules)

    def _lm_heads(
        self, slots_NKD: Tensor, features: TargetFeatures
    ) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
        """Return the LM head's inputs and weights by depth, and the draft vocabulary.

        They are arguments of `draft_loss`.
        """
        whole = self.config.draft_vocab_size is None
        weight_VD = features.modules.lm_head.weight if whole else self.lm_head.weight
        hiddens = [slots_NKD[:, k].to(weight_VD.dtype) for k in range(self.max_depth)]
        return hiddens, [weight_VD] * self.max_depth, self.vocabulary_V

    def begin(
        self, modules: TargetModules, batch_size: int, capacity: int, max_depth: int, nodes: int
    ) -> DFlashState:
        like = next(self.parameters())
        return DFlashState(
            modules,
            depth=0,
            max_depth=max_depth,
            cache=self.empty_cache(batch_size, self.config.block_size, capacity),
            lengths_B=torch.zeros(batch_size, dtype=torch.int64, device=like.device),
            slots_BKD=like.new_zeros(batch_size, self.max_depth, self.target.hidden_size),
        )

    def observe(
        self, state: DraftState, features_BAF: Tensor, next_tokens_BA: Tensor, lengths_B: Tensor
    ) -> DFlashState:
        assert isinstance(state, DFlashState)
        positions_BA, kv = state.cache.commit(state.lengths_B, next_tokens_BA.shape[1])
        # Committed tokens give keys and values only: no query runs on them.
        for number, (key, value) in enumerate(self._context(features_BAF, positions_BA)):
            kv.store(number, key, value)
        return replace(state, depth=0, lengths_B=state.lengths_B + lengths_B)

    def expand(
        self, state: DraftState, tokens_BW: Tensor, parents_BW: Tensor
    ) -> tuple[Tensor, DFlashState]:
        assert isinstance(state, DFlashState)
        # The round's first call drafts the whole block; later calls read its slots.
        if state.depth == 0:
            cache = state.cache
            device = tokens_BW.device
            # The cache holds the block in its first slots (`nodes` is the block size), then the
            # context. A block of 3 after 2 tokens: slots 0 to 2, and 3 to 4.
            slot_S = counting(cache.attended_slots, device)
            ends_B1 = cache.nodes + state.lengths_B[:, None]
            seen_BKS = (slot_S < ends_B1)[:, None].expand(-1, cache.nodes, -1)
            views: dict[bool, KVView] = {False: KVEntries(cache, seen_BKS, None)}
            if any(self.sliding):
                assert self.config.sliding_window is not None
                in_block_S = slot_S < cache.nodes
                near_BS = in_block_S | (slot_S >= ends_B1 - self.config.sliding_window)
                sliding_BKS = seen_BKS & near_BS[:, None]
                if self.config.sliding_causal:
                    # Slot k sees the slots of its block up to itself, and the context.
                    k_K1 = counting(cache.nodes, device, column=True)
                    sliding_BKS = sliding_BKS & ((slot_S <= k_K1) | ~in_block_S)
                views[True] = KVEntries(cache, sliding_BKS, None)
            # The root's position is the number of committed tokens.
            slots_BKD = self._block(tokens_BW[:, 0], state.lengths_B, views, state.modules)
            state = replace(state, slots_BKD=slots_BKD)
        # One slot drafts for all nodes of a depth, [B, 1, D]: it does not see the path.
        hidden_B1D = state.slots_BKD[:, state.depth : state.depth + 1]
        whole = self.config.draft_vocab_size is None
        logits_B1V = state.modules.logits(hidden_B1D) if whole else self.lm_head(hidden_B1D)
        return logits_B1V, replace(state, depth=state.depth + 1)

    def _context(self, features_BTF: Tensor, positions_BT: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [B, G, T, E] of the context in each layer."""
        context_BTD = self.hidden_norm(self.fc(features_BTF))
        cos_B1TE, sin_B1TE = (
            part[:, None] for part in self.rotary(positions_BT, context_BTD.dtype)
        )
        keys_and_values = []
        for layer in self.layers:
            # As in `Attention.forward`, without queries.
            assert isinstance(layer, DecoderLayer)
            attention = layer.self_attn
            heads = (-1, attention.head_dim)
            key = attention.k_proj(context_BTD).unflatten(-1, heads).transpose(1, 2)
            value = attention.v_proj(context_BTD).unflatten(-1, heads).transpose(1, 2)
            key = attention.k_norm(key)
            keys_and_values.append((key * cos_B1TE + rotate_half(key) * sin_B1TE, value))
        return keys_and_values

    def _block(
        self,
        roots_N: Tensor,
        positions_N: Tensor,
        views: dict[bool, KVView],
        modules: TargetModules,
    ) -> Tensor:
        """Return the final-norm outputs [N, K, D] of the slots that draft.

        Block n starts with the root `roots_N[n]` at position `positions_N[n]`.

        `views` are those of layers that see the whole context, and of those with a sliding window,
        if there are any.
        """
        size = self.config.block_size
        # [root, MASK, MASK, ...] in each block
        tokens_NK = torch.full((len(roots_N), size), self.mask_token, device=roots_N.device)
        tokens_NK[:, 0] = roots_N
        state_NKD = modules.embed(tokens_NK).to(self.norm.weight.dtype)
        rotary = self.rotary(positions_N[:, None] + counting(size, roots_N.device), state_NKD.dtype)
        for number, layer in enumerate(self.layers):
            state_NKD = layer(state_NKD, rotary, views[self.sliding[number]], number)
        # Without the root's slot, unless it drafts too.
        return self.norm(state_NKD[:, size - self.max_depth :])

    def server_config(self) -> dict[str, Any]:
        shape = llama_config(
            self.shape, self.config.num_layers, self.target, self.config.rope_parameters
        )
        return {
            "architectures": ["DFlashDraftModel"],
            **shape,
            "model_type": "qwen3" if self.config.qk_norm else "llama",
            "draft_vocab_size": self.draft_vocab_size,
            "block_size": self.config.block_size,
            "sample_from_anchor": self.config.sample_from_anchor,
            "num_target_layers": self.target.num_layers,
            "dflash_config": {
                "mask_token_id": self.mask_token,
                "target_layer_ids": list(self.feature_layers),
            },
            **(self._window_keys() if any(self.sliding) else {}),
        }

    def _window_keys(self) -> dict[str, Any]:
        """Keys of layers with a sliding window, and one that vLLM reads first."""
        assert self.config.sliding_window is not None
        kinds = ["sliding_attention" if sliding else "full_attention" for sliding in self.sliding]
        causal = {} if self.config.sliding_causal else {"is_causal": False}
        return causal | sliding_keys(kinds, self.config.sliding_window)


def _feature_layers(config: DFlashConfig, target: TargetInfo) -> tuple[int, ...]:
    """Return the chosen feature layers, or by default blocks spread over the target.

    The default spreads them from the second block to the third from the end, and takes the middle
    block for one layer.
    """
    blocks = target.num_layers
    count = config.num_layers
    # 16 blocks and 5 layers: 1, 4, 7, 10 and 13
    spread = [blocks // 2]
    if count > 1:
        spread = [round(1 + i * (blocks - 4) / (count - 1)) for i in range(count)]
    # fewer where the target has few blocks
    default = sorted({min(max(layer, 0), blocks - 2) for layer in spread})
    layers = tuple(default if config.feature_layers is None else config.feature_layers)
    if (
        not layers
        or min(layers) < 0
        or max(layers) > blocks - 2
        or list(layers) != sorted(set(layers))
    ):
        raise ValueError(
            f"{config.name} feature_layers {list(layers)} are out of range, out of order or"
            f" coincide for {target.name!r} with {blocks} blocks; choose different numbers from 0"
            f" to {blocks - 2}, in order"
        )
    return layers


class AnchorView:
    """KV view of training: N blocks, each seeing itself and the context before its anchor.

    Letters in tensor names: K slots, H query heads of a group, G groups, E head size, T time.
    """

    drafts_N: Tensor | None = None

    def __init__(
        self,
        context: list[tuple[Tensor, Tensor]],
        seen_NT: Tensor,
        per_row: Sequence[int],
        causal: bool = False,
    ) -> None:
        """Take each layer's keys and values [B, G, T, E], which are the context.

        `seen_NT` is the context that each block sees, `per_row` the number of blocks of each row.

        In a `causal` block a slot sees itself and the slots before it.
        """
        self.context = context
        self.seen_NT = seen_NT
        self.per_row = per_row
        self.causal = causal

    def attend(
        self, layer: int, query_NHKE: Tensor, key_NGKE: Tensor, value_NGKE: Tensor
    ) -> Tensor:
        """Attention output [N, H, K, E]; all queries of a row read its context in one product."""
        keys_BGTE, values_BGTE = self.context[layer]
        heads = query_NHKE.shape[1] // key_NGKE.shape[1]
        time = keys_BGTE.shape[2]

        # 1. Scores within each block. X = heads * K: the query heads of a group side by side.
        scaled_NHKE = query_NHKE * query_NHKE.shape[-1] ** -0.5
        query_NGXE = scaled_NHKE.unflatten(1, (-1, heads)).flatten(2, 3)
        block_scores_NGXK = query_NGXE @ key_NGKE.transpose(-1, -2)
        if self.causal:
            slots = key_NGKE.shape[2]
            device = block_scores_NGXK.device
            later_KK = counting(slots, device) > counting(slots, device, column=True)
            block_scores_NGXK = block_scores_NGXK.masked_fill(later_KK.repeat(heads, 1), -torch.inf)

        # 2. Row by row: scores with the row's context, one softmax over context and block. From
        #    here on N counts the blocks of one row.
        outputs = []
        by_row = zip(
            query_NGXE.split(self.per_row),
            block_scores_NGXK.split(self.per_row),
            value_NGKE.split(self.per_row),
            self.seen_NT.split(self.per_row),
            strict=True,
        )
        for row, (query, block_scores, value, seen_NT) in enumerate(by_row):
            query_GNXE = query.transpose(0, 1)
            scores_GNXT = query_GNXE @ keys_BGTE[row, :, None].transpose(-1, -2)
            scores_GNXT = scores_GNXT.masked_fill(~seen_NT[:, None], -torch.inf)
            scores = torch.cat([scores_GNXT, block_scores.transpose(0, 1)], dim=-1)
            weights = scores.softmax(-1, dtype=at_least_fp32(scores[:0]).dtype).to(scores.dtype)
            # The first T weights are those of the context, the last K those of the block.
            context_GNXE = weights[..., :time] @ values_BGTE[row, :, None]
            out_GNXE = context_GNXE + weights[..., time:] @ value.transpose(0, 1)
            outputs.append(out_GNXE.transpose(0, 1))
        return torch.cat(outputs).unflatten(2, (heads, -1)).flatten(1, 2)
