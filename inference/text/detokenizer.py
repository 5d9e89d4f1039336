"""Tokens as text while they arrive: an incremental detokenizer.

`tokenizers.decoders.DecodeStream` decodes a fast tokenizer's tokens with the few before them that
matter. A token may end inside a character: nothing is returned until the token that completes it.
For example, the bytes of "é" are C3 and A9:

    put([caf])       "caf"
    put([<0xC3>])    ""
    put([<0xA9>])    ""       a byte may go on
    put([!])         "é!"

Tokenizers that change earlier text (by cleaning up the spaces before punctuation, or by a `decode`
in Python) are asked for the whole text each time.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..rounds.sequences import shared_length

INCOMPLETE = "\ufffd"
"""The replacement character, to which a tokenizer decodes bytes that are not a whole character."""
BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
"""A token for one byte, where a vocabulary falls back to bytes."""
CLEANED = 8
"""Characters at the end of a text that cleaning up the spaces before " n't" and the like may still
change."""


def decoded(
    tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], skip_special_tokens: bool = False
) -> str:
    """The text of tokens, special ones included unless they are skipped."""
    return str(tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens))


def symbol_of(tokenizer: PreTrainedTokenizerBase, token: int) -> str | None:
    """Return a token's vocabulary entry; None if only the model, not the tokenizer, has it."""
    return next(iter(tokenizer.convert_ids_to_tokens([token])))


def skipped_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The tokens that have no text where special ones are skipped.

    A fast tokenizer also skips those without a role, such as the one that begins a turn.
    """
    special = frozenset(tokenizer.all_special_ids)
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        added = tokenizer.added_tokens_decoder
        special |= {token for token, symbol in added.items() if symbol.special}
    return special


def decodes_in_order(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether `DecodeStream`, which is fast, gives the tokenizer's text.

    It does if no Python code changes the decoded text.
    """
    kind = type(tokenizer)
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or tokenizer.clean_up_tokenization_spaces:
        return False
    return (
        kind.decode is PreTrainedTokenizerFast.decode
        and kind._decode is PreTrainedTokenizerFast._decode
    )


def step(stream: DecodeStream, tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> str | None:
    """Return the text that tokens add to a stream; None if its decoder takes back earlier text."""
    try:
        return stream.step(tokenizer.backend_tokenizer, tokens) or ""
    except Exception as error:  # the class that tokenizers raises
        if "prefix" not in str(error).lower():
            raise
        return None


class TextStream:
    """The text of an answer as its tokens arrive: text that was returned never changes.

    Joined, the returned pieces are the whole text.

    answer = TextStream(tokenizer)
    for tokens in lm.stream(input_ids, max_new_tokens=256):
        print(answer.put(tokens), end="")
    print(answer.end())
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool = True
    ) -> None:
        self.tokenizer = tokenizer
        self.skip_special_tokens = skip_special_tokens
        self.tokens: list[int] = []
        self.text = ""
        """The text that was returned so far."""
        self._stream: DecodeStream | None = None
        if decodes_in_order(tokenizer):
            self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._read = 0
        """How many tokens the stream has read: the newest ones not, if they are bytes."""
        self._skipped = skipped_tokens(tokenizer) if skip_special_tokens else frozenset()

    def put(self, tokens: Sequence[int]) -> str:
        """Add tokens; return the further text that can no longer change, which may be empty."""
        # 1. Wait with bytes at the end: the next token may be a byte of the same character.
        self.tokens += tokens
        end = len(self.tokens)
        while end > self._read and self._may_be_in_bytes(self.tokens[end - 1]):
            end -= 1
        # 2. Decode the tokens before them.
        if self._stream is None:
            return self._of_whole_text(end)
        ready = self.tokens[self._read : end]
        self._read = end
        piece = step(self._stream, self.tokenizer, ready) if ready else ""
        # 3. A decoder that takes back earlier text is not fit for the stream: go on without it.
        if piece is None:
            self._stream = None
            return self._of_whole_text(end)
        self.text += piece
        return piece

    def end(self) -> str:
        """Return the rest of the text."""
        whole = decoded(self.tokenizer, self.tokens, self.skip_special_tokens)
        piece = whole[shared_length([whole, self.text]) :]
        self.text += piece
        return piece

    def _of_whole_text(self, end: int) -> str:
        """Return what the first `end` tokens add to the returned text, as far as it is final."""
        text = decoded(self.tokenizer, self.tokens[:end], self.skip_special_tokens)
        text = text.rstrip(INCOMPLETE)
        if getattr(self.tokenizer, "clean_up_tokenization_spaces", False):
            text = text[:-CLEANED]
        # Still shorter than what was returned, or different for now: wait for more tokens.
        if not text.startswith(self.text):
            return ""
        piece = text[len(self.text) :]
        self.text = text
        return piece

    def _may_be_in_bytes(self, token: int) -> bool:
        """Whether a token is a byte or has no text.

        Bytes on both sides of such a token are decoded together.
        """
        symbol = symbol_of(self.tokenizer, token)
        return token in self._skipped or symbol is None or BYTE_TOKEN.fullmatch(symbol) is not None


def text_pieces(
    tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], skip_special_tokens: bool = False
) -> list[str]:
    """The piece of the text that each token adds; joined, they are the text."""
    if not tokens:
        return []
    # The fast way, if its pieces are the text; else decode every prefix.
    whole = decoded(tokenizer, tokens, skip_special_tokens)
    if decodes_in_order(tokenizer):
        stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        pieces = [step(stream, tokenizer, [token]) or "" for token in tokens]
        rest = whole[len("".join(pieces)) :]  # a text that ends within a character
        pieces[-1] += rest
        if "".join(pieces) == whole:
            return pieces
    return _pieces_of_whole_text(tokenizer, tokens, skip_special_tokens, whole)


def _pieces_of_whole_text(
    tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], skip_special_tokens: bool, whole: str
) -> list[str]:
    """Return `text_pieces` for a tokenizer whose text depends on more context, before or after."""
    # Where the text before each token ends: as far as decoding the tokens before it gives the final
    # text. O(n^2) in the number of tokens.
    ends = [
        shared_length([decoded(tokenizer, tokens[:end], skip_special_tokens), whole])
        for end in range(len(tokens))
    ]
    ends.append(len(whole))
    # Text that a later token changes belongs to that token: ends [0, 5, 3, 9] become [0, 3, 3, 9].
    for number in reversed(range(len(tokens))):
        ends[number] = min(ends[number], ends[number + 1])
    return [whole[start:stop] for start, stop in itertools.pairwise(ends)]
