"""A parallel draft model (PARD): all levels of a draft from one forward with mask tokens."""

from __future__ import annotations

import pytest
import torch
from helpers import check_identity, padded_batch, parallel_model
from messages import refused

from headstart.inference import RoundObserver, SpeculativeLM, Target
from headstart.inference.drafters.by_name import assistants, make_drafter
from headstart.inference.drafters.draft_model import mask_token

VOCAB, MASK = 20, 19


ROWS = [torch.tensor(row) for row in ([5, 6, 7], [1], [2, 3, 4, 5, 9, 2], [8, 8])]


@pytest.mark.parametrize("slots", [None, 2])
def test_drafts_are_the_models_own_after_the_text_and_masks(target, slots):
    """In every round of a batch whose rows come, go, and accept different numbers of tokens."""
    draft = parallel_model(VOCAB, MASK)
    lm = SpeculativeLM.from_pretrained(target, drafter=draft, tree="chain:4", adaptive=False)
    padded, mask = padded_batch(ROWS)
    rounds = []
    lm.observers.append(Watched(rounds))
    settings = {"max_new_tokens": 14, "do_sample": False, "eos_token_id": [], "pad_token_id": 0}
    lm.generate(padded, attention_mask=mask, max_batch_size=slots, **settings)
    assert len(rounds) > 8
    for text, drafted in rounds:
        ids = torch.tensor([text + [MASK] * 3])
        expected = draft(ids).logits[0, len(text) - 1 :].argmax(-1).tolist()
        assert drafted == expected


class Watched(RoundObserver):
    """Notes the text and the drafts of each row in each round."""

    def __init__(self, rounds):
        self.rounds = rounds

    def begin(self, call):
        self.sequences = call.sequences

    def round(self, finished):
        for slot, number in enumerate(self.sequences.decoded):
            if number is None or not finished.tokens[slot]:
                continue
            prompt = self.sequences.prompts[number].tolist()
            before = self.sequences.rows[number][: -len(finished.tokens[slot])]
            self.rounds.append(([*prompt, *before], finished.proposed.tokens_BN[slot, 1:].tolist()))


@pytest.mark.parametrize("mask", [VOCAB, -1, None, "x"])
def test_a_mask_that_is_no_token_is_refused(target, mask):
    with refused("pard_token", str(VOCAB)):
        make_drafter(target, Target(parallel_model(VOCAB, mask)))


def test_a_folder_says_that_its_model_drafts_in_parallel(target, tmp_path):
    parallel_model(VOCAB, MASK).save_pretrained(tmp_path)
    lm = SpeculativeLM.from_pretrained(target, drafter=str(tmp_path), adaptive=False)
    [model] = assistants(lm.drafter)
    assert mask_token(model) == MASK and lm.drafter.depth == 8
    check_identity(lm, [torch.tensor([5, 6, 7])], eos_token_id=[])
