"""A draft model that follows a batch's text: the state of each row, and what is still unread.

Only this object calls a head's `begin` and `observe`. Several trees of one head share it, each of
which expands the state that `catch_up` returns.

A head reads pairs: the target's features at a token, and the token after it. After the prompt [5,
7, 9], to which the target adds 4, it reads (features at 5, 7), (features at 7, 9) and (features at
9, 4), and drafts what follows 4. The pairs that it has not read yet are pending:

    chunks    of the prompts, if the head reads them late
    steps     of rounds without drafts, one pair of each row

Its life in a generation:

    begin, or resume    an empty state, or that of a conversation which goes on
    prefill             prompts wait, unread
    round ─┬─ catch_up  what waits is read at once
           ├─ expand    a draft, level by level; the state stays what it was
           └─ observe   the round's tokens are read, or wait where nothing was drafted
    select, replace     rows have ended; others take their slots
    saved_state         what a conversation keeps

Letters in tensor names: B batch, T time, A accepted, W frontier, R selected rows, D tokens of the
draft vocabulary, V of the target's.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self, cast

import torch
from torch import Tensor

from ...heads.base import DraftHead, DraftState, TargetModules
from ...heads.layers.draft_cache import MOST_NEW_TOKENS, STEP, DraftCache
from ...heads.layers.tree_slots import has_tree_kernel
from ..engines.base import Engine, Runner
from .base import DraftContext, PrefillChunk
from .draft_model import AssistantModel
from .round import Round

CHUNK_TOKENS = MOST_NEW_TOKENS
"""Tokens that a head reads at once: its attention mask has as many rows."""
PENDING_TOKENS = 8192
"""Tokens of each row whose features are kept, at most, for a head that has not read them yet."""

ExpandState = Any
"""State of a draft model: a `heads.DraftState`, or a dataclass of the model's own with `select` and
`replace`."""
DraftModel = DraftHead | AssistantModel
"""Next-token logits, depth by depth: a head, or a smaller model with the part of its interface
that drafting needs."""
Watcher = Callable[[Tensor, Tensor, Tensor], None]
"""Shown each expansion: tokens [B, W], parents [B, W] and logits [B, W, D]."""


@dataclass
class Progress:
    """A model's state, and the part of the text that it has not read yet."""

    state: ExpandState = None
    empty: bool = True
    """Whether the model has read nothing yet."""
    chunks: list[PrefillChunk] = field(default_factory=list)
    """Prompts to read."""
    steps: list[PrefillChunk] = field(default_factory=list)
    """Tokens of rounds without drafts, one of each row, to read at once."""
    longest: int = 0
    """Tokens that the model has read of any row, at most."""
    skipped: int = 0
    """Tokens before the first one that the model has read, in a batch of one row."""
    ahead: tuple[Tensor, int] | None = None
    """The lengths [B] of a round that was observed ahead, and `longest` before it; None after its
    `observe`."""
    noted: PrefillChunk | None = None
    """The pairs of such a round if it is a plain step; they go to `steps` at its `observe`."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of a row in `chunks`."""
        return sum(chunk.tokens_BT.shape[1] for chunk in self.chunks)

    @property
    def pending(self) -> int:
        """Tokens of a row in `chunks` and `steps`."""
        return self.prompt_tokens + len(self.steps)


class DraftModelState:
    """A draft model and its state of each row."""

    def __init__(self, model: DraftModel, modules: TargetModules) -> None:
        """Hold a model, from whose state trees grow."""
        self.model = model
        self.modules = modules
        self.depth = 0
        """Expansions of its deepest tree."""
        self.expanded = 0
        """Nodes that its largest tree expands."""
        self.read_last = enough_to_read(model)
        """How many last tokens of a prompt the model reads, as its window sees no more; None for
        all. Positions then count from the first of these. Rotary embeddings see distances only, so
        they do not notice."""
        self.lazy = self.read_last is not None
        """Whether prompts are read only when drafts are needed, which may be never, or when other
        rows join the batch."""
        self.progress = Progress()
        self.runner = Runner()
        self._engine: Engine | None = None
        """The target's engine, which runs the head; None if the head runs by itself."""
        self._caches: dict[Any, DraftCache] = {}
        """By shape, caches of earlier generations, to be used again where they lie."""
        self._draft_vocab_D: Tensor | None = None
        """The result of `draft_vocab`, kept."""
        self._watcher: Watcher | None = None

    def make_room(self, depth: int, expanded: int) -> None:
        """Serve a tree, too, that takes `depth` expansions, of `expanded` nodes in all."""
        self.depth = max(self.depth, depth)
        self.expanded = max(self.expanded, expanded)

    def read_when_needed(self) -> None:
        """Be lazy from now on."""
        self.lazy = True

    def fresh(self) -> Self:
        """The same model for other rows."""
        other = copy.copy(self)
        other.progress = Progress()
        # Both are in use at the same time: a cache of one must not be taken by the other.
        other._caches = {}
        other._watcher = None
        return other

    def use(self, engine: Engine) -> None:
        """Draft as the target's engine runs functions and heads, from the next generation on."""
        if engine is self._engine:
            return
        self._engine = engine
        if isinstance(self.model, DraftHead):
            self.model = engine.draft_head(self.model)
            # The target's LM head, which the head drafts with, as the engine runs it.
            lm_head = cast(Any, engine.lm_head)
            self.modules = dataclasses.replace(self.modules, lm_head=lm_head)
            # Inside a replayed draft nothing can be shown to a watcher.
            self.runner = engine.runner if self._watcher is None else Runner()
        elif isinstance(self.model, AssistantModel):
            self.model.model.compile(engine.mode)

    def renew(self, force: bool = False) -> None:
        """Before a generation, copy changed weights again where copies draft.

        With `force` the weights are copied in any case.
        """
        if isinstance(self.model, AssistantModel):
            if force:
                self.model.model.refresh()
            self.model.model.renew()
        elif isinstance(self.model, DraftHead) and self._engine is not None:
            self._engine.renew_head(self.model, force)

    def cache_bytes(self, rows: int, tokens: int) -> int:
        """Bytes of device memory that are allocated for the state of `rows` × `tokens`."""
        if isinstance(self.model, AssistantModel):
            assistant = self.model.model
            return assistant.cache_bytes(rows, assistant.engine.cache_slots(tokens))
        if isinstance(self.model, DraftHead):
            return self.model.cache_bytes(rows, self.runner.rounded_capacity(tokens))
        return 0

    @property
    def unread(self) -> int:
        """Tokens of a row that the model would read before it drafts."""
        progress = self.progress
        if self.read_last is None or not progress.empty:
            return progress.pending
        # Before the model has read anything, the prompt is cut to its last `read_last` tokens.
        return min(progress.prompt_tokens, self.read_last) + len(progress.steps)

    def begin(self, context: DraftContext) -> None:
        """Forget the last generation and begin another."""
        capacity = self.runner.rounded_capacity(context.capacity)
        state = self.model.begin(
            self.modules, context.batch_size, capacity, self.depth, self.expanded
        )
        self.progress = Progress(self._in_a_known_cache(state))

    def _in_a_known_cache(self, state: ExpandState) -> ExpandState:
        """Return the state with the cache of an earlier generation, if one fits.

        Recorded functions read a cache where it lies.
        """
        if not self.runner.replays or not isinstance(state, DraftState) or state.cache is None:
            return state
        shape = (state.cache.nodes, *(states.shape for states in state.cache.keys))
        cache = self._caches.setdefault(shape, state.cache)
        # Old entries stay in it: the state's lengths, 0, say that none of them counts.
        cache.attended = None
        cache.by_slots = self._attends_by_slots(cache)
        return dataclasses.replace(state, cache=cache)

    def _attends_by_slots(self, cache: DraftCache) -> bool:
        """Whether the head attends without a mask: one recording then serves all text lengths."""
        if (
            not isinstance(self.model, DraftHead)
            or not self.model.attends_by_slots
            or cache.window is not None
        ):
            return False
        states = cache.keys[0]  # of the first layer; the last dimension is a key's width
        return has_tree_kernel(states.device, states.dtype, states.shape[3])

    def resume(self, context: DraftContext, kept: PrefillChunk, state: Any, whole: bool) -> None:
        """Begin a generation whose text starts like an earlier one's; see `BatchDrafter.resume`."""
        # 1. Without a state the text is read again, by a model that needs no features.
        self.begin(context)
        if state is None:
            self.prefill(kept)
            return
        # 2. Pending tokens may lie after the shared part: read them first, so that the state alone
        #    has to be cropped.
        assert isinstance(state, Progress)
        self.progress = state
        if not whole:
            self.catch_up()
        # 3. The length to crop to, in entries of the model's own cache: one more for a model that
        #    reads the first token by itself, fewer by the tokens that it never read.
        tokens = kept.tokens_BT.shape[1] + self.model.reads_from_start
        self.progress.skipped = min(self.progress.skipped, tokens)
        tokens -= self.progress.skipped
        # 4. With tokens still pending the whole text goes on, and nothing is cropped.
        if self.progress.pending:
            self.progress.state = self.progress.state.resume(None, context.capacity)
        else:
            self.progress.state = self.progress.state.resume(tokens, context.capacity)
            self.progress.longest = tokens

    def saved_state(self) -> Progress | None:
        """State from which a later generation can `resume`; None if the model keeps none."""
        self._caches = {}  # the next generation must not write to the cache of this state
        return self.progress if hasattr(self.progress.state, "resume") else None

    def prefill(self, chunk: PrefillChunk) -> None:
        """Read a chunk of the prompts, or keep it to be read later."""
        self._join_steps()  # steps of a conversation's previous turn
        self.progress.chunks.append(chunk)
        # Skipping may free enough; if not, even a lazy model reads now.
        if self.progress.pending > PENDING_TOKENS:
            self._skip()
        if not self.lazy or self.progress.pending > PENDING_TOKENS:
            self.catch_up()

    def observe(self, finished: Round) -> None:
        """Read what a round emitted.

        Tokens of rounds without drafts are kept, to be read at once.
        """
        # 1. A round without the model's drafts: keep its pairs.
        if not self._drafted(finished):
            pairs = self.progress.noted or self._pairs(finished)
            self.progress.noted = None
            self._keep(pairs, max(map(len, finished.tokens), default=1))
            return
        # 2. Read the round, unless the device does so already (`observe_ahead`).
        if self.progress.ahead is None:
            self._commit(finished)
        self.progress.ahead = None
        # 3. `_commit` counted A tokens for the longest row, as if all were accepted. The host knows
        #    now how many were: of A = 5, with rows of 2 and 3 tokens, 2 are taken off again.
        most = finished.verdict.emitted_BA.shape[1]
        self.progress.longest -= most - max(map(len, finished.tokens), default=most)

    def _drafted(self, finished: Round) -> bool:
        """Whether a round's drafts may be the model's: before it drafts, it reads what waits."""
        return finished.drafted and not (self.progress.chunks or self.progress.steps)

    def _keep(self, pairs: PrefillChunk, most: int) -> None:
        """Keep the pairs of a round, up to `most` of a row, to be read later."""
        if pairs.tokens_BT.shape[1] > most:  # drafts of others, of which some were rejected
            pairs = pairs.of((slice(None), slice(most)), pairs.lengths_B.clamp(max=most))
        if most == 1:
            self.progress.steps.append(pairs)
        else:
            # Rows with different numbers of tokens: a chunk, after the steps so far.
            self._join_steps()
            self.progress.chunks.append(pairs)
        if self.progress.pending > PENDING_TOKENS:
            self.catch_up()

    def _join_steps(self) -> None:
        """Make a chunk of the steps, so that another may follow in the order of the text."""
        if self.progress.steps:
            self.progress.chunks.append(joined_chunks(self.progress.steps))
            self.progress.steps = []

    def _pairs(self, finished: Round) -> PrefillChunk:
        """The pairs of a round, as many of each row as it has accepted nodes."""
        verdict = finished.verdict
        # Copies: a replayed target overwrites its outputs.
        return PrefillChunk(
            self.runner.keep(finished.verified.tokens_BN.gather(1, verdict.path_BA)),
            self.runner.keep(verdict.emitted_BA),
            self.runner.keep(verdict.features_BAF),
            self.runner.keep(verdict.lengths_B),
        )

    def _commit(self, finished: Round) -> None:
        """Run the model on what a round accepted.

        The host does not know the rows' new lengths yet: `longest` grows by as many tokens as a row
        may have got.
        """
        verdict = finished.verdict
        state = self.catch_up()
        self._extend(verdict.emitted_BA.shape[1])
        accepted = (verdict.features_BAF, verdict.emitted_BA, verdict.lengths_B)
        self.progress.state = self.runner(self.model.observe, (), state, *accepted)

    def observe_ahead(self, finished: Round) -> None:
        """Run the model on what a round accepted, before its tokens are known on the host."""
        if not isinstance(self.model, DraftHead):
            return
        if not self._drafted(finished):
            self.progress.noted = self._pairs(finished)
            return
        self.progress.ahead = finished.verdict.lengths_B, self.progress.longest
        self._commit(finished)

    def take_back(self) -> None:
        """Forget the tokens of `observe_ahead`.

        Only the lengths go back. Everything else in a head's state is overwritten by the tokens
        that it observes next, of which each row gets at least one.
        """
        self.progress.noted = None
        if self.progress.ahead is None:
            return
        lengths_B, self.progress.longest = self.progress.ahead
        self.progress.ahead = None
        state = self.progress.state
        if hasattr(state, "lengths_B"):
            self.progress.state = dataclasses.replace(state, lengths_B=state.lengths_B - lengths_B)

    def catch_up(self) -> ExpandState:
        """The model's state after it has read everything that is pending, or its last part."""
        # 1. Leave out what the model's window would not see.
        if self.progress.chunks:
            self._skip()
        # 2. The prompts, then the steps, in the order of the text.
        chunks = self.progress.chunks
        steps = self.progress.steps
        self.progress.chunks = []
        self.progress.steps = []
        for chunk in chunks:
            self.read(chunk)
        # The newest step is read alone: the state then has the same shape, one token of each row,
        # however many steps there were.
        if len(steps) > 1:
            self.read(joined_chunks(steps[:-1]))
        if steps:
            self.read(steps[-1])
        return self.progress.state

    def _skip(self) -> None:
        """Skip the prompt tokens before the last `read_last`, if none of them has been read.

        For example, two rows have 5 and 3 tokens in chunks of 4 and 1, and `read_last` is 2:

            chunk lengths_B    left to skip    skipped here    left_B after
            [4, 3]             [3, 1]          [3, 1]          [0, 0]
            [1, 0]             [0, 0]          [0, 0]          [0, 0]
        """
        progress = self.progress
        if self.read_last is None or not progress.empty:
            return
        if progress.prompt_tokens <= self.read_last:
            return
        lengths_B = torch.stack([chunk.lengths_B for chunk in progress.chunks]).sum(0)
        left_B = (lengths_B - self.read_last).clamp(min=0)
        progress.skipped += int(left_B[0])  # sync: once a prompt
        chunks = []
        for chunk in progress.chunks:
            rest = without_first(chunk, torch.minimum(left_B, chunk.lengths_B))
            left_B = (left_B - chunk.lengths_B).clamp(min=0)
            if rest.tokens_BT.shape[1] > 0:
                chunks.append(rest)
        progress.chunks = chunks

    def read(self, chunk: PrefillChunk) -> None:
        """Run the model on a chunk, at most `CHUNK_TOKENS` of each row at a time."""
        tokens_BT = chunk.next_tokens_BT
        lengths_B = chunk.lengths_B
        # A draft model of its own needs the first token, too, which is nobody's successor.
        if self.progress.empty and self.model.reads_from_start:
            tokens_BT = torch.cat([chunk.tokens_BT[:, :1], tokens_BT], dim=1)
            lengths_B = lengths_B + 1
        for start in range(0, tokens_BT.shape[1], CHUNK_TOKENS):
            part = slice(start, start + CHUNK_TOKENS)
            count_B = (lengths_B - start).clamp(0, CHUNK_TOKENS)  # valid tokens of this part
            part_BA = tokens_BT[:, part]
            self._extend(part_BA.shape[1])
            inputs = (self.progress.state, chunk.features_BTF[:, part], part_BA, count_B)
            self.progress.state = self.runner.run_unrecorded(self.model.observe, *inputs)
        self.progress.empty = False

    def _extend(self, tokens: int) -> None:
        """Let the head attend to `tokens` more slots of its cache."""
        self.progress.longest += tokens
        cache = getattr(self.progress.state, "cache", None)
        if not isinstance(cache, DraftCache) or cache.by_slots:
            return
        # Rounded up to a multiple of STEP, so that shapes change rarely. A recording serves one
        # shape, so where rounds are replayed the steps are larger still.
        attended = -(-self.progress.longest // STEP) * STEP
        if self.runner.replays:
            attended = self.runner.rounded_capacity(attended) + 1
        # The first `nodes` slots hold the tree that is being drafted, the others the text.
        cache.attended = min(cache.nodes + attended, cache.slots)

    def select(self, rows_R: Tensor) -> None:
        """Keep these rows only, in this order."""
        progress = self.progress
        # The batch grows: the new rows are copies that others are about to replace. Read now what
        # is pending, or the head would later read the copies' prompts, too.
        if progress.chunks and len(rows_R) > len(progress.chunks[0].lengths_B):
            self.catch_up()
        progress.state = progress.state.select(rows_R)
        progress.chunks = [chunk.of(rows_R, chunk.lengths_B[rows_R]) for chunk in progress.chunks]
        progress.steps = [step.of(rows_R, step.lengths_B[rows_R]) for step in progress.steps]

    def replace(self, rows_R: Tensor, other: DraftModelState) -> None:
        """Overwrite these rows by those of `other`."""
        theirs = other.catch_up()
        self.progress.state = self.catch_up().replace(rows_R, theirs)
        self.progress.longest = max(self.progress.longest, other.progress.longest)
        self._extend(0)  # a new row may be longer than all others

    def expand(
        self, state: ExpandState, tokens_BW: Tensor, parents_BW: Tensor
    ) -> tuple[Tensor, ExpandState]:
        """Return logits [B, W, D] after each node of a frontier, and the state with it."""
        logits_BWD, state = self.model.expand(state, tokens_BW, parents_BW)
        if self._watcher is not None:
            self._watcher(tokens_BW, parents_BW, logits_BWD)
        return logits_BWD, state

    @contextmanager
    def watched(self, watcher: Watcher) -> Iterator[None]:
        """Show every expansion to `watcher`.

        Meanwhile no drafts are replayed: nothing inside a replayed draft can be shown.
        """
        self.runner = Runner()
        self._watcher = watcher
        try:
            yield
        finally:
            self._watcher = None
            if self._engine is not None and isinstance(self.model, DraftHead):
                self.runner = self._engine.runner

    def draft_vocab(self, device: torch.device) -> Tensor:
        """The draft vocabulary as the target's tokens [D]."""
        if self._draft_vocab_D is None or self._draft_vocab_D.device != device:
            drafted_D = torch.arange(self.model.draft_vocab_size, device=device)
            self._draft_vocab_D = self.model.target_tokens(drafted_D)
        return self._draft_vocab_D


def enough_to_read(model: DraftModel) -> int | None:
    """Return how many last tokens of a text decide all drafts after it.

    None if the model has no sliding window. Each layer sees `window` tokens of the layer below it,
    a token's own included: with windows of 4, one layer sees 4 tokens, two layers 7, three 10.
    """
    if not isinstance(model, DraftHead) or model.window is None:
        return None
    return model.cached_layers * (model.window - 1) + 1


def without_first(chunk: PrefillChunk, counts_B: Tensor) -> PrefillChunk:
    """A chunk without the first tokens of each row, `counts_B` of them."""
    lengths_B = chunk.lengths_B - counts_B
    longest = int(lengths_B.max())  # sync: once a prompt
    # Row b takes the positions counts_B[b], counts_B[b] + 1, ...: with counts [3, 1] and 2 tokens
    # left at most, [[3, 4], [1, 2]]. Positions after a row's end are clamped; they are padding.
    positions_BT = counts_B[:, None] + torch.arange(longest, device=counts_B.device)
    positions_BT = positions_BT.clamp(max=chunk.tokens_BT.shape[1] - 1)
    rows_B1 = torch.arange(len(counts_B), device=counts_B.device)[:, None]
    return chunk.of((rows_B1, positions_BT), lengths_B)


def joined_chunks(chunks: list[PrefillChunk]) -> PrefillChunk:
    """Join chunks of one token a row.

    A row that became idle has no token in the last ones, so its tokens come first.
    """
    tokens_BT = torch.cat([chunk.tokens_BT for chunk in chunks], dim=1)
    next_BT = torch.cat([chunk.next_tokens_BT for chunk in chunks], dim=1)
    features_BTF = torch.cat([chunk.features_BTF for chunk in chunks], dim=1)
    count_B = torch.stack([chunk.lengths_B for chunk in chunks]).sum(0)
    return PrefillChunk(tokens_BT, next_BT, features_BTF, count_B)
