"""`headstart plan-data`: the law of benchmarks/scaling.md, its interval, and what recordings say."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from headstart.heads import build_head
from headstart.inference import SpeculativeLM, Target, load_tokenizer
from headstart.scripts.measuring.data_law import (
    CHAIN,
    MEAN,
    POINTS,
    SHIPPED,
    SIZES,
    STUDENT_T,
    TOKENS,
    Law,
    half_width,
    interval,
    law_of,
    measured,
    tokens_interval,
)
from headstart.scripts.plan_data import PlanConfig, accepted, main, rounds_by_nodes

PAGE = Path(__file__).parents[2] / "benchmarks" / "scaling.md"
HEADINGS = {"chain": "## Chain of 3", "tree": "## Dynamic tree of 32"}


def page_rows(tree):
    """The cells of a table of the page, by kind."""
    text = PAGE.read_text(encoding="utf-8")
    section = text.partition(HEADINGS[tree])[2].partition("predicted from the smaller")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return {row[0]: row[1:] for row in rows}


@pytest.mark.parametrize("tree", POINTS)
def test_the_points_and_the_law_are_those_of_the_page(tree):
    rows = page_rows(tree)
    head = rows.pop("prompts")
    assert [int(size.replace(",", "")) for size in head[:3]] == list(SIZES)
    assert list(rows) == [*POINTS[tree], MEAN]
    for kind, cells in rows.items():
        if kind != MEAN:
            assert tuple(map(float, cells[:3])) == POINTS[tree][kind]
        assert float(cells[3]) == SHIPPED[tree][kind]
        law = law_of(tree, kind)
        assert float(cells[4]) == pytest.approx(law.gain, abs=0.011)  # the page's line is through unrounded points
        for tokens, cell in zip((1e6, 3e6, 1e7), cells[5:], strict=True):
            assert float(cell) == pytest.approx(law.length(tokens), abs=0.03)
    means = [sum(float(cells[place]) for kind, cells in rows.items() if kind != MEAN) / 8 for place in range(3)]
    assert list(measured(tree, MEAN).values()) == pytest.approx(means)


def test_the_line_is_the_one_of_least_squares():
    lengths = {25_000: 1.0, 100_000: 1.5, 400_000: 1.7}
    law = Law.fitted(lengths)
    assert law.gain == pytest.approx(0.7 / 4) and law.start == pytest.approx(1.4)
    assert law.length(law.tokens(2.2)) == pytest.approx(2.2)
    assert law.times(1.4, 1.4 + law.gain) == pytest.approx(2)


def test_the_quantile_is_students_with_a_degree_of_freedom_for_each_kind():
    freedom = len(CHAIN) * (len(SIZES) - 2)
    assert freedom == 8

    def density(t):
        constant = math.gamma((freedom + 1) / 2) / math.sqrt(freedom * math.pi) / math.gamma(freedom / 2)
        return constant * (1 + t * t / freedom) ** (-(freedom + 1) / 2)

    width = STUDENT_T / 5000
    inside = sum(density((place + 0.5) * width) for place in range(5000)) * width
    assert 2 * inside == pytest.approx(0.95, abs=1e-4)


def test_the_interval_is_the_prediction_interval_of_pooled_residuals():
    for tree, kinds in POINTS.items():
        squares = 0.0
        for kind in kinds:
            law = law_of(tree, kind)
            squares += sum((law.length(size) - length) ** 2 for size, length in measured(tree, kind).items())
        deviation = math.sqrt(squares / 8)
        assert half_width(tree, 100_000) == pytest.approx(STUDENT_T * deviation * math.sqrt(4 / 3))
        assert half_width(tree, 400_000) == pytest.approx(STUDENT_T * deviation * math.sqrt(4 / 3 + 4 / 2))
        assert half_width(tree, 25_000) == pytest.approx(half_width(tree, 400_000))
    outside = 0
    for tree, kinds in POINTS.items():
        for kind in kinds:
            low, high = interval(tree, kind, SIZES[0])
            outside += not low <= measured(tree, kind)[SIZES[0]] <= high
    assert outside == 0, "of the points that made the lines none may lie outside"


@pytest.mark.parametrize("tree", POINTS)
@pytest.mark.parametrize("kind", [*CHAIN, MEAN])
def test_tokens_for_a_length_lie_in_their_interval(tree, kind):
    for tokens in (30_000, 150_000, 2_000_000):
        length = law_of(tree, kind).length(tokens)
        if length <= 1:
            continue
        low, high = tokens_interval(tree, kind, length)
        assert low <= tokens * 1.02 and high >= tokens / 1.02
        if TOKENS[0] < low:
            assert interval(tree, kind, low)[1] == pytest.approx(length, abs=0.02)
        if high < TOKENS[1]:
            assert interval(tree, kind, high)[0] == pytest.approx(length, abs=0.02)


def words(capsys):
    return " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_it_says_what_tokens_give_and_how_many_a_length_takes(capsys):
    main(["--tokens", "150000", "--kind", "summaries", "--length", "2.0", "--rate", "215"])
    told = words(capsys)
    law = law_of("tree", "summaries")
    low, high = interval("tree", "summaries", 150_000)
    assert f"150,000 {law.length(150_000):.2f} {low:.2f} to {high:.2f} inside 12 minutes" in told
    tokens = law.tokens(2.0)
    assert f"2.00 {float(f'{tokens:.2g}'):,.0f} " in told and "times beyond: a guess 41 minutes" in told
    assert "Measured from 50,000 to 200,000 for one small model (SmolLM2-135M, EAGLE-3" in told
    assert f"reaches {SHIPPED['tree']['summaries']:.2f}; the law says {law.length(1.09e6):.2f}" in told
    assert "Your model has a line of its own." in told


def test_alone_it_shows_the_law(capsys):
    main(["--tree", "chain"])
    told = words(capsys)
    assert f"100,000 {law_of('chain', MEAN).length(100_000):.2f} " in told
    assert "10,000,000 " in told and "50.0 times beyond: a guess" in told
    assert "shipped head, trained otherwise on 1,090,000, reaches 1.80" in told


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kind": "poems"}, "unknown kind 'poems': the law was measured for mean, gsm8k, humaneval, .*; take the near"),
        ({"tokens": 0}, "tokens must be at least 1000, not 0"),
        ({"tokens": 10**12}, "tokens is 1,000,000,000,000, of which the law says nothing: it was measured from 50,000"),
        ({"length": 1.0}, "length must be above 1, which is plain decoding, and at most the 8 tokens .*, not 1.0"),
        ({"length": 4.5, "tree": "chain"}, r"at most the 4 tokens that a round with this tree \(chain\) emits, not 4"),
        ({"length": float("nan")}, "length must be above 1"),
        ({"rate": 0.0}, "rate must be above 0 tokens a second, not 0.0"),
    ],
)
def test_what_the_law_cannot_say_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        PlanConfig(**given)


def test_folders_that_hold_no_recording_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no folder at '.*missing'; `headstart chat --record FOLDER` makes one"):
        main(["--recorded", str(tmp_path / "missing")])
    with pytest.raises(ValueError, match=r"the folder '.*' is empty; name one that"):
        main(["--recorded", str(tmp_path)])
    (tmp_path / "notes.txt").write_text("a")
    with pytest.raises(ValueError, match=r"holds no recorded answers \(recorded-\*\.safetensors\); name one that"):
        main(["--recorded", str(tmp_path)])


@pytest.fixture(scope="module")
def recording(taught, tmp_path_factory):
    """Recorded answers of two kinds, decoded with chains of 3, and some of their rounds."""
    folder = tmp_path_factory.mktemp("planned")
    tokenizer = load_tokenizer(taught)
    target = Target.from_pretrained(str(taught), torch.float32)
    head = build_head("medusa", {"num_heads": 3}, target.info)
    head.initialize(target.modules, torch.ones(target.info.vocab_size, dtype=torch.int64))
    lm = SpeculativeLM.from_pretrained(target, head, tree="chain:3", fallback=False)
    settings = {"do_sample": False, "eos_token_id": [], "pad_token_id": 0, "max_new_tokens": 12}
    stats = {"translation": [], "letters": []}
    for kind in stats:
        with lm.record(folder, kind=kind, format="float32", tokenizer=tokenizer):
            for number in range(10):
                if (number % 3 == 0) == (kind == "translation"):
                    ids = tokenizer(f"count to {number}", return_tensors="pt").input_ids
                    stats[kind].append(lm.generate(ids, **settings).stats)
    return folder, stats


def test_it_says_what_was_recorded_and_how_much_more_it_takes(recording, capsys):
    folder, stats = recording
    main(["--recorded", str(folder), "--tree", "chain", "--length", "2.5", "--kind", "questions"])
    told = words(capsys)
    for kind, like in (("translation", "translation"), ("letters", "questions")):
        own = stats[kind]
        now = sum(each.tokens for each in own) / sum(each.rounds for each in own)
        law = law_of("chain", like)
        times = 2 ** ((2.5 - now) / law.gain)
        needed = f"{times:.1f} times" if times <= 1000 else "over 1000 times another way"
        assert f"{kind} {len(own)} {12 * len(own)} {now:.2f} 4: {now:.2f} {like} {needed}" in told
    assert (
        "`headstart adapt` would train on 8 of 10 different answers (96 answer tokens, 100 passes in 100 steps)" in told
    )
    assert "and judge on the 2 newest." in told
    assert "if the head has learned from as many as give this length by the law (learned)." in told


def test_rounds_of_the_laws_tree_count_or_else_all_that_drafted(recording, capsys):
    rows = [{"rounds": {"1": [5, 5], "4": [10, 15], "32": [2, 8]}}, {"rounds": {"4": [10, 25]}}, {}]
    by_nodes = rounds_by_nodes(rows)
    assert by_nodes == {1: (5, 5), 4: (20, 40), 32: (2, 8)}
    assert accepted(by_nodes, "chain") == 2.0 and accepted(by_nodes, "tree") == 4.0
    assert accepted({1: (5, 5), 4: (20, 40), 16: (20, 60)}, "tree") == 2.5
    assert accepted({1: (5, 5)}, "tree") is None and accepted({}, "chain") is None
    folder, stats = recording
    letters = stats["letters"]
    now = accepted(rounds_by_nodes([{"rounds": {"4": [each.rounds, each.tokens]}} for each in letters]), "chain")
    wanted = now + 0.25
    given = ["--recorded", str(folder), "--tree", "chain", "--length", str(wanted), "--learned", "40000"]
    main(given)
    told = words(capsys)
    more = 40_000 * (law_of("chain", MEAN).times(now, wanted) - 1)
    assert f" {float(f'{more:.2g}'):,.0f} " in told and "if the head has learned from 40,000." in told
    main(["--recorded", str(folder), "--length", "1.01"])
    assert "there already 0" in words(capsys)
