"""Token cache: training sequences, tokenized once, in Arrow files that every process memory-maps.

A folder of the cache, named by a fingerprint, holds one source under one tokenizer, chat template
and options:

    sequences*.arrow  tokens and loss mask of each sequence, and statistics, as `datasets` writes it
    counts.npy        how often each token is an answer token
    unused.jsonl      the rows of the source that gave no sequence, and why
    manifest.json     the fingerprinted values, the files, and a digest of all sequences;
                      written last

The first process makes the folder under a lock, with `data.num_proc` processes; others wait for the
lock and map the files. One that was killed leaves no manifest, and the next one continues with the
files that are whole.

`Dataset.map` tokenizes, but names of folders are not its fingerprints: tried, these give the same
tokenizer in two folders two names, and miss a change of the function that tokenizes. A cache named
by them would still need the lock, the counts, the digest and the unused rows: it saves 40 lines.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import operator
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from datasets import Dataset, Features, List, Value, concatenate_datasets
from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ...console import console
from ...files import (
    BROKEN,
    cache_folder,
    naming,
    one_line,
    read_json,
    read_json_lines,
    reading_back,
    refuse_pipes,
    require_regular,
    write_whole,
)
from ...inference.targets.loading import tokenizer_provenance
from ...inference.text.messages import format_of
from ...inference.tuning.machine import usable_cores
from ...options import check_options, template_variables
from .chat_template import Example, cut_to, whole_sequences
from .conversations import FORMATS, RowReader, Source, check_row

FINGERPRINT = re.compile("[0-9a-f]{16}")
"""Form of a tokenizer's fingerprint in the column `tokenizer`."""
RECIPE = 3
"""Version of the tokenization: increased when the same conversations become other sequences."""
ROWS_PER_PROCESS = 2000
"""Conversations that are worth another process."""
BATCH = 256
"""Conversations that are tokenized and written together."""
FEATURES = Features(
    {
        "tokens": List(Value("int32")),
        "loss_mask": List(Value("bool")),
        "row": Value("int64"),
        "answers": Value("int32"),
        "opens": Value("bool"),
        "truncated": Value("bool"),
    }
)
"""`row` is the row of the source; `answers` counts answer tokens; `opens` is true if the first
token is one; `truncated` if the sequence was longer."""
Why = Literal["rejected", "too long", "unanswered"]
"""Why a row gave no sequence: it cannot be used; its answers begin after the longest sequence; it
has none."""


@dataclass(frozen=True)
class Rendering:
    """How conversations become sequences: the arguments of `chat_template.encode`.

    The target's vocabulary size is added to them.
    """

    tokenizer: PreTrainedTokenizerBase
    eos: frozenset[int]
    max_length: int
    thinking: bool | None
    template_kwargs: dict[str, Any] | None = None
    vocab_size: int | None = None
    """Rows of the target's embedding, beyond which no token may lie; None for no limit."""

    def whole(self, conversation: dict[str, Any], where: str, number: int) -> list[Example]:
        """Tokenize row `number`, however long it is; errors name its place, `where`.

        A conversation of several rows of tokens (`sequence` 1, 2, ...) has the number of its first
        row.
        """
        try:
            if conversation.get("input_ids") is not None:
                self._check_tokenizer(conversation.get("tokenizer"))
                # Rows 7, 8, 9 with `sequence` 1, 2, 3 are one conversation: row 9 has 2 before it.
                sequence = conversation.get("sequence")
                if type(sequence) is int and 1 <= sequence <= number + 1:
                    number -= sequence - 1
            examples = whole_sequences(
                conversation, self.tokenizer, self.eos, self.thinking, self.template_kwargs
            )
            for example in examples:
                self._check_tokens(example.tokens)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        return [dataclasses.replace(example, conversation=number) for example in examples]

    def _check_tokenizer(self, named: Any) -> None:
        """Refuse token ids of another tokenizer, where the row names its fingerprint."""
        if not isinstance(named, str) or not FINGERPRINT.fullmatch(named):
            return
        ours = tokenizer_provenance(self.tokenizer)["tokenizer"]
        if named != ours:
            raise ValueError(
                f"its token ids are those of a tokenizer with the fingerprint {named}, and the"
                f" target's has {ours}; train a head of the model that wrote them, or make answers"
                " of this target (headstart data)"
            )

    def _check_tokens(self, tokens: list[int]) -> None:
        """Refuse tokens for which the target's embedding has no row."""
        if self.vocab_size is None or not tokens or max(tokens) < self.vocab_size:
            return
        beyond = next(token for token in tokens if token >= self.vocab_size)
        # A tokenizer may have more tokens than the model, as after `add_tokens`.
        shown = None
        if beyond < len(self.tokenizer):
            shown = self.tokenizer.convert_ids_to_tokens(beyond)
        raise ValueError(
            f"token {beyond}{'' if shown is None else f' ({shown!r})'} is beyond the model's"
            f" {self.vocab_size} tokens; its embedding has no row for it"
        )

    def encode(self, conversation: dict[str, Any], where: str, number: int) -> list[Example]:
        """Tokenize conversation `number` into sequences of at most `max_length` tokens."""
        return cut_to(self.whole(conversation, where, number), self.max_length)

    def fingerprint(self) -> str:
        """Hash the content of the tokenizer, its chat template and the options."""
        if self.tokenizer.is_fast:
            backend = json.loads(self.tokenizer.backend_tokenizer.to_str())
            for name in ("truncation", "padding"):  # state of the last call
                backend.pop(name, None)
        else:
            backend = [type(self.tokenizer).__name__, sorted(self.tokenizer.get_vocab().items())]
        special = {name: str(token) for name, token in self.tokenizer.special_tokens_map.items()}
        # All that decides which tokens a conversation becomes, and nothing else: a folder of the
        # cache is found by this hash.
        variables = template_variables(self.thinking, self.template_kwargs)
        parts = [
            backend,
            special,
            self.tokenizer.chat_template,
            sorted(self.eos),
            self.max_length,
            variables,
            self.vocab_size,
        ]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


class TokenizedSequences(Sequence[Example]):
    """Some sequences of a cache, read from its files on access.

    Their lengths and conversations are in memory.
    """

    def __init__(self, cache: TokenCache, chosen_N: NDArray[np.int64]) -> None:
        self.cache = cache
        self.chosen_N = chosen_N  # indices of these sequences in the cache
        self.lengths: list[int] = cache.lengths_N[chosen_N].tolist()
        self.conversations: list[int] = cache.conversations_N[chosen_N].tolist()

    def __len__(self) -> int:
        return len(self.chosen_N)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        number = int(self.chosen_N[index])
        row = self.cache.rows[number]
        return Example(row["tokens"], row["loss_mask"], self.conversations[index])

    def tokens_of(self, index: int) -> NDArray[np.int32]:
        """The tokens of a sequence, without a Python object for each."""
        tokens: NDArray[np.int32] = self._column[int(self.chosen_N[index])].values.to_numpy()
        return tokens

    @cached_property
    def _column(self) -> pa.ChunkedArray:
        """The tokens of all sequences of the cache, mapped from its files."""
        return self.cache.rows.data.table.column("tokens")


@dataclass(frozen=True)
class UnusedRow:
    """A row of a source that gave no sequence."""

    row: int
    """Its number in the source."""
    where: str
    """Its place, for messages."""
    source: str
    why: Why
    reason: str


@dataclass(frozen=True)
class TokenCache:
    """The sequences of all sources, mapped into memory."""

    rows: Dataset
    lengths_N: NDArray[np.int64]
    conversations_N: NDArray[np.int64]
    """Index of each sequence's conversation, over all sources."""
    answers_N: NDArray[np.int64]
    """Answer tokens of each sequence."""
    opens_N: NDArray[np.int64]
    """1 where the first token is an answer token."""
    counts_V: NDArray[np.int64]
    """How often each token is an answer token."""
    digest: str
    """Hash of all tokens and masks in their order."""
    sources_N: NDArray[np.int64]
    """Index of the name, or pattern, by which each sequence's source was opened."""
    read: int
    """Rows of all sources."""
    truncated: int
    """Conversations of which a sequence was truncated."""
    unused: list[UnusedRow]
    """Rows without a sequence."""


def lengths_of(examples: Sequence[Example]) -> list[int]:
    """Tokens of each sequence; a cache's sequences are not read."""
    if isinstance(examples, TokenizedSequences):
        return examples.lengths
    return [len(example.tokens) for example in examples]


def answers_of(examples: Sequence[Example]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Count each sequence's answer tokens; also return 1 where its first token is one.

    A cache's sequences are not read.
    """
    if isinstance(examples, TokenizedSequences):
        return (
            examples.cache.answers_N[examples.chosen_N],
            examples.cache.opens_N[examples.chosen_N],
        )
    masks = [example.loss_mask for example in examples]
    answers_N = np.array([sum(mask) for mask in masks], np.int64)
    opens_N = np.array([mask[0] for mask in masks], np.int64)
    return answers_N, opens_N


def tokens_of(examples: Sequence[Example], index: int) -> NDArray[np.int32]:
    """The tokens of one of many sequences."""
    if isinstance(examples, TokenizedSequences):
        return examples.tokens_of(index)
    return np.asarray(examples[index].tokens, dtype=np.int32)


def conversations_of(examples: Sequence[Example]) -> NDArray[np.int64]:
    """The conversation of each sequence; a cache's sequences are not read."""
    if isinstance(examples, TokenizedSequences):
        return examples.cache.conversations_N[examples.chosen_N]
    return np.array([example.conversation for example in examples], np.int64)


def digest_of(examples: Sequence[Example]) -> bytes:
    """Hash tokens, masks and order of sequences: seven bytes."""
    digest = hashlib.blake2b(digest_size=7)  # fits in an int64, so that processes can exchange it
    if isinstance(examples, TokenizedSequences):
        digest.update(examples.cache.digest.encode() + examples.chosen_N.tobytes())
        return digest.digest()
    for example in examples:
        digest.update(torch.tensor([*example.tokens, -1, *example.loss_mask]).numpy().tobytes())
    return digest.digest()


def count_answer_tokens(examples: Iterable[Example], vocab_size: int) -> Tensor:
    """Count how often each token is an answer token: counts_V.

    For most of a cache, these are its counts less those of the sequences left out.
    """
    if isinstance(examples, TokenizedSequences):
        # Read whichever is less: these sequences, or those that are left out of the cache's counts.
        cache = examples.cache
        left_out_N = np.setdiff1d(np.arange(len(cache.lengths_N)), examples.chosen_N)
        if len(left_out_N) <= len(examples):
            counts_V = torch.zeros(max(vocab_size, len(cache.counts_V)), dtype=torch.int64)
            counts_V[: len(cache.counts_V)] = torch.from_numpy(cache.counts_V)
            # An iterator: it has no chosen_N, and so is counted below.
            left_out = iter(TokenizedSequences(cache, left_out_N))
            left_out_V = count_answer_tokens(left_out, len(counts_V))
            if len(left_out_V) > len(counts_V):
                folder = Path(cache.rows.cache_files[0]["filename"]).parent
                raise ValueError(f"{folder} holds tokens that it has not counted; remove it")
            return counts_V - left_out_V
    tokens = [
        token
        for example in examples
        for token, is_answer in zip(example.tokens, example.loss_mask, strict=True)
        if is_answer
    ]
    if min(tokens, default=0) < 0:
        raise ValueError(f"a sequence holds token {min(tokens)}; remove the cache (data.cache)")
    return torch.bincount(torch.tensor(tokens, dtype=torch.int64), minlength=vocab_size)


def cached_sequences(
    sources: list[Source],
    rendering: Rendering,
    folder: str | None = None,
    num_proc: int | None = None,
) -> TokenCache:
    """Map the sequences of these sources into memory, tokenizing those not yet in the cache.

    Without a folder, the cache is `data` in the project's cache folder. Without `num_proc`, a
    process tokenizes for every `ROWS_PER_PROCESS` conversations, up to the cores.
    """
    how = rendering.fingerprint()
    root = Path(folder) if folder else cache_folder() / "data"
    root.mkdir(parents=True, exist_ok=True)
    parts: list[Dataset] = []
    counts = []
    digests = []
    conversations = []
    entries = []
    read = 0
    truncated = 0
    unused: list[UnusedRow] = []
    for source in sources:
        # 1. Make the folder, if it is not there. The manifest, written last, says that it is whole.
        made_of = {
            "recipe": RECIPE,
            "rendering": how,
            "source": source.identity,
            "limit": source.limit,
        }
        entry = root / key_of(made_of)
        if not (entry / "manifest.json").is_file():
            with WeakFileLock(f"{entry}.lock"):
                # Another process may have made it while this one waited for the lock.
                if not (entry / "manifest.json").is_file():
                    _make(entry, made_of, source, rendering, num_proc)

        # 2. Check it against what was asked for: names of folders are cut hashes.
        with reading_back(entry, "remove it, and it is made anew"):
            manifest = read_json(entry / "manifest.json")
            before = dict(manifest["made_of"])
            files = [entry / Path(name).name for name in manifest["files"]]
            source_rows = operator.index(manifest["rows"])
            truncated += operator.index(manifest["truncated"])
            digests.append(bytes.fromhex(manifest["digest"]).hex())
            of_tokens = np.lib.format.open_memmap(require_regular(entry / "counts.npy"), mode="r")
            counts.append(of_tokens.astype(np.int64, casting="safe"))
            if counts[-1].ndim != 1 or not files:
                raise ValueError("it has no counts of tokens, or no files")
            unused += _unused_rows(entry / "unused.jsonl")
        advice = "another tokenizer, chat template, option or data: remove it"
        check_options(f"{entry} holds sequences with", before, made_of, advice)

        # 3. Map it. Rows count from 0 in each source, conversations over all sources.
        dataset = concatenate_datasets([_mapped(path) for path in files])
        conversations.append(dataset.data.table.column("row").to_numpy() + read)
        entries.append(np.full(len(dataset), source.entry))
        parts.append(dataset)
        read += source_rows

    # 4. Join the sources. Counts are as long as a source's largest token: pad them to the longest.
    rows = concatenate_datasets(parts)
    table = rows.data.table
    counts_V = np.zeros(max(map(len, counts)), dtype=np.int64)
    for source_counts_V in counts:
        counts_V[: len(source_counts_V)] += source_counts_V
    return TokenCache(
        rows,
        pc.list_value_length(table.column("tokens")).to_numpy().astype(np.int64),
        np.concatenate(conversations),
        table.column("answers").to_numpy().astype(np.int64),
        table.column("opens").to_numpy().astype(np.int64),
        counts_V,
        hashlib.sha256("".join(digests).encode()).hexdigest(),
        np.concatenate(entries),
        read,
        truncated,
        unused,
    )


def key_of(made_of: dict[str, Any]) -> str:
    """Name of the folder for these values."""
    return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:24]


def _make(
    folder: Path,
    made_of: dict[str, Any],
    source: Source,
    rendering: Rendering,
    num_proc: int | None,
) -> None:
    """Tokenize a source and write the folder, the manifest last."""
    processes = num_proc or max(1, min(usable_cores(), len(source.rows) // ROWS_PER_PROCESS))
    if len(source.rows) >= ROWS_PER_PROCESS:
        console.print(
            f"tokenizing {len(source.rows):,} conversations of {source.name} on {processes}"
            " processes"
        )
    folder.mkdir(exist_ok=True)
    refuse_pipes(folder)

    # 1. Tokenize, in several processes. `datasets` writes a file for each and skips those that an
    # earlier start has completed: it finds them by name and fingerprint.
    for path in folder.glob("sequences*.arrow"):
        _mapped(path)
    arguments = {
        "reader": source.reader,
        "expected": first_format(source),
        "rendering": rendering,
        "folder": folder,
    }
    try:
        with naming(folder):
            rows = source.rows.map(
                _encoded_rows,
                batched=True,
                batch_size=BATCH,
                writer_batch_size=BATCH,
                with_indices=True,
                remove_columns=source.rows.column_names,
                features=FEATURES,
                fn_kwargs=arguments,
                num_proc=processes if processes > 1 else None,
                cache_file_name=str(folder / "sequences.arrow"),
                new_fingerprint=folder.name,
                desc="tokenizing",
            )
    except RuntimeError as error:
        if "abruptly died" not in str(error):
            raise
        raise RuntimeError(
            f"one of the {processes} processes tokenizing {source.name} died, perhaps out of"
            " memory; lower data.num_proc; the same command keeps the finished parts"
        ) from error
    files = [Path(file["filename"]).name for file in rows.cache_files]
    # Files of a start with another number of processes, and those that `datasets` was writing when
    # a process was killed.
    arrows = {*folder.glob("*.arrow"), *folder.glob("tmp????????")}
    for left in arrows - {folder / name for name in files}:
        left.unlink()

    # 2. Join the batches' lists of unused rows. A start that was killed may have left lists of
    # other batches, with the same rows for the same reasons: each row counts once.
    unused: dict[int, UnusedRow] = {}
    for path in sorted(folder.glob("unused-*.jsonl")):
        for row in _unused_rows(path):
            unused[row.row] = row
    lines = [json.dumps(dataclasses.asdict(unused[number])) + "\n" for number in sorted(unused)]
    write_whole(folder / "unused.jsonl", "".join(lines))
    for path in folder.glob("unused-*.jsonl"):
        path.unlink()

    # 3. Read the files once, for the digest and the counts. Each column has a digest of its own,
    # so that the result does not depend on where batches end.
    truncated: set[int] = set()
    counts_V = np.zeros(0, dtype=np.int64)
    digests = [hashlib.blake2b(digest_size=16) for _ in range(4)]
    for batch in itertools.chain.from_iterable(
        _mapped(folder / file).data.table.to_batches() for file in files
    ):
        tokens = batch.column("tokens")
        flat_tokens = tokens.flatten().to_numpy()
        flat_mask = batch.column("loss_mask").flatten().to_numpy(zero_copy_only=False)
        columns = (
            flat_tokens,
            flat_mask,
            pc.list_value_length(tokens).to_numpy(),
            batch.column("row").to_numpy(),
        )
        for digest, column in zip(digests, columns, strict=True):
            digest.update(np.ascontiguousarray(column).data)
        # A conversation of several sequences counts once.
        cut = batch.column("truncated").to_numpy(zero_copy_only=False)
        truncated.update(batch.column("row").to_numpy()[cut].tolist())
        # bincount is as long as the largest token so far.
        batch_counts_V = np.bincount(flat_tokens[flat_mask], minlength=len(counts_V))
        batch_counts_V[: len(counts_V)] += counts_V
        counts_V = batch_counts_V

    # 4. The manifest comes last: with it the folder is whole.
    np.save(folder / "counts.npy", counts_V)
    manifest = {
        "made_of": made_of,
        "rows": len(source.rows),
        "files": files,
        "truncated": len(truncated),
    }
    manifest["digest"] = "".join(digest.hexdigest() for digest in digests)
    write_whole(folder / "manifest.json", json.dumps(manifest, indent=1))


def first_format(source: Source) -> str | None:
    """The format of the first row that has one, and so of all others; None if none has."""
    for where, row in source.read_all():
        with suppress(ValueError):
            return format_of(row, where, FORMATS)
    return None


def _unused_rows(path: Path) -> list[UnusedRow]:
    return [UnusedRow(**row) for row in read_json_lines(path)]


def _encoded_rows(
    batch: dict[str, list[Any]],
    numbers: list[int],
    reader: RowReader,
    expected: str | None,
    rendering: Rendering,
    folder: Path,
) -> pa.Table:
    """Encode some rows of a source; write those that give no sequence to a file of their own."""
    examples: list[Example] = []
    cut: list[bool] = []
    unused: list[UnusedRow] = []

    # 1. Tokenize row by row. Of each row keep the sequences that hold an answer token once cut.
    for number, (where, row) in zip(numbers, reader.values(batch, numbers), strict=True):
        try:
            # The reader yields its errors, so that one bad row does not end the batch.
            if isinstance(row, ValueError):
                raise row
            whole = rendering.whole(check_row(row, where, expected), where, number)
        except ValueError as error:
            reason = str(error).removeprefix(f"{where}: ")
            unused.append(UnusedRow(number, where, reader.name, "rejected", reason))
            continue
        answered = [example for example in whole if any(example.loss_mask[: rendering.max_length])]
        examples += [example.truncated(rendering.max_length) for example in answered]
        cut += [len(example.tokens) > rendering.max_length for example in answered]
        if not whole:
            unused.append(
                UnusedRow(number, where, reader.name, "unanswered", "no answer to train on")
            )
        elif not answered:
            reason = f"its answers begin after {rendering.max_length} tokens"
            unused.append(UnusedRow(number, where, reader.name, "too long", reason))
    if unused:
        lines = [json.dumps(dataclasses.asdict(row)) + "\n" for row in unused]
        write_whole(folder / f"unused-{numbers[0]:012d}.jsonl", "".join(lines))

    # 2. Build Arrow's lists from flat arrays: sequences of 3 and 2 tokens have the offsets 0 3 5.
    offsets = np.cumsum([0, *(len(example.tokens) for example in examples)], dtype=np.int32)
    size = offsets[-1]
    flat_tokens = (token for example in examples for token in example.tokens)
    flat_mask = (is_answer for example in examples for is_answer in example.loss_mask)
    tokens = np.fromiter(flat_tokens, dtype=np.int32, count=size)
    masks = np.fromiter(flat_mask, dtype=bool, count=size)
    columns = {
        "tokens": pa.ListArray.from_arrays(pa.array(offsets), pa.array(tokens)),
        "loss_mask": pa.ListArray.from_arrays(pa.array(offsets), pa.array(masks)),
        "row": pa.array([example.conversation for example in examples], pa.int64()),
        "answers": pa.array([sum(example.loss_mask) for example in examples], pa.int32()),
        "opens": pa.array([example.loss_mask[0] for example in examples], pa.bool_()),
        "truncated": pa.array(cut, pa.bool_()),
    }
    return pa.table(columns).cast(FEATURES.arrow_schema)


def _mapped(path: Path) -> Dataset:
    try:
        mapped = Dataset.from_file(str(require_regular(path)))
        # Arrow trusts the offsets in a file: a wrong one would end this process.
        mapped.data.table.validate(full=True)
        if mapped.features != FEATURES:
            raise ValueError(f"its columns are {list(mapped.features)}, not {list(FEATURES)}")
        lengths = [
            pc.list_value_length(mapped.data.table.column(name)) for name in ("tokens", "loss_mask")
        ]
        if not lengths[0].equals(lengths[1]):
            raise ValueError("a sequence has more tokens than marks, or fewer")
        return mapped
    except (OSError, pa.ArrowException, *BROKEN) as error:
        raise ValueError(
            f"{one_line(path)} cannot be read ({one_line(error)}); remove {path.parent}, and it is"
            " made anew"
        ) from error
