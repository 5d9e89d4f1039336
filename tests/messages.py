"""Errors and warnings by what they name, whatever their sentence: what was wrong, what was given,
what is valid."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def refused(
    *words: str, error: type[BaseException] | tuple[type[BaseException], ...] = ValueError
) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """The block raises an error whose message holds all of these words."""
    with pytest.raises(error) as caught:
        yield caught
    assert not lacking(str(caught.value), *words), str(caught.value)


@contextmanager
def warned(*words: str, category: type[Warning] = UserWarning) -> Iterator[pytest.WarningsRecorder]:
    """The block warns in this category, in a message that holds all of these words."""
    with pytest.warns(category) as record:
        yield record
    messages = [str(warning.message) for warning in record]
    assert any(not lacking(message, *words) for message in messages), messages


def lacking(message: str, *words: str) -> list[str]:
    """Those words that stand nowhere in a message, or only inside of longer ones."""
    return [word for word in " ".join(words).split() if not _holds(message, word)]


def _holds(message: str, word: str) -> bool:
    before = r"(?<!\w)" if re.match(r"\w", word) else ""
    after = r"(?!\w)" if re.search(r"\w$", word) else ""
    return re.search(before + re.escape(word) + after, message) is not None
