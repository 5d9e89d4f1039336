"""The text of single tokens: the piece that each adds to an answer, and how each is shown by itself.

A token may end inside a character: its piece is then empty, and the token that completes the character brings it.
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


def decoded(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    """The text of tokens, special ones included."""
    return str(tokenizer.decode(list(tokens), skip_special_tokens=False))


def text_pieces(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> list[str]:
    """The piece of the text that each token adds; joined, they are the text."""
    whole = decoded(tokenizer, tokens)
    pieces: list[str] = []
    begin = read = 0  # tokens before `read` have given their pieces; some before them are decoded again, for context
    for end in range(1, len(tokens) + 1):
        before, text = decoded(tokenizer, tokens[begin:read]), decoded(tokenizer, tokens[begin:end])
        if text.endswith(INCOMPLETE) and end < len(tokens):
            pieces.append("")
            continue
        pieces.append(text[len(before) :])
        begin, read = read, end
    if "".join(pieces) == whole:
        return pieces
    # A tokenizer whose text depends on more of what stands before.
    ends = [shared_length([decoded(tokenizer, tokens[:end]), whole]) for end in range(1, len(tokens))]
    ends = [min(ends[place:], default=len(whole)) for place in range(len(ends))]
    return [whole[start:stop] for start, stop in zip([0, *ends], [*ends, len(whole)], strict=True)] if tokens else []


def shown_token(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """A token by itself: its text, or ⟨E2 96⟩, its bytes, where these are no whole characters."""
    symbol = next(iter(tokenizer.convert_ids_to_tokens([token])))
    if symbol is None:  # the model's vocabulary is often larger than the tokenizer's
        return f"⟨{token}⟩"
    if re.fullmatch("<0x[0-9A-F]{2}>", symbol):
        return f"⟨{symbol[3:5]}⟩"
    text = decoded(tokenizer, [token])
    if INCOMPLETE in text and all(letter in BYTE_OF for letter in symbol):
        return f"⟨{' '.join(f'{BYTE_OF[letter]:02X}' for letter in symbol)}⟩"
    if symbol.startswith("▁") and not text.startswith(" "):  # decoded by itself, it loses its space
        return " " + text
    return text
