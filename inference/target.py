"""The frozen model: an unmodified Hugging Face causal LM, asked for logits and features at trees of tokens.

A 4-D mask, explicit positions and our own cache are all that a decoder with `position_ids` needs.

Letters in tensor names: B batch, T time, N nodes, S slots of the cache, F width of the chosen layers side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import (
    AutoModelForCausalLM,
    GgufConfig,
    PreTrainedModel,
)

from ..heads import TargetEnds
from ..heads.attention import FEW, repeated
from . import attention
from .cache import TreeCache
from .compiled import Graph
from .facts import fingerprint, norm_and_blocks, target_info
from .families import attention_kinds
from .rounds import TargetOutput
from .sources import locate, refuse_loading_options
from .tree import DraftTree


class Target:
    """A causal LM that is never trained and never changed; one that is loaded here is frozen, in eval mode."""

    def __init__(self, model: PreTrainedModel, name: str = "") -> None:
        """Wrap a loaded model.

        Raises:
            ValueError: an architecture that cannot be asked for trees, with the reason.
        """
        self.model: Any = model  # `generate` is mixed into its class, which no annotation says
        self.config = model.config.get_text_config()
        self.name = name or str(model.config._name_or_path or type(model).__name__)
        self.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.adapter: str | None = None
        """The peft adapter that was merged in."""
        self.max_positions: int = getattr(self.config, "max_position_embeddings", 2**31 - 1)
        self.attention_kinds = self.kinds(model)
        self.flex = model.config._attn_implementation == "flex_attention"
        self.own_attention = attention.usable(model, self.config)
        self.graph: Graph | None = None
        """The compiled forward over a tree; see `compile`."""
        self._states: list[Tensor] = []
        """What a layer's keys and values look like, where prompts are read in that graph too."""
        lm_head = cast(torch.nn.Linear, model.get_output_embeddings())
        self.ends = TargetEnds(model.get_input_embeddings(), lm_head, *norm_and_blocks(model))
        self.info = target_info(self.config, self.name, lm_head.weight.shape[0])

    @staticmethod
    def kinds(model: PreTrainedModel) -> tuple[str, ...]:
        """Which masks the model's layers need; see `attention_kinds`."""
        return attention_kinds(model)

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path | PreTrainedModel,
        dtype: torch.dtype | str = "auto",
        device: str | torch.device | dict[str, Any] | None = None,
        revision: str | None = None,
    ) -> Target:
        """Load a target.

        Args:
            source: a folder, a Hub id, a GGUF file, `package:NAME` for the GGUF file of an installed package, or a
                model that is loaded already.
            dtype: of the weights; "auto" takes the checkpoint's own (float32 for GGUF).
            device: where to, or accelerate's map of modules to devices; None for the first GPU, or the CPU.
            revision: of a Hub id.

        Raises:
            ValueError: nothing to load at `source`, or an architecture that cannot be asked for trees.
        """
        if isinstance(source, PreTrainedModel):
            refuse_loading_options(dtype, device, revision)
            return cls(source)
        folder, gguf = locate(source)
        where = device or ("cuda" if torch.cuda.is_available() else "cpu")
        spread = {"device_map": where} if isinstance(where, dict) else {}
        chosen = torch.float32 if gguf and dtype == "auto" else dtype
        packing = {"quantization_config": GgufConfig(dequantize=True)} if gguf else {}
        try:
            model = AutoModelForCausalLM.from_pretrained(
                folder, gguf_file=gguf, dtype=chosen, revision=revision, **packing, **spread
            )
        except OSError as error:
            raise ValueError(f"no target model at {str(source)!r}: {error}") from error
        placed = cast(torch.nn.Module, model) if isinstance(where, dict) else cast(torch.nn.Module, model).to(where)
        frozen = placed.eval().requires_grad_(False)
        return cls(cast(PreTrainedModel, frozen), str(source))

    def compile(self) -> None:
        """Run forwards over trees in a graph, compiled when one is first asked for; weights must not change then.

        On a CPU prompts are read in that graph too, as chains: its linear layers are faster than eager ones.
        """
        if self.graph is None:
            if self.device.type == "cpu" and self.own_attention:
                token_11, probe = torch.zeros(1, 1, dtype=torch.int64), self.new_cache(1)
                with torch.inference_mode():  # with features: transformers hooks in what shows them, by a lock
                    self.read_chunk(token_11, 1, probe, (-1,), [])
                self._states = probe.states()
            self.graph = Graph(self._run, f"the forward of {self.name!r}", self.device, replay=True)

    def merge_adapter(self, folder: str | Path) -> None:
        """Become the model with a peft adapter merged into its weights: what a jointly trained head drafts for."""
        # Only heads with an adapter need peft, whose import takes a second.
        from peft import PeftModel

        self.origin  # noqa: B018 - of the model before it changes: what a head remembers
        merged = PeftModel.from_pretrained(self.model, str(folder)).merge_and_unload()
        self.model = merged.eval().requires_grad_(False)
        self.adapter = str(Path(folder).resolve())
        if self.graph is not None:  # which holds the weights of before
            self.graph = None
            self.compile()

    @cached_property
    def origin(self) -> dict[str, Any]:
        """What a head remembers of the model that it was trained against."""
        packing = getattr(self.model.config, "quantization_config", None)
        method = getattr(packing, "quant_method", None) or (packing or {}).get("quant_method") if packing else None
        return {
            "target": self.name,
            "revision": getattr(self.model.config, "_commit_hash", None),
            "dtype": str(self.dtype).removeprefix("torch."),
            "quantization": None if method is None else str(getattr(method, "value", method)),
            "weights": fingerprint(self.model),
        }

    @property
    def end_tokens(self) -> frozenset[int]:
        """The tokens at which the model's generation config ends a text."""
        configured = self.model.generation_config.eos_token_id
        listed = configured if isinstance(configured, list) else [configured]
        return frozenset(token for token in listed if token is not None)

    def check_layers(self, layers: tuple[int, ...]) -> None:
        """Refuse feature layers that the model does not show.

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
        """Of keys and values of so many tokens in each row."""
        info, size = self.info, torch.finfo(self.dtype).bits // 8
        return 2 * size * info.num_layers * rows * tokens * info.num_key_value_heads * info.head_dim

    def new_cache(self, batch_size: int) -> TreeCache:
        """An empty cache for this model."""
        return TreeCache(self.info.num_layers, batch_size, self.device, self._states)

    def read_chunk(
        self, tokens_BT: Tensor, longest: int, cache: TreeCache, layers: tuple[int, ...], kept: list[int]
    ) -> TargetOutput:
        """Read the next tokens of right-padded prompts into the cache, which commits all of them, padding too.

        Args:
            tokens_BT: as many of every row.
            longest: length of the longest prompt, for which room is made at once.
            cache: every row as long as the others.
            layers: whose features are wanted.
            kept: the places in the chunk whose logits are wanted.

        Returns:
            logits of the places `kept` (none at all for an empty list), and features of all tokens.
        """
        size = tokens_BT.shape[1]
        cache.place(size, max(longest - size, 0))
        if self.graph is not None and self._states and size > 1:
            return self._read_as_chains(tokens_BT, cache, layers, kept)
        if self.own_attention and self.attention_kinds == ("full_attention",):
            cache.shown, masks = cache.read + size, None
        else:
            slots_S = torch.arange(cache.capacity, device=self.device)
            visible_BTS = slots_S <= cache.slots_BN[..., None]
            masks = self._masks(cache.slots_BN, slots_S.expand(len(tokens_BT), -1), visible_BTS)
        rows = torch.tensor(kept, dtype=torch.int64, device=self.device)
        output = self._ask(self._run, tokens_BT, cache.slots_BN, masks, cache, layers, rows)
        cache.commit(torch.full_like(cache.lengths_B, size))
        cache.read += size
        return output

    def _read_as_chains(
        self, tokens_BT: Tensor, cache: TreeCache, layers: tuple[int, ...], kept: list[int]
    ) -> TargetOutput:
        """`read_chunk` by the graph of the trees: in pieces of no more nodes than a tree may have there."""
        size = tokens_BT.shape[1]
        most = max(FEW // (self.info.num_attention_heads // self.info.num_key_value_heads), 4)
        logits, features, start = [], [], 0
        for piece in tokens_BT.tensor_split(-(-size // most), dim=1):
            # A graph knows its arguments by their strides too, even where there is but one row.
            piece_BN, nodes = piece.flatten().view_as(piece), piece.shape[1]
            # Two places more: none and one would be graphs of their own.
            places_K = torch.tensor([0, 0, *(place - start for place in kept if start <= place < start + nodes)])
            output = self.forward_chain(piece_BN, cache.read, cache, layers, places_K)
            cache.commit(torch.full_like(cache.lengths_B, nodes))
            cache.read += nodes
            logits.append(output.logits_BNV[:, 2:])
            features.append(output.features_BNF)
            start += nodes
        return TargetOutput(torch.cat(logits, dim=1), torch.cat(features, dim=1))

    def forward_tree(self, tree: DraftTree, longest: int, cache: TreeCache, layers: tuple[int, ...]) -> TargetOutput:
        """One forward over all nodes; each sees the cache's committed tokens and its own path.

        The nodes' entries are in the cache afterwards, but not committed: `cache.keep` does that.
        """
        return self.forward_nodes(tree.tokens_BN, tree.ancestors_BNN, tree.depths_BN, longest, cache, layers)

    def forward_chain(
        self,
        tokens_BN: Tensor,
        longest: int,
        cache: TreeCache,
        layers: tuple[int, ...],
        kept_K: Tensor | None = None,
    ) -> TargetOutput:
        """`forward_nodes` over tokens that follow one another."""
        batch, nodes = tokens_BN.shape
        seen_BNN = torch.ones(nodes, nodes, dtype=torch.bool, device=self.device).tril().expand(batch, -1, -1)
        depths_BN = torch.arange(nodes, device=self.device).expand_as(tokens_BN)
        return self.forward_nodes(tokens_BN, seen_BNN, depths_BN, longest, cache, layers, kept_K)

    def forward_nodes(
        self,
        tokens_BN: Tensor,
        seen_BNM: Tensor,
        depths_BM: Tensor,
        longest: int,
        cache: TreeCache,
        layers: tuple[int, ...],
        kept_K: Tensor | None = None,
    ) -> TargetOutput:
        """One forward over the last N of M nodes; the others were written by forwards before, none is committed.

        Args:
            tokens_BN: of the new nodes.
            seen_BNM: which nodes each of them sees, itself too; all see the committed tokens.
            depths_BM: places in the text behind the committed tokens, from 0.
            longest: length of the longest row.
            cache: where entries go.
            layers: whose features are wanted.
            kept_K: the new nodes whose logits are wanted; None for all.
        """
        new, nodes = tokens_BN.shape[1], depths_BM.shape[1]
        cache.place(new, longest, nodes - new)
        positions_BN, masks = self.sight(seen_BNM, depths_BM, cache)
        if kept_K is None:
            kept_K = torch.arange(new, device=self.device)
        given = (tokens_BN, positions_BN, masks, cache, layers, kept_K)
        if self.graph is None or not cache.keys or not len(kept_K):
            return self._ask(self._run, *given)

        def sizes() -> list[tuple[Tensor, int]]:
            nodes_of = [(tensor, i) for tensor in (tokens_BN, positions_BN, cache.slots_BN) for i in (0, 1)]
            every = masks.values() if isinstance(masks, dict) else [masks]
            of_masks = [(mask, i) for mask in every for i in (0, 2, 3) if new > 1 or i != 2]
            return [*nodes_of, *of_masks, (kept_K, 0)]

        kind = (len(cache.lengths_B) == 1, new == 1, layers)
        return self._ask(self.graph, kind, sizes, lambda: [cache], *given)

    def sight(self, seen_BNM: Tensor, depths_BM: Tensor, cache: TreeCache) -> tuple[Tensor, Any]:
        """The positions of the last N of M nodes, and the mask by which they see the committed tokens and nodes."""
        new, nodes = seen_BNM.shape[1:]
        lengths_B1 = cache.lengths_B[:, None]
        # A captured graph is for one shape; elsewhere our attention looks no further than the mask reaches.
        short = self.own_attention and self.device.type == "cpu"
        slots_S = torch.arange(cache.used if short else cache.capacity, device=self.device)
        committed_BNS = (slots_S < lengths_B1)[:, None].expand(-1, new, -1)
        node_of_slot_BS = (slots_S - lengths_B1).clamp(0, nodes - 1)
        is_node_BS = (slots_S >= lengths_B1) & (slots_S < lengths_B1 + nodes)
        on_path_BNS = seen_BNM.gather(2, node_of_slot_BS[:, None].expand(-1, new, -1))
        visible_BNS = committed_BNS | (on_path_BNS & is_node_BS[:, None])
        positions_BN = lengths_B1 + depths_BM[:, nodes - new :]
        slot_positions_BS = torch.where(is_node_BS, lengths_B1 + depths_BM.gather(1, node_of_slot_BS), slots_S)
        return positions_BN, self._masks(positions_BN, slot_positions_BS, visible_BNS)

    @torch.no_grad()
    def read(
        self, tokens_BT: Tensor, layers: tuple[int, ...], positions_BT: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """As `states`, without gradients: what training on a frozen model needs."""
        return self.states(tokens_BT, layers, positions_BT)

    def states(
        self, tokens_BT: Tensor, layers: tuple[int, ...], positions_BT: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Features of whole right-padded sequences, without a cache.

        Args:
            tokens_BT: the rows.
            layers: whose features are wanted.
            positions_BT: of packed rows, starting again at 0 with every sequence, which sees no other; None for rows
                of one sequence.

        Returns:
            features_BTF of `layers`, and last_BTD, the states after the final norm.
        """
        output = self.model(
            input_ids=tokens_BT,
            position_ids=positions_BT,  # transformers makes the mask of packed rows from them
            use_cache=False,
            logits_to_keep=torch.empty(0, dtype=torch.int64, device=self.device),
            output_hidden_states=self._indices((*layers, -1)),
        )
        last_BTD = output.hidden_states[self.info.num_layers].to(self.device)
        return self._features(output.hidden_states, layers, tokens_BT), last_BTD

    def _ask(self, run: Callable[..., tuple[Tensor, Tensor]], *arguments: Any) -> TargetOutput:
        """What `_run` or its graph says; the model's layers call our attention where they can."""
        with attention.attending(self.config) if self.own_attention else nullcontext():
            return TargetOutput(*run(*arguments))

    def _run(
        self,
        tokens_BN: Tensor,
        positions_BN: Tensor,
        masks: Any,
        cache: TreeCache,
        layers: tuple[int, ...],
        logits_to_keep: int | Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Logits and features; a graph if compiled."""
        output = self.model(
            input_ids=tokens_BN,
            attention_mask=masks,
            # Nodes past the last position can never be returned; they only must not break an embedding table.
            position_ids=positions_BN.clamp(max=self.max_positions - 1),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=logits_to_keep,
            output_hidden_states=self._indices(layers) or False,
        )
        return output.logits, self._features(output.hidden_states, layers, tokens_BN)

    def _masks(self, positions_BN: Tensor, slot_positions_BS: Tensor, visible_BNS: Tensor) -> Any:
        """The 4-D mask, or one for each kind of attention where a model alternates between them."""
        masks = {}
        for kind in self.attention_kinds:
            seen_BNS = visible_BNS
            if kind == "sliding_attention":
                window = self.config.sliding_window
                seen_BNS = visible_BNS & (slot_positions_BS[:, None] > positions_BN[..., None] - window)
            masks[kind] = self._block_mask(seen_BNS) if self.flex else self._additive_mask(seen_BNS)
        return masks if len(masks) > 1 else masks[self.attention_kinds[0]]

    def _additive_mask(self, seen_BNS: Tensor) -> Tensor:
        """What sdpa and eager take."""
        lowest = torch.finfo(self.dtype).min
        mask_B1NS = torch.zeros_like(seen_BNS, dtype=self.dtype).masked_fill_(~seen_BNS, lowest)[:, None]
        heads = self.info.num_attention_heads // self.info.num_key_value_heads
        return repeated(mask_B1NS, heads) if self.own_attention else mask_B1NS

    def _block_mask(self, seen_BNS: Tensor) -> BlockMask:
        """What flex attention takes."""

        def seen(row: Tensor, _: Tensor, node: Tensor, slot: Tensor) -> Tensor:
            return seen_BNS[row, node, slot]

        batch, nodes, slots = seen_BNS.shape
        return create_block_mask(seen, batch, None, nodes, slots, device=self.device)

    def _indices(self, layers: tuple[int, ...]) -> list[int]:
        """Our feature layers as transformers' hidden-state indices: the state after block i enters block i + 1."""
        return sorted({self._index(layer) for layer in layers})

    def _index(self, layer: int) -> int:
        return self.info.num_layers if layer == -1 else layer + 1

    def _features(self, hidden_states: Any, layers: tuple[int, ...], tokens_BN: Tensor) -> Tensor:
        if not layers:
            return torch.empty(*tokens_BN.shape, 0, dtype=self.dtype, device=self.device)
        return torch.cat([hidden_states[self._index(layer)].to(self.device) for layer in layers], dim=-1)
