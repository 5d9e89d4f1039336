"""A head object is checked as its folder would be, and loading one changes nothing and measures
nothing."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from helpers import check_identity, warnings_of
from huggingface_hub import constants
from messages import refused

from headstart.heads import CheckpointMetadata, build_head
from headstart.heads.checkpoints.save_load import load_head, save_head
from headstart.inference import SpeculativeLM, Target, custom_generate, generate_from
from headstart.inference.drafters import by_name, costs
from headstart.inference.drafters.adaptive import AdaptiveDrafter
from headstart.inference.head_loading import load_fitting_head, merge_adapter_of
from headstart.inference.trees.tree_spec import TreeShape

WAYS = pytest.mark.parametrize(
    "given",
    [
        lambda folder: folder,
        str,
        lambda folder: load_head(folder)[0],
    ],
    ids=["folder", "text", "head object"],
)


@pytest.fixture
def target(tiny_target):
    return tiny_target(dtype=torch.float32)


@pytest.fixture
def saved(target, tmp_path):
    """Saves a head with metadata: `saved(tree="chain:2")`."""

    def save(**metadata):
        head = build_head("medusa", {"num_heads": 3}, target.info)
        save_head(head, tmp_path / "head", CheckpointMetadata(**metadata))
        return tmp_path / "head"

    return save


class Adapter:
    def save_pretrained(self, folder):
        folder.mkdir()


@WAYS
def test_another_target_than_it_was_trained_against_is_told(target, saved, given):
    folder = saved(provenance={**target.provenance, "weights": "0123456789abcdef"})
    (message,) = warnings_of(
        lambda: SpeculativeLM.from_pretrained(target, given(folder), tree="chain:2", compile=False)
    )
    assert "may accept less here: weights '0123456789abcdef' (trained against)" in message
    lm = SpeculativeLM.from_pretrained(target, given(folder), tree="chain:2", compile=False)
    assert lm.provenance["weights"] == "0123456789abcdef"


@WAYS
def test_the_saved_tree_is_the_one_that_is_drafted(target, saved, given, monkeypatch):
    from headstart.inference.drafters import by_name

    monkeypatch.setattr(by_name, "machine_key", lambda *_: "here")
    folder = saved(measured={"fastest": {"here": [[0], [1], [0, 0]]}})
    lm = SpeculativeLM.from_pretrained(target, given(folder), adaptive=False, compile=False)
    assert lm.drafter.shape == TreeShape.from_paths([[0], [1], [0, 0]])


@WAYS
def test_a_head_with_an_adapter_is_refused_without_permission(target, tmp_path, given, saved):
    head = build_head("medusa", {"num_heads": 2}, target.info)
    save_head(head, tmp_path / "adapted", CheckpointMetadata(adapted=True), Adapter())
    with pytest.raises(
        ValueError, match=r"changes what the model itself writes\. allow_adapter=True"
    ):
        SpeculativeLM.from_pretrained(target, given(tmp_path / "adapted"), compile=False)


def test_loading_a_head_neither_merges_its_adapter_nor_measures(
    target, tmp_path, monkeypatch, saved
):
    monkeypatch.setattr(costs, "_measured", lambda *_: pytest.fail("measured"))
    monkeypatch.setattr(target, "merge_adapter", lambda folder: merged.append(folder))
    merged = []
    head = build_head("medusa", {"num_heads": 2}, target.info)
    save_head(head, tmp_path / "adapted", CheckpointMetadata(adapted=True), Adapter())
    loaded = load_fitting_head(tmp_path / "adapted", target)
    assert merged == []
    merge_adapter_of(loaded, target, allowed=True)
    assert merged == [tmp_path / "adapted" / "adapter"]


def test_rounds_are_timed_once_when_a_decoder_must_choose_its_trees(
    target, saved, monkeypatch, nothing_measured
):
    measured, original = [], costs._measured
    monkeypatch.setattr(by_name, "measured_costs", costs.measured_costs)
    monkeypatch.setattr(
        costs, "_measured", lambda *given: measured.append(given) or original(*given)
    )
    lm = SpeculativeLM.from_pretrained(target, saved(), compile=False)
    assert len(measured) == 1
    assert any(isinstance(part, AdaptiveDrafter) for part in lm.drafter.nested())
    for tree in (None, "chain:2"):
        check_identity(lm, [torch.tensor([5, 6, 7])], max_new_tokens=8, tree=tree)
    assert len(measured) == 1


def test_a_head_whose_tree_is_known_needs_no_times(target, saved, monkeypatch):
    monkeypatch.setattr(costs, "_measured", lambda *_: pytest.fail("measured"))
    for options in ({"tree": "chain:2"}, {"adaptive": False}):
        lm = SpeculativeLM.from_pretrained(target, saved(), compile=False, **options)
        assert lm.drafter.max_nodes >= 2
    with pytest.raises(ValueError, match="unknown acceptance rule"):
        SpeculativeLM.from_pretrained(target, saved(), compile=False, acceptance="exact")


def test_a_head_is_looked_at_before_the_target_is_loaded(
    target, saved, target_folder, tmp_path, monkeypatch
):
    """A wrong path, or a head for a model of another width, costs no minutes of loading."""
    monkeypatch.setattr(Target, "load", lambda *_: pytest.fail("loaded"))
    with pytest.raises(ValueError, match="no head at 'nowhere/at-all'"):
        SpeculativeLM.from_pretrained(target_folder, head="nowhere/at-all")
    config = json.loads((target_folder / "config.json").read_text())
    config["hidden_size"] *= 2
    (tmp_path / "wide").mkdir()
    (tmp_path / "wide" / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ValueError,
        match=r"the head at '.*head' .* not fit .*wide.*: hidden size 32 \(head\) and 64",
    ):
        SpeculativeLM.from_pretrained(tmp_path / "wide", head=saved())


def test_a_run_stands_for_its_best_head(target, saved, tmp_path):
    shutil.copytree(saved(), tmp_path / "run" / "best")
    shutil.copytree(saved(), tmp_path / "run" / "last")
    lm = SpeculativeLM.from_pretrained(target, head=tmp_path / "run", compile=False)
    assert lm.head.folder == tmp_path / "run" / "best"


def test_a_checkpoint_of_a_run_is_no_head_and_its_heads_are_named(target, tmp_path):
    state = tmp_path / "run" / "checkpoints" / "step-00000008"
    state.mkdir(parents=True)
    with refused("step-00000008 best last"):
        SpeculativeLM.from_pretrained(target, head=state)


def test_a_decoder_tells_what_a_model_tells(target):
    lm = SpeculativeLM(target)
    model = target.model
    assert (lm.device, lm.dtype) == (model.device, model.dtype)
    assert (lm.config, lm.generation_config) == (model.config, model.generation_config)


ROW = torch.tensor([[5, 7, 9, 11]])
SHORT = {"max_new_tokens": 4, "do_sample": False}


@pytest.fixture
def private(hub, target_folder, tmp_path):
    """The tiny target and a head for it as private repositories of a Hub."""
    target = Target.from_pretrained(target_folder)
    head = build_head("medusa", {"num_heads": 2}, target.info)
    save_head(head, tmp_path / "head", CheckpointMetadata())
    for name, folder in {"me/target": target_folder, "me/head": tmp_path / "head"}.items():
        files = [path for path in folder.rglob("*") if path.is_file()]
        hub.repos[name] = {str(path.relative_to(folder)): path.read_bytes() for path in files}
        hub.commits[name] = ["a" * 40]
        hub.private.add(name)
    return hub


def used(**options):
    """Load and use all that is found at a Hub: target, head, draft model and tokenizer."""
    lm = SpeculativeLM.from_pretrained("me/target", "me/head", compile=False, **options)
    lm.generate(ROW, stop_strings=["never"], **SHORT)
    lm.use_head("me/head")
    own = lm.target.model
    SpeculativeLM.from_pretrained(own, "me/head", compile=False, **options)
    SpeculativeLM.from_pretrained(own, drafter="model:me/target", compile=False, **options)
    generate_from("me/head", own, input_ids=ROW, compile=False, **options, **SHORT)


@pytest.mark.versions
def test_options_of_the_hub_hold_for_all_that_is_found_there(private, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"give a token|is not a valid model identifier"):
        used(cache_dir=tmp_path / "mine")
    used(cache_dir=tmp_path / "mine", token="hf_x")
    assert not (tmp_path / "cache").exists()
    asked = []
    private.trouble = lambda handler: asked.append(handler.path) or False
    used(cache_dir=tmp_path / "mine", local_files_only=True, token="hf_x")
    # transformers asks for the target's adapter all the same
    assert {path.rpartition("/")[2] for path in asked} <= {"adapter_config.json"}
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    used(cache_dir=str(tmp_path / "mine"))
    with pytest.raises(ValueError, match="no head at 'me/head'"):
        used()


def test_a_revision_given_to_generate_is_that_of_the_head(private, target_folder):
    own = Target.from_pretrained(target_folder).model
    with pytest.raises(
        ValueError, match=r"no head at 'me/head' at revision 'v2'.*no such revision"
    ):
        generate_from("me/head", own, input_ids=ROW, revision="v2", token="hf_x", **SHORT)


def test_an_old_name_of_an_option_is_taken_with_a_warning(target, saved):
    with pytest.warns(FutureWarning, match="fallback is called adaptive now"):
        lm = SpeculativeLM.from_pretrained(target, saved(), fallback=False, compile=False)
    assert not any(isinstance(part, AdaptiveDrafter) for part in lm.drafter.nested())
    with pytest.warns(FutureWarning, match="target_dtype is called dtype now"):
        lm = SpeculativeLM.from_pretrained(target, saved(), target_dtype="auto", compile=False)
    assert lm.target.dtype == target.dtype
    with pytest.warns(FutureWarning, match="fallback is called adaptive now"):
        method = custom_generate(saved(), fallback=False)
    assert method.options["adaptive"] is False
    with pytest.raises(ValueError, match="unknown option 'falback'"):
        custom_generate(saved(), falback=False)
