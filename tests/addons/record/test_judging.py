"""A new head against the one before: the same drafts as in decoding, speed by measured costs, and
who is taken."""

from __future__ import annotations

import dataclasses
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from messages import lacking, refused
from recordings import SETTINGS
from runs import rows_of

from headstart.addons.record import record
from headstart.addons.record.adapt_data import snapshot
from headstart.addons.record.config import AdaptConfig
from headstart.addons.record.folder import COSTS, keep_costs, machine_costs, recorded_costs
from headstart.addons.record.judging import (
    Comparison,
    Judgement,
    KnownCosts,
    judge,
    judged_trees,
    known_costs,
    predicted_speed,
    report,
)
from headstart.heads import CheckpointMetadata, build_head
from headstart.heads.checkpoints.save_load import save_head
from headstart.inference import SpeculativeLM, Target, load_tokenizer
from headstart.inference.drafters import costs as costs_module
from headstart.inference.drafters.costs import head_shape, measured_costs
from headstart.inference.outer_modules import OuterTarget
from headstart.inference.trees.stats import RoundRecord, Stats
from headstart.inference.trees.tree_spec import DynamicShape, TreeShape
from headstart.inference.tuning.round_costs import SIZES, RoundCosts
from headstart.train.evaluate import greedy_answers

NEW_TOKENS = 10
HEADS = {
    "medusa": {"num_heads": 3, "draft_vocab_size": 200},
    "hydra": {"num_heads": 3},
    "eagle": {"depth": 3},
    "eagle3": {"depth": 4, "feature_layers": [0, -1], "draft_vocab_size": 200, "start": "random"},
    "mtp": {"depth": 2},
    "dflash": {"block_size": 4, "feature_layers": [0]},
    "dspark": {"block_size": 4, "feature_layers": [0], "confidence": True},
}
CHAIN = TreeShape.chain(3)
TREE = DynamicShape(8, 3, 2)
DEAR = RoundCosts({1: 1.0, 2: 1.0, 4: 1.0, 8: 4.0, 16: 8.0, 32: 16.0}, draft=0.1)
"""Costs by which a chain pays, and a tree of 8 does not."""


@pytest.fixture
def steps_take_what_is_assumed():
    """Nothing is assumed here: what rounds cost is measured and kept."""


def stats_of(lengths):
    """Statistics of prompts with 10 rounds each, which returned so many tokens together."""
    rows = []
    for tokens in lengths:
        rows.append([RoundRecord(0, 1)] * 9 + [RoundRecord(0, tokens - 9)])
    return Stats(rows, max_depth=3)


def comparison(kind, old, new, tree=None):
    """A comparison in the chain; in the tree the heads are alike, unless `tree` gives the lengths
    of the new one."""
    before = {CHAIN: stats_of(old), TREE: stats_of(old)}
    return Comparison(kind, before, {CHAIN: stats_of(new), TREE: stats_of(tree or old)})


def judgement(*kinds, costs=None):
    whole = Comparison.merged("all", kinds, [CHAIN, TREE])
    known = None if costs is None else KnownCosts(costs, costs, "measured by a test")
    return Judgement(whole, kinds, CHAIN, TREE, known)


BASE = [14, 15, 16, 15, 14, 16, 15, 14, 16, 15] * 2
MORE = [length + 2 for length in BASE]
MUCH_MORE = [length + 6 for length in BASE]
LESS = [length - 2 for length in BASE]
MIXED = [length + (-3, 4)[place % 2] for place, length in enumerate(BASE)]
CONFIG = AdaptConfig(target="target", head="old", recorded="folder", output="out")


def told(found):
    page = report(CONFIG, found)
    return page.splitlines()[-1], page


def test_a_head_is_taken_that_accepts_more_is_faster_and_is_worse_nowhere():
    found = judgement(comparison("a", BASE, MORE, MORE), comparison("b", BASE, BASE), costs=DEAR)
    assert found.longer and found.faster and not found.worse
    verdict, page = told(found)
    assert found.taken and verdict == "Taken: out/best"
    assert not lacking(page, "better: a. differ: b.")


def test_a_kind_that_got_worse_beyond_chance_is_a_reason_not_to_take_it():
    for worse in (comparison("b", BASE, LESS, BASE), comparison("b", BASE, BASE, LESS)):
        found = judgement(comparison("a", BASE, MUCH_MORE, MUCH_MORE), worse, costs=DEAR)
        assert found.longer and found.faster and [each.kind for each in found.worse] == ["b"]
        verdict, page = told(found)
        assert not found.taken
        assert not lacking(verdict, "Not taken: worse b. (replay)")
        assert not lacking(page, "5 %: b.")


def test_kinds_that_are_few_or_differ_by_chance_do_not_decide():
    few = comparison("b", BASE[:7], LESS[:7], LESS[:7])
    mixed = comparison("c", BASE, MIXED[::-1], MIXED)
    found = judgement(comparison("a", BASE, MUCH_MORE, MUCH_MORE), few, mixed)
    assert found.taken
    assert not lacking(told(found)[1], "8 themselves: b.")


def test_the_more_kinds_the_further_one_must_fall():
    """The interval of a single kind excludes 0; of twenty kinds one does so by chance."""
    doubtful = [
        length + change for length, change in zip(BASE, (-2, 1, -1, 0, -1) * 4, strict=True)
    ]
    low, high = comparison("b", BASE, doubtful).interval(CHAIN)
    assert low < high < 0
    falls = [comparison("b", BASE, doubtful)]
    others = [comparison(str(number), BASE, MORE) for number in range(19)]
    assert judgement(*falls, *others).worse == []
    clear = [comparison("b", BASE, LESS)]
    assert [each.kind for each in judgement(*clear, *others).worse] == ["b"]


def test_a_head_that_is_not_faster_is_not_taken():
    """Its chain is better, and the tree that is fastest is no better."""
    cheap = RoundCosts(dict.fromkeys(SIZES, 1.0) | {32: 1.5}, draft=0.1)
    before = {CHAIN: stats_of(BASE), TREE: stats_of(MUCH_MORE)}
    found = judgement(
        Comparison("a", before, {CHAIN: stats_of(MORE), TREE: stats_of(MUCH_MORE)}), costs=cheap
    )
    assert found.longer and not found.worse and not found.faster
    verdict, page = told(found)
    assert not lacking(verdict, "Not taken: predicted speed")
    assert "measured by a test" in page
    alone = dataclasses.replace(found, costs=None)
    assert alone.taken
    assert not lacking(told(alone)[1], "acceptance alone")


def test_a_head_that_accepts_less_in_trees_is_not_taken():
    found = judgement(comparison("a", BASE, MORE, LESS), comparison("b", BASE, MORE, LESS))
    assert found.longer and not found.taken
    assert not lacking(told(found)[0], "Not taken: worse a, b.")
    thirds = [comparison(kind, BASE[:6], MORE[:6], LESS[:6]) for kind in "abc"]
    assert not lacking(told(judgement(*thirds))[0], "Not taken: less in trees.")


def test_few_answers_take_no_head():
    found = judgement(comparison("a", BASE[:15], MUCH_MORE[:15], MUCH_MORE[:15]))
    assert not found.longer and not found.worse
    assert not lacking(told(found)[0], "Not taken: 16 15")
    assert judgement(comparison("a", BASE[:16], MUCH_MORE[:16], MUCH_MORE[:16])).taken


@pytest.mark.parametrize(("fall", "taken"), [(1, False), (0, True)])
def test_a_kind_may_not_fall_by_more_than_the_margin_even_if_by_chance(fall, taken):
    """By 6.7 % or not at all, of a few answers that differ much."""
    lower = comparison("b", [15] * 8, [20, 10 - 2 * fall] * 4)
    low, high = lower.interval(CHAIN)
    assert low < 0 < high
    found = judgement(comparison("a", BASE, MUCH_MORE, MUCH_MORE), lower)
    assert found.longer and found.taken == taken


def test_equally_good_heads_are_rarely_taken_for_a_longer_one():
    """2.5 % of 95 % intervals lie above 0; by the normal distribution's, more of few answers."""
    random = torch.Generator().manual_seed(0)
    taken = 0
    for _ in range(1000):
        ease_N = torch.rand(16, generator=random)
        noise = torch.randn(2, 16, generator=random)
        old, new = (20 + 10 * ease_N + 3 * noise).round().int().tolist()
        taken += comparison("a", old, new).better(CHAIN)
    assert taken <= 35


def test_speed_is_that_of_the_fastest_tree_over_plain_steps():
    lengths = {CHAIN: stats_of([20, 30]), TREE: stats_of([30, 40])}
    assert predicted_speed(lengths, DEAR) == pytest.approx(2.5 / (1.0 + 0.3))
    cheap = dataclasses.replace(DEAR, forward={**DEAR.forward, 8: 1.0})
    assert predicted_speed(lengths, cheap) == pytest.approx(3.5 / (1.0 + 0.3))
    assert predicted_speed({CHAIN: Stats(rows=[[]], max_depth=3)}, DEAR) != predicted_speed(
        lengths, DEAR
    )


@pytest.fixture(scope="module")
def endless(taught, tmp_path_factory):
    """The tiny target, whose answers do not end."""
    folder = tmp_path_factory.mktemp("endless") / "target"
    shutil.copytree(taught, folder)
    for name in ("config.json", "generation_config.json"):
        kept = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**kept, "eos_token_id": None}))
    return folder


@pytest.fixture(scope="module")
def spoken(endless):
    """The target, and its tokenizer."""
    return Target.from_pretrained(str(endless), torch.float32), load_tokenizer(endless)


def a_head(target, kind, folder=None, **options):
    torch.manual_seed(0)
    head = build_head(kind, {**HEADS[kind], **options}, target.info)
    head.initialize(target.modules, torch.arange(target.info.vocab_size, 0, -1))
    if folder is not None:
        save_head(head, folder, CheckpointMetadata())
    return head.eval()


@pytest.fixture
def recorded(spoken, endless, tmp_path):
    """Builds a folder of recorded answers, with a head that is saved, and the config of adapting
    it."""
    target, tokenizer = spoken

    def build(kind):
        head = a_head(target, kind, tmp_path / "old")
        lm = SpeculativeLM.from_pretrained(target, head, tree="chain:1", adaptive=False)
        settings = {**SETTINGS, "max_new_tokens": NEW_TOKENS}
        given = {"format": "float32", "tokenizer": tokenizer}
        for first, words in enumerate(("count to", "say")):
            with record(lm, tmp_path / "recorded", kind=words.split()[0], **given):
                for number in range(first, 32, 2):
                    text = f"{words} {number + 3}"
                    lm.generate(tokenizer(text, return_tensors="pt").input_ids, **settings)
        return AdaptConfig(
            target=str(endless),
            head=str(tmp_path / "old"),
            recorded=str(tmp_path / "recorded"),
            output=str(tmp_path / "new"),
            held_out=0.6,
            max_new_tokens=NEW_TOKENS,
        )

    return build


@pytest.mark.parametrize("kind", HEADS)
def test_what_is_judged_is_what_decoding_accepts(spoken, recorded, tmp_path, kind):
    """Every kind of head, in the chain and in each tree that decoding would choose from."""
    target, _ = spoken
    config = recorded(kind)
    # in its kernels heads draft with weights of 8 bits; `judge` takes the head's own
    target.compile(False)
    old = a_head(target, kind)
    costs = RoundCosts(dict.fromkeys(SIZES, 1.0), 0.01)
    keep_costs(tmp_path / "recorded", head_shape(old), costs, "here")
    torch.manual_seed(1)
    new = a_head(target, kind)
    for weight in new.parameters():
        weight.data += 0.02 * torch.randn_like(weight)
    save_head(new, tmp_path / "changed", CheckpointMetadata())
    snapshot(config, tmp_path / "new" / "recorded")
    rows = rows_of(tmp_path / "new" / "recorded" / "judged.jsonl")
    manifest = json.loads((tmp_path / "recorded" / "manifest.json").read_text())
    found = judge(config, manifest, rows, tmp_path / "changed")
    assert [each.kind for each in found.kinds] == ["count", "say"]
    assert found.whole.answers == len(rows) == 20
    assert len(found.whole.old) > 4 and found.chain.depth == old.max_depth
    assert found.tree.size == 60 and found.costs.origin.endswith(": here")
    prompts = [torch.tensor(row["input_ids"][: row["loss_mask"].index(1)]) for row in rows]
    for tree in (found.chain, found.tree):
        for head, side in ((old, found.whole.old), (new, found.whole.new)):
            answers = greedy_answers(target, head, tree, prompts, NEW_TOKENS)
            decoded = answers.stats.tokens_and_rounds
            assert sum(tokens for tokens, _ in decoded) == len(rows) * (NEW_TOKENS - 1)
            assert sorted(side[tree].tokens_and_rounds) == sorted(decoded)
    assert judged_trees(target, old, None)[1:] == [DynamicShape(16, old.max_depth, 5)]
    dear = RoundCosts({size: float(size) for size in SIZES}, draft=10.0)
    assert judged_trees(target, old, dear)[-1] == DynamicShape(16, old.max_depth, 5), (
        "where no tree pays, too"
    )


def test_targets_that_check_chains_alone_are_judged_in_chains():
    chains = SimpleNamespace(stateful=None, engine=SimpleNamespace(chains_only=True))
    head = SimpleNamespace(max_depth=3)
    cheap = RoundCosts(dict.fromkeys(SIZES, 1.0) | {32: 1.5}, 0.01)
    assert judged_trees(chains, head, None) == [CHAIN]
    assert set(judged_trees(chains, head, cheap)) == {
        TreeShape.chain(length) for length in (1, 2, 3)
    }
    page = told(dataclasses.replace(judgement(comparison("a", BASE, MORE)), tree=None))[1]
    assert "| kind | answers | chain of 3: before | after | difference, 95 % |\n" in page


def test_a_recording_keeps_what_rounds_cost_where_it_was_made(
    spoken, recorded, tmp_path, nothing_measured
):
    target, tokenizer = spoken
    folder = tmp_path / "recorded"
    recorded("medusa")
    assert not (folder / COSTS).exists(), "nobody measured them"
    head = a_head(target, "medusa")
    shape = head_shape(head)
    lm = SpeculativeLM.from_pretrained(target, head)
    for _ in range(2):
        record(lm, folder, format="float32", tokenizer=tokenizer).stop()
        costs, machine = recorded_costs(folder, shape)
        assert (costs.forward, costs.draft) == (lm.costs.forward, lm.costs.draft)
        assert "threads" in machine
    wider = SpeculativeLM.from_pretrained(target, a_head(target, "medusa", num_heads=2))
    record(wider, folder, format="float32", tokenizer=tokenizer).stop()
    assert len(json.loads((folder / COSTS).read_text())) == 2, "those of another head are kept"
    assert recorded_costs(folder, head_shape(a_head(target, "hydra"))) is None
    for broken in (json.dumps({shape: {"forward": {"1": -2}}}), "{"):
        (folder / COSTS).write_text(broken)
        with refused("costs.json"):
            recorded_costs(folder, shape)
    record(wider, folder, format="float32", tokenizer=tokenizer).stop()
    assert len(json.loads((folder / COSTS).read_text())) == 1, "a broken file is replaced"


@pytest.mark.parametrize("compiled", [False, True])
def test_costs_that_this_machine_kept_serve_a_target_without_blocks(
    taught, tiny_target, tmp_path, nothing_measured, compiled
):
    outer = OuterTarget.load(str(taught), torch.float32, "cpu")
    head = a_head(outer, "medusa")
    assert machine_costs(outer, head) is None
    assert known_costs(tmp_path, outer, head, head) is None
    whole = Target.from_pretrained(str(taught), torch.float32)
    measured = SpeculativeLM.from_pretrained(whole, head, compile=compiled).costs
    found = known_costs(tmp_path, outer, head, head)
    assert (found.old, found.new) == (measured, measured)
    assert not lacking(found.origin, "earlier this machine")
    assert machine_costs(outer, a_head(outer, "medusa", num_heads=2)) is None
    assert machine_costs(outer, a_head(outer, "hydra")) is None
    assert machine_costs(tiny_target(layers=5, dtype=torch.float32), head) is None, (
        "a deeper target costs more"
    )


def test_a_target_with_its_blocks_is_measured_and_another_shape_by_its_weights(
    taught, tmp_path, nothing_measured, monkeypatch
):
    costs = RoundCosts(dict.fromkeys(SIZES, 1.0), 0.5)
    monkeypatch.setattr(costs_module, "time_rounds", lambda target, head: costs)
    target = Target.from_pretrained(str(taught), torch.float32)
    old = a_head(target, "medusa")
    new = a_head(target, "medusa", draft_vocab_size=None)
    found = known_costs(tmp_path, target, old, new)
    assert found.old == measured_costs(target, old)
    sizes = [sum(weight.numel() for weight in head.parameters()) for head in (old, new)]
    assert sizes[1] > sizes[0] and found.new.draft == pytest.approx(0.5 * sizes[1] / sizes[0])
    assert found.new.forward == found.old.forward
    assert not lacking(found.origin, f"{sizes[1] / sizes[0]:.2f} weights")
