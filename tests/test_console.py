"""Progress of long work where there is no terminal, and wishes to stop."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import time
import warnings

import pytest
from rich.console import Console

from headstart import console
from headstart.console import (
    LINE_SECONDS,
    ProgressBar,
    duration,
    log,
    show_on_console,
    table_cell,
)
from headstart.files import LONGEST_REASON, one_line, printable
from headstart.scripts.command_line import run


@pytest.fixture
def pass_seconds(monkeypatch):
    """Moves the clock on."""
    now = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def move(seconds):
        now[0] += seconds

    return move


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setattr(console, "console", Console(force_terminal=True, width=100))


def test_a_line_now_and_then_with_count_rate_and_remaining_time(capsys, pass_seconds):
    with ProgressBar("things", 1_000_010, done=10) as bar:
        pass_seconds(LINE_SECONDS / 2)
        bar.update(50_010)  # too soon after the beginning
        pass_seconds(LINE_SECONDS / 2)
        bar.update(100_010, "well so far")
        bar.update(100_011)
        pass_seconds(LINE_SECONDS)
        with ProgressBar("parts", 5) as parts:
            parts.update(1)
            pass_seconds(LINE_SECONDS)
            parts.update(2)
    things, parts = capsys.readouterr().out.splitlines()
    left = duration(9 * LINE_SECONDS)
    rate = 100_000 / LINE_SECONDS
    assert things == f"things: 100,010/1,000,010  {rate:,.1f}/s  {left} left  well so far"
    assert parts.startswith("parts: 2/5  ")


def test_in_a_terminal_there_is_a_bar_unless_the_program_did_not_ask_for_it(
    capsys, terminal, pass_seconds, monkeypatch
):
    with ProgressBar("things", 2) as bar:
        bar.update(1)  # at once, without a rate
        pass_seconds(1)
        bar.update(2)
    shown = capsys.readouterr().out
    assert "━" in shown
    assert re.search(r"things.*2/2  2.0/s  0:00:00 left", shown)
    monkeypatch.setattr(logging.getLogger("headstart"), "handlers", [])
    with ProgressBar("things", 2) as bar:
        pass_seconds(LINE_SECONDS)
        bar.update(1)
    assert not capsys.readouterr().out


def test_messages_are_printed_once_and_as_they_are_but_control_no_terminal(capsys):
    show_on_console()
    show_on_console()
    log.info("[brackets] stay :smile: \x1b[2J\x1b]0;owned\x07")
    log.warning("careful")
    assert capsys.readouterr().out == "[brackets] stay :smile: \nwarning: careful\n"


def test_processes_after_the_first_say_nothing_but_warnings(capsys, pass_seconds, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    log.info("as all others do")
    with ProgressBar("things", 2) as bar:
        pass_seconds(LINE_SECONDS)
        bar.update(1)
    log.warning("here alone")
    assert capsys.readouterr().out == "warning: here alone\n"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a \x1b[31;1mred\x1b[0m word", "a red word"),
        ("\x1b]0;owned\x07title", "title"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1b]52;c;Y2xpcA==\x07clipboard", "clipboard"),
        ("\x1b]0;never ended", "0;never ended"),
        ("\x9b2Jcleared \x9d0;x\x9cone byte", "cleared one byte"),
        ("\x1bPq#0\x1b\\picture \x1b(B\x1b7", "picture "),
        ("hidden\rshown", "hiddenshown"),
        ("line\r\nline\tcolumn\n", "line\nline\tcolumn\n"),
        ("\u202eright to left\u2066\u200f", "right to left"),
        ("bell\x07 back\x08 null\x00 escape\x1b", "bell back null escape"),
        ("naïve 中文 😀 e\u0301 [bold]", "naïve 中文 😀 e\u0301 [bold]"),
    ],
)
def test_what_would_control_a_terminal_is_not_printed(text, shown):
    assert printable(text) == shown


def test_words_of_others_are_one_short_line_that_can_be_printed():
    assert one_line(ValueError("\x1b[2Ja\n b\r\u2028c\ud800\u1ad2")) == "a bc\\ud800\\u1ad2"
    assert one_line("x" * 5000) == "x" * LONGEST_REASON + " ..."


@pytest.mark.parametrize(
    ("text", "cell"),
    [("a|b", "a\\|b"), ("<script>", "&lt;script>"), ("\x1b[2Ja\n# b\u202e", "a # b"), (5, "5")],
)
def test_a_text_in_a_table_ends_no_cell_and_begins_no_html(text, cell):
    assert table_cell(text) == cell


def test_errors_and_warnings_of_a_command_control_no_terminal(capsys, monkeypatch):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # restored in the end
    formatted = []

    def command(arguments):
        for category in (UserWarning, RuntimeWarning):
            formatted.append(warnings.formatwarning("warned \x1b[2Jhere", category, "file.py", 1))
        raise ValueError("failed \x1b]0;owned\x07\x1b[31mhere")

    with pytest.raises(SystemExit):
        run(command, [])
    assert capsys.readouterr().err == "error: failed here\n"
    assert formatted[0] == "warning: warned here\n"
    assert formatted[1].startswith("file.py:1: RuntimeWarning: warned here\n")


LISTING = """
from headstart.scripts.command_line import run

def main(arguments):
    import tqdm
    print(len(list(tqdm.tqdm(range(3)))))

run(main, [])
"""


def test_a_log_of_a_command_holds_no_short_progress_bar_of_another_package():
    command = [sys.executable, "-c", LISTING]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert (done.stdout, done.stderr) == ("3\n", "")
