"""Medusa-2 on a tiny target: first the heads learn, then both; what is saved is what is served."""

from __future__ import annotations

import dataclasses
import json
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from helpers import split_examples
from messages import refused
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from headstart.heads import MedusaConfig, MedusaHead, TargetFeatures
from headstart.heads.checkpoints.save_load import load_head
from headstart.heads.objective import Objective
from headstart.inference import SpeculativeLM, Stats, Target, custom_generate, load_tokenizer
from headstart.scripts.export import ExportConfig, export_foreign
from headstart.scripts.generate import GenerateConfig
from headstart.train import adapter
from headstart.train.adapter import JointModule
from headstart.train.config import AdapterConfig
from headstart.train.data.batches import collate
from headstart.train.data.conversations import read_conversations
from headstart.train.evaluate import prompt_of
from headstart.train.loop import train

STEPS, JOINT_FROM = 12, 6
MODULES = ["q_proj", "o_proj", "down_proj"]


@dataclass(frozen=True)
class Trained:
    """A run that nothing happened to, and the module that it trained."""

    folder: Path
    module: JointModule


@pytest.fixture(scope="module")
def joint_options(run_options, changed):
    """Builds the options of a run: `joint_options(folder)`."""

    def build(output):
        config = changed(
            run_options(output, STEPS), loop={"eval_every": 0, "save_every": 3, "keep": 10}
        )
        return changed(
            config, adapter=AdapterConfig(rank=4, alpha=8, modules=MODULES, head_lr_ratio=2.0)
        )

    return build


@pytest.fixture(scope="module")
def trained(joint_options, tmp_path_factory):
    built = []

    class Recorded(JointModule):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            built.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapter, "JointModule", Recorded)
        folder = train(joint_options(tmp_path_factory.mktemp("joint")))
    return Trained(folder, built[0])


@pytest.fixture
def options(joint_options, tmp_path):
    return joint_options(tmp_path / "run")


@pytest.fixture(scope="module")
def strong(trained, tmp_path_factory):
    """Its last head with an adapter of ten times the effect, so that the adapted model answers
    otherwise."""
    folder = tmp_path_factory.mktemp("strong") / "head"
    shutil.copytree(trained.folder / "last", folder)
    path = folder / "adapter" / "adapter_model.safetensors"
    save_file(
        {
            name: weight * (10 if "lora_B" in name else 1)
            for name, weight in load_file(path).items()
        },
        path,
        metadata={"format": "pt"},
    )
    return folder


@pytest.fixture(scope="module")
def held_out(taught, run_options):
    config = run_options("unused", STEPS)
    target = Target.from_pretrained(taught, torch.float32)
    return split_examples(
        read_conversations(config.data.sources[0]), config, target, load_tokenizer(taught)
    )[1]


def saved_at(folder, step):
    return load_file(folder / "checkpoints" / f"step-{step:08d}" / "model.safetensors")


def part(weights, name):
    """The weights of a part of the module, under the part's own names."""
    return {
        key.removeprefix(name + "."): tensor
        for key, tensor in weights.items()
        if key.startswith(name + ".")
    }


def base_model(folder, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def merged_model(folder, head, dtype=torch.float32):
    return PeftModel.from_pretrained(
        base_model(folder, dtype), str(head / "adapter")
    ).merge_and_unload()


def answer(decoder, prompt, **more):
    """What a model or a decoder of it generates greedily."""
    output = decoder.generate(prompt, max_new_tokens=24, do_sample=False, **more)
    return getattr(output, "sequences", output).tolist()


def test_first_only_the_heads_learn_as_they_would_alone(trained, run_options, changed, tmp_path):
    alone = changed(run_options(tmp_path, STEPS), loop={"eval_every": 0, "save_every": JOINT_FROM})
    heads = saved_at(train(alone), JOINT_FROM)
    found = saved_at(trained.folder, JOINT_FROM)
    assert part(found, "head").keys() == heads.keys()
    # Not bit for bit: with the adapter's zeros beside it the target's forward may round differently
    # on some machines.
    learned = part(found, "head")
    assert all(
        torch.allclose(learned[name], tensor, rtol=0, atol=1e-6) for name, tensor in heads.items()
    )
    start = part(saved_at(trained.folder, 3), "adapter")
    assert start.keys() == part(found, "adapter").keys()
    assert all(torch.equal(part(found, "adapter")[name], tensor) for name, tensor in start.items())
    ends = [tensor for name, tensor in start.items() if "lora_B" in name]
    # the adapted model is the base
    assert len(ends) == 2 * len(MODULES) and not any(tensor.any() for tensor in ends)


def test_then_both_learn(trained):
    before, after = saved_at(trained.folder, JOINT_FROM), saved_at(trained.folder, JOINT_FROM + 3)
    assert any("lora_A" in name for name in before)
    assert not [name for name, tensor in before.items() if torch.equal(after[name], tensor)]


def test_the_adapter_learns_more_slowly_by_the_ratio(options, changed):
    """Adam's first steps are about the learning rate, whatever the gradient."""
    sizes = []
    for ratio in (1.0, 4.0):
        config = dataclasses.replace(options.adapter, heads_first=0.0, head_lr_ratio=ratio)
        folder = train(
            changed(
                options,
                output=f"{options.output}-{ratio}",
                adapter=config,
                loop={"max_steps": 2, "save_every": 1},
            )
        )
        moved = part(saved_at(folder, 2), "adapter")
        sizes.append(max(tensor.abs().max() for name, tensor in moved.items() if "lora_B" in name))
    assert sizes[0] == pytest.approx(4 * float(sizes[1]), rel=0.2)


@pytest.fixture
def parts(taught, held_out):
    """A head, a target with an adapter, and a batch."""
    target = Target.from_pretrained(taught, torch.float32)
    head = MedusaHead(MedusaConfig(num_heads=2), target.info)
    head.initialize(target.modules, torch.ones(target.info.vocab_size, dtype=torch.int64))
    config = AdapterConfig(rank=4, alpha=8, modules=MODULES, keep_base=2.5)
    return JointModule(target, head, Objective({"ce": 1.0}), config), target, collate(held_out)


def stir(module, size=0.3):
    """Move the adapter away from its start."""
    torch.manual_seed(3)
    for weight in module.adapter.values():
        weight.data += size * torch.randn_like(weight)


def naive_loss(module, taught, batch):
    """The heads' loss on the adapted model and 2.5 times KL(base || adapted), position by
    position."""
    tokens, mask = batch.tokens_BT, batch.loss_mask_BT
    states = module.peft(input_ids=tokens, output_hidden_states=True, use_cache=False)
    last = states.hidden_states[-1]
    ends = Target.from_pretrained(taught, torch.float32).modules
    heads = module.head(TargetFeatures(last, last, tokens, mask, ends)).loss
    base = base_model(taught)(input_ids=tokens).logits.detach().log_softmax(-1)
    adapted = states.logits.log_softmax(-1)
    distance = torch.zeros(())
    for row in range(len(tokens)):
        for place in range(tokens.shape[1] - 1):
            if mask[row, place + 1]:
                p, q = base[row, place], adapted[row, place]
                distance = distance + (p.exp() * (p - q)).sum()
    return heads + 2.5 * distance, distance


def test_the_base_term_is_the_divergence_from_the_model_without_its_adapter(parts, taught):
    module, _, batch = parts
    stir(module)
    found = module(batch, joint=True).loss
    expected, distance = naive_loss(module, taught, batch)
    assert distance > 1
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    weights = [*module.adapter.values(), *module.head.parameters()]
    for ours, naive in zip(
        torch.autograd.grad(found, weights), torch.autograd.grad(expected, weights), strict=True
    ):
        torch.testing.assert_close(ours, naive, rtol=1e-3, atol=1e-4)


def test_before_the_joint_stage_every_weight_has_a_gradient_and_the_adapters_is_0(parts):
    """A rank whose parameter has no gradient would make the others wait."""
    module, _, batch = parts
    stir(module)
    module(batch, joint=False).loss.backward()
    assert all(weight.grad is not None for weight in module.parameters())
    assert not any(weight.grad.any() for weight in module.adapter.values())


def test_the_model_without_its_adapter_is_the_base_to_the_last_bit(trained, taught, held_out):
    tokens = collate(held_out).tokens_BT
    with torch.no_grad():
        base = base_model(taught)(input_ids=tokens).logits
        adapted = trained.module.peft(input_ids=tokens).logits
        with trained.module.peft.disable_adapter():
            off = trained.module.peft(input_ids=tokens).logits
    assert torch.equal(off, base)
    assert not torch.equal(adapted, base)


@pytest.mark.parametrize("name", ["best", "last"])
def test_the_checkpoint_holds_the_head_and_the_adapter_as_peft_reads_it(
    trained, taught, held_out, name
):
    folder = trained.folder / name
    _, metadata = load_head(folder)
    assert metadata.adapted
    written = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert (written["peft_type"], written["r"], written["lora_alpha"]) == ("LORA", 4, 8)
    assert sorted(written["target_modules"]) == sorted(MODULES)
    tokens = collate(held_out).tokens_BT
    loaded = PeftModel.from_pretrained(base_model(taught), str(folder / "adapter"))
    if name == "last":
        with torch.no_grad():
            torch.testing.assert_close(
                loaded(input_ids=tokens).logits, trained.module.peft(input_ids=tokens).logits
            )
        saved = load_file(folder / "model.safetensors")
        end = part(saved_at(trained.folder, STEPS), "head")
        assert saved.keys() == end.keys() and all(torch.equal(saved[key], end[key]) for key in end)


def test_the_logged_acceptance_is_what_decoding_gives(trained, taught, held_out):
    lm = SpeculativeLM.from_pretrained(
        taught,
        head=trained.folder / "last",
        dtype=torch.float32,
        tree="chain:2",
        adaptive=False,
        allow_adapter=True,
    )
    alone = [
        lm.generate(prompt_of(example)[None], max_new_tokens=8, do_sample=False).stats
        for example in held_out
    ]
    row = json.loads((trained.folder / "log.jsonl").read_text().splitlines()[-1])["eval"]["chain"]
    assert (row["acceptance_length"], row["rounds"]) == (
        Stats.merged(alone).acceptance_length,
        Stats.merged(alone).rounds,
    )


def test_decoding_is_greedy_identical_to_the_adapted_model(strong, taught, held_out):
    lm = SpeculativeLM.from_pretrained(
        str(taught), head=strong, dtype=torch.float64, allow_adapter=True
    )
    adapted, base = merged_model(taught, strong, torch.float64), base_model(taught, torch.float64)
    differing = 0
    for example in held_out:
        prompt = prompt_of(example)[None]
        ours = answer(lm, prompt)
        assert ours == answer(adapted, prompt)
        differing += ours != answer(base, prompt)
    assert differing  # else the base could have written it


def test_a_loaded_target_without_the_adapter_is_refused_until_it_is_merged(
    strong, taught, held_out
):
    prompt = prompt_of(held_out[0])[None]
    target = Target.from_pretrained(taught, torch.float64)
    before = {name: weight.clone() for name, weight in target.model.named_parameters()}
    with refused("allow_adapter=True target.merge_adapter"):
        SpeculativeLM.from_pretrained(target, head=strong)
    assert all(
        torch.equal(before[name], weight) for name, weight in target.model.named_parameters()
    )
    target.merge_adapter(strong / "adapter")
    lm = SpeculativeLM.from_pretrained(target, head=strong)
    assert answer(lm, prompt) == answer(merged_model(taught, strong, torch.float64), prompt)


def test_merged_the_model_and_its_head_travel_without_the_adapter(
    strong, taught, held_out, tmp_path
):
    prompt = prompt_of(held_out[0])[None]
    export_foreign(ExportConfig(str(strong), "merged", str(tmp_path / "out"), str(taught)))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # no word of another target
        lm = SpeculativeLM.from_pretrained(
            str(tmp_path / "out" / "target"),
            head=str(tmp_path / "out" / "head"),
            tree="chain:2",
            adaptive=False,
        )
    before = SpeculativeLM.from_pretrained(
        str(taught), head=strong, tree="chain:2", adaptive=False, allow_adapter=True
    )
    ours, theirs = (
        each.generate(prompt, max_new_tokens=24, do_sample=False) for each in (lm, before)
    )
    assert torch.equal(ours.sequences, theirs.sequences) and ours.stats.rows == theirs.stats.rows
    assert lm.target.adapter is None and not (tmp_path / "out" / "head" / "adapter").exists()
    with refused("adapter"):
        export_foreign(
            ExportConfig(str(tmp_path / "out" / "head"), "merged", str(tmp_path / "again"))
        )
    assert not (tmp_path / "again").exists()


def test_another_heads_adapter_will_not_do(strong, trained, taught):
    target = Target.from_pretrained(taught, torch.float32)
    target.merge_adapter(trained.folder / "last" / "adapter")
    with refused("merged"):
        SpeculativeLM.from_pretrained(target, head=strong, allow_adapter=True)


def test_a_command_loads_a_head_with_an_adapter_only_with_permission(strong, taught):
    """Its text would be another one: a head that a stranger published must not do that unasked."""
    options = {"target": str(taught), "head": str(strong), "dtype": "float32", "prompt": "x"}
    with refused("--allow-adapter"):
        GenerateConfig(**options).load()
    lm, _ = GenerateConfig(**options, allow_adapter=True).load()
    assert lm.target.adapter == str((strong / "adapter").resolve())


def test_a_head_object_that_does_not_know_its_folder_needs_a_merged_target(strong, taught):
    head = load_head(strong)[0].to(torch.float32)
    head.folder = None
    with refused("adapter folder"):
        SpeculativeLM.from_pretrained(
            str(taught), head=head, dtype=torch.float32, allow_adapter=True
        )


@pytest.mark.parametrize("compile", [True, False])
def test_plain_generate_merges_an_adapter_once_and_only_if_it_may(
    strong, taught, held_out, compile
):
    """A second decoding method on the same model finds it merged."""
    prompt = prompt_of(held_out[0])[None]
    expected = answer(merged_model(taught, strong, torch.float32), prompt)
    model = base_model(taught, torch.float32)
    with refused("allow_adapter=True"):
        answer(model, prompt, custom_generate=custom_generate(strong))
    for head in (strong, load_head(strong)[0].to(torch.float32)):
        method = custom_generate(head, allow_adapter=True, compile=compile, adaptive=False)
        assert answer(model, prompt, custom_generate=method) == expected
    assert answer(model, prompt) == expected
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # the target of the head, not another one
        again = SpeculativeLM.from_pretrained(model, head=strong, compile=compile)
    assert answer(again, prompt) == expected


@pytest.mark.parametrize("step", [4, JOINT_FROM, 10])  # before the joint stage, at its start, in it
def test_stopped_and_started_again_a_run_ends_with_the_same_weights(
    options, trained, stopped_at, step
):
    stopped_at(step, options)
    folder = train(options)
    for name in ("model.safetensors", "adapter/adapter_model.safetensors"):
        assert (folder / "last" / name).read_bytes() == (
            trained.folder / "last" / name
        ).read_bytes(), name


def test_a_run_is_not_continued_without_its_adapter(options, trained):
    with refused("adapter"):
        train(dataclasses.replace(options, output=str(trained.folder), adapter=AdapterConfig()))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("c_attn", "'c_attn' down_proj v_proj"),
        # The heads and the base term read its own weight: an adapter there would learn nothing.
        ("lm_head", "'lm_head'"),
    ],
)
def test_modules_that_cannot_be_adapted_are_named(options, changed, name, words):
    config = dataclasses.replace(options.adapter, modules=["q_proj", name])
    with refused("adapter.modules", words):
        train(changed(options, adapter=config))


def test_the_card_says_which_model_the_output_is_that_of(trained):
    card = (trained.folder / "last" / "README.md").read_text(encoding="utf-8")
    assert "lossless with respect to the adapted model" in " ".join(card.split())
