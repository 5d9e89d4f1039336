"""A head in vLLM and the same head here: the tokens that both give, and the rounds that both need.

vLLM answers prompts greedily with the head as it would be published, in an environment of its own;
headstart answers them with the same chain.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...console import counted, log
from ...files import printable, read_json
from ...heads.base import DraftHead
from ...heads.by_name import head_name
from ...heads.checkpoints.hub import local_folder
from ...heads.checkpoints.model_card import Listing, served_depth
from ...heads.checkpoints.save_load import load_head, publishable
from ...inference.engines.target import Target
from ...inference.speculative_lm import SpeculativeLM
from ...inference.text.chat_template import load_chat_tokenizer, prompt_ids
from ...inference.trees.stats import Stats

WORKER = Path(__file__).parent / "in_vllm" / "vllm_worker.py"
METHODS = ("eagle3", "eagle", "medusa", "dflash", "dspark")
"""Heads that vLLM has a method for, by the same names."""


@dataclass(frozen=True)
class Comparison:
    """A head in vLLM and here, on the same prompts, with a chain of the same length."""

    kind: str
    length: int
    """Tokens drafted in each round."""
    ours: Side
    theirs: Side | None
    """None where vLLM refused the head."""
    version: str
    """Of vLLM."""
    same: int = 0
    """Answers with the same tokens in both."""
    plain: int = 0
    """Answers of vLLM with the head that are those of vLLM without it."""
    answers: int = 0
    error: str = ""
    """Why vLLM refused the head."""


class Side(NamedTuple):
    """Rounds and accepted drafts of one engine."""

    rounds: int
    accepted: list[int]
    """Accepted drafts, by depth."""


@dataclass(frozen=True)
class ServedHead:
    """A head that vLLM is asked to serve."""

    name: str
    """Its checkpoint folder or Hub id."""
    head: DraftHead
    method: str
    length: int
    """Tokens drafted in each round."""


def compare(
    heads: Sequence[str],
    target_name: str,
    python: str | Path,
    texts: Sequence[str],
    draft_length: int | None,
    max_new_tokens: int,
) -> list[Comparison]:
    """Compare each head in vLLM, all in one process, with the same here, on the same messages.

    Raises:
        ValueError: a head that vLLM has no method for, a chain longer than a head drafts, or vLLM
            failed.
    """
    # 1. Ask vLLM, with the target written as it is loaded here. Both compute in float32, so that
    # only engines differ.
    served = [served_head(name, draft_length) for name in heads]
    tokenizer = load_chat_tokenizer(target_name)
    target = Target.from_pretrained(target_name, torch.float32, "cpu")
    prompts = [prompt_ids(tokenizer, [{"role": "user", "content": text}]) for text in texts]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        target.model.save_pretrained(folder / "target")
        tokenizer.save_pretrained(folder / "target")
        log.info("vLLM answers (a minute to start) ...")
        request = {
            "target": str(folder / "target"),
            "max_new_tokens": max_new_tokens,
            "runs": _runs(served, target, folder),
            "prompts": [ids_1T[0].tolist() for ids_1T in prompts],
        }
        answer = in_vllm(python, folder, request)
    plain, *others = answer["runs"]
    if "error" in plain:
        raise ValueError(f"vLLM refused the model, without any head: {plain['error']}")

    # 2. Answer the same prompts here, head by head.
    comparisons = []
    for head, theirs in zip(served, others, strict=True):
        method = head.method
        length = head.length
        tokens, ours = here(target, head.head, length, prompts, max_new_tokens)
        if "error" in theirs:
            # The reason in an error of vLLM: pydantic's words, or the first line.
            error = theirs["error"]
            reason = re.search(r"Value error, (.+?)(?: \[type=|$)", error, re.MULTILINE)
            words = reason[1] if reason else error.splitlines()[0]
            comparison = Comparison(method, length, ours, None, answer["version"], error=words)
        else:
            comparison = Comparison(
                method,
                length,
                ours,
                Side(theirs["drafts"], theirs["accepted"]),
                answer["version"],
                same=_equal(tokens, theirs["tokens"]),
                plain=_equal(plain["tokens"], theirs["tokens"]),
                answers=len(prompts),
            )
        comparisons.append(comparison)
    return comparisons


def served_head(name: str, draft_length: int | None) -> ServedHead:
    """Load a head as vLLM would be asked to serve it.

    Raises:
        ValueError: vLLM has no method for it, or the chain is longer than it drafts.
    """
    head, _ = load_head(name, dtype=torch.float32)
    method = head_name(head)
    if method not in METHODS:
        raise ValueError(
            f"vLLM has no method for a head of type {method}; it has {', '.join(METHODS)}"
        )
    length = draft_length or served_depth(vars(head.config))
    if length > head.max_depth:
        raise ValueError(f"draft_length is {length}, and {name} drafts at most {head.max_depth}")
    if reason := head.unread_by.get("vllm"):
        log.info(f"vLLM does not read {name}, by its card: {reason}")
    return ServedHead(name, head, method, length)


def _runs(served: Sequence[ServedHead], target: Target, folder: Path) -> list[dict[str, Any]]:
    """Return the runs of a request: one without a head, and one for each head.

    The heads are written as `headstart push` uploads them.
    """
    runs: list[dict[str, Any]] = [{"head": None, "method": None, "draft_length": 0}]
    lm_head_VD = target.modules.lm_head.weight.detach()
    for number, head in enumerate(served, start=1):
        published = folder / f"head-{number}"
        # Weights of the target that servers expect in the head's files.
        shared = dict.fromkeys(head.head.served_names, lm_head_VD)
        publishable(local_folder(head.name), published, Listing(), shared)
        runs.append({"head": str(published), "method": head.method, "draft_length": head.length})
    return runs


def _equal(ours: list[list[int]], theirs: list[list[int]]) -> int:
    """Count the answers that have the same tokens."""
    return sum(one == other for one, other in zip(ours, theirs, strict=True))


def here(
    target: Target, head: DraftHead, length: int, prompts: Sequence[Tensor], max_new_tokens: int
) -> tuple[list[list[int]], Side]:
    """Answer prompts [1, T] with a chain of `length` tokens; return new tokens and rounds."""
    lm = SpeculativeLM.from_pretrained(target, head, tree=f"chain:{length}", adaptive=False)
    outputs = []
    for ids_1T in counted(prompts, "answers"):
        outputs.append(lm.generate(ids_1T, max_new_tokens=max_new_tokens, do_sample=False))
    stats = Stats.merged(output.stats for output in outputs)
    tokens = [
        output.sequences[0, ids.shape[1] :].tolist()
        for output, ids in zip(outputs, prompts, strict=True)
    ]
    # As vLLM counts: at position d, the rounds that accepted more than d drafts.
    records = [record for row in stats.rows for record in row]
    accepted = [sum(record.accepted > depth for record in records) for depth in range(length)]
    return tokens, Side(stats.rounds, accepted)


def in_vllm(python: str | Path, scratch: Path, request: dict[str, Any]) -> dict[str, Any]:
    """Run `vllm_worker.py` by the Python of vLLM's environment; return its answer to a request.

    Raises:
        ValueError: no such Python, or vLLM failed; with its errors.
    """
    # 1. Run it.
    request_file = scratch / "request.json"
    answer_file = scratch / "answer.json"
    request_file.write_text(json.dumps(request), encoding="utf-8")
    command: list[str | Path] = [python, WORKER, request_file, answer_file]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise ValueError(f"python {str(python)!r} cannot be run: {error}") from error

    # 2. Of its errors take the lines that name one, without the prefix of vLLM's processes,
    # "(EngineCore pid=1) ERROR [core.py:12] ".
    if done.returncode or not answer_file.exists():
        lines = [
            re.sub(r"^\(.*?\.py:\d+\] +", "", line).strip() for line in done.stderr.splitlines()
        ]
        errors = [line for line in lines if re.match(r"[\w.]+Error(:|$)|Value error", line)]
        reason = "; ".join(dict.fromkeys(errors)) or f"exit status {done.returncode}"
        raise ValueError(f"vLLM failed: {reason}")

    # 3. Check its answer.
    try:
        answer: dict[str, Any] = read_json(answer_file)
        lists = [run["tokens"] for run in answer["runs"] if "error" not in run]
        whole = len(answer["runs"]) == len(request["runs"]) and isinstance(answer["version"], str)
        whole = whole and all(len(tokens) == len(request["prompts"]) for tokens in lists)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"the answer of vLLM's process cannot be read: {type(error).__name__}: {error}"
        ) from error
    if not whole:
        raise ValueError("the answer of vLLM's process is not whole: runs or prompts are missing")
    answer["version"] = printable(answer["version"])
    return answer
