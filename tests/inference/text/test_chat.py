"""Chat: what is streamed is what is recorded, and every turn is answered as a fresh call would."""

from __future__ import annotations

import pytest
from helpers import build_tokenizer, calls_of, cleaning
from messages import refused

from headstart.inference import SpeculativeLM

PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
)
START = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TEMPLATES = {
    "as it is": PLAIN + START,
    "stripped": PLAIN.replace("m['content']", "m['content'] | trim") + START,
    "past answers dropped": (
        PLAIN.replace(
            "{{ m['content'] }}", "{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}"
        )
        + START
    ),
    "past answers cut": PLAIN.replace("m['content']", "m['content'][:3]") + START,
    "the last message first": "{{ messages[-1]['content'] }}: " + PLAIN + START,
    "only the last message": "{{ messages[-1]['content'] }}" + START,
    "a start that depends on the turn": (
        PLAIN + START.replace("assistant", "assistant {{ messages | length }}")
    ),
}

SETTINGS = {"max_new_tokens": 60, "do_sample": False, "eos_token_id": [], "pad_token_id": 257}


@pytest.mark.parametrize(
    ("name", "cleans"),
    [("as it is", False), ("past answers cut", False), *((name, True) for name in TEMPLATES)],
)
def test_every_turn_is_answered_as_by_a_fresh_call(tiny_target, monkeypatch, name, cleans):
    target = tiny_target()
    tokenizer = build_tokenizer()
    if cleans:
        tokenizer = cleaning(tokenizer)
    tokenizer.chat_template = TEMPLATES[name]
    lm = SpeculativeLM.from_pretrained(target, drafter="prompt-lookup", adaptive=False)
    settings = SETTINGS | {"max_new_tokens": 24, "eos_token_id": [257, 10]}
    chat = lm.chat(tokenizer, "be brief", **settings)
    read = calls_of(monkeypatch, target.engine, "read_chunk")
    for turn in range(4):
        read.clear()
        pieces = list(chat.stream(f"message {turn} . ok ?"))
        answer = chat.messages[-1]["content"]
        assert "".join(pieces) == answer and all(pieces)
        prompt = tokenizer.apply_chat_template(
            chat.messages[:-1], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        fresh = target.model.generate(**prompt, **settings)[0, prompt["input_ids"].shape[1] :]
        assert answer == tokenizer.decode(fresh, skip_special_tokens=True)
    assert len(chat.messages) == 9
    if name == "as it is":  # what earlier turns have read is not read again
        assert 0 < sum(chunk.shape[1] for chunk, *_ in read) < prompt["input_ids"].shape[1] / 2


def test_a_tokenizer_without_a_template_is_refused(tiny_target):
    with refused("chat template"):
        SpeculativeLM(tiny_target()).chat(build_tokenizer(None))


def test_an_answer_that_is_left_is_not_recorded(tiny_target):
    lm = SpeculativeLM(tiny_target())
    answer = lm.chat(build_tokenizer(), **SETTINGS).say("hello")
    left = lm.chat(build_tokenizer(), **SETTINGS)
    stream = left.stream("hello")
    next(stream)
    stream.close()
    assert left.messages == []
    assert left.say("hello") == answer


@pytest.mark.parametrize("where", ["call", "settings", "model"])
def test_a_stop_string_ends_an_answer(tiny_target, where):
    target = tiny_target()
    lm = SpeculativeLM(target)
    answer = lm.chat(build_tokenizer(), **SETTINGS).say("hello")
    letters = [letter for letter in answer[4:-2] if letter.isascii()]
    stop = next(letter for letter in letters if answer.index(letter) >= 4)
    stops = {place: {} for place in ("call", "settings", "model")}
    stops[where] = {"stop_strings": [stop]}
    target.model.generation_config.update(**stops["model"])
    chat = lm.chat(build_tokenizer(), **SETTINGS, **stops["settings"])
    assert chat.say("hello", **stops["call"]) == answer[: answer.index(stop) + 1]


def test_a_turn_ends_where_the_tokenizer_or_the_model_says_so(tiny_target, monkeypatch):
    """Unless the caller says otherwise."""
    end = 11
    tokenizer = build_tokenizer()
    tokenizer.chat_template = TEMPLATES["as it is"]
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
    lm = SpeculativeLM.from_pretrained(tiny_target(), drafter="prompt-lookup", adaptive=False)
    lm.target.model.generation_config.eos_token_id = 1
    settings = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 257}
    stream = lm.stream
    streamed = []

    def watched(*inputs, **options):
        for tokens in stream(*inputs, **options):
            streamed.extend(tokens)
            yield tokens

    monkeypatch.setattr(lm, "stream", watched)
    lm.chat(tokenizer, **settings, eos_token_id=[]).say("hello")
    written = list(streamed)
    assert len(written) == 24 and end in written[:-1]
    streamed.clear()
    lm.chat(tokenizer, **settings).say("hello")
    assert streamed == written[: written.index(end) + 1]
