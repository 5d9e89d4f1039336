"""A mix of prompts: kinds in their shares, and nothing to train on that is measured on."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from prompts import KindConfig, PromptMixConfig, grams, mix_prompts, write_prompts
from runs import changed, write_rows

from headstart.inference.text.prompt_files import read_prompt_rows, read_prompts

WORDS = [
    first + middle + last
    for first in "bdfgklmnprst"
    for middle in ("a", "e", "i", "o")
    for last in ("lo", "ru", "mi")
]

WORDING = "Given this text, would you recommend it to a friend of yours or not"


def sentence(chance: random.Random, count: int = 12) -> str:
    return " ".join(chance.choice(WORDS) for _ in range(count)).capitalize() + "."


def passage(chance: random.Random) -> str:
    return " ".join(sentence(chance) for _ in range(5))


@pytest.fixture
def mixed_from(tmp_path: Path) -> PromptMixConfig:
    """A mix of sums, questions about passages in T0's wording and the model's answers, and an
    evaluation file to keep out."""
    chance = random.Random(0)
    rows = []
    for i in range(60):
        text = f"What is {i} plus {i + 1}? {sentence(chance)}"
        answer = f"Sure!\n\n{passage(chance)}"
        rows.append({"source": "sums", "prompt": text, "completion": answer})
    for _ in range(60):
        text = f"{WORDING}?\n\n{passage(chance)}"
        rows.append({"source": "t0", "prompt": text, "completion": "Yes."})
    known_sum = rows[7]["prompt"]
    known_passage = rows[63]["prompt"][-80:]
    evaluation = [{"turns": ["Hello.", f"{known_sum} Say it."]}, {"turns": [known_passage]}]
    kinds = {
        "math": KindConfig(share=1, sources=["sums"]),
        "questions": KindConfig(share=1, match="friend"),
        "summaries": KindConfig(
            share=2,
            templates=["Sum up: {passage}", "{passage} What of {topic}, {how}?"],
            values={"how": ["briefly"]},
        ),
    }
    return PromptMixConfig(
        output=str(tmp_path / "mix.jsonl"),
        sources=[write_rows(tmp_path / "sources.jsonl", rows)],
        exclude=[write_rows(tmp_path / "evaluation.jsonl", evaluation)],
        kinds=kinds,
        prompts=100,
        held_out=4,
    )


def all_grams(texts_by_kind: dict[str, list[str]]) -> set[str]:
    return {gram for texts in texts_by_kind.values() for text in texts for gram in grams(text)}


def test_kinds_have_their_shares_and_held_out_prompts(mixed_from):
    mix = mix_prompts(mixed_from)
    counts = {kind: len(set(texts)) for kind, texts in mix.training.items()}
    assert counts == {"math": 25, "questions": 25, "summaries": 50}
    assert {len(texts) for texts in mix.held_out.values()} == {4}


def test_nothing_to_train_on_shares_words_with_what_is_measured(mixed_from):
    mix = mix_prompts(changed(mixed_from, prompts=10_000, held_out=6))
    training = all_grams(mix.training)
    measured = read_prompts(mixed_from.exclude[0])
    assert training.isdisjoint(all_grams({"": [row[-1]["content"] for row in measured]}))
    # which says what to do, not with what
    assert training & all_grams(mix.held_out) == grams(WORDING)
    assert len(mix.training["math"]) == 60 - 6 - 1  # the sum in the evaluation file is left out
    assert mix.left_out >= 2  # that one, and the question about a passage of which it has a part


def test_prompts_are_written_with_what_their_answers_need(mixed_from):
    options = {"temperatures": [0.0, 1.0], "systems": ["Be brief."], "system_share": 0.5}
    options |= {"follow_ups": ["Why?"], "follow_up_share": 0.5}
    folder = write_prompts(changed(mixed_from, **options))
    assert {path.stem for path in folder.iterdir()} == mixed_from.kinds.keys()
    rows = read_prompt_rows(mixed_from.output)
    assert {row["kind"] for row in rows} == mixed_from.kinds.keys()
    assert {row["temperature"] for row in rows} == {0.0, 1.0}
    assert {row.get("follow_up") for row in rows} == {None, "Why?"}
    assert {row["messages"][0]["role"] for row in rows} == {"system", "user"}
    write_prompts(changed(mixed_from, **options))
    assert read_prompt_rows(mixed_from.output) == rows


def test_a_held_out_prompt_of_few_words_is_not_trained_on(tmp_path):
    rows = [{"source": "chat", "prompt": f"Why is number {i} odd?"} for i in range(9)]
    sources = [write_rows(tmp_path / "short.jsonl", rows)]
    kinds = {"chat": KindConfig()}
    mix = mix_prompts(PromptMixConfig(output="o", sources=sources, kinds=kinds, held_out=3))
    assert len(mix.training["chat"]) == 6
    assert len(mix.held_out["chat"]) == 3
    assert not set(mix.training["chat"]) & set(mix.held_out["chat"])
