"""The target: an unmodified, frozen Hugging Face causal LM, with forwards over trees of tokens.

A tree needs no more than a 4-D attention mask, explicit position ids and our KV cache.

Letters in tensor names: B batch, T time, N nodes, S slots of the cache, F width of the chosen layers side by side.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import AutoModelForCausalLM, PreTrainedModel

from ..extras import require_extra
from ..heads.base import TargetModules, dtype_name
from ..heads.layers.draft_cache import FEW, counting
from .compiled import cpu_kernels
from .compiled.cpu_decoder import PackedDecoder, packed_decoder
from .kv_cache import Pool, StateShape, TreeCache
from .models.changes import WeightWatch
from .models.dtypes import chosen_dtype
from .models.info import active_adapters, attention_kinds, fingerprint, target_info, target_modules
from .models.interface import CacheInterface, cache_interface, first_block_index
from .models.loading import (
    MAPS,
    check_model_options,
    default_device,
    downloaded_commit,
    end_tokens_of,
    load_model,
    refuse_loading_options,
    without_peft,
)
from .tree import DraftTree, framed
from .tree_attention import attending

if TYPE_CHECKING:
    from .compiled.graphs import CompiledFunction


PIECE = 512
"""Tokens of a prompt that our kernels read at once."""


@dataclass(frozen=True)
class TargetOutput:
    """The target's logits and features at every node of a tree."""

    logits_BNV: Tensor
    features_BNF: Tensor


class CurrentLMHead(nn.Module):
    """A target's LM head for a drafter, which holds it while the target is compiled, or compiled again."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.target = target

    @property
    def weight(self) -> Tensor:
        return self.target.modules.lm_head.weight

    def forward(self, states: Tensor) -> Tensor:
        logits: Tensor = self.target.lm_head(states)
        return logits


MERGED_ADAPTER = "_headstart_merged_adapter"
"""Attribute of a model into which an adapter was merged, which must not be merged twice: the adapter's folder, and the
provenance of the model without it."""


class Target:
    """A causal LM that is neither trained nor changed; `from_pretrained` loads it frozen, in eval mode."""

    loader: Any = AutoModelForCausalLM
    """transformers' class that loads the model."""
    shares_prompts = True
    """Whether rows with the same prompt may be read once."""
    kinds = staticmethod(attention_kinds)
    """Kinds of attention masks that the model's layers need."""

    def __init__(self, model: PreTrainedModel, name: str = "", commit: str | None = None) -> None:
        """Wrap a loaded model, with the name and the Hub's commit that it was loaded by.

        Raises:
            ValueError: an architecture that cannot run draft trees, with the reason.
        """
        self._model: Callable[[], Any] = lambda: model
        self.config = model.config.get_text_config()
        self.name = name or str(model.config._name_or_path or type(model).__name__)
        self.commit: str | None = commit or getattr(model.config, "_commit_hash", None)
        """Commit of the Hub's repository; None for files that are not the Hub's, or unknown."""
        self.device = model.device
        self.dtype: torch.dtype = model.dtype
        merged = vars(model).get(MERGED_ADAPTER)
        self.adapter: str | None = None if merged is None else merged[0]
        """Folder of the peft adapter that was merged into the weights, by this target or an earlier one."""
        self.max_positions: int = getattr(self.config, "max_position_embeddings", 2**31 - 1)
        self.attention_kinds = self.kinds(model)
        self.flex = model.config._attn_implementation == "flex_attention"
        # Our attention serves layers that take their attention function from this config, which is sdpa now.
        sdpa = model.config._attn_implementation == "sdpa" and model._can_set_attn_implementation()
        self.own_attention = sdpa and all(
            getattr(each, "config", self.config) is self.config for each in model.get_decoder().modules()
        )
        self.graph: CompiledFunction | None = None
        """The compiled forward over a tree, on an accelerator; see `compile`."""
        self.packed: PackedDecoder | None = None
        """On a CPU: the forward in our kernels, for models that they support."""
        self.packed_model: Any = None
        """On a CPU, for other models: a copy with linear layers in our kernels."""
        self._compiled_version: Hashable = None
        self._weights = WeightWatch()
        self._refreshed = 0
        self.pool = Pool()
        """KV cache blocks of finished generations."""
        self.spread = len(set(getattr(model, "hf_device_map", {}).values())) > 1
        """Whether the layers lie on several devices."""
        self.lock = threading.RLock()
        """Held by the running generation: kernels, drafters and their measurements are shared."""
        self.modules = target_modules(model)
        self.info = target_info(self.config, self.name, self.modules.lm_head.weight.shape[0])

    @property
    def model(self) -> Any:  # `generate` is mixed into its class, which no annotation says
        """The model."""
        return self._model()

    @model.setter
    def model(self, model: PreTrainedModel) -> None:
        self._model = lambda: model

    def hold_weakly(self) -> None:
        """Keep the model alive no longer: its owner frees it, and whoever calls this frees the target then."""
        self._model = weakref.ref(self.model)

    def __repr__(self) -> str:
        compiled = ", compiled" if self.compiled else ""
        return f"{type(self).__name__}({self.name!r}, {dtype_name(self.dtype)}, {self.device}{compiled})"

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path | PreTrainedModel,
        dtype: torch.dtype | str = "fastest",
        device_map: str | int | torch.device | dict[str, Any] | None = None,
        revision: str | None = None,
        **model_kwargs: Any,
    ) -> Target:
        """Load a target.

        Args:
            source: a folder, a Hub id, a GGUF file, `package:NAME` for the GGUF file of an installed package, or a
                loaded model, a `PeftModel` too, which runs with its active adapter.
            dtype: dtype of the weights; "auto" for the checkpoint's own, "fastest" for the fastest one here that is as
                exact, see `dtypes`.
            device_map: a device, accelerate's map of modules to devices, or the name of one of its strategies ("auto");
                None for the first GPU, or the CPU.
            revision: revision of a Hub id.
            model_kwargs: quantization_config, attn_implementation, trust_remote_code, token, cache_dir and others of
                `loading.MODEL_OPTIONS`, for transformers' `from_pretrained`.

        Raises:
            ValueError: nothing to load at `source`, an unknown option, or an architecture that cannot run draft trees.
        """
        check_model_options(model_kwargs)
        source = without_peft(source)
        if isinstance(source, PreTrainedModel):
            refuse_loading_options(source.dtype, dtype, device_map, revision, model_kwargs)
            return cls(source)
        where = default_device() if device_map is None else device_map
        if isinstance(where, dict) or where in MAPS:
            chosen = chosen_dtype(dtype, source, None, revision, model_kwargs)
        else:
            where = torch.device(where)
            chosen = chosen_dtype(dtype, source, where, revision, model_kwargs)
        return cls.load(source, chosen, where, revision, model_kwargs)

    @classmethod
    def load(
        cls,
        source: str | Path,
        dtype: torch.dtype | str,
        device: str | torch.device | dict[str, Any],
        revision: str | None = None,
        options: dict[str, Any] | None = None,
    ) -> Target:
        """`from_pretrained` with a given dtype (or "auto", as in transformers) and device."""
        model = load_model(cls.loader, source, dtype, device, revision, options)
        return cls(model, str(source), downloaded_commit(source, revision, options))

    def compile(self) -> None:
        """Compile the forwards; again, if weights or active adapters have changed since, as far as `version` sees it.

        On a CPU, trees and prompts run in our kernels, which hold a copy of the weights in their shortest exact format.
        Elsewhere, trees run in a CUDA graph, compiled at first use, which reads the weights where they lie.
        """
        version = self.version
        if self._compiled_version == version:
            return
        if not cpu_kernels.serve(self.device):
            from .compiled.graphs import CompiledFunction  # imports torch's compiler

            self.graph = CompiledFunction(self._run, f"the forward of {self.name!r}", self.device, cuda_graph=True)
        elif cpu_kernels.library() is not None:
            layers = getattr(self.config, "layer_types", None) or self.attention_kinds * self.info.num_layers
            self.packed = packed_decoder(self.model, layers)
            self.packed_model = cpu_kernels.packed_copy(self.model) if self.packed is None else None
        else:
            return
        self._compiled_version = version

    @property
    def compiled(self) -> bool:
        """Whether `compile` did anything."""
        return any(each is not None for each in (self.graph, self.packed, self.packed_model))

    @property
    def draft_modules(self) -> TargetModules:
        """The parts of it that heads draft with; on a CPU, with the LM head as it runs now, in the kernels or not."""
        if not cpu_kernels.serve(self.device):
            return self.modules
        lm_head: Any = CurrentLMHead(self)
        return replace(self.modules, lm_head=lm_head)

    @property
    def lm_head(self) -> nn.Module:
        """The LM head, in the kernels once compiled for a CPU."""
        if self.packed is not None:
            return self.packed.lm_head
        return self.modules.lm_head if self.packed_model is None else self.packed_model.get_output_embeddings()

    @property
    def version(self) -> Hashable:
        """The model, its active adapters, and the state of its weights, see `models.changes`."""
        return id(self.model), active_adapters(self.model), self._refreshed, self._weights.version(self.model)

    def refresh(self) -> None:
        """Take the weights for changed, as after a write that `version` cannot see; copies are made again."""
        self._refreshed += 1
        if self.compiled:
            self.compile()

    def merge_adapter(self, folder: str | Path) -> None:
        """Merge a peft adapter into the weights, as a jointly trained head needs."""
        require_extra("peft", "a head with an adapter for its target")
        from peft import PeftModel  # here: its import takes a second

        provenance = self.provenance  # before the model changes: a head is compared with the base model
        merged = PeftModel.from_pretrained(self.model, str(folder)).merge_and_unload()
        self.model = merged.eval().requires_grad_(False)
        self.modules = target_modules(self.model)
        self.adapter = str(Path(folder).resolve())
        setattr(self.model, MERGED_ADAPTER, (self.adapter, provenance))
        if self.compiled:
            self._compiled_version = None  # peft changes weights in a way that their version does not show
            self.compile()

    @cached_property
    def provenance(self) -> dict[str, Any]:
        """Identity of the model without a merged adapter, for the checkpoint of a head that is trained against it."""
        merged = vars(self.model).get(MERGED_ADAPTER)
        return self.current_provenance() if merged is None else merged[1]

    def current_provenance(self) -> dict[str, Any]:
        """Identity of the model with its weights as they are now, an adapter merged in or not."""
        packing = getattr(self.model.config, "quantization_config", None)
        method = getattr(packing, "quant_method", None) or (packing or {}).get("quant_method") if packing else None
        return {
            "target": self.name,
            "revision": self.commit,
            "dtype": dtype_name(self.dtype),
            "quantization": None if method is None else str(getattr(method, "value", method)),
            "weights": fingerprint(self.model),
        }

    @property
    def end_tokens(self) -> frozenset[int]:
        """The tokens at which the model's generation config ends a text."""
        return end_tokens_of(self.model.generation_config)

    def check_layers(self, layers: tuple[int, ...]) -> None:
        """Refuse feature layers that the model does not have.

        Raises:
            ValueError: naming the layer and the valid range.
        """
        last = self.info.num_layers - 2
        for layer in layers:
            if not -1 <= layer <= last:
                raise ValueError(
                    f"feature layer {layer} is out of range for {self.name!r} with {self.info.num_layers} blocks; "
                    f"choose from 0 to {last} for a block's output, or -1 for the state after the final norm"
                )

    def cache_bytes(self, rows: int, tokens: int) -> int:
        """Bytes of KV cache for `rows` × `tokens`."""
        info, size = self.info, torch.finfo(self.dtype).bits // 8
        return 2 * size * info.num_layers * rows * tokens * info.num_key_value_heads * info.head_dim

    def new_cache(self, batch_size: int, tokens: int = 0, rows: int = 0) -> TreeCache:
        """An empty cache for this model; the arguments are those of `TreeCache`."""
        return TreeCache(self.state_shapes, batch_size, self.device, tokens, rows, self.pool)

    @cached_property
    def cache_interface(self) -> CacheInterface:
        """How the model takes and returns its KV cache, found by a forward over one token."""
        token_11 = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        return cache_interface(self.model, input_ids=token_11)

    @property
    def state_shapes(self) -> list[StateShape]:
        """Shapes of each layer's keys, then of the values."""
        return self.cache_interface.state_shapes if self.packed is None else self.packed.state_shapes

    @cached_property
    def first_block_index(self) -> int:
        """The index of the state after block 0 in `output_hidden_states`, found by forwards over one token."""
        token_11 = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        return first_block_index(self.model, self.info.num_layers, input_ids=token_11)

    def hidden_state_indices(self, layers: tuple[int, ...]) -> list[int]:
        """The model's indices of these feature layers, for `output_hidden_states`."""
        return [self.first_block_index + layer % self.info.num_layers for layer in layers]

    @cached_property
    def computes_logits(self) -> bool:
        """Whether `logits` agrees with the model's own logits, tried on one token."""
        if self.packed is not None:
            return True
        with torch.inference_mode():
            token_11 = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
            output = self.model(input_ids=token_11, use_cache=False, output_hidden_states=True)
        expected_11V = output.logits.float()
        found_11V = self.logits(output.hidden_states[self.info.num_layers]).float().to(expected_11V.device)
        close = torch.finfo(self.dtype).eps ** 0.5 * expected_11V.abs().max()
        return bool((found_11V - expected_11V).abs().max() <= close)

    def logits(self, states: Tensor) -> Tensor:
        """The logits [..., V] of states [..., D] after the final norm; see `computes_logits`."""
        if self.packed is not None:
            return self.packed.logits(states)
        with torch.inference_mode():
            return self.modules.logits(states.to(self.modules.lm_head.weight.device)).to(self.device)

    def read_chunk(
        self, tokens_BT: Tensor, longest: int, cache: TreeCache, layers: tuple[int, ...], kept: list[int]
    ) -> TargetOutput:
        """Prefill: read the next tokens of right-padded prompts and commit all of them, padding too.

        Returns the logits of the positions `kept` in the chunk, and the features of all its tokens. The cache makes
        room for the `longest` prompt at once.
        """
        size = tokens_BT.shape[1]
        cache.reserve(size, max(longest - size, 0))
        if self.packed is not None:  # our kernels read a prompt in chains of nodes
            logits, features = [], []
            for start, piece_BN in zip(range(0, size, PIECE), tokens_BT.split(PIECE, dim=1), strict=True):
                nodes = piece_BN.shape[1]
                here = torch.tensor([at - start for at in kept if start <= at < start + nodes]).long()
                output = self.forward_chain(piece_BN, cache.prefilled, cache, layers, here)
                cache.advance(torch.full_like(cache.lengths_B, nodes))
                cache.prefilled += nodes
                logits.append(output.logits_BNV)
                features.append(output.features_BNF)
            return TargetOutput(torch.cat(logits, dim=1), torch.cat(features, dim=1))
        if self.own_attention and self.attention_kinds == ("full_attention",):
            cache.attended, masks = cache.prefilled + size, None
        else:
            slots_S = torch.arange(cache.capacity, device=self.device)
            visible_BTS = slots_S <= cache.slots_BN[..., None]
            visible = dict.fromkeys(self.attention_kinds, visible_BTS)
            if "sliding_attention" in visible:
                slots_BS = slots_S.expand(len(tokens_BT), -1)
                visible["sliding_attention"] = self._in_window(cache.slots_BN, slots_BS, visible_BTS)
            masks = self._masks(visible)
        # The LM head of a model that is spread over devices may lie on another one than a tensor of positions.
        last = size - kept[0] if kept else 1
        wanted = last if self.spread else torch.tensor(kept, dtype=torch.int64, device=self.device)
        with attending(self.config) if self.own_attention else nullcontext():
            logits_BKV, features_BNF = self._run(tokens_BT, cache.slots_BN, masks, cache, layers, wanted)
        if self.spread:  # logits from the first wanted position to the last token
            logits_BKV = logits_BKV[:, [at - kept[0] for at in kept]]
        cache.advance(torch.full_like(cache.lengths_B, size))
        cache.prefilled += size
        return TargetOutput(logits_BKV, features_BNF)

    def forward_tree(self, tree: DraftTree, longest: int, cache: TreeCache, layers: tuple[int, ...]) -> TargetOutput:
        """One forward over all nodes; each attends to the committed tokens and its own path.

        The nodes' entries are written to the cache; `cache.accept` commits them.
        """
        known = tree.structure
        return self.forward_nodes(tree.tokens_BN, known.framed_BNX, known.depths_BN, longest, cache, layers)

    def forward_chain(
        self,
        tokens_BN: Tensor,
        longest: int,
        cache: TreeCache,
        layers: tuple[int, ...],
        kept_K: Tensor | None = None,
    ) -> TargetOutput:
        """`forward_nodes` over a chain of tokens."""
        batch, nodes = tokens_BN.shape
        seen_BNN = torch.ones(nodes, nodes, dtype=torch.bool, device=self.device).tril().expand(batch, -1, -1)
        depths_BN = torch.arange(nodes, device=self.device).expand_as(tokens_BN)
        return self.forward_nodes(tokens_BN, framed(seen_BNN), depths_BN, longest, cache, layers, kept_K)

    def forward_nodes(
        self,
        tokens_BN: Tensor,
        framed_BNX: Tensor,
        depths_BM: Tensor,
        longest: int,
        cache: TreeCache,
        layers: tuple[int, ...],
        kept_K: Tensor | None = None,
    ) -> TargetOutput:
        """One forward over the last N of M uncommitted nodes, the others being in the cache already.

        `framed_BNX` is the new nodes' tree attention, see `framed`; `depths_BM` are positions relative to the first one
        behind the committed tokens, of which the longest row has `longest`. Returns the logits of the new nodes
        `kept_K`, None for all.
        """
        new, nodes = tokens_BN.shape[1], depths_BM.shape[1]
        cache.reserve(new, longest, nodes - new)
        positions_BN, visible = self.visible_slots(framed_BNX, depths_BM, cache, longest)
        if self.packed is not None:
            return TargetOutput(*self.packed(tokens_BN, positions_BN, visible, cache, layers, kept_K))
        masks = self._masks(visible)
        if kept_K is None:
            kept_K = counting(new, self.device)
        given = (tokens_BN, positions_BN, masks, cache, layers)
        with attending(self.config) if self.own_attention else nullcontext():
            if self.spread:
                logits_BNV, features_BNF = self._run(*given, 0)
                return TargetOutput(logits_BNV[:, kept_K], features_BNF)
            if self.graph is None or not len(kept_K):
                return TargetOutput(*self._run(*given, kept_K))

            def sizes() -> list[tuple[Tensor, int]]:
                by_node = [(tensor, i) for tensor in (tokens_BN, positions_BN, cache.slots_BN) for i in (0, 1)]
                all_masks = masks.values() if isinstance(masks, dict) else [masks]
                by_mask = [(mask, i) for mask in all_masks for i in (0, 2, 3) if new > 1 or i != 2]
                return [*by_node, *by_mask, (kept_K, 0)]

            variant = (len(cache.lengths_B) == 1, new == 1, layers)
            return TargetOutput(*self.graph(variant, sizes, cache.sizes, *given, kept_K))

    def visible_slots(
        self, framed_BNX: Tensor, depths_BM: Tensor, cache: TreeCache, longest: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Position ids [B, N] of the last N of M nodes, and by kind of attention the slots they attend to [B, N, S]."""
        new, nodes = framed_BNX.shape[1], depths_BM.shape[1]
        lengths_B1 = cache.lengths_B[:, None]
        # A CUDA graph serves one shape; elsewhere our attention reads only the slots that the mask covers.
        short = (self.own_attention or self.packed is not None) and self.device.type == "cpu"
        slots = cache.bucketed_length if short else cache.capacity
        if nodes == 1:
            visible_BNS = (counting(slots, self.device) <= lengths_B1)[:, None]
        else:  # a column of `framed_BNX` for each slot
            column_BS = (counting(slots, self.device, 1) - lengths_B1).clamp(0, nodes + 1)
            visible_BNS = framed_BNX.gather(2, column_BS[:, None].expand(-1, new, -1))
        positions_BN = lengths_B1 + (depths_BM if new == nodes else depths_BM[:, nodes - new :])
        if longest + nodes > self.max_positions:  # such a node is never returned, but must not break an embedding table
            positions_BN = positions_BN.clamp(max=self.max_positions - 1)
        visible = dict.fromkeys(self.attention_kinds, visible_BNS)
        if "sliding_attention" in visible:
            slots_S = counting(slots, self.device)
            behind_BS = slots_S - lengths_B1
            node_positions_BS = lengths_B1 + depths_BM.gather(1, behind_BS.clamp(0, nodes - 1))
            slot_positions_BS = torch.where((behind_BS >= 0) & (behind_BS < nodes), node_positions_BS, slots_S)
            visible["sliding_attention"] = self._in_window(positions_BN, slot_positions_BS, visible_BNS)
        return positions_BN, visible

    def states(
        self, tokens_BT: Tensor, layers: tuple[int, ...], positions_BT: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Features of whole right-padded sequences, without a cache.

        Returns features_BTF of `layers`, and last_BTD, the states after the final norm. In packed rows `positions_BT`
        is 0 at the start of every sequence, which attends to no other.
        """
        indices = self.hidden_state_indices(layers)
        (last,) = self.hidden_state_indices((-1,))
        output = self.model(
            input_ids=tokens_BT,
            position_ids=positions_BT,  # transformers makes the mask of packed rows from them
            use_cache=False,
            logits_to_keep=torch.empty(0, dtype=torch.int64, device=self.device),
            output_hidden_states=sorted({*indices, last}),
        )
        last_BTD = output.hidden_states[last].to(self.device)
        states = [output.hidden_states[index].to(self.device) for index in indices]
        return torch.cat(states, dim=-1) if states else last_BTD[..., :0], last_BTD

    read = torch.no_grad()(states)
    """`states` without gradients, for training on a frozen model."""

    def _run(
        self,
        tokens_BN: Tensor,
        positions_BN: Tensor,
        masks: Tensor | BlockMask | dict[str, Tensor] | dict[str, BlockMask] | None,
        cache: TreeCache,
        layers: tuple[int, ...],
        logits_to_keep: int | Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Logits and features of a forward; this function is compiled."""
        indices = self.hidden_state_indices(layers)
        given_cache: dict[str, Any] = {self.cache_interface.name: cache}
        output = (self.packed_model or self.model)(
            input_ids=tokens_BN,
            attention_mask=masks,
            position_ids=positions_BN.clamp(max=self.max_positions - 1),
            **given_cache,
            use_cache=True,
            logits_to_keep=logits_to_keep,
            output_hidden_states=sorted(set(indices)) or False,
        )
        states = [output.hidden_states[index].to(self.device) for index in indices]
        nothing = torch.empty(*tokens_BN.shape, 0, dtype=self.dtype, device=self.device)
        return output.logits, torch.cat(states, dim=-1) if states else nothing

    def _in_window(self, positions_BN: Tensor, slot_positions_BS: Tensor, visible_BNS: Tensor) -> Tensor:
        """Visible slots [B, N, S] that lie within the sliding window of each node."""
        return visible_BNS & (slot_positions_BS[:, None] > positions_BN[..., None] - self.config.sliding_window)

    def _masks(self, visible: dict[str, Tensor]) -> Any:
        """The 4-D mask, or one for each kind of attention where a model alternates between them."""
        masks: dict[str, Tensor | BlockMask] = {}
        for kind, visible_BNS in visible.items():
            if self.flex:
                masks[kind] = _block_mask(visible_BNS)
                continue
            mask_B1NS = torch.where(visible_BNS[:, None], *_mask_values(self.dtype, visible_BNS.device))
            heads = self.info.num_attention_heads // self.info.num_key_value_heads
            once = self.own_attention and heads * visible_BNS.shape[1] <= FEW  # for all layers: see `masked_attention`
            masks[kind] = mask_B1NS.repeat(1, 1, heads, 1) if once else mask_B1NS
        return masks if len(masks) > 1 else masks[self.attention_kinds[0]]


def _block_mask(visible_BNS: Tensor) -> BlockMask:
    """The mask for flex attention."""
    batch, nodes, slots = visible_BNS.shape
    device = visible_BNS.device
    return create_block_mask(lambda b, h, n, s: visible_BNS[b, n, s], batch, None, nodes, slots, device=device)


@lru_cache(maxsize=8)
def _mask_values(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Values of an additive attention mask: 0 where a slot is attended to, else the lowest number.

    float16's is not low enough: scores, computed in float32, may exceed it. Every node attends to itself, so that no
    row of the mask is -inf throughout.
    """
    value = -torch.inf if dtype == torch.float16 else torch.finfo(dtype).min
    lowest = torch.full((), value, dtype=dtype, device=device)
    return torch.zeros_like(lowest), lowest
