"""Requests to a server: what is repeated, what is refused, and that no secret of its address is
shown."""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import contextmanager, suppress

import pytest
from json_server import JsonServer
from messages import refused

from headstart.addons import openai_client
from headstart.addons.openai_client import KEY, OpenAIClient, ServerError

SECRET = "s3cr3t"


class ScriptedServer(JsonServer):
    """Gives the replies that it was told, one after the other, and keeps what it was asked."""

    def __init__(self):
        super().__init__()
        self.replies = []
        self.seen = []

    def respond(self, path, body, headers):
        kind = headers["Content-Type"] if body else None
        self.seen.append((path, headers["Authorization"], kind))
        return self.replies.pop(0)

    def will_reply(self, *statuses, text="", **headers):
        self.replies += [(status, text, headers) for status in statuses]


@pytest.fixture
def scripted():
    with ScriptedServer() as server:
        yield server


@pytest.fixture
def client(scripted):
    return OpenAIClient.at(scripted.url, 5.0)


@contextmanager
def unanswered(*words):
    """The block raises the error of a request, in one short line with these words."""
    with refused(*words, error=ServerError) as caught:
        yield caught
    assert str(caught.value).isprintable() and len(str(caught.value)) < 1100


@contextmanager
def listening(answer):
    """The URL of a socket that has `answer(connection)` make what it sends."""
    with socket.create_server(("127.0.0.1", 0)) as waiting:

        def accept():
            connection, _ = waiting.accept()
            with connection, suppress(OSError):
                connection.recv(10_000)
                answer(connection)

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{waiting.getsockname()[1]}/v1"


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost",
        "ftp://h/v1",
        f"http://u:{SECRET}@",
        f"http://u:{SECRET}@h:port/v1",
        # no name server is asked for what comes before the / or #
        f"http://u:12/{SECRET}@h/v1",
        f"http://u:12#{SECRET}@h/v1",
    ],
)
def test_an_invalid_url_is_refused_without_being_shown(url):
    with refused("features.server URL") as caught:
        OpenAIClient.at(url, 1.0, "features.server")
    assert SECRET not in str(caught.value)


def test_a_url_keeps_its_port_and_path():
    client = OpenAIClient.at("https://u:p%40w@host:81/some/v1/?a=b", 1.0)
    assert (client.name, client.query) == ("https://host:81/some/v1", "a=b")
    assert "p@w" not in repr(client) and "p%40w" not in repr(client)
    assert OpenAIClient.at("http://[::1]:8000/v1", 1.0).name == "http://[::1]:8000/v1"


def test_user_and_query_are_sent_and_a_key_where_there_is_no_user(scripted, monkeypatch):
    monkeypatch.setenv(KEY, "sk-key")
    scripted.will_reply(200, 200, text="fine")
    assert OpenAIClient.at(scripted.url, 5.0).ask("/models") == "fine"
    named = scripted.url.replace("://", "://me:pass%40word@") + "?version=12345"
    OpenAIClient.at(named, 5.0).ask("/completions", {"prompt": [1]})
    assert scripted.seen == [
        ("/v1/models", "Bearer sk-key", None),
        ("/v1/completions?version=12345", "Basic bWU6cGFzc0B3b3Jk", "application/json"),
    ]


def test_what_passes_is_asked_again(scripted, client):
    scripted.will_reply(503, 429, 200, text="fine")
    assert client.ask("/models", retries=2) == "fine"
    assert len(scripted.seen) == 3


def test_what_does_not_pass_in_time_is_told(scripted, client):
    scripted.will_reply(503, 503)
    with unanswered("503") as caught:
        client.ask("/models", retries=1)
    assert caught.value.may_pass


def test_a_refusal_is_not_repeated(scripted, client):
    scripted.will_reply(404, text=json.dumps({"error": {"message": "no such model"}}))
    with unanswered("404 no such model") as caught:
        client.ask("/models", retries=5)
    assert not caught.value.may_pass and len(scripted.seen) == 1


def test_a_server_says_how_long_it_wants_to_be_left_alone(scripted, client):
    scripted.will_reply(429, **{"Retry-After": "0.4"})
    scripted.will_reply(200)
    began = time.monotonic()
    client.ask("/models", retries=1)
    assert time.monotonic() - began >= 0.4


def test_a_redirect_is_not_followed_which_would_send_the_key_elsewhere(scripted, client):
    scripted.will_reply(302, 200, Location=f"{scripted.url}/elsewhere")
    with unanswered("302"):
        client.ask("/models")


@pytest.mark.parametrize(
    "begin",
    [b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 500 OK\r\n\r\n", b""],
)
def test_an_answer_that_never_ends_has_a_limit_of_the_whole_time(begin):
    ended = threading.Event()

    def drip(connection):
        connection.sendall(begin)
        while not ended.wait(0.05):
            connection.sendall(b" ")

    began = time.monotonic()
    with listening(drip) as url:
        with unanswered("0.5 timed out"):
            OpenAIClient.at(url, 0.5).ask("/completions", {})
        ended.set()
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_name_server_that_never_answers_has_the_limit_too(monkeypatch, scheme):
    ended = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: ended.wait(20) and [])
    began = time.monotonic()
    with unanswered("0.3 timed out") as caught:
        OpenAIClient.at(f"{scheme}://slow.example/v1", 0.3).ask("/models")
    assert time.monotonic() - began < 5 and caught.value.may_pass
    ended.set()


def test_an_answer_without_end_has_a_limit_of_bytes(scripted, client, monkeypatch):
    monkeypatch.setattr(openai_client, "LONGEST_ANSWER", 1000)
    scripted.will_reply(200, text="x" * 1000)
    assert len(client.ask("/models")) == 1000
    scripted.will_reply(200, text="x" * 1001)
    with unanswered("1,000") as caught:
        client.ask("/models", retries=3)
    assert not caught.value.may_pass


@pytest.mark.parametrize(
    "head",
    [
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 x OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: 1\r\n" * 200 + b"\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"1" * 70_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\ncut short",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"",
    ],
)
def test_an_answer_that_breaks_http_is_told_in_one_line(head):
    with listening(lambda connection: connection.sendall(head)) as url, unanswered("reached"):
        OpenAIClient.at(url, 5.0).ask("/completions", {})


@pytest.mark.parametrize("text", ["[" * 200_000, "[1]", "null", "x", '{"a": ' + "9" * 5000 + "}"])
def test_what_is_no_json_object_is_an_answer_that_cannot_be_used(scripted, client, text):
    scripted.will_reply(200, text=text)
    with unanswered("JSON") as caught:
        client.ask_object("/models", retries=3)
    assert not caught.value.may_pass


def test_long_words_of_a_server_are_cut_and_control_no_terminal(scripted, client):
    scripted.will_reply(400, text="\x1b[2Jno \x08such model, " + "x" * 9000)
    with unanswered("400 no such model"):
        client.ask("/models")


def test_a_host_that_no_name_server_takes_is_told():
    with unanswered("reached"):
        OpenAIClient.at(f"http://{'a' * 70}.b/v1", 5.0).ask("/models")


@pytest.mark.parametrize("status", [200, 400])
def test_secrets_that_a_server_repeats_are_removed(scripted, monkeypatch, status):
    monkeypatch.setenv(KEY, "sk-CANARY")
    password = 'pä"CANARY'
    basic = "bWU6cMOkIkNBTkFSWQ=="
    said = ["sk-CANARY", password, json.dumps(password), "p%C3%A4%22CANARY", basic, "tok-CANARY"]
    scripted.will_reply(status, text=" ".join(said))
    url = scripted.url.replace("://", "://me:p%C3%A4%22CANARY@") + "?token=tok-CANARY"
    try:
        told = OpenAIClient.at(url, 5.0).ask("/models")
    except ServerError as error:
        told = str(error)
    assert "***" in told
    assert "CANARY" not in told and basic.rstrip("=") not in told


def test_a_server_that_is_not_there_may_come():
    with unanswered("reached refused") as caught:
        OpenAIClient.at("http://127.0.0.1:9/v1", 5.0).ask("/models")
    assert caught.value.status is None and caught.value.may_pass
