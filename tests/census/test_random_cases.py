"""Random cases of the twenty families that matter most: `HEADSTART_FUZZ=200` makes as many of
each."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import random_cases
import tiny_models
from hypothesis import given

from headstart.inference import Target

FAMILIES = [
    *(
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "phi3",
        "olmo2",
        "granite",
        "smollm3",
        "gemma3_text",
        "gemma4_text",
    ),
    *("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "llama4_text"),
    *("qwen3_next", "lfm2", "granitemoehybrid", "falcon_h1", "nemotron_h"),
]


@functools.cache
def target(family: str) -> Target | str:
    """A tiny model as a target; why it cannot be one, if it is refused."""
    if family not in tiny_models.causal_types():
        return "not in this version of transformers"
    model = tiny_models.tiny_model(family, scale=3.0, untied=True)
    try:
        return Target(model)
    except ValueError as error:
        return str(error)


@pytest.mark.filterwarnings("ignore:Unfeasible length constraints")
@pytest.mark.parametrize("family", FAMILIES)
@random_cases.as_many_as(2)
@given(case=random_cases.cases(), chosen=random_cases.SETTINGS)
def test_no_random_case_of_a_family_differs_from_generate(
    family: str, case: dict[str, Any], chosen: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = target(family)
    if isinstance(known, str):
        pytest.skip(known)
    random_cases.check(known, case, chosen, monkeypatch)
