"""A run on a tiny target: it learns, it tells the truth, and it survives being killed."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib.metadata
import inspect
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
from helpers import calls_of, split_examples
from messages import lacking, refused
from runs import (
    Killed,
    assert_same_curve,
    assert_same_weights,
    changed,
    checkpoints_of,
    curve_of,
    evaluations_of,
    last_bytes,
    last_weights,
    log_of,
    same_tensors,
    save_options,
    saved_options,
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
from headstart.train.data import token_cache
from headstart.train.data.batches import collate
from headstart.train.data.conversations import read_conversations
from headstart.train.data.token_cache import count_answer_tokens
from headstart.train.evaluate import prompt_of
from headstart.train.features import online as features
from headstart.train.features.online import online_features
from headstart.train.loop import train

STEPS = 48


@pytest.fixture
def many_steps(run_options, tmp_path):
    return run_options(tmp_path / "run", STEPS)


def examples_of(config):
    """The target of a run, what it trains on and what is held out."""
    target = Target.from_pretrained(config.target, torch.float32)
    tokenizer = load_tokenizer(config.target)
    rows = read_conversations(config.data.sources[0])
    return target, *split_examples(rows, config, target, tokenizer)


@pytest.fixture(scope="module")
def undisturbed(run_options, tmp_path_factory):
    """The folder of a run of about ten epochs that nothing happened to."""
    return train(run_options(tmp_path_factory.mktemp("undisturbed"), STEPS))


def assert_same_outcome(folder, undisturbed):
    """The same weights to the last bit, the same losses, and the same acceptance."""
    for name in ("last", "best"):
        assert last_bytes(folder, name) == last_bytes(undisturbed, name)

    def timeless(rows):
        for row in rows:
            yield {name: row[name] for name in row if "second" not in name and name != "costs"}

    # repr: NaN equals NaN
    assert repr([*timeless(log_of(folder))]) == repr([*timeless(log_of(undisturbed))])


def test_a_forward_leaves_no_keys_and_values_to_the_next(short, monkeypatch):
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
    train(changed(short, head=head, loop={"max_steps": 2, "micro_batch": 1, "log_every": 8}))
    assert len(forwards) > 2 * 2 and set(forwards) == {0}


@pytest.mark.versions
def test_a_runs_folder_holds_its_options_its_log_and_heads_that_load(undisturbed, many_steps):
    assert saved_options(undisturbed)["optim"]["lr"] == many_steps.optim.lr
    rows = log_of(undisturbed)
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, STEPS + 1))
    assert [row["step"] for row in rows if "eval" in row] == [20, 40, STEPS]
    assert checkpoints_of(undisturbed) == ["step-00000035", "step-00000042", f"step-{STEPS:08d}"]
    for name in ("best", "last"):
        head, metadata = load_head(undisturbed / name)
        assert head.max_depth == 2
        trees = metadata.measured["trees"]
        nodes = {tree: row["nodes"] for tree, row in trees.items()}
        assert nodes == {"chain": 3, "static": 6, "dynamic": 6}
        best = max(trees, key=lambda tree: trees[tree]["acceptance_length"])
        assert tree_policy(metadata.tree).size == nodes[best]
        assert metadata.training["config"]["optim"]["lr"] == many_steps.optim.lr
        assert metadata.training["versions"]["torch"] == importlib.metadata.version("torch")
        assert {"hardware", "git_revision"} <= metadata.training.keys()


@pytest.mark.parametrize("name", ["best", "last"])
def test_the_recipe_on_a_heads_card_is_the_run_again(undisturbed, tmp_path, name):
    card = (undisturbed / name / "README.md").read_text(encoding="utf-8")
    (recipe,) = re.findall(r"```yaml\n(.*?)```", card, re.DOTALL)
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe, encoding="utf-8")
    again = options_of(TrainConfig, "train", "", ["--config", str(path)])
    assert json_ready(dataclasses.asdict(again)) == saved_options(undisturbed)


def test_the_best_head_is_the_one_with_the_longest_acceptance(undisturbed):
    rows = {row["step"]: row for row in evaluations_of(undisturbed)}
    lengths = {
        step: max(tree["acceptance_length"] for tree in row["eval"].values())
        for step, row in rows.items()
    }
    longest = max(lengths.values())
    assert lengths[20] < longest  # it got better, so the first was replaced
    _, metadata = load_head(undisturbed / "best")
    step = metadata.training["step"]
    assert lengths[step] == longest
    trees = metadata.measured["trees"].values()
    assert max(row["acceptance_length"] for row in trees) == longest
    assert metadata.tree == rows[step]["tree"]


@pytest.mark.parametrize("tree", ["auto", "chain:2", "dynamic:6:2:2"])
def test_the_logged_acceptance_is_what_decoding_gives(undisturbed, many_steps, tree):
    target, _, held_out = examples_of(many_steps)
    head = undisturbed / "last"
    lm = SpeculativeLM.from_pretrained(target, head=head, tree=tree, adaptive=False)
    alone = [
        lm.generate(prompt_of(example)[None], max_new_tokens=8, do_sample=False).stats
        for example in held_out
    ]
    stats = Stats.merged(alone)
    found = evaluations_of(undisturbed)[-1]["eval"]
    best = max(found, key=lambda tree: found[tree]["acceptance_length"])
    row = found[best if tree == "auto" else tree.partition(":")[0]]
    assert row["acceptance_length"] == stats.acceptance_length
    assert row["rounds"] == stats.rounds
    assert repr(row["acceptance_rate_by_depth"]) == repr(stats.acceptance_rate_by_depth)
    assert stats.acceptance_length > 1.3  # it learned something, so there is something to compare


def test_the_gradient_is_that_of_the_mean_over_answer_tokens(short):
    folder = train(changed(short, loop={"batch_size": 100, "max_steps": 1}))
    target, training, _ = examples_of(short)
    head = build_head("medusa", {"num_heads": 2}, target.info)
    head.initialize(target.modules, count_answer_tokens(training, target.info.vocab_size))
    tokens = sum(sum(example.loss_mask) for example in training)
    (head(online_features(target, head, collate(training))).loss / tokens).backward()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in head.parameters()])
    assert log_of(folder)[0]["gradient_norm"] == pytest.approx(float(norm), rel=1e-4)


@pytest.mark.parametrize("size", [3, 7, None])
def test_the_coverage_is_the_draft_vocabularys_share_of_the_answers(short, capsys, size):
    head = {"type": "medusa", "num_heads": 2, "draft_vocab_size": size}
    loaded, metadata = load_head(train(changed(short, head=head, loop={"max_steps": 1})) / "last")
    target, training, _ = examples_of(short)
    counts_V = count_answer_tokens(training, target.info.vocab_size)
    drafted = slice(None) if size is None else loaded.token_map
    covered = float(counts_V[drafted].sum() / counts_V.sum())
    assert metadata.measured["coverage"] == pytest.approx(covered)
    assert not lacking(capsys.readouterr().out, f"{size or 258} {covered:.2%}")
    assert (covered == 1) == (size is None or int((counts_V > 0).sum()) <= size)


def test_a_draft_vocabulary_shrinks_to_the_tokens_of_the_answers(short, capsys):
    head = {"type": "medusa", "num_heads": 2, "draft_vocab_size": 200}
    config = changed(short, head=head, data={"held_out": 0.05}, loop={"max_steps": 1})
    folder = train(config)
    assert not lacking(capsys.readouterr().out, "head.draft_vocab_size 9 200")
    loaded, _ = load_head(folder / "last")
    # The answers count to 7, end with a token of their own, and have spaces between numbers.
    said = [*load_tokenizer(short.target).encode("1234567 "), 257]
    assert sorted(loaded.token_map.tolist()) == sorted(said)
    # The same options are those of the run in the folder.
    assert train(config) == folder
    # A head that starts from another may draft tokens that these answers lack.
    wider = changed(config, output=f"{folder}-wider", init_from=str(folder / "last"))
    assert load_head(train(wider) / "last")[0].draft_vocab_size == 200


@pytest.mark.parametrize("word", ["float32", "bfloat16", "float16"])
def test_heads_are_saved_in_the_format_that_was_asked_for_and_measured_in_it(
    short, monkeypatch, word
):
    measured, original = [], loop.evaluate

    def evaluate(target, head, *rest):
        measured.append(copy.deepcopy(head).to(target.dtype).state_dict())
        return original(target, head, *rest)

    monkeypatch.setattr(loop, "evaluate", evaluate)
    folder = train(changed(short, loop={"max_steps": 2, "save_dtype": word}))
    exact = load_file(folder / "checkpoints" / "step-00000002" / "model.safetensors")
    saved, dtype = last_weights(folder), getattr(torch, word)
    assert json.loads((folder / "last" / "config.json").read_text())["torch_dtype"] == word
    assert saved.keys() == exact.keys() == measured[-1].keys()
    for name, tensor in saved.items():
        assert exact[name].dtype == torch.float32  # nothing is lost between two starts
        assert tensor.dtype == dtype and torch.equal(tensor, exact[name].to(dtype))
        assert torch.equal(tensor.float(), measured[-1][name])


def test_a_finished_run_returns_at_once_even_if_asked_to_log_otherwise(
    undisturbed, many_steps, monkeypatch
):
    def contents():
        files = (path for path in undisturbed.rglob("*") if path.is_file())
        return {path: path.read_bytes() for path in files}

    monkeypatch.setattr(Target, "from_pretrained", lambda *_: pytest.fail("loaded a model"))
    before = contents()
    again = changed(many_steps, output=str(undisturbed), loop={"log_every": 5, "keep": 1})
    assert train(again) == undisturbed
    assert contents() == before


def test_a_head_that_does_not_fit_is_refused_before_data_and_target_are_loaded(short, monkeypatch):
    for loader in ("load_data", "load_target"):
        monkeypatch.setattr(inputs, loader, lambda *_: pytest.fail("loaded"))
    head = {"type": "eagle3", "feature_layers": [0, 9, 1]}
    with refused("feature_layers [0, 9, 1] out of range 2 blocks"):
        train(changed(short, head=head))
    with pytest.raises(pytest.fail.Exception):  # one that fits goes on
        train(short)


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
    undisturbed, many_steps, name, change, before, now
):
    with refused(name, before, now):
        train(changed(many_steps, output=str(undisturbed), **change))


def test_a_finished_run_that_is_asked_for_more_steps_says_how(undisturbed, many_steps, tmp_path):
    more = changed(many_steps, output=str(undisturbed), loop={"max_steps": STEPS + 4})
    head = str(undisturbed / "last")
    with refused(f"max_steps = {STEPS} {STEPS + 4} init_from '{head}'"):
        train(more)
    # The advice can be followed.
    further = changed(more, output=str(tmp_path), init_from=head, loop={"max_steps": 1})
    (first, *_) = curve_of(train(further))[1]
    assert first < curve_of(undisturbed)[1][0]


@contextlib.contextmanager
def running(config, **how):
    """The run as a command of its own."""
    path = write_config(config, Path(config.output).with_suffix(".yaml"))
    arguments = [sys.executable, "-m", "headstart.scripts", "train", "--config", path]
    with subprocess.Popen(arguments, **{"stdout": subprocess.DEVNULL, **how}) as process:
        yield process


@pytest.mark.parametrize("writing", [False, True])
def test_killed_at_any_moment_and_started_again_a_run_ends_with_the_same_weights(
    many_steps, undisturbed, wait_for, steps_logged, writing
):
    """Most of the time a checkpoint is being written, if one is saved after each step."""
    folder, moment = Path(many_steps.output), random.randint(8, 40)

    def is_time():
        partial = list((folder / "checkpoints").glob("*.partial"))
        return steps_logged(folder) >= moment and (partial or not writing)

    config = changed(many_steps, loop={"save_every": 1}) if writing else many_steps
    with running(config) as process:
        wait_for(process, is_time, f"step {moment}")
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert not (folder / "last").exists()
    assert_same_outcome(train(many_steps), undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["online", "auto", "cached"])
def test_killed_twenty_times_a_run_ends_with_the_same_weights(
    many_steps, mode, wait_for, steps_logged
):
    """At any moment from the first shard of states to the last evaluation; some while a file is
    half there."""
    random.seed(mode)
    folder = Path(many_steps.output)
    config = changed(
        many_steps,
        loop={"max_steps": 220, "save_every": 3, "eval_every": 60},
        features=FeaturesConfig(mode=mode, format="float32"),
    )
    whole = train(changed(config, output=f"{folder}-whole"))
    while_writing = 0
    for kill in range(20):
        goal = steps_logged(folder) + random.randint(0, 11)
        with running(config) as process:
            if kill % 5 == 4:
                wait_for(process, lambda: list(folder.rglob("*.partial")), "half-written file")
            elif kill < 2:
                wait_for(process, folder.exists, "folder")
                time.sleep(random.random())
            else:
                wait_for(process, lambda goal=goal: steps_logged(folder) >= goal, "step")
                time.sleep(random.random() * 0.05)
            process.kill()
        while_writing += bool(list(folder.rglob("*.partial")))
    assert while_writing > 0 and not (folder / "last").exists()
    with running(config) as process:
        pass
    assert process.returncode == 0
    for name in ("last", "best"):
        assert last_bytes(folder, name) == last_bytes(whole, name)


def test_short_batches_are_padded_until_every_depth_predicts_a_token(short, monkeypatch):
    read = calls_of(monkeypatch, features, "online_features")
    head = {"type": "medusa", "num_heads": 45}  # more than the conversations have tokens
    train(changed(short, head=head, loop={"max_steps": 1}))
    assert max(batch.tokens_BT.shape[1] for _, _, batch, *_ in read) == 47


def test_a_run_that_began_before_there_were_these_options_goes_on(
    many_steps, undisturbed, stopped_at
):
    stopped_at(16, many_steps)
    before = saved_options(many_steps.output)
    for name in ("held_out_limit", "cache", "num_proc", "workers"):
        del before["data"][name]
    for name in ("batch_tokens", "micro_tokens"):
        del before["loop"][name]
    del before["tracking"]
    # These had other names.
    before["target_dtype"] = before.pop("dtype")
    before["eval"]["new_tokens"] = before["eval"].pop("max_new_tokens")
    save_options(many_steps.output, before)
    assert_same_outcome(train(many_steps), undisturbed)


def test_a_half_written_checkpoint_is_passed_over(many_steps, undisturbed, stopped_at):
    folder = Path(many_steps.output)
    stopped_at(16, many_steps)
    partial = folder / "checkpoints" / "step-00000021.partial"
    partial.mkdir()
    (partial / "model.safetensors").write_bytes(b"half")
    with (folder / "log.jsonl").open("a", encoding="utf-8") as file:
        # later than the checkpoint, and half a line
        file.write('{"step": 17, "loss": [1.0, 1.0]}\n{"step": 18, "lo')
    assert_same_outcome(train(many_steps), undisturbed)
    assert not partial.exists()


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_killed_while_the_options_are_written_down_a_run_can_start_again(
    short, monkeypatch, tmp_path, share
):
    """Found by killing at each moment of the first write to the run's folder."""
    folder, original = Path(short.output), Path.write_text

    def write_text(path, text, *arguments, **settings):
        if folder not in path.parents:
            return original(path, text, *arguments, **settings)
        if share:
            original(path, text[: int(share * len(text))], *arguments, **settings)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", write_text)
        with pytest.raises(Killed):
            train(short)
    whole = train(changed(short, output=str(tmp_path / "whole")))
    assert last_bytes(train(short)) == last_bytes(whole)


@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_at_the_last_evaluation_a_run_ends_where_it_would_have(
    many_steps, undisturbed, monkeypatch, when
):
    original = loop.MetricsLogger.log_evaluation

    def log_evaluation(self, *given):
        if self.progress.step == STEPS:
            raise Killed
        return original(self, *given)

    def write_report(folder):
        raise Killed

    with monkeypatch.context() as patch:
        if when == "before":
            patch.setattr(loop.MetricsLogger, "log_evaluation", log_evaluation)
        else:  # the first that happens once the last head is saved
            patch.setattr(loop, "write_report", write_report)
        with pytest.raises(Killed):
            train(many_steps)
    assert_same_outcome(train(many_steps), undisturbed)


def test_a_best_head_is_left_even_if_no_held_out_prompt_needed_a_round(short, monkeypatch):
    """Its figures, for which nothing was measured, are null: NaN is no JSON."""
    original = loop.evaluate

    def evaluate(*arguments):
        found = original(*arguments)
        return dataclasses.replace(found, trees={name: Stats([[]], 2) for name in found.trees})

    monkeypatch.setattr(loop, "evaluate", evaluate)
    folder = train(changed(short, loop={"max_steps": 2}))
    load_head(folder / "best")
    log = (folder / "log.jsonl").read_text().splitlines()
    for text in [(folder / "last" / "config.json").read_text(), *log]:
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
    short, tmp_path, monkeypatch, name, at, step
):
    config = changed(short, loop={"max_steps": 10, "eval_every": 4, "save_every": 3})
    owner = loop.Trainer if name == "gradients" else loop
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, asks(original, at=0))
    whole = train(changed(config, output=str(tmp_path / "whole")))
    monkeypatch.setattr(owner, name, asks(original, at))
    with refused(f"stopped {step} 10", error=Stopped):
        train(config)
    monkeypatch.setattr(owner, name, asks(original, at=0))
    folder = train(config)
    assert_same_weights(folder, whole)
    assert [row["step"] for row in evaluations_of(whole)] == [4, 8, 10]
    assert evaluations_of(folder) == evaluations_of(whole)


def test_what_would_end_the_first_evaluation_ends_the_run_before_its_first_step(short, monkeypatch):
    def expand(*given):
        raise ValueError("no drafts")

    with monkeypatch.context() as patch:
        patch.setattr(MedusaHead, "expand", expand)
        with refused("no drafts"):
            train(short)
    folder = Path(short.output)
    assert not (folder / "log.jsonl").exists() and not list(folder.glob("checkpoints/*"))
    tried = calls_of(monkeypatch, loop, "try_evaluation")
    train(short)
    assert len(tried) == 1


def test_a_run_whose_last_evaluation_was_stopped_makes_it_again(short, monkeypatch):
    original = evaluate.sums_of

    def sums_of(*given):
        signal.raise_signal(signal.SIGTERM)
        return original(*given)

    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "sums_of", sums_of)
        with refused("last evaluation again", error=Stopped):
            train(short)
    folder = Path(short.output)
    unmeasured = load_file(folder / "best" / "model.safetensors")
    assert not (folder / "last").exists() and not (folder / "report.md").exists()
    assert (train(short) / "report.md").exists()
    assert same_tensors(unmeasured, last_weights(folder))


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_a_token_budget_are_the_same_steps_in_any_number_of_forwards(
    short, tmp_path, workers
):
    whole = changed(
        short, loop={"batch_tokens": 300, "max_steps": 8}, data={"max_length": 200, "workers": 0}
    )
    cut = changed(
        whole,
        output=str(tmp_path / "cut"),
        loop={"micro_tokens": 60},
        data={"workers": workers},
    )
    assert_same_curve(train(cut), train(whole), apart=1e-5)
    assert len(curve_of(cut.output)) == 8


def test_a_second_start_tokenizes_nothing_and_sigterm_to_the_group_stops_a_run_with_workers(
    many_steps, undisturbed, monkeypatch, wait_for, steps_logged
):
    folder = Path(many_steps.output)
    read_ahead = changed(many_steps, data={"workers": 2}, loop={"save_every": 0})
    with running(read_ahead, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        wait_for(process, lambda: steps_logged(folder) >= 9, "step 9")
        os.killpg(process.pid, signal.SIGTERM)  # the workers, too
        said, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    (checkpoint,) = checkpoints_of(folder)
    assert not lacking(said, f"stopped {int(checkpoint.removeprefix('step-'))} {STEPS}")
    monkeypatch.setattr(token_cache, "whole_sequences", lambda *_: pytest.fail("tokenized again"))
    train(changed(many_steps, data={"workers": 1}))
    assert_same_outcome(folder, undisturbed)


def test_a_step_waits_for_the_device_once(short, monkeypatch):
    """Whatever the loop itself asks of tensors; losses and optimizers are counted where they are
    written."""
    waits = []
    current = None
    asking = ("loop.py", "online.py", "engines.py")
    for name in ("__bool__", "__float__", "__int__", "item", "tolist"):
        original = getattr(torch.Tensor, name)

        def asked(self, original=original, name=name):
            by = Path(inspect.currentframe().f_back.f_code.co_filename).name
            if by in asking and current is not None:
                waits.append((current, name))
            return original(self)

        monkeypatch.setattr(torch.Tensor, name, asked)
    start_step, end_step = loop.MetricsLogger.start_step, loop.MetricsLogger.end_step

    def started(self):
        nonlocal current
        current = self.progress.step
        return start_step(self)

    def ended(self, *given):
        nonlocal current
        current = None
        return end_step(self, *given)

    monkeypatch.setattr(loop.MetricsLogger, "start_step", started)
    monkeypatch.setattr(loop.MetricsLogger, "end_step", ended)
    train(changed(short, loop={"max_steps": 4, "micro_batch": 2}))
    assert waits == [(step, "tolist") for step in range(4)]
