"""First guesses of adaptive drafting about a text: what drafts are worth on its class, and how long it will be.

Texts of one class, a kind of prompt and a size of prompts, accept drafts alike. `RecordedAcceptance` is what recorded
answers tell of each class.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ...files import recorded_files
from ..feature_cache import MANIFEST
from ..recorded_folder import recorded_row
from ..tuning.tree_search import default_length
from ..tuning.tree_spec import DynamicShape

PRIOR_STEPS = 4
"""Steps as which an expected length counts, so that the first of a text do not decide alone."""
AVERAGED_STEPS = 48
"""Steps over which tokens per step are averaged, exponentially: over fewer, chance decides."""
NEWEST_ANSWERS = 2000
"""Recorded answers that are looked at: the newest, in less than a second."""
REMEMBERED_ANSWERS = 32
"""Answers by whose lengths that of the next one is expected."""


class TextClass(NamedTuple):
    """Texts that are taken to accept drafts alike."""

    kind: str = ""
    """The caller's label of the prompt's kind; empty for none."""
    size: int = 0
    """Prompts of fewer than 4^size tokens, and of no fewer than a quarter of that."""

    @classmethod
    def of(cls, kind: str, prompt_tokens: int) -> TextClass:
        """The class of a prompt."""
        return cls(kind, (prompt_tokens.bit_length() + 1) // 2)


class Expected(NamedTuple):
    """A tree's tokens per step before it was tried on a text."""

    length: float
    steps: int
    """Steps that it is known from, at most `AVERAGED_STEPS`."""


@dataclass
class Counts:
    """Rounds with drafts, and the tokens that they returned, by the nodes of their trees."""

    rounds: Counter[int] = field(default_factory=Counter)
    tokens: Counter[int] = field(default_factory=Counter)

    def add(self, nodes: int, rounds: int, tokens: int) -> None:
        """Count rounds with trees of `nodes`."""
        self.rounds[nodes] += rounds
        self.tokens[nodes] += tokens

    def ratio(self, sizes: Sequence[int], before: float) -> float:
        """Drafts that trees of these sizes had accepted, in those that are expected of a head that was not measured.

        Shrunk towards `before`, which counts as `PRIOR_STEPS` rounds.
        """
        accepted = sum(self.tokens[nodes] - self.rounds[nodes] for nodes in sizes)
        expected = sum(self.rounds[nodes] * (usual_length(nodes) - 1) for nodes in sizes)
        rounds = sum(self.rounds[nodes] for nodes in sizes)
        if rounds == 0:
            return before
        return (rounds * accepted / expected + PRIOR_STEPS * before) / (rounds + PRIOR_STEPS)


def usual_length(nodes: int) -> float:
    """Acceptance length of the best tree of so many nodes, at least two, for a head that was not measured."""
    return default_length(DynamicShape(nodes, nodes - 1))


class RecordedAcceptance:
    """Acceptance of recorded answers by the class of their prompt, greedy and sampled ones apart."""

    def __init__(self) -> None:
        self.by_class: dict[tuple[bool, TextClass], Counts] = {}
        """By whether the answer was sampled."""

    @classmethod
    def read(cls, folder: str | Path, hidden_size: int) -> RecordedAcceptance:
        """Read the newest answers of a folder that `SpeculativeLM.record` filled; one without answers tells nothing.

        Raises:
            ValueError: no such folder, states of another width than the target's, or a file that cannot be read.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise ValueError(
                f"priors {str(folder)!r} is not a folder; give one that answers were recorded in "
                "(SpeculativeLM.record, --record), or leave priors out"
            )
        manifest = folder / MANIFEST
        files = recorded_files(folder)
        if not manifest.exists() and (files or any(folder.iterdir())):
            raise ValueError(f"priors {str(folder)!r} is not a recording: it has no {MANIFEST}")
        if manifest.exists():
            _check_manifest(manifest, hidden_size)
        found = cls()
        for path in files[-NEWEST_ANSWERS:]:
            try:
                row = recorded_row(path)
            except ValueError:
                if path.exists():  # otherwise it has given way to a newer one meanwhile
                    raise
                continue
            found.add(row, path)
        return found

    def add(self, row: dict[str, Any], path: Path) -> None:
        """Count an answer: a row of `recorded_row`.

        Raises:
            ValueError: marks that no recording writes.
        """
        try:
            if row["lossy"]:
                return
            text = TextClass.of(str(row["kind"]), row["loss_mask"].index(1))
            counts = self.by_class.setdefault((row["temperature"] > 0, text), Counts())
            for name, (rounds, tokens) in row["rounds"].items():
                if not 0 <= rounds <= tokens:
                    raise ValueError(f"{tokens} tokens of {rounds} rounds")
                if int(name) > 1 and rounds > 0:
                    counts.add(int(name), rounds, tokens)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(
                f"{path} has marks that cannot be read ({error!r}); remove it, or record with this version"
            ) from error

    def expected(self, sampling: bool, text: TextClass, trees: Sequence[tuple[int, float]]) -> list[Expected] | None:
        """Expected tokens per step of trees on texts of a class; None where no answers tell.

        Args:
            sampling: whether tokens are sampled.
            text: the class.
            trees: nodes of each tree, and its length for a head that was not measured.

        A guess is made by texts of other kinds, and corrected by those of the kind, those of the class with trees of
        other sizes, and those with the tree's own: each shrunk towards what the ones before tell.
        """
        other_kinds = Counts()
        same_kind = Counts()
        same_class = Counts()
        for (sampled, other), counts in self.by_class.items():
            if sampled != sampling:
                continue
            group = same_class
            if other != text:
                group = same_kind if other.kind == text.kind else other_kinds
            group.rounds.update(counts.rounds)
            group.tokens.update(counts.tokens)
        if not (other_kinds.rounds or same_kind.rounds or same_class.rounds):
            return None
        found = []
        for nodes, usual in trees:
            ratio = 1.0
            for group in (other_kinds, same_kind):
                ratio = group.ratio(list(group.rounds), ratio)
            ratio = same_class.ratio([size for size in same_class.rounds if size != nodes], ratio)
            ratio = same_class.ratio([nodes], ratio)
            steps = min(PRIOR_STEPS + same_class.rounds[nodes], AVERAGED_STEPS)
            found.append(Expected(1 + (usual - 1) * ratio, steps))
        return found


def _check_manifest(path: Path, hidden_size: int) -> None:
    """Refuse the manifest of another target, or none."""
    try:
        recorded = json.loads(path.read_text(encoding="utf-8"))["hidden_size"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read ({error!r}); priors need the folder of a recording") from error
    if recorded != hidden_size:
        raise ValueError(
            f"{path.parent} holds answers of a target with states of width {recorded}, not {hidden_size}; give a "
            "recording of this target as priors, or none"
        )


class AnswerLengths:
    """How many tokens answers have: each token is taken to be the last one with the same probability."""

    def __init__(self) -> None:
        self.answers: deque[tuple[int, bool]] = deque(maxlen=REMEMBERED_ANSWERS)
        """Tokens of the newest answers, and whether each ended before its limit."""
        self.ending = 0.0
        """Probability that an answer ends with its next token."""

    def add(self, tokens: int, limit: float) -> None:
        """Note an answer that has ended, or was cut at the limit."""
        if tokens < 1:
            return
        self.answers.append((tokens, tokens < limit))
        ended = sum(by_itself for _, by_itself in self.answers)
        self.ending = ended / sum(length for length, _ in self.answers)

    def expected(self, limit: float) -> float:
        """Tokens that an answer is expected to go on for, of which `limit` are allowed."""
        if self.ending == 0:
            return limit
        return (1 - (1 - self.ending) ** limit) / self.ending
