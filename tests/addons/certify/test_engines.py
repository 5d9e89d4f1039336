"""Servers as engines: what is read from their answers, and what is said of those that are
malformed."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from json_server import JsonServer
from messages import lacking, refused
from runs import write_prompts
from transformers import LogitsProcessorList

from headstart.addons.certify import engines
from headstart.addons.certify.reference import one_token_scores
from headstart.inference import Target, load_tokenizer
from headstart.scripts import certify as command
from headstart.scripts.certify import CertifyConfig, certify

NEW_TOKENS = 12
SECRET = "s3cr3t"


class Server(JsonServer):
    """Answers as the target does; `shown` says in which form, `changed` may spoil a reply."""

    def __init__(self, target, tokenizer):
        super().__init__()
        self.target, self.tokenizer = target, tokenizer
        self.shown = "token_ids"
        self.changed = lambda reply: reply
        self.asked, self.headers = [], []

    def respond(self, path, body, headers):
        self.asked.append(body)
        named = {name.lower(): value for name, value in headers.items()}
        self.headers.append(named | {"path": path})
        return self.reply(path, body)

    def reply(self, path, body):
        if path.startswith("/v1/models"):
            return {"data": [{"id": "served"}]}
        if "messages" in body:
            text = self.tokenizer.apply_chat_template(
                body["messages"], add_generation_prompt=True, tokenize=False
            )
            ids = self.tokenizer.encode(text, add_special_tokens=False)
        else:
            ids = body["prompt"]
        ids_BT = torch.tensor([ids] * body.get("n", 1))
        settings = {"do_sample": False}
        if body["temperature"]:
            settings = {"do_sample": True, "temperature": body["temperature"], "top_k": 0}
        with self.lock:
            output = self.target.model.generate(
                ids_BT,
                attention_mask=torch.ones_like(ids_BT),
                max_new_tokens=body["max_tokens"],
                **settings,
                return_dict_in_generate=True,
                output_logits=True,
            )
        rows = output.sequences[:, len(ids) :].tolist()
        log_p_BTV = torch.stack(output.logits, dim=1).log_softmax(-1)
        choices = [
            self.choice(index, row, log_p_BTV[index], "messages" in body)
            for index, row in enumerate(rows)
        ]
        return self.changed(
            {"choices": choices, "system_fingerprint": "fake-1", "prompt_token_ids": ids}
        )

    def choice(self, index, row, log_p_TV, chat):
        found = {"index": index, "finish_reason": "length"}
        text = self.tokenizer.decode(row)
        found |= {"message": {"content": text}} if chat else {"text": text}
        texts = [self.tokenizer.decode([token]) for token in row]
        values = [float(log_p_V[token]) for log_p_V, token in zip(log_p_TV, row, strict=True)]
        best = [{"best": float(log_p_V.max())} for log_p_V in log_p_TV]
        if self.shown in ("token_ids", "texts"):
            found["logprobs"] = {"tokens": texts, "token_logprobs": values, "top_logprobs": best}
        if self.shown == "token_ids":
            found["token_ids"] = row
        elif self.shown == "tokens":
            found["tokens"] = row
        elif self.shown == "ids in logprobs":
            rows = zip(row, texts, values, strict=True)
            found["logprobs"] = {
                "content": [{"id": one, "token": text, "logprob": p} for one, text, p in rows]
            }
        elif self.shown == "token_id:":
            names = [f"token_id:{token}" for token in row]
            found["logprobs"] = {"tokens": names, "token_logprobs": values, "top_logprobs": None}
        return found


@pytest.fixture(scope="module")
def speaking(talking):
    """Folder of a model that writes letters, so that its tokens have texts of their own."""
    return talking({"a": 0.4, "b": 0.3, "c": 0.2, "d": 0.1}, 0.5)


@pytest.fixture(scope="module")
def parts(speaking):
    folder = str(speaking)
    return Target.from_pretrained(folder, torch.float32, "cpu"), load_tokenizer(folder)


@pytest.fixture
def server(parts, monkeypatch):
    monkeypatch.setattr(engines, "RETRIES", 0)
    with Server(*parts) as running:
        yield running


@pytest.fixture
def config(speaking, tmp_path, server):
    prompts = write_prompts(tmp_path / "prompts.jsonl", ["count to 3", "count to 5"])
    return CertifyConfig(
        target=str(speaking),
        prompts=[prompts],
        server=server.url,
        model="served",
        dtype="float32",
        max_new_tokens=NEW_TOKENS,
        samples=0,
    )


FORMS = {
    "token_ids": "token ids",
    "tokens": "token ids",
    "ids in logprobs": "token ids",
    "token_id:": "token ids",
    "texts": "token texts",
    "text": "text",
}
"""How a server shows its tokens, and how they are known from that."""


@pytest.mark.parametrize("shown", FORMS)
@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_every_form_of_an_answer_is_read(config, server, shown, endpoint):
    server.shown = shown
    report = certify(replace(config, endpoint=endpoint))
    assert report["verdict"] == "identical", report["reasons"]
    assert report["engine"]["ids_by"] == [FORMS[shown]]
    assert report["engine"]["told"] == "fake-1"
    told = report["greedy"]["engine_tells"]
    if shown == "token_ids":
        assert told["log_prob_difference"]["largest"] < 1e-3
        assert told["tokens_that_it_calls_best"] == report["greedy"]["tokens"]
        assert told["tokens_with_a_best_one"] == report["greedy"]["tokens"]
    asked = server.asked[1]
    assert ("messages" in asked) == (endpoint == "chat") and asked["temperature"] == 0
    assert "seed" not in asked


def asked_otherwise(server, change):
    """Have the server answer a request with further fields, those of `change(body)`."""
    honest = server.reply
    server.reply = lambda path, body: honest(path, body and body | change(body))


def test_draws_are_tested_and_those_of_another_temperature_found(config, server):
    drawing = replace(config, samples=150, sample_tokens=2, temperature=1.5)
    report = certify(drawing)
    assert report["verdict"] == "identical" and report["sampling"]["tests"] > 0
    asked = server.asked[-1]
    assert (asked["n"], asked["max_tokens"], asked["top_k"], asked["min_p"]) == (150, 2, -1, 0.0)
    asked_otherwise(server, lambda body: {"temperature": body["temperature"] * 2})
    report = certify(drawing)
    assert report["verdict"] == "not lossless"
    assert not lacking(report["reasons"][0], "reject target's distribution")


def test_a_server_that_gives_one_draw_at_a_time_is_asked_again(config, server):
    asked_otherwise(server, lambda body: {"n": 1})
    certify(replace(config, samples=3, sample_prompts=1, seed=7))
    drawn = [(body["n"], body["seed"]) for body in server.asked if body.get("temperature")]
    assert drawn == [(3, 7), (2, 8), (1, 9)]


def test_draws_that_are_text_alone_are_not_tested(config, server):
    server.shown = "text"
    report = certify(replace(config, samples=20))
    assert report["sampling"] is None and report["verdict"] == "identical"
    assert not lacking(report["untested"][0], "token ids log-probabilities")


def test_a_server_of_another_model_is_not_lossless(config, server):
    """Two tokens are exchanged in its LM head."""
    weight_VD = server.target.model.lm_head.weight
    a, b = server.tokenizer.encode("ab", add_special_tokens=False)
    weight_VD.data[[a, b]] = weight_VD.data[[b, a]].clone()
    try:
        report = certify(config)
    finally:
        weight_VD.data[[a, b]] = weight_VD.data[[b, a]].clone()
    assert report["verdict"] == "not lossless"
    told = report["greedy"]["engine_tells"]
    assert told["log_prob_difference"]["largest"] > 0.1
    assert told["tokens_that_it_calls_best"] == report["greedy"]["tokens"]


def test_another_split_of_the_same_text_is_no_divergence():
    class Pairs:
        """A tokenizer with a token for a pair of letters, which it always takes."""

        def decode(self, ids):
            return "".join({256: "ab", 97: "a", 98: "b"}.get(one, "?") for one in ids)

        def encode(self, text, add_special_tokens):
            found = []
            while text:
                found.append(256 if text.startswith("ab") else ord(text[0]))
                text = text[2 if text.startswith("ab") else 1 :]
            return found

    class Says(torch.nn.Module):
        """A model that takes single letters: a, b, b."""

        device = torch.device("cpu")
        said = iter([97, 98, 98])

        def forward(self, input_ids, past_key_values, use_cache, logits_to_keep):
            logits = torch.zeros(1, 1, 258)
            logits[0, 0, next(self.said)] = 1.0
            return type("Output", (), {"logits": logits, "past_key_values": None})

    tokens, scores = one_token_scores(Says(), [1], [256, 98], LogitsProcessorList(), Pairs())
    assert tokens == [97, 98, 98] and scores.tokens_TK[:, 0].tolist() == tokens


MALFORMED = {
    "completion 'choices'": {"choices": []},
    "completion x": {"error": "x"},
    "completion 'text that is no JSON'": "text that is no JSON",
    "another model": {"choices": [{"token_ids": [5, 10**9]}]},
    "completion 'index'": {"choices": [{"index": 0, "text": None}]},
    "other tokens": {"choices": [{"text": "x"}], "prompt_token_ids": [1, 2]},
    "400 unknown field 'min_p'": (400, {"error": {"message": "unknown field 'min_p'"}}),
    "500": (500, "down"),
    "1,000 tokens 12": {"choices": [{"token_ids": [5] * 1000}]},
    "1,001 48": {"choices": [{"text": "x" * 1001}]},
    "token -1": {"choices": [{"token_ids": [5, -1]}]},
    "token 1180591620717411303424": {"choices": [{"token_ids": [2**70]}]},
}
"""Answers by the words that the error names."""


@pytest.mark.parametrize("told", MALFORMED)
def test_malformed_answers_give_one_line(config, server, told):
    honest = server.reply
    server.reply = lambda path, body: MALFORMED[told] if body else honest(path, body)
    with refused(told) as caught:
        certify(config)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize("log_prob", [float("nan"), -(10**400), float("-inf"), True])
def test_log_probabilities_that_are_no_numbers_are_left_out(log_prob):
    logprobs = {"token_logprobs": [log_prob], "top_logprobs": [{"a": -1.0}]}
    assert engines.log_probs_of(logprobs) == (None, None, None)


@pytest.mark.parametrize("best", [3, "x", True, {"a": 1}, [3], [[3]], None])
def test_best_log_probabilities_of_another_form_are_left_out(best):
    logprobs = {"token_logprobs": [-1.0], "top_logprobs": best}
    assert engines.log_probs_of(logprobs) == (None, [-1.0], None)


def test_what_a_server_says_of_itself_controls_no_terminal_and_no_page(config, server, tmp_path):
    told = "\x1b[2J\x1b]0;owned\x07\u202e<script>alert(1)</script>|\n# x" + "A" * 100_000
    server.changed = lambda reply: {**reply, "system_fingerprint": told}
    certify(replace(config, output=str(tmp_path / "c.json")))
    for path in (tmp_path / "c.json", tmp_path / "c.md"):
        text = path.read_text(encoding="utf-8")
        assert "alert(1)" in text and "<script" not in text
        assert not any(sign in text for sign in ("\x1b", "\u001b", "\u202e", "\\u202e"))
        assert len(text) < 20_000


def test_a_lone_surrogate_in_a_text_is_read_as_a_question_mark(config, server):
    server.shown = "text"
    server.changed = lambda reply: {**reply, "choices": [{"text": "a \ud800 b", "index": 0}]}
    certify(replace(config, samples=0))


def test_another_name_is_refused_with_those_that_are_served(config):
    with refused("'other'"):
        certify(replace(config, model="other"))


def test_a_server_that_is_not_there_is_told_before_the_model_is_loaded(config, monkeypatch):
    monkeypatch.setattr(Target, "from_pretrained", lambda *_: pytest.fail("loaded"))
    with refused("http://127.0.0.1:9/v1"):
        certify(replace(config, server="http://127.0.0.1:9/v1"))


def test_secrets_of_a_url_are_sent_and_shown_nowhere(config, server, tmp_path, capsys):
    url = f"http://user:{SECRET}@127.0.0.1:{server.port}/v1?key={SECRET}2"
    report = certify(replace(config, server=url, output=str(tmp_path / "c.json")))
    assert all(headers["authorization"].startswith("Basic ") for headers in server.headers)
    assert all(f"key={SECRET}2" in headers["path"] for headers in server.headers)
    said = capsys.readouterr()
    pages = (tmp_path / "c.json").read_text() + (tmp_path / "c.md").read_text()
    assert SECRET not in json.dumps(report) + pages + said.out + said.err
    server.reply = lambda path, body: (401, {"error": {"message": "no"}})
    with refused("401") as caught:
        certify(replace(config, server=url))
    assert SECRET not in str(caught.value)


def test_the_exit_status_is_the_verdict(monkeypatch):
    def status(verdict):
        monkeypatch.setattr(command, "certify", lambda config: {"verdict": verdict})
        try:
            command.main(["--target", "t", "--prompts", "p.jsonl"])
        except SystemExit as end:
            return end.code
        return 0

    assert status("identical") == status("identical up to ties") == 0
    assert status("not lossless") == 1
