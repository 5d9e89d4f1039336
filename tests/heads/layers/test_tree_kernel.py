"""The tree kernel, interpreted on a CPU by Triton itself: `make test-kernels` has the environment
that this needs."""

import pytest
from helpers import run_interpreted

pytest.importorskip("triton")
PROGRAM = """
import warnings
import torch
from helpers import attended_slots
from headstart.heads.layers.tree_kernel import tree_attention
warnings.simplefilter("ignore")
for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
    for batch, heads, groups, nodes, uncommitted, size, slots, window in (
        (1, 8, 2, 1, 1, 64, 200, None),
        (1, 8, 2, 7, 7, 64, 300, None),
        (2, 6, 2, 20, 20, 96, 300, None),
        (2, 4, 4, 5, 9, 64, 300, None),
        (2, 4, 2, 9, 9, 64, 300, 40),
        (1, 4, 2, 9, 9, 64, 300, 3),
        (2, 4, 1, 60, 60, 32, 512, None),
    ):
        for nodes_first in (False, True) if dtype == torch.float32 else (False,):
            given = (batch, heads, groups, nodes, uncommitted, size, slots, window, dtype)
            case = attended_slots(*given, nodes_first=nodes_first)
            attended = tree_attention(*case.given)
            assert attended.dtype == dtype
            limits = {"rtol": tolerance, "atol": tolerance}
            torch.testing.assert_close(attended.double(), case.expected, **limits)
case = attended_slots(1, 8, 2, 4, 4, 64, 200, None, torch.float32)
case.given[0][0, 3, 2] = torch.nan
attended = tree_attention(*case.given)
assert attended[0, 2, 3].isnan().all() and attended.isnan().sum() == 64
"""


def test_it_is_the_softmax_over_what_a_node_sees():
    """In float64 to the last digits: for batches, groups, windows, and nodes of which some are in
    the cache already."""
    run_interpreted(PROGRAM)
