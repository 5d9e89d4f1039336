"""A head that knows a few conversations by heart drafts them in whole rounds: training and
decoding, end to end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import build_model, check_identity, written_alone

from headstart.heads import HEADS, DraftHead, build_head
from headstart.inference import SpeculativeLM, Target
from headstart.train.data.batches import collate
from headstart.train.data.chat_template import Example
from headstart.train.features.online import online_features

VOCAB, SAID = 40, 30
"""Tokens, and how many of them ever stand in an answer."""
DEPTH, ROUNDS = 3, 8
ANSWER = 1 + ROUNDS * (DEPTH + 1)
"""Tokens of an answer: the prefill's, and whole rounds, so that a perfect head's last one is
whole."""
PROMPTS = (3, 6, 4, 5, 3, 6, 4, 5)
OPTIONS: dict[str, dict[str, Any]] = {
    "dflash": {"block_size": DEPTH + 1, "num_layers": 2, "feature_layers": [0, 1]},
    "dspark": {"block_size": DEPTH, "markov_rank": 16, "num_layers": 1, "draft_vocab_size": SAID},
    # Trained on true features alone: the noise stands in for its own errors, which by heart it
    # hardly sees.
    "eagle": {"depth": DEPTH, "noise": 0.3, "intermediate_size": 96},
    "eagle3": {"depth": DEPTH, "feature_layers": [0, 1, -1], "draft_vocab_size": SAID},
    "hydra": {"num_heads": DEPTH, "draft_vocab_size": SAID},
    "hydra++": {"num_heads": DEPTH},
    # Medusa does not see the path. Nothing is lost here: in a text that is known by heart, the last
    # state alone determines all that follows.
    "medusa": {"num_heads": DEPTH, "num_layers": 2},
    "mtp": {"depth": DEPTH},
}


def learned_conversations() -> list[Example]:
    """Random prompts and answers: nothing but the text itself says how it continues."""
    random = torch.Generator().manual_seed(0)
    # The tokens that answers are made of are spread over the vocabulary, so that draft ids are
    # other ids.
    said = torch.randperm(VOCAB - 1, generator=random)[:SAID] + 1
    found = []
    for length in PROMPTS:
        prompt = torch.randint(1, VOCAB, (length,), generator=random).tolist()
        answer = said[torch.randint(SAID, (ANSWER,), generator=random)].tolist()
        found.append(Example(prompt + answer, [False] * length + [True] * ANSWER))
    return found


BATCH = collate(learned_conversations())


@pytest.fixture(scope="module")
def knowing() -> Target:
    """A small target that learned the conversations by heart."""
    model = build_model(VOCAB, layers=3, dtype=torch.float32, max_position_embeddings=128).train()
    labels = BATCH.tokens_BT.masked_fill(~BATCH.loss_mask_BT, -100)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(150):
        model(input_ids=BATCH.tokens_BT, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    target = Target(model)
    for tokens_T, length in zip(BATCH.tokens_BT, PROMPTS):
        written = written_alone(model, tokens_T[:length], max_new_tokens=ANSWER)
        assert written == tokens_T[length : length + ANSWER].tolist()
    return target


def overfitted(name: str, target: Target) -> DraftHead:
    """Trained on the conversations with its own default objective, until every draft is right or
    for 200 steps."""
    torch.manual_seed(0)
    head = build_head(name, OPTIONS[name], target.info).train()
    answers = BATCH.tokens_BT[BATCH.loss_mask_BT]
    head.initialize(target.modules, torch.bincount(answers, minlength=VOCAB))
    features = online_features(target, head, BATCH)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=200)
    for _ in range(200):
        output = head(features)
        if torch.equal(output.hits_KI[:, 0], output.counts_K):
            break
        (output.loss / len(answers)).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return head.eval()


@pytest.mark.parametrize("name", sorted(HEADS))
def test_what_a_head_knows_by_heart_is_accepted_in_whole_rounds(name: str, knowing: Target) -> None:
    head = overfitted(name, knowing)
    prompts = [tokens_T[:length] for tokens_T, length in zip(BATCH.tokens_BT, PROMPTS)]
    for tree in (f"dynamic:10:{DEPTH}:3", f"chain:{DEPTH}"):
        lm = SpeculativeLM.from_pretrained(knowing, head=head, tree=tree, adaptive=False)
        output = check_identity(lm, prompts, max_new_tokens=ANSWER)
        assert output.stats.acceptance_length >= 0.9 * (DEPTH + 1), tree

    # A row that is known ends rounds before one that is not, with as many tokens as it may ever
    # hold; the other continues, and is still drafted for.
    for new_tokens in range(ANSWER - DEPTH, ANSWER):
        rows = [prompts[1], torch.tensor([7, 7, 2])]
        output = check_identity(lm, rows, max_new_tokens=new_tokens)
        known, other = output.stats.rows
        assert len(known) < len(other)
