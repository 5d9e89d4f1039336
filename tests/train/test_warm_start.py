"""`init_from`: a run that begins with another head's weights, and nothing else of its run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from messages import refused
from runs import last_bytes, last_weights, log_of, same_tensors

from headstart.heads import CheckpointMetadata, build_head
from headstart.heads.checkpoints.save_load import copy_weights, load_head, save_head
from headstart.heads.layers.draft_vocab import with_trained_rows
from headstart.inference import Target
from headstart.train.features import online as features
from headstart.train.inputs import warm_start
from headstart.train.loop import train


@pytest.fixture(scope="module")
def earlier(run_options, changed, tmp_path_factory):
    """A run with a draft vocabulary, whose head is taken over."""
    config = run_options(tmp_path_factory.mktemp("earlier"), 12)
    config = changed(config, head={"type": "medusa", "num_heads": 2, "draft_vocab_size": 7})
    return train(changed(config, loop={"eval_every": 0, "save_every": 0}))


@pytest.fixture
def warm(short, changed, earlier):
    """A run that starts from it."""
    return changed(
        short,
        head={"type": "medusa", "num_heads": 2, "draft_vocab_size": 7},
        init_from=str(earlier / "last"),
        loop={"max_steps": 3},
    )


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
    assert [row["step"] for row in log_of(folder) if "loss" in row] == [1, 2, 3]
    assert not same_tensors(last_weights(folder), taken)


def test_it_learns_as_a_new_run_does_and_not_as_a_resumed_one(warm, earlier, changed):
    """The optimizer, the schedule and the order of the data start anew."""
    resumed = changed(warm, output=f"{warm.output}-resumed", init_from=None)
    shutil.copytree(earlier / "checkpoints", f"{resumed.output}/checkpoints")
    (checkpoint,) = (earlier / "checkpoints").iterdir()
    assert checkpoint.name == "step-00000012"
    config = changed(resumed, loop={"max_steps": 15})
    ends = [last_weights(train(options)) for options in (warm, config)]
    assert not same_tensors(*ends)
    (checkpoint,) = Path(warm.output, "checkpoints").iterdir()
    state = torch.load(checkpoint / "optimizer.bin", weights_only=True)
    assert {float(row["step"]) for row in state["state"].values()} == {3.0}


def test_a_warm_run_is_resumed_from_its_own_checkpoint(warm, resumed):
    whole, folder = resumed(warm, 2)
    assert last_bytes(folder) == last_bytes(whole)


def other_data(folder):
    """Answers whose most frequent tokens are others."""
    path = folder / "other.jsonl"
    words = ["quick brown fox", "jumps over dogs", "very lazy today"] * 2
    rows = [
        [{"role": "user", "content": "go"}, {"role": "assistant", "content": text}]
        for text in words
    ]
    path.write_text("\n".join(json.dumps({"messages": row}) for row in rows), encoding="utf-8")
    return {"sources": [str(path)]}


@pytest.mark.parametrize("size", [5, 7, 12])
def test_the_draft_vocabulary_follows_the_data(warm, earlier, changed, tmp_path, first_seen, size):
    """The tokens of the answers come first, then those of the other head, whose rows are kept."""
    head = {"type": "medusa", "num_heads": 2, "draft_vocab_size": size}
    options = changed(warm, head=head, data=other_data(tmp_path), loop={"max_steps": 1})
    new = changed(options, init_from=None, output=f"{warm.output}-new")
    covered = [load_head(train(each) / "last")[1].measured["coverage"] for each in (options, new)]
    assert covered[0] == covered[1]
    began, taken = first_seen[0], last_weights(earlier)
    ours, theirs = began["token_map"].tolist(), taken["token_map"].tolist()
    assert len(ours) == size
    assert 0 < len(set(ours) & set(theirs)) < 7
    for name in ("lm_heads.0.weight", "lm_heads.1.weight"):
        for token in set(ours) & set(theirs):
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
@pytest.mark.parametrize(("theirs", "ours"), [(9, 6), (6, 9), (9, 9)])
def test_every_row_of_a_common_token_is_taken(tiny_target, kind, options, theirs, ours):
    target = tiny_target(layers=2, dtype=torch.float32)
    size = target.info.vocab_size
    generator = torch.Generator().manual_seed(0)
    heads = []
    for each in (theirs, ours):
        torch.manual_seed(len(heads))
        head = build_head(kind, options | {"draft_vocab_size": each}, target.info)
        head.initialize(target.modules, torch.randint(1, 99, (size,), generator=generator))
        heads.append(head)
    other, head = heads
    before = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    copy_weights(head, other)
    common = set(head.vocabulary().tolist()) & set(other.vocabulary().tolist())
    assert common
    by_token = 0
    for name, tensor in head.state_dict().items():
        if name in ("token_map", "d2t", "t2d"):
            assert torch.equal(tensor, before[name])
        elif any(name.startswith(layer) for layer in head.vocabulary_layers):
            by_token += 1
            ours, theirs = head.vocabulary().tolist(), other.vocabulary().tolist()
            taken = {token: other.state_dict()[name][theirs.index(token)] for token in common}
            shared = [token for token in ours if token in common]
            common_V = torch.tensor([token in common for token in ours])
            trained = torch.stack([taken[token] for token in shared])
            for token in shared:
                assert torch.equal(tensor[ours.index(token)], taken[token])
            assert torch.equal(tensor, with_trained_rows(before[name], common_V, trained))
        else:
            assert torch.equal(tensor, other.state_dict()[name])
    assert by_token


def test_without_a_common_token_a_vocabulary_begins_as_a_new_heads(tiny_target):
    target = tiny_target(layers=2, dtype=torch.float32)
    heads = []
    for tokens in (range(6), range(6, 12)):
        counts_V = torch.zeros(target.info.vocab_size, dtype=torch.int64)
        counts_V[list(tokens)] = 1
        heads.append(build_head("medusa", {"num_heads": 1, "draft_vocab_size": 6}, target.info))
        heads[-1].initialize(target.modules, counts_V)
    other, head = heads
    before = head.lm_heads[0].weight.clone()
    copy_weights(head, other)
    assert torch.equal(head.lm_heads[0].weight, before)


@pytest.mark.parametrize(
    ("head", "words"),
    [
        ({"type": "hydra", "num_heads": 2}, "MedusaHead HydraHead"),
        (
            {"type": "medusa", "num_heads": 3, "draft_vocab_size": 7},
            "missing 'blocks.2.layers.0.weight' 'lm_heads.2.weight'",
        ),
        (
            {"type": "medusa", "num_heads": 1, "draft_vocab_size": 7},
            "unknown 'blocks.1.layers.0.weight'",
        ),
    ],
)
def test_a_head_that_does_not_fit_is_refused_by_name(warm, changed, head, words):
    with refused(words):
        train(changed(warm, head=head))


def test_a_head_for_another_target_is_refused(warm, changed, tiny_target, tmp_path):
    target = tiny_target(layers=3, dtype=torch.float32)
    save_head(
        build_head("medusa", {"num_heads": 2, "draft_vocab_size": 7}, target.info),
        tmp_path / "h",
        CheckpointMetadata(),
    )
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


def test_a_vocabulary_of_another_tokenizer_is_refused(warm, earlier, changed, tmp_path):
    source = with_origin(earlier, tmp_path / "other", tokenizer="0123456789abcdef")
    with refused("tokenizer 0123456789abcdef"):
        train(changed(warm, init_from=source))


@pytest.mark.parametrize(
    "change", [{"tokenizer": None}, {"weights": "0" * 16, "dtype": "bfloat16", "thinking": True}]
)
def test_what_is_not_known_or_does_not_matter_is_no_obstacle(taught, earlier, tmp_path, change):
    source = with_origin(earlier, tmp_path / "head", **change)
    target = Target.from_pretrained(taught, torch.float32)
    head = build_head("medusa", {"num_heads": 2, "draft_vocab_size": 7}, target.info)
    # no token is more frequent than another
    counts_V = torch.ones(target.info.vocab_size, dtype=torch.int64)
    warm_start(head, source, target, counts_V, load_head(earlier / "last")[1].provenance)
    assert same_tensors(head.state_dict(), last_weights(earlier))
