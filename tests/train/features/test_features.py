"""The target's states, from a cache: the same training, less work, nothing of another model."""

from __future__ import annotations

import os
import shutil

import pytest
import torch
from accelerate import Accelerator
from messages import refused
from runs import (
    assert_same_weights,
    changed,
    files_of_at_most,
    last_weights,
    random_examples,
)
from safetensors.torch import load_file, save_file

from headstart.heads import MedusaConfig, MedusaHead
from headstart.inference import Target
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
def narrow(tiny_target):
    return tiny_target(vocab_size=24)


@pytest.fixture
def medusa(narrow):
    head = MedusaHead(MedusaConfig(num_heads=2), narrow.info)
    head.feature_layers = (0, -1)
    head.initialize(narrow.modules, torch.ones(24, dtype=torch.int64))
    return head.double()


EXAMPLES = random_examples(7, vocab=24)
BATCH = collate(EXAMPLES)


@pytest.fixture
def reads(monkeypatch):
    """The token rows that targets were asked to read."""
    rows = []
    original = Target.read

    def read(self, tokens_BT, *rest):
        rows.append(tokens_BT)
        return original(self, tokens_BT, *rest)

    monkeypatch.setattr(Target, "read", read)
    return rows


@pytest.fixture
def cached(narrow, medusa, tmp_path):
    """Opens the cache anew, as another process would: `cached(format="float32",
    shard_bytes=...)`."""

    def opened(shard_bytes=2**28, **manifest):
        cache = FeatureCache(tmp_path / "cache", MANIFEST | manifest, shard_bytes)
        return CachedFeatures(narrow, medusa, cache)

    return opened


def assert_same_features(found, fresh, batch=BATCH, **tolerance):
    assert found.modules is fresh.modules
    assert torch.equal(found.tokens_BT, fresh.tokens_BT)
    assert torch.equal(found.loss_mask_BT, fresh.loss_mask_BT)
    for row, place in batch.places():
        for name in ("features_BTF", "last_BTD"):
            ours, theirs = (getattr(features, name)[row, place] for features in (found, fresh))
            torch.testing.assert_close(ours, theirs, **tolerance)


@pytest.mark.parametrize("packed", [False, True])
def test_cached_features_are_those_of_the_batch(narrow, medusa, cached, packed):
    batch = collate_rows([EXAMPLES[:3], EXAMPLES[3:]]) if packed else BATCH
    fresh = online_features(narrow, medusa, batch, torch.float64)
    assert fresh.features_BTF.shape[-1] == 2 * 32
    source = cached()
    for _ in range(2):  # computed, then kept
        found = source(batch, torch.float64)
        assert_same_features(found, fresh, batch, atol=1e-5, rtol=0)
        torch.testing.assert_close(medusa(found).loss, medusa(fresh).loss, rtol=1e-5, atol=0)
    source.flush(Accelerator())
    assert_same_features(cached()(batch, torch.float64), found, batch, atol=0, rtol=0)


def test_a_folder_with_more_layers_serves_as_well(narrow, medusa, cached, reads):
    medusa.feature_layers = (1, 0)
    cached(layers=[1, 0, -1]).write(Accelerator(), EXAMPLES)
    medusa.feature_layers = (0, -1)
    reads.clear()
    found = cached()(BATCH, torch.float64)
    assert not reads
    fresh = online_features(narrow, medusa, BATCH, torch.float64)
    assert_same_features(found, fresh, atol=1e-5, rtol=0)


def test_a_sequence_is_read_once_whatever_batch_or_row_it_stands_in(cached, reads):
    source = cached(shard_bytes=1)  # a shard for every sequence
    first = source(BATCH)
    again = source(collate_rows([EXAMPLES[5:2:-1], EXAMPLES[:1]]))
    assert [len(rows) for rows in reads] == [len(EXAMPLES)]
    start = len(EXAMPLES[5].tokens)
    assert torch.equal(again.last_BTD[0, :start], first.last_BTD[5, :start])
    assert torch.equal(again.features_BTF[0, start : start + 5], first.features_BTF[4, :5])
    longer = Example([*EXAMPLES[0].tokens, 1], [*EXAMPLES[0].loss_mask, False])
    source(collate([longer]))
    assert len(reads) == 2


def test_what_a_folder_holds_is_not_read_again_for_what_it_lacks(cached, reads):
    for examples in (EXAMPLES[1:], EXAMPLES, EXAMPLES):
        cached().write(Accelerator(), examples)
    assert [len(rows) for rows in reads] == [len(EXAMPLES) - 1, 1]
    assert torch.equal(reads[1][0], torch.tensor(EXAMPLES[0].tokens))


@pytest.mark.parametrize(
    ("word", "error"), [("float32", 1e-7), ("bfloat16", 2**-8), ("int8", 1 / 250)]
)
def test_formats_keep_states_to_their_own_precision(medusa, word, error):
    medusa.feature_layers = (0, 1, -1)
    generator = torch.Generator().manual_seed(0)
    states_TLD = torch.randn(50, 3, medusa.target.hidden_size, generator=generator)
    # layers differ in size: each has a scale of its own
    states_TLD *= torch.tensor([1e-3, 1.0, 1e3])[:, None]
    stored, scales = encoded(states_TLD, word)
    largest = states_TLD.abs().amax(-1, keepdim=True)
    assert (decoded(stored, scales).float() - states_TLD).abs().div(largest).max() <= error
    kept = stored.nbytes + (0 if scales is None else scales.nbytes)
    assert kept == 50 * cache_bytes(medusa, word)
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


def test_a_corrupt_shard_is_named_and_the_others_are_not(narrow, medusa, cached):
    source = cached(shard_bytes=1)
    source.fill(BATCH)
    shards = sorted(source.cache.folder.glob("*.safetensors"))
    assert len(shards) == len(EXAMPLES)
    tensors = load_file(shards[2])
    tensors["states"][0, 0, 0] += 1
    save_file(tensors, shards[2])
    with refused(f"{shards[2]} corrupt remove"):
        cached()(BATCH)
    shards[2].write_bytes(shards[2].read_bytes()[:-5])
    with refused(f"{shards[2]} corrupt remove"):
        cached()
    shards[2].unlink()
    assert_same_features(cached()(BATCH), online_features(narrow, medusa, BATCH))


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
def test_a_shard_that_does_not_fit_itself_is_named(narrow, cached, what):
    width = narrow.info.hidden_size
    source = cached(hidden_size=width)
    source.fill(BATCH)
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


def test_a_full_disk_leaves_no_half_shard(cached):
    source = cached()
    source.fill(BATCH)
    with files_of_at_most(100), refused("large", error=OSError):
        source.cache.flush()
    assert [path.name for path in source.cache.folder.iterdir()] == ["manifest.json"]
    source.cache.flush()  # with room again, nothing was lost
    assert all(key_of(torch.tensor(example.tokens)) in cached().cache for example in EXAMPLES)


@pytest.fixture
def with_states(short, tmp_path):
    """Builds a run that keeps states: `with_states("auto", run="again", folder="states")`."""

    def build(mode, run="run", folder=None, word="float32", **changes):
        path = None if folder is None else str(tmp_path / folder)
        features = FeaturesConfig(mode=mode, format=word, folder=path)
        return changed(short, output=str(tmp_path / run), features=features, **changes)

    return build


@pytest.mark.parametrize("mode", ["cached", "auto"])
def test_a_run_ends_with_the_weights_that_it_would_have_had(with_states, reads, mode):
    plain = train(with_states("online"))
    online = sum(map(len, reads))
    reads.clear()
    kept = train(with_states(mode, run="kept"))
    assert sum(map(len, reads)) < 0.7 * online  # two epochs and a half, and an evaluation
    assert_same_weights(kept, plain, atol=2e-5)


def test_auto_keeps_nothing_that_is_too_large_or_read_once(with_states, tmp_path):
    auto = with_states("auto", folder="states")
    train(changed(auto, features={"limit": 0.0}))
    train(with_states("auto", run="once", folder="states", loop={"max_steps": 3}))
    assert not (tmp_path / "states").exists()


def test_auto_reads_what_is_there_even_once(with_states, reads):
    train(with_states("cached", folder="states"))
    counts = []
    for folder in ("states", "elsewhere"):
        reads.clear()
        train(with_states("auto", run=folder + "-run", folder=folder, loop={"max_steps": 3}))
        counts.append(sum(map(len, reads)))
    assert counts[0] < counts[1]


@pytest.mark.parametrize("mode", ["online", "cached", "auto"])
@pytest.mark.parametrize("word", ["float32", "int8"])
def test_reading_ahead_changes_no_weight(with_states, mode, word):
    one, other = (
        train(with_states(mode, run=f"{workers}", word=word, data={"workers": workers}))
        for workers in (0, 2)
    )
    assert_same_weights(one, other)


@pytest.mark.parametrize("word", list(FORMATS))
def test_what_is_trained_on_is_what_was_kept_and_is_read_ahead_as_it_is_stored(cached, reads, word):
    """Rounded at once: a run that reads its states again sees the same numbers."""
    source = cached(format=word)
    assert source.read_ahead([BATCH], 0)[0] is BATCH  # nothing is there yet
    expected = source(BATCH)
    source.flush(Accelerator())
    other = cached(format=word)
    assert torch.equal(other(BATCH).features_BTF, expected.features_BTF)
    (ahead,) = other.read_ahead([BATCH], 0)
    assert ahead.states_BTLD.dtype == FORMATS[word]
    assert (ahead.scales_BTL is None) == (word != "int8")
    reads.clear()
    found = other(ahead)
    assert torch.equal(found.features_BTF, expected.features_BTF)
    assert torch.equal(found.last_BTD, expected.last_BTD)
    assert not reads


def test_a_worker_takes_in_what_was_written_once_an_epoch(cached):
    writer, reader = cached(), cached()
    assert reader.read_ahead([BATCH], 0)[0].states_BTLD is None
    writer.fill(BATCH)
    writer.flush(Accelerator())
    assert reader.read_ahead([BATCH], 0)[0].states_BTLD is None
    assert reader.read_ahead([BATCH], 1)[0].states_BTLD is not None


def test_states_lost_between_two_starts_are_computed_again(with_states, stopped_at, tmp_path):
    config = with_states("cached", folder="states")
    stopped_at(4, config)
    shutil.rmtree(tmp_path / "states")
    assert last_weights(train(config))
