"""What it costs a call of `generate` to see whether weights or code of its model have changed, in
microseconds.

    python benchmarks/changes.py

The median of 50 comparisons, one after the other, and of 20 after as many bytes were written as the
processor caches.
"""

from __future__ import annotations

import statistics
import time

import torch
from common import TARGET, arguments, save

from headstart.inference import Target


def microseconds(target: Target, times: int, written: torch.Tensor | None) -> float:
    """Median time of a comparison."""
    taken = []
    for number in range(times + 1):
        if written is not None:
            written.fill_(number)
        began = time.perf_counter()
        target.version  # noqa: B018 - compared anew each time
        taken.append(time.perf_counter() - began)
    return 1e6 * statistics.median(taken[1:])  # the first makes the views


def main() -> None:
    """A row: tensors, and both times."""
    args = arguments(__doc__, "changes.md").parse_args()
    target = Target.from_pretrained(TARGET)
    tensors = len([*target.model.parameters(), *target.model.buffers()])
    warm = microseconds(target, 50, None)
    cold = microseconds(target, 20, torch.empty(2**26, dtype=torch.uint8))
    lines = [
        "| tensors | compared again, µs | compared after other work, µs |",
        "|---|---|---|",
        f"| {tensors} | {warm:.0f} | {cold:.0f} |",
    ]
    save(args.output, lines)


if __name__ == "__main__":
    main()
