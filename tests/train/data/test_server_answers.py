"""`headstart data --server`, against a small server on loopback that can be slow, overloaded, or out of its mind."""

from __future__ import annotations

import base64
import json
import os
import signal
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("openai")

from headstart.train.config import SelfMadeConfig
from headstart.train.console import Stopped
from headstart.train.data import server_answers as served
from headstart.train.data.chat_template import encode
from headstart.train.data.conversations import read_conversations
from headstart.train.data.self_made import make_conversations


def completion(text, reason="stop"):
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "finish_reason": reason, "message": message}
    usage = {"completion_tokens": len(text.split()), "prompt_tokens": 3, "total_tokens": 3 + len(text.split())}
    row = {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage}
    return 200, row


class Server(ThreadingHTTPServer):
    """Answers with `reply(server, body)`, a status and a row, or text."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked, self.most, self.now, self.lock = [], 0, 0, threading.Lock()
        self.reply = lambda server, body: completion("echo " + body["messages"][-1]["content"])
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"

    @property
    def contents(self):
        return [body["messages"][-1]["content"] for body in self.asked]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        assert self.path == "/v1/chat/completions"
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked.append(body)
            self.server.now += 1
            self.server.most = max(self.server.most, self.server.now)
        status, row = self.server.reply(self.server, body)
        data = (row if isinstance(row, str) else json.dumps(row)).encode()
        with self.server.lock:
            self.server.now -= 1
        self.send_response(status)
        self.send_header("Content-Type", "text/plain" if isinstance(row, str) else "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with Server() as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


@pytest.fixture
def config(server, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"question {i}"}) + "\n" for i in range(20)), encoding="utf-8")
    return SelfMadeConfig(
        target="served-model",
        output=str(tmp_path / "out" / "made.jsonl"),
        prompts=str(prompts),
        server=server.url,
        batch_size=4,
        temperature=0.5,
        answer_tokens=7,
        seed=100,
    )


def rows_of(config):
    return [json.loads(line) for line in Path(config.output).read_text(encoding="utf-8").splitlines()]


def changed(config, **changes):
    return SelfMadeConfig(**{**vars(config), **changes})


def test_every_prompt_is_asked_once_with_the_settings(config, server, tokenizer):
    path = make_conversations(config)
    rows = rows_of(config)
    assert sorted(row["number"] for row in rows) == list(range(20))
    for row in rows:
        assert row["messages"] == [
            {"role": "user", "content": f"question {row['number']}"},
            {"role": "assistant", "content": f"echo question {row['number']}"},
        ]
        assert row["finished"] is True and row["tokens"] == 3 and row["temperature"] == 0.5
    assert len(server.asked) == 20
    for body in server.asked:
        number = int(body["messages"][0]["content"].split()[1])
        assert body == {
            "model": "served-model",
            "messages": body["messages"],
            "temperature": 0.5,
            "max_tokens": 7,
            "seed": 100 + number,
        }
    assert encode(read_conversations(str(path))[0], tokenizer, frozenset({tokenizer.eos_token_id}), 100)
    asked = len(server.asked)
    make_conversations(config)  # finished: nothing is asked again
    assert len(server.asked) == asked


def test_a_prompt_has_its_temperature_and_its_second_turn(config, server):
    rows = [{"prompt": "one", "temperature": 0.0, "kind": "short"}, {"prompt": "two", "follow_up": "and then?"}]
    Path(config.prompts).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    make_conversations(config)
    one, two = sorted(rows_of(config), key=lambda row: row["number"])
    assert (one["kind"], one["temperature"], len(one["messages"])) == ("short", 0.0, 2)
    assert (two["temperature"], two["tokens"]) == (0.5, 5)  # "echo two" and "echo and then?"
    assert [message["content"] for message in two["messages"]] == ["two", "echo two", "and then?", "echo and then?"]
    assert sorted(body["temperature"] for body in server.asked) == [0.0, 0.5, 0.5]


@pytest.mark.parametrize(("thinking", "sent"), [(None, None), (False, {"enable_thinking": False})])
def test_thinking_is_for_the_servers_template(config, server, thinking, sent):
    make_conversations(changed(config, thinking=thinking, conversations=2))
    assert [body.get("chat_template_kwargs") for body in server.asked] == [sent, sent]


def test_as_many_are_asked_at_once_as_the_batch_is_large(config, server):
    everyone = threading.Barrier(4, timeout=20)

    def together(server, body):
        everyone.wait()  # four at a time, or nobody
        return completion("a b c")

    server.reply = together
    make_conversations(config)
    assert server.most == 4


def test_an_overloaded_server_is_asked_again(config, server, monkeypatch):
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)
    monkeypatch.setattr("openai._base_client.MAX_RETRY_DELAY", 0.02)
    tried, lock = Counter(), threading.Lock()

    def overloaded(server, body):
        content = body["messages"][0]["content"]
        with lock:
            tried[content] += 1
            if tried[content] < 3:
                return 503 if tried[content] == 1 else 429, {"error": {"message": "later"}}
        return completion("here you are")

    server.reply = overloaded
    make_conversations(config)
    assert len(rows_of(config)) == 20 and set(tried.values()) == {3}


def test_a_prompt_that_the_server_refuses_is_left_out_and_named(config, server, capsys):
    def choosy(server, body):
        if body["messages"][0]["content"] == "question 13":
            return 400, {"error": {"message": "too long"}}
        return completion("fine, then")

    server.reply = choosy
    make_conversations(config)
    assert {row["number"] for row in rows_of(config)} == set(range(20)) - {13}
    assert "prompt 13 is left out, the server refuses it" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((500, {"error": {"message": "broken"}}), r"failed at prompt \d+, after 1 more tries.*broken"),
        ((200, "hello?"), r"answered prompt \d+ with 'hello\?', which is no chat completion"),
        ((200, {"choices": []}), r"answered prompt \d+ with .*which is no chat completion"),
        ((404, {"error": {"message": "no model served-model"}}), r"failed at prompt \d+.*no model served-model"),
    ],
)
def test_a_server_that_fails_or_talks_nonsense_is_named_and_what_it_answered_stays(
    config, server, monkeypatch, answer, words
):
    monkeypatch.setattr(served, "RETRIES", 1)
    count, lock = [], threading.Lock()

    def breaks(server, body):
        with lock:
            count.append(0)
            if len(count) > 6:
                return answer
        return completion("one two three")

    server.reply = breaks
    with pytest.raises(ValueError, match=words):
        make_conversations(config)
    kept = {row["number"] for row in rows_of(config)}
    assert len(kept) == 6
    server.reply, server.asked = lambda server, body: completion("one two three"), []
    make_conversations(config)
    assert {row["number"] for row in rows_of(config)} == set(range(20))
    assert not {f"question {number}" for number in kept} & set(server.contents)


@pytest.mark.parametrize("status", [400, 401, 500, 200])
def test_no_key_of_the_server_is_shown_or_written(config, server, monkeypatch, capsys, status):
    """Not even where the server repeats what it was sent."""
    monkeypatch.setattr(served, "RETRIES", 0)
    monkeypatch.setenv(served.KEY, "sk-CANARY")
    basic = base64.b64encode(b"me:PASS/CANARY").decode()
    said = f"Bearer sk-CANARY Basic {basic} at PASS%2FCANARY PASS/CANARY \x1b[2J"
    server.reply = lambda *_: (status, {"error": {"message": said}} if status != 200 else said)
    config = changed(config, server=server.url.replace("://", "://me:PASS%2FCANARY@"))
    told = ""
    if status == 400:  # each prompt is refused
        make_conversations(config)
    else:
        with pytest.raises(ValueError, match=r"http://127\.0\.0\.1:\d+/v1 (failed at|answered) prompt") as caught:
            make_conversations(config)
        told = str(caught.value)
        assert caught.value.__cause__ is None
    told += capsys.readouterr().out
    assert "***" in told
    files = "".join(path.read_text() for path in Path(config.output).parent.iterdir())
    for secret in ("CANARY", basic):
        assert secret not in told and secret not in files


def test_no_server_is_told_after_the_tries(config, server, monkeypatch):
    monkeypatch.setattr(served, "RETRIES", 0)
    with pytest.raises(ValueError, match=r"http://127\.0\.0\.1:9/v1 failed at prompt \d.*Connection error"):
        make_conversations(changed(config, server="http://127.0.0.1:9/v1"))


def test_stopped_it_goes_on_with_what_is_missing(config, server, monkeypatch):
    count = []

    def slow(server, body):
        count.append(0)
        if len(count) == 9:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.02)
        return completion("slow but sure")

    server.reply = slow
    with pytest.raises(Stopped, match=r"stopped after \d+ of 20 prompts"):
        make_conversations(config)
    before = {row["number"] for row in rows_of(config)}
    with Path(config.output).open("a", encoding="utf-8") as file:
        file.write('{"number": 3, "half')  # a kill in the middle of a line
    server.reply, server.asked = lambda server, body: completion("slow but sure"), []
    make_conversations(config)
    assert sorted(row["number"] for row in rows_of(config)) == list(range(20))
    assert len(server.asked) == 20 - len(before)


def test_answers_that_say_nothing_are_dropped(config, server):
    texts = {"question 1": "", "question 2": "ha " * 30, "question 3": None}

    def empty(server, body):
        content = body["messages"][0]["content"]
        status, row = completion("something else", "length")
        row["choices"][0]["message"]["content"] = texts.get(content, "something else")
        return status, row

    server.reply = empty
    make_conversations(config)
    assert {row["number"] for row in rows_of(config)} == set(range(20)) - {1, 2, 3}
    assert not any(row["finished"] for row in rows_of(config))  # cut off: the end token is the template's


@pytest.mark.parametrize(("change", "words"), [({"temperature": 0.6}, "temperature = 0.5, not 0.6")])
def test_a_file_of_other_options_is_refused(config, change, words):
    make_conversations(config)
    with pytest.raises(ValueError, match=words):
        make_conversations(changed(config, **change))
    make_conversations(changed(config, batch_size=9))


def test_a_server_needs_prompts_and_takes_no_head(config):
    for change in ({"prompts": None}, {"head": "some/head"}):
        with pytest.raises(ValueError, match="needs prompts and takes no head"):
            changed(config, **change)
