"""Sampling at temperature 1: tokens a round and speed, by where drafts come from and by which rule
they are judged.

    python benchmarks/sampling.py --prompts gsm8k.jsonl humaneval.jsonl mt_bench.jsonl

*Alike*: the head picks the tokens that the numbers of each place would make it draw, which the rule
then draws by the same numbers (arXiv:2408.07978); what sampling does by default. *Blind*: it picks
its likeliest tokens. *Drawn*: it draws tokens of its own, judged by rejection sampling. *Sequoia*
is the static tree that is best for how often a node's i-th child is accepted (arXiv:2402.12374,
section 4.1), which is counted on other prompts of the same files. All sides answer every prompt in
turns, with all tokens allowed.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch
from common import HEAD, TARGET, Side, arguments, compared, encoded, ratio, save
from torch import Tensor

from headstart.inference import Round, SpeculativeLM, Stats, load_tokenizer
from headstart.inference.targets.provenance import hardware
from headstart.inference.trees.tree_spec import SampledShape
from headstart.inference.tuning.tree_search import best_static_tree
from headstart.scripts.measuring.comparison import answer_settings

TREES = (
    "chain:1",
    "chain:3",
    "branch:4",
    "branch:3x1x1",
    "dynamic:8:4:2",
    "dynamic:16:5:5",
    "dynamic:32:7:8",
)
COUNTED, NODES, DEPTH = "branch:8x4x2", 32, 7
"""Tree on which children are counted by their order, and size and depth of the tree that is made of
the counts."""


def seeded(lm: SpeculativeLM, blind: bool = False) -> Side:
    """A side that answers with the same random numbers as all others."""
    begin: Any = lm.drafter.begin
    if blind:
        lm.drafter.begin = lambda context: begin(replace(context, gumbel=None))  # type: ignore[method-assign]

    def answer(ids: Tensor, settings: dict[str, Any]) -> tuple[Tensor, Stats]:
        generator = torch.Generator().manual_seed(ids.shape[1])
        output = lm.generate(
            ids, attention_mask=torch.ones_like(ids), generator=generator, **settings
        )
        return output.sequences, output.stats

    return answer


def order_rates(lm: SpeculativeLM, prompts: list[Tensor], settings: dict[str, Any]) -> list[float]:
    """How often the i-th child of a node on the accepted path is accepted, siblings in the order of
    their drawing."""
    accepted, judged = [0] * 8, [0] * 8
    observe: Any = lm.drafter.observe

    def counted(finished: Round) -> None:
        verdict = finished.verdict
        parents = finished.verified.parents_BN[0].tolist()
        path = verdict.path_BA[0, : verdict.lengths_B[0]].tolist()
        for node, child in zip_longest(path, path[1:]):
            siblings = [other for other, parent in enumerate(parents) if parent == node]
            for order, sibling in enumerate(siblings):
                judged[order] += 1
                accepted[order] += sibling == child
        observe(finished)

    lm.drafter.observe = counted  # type: ignore[method-assign]
    answer = seeded(lm)
    for ids in prompts:
        answer(ids, settings)
    lm.drafter.observe = observe  # type: ignore[method-assign]
    return [one / max(all_, 1) for one, all_ in zip(accepted, judged, strict=True)]


def main() -> None:
    """Print and write a table with a row for each kind of drafts, a pair of columns for each
    file."""
    parser = arguments(__doc__, "sampling.md")
    parser.add_argument("--target", default=TARGET)
    parser.add_argument("--head", default=HEAD)
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--trees", nargs="+", default=TREES, help="specs of trees")
    parser.add_argument("--limit", type=int, default=6)
    parser.add_argument("--new-tokens", type=int, default=96)
    args = parser.parse_args()
    default = SpeculativeLM.from_pretrained(args.target, args.head).warmup()
    sides = {
        "without drafts": seeded(SpeculativeLM.from_pretrained(default.target)),
        "default": seeded(default),
    }
    for tree in args.trees:
        ways = ("alike", "blind") if "dynamic" in tree else ("alike", "blind", "drawn")
        for way in ways:
            word = f"drawn:{tree}" if way == "drawn" else tree
            lm = SpeculativeLM.from_pretrained(default.target, args.head, tree=word, adaptive=False)
            sides[f"`{tree}`, {way}"] = seeded(lm, way == "blind")
    settings = answer_settings(args.new_tokens, 1.0) | {"top_k": 0, "top_p": 1.0}
    files = encoded(load_tokenizer(args.target), args.prompts, 2 * args.limit)
    others = [ids_1T for rows in files.values() for ids_1T in rows[args.limit :]]
    if not others:
        parser.error(
            f"no file has more than {args.limit} prompts, and those behind them are counted on"
        )
    files = {file: rows[: args.limit] for file, rows in files.items()}
    rates: dict[str, list[float]] = {}
    for way, spec in (("alike", COUNTED), ("drawn", f"drawn:{COUNTED}")):
        lm = SpeculativeLM.from_pretrained(default.target, args.head, tree=spec, adaptive=False)
        rates[way] = order_rates(lm, others, settings)
        best = best_static_tree([rates[way]] * DEPTH, NODES)
        shape = SampledShape(best) if way == "drawn" else best
        lm = SpeculativeLM.from_pretrained(default.target, args.head, tree=shape, adaptive=False)
        sides[f"Sequoia of {NODES}, {way}"] = seeded(lm)
    lengths: dict[str, list[float]] = {name: [] for name in sides}
    ratios: dict[str, list[str]] = {name: [] for name in sides}
    for file, prompts in files.items():
        speeds, stats = compared(sides, prompts, settings, file)
        for name in sides:
            lengths[name].append(stats[name].acceptance_length)
            ratios[name].append(ratio(speeds[name], speeds["without drafts"]))
    lines = [
        (
            f"Hardware: {hardware()}. {args.limit} prompts of each file, {args.new_tokens} new"
            f" tokens, torch's threads: {torch.get_num_threads()}."
        ),
        "",
        f"| drafts | tokens a round: {' | '.join(files)} | over plain steps: {' | '.join(files)} |",
        "|---" * (1 + 2 * len(files)) + "|",
        *(
            f"| {name} | "
            + " | ".join([*(f"{length:.2f}" for length in lengths[name]), *ratios[name]])
            + " |"
            for name in sides
        ),
        "",
        *(
            f"Accepted by order, {way}: {', '.join(f'{each:.2f}' for each in found)}."
            for way, found in rates.items()
        ),
    ]
    save(args.output, lines)


if __name__ == "__main__":
    main()
