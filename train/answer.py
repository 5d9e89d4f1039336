"""One prompt answered on screen, by speculation and, to compare, by stock `generate`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import TextStreamer

from ..inference import Stats
from .commands import GenerateConfig
from .console import console
from .data import prompt_ids
from .engine import load_engine


def answer(config: GenerateConfig) -> None:
    """Load, answer, print the rates.

    Raises:
        ValueError: a target, head, tree or prompt that cannot be used.
    """
    lm, tokenizer = load_engine(config)
    target = lm.target
    messages = [{"role": "user", "content": config.prompt}]
    input_ids = prompt_ids(tokenizer, messages, config.thinking).to(target.device)
    settings: dict[str, Any] = {"max_new_tokens": config.max_new_tokens, "do_sample": config.temperature > 0}
    if config.temperature > 0:
        settings |= {"temperature": config.temperature, "top_k": config.top_k, "top_p": config.top_p}
    settings["attention_mask"] = torch.ones_like(input_ids)
    settings["streamer"] = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    torch.manual_seed(config.seed)  # both draw from the global generator

    def rated(title: str, write: Callable[[], torch.Tensor]) -> float:
        console.rule(title)
        start = time.perf_counter()
        tokens = write().shape[1] - input_ids.shape[1]
        return tokens / (time.perf_counter() - start)

    if config.compare and config.max_new_tokens > 0:
        for generate in (target.model.generate, lm.generate):  # a first call is slow, whoever makes it
            generate(input_ids, attention_mask=settings["attention_mask"], max_new_tokens=2, do_sample=False)
        stock = rated("model.generate", lambda: target.model.generate(input_ids, **settings))
        console.print(f"{stock:.1f} tokens/s")
    stats = Stats()

    def speculate() -> torch.Tensor:
        output = lm.generate(input_ids, **settings)
        nonlocal stats
        stats = output.stats
        return output.sequences

    ours = rated("headstart" if config.head or config.drafter else "headstart, plain", speculate)
    line = f"{ours:.1f} tokens/s"
    if config.compare and config.max_new_tokens > 0:
        line += f" ({ours / stock:.2f} times)"
    if stats.rounds:
        rates = " ".join(f"{rate:.2f}" for rate in stats.acceptance_rate_by_depth)
        line += f", {stats.rounds} rounds, acceptance length {stats.acceptance_length:.2f}"
        line += f", acceptance rate by depth {rates}" if rates else ""
    console.print(line)
