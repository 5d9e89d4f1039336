"""Fixtures of the tests of add-ons."""

from __future__ import annotations

import pytest

from headstart.addons import openai_client


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests to a server are repeated at once, and with no key of the user."""
    monkeypatch.setattr(openai_client, "FIRST_PAUSE", 0.001)
    monkeypatch.delenv(openai_client.KEY, raising=False)
