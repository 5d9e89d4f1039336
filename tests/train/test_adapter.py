"""Medusa-2 on a tiny target: first the heads learn, then both; what is saved is what is served."""

from __future__ import annotations

import copy
import json
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from helpers import calls_of, split_examples
from messages import lacking, refused
from peft import PeftModel
from runs import changed, evaluations_of, last_bytes, same_tensors
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from headstart.heads import MedusaConfig, MedusaHead, TargetFeatures
from headstart.heads.checkpoints.save_load import load_head
from headstart.heads.objective import Objective
from headstart.inference import SpeculativeLM, Stats, Target, custom_generate, load_tokenizer
from headstart.scripts.export import ExportConfig, export_foreign
from headstart.scripts.generate import GenerateConfig
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
def joint_options(run_options):
    """Builds the options of a run: `joint_options(folder)`."""

    def build(output):
        return changed(
            run_options(output, STEPS),
            loop={"eval_every": 0, "save_every": 3, "keep": 10},
            adapter=AdapterConfig(rank=4, alpha=8, modules=MODULES, head_lr_ratio=2.0),
        )

    return build


@pytest.fixture(scope="module")
def joint_run(joint_options, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        built = calls_of(patch, JointModule, "__init__")
        folder = train(joint_options(tmp_path_factory.mktemp("joint")))
    return Trained(folder, built[0][0])


@pytest.fixture
def joint(joint_options, tmp_path):
    return joint_options(tmp_path / "run")


@pytest.fixture(scope="module")
def strong(joint_run, tmp_path_factory):
    """Its last head with an adapter of ten times the effect, so that the adapted model answers
    otherwise."""
    folder = shutil.copytree(joint_run.folder / "last", tmp_path_factory.mktemp("strong") / "head")
    path = folder / "adapter" / "adapter_model.safetensors"
    weights = load_file(path)
    for name, weight in weights.items():
        weight *= 10 if "lora_B" in name else 1
    save_file(weights, path, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def strong_text(strong, taught, held_out):
    """A prompt, and what the model with that adapter answers in float32."""
    prompt = prompt_of(held_out[0])[None]
    return prompt, answer_of(merged_model(taught, strong), prompt)


@pytest.fixture(scope="module")
def held_out(taught, run_options):
    config = run_options("unused", STEPS)
    target = Target.from_pretrained(taught, torch.float32)
    rows = read_conversations(config.data.sources[0])
    return split_examples(rows, config, target, load_tokenizer(taught))[1]


def saved_at(folder, step):
    return load_file(folder / "checkpoints" / f"step-{step:08d}" / "model.safetensors")


def part_of(weights, name):
    """The weights of a part of the module, under the part's own names."""
    return {
        key.removeprefix(name + "."): tensor
        for key, tensor in weights.items()
        if key.startswith(name + ".")
    }


def base_model(folder, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def merged_model(folder, head, dtype=torch.float32):
    adapted = PeftModel.from_pretrained(base_model(folder, dtype), str(head / "adapter"))
    return adapted.merge_and_unload()


def chain_decoder(target, head, **options):
    return SpeculativeLM.from_pretrained(
        target, head=head, tree="chain:2", adaptive=False, **options
    )


def answer_of(decoder, prompt, **more):
    """What a model or a decoder of it generates greedily."""
    output = decoder.generate(prompt, max_new_tokens=24, do_sample=False, **more)
    return getattr(output, "sequences", output).tolist()


def test_first_only_the_heads_learn_as_they_would_alone(joint_run, run_options, tmp_path):
    alone = changed(run_options(tmp_path, STEPS), loop={"eval_every": 0, "save_every": JOINT_FROM})
    heads = saved_at(train(alone), JOINT_FROM)
    found = saved_at(joint_run.folder, JOINT_FROM)
    # Not bit for bit: with the adapter's zeros beside it the target's forward may round differently
    # on some machines.
    torch.testing.assert_close(part_of(found, "head"), heads, rtol=0, atol=1e-6)
    start = part_of(saved_at(joint_run.folder, 3), "adapter")
    assert same_tensors(start, part_of(found, "adapter"))
    ends = [tensor for name, tensor in start.items() if "lora_B" in name]
    # the adapted model is the base
    assert len(ends) == 2 * len(MODULES) and not any(tensor.any() for tensor in ends)


def test_then_both_learn(joint_run):
    before, after = (saved_at(joint_run.folder, step) for step in (JOINT_FROM, JOINT_FROM + 3))
    assert any("lora_A" in name for name in before)
    assert not [name for name, tensor in before.items() if torch.equal(after[name], tensor)]


def test_the_adapter_learns_more_slowly_by_the_ratio(joint):
    """Adam's first steps are about the learning rate, whatever the gradient."""
    sizes = []
    for ratio in (1.0, 4.0):
        config = changed(
            joint,
            output=f"{joint.output}-{ratio}",
            adapter={"heads_first": 0.0, "head_lr_ratio": ratio},
            loop={"max_steps": 2, "save_every": 1},
        )
        moved = part_of(saved_at(train(config), 2), "adapter")
        sizes.append(max(tensor.abs().max() for name, tensor in moved.items() if "lora_B" in name))
    assert sizes[0] == pytest.approx(4 * float(sizes[1]), rel=0.2)


@pytest.fixture
def stirred(taught, held_out):
    """A head and a target with an adapter that has moved from its start; a batch."""
    target = Target.from_pretrained(taught, torch.float32)
    head = MedusaHead(MedusaConfig(num_heads=2), target.info)
    head.initialize(target.modules, torch.ones(target.info.vocab_size, dtype=torch.int64))
    config = AdapterConfig(rank=4, alpha=8, modules=MODULES, keep_base=2.5)
    module = JointModule(target, head, Objective({"ce": 1.0}), config)
    torch.manual_seed(3)
    for weight in module.adapter.values():
        weight.data += 0.3 * torch.randn_like(weight)
    return module, collate(held_out)


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
    for row, place in mask[:, 1:].nonzero().tolist():
        p, q = base[row, place], adapted[row, place]
        distance = distance + (p.exp() * (p - q)).sum()
    return heads + 2.5 * distance, distance


def test_the_base_term_is_the_divergence_from_the_model_without_its_adapter(stirred, taught):
    module, batch = stirred
    found = module(batch, joint=True).loss
    expected, distance = naive_loss(module, taught, batch)
    assert distance > 1
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    weights = [*module.adapter.values(), *module.head.parameters()]
    ours, naive = (torch.autograd.grad(loss, weights) for loss in (found, expected))
    torch.testing.assert_close(ours, naive, rtol=1e-3, atol=1e-4)


def test_before_the_joint_stage_every_weight_has_a_gradient_and_the_adapters_is_0(stirred):
    """A rank whose parameter has no gradient would make the others wait."""
    module, batch = stirred
    module(batch, joint=False).loss.backward()
    assert all(weight.grad is not None for weight in module.parameters())
    assert not any(weight.grad.any() for weight in module.adapter.values())


def test_the_model_without_its_adapter_is_the_base_to_the_last_bit(joint_run, taught, held_out):
    tokens = collate(held_out).tokens_BT
    with torch.no_grad():
        base = base_model(taught)(input_ids=tokens).logits
        adapted = joint_run.module.peft(input_ids=tokens).logits
        with joint_run.module.peft.disable_adapter():
            off = joint_run.module.peft(input_ids=tokens).logits
    assert torch.equal(off, base)
    assert not torch.equal(adapted, base)


@pytest.mark.parametrize("name", ["best", "last"])
def test_the_checkpoint_holds_the_head_and_the_adapter_as_peft_reads_it(joint_run, name):
    folder = joint_run.folder / name
    assert load_head(folder)[1].adapted
    written = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert (written["peft_type"], written["r"], written["lora_alpha"]) == ("LORA", 4, 8)
    assert sorted(written["target_modules"]) == sorted(MODULES)


def test_the_last_checkpoint_has_the_weights_of_the_run(joint_run, taught, held_out):
    folder = joint_run.folder / "last"
    assert same_tensors(
        load_file(folder / "model.safetensors"), part_of(saved_at(joint_run.folder, STEPS), "head")
    )
    tokens = collate(held_out).tokens_BT
    loaded = PeftModel.from_pretrained(base_model(taught), str(folder / "adapter"))
    with torch.no_grad():
        torch.testing.assert_close(
            loaded(input_ids=tokens).logits, joint_run.module.peft(input_ids=tokens).logits
        )


def test_the_logged_acceptance_is_what_decoding_gives(joint_run, taught, held_out):
    lm = chain_decoder(taught, joint_run.folder / "last", dtype=torch.float32, allow_adapter=True)
    stats = Stats.merged(
        [
            lm.generate(prompt_of(example)[None], max_new_tokens=8, do_sample=False).stats
            for example in held_out
        ]
    )
    row = evaluations_of(joint_run.folder)[-1]["eval"]["chain"]
    assert (row["acceptance_length"], row["rounds"]) == (stats.acceptance_length, stats.rounds)


def test_decoding_is_greedy_identical_to_the_adapted_model(strong, taught, held_out):
    lm = SpeculativeLM.from_pretrained(
        str(taught), head=strong, dtype=torch.float64, allow_adapter=True
    )
    adapted, base = merged_model(taught, strong, torch.float64), base_model(taught, torch.float64)
    differing = 0
    for example in held_out:
        prompt = prompt_of(example)[None]
        ours = answer_of(lm, prompt)
        assert ours == answer_of(adapted, prompt)
        differing += ours != answer_of(base, prompt)
    assert differing  # else the base could have written it


def test_a_loaded_target_without_the_adapter_is_refused_until_it_is_merged(
    strong, taught, strong_text
):
    prompt, expected = strong_text
    target = Target.from_pretrained(taught, torch.float32)
    before = copy.deepcopy(target.model.state_dict())
    with refused("allow_adapter=True target.merge_adapter"):
        SpeculativeLM.from_pretrained(target, head=strong)
    assert same_tensors(before, target.model.state_dict())
    target.merge_adapter(strong / "adapter")
    assert answer_of(SpeculativeLM.from_pretrained(target, head=strong), prompt) == expected


def test_merged_the_model_and_its_head_travel_without_the_adapter(
    strong, taught, strong_text, tmp_path
):
    prompt, expected = strong_text
    export_foreign(ExportConfig(str(strong), "merged", str(tmp_path / "out"), str(taught)))
    head = str(tmp_path / "out" / "head")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # no word of another target
        lm = chain_decoder(str(tmp_path / "out" / "target"), head)
    ours = lm.generate(prompt, max_new_tokens=24, do_sample=False)
    before = chain_decoder(str(taught), strong, allow_adapter=True)
    theirs = before.generate(prompt, max_new_tokens=24, do_sample=False)
    assert ours.sequences.tolist() == expected and ours.stats.rows == theirs.stats.rows
    assert lm.target.adapter is None and not (tmp_path / "out" / "head" / "adapter").exists()
    with refused("adapter"):
        export_foreign(ExportConfig(head, "merged", str(tmp_path / "again")))
    assert not (tmp_path / "again").exists()


def test_another_heads_adapter_will_not_do(strong, joint_run, taught):
    target = Target.from_pretrained(taught, torch.float32)
    target.merge_adapter(joint_run.folder / "last" / "adapter")
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
        SpeculativeLM.from_pretrained(str(taught), head, torch.float32, allow_adapter=True)


@pytest.mark.parametrize("compile", [True, False])
def test_plain_generate_merges_an_adapter_once_and_only_if_it_may(
    strong, taught, strong_text, compile
):
    """A second decoding method on the same model finds it merged."""
    prompt, expected = strong_text
    model = base_model(taught)
    with refused("allow_adapter=True"):
        answer_of(model, prompt, custom_generate=custom_generate(strong))
    for head in (strong, load_head(strong)[0].to(torch.float32)):
        method = custom_generate(head, allow_adapter=True, compile=compile, adaptive=False)
        assert answer_of(model, prompt, custom_generate=method) == expected
    assert answer_of(model, prompt) == expected
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # the target of the head, not another one
        again = SpeculativeLM.from_pretrained(model, head=strong, compile=compile)
    assert answer_of(again, prompt) == expected


@pytest.mark.parametrize("step", [4, JOINT_FROM, 10])  # before the joint stage, at its start, in it
def test_stopped_and_started_again_a_run_ends_with_the_same_weights(
    joint, joint_run, stopped_at, step
):
    stopped_at(step, joint)
    folder = train(joint)
    assert last_bytes(folder) == last_bytes(joint_run.folder)
    name = "last/adapter/adapter_model.safetensors"
    assert (folder / name).read_bytes() == (joint_run.folder / name).read_bytes()


def test_a_run_is_not_continued_without_its_adapter(joint, joint_run):
    with refused("adapter"):
        train(changed(joint, output=str(joint_run.folder), adapter=AdapterConfig()))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("c_attn", "'c_attn' down_proj v_proj"),
        # The heads and the base term read its own weight: an adapter there would learn nothing.
        ("lm_head", "'lm_head'"),
    ],
)
def test_modules_that_cannot_be_adapted_are_named(joint, name, words):
    with refused("adapter.modules", words):
        train(changed(joint, adapter={"modules": ["q_proj", name]}))


def test_the_card_says_which_model_the_output_is_that_of(joint_run):
    card = (joint_run.folder / "last" / "README.md").read_text(encoding="utf-8")
    assert not lacking(card, "lossless adapted")
