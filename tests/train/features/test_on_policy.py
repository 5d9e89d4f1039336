"""A head that learns from its own rejected drafts: what a recording holds of them is what training sees."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from headstart.files import recorded_files
from headstart.heads import CheckpointMetadata, build_head
from headstart.heads.checkpoints.save_load import load_head, save_head
from headstart.inference import SpeculativeLM, Target, load_tokenizer
from headstart.inference.feature_cache import FeatureCache
from headstart.inference.recorded_folder import recorded_row
from headstart.stopping import Stopped
from headstart.train.adapting import adapt
from headstart.train.config import AdaptConfig, FeaturesConfig
from headstart.train.data.batches import collate_rows
from headstart.train.data.chat_template import Example
from headstart.train.features.on_policy import RecordedRounds, check_on_policy
from headstart.train.features.online import CachedFeatures
from headstart.train.features.stored import FolderStates, StoredFeatures
from headstart.train.loop import train

HEAD = {"type": "eagle3", "feature_layers": [0, -1], "depth": 3, "train_steps": 3}


@pytest.fixture(scope="module")
def begun(taught, tmp_path_factory):
    """An untrained head, and two recordings of its answers: with its drafts, in int8, and without."""
    folder = tmp_path_factory.mktemp("on policy")
    tokenizer = load_tokenizer(taught)
    target = Target.from_pretrained(str(taught), torch.float32)
    torch.manual_seed(0)
    head = build_head("eagle3", {name: value for name, value in HEAD.items() if name != "type"}, target.info)
    head.initialize(target.modules, torch.ones(target.info.vocab_size, dtype=torch.int64))
    save_head(head, folder / "head", CheckpointMetadata())
    lm = SpeculativeLM.from_pretrained(target, head, tree="chain:3", fallback=False)
    settings = {"do_sample": False, "eos_token_id": [], "pad_token_id": 0, "max_new_tokens": 14}
    for name, drafts in (("drafts", True), ("none", False)):
        with lm.record(folder / name, format="int8", tokenizer=tokenizer, drafts=drafts):
            for number in range(12):
                words = f"{('count to', 'say')[number % 2]} {number % 5 + 3} {'please' * (number // 5)}"
                lm.generate(tokenizer(words, return_tensors="pt").input_ids, **settings)
    return folder


@pytest.fixture
def config(begun, short, changed):
    features = FeaturesConfig(mode="stored", format="int8", folder=str(begun / "drafts"), on_policy=1.0)
    config = changed(short, features=features, head=HEAD, loop={"max_steps": 4, "log_every": 1, "batch_size": 4})
    return changed(config, data={"sources": [], "held_out": 0.2}, eval={"new_tokens": 4})


def rows_of(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def losses(folder):
    return torch.tensor([row["loss"] for row in rows_of(folder) if "loss" in row])


def read(begun, taught, rows, longest, share=1.0, mode="stored"):
    """The target, and the features of rows of sequences, as a step has them."""
    target = Target.from_pretrained(str(taught), torch.float32)
    head = build_head("eagle3", {name: value for name, value in HEAD.items() if name != "type"}, target.info)
    folder = begun / "drafts"
    cache = FeatureCache(folder, json.loads((folder / "manifest.json").read_text()))
    source = CachedFeatures(target, head, cache)
    if mode == "stored":
        source = StoredFeatures(target, head, FolderStates(cache, longest))
    examples = []
    for path in recorded_files(folder):
        row = recorded_row(path)
        examples.append(Example(row["input_ids"][:longest], [bool(own) for own in row["loss_mask"][:longest]]))
    batch = collate_rows([[examples[number] for number in row] for row in rows])
    ahead = RecordedRounds(folder, longest, share).beside(source.read_ahead)(batch, 0)
    return target, source(batch), source(ahead)


@pytest.mark.parametrize(("mode", "longest"), [("stored", 1000), ("cached", 1000), ("stored", 20)])
@pytest.mark.parametrize("rows", [[[0], [3], [7]], [[5, 2], [1], [9, 4, 6]]])
def test_a_step_sees_the_drafts_with_the_targets_states(begun, taught, rows, mode, longest):
    target, plain, features = read(begun, taught, rows, longest, mode=mode)
    assert plain.rejected is None, "an evaluation, which reads nothing ahead, is on the text alone"
    rejected = features.rejected
    depths = rejected.depths_M.tolist()
    assert depths == sorted(depths) and set(depths) == {1, 2, 3}
    drafted = {}
    places = {}
    for number, (place, depth) in enumerate(zip(rejected.positions_M.tolist(), depths)):
        drafted.setdefault(place, {})[depth] = int(rejected.tokens_M[number])
        places[place, depth] = number
    tokens_R = features.tokens_BT.flatten()
    begins_BT = torch.zeros_like(features.tokens_BT)
    for row, sequences in enumerate(rows):
        stop = 0
        for number in sequences:
            length = min(len(recorded_row(recorded_files(begun / "drafts")[number])["input_ids"]), longest)
            begins_BT[row, stop : stop + length] = row * features.tokens_BT.shape[1] + stop
            stop += length
    for place, path in drafted.items():
        first, last = min(path), max(path)
        assert sorted(path) == list(range(first, last + 1))
        text = tokens_R[begins_BT.flatten()[place] : place + 1 + first].tolist()
        tokens = text + [path[depth] for depth in sorted(path)]
        assert path[first] != int(tokens_R[place + 1 + first]), "the text has another token there"
        assert bool(features.loss_mask_BT.flatten()[place + 1]), "the root is of the answer"
        _, last_1TD = target.read(torch.tensor([tokens]), (-1,))
        for depth in path:
            number = places[place, depth]
            state_D = last_1TD[0, len(text) + depth - first]
            torch.testing.assert_close(rejected.last_MD[number], state_D, atol=0.05, rtol=0)
            assert int(rejected.next_tokens_M[number]) == int(target.modules.logits(state_D).argmax())


def test_a_share_of_the_rounds_is_always_the_same_part(begun, taught):
    rows = [[number] for number in range(12)]
    found = {}
    for share in (0.0, 0.3, 0.6, 1.0):
        rejected = read(begun, taught, rows, 1000, share)[2].rejected
        found[share] = set(rejected.positions_M.tolist())
    assert not found[0.0] and found[0.3] < found[0.6] < found[1.0]
    assert len(found[0.3]) == pytest.approx(0.3 * len(found[1.0]), rel=0.35)


def test_training_is_resumed_packed_and_accumulated_as_ever(config, changed, tmp_path, monkeypatch, stop_after):
    whole = train(config)
    text = train(
        changed(config, output=str(tmp_path / "text"), features=dataclasses.replace(config.features, on_policy=0.0))
    )
    apart = (losses(whole) - losses(text)).abs()
    assert apart[0, 0] == 0, "the first draft follows the text, by the same weights"
    assert apart[:, 1:].min() > 1e-3
    assert rows_of(whole)[0].keys() == rows_of(text)[0].keys()
    parts = train(changed(config, output=str(tmp_path / "parts"), loop={"micro_batch": 2}))
    torch.testing.assert_close(losses(parts), losses(whole), rtol=1e-4, atol=0)
    stopped = changed(config, output=str(tmp_path / "stopped"))
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        with pytest.raises(Stopped):
            train(stopped)
    one, other = (load_file(folder / "last" / "model.safetensors") for folder in (train(stopped), whole))
    assert all(torch.equal(one[name], other[name]) for name in other)
    workers = train(changed(config, output=str(tmp_path / "workers"), data={"workers": 1}))
    assert torch.equal(losses(workers), losses(whole))


def test_the_evaluation_is_on_the_text_alone(config, changed, tmp_path):
    """A learning rate of nothing: the head is the same, and so is all that is held out."""
    still = changed(config, optim={"lr": 1e-12})
    plain = changed(still, output=str(tmp_path / "text"), features=dataclasses.replace(config.features, on_policy=0.0))
    one, other = ([row for row in rows_of(train(each)) if "eval" in row][-1] for each in (still, plain))
    for name in ("held_out_loss", "eval"):
        assert one[name] == other[name]


def test_a_head_is_adapted_to_its_own_drafts(begun, taught, tmp_path):
    given = {
        "target": str(taught),
        "head": str(begun / "head"),
        "steps": 40,
        "batch_size": 4,
        "new_tokens": 12,
        "lr": 1e-2,
    }
    config = AdaptConfig(**given, recorded=str(begun / "drafts"), output=str(tmp_path / "new"), on_policy=1.0)
    adapt(config)
    _, metadata = load_head(tmp_path / "new" / "training" / "last")
    assert metadata.training["config"]["features"]["on_policy"] == 1.0


def test_what_cannot_be_trained_on_drafts_is_told(config, begun, changed, tiny_target):
    info = tiny_target(layers=4).info
    message = r"features.on_policy trains a head on its own drafts, which \w+ with these options does not read"
    unfit = (("medusa", {}), ("hydra", {}), ("eagle", {}), ("mtp", {"num_layers": 2, "depth": 2}))
    for kind, options in unfit:
        with pytest.raises(ValueError, match=message):
            check_on_policy(build_head(kind, options, info), kind)
    for kind, options in (("eagle3", {"feature_layers": [0]}), ("eagle", {"train_steps": 2}), ("mtp", {})):
        check_on_policy(build_head(kind, options, info), kind)
    with pytest.raises(ValueError, match=message):
        train(changed(config, head={"type": "medusa"}))
    with pytest.raises(
        ValueError, match=r"finds no drafts in '.*none'; record them with lm.record\(..., drafts=True\)"
    ):
        RecordedRounds(begun / "none", 100, 1.0)
    for values, message in (
        ({"on_policy": 1.5}, r"features.on_policy is a share from 0 to 1, not 1.5"),
        ({"mode": "online"}, r"features.on_policy needs recorded answers: features.mode stored or cached"),
        ({"mode": "auto"}, r"features.on_policy needs recorded answers: features.mode stored or cached"),
        ({"folder": None}, r"features.on_policy needs recorded answers: features.mode stored or cached"),
    ):
        with pytest.raises(ValueError, match=message):
            changed(config, features=dataclasses.replace(config.features, **values), data={"sources": ["x.jsonl"]})
    with pytest.raises(ValueError, match=r"on_policy is a share from 0 to 1, not -1"):
        AdaptConfig(target="t", head="h", recorded="r", output="o", on_policy=-1)


@pytest.mark.parametrize("workers", [0, 1])
def test_damaged_drafts_end_a_run_by_name(config, changed, begun, tmp_path, workers):
    folder = tmp_path / "damaged"
    shutil.copytree(begun / "drafts", folder)
    for path in recorded_files(folder)[1:]:
        tensors = load_file(path)
        tensors["rejected"][-1, -1] += 1
        save_file(tensors, path, {"row": json.dumps(recorded_row(path))})
    features = dataclasses.replace(config.features, folder=str(folder))
    with pytest.raises(ValueError, match=r"^\S*recorded-\S+ is corrupt: its rejected drafts are not those"):
        train(changed(config, features=features, data={"workers": workers}))
