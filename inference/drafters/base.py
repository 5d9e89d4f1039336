"""What passes between the parts of a generation: the prompt, a round's tree, output and verdict, and who drafts.

Letters in tensor names: B batch, T time, A accepted, N nodes, R rows that go on, V vocabulary, F width of the chosen
layers side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...heads.layers.draft_cache import counting
from ..logits import Sampler
from ..target import TargetOutput
from ..tree import DraftTree
from ..tuning.tree_spec import TreeKind
from ..verify import VerifyResult


@dataclass(frozen=True)
class DraftContext:
    """What a drafter is told when a generation begins."""

    batch_size: int
    capacity: int
    """Tokens that a row may come to hold: the longest prompt, all new tokens, and a tree beyond them."""
    draw: Sampler
    """Where random drafts come from."""
    draft_probs: Callable[[Tensor], Tensor] | None
    """Draft logits [..., V] to the probabilities to draw from, at the user's settings; None for greedy decoding."""
    gumbel: Callable[[int], Tensor] | None = None
    """Of a sampled text, that is decided by numbers of each place: what to add to the draft logits of the next `count`
    places, [B, count, V]. The best tokens then are the likeliest to be drawn. None where drafts cannot know."""


@dataclass(frozen=True)
class PrefillChunk:
    """Some tokens of the prompts, as the target has just read them."""

    tokens_BT: Tensor
    next_tokens_BT: Tensor
    """For each token the one that follows it."""
    features_BTF: Tensor
    lengths_B: Tensor
    """How many tokens of each row count; 0 where a prompt has ended before."""

    def select(self, rows_R: Tensor) -> PrefillChunk:
        """These rows of it."""
        return PrefillChunk(*(tensor[rows_R] for tensor in vars(self).values()))

    def newest(self, before: Sequence[int]) -> list[int]:
        """Each row's last token on the host, which waits for it; `before` of a row of which nothing counts."""
        # sync: once for 2048 tokens of the prompts
        rows = zip(self.next_tokens_BT.tolist(), self.lengths_B.tolist(), before, strict=True)
        return [tokens[length - 1] if length else last for tokens, length, last in rows]


@dataclass(frozen=True)
class StepResult:
    """A finished round, for a drafter to learn from."""

    tree: DraftTree
    output: TargetOutput
    verdict: VerifyResult
    emitted_BA: Tensor
    """The tokens that the round emits: for each of `path_BA`'s nodes, the token that follows it."""
    features_BAF: Tensor
    """The accepted nodes' features."""
    finite_BA: Tensor
    """Whether the accepted nodes' scores allow any token, and are numbers."""
    tokens: Sequence[list[int]] = ()
    """On the host, of each row: the tokens that the round emits, without padding. Read with all else that the host
    needs of a round, in one wait."""
    asked: Sequence[list[int]] = ()
    """On the host, of each row: what the drafter's `asks` gave."""

    @classmethod
    def of(cls, tree: DraftTree, output: TargetOutput, scores_BNV: Tensor, verdict: VerifyResult) -> StepResult:
        """What follows from a verdict."""
        path_BA, emitted_BA = verdict.path_BA, verdict.emitted_BA
        if emitted_BA is None:
            ordered_BA = tree.tokens_BN if tree.in_order else tree.tokens_BN.gather(1, path_BA)
            last_B1 = verdict.lengths_B[:, None] - 1
            emitted_BA = ordered_BA.roll(-1, 1).scatter(1, last_B1, verdict.next_tokens_B[:, None])
        if tree.in_order:
            return cls(tree, output, verdict, emitted_BA, output.features_BNF, scores_BNV.amax(-1).isfinite())
        rows_B1 = counting(len(path_BA), path_BA.device, column=True)
        finite_BA = scores_BNV[rows_B1, path_BA].amax(-1).isfinite()
        return cls(tree, output, verdict, emitted_BA, output.features_BNF[rows_B1, path_BA], finite_BA)


class Drafter:
    """A source of draft trees: a head with a policy, or something that is no head.

    One that remembers nothing of the text needs `propose` and `max_nodes` alone.
    """

    feature_layers: tuple[int, ...] = ()
    """The target's layers that it wants to see."""
    max_nodes: int
    """Size of the largest tree that it proposes, the root counted."""
    kind: TreeKind = "top_k"
    """How its trees are made."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.max_nodes} nodes)"

    def begin(self, start: DraftContext) -> None:
        """DraftContext a generation."""

    def resume(self, start: DraftContext, kept: PrefillChunk, memory: Any, whole: bool) -> None:
        """Start a generation with a text of which an earlier one has read a part.

        Args:
            start: as for `begin`.
            kept: that part, without features.
            memory: what `memory` gave at the end of the earlier one.
            whole: whether it is all of the earlier text, of which then nothing is to be forgotten.
        """
        self.begin(start)
        self.read(kept)

    def cache_bytes(self, rows: int, tokens: int) -> int:
        """Bytes that it keeps on the device for so many rows of so many tokens."""
        return 0

    def memory(self) -> Any:
        """What a later generation that goes on with this text should get; None if it must be shown the text again.

        A drafter that reads features, and has no memory, is shown a text from its start.
        """

    def read(self, passage: PrefillChunk) -> None:
        """Take in the prompts, passage by passage; the last one ends with the token that the target chose."""

    def propose(self, roots_B: Tensor) -> DraftTree:
        """Guess what follows each row's newest token, on the device of the roots."""
        raise NotImplementedError

    def asks(self, finished: StepResult) -> Tensor | None:
        """Integers [B, K] that the host needs of a round beside its tokens; they come back as `StepResult.asked`."""

    def observe(self, finished: StepResult) -> None:
        """Take in what the round decided."""

    def compile(self) -> None:
        """From now on draft in compiled graphs, where that is possible."""

    def select(self, rows_R: Tensor) -> None:
        """Forget all rows but these: the others have ended."""

    def replace(self, rows_R: Tensor, other: Drafter) -> None:
        """Put another one's rows, whose prompts it has read, in the places of these, which have ended."""
