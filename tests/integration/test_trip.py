"""There and back: every head is trained, pushed to a Hub, loaded by its id, and generates the same
tokens."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from runs import changed

from headstart.heads import HEADS
from headstart.inference import SpeculativeLM
from headstart.scripts.push import PushConfig, push_head
from headstart.train.loop import train

OPTIONS = {
    "medusa": {"num_heads": 2, "lm_head": "shared"},
    "hydra": {"num_heads": 2},
    "hydra++": {"num_heads": 2},
    "dspark": {
        "block_size": 3,
        "num_layers": 1,
        "draft_vocab_size": 8,
        "markov_rank": 4,
        "markov": "gated",
    },
    "dflash": {"block_size": 3, "num_layers": 1, "draft_vocab_size": 8},
    "eagle": {"depth": 2},
    "eagle3": {"depth": 2, "feature_layers": [0], "draft_vocab_size": 8},
    "mtp": {"depth": 2},
}


@pytest.mark.parametrize("kind", HEADS)
def test_a_pushed_head_generates_and_is_accepted_as_at_home(hub, kind, short, taught):
    run = train(changed(short, head={"type": kind, **OPTIONS[kind]}, loop={"max_steps": 8}))
    repo = f"me/{kind.replace('+', 'p')}"
    push = PushConfig(run=str(run), repo=repo, target=str(taught), token="hf_x")
    push_head(dataclasses.replace(push, dry_run=True))
    assert not hub.repos
    push_head(push)

    def written(folder):
        lm = SpeculativeLM.from_pretrained(str(taught), head=folder, dtype=torch.float32)
        return lm.generate(torch.tensor([[65, 66, 67, 68]]), max_new_tokens=24, do_sample=False)

    home, away = written(str(run / "best")), written(push.repo)
    assert torch.equal(home.sequences, away.sequences)
    assert home.stats.rows == away.stats.rows and home.stats.rounds > 0
