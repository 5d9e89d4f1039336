"""Answer a prompt: `headstart generate "..." --target MODEL --head HEAD`.

The answer streams as it is accepted; a line of statistics follows. Greedy and sampled answers are
lossless: the model's own, or sampled from its own distribution.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeVar

from headstart.console import console, log, number
from headstart.options import limited
from headstart.scripts.command_line import SamplingOptions, options, recorded

if TYPE_CHECKING:
    from torch import Tensor

    from headstart.inference import GenerateOutput, Stats

Answer = TypeVar("Answer", "Tensor", "GenerateOutput")


@dataclass(frozen=True)
class GenerateConfig(SamplingOptions):
    """One prompt, answered on screen."""

    required = ("target", "prompt")
    most_used = ("target", "head", "prompt", "max_new_tokens", "temperature")
    texts = ("prompt",)
    takes_encoder_decoders: ClassVar[bool] = True

    prompt: str = ""
    """The user's message."""
    compare: bool = False
    """Let stock `model.generate` answer first, and print both rates."""
    max_new_tokens: int = limited(256, minimum=0)
    """Longest answer, in tokens."""
    record: str | None = None
    """Folder in which to record the answer with the target's states, for training; null for none.
    It holds the text, as tokens. HEADSTART_NO_RECORD=1 in the environment wins over it."""


def main(arguments: list[str]) -> None:
    """Run `headstart generate` with these command-line arguments."""
    stream_answer(options(GenerateConfig, "generate", __doc__, arguments, first="prompt"))


def stream_answer(config: GenerateConfig) -> dict[str, float]:
    """Stream the answer to one prompt, print the rate, and return tokens per second by side."""
    import torch
    from transformers import TextStreamer

    from headstart.heads.base import dtype_name
    from headstart.scripts.measuring.comparison import (
        answer_begin,
        answer_settings,
        encoded_prompt,
        first_difference,
        stock_settings,
    )

    # 1. The prompt, and settings that both sides take.
    lm, tokenizer = config.load()
    target = lm.target
    messages = [{"role": "user", "content": config.prompt}]
    input_ids = encoded_prompt(target, tokenizer, messages, config).to(target.device)
    prompt_length = answer_begin(target, input_ids)
    mask_1T = torch.ones_like(input_ids)
    settings = answer_settings(
        config.max_new_tokens, config.temperature, config.top_k, config.top_p
    )
    settings["attention_mask"] = mask_1T
    settings["streamer"] = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    torch.manual_seed(config.seed)  # both sides sample with the global generator
    rates: dict[str, float] = {}

    def timed(side: str, title: str, generate: Callable[[], Answer]) -> Answer:
        """Answer under a title, and keep the rate: new tokens over the time of the whole call."""
        console.rule(title)
        start = time.perf_counter()
        answer = generate()
        seconds = time.perf_counter() - start
        sequences = answer if isinstance(answer, torch.Tensor) else answer.sequences
        rates[side] = (sequences.shape[1] - prompt_length) / seconds
        return answer

    # 2. Stock generate, if it is asked for. The first call of either side is slow.
    compared = config.compare and config.max_new_tokens > 0
    if compared:
        log.info("warming up both sides")
        more = stock_settings(target, tokenizer)
        target.model.generate(
            input_ids, attention_mask=mask_1T, max_new_tokens=2, do_sample=False, **more
        )
        lm.warmup()
        stock = timed(
            "generate",
            "model.generate",
            lambda: target.model.generate(input_ids, **settings, **more),
        )
        log.info(f"{rates['generate']:.1f} tokens/s")

    # 3. headstart.
    title = "headstart" if config.head or config.drafter else "headstart, plain"
    with recorded(config.record, [lm], tokenizer):
        output = timed(
            "headstart", title, lambda: lm.generate(input_ids, tokenizer=tokenizer, **settings)
        )

    # 4. Statistics. Sampled answers are independent, and not compared.
    log.info(_statistics(rates, output.stats))
    if (
        compared
        and (config.head or config.drafter)
        and 2 * output.stats.plain_rounds > output.stats.rounds
    ):
        log.info(
            "drafts did not pay in most rounds: the difference to generate is mostly that of"
            " headstart's forward passes"
        )
    if compared and config.temperature == 0:
        difference = first_difference(target, stock, output.sequences, prompt_length, input_ids)
        if difference is None:
            log.info("both generated the same text")
        else:
            log.info(
                f"the texts differ from token {difference['token']} on, where the logits of the two"
                f" tokens are {abs(difference['logit_gap']):.2g} apart (in"
                f" {dtype_name(target.dtype)})"
            )
    return rates


def _statistics(rates: dict[str, float], stats: Stats) -> str:
    """Return a line about an answer: its speed, the ratio to stock generate, and acceptance."""
    line = f"{rates['headstart']:.1f} tokens/s"
    if "generate" in rates:
        line += f" ({rates['headstart'] / rates['generate']:.2f} times)"
    if not stats.rounds:
        return line
    line += f", {stats.rounds} rounds"
    if stats.plain_rounds:
        line += f" ({stats.plain_rounds} without drafts)"
    line += f", acceptance length {stats.acceptance_length:.2f}"
    if stats.acceptance_rate_by_depth:
        by_depth = " ".join(number(rate) for rate in stats.acceptance_rate_by_depth)
        line += f", acceptance rate by depth {by_depth}"
    return line
