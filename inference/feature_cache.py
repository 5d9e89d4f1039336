"""The feature cache: the target's states on disk, written once, read at random by memory map.

    manifest.json   identity of the states: target, tokenizer, format, and the layers
    *.safetensors   shards, each written completely or not at all, named by a hash of its texts

A shard holds sequences one after the other, N tokens in all; the LM head makes logits from the last
layer's states:

    keys       [n, 2] int64     hash of each sequence's tokens
    ends       [n] int64        where each ends
    checksums  [n] int64        CRC-32 of each sequence's bytes in `states` and `scales`
    states     [N, L, D]        the layers' states: bfloat16, float32, or int8
    scales     [N, L] float32   with int8: what the D numbers are multiplied by

A shard recorded-*.safetensors holds one text with its tokens, so that the folder is data and states
in one. Such names sort by age. Besides the above it has

    tokens     [N] int32        the text
    loss_mask  [N] bool         True for the tokens to learn
    "row"                       in the metadata: what else is known of the text, as JSON
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..files import one_line, parse_json, read_json, replacing, require_regular, write_whole
from ..heads.checkpoints.files import open_safetensors
from ..options import check_options

MANIFEST = "manifest.json"
SHARD_BYTES = 2**28
"""Size at which a shard is written."""
OPEN_SHARDS = 256
"""Shards whose memory maps are held; a process may have 65,530 maps, and a folder more shards."""
FORMATS = {"bfloat16": torch.bfloat16, "float32": torch.float32, "int8": torch.int8}
"""Dtype of a stored state, by the name of the format."""
Key = bytes


class _Location(NamedTuple):
    shard: Path
    start: int
    stop: int
    checksum: int


class FeatureCache:
    """One folder of states, by the hash of a sequence's tokens."""

    def __init__(
        self, folder: Path, manifest: dict[str, Any], shard_bytes: int = SHARD_BYTES
    ) -> None:
        """Open the folder, or create it.

        A different manifest, or a shard that cannot be read, raises a ValueError.

        A folder that was made with more layers serves as well: `layers` are those that it has, -1
        for the state after the final norm.
        """
        self.folder, self.shard_bytes, self.format = folder, shard_bytes, str(manifest["format"])
        self.locations: dict[Key, _Location] = {}
        self._known: set[Path] = set()
        self._open: OrderedDict[Path, Any] = OrderedDict()
        self._checked: set[Key] = set()
        self._new: dict[Key, tuple[Tensor, Tensor | None]] = {}
        self._new_bytes = 0
        path = folder / MANIFEST
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(manifest, indent=1))
        # another job may have written its own at the same time
        before = read_manifest(folder)
        check_manifest(folder, before, manifest, "choose another folder, or remove this one")
        self.layers = tuple(before["layers"])
        self.hidden_size = before.get("hidden_size")
        self.refresh()

    def refresh(self) -> None:
        """Look up what the shards hold that other processes wrote."""
        for path in sorted(set(self.folder.glob("*.safetensors")) - self._known):
            try:
                file = opened(path)
                shape = tuple(file.get_slice("states").get_shape())
                fits = shape[1] == len(self.layers) and self.hidden_size in (None, shape[2])
                if not fits:
                    raise corrupt(path, f"states of {list(shape)}, not of this folder's layers")
            except ValueError:
                if not path.exists():  # a text that another process has removed meanwhile
                    continue
                raise
            ends = file.get_tensor("ends").tolist()
            keys, checksums = file.get_tensor("keys").numpy(), file.get_tensor("checksums").tolist()
            for key, start, stop, checksum in zip(
                keys, [0, *ends[:-1]], ends, checksums, strict=True
            ):
                self.locations.setdefault(key.tobytes(), _Location(path, start, stop, checksum))
            self._known.add(path)

    def _shard(self, path: Path) -> Any:
        """A shard's memory map; the one that was used longest ago is closed for it."""
        if path not in self._open:
            self._open[path] = opened(path)
            if len(self._open) > OPEN_SHARDS:
                self._open.popitem(last=False)
        self._open.move_to_end(path)
        return self._open[path]

    def __contains__(self, key: Key) -> bool:
        return key in self.locations or key in self._new

    def add(self, key: Key, states_TLD: Tensor) -> None:
        """Add a sequence's states.

        They are on disk after the next `flush`, or once they fill a shard.
        """
        if key in self:
            return
        states, scales = encoded(states_TLD.cpu(), self.format)
        self._new[key] = states, scales
        self._new_bytes += states.nbytes + (0 if scales is None else scales.nbytes)
        if self._new_bytes >= self.shard_bytes:
            self.flush()

    def stored(self, key: Key) -> tuple[Tensor, Tensor | None]:
        """Return states_TLD of a sequence in the cache's format, and scales_TL for int8.

        The scales are None in other formats. The bytes are checked once; a ValueError reports a
        corrupt shard.
        """
        if key in self._new:
            return self._new[key]
        location = self.locations[key]
        file, rows = self._shard(location.shard), slice(location.start, location.stop)
        states = file.get_slice("states")[rows]
        if states.dtype != FORMATS[self.format]:
            raise corrupt(location.shard, f"states of {states.dtype}, not {self.format}")
        scales = file.get_slice("scales")[rows] if self.format == "int8" else None
        if key not in self._checked:
            if _checksum(states, scales) != location.checksum:
                raise corrupt(location.shard, "other bytes than were written")
            self._checked.add(key)
        return states, scales

    def flush(self) -> None:
        """Write the states that are not yet on disk as a shard, whole or not at all."""
        if not self._new:
            return
        path = (
            self.folder
            / f"{hashlib.blake2b(b''.join(self._new), digest_size=12).hexdigest()}.safetensors"
        )
        write_shard(path, self._new)
        self._new.clear()
        self._new_bytes = 0
        self.refresh()


def write_shard(
    path: Path,
    sequences: Mapping[Key, tuple[Tensor, Tensor | None]],
    more: Mapping[str, Tensor] | None = None,
    about: dict[str, str] | None = None,
) -> None:
    """Write the encoded states and scales of sequences, by key, as a shard, whole or not at all.

    Args:
        path: the file; one of this name is replaced.
        sequences: what `encoded` returned for each.
        more: further tensors, by name.
        about: metadata of the file.

    Raises:
        OSError: a full disk, or a folder that cannot be written to.
    """
    pairs = list(sequences.values())
    tensors = {
        "keys": torch.frombuffer(bytearray(b"".join(sequences)), dtype=torch.int64).view(-1, 2),
        "ends": torch.tensor([len(states) for states, _ in pairs]).cumsum(0),
        "checksums": torch.tensor([_checksum(*pair) for pair in pairs]),
        "states": torch.cat([states for states, _ in pairs]),
        **(more or {}),
    }
    scales = [own for _, own in pairs if own is not None]
    if scales:
        tensors["scales"] = torch.cat(scales)
    try:
        with replacing(path) as partial:
            save_file(tensors, partial, about)
    except (OSError, SafetensorError) as error:
        raise OSError(f"{path} cannot be written: {error}") from error


def cache_manifest(
    provenance: Mapping[str, Any], layers: Sequence[int], hidden_size: int, storage: str
) -> dict[str, Any]:
    """Return a folder's manifest: identity of target and tokenizer, the layers, and the format."""
    names = ("target", "revision", "dtype", "quantization", "weights", "tokenizer")
    model = {name: provenance.get(name) for name in names}  # weights may be unknown
    return {**model, "layers": list(layers), "hidden_size": hidden_size, "format": storage}


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read a folder's manifest.

    Raises:
        ValueError: a file that is not one.
    """
    path = folder / MANIFEST
    manifest = read_json(path)
    names = ("target", "revision", "dtype", "tokenizer", "weights")
    is_one = (
        isinstance(manifest, dict)
        and manifest.get("format") in tuple(FORMATS)
        and type(manifest.get("hidden_size", 0)) is int
        and isinstance(manifest.get("layers"), list)
        and all(type(layer) is int for layer in manifest["layers"])
        and all(isinstance(manifest.get(name), str | None) for name in names)
    )
    if not is_one:
        raise ValueError(f"{path} is not the manifest of a folder of states; remove the folder")
    checked: dict[str, Any] = manifest
    return checked


def check_manifest(
    folder: Path, before: Mapping[str, Any], manifest: Mapping[str, Any], advice: str
) -> None:
    """Refuse a folder whose manifest, `before`, is not the one needed; more layers are allowed.

    Raises:
        ValueError: what differs, with `advice`.
    """
    needed = dict(manifest)
    if set(needed["layers"]) <= set(before["layers"]):
        needed["layers"] = before["layers"]
    if None in (needed.get("weights"), before.get("weights")):  # unknown: see `OuterTarget`
        needed["weights"] = before.get("weights")
    elif needed["weights"] == before["weights"]:
        # One model by another name, such as a policy that was trained in memory and has been saved
        # since.
        needed["target"] = before.get("target")
        needed["revision"] = before.get("revision")
    check_options(f"{folder} holds states with", before, needed, advice)


def kept_layers(layers: Sequence[int]) -> tuple[int, ...]:
    """Return the layers whose states a cache holds for a head that reads `layers`.

    These are `layers` and -1, the state after the final norm.
    """
    return tuple(dict.fromkeys((*layers, -1)))


def text_row(path: Path) -> dict[str, Any]:
    """Return a one-text shard as a training row.

    The row has `input_ids`, `loss_mask`, and what else is known of the text.

    Raises:
        ValueError: a file that is cut or not such a shard.
    """
    try:
        with open_safetensors(require_regular(path)) as file:
            known = parse_json((file.metadata() or {})["row"], "its row")
            tokens_T = file.get_tensor("tokens")
            mask_T = file.get_tensor("loss_mask")
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({one_line(error)}); remove it") from error
    is_text = (
        isinstance(known, dict)
        and tokens_T.ndim == 1
        and tokens_T.dtype == torch.int32
        and mask_T.dtype == torch.bool
        and mask_T.shape == tokens_T.shape
        and bool(mask_T.any())
        and int(tokens_T.min()) >= 0
    )
    if not is_text:
        raise ValueError(f"{path} is not a text of tokens with an answer; remove it")
    # whatever else is known, the text is that of the tensors
    return {**known, "input_ids": tokens_T.tolist(), "loss_mask": mask_T.int().tolist()}


def text_rows(files: Iterable[Path]) -> list[dict[str, Any]]:
    """Return the rows of one-text shards, each text once.

    Files that newer ones have replaced meanwhile are left out.
    """
    rows: dict[tuple[int, ...], dict[str, Any]] = {}
    for path in files:
        if path.exists():
            row = text_row(path)
            rows.setdefault(tuple(row["input_ids"]), row)
    return list(rows.values())


def opened(path: Path) -> Any:
    """Open a shard; a ValueError for a file that is not a shard, or truncated."""
    require_regular(path)
    try:
        file = safe_open(path, "pt")
        states = file.get_slice("states").get_shape()
        keys_n2 = file.get_tensor("keys")
        ends_n = file.get_tensor("ends")
        checksums_n = file.get_tensor("checksums")
        scaled = file.get_slice("states").get_dtype() == "I8"
        scales = (states[:2], "F32")
        if scaled or "scales" in file.keys():  # noqa: SIM118
            scales_NL = file.get_slice("scales")
            scales = (scales_NL.get_shape(), scales_NL.get_dtype())
    except (SafetensorError, OSError, RuntimeError) as error:  # RuntimeError: it is gone meanwhile
        raise corrupt(path, one_line(error)) from error
    texts = len(keys_n2)
    is_shard = (
        len(states) == 3
        and scales == (states[:2], "F32")
        and keys_n2.shape == (texts, 2)
        and ends_n.shape == checksums_n.shape == (texts,)
        and {keys_n2.dtype, ends_n.dtype, checksums_n.dtype} == {torch.int64}
        and texts > 0
        and bool((ends_n.diff(prepend=ends_n.new_zeros(1)) >= 0).all())
        and int(ends_n[-1]) == states[0]
    )
    if not is_shard:
        raise corrupt(path, "its sequences do not fit its states")
    return file


def corrupt(path: Path, reason: str) -> ValueError:
    """The error for a shard that cannot be used, with what helps."""
    return ValueError(
        f"{path} is corrupt ({reason}); remove the file: states that are missing are computed again"
    )


def key_of(tokens_T: Tensor | NDArray[Any]) -> Key:
    """Hash a sequence's tokens: the key of its states."""
    tokens = tokens_T.cpu().numpy() if isinstance(tokens_T, Tensor) else tokens_T
    return hashlib.blake2b(tokens.astype("int32", copy=False).tobytes(), digest_size=16).digest()


def encoded(states_TLD: Tensor, storage: str) -> tuple[Tensor, Tensor | None]:
    """Encode states for storage and return them with the scales of int8, else None.

    In int8 the largest absolute value of each token and layer becomes 127.
    """
    if storage != "int8":
        return states_TLD.to(FORMATS[storage]), None
    scales_TL = (states_TLD.float().abs().amax(-1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
    return (states_TLD.float() / scales_TL[..., None]).round().to(torch.int8), scales_TL


def decoded(states_TLD: Tensor, scales_TL: Tensor | None) -> Tensor:
    """Decode stored states, exactly but for the rounding of their format."""
    return states_TLD if scales_TL is None else states_TLD.float() * scales_TL[..., None]


def _checksum(states_TLD: Tensor, scales_TL: Tensor | None) -> int:
    found = zlib.crc32(states_TLD.contiguous().view(torch.uint8).numpy().data)
    return found if scales_TL is None else zlib.crc32(scales_TL.contiguous().numpy().data, found)
