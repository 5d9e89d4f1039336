"""Answer a prompt: `headstart generate --target MODEL --head HEAD --prompt "..."`.

The answer streams as it is accepted; a line of statistics follows. Greedy and sampled answers are lossless: the
model's own, or sampled from its own distribution.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeVar

from headstart.console import console, log
from headstart.scripts.command_line import SamplingOptions, options

if TYPE_CHECKING:
    from torch import Tensor

    from headstart.inference import GenerateOutput

Answer = TypeVar("Answer", "Tensor", "GenerateOutput")


@dataclass(frozen=True)
class GenerateConfig(SamplingOptions):
    """One prompt, answered on screen."""

    required = ("target", "prompt")
    minimum: ClassVar[dict[str, float]] = {"max_new_tokens": 0, "temperature": 0, "top_k": 0}

    prompt: str = ""
    """The user's message."""
    compare: bool = False
    """Let stock `model.generate` answer first, and print both rates."""
    max_new_tokens: int = 256
    """Longest answer, in tokens."""


def main(arguments: list[str]) -> None:
    """Parse and answer."""
    stream_answer(options(GenerateConfig, "generate", __doc__, arguments))


def stream_answer(config: GenerateConfig) -> dict[str, float]:
    """Stream the answer to one prompt, print the rate, and return tokens per second by side."""
    import torch
    from transformers import TextStreamer

    from headstart.scripts.measuring.comparison import answer_settings, first_difference, stock_settings
    from headstart.train.data.chat_template import prompt_ids

    lm, tokenizer = config.load()
    target = lm.target
    messages = [{"role": "user", "content": config.prompt}]
    input_ids = prompt_ids(tokenizer, messages, config.thinking, config.template_kwargs).to(target.device)
    mask_1T, streamer = torch.ones_like(input_ids), TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    settings = answer_settings(config.max_new_tokens, config.temperature, config.top_k, config.top_p)
    settings |= {"attention_mask": mask_1T, "streamer": streamer}
    torch.manual_seed(config.seed)  # both sides sample with the global generator
    rates: dict[str, float] = {}

    def timed(side: str, title: str, generate: Callable[[], Answer]) -> Answer:
        console.rule(title)
        start = time.perf_counter()
        answer = generate()
        sequences = answer if isinstance(answer, torch.Tensor) else answer.sequences
        rates[side] = (sequences.shape[1] - input_ids.shape[1]) / (time.perf_counter() - start)
        return answer

    compared = config.compare and config.max_new_tokens > 0
    if compared:
        log.info("warming up both sides")  # the first call of either is slow
        more = stock_settings(target, tokenizer)
        target.model.generate(input_ids, attention_mask=mask_1T, max_new_tokens=2, do_sample=False, **more)
        lm.warmup()
        stock = timed("generate", "model.generate", lambda: target.model.generate(input_ids, **settings, **more))
        log.info(f"{rates['generate']:.1f} tokens/s")
    title = "headstart" if config.head or config.drafter else "headstart, plain"
    output = timed("headstart", title, lambda: lm.generate(input_ids, tokenizer=tokenizer, **settings))
    stats = output.stats
    line = f"{rates['headstart']:.1f} tokens/s"
    if compared:
        line += f" ({rates['headstart'] / rates['generate']:.2f} times)"
    if stats.rounds:
        accepted = " ".join(f"{rate:.2f}" for rate in stats.acceptance_rate_by_depth)
        without = f" ({stats.plain_rounds} without drafts)" if stats.plain_rounds else ""
        line += f", {stats.rounds} rounds{without}, acceptance length {stats.acceptance_length:.2f}"
        line += f", acceptance rate by depth {accepted}" if accepted else ""
    log.info(line)
    if compared and config.temperature == 0:
        difference = first_difference(target, stock, output.sequences, input_ids.shape[1])
        log.info(
            "both generated the same text"
            if difference is None
            else f"the texts differ from token {difference['token']} on, where the logits of the two tokens lie "
            f"{abs(difference['logit_gap']):.2g} apart (in {str(target.dtype).removeprefix('torch.')})"
        )
    return rates
