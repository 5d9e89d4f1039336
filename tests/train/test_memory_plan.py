"""What a run would need: published parameter counts, and bytes that fall as they are cut."""

from __future__ import annotations

import dataclasses
import json
import re
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from messages import refused
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.heads.dflash import head as dflash
from headstart.inference import load_tokenizer
from headstart.scripts.command_line import options
from headstart.train import loop
from headstart.train import memory_plan as plan
from headstart.train.config import FeaturesConfig, OptimConfig, TrainConfig
from headstart.train.data.split import split_held_out
from headstart.train.engines import with_formats
from headstart.train.features.placement import load_target
from headstart.train.head import head_of

CONFIGS = Path(__file__).parents[2] / "configs"
LLAMAS = {
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "70b": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
}
COUNTS = {"8b": 8_030_261_248, "70b": 70_553_706_496}  # of the published checkpoints
FILES = {"8b": "llama-3.1-8b-eagle3.yaml", "70b": "llama-3.3-70b-eagle3.yaml"}


@pytest.fixture
def config(tmp_path):
    """The recipe of a model, whose config is all that there is of it: `config("8b",
    plan="ddp:8")`."""

    def build(name, **changes):
        shape = LlamaConfig(
            **LLAMAS[name],
            num_key_value_heads=8,
            vocab_size=128256,
            max_position_embeddings=131072,
            tie_word_embeddings=False,
            dtype="bfloat16",
        )
        shape.save_pretrained(tmp_path / name)
        arguments = ["--config", str(CONFIGS / FILES[name]), "--target", str(tmp_path / name)]
        recipe = options(TrainConfig, "train", "", [*arguments, "--data.sources", "[c.jsonl]"])
        return dataclasses.replace(recipe, **changes)

    return build


@pytest.mark.parametrize("name", LLAMAS)
def test_parameters_are_those_of_the_published_models(config, name):
    found = plan.plan_run(config(name, plan="ddp:8", target_placement="whole"))
    assert found.target_parameters == COUNTS[name]
    (told,) = re.findall(r"Parameters: ([\d,]+)", (CONFIGS / FILES[name]).read_text())
    assert found.head_parameters == int(told.replace(",", ""))
    assert found.memory["target"] == 2 * COUNTS[name]
    assert found.memory["optimizer"] == 8 * found.head_parameters
    assert found.checkpoint_bytes == 12 * found.head_parameters
    assert found.memory["gradients"] == found.memory["head"] == 4 * found.head_parameters


def test_a_70b_target_trains_on_eight_devices_of_80_gb_only_if_it_is_cut(config):
    whole = plan.plan_run(config("70b", plan="zero2:8", target_placement="whole"))
    cut = plan.plan_run(config("70b", plan="zero2:8"))
    assert sum(whole.memory.values()) > 80e9 > sum(cut.memory.values())
    ends = 2 * 2 * 128256 * 8192  # embedding and LM head stay whole
    assert cut.memory["target"] == pytest.approx(
        ends + (2 * COUNTS["70b"] - ends) * (1 / 8 + 1 / 80), rel=1e-3
    )


def test_a_step_of_tokens_needs_what_as_many_rows_need(config):
    recipe = config("8b", plan="ddp:8")
    length = recipe.data.max_length
    sides = (
        {"batch_size": 32, "micro_batch": 2},
        {"micro_batch": None, "batch_tokens": 32 * length, "micro_tokens": 2 * length},
    )
    rows, tokens = (
        plan.plan_run(
            dataclasses.replace(recipe, loop=dataclasses.replace(recipe.loop, **side))
        ).memory
        for side in sides
    )
    assert rows == tokens


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operations in the block have made and that are alive."""

    def __init__(self):
        super().__init__()
        self.sizes = {}
        self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, made)):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                if storage._cdata not in self.sizes:
                    self.sizes[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self.sizes.pop, storage._cdata)
        self.most = max(self.most, sum(self.sizes.values()))
        return made


HEADS = {
    "eagle3": {"depth": 4, "feature_layers": [0, -1]},
    "dflash": {"num_layers": 2, "feature_layers": [0], "mask_token_id": 1, "max_anchors": 16},
    "medusa": {"num_heads": 4, "num_layers": 4},
}
ROW = 512


@pytest.fixture
def long_rows(taught, run_options, tmp_path, changed, monkeypatch):
    """A run on long rows, half of whose held-out ones have long prompts."""
    shape = LlamaConfig(
        vocab_size=258,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2 * ROW,
        bos_token_id=None,
        eos_token_id=0,
    )
    LlamaForCausalLM(shape).save_pretrained(tmp_path / "target")
    load_tokenizer(str(taught)).save_pretrained(tmp_path / "target")
    run = run_options(tmp_path / "run", 2)
    _, held_out = split_held_out(range(16), 0.25, run.loop.seed)
    lines = []
    for number in range(16):
        prompt = ROW - 32 - number if number in held_out[::2] else 8
        row = [2 + (7 * number + place) % 250 for place in range(ROW)]
        answer = [place >= prompt for place in range(ROW)]
        lines.append(json.dumps({"input_ids": row, "loss_mask": answer}))
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    # Fused kernels, which a GPU has, keep no scores.
    monkeypatch.setattr(dflash, "SCORES_ON_CPU", 2**16)
    return changed(
        run,
        target=str(tmp_path / "target"),
        data={
            "sources": [str(tmp_path / "rows.jsonl")],
            "max_length": ROW,
            "held_out": 0.25,
            "cache": str(tmp_path / "tokens"),
        },
        loop={"max_steps": 2, "batch_size": 2, "micro_batch": 1, "eval_every": 0, "save_every": 0},
        eval={"prompts": 4, "conversations": 4, "max_new_tokens": 4, "nodes": 4},
    )


@pytest.mark.parametrize("kind", HEADS)
def test_training_and_evaluation_take_what_is_planned(long_rows, kind, monkeypatch):
    recipe = dataclasses.replace(long_rows, head={"type": kind, **HEADS[kind]})
    planned = plan.plan_run(dataclasses.replace(recipe, plan="one"), torch.device("cpu")).moments
    live = LiveBytes()
    taken = {}

    def measured(name, moment):
        work = getattr(loop.Trainer, name)

        def watched(*given, **more):
            live.most = 0
            result = work(*given, **more)
            taken[moment] = live.most
            return result

        monkeypatch.setattr(loop.Trainer, name, watched)

    measured("gradients", "training")
    measured("evaluate_and_save", "evaluation")
    with live:
        loop.train(recipe)
    ratios = {moment: size / planned[moment] for moment, size in taken.items()}
    assert all(0.9 <= ratio <= 1.1 for ratio in ratios.values()), ratios


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_an_evaluation_keeps_one_depth_of_a_head_without_a_cache(config, kind):
    """Layers add to what training keeps, by depth; an evaluation needs the share of one depth."""
    found = []
    for layers in (8, 40):
        head = {"type": kind, "num_heads": 4, "num_layers": layers}
        recipe = dataclasses.replace(config("8b", plan="one", dtype="float32"), head=head)
        loop = dataclasses.replace(recipe.loop, micro_batch=1, precision="float32")
        recipe = dataclasses.replace(recipe, loop=loop)
        found.append(plan.plan_run(recipe, torch.device("cpu")))
    few, many = found
    kept = many.memory["activations"] - few.memory["activations"]
    # Beside what stands: two copies of the head in float32, and a forward.
    forwards = [
        each.moments["evaluation"] - each.moments["saving"] - (4 + 4) * each.head_parameters
        for each in found
    ]
    assert 0 <= forwards[1] - forwards[0] <= 1.01 * kept / 4


@pytest.mark.parametrize(("mode", "replays"), [("online", True), ("stored", False)])
def test_only_a_target_that_answers_has_states_to_replay(config, mode, replays):
    run = config("8b", plan="one", features=FeaturesConfig(mode=mode))
    found = plan.plan_run(run, torch.device("cpu"))
    assert (found.replay_bytes > 0) is replays
    assert (found.memory["replayed answers"] > 0) is replays


def test_every_engine_cuts_what_it_is_for(config):
    """W bytes of weights on 8 processes, and what each engine keeps besides, by
    benchmarks/memory_plan.py."""
    found = {
        word: plan.plan_run(config("8b", plan=f"{word}:8"))
        for word in plan.ENGINES
        if word != "one"
    }
    weights = 4 * found["ddp"].head_parameters
    shard = weights // 8
    bucket = 4 * 50_000_000
    expected = {
        "ddp": {
            "head": weights,
            "gradients": weights,
            "optimizer": 2 * weights,
            "exchange": weights,
        },
        "zero1": {
            "head": weights,
            "gradients": weights + shard,
            "optimizer": 2 * weights // 8 + shard,
            "exchange": bucket,
        },
        "zero2": {
            "head": weights,
            "gradients": weights + shard,
            "optimizer": 2 * weights // 8 + shard,
            "exchange": 2 * bucket,
        },
        "fsdp2": {
            "head": shard,
            "gradients": weights + shard,
            "optimizer": 2 * weights // 8,
            "exchange": weights,
        },
    }
    for word, parts in expected.items():
        for name, size in parts.items():
            assert found[word].memory[name] == pytest.approx(size, rel=1e-6), (word, name)
        assert found[word].moments["training"] == sum(found[word].memory.values())
    assert (
        found["fsdp2"].moments["saving"]
        < found["zero2"].moments["saving"]
        < found["ddp"].moments["saving"]
    )


@pytest.mark.parametrize("word", ["zero1", "zero2"])
def test_the_buckets_that_are_planned_are_those_of_the_deepspeed_files(word):
    options = json.loads((CONFIGS / "deepspeed" / f"{word}.json").read_text())["zero_optimization"]
    assert options["reduce_bucket_size"] == plan.BUCKET
    assert options.get("overlap_comm", False) == (word == "zero2") and options.get(
        "contiguous_gradients", True
    )


PACKED = {
    "4 bits": ({"load_in_4bit": True}, 4.5),
    "4 bits, scales in 8": ({"load_in_4bit": True, "bnb_4bit_use_double_quant": True}, 4.127),
    "8 bits": ({"load_in_8bit": True}, 8),
    "GPTQ": ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4 + 20 / 128),
    "AWQ": ({"quant_method": "awq", "bits": 4, "group_size": 64}, 4 + 20 / 64),
    "FP8": ({"quant_method": "fp8"}, 8),
    "torchao": ({"quant_method": "torchao", "quant_type": "int4_weight_only"}, 4.5),
}


@pytest.mark.parametrize(
    ("name", "in_checkpoint"), [(name, number % 2 == 1) for number, name in enumerate(PACKED)]
)
def test_a_packed_target_is_planned_as_it_is_packed(config, name, in_checkpoint, tmp_path):
    packing, bits = PACKED[name]
    recipe = config("8b", plan="ddp:8", target_placement="whole")
    if not in_checkpoint:
        recipe = dataclasses.replace(recipe, target_quantization=packing)
    else:
        path = tmp_path / "8b" / "config.json"
        path.write_text(
            json.dumps({**json.loads(path.read_text()), "quantization_config": packing})
        )
    found = plan.plan_run(recipe)
    ends = 2 * 128256 * 4096  # embedding and LM head are not packed
    norms = (2 * 32 + 1) * 4096
    expected = 2 * (ends + norms) + (COUNTS["8b"] - ends - norms) * bits / 8
    assert found.memory["target"] == pytest.approx(expected, rel=1e-4)
    assert found.target_parameters == COUNTS["8b"]


def test_a_quantization_that_is_unknown_is_told(config, caplog, capsys):
    found = plan.plan_run(config("8b", plan="ddp:8", target_quantization={"quant_method": "spqr"}))
    assert found.memory["target"] == 2 * COUNTS["8b"]
    assert (
        "unknown to the plan, which counts the weights as not packed"
        in caplog.text + capsys.readouterr().out
    )


def test_a_checkpoint_that_is_packed_is_not_cut(config, tmp_path):
    recipe = config("8b", plan="ddp:8", target_placement="shard", dtype="bfloat16")
    path = tmp_path / "8b" / "config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "quantization_config": PACKED["GPTQ"][0]})
    )
    accelerator = SimpleNamespace(num_processes=2, device=torch.device("cpu"))
    with refused("gptq"):
        load_target(recipe, accelerator)


def test_activations_grow_with_the_rows_and_shrink_when_they_are_recomputed(config):
    def kept(**loop):
        recipe = config("8b", plan="ddp:8")
        return plan.plan_run(
            dataclasses.replace(recipe, loop=dataclasses.replace(recipe.loop, **loop))
        ).memory["activations"]

    one, two = kept(), kept(batch_size=32, micro_batch=2)
    assert 1.5 * one < two < 2.1 * one
    assert kept(recompute=True) < one / 2


@pytest.mark.parametrize(("name", "length"), [("eagle3", 200), ("dflash", 100), ("dflash", 400)])
def test_the_count_on_a_narrow_head_is_what_a_whole_one_keeps(config, name, length):
    """Of SmolLM2's dimensions, which fit here; with more tokens than DFlash has anchors, too."""
    recipe = options(
        TrainConfig,
        "train",
        "",
        ["--config", str(CONFIGS / f"smollm2-{name}.yaml"), "--data.sources", "[c.jsonl]"],
    )
    recipe = dataclasses.replace(
        recipe, head={**recipe.head, "draft_vocab_size": None, "feature_layers": [1, 14, 26]}
    )
    info = plan.TargetInfo(
        "smollm2",
        576,
        8,
        30,
        1536,
        9,
        3,
        64,
        "silu",
        1e-5,
        8192,
        {"rope_type": "default", "rope_theta": 1e5},
    )
    recipe = with_formats(recipe, "bfloat16", "bfloat16")
    head = head_of(recipe, info, LlamaConfig())
    in_16_bits = 2 * sum(
        parameter.numel() for parameter in head.parameters() if parameter.ndim == 2
    )
    estimate = plan.activations(recipe, info, rows=1, length=length) + in_16_bits
    real = plan.kept(recipe, info, length, scale=1)
    assert estimate == pytest.approx(real, rel=0.1)


@pytest.mark.parametrize("word", ["eight", "ddp:none", "zero3:8", "zero4:8", "one:2", "ddp:0", ""])
def test_an_unknown_launch_is_refused(config, word):
    with refused(f"'{word}' zero1"):
        plan.plan_run(config("8b", plan=word))


def test_what_could_not_be_launched_is_not_planned(config):
    with refused("Muon needs ZeRO-2"):
        plan.plan_run(config("8b", plan="zero2:8", optim=OptimConfig(name="muon")))
    with refused("batch_size 16 3"):
        plan.plan_run(config("8b", plan="ddp:3"))


@pytest.mark.parametrize("form", [["--plan", "zero2:8"], ["--plan=zero2:8"]])
def test_the_page_ends_with_the_command_that_begins(config, capsys, form):
    arguments = ["--config", "c.yaml", *form, "--data.sources", "[c.jsonl]"]
    plan.show_plan(config("8b", plan="zero2:8"), arguments)
    said = capsys.readouterr().out
    assert "8,030,261,248 parameters" in said and "ZeRO-2, 8 processes, target whole" in said
    launch = (
        "accelerate launch --config_file configs/accelerate/zero2.yaml --num_processes 8"
        " scripts/train.py"
    )
    assert f"to begin: {launch} --config c.yaml --data.sources '[c.jsonl]'" in said
    assert (CONFIGS / "accelerate" / "zero2.yaml").is_file()
    assert not torch.cuda.is_initialized()
