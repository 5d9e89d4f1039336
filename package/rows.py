"""Rows of data that Python gives, a list of dicts or a `datasets.Dataset`, as a file."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .files import cache_folder, naming


def as_files(sources: Any) -> Any:
    """Sources of data from Python as a file of options has them: a list of names.

    Rows become a file in the cache folder. Anything that is not data is returned as it is.
    """
    if isinstance(sources, str):
        return [sources]
    if _are_rows(sources):
        return [write_rows(sources)]
    if isinstance(sources, list):
        return [write_rows(source) if _are_rows(source) else source for source in sources]
    return sources


def _are_rows(value: Any) -> bool:
    """Whether a value is rows, and no name of them."""
    if isinstance(value, list):
        return bool(value) and isinstance(value[0], dict)
    # A DatasetDict, which is a dict, holds several data sets.
    return hasattr(value, "column_names") and not isinstance(value, dict)


def write_rows(rows: Iterable[Any]) -> str:
    """Write rows to a JSONL file in the cache folder, named by a digest of them; return its path.

    Rows that were written before keep their file, and so what was tokenized of it.

    Raises:
        ValueError: a row that is not JSON.
    """
    features = getattr(rows, "features", None)
    folder = cache_folder() / "rows"
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with (
        naming(folder),
        tempfile.NamedTemporaryFile(dir=folder, suffix=".partial", delete=False) as file,
    ):
        written = Path(file.name)
        try:
            for number, row in enumerate(rows):
                try:
                    line = json.dumps(without_fill(row, features)).encode() + b"\n"
                except TypeError as error:
                    raise ValueError(f"row {number} is not JSON: {error}") from error
                digest.update(line)
                file.write(line)
        except BaseException:
            written.unlink()
            raise
    path = folder / f"{digest.hexdigest()[:16]}.jsonl"
    if path.exists():
        written.unlink()
    else:
        written.replace(path)
    return str(path)


def without_fill(value: Any, feature: Any) -> Any:
    """Drop keys that Arrow fills with null because other rows have them; `content` stays.

    Only a struct, whose `feature` is a dict, is filled. What `datasets` keeps as JSON has the keys
    that its row had.
    """
    # Rows {"a": 1} and {"b": 2} come out of Arrow as {"a": 1, "b": None} and {"a": None, "b": 2}.
    if isinstance(value, dict) and isinstance(feature, dict):
        # An assistant message with tool calls may have the content null.
        cells = {
            name: cell for name, cell in value.items() if cell is not None or name == "content"
        }
        return {name: without_fill(cell, feature.get(name)) for name, cell in cells.items()}
    # The type of a list's items: of [type], or of datasets' List and LargeList.
    inside = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
    if isinstance(value, list) and (isinstance(inside, (dict, list)) or hasattr(inside, "feature")):
        return [without_fill(item, inside) for item in value]
    return value
