"""The census of a few types that matter, and its page; `make census` runs all types and writes the
page."""

from __future__ import annotations

import functools
from typing import Any

import models_page
import pytest
import tiny_models
import torch
import transformers
from census import census
from messages import refused

from headstart.inference import Target

GROUPS = {
    "dense": ["llama", "qwen2", "qwen3", "olmo2", "granite", "cohere"],
    "windows and caps": ["gemma2", "gemma3_text", "gemma4_text", "phi3", "mistral", "gpt_neo"],
    "experts": ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "llama4_text"],
    "states": ["qwen3_next", "lfm2", "granitemoehybrid", "mamba2"],
    "images": ["qwen2_5_vl", "mistral3", "gemma3n", "llava"],
    "unlike Llama": [
        *("gemma4_text@kv-shared", "gemma3n_text", "mllama", "longcat_flash"),
        *("modernbert-decoder", "qwen2_audio", "aya_vision", "granitemoehybrid@attention-only"),
        *("bert", "megatron-bert", "roberta"),
    ],
    "positions by the cache": ["bloom", "mpt", "falcon@alibi", "bart", "roformer"],
    "refused": ["mamba", "rwkv", "openai-gpt", "moshi", "doge"],
}
"""Of the twenty families that matter most, and those that have failed."""


@pytest.mark.versions
@pytest.mark.parametrize("group", GROUPS)
def test_every_type_is_identical_or_refused_as_the_page_says(group: str) -> None:
    recorded = {record["name"]: record for record in models_page.results()["records"]}
    known = tiny_models.every_name()
    same_version = models_page.results()["made_by"]["transformers"] == transformers.__version__
    found = {}
    expected = {}
    for name in GROUPS[group]:
        if name not in known:  # of an older transformers
            continue
        record = census(name)
        found[name] = [record.outcome, record.reason, record.heads]
        expected[name] = found[name]
        if same_version:
            expected[name] = [recorded[name][part] for part in ("outcome", "reason", "heads")]
        if record.outcome in ("trees", "chains"):
            assert max(record.accepted.values()) > 2, f"{name}: hardly any draft was accepted"
    assert found == expected, "run `make census`, which also writes docs/models.md"
    outcomes = {outcome for outcome, *_ in found.values()}
    assert outcomes <= {"trees", "chains", "refused"} | (set() if same_version else {"not built"})


def test_the_page_has_the_results() -> None:
    page = models_page.PAGE.read_text(encoding="utf-8")
    assert page == models_page.with_tables(page, models_page.results()), (
        "run tests/census/models_page.py"
    )


def test_the_results_have_every_type() -> None:
    census = models_page.results()
    if census["made_by"]["transformers"] == transformers.__version__:
        assert [record["name"] for record in census["records"]] == tiny_models.every_name()


def test_a_model_that_reads_a_whole_text_otherwise_than_generate_is_refused_for_training() -> None:
    """As versions of transformers do whose BERT is causal only with a mask that `generate`
    makes."""
    target = Target(tiny_models.tiny_model("bert", 3.0, True))
    forward = target.model.forward

    @functools.wraps(forward)
    def shifted(*given: Any, **named: Any) -> Any:
        if named.get("position_ids") is None:
            named["position_ids"] = torch.arange(3, 3 + named["input_ids"].shape[1])[None]
        return forward(*given, **named)

    target.model.forward = shifted
    target.check_decoding()
    with refused("whole text generate"):
        target.check_features()
