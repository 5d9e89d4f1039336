"""The main job from end to end on SmolLM2-135M-Instruct, within some minutes on any machine.

Each stage gets a share of the time that is left when it begins, and does as much in it as this machine can. What was
decided by measuring is kept beside the results, as is the time that was spent: the same command goes on where it
stopped, and a finished stage is not repeated.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from ..inference import SpeculativeLM
from .answer import answer
from .benchmark import benchmark, print_report
from .commands import BenchConfig, DemoConfig, GenerateConfig, SelfMadeConfig
from .config import DataConfig, EvalConfig, LoopConfig, TrainConfig
from .console import StopRequest, console, duration, log
from .data.chat_template import count_answer_tokens, read_prompts, read_sources
from .data.self_made import make_conversations
from .engine import Shared
from .files import write_whole
from .loop import seconds_per_step, train
from .setup import split_examples

PROMPT = "How does a sailing boat move against the wind?"
FIRST_TOKENS, FIRST_SECONDS = 96, 12.0
"""Of the first answer, by `generate`, at most: the first screen is to be there within a minute."""
CONVERSATIONS_PER_MINUTE = 32
"""At most: more would not be trained on `EPOCHS` times in the same time."""
VOCABULARY = 2048
"""Tokens of the draft vocabulary, at most: the conversations must hold so many different ones."""
EPOCHS = 3
DATA, TRAINING, EVALUATION = 0.4, 0.65, 0.15
"""Of the time that is left: for conversations; then for training with its evaluation; of which for the latter."""
BENCHED = 3
"""Prompts that there should be time for with each head, the one to be warm counted."""


class Budget:
    """Time, and what was decided by it, kept in a file."""

    def __init__(self, path: Path, seconds: float) -> None:
        self.path, self.seconds = path, seconds
        self.kept: dict[str, Any] = {"spent": 0.0}
        if path.exists():
            self.kept = json.loads(path.read_text(encoding="utf-8"))
        self._began, self._before = time.monotonic(), self.kept["spent"]

    @property
    def left(self) -> float:
        """Seconds, over all starts."""
        return self.seconds - self._before - (time.monotonic() - self._began)

    def until(self, share: float) -> float:
        """When a share of what is left will be over, on `time.monotonic`'s clock."""
        return time.monotonic() + share * self.left

    def once(self, name: str, decide: Callable[[], Any]) -> Any:
        """What was decided at the first start that came so far."""
        if name not in self.kept:
            self.kept[name] = decide()
            self.write()
        return self.kept[name]

    def write(self) -> None:
        """Keep it all, and what was spent."""
        self.kept["spent"] = self.seconds - self.left
        with StopRequest():  # whole or not at all
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, json.dumps(self.kept, indent=1))

    def __enter__(self) -> Budget:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.write()


def demo(config: DemoConfig) -> None:
    """Show the shipped head; then make conversations, train heads on them, and compare speeds.

    Raises:
        ValueError: a target, head or prompt file that cannot be used.
        Stopped: Ctrl-C or SIGTERM; the same command goes on from there.
    """
    read_prompts(config.prompts)  # a missing file is told now and not after the training
    folder = Path(f"{config.output}-{config.minutes}min")
    with StopRequest() as stop, Budget(folder / "demo.json", 60.0 * config.minutes) as budget, stop.at_once():
        stages(config, folder, budget)


def stages(config: DemoConfig, folder: Path, budget: Budget) -> None:
    """One after the other."""
    shared = Shared(config.target, GenerateConfig.dtype)

    console.rule("1 of 4: one prompt, without and with the EAGLE-3 head of this repository")
    rates = budget.once("rates", lambda: first_screen(config, shared))
    log.info(", ".join(f"{side}: {rate:.1f} tokens/s" for side, rate in rates.items()))

    console.rule(f"2 of 4: the model makes its own conversations ({duration(DATA * budget.left)})")
    conversations = make_conversations(
        SelfMadeConfig(
            target=config.target,
            head=config.head,
            output=str(folder / "conversations.jsonl"),
            conversations=CONVERSATIONS_PER_MINUTE * config.minutes,
            batch_size=32,
            answer_tokens=160,
            temperature=0.0,
        ),
        budget.until(DATA),
        shared,
    )

    console.rule(f"3 of 4: Medusa heads learn from them ({duration(TRAINING * budget.left)})")
    plan = budget.once("training", lambda: training_plan(config, folder, conversations, shared, TRAINING * budget.left))
    log.info(f"as many steps as there is time for: {plan['steps']}")
    evaluation = (TRAINING * budget.left) * EVALUATION
    run = train(training(config, folder, conversations, plan), budget.until(TRAINING) - evaluation, shared)

    console.rule(f"4 of 4: speed, of both heads ({duration(budget.left)})")
    tokens = budget.once("bench_tokens", lambda: bench_tokens(rates, budget.left))
    for share, name, head in ((0.5, "medusa", str(run / "best")), (1.0, "eagle3", config.head)):
        path = folder / f"bench-{name}.json"
        if path.exists() and not json.loads(path.read_text(encoding="utf-8"))["stopped"]:
            print_report(json.loads(path.read_text(encoding="utf-8")))
        else:
            options = BenchConfig(
                target=config.target,
                head=head,
                prompts=[config.prompts],
                max_new_tokens=tokens,
                limit=10,
                output=str(path),
            )
            benchmark(options, budget.until(share), shared)
        log.info(f"head: {head}; all figures: {path}")
    log.info(f"all of it took {duration(budget.seconds - budget.left)}")


def first_screen(config: DemoConfig, shared: Shared) -> dict[str, float]:
    """One prompt both ways, as long an answer as there is time for; tokens per second, by side."""
    model, ids_1T = shared.target.model, torch.zeros((1, 8), dtype=torch.int64, device=shared.target.device)
    log.info("timing a few tokens")
    for count in (2, 8):
        began = time.monotonic()
        model.generate(ids_1T, attention_mask=torch.ones_like(ids_1T), max_new_tokens=count, min_new_tokens=count)
    fitting = int(FIRST_SECONDS * count / (time.monotonic() - began))
    tokens = min(FIRST_TOKENS, max(16, fitting))
    return answer(
        GenerateConfig(target=config.target, head=config.head, prompt=PROMPT, compare=True, max_new_tokens=tokens),
        shared,
    )


def training(config: DemoConfig, folder: Path, conversations: Path, plan: dict[str, int]) -> TrainConfig:
    """The options of the run."""
    return TrainConfig(
        target=config.target,
        output=str(folder / "medusa"),
        head={"type": "medusa", "num_heads": 3, "draft_vocab_size": plan["vocabulary"]},
        data=DataConfig(sources=[str(conversations)], held_out=plan["prompts"] / plan["conversations"]),
        loop=LoopConfig(max_steps=plan["steps"], batch_size=4, eval_every=0, save_every=50),
        eval=EvalConfig(conversations=16, prompts=plan["prompts"], new_tokens=plan["new_tokens"]),
    )


def training_plan(
    config: DemoConfig, folder: Path, conversations: Path, shared: Shared, seconds: float
) -> dict[str, int]:
    """How many steps fit, and what is left for the evaluation, by what both take on this machine."""
    log.info("timing a few steps")
    began = time.monotonic()
    made = len(read_prompts(str(conversations)))
    tokens = EVALUATION * seconds / seconds_per_token(shared)
    prompts = int(min(8, max(2, tokens / 64), made // 2))
    plan = {
        "conversations": made,
        "prompts": prompts,
        "new_tokens": int(min(64, max(8, tokens / prompts))),
        "steps": 1,
        "vocabulary": 1,
    }
    options = training(config, folder, conversations, plan)
    rows, _ = read_sources([str(conversations)], None)
    examples, _ = split_examples(rows, options, shared.target, shared.tokenizer)
    counts_V = count_answer_tokens(examples, shared.target.info.vocab_size)
    plan["vocabulary"] = min(VOCABULARY, int((counts_V > 0).sum()))
    each = seconds_per_step(training(config, folder, conversations, plan), shared)
    rest = (1 - EVALUATION) * seconds - (time.monotonic() - began)
    most = EPOCHS * (made - prompts) // 4
    return {**plan, "steps": int(max(1, min(most, rest / each)))}


def seconds_per_token(shared: Shared) -> float:
    """What an evaluation takes for each token of an answer: it decodes a batch with trees of 4, 12 and 12 nodes."""
    lm = SpeculativeLM(shared.target)
    ids_BT = torch.zeros((32, 4), dtype=torch.int64, device=shared.target.device)
    mask = torch.ones_like(ids_BT)
    stats = lm.generate(ids_BT, attention_mask=mask, max_new_tokens=4, min_new_tokens=4, do_sample=False).stats
    return min(stats.round_seconds) / 32 * (4 + 12 + 12) / 1.7  # tokens a round


def bench_tokens(rates: dict[str, float], seconds: float) -> int:
    """New tokens of an answer, so that both heads' benchmarks see some prompts."""
    each = 2 / rates["generate"] + 1 / rates["headstart"]  # generate, plain steps, and speculation
    return int(min(64, max(16, seconds / (2 * BENCHED) / each)))
