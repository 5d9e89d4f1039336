"""A mix of prompts: kinds in their shares, and nothing to train on that is measured on."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from prompts import (
    KindConfig,
    PromptMixConfig,
    grams,
    mix_prompts,
    write_prompts,
)

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
def files(tmp_path: Path) -> dict[str, Path]:
    """Sums, questions about passages in T0's wording, the model's answers, and an evaluation
    file."""
    chance = random.Random(0)
    sums = [f"What is {i} plus {i + 1}? {sentence(chance)}" for i in range(60)]
    questions = [f"{WORDING}?\n\n{passage(chance)}" for _ in range(60)]
    answers = [f"Sure!\n\n{passage(chance)}" for _ in range(60)]
    rows = [
        {"source": "sums", "prompt": text, "completion": answer}
        for text, answer in zip(sums, answers, strict=True)
    ]
    rows += [{"source": "t0", "prompt": text, "completion": "Yes."} for text in questions]
    evaluation = [{"turns": [f"{sums[7]} Say it."]}, {"turns": [questions[3][-80:]]}]
    written = {"sources": rows, "evaluation": evaluation}
    for name, each in written.items():
        Path(tmp_path, f"{name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in each), encoding="utf-8"
        )
    return {name: Path(tmp_path, f"{name}.jsonl") for name in written}


def config(files: dict[str, Path], **options: object) -> PromptMixConfig:
    kinds = {
        "math": KindConfig(share=1, sources=["sums"]),
        "questions": KindConfig(share=1, match="friend"),
        "summaries": KindConfig(
            share=2,
            templates=["Sum up: {passage}", "{passage} What of {topic}, {how}?"],
            values={"how": ["briefly"]},
        ),
    }
    given = {
        "output": str(files["sources"].with_name("mix.jsonl")),
        "sources": [str(files["sources"])],
        "exclude": [str(files["evaluation"])],
        "kinds": kinds,
        "prompts": 100,
        "held_out": 4,
    }
    return PromptMixConfig(**(given | options))


def test_kinds_have_their_shares_and_held_out_prompts(files):
    mix = mix_prompts(config(files))
    assert {kind: len(texts) for kind, texts in mix.training.items()} == {
        "math": 25,
        "questions": 25,
        "summaries": 50,
    }
    assert {len(texts) for texts in mix.held_out.values()} == {4}
    assert all(len(set(texts)) == len(texts) for texts in mix.training.values())


def test_nothing_to_train_on_shares_words_with_what_is_measured(files):
    everything = config(files, prompts=10_000, held_out=6)
    mix = mix_prompts(everything)
    training = {gram for texts in mix.training.values() for text in texts for gram in grams(text)}
    held_out = {gram for texts in mix.held_out.values() for text in texts for gram in grams(text)}
    evaluation = {
        gram
        for messages in read_prompts(files["evaluation"])
        for gram in grams(messages[-1]["content"])
    }
    assert training.isdisjoint(evaluation)
    assert training & held_out == grams(WORDING)  # which says what to do, not with what
    assert len(mix.training["math"]) == 60 - 6 - 1  # the sum in the evaluation file is left out
    assert mix.left_out >= 2  # that one, and the question about a passage of which it has a part


def test_every_turn_of_an_evaluation_file_counts(files):
    row = {
        "turns": [
            "Hello.",
            json.loads(files["evaluation"].read_text(encoding="utf-8").splitlines()[0])["turns"][0],
        ]
    }
    files["evaluation"].write_text(json.dumps(row) + "\n", encoding="utf-8")
    mix = mix_prompts(config(files, prompts=10_000, held_out=6))
    assert len(mix.training["math"]) == 60 - 6 - 1


def test_prompts_are_written_with_what_their_answers_need(files):
    options = {
        "temperatures": [0.0, 1.0],
        "systems": ["Be brief."],
        "system_share": 0.5,
        "follow_ups": ["Why?"],
    }
    folder = write_prompts(config(files, follow_up_share=0.5, **options))
    rows = read_prompt_rows(files["sources"].with_name("mix.jsonl"))
    assert (
        {row["kind"] for row in rows}
        == {"math", "questions", "summaries"}
        == {path.stem for path in folder.iterdir()}
    )
    assert {row["temperature"] for row in rows} == {0.0, 1.0}
    assert {row.get("follow_up") for row in rows} == {None, "Why?"}
    assert {row["messages"][0]["role"] for row in rows} == {"system", "user"}
    before = files["sources"].with_name("mix.jsonl").read_bytes()
    write_prompts(config(files, follow_up_share=0.5, **options))
    assert files["sources"].with_name("mix.jsonl").read_bytes() == before


def test_a_held_out_prompt_of_few_words_is_not_trained_on(tmp_path):
    rows = [{"source": "chat", "prompt": f"Why is number {i} odd?"} for i in range(9)]
    path = tmp_path / "short.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    given = PromptMixConfig(
        output="o", sources=[str(path)], kinds={"chat": KindConfig()}, held_out=3
    )
    mix = mix_prompts(given)
    assert len(mix.training["chat"]) == 6 and len(mix.held_out["chat"]) == 3
    assert not set(mix.training["chat"]) & set(mix.held_out["chat"])
