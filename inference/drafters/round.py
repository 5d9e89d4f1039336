"""The contract of a speculation round: what drafters and observers learn of it.

A drafter proposes a tree. The target may verify a part of it only: a chain where it checks chains
alone, fewer nodes where memory is short, the root alone at a border of positions. So a node has
two numbers. Here a target that checks chains alone cuts a tree of five nodes to its longest path:

    proposed   0 root      parents -1 0 0 2 3
               ├─ 1
               └─ 2 ── 3 ── 4
    verified   0 root ── 1 ── 2 ── 3
    nodes      (0, 2, 3, 4)        verified node 1 is the proposed node 2

`output`, `verdict` and `scores_BNV` count the verified nodes.

Letters in tensor names: B batch, N verified nodes, A nodes of a path, U uniform numbers, V
vocabulary, F width of the chosen layers' features side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...heads.layers.constants import Download
from ..engines.base import TargetOutput
from ..trees.sampling import RandomSampler
from ..trees.tree import DraftTree


@dataclass(frozen=True)
class Verdict:
    """The acceptance rule's decision for each row."""

    path_BA: Tensor
    """The accepted nodes, the root first; A is the tree's depth + 1, the rest is padding."""
    lengths_B: Tensor
    """Valid nodes of each path, the root counted: as many tokens are emitted. 0 for an idle row,
    which has ended and keeps its slot in the batch."""
    next_tokens_B: Tensor
    """The bonus token of each row, the root of its next round."""
    emitted_BA: Tensor
    """The emitted tokens: after each node of `path_BA`, the token that follows it."""
    features_BAF: Tensor
    """The target's features at the accepted nodes."""
    spoiled_B: Tensor
    """Whether a path ends before an accepted node after which no token can be chosen: a score is
    NaN, or none is above -inf; in sampling one is inf."""


@dataclass(frozen=True)
class Ahead:
    """The part of the next round that the device computes while the host reads this one."""

    proposed: DraftTree
    """The next proposal."""
    output: TargetOutput | None = None
    """The target's output at its node, where it is the root alone."""


@dataclass(frozen=True)
class Round:
    """A finished speculation round."""

    proposed: DraftTree
    """The tree as the drafter made it; in a repeated round the root alone."""
    verified: DraftTree
    """The tree that the target read."""
    nodes: Sequence[int] | None
    """For each verified node, in every row, its number in the proposed tree; None where nothing was
    cut."""
    output: TargetOutput
    """The target's logits and features at every verified node."""
    verdict: Verdict
    scores_BNV: Tensor
    """What the rule decided on: the target's logits after every logits processor, in at least
    float32."""
    numbers: Tensor | RandomSampler | None = None
    """The rule's random numbers: uniform [B, U], or exponential ones by position [B, N, V]; a
    sampler that draws for itself; None where the rule draws none."""
    tokens: Sequence[list[int]] = ()
    """On the host: each row's emitted tokens, without padding, up to the first that does not follow
    from finite scores. An idle row emits none."""
    spoiled: Sequence[bool] = ()
    """On the host: `Verdict.spoiled_B`."""
    ahead: Ahead | None = None
    """What was launched of the next round; None if nothing was, or if its roots are others."""

    @property
    def idle(self) -> set[int]:
        """Slots of rows that have ended and keep their slot in the batch."""
        return {slot for slot, tokens in enumerate(self.tokens) if not tokens}

    @property
    def drafted(self) -> bool:
        """Whether any draft was verified."""
        return self.verified.max_depth > 0


def read_by_host(finished: Round, meanwhile: Callable[[], Ahead | None] | None = None) -> Round:
    """A round with its tokens on the host.

    `meanwhile` launches what needs none of them, so that the device goes on while the host reads
    and decides.
    """
    verdict = finished.verdict
    # 1. One copy for everything that the host needs. The columns of a row: its number of emitted
    #    tokens, whether its path was spoiled, A emitted tokens.
    columns = [verdict.lengths_B[:, None], verdict.spoiled_B[:, None], verdict.emitted_BA]
    download = Download(torch.cat(columns, dim=1))
    # 2. The device gets more work before the host waits for the copy.
    ahead = None
    if meanwhile is not None:
        ahead = meanwhile()
    # sync: the only one of a round; the host must know what to return and when to stop
    rows = download.tolist()
    # 3. A spoiled path has no bonus token: its last emitted token is the next root.
    spoiled = [bool(row[1]) for row in rows]
    if any(spoiled):
        ahead = None
        last_B1 = (verdict.lengths_B - 1).clamp(min=0)[:, None]
        verdict = replace(verdict, next_tokens_B=verdict.emitted_BA.gather(1, last_B1)[:, 0])
    return replace(
        finished,
        verdict=verdict,
        tokens=[row[2 : 2 + row[0]] for row in rows],
        spoiled=spoiled,
        ahead=ahead,
    )
