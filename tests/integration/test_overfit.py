"""A head that knows a few conversations by heart drafts them in whole rounds: training and
decoding, end to end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import check_identity, written_alone
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.heads import HEADS, DraftHead, build_head
from headstart.inference import SpeculativeLM, Target
from headstart.train.data.batches import Batch, collate
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


def conversations() -> list[Example]:
    """Random prompts and answers: nothing but the text itself says how it continues."""
    random = torch.Generator().manual_seed(0)
    # The tokens that answers are made of are spread over the vocabulary, so that draft ids are
    # other ids.
    said = torch.randperm(VOCAB - 1, generator=random)[:SAID] + 1
    found = []
    for length in PROMPTS:
        prompt = torch.randint(1, VOCAB, (length,), generator=random)
        answer = said[torch.randint(SAID, (ANSWER,), generator=random)]
        found.append(
            Example([*prompt.tolist(), *answer.tolist()], [False] * length + [True] * ANSWER)
        )
    return found


@pytest.fixture(scope="module")
def batch() -> Batch:
    return collate(conversations())


@pytest.fixture(scope="module")
def taught(batch: Batch) -> Target:
    """A small target that learned the conversations by heart."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    labels = batch.tokens_BT.masked_fill(~batch.loss_mask_BT, -100)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(150):
        model(input_ids=batch.tokens_BT, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    target = Target(model)
    for tokens_T, length in zip(batch.tokens_BT, PROMPTS):
        settings = {"max_new_tokens": ANSWER, "do_sample": False, "pad_token_id": 0}
        written = written_alone(model, tokens_T[:length], **settings)
        assert written == tokens_T[length : length + ANSWER].tolist()
    return target


def overfitted(name: str, options: dict[str, Any], target: Target, batch: Batch) -> DraftHead:
    """Trained on the conversations with its own default objective, until every draft is right or
    for 200 steps."""
    torch.manual_seed(0)
    head = build_head(name, options, target.info).train()
    head.initialize(
        target.modules, torch.bincount(batch.tokens_BT[batch.loss_mask_BT], minlength=VOCAB)
    )
    features = online_features(target, head, batch)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=200)
    for _ in range(200):
        output = head(features)
        if torch.equal(output.hits_KI[:, 0], output.counts_K):
            break
        (output.loss / batch.loss_mask_BT.sum()).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return head.eval()


@pytest.mark.parametrize("name", sorted(HEADS))
def test_what_a_head_knows_by_heart_is_accepted_in_whole_rounds(
    name: str, taught: Target, batch: Batch
) -> None:
    head = overfitted(name, OPTIONS[name], taught, batch)
    prompts = [tokens_T[:length] for tokens_T, length in zip(batch.tokens_BT, PROMPTS)]
    for tree in (f"chain:{DEPTH}", f"dynamic:10:{DEPTH}:3"):
        lm = SpeculativeLM.from_pretrained(taught, head=head, tree=tree, adaptive=False)
        output = check_identity(lm, prompts, max_new_tokens=ANSWER)
        assert output.stats.acceptance_length >= 0.9 * (DEPTH + 1), tree

    # A row that is known ends rounds before one that is not, with as many tokens as it may ever
    # hold; the other continues, and is still drafted for.
    lm = SpeculativeLM.from_pretrained(taught, head=head, tree=f"chain:{DEPTH}", adaptive=False)
    for new_tokens in range(ANSWER - DEPTH, ANSWER):
        rows = [prompts[1], torch.tensor([7, 7, 2])]
        output = check_identity(lm, rows, max_new_tokens=new_tokens)
        known, other = output.stats.rows
        assert len(known) < len(other)
