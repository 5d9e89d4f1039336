"""Indexes of n-grams: of the text that is being generated, and of a corpus on disk.

Both tell what followed an n-gram. `NgramIndex` indexes every n-gram as the text grows. A `Datastore` is a suffix array:
all positions of a corpus sorted by the tokens that follow them, so that the occurrences of an n-gram lie side by side
and two binary searches find them (REST, arXiv:2311.08252); its files are memory-mapped.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

SORTED_TOKENS = 16
"""Tokens by which a datastore's positions are sorted; the longest n-gram that can be searched for."""
MANIFEST_FILE, TOKENS_FILE, ORDER_FILE = "datastore.json", "tokens.npy", "order.npy"
SEPARATOR = -1
"""Token id between the texts of a datastore."""


class NgramIndex:
    """A text that grows, with an index of its n-grams."""

    def __init__(self, longest: int) -> None:
        """An empty text; `longest` is the length of the n-grams that can be searched for."""
        self.tokens: list[int] = []
        self.longest = longest
        self._places: dict[tuple[int, ...], list[int]] = defaultdict(list)

    def append(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            end = len(self.tokens)
            for length in range(min(self.longest, end) + 1):
                self._places[tuple(self.tokens[end - length :])].append(end)
            self.tokens.append(token)

    def places(self, gram: Sequence[int], most: int) -> np.ndarray:
        """Positions after the n-gram, the newest first."""
        return np.array(self._places.get(tuple(gram), [])[: -most - 1 : -1], dtype=np.int64)

    def following(self, gram: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """The tokens that follow the n-gram, and how often each does."""
        found = [self.tokens[place] for place in self._places.get(tuple(gram), [])]
        return np.unique(np.array(found, dtype=np.int64), return_counts=True)

    def read(self, start: int, length: int) -> list[int]:
        """Tokens from a position on; fewer at the text's end."""
        return self.tokens[start : start + length]


class Datastore:
    """The texts of a corpus as token ids, and the order of their positions."""

    def __init__(self, tokens: np.ndarray, order: np.ndarray, tokenizer: str) -> None:
        self.tokens, self.order, self.tokenizer = tokens, order, tokenizer

    @cached_property
    def unigrams(self) -> tuple[np.ndarray, np.ndarray]:
        """All tokens and their counts; counted once, through the whole corpus."""
        counted = np.asarray(self.tokens)
        return np.unique(counted[counted != SEPARATOR].astype(np.int64), return_counts=True)

    @classmethod
    def of(cls, texts: Iterable[Sequence[int]], tokenizer: str = "") -> Datastore:
        """Sort a corpus.

        Args:
            texts: token ids of each.
            tokenizer: hash of the tokenizer; see `tokenizer_provenance`.

        Raises:
            ValueError: no tokens at all.
        """
        parts = [np.array([*text, SEPARATOR], dtype=np.int32) for text in texts if len(text) > 0]
        if not parts:
            raise ValueError("the corpus is empty: there is nothing to look up")
        tokens = np.concatenate(parts)
        behind = np.concatenate([tokens, np.full(SORTED_TOKENS, SEPARATOR, dtype=np.int32)])
        keys = [behind[i : i + len(tokens)] for i in reversed(range(SORTED_TOKENS))]
        return cls(tokens, np.lexsort(keys).astype(np.int64), tokenizer)

    @property
    def vocab_size(self) -> int:
        """The largest token id, which stands at the last position in order, plus 1."""
        return int(self.tokens[self.order[-1]]) + 1

    def save(self, folder: Path) -> None:
        """Write the files, the manifest last: a folder without it is no datastore."""
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / TOKENS_FILE, self.tokens)
        np.save(folder / ORDER_FILE, self.order)
        manifest = {"tokenizer": self.tokenizer, "tokens": len(self.tokens)}
        (folder / MANIFEST_FILE).write_text(json.dumps(manifest) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: str | Path) -> Datastore:
        """Memory-map the files of a datastore.

        Raises:
            ValueError: no datastore.
        """
        manifest = Path(folder) / MANIFEST_FILE
        if not manifest.is_file():
            raise ValueError(
                f"no datastore in {str(folder)!r}: it has no {MANIFEST_FILE}; `headstart datastore` makes one"
            )
        made_with = json.loads(manifest.read_text(encoding="utf-8"))["tokenizer"]
        tokens, order = (np.load(Path(folder) / name, mmap_mode="r") for name in (TOKENS_FILE, ORDER_FILE))
        return cls(tokens, order, made_with)

    def check(self, tokenizer: str, where: str) -> None:
        """Refuse a datastore of another tokenizer.

        Raises:
            ValueError: naming both tokenizers.
        """
        if self.tokenizer != tokenizer:
            raise ValueError(
                f"the datastore {where!r} was made with tokenizer {self.tokenizer}, the target has {tokenizer}: make "
                "it again for this target"
            )

    def places(self, gram: Sequence[int], most: int) -> np.ndarray:
        """Positions after the n-gram, spread evenly over all: neighbours continue alike."""
        first, last = self._range(gram)
        chosen = np.linspace(first, last, min(most, last - first), endpoint=False).astype(np.int64)
        return np.asarray(self.order[chosen]) + len(gram)

    def following(self, gram: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        if not gram:
            return self.unigrams
        first, last = self._range(gram)
        found = np.asarray(self.tokens)[np.asarray(self.order[first:last]) + len(gram)].astype(np.int64)
        return np.unique(found[found != SEPARATOR], return_counts=True)

    def read(self, start: int, length: int) -> list[int]:
        """Tokens from a position on, to the end of its text at most."""
        found = self.tokens[start : start + length].tolist()
        return found[: found.index(SEPARATOR)] if SEPARATOR in found else found

    def _range(self, gram: Sequence[int]) -> tuple[int, int]:
        """The range of `order` whose positions begin with the n-gram."""
        assert 0 < len(gram) <= SORTED_TOKENS
        first, last = 0, len(self.order)
        for depth, token in enumerate(gram):  # a token at a time, within the range of those before
            first, last = (
                self._bisect(first, last, depth, token, after=False),
                self._bisect(first, last, depth, token, after=True),
            )
        return first, last

    def _bisect(self, first: int, last: int, depth: int, token: int, after: bool) -> int:
        """The first index in a range of `order` whose token at `depth` is at least `token`, or is greater."""
        while first < last:
            middle = (first + last) // 2
            place = int(self.order[middle]) + depth
            found = int(self.tokens[place]) if place < len(self.tokens) else SEPARATOR
            if found < token or (after and found == token):
                first = middle + 1
            else:
                last = middle
        return first


Corpus = NgramIndex | Datastore
"""Texts in which n-grams are searched for."""
