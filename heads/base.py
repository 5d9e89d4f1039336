"""What every draft head is: a module that learns from a frozen target's features and guesses its next tokens.

Training calls `forward` (the loss, teacher-forced, one term per depth). Decoding calls `begin` once, then
`observe` after the prefill and after every round, and `expand` once per depth of the tree that is grown.

Letters in tensor names: B batch, T time, A accepted tokens, W width of the tree's frontier, V vocabulary,
D hidden size, F width of the chosen feature layers side by side, K depths, I ranks.
"""

from __future__ import annotations

import dataclasses
import tempfile
import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Self, runtime_checkable

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from .checkpoints.save_load import CheckpointMetadata


@dataclass(frozen=True)
class TargetInfo:
    """The facts of a target model that decide whether a head fits it; saved with every head."""

    name: str
    """Folder, Hub id or file that the target was loaded from."""
    hidden_size: int
    """Width of the residual stream."""
    vocab_size: int
    """Number of rows of the LM head."""
    num_layers: int
    """Number of decoder blocks."""
    intermediate_size: int
    """Width of the blocks' MLPs."""
    num_attention_heads: int
    """Query heads of a block."""
    num_key_value_heads: int
    """Key and value heads of a block."""
    head_dim: int
    """Width of one of them."""
    hidden_act: str
    """Activation of the MLPs, by transformers' word."""
    rms_norm_eps: float
    """Added to variances under the root."""
    max_positions: int
    """Longest text."""
    rope_parameters: dict[str, Any]
    """Rotary embedding with its scaling, as in a transformers config."""

    def check(self, other: TargetInfo) -> None:
        """Refuse a target that a head for `self` cannot read.

        Raises:
            ValueError: naming every dimension that differs, with both values.
        """
        differing = [
            f"{name.replace('_', ' ')} {getattr(self, name)} (head) and {getattr(other, name)} (target)"
            for name in ("hidden_size", "vocab_size", "num_layers")
            if getattr(self, name) != getattr(other, name)
        ]
        if differing:
            raise ValueError(
                f"the head was trained for {self.name!r} and does not fit {other.name!r}: " + "; ".join(differing)
            )


@dataclass(frozen=True)
class TargetModules:
    """The target's own embedding and LM head: frozen, passed in and never registered in a head."""

    embed: Callable[[Tensor], Tensor]
    """Token ids to vectors of width D."""
    lm_head: nn.Linear
    """Final-norm states of width D to logits over V."""
    norm: nn.Module
    """The final norm."""
    blocks: Sequence[nn.Module]
    """The decoder blocks, which a head may start from."""
    logit_scale: float = 1.0
    """Factor of what the LM head gives: Cohere's logit_scale, the inverse of Granite's logits_scaling."""
    logit_cap: float | None = None
    """Gemma 2's final_logit_softcapping: logits are bent into (-cap, cap)."""

    def lm_head_rows(self, tokens: Tensor | None) -> Tensor:
        """Scaled rows [tokens, D] of the LM head, from which a head's own one starts; None for all tokens."""
        weight_VD = self.lm_head.weight.detach()
        rows = weight_VD if tokens is None else weight_VD[tokens.to(weight_VD.device)]
        return rows if self.logit_scale == 1 else rows * self.logit_scale

    def logits(self, states: Tensor) -> Tensor:
        """Final-norm states [..., D] to the target's logits [..., V]: cap tanh(scale (W x + b) / cap)."""
        return self.scaled(self.lm_head(states))

    def scaled(self, products: Tensor) -> Tensor:
        """What the LM head gave, [..., V], as logits."""
        logits = products if self.logit_scale == 1 else products * self.logit_scale
        return logits if self.logit_cap is None else self.logit_cap * (logits / self.logit_cap).tanh()


@dataclass(frozen=True)
class TargetFeatures:
    """What a head trains on: one batch of conversations, seen by the frozen target."""

    features_BTF: Tensor
    """The chosen layers' residual streams, side by side."""
    last_BTD: Tensor
    """The state after the final norm."""
    tokens_BT: Tensor
    loss_mask_BT: Tensor
    """True where the token is one that the assistant wrote. On the CPU: how many drafts there are to judge is asked of
    it, and an accelerator would have to be waited for."""
    modules: TargetModules
    positions_BT: Tensor | None = None
    """Of packed rows: each token's place in its own sequence, from 0. None where every row is one sequence."""

    @property
    def places_BT(self) -> Tensor:
        """Each token's position, packed or not."""
        if self.positions_BT is not None:
            return self.positions_BT
        return torch.arange(self.tokens_BT.shape[1], device=self.tokens_BT.device).expand_as(self.tokens_BT)

    def tokens_after(self, places: int) -> Tensor:
        """The token so many places further on; past the end, where no draft is judged, the last one."""
        place_T = torch.arange(self.tokens_BT.shape[1], device=self.tokens_BT.device)
        return self.tokens_BT[:, (place_T + places).clamp(max=len(place_T) - 1)]

    @property
    def sequences_BT(self) -> Tensor | None:
        """Of packed rows: the number of the sequence that each token is of."""
        return None if self.positions_BT is None else (self.positions_BT == 0).cumsum(1)


class HeadOutput(NamedTuple):
    """The loss of one batch and the counts from which every reported mean is made.

    A tuple, in which engines that shard a head (FSDP2) find the tensors that its backward starts from. All are
    sums over positions, so that batches, accumulation steps and ranks add up before anything is divided.
    """

    loss: Tensor
    """Weighted sum over depths and positions; the trainer divides by the number of answer tokens."""
    losses_K: Tensor
    """The unweighted loss summed over positions, per depth."""
    counts_K: Tensor
    """How many positions each depth was judged on."""
    hits_KI: Tensor
    """How often the true token was the head's i-th best."""


@runtime_checkable
class BatchCache(Protocol):
    """A part of a draft state that holds rows of the batch in its own way."""

    def select(self, rows_R: Tensor) -> BatchCache:
        """The same with these rows only."""

    def replace(self, rows_R: Tensor, other: BatchCache) -> None:
        """Put the rows of another one, as large, in the places of these."""

    def show(self, tokens: int) -> None:
        """There are no more than so many tokens in any row: nothing behind them need be looked at."""

    def resized(self, capacity: int) -> BatchCache:
        """With room for so many tokens of each row, or as it is if it has that."""

    def sizes(self) -> list[tuple[Tensor, int]]:
        """Its tensors, with the dimensions whose size differs between generations."""


@dataclass(frozen=True)
class DraftState:
    """What a head carries from `observe` through the `expand` calls of one round; each head adds its own fields."""

    modules: TargetModules
    depth: int
    """Depth of the tree at which the next `expand` call draws children, counted from 0 at the root."""
    max_depth: int
    """How many `expand` calls a round makes at most."""

    def select(self, rows_R: Tensor) -> Self:
        """The state of these rows only: all tensors have a row of the batch first, and caches select for themselves."""
        chosen: dict[str, Any] = {}
        for name in (field.name for field in dataclasses.fields(self)):
            value = getattr(self, name)
            if isinstance(value, Tensor):
                chosen[name] = value[rows_R]
            elif isinstance(value, BatchCache):
                chosen[name] = value.select(rows_R)
        return dataclasses.replace(self, **chosen)

    def resume(self, tokens: int | None, capacity: int) -> Self:
        """The state of a text that goes on, when it had so many tokens (None: all), with room for `capacity`.

        More is shown to it before it drafts. A state that keeps more of a text than `lengths_B` and caches says how it
        goes back.
        """
        changed: dict[str, Any] = {}
        for name in (field.name for field in dataclasses.fields(self)):
            value = getattr(self, name)
            if isinstance(value, BatchCache):
                changed[name] = value.resized(capacity)
            elif name == "lengths_B" and tokens is not None:
                changed[name] = value.clamp(max=tokens)
        return dataclasses.replace(self, **changed)

    def sizes(self) -> list[tuple[Tensor, int]]:
        """All tensors but those of caches, with the dimension whose size differs between generations: rows."""
        return [(value, 0) for value in self._values() if isinstance(value, Tensor)]

    def caches(self) -> list[BatchCache]:
        """What is written to in place."""
        return [value for value in self._values() if isinstance(value, BatchCache)]

    def _values(self) -> list[Any]:
        return [getattr(self, field.name) for field in dataclasses.fields(self)]

    def replace(self, rows_R: Tensor, other: Self) -> Self:
        """The state with another one's rows in the places of these, both right after an `observe`."""
        changed: dict[str, Any] = {}
        for name in (field.name for field in dataclasses.fields(self)):
            value, theirs = getattr(self, name), getattr(other, name)
            if isinstance(value, Tensor):
                changed[name] = value.index_copy(0, rows_R, theirs)
            elif isinstance(value, BatchCache):
                value.replace(rows_R, theirs)
        return dataclasses.replace(self, **changed)


class DraftHead(nn.Module, ABC):
    """A draft head: see the module's docstring for who calls what.

    A new head is one subclass with its config dataclass, and one row in `HEADS`.
    """

    config_class: ClassVar[type[Any]]
    max_depth: int
    feature_layers: tuple[int, ...]
    """Residual streams after these blocks, counted from 0; -1 is the state after the final norm."""
    reads_from_start: bool = False
    """A head is shown every token with the feature before it, hence not a text's first token."""
    recompute: bool = False
    """Whether training computes activations again in the backward pass instead of keeping them; heads that feed on
    their own outputs, whose activations grow with every step of training-time test, heed it."""

    shape: Any = None
    """The `LayerShape` of its decoder layers, where it has some."""
    cached_layers: int = 0
    """Decoder layers whose keys and values it keeps while decoding."""

    metadata: CheckpointMetadata | None = None
    """What travels with a head that was loaded."""

    def __init__(self, config: Any, target: TargetInfo) -> None:
        super().__init__()
        self.config = config
        self.target = target

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        *,
        revision: str | None = None,
        token: str | None = None,
        cache_dir: str | Path | None = None,
    ) -> Self:
        """A head from a folder or a Hub id, by huggingface_hub's names; see `checkpoint.load_head`.

        Raises:
            ValueError: as there, or a head of another class; `DraftHead.from_pretrained` takes any.
        """
        from .checkpoints.save_load import load_head  # which knows every head, this one too

        head, metadata = load_head(source, revision=revision, token=token, cache_dir=cache_dir)
        if not isinstance(head, cls):
            raise ValueError(f"{str(source)!r} holds a {type(head).__name__}, not a {cls.__name__}")
        head.metadata = metadata
        return head

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Write a checkpoint; see `checkpoint.save_head`.

        Raises:
            ValueError: a head that belongs to an adapter, which is not here.
        """
        from .checkpoints.save_load import CheckpointMetadata, save_head

        if self.metadata is not None and self.metadata.adapted:
            raise ValueError("this head drafts for a model with an adapter, which lies in its folder: copy that")
        save_head(self, save_directory, self.metadata or CheckpointMetadata())

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | None = None,
        branch: str | None = None,
        create_pr: bool = False,
        commit_message: str = "A draft head",
    ) -> str:
        """Save and upload as one commit; its address. `headstart push` also adds what servers need of the target."""
        from .checkpoints.hub import push_folder
        from .checkpoints.model_card import Listing
        from .checkpoints.save_load import publishable

        with tempfile.TemporaryDirectory() as scratch:
            self.save_pretrained(Path(scratch) / "saved")
            publishable(Path(scratch) / "saved", Path(scratch) / "head", Listing(repo_id), {})
            return push_folder(Path(scratch) / "head", repo_id, private, token, branch, create_pr, commit_message)

    @abstractmethod
    def initialize(self, modules: TargetModules, token_counts_V: Tensor) -> None:
        """Take starting values from the target, once, before training.

        Args:
            modules: the target's embedding and LM head.
            token_counts_V: how often each token is an answer token of the training data.
        """

    @abstractmethod
    def forward(self, features: TargetFeatures, ranks: int = 1) -> HeadOutput:
        """The teacher-forced loss and hit counts of a batch; `ranks` is how many best tokens are counted as hits."""

    @abstractmethod
    def begin(self, modules: TargetModules, batch_size: int, capacity: int, max_depth: int, nodes: int) -> DraftState:
        """An empty draft state.

        Args:
            modules: the target's embedding and LM head.
            batch_size: rows.
            capacity: tokens that a row may come to hold.
            max_depth: expansions of a round, at most.
            nodes: nodes that a round expands, all depths together, at most.
        """

    @abstractmethod
    def observe(self, state: DraftState, features_BAF: Tensor, next_tokens_BA: Tensor, lengths_B: Tensor) -> DraftState:
        """Take in the tokens that were committed: the feature at position t with the token at t + 1.

        Called with the prompts, passage by passage, and with the accepted path after every round. Rows commit
        different numbers of tokens: row b's first `lengths_B[b]` count, which are none in passages behind a prompt's
        end. What earlier `expand` calls guessed is forgotten.
        """

    @abstractmethod
    def expand(self, state: DraftState, tokens_BW: Tensor, parents_BW: Tensor) -> tuple[Tensor, DraftState]:
        """Logits of the children of a frontier of nodes.

        Args:
            state: after `observe` for the root, after the previous `expand` for deeper nodes.
            tokens_BW: the frontier's tokens; W is 1 at the root.
            parents_BW: for each, the index of its parent in the previous frontier; -1 at the root.

        Returns:
            logits_BWV over the draft vocabulary (see `target_tokens`), with W = 1 from a head that does not see
            the path, and the state for the next depth.
        """

    @abstractmethod
    def server_config(self) -> dict[str, Any]:
        """The keys of config.json by which serving engines read this head."""

    def unread_by(self) -> dict[str, str]:
        """The servers (vllm, sglang) that do not read this head, and why: for its model card."""
        return {}

    @property
    def served_names(self) -> tuple[str, ...]:
        """Tensors that servers look for and the head shares with the target: its LM head, in a file that was pushed."""
        return ()

    def check_loaded(self) -> None:
        """Refuse weights that fit and cannot be meant.

        Raises:
            ValueError: a draft vocabulary that is none.
        """

    def cache_bytes(self, rows: int, tokens: int) -> int:
        """Bytes of its keys and values for `rows` x `tokens`."""
        if not self.cached_layers:
            return 0
        width = self.shape.num_key_value_heads * self.shape.head_dim
        return 2 * self.cached_layers * rows * tokens * width * next(self.parameters()).element_size()

    def target_tokens(self, draft_tokens: Tensor) -> Tensor:
        """Ids of the draft vocabulary as ids of the target's; a head with a truncated vocabulary overrides it."""
        return draft_tokens

    @property
    def draft_vocab_size(self) -> int:
        """Number of tokens that the head can draft."""
        return self.target.vocab_size


def build_config(config_class: type[Any], options: dict[str, Any], where: str) -> Any:
    """A dataclass from a mapping, with every unknown key refused by name.

    Raises:
        ValueError: an unknown key, or a value that the dataclass refuses.
    """
    known = [field.name for field in dataclasses.fields(config_class)]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(f"unknown {where} option {unknown[0]!r}; choose from {', '.join(sorted(known))}")
    for name, hint in typing.get_type_hints(config_class).items():
        if name in options and not _fits(options[name], hint):
            raise ValueError(f"{where} option {name!r} is of type {hint}, not {options[name]!r}")
    return config_class(**options)


def _fits(value: Any, hint: Any) -> bool:
    if isinstance(hint, types.UnionType):
        return any(_fits(value, kind) for kind in typing.get_args(hint))
    if hint in (int, float) and isinstance(value, bool):
        return False
    if hint is float:
        return isinstance(value, (int, float))
    return isinstance(value, hint) if isinstance(hint, type) else True


def dtype_name(dtype: torch.dtype) -> str:
    """A number format as users and configs write it: float32 for torch.float32."""
    return str(dtype).removeprefix("torch.")


def at_least_fp32(tensor: Tensor) -> Tensor:
    """At least float32: 16-bit formats are widened, float64 stays."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
