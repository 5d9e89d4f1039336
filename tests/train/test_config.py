"""Every refusal names the option and the value that was given."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import textwrap
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict
from messages import refused, warned

import headstart.train
from headstart.addons.serve.options import ServedTrainConfig
from headstart.files import cache_folder
from headstart.inference.text.prompt_files import read_prompts
from headstart.scripts.bench import BenchConfig
from headstart.scripts.command_line import options
from headstart.scripts.generate import GenerateConfig
from headstart.scripts.tree import TreeConfig
from headstart.train.config import (
    AdapterConfig,
    DataConfig,
    EvalConfig,
    FeaturesConfig,
    LoopConfig,
    OptimConfig,
    SelfMadeConfig,
    TrainConfig,
)

GROUPS = {
    "data": DataConfig,
    "optim": OptimConfig,
    "loop": LoopConfig,
    "features": FeaturesConfig,
    "eval": EvalConfig,
    "adapter": AdapterConfig,
}
VALID = {
    TrainConfig: {"target": "t", "output": "o", "data.sources": ["d"]},
    SelfMadeConfig: {"target": "t", "output": "o"},
    BenchConfig: {"target": "t", "head": "h", "prompts": ["p"]},
    TreeConfig: {"target": "t", "head": "h", "prompts": ["p"]},
    GenerateConfig: {"target": "t", "prompt": "p"},
}
REFUSED = [
    (TrainConfig, "target", ""),
    (TrainConfig, "output", ""),
    (TrainConfig, "data.sources", []),
    (TrainConfig, "data.held_out", 0.0),
    (TrainConfig, "data.held_out", 1.0),
    (TrainConfig, "features.limit", -0.5),
    (TrainConfig, "data.weights", [1.0, 2.0]),
    (TrainConfig, "data.pack", 100),
    (TrainConfig, "data.max_length", 2),
    (TrainConfig, "data.max_conversations", -1),
    (TrainConfig, "loop.max_steps", 0),
    (TrainConfig, "loop.max_steps", -1),
    (TrainConfig, "loop.epochs", 0.0),
    (TrainConfig, "loop.batch_size", 0),
    (TrainConfig, "loop.micro_batch", 0),
    (TrainConfig, "loop.keep", 0),
    (TrainConfig, "loop.log_every", 0),
    (TrainConfig, "data.workers", -1),
    (TrainConfig, "data.num_proc", 0),
    (TrainConfig, "data.held_out_limit", 0),
    (TrainConfig, "loop.eval_every", -1),
    (TrainConfig, "loop.save_every", -1),
    (TrainConfig, "optim.lr", 0.0),
    (TrainConfig, "optim.lr", -0.5),
    (TrainConfig, "optim.clip", 0.0),
    (TrainConfig, "optim.warmup", 1.5),
    (TrainConfig, "adapter.rank", -1),
    (TrainConfig, "adapter.alpha", 0),
    (TrainConfig, "adapter.head_lr_ratio", 0.0),
    (TrainConfig, "adapter.keep_base", -0.5),
    (TrainConfig, "adapter.modules", []),
    (TrainConfig, "adapter.heads_first", 1.5),
    (TrainConfig, "eval.prompts", 0),
    # the prefill's token alone: no round, no acceptance length
    (TrainConfig, "eval.max_new_tokens", 1),
    (TrainConfig, "eval.conversations", 0),
    (TrainConfig, "eval.nodes", 1),
    (SelfMadeConfig, "target", ""),
    (SelfMadeConfig, "output", ""),
    (SelfMadeConfig, "conversations", 0),
    (SelfMadeConfig, "batch_size", 0),
    (SelfMadeConfig, "max_new_tokens", 0),
    (SelfMadeConfig, "prompt_tokens", 0),
    (SelfMadeConfig, "temperature", -0.5),
    (SelfMadeConfig, "prompt_temperature", -0.25),
    (SelfMadeConfig, "min_distinct", 1.5),
    (SelfMadeConfig, "prompt_min_p", -0.5),
    (BenchConfig, "target", ""),
    (BenchConfig, "head", ""),
    (BenchConfig, "prompts", []),
    (BenchConfig, "limit", -1),
    (BenchConfig, "max_new_tokens", 1),
    (BenchConfig, "temperature", -0.5),
    (TreeConfig, "target", ""),
    (TreeConfig, "head", ""),
    (TreeConfig, "prompts", []),
    (TreeConfig, "limit", 0),
    (TreeConfig, "max_new_tokens", 1),
    (TreeConfig, "nodes", 1),
    (TreeConfig, "temperature", -0.5),
    (GenerateConfig, "target", ""),
    (GenerateConfig, "prompt", ""),
    (GenerateConfig, "max_new_tokens", -1),
    (GenerateConfig, "temperature", -0.5),
    (GenerateConfig, "top_k", -1),
    (GenerateConfig, "top_p", 0.0),
    (GenerateConfig, "top_p", 1.5),
    (TrainConfig, "loop.max_steps", 2.5),
    (TrainConfig, "loop.max_steps", True),
    (TrainConfig, "loop.batch_size", "8"),
    (TrainConfig, "loop.recompute", "false"),
    (TrainConfig, "loop.save_minutes", math.nan),
    (TrainConfig, "optim.lr", math.nan),
    (TrainConfig, "optim.lr", "1e-3"),
    (TrainConfig, "optim.name", "sgd"),
    (TrainConfig, "loop.tracker", "mlflow"),
    (TrainConfig, "loop.profile", "10:12"),
    (SelfMadeConfig, "temperature", math.nan),
    (GenerateConfig, "max_new_tokens", 1.5),
    (GenerateConfig, "adaptive", 1),
]


def built(kind, **changes):
    options = VALID[kind] | changes
    flat = {name: value for name, value in options.items() if "." not in name}
    for group, group_kind in GROUPS.items() if kind is TrainConfig else ():
        start = group + "."
        names = [name for name in options if name.startswith(start)]
        inside = {name.removeprefix(start): options[name] for name in names}
        flat[group] = group_kind(**inside)
    return kind(**flat)


@pytest.mark.parametrize("kind", VALID)
def test_what_is_valid_is_taken_and_cannot_be_changed_afterwards(kind):
    config = built(kind)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, dataclasses.fields(kind)[0].name, "other")


@pytest.mark.parametrize(
    ("kind", "option", "value"), REFUSED, ids=lambda x: getattr(x, "__name__", repr(x))
)
def test_a_value_that_cannot_work_is_refused_by_name(kind, option, value):
    with refused(option) as error:
        built(kind, **{option: value})
    if value not in ("", []):
        given = rf"(?<![\d.]){re.escape(str(value))}(?![\d.]*\d)"
        assert re.search(given, str(error.value)), str(error.value)


def test_float32_arithmetic_on_a_rounded_target_is_refused():
    with refused("loop.precision dtype bfloat16"):
        built(TrainConfig, **{"loop.precision": "float32", "dtype": "bfloat16"})
    for word in ("float32", "fastest", "auto"):
        built(TrainConfig, **{"loop.precision": "float32", "dtype": word})


@pytest.mark.parametrize(
    ("together", "words"),
    [
        ({"adapter.rank": 4, "features.mode": "cached"}, "adapter features.mode cached"),
        ({"adapter.rank": 4, "optim.name": "muon"}, "adapter optim.name muon"),
        ({"loop.batch_tokens": 2000, "loop.micro_batch": 2}, "loop.micro_batch"),
        ({"loop.batch_tokens": 9000, "data.pack": 4096}, "data.pack"),
        ({"loop.batch_tokens": 100}, "loop.batch_tokens 100"),
        ({"loop.micro_tokens": 100}, "loop.micro_tokens loop.batch_tokens"),
    ],
)
def test_options_that_contradict_each_other_are_refused(together, words):
    built(TrainConfig, **{"adapter.rank": 4})
    with refused(words):
        built(TrainConfig, **together)


def test_a_head_without_a_type_is_refused():
    with refused("head.type"):
        built(TrainConfig, head={"num_heads": 2})


def test_python_may_write_options_shorter():
    short = TrainConfig(
        target="t",
        output="o",
        head="medusa",  # type: ignore[arg-type]
        data={"sources": "rows.jsonl"},  # type: ignore[arg-type]
        loop={"max_steps": 3},  # type: ignore[arg-type]
    )
    assert short.head == {"type": "medusa"}
    assert short.data == DataConfig(sources=["rows.jsonl"])
    assert short.loop == LoopConfig(max_steps=3)
    with refused("data mapping 'rows.jsonl'"):
        TrainConfig(target="t", output="o", data="rows.jsonl")  # type: ignore[arg-type]
    with refused("target text") as caught:  # a loaded model fills pages
        TrainConfig(target=list(range(9999)), output="o", data=DataConfig(["f"]))  # type: ignore[arg-type]
    assert len(str(caught.value)) < 300
    with refused("unknown loop.max_step 'max_steps'"):
        TrainConfig(target="t", output="o", loop={"max_step": 3})  # type: ignore[arg-type]


ROWS = [
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]},
    {"messages": [{"role": "user", "content": "1 + 1?", "name": "Ann"}]},
]


def test_rows_and_a_data_set_are_data():
    by_rows = TrainConfig(target="t", output="o", data=DataConfig(sources=ROWS))  # type: ignore[arg-type]
    (file,) = by_rows.data.sources
    assert [json.loads(line) for line in Path(file).read_text().splitlines()] == ROWS
    # Keys that only other rows have are nulls in Arrow, and not in the file.
    data_set = Dataset.from_list(ROWS)
    by_data_set = TrainConfig(target="t", output="o", data={"sources": data_set})  # type: ignore[arg-type]
    (of_data_set,) = by_data_set.data.sources
    assert [json.loads(line) for line in Path(of_data_set).read_text().splitlines()] == ROWS
    mixed = TrainConfig(target="t", output="o", data={"sources": ["f.jsonl", data_set]})  # type: ignore[arg-type]
    assert mixed.data.sources == ["f.jsonl", of_data_set]
    # The same rows are the same file, which a run that resumes finds again.
    before = Path(file).stat().st_mtime_ns
    again = TrainConfig(target="t", output="o", data=DataConfig(sources=ROWS))  # type: ignore[arg-type]
    assert again.data.sources == [file] and Path(file).stat().st_mtime_ns == before
    made = SelfMadeConfig(target="t", output="o", prompts=[{"prompt": "why?"}])  # type: ignore[arg-type]
    assert made.prompts is not None
    assert read_prompts(made.prompts) == [[{"role": "user", "content": "why?"}]]
    for kind in (BenchConfig, TreeConfig):
        assert len(built(kind, prompts=[{"prompt": "why?"}]).prompts) == 1


def test_rows_that_are_not_data_are_refused():
    with refused("1 JSON set"):
        TrainConfig(target="t", output="o", data={"sources": [ROWS[0], {"prompt": {1}}]})  # type: ignore[arg-type]
    splits = DatasetDict({"train": Dataset.from_list(ROWS)})
    for wrong in (splits, 3):
        with refused("data.sources list"):
            TrainConfig(target="t", output="o", data={"sources": wrong})  # type: ignore[arg-type]
    assert not list((cache_folder() / "rows").glob("*.partial"))


def test_the_example_in_the_docstring_runs(monkeypatch):
    example = textwrap.dedent((headstart.train.__doc__ or "").split("\n\n")[1])
    example += "\n" + textwrap.dedent((headstart.train.__doc__ or "").split("\n\n")[2])
    monkeypatch.setattr(headstart.train, "train", lambda config: config, raising=False)
    names: dict[str, object] = {}
    exec(example, names)
    assert names["folder"].data.sources == ["conversations.jsonl"]


@pytest.mark.parametrize(
    "words", [["--head", "medusa"], ["--head=medusa"], ["--head.type", "medusa"]]
)
def test_a_head_is_named_by_its_type(words):
    given = ["--target", "t", "--output", "o", "--data.sources", "d.jsonl", *words]
    assert options(ServedTrainConfig, "train", None, given).head == {"type": "medusa"}
    with_options = ["--head", '{"type": "hydra", "num_heads": 2}']
    whole = options(ServedTrainConfig, "train", None, [*given[: -len(words)], *with_options])
    assert whole.head == {"type": "hydra", "num_heads": 2}


def test_a_head_that_is_not_named_is_eagle3():
    data = DataConfig(sources=["d.jsonl"])
    assert TrainConfig(target="t", output="o", data=data).head == {"type": "eagle3"}


def test_old_names_are_taken_as_keywords_too() -> None:
    with warned("new_tokens max_new_tokens", category=FutureWarning):
        judged = EvalConfig(new_tokens=7)
    with warned("target_dtype dtype", category=FutureWarning):
        config = built(TrainConfig, target_dtype="auto")
    assert (config.dtype, judged.max_new_tokens) == ("auto", 7)
    with pytest.warns(FutureWarning):
        made = built(SelfMadeConfig, answer_tokens=9, target_dtype="auto")
    assert (made.max_new_tokens, made.dtype) == (9, "auto")
    with refused("new_token", error=TypeError):
        EvalConfig(new_token=7)
