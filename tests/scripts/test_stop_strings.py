"""Commands on a model whose own generation config has stop strings: both sides of a comparison stop
there."""

from __future__ import annotations

import io

import pytest
import torch
from helpers import written_alone
from messages import lacking
from runs import write_prompts

from headstart.inference import load_tokenizer
from headstart.inference.targets.loading import load_model
from headstart.inference.text.chat_template import prompt_ids
from headstart.scripts.bench import BenchConfig, benchmark
from headstart.scripts.chat import ChatConfig, chat_on_screen
from headstart.scripts.generate import GenerateConfig, stream_answer
from headstart.scripts.trace import TraceConfig, trace_prompts

PROMPT = "hello"


@pytest.fixture
def stopping(target_folder, tmp_path):
    """Options for a target with a stop string in its generation config, the answer to the prompt up
    to it, and what would follow."""
    tokenizer = load_tokenizer(target_folder)
    model = load_model(str(target_folder), torch.float32, "cpu")
    ids = prompt_ids(tokenizer, [{"role": "user", "content": PROMPT}])[0]
    written = written_alone(model, ids, max_new_tokens=40)
    text = tokenizer.decode(written, skip_special_tokens=True)
    letters = range(3, len(text) - 2)
    stop = next(text[at] for at in letters if text[at].isascii() and text.index(text[at]) == at)
    model.generation_config.stop_strings = [stop]
    model.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    options = {"target": str(tmp_path / "target"), "dtype": "float32", "max_new_tokens": 40}
    return options | {"drafter": "prompt-lookup"}, text[: text.index(stop) + 1], text


def test_generate_and_chat_stop_at_the_models_stop_string(stopping, capsys, monkeypatch):
    options, answer, beyond = stopping
    stream_answer(GenerateConfig(**options, prompt=PROMPT, compare=True))
    shown = capsys.readouterr().out
    assert shown.count(answer) == 2
    assert beyond not in shown
    assert not lacking(shown, "same text")
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{PROMPT}\n"))
    chat_on_screen(ChatConfig(**options))
    shown = capsys.readouterr().out
    assert answer in shown
    assert beyond not in shown


def test_both_sides_of_bench_and_trace_stop_at_the_models_stop_string(stopping, tmp_path):
    options, _, _ = stopping
    prompts = write_prompts(tmp_path / "prompts.jsonl", [PROMPT])
    report = benchmark(BenchConfig(**options, prompts=[prompts]))
    assert report["total"]["identical"] == 1
    page = str(tmp_path / "trace.html")
    (trace,) = trace_prompts(TraceConfig(**options, prompt=PROMPT, output=page))
    assert trace.data["plain"]["same_text"]
