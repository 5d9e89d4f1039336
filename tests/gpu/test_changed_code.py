"""What users put on a model runs, too, where its forwards were recorded before."""

from __future__ import annotations

import pytest
import torch
from changed_code import CHANGES
from changed_weights import PLAIN, ROW, mistral_text, tiny_mistral

from headstart.inference import SpeculativeLM

SEEN = ("block", "forward of a class", "parametrization", "scale of attention", "number of layers")
"""One change of each kind: that all are seen, tests/inference shows."""


@pytest.mark.parametrize("change", SEEN)
def test_what_is_put_on_a_recorded_model_runs(change, device):
    model = tiny_mistral().to(device)
    lm = SpeculativeLM.from_pretrained(model, drafter="prompt-lookup")
    for _ in range(3):  # the first rounds are recorded, later ones replayed
        lm.generate(ROW, **PLAIN)
    plain = mistral_text(model)
    take_away = CHANGES[change](model)
    try:
        changed = mistral_text(model)
        assert not torch.equal(changed, plain), "the change changes nothing"
        assert torch.equal(lm.generate(ROW, **PLAIN).sequences.cpu(), changed.cpu())
    finally:
        take_away()
    assert torch.equal(lm.generate(ROW, **PLAIN).sequences.cpu(), plain.cpu())
