"""Weights that change between calls: copies in the kernels, and what conversations have read,
follow."""

from __future__ import annotations

import functools

import pytest
import torch
from changed_weights import PLAIN, ROW, VOCAB, WRITES, mistral_text, tiny_mistral, with_eagle3
from helpers import Ended, head_for
from messages import refused
from torch import nn

from headstart.inference import Conversation, SpeculativeLM, Target, custom_generate, refresh
from headstart.inference.drafters.tree_policies import HeadDrafter
from headstart.inference.engines.cpu_decoder import is_packed, packed_head
from headstart.inference.engines.cpu_kernels import PackedLinear
from headstart.inference.engines.model_engine import ModelEngine
from headstart.inference.targets.changes import SAMPLED, WeightWatch


@pytest.mark.parametrize("kind", ["kernels", "linear layers", "tied"])
@pytest.mark.parametrize("write", WRITES)
def test_a_written_weight_is_decoded_with(write, kind):
    """By the kernels, which hold a copy, and by a conversation, whose cache was made with the old
    weights."""
    options = {"act": "gelu" if kind == "linear layers" else "silu", "tie": kind == "tied"}
    model = tiny_mistral(**options)
    target = Target(model)
    target.compile()
    assert isinstance(target.engine, ModelEngine) == (kind == "linear layers") and target.compiled
    lm, past = SpeculativeLM(target), Conversation()
    before = lm.generate(ROW, past_key_values=past, **PLAIN).sequences
    assert torch.equal(before, mistral_text(model))
    torch.manual_seed(2)
    with torch.no_grad():
        WRITES[write](model, tiny_mistral(seed=7, **options))
    expected = mistral_text(model)
    assert not torch.equal(expected, before), "nothing was changed"
    assert torch.equal(lm.generate(ROW, **PLAIN).sequences, expected)
    assert torch.equal(lm.generate(ROW, past_key_values=past, **PLAIN).sequences, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_added_to_all_weights_is_seen_however_little(dtype):
    """At least a rounding step in some of them."""
    model, watch = tiny_mistral().to(dtype), WeightWatch()
    before = watch.version(model)
    assert watch.version(model) == before
    for parameter in model.parameters():
        parameter.data.add_(3e-9 if dtype == torch.float32 else 3e-4)
    assert watch.version(model) != before


def test_nan_equals_itself_and_every_expert_is_sampled():
    module, watch = nn.Module(), WeightWatch()
    module.experts = nn.Parameter(torch.randn(32, 8, 16))
    module.broken = nn.Parameter(torch.full((5, 7), torch.nan))
    module.register_buffer("turned", torch.randn(9, 400).t())
    module.register_buffer("repeated", torch.randn(1, 3).expand(50, 3))
    module.register_buffer("nothing", torch.zeros(0, 3))
    module.register_buffer("one", torch.zeros(()))
    assert watch.version(module) == watch.version(module)
    for expert in range(32):
        before = watch.version(module)
        module.experts.data[expert] += 1
        assert watch.version(module) != before, expert
    for written in (module.turned, module.repeated[0], module.one):
        before = watch.version(module)
        written.data.add_(1)
        assert watch.version(module) != before


def test_a_write_that_no_sample_shows_takes_a_refresh():
    """One row of the LM head, through `.data`: as the documentation says."""
    model = tiny_mistral()
    lm = SpeculativeLM.from_pretrained(Target(model), compile=True)
    decode = custom_generate(compile=True)
    before = lm.generate(ROW, **PLAIN).sequences
    model.generate(ROW, custom_generate=decode, **PLAIN)
    said = int(before[0, -1])
    for row in range(VOCAB):
        version, weight = lm.target.version, model.lm_head.weight.data[row].clone()
        model.lm_head.weight.data[row] = 2 * model.lm_head.weight.data[said]
        if row != said and lm.target.version == version:
            break
        model.lm_head.weight.data[row] = weight
    else:
        raise AssertionError(f"{SAMPLED} samples are in every row")
    expected = mistral_text(model)
    assert torch.equal(lm.generate(ROW, **PLAIN).sequences, before) and not torch.equal(
        expected, before
    )
    assert torch.equal(lm.refresh().generate(ROW, **PLAIN).sequences, expected)
    refresh(model)
    assert torch.equal(model.generate(ROW, custom_generate=decode, **PLAIN), expected)


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_a_head_in_the_kernels_follows_its_weights(kind):
    target = Target(tiny_mistral())
    head = head_for(target, kind, seed=1)
    lm = SpeculativeLM.from_pretrained(
        target, head, tree="chain:2|chain:3", compile=True, adaptive=False
    )
    heads = [each.head for each in lm.drafter.nested() if isinstance(each, HeadDrafter)]
    assert all(map(is_packed, heads)) and len({id(each) for each in heads}) == 1
    expected = lm.generate(ROW, **PLAIN).sequences
    for parameter in head.parameters():
        parameter.data.mul_(0.5).add_(0.01)
    assert torch.equal(lm.generate(ROW, **PLAIN).sequences, expected)
    fresh = packed_head(head)
    for mine, its in zip(heads[0].modules(), fresh.modules(), strict=True):
        if isinstance(its, PackedLinear):
            assert torch.equal(mine.packed.words, its.packed.words)
            assert mine.packed.scales is None or torch.equal(mine.packed.scales, its.packed.scales)
        kept = getattr(getattr(its, "layers", None), "kept", ())
        for tensor, other in zip(
            kept, getattr(getattr(mine, "layers", None), "kept", ()), strict=True
        ):
            assert torch.equal(getattr(tensor, "words", tensor), getattr(other, "words", other))


@pytest.mark.versions
@pytest.mark.parametrize("sampling", [False, True])
def test_rollouts_by_plain_generate_follow_a_swap(sampling):
    """`model.generate` of the decoder's own model, by which trainers of policies answer."""
    model = tiny_mistral()
    lm = with_eagle3(model, compile=False)
    settings = {**PLAIN, "do_sample": sampling, "attention_mask": torch.ones_like(ROW)}
    generators = [torch.Generator().manual_seed(4) for _ in range(3)]
    expected = lm.generate(ROW, generator=generators[0], **settings)
    method = lm.custom_generate(generators[1])
    model.generate = functools.partial(model.generate, custom_generate=method)
    counted = Ended()
    lm.observers.append(counted)
    found = model.generate(ROW, **settings)
    assert torch.equal(found, expected.sequences) and counted.stats[0].rows == expected.stats.rows
    lm.use_head(head_for(lm.target, "medusa"))
    again = lm.generate(ROW, generator=generators[2], **settings)
    generators[1].manual_seed(4)
    assert (
        torch.equal(model.generate(ROW, **settings), again.sequences)
        and counted.stats[-2].rows == counted.stats[-1].rows
    )
    assert torch.equal(again.sequences, found), "a seed gives the same text whichever head drafts"
    with refused("MistralForCausalLM generate"):
        tiny_mistral(seed=7).generate(ROW, custom_generate=method, **settings)
