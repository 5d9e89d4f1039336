"""Encoder-decoders from the command line: the text goes to the encoder, what is counted is what the
decoder writes."""

from __future__ import annotations

import pytest
import torch
from messages import refused
from runs import write_prompts, write_rows
from transformers import T5Config, T5ForConditionalGeneration

from headstart.scripts.bench import BenchConfig, benchmark
from headstart.scripts.command_line import SpeculativeOptions
from headstart.scripts.generate import GenerateConfig, stream_answer

T5 = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}


@pytest.fixture
def folder(tools, tmp_path):
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(T5Config(vocab_size=258, **T5))
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, 0.15)
    model.generation_config.eos_token_id = 257
    model.generation_config.pad_token_id = 0
    model.save_pretrained(tmp_path / "model")
    tools.build_tokenizer(chat_template=None).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_generate_answers_a_text(folder, capsys):
    config = GenerateConfig(
        target=str(folder),
        prompt="translate: a b a b",
        drafter="prompt-lookup",
        compare=True,
        max_new_tokens=12,
    )
    rates = stream_answer(config)
    assert set(rates) == {"generate", "headstart"} and min(rates.values()) > 0
    told = capsys.readouterr()
    assert "both generated the same text" in told.out + told.err


def test_bench_counts_what_the_decoder_writes(folder, tmp_path):
    prompts = write_prompts(tmp_path / "prompts.jsonl", ["one two one two", "three"])
    report = benchmark(
        BenchConfig(
            target=str(folder), prompts=[prompts], drafter="prompt-lookup", max_new_tokens=9
        )
    )
    assert report["total"]["identical"] == 2
    assert report["total"]["prompts"] == 2
    assert all(rate > 0 for rate in report["total"]["tokens_per_second"].values())


def test_what_does_not_fit_an_encoder_is_refused(folder, tmp_path):
    messages = [{"role": "system", "content": "be short"}, {"role": "user", "content": "one"}]
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"messages": messages}])
    config = BenchConfig(
        target=str(folder), prompts=[prompts], drafter="prompt-lookup", max_new_tokens=9
    )
    with refused("one text 2"):
        benchmark(config)


def test_commands_for_conversations_name_those_that_take_it(folder):
    with refused("encoder-decoder generate bench"):
        SpeculativeOptions(target=str(folder), drafter="prompt-lookup").load()
