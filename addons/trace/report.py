"""The report on traces: where drafts are rejected, their calibration, and which depth pays.

A position is a place of the text that was drafted and tried: a hit if a draft stands there, a miss
if the target's own token does. Acceptance by depth is that of `Stats`.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...inference.trees.stats import RoundRecord, Stats

BINS = 10
"""Bins of the draft's probability, of equal width."""
MOST = 15
"""Tokens that are listed."""
KINDS = (
    ("special token", r"<\|.*\|>|</?s>|<[a-z_]+>"),
    ("part of a character", r"⟨.*⟩"),
    ("newline", r"\s*\n\s*"),
    ("whitespace", r"\s+"),
    ("number", r"\s*\d.*"),
    ("word start", r"\s+[^\W\d_].*"),
    ("word continuation", r"[^\W\d_].*"),
    ("punctuation", r"\s*[.,;:!?'\"’“”‘()\-–—…«»¿¡][^\w]*.*"),
    ("code symbol", r"\s*[\[\]{}<>=+*/\\|&^%$#@~`_].*"),
)
"""Kinds of tokens by what their text matches; the first that fits."""


@dataclass(frozen=True)
class Count:
    """Positions of one kind."""

    name: str
    positions: int
    misses: int
    instead: str = ""
    """What the draft proposed most often where it missed."""

    @property
    def rejection_rate(self) -> float:
        """Share of positions at which no draft stands."""
        return self.misses / self.positions


@dataclass(frozen=True)
class Depth:
    """One depth of the drafts."""

    depth: int
    acceptance_rate: float
    """As in `Stats`; NaN where no path came so far."""
    gained: float
    """Accepted tokens a round at this depth."""
    nodes: float
    """Drafted nodes a round at this depth."""
    draft_ms: float
    """The draft's time in a round, in equal parts by depth."""

    @property
    def gained_per_ms(self) -> float:
        """Accepted tokens for each ms of drafting."""
        return self.gained / self.draft_ms if self.draft_ms else math.nan


@dataclass(frozen=True)
class CalibrationBin:
    """Drafts of about the same probability."""

    drafts: int
    draft_prob: float
    """Their mean probability by the draft."""
    target_prob: float
    """And by the target."""
    accepted: float
    """The share that was accepted."""


@dataclass(frozen=True)
class PromptRow:
    """The figures of one trace: a row of the report's table of prompts."""

    prompt: str
    tokens: int
    rounds: int
    acceptance_length: float
    rejection_rate: float
    """NaN where nothing was drafted."""
    tokens_per_second: float
    plain_tokens_per_second: float
    """NaN where plain decoding was not measured."""


@dataclass(frozen=True)
class TraceReport:
    """A summary of traces."""

    rule: str
    stats: Stats
    """Acceptance over all traces."""
    kinds: list[Count]
    """By the kind of the token that stands in the text; most misses first."""
    tokens: list[Count]
    """The same by token."""
    depths: list[Depth]
    calibration: list[CalibrationBin]
    """Empty for sources without probabilities."""
    prompts: list[PromptRow]
    plain_ms: float
    """Time of a token in plain decoding; NaN where it was not measured."""

    @property
    def calibration_error(self) -> float:
        """Expected calibration error of the draft; NaN without drafts.

        It is the mean distance between draft probability and share accepted, weighted by drafts.
        """
        drafts = sum(each.drafts for each in self.calibration)
        distance = sum(
            each.drafts * abs(each.draft_prob - each.accepted) for each in self.calibration
        )
        return distance / drafts if drafts else math.nan

    def summary(self) -> str:
        """Lines of text: what is rejected most, which depths pay, and the calibration error."""
        kinds = ", ".join(
            f"{each.name} {each.rejection_rate:.0%} of {each.positions}" for each in self.kinds
        )
        depths = ", ".join(f"{each.depth}: {each.gained_per_ms:.3f}" for each in self.depths)
        return (
            f"{self.stats.tokens} tokens in {self.stats.rounds} rounds, acceptance length "
            f"{self.stats.acceptance_length:.2f}\nrejected by kind: {kinds or '-'}\n"
            f"accepted tokens per ms of drafting, by depth: {depths or '-'}\n"
            f"expected calibration error of the draft: {self.calibration_error:.3f}"
        )


@dataclass(frozen=True)
class Position:
    """A place of the text that was drafted."""

    token: str
    """What stands there."""
    hit: bool
    instead: str
    """The draft's likeliest token there; the first one where it gave no probabilities."""


def trace_report(traces: Sequence[dict[str, Any]]) -> TraceReport:
    """Summarize the data of traces, all of one drafter and rule."""
    if not traces:
        raise ValueError("a report needs at least one trace")
    stats = Stats.merged(map(stats_of, traces))
    places = [list(positions(trace)) for trace in traces]
    every = [place for rows in places for place in rows]
    plain = [trace["plain"]["ms_per_token"] for trace in traces if trace["plain"]]
    return TraceReport(
        rule=traces[0]["rule"],
        stats=stats,
        kinds=counts(every, token_kind),
        tokens=[each for each in counts(every, lambda token: token)[:MOST] if each.misses],
        depths=depths(traces, stats),
        calibration=calibration(drafts(traces)),
        prompts=[prompt_row(trace, rows) for trace, rows in zip(traces, places, strict=True)],
        plain_ms=sum(plain) / len(plain) if plain else math.nan,
    )


def stats_of(trace: dict[str, Any]) -> Stats:
    """The statistics of a trace's rounds, as far as they say what was accepted."""
    depth = len(trace["stats"]["acceptance_rate_by_depth"])
    row = []
    for number, each in enumerate(trace["rounds"]):
        accepted = sum(node["s"] == 1 for node in each["nodes"]) - 1
        row.append(
            RoundRecord(accepted, each["emitted"], max(node_depths(each)), number, each["fallback"])
        )
    seconds = {
        part: sum(each["parts"].get(part, 0.0) for each in trace["rounds"]) / 1000
        for part in parts_of(trace)
    }
    return Stats([row], depth, seconds, [each["ms"] / 1000 for each in trace["rounds"]])


def parts_of(trace: dict[str, Any]) -> list[str]:
    """Parts of the rounds' time, as they are named in a trace."""
    return list(dict.fromkeys(part for each in trace["rounds"] for part in each["parts"]))


def node_depths(found: dict[str, Any]) -> list[int]:
    """Depth of each node of a round's tree."""
    depths: list[int] = []
    for node in found["nodes"]:
        depths.append(depths[node["u"]] + 1 if node["u"] >= 0 else 0)
    return depths


def positions(trace: dict[str, Any]) -> Iterator[Position]:
    """Yield the drafted positions of a text, hits and misses, up to the text's end."""
    vocab = [entry["t"] for entry in trace["vocab"]]
    for found in trace["rounds"]:
        nodes = found["nodes"]
        path = [number for number, node in enumerate(nodes) if node["s"] == 1]
        following = [*(nodes[number]["v"] for number in path[1:]), found["next"]]
        for place, (number, token) in enumerate(zip(path, following, strict=True)):
            children = [node for node in nodes if node["u"] == number]
            if children and place < found["emitted"]:
                best = max(children, key=lambda node: -1.0 if node["q"] is None else node["q"])
                yield Position(vocab[token], place + 1 < len(path), vocab[best["v"]])


def token_kind(text: str) -> str:
    """The kind of a token, by its text."""
    return next(
        (kind for kind, pattern in KINDS if re.fullmatch(pattern, text, re.DOTALL)), "other"
    )


def counts(places: Iterable[Position], key: Any) -> list[Count]:
    """Positions and misses by the key of their token; most misses first."""
    grouped: dict[str, list[Position]] = defaultdict(list)
    for place in places:
        grouped[key(place.token)].append(place)
    found = []
    for name, rows in grouped.items():
        wrong = Counter(row.instead for row in rows if not row.hit).most_common(1)
        found.append(
            Count(name, len(rows), sum(not row.hit for row in rows), wrong[0][0] if wrong else "")
        )
    return sorted(found, key=lambda each: (-each.misses, -each.positions, each.name))


def depths(traces: Sequence[dict[str, Any]], stats: Stats) -> list[Depth]:
    """Gain and price of each depth."""
    records = [record for row in stats.rows for record in row]
    nodes = Counter(
        depth for trace in traces for each in trace["rounds"] for depth in node_depths(each)
    )
    spent: Counter[int] = Counter()
    for trace in traces:
        for each in trace["rounds"]:
            deepest = max(node_depths(each))
            for depth in range(1, deepest + 1):
                spent[depth] += each["parts"].get("draft", 0.0) / deepest
    found = []
    for depth, rate in enumerate(stats.acceptance_rate_by_depth, start=1):
        gained = sum(min(record.accepted, record.returned) >= depth for record in records)
        found.append(
            Depth(
                depth,
                rate,
                *(value / len(records) for value in (gained, nodes[depth], spent[depth])),
            )
        )
    return found


def drafts(traces: Sequence[dict[str, Any]]) -> Iterator[tuple[float, float, bool]]:
    """Draft probability, target probability and fate of each draft that was tried."""
    for trace in traces:
        for found in trace["rounds"]:
            for node in found["nodes"][1:]:
                if node["s"] >= 0 and node["q"] is not None:
                    yield node["q"], node["p"] or 0.0, node["s"] == 1


def calibration(tried: Iterable[tuple[float, float, bool]]) -> list[CalibrationBin]:
    """Drafts in `BINS` bins of their probability; empty ones are left out."""
    bins: dict[int, list[tuple[float, float, bool]]] = defaultdict(list)
    for draft in tried:
        bins[min(int(draft[0] * BINS), BINS - 1)].append(draft)
    return [
        CalibrationBin(len(rows), *(sum(column) / len(rows) for column in zip(*rows, strict=True)))
        for _, rows in sorted(bins.items())
    ]


def prompt_row(trace: dict[str, Any], places: Sequence[Position]) -> PromptRow:
    """One trace in numbers."""
    stats, plain = trace["stats"], trace["plain"] or {}
    return PromptRow(
        prompt=trace["prompt"],
        tokens=stats["tokens"],
        rounds=stats["rounds"],
        acceptance_length=_number(stats["acceptance_length"]),
        rejection_rate=sum(not place.hit for place in places) / len(places) if places else math.nan,
        tokens_per_second=_number(stats["tokens_per_second"]),
        plain_tokens_per_second=_number(plain.get("tokens_per_second")),
    )


def _number(value: float | None) -> float:
    return math.nan if value is None else value
