"""Pieces of text by token: whole characters, and together the whole text."""

from __future__ import annotations

import pytest
from helpers import cleaning, random_ids
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from headstart.inference.text.detokenizer import TextStream, decoded, text_pieces

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
    for length in (1, 2, 7, 300):
        tokens = random_ids(258, length, seed=length).tolist()
        assert "".join(text_pieces(tokenizer, tokens)) == decoded(tokenizer, tokens)
    half = tokenizer("é")["input_ids"][:1]
    assert text_pieces(tokenizer, half) == ["\ufffd"]


def byte_fallback():
    """As of Llama 2: pieces with ▁ for a space, the first of which is dropped, and bytes for other
    characters."""
    coded = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = ["<unk>", "<s>", "</s>", *coded, "▁", "▁a", "b", "▁word", "s", "é", "!"]
    vocab = {piece: place for place, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    strip = decoders.Strip(" ", 1, 0)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")


def word_pieces():
    """As of BERT."""
    pieces = ["[UNK]", "un", "##want", "##ed", ".", ",", "'", "s", "[SEP]"]
    vocab = {piece: place for place, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[SEP]"])
    other = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="[SEP]"
    )
    other.clean_up_tokenization_spaces = True
    return other


TOKENIZERS = {
    "bytes": (lambda tokenizer: tokenizer, 258),
    "cleaning": (cleaning, 258),
    "byte fallback": (lambda _: byte_fallback(), 265),
    "word pieces": (lambda _: word_pieces(), 9),
}
PUNCTUATION = "It 's x != y , ok ? a . b 've n't ' ' ' . n ' t we 're I 'm  . a  ' s"
"""What cleaning up changes, also where it changes what it has changed."""


def streamed(tokenizer, tokens, sizes):
    """The pieces that a stream gives for tokens that come in groups of these sizes."""
    stream = TextStream(tokenizer)
    pieces = []
    given = 0
    for size in sizes:
        pieces.append(stream.put(tokens[given : given + size]))
        given += size
    pieces.append(stream.put(tokens[given:]))
    pieces.append(stream.end())
    assert stream.text == "".join(pieces)
    return pieces


@pytest.mark.parametrize("name", TOKENIZERS)
def test_what_is_streamed_is_the_text_whatever_comes_later(tokenizer, name):
    make, vocab = TOKENIZERS[name]
    tokenizer = make(tokenizer)
    lengths = [1, 2, 5, 20, 60] * 12
    texts = [random_ids(vocab, length, seed=seed).tolist() for seed, length in enumerate(lengths)]
    if name != "word pieces":
        for text in (*TEXTS, PUNCTUATION, PUNCTUATION[::-1], "word 's é 日本 !" * 3):
            texts.append(tokenizer(text, add_special_tokens=False)["input_ids"])
    # two bytes that are a letter until a third comes, after what has no text
    if name == "byte fallback":
        for between in (1, 2, 999, 3 + 0x41):
            texts.append([3 + 0xC3, 3 + 0xA9, between, 3 + 0xE2, 261])
    for seed in range(60):  # every letter of what is cleaned, in any order
        letters = [" .?'nt mv"[letter] for letter in random_ids(9, 24, seed=seed).tolist()]
        texts.append(tokenizer("".join(letters))["input_ids"])
    for tokens in texts:
        for size in (1, 3):
            whole = str(tokenizer.decode(tokens, skip_special_tokens=True))
            assert "".join(streamed(tokenizer, tokens, [size] * (len(tokens) // size))) == whole


def test_a_stream_gives_characters_as_soon_as_they_are_whole(tokenizer):
    pieces = streamed(tokenizer, tokenizer("né 👩 x")["input_ids"], [1] * 11)
    assert pieces == ["n", "", "é", " ", "", "", "", "👩", " ", "x", "", "", ""]


def test_a_stream_of_a_tokenizer_that_changes_all_of_its_text_takes_nothing_back(tokenizer):
    class Reversed(PreTrainedTokenizerFast):
        def decode(self, tokens, **options):
            return super().decode(tokens, **options)[::-1]

    other = Reversed(tokenizer_object=tokenizer.backend_tokenizer)
    tokens = tokenizer("abc")["input_ids"]
    assert "".join(text_pieces(other, tokens)) == "cba"
    assert streamed(other, tokens, [1, 1, 1]) == ["a", "", "", "", "cba"]


def test_special_tokens_are_in_no_piece_where_they_are_skipped(tokenizer):
    tokens = [*tokenizer("é")["input_ids"], 257, *tokenizer("x")["input_ids"]]
    assert text_pieces(tokenizer, tokens, skip_special_tokens=True) == ["", "é", "", "x"]
    assert text_pieces(tokenizer, tokens) == ["", "é", "<|im_end|>", "x"]
