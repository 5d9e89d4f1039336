"""The arithmetic of the benchmark's figures on made-up rows, and a whole run on a tiny target."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest
import torch
from messages import refused
from runs import write_prompts

from headstart.heads import CheckpointMetadata, MedusaConfig, MedusaHead
from headstart.heads.checkpoints.save_load import save_head
from headstart.inference import SpeculativeLM, Stats, Target, load_tokenizer
from headstart.inference.text.chat_template import prompt_ids
from headstart.inference.text.prompt_files import read_prompts
from headstart.inference.trees.stats import PARTS, RoundRecord
from headstart.scripts import bench as benchmarking
from headstart.scripts.bench import (
    SIDES,
    BenchConfig,
    ComparedPrompt,
    benchmark,
    figures,
    print_report,
)


def answered(seconds, tokens=(10, 10, 10), difference=None, rounds=((1, 2),), times=()):
    stats = Stats([[RoundRecord(*pair) for pair in rounds]], max_depth=2, seconds=dict(times))
    return ComparedPrompt(
        tokens=dict(zip(SIDES, tokens, strict=True)),
        seconds=dict(zip(SIDES, seconds, strict=True)),
        difference=difference,
        stats=stats,
    )


def test_figures_are_totals_for_rates_and_medians_over_prompts_for_speedups():
    parts = {"prefill": 9.0, "draft": 0.1, "target": 0.4, "verify": 0.03, "rest": 0.01}
    row = figures(
        [
            answered((4, 2, 1), rounds=((2, 3), (1, 2)), times=parts.items()),
            answered(
                (1, 1, 1),
                difference={"token": 3, "logit_gap": 0.5},
                rounds=((0, 1),),
                times=parts.items(),
            ),
            answered(
                (10, 10, 5), tokens=(20, 20, 30), rounds=((1, 2), (0, 1)), times=parts.items()
            ),
        ]
    )
    assert row["prompts"] == 3
    assert row["identical"] == 2
    assert row["differences"] == [{"token": 3, "logit_gap": 0.5}]
    assert row["tokens_per_second"] == pytest.approx(
        {"generate": 40 / 15, "plain": 40 / 13, "speculative": 50 / 7}
    )
    # per prompt: vs generate 4, 1, 3; vs plain 2, 1, 3
    assert row["speedup_vs_generate"] == pytest.approx(
        {"median": 3, "lower_quartile": 2, "upper_quartile": 3.5}
    )
    assert row["speedup_vs_plain"] == pytest.approx(
        {"median": 2, "lower_quartile": 1.5, "upper_quartile": 2.5}
    )
    assert row["acceptance_length"] == pytest.approx(9 / 5)
    assert row["acceptance_rate_by_depth"] == pytest.approx([3 / 5, 1 / 3])
    assert row["milliseconds_per_round"] == pytest.approx(
        {"draft": 60, "target": 240, "verify": 18, "rest": 6}
    )


def prompt_file(path, count):
    path.parent.mkdir(exist_ok=True)
    return write_prompts(path, [f"say {i} {'again ' * i}" for i in range(count)])


@pytest.fixture
def config(target_folder, head_folder, tmp_path):
    return BenchConfig(
        target=str(target_folder),
        head=str(head_folder),
        prompts=[prompt_file(tmp_path / "chat.jsonl", 4), prompt_file(tmp_path / "code.jsonl", 1)],
        limit=3,
        max_new_tokens=9,
        dtype="float32",
        adaptive=False,
        output=str(tmp_path / "deep" / "report.json"),
        profile=True,
    )


def test_the_report_has_the_figures_of_each_file_and_of_a_rounds_parts(config, capsys):
    report = benchmark(config)
    rows = [*(report["files"][path] for path in config.prompts), report["total"]]
    assert [row["prompts"] for row in rows] == [3, 1, 4]
    assert all(row["identical"] == row["prompts"] for row in rows)  # greedy, in float32
    assert all(1 <= row["acceptance_length"] <= 4 for row in rows)
    found = report["profile"]
    assert found["milliseconds"].keys() == set(PARTS) and found["nodes"] == report["nodes"]
    assert found["round"] == pytest.approx(sum(report["total"]["milliseconds_per_round"].values()))
    assert found["floors"]["bytes"] > 0 and found["of_the_round"]["forward"] > 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("chat", "code", "total", "4/4"))


def test_what_the_draft_vocabulary_lacks_is_counted_and_named(
    config, target_folder, tmp_path, capsys
):
    """With a draft vocabulary of one token, the most frequent of the answers."""
    assert all(row["coverage"] is None for row in benchmark(config)["files"].values())
    assert "outside" not in capsys.readouterr().out
    target = Target.from_pretrained(target_folder, torch.float32)
    lm = SpeculativeLM(target)
    tokenizer = load_tokenizer(target_folder)
    answers = {}
    for path in config.prompts:
        answers[path] = []
        for messages in read_prompts(path, config.limit):
            ids = prompt_ids(tokenizer, messages)
            answers[path] += (
                lm.generate(ids, max_new_tokens=9, do_sample=False)
                .sequences[0, ids.shape[1] :]
                .tolist()
            )
    counts_V = torch.bincount(
        torch.tensor([token for tokens in answers.values() for token in tokens]),
        minlength=target.info.vocab_size,
    )
    head = MedusaHead(MedusaConfig(num_heads=3, draft_vocab_size=1), target.info)
    head.initialize(target.modules, counts_V)
    save_head(head, tmp_path / "small", CheckpointMetadata(tree=[[0], [0, 0]]))
    report = benchmark(
        BenchConfig(**{**vars(config), "head": str(tmp_path / "small"), "profile": False})
    )
    shown = " ".join(capsys.readouterr().out.split())
    for path, tokens in answers.items():
        share = tokens.count(int(head.token_map)) / len(tokens)
        assert 0 < share < 0.95
        assert report["files"][path]["coverage"] == share
        assert (
            f"{Path(path).stem}: {1 - share:.1%} of the answers' tokens are outside the draft"
            " vocabulary" in shown
        )


def test_the_report_is_written_as_json_that_every_reader_takes_and_prints_alike(config, capsys):
    # of two tokens one round drafts nothing, and has no rates
    report = benchmark(BenchConfig(**{**vars(config), "max_new_tokens": 2, "profile": False}))
    shown = capsys.readouterr().out
    with open(config.output, encoding="utf-8") as file:
        written = json.load(file, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert written == report
    print_report(written)
    assert shown.endswith(capsys.readouterr().out)


def test_a_price_and_a_power_give_the_cost_of_a_million_tokens(config, capsys):
    options = vars(config) | {"prompts": config.prompts[1:], "profile": False}
    report = benchmark(BenchConfig(**options | {"price_per_hour": 0.08, "watts": 30.0}))
    plain, fast = (report["total"]["tokens_per_second"][side] for side in ("plain", "speculative"))
    shown = capsys.readouterr().out
    money, energy = ([one * 1e6 / (3600 * rate) for rate in (plain, fast)] for one in (0.08, 0.03))
    assert (
        f"a million tokens at price_per_hour = 0.08: {money[0]:.3g} plain, {money[1]:.3g}"
        " speculative" in shown
    )
    assert f"at watts = 30: {energy[0]:.3g} kWh plain, {energy[1]:.3g} kWh speculative" in shown
    benchmark(BenchConfig(**options))
    assert "a million tokens" not in capsys.readouterr().out


def test_sampling_is_compared_too_and_repeats_for_a_seed(config):
    # In every round the same tree: which one is fastest is the clock's choice.
    changes = {"temperature": 1.0, "limit": 1, "tree": "chain:2", "adaptive": False}
    runs = [
        benchmark(BenchConfig(**{**vars(config), **changes, "seed": seed})) for seed in (3, 3, 4)
    ]
    lengths = [
        (
            run["total"]["acceptance_length"],
            run["total"]["rounds"],
            repr(run["total"]["acceptance_rate_by_depth"]),
        )
        for run in runs
    ]
    assert lengths[0] == lengths[1] != lengths[2]


def test_two_files_of_one_name_both_get_a_row(config, tmp_path, capsys):
    prompts = [
        prompt_file(tmp_path / folder / "chat.jsonl", count)
        for folder, count in (("a", 1), ("b", 2))
    ]
    report = benchmark(BenchConfig(**{**vars(config), "prompts": prompts}))
    assert [report["files"][path]["prompts"] for path in prompts] == [1, 2]
    shown = capsys.readouterr().out
    assert all(counted in shown for counted in ("1/1", "2/2", "3/3"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"head": "/nowhere"}, "'/nowhere'"),
        ({"tree": "bush"}, "unknown 'bush'"),
        ({"tree": "chain:9"}, "3"),
    ],
)
def test_what_cannot_be_used_is_named(config, change, words):
    with refused(words):
        benchmark(BenchConfig(**{**vars(config), **change}))


@pytest.mark.parametrize("at", [1, 2, 3])
def test_stopped_in_an_answer_what_was_measured_is_written(config, monkeypatch, at, capsys):
    original, calls = benchmarking._compare_one, []

    def answer(*given):
        calls.append(given)
        if len(calls) == at:
            signal.raise_signal(signal.SIGINT)
        return original(*given)

    monkeypatch.setattr(benchmarking, "_compare_one", answer)
    if at == 1:
        with pytest.raises(KeyboardInterrupt):
            benchmark(config)
        assert not Path(config.output).exists()
        return
    benchmark(config)
    assert len(calls) == at
    report = json.loads(Path(config.output).read_text())
    assert report["total"]["prompts"] == at - 1 and report["stopped"]
    assert "vs plain" in capsys.readouterr().out


def test_a_line_says_on_which_prompts_drafts_do_not_pay_and_where_to_read_on(config, capsys):
    report = benchmark(config, show=False)
    assert "vs plain" not in capsys.readouterr().out
    for path, speed in zip(config.prompts, (0.97, 1.2), strict=True):
        report["files"][path]["speedup_vs_plain"]["median"] = speed
    print_report(report)
    shown = " ".join(capsys.readouterr().out.split())
    assert "drafts do not pay on chat (0.97 times the speed without them);" in shown
    page = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    (title,) = re.findall(r'docs/troubleshooting.md, "(.*?)"', shown)
    assert f"## {title}\n" in page
    report["files"][config.prompts[0]]["speedup_vs_plain"]["median"] = 1.0
    print_report(report)
    assert "do not pay" not in capsys.readouterr().out
