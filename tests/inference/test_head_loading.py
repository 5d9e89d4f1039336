"""A head object is checked as its folder would be, and loading one changes nothing and measures
nothing."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from helpers import calls_of, check_identity, saved_head, warnings_of
from huggingface_hub import constants
from messages import lacking, refused, warned

from headstart.heads import CheckpointMetadata, build_head
from headstart.heads.checkpoints.save_load import load_head, save_head
from headstart.inference import SpeculativeLM, Target, custom_generate, generate_from
from headstart.inference.drafters import by_name
from headstart.inference.drafters.adaptive import AdaptiveDrafter
from headstart.inference.head_loading import load_fitting_head, merge_adapter_of
from headstart.inference.trees.tree_spec import TreeShape
from headstart.inference.tuning.machine import machine_key

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
def target32(tiny_target):
    return tiny_target(dtype=torch.float32)


@pytest.fixture
def saved(target32, tmp_path):
    """Saves a head with metadata: `saved(tree="chain:2")`."""

    def save(**metadata):
        saved_head(
            tmp_path / "head", target32, num_heads=3, metadata=CheckpointMetadata(**metadata)
        )
        return tmp_path / "head"

    return save


@pytest.fixture
def adapted_folder(target32, tmp_path):
    """The folder of a head with an adapter."""

    class Adapter:
        def save_pretrained(self, folder):
            folder.mkdir()

    head = build_head("medusa", {"num_heads": 2}, target32.info)
    save_head(head, tmp_path / "adapted", CheckpointMetadata(adapted=True), Adapter())
    return tmp_path / "adapted"


@WAYS
def test_another_target_than_it_was_trained_against_is_told(target32, saved, given):
    folder = saved(provenance={**target32.provenance, "weights": "0123456789abcdef"})
    decoders = []

    def load():
        options = {"tree": "chain:2", "compile": False}
        decoders.append(SpeculativeLM.from_pretrained(target32, given(folder), **options))

    (message,) = warnings_of(load)
    assert not lacking(message, "weights '0123456789abcdef'")
    assert decoders[0].provenance["weights"] == "0123456789abcdef"


@WAYS
def test_the_saved_tree_is_the_one_that_is_drafted(target32, saved, given):
    here = machine_key(target32.device, compiled=False)
    folder = saved(measured={"fastest": {here: [[0], [1], [0, 0]]}})
    lm = SpeculativeLM.from_pretrained(target32, given(folder), adaptive=False, compile=False)
    assert lm.drafter.shape == TreeShape.from_paths([[0], [1], [0, 0]])


@WAYS
def test_a_head_with_an_adapter_is_refused_without_permission(target32, adapted_folder, given):
    with refused("allow_adapter=True"):
        SpeculativeLM.from_pretrained(target32, given(adapted_folder), compile=False)


def test_loading_a_head_neither_merges_its_adapter_nor_measures(
    target32, adapted_folder, monkeypatch
):
    timings = calls_of(monkeypatch, by_name, "measured_costs")
    merged = []
    monkeypatch.setattr(target32, "merge_adapter", merged.append)
    loaded = load_fitting_head(adapted_folder, target32)
    assert merged == timings == []
    merge_adapter_of(loaded, target32, allowed=True)
    assert merged == [adapted_folder / "adapter"]


def test_a_decoder_that_must_choose_its_trees_times_the_rounds_of_its_head(
    target32, saved, monkeypatch
):
    timings = calls_of(monkeypatch, by_name, "measured_costs")
    lm = SpeculativeLM.from_pretrained(target32, saved(), compile=False)
    assert any(isinstance(part, AdaptiveDrafter) for part in lm.drafter.nested())
    for tree in (None, "chain:2"):
        check_identity(lm, [torch.tensor([5, 6, 7])], max_new_tokens=8, tree=tree)
    assert set(timings) == {
        (target32, lm.head)
    }  # each pair is timed once, says drafters/test_costs.py


def test_a_head_that_always_drafts_needs_no_times(target32, saved, monkeypatch):
    timings = calls_of(monkeypatch, by_name, "measured_costs")
    for tree in ("chain:2", "auto"):
        lm = SpeculativeLM.from_pretrained(target32, saved(), tree=tree, adaptive=False)
        assert lm.drafter.max_nodes >= 2
    assert not timings


def test_an_acceptance_rule_is_looked_at_before_rounds_are_timed(target32, saved, monkeypatch):
    timings = calls_of(monkeypatch, by_name, "measured_costs")
    with refused("acceptance 'exact'"):
        SpeculativeLM.from_pretrained(target32, saved(), compile=False, acceptance="exact")
    assert not timings


def test_a_head_is_looked_at_before_the_target_is_loaded(
    saved, target_folder, tmp_path, monkeypatch
):
    """A wrong path, or a head for a model of another width, costs no minutes of loading."""
    monkeypatch.setattr(Target, "load", lambda *_: pytest.fail("loaded"))
    with refused("head 'nowhere/at-all'"):
        SpeculativeLM.from_pretrained(target_folder, head="nowhere/at-all")
    config = json.loads((target_folder / "config.json").read_text())
    config["hidden_size"] *= 2
    (tmp_path / "wide").mkdir()
    (tmp_path / "wide" / "config.json").write_text(json.dumps(config))
    with refused(str(saved()), str(tmp_path / "wide"), "hidden size 32 64"):
        SpeculativeLM.from_pretrained(tmp_path / "wide", head=saved())


def test_a_run_stands_for_its_best_head(target32, saved, tmp_path):
    shutil.copytree(saved(), tmp_path / "run" / "best")
    shutil.copytree(saved(), tmp_path / "run" / "last")
    lm = SpeculativeLM.from_pretrained(target32, head=tmp_path / "run", compile=False)
    assert lm.head.folder == tmp_path / "run" / "best"


def test_a_checkpoint_of_a_run_is_no_head_and_its_heads_are_named(target32, tmp_path):
    state = tmp_path / "run" / "checkpoints" / "step-00000008"
    state.mkdir(parents=True)
    with refused("step-00000008 best last"):
        SpeculativeLM.from_pretrained(target32, head=state)


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
    with refused("head 'me/head'"):
        used()


def test_a_revision_given_to_generate_is_that_of_the_head(private, target_folder):
    own = Target.from_pretrained(target_folder).model
    with refused("head 'me/head' revision 'v2'"):
        generate_from("me/head", own, input_ids=ROW, revision="v2", token="hf_x", **SHORT)


def test_an_old_name_of_an_option_is_taken_with_a_warning(target32, saved):
    with warned("fallback adaptive", category=FutureWarning):
        lm = SpeculativeLM.from_pretrained(target32, saved(), fallback=False, compile=False)
    assert not any(isinstance(part, AdaptiveDrafter) for part in lm.drafter.nested())
    with warned("target_dtype dtype", category=FutureWarning):
        lm = SpeculativeLM.from_pretrained(target32, saved(), target_dtype="auto", compile=False)
    assert lm.target.dtype == target32.dtype
    with warned("fallback adaptive", category=FutureWarning):
        method = custom_generate(saved(), fallback=False)
    assert method.options["adaptive"] is False
    with refused("'falback'"):
        custom_generate(saved(), falback=False)
