"""Random cases of greedy decoding and of sampling with a seed: any drafter, tree, processors, batch
and slots.

`compare_with_generate` compares one with `model.generate`, row by row; what is compared is in
`drawn_cases` and `SETTINGS`.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from helpers import (
    PromptOracle,
    build_tokenizer,
    head_for,
    padded_batch,
    random_shape,
    written_alone,
)
from hypothesis import HealthCheck, assume
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from headstart.heads import DraftHead
from headstart.inference import Conversation, SpeculativeLM, Target
from headstart.inference.rounds import prefill

VOCAB = 37
"""Tokens of prompts and settings; the model may have more."""
UNSAID = 0
TOKENIZER = build_tokenizer()
CHARACTERS = TOKENIZER.decode(range(1, VOCAB))
"""One for each token."""
OPTIONS: dict[str, dict[str, Any]] = {
    "eagle": {"depth": 3},
    "eagle3": {"depth": 4, "feature_layers": [0, -1], "draft_vocab_size": 20},
    "hydra": {"num_heads": 3, "draft_vocab_size": 20},
    "hydra++": {"num_heads": 3, "draft_vocab_size": 20},
    "medusa": {"num_heads": 3, "draft_vocab_size": 20},
}
"""Of random heads."""
CHAINS = ["chain:1", "chain:3", "stop:0.1:chain:3", "root"]
TREES = ["branch:2x2", "drawn:branch:3x1", "independent:branch:2x2", "dynamic:7:3:3"]
_heads: WeakKeyDictionary[Target, dict[str, DraftHead]] = WeakKeyDictionary()


def chance(strategy: Any) -> Any:
    """Often nothing."""
    return st.one_of(st.none(), st.none(), strategy)


def drawn_cases(**more: Any) -> Any:
    """Strategy for what is decoded, and how; `more` are further entries."""
    return st.fixed_dictionaries(
        {
            **more,
            "lengths": st.lists(st.integers(1, 14), min_size=1, max_size=4),
            "side": st.sampled_from(["left", "right"]),
            "source": st.sampled_from(["oracle", *sorted(OPTIONS), "prompt-lookup"]),
            "tree": st.sampled_from([*CHAINS[:2], *TREES, *CHAINS[2:]]),
            "seed": st.sampled_from([None, None, 1]),
            "shape": st.integers(0, 999),
            "wrong": st.sampled_from([0.0, 0.2, 0.6]),
            "chunk": st.sampled_from([1, 3, 1024]),
            "slots": st.sampled_from([None, None, 1, 2]),
            "planted": st.sampled_from([None, None, None, math.nan, math.inf, -math.inf]),
            "written": chance(st.integers(0, 999)),
        }
    )


TOKEN = st.integers(0, VOCAB - 1)
SETTINGS = st.fixed_dictionaries(
    {
        "max_new_tokens": st.integers(1, 24),
        "min_new_tokens": chance(st.integers(1, 12)),
        "eos_token_id": chance(st.lists(TOKEN, min_size=1, max_size=6)),
        "repetition_penalty": chance(st.sampled_from([0.8, 1.3, 1.9])),
        "no_repeat_ngram_size": chance(st.integers(1, 3)),
        "bad_words_ids": chance(
            st.lists(st.lists(TOKEN, min_size=1, max_size=3), min_size=1, max_size=6)
        ),
        "suppress_tokens": chance(st.lists(TOKEN, min_size=1, max_size=9)),
        "begin_suppress_tokens": chance(st.lists(TOKEN, min_size=1, max_size=9)),
        "forced_eos_token_id": chance(TOKEN),
        "stop_strings": chance(
            st.lists(st.text(CHARACTERS, min_size=1, max_size=2), min_size=1, max_size=3)
        ),
    }
)


def as_many_as(usual: int) -> Any:
    """Hypothesis's settings for `usual` cases, or HEADSTART_FUZZ of them."""
    return hypothesis_settings(
        max_examples=int(os.environ.get("HEADSTART_FUZZ", usual)),
        derandomize=True,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much],
    )


def kept_head(target: Target, kind: str) -> DraftHead:
    """A random head for a random model, built once."""
    heads = _heads.setdefault(target, {})
    if kind not in heads:
        heads[kind] = head_for(target, kind, 0.3, seed=1, **OPTIONS[kind])
    return heads[kind]


@contextlib.contextmanager
def planted(model: PreTrainedModel, value: float | None) -> Iterator[None]:
    """Within it the embedding of `UNSAID`, a token that no text holds, is not finite."""
    embedding = model.get_input_embeddings().weight.data[UNSAID]
    before = embedding.clone()
    if value is not None:
        embedding.fill_(value)
    try:
        yield
    finally:
        embedding.copy_(before)


@contextlib.contextmanager
def negated_weight(model: PreTrainedModel, number: int | None) -> Iterator[None]:
    """Within it a weight has the other sign, written as torch does not notice."""
    weights = [weight.data for weight in model.parameters()]
    if number is not None:
        weights[number % len(weights)].neg_()
    try:
        yield
    finally:
        if number is not None:
            weights[number % len(weights)].neg_()


def settings_of_generate(case: dict[str, Any], chosen: dict[str, Any]) -> dict[str, Any]:
    """Settings of `generate`; cases that may leave no token to choose are given up."""
    settings = {name: value for name, value in chosen.items() if value is not None} | {
        "do_sample": False
    }
    if case["planted"] is not None:  # a tied LM head gives it a score that is not finite either
        settings["suppress_tokens"] = [UNSAID, *settings.get("suppress_tokens", ())]
    suppressed = [*settings.get("suppress_tokens", ()), *settings.get("begin_suppress_tokens", ())]
    # a token both forced and forbidden leaves none
    assume(chosen["forced_eos_token_id"] not in suppressed)
    if chosen["no_repeat_ngram_size"] == 1:  # each token once: there must be enough of them
        assume(max(case["lengths"]) + chosen["max_new_tokens"] + len(set(suppressed)) + 1 < VOCAB)
    if "stop_strings" in settings:
        settings["tokenizer"] = TOKENIZER
    if case["seed"] is not None and case["source"] != "oracle":
        settings |= {"do_sample": True, "temperature": 0.7, "top_k": 9}
    return settings


def decoder_of(target: Target, case: dict[str, Any]) -> SpeculativeLM:
    """The target with the drafter of a case; an oracle knows no text yet."""
    if case["source"] == "oracle":
        shape = random_shape(case["shape"])
        return SpeculativeLM(
            target, PromptOracle(shape, {}, target.info.vocab_size, case["wrong"], case["shape"])
        )
    head = kept_head(target, case["source"]) if case["source"] in OPTIONS else None
    if target.engine.chains_only:  # which refuses a tree that is named
        assume(head is None or case["tree"] in CHAINS)
    options = {"tree": case["tree"]} if head is not None else {"drafter": case["source"]}
    return SpeculativeLM.from_pretrained(
        target, head, adaptive=False, acceptance="point_mass", **options
    )


def compare_with_generate(
    target: Target, case: dict[str, Any], chosen: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare a case with `generate`, or, with a seed, with the text that the seed gives without
    drafts."""
    settings = settings_of_generate(case, chosen)
    rows = [
        torch.randint(
            1, VOCAB, (length,), generator=torch.Generator().manual_seed(17 * place + length)
        )
        for place, length in enumerate(case["lengths"])
    ]
    padded, mask = padded_batch(rows, case["side"])
    lm = decoder_of(target, case)
    target.check_decoding()  # which reads any token, the one with a planted embedding too
    monkeypatch.setattr(prefill, "PREFILL_TOKENS", case["chunk"])

    def tokens_of(decoder: SpeculativeLM, **more: Any) -> list[list[int]]:
        """New tokens of each row, drawn with the seed of the case."""
        generator = torch.Generator().manual_seed(case["seed"] or 0)
        output = decoder.generate(
            padded, attention_mask=mask, generator=generator, **settings, **more
        )
        return output.sequences[:, padded.shape[1] :].tolist()

    past = None
    with planted(target.model, case["planted"]):
        if case["written"] is not None and len(rows) == 1 and case["source"] != "oracle":
            past = Conversation()
            tokens_of(lm, past_key_values=past)
        with negated_weight(target.model, case["written"]):
            if settings["do_sample"]:
                truths = tokens_of(SpeculativeLM(target))
            else:
                truths = [written_alone(target.model, row, **settings) for row in rows]
            if case["source"] == "oracle":
                lm.drafter.by_prompt = {
                    tuple(row.tolist()): truth for row, truth in zip(rows, truths, strict=True)
                }
            found = tokens_of(lm, max_batch_size=case["slots"], past_key_values=past)
    width = max(map(len, truths))
    ends = settings.get("eos_token_id") or settings.get("stop_strings")
    assert len(found[0]) == width
    for text, expected in zip(found, truths):
        assert text[: len(expected)] == expected
        assert ends or len(expected) == width
