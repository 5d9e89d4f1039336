"""Check a head against its target: `headstart verify HEAD --target MODEL`.

A layer counted from the wrong end, a missing norm or ids off by one raise no error; the drafts are
simply always rejected. So the target answers a few built-in prompts, and the head drafts along the
answers: as it is, and as it would if one of the usual misreadings were undone. A head of ours is
also compared with the drafts recorded when it was saved (`inference/probe.py`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard

from headstart.console import console, counted, log
from headstart.options import limited
from headstart.scripts.command_line import TargetOptions, options

if TYPE_CHECKING:
    from headstart.heads import DraftHead
    from headstart.inference import Target

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
"""Least share of the accuracy measured in training: other prompts cost less than the rest."""


@dataclass(frozen=True)
class VerifyConfig(TargetOptions):
    """A head, checked against its target."""

    required = ("head", "target")
    most_used = ("target", "head")

    head: str = ""
    """The head's checkpoint folder or Hub id."""
    max_new_tokens: int = limited(48, minimum=8)
    """Longest answer to each of the built-in prompts, in tokens."""


def main(arguments: list[str]) -> None:
    """Run `headstart verify` with these command-line arguments."""
    verify_head(options(VerifyConfig, "verify", __doc__, arguments, first="head"))


def verify_head(config: VerifyConfig) -> None:
    """Print a head's accuracy beside that of a healthy one.

    Raises:
        ValueError: the head is not healthy.
    """
    from headstart.heads.checkpoints.save_load import differences, load_head
    from headstart.inference import SpeculativeLM, Stats, Target
    from headstart.inference.drafters.acceptance import accuracy_by_rank
    from headstart.inference.text.chat_template import load_chat_tokenizer, prompt_ids
    from headstart.scripts.measuring.comparison import answer_settings, answered

    # 1. What can be told without a forward: shapes, values, and the target's identity.
    head, metadata = load_head(config.head)
    tokenizer = load_chat_tokenizer(config.target)
    target = Target.from_pretrained(config.target, config.dtype)
    head = head.to(target.device, target.dtype).eval()
    broken = [name for name, tensor in head.state_dict().items() if not tensor.isfinite().all()]
    if broken:
        raise ValueError(
            f"{config.head}: tensor {broken[0]!r} has values that are infinite or not numbers"
        )
    saved = saved_measurements(config.head, metadata.measured)
    head.target.check(target.info, f"the head at {config.head!r}")
    target.check_layers(head.feature_layers)
    for difference in differences(metadata.provenance, target.provenance):
        log.info(f"- another target than it was trained against: {difference}")

    # 2. Let the target answer, and the head draft along the answers.
    prompts = []
    for text in PROMPTS:
        ids_1T = prompt_ids(tokenizer, [{"role": "user", "content": text}])
        prompts.append(ids_1T.to(target.device))
    settings = answer_settings(config.max_new_tokens, temperature=0)
    answers = answered(SpeculativeLM(target), prompts, settings)

    def accuracy_of(head: DraftHead) -> list[float]:
        """Accuracy of the best draft at each depth, given the true tokens before it."""
        read = counted(answers, "answers read by the head")
        return [ranks[0] for ranks in accuracy_by_rank(target, head, read)]

    accuracy = accuracy_of(head)
    depths = len(accuracy)
    accuracy_when_trained = [ranks[0] for ranks in saved.get("accuracy", [])]
    least = SHARE * accuracy_when_trained[0] if accuracy_when_trained else HEALTHY
    log.info(
        f"{accuracy[0]:.0%} of first drafts are right, at least {least:.0%} should be; two checks"
        " follow: rounds with drafts, and misreadings"
    )
    chain = SpeculativeLM.from_pretrained(
        target, head, tree=f"chain:{depths}", adaptive=False, compile=False
    )
    drafted = counted(prompts, "answers with drafts")
    stats = Stats.merged(chain.generate(ids_1T, **settings).stats for ids_1T in drafted)
    _print_accuracy(accuracy, stats.acceptance_rate_by_depth, accuracy_when_trained)
    log.info(
        f"acceptance length on a chain of {depths}: {stats.acceptance_length:.2f}; accuracy: given"
        " the true tokens"
    )
    if "probe" in saved:
        _check_probe(config.head, target, head, saved["probe"])

    # 3. Would it be right more often under other options? A misreading explains a head only if
    # undoing it gains clearly: 1.3 times as many right drafts, and a tenth of a draft more.
    best = 0.0
    misreading = ""
    for description, read_otherwise in counted(list(misreadings(head)), "misreadings"):
        right = sum(accuracy_of(read_otherwise()))
        if right > best:
            best = right
            misreading = description
    explained = best > 1.3 * sum(accuracy) + 0.1
    if explained:
        log.info(
            f"with {misreading} {best:.2f} drafts of {depths} would be right on average, not"
            f" {sum(accuracy):.2f}"
        )

    # 4. The verdict.
    if accuracy[0] < least or explained:
        reason = "no usual misreading explains it"
        if explained:
            reason = f"read with {misreading} it fits"
        raise ValueError(
            f"{config.head}: {accuracy[0]:.0%} of its first drafts are right; of a healthy head's"
            f" at least {least:.0%} are; {reason}"
        )
    log.info(
        f"healthy: {accuracy[0]:.0%} of first drafts are right, at least {least:.0%} should be"
    )


def _print_accuracy(
    accuracy: list[float], accepted: list[float], accuracy_when_trained: list[float]
) -> None:
    """Print a table with a row for each depth."""
    from rich.table import Table

    table = Table("draft", "accuracy", "accepted", "accuracy when trained")
    for depth, (right, rate) in enumerate(zip(accuracy, accepted, strict=False)):
        trained = "-"
        if depth < len(accuracy_when_trained):
            trained = f"{accuracy_when_trained[depth]:.2f}"
        # NaN where no round reached this depth.
        reached = "-" if math.isnan(rate) else f"{rate:.2f}"
        table.add_row(str(depth + 1), f"{right:.2f}", reached, trained)
    console.print(table)


def _check_probe(name: str, target: Target, head: DraftHead, saved: dict[str, Any]) -> None:
    """Compare the head's drafts along a fixed text with those that were saved."""
    from headstart.inference.probe import PROBE_NOISE, PROBE_TIES, probe_difference, probe_drafts

    drafts = probe_drafts(target, head)
    if len(drafts["tokens"]) != len(saved["tokens"]):
        raise ValueError(
            f"{name}: measured.probe in its config.json holds {len(saved['tokens'])} drafts, and"
            f" the head makes {len(drafts['tokens'])}"
        )
    others, noise = probe_difference(drafts, saved)
    compared = (
        f"drafts along a fixed text: {others:.0%} differ from those saved, by {noise:.3f} on"
        " average"
    )
    log.info(
        f"{compared}; the same head on another machine: at most {PROBE_TIES:.0%} and {PROBE_NOISE}"
    )
    if others > PROBE_TIES or noise > PROBE_NOISE:
        raise ValueError(f"{name} was misread, or its target is another one: {compared}")


def saved_measurements(head: str, measured: dict[str, Any]) -> dict[str, Any]:
    """Return a head's saved accuracy and drafts along a fixed text, from its untrusted config.json.

    Raises:
        ValueError: other values than training writes there; named.
    """

    def numbers(values: Any) -> TypeGuard[list[float]]:
        return isinstance(values, list) and all(isinstance(value, int | float) for value in values)

    accuracy = measured.get("accuracy", [])
    probe = measured.get("probe")
    if not isinstance(accuracy, list) or not all(numbers(ranks) and ranks for ranks in accuracy):
        raise ValueError(
            f"{head}: measured.accuracy in its config.json is not a list of lists of numbers"
        )
    if probe is None:
        return {"accuracy": accuracy}
    tokens = probe.get("tokens") if isinstance(probe, dict) else None
    scores = probe.get("scores") if isinstance(probe, dict) else None
    if not numbers(tokens) or not numbers(scores) or len(tokens) != len(scores):
        raise ValueError(
            f"{head}: measured.probe in its config.json is not two lists of numbers, tokens and"
            " scores"
        )
    return {"accuracy": accuracy, "probe": probe}


def misreadings(head: DraftHead) -> Iterator[tuple[str, Callable[[], DraftHead]]]:
    """Yield descriptions of usual misreadings, each with what builds the head read without it."""
    import torch

    from headstart.heads import DFlashHead, Eagle3Head, EagleHead

    # 1. Rotary position embeddings: the target's, or those of old configs that name none.
    if isinstance(head, (EagleHead, Eagle3Head, DFlashHead)):
        other: dict[str, Any] | None = None
        if not head.config.rope_parameters:
            other = {"rope_type": "default", "rope_theta": 10000.0}
        yield (
            f"rope_parameters: {other or 'those of the target'}",
            partial(with_options, head, rope_parameters=other),
        )
    if not isinstance(head, (Eagle3Head, DFlashHead)):
        return

    # 2. A norm in another place; attention within a block that is causal, or is not.
    flags: tuple[str, ...] = ("norm_before_residual", "norm_output")
    if isinstance(head, DFlashHead):
        flags = ("sliding_causal",) if any(head.sliding) else ()
    for flag in flags:
        value = not getattr(head.config, flag)
        yield f"{flag}: {str(value).lower()}", partial(with_options, head, **{flag: value})

    # 3. Feature layers counted from another layer.
    layers = list(head.feature_layers)
    last = head.target.num_layers - 2
    for step, where in ((1, "one block later"), (-1, "one block earlier")):
        moved = [layer + step for layer in layers]
        if min(layers) >= 0 and min(moved) >= 0 and max(moved) <= last:
            description = f"feature_layers {moved}, {where}"
            yield description, partial(with_options, head, feature_layers=moved)

    # 4. Ids of the draft vocabulary, or of the mask token, off by one.
    if head.config.draft_vocab_size is not None:
        for step in (1, -1):
            # d2t holds target id less draft id: [0, 4, 7] stands for the target ids 0, 5, 9.
            ids_V = torch.arange(len(head.d2t), device=head.d2t.device) + head.d2t + step
            if int(ids_V.min()) >= 0 and int(ids_V.max()) < head.target.vocab_size:
                yield f"target ids moved by {step}", partial(_with_moved_ids, head, step)
    if isinstance(head, DFlashHead):
        for token in (head.mask_token - 1, head.mask_token + 1):
            if 0 <= token < head.target.vocab_size:
                yield f"mask_token_id {token}", partial(with_options, head, mask_token_id=token)


def _with_moved_ids(head: DraftHead, step: int) -> DraftHead:
    """Build a head whose draft vocabulary stands for other target ids."""
    moved = with_options(head)
    moved.get_buffer("d2t").add_(step)
    return moved


def with_options(head: DraftHead, **changes: Any) -> DraftHead:
    """Build a head with the same weights under other options."""
    from headstart.heads import build_head
    from headstart.heads.by_name import head_name

    other = build_head(head_name(head), dataclasses.asdict(head.config) | changes, head.target)
    weight = next(head.parameters())
    other.to(weight.device, weight.dtype).load_state_dict(head.state_dict())
    return other.eval()
