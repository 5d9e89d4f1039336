"""Checkpoints of other people: nothing in them is run, nothing outside of them is read."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refused
from safetensors.torch import save_file

from headstart.files import write_whole
from headstart.heads.checkpoints.files import (
    CONFIG_LIMIT,
    files_of_tensors,
    read_json,
    read_weights,
    weight_shapes,
)


class Runs:
    def __reduce__(self) -> Any:
        return print, ("run",)


def test_a_pickle_with_code_in_it_is_not_opened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"fc.weight": Runs()}, tmp_path / "pytorch_model.bin")
    with refused("pytorch_model.bin tensors"):
        read_weights(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Runs()))
    with refused("pytorch_model.bin"):
        read_weights(tmp_path)
    assert "run" not in capsys.readouterr().out


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_with_a_changed_byte_is_refused_or_read_and_no_other_error(
    zipped: bool, tmp_path: Path
) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save(
        {"fc.weight": torch.ones(3), "b": torch.zeros(2)},
        path,
        _use_new_zipfile_serialization=zipped,
    )
    whole = path.read_bytes()
    refused = 0
    for at in range(0, len(whole), 7):
        for changed in (whole[at] ^ 1, whole[at] ^ 0x20):
            path.write_bytes(whole[:at] + bytes([changed]) + whole[at + 1 :])
            try:
                read_weights(tmp_path)
            except (ValueError, OSError):
                refused += 1
    assert refused


def test_the_shapes_of_a_file_are_read_from_its_header_alone(tmp_path: Path) -> None:
    parts = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    for name, part in parts.items():
        save_file({name: torch.ones(2, 3)}, tmp_path / part)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    assert weight_shapes(tmp_path) == {"a": (2, 3), "b": (2, 3)}
    (tmp_path / "model-2.safetensors").unlink()
    (tmp_path / "model-2.safetensors").symlink_to(tmp_path / ".." / "elsewhere.safetensors")
    with refused("model-2.safetensors"):
        weight_shapes(tmp_path)
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    text = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(text[:20])
    with refused("truncated"):
        weight_shapes(tmp_path)


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    head = tmp_path / "head"
    head.mkdir()
    torch.save({"a": torch.ones(1)}, tmp_path / "secret.bin")
    (head / "pytorch_model.bin").symlink_to(tmp_path / "secret.bin")
    with refused("secret.bin"):
        read_weights(head)


@pytest.mark.parametrize("name", ["x" * 5000, "a\nb", "\x1b[2J"])
def test_a_tensor_whose_name_cannot_be_shown_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.safetensors"
    save_file({name: torch.ones(2)}, path)
    (tmp_path / "index.json").write_text(json.dumps({"weight_map": {name: path.name}}))
    for read in (read_weights, weight_shapes, lambda folder: files_of_tensors(path)):
        with refused(f"{path} tensor") as caught:
            read(tmp_path)
        assert str(caught.value).isprintable() and len(str(caught.value)) < 1000
    with refused(f"{tmp_path / 'index.json'} tensor"):
        files_of_tensors(tmp_path / "index.json")


@pytest.mark.parametrize("name", ["../else.safetensors", "/else.safetensors", ".", "\0"])
def test_an_index_names_no_file_elsewhere(tmp_path: Path, name: str) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    with refused(f"{index} {name!r}"):
        files_of_tensors(index)


def test_weights_in_parts_are_put_together(tmp_path: Path) -> None:
    parts = {"a": "one.bin", "b": "two.bin"}
    for name, part in parts.items():
        torch.save({name: torch.ones(2)}, tmp_path / part)
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": parts}))
    assert read_weights(tmp_path).keys() == parts.keys()
    index.write_text(json.dumps({"weight_map": {**parts, "c": "two.bin"}}))
    with refused("'c'"):
        read_weights(tmp_path)
    (tmp_path / "two.bin").write_bytes((tmp_path / "two.bin").read_bytes()[:40])
    with refused("truncated"):
        read_weights(tmp_path)


def test_a_huge_or_broken_config_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with refused("config.json"):
        read_json(path)
    with path.open("wb") as file:
        file.truncate(CONFIG_LIMIT + 1)
    with refused("config.json"):
        read_json(path)
    for text in ("", "[1]", "{", "[" * 100_000, '{"a": ' * 500 + "1" + "}" * 500):
        path.write_text(text)
        with refused("config.json JSON"):
            read_json(path)
    with refused("model.safetensors"):
        read_weights(tmp_path)


def test_what_a_disk_or_a_mapping_fails_to_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(5, "Input/output error")

    (tmp_path / "config.json").write_text("{}")
    torch.save({}, tmp_path / "pytorch_model.bin")
    monkeypatch.setattr(Path, "read_bytes", fail)
    monkeypatch.setattr(torch, "load", fail)
    with refused("config.json Input/output", error=OSError):
        read_json(tmp_path / "config.json")
    with refused("pytorch_model.bin"):
        read_weights(tmp_path)


def test_a_text_file_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state.json"
    assert write_whole(path, "one") == path and path.read_text() == "one"
    for broken in (OSError(28, "No space left on device"), KeyboardInterrupt("state.json space")):

        def fails(self: Path, other: Path, error: BaseException = broken) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", fails)
            with refused("state.json space", error=type(broken)):
                write_whole(path, "two")
        assert path.read_text() == "one" and list(tmp_path.iterdir()) == [path]
    with refused("nowhere", error=OSError):
        write_whole(tmp_path / "nowhere" / "state.json", "")
    (tmp_path / "any").touch()
    write_whole(path, "\ud83d alone")  # text that is no Unicode
    assert path.stat().st_mode == (tmp_path / "any").stat().st_mode and path.stat().st_size > 6
    write_whole(path, "private", mode=0o600)
    assert path.stat().st_mode & 0o777 == 0o600 and path.read_text() == "private"


def test_the_index_of_a_large_mixture_of_experts_is_read(tmp_path: Path) -> None:
    """Those of DeepSeek-V3 and Kimi-K2 have some ten megabytes: a tensor for each matrix of each
    expert."""
    files = {
        f"model.layers.{number}.mlp.experts.gate_proj.weight": "model-00001-of-00163.safetensors"
        for number in range(60_000)
    }
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    assert index.stat().st_size > CONFIG_LIMIT
    assert files_of_tensors(index) == files
