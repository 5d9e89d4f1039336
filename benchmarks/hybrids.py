"""The price of a rejected draft in a model whose layers keep states: rounds by draft length, by
when states catch up.

    OMP_NUM_THREADS=1 python benchmarks/hybrids.py

Random models of four layers, three with a state and one of attention, in float32. A round drafts a
chain, and each token is accepted with the same probability, so that all sides commit the same
numbers of tokens. "Replay" reads what a round has accepted in a forward of its own, as soon as a
draft is rejected; the others leave it pending until so many tokens are. The forward of a plain
step, and forwards over trees, whose paths are lanes, stand beside. The sides take turns; CPU time
of one thread, which other processes disturb least, and the least of several runs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from common import arguments, save
from transformers import PreTrainedModel

from headstart.inference import DraftTree, Target, TreeShape
from headstart.inference.engines.stateful import StatefulEngine
from headstart.inference.targets.provenance import hardware

BASE: dict[str, Any] = {
    "vocab_size": 16384,
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_hidden_layers": 4,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
}
LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8)
PENDING = {"replay": 1, "8": 8, "16": 16, "never": 10**9}
"""By column: pending tokens at which a row's are read alone."""
TREES = {
    "chain:3": TreeShape.chain(3),
    "chain:6": TreeShape.chain(6),
    "branch:2x1x1": TreeShape.from_paths([[0], [1], [0, 0], [1, 0], [0, 0, 0], [1, 0, 0]]),
    "branch:2x2": TreeShape.from_paths([[0], [1], [0, 0], [0, 1], [1, 0], [1, 1]]),
}
TEXT = 64


def gated_delta() -> PreTrainedModel:
    """Layers with the gated delta rule, in the proportions of Qwen3.5's."""
    config = transformers.Qwen3_5TextConfig(
        **BASE,
        head_dim=64,
        layer_types=[*["linear_attention"] * 3, "full_attention"],
        linear_num_key_heads=6,
        linear_num_value_heads=6,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
    )
    return transformers.Qwen3_5ForCausalLM(config)


def mamba_2() -> PreTrainedModel:
    """Mamba-2 layers, in the proportions of those of Granite 4 without experts."""
    config = transformers.GraniteMoeHybridConfig(
        **BASE,
        layer_types=[*["linear_attention"] * 3, "full_attention"],
        shared_intermediate_size=2304,
        num_local_experts=0,
        mamba_n_heads=24,
        mamba_d_head=64,
        mamba_d_state=128,
        mamba_n_groups=1,
        mamba_expand=2,
    )
    return transformers.GraniteMoeHybridForCausalLM(config)


def convolution() -> PreTrainedModel:
    """Layers with a short convolution and no recurrence, as LFM2 has them."""
    config = transformers.Lfm2Config(
        **BASE, layer_types=[*["conv"] * 3, "full_attention"], block_auto_adjust_ff_dim=False
    )
    return transformers.Lfm2ForCausalLM(config)


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "Gated delta rule": gated_delta,
    "Mamba-2": mamba_2,
    "Convolution alone": convolution,
}


@torch.inference_mode()
def main() -> None:
    """Write two tables for each kind of state: rounds by draft length, and forwards over trees."""
    parser = arguments(__doc__, "hybrids.md")
    parser.add_argument(
        "--accepted", type=float, default=0.7, help="probability that a drafted token is accepted"
    )
    parser.add_argument("--rounds", type=int, default=24, help="rounds of a run")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side")
    parser.add_argument(
        "--compile", action="store_true", help="linear layers in the CPU kernels, as by default"
    )
    args = parser.parse_args()
    engine = (
        "linear layers in headstart's kernels"
        if args.compile
        else "transformers' modules as they are"
    )
    lines = [
        f"Hardware: {hardware()}; 1 thread, float32, {engine}. A drafted token is accepted with"
        f" probability {args.accepted}. Milliseconds."
    ]
    for name, build in MODELS.items():
        torch.manual_seed(0)
        target = Target(build().eval())
        if args.compile:
            target.compile(True)
        lines += [
            "",
            f"## {name}",
            "",
            *rounds_table(target, args.accepted, args.rounds, args.repeats),
        ]
        lines += ["", *trees_table(target, args.repeats)]
    save(args.output, lines)


def rounds_table(target: Target, accepted: float, rounds: int, repeats: int) -> list[str]:
    """Milliseconds of the target's part of a round, and of a token, by draft length and by when
    states catch up."""
    assert target.stateful is not None
    columns = PENDING if target.stateful.recurrent else {"round": 1}
    sides = {(length, name): pending for length in LENGTHS for name, pending in columns.items()}
    least = dict.fromkeys(sides, math.inf)
    plain = math.inf
    for _ in range(repeats):
        plain = min(plain, run(target, 0, accepted, rounds, 1)[0])
        for side, pending in sides.items():
            seconds, _ = run(target, side[0], accepted, rounds, pending)
            least[side] = min(least[side], seconds)
    lines = [
        f"A plain step takes {1e3 * plain:.1f}.",
        "",
        "| draft length | " + " | ".join(f"{name}, round | token" for name in columns) + " |",
        "|---" * (1 + 2 * len(columns)) + "|",
    ]
    for length in LENGTHS:
        cells = []
        for name in columns:
            tokens = run_lengths(length, accepted, rounds)
            cells += [
                f"{1e3 * least[length, name]:.1f}",
                f"{1e3 * least[length, name] * rounds / sum(tokens):.1f}",
            ]
        lines.append(f"| {length} | " + " | ".join(cells) + " |")
    return lines


def run_lengths(length: int, accepted: float, rounds: int) -> list[int]:
    """Tokens that each round commits; the same for all sides."""
    random = torch.Generator().manual_seed(0)
    right = (torch.rand(rounds, max(LENGTHS), generator=random) < accepted)[:, :length]
    counts: list[int] = (1 + right.long().cumprod(1).sum(1)).tolist()
    return counts


def run(
    target: Target, length: int, accepted: float, rounds: int, pending: int
) -> tuple[float, int]:
    """CPU seconds of a round with chains of a length, and the tokens that all committed."""
    assert isinstance(target.engine, StatefulEngine)
    target.engine.most_pending = pending
    random = torch.Generator().manual_seed(0)
    text_1T = torch.randint(target.info.vocab_size, (1, TEXT), generator=random)
    cache = target.engine.new_cache(1, TEXT + rounds * (length + 1))
    target.engine.read_chunk(text_1T, TEXT, cache, (), [TEXT - 1])
    counts = run_lengths(length, accepted, rounds) if length else [1] * rounds
    written = TEXT
    path_1A = torch.arange(length + 1)[None]
    began = time.process_time()
    for count in counts:
        tokens_1N = torch.randint(target.info.vocab_size, (1, length + 1), generator=random)
        tree = DraftTree.of_shape(
            TreeShape.chain(length) if length else TreeShape.from_paths([]), tokens_1N
        )
        target.engine.forward_tree(tree, written, cache, ())
        cache.accept(path_1A, torch.tensor([count]), in_order=True)
        written += count
    seconds = (time.process_time() - began) / rounds
    cache.release()
    return seconds, written - TEXT


def trees_table(target: Target, repeats: int) -> list[str]:
    """Milliseconds of a forward over a tree, with nothing pending and with four tokens."""
    lines = ["| tree | nodes | lanes | nothing pending | 4 pending |", "|---|---|---|---|---|"]
    for name, shape in TREES.items():
        leaves = [
            path for path in shape.paths if not any(other[:-1] == path for other in shape.paths)
        ]
        cells = []
        for pending in (0, 4):
            seconds = min(forward(target, shape, pending) for _ in range(4 * repeats))
            cells.append(f"{1e3 * seconds:.1f}")
        lines.append(f"| `{name}` | {shape.size} | {len(leaves)} | {' | '.join(cells)} |")
    return lines


def forward(target: Target, shape: TreeShape, pending: int) -> float:
    """CPU seconds of a forward over a tree after a text of which so many tokens are pending."""
    assert isinstance(target.engine, StatefulEngine)
    target.engine.most_pending = 10**9
    random = torch.Generator().manual_seed(0)
    text_1T = torch.randint(target.info.vocab_size, (1, TEXT), generator=random)
    cache = target.engine.new_cache(1, TEXT + 64)
    target.engine.read_chunk(text_1T, TEXT, cache, (), [TEXT - 1])
    if pending:
        tokens_1N = torch.randint(target.info.vocab_size, (1, pending + 1), generator=random)
        target.engine.forward_tree(
            DraftTree.of_shape(TreeShape.chain(pending), tokens_1N), TEXT, cache, ()
        )
        cache.accept(torch.arange(pending + 1)[None], torch.tensor([pending]), in_order=True)
    tokens_1N = torch.randint(target.info.vocab_size, (1, shape.size), generator=random)
    began = time.process_time()
    target.engine.forward_tree(DraftTree.of_shape(shape, tokens_1N), TEXT + pending, cache, ())
    seconds = time.process_time() - began
    cache.release()
    return seconds


if __name__ == "__main__":
    main()
