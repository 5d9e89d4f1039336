"""Targets that count positions by their cache: in chains, row by row, as `generate` writes them."""

from __future__ import annotations

import pytest
import torch
import transformers
from helpers import head_for, padded_batch, written_alone
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
from headstart.inference.drafters.by_name import make_drafter
from headstart.inference.drafters.tree_policies import StaticTree
from headstart.inference.speculative_lm import Call

VOCAB = 50
POSITIONS = 64
SPECIAL = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}


def bart(vocab=VOCAB, layers=3):
    sizes = {
        "vocab_size": vocab,
        "d_model": 32,
        "decoder_ffn_dim": 48,
        "decoder_attention_heads": 4,
    }
    sizes |= {
        "encoder_layers": layers,
        "decoder_layers": layers,
        "max_position_embeddings": POSITIONS,
    }
    return BartForCausalLM(
        BartConfig(**sizes, **SPECIAL, is_decoder=True, forced_eos_token_id=None)
    )


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
    "bart's decoder": bart,
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


def alone(model, prompt, new_tokens, **more):
    settings = {"max_new_tokens": new_tokens, "do_sample": False, **PENALTIES, **more}
    return written_alone(model, prompt, **settings)


def decoded(lm, prompts, new_tokens, **more):
    """The new tokens of each row, decoded as one padded batch, and the statistics."""
    input_ids, mask = padded_batch(prompts)
    settings = {"max_new_tokens": new_tokens, "do_sample": False, **PENALTIES, **more}
    output = lm.generate(input_ids, attention_mask=mask, **settings)
    return [row[input_ids.shape[1] :].tolist() for row in output.sequences], output.stats


def eagle3(target):
    return head_for(target, "eagle3", depth=3, feature_layers=[0, -1])


@pytest.mark.versions
@pytest.mark.parametrize("name", MODELS)
def test_chains_write_what_generate_writes(tools, name):
    model = scaled(MODELS[name]())
    target = Target(model)
    assert target.counted
    if name == "roformer" and Version(transformers.__version__) < Version("5.18"):
        with pytest.raises(ValueError, match="cannot be decoded with drafts"):
            target.check_decoding()
        return
    for length in (1, 9, 20):
        prompt = prompt_of(length)
        truth = alone(model, prompt, 30)
        assert len(set(truth)) > 3
        oracle = tools.Oracle(TreeShape.chain(4), [truth], VOCAB, wrong=0.1)
        found, stats = decoded(SpeculativeLM(target, oracle), [prompt], 30)
        assert found == [truth]
        assert stats.acceptance_length > 2.5


@pytest.mark.parametrize("name", ["bart's decoder", "gpt-neo, local layers"])
def test_drafts_end_at_the_last_position(tools, name):
    """Beyond it a table of learned positions has no entry."""
    model = scaled(MODELS[name]())
    prompt = prompt_of(POSITIONS - 12)
    truth = alone(model, prompt, 12)
    lm = SpeculativeLM(Target(model), tools.Oracle(TreeShape.chain(9), [truth], VOCAB, wrong=0.0))
    assert decoded(lm, [prompt], 12)[0] == [truth]
    lm = SpeculativeLM.from_pretrained(
        model, drafter=model, tree="drawn:chain:5", adaptive=False, compile=False
    )
    assert len(decoded(lm, [prompt], 12, do_sample=True)[0][0]) == 12


@pytest.mark.parametrize("name", ["bart's decoder", "gpt-neo, local layers"])
@pytest.mark.parametrize("beyond", [2, 10, 20])
def test_a_text_goes_on_beyond_the_positions_of_a_smaller_model(tools, name, beyond):
    torch.manual_seed(0)
    model = scaled(MODELS["bloom"]())  # without a table of positions
    lm = SpeculativeLM.from_pretrained(
        model, drafter=scaled(MODELS[name]()), tree="chain:5", adaptive=False, compile=False
    )
    prompt = prompt_of(POSITIONS + 20)
    past = Conversation()
    # A text that becomes too long, a second answer to a shorter one, and one that is too long.
    for text in (prompt[: POSITIONS - 6], prompt[: POSITIONS - 20], prompt):
        output = lm.generate(
            text[None], past_key_values=past, max_new_tokens=6 + beyond, do_sample=False
        )
        expected = model.generate(text[None], max_new_tokens=6 + beyond, do_sample=False)
        assert output.sequences[0].tolist() == expected[0].tolist()


@pytest.mark.parametrize("tree", ["drawn:chain:2", "chain:2"])
@pytest.mark.parametrize("name", ["bloom", "bart"])
def test_samples_have_the_targets_distribution(tools, name, tree):
    vocab = 3
    builders = {
        "bloom": lambda: BloomForCausalLM(
            BloomConfig(vocab_size=vocab, hidden_size=16, n_layer=2, n_head=2, **SPECIAL)
        ),
        "bart": lambda: bart(vocab, layers=2),
    }
    model = scaled(builders[name]())
    target = Target(model)
    small = Target(scaled(bart(vocab, layers=1), scale=3))
    prompt_1T = torch.tensor([[1, 2, 1, 0, 2]])

    def run(branch):
        lm = SpeculativeLM(target, make_drafter(target, small, tree))
        found = model.generate(
            prompt_1T,
            attention_mask=torch.ones_like(prompt_1T),
            custom_generate=lm.decoding_method(Call(branch)),
            max_new_tokens=2,
            do_sample=True,
            top_k=0,
            temperature=0.8,
        )
        return tuple(found.sequences[0, 5:].tolist())

    found = tools.every_branch(run)
    for text, weight in tools.exactly(target, prompt_1T[0], 2, 0.8).items():
        # BLOOM's softmax is in float32, whatever the model's dtype: a tree's sums differ there on
        # some processors.
        assert found.get(text, 0.0) == pytest.approx(weight, abs=1e-7 if name == "bloom" else 1e-9)


@pytest.mark.parametrize("adaptive", [False, True])
def test_without_a_named_tree_a_head_drafts_chains(adaptive):
    model = scaled(MODELS["mpt"]())
    target = Target(model)
    lm = SpeculativeLM.from_pretrained(target, eagle3(target), adaptive=adaptive, compile=False)
    prompt = prompt_of(8)
    found, stats = decoded(lm, [prompt], 24)
    assert found == [alone(model, prompt, 24)]
    assert stats.max_depth <= 3
    trees = [drafter.shape for drafter in lm.drafter.nested() if isinstance(drafter, StaticTree)]
    assert trees and all(tree.is_chain for tree in trees)
