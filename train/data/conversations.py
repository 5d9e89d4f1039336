"""Sources of conversations and the formats that they come in.

A source is a JSONL file, a file with one JSON array, a Parquet file, a folder (a local data set,
one that `Dataset.save_to_disk` wrote, or one of texts with their states), or a Hub data set
`NAME[@REVISION][:[CONFIG:]SPLIT]`. Opening one reads as little as possible: a JSONL file is only
searched for line breaks, the others are mapped into memory by `datasets`. JSON may be compressed
(.gz, .zst, .bz2, .xz), and a pattern (`data/*.jsonl`) stands for all files that fit it.

All rows of a source have the same one of the `TEXT_FORMATS`, and become
{"messages": [{"role": "user", "content": "..."}]}. `content` may be null beside `tool_calls`; parts
of type text are joined. `tools` is passed to the chat template.

In training, a row that has `input_ids` and `loss_mask` is a sequence of tokens already, whatever
else it holds.
"""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import itertools
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from datasets import (
    Dataset,
    DatasetDict,
    load_dataset,
    load_dataset_builder,
    load_from_disk,
)
from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError

from ...files import (
    BROKEN,
    cache_folder,
    one_line,
    read_json,
    reading_back,
    refuse_pipes,
    text_shards,
)
from ...inference.feature_cache import text_rows
from ...inference.text.messages import TEXT_FORMATS, check_columns, check_conversation, format_of
from ...inference.text.prompt_files import (
    compression,
    holds_array,
    json_array,
    open_bytes,
    parsed_line,
    without_compression,
)
from ...options import shown
from ...rows import without_fill

FORMATS = {"tokens": ("input_ids", "loss_mask"), **TEXT_FORMATS}
"""Columns of the formats that training reads: the token ids of a whole sequence with 1 for each
that the model wrote, as the package speculators names them, or text."""
FILES = (".jsonl", ".json", ".parquet")
"""Ends of the names of files, before that of a compression."""
SCANNED = 2**26
"""Bytes of a file that are searched for line feeds at once."""
BATCH = 1000
"""Rows that are read from Arrow at once."""

RESUME_ADVICE = "continue it with its own options, or choose another output"
"""End of the error where a file of conversations was begun with other options."""

Kind = Literal["lines", "texts", "columns"]
"""Form of rows: byte ranges of lines in a file, JSON texts, or columns of Arrow."""


@dataclass(frozen=True)
class RowReader:
    """Reads rows of a source, in any process."""

    name: str
    """Name of the source."""
    kind: Kind
    file: Path | None
    """The file with the lines, decompressed."""
    features: Any
    """Types of the columns."""

    def values(
        self, batch: dict[str, list[Any]], numbers: Iterable[int]
    ) -> Iterator[tuple[str, Any]]:
        """Yield each row's location and value; a row that is not JSON yields its ValueError.

        `numbers` are the rows' numbers in the source.
        """
        # Lines of a file: their byte ranges are known.
        if self.file is not None:
            with self.file.open("rb") as file:
                for start, stop, line in zip(
                    batch["start"], batch["stop"], batch["line"], strict=True
                ):
                    file.seek(start)
                    yield parsed_line(self.name, line, file.read(stop - start))
            return
        # A batch has a list for each column: turn it into rows.
        for number, cells in zip(numbers, zip(*batch.values(), strict=True), strict=True):
            where = f"{self.name}, row {number}"
            row = dict(zip(batch, cells, strict=True))
            if self.kind == "texts":
                yield where, json.loads(row["json"])
            else:
                yield where, without_fill(row, self.features)


@dataclass(frozen=True)
class Source:
    """A source whose rows can be read, in any order and by any process."""

    name: str
    """Name by which the source was opened."""
    kind: Kind
    identity: str
    """Hash that changes with the data."""
    load: Callable[[], Dataset] | None
    """Loads all rows, memory-mapped unless they are small; None for the lines of a file."""
    limit: int | None = None
    """Read only the first rows; None for all."""
    entry: int = 0
    """Index of the name, or the pattern, among those that were opened together."""

    @cached_property
    def rows(self) -> Dataset:
        """The rows in the form of `kind`; a JSONL file is searched for its lines."""
        rows = _lines(self.file) if self.load is None else self.load()
        if self.limit is None or self.limit >= len(rows):
            return rows
        return rows.select(range(self.limit))

    @property
    def reader(self) -> RowReader:
        """Reader of `rows`; it can be sent to other processes, where it opens the file itself."""
        file = self.file if self.kind == "lines" else None
        return RowReader(self.name, self.kind, file, self.rows.features)

    @cached_property
    def file(self) -> Path:
        """The file that the byte ranges of lines refer to.

        A compressed file is decompressed for as long as the source is used.
        """
        if compression(self.name) is None:
            return Path(self.name)
        return Path(self._decompressed.name) / "lines.jsonl"

    @cached_property
    def _decompressed(self) -> tempfile.TemporaryDirectory[str]:
        """A folder that is removed with this object, or at the end of the process."""
        cache_folder().mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(prefix="decompressed-", dir=cache_folder())
        with (
            open_bytes(self.name) as compressed,
            (Path(folder.name) / "lines.jsonl").open("wb") as file,
        ):
            shutil.copyfileobj(compressed, file, SCANNED)
        return folder

    def read(self) -> Iterator[tuple[str, Any]]:
        """Yield each row's location, for error messages, and its value; the first without delay.

        Raises:
            ValueError: a row that is not JSON.
        """
        for where, row in self.read_all():
            if isinstance(row, ValueError):
                raise row
            yield where, row

    def read_all(self) -> Iterator[tuple[str, Any]]:
        """Yield what `read` does; a row that is not JSON comes as its error."""
        if self.kind == "lines":
            # Read as a stream, without searching the file for all lines first. As bytes: only a
            # line feed ends a line, not U+2028 and the like.
            with open_bytes(self.name) as file:
                full = ((number, text) for number, text in enumerate(file, start=1) if text.strip())
                for number, text in itertools.islice(full, self.limit):
                    yield parsed_line(self.name, number, text)
            return
        for start in range(0, len(self.rows), BATCH):
            with reading_back(self.name, "write it again"):
                batch = self.rows[start : start + BATCH]
            yield from self.reader.values(batch, range(start, min(start + BATCH, len(self.rows))))


def open_source(name: str, limit: int | None = None) -> Source:
    """Open a source, of which at most the first `limit` rows are read."""
    is_file = without_compression(name).endswith(FILES) or Path(name).is_file()
    source = dataclasses.replace(
        open_file(name) if is_file else _data_set(name, limit), limit=limit
    )
    if source.kind == "columns" and len(source.rows) > 0:
        check_columns(source.rows.column_names, name, FORMATS)
    return source


def files_of(name: str) -> list[str]:
    """Return the files that fit a pattern, sorted; the name itself if it is not a pattern.

    Raises:
        ValueError: no file fits the pattern.
    """
    # Brackets of a Hub data set's split, train[:100], do not make a pattern.
    pattern = any(sign in name for sign in "*?") or (
        "[" in name and without_compression(name).endswith(FILES)
    )
    if not pattern or Path(name).exists():
        return [name]
    files = sorted(path for path in glob.glob(name, recursive=True) if Path(path).is_file())
    if not files:
        raise ValueError(f"no file fits the pattern {name!r}")
    return files


def open_file(name: str) -> Source:
    """Open a Parquet file, a JSONL file, or a file with one JSON array."""
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"no file at {name!r}")
    if name.endswith(".parquet"):
        try:
            return _of_arrow(name, load_dataset("parquet", data_files=name, split="train"))
        except (DatasetGenerationError, OSError, *BROKEN) as error:
            reason = one_line(error.__cause__ or error)
            raise ValueError(f"{name}: no Parquet file that can be read: {reason}") from error
    # Size and time stand for the content, which would have to be read to be hashed.
    status = path.stat()
    identity = _hash(str(path.resolve()), status.st_size, status.st_mtime_ns)
    if holds_array(name):
        return Source(name, "texts", identity, partial(_as_texts, json_array, name))
    return Source(name, "lines", identity, None)


def open_sources(names: list[str], limit: int | None = None) -> list[Source]:
    """Open all sources, reading at most `limit` rows in total; a ValueError if one is empty."""
    opened: list[Source] = []
    files = [(entry, name) for entry, pattern in enumerate(names) for name in files_of(pattern)]
    for entry, name in files:
        if limit is not None and limit <= 0:
            break
        source = dataclasses.replace(open_source(name, limit), entry=entry)
        if next(source.read_all(), None) is None:
            raise ValueError(f"{name}: no conversations: it is empty")
        opened.append(source)
        # The limit is for all sources together.
        limit = None if limit is None else limit - len(source.rows)
    return opened


def read_conversations(source: str, limit: int | None = None) -> list[dict[str, Any]]:
    """Read the first `limit` conversations of a source, each with its `messages`, or its tokens."""
    rows = itertools.islice(open_source(source, limit).read(), limit)
    return [check_row(row, where) for where, row in rows]


def distinct_share(tokens: Sequence[object], n: int = 4) -> float:
    """Return the share of a text's n-grams that are distinct; low where it repeats itself.

    1 if there are fewer than 8: such a text is too short to judge.
    """
    # 12 tokens of a b a b ... have nine 4-grams, of which two are distinct (abab, baba): 2 / 9.
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if len(grams) >= 8 else 1.0


def check_row(row: Any, where: str, expected: str | None = None) -> dict[str, Any]:
    """Check a row to train on: tokens stay as they are, any other format becomes `messages`."""
    if format_of(row, where, FORMATS) != "tokens":
        return check_conversation(row, where, expected)
    tokens = row["input_ids"]
    mask = row["loss_mask"]
    for name, values_T, valid in (
        ("input_ids", tokens, "token ids"),
        ("loss_mask", mask, "0 and 1"),
    ):
        if not isinstance(values_T, list):
            raise ValueError(f"{where}: {name!r} must be a list of {valid}, not {shown(values_T)}")
    if len(tokens) != len(mask):
        raise ValueError(
            f"{where}: 'input_ids' holds {len(tokens)} tokens and 'loss_mask' {len(mask)}; there"
            " must be one 0 or 1 for each token"
        )
    for position, token in enumerate(tokens):
        if type(token) is not int or token < 0:  # isinstance would take True for an int
            raise ValueError(
                f"{where}: 'input_ids' holds {shown(token)} at {position}, which is not a token id"
            )
    for position, mark in enumerate(mask):
        if not isinstance(mark, int) or mark not in (0, 1):
            raise ValueError(
                f"{where}: 'loss_mask' holds {shown(mark)} at {position}; choose from 0 and 1"
            )
    if 1 not in mask:
        raise ValueError(f"{where}: 'loss_mask' holds no 1, so no token of it is the model's own")
    return dict(row)


def _as_texts(read: Callable[[Any], Iterable[Any]], source: Any) -> Dataset:
    """Load the rows that `read` finds in a source, each as a text, since their keys may differ."""
    return Dataset.from_dict({"json": [json.dumps(row) for row in read(source)]})


def _lines(path: Path) -> Dataset:
    """Find the byte ranges of the lines that are not empty, and their numbers, counted from 1."""
    if path.stat().st_size == 0:
        return Dataset.from_dict({"start": [], "stop": [], "line": []})
    # 1. Find the line feeds, in parts of the file that fit in memory.
    text = np.memmap(path, dtype=np.uint8, mode="r")
    ends = [
        np.flatnonzero(text[i : i + SCANNED] == ord("\n")) + i for i in range(0, len(text), SCANNED)
    ]
    # 2. A line begins after the line feed before it. "ab\n\ncd" has line feeds at 2 and 3: its
    # lines are 0:2, 3:3 and 4:6.
    stops = np.concatenate([*ends, np.array([len(text)])])
    starts = np.concatenate([np.zeros(1, dtype=np.int64), stops[:-1] + 1])
    # 3. Leave out empty lines. Only lines that begin with white space need to be read for that.
    filled = stops > starts
    spaces = np.frombuffer(b" \t\r\x0b\x0c", dtype=np.uint8)
    doubtful = np.flatnonzero(filled)[np.isin(text[starts[filled]], spaces)]
    for i in doubtful.tolist():
        filled[i] = bool(text[starts[i] : stops[i]].tobytes().strip())
    return Dataset.from_dict(
        {"start": starts[filled], "stop": stops[filled], "line": np.flatnonzero(filled) + 1}
    )


def _of_arrow(name: str, rows: Dataset, *identity: Any) -> Source:
    return Source(name, "columns", _hash(*(identity or [rows._fingerprint])), lambda: rows)


def _saved(name: str, folder: Path) -> Dataset | DatasetDict:
    """Load a folder that `save_to_disk` has written.

    Raises:
        ValueError: a broken one, or one that names files outside of it.
    """
    try:
        for state in (*folder.glob("state.json"), *folder.glob("*/state.json")):
            refuse_pipes(state.parent)
            for file in read_json(state)["_data_files"]:
                if Path(file["filename"]).name != file["filename"]:
                    raise ValueError(f"it names {file['filename']!r}, a file elsewhere")
        return load_from_disk(folder)
    except (OSError, NotImplementedError, *BROKEN) as error:
        reason = one_line(f"{type(error).__name__}: {error}")
        raise ValueError(f"{name} cannot be read as a data set ({reason})") from error


def _data_set(name: str, limit: int | None) -> Source:
    """Open a folder, or a Hub data set, of which at most `limit` rows are downloaded."""
    path, revision, config, split = parsed_name(name)
    # 1. A folder of texts that were stored with their states.
    shards = text_shards(path)
    if shards:
        identity = _hash("recorded", *(path.name for path in shards))
        return Source(name, "texts", identity, partial(_as_texts, text_rows, shards))

    # 2. A folder that `save_to_disk` has written: one data set, or a dict of splits.
    if (Path(path) / "state.json").is_file() or (Path(path) / "dataset_dict.json").is_file():
        rows = _saved(name, Path(path))
        if isinstance(rows, DatasetDict):
            if (split or "train") not in rows:
                raise ValueError(
                    f"{name}: no split {split or 'train'!r}; choose from {', '.join(rows)}"
                )
            rows = rows[split or "train"]
        return _of_arrow(name, rows)

    # 3. A data set of the Hub. With a limit, it is streamed; rows from a list have no fingerprint
    # that lasts, so the builder's hash identifies them.
    try:
        if limit is None:
            rows = load_dataset(path, config, split=split or "train", revision=revision)
            return _of_arrow(name, rows)
        builder = load_dataset_builder(path, config, revision=revision)
        stream = load_dataset(
            path, config, split=split or "train", revision=revision, streaming=True
        )
        rows = Dataset.from_list(list(itertools.islice(stream, limit)))
        return _of_arrow(name, rows, str(builder.cache_dir), builder.hash, split, limit)
    except (DatasetNotFoundError, DatasetGenerationError, OSError, StopIteration, *BROKEN) as error:
        raise ValueError(
            f"no conversations at {name!r}: neither a file nor a Hub data set: {one_line(error)}"
        ) from error


def parsed_name(name: str) -> tuple[str, str | None, str | None, str | None]:
    """Parse `NAME[@REVISION][:[CONFIG:]SPLIT]` into its parts; None for those left out.

    The split may be a slice, such as train[:100].
    """
    if Path(name).exists():
        return name, None, None, None
    # org/name@v2:en:train[:100]  ->  org/name, v2, en, train[:100]
    path, _, rest = name.partition(":")
    path, _, revision = path.partition("@")
    # The colon in a slice does not divide config and split.
    parts = re.fullmatch(r"([^:\[\]]+):(.+)", rest)
    if parts is None:
        return path, revision or None, None, rest or None
    return path, revision or None, parts[1], parts[2]


def _hash(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
