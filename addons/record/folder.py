"""A folder of recorded answers, a file for each.

    recorded-TIME-KIND-RANDOM.safetensors

TIME is in nanoseconds, so that names sort by age; KIND is a hash of the prompt's kind. A file is a
shard of `feature_cache` that holds one text, a prompt and its answer, with the fields of
`AnswerMarks` in its row. So training reads the folder both as its data and as the states of its
data. Whichever processes write and remove files, each is whole or not there.

    costs.json    what rounds cost where the answers were decoded, by the shape of the head
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import secrets
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ...files import TEXT_SHARD, read_json, reading_back, text_shards, write_whole
from ...heads.base import DraftHead
from ...inference.drafters.costs import EIGHT_BITS, head_shape, target_shape
from ...inference.engines.model_engine import ModelEngine
from ...inference.engines.target import Target
from ...inference.feature_cache import FeatureCache, encoded, key_of, write_shard
from ...inference.tuning.machine import kept_measurements
from ...inference.tuning.round_costs import RoundCosts

COSTS = "costs.json"
NAME = re.compile(TEXT_SHARD + r"\d{20}-(?P<kind>[0-9a-f]{8})-[0-9a-f]{8}\.safetensors")
"""The names of files that `RecordedFolder` writes, and removes."""
LONGEST_KIND = 200
"""Characters of a label of a prompt's kind."""
HEADER_BYTES = 2000
"""Bytes of a file, at most, that are not states or tokens."""
End = Literal["complete", "stopped", "failed"]
"""How an answer ended: by itself or at its longest, because its reader left, or by an error."""


@dataclass(frozen=True)
class AnswerMarks:
    """Facts about a recorded answer besides its tokens and states."""

    kind: str
    """The caller's label of the prompt's kind; empty for none."""
    temperature: float
    """Temperature that it was sampled at; 0 for greedy decoding."""
    lossy: bool
    """Whether an acceptance rule chose it that changes the target's distribution."""
    ended: End
    cut: bool
    """Whether tokens after the kept ones were left out."""
    tokenizer: str
    """Fingerprint of the tokenizer."""


class RecordedFolder:
    """The writer's side of a folder; several processes may write to one."""

    def __init__(self, folder: Path, manifest: dict[str, Any], max_bytes: int) -> None:
        """Open or create a folder, in which recorded answers take at most `max_bytes`.

        Raises:
            ValueError: it holds states of another target, tokenizer, format or layers.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # it holds what people wrote
        cache = FeatureCache(folder, manifest)
        self.folder = folder
        self.format = cache.format
        # Layers of the states; more than the manifest's where the folder was made with more.
        self.layers = cache.layers
        # Fingerprints of the tokenizer and of the target's weights.
        self.tokenizer = str(manifest["tokenizer"])
        self.weights = manifest["weights"]
        self.max_bytes = max_bytes

    def write(
        self,
        tokens: list[int],
        prompt: int,
        states_TLD: Tensor,
        marks: AnswerMarks,
    ) -> int:
        """Write an answer, and remove older ones where it would not fit.

        Args:
            tokens: a prompt of `prompt` tokens, and its answer.
            prompt: length of the prompt.
            states_TLD: the states of all tokens, by layer.
            marks: what is known of the answer.

        Returns:
            the bytes of its file; 0 if it alone is larger than the folder may be.

        Raises:
            OSError: a full disk, or a folder that cannot be written to.
        """
        # 1. What the file holds, and so how large it will be.
        states = encoded(states_TLD, self.format)  # and their scales, for int8
        tokens_T = torch.tensor(tokens, dtype=torch.int32)
        more = {"tokens": tokens_T, "loss_mask": torch.arange(len(tokens)) >= prompt}
        parts = [part for part in (*states, *more.values()) if part is not None]
        size = sum(part.nbytes for part in parts) + HEADER_BYTES
        if size > self.max_bytes:
            return 0

        # 2. Make room, and write it under a name that sorts by age.
        self._make_room(size, marks.kind)
        age_and_kind = f"{time.time_ns():020d}-{_hashed(marks.kind)}"
        name = f"{TEXT_SHARD}{age_and_kind}-{secrets.token_hex(4)}.safetensors"
        about = {"row": json.dumps(dataclasses.asdict(marks))}
        write_shard(self.folder / name, {key_of(tokens_T): states}, more, about)
        return size

    def _make_room(self, size: int, kind: str) -> None:
        """Remove answers until `size` more bytes fit: the oldest of the kind that takes most."""
        # 1. Files and their bytes by kind, the oldest first, as `text_shards` sorts by name. The
        # new answer's bytes count already.
        files: dict[str, list[tuple[Path, int]]] = {}
        taken = Counter({_hashed(kind): size})
        for path in text_shards(self.folder):
            try:
                bytes_of_file = path.stat().st_size
            except FileNotFoundError:  # another process has removed it
                continue
            written = NAME.fullmatch(path.name)
            if written is None:  # not by `write`: a copy that somebody keeps here
                continue
            files.setdefault(written["kind"], []).append((path, bytes_of_file))
            taken[written["kind"]] += bytes_of_file

        # 2. Remove, file by file, until the rest fits.
        while taken.total() > self.max_bytes:
            largest = max((name for name in files if files[name]), key=lambda name: taken[name])
            path, bytes_of_file = files[largest].pop(0)
            path.unlink(missing_ok=True)
            taken[largest] -= bytes_of_file


def keep_costs(folder: Path, shape: str, costs: RoundCosts, machine: str) -> None:
    """Keep what rounds with a head of this shape cost; of several machines the newest counts.

    Raises:
        OSError: a full disk, or a folder that cannot be written to.
    """
    known = {}
    with suppress(ValueError):  # a broken file is replaced
        known = _costs_in(folder)
    entry = {"machine": machine, **costs.kept()}
    write_whole(folder / COSTS, json.dumps({**known, shape: entry}, indent=1), mode=0o600)


def machine_costs(target: Target, head: DraftHead) -> RoundCosts | None:
    """Return the step costs that this machine has kept for models of these dimensions, else None.

    The costs may have been measured with any engine. Those of our kernels or of CUDA graphs come
    before those of transformers' own operations.
    """
    # Names are written by `measured_costs`: "TARGET, ENGINE; HEAD".
    begin = f"{target_shape(target)}, "
    end = f"; {head_shape(head)}"
    measurements = {}
    for name, value in kept_measurements(target.device).items():
        name = name.removesuffix(EIGHT_BITS)
        if name.startswith(begin) and name.endswith(end):
            measurements[name] = value
    # False sorts before True: transformers' own operations come last.
    for name in sorted(measurements, key=lambda name: name == f"{begin}{ModelEngine.name}{end}"):
        with suppress(ValueError, TypeError, KeyError, AttributeError):  # another version wrote it
            return RoundCosts.read(measurements[name])
    return None


def recorded_costs(folder: Path, shape: str) -> tuple[RoundCosts, str] | None:
    """Read the costs of rounds with a head of this shape, and the machine that recorded them.

    None if they are unknown.

    Raises:
        ValueError: a file that is not such costs.
    """
    entry = _costs_in(folder).get(shape)
    if entry is None:
        return None
    with reading_back(folder / COSTS, "remove it"):
        return RoundCosts.read(entry), str(entry["machine"])


def _costs_in(folder: Path) -> dict[str, Any]:
    """Read the costs in a folder, by the shape of the head; empty without a file."""
    path = folder / COSTS
    if not path.exists():
        return {}
    try:
        costs = read_json(path)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read ({error}); remove it") from error
    if not isinstance(costs, dict):
        raise ValueError(f"{path} does not hold costs of rounds; remove it")
    return costs


def check_kind(kind: Any, where: str) -> None:
    """Refuse a label of a prompt's kind that is not a short text.

    Raises:
        ValueError: with `where` it stands.
    """
    if not isinstance(kind, str) or len(kind) > LONGEST_KIND:
        raise ValueError(
            f"{where} has a kind of {str(kind)[:40]!r}; a kind is a text of at most {LONGEST_KIND}"
            " characters"
        )


def _hashed(kind: str) -> str:
    """Hash a kind for a file's name: it may hold any characters, half of a surrogate pair too."""
    return hashlib.blake2b(kind.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
