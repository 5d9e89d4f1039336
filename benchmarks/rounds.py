"""What a round costs an accelerator besides arithmetic: waits, uploads and operations, on the
simulated device.

    HEADSTART_TEST_DEVICE=sim PYTHONPATH=tests:tests/gpu python benchmarks/rounds.py

The cases and their ceilings are those of tests/gpu/test_rounds.py.
"""

from __future__ import annotations

import copy
import os
import statistics
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
from common import arguments, save
from helpers import VOCAB, build_model, head_for
from simulated import SimGraph
from test_rounds import CASES, RECORDED, counts_of, recorded_rounds

from headstart.inference import SpeculativeLM, Target
from headstart.inference.drafters.by_name import make_drafter
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

    def decoder(compile: bool, kind: str | None = None, **options: Any) -> SpeculativeLM:
        head = None if kind is None else copy.deepcopy(head_for(on_cpu, kind)).to(there.device)
        options = {"adaptive": False, **options}
        return SpeculativeLM.from_pretrained(there, head, compile=compile, **options)

    for name, (options, _) in CASES.items():
        cells = []
        for sampling in (False, True):
            with pytest.MonkeyPatch.context() as patch:
                lm = decoder(False, **options)
                if name == "a second model":
                    lm = SpeculativeLM(there, make_drafter(there, there, "chain:3"))
                rounds, _ = counts_of(lm, patch, do_sample=sampling)
            waits, uploads, operations = zip(*rounds, strict=True)
            cells += [str(max(waits)), str(max(uploads)), f"{statistics.median(operations):.0f}"]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", "| recorded | launches | waits | uploads |", "|---|---|---|---|"]
    for name, options in RECORDED.items():
        rounds, _ = recorded_rounds(decoder(True, **options))
        launches, waits, uploads = zip(*rounds, strict=True)
        lines.append(
            f"| {name} | {statistics.median(launches):.0f} | {max(waits)} | {max(uploads)} |"
        )
    save(args.output, lines)


if __name__ == "__main__":
    main()
