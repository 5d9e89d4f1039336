"""Pieces of text by token: whole characters, and together the whole text."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from headstart.inference.tracing.pieces import decoded, shown_token, text_pieces

TEXTS = [
    "plain words",
    "Zürich – 日本語",
    "👩‍👩‍👧‍👦 family 🇨🇭",
    "שלום עולם مرحبا",
    "</script><script>alert(1)</script>",
    "",
]


@pytest.mark.parametrize("text", TEXTS)
def test_each_character_comes_with_the_token_that_completes_it(tokenizer, text):
    tokens = tokenizer(text)["input_ids"]
    pieces = text_pieces(tokenizer, tokens)
    assert "".join(pieces) == text and len(pieces) == len(tokens)
    assert all(len(piece) <= 1 for piece in pieces) and "\ufffd" not in "".join(pieces)
    ends = [piece for piece in pieces if piece]
    assert ends == list(text)


def test_bytes_that_are_no_character_are_not_lost(tokenizer):
    """Random bytes, special tokens among them, and a text that ends within a character."""
    generator = torch.Generator().manual_seed(0)
    for length in (1, 2, 7, 300):
        tokens = torch.randint(0, 258, (length,), generator=generator).tolist()
        assert "".join(text_pieces(tokenizer, tokens)) == decoded(tokenizer, tokens)
    half = tokenizer("é")["input_ids"][:1]
    assert text_pieces(tokenizer, half) == ["\ufffd"]


def test_a_tokenizer_that_looks_far_back_still_gives_the_whole_text(tokenizer):
    class Reversed(PreTrainedTokenizerFast):
        def decode(self, tokens, **options):
            return super().decode(tokens, **options)[::-1]

    other = Reversed(tokenizer_object=tokenizer.backend_tokenizer)
    tokens = tokenizer("abcdef")["input_ids"]
    assert "".join(text_pieces(other, tokens)) == "fedcba"


def test_a_token_by_itself_is_its_text_or_its_bytes(tokenizer):
    first, second = tokenizer("é")["input_ids"]
    assert (shown_token(tokenizer, first), shown_token(tokenizer, second)) == ("⟨C3⟩", "⟨A9⟩")
    assert shown_token(tokenizer, tokenizer(" ")["input_ids"][0]) == " "
    assert shown_token(tokenizer, tokenizer.eos_token_id) == "<|im_end|>"
    assert shown_token(tokenizer, 9999) == "⟨9999⟩"
