"""What must hold on any instruction set: `make check-isa` runs these as on a processor without
AVX-512."""

from __future__ import annotations

import os

import pytest
import torch

from headstart.heads import build_head
from headstart.inference import SpeculativeLM
from headstart.inference.targets.provenance import hardware
from headstart.scripts.measuring.comparison import first_difference

pytestmark = pytest.mark.isa
VOCAB, PROMPT = 97, 9
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2.0**-5}
"""Logits of a tree and of single steps may differ by so much of the largest logit: by ties, in
bfloat16."""


def asked_for():
    return os.environ.get("HEADSTART_TEST_ISA")


@pytest.mark.skipif(asked_for() is None, reason="the processor's own instruction set")
def test_the_process_acts_like_one_without_avx512():
    assert asked_for() == "avx2"
    assert torch.backends.cpu.get_cpu_capability() == "AVX2"
    assert not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def test_hardware_names_the_instruction_set():
    assert (
        f", {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} thread"
        in hardware()
    )


@pytest.mark.parametrize("drafter", ["eagle3", "medusa", "prompt-lookup"])
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_greedy_is_generate(tiny_target, dtype, drafter):
    target = tiny_target(vocab_size=VOCAB, dtype=dtype, head_dim=32)
    head = None
    if drafter != "prompt-lookup":
        torch.manual_seed(1)
        options = {"eagle3": {"depth": 3, "feature_layers": [0, -1]}, "medusa": {"num_heads": 3}}[
            drafter
        ]
        head = build_head(drafter, options, target.info).to(dtype)
        head.initialize(target.modules, torch.ones(VOCAB, dtype=torch.int64))
    lm = SpeculativeLM.from_pretrained(target, head, drafter=None if head else drafter)
    settings = {"max_new_tokens": 40, "min_new_tokens": 40, "do_sample": False}
    for seed in range(6):
        ids = torch.randint(VOCAB, (1, PROMPT), generator=torch.Generator().manual_seed(seed))
        settings["attention_mask"] = torch.ones_like(ids)
        expected, found = (
            target.model.generate(ids, **settings),
            lm.generate(ids, **settings).sequences,
        )
        parting = first_difference(target, expected, found, PROMPT)
        if parting is not None:
            largest = target.model(expected).logits.abs().max()
            assert abs(parting["logit_gap"]) <= ROUNDING[dtype] * largest, parting
