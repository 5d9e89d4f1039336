"""`headstart chat`, by the lines of its standard input."""

from __future__ import annotations

import io
import re
import urllib.request

import pytest
import torch
from messages import refused
from prometheus_client.parser import text_string_to_metric_families

from headstart.addons.monitor import Monitor
from headstart.files import text_shards
from headstart.inference import Chat, SpeculativeLM, load_tokenizer
from headstart.inference.feature_cache import text_row
from headstart.scripts import chat
from headstart.scripts.generate import GenerateConfig, stream_answer


@pytest.fixture
def talk(monkeypatch, capsys, target_folder):
    """What the chat prints for lines of input."""

    def call(*lines, **more):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        options = {"max_new_tokens": 12, "drafter": "prompt-lookup", "adaptive": False, **more}
        chat.chat_on_screen(chat.ChatConfig(target=str(target_folder), dtype="float32", **options))
        return capsys.readouterr().out

    return call


@pytest.fixture
def said(target_folder):
    """The answers of a chat from Python, by system prompt and messages."""

    def call(system, *messages):
        lm = SpeculativeLM.from_pretrained(target_folder, dtype="float32")
        talking = lm.chat(
            load_tokenizer(str(target_folder)), system, max_new_tokens=12, do_sample=False
        )
        return [talking.say(message) for message in messages]

    return call


def test_answers_are_those_of_a_chat_with_drafts_and_without(talk, said):
    out = talk(
        "hello",
        "/plain",
        "and now?",
        "/plain",
        "more",
        "/system be brief",
        "hello",
        "/reset",
        "",
        "hello",
    )
    place = 0
    for answer in [*said(None, "hello", "and now?", "more"), *said("be brief", "hello") * 2]:
        place = out.index(answer + "\n", place) + len(answer)
    lines = re.findall(
        r"^[\d.]+ tokens/s, acceptance length ([\d.]+)(, 11 of 11 rounds without drafts)?",
        out,
        re.M,
    )
    assert [bool(plain) for _, plain in lines] == [False, True, False, False, False]
    assert lines[1][0] == "1.00"
    assert "plain decoding" in out and "with drafts again" in out


def test_accepted_drafts_are_green_and_the_rest_is_not(target_folder, monkeypatch):
    config = chat.ChatConfig(
        target=str(target_folder), dtype="float32", drafter="prompt-lookup", adaptive=False
    )
    lm, tokenizer = config.load()
    session = chat.Session(config, lm, tokenizer)
    assert session.drafts().plain == "no finished answer yet"
    session.chat.settings["max_new_tokens"] = 60
    session.answer("abab")
    (stats,) = session.stats
    text = session.drafts()
    answer, count = text.plain.rsplit("\n", 1)
    assert answer == session.chat.messages[-1]["content"].rstrip("\ufffd")
    accepted = sum(min(record.accepted, record.returned) for record in stats.rows[0])
    assert count.startswith(f"{accepted} of {stats.tokens + 1} tokens were drafted")
    assert accepted > 0
    green = sum(span.end - span.start for span in text.spans if span.style == "green")
    assert 0 < green < len(answer)


def test_an_interrupted_answer_stays_and_the_chat_goes_on(talk, monkeypatch, said):
    whole = Chat.stream

    def stops(self, text, **settings):
        for number, piece in enumerate(whole(self, text, **settings)):
            yield piece
            if text == "stop" and number == 1:
                raise KeyboardInterrupt

    monkeypatch.setattr(Chat, "stream", stops)
    out = talk("stop", "/drafts", "hello")
    assert " (stopped)\n" in out and "no finished answer yet" in out
    assert out.count("tokens/s") == 1
    assert out.index("(stopped)") < out.index("tokens/s")


def test_an_answer_that_ends_at_the_limit_says_so(talk):
    out = talk("hello")
    assert ", cut off at max_new_tokens = 12" in out
    out = talk("hello", max_new_tokens=900, temperature=1.0)
    assert "tokens/s" in out and "cut off" not in out  # the model ends before


def test_metrics_are_served_by_option_with_drafts_and_without(talk, monkeypatch):
    ports, serve = [], Monitor.serve
    monkeypatch.setattr(
        Monitor, "serve", lambda self, *args: ports.append(serve(self, *args)) or ports[-1]
    )
    out = talk("hello", "/plain", "more", "again", metrics_port=0)
    assert f"metrics: http://127.0.0.1:{ports[0]}/metrics" in out
    with urllib.request.urlopen(f"http://127.0.0.1:{ports[0]}/metrics") as response:
        families = list(text_string_to_metric_families(response.read().decode()))
    counts = {
        sample.labels["drafter"]: sample.value
        for family in families
        for sample in family.samples
        if sample.name == "headstart_generations_total"
    }
    assert counts == {"prompt-lookup": 1, "": 2}
    with refused(f"{ports[0]}"):
        talk("never read", metrics_port=ports[0])


def test_mistakes_are_told_and_end_nothing(talk):
    out = talk("/drift", "x" * 2000, "hello", "/exit", "never read")
    assert "unknown command '/drift'" in out and "/drafts " in out
    assert "do not fit" in out
    assert out.count("tokens/s") == 1


def test_a_seed_samples_the_same(talk):
    first, again, other = (
        re.sub(r"[\d.]+ tokens/s", "", talk("hi", temperature=1.0, seed=seed)) for seed in (1, 1, 2)
    )
    assert first == again != other
    assert torch.initial_seed() == 2


def test_answers_are_recorded_by_option_with_drafts_and_without(talk, tmp_path, monkeypatch):
    folder = tmp_path / "recorded"
    out = talk("hello", "/plain", "and now?", record=str(folder))
    rows = [text_row(path) for path in text_shards(folder)]
    assert [row["ended"] for row in rows] == ["complete", "complete"]
    assert len(rows[1]["input_ids"]) > len(rows[0]["input_ids"])
    assert out.count(f"recorded: 1 answers, 0.0 MiB, in {folder}") == 2
    monkeypatch.setenv("HEADSTART_NO_RECORD", "1")
    with pytest.warns(UserWarning, match="HEADSTART_NO_RECORD is set"):
        assert "recorded:" not in talk("hello", record=str(tmp_path / "none"))
    assert not (tmp_path / "none").exists()


def test_generate_records_by_option(tmp_path, target_folder, capsys):
    config = GenerateConfig(
        target=str(target_folder),
        prompt="hello",
        max_new_tokens=8,
        dtype="float32",
        record=str(tmp_path),
        compare=True,
    )
    stream_answer(config)
    (path,) = text_shards(tmp_path)
    assert sum(text_row(path)["loss_mask"]) <= 8
    assert "recorded: 1 answers" in capsys.readouterr().out
