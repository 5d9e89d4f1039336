"""Recorded rounds: the same text as without a trace, and every draw, probability and count that
decided it."""

from __future__ import annotations

import json
import math

import pytest
import torch
from messages import refused
from transformers import LogitsProcessor

from headstart.addons.trace import trace
from headstart.heads import HEADS
from headstart.inference import SpeculativeLM, Target
from headstart.inference.drafters.by_name import make_drafter
from headstart.inference.trees.stats import PARTS

SETTINGS = {"max_new_tokens": 32, "eos_token_id": [], "pad_token_id": 0}
SAMPLED = {"do_sample": True, "top_k": 0, "temperature": 0.7}
TOP_K = ("chain:3", "branch:3x2x1", "dynamic:9:3:3", "stop:0.01:chain:4")
CASES = [
    *(("greedy", tree) for tree in (*TOP_K, "drawn:branch:2x2", "root", "chain:2|dynamic:7:2:3")),
    *(
        (rule, tree)
        for rule in ("point_mass", "typical")
        for tree in (*TOP_K, "drawn:chain:3", "independent:branch:2x2")
    ),
    *(
        (rule, "drawn:chain:3")
        for rule in ("token", "with_replacement", "without_replacement", "block", "traversal")
    ),
    *((rule, "drawn:branch:3x2x1") for rule in ("without_replacement", "traversal")),
    ("with_replacement", "independent:branch:3x2"),
    ("token", "stop:0.01:drawn:chain:4"),
    ("block", "stop:0.01:drawn:chain:4"),
]


IN_CHAINS = {"without_replacement": "token", "traversal": "block"}
"""Rules by another name where a tree has no branches."""


@pytest.fixture(scope="module")
def prompt():
    return torch.randint(0, 256, (1, 9), generator=torch.Generator().manual_seed(3))


def settings_of(prompt, rule="greedy", **more):
    settings = {**SETTINGS, **(SAMPLED if rule != "greedy" else {"do_sample": False}), **more}
    return {
        "attention_mask": torch.ones_like(prompt),
        "generator": torch.Generator().manual_seed(5),
        **settings,
    }


def generated(lm, prompt, rule="greedy", **more):
    return lm.generate(prompt, **settings_of(prompt, rule, **more))


def traced(lm, prompt, tokenizer, rule="greedy", **more):
    """The output, and the trace's data."""
    output, recorded = trace(lm, prompt, tokenizer=tokenizer, **settings_of(prompt, rule, **more))
    return output, recorded.data


def decoder(tools, target, rule, tree):
    """Drafts by a model that is nearly the target: some stand, some do not."""
    near = tools.build_model()
    torch.manual_seed(2)
    for parameter in near.parameters():
        if parameter.ndim > 1:
            parameter.data += 0.3 * parameter.std() * torch.randn_like(parameter)
    drafter = make_drafter(target, Target(near.requires_grad_(False)), tree)
    return SpeculativeLM(target, drafter, "auto" if rule == "greedy" else rule, lossy=True)


def followed(found, rule):
    """The accepted path by the recorded draws alone."""
    nodes, path = found["nodes"], [0]
    if rule in ("greedy", "point_mass"):
        for draw in found["draws"]:
            assert draw["n"] == path[-1]
            drawn = {"u": path[-1], "v": draw["token"]}
            twins = [n for n, node in enumerate(nodes) if drawn.items() <= node.items()]
            assert draw["c"] == (twins[0] if twins else None)
            for node, time in draw.get("times", ()):
                if nodes[node]["v"] == draw["token"]:
                    assert time == pytest.approx(draw["time"])
                else:
                    assert time is None or time >= draw["time"]
            path += twins[:1]
        return path
    tried = [draw for draw in found["draws"] if draw["c"] is not None]
    for draw in tried:
        assert nodes[draw["c"]]["u"] == draw["n"]
        above = draw["u"] > draw["limit"] if rule == "typical" else draw["u"] < draw["limit"]
        assert draw["ok"] == above or draw["u"] == pytest.approx(draw["limit"], rel=1e-3)
    stands = {draw["c"] for draw in tried if draw["ok"]}
    if rule == "typical":
        ends = {0: [0]}
        for node in sorted(stands):
            ends[node] = [*ends[nodes[node]["u"]], node]

        def length_and_chance(path):
            return len(path), math.prod(nodes[node]["p"] for node in path[1:])

        return max(ends.values(), key=length_and_chance)
    for node in sorted(stands):  # walks accept a path, tours its last node
        path = [node]
        while path[0]:
            path.insert(0, nodes[path[0]]["u"])
    return path


@pytest.mark.parametrize(("rule", "tree"), CASES)
def test_recorded_draws_lead_to_the_recorded_path(
    tools, tiny_target, tokenizer, prompt, rule, tree
):
    lm = decoder(tools, tiny_target(), rule, tree)
    plain = generated(lm, prompt, rule)
    output, data = traced(lm, prompt, tokenizer, rule)
    assert not lm.observers and torch.equal(plain.sequences, output.sequences)
    if "|" not in tree:
        assert [*plain.stats.rows] == [*output.stats.rows]
        assert plain.stats.max_depth == output.stats.max_depth
    json.dumps(data, allow_nan=False)
    new = output.sequences[0, prompt.shape[1] :].tolist()
    assert [data["vocab"][each["v"]]["id"] for each in data["output"]] == new
    if "branch" not in tree:
        assert data["rule"] == IN_CHAINS.get(rule, rule)
    if tree != "root" and rule != "typical":
        status = [node["s"] for found in data["rounds"] for node in found["nodes"][1:]]
        assert {0, 1} - ({1} if rule == "point_mass" else set()) <= set(status), (
            "no draft stands, or all do"
        )
    assert len(data["rounds"]) == output.stats.rounds
    written = new[:1]
    for number, record in enumerate(output.stats.rows[0]):
        found = data["rounds"][number]
        nodes = found["nodes"]
        path = followed(found, rule)
        assert path == [n for n, node in enumerate(nodes) if node["s"] == 1]
        assert (record.accepted, record.returned) == (len(path) - 1, found["emitted"])
        assert nodes[0]["u"] == -1 and all(node["u"] < n for n, node in enumerate(nodes))
        ids = [data["vocab"][node["v"]]["id"] for node in nodes]
        assert ids[0] == written[-1]
        emitted = [*(ids[n] for n in path[1:]), data["vocab"][found["next"]]["id"]]
        written += emitted[: found["emitted"]]
        depths = [each["d"] for each in data["output"] if each["r"] == number]
        assert depths == [*range(1, len(path)), 0][: found["emitted"]]
        assert set(found["parts"]) == set(PARTS)
        assert found["ms"] == pytest.approx(1000 * output.stats.round_seconds[number], rel=1e-3)
        assert (found["residual"] is not None) == any(
            draw["kind"] == "accept" and draw["n"] == path[-1] and not draw["ok"]
            for draw in found["draws"]
        )
        if found["residual"] is not None:
            shown = dict(map(tuple, found["residual"]))
            assert found["next"] in shown or min(shown.values()) < 0.1
    assert written == new


def test_probabilities_are_those_of_target_and_draft(tools, tiny_target, tokenizer, prompt):
    """The target's, by a forward over the text and the path; the draft's, by a sampled tree's own
    distribution."""
    target = tiny_target()
    for tree in ("dynamic:9:3:3", "branch:3x2x1", "drawn:branch:3x2"):
        rule = "traversal" if "drawn" in tree else "greedy"
        output, data = traced(decoder(tools, target, rule, tree), prompt, tokenizer, rule)
        before = prompt.shape[1]
        temperature = 0.7 if rule != "greedy" else 1.0
        ids = [each["id"] for each in data["vocab"]]
        rounds_of_tokens = [each["r"] for each in data["output"]]
        for number, found in enumerate(data["rounds"]):
            start = before + rounds_of_tokens.index(number)
            paths = []
            for node, entry in enumerate(found["nodes"]):
                paths.append([*paths[entry["u"]], ids[entry["v"]]] if node else [])
                text = [*output.sequences[0, :start].tolist(), *paths[node]]
                logits_V = target.model(torch.tensor([text])).logits[0, -1]
                probs = (logits_V / temperature).softmax(-1)[ids].tolist()
                for index, prob in found["best"][str(node)]:
                    assert prob == pytest.approx(probs[index], rel=1e-3)
                for child in (each for each in found["nodes"] if each["u"] == node):
                    assert child["p"] == pytest.approx(probs[child["v"]], rel=1e-3)
                    likely = dict(map(tuple, found["draft"][str(node)]))
                    assert child["q"] == likely.get(child["v"], child["q"]) and 0 < child["q"] <= 1
                    if tree == "branch:3x2x1":
                        assert child["v"] in likely
            assert all(sum(prob for _, prob in pairs) <= 1.001 for pairs in found["draft"].values())


@pytest.mark.parametrize("kind", sorted(HEADS))
def test_every_head_gives_its_probabilities(tools, tiny_target, tokenizer, prompt, kind):
    target = tiny_target(layers=8)
    tree = "chain:1|dynamic:5:2:2"
    lm = SpeculativeLM(target, make_drafter(target, tree=tree, head=tools.head_for(target, kind)))
    heads = [tree.head for tree in lm.drafter.trees]
    output, data = traced(lm, prompt, tokenizer)
    assert torch.equal(output.sequences, generated(lm, prompt).sequences)
    rounds = data["rounds"]
    assert all(node["q"] is not None for found in rounds for node in found["nodes"][1:])
    assert all(a is b.head for a, b in zip(heads, lm.drafter.trees, strict=True)), (
        "the drafter keeps its own head"
    )
    assert "expand" not in vars(heads[0])


REPEATING = torch.tensor([[1, 2, 3, 4, 5] * 4])


@pytest.mark.parametrize("source", ["prompt-lookup", "model"])
def test_every_source_is_recorded(tools, tiny_target, tokenizer, source):
    target = tiny_target()
    for adaptive in (False, True):
        drafts = tools.other_model(target) if source == "model" else source
        lm = SpeculativeLM(target, make_drafter(target, drafts, adaptive=adaptive))
        output, data = traced(lm, REPEATING, tokenizer)
        assert torch.equal(output.sequences, generated(lm, REPEATING).sequences)
        known = source == "model"
        nodes = [node for found in data["rounds"] for node in found["nodes"][1:]]
        assert all((node["q"] is not None) == known for node in nodes)
        plain = [found["fallback"] for found in data["rounds"]]
        assert plain == [record.fallback for record in output.stats.rows[0]]


def test_a_head_and_a_lookup_are_recorded_together(tools, tiny_target, tokenizer):
    target = tiny_target()
    head = tools.head_for(target, "medusa")
    lm = SpeculativeLM(target, make_drafter(target, "prompt-lookup", "dynamic:6:2:2", head))
    output, data = traced(lm, REPEATING, tokenizer)
    assert torch.equal(output.sequences, generated(lm, REPEATING).sequences)
    assert all(followed(found, "greedy") for found in data["rounds"])


def test_figures_are_those_of_the_statistics(tools, tiny_target, tokenizer, prompt):
    lm = decoder(tools, tiny_target(), "greedy", "dynamic:9:3:3")
    output, data = traced(lm, prompt, tokenizer)
    shown, stats = data["stats"], output.stats
    for count in ("tokens", "rounds", "plain_rounds"):
        assert shown[count] == getattr(stats, count)
    assert shown["acceptance_length"] == pytest.approx(stats.acceptance_length, rel=1e-3)
    assert shown["interval"] == pytest.approx(stats.acceptance_length_interval, rel=1e-3)
    rates = [None if rate != rate else rate for rate in stats.acceptance_rate_by_depth]
    assert shown["acceptance_rate_by_depth"] == pytest.approx(rates, rel=1e-3)
    assert sum(shown["parts_ms"].values()) <= 1000 * sum(stats.round_seconds) / stats.rounds
    for part in PARTS:
        mean = sum(found["parts"][part] for found in data["rounds"]) / stats.rounds
        assert shown["parts_ms"][part] == pytest.approx(mean, rel=1e-2, abs=1e-6)


def test_what_cannot_be_recorded_is_named(tiny_target, tokenizer, prompt):
    lm = SpeculativeLM(tiny_target())
    with refused("one 2"):
        traced(lm, prompt.expand(2, -1), tokenizer)
    with refused("max_new_tokens=0"):
        traced(lm, prompt, tokenizer, max_new_tokens=0)
    with refused("tokenizer"):
        traced(lm, prompt, None)


def test_a_round_that_is_repeated_without_drafts_is_recorded_so(
    tools, tiny_target, tokenizer, prompt
):
    """A sampled draft that the target cannot read: the embedding of a token that it never says is
    not finite."""
    target = tiny_target(dtype=torch.float32)
    bad = 77
    target.model.get_input_embeddings().weight.data[bad] = torch.nan
    head = tools.head_for(target, "medusa")
    for lm_head in head.lm_heads:
        lm_head.weight.data[bad] = torch.nan  # so that it is drafted first
    lm = SpeculativeLM(target, make_drafter(target, tree="branch:2x2", head=head))
    settings = {"suppress_tokens": [bad]}
    expected = target.model.generate(
        prompt, **settings_of(prompt, **settings) | {"generator": None}
    )
    output, data = traced(lm, prompt, tokenizer, **settings)
    assert torch.equal(output.sequences, expected)
    assert {found["fallback"] for found in data["rounds"]} == {"not_finite"}
    assert all(len(found["nodes"]) == 1 for found in data["rounds"])


class FromBoth(LogitsProcessor):
    """Allows even and odd tokens in turn, and keeps count: it must be called once for each token of
    the text."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        allowed = torch.full_like(scores, -torch.inf)
        allowed[:, self.calls % 2 :: 2] = scores[:, self.calls % 2 :: 2]
        self.calls += 1
        return allowed


@pytest.mark.parametrize("rule", ["greedy", "point_mass"])
def test_a_processor_that_keeps_a_state_is_called_as_without_a_trace(tiny_target, tokenizer, rule):
    lm = SpeculativeLM.from_pretrained(tiny_target(), drafter="prompt-lookup", adaptive=False)
    expected = generated(lm, REPEATING, rule, logits_processor=[FromBoth()])
    output, data = traced(lm, REPEATING, tokenizer, rule, logits_processor=[FromBoth()])
    assert torch.equal(output.sequences, expected.sequences)
    assert len(data["rounds"]) == output.stats.rounds
    assert all(followed(found, rule) for found in data["rounds"])


def test_a_generation_inside_the_traced_one_is_not_recorded(tools, tiny_target, tokenizer, prompt):
    lm = decoder(tools, tiny_target(), "greedy", "branch:2x1")
    expected, data = traced(lm, prompt, tokenizer)
    inner = []

    def once(sequences):
        if not inner:
            inner.append(None)
            inner[0] = generated(lm, prompt.flip(1), max_new_tokens=5)

    lm.observers.append(tools.EachRound(once))
    output, again = traced(lm, prompt, tokenizer)
    assert torch.equal(output.sequences, expected.sequences) and inner[0].stats.rounds > 0
    both = zip(again["rounds"], data["rounds"], strict=True)
    assert all(found["nodes"] == wanted["nodes"] for found, wanted in both)
