"""One prompt answered on screen, by speculation and, to compare, by stock `generate`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import TextStreamer

from ..heads.base import dtype_name
from ..inference import Stats
from .benchmark import first_difference
from .commands import GenerateConfig
from .console import console, log
from .data.chat_template import prompt_ids
from .engine import Shared, load_engine


def answer(config: GenerateConfig, shared: Shared | None = None) -> dict[str, float]:
    """Load, answer, print the rates.

    Args:
        config: of the command.
        shared: the target, if others use it too.

    Returns:
        tokens per second, by side: `headstart`, and, if it was asked, `generate`.

    Raises:
        ValueError: a target, head, tree or prompt that cannot be used.
    """
    lm, tokenizer = load_engine(config, shared)
    target = lm.target
    messages = [{"role": "user", "content": config.prompt}]
    input_ids = prompt_ids(tokenizer, messages, config.thinking).to(target.device)
    settings: dict[str, Any] = {"max_new_tokens": config.max_new_tokens, "do_sample": config.temperature > 0}
    if config.temperature > 0:
        settings |= {"temperature": config.temperature, "top_k": config.top_k, "top_p": config.top_p}
    settings["attention_mask"] = torch.ones_like(input_ids)
    settings["streamer"] = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    torch.manual_seed(config.seed)  # both draw from the global generator
    rates: dict[str, float] = {}

    def rated(side: str, title: str, write: Callable[[], torch.Tensor]) -> torch.Tensor:
        console.rule(title)
        start = time.perf_counter()
        sequences = write()
        rates[side] = (sequences.shape[1] - input_ids.shape[1]) / (time.perf_counter() - start)
        return sequences

    compared = config.compare and config.max_new_tokens > 0
    if compared:
        log.info("warming up both sides")  # a first call is slow, whoever makes it
        target.model.generate(input_ids, attention_mask=settings["attention_mask"], max_new_tokens=2, do_sample=False)
        lm.warmup()
        stock = rated("generate", "model.generate", lambda: target.model.generate(input_ids, **settings))
        log.info(f"{rates['generate']:.1f} tokens/s")
    stats = Stats()

    def speculate() -> torch.Tensor:
        output = lm.generate(input_ids, **settings)
        nonlocal stats
        stats = output.stats
        return output.sequences

    ours = rated("headstart", "headstart" if config.head or config.drafter else "headstart, plain", speculate)
    line = f"{rates['headstart']:.1f} tokens/s"
    if compared:
        line += f" ({rates['headstart'] / rates['generate']:.2f} times)"
    if stats.rounds:
        accepted = " ".join(f"{rate:.2f}" for rate in stats.acceptance_rate_by_depth)
        line += f", {stats.rounds} rounds, acceptance length {stats.acceptance_length:.2f}"
        line += f", acceptance rate by depth {accepted}" if accepted else ""
    log.info(line)
    if compared and config.temperature == 0:
        parting = first_difference(target, stock, ours, input_ids.shape[1])
        log.info(
            "both wrote the same text"
            if parting is None
            else f"the texts differ from token {parting['token']} on, where the logits of the two tokens lie "
            f"{abs(parting['logit_gap']):.2g} apart (in {dtype_name(target.dtype)})"
        )
    return rates
