"""Check a head against its target: `headstart verify HEAD --target MODEL`.

A layer counted from the wrong end, a missing norm or ids off by one raise no error; the head is only never right. So
the target answers a few built-in prompts, and the head drafts along the answers: as it is, and as it would if one of
the usual misreadings were undone. A head of ours is also compared with the drafts recorded when it was saved
(`train/evaluate.py`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeGuard

from headstart.console import console, log
from headstart.scripts.command_line import TargetOptions, options

if TYPE_CHECKING:
    from headstart.heads import DraftHead

PROMPTS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a Python function that reverses a string.",
    "A train leaves at 9:40 and arrives at 12:15. How long does it take?",
    "Give me a simple recipe for pancakes.",
    "What are the main differences between a lake and a river?",
    "Write a short polite email asking to move a meeting to Friday.",
    "List five facts about the planet Mars.",
    "Summarise the story of Romeo and Juliet in three sentences.",
)
HEALTHY = 0.25
"""Least accuracy of a trained head's first draft; that of a misread head is 0 to 0.05."""
SHARE = 0.6
"""Share of the accuracy measured in training; other prompts do not explain less."""


@dataclass(frozen=True)
class VerifyConfig(TargetOptions):
    """A head, checked against its target."""

    required = ("head", "target")
    minimum: ClassVar[dict[str, float]] = {"max_new_tokens": 8}

    head: str = ""
    """The head's checkpoint folder or Hub id."""
    max_new_tokens: int = 48
    """Longest answer to each of the built-in prompts, in tokens."""


def main(arguments: list[str]) -> None:
    """Parse and verify."""
    verify_head(options(VerifyConfig, "verify", __doc__, arguments, first="head"))


def verify_head(config: VerifyConfig) -> None:
    """Print a head's accuracy beside that of a healthy one."""
    from rich.table import Table

    from headstart.heads.checkpoints.save_load import differences, load_head
    from headstart.inference import SpeculativeLM, Target, TreeShape, load_tokenizer
    from headstart.scripts.measuring.comparison import answer_settings, answered
    from headstart.train import evaluate
    from headstart.train.data.chat_template import prompt_ids

    head, metadata = load_head(config.head)
    target, tokenizer = Target.from_pretrained(config.target, config.dtype), load_tokenizer(config.target)
    head = head.to(target.device, target.dtype).eval()
    broken = [name for name, tensor in head.state_dict().items() if not tensor.isfinite().all()]
    if broken:
        raise ValueError(f"{config.head}: tensor {broken[0]!r} has values that are infinite or not numbers")
    saved = saved_measurements(config.head, metadata.measured)
    head.target.check(target.info)
    target.check_layers(head.feature_layers)
    for difference in differences(metadata.provenance, target.provenance):
        log.info(f"- another target than it was trained against: {difference}")

    prompts = [prompt_ids(tokenizer, [{"role": "user", "content": text}])[0] for text in PROMPTS]
    ids = [prompt[None].to(target.device) for prompt in prompts]
    _, examples = answered(SpeculativeLM(target), ids, answer_settings(config.max_new_tokens, temperature=0))

    def accuracy_of(head: DraftHead) -> list[float]:
        """Accuracy of the best draft at each depth, given the true tokens before it."""
        return [ranks[0] for ranks in evaluate.teacher_forced(target, head, examples)[1]]

    accuracy = accuracy_of(head)
    depths = len(accuracy)
    chain = evaluate.greedy_answers(target, head, TreeShape.chain(depths), prompts, config.max_new_tokens).stats
    before = [ranks[0] for ranks in saved.get("accuracy", [])]
    table = Table("draft", "accuracy", "accepted", "accuracy when trained")
    for depth, (own, accepted) in enumerate(zip(accuracy, chain.acceptance_rate_by_depth, strict=False)):
        trained = f"{before[depth]:.2f}" if depth < len(before) else "-"
        table.add_row(str(depth + 1), f"{own:.2f}", "-" if math.isnan(accepted) else f"{accepted:.2f}", trained)
    console.print(table)
    length = f"{chain.acceptance_length:.2f}"
    log.info(f"acceptance length on a chain of {depths}: {length}; accuracy: given the true tokens")
    if "probe" in saved:
        found = evaluate.fingerprint(target, head)
        if len(found["tokens"]) != len(saved["probe"]["tokens"]):
            raise ValueError(
                f"{config.head}: measured.probe in its config.json holds {len(saved['probe']['tokens'])} drafts, and "
                f"the head makes {len(found['tokens'])}"
            )
        others, noise = evaluate.fingerprint_difference(found, saved["probe"])
        ties, noise_limit = evaluate.FINGERPRINT_TIES, evaluate.FINGERPRINT_NOISE
        compared = f"drafts along a fixed text: {others:.0%} differ from those saved, {noise:.3f} apart in the mean"
        log.info(f"{compared}; the same head on another machine: at most {ties:.0%} and {noise_limit}")
        if others > ties or noise > noise_limit:
            raise ValueError(f"{config.head} was misread, or its target is another one: {compared}")
    least = SHARE * before[0] if before else HEALTHY
    best, other = max(((sum(accuracy_of(head_)), what) for what, head_ in misreadings(head)), default=(0, ""))
    explained = best > 1.3 * sum(accuracy) + 0.1
    if explained:
        log.info(f"with {other} it would be right at {best:.2f} depths in the mean, as it is at {sum(accuracy):.2f}")
    if accuracy[0] < least or explained:
        reason = f"read with {other} it fits" if explained else "no usual misreading explains it"
        raise ValueError(
            f"{config.head}: {accuracy[0]:.0%} of its first drafts are right; those of a healthy head are in "
            f"{least:.0%} of the cases or more; {reason}"
        )
    log.info(f"healthy: {accuracy[0]:.0%} of first drafts are right, at least {least:.0%} should be")


def saved_measurements(head: str, measured: dict[str, Any]) -> dict[str, Any]:
    """A head's accuracy and its drafts along a fixed text, by its config.json, which anybody may have written.

    Raises:
        ValueError: other values than training writes there; named.
    """

    def numbers(values: Any) -> TypeGuard[list[float]]:
        return isinstance(values, list) and all(isinstance(value, int | float) for value in values)

    accuracy, probe = measured.get("accuracy", []), measured.get("probe")
    if not isinstance(accuracy, list) or not all(numbers(ranks) and ranks for ranks in accuracy):
        raise ValueError(f"{head}: measured.accuracy in its config.json is not a list of lists of numbers")
    if probe is None:
        return {"accuracy": accuracy}
    tokens, scores = (probe.get(name) if isinstance(probe, dict) else None for name in ("tokens", "scores"))
    if not numbers(tokens) or not numbers(scores) or len(tokens) != len(scores):
        raise ValueError(f"{head}: measured.probe in its config.json is not two lists of numbers, tokens and scores")
    return {"accuracy": accuracy, "probe": probe}


def misreadings(head: DraftHead) -> Iterator[tuple[str, DraftHead]]:
    """The head as it would be under other options, after a description of the change."""
    import torch

    from headstart.heads import DFlashHead, Eagle3Head, EagleHead

    if isinstance(head, (EagleHead, Eagle3Head, DFlashHead)):
        other = None if head.config.rope_parameters else {"rope_type": "default", "rope_theta": 10000.0}
        yield f"rope_parameters: {other or 'those of the target'}", with_options(head, rope_parameters=other)
    if not isinstance(head, (Eagle3Head, DFlashHead)):
        return
    flags: tuple[str, ...] = ("norm_before_residual", "norm_output")
    if isinstance(head, DFlashHead):
        flags = ("sliding_causal",) if any(head.sliding) else ()
    for flag in flags:
        value = not getattr(head.config, flag)
        yield f"{flag}: {str(value).lower()}", with_options(head, **{flag: value})
    layers, last = list(head.feature_layers), head.target.num_layers - 2
    for step, where in ((1, "one block later"), (-1, "one block earlier")):
        moved = [layer + step for layer in layers]
        if min(layers) >= 0 and min(moved) >= 0 and max(moved) <= last:
            yield f"feature_layers {moved}, {where}", with_options(head, feature_layers=moved)
    if head.config.draft_vocab_size is not None:
        for step in (1, -1):
            other_head = with_options(head)
            ids_V = torch.arange(len(head.d2t), device=head.d2t.device) + head.d2t + step
            if int(ids_V.min()) >= 0 and int(ids_V.max()) < head.target.vocab_size:
                other_head.get_buffer("d2t").add_(step)
                yield f"target ids moved by {step}", other_head
    if isinstance(head, DFlashHead):
        for token in (head.mask_token - 1, head.mask_token + 1):
            if 0 <= token < head.target.vocab_size:
                yield f"mask_token_id {token}", with_options(head, mask_token_id=token)


def with_options(head: DraftHead, **changes: Any) -> DraftHead:
    """The same weights under other options."""
    from headstart.heads import build_head
    from headstart.heads.by_name import head_name

    other = build_head(head_name(head), dataclasses.asdict(head.config) | changes, head.target)
    other.to(next(head.parameters()).device, next(head.parameters()).dtype).load_state_dict(head.state_dict())
    return other.eval()
