"""What recording costs: tokens a second with and without it, in turn on the same prompts, greedy.

python benchmarks/record.py --prompts gsm8k.jsonl humaneval.jsonl mt_bench.jsonl
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from common import HEAD, TARGET, arguments, compared, encoded, ours, ratio, save

from headstart.addons.record import record
from headstart.files import file_sizes
from headstart.inference import SpeculativeLM, Target, load_tokenizer
from headstart.inference.feature_cache import FORMATS
from headstart.inference.targets.provenance import hardware
from headstart.scripts.measuring.comparison import answer_settings


def main() -> None:
    """A row for each file and format: the ratio of tokens a second, and the bytes that a token
    takes on disk."""
    parser = arguments(__doc__, "record.md")
    parser.add_argument("--target", default=TARGET)
    parser.add_argument("--head", default=HEAD)
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--limit", type=int, default=16, help="prompts of each file")
    parser.add_argument("--new-tokens", type=int, default=128)
    args = parser.parse_args()
    target, tokenizer = Target.from_pretrained(args.target), load_tokenizer(args.target)
    lines = [
        "# What recording costs",
        "",
        (
            f"Hardware: {hardware()}. {args.limit} prompts of each file, {args.new_tokens} tokens,"
            " median and quartiles of the ratio prompt by prompt. Without recording both sides are"
            " the same, which shows the noise."
        ),
        "",
        "| prompts | recorded | tokens/s with / without | KiB a token on disk | dropped |",
        "|---|---|---|---|---|",
    ]
    # Of fixed trees: which one adaptive drafting takes depends on the time of single rounds.
    without = SpeculativeLM.from_pretrained(target, args.head, tree="dynamic:4:3:2", adaptive=False)
    recorded = SpeculativeLM.from_pretrained(
        target, args.head, tree="dynamic:4:3:2", adaptive=False
    )
    for file, prompts in encoded(tokenizer, args.prompts, args.limit).items():
        sides = {"without": ours(without), "with": ours(recorded)}
        settings = answer_settings(args.new_tokens, 0.0)
        rates, _ = compared(sides, prompts, settings, f"{file}, nothing")
        lines.append(f"| {file} | nothing | {ratio(rates['with'], rates['without'])} | - | - |")
        for storage in FORMATS:
            with (
                tempfile.TemporaryDirectory() as folder,
                record(recorded, folder, format=storage) as running,
            ):
                rates, stats = compared(sides, prompts, settings, f"{file}, {storage}")
                running.stop()
                tokens = stats["with"].tokens + sum(ids.shape[1] for ids in prompts)
                kib = file_sizes(Path(folder)) / 1024 / tokens
            cells = [
                file,
                storage,
                ratio(rates["with"], rates["without"]),
                f"{kib:.1f}",
                str(running.dropped),
            ]
            lines.append(f"| {' | '.join(cells)} |")
            save(args.output, lines)


if __name__ == "__main__":
    main()
