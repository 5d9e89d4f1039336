"""`headstart data --server`, against a small server on loopback that can be slow, overloaded, or
out of its mind."""

from __future__ import annotations

import base64
import itertools
import json
import signal
import threading
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers import build_tokenizer
from json_server import JsonServer
from messages import refused
from runs import rows_of, write_prompts, write_rows

from headstart.addons import openai_client
from headstart.addons.serve import answers as served
from headstart.addons.serve.answers import ask_servers
from headstart.addons.serve.options import AnswersConfig
from headstart.inference import tokenizer_provenance
from headstart.inference.text.chat_template import prompt_ids
from headstart.scripts.command_line import options
from headstart.stopping import Stopped, stop_on_signals
from headstart.train.data.chat_template import encode
from headstart.train.data.conversations import check_row, open_source, read_conversations


def completion(text, reason="stop"):
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "finish_reason": reason, "message": message}
    usage = {
        "completion_tokens": len(text.split()),
        "prompt_tokens": 3,
        "total_tokens": 3 + len(text.split()),
    }
    row = {
        "id": "x",
        "object": "chat.completion",
        "created": 0,
        "model": "m",
        "choices": [choice],
        "usage": usage,
    }
    return 200, row


class Server(JsonServer):
    """Answers with `reply(server, body)`, a status and a row, or text."""

    def __init__(self):
        super().__init__()
        self.asked, self.most, self.now = [], 0, 0
        self.dead = False
        self.reply = lambda server, body: completion("echo " + body["messages"][-1]["content"])

    def respond(self, path, body, headers):
        assert path == "/v1/chat/completions"
        if self.dead:
            return None
        with self.lock:
            self.asked.append(body)
            self.now += 1
            self.most = max(self.most, self.now)
        response = self.reply(self, body)
        with self.lock:
            self.now -= 1
        return response

    @property
    def contents(self):
        return [body["messages"][-1]["content"] for body in self.asked]


@pytest.fixture
def server():
    with Server() as running:
        yield running


@pytest.fixture
def config(server, tmp_path):
    prompts = write_prompts(tmp_path / "prompts.jsonl", [f"question {i}" for i in range(20)])
    return AnswersConfig(
        target="served-model",
        output=str(tmp_path / "out" / "made.jsonl"),
        prompts=prompts,
        server=server.url,
        batch_size=4,
        temperature=0.5,
        max_new_tokens=40,
        seed=100,
    )


def changed(config, **changes):
    return AnswersConfig(**{**vars(config), **changes})


def test_every_prompt_is_asked_once_with_the_settings(config, server, tokenizer):
    path = ask_servers(config)
    rows = rows_of(config.output)
    assert sorted(row["number"] for row in rows) == list(range(20))
    for row in rows:
        assert row["messages"] == [
            {"role": "user", "content": f"question {row['number']}"},
            {"role": "assistant", "content": f"echo question {row['number']}"},
        ]
        assert row["finished"] is True and row["tokens"] == 3 and row["temperature"] == 0.5
    assert len(server.asked) == 20
    for body in server.asked:
        number = int(body["messages"][0]["content"].split()[1])
        assert body == {
            "model": "served-model",
            "messages": body["messages"],
            "temperature": 0.5,
            "max_tokens": 40,
            "seed": 100 + number,
        }
    assert encode(
        read_conversations(str(path))[0], tokenizer, frozenset({tokenizer.eos_token_id}), 100
    )
    asked = len(server.asked)
    ask_servers(config)  # finished: nothing is asked again
    assert len(server.asked) == asked


def test_a_prompt_has_its_temperature_and_its_second_turn(config, server):
    rows = [
        {"prompt": "one", "temperature": 0.0, "kind": "short"},
        {"prompt": "two", "follow_up": "and then?"},
    ]
    write_rows(Path(config.prompts), rows)
    ask_servers(config)
    one, two = sorted(rows_of(config.output), key=lambda row: row["number"])
    assert (one["kind"], one["temperature"], len(one["messages"])) == ("short", 0.0, 2)
    assert (two["temperature"], two["tokens"]) == (0.5, 5)  # "echo two" and "echo and then?"
    assert [message["content"] for message in two["messages"]] == [
        "two",
        "echo two",
        "and then?",
        "echo and then?",
    ]
    assert sorted(body["temperature"] for body in server.asked) == [0.0, 0.5, 0.5]


@pytest.mark.parametrize(("thinking", "sent"), [(None, None), (False, {"enable_thinking": False})])
def test_thinking_is_for_the_servers_template(config, server, thinking, sent):
    ask_servers(changed(config, thinking=thinking, conversations=2))
    assert [body.get("chat_template_kwargs") for body in server.asked] == [sent, sent]


def test_an_overloaded_server_is_asked_again(config, server, monkeypatch):
    monkeypatch.setattr(openai_client, "FIRST_PAUSE", 0.01)
    tried, lock = Counter(), threading.Lock()

    def overloaded(server, body):
        content = body["messages"][0]["content"]
        with lock:
            tried[content] += 1
            if tried[content] < 3:
                return 503 if tried[content] == 1 else 429, {"error": {"message": "later"}}
        return completion("here you are")

    server.reply = overloaded
    ask_servers(config)
    assert len(rows_of(config.output)) == 20 and set(tried.values()) == {3}


def test_a_prompt_that_the_server_refuses_is_left_out_and_named(config, server, capsys):
    def choosy(server, body):
        if body["messages"][0]["content"] == "question 13":
            return 400, {"error": {"message": "too long"}}
        return completion("fine, then")

    server.reply = choosy
    ask_servers(config)
    assert {row["number"] for row in rows_of(config.output)} == set(range(20)) - {13}
    assert "prompt 13 is left out, the server refuses it" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((500, {"error": {"message": "broken"}}), "prompt 1 broken"),
        ((200, "hello?"), "prompt 'hello?' completion"),
        ((200, {"choices": []}), "prompt completion"),
        ((404, {"error": {"message": "no model served-model"}}), "prompt no model served-model"),
    ],
)
def test_a_server_that_fails_or_talks_nonsense_is_named_and_what_it_answered_stays(
    config, server, monkeypatch, answer, words
):
    monkeypatch.setattr(served, "RETRIES", 1)
    count, lock = [], threading.Lock()

    def breaks(server, body):
        with lock:
            count.append(0)
            if len(count) > 6:
                return answer
        return completion("one two three")

    server.reply = breaks
    with refused(words):
        ask_servers(config)
    kept = {row["number"] for row in rows_of(config.output)}
    assert len(kept) == 6
    server.reply, server.asked = lambda server, body: completion("one two three"), []
    ask_servers(config)
    assert {row["number"] for row in rows_of(config.output)} == set(range(20))
    assert not {f"question {number}" for number in kept} & set(server.contents)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"choices": []}, "choices '[]'"),
        ({"choices": "abc"}, "choices 'abc'"),
        ({"choices": [7]}, "choices"),
        ({"choices": None}, "choices"),
        ({"choices": [{"message": "hello"}]}, "message 'hello'"),
        ({"choices": [{"message": {"content": 5}}]}, "content '5'"),
        ({"choices": [{"message": {"content": ["a"]}}]}, "content"),
        ({"choices": [{"message": {"content": "a", "reasoning": {}}}]}, "reasoning"),
        ({"choices": [{"message": {"content": "a", "tool_calls": "f"}}]}, "tool_calls 'f'"),
        ({"choices": [{"message": {"content": "a"}, "token_ids": [1, "2"]}]}, "token_ids"),
        ({"choices": [{"message": {"content": "a"}, "token_ids": [-1]}]}, "token_ids"),
        ({"prompt_token_ids": "no"}, "prompt_token_ids 'no'"),
        ([1, 2], "JSON object"),
        (7, "JSON object"),
    ],
)
def test_a_malformed_answer_is_one_line_that_says_what_is_wrong(config, server, change, words):
    _, row = completion("fine")
    server.reply = lambda server, body: (
        200,
        {**row, **change} if isinstance(change, dict) else change,
    )
    with refused("prompt", words) as error:
        ask_servers(config)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("status", [400, 401, 500, 200])
def test_no_key_of_the_server_is_shown_or_written(config, server, monkeypatch, capsys, status):
    """Not even where the server repeats what it was sent."""
    monkeypatch.setattr(served, "RETRIES", 0)
    monkeypatch.setenv(openai_client.KEY, "sk-CANARY")
    basic = base64.b64encode(b"me:PASS/CANARY").decode()
    said = f"Bearer sk-CANARY Basic {basic} at PASS%2FCANARY PASS/CANARY \x1b[2J"
    server.reply = lambda *_: (status, {"error": {"message": said}} if status != 200 else said)
    config = changed(config, server=server.url.replace("://", "://me:PASS%2FCANARY@"))
    told = ""
    if status == 400:  # each prompt is refused
        ask_servers(config)
    else:
        with refused(f"{server.url} prompt") as caught:
            ask_servers(config)
        told = str(caught.value)
        assert caught.value.__cause__ is None
    told += capsys.readouterr().out
    assert "***" in told and "\x1b" not in told
    files = "".join(path.read_text() for path in Path(config.output).parent.iterdir())
    for secret in ("CANARY", basic):
        assert secret not in told and secret not in files


def test_stopped_it_goes_on_with_what_is_missing(config, server, monkeypatch):
    numbers, flags = itertools.count(1), []

    @contextmanager
    def noted():
        with stop_on_signals() as flag:
            flags.append(flag)
            yield flag

    def slow(server, body):
        number = next(numbers)
        if number == 9:
            signal.raise_signal(signal.SIGTERM)  # in this thread: it does not wake the main one
        # No answer is given until the process has noticed the signal.
        while number >= 9 and not flags[0].wanted:
            time.sleep(0.001)
        return completion("slow but sure")

    monkeypatch.setattr(served, "stop_on_signals", noted)
    server.reply = slow
    with refused("20 prompts", error=Stopped):
        ask_servers(config)
    before = {row["number"] for row in rows_of(config.output)}
    with Path(config.output).open("a", encoding="utf-8") as file:
        file.write('{"number": 3, "half')  # a kill in the middle of a line
    server.reply, server.asked = lambda server, body: completion("slow but sure"), []
    ask_servers(config)
    assert sorted(row["number"] for row in rows_of(config.output)) == list(range(20))
    assert len(server.asked) == 20 - len(before)


def test_answers_that_say_nothing_are_dropped(config, server):
    texts = {"question 1": "", "question 2": "ha " * 30, "question 3": None}

    def empty(server, body):
        content = body["messages"][0]["content"]
        status, row = completion("something else", "length")
        row["choices"][0]["message"]["content"] = texts.get(content, "something else")
        return status, row

    server.reply = empty
    ask_servers(config)
    assert {row["number"] for row in rows_of(config.output)} == set(range(20)) - {1, 2, 3}
    # cut off: the end token is the template's
    assert not any(row["finished"] for row in rows_of(config.output))


def test_a_file_of_other_options_is_refused(config):
    ask_servers(config)
    with refused("= 0.5 0.6"):
        ask_servers(changed(config, temperature=0.6))
    ask_servers(changed(config, batch_size=9))


def test_a_server_needs_prompts_and_takes_no_head(config):
    for change in ({"prompts": None}, {"head": "some/head"}):
        with refused("prompts head"):
            changed(config, **change)


@pytest.fixture
def served_tokenizer(tmp_path):
    """The tokenizer of the servers' model, in a folder."""
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    return tokenizer


@pytest.fixture
def with_tokenizer(config, served_tokenizer, tmp_path):
    return changed(config, tokenizer=str(tmp_path / "tokenizer"))


def with_ids(tokenizer, row, body, written, by="vllm", ended=True):
    """A reply with the token ids of prompt and answer."""
    prompt = prompt_ids(tokenizer, body["messages"])[0].tolist()
    tokens = tokenizer(written, add_special_tokens=False)["input_ids"]
    choice = row["choices"][0]
    choice["token_ids"] = tokens
    (row if by == "vllm" else choice)["prompt_token_ids"] = prompt
    return prompt, tokens


@pytest.mark.parametrize("by", ["vllm", "sglang"])
def test_token_ids_of_a_server_are_what_is_trained_on(with_tokenizer, server, served_tokenizer, by):
    eos = frozenset({served_tokenizer.eos_token_id})
    wrote = {}

    def reply(server, body):
        assert body["return_token_ids"] is True
        content = body["messages"][-1]["content"]
        finished = content != "question 3"
        status, row = completion(f"no, {content}", "stop" if finished else "length")
        written = f" no, {content} " + ("<|im_end|>" if finished else "")
        wrote[content] = with_ids(served_tokenizer, row, body, written, by)
        if content == "question 5":  # the end token is told apart
            row["choices"][0]["token_ids"] = wrote[content][1][:-1]
            row["choices"][0]["stop_reason" if by == "vllm" else "matched_stop"] = (
                served_tokenizer.eos_token_id
            )
        return status, row

    server.reply = reply
    path = ask_servers(with_tokenizer)
    assert len(rows_of(with_tokenizer.output)) == 20
    for where, row in open_source(str(path)).read():
        (example,) = encode(check_row(row, where), served_tokenizer, eos, 1000)
        prompt, tokens = wrote[row["messages"][0]["content"]]
        assert example.tokens == prompt + tokens
        assert example.loss_mask == [False] * len(prompt) + [True] * len(tokens)
        assert row["tokenizer"] == tokenizer_provenance(served_tokenizer)["tokenizer"]
        assert row["messages"][1]["content"] == f" no, {row['messages'][0]['content']} "
        assert row["finished"] == (row["number"] != 3)
        assert row["tokens"] == len(tokens)


def test_a_server_that_refuses_to_return_token_ids_is_asked_without(with_tokenizer, server):
    def strict(server, body):
        if "return_token_ids" in body:
            return 400, {
                "error": {"message": "Unrecognized request argument supplied: return_token_ids"}
            }
        return completion("fine, then")

    server.reply = strict
    ask_servers(with_tokenizer)
    assert len(rows_of(with_tokenizer.output)) == 20
    assert not any("input_ids" in row for row in rows_of(with_tokenizer.output))


def test_token_ids_of_another_tokenizer_are_refused(with_tokenizer, server, served_tokenizer):
    def reply(server, body):
        status, row = completion("one two")
        with_ids(served_tokenizer, row, body, "three<|im_end|>")
        return status, row

    server.reply = reply
    with refused("tokenizer 'one two'"):
        ask_servers(with_tokenizer)


def test_a_server_that_renders_prompts_otherwise_is_told_once(
    with_tokenizer, server, served_tokenizer, capsys
):
    def reply(server, body):
        status, row = completion("fine")
        with_ids(served_tokenizer, row, body, "fine<|im_end|>")
        row["prompt_token_ids"] = row["prompt_token_ids"][:-1]
        return status, row

    server.reply = reply
    ask_servers(with_tokenizer)
    assert capsys.readouterr().out.count("renders prompts otherwise than the chat template of") == 1
    assert len(rows_of(with_tokenizer.output)) == 20


def test_resumed_rows_keep_to_their_kind_and_their_tokenizer(
    with_tokenizer, server, served_tokenizer, tmp_path
):
    def reply(server, body):
        status, row = completion("fine")
        if gives:
            with_ids(served_tokenizer, row, body, "fine<|im_end|>")
        return status, row

    gives, server.reply = True, reply
    ask_servers(changed(with_tokenizer, conversations=5))
    build_tokenizer().save_pretrained(tmp_path / "other")
    settings = json.loads((tmp_path / "other" / "tokenizer.json").read_text())
    a, b = settings["model"]["vocab"]["a"], settings["model"]["vocab"]["b"]
    settings["model"]["vocab"] |= {"a": b, "b": a}
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(settings))
    with refused("tokenizer fingerprint"):
        ask_servers(changed(with_tokenizer, tokenizer=str(tmp_path / "other")))
    gives = False
    with refused("prompt token ids"):
        ask_servers(with_tokenizer)
    gives = True
    ask_servers(with_tokenizer)
    assert sorted(row["number"] for row in rows_of(with_tokenizer.output)) == list(range(20))
    assert all("input_ids" in row for row in rows_of(with_tokenizer.output))


def test_a_conversation_of_several_sequences_cut_in_between_is_answered_again(config, server):
    ask_servers(changed(config, conversations=2))
    lines = Path(config.output).read_text(encoding="utf-8").splitlines()
    first = {**json.loads(lines[0]), "sequence": 1, "sequences": 2}
    second = {**json.loads(lines[1]), "sequence": 1, "sequences": 2}
    whole = [first, {**first, "sequence": 2}]
    text = "".join(json.dumps(row) + "\n" for row in [*whole, second])
    Path(config.output).write_text(text, encoding="utf-8")
    server.asked = []
    ask_servers(changed(config, conversations=2))
    assert server.contents == [f"question {second['number']}"]
    assert [row["number"] for row in rows_of(config.output)] == [first["number"]] * 2 + [
        second["number"]
    ]


@pytest.mark.parametrize("tokens", [False, True])
def test_every_turn_is_answered_anew_on_the_new_history(
    with_tokenizer, server, served_tokenizer, tokens
):
    foreign = {"role": "assistant", "content": "foreign"}
    turns = [{"role": "user", "content": text} for text in ("one", "two", "three")]
    row = {
        "messages": [
            turns[0],
            foreign,
            turns[1],
            foreign,
            {"role": "tool", "content": "r"},
            foreign,
            turns[2],
        ]
    }
    write_rows(Path(with_tokenizer.prompts), [row])

    def reply(server, body):
        text = "echo " + body["messages"][-1]["content"]
        status, row = completion(text)
        if tokens:
            with_ids(served_tokenizer, row, body, text + "<|im_end|>")
        return status, row

    server.reply = reply
    ask_servers(with_tokenizer)
    answers = [{"role": "assistant", "content": f"echo {text}"} for text in ("one", "two")]
    assert [body["messages"] for body in server.asked] == [
        turns[:1],
        [turns[0], answers[0], turns[1]],
    ]
    (row,) = rows_of(with_tokenizer.output)
    assert row["messages"] == [turns[0], answers[0], turns[1], answers[1]]
    assert ("input_ids" in row) is tokens
    (example,) = encode(
        check_row(row, ""), served_tokenizer, frozenset({served_tokenizer.eos_token_id}), 1000
    )
    own = [token for token, is_own in zip(example.tokens, example.loss_mask, strict=True) if is_own]
    assert served_tokenizer.decode(own) == "echo one<|im_end|>echo two<|im_end|>"


def test_tools_are_sent_and_a_call_ends_the_conversation(config, server):
    rows = [
        {
            "prompt": "one",
            "follow_up": "more",
            "tools": [{"type": "function", "function": {"name": "f"}}],
        }
    ]
    write_rows(Path(config.prompts), rows)
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}]

    def reply(server, body):
        status, row = completion("", "tool_calls")
        row["choices"][0]["message"] = {"role": "assistant", "content": None, "tool_calls": calls}
        return status, row

    server.reply = reply
    ask_servers(config)
    (row,) = rows_of(config.output)
    assert server.asked[0]["tools"] == rows[0]["tools"] and len(server.asked) == 1
    assert row["messages"][1]["tool_calls"] == calls and row["finished"]
    calls[0]["function"]["arguments"] = "{"  # no JSON
    Path(config.output).unlink()
    ask_servers(config)
    assert rows_of(config.output) == []


THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant'"
    " %}<think>\n{{ m.get('reasoning_content', '') }}\n</think>\n\n{% endif %}{{ m['content']"
    " }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LOSES_REASONING = THINKING.replace(
    "<think>\n{{ m.get('reasoning_content', '') }}\n</think>\n\n", ""
)


def reasoned(content, reasoning, reason="stop", name="reasoning_content"):
    status, row = completion(content or "", reason)
    row["choices"][0]["message"] = {"role": "assistant", "content": content, name: reasoning}
    return status, row


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_that_a_server_tells_apart_is_trained_on(
    with_tokenizer, server, served_tokenizer, name
):
    served_tokenizer.chat_template = THINKING
    served_tokenizer.save_pretrained(with_tokenizer.tokenizer)
    replies = {
        "question 1": reasoned(None, "cut off inside", "length", name),
        "question 2": reasoned("yes", None, "stop", name),
    }
    server.reply = lambda server, body: replies.get(
        body["messages"][0]["content"], reasoned("yes", "hm, so", name=name)
    )
    ask_servers(changed(with_tokenizer, thinking=True, batch_size=1))
    rows = rows_of(with_tokenizer.output)
    # what was written there is not known
    assert {row["number"] for row in rows} == set(range(20)) - {1, 2}
    for row in rows:
        (example,) = encode(
            row, served_tokenizer, frozenset({served_tokenizer.eos_token_id}), 1000, True
        )
        own = [
            token for token, is_own in zip(example.tokens, example.loss_mask, strict=True) if is_own
        ]
        assert served_tokenizer.decode(own) == "<think>\nhm, so\n</think>\n\nyes<|im_end|>"


@pytest.mark.parametrize("options", [{"thinking": True}, {"template_kwargs": {"thinking": True}}])
def test_thinking_without_reasoning_is_refused_at_the_first_answer(with_tokenizer, server, options):
    with refused("prompt reasoning"):
        ask_servers(changed(with_tokenizer, **options))
    assert rows_of(with_tokenizer.output) == []


def test_reasoning_that_the_template_loses_is_refused(with_tokenizer, server, served_tokenizer):
    served_tokenizer.chat_template = LOSES_REASONING
    served_tokenizer.save_pretrained(with_tokenizer.tokenizer)
    server.reply = lambda server, body: reasoned("yes", "hm, so")
    with refused("reasoning_content 'hm, so'"):
        ask_servers(with_tokenizer)


def test_what_a_server_that_dies_was_asked_goes_to_the_others(config, server, monkeypatch, capsys):
    monkeypatch.setattr(served, "RETRIES", 1)
    with Server() as other:

        def dies(server, body):
            if len(server.asked) == 5:
                server.dead = True
            return completion("from the first")

        def slow(other, body):
            time.sleep(0.05)
            return completion("from the second")

        server.reply, other.reply = dies, slow
        ask_servers(changed(config, server=f"{server.url},{other.url}"))
    rows = rows_of(config.output)
    assert sorted(row["number"] for row in rows) == list(range(20))
    wrote = Counter(row["messages"][1]["content"] for row in rows)
    assert wrote["from the first"] >= 5 and wrote["from the second"] >= 8
    told = capsys.readouterr().out
    assert told.count("the other 1 servers take over") == 1 and server.url in told


def test_each_server_answers_a_batch_at_once(config, server):
    with Server() as other:
        everyone = threading.Barrier(8, timeout=20)

        def together(server, body):
            if len(server.asked) <= 4:
                everyone.wait()
            return completion("a b c")

        server.reply = other.reply = together
        ask_servers(changed(config, server=[server.url, other.url]))
        assert (server.most, other.most) == (4, 4)


def test_all_servers_dead_the_last_one_is_named_and_what_was_answered_stays(
    config, server, monkeypatch
):
    monkeypatch.setattr(served, "RETRIES", 0)

    def dies(server, body):
        if len(server.asked) == 5:
            server.dead = True
        return completion("a b c")

    server.reply = dies
    with refused("prompt"):
        ask_servers(changed(config, server=f"{server.url}, http://127.0.0.1:9/v1"))
    kept = {row["number"] for row in rows_of(config.output)}
    assert 1 <= len(kept) < 20
    server.dead, server.reply = False, lambda server, body: completion("a b c")
    ask_servers(config)
    assert {row["number"] for row in rows_of(config.output)} == set(range(20))


def test_an_answer_that_takes_too_long_is_given_up(config, server, monkeypatch):
    monkeypatch.setattr(served, "RETRIES", 0)

    def slow(server, body):
        time.sleep(1.6)
        return completion("a b c")

    server.reply = slow
    with refused("prompt timed out"):
        ask_servers(changed(config, request_seconds=1.0))


def test_a_file_of_the_model_in_this_process_is_not_continued_by_servers(config):
    ask_servers(changed(config, conversations=2))
    state = Path(config.output + ".state.json")
    state.write_text(
        json.dumps({**json.loads(state.read_text()), "progress": {}}), encoding="utf-8"
    )
    with refused("process"):
        ask_servers(config)


def names_of(config):
    return [server.name for server in served.servers_of(config)]


def test_servers_are_named_by_a_text_or_a_list_each_once(config, server, tmp_path):
    file = tmp_path / "options.yaml"
    file.write_text("server: [http://a/v1, 'http://b/v1']\n", encoding="utf-8")
    given = ["--target", "t", "--output", "o", "--prompts", "p"]
    listed = options(AnswersConfig, "data", None, [*given, "--config", str(file)])
    assert names_of(listed) == ["http://a/v1", "http://b/v1"]
    written = options(
        AnswersConfig, "data", None, [*given, "--server", "http://a/v1, http://b/v1,http://a/v1,"]
    )
    assert names_of(written) == ["http://a/v1", "http://b/v1"]
    for nothing in (" ,", []):
        with refused("URL"):
            ask_servers(changed(config, server=nothing))
    with refused("'x'"):
        changed(config, server=None, tokenizer="x")
