"""The text of single tokens: the piece that each adds to an answer, and how each is shown by itself.

A token may end inside a character: its piece is then empty, and the token that completes the character brings it.
More tokens may also change what is decoded already: some tokenizers remove the space before a punctuation mark, and
those that fall back to bytes show none of a run of bytes while its end is missing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from ..sequences import shared_length

INCOMPLETE = "\ufffd"
"""What a tokenizer decodes bytes to that are no whole character."""
BYTE_OF = {symbol: byte for byte, symbol in bytes_to_unicode().items()}
"""Bytes by the symbols that stand for them in byte-level vocabularies."""


BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
"""A token that stands for one byte."""
CLEANED = 8
"""Characters at the end of a text that cleaning up the spaces before " n't" and the like may still change."""


def decoded(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
    """The text of tokens, special ones included unless they are skipped."""
    return str(tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens))


class TextStream:
    """The text of an answer while its tokens come: what is given out never changes, and is the whole text in the end.

    answer = TextStream(tokenizer)
    for tokens in lm.stream(input_ids, max_new_tokens=256):
        print(answer.put(tokens), end="")
    print(answer.end())
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool = True) -> None:
        self.tokenizer, self.skip_special_tokens = tokenizer, skip_special_tokens
        self.tokens: list[int] = []
        self.text = ""
        """What was given out."""
        self._skipped = frozenset(tokenizer.all_special_ids if skip_special_tokens else ())

    def put(self, tokens: Sequence[int]) -> str:
        """Add tokens; return the text after what was given out that can no longer change, which may be none."""
        self.tokens += tokens
        end = len(self.tokens)
        while end and self._may_be_in_bytes(self.tokens[end - 1]):
            end -= 1
        text = decoded(self.tokenizer, self.tokens[:end], self.skip_special_tokens).rstrip(INCOMPLETE)
        if getattr(self.tokenizer, "clean_up_tokenization_spaces", False):
            text = text[:-CLEANED]
        return self._give(text) if text.startswith(self.text) else ""

    def end(self) -> str:
        """Return the rest of the text."""
        whole = decoded(self.tokenizer, self.tokens, self.skip_special_tokens)
        given = shared_length([whole, self.text])
        return self._give(self.text + whole[given:])

    def _give(self, text: str) -> str:
        piece = text[len(self.text) :]
        self.text = text
        return piece

    def _may_be_in_bytes(self, token: int) -> bool:
        """Whether it is a byte, or has no text, so that bytes on both of its sides are decoded together."""
        symbol = next(iter(self.tokenizer.convert_ids_to_tokens([token])))
        return token in self._skipped or symbol is None or BYTE_TOKEN.fullmatch(symbol) is not None


def text_pieces(
    tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], skip_special_tokens: bool = False
) -> list[str]:
    """The piece of the text that each token adds; joined, they are the text."""

    def decoded_to(begin: int, end: int) -> str:
        return decoded(tokenizer, tokens[begin:end], skip_special_tokens)

    whole = decoded_to(0, len(tokens))
    pieces: list[str] = []
    begin = read = 0  # tokens before `read` have given their pieces; some before them are decoded again, for context
    for end in range(1, len(tokens) + 1):
        before = decoded_to(begin, read)
        text = decoded_to(begin, end)
        if text.endswith(INCOMPLETE) and end < len(tokens):
            pieces.append("")
            continue
        pieces.append(text[len(before) :])
        begin, read = read, end
    if "".join(pieces) == whole:
        return pieces
    # A tokenizer whose text depends on more of what stands before.
    ends = [shared_length([decoded_to(0, end), whole]) for end in range(1, len(tokens))]
    ends = [min(ends[place:], default=len(whole)) for place in range(len(ends))]
    return [whole[start:stop] for start, stop in zip([0, *ends], [*ends, len(whole)], strict=True)] if tokens else []


def shown_token(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """A token by itself: its text, or ⟨E2 96⟩, its bytes, where these are no whole characters."""
    symbol = next(iter(tokenizer.convert_ids_to_tokens([token])))
    if symbol is None:  # the model's vocabulary is often larger than the tokenizer's
        return f"⟨{token}⟩"
    if BYTE_TOKEN.fullmatch(symbol):
        return f"⟨{symbol[3:5]}⟩"
    text = decoded(tokenizer, [token])
    if INCOMPLETE in text and all(letter in BYTE_OF for letter in symbol):
        return f"⟨{' '.join(f'{BYTE_OF[letter]:02X}' for letter in symbol)}⟩"
    if symbol.startswith("▁") and not text.startswith(" "):  # decoded by itself, it loses its space
        return " " + text
    return text
