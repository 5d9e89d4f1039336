"""`headstart data --server`, against a small server on loopback that can be slow, overloaded, or
out of its mind."""

from __future__ import annotations

import itertools
import json
import signal
import threading
import time
from collections import Counter

import pytest
from helpers import build_tokenizer, changed_json
from json_server import JsonServer
from messages import lacking, refused
from runs import rows_of, write_prompts, write_rows

from headstart.addons.serve import answers
from headstart.addons.serve.answers import ask_servers
from headstart.addons.serve.options import AnswersConfig
from headstart.inference import tokenizer_provenance
from headstart.inference.text.chat_template import prompt_ids
from headstart.scripts.command_line import options
from headstart.stopping import Stopped, stop_on_signals
from headstart.train.data.chat_template import encode
from headstart.train.data.conversations import check_row

QUESTIONS = [f"question {i}" for i in range(20)]
EVERY_NUMBER = list(range(20))


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def completion(text, reason="stop", **more):
    """A chat completion; `more` are further fields of its message, or others."""
    choice = {"finish_reason": reason, "message": {**assistant(text), **more}}
    return {"choices": [choice], "usage": {"completion_tokens": len((text or "").split())}}


def echo(body):
    return completion("echo " + body["messages"][-1]["content"])


class AnsweringServer(JsonServer):
    """Answers with `reply(body)`, a row or a text, or one of these after a status."""

    def __init__(self):
        super().__init__()
        self.asked = []
        self.dies_after = None
        self.reply = echo
        self.now = 0
        self.most = 0  # requests at a time

    def respond(self, path, body, headers):
        assert path == "/v1/chat/completions"
        with self.lock:
            self.asked.append(body)
            if self.dies_after is not None and len(self.asked) > self.dies_after:
                return None
            self.now += 1
            self.most = max(self.most, self.now)
        reply = self.reply(body)
        with self.lock:
            self.now -= 1
        return reply

    @property
    def contents(self):
        return [body["messages"][-1]["content"] for body in self.asked]


@pytest.fixture
def server():
    with AnsweringServer() as server:
        yield server


class Asking:
    """The command, with its files: `ask(**options)` has questions answered and returns the rows."""

    def __init__(self, server, folder):
        self.prompts = folder / "prompts.jsonl"
        self.output = folder / "out" / "made.jsonl"
        self.options = {
            "target": "served-model",
            "output": str(self.output),
            "prompts": write_prompts(self.prompts, QUESTIONS),
            "server": server.url,
            "batch_size": 4,
            "temperature": 0.5,
            "max_new_tokens": 40,
            "seed": 100,
        }

    def __call__(self, **options):
        ask_servers(AnswersConfig(**{**self.options, **options}))
        return self.rows

    @property
    def rows(self):
        return sorted(rows_of(self.output), key=lambda row: row["number"])

    @property
    def numbers(self):
        return [row["number"] for row in self.rows]


@pytest.fixture
def ask(server, tmp_path):
    return Asking(server, tmp_path)


def test_every_prompt_is_asked_once_with_the_settings(ask, server):
    rows = ask()
    assert [row["number"] for row in rows] == EVERY_NUMBER
    for question, row in zip(QUESTIONS, rows, strict=True):
        assert row["messages"] == [user(question), assistant(f"echo {question}")]
        assert row["finished"] is True and row["tokens"] == 3 and row["temperature"] == 0.5
    assert sorted(server.contents) == sorted(QUESTIONS)
    for body in server.asked:
        number = QUESTIONS.index(body["messages"][0]["content"])
        assert body == {
            "model": "served-model",
            "messages": [user(QUESTIONS[number])],
            "temperature": 0.5,
            "max_tokens": 40,
            "seed": 100 + number,
        }
    ask()
    assert len(server.asked) == 20, "finished: nothing is asked again"


def test_a_prompt_has_its_temperature_and_its_second_turn(ask, server):
    short = {"prompt": "one", "temperature": 0.0, "kind": "short"}
    write_rows(ask.prompts, [short, {"prompt": "two", "follow_up": "and then?"}])
    one, two = ask()
    assert (one["kind"], one["temperature"], len(one["messages"])) == ("short", 0.0, 2)
    assert (two["temperature"], two["tokens"]) == (0.5, 5)  # "echo two" and "echo and then?"
    assert two["messages"] == [
        user("two"),
        assistant("echo two"),
        user("and then?"),
        assistant("echo and then?"),
    ]
    assert sorted(body["temperature"] for body in server.asked) == [0.0, 0.5, 0.5]


def test_thinking_is_for_the_servers_template(ask, server):
    ask(thinking=False, conversations=1)
    (body,) = server.asked
    assert body["chat_template_kwargs"] == {"enable_thinking": False}


def test_an_overloaded_server_is_asked_again(ask, server):
    statuses = {text: iter([503, 429, 200]) for text in QUESTIONS}

    def overloaded(body):
        return next(statuses[body["messages"][0]["content"]]), echo(body)

    server.reply = overloaded
    ask()
    assert ask.numbers == EVERY_NUMBER and len(server.asked) == 3 * 20


def test_a_prompt_that_the_server_refuses_is_left_out_and_named(ask, server, capsys):
    def choosy(body):
        if body["messages"][0]["content"] == "question 13":
            return 400, {"error": {"message": "too long"}}
        return echo(body)

    server.reply = choosy
    ask()
    assert ask.numbers == [number for number in EVERY_NUMBER if number != 13]
    assert not lacking(capsys.readouterr().out, "prompt 13 'too long'")


@pytest.mark.parametrize(
    ("status", "words"),
    [(500, "prompt broken"), (404, "prompt broken"), (200, "prompt 'broken' completion")],
)
def test_a_server_that_fails_is_named_and_what_it_answered_stays(ask, server, status, words):
    replies = itertools.count()
    server.reply = lambda body: echo(body) if next(replies) < 6 else (status, "broken")
    with refused(f"{server.url} {words}"):
        ask()
    answered = [f"question {number}" for number in ask.numbers]
    assert len(answered) == 6
    server.reply = echo
    server.asked.clear()
    ask()
    assert ask.numbers == EVERY_NUMBER
    assert sorted(server.contents + answered) == sorted(QUESTIONS)


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
    ],
)
def test_a_malformed_answer_is_one_line_that_says_what_is_wrong(ask, server, change, words):
    reply = {**completion("fine"), **change} if isinstance(change, dict) else change
    server.reply = lambda body: reply
    with refused("prompt", words) as caught:
        ask()
    assert "\n" not in str(caught.value)


def test_no_key_of_the_server_is_shown_or_written(ask, server, capsys):
    """Not even where the server repeats what it was sent."""
    with_password = server.url.replace("://", "://me:CANARY@")
    server.reply = lambda body: (400, {"error": {"message": "CANARY \x1b[2J"}})
    ask(server=with_password)  # each prompt is refused
    told = capsys.readouterr().out
    assert "***" in told and "\x1b" not in told
    server.reply = echo
    server.dies_after = len(server.asked) + 5
    with refused(f"{server.url} prompt") as caught:
        ask(server=with_password)
    assert caught.value.__cause__ is None
    told += str(caught.value) + capsys.readouterr().out
    told += "".join(path.read_text() for path in ask.output.parent.iterdir())
    assert "CANARY" not in told


def test_stopped_it_goes_on_with_what_is_missing(ask, server):
    numbers = itertools.count(1)

    def slow(body):
        number = next(numbers)
        if number == 9:
            signal.raise_signal(signal.SIGTERM)  # in this thread: it does not wake the main one
        while number >= 9 and not flag.wanted:  # no answer until the process has noticed it
            time.sleep(0.001)
        return echo(body)

    server.reply = slow
    with stop_on_signals() as flag, refused("20 prompts", error=Stopped):
        ask()
    before = len(ask.numbers)
    with ask.output.open("a", encoding="utf-8") as file:
        file.write('{"number": 3, "half')  # a kill in the middle of a line
    server.reply = echo
    server.asked.clear()
    ask()
    assert ask.numbers == EVERY_NUMBER
    assert 8 <= before == 20 - len(server.asked)


def test_answers_that_say_nothing_are_dropped(ask, server):
    nothing = {"question 1": "", "question 2": "ha " * 30, "question 3": None}

    def empty(body):
        text = nothing.get(body["messages"][0]["content"], "something else")
        return completion(text, "length")

    server.reply = empty
    rows = ask()
    assert ask.numbers == [number for number in EVERY_NUMBER if number not in (1, 2, 3)]
    # cut off: the end token is the template's
    assert not any(row["finished"] for row in rows)


def test_a_file_of_other_options_is_refused(ask):
    ask()
    with refused("temperature 0.5 0.6"):
        ask(temperature=0.6)
    ask(batch_size=9)


# Servers that return the token ids of prompt and answer.


@pytest.fixture
def served_tokenizer(ask, tmp_path):
    """The tokenizer of the servers' model, which the command is given."""
    tokenizer = build_tokenizer()
    ask.options["tokenizer"] = str(tmp_path / "tokenizer")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    return tokenizer


def with_ids(tokenizer, body, text, written, by="vllm", **more):
    """A completion with the token ids of prompt and answer, which wrote `written`."""
    reply = completion(text, **more)
    choice = reply["choices"][0]
    choice["token_ids"] = tokenizer(written, add_special_tokens=False)["input_ids"]
    owner = reply if by == "vllm" else choice
    owner["prompt_token_ids"] = prompt_ids(tokenizer, body["messages"])[0].tolist()
    return reply


def learned(tokenizer, row, thinking=None):
    """The text on which a row trains."""
    eos = frozenset({tokenizer.eos_token_id})
    (example,) = encode(check_row(row, ""), tokenizer, eos, 1000, thinking)
    pairs = zip(example.tokens, example.loss_mask, strict=True)
    return tokenizer.decode([token for token, is_own in pairs if is_own])


@pytest.mark.parametrize(("by", "stop"), [("vllm", "stop_reason"), ("sglang", "matched_stop")])
def test_token_ids_of_a_server_are_what_is_trained_on(ask, server, served_tokenizer, by, stop):
    cut_off = "question 3"
    told_apart = "question 5"  # the token that ended it

    def written(question):
        return f" no, {question} " + ("" if question == cut_off else "<|im_end|>")

    def reply(body):
        assert body["return_token_ids"] is True
        question = body["messages"][-1]["content"]
        reason = "length" if question == cut_off else "stop"
        row = with_ids(
            served_tokenizer, body, f"no, {question}", written(question), by, reason=reason
        )
        if question == told_apart:
            choice = row["choices"][0]
            choice[stop] = choice["token_ids"].pop()
        return row

    server.reply = reply
    eos = frozenset({served_tokenizer.eos_token_id})
    for question, row in zip(QUESTIONS, ask(), strict=True):
        prompt = prompt_ids(served_tokenizer, [user(question)])[0].tolist()
        tokens = served_tokenizer(written(question), add_special_tokens=False)["input_ids"]
        (example,) = encode(check_row(row, ""), served_tokenizer, eos, 1000)
        assert example.tokens == prompt + tokens
        assert example.loss_mask == [False] * len(prompt) + [True] * len(tokens)
        assert row["tokenizer"] == tokenizer_provenance(served_tokenizer)["tokenizer"]
        assert row["messages"] == [user(question), assistant(f" no, {question} ")]
        assert row["finished"] == (question != cut_off)
        assert row["tokens"] == len(tokens)


def test_a_server_that_refuses_to_return_token_ids_is_asked_without(ask, server, served_tokenizer):
    def strict(body):
        if "return_token_ids" in body:
            return 400, {"error": {"message": "Unrecognized argument: return_token_ids"}}
        return echo(body)

    server.reply = strict
    rows = ask()
    assert ask.numbers == EVERY_NUMBER
    assert not any("input_ids" in row for row in rows)


def test_token_ids_of_another_tokenizer_are_refused(ask, server, served_tokenizer):
    server.reply = lambda body: with_ids(served_tokenizer, body, "one two", "three<|im_end|>")
    with refused("tokenizer 'one two' 'three'"):
        ask()


def test_a_server_that_renders_prompts_otherwise_is_told_once(
    ask, server, served_tokenizer, capsys
):
    def reply(body):
        row = with_ids(served_tokenizer, body, "fine", "fine<|im_end|>")
        row["prompt_token_ids"].pop()
        return row

    server.reply = reply
    ask()
    assert ask.numbers == EVERY_NUMBER
    told = capsys.readouterr().out
    assert not lacking(told, "prompts chat template")
    assert told.count(f"{server.url} ") == 1


def test_resumed_rows_keep_to_their_kind_and_their_tokenizer(
    ask, server, served_tokenizer, tmp_path
):
    def reply(body):
        return with_ids(served_tokenizer, body, "fine", "fine<|im_end|>")

    server.reply = reply
    ask(conversations=5)
    build_tokenizer().save_pretrained(tmp_path / "other")
    with changed_json(tmp_path / "other" / "tokenizer.json") as settings:
        ids = settings["model"]["vocab"]
        ids["a"], ids["b"] = ids["b"], ids["a"]
    with refused("tokenizer fingerprint"):
        ask(tokenizer=str(tmp_path / "other"))
    server.reply = echo
    with refused("prompt token ids"):
        ask()
    server.reply = reply
    rows = ask()
    assert ask.numbers == EVERY_NUMBER
    assert all("input_ids" in row for row in rows)


def test_a_conversation_of_several_sequences_cut_in_between_is_answered_again(ask, server):
    cut, whole = ask(conversations=2)
    sequences = [{**whole, "sequence": number, "sequences": 2} for number in (1, 2)]
    lines = [*sequences, {**cut, "sequence": 1, "sequences": 2}]
    ask.output.write_text("".join(json.dumps(row) + "\n" for row in lines), encoding="utf-8")
    server.asked.clear()
    ask(conversations=2)
    assert server.contents == ["question 0"]
    assert ask.numbers == [0, 1, 1]


@pytest.mark.parametrize("tokens", [False, True])
def test_every_turn_is_answered_anew_on_the_new_history(ask, server, served_tokenizer, tokens):
    foreign = assistant("foreign")
    tool = {"role": "tool", "content": "r"}
    history = [user("one"), foreign, user("two"), foreign, tool, foreign, user("three")]
    write_rows(ask.prompts, [{"messages": history}])

    def reply(body):
        if not tokens:
            return echo(body)
        text = "echo " + body["messages"][-1]["content"]
        return with_ids(served_tokenizer, body, text, text + "<|im_end|>")

    server.reply = reply
    (row,) = ask()
    turns = [user("one"), assistant("echo one"), user("two"), assistant("echo two")]
    assert [body["messages"] for body in server.asked] == [turns[:1], turns[:3]]
    assert row["messages"] == turns
    assert ("input_ids" in row) is tokens
    assert learned(served_tokenizer, row) == "echo one<|im_end|>echo two<|im_end|>"


def test_tools_are_sent_and_a_call_ends_the_conversation(ask, server):
    tools = [{"type": "function", "function": {"name": "f"}}]
    write_rows(ask.prompts, [{"prompt": "one", "follow_up": "more", "tools": tools}])
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}]
    server.reply = lambda body: completion(None, "tool_calls", tool_calls=calls)
    (row,) = ask()
    (body,) = server.asked
    assert body["tools"] == tools
    assert row["messages"][1]["tool_calls"] == calls and row["finished"]
    calls[0]["function"]["arguments"] = "{"  # no JSON
    ask.output.unlink()
    assert ask() == []


# Reasoning that a server tells apart.

THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant'"
    " %}<think>\n{{ m.get('reasoning_content', '') }}\n</think>\n\n{% endif %}{{ m['content']"
    " }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LOSES_REASONING = THINKING.replace("{{ m.get('reasoning_content', '') }}", "")


def use_template(ask, tokenizer, template):
    tokenizer.chat_template = template
    tokenizer.save_pretrained(ask.options["tokenizer"])


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_that_a_server_tells_apart_is_trained_on(ask, server, served_tokenizer, name):
    use_template(ask, served_tokenizer, THINKING)
    replies = {
        "question 1": completion(None, "length", **{name: "cut off inside"}),
        "question 2": completion("yes", **{name: None}),
    }
    usual = completion("yes", **{name: "hm, so"})
    server.reply = lambda body: replies.get(body["messages"][0]["content"], usual)
    rows = ask(thinking=True, batch_size=1)
    # what was written there is not known
    assert ask.numbers == [number for number in EVERY_NUMBER if number not in (1, 2)]
    for row in rows:
        text = learned(served_tokenizer, row, thinking=True)
        assert text == "<think>\nhm, so\n</think>\n\nyes<|im_end|>"


@pytest.mark.parametrize("options", [{"thinking": True}, {"template_kwargs": {"thinking": True}}])
def test_thinking_without_reasoning_is_refused_at_the_first_answer(ask, served_tokenizer, options):
    with refused("prompt reasoning"):
        ask(**options)
    assert ask.rows == []


def test_reasoning_that_the_template_loses_is_refused(ask, server, served_tokenizer):
    use_template(ask, served_tokenizer, LOSES_REASONING)
    server.reply = lambda body: completion("yes", reasoning_content="hm, so")
    with refused("reasoning_content 'hm, so'"):
        ask()


# Several servers.


@pytest.fixture
def other_server():
    with AnsweringServer() as server:
        yield server


def test_what_a_server_that_dies_was_asked_goes_to_the_others(ask, server, other_server, capsys):
    def slow(body):
        time.sleep(0.05)
        return completion("from the second")

    server.dies_after = 5
    server.reply = lambda body: completion("from the first")
    other_server.reply = slow
    rows = ask(server=f"{server.url},{other_server.url}")
    assert ask.numbers == EVERY_NUMBER
    wrote = Counter(row["messages"][1]["content"] for row in rows)
    assert wrote == {"from the first": 5, "from the second": 15}
    told = capsys.readouterr().out
    assert told.count(server.url) == 1 and other_server.url not in told


def test_each_server_answers_a_batch_at_once(ask, server, other_server):
    everyone = threading.Barrier(8, timeout=20)

    def together(body):
        if body["messages"][0]["content"] in QUESTIONS[:16]:
            everyone.wait()
        return echo(body)

    server.reply = together
    other_server.reply = together
    ask(server=[server.url, other_server.url])
    assert (server.most, other_server.most) == (4, 4)


def test_all_servers_dead_the_last_one_is_named_and_what_was_answered_stays(ask, server):
    server.dies_after = 5
    with refused(f"prompt {server.url}"):
        ask(server=f"{server.url}, http://127.0.0.1:9/v1")
    assert len(ask.numbers) == 5
    server.dies_after = None
    ask()
    assert ask.numbers == EVERY_NUMBER


def test_a_file_of_the_model_in_this_process_is_not_continued_by_servers(ask):
    ask(conversations=2)
    with changed_json(answers.state_path(ask.output)) as state:
        state["progress"] = {}
    with refused("process"):
        ask()


@pytest.mark.parametrize(
    "given", [["--config", "options.yaml"], ["--server", "http://a/v1, http://b/v1,http://a/v1,"]]
)
def test_servers_are_named_by_a_text_or_a_list_each_once(tmp_path, monkeypatch, given):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "options.yaml").write_text("server: [http://a/v1, 'http://b/v1']\n")
    given = [*given, "--target", "t", "--output", "o", "--prompts", "p", "--request_seconds", "7"]
    servers = answers.servers_of(options(AnswersConfig, "data", None, given))
    assert [each.name for each in servers] == ["http://a/v1", "http://b/v1"]
    assert [each.server.seconds for each in servers] == [7, 7]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prompts": None}, "prompts None"),
        ({"head": "some/head"}, "head 'some/head'"),
        ({"server": " ,"}, "URL ' ,'"),
        ({"server": []}, "URL []"),
        ({"server": None, "tokenizer": "x"}, "server tokenizer 'x'"),
    ],
)
def test_a_server_needs_prompts_and_an_address_and_takes_no_head(ask, options, words):
    with refused(words):
        ask(**options)
