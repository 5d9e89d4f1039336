"""The extension story: a class and a row of `HEADS` are all that training, checkpoints, decoding
and commands need."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from headstart.heads import (
    HEADS,
    CheckpointMetadata,
    DraftHead,
    DraftState,
    HeadOutput,
    TargetFeatures,
    TargetInfo,
    TargetModules,
    build_head,
)
from headstart.heads.checkpoints.save_load import load_head, save_head
from headstart.heads.draft_positions import DraftPositions
from headstart.heads.losses import draft_loss
from headstart.heads.objective import Objective
from headstart.inference import SpeculativeLM, Target, load_tokenizer
from headstart.inference.drafters.tree_policies import HeadDrafter
from headstart.train.config import DataConfig, EvalConfig, LoopConfig, OptimConfig, TrainConfig
from headstart.train.data.batches import Batch, collate
from headstart.train.data.chat_template import encode
from headstart.train.data.conversations import read_conversations
from headstart.train.features.online import online_features
from headstart.train.loop import train

VOCAB = 60
OBJECTIVE = Objective({"ce": 1.0})
"""Targets here are shallow, and their distributions so flat that a loss on them has nowhere to
fall."""
CHAIN = [[0], [0, 0], [0, 0, 0]]
TREE = [[0], [1], [4], [0, 0], [0, 2], [1, 0], [0, 0, 0], [0, 2, 1], [1, 0, 0]]


# A head that exists only here.


@dataclass(frozen=True)
class BigramConfig:
    """Options of a bigram head."""

    depth: int = 3
    """Most tokens after the root that are drafted."""
    width: int = 24
    """Of the embedding."""
    feature_layers: list[int] = field(default_factory=list)
    """A bigram needs no features at all."""


class BigramHead(DraftHead):
    """Drafts the next token from the current one alone: logits = lm_head(embed(token)), at every
    depth."""

    config_class: ClassVar[type[Any]] = BigramConfig

    def __init__(self, config: BigramConfig, target: TargetInfo) -> None:
        super().__init__(config, target)
        self.max_depth, self.feature_layers = config.depth, tuple(config.feature_layers)
        self.embed = nn.Embedding(target.vocab_size, config.width)
        self.lm_head = nn.Linear(config.width, target.vocab_size, bias=False)

    def initialize(self, modules: TargetModules, token_counts_V: Tensor) -> None:
        nn.init.normal_(self.embed.weight)

    def forward(
        self, features: TargetFeatures, objective: Objective | None = None, ranks: int = 1
    ) -> HeadOutput:
        objective = objective or self.default_objective(self.config)
        positions = DraftPositions.of(features, self.max_depth)
        tokens_NK = features.tokens_BT.flatten()[positions.rows_NK]
        hiddens = [self.embed(tokens_NK[:, depth]) for depth in range(self.max_depth)]
        heads = [self.lm_head.weight] * self.max_depth
        return draft_loss(hiddens, heads, None, features, positions, objective, ranks)

    def begin(
        self, modules: TargetModules, batch_size: int, capacity: int, max_depth: int, nodes: int
    ) -> DraftState:
        return DraftState(modules, 0, max_depth)

    def observe(
        self, state: DraftState, features_BAF: Tensor, next_tokens_BA: Tensor, lengths_B: Tensor
    ) -> DraftState:
        return replace(state, depth=0)

    def expand(
        self, state: DraftState, tokens_BW: Tensor, parents_BW: Tensor
    ) -> tuple[Tensor, DraftState]:
        return self.lm_head(self.embed(tokens_BW)), replace(state, depth=state.depth + 1)

    def server_config(self) -> dict[str, Any]:
        return {}


@pytest.fixture
def in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that the project is told of the new head."""
    monkeypatch.setitem(HEADS, "bigram", BigramHead)


# The main path, by hand.


def continued(target: Target, tokens_BT: Tensor, new_tokens: int) -> Tensor:
    """What the target alone generates, greedily."""
    mask_BT = torch.ones_like(tokens_BT)
    return target.model.generate(
        tokens_BT, attention_mask=mask_BT, do_sample=False, max_new_tokens=new_tokens
    )


def trained(
    name: str, options: dict[str, Any], target: Target, tokens_BT: Tensor, steps: int
) -> DraftHead:
    """A new float64 head after some steps on `tokens_BT`; its loss must fall and every parameter
    must be reached."""
    torch.manual_seed(0)
    head = build_head(name, options, target.info).double()
    target.check_layers(head.feature_layers)
    head.initialize(target.modules, torch.bincount(tokens_BT.flatten(), minlength=VOCAB))
    batch = Batch(
        tokens_BT,
        torch.ones_like(tokens_BT, dtype=torch.bool),
        ((tokens_BT.shape[1],),) * len(tokens_BT),
    )
    features = online_features(target, head, batch, torch.float64)
    optimizer = torch.optim.AdamW(head.parameters(), lr=0.02)
    losses = []
    for _ in range(steps):
        output = head(features, OBJECTIVE)
        optimizer.zero_grad()
        (output.loss / tokens_BT.numel()).backward()
        missed = [name for name, parameter in head.named_parameters() if parameter.grad is None]
        assert not missed, f"no gradient reaches {missed}"
        optimizer.step()
        losses.append(output.loss.item())
    assert losses[-1] < 0.7 * losses[0]
    return head


def test_without_its_row_a_head_is_unknown(
    tiny_target: Callable[..., Target], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as listed:
        listed.setitem(HEADS, "bigram", BigramHead)
        save_head(
            build_head("bigram", {}, tiny_target(vocab_size=VOCAB).info),
            tmp_path / "head",
            CheckpointMetadata(),
        )
    known = re.escape(", ".join(sorted(HEADS)))
    with pytest.raises(
        ValueError, match=rf"config\.json: unknown head 'bigram'; choose from {known}$"
    ):
        load_head(tmp_path / "head")


# What a head is given while decoding.


class Witness(BigramHead):
    """A bigram head that records what `observe` shows it and holds `expand` to its contract."""

    def begin(
        self, modules: TargetModules, batch_size: int, capacity: int, max_depth: int, nodes: int
    ) -> DraftState:
        self.seen: list[list[tuple[Tensor, int]]] = [[] for _ in range(batch_size)]
        self.rows = list(range(batch_size))
        self.frontiers = 0
        return super().begin(modules, batch_size, capacity, max_depth, nodes)

    def observe(
        self, state: DraftState, features_BAF: Tensor, next_tokens_BA: Tensor, lengths_B: Tensor
    ) -> DraftState:
        batch = [self.seen[row] for row in self.rows]
        for seen, features_AF, tokens_A, length in zip(
            batch, features_BAF, next_tokens_BA.tolist(), lengths_B.tolist(), strict=True
        ):
            seen.extend(zip(features_AF[:length], tokens_A[:length], strict=True))
        return super().observe(state, features_BAF, next_tokens_BA, lengths_B)

    def expand(
        self, state: DraftState, tokens_BW: Tensor, parents_BW: Tensor
    ) -> tuple[Tensor, DraftState]:
        assert tokens_BW.shape == parents_BW.shape
        if state.depth == 0:
            roots = [[self.seen[row][-1][1]] for row in self.rows]
            assert tokens_BW.tolist() == roots and (parents_BW == -1).all()
        else:
            assert len(set(self.previous_BW[0].tolist())) == self.previous_BW.shape[1]
            best_BW5 = (
                self.lm_head(self.embed(self.previous_BW.gather(1, parents_BW))).topk(5).indices
            )
            assert (best_BW5 == tokens_BW[..., None]).any(-1).all(), (
                "a node is no draft of the parent that is named"
            )
            self.frontiers += tokens_BW.shape[1] > 1
        self.previous_BW = tokens_BW
        return super().expand(state, tokens_BW, parents_BW)


@pytest.mark.parametrize("tree", [CHAIN, TREE], ids=["chain", "tree"])
def test_a_head_is_given_what_was_committed_and_which_nodes_it_expands(
    tree: list[list[int]], tiny_target: Callable[..., Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Position by position the target's own features with the token that follows, however rows come
    apart."""
    select = HeadDrafter.select

    def selected(drafter: HeadDrafter, rows_R: Tensor) -> None:
        assert isinstance(drafter.head, Witness)
        drafter.head.rows = [drafter.head.rows[row] for row in rows_R.tolist()]
        select(drafter, rows_R)

    monkeypatch.setattr(HeadDrafter, "select", selected)
    monkeypatch.setitem(HEADS, "bigram", Witness)
    target = tiny_target(vocab_size=VOCAB)
    torch.manual_seed(0)
    text_BT = continued(target, torch.randint(VOCAB, (24, 3)), 40)
    head = trained("bigram", {"feature_layers": [0, -1]}, target, text_BT, steps=25)
    assert isinstance(head, Witness)
    lm = SpeculativeLM.from_pretrained(target, head=head, tree=tree, adaptive=False, compile=False)
    prompts, masks = torch.zeros(3, 9, dtype=torch.int64), torch.zeros(3, 9, dtype=torch.int64)
    for row, length in enumerate((9, 1, 4)):
        prompts[row, 9 - length :], masks[row, 9 - length :] = text_BT[row, :length], 1
    out = lm.generate(prompts, attention_mask=masks, do_sample=False, max_new_tokens=30)
    assert out.stats.acceptance_length > 1.2
    for sequence, mask, seen in zip(out.sequences, masks, head.seen, strict=True):
        tokens = sequence[9 - int(mask.sum()) :]
        features_BTF, _ = target.read(tokens[None, :-1], head.feature_layers)
        told = seen[: len(tokens) - 1]
        assert [token for _, token in told] == tokens[1:].tolist()
        torch.testing.assert_close(
            torch.stack([features for features, _ in told]), features_BTF[0], rtol=0, atol=1e-9
        )
    assert (head.frontiers > 0) == (tree is TREE)


# A run of training, as its command starts it.


@pytest.fixture(scope="module")
def conversations(target_folder: Path, conversations_file: Path) -> Batch:
    tokenizer = load_tokenizer(target_folder)
    eos = frozenset({tokenizer.eos_token_id})
    rows = read_conversations(str(conversations_file))
    return collate([example for row in rows for example in encode(row, tokenizer, eos, 200)])


def run_options(target: Path, conversations_file: Path, output: Path) -> TrainConfig:
    return TrainConfig(
        target=str(target),
        output=str(output),
        head={"type": "bigram", "width": 16},
        dtype="float32",
        data=DataConfig(sources=[str(conversations_file)], held_out=0.2),
        optim=OptimConfig(lr=0.05),
        loop=LoopConfig(
            max_steps=24,
            batch_size=4,
            precision="float32",
            log_every=1,
            eval_every=0,
            save_every=12,
        ),
        eval=EvalConfig(prompts=3, max_new_tokens=8, conversations=3, nodes=6),
    )


def test_a_new_head_is_trained_measured_saved_loaded_and_decoded_with(
    taught: Path, conversations_file: Path, conversations: Batch, tmp_path: Path, in_the_table: None
) -> None:
    folder = train(run_options(taught, conversations_file, tmp_path / "run"))
    rows = [
        json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 24 and all(
        last < 0.7 * first for first, last in zip(losses[0], losses[-1], strict=True)
    )
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
        lm = SpeculativeLM.from_pretrained(target, head=head, tree=tree, adaptive=False)
        for prompt in prompts:
            mask = torch.ones_like(prompt[None])
            settings: dict[str, Any] = {
                "attention_mask": mask,
                "max_new_tokens": 16,
                "do_sample": False,
            }
            expected = target.model.generate(prompt[None], **settings)
            assert torch.equal(lm.generate(prompt[None], **settings).sequences, expected), tree
