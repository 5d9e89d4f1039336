"""A head beside its published acceptance lengths: whose they are, and what counts as lower."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import saved_head
from messages import lacking, refused
from runs import changed, write_prompts

from headstart.heads import CheckpointMetadata
from headstart.inference import Target
from headstart.scripts.bench import BenchConfig, benchmark
from headstart.scripts.measuring.published import PUBLISHED, Published, compared, published_figures

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def save_imported(target_folder, folder, source):
    """A head that says from where it was imported."""
    target = Target.from_pretrained(target_folder)
    training = {"imported": {"from": source}}
    metadata = CheckpointMetadata(training=training, provenance=dict(target.provenance))
    saved_head(folder, target, metadata=metadata, num_heads=3)
    return folder


@pytest.fixture
def published_config(target_folder, tmp_path):
    """A head `org/Tiny`, imported from the Hub, and three files of prompts."""
    texts = [f"say {i} {'again ' * i}" for i in range(3)]
    names = ("gsm8k.jsonl", "MT-bench.jsonl", "other.jsonl")
    return BenchConfig(
        target=str(target_folder),
        head=str(save_imported(target_folder, tmp_path / "mine", "org/Tiny")),
        prompts=[write_prompts(tmp_path / name, texts) for name in names],
        max_new_tokens=9,
        dtype="float32",
        published=True,
    )


def test_a_head_is_decoded_in_the_published_chain_and_set_beside_its_figures(
    published_config, monkeypatch, capsys
):
    """Neither plain steps nor a history take part, and the causes have this head's values."""
    figures = Published(2, {"gsm8k": 9.9, "mtbench": 1.0}, "one stream", "a page")
    monkeypatch.setitem(PUBLISHED, "org/Tiny", figures)
    report = benchmark(published_config)
    assert report["nodes"] == 3  # the root and a chain of two
    assert report["total"]["plain_rounds"] == 0
    found = report["published"]
    assert [row["published"] for row in found["files"].values()] == [9.9, 1.0, None]
    assert [row["lower"] for row in found["files"].values()] == [True, False, False]
    for path, row in found["files"].items():
        assert row["acceptance_length"] == report["files"][path]["acceptance_length"]
    _, layers, dtype = found["causes"]
    assert not lacking(layers, "blocks -1")
    assert dtype.count("float32") == 2  # trained against it, and run in it
    assert not lacking(capsys.readouterr().out, "a page 9.90 chat template")


def test_lower_is_what_the_whole_interval_is_below():
    files = {
        "gsm8k.jsonl": {"acceptance_length": 2.0, "interval": [1.8, 2.2]},
        "humaneval.jsonl": {"acceptance_length": 2.0, "interval": [1.8, 2.2]},
    }
    figures = Published(3, {"gsm8k": 2.1, "humaneval": 2.3}, "", "")
    rows = compared(figures, files, [])["files"]
    assert not rows["gsm8k.jsonl"]["lower"]
    assert rows["humaneval.jsonl"]["lower"]


def test_figures_are_found_by_the_hub_id_or_by_the_folder(target_folder, tmp_path, monkeypatch):
    figures = Published(2, {"gsm8k": 2.0}, "", "")
    monkeypatch.setitem(PUBLISHED, "org/Tiny", figures)
    by_folder = save_imported(target_folder, tmp_path / "Tiny", None)
    by_origin = save_imported(target_folder, tmp_path / "elsewhere", "org/Tiny")
    monkeypatch.chdir(by_folder)
    for head in (by_folder, by_origin, "."):
        assert published_figures(str(head)) is figures
    unknown = save_imported(target_folder, tmp_path / "new", ["?"])
    with refused("new", "smollm2-135m-eagle3"):
        published_figures(str(unknown))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tree": "chain:3"}, "--tree chain:3 chain 2"),
        ({"temperature": 1.0}, "--temperature 1.0"),
        ({"drafter": "history"}, "--drafter history"),
        ({"head": None, "drafter": "history"}, "--published --head"),
        ({"prompts": ["other.jsonl"]}, "other.jsonl gsm8k.jsonl"),
    ],
)
def test_what_contradicts_the_figures_is_refused_before_anything_is_loaded(
    published_config, monkeypatch, changes, words
):
    monkeypatch.setitem(PUBLISHED, "org/Tiny", Published(2, {"gsm8k": 2.0}, "", ""))
    with refused(words):
        benchmark(changed(published_config, target="/no/model", **changes))


def test_the_shipped_heads_figures_are_those_of_its_page():
    shipped = PUBLISHED["smollm2-135m-eagle3"]
    page = (BENCHMARKS / "heads.md").read_text(encoding="utf-8")
    for title, name in (("GSM8K", "gsm8k"), ("HumanEval", "humaneval"), ("MT-bench", "mtbench")):
        section = page.split(f"### {title}, greedy\n")[1].split("\n### ")[0]
        assert f"| eagle3-shipped: chain | {shipped.lengths[name]:.2f} (" in section
