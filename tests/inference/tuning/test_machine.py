"""What was measured is kept; whatever is wrong with the place where it is kept, it is measured anew
and no error."""

from __future__ import annotations

import json
import os
import platform
import warnings
from pathlib import Path

import pytest
import torch
from helpers import warnings_of

from headstart.files import cache_folder
from headstart.inference import SpeculativeLM
from headstart.inference.tuning import machine
from headstart.inference.tuning.machine import (
    measured_once,
    positive,
    seconds_in_turns,
)

CPU = torch.device("cpu")


def name_of(device):
    """Name of a machine in the file."""
    return f"{machine.hardware(device)}, torch {torch.__version__}, format {machine.FORMAT}"


def later(monkeypatch):
    """Another process on the same machine."""
    monkeypatch.setattr(machine, "in_memory", {})


def asked(value=2.5, name="speed"):
    """The answer, and whether it had to be measured."""
    calls = []
    found = measured_once(CPU, name, lambda: calls.append(1) or value, positive)
    return found, bool(calls)


def test_what_was_measured_is_kept_for_this_process_and_the_next(nothing_measured, monkeypatch):
    assert asked(2.5) == (2.5, True)
    assert asked(7.0) == (2.5, False)
    later(monkeypatch)
    assert asked(7.0) == (2.5, False)
    assert asked(7.0, "another") == (7.0, True)
    later(monkeypatch)
    assert asked(0.5) == (2.5, False)  # still there beside the other


@pytest.mark.parametrize(
    ("device", "wall", "own", "kept"),
    [
        ("cpu", 1.0, 0.95, True),
        ("cpu", 1.0, 0.5, False),
        ("cpu", 0.15, 0.01, False),
        ("cpu", 0.1, 0.01, True),  # too short to tell
        ("cpu", 9.0, 8.2, True),
        ("cpu", 9.0, 8.0, False),
        ("cuda", 1.0, 0.1, True),  # the processor waits for the device
    ],
)
def test_what_a_busy_machine_measured_is_not_kept_for_the_next_process(
    nothing_measured, monkeypatch, device, wall, own, kept
):
    monkeypatch.setattr(machine, "hardware", lambda device: "this machine")
    clocks = iter([(5.0, 2.0), (5.0 + wall, 2.0 + own)])
    monkeypatch.setattr(machine, "clocks", lambda: next(clocks))
    assert measured_once(torch.device(device), "speed", lambda: 2.5, positive) == 2.5
    # by the same process
    assert measured_once(torch.device(device), "speed", lambda: 7.0, positive) == 2.5
    later(monkeypatch)
    monkeypatch.setattr(machine, "clocks", lambda: (0.0, 0.0))
    assert measured_once(torch.device(device), "speed", lambda: 7.0, positive) == (
        2.5 if kept else 7.0
    )


def test_the_file_is_the_users_own_and_nothing_is_left_beside_it(nothing_measured):
    asked()
    assert [path.name for path in nothing_measured.iterdir()] == ["machine.json"]
    assert nothing_measured.stat().st_mode & 0o777 == 0o700
    assert (nothing_measured / "machine.json").stat().st_mode & 0o077 == 0


def test_what_another_process_wrote_meanwhile_stays(nothing_measured, monkeypatch):
    asked(1.0, "first")
    ours = machine.in_memory
    later(monkeypatch)
    asked(2.0, "second")  # by another process
    monkeypatch.setattr(machine, "in_memory", ours)
    asked(3.0, "third")
    later(monkeypatch)
    assert [asked(9.0, name) for name in ("first", "second", "third")] == [
        (1.0, False),
        (2.0, False),
        (3.0, False),
    ]


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setattr(machine, "processor", lambda: "another processor"),
        lambda patch: patch.setattr(
            torch.backends.cpu, "get_cpu_capability", lambda: "another set"
        ),
        lambda patch: patch.setattr(torch, "get_num_threads", lambda: 77),
        lambda patch: patch.setattr(machine, "usable_cores", lambda: 0),
        lambda patch: patch.setattr(torch, "__version__", "0.0"),
        lambda patch: patch.setattr(machine, "FORMAT", machine.FORMAT + 1),
    ],
    ids=["processor", "instruction set", "threads", "cores", "torch", "format"],
)
def test_another_machine_measures_for_itself(nothing_measured, monkeypatch, change):
    asked(2.5)
    with monkeypatch.context() as patch:
        change(patch)
        assert asked(7.0) == (7.0, True)
    later(monkeypatch)
    assert asked(9.0) == (2.5, False)


def test_a_file_that_was_cut_anywhere_is_measured_anew(nothing_measured, monkeypatch):
    """As a full disk leaves it."""
    asked(2.5)
    path = nothing_measured / "machine.json"
    whole = path.read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for length in range(len(whole)):
            path.write_bytes(whole[:length])
            later(monkeypatch)
            assert asked(7.0) == (7.0, True), length
            later(monkeypatch)
            assert asked(9.0) == (7.0, False)  # and the file is whole again


BROKEN = ["fast", 0, -1.5, None, [], {}, float("nan"), float("inf"), 10**400]


@pytest.mark.parametrize(
    "text",
    [
        *(b"[]", b"3", b"null", b"\xff\xfe\x00", b'{"KEY": 3}', b'{"KEY": []}', b'{"KEY": null}'),
        *(json.dumps({"KEY": {"speed": value}}).encode() for value in BROKEN),
    ],
)
def test_a_file_that_holds_something_else_is_measured_anew(nothing_measured, monkeypatch, text):
    nothing_measured.mkdir()
    (nothing_measured / "machine.json").write_bytes(text.replace(b"KEY", name_of(CPU).encode()))
    assert asked() == (2.5, True)
    later(monkeypatch)
    assert asked(7.0) == (2.5, False)


def test_a_named_pipe_is_not_waited_for(nothing_measured):
    nothing_measured.mkdir()
    os.mkfifo(nothing_measured / "machine.json")
    assert asked() == (2.5, True)


def refuse(*_, **__):
    raise OSError(30, "Read-only file system")


def no_home():
    raise RuntimeError("Could not determine home directory.")


@pytest.mark.parametrize(
    "broken", ["read-only", "a file in its place", "a folder in its place", "no home"]
)
def test_where_nothing_can_be_kept_one_warning_says_so(nothing_measured, monkeypatch, broken):
    if broken == "read-only":
        monkeypatch.setattr(machine, "write_whole", refuse)
    elif broken == "a file in its place":
        nothing_measured.write_text("")
    elif broken == "a folder in its place":
        (nothing_measured / "machine.json").mkdir(parents=True)
    else:
        for name in ("HEADSTART_CACHE", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(machine.Path, "home", no_home)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert asked(2.5) == (2.5, True)
        assert asked(7.0) == (2.5, False)  # known as long as the process lives
        assert asked(7.0, "another") == (7.0, True)
    assert [str(each.message)[:53] for each in told] == [
        "what was measured of this machine cannot be kept, and"
    ]
    if broken == "a folder in its place":
        assert [path.name for path in nothing_measured.iterdir()] == ["machine.json"]


def test_where_the_folder_is(monkeypatch):
    monkeypatch.setenv("HEADSTART_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    monkeypatch.setenv("HOME", "/c")
    assert cache_folder() == Path("/a")
    monkeypatch.delenv("HEADSTART_CACHE")
    assert cache_folder() == Path("/b/headstart")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path("/c/.cache/headstart")


def test_more_threads_than_cores_are_told_once(nothing_measured, monkeypatch, tiny_target):
    target = tiny_target()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(machine, "usable_cores", lambda: 4)
    assert warnings_of(lambda: SpeculativeLM.from_pretrained(target)) == []
    monkeypatch.setattr(machine, "usable_cores", lambda: 1)
    (told,) = warnings_of(lambda: [SpeculativeLM.from_pretrained(target) for _ in range(2)])
    assert (
        "torch uses 4 threads and this process may run on 1 core" in told
        and "torch.set_num_threads(1)" in told
    )


@pytest.mark.parametrize(("limit", "calls"), [(100.0, 4), (3.25, 2), (0.5, 1)])
def test_timed_calls_take_turns_and_end_with_the_time(monkeypatch, limit, calls):
    clock, order = [0.0], []

    def side(name, seconds):
        def call():
            order.append(name)
            clock[0] += seconds[min(order.count(name), len(seconds)) - 1]

        return call

    monkeypatch.setattr(machine.time, "perf_counter", lambda: clock[0])
    taken = seconds_in_turns({"a": side("a", [1.0, 0.25]), "b": side("b", [1.5, 0.75])}, 3, limit)
    assert order == ["a", "b", "b", "a", "a", "b", "b", "a"][: 2 * calls]
    first_alone = calls == 1  # it took all the time that there was, so it counts
    assert taken == (
        {"a": [1.0], "b": [1.5]}
        if first_alone
        else {"a": [0.25] * (calls - 1), "b": [0.75] * (calls - 1)}
    )


def test_unmeasured_calls_never_count(monkeypatch):
    """Nor does the limit begin before them."""
    clock, seconds = [0.0], iter([60.0, 60.0, 0.5, 0.25])
    monkeypatch.setattr(machine.time, "perf_counter", lambda: clock[0])

    def call():
        clock[0] += next(seconds)

    assert seconds_in_turns({"a": call}, 1, limit=1.0, unmeasured=2) == {"a": [0.25]}


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        # two generations that a virtual machine calls alike; the second processor's lines are not
        # read
        (
            ["cpu family : 25", "model : 17", "model name : AMD EPYC", "", "model : 9"],
            "AMD EPYC (family 25, model 17)",
        ),
        (
            ["cpu family : 26", "model : 2", "model name : AMD EPYC"],
            "AMD EPYC (family 26, model 2)",
        ),
        (["model name : IBM/S390"], "IBM/S390"),
        (["CPU implementer : 0x41"], platform.processor() or platform.machine()),  # ARM
    ],
)
def test_processors_of_one_name_are_told_apart(monkeypatch, tmp_path, lines, name):
    told = tmp_path / "cpuinfo"
    told.write_text("\n".join(lines))
    monkeypatch.setattr(machine, "Path", lambda _: told)
    monkeypatch.setattr(machine, "cpuinfo", machine.cpuinfo.__wrapped__)  # not what was read before
    assert machine.processor() == name
