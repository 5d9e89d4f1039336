"""Ctrl-C and SIGTERM set a flag, and a second one ends the process."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest

from headstart.stopping import SIGNALS, Stopped, stop_on_signals


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_sets_the_flag_and_interrupts_nothing(number, capfd):
    before = signal.getsignal(number)
    with stop_on_signals() as stop:
        assert not stop.wanted
        signal.raise_signal(number)
        assert stop.wanted
    assert signal.getsignal(number) == before
    assert "stopping" in capfd.readouterr().err


def test_nested_work_shares_the_flag(capfd):
    with stop_on_signals() as outer:
        with stop_on_signals() as inner:
            assert inner is outer
            signal.raise_signal(signal.SIGTERM)
        assert outer.wanted
    with stop_on_signals() as stop:  # and the next work begins with its own
        assert not stop.wanted


def test_an_error_gives_the_signals_back():
    before = [signal.getsignal(number) for number in SIGNALS]
    with pytest.raises(Stopped), stop_on_signals():
        raise Stopped("enough")
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_in_another_thread_nothing_sets_the_flag():
    found = []

    def work():
        with stop_on_signals() as stop:
            found.append(stop.wanted)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [False]


TWICE = """
import os, signal, time
from headstart.stopping import stop_on_signals
with stop_on_signals() as stop:
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.wanted
    print("went on", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
"""


def test_a_second_signal_ends_the_process():
    process = subprocess.run(
        [sys.executable, "-c", TWICE], capture_output=True, text=True, timeout=60
    )
    assert process.returncode == -signal.SIGTERM and process.stdout == "went on\n"
