"""Every two values of the axes of decoding, together, on an accelerator."""

from __future__ import annotations

import axes
import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("error:the drafter")]
CASES = list(axes.cases())
ELSEWHERE = [case for case in CASES if case not in axes.cases_on_cpu(CASES)]


@pytest.mark.parametrize("case", ELSEWHERE, ids=axes.case_name)
def test_the_text_is_that_of_generate(case: axes.Case) -> None:
    axes.check(case)
