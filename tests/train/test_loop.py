"""A run on a tiny target: it learns, it tells the truth, and it survives being killed."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest
import torch
import yaml
from helpers import split_examples
from messages import refused
from runs import (
    Killed,
    checkpoints_of,
    evaluations_of,
    last_bytes,
    last_weights,
    log_of,
    same_tensors,
    write_config,
)
from safetensors.torch import load_file

from headstart.heads import MedusaHead, build_head
from headstart.heads.checkpoints.files import json_ready
from headstart.heads.checkpoints.save_load import load_head
from headstart.heads.dflash.head import AnchorView
from headstart.inference import SpeculativeLM, Stats, Target, load_tokenizer, tree_policy
from headstart.scripts.command_line import options as options_of
from headstart.stopping import Stopped
from headstart.train import evaluate, inputs, loop
from headstart.train.config import FeaturesConfig, ObjectiveConfig, TrainConfig
from headstart.train.data.batches import collate
from headstart.train.data.conversations import read_conversations
from headstart.train.data.token_cache import count_answer_tokens
from headstart.train.evaluate import prompt_of
from headstart.train.features import online as features
from headstart.train.features.online import online_features
from headstart.train.loop import train

STEPS = 48


@pytest.fixture
def options(run_options, tmp_path):
    return run_options(tmp_path / "run", STEPS)


@pytest.fixture(scope="module")
def undisturbed(run_options, tmp_path_factory):
    """The folder of a run of about ten epochs that nothing happened to."""
    return train(run_options(tmp_path_factory.mktemp("undisturbed"), STEPS))


def contents(folder):
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def same_outcome(folder, undisturbed):
    """The same weights to the last bit, the same losses, and the same acceptance."""
    assert last_bytes(folder) == last_bytes(undisturbed)
    assert (folder / "best" / "model.safetensors").read_bytes() == (
        undisturbed / "best" / "model.safetensors"
    ).read_bytes()

    def timeless(rows):
        return [
            {name: value for name, value in row.items() if "second" not in name and name != "costs"}
            for row in rows
        ]

    # repr: NaN equals NaN
    assert repr(timeless(log_of(folder))) == repr(timeless(log_of(undisturbed)))
    return True


def test_a_forward_leaves_no_keys_and_values_to_the_next(options, monkeypatch):
    """Neither to that of the same step, nor to an evaluation, nor to the step that is logged."""
    alive = weakref.WeakSet()
    forwards = []
    init = AnchorView.__init__

    def made(view, *given):
        forwards.append(len(alive))
        alive.add(view)
        init(view, *given)

    monkeypatch.setattr(AnchorView, "__init__", made)
    head = {"type": "dflash", "block_size": 3, "mask_token_id": 1, "feature_layers": [0]}
    steps = dataclasses.replace(options.loop, max_steps=2, micro_batch=1, log_every=8)
    train(dataclasses.replace(options, head=head, loop=steps))
    assert len(forwards) > 2 * 2 and set(forwards) == {0}


@pytest.mark.versions
def test_a_runs_folder_holds_its_options_its_log_and_heads_that_load(undisturbed, options):
    assert (
        yaml.safe_load((undisturbed / "config.yaml").read_text())["optim"]["lr"] == options.optim.lr
    )
    rows = log_of(undisturbed)
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, STEPS + 1))
    assert [row["step"] for row in rows if "eval" in row] == [20, 40, STEPS]
    for name in ("best", "last"):
        head, metadata = load_head(undisturbed / name)
        assert head.max_depth == 2
        trees = metadata.measured["trees"]
        assert {tree: row["nodes"] for tree, row in trees.items()} == {
            "chain": 3,
            "static": 6,
            "dynamic": 6,
        }
        best = max(trees, key=lambda tree: trees[tree]["acceptance_length"])
        assert tree_policy(metadata.tree).size == trees[best]["nodes"]
        assert metadata.training["config"]["optim"]["lr"] == options.optim.lr
        assert metadata.training["versions"]["torch"] == importlib.metadata.version("torch")
        assert {"hardware", "git_revision"} <= metadata.training.keys()
        assert (undisturbed / name / "README.md").is_file()


def test_the_recipe_on_a_heads_card_is_the_run_again(undisturbed, tmp_path):
    for name in ("best", "last"):
        card = (Path(undisturbed) / name / "README.md").read_text(encoding="utf-8")
        (recipe,) = re.findall(r"```yaml\n(.*?)```", card, re.DOTALL)
        path = tmp_path / f"{name}.yaml"
        path.write_text(recipe, encoding="utf-8")
        again = options_of(TrainConfig, "train", "", ["--config", str(path)])
        assert json_ready(dataclasses.asdict(again)) == yaml.safe_load(
            (Path(undisturbed) / "config.yaml").read_text()
        )


def test_the_best_head_is_the_one_with_the_longest_acceptance(undisturbed):
    rows = {row["step"]: row for row in log_of(undisturbed) if "eval" in row}
    lengths = {
        step: max(tree["acceptance_length"] for tree in row["eval"].values())
        for step, row in rows.items()
    }
    _, metadata = load_head(undisturbed / "best")
    assert lengths[20] < max(lengths.values())  # it got better, so the first was replaced
    assert lengths[metadata.training["step"]] == max(lengths.values())
    assert max(row["acceptance_length"] for row in metadata.measured["trees"].values()) == max(
        lengths.values()
    )
    assert metadata.tree == rows[metadata.training["step"]]["tree"]


@pytest.mark.parametrize("place", ["auto", "chain:2", "dynamic:6:2:2"])
def test_the_logged_acceptance_is_what_decoding_gives(undisturbed, options, place):
    target = Target.from_pretrained(options.target, torch.float32)
    _, held_out = split_examples(
        read_conversations(options.data.sources[0]), options, target, load_tokenizer(options.target)
    )
    lm = SpeculativeLM.from_pretrained(
        target, head=undisturbed / "last", tree=place, adaptive=False
    )
    alone = [
        lm.generate(prompt_of(example)[None], max_new_tokens=8, do_sample=False).stats
        for example in held_out
    ]
    found = log_of(undisturbed)[-1]["eval"]
    best = max(found, key=lambda tree: found[tree]["acceptance_length"])
    stats, row = Stats.merged(alone), found[best if place == "auto" else place.partition(":")[0]]
    assert row["acceptance_length"] == stats.acceptance_length
    assert row["rounds"] == stats.rounds
    assert repr(row["acceptance_rate_by_depth"]) == repr(stats.acceptance_rate_by_depth)
    assert stats.acceptance_length > 1.3  # it learned something, so there is something to compare


def test_the_gradient_is_that_of_the_mean_over_answer_tokens(options, changed):
    folder = train(changed(options, loop={"batch_size": 100, "max_steps": 1}))
    target = Target.from_pretrained(options.target, torch.float32)
    training, _ = split_examples(
        read_conversations(options.data.sources[0]), options, target, load_tokenizer(options.target)
    )
    head = build_head("medusa", {"num_heads": 2}, target.info)
    head.initialize(target.modules, count_answer_tokens(training, target.info.vocab_size))
    tokens = sum(sum(example.loss_mask) for example in training)
    (head(online_features(target, head, collate(training))).loss / tokens).backward()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in head.parameters()])
    assert log_of(folder)[0]["gradient_norm"] == pytest.approx(float(norm), rel=1e-4)


@pytest.mark.parametrize("size", [3, 7, None])
def test_the_coverage_is_the_draft_vocabularys_share_of_the_answers(options, changed, capsys, size):
    head = {"type": "medusa", "num_heads": 2, "draft_vocab_size": size}
    folder = train(changed(options, head=head, loop={"max_steps": 1}))
    loaded, metadata = load_head(folder / "last")
    target, tokenizer = (
        Target.from_pretrained(options.target, torch.float32),
        load_tokenizer(options.target),
    )
    training, _ = split_examples(
        read_conversations(options.data.sources[0]), options, target, tokenizer
    )
    said = [
        t
        for example in training
        for t, own in zip(example.tokens, example.loss_mask, strict=True)
        if own
    ]
    drafted = set(range(target.info.vocab_size)) if size is None else set(loaded.token_map.tolist())
    covered = sum(token in drafted for token in said) / len(said)
    assert metadata.measured["coverage"] == pytest.approx(covered)
    assert f"its {size or 258} tokens cover {covered:.2%} of the answers" in capsys.readouterr().out
    assert (covered == 1) == (size is None or len(set(said)) <= size)


def test_a_draft_vocabulary_shrinks_to_the_tokens_of_the_answers(options, changed, capsys):
    config = changed(
        options,
        head={"type": "medusa", "num_heads": 2, "draft_vocab_size": 200},
        data={"held_out": 0.05},
        loop={"max_steps": 1},
    )
    folder = train(config)
    said = capsys.readouterr().out
    loaded, _ = load_head(folder / "last")
    # The answers count to 7, end with a token of their own, and have spaces between numbers.
    assert sorted(loaded.token_map.tolist()) == sorted(
        [*load_tokenizer(options.target).encode("1234567 "), 257]
    )
    assert "head.draft_vocab_size is 9 instead of 200" in " ".join(said.split())
    # The same options are those of the run in the folder.
    assert train(config) == folder
    # A head that starts from another may draft tokens that these answers lack.
    wider = changed(config, output=f"{folder}-wider", init_from=str(folder / "last"))
    assert load_head(train(wider) / "last")[0].draft_vocab_size == 200


@pytest.mark.parametrize("word", ["float32", "bfloat16", "float16"])
def test_heads_are_saved_in_the_format_that_was_asked_for_and_measured_in_it(
    options, changed, monkeypatch, word
):
    measured, original = [], loop.evaluate

    def evaluate(target, head, *rest):
        measured.append(copy.deepcopy(head).to(target.dtype).state_dict())
        return original(target, head, *rest)

    monkeypatch.setattr(loop, "evaluate", evaluate)
    folder = train(changed(options, loop={"max_steps": 2, "save_dtype": word}))
    exact = load_file(folder / "checkpoints" / "step-00000002" / "model.safetensors")
    saved, dtype = load_file(folder / "last" / "model.safetensors"), getattr(torch, word)
    assert json.loads((folder / "last" / "config.json").read_text())["torch_dtype"] == word
    assert saved.keys() == exact.keys() == measured[-1].keys()
    for name, tensor in saved.items():
        assert exact[name].dtype == torch.float32  # nothing is lost between two starts
        assert tensor.dtype == dtype and torch.equal(tensor, exact[name].to(dtype))
        assert torch.equal(tensor.float(), measured[-1][name])


def test_only_the_newest_checkpoints_are_kept(undisturbed):
    assert checkpoints_of(undisturbed) == ["step-00000035", "step-00000042", f"step-{STEPS:08d}"]


def test_a_finished_run_returns_at_once_even_if_asked_to_log_otherwise(
    undisturbed, options, monkeypatch, changed
):
    monkeypatch.setattr(Target, "from_pretrained", lambda *_: pytest.fail("loaded a model"))
    before = contents(undisturbed)
    assert (
        train(changed(options, output=str(undisturbed), loop={"log_every": 5, "keep": 1}))
        == undisturbed
    )
    assert contents(undisturbed) == before


def test_a_head_that_does_not_fit_is_refused_before_data_and_target_are_loaded(
    options, changed, monkeypatch
):
    for loader in ("load_data", "load_target"):
        monkeypatch.setattr(inputs, loader, lambda *_: pytest.fail("loaded"))
    head = {"type": "eagle3", "feature_layers": [0, 9, 1]}
    with refused("feature_layers [0, 9, 1] out of range 2 blocks"):
        train(changed(options, head=head))
    with pytest.raises(pytest.fail.Exception):  # one that fits goes on
        train(options)


@pytest.mark.parametrize(
    ("name", "change", "before", "now"),
    [
        ("optim.lr", {"optim": {"lr": 0.5}}, "0.003", "0.5"),
        ("loop.batch_size", {"loop": {"batch_size": 3}}, "4", "3"),
        ("head.num_heads", {"head": {"type": "medusa", "num_heads": 5}}, "2", "5"),
        ("head.bias", {"head": {"type": "medusa", "num_heads": 2, "bias": False}}, "None", "False"),
        ("objective.decay", {"objective": ObjectiveConfig(decay=0.25)}, "None", "0.25"),
    ],
)
def test_a_folder_with_a_run_of_other_options_is_refused(
    undisturbed, options, name, change, before, now, changed
):
    config = changed(options, output=str(undisturbed))
    head = change.pop("head", None)
    config = dataclasses.replace(config, head=head) if head else changed(config, **change)
    with refused(name, before, now):
        train(config)


def test_a_finished_run_that_is_asked_for_more_steps_says_how(
    undisturbed, options, changed, tmp_path
):
    more = changed(options, output=str(undisturbed), loop={"max_steps": STEPS + 4})
    with refused(f"max_steps = {STEPS} {STEPS + 4} init_from '{undisturbed / 'last'}'"):
        train(more)
    # The advice can be followed.
    further = changed(
        more,
        output=str(tmp_path / "more"),
        init_from=str(undisturbed / "last"),
        loop={"max_steps": 1},
    )
    (row,) = [row for row in log_of(train(further)) if "loss" in row]
    assert row["loss"][0] < log_of(undisturbed)[0]["loss"][0]


def command(config, tmp_path):
    """The run as a command of its own."""
    path = write_config(config, tmp_path / "options.yaml")
    return [sys.executable, "-m", "headstart.scripts", "train", "--config", path]


def finish(arguments):
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_killed_at_a_random_moment_and_started_again_a_run_ends_with_the_same_weights(
    options, undisturbed, wait_for, steps_logged, tmp_path
):
    folder, moment = Path(options.output), random.randint(8, 40)
    arguments = command(options, tmp_path)
    with subprocess.Popen(arguments, stdout=subprocess.DEVNULL) as process:
        wait_for(process, lambda: steps_logged(folder) >= moment, f"step {moment}")
        time.sleep(random.random() * 0.05)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert not (folder / "last").exists()
    train(options)
    assert same_outcome(folder, undisturbed), f"killed after {moment} lines of the log"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["online", "auto", "cached"])
def test_killed_twenty_times_a_run_ends_with_the_same_weights(
    run_options, tmp_path, mode, changed, wait_for, steps_logged
):
    """At any moment from the first shard of states to the last evaluation; some while a file is
    half there."""
    random.seed(mode)
    folder = tmp_path / "run"
    config = changed(run_options(folder, 220), loop={"save_every": 3, "eval_every": 60})
    config = dataclasses.replace(config, features=FeaturesConfig(mode=mode, format="float32"))
    whole = train(dataclasses.replace(config, output=str(tmp_path / "undisturbed")))
    arguments, kills, while_writing = command(config, tmp_path), 0, 0
    while kills < 20:
        already, more = steps_logged(folder), random.randint(0, 11)
        with subprocess.Popen(arguments, stdout=subprocess.DEVNULL) as process:
            if kills % 5 == 4:
                wait_for(process, lambda: list(folder.rglob("*.partial")), "half-written file")
            elif kills < 2:
                wait_for(process, folder.exists, "folder")
                time.sleep(random.random())
            else:
                wait_for(process, lambda seen=already + more: steps_logged(folder) >= seen, "step")
                time.sleep(random.random() * 0.05)
            process.kill()
        kills += 1
        while_writing += bool(list(folder.rglob("*.partial")))
    assert while_writing > 0 and not (folder / "last").exists()
    finish(arguments)
    assert last_bytes(folder) == last_bytes(whole)
    assert (folder / "best" / "model.safetensors").read_bytes() == (
        whole / "best" / "model.safetensors"
    ).read_bytes()


def test_killed_while_a_checkpoint_is_written_a_run_goes_on_from_the_one_before(
    options, undisturbed, tmp_path, changed, wait_for, steps_logged
):
    folder = Path(options.output)

    def writing():
        return steps_logged(folder) >= 10 and any((folder / "checkpoints").glob("*.partial"))

    # most of the time a checkpoint is being written
    busy = changed(options, loop={"save_every": 1})
    with subprocess.Popen(command(busy, tmp_path), stdout=subprocess.DEVNULL) as process:
        wait_for(process, writing, "a checkpoint")
        process.kill()
    train(options)
    assert same_outcome(folder, undisturbed)


def test_short_batches_are_padded_until_every_depth_predicts_a_token(options, monkeypatch, changed):
    seen = []
    original = features.online_features
    monkeypatch.setattr(
        features,
        "online_features",
        lambda *given: seen.append(given[2].tokens_BT.shape) or original(*given),
    )
    head = {"type": "medusa", "num_heads": 45}  # more than the conversations have tokens
    train(changed(options, head=head, loop={"max_steps": 1, "eval_every": 0}))
    assert max(width for _, width in seen) == 47


def test_a_run_that_began_before_there_were_these_options_goes_on(options, undisturbed, stopped_at):
    stopped_at(16, options)
    path = Path(options.output) / "config.yaml"
    before = yaml.safe_load(path.read_text())
    for name in ("held_out_limit", "cache", "num_proc", "workers"):
        del before["data"][name]
    for name in ("batch_tokens", "micro_tokens"):
        del before["loop"][name]
    # These had other names.
    del before["tracking"]
    before["target_dtype"] = before.pop("dtype")
    before["eval"]["new_tokens"] = before["eval"].pop("max_new_tokens")
    path.write_text(yaml.safe_dump(before))
    assert same_outcome(train(options), undisturbed)


def test_a_half_written_checkpoint_is_passed_over(options, undisturbed, stopped_at):
    folder = Path(options.output)
    stopped_at(16, options)
    partial = folder / "checkpoints" / "step-00000021.partial"
    partial.mkdir()
    (partial / "model.safetensors").write_bytes(b"half")
    with (folder / "log.jsonl").open("a", encoding="utf-8") as file:
        # later than the checkpoint, and half a line
        file.write('{"step": 17, "loss": [1.0, 1.0]}\n{"step": 18, "lo')
    train(options)
    assert same_outcome(folder, undisturbed)
    assert not partial.exists()


@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_killed_while_the_options_are_written_down_a_run_can_start_again(
    options, undisturbed, monkeypatch, when
):
    """Found by killing at each moment of the first write to the run's folder."""
    folder, original = Path(options.output), Path.write_text

    def write_text(path, text, *arguments, **settings):
        if folder not in path.parents:
            return original(path, text, *arguments, **settings)
        if when == "during":
            original(path, text[: len(text) // 2], *arguments, **settings)
        if when == "after":
            original(path, text, *arguments, **settings)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", write_text)
        with pytest.raises(Killed):
            train(options)
    train(options)
    assert last_bytes(folder) == last_bytes(undisturbed)


@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_at_the_last_evaluation_a_run_ends_where_it_would_have(
    options, undisturbed, monkeypatch, when
):
    folder, original = Path(options.output), loop.MetricsLogger.log_evaluation

    def log_evaluation(self, *given):
        if self.progress.step == STEPS:
            raise Killed
        return original(self, *given)

    def killed(folder):
        raise Killed

    with monkeypatch.context() as patch:
        if when == "before":
            patch.setattr(loop.MetricsLogger, "log_evaluation", log_evaluation)
        else:  # the first that happens once the last head is saved
            patch.setattr(loop, "write_report", killed)
        with pytest.raises(Killed):
            train(options)
    train(options)
    assert same_outcome(folder, undisturbed)


def test_a_best_head_is_left_even_if_no_held_out_prompt_needed_a_round(
    options, monkeypatch, changed
):
    """Its figures, for which nothing was measured, are null: NaN is no JSON."""
    original = loop.evaluate

    def evaluate(*arguments):
        found = original(*arguments)
        return dataclasses.replace(found, trees={name: Stats([[]], 2) for name in found.trees})

    monkeypatch.setattr(loop, "evaluate", evaluate)
    folder = train(changed(options, loop={"max_steps": 2}))
    load_head(folder / "best")
    texts = [
        (folder / "last" / "config.json").read_text(),
        *(folder / "log.jsonl").read_text().splitlines(),
    ]
    for text in texts:
        json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


def asks(original, at):
    """A function that asks to stop in its `at`-th call, when its work is done but for the
    return."""
    calls = []

    def asking(*given, **named):
        found = original(*given, **named)
        calls.append(found)
        for parameter in given[0].module.parameters() if isinstance(given[0], loop.Trainer) else ():
            parameter.grad += 1e-3 * torch.rand_like(parameter)  # as if the head drew noise
        if len(calls) == at:
            signal.raise_signal(signal.SIGTERM)
        return found

    return asking


@pytest.mark.parametrize(
    ("name", "at", "step"),
    [("gradients", 1, 1), ("gradients", 5, 5), ("evaluate", 1, 4), ("evaluate", 2, 8)],
)
def test_a_run_stops_after_a_step_or_inside_an_evaluation_and_ends_as_if_it_had_not(
    options, tmp_path, monkeypatch, changed, name, at, step
):
    short = changed(options, loop={"max_steps": 10, "eval_every": 4, "save_every": 3})
    owner = loop.Trainer if name == "gradients" else loop
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, asks(original, at=0))
    whole = train(changed(short, output=str(tmp_path / "whole")))
    monkeypatch.setattr(owner, name, asks(original, at))
    with pytest.raises(Stopped, match=f"stopped at step {step} of 10"):
        train(short)
    monkeypatch.setattr(owner, name, asks(original, at=0))
    folder = train(short)
    first, second = last_weights(whole), last_weights(folder)
    assert same_tensors(second, first)
    evaluations = evaluations_of(whole)
    assert [row["step"] for row in evaluations] == [4, 8, 10]
    assert evaluations_of(folder) == evaluations


def test_what_would_end_the_first_evaluation_ends_the_run_before_its_first_step(
    options, monkeypatch, changed
):
    short = changed(options, loop={"max_steps": 2, "eval_every": 0, "save_every": 0})
    with monkeypatch.context() as patch:
        patch.setattr(MedusaHead, "expand", refuse)
        with pytest.raises(ValueError, match="no drafts"):
            train(short)
    folder = Path(short.output)
    assert not (folder / "log.jsonl").exists() and not list(folder.glob("checkpoints/*"))
    tried = []
    monkeypatch.setattr(loop, "try_evaluation", lambda *given: tried.append(given))
    train(short)
    assert len(tried) == 1


def refuse(*given):
    raise ValueError("no drafts")


def test_a_run_whose_last_evaluation_was_stopped_makes_it_again(options, monkeypatch, changed):
    short = changed(options, loop={"max_steps": 2, "eval_every": 0, "save_every": 0})
    original = evaluate.sums_of
    with monkeypatch.context() as patch:
        patch.setattr(
            evaluate,
            "sums_of",
            lambda *given: signal.raise_signal(signal.SIGTERM) or original(*given),
        )
        with pytest.raises(Stopped, match=r"stopped in the last evaluation, .*begins again"):
            train(short)
    folder = Path(short.output)
    unmeasured = load_file(folder / "best" / "model.safetensors")
    assert not (folder / "last").exists() and not (folder / "report.md").exists()
    assert (train(short) / "report.md").exists()
    assert same_tensors(unmeasured, last_weights(folder))


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_a_token_budget_are_the_same_steps_in_any_number_of_forwards(
    options, tmp_path, changed, workers
):
    found = []
    for number, micro_tokens in enumerate((None, 60)):
        cut = {"batch_tokens": 300, "micro_tokens": micro_tokens, "max_steps": 8, "eval_every": 0}
        data = {"max_length": 200, "workers": workers if number else 0}
        folder = train(changed(options, output=str(tmp_path / str(number)), loop=cut, data=data))
        found.append([row for row in log_of(folder) if "loss" in row])
    assert len(found[0]) == 8
    for one, other in zip(*found, strict=True):
        for name in ("loss", "gradient_norm"):
            assert one[name] == pytest.approx(other[name], rel=1e-5)


def test_a_second_start_tokenizes_nothing_and_sigterm_to_the_group_stops_a_run_with_workers(
    options, undisturbed, tmp_path, changed, wait_for, steps_logged
):
    folder = Path(options.output)
    read_ahead = changed(options, data={"workers": 2}, loop={"save_every": 0})
    arguments = command(read_ahead, tmp_path)
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        wait_for(process, lambda: steps_logged(folder) >= 9, "step 9")
        os.killpg(process.pid, signal.SIGTERM)  # the workers, too
        said, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    (checkpoint,) = checkpoints_of(folder)
    assert f"stopped at step {int(checkpoint.removeprefix('step-'))} of {STEPS}" in said
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "headstart.train.data.token_cache.whole_sequences",
            lambda *_: pytest.fail("tokenized again"),
        )
        train(changed(options, data={"workers": 1}))
    assert same_outcome(folder, undisturbed)


def test_a_step_waits_for_the_device_once(options, changed, monkeypatch):
    """Whatever the loop itself asks of tensors; losses and optimizers are counted where they are
    written."""
    waits = []
    for name in ("__bool__", "__float__", "__int__", "item", "tolist"):
        original = getattr(torch.Tensor, name)

        def asked(self, original=original, name=name):
            if Path(sys._getframe(1).f_code.co_filename).name in (
                "loop.py",
                "online.py",
                "engines.py",
            ):
                waits.append((current[-1], name))
            return original(self)

        monkeypatch.setattr(torch.Tensor, name, asked)
    current, stepping = [None], loop.MetricsLogger.start_step
    monkeypatch.setattr(
        loop.MetricsLogger,
        "start_step",
        lambda self: current.append(self.progress.step) or stepping(self),
    )
    ended = loop.MetricsLogger.end_step
    monkeypatch.setattr(
        loop.MetricsLogger,
        "end_step",
        lambda self, *given: current.append(None) or ended(self, *given),
    )
    train(
        changed(options, loop={"max_steps": 4, "eval_every": 0, "save_every": 0, "micro_batch": 2})
    )
    assert [wait for wait in waits if wait[0] is not None] == [
        (step, "tolist") for step in range(4)
    ]
