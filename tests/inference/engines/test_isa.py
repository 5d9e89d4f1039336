"""What must hold on any instruction set: `make check-isa` runs these as on a processor without
AVX-512."""

from __future__ import annotations

import os

import pytest
import torch

from headstart.inference.targets.provenance import hardware

pytestmark = pytest.mark.isa
ASKED_FOR = os.environ.get("HEADSTART_TEST_ISA")


@pytest.mark.skipif(ASKED_FOR is None, reason="the processor's own instruction set")
def test_the_process_acts_like_one_without_avx512():
    assert ASKED_FOR == "avx2"
    assert torch.backends.cpu.get_cpu_capability() == "AVX2"
    assert not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def test_hardware_names_the_instruction_set():
    capability = torch.backends.cpu.get_cpu_capability()
    assert f", {capability}, {torch.get_num_threads()} thread" in hardware()
