"""The tokens of a generation round by round, while it runs in a thread of its own."""

from __future__ import annotations

import atexit
import os
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor
from transformers.generation.streamers import BaseStreamer


def streamed(generate: Callable[..., object]) -> Iterator[list[int]]:
    """Run `generate(streamer=...)` and yield the tokens of each round.

    Closing the iterator ends the generation.

    Raises:
        BaseException: what `generate` raised.
    """
    rounds: queue.Queue[list[int] | BaseException | None] = queue.Queue()
    streamer = QueueStreamer(rounds)
    process = os.getpid()

    def run() -> None:
        """Generate, and pass an error on to the thread that reads the tokens."""
        try:
            generate(streamer=streamer)
        except StreamClosed:
            pass
        except BaseException as error:
            rounds.put(error)
        finally:
            rounds.put(None)

    thread = threading.Thread(target=run, name="headstart stream", daemon=True)

    def close() -> None:
        streamer.closed = True
        if os.getpid() == process:  # a forked process has no such thread
            thread.join()

    # An interpreter that ends while the thread is inside torch aborts.
    atexit.register(close)
    thread.start()
    try:
        while True:
            if os.getpid() != process:  # where nothing would come
                raise ValueError(
                    "this stream was begun before the process was forked, and its thread does not"
                    " exist here: begin another one"
                )
            tokens = rounds.get()
            if tokens is None:
                return
            if isinstance(tokens, BaseException):
                raise tokens
            yield tokens
    finally:
        atexit.unregister(close)
        close()


class StreamClosed(Exception):
    """The caller closed a stream before its end."""


@dataclass
class QueueStreamer(BaseStreamer):
    """A streamer that passes tokens to another thread."""

    rounds: queue.Queue[list[int] | BaseException | None]
    """The tokens of each round, or an error, and None at the end."""
    closed: bool = False
    has_prompt: bool = False

    def put(self, value: Tensor) -> None:
        if self.closed:
            raise StreamClosed
        if self.has_prompt:  # transformers streams the prompt first
            self.rounds.put(value.tolist())
        self.has_prompt = True

    def end(self) -> None:
        """Do nothing: the thread that generates marks the end."""
