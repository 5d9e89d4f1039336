"""Measure rounds and a training step on a GPU, in under ten minutes, without a network.

    python scripts/bench_gpu.py --output benchmarks/gpu

Models of the shapes of Llama-3.1-8B, Qwen3-8B and Llama-3.3-70B with random weights, as many as fit, and EAGLE-3 heads
for them: what a round costs by batch, context and tree, against transformers' own steps, and a training step of the
first of them. Their acceptance is synthetic.
"""

from __future__ import annotations

import sys

from headstart.scripts.command import options, run
from headstart.train.gpu_options import GpuBenchConfig


def main(arguments: list[str] | None = None) -> None:
    """Parse and measure."""
    config = options(GpuBenchConfig, "bench-gpu", __doc__, arguments)
    from headstart.train.gpu_bench import bench_gpu  # not before the options are known to be good

    bench_gpu(config)


if __name__ == "__main__":
    run(main, sys.argv[1:])
