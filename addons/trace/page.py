"""A trace: the recorded rounds of a generation, and the self-contained page that plays them.

    output, traced = trace(lm, prompt, max_new_tokens=128)
    traced.save("trace.html")

The page is one file without any network: its data is JSON, which no text in it can leave.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from ...files import write_whole
from ...inference.engines.encoder_decoder import Seq2SeqTarget
from ...inference.inputs import prompts_of
from ...inference.output import GenerateOutput
from ...inference.speculative_lm import SpeculativeLM
from ...inference.text.detokenizer import (
    BYTE_TOKEN,
    INCOMPLETE,
    decoded,
    symbol_of,
    text_pieces,
)
from ...inference.trees.stats import Stats
from .record import WHOLE_ROUNDS, Recorder, Tracer, rounded
from .report import TraceReport, trace_report

VERSION = 1
"""Version of the data."""
ESCAPED = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}
"""Characters with which a text could leave the page's JSON."""
BYTE_OF = {symbol: byte for byte, symbol in bytes_to_unicode().items()}
"""Bytes by the symbols that represent them in byte-level vocabularies."""
ROUND_BYTES, LATER_BYTES = 9000, 2200
"""Room for a round in the page's JSON: for each of the first `WHOLE_ROUNDS`, and of those after."""


@dataclass(frozen=True)
class Trace:
    """The recorded rounds of one generation."""

    data: dict[str, Any]
    """What the page shows, as JSON; docs/trace.md describes its fields."""

    def __repr__(self) -> str:
        stats = self.data["stats"]
        return f"Trace({stats['tokens']} tokens in {stats['rounds']} rounds, {self.data['rule']})"

    def to_html(self) -> str:
        """The page: one file, without any network."""
        title = " ".join(self.data["prompt"].split())[-80:] or "trace"
        data = json.dumps(
            thinned(self.data), ensure_ascii=False, allow_nan=False, separators=(",", ":")
        )
        parts = {
            "/*TRACE_CSS*/": page_file("page.css"),
            "/*TRACE_JS*/": page_file("page.js"),
            "{{TITLE}}": html.escape(f"headstart trace: {title}"),
            "{{TRACE_JSON}}": data.translate(ESCAPED),
        }
        # In one pass, so that a marker that occurs in a generated text is not replaced.
        markers = "|".join(map(re.escape, parts))
        return re.sub(markers, lambda marker: parts[marker[0]], page_file("page.html"))

    def _repr_html_(self) -> str:
        """The page in a frame of its own, for notebooks."""
        page = html.escape(self.to_html())
        return f'<iframe srcdoc="{page}" style="width: 100%; height: 720px; border: 0"></iframe>'

    def save(self, path: str | Path) -> Path:
        """Write the page, whole or not at all.

        Raises:
            OSError: it cannot be written, such as on a full disk; nothing is left of it.
        """
        return write_whole(Path(path), self.to_html())

    def report(self) -> TraceReport:
        """Summarize where drafts are rejected, how calibrated they are, and which depth pays."""
        return trace_report([self.data])


def page_file(name: str) -> str:
    """A file of the page."""
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def trace(
    lm: SpeculativeLM,
    inputs: Tensor | None = None,
    *,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **options: Any,
) -> tuple[GenerateOutput, Trace]:
    """Generate as `lm.generate` does, and record every round; the tokens stay the same.

    Args:
        lm: the decoder.
        inputs: one prompt [1, time].
        input_ids: another name of `inputs`.
        attention_mask: 1 for tokens, 0 for padding, [1, time].
        tokenizer: the target's, which writes the tokens of the page; loaded if the target has a
            name.
        options: further ones of `lm.generate`.

    Raises:
        ValueError: more than one row, or nothing to generate.
    """
    prompts = prompts_of(inputs, input_ids, attention_mask)
    rows = len(prompts.input_ids)
    if rows > 1:
        raise ValueError(f"trace records one row, not a batch of {rows}")
    if options.get("max_new_tokens") == 0:
        raise ValueError("trace records rounds, and there are none with max_new_tokens=0")
    tokenizer = tokenizer or lm.target.tokenizer
    tracer = Tracer()
    # The lock keeps other threads' generations out; they would be recorded, too.
    with lm.target.lock:
        lm.observers.append(tracer)
        try:
            output = lm.generate(
                prompts.input_ids,
                attention_mask=prompts.attention_mask,
                tokenizer=tokenizer,
                **options,
            )
        finally:
            lm.observers.remove(tracer)
    # Nested calls were recorded as well: this one is known by its statistics.
    (recorder,) = [ended for ended in tracer.ended if ended.call.stats is output.stats]
    # Of an encoder-decoder the encoder's text, not the start token of its decoder.
    prompt_T = recorder.call.sequences.prompts[0]
    if isinstance(lm.target, Seq2SeqTarget):
        prompt_T = prompts.input_ids[0]
        if prompts.attention_mask is not None:
            prompt_T = prompt_T[prompts.attention_mask[0].bool()]
    return output, trace_of(recorder, output.stats, prompt_T.tolist(), tokenizer)


def shown_token(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """Show a token by itself: its text, or its bytes ⟨E2 96⟩ if these are not whole characters."""
    symbol = symbol_of(tokenizer, token)
    # The model's vocabulary is often larger than the tokenizer's.
    if symbol is None:
        return f"⟨{token}⟩"
    # A byte-fallback token, <0xE2>; below, one of a byte-level vocabulary.
    if BYTE_TOKEN.fullmatch(symbol):
        return f"⟨{symbol[3:5]}⟩"
    text = decoded(tokenizer, [token])
    if INCOMPLETE in text and all(letter in BYTE_OF for letter in symbol):
        hexadecimal = " ".join(f"{BYTE_OF[letter]:02X}" for letter in symbol)
        return f"⟨{hexadecimal}⟩"
    # SentencePiece drops the space of a token at the start of a text.
    if symbol.startswith("▁") and not text.startswith(" "):
        return " " + text
    return text


def trace_of(
    recorder: Recorder, stats: Stats, prompt: Sequence[int], tokenizer: PreTrainedTokenizerBase
) -> Trace:
    """The trace of a recorded generation."""
    # Tokens first: `index` adds those that the vocabulary lacks.
    pieces = text_pieces(tokenizer, recorder.tokens)
    output = []
    for token, piece, drafted in zip(recorder.tokens, pieces, recorder.drafted, strict=True):
        number, depth = drafted
        output.append({"v": recorder.index(token), "p": piece, "r": number, "d": depth})
    vocab = [{"id": token, "t": shown_token(tokenizer, token)} for token in recorder.vocab]
    return Trace(
        {
            "version": VERSION,
            **recorder.about,
            "vocab": vocab,
            "prompt": decoded(tokenizer, prompt),
            "output": output,
            "rounds": recorder.rounds,
            "stats": stats_data(stats),
            "plain": None,
        }
    )


def stats_data(stats: Stats) -> dict[str, Any]:
    """Statistics as the page shows them."""
    low, high = stats.acceptance_length_interval
    seconds = sum(stats.round_seconds)
    return {
        "tokens": stats.tokens,
        "rounds": stats.rounds,
        "plain_rounds": stats.plain_rounds,
        "acceptance_length": rounded(stats.acceptance_length),
        "interval": None if math.isnan(low) else [rounded(low), rounded(high)],
        "acceptance_rate_by_depth": [rounded(rate) for rate in stats.acceptance_rate_by_depth],
        "tokens_per_second": rounded(stats.tokens / seconds) if seconds else None,
        "prefill_ms": rounded(1000 * stats.seconds.get("prefill", 0.0)),
        "parts_ms": {part: rounded(1000 * value) for part, value in stats.round_parts.items()},
    }


def thinned(data: dict[str, Any]) -> dict[str, Any]:
    """Return the data, thinned where needed so that it fits the page.

    With many rounds or large trees, distributions keep fewer tokens at fewer nodes.
    """
    rounds = data["rounds"]
    whole_rounds = min(len(rounds), WHOLE_ROUNDS)
    later_rounds = len(rounds) - whole_rounds
    room = ROUND_BYTES * whole_rounds + LATER_BYTES * later_rounds
    # Step by step: all distributions, those on the accepted path alone, fewer tokens of each.
    for on_path, most in ((False, 10), (True, 10), (True, 5), (True, 3), (True, 1)):
        thin = [_thinner(recorded, on_path, most) for recorded in rounds]
        if len(json.dumps(thin, separators=(",", ":"))) <= room:
            break
    return {**data, "rounds": thin} if rounds else data


def _thinner(recorded: dict[str, Any], on_path: bool, most: int) -> dict[str, Any]:
    """A round with `most` tokens a distribution, of the accepted path's nodes only or of all."""
    shown = set()
    for node, fields in enumerate(recorded["nodes"]):
        if fields["s"] == 1 or not on_path:
            shown.add(str(node))
    thin = dict(recorded)
    for name in ("draft", "best"):
        distributions = recorded[name].items()
        thin[name] = {node: pairs[:most] for node, pairs in distributions if node in shown}
    if recorded["residual"] is not None:
        thin["residual"] = recorded["residual"][:most]
    return thin
