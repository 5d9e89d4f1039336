"""Acceptance of heads by kind of prompt, and what share of each kind's answers their draft vocabulary covers.

    python benchmarks/kinds.py --heads shipped=examples/smollm2-135m-eagle3 --prompts eval/*.jsonl held-out/*.jsonl

Greedy in float32: the target answers each prompt once, and the decoding loop runs over these answers with each head and
tree, so that another head costs its drafts alone. The prompts of a kind that `headstart prompts` held out must share
nothing with what any of the heads was trained on; `--exclude` takes conversations, too.
"""

from __future__ import annotations

import torch
from common import TARGET, arguments, encoded, save
from torch import Tensor

from headstart.heads import DraftHead
from headstart.heads.checkpoints.save_load import load_head
from headstart.inference import DynamicShape, Target, TreeShape, load_tokenizer
from headstart.inference.models.replay import ReplayTarget
from headstart.train.evaluate import greedy_answers
from headstart.train.run_folder import hardware

TREES = {"chain of 3": TreeShape.chain(3), "dynamic tree of 32": DynamicShape(32, 7, 8)}


def main() -> None:
    """Print and write the tables."""
    parser = arguments(__doc__, "kinds.md")
    parser.add_argument("--heads", nargs="+", required=True, metavar="NAME=HEAD")
    parser.add_argument("--prompts", nargs="+", required=True, help="JSONL files of prompts, one kind each")
    parser.add_argument("--limit", type=int, default=20, help="prompts of each file")
    parser.add_argument("--new-tokens", type=int, default=96)
    args = parser.parse_args()
    if wrong := [each for each in args.heads if "=" not in each]:
        parser.error(f"--heads takes NAME=HEAD, not {wrong[0]!r}")
    original = Target.from_pretrained(TARGET, torch.float32)
    original.compile()
    target = ReplayTarget(original)
    heads = {name: load_head(path)[0].float().eval() for name, path in (each.split("=", 1) for each in args.heads)}
    kinds = encoded(load_tokenizer(TARGET), args.prompts, args.limit)
    found: dict[str, dict[str, dict[str, float]]] = {what: {name: {} for name in heads} for what in ("covered", *TREES)}
    for rows in kinds.values():  # all before the first look-up: what is known is read again when there is more
        target.learn([ids_1T[0] for ids_1T in rows], args.new_tokens)
    for kind, rows in kinds.items():
        prompts = [ids_1T[0] for ids_1T in rows]
        for name, head in heads.items():
            for tree, shape in TREES.items():
                output = greedy_answers(target, head, shape, prompts, args.new_tokens)
                found[tree][name][kind] = output.stats.acceptance_length
            found["covered"][name][kind] = covered(output.sequences[:, max(map(len, prompts)) :], head, target)
    lines = [f"Hardware: {hardware()}. {args.limit} prompts of each file, {args.new_tokens} tokens, greedy, float32."]
    for what, figures in found.items():
        cell = "{:.1%}" if what == "covered" else "{:.2f}"
        lines += ["", f"| {what} | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
        for kind, rows in kinds.items():
            cells = [cell.format(figures[name][kind]) for name in heads]
            lines.append(f"| {kind}{'' if len(rows) == args.limit else f' ({len(rows)})'} | {' | '.join(cells)} |")
        means = [cell.format(sum(figures[name].values()) / len(kinds)) for name in heads]
        lines.append(f"| mean | {' | '.join(means)} |")
    save(args.output, lines)


def covered(answers_BT: Tensor, head: DraftHead, target: Target) -> float:
    """Share of the answers' tokens, their first end token included, that the head can draft."""
    ends_BT = torch.isin(answers_BT, torch.tensor(sorted(target.end_tokens)))
    counted_BT = ends_BT.cumsum(1) - ends_BT.int() == 0
    return float(torch.isin(answers_BT[counted_BT], head.vocabulary()).float().mean())


if __name__ == "__main__":
    main()
