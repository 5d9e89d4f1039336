"""What a round costs an accelerator besides arithmetic: waits, uploads, and operations that are
launched one by one.

benchmarks/rounds.py prints the table.
"""

from __future__ import annotations

import itertools
import statistics
from typing import Any

import pytest
import torch
from helpers import DEVICE, EachRound, continued

from headstart.heads import HEADS
from headstart.inference import SpeculativeLM
from headstart.inference.drafters.adaptive import AdaptiveDrafter
from headstart.inference.drafters.by_name import make_drafter
from headstart.inference.drafters.draft_model import AssistantModel
from headstart.inference.engines.model_engine import ModelEngine

if DEVICE != "sim":
    pytest.skip("only the simulated device counts", allow_module_level=True)
import simulated  # changes a process in which it is imported

WAITS, UPLOADS = 1, 2
SAMPLED = 50
"""Operations more where tokens are drawn: by numbers for every token, computed on the device, of
all depths at once."""
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "plain": ({}, 28),
    **{f"{kind}, chain": ({"kind": kind, "tree": "chain:3"}, 47) for kind in HEADS},
    "eagle3, branches": ({"kind": "eagle3", "tree": "branch:2x2x1"}, 61),
    "eagle3, dynamic": ({"kind": "eagle3", "tree": "dynamic:8:3:2"}, 106),
    "eagle3, stopping": ({"kind": "eagle3", "tree": "stop:0.1:chain:3"}, 105),
    "eagle3, adaptive": ({"kind": "eagle3", "tree": "auto", "adaptive": True}, 205),
    "eagle3 and prompt lookup": (
        {"kind": "eagle3", "tree": "chain:3", "drafter": "prompt-lookup"},
        148,
    ),
    "prompt lookup": ({"drafter": "prompt-lookup"}, 74),
    "a second model": ({}, 47),
}
"""What decodes, and how many operations of a round are its own, at most: those of the forwards of
target and drafts are not counted."""


PROMPT = torch.tensor([5, 6, 7, 5, 6, 7, 5, 6])


def differences(totals: list[tuple[int, int, int]]) -> list[tuple[int, ...]]:
    """What each round adds to totals of three counts."""
    return [
        tuple(after - before for before, after in zip(*pair, strict=True))
        for pair in itertools.pairwise(totals)
    ]


def counts_of(
    lm: SpeculativeLM, monkeypatch, **settings
) -> tuple[list[tuple[int, int, int]], simulated.Counts]:
    """Waits, uploads and operations of each round but the first ones, without the forwards of
    target and drafts."""

    def not_counted(owner, name):
        original = getattr(owner, name)

        def call(*given, **named):
            with simulated.uncounted():
                return original(*given, **named)

        monkeypatch.setattr(owner, name, call)

    not_counted(ModelEngine, "model_forward")
    for head in (*HEADS.values(), AssistantModel):
        for name in ("expand", "observe"):
            not_counted(head, name)
    seen = []
    # each uploads its shape once, whenever the clock chooses it first
    adaptive = (part for part in lm.drafter.nested() if isinstance(part, AdaptiveDrafter))
    for tree in (tree for part in adaptive for tree in part.trees):
        continued(lm, [PROMPT], max_new_tokens=8, tree=tree.shape, **settings)
    with simulated.counted() as counts:

        def totals():
            return counts.waits.total(), counts.uploads.total(), counts.operations.total()

        lm.observers.append(EachRound(lambda _: seen.append(totals())))
        continued(lm, [PROMPT], max_new_tokens=48, **settings)
        lm.observers.clear()
    return differences(seen[3:]), counts


@pytest.mark.parametrize(
    ("name", "do_sample"),
    [
        *((name, False) for name in CASES),
        *((name, True) for name in CASES if "chain" not in name or name == "eagle3, chain"),
    ],
)
def test_a_round_waits_once(lms, monkeypatch, name, do_sample):
    """What sampling adds does not depend on which head drafts a chain."""
    options, ceiling = CASES[name]
    _, lm = lms(compile=False, **options)
    if name == "a second model":
        lm = SpeculativeLM(lm.target, make_drafter(lm.target, lm.target, "chain:3"))
    rounds, counts = counts_of(lm, monkeypatch, do_sample=do_sample)
    assert len(rounds) > 3
    waits, uploads, operations = zip(*rounds, strict=True)
    assert statistics.median(waits) == max(waits) == WAITS, counts.waits
    assert max(uploads) <= UPLOADS, counts.uploads
    assert statistics.median(operations) <= ceiling + SAMPLED * do_sample, (
        counts.operations.most_common(9)
    )


LAUNCHES = 12
RECORDED: dict[str, dict[str, Any]] = {
    "plain": {},
    "chain": {"kind": "eagle3", "tree": "chain:3"},
    "branches": {"kind": "eagle3", "tree": "branch:2x2x1"},
    "dynamic": {"kind": "eagle3", "tree": "dynamic:8:3:2"},
    "medusa": {"kind": "medusa", "tree": "branch:2x2"},
    "dflash": {"kind": "dflash", "tree": "chain:3"},
}


def recorded_rounds(lm: SpeculativeLM) -> tuple[list[tuple[int, int, int]], simulated.Counts]:
    """Launches, waits and uploads of each greedy round, after the first ones, which are
    recorded."""
    seen = []
    with simulated.counted() as counts:

        def note(_):
            seen.append((counts.launches.total(), counts.waits.total(), counts.uploads.total()))

        lm.observers.append(EachRound(note))
        continued(lm, [PROMPT], max_new_tokens=60)
        lm.observers.clear()
    return differences(seen[8:]), counts


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_round_is_a_dozen_launches(lms, name):
    _, lm = lms(**RECORDED[name])
    rounds, counts = recorded_rounds(lm)
    launches, waits, uploads = zip(*rounds, strict=True)
    assert statistics.median(launches) <= LAUNCHES, counts.launches.most_common(30)
    assert set(waits) == {1} and set(uploads) == {0}


@pytest.mark.parametrize("name", ["plain", "dynamic"])
def test_texts_of_any_length_use_the_same_recordings(lms, name):
    """Longer prompts and more new tokens: each round is replayed, none is recorded again."""
    _, lm = lms(**RECORDED[name])
    random = torch.Generator().manual_seed(1)

    def recordings_after(length, new):
        continued(lm, [torch.randint(1, 40, (length,), generator=random)], max_new_tokens=new)
        return len(lm.target.engine.runner.recordings)

    recordings_after(8, 40)
    known = recordings_after(8, 40)
    assert known > 1
    assert [recordings_after(*sizes) for sizes in ((90, 30), (8, 200), (300, 40))] == [known] * 3
