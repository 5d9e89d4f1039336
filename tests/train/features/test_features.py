"""The target's states, from a cache: the same training, less work, nothing of another model."""

from __future__ import annotations

import dataclasses
import os
import shutil

import pytest
import torch
from accelerate import Accelerator
from messages import refused
from runs import last_weights, same_tensors
from safetensors.torch import load_file, save_file

from headstart.heads import MedusaConfig, MedusaHead
from headstart.inference import Target, feature_cache
from headstart.inference.feature_cache import (
    FORMATS,
    FeatureCache,
    decoded,
    encoded,
    key_of,
)
from headstart.train.config import FeaturesConfig
from headstart.train.data.batches import collate, collate_rows
from headstart.train.data.chat_template import Example
from headstart.train.features.online import CachedFeatures, cache_bytes, online_features
from headstart.train.loop import train

MANIFEST = {"target": "tiny", "layers": [0, -1], "format": "float32"}


@pytest.fixture
def target(tiny_target):
    return tiny_target(vocab_size=24)


@pytest.fixture
def head(target):
    head = MedusaHead(MedusaConfig(num_heads=2), target.info)
    head.feature_layers = (0, -1)
    head.initialize(target.modules, torch.ones(24, dtype=torch.int64))
    return head.double()


@pytest.fixture
def examples():
    """Random tokens, in seven lengths."""
    random = torch.Generator().manual_seed(2)
    found = []
    for i in range(7):
        tokens = torch.randint(24, (8 + 3 * (i % 4) + i,), generator=random).tolist()
        found.append(
            Example(tokens, [3 <= t < 6 or len(tokens) - 4 <= t for t in range(len(tokens))])
        )
    return found


@pytest.fixture
def reads(target, monkeypatch):
    """The token rows that the target was asked to read."""
    rows = []
    original = target.read
    monkeypatch.setattr(
        target, "read", lambda tokens, *rest: rows.append(tokens) or original(tokens, *rest)
    )
    return rows


@pytest.fixture
def cached(target, head, tmp_path):
    """Opens the cache anew, as another process would: `cached(format="float32",
    shard_bytes=...)`."""

    def opened(shard_bytes=2**28, **manifest):
        return CachedFeatures(
            target, head, FeatureCache(tmp_path / "cache", MANIFEST | manifest, shard_bytes)
        )

    return opened


def close(found, fresh, batch, **tolerance):
    assert found.modules is fresh.modules
    assert torch.equal(found.tokens_BT, fresh.tokens_BT) and torch.equal(
        found.loss_mask_BT, fresh.loss_mask_BT
    )
    for row, place in batch.places():
        for name in ("features_BTF", "last_BTD"):
            torch.testing.assert_close(
                getattr(found, name)[row, place], getattr(fresh, name)[row, place], **tolerance
            )


@pytest.mark.parametrize("packed", [False, True])
def test_cached_features_are_those_of_the_batch(target, head, cached, examples, packed):
    batch = collate_rows([examples[:3], examples[3:]]) if packed else collate(examples)
    fresh = online_features(target, head, batch, torch.float64)
    assert fresh.features_BTF.shape[-1] == 2 * 32
    source = cached()
    for _ in range(2):  # computed, then kept
        found = source(batch, torch.float64)
        close(found, fresh, batch, atol=1e-5, rtol=0)
        torch.testing.assert_close(head(found).loss, head(fresh).loss, rtol=1e-5, atol=0)
    source.flush(Accelerator())
    close(cached()(batch, torch.float64), found, batch, atol=0, rtol=0)


def test_a_folder_with_more_layers_serves_as_well(target, head, cached, examples, reads):
    batch = collate(examples)
    head.feature_layers = (1, 0)
    cached(layers=[1, 0, -1]).write(Accelerator(), examples)
    head.feature_layers, before = (0, -1), len(reads)
    found = cached()(batch, torch.float64)
    assert len(reads) == before
    close(found, online_features(target, head, batch, torch.float64), batch, atol=1e-5, rtol=0)


def test_a_sequence_is_read_once_whatever_batch_or_row_it_stands_in(
    target, head, cached, examples, reads
):
    source = cached(shard_bytes=1)  # a shard for every sequence
    first = source(collate(examples))
    again = source(collate_rows([examples[5:2:-1], examples[:1]]))
    assert [len(rows) for rows in reads] == [len(examples)]
    start = len(examples[5].tokens)
    assert torch.equal(again.last_BTD[0, :start], first.last_BTD[5, :start])
    assert torch.equal(again.features_BTF[0, start : start + 5], first.features_BTF[4, :5])
    longer = Example([*examples[0].tokens, 1], [*examples[0].loss_mask, False])
    source(collate([longer]))
    assert len(reads) == 2


def test_what_a_folder_holds_is_not_read_again_for_what_it_lacks(cached, examples, reads):
    cached().write(Accelerator(), examples[1:])
    cached().write(Accelerator(), examples)
    cached().write(Accelerator(), examples)
    assert [len(rows) for rows in reads] == [len(examples) - 1, 1]
    assert torch.equal(reads[1][0], torch.tensor(examples[0].tokens))


@pytest.mark.parametrize(
    ("word", "error"), [("float32", 1e-7), ("bfloat16", 2**-8), ("int8", 1 / 250)]
)
def test_formats_keep_states_to_their_own_precision(head, word, error):
    head.feature_layers = (0, 1, -1)
    states_TLD = torch.randn(
        50, 3, head.target.hidden_size, generator=torch.Generator().manual_seed(0)
    )
    # layers differ in size: each has a scale of its own
    states_TLD *= torch.tensor([1e-3, 1.0, 1e3])[:, None]
    stored, scales = encoded(states_TLD, word)
    largest = states_TLD.abs().amax(-1, keepdim=True)
    assert (decoded(stored, scales).float() - states_TLD).abs().div(largest).max() <= error
    kept = stored.nbytes + (0 if scales is None else scales.nbytes)
    assert kept == 50 * cache_bytes(head, word)
    zero, scale = encoded(torch.zeros(1, 1, 4), word)
    assert torch.equal(decoded(zero, scale).float(), torch.zeros(1, 1, 4))


@pytest.mark.parametrize(
    ("name", "value"),
    [("target", "another"), ("layers", [1, -1]), ("format", "int8"), ("tokenizer", "f00")],
)
def test_a_cache_of_something_else_is_refused_with_both_named(cached, name, value):
    cached()
    with refused(name, repr(value)):
        cached(**{name: value})


def test_a_corrupt_shard_is_named_and_the_others_are_not(target, head, cached, examples):
    source = cached(shard_bytes=1)
    source.fill(collate(examples))
    shards = sorted(source.cache.folder.glob("*.safetensors"))
    assert len(shards) == len(examples)
    tensors = load_file(shards[2])
    tensors["states"][0, 0, 0] += 1
    save_file(tensors, shards[2])
    with refused(f"{shards[2]} corrupt remove"):
        cached()(collate(examples))
    shards[2].write_bytes(shards[2].read_bytes()[:-5])
    with refused(f"{shards[2]} corrupt remove"):
        cached()
    shards[2].unlink()
    close(
        cached()(collate(examples)),
        online_features(target, head, collate(examples)),
        collate(examples),
    )


@pytest.mark.parametrize(
    "text",
    [
        "[1]",
        "{",
        '{"layers": null}',
        '{"layers": [0, "x"], "format": "float32", "hidden_size": 32}',
        '{"layers": [0, -1], "format": "../../etc", "hidden_size": 32}',
        '{"layers": [0, -1], "format": "float32", "hidden_size": {"a": 1}}',
        '{"layers": [0, -1], "format": "float32", "hidden_size": 32, "dtype": [1]}',
    ],
)
def test_a_manifest_that_is_none_is_named_in_one_line(cached, text):
    folder = cached().cache.folder
    (folder / "manifest.json").write_text(text)
    with refused("manifest.json") as caught:
        cached()
    assert "\n" not in str(caught.value)


SPOILT = {
    "ends float": {"ends": lambda ends: ends.double()},
    "ends beyond": {"ends": lambda ends: ends + 10**9},
    "ends falling": {"ends": lambda ends: ends - 10**6},
    "keys flat": {"keys": lambda keys: keys.flatten()},
    "more keys": {"keys": lambda keys: keys.repeat(5, 1)},
    "checksums": {"checksums": lambda sums: sums[:0]},
    "states narrow": {"states": lambda states: states[..., :5].contiguous()},
    "states flat": {"states": lambda states: states.flatten()},
    "fewer layers": {"states": lambda states: states[:, :1].contiguous()},
    "int8 without scales": {"states": lambda states: states.to(torch.int8)},
    "nothing": {
        name: lambda part: part[:0].contiguous() for name in ("keys", "ends", "checksums", "states")
    },
}


@pytest.mark.parametrize("what", SPOILT)
def test_a_shard_that_does_not_fit_itself_is_named(target, cached, examples, what):
    width = target.info.hidden_size
    source = cached(hidden_size=width)
    source.fill(collate(examples))
    source.cache.flush()
    (path,) = source.cache.folder.glob("*.safetensors")
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    for name, change in SPOILT[what].items():
        tensors[name] = change(tensors[name])
    save_file(tensors, path)
    with refused(f"{path} corrupt remove") as caught:
        cached(hidden_size=width)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["manifest.json", "a.safetensors", "recorded-1-a-b.safetensors"])
def test_a_named_pipe_among_states_is_refused_and_not_waited_for(cached, name):
    folder = cached().cache.folder
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with refused(f"{name} pipe"):
        cached()


def test_files_of_others_among_states_are_named(cached):
    folder = cached().cache.folder
    (folder / "thesis.safetensors").write_text("precious")
    with refused("thesis.safetensors corrupt"):
        cached()


def test_a_full_disk_leaves_no_half_shard(cached, examples, monkeypatch):
    source = cached()
    source.fill(collate(examples))

    def full(tensors, path, about):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(feature_cache, "save_file", full)
        with refused("space", error=OSError):
            source.cache.flush()
    assert [path.name for path in source.cache.folder.iterdir()] == ["manifest.json"]
    source.cache.flush()  # with room again, nothing was lost
    assert all(key_of(torch.tensor(example.tokens)) in cached().cache for example in examples)


@pytest.fixture
def counted(monkeypatch):
    """How many rows the target read while training."""
    rows, original = [], Target.read

    def read(self, tokens, *rest):
        rows.append(len(tokens))
        return original(self, tokens, *rest)

    monkeypatch.setattr(Target, "read", read)
    return rows


@pytest.mark.parametrize("mode", ["cached", "auto"])
def test_a_run_ends_with_the_weights_that_it_would_have_had(short, changed, counted, mode):
    plain = last_weights(train(short))
    online = sum(counted)
    counted.clear()
    features = FeaturesConfig(mode=mode, format="float32")
    kept = last_weights(
        train(dataclasses.replace(short, output=short.output + "-kept", features=features))
    )
    assert sum(counted) < 0.7 * online  # two epochs and a half, and an evaluation
    assert plain.keys() == kept.keys()
    for name, tensor in plain.items():
        torch.testing.assert_close(kept[name], tensor, atol=2e-5, rtol=0, msg=name)


def test_auto_keeps_nothing_that_is_too_large_or_read_once(short, changed, tmp_path):
    auto = FeaturesConfig(mode="auto", format="float32", folder=str(tmp_path / "states"))
    train(dataclasses.replace(short, features=dataclasses.replace(auto, limit=0.0)))
    once = changed(short, output=short.output + "-once", loop={"max_steps": 3})
    train(dataclasses.replace(once, features=auto))
    assert not (tmp_path / "states").exists()


def test_auto_reads_what_is_there_even_once(short, changed, counted, tmp_path):
    features = FeaturesConfig(mode="cached", format="float32", folder=str(tmp_path / "states"))
    train(dataclasses.replace(short, features=features))
    read = []
    for folder in ("states", "elsewhere"):
        counted.clear()
        once = changed(short, output=f"{short.output}-{folder}", loop={"max_steps": 3})
        train(
            dataclasses.replace(
                once, features=FeaturesConfig("auto", str(tmp_path / folder), "float32")
            )
        )
        read.append(sum(counted))
    assert read[0] < read[1]


@pytest.mark.parametrize("mode", ["online", "cached", "auto"])
@pytest.mark.parametrize("word", ["float32", "int8"])
def test_reading_ahead_changes_no_weight(short, changed, mode, word):
    short = dataclasses.replace(short, features=FeaturesConfig(mode=mode, format=word))
    one, other = (
        last_weights(
            train(changed(short, output=f"{short.output}-{workers}", data={"workers": workers}))
        )
        for workers in (0, 2)
    )
    assert same_tensors(one, other)


@pytest.mark.parametrize("word", list(FORMATS))
def test_what_is_trained_on_is_what_was_kept_and_is_read_ahead_as_it_is_stored(
    cached, examples, reads, word
):
    """Rounded at once: a run that reads its states again sees the same numbers."""
    source, batch = cached(format=word), collate(examples)
    assert source.read_ahead([batch], 0)[0] is batch  # nothing is there yet
    expected = source(batch)
    source.flush(Accelerator())
    other = cached(format=word)
    assert torch.equal(other(batch).features_BTF, expected.features_BTF)
    (ahead,) = other.read_ahead([batch], 0)
    assert ahead.states_BTLD.dtype == FORMATS[word] and (ahead.scales_BTL is None) == (
        word != "int8"
    )
    reads.clear()
    found = other(ahead)
    assert torch.equal(found.features_BTF, expected.features_BTF) and torch.equal(
        found.last_BTD, expected.last_BTD
    )
    assert not reads


def test_a_worker_takes_in_what_was_written_once_an_epoch(cached, examples):
    writer, reader = cached(), cached()
    batch = collate(examples)
    assert reader.read_ahead([batch], 0)[0].states_BTLD is None
    writer.fill(batch)
    writer.flush(Accelerator())
    assert reader.read_ahead([batch], 0)[0].states_BTLD is None
    assert reader.read_ahead([batch], 1)[0].states_BTLD is not None


def test_states_lost_between_two_starts_are_computed_again(short, stopped_at):
    short = dataclasses.replace(short, features=FeaturesConfig(mode="cached", format="float32"))
    stopped_at(4, short)
    folder = short.output + "/features"
    shutil.rmtree(folder)
    assert last_weights(train(short)).keys()
