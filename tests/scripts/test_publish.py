"""Heads that leave and come back: pushed, exported and imported by the commands' functions."""

from __future__ import annotations

import json

import pytest
import torch
from messages import refused
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from headstart.heads import CheckpointMetadata, build_head
from headstart.heads.checkpoints import hub
from headstart.heads.checkpoints.files import read_weights
from headstart.heads.checkpoints.model_card import PACKAGES, Listing, model_card
from headstart.heads.checkpoints.save_load import load_head, save_head
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
def made(taught, tmp_path):
    """A head of a kind for the taught target, saved, and what it writes."""

    def make(kind, **options):
        target = Target.from_pretrained(taught, dtype=torch.float32)
        torch.manual_seed(0)
        head = build_head(kind, OPTIONS[kind] | options, target.info)
        head.initialize(target.modules, torch.arange(target.info.vocab_size) + 1)
        save_head(head, tmp_path / "head", CheckpointMetadata())
        return head, tmp_path / "head"

    return make


def written(taught, folder):
    lm = SpeculativeLM.from_pretrained(
        str(taught), head=str(folder), dtype=torch.float32, tree="dynamic:6:3:2", adaptive=False
    )
    return lm.generate(torch.tensor([[65, 66, 67, 68]]), max_new_tokens=24, do_sample=False)


@pytest.mark.parametrize(
    ("kind", "project"),
    [("eagle", "safeailab"), ("eagle3", "speculators"), ("medusa", "fasterdecoding")],
)
def test_what_is_exported_and_imported_decodes_as_before(
    taught, made, kind, project, tmp_path, capsys
):
    head, folder = made(kind)
    export_foreign(ExportConfig(str(folder), project, str(tmp_path / "out"), str(taught)))
    import_foreign(
        ImportConfig(head=str(tmp_path / "out"), target=str(taught), output=str(tmp_path / "back"))
    )
    assert "headstart verify" in capsys.readouterr().out
    back, _ = load_head(tmp_path / "back")
    assert all(
        torch.equal(tensor, back.state_dict()[name]) for name, tensor in head.state_dict().items()
    )
    before, after = written(taught, folder), written(taught, tmp_path / "back")
    assert torch.equal(before.sequences, after.sequences) and before.stats.rows == after.stats.rows


def test_the_card_of_an_imported_head_claims_what_its_source_says_and_no_more(
    taught, made, tmp_path, monkeypatch, capsys
):
    """Of its training, licence and measurements nothing is known here."""
    _, folder = made("eagle3")
    theirs = tmp_path / "their-head"
    export_foreign(ExportConfig(str(folder), "speculators", str(theirs), str(taught)))
    back = tmp_path / "back"
    import_foreign(ImportConfig(head=str(theirs), target=str(taught), output=str(back)))
    monkeypatch.setitem(PACKAGES, "a/b", Listing(license="apache-2.0"))  # the target's licence
    ready = tmp_path / "ready"
    push_head(PushConfig(str(back), "me/head", str(ready), base_model="a/b"))
    for card in ((back / "README.md").read_text(), (ready / "README.md").read_text()):
        sections = dict(part.split("\n\n", 1) for part in card.split("\n## ")[1:])
        assert f"{theirs.name}`" in sections["Origin"] and "speculators" in sections["Origin"]
        for name in ("Measured", "Data and recipe", "Trained against"):
            assert sections[name].startswith("Unknown: see the source."), name
        assert "license:" not in card and "was trained against" not in card
    assert str(tmp_path) not in (ready / "README.md").read_text()
    config = json.loads((back / "config.json").read_text())
    assert model_card(config["headstart"], Listing("me/head", license="mit")).count("license: mit")


def test_a_base_model_changes_neither_licence_nor_origin(taught, made, tmp_path, monkeypatch):
    """The head was trained with a file that a package carries, and is published for the Hub's."""
    head, folder = made("eagle3")
    metadata = CheckpointMetadata(provenance={"target": str(taught)})
    save_head(head, folder, metadata)
    monkeypatch.setitem(PACKAGES, str(taught), Listing(license="apache-2.0"))
    listed = Listing(base_model="the/package", license="apache-2.0")
    monkeypatch.setitem(PACKAGES, taught.name, listed)  # as it is published
    ready = tmp_path / "ready"
    push_head(PushConfig(str(folder), "me/head", str(ready), base_model="a/b"))
    card = (ready / "README.md").read_text()
    assert "license: apache-2.0" in card and "base_model: a/b" in card
    assert f"trained against `{taught.name}`" in card
    config = json.loads((ready / "config.json").read_text())
    assert config["headstart"]["target"]["name"] == "a/b"
    # Published once more by someone who names nothing, it is still for that model.
    again = model_card(config["headstart"])
    assert "license: apache-2.0" in again and "# A draft head (eagle3) for a/b" in again


@pytest.mark.parametrize("repo", ["", "me/head"])
def test_what_would_be_pushed_is_written_to_a_folder(taught, made, tmp_path, monkeypatch, repo):
    head, folder = made("medusa", lm_head="shared")
    (folder / ".env").write_text("KEY=CANARY")
    monkeypatch.setattr(hub, "push_folder", lambda *_: pytest.fail("uploaded"))
    output = tmp_path / "to mirror"
    with pytest.warns(UserWarning, match=r"not uploaded: \.env"):
        push_head(
            PushConfig(
                run=str(folder), repo=repo, output=str(output), target=str(taught), base_model="a/b"
            )
        )
    assert "lm_heads.0.weight" in read_weights(output)
    written = {path.relative_to(output).as_posix() for path in output.rglob("*") if path.is_file()}
    assert written == {
        "README.md",
        "config.json",
        "model.safetensors",
        "custom_generate/generate.py",
    }
    card = (output / "README.md").read_text()
    assert f'head="{repo or "."}"' in card and str(tmp_path) not in card
    assert load_head(output)[0].config == head.config
    # Files of anything else are not replaced.
    (output / "thesis.tex").write_text("text")
    with pytest.raises(ValueError, match=r"thesis\.tex"):
        push_head(PushConfig(run=str(folder), output=str(output), target=str(taught)))


def test_a_card_without_a_base_model_is_warned_of(made, monkeypatch, recwarn):
    _, folder = made("medusa")
    monkeypatch.setattr(hub, "push_folder", lambda *_: "an address")
    with pytest.warns(UserWarning, match=r"no base_model.*--base_model ORG/NAME"):
        push_head(PushConfig(run=str(folder), repo="me/head", dry_run=True))
    recwarn.clear()
    push_head(PushConfig(run=str(folder), repo="me/head", base_model="org/base"))
    assert not recwarn.list


def test_mistakes_are_told(taught, made, tmp_path):
    _, folder = made("medusa")
    with refused("'nowhere'"):
        push_head(PushConfig(run="nowhere", repo="me/head"))
    with refused("'repo' 'output' is required"):
        PushConfig(run=str(folder))
    with refused("headstart import"):
        import_foreign(
            ImportConfig(head=str(folder), target=str(taught), output=str(tmp_path / "back"))
        )
    with refused("unknown 'medusa'"):
        export_foreign(ExportConfig(head=str(folder), to="medusa", output=str(tmp_path / "out")))
    with refused("only speculators fasterdecoding base_model 'merged'"):
        export_foreign(ExportConfig(str(folder), "merged", "out", base_model="org/base"))
    _, last = made("eagle3", feature_layers=[-1])
    with refused("-1"):
        export_foreign(ExportConfig(str(last), "speculators", str(tmp_path / "out"), str(taught)))
    _, folder = made("medusa")
    config = json.loads((folder / "config.json").read_text())
    del config["headstart"]
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 5}))
    with refused("hidden_size 5"):
        import_foreign(
            ImportConfig(head=str(folder), target=str(taught), output=str(tmp_path / "back"))
        )
    assert not (tmp_path / "back").exists() and not (tmp_path / "out").exists()


def test_what_is_written_of_a_target_does_not_depend_on_what_is_fast_here(
    taught, tmp_path, monkeypatch
):
    AutoModelForCausalLM.from_pretrained(taught, dtype=torch.bfloat16).save_pretrained(
        tmp_path / "rounded"
    )
    monkeypatch.setattr(dtypes, "against_float32", lambda dtype: 3.0)
    assert Target.from_pretrained(tmp_path / "rounded", device_map="cpu").dtype == torch.float32
    assert original_target(str(tmp_path / "rounded")).dtype == torch.bfloat16
    assert original_target(str(tmp_path / "rounded"), torch.float16).dtype == torch.float16


@pytest.mark.parametrize("command", ["import", "speculators"])
def test_a_folder_of_something_else_is_refused_before_anything_is_loaded(
    command, taught, made, tmp_path
):
    _, folder = made("eagle3")
    output = tmp_path / "documents"
    (output / "thesis").mkdir(parents=True)
    (output / "thesis" / "chapter.tex").write_text("text")
    (output / "config.json").write_text("{}")
    before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    if command == "import":
        work, config = (
            import_foreign,
            ImportConfig(head="nowhere", target="nowhere", output=str(output)),
        )
    else:
        work, config = export_foreign, ExportConfig(str(folder), command, str(output), str(taught))
    with refused("documents config.json"):
        work(config)
    assert {path: path.read_bytes() for path in output.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("project", ["speculators", "fasterdecoding", "safeailab"])
def test_an_export_replaces_an_earlier_one_and_no_model(project, taught, made, tmp_path):
    """A model's own config.json and model.safetensors have the same names."""
    _, folder = made("medusa" if project == "fasterdecoding" else "eagle")
    config = ExportConfig(str(folder), project, str(tmp_path / "out"), str(taught))
    export_foreign(config)
    export_foreign(config)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    (tmp_path / "out" / "config.json").write_text(json.dumps(written | {"use_cache": True}))
    with refused("head config.json"):
        export_foreign(config)


@pytest.mark.parametrize(
    ("project", "kind"), [("speculators", "eagle"), ("fasterdecoding", "medusa")]
)
def test_an_export_names_the_targets_id_on_the_hub(project, kind, taught, made, tmp_path, recwarn):
    _, folder = made(kind)
    out = tmp_path / "out"
    with pytest.warns(UserWarning, match=r"no base_model.*'.*taught0'.*--base_model ORG/NAME"):
        export_foreign(ExportConfig(str(folder), project, str(out), str(taught)))
    text = (out / "config.json").read_text()
    assert str(taught) not in text and taught.name in text
    recwarn.clear()
    export_foreign(ExportConfig(str(folder), project, str(out), str(taught), base_model="org/base"))
    assert not recwarn.list
    config = json.loads((out / "config.json").read_text())
    named = config.get("speculators_config", {}).get("verifier", {}).get("name_or_path")
    assert config.get("base_model_name_or_path", named) == "org/base"


@pytest.mark.parametrize(
    ("kind", "options", "server", "words"),
    [
        ("eagle3", {}, "vllm", "vllm reads this head as it is README.md `headstart push`"),
        ("eagle3", {}, "gguf", "llama.cpp does not read 1 feature_layers, where it has 3"),
        ("medusa", {}, "sglang", "sglang does not read this head: it has no Medusa"),
        ("medusa", {"lm_head": "shared"}, "vllm", "`headstart push --output FOLDER --target"),
    ],
)
def test_an_export_for_a_server_says_what_to_type(kind, options, server, words, made, tmp_path):
    _, folder = made(kind, **options)
    with refused(words):
        export_foreign(ExportConfig(str(folder), server, str(tmp_path / "out")))


def test_a_target_that_a_checkpoint_names_is_not_opened(made, monkeypatch, tmp_path):
    _, folder = made("eagle")
    for to in ("speculators", "safeailab"):
        with refused("--target config.json taught0'"):
            export_foreign(ExportConfig(str(folder), to, str(tmp_path / "out")))
    assert not (tmp_path / "out").exists()
    _, folder = made("medusa", lm_head="shared")
    monkeypatch.setattr(hub, "push_folder", lambda *_: pytest.fail("uploaded"))
    with refused("--target config.json"):
        push_head(PushConfig(run=str(folder), repo="me/head"))


@pytest.mark.parametrize(
    "change",
    [
        {"speculators_model_type": ["eagle3"]},
        {"transformer_layer_config": {"rope_parameters": 3}},
        {"draft_vocab_size": "x"},
        {"transformer_layer_config": {"tie_word_embeddings": 3}},
        {"d2t": (8, 5)},
    ],
)
def test_what_cannot_be_imported_is_named_in_one_line(change, taught, made, tmp_path):
    _, folder = made("eagle3", draft_vocab_size=40)
    out = tmp_path / "out"
    export_foreign(ExportConfig(str(folder), "speculators", str(out), str(taught)))
    config = json.loads((out / "config.json").read_text())
    if "d2t" in change:
        tensors = load_file(out / "model.safetensors")
        tensors["d2t"] = tensors["d2t"].view(change["d2t"])
        save_file(tensors, out / "model.safetensors")
    else:
        (out / "config.json").write_text(json.dumps({**config, **change}))
    with refused(f"'{out}'") as caught:
        import_foreign(ImportConfig(str(out), str(taught), str(tmp_path / "back")))
    assert "\n" not in str(caught.value)
