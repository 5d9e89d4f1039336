"""Commands on a model whose own generation config has stop strings: both sides of a comparison stop
there."""

from __future__ import annotations

import io
import json

import pytest
import torch

from headstart.inference import load_tokenizer
from headstart.inference.targets.loading import load_model
from headstart.inference.text.chat_template import prompt_ids
from headstart.scripts import chat, trace
from headstart.scripts.bench import BenchConfig, benchmark
from headstart.scripts.generate import GenerateConfig, stream_answer

TOKENS = 40
PROMPT = "hello"


@pytest.fixture
def stopping(target_folder, tmp_path):
    """A target's folder, and the answer to the prompt up to the stop string in its generation
    config."""
    tokenizer = load_tokenizer(str(target_folder))
    model = load_model(str(target_folder), torch.float32, "cpu")
    ids = prompt_ids(tokenizer, [{"role": "user", "content": PROMPT}])
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": TOKENS, "do_sample": False}
    text = tokenizer.decode(
        model.generate(ids, **given)[0, ids.shape[1] :], skip_special_tokens=True
    )
    letters = range(3, len(text) - 2)
    stop = next(text[at] for at in letters if text[at].isascii() and text.index(text[at]) == at)
    model.generation_config.stop_strings = [stop]
    model.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    return str(tmp_path / "target"), text[: text.index(stop) + 1], text


def test_generate_chat_trace_and_bench_stop_at_the_models_stop_string(
    stopping, tmp_path, capsys, monkeypatch
):
    folder, answer, beyond = stopping
    options = {
        "target": folder,
        "dtype": "float32",
        "drafter": "prompt-lookup",
        "max_new_tokens": TOKENS,
    }
    stream_answer(GenerateConfig(**options, prompt=PROMPT, compare=True))
    shown = capsys.readouterr().out
    assert (
        shown.count(answer) == 2 and beyond not in shown and "both generated the same text" in shown
    )
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{PROMPT}\n"))
    chat.chat_on_screen(chat.ChatConfig(**options))
    shown = capsys.readouterr().out
    assert answer in shown and beyond not in shown
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": PROMPT}) + "\n", encoding="utf-8")
    report = benchmark(BenchConfig(**options, prompts=[str(tmp_path / "p.jsonl")]))
    assert report["total"]["identical"] == 1
    config = trace.TraceConfig(**options, prompt=PROMPT, output=str(tmp_path / "t.html"))
    lm, tokenizer = config.load()
    (recorded,) = trace.record(
        config, lm, tokenizer, [prompt_ids(tokenizer, [{"role": "user", "content": PROMPT}])]
    )
    assert recorded.data["plain"]["same_text"]
