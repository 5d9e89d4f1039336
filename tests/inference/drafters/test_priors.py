"""First guesses of adaptive drafting from recorded answers: by kind and length of the prompt, or not at all."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headstart.heads import build_head
from headstart.inference import SpeculativeLM, Target
from headstart.inference.drafters.priors import PRIOR_STEPS, RecordedAcceptance, TextClass
from headstart.inference.feature_cache import MANIFEST, cache_manifest
from headstart.inference.recorded_folder import AnswerMarks, RecordedFolder
from headstart.inference.recording import Recording
from headstart.inference.tuning.tree_search import default_length
from headstart.inference.tuning.tree_spec import DynamicShape

VOCAB = 20
WIDTH = 16
TREES = [(2, 1.5), (8, 2.0)]
"""Nodes of trees, and their lengths for a head that was not measured."""


@pytest.fixture
def record(tmp_path: Path) -> Callable[..., Path]:
    """Writes recorded answers to a folder."""

    def write(
        rounds: dict[str, list[int]],
        kind: str = "",
        prompt: int = 100,
        temperature: float = 0.0,
        lossy: bool = False,
        number: int = 1,
    ) -> Path:
        folder = tmp_path / "recorded"
        manifest = cache_manifest({"tokenizer": "t"}, [-1], WIDTH, "bfloat16")
        writer = RecordedFolder(folder, manifest, 2**30)
        marks = AnswerMarks(kind, temperature, lossy, "complete", False, "t", rounds)
        for answer in range(number):
            tokens = [answer % VOCAB] * (prompt + 3)
            writer.write(tokens, prompt, torch.zeros(prompt + 3, 1, WIDTH), marks)
        return folder

    return write


def lengths(folder: Path, kind: str = "", prompt: int = 100, sampling: bool = False) -> list[float]:
    found = RecordedAcceptance.read(folder, WIDTH).expected(sampling, TextClass.of(kind, prompt), TREES)
    assert found is not None
    return [expected.length for expected in found]


def test_many_rounds_tell_what_a_tree_is_worth(record: Callable[..., Path]) -> None:
    folder = record({"2": [500, 900], "8": [500, 1700], "1": [300, 300]})
    chain, tree = lengths(folder)
    assert chain == pytest.approx(1.8, abs=0.03)
    # Trees of eight nodes and any depth are expected to be a little longer than these.
    usual = default_length(DynamicShape(8, 7))
    assert tree == pytest.approx(1 + 2.4 / (usual - 1), abs=0.05)


def test_few_rounds_tell_little(record: Callable[..., Path]) -> None:
    folder = record({"2": [1, 1]})
    chain, _ = lengths(folder)
    assert 1.3 < chain < 1.5
    (expected, _) = RecordedAcceptance.read(folder, WIDTH).expected(False, TextClass.of("", 100), TREES) or []
    assert expected.steps == PRIOR_STEPS + 1


def test_a_size_that_never_drafted_is_judged_by_the_others(record: Callable[..., Path]) -> None:
    """Half of what was expected of one is half of what is expected of another."""
    folder = record({"2": [1000, 1250]})
    _, tree = lengths(folder)
    assert tree == pytest.approx(1.5, abs=0.02)


def test_kinds_and_lengths_are_told_apart(record: Callable[..., Path]) -> None:
    record({"2": [400, 780]}, kind="code", prompt=100)
    record({"2": [400, 440]}, kind="code", prompt=2000)
    folder = record({"2": [400, 600]}, kind="chat", prompt=100)
    assert lengths(folder, "code", 90)[0] == pytest.approx(1.95, abs=0.03)
    assert lengths(folder, "code", 1900)[0] == pytest.approx(1.1, abs=0.03)
    assert lengths(folder, "chat", 90)[0] == pytest.approx(1.5, abs=0.03)
    # A length that was never recorded is judged by its kind, a kind by all.
    assert lengths(folder, "chat", 5000)[0] == pytest.approx(1.5, abs=0.03)
    assert lengths(folder, "news", 90)[0] == pytest.approx(1 + (380 + 40 + 200) / 1200, abs=0.03)


def test_sampled_and_lossy_answers_do_not_count_for_greedy_ones(record: Callable[..., Path]) -> None:
    record({"2": [400, 440]}, temperature=1.0)
    folder = record({"2": [400, 790]}, temperature=1.0, lossy=True)
    assert RecordedAcceptance.read(folder, WIDTH).expected(False, TextClass.of("", 100), TREES) is None
    assert lengths(folder, sampling=True)[0] == pytest.approx(1.1, abs=0.03)


def test_a_folder_without_answers_tells_nothing(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert RecordedAcceptance.read(empty, WIDTH).expected(False, TextClass(), TREES) is None


def test_what_is_not_a_recording_of_this_target_is_refused(record: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a folder; give one that answers were recorded in"):
        RecordedAcceptance.read(tmp_path / "nowhere", WIDTH)
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("no recording")
    with pytest.raises(ValueError, match=r"it has no manifest\.json"):
        RecordedAcceptance.read(other, WIDTH)
    folder = record({"2": [4, 6]})
    with pytest.raises(ValueError, match="states of width 16, not 32"):
        RecordedAcceptance.read(folder, 32)
    (folder / MANIFEST).write_text("{")
    with pytest.raises(ValueError, match=r"manifest\.json cannot be read"):
        RecordedAcceptance.read(folder, WIDTH)


@pytest.mark.parametrize("content", [b"", b"\x08\0\0\0\0\0\0\0{}      ", b"x" * 100])
def test_a_file_that_is_cut_or_foreign_is_named(record: Callable[..., Path], content: bytes) -> None:
    folder = record({"2": [4, 6]})
    (path,) = folder.glob("recorded-*")
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{path.name} cannot be read"):
        RecordedAcceptance.read(folder, WIDTH)


@pytest.mark.parametrize("rounds", [[1, 2], {"two": [1, 2]}, {"2": [1]}, {"2": [5, 2]}, {"2": ["1", "2"]}, None])
def test_marks_that_no_recording_writes_are_named(record: Callable[..., Path], rounds: Any) -> None:
    folder = record(rounds)
    with pytest.raises(ValueError, match="has marks that cannot be read"):
        RecordedAcceptance.read(folder, WIDTH)


def test_a_file_that_is_removed_meanwhile_is_left_out(
    record: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = record({"2": [400, 780]}, number=2)
    files = sorted(folder.glob("recorded-*"))
    monkeypatch.setattr("headstart.inference.drafters.priors.recorded_files", lambda _: files)
    files[0].unlink()
    assert lengths(folder)[0] == pytest.approx(1.95, abs=0.03)


def test_thousands_of_answers_are_read_in_a_second(record: Callable[..., Path]) -> None:
    folder = record({"2": [30, 50], "8": [10, 25]}, prompt=500)
    (path,) = folder.glob("recorded-*")
    content = path.read_bytes()
    for number in range(1999):
        (folder / f"recorded-{number:020d}-00000000-{number:08x}.safetensors").write_bytes(content)
    began = time.thread_time()
    assert lengths(folder, prompt=500)[0] == pytest.approx(1.67, abs=0.03)
    assert time.thread_time() - began < 2.0


# From a recording to the first choice.


@pytest.fixture
def target(tiny_target: Any) -> Target:
    return tiny_target(vocab_size=VOCAB)


def a_head(target: Target) -> Any:
    torch.manual_seed(0)
    head = build_head("medusa", {"num_heads": 3}, target.info).double()
    head.initialize(target.modules, torch.ones(VOCAB, dtype=torch.int64))
    return head


def test_a_recording_decides_the_first_round_of_the_next_process(target: Target, tmp_path: Path) -> None:
    """A head whose drafts were accepted in texts of one kind and never in those of another."""
    folder = tmp_path / "recorded"
    folder.mkdir()
    head = a_head(target)
    options: dict[str, Any] = {"tree": "chain:1", "priors": folder}
    lm = SpeculativeLM.from_pretrained(target, head, **options)  # nothing is recorded yet
    prompt = torch.tensor([[1, 2, 3, 4]])
    settings: dict[str, Any] = {
        "attention_mask": torch.ones_like(prompt),
        "max_new_tokens": 12,
        "do_sample": False,
        "eos_token_id": [],
        "pad_token_id": 0,
    }
    manifest = cache_manifest({"tokenizer": "t"}, [-1], target.info.hidden_size, "bfloat16")
    writer = RecordedFolder(folder, manifest, 2**30)
    marks = AnswerMarks("", 0.0, False, "complete", False, "t", {})
    for kind, counts in (("good", [500, 990]), ("bad", [500, 505])):
        of_kind = dataclasses.replace(marks, kind=kind, rounds={"2": counts})
        writer.write([1, 2, 3, 4, 5], 4, torch.zeros(5, 1, target.info.hidden_size), of_kind)
    plain = {}
    for kind in ("good", "bad"):
        lm = SpeculativeLM.from_pretrained(target, head, **options)
        stats = lm.generate(prompt, kind=kind, **settings).stats
        plain[kind] = stats.rows[0][0].drafted == 0
    assert plain == {"good": False, "bad": True}


def test_priors_without_a_choice_are_refused(target: Target, tmp_path: Path) -> None:
    for options in ({}, {"head": a_head(target), "fallback": False}):
        with pytest.raises(ValueError, match="there is nothing to choose from"):
            SpeculativeLM.from_pretrained(target, priors=tmp_path, **options)
    with pytest.raises(ValueError, match="is not a folder"):
        SpeculativeLM.from_pretrained(target, a_head(target), priors=tmp_path / "nowhere")


def test_what_recording_writes_is_what_priors_read(target: Target, tmp_path: Path) -> None:
    """A generation with a head that is recorded, its rounds and its prompt's length."""
    folder = tmp_path / "recorded"
    lm = SpeculativeLM.from_pretrained(target, a_head(target), tree="chain:2", fallback=False)
    manifest = cache_manifest({"tokenizer": "t"}, [-1], target.info.hidden_size, "bfloat16")
    written = Recording(lm.target, RecordedFolder(folder, manifest, 2**30), "chat", 1024, lm.recordings)
    prompt = torch.tensor([[1, 2, 3, 4, 5]])
    with written:
        stats = lm.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=9, do_sample=False, pad_token_id=0
        ).stats
    found = RecordedAcceptance.read(folder, target.info.hidden_size).by_class
    ((sampled, text), counts) = next(iter(found.items()))
    assert (sampled, text) == (False, TextClass.of("chat", 5))
    assert counts.rounds == {3: stats.rounds}
    assert counts.tokens == {3: sum(record.returned for record in stats.rows[0])}
    assert json.loads((folder / MANIFEST).read_text())["hidden_size"] == target.info.hidden_size
