"""Acceptance of heads by kind of prompt, and what share of each kind's answers their draft
vocabulary covers.

    python benchmarks/kinds.py --heads shipped=examples/smollm2-135m-eagle3 \\
        --prompts eval/*.jsonl held-out/*.jsonl

Greedy in float32: the target answers each prompt once, and the decoding loop runs over these
answers with each head and tree, so that another head costs its drafts alone. Prompts of a kind that
`benchmarks/prompts.py` held out must share nothing with what any of the heads was trained on;
`--exclude` takes conversations, too.
"""

from __future__ import annotations

import torch
from common import TARGET, acceptance, arguments, encoded, named_heads, replay_target, save
from torch import Tensor

from headstart.heads import DraftHead
from headstart.inference import load_tokenizer
from headstart.inference.engines.cpu_decoder import packed_head
from headstart.inference.replay import ReplayTarget
from headstart.inference.targets.provenance import hardware


def main() -> None:
    """Print and write the tables."""
    parser = arguments(__doc__, "kinds.md")
    parser.add_argument("--heads", nargs="+", required=True, metavar="NAME=HEAD")
    parser.add_argument(
        "--prompts", nargs="+", required=True, help="JSONL files of prompts, one kind each"
    )
    parser.add_argument("--limit", type=int, default=20, help="prompts of each file")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument(
        "--packed",
        action="store_true",
        help="draft in the kernels for CPUs, with weights of 8 bits",
    )
    args = parser.parse_args()
    heads = named_heads(parser, args.heads)
    if args.packed:
        heads = {name: packed_head(head.float().eval()) for name, head in heads.items()}
    kinds = encoded(load_tokenizer(TARGET), args.prompts, args.limit)
    target = replay_target(kinds, args.new_tokens)
    found: dict[str, dict[str, dict[str, float]]] = {"covered": {}}
    for name, head in heads.items():
        found["covered"][name] = {
            kind: covered(target, rows, args.new_tokens, head) for kind, rows in kinds.items()
        }
        lengths = acceptance(target, head, kinds, args.new_tokens)
        for what, each in lengths.items():
            found.setdefault(what, {})[name] = each
    lines = [
        f"Hardware: {hardware()}. {args.limit} prompts of each file, {args.new_tokens} tokens,"
        " greedy, float32."
    ]
    for what, figures in found.items():
        cell = "{:.1%}" if what == "covered" else "{:.2f}"
        lines += ["", f"| {what} | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
        for kind, rows in kinds.items():
            cells = [cell.format(figures[name][kind]) for name in heads]
            lines.append(
                f"| {kind}{'' if len(rows) == args.limit else f' ({len(rows)})'} |"
                f" {' | '.join(cells)} |"
            )
        means = [cell.format(sum(figures[name].values()) / len(kinds)) for name in heads]
        lines.append(f"| mean | {' | '.join(means)} |")
    save(args.output, lines)


def covered(target: ReplayTarget, prompts: list[Tensor], new_tokens: int, head: DraftHead) -> float:
    """Share of the answers' tokens, their first end token included, that the head can draft."""
    ends, counted = torch.tensor(sorted(target.end_tokens)), []
    for ids_1T in prompts:
        answer_T = target.texts[tuple(ids_1T[0].tolist())][ids_1T.shape[1] :][:new_tokens]
        ends_T = torch.isin(answer_T, ends)
        counted.append(
            torch.isin(answer_T[ends_T.cumsum(0) - ends_T.int() == 0], head.vocabulary())
        )
    return float(torch.cat(counted).float().mean())


if __name__ == "__main__":
    main()
