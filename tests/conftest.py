"""The fixtures of all tests, and the environment that they run in."""

from __future__ import annotations

import atexit
import dataclasses
import gc
import json
import math
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# a worker; its cache folder is that of the process that started it
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # which torch reads when it is imported
else:
    os.environ["HEADSTART_CACHE"] = tempfile.mkdtemp(
        prefix="headstart-tests-"
    )  # processes that tests start have it too
    atexit.register(shutil.rmtree, os.environ["HEADSTART_CACHE"], ignore_errors=True)

import helpers
import pytest
import runs
import torch
from helpers import build_model, build_tokenizer
from huggingface_hub import constants
from loopback_hub import Hub
from messages import refused
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from headstart.console import show_on_console
from headstart.inference import Target, load_tokenizer, speculative_lm
from headstart.inference.drafters import adaptive, by_name, next_step
from headstart.inference.drafters.next_step import Choice, Record
from headstart.inference.targets import dtypes
from headstart.inference.tuning import machine
from headstart.inference.tuning.round_costs import RoundCosts
from headstart.stopping import Stopped
from headstart.train import engines, loop, report
from headstart.train.config import DataConfig, EvalConfig, LoopConfig, OptimConfig, TrainConfig
from headstart.train.data.batches import collate
from headstart.train.data.chat_template import encode
from headstart.train.data.conversations import read_conversations

show_on_console()  # as commands do: tests read there what a user reads
# A shell has what it starts in the background ignore Ctrl-C, and so would all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cases",
        type=int,
        help="run at most so many cases of each test function, the same ones every time",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what `--cases` leaves out: by a hash, so that neighbours in a table differ.

    Tests marked `whole` keep all their cases.
    """
    most = config.getoption("--cases")
    if most is None:
        return
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    chosen: set[pytest.Item] = set()
    for of_function in cases.values():
        by_hash = sorted(of_function, key=lambda item: zlib.crc32(item.nodeid.encode()))
        whole = of_function[0].get_closest_marker("whole") is not None
        chosen.update(by_hash if whole else by_hash[:most])
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


@pytest.fixture(autouse=True)
def every_format_as_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make what dtype="fastest" chooses independent of the machine; tests of that choice say what
    is fast."""
    monkeypatch.setattr(dtypes, "time_over_float32", lambda *_: 1.0)
    monkeypatch.setattr(engines, "bfloat16_step_ratio", lambda: 1.0)


@pytest.fixture(autouse=True)
def steps_take_what_is_assumed(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Make what adaptive drafting chooses independent of the clock, but in tests marked `clock`."""
    if request.node.get_closest_marker("clock") is not None:
        return

    def costs(target: Target, head: object = None) -> RoundCosts:
        return RoundCosts.assumed(target.device)

    def after_step(record: Record, choice: Choice, seconds: float, tokens: float) -> Record:
        expected = record.candidates[choice.candidate].expected_seconds
        return next_step.after_step(record, choice, expected, tokens)

    monkeypatch.setattr(by_name, "measured_costs", costs)
    monkeypatch.setattr(speculative_lm, "measured_costs", costs)
    monkeypatch.setattr(adaptive, "after_step", after_step)


def pytest_collection_finish() -> None:
    """Take what is imported out of garbage collections, of which each training run makes two."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def reports_have_no_plots() -> Iterator[None]:
    """Drawing takes longer than the few steps of a run; test_report.py draws."""
    with pytest.MonkeyPatch.context() as patch:
        no_plot = SimpleNamespace(savefig=lambda path, **_: None)
        patch.setattr(report, "plotted", lambda *_: no_plot)
        yield


@pytest.fixture
def nothing_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Forget what was measured on this machine and warned about; returns the folder where it will
    be kept.

    Measurements are kept however busy the machine is.
    """
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(machine, "in_memory", {})
    monkeypatch.setattr(machine, "given_warnings", set())
    monkeypatch.setattr(machine, "clocks", lambda: (0.0, 0.0))
    return tmp_path / "cache"


@pytest.fixture
def tiny_target() -> Callable[..., Target]:
    """Builds a random target: `tiny_target(vocab_size=..., seed=..., layers=..., dtype=...,
    head_dim=...)`."""
    return lambda **options: Target(build_model(**options).requires_grad_(False))


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target with its tokenizer, as a folder that every command takes; float32, 258
    tokens."""
    folder = tmp_path_factory.mktemp("target")
    tokenizer = build_tokenizer()
    model = build_model(dtype=torch.float32)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def conversations_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 short conversations with answers that can be learned."""
    path = tmp_path_factory.mktemp("data") / "conversations.jsonl"
    rows = []
    for i in range(24):
        messages = [
            {"role": "user", "content": f"count to {i % 5 + 3}"},
            {
                "role": "assistant",
                "content": " ".join(str(number) for number in range(1, i % 5 + 4)),
            },
        ]
        rows.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def tools() -> ModuleType:
    """The module helpers.py."""
    return helpers


@pytest.fixture(scope="session")
def taught(target_folder, conversations_file, tmp_path_factory) -> Path:
    """The tiny target, trained on the conversations until it knows them, so that its tokens can be
    predicted."""
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(target_folder),
        load_tokenizer(target_folder),
    )
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
def talking(
    target_folder, tokenizer, tmp_path_factory
) -> Callable[[dict[str, float], float], Path]:
    """Builds a float32 target that generates tokens with given probabilities:
    `talking(probabilities, noise)`.

    One hidden dimension is constant, and the LM head reads from it how likely each token is;
    `noise` multiplies its other weights.
    """

    def build(likely: dict[str, float], noise: float) -> Path:
        model = AutoModelForCausalLM.from_pretrained(target_folder)
        model.model.embed_tokens.weight.data[:, 0] = 40.0
        shares = {
            tokenizer.encode(text, add_special_tokens=False)[0]: share
            for text, share in likely.items()
        }
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
        dtype="float32",
        data=DataConfig(sources=[str(conversations_file)], held_out=0.2),
        optim=OptimConfig(lr=3e-3),
        loop=LoopConfig(
            max_steps=steps,
            batch_size=4,
            precision="float32",
            log_every=1,
            eval_every=20,
            save_every=7,
            keep=3,
        ),
        eval=EvalConfig(prompts=5, max_new_tokens=8, conversations=5, nodes=6),
    )


@pytest.fixture
def short(run_options, tmp_path) -> TrainConfig:
    """A run of two and a half epochs, evaluated and saved only at its end."""
    config = run_options(tmp_path / "run", 12)
    return dataclasses.replace(
        config, loop=dataclasses.replace(config.loop, eval_every=0, save_every=0)
    )


@pytest.fixture(scope="session")
def changed() -> Callable[..., TrainConfig]:
    """A config with other values, see runs.py."""
    return runs.changed


@pytest.fixture(scope="session")
def stopped_at() -> Callable[..., None]:
    """Makes a run until SIGTERM comes after a step: `stopped_at(step, config)`.

    `run` makes it, of the arguments after the step.
    """

    def stop(step: int, *given: Any, run: Callable[..., Any] = loop.train) -> None:
        original = loop.MetricsLogger.end_step

        def end_step(self: loop.MetricsLogger, *arguments: Any) -> Any:
            row = original(self, *arguments)
            if self.progress.step == step:
                signal.raise_signal(signal.SIGTERM)
            return row

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop.MetricsLogger, "end_step", end_step)
            with refused(f"step {step}", error=Stopped):
                run(*given)

    return stop


@pytest.fixture
def resumed(stopped_at) -> Callable[[TrainConfig, int], tuple[Path, Path]]:
    """The folders of a run that nothing happened to, and of one that was stopped at a step and
    started again: `resumed(config, step)`."""

    def make(config: TrainConfig, step: int) -> tuple[Path, Path]:
        whole = loop.train(dataclasses.replace(config, output=f"{config.output}-whole"))
        stopped_at(step, config)
        return whole, loop.train(config)

    return make


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
            assert process.poll() is None, (
                f"the run ended before {what}: {process.communicate()[0]}"
            )
            assert time.monotonic() < deadline, f"no {what} in two minutes"
            time.sleep(0.0005)

    return wait


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    server = Hub()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    # A newer transformers keeps one client, which would go on asking the first test's server.
    monkeypatch.setattr("transformers.utils.hub._hf_api", None, raising=False)
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        server.url + "/{repo_id}/resolve/{revision}/{filename}",
    )
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
