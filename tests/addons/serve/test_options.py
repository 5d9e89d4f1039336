"""The commands pass servers to the core: which function gets what, from which options."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import INFO

from headstart.addons.serve import answers
from headstart.addons.serve.options import ServedTrainConfig
from headstart.addons.serve.state_server import StateServer
from headstart.scripts import data, features, train
from headstart.train import loop

RUN = ["--target", "t", "--output", "o", "--data.sources", "[d.jsonl]"]
RUN += ["--features.server_layers", "[1,12]"]
SERVER = ["--features.server", "http://user:secret@host:8000/v1"]
SERVER += ["--features.server_seconds", "7", "--features.server_folder", "/shared/states"]


@pytest.fixture
def called(monkeypatch):
    """Arguments of the core's functions, by the command."""
    calls = {}
    monkeypatch.setattr(
        loop, "train", lambda config, source=None: calls.update(train=(config, source))
    )
    monkeypatch.setattr(
        features, "precompute", lambda config, source=None: calls.update(features=(config, source))
    )
    monkeypatch.setattr(answers, "ask_servers", lambda config: calls.update(data=config))
    return calls


def test_a_running_server_is_what_training_and_the_features_command_take_states_from(called):
    train.main([*RUN, *SERVER, "--features.mode", "served"])
    features.main([*RUN, *SERVER, "--features.mode", "stored"])
    for command in ("train", "features"):
        config, source = called[command]
        assert isinstance(config, ServedTrainConfig)
        server = source(INFO, (0, -1))
        assert isinstance(server, StateServer)
        assert (server.seconds, server.server.name) == (7.0, "http://host:8000/v1")
        assert server.layers == (0, -1)
        assert server.folder == Path("/shared/states")


def test_states_that_a_server_has_written_to_a_folder_are_read_there(called):
    train.main([*RUN, *SERVER, "--features.mode", "stored"])
    config, source = called["train"]
    assert source is None and config.features.server_seconds == 7


def test_answers_are_asked_of_servers_where_some_are_named(called):
    given = ["--target", "t", "--output", "o", "--prompts", "p.jsonl"]
    data.main([*given, "--server", "http://a/v1,http://b/v1"])
    assert called["data"].server == "http://a/v1,http://b/v1"
