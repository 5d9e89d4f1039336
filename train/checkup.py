"""Whether a head was read as it was written: `headstart verify`.

A layer counted from the wrong end, a norm left out or ids off by one make no error, only a head that is never right.
So the target answers a few prompts, and the head guesses along them: as it is, and as it would be if one of the usual
misreadings were undone. A head of ours also carries guesses that it made when it was saved (`probe.py`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
from rich.table import Table

from ..heads import DraftHead, Eagle3Head, EagleHead
from ..heads.checkpoints.save_load import build_head, differences, load_head, word_of
from ..inference import SpeculativeLM, Target, TreeShape, load_tokenizer
from .commands import VerifyConfig
from .console import console, log
from .data.chat_template import Example, prompt_ids
from .evaluate import real_acceptance, teacher_forced
from .fingerprint import NOISE, OTHERS, apart, probe

PROMPTS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a Python function that reverses a string.",
    "A train leaves at 9:40 and arrives at 12:15. How long does it take?",
    "Give me a simple recipe for pancakes.",
    "What are the main differences between a lake and a river?",
    "Write a short polite email asking to move a meeting to Friday.",
    "List five metadata about the planet Mars.",
    "Summarise the story of Romeo and Juliet in three sentences.",
)
HEALTHY = 0.25
"""How often the first draft of a trained head is right at least; one that was misread is at 0 to 0.05."""
SHARE = 0.6
"""Of what was measured when a head was trained: less is not explained by other prompts."""


def verify_head(config: VerifyConfig) -> None:
    """Print what a head gets right, and what it should.

    Raises:
        ValueError: a head that does not fit the target, has values that are no numbers, or is never right.
    """
    head, metadata = load_head(config.head)
    target, tokenizer = Target.from_pretrained(config.target, config.dtype), load_tokenizer(config.target)
    head = head.to(target.device, target.dtype).eval()
    broken = [name for name, tensor in head.state_dict().items() if not tensor.isfinite().all()]
    if broken:
        raise ValueError(f"{config.head}: tensor {broken[0]!r} has values that are no numbers or infinite")
    head.target.check(target.info)
    target.check_layers(head.feature_layers)
    for difference in differences(metadata.origin, target.origin):
        log.info(f"- another target than it was trained against: {difference}")

    prompts = [prompt_ids(tokenizer, [{"role": "user", "content": text}])[0] for text in PROMPTS]
    examples = answered(target, prompts, config.max_new_tokens)
    accuracy = right(target, head, examples)
    depths = len(accuracy)
    chain = real_acceptance(target, head, TreeShape.chain(depths), prompts, config.max_new_tokens)
    before = [ranks[0] for ranks in metadata.measured.get("accuracy", [])]
    table = Table("draft", "right", "accepted", "right when trained")
    for depth, (own, accepted) in enumerate(zip(accuracy, chain.acceptance_rate_by_depth, strict=False)):
        trained = f"{before[depth]:.2f}" if depth < len(before) else "-"
        table.add_row(str(depth + 1), f"{own:.2f}", "-" if math.isnan(accepted) else f"{accepted:.2f}", trained)
    console.print(table)
    log.info(f"acceptance length on a chain of {depths}: {chain.acceptance_length:.2f}; right: the true tokens given")
    if "probe" in metadata.measured:
        others, noise = apart(probe(target, head), metadata.measured["probe"])
        told = f"guesses along a fixed text: {others:.0%} others than when it was saved, {noise:.3f} apart in the mean"
        log.info(f"{told}; the same head elsewhere: at most {OTHERS:.0%} and {NOISE}")
        if others > OTHERS or noise > NOISE:
            raise ValueError(f"{config.head} is read otherwise than it was written, or its target is another: {told}")
    least = SHARE * before[0] if before else HEALTHY
    best, other = max(
        ((sum(right(target, head_, examples)), what) for what, head_ in misreadings(head)), default=(0, "")
    )
    explained = best > 1.3 * sum(accuracy) + 0.1
    if explained:
        log.info(
            f"with {other} it would be right at {best:.2f} depths in the mean, and as it is at {sum(accuracy):.2f}"
        )
    if accuracy[0] < least or explained:
        reason = f"read with {other} it fits" if explained else "no usual misreading explains it"
        raise ValueError(
            f"{config.head} is right about its first draft in {accuracy[0]:.0%} of the cases; a healthy head is in "
            f"{least:.0%} or more; {reason}"
        )
    log.info(f"healthy: {accuracy[0]:.0%} of first drafts are right, at least {least:.0%} should be")


def answered(target: Target, prompts: list[torch.Tensor], new_tokens: int) -> list[Example]:
    """The target's own answers, to guess along."""
    plain = SpeculativeLM(target)
    found = []
    for number, prompt in enumerate(prompts):
        tokens = plain.generate(prompt[None].to(target.device), max_new_tokens=new_tokens, do_sample=False).sequences
        mask = [i >= len(prompt) for i in range(tokens.shape[1])]
        found.append(Example(tokens=tokens[0].tolist(), loss_mask=mask, conversation=number))
    return found


def right(target: Target, head: DraftHead, examples: list[Example]) -> list[float]:
    """How often the best draft at each depth is the target's token, the true tokens before it given."""
    return [ranks[0] for ranks in teacher_forced(target, head, examples)[1]]


def misreadings(head: DraftHead) -> Iterator[tuple[str, DraftHead]]:
    """The head as it would be if it had been read otherwise, and what that is called."""
    if isinstance(head, (EagleHead, Eagle3Head)):
        other = None if head.config.rope_parameters else {"rope_type": "default", "rope_theta": 10000.0}
        yield f"rope_parameters: {other or 'those of the target'}", changed(head, rope_parameters=other)
    if not isinstance(head, Eagle3Head):
        return
    for flag in ("norm_before_residual", "norm_output"):
        value = not getattr(head.config, flag)
        yield f"{flag}: {str(value).lower()}", changed(head, **{flag: value})
    layers, last = list(head.feature_layers), head.target.num_layers - 2
    for step, where in ((1, "one block later"), (-1, "one block earlier")):
        moved = [layer + step for layer in layers]
        if min(layers) >= 0 and min(moved) >= 0 and max(moved) <= last:
            yield f"feature_layers {moved}, {where}", changed(head, feature_layers=moved)
    if head.config.draft_vocab_size is not None:
        for step in (1, -1):
            other_head = changed(head)
            ids_V = torch.arange(len(head.d2t), device=head.d2t.device) + head.d2t + step
            if int(ids_V.min()) >= 0 and int(ids_V.max()) < head.target.vocab_size:
                other_head.get_buffer("d2t").add_(step)
                yield f"target ids moved by {step}", other_head


def changed(head: DraftHead, **options: Any) -> DraftHead:
    """The same weights under other options."""
    other = build_head(word_of(head), dataclasses.asdict(head.config) | options, head.target)
    other.to(next(head.parameters()).device, next(head.parameters()).dtype).load_state_dict(head.state_dict())
    return other.eval()
