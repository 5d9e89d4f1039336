"""Heads that leave and come back: pushed, exported and imported by the commands' functions."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from helpers import generated, saved_head
from messages import refused, warned
from runs import same_tensors
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from headstart.heads import CheckpointMetadata
from headstart.heads.checkpoints.files import read_weights
from headstart.heads.checkpoints.model_card import PACKAGES, Listing, model_card
from headstart.heads.checkpoints.save_load import load_head
from headstart.inference import SpeculativeLM, Target
from headstart.inference.targets import dtypes
from headstart.scripts.export import ExportConfig, export_foreign
from headstart.scripts.import_head import ImportConfig, import_foreign
from headstart.scripts.load_target import original_target
from headstart.scripts.push import PushConfig, push_head

OPTIONS = {
    "eagle": {},
    "eagle3": {"feature_layers": [0], "draft_vocab_size": 50},
    "medusa": {"num_layers": 2},
}


@pytest.fixture
def save_kind(taught, tmp_path):
    """Saves a head of a kind for the taught target; returns its folder."""

    def save(kind, metadata=None, **options):
        target = Target.from_pretrained(taught, dtype=torch.float32)
        saved_head(tmp_path / "head", target, kind, metadata, **OPTIONS[kind] | options)
        return tmp_path / "head"

    return save


@pytest.fixture
def export(taught, tmp_path):
    """Exports a head of the taught target; returns the folder."""

    def export(head, project, **more):
        output = tmp_path / "exported"
        export_foreign(ExportConfig(str(head), project, str(output), str(taught), **more))
        return output

    return export


@pytest.fixture
def import_back(taught, tmp_path):
    """Imports a head for the taught target; returns the folder."""

    def import_back(folder):
        import_foreign(ImportConfig(str(folder), str(taught), str(tmp_path / "back")))
        return tmp_path / "back"

    return import_back


def files_of(folder):
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def generated_with(taught, folder):
    lm = SpeculativeLM.from_pretrained(
        taught, head=folder, dtype=torch.float32, tree="dynamic:6:3:2", adaptive=False
    )
    return generated(lm, torch.tensor([[65, 66, 67, 68]]), max_new_tokens=24)


@pytest.mark.parametrize(
    ("kind", "project"),
    [("eagle", "safeailab"), ("eagle3", "speculators"), ("medusa", "fasterdecoding")],
)
def test_what_is_exported_and_imported_decodes_as_before(
    taught, save_kind, export, import_back, kind, project, capsys
):
    folder = save_kind(kind)
    back = import_back(export(folder, project))
    assert f"headstart verify {back}" in capsys.readouterr().out
    assert same_tensors(load_head(folder)[0].state_dict(), load_head(back)[0].state_dict())
    before = generated_with(taught, folder)
    after = generated_with(taught, back)
    assert torch.equal(before.sequences, after.sequences)
    assert before.stats.rows == after.stats.rows


def test_the_card_of_an_imported_head_claims_what_its_source_says_and_no_more(
    save_kind, export, import_back, tmp_path, monkeypatch
):
    """Of its training, licence and measurements nothing is known here."""
    back = import_back(export(save_kind("eagle3"), "speculators"))
    monkeypatch.setitem(PACKAGES, "a/b", Listing(license="apache-2.0"))  # the target's licence
    ready = tmp_path / "ready"
    push_head(PushConfig(str(back), "me/head", str(ready), base_model="a/b"))
    for card in ((back / "README.md").read_text(), (ready / "README.md").read_text()):
        sections = dict(part.split("\n\n", 1) for part in card.split("\n## ")[1:])
        assert "exported`" in sections["Origin"]
        assert "speculators" in sections["Origin"]
        for name in ("Measured", "Data and recipe", "Trained against"):
            assert sections[name].startswith("Unknown"), name
        assert "license:" not in card
        assert "was trained against" not in card
    assert str(tmp_path) not in (ready / "README.md").read_text()
    config = json.loads((back / "config.json").read_text())
    assert model_card(config["headstart"], Listing("me/head", license="mit")).count("license: mit")


def test_a_base_model_changes_neither_licence_nor_origin(taught, save_kind, tmp_path, monkeypatch):
    """The head was trained with a file that a package carries, and is published for the Hub's."""
    folder = save_kind("eagle3", CheckpointMetadata(provenance={"target": str(taught)}))
    monkeypatch.setitem(PACKAGES, str(taught), Listing(license="apache-2.0"))
    listed = Listing(base_model="the/package", license="apache-2.0")
    monkeypatch.setitem(PACKAGES, taught.name, listed)  # as it is published
    ready = tmp_path / "ready"
    push_head(PushConfig(str(folder), "me/head", str(ready), base_model="a/b"))
    card = (ready / "README.md").read_text()
    assert "license: apache-2.0" in card
    assert "base_model: a/b" in card
    assert f"trained against `{taught.name}`" in card
    section = json.loads((ready / "config.json").read_text())["headstart"]
    assert section["target"]["name"] == "a/b"
    # Published once more by someone who names nothing, it is still for that model.
    again = model_card(section)
    assert "license: apache-2.0" in again
    assert "# A draft head (eagle3) for a/b" in again


@pytest.mark.parametrize("repo", ["", "me/head"])
def test_what_would_be_pushed_is_written_to_a_folder(taught, save_kind, tmp_path, hub, repo):
    folder = save_kind("medusa", lm_head="shared")
    (folder / ".env").write_text("KEY=CANARY")
    output = tmp_path / "to mirror"
    options = {"output": str(output), "target": str(taught), "base_model": "a/b"}
    with warned(".env"):
        push_head(PushConfig(str(folder), repo, **options))
    assert not hub.repos
    names = {"README.md", "config.json", "model.safetensors", "custom_generate/generate.py"}
    assert files_of(output).keys() == names
    assert "lm_heads.0.weight" in read_weights(output)
    card = (output / "README.md").read_text()
    assert f'head="{repo or "."}"' in card
    assert str(tmp_path) not in card
    assert load_head(output)[0].config == load_head(folder)[0].config
    # Files of anything else are not replaced.
    (output / "thesis.tex").write_text("text")
    with refused("thesis.tex"):
        push_head(PushConfig(str(folder), repo, **options))


def test_a_card_without_a_base_model_is_warned_of(save_kind):
    folder = save_kind("medusa")
    with warned("base_model", "--base_model"):
        push_head(PushConfig(str(folder), "me/head", dry_run=True))
    with warnings.catch_warnings(action="error"):
        push_head(PushConfig(str(folder), "me/head", dry_run=True, base_model="org/base"))


def test_heads_that_cannot_be_had_are_told(save_kind, import_back):
    with refused("'nowhere'"):
        push_head(PushConfig(run="nowhere", repo="me/head"))
    with refused("'repo' 'output' required"):
        PushConfig(run="nowhere")
    with refused("headstart import"):
        import_back(save_kind("medusa"))


@pytest.mark.parametrize(
    ("kind", "options", "project", "more", "words"),
    [
        ("medusa", {}, "medusa", {}, "unknown 'medusa' speculators fasterdecoding merged"),
        ("medusa", {}, "merged", {"base_model": "a/b"}, "speculators base_model 'merged'"),
        ("eagle3", {"feature_layers": [-1]}, "speculators", {}, "-1"),
        ("eagle3", {}, "vllm", {}, "vllm README.md `headstart push`"),
        ("eagle3", {}, "gguf", {}, "llama.cpp 1 feature_layers 3"),
        ("medusa", {}, "sglang", {}, "sglang Medusa"),
        ("medusa", {"lm_head": "shared"}, "vllm", {}, "`headstart push --output --target"),
    ],
)
def test_what_is_not_exported_is_told(
    save_kind, export, tmp_path, kind, options, project, more, words
):
    folder = save_kind(kind, **options)
    with refused(words):
        export(folder, project, **more)
    assert not (tmp_path / "exported").exists()


def test_what_is_written_of_a_target_does_not_depend_on_what_is_fast_here(
    taught, tmp_path, monkeypatch
):
    folder = tmp_path / "rounded"
    AutoModelForCausalLM.from_pretrained(taught, dtype=torch.bfloat16).save_pretrained(folder)
    monkeypatch.setattr(dtypes, "against_float32", lambda dtype: 3.0)
    assert Target.from_pretrained(folder, device_map="cpu").dtype == torch.float32
    assert original_target(str(folder)).dtype == torch.bfloat16
    assert original_target(str(folder), torch.float16).dtype == torch.float16


def test_a_folder_of_something_else_is_refused_before_anything_is_loaded(tmp_path):
    output = tmp_path / "documents"
    (output / "thesis").mkdir(parents=True)
    (output / "thesis" / "chapter.tex").write_text("text")
    (output / "config.json").write_text("{}")
    before = files_of(output)
    with refused("documents config.json"):
        import_foreign(ImportConfig(head="nowhere", target="nowhere", output=str(output)))
    assert files_of(output) == before


@pytest.mark.parametrize(
    ("project", "kind"),
    [("speculators", "eagle"), ("fasterdecoding", "medusa"), ("safeailab", "eagle")],
)
def test_an_export_replaces_an_earlier_one_and_no_model(project, kind, save_kind, export):
    """A model's own config.json and model.safetensors have the same names."""
    folder = save_kind(kind)
    export(folder, project)
    path = export(folder, project) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"use_cache": True}))
    with refused("head config.json"):
        export(folder, project)


@pytest.mark.parametrize(
    ("project", "kind"), [("speculators", "eagle"), ("fasterdecoding", "medusa")]
)
def test_an_export_names_the_targets_id_on_the_hub(project, kind, taught, save_kind, export):
    folder = save_kind(kind)
    with warned("base_model", taught.name, "--base_model"):
        text = (export(folder, project) / "config.json").read_text()
    assert str(taught) not in text
    assert taught.name in text
    with warnings.catch_warnings(action="error"):
        output = export(folder, project, base_model="org/base")
    config = json.loads((output / "config.json").read_text())
    verifier = config.get("speculators_config", {}).get("verifier", {})
    assert config.get("base_model_name_or_path", verifier.get("name_or_path")) == "org/base"


def test_a_target_that_a_checkpoint_names_is_not_opened(taught, save_kind, hub, tmp_path):
    folder = save_kind("eagle")
    for project in ("speculators", "safeailab"):
        with refused("--target config.json", taught.name):
            export_foreign(ExportConfig(str(folder), project, str(tmp_path / "out")))
    assert not (tmp_path / "out").exists()
    folder = save_kind("medusa", lm_head="shared")
    with refused("--target config.json"):
        push_head(PushConfig(run=str(folder), repo="me/head"))
    assert not hub.repos


@pytest.mark.parametrize(
    "change",
    [
        {"speculators_model_type": ["eagle3"]},
        {"transformer_layer_config": {"rope_parameters": 3}},
        {"draft_vocab_size": "x"},
        {"transformer_layer_config": {"tie_word_embeddings": 3}},
        {"hidden_size": 5},
        {"d2t": (8, 5)},
    ],
)
def test_what_cannot_be_imported_is_named_in_one_line(
    change, save_kind, export, import_back, tmp_path
):
    output = export(save_kind("eagle3", draft_vocab_size=40), "speculators")
    config = json.loads((output / "config.json").read_text())
    if "d2t" in change:
        tensors = load_file(output / "model.safetensors")
        tensors["d2t"] = tensors["d2t"].view(change["d2t"])
        save_file(tensors, output / "model.safetensors")
    elif "hidden_size" in change:
        config["transformer_layer_config"] |= change
    else:
        config |= change
    (output / "config.json").write_text(json.dumps(config))
    with refused(f"'{output}'") as caught:
        import_back(output)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "back").exists()
