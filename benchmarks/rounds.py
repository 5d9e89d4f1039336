"""What a round costs an accelerator besides arithmetic: waits, uploads and operations, on the
simulated device.

    HEADSTART_TEST_DEVICE=sim PYTHONPATH=tests:tests/gpu python benchmarks/rounds.py

The cases and their ceilings are those of tests/gpu/test_rounds.py.
"""

from __future__ import annotations

import copy
import os
import statistics

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
from common import arguments, save
from helpers import VOCAB, build_model
from simulated import SimGraph
from test_rounds import CASES, RECORDED, counts_of, lm_of, recorded_rounds

from headstart.inference import Target
from headstart.inference.engines import cuda_graph


def main() -> None:
    """A row for each drafter."""
    args = arguments(__doc__, "rounds.md").parse_args()
    lines = [
        "| drafts | waits | uploads | operations | sampled: waits | uploads | operations |",
        "|---|---|---|---|---|---|---|",
    ]
    cuda_graph.GRAPHS["sim"] = SimGraph
    on_cpu = Target(build_model(vocab_size=VOCAB, layers=8).requires_grad_(False))
    there = Target(copy.deepcopy(on_cpu.model).to("sim:0"))
    for name, (options, _) in CASES.items():
        cells = []
        for sampling in (False, True):
            with pytest.MonkeyPatch.context() as patch:
                rounds, _ = counts_of(lm_of(there, on_cpu, **options), patch, do_sample=sampling)
            waits, uploads, operations = zip(*rounds, strict=True)
            cells += [str(max(waits)), str(max(uploads)), f"{statistics.median(operations):.0f}"]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", "| recorded | launches | waits | uploads |", "|---|---|---|---|"]
    for name, options in RECORDED.items():
        there.compile(True)
        lm = lm_of(there, on_cpu, **options)
        lm.compile(True)
        rounds, _ = recorded_rounds(lm)
        there.compile(False)
        launches, waits, uploads = zip(*rounds, strict=True)
        lines.append(
            f"| {name} | {statistics.median(launches):.0f} | {max(waits)} | {max(uploads)} |"
        )
    save(args.output, lines)


if __name__ == "__main__":
    main()
