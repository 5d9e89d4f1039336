"""Head checkpoints: what is saved is what servers read, loads back bit for bit, and is never half
there."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import helpers
import pytest
import torch
import yaml
from messages import refused
from safetensors.torch import load_file, save_file
from torch import nn

from headstart.heads import HEADS, CheckpointMetadata, DraftHead, build_head
from headstart.heads.by_name import OBJECTIVE_OPTIONS
from headstart.heads.checkpoints import save_load as checkpoint
from headstart.heads.checkpoints.model_card import Listing, model_card
from headstart.heads.checkpoints.save_load import load_head, save_head

INFO = replace(helpers.INFO, name="made-up/target", vocab_size=50, num_layers=3)
OPTIONS: dict[str, dict[str, Any]] = {
    "own": {"num_heads": 2, "num_layers": 2},
    "plain": {"num_heads": 3, "bias": False},
    "truncated": {"num_heads": 2, "draft_vocab_size": 11},
    "shared": {"num_heads": 2, "lm_head": "shared"},
}
MEASURED = {
    "prompts": 17,
    "new_tokens": 64,
    "trees": {
        "chain": {
            "nodes": 5,
            "acceptance_length": 1.6437,
            "interval": [1.5912, 1.6958],
            "acceptance_rate_by_depth": [0.4321, 0.3765],
            "rounds": 300,
        },
        "tree": {
            "nodes": 16,
            "acceptance_length": 2.1234,
            "interval": [2.0412, 2.2056],
            "acceptance_rate_by_depth": [0.6142, 0.5521],
            "rounds": 250,
        },
    },
}


def build(name: str = "own", seed: int = 0, dtype: torch.dtype = torch.float32) -> DraftHead:
    torch.manual_seed(seed)
    head = build_head("medusa", OPTIONS[name], INFO)
    for parameter in head.parameters():
        nn.init.normal_(parameter)
    for buffer in head.buffers():
        buffer.copy_(torch.randperm(INFO.vocab_size)[: len(buffer)].sort().values)
    return head.to(dtype)


def save(head: DraftHead, folder: Path, metadata: CheckpointMetadata | None = None) -> Path:
    save_head(head, folder, metadata or CheckpointMetadata())
    return folder


def assert_same(found: DraftHead, wanted: DraftHead) -> None:
    """The same kind of head with the same bits."""
    assert (
        type(found) is type(wanted)
        and found.config == wanted.config
        and found.target == wanted.target
    )
    ours, theirs = found.state_dict(), wanted.state_dict()
    assert list(ours) == list(theirs)
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]), name


# The round trip.


@pytest.mark.parametrize(
    ("name", "dtype", "tree"),
    [
        ("own", torch.float32, [[0], [1], [0, 0]]),
        ("plain", torch.bfloat16, "dynamic:24:6:8"),
        ("truncated", torch.float64, None),
        ("shared", torch.bfloat16, None),
    ],
    ids=str,
)
def test_what_is_saved_loads_bit_for_bit(
    name: str, dtype: torch.dtype, tree: Any, tmp_path: Path
) -> None:
    head = build(name, dtype=dtype)
    metadata = CheckpointMetadata(
        tree=tree, training={"step": 7, "config": {"lr": 1e-3}}, measured=MEASURED
    )
    folder = save(head, tmp_path / "new" / "head", metadata)
    loaded, loaded_metadata = load_head(folder, INFO)
    assert_same(loaded, head)
    assert loaded_metadata == metadata
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert files == ["README.md", "config.json", "custom_generate/generate.py", "model.safetensors"]
    assert [path.name for path in folder.parent.iterdir()] == ["head"]


def test_loading_converts_parameters_and_never_the_token_map(tmp_path: Path) -> None:
    head = build("truncated", dtype=torch.float64)
    loaded, _ = load_head(save(head, tmp_path / "head"), dtype=torch.bfloat16)
    assert_same(loaded, head.bfloat16())
    assert [buffer.dtype for buffer in loaded.buffers()] == [torch.int64]


def test_older_checkpoints_tell_among_the_options_what_the_head_was_trained_on(
    tmp_path: Path,
) -> None:
    save_head(build(), tmp_path / "head", CheckpointMetadata())
    path = tmp_path / "head" / "config.json"
    config = json.loads(path.read_text())
    assert not set(config["headstart"]["options"]) & set(OBJECTIVE_OPTIONS)
    objective = {"loss": {"ce": 1.0}, "depth_weights": "decay", "decay": 0.8, "target_top_k": None}
    config["headstart"]["options"] |= objective
    path.write_text(json.dumps(config))
    assert_same(load_head(tmp_path / "head")[0], build())


def test_saving_replaces_all_of_an_earlier_head(tmp_path: Path) -> None:
    folder = save(build("own"), tmp_path / "head", CheckpointMetadata(measured=MEASURED))
    stale = (
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "adapter/adapter_config.json",
    )
    for name in (
        *stale,
        "custom_generate/__pycache__/generate.cpython-311.pyc",
        ".config.json.12.partial",
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"old")
    second = build("shared", seed=1)
    save(second, folder)
    assert_same(load_head(folder)[0], second)
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md",
        "config.json",
        "custom_generate",
        "model.safetensors",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["head"]


def snapshot(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


FOREIGN = {
    "somebody's notes": {"notes.txt": "mine"},
    "a folder of data": {"data/rows.jsonl": "{}"},
    "a model's files": {"config.json": '{"model_type": "llama"}', "model.safetensors": "weights"},
    "weights alone": {"model.safetensors": "weights"},
    "a broken config": {"config.json": '{"headstart": ', "README.md": "text"},
    "a hidden file": {".env": "KEY=1"},
}


@pytest.mark.parametrize("place", ["head", "head.partial", "head.replaced"])
@pytest.mark.parametrize("foreign", FOREIGN)
def test_a_folder_of_something_else_is_not_replaced(
    foreign: str, place: str, tmp_path: Path
) -> None:
    if place == "head.partial" and foreign in (
        "a model's files",
        "weights alone",
        "a broken config",
    ):
        pytest.skip("a killed save may have left these")
    for name, text in FOREIGN[foreign].items():
        (tmp_path / place / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place / name).write_text(text)
    before = snapshot(tmp_path)
    with refused("headstart") as caught:
        save(build(), tmp_path / "head")
    assert sorted(FOREIGN[foreign])[0] in str(caught.value) and snapshot(tmp_path) == before


@pytest.mark.parametrize(
    "name", ["notes.txt", "adapter/vectors.bin", "custom_generate/mine.py", "empty"]
)
def test_a_file_of_the_users_in_a_heads_folder_is_not_deleted_with_it(
    name: str, tmp_path: Path
) -> None:
    folder = save(build(), tmp_path / "head")
    (folder / name).parent.mkdir(exist_ok=True)
    if name == "empty":
        (folder / name).mkdir()
    else:
        (folder / name).write_text("mine")
    before = snapshot(tmp_path)
    with refused(name):
        save_head(build(seed=1), folder)
    assert snapshot(tmp_path) == before and (folder / name).exists()


def test_a_link_to_a_folder_stays_a_link_and_what_it_leads_to_is_checked(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.tex").write_text("text")
    (tmp_path / "head").symlink_to(tmp_path / "precious")
    with refused("thesis.tex"):
        save(build(), tmp_path / "head")
    (tmp_path / "precious" / "thesis.tex").unlink()
    save(build(), tmp_path / "head")
    assert (tmp_path / "head").is_symlink() and (tmp_path / "precious" / "config.json").is_file()
    (tmp_path / "file").write_text("text")
    with refused(str(tmp_path / "file")):
        save(build(), tmp_path / "file")


# The model card.


def front_matter(folder: Path) -> dict[str, Any]:
    _, block, _ = (folder / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    return dict(yaml.safe_load(block))


@pytest.mark.parametrize("name", ["package:another", "/tmp/my models/{final}: v2", "C:\\models\\x"])
def test_the_card_of_any_target_has_readable_front_matter(name: str, tmp_path: Path) -> None:
    head = build_head("medusa", OPTIONS["shared"], replace(INFO, name=name))
    front = front_matter(save(head, tmp_path / "head"))
    # which must be on the Hub
    assert front["library_name"] == "headstart" and "base_model" not in front


@pytest.mark.parametrize(
    ("name", "loadable"),
    [
        ("made-up/target", True),
        ("/models/mine", True),
        ("package:another", False),
        ("/models/x.Q4_K_M.GGUF", False),
    ],
)
def test_the_card_tells_a_server_to_load_what_servers_load(
    name: str, loadable: bool, tmp_path: Path
) -> None:
    head = build_head("medusa", OPTIONS["shared"], replace(INFO, name=name))
    card = (save(head, tmp_path / "head") / "README.md").read_text(encoding="utf-8")
    command = next(line for line in card.splitlines() if line.startswith("vllm serve"))
    assert command == (f"vllm serve {name} \\" if loadable else "vllm serve MODEL \\")
    assert ("in place of MODEL" in card) is not loadable
    if not loadable:
        listed = model_card(
            json.loads((tmp_path / "head" / "config.json").read_text())["headstart"],
            Listing("a/b", "c/d"),
        )
        assert "vllm serve c/d \\" in listed and "MODEL" not in listed


# Strict loading.


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lm_head.weight": torch.zeros(3)}, "unknown 'lm_head.weight'"),
        ({"blocks.0.layers.0.weights": torch.zeros(3)}, "unknown 'blocks.0.layers.0.weights'"),
        ({"token_map": torch.arange(3)}, "unknown 'token_map'"),
        # A shape that broadcasts is still wrong.
        (
            {"blocks.0.layers.0.bias": torch.zeros(1), "other": torch.zeros(1)},
            "'blocks.0.layers.0.bias' (1,) (16,) unknown 'other'",
        ),
        *(
            (
                {"lm_heads.1.weight": torch.zeros(50, 16, dtype=dtype)},
                f"'lm_heads.1.weight' {dtype}",
            )
            for dtype in (torch.int8, torch.bool, torch.complex64)
        ),
    ],
    ids=str,
)
def test_every_tensor_that_does_not_fit_is_named(
    change: dict[str, torch.Tensor], words: str, tmp_path: Path
) -> None:
    folder = save(build(), tmp_path / "head")
    change_weights(folder, lambda tensors: tensors.update(change))
    with refused("model.safetensors", words):
        load_head(folder)


def test_a_target_that_does_not_fit_is_refused_with_every_difference(tmp_path: Path) -> None:
    folder = save(build(), tmp_path / "head")
    other = replace(INFO, name="other", hidden_size=17, vocab_size=51, num_layers=4)
    with refused(f"'{folder}' made-up/target 'other' hidden 16 17 vocab 50 51 layers 3 4"):
        load_head(folder, other)
    for field in ("hidden_size", "vocab_size", "num_layers"):
        with refused(field.replace("_", " "), "5") as caught:
            load_head(folder, replace(INFO, **{field: 5}))
        assert str(caught.value).count("(head)") == 1
    load_head(folder, replace(INFO, name="the same under another name"))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", b""),
        ("config.json", b'{"headstart": '),
        ("config.json", b"[]"),
        ("config.json", b"{}"),
        ("config.json", b'{"headstart": null}'),
        ("config.json", None),
        ("model.safetensors", b""),
        ("model.safetensors", b"5 byt"),
        ("model.safetensors", b"PK\x03\x04 a zip file, as torch.save writes them"),
        ("model.safetensors", None),
    ],
)
def test_a_file_that_is_broken_or_missing_is_named(
    name: str, content: bytes | None, tmp_path: Path
) -> None:
    folder = save(build(), tmp_path / "head")
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    with refused(str(folder), name):
        load_head(folder)


@pytest.mark.parametrize(
    "source", ["nobody/no-such-head", "no/such/folder/at all", "../nowhere", "head.safetensors"]
)
def test_a_source_that_cannot_be_reached_is_refused(
    source: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with refused(f"'{source}'"):
        load_head(source)


# A save that fails.


def no_space(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    "part", ["save_torch_state_dict", "model_card", "write_text", "rename", "second rename"]
)
@pytest.mark.parametrize("there_before", [True, False])
def test_a_save_that_fails_in_any_part_leaves_what_was_there(
    part: str, there_before: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if part == "second rename" and not there_before:
        pytest.skip("there is one rename where nothing is replaced")
    folder, first = tmp_path / "head", build("own", seed=1)
    if there_before:
        save(first, folder)
    before = snapshot(tmp_path)
    with monkeypatch.context() as broken:
        if part in ("save_torch_state_dict", "model_card"):
            broken.setattr(checkpoint, part, no_space)
        elif part == "second rename":
            rename = Path.rename
            broken.setattr(
                Path,
                "rename",
                lambda path, to: no_space() if path.name.endswith(".partial") else rename(path, to),
            )
        else:
            broken.setattr(Path, part, no_space)
        with refused("space", error=OSError):
            save(build("own", seed=2), folder)
    assert snapshot(tmp_path) == before
    second = build("own", seed=2)
    assert_same(load_head(save(second, folder))[0], second)


def test_what_a_killed_save_left_behind_is_no_hindrance(tmp_path: Path) -> None:
    """SIGKILL leaves a `.partial` folder: it is not taken for a head, and the next save clears it
    away."""
    first, second = build(seed=1), build(seed=2)
    folder = save(first, tmp_path / "head")
    left = tmp_path / "head.partial"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    (left / "model-00001-of-00002.safetensors").write_bytes(b"of another save")
    assert_same(load_head(folder)[0], first)
    with refused(str(left)):
        load_head(left)
    save(second, folder)
    assert_same(load_head(folder)[0], second)
    assert [path.name for path in tmp_path.iterdir()] == ["head"]
    assert not (folder / "model-00001-of-00002.safetensors").exists()


# What strangers may have written.

LONG = "x" * 9000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda section: section.update(head="medsua"), "unknown 'medsua' medusa"),
        (lambda section: section["options"].update(heads=3), "'heads' num_heads"),
        (lambda section: section["options"].update(lm_head="x"), "'lm_head' own 'x'"),
        (lambda section: section.clear(), "target"),
        (lambda section: section.pop("tree"), "tree"),
        (lambda section: section["target"].pop("num_layers"), "num_layers"),
        (lambda section: section["options"].update(num_layers=10**9), "num_layers 1000000000"),
        (lambda section: section["options"].update(num_heads=10**7), "num_heads 10000000"),
        (lambda section: section["target"].update(hidden_size=2**30), "16 1073741824"),
        (lambda section: section["target"].update(hidden_size=2**31 - 1, vocab_size=2**31), ""),
        (lambda section: section["target"].update(num_layers=10**9), "num_layers 1000000000"),
        (lambda section: section["target"].update(hidden_size=16.0), "hidden_size 16.0"),
        (lambda section: section["target"].update(vocab_size=True), "vocab_size True"),
        (lambda section: section["target"].update(rms_norm_eps="x"), "rms_norm_eps 'x'"),
        (lambda section: section["target"].update(name=None), "None"),
        (lambda section: section.update(measured=None), "None"),
        (lambda section: section.update(measured={"fastest": {"x": 5}}), "5"),
        (lambda section: section.update(tree={"a": 1}), "{'a' 1}"),
        (lambda section: section.update(adapted="yes"), "'yes'"),
        (lambda section: section.update(head=["medusa"]), "head ['medusa']"),
        (lambda section: section.update(head=LONG), "unknown"),
        (lambda section: section.update(options=LONG), "options"),
        (lambda section: section["options"].update(num_heads=LONG), "num_heads"),
        (lambda section: section["target"].update(hidden_act=[LONG]), "hidden_act"),
        (lambda section: section["target"].update(hidden_size=LONG), "hidden_size"),
        (lambda section: section["target"].update(rope_parameters=LONG), "rope_parameters"),
    ],
)
def test_a_section_that_is_not_a_heads_is_refused_before_memory_is_taken(
    change: Callable[[Any], object], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(build(), tmp_path / "head")
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    change(config["headstart"])
    path.write_text(json.dumps(config), encoding="utf-8")
    monkeypatch.setattr(checkpoint, "read_weights", lambda *_: pytest.fail("read the weights"))
    with refused(message) as caught:
        load_head(folder)
    assert len(str(caught.value)) < 1000


def test_a_rotary_embedding_that_transformers_refuses_is_named(tmp_path: Path) -> None:
    with refused("options eagle3 head_dim"):
        checkpoint.build_unloaded("eagle3", {"head_dim": 255}, replace(INFO, num_layers=8), 1000)


@pytest.mark.parametrize("kind", HEADS)
def test_every_head_is_compared_with_its_file_without_its_memory(kind: str, tmp_path: Path) -> None:
    """On the meta device, which has no values: no head's constructor may need any."""
    target = replace(INFO, num_layers=8)
    head = build_head(kind, {}, target)
    unloaded = checkpoint.build_unloaded(kind, {}, target, 1000)
    assert {parameter.device.type for parameter in unloaded.parameters()} == {"meta"}
    shapes = {name: tensor.shape for name, tensor in head.state_dict().items()}
    assert {name: tensor.shape for name, tensor in unloaded.state_dict().items()} == shapes


@pytest.mark.parametrize(
    "ids",
    [[2**63 - 1, -(2**63), -1, 5], [-1, 1, 2, 3], [1, 2, 3, 50], [3, 3, 4, 5], [5, 4, 3, 2]],
    ids=str,
)
def test_a_draft_vocabulary_that_leads_out_of_the_targets_is_refused(
    ids: list[int], tmp_path: Path
) -> None:
    """Differences of extreme ids wrap around, and look like an ascending order."""
    folder = save(build("truncated"), tmp_path / "head")
    tokens = [0, *ids, 40, 41, 42, 43, 44, 45]
    change_weights(folder, lambda tensors: tensors.update(token_map=torch.tensor(tokens)))
    with refused("token_map 50"):
        load_head(folder)
