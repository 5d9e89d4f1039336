"""How far a reader has to go: the functions of heads and inference that a decoding round, and loading a head, enter.

    python -m pytest -s tests/integration/test_functions_entered.py

prints them by file.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from headstart.heads import CheckpointMetadata, build_head
from headstart.heads.checkpoints.save_load import save_head
from headstart.inference import SpeculativeLM, Target
from headstart.inference.drafters.by_name import load_fitting_head

ROOT = Path(__file__).parents[2]
PACKAGES = {str(ROOT / package): package for package in ("heads", "inference")}


def ours(frame: FrameType) -> str | None:
    """The function that a frame runs as file:name, if it is one of heads or inference; no comprehension counts."""
    path = Path(frame.f_code.co_filename).resolve()
    name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)
    if name.endswith(">") or not any(path.is_relative_to(folder) for folder in PACKAGES):
        return None
    return f"{path.relative_to(ROOT)}:{name}"


@contextmanager
def entered(on_return: Callable[[str], None] = lambda name: None) -> Iterator[set[str]]:
    """Collect the functions that are entered; `on_return` hears of each that returns, before it leaves the set."""
    found: set[str] = set()

    def hook(frame: FrameType, event: str, argument: Any) -> None:
        if event in ("call", "return") and (name := ours(frame)):
            if event == "call":
                found.add(name)
            else:
                on_return(name)

    before = sys.getprofile()
    sys.setprofile(hook)
    try:
        yield found
    finally:
        sys.setprofile(before)


def told(title: str, names: set[str]) -> tuple[int, int]:
    """Print names by file, and return how many functions and files there are."""
    files = Counter(name.partition(":")[0] for name in names)
    print(f"\n{title}: {len(names)} functions in {len(files)} files")
    for file in sorted(files):
        print(
            f"  {file}: " + ", ".join(sorted(name.partition(":")[2] for name in names if name.startswith(file + ":")))
        )
    return len(names), len(files)


@pytest.fixture(scope="module")
def saved(target_folder, tmp_path_factory) -> Path:
    """An EAGLE-3 head for the tiny target, on disk."""
    folder = tmp_path_factory.mktemp("entered") / "head"
    target = SpeculativeLM.from_pretrained(target_folder, dtype="float32", compile=False).target
    torch.manual_seed(0)
    save_head(build_head("eagle3", {"feature_layers": [0]}, target.info), folder, CheckpointMetadata())
    return folder


def test_a_round_enters_few_functions(saved, target_folder, capsys):
    """EAGLE-3, a dynamic tree, greedy, not compiled: the functions that every round enters."""
    lm = SpeculativeLM.from_pretrained(
        target_folder, head=str(saved), tree="dynamic:16:4:4", dtype="float32", compile=False, fallback=False
    )
    lm.generate(torch.arange(5, 13)[None], max_new_tokens=8)  # what is done once in a process is no part of a round
    rounds: list[set[str]] = []

    def cut(name: str) -> None:
        if name.endswith(":DynamicTree.propose") or name.endswith(":HeadDrafter.propose"):
            rounds.append(names | {name})
            names.clear()

    with entered(cut) as names:
        lm.generate(torch.arange(5, 13)[None], max_new_tokens=24)
    every = set.intersection(*rounds[2:-1])
    with capsys.disabled():
        functions, files = told("every round", every)
    assert len(rounds) > 4
    assert functions <= 45 and files <= 12


def test_loading_a_head_enters_few_functions(saved, target_folder, capsys):
    """From a folder to a head that fits a target, whose own fingerprint is known."""
    target = Target.from_pretrained(target_folder, dtype="float32")
    assert target.provenance
    with entered() as names:
        load_fitting_head(saved, target, revision=None)
    with capsys.disabled():
        functions, files = told("loading a head", names)
    assert functions <= 30 and files <= 10
