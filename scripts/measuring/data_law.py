"""Acceptance length by the number of answer tokens that a head was trained on: measured, and a law fitted to it.

    length(tokens) = start + gain * log2(tokens / 100,000)

for each kind of prompt, by least squares over three sizes: `gain` is what twice the data adds. The points are those of
benchmarks/scaling.md, which says how they were measured: EAGLE-3 on SmolLM2-135M-Instruct, one recipe, greedy. Three
points leave a line one degree of freedom, too few for an interval; the kinds scatter alike, so their residuals are
pooled: eight kinds, eight degrees of freedom. The interval is that of a head that one would train now (a prediction
interval of linear regression). It covers the scatter of such trainings, not other models, heads or prompts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

SIZES = (50_000, 100_000, 200_000)
"""Answer tokens of the heads that were measured."""
UNIT = 100_000
"""Answer tokens at which a line has its start."""
MEAN = "mean"
"""Name of the mean over all kinds."""
TreeName = Literal["chain", "tree"]
CHAIN: dict[str, tuple[float, float, float]] = {
    "gsm8k": (1.54, 1.67, 1.83),
    "humaneval": (1.36, 1.52, 1.63),
    "mt_bench": (1.23, 1.28, 1.35),
    "translation": (1.09, 1.14, 1.14),
    "summaries": (1.19, 1.32, 1.38),
    "questions": (1.20, 1.29, 1.40),
    "context": (1.23, 1.37, 1.43),
    "instructions": (1.23, 1.33, 1.39),
}
"""Acceptance lengths in a chain of 3, by kind of prompt, at `SIZES`."""
TREE: dict[str, tuple[float, float, float]] = {
    "gsm8k": (2.12, 2.40, 2.64),
    "humaneval": (1.79, 2.01, 2.25),
    "mt_bench": (1.54, 1.71, 1.80),
    "translation": (1.20, 1.29, 1.38),
    "summaries": (1.57, 1.71, 1.82),
    "questions": (1.53, 1.75, 1.90),
    "context": (1.63, 1.81, 1.98),
    "instructions": (1.60, 1.69, 1.77),
}
"""Acceptance lengths in a dynamic tree of 32."""
POINTS: Mapping[TreeName, Mapping[str, tuple[float, float, float]]] = {"chain": CHAIN, "tree": TREE}
LONGEST: Mapping[TreeName, int] = {"chain": 4, "tree": 8}
"""Tokens that a round emits at most: those of the longest path, and the bonus token."""
NODES: Mapping[TreeName, int] = {"chain": 4, "tree": 32}
"""Nodes of a tree, the root counted."""
SHIPPED_TOKENS = 1_090_000
"""Answer tokens of the shipped head: trained otherwise, and so no point of the law, but a check of it."""
SHIPPED: Mapping[TreeName, Mapping[str, float]] = {
    "chain": {
        "gsm8k": 2.45,
        "humaneval": 2.13,
        "mt_bench": 1.52,
        "translation": 1.55,
        "summaries": 1.65,
        "questions": 1.69,
        "context": 1.72,
        "instructions": 1.69,
        MEAN: 1.80,
    },
    "tree": {
        "gsm8k": 3.88,
        "humaneval": 3.31,
        "mt_bench": 2.17,
        "translation": 1.99,
        "summaries": 2.35,
        "questions": 2.47,
        "context": 2.39,
        "instructions": 2.51,
        MEAN: 2.63,
    },
}
"""Its acceptance lengths."""
STUDENT_T = 2.306
"""Quantile 0.975 of Student's t with 8 degrees of freedom: a point less two parameters, for each of 8 kinds."""
TOKENS = (1_000, 100_000_000)
"""Answer tokens that the law is asked about, at least and at most: beyond, it says nothing."""
STEPS = 50
"""Parts of a doubling by which the ends of an interval of tokens are looked for."""


@dataclass(frozen=True)
class Law:
    """The line of a kind of prompt."""

    start: float
    """Acceptance length at `UNIT` tokens."""
    gain: float
    """What twice the data adds."""

    @classmethod
    def fitted(cls, lengths: Mapping[int, float]) -> Law:
        """The line through acceptance lengths by answer tokens, by least squares."""
        doublings = [doublings_of(tokens) for tokens in lengths]
        middle = sum(doublings) / len(doublings)
        mean = sum(lengths.values()) / len(lengths)
        covered = sum((place - middle) * length for place, length in zip(doublings, lengths.values(), strict=True))
        gain = covered / sum((place - middle) ** 2 for place in doublings)
        return cls(mean - gain * middle, gain)

    def length(self, tokens: float) -> float:
        """Acceptance length after training on that many answer tokens."""
        return self.start + self.gain * doublings_of(tokens)

    def tokens(self, length: float) -> float:
        """Answer tokens that give an acceptance length."""
        return UNIT * 2 ** ((length - self.start) / self.gain)

    def times(self, now: float, then: float) -> float:
        """How many times the data take an acceptance length from one to another, wherever the line begins."""
        return 2 ** ((then - now) / self.gain)


def doublings_of(tokens: float) -> float:
    """How often `UNIT` tokens are doubled."""
    return math.log2(tokens / UNIT)


@cache
def law_of(tree: TreeName, kind: str) -> Law:
    """The law of a measured kind of prompt, or of the mean over all."""
    return Law.fitted(measured(tree, kind))


def measured(tree: TreeName, kind: str) -> dict[int, float]:
    """The measured acceptance lengths by answer tokens; of the mean, unrounded."""
    kinds = POINTS[tree]
    if kind != MEAN:
        return dict(zip(SIZES, kinds[kind], strict=True))
    means = [sum(lengths) / len(kinds) for lengths in zip(*kinds.values(), strict=True)]
    return dict(zip(SIZES, means, strict=True))


@cache
def variance(tree: TreeName) -> float:
    """Variance of the points around their lines, over all kinds."""
    squares = 0.0
    for kind in POINTS[tree]:
        law = law_of(tree, kind)
        squares += sum((law.length(size) - length) ** 2 for size, length in measured(tree, kind).items())
    return squares / (len(POINTS[tree]) * (len(SIZES) - 2))


def half_width(tree: TreeName, tokens: float) -> float:
    """Half the 95 % prediction interval at a number of tokens, by the residuals of all kinds together.

    The mean over the kinds has the same: their residuals are not independent, as one head made all eight.
    """
    places = [doublings_of(size) for size in SIZES]
    middle = sum(places) / len(places)
    spread = sum((place - middle) ** 2 for place in places)
    further = (doublings_of(tokens) - middle) ** 2 / spread
    return STUDENT_T * math.sqrt(variance(tree) * (1 + 1 / len(places) + further))


def interval(tree: TreeName, kind: str, tokens: float) -> tuple[float, float]:
    """95 % prediction interval of the acceptance length, which is never below 1."""
    length = law_of(tree, kind).length(tokens)
    half = half_width(tree, tokens)
    return max(length - half, 1.0), max(length + half, 1.0)


def tokens_interval(tree: TreeName, kind: str, length: float) -> tuple[float, float]:
    """Answer tokens from which the interval may hold a length, and from which it holds no smaller one; in `TOKENS`.

    Where nothing within `TOKENS` is enough, an end is the largest of them.
    """
    law = law_of(tree, kind)
    least, most = map(doublings_of, TOKENS)
    count = round((most - least) * STEPS)
    grid = [round(UNIT * 2 ** (least + place / STEPS)) for place in range(count + 1)]
    lowest = TOKENS[1]
    for tokens in reversed(grid):  # far below the data the interval is wide again, and tells nothing
        if law.length(tokens) + half_width(tree, tokens) < length:
            break
        lowest = tokens
    highest = TOKENS[1]
    for tokens in grid:
        if law.length(tokens) - half_width(tree, tokens) >= length:
            highest = tokens
            break
    return lowest, highest


def check_kind(kind: str) -> None:
    """Refuse a kind of prompt that was not measured.

    Raises:
        ValueError: names those that were.
    """
    kinds: Sequence[str] = (MEAN, *CHAIN)
    if kind not in kinds:
        raise ValueError(
            f"unknown kind {kind!r}: the law was measured for {', '.join(kinds)}; take the nearest, or mean"
        )
