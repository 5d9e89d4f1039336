"""Combinations of placement, features, start, engine and rows on two processes, by
benchmarks/combinations.py.

The program launches the processes itself, gives every run a time limit, and compares its losses
with one process.
"""

from __future__ import annotations

import importlib.util
import itertools
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "combinations.py"


def tried(*arguments):
    """The rows of the program's table, and its exit status."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *arguments], capture_output=True, text=True, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    assert lines, done.stderr[-3000:]
    head, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return [dict(zip(head, row, strict=True)) for row in rows], done.returncode


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_two_processes_have_the_losses_of_one_where_only_some_need_the_target(engine):
    rows, status = tried("--engine", engine, "--runs", "2", "--seconds", "40")
    assert [row["losses"] for row in rows] == ["equal", "equal"] and status == 0, rows
    assert (rows[0]["placement"], rows[0]["features"], rows[0]["start"]) == (
        "shard",
        "auto",
        "last",
    )


def test_any_two_values_meet_in_a_run(monkeypatch):
    monkeypatch.syspath_prepend(str(PROGRAM.parent))
    spec = importlib.util.spec_from_file_location("combinations", PROGRAM)
    program = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = program  # its dataclasses look themselves up there
    spec.loader.exec_module(program)
    chosen = program.pairwise(program.AXES)
    assert len(chosen) < 24
    for (one, values), (other, more) in itertools.combinations(program.AXES.items(), 2):
        met = {(combination[one], combination[other]) for combination in chosen}
        assert met == set(itertools.product(values, more))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="DeepSpeed compiles its exchange for CPUs")
def test_all_pairs_of_values_give_the_losses_of_one_process():
    rows, status = tried()
    assert {row["losses"] for row in rows} == {"equal"} and status == 0, rows


@pytest.mark.slow
def test_a_rank_that_does_not_ask_for_the_target_is_seen_with_the_places_where_the_others_wait():
    (row,), status = tried("--engine", "fsdp2", "--runs", "1", "--plant", "hang", "--seconds", "20")
    assert (
        status == 1
        and "in any_process" in row["losses"]
        and "rank 1 stands at train/" in row["losses"]
    ), row


@pytest.mark.slow
def test_a_block_that_runs_before_its_model_is_seen():
    (row,), status = tried("--engine", "ddp", "--runs", "1", "--plant", "crash", "--seconds", "40")
    assert status == 1 and "FSDP state has already been lazily initialized" in row["losses"], row
