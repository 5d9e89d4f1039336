"""`init_from`: a run that begins with another head's weights, and nothing else of its run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers import saved_head
from messages import refused
from runs import (
    changed,
    checkpoints_of,
    curve_of,
    last_bytes,
    last_weights,
    same_tensors,
    write_rows,
)

from headstart.heads import build_head
from headstart.heads.checkpoints.save_load import copy_weights, load_head
from headstart.heads.layers.draft_vocab import with_trained_rows
from headstart.inference import Target
from headstart.train.features import online as features
from headstart.train.inputs import warm_start
from headstart.train.loop import train

SEVEN = {"type": "medusa", "num_heads": 2, "draft_vocab_size": 7}


@pytest.fixture(scope="module")
def earlier(run_options, tmp_path_factory):
    """A run with a draft vocabulary, whose head is taken over."""
    config = run_options(tmp_path_factory.mktemp("earlier"), 12)
    return train(changed(config, head=SEVEN, loop={"eval_every": 0, "save_every": 0}))


@pytest.fixture
def warm(short, earlier):
    """A run that starts from it."""
    return changed(short, head=SEVEN, init_from=str(earlier / "last"), loop={"max_steps": 3})


def new_head(kind, target, counts_V=None, **options):
    head = build_head(kind, options, target.info)
    if counts_V is not None:
        head.initialize(target.modules, counts_V)
    return head


@pytest.fixture
def first_seen(monkeypatch):
    """The head's weights before each step, as runs in this process go."""
    seen = []
    original = features.online_features

    def record(target, head, *rest):
        seen.append({name: tensor.clone() for name, tensor in head.state_dict().items()})
        return original(target, head, *rest)

    monkeypatch.setattr(features, "online_features", record)
    return seen


def test_it_begins_with_the_other_heads_weights_at_step_0(warm, earlier, first_seen):
    folder = train(warm)
    taken = last_weights(earlier)
    assert same_tensors(first_seen[0], taken)
    assert list(curve_of(folder)) == [1, 2, 3]
    assert not same_tensors(last_weights(folder), taken)


def test_it_learns_as_a_new_run_does_and_not_as_a_resumed_one(warm, earlier):
    """The optimizer, the schedule and the order of the data start anew."""
    resumed = changed(warm, output=f"{warm.output}-resumed", init_from=None, loop={"max_steps": 15})
    shutil.copytree(earlier / "checkpoints", f"{resumed.output}/checkpoints")
    assert checkpoints_of(resumed.output) == ["step-00000012"]
    assert not same_tensors(*(last_weights(train(options)) for options in (warm, resumed)))
    (checkpoint,) = Path(warm.output, "checkpoints").iterdir()
    state = torch.load(checkpoint / "optimizer.bin", weights_only=True)
    assert {float(row["step"]) for row in state["state"].values()} == {3.0}


def test_a_warm_run_is_resumed_from_its_own_checkpoint(warm, resumed):
    whole, folder = resumed(warm, 2)
    assert last_bytes(folder) == last_bytes(whole)


def other_data(folder):
    """Answers whose most frequent tokens are others."""
    rows = []
    for text in ["quick brown fox", "jumps over dogs", "very lazy today"] * 2:
        answer = {"role": "assistant", "content": text}
        rows.append({"messages": [{"role": "user", "content": "go"}, answer]})
    return {"sources": [write_rows(folder / "other.jsonl", rows)]}


@pytest.mark.parametrize("size", [5, 7, 12])
def test_the_draft_vocabulary_follows_the_data(warm, earlier, tmp_path, first_seen, size):
    """The tokens of the answers come first, then those of the other head, whose rows are kept."""
    head = SEVEN | {"draft_vocab_size": size}
    options = changed(warm, head=head, data=other_data(tmp_path), loop={"max_steps": 1})
    new = changed(options, init_from=None, output=f"{warm.output}-new")
    covered = [load_head(train(each) / "last")[1].measured["coverage"] for each in (options, new)]
    assert covered[0] == covered[1]
    began, taken = first_seen[0], last_weights(earlier)
    ours, theirs = began["token_map"].tolist(), taken["token_map"].tolist()
    common = set(ours) & set(theirs)
    assert len(ours) == size and 0 < len(common) < 7
    for name in ("lm_heads.0.weight", "lm_heads.1.weight"):
        for token in common:
            assert torch.equal(began[name][ours.index(token)], taken[name][theirs.index(token)])


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("medusa", {"num_heads": 2}),
        ("hydra", {"num_heads": 2}),
        ("eagle3", {"feature_layers": [0], "depth": 2}),
        ("dflash", {"feature_layers": [0], "block_size": 3}),
        ("dspark", {"feature_layers": [0], "block_size": 3}),
    ],
)
@pytest.mark.parametrize("sizes", [(9, 6), (6, 9), (9, 9)])
def test_every_row_of_a_common_token_is_taken(tiny_target, kind, options, sizes):
    target = tiny_target(layers=2, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    heads = []
    for size in sizes:
        torch.manual_seed(len(heads))
        counts_V = torch.randint(1, 99, (target.info.vocab_size,), generator=generator)
        heads.append(new_head(kind, target, counts_V, draft_vocab_size=size, **options))
    other, head = heads
    before = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    copy_weights(head, other)
    ours, theirs = head.vocabulary().tolist(), other.vocabulary().tolist()
    common_V = torch.tensor([token in theirs for token in ours])
    rows = [theirs.index(token) for token in ours if token in theirs]
    assert rows
    by_token = 0
    for name, tensor in head.state_dict().items():
        if name in ("token_map", "d2t", "t2d"):
            assert torch.equal(tensor, before[name])
        elif any(name.startswith(layer) for layer in head.vocabulary_layers):
            by_token += 1
            trained = other.state_dict()[name][rows]
            assert torch.equal(tensor[common_V], trained)
            assert torch.equal(tensor, with_trained_rows(before[name], common_V, trained))
        else:
            assert torch.equal(tensor, other.state_dict()[name])
    assert by_token


def test_without_a_common_token_a_vocabulary_begins_as_a_new_heads(tiny_target):
    target = tiny_target(layers=2, dtype=torch.float32)
    tokens_V = torch.arange(target.info.vocab_size)
    first, next_ones = tokens_V < 6, (tokens_V >= 6) & (tokens_V < 12)
    other, head = (
        new_head("medusa", target, chosen_V.long(), num_heads=1, draft_vocab_size=6)
        for chosen_V in (first, next_ones)
    )
    before = head.lm_heads[0].weight.clone()
    copy_weights(head, other)
    assert torch.equal(head.lm_heads[0].weight, before)


@pytest.mark.parametrize(
    ("head", "words"),
    [
        ({"type": "hydra", "num_heads": 2}, "MedusaHead HydraHead"),
        (
            SEVEN | {"num_heads": 3},
            "missing 'blocks.2.layers.0.weight' 'lm_heads.2.weight'",
        ),
        (SEVEN | {"num_heads": 1}, "unknown 'blocks.1.layers.0.weight'"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_by_name(warm, head, words):
    with refused(words):
        train(changed(warm, head=head))


def test_a_head_for_another_target_is_refused(warm, tiny_target, tmp_path):
    saved_head(tmp_path / "h", tiny_target(layers=3, dtype=torch.float32), num_heads=2)
    with refused("3 2"):
        train(changed(warm, init_from=str(tmp_path / "h")))


def with_origin(earlier, folder, **changes):
    """A copy of the earlier head with another origin; None removes a key."""
    shutil.copytree(earlier / "last", folder)
    config = json.loads((folder / "config.json").read_text())
    origin = config["headstart"]["origin"] | changes
    config["headstart"]["origin"] = {
        name: value for name, value in origin.items() if value is not None
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_a_vocabulary_of_another_tokenizer_is_refused(warm, earlier, tmp_path):
    source = with_origin(earlier, tmp_path / "other", tokenizer="0123456789abcdef")
    with refused("tokenizer 0123456789abcdef"):
        train(changed(warm, init_from=source))


@pytest.mark.parametrize(
    "change", [{"tokenizer": None}, {"weights": "0" * 16, "dtype": "bfloat16", "thinking": True}]
)
def test_what_is_not_known_or_does_not_matter_is_no_obstacle(taught, earlier, tmp_path, change):
    source = with_origin(earlier, tmp_path / "head", **change)
    target = Target.from_pretrained(taught, torch.float32)
    head = new_head("medusa", target, num_heads=2, draft_vocab_size=7)
    # no token is more frequent than another
    counts_V = torch.ones(target.info.vocab_size, dtype=torch.int64)
    warm_start(head, source, target, counts_V, load_head(earlier / "last")[1].provenance)
    assert same_tensors(head.state_dict(), last_weights(earlier))
