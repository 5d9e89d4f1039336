"""Measure speed: `headstart bench --target MODEL --head HEAD --prompts '[FILE.jsonl]'`.

Stock `model.generate`, the same engine without speculation and with it, interleaved on the same prompts; a table row
for each file, and with `--output FILE.json` every figure with versions and hardware. A speedup over `generate` alone
flatters: it holds both the engine's gain and speculation's.
"""

from __future__ import annotations

import sys

from headstart.scripts.command import options, run
from headstart.train.commands import BenchConfig


def main(arguments: list[str] | None = None) -> None:
    """Parse and measure."""
    config = options(BenchConfig, "bench", __doc__, arguments)
    from headstart.train.benchmark import benchmark  # not before the options are known to be good

    benchmark(config)


if __name__ == "__main__":
    run(main, sys.argv[1:])
