"""The adaptation of a head in the background: what its process is told, what follows from its end, and its end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from helpers import EachRound

from headstart.heads import CheckpointMetadata, build_head
from headstart.heads.checkpoints.save_load import load_head, save_head
from headstart.inference import SpeculativeLM, Target, background_adaptation
from headstart.inference.background_adaptation import checkpoint_of, child_environment

PROMPT = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
GREEDY = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": [], "pad_token_id": 0}
TAKEN = "import shutil; shutil.copytree({head!r}, output / 'best'); (output / 'report.md').write_text('Taken')"
NOT_TAKEN = "(output / 'report.md').write_text('# page\\n\\nNot taken: it accepts less.\\n')"
WAITING = "import time; (output / 'begun').touch(); time.sleep(600)"


@pytest.fixture(scope="module")
def target(tools):
    return Target(tools.build_model().requires_grad_(False), "some/target")


@pytest.fixture(scope="module")
def tools():
    import helpers

    return helpers


def head_of(target, kind, seed, **options):
    torch.manual_seed(seed)
    head = build_head(kind, options, target.info).to(target.dtype)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return head.eval()


@pytest.fixture
def recorded(target, tokenizer, tmp_path):
    """A folder in which one answer is recorded."""
    lm = SpeculativeLM.from_pretrained(target, head_of(target, "medusa", 0), tree="chain:2", fallback=False)
    with lm.record(tmp_path / "recorded", tokenizer=tokenizer):
        lm.generate(PROMPT, **GREEDY)
    return tmp_path / "recorded"


@pytest.fixture
def lm(target, tmp_path):
    save_head(head_of(target, "medusa", 1), tmp_path / "old", CheckpointMetadata())
    save_head(head_of(target, "medusa", 2), tmp_path / "new", CheckpointMetadata())
    return SpeculativeLM.from_pretrained(target, tmp_path / "old", tree="chain:2", fallback=False)


@pytest.fixture
def instead(monkeypatch):
    """Has the process run some code instead of the command, which is kept: `instead(code)`."""
    given = []
    popen = subprocess.Popen

    def start(code):
        def patched(command, env, **options):
            given.append((command, env))
            output = command[command.index("--output") + 1]
            begin = f"import pathlib; output = pathlib.Path({output!r}); "
            return popen([sys.executable, "-c", begin + code], env=env, **options)

        monkeypatch.setattr(background_adaptation.subprocess, "Popen", patched)
        return given

    return start


def weights_of(lm):
    return next(lm._loaded.head.parameters())


def test_a_better_head_is_taken_and_the_process_is_told_everything(lm, recorded, instead, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    given = instead(TAKEN.format(head=str(tmp_path / "new")))
    states = []
    output = tmp_path / "out"
    adaptation = lm.adapt_in_background(
        output, recorded, niceness=3, threads=2, on_change=lambda each: states.append(each.state), steps=7, replay=None
    )
    assert adaptation.wait(120) == "taken" == states[-1], adaptation
    assert states == ["taken"] and adaptation.head == output / "best" and adaptation.report.exists()
    assert torch.equal(weights_of(lm), next(load_head(tmp_path / "new")[0].parameters()))
    ((command, environment),) = given
    assert command[1:6] == ["-m", "headstart.low_priority", "3", str(os.getpid()), "headstart.scripts"]
    assert command[6:] == [
        *("adapt", "--target", "some/target", "--head", str(tmp_path / "old"), "--recorded", str(recorded)),
        *("--output", str(output), "--steps", "7", "--replay", "null"),
    ]
    assert environment["OMP_NUM_THREADS"] == environment["MKL_NUM_THREADS"] == "2"
    assert not environment.keys() & {"RANK", "ACCELERATE_MIXED_PRECISION"} and "PATH" in environment
    assert output.stat().st_mode & 0o077 == 0, "it will hold texts"
    adaptation.stop()
    assert adaptation.state == "taken" and repr(adaptation).startswith("Adaptation('")
    next_one = lm.adapt_in_background(tmp_path / "out 2", recorded)
    assert next_one.wait(120) == "taken"
    assert given[1][0][9:11] == ["--head", str(output / "best")], "it goes on from the head that was taken"


@pytest.mark.parametrize(
    ("code", "state", "reason"),
    [
        (NOT_TAKEN, "not taken", r"Not taken: it accepts less\.$"),
        (
            "import sys; print('much'); sys.exit('error: too few answers\\nof all')",
            "failed",
            "error: too few answers\nof",
        ),
        ("raise RuntimeError('out of memory')", "failed", r"(?s)Traceback.*RuntimeError: out of memory$"),
        (
            "import os; print('step 3', flush=True); os.kill(os.getpid(), 9)",
            "failed",
            "step 3\nkilled by SIGKILL; the same",
        ),
        ("print('stopped at step 3')", "stopped", "by a signal; the same call goes on"),
        ("import os; os.kill(os.getpid(), 15)", "stopped", "by a signal; the same call goes on"),
        ("(output / 'best').mkdir(); (output / 'report.md').touch()", "failed", "the new head cannot be taken: .*best"),
    ],
)
def test_the_old_head_stays_whatever_else_happens(lm, recorded, instead, tmp_path, code, state, reason):
    before = weights_of(lm)
    expected = lm.generate(PROMPT, **GREEDY)
    instead(code)
    adaptation = lm.adapt_in_background(tmp_path / "out", recorded)
    assert adaptation.wait(120) == state, adaptation
    assert re.search(reason, adaptation.reason), adaptation.reason
    assert weights_of(lm) is before
    assert lm.generate(PROMPT, **GREEDY).stats.rows == expected.stats.rows


def test_one_runs_at_a_time_and_a_stopped_one_goes_on(lm, recorded, instead, tmp_path):
    instead(WAITING)
    with (
        lm.record(recorded, tokenizer=None) if False else lm.adapt_in_background(tmp_path / "out", recorded) as running
    ):
        assert running.wait(0.01) == "running" and running.running
        with pytest.raises(ValueError, match=r"a head is being adapted in '.*out' already; wait for it, or stop it"):
            lm.adapt_in_background(tmp_path / "2", recorded)
    assert running.state == "stopped" and running.reason == "the same call goes on"
    instead(NOT_TAKEN)
    assert lm.adapt_in_background(tmp_path / "out", recorded).wait(120) == "not taken"


def test_a_process_that_does_not_stop_is_killed(lm, recorded, instead, tmp_path):
    instead("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + WAITING)
    adaptation = lm.adapt_in_background(tmp_path / "out", recorded)
    while not (tmp_path / "out" / "begun").exists():
        time.sleep(0.01)
    adaptation.stop(timeout=0.2)
    assert adaptation.wait(60) == "stopped"
    assert adaptation._process.returncode == -signal.SIGKILL


def test_a_head_that_was_swapped_in_meanwhile_stays(lm, target, recorded, instead, tmp_path):
    other = head_of(target, "medusa", 3)
    instead(TAKEN.format(head=str(tmp_path / "new")))
    with target.lock:
        adaptation = lm.adapt_in_background(tmp_path / "out", recorded)
        adaptation._ended.wait(120)
        lm.swap_head(other)
    assert adaptation.wait(60) == "not taken"
    assert adaptation.reason.startswith("another head was swapped in meanwhile")
    assert lm._loaded.head is other


def test_a_head_that_is_ready_inside_a_generation_is_taken_before_the_next(lm, recorded, instead, tmp_path):
    old = lm._loaded.head
    instead(TAKEN.format(head=str(tmp_path / "new")))
    seen = []

    def inside(sequences):
        if not seen:
            seen.append(lm.adapt_in_background(tmp_path / "out", recorded))
            seen[0]._ended.wait(120)
            seen.append(seen[0].wait(10))
            lm.generate(PROMPT, **GREEDY)
            seen.append(lm._loaded.head)

    lm.observers.append(EachRound(inside))
    lm.generate(PROMPT, **GREEDY)
    adaptation, state, drafted = seen
    assert state == "running" and drafted is old
    lm.generate(PROMPT, **GREEDY)
    assert adaptation.state == "taken" and lm._loaded.head is not old


def test_a_head_that_accepts_less_than_it_was_judged_to_gives_way(lm, recorded, instead, tmp_path):
    old = lm._loaded.head
    lm._loaded.answers.extend([{("", 0.0, "greedy", 3): (5, 15)}] * 5)
    instead(TAKEN.format(head=str(tmp_path / "new")))
    states = []
    adaptation = lm.adapt_in_background(
        tmp_path / "out", recorded, watch=3, on_change=lambda each: states.append((each.state, each.reason))
    )
    assert adaptation.wait(120) == "taken"
    for _ in range(3):
        lm.generate(PROMPT, **GREEDY)
    assert lm._loaded.head is not old
    with pytest.warns(UserWarning, match="that one drafts again") as told:
        lm.generate(PROMPT, **GREEDY)
    assert lm._loaded.head is old
    assert states[1:] == [("returned", str(told[0].message))] and adaptation.state == "returned"


def test_what_cannot_be_adapted_is_refused_before_anything_is_started(
    lm, target, recorded, tools, tmp_path, monkeypatch, tokenizer
):
    monkeypatch.setattr(background_adaptation.subprocess, "Popen", None)
    out = tmp_path / "out"

    def refused(match, decoder=lm, folder=recorded, **options):
        with pytest.raises(ValueError, match=match):
            decoder.adapt_in_background(out, folder, **options)
        assert decoder._adaptation is None and not out.exists()

    plain = SpeculativeLM.from_pretrained(target)
    refused("adapt_in_background needs a decoder with a head", plain)
    refused("no recording runs: name the folder of recorded answers", folder=None)
    refused("no recorded answers in '.*nothing'; `lm.record` writes them", folder=tmp_path / "nothing")
    refused("threads must be at least 1, and niceness from 0 to 19, not 0 and 19", threads=0)
    refused("not 1 and 20", niceness=20)
    refused("the head is the decoder's own: leave out head='another'", head="another")
    refused("unknown device 'cuda:9' for adapt_in_background; choose from cpu", device="cuda:9")
    nameless = Target(tools.build_model().requires_grad_(False))
    refused(
        "the target is a loaded LlamaForCausalLM whose folder is not known",
        SpeculativeLM.from_pretrained(nameless, head_of(nameless, "medusa", 1), tree="chain:2", fallback=False),
    )
    layers = SpeculativeLM.from_pretrained(
        target, head_of(target, "eagle3", 1, feature_layers=[0, -1]), tree="chain:2", fallback=False
    )
    refused(r"holds states with layers = \[-1\], not \[0, -1\]; adapt to a recording of this target", layers)
    weight = target.model.lm_head.weight
    kept = weight.data.clone()
    try:
        weight.data += 1
        refused(r"holds states with weights = '\w+', not '\w+'; adapt to a recording of this target, as it is now")
    finally:
        weight.data.copy_(kept)
    monkeypatch.setattr(target, "adapter", "some/adapter")
    refused("the adapter 'some/adapter' is merged into the target")
    monkeypatch.setattr(target, "adapter", None)
    with lm.record(tmp_path / "on", tokenizer=tokenizer):
        monkeypatch.setenv("HEADSTART_NO_RECORD", "1")
        refused("HEADSTART_NO_RECORD is set, and adapting a head to '.*on' would keep copies", folder=None)


def test_a_head_object_is_saved_once_and_another_one_refused(target, tmp_path):
    head = head_of(target, "medusa", 1)
    place = tmp_path / "out" / "head"
    assert checkpoint_of(head, place) == place
    written = (place / "model.safetensors").stat().st_mtime_ns
    assert checkpoint_of(head, place) == place
    assert (place / "model.safetensors").stat().st_mtime_ns == written
    saved, _ = load_head(place)
    assert all(torch.equal(own, other) for own, other in zip(head.state_dict().values(), saved.state_dict().values()))
    with pytest.raises(ValueError, match=r"out was begun with another head; choose another output"):
        checkpoint_of(head_of(target, "medusa", 2), place)
    with pytest.raises(ValueError, match="was begun with another head"):
        checkpoint_of(head_of(target, "eagle", 1), place)
    assert checkpoint_of(saved, tmp_path / "elsewhere") == place, "a head that was loaded knows its folder"


def test_a_device_is_the_one_that_this_process_calls_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert child_environment("cuda:1", 1)["CUDA_VISIBLE_DEVICES"] == "6"
    assert child_environment("cuda", 1)["CUDA_VISIBLE_DEVICES"] == "4"
    assert child_environment(None, 1)["CUDA_VISIBLE_DEVICES"] == "4,6"
    assert child_environment("cpu", 1)["CUDA_VISIBLE_DEVICES"] == ""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert child_environment("cuda:1", 1)["CUDA_VISIBLE_DEVICES"] == "1"
    with pytest.raises(ValueError, match=r"unknown device 'cuda:2' .*; choose from cpu, cuda:0, cuda:1"):
        child_environment("cuda:2", 1)


PARENT = """
import os, subprocess, sys, time
niceness, *module = sys.argv[1:]
command = [sys.executable, "-m", "headstart.low_priority", niceness, str(os.getpid()), *module]
print(subprocess.Popen(command, start_new_session=True).pid, flush=True)
time.sleep(600)
"""
TOLD = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (open(sys.argv[1], "a").write("asked"), sys.exit()))
open(sys.argv[1], "a").write(f"{os.getpriority(os.PRIO_PROCESS, 0)} {os.sched_getscheduler(0)} ")
time.sleep(600)
"""


def alive(number):
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        with open(f"/proc/{number}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("niceness", [5, 19])
def test_a_process_of_low_priority_ends_with_its_parent_however_that_ends(tmp_path, niceness):
    (tmp_path / "told.py").write_text(TOLD)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", PARENT, str(niceness), "told", str(tmp_path / "log")]
    parent = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    deadline = time.monotonic() + 120
    while not (tmp_path / "log").exists() or not (tmp_path / "log").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert alive(child)
    parent.kill()
    parent.wait()
    while alive(child):
        assert time.monotonic() < deadline, "it has outlived its parent"
        time.sleep(0.05)
    priority, policy, asked = (tmp_path / "log").read_text().split()
    expected = min(os.getpriority(os.PRIO_PROCESS, 0) + niceness, 19)
    assert int(priority) == expected and asked == "asked", "it could save its state"
    assert int(policy) == (os.SCHED_IDLE if niceness == 19 else os.sched_getscheduler(0))
