"""The report on traces: where drafts are rejected, their calibration, and which depth pays.

A position of the text counts if a token was drafted there and tried: it is a hit if the draft was
accepted, a miss if the target's own token stands there. Acceptance by depth is that of `Stats`.
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
    """As in `Stats`; NaN where no path reached this depth."""
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
    """By the kind of the text's token; most misses first."""
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
        drafts = sum(group.drafts for group in self.calibration)
        distance = 0.0
        for group in self.calibration:
            distance += group.drafts * abs(group.draft_prob - group.accepted)
        return distance / drafts if drafts else math.nan

    def summary(self) -> str:
        """Lines of text: what is rejected most, which depths pay, and the calibration error."""
        kinds = ", ".join(
            f"{kind.name} {kind.rejection_rate:.0%} of {kind.positions}" for kind in self.kinds
        )
        depths = ", ".join(f"{depth.depth}: {depth.gained_per_ms:.3f}" for depth in self.depths)
        return (
            f"{self.stats.tokens} tokens in {self.stats.rounds} rounds, acceptance length "
            f"{self.stats.acceptance_length:.2f}\nrejected by kind: {kinds or '-'}\n"
            f"accepted tokens per ms of drafting, by depth: {depths or '-'}\n"
            f"expected calibration error of the draft: {self.calibration_error:.3f}"
        )


@dataclass(frozen=True)
class Position:
    """A position of the text for which a token was drafted."""

    token: str
    """The token of the text."""
    hit: bool
    instead: str
    """The draft's likeliest token; the first one where it gave no probabilities."""


def trace_report(traces: Sequence[dict[str, Any]]) -> TraceReport:
    """Summarize the data of traces, all of one drafter and rule."""
    if not traces:
        raise ValueError("a report needs at least one trace")
    stats = Stats.merged(map(stats_of, traces))
    all_positions: list[Position] = []
    prompts = []
    for trace in traces:
        tried = list(positions(trace))
        all_positions += tried
        rejected = sum(not position.hit for position in tried)
        figures = trace["stats"]
        plain_decoding = trace["plain"] or {}
        row = PromptRow(
            prompt=trace["prompt"],
            tokens=figures["tokens"],
            rounds=figures["rounds"],
            acceptance_length=_number(figures["acceptance_length"]),
            rejection_rate=rejected / len(tried) if tried else math.nan,
            tokens_per_second=_number(figures["tokens_per_second"]),
            plain_tokens_per_second=_number(plain_decoding.get("tokens_per_second")),
        )
        prompts.append(row)
    most_missed = counts(all_positions, lambda token: token)[:MOST]
    plain = [trace["plain"]["ms_per_token"] for trace in traces if trace["plain"]]
    return TraceReport(
        rule=traces[0]["rule"],
        stats=stats,
        kinds=counts(all_positions, token_kind),
        tokens=[token for token in most_missed if token.misses],
        depths=depths(traces, stats),
        calibration=calibration(drafts(traces)),
        prompts=prompts,
        plain_ms=sum(plain) / len(plain) if plain else math.nan,
    )


def stats_of(trace: dict[str, Any]) -> Stats:
    """The statistics of a trace's rounds, as far as they say what was accepted."""
    depth = len(trace["stats"]["acceptance_rate_by_depth"])
    row = []
    milliseconds: dict[str, float] = defaultdict(float)
    round_seconds = []
    for number, recorded in enumerate(trace["rounds"]):
        # Of the accepted nodes one is the root.
        accepted = sum(node["s"] == 1 for node in recorded["nodes"]) - 1
        drafted = max(node_depths(recorded))
        row.append(
            RoundRecord(accepted, recorded["emitted"], drafted, number, recorded["fallback"])
        )
        for part, value in recorded["parts"].items():
            milliseconds[part] += value
        round_seconds.append(recorded["ms"] / 1000)
    seconds = {part: value / 1000 for part, value in milliseconds.items()}
    return Stats([row], depth, seconds, round_seconds)


def node_depths(recorded: dict[str, Any]) -> list[int]:
    """Depth of each node of a round's tree."""
    depths: list[int] = []
    for node in recorded["nodes"]:
        depths.append(depths[node["u"]] + 1 if node["u"] >= 0 else 0)
    return depths


def positions(trace: dict[str, Any]) -> Iterator[Position]:
    """Yield the drafted positions of a text, hits and misses, up to the text's end."""
    vocab = [entry["t"] for entry in trace["vocab"]]
    for recorded in trace["rounds"]:
        # The accepted path, and the token after each of its nodes: path [0, 2, 5] with the bonus
        # token x has the tokens of nodes 2 and 5, and x.
        nodes = recorded["nodes"]
        path = [node for node, fields in enumerate(nodes) if fields["s"] == 1]
        following = [*(nodes[node]["v"] for node in path[1:]), recorded["next"]]
        for step, (parent, token) in enumerate(zip(path, following, strict=True)):
            children = [fields for fields in nodes if fields["u"] == parent]
            if children and step < recorded["emitted"]:
                best = max(children, key=lambda child: -1.0 if child["q"] is None else child["q"])
                hit = step + 1 < len(path)  # only the bonus token is a miss
                yield Position(vocab[token], hit, vocab[best["v"]])


def token_kind(text: str) -> str:
    """The kind of a token, by its text."""
    for kind, pattern in KINDS:
        if re.fullmatch(pattern, text, re.DOTALL):
            return kind
    return "other"


def counts(tried: Iterable[Position], key: Any) -> list[Count]:
    """Positions and misses by the key of their token; most misses first."""
    grouped: dict[str, list[Position]] = defaultdict(list)
    for position in tried:
        grouped[key(position.token)].append(position)
    rows = []
    for name, members in grouped.items():
        missed = [position for position in members if not position.hit]
        most_common = Counter(position.instead for position in missed).most_common(1)
        instead = most_common[0][0] if most_common else ""
        rows.append(Count(name, len(members), len(missed), instead))
    return sorted(rows, key=lambda count: (-count.misses, -count.positions, count.name))


def depths(traces: Sequence[dict[str, Any]], stats: Stats) -> list[Depth]:
    """Gain and price of each depth."""
    # 1. Nodes of each depth, and milliseconds of drafting, which each depth of a round shares
    #    equally.
    records = [record for row in stats.rows for record in row]
    nodes: Counter[int] = Counter()
    spent: dict[int, float] = defaultdict(float)
    for trace in traces:
        for recorded in trace["rounds"]:
            depths_of_nodes = node_depths(recorded)
            nodes.update(depths_of_nodes)
            deepest = max(depths_of_nodes)
            for depth in range(1, deepest + 1):
                spent[depth] += recorded["parts"].get("draft", 0.0) / deepest
    # 2. A round gains at depth d if it accepted d drafts, and returned as many.
    rows = []
    for depth, rate in enumerate(stats.acceptance_rate_by_depth, start=1):
        gained = sum(min(record.accepted, record.returned) >= depth for record in records)
        rounds = len(records)
        rows.append(
            Depth(depth, rate, gained / rounds, nodes[depth] / rounds, spent[depth] / rounds)
        )
    return rows


def drafts(traces: Sequence[dict[str, Any]]) -> Iterator[tuple[float, float, bool]]:
    """Draft probability, target probability and fate of each draft that was tried."""
    for trace in traces:
        for recorded in trace["rounds"]:
            for node in recorded["nodes"][1:]:
                if node["s"] >= 0 and node["q"] is not None:
                    yield node["q"], node["p"] or 0.0, node["s"] == 1


def calibration(tried: Iterable[tuple[float, float, bool]]) -> list[CalibrationBin]:
    """Drafts in `BINS` bins of their probability; empty ones are left out."""
    bins: dict[int, list[tuple[float, float, bool]]] = defaultdict(list)
    for draft in tried:
        # Probability 1 belongs to the last bin.
        bins[min(int(draft[0] * BINS), BINS - 1)].append(draft)
    filled = []
    for _, members in sorted(bins.items()):
        means = [sum(column) / len(members) for column in zip(*members, strict=True)]
        filled.append(CalibrationBin(len(members), *means))
    return filled


def _number(value: float | None) -> float:
    return math.nan if value is None else value
