"""What a head loses that reads only the last part of a prompt: acceptance length by the tokens that it reads.

    python benchmarks/read_last.py --prompts runs/data/prompts-held-out/{summaries,retrieval,long,context}.jsonl

Greedy in float32: the target answers each prompt once, and the decoding loop runs over these answers, so that each row
of the tables costs its drafts alone. A figure is the mean over prompts of the tokens of an answer over its rounds; in
brackets the 95 % interval of the difference from reading everything, paired by prompt.
"""

from __future__ import annotations

import statistics

import torch
from common import HEAD, TARGET, TREES, arguments, encoded, replay_target, save
from torch import Tensor

from headstart.heads.checkpoints.save_load import load_head
from headstart.inference import SpeculativeLM, TreePolicy, load_tokenizer
from headstart.inference.models.replay import ReplayTarget
from headstart.inference.provenance import hardware
from headstart.inference.sequences import left_padded

WIDE = 1.96
"""Standard errors on either side of a mean that hold it with 95 %."""


def main() -> None:
    """A table for each tree: a row for each number of tokens, a column for each file."""
    parser = arguments(__doc__, "read_last.md")
    parser.add_argument("--target", default=TARGET)
    parser.add_argument("--head", default=HEAD)
    parser.add_argument("--prompts", nargs="+", required=True, help="JSONL files of prompts, one kind each")
    parser.add_argument("--limit", type=int, default=40, help="prompts of each file")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 128, 256, 512], help="last tokens that are read")
    args = parser.parse_args()
    kinds = encoded(load_tokenizer(args.target), args.prompts, args.limit)
    target = replay_target(kinds, args.new_tokens, args.target)
    head, _ = load_head(args.head)
    head = head.to(target.device, target.dtype).eval()

    lines = [f"Hardware: {hardware()}. Greedy, float32, {args.new_tokens} new tokens."]
    lines += ["", "| prompts | number | median tokens | of the 9th decile |", "|---|---|---|---|"]
    for kind, rows in kinds.items():
        sizes = sorted(ids_1T.shape[1] for ids_1T in rows)
        lines.append(f"| {kind} | {len(rows)} | {statistics.median_low(sizes)} | {sizes[len(sizes) * 9 // 10]} |")
    for name, tree in TREES.items():
        lines += [
            "",
            f"{name[0].upper()}{name[1:]}:",
            "",
            f"| read | {' | '.join(kinds)} |",
            "|---" * (len(kinds) + 1) + "|",
        ]
        whole = {kind: lengths(target, head, tree, rows, args.new_tokens, None) for kind, rows in kinds.items()}
        lines.append(f"| everything | {' | '.join(f'{statistics.mean(found):.3f}' for found in whole.values())} |")
        for tokens in args.tokens:
            cells = []
            for kind, rows in kinds.items():
                found = lengths(target, head, tree, rows, args.new_tokens, tokens)
                cells.append(f"{statistics.mean(found):.3f} ({interval(found, whole[kind])})")
            lines.append(f"| {tokens} | {' | '.join(cells)} |")
            save(args.output, lines)


def lengths(
    target: ReplayTarget, head: torch.nn.Module, tree: TreePolicy, rows: list[Tensor], new_tokens: int, last: int | None
) -> list[float]:
    """Tokens a round of each prompt's answer, the head having read the `last` tokens of the prompt."""
    options = {"tree": tree, "fallback": False, "compile": False, "read_last": last}
    lm = SpeculativeLM.from_pretrained(target, head, **options)
    found = []
    for batch in (rows[start : start + 8] for start in range(0, len(rows), 8)):
        input_ids, mask = left_padded([ids_1T[0] for ids_1T in batch], target.device)
        settings = {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": [], "pad_token_id": 0}
        stats = lm.generate(input_ids, attention_mask=mask, stop_strings=None, **settings).stats
        found += [sum(record.returned for record in row) / len(row) for row in stats.rows]
    return found


def interval(found: list[float], whole: list[float]) -> str:
    """The 95 % interval of the mean difference, in per cent of the mean."""
    differences = [one - other for one, other in zip(found, whole, strict=True)]
    mean = statistics.mean(differences)
    wide = WIDE * statistics.stdev(differences) / len(differences) ** 0.5
    scale = 100 / statistics.mean(whole)
    return f"{scale * (mean - wide):+.1f} to {scale * (mean + wide):+.1f} %"


if __name__ == "__main__":
    main()
