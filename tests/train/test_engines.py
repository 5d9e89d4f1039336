"""Several processes over gloo: every engine, the same losses as one process, and which engine it
was.

A launch file of configs/accelerate runs unchanged but for the number of processes. A launch takes
seconds before its first step, so one makes all runs of an engine and a number of processes
(`launched.py`).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from messages import lacking, refused
from runs import (
    assert_same_curve,
    changed,
    checkpoints_of,
    evaluations_of,
    last_bytes,
    log_of,
    rows_of,
    saved_options,
    write_config,
    write_rows,
)
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from headstart.heads.checkpoints.save_load import load_head
from headstart.inference import Target
from headstart.inference.feature_cache import FeatureCache, decoded
from headstart.train import engines
from headstart.train.config import AdapterConfig, FeaturesConfig, OptimConfig
from headstart.train.data.batches import Share
from headstart.train.data.chat_template import Example
from headstart.train.engines import check_engine, configure_deepspeed
from headstart.train.features import online as features
from headstart.train.features.placement import load_target
from headstart.train.inputs import check_same_everywhere
from headstart.train.loop import train

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
STEPS = 30
ROUNDED = 0.03
"""The same in bfloat16, whose numbers are 0.4 % apart."""


@pytest.fixture(scope="module")
def parallel_options(run_options, tmp_path_factory):
    """A head that reads its own weights outside of its modules and feeds on its own outputs; rows
    of any length.

    Its vocabulary is truncated, so it has buffers beside its weights.
    """
    return changed(
        run_options(tmp_path_factory.mktemp("parallel") / "one process", STEPS),
        head={"type": "eagle3", "depth": 3, "feature_layers": [0, -1], "draft_vocab_size": 8},
        loop={"batch_size": 8, "eval_every": 0, "save_every": 15, "timeout": 1.0},
        optim={"lr": 3e-3},
    )


@pytest.fixture
def parallel_run(parallel_options, tmp_path):
    """The same in a folder of a test's own."""
    return changed(parallel_options, output=str(tmp_path / "run"))


@pytest.fixture(scope="module")
def alone(parallel_options):
    """The run of one process."""
    return train(parallel_options)


def in_bfloat16(config):
    return changed(config, loop={"precision": "auto"})


def with_adapter(config):
    """Medusa-2 on a target in bfloat16, whose states meet weights in float32."""
    return changed(
        in_bfloat16(config),
        dtype="bfloat16",
        head={"type": "medusa", "num_heads": 2},
        adapter=AdapterConfig(rank=4, modules=["q_proj", "v_proj"]),
    )


@pytest.fixture(scope="module")
def alone_in_bfloat16(parallel_options, tmp_path_factory):
    """The runs of one process in bfloat16, by what they train."""
    kinds = {"head": in_bfloat16(parallel_options), "adapter": with_adapter(parallel_options)}
    folder = tmp_path_factory.mktemp("bfloat16")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines, "formats", lambda config, _: (config.dtype, "bfloat16"))
        return {
            kind: train(changed(config, output=str(folder / kind)))
            for kind, config in kinds.items()
        }


ACCELERATE = "accelerate.commands.launch"
OURS = "headstart.scripts.launch"


def launch(word, processes, *script, by=ACCELERATE):
    """Start a script by a launch file, in several processes; what they print comes through
    `stdout`."""
    command = [sys.executable, "-m", by, "--config_file", f"configs/accelerate/{word}.yaml"]
    command += ["--num_processes", str(processes), "--main_process_port", "0"]
    return subprocess.Popen(
        [*command, *map(str, script)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def launch_run(config, word="ddp", processes=2, by=ACCELERATE):
    path = write_config(config, Path(config.output).with_suffix(".yaml"))
    return launch(word, processes, "scripts/train.py", "--config", path, by=by)


@dataclass(frozen=True)
class Launched:
    """What one run of a launch left."""

    folder: Path
    seen: list[dict[str, Any]]
    """By each process; see `launched.py`."""
    said: str
    """By the whole launch."""


def launch_jobs(folder, word, processes, jobs):
    """One launch that makes several runs: by name a config, and what `launched.py` does to the
    run."""
    given = []
    for name, (config, more) in jobs.items():
        path = write_config(changed(config, output=str(folder / name)), folder / f"{name}.yaml")
        given.append({"config": path, "report": str(folder / f"{name}.seen"), **more})
    (folder / "jobs.json").write_text(json.dumps(given))
    process = launch(word, processes, "tests/train/launched.py", folder / "jobs.json")
    said = finished(process)
    lines = [line for line in said.splitlines() if not line.startswith("step ")]
    assert process.returncode == 0, "\n".join(lines)
    done = {}
    for name in jobs:
        reports = [folder / f"{name}.seen.{rank}.json" for rank in range(processes)]
        seen = [json.loads(path.read_text()) for path in reports]
        done[name] = Launched(folder / name, seen, said)
    return done


def workers(process):
    """The processes of a launch, which are in sessions of their own."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return [int(pid) for pid in children.split()]


def finished(process, seconds=500):
    """What a launch said; of one that hangs, also where each of its processes was."""
    try:
        said, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        for worker in workers(process):
            os.kill(worker, signal.SIGABRT)  # see PYTHONFAULTHANDLER
        said = f"{process.communicate()[0]}\nhung for {seconds} s"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return said


needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="DeepSpeed compiles its exchange for CPUs"
)
LAUNCHES = [
    pytest.param(("ddp", "DDP", 2), id="DDP-2"),
    pytest.param(("ddp", "DDP", 4), id="DDP-4"),
    pytest.param(("zero2", "ZeRO-2", 2), id="ZeRO-2-2", marks=needs_compiler),
    pytest.param(("zero2", "ZeRO-2", 4), id="ZeRO-2-4", marks=needs_compiler),
    pytest.param(("fsdp2", "FSDP2", 2), id="FSDP2-2"),
    pytest.param(("fsdp2", "FSDP2", 4), id="FSDP2-4"),
]


@pytest.fixture(scope="module")
def launches(request, parallel_options, tmp_path_factory):
    """What the runs of a launch left, by name: `launches("ddp", 2)`; it happens once."""
    done: dict[tuple[str, int], dict[str, Launched]] = {}

    def runs_of(word, processes):
        if (word, processes) not in done:
            folder = tmp_path_factory.mktemp(f"{word}-{processes}")
            jobs = jobs_of(parallel_options, word, processes)
            if (word, processes) == ("ddp", 2):
                jobs |= cut_jobs(parallel_options, request.getfixturevalue("thirteen"), folder)
                without_some(request.getfixturevalue("whole") / "features", folder / "half-filled")
            done[word, processes] = launch_jobs(folder, word, processes, jobs)
        return done[word, processes]

    return runs_of


def jobs_of(parallel_options, word, processes):
    """In float32 and in bfloat16; with two processes also with an adapter, and saved in different
    ways."""

    saving = changed(parallel_options, loop={"save_every": 10, "keep": 5})
    config = changed(parallel_options, loop={"micro_batch": 2})
    jobs = {"float32": (config, {}), "bfloat16": (in_bfloat16(config), {"precision": "bfloat16"})}
    if processes == 2 and word != "fsdp2":
        jobs["adapter"] = (with_adapter(config), {"precision": "bfloat16"})
    if processes == 2 and word != "zero2":
        jobs |= {
            "plain": (changed(saving, loop={"save_in_background": False}), {}),
            "background": (saving, {"slow_writer": 0.5}),
            "broken": (saving, {"broken_writer": ["1"]}),
        }
    return jobs


@pytest.fixture(params=LAUNCHES)
def several(request, launches):
    """An engine, its number of processes, and what its runs left."""
    word, engine, processes = request.param
    return engine, processes, launches(word, processes)


def test_several_processes_have_the_losses_of_one(several, alone):
    engine, processes, runs = several
    run = runs["float32"]
    assert run.said.count(f"; {engine}; step 0 of ") == len(runs)  # one process reports
    memory = [row["costs"]["peak_memory_gib_by_process"] for row in log_of(run.folder)[:STEPS]]
    assert all(len(by_process) == processes for by_process in memory)
    assert any(by_process[0] != by_process[1] for by_process in memory)
    assert_same_curve(run.folder, alone)
    assert all(seen["dtypes"] == ["torch.float32"] for seen in run.seen)
    (ours,), (theirs,) = evaluations_of(run.folder), evaluations_of(alone)
    assert ours["eval"] == theirs["eval"] and ours["tree"] == theirs["tree"]
    assert ours["held_out_loss"] == pytest.approx(theirs["held_out_loss"], rel=1e-4)
    answered = [seen["prompts"] for seen in run.seen]  # 5 prompts, each with three trees
    assert sum(answered) == 15 and max(answered) == 3 * -(-5 // processes)
    if engine == "FSDP2":  # once a step of any number of forwards
        for exchange in ("gathers", "reductions"):
            assert [seen[exchange] for seen in run.seen] == [STEPS] * processes


def test_in_bfloat16_they_compute_in_bfloat16_whatever_the_engine_does_about_autocast(
    several, alone, alone_in_bfloat16
):
    _, _, runs = several
    for kind, run in {"head": runs["bfloat16"], "adapter": runs.get("adapter")}.items():
        if run is None:
            continue
        assert all(seen["dtypes"] == ["torch.bfloat16"] for seen in run.seen), kind
        assert_same_curve(run.folder, alone_in_bfloat16[kind], apart=ROUNDED)
    with pytest.raises(AssertionError):
        assert_same_curve(runs["bfloat16"].folder, alone)


@pytest.fixture
def stopped(parallel_run, wait_for, steps_logged):
    """Ends a run of several processes by a signal: what they printed, and the checkpoint."""

    def run(word, by=ACCELERATE, number=signal.SIGTERM):
        process = launch_run(changed(parallel_run, loop={"save_every": 0}), word, by=by)
        wait_for(process, lambda: steps_logged(parallel_run.output) >= 8, "step 8")
        process.send_signal(number)
        said = finished(process)
        (checkpoint,) = checkpoints_of(parallel_run.output)
        step = int(checkpoint.removeprefix("step-"))
        assert said.count(f"stopped at step {step} of {STEPS}") == 1 and 8 <= step < STEPS
        return process, said, checkpoint

    return run


def test_stopped_on_two_processes_a_run_goes_on_alone_with_its_data_in_another_folder(
    alone, parallel_run, stopped, capsys, tmp_path
):
    _, _, checkpoint = stopped("ddp")
    moved = shutil.copy(parallel_run.data.sources[0], tmp_path / "moved.jsonl")
    train(changed(parallel_run, data={"sources": [str(moved)]}, loop={"micro_batch": 4}))
    assert not lacking(capsys.readouterr().out, f"{checkpoint} DDP 2 loop.micro_batch 4 None")
    assert_same_curve(parallel_run.output, alone)


def test_what_fsdp_sharded_goes_on_with_more_processes_and_not_without_it(
    alone, parallel_run, stopped
):
    _, _, checkpoint = stopped("fsdp2")
    with refused(checkpoint, "FSDP2 2 init_from"):
        train(parallel_run)
    process = launch_run(parallel_run, "fsdp2", processes=4)
    assert "FSDP2; step " in finished(process) and process.returncode == 0
    assert_same_curve(parallel_run.output, alone)


def contents_of(checkpoint):
    """All tensors and numbers of a checkpoint, by file; what FSDP2 sharded is put together."""
    found = {}
    for path in sorted(checkpoint.iterdir()):
        if path.is_dir():
            together = path.with_suffix(".pt")
            dcp_to_torch_save(path, together)
            path = together
        if path.suffix == ".safetensors":
            found[path.name] = load_file(path)
        elif path.suffix != ".json":
            found[path.name] = torch.load(path, weights_only=False)
    return found


@pytest.mark.parametrize("word", ["ddp", "fsdp2"])
def test_what_threads_of_two_processes_write_is_of_the_step_at_which_it_was_asked_for(
    launches, word
):
    runs = launches(word, 2)
    background, plain, broken = (runs[name] for name in ("background", "plain", "broken"))
    names = [f"step-{step:08d}" for step in (10, 20, 30)]
    assert checkpoints_of(background.folder) == checkpoints_of(plain.folder) == names
    for seen in background.seen:  # steps went on meanwhile, but for the last
        first, second, last = seen["written_at"]
        assert first > 10 and second > 20 and last == 30
    for name in names:
        theirs = contents_of(plain.folder / "checkpoints" / name)
        ours = contents_of(background.folder / "checkpoints" / name)
        assert len(ours) >= 4
        torch.testing.assert_close(as_tensors(ours), as_tensors(theirs), rtol=0, atol=0)
    for seen in broken.seen:
        assert not lacking(seen["ended"], "step-00000010 space")
        assert 10 <= seen["progress"]["step"] < 20
    assert checkpoints_of(broken.folder) == []


def as_tensors(value):
    """The same structure with tensors for all numbers, and text for the rest."""
    if isinstance(value, dict):
        return {str(name): as_tensors(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_tensors(each) for each in value]
    if isinstance(value, torch.Tensor):
        return value
    return torch.tensor(list(str(value).encode()))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_our_own_launcher_ends_all_processes_with_a_checkpoint_and_status_0(
    alone, parallel_run, stopped, number
):
    process, said, _ = stopped("ddp", OURS, number)
    assert process.returncode == 0 and "Traceback" not in said, said
    assert said.count("stopping after this step") == 1
    train(parallel_run)
    assert_same_curve(parallel_run.output, alone)


@pytest.mark.parametrize("by", [OURS, ACCELERATE])
def test_where_a_process_dies_the_others_say_that_the_same_command_resumes_and_it_does(
    alone, parallel_options, tmp_path, wait_for, steps_logged, by
):
    for attempt in range(3):
        config = changed(
            parallel_options, output=str(tmp_path / f"dies-{attempt}"), loop={"save_every": 2}
        )
        process = launch_run(config, by=by)
        wait_for(process, lambda run=config.output: steps_logged(run) >= 5, "step 5")
        os.kill(workers(process)[1], signal.SIGKILL)
        said = finished(process, seconds=60)
        assert process.returncode == 1
        after = said[said.index("error: ") :]
        if "rank 0" in after:  # torch ends it by SIGTERM, perhaps before it has spoken
            break
    assert not lacking(after, "rank 0 lost train/ resumes checkpoints/step-")
    assert ("Traceback" in after) == (by == ACCELERATE)
    assert after.count("\n") < (8 if by == OURS else 50), after
    if by == OURS:
        assert not lacking(after, "rank 1 SIGKILL resumes")
    else:
        assert "rank      : 1 (local_rank: 1)" in said
    assert checkpoints_of(config.output) and steps_logged(config.output) < STEPS
    train(config)
    assert_same_curve(config.output, alone)


def test_a_mistake_ends_our_own_launcher_with_its_one_line_and_status_2(parallel_run):
    process = launch_run(changed(parallel_run, optim=OptimConfig(name="muon")), "fsdp2", by=OURS)
    said = finished(process, seconds=60)
    assert process.returncode == 2 and "Traceback" not in said
    assert not lacking(said, "error: Muon FSDP2")


# What cannot be is told before anything is loaded.


@pytest.mark.parametrize(
    ("engine", "change", "words"),
    [
        ("ZeRO-2", {"optim": OptimConfig(name="muon")}, "Muon needs ZeRO-2"),
        ("FSDP2", {"optim": OptimConfig(name="muon")}, "Muon needs FSDP2"),
        ("FSDP2", {"adapter": AdapterConfig(rank=4)}, "FSDP2"),
        ("ZeRO-3", {}, "ZeRO-3 ZeRO-2 FSDP2"),
    ],
)
def test_an_engine_that_cannot_train_the_config_is_refused(parallel_run, engine, change, words):
    config = changed(parallel_run, **change)
    check_engine("DDP", config)
    with refused(words):
        check_engine(engine, config)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"gradient_accumulation_steps": 3}, "gradient_accumulation_steps 3 2"),
        ({"train_batch_size": 4}, "train_batch_size 4 8 'auto'"),
        ({"gradient_clipping": 0.5}, "gradient_clipping 0.5 1.0"),
        ({"optimizer": {"type": "Adam"}}, "'optimizer'"),
        ({"bf16": {"enabled": True}}, "'bf16'"),
        ({"torch_autocast": {"enabled": True}}, "'torch_autocast'"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "offload_optimizer"),
        ({"zero_optimization": {"cpu_offload": True}}, "cpu_offload"),
        ({"elasticity": {"enabled": True}}, "'elasticity'"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "'data_types'"),
    ],
)
def test_a_deepspeed_file_that_contradicts_the_config_is_refused(parallel_run, given, words):
    share = Share.of(8, 2, 0, 2)
    configure_deepspeed(
        {"gradient_clipping": "auto", "bf16": {"enabled": False}}, parallel_run, share
    )
    with refused(words):
        configure_deepspeed(given, parallel_run, share)


FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, "'fp16' loop.precision 'float32'"),
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, "gradient_accumulation_steps 4 2"),
        ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "dynamo_backend 'INDUCTOR' 'no'"),
        ({"ACCELERATE_FP8_BACKEND": "MSAMP"}, "fp8_backend 'MSAMP' 'no'"),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "megatron_lm 'true' 'false'"),
        ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}, "parallelism_config 'true' 'false'"),
        ({**FSDP, "FSDP_VERSION": "1"}, "FSDP1 FSDP2 fsdp_version 2"),
        ({**FSDP, "FSDP_OFFLOAD_PARAMS": "true"}, "fsdp_offload_params 'true' 'false'"),
        ({**FSDP, "FSDP_ACTIVATION_CHECKPOINTING": "true"}, "fsdp_activation_checkpointing"),
        ({**FSDP, "FSDP_IGNORED_MODULES": "fc"}, "fsdp_ignored_modules 'fc' 'none'"),
        ({**FSDP, "WORLD_SIZE": "1"}, "FSDP2"),
    ],
)
def test_a_setting_of_the_launch_that_a_run_does_not_take_is_refused(
    short, monkeypatch, environment, words
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with refused(words):
        train(changed(short, loop={"micro_batch": 2}))


def test_what_accelerate_config_writes_changes_no_weight(short, tmp_path, monkeypatch):
    short = changed(short, loop={"max_steps": 2, "micro_batch": 2})
    expected = train(short)
    usual = {
        "ACCELERATE_DYNAMO_BACKEND": "NO",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "2",
        "ACCELERATE_MIXED_PRECISION": "no",
        "ACCELERATE_USE_CPU": "True",
        "FSDP_OFFLOAD_PARAMS": "true",
    }
    for name, value in usual.items():
        monkeypatch.setenv(name, value)
    assert last_bytes(train(changed(short, output=str(tmp_path / "other")))) == last_bytes(expected)


class TwoProcesses:
    """This process, and another one of other data or of the same."""

    device = torch.device("cpu")

    def __init__(self, other=None):
        self.other = other
        self.gathered = []

    def gather(self, own):
        self.gathered.append(own)
        return torch.cat([own, own if self.other is None else self.other])


def test_processes_that_read_different_data_are_refused():
    one = Example([1, 2, 3], [False, True, True])
    two = Example([4, 5], [False, True])
    with refused("1 0 2"):
        check_same_everywhere(TwoProcesses(torch.tensor([0, 0])), [one, two])
    same = TwoProcesses()
    other_token, other_mask = Example([4, 6], [False, True]), Example([4, 5], [False, False])
    for examples in ([one, two], [two, one], [one], [one, other_token], [one, other_mask]):
        check_same_everywhere(same, examples)
    # tokens, masks and order all count
    assert len({tuple(own.tolist()) for own in same.gathered}) == 5


# Targets that do not fit on one device.


@pytest.fixture(scope="module")
def thirteen(parallel_options, tmp_path_factory):
    """A run on 13 conversations, one of which is there twice: the last step of an epoch leaves
    forwards empty."""
    folder = tmp_path_factory.mktemp("thirteen")
    conversations = [row["messages"] for row in rows_of(parallel_options.data.sources[0])[:5]]
    user, says = conversations[0]
    for i in range(7):
        conversations.append([{**user, "content": user["content"] + " please" * i}, says])
    conversations.append(conversations[3])
    rows = [{"messages": messages} for messages in conversations]
    return changed(
        parallel_options,
        output=str(folder / "whole"),
        data={"sources": [write_rows(folder / "data.jsonl", rows)], "held_out": 0.01},
        loop={"batch_size": 8, "micro_batch": 2},
        features=FeaturesConfig(mode="cached", format="float32"),
    )


@pytest.fixture(scope="module")
def whole(thirteen):
    """That run by one process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(features, "BATCH_TOKENS", BATCH_TOKENS)
        return train(thirteen)


BATCH_TOKENS = 120
"""Of batches that are computed before training: an odd number of them."""


def states_in(folder):
    """The states of a cache, by their keys."""
    cache = FeatureCache(folder, json.loads((folder / "manifest.json").read_text()))
    return {key: decoded(*cache.stored(key)) for key in cache.locations}


def without_some(folder, to):
    """A cache that lacks every other state, an odd number of batches."""
    half = FeatureCache(to, json.loads((folder / "manifest.json").read_text()))
    by_length = sorted(states_in(folder).items(), key=lambda pair: -len(pair[1]))
    for key, states in by_length[::2]:
        half.add(key, states)
    half.flush()


def cut_jobs(parallel_options, thirteen, folder):
    """With a target cut over two processes, or with something that happens to one of them."""

    def cut(config, mode, cache=None):
        return changed(config, target_placement="shard", features={"mode": mode, "folder": cache})

    judged_often = changed(parallel_options, loop={"eval_every": 5, "save_every": 0})
    fastest = changed(parallel_options, dtype="fastest", loop={"precision": "auto", "max_steps": 2})
    more = {"batch_tokens": BATCH_TOKENS}
    jobs = {
        "cut": (cut(parallel_options, "online"), {}),
        "cut, cached": (cut(thirteen, "cached"), more),
        "cut, half-filled": (cut(thirteen, "cached", str(folder / "half-filled")), more),
        "cut, auto": (cut(thirteen, "auto"), more),
        "cut, packed": (cut(with_packed_rows(parallel_options), "online"), {}),
        "cut, other drafts": (cut(parallel_options, "online"), {"other_drafts": ["1"]}),
        "cut, stopped": (cut(judged_often, "online"), {"stopped_in_answers": {"1": 2}}),
        "stopped": (judged_often, {"stopped_in_answers": {"1": 2}}),
        "other numbers": (changed(judged_often, loop={"patience": 1}), {"other_numbers": ["1"]}),
        "failing callback": (parallel_options, {"failing_callback": 4}),
        "fastest": (fastest, {"precision": "measured"}),
    }
    return {
        name: (changed(config, loop={"timeout": 0.5}), given)
        for name, (config, given) in jobs.items()
    }


def with_packed_rows(config):
    """Rows of one process have fewer lengths than those of the other; in the last step of an epoch
    one has none."""
    data = {"max_length": 64, "pack": 64}
    return changed(config, data=data, loop={"batch_size": 2, "save_every": 0})


@pytest.fixture
def two(launches):
    """The runs of two processes of DDP."""
    return launches("ddp", 2)


def test_a_target_cut_over_the_processes_gives_the_same_losses_and_the_same_head(two, alone):
    run = two["cut"]
    assert_same_curve(run.folder, alone)
    (ours,), (theirs,) = evaluations_of(run.folder), evaluations_of(alone)
    assert ours["eval"] == theirs["eval"]  # the decoder runs on it too
    # every process takes part in every forward
    assert [seen["prompts"] for seen in run.seen] == [15, 15]
    assert load_head(run.folder / "last")[1].provenance == load_head(alone / "last")[1].provenance


def test_a_process_that_needs_more_rounds_of_a_target_that_is_cut_waits_for_no_other(two, alone):
    """As by a token that rounding decides; the main process's figures count."""
    run = two["cut, other drafts"]
    assert [seen["ended"] for seen in run.seen] == ["finished", "finished"]
    (ours,), (theirs,) = evaluations_of(run.folder), evaluations_of(alone)
    assert ours["eval"] == theirs["eval"]


@pytest.mark.parametrize("name", ["cut, cached", "cut, half-filled", "cut, auto"])
def test_the_states_of_a_target_that_is_cut_are_kept_as_those_of_a_whole_one(two, whole, name):
    """No process waits for a forward that another one has no use for."""
    run = two[name]
    own, shared = run.folder / "features", run.folder.parent / "half-filled"
    ours = states_in(shared if name == "cut, half-filled" else own)
    theirs = states_in(whole / "features")
    assert len(theirs) > 8
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert_same_curve(run.folder, whole)
    if name != "cut, auto":
        assert {seen["batches"] % 2 for seen in run.seen} == {1}, run.seen


def test_packed_rows_of_a_target_that_is_cut_need_as_many_forwards_on_every_process(
    two, parallel_run
):
    run = two["cut, packed"]
    assert [seen["ended"] for seen in run.seen] == ["finished", "finished"]
    assert_same_curve(run.folder, train(with_packed_rows(parallel_run)))


@pytest.mark.parametrize("name", ["stopped", "cut, stopped"])
def test_a_signal_during_an_evaluation_ends_it_on_every_process_and_no_step_is_lost(two, name):
    run = two[name]
    assert [seen["ended"].partition(";")[0] for seen in run.seen] == ["stopped at step 5 of 30"] * 2
    assert checkpoints_of(run.folder) == ["step-00000005"] and not evaluations_of(run.folder)


def test_an_exception_in_a_callback_ends_both_processes_with_a_checkpoint(two):
    run = two["failing callback"]
    ours, theirs = run.seen
    assert ours["ended"] == "'a mistake'"
    # the other process is told at the end of the next step
    assert theirs["ended"].startswith("stopped at step 5 of 30")
    assert checkpoints_of(run.folder) == ["step-00000005"]


def test_decisions_are_made_once(two):
    """One process finds that acceptance falls while the held-out loss sinks, and the other does
    not."""
    ours, theirs = two["other numbers"].seen
    assert ours["ended"] == theirs["ended"] == "finished"
    assert ours["found"] != theirs["found"]
    assert {**ours["progress"], "seconds": 0} == {**theirs["progress"], "seconds": 0}


def test_processes_agree_on_what_auto_is(two):
    """Each of them could measure it otherwise."""
    saved = saved_options(two["fastest"].folder)
    assert saved["dtype"] == "float32" and saved["loop"]["precision"] in ("float32", "bfloat16")


def test_a_target_spread_over_devices_has_the_states_of_a_whole_one(parallel_run):
    spread = load_target(changed(parallel_run, target_placement="spread"), Accelerator())
    whole = load_target(parallel_run, Accelerator())
    tokens_BT = torch.randint(258, (2, 9))
    assert all(map(torch.equal, spread.read(tokens_BT, (0, -1)), whole.read(tokens_BT, (0, -1))))


def test_a_placement_that_the_launch_cannot_give_is_refused(parallel_run):
    with refused("'shard' 1 'spread' 'whole'"):
        train(changed(parallel_run, target_placement="shard"))
    adapted = changed(parallel_run, target_placement="spread", adapter=AdapterConfig(rank=4))
    with refused("needs target_placement 'whole' 'spread'"):
        train(changed(adapted, head={"type": "medusa", "num_heads": 2}))


CUT = """
import sys, torch
from torch import distributed
from transformers import AutoModelForCausalLM
from headstart.inference import Target
from headstart.train.features.placement import shard_blocks

distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval().requires_grad_(False)
tokens_BT = torch.randint(250, (2, 9))
before = Target(model).read(tokens_BT, (0, -1))
whole = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
shard_blocks(model)
target = Target(model)
assert all(map(torch.equal, before, target.read(tokens_BT, (0, -1))))
states = [block._get_fsdp_state() for block in target.modules.blocks]
print("roots", sum(state._is_root for state in states))
prefetched = [state._states_to_forward_prefetch for state in states]
print("ahead", [[states.index(ahead) for ahead in those] for those in prefetched])
outside = (model.get_input_embeddings(), model.get_output_embeddings())
print("whole", whole == {id(module.weight) for module in outside})
weights = [weight for block in target.modules.blocks for weight in block.parameters()]
print("cut", all(type(weight).__name__ == "DTensor" for weight in weights))
"""


def test_a_block_is_gathered_while_the_one_before_it_runs(parallel_options):
    """Of blocks that were each a root of their own, every one would wait for all that was launched
    before."""
    done = subprocess.run(
        [sys.executable, "-c", CUT, parallel_options.target],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    count = len(json.loads(said["ahead"]))
    assert said["roots"] == "0" and said["whole"] == said["cut"] == "True"
    assert json.loads(said["ahead"]) == [[i + 1] for i in range(count - 1)] + [[]] and count > 1


@pytest.mark.parametrize("placement", ["whole", "spread"])
def test_the_targets_attention_and_packing_are_transformers_own_options(
    parallel_options, placement, monkeypatch
):
    config = changed(parallel_options, target_placement=placement, target_attention="eager")
    for each, word in ((config, "eager"), (parallel_options, "sdpa")):
        assert load_target(each, Accelerator()).model.config._attn_implementation == word
    given = []
    monkeypatch.setattr(Target, "load", lambda *arguments: given.append(arguments[-1]))
    packing = {"load_in_4bit": True}
    load_target(changed(config, target_quantization=packing), Accelerator())
    assert given == [{"attn_implementation": "eager", "quantization_config": packing}]


def test_packed_weights_are_not_cut(parallel_run):
    with refused("target_quantization needs"):
        changed(parallel_run, target_quantization={})
    accelerator = SimpleNamespace(num_processes=2, device=torch.device("cpu"))
    packing = {"load_in_8bit": True}
    with refused("packed target_placement 'whole' 'spread' 'shard'"):
        load_target(
            changed(parallel_run, target_placement="shard", target_quantization=packing),
            accelerator,
        )
