"""Every two values of the axes of decoding, together, on an accelerator."""

from __future__ import annotations

import axes
import pytest

pytestmark = pytest.mark.gpu
CASES = [case for case in axes.cases() if case["engine"] not in axes.ON_CPU]


@pytest.mark.parametrize("case", CASES, ids=axes.name_of)
def test_the_text_is_that_of_generate(case):
    axes.check(case)
