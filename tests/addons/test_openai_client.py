"""Requests to a server: what is repeated, what is refused, and that no secret of its address is
shown."""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import suppress

import pytest
from json_server import JsonServer
from messages import refused

from headstart.addons import openai_client
from headstart.addons.openai_client import KEY, OpenAIClient, ServerError

SECRET = "s3cr3t"


class Server(JsonServer):
    """Gives the replies that it was told, one after the other, and keeps what it was asked."""

    def __init__(self):
        super().__init__()
        self.replies, self.seen = [], []

    def respond(self, path, body, headers):
        self.seen.append(("POST" if body else "GET", path, dict(headers)))
        return self.replies.pop(0)


@pytest.fixture
def running(monkeypatch):
    monkeypatch.setattr(openai_client, "FIRST_PAUSE", 0.001)
    monkeypatch.delenv(KEY, raising=False)
    with Server() as server:
        yield server


def replies(running, *statuses, text="", **headers):
    running.replies += [(status, text, headers) for status in statuses]


@pytest.mark.parametrize(
    "url", ["", "localhost", "ftp://h/v1", f"http://u:{SECRET}@", f"http://u:{SECRET}@h:port/v1"]
)
def test_what_is_no_url_is_refused_without_being_shown(url):
    with refused("features.server URL") as caught:
        OpenAIClient.at(url, 1.0, "features.server")
    assert SECRET not in str(caught.value)


def test_a_url_keeps_its_port_and_path():
    server = OpenAIClient.at("https://u:p%40w@host:81/some/v1/?a=b", 1.0)
    assert (server.name, server.query) == ("https://host:81/some/v1", "a=b")
    assert "p@w" not in repr(server) and "p%40w" not in repr(server)
    assert OpenAIClient.at("http://[::1]:8000/v1", 1.0).name == "http://[::1]:8000/v1"


def test_user_and_query_are_sent_and_a_key_where_there_is_no_user(running, monkeypatch):
    monkeypatch.setenv(KEY, "sk-key")
    replies(running, 200, 200, text="fine")
    assert OpenAIClient.at(running.url, 5.0).ask("/models") == "fine"
    named = running.url.replace("://", "://me:pass%40word@") + "?version=12345"
    OpenAIClient.at(named, 5.0).ask("/completions", {"prompt": [1]})
    (method, path, headers), (other_method, other_path, other_headers) = running.seen
    assert (method, path, headers["Authorization"]) == ("GET", "/v1/models", "Bearer sk-key")
    assert (other_method, other_path) == ("POST", "/v1/completions?version=12345")
    assert other_headers["Authorization"] == "Basic bWU6cGFzc0B3b3Jk"
    assert other_headers["Content-Type"] == "application/json"


def test_what_passes_is_asked_again_and_what_does_not_is_not(running):
    server = OpenAIClient.at(running.url, 5.0)
    replies(running, 503, 429, 200)
    assert server.ask("/models", retries=2) == ""
    assert len(running.seen) == 3
    replies(running, 503, 503)
    with refused("503", error=ServerError) as caught:
        server.ask("/models", retries=1)
    assert caught.value.may_pass
    replies(running, 404, text=json.dumps({"error": {"message": "no such model"}}))
    with refused("404 no such model", error=ServerError) as caught:
        server.ask("/models", retries=5)
    assert not caught.value.may_pass and len(running.seen) == 6


def test_a_server_says_how_long_it_wants_to_be_left_alone(running):
    replies(running, 429, **{"Retry-After": "0.4"})
    replies(running, 200)
    began = time.monotonic()
    OpenAIClient.at(running.url, 5.0).ask("/models", retries=1)
    assert time.monotonic() - began >= 0.4


def test_a_redirect_is_not_followed_which_would_send_the_key_elsewhere(running):
    replies(running, 302, 200, Location="http://127.0.0.1:9/")
    with refused("302", error=ServerError):
        OpenAIClient.at(running.url, 5.0).ask("/models")


@pytest.mark.parametrize("url", ["http://u:12/s3cr3t@h/v1", "http://u:12#s3cr3t@h/v1"])
def test_a_password_that_ends_the_host_too_early_is_asked_of_no_name_server(url):
    with refused("URL") as caught:
        OpenAIClient.at(url, 1.0)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("begin", [b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 200 OK\r\n\r\n", b""])
@pytest.mark.parametrize("status", [b"", b"500"])
def test_an_answer_that_never_ends_has_a_limit_of_the_whole_time(begin, status):
    begin = begin.replace(b"200", status or b"200")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        ended = threading.Event()

        def drip():
            connected, _ = listening.accept()
            with connected, suppress(OSError):
                connected.sendall(begin)
                while not ended.wait(0.05):
                    connected.sendall(b" ")

        threading.Thread(target=drip, daemon=True).start()
        server = OpenAIClient.at(f"http://127.0.0.1:{listening.getsockname()[1]}/v1", 0.5)
        began = time.monotonic()
        with refused("0.5", error=ServerError):
            server.ask("/completions", {})
        ended.set()
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_name_server_that_never_answers_has_the_limit_too(monkeypatch, scheme):
    ended = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: ended.wait(20) and [])
    began = time.monotonic()
    with refused("0.3", error=ServerError) as caught:
        OpenAIClient.at(f"{scheme}://slow.example/v1", 0.3).ask("/models")
    assert time.monotonic() - began < 5 and caught.value.may_pass
    ended.set()


def test_an_answer_without_end_has_a_limit_of_bytes(running, monkeypatch):
    monkeypatch.setattr(openai_client, "LONGEST_ANSWER", 1000)
    replies(running, 200, text="x" * 1000)
    assert len(OpenAIClient.at(running.url, 5.0).ask("/models")) == 1000
    replies(running, 200, text="x" * 1001)
    with refused("1,000", error=ServerError) as caught:
        OpenAIClient.at(running.url, 5.0).ask("/models", retries=3)
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
def test_what_is_no_http_is_told_in_one_line(head):
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer():
            connected, _ = listening.accept()
            with connected, suppress(OSError):
                connected.recv(10_000)
                connected.sendall(head)

        threading.Thread(target=answer, daemon=True).start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        with refused("reached", error=ServerError) as caught:
            OpenAIClient.at(url, 5.0).ask("/completions", {})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["[" * 200_000, "[1]", "null", "x", '{"a": ' + "9" * 5000 + "}"])
def test_what_is_no_json_object_is_an_answer_that_cannot_be_used(running, text):
    replies(running, 200, text=text)
    with refused("JSON", error=ServerError) as caught:
        OpenAIClient.at(running.url, 5.0).ask_object("/models", retries=3)
    assert not caught.value.may_pass and len(str(caught.value)) < 1000


def test_long_words_of_a_server_are_cut_and_control_no_terminal(running):
    replies(running, 400, text="\x1b[2Jno \x08such model, " + "x" * 9000)
    with refused("400 no such model", error=ServerError) as caught:
        OpenAIClient.at(running.url, 5.0).ask("/models")
    assert str(caught.value).isprintable() and len(str(caught.value)) < 1100


def test_a_host_that_no_name_server_takes_is_told():
    with refused("reached", error=ServerError):
        OpenAIClient.at(f"http://{'a' * 70}.b/v1", 5.0).ask("/models")


@pytest.mark.parametrize("status", [200, 400])
def test_secrets_that_a_server_repeats_are_removed(running, monkeypatch, status):
    monkeypatch.setenv(KEY, "sk-CANARY")
    password = 'pä"CANARY'
    url = running.url.replace("://", "://me:p%C3%A4%22CANARY@") + "?token=tok-CANARY"
    said = (
        f"sk-CANARY {password} {json.dumps(password)} p%C3%A4%22CANARY bWU6cMOkIkNBTkFSWQ=="
        " tok-CANARY"
    )
    replies(running, status, text=said)
    server = OpenAIClient.at(url, 5.0)
    try:
        told = server.ask("/models")
    except ServerError as error:
        told = str(error)
    assert "***" in told
    for secret in ("CANARY", "bWU6cMOkIkNBTkFSWQ"):
        assert secret not in told


def test_no_answer_is_told_as_one(running):
    with refused("reached refused", error=ServerError) as caught:
        OpenAIClient.at("http://127.0.0.1:9/v1", 5.0).ask("/models")
    assert caught.value.status is None and caught.value.may_pass
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        refused("0.1 timed out", error=ServerError),
    ):
        OpenAIClient.at(f"http://127.0.0.1:{silent.getsockname()[1]}", 0.1).ask("/models")
