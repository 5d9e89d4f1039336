"""What a serving team reads is what happened."""

from __future__ import annotations

import re

import pytest
import torch

from headstart.inference import SpeculativeLM, Stats
from headstart.inference.metrics import Meter, RoundRecord


def stats():
    """Two rows in three rounds: a chain of 3, a plain round, and a chain of 2 whose text ends early."""
    rows = [
        [RoundRecord(3, 4, 3, 0), RoundRecord(0, 1, 0, 1), RoundRecord(2, 2, 2, 2)],
        [RoundRecord(1, 2, 3, 0), RoundRecord(0, 1, 0, 1)],
    ]
    seconds = {"prefill": 9.0, "draft": 1.0, "target": 3.0, "verify": 0.5, "cache": 0.5}
    return Stats(rows, 3, seconds, [0.4, 0.1, 0.2])


def test_a_tokens_time_is_its_share_of_the_round():
    assert sorted(stats().token_seconds) == pytest.approx(sorted([0.1] * 4 + [0.2] * 2 + [0.1] * 2 + [0.1] * 2))


def test_merged_statistics_keep_every_tokens_time():
    assert sorted(Stats.merged([stats(), stats()]).token_seconds) == sorted(stats().token_seconds * 2)


def test_a_meter_listens_to_every_generation_and_writes_what_prometheus_reads(tiny_target):
    target = tiny_target(vocab_size=20)
    lm, meter, heard = SpeculativeLM.from_pretrained(target, drafter="prompt-lookup", fallback=False), Meter(), []
    lm.callbacks += [meter.add, heard.append]
    for start in range(3):
        lm.generate(torch.tensor([[start, 1, 2, start]]), max_new_tokens=30, do_sample=False)
    assert len(heard) == 3
    whole = Stats.merged(heard)
    samples = {}
    for line in meter.text().splitlines():
        if line.startswith("#"):
            assert re.fullmatch(r"# TYPE headstart_[a-z_]+ (counter|summary)", line)
        else:
            name, value = re.fullmatch(r'(headstart_[a-z_]+(?:\{[a-z]+="[a-z0-9.]+"\})?) (\S+)', line).groups()
            samples[name] = float(value)
    assert samples["headstart_tokens_total"] == whole.tokens == 3 * 29
    assert samples["headstart_rounds_total"] == whole.rounds
    assert samples["headstart_accepted_tokens_total"] == sum(r.accepted for row in whole.rows for r in row)
    assert samples["headstart_draft_tokens_total"] == sum(r.drafted for row in whole.rows for r in row) > 0
    by_place = [value for name, value in samples.items() if "per_position" in name]
    assert sum(by_place) == samples["headstart_accepted_tokens_total"] > 0
    assert samples['headstart_seconds_total{part="target"}'] == pytest.approx(whole.seconds["target"])
    assert samples['headstart_inter_token_seconds{quantile="0.99"}'] > 0
    assert Meter().text() == "# TYPE headstart_inter_token_seconds summary\n"
