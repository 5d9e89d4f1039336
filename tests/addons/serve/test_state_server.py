"""States from a running server: a stand-in that answers as vLLM does, and everything that can be
wrong with one."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import time

import pytest
import torch
from json_server import JsonServer
from messages import refused
from runs import assert_same_weights, evaluations_of, log_of, random_examples
from safetensors.torch import save_file

from headstart.addons.openai_client import OpenAIClient
from headstart.addons.serve import state_server
from headstart.addons.serve.state_files import ServerLayers
from headstart.addons.serve.state_server import StateServer
from headstart.heads import build_head
from headstart.inference import Target
from headstart.inference.outer_modules import OuterTarget
from headstart.train.data.batches import collate
from headstart.train.features.online import online_features
from headstart.train.features.stored import StoredFeatures

GIVEN = [2, 1]
"""What leaves the last of two blocks, and the input of block 1."""


class Served(JsonServer):
    """A stand-in for vLLM's extract_hidden_states, which computes with the target itself."""

    def __init__(self, target, folder):
        super().__init__()
        self.target, self.folder = target, folder
        self.names = [target.name]
        self.requests = 0
        self.fail = 0  # this many requests
        self.seconds = 0.0
        self.change = lambda tensors: tensors
        self.states = True

    def respond(self, path, body, headers):
        if not body:
            return {"data": [{"id": name, "root": name} for name in self.names]}
        with self.lock:
            self.requests += 1
            failing = self.fail > 0
            self.fail -= failing
            number = self.requests
        time.sleep(self.seconds)
        if failing:
            return 503, {"error": "loading"}
        if len(body["prompt"]) > 500:
            return 400, {"error": "the prompt is too long"}
        if body["temperature"] > 0:
            return 400, {"error": "this stand-in draws nothing"}
        return self.answer(body, number)

    @torch.no_grad()
    def answer(self, body, number):
        with self.lock:
            tokens, logprobs = list(body["prompt"]), []
            for _ in range(body["max_tokens"]):
                logits_V = self.target.model(torch.tensor([tokens])).logits[0, -1].float()
                tokens.append(int(logits_V.argmax()))
                logprobs.append(float(logits_V.log_softmax(-1).max()))
            read = body["prompt"]
            if body["kv_transfer_params"]["include_output_tokens"]:
                read = tokens[:-1]
            streams = []
            hooks = [
                block.register_forward_hook(lambda *given: streams.append(first(given[-1])[0]))
                for block in self.target.modules.blocks
            ]
            self.target.model(torch.tensor([read]))
            for hook in hooks:
                hook.remove()
        states = torch.stack([streams[layer - 1] for layer in GIVEN], 1)
        path = self.folder / f"cmpl-{number}.safetensors"
        save_file(self.change({"token_ids": torch.tensor(read), "hidden_states": states}), path)
        new = {"token_ids": tokens[len(body["prompt"]) :], "logprobs": {"token_logprobs": logprobs}}
        found = {"choices": [new]}
        if self.states:
            found["kv_transfer_params"] = {"hidden_states_path": str(path)}
        return found


def first(output):
    return output[0] if isinstance(output, tuple) else output


@pytest.fixture
def served(taught, tmp_path):
    folder = tmp_path / "served"
    folder.mkdir()
    with Served(Target.load(str(taught), torch.float32, "cpu"), folder) as server:
        yield server


@pytest.fixture
def outer(taught):
    return OuterTarget.load(str(taught), torch.float32, "cpu")


@pytest.fixture
def examples():
    return random_examples(4, 258)


def source_of(served, outer, **options):
    options = {"model": None, "seconds": 20.0, "folder": served.folder, **options}
    return StateServer(served.url, ServerLayers.of(GIVEN, (0, -1), outer.info), **options)


def connect(served, outer, examples, **options):
    source_of(served, outer, **options).try_first(outer, examples[0])


def test_its_states_are_the_targets_own_and_its_files_are_removed(served, outer, examples):
    head = build_head("eagle3", {"feature_layers": [0, -1]}, outer.info)
    batch = collate(examples)
    source = StoredFeatures(outer, head, source_of(served, outer))
    source.source.try_first(outer, examples[0])
    for found in (source(batch), source(*source.read_ahead([batch], 0))):
        wanted = online_features(served.target, head, batch)
        for row, place in batch.places():
            for name in ("features_BTF", "last_BTD"):
                states_BTF, expected_BTF = getattr(found, name), getattr(wanted, name)
                torch.testing.assert_close(states_BTF[row, place], expected_BTF[row, place])
    assert served.requests == 1 + 2 * len(examples)
    assert list(served.folder.iterdir()) == []


def test_an_answer_and_its_states_are_those_of_greedy_decoding(served, outer, examples):
    source = source_of(served, outer)
    source.model = outer.name
    text_T, (states_TLD, _) = source.answer(examples[1], 5)
    prompt_T = torch.tensor([examples[1].prompt])
    wanted = served.target.model.generate(
        prompt_T, max_new_tokens=5, do_sample=False, eos_token_id=[], pad_token_id=0
    )
    assert text_T.tolist() == wanted[0].tolist()
    assert states_TLD.shape == (len(text_T), 2, 32)


def spoilt(name, change):
    """Changes a tensor of the server's files."""
    return {"change": lambda tensors: {**tensors, name: change(tensors[name]).contiguous()}}


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"names": ["other/model"]}, "'other/model'"),
        ({"states": False}, "--speculative-config"),
        (spoilt("hidden_states", lambda states: states.flip(1)), "features.server token"),
        (spoilt("token_ids", lambda tokens: (tokens + 1) % 258), "states tokens"),
    ],
)
def test_a_server_of_something_else_is_refused_by_name(served, outer, examples, fault, message):
    for name, value in fault.items():
        setattr(served, name, value)
    with refused(message):
        connect(served, outer, examples)


def test_a_server_of_other_weights_is_refused(served, outer, examples):
    served.target.model.lm_head.weight.data.neg_()
    with refused("features.server_layers"):
        connect(served, outer, examples)


def test_a_name_that_the_user_gives_is_looked_up(served, outer, examples):
    served.names = ["alias"]
    connect(served, outer, examples, model="alias")
    with refused("'alias' features.server_model 'base'"):
        connect(served, outer, examples, model="base")


def test_the_folder_may_have_another_path_here(served, outer, examples, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    with refused("features.server_folder"):
        connect(served, outer, examples, folder=tmp_path / "elsewhere")
    assert len(list(served.folder.iterdir())) == 1, "what is not read is not removed"
    connect(served, outer, examples, folder=served.folder)


def hostile(served, monkeypatch, change):
    """Have the server's answers changed by `change`, which gets and returns an answer."""
    answer = served.answer
    monkeypatch.setattr(served, "answer", lambda body, number: change(answer(body, number)))


def with_choice(**changes):
    return lambda reply: {**reply, "choices": [{**reply["choices"][0], **changes}]}


def with_path(named):
    return lambda reply: {**reply, "kv_transfer_params": {"hidden_states_path": named}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda reply: [1], "JSON object"),
        (lambda reply: {**reply, "choices": None}, "choices"),
        (lambda reply: {**reply, "choices": []}, "choices"),
        (lambda reply: {**reply, "choices": [3]}, "choices"),
        (lambda reply: {**reply, "kv_transfer_params": [1]}, "states"),
        (with_choice(token_ids=[]), "token_ids"),
        (with_choice(token_ids=[5] * 1000), "token_ids"),
        (with_choice(token_ids=[10**6]), "token_ids"),
        (with_choice(token_ids=[-1]), "token_ids"),
        (with_choice(token_ids=["5"]), "token_ids"),
        (with_choice(logprobs=None), "log-probabilities"),
        (with_choice(logprobs={"token_logprobs": [float("nan")]}), "log-probabilities"),
        (with_choice(logprobs={"token_logprobs": [-(10**400)]}), "log-probabilities"),
        (with_choice(logprobs={"token_logprobs": ["a"]}), "log-probabilities"),
        (with_path(5), "states"),
        (with_path("/etc/passwd"), "connector"),
        (with_path(".."), "connector"),
        (with_path("a\0.safetensors"), "connector"),
        (with_path("hs_3.safetensors"), "connector"),
        (with_path("missing.safetensors"), "see"),
        (with_path("link.safetensors"), "link"),
        (with_path("pipe.safetensors"), "pipe"),
        (with_path("locked.safetensors"), "pipe"),
        (with_path("other.safetensors"), "other tokens"),
        (with_path("0-d.safetensors"), "list token ids"),
        (with_path("text.safetensors"), "text.safetensors read"),
    ],
)
def test_a_hostile_server_is_refused_in_one_line_and_nothing_of_others_is_removed(
    served, outer, examples, monkeypatch, tmp_path, change, message
):
    folder = served.folder
    states = torch.zeros(3, 2, 32)
    tensors = {"token_ids": torch.tensor([1, 2, 3]), "hidden_states": states}
    (tmp_path / "thesis").write_text("precious")
    (folder / "link.safetensors").symlink_to(tmp_path / "thesis")
    (folder / "text.safetensors").write_text("precious")
    save_file(tensors, folder / "other.safetensors")
    save_file(tensors, folder / "hs_3.safetensors")
    save_file({**tensors, "token_ids": torch.tensor(3)}, folder / "0-d.safetensors")
    os.mkfifo(folder / "pipe.safetensors")
    os.mkfifo(folder / "locked.safetensors.lock")
    before = sorted(folder.iterdir())
    hostile(served, monkeypatch, change)
    with refused(message) as caught:
        connect(served, outer, examples)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000
    assert set(before) <= set(folder.iterdir()) and (tmp_path / "thesis").exists()


@pytest.mark.parametrize("models", [{}, {"data": None}, {"data": [1]}, {"data": [{"id": 5}]}, []])
def test_a_list_of_models_that_is_none_is_refused(served, outer, examples, monkeypatch, models):
    monkeypatch.setattr(OpenAIClient, "ask_once", lambda *_: json.dumps(models))
    with refused("features.server"):
        connect(served, outer, examples)


def test_a_lock_that_is_held_is_not_waited_for_without_end(served, outer, examples, monkeypatch):
    path = served.folder / "held.safetensors"
    lock = open(f"{path}.lock", "w")  # noqa: SIM115
    fcntl.flock(lock, fcntl.LOCK_EX)
    hostile(served, monkeypatch, with_path(str(path)))
    with refused(str(path)):
        connect(served, outer, examples, seconds=0.2)
    lock.close()


def test_what_passes_is_waited_for_and_what_does_not_is_told(served, outer, examples, monkeypatch):
    monkeypatch.setattr(state_server, "PAUSE", 0.01)
    served.fail = 3
    source = source_of(served, outer)
    source.model = outer.name
    states_TLD, _ = source.states(torch.tensor(examples[0].tokens), 0)
    assert len(states_TLD) == len(examples[0].tokens) and served.requests == 4
    with refused("conversation 7 features.server (400) long"):
        source.states(torch.zeros(600, dtype=torch.int64), 7)
    assert served.requests == 5, "a refusal is final"
    served.fail = 10**6
    source = dataclasses.replace(source, seconds=0.3)
    with refused("0.3 features.server_seconds 503 resumes"):
        source.states(torch.tensor(examples[0].tokens), 0)
    served.fail, served.seconds = 0, 2.0
    with refused("0.3 timed out"):
        source.states(torch.tensor(examples[0].tokens), 0)
    dead = dataclasses.replace(source, url="http://127.0.0.1:9/v1")
    with refused("0.3"):
        dead.states(torch.tensor(examples[0].tokens), 0)


def test_workers_fetch_states_while_steps_run_and_the_head_is_the_same(
    served_run, served, train_served, train_with_target, monkeypatch
):
    where = {"server": served.url, "server_folder": str(served.folder)}
    config = served_run(mode="served", server_layers=GIVEN, **where)
    online = train_with_target(config)
    monkeypatch.setattr(Target, "load", None)
    folder = train_served(config)
    assert_same_weights(folder, online, atol=2e-5)
    ours, theirs = evaluations_of(folder), evaluations_of(online)
    assert [row["eval"] for row in ours] == [row["eval"] for row in theirs]
    assert all(row["step_seconds"]["data"] > 0 for row in log_of(folder) if "loss" in row)
