"""`headstart tree`: acceptance as it is, a tree that is used from then on, and weights that stay as
they are."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers import saved_head, written_alone
from messages import refused
from runs import changed, write_prompts

from headstart.heads import MedusaConfig, MedusaHead
from headstart.heads.checkpoints.save_load import load_head, save_tree
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
from headstart.scripts import tree
from headstart.scripts.tree import TreeConfig, calibrate
from headstart.train.data.chat_template import Example
from headstart.train.evaluate import greedy_answers, sums_of
from headstart.train.loop import train

NEW_TOKENS = 10
TEXT = torch.arange(9)[None]


@pytest.fixture(scope="module")
def trained_head(run_options, tmp_path_factory):
    config = run_options(tmp_path_factory.mktemp("run"), 30)
    return train(changed(config, loop={"eval_every": 0, "save_every": 0})) / "last"


@pytest.fixture
def head_copy(trained_head, tmp_path):
    """A tree is written into it."""
    return Path(shutil.copytree(trained_head, tmp_path / "head"))


@pytest.fixture
def tree_config(taught, head_copy, tmp_path):
    path = write_prompts(tmp_path / "prompts.jsonl", [f"count to {i}" for i in range(3, 9)])
    return TreeConfig(
        target=str(taught),
        head=str(head_copy),
        prompts=[path],
        limit=5,
        nodes=5,
        max_new_tokens=NEW_TOKENS,
        dtype="float32",
        compile=False,
    )


@pytest.fixture
def taught_target(taught):
    return Target.from_pretrained(taught, torch.float32)


@pytest.fixture
def asked(taught, tree_config):
    """The prompts' tokens [1, time]."""
    tokenizer = load_tokenizer(taught)
    return [prompt_ids(tokenizer, row) for row in read_prompts(tree_config.prompts[0], 5)]


def drafter_for(taught, head, compile=False):
    """What drafts with a head if nobody asks for a tree."""
    return SpeculativeLM.from_pretrained(
        taught, head, torch.float32, compile=compile, adaptive=False
    ).drafter


def tree_for(taught, head):
    drafter = drafter_for(taught, head)
    if isinstance(drafter, StaticTree):
        return drafter.shape
    return DynamicShape(drafter.max_nodes, drafter.depth, drafter.width)


def calibration_of(head):
    return load_head(head)[1].measured["calibration"]


def test_the_accuracies_are_the_teacher_forced_ones_of_the_targets_own_answers(
    tree_config, taught_target, asked
):
    calibrate(tree_config)
    examples = []
    for ids in asked:
        answer = written_alone(taught_target.model, ids[0], max_new_tokens=NEW_TOKENS)
        answered = [False] * ids.shape[1] + [True] * len(answer)
        examples.append([Example([*ids[0].tolist(), *answer], answered)])
    head = load_head(tree_config.head)[0]
    sums = sums_of(taught_target, head, Objective(), examples)
    _, accuracy = means(sums, head.max_depth)
    calibration = calibration_of(tree_config.head)
    assert calibration["accuracy"] == [pytest.approx(row, abs=1e-6) for row in accuracy]
    assert sum(accuracy[0]) > 0.2  # it learned something, so there is something to compare
    assert (calibration["prompts"], calibration["new_tokens"]) == (5, NEW_TOKENS)


def rated(monkeypatch, fastest):
    """As if rounds with trees of a kind were twice as fast as all others."""
    original = tree.decode_with

    def decode_with(*arguments):
        stats_by_tree = original(*arguments)
        for policy, stats in stats_by_tree.items():
            speed = 2.0 if isinstance(policy, fastest) else 1.0
            stats.seconds = {"target": stats.rounds * stats.acceptance_length / speed}
        return stats_by_tree

    monkeypatch.setattr(tree, "decode_with", decode_with)


@pytest.mark.parametrize(("kind", "fastest"), [("static", TreeShape), ("dynamic", DynamicShape)])
def test_the_better_tree_is_measured_saved_and_used_wherever_the_tree_is_auto(
    tree_config, taught, taught_target, asked, monkeypatch, kind, fastest
):
    rated(monkeypatch, fastest)
    policy = calibrate(tree_config)
    head, metadata = load_head(tree_config.head)
    assert policy == tree_policy(metadata.tree) == tree_for(taught, tree_config.head)
    assert isinstance(policy, fastest)
    assert 2 <= policy.size <= 5  # which of them, the clock decides
    calibration = metadata.measured["calibration"]
    if kind == "static":
        accuracy = calibration["accuracy"]
        assert policy in [best_static_tree(accuracy[:depth], 5) for depth in (1, 2)]
    prompts = [ids[0] for ids in asked]
    stats = greedy_answers(taught_target, head.eval(), policy, prompts, NEW_TOKENS).stats
    measured = calibration["trees"][kind]
    assert measured["nodes"] == policy.size
    assert measured["acceptance_length"] == stats.acceptance_length
    assert measured["rounds"] == stats.rounds
    assert calibration["speedup"] == pytest.approx(2.0)
    assert calibration["expected_speedup"] > 0


def test_only_the_tree_and_its_figures_change(tree_config, head_copy, trained_head):
    here = machine_key(torch.device("cpu"), False)
    for _ in range(2):  # and once more on what the first left
        calibrate(tree_config)
        names = {path.name for path in head_copy.iterdir()}
        assert names == {path.name for path in trained_head.iterdir()}
    weights = "model.safetensors"
    assert (head_copy / weights).read_bytes() == (trained_head / weights).read_bytes()
    before = json.loads((trained_head / "config.json").read_text())
    after = json.loads((head_copy / "config.json").read_text())
    before["headstart"].pop("tree")
    assert after["headstart"].pop("tree")
    after["headstart"]["measured"].pop("calibration")
    assert list(after["headstart"]["measured"].pop("fastest")) == [here]
    assert after == before


def test_without_a_size_the_one_with_the_most_tokens_per_second_is_taken(tree_config, monkeypatch):
    """Made-up times: a target that reads 6 nodes as quickly as one, and more of them more
    slowly."""
    forward = {size: 1.0 if size <= 6 else float(size) for size in tree.SIZES}
    costs = RoundCosts(forward, draft=0.0, rest=0.1, plain_step=1.0)
    monkeypatch.setattr(tuning_costs, "costs_of_rounds", lambda *_: costs)
    rated(monkeypatch, TreeShape)
    assert calibrate(changed(tree_config, nodes=None)).size == 6


def round_of(draft, target):
    return Stats(
        [[RoundRecord(1, 1)] * 2],
        seconds={"draft": 2 * draft, "target": 2 * target, "verify": 1, "host": 0.5},
        round_seconds=[draft + target + 0.75] * 2,
    )


def test_costs_are_those_of_the_parts(taught_target, monkeypatch):
    """Forwards as many times a plain step's as alone; drafts by their depth and by what they
    expand."""
    head = MedusaHead(MedusaConfig(num_heads=6), taught_target.info)
    shallow, deep, wide = timed_trees(head)
    assert (shallow.depth, deep.depth, wide.depth) == (1, 4, 4)
    assert deep.width < wide.width
    timed = {None: round_of(draft=0.0, target=3.0)}
    for shape in (shallow, deep, wide):
        draft = 0.5 + 0.25 * shape.depth + 0.125 * shape.expanded
        timed[shape] = round_of(draft, target=6.0)
    monkeypatch.setattr(tuning_costs, "forward_seconds", lambda *_: {1: 0.1, 2: 0.2, 5: 0.5})
    costs = costs_of_rounds(taught_target, head, timed, TEXT, (2, 5))
    assert (costs.draft, costs.node) == pytest.approx((0.25, 0.125))
    # what no depth or node adds, and the rest of a round
    assert (costs.rest, costs.plain) == (0.5 + 0.75, 3.75)
    assert costs.forward == pytest.approx({1: 3.0, 2: 6.0, 5: 15.0})
    chain = TreeShape.chain(2)  # of 3 nodes, between two sizes
    assert costs.rate(chain, 7.0) == pytest.approx(7.0 / (9.0 + 2 * 0.25 + 2 * 0.125 + 1.25))
    # A draft that costs nothing more, by a clock that says that it costs less.
    timed[deep] = timed[wide] = round_of(draft=0.75, target=6.0)
    costs = costs_of_rounds(taught_target, head, timed, TEXT, (2, 5))
    assert (costs.draft, costs.node) == (0.0, 0.0)
    assert costs.rest == pytest.approx(0.875 + 0.75)


def replayed(seconds):
    """Rounds of which the first compile and record; launches take little, and the wait is the
    host's part."""
    rounds = [90.0, 30.0, *[seconds] * 7]
    parts = {"draft": 0.1 * sum(rounds), "target": 0.1 * sum(rounds), "host": 0.8 * sum(rounds)}
    return Stats([[RoundRecord(1, 1)] * len(rounds)], seconds=parts, round_seconds=rounds)


def test_where_rounds_are_replayed_costs_are_those_of_whole_rounds(taught_target, monkeypatch):
    """Parts of a round are launches there; the first rounds compile and record."""
    monkeypatch.setattr(taught_target.engine.runner, "replays", True)
    head = MedusaHead(MedusaConfig(num_heads=6), taught_target.info)
    forward = {1: 4.0, 2: 4.0, 3: 4.25, 5: 4.5, 8: 5.0}
    monkeypatch.setattr(tuning_costs, "forward_seconds", lambda *_: forward)
    seconds = {
        shape: forward[shape.size] + 1.5 + 0.25 * shape.depth + 0.125 * shape.expanded
        for shape in timed_trees(head)
    }
    timed = {shape: replayed(taken) for shape, taken in seconds.items()}
    timed[None] = replayed(6.0)
    costs = costs_of_rounds(taught_target, head, timed, TEXT, (2, 5))
    assert (costs.rest, costs.plain) == pytest.approx((1.5, 6.0))
    for shape, taken in seconds.items():
        assert costs.seconds(shape.size, shape.depth, shape.expanded) == pytest.approx(taken)


def test_a_head_of_one_depth_has_costs(taught_target):
    head = MedusaHead(MedusaConfig(num_heads=1), taught_target.info)
    timed = {shape: round_of(draft=0.5, target=3.0) for shape in (None, *timed_trees(head))}
    costs = costs_of_rounds(taught_target, head, timed, TEXT, (5,))
    assert (costs.draft, costs.node, costs.rest) == (0.0, 0.0, 0.5 + 0.75)
    assert set(costs.forward) == {1, 2, 5}
    assert min(costs.forward.values()) > 0


@pytest.mark.parametrize("width", [2, 3])
def test_the_lengths_of_dynamic_trees_are_those_of_decoding_with_each(
    trained_head, taught_target, asked, width
):
    """Every size and depth by itself, against the one pass over two answers that knows all of
    them."""
    head = load_head(trained_head, taught_target.info)[0].eval()
    settings = {"max_new_tokens": 12, "do_sample": False}
    prompts = asked[:5:4]  # count to 3 and to 7
    answers = [
        Answered(taught_target.model.generate(ids, **settings)[0], ids.shape[1]) for ids in prompts
    ]
    sizes = (2, 3, 5, 8)
    lengths = dynamic_lengths(taught_target, head, width, answers, sizes)
    for size, depth in itertools.product(sizes, range(1, head.max_depth + 1)):
        state = DraftModelState(head, taught_target.modules)
        lm = SpeculativeLM(taught_target, DynamicTree(state, DynamicShape(size, depth, width)))
        decoded = Stats.merged(lm.generate(ids, **settings).stats for ids in prompts)
        assert lengths[size, depth] == pytest.approx(decoded.acceptance_length), (size, depth)
    assert len(set(lengths.values())) > 2


def test_sampling_is_calibrated_too(tree_config):
    policy = calibrate(changed(tree_config, temperature=1.0, nodes=4))
    # which of those that are as large at most, the clock decides
    assert policy == tree_policy(load_head(tree_config.head)[1].tree)
    assert 2 <= policy.size <= 4


def test_each_machine_has_its_own_tree(tree_config, taught, head_copy):
    policy = calibrate(tree_config)
    save_tree(head_copy, "chain:1", {}, machine_key(torch.device("cpu"), compiled=True))
    save_tree(head_copy, "chain:2", {}, "elsewhere")
    assert tree_for(taught, head_copy) == policy  # the one that was found without compiling
    assert drafter_for(taught, head_copy, compile=True).max_nodes == 2


def test_a_machine_without_a_tree_of_its_own_gets_one_by_its_costs(taught, head_copy):
    save_tree(head_copy, "chain:2", {}, "elsewhere")
    costs = RoundCosts.assumed(torch.device("cpu"))
    offered = candidate_trees(load_head(head_copy)[0], None, costs)[0]
    policy = tree_for(taught, head_copy)
    assert isinstance(policy, DynamicShape)
    assert policy.depth == offered.depth
    assert policy.size <= offered.size


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"head": "/no/where"}, "'/no/where' Hub"),
        ({"head": "nothing"}, "nothing"),
        ({"prompts": ["/nowhere.jsonl"]}, "'/nowhere.jsonl'"),
        ({"prompts": ["empty.jsonl"]}, "empty.jsonl prompts"),
        ({"target": "/no/target"}, "'/no/target'"),
    ],
)
def test_what_is_missing_is_told_before_a_model_is_loaded(
    tree_config, monkeypatch, tmp_path, change, words
):
    monkeypatch.chdir(tmp_path)
    Path("nothing").mkdir()
    Path("empty.jsonl").touch()
    monkeypatch.setattr(SpeculativeLM, "from_pretrained", lambda *_: pytest.fail("loaded a model"))
    with refused(words):
        calibrate(changed(tree_config, **change))


def test_a_prompt_without_room_for_its_answer_is_named(tree_config):
    with refused("prompts.jsonl 1 1024"):
        calibrate(changed(tree_config, max_new_tokens=1024))


def test_answers_that_all_end_at_once_are_told(tree_config, taught, taught_target, asked, tmp_path):
    """The only prompt's answer is its end token alone: not one round."""
    first = written_alone(taught_target.model, asked[0][0], max_new_tokens=1)
    folder = shutil.copytree(taught, tmp_path / "ends-at-once")
    settings = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(settings | {"eos_token_id": first}))
    with refused("prompts.jsonl token"):
        calibrate(changed(tree_config, target=str(folder), limit=1))


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


def test_a_tree_for_a_head_with_fewer_tokens_than_ranks(
    tree_config, taught, taught_target, tmp_path
):
    """A draft vocabulary of 4 has no fifth-best token, however large a tree is asked for."""
    saved_head(tmp_path / "narrow", taught_target, num_heads=1, draft_vocab_size=4)
    policy = calibrate(changed(tree_config, head=str(tmp_path / "narrow"), nodes=12))
    assert tree_for(taught, tmp_path / "narrow").depth == policy.depth == 1
