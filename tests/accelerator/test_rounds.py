"""What a round costs an accelerator besides arithmetic: waits, uploads, and operations that are asked for one by one.

`python tests/accelerator/test_rounds.py` prints the table of benchmarks/rounds.md.
"""

from __future__ import annotations

import copy
import itertools
import statistics

import pytest
import simulated
import torch
from accelerator_helpers import head_for

from headstart.heads import HEADS
from headstart.inference import SpeculativeLM, Target
from headstart.inference.drafters import draft_model

WAITS, UPLOADS = 1, 2
PLAIN, STATIC, DYNAMIC, JOINED = 40, 60, 100, 140
CASES = {
    "plain": ({}, PLAIN),
    **{f"{kind}, chain": ({"kind": kind, "tree": "chain:3"}, STATIC) for kind in HEADS},
    "eagle3, branches": ({"kind": "eagle3", "tree": "branch:2x2x1"}, STATIC),
    "eagle3, dynamic": ({"kind": "eagle3", "tree": "dynamic:8:3:2"}, DYNAMIC),
    "eagle3, stopping": ({"kind": "eagle3", "tree": "stop:0.1:chain:3"}, DYNAMIC),
    "eagle3, adaptive": ({"kind": "eagle3", "tree": "auto", "fallback": True}, DYNAMIC),
    "eagle3 and prompt lookup": ({"kind": "eagle3", "tree": "chain:3", "drafter": "prompt-lookup"}, JOINED),
    "prompt lookup": ({"drafter": "prompt-lookup"}, DYNAMIC),
    "lookahead": ({"drafter": "lookahead"}, DYNAMIC),
    "n-grams": ({"drafter": "ngram:2"}, DYNAMIC),
    "random": ({"drafter": "random"}, DYNAMIC),
    "a second model": ({"drafter": "model"}, DYNAMIC),
}


def lm_of(there: Target, on_cpu: Target, kind=None, drafter=None, tree="auto", fallback=False) -> SpeculativeLM:
    head = None if kind is None else copy.deepcopy(head_for(on_cpu, kind)).to(there.device)
    if drafter == "model":
        drafter = draft_model(there, there, "chain:3")
    return SpeculativeLM.from_pretrained(there, head, tree=tree, compile=False, drafter=drafter, fallback=fallback)


def counts_of(lm: SpeculativeLM, monkeypatch, **settings) -> tuple[list[tuple[int, int, int]], simulated.Counts]:
    """Waits, uploads and operations of each round but the first ones, without the forwards of target and drafts."""

    def not_counted(owner, name):
        original = getattr(owner, name)

        def call(*given, **named):
            with simulated.uncounted():
                return original(*given, **named)

        monkeypatch.setattr(owner, name, call)

    not_counted(Target, "_run")
    for head in HEADS.values():
        for name in ("expand", "observe"):
            not_counted(head, name)
    seen = []
    with simulated.counted() as counts:
        totals = lambda: tuple(each.total() for each in (counts.waits, counts.uploads, counts.operations))  # noqa: E731
        lm.round_listeners.append(lambda _: seen.append(totals()))
        prompts = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6]]).to(lm.target.device)
        with torch.inference_mode():
            lm.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=40, **settings)
        lm.round_listeners.clear()
    rounds = [tuple(b - a for a, b in zip(*pair, strict=True)) for pair in itertools.pairwise(seen[3:])]
    return rounds, counts


@pytest.mark.parametrize("settings", [{"do_sample": False}, {"do_sample": True}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", CASES)
def test_a_round_waits_once(there, on_cpu, monkeypatch, name, settings):
    options, ceiling = CASES[name]
    lm = lm_of(there, on_cpu, **options)
    rounds, counts = counts_of(lm, monkeypatch, **settings)
    assert len(rounds) > 5
    waits, uploads, operations = zip(*rounds, strict=True)
    assert statistics.median(waits) == max(waits) == WAITS, counts.waits
    assert max(uploads) <= UPLOADS, counts.uploads
    assert statistics.median(operations) <= ceiling + 20 * settings["do_sample"], counts.operations.most_common(40)
