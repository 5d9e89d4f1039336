"""The package `speculators` reads what is exported for it, and what it saves is read here: the same draft logits.

It lives in an environment of its own, `make peers`; without one these tests are skipped.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import helpers
import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.heads import DraftHead, TargetModules, build_head
from headstart.heads.checkpoints.export_formats import export_head
from headstart.heads.checkpoints.files import read_json, read_weights
from headstart.heads.checkpoints.import_formats import import_head

PEERS = Path(os.environ.get("HEADSTART_PEERS", Path(__file__).parents[2] / ".venv-peers")) / "bin" / "python"
SCRIPT = Path(__file__).parent / "peer_speculators.py"
INFO = replace(
    helpers.INFO, rms_norm_eps=1e-5, max_positions=2048, rope_parameters={"rope_type": "default", "rope_theta": 1e4}
)
needs_peers = pytest.mark.skipif(not PEERS.exists(), reason="speculators is not there: make peers")


def peer(what: str, folder: Path, out: Path) -> dict[str, Tensor]:
    done = subprocess.run([PEERS, SCRIPT, what, folder, out], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Tensor] = torch.load(out, weights_only=True)
    return found


def drafts(head: DraftHead, embedding_VD: Tensor, features_1TF: Tensor, tokens_1T: Tensor) -> Tensor:
    """First drafts at every position: the feature and the token beside each other are what the layer reads."""
    ends = TargetModules(nn.Embedding.from_pretrained(embedding_VD), nn.Linear(16, 40, bias=False), nn.Identity(), ())
    rows = []
    with torch.no_grad():
        for length in range(1, tokens_1T.shape[1] + 1):
            state = head.begin(ends, 1, 32, 1, 4)
            state = head.observe(state, features_1TF[:, :length], tokens_1T[:, :length], torch.tensor([length]))
            rows.append(head.expand(state, tokens_1T[:, :1], torch.full((1, 1), -1))[0])
    return torch.cat(rows, dim=1)


@needs_peers
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm_before_residual": True, "draft_vocab_size": 7},
        {"norm_before_fc": True, "norm_output": True, "feature_layers": [2, 8]},
        {"fc_norm": True, "qk_norm": True, "num_layers": 2},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}},
    ],
)
def test_speculators_drafts_with_our_export_as_we_do(options: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "num_hidden_layers": 12, "num_attention_heads": 4, "vocab_size": 40}
    target = LlamaForCausalLM(LlamaConfig(intermediate_size=24, tie_word_embeddings=False, **sizes))
    target.save_pretrained(tmp_path / "target")  # where speculators looks for embedding, LM head and norm
    embedding_VD = target.get_input_embeddings().weight.detach()
    head = build_head("eagle3", options, replace(INFO, name=str(tmp_path / "target")))
    for parameter in head.parameters():
        nn.init.normal_(parameter)
    if "draft_vocab_size" in options:
        ids_V = torch.arange(7) * 3 + 2
        head.get_buffer("d2t").copy_(ids_V - torch.arange(7))
        head.get_buffer("t2d").copy_(torch.zeros(40, dtype=torch.bool).index_fill(0, ids_V, True))
    export_head(head, "speculators", tmp_path / "head", embedding_VD)
    theirs = peer("load", tmp_path / "head", tmp_path / "out.pt")
    ours = drafts(head, embedding_VD, theirs["features"], theirs["tokens"])
    torch.testing.assert_close(ours, theirs["logits"], rtol=1e-4, atol=1e-4)


@needs_peers
def test_we_draft_with_a_model_that_speculators_saved_as_it_does(tmp_path: Path) -> None:
    theirs = peer("save", tmp_path / "head", tmp_path / "out.pt")
    tensors = read_weights(tmp_path / "head")
    embedding_VD = tensors["embed_tokens.weight"]
    found, source = import_head(read_json(tmp_path / "head" / "config.json"), tensors, INFO, embedding_VD)
    assert source.form == "speculators" and found.feature_layers == (1, 4, 8)
    ours = drafts(found, embedding_VD, theirs["features"], theirs["tokens"])
    torch.testing.assert_close(ours, theirs["logits"], rtol=1e-4, atol=1e-4)
