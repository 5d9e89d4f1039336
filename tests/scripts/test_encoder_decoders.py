"""Encoder-decoders from the command line: the text goes to the encoder, what is counted is what the
decoder writes."""

from __future__ import annotations

import json

import pytest
import torch
from messages import refused
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

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
BART = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
}
BART |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 64}
MODELS = {
    "t5": lambda: T5ForConditionalGeneration(T5Config(vocab_size=258, **T5)),
    "bart": lambda: BartForConditionalGeneration(
        BartConfig(vocab_size=258, **BART, decoder_start_token_id=2)
    ),
}


@pytest.fixture(params=MODELS)
def folder(request, tools, tmp_path):
    torch.manual_seed(0)
    model = MODELS[request.param]()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, 0.15)
    model.generation_config.eos_token_id = 257
    model.generation_config.pad_token_id = 0
    model.generation_config.forced_eos_token_id = None
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
    prompts = tmp_path / "prompts.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": text}]} for text in ("one two one two", "three")
    ]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    report = benchmark(
        BenchConfig(
            target=str(folder), prompts=[str(prompts)], drafter="prompt-lookup", max_new_tokens=9
        )
    )
    assert report["total"]["identical"] == 2
    assert report["total"]["prompts"] == 2
    assert all(rate > 0 for rate in report["total"]["tokens_per_second"].values())


def test_what_does_not_fit_an_encoder_is_refused(folder, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    messages = [{"role": "system", "content": "be short"}, {"role": "user", "content": "one"}]
    prompts.write_text(json.dumps({"messages": messages}))
    config = BenchConfig(
        target=str(folder), prompts=[str(prompts)], drafter="prompt-lookup", max_new_tokens=9
    )
    with refused("one text 2"):
        benchmark(config)


def test_commands_for_conversations_name_those_that_take_it(folder):
    with refused("encoder-decoder generate bench"):
        SpeculativeOptions(target=str(folder), drafter="prompt-lookup").load()
