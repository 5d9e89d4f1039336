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
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from accelerate import Accelerator
from datasets import Dataset
from datasets.arrow_writer import ArrowWriter
from helpers import split_examples
from messages import refused
from runs import files_of_at_most

from headstart.heads.checkpoints.files import json_ready
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
def files(tmp_path):
    """Two sources: three of 40 conversations have no answer, and two are longer than the rest."""
    paths = []
    for number, count in enumerate((15, 25)):
        rows = []
        for i in range(count):
            turns = [("user", f"{number} {i}"), ("assistant", "word " * (i % 7 + 1))] * (
                4 if i == 5 else 1
            )
            rows.append(
                [{"role": role, "content": text} for role, text in turns][
                    : 1 if i in (3, 20) else None
                ]
            )
        path = tmp_path / f"{number}.jsonl"
        path.write_text("\n".join(json.dumps({"messages": row}) for row in rows), encoding="utf-8")
        paths.append(str(path))
    return paths


@pytest.fixture
def config(run_options, changed, files, tmp_path):
    data = {"sources": files, "cache": str(tmp_path / "cache"), "max_length": 120}
    return changed(
        run_options(tmp_path / "run", 4), data=data, loop={"eval_every": 0, "save_every": 0}
    )


@pytest.fixture
def opened(config):
    """The config's cache, opened as a start does; `opened(num_proc=..., **Rendering's fields)`."""
    tokenizer = load_tokenizer(config.target)
    how = Rendering(tokenizer, frozenset({tokenizer.eos_token_id}), config.data.max_length, None)

    def open_(num_proc=None, **changes):
        sources = open_sources(config.data.sources, config.data.max_conversations)
        return cached_sequences(
            sources, dataclasses.replace(how, **changes), config.data.cache, num_proc
        )

    return open_


def folders(config):
    return sorted(path.parent for path in Path(config.data.cache).glob("*/manifest.json"))


@pytest.mark.parametrize("num_proc", [None, 3])
@pytest.mark.parametrize("limit", [None, 20])
def test_a_start_has_the_sequences_that_reading_everything_gives(
    config, opened, changed, num_proc, limit
):
    config = changed(config, data={"max_conversations": limit})
    target, tokenizer = (
        Target.from_pretrained(config.target, torch.float32),
        load_tokenizer(config.target),
    )
    parts = [read_conversations(source) for source in config.data.sources]
    rows = [row for part in parts for row in part][:limit]
    numbers = [number for number, part in enumerate(parts) for _ in part][:limit]
    expected = split_examples(rows, config, target, tokenizer)
    sources = open_sources(config.data.sources, limit)
    cache = cached_sequences(
        sources, rendering(config, target, tokenizer), config.data.cache, num_proc
    )
    training, held_out = split_cache(cache, config)
    assert (list(training), held_out) == expected
    assert len(expected[0]) + len(expected[1]) == (37 if limit is None else 18)
    # What is asked of all of them, without reading them.
    plain = expected[0]
    assert lengths_of(training) == lengths_of(plain)
    assert all((a == b).all() for a, b in zip(answers_of(training), answers_of(plain)))
    assert torch.equal(count_answer_tokens(training, 258), count_answer_tokens(plain, 258))
    assert cache.sources_N[training.chosen_N].tolist() == [
        numbers[example.conversation] for example in plain
    ]
    assert training[2:5] == plain[2:5] and training[-1] == plain[-1]


def test_what_was_tokenized_is_not_tokenized_again(config, opened, monkeypatch):
    first = opened()
    assert len(folders(config)) == 2
    monkeypatch.setattr(token_cache, "whole_sequences", lambda *_: pytest.fail("tokenized again"))
    again = opened()
    assert again.digest == first.digest and again.rows[:] == first.rows[:]
    assert {Path(file["filename"]).parent for file in again.rows.cache_files} == set(
        folders(config)
    )  # mapped from there


def test_another_source_leaves_what_is_made_of_the_others(config, opened, files, monkeypatch):
    opened()
    made, original = [], token_cache._make
    monkeypatch.setattr(
        token_cache, "_make", lambda *given: made.append(given[2].name) or original(*given)
    )
    text = Path(files[1]).read_text(encoding="utf-8")
    Path(files[1]).write_text(text + "\n" + text.splitlines()[0], encoding="utf-8")
    assert opened().conversations_N[-1] == 40
    assert made == [files[1]]


@pytest.mark.parametrize(
    "change",
    [
        lambda tokenizer: setattr(
            tokenizer, "chat_template", tokenizer.chat_template.replace("im_start", "im_begin")
        ),
        lambda tokenizer: setattr(tokenizer, "chat_template", tokenizer.chat_template + "\n"),
        lambda tokenizer: tokenizer.add_tokens(["word"]),
        lambda tokenizer: setattr(tokenizer, "bos_token", "a"),
    ],
    ids=["template", "a line feed", "vocabulary", "a special token"],
)
def test_another_tokenizer_or_template_has_a_cache_of_its_own(config, opened, change):
    opened()
    tokenizer = load_tokenizer(config.target)
    change(tokenizer)
    opened(tokenizer=tokenizer)
    assert len(folders(config)) == 4


@pytest.mark.parametrize(
    "change",
    [
        *({"max_length": 119}, {"thinking": True}, {"eos": frozenset({1})}),
        *({"template_kwargs": {"effort": "high"}}, {"vocab_size": 300}),
    ],
)
def test_other_options_have_a_cache_of_their_own(config, opened, change):
    opened()
    opened(**change)
    assert len(folders(config)) == 4


def test_the_same_tokenizer_from_another_place_or_after_use_has_the_same_cache(
    config, opened, tmp_path
):
    opened()
    shutil.copytree(config.target, tmp_path / "moved")
    tokenizer = load_tokenizer(tmp_path / "moved")
    # is kept in the backend
    tokenizer(["a", "longer text"], padding=True, truncation=True, max_length=3)
    opened(tokenizer=tokenizer)
    assert len(folders(config)) == 2


def test_a_folder_of_another_tokenizer_is_refused(config, opened):
    opened()
    path = folders(config)[0] / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["made_of"]["rendering"] = "f00"
    path.write_text(json.dumps(manifest))
    with refused(f"{path.parent} = 'f00'"):
        opened()


def test_a_disk_without_room_for_the_tokens_is_named(config, opened):
    with files_of_at_most(100), refused(config.data.cache, "large", error=OSError):
        opened()
    assert opened().rows[:]


def test_an_empty_source_is_refused(config, tmp_path, changed):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n\n")
    with refused(f"{empty} empty"):
        train(changed(config, data={"sources": [str(empty)]}))


def test_sources_without_answers_are_refused(config, tmp_path, changed):
    path = tmp_path / "unanswered.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]}))
    with refused("0 needs 2"):
        train(changed(config, data={"sources": [str(path)]}))


def test_a_tokenizing_process_that_dies_is_told_and_the_next_start_goes_on(
    config, opened, monkeypatch
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
    assert not folders(config)
    # What `datasets` may have been writing in the processes that were ended.
    for begun in filter(Path.is_dir, Path(config.data.cache).iterdir()):
        (begun / "tmp_0a1b2c3").write_bytes(b"half")
    gone_on = opened(2)
    for folder in folders(config):
        kept = json.loads((folder / "manifest.json").read_text())["files"]
        assert sorted(path.name for path in folder.iterdir()) == sorted(
            [*kept, "counts.npy", "manifest.json", "unused.jsonl"]
        )
    rows, digest = gone_on.rows[:], gone_on.digest
    shutil.rmtree(config.data.cache)
    assert opened().rows[:] == rows and opened().digest == digest


def _open_in_child(config, queue):
    made, original = [], token_cache._make
    token_cache._make = lambda *given: made.append(1) or original(*given)
    tokenizer = load_tokenizer(config.target)
    how = Rendering(tokenizer, frozenset({tokenizer.eos_token_id}), config.data.max_length, None)
    queue.put(
        (
            cached_sequences(open_sources(config.data.sources), how, config.data.cache).digest,
            len(made),
        )
    )


def test_of_several_processes_one_tokenizes_and_the_others_wait(config):
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    processes = [context.Process(target=_open_in_child, args=(config, queue)) for _ in range(3)]
    for process in processes:
        process.start()
    found = [queue.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
    assert len({digest for digest, _ in found}) == 1
    assert sum(made for _, made in found) == 2  # once for each source


def test_processes_with_other_caches_or_other_splits_are_told_apart(config, opened, changed):
    cache = opened()
    one, other = (split_cache(cache, changed(config, loop={"seed": seed}))[0] for seed in (0, 1))
    assert digest_of(one) == digest_of(split_cache(opened(), config)[0]) != digest_of(other)
    assert digest_of(split_cache(opened(max_length=60), config)[0]) != digest_of(one)
    check_same_everywhere(Accelerator(), one)


def test_a_limit_on_what_is_held_out_counts(config, opened, changed):
    cache = opened()
    for limit, expected in ((1000, 19), (3, 3), (None, 19)):  # half of 37, rounded
        data = {"held_out": 0.5, "held_out_limit": limit}
        training, held_out = split_cache(cache, changed(config, data=data))
        assert len({example.conversation for example in held_out}) == pytest.approx(expected, abs=1)
        assert len(training) + len(held_out) == 37


def test_a_run_that_began_before_there_was_a_limit_goes_on_without_one(config, changed):
    assert as_begun(config) == config
    checkpoint = Path(config.output) / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "progress.json").write_text("{}")
    options = dataclasses.asdict(config)
    for before, limit in (({"held_out_limit": 7}, 1000), ({}, None)):
        del options["data"]["held_out_limit"]
        options["data"] |= before
        (Path(config.output) / "config.yaml").write_text(yaml.safe_dump(json_ready(options)))
        assert as_begun(config).data.held_out_limit == limit
        options["data"]["held_out_limit"] = None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("manifest.json", text) for text in ("[]", "{}", '{"made_of": 3}')),
        ("unused.jsonl", "{}\n"),
        *(("counts.npy", text) for text in ("", "PK\3\4", "\x93NUMPY\1\0\3\0(((")),
    ],
)
def test_a_broken_file_of_a_folder_is_named(config, opened, name, text):
    opened()
    folder = folders(config)[0]
    (folder / name).write_bytes(text.encode("latin-1"))
    with refused(f"{folder}") as caught:
        opened()
    assert "\n" not in str(caught.value)


def without_number(name):
    """A change of a manifest: a key whose value is no number."""
    return lambda text: json.dumps({**json.loads(text), name: -math.inf}).encode()


@pytest.mark.parametrize(
    ("pattern", "change"),
    [
        *(("manifest.json", without_number(name)) for name in ("rows", "truncated", "files")),
        ("manifest.json", without_number("made_of")),
        ("*.arrow", lambda data: data.replace(b'"feature"', b'"featurx"')),  # its schema
        ("*.arrow", lambda data: data[:50]),
    ],
)
def test_a_changed_file_of_a_folder_is_named(config, opened, pattern, change):
    opened()
    folder = folders(config)[0]
    (path,) = folder.glob(pattern)
    path.write_bytes(change(path.read_bytes()))
    with refused(str(path if pattern == "*.arrow" else folder)):
        opened()


def rewritten(path, change):
    """Write changed columns to a file of sequences."""
    columns = Dataset.from_file(str(path)).to_dict()
    change(columns)
    rows = Dataset.from_dict(columns, FEATURES if set(columns) == set(FEATURES) else None)
    with ArrowWriter(path=str(path), features=rows.features) as writer:
        writer.write_table(rows.data.table)


@pytest.mark.parametrize("part", ["offset", "half", "column", "mask"])
@pytest.mark.parametrize("whole", [True, False])
def test_a_broken_file_of_sequences_is_named_and_ends_no_process(config, opened, part, whole):
    opened()
    folder = folders(config)[0]
    path = next(folder.glob("*.arrow"))
    if part == "offset":
        offsets = Dataset.from_file(str(path)).data.table.column("tokens").chunk(0).offsets
        begin = offsets.to_numpy()[:4].tobytes()
        path.write_bytes(path.read_bytes().replace(begin, begin[:12] + b"\xff\xff\xff\x7f"))
    elif part == "half":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
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
def test_a_named_pipe_in_a_folder_is_refused_and_not_waited_for(config, opened, name, whole):
    opened()
    folder = folders(config)[0]
    (folder / name).unlink()
    os.mkfifo(folder / name)
    if not whole:
        (folder / "manifest.json").unlink()
    with refused(f"{folder / name} pipe"):
        opened()


@pytest.mark.parametrize("token", [10**6, -3])
def test_tokens_that_a_cache_has_not_counted_are_refused(config, opened, token):
    def change(columns):
        columns["tokens"][0][-1] = token
        columns["loss_mask"][0][-1] = True

    opened()
    rewritten(next(folders(config)[0].glob("*.arrow")), change)
    cache = opened()
    others = [number for number, row in enumerate(cache.rows) if token not in row["tokens"]]
    with refused("remove"):
        count_answer_tokens(TokenizedSequences(cache, np.array(others)), 258)
