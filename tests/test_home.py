"""A leading ~ in a path is the home folder, which only a shell would put there otherwise."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
from helpers import head_for
from messages import refused
from runs import ROOT, write_prompts

from headstart.addons.record import record
from headstart.files import at_home, cache_folder, write_whole
from headstart.heads import load_head, save_head
from headstart.heads.checkpoints.hub import local_folder
from headstart.inference import History, SpeculativeLM, load_tokenizer, tree_policy
from headstart.inference.drafters.datastore import read_datastore, write_datastore
from headstart.inference.drafters.specs import drafter_spec
from headstart.inference.text.prompt_files import read_prompts
from headstart.scripts.command_line import options
from headstart.scripts.generate import GenerateConfig
from headstart.scripts.trace import TraceConfig
from headstart.train.config import DataConfig, FeaturesConfig, TrainConfig

ROW = torch.tensor([[5, 7, 9, 11]])


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The home folder; the working directory, in which no folder named ~ may be made, is another
    one."""
    home = tmp_path / "home"
    here = tmp_path / "here"
    home.mkdir()
    here.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    yield home
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("path", "expanded"),
    [
        ("~/x", "{home}/x"),
        ("~", "{home}"),
        ("a/~/x", "a/~/x"),
        ("~draft.jsonl", "~draft.jsonl"),
        ("", ""),
        ("user/head", "user/head"),
    ],
)
def test_only_a_leading_home_is_one(home, path, expanded):
    assert at_home(path) == expanded.format(home=home)


def test_an_unknown_home_is_refused(monkeypatch):
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    with refused("'~/x' unknown HOME"):
        at_home("~/x")


def test_the_examples_are_found_in_any_folder_unless_it_has_its_own(home):
    prompts = read_prompts("examples/prompts.jsonl")
    assert prompts == read_prompts(ROOT / "examples" / "prompts.jsonl")
    assert local_folder("examples/smollm2-135m-eagle3").samefile(
        ROOT / "examples" / "smollm2-135m-eagle3"
    )
    (home / "examples").mkdir()
    write_prompts(home / "examples" / "prompts.jsonl", ["mine"])
    mine = [[{"role": "user", "content": "mine"}]]
    assert read_prompts("~/examples/prompts.jsonl") == mine
    os.chdir(home)
    assert read_prompts("examples/prompts.jsonl") == mine


def test_options_of_a_file_of_a_command_line_and_of_python(home):
    (home / "states").mkdir()
    (home / "states" / "recorded-1.safetensors").touch()
    (home / "c.yaml").write_text("target: ~/target\ndrafter: history\nprompt: ~/hello\n")
    read = options(GenerateConfig, "generate", "", ["--config=~/c.yaml", "--head=~/head"])
    assert (read.target, read.head) == (f"{home}/target", f"{home}/head")
    assert read.prompt == "~/hello"
    assert TraceConfig(target="~/t", drafter="history", prompt="~").prompt == "~"
    config = TrainConfig(
        target="~/target",
        output="~/run",
        data=DataConfig(sources=["~/a/*.jsonl", "other.jsonl"], cache="~/cache"),
        features=FeaturesConfig(folder="~/states"),
    )
    assert (config.target, config.output) == (f"{home}/target", f"{home}/run")
    assert config.data.sources == [f"{home}/a/*.jsonl", "other.jsonl"]
    assert (config.data.cache, config.features.folder) == (f"{home}/cache", f"{home}/states")
    stored = FeaturesConfig(mode="stored", folder="~/states")
    # stored texts are the source of their tokens
    config = TrainConfig(target="x", output="y", features=stored)
    assert config.data.sources == [f"{home}/states"]


def test_what_python_loads_and_writes(home, target_folder, monkeypatch):
    shutil.copytree(target_folder, home / "target")
    lm = SpeculativeLM.from_pretrained("~/target", compile=False)
    assert lm.target.name == f"{home}/target"
    save_head(head_for(lm.target, "medusa", num_heads=2), "~/head")
    assert str(home / "head") in (home / "head" / "custom_generate" / "generate.py").read_text()
    load_head("~/head")
    lm = SpeculativeLM.from_pretrained(lm.target, head="~/head", compile=False)
    lm.use_head("~/head")
    tokenizer = load_tokenizer("~/target")
    (home / "tree.json").write_text(json.dumps([[0], [0, 0]]))
    assert repr(tree_policy("~/tree.json")) == repr(tree_policy("[[0], [0, 0]]"))
    write_datastore(home / "store", [[1, 2, 3, 4]], "t")
    assert read_datastore("~/store")[1] == "t"
    assert drafter_spec("retrieval:~/store:3") == History(nodes=3, folder=f"{home}/store")
    with record(lm, "~/recorded", tokenizer=tokenizer):
        lm.generate(ROW, max_new_tokens=4, do_sample=False)
    assert list((home / "recorded").glob("recorded-*"))
    assert write_whole("~/page.html", "").parent == home
    monkeypatch.setenv("HEADSTART_CACHE", "~/cache")
    assert cache_folder() == home / "cache"
