"""Sources of conversations and the formats that they come in.

A source is a JSONL file, a file with one JSON array, a Parquet file, a folder (a local data set, or one that
`Dataset.save_to_disk` wrote), or a Hub data set `NAME[@REVISION][:[CONFIG:]SPLIT]`. Opening one reads as little as
possible: a JSONL file is only searched for line breaks, the others are mapped into memory by `datasets`. JSON may be
compressed (.gz, .zst, .bz2, .xz), and a pattern (`data/*.jsonl`) stands for all files that fit it.

All rows of a source have the same one of the `TEXT_FORMATS`, and become
{"messages": [{"role": "user", "content": "..."}]}. `content` may be null beside `tool_calls`; parts of type text are
joined. `tools` is passed to the chat template.

In training, a row that has `input_ids` and `loss_mask` is a sequence of tokens already, whatever else it holds.
"""

from __future__ import annotations

import codecs
import dataclasses
import glob
import hashlib
import io
import itertools
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import IO, Any, Literal

import fsspec
import numpy as np
from datasets import Dataset, DatasetDict, LargeList, List, load_dataset, load_dataset_builder, load_from_disk
from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError

from ...inference.tuning.machine import cache_folder

ROLES = ("system", "developer", "user", "assistant", "tool")
TEXT_FORMATS = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt/completion": ("prompt", "completion"),
}
"""Columns of the formats that hold text: OpenAI's messages, ShareGPT's from/value pairs, a prompt with its answer.
A row has the first format of which it has all columns."""
FORMATS = {"tokens": ("input_ids", "loss_mask"), **TEXT_FORMATS}
"""Columns of the formats that training reads: the token ids of a whole sequence with 1 for each that the model wrote,
as the package speculators names them, or text."""
SHAREGPT_ROLES = {
    "system": "system",
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bot", "model", "assistant"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}
"""Roles by ShareGPT's value of `from`."""
COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd"}
"""Compressions by the ends of file names."""
FILES = (".jsonl", ".json", ".parquet")
"""Ends of the names of files, before that of a compression."""
UTF_16_AND_32 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)
"""Byte order marks of encodings that are not read."""
SCANNED = 2**26
"""Bytes of a file that are searched for line feeds at once."""
BATCH = 1000
"""Rows that are read from Arrow at once."""

Messages = list[dict[str, str]]
"""Roles and contents of a prompt or a conversation."""
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

    def values(self, batch: dict[str, list[Any]], numbers: Iterable[int]) -> Iterator[tuple[str, Any]]:
        """Place and value of some rows, numbered in the source; a row that is not JSON comes as its error."""
        if self.file is not None:
            with self.file.open("rb") as file:
                for start, stop, line in zip(batch["start"], batch["stop"], batch["line"], strict=True):
                    file.seek(start)
                    yield _line(self.name, line, file.read(stop - start))
            return
        for number, cells in zip(numbers, zip(*batch.values(), strict=True), strict=True):
            where, row = f"{self.name}, row {number}", dict(zip(batch, cells, strict=True))
            yield where, json.loads(row["json"]) if self.kind == "texts" else without_fill(row, self.features)


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
        rows = _places(self.file) if self.load is None else self.load()
        return rows if self.limit is None or self.limit >= len(rows) else rows.select(range(self.limit))

    @property
    def reader(self) -> RowReader:
        """Reads rows of `rows`."""
        return RowReader(self.name, self.kind, self.file if self.kind == "lines" else None, self.rows.features)

    @cached_property
    def file(self) -> Path:
        """The file that the byte ranges of lines lie in: a compressed one is decompressed for as long as it is used."""
        return Path(self.name) if compression(self.name) is None else Path(self._decompressed.name) / "lines.jsonl"

    @cached_property
    def _decompressed(self) -> tempfile.TemporaryDirectory[str]:
        """A folder that is removed with this object, or at the end of the process."""
        cache_folder().mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(prefix="decompressed-", dir=cache_folder())
        with open_bytes(self.name) as compressed, (Path(folder.name) / "lines.jsonl").open("wb") as file:
            shutil.copyfileobj(compressed, file, SCANNED)
        return folder

    def read(self) -> Iterator[tuple[str, Any]]:
        """Place of every row, for error messages, and its value; the first one without delay.

        Raises:
            ValueError: a row that is not JSON.
        """
        for where, row in self.read_all():
            if isinstance(row, ValueError):
                raise row
            yield where, row

    def read_all(self) -> Iterator[tuple[str, Any]]:
        """Place and value of every row, as in `read`; a row that is not JSON comes as its error."""
        if self.kind == "lines":
            with open_bytes(self.name) as file:  # bytes: only a line feed ends a line, not U+2028 and the like
                full = ((number, text) for number, text in enumerate(file, start=1) if text.strip())
                for number, text in itertools.islice(full, self.limit):
                    yield _line(self.name, number, text)
            return
        for start in range(0, len(self.rows), BATCH):
            batch = self.rows[start : start + BATCH]
            yield from self.reader.values(batch, range(start, min(start + BATCH, len(self.rows))))


def compression(name: str) -> str | None:
    """Name of a file's compression, None for none.

    Raises:
        ValueError: a compression for which a package is missing.
    """
    found = COMPRESSIONS.get(Path(name).suffix)
    if found is not None and found not in fsspec.available_compressions():
        raise ValueError(f"{name}: reading {found} needs the package zstandard: pip install zstandard")
    return found


def open_bytes(name: str) -> IO[bytes]:
    """Open a file for reading, decompressed."""
    if compression(name) is None:
        return Path(name).open("rb")
    packed: Any = fsspec.open(str(Path(name).absolute()), "rb", compression=compression(name)).open()
    return io.BufferedReader(packed)  # zstandard's reader has no lines


def open_source(name: str, limit: int | None = None) -> Source:
    """Open a source, of which at most the first `limit` rows are read."""
    is_file = without_compression(name).endswith(FILES) or Path(name).is_file()
    source = dataclasses.replace(open_file(name) if is_file else _data_set(name, limit), limit=limit)
    if source.kind == "columns" and len(source.rows) > 0:
        check_columns(source.rows.column_names, name)
    return source


def without_compression(name: str) -> str:
    """A file's name without the end that tells its compression."""
    return name.removesuffix(Path(name).suffix) if Path(name).suffix in COMPRESSIONS else name


def files_of(name: str) -> list[str]:
    """The files that fit a pattern, sorted; the name itself if it is no pattern.

    Raises:
        ValueError: a pattern that no file fits.
    """
    # Brackets of a Hub data set's split, train[:100], are no pattern.
    pattern = any(sign in name for sign in "*?") or ("[" in name and without_compression(name).endswith(FILES))
    if not pattern or Path(name).exists():
        return [name]
    found = sorted(path for path in glob.glob(name, recursive=True) if Path(path).is_file())
    if not found:
        raise ValueError(f"no file fits the pattern {name!r}")
    return found


def open_file(name: str) -> Source:
    """Open a Parquet file, a JSONL file, or a file with one JSON array."""
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"no file at {name!r}")
    if name.endswith(".parquet"):
        try:
            return _of_arrow(name, load_dataset("parquet", data_files=name, split="train"))
        except (DatasetGenerationError, OSError, ValueError) as error:
            raise ValueError(f"{name}: no Parquet file that can be read: {error.__cause__ or error}") from error
    status = path.stat()
    identity = _hash(str(path.resolve()), status.st_size, status.st_mtime_ns)
    try:
        with open_bytes(name) as file:
            first = next((text.lstrip() for text in file if text.strip()), b"")
    except (OSError, EOFError) as error:
        raise ValueError(f"{name}: cannot be read: {error}") from error
    if first.startswith(UTF_16_AND_32) or b"\0" in first[:4]:
        raise ValueError(
            f"{name} is in UTF-16 or UTF-32; convert it to UTF-8: iconv -f UTF-16 -t UTF-8 {name} > converted.jsonl"
        )
    if first.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
        return Source(name, "texts", identity, partial(_elements, name))
    return Source(name, "lines", identity, None)


def open_sources(names: list[str], limit: int | None = None) -> list[Source]:
    """Open all sources, of which at most `limit` rows are read together; refuse those that are empty."""
    opened: list[Source] = []
    files = [(entry, name) for entry, pattern in enumerate(names) for name in files_of(pattern)]
    for entry, name in files:
        if limit is not None and limit <= 0:
            break
        source = dataclasses.replace(open_source(name, limit), entry=entry)
        if next(source.read_all(), None) is None:
            raise ValueError(f"{name}: no conversations: it is empty")
        opened.append(source)
        limit = None if limit is None else limit - len(source.rows)
    return opened


def read_conversations(source: str, limit: int | None = None) -> list[dict[str, Any]]:
    """Read the first `limit` conversations of a source, each with its `messages`, or its tokens."""
    rows = itertools.islice(open_source(source, limit).read(), limit)
    return [check_row(row, where) for where, row in rows]


def read_prompts(path: str | Path, limit: int | None = None) -> list[Messages]:
    """Read the prompts of a file, each as the messages before an answer."""
    return [row["messages"] for row in read_prompt_rows(path, limit)]


def read_prompt_rows(path: str | Path, limit: int | None = None) -> list[dict[str, Any]]:
    """Read the rows of a file of prompts, whose `messages` are those before an answer.

    A row is a conversation in any format (a last assistant message is left out), {"turns": [...]} as in Spec-Bench
    (the first turn is the prompt), or {"prompt": ...}.
    """
    rows: list[dict[str, Any]] = []
    for where, row in itertools.islice(open_file(str(path)).read(), limit):
        turns = user_turns(row)
        if turns and isinstance(turns[0], str):
            rows.append({**row, "messages": [{"role": "user", "content": turns[0]}]})
            continue
        row = check_conversation(row, where)
        messages = row["messages"]
        rows.append({**row, "messages": messages[:-1] if messages[-1]["role"] == "assistant" else messages})
    return rows


def user_turns(row: Any) -> list[Any]:
    """The user's turns in a row without messages: Spec-Bench's `turns`, or its `prompt`; empty for any other row."""
    if not isinstance(row, dict):
        return []
    if isinstance(row.get("turns"), list) and row["turns"]:
        return row["turns"]
    return [row["prompt"]] if isinstance(row.get("prompt"), str) else []


def distinct_share(tokens: Sequence[object], n: int = 4) -> float:
    """Share of a text's n-grams that are distinct; 1 for texts shorter than 8 n-grams, which are too short to judge."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if len(grams) >= 8 else 1.0


def check_columns(columns: list[str], where: str, formats: Mapping[str, tuple[str, ...]] = FORMATS) -> str:
    """Return the first of the formats that has these columns."""
    for name, needed in formats.items():
        if set(needed) <= set(columns):
            return name
    lacking = "; ".join(
        f"{name} lacks {', '.join(repr(column) for column in needed if column not in columns)}"
        for name, needed in formats.items()
    )
    there = ", ".join(map(repr, columns)) or "no columns"
    raise ValueError(f"{where}: no conversation in any format that can be read; it has {there}: {lacking}")


def format_of(row: Any, where: str, formats: Mapping[str, tuple[str, ...]] = FORMATS) -> str:
    """Return the format of a row, whose columns without a value do not count."""
    if not isinstance(row, dict):
        raise ValueError(f'{where}: no conversation; expected {{"messages": [{{"role": ..., "content": ...}}, ...]}}')
    return check_columns([name for name, value in row.items() if value is not None], where, formats)


def check_row(row: Any, where: str, expected: str | None = None) -> dict[str, Any]:
    """Check a row to train on: tokens stay as they are, any other format becomes `messages`."""
    if format_of(row, where) != "tokens":
        return check_conversation(row, where, expected)
    tokens, mask = row["input_ids"], row["loss_mask"]
    for name, values_T, valid in (("input_ids", tokens, "token ids"), ("loss_mask", mask, "0 and 1")):
        if not isinstance(values_T, list):
            raise ValueError(f"{where}: {name!r} must be a list of {valid}, not {values_T!r}")
    if len(tokens) != len(mask):
        raise ValueError(
            f"{where}: 'input_ids' holds {len(tokens)} tokens and 'loss_mask' {len(mask)}; there must be one 0 or 1 "
            "for each token"
        )
    for place, token in enumerate(tokens):
        if type(token) is not int or token < 0:  # a bool is an int to isinstance
            raise ValueError(f"{where}: 'input_ids' holds {token!r} at {place}, which is not a token id")
    for place, own in enumerate(mask):
        if not isinstance(own, int) or own not in (0, 1):
            raise ValueError(f"{where}: 'loss_mask' holds {own!r} at {place}; choose from 0 and 1")
    if 1 not in mask:
        raise ValueError(f"{where}: 'loss_mask' holds no 1, so no token of it is the model's own")
    return dict(row)


def check_conversation(row: Any, where: str, expected: str | None = None) -> dict[str, Any]:
    """Convert a row of text to `messages`; its other columns stay. Errors name the row's place, `where`.

    `expected` is the format of the source's earlier rows, if there are any.
    """
    found = format_of(row, where, TEXT_FORMATS)
    if expected not in (None, "tokens", found):
        raise ValueError(
            f"{where}: a row in the format {found!r}, but the source began with {expected!r}; all rows of a source "
            "have one format: split it into several sources"
        )
    messages: Any
    if found == "conversations":
        messages = _sharegpt(row, where)
    else:
        messages = row["messages"] if found == "messages" else _pair(row, where)
        if not isinstance(messages, list):
            raise ValueError(f"{where}: no conversation; 'messages' must be a list of {{'role': ..., 'content': ...}}")
        messages = [_message(message, i, where) for i, message in enumerate(messages)]
    if not messages:
        raise ValueError(f"{where}: no conversation: {TEXT_FORMATS[found][0]!r} is empty")
    tools = {"tools": _tools(row["tools"], where)} if row.get("tools") else {}
    return {**row, "messages": messages, **tools}


def without_fill(value: Any, feature: Any) -> Any:
    """Drop keys that Arrow fills with null because other rows have them; `content` stays.

    Only a struct, whose `feature` is a dict, is filled. What `datasets` keeps as JSON has the keys that its row had.
    """
    if isinstance(value, dict) and isinstance(feature, dict):
        kept = {name: own for name, own in value.items() if own is not None or name == "content"}
        return {name: without_fill(own, feature.get(name)) for name, own in kept.items()}
    inside = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
    if isinstance(value, list) and isinstance(inside, (dict, list, List, LargeList)):
        return [without_fill(own, inside) for own in value]
    return value


def _elements(name: str) -> Dataset:
    """Elements of a JSON array, each as a text, since their keys may differ."""
    try:
        with open_bytes(name) as file:
            elements = json.loads(file.read())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name}: begins with '[' and is no JSON array: {error}") from error
    return Dataset.from_dict({"json": [json.dumps(each) for each in elements]})


def _places(path: Path) -> Dataset:
    """Byte ranges of the lines that are not empty, and their numbers, counted from 1."""
    if path.stat().st_size == 0:
        return Dataset.from_dict({"start": [], "stop": [], "line": []})
    text = np.memmap(path, dtype=np.uint8, mode="r")
    ends = [np.flatnonzero(text[i : i + SCANNED] == ord("\n")) + i for i in range(0, len(text), SCANNED)]
    stops = np.concatenate([*ends, np.array([len(text)])])
    starts = np.concatenate([np.zeros(1, dtype=np.int64), stops[:-1] + 1])
    kept = stops > starts
    doubtful = np.flatnonzero(kept)[np.isin(text[starts[kept]], np.frombuffer(b" \t\r\x0b\x0c", dtype=np.uint8))]
    for i in doubtful.tolist():
        kept[i] = bool(text[starts[i] : stops[i]].tobytes().strip())
    return Dataset.from_dict({"start": starts[kept], "stop": stops[kept], "line": np.flatnonzero(kept) + 1})


def _line(name: str, number: int, text: bytes) -> tuple[str, Any]:
    """Place and value of a line; its error if it is not JSON."""
    where = f"{name}, line {number}"
    try:
        return where, json.loads(text)
    except (ValueError, RecursionError) as error:
        return where, ValueError(f"{where}: not JSON: {error}")


def _of_arrow(name: str, rows: Dataset, *identity: Any) -> Source:
    return Source(name, "columns", _hash(*(identity or [rows._fingerprint])), lambda: rows)


def _data_set(name: str, limit: int | None) -> Source:
    """Open a folder, or a Hub data set, of which at most `limit` rows are downloaded."""
    place, revision, config, split = parsed_name(name)
    if (Path(place) / "state.json").is_file() or (Path(place) / "dataset_dict.json").is_file():
        rows = load_from_disk(place)
        if isinstance(rows, DatasetDict):
            if (split or "train") not in rows:
                raise ValueError(f"{name}: no split {split or 'train'!r}; choose from {', '.join(rows)}")
            rows = rows[split or "train"]
        return _of_arrow(name, rows)
    try:
        if limit is None:
            rows = load_dataset(place, config, split=split or "train", revision=revision)
            return _of_arrow(name, rows)
        builder = load_dataset_builder(place, config, revision=revision)
        stream = load_dataset(place, config, split=split or "train", revision=revision, streaming=True)
        rows = Dataset.from_list(list(itertools.islice(stream, limit)))
        return _of_arrow(name, rows, str(builder.cache_dir), builder.hash, split, limit)
    except (DatasetNotFoundError, DatasetGenerationError, OSError, ValueError) as error:
        raise ValueError(f"no conversations at {name!r}: neither a file nor a Hub data set: {error}") from error


def parsed_name(name: str) -> tuple[str, str | None, str | None, str | None]:
    """Parse `NAME[@REVISION][:[CONFIG:]SPLIT]` into its parts; the split may be a slice, train[:100]."""
    if Path(name).exists():
        return name, None, None, None
    place, _, rest = name.partition(":")
    place, _, revision = place.partition("@")
    found = re.fullmatch(r"([^:\[\]]+):(.+)", rest)
    config, split = (found[1], found[2]) if found else (None, rest)
    return place, revision or None, config, split or None


def _sharegpt(row: dict[str, Any], where: str) -> list[dict[str, Any]]:
    turns = row["conversations"]
    if not isinstance(turns, list):
        raise ValueError(f"{where}: no conversation; 'conversations' must be a list of {{'from': ..., 'value': ...}}")
    messages = [{"role": "system", "content": row["system"]}] if isinstance(row.get("system"), str) else []
    for i, turn in enumerate(turns):
        if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
            raise ValueError(f"{where}: message {i} needs a 'from' and a 'value' text")
        if not isinstance(turn.get("from"), str) or turn["from"] not in SHAREGPT_ROLES:
            raise ValueError(
                f"{where}: message {i} is from {turn.get('from')!r}; choose from {', '.join(SHAREGPT_ROLES)}"
            )
        messages.append({"role": SHAREGPT_ROLES[turn["from"]], "content": turn["value"]})
    return messages


def _pair(row: dict[str, Any], where: str) -> list[Any]:
    """Join a prompt and its completion, each a text or messages."""
    messages: list[Any] = []
    for name, role in (("prompt", "user"), ("completion", "assistant")):
        part = row[name]
        if not isinstance(part, (str, list)):
            raise ValueError(f"{where}: {name!r} must be a text or a list of messages, not {part!r}")
        messages += [{"role": role, "content": part}] if isinstance(part, str) else part
    return messages


def _message(message: Any, number: int, where: str) -> dict[str, Any]:
    """Check a message; its content becomes one text, or null beside tool calls."""
    if not isinstance(message, dict):
        raise ValueError(f"{where}: message {number} needs a 'role' and a 'content' text")
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, dict) else part
                raise ValueError(
                    f"{where}: message {number} has a content part {kind!r}; only parts of type 'text' are read"
                )
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise ValueError(f"{where}: message {number} needs a 'role' and a 'content' text, or 'tool_calls'")
    if message.get("role") not in ROLES:
        raise ValueError(f"{where}: message {number} has role {message.get('role')!r}; choose from {', '.join(ROLES)}")
    message = {**message, "content": content}
    if message.get("tool_calls"):
        if not isinstance(message["tool_calls"], list):
            raise ValueError(f"{where}: message {number} needs a list of 'tool_calls', not {message['tool_calls']!r}")
        message["tool_calls"] = [_tool_call(call, number, where) for call in message["tool_calls"]]
    return message


def _tool_call(call: Any, number: int, where: str) -> dict[str, Any]:
    """Check a tool call, whose arguments are an object or, as OpenAI sends them, its JSON text."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"{where}: message {number} has a tool call without a function's 'name': {call!r}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            json.loads(arguments or "{}")
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: message {number} calls {function['name']} with no JSON: {error}") from error
    return dict(call)


def _tools(tools: Any, where: str) -> list[Any]:
    """Parse the tools of a conversation, which some data sets hold as JSON text."""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: 'tools' is a text and no JSON: {error}") from error
    if not isinstance(tools, list):
        raise ValueError(f"{where}: 'tools' must be a list of tools, or its JSON text, not {tools!r}")
    return [json.loads(tool) if isinstance(tool, str) else tool for tool in tools]


def _hash(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
