"""`headstart trace`: its page, its report, and what it refuses before the long work."""

from __future__ import annotations

import json
import os
import re

import pytest
from messages import refused

from headstart.scripts import trace as command
from headstart.scripts.trace import TraceConfig, trace_prompts

PROMPT = "</script><script>alert(1)</script> one two one two"


@pytest.fixture
def config(target_folder, tmp_path):
    def make(**options):
        shown = {"prompt": PROMPT} if "prompts" not in options else {}
        given = {
            "drafter": "prompt-lookup",
            "max_new_tokens": 8,
            "output": str(tmp_path / "trace.html"),
            **shown,
        }
        return TraceConfig(target=str(target_folder), **(given | options))

    return make


def embedded(page):
    return json.loads(
        re.findall(r'<script type="application/json" id="trace">(.*?)</script', page, re.DOTALL)[0]
    )


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.8}, {"drafter": "model:{}", "tree": "branch:2x2"}]
)
def test_the_page_shows_the_prompt_beside_plain_decoding(config, target_folder, tmp_path, options):
    if "drafter" in options:
        options = {**options, "drafter": options["drafter"].format(target_folder)}
    (trace,) = trace_prompts(config(**options))
    data = embedded((tmp_path / "trace.html").read_text(encoding="utf-8"))
    assert data["rounds"] == trace.data["rounds"] and PROMPT in data["prompt"]
    assert (
        len(data["output"]) == 8
        and data["plain"]["same_text"]
        and data["plain"]["ms_per_token"] > 0
    )
    assert not any(found["fallback"] for found in data["rounds"])
    assert data["plain"]["tokens_per_second"] == pytest.approx(1000 / data["plain"]["ms_per_token"])


def test_a_head_drafts_a_tree_in_every_round(config, target_folder, tmp_path, tools):
    from headstart.heads import CheckpointMetadata
    from headstart.heads.checkpoints.save_load import save_head
    from headstart.inference import Target

    target = Target.from_pretrained(target_folder)
    save_head(tools.head_for(target, "medusa"), tmp_path / "head", CheckpointMetadata())
    (trace,) = trace_prompts(config(drafter=None, head=str(tmp_path / "head")))
    assert all(len(found["nodes"]) == command.NODES for found in trace.data["rounds"])
    assert trace.data["head"] == str(tmp_path / "head") and trace.data["drafter"].startswith(
        "DynamicTree"
    )
    (chain,) = trace_prompts(config(drafter=None, head=str(tmp_path / "head"), tree="chain:2"))
    assert all(len(found["nodes"]) == 3 for found in chain.data["rounds"])


def test_a_report_of_several_prompts(config, target_folder, tmp_path, capsys):
    rows = [
        {"messages": [{"role": "user", "content": f"{word} [/red] <b> " * 3}]}
        for word in ("a", "b", "c")
    ]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = {
        "prompts": [str(tmp_path / "prompts.jsonl")],
        "limit": 2,
        "report": True,
        "drafter": f"model:{target_folder}",
    }
    traces = trace_prompts(config(**options))
    page, shown = (tmp_path / "trace.html").read_text(encoding="utf-8"), capsys.readouterr().out
    assert len(traces) == 2 and page.count("data:image/png;base64,") == 2
    assert "&lt;b&gt;" in page and "<b>" not in page
    for title in ("Rejected by kind of token", "By depth", "Calibration of the draft", "By prompt"):
        assert title in page and title in shown


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
def test_options_that_show_nothing_are_refused(config, options, words):
    with refused(words):
        config(**options)


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_loaded(
    config, tmp_path, monkeypatch
):
    def loaded(*_):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(TraceConfig, "load", loaded)
    with refused(str(tmp_path), "folder"):
        trace_prompts(config(output=str(tmp_path)))
    with refused("nowhere"):
        trace_prompts(config(output=str(tmp_path / "nowhere" / "trace.html")))
    monkeypatch.setattr(os, "access", lambda *_: False)
    with refused("written"):
        trace_prompts(config())
