"""Muon beside AdamW as one optimizer: who trains what, one schedule, one state."""

from __future__ import annotations

import copy

import pytest
import torch
from messages import refused
from runs import same_tensors

from headstart.heads import HEADS, build_head
from headstart.train import optim
from headstart.train.config import OptimConfig
from headstart.train.optim import Float32Muon, MuonAdamW, build_optimizer

MUON = OptimConfig(name="muon", lr=0.01, weight_decay=0.1, warmup=0.5)
OPTIONS = {
    "eagle3": {
        "feature_layers": [0, 1, 2],
        "hidden_size": 16,
        "num_attention_heads": 4,
        "head_dim": 4,
    }
}
"""Options beyond the defaults: an EAGLE-3 head that learns an embedding of its own."""


def trained_head(kind, tiny_target, **options):
    target = tiny_target(vocab_size=24, layers=4, dtype=torch.float32)
    torch.manual_seed(1)
    head = build_head(kind, OPTIONS.get(kind, {}) | options, target.info)
    head.initialize(target.modules, torch.ones(24, dtype=torch.int64))
    return head


def parameters_of(part, head):
    names = {id(parameter): name for name, parameter in head.named_parameters()}
    return {names[id(parameter)] for group in part.param_groups for parameter in group["params"]}


def rates_of(optimizer):
    return {group["lr"] for part in optimizer.parts.values() for group in part.param_groups}


@pytest.mark.parametrize("kind", HEADS)
def test_muon_has_the_matrices_inside_and_adamw_the_rest(tiny_target, kind):
    head = trained_head(kind, tiny_target)
    optimizer, _ = build_optimizer(head, MUON, 10, {})
    muon, adamw = (parameters_of(optimizer.parts[name], head) for name in ("muon", "adamw"))
    trained = {name: weight for name, weight in head.named_parameters() if weight.requires_grad}
    assert muon | adamw == trained.keys() and not muon & adamw
    matrices = {name for name, weight in trained.items() if weight.ndim == 2}
    tables = {name for name in matrices if 24 in trained[name].shape}
    assert muon and muon == matrices - tables


def test_a_head_of_matrices_alone_can_be_trained(tiny_target):
    head = trained_head("medusa", tiny_target, lm_head="shared", bias=False)
    optimizer, schedule = build_optimizer(head, OptimConfig(name="muon", warmup=0.0), 10, {})
    assert all(made_up_step(head, optimizer, schedule, seed=3).values())


def made_up_step(head, optimizer, schedule, seed):
    """One step on made-up gradients; how far each parameter moved."""
    random = torch.Generator().manual_seed(seed)
    before = {name: weight.detach().clone() for name, weight in head.named_parameters()}
    for weight in head.parameters():
        weight.grad = torch.randn(weight.shape, generator=random)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    return {
        name: float((weight.detach() - before[name]).square().mean().sqrt())
        for name, weight in head.named_parameters()
    }


def test_the_schedule_reaches_both_and_their_steps_are_of_one_size(tiny_target):
    head = trained_head("medusa", tiny_target)
    config = OptimConfig(name="muon", lr=0.01, warmup=0.5)
    optimizer, schedule = build_optimizer(head, config, 10, {})
    rates = []
    for seed in range(10):
        assert rates_of(optimizer) == set(schedule.get_last_lr())
        (rate,) = set(schedule.get_last_lr())
        rates.append(rate)
        for distance in made_up_step(head, optimizer, schedule, seed).values():
            assert 0.03 * rate <= distance <= 1.5 * rate
    assert rates[0] == 0 and max(rates) == rates[5] == pytest.approx(0.01) and rates[-1] < rates[6]


def test_what_was_saved_goes_on_the_same(tiny_target):
    head, other = (trained_head("hydra", tiny_target, num_heads=2) for _ in range(2))
    optimizer, schedule = build_optimizer(head, MUON, 8, {})
    resumed, resumed_schedule = build_optimizer(other, MUON, 8, {})
    for seed in range(3):
        made_up_step(head, optimizer, schedule, seed)
    saved = copy.deepcopy(optimizer.state_dict())  # as from a file: loading takes the tensors
    assert saved.keys() == {"muon", "adamw"}
    other.load_state_dict(head.state_dict())
    resumed.load_state_dict(saved)
    resumed_schedule.load_state_dict(schedule.state_dict())
    for seed in range(3, 8):
        made_up_step(head, optimizer, schedule, seed)
        made_up_step(other, resumed, resumed_schedule, seed)
        rates = set(schedule.get_last_lr())
        assert rates_of(resumed) == {group["lr"] for group in resumed.param_groups} == rates
    assert same_tensors(head.state_dict(), other.state_dict())


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("cosine", [0.5, 1.0, 0.75, 0.25, 0.0]),
        ("linear", [0.5, 1.0, 2 / 3, 1 / 3, 0.0]),
        ("polynomial", [0.5, 1.0, 2 / 3, 1 / 3, 0.0]),
        ("inverse_sqrt", [0.5, 1.0, (2 / 3) ** 0.5, (1 / 2) ** 0.5, (2 / 5) ** 0.5]),
        ("constant_with_warmup", [0.5, 1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_a_schedule_rises_over_the_warm_up_and_then_falls_as_its_word_says(schedule, expected):
    config = OptimConfig(lr=1.0, warmup=0.4, schedule=schedule)
    optimizer, rates = build_optimizer(torch.nn.Linear(2, 2), config, 5, {})
    found = []
    for _ in range(5):
        optimizer.step()
        rates.step()
        found.append(rates.get_last_lr()[0])
    assert found == pytest.approx(expected, abs=2e-4)  # transformers ends a polynomial above 0


def test_muon_in_float32_steps_as_torchs_own(monkeypatch):
    """But for bfloat16's rounding; torch's own in float32 is the same."""
    settings = {"lr": 0.01, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    sides = []
    for kind in (torch.optim.Muon, torch.optim.Muon, Float32Muon):
        if len(sides) == 1:
            monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor.clone())
        torch.manual_seed(0)
        weights = [torch.nn.Parameter(torch.randn(shape)) for shape in ((6, 9), (9, 6), (1, 4))]
        optimizer = kind(weights, **settings)
        for _ in range(3):
            for weight in weights:
                weight.grad = torch.randn_like(weight)
            optimizer.step()
        sides.append((weights, optimizer.state_dict()["state"]))
    rounded, exact, ours = sides
    torch.testing.assert_close(ours, exact, rtol=0, atol=1e-6)
    torch.testing.assert_close(ours[0], rounded[0], rtol=0, atol=2e-2)


@pytest.mark.parametrize(("supported", "wanted"), [(True, torch.optim.Muon), (False, Float32Muon)])
def test_muon_iterates_in_float32_where_bfloat16_is_emulated(supported, wanted, monkeypatch):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: supported)
    for device, kind in (("cpu", wanted), ("meta", torch.optim.Muon)):
        matrices = [torch.nn.Parameter(torch.zeros(2, 2, device=device))]
        assert type(MuonAdamW(matrices, [], MUON).parts["muon"]) is kind


def test_muon_is_refused_with_a_torch_that_has_none(monkeypatch):
    monkeypatch.setattr(optim, "Muon", torch.optim.Optimizer)
    with refused("2.9 optim.name adamw"):
        optim.check_muon()
