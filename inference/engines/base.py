"""The interface of an engine, which runs the forwards of one target.

Letters in tensor names: B batch, T time, N nodes, K chosen nodes, V vocabulary, D hidden size, F
width of the chosen layers' features side by side.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...heads.base import DraftHead
from ..cache.kv_cache import Growth, StateShape, TreeCache, slots_for
from ..targets.prompt_inputs import position_offsets
from ..targets.target_model import TargetModel
from ..trees.tree import DraftTree, NewNodes

LEAST_PADDING = 2048
"""Minimum padding tokens that an extra prefill forward must save, where launching a forward is what
takes time."""
PADDING_ON_CPU = 64
"""The same on a CPU, where launching one costs little."""

WITHOUT_PLANS = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
"""All kernels but cuDNN's, which builds a plan of 20 to 80 ms for every new shape: shapes of
prompts keep changing."""


@dataclass(frozen=True)
class TargetOutput:
    """The target's logits and features at every node of a tree."""

    logits_BNV: Tensor
    """In float32 at least."""
    features_BNF: Tensor


def kernels_without_plans() -> AbstractContextManager[Any]:
    """In the block, let attention be computed by kernels that start at once for a new shape."""
    return sdpa_kernel([*WITHOUT_PLANS]) if torch.cuda.is_initialized() else nullcontext()


class Runner:
    """Runs functions of tensors: drafts, the acceptance rule, forwards. This one calls them.

    It lets attention be computed by kernels for shapes that keep changing.
    """

    replays = False
    """Whether results lie where the next call of the same function writes its own; see `keep`."""

    def __call__(self, function: Callable[..., Any], fixed: tuple[Any, ...], *inputs: Any) -> Any:
        """Return `function(*fixed, *inputs)`.

        Args:
            function: reads and writes nothing but its arguments, and decides nothing by the values
                of tensors.
            fixed: arguments whose memory stays at one address from call to call, such as a KV
                cache; they may be written in place.
            inputs: tensors, or dataclasses, lists and tuples with tensors in them.
        """
        return self.run_unrecorded(function, *fixed, *inputs)

    def run_unrecorded(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """Return `function(*inputs)` for input shapes that rarely recur, such as prompts'."""
        with kernels_without_plans():
            return function(*inputs)

    def rounded_capacity(self, tokens: int) -> int:
        """Capacity of a cache for so many tokens."""
        return tokens

    def rounded_rows(self, rows: int) -> int:
        """Rows that a batch should have if `rows` are still being decoded; the others are idle."""
        return rows

    def keep(self, tensor: Tensor) -> Tensor:
        """Make a result last beyond the next call of its function."""
        return tensor

    def as_it_is(self) -> AbstractContextManager[Any]:
        """Run functions directly in the block, without replaying recordings.

        It serves a generation nested in another one, whose results must stay valid.
        """
        return nullcontext()

    def forget(self) -> None:
        """Drop what was recorded, because weights have changed."""


class Engine(ABC):
    """Runs the forwards of a target, over caches that it makes itself.

    A prompt goes through `read_chunk`, or `read_prompt` with images. Then every round is one
    `forward_tree`, after which the loop commits the accepted path in the cache.
    """

    name: str
    """What the speed of its forwards depends on besides model and device."""
    pads_prompts = True
    """Whether prompts of different lengths may be read together, the shorter ones padded."""
    copies_weights = False
    """Whether it holds a copy of the weights, which must be renewed when the model's change."""
    chains_only = False
    """Whether it checks chains of tokens and no trees that branch."""
    one_row = False
    """Whether it decodes one row at a time."""
    features_are_free = False
    """Whether a forward returns features without the hidden states of the user's model."""
    growth: Growth = "buckets"
    """How the capacity of its caches grows."""

    def __init__(self, target: TargetModel) -> None:
        self.target = target
        self.runner = Runner()
        on_cpu = target.device.type == "cpu"
        self.least_padding = PADDING_ON_CPU if on_cpu else LEAST_PADDING
        self.mode = False
        """The argument by which `chosen_engine` chose it, set by the target."""

    @property
    def model(self) -> Any:
        """The transformers model that runs; the target may hold the user's weakly."""
        return self.target.model

    @property
    @abstractmethod
    def state_shapes(self) -> list[StateShape]:
        """Shapes of each layer's keys, then of the values."""

    @property
    @abstractmethod
    def lm_head(self) -> nn.Module:
        """The target's LM head, as it runs here."""

    def new_cache(self, batch_size: int, tokens: int = 0, rows: int = 0) -> TreeCache:
        """An empty KV cache; the arguments are those of `TreeCache`."""
        target = self.target
        return TreeCache(
            self.state_shapes, batch_size, target.device, tokens, rows, target.pool, self.growth
        )

    def cache_slots(self, tokens: int) -> int:
        """Slots that are allocated for a row of so many tokens, a tree after them included."""
        return slots_for(tokens, self.growth)

    @abstractmethod
    def logits(self, states: Tensor) -> Tensor:
        """Return the logits [..., V] of features [..., D] of layer -1.

        See `TargetModel.computes_logits`.
        """

    @abstractmethod
    def read_chunk(
        self,
        tokens_BT: Tensor,
        longest: int,
        cache: TreeCache,
        layers: tuple[int, ...],
        kept: list[int],
    ) -> TargetOutput:
        """Prefill: read the next tokens of right-padded prompts and commit all, padding included.

        Returns the logits of the positions `kept` in the chunk, and the features of all its tokens.
        The cache makes room for the `longest` prompt at once.
        """

    def read_prompt(
        self,
        tokens_1T: Tensor,
        cache: TreeCache,
        layers: tuple[int, ...],
        kept: list[int],
        inputs: dict[str, Any],
    ) -> TargetOutput:
        """Read one whole prompt by the model's own forward, which makes its masks and positions.

        Returns what `read_chunk` does. `inputs` are those that `model.generate` prepared; see
        `targets.prompt_inputs`.
        """
        # 1. Show the model an empty cache, with room for the prompt.
        target = self.target
        size = tokens_1T.shape[1]
        cache.reserve(size, 0)
        cache.follow(0, size)

        # 2. Let the model prepare its inputs as for the first step of `generate`.
        kept_K = torch.tensor(kept, dtype=torch.int64, device=target.device)
        arguments = {**inputs, "use_cache": True, target.cache_interface.name: cache}
        arguments["logits_to_keep"] = kept_K
        prepared = self.model.prepare_inputs_for_generation(
            tokens_1T, is_first_iteration=True, **arguments
        )
        indices = target.hidden_state_indices(layers)
        output = self.model(**prepared, output_hidden_states=sorted(set(indices)) or False)
        logits = kept_logits(output.logits, kept_K)

        # 3. An image may take fewer positions than tokens: note by how much later positions shift.
        cache.position_offsets = position_offsets(prepared.get("position_ids"), size)
        cache.advance_prompt(size)
        return TargetOutput(logits, features_of(target, output, layers, tokens_1T))

    def forward_tree(
        self, tree: DraftTree, longest: int, cache: TreeCache, layers: tuple[int, ...]
    ) -> TargetOutput:
        """One forward over all nodes; each attends to the committed tokens and its own path.

        The nodes' entries are written to the cache; `cache.accept` commits them. The longest row
        has `longest` committed tokens.
        """
        return self.forward_nodes(NewNodes.of_tree(tree), longest, cache, layers)

    @abstractmethod
    def forward_nodes(
        self,
        nodes: NewNodes,
        longest: int,
        cache: TreeCache,
        layers: tuple[int, ...],
        kept_K: Tensor | None = None,
    ) -> TargetOutput:
        """One forward over new uncommitted nodes, after those that are in the cache already.

        The longest row has `longest` committed tokens. Returns the logits of the new nodes
        `kept_K`, None for all.
        """

    def forward_chain(
        self,
        tokens_BN: Tensor,
        longest: int,
        cache: TreeCache,
        layers: tuple[int, ...],
        kept_K: Tensor | None = None,
    ) -> TargetOutput:
        """One forward over a chain of tokens after the committed ones; see `forward_nodes`."""
        return self.forward_nodes(NewNodes.of_chain(tokens_BN), longest, cache, layers, kept_K)

    def draft_head(self, head: DraftHead) -> DraftHead:
        """A head as it drafts here."""
        return head

    def renew_head(self, head: DraftHead, force: bool = False) -> None:
        """Update what derives from the weights of a `draft_head`.

        This happens if the weights have changed, or with `force`.
        """
        assert not self.copies_weights


def features_of(
    target: TargetModel, output: Any, layers: tuple[int, ...], tokens_BN: Tensor
) -> Tensor:
    """Return features [B, N, F] of these layers, from a forward's hidden states.

    The forward was over `tokens_BN`.
    """
    states = []
    for layer, index in zip(layers, target.hidden_state_indices(layers), strict=True):
        state = output.hidden_states[index]
        states.append((target.last_features(state) if layer == -1 else state).to(target.device))
    if states:
        return torch.cat(states, dim=-1)
    return torch.empty(*tokens_BN.shape, 0, dtype=target.dtype, device=target.device)


def kept_logits(logits_BNV: Tensor, kept: int | Tensor) -> Tensor:
    """Return the logits that `logits_to_keep` asks for, even if the forward lacks that argument."""
    nodes = logits_BNV.shape[1]
    if isinstance(kept, int):  # the last `kept` nodes; 0 for all
        return logits_BNV if kept in (0, nodes) or kept > nodes else logits_BNV[:, -kept:]
    # Indices. As many logits as indices: the forward has chosen them already.
    return logits_BNV if nodes == len(kept) else logits_BNV[:, kept]
