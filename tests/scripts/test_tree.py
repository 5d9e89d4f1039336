"""`headstart tree`: acceptance as it is, a tree that is used from then on, and weights that stay as
they are."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil

import pytest
import torch
from messages import refused
from runs import write_prompts

from headstart.heads import CheckpointMetadata, MedusaConfig, MedusaHead
from headstart.heads.checkpoints.save_load import load_head, save_head, save_tree
from headstart.heads.objective import Objective
from headstart.inference import (
    DynamicShape,
    SpeculativeLM,
    Target,
    TreeShape,
    load_tokenizer,
    tree_policy,
)
from headstart.inference.drafters import costs as tuning_costs
from headstart.inference.drafters.acceptance import Answered, dynamic_lengths, means
from headstart.inference.drafters.candidate_trees import candidate_trees
from headstart.inference.drafters.costs import costs_of_rounds, timed_trees
from headstart.inference.drafters.draft_model_state import DraftModelState
from headstart.inference.drafters.tree_policies import DynamicTree, StaticTree
from headstart.inference.text.chat_template import prompt_ids
from headstart.inference.text.prompt_files import read_prompts
from headstart.inference.trees.stats import RoundRecord, Stats
from headstart.inference.tuning.machine import machine_key
from headstart.inference.tuning.round_costs import RoundCosts
from headstart.inference.tuning.tree_search import best_static_tree, expected_length
from headstart.scripts import tree as module
from headstart.scripts.tree import TreeConfig, calibrate
from headstart.train.data.chat_template import Example
from headstart.train.evaluate import greedy_answers, sums_of
from headstart.train.loop import train

NEW_TOKENS = 10


@pytest.fixture(scope="module")
def trained_head(run_options, changed, tmp_path_factory):
    config = run_options(tmp_path_factory.mktemp("run"), 30)
    return train(changed(config, loop={"eval_every": 0, "save_every": 0})) / "last"


@pytest.fixture
def head(trained_head, tmp_path):
    """A copy, for a tree is written into it."""
    shutil.copytree(trained_head, tmp_path / "head")
    return tmp_path / "head"


@pytest.fixture
def config(taught, head, tmp_path):
    path = write_prompts(tmp_path / "prompts.jsonl", [f"count to {i}" for i in range(3, 9)])
    return TreeConfig(
        target=str(taught),
        head=str(head),
        prompts=[path],
        limit=5,
        max_new_tokens=NEW_TOKENS,
        dtype="float32",
        compile=False,
    )


def changed(config, **changes):
    return dataclasses.replace(config, **changes)


def drafted_with(taught, head):
    """The policy that a head gets if nobody asks for one."""
    drafter = SpeculativeLM.from_pretrained(
        taught, head, torch.float32, compile=False, adaptive=False
    ).drafter
    if isinstance(drafter, StaticTree):
        return drafter.shape
    assert isinstance(drafter, DynamicTree)
    return DynamicShape(drafter.max_nodes, drafter.depth, drafter.width)


def test_the_accuracies_are_the_teacher_forced_ones_of_the_targets_own_answers(
    config, head, taught
):
    calibrate(changed(config, nodes=5))
    target, tokenizer = Target.from_pretrained(taught, torch.float32), load_tokenizer(taught)
    examples = []
    for messages in read_prompts(config.prompts[0], 5):
        ids = prompt_ids(tokenizer, messages)
        stock = target.model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)[0].tolist()
        examples.append(
            Example(stock, [False] * ids.shape[1] + [True] * (len(stock) - ids.shape[1]))
        )
    loaded, metadata = load_head(head)
    sums = sums_of(target, loaded, Objective(), [[example] for example in examples])
    _, accuracy = means(sums, loaded.max_depth)
    found = metadata.measured["calibration"]
    assert found["accuracy"] == [pytest.approx(row, abs=1e-6) for row in accuracy]
    assert sum(accuracy[0]) > 0.2  # it learned something, so there is something to compare
    assert (found["prompts"], found["new_tokens"]) == (5, NEW_TOKENS)


def rated(monkeypatch, fastest):
    """As if rounds with trees of a kind were twice as fast as all others."""
    original = module._decode_with

    def answered(*given):
        found = original(*given)
        for policy, stats in found.items():
            length = stats.acceptance_length
            stats.seconds = {
                "target": stats.rounds * length / (2.0 if isinstance(policy, fastest) else 1.0)
            }
        return found

    monkeypatch.setattr(module, "_decode_with", answered)


@pytest.mark.parametrize("fastest", [TreeShape, DynamicShape])
def test_the_better_tree_is_saved_and_used_wherever_the_tree_is_auto(
    config, head, taught, monkeypatch, fastest
):
    rated(monkeypatch, fastest)
    policy = calibrate(changed(config, nodes=5))
    _, metadata = load_head(head)
    assert policy == tree_policy(metadata.tree) == drafted_with(taught, head)
    assert isinstance(policy, fastest) and 2 <= policy.size <= 5  # which of them, the clock decides
    calibration = metadata.measured["calibration"]
    assert calibration["speedup"] == pytest.approx(2.0) and calibration["expected_speedup"] > 0


def test_the_measured_acceptance_is_that_of_both_trees(config, head, taught, monkeypatch):
    tried, original = {}, module._decode_with

    def noted(target, head, policies, *rest):
        tried.update(
            {
                "static" if isinstance(policy, TreeShape) else "dynamic": policy
                for policy in policies[1:]
            }
        )
        return original(target, head, policies, *rest)

    monkeypatch.setattr(module, "_decode_with", noted)
    calibrate(changed(config, nodes=5))
    found = load_head(head)[1].measured["calibration"]
    target, tokenizer = Target.from_pretrained(taught, torch.float32), load_tokenizer(taught)
    prompts = [
        prompt_ids(tokenizer, messages)[0] for messages in read_prompts(config.prompts[0], 5)
    ]
    loaded = load_head(head)[0].eval()
    assert tried["static"] in {best_static_tree(found["accuracy"][:depth], 5) for depth in (1, 2)}
    for name, policy in tried.items():
        stats = greedy_answers(target, loaded, policy, prompts, NEW_TOKENS).stats
        assert found["trees"][name]["acceptance_length"] == stats.acceptance_length
        assert found["trees"][name]["rounds"] == stats.rounds


def test_only_the_tree_and_its_figures_change(config, head, trained_head):
    for _ in range(2):  # and once more on what the first left
        calibrate(changed(config, nodes=5))
        names = {path.name for path in head.iterdir()}
        assert names == {path.name for path in trained_head.iterdir()}
        assert (head / "model.safetensors").read_bytes() == (
            trained_head / "model.safetensors"
        ).read_bytes()
    before, after = (
        json.loads((folder / "config.json").read_text()) for folder in (trained_head, head)
    )
    assert after["headstart"].pop("tree")
    after["headstart"]["measured"].pop("calibration")
    assert [*after["headstart"]["measured"].pop("fastest")] == [
        machine_key(torch.device("cpu"), False)
    ]
    before["headstart"].pop("tree")
    assert after == before


def test_without_a_size_the_one_with_the_most_tokens_per_second_is_taken(config, monkeypatch):
    """Made-up times: a target that reads 6 nodes as quickly as one, and more of them more
    slowly."""
    forward = {size: 1.0 if size <= 6 else float(size) for size in module.SIZES}
    costs = RoundCosts(forward, draft=0.0, rest=0.1, plain_step=1.0)
    monkeypatch.setattr(tuning_costs, "costs_of_rounds", lambda *_: costs)
    rated(monkeypatch, TreeShape)
    assert calibrate(config).size == 6


def test_costs_are_those_of_the_parts(taught, monkeypatch):
    """Forwards as many times a plain step's as alone; drafts by their depth and by what they
    expand."""
    target = Target.from_pretrained(taught, torch.float32)
    head = MedusaHead(MedusaConfig(num_heads=6), target.info)
    shallow, deep, wide = timed_trees(head)
    assert (shallow.depth, deep.depth, wide.depth) == (1, 4, 4) and deep.width < wide.width
    timed = {None: round_of(draft=0.0, target=3.0)}
    for tree in (shallow, deep, wide):
        timed[tree] = round_of(draft=0.5 + 0.25 * tree.depth + 0.125 * tree.expanded, target=6.0)
    monkeypatch.setattr(tuning_costs, "forward_seconds", lambda *_: {1: 0.1, 2: 0.2, 5: 0.5})
    costs = costs_of_rounds(target, head, timed, torch.arange(9)[None], (2, 5))
    assert (costs.draft, costs.node) == pytest.approx((0.25, 0.125))
    # what no depth or node adds, and the rest of a round
    assert costs.rest == 0.5 + 0.75 and costs.plain == 3.75
    assert costs.forward == pytest.approx({1: 3.0, 2: 6.0, 5: 15.0})
    chain = TreeShape.chain(2)  # of 3 nodes, between two sizes
    assert costs.rate(chain, 7.0) == pytest.approx(7.0 / (9.0 + 2 * 0.25 + 2 * 0.125 + 1.25))
    # A draft that costs nothing more, by a clock that says that it costs less.
    timed[deep] = timed[wide] = round_of(draft=0.75, target=6.0)
    costs = costs_of_rounds(target, head, timed, torch.arange(9)[None], (2, 5))
    assert (costs.draft, costs.node) == (0.0, 0.0) and costs.rest == pytest.approx(0.875 + 0.75)


def test_where_rounds_are_replayed_costs_are_those_of_whole_rounds(taught, monkeypatch):
    """Parts of a round are launches there; the first rounds compile and record."""
    target = Target.from_pretrained(taught, torch.float32)
    monkeypatch.setattr(target.engine.runner, "replays", True)
    head = MedusaHead(MedusaConfig(num_heads=6), target.info)
    forward = {1: 4.0, 2: 4.0, 3: 4.25, 5: 4.5, 8: 5.0}
    monkeypatch.setattr(
        tuning_costs, "forward_seconds", lambda *given: {size: forward[size] for size in given[2]}
    )
    timed = {None: replayed(6.0)}
    trees = timed_trees(head)
    for tree in trees:
        timed[tree] = replayed(forward[tree.size] + 1.5 + 0.25 * tree.depth + 0.125 * tree.expanded)
    costs = costs_of_rounds(target, head, timed, torch.arange(9)[None], (2, 5))
    assert (costs.draft, costs.node, costs.rest, costs.plain) == pytest.approx(
        (0.25, 0.125, 1.5, 6.0)
    )
    for tree in trees:
        measured = timed[tree].round_seconds[-1]
        assert costs.seconds(tree.size, tree.depth, tree.expanded) == pytest.approx(measured)


def replayed(seconds):
    """Rounds of which the first compile and record; launches take little, and the wait is the
    host's part."""
    rounds = [90.0, 30.0, *[seconds] * 7]
    parts = {"draft": 0.1 * sum(rounds), "target": 0.1 * sum(rounds), "host": 0.8 * sum(rounds)}
    return Stats([[RoundRecord(1, 1)] * len(rounds)], seconds=parts, round_seconds=rounds)


def round_of(draft, target):
    return Stats(
        [[RoundRecord(1, 1)] * 2],
        seconds={"draft": 2 * draft, "target": 2 * target, "verify": 1, "host": 0.5},
        round_seconds=[draft + target + 0.75] * 2,
    )


def test_a_head_of_one_depth_has_costs(taught):
    target = Target.from_pretrained(taught, torch.float32)
    head = MedusaHead(MedusaConfig(num_heads=1), target.info)
    timed = {policy: round_of(draft=0.5, target=3.0) for policy in (None, *timed_trees(head))}
    costs = costs_of_rounds(target, head, timed, torch.arange(9)[None], (5,))
    assert (costs.draft, costs.node, costs.rest) == (0.0, 0.0, 0.5 + 0.75)
    assert set(costs.forward) == {1, 2, 5} and min(costs.forward.values()) > 0


@pytest.mark.parametrize("width", [2, 3])
def test_the_lengths_of_dynamic_trees_are_those_of_decoding_with_each(trained_head, taught, width):
    """Every size and depth by itself, against the one pass over two answers that knows all of
    them."""
    target = Target.from_pretrained(taught, torch.float32)
    head = load_head(trained_head, target.info)[0].eval()
    answers, asked = [], []
    for text in ("count to 3", "count to 7"):
        ids = prompt_ids(load_tokenizer(taught), [{"role": "user", "content": text}])
        asked.append(ids)
        whole = target.model.generate(ids, max_new_tokens=12, do_sample=False)[0]
        answers.append(Answered(whole, ids.shape[1]))
    sizes = (2, 3, 5, 8)
    found = dynamic_lengths(target, head, width, answers, sizes)
    for size, depth in itertools.product(sizes, range(1, head.max_depth + 1)):
        lm = SpeculativeLM(
            target,
            DynamicTree(DraftModelState(head, target.modules), DynamicShape(size, depth, width)),
        )
        really = Stats.merged(
            lm.generate(ids, max_new_tokens=12, do_sample=False).stats for ids in asked
        )
        assert found[size, depth] == pytest.approx(really.acceptance_length), (size, depth)
    assert len(set(found.values())) > 2


def test_sampling_is_calibrated_too(config, head):
    torch.manual_seed(0)
    policy = calibrate(changed(config, temperature=1.0, nodes=4))
    # which of those that are as large at most, the clock decides
    assert policy == tree_policy(load_head(head)[1].tree) and 2 <= policy.size <= 4


def test_each_machine_has_its_own_tree(config, head, taught, monkeypatch):
    calibrate(changed(config, nodes=4))
    here = drafted_with(taught, head)
    save_tree(head, "chain:1", {}, machine_key(torch.device("cpu"), compiled=True))
    assert drafted_with(taught, head) == here  # the one that was found without compiling
    compiled = SpeculativeLM.from_pretrained(
        taught, head, torch.float32, compile=True, adaptive=False
    )
    assert compiled.drafter.max_nodes == 2
    save_tree(head, "chain:2", {}, "elsewhere")
    assert drafted_with(taught, head) == here
    settings = json.loads((head / "config.json").read_text())
    settings["headstart"]["measured"]["fastest"].pop(
        machine_key(torch.device("cpu"), compiled=False)
    )
    (head / "config.json").write_text(json.dumps(settings))
    costs = RoundCosts.assumed(torch.device("cpu"))
    found, offered = (
        drafted_with(taught, head),
        candidate_trees(load_head(head)[0], None, costs)[0],
    )
    assert (
        isinstance(found, DynamicShape)
        and found.depth == offered.depth
        and found.size <= offered.size
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"head": "/no/where"}, "'/no/where' Hub"),
        ({"head": "{tmp}"}, "{tmp}"),
        ({"prompts": ["/nowhere.jsonl"]}, "'/nowhere.jsonl'"),
        ({"prompts": ["{tmp}/empty.jsonl"]}, "empty.jsonl prompts"),
        ({"target": "/no/target"}, "'/no/target'"),
    ],
)
def test_what_is_missing_is_told_before_a_model_is_loaded(
    config, monkeypatch, tmp_path, change, words
):
    (tmp_path / "empty.jsonl").touch()
    for name, value in change.items():
        one = value[0] if isinstance(value, list) else value
        placed = one.format(tmp=tmp_path)
        change = {name: [placed] if isinstance(value, list) else placed}
    monkeypatch.setattr(SpeculativeLM, "from_pretrained", lambda *_: pytest.fail("loaded a model"))
    with refused(words.format(tmp=tmp_path)):
        calibrate(changed(config, **change))


def test_a_prompt_without_room_for_its_answer_is_named(config):
    with refused("prompts.jsonl 1 1024"):
        calibrate(changed(config, max_new_tokens=1024))


def test_answers_that_all_end_at_once_are_told(config, head, taught, tmp_path):
    """The only prompt's answer is its end token alone: not one round."""
    target = Target.from_pretrained(taught, torch.float32)
    tokenizer = load_tokenizer(taught)
    messages = [{"role": "user", "content": "count to 3"}]
    first = int(
        target.model.generate(prompt_ids(tokenizer, messages), max_new_tokens=1, do_sample=False)[
            0, -1
        ]
    )
    path = tmp_path / "ends-at-once"
    shutil.copytree(taught, path)
    settings = json.loads((path / "generation_config.json").read_text())
    (path / "generation_config.json").write_text(json.dumps(settings | {"eos_token_id": [first]}))
    with refused("token"):
        calibrate(changed(config, target=str(path), limit=1))


def enumerated_length(shape, accuracy):
    """The expected tokens of a round, over all ways in which the true tokens' ranks can fall."""
    total = 0.0
    ranks = [[*range(len(row)), None] for row in accuracy]
    for fallen in itertools.product(*ranks):
        chance = 1.0
        for row, rank in zip(accuracy, fallen, strict=True):
            chance *= 1 - sum(row) if rank is None else row[rank]
        accepted = 0
        while accepted < len(fallen) and fallen[: accepted + 1] in shape.paths:
            accepted += 1
        total += chance * (accepted + 1)
    return total


@pytest.mark.parametrize("seed", range(4))
def test_the_expected_length_is_that_over_all_outcomes(seed):
    random = torch.Generator().manual_seed(seed)
    accuracy = (torch.rand(3, 3, generator=random, dtype=torch.float64).softmax(-1) * 0.9).tolist()
    for shape in (best_static_tree(accuracy, 7), TreeShape.chain(2), TreeShape(())):
        assert expected_length(shape, accuracy) == pytest.approx(enumerated_length(shape, accuracy))


def test_a_tree_for_a_head_with_fewer_tokens_than_ranks(config, taught, tmp_path):
    """A draft vocabulary of 4 has no fifth-best token, however large a tree is asked for."""
    target = Target.from_pretrained(taught, torch.float32)
    head = MedusaHead(MedusaConfig(num_heads=1, draft_vocab_size=4), target.info)
    head.initialize(target.modules, torch.arange(target.info.vocab_size))
    save_head(head, tmp_path / "narrow", CheckpointMetadata())
    policy = calibrate(changed(config, head=str(tmp_path / "narrow"), nodes=12))
    assert drafted_with(taught, tmp_path / "narrow").depth == policy.depth == 1
