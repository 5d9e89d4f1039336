"""A corpus on disk, as tokens of a target: `headstart datastore` writes it, a history searches it.

All texts lie one after the other, with a `SEPARATOR` after each; a manifest names the tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from ...files import BROKEN, at_home, read_json, require_regular
from .text_index import SEPARATOR

MANIFEST_FILE = "datastore.json"
TOKENS_FILE = "tokens.npy"
FILES = (MANIFEST_FILE, TOKENS_FILE, "order.npy")
"""Files of a datastore; the order of its positions, which earlier versions wrote, is not read."""


def write_datastore(folder: Path, texts: Iterable[Sequence[int]], tokenizer: str) -> None:
    """Write a corpus of token ids, the manifest last: a folder without it is not a datastore.

    Args:
        folder: made if it does not exist.
        texts: token ids of each text.
        tokenizer: hash of the tokenizer; see `tokenizer_provenance`.

    Raises:
        ValueError: no tokens at all.
    """
    parts = [np.array([*text, SEPARATOR], dtype=np.int32) for text in texts if len(text) > 0]
    if not parts:
        raise ValueError("the corpus is empty: there is nothing to look up")
    tokens = np.concatenate(parts)
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / TOKENS_FILE, tokens)
    manifest = {"tokenizer": tokenizer, "tokens": len(tokens)}
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest) + "\n", encoding="utf-8")


def read_datastore(folder: str | Path) -> tuple[np.ndarray, str]:
    """Read the tokens of a datastore, int64, and the hash of their tokenizer.

    Raises:
        ValueError: a folder without a datastore, or files of another kind.
    """
    folder = Path(at_home(folder))
    manifest = folder / MANIFEST_FILE
    if not manifest.is_file():
        raise ValueError(
            f"no datastore in {str(folder)!r}: it has no {MANIFEST_FILE}; `headstart datastore`"
            " makes one"
        )
    path = folder / TOKENS_FILE
    try:
        tokens = np.lib.format.open_memmap(require_regular(path), mode="r")
    except (OSError, *BROKEN) as error:
        raise ValueError(f"{path} cannot be read: {error}; make the datastore again") from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ValueError(f"{path} is not a list of integers; make the datastore again")
    if len(tokens) == 0:
        raise ValueError(f"{path} holds no tokens; make the datastore again")
    about = read_json(manifest)
    if not isinstance(about, dict) or not isinstance(about.get("tokenizer"), str):
        raise ValueError(f"{manifest} names no tokenizer; make the datastore again")
    return tokens.astype(np.int64), about["tokenizer"]
