"""What was measured is kept; whatever is wrong with the place where it is kept, it is measured anew
and no error."""

from __future__ import annotations

import json
import os
import platform
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import warnings_of
from messages import lacking, warned

from headstart.files import cache_folder
from headstart.inference import SpeculativeLM
from headstart.inference.tuning import machine
from headstart.inference.tuning.machine import measured_once, positive, seconds_in_turns

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("nothing_measured")


def measured(value=2.5, name="speed", device=CPU):
    """The measurement, and whether it had to be measured."""
    calls = []
    found = measured_once(device, name, lambda: calls.append(1) or value, positive)
    return found, bool(calls)


def test_what_was_measured_is_kept_for_this_process_and_the_next():
    assert measured(2.5) == (2.5, True)
    assert measured(7.0) == (2.5, False)
    machine.in_memory.clear()
    assert measured(7.0) == (2.5, False)


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
    monkeypatch, device, wall, own, kept
):
    monkeypatch.setattr(machine, "hardware", lambda device: "this machine")
    clocks = iter([(5.0, 2.0), (5.0 + wall, 2.0 + own)])
    monkeypatch.setattr(machine, "clocks", lambda: next(clocks))
    device = torch.device(device)
    assert measured(2.5, device=device) == (2.5, True)
    assert measured(7.0, device=device) == (2.5, False)  # by the same process
    machine.in_memory.clear()
    monkeypatch.setattr(machine, "clocks", lambda: (0.0, 0.0))
    assert measured(7.0, device=device) == ((2.5, False) if kept else (7.0, True))


def test_the_file_is_the_users_own_and_nothing_is_left_beside_it(nothing_measured):
    measured()
    assert [path.name for path in nothing_measured.iterdir()] == ["machine.json"]
    assert nothing_measured.stat().st_mode & 0o777 == 0o700
    assert (nothing_measured / "machine.json").stat().st_mode & 0o077 == 0


def test_what_another_process_wrote_meanwhile_stays(monkeypatch):
    measured(1.0, "first")
    with monkeypatch.context() as another_process:
        another_process.setattr(machine, "in_memory", {})
        measured(2.0, "second")
    measured(3.0, "third")
    machine.in_memory.clear()
    for name, value in (("first", 1.0), ("second", 2.0), ("third", 3.0)):
        assert measured(9.0, name) == (value, False)


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
def test_another_machine_measures_for_itself(monkeypatch, change):
    measured(2.5)
    with monkeypatch.context() as patch:
        change(patch)
        assert measured(7.0) == (7.0, True)
    machine.in_memory.clear()
    assert measured(9.0) == (2.5, False)


BROKEN = ["fast", 0, -1.5, None, [], {}, float("nan"), float("inf"), 10**400]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "text",
    [
        *(b"", b'{"KEY": {"spe', b'{"KEY": {"speed": 2.5}'),  # as a full disk leaves it
        *(b"[]", b"3", b"null", b"\xff\xfe\x00", b'{"KEY": 3}', b'{"KEY": []}', b'{"KEY": null}'),
        *(json.dumps({"KEY": {"speed": value}}).encode() for value in BROKEN),
    ],
)
def test_a_file_that_holds_something_else_is_measured_anew(nothing_measured, text):
    measured(1.0)
    machine.in_memory.clear()
    path = nothing_measured / "machine.json"
    (key,) = json.loads(path.read_text())
    path.write_bytes(text.replace(b"KEY", key.encode()))
    assert measured() == (2.5, True)
    machine.in_memory.clear()
    assert measured(7.0) == (2.5, False)


def test_a_named_pipe_is_not_waited_for(nothing_measured):
    nothing_measured.mkdir()
    os.mkfifo(nothing_measured / "machine.json")
    assert measured() == (2.5, True)


def no_home():
    raise RuntimeError("Could not determine home directory.")


@pytest.mark.parametrize("broken", ["a file in its place", "a folder in its place", "no home"])
def test_where_nothing_can_be_kept_one_warning_says_so(nothing_measured, monkeypatch, broken):
    file = nothing_measured / "machine.json"
    if broken == "a file in its place":
        nothing_measured.write_text("")
    elif broken == "a folder in its place":
        file.mkdir(parents=True)
    else:
        for name in ("HEADSTART_CACHE", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(Path, "home", no_home)
    with warned("machine") as told:
        assert measured(2.5) == (2.5, True)
        assert measured(7.0) == (2.5, False)  # known as long as the process lives
        assert measured(7.0, "another") == (7.0, True)
    assert len(told) == 1
    if broken == "a folder in its place":
        assert list(nothing_measured.iterdir()) == [file]


def test_where_the_folder_is(monkeypatch):
    monkeypatch.setenv("HEADSTART_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    monkeypatch.setenv("HOME", "/c")
    assert cache_folder() == Path("/a")
    monkeypatch.delenv("HEADSTART_CACHE")
    assert cache_folder() == Path("/b/headstart")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path("/c/.cache/headstart")


def test_more_threads_than_cores_are_told_once(monkeypatch, tiny_target):
    target = tiny_target()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(machine, "usable_cores", lambda: 4)
    assert warnings_of(lambda: SpeculativeLM.from_pretrained(target)) == []
    monkeypatch.setattr(machine, "usable_cores", lambda: 1)
    (told,) = warnings_of(lambda: [SpeculativeLM.from_pretrained(target) for _ in range(2)])
    assert not lacking(told, "4 threads 1 core torch.set_num_threads(1)")


@pytest.mark.parametrize(
    ("limit", "taken"),
    [
        (100.0, {"a": [0.25] * 3, "b": [0.75] * 3}),
        (3.25, {"a": [0.25], "b": [0.75]}),
        (0.5, {"a": [1.0], "b": [1.5]}),  # the first took all the time, so it counts
    ],
)
def test_timed_calls_take_turns_and_end_with_the_time(moved_clock, limit, taken):
    order = []

    def call(name, first, later):
        moved_clock[0] += later if name in order else first
        order.append(name)

    calls = {"a": partial(call, "a", 1.0, 0.25), "b": partial(call, "b", 1.5, 0.75)}
    assert seconds_in_turns(calls, 3, limit) == taken
    rounds = 1 if limit == 0.5 else 1 + len(taken["a"])
    assert order == ["a", "b", "b", "a", "a", "b", "b", "a"][: 2 * rounds]


def test_unmeasured_calls_never_count(moved_clock):
    """Nor does the limit begin before them."""
    seconds = iter([60.0, 60.0, 0.5, 0.25])

    def call():
        moved_clock[0] += next(seconds)

    assert seconds_in_turns({"a": call}, 1, limit=1.0, unmeasured=2) == {"a": [0.25]}


@pytest.mark.parametrize(
    ("text", "name"),
    [
        # two generations that a virtual machine calls alike; the second processor's lines are not
        # read
        (
            "cpu family : 25\nmodel : 17\nmodel name : AMD EPYC\n\nmodel : 9",
            "AMD EPYC (family 25, model 17)",
        ),
        ("cpu family : 26\nmodel : 2\nmodel name : AMD EPYC", "AMD EPYC (family 26, model 2)"),
        ("model name : IBM/S390", "IBM/S390"),
        ("CPU implementer : 0x41", platform.processor() or platform.machine()),  # ARM
    ],
)
def test_processors_of_one_name_are_told_apart(monkeypatch, tmp_path, text, name):
    told = tmp_path / "cpuinfo"
    told.write_text(text)
    monkeypatch.setattr(machine, "Path", lambda _: told)
    monkeypatch.setattr(machine, "cpuinfo", machine.cpuinfo.__wrapped__)  # not what was read before
    assert machine.processor() == name
