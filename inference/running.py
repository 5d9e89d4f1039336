"""The generation that runs: one at a time for each target, and those that are nested in it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from .drafters.base import BatchDrafter
from .drafters.by_name import assistants
from .engines.encoder_decoder import Seq2SeqTarget
from .engines.target import Target
from .rounds.sequences import Conversation
from .targets.as_loaded import as_loaded


class _Running(threading.local):
    """This thread's generations, the innermost last, each with its target and conversation."""

    def __init__(self) -> None:
        self.generations: list[tuple[Target, Conversation | None]] = []


_RUNNING = _Running()


def runs(target: Target) -> bool:
    """Whether this call is made from inside a generation with a target, such as by an observer."""
    return any(other is target for other, _ in _RUNNING.generations)


@contextmanager
def alone(
    target: Target, past: Conversation | None, drafter_now: Callable[[], BatchDrafter]
) -> Iterator[BatchDrafter]:
    """Hold the target for one generation and yield the drafter for it.

    The drafter is the current one at the time when the target is free.

    An observer, a streamer, a processor or a criterion may call `generate` itself. The inner
    generation drafts with another drafter, and the outer one finds everything as it was.
    """
    if past is not None and any(other is past for _, other in _RUNNING.generations):
        raise ValueError(
            "past_key_values is the Conversation of the generation that calls generate here (by a"
            " callback, a streamer, a processor or a criterion); give this one another"
        )
    # The lock may be taken again by the thread that holds it, so that a nested call does not wait.
    with target.lock, as_loaded(target.model):
        nested = runs(target)
        drafter = drafter_now().fresh() if nested else drafter_now()
        with ExitStack() as stack:
            _RUNNING.generations.append((target, past))
            stack.callback(_RUNNING.generations.pop)
            if nested:
                # Replayed recordings would overwrite results that the outer generation still reads.
                stack.enter_context(target.engine.runner.as_it_is())
                if isinstance(target, Seq2SeqTarget):
                    stack.enter_context(target.encoder_outputs_kept())
            for assistant in assistants(drafter):
                stack.enter_context(as_loaded(assistant.model))
            yield drafter
