"""Every two values of the axes of decoding, together, on a CPU; on an accelerator in tests/gpu."""

from __future__ import annotations

import axes
import pytest

CASES = list(axes.cases())
REFUSED = [(case, words) for case, words in axes.refused_cases()]


@pytest.mark.parametrize("case", [c for c in CASES if c["engine"] in axes.ON_CPU], ids=axes.name_of)
def test_the_text_is_that_of_generate(case):
    axes.check(case)


@pytest.mark.parametrize(
    ("case", "words"), REFUSED, ids=[axes.name_of(case) for case, _ in REFUSED]
)
def test_what_does_not_go_together_is_refused_by_name(case, words):
    case = {**case, "engine": "eager"}
    with pytest.raises(ValueError, match=words):
        axes.check(case)


def test_every_pair_of_values_occurs():
    met = set().union(*map(axes.pairs_of, CASES))
    assert met == axes.every_pair() - axes.refusals().keys()
    assert not met & axes.refusals().keys()
