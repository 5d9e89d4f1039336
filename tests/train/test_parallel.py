"""Two processes over gloo, started as users start them: every engine, the same losses, and which engine it was.

A launch file of configs/accelerate runs unchanged but for the number of processes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from accelerate import Accelerator

from headstart.heads.checkpoint import load_head
from headstart.inference import Target
from headstart.train.batches import Share
from headstart.train.big_target import load_target
from headstart.train.config import AdapterConfig, OptimConfig
from headstart.train.data import Example
from headstart.train.loop import check_same_everywhere, train
from headstart.train.parallel import check_engine, configure_deepspeed

ROOT = Path(__file__).parents[2]
STEPS = 30
SAME = 1e-4
"""Largest relative difference of two losses."""


@pytest.fixture(scope="module")
def options(run_options, tmp_path_factory):
    """A head that reads its own weights outside of its modules and feeds on its own outputs; rows of any length."""
    config = run_options(tmp_path_factory.mktemp("parallel") / "one process", STEPS)
    return dataclasses.replace(
        config,
        head={"type": "eagle3", "depth": 3, "feature_layers": [0, -1]},
        loop=dataclasses.replace(config.loop, batch_size=8, eval_every=0, save_every=15),
        optim=OptimConfig(lr=3e-3),
    )


@pytest.fixture(scope="module")
def alone(options):
    """The run of one process."""
    return train(options)


def launch(config, launch_file, *more, processes=2, **environment):
    """Start a run as its own processes; the text it prints comes through `stdout`."""
    folder = Path(config.output)
    folder.parent.mkdir(parents=True, exist_ok=True)
    given = folder.with_suffix(".yaml")
    given.write_text(yaml.safe_dump(json.loads(json.dumps(dataclasses.asdict(config)))), encoding="utf-8")
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    command += ["--config_file", str(launch_file), "--num_processes", str(processes), "--main_process_port", "0"]
    command += [*more, "scripts/train.py", "--config", str(given)]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finished(process, seconds=240):
    try:
        said, _ = process.communicate(timeout=seconds)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return said


def losses(folder):
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    return {row["step"]: [*row["loss"], row["gradient_norm"]] for row in rows if "loss" in row}


def assert_same_curve(folder, other):
    ours, theirs = losses(Path(folder)), losses(Path(other))
    assert ours.keys() == theirs.keys() == set(range(1, STEPS + 1))
    for step, values in theirs.items():
        assert ours[step] == pytest.approx(values, rel=SAME), f"step {step}"


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="DeepSpeed compiles its exchange for CPUs")


@pytest.mark.parametrize(
    ("word", "engine", "micro_batch"),
    [
        ("ddp", "DDP", 2),
        pytest.param("zero2", "ZeRO-2", 2, marks=needs_compiler),
        pytest.param("zero3", "ZeRO-3", None, marks=needs_compiler),
        ("fsdp2", "FSDP2", None),
    ],
)
def test_two_processes_have_the_losses_of_one(options, alone, word, engine, micro_batch, tmp_path):
    loop = dataclasses.replace(options.loop, micro_batch=micro_batch)
    config = dataclasses.replace(options, output=str(tmp_path / word), loop=loop)
    process = launch(config, f"configs/accelerate/{word}.yaml")
    said = finished(process)
    assert process.returncode == 0, said
    assert f"; {engine}; step 0 of {STEPS}" in said
    assert_same_curve(config.output, alone)


def checkpoints(folder):
    return sorted(path.name for path in (Path(folder) / "checkpoints").glob("*"))


@pytest.fixture
def stopped(options, tmp_path, wait_for, steps_logged):
    """Two processes that SIGTERM ended in the middle: the config, and what they printed."""

    def run(word):
        loop = dataclasses.replace(options.loop, save_every=0)
        config = dataclasses.replace(options, output=str(tmp_path / word), loop=loop)
        process = launch(config, f"configs/accelerate/{word}.yaml")
        wait_for(process, lambda: steps_logged(config.output) >= 8, "step 8")
        process.send_signal(signal.SIGTERM)
        said = finished(process)
        (checkpoint,) = checkpoints(config.output)
        step = int(checkpoint.removeprefix("step-"))
        assert f"stopped at step {step} of {STEPS}" in said and 8 <= step < STEPS
        return config, checkpoint

    return run


def test_stopped_on_two_processes_a_run_goes_on_alone_at_the_same_place_in_the_data(alone, stopped, capsys):
    config, checkpoint = stopped("ddp")
    train(config)
    said = capsys.readouterr().out
    assert f"{checkpoint} was written by DDP on 2 processes: the data goes on at the same place" in said
    assert_same_curve(config.output, alone)


def test_what_another_engine_sharded_is_refused_with_the_way_out(stopped):
    config, checkpoint = stopped("fsdp2")
    with pytest.raises(ValueError, match=f"{checkpoint} was written by FSDP2 on 2 processes.*init_from"):
        train(config)
    process = launch(config, "configs/accelerate/fsdp2.yaml")
    assert "FSDP2; step " in finished(process) and process.returncode == 0


def test_where_one_process_dies_the_others_stop_and_it_is_named(options, tmp_path, wait_for, steps_logged):
    loop = dataclasses.replace(options.loop, max_steps=100_000, save_every=0)
    config = dataclasses.replace(options, output=str(tmp_path / "dies"), loop=loop)
    process = launch(config, "configs/accelerate/ddp.yaml")
    wait_for(process, lambda: steps_logged(config.output) >= 3, "step 3")
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(workers[1]), signal.SIGKILL)
    start = time.monotonic()
    said = finished(process, seconds=60)
    assert process.returncode != 0 and time.monotonic() - start < 60
    assert "rank      : 1 (local_rank: 1)" in said and "Signal 9 (SIGKILL)" in said


# What cannot be is told before anything is loaded.


@pytest.mark.parametrize(
    ("engine", "change", "words"),
    [
        ("ZeRO-2", {"optim": OptimConfig(name="muon")}, "Muon turns whole matrices, which ZeRO-2 cuts; choose"),
        ("FSDP2", {"optim": OptimConfig(name="muon")}, "Muon turns whole matrices, which FSDP2 cuts; choose"),
        ("ZeRO-3", {"adapter": AdapterConfig(rank=4)}, "ZeRO-3 would shard the adapter inside the target; choose"),
    ],
)
def test_an_engine_that_cannot_train_the_config_is_refused(options, engine, change, words):
    config = dataclasses.replace(options, **change)
    check_engine("DDP", config)
    with pytest.raises(ValueError, match=words):
        check_engine(engine, config)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"gradient_accumulation_steps": 3}, "gradient_accumulation_steps 3, which does not fit the config's 2"),
        ({"train_batch_size": 4}, "train_batch_size 4, which does not fit the config's 8; write 'auto'"),
        ({"gradient_clipping": 0.5}, "gradient_clipping 0.5, which does not fit the config's 1.0"),
        ({"optimizer": {"type": "Adam"}}, "a section 'optimizer', which the config decides; remove it"),
        ({"bf16": {"enabled": True}}, "a section 'bf16', which the config decides; remove it"),
    ],
)
def test_a_deepspeed_file_that_contradicts_the_config_is_refused(options, given, words):
    share = Share.of(8, 2, 0, 2)
    configure_deepspeed({"gradient_clipping": "auto", "bf16": {"enabled": False}}, options, share)
    with pytest.raises(ValueError, match=words):
        configure_deepspeed(given, options, share)


def test_a_launch_file_of_another_precision_is_refused(options, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.raises(ValueError, match=r"mixed_precision 'fp16', the config loop\.precision 'float32'"):
        train(options)


def test_processes_that_read_different_data_are_refused():
    class Two:
        """This process, and another one of other data."""

        device = torch.device("cpu")

        def gather(self, own):
            return torch.cat([own, self.other])

    examples = [Example([1, 2, 3], [False, True, True]), Example([4, 5], [False, True])]
    processes = Two()
    processes.other = torch.tensor([0, 0])
    with pytest.raises(ValueError, match="process 1 reads other data than process 0: 0 and 2 sequences"):
        check_same_everywhere(processes, examples)
    seen = []
    processes.gather = lambda own: seen.append(own) or torch.cat([own, own])
    check_same_everywhere(processes, examples)
    for change in (examples[::-1], examples[:1], [examples[0], Example([4, 6], [False, True])]):
        check_same_everywhere(processes, change)
    check_same_everywhere(processes, [examples[0], Example([4, 5], [False, False])])
    assert len({tuple(own.tolist()) for own in seen}) == 5  # tokens, masks and order all count


# Targets that do not fit on one device.


def test_a_target_cut_over_the_processes_gives_the_same_losses_and_the_same_head(options, alone, tmp_path):
    config = dataclasses.replace(options, output=str(tmp_path / "cut"), target_placement="shard")
    process = launch(config, "configs/accelerate/ddp.yaml")
    said = finished(process)
    assert process.returncode == 0, said
    assert_same_curve(config.output, alone)
    ours, theirs = (
        json.loads((Path(folder) / "log.jsonl").read_text().splitlines()[-1]) for folder in (config.output, alone)
    )
    assert ours["eval"] == theirs["eval"]  # the decoder runs on it too
    assert load_head(Path(config.output) / "last")[1].origin == load_head(alone / "last")[1].origin


def test_processes_agree_on_what_auto_is(options, tmp_path):
    """Each of them could measure it otherwise."""
    loop = dataclasses.replace(options.loop, precision="auto", max_steps=2, epochs=1.0)
    config = dataclasses.replace(options, output=str(tmp_path / "auto"), target_dtype="auto", loop=loop)
    process = launch(config, "configs/accelerate/ddp.yaml")
    said = finished(process)
    assert process.returncode == 0, said
    saved = yaml.safe_load((tmp_path / "auto" / "config.yaml").read_text())
    assert saved["target_dtype"] == "float32" and saved["loop"]["precision"] in ("float32", "bfloat16")


def test_a_target_spread_over_devices_has_the_states_of_a_whole_one(options):
    config = dataclasses.replace(options, target_placement="spread")
    whole, spread = (load_target(each, Accelerator()) for each in (options, config))
    tokens_BT = torch.randint(258, (2, 9))
    for ours, theirs in zip(spread.read(tokens_BT, (0, -1)), whole.read(tokens_BT, (0, -1))):
        assert torch.equal(ours, theirs)


def test_a_placement_that_the_launch_cannot_give_is_refused(options, tmp_path):
    options = dataclasses.replace(options, output=str(tmp_path / "run"))
    config = dataclasses.replace(options, target_placement="shard")
    with pytest.raises(ValueError, match="'shard' does not fit a run of 1 processes; choose 'spread', or 'whole'"):
        train(config)
    adapted = dataclasses.replace(options, target_placement="spread", adapter=AdapterConfig(rank=4))
    with pytest.raises(ValueError, match="an adapter needs target_placement 'whole', not 'spread'"):
        train(dataclasses.replace(adapted, head={"type": "medusa", "num_heads": 2}))


CUT = """
import sys, torch
from torch import distributed
from transformers import AutoModelForCausalLM
from headstart.inference import Target
from headstart.train.big_target import cut_blocks

distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval().requires_grad_(False)
tokens_BT = torch.randint(250, (2, 9))
before = Target(model).read(tokens_BT, (0, -1))
whole = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
cut_blocks(model)
target = Target(model)
assert all(map(torch.equal, before, target.read(tokens_BT, (0, -1))))
states = [block._get_fsdp_state() for block in target.ends.blocks]
print("roots", sum(state._is_root for state in states))
print("ahead", [[states.index(ahead) for ahead in state._states_to_forward_prefetch] for state in states])
print("whole", whole == {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)})
print("cut", all(type(weight).__name__ == "DTensor" for block in target.ends.blocks for weight in block.parameters()))
"""


def test_a_block_is_gathered_while_the_one_before_it_runs(options):
    """Of blocks that were each a root of their own, every one would wait for all that was launched before."""
    done = subprocess.run([sys.executable, "-c", CUT, options.target], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    count = len(json.loads(said["ahead"]))
    assert said["roots"] == "0" and said["whole"] == said["cut"] == "True"
    assert json.loads(said["ahead"]) == [[i + 1] for i in range(count - 1)] + [[]] and count > 1


@pytest.mark.parametrize("placement", ["whole", "spread"])
def test_the_targets_attention_and_packing_are_transformers_own_options(options, placement, monkeypatch):
    config = dataclasses.replace(options, target_placement=placement, target_attention="eager")
    assert load_target(config, Accelerator()).model.config._attn_implementation == "eager"
    assert load_target(options, Accelerator()).model.config._attn_implementation == "sdpa"
    given = []
    monkeypatch.setattr(Target, "load", lambda *arguments: given.append(arguments[-1]))
    load_target(dataclasses.replace(config, target_quantization={"load_in_4bit": True}), Accelerator())
    assert given == [{"attn_implementation": "eager", "quantization_config": {"load_in_4bit": True}}]


def test_packed_weights_are_not_cut(options):
    with pytest.raises(ValueError, match="target_quantization needs a mapping such as"):
        dataclasses.replace(options, target_quantization={})
    accelerator = SimpleNamespace(num_processes=2, device=torch.device("cpu"))
    config = dataclasses.replace(options, target_placement="shard", target_quantization={"load_in_8bit": True})
    with pytest.raises(ValueError, match="target_quantization needs target_placement 'whole' or 'spread', not 'shard'"):
        load_target(config, accelerator)
