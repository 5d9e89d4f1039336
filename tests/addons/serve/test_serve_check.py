"""`headstart serve-check`, with a vLLM of a few lines: what it is given, and what is said of its
answers."""

from __future__ import annotations

import copy
import json
import sys

import pytest
import torch
from helpers import saved_head, write_files
from messages import lacking, refused

from headstart.addons.serve.comparison import in_vllm
from headstart.heads import CheckpointMetadata, build_head
from headstart.heads.checkpoints.save_load import save_head
from headstart.inference import SpeculativeLM, Target, load_tokenizer
from headstart.inference.text.chat_template import prompt_ids
from headstart.scripts import serve_check
from headstart.scripts.serve_check import ASKED, ServeCheckConfig

FAKE = """
import json, os, types
__version__ = "0"
script = json.load(open(os.environ["FAKE_VLLM"]))
class SamplingParams:
    def __init__(self, **given): self.given = given
class LLM:
    def __init__(self, target, **given):
        if "error" in script: raise RuntimeError(script["error"])
        folders = [target]
        if given["speculative_config"]:
            if "refused" in script: raise ValueError(script["refused"])
            folders.append(given["speculative_config"]["model"])
        files = [sorted(os.listdir(folder)) for folder in folders]
        json.dump({"files": files, **given}, open(os.environ["FAKE_VLLM"] + ".seen", "w"))
        self.asked = 0
    def generate(self, prompts, sampling):
        self.asked = 1
        assert sampling.given["temperature"] == 0
        answers = [script["tokens"][str(prompt["prompt_token_ids"])] for prompt in prompts]
        completions = [types.SimpleNamespace(token_ids=answer) for answer in answers]
        return [types.SimpleNamespace(outputs=[completion]) for completion in completions]
    def get_metrics(self):
        name, counts = "vllm:spec_decode_num_", [self.asked * count for count in script["accepted"]]
        return [types.SimpleNamespace(name=name + "drafts", value=self.asked * script["drafts"]),
                types.SimpleNamespace(name=name + "accepted_tokens_per_pos", values=counts)]
"""
NEW_TOKENS = 9


@pytest.fixture
def served(target_folder, tmp_path, monkeypatch):
    """A head, its options for the command, and the script that the fake vLLM plays: what headstart
    itself does."""
    target = Target.from_pretrained(str(target_folder), torch.float32, "cpu")
    torch.manual_seed(0)
    head = build_head("medusa", {"num_heads": 2, "lm_head": "shared"}, target.info)
    # as most heads are published
    save_head(copy.deepcopy(head).bfloat16(), tmp_path / "head", CheckpointMetadata())
    head = head.bfloat16().float()
    tokenizer = load_tokenizer(str(target_folder))
    lm = SpeculativeLM.from_pretrained(target, head, tree="chain:2", adaptive=False)
    script = {"tokens": {}, "drafts": 0, "accepted": [0, 0]}
    for text in ASKED:
        ids = prompt_ids(tokenizer, [{"role": "user", "content": text}])
        output = lm.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
        script["tokens"][str(ids[0].tolist())] = output.sequences[0, ids.shape[1] :].tolist()
        script["drafts"] += output.stats.rounds
    state = "def cleanup_dist_env_and_memory(): pass"
    files = {"__init__.py": FAKE, "distributed/parallel_state.py": state}
    write_files(tmp_path / "site" / "vllm", files)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.setenv("FAKE_VLLM", str(tmp_path / "script.json"))
    config = ServeCheckConfig(
        head=str(tmp_path / "head"),
        target=str(target_folder),
        draft_length=2,
        max_new_tokens=NEW_TOKENS,
    )

    def check(**changed):
        (tmp_path / "script.json").write_text(json.dumps({**script, **changed}))
        serve_check.serve_check(config)
        return json.loads((tmp_path / "script.json.seen").read_text())

    return script, check


def test_equal_tokens_in_as_many_rounds_are_said_to_be_so(served, capsys):
    script, check = served
    seen = check()
    asked = seen["speculative_config"]
    assert (asked["method"], asked["num_speculative_tokens"]) == ("medusa", 2)
    assert seen["dtype"] == "float32" and seen["enforce_eager"]
    assert all({"config.json", "model.safetensors"} <= set(files) for files in seen["files"])
    assert "tokenizer_config.json" in seen["files"][0] and "README.md" in seen["files"][1]
    said = capsys.readouterr().out
    assert not lacking(said, f"{len(ASKED)} of {len(ASKED)}", str(script["drafts"]))


def test_more_rounds_are_a_head_that_was_read_otherwise(served):
    script, check = served
    check(drafts=int(1.01 * script["drafts"]))
    with refused(f"vLLM headstart {2 * script['drafts']}"):
        check(drafts=2 * script["drafts"])


def test_other_tokens_in_as_many_rounds_are_ties(served, capsys):
    script, check = served
    first = next(iter(script["tokens"]))
    check(tokens={**script["tokens"], first: [0]})
    assert not lacking(capsys.readouterr().out, f"{len(ASKED) - 1} of {len(ASKED)} likely")


def test_what_vllm_refuses_is_told_in_its_words(served):
    _, check = served
    with refused("vLLM model RuntimeError: no such model"):
        check(error="no such model")
    with refused("vLLM head ValueError: no such architecture"):
        check(refused="no such architecture")


@pytest.mark.parametrize(
    ("kind", "changed", "message"),
    [
        ("hydra", {}, "vLLM eagle3"),
        ("medusa", {"draft_length": 3}, "draft_length 3 2"),
        ("medusa", {"python": "no/such/python"}, "'no/such/python'"),
    ],
)
def test_what_cannot_be_compared_is_refused(target_folder, tmp_path, kind, changed, message):
    target = Target.from_pretrained(str(target_folder), torch.float32, "cpu")
    saved_head(tmp_path / "head", target, kind, num_heads=2)
    given = {"head": str(tmp_path / "head"), "target": str(target_folder), "draft_length": 2}
    with refused(message):
        serve_check.serve_check(ServeCheckConfig(**{"python": sys.executable, **given, **changed}))


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "[1, 2]",
        "5",
        "[" * 100_000,
        '{"runs": 5}',
        '{"runs": [], "version": "1"}',
        '{"runs": [{}], "version": "1"}',
        '{"runs": [{"tokens": [], "drafts": 1, "accepted": []}], "version": "1"}',
        '{"runs": [{"error": "x"}], "version": 5}',
        '{"runs": [{"tokens": 5}], "version": "1"}',
    ],
)
def test_an_answer_that_is_none_is_one_line(answer, tmp_path):
    (tmp_path / "answer").write_text(answer)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ncp {tmp_path / "answer"} "$3"\n')
    python.chmod(0o700)
    with refused("vLLM's answer"):
        in_vllm(python, tmp_path, {"runs": [{}], "prompts": [[1]]})
