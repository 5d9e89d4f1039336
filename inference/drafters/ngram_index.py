"""Indexes of n-grams: of the text that is being generated, and of a corpus on disk.

Both tell what followed an n-gram. `NgramIndex` indexes every n-gram as the text grows. A
`Datastore` is a suffix array: all positions of a corpus sorted by the tokens that follow them, so
that the occurrences of an n-gram lie side by side and two binary searches find them (REST,
arXiv:2311.08252); its files are memory-mapped.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ...files import BROKEN, at_home, read_json, require_regular
from .text_index import SEPARATOR

SORTED_TOKENS = 16
"""Tokens by which a datastore's positions are sorted; the longest n-gram that can be searched
for."""
MANIFEST_FILE = "datastore.json"
TOKENS_FILE = "tokens.npy"
ORDER_FILE = "order.npy"


class NgramIndex:
    """A text that grows, with an index of its n-grams."""

    def __init__(self, longest: int) -> None:
        """An empty text; `longest` is the length of the n-grams that can be searched for."""
        self.longest = longest
        self.tokens: list[int] = []
        self._positions: dict[tuple[int, ...], list[int]] = defaultdict(list)
        """Positions after each n-gram, the newest last."""

    def append(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            # The new token follows every n-gram at the text's end, the empty one included: after
            # 5 7, a new token at position 2 follows (), (7) and (5, 7).
            end = len(self.tokens)
            for length in range(min(self.longest, end) + 1):
                self._positions[tuple(self.tokens[end - length :])].append(end)
            self.tokens.append(token)

    def following(self, gram: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """The tokens that follow the n-gram, and how often each does."""
        following = [self.tokens[i] for i in self._positions.get(tuple(gram), [])]
        return np.unique(np.array(following, dtype=np.int64), return_counts=True)


@dataclass(eq=False)
class Datastore:
    """The texts of a corpus as token ids, and the order of their positions."""

    tokens: np.ndarray
    """All texts one after the other, `SEPARATOR` after each; int32."""
    order: np.ndarray
    """Positions in `tokens`, sorted by the tokens from there on; int64."""
    tokenizer: str
    """Hash of the tokenizer; see `tokenizer_provenance`."""
    vocab_size: int = 2**31
    """Tokens of the target. A text ends before any other token, as `SEPARATOR` is."""
    unigrams: tuple[np.ndarray, np.ndarray] | None = field(default=None, init=False, repr=False)
    """All tokens and their counts, once they have been needed: counting reads the whole corpus."""

    @classmethod
    def of(cls, texts: Iterable[Sequence[int]], tokenizer: str = "") -> Datastore:
        """Sort a corpus of token ids.

        Raises:
            ValueError: no tokens at all.
        """
        parts = [np.array([*text, SEPARATOR], dtype=np.int32) for text in texts if len(text) > 0]
        if not parts:
            raise ValueError("the corpus is empty: there is nothing to look up")
        # With SORTED_TOKENS = 2, the text 5 7 5 8 and its separator, -1, are sorted by the pairs
        # 5 7, 7 5, 5 8, 8 -1, -1 -1: order [4, 0, 2, 1, 3]. lexsort sorts by its last key first, so
        # the key that holds the tokens i positions further on comes last for i = 0.
        tokens = np.concatenate(parts)
        padded = np.concatenate([tokens, np.full(SORTED_TOKENS, SEPARATOR, dtype=np.int32)])
        keys = [padded[i : i + len(tokens)] for i in reversed(range(SORTED_TOKENS))]
        order = np.lexsort(keys).astype(np.int64)
        return cls(tokens, order, tokenizer)

    def save(self, folder: Path) -> None:
        """Write the files, the manifest last: a folder without it is not a datastore."""
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / TOKENS_FILE, self.tokens)
        np.save(folder / ORDER_FILE, self.order)
        manifest = {"tokenizer": self.tokenizer, "tokens": len(self.tokens)}
        (folder / MANIFEST_FILE).write_text(json.dumps(manifest) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: str | Path, vocab_size: int = 2**31) -> Datastore:
        """Memory-map the files of a datastore.

        Raises:
            ValueError: a folder without a datastore, or files of another kind.
        """
        folder = Path(at_home(folder))
        manifest = folder / MANIFEST_FILE
        if not manifest.is_file():
            raise ValueError(
                f"no datastore in {str(folder)!r}: it has no {MANIFEST_FILE}; `headstart datastore`"
                " makes one"
            )
        tokens = _mapped(folder / TOKENS_FILE)
        order = _mapped(folder / ORDER_FILE)
        about = read_json(manifest)
        if not isinstance(about, dict) or not isinstance(about.get("tokenizer"), str):
            raise ValueError(f"{manifest} names no tokenizer; make the datastore again")
        if not 0 < len(order) <= len(tokens) or not 0 <= order[-1] < len(tokens):
            raise ValueError(
                f"{folder} holds {len(tokens)} tokens in another order of {len(order)}; make the"
                " datastore again"
            )
        return cls(tokens, order, about["tokenizer"], vocab_size)

    def texts(self) -> np.ndarray:
        """All texts, with `SEPARATOR` in place of whatever is no token of the target; int64."""
        tokens = np.asarray(self.tokens, dtype=np.int64)
        return np.where((tokens >= 0) & (tokens < self.vocab_size), tokens, SEPARATOR)

    def following(self, gram: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """The tokens that follow the n-gram, and how often each does."""
        tokens = np.asarray(self.tokens)
        # The empty n-gram is followed by every token.
        if gram:
            first, last = self._range(gram)
            positions = np.asarray(self.order[first:last]) + len(gram)
            return self._counted(tokens.take(positions, mode="clip"))
        if self.unigrams is None:
            self.unigrams = self._counted(tokens)
        return self.unigrams

    def _counted(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The different tokens, and how often each occurs; separators of texts do not count."""
        of_texts = tokens[(tokens >= 0) & (tokens < self.vocab_size)].astype(np.int64)
        return np.unique(of_texts, return_counts=True)

    def _range(self, gram: Sequence[int]) -> tuple[int, int]:
        """The range of `order` whose positions begin with the n-gram."""
        assert 0 < len(gram) <= SORTED_TOKENS
        wanted = list(gram)
        tokens = np.asarray(self.tokens)  # memmaps are slow to index
        order = np.asarray(self.order)

        def gram_at(position: int) -> list[int]:
            gram: list[int] = tokens[position : position + len(wanted)].tolist()
            return gram

        first = bisect_left(order, wanted, key=gram_at)
        last = bisect_right(order, wanted, first, key=gram_at)
        return first, last


def _mapped(path: Path) -> np.ndarray:
    """Memory-map a file of integers in one dimension.

    Raises:
        ValueError: a file that is missing, cut, or of something else.
    """
    try:
        mapped: np.ndarray = np.lib.format.open_memmap(require_regular(path), mode="r")
    except (OSError, *BROKEN) as error:
        raise ValueError(f"{path} cannot be read: {error}; make the datastore again") from error
    if mapped.ndim != 1 or mapped.dtype.kind not in "iu":
        raise ValueError(f"{path} is not a list of integers; make the datastore again")
    return mapped


Corpus = NgramIndex | Datastore
"""Texts in which n-grams are searched for."""
