"""Rollouts of a policy in training, with a head as it is and with one that learns from them; needs TRL.

python benchmarks/rl.py --steps 50 --prompts-per-step 1 --new-tokens 32 --trained-blocks 6 --lr 2e-5

The GRPO of examples/rl/grpo.py. In every step both heads draft for the same rollouts, in turn, with the same seed; the
tokens are compared one by one. Every fifth step transformers' own generate answers the same prompts, for its speed.
Then what acceptance is left, greedily, when noise is added to the weights of the first model through `.data`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from common import encoded, save
from torch import Tensor

from headstart.console import show_on_console
from headstart.inference import RoundObserver, SpeculativeLM, Stats, Target
from headstart.inference.models.as_loaded import as_loaded
from headstart.inference.provenance import hardware
from headstart.inference.tuning.machine import turns
from headstart.train import OnlineAdapter

sys.path.append(str(Path(__file__).parents[1] / "examples" / "rl"))
from grpo import loaded, options, trainer_of

PERIOD = 10
"""Steps of a row of the table."""
STOCK_EVERY = 5
"""Steps of which one has its prompts answered by transformers, too."""
NOISE = (0.0, 0.02, 0.05, 0.1)
"""Standard deviation of the noise, as a share of that of the weight."""
TREE = "chain:3"


class Rollouts(RoundObserver):
    """The rollouts of all steps, by each head."""

    def __init__(self, target: Target, tokenizer: Any, args: Any, log: Path) -> None:
        self.target = target
        self.log = log
        self.stock = target.model.generate
        self.generator = torch.Generator().manual_seed(args.seed)
        self.seed = args.seed
        self.stats: list[Stats] = []
        self.decoded_at = 0.0
        fixed = SpeculativeLM.from_pretrained(target, args.head, tree=TREE, fallback=False)
        learning = SpeculativeLM.from_pretrained(target, args.head, tree=TREE, fallback=False)
        for lm in (fixed, learning):
            lm.observers.append(self)
        self.adapter = OnlineAdapter(
            learning, tokenizer, lr=args.head_lr, judge_every=args.judge_every, generator=self.generator
        )
        self.methods: dict[str, Any] = {"fixed": fixed.custom_generate(self.generator), "learning": self.adapter}
        self.rows: list[dict[str, Any]] = []

    def end(self, stats: Stats, error: BaseException | None) -> None:
        self.decoded_at = time.perf_counter()
        self.stats.append(stats)

    def __call__(self, input_ids: Tensor, **inputs: Any) -> Tensor:
        """Answer in place of `model.generate`."""
        if "custom_generate" in inputs:  # heads are compared
            return self.stock(input_ids, **inputs)
        step = len(self.rows)
        row: dict[str, Any] = {}
        begun = time.perf_counter()
        with as_loaded(self.target.model):
            self.target.renew()
        row["copying"] = time.perf_counter() - begun  # of the weights that have changed, by the kernels
        answers: dict[str, Tensor] = {}
        for name in turns([*self.methods], step):
            self.generator.manual_seed(1000 * self.seed + step)
            begun = time.perf_counter()
            answers[name] = self.stock(input_ids, custom_generate=self.methods[name], **inputs)
            ended = time.perf_counter()
            stats = self.stats.pop()
            row[name] = {
                "seconds": self.decoded_at - begun,
                "learning": ended - self.decoded_at,
                "tokens": stats.tokens + len(input_ids),
                "round_tokens": stats.tokens,
                "rounds": stats.rounds,
            }
        row["different"] = int((answers["fixed"] != answers["learning"]).sum())
        row["new_tokens"] = answers["fixed"][:, input_ids.shape[1] :].numel()
        row["swapped"] = bool(self.adapter.history) and self.adapter.history[-1].swapped
        row["head_loss"] = self.adapter.history[-1].loss
        if step % STOCK_EVERY == 0:
            begun = time.perf_counter()
            with torch.random.fork_rng():
                sequences = self.stock(input_ids, **inputs)
            row["stock"] = {
                "seconds": time.perf_counter() - begun,
                "tokens": int((sequences[:, input_ids.shape[1] :] != inputs["generation_config"].pad_token_id).sum()),
            }
        self.rows.append(row)
        return answers["learning"]

    def rewarded(self, rewards: list[float]) -> None:
        """Take the rewards of a step, and write its line."""
        self.rows[-1]["reward"] = sum(rewards) / len(rewards)
        with self.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(self.rows[-1]) + "\n")


def rate(rows: list[dict[str, Any]], name: str) -> str:
    """Tokens per second of one way to decode, over some steps; - where it did not run."""
    own = [row[name] for row in rows if name in row]
    return f"{sum(row['tokens'] for row in own) / sum(row['seconds'] for row in own):.1f}" if own else "-"


def length(rows: list[dict[str, Any]], name: str) -> str:
    """Acceptance length of one head over some steps."""
    return f"{sum(row[name]['round_tokens'] for row in rows) / sum(row[name]['rounds'] for row in rows):.2f}"


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The figures of all steps, ten by ten."""
    lines = [
        "| steps | reward | acceptance length, fixed | learning | tokens/s, transformers | fixed | learning | "
        "seconds of learning | swaps |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for start in range(0, len(rows), PERIOD):
        part = rows[start : start + PERIOD]
        cells = [
            f"{start + 1} to {start + len(part)}",
            f"{sum(row['reward'] for row in part) / len(part):.3f}",
            length(part, "fixed"),
            length(part, "learning"),
            rate(part, "stock"),
            rate(part, "fixed"),
            rate(part, "learning"),
            f"{sum(row['learning']['learning'] for row in part) / len(part):.1f}",
            str(sum(row["swapped"] for row in part)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    different = sum(row["different"] for row in rows)
    tokens = sum(row["new_tokens"] for row in rows)
    lines += ["", f"{different} of {tokens} tokens differ between the two heads."]
    return lines


def noisy(args: Any, head: str, limit: int = 24) -> list[str]:
    """Acceptance of a head when noise is added to all matrices, relative to their own deviation."""
    lines = ["| noise, of a weight's standard deviation | acceptance length |", "|---|---|"]
    target, tokenizer = loaded(args)
    lm = SpeculativeLM.from_pretrained(target, head, tree=TREE, fallback=False)
    (prompts,) = encoded(tokenizer, [args.prompts], limit).values()
    first = {name: weight.clone() for name, weight in target.model.state_dict().items()}
    for share in NOISE:
        random = torch.Generator().manual_seed(0)
        for name, weight in target.model.named_parameters():
            noise = torch.randn(weight.shape, generator=random) * first[name].std() * share
            weight.data.copy_(first[name] + noise * (weight.ndim > 1))
        found = []
        for ids in prompts:
            mask = torch.ones_like(ids)
            output = lm.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=args.new_tokens)
            found.append(output.stats)
        low, high = Stats.merged(found).acceptance_length_interval
        lines.append(f"| {share:.0%} | {Stats.merged(found).acceptance_length:.2f} ({low:.2f} to {high:.2f}) |")
    return lines


def main() -> None:
    """Train a policy and measure its rollouts, then drafts for a target with noise in its weights."""
    show_on_console()
    parser = options(__doc__)
    parser.add_argument("--output", default="rl.md")
    parser.add_argument("--log", default="build/rl.jsonl", help="a line for each step")
    args = parser.parse_args()
    log = Path(args.log)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    target, tokenizer = loaded(args)
    rollouts = Rollouts(target, tokenizer, args, log)
    target.model.generate = rollouts
    trainer_of(target.model, tokenizer, args, rollouts.rewarded).train()
    lines = ["# Rollouts of a policy that changes", "", f"Hardware: {hardware()}.", "", *table(rollouts.rows)]
    save(args.output, lines)
    save(args.output, [*lines, "", *noisy(args, args.head)])


if __name__ == "__main__":
    main()
