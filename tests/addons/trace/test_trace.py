"""The page of a trace as a file: inert text, its size, and whole or not at all."""

from __future__ import annotations

import errno
import html
import json
import os
import re
from pathlib import Path

import pytest
import torch
from helpers import build_model, other_model
from messages import refused

from headstart.addons.trace import Trace, trace
from headstart.addons.trace.page import shown_token, thinned
from headstart.inference import SpeculativeLM, Target
from headstart.inference.drafters.by_name import make_drafter

EVIL = (
    "</script><script>alert('1')</script><!-- {{TRACE_JSON}} {{TITLE}} /*TRACE_JS*/ \u2028 &amp;"
    " שלום 👩‍👩‍👧"
)


def embedded(page):
    """The JSON of a page, as a browser finds it: up to the first end of its element."""
    (found,) = re.findall(
        r'<script type="application/json" id="trace">(.*?)</script', page, re.DOTALL
    )
    return json.loads(found)


def traced(lm, ids, tokenizer, new_tokens):
    prompt = torch.tensor([ids])
    settings = {"eos_token_id": [], "pad_token_id": 0, "do_sample": False}
    settings |= {"max_new_tokens": new_tokens, "attention_mask": torch.ones_like(prompt)}
    return trace(lm, prompt, tokenizer=tokenizer, **settings)


@pytest.fixture(scope="module", name="trace")
def fixed_trace(tokenizer):
    target = Target(build_model().requires_grad_(False))
    lm = SpeculativeLM(target, make_drafter(target, target, "branch:2x1x1"))
    return traced(lm, tokenizer(EVIL)["input_ids"], tokenizer, 40)[1]


def test_html_in_a_prompt_stays_text(trace):
    page = trace.to_html()
    data = embedded(page)
    assert data["prompt"] == EVIL and data == thinned(trace.data)
    assert "alert('1')</script>" not in page and "\u2028" not in page
    title = re.search(r"<title>(.*?)</title>", page, re.DOTALL)[1]
    assert "<" not in title and "{{TITLE}}" in title and "{{TRACE_JSON}}" in title
    assert page.count('"version":1') == 1


def test_the_page_loads_nothing(trace):
    page = trace.to_html()
    assert "default-src 'none'" in page
    folder = Path(__file__).parents[3] / "addons" / "trace"
    files = [(folder / f"page.{ending}").read_text("utf-8") for ending in ("html", "css", "js")]
    for text in (page, *files):
        addresses = set(re.findall(r"https?://[^\s\"']*", text))
        assert addresses <= {"http://www.w3.org/2000/svg"}  # a namespace, which nobody opens
        assert not re.search(
            r"@import|innerHTML|insertAdjacentHTML|document\.write|fetch\(|XMLHttpRequest|url\(",
            text,
        )


def test_a_notebook_shows_the_page_in_a_frame(trace):
    shown = trace._repr_html_()
    assert shown.startswith("<iframe srcdoc=") and shown.count("<") == 2  # its own tag's alone
    assert html.unescape(re.search('srcdoc="(.*?)"', shown, re.DOTALL)[1]) == trace.to_html()


def many(trace, rounds, nodes):
    """A long trace of large trees, made of one round."""
    entry = {"v": 3, "u": 0, "q": 0.1234, "p": 0.01234, "s": -1}
    tree = [{**entry, "u": -1, "s": 1}, {**entry, "s": 1}, *[entry] * (nodes - 2)]
    pairs = [[number, 0.1234] for number in range(10)]
    found = {**trace.data["rounds"][0], "nodes": tree, "residual": pairs}
    found |= {name: {str(node): pairs for node in range(nodes)} for name in ("draft", "best")}
    each = {"v": 3, "p": " boat", "r": 0, "d": 1}
    return Trace({**trace.data, "rounds": [found] * rounds, "output": [each] * rounds})


@pytest.mark.parametrize(
    ("rounds", "nodes", "limit"), [(300, 16, 3e6), (300, 64, 3e6), (4096, 16, 12e6)]
)
def test_long_traces_have_pages_of_bounded_size(trace, rounds, nodes, limit):
    page = many(trace, rounds, nodes).to_html()
    assert len(page.encode()) < limit
    found = embedded(page)["rounds"]
    assert [len(each["nodes"]) for each in found] == [nodes] * rounds
    # the accepted path keeps its best tokens
    assert all({"0", "1"} <= set(each["best"]) for each in found)


def test_a_file_is_whole_or_what_it_was(trace, tmp_path, monkeypatch):
    path = tmp_path / "trace.html"
    assert trace.save(path) == path and path.read_text(encoding="utf-8") == trace.to_html()
    path.write_text("before")

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with refused("trace.html space", error=OSError):
        trace.save(path)
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("tokens", [400, pytest.param(4096, marks=pytest.mark.slow)])
def test_long_texts_are_traced(tokenizer, tokens):
    """With a page of bounded size, whose pieces are the text; later rounds keep less."""
    model = build_model(layers=1)
    model.config.max_position_embeddings = 8192
    target = Target(model.requires_grad_(False))
    lm = SpeculativeLM(target, make_drafter(target, other_model(target), tree="branch:2x1"))
    output, found = traced(lm, [1, 2, 3], tokenizer, tokens)
    data = found.data
    assert len(data["rounds"][0]["best"]) == 5 and len(data["rounds"][-1]["best"]) == 1
    assert len(data["output"]) == tokens and len(found.to_html().encode()) < 12e6
    text = "".join(each["p"] for each in data["output"])
    assert text == tokenizer.decode(output.sequences[0, 3:])


def test_a_token_by_itself_is_its_text_or_its_bytes(tokenizer):
    first, second = tokenizer("é")["input_ids"]
    assert (shown_token(tokenizer, first), shown_token(tokenizer, second)) == ("⟨C3⟩", "⟨A9⟩")
    assert shown_token(tokenizer, tokenizer(" ")["input_ids"][0]) == " "
    assert shown_token(tokenizer, tokenizer.eos_token_id) == "<|im_end|>"
    assert shown_token(tokenizer, 9999) == "⟨9999⟩"
