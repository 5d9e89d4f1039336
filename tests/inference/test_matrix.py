"""Every two values of the axes of decoding, together, on a CPU; on an accelerator in tests/gpu."""

from __future__ import annotations

from pathlib import Path

import axes
import pytest
from messages import refused

pytestmark = [pytest.mark.isa, pytest.mark.whole, pytest.mark.filterwarnings("error:the drafter")]
CASES = list(axes.cases())
REFUSED = list(axes.refused_cases())
REFUSED_NAMES = [axes.case_name(case) for case, _ in REFUSED]


@pytest.mark.parametrize("case", axes.cases_on_cpu(CASES), ids=axes.case_name)
def test_the_text_is_that_of_generate(case: axes.Case) -> None:
    axes.check(case)


@pytest.mark.parametrize(("case", "words"), REFUSED, ids=REFUSED_NAMES)
def test_what_does_not_go_together_is_refused_by_name(case: axes.Case, words: str) -> None:
    with refused(words):
        axes.check(case)


def test_every_pair_of_values_occurs() -> None:
    supported = axes.every_pair() - axes.refusals().keys()
    assert supported == set().union(*map(axes.pairs_of, CASES))
    missing = supported - set().union(*map(axes.pairs_of, axes.cases_on_cpu(CASES)))
    assert all("recorded" in pair for pair in missing)


def test_the_page_of_models_shows_the_table_of_what_does_not_go_together() -> None:
    page = Path(__file__).parents[2] / "docs" / "models.md"
    _, _, after = page.read_text(encoding="utf-8").partition("## What does not go together")
    section, _, _ = after.partition("\n## ")
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:2] == "| "]
    assert [(one, other) for one, other, _ in rows[1:]] == list(axes.REFUSED)
