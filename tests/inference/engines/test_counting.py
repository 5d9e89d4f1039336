"""Targets that count positions by their cache: in chains, row by row, as `generate` writes them."""

from __future__ import annotations

import pytest
import torch
import transformers
from helpers import Oracle, check_identity, written_alone
from packaging.version import Version
from transformers import (
    BartConfig,
    BartForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    MptConfig,
    MptForCausalLM,
    RoFormerConfig,
    RoFormerForCausalLM,
)

from headstart.inference import Conversation, SpeculativeLM, Target, TreeShape

VOCAB = 50
POSITIONS = 64
SPECIAL = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}


MODELS = {
    "bloom": lambda: BloomForCausalLM(
        BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=3, n_head=4, **SPECIAL)
    ),
    "mpt": lambda: MptForCausalLM(
        MptConfig(
            vocab_size=VOCAB, d_model=32, n_layers=3, n_heads=4, max_seq_len=POSITIONS, **SPECIAL
        )
    ),
    "falcon, alibi": lambda: FalconForCausalLM(
        FalconConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            alibi=True,
            **SPECIAL,
        )
    ),
    "gpt-neo, local layers": lambda: GPTNeoForCausalLM(
        GPTNeoConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            num_layers=4,
            num_heads=4,
            intermediate_size=48,
            attention_types=[[["global", "local"], 2]],
            window_size=6,
            max_position_embeddings=POSITIONS,
            **SPECIAL,
        )
    ),
    "bart's decoder": lambda: BartForCausalLM(
        BartConfig(
            vocab_size=VOCAB,
            d_model=32,
            decoder_ffn_dim=48,
            decoder_attention_heads=4,
            encoder_layers=3,
            decoder_layers=3,
            max_position_embeddings=POSITIONS,
            is_decoder=True,
            forced_eos_token_id=None,
            **SPECIAL,
        )
    ),
    "roformer": lambda: RoFormerForCausalLM(
        RoFormerConfig(
            vocab_size=VOCAB,
            embedding_size=32,
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=48,
            max_position_embeddings=POSITIONS,
            is_decoder=True,
            **SPECIAL,
        )
    ),
}
PENALTIES = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2}


def scaled(model, dtype=torch.float64, scale=6):
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, 0.02 * scale)
    return model.to(dtype).eval().requires_grad_(False)


def prompt_of(length, seed=0):
    return torch.randint(
        1, VOCAB, (length,), generator=torch.Generator().manual_seed(seed + length)
    )


def oracle(target, prompt, new_tokens, shape, wrong):
    """Drafts chains that mostly hold the true text."""
    settings = {"max_new_tokens": new_tokens, "do_sample": False, **PENALTIES}
    truth = written_alone(target.model, prompt, **settings)
    assert len(set(truth)) > 3
    return SpeculativeLM(target, Oracle(shape, [truth], VOCAB, wrong))


@pytest.mark.versions
@pytest.mark.parametrize("name", MODELS)
def test_chains_write_what_generate_writes(name):
    target = Target(scaled(MODELS[name]()))
    assert target.counted
    if name == "roformer" and Version(transformers.__version__) < Version("5.18"):
        with pytest.raises(ValueError, match="cannot be decoded with drafts"):
            target.check_decoding()
        return
    for length in (1, 9, 20):
        prompt = prompt_of(length)
        lm = oracle(target, prompt, 30, TreeShape.chain(4), 0.1)
        found = check_identity(lm, [prompt], max_new_tokens=30, **PENALTIES)
        assert found.stats.acceptance_length > 2.5


@pytest.mark.parametrize("name", ["bart's decoder", "gpt-neo, local layers"])
def test_drafts_end_at_the_last_position(name):
    """Beyond it a table of learned positions has no entry."""
    model = scaled(MODELS[name]())
    prompt = prompt_of(POSITIONS - 12)
    settings = {**PENALTIES, "max_new_tokens": 12}
    lm = oracle(Target(model), prompt, 12, TreeShape.chain(9), 0.0)
    check_identity(lm, [prompt], **settings)
    lm = SpeculativeLM.from_pretrained(
        model, drafter=model, tree="drawn:chain:5", adaptive=False, compile=False
    )
    assert lm.generate(prompt[None], do_sample=True, **settings).sequences.shape[1] == POSITIONS


@pytest.mark.parametrize("name", ["bart's decoder", "gpt-neo, local layers"])
@pytest.mark.parametrize("beyond", [2, 10, 20])
def test_a_text_goes_on_beyond_the_positions_of_a_smaller_model(name, beyond):
    torch.manual_seed(0)
    model = scaled(MODELS["bloom"]())  # without a table of positions
    lm = SpeculativeLM.from_pretrained(
        model, drafter=scaled(MODELS[name]()), tree="chain:5", adaptive=False, compile=False
    )
    prompt = prompt_of(POSITIONS + 20)
    past = Conversation()
    # A text that becomes too long, a second answer to a shorter one, and one that is too long.
    for text in (prompt[: POSITIONS - 6], prompt[: POSITIONS - 20], prompt):
        check_identity(lm, [text], max_new_tokens=6 + beyond, past_key_values=past)
