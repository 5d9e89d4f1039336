"""The package `speculators` reads what is exported for it, and what it saves is read here: the same
draft logits.

It lives in an environment of its own, `make peers`; without one these tests are skipped.
"""

from __future__ import annotations

import math
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

from headstart.heads import DraftHead, TargetFeatures, TargetModules, build_head
from headstart.heads.checkpoints.export_formats import export_head
from headstart.heads.checkpoints.files import read_json, read_weights
from headstart.heads.checkpoints.import_formats import import_head
from headstart.heads.checkpoints.reading import TargetParts
from headstart.heads.draft_positions import DraftPositions
from headstart.heads.objective import Objective

ROOT = Path(__file__).parents[2]
PEERS = Path(os.environ.get("HEADSTART_PEERS", ROOT / ".venv-peers")) / "bin" / "python"
SCRIPT = Path(__file__).parent / "peer_speculators.py"
INFO = replace(
    helpers.INFO,
    rms_norm_eps=1e-5,
    max_positions=2048,
    rope_parameters={"rope_type": "default", "rope_theta": 1e4},
)
needs_peers = pytest.mark.skipif(not PEERS.exists(), reason="speculators is not there: make peers")


def peer(what: str, folder: Path, out: Path) -> dict[str, Tensor]:
    command = [PEERS, SCRIPT, what, folder, out]
    # An export names a target without its place on this machine: speculators finds it beside the
    # head.
    done = subprocess.run(command, cwd=folder.parent, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Tensor] = torch.load(out, weights_only=True)
    return found


def saved_target(folder: Path) -> LlamaForCausalLM:
    """A random target, where speculators looks for embedding, LM head and norm."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "num_hidden_layers": 12, "num_attention_heads": 4, "vocab_size": 40}
    target = LlamaForCausalLM(LlamaConfig(intermediate_size=24, tie_word_embeddings=False, **sizes))
    target.save_pretrained(folder)
    return target


def drafts(
    head: DraftHead, embedding_VD: Tensor, features_1TF: Tensor, tokens_1T: Tensor
) -> Tensor:
    """First drafts at every position: the feature and the token beside each other are what the
    layer reads."""
    ends = TargetModules(
        nn.Embedding.from_pretrained(embedding_VD), nn.Linear(16, 40, bias=False), nn.Identity(), ()
    )
    rows = []
    with torch.no_grad():
        for length in range(1, tokens_1T.shape[1] + 1):
            state = head.begin(ends, 1, 32, 1, 4)
            state = head.observe(
                state, features_1TF[:, :length], tokens_1T[:, :length], torch.tensor([length])
            )
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
def test_speculators_drafts_with_our_export_as_we_do(
    options: dict[str, Any], tmp_path: Path
) -> None:
    target = saved_target(tmp_path / "target")
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
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dflash", {}),
        ("dflash", {"draft_vocab_size": 7, "num_layers": 3, "block_size": 4, "mask_token_id": 5}),
        ("dflash", {"sample_from_anchor": True, "num_layers": 1, "feature_layers": [0, 4, 10]}),
        ("dflash", {"num_layers": 2, "sliding_window": 4, "sliding_layers": [1]}),
        (
            "dflash",
            {"num_layers": 2, "sliding_window": 3, "sliding_causal": False, "draft_vocab_size": 7},
        ),
        ("dspark", {"markov_rank": 8}),
        (
            "dspark",
            {"markov": "gated", "markov_rank": 4, "confidence_with_markov": False, "block_size": 4},
        ),
        ("dspark", {"markov": "rnn", "markov_rank": 8, "draft_vocab_size": 7, "confidence": False}),
        ("dspark", {"markov_rank": 4, "sample_from_anchor": False}),
    ],
)
def test_speculators_drafts_and_trains_blocks_as_we_do(
    name: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = saved_target(tmp_path / "target")
    loss = {"kl": 1.0}
    if name == "dspark" and options.get("confidence", True):
        loss["confidence"] = 1.0
    objective = Objective(loss, decay=math.exp(-1 / 4))
    head = build_head(name, options, replace(INFO, name=str(tmp_path / "target")))
    for parameter in head.parameters():
        nn.init.normal_(parameter)
    rows_V = torch.arange(40)
    if "draft_vocab_size" in options:
        rows_V = torch.arange(7) * 3 + 2
        head.choose_vocabulary(rows_V)
        head.lm_head.weight.data.copy_(target.lm_head.weight[rows_V])
    export_head(head, "speculators", tmp_path / "head")
    theirs = peer("load", tmp_path / "head", tmp_path / "out.pt")
    tokens_1T, features_1TF, anchors = theirs["tokens"], theirs["features"], len(theirs["logits"])
    modules = TargetModules(target.get_input_embeddings(), target.lm_head, target.model.norm, ())
    for number in range(anchors):
        length = torch.tensor([number + 1])
        state = head.begin(modules, 1, 32, head.max_depth, 1)
        state = head.observe(
            state, features_1TF[:, : number + 1], tokens_1T[:, 1 : number + 2], length
        )
        for slot in range(head.config.block_size - head.max_depth, head.config.block_size):
            before, parent = number + 1 + state.depth, 0 if state.depth else -1
            logits_11V, state = head.expand(
                state, tokens_1T[:, before : before + 1], torch.full((1, 1), parent)
            )
            torch.testing.assert_close(
                logits_11V[0, 0], theirs["logits"][number, slot], rtol=1e-5, atol=1e-5
            )
    mask_1T = torch.ones_like(tokens_1T, dtype=torch.bool)
    last_1TD = target.model.norm(theirs["last"])
    features = TargetFeatures(features_1TF, last_1TD, tokens_1T, mask_1T, modules)
    found = DraftPositions.of(features, head.max_depth)
    whole = replace(
        found,
        index_N=found.index_N[:anchors],
        rows_NK=found.rows_NK[:anchors],
        valid_NK=found.valid_NK[:anchors],
        on_host_N=found.index_N[:anchors],
        on_host_NK=found.rows_NK[:anchors],
    )
    assert bool(whole.valid_NK.all())
    monkeypatch.setattr(DraftPositions, "of", lambda *_: whole)
    found_loss = head.eval()(features, objective).loss / whole.valid_NK.sum()
    torch.testing.assert_close(found_loss, theirs["loss"], rtol=1e-5, atol=1e-5)


@needs_peers
def test_we_draft_with_a_model_that_speculators_saved_as_it_does(tmp_path: Path) -> None:
    theirs = peer("save", tmp_path / "head", tmp_path / "out.pt")
    tensors = read_weights(tmp_path / "head")
    embedding_VD = tensors["embed_tokens.weight"]
    found, source = import_head(
        read_json(tmp_path / "head" / "config.json"), tensors, INFO, TargetParts(embedding_VD)
    )
    assert source.form == "speculators" and found.feature_layers == (1, 4, 8)
    ours = drafts(found, embedding_VD, theirs["features"], theirs["tokens"])
    torch.testing.assert_close(ours, theirs["logits"], rtol=1e-4, atol=1e-4)
