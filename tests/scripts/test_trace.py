"""`headstart trace`: its page, its report, and what it refuses before the long work."""

from __future__ import annotations

import os

import pytest
from messages import refused
from runs import write_prompts

from headstart.scripts.trace import NODES, TraceConfig, trace_prompts

PROMPT = "</script><script>alert(1)</script> one two one two"


@pytest.fixture
def page(tmp_path):
    return tmp_path / "trace.html"


@pytest.fixture
def trace_config(target_folder, page):
    def make(**changes):
        prompt = "" if "prompts" in changes else PROMPT
        options = {"prompt": prompt, "drafter": "prompt-lookup", "max_new_tokens": 8}
        options |= {"target": str(target_folder), "output": str(page)}
        return TraceConfig(**(options | changes))

    return make


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.8}, {"drafter": "model:{target}", "tree": "branch:2x2"}]
)
def test_the_page_shows_the_prompt_beside_plain_decoding(
    trace_config, target_folder, page, tmp_path, options
):
    drafter = options.get("drafter", "prompt-lookup").format(target=target_folder)
    (trace,) = trace_prompts(trace_config(**options | {"drafter": drafter}))
    trace.save(tmp_path / "same.html")
    assert page.read_bytes() == (tmp_path / "same.html").read_bytes()
    assert PROMPT in trace.data["prompt"]
    assert len(trace.data["output"]) == 8
    assert not any(shown["fallback"] for shown in trace.data["rounds"])
    plain = trace.data["plain"]
    assert plain["same_text"]
    assert plain["ms_per_token"] > 0
    assert plain["tokens_per_second"] == pytest.approx(1000 / plain["ms_per_token"])


def test_a_head_drafts_a_tree_in_every_round(trace_config, head_folder):
    with_head = {"drafter": None, "head": str(head_folder)}
    (trace,) = trace_prompts(trace_config(**with_head))
    assert all(len(shown["nodes"]) == NODES for shown in trace.data["rounds"])
    assert trace.data["head"] == str(head_folder)
    assert trace.data["drafter"].startswith("DynamicTree")
    (chain,) = trace_prompts(trace_config(**with_head, tree="chain:2"))
    assert all(len(shown["nodes"]) == 3 for shown in chain.data["rounds"])


def test_a_report_of_several_prompts(trace_config, target_folder, page, tmp_path, capsys):
    prompts = write_prompts(tmp_path / "p.jsonl", [f"{word} [/red] <b> " * 3 for word in "abc"])
    options = {"prompts": [prompts], "limit": 2, "report": True}
    traces = trace_prompts(trace_config(**options, drafter=f"model:{target_folder}"))
    assert len(traces) == 2
    text = page.read_text(encoding="utf-8")
    assert text.count("data:image/png;base64,") == 2
    assert "&lt;b&gt;" in text
    assert "<b>" not in text
    shown = capsys.readouterr().out
    for title in ("Rejected by kind of token", "By depth", "Calibration of the draft", "By prompt"):
        assert title in text
        assert title in shown


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"drafter": None}, "head drafter"),
        ({"prompt": ""}, "prompt prompts"),
        ({"prompts": ["p.jsonl"]}, "--report"),
        ({"top_p": 0.0}, "top_p 0"),
        ({"max_new_tokens": 0}, "max_new_tokens 1"),
    ],
)
def test_options_that_show_nothing_are_refused(trace_config, options, words):
    with refused(words):
        trace_config(**options)


@pytest.mark.parametrize(
    ("output", "words"), [(".", "'.' folder"), ("nowhere/trace.html", "'nowhere' 'trace.html'")]
)
def test_a_place_that_is_none_is_refused_before_anything_is_loaded(trace_config, output, words):
    with refused(words):
        trace_prompts(trace_config(target="/no/model", output=output))


def test_a_folder_that_cannot_be_written_is_refused(trace_config, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    with refused(f"folder '{tmp_path}'"):
        trace_prompts(trace_config(target="/no/model"))
