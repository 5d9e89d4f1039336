"""Every family of models, tiny and random, in float64: greedy, row by row what `generate` writes
for the row alone.

`HEADSTART_FUZZ=500` makes the random test at the end try as many cases, and tells how many it tries
in a second.
"""

from __future__ import annotations

import functools
import time

import pytest
import random_cases
import torch
from families import FAMILIES, VOCAB, family_model, family_target
from helpers import random_ids
from hypothesis import given
from hypothesis import strategies as st
from messages import refused
from torch.testing._internal.two_tensor import TwoTensor

from headstart.heads import TargetFeatures, build_head
from headstart.heads.objective import Objective
from headstart.inference import Target
from headstart.inference.engines.masks import in_window


@pytest.mark.parametrize("family", FAMILIES)
def test_the_ends_give_the_models_own_logits(family):
    """Scaled, bent and with their bias, for training's targets and for heads that share the LM
    head."""
    target = family_target(family)
    tokens_BT = random_ids(VOCAB, 2, 7, seed=7, first=1)
    bias = target.model.get_output_embeddings().bias
    if bias is not None:
        torch.nn.init.normal_(bias)
    features_BTF, last_BTD = target.read(tokens_BT, (-1,))
    expected_BTV = target.model(tokens_BT).logits
    # some compute theirs in float32 always
    close = 1e-6 if expected_BTV.dtype == torch.float64 else 1e-5
    close = {"rtol": close, "atol": close}
    expected_BTV = expected_BTV.double()
    torch.testing.assert_close(target.modules.logits(last_BTD), expected_BTV, **close)
    # A new head of Medusa says again what the target says, whose distribution at the next place it
    # is taught.
    head = build_head("medusa", {"num_heads": 1, "lm_head": "shared"}, target.info).double()
    state = head.begin(target.modules, 2, 7, 1, 1)
    found = head.observe(state, features_BTF, tokens_BT, torch.tensor([7, 7]))
    torch.testing.assert_close(found.logits_BKV[:, 0], expected_BTV[:, -1], **close)
    p_BTV, log_q_BTV = expected_BTV[:, 1:-1].softmax(-1), expected_BTV[:, :-2].log_softmax(-1)
    mask_BT = torch.ones_like(tokens_BT, dtype=torch.bool)
    batch = TargetFeatures(features_BTF, last_BTD, tokens_BT, mask_BT, target.modules)
    loss = head.eval()(batch, Objective({"soft_ce": 1.0})).losses_K[0]
    torch.testing.assert_close(loss, -(p_BTV * log_q_BTV).sum(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_starts_from_a_block_of_its_own_computation_alone(family):
    target = family_target(family)
    options = {"feature_layers": [0, -1], "start": "last"}
    head = build_head("eagle3", options, target.info).double()
    if family in ("llama", "mistral"):
        head.initialize(target.modules, torch.ones(VOCAB))
        return
    with refused("eagle3 start: random"):
        head.initialize(target.modules, torch.ones(VOCAB))


def test_flex_attention_gets_the_same_mask():
    """Its kernels run on GPUs; here the mask is compared with the additive one."""
    target = family_target("gemma3_text")
    seen_BNS = torch.rand(2, 5, 16, generator=torch.Generator().manual_seed(0)) < 0.5
    positions_BN, slots_BS = torch.arange(5).expand(2, -1), torch.arange(16).expand(2, -1)
    seen = dict.fromkeys(target.attention_kinds, seen_BNS)
    seen["sliding_attention"] = in_window(target, positions_BN, slots_BS, seen_BNS)
    additive = target.engine.attention_masks(seen)
    target.engine.flex = True
    for kind, blocks in target.engine.attention_masks(seen).items():
        row, node, slot = torch.meshgrid(
            torch.arange(2), torch.arange(5), torch.arange(16), indexing="ij"
        )
        assert torch.equal(
            blocks.mask_mod(row, torch.zeros(()), node, slot), additive[kind][:, 0] == 0
        )


def test_weights_packed_for_one_kernel_are_known_by_what_they_are_packed_in():
    class Packed(TwoTensor):
        def dequantize(self):
            raise NotImplementedError

    model = family_model("llama")
    layer = model.model.layers[0].mlp.up_proj
    plain, found = layer.weight.detach(), set()
    for parts in ((plain, plain), (plain, plain + 1), (plain + 1, plain)):
        layer.weight = torch.nn.Parameter(Packed(*parts))
        found.add(Target(model).provenance["weights"])
    assert len(found) == 3


kept_target_of = functools.cache(family_target)


@pytest.fixture(scope="module")
def rate(request):
    """The beginnings of all cases; tells at the end how many were tried in a second."""
    begun = []
    yield begun
    if len(begun) > 1:
        seconds = time.perf_counter() - begun[0]
        with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            print(f"\n{len(begun)} cases, {len(begun) / seconds:.2f} a second")


@pytest.mark.filterwarnings("ignore:Unfeasible length constraints")
@random_cases.as_many_as(100)
@given(
    case=random_cases.drawn_cases(family=st.sampled_from(sorted(FAMILIES))),
    chosen=random_cases.SETTINGS,
)
def test_no_random_case_differs_from_generate(monkeypatch, rate, case, chosen):
    rate.append(time.perf_counter())
    random_cases.compare_with_generate(kept_target_of(case["family"]), case, chosen, monkeypatch)
