"""Heads in vLLM on a CPU and here: the same tokens, in the same number of rounds.

    make peers
    python benchmarks/servers.py examples/smollm2-135m-eagle3 runs/*/best

One row for each head, with the chain of the card's command: what `headstart serve-check HEAD`
compares, for all heads in one process of vLLM.
"""

from __future__ import annotations

from common import TARGET, arguments, save

from headstart.addons.serve.comparison import compare
from headstart.scripts.serve_check import ASKED


def main() -> None:
    """Compare, and print the table."""
    parser = arguments(__doc__, "servers.md")
    parser.add_argument("heads", nargs="+", help="head checkpoint folders")
    parser.add_argument("--target", default=TARGET)
    parser.add_argument(
        "--python", default=".venv-vllm/bin/python", help="Python of vLLM's environment"
    )
    parser.add_argument("--new-tokens", type=int, default=48, help="of each answer")
    args = parser.parse_args()
    lines = [
        f"{len(ASKED)} prompts, {args.new_tokens} new tokens at most, greedy, float32.",
        "",
        (
            "| head | drafts a round | loads | the same tokens: here, vLLM without it | rounds:"
            " vLLM, here | accepted by depth: vLLM, here |"
        ),
        "|---|---|---|---|---|---|",
    ]
    found = compare(args.heads, args.target, args.python, ASKED, None, args.new_tokens)
    for head, row in zip(args.heads, found, strict=True):
        start = f"| {head}: {row.kind} | {row.length} |"
        if row.theirs is None:
            lines.append(f"{start} no: {row.error} | - | -, {row.ours.rounds} | - |")
            continue
        same, plain = (f"{count} of {row.answers}" for count in (row.same, row.plain))
        accepted = (" ".join(map(str, side.accepted)) for side in (row.theirs, row.ours))
        lines.append(
            f"{start} yes | {same}, {plain} | {row.theirs.rounds}, {row.ours.rounds} |"
            f" {', '.join(accepted)} |"
        )
    save(args.output, lines)


if __name__ == "__main__":
    main()
