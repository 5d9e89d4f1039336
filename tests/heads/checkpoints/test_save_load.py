"""Head checkpoints: what is saved is what servers read, loads back bit for bit, and is never half
there."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import helpers
import pytest
import torch
import yaml
from helpers import changed_json, write_files
from messages import refused
from runs import same_tensors
from safetensors.torch import load_file, save_file
from torch import nn

from headstart.heads import HEADS, CheckpointMetadata, DraftHead, build_head
from headstart.heads.by_name import OBJECTIVE_OPTIONS
from headstart.heads.checkpoints import save_load as checkpoint
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
        }
    },
}


FILES = {
    "head/README.md",
    "head/config.json",
    "head/custom_generate/generate.py",
    "head/model.safetensors",
}
"""What a head in a folder `head` is."""


def snapshot(folder: Path) -> dict[str, bytes]:
    """All files below a folder."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def medusa_head(name: str = "own", seed: int = 0, dtype: torch.dtype = torch.float32) -> DraftHead:
    torch.manual_seed(seed)
    head = build_head("medusa", OPTIONS[name], INFO)
    for parameter in head.parameters():
        nn.init.normal_(parameter)
    for buffer in head.buffers():
        buffer.copy_(torch.randperm(INFO.vocab_size)[: len(buffer)].sort().values)
    return head.to(dtype)


def saved_in(head: DraftHead, folder: Path, metadata: CheckpointMetadata | None = None) -> Path:
    save_head(head, folder, metadata or CheckpointMetadata())
    return folder


def assert_same_head(found: DraftHead, wanted: DraftHead) -> None:
    """The same kind of head with the same bits."""
    assert type(found) is type(wanted)
    assert found.config == wanted.config and found.target == wanted.target
    assert same_tensors(found.state_dict(), wanted.state_dict())


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
    head = medusa_head(name, dtype=dtype)
    metadata = CheckpointMetadata(
        tree=tree, training={"step": 7, "config": {"lr": 1e-3}}, measured=MEASURED
    )
    folder = saved_in(head, tmp_path / "new" / "head", metadata)
    loaded, loaded_metadata = load_head(folder, INFO)
    assert_same_head(loaded, head)
    assert loaded_metadata == metadata
    assert snapshot(folder.parent).keys() == FILES


def test_loading_converts_parameters_and_never_the_token_map(tmp_path: Path) -> None:
    head = medusa_head("truncated", dtype=torch.float64)
    loaded, _ = load_head(saved_in(head, tmp_path / "head"), dtype=torch.bfloat16)
    assert_same_head(loaded, head.bfloat16())
    assert [buffer.dtype for buffer in loaded.buffers()] == [torch.int64]


def test_older_checkpoints_tell_among_the_options_what_the_head_was_trained_on(
    tmp_path: Path,
) -> None:
    save_head(medusa_head(), tmp_path / "head", CheckpointMetadata())
    objective = {"loss": {"ce": 1.0}, "depth_weights": "decay", "decay": 0.8, "target_top_k": None}
    with changed_json(tmp_path / "head" / "config.json") as config:
        assert not set(config["headstart"]["options"]) & set(OBJECTIVE_OPTIONS)
        config["headstart"]["options"] |= objective
    assert_same_head(load_head(tmp_path / "head")[0], medusa_head())


def test_saving_replaces_all_of_an_earlier_head(tmp_path: Path) -> None:
    folder = saved_in(medusa_head("own"), tmp_path / "head", CheckpointMetadata(measured=MEASURED))
    stale = (
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "adapter/adapter_config.json",
        "custom_generate/__pycache__/generate.cpython-311.pyc",
        ".config.json.12.partial",
    )
    write_files(folder, dict.fromkeys(stale, "old"))
    second = medusa_head("shared", seed=1)
    saved_in(second, folder)
    assert_same_head(load_head(folder)[0], second)
    assert snapshot(tmp_path).keys() == FILES
    assert not (folder / "adapter").exists()


FOREIGN = {
    "somebody's notes": {"notes.txt": "mine"},
    "a folder of data": {"data/rows.jsonl": "{}"},
    "a model's files": {"config.json": '{"model_type": "llama"}', "model.safetensors": "weights"},
    "weights alone": {"model.safetensors": "weights"},
    "a broken config": {"config.json": '{"headstart": ', "README.md": "text"},
    "a hidden file": {".env": "KEY=1"},
}


LEFT_BY_A_KILL = ("a model's files", "weights alone", "a broken config")
"""What a killed save may have left in a `.partial` folder."""
PLACES = [
    (place, foreign)
    for place in ("head", "head.partial", "head.replaced")
    for foreign in FOREIGN
    if place != "head.partial" or foreign not in LEFT_BY_A_KILL
]


@pytest.mark.parametrize(("place", "foreign"), PLACES)
def test_a_folder_of_something_else_is_not_replaced(
    foreign: str, place: str, tmp_path: Path
) -> None:
    write_files(tmp_path / place, FOREIGN[foreign])
    before = snapshot(tmp_path)
    with refused("headstart", sorted(FOREIGN[foreign])[0]):
        saved_in(medusa_head(), tmp_path / "head")
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    "name", ["notes.txt", "adapter/vectors.bin", "custom_generate/mine.py", "empty"]
)
def test_a_file_of_the_users_in_a_heads_folder_is_not_deleted_with_it(
    name: str, tmp_path: Path
) -> None:
    folder = saved_in(medusa_head(), tmp_path / "head")
    if name == "empty":
        (folder / name).mkdir()
    else:
        write_files(folder, {name: "mine"})
    before = snapshot(tmp_path)
    with refused(name):
        save_head(medusa_head(seed=1), folder)
    assert snapshot(tmp_path) == before and (folder / name).exists()


def test_a_link_to_a_folder_stays_a_link_and_what_it_leads_to_is_checked(tmp_path: Path) -> None:
    write_files(tmp_path / "precious", {"thesis.tex": "text"})
    (tmp_path / "head").symlink_to(tmp_path / "precious")
    with refused("thesis.tex"):
        saved_in(medusa_head(), tmp_path / "head")
    (tmp_path / "precious" / "thesis.tex").unlink()
    saved_in(medusa_head(), tmp_path / "head")
    assert (tmp_path / "head").is_symlink() and (tmp_path / "precious" / "config.json").is_file()
    (tmp_path / "file").write_text("text")
    with refused(str(tmp_path / "file")):
        saved_in(medusa_head(), tmp_path / "file")


# The model card.


def card_of(target: str, folder: Path) -> str:
    """The model card of a head for a target of a name."""
    head = build_head("medusa", OPTIONS["shared"], replace(INFO, name=target))
    return (saved_in(head, folder) / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["package:another", "/tmp/my models/{final}: v2", "C:\\models\\x"])
def test_the_card_of_any_target_has_readable_front_matter(name: str, tmp_path: Path) -> None:
    _, block, _ = card_of(name, tmp_path / "head").split("---\n", 2)
    front = yaml.safe_load(block)
    # which must be on the Hub
    assert front["library_name"] == "headstart" and "base_model" not in front


@pytest.mark.parametrize(
    ("target", "served"),
    [
        ("made-up/target", "made-up/target"),
        ("/models/mine", "/models/mine"),
        ("package:another", "MODEL"),
        ("/models/x.Q4_K_M.GGUF", "MODEL"),
    ],
)
def test_the_card_tells_a_server_to_load_what_servers_load(
    target: str, served: str, tmp_path: Path
) -> None:
    card = card_of(target, tmp_path / "head")
    assert f"vllm serve {served} \\\n" in card
    assert ("MODEL" in card) == (served == "MODEL")


# Strict loading.


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.complex64], ids=str)
def test_weights_that_are_no_real_numbers_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = saved_in(medusa_head(), tmp_path / "head")
    wrong = {"lm_heads.1.weight": torch.zeros(50, 16, dtype=dtype)}
    change_weights(folder, lambda tensors: tensors.update(wrong))
    with refused(f"model.safetensors 'lm_heads.1.weight' {dtype}"):
        load_head(folder)


def test_a_target_that_does_not_fit_is_refused_with_every_difference(tmp_path: Path) -> None:
    folder = saved_in(medusa_head(), tmp_path / "head")
    other = replace(INFO, name="other", hidden_size=17, vocab_size=51, num_layers=4)
    with refused(f"'{folder}' made-up/target 'other' hidden 16 17 vocab 50 51 layers 3 4"):
        load_head(folder, other)
    for dimension in ("hidden_size", "vocab_size", "num_layers"):
        with refused(dimension.replace("_", " "), "5"):
            load_head(folder, replace(INFO, **{dimension: 5}))
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
    folder = saved_in(medusa_head(), tmp_path / "head")
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    with refused(str(folder), name):
        load_head(folder)


@pytest.mark.parametrize(
    "source", ["nobody/no-such-head", "no/such/folder/at all", "../nowhere", "head.safetensors"]
)
def test_a_source_that_cannot_be_reached_is_refused(source: str) -> None:
    with refused(f"'{source}'"):
        load_head(source)


# A save that fails.


def no_space(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def no_second_rename(path: Path, to: Path, rename: Any = Path.rename) -> object:
    """The folder that is there already can be moved away, and no other to its place."""
    return no_space() if path.name.endswith(".partial") else rename(path, to)


@pytest.mark.parametrize(
    ("owner", "part", "failing"),
    [
        (checkpoint, "save_torch_state_dict", no_space),
        (checkpoint, "model_card", no_space),
        (Path, "write_text", no_space),
        (Path, "rename", no_space),
        (Path, "rename", no_second_rename),
    ],
)
@pytest.mark.parametrize("there_before", [True, False])
def test_a_save_that_fails_in_any_part_leaves_what_was_there(
    owner: Any, part: str, failing: Any, there_before: bool, tmp_path: Path, monkeypatch: Any
) -> None:
    folder = tmp_path / "head"
    if there_before:
        saved_in(medusa_head(seed=1), folder)
    before = snapshot(tmp_path)
    second = medusa_head(seed=2)
    with monkeypatch.context() as broken:
        broken.setattr(owner, part, failing)
        with refused("space", error=OSError):
            saved_in(second, folder)
    assert snapshot(tmp_path) == before
    assert_same_head(load_head(saved_in(second, folder))[0], second)


def test_what_a_killed_save_left_behind_is_no_hindrance(tmp_path: Path) -> None:
    """SIGKILL leaves a `.partial` folder: it is not taken for a head, and the next save clears it
    away."""
    first = medusa_head(seed=1)
    second = medusa_head(seed=2)
    folder = saved_in(first, tmp_path / "head")
    left = tmp_path / "head.partial"
    halves = ("model.safetensors", "model-00001-of-00002.safetensors")
    write_files(left, dict.fromkeys(halves, "half"))
    assert_same_head(load_head(folder)[0], first)
    with refused(str(left)):
        load_head(left)
    saved_in(second, folder)
    assert_same_head(load_head(folder)[0], second)
    assert snapshot(tmp_path).keys() == FILES and not left.exists()


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
        (
            lambda section: section["target"].update(hidden_size=2**31 - 1, vocab_size=2**31),
            "medusa",
        ),
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
    folder = saved_in(medusa_head(), tmp_path / "head")
    with changed_json(folder / "config.json") as config:
        change(config["headstart"])
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
    folder = saved_in(medusa_head("truncated"), tmp_path / "head")
    tokens = [0, *ids, 40, 41, 42, 43, 44, 45]
    change_weights(folder, lambda tensors: tensors.update(token_map=torch.tensor(tokens)))
    with refused("token_map 50"):
        load_head(folder)
