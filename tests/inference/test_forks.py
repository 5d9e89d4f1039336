"""What a fork leaves, and an interpreter that ends: each is said at once, and nothing is waited
for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings

import pytest
import torch
from helpers import head_for
from messages import refused, warned

from headstart.addons.record import record
from headstart.inference import SpeculativeLM
from headstart.inference.targets import fork_lock
from headstart.inference.text.streaming import streamed

PROMPT = torch.tensor([[5, 6, 7, 5, 6]])
SETTINGS = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}


@pytest.fixture(autouse=True)
def one_thread():
    """As in a worker: torch's threads, where there are several, do not survive a fork."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def in_a_fork(work, seconds=60):
    """The exit status of a forked process that does some work: 0, or 1 if it raised."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "hangs"


def test_a_fork_of_one_thread_generates_the_same(lookup):
    wanted = lookup.generate(PROMPT, **SETTINGS).sequences

    def work():
        assert torch.equal(lookup.generate(PROMPT, **SETTINGS).sequences, wanted)

    assert in_a_fork(work) == 0


def test_threads_that_a_fork_has_lost_are_not_waited_for(lookup, monkeypatch, tmp_path):
    lookup.generate(PROMPT, **SETTINGS)
    maps = tmp_path / "maps"
    maps.write_text("libgomp.so.1")
    monkeypatch.setattr(fork_lock, "MAPS", maps)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    lookup.generate(PROMPT, **SETTINGS)

    def work():
        with refused("2 threads fork"):
            lookup.generate(PROMPT, **SETTINGS)

    assert in_a_fork(work) == 0


def test_a_generation_of_a_thread_that_is_not_there_is_not_waited_for(lookup):
    taken, done = threading.Event(), threading.Event()

    def hold():
        with lookup.target.lock:
            taken.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait()

    def work():
        with refused("forked thread"):
            lookup.generate(PROMPT, **SETTINGS)

    try:
        assert in_a_fork(work) == 0
    finally:
        done.set()
        thread.join()


def test_a_stream_that_was_begun_elsewhere_says_so():
    go_on = threading.Event()

    def generate(streamer):
        streamer.put(torch.tensor([1]))
        streamer.put(torch.tensor([2]))
        go_on.wait()

    stream = streamed(generate)
    assert next(stream) == [2]

    def work():
        with refused("forked"):
            next(stream)

    assert in_a_fork(work) == 0
    go_on.set()
    assert list(stream) == []


def test_a_recording_says_that_a_fork_is_not_recorded(tiny_target, tokenizer, tmp_path):
    target = tiny_target(vocab_size=258)
    head = head_for(target, "medusa")
    lm = SpeculativeLM.from_pretrained(target, head)
    with record(lm, tmp_path / "recorded", tokenizer=tokenizer) as recording:

        def work():
            with warned("forked recorded stop()"):
                lm.generate(PROMPT, **SETTINGS)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                lm.generate(PROMPT, **SETTINGS)  # once
            recording.stop()
            with record(lm, tmp_path / "recorded", tokenizer=tokenizer) as other:
                lm.generate(PROMPT, **SETTINGS)
            assert other.written == 1

        assert in_a_fork(work) == 0
        lm.generate(PROMPT, **SETTINGS)
    assert recording.written == 1
    assert len(list((tmp_path / "recorded").glob("recorded-*"))) == 2


PROGRAM = """
import sys
import torch
from helpers import build_model
from headstart.inference import SpeculativeLM
model = build_model(vocab_size=31)
lm = SpeculativeLM.from_pretrained(model, drafter="prompt-lookup")
stream = lm.stream(torch.tensor([[5, 6, 7, 5, 6]]), max_new_tokens=400, do_sample=False,
                   pad_token_id=0, eos_token_id=[])
next(stream)
sys.exit(3)
"""


def test_a_program_that_ends_inside_a_stream_ends_as_it_says():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment
    )
    assert (ended.returncode, "terminate called" in ended.stderr) == (3, False), ended.stderr
