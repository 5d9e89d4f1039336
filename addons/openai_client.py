"""Requests to an OpenAI-compatible server (vLLM, SGLang, llama.cpp), for the add-ons that ask one.

    client = OpenAIClient.at("http://HOST:8000/v1", seconds=600)
    served = client.ask_object("/models")
    text = client.ask("/completions", {"model": "NAME", "prompt": [1, 2, 3]}, retries=3)

User, password and query of the URL are sent, and shown nowhere: not even where the server repeats
them. An answer has a limit of bytes and of the time in which all of it must come.
"""

from __future__ import annotations

import base64
import json
import os
import random
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import Future
from dataclasses import dataclass, field
from http.client import HTTPException, IncompleteRead
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from ..files import parse_json, printable
from ..heads.checkpoints.public import public_url

KEY = "OPENAI_API_KEY"
"""Environment variable of the servers' key, if they ask for one."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 8.0
"""Seconds before a request is repeated: at first, doubled each time, and at most."""
LONGEST_WAIT = 60.0
"""Seconds for which a server may ask to be left alone (Retry-After)."""
LISTING_SECONDS = 30.0
"""Longest time for what a server answers without a model."""
LONGEST_ANSWER = 2**26
"""Bytes of a server's answer: a hundred times those of a long one with all its
log-probabilities."""
SHOWN = 200
"""Characters of an answer that an error shows."""
LONGEST_TOLD = 1000
"""Characters of its own words that an error shows."""
LONGEST_ERROR = 100_000
"""Bytes of a server's error that are read."""


class ServerError(ValueError):
    """A request that a server refused, or did not answer."""

    def __init__(
        self,
        told: str,
        status: int | None = None,
        wait: float | None = None,
        answered: bool = False,
    ) -> None:
        told = printable(told)
        if len(told) > LONGEST_TOLD:
            told = f"{told[:LONGEST_TOLD]} ..."
        super().__init__(told if status is None else f"status {status}: {told}")
        self.told = told
        """The server's words, cut where they are long and without what would control a terminal,
        or what kept it from answering."""
        self.status = status
        """HTTP status; None if no answer came."""
        self.wait = wait
        """Seconds after which the server wants to be asked again, if it says so."""
        self.answered = answered
        """Whether an answer came that cannot be used."""

    @property
    def may_pass(self) -> bool:
        """Whether the same request may be answered later."""
        if self.answered:
            return False
        return self.status is None or self.status in (408, 409, 429) or self.status >= 500


@dataclass(frozen=True)
class OpenAIClient:
    """A client of one server, by the server's address."""

    name: str
    """URL without user, password and query."""
    seconds: float
    """Longest time in which a whole answer must come."""
    headers: dict[str, str] = field(repr=False)
    query: str = field(repr=False)
    secrets: frozenset[str] = field(repr=False)

    @classmethod
    def at(cls, url: str, seconds: float, option: str = "server") -> OpenAIClient:
        """A client of the server at a URL; `option` is its name in errors.

        Raises:
            ValueError: not a URL of HTTP; the message shows nothing of it that may be secret.
        """
        wrong = f"{option} must be a URL such as http://HOST:8000/v1, with a number as its port"
        try:
            parts = urlsplit(url)
            has_host = parts.scheme in ("http", "https") and bool(parts.hostname)
            _ = parts.port  # raises if it is not a number
        except ValueError:
            raise ValueError(wrong) from None
        # A password with / or # in it ends the host too early: a name server would be asked for
        # what comes before.
        if not has_host or "@" in parts.path + parts.fragment:
            raise ValueError(wrong)
        headers = {"Content-Type": "application/json", "User-Agent": "headstart"}
        secrets = {value for _, value in parse_qsl(parts.query) if len(value) > 3}
        if os.environ.get(KEY):
            headers["Authorization"] = f"Bearer {os.environ[KEY]}"
            secrets.add(os.environ[KEY])
        if parts.username is not None:
            user = unquote(parts.username)
            password = unquote(parts.password or "")
            basic = base64.b64encode(f"{user}:{password}".encode()).decode()
            headers["Authorization"] = f"Basic {basic}"
            secrets |= {basic, password or user, parts.password or parts.username}
        secrets |= {json.dumps(secret)[1:-1] for secret in secrets}  # as a JSON text repeats them
        name = public_url(url).rstrip("/")
        return cls(name, seconds, headers, parts.query, frozenset(secrets - {""}))

    def ask(self, path: str, body: dict[str, Any] | None = None, retries: int = 0) -> str:
        """The text that the server answers to a POST, or without a body to a GET.

        Args:
            path: from the URL on, such as /completions.
            body: JSON to send.
            retries: repetitions after an error that may pass, with growing pauses.

        Raises:
            ServerError: the server refuses the request, or does not answer.
        """
        repeated = 0
        while True:
            try:
                return self.ask_once(path, body)
            except ServerError as error:
                if repeated == retries or not error.may_pass:
                    raise
                pause = min(FIRST_PAUSE * 2**repeated, LONGEST_PAUSE) * random.uniform(0.75, 1.0)
                time.sleep(pause if error.wait is None else error.wait)
                repeated += 1

    def ask_object(
        self, path: str, body: dict[str, Any] | None = None, retries: int = 0
    ) -> dict[str, Any]:
        """The JSON object that the server answers, as `ask` does.

        Raises:
            ServerError: as `ask`, or an answer of something else.
        """
        text = self.ask(path, body, retries)
        try:
            reply = parse_json(text, "its answer")
        except ValueError as error:
            raise ServerError(f"{error}: {text[:SHOWN]!r}", answered=True) from None
        if not isinstance(reply, dict):
            raise ServerError(f"its answer is not a JSON object: {text[:SHOWN]!r}", answered=True)
        return reply

    def ask_once(self, path: str, body: dict[str, Any] | None) -> str:
        """Send a request, once; return the body of the answer."""
        url = f"{self.name}{path}?{self.query}" if self.query else self.name + path
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, self.headers)
        seconds = self.seconds if body is not None else min(self.seconds, LISTING_SECONDS)
        answer: Future[bytes] = Future()

        def work() -> None:
            try:
                answer.set_result(self._sent(request, seconds))
            except BaseException as error:
                answer.set_exception(error)

        # In a thread, which is left behind as the time is over: the timeout of a socket holds
        # between two bytes, and nothing limits the time of a name server.
        threading.Thread(target=work, daemon=True).start()
        try:
            sent = answer.result(seconds)
        # UnicodeError: a host whose name no name server takes
        except (OSError, HTTPException, UnicodeError) as error:
            reason = getattr(error, "reason", error)
            words = " ".join(str(reason).split())[:SHOWN]
            told = f"cannot be reached: {words or type(reason).__name__}"
            if isinstance(reason, TimeoutError):
                told = f"did not answer in {seconds:g} seconds: timed out"
            raise ServerError(self.without_secrets(told)) from None
        if len(sent) > LONGEST_ANSWER:
            raise ServerError(
                f"answers with more than {LONGEST_ANSWER:,} bytes, which are not read",
                answered=True,
            )
        return self.without_secrets(sent.decode("utf-8", "replace"))

    def _sent(self, request: urllib.request.Request, seconds: float) -> bytes:
        """Return the answer to a request, of at most a byte more than it may have."""
        try:
            with _opener.open(request, timeout=seconds) as response:
                sent: bytes = response.read(LONGEST_ANSWER + 1)
                if len(sent) <= LONGEST_ANSWER and response.length:
                    raise IncompleteRead(sent, response.length)
                return sent
        except urllib.error.HTTPError as error:
            text = error.read(LONGEST_ERROR).decode("utf-8", "replace")
            told = self.without_secrets(_message(text))
            wait = _seconds(error.headers.get("Retry-After"))
            raise ServerError(told, error.code, wait) from None  # it holds what was sent

    def without_secrets(self, text: str) -> str:
        """A text with *** in the place of key, password and values of the query."""
        for secret in sorted(self.secrets, key=len, reverse=True):
            text = text.replace(secret, "***")
        return text


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects, with which urllib would send the key to another host."""

    def redirect_request(self, *_: Any) -> None:
        return None


_opener = urllib.request.build_opener(_NoRedirects)


def _message(text: str) -> str:
    """The words of an error: those of its JSON, if it is one of OpenAI's form, or all of it."""
    try:
        reply = parse_json(text, "error")
    except ValueError:
        return text
    error = reply.get("error", reply) if isinstance(reply, dict) else reply
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else text


def _seconds(value: str | None) -> float | None:
    """The time that Retry-After names, if it is a number of seconds and not too long."""
    try:
        seconds = float(value or "")
    except ValueError:
        return None
    return seconds if 0 < seconds <= LONGEST_WAIT else None
