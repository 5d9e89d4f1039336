"""What a draft tree is grown from: a head, or anything that is asked like one, whose state follows the text."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ...heads import DraftHead, TargetInfo, TargetModules
from ...heads.layers.decoder_layer import at_least_fp32
from ...heads.layers.draft_cache import STEP
from ..compiled import cpu_kernels
from ..compiled.cpu_decoder import packed_head
from ..logits import Sampler
from ..tree import DraftTree
from ..tuning.tree_spec import ROOT
from .base import DraftContext, Drafter, PrefillChunk, StepResult
from .draft_model import AssistantModel

if TYPE_CHECKING:
    from ..compiled.graphs import CompiledFunction

READ_TOKENS = 512
"""Tokens that a head is shown at once: its mask has as many rows."""
HELD_TOKENS = 8192
"""Tokens of each row whose features are kept, until drafts are asked for, that a head was not shown yet."""


class DraftModel(Protocol):
    """What a tree is grown from, depth by depth; see `heads.DraftHead` for what each method does.

    A state is what `begin` returns and the others take; it has `select` and `replace`, as `heads.DraftState` has.
    """

    feature_layers: tuple[int, ...]
    reads_from_start: bool
    """Whether `observe` is shown a text's first token too."""
    max_depth: int
    target: TargetInfo

    @property
    def draft_vocab_size(self) -> int:
        """Number of tokens that can be guessed."""

    def begin(self, modules: TargetModules, batch_size: int, capacity: int, max_depth: int, nodes: int) -> Any:
        """An empty state."""

    def observe(self, state: Any, features_BAF: Tensor, next_tokens_BA: Tensor, lengths_B: Tensor) -> Any:
        """Take in what was committed."""

    def expand(self, state: Any, tokens_BW: Tensor, parents_BW: Tensor) -> tuple[Tensor, Any]:
        """Logits of the children of a frontier."""

    def target_tokens(self, draft_tokens: Tensor) -> Tensor:
        """As ids of the target's."""


class NoDraft(Drafter):
    """No guesses: the same engine as plain decoding, one token a round."""

    max_nodes = 1

    def __repr__(self) -> str:
        return "RootOnly()"

    def propose(self, roots_B: Tensor) -> DraftTree:
        """The root alone."""
        return DraftTree.of_shape(ROOT, roots_B[:, None])


@dataclass
class Shared:
    """What a head has seen; several trees of one head may hold the same."""

    state: Any = None
    unread: bool = True
    """Whether nothing was shown yet."""
    waits: bool = False
    """Whether the prompts are shown only when drafts are asked for, for they may never be."""
    prompts: list[PrefillChunk] = field(default_factory=list)
    """Not shown yet."""
    missed: list[PrefillChunk] = field(default_factory=list)
    """Rounds without guesses, one token a row each, that the head is shown when it is asked again, all at once."""

    longest: int = 0
    """Tokens that the head was shown of any row, at most."""

    @property
    def held(self) -> int:
        """Tokens of a row that were not shown yet."""
        return sum(each.tokens_BT.shape[1] for each in self.prompts) + len(self.missed)


class HeadDrafter(Drafter):
    """A head, or another guesser, whose state follows the text; a subclass says what tree is grown from it."""

    def __init__(self, head: DraftModel, modules: TargetModules, depth: int, expanded: int, max_nodes: int) -> None:
        """Hold a head.

        Args:
            head: what guesses.
            modules: the target's embedding and LM head.
            depth: of the deepest tree.
            expanded: nodes whose children are asked for in a round, at most.
            max_nodes: of the largest tree.
        """
        if depth > head.max_depth:
            raise ValueError(f"the tree is {depth} deep, but the head drafts at most {head.max_depth} tokens")
        self.head, self.modules = head, modules
        self.feature_layers = head.feature_layers
        self.depth, self.max_nodes = depth, max_nodes
        self.room = (depth, expanded)
        """Expansions and expanded nodes of a round that a state has room for."""
        self.shared = Shared()
        self._graphs: dict[str, CompiledFunction] = {}
        self._gumbel: Callable[[int], Tensor] | None = None
        self._own_D: Tensor | None = None
        """All that the head can guess, as the target's tokens."""

    def __repr__(self) -> str:
        made = "" if self.kind == "top_k" else ", drawn"
        return f"{type(self).__name__}({type(self.head).__name__}, {self.max_nodes} nodes, depth {self.depth}{made})"

    @property
    def state(self) -> Any:
        """The head's state after all that was written."""
        self._catch_up()
        assert self.shared.state is not None
        return self.shared.state

    def _catch_up(self) -> None:
        """Show the head what it missed: of rounds all but the newest at once, and that one as after any round."""
        prompts, missed = self.shared.prompts, self.shared.missed
        self.shared.prompts, self.shared.missed = [], []
        for prompt in prompts:
            self._show(prompt)
        if len(missed) > 1:
            parts = [(each.tokens_BT, each.next_tokens_BT, each.features_BTF) for each in missed[:-1]]
            tokens_BT, next_BT, features_BTF = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
            count_B = torch.full((len(tokens_BT),), tokens_BT.shape[1], device=tokens_BT.device)
            self._show(PrefillChunk(tokens_BT, next_BT, features_BTF, count_B))
        if missed:
            self._show(missed[-1])

    def begin(self, start: DraftContext) -> None:
        """An empty state."""
        self.shared = Shared(self.head.begin(self.modules, start.batch_size, start.capacity, *self.room))
        self._gumbel = start.gumbel if self.kind == "top_k" else None

    def resume(self, start: DraftContext, kept: PrefillChunk, memory: Any, whole: bool) -> None:
        """The state after what is kept, or all that is kept to be shown again."""
        self.begin(start)
        if memory is None:
            self.read(kept)
            return
        assert isinstance(memory, Shared)
        self.shared = memory
        if not whole:
            self._catch_up()
        read = kept.tokens_BT.shape[1] + self.head.reads_from_start
        cut = None if self.shared.held else read  # what is held lies behind all that was shown
        self.shared.state = self.shared.state.resume(cut, start.capacity)
        self.shared.longest = read if cut is not None else self.shared.longest

    def cache_bytes(self, rows: int, tokens: int) -> int:
        """Of the head's, or the model's, keys and values."""
        return self.head.cache_bytes(rows, tokens) if isinstance(self.head, DraftHead | AssistantModel) else 0

    def memory(self) -> Any:
        """The state, if it can go back, with what was not shown to the head yet."""
        return self.shared if hasattr(self.shared.state, "resume") else None

    def read(self, passage: PrefillChunk) -> None:
        """Show the head a part of the prompts, now or when drafts are asked for."""
        self.shared.prompts.append(passage)
        if not self.shared.waits or self.shared.held > HELD_TOKENS:
            self._catch_up()

    def _show(self, passage: PrefillChunk) -> None:
        """Show the head what the target has read or written."""
        tokens_BT, lengths_B = passage.next_tokens_BT, passage.lengths_B
        if self.shared.unread and self.head.reads_from_start:
            tokens_BT, lengths_B = torch.cat([passage.tokens_BT[:, :1], tokens_BT], dim=1), lengths_B + 1
        for start in range(0, tokens_BT.shape[1], READ_TOKENS):
            part = slice(start, start + READ_TOKENS)
            count_B = (lengths_B - start).clamp(0, READ_TOKENS)
            self._grows_by(len(tokens_BT[0, part]))
            self.shared.state = self.head.observe(
                self.shared.state, passage.features_BTF[:, part], tokens_BT[:, part], count_B
            )
        self.shared.unread = False

    def compile(self) -> None:
        """A graph for the draft, or for each depth where it draws, and one to observe; a second model has its own."""
        if isinstance(self.head, AssistantModel):
            self.head.compile()
            return
        device = self.modules.lm_head.weight.device
        if not isinstance(self.head, DraftHead) or self._graphs:
            return
        if cpu_kernels.serve(device):
            self.head = packed_head(self.head)
        else:
            from ..compiled.graphs import CompiledFunction  # imports torch's compiler

            name = f"the draft of {type(self.head).__name__}"
            self._graphs = {
                "grow": CompiledFunction(self._grow, name, device, replay=True),
                "expand": CompiledFunction(self.head.expand, name, device),
                "observe": CompiledFunction(self.head.observe, name, device),
            }

    def _in_graph(self, name: str, function: Callable[..., Any], shape: Hashable, state: Any, *given: Any) -> Any:
        """A function of a state and of tensors, the first with a row for each of the batch's; a graph if compiled."""
        if not self._graphs:
            return function(state, *given)
        tensors = [(each, 0) for each in given if isinstance(each, Tensor)]
        kind = (len(given[0]) == 1, shape)
        caches = [] if state.cache is None else [state.cache]
        return self._graphs[name](kind, lambda: [*state.sizes(), *tensors], lambda: caches, state, *given)

    def _grow(self, state: Any, roots_B: Tensor, gumbel_BKD: Tensor | None, plan: Any) -> tuple[Tensor, ...]:
        """The tokens of a tree, and the parents of its nodes if they are not known before; a graph if compiled."""
        raise NotImplementedError

    def grown(self, roots_B: Tensor, depth: int, shape: Hashable, plan: Any) -> tuple[Tensor, ...]:
        """As `_grow`, compiled or not; `shape` names the plan."""
        gumbel_BKD = self.gumbel(depth)
        shape = (shape, gumbel_BKD is None)
        return tuple(self._in_graph("grow", self._grow, shape, self.state, roots_B, gumbel_BKD, plan))

    def gumbel(self, depth: int) -> Tensor | None:
        """`DraftContext.gumbel` of as many depths, for the draft's own tokens D; None where nothing is to be added."""
        if self._gumbel is None:
            return None
        gumbel_BKV = self._gumbel(depth)
        if self.head.draft_vocab_size == gumbel_BKV.shape[-1]:
            return gumbel_BKV
        if self._own_D is None or self._own_D.device != gumbel_BKV.device:
            self._own_D = _own_tokens(self.head, gumbel_BKV.device)
        return gumbel_BKV[..., self._own_D]

    def expand(self, depth: int, state: Any, tokens_BW: Tensor, parents_BW: Tensor) -> tuple[Tensor, Any]:
        """As the head's `expand`, compiled or not."""
        shape = (depth, tokens_BW.shape[1])
        logits_BWV, state = self._in_graph("expand", self.head.expand, shape, state, tokens_BW, parents_BW)
        return logits_BWV, state

    def observe(self, finished: StepResult) -> None:
        """Show the head what was accepted."""
        if finished.tree.max_depth == 0:
            lengths_B = finished.verdict.lengths_B
            missed = PrefillChunk(finished.tree.tokens_BN, finished.emitted_BA, finished.features_BAF, lengths_B)
            self.shared.missed.append(missed)
            if self.shared.held > HELD_TOKENS:
                self._catch_up()
            return
        given = (finished.features_BAF, finished.emitted_BA, finished.verdict.lengths_B)
        accepted, state = finished.emitted_BA.shape[1], self.state
        self._grows_by(accepted)
        self.shared.state = self._in_graph("observe", self.head.observe, accepted, state, *given)
        self.shared.longest -= accepted - max(map(len, finished.tokens), default=accepted)

    def _grows_by(self, tokens: int) -> None:
        """So many tokens more are to be shown of each row; a captured graph looks at all that there is room for."""
        self.shared.longest += tokens
        if isinstance(self.head, DraftHead) and not self._graphs and self.shared.state.cache is not None:
            cache = self.shared.state.cache
            cache.attended = cache.nodes + -(-self.shared.longest // STEP) * STEP

    def select(self, rows_R: Tensor) -> None:
        """Go on with these rows."""
        shared = self.shared
        shared.state = shared.state.select(rows_R)
        shared.prompts = [each.select(rows_R) for each in shared.prompts]
        shared.missed = [each.select(rows_R) for each in shared.missed]

    def replace(self, rows_R: Tensor, other: Drafter) -> None:
        """Take over the rows of another one of this head."""
        assert isinstance(other, HeadDrafter)
        self.shared.state = self.state.replace(rows_R, other.state)
        self.shared.longest = max(self.shared.longest, other.shared.longest)
        self._grows_by(0)


def lucky(logits_BWV: Tensor, gumbel_BKV: Tensor | None, depth: int) -> Tensor:
    """Draft logits, moved by the numbers that decide the place at a depth; as they are where there are none."""
    return logits_BWV if gumbel_BKV is None else logits_BWV + gumbel_BKV[:, depth : depth + 1]


def drawn_children(
    head: DraftModel,
    logits_BWV: Tensor,
    frontier: int,
    count: int,
    probs_of: Callable[[Tensor], Tensor],
    draw: Sampler,
    independent: bool = False,
) -> tuple[Tensor, Tensor]:
    """`count` tokens after each node of a frontier, and what they were drawn from.

    They are drawn from among the draft's own tokens: a race of the target's whole vocabulary would take longer than
    the draft. What processors leave to other tokens is not drawn from, and so not in the distribution either.

    Args:
        head: what guesses.
        logits_BWV: its logits; W is 1 if they are the same for the whole frontier.
        frontier: nodes.
        count: of each one's children.
        probs_of: logits over the target's vocabulary to probabilities.
        draw: by which they are drawn.
        independent: whether each is drawn by itself; else none is drawn twice.
    """
    own_D = _own_tokens(head, logits_BWV.device)
    probs_BWD = probs_of(over_target(head, logits_BWV))[..., own_D]
    mass_BW1 = probs_BWD.sum(-1, keepdim=True)
    probs_BWD = torch.where(mass_BW1 > 0, probs_BWD / mass_BW1, 0.0)
    of_node_BWD = probs_BWD.expand(-1, frontier, -1)
    if independent:
        drawn_BWR = draw.categorical(of_node_BWD[:, :, None].expand(-1, -1, count, -1))
    else:
        drawn_BWR = draw.distinct(of_node_BWD, count)
    drawn_from_BWV = _spread(probs_BWD, own_D, head.target.vocab_size, 0.0).expand(-1, frontier, -1)
    return head.target_tokens(drawn_BWR), drawn_from_BWV


def over_target(head: DraftModel, logits_BWV: Tensor) -> Tensor:
    """Draft logits over the target's vocabulary, so that its processors mean the same tokens."""
    return _spread(at_least_fp32(logits_BWV), _own_tokens(head, logits_BWV.device), head.target.vocab_size, -torch.inf)


def _own_tokens(head: DraftModel, device: torch.device) -> Tensor:
    """All that can be guessed, as the target's tokens."""
    return head.target_tokens(torch.arange(head.draft_vocab_size, device=device))


def _spread(values_BWD: Tensor, own_D: Tensor, size: int, otherwise: float) -> Tensor:
    """Values of the draft's own tokens over a vocabulary of a size."""
    whole = values_BWD.new_full((*values_BWD.shape[:-1], size), otherwise)
    whole[..., own_D] = values_BWD
    return whole
