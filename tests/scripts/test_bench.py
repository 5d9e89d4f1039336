"""The arithmetic of the benchmark's figures on made-up rows, and a whole run on a tiny target."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest
import torch
from helpers import saved_head, written_alone
from messages import lacking, refused
from runs import changed, write_prompts
from transformers import GenerationMixin

from headstart.inference import Stats, Target, load_tokenizer
from headstart.inference.text.chat_template import prompt_ids
from headstart.inference.text.prompt_files import read_prompts
from headstart.inference.trees.stats import PARTS, RoundRecord
from headstart.scripts.bench import (
    SIDES,
    BenchConfig,
    ComparedPrompt,
    benchmark,
    figures,
    print_report,
)


def compared(seconds, rounds, tokens=(10, 10, 10), difference=None):
    """A prompt with the seconds and tokens of each side."""
    times = {"prefill": 9.0, "draft": 0.1, "target": 0.4, "verify": 0.03, "rest": 0.01}
    return ComparedPrompt(
        tokens=dict(zip(SIDES, tokens, strict=True)),
        seconds=dict(zip(SIDES, seconds, strict=True)),
        difference=difference,
        stats=Stats([[RoundRecord(*pair) for pair in rounds]], max_depth=2, seconds=times),
    )


def test_figures_are_totals_for_rates_and_medians_over_prompts_for_speedups():
    difference = {"token": 3, "logit_gap": 0.5}
    row = figures(
        [
            compared((4, 2, 1), [(2, 3), (1, 2)]),
            compared((1, 1, 1), [(0, 1)], difference=difference),
            compared((10, 10, 5), [(1, 2), (0, 1)], tokens=(20, 20, 30)),
        ]
    )
    assert (row["prompts"], row["identical"], row["differences"]) == (3, 2, [difference])
    rates = {"generate": 40 / 15, "plain": 40 / 13, "speculative": 50 / 7}
    assert row["tokens_per_second"] == pytest.approx(rates)
    # per prompt: vs generate 4, 1, 3; vs plain 2, 1, 3
    over_generate = {"median": 3, "lower_quartile": 2, "upper_quartile": 3.5}
    assert row["speedup_vs_generate"] == pytest.approx(over_generate)
    over_plain = {"median": 2, "lower_quartile": 1.5, "upper_quartile": 2.5}
    assert row["speedup_vs_plain"] == pytest.approx(over_plain)
    assert row["acceptance_length"] == pytest.approx(9 / 5)
    assert row["acceptance_rate_by_depth"] == pytest.approx([3 / 5, 1 / 3])
    milliseconds = {"draft": 60, "target": 240, "verify": 18, "rest": 6}
    assert row["milliseconds_per_round"] == pytest.approx(milliseconds)


def prompt_file(path, count):
    path.parent.mkdir(exist_ok=True)
    return write_prompts(path, [f"say {i} {'again ' * i}" for i in range(count)])


@pytest.fixture
def bench_config(target_folder, head_folder, tmp_path):
    return BenchConfig(
        target=str(target_folder),
        head=str(head_folder),
        prompts=[prompt_file(tmp_path / "chat.jsonl", 4), prompt_file(tmp_path / "code.jsonl", 1)],
        limit=3,
        max_new_tokens=9,
        dtype="float32",
        adaptive=False,
        output=str(tmp_path / "deep" / "report.json"),
    )


def test_the_report_has_the_figures_of_each_file_and_of_a_rounds_parts(bench_config, capsys):
    report = benchmark(changed(bench_config, profile=True))
    rows = [*(report["files"][path] for path in bench_config.prompts), report["total"]]
    assert [row["prompts"] for row in rows] == [3, 1, 4]
    assert all(row["identical"] == row["prompts"] for row in rows)  # greedy, in float32
    assert all(1 <= row["acceptance_length"] <= 4 for row in rows)
    assert all(row["coverage"] is None for row in rows)
    profile = report["profile"]
    assert profile["milliseconds"].keys() == set(PARTS)
    assert profile["nodes"] == report["nodes"]
    milliseconds = report["total"]["milliseconds_per_round"]
    assert profile["round"] == pytest.approx(sum(milliseconds.values()))
    assert profile["floors"]["bytes"] > 0
    assert profile["of_the_round"]["forward"] > 0
    shown = capsys.readouterr().out
    assert not lacking(shown, "chat code total 4/4")
    assert not {"outside", "million"} & set(shown.split())


def test_what_the_draft_vocabulary_lacks_is_counted_and_named(
    bench_config, target_folder, tmp_path, capsys
):
    target = Target.from_pretrained(target_folder, torch.float32)
    head = saved_head(tmp_path / "small", target, num_heads=3, draft_vocab_size=90)
    drafted = set(head.token_map.tolist())
    tokenizer = load_tokenizer(target_folder)
    report = benchmark(changed(bench_config, head=str(tmp_path / "small")))
    shown = capsys.readouterr().out
    for path in bench_config.prompts:
        tokens = []
        for messages in read_prompts(path, bench_config.limit):
            ids = prompt_ids(tokenizer, messages)[0]
            tokens += written_alone(target.model, ids, max_new_tokens=9)
        share = sum(token in drafted for token in tokens) / len(tokens)
        assert 0 < share < 0.95
        assert report["files"][path]["coverage"] == share
        assert not lacking(shown, Path(path).stem, f"{1 - share:.1%}", "draft vocabulary")


def test_the_report_is_written_as_json_that_every_reader_takes_and_prints_alike(
    bench_config, capsys
):
    # of two tokens one round drafts nothing, and has no rates
    report = benchmark(changed(bench_config, max_new_tokens=2))
    shown = capsys.readouterr().out
    with open(bench_config.output, encoding="utf-8") as file:
        written = json.load(file, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert written == report
    print_report(written)
    assert shown.endswith(capsys.readouterr().out)


def test_a_price_and_a_power_give_the_cost_of_a_million_tokens(bench_config, capsys):
    prompts = bench_config.prompts[1:]
    report = benchmark(changed(bench_config, prompts=prompts, price_per_hour=0.08, watts=30.0))
    shown = capsys.readouterr().out
    assert not lacking(shown, "million tokens price_per_hour 0.08 watts 30")
    for side in ("plain", "speculative"):
        hours = 1e6 / (3600 * report["total"]["tokens_per_second"][side])
        assert f"{0.08 * hours:.3g} {side}" in shown
        assert f"{0.03 * hours:.3g} kWh {side}" in shown


def test_sampling_is_compared_too_and_repeats_for_a_seed(bench_config):
    def rates(seed):
        # In every round the same tree: which one is fastest is the clock's choice.
        sampled = changed(bench_config, temperature=1.0, limit=1, tree="chain:2", seed=seed)
        total = benchmark(sampled)["total"]
        return total["rounds"], repr(total["acceptance_rate_by_depth"])

    first = rates(3)
    assert rates(3) == first
    assert rates(4) != first


def test_two_files_of_one_name_both_get_a_row(bench_config, tmp_path, capsys):
    one = prompt_file(tmp_path / "a" / "chat.jsonl", 1)
    two = prompt_file(tmp_path / "b" / "chat.jsonl", 2)
    report = benchmark(changed(bench_config, prompts=[one, two]))
    assert [report["files"][path]["prompts"] for path in (one, two)] == [1, 2]
    assert not lacking(capsys.readouterr().out, "1/1 2/2 3/3")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"head": "/nowhere"}, "'/nowhere'"),
        ({"tree": "bush"}, "unknown 'bush'"),
        ({"tree": "chain:9"}, "3"),
    ],
)
def test_what_cannot_be_used_is_named(bench_config, change, words):
    with refused(words):
        benchmark(changed(bench_config, **change))


@pytest.fixture
def interrupted_at(monkeypatch):
    """Ctrl-C comes when stock `generate` answers a prompt, after once to be warm."""

    def interrupt(prompt):
        stock = GenerationMixin.generate
        calls: list[object] = []

        def generate(*arguments, **settings):
            if "custom_generate" not in settings:
                calls.append(arguments)
            if len(calls) == prompt + 1:
                signal.raise_signal(signal.SIGINT)
            return stock(*arguments, **settings)

        monkeypatch.setattr(GenerationMixin, "generate", generate)

    return interrupt


def test_stopped_in_an_answer_what_was_measured_is_written(bench_config, interrupted_at, capsys):
    interrupted_at(4)  # the first of the second file
    benchmark(bench_config)
    report = json.loads(Path(bench_config.output).read_text())
    assert report["stopped"]
    assert report["total"]["prompts"] == 3
    assert list(report["files"]) == bench_config.prompts[:1]
    assert "vs plain" in capsys.readouterr().out


def test_stopped_in_the_first_answer_nothing_is_written(bench_config, interrupted_at):
    interrupted_at(1)
    with pytest.raises(KeyboardInterrupt):
        benchmark(bench_config)
    assert not Path(bench_config.output).exists()


def test_a_line_says_on_which_prompts_drafts_do_not_pay_and_where_to_read_on(bench_config, capsys):
    chat, code = bench_config.prompts
    report = benchmark(bench_config, show=False)
    assert "vs plain" not in capsys.readouterr().out
    report["files"][chat]["speedup_vs_plain"]["median"] = 0.97
    report["files"][code]["speedup_vs_plain"]["median"] = 1.2
    print_report(report)
    shown = " ".join(capsys.readouterr().out.split())
    (told,) = re.findall(r"drafts do not pay on ([^;]*)", shown)
    assert not lacking(told, "chat 0.97")
    assert "code" not in told
    page = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    (title,) = re.findall(r'docs/troubleshooting.md, "(.*?)"', shown)
    assert f"## {title}\n" in page
    report["files"][chat]["speedup_vs_plain"]["median"] = 1.0
    print_report(report)
    assert "do not pay" not in capsys.readouterr().out
