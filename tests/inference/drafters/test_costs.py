"""What rounds cost: measured once for models of the same dimensions, and read between and beyond
the sizes."""

from __future__ import annotations

import json
import threading

import pytest
import torch
from helpers import Ended, build_t5, check_identity, head_for, other_model
from messages import refused

from headstart.inference import SpeculativeLM
from headstart.inference.drafters import costs
from headstart.inference.drafters.adaptive import AdaptiveDrafter
from headstart.inference.drafters.costs import measured_costs
from headstart.inference.engines.encoder_decoder import Seq2SeqTarget
from headstart.inference.trees.tree_spec import DynamicShape, TreeShape
from headstart.inference.tuning import machine
from headstart.inference.tuning.round_costs import SIZES, RoundCosts
from headstart.inference.tuning.tree_search import by_speed

pytestmark = [pytest.mark.clock, pytest.mark.usefixtures("nothing_measured")]
TABLE = RoundCosts({1: 1.0, 2: 1.5, 4: 2.0, 8: 4.0, 16: 6.0, 32: 14.0}, draft=0.25)
HEADS = {
    "medusa": {"num_heads": 2},
    "hydra++": {"num_heads": 2},
    "eagle": {"depth": 5},
    "eagle3": {"depth": 5, "feature_layers": [0, -1]},
}


def of_kind(target, kind="medusa", **options):
    return head_for(target, kind, **HEADS[kind] | options)


def measurements():
    """How many costs of rounds this machine has."""
    names = machine.kept_measurements(torch.device("cpu"))
    return sum(name.startswith("seconds of a round") for name in names)


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
def test_costs_of_every_head_are_measured_once(tiny_target, kind):
    target = tiny_target(dtype=torch.float32)
    found = measured_costs(target, of_kind(target, kind))
    assert tuple(found.forward) == SIZES
    assert all(0 < seconds < 1 for seconds in (*found.forward.values(), found.draft))
    assert 0 <= found.reading < found.draft
    assert list(found.forward.values()) == sorted(found.forward.values())
    other = tiny_target(dtype=torch.float32, seed=1)  # with other weights, as large
    assert measured_costs(other, of_kind(target, kind)) == found
    machine.in_memory.clear()  # in another process
    assert measured_costs(target, of_kind(target, kind)) == found


def eager(target):
    target.model.set_attn_implementation("eager")
    return target


def as_recorded(target):
    target.engine.name = "cuda graphs"
    return target


@pytest.mark.parametrize(
    ("build", "options", "more"),
    [
        (lambda build: build(), {}, 0),
        (lambda build: build(layers=3), None, 1),
        (lambda build: build(vocab_size=40), None, 1),
        (lambda build: build(head_dim=16), None, 1),
        (lambda build: build(dtype=torch.bfloat16), None, 1),
        (lambda build: eager(build()), None, 1),
        (lambda build: as_recorded(build()), None, 1),
        (lambda build: build(), {"num_heads": 1}, 1),
        (lambda build: build(), {"num_layers": 2}, 1),
        (lambda build: build(), {"kind": "eagle"}, 1),
    ],
)
def test_other_dimensions_are_measured_for_themselves(tiny_target, build, options, more):
    plain = tiny_target()
    measured_costs(plain)
    measured_costs(plain, of_kind(plain))
    target = build(tiny_target)
    for _ in range(2):
        measured_costs(target, None if options is None else of_kind(target, **options))
        assert measurements() == 2 + more


def test_nothing_is_measured_while_another_thread_generates(tiny_target, monkeypatch):
    """Both would run the same kernels, whose buffers are shared."""
    target = tiny_target()
    forward = target.engine.forward_chain
    waits = []

    def take_the_lock():
        with target.lock:
            pass

    def watched(*given):
        if not waits:
            other = threading.Thread(target=take_the_lock)
            other.start()
            other.join(0.2)
            waits.append(other.is_alive())
        return forward(*given)

    monkeypatch.setattr(target.engine, "forward_chain", watched)
    measured_costs(target)
    assert waits == [True]


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
def test_costs_that_cannot_be_are_measured_anew(tiny_target, nothing_measured, kept):
    target = tiny_target()
    measured_costs(target)
    machine.in_memory.clear()
    path = nothing_measured / machine.MACHINE_FILE
    ((name, held),) = json.loads(path.read_text()).items()
    path.write_text(json.dumps({name: dict.fromkeys(held, kept)}))
    found = measured_costs(target)
    assert tuple(found.forward) == SIZES
    assert found.forward[1] < TABLE.forward[1]


def slowed(monkeypatch, owner, name, clock, seconds):
    """Move the clock in each call of a method by what `seconds` returns for its arguments."""
    method = getattr(owner, name)

    def slow(*given):
        clock[0] += seconds(*given)
        return method(*given)

    monkeypatch.setattr(owner, name, slow)


def test_seconds_are_those_of_the_forwards_and_drafts(tiny_target, monkeypatch, moved_clock):
    """By a clock that they move."""
    target = tiny_target()
    head = of_kind(target, "eagle")
    cost = {1: 1.0, 2: 2.0, 4: 1.5, 8: 3.0, 16: 4.0, 32: 5.0}
    sizes, drafts = [], []

    def forward_seconds(tokens_BN, *_):
        sizes.append(tokens_BN.shape[1])
        return cost[sizes[-1]]

    def draft_seconds(*given):
        drafts.append(given)
        return 0.5

    def reading_seconds(state, features_BAF, *_):
        return features_BAF.shape[1] / 64

    slowed(monkeypatch, target.engine, "forward_chain", moved_clock, forward_seconds)
    slowed(monkeypatch, head, "expand", moved_clock, draft_seconds)
    slowed(monkeypatch, head, "observe", moved_clock, reading_seconds)
    found = measured_costs(target, head)
    assert found.forward == {**cost, 4: 2.0}
    assert found.draft == pytest.approx(0.5, rel=0.01)  # with the token that is read before
    assert found.reading == pytest.approx(1 / 64, rel=0.01)
    # a second was over after the first ones
    assert sorted(sizes) == [*SIZES] and len(drafts) == 2 * costs.DEPTH


def test_calls_that_were_disturbed_do_not_count(tiny_target, monkeypatch, moved_clock):
    """Every second forward takes three times as long."""
    target = tiny_target()
    cost = {1: 0.01, 2: 0.01, 4: 0.02, 8: 0.03, 16: 0.04, 32: 0.05}
    sizes = []

    def seconds(tokens_BN, *_):
        sizes.append(tokens_BN.shape[1])
        return cost[sizes[-1]] * (3 if len(sizes) % 2 else 1)

    slowed(monkeypatch, target.engine, "forward_chain", moved_clock, seconds)
    assert measured_costs(target).forward == pytest.approx(cost)


def test_an_encoder_decoder_has_costs_too():
    target = Seq2SeqTarget(build_t5(30))
    assert all(0 < seconds < 1 for seconds in measured_costs(target).forward.values())


def in_drafters(target):
    """Engines whose drafter holds a head, or none."""
    head = of_kind(target)
    return {
        "head": SpeculativeLM.from_pretrained(target, head, tree="chain:2"),
        "two trees": SpeculativeLM.from_pretrained(target, head, tree="chain:2|chain:1"),
        "hybrid": SpeculativeLM.from_pretrained(target, head, drafter="prompt-lookup"),
        "fallback": SpeculativeLM.from_pretrained(target, head, adaptive=True),
        "lookup": SpeculativeLM.from_pretrained(target, drafter="prompt-lookup"),
        "model": SpeculativeLM.from_pretrained(target, drafter=other_model(target)),
        "plain": SpeculativeLM.from_pretrained(target),
    }


def test_warming_up_measures_writes_and_leaves_no_trace(tiny_target):
    for name, lm in in_drafters(tiny_target(dtype=torch.float32)).items():
        assert "costs" not in vars(lm)
        heard = Ended()
        state = torch.get_rng_state()
        lm.observers.append(heard)
        assert lm.warmup() is lm, name
        assert heard.stats == []
        assert torch.equal(torch.get_rng_state(), state)
        adaptive = [part for part in lm.drafter.nested() if isinstance(part, AdaptiveDrafter)]
        assert not any(part.records for part in adaptive)
        check_identity(lm, [torch.arange(5)], max_new_tokens=6)
        assert len(heard.stats) == 1
        assert (lm.costs.draft > 0) == (name in ("head", "two trees", "hybrid", "fallback")), name
    assert measurements() == 2


def test_a_warm_up_that_fails_leaves_the_listeners(tiny_target, monkeypatch):
    lm = SpeculativeLM.from_pretrained(tiny_target())
    heard = Ended()
    lm.observers.append(heard)
    monkeypatch.setattr(lm, "generate", lambda *_, **__: int("broken"))
    with refused("broken"):
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
