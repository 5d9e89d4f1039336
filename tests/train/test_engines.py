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
import yaml
from accelerate import Accelerator
from messages import refused
from runs import changed, checkpoints_of, evaluations_of, log_of, write_config, write_rows
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
SAME = 1e-4
"""Largest relative difference of two losses."""
ROUNDED = 0.03
"""The same in bfloat16, whose numbers are 0.4 % apart."""


@pytest.fixture(scope="module")
def options(run_options, tmp_path_factory):
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


@pytest.fixture(scope="module")
def alone(options):
    """The run of one process."""
    return train(options)


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
def alone_in_bfloat16(options, tmp_path_factory):
    """The runs of one process in bfloat16, by what they train."""
    kinds = {"head": in_bfloat16(options), "adapter": with_adapter(options)}
    folder = tmp_path_factory.mktemp("bfloat16")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines, "formats", lambda config, _: (config.dtype, "bfloat16"))
        return {
            kind: train(changed(config, output=str(folder / kind)))
            for kind, config in kinds.items()
        }


def written(config):
    """The options as a file beside the run's folder."""
    return write_config(config, Path(config.output).with_suffix(".yaml"))


def launch(config, launch_file, processes=2, by="accelerate.commands.launch"):
    """Start a run as its own processes; the text it prints comes through `stdout`."""
    return started(launch_file, processes, "scripts/train.py", "--config", written(config), by=by)


def started(launch_file, processes, *script, by="accelerate.commands.launch"):
    command = [sys.executable, "-m", by]
    command += [
        "--config_file",
        str(launch_file),
        "--num_processes",
        str(processes),
        "--main_process_port",
        "0",
    ]
    return subprocess.Popen(
        [*command, *script],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@dataclass(frozen=True)
class Launched:
    """What one run of a launch left."""

    folder: Path
    seen: list[dict[str, Any]]
    """By each process; see `launched.py`."""
    said: str
    """By the whole launch."""


def launched(folder, word, processes, jobs):
    """One launch that makes several runs: by name a config, and what `launched.py` does to the
    run."""
    given = []
    for name, (config, more) in jobs.items():
        config = changed(config, output=str(folder / name))
        given.append({"config": written(config), "report": str(folder / f"{name}.seen"), **more})
    (folder / "jobs.json").write_text(json.dumps(given))
    process = started(
        f"configs/accelerate/{word}.yaml",
        processes,
        "tests/train/launched.py",
        folder / "jobs.json",
    )
    said = finished(process)
    assert process.returncode == 0, "\n".join(
        line for line in said.splitlines() if not line.startswith("step ")
    )
    return {
        name: Launched(
            folder / name,
            [
                json.loads((folder / f"{name}.seen.{rank}.json").read_text())
                for rank in range(processes)
            ],
            said,
        )
        for name in jobs
    }


def workers(process):
    """The processes of a launch, which are in sessions of their own."""
    return [
        int(pid)
        for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ]


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


def losses(folder):
    return {
        row["step"]: [*row["loss"], row["gradient_norm"]] for row in log_of(folder) if "loss" in row
    }


def assert_same_curve(folder, other, apart=SAME):
    ours, theirs = losses(Path(folder)), losses(Path(other))
    assert ours.keys() == theirs.keys() == set(range(1, STEPS + 1))
    for step, values in theirs.items():
        assert ours[step] == pytest.approx(values, rel=apart), f"step {step}"


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
def launches(request, options, tmp_path_factory):
    """What the runs of a launch left, by name: `launches("ddp", 2)`; it happens once."""
    done: dict[tuple[str, int], dict[str, Launched]] = {}

    def runs_of(word, processes):
        if (word, processes) not in done:
            folder = tmp_path_factory.mktemp(f"{word}-{processes}")
            jobs = jobs_of(options, word, processes)
            if (word, processes) == ("ddp", 2):
                jobs |= cut_jobs(options, request.getfixturevalue("thirteen"), folder)
                without_some(request.getfixturevalue("whole") / "features", folder / "half-filled")
            done[word, processes] = launched(folder, word, processes, jobs)
        return done[word, processes]

    return runs_of


def jobs_of(options, word, processes):
    """In float32 and in bfloat16; with two processes also with an adapter, and saved in different
    ways."""

    saving = changed(options, loop={"save_every": 10, "keep": 5})
    config = changed(options, loop={"micro_batch": 2})
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
    assert ours["held_out_loss"] == pytest.approx(theirs["held_out_loss"], rel=SAME)
    answered = [seen["prompts"] for seen in run.seen]  # 5 prompts, each with three trees
    assert sum(answered) == 15 and max(answered) == 3 * -(-5 // processes)


def test_weights_are_gathered_and_gradients_reduced_once_a_step_of_any_number_of_forwards(several):
    engine, processes, runs = several
    if engine == "FSDP2":
        for exchange in ("gathers", "reductions"):
            assert [seen[exchange] for seen in runs["float32"].seen] == [STEPS] * processes


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
def stopped(options, tmp_path, wait_for, steps_logged):
    """Two processes that SIGTERM ended in the middle: the config, and what they printed."""

    def run(word):
        config = changed(options, output=str(tmp_path / word), loop={"save_every": 0})
        process = launch(config, f"configs/accelerate/{word}.yaml")
        wait_for(process, lambda: steps_logged(config.output) >= 8, "step 8")
        process.send_signal(signal.SIGTERM)
        said = finished(process)
        (checkpoint,) = checkpoints_of(config.output)
        step = int(checkpoint.removeprefix("step-"))
        assert f"stopped at step {step} of {STEPS}" in said and 8 <= step < STEPS
        return config, checkpoint

    return run


def test_stopped_on_two_processes_a_run_goes_on_alone_with_its_data_in_another_folder(
    alone, stopped, capsys, tmp_path
):
    config, checkpoint = stopped("ddp")
    moved = (
        shutil.copytree(Path(config.data.sources[0]).parent, tmp_path / "moved")
        / Path(config.data.sources[0]).name
    )
    train(changed(config, data={"sources": [str(moved)]}, loop={"micro_batch": 4}))
    said = capsys.readouterr().out
    assert (
        f"{checkpoint} was written by DDP on 2 processes: the data continues at the same place"
        in said
    )
    assert "with loop.micro_batch 4; before it was None" in said
    assert_same_curve(config.output, alone)


def test_what_fsdp_sharded_goes_on_with_more_processes_and_not_without_it(alone, stopped):
    config, checkpoint = stopped("fsdp2")
    with refused(checkpoint, "FSDP2 2 init_from"):
        train(config)
    process = launch(config, "configs/accelerate/fsdp2.yaml", processes=4)
    assert "FSDP2; step " in finished(process) and process.returncode == 0
    assert_same_curve(config.output, alone)


def contents(checkpoint):
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
    assert checkpoints_of(runs["background"].folder) == [
        "step-00000010",
        "step-00000020",
        "step-00000030",
    ]
    for seen in runs["background"].seen:  # steps went on meanwhile, but for the last
        assert (
            seen["written_at"][0] > 10
            and seen["written_at"][1] > 20
            and seen["written_at"][2] == 30
        )
    for name in checkpoints_of(runs["plain"].folder):
        theirs = contents(runs["plain"].folder / "checkpoints" / name)
        ours = contents(runs["background"].folder / "checkpoints" / name)
        assert ours.keys() == theirs.keys() and len(ours) >= 4
        for file in ours:
            torch.testing.assert_close(
                as_tensors(ours[file]), as_tensors(theirs[file]), rtol=0, atol=0
            )
    for seen in runs["broken"].seen:
        assert "step-00000010 cannot be written: [Errno 28] No space left" in seen["ended"]
        assert 10 <= seen["progress"]["step"] < 20
    assert checkpoints_of(runs["broken"].folder) == []


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
    alone, options, tmp_path, wait_for, steps_logged, number
):
    config = changed(options, output=str(tmp_path / "stopped"), loop={"save_every": 0})
    process = launch(config, "configs/accelerate/ddp.yaml", by="headstart.scripts.launch")
    wait_for(process, lambda: steps_logged(config.output) >= 5, "step 5")
    process.send_signal(number)
    said = finished(process, seconds=60)
    assert process.returncode == 0 and "Traceback" not in said, said
    (checkpoint,) = checkpoints_of(config.output)
    step = int(checkpoint.removeprefix("step-"))
    assert (
        said.count(f"stopped at step {step} of {STEPS}; the same command resumes from there") == 1
    )
    assert said.count("stopping after this step") == 1
    train(config)
    assert_same_curve(config.output, alone)


@pytest.mark.parametrize("by", ["headstart.scripts.launch", "accelerate.commands.launch"])
def test_where_a_process_dies_the_others_say_that_the_same_command_resumes_and_it_does(
    alone, options, tmp_path, wait_for, steps_logged, by
):
    for attempt in range(3):
        config = changed(options, output=str(tmp_path / f"dies-{attempt}"), loop={"save_every": 2})
        process = launch(config, "configs/accelerate/ddp.yaml", by=by)
        wait_for(process, lambda run=config.output: steps_logged(run) >= 5, "step 5")
        os.kill(workers(process)[1], signal.SIGKILL)
        said = finished(process, seconds=60)
        assert process.returncode == 1
        after = said[said.index("error: ") :]
        if "rank 0" in after:  # torch ends it by SIGTERM, perhaps before it has spoken
            break
    assert "rank 0 lost contact with another process at train/" in after
    assert "the same command resumes from" in after and "checkpoints/step-" in after
    ours = by == "headstart.scripts.launch"
    assert ("Traceback" in after) == (not ours) and after.count("\n") < (8 if ours else 50), after
    named = "error: rank 1 ended with signal SIGKILL; the same command resumes"
    assert named in after if ours else "rank      : 1 (local_rank: 1)" in said
    assert checkpoints_of(config.output) and steps_logged(config.output) < STEPS
    train(config)
    assert_same_curve(config.output, alone)


def test_a_mistake_ends_our_own_launcher_with_its_one_line_and_status_2(options, tmp_path):
    config = changed(options, output=str(tmp_path / "run"), optim=OptimConfig(name="muon"))
    process = launch(config, "configs/accelerate/fsdp2.yaml", by="headstart.scripts.launch")
    said = finished(process, seconds=60)
    assert process.returncode == 2 and "Traceback" not in said
    assert "error: Muon needs whole matrices, which FSDP2 shards" in said


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
def test_an_engine_that_cannot_train_the_config_is_refused(options, engine, change, words):
    config = changed(options, **change)
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
def test_a_deepspeed_file_that_contradicts_the_config_is_refused(options, given, words):
    share = Share.of(8, 2, 0, 2)
    configure_deepspeed({"gradient_clipping": "auto", "bf16": {"enabled": False}}, options, share)
    with refused(words):
        configure_deepspeed(given, options, share)


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
    expected = (train(short) / "last" / "model.safetensors").read_bytes()
    usual = {
        "ACCELERATE_DYNAMO_BACKEND": "NO",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "2",
        "ACCELERATE_MIXED_PRECISION": "no",
        "ACCELERATE_USE_CPU": "True",
        "FSDP_OFFLOAD_PARAMS": "true",
    }
    for name, value in usual.items():
        monkeypatch.setenv(name, value)
    other = train(changed(short, output=str(tmp_path / "other")))
    assert (other / "last" / "model.safetensors").read_bytes() == expected


def test_processes_that_read_different_data_are_refused():
    class Two:
        """This process, and another one of other data."""

        device = torch.device("cpu")

        def gather(self, own):
            return torch.cat([own, self.other])

    examples = [Example([1, 2, 3], [False, True, True]), Example([4, 5], [False, True])]
    processes = Two()
    processes.other = torch.tensor([0, 0])
    with refused("1 0 2"):
        check_same_everywhere(processes, examples)
    seen = []
    processes.gather = lambda own: seen.append(own) or torch.cat([own, own])
    check_same_everywhere(processes, examples)
    for change in (examples[::-1], examples[:1], [examples[0], Example([4, 6], [False, True])]):
        check_same_everywhere(processes, change)
    check_same_everywhere(processes, [examples[0], Example([4, 5], [False, False])])
    assert len({tuple(own.tolist()) for own in seen}) == 5  # tokens, masks and order all count


# Targets that do not fit on one device.


@pytest.fixture(scope="module")
def thirteen(options, tmp_path_factory):
    """A run on 13 conversations, one of which is there twice: the last step of an epoch leaves
    forwards empty."""
    folder = tmp_path_factory.mktemp("thirteen")
    lines = Path(options.data.sources[0]).read_text(encoding="utf-8").splitlines()[:5]
    messages = [json.loads(line)["messages"] for line in lines]
    long = [
        [{**user, "content": user["content"] + " please" * i}, says]
        for i in range(7)
        for user, says in messages[:1]
    ]
    rows = [{"messages": each} for each in [*messages, *long, messages[3]]]
    source = write_rows(folder / "data.jsonl", rows)
    return changed(
        options,
        output=str(folder / "whole"),
        data={"sources": [source], "held_out": 0.01},
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


def cut_jobs(options, thirteen, folder):
    """With a target cut over two processes, or with something that happens to one of them."""

    def cut(config, mode, cache=None):
        return changed(config, target_placement="shard", features={"mode": mode, "folder": cache})

    judged_often = changed(options, loop={"eval_every": 5, "save_every": 0})
    more = {"batch_tokens": BATCH_TOKENS}
    jobs = {
        "cut": (cut(options, "online"), {}),
        "cut, cached": (cut(thirteen, "cached"), more),
        "cut, half-filled": (cut(thirteen, "cached", str(folder / "half-filled")), more),
        "cut, auto": (cut(thirteen, "auto"), more),
        "cut, packed": (cut(packed(options), "online"), {}),
        "cut, other drafts": (cut(options, "online"), {"other_drafts": ["1"]}),
        "cut, stopped": (cut(judged_often, "online"), {"stopped_in_answers": {"1": 2}}),
        "stopped": (judged_often, {"stopped_in_answers": {"1": 2}}),
        "other numbers": (changed(judged_often, loop={"patience": 1}), {"other_numbers": ["1"]}),
        "failing callback": (options, {"failing_callback": 4}),
        "fastest": (
            changed(options, dtype="fastest", loop={"precision": "auto", "max_steps": 2}),
            {"precision": "measured"},
        ),
    }
    return {
        name: (changed(config, loop={"timeout": 0.5}), given)
        for name, (config, given) in jobs.items()
    }


def packed(config):
    """Rows of one process have fewer lengths than those of the other; in the last step of an epoch
    one has none."""
    return changed(
        config,
        data={"max_length": 64, "pack": 64},
        loop={"batch_size": 2, "save_every": 0},
    )


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
    folder = (
        run.folder.parent / "half-filled" if name == "cut, half-filled" else run.folder / "features"
    )
    ours, theirs = states_in(folder), states_in(whole / "features")
    assert ours.keys() == theirs.keys() and len(theirs) > 8
    for key, states in theirs.items():
        torch.testing.assert_close(ours[key], states, atol=1e-5, rtol=1e-5)
    assert_same_curve(run.folder, whole)
    if name != "cut, auto":
        assert {seen["batches"] % 2 for seen in run.seen} == {1}, run.seen


def test_packed_rows_of_a_target_that_is_cut_need_as_many_forwards_on_every_process(
    two, options, tmp_path
):
    alone = train(changed(packed(options), output=str(tmp_path / "alone")))
    run = two["cut, packed"]
    assert [seen["ended"] for seen in run.seen] == ["finished", "finished"]
    assert_same_curve(run.folder, alone)


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
    assert {name: value for name, value in ours["progress"].items() if name != "seconds"} == {
        name: value for name, value in theirs["progress"].items() if name != "seconds"
    }


def test_processes_agree_on_what_auto_is(two):
    """Each of them could measure it otherwise."""
    saved = yaml.safe_load((two["fastest"].folder / "config.yaml").read_text())
    assert saved["dtype"] == "float32" and saved["loop"]["precision"] in ("float32", "bfloat16")


def test_a_target_spread_over_devices_has_the_states_of_a_whole_one(options):
    config = changed(options, target_placement="spread")
    whole, spread = (load_target(each, Accelerator()) for each in (options, config))
    tokens_BT = torch.randint(258, (2, 9))
    for ours, theirs in zip(spread.read(tokens_BT, (0, -1)), whole.read(tokens_BT, (0, -1))):
        assert torch.equal(ours, theirs)


def test_a_placement_that_the_launch_cannot_give_is_refused(options, tmp_path):
    options = changed(options, output=str(tmp_path / "run"))
    config = changed(options, target_placement="shard")
    with refused("'shard' 1 'spread' 'whole'"):
        train(config)
    adapted = changed(options, target_placement="spread", adapter=AdapterConfig(rank=4))
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


def test_a_block_is_gathered_while_the_one_before_it_runs(options):
    """Of blocks that were each a root of their own, every one would wait for all that was launched
    before."""
    done = subprocess.run(
        [sys.executable, "-c", CUT, options.target], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    count = len(json.loads(said["ahead"]))
    assert said["roots"] == "0" and said["whole"] == said["cut"] == "True"
    assert json.loads(said["ahead"]) == [[i + 1] for i in range(count - 1)] + [[]] and count > 1


@pytest.mark.parametrize("placement", ["whole", "spread"])
def test_the_targets_attention_and_packing_are_transformers_own_options(
    options, placement, monkeypatch
):
    config = changed(options, target_placement=placement, target_attention="eager")
    assert load_target(config, Accelerator()).model.config._attn_implementation == "eager"
    assert load_target(options, Accelerator()).model.config._attn_implementation == "sdpa"
    given = []
    monkeypatch.setattr(Target, "load", lambda *arguments: given.append(arguments[-1]))
    load_target(changed(config, target_quantization={"load_in_4bit": True}), Accelerator())
    assert given == [
        {"attn_implementation": "eager", "quantization_config": {"load_in_4bit": True}}
    ]


def test_packed_weights_are_not_cut(options):
    with refused("target_quantization needs"):
        changed(options, target_quantization={})
    accelerator = SimpleNamespace(num_processes=2, device=torch.device("cpu"))
    config = changed(options, target_placement="shard", target_quantization={"load_in_8bit": True})
    with refused("packed target_placement 'whole' 'spread' 'shard'"):
        load_target(config, accelerator)
