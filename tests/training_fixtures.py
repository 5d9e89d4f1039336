"""A target that learned something, and runs on it."""

from __future__ import annotations

import dataclasses
import math
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from headstart.inference import load_tokenizer
from headstart.train import loop, precision
from headstart.train.config import DataConfig, EvalConfig, LoopConfig, OptimConfig, TrainConfig
from headstart.train.data.chat_template import collate, encode, read_conversations


@pytest.fixture(autouse=True)
def bfloat16_as_fast(monkeypatch) -> None:
    """As in tests/conftest.py, of a training step."""
    monkeypatch.setattr(precision, "_timed", lambda: 1.0)


@pytest.fixture(scope="session")
def taught(target_folder, conversations_file, tmp_path_factory) -> Path:
    """The tiny target after it learned the conversations by heart, so that there is something to guess."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(target_folder), load_tokenizer(target_folder)
    eos = frozenset({tokenizer.eos_token_id})
    rows = read_conversations(str(conversations_file))
    batch = collate([example for row in rows for example in encode(row, tokenizer, eos, 200)])
    labels = batch.tokens_BT.masked_fill(~batch.loss_mask_BT, -100)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(60):
        model(input_ids=batch.tokens_BT, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    folder = tmp_path_factory.mktemp("taught")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def talking(target_folder, tokenizer, tmp_path_factory) -> Callable[[dict[str, float], float], Path]:
    """Builds a target in float32 that writes tokens as likely as it is told: `talking(likely, noise)`.

    One hidden dimension is the same everywhere, and the LM head reads from it how likely each token is; `noise` is what
    its other weights are multiplied by.
    """

    def build(likely: dict[str, float], noise: float) -> Path:
        model = AutoModelForCausalLM.from_pretrained(target_folder)
        model.model.embed_tokens.weight.data[:, 0] = 40.0
        shares = {tokenizer.encode(text, add_special_tokens=False)[0]: share for text, share in likely.items()}
        model.lm_head.weight.data *= noise
        for token in range(model.config.vocab_size):
            model.lm_head.weight.data[token, 0] = math.log(shares.get(token, 1e-7)) / 5.6
        folder = tmp_path_factory.mktemp("talker")
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return build


@pytest.fixture(scope="session")
def run_options(taught, conversations_file) -> Callable[[Path, int], TrainConfig]:
    """Builds the options of a run in float32: `run_options(folder, steps)`."""
    return lambda output, steps: TrainConfig(
        target=str(taught),
        output=str(output),
        head={"type": "medusa", "num_heads": 2},
        target_dtype="float32",
        data=DataConfig(sources=[str(conversations_file)], held_out=0.2),
        optim=OptimConfig(lr=3e-3),
        loop=LoopConfig(
            max_steps=steps, batch_size=4, precision="float32", log_every=1, eval_every=20, save_every=7, keep=3
        ),
        eval=EvalConfig(prompts=5, new_tokens=8, conversations=5, nodes=6),
    )


@pytest.fixture
def short(run_options, tmp_path) -> TrainConfig:
    """A run of two epochs and a half, judged and saved at its end only."""
    config = run_options(tmp_path / "run", 12)
    return dataclasses.replace(config, loop=dataclasses.replace(config.loop, eval_every=0, save_every=0))


@pytest.fixture(scope="session")
def changed() -> Callable[..., TrainConfig]:
    """A config with other values: `changed(config, output=..., loop={"keep": 1})`."""

    def change(config: TrainConfig, **changes: Any) -> TrainConfig:
        groups = {"data", "optim", "loop", "eval"}
        parts = {
            name: dataclasses.replace(getattr(config, name), **value) if name in groups else value
            for name, value in changes.items()
        }
        return dataclasses.replace(config, **parts)

    return change


@pytest.fixture
def stop_after() -> Callable[[pytest.MonkeyPatch, int], None]:
    """Asks runs in this process to stop after a step: `stop_after(monkeypatch, step)`."""

    def patch(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
        original = loop.Report.end_step

        def end_step(self: loop.Report, *arguments: Any) -> Any:
            row = original(self, *arguments)
            if self.progress.step == step:
                signal.raise_signal(signal.SIGTERM)
            return row

        monkeypatch.setattr(loop.Report, "end_step", end_step)

    return patch


@pytest.fixture(scope="session")
def steps_logged() -> Callable[[str | Path], int]:
    """Counts the steps that the run in a folder has logged."""

    def count(folder: str | Path) -> int:
        path = Path(folder) / "log.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    return count


@pytest.fixture(scope="session")
def wait_for() -> Callable[[subprocess.Popen[Any], Callable[[], object], str], None]:
    """Waits until `seen()` is true while a command runs: `wait_for(process, seen, what)`."""

    def wait(process: subprocess.Popen[Any], seen: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + 120
        while not seen():
            assert process.poll() is None, f"the run ended before {what}: {process.communicate()[0]}"
            assert time.monotonic() < deadline, f"no {what} in two minutes"
            time.sleep(0.0005)

    return wait
