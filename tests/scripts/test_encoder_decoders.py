"""Encoder-decoders from the command line: the text goes to the encoder, what is counted is what the
decoder writes."""

from __future__ import annotations

import pytest
from helpers import build_t5, build_tokenizer
from messages import refused
from runs import write_prompts, write_rows

from headstart.scripts.bench import BenchConfig, benchmark
from headstart.scripts.command_line import SpeculativeOptions
from headstart.scripts.generate import GenerateConfig, stream_answer


@pytest.fixture(scope="module")
def t5_options(tmp_path_factory):
    """Options for an encoder-decoder with a tokenizer."""
    folder = tmp_path_factory.mktemp("t5")
    tokenizer = build_tokenizer(chat_template=None)
    model = build_t5(len(tokenizer))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {"target": str(folder), "drafter": "prompt-lookup", "max_new_tokens": 9}


def test_generate_answers_a_text(t5_options, capsys):
    rates = stream_answer(GenerateConfig(**t5_options, prompt="translate: a b a b", compare=True))
    assert set(rates) == {"generate", "headstart"}
    assert min(rates.values()) > 0
    assert "same text" in capsys.readouterr().out


def test_bench_counts_what_the_decoder_writes(t5_options, tmp_path):
    prompts = write_prompts(tmp_path / "prompts.jsonl", ["one two one two", "three"])
    total = benchmark(BenchConfig(**t5_options, prompts=[prompts]))["total"]
    assert (total["prompts"], total["identical"]) == (2, 2)
    assert min(total["tokens_per_second"].values()) > 0


def test_what_does_not_fit_an_encoder_is_refused(t5_options, tmp_path):
    messages = [{"role": "system", "content": "be short"}, {"role": "user", "content": "one"}]
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"messages": messages}])
    with refused("one text 2"):
        benchmark(BenchConfig(**t5_options, prompts=[prompts]))


def test_commands_for_conversations_name_those_that_take_it(t5_options):
    with refused("encoder-decoder generate bench"):
        SpeculativeOptions(**t5_options).load()
