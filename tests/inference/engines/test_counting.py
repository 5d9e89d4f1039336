"""Targets that count positions by their cache: drafts end where a table of positions does.

That their texts are those of `generate` is in tests/census.
"""

from __future__ import annotations

import pytest
from helpers import Oracle, check_identity, random_ids, written_alone
from tiny_models import POSITIONS, VOCAB, tiny_model

from headstart.inference import Conversation, SpeculativeLM, Target, TreeShape

PENALTIES = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2}
TEXT = random_ids(VOCAB, POSITIONS + 20, first=1)


@pytest.mark.parametrize("name", ["bart", "gpt_neo"])
def test_drafts_end_at_the_last_position(name):
    """Beyond it a table of learned positions has no entry."""
    model = tiny_model(name, 3.0)
    prompt = TEXT[: POSITIONS - 12]
    settings = {"max_new_tokens": 12, **PENALTIES}
    truth = written_alone(model, prompt, do_sample=False, **settings)
    assert len(set(truth)) > 3
    lm = SpeculativeLM(Target(model), Oracle(TreeShape.chain(9), [truth], VOCAB, wrong=0.0))
    check_identity(lm, [prompt], **settings)
    lm = SpeculativeLM.from_pretrained(
        model, drafter=model, tree="drawn:chain:5", adaptive=False, compile=False
    )
    assert lm.generate(prompt[None], do_sample=True, **settings).sequences.shape[1] == POSITIONS


@pytest.mark.parametrize(("name", "beyond"), [("bart", 2), ("gpt_neo", 10), ("bart", 20)])
def test_a_text_goes_on_beyond_the_positions_of_a_smaller_model(name, beyond):
    model = tiny_model("bloom", 3.0)  # without a table of positions
    lm = SpeculativeLM.from_pretrained(
        model, drafter=tiny_model(name, 3.0), tree="chain:5", adaptive=False, compile=False
    )
    past = Conversation()
    # A text that becomes too long, a second answer to a shorter one, and one that is too long.
    for text in (TEXT[: POSITIONS - 6], TEXT[: POSITIONS - 20], TEXT):
        check_identity(lm, [text], max_new_tokens=6 + beyond, past_key_values=past)
