"""Requests to an OpenAI-compatible server (vLLM, SGLang, llama.cpp), for the add-ons that ask one.

    server = OpenAIServer.at("http://HOST:8000/v1", seconds=600)
    served = json.loads(server.ask("/models"))
    text = server.ask("/completions", {"model": "NAME", "prompt": [1, 2, 3]}, retries=3)

User, password and query of the URL are sent, and shown nowhere: not even where the server repeats
them.
"""

from __future__ import annotations

import base64
import json
import os
import random
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from ..heads.checkpoints.public import public_url

KEY = "OPENAI_API_KEY"
"""Environment variable of the servers' key, if they ask for one."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 8.0
"""Seconds before a request is repeated: at first, doubled each time, and at most."""
LONGEST_WAIT = 60.0
"""Seconds for which a server may ask to be left alone (Retry-After)."""
LONGEST_ERROR = 100_000
"""Bytes of a server's error that are read."""


class ServerError(ValueError):
    """A request that a server refused, or did not answer."""

    def __init__(self, told: str, status: int | None = None, wait: float | None = None) -> None:
        super().__init__(told if status is None else f"status {status}: {told}")
        self.told = told
        """The server's words, or what kept it from answering."""
        self.status = status
        """HTTP status; None if no answer came."""
        self.wait = wait
        """Seconds after which the server wants to be asked again, if it says so."""

    @property
    def may_pass(self) -> bool:
        """Whether the same request may be answered later."""
        return self.status is None or self.status in (408, 409, 429) or self.status >= 500


@dataclass(frozen=True)
class OpenAIServer:
    """A server, by its address."""

    name: str
    """URL without user, password and query."""
    seconds: float
    """Longest time without a byte of an answer."""
    headers: dict[str, str] = field(repr=False)
    query: str = field(repr=False)
    secrets: frozenset[str] = field(repr=False)

    @classmethod
    def at(cls, url: str, seconds: float, option: str = "server") -> OpenAIServer:
        """A server at a URL; `option` is its name in errors.

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
        if not has_host:
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
                return self._once(path, body)
            except ServerError as error:
                if repeated == retries or not error.may_pass:
                    raise
                pause = min(FIRST_PAUSE * 2**repeated, LONGEST_PAUSE) * random.uniform(0.75, 1.0)
                time.sleep(pause if error.wait is None else error.wait)
                repeated += 1

    def _once(self, path: str, body: dict[str, Any] | None) -> str:
        url = f"{self.name}{path}?{self.query}" if self.query else self.name + path
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, self.headers)
        try:
            with _opener.open(request, timeout=self.seconds) as response:
                return self.without_secrets(response.read().decode("utf-8", "replace"))
        except urllib.error.HTTPError as error:
            text = error.read(LONGEST_ERROR).decode("utf-8", "replace")
            told = self.without_secrets(_message(text))
            wait = _seconds(error.headers.get("Retry-After"))
            raise ServerError(told, error.code, wait) from None  # it holds what was sent
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            told = f"cannot be reached: {reason or type(reason).__name__}"
            if isinstance(reason, TimeoutError):
                told = f"did not answer in {self.seconds:g} seconds: timed out"
            raise ServerError(self.without_secrets(told)) from None

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
        reply = json.loads(text)
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
