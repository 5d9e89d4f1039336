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

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers.models.llama.modeling_llama import rotate_half

from ..base import (
    DraftState,
    HeadOutput,
    OffsetVocabularyHead,
    TargetFeatures,
    TargetInfo,
    TargetModules,
)
from ..checkpoints.tables import written
from ..draft_positions import DraftPositions
from ..layers.chunk_size import SCORES_ON_CPU, chunk_elements
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
from ..layers.starting_values import norm_gain, start_as_identity, start_layer, target_layer_weights
from ..layers.training_time_test import BLOCK, compiled_flex, flex_compiles, listed
from ..losses import draft_loss
from ..objective import Objective
from .config import DFlashConfig
from .formats import DFLASH

COPIES = 8
"""Tensors as large as a chunk's scores that are alive at once in its backward."""


@dataclass(frozen=True)
class DFlashState(DraftState):
    """Committed context in the cache, and the block's output after the round's first `expand`."""

    cache: DraftCache = field(kw_only=True)
    lengths_B: Tensor
    """Committed tokens of each row, which is the root's position."""
    slots_BKD: Tensor
    """Final-norm outputs of the block's slots that draft, by depth."""


class DFlashHead(OffsetVocabularyHead):
    """Drafts a block of tokens in one pass of a few layers on the target's features."""

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
        start_as_identity(self.fc)

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

        The positions are the anchors that are drawn. The outputs are final-norm states [N, K, D].
        """
        # 1. Draft positions. An evaluation draws the same anchors each time.
        generator = None if self.training else torch.Generator().manual_seed(0)
        positions = DraftPositions.of(features, self.max_depth, self.config.max_anchors, generator)

        # 2. The context, whose keys and values all blocks of a row share, and what each block sees
        #    of it: its own sequence, up to the feature before its root.
        context = self._context(features.features_BTF, features.position_ids_BT)
        place_N = features.position_ids_BT.flatten()[positions.index_N]
        begin_N = positions.index_N - place_N

        # 3. The blocks: the root is the token after the draft position.
        roots_N = features.tokens_BT.flatten()[positions.index_N + 1]
        anchors = partial(AnchorView, context, sequences_of(positions, features), positions.index_N)
        views: dict[bool, KVView] = {False: anchors(begin_N)}
        if any(self.sliding):
            assert self.config.sliding_window is not None
            # Window 3 at column 5: columns 3, 4 and 5.
            near_N = positions.index_N - self.config.sliding_window + 1
            views[True] = anchors(begin_N.maximum(near_N), self.config.sliding_causal)
        return positions, self._block(roots_N, place_N + 1, views, features.modules)

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

        Block n starts with the root `roots_N[n]` at position `positions_N[n]`. `views` are those of
        layers that see the whole context, and of those with a sliding window, if there are any.
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
        window_keys: dict[str, Any] = {}
        if any(self.sliding):
            assert self.config.sliding_window is not None
            if not self.config.sliding_causal:  # vLLM reads it first
                window_keys["is_causal"] = False
            kinds = ["sliding_attention" if slides else "full_attention" for slides in self.sliding]
            window_keys |= sliding_keys(kinds, self.config.sliding_window)
        return {
            "architectures": ["DFlashDraftModel"],
            **shape,
            "model_type": "qwen3" if self.config.qk_norm else "llama",
            "draft_vocab_size": self.draft_vocab_size,
            **written(DFLASH, self.config),
            "num_target_layers": self.target.num_layers,
            "dflash_config": {
                "mask_token_id": self.mask_token,
                "target_layer_ids": list(self.feature_layers),
            },
            **window_keys,
        }


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


@dataclass(frozen=True)
class Anchored:
    """The anchors of a sequence, and the part of the context that they may see."""

    row: int
    columns: slice
    """Of the row: the sequence, up to its last anchor."""
    blocks: slice
    """Of all blocks, those after these anchors."""

    def of(self, states: Sequence[Tensor]) -> list[Tensor]:
        """The part of the blocks' queries, keys and values, and of the context's keys and values.

        They are [N, ...] and [B, G, T, E].
        """
        parts = [own[self.blocks] for own in states[:3]]
        return parts + [context[self.row, :, self.columns] for context in states[3:]]


def sequences_of(positions: DraftPositions, features: TargetFeatures) -> list[Anchored]:
    """The sequences that have draft positions, in order; at least one, perhaps without any."""
    batch, time = features.tokens_BT.shape
    documents_BT = features.documents_BT
    if documents_BT is None:
        documents_BT = torch.zeros(batch, time, dtype=torch.int64)
        if features.sequences_BT is not None:
            documents_BT = features.sequences_BT.cpu()  # sync: training gives them on the host
    # With T = 10, index 23 is row 2, column 3. Rows are told apart by numbers from 0 to T.
    assert positions.on_host_N is not None
    index_N = positions.on_host_N.cpu()
    numbers_BT = documents_BT + (time + 1) * torch.arange(batch)[:, None]
    numbers, counts = numbers_BT.flatten()[index_N].unique_consecutive(return_counts=True)
    anchored = []
    stop = 0
    for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
        row, last = divmod(int(index_N[stop + count - 1]), time)
        first = int((numbers_BT[row] < number).sum())
        anchored.append(Anchored(row, slice(first, last + 1), slice(stop, stop + count)))
        stop += count
    return anchored or [Anchored(0, slice(0, 1), slice(0, 0))]


class AnchorView:
    """KV view of training: N blocks, each seeing itself and the context up to its anchor.

    On CUDA it is flex_attention with a block mask; elsewhere scores exist for a few blocks of one
    sequence at a time.

    Letters in tensor names: K slots, H query heads of a group, G groups, E head size, T time; S all
    keys: the blocks' own, then the context's [B * T]; Q the slots of all blocks.
    """

    drafts_N: Tensor | None = None

    def __init__(
        self,
        context: list[tuple[Tensor, Tensor]],
        sequences: list[Anchored],
        last_N: Tensor,
        first_N: Tensor,
        causal: bool = False,
    ) -> None:
        """Take each layer's keys and values [B, G, T, E], which are the context.

        A block sees those from `first_N` to `last_N`, indices into the flattened [B * T] tokens. In
        a `causal` block a slot sees itself and the slots before it.
        """
        self.context = context
        self.sequences = sequences
        self.last_N = last_N
        self.first_N = first_N
        self.causal = causal
        self._mask: BlockMask | None = None

    def attend(
        self, layer: int, query_NHKE: Tensor, key_NGKE: Tensor, value_NGKE: Tensor
    ) -> Tensor:
        """Attention output [N, H, K, E]."""
        states = [query_NHKE, key_NGKE, value_NGKE, *self.context[layer]]
        device = query_NHKE.device
        # Autocast casts the inputs of torch's own attention, but not those of flex_attention.
        if torch.is_autocast_enabled(device.type):
            states = [part.to(torch.get_autocast_dtype(device.type)) for part in states]
        if len(query_NHKE) and flex_compiles(states[0]):
            return self.by_flex(compiled_flex(), *states)
        return ByChunks.apply(self, *states)

    def by_flex(
        self,
        attention: Callable[..., Any],
        query_NHKE: Tensor,
        key_NGKE: Tensor,
        value_NGKE: Tensor,
        keys_BGTE: Tensor,
        values_BGTE: Tensor,
    ) -> Tensor:
        """`attend` by flex_attention, compiled or not, over all rows and blocks side by side."""
        if self._mask is None:
            self._mask = self.block_mask(
                query_NHKE.shape[2], keys_BGTE.shape[0] * keys_BGTE.shape[2]
            )
        # [N, H, K, E] -> [1, H, N * K, E]
        query, key, value, keys, values = (
            part.transpose(0, 1).flatten(1, 2)[None]
            for part in (query_NHKE, key_NGKE, value_NGKE, keys_BGTE, values_BGTE)
        )
        out = attention(
            query,
            torch.cat([key, keys], 2),
            torch.cat([value, values], 2),
            block_mask=self._mask,
            enable_gqa=True,
        )
        blocks, _, slots, _ = query_NHKE.shape
        return out[0].unflatten(1, (blocks, slots)).transpose(0, 1)

    def block_mask(self, slots: int, context: int) -> BlockMask:
        """Return flex_attention's block mask of all slots, over their own keys and the context."""
        # 1. The two intervals of keys that a slot sees. 2 blocks of 3 slots and the anchors 4 and 7
        #    of one sequence: slot 4 sees its block, keys 3 to 5, and the context 0 to 7 at 6 to 13.
        device = self.last_N.device
        queries = len(self.last_N) * slots
        slot_Q = torch.arange(queries, device=device)
        block_Q = slot_Q // slots
        first_Q = queries + self.first_N[block_Q]
        last_Q = queries + self.last_N[block_Q]
        begin_Q = block_Q * slots
        end_Q = slot_Q if self.causal else begin_Q + slots - 1

        def allowed(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            near = (key >= first_Q[query]) & (key <= last_Q[query])
            return near | ((key >= begin_Q[query]) & (key <= end_Q[query]))

        # 2. Pairs of blocks, of 128 queries and of 128 keys, in which any query may see any key,
        #    and those in which every query sees every key, so that no mask is needed.
        rows = -(-queries // BLOCK)
        key_M = torch.arange(0, queries + context, BLOCK, device=device)
        in_block_Q = torch.arange(rows * BLOCK, device=device).clamp(max=queries - 1)
        in_block_NX = in_block_Q.unflatten(0, (rows, BLOCK))
        some_NM = torch.zeros(rows, len(key_M), dtype=torch.bool, device=device)
        all_NM = some_NM
        for low_Q, high_Q in ((first_Q, last_Q), (begin_Q, end_Q)):
            low_NX = low_Q[in_block_NX]
            high_NX = high_Q[in_block_NX]
            reached_NM = low_NX.amin(1, keepdim=True) < key_M + BLOCK
            some_NM = some_NM | (reached_NM & (high_NX.amax(1, keepdim=True) >= key_M))
            inside_NM = low_NX.amax(1, keepdim=True) <= key_M
            all_NM = all_NM | (inside_NM & (high_NX.amin(1, keepdim=True) >= key_M + BLOCK - 1))
        # The last queries may be fewer: the kernel must not read past their end.
        all_NM[queries // BLOCK :] = False
        return BlockMask.from_kv_blocks(
            *listed((some_NM & ~all_NM)[None, None]),
            *listed(all_NM[None, None]),
            BLOCK,
            allowed,
            seq_lengths=(queries, queries + context),
        )

    def chunks(self, query_NHKE: Tensor) -> Iterator[Anchored]:
        """Parts of the sequences whose scores exist at the same time."""
        _, heads, slots, _ = query_NHKE.shape
        elements = chunk_elements(query_NHKE.device, SCORES_ON_CPU) // COPIES
        for sequence in self.sequences:
            keys = sequence.columns.stop - sequence.columns.start + slots
            size = max(1, elements // (heads * slots * keys))
            # Without anchors there is one chunk, of no blocks: gradients still reach all weights.
            for start in range(sequence.blocks.start, max(sequence.blocks.stop, 1), size):
                stop = min(start + size, sequence.blocks.stop)
                yield replace(sequence, blocks=slice(start, stop))

    def chunk(
        self,
        part: Anchored,
        query_NHKE: Tensor,
        key_NGKE: Tensor,
        value_NGKE: Tensor,
        keys_GTE: Tensor,
        values_GTE: Tensor,
    ) -> Tensor:
        """Attention output [N, H, K, E] of a part's blocks."""
        slots = query_NHKE.shape[2]
        heads = query_NHKE.shape[1] // key_NGKE.shape[1]
        time = keys_GTE.shape[1]

        # 1. The columns of the context that each block sees.
        start = part.row * self.context[0][0].shape[2] + part.columns.start
        column_T = torch.arange(start, start + time, device=query_NHKE.device)
        seen_NT = column_T >= self.first_N[part.blocks, None]
        seen_NT = seen_NT & (column_T <= self.last_N[part.blocks, None])

        # 2. Scores. X = heads * K: the query heads of a group side by side.
        scaled_NHKE = query_NHKE * query_NHKE.shape[-1] ** -0.5
        query_GNXE = scaled_NHKE.unflatten(1, (-1, heads)).flatten(2, 3).transpose(0, 1)
        # One product over all blocks, N * X rows: by block, matmul would copy the context for each.
        context_scores = query_GNXE.flatten(1, 2) @ keys_GTE.mT
        scores_GNXT = context_scores.unflatten(1, query_GNXE.shape[1:3])
        scores_GNXT = scores_GNXT.masked_fill(~seen_NT[:, None], -torch.inf)
        block_scores_GNXK = query_GNXE @ key_NGKE.transpose(0, 1).mT
        if self.causal:
            slot_K = counting(slots, query_NHKE.device)
            later_KK = slot_K > counting(slots, query_NHKE.device, column=True)
            block_scores_GNXK = block_scores_GNXK.masked_fill(later_KK.repeat(heads, 1), -torch.inf)

        # 3. One softmax over context and block. The first T weights are those of the context, the
        #    last K those of the block.
        scores = torch.cat([scores_GNXT, block_scores_GNXK], dim=-1)
        weights = scores.softmax(-1, dtype=at_least_fp32(scores[:0]).dtype).to(scores.dtype)
        out_GNXE = (weights[..., :time].flatten(1, 2) @ values_GTE).view_as(query_GNXE)
        out_GNXE = out_GNXE + weights[..., time:] @ value_NGKE.transpose(0, 1)
        return out_GNXE.transpose(0, 1).unflatten(2, (heads, -1)).flatten(1, 2)


class ByChunks(torch.autograd.Function):
    """`AnchorView.attend` chunk by chunk; the backward computes the scores again."""

    @staticmethod
    def forward(ctx: Any, view: AnchorView, *states: Tensor) -> Tensor:
        ctx.view = view
        ctx.save_for_backward(*states)
        return torch.cat([view.chunk(part, *part.of(states)) for part in view.chunks(states[0])])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        states = ctx.saved_tensors
        grads = [torch.zeros_like(part) for part in states]
        for part in ctx.view.chunks(states[0]):
            inputs = [own.detach().requires_grad_() for own in part.of(states)]
            with torch.enable_grad():
                out_NHKE = ctx.view.chunk(part, *inputs)
            own_grads = torch.autograd.grad(out_NHKE, inputs, gradients[0][part.blocks])
            for whole, own in zip(part.of(grads), own_grads, strict=True):
                whole += own
        return None, *grads
