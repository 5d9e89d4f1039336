"""What the installed package brings and asks for: versions, extras, import time of decoding."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from messages import lacking, refused
from packaging.requirements import Requirement
from runs import ROOT

from headstart import check_versions, extras

OPTIONAL = sorted(set(extras.EXTRAS) - {"yaml"})  # transformers itself needs yaml
WITHOUT_EXTRAS = f"""
import sys
for name in {OPTIONAL!r}:
    sys.modules[name] = None  # importing it fails as if it were not installed
"""


def lines_of(code: str) -> list[str]:
    """What a program prints where no extra is installed, line by line."""
    command = [sys.executable, "-c", WITHOUT_EXTRAS + code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


MISSING = {
    "from headstart.train import train": ("accelerate", "train"),
    "import headstart.addons.monitor": ("prometheus_client", "metrics"),
    "from headstart.inference import load_tokenizer; load_tokenizer('model.gguf')": (
        "gguf",
        "gguf",
    ),
    "Target.from_pretrained('x', 'float32', 'auto')": ("accelerate", "train"),
    "sys.argv = ['headstart', 'generate']; main()": ("jsonargparse", "cli"),
}
"""Programs, the package that each lacks, and its extra."""


def test_decoding_needs_no_extra_and_no_compiler_and_what_needs_an_extra_names_it() -> None:
    code = f"""
from headstart.inference import Target, custom_generate
from headstart.scripts.__main__ import main
from transformers import LlamaConfig, LlamaForCausalLM
import torch
sizes = {{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}}
config = LlamaConfig(vocab_size=40, num_attention_heads=4, **sizes)
model = LlamaForCausalLM(config).eval()
prompt = torch.tensor([[3, 9, 27, 1, 5]])
settings = {{"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0}}
plain = model.generate(prompt, **settings)
method = custom_generate(drafter="prompt-lookup")
ours = model.generate(prompt, custom_generate=method, **settings)
assert torch.equal(plain, ours), (plain, ours)
assert "torch._inductor.compile_fx" not in sys.modules  # torch's compiler
for program in {list(MISSING)!r}:
    try:
        exec(program)
        print("nothing is missing")
    except (ImportError, SystemExit) as error:
        print(error)
"""
    for told, (package, extra) in zip(lines_of(code), MISSING.values(), strict=True):
        assert not lacking(told, f"{package!r} pip install '{ROOT}[{extra}]'"), told


def test_the_command_that_installs_an_extra_names_the_clone_only_in_a_clone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "__file__", str(tmp_path / "site-packages/headstart/extras.py"))
    assert extras.install_command("train") == "pip install 'headstart[train]'"


def test_help_and_version_need_no_extra() -> None:
    code = """
from headstart.scripts.__main__ import main
for argument in ("--help", "--version"):
    sys.argv = ["headstart", argument]
    main()
"""
    assert lines_of(code)[-1].startswith("headstart ")


def test_every_extra_that_is_named_is_one_of_the_package() -> None:
    provided = set(importlib.metadata.metadata("headstart").get_all("Provides-Extra") or ())
    assert set(extras.EXTRAS.values()) <= provided


def test_decoding_requires_five_packages() -> None:
    requirements = [Requirement(text) for text in importlib.metadata.requires("headstart") or ()]
    required = {each.name for each in requirements if each.marker is None}
    assert required == {"torch", "transformers", "safetensors", "huggingface_hub", "numpy"}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lets packages have other versions."""

    def install(**versions: str) -> None:
        known = {"torch": "2.13.0", "transformers": "5.23.0"} | versions
        monkeypatch.setattr(importlib.metadata, "version", known.__getitem__)

    return install


@pytest.mark.parametrize(
    ("package", "version"),
    [("transformers", "5.9.0"), ("torch", "2.7.1"), ("transformers", "6.0.0")],
)
def test_a_version_outside_of_the_range_is_refused_in_one_line(
    installed: Callable[..., None], package: str, version: str
) -> None:
    installed(**{package: version})
    with refused(package, version, "pip install", error=ImportError) as caught:
        check_versions()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("version", ["5.10.1", "5.24.0", "5.99.0", "5.30.0.dev0"])
def test_a_newer_version_is_not_refused(installed: Callable[..., None], version: str) -> None:
    installed(torch="2.15.0+cpu", transformers=version)
    check_versions()
