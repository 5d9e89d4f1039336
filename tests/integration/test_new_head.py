"""The eighth head: one class with its options and one row of `HEADS`, and every command knows it."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from headstart.heads import HEADS, DraftHead, DraftState, HeadOutput, TargetFeatures, TargetInfo, TargetModules
from headstart.heads.checkpoints.save_load import load_head
from headstart.heads.losses import DraftPositions, Objective, draft_loss
from headstart.inference import SpeculativeLM, Target, load_tokenizer
from headstart.train.config import DataConfig, EvalConfig, LoopConfig, OptimConfig, TrainConfig
from headstart.train.data.batches import Batch, collate
from headstart.train.data.chat_template import encode
from headstart.train.data.conversations import read_conversations
from headstart.train.features.online import online_features
from headstart.train.loop import train


@dataclass(frozen=True)
class BigramConfig:
    """Options of a bigram head."""

    depth: int = 3
    """Tokens after the root that are guessed."""
    width: int = 24
    """Of the embedding."""


class BigramHead(DraftHead):
    """Guesses the next token from the current one alone: logits = lm_head(embed(token)), at every depth."""

    config_class: ClassVar[type[Any]] = BigramConfig

    def __init__(self, config: BigramConfig, target: TargetInfo) -> None:
        super().__init__(config, target)
        self.max_depth = config.depth
        self.feature_layers = ()
        self.embed = nn.Embedding(target.vocab_size, config.width)
        self.lm_head = nn.Linear(config.width, target.vocab_size, bias=False)

    def initialize(self, ends: TargetModules, token_counts_V: Tensor) -> None:
        nn.init.normal_(self.embed.weight)

    def forward(self, features: TargetFeatures, ranks: int = 1) -> HeadOutput:
        anchors = DraftPositions.of(features, self.max_depth)
        tokens_NK = features.tokens_BT.flatten()[anchors.rows_NK]
        hiddens = [self.embed(tokens_NK[:, depth]) for depth in range(self.max_depth)]
        heads = [self.lm_head.weight] * self.max_depth
        return draft_loss(hiddens, heads, None, features, anchors, Objective({"ce": 1.0}, "decay", 0.8), ranks)

    def begin(self, ends: TargetModules, batch_size: int, capacity: int, max_depth: int, nodes: int) -> DraftState:
        return DraftState(ends, 0, max_depth)

    def observe(self, state: DraftState, features_BAF: Tensor, next_tokens_BA: Tensor, lengths_B: Tensor) -> DraftState:
        return dataclasses.replace(state, depth=0)

    def expand(self, state: DraftState, tokens_BW: Tensor, parents_BW: Tensor) -> tuple[Tensor, DraftState]:
        return self.lm_head(self.embed(tokens_BW)), dataclasses.replace(state, depth=state.depth + 1)

    def server_config(self) -> dict[str, Any]:
        return {}


@pytest.fixture(autouse=True)
def row(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that the project is told of the new head."""
    monkeypatch.setitem(HEADS, "bigram", BigramHead)


@pytest.fixture(scope="module")
def conversations(target_folder: Path, conversations_file: Path) -> Batch:
    tokenizer = load_tokenizer(target_folder)
    eos = frozenset({tokenizer.eos_token_id})
    rows = read_conversations(str(conversations_file))
    return collate([example for row in rows for example in encode(row, tokenizer, eos, 200)])


@pytest.fixture(scope="module")
def taught(target_folder: Path, conversations: Batch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target after it learned the conversations, so that there is something to guess."""
    model = AutoModelForCausalLM.from_pretrained(target_folder)
    labels = conversations.tokens_BT.masked_fill(~conversations.loss_mask_BT, -100)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(25):
        model(input_ids=conversations.tokens_BT, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    folder = tmp_path_factory.mktemp("taught")
    model.save_pretrained(folder)
    load_tokenizer(target_folder).save_pretrained(folder)
    return folder


def run_options(target: Path, conversations_file: Path, output: Path) -> TrainConfig:
    return TrainConfig(
        target=str(target),
        output=str(output),
        head={"type": "bigram", "width": 16},
        target_dtype="float32",
        data=DataConfig(sources=[str(conversations_file)], held_out=0.2),
        optim=OptimConfig(lr=0.05),
        loop=LoopConfig(max_steps=24, batch_size=4, precision="float32", log_every=1, eval_every=0, save_every=12),
        eval=EvalConfig(prompts=3, new_tokens=8, conversations=3, nodes=6),
    )


def test_a_new_head_is_trained_measured_saved_loaded_and_decoded_with(
    taught: Path, conversations_file: Path, conversations: Batch, tmp_path: Path
) -> None:
    folder = train(run_options(taught, conversations_file, tmp_path / "run"))
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 24 and all(last < 0.7 * first for first, last in zip(losses[0], losses[-1], strict=True))
    measured = rows[-1]["eval"]
    assert max(stats["acceptance_length"] for stats in measured.values()) > 1.2

    target = Target.from_pretrained(taught, torch.float64)
    head, metadata = load_head(folder / "best", target.info, torch.float64)
    assert type(head) is BigramHead and head.config == BigramConfig(width=16)
    assert metadata.training["config"]["head"] == {"type": "bigram", "width": 16}
    assert metadata.measured["trees"].keys() == measured.keys()

    tokens_BT, first_B = conversations.tokens_BT, conversations.loss_mask_BT.int().argmax(1)
    prompts = [tokens_BT[i, : first_B[i]] for i in range(2)]
    assert metadata.tree is not None
    for tree in (metadata.tree, "chain:3", [[0], [1], [0, 0], [1, 0], [0, 0, 0]], "dynamic:8:3:3"):
        lm = SpeculativeLM.from_pretrained(target, head=head, tree=tree, fallback=False)
        for prompt in prompts:
            mask = torch.ones_like(prompt[None])
            settings: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 16, "do_sample": False}
            expected = target.model.generate(prompt[None], **settings)
            assert torch.equal(lm.generate(prompt[None], **settings).sequences, expected), tree


def test_a_new_heads_drafts_are_what_it_was_trained_on(taught: Path, conversations: Batch) -> None:
    """The loss at every depth is that of what `expand` says of the true token there, summed over all answers."""
    target = Target.from_pretrained(taught, torch.float32)
    torch.manual_seed(0)
    head = BigramHead(BigramConfig(), target.info)
    features = online_features(target, head, conversations)
    losses, counts = [0.0] * 3, [0] * 3
    tokens_BT, mask_BT = conversations.tokens_BT, conversations.loss_mask_BT
    state = head.begin(target.modules, len(tokens_BT), 200, 3, 3)
    for depth in range(3):
        for place in range(tokens_BT.shape[1] - 2 - depth):
            inside_B = mask_BT[:, place + 1 : place + 3 + depth].all(1)
            token_B, label_B = tokens_BT[:, place + 1 + depth], tokens_BT[:, place + 2 + depth]
            logits_B1V, _ = head.expand(state, token_B[:, None], torch.full((len(token_B), 1), -1))
            losses[depth] += F.cross_entropy(logits_B1V[inside_B, 0], label_B[inside_B], reduction="sum").item()
            counts[depth] += int(inside_B.sum())
    output = head(features)
    assert output.counts_K.tolist() == counts
    assert output.losses_K.tolist() == pytest.approx(losses, rel=1e-5)
