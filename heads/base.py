"""Interface of a draft head, which learns from a frozen target's features to draft its tokens.

Training calls `forward`: the loss, teacher-forced, one term per depth. Decoding calls `begin` once,
then `observe` after the prefill and after every round, and `expand` once per depth of the draft
tree.

Letters in tensor names: B batch, T time, A accepted tokens, W width of the tree's frontier, V
vocabulary, D hidden size, F width of the chosen feature layers side by side, K depths, I ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..options import shown
from .layers.constants import counting
from .layers.draft_cache import DraftCache, KVEntries
from .layers.draft_vocab import check_ids
from .layers.tree_slots import TreeSlots
from .objective import Objective

LONGEST_DRAFT = 1024
"""Most tokens of a draft, far above what a model accepts."""


@dataclass(frozen=True)
class TargetInfo:
    """Dimensions of a target model by their names in a transformers config, saved with every head.

    `hidden_size`, `vocab_size` and `num_layers` decide whether a head fits it.
    """

    name: str
    """Folder, Hub id or file that the target was loaded from."""
    hidden_size: int
    vocab_size: int
    """Number of rows of the LM head."""
    num_layers: int
    """Number of decoder blocks."""
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str
    rms_norm_eps: float
    max_positions: int
    """Tokens of the longest sequence."""
    rope_parameters: dict[str, Any]
    """Rotary embedding with its scaling."""

    def check(self, other: TargetInfo, head: str = "the head") -> None:
        """Refuse `other` if a head trained for this target does not fit it.

        The ValueError names every dimension that differs, and what `head` says of the head.
        """
        # The other dimensions describe the target's own layers, which a head need not share.
        differing = [
            f"{name.replace('_', ' ')} {getattr(self, name)} (head) and {getattr(other, name)}"
            " (target)"
            for name in ("hidden_size", "vocab_size", "num_layers")
            if getattr(self, name) != getattr(other, name)
        ]
        if differing:
            raise ValueError(
                f"{head} was trained for {shown(self.name)} and does not fit {other.name!r}: "
                + "; ".join(differing)
            )


@dataclass(frozen=True)
class TargetModules:
    """The target's own embedding and LM head: frozen, passed in and never registered in a head."""

    embed: Callable[[Tensor], Tensor]
    """Token ids to vectors of width D."""
    lm_head: nn.Linear
    norm: nn.Module
    """The final norm."""
    blocks: Sequence[nn.Module]
    logit_scale: float = 1.0
    """Factor on the LM head's output: Cohere's logit_scale, the inverse of Granite's
    logits_scaling."""
    logit_cap: float | None = None
    """Gemma 2's final_logit_softcapping, which bends logits into (-cap, cap)."""

    def lm_head_rows(self, tokens: Tensor | None) -> Tensor:
        """Scaled rows [tokens, D] of the LM head as starting values; None for all tokens."""
        weight_VD = self.lm_head.weight.detach()
        rows = weight_VD if tokens is None else weight_VD[tokens.to(weight_VD.device)]
        return rows if self.logit_scale == 1 else rows * self.logit_scale

    def logits(
        self, states: Tensor, weight: Tensor | None = None, bias: Tensor | None = None
    ) -> Tensor:
        """Return the target's logits [..., V] for final-norm states [..., D].

        They are cap tanh(scale (W x + b) / cap), or scale (W x + b) without a cap. `weight` and
        `bias` are rows of the LM head; without `weight` it is the LM head itself.
        """
        logits = self.lm_head(states) if weight is None else F.linear(states, weight, bias)
        if self.logit_scale != 1:
            logits = logits * self.logit_scale
        if self.logit_cap is not None:
            logits = self.logit_cap * (logits / self.logit_cap).tanh()
        return logits


@dataclass(frozen=True)
class TargetFeatures:
    """One training batch of conversations, with the states of the frozen target."""

    features_BTF: Tensor
    """The chosen layers' residual streams, side by side."""
    last_BTD: Tensor
    """The state after the final norm."""
    tokens_BT: Tensor
    loss_mask_BT: Tensor
    """True at the tokens of the assistant. On the CPU, so that counting draft positions waits for
    no accelerator."""
    modules: TargetModules
    positions_BT: Tensor | None = None
    """Position of each token in its sequence where rows are packed; None where every row is one
    sequence."""

    documents_BT: Tensor | None = None
    """Number of each token's sequence where rows are packed, None where every row is one. On the
    CPU, as loss_mask_BT is; `sequences_BT` has the same numbers where the tokens are."""

    @property
    def position_ids_BT(self) -> Tensor:
        """Position of each token in its sequence, packed or not."""
        if self.positions_BT is not None:
            return self.positions_BT
        column_T = torch.arange(self.tokens_BT.shape[1], device=self.tokens_BT.device)
        return column_T.expand_as(self.tokens_BT)

    @property
    def sequences_BT(self) -> Tensor | None:
        """Number of each token's sequence in a packed row; None where every row is one sequence."""
        # A sequence begins at position 0: positions [0, 1, 2, 0, 1] give numbers [1, 1, 1, 2, 2].
        return None if self.positions_BT is None else (self.positions_BT == 0).cumsum(1)

    def next_tokens_BT(self, step: int) -> Tensor:
        """Return the token at t + 1 + step for each t: training-time test reads it at `step`."""
        time = self.tokens_BT.shape[1]
        column_T = torch.arange(time, device=self.tokens_BT.device)
        # Past the end, where no draft is judged, the last token stands for the next ones. With
        # T = 4, step 1 reads columns [2, 3, 3, 3].
        return self.tokens_BT[:, (column_T + 1 + step).clamp(max=time - 1)]


class HeadOutput(NamedTuple):
    """The loss of one batch and the counts from which every reported mean is made.

    A tuple, so that engines that shard a head (FSDP2) find the tensors that need gradients. All are
    sums over positions, so that batches, accumulation steps and ranks add up before anything is
    divided.
    """

    loss: Tensor
    """Weighted sum over depths and positions; the trainer divides by the number of answer
    tokens."""
    losses_K: Tensor
    """The unweighted loss summed over positions, per depth."""
    counts_K: Tensor
    """Positions at which each depth was judged."""
    hits_KI: Tensor
    """Positions at which the true token was the head's i-th best."""


@dataclass(frozen=True)
class CheckpointMetadata:
    """All that a checkpoint holds in addition to a head's weights and options."""

    tree: str | list[list[int]] | None = None
    """The fastest draft tree found for it: paths of ranks, or a spec such as dynamic:24:6:8; None
    if unknown."""
    training: dict[str, Any] = field(default_factory=dict)
    """The resolved training config, git revision and package versions."""
    measured: dict[str, Any] = field(default_factory=dict)
    """Acceptance as evaluation measured it, by tree."""
    provenance: dict[str, Any] = field(default_factory=dict)
    """The target, tokenizer and chat template that it was trained against: see
    `save_load.differences`."""
    adapted: bool = False
    """Whether it drafts for the target with the peft adapter that lies in the checkpoint."""


@dataclass(frozen=True)
class DraftState:
    """State that a head carries from `observe` through the `expand` calls of a round.

    Each head adds its own fields: tensors with the batch first, and tokens committed so far as
    `lengths_B`.
    """

    modules: TargetModules
    depth: int
    """Depth of the tree at which the next `expand` call drafts children, counted from 0 at the
    root."""
    confidence_BW: Tensor | None = field(default=None, kw_only=True)
    """Logits of a head's own estimate of its acceptance rate after each node of the frontier, if it
    makes one."""
    cache: DraftCache | None = field(default=None, kw_only=True)

    def select(self, rows_R: Tensor) -> Self:
        """The state of some rows."""
        # Every tensor of a state, of a subclass too, has the batch first.
        chosen: dict[str, Any] = {
            name: value[rows_R] for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        if self.cache is not None:
            chosen["cache"] = self.cache.select(rows_R)
        return replace(self, **chosen)

    def replace(self, rows_R: Tensor, other: Self) -> Self:
        """Return the state with some rows replaced by another's, both after `observe`.

        The cache changes in place.
        """
        changed: dict[str, Any] = {
            name: value.index_copy(0, rows_R, getattr(other, name))
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        if self.cache is not None and other.cache is not None:
            self.cache.replace(rows_R, other.cache)
        return replace(self, **changed)

    def resume(self, tokens: int | None, capacity: int) -> Self:
        """Return the state cropped to each row's first `tokens`, with room for `capacity` tokens.

        If `tokens` is None, all tokens are kept. The next call is `observe`. A head whose state
        depends on more of the text than `lengths_B` and the cache overrides this.
        """
        changed: dict[str, Any] = {}
        if self.cache is not None:
            changed["cache"] = self.cache.resized(capacity)
        if tokens is not None and "lengths_B" in vars(self):
            changed["lengths_B"] = vars(self)["lengths_B"].clamp(max=tokens)
        return replace(self, **changed)


@dataclass(frozen=True)
class DraftTreeState(DraftState):
    """State of a head whose layers read their own outputs: EAGLE's, EAGLE-3's, MTP's.

    `observe` runs the layers on the committed tokens and keeps the last output, from which the
    root's children are drafted. Each `expand` below the root runs them on a frontier, whose nodes
    attend to the committed tokens and to their own path.
    """

    cache: DraftCache = field(kw_only=True)
    lengths_B: Tensor
    """Committed tokens of each row."""
    hidden_BWD: Tensor
    """Outputs of the frontier; at the root the last committed one."""
    paths_BWN: Tensor
    """True at the cached nodes on the path to each frontier node."""
    nodes: int = 0
    """Nodes in the cache since the last `observe`."""
    first_B: Tensor | None = None
    """With a window: the first position of each row that the cache holds."""

    def resume(self, tokens: int | None, capacity: int) -> Self:
        """Return the cropped state, as `DraftState.resume` does.

        With a window, it also lacks the tokens whose cache slots the discarded tokens had
        overwritten.
        """
        resumed = super().resume(tokens, capacity)
        if self.cache.window is None or tokens is None:
            return resumed
        assert self.first_B is not None
        # The ring surely holds the newest window - 1 tokens before the crop, and nothing older
        # than `first_B`. With 10 tokens and a window of 4: positions 7, 8 and 9.
        held_B = torch.maximum(self.first_B, self.lengths_B - self.cache.window + 1)
        cropped_B = resumed.lengths_B < self.lengths_B
        # Cropped to 8 tokens, the row still has position 7; cropped to 5, it has no token left.
        first_B = torch.where(cropped_B, torch.minimum(held_B, resumed.lengths_B), self.first_B)
        return replace(resumed, first_B=first_B)

    def committed(self, out_BAD: Tensor, lengths_B: Tensor) -> DraftTreeState:
        """Return the state at the root after the layers have run on new tokens.

        Row b commits the first `lengths_B[b]` of them.
        """
        # The output at each row's newest token: index 2 of A for a row that commits 3. Clamped for
        # a row that commits nothing.
        last_B11 = (lengths_B - 1).clamp(min=0)[:, None, None]
        return replace(
            self,
            depth=0,
            nodes=0,
            lengths_B=self.lengths_B + lengths_B,
            hidden_BWD=out_BAD.gather(1, last_B11.expand(-1, 1, out_BAD.shape[-1])),
            # The root is a committed token: no cached node is on its path.
            paths_BWN=torch.zeros_like(self.paths_BWN[:, :1]),
        )

    def below(self, parents_BW: Tensor) -> tuple[Tensor, KVEntries, DraftTreeState]:
        """Return the positions [B, W], the KV view and the state of a frontier below this one.

        The state still lacks the frontier's outputs.
        """
        cache = self.cache
        device = parents_BW.device
        width = parents_BW.shape[1]

        # 1. The new nodes take the next free slots. Each is on its own path: with 2 nodes cached
        #    and a frontier of 2, rows [0, 0, 1, 0, ...] and [0, 0, 0, 1, ...].
        itself_WN = counting(cache.nodes, device) == counting(
            width, device, self.nodes, column=True
        )
        # 2. The rest of a path is that of the parent.
        parents_BWN = parents_BW[:, :, None].expand(-1, -1, cache.nodes)
        paths_BWN = self.paths_BWN.gather(1, parents_BWN) | itself_WN
        # 3. All nodes of a frontier have the same position. The committed tokens, the root last,
        #    have positions 0 to lengths_B - 1; the root's children, at depth 1, follow.
        positions_BW = (self.lengths_B[:, None] + self.depth - 1).expand_as(parents_BW)
        state = replace(self, nodes=self.nodes + width, paths_BWN=paths_BWN)

        # 4. What the nodes see: their paths, and the committed tokens.
        if cache.by_slots:
            sees = TreeSlots(paths_BWN, self.lengths_B, text_slot=cache.nodes, node_slot=0)
            return positions_BW, KVEntries(cache, None, None, self.nodes, sees=sees), state
        if cache.window is None:
            text_slot_S = counting(cache.attended_slots - cache.nodes, device)
            text_B1S = (text_slot_S < self.lengths_B[:, None])[:, None]
        else:
            text_B1S = cache.window_mask(self.lengths_B, positions_BW[:, :1], self.first_B)
        # Slots of nodes come first in the cache, then those of the text.
        mask_BWS = torch.cat([paths_BWN, text_B1S.expand(-1, width, -1)], dim=-1)
        return positions_BW, KVEntries(cache, mask_BWS, None, self.nodes), state


class DraftHead(nn.Module, ABC):
    """A draft head: a subclass with its config dataclass, and a row in `HEADS`."""

    config_class: ClassVar[type[Any]]
    max_depth: int
    feature_layers: tuple[int, ...]
    """Residual streams after these blocks, counted from 0; -1 is the state after the final norm."""
    reads_from_start: bool = False
    """Whether `observe` reads a text's first token too; otherwise each token comes with the feature
    before it."""
    recompute: bool = False
    """Activation checkpointing: recompute each step of training-time test, if any, in the backward
    pass."""

    shape: Any = None
    """`LayerShape` of the decoder layers, if any."""
    token_map: Tensor | None
    """Sorted target ids of the draft vocabulary, by draft id; None for all tokens."""
    vocabulary_layers: tuple[str, ...] = ()
    """Modules whose weights have a row for each token of the draft vocabulary."""
    served_names: tuple[str, ...] = ()
    """Tensors of a published checkpoint that the head itself shares with the target: its LM head,
    for servers."""
    cached_layers: int = 0
    """Decoder layers with a KV cache while decoding."""
    window: int | None = None
    """Newest positions that its layers see, a token's own included; None for all of the text."""
    whole_layers: bool = True
    """Whether the head calls its decoder layers by `forward` only, so that a kernel may replace
    it."""
    attends_by_slots: ClassVar[bool] = False
    """Whether its layers see what `DraftCache.commit` and `DraftTreeState.below` say and nothing
    else, so that these may say it by slots instead of by a mask."""
    computes: ClassVar[tuple[str, ...]] = ()
    """Options that change what the same weights compute: a head that starts from another must have
    the same values."""
    estimates_acceptance: bool = False
    """Whether `expand` leaves an estimate of its tokens' acceptance rate in the state, as
    `confidence_BW`."""

    metadata: CheckpointMetadata | None = None
    """Set on a head that was loaded from a checkpoint."""
    folder: Path | None = None
    """The checkpoint from which it was loaded."""

    def __init__(self, config: Any, target: TargetInfo) -> None:
        super().__init__()
        self.config = config
        self.target = target
        size = getattr(config, "draft_vocab_size", None)
        if size is not None and not 1 <= size <= target.vocab_size:
            raise ValueError(
                f"draft_vocab_size {size} is out of range: the target's vocabulary has"
                f" {target.vocab_size} tokens; choose from 1 to that, or null for all of them"
            )
        self.draft_vocab_size: int = size or target.vocab_size
        """Number of tokens that the head can draft."""
        self.unread_by: dict[str, str] = {}
        """Servers (vllm, sglang, llama.cpp) that cannot read this head, with the reason, for its
        model card."""
        # torch does not save a buffer that is None.
        self.register_buffer("token_map", None)

    @abstractmethod
    def initialize(self, modules: TargetModules, token_counts_V: Tensor) -> None:
        """Take starting values from the target, once, before training.

        `token_counts_V` holds the frequency of each token in the answers of the training data.
        """

    @classmethod
    def options_for(cls, options: dict[str, Any], target_config: dict[str, Any]) -> dict[str, Any]:
        """Return a new head's options, completed by values of the target's text config.

        These are values that `TargetInfo` does not have.
        """
        return options

    @classmethod
    def default_objective(cls, config: Any) -> Objective:
        """Return the objective for this config, unless the training options name another."""
        return Objective()

    @classmethod
    def extra_losses(cls, config: Any) -> tuple[str, ...]:
        """Name the `objective.NEED_HEAD` losses that a head with this config can train on."""
        return ()

    @abstractmethod
    def forward(
        self, features: TargetFeatures, objective: Objective | None = None, ranks: int = 1
    ) -> HeadOutput:
        """The teacher-forced loss of a batch, by `default_objective` if none is given.

        Counts how often the true token was among the `ranks` best drafts.
        """

    def begin(
        self, modules: TargetModules, batch_size: int, capacity: int, max_depth: int, nodes: int
    ) -> DraftState:
        """Return a draft state without committed tokens.

        It is a `DraftTreeState`; a head with a different state overrides this. A row commits at
        most `capacity` tokens; a round makes at most `max_depth` calls of `expand`, for at most
        `nodes` nodes together.
        """
        like = next(self.parameters())  # for dtype and device
        zeros_B = torch.zeros(batch_size, dtype=torch.int64, device=like.device)
        return DraftTreeState(
            modules,
            depth=0,
            cache=self.empty_cache(batch_size, nodes, capacity),
            lengths_B=zeros_B,
            first_B=None if self.window is None else zeros_B.clone(),
            hidden_BWD=like.new_zeros(batch_size, 1, self.shape.hidden_size),
            paths_BWN=torch.zeros(batch_size, 1, nodes, dtype=torch.bool, device=like.device),
        )

    @abstractmethod
    def observe(
        self, state: DraftState, features_BAF: Tensor, next_tokens_BA: Tensor, lengths_B: Tensor
    ) -> DraftState:
        """Commit tokens with their features, and discard the drafts of the round.

        The feature at position t is paired with the token at t + 1. Called with each chunk of the
        prefill, and with the accepted path after every round. Row b commits its first
        `lengths_B[b]` tokens, which may be none.
        """

    @abstractmethod
    def expand(
        self, state: DraftState, tokens_BW: Tensor, parents_BW: Tensor
    ) -> tuple[Tensor, DraftState]:
        """Draft the children of a frontier of nodes.

        Args:
            state: after `observe` for the root, after the previous `expand` for deeper nodes.
            tokens_BW: the frontier's tokens; W is 1 at the root.
            parents_BW: index of each node's parent in the previous frontier; -1 at the root.

        Returns:
            logits_BWV over the draft vocabulary, with W = 1 from a head that does not see the path,
            and the state
            for the next depth.
        """

    @abstractmethod
    def server_config(self) -> dict[str, Any]:
        """Keys of config.json by which servers read this head."""

    def check_loaded(self) -> None:
        """Refuse weights of the right shapes with impossible values.

        Raises:
            ValueError: a draft vocabulary that is not made of sorted target ids.
        """
        if self.token_map is not None:
            check_ids(self.token_map, self.target.vocab_size, "token_map")

    def empty_cache(self, batch_size: int, nodes: int, capacity: int) -> DraftCache:
        """Return a KV cache for `nodes` drafts and `capacity` committed tokens in each row.

        It has the head's dtype.
        """
        slots = nodes + DraftCache.slots_for(capacity, self.window)
        size = (batch_size, self.shape.num_key_value_heads, slots, self.shape.head_dim)
        like = next(self.parameters())
        keys = [like.new_zeros(size) for _ in range(self.cached_layers)]
        values = [like.new_zeros(size) for _ in range(self.cached_layers)]
        return DraftCache(nodes, keys, values, window=self.window)

    def cache_bytes(self, rows: int, tokens: int) -> int:
        """Bytes of KV cache for `rows` x `tokens`."""
        if not self.cached_layers:
            return 0
        width = self.shape.num_key_value_heads * self.shape.head_dim
        slots = DraftCache.slots_for(tokens, self.window)
        element_bytes = next(self.parameters()).element_size()
        # 2: keys and values
        return 2 * self.cached_layers * rows * slots * width * element_bytes

    def target_tokens(self, draft_tokens: Tensor) -> Tensor:
        """Draft ids to target ids."""
        return draft_tokens if self.token_map is None else self.token_map[draft_tokens]

    def vocabulary(self) -> Tensor:
        """Target ids of all tokens that the head can draft, sorted."""
        return self.target_tokens(
            torch.arange(self.draft_vocab_size, device=next(self.parameters()).device)
        )


class OffsetVocabularyHead(DraftHead):
    """A head that saves its draft vocabulary, if any, as servers read it: `d2t` and `t2d`."""

    vocabulary_layers: tuple[str, ...] = ("lm_head",)
    d2t: Tensor
    """Difference of target id and draft id, by draft id."""
    t2d: Tensor
    """True at the target ids of the draft vocabulary."""

    def __init__(self, config: Any, target: TargetInfo) -> None:
        super().__init__(config, target)
        if config.draft_vocab_size is not None:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
            self.register_buffer("t2d", torch.arange(target.vocab_size) < config.draft_vocab_size)

    @property
    def vocabulary_V(self) -> Tensor | None:
        """Sorted target ids of the draft vocabulary; None for all of them."""
        if self.config.draft_vocab_size is None:
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def choose_vocabulary(self, chosen_V: Tensor) -> None:
        """Take these sorted target ids."""
        chosen_V = chosen_V.to(self.d2t.device)
        # Target ids [0, 3, 4] give d2t [0, 2, 2]: draft id 1 is target id 1 + 2.
        self.d2t.copy_(chosen_V - torch.arange(len(chosen_V), device=chosen_V.device))
        self.t2d.zero_()[chosen_V] = True

    def check_loaded(self) -> None:
        ids_V = self.vocabulary_V
        if ids_V is not None:
            check_ids(ids_V, self.target.vocab_size, "d2t")
            if not torch.equal(self.t2d.nonzero()[:, 0], ids_V):
                raise ValueError("d2t and t2d name different tokens")

    def target_tokens(self, draft_tokens: Tensor) -> Tensor:
        if self.config.draft_vocab_size is None:
            return draft_tokens
        return draft_tokens + self.d2t[draft_tokens]


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as users and configs write it: float32 for torch.float32."""
    return str(dtype).removeprefix("torch.")
