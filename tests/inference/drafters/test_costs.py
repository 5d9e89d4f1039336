"""What rounds cost: measured once for models of the same dimensions, and read between and beyond
the sizes."""

from __future__ import annotations

import json

import pytest
import torch
from helpers import Ended, build_t5, check_identity, head_for, other_model

from headstart.files import cache_folder
from headstart.inference import SpeculativeLM
from headstart.inference.drafters import costs
from headstart.inference.drafters.adaptive import AdaptiveDrafter
from headstart.inference.drafters.costs import measured_costs
from headstart.inference.engines.encoder_decoder import Seq2SeqTarget
from headstart.inference.trees.tree_spec import DynamicShape, TreeShape
from headstart.inference.tuning import machine
from headstart.inference.tuning.round_costs import SIZES, RoundCosts
from headstart.inference.tuning.tree_search import by_speed


@pytest.fixture(autouse=True)
def steps_take_what_is_assumed() -> None:
    """Not here: costs and clocks are what is tested."""


TABLE = RoundCosts({1: 1.0, 2: 1.5, 4: 2.0, 8: 4.0, 16: 6.0, 32: 14.0}, draft=0.25)


@pytest.fixture(autouse=True)
def measured(nothing_measured, monkeypatch):
    """Nothing was measured yet; the list of what was."""
    calls, original = [], costs._measured
    monkeypatch.setattr(costs, "_measured", lambda *given: calls.append(given) or original(*given))
    return calls


HEADS = {
    "medusa": {"num_heads": 2},
    "hydra++": {"num_heads": 2},
    "eagle": {"depth": 5},
    "eagle3": {"depth": 5, "feature_layers": [0, -1]},
}


def a_head(target, kind="medusa", **options):
    return head_for(target, kind, **HEADS[kind] | options)


@pytest.mark.parametrize(
    ("nodes", "depth", "expected"),
    [
        *((size, 0, seconds) for size, seconds in TABLE.forward.items()),
        (3, 0, 1.75),
        (6, 2, 3.0 + 0.5),
        (24, 4, 10.0 + 1.0),
        (48, 7, 14.0 + 8.0 + 1.75),  # as between the last two
    ],
)
def test_seconds_are_straight_between_the_sizes_and_go_on_beyond(nodes, depth, expected):
    assert TABLE.seconds(nodes, depth) == pytest.approx(expected)


@pytest.mark.parametrize("kind", HEADS)
def test_costs_of_every_head_are_measured_once(tiny_target, monkeypatch, measured, kind):
    target = tiny_target(dtype=torch.float32)
    head = a_head(target, kind)
    found = measured_costs(target, head)
    assert tuple(found.forward) == SIZES
    assert all(0 < seconds < 1 for seconds in (*found.forward.values(), found.draft))
    assert 0 <= found.reading < found.draft
    assert list(found.forward.values()) == sorted(found.forward.values())
    # other weights, as large
    again = measured_costs(tiny_target(dtype=torch.float32, seed=1), a_head(target, kind))
    assert again == found and len(measured) == 1
    monkeypatch.setattr(machine, "in_memory", {})
    assert measured_costs(target, head) == found and len(measured) == 1  # in another process


@pytest.mark.parametrize(
    "other",
    [
        lambda build: (build(layers=3), None),
        lambda build: (build(vocab_size=40), None),
        lambda build: (build(head_dim=16), None),
        lambda build: (build(dtype=torch.bfloat16), None),
        lambda build: (eager(build()), None),
        lambda build: (compiled(build()), None),
        lambda build: (build(), {"kind": "medusa"}),
        lambda build: (build(), {"kind": "medusa", "num_heads": 1}),
        lambda build: (build(), {"kind": "medusa", "num_layers": 2}),
        lambda build: (build(), {"kind": "eagle"}),
    ],
)
def test_other_dimensions_are_measured_for_themselves(tiny_target, monkeypatch, measured, other):
    table = RoundCosts(TABLE.forward, draft=0.0)
    monkeypatch.setattr(costs, "_measured", lambda *given: measured.append(given) or table)
    plain = tiny_target()
    measured_costs(plain)
    measured_costs(plain, a_head(plain))
    known = len(measured)
    target, options = other(tiny_target)
    is_known = options == {"kind": "medusa"}
    for _ in range(2):
        measured_costs(target, options and a_head(target, **options))
        assert len(measured) == known + (not is_known)


def test_nothing_is_measured_while_another_thread_generates(tiny_target, monkeypatch, measured):
    """Both would run the same kernels, whose buffers are shared."""
    target = tiny_target()
    held = []
    table = RoundCosts(TABLE.forward, 0.0)
    monkeypatch.setattr(
        costs, "_measured", lambda *_: held.append(target.lock._lock._is_owned()) or table
    )
    measured_costs(target)
    assert held == [True]


def eager(target):
    target.model.config._attn_implementation = "eager"
    return target


def compiled(target):
    target.engine.name = "cuda graphs"
    return target


@pytest.mark.parametrize(
    "kept",
    [
        3,
        {},
        {"forward": TABLE.forward},
        {"forward": {"1": 1.0}, "draft": 0.0},
        {"forward": {**TABLE.forward, 2: -1.0}, "draft": 0.0},
        {"forward": {**TABLE.forward, 2: "x"}, "draft": 0.0},
        {"forward": {"one": 1.0}, "draft": 0.0},
        {"forward": [1.0, 2.0], "draft": 0.0},
        {"forward": TABLE.forward, "draft": -1, "reading": 0.0},
        {"forward": TABLE.forward, "draft": 0.25},
        {"forward": TABLE.forward, "draft": 0.25, "reading": "x"},
    ],
)
def test_costs_that_cannot_be_are_measured_anew(tiny_target, monkeypatch, measured, kept):
    target = tiny_target()
    measured_costs(target)
    monkeypatch.setattr(machine, "in_memory", {})
    path = cache_folder() / "machine.json"
    ((name, held),) = json.loads(path.read_text()).items()
    path.write_text(json.dumps({name: dict.fromkeys(held, kept)}))
    assert tuple(measured_costs(target).forward) == SIZES and len(measured) == 2


def test_seconds_are_those_of_the_forwards_and_drafts(tiny_target, monkeypatch):
    """By a clock that they move."""
    target = tiny_target()
    head, clock = a_head(target, "eagle"), [0.0]
    sizes, drafts = [], []
    forward, expand, observe = target.engine.forward_chain, head.expand, head.observe

    def slow_observe(state, features_BAF, *given):
        clock[0] += features_BAF.shape[1] / 64
        return observe(state, features_BAF, *given)

    def slow_forward(tokens_BN, *given):
        sizes.append(tokens_BN.shape[1])
        clock[0] += {1: 1.0, 2: 2.0, 4: 1.5, 8: 3.0, 16: 4.0, 32: 5.0}[sizes[-1]]
        return forward(tokens_BN, *given)

    def slow_expand(*given):
        drafts.append(1)
        clock[0] += 0.5
        return expand(*given)

    monkeypatch.setattr(target.engine, "forward_chain", slow_forward)
    monkeypatch.setattr(head, "expand", slow_expand)
    monkeypatch.setattr(head, "observe", slow_observe)
    monkeypatch.setattr(machine.time, "perf_counter", lambda: clock[0])
    found = measured_costs(target, head)
    assert found.forward == {1: 1.0, 2: 2.0, 4: 2.0, 8: 3.0, 16: 4.0, 32: 5.0}
    assert found.draft == pytest.approx(0.5, rel=0.01)  # with the token that is read before
    assert found.reading == pytest.approx(1 / 64, rel=0.01)
    # a second was over after the first ones
    assert sorted(sizes) == [*SIZES] and len(drafts) == 2 * costs.DEPTH


def test_calls_that_were_disturbed_do_not_count(tiny_target, monkeypatch):
    """Every second forward takes three times as long."""
    target, clock, sizes = tiny_target(), [0.0], []
    forward = target.engine.forward_chain
    cost = {1: 0.01, 2: 0.01, 4: 0.02, 8: 0.03, 16: 0.04, 32: 0.05}

    def slow_forward(tokens_BN, *given):
        sizes.append(tokens_BN.shape[1])
        clock[0] += cost[sizes[-1]] * (3 if len(sizes) % 2 else 1)
        return forward(tokens_BN, *given)

    monkeypatch.setattr(target.engine, "forward_chain", slow_forward)
    monkeypatch.setattr(machine.time, "perf_counter", lambda: clock[0])
    assert measured_costs(target).forward == pytest.approx(cost)


def test_an_encoder_decoder_has_costs_too():
    target = Seq2SeqTarget(build_t5(30))
    assert all(0 < seconds < 1 for seconds in measured_costs(target).forward.values())


def in_drafters(target):
    """Engines whose drafter holds a head, or none."""
    head = a_head(target)
    return {
        "head": SpeculativeLM.from_pretrained(target, head, tree="chain:2"),
        "two trees": SpeculativeLM.from_pretrained(target, head, tree="chain:2|chain:1"),
        "hybrid": SpeculativeLM.from_pretrained(target, head, drafter="prompt-lookup"),
        "fallback": SpeculativeLM.from_pretrained(target, head, adaptive=True),
        "lookup": SpeculativeLM.from_pretrained(target, drafter="prompt-lookup"),
        "model": SpeculativeLM.from_pretrained(target, drafter=other_model(target)),
        "plain": SpeculativeLM.from_pretrained(target),
    }


def test_warming_up_measures_writes_and_leaves_no_trace(tiny_target, measured):
    for name, lm in in_drafters(tiny_target(dtype=torch.float32)).items():
        assert "costs" not in vars(lm)
        heard, state = Ended(), torch.get_rng_state()
        lm.observers.append(heard)
        assert lm.warmup() is lm, name
        assert heard.stats == [] and torch.equal(torch.get_rng_state(), state)
        assert not any(
            part.records for part in lm.drafter.nested() if isinstance(part, AdaptiveDrafter)
        )
        check_identity(lm, [torch.arange(5)], max_new_tokens=6)
        assert len(heard.stats) == 1
        assert (lm.costs.draft > 0) == (name in ("head", "two trees", "hybrid", "fallback")), name
    assert len(measured) == 2


def test_a_warm_up_that_fails_leaves_the_listeners(tiny_target, monkeypatch):
    lm = SpeculativeLM.from_pretrained(tiny_target())
    heard = Ended()
    lm.observers.append(heard)
    monkeypatch.setattr(lm, "generate", lambda *_, **__: int("broken"))
    with pytest.raises(ValueError, match="broken"):
        lm.warmup()
    assert lm.observers == [heard]


def test_the_fastest_tree_is_the_one_with_most_tokens_a_second():
    """A round costs its forward, its depth, each node that it expands, and what no tree changes."""
    costs = RoundCosts({1: 1.0, 4: 1.0, 8: 2.0}, draft=0.1, node=0.05, rest=0.5, plain_step=1.2)
    chain, wide, large = TreeShape.chain(2), DynamicShape(4, 2, 2), DynamicShape(8, 2, 2)
    lengths = {large: 2.4, chain: 1.8, wide: 2.0}
    seconds = {
        chain: 1.0 + 0.2 + 0.1 + 0.5,
        wide: 1.0 + 0.2 + 0.15 + 0.5,
        large: 2.0 + 0.2 + 0.15 + 0.5,
    }
    for tree, length in lengths.items():
        assert costs.rate(tree, length) == pytest.approx(length / seconds[tree])
    assert by_speed(lengths, costs) == [wide, chain, large]
    assert costs.plain == 1.2 and RoundCosts({1: 1.0, 2: 1.5}, 0.1, rest=0.5).plain == 1.5
