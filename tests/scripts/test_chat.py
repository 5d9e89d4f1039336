"""`headstart chat`, by the lines of its standard input."""

from __future__ import annotations

import io
import re

import pytest
from helpers import EachRound
from messages import lacking, refused, warned

from headstart.files import text_shards
from headstart.inference import SpeculativeLM, load_tokenizer
from headstart.inference.feature_cache import text_row
from headstart.scripts.chat import ChatConfig, Session, chat_on_screen, converse
from headstart.scripts.generate import GenerateConfig, stream_answer


@pytest.fixture
def chat_config(target_folder):
    def make(**changes):
        options = {"max_new_tokens": 12, "drafter": "prompt-lookup", "adaptive": False}
        return ChatConfig(target=str(target_folder), dtype="float32", **options | changes)

    return make


@pytest.fixture
def typed(monkeypatch):
    """Lines of the standard input."""

    def write(*lines):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))

    return write


@pytest.fixture
def talk(typed, capsys, chat_config):
    """What the chat prints for lines of input."""

    def call(*lines, **changes):
        typed(*lines)
        chat_on_screen(chat_config(**changes))
        return capsys.readouterr().out

    return call


@pytest.fixture
def session(chat_config):
    config = chat_config()
    return Session(config, *config.load())


@pytest.fixture
def chat_answers(target_folder):
    """The answers of a chat from Python, by system prompt and messages."""

    def call(system, *messages):
        lm = SpeculativeLM.from_pretrained(target_folder, dtype="float32")
        tokenizer = load_tokenizer(target_folder)
        chat = lm.chat(tokenizer, system, max_new_tokens=12, do_sample=False)
        return [chat.say(message) for message in messages]

    return call


def test_answers_are_those_of_a_chat_with_drafts_and_without(talk, chat_answers):
    first = ["hello", "/plain", "and now?", "/plain", "more"]
    brief = ["/system be brief", "hello", "/reset", "", "hello"]
    out = talk(*first, *brief)
    answers = (
        chat_answers(None, "hello", "and now?", "more") + chat_answers("be brief", "hello") * 2
    )
    place = 0
    for answer in answers:
        place = out.index(answer + "\n", place) + len(answer)
    lines = re.findall(r"acceptance length ([\d.]+)(, 11 of 11 rounds)?", out)
    assert [bool(plain) for _, plain in lines] == [False, True, False, False, False]
    assert lines[1][0] == "1.00"


def test_accepted_drafts_are_green_and_the_rest_is_not(session):
    assert session.drafts().plain.count("\n") == 0  # of no answer
    session.chat.settings["max_new_tokens"] = 60
    session.answer("abab")
    (stats,) = session.stats
    text = session.drafts()
    answer, count = text.plain.rsplit("\n", 1)
    assert answer == session.chat.messages[-1]["content"].rstrip("\ufffd")
    accepted = sum(min(record.accepted, record.returned) for record in stats.rows[0])
    assert accepted > 0
    assert not lacking(count, f"{accepted} {stats.tokens + 1} drafted")
    green = sum(span.end - span.start for span in text.spans if span.style == "green")
    assert 0 < green < len(answer)


def test_an_interrupted_answer_stays_and_the_chat_goes_on(session, typed, capsys):
    def stop(sequences):
        session.lm.observers.remove(interruption)
        raise KeyboardInterrupt

    interruption = EachRound(stop)
    session.lm.observers.append(interruption)
    typed("stop", "/drafts", "hello")
    converse(session)
    out = capsys.readouterr().out
    assert not lacking(out, "(stopped) no finished answer")
    assert out.count("tokens/s") == 1
    assert out.index("(stopped)") < out.index("tokens/s")
    roles = [message["role"] for message in session.chat.messages]
    assert roles == ["user", "assistant"] * 2


def test_an_answer_that_ends_at_the_limit_says_so(talk):
    assert not lacking(talk("hello"), "max_new_tokens 12")
    out = talk("hello", max_new_tokens=900, temperature=1.0)
    assert "tokens/s" in out
    assert "max_new_tokens" not in out  # the model ends before


def test_metrics_are_served_by_option_with_drafts_and_without(talk, generations):
    out = talk("hello", "/plain", "more", "again", metrics_port=0)
    assert generations(out) == {"prompt-lookup": 1, "": 2}
    (port,) = re.findall(r"metrics: http://127.0.0.1:(\d+)/", out)
    with refused(port):
        talk("never read", metrics_port=int(port))


def test_mistakes_are_told_and_end_nothing(talk):
    out = talk("/drift", "x" * 2000, "hello", "/exit", "never read")
    assert not lacking(out, "unknown '/drift' /drafts fit")
    assert out.count("tokens/s") == 1


def test_a_seed_samples_the_same(talk):
    def answer(seed):
        return re.sub(r"[\d.]+ tokens/s", "", talk("hi", temperature=1.0, seed=seed))

    first = answer(1)
    assert answer(1) == first
    assert answer(2) != first


def test_answers_are_recorded_by_option_with_drafts_and_without(talk, tmp_path, monkeypatch):
    folder = tmp_path / "recorded"
    out = talk("hello", "/plain", "and now?", record=str(folder))
    rows = [text_row(path) for path in text_shards(folder)]
    assert [row["ended"] for row in rows] == ["complete", "complete"]
    assert len(rows[1]["input_ids"]) > len(rows[0]["input_ids"])
    summaries = [line for line in out.splitlines() if line.startswith("recorded: 1 ")]
    assert len(summaries) == 2
    assert not lacking(summaries[0], str(folder))
    monkeypatch.setenv("HEADSTART_NO_RECORD", "1")
    with warned("HEADSTART_NO_RECORD"):
        assert "recorded:" not in talk("hello", record=str(tmp_path / "none"))
    assert not (tmp_path / "none").exists()


def test_generate_records_by_option(tmp_path, target_folder, capsys):
    options = {"target": str(target_folder), "dtype": "float32", "max_new_tokens": 8}
    stream_answer(GenerateConfig(**options, prompt="hello", record=str(tmp_path), compare=True))
    (path,) = text_shards(tmp_path)
    assert sum(text_row(path)["loss_mask"]) <= 8
    assert "recorded: 1 " in capsys.readouterr().out
