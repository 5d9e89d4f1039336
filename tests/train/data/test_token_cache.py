"""The cache of tokenized conversations: the same sequences, made once, never those of something
else."""

from __future__ import annotations

import dataclasses
import json
import math
import multiprocessing
import os
import shutil
import signal
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from datasets.arrow_writer import ArrowWriter
from helpers import calls_of, split_examples
from messages import refused
from runs import changed, files_of_at_most, save_options, write_rows

from headstart.inference import Target, load_tokenizer
from headstart.train.data import token_cache
from headstart.train.data.conversations import open_sources, read_conversations
from headstart.train.data.split import rendering, split_cache
from headstart.train.data.token_cache import (
    FEATURES,
    Rendering,
    TokenizedSequences,
    answers_of,
    cached_sequences,
    count_answer_tokens,
    digest_of,
    lengths_of,
)
from headstart.train.inputs import check_same_everywhere
from headstart.train.loop import train
from headstart.train.run_folder import as_begun


@pytest.fixture
def tokenized(short, tmp_path):
    """The options of a run on two sources: three of 40 conversations have no answer, and two are
    longer than the rest."""
    sources = []
    for number, count in enumerate((15, 25)):
        rows = []
        for i in range(count):
            asked = {"role": "user", "content": f"{number} {i}"}
            answer = {"role": "assistant", "content": "word " * (i % 7 + 1)}
            messages = [asked, answer] * (4 if i == 5 else 1)
            rows.append({"messages": messages[:1] if i in (3, 20) else messages})
        sources.append(write_rows(tmp_path / f"{number}.jsonl", rows))
    data = {"sources": sources, "cache": str(tmp_path / "cache"), "max_length": 120}
    return changed(short, data=data, loop={"max_steps": 4})


def cache_of(config, num_proc=None, **changes):
    """The config's cache, opened as a start does; `changes` are those of `Rendering`."""
    tokenizer = load_tokenizer(config.target)
    how = Rendering(tokenizer, frozenset({tokenizer.eos_token_id}), config.data.max_length, None)
    sources = open_sources(config.data.sources, config.data.max_conversations)
    how = dataclasses.replace(how, **changes)
    return cached_sequences(sources, how, config.data.cache, num_proc)


@pytest.fixture
def opened(tokenized):
    return partial(cache_of, tokenized)


def cache_folders(config):
    return sorted(path.parent for path in Path(config.data.cache).glob("*/manifest.json"))


@pytest.fixture
def folder(tokenized, opened):
    """The cache of the first source."""
    opened()
    return cache_folders(tokenized)[0]


@pytest.mark.parametrize("num_proc", [None, 3])
@pytest.mark.parametrize("limit", [None, 20])
def test_a_start_has_the_sequences_that_reading_everything_gives(tokenized, num_proc, limit):
    config = changed(tokenized, data={"max_conversations": limit})
    target = Target.from_pretrained(config.target, torch.float32)
    tokenizer = load_tokenizer(config.target)
    parts = [read_conversations(source) for source in config.data.sources]
    rows = [row for part in parts for row in part][:limit]
    numbers = [number for number, part in enumerate(parts) for _ in part][:limit]
    plain, plain_held_out = split_examples(rows, config, target, tokenizer)
    sources = open_sources(config.data.sources, limit)
    cache = cached_sequences(
        sources, rendering(config, target, tokenizer), config.data.cache, num_proc
    )
    training, held_out = split_cache(cache, config)
    assert (list(training), held_out) == (plain, plain_held_out)
    assert len(plain) + len(held_out) == (37 if limit is None else 18)
    # What is asked of all of them, without reading them.
    assert lengths_of(training) == lengths_of(plain)
    assert all((a == b).all() for a, b in zip(answers_of(training), answers_of(plain)))
    assert torch.equal(count_answer_tokens(training, 258), count_answer_tokens(plain, 258))
    expected = [numbers[example.conversation] for example in plain]
    assert cache.sources_N[training.chosen_N].tolist() == expected
    assert training[2:5] == plain[2:5] and training[-1] == plain[-1]


def test_what_was_tokenized_is_not_tokenized_again_beside_another_source(
    tokenized, opened, monkeypatch
):
    first = opened()
    made = calls_of(monkeypatch, token_cache, "whole_sequences")
    again = opened()
    assert again.digest == first.digest and again.rows[:] == first.rows[:]
    assert not made
    other = Path(tokenized.data.sources[1])
    text = other.read_text(encoding="utf-8")
    other.write_text(text + "\n" + text.splitlines()[0], encoding="utf-8")
    assert opened().conversations_N[-1] == 40
    assert len(made) == 26


def with_template(change):
    return lambda tokenizer: setattr(tokenizer, "chat_template", change(tokenizer.chat_template))


@pytest.mark.parametrize(
    "change",
    [
        with_template(lambda text: text.replace("im_start", "im_begin")),
        with_template(lambda text: text + "\n"),
        lambda tokenizer: tokenizer.add_tokens(["word"]),
        lambda tokenizer: setattr(tokenizer, "bos_token", "a"),
    ],
    ids=["template", "a line feed", "vocabulary", "a special token"],
)
def test_another_tokenizer_or_template_has_a_cache_of_its_own(tokenized, opened, change):
    opened()
    tokenizer = load_tokenizer(tokenized.target)
    change(tokenizer)
    opened(tokenizer=tokenizer)
    assert len(cache_folders(tokenized)) == 4


@pytest.mark.parametrize(
    "change",
    [
        {"max_length": 119},
        {"thinking": True},
        {"eos": frozenset({1})},
        {"template_kwargs": {"effort": "high"}},
        {"vocab_size": 300},
    ],
)
def test_other_options_have_a_cache_of_their_own(tokenized, opened, change):
    opened()
    opened(**change)
    assert len(cache_folders(tokenized)) == 4


def test_the_same_tokenizer_from_another_place_or_after_use_has_the_same_cache(
    tokenized, opened, tmp_path
):
    opened()
    tokenizer = load_tokenizer(shutil.copytree(tokenized.target, tmp_path / "moved"))
    # is kept in the backend
    tokenizer(["a", "longer text"], padding=True, truncation=True, max_length=3)
    opened(tokenizer=tokenizer)
    assert len(cache_folders(tokenized)) == 2


def test_a_disk_without_room_for_the_tokens_is_named(tokenized, opened):
    with files_of_at_most(100), refused(tokenized.data.cache, "large", error=OSError):
        opened()
    assert opened().rows[:]


def test_a_source_without_rows_or_answers_is_refused(tokenized, tmp_path):
    empty = write_rows(tmp_path / "empty.jsonl", ["", ""])
    with refused(f"{empty} empty"):
        train(changed(tokenized, data={"sources": [empty]}))
    question = {"messages": [{"role": "user", "content": "hi"}]}
    unanswered = write_rows(tmp_path / "unanswered.jsonl", [question])
    with refused("0 needs 2"):
        train(changed(tokenized, data={"sources": [unanswered]}))


def test_a_tokenizing_process_that_dies_is_told_and_the_next_start_goes_on(
    tokenized, opened, monkeypatch
):
    original, parent = token_cache.whole_sequences, os.getpid()

    def dies(conversation, *rest):
        if os.getpid() != parent and conversation["messages"][0]["content"] == "0 11":
            os.kill(os.getpid(), signal.SIGKILL)
        return original(conversation, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(token_cache, "whole_sequences", dies)
        with refused("3 0.jsonl data.num_proc", error=RuntimeError):
            opened(3)
    assert not cache_folders(tokenized)
    # What `datasets` may have been writing in the processes that were ended.
    for begun in filter(Path.is_dir, Path(tokenized.data.cache).iterdir()):
        (begun / "tmp_0a1b2c3").write_bytes(b"half")
    gone_on = opened(2)
    for folder in cache_folders(tokenized):
        kept = json.loads((folder / "manifest.json").read_text())["files"]
        expected = {*kept, "counts.npy", "manifest.json", "unused.jsonl"}
        assert {path.name for path in folder.iterdir()} == expected
    rows, digest = gone_on.rows[:], gone_on.digest
    shutil.rmtree(tokenized.data.cache)
    anew = opened()
    assert anew.rows[:] == rows and anew.digest == digest


def open_in_child(config, queue):
    with pytest.MonkeyPatch.context() as patch:
        made = calls_of(patch, token_cache, "whole_sequences")
        queue.put((cache_of(config).digest, len(made)))


def test_of_several_processes_one_tokenizes_and_the_others_wait(tokenized):
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    processes = [context.Process(target=open_in_child, args=(tokenized, queue)) for _ in range(3)]
    for process in processes:
        process.start()
    found = [queue.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
    assert len({digest for digest, _ in found}) == 1
    assert sum(made for _, made in found) == 40  # each conversation once


def test_processes_with_other_caches_or_other_splits_are_told_apart(tokenized, opened):
    cache = opened()
    one, other = (split_cache(cache, changed(tokenized, loop={"seed": seed}))[0] for seed in (0, 1))
    again, shorter = (split_cache(opened(max_length=length), tokenized)[0] for length in (120, 60))
    assert digest_of(one) == digest_of(again)
    assert len({digest_of(one), digest_of(other), digest_of(shorter)}) == 3
    check_same_everywhere(Accelerator(), one)


@pytest.mark.parametrize(("limit", "expected"), [(1000, 19), (3, 3), (None, 19)])
def test_a_limit_on_what_is_held_out_counts(tokenized, opened, limit, expected):
    data = {"held_out": 0.5, "held_out_limit": limit}  # half of 37, rounded
    training, held_out = split_cache(opened(), changed(tokenized, data=data))
    assert len({example.conversation for example in held_out}) == pytest.approx(expected, abs=1)
    assert len(training) + len(held_out) == 37


@pytest.mark.parametrize(("before", "limit"), [({"held_out_limit": 7}, 1000), ({}, None)])
def test_a_run_that_began_before_there_was_a_limit_goes_on_without_one(tokenized, before, limit):
    assert as_begun(tokenized) == tokenized
    checkpoint = Path(tokenized.output) / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "progress.json").write_text("{}")
    options = dataclasses.asdict(tokenized)
    del options["data"]["held_out_limit"]
    options["data"] |= before
    save_options(tokenized.output, options)
    assert as_begun(tokenized).data.held_out_limit == limit


def without_number(name):
    """A change of a manifest: a key whose value is no number."""
    return lambda data: json.dumps({**json.loads(data), name: -math.inf}).encode()


def of_another_tokenizer(data):
    manifest = json.loads(data)
    manifest["made_of"]["rendering"] = "f00"
    return json.dumps(manifest).encode()


def nothing_but(data):
    """A change that leaves nothing of what was there."""
    return lambda _: data


def cut_at(place):
    return lambda data: data[:place]


@pytest.mark.parametrize(
    ("pattern", "change"),
    [
        *(("manifest.json", nothing_but(text)) for text in (b"[]", b"{}", b'{"made_of": 3}')),
        ("manifest.json", of_another_tokenizer),
        *(
            ("manifest.json", without_number(name))
            for name in ("rows", "truncated", "files", "made_of")
        ),
        ("unused.jsonl", nothing_but(b"{}\n")),
        *(("counts.npy", nothing_but(text)) for text in (b"", b"PK\3\4", b"\x93NUMPY\1\0\3\0(((")),
        ("*.arrow", lambda data: data.replace(b'"feature"', b'"featurx"')),  # its schema
        ("*.arrow", cut_at(50)),
    ],
)
def test_a_broken_file_of_a_folder_is_named(opened, folder, pattern, change):
    (path,) = folder.glob(pattern)
    path.write_bytes(change(path.read_bytes()))
    with refused(str(path if pattern == "*.arrow" else folder)) as caught:
        opened()
    assert "\n" not in str(caught.value)


def rewritten(path, change):
    """Write changed columns to a file of sequences."""
    columns = Dataset.from_file(str(path)).to_dict()
    change(columns)
    rows = Dataset.from_dict(columns, FEATURES if set(columns) == set(FEATURES) else None)
    with ArrowWriter(path=str(path), features=rows.features) as writer:
        writer.write_table(rows.data.table)


@pytest.mark.parametrize("part", ["offset", "half", "column", "mask"])
@pytest.mark.parametrize("whole", [True, False])
def test_a_broken_file_of_sequences_is_named_and_ends_no_process(opened, folder, part, whole):
    path = next(folder.glob("*.arrow"))
    data = path.read_bytes()
    if part == "offset":
        offsets = Dataset.from_file(str(path)).data.table.column("tokens").chunk(0).offsets
        begin = offsets.to_numpy()[:4].tobytes()
        path.write_bytes(data.replace(begin, begin[:12] + b"\xff\xff\xff\x7f"))
    elif part == "half":
        path.write_bytes(data[: len(data) // 2])
    elif part == "column":
        rewritten(path, lambda columns: columns.pop("opens"))
    else:
        rewritten(path, lambda columns: columns["loss_mask"][0].pop())
    if not whole:  # as a start that was killed leaves it
        (folder / "manifest.json").unlink()
    with refused(f"{path} {folder}"):
        opened()


@pytest.mark.parametrize("name", ["counts.npy", "unused.jsonl"])
@pytest.mark.parametrize("whole", [True, False])
def test_a_named_pipe_in_a_folder_is_refused_and_not_waited_for(opened, folder, name, whole):
    (folder / name).unlink()
    os.mkfifo(folder / name)
    if not whole:
        (folder / "manifest.json").unlink()
    with refused(f"{folder / name} pipe"):
        opened()


@pytest.mark.parametrize("token", [10**6, -3])
def test_tokens_that_a_cache_has_not_counted_are_refused(opened, folder, token):
    def change(columns):
        columns["tokens"][0][-1] = token
        columns["loss_mask"][0][-1] = True

    rewritten(next(folder.glob("*.arrow")), change)
    cache = opened()
    others = [number for number, row in enumerate(cache.rows) if token not in row["tokens"]]
    with refused("remove"):
        count_answer_tokens(TokenizedSequences(cache, np.array(others)), 258)
