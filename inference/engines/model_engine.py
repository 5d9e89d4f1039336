"""Forwards of the transformers model over a tree: its own modules, our mask, our KV cache.

With a `GraphRunner` they are recorded; of Llama-like layers a `FusedDecoder` then runs what lies
between the linear modules.

Letters in tensor names: B batch, T time, N nodes, M nodes that are attended to, K chosen nodes, S
slots of the cache, V vocabulary, D hidden size, F width of the chosen layers side by side.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable
from functools import cached_property, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from ...heads.base import DraftHead
from ...heads.layers.constants import constants, counting
from ...heads.layers.masked_attention import FEW
from ...heads.layers.tree_attention import attend_to_slots
from ...heads.layers.tree_slots import TreeSlots, has_tree_kernel
from ..cache.kv_cache import Growth, StateShape, TreeCache
from ..targets.changes import WeightWatch, has_hooks
from ..targets.prompt_inputs import offset
from ..targets.segments import has_changing_angles
from ..targets.target_model import TargetModel
from ..trees.tree import DraftTree, NewNodes
from . import cpu_kernels
from .attention import TreeAttention, attending_copy
from .base import Engine, Runner, TargetOutput, features_of, kept_logits
from .cpu_decoder import packed_head, renew_packed
from .cuda_graph import GraphRunner
from .fused_decoder import TOLERANCE, Attend, FusedDecoder, causally, fused_head
from .known import agrees, known_decoder
from .masks import NEAR, node_positions, visible_slots

Masks = Tensor | BlockMask | dict[str, Any]
"""A mask, or one for each kind of attention where a model alternates between them."""


class ModelEngine(Engine):
    """Runs the transformers model, whatever its architecture and device.

    Its parts:

        model      the user's own modules; or a copy that shares their weights, with our attention
                   (`attention`), or with linear layers whose weights are packed for the CPU kernels
        runner     runs the forwards over trees, or records them once and replays them
        decoder    of Llama-like layers that are recorded, runs what lies between linear modules

    Modules with hooks are never replaced by a copy.
    """

    name = "eager"
    recordable = True
    """Whether its forwards over trees can be recorded at all."""

    def __init__(
        self, target: TargetModel, runner: Runner | None = None, packed: bool = False
    ) -> None:
        """Prepare to run a target.

        Args:
            target: the target.
            runner: records and replays the forwards over trees; None to launch each anew.
            packed: whether linear layers run in the CPU kernels.
        """
        super().__init__(target)
        self.on_cpu = target.device.type == "cpu"
        model = target.model
        self.flex = model.config._attn_implementation == "flex_attention"
        self.spread = any(hasattr(module, "_hf_hook") for module in model.modules())
        """Whether accelerate moves the inputs of layers, which usually lie on several devices."""
        self.shares_keys = not self.spread and bool(
            getattr(target.config, "num_kv_shared_layers", None)
        )
        """Whether the last layers use keys of others (Gemma 4): they would cut our mask for a
        number of logits to keep, but not for a list of them."""
        self._heads: WeakKeyDictionary[DraftHead, tuple[WeightWatch, Hashable]] = (
            WeakKeyDictionary()
        )
        """Heads that draft here, and the state of their weights."""
        # Three kinds of models cannot be recorded. flex attention makes its block masks on the
        # host. A model on several devices runs on several streams. Models with segments of
        # positions, or with rotary angles that change, decide on the host what to compute: a
        # replay would repeat the decision.
        in_segments = target.segments is not None or has_changing_angles(target.config)
        launched_anew = self.flex or self.spread or in_segments or not self.recordable
        if runner is not None and not launched_anew:
            self.runner = runner
        self.attention = TreeAttention()
        self.copies_weights = packed
        self._copy: Any = None
        """The modules that run in the place of the user's; None for the user's own."""
        if packed:
            self._copy = cpu_kernels.packed_copy(model)
            self.name = cpu_kernels.kernels_name()
        elif isinstance(self.runner, GraphRunner):
            self.name = "cuda graphs"
        self.hooked = has_hooks(model)
        """Whether hooks must be called, which a recording would not do."""
        if self.hooked and self.runner.replays:
            warnings.warn(
                f"{self.target.name!r} has hooks, or forwards in the place of its classes' own: it"
                " is launched operation by operation, so that they are called",
                stacklevel=2,
            )

    @property
    def model(self) -> Any:
        return self.target.model if self._copy is None else self._copy

    @property
    def state_shapes(self) -> list[StateShape]:
        return self.target.cache_interface.state_shapes

    @property
    def lm_head(self) -> nn.Module:
        if self.copies_weights:
            packed_head: nn.Module = self.model.get_output_embeddings()
            return packed_head
        return self.target.modules.lm_head

    @property
    def growth(self) -> Growth:  # type: ignore[override]
        if not self.runner.replays:
            return "buckets"
        return "room" if self.tree_kernel else "doubling"

    def logits(self, states: Tensor) -> Tensor:
        modules = self.target.modules
        with torch.inference_mode():
            return modules.logits(states.to(modules.lm_head.weight.device)).to(self.target.device)

    @cached_property
    def own_attention(self) -> bool:
        """Whether a copy of the model with our attention runs in its place.

        Every layer must ask for it, with the mask that it was given: tried on one token.
        """
        target = self.target
        without_masks = not target.attention_kinds
        if self.spread or self.hooked or without_masks:
            return False
        if self.model.config._attn_implementation != "sdpa":
            return False
        # 1. Put a copy with our attention in place of the model for the trial.
        before = self._copy
        self._copy = attending_copy(self.model, self.attention)
        # 2. Read one token, which sees slot 0 alone, and note which layers ask for our attention.
        with torch.inference_mode(), self.attention.asked_for() as asked:
            cache = self._cache_of_one_token()
            visible_111 = torch.zeros(1, 1, cache.capacity, dtype=torch.bool, device=target.device)
            visible_111[..., 0] = True
            visible = dict.fromkeys(target.attention_kinds, visible_111)
            token_11 = torch.zeros(1, 1, dtype=torch.int64, device=target.device)
            masks = self._additive_masks(visible, ours=True)
            self.model_forward(token_11, token_11, masks, cache, (), 0)
        # 3. Keep the copy if every layer asked with our mask, for the expected grouping of heads.
        # For example 4 layers with 32 query and 8 key heads: asked == [4, 4, 4, 4].
        group = target.info.num_attention_heads // target.info.num_key_value_heads
        layers = len(self.state_shapes) // 2
        if target.stateful is None:  # a layer may attend several times, or by the keys of another
            layers = max(target.info.num_layers, layers)
        if asked == [group] * layers:
            return True
        self._copy = before
        return False

    def _cache_of_one_token(self) -> TreeCache:
        """A cache with room for one token; its capacity grows in buckets, whatever the runner."""
        cache = TreeCache(self.state_shapes, 1, self.target.device)
        cache.reserve(1, 0)
        return cache

    @cached_property
    def tree_kernel(self) -> bool:
        """Whether trees are attended to by the kernel that reads the slots in use alone."""
        target = self.target
        if not self.runner.replays or not has_tree_kernel(
            target.device, target.dtype, target.info.head_dim
        ):
            return False
        if "chunked_attention" in target.attention_kinds:  # the kernel knows windows alone
            return False
        return len(set(self.state_shapes)) == 1 and self.own_attention

    @cached_property
    def decoder(self) -> FusedDecoder | None:
        """The fused decoder that runs tree forwards in place of the model's code.

        None for a model that is not known to fit, or has hooks.
        """
        target = self.target
        if type(self) is not ModelEngine or self.hooked or not self.tree_kernel:
            return None
        known = known_decoder(self.model, target.layer_kinds)
        if known is None or target.before_lm_head is not None:
            return None
        decoder = FusedDecoder(known)
        # The trial compares the residual stream after every block (the last: normed).
        layers = (*range(target.info.num_layers - 1), -1)

        def forward(tokens_1N: Tensor, cache: TreeCache) -> tuple[Tensor, Tensor]:
            attend = self._attention_to(NewNodes.of_chain(tokens_1N), cache.lengths_B)
            return decoder(tokens_1N, cache.slots_BN, attend, cache, layers)

        tolerance = TOLERANCE[target.dtype]
        if agrees(self.model, self.state_shapes, forward, tolerance, layers):
            return decoder
        return None

    def draft_head(self, head: DraftHead) -> DraftHead:
        """A head as it drafts here: packed, or by fused operations where functions are recorded."""
        if self.copies_weights:
            return packed_head(head)
        return fused_head(head) if self.runner.replays else head

    def renew_head(self, head: DraftHead, force: bool = False) -> None:
        """Pack changed weights again, or drop what was recorded with them."""
        if self.copies_weights:
            renew_packed(head, force)
        if not self.runner.replays:
            return
        watch, version_before = self._heads.get(head, (WeightWatch(), None))
        version = watch.version(head)
        # None: this head is seen for the first time, so nothing was recorded with it.
        if force or version_before not in (None, version):
            self.runner.forget()
        self._heads[head] = (watch, version)

    def read_chunk(
        self,
        tokens_BT: Tensor,
        longest: int,
        cache: TreeCache,
        layers: tuple[int, ...],
        kept: list[int],
    ) -> TargetOutput:
        target = self.target
        size = tokens_BT.shape[1]

        # 1. Reserve slots: for the whole of the longest prompt at the first chunk.
        cache.reserve(size, max(longest - size, 0))
        self._count_from(cache, cache.prefilled)

        # 2. Of Llama-like layers the fused decoder reads it. Padding may lie beyond the last
        #    position of the model's tables.
        positions_BT = cache.slots_BN.clamp(max=target.max_positions - 1)
        causal = self.own_attention and target.attention_kinds == ("full_attention",)
        if causal and self.decoder is not None and cache.position_offsets is None:
            attend: dict[str, Attend] = {
                "full_attention": partial(causally, slots=cache.prefilled + size)
            }
            kept_K = torch.tensor(kept, dtype=torch.int64, device=target.device)
            logits_BKV, features_BTF = self.runner.run_unrecorded(
                self.decoder, tokens_BT, positions_BT, attend, cache, layers, kept_K
            )
            cache.advance_prompt(size)
            return TargetOutput(logits_BKV, features_BTF)

        # 3. The causal mask. Rows are padded on the right, so all rows lie in the same slots.
        masks: Masks
        if causal:
            # Our attention needs no values: "the last `size` of `attended` slots" says it all.
            cache.attended = cache.prefilled + size
            masks = self.attention.of_prompt(size, cache.attended)
        else:
            # A token sees its own slot and all before it. With slots_BN[b] = [2, 3] of 5 slots:
            #     token in slot 2    True True True False False
            #     token in slot 3    True True True True  False
            slots_S = torch.arange(cache.capacity, device=target.device)
            visible_BTS = slots_S <= cache.slots_BN[..., None]
            visible = dict.fromkeys(target.attention_kinds, visible_BTS)
            # In a prompt a token's position is its slot, so slots stand for positions here.
            slots_BS = slots_S.expand(len(tokens_BT), -1)
            for kind, near in NEAR.items():
                if kind in visible:
                    visible[kind] = near(target, cache.slots_BN, slots_BS, visible_BTS)
            masks = self.attention_masks(visible)

        # 4. The forward.
        logits_BKV, features_BTF = self._unrecorded_forward(
            tokens_BT, positions_BT, masks, cache, layers, kept
        )

        # 5. Commit all tokens, padding included; prefill then crops each row to its length.
        cache.advance_prompt(size)
        return TargetOutput(logits_BKV, features_BTF)

    def _unrecorded_forward(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor,
        masks: Masks | None,
        cache: TreeCache,
        layers: tuple[int, ...],
        kept: list[int],
    ) -> tuple[Tensor, Tensor]:
        """The model's logits at the indices `kept`, and the features of all tokens."""
        logits_to_keep: int | Tensor = torch.tensor(
            kept, dtype=torch.int64, device=self.target.device
        )
        # Under accelerate the LM head may lie on another device than the indices. A number n asks
        # for the last n logits instead: from the first wanted index on, cut below.
        # For example 8 tokens, kept = [5, 7]: logits of the last 3 tokens, then indices [0, 2].
        if self.spread:
            logits_to_keep = tokens_BT.shape[1] - kept[0] if kept else 1
        logits_BKV, features_BTF = self.runner.run_unrecorded(
            self.model_forward, tokens_BT, positions_BT, masks, cache, layers, logits_to_keep
        )
        if self.spread:
            logits_BKV = logits_BKV[:, [index - kept[0] for index in kept]]
        return logits_BKV, features_BTF

    def forward_tree(
        self, tree: DraftTree, longest: int, cache: TreeCache, layers: tuple[int, ...]
    ) -> TargetOutput:
        cache.reserve(tree.tokens_BN.shape[1], longest)
        self._count_from(cache, longest)
        run = self._runner_for(cache)
        # The slots are returned, too: attributes that a recorded function sets hold no values.
        output, cache.slots_BN = run(self.tree_forward, (cache,), tree, cache.lengths_B, layers)
        return output

    def tree_forward(
        self, cache: TreeCache, tree: DraftTree, lengths_B: Tensor, layers: tuple[int, ...]
    ) -> tuple[TargetOutput, Tensor]:
        """Run the forward over all nodes of a tree; also return its entries' slots [B, N].

        This function is recorded.
        """
        return self._nodes_forward(cache, NewNodes.of_tree(tree), None, lengths_B, layers)

    def forward_nodes(
        self,
        nodes: NewNodes,
        longest: int,
        cache: TreeCache,
        layers: tuple[int, ...],
        kept_K: Tensor | None = None,
    ) -> TargetOutput:
        cache.reserve(nodes.tokens_BN.shape[1], longest, nodes.cached)
        self._count_from(cache, longest + nodes.cached)
        run = self._runner_for(cache)
        output, cache.slots_BN = run(
            self._nodes_forward, (cache,), nodes, kept_K, cache.lengths_B, layers
        )
        return output

    def _runner_for(self, cache: TreeCache) -> Runner:
        """Return the runner of a tree forward: one that never records if there are hooks or images.

        A replay would not call the hooks, and would not read the position offsets of a prompt with
        images.
        """
        if cache.position_offsets is not None or self.hooked:
            return Runner()
        return self.runner

    def _count_from(self, cache: TreeCache, tokens: int) -> None:
        """Set the number of tokens before the next forward's.

        Some layers count tokens from the cache's length.
        """
        if self.target.segments is not None:
            cache.start = tokens

    def _nodes_forward(
        self,
        cache: TreeCache,
        nodes: NewNodes,
        kept_K: Tensor | None,
        lengths_B: Tensor,
        layers: tuple[int, ...],
    ) -> tuple[TargetOutput, Tensor]:
        """Run `forward_nodes` after `lengths_B` committed tokens; also return the slots [B, N].

        This function is recorded.
        """
        # 1. Slots of the new nodes, after the committed tokens and the nodes that are cached.
        # For example 5 committed tokens, 2 cached nodes and 3 new ones: slots [7, 8, 9].
        new = nodes.tokens_BN.shape[1]
        cache.slots_BN = lengths_B[:, None] + counting(new, lengths_B.device, nodes.cached)

        # 2. Positions, and what each node sees. Our attention reads only the slots that the mask
        # covers, so on a CPU the mask covers those in use. A recording has one number of slots.
        short = self.on_cpu and self.own_attention and not self.runner.replays
        slots = cache.bucketed_length if short else cache.capacity
        if self.tree_kernel:
            # The kernel takes ancestors and lengths in place of a mask over all slots.
            positions_BN = node_positions(self.target, nodes, lengths_B)
        else:
            positions_BN, visible = visible_slots(self.target, nodes, lengths_B, slots)

        # 3. The forward, by the fused decoder or by the model's own code.
        if self.decoder is not None and cache.position_offsets is None:
            attend = self._attention_to(nodes, lengths_B)
            logits_BNV, features_BNF = self.decoder(
                nodes.tokens_BN, positions_BN, attend, cache, layers, kept_K
            )
        else:
            if self.tree_kernel:  # masks without values
                tree_slots = self._tree_slots(nodes, lengths_B)
                masks = as_the_model_takes(
                    {kind: self.attention.of_tree(seen) for kind, seen in tree_slots.items()}
                )
            else:
                masks = self.attention_masks(visible)
            # 0 asks for all logits. Under accelerate they are chosen afterwards, as above.
            logits_to_keep: int | Tensor = 0 if kept_K is None or self.spread else kept_K
            logits_BNV, features_BNF = self.model_forward(
                nodes.tokens_BN, positions_BN, masks, cache, layers, logits_to_keep
            )
            if kept_K is not None and self.spread:
                logits_BNV = logits_BNV[:, kept_K]

        # 4. At least float32 for the acceptance rule; float64 stays.
        logits_BNV = logits_BNV.to(torch.promote_types(logits_BNV.dtype, torch.float32))
        return TargetOutput(logits_BNV, features_BNF), cache.slots_BN

    def model_forward(
        self,
        tokens_BN: Tensor,
        positions_BN: Tensor,
        masks: Masks,
        cache: TreeCache,
        layers: tuple[int, ...],
        logits_to_keep: int | Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The model's logits and features."""
        target = self.target
        indices = target.hidden_state_indices(layers)
        inputs = self._model_inputs(tokens_BN, positions_BN, masks, cache, logits_to_keep)
        # transformers returns only the listed hidden states, or none for False. A layer may be
        # listed twice, hence the set.
        output = self.model(
            **inputs, use_cache=True, output_hidden_states=sorted(set(indices)) or False
        )
        logits = kept_logits(output.logits, logits_to_keep)
        return logits, features_of(target, output, layers, tokens_BN)

    def _model_inputs(
        self,
        tokens_BN: Tensor,
        positions_BN: Tensor,
        masks: Masks,
        cache: TreeCache,
        logits_to_keep: int | Tensor,
    ) -> dict[str, Any]:
        """Arguments of the model's forward over these tokens."""
        # Gemma 4 would cut our mask for a number of logits, but not for a list of indices.
        if self.shares_keys and isinstance(logits_to_keep, int):  # 0: all
            logits_to_keep = counting(tokens_BN.shape[1], tokens_BN.device)
        return {
            "input_ids": tokens_BN,
            "attention_mask": masks,
            "position_ids": offset(positions_BN, cache.position_offsets),
            self.target.cache_interface.name: cache,
            "logits_to_keep": logits_to_keep,
        }

    def attention_masks(self, visible: dict[str, Tensor]) -> Masks:
        """The mask of the slots [B, N, S] that are visible by kind of attention."""
        if self.flex:
            masks: dict[str, Any] = {
                kind: _block_mask(visible_BNS) for kind, visible_BNS in visible.items()
            }
            return as_the_model_takes(masks)
        return self._additive_masks(visible, ours=self.own_attention)

    def _tree_slots(self, nodes: NewNodes, lengths_B: Tensor) -> dict[str, TreeSlots]:
        """Slots that new nodes attend to, by kind of attention, as the tree kernel takes them."""
        # Without the two columns of the frame: M uncommitted nodes remain.
        ancestors_BNM = nodes.framed_BNX[:, :, 1:-1]
        slots: dict[str, TreeSlots] = {}
        for kind in self.target.attention_kinds:
            window = self.target.config.sliding_window if kind == "sliding_attention" else None
            slots[kind] = TreeSlots(ancestors_BNM, lengths_B, nodes.depths_BM, window)
        return slots

    def _attention_to(self, nodes: NewNodes, lengths_B: Tensor) -> dict[str, Attend]:
        """The attention of new nodes after `lengths_B` committed tokens, by kind."""
        return {kind: by_slots(slots) for kind, slots in self._tree_slots(nodes, lengths_B).items()}

    def _additive_masks(self, visible: dict[str, Tensor], ours: bool) -> Masks:
        """4-D masks for the model's attention, or for `ours`."""
        info = self.target.info
        heads = info.num_attention_heads // info.num_key_value_heads
        masks: dict[str, Tensor] = {}
        for kind, visible_BNS in visible.items():
            values = _mask_values(self.target.dtype, visible_BNS.device)
            mask_B1NS = torch.where(visible_BNS[:, None], *values)  # 0 where visible, else lowest
            if ours:
                # For few queries `masked_attention` takes the query heads that share keys as more
                # queries, [B, 1, heads * N, S]. The mask is repeated here, once for all layers.
                if heads * visible_BNS.shape[1] <= FEW:
                    mask_B1NS = mask_B1NS.repeat(1, 1, heads, 1)
                self.attention.attend_by(mask_B1NS)
            masks[kind] = mask_B1NS
        return as_the_model_takes(masks)


def by_slots(slots: TreeSlots) -> Attend:
    """Attention over these slots."""

    def attend(query_BHNE: Tensor, keys_BGSE: Tensor, values_BGSE: Tensor, scale: float) -> Tensor:
        return attend_to_slots(query_BHNE, keys_BGSE, values_BGSE, slots, scale)

    return attend


def as_the_model_takes(masks: dict[str, Any]) -> Masks:
    """Masks by kind of attention, or the mask itself where all layers are of one kind."""
    return masks if len(masks) > 1 else next(iter(masks.values()))


def _block_mask(visible_BNS: Tensor) -> BlockMask:
    """The mask for flex attention."""
    batch, nodes, slots = visible_BNS.shape
    return create_block_mask(
        lambda b, h, n, s: visible_BNS[b, n, s],
        batch,
        None,  # the same for all heads
        nodes,
        slots,
        device=visible_BNS.device,
    )


@constants
def _mask_values(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Values of an additive attention mask: 0 where a slot is attended to, else the lowest number.

    In float16 the lowest number is not low enough, since scores are computed in float32 and may
    exceed it: -inf takes its place. Every node attends to itself, so no row of the mask is all
    -inf.
    """
    # float16's lowest number is -65504, bfloat16's and float32's about -3.4e38.
    value = -torch.inf if dtype == torch.float16 else torch.finfo(dtype).min
    lowest = torch.full((), value, dtype=dtype, device=device)
    return torch.zeros_like(lowest), lowest
