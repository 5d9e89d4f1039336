"""Typical acceptance: what its thresholds gain, and what they do to the answers.

    python benchmarks/typical.py --prompts gsm8k.jsonl mt_bench.jsonl

Every prompt is answered greedily, twice by exact sampling, and by typical acceptance at each pair
of thresholds, all with one tree, in turns. The last number of an answer is compared with the greedy
answer's: two exact samples show how often that differs by chance. Distinct 4-grams and the model's
own perplexity (at temperature 1) say whether the answers are like those that sampling gives.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import torch
from common import HEAD, TARGET, arguments, compared, encoded, ours, ratio, save
from torch import Tensor

from headstart.inference import SpeculativeLM, Stats, Target, load_tokenizer
from headstart.inference.targets.provenance import hardware
from headstart.scripts.measuring.comparison import answer_settings
from headstart.train.data.conversations import distinct_share

THRESHOLDS = ("0.3:0.3", "0.09:0.3", "0.09:1", "0.03:0.3", "0.01:0.1")
"""Epsilon and delta; 0.09 and 0.3 are Medusa's."""


def main() -> None:
    """Print and write a table for each file."""
    parser = arguments(__doc__, "typical.md")
    parser.add_argument("--target", default=TARGET)
    parser.add_argument("--head", default=HEAD)
    parser.add_argument("--tree", default="dynamic:8:4:2")
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--new-tokens", type=int, default=192)
    parser.add_argument("--temperature", type=float, default=0.7)
    args = parser.parse_args()
    target, tokenizer = Target.from_pretrained(args.target), load_tokenizer(args.target)
    sampling = answer_settings(args.new_tokens, args.temperature)

    def side(
        settings: dict[str, Any], **options: Any
    ) -> Callable[[Tensor, dict[str, Any]], tuple[Tensor, Stats]]:
        answer = ours(
            SpeculativeLM.from_pretrained(
                target, args.head, tree=args.tree, adaptive=False, **options
            )
        )
        return lambda ids, given: answer(ids, settings)

    sides = {
        "greedy": side(answer_settings(args.new_tokens, 0.0)),
        "exact": side(sampling),
        "exact, again": side(sampling),
    }
    sides |= {
        f"typical:{each}": side(sampling, acceptance=f"typical:{each}", lossy=True)
        for each in THRESHOLDS
    }
    lines = [
        f"Hardware: {hardware()}. {args.limit} prompts of each file, {args.new_tokens} new tokens"
        f" at temperature {args.temperature}, tree {args.tree}."
    ]
    columns = (
        "| rule | acceptance length | over exact | last number as greedy | distinct 4-grams |"
        " perplexity |"
    )
    for file, prompts in encoded(tokenizer, args.prompts, args.limit).items():
        texts: dict[str, list[Tensor]] = {name: [] for name in sides}
        torch.manual_seed(0)
        rates, stats = compared(
            {name: kept(each, texts[name]) for name, each in sides.items()}, prompts, {}, file
        )
        answers = {
            name: [
                text_T[len(ids_1T[0]) :] for text_T, ids_1T in zip(found[1:], prompts, strict=True)
            ]
            for name, found in texts.items()
        }
        numbers = {
            name: [last_number(str(tokenizer.decode(answer_T))) for answer_T in found]
            for name, found in answers.items()
        }
        lines += ["", f"## {file}", "", columns, "|---" * 6 + "|"]
        for name in sides:
            same = [
                own == greedy
                for own, greedy in zip(numbers[name], numbers["greedy"], strict=True)
                if greedy
            ]
            distinct = [distinct_share(answer_T.tolist()) for answer_T in answers[name]]
            cells = [
                f"`{name}`",
                f"{stats[name].acceptance_length:.2f}",
                ratio(rates[name], rates["exact"]),
                f"{sum(same)} of {len(same)}",
                f"{sum(distinct) / len(distinct):.2f}",
                f"{perplexity(target, texts[name][1:], prompts):.2f}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
        save(args.output, lines)


def kept(
    answer: Callable[..., tuple[Tensor, Stats]], texts: list[Tensor]
) -> Callable[..., tuple[Tensor, Stats]]:
    """A side whose sequences are also put into `texts`."""

    def answered(ids: Tensor, settings: dict[str, Any]) -> tuple[Tensor, Stats]:
        sequences, stats = answer(ids, settings)
        texts.append(sequences[0])
        return sequences, stats

    return answered


def last_number(text: str) -> str | None:
    """The last number of a text, without separators of thousands."""
    found = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    return found[-1].replace(",", "").rstrip(".") if found else None


@torch.inference_mode()
def perplexity(target: Target, texts: list[Tensor], prompts: list[Tensor]) -> float:
    """Perplexity of the answers under the model, over all their tokens."""
    loss, count = 0.0, 0
    for text_T, ids_1T in zip(texts, prompts, strict=True):
        begin = ids_1T.shape[1]
        logits_TV = target.model(text_T[None]).logits[0, begin - 1 : -1].float()
        loss += float(torch.nn.functional.cross_entropy(logits_TV, text_T[begin:], reduction="sum"))
        count += len(text_T) - begin
    return math.exp(loss / count)


if __name__ == "__main__":
    main()
