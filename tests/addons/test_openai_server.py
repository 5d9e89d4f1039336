"""Requests to a server: what is repeated, what is refused, and that no secret of its address is
shown."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from headstart.addons import openai_server
from headstart.addons.openai_server import KEY, OpenAIServer, ServerError

SECRET = "s3cr3t"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply()

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.reply()

    def reply(self):
        self.server.seen.append((self.command, self.path, dict(self.headers)))
        status, text, headers = self.server.replies.pop(0)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def running(monkeypatch):
    monkeypatch.setattr(openai_server, "FIRST_PAUSE", 0.001)
    monkeypatch.delenv(KEY, raising=False)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.replies, server.seen = [], []
        server.url = f"http://127.0.0.1:{server.server_port}/v1"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def replies(running, *statuses, text="", **headers):
    running.replies += [(status, text, headers) for status in statuses]


@pytest.mark.parametrize(
    "url", ["", "localhost", "ftp://h/v1", f"http://u:{SECRET}@", f"http://u:{SECRET}@h:port/v1"]
)
def test_what_is_no_url_is_refused_without_being_shown(url):
    with pytest.raises(ValueError, match=r"features\.server must be a URL") as caught:
        OpenAIServer.at(url, 1.0, "features.server")
    assert SECRET not in str(caught.value)


def test_a_url_keeps_its_port_and_path():
    server = OpenAIServer.at("https://u:p%40w@host:81/some/v1/?a=b", 1.0)
    assert (server.name, server.query) == ("https://host:81/some/v1", "a=b")
    assert "p@w" not in repr(server) and "p%40w" not in repr(server)
    assert OpenAIServer.at("http://[::1]:8000/v1", 1.0).name == "http://[::1]:8000/v1"


def test_user_and_query_are_sent_and_a_key_where_there_is_no_user(running, monkeypatch):
    monkeypatch.setenv(KEY, "sk-key")
    replies(running, 200, 200, text="fine")
    assert OpenAIServer.at(running.url, 5.0).ask("/models") == "fine"
    named = running.url.replace("://", "://me:pass%40word@") + "?version=12345"
    OpenAIServer.at(named, 5.0).ask("/completions", {"prompt": [1]})
    (method, path, headers), (other_method, other_path, other_headers) = running.seen
    assert (method, path, headers["Authorization"]) == ("GET", "/v1/models", "Bearer sk-key")
    assert (other_method, other_path) == ("POST", "/v1/completions?version=12345")
    assert other_headers["Authorization"] == "Basic bWU6cGFzc0B3b3Jk"
    assert other_headers["Content-Type"] == "application/json"


def test_what_passes_is_asked_again_and_what_does_not_is_not(running):
    server = OpenAIServer.at(running.url, 5.0)
    replies(running, 503, 429, 200)
    assert server.ask("/models", retries=2) == ""
    assert len(running.seen) == 3
    replies(running, 503, 503)
    with pytest.raises(ServerError, match="status 503") as caught:
        server.ask("/models", retries=1)
    assert caught.value.may_pass
    replies(running, 404, text=json.dumps({"error": {"message": "no such model"}}))
    with pytest.raises(ServerError, match=r"^status 404: no such model$") as caught:
        server.ask("/models", retries=5)
    assert not caught.value.may_pass and len(running.seen) == 6


def test_a_server_says_how_long_it_wants_to_be_left_alone(running):
    replies(running, 429, **{"Retry-After": "0.4"})
    replies(running, 200)
    began = time.monotonic()
    OpenAIServer.at(running.url, 5.0).ask("/models", retries=1)
    assert time.monotonic() - began >= 0.4


def test_a_redirect_is_not_followed_which_would_send_the_key_elsewhere(running):
    replies(running, 302, 200, Location="http://127.0.0.1:9/")
    with pytest.raises(ServerError, match="status 302"):
        OpenAIServer.at(running.url, 5.0).ask("/models")


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
    server = OpenAIServer.at(url, 5.0)
    try:
        told = server.ask("/models")
    except ServerError as error:
        told = str(error)
    assert "***" in told
    for secret in ("CANARY", "bWU6cMOkIkNBTkFSWQ"):
        assert secret not in told


def test_no_answer_is_told_as_one(running):
    with pytest.raises(ServerError, match=r"cannot be reached: .*refused") as caught:
        OpenAIServer.at("http://127.0.0.1:9/v1", 5.0).ask("/models")
    assert caught.value.status is None and caught.value.may_pass
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as silent:
        url = f"http://127.0.0.1:{silent.server_port}"
        with pytest.raises(ServerError, match=r"did not answer in 0\.1 seconds: timed out"):
            OpenAIServer.at(url, 0.1).ask("/models")
