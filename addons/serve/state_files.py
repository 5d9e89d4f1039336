"""States that a vLLM server wrote to files, in the layout of the package speculators.

hs_NUMBER.safetensors holds one sequence of T tokens; NUMBER is its conversation's, counted over all
data.sources:

    token_ids      [T]        the tokens
    hidden_states  [T, L, D]  the residual stream at each layer that the server was asked for;
                              the last one is after the last block, before the final norm

speculators numbers a layer by the block whose input it is: its k is our feature layer k - 1, and
the number of blocks stands for the stream after the last one. Which file a sequence has is decided
by its name, before any is read.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from torch import Tensor

from ...files import require_regular
from ...heads.base import TargetInfo, TargetModules
from ...heads.checkpoints.files import open_safetensors
from ...inference.engines.target import Target
from ...train.data.chat_template import Example
from ...train.data.token_cache import conversations_of
from ...train.features.sources import States, StateSource

NAME = re.compile(r"hs_(\d+)\.safetensors")
WRITTEN_SECONDS = 600.0
"""Longest time for which a file of states may be written."""
LOCK_PAUSE = 0.01
"""Seconds between two questions whether it is."""
WORSE = 2.0
"""Nats by which the stream said to leave the last block may predict answers worse than another
one."""


@dataclass(frozen=True)
class ServerLayers:
    """The streams that a server gives for each token, and those that a cache or a head reads."""

    given: tuple[int, ...]
    """In the server's order and count: k is the input of block k, the number of blocks what leaves
    the last one."""
    layers: tuple[int, ...]
    """Feature layers that are read, -1 for what leaves the last block."""
    columns: tuple[int, ...]
    """Their places in `given`."""
    info: TargetInfo

    @classmethod
    def of(cls, given: Sequence[int], layers: Sequence[int], info: TargetInfo) -> ServerLayers:
        """Find the layers; a ValueError if some are not given."""
        blocks = info.num_layers
        wanted = [blocks if layer == -1 else layer + 1 for layer in layers]
        if lacking := [layer for layer in wanted if layer not in given]:
            raise ValueError(
                f"features.server_layers {list(given)} lack {lacking}: the head reads {wanted} in"
                f" the server's count (the input of a block; {blocks} is what leaves the last one)"
            )
        return cls(
            tuple(given), tuple(layers), tuple(list(given).index(layer) for layer in wanted), info
        )

    def read(
        self, path: Path, tokens_T: Tensor | None = None, about: str = ""
    ) -> tuple[Tensor, Tensor]:
        """Read and check the tokens [T] of a file and the states [T, L, D] that are wanted.

        With `tokens_T` the file must begin with these; what it holds after them is left out.

        Raises:
            ValueError: a file that is cut, of other layers or another model, or of other tokens.
        """
        info = self.info
        with open_safetensors(require_regular(path)) as file:
            names = set(file.keys())
            if lacking := {"token_ids", "hidden_states"} - names:
                held = ", ".join(sorted(names)) or "nothing"
                raise ValueError(f"{path} lacks {', '.join(sorted(lacking))}; it holds {held}")
            found_T = file.get_tensor("token_ids")
            if found_T.ndim != 1 or found_T.is_floating_point() or found_T.dtype == torch.bool:
                raise ValueError(
                    f"{path} has token_ids of {list(found_T.shape)} {found_T.dtype}, not a list"
                    " of token ids"
                )
            found_T = found_T.long()
            kept = file.get_slice("hidden_states")
            shape = tuple(kept.get_shape())
            wanted = (len(found_T), len(self.given), info.hidden_size)
            if shape != wanted:
                raise ValueError(
                    f"{path} has hidden_states of {list(shape)}, not {list(wanted)}: tokens, "
                    f"features.server_layers, hidden size of {info.name!r}"
                )
            count = len(found_T) if tokens_T is None else len(tokens_T)
            states_TLD: Tensor = kept[:count]
        if len(found_T) and not 0 <= int(found_T.min()) <= int(found_T.max()) < info.vocab_size:
            raise ValueError(
                f"{path} has tokens from {int(found_T.min())} to {int(found_T.max())}, outside the"
                f" vocabulary of {info.vocab_size}: it was made with another tokenizer"
            )
        if tokens_T is not None and not torch.equal(found_T[:count], tokens_T):
            raise ValueError(
                f"{path.name} differs{about}: {difference(tokens_T.tolist(), found_T.tolist())}"
            )
        if not states_TLD.is_floating_point():
            raise ValueError(
                f"{path} has hidden_states of {states_TLD.dtype}, which are not states"
            )
        if not states_TLD.isfinite().all():
            raise ValueError(f"{path} has hidden_states that contain NaN or infinity")
        return found_T[:count], states_TLD[:, list(self.columns)]

    def check_last(
        self, states_TLD: Tensor, example: Example, modules: TargetModules, where: str
    ) -> None:
        """Refuse states whose last layer predicts answers much worse than another layer.

        Their order is then not the one that was stated. `states_TLD` are those of the example's
        tokens, as `read` gives them.
        """
        answers_T = torch.tensor(example.loss_mask[1:])
        next_T = torch.tensor(example.tokens[1:])[answers_T]
        if len(next_T) == 0 or len(self.layers) < 2:
            return
        like = modules.lm_head.weight
        losses = {}
        for layer, states_TD in zip(self.layers, states_TLD.unbind(1), strict=True):
            logits_TV = modules.logits(modules.norm(states_TD[:-1][answers_T].to(like))).float()
            losses[layer] = float(
                torch.nn.functional.cross_entropy(logits_TV, next_T.to(like.device))
            )
        best = min(losses, key=lambda layer: losses[layer])
        if losses[-1] > losses[best] + WORSE:
            better = f"and that of {best + 1} at {losses[best]:.1f}"
            raise ValueError(
                f"{where}: of features.server_layers {list(self.given)} the stream of"
                f" {self.info.num_layers}, which should leave the last block, predicts answers at"
                f" {losses[-1]:.1f} nats a token, {better}: give the layers in the order in which"
                " the server was started with them"
            )


def difference(ours: Sequence[int], theirs: Sequence[int]) -> str:
    """How two sequences that should be equal differ first."""
    place = next(
        (i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None
    )
    if place is None:
        return f"{len(ours)} tokens here and {len(theirs)} there (data.max_length?)"
    return (
        f"token {place} is {ours[place]} here and {theirs[place]} there (tokenizer or chat"
        " template?)"
    )


def wait_until_written(path: Path, seconds: float = WRITTEN_SECONDS) -> bool:
    """Wait while vLLM, which holds a lock on a file beside it, writes a file.

    Returns:
        whether it was written in that time.

    Raises:
        ValueError: the lock is a named pipe or a device.
    """
    lock = require_regular(Path(f"{path}.lock"))
    try:
        descriptor = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return True
    deadline = time.monotonic() + seconds
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() > deadline:
                    return False
                time.sleep(LOCK_PAUSE)
    finally:
        os.close(descriptor)


class FileStates(StateSource):
    """A folder of files, one a conversation, each read when it is needed."""

    before_norm = True

    def __init__(self, folder: Path, given: ServerLayers) -> None:
        """List the folder; a ValueError if it holds no such file."""
        self.folder = folder
        self.given = given
        self.layers = given.layers
        if not folder.is_dir():
            raise ValueError(f"features.from_server {str(folder)!r} is not a folder")
        numbers = [
            int(name[1]) for entry in os.scandir(folder) if (name := NAME.fullmatch(entry.name))
        ]
        if not numbers:
            raise ValueError(
                f"features.from_server {str(folder)!r} holds no file named hs_NUMBER.safetensors"
            )
        self.numbers_N: NDArray[np.int64] = np.array(sorted(numbers), np.int64)

    def require(self, accelerator: Accelerator, examples: Sequence[Example], what: str) -> None:
        """Refuse, by name, sequences that have no file, or share one."""
        wanted_N = conversations_of(examples)
        lacking_N = wanted_N[~np.isin(wanted_N, self.numbers_N)]
        if len(lacking_N):
            raise ValueError(
                f"{len(lacking_N)} of {len(examples)} sequences {what} have no states in"
                f" {str(self.folder)!r}; the first is of conversation {lacking_N[0]}, for which"
                f" there is no hs_{lacking_N[0]}.safetensors"
            )
        numbers_N, counts_N = np.unique(wanted_N, return_counts=True)
        if (counts_N > 1).any():
            shared = numbers_N[counts_N > 1]
            raise ValueError(
                f"conversation {shared[0]} gives {counts_N.max()} sequences {what}, and"
                f" hs_{shared[0]}.safetensors holds one; so do {len(shared)} conversations: give"
                " data.sources with one sequence a row, or let the states come from"
                " features.server"
            )

    def states(self, tokens_T: Tensor, conversation: int) -> States:
        path = self.folder / f"hs_{conversation}.safetensors"
        if not wait_until_written(path):
            raise ValueError(f"{path} is being written for more than {WRITTEN_SECONDS:g} s")
        _, states_TLD = self.given.read(path, tokens_T, f" from conversation {conversation}")
        return states_TLD, None

    def try_first(self, target: Target, example: Example) -> None:
        tokens_T = torch.tensor(example.tokens)
        states_TLD, _ = self.states(tokens_T, example.conversation)
        name = f"hs_{example.conversation}.safetensors"
        self.given.check_last(states_TLD, example, target.modules, name)
