"""Encoder-decoders: a T5 with random weights, with a smaller one or with counts as its draft, one
row and chains."""

from __future__ import annotations

import itertools

import pytest
import torch
import transformers as tf
from helpers import build_t5
from transformers import (
    FSMTConfig,
    FSMTForConditionalGeneration,
)

from headstart.inference import SpeculativeLM, TreeShape
from headstart.inference.drafters.by_name import make_drafter
from headstart.inference.engines.encoder_decoder import Seq2SeqTarget
from headstart.inference.speculative_lm import Call
from headstart.inference.trees.sampling import RandomSampler

VOCAB = 12


@pytest.fixture
def target():
    return Seq2SeqTarget(build_t5(VOCAB, layers=3))


def source(length, seed=0, vocab=VOCAB):
    return torch.randint(2, vocab, (1, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.versions
def test_a_model_that_drafts_for_itself_reads_what_the_encoder_may(target):
    lm = SpeculativeLM(target, make_drafter(target, target, "chain:3"))
    for length in (1, 5, 40):
        ids = source(length, seed=length)
        mask = torch.ones_like(ids)
        mask[0, : length // 3] = 0  # padding that the encoder must not see
        for given in (mask, torch.ones_like(ids)):
            settings = {"max_new_tokens": 30, "do_sample": False, "min_new_tokens": 20}
            expected = target.model.generate(ids, attention_mask=given, **settings)
            output = lm.generate(ids, attention_mask=given, **settings)
            assert torch.equal(output.sequences, expected)
            # it may want to end where that is forbidden
            assert output.stats.acceptance_length > 2.5


@pytest.mark.parametrize("name", ["smaller", "smaller, drawn", "lookup"])
def test_what_is_drawn_has_the_targets_distribution(tools, name):
    vocab = 3
    target = Seq2SeqTarget(build_t5(vocab, layers=3))
    small = Seq2SeqTarget(build_t5(vocab, 1, layers=1))
    ids = source(4, vocab=vocab)

    def run(branch):
        tree = "drawn:chain:2" if name == "smaller, drawn" else "chain:2"
        drafter = (
            make_drafter(target, "prompt-lookup:2:1")
            if name == "lookup"
            else make_drafter(target, small, tree)
        )
        lm = SpeculativeLM(target, drafter)
        outputs = target.encode(ids, None)
        small.encode(ids, None)
        settings = {
            "max_new_tokens": 2,
            "do_sample": True,
            "top_k": 0,
            "min_new_tokens": 2,
            "temperature": 0.7,
        }
        found = target.model.generate(
            ids,
            encoder_outputs=outputs,
            custom_generate=lm.decoding_method(Call(branch)),
            **settings,
        )
        return tuple(found.sequences[0, 1:].tolist())

    found = tools.every_branch(run)
    for text in itertools.product((0, 2), repeat=2):  # 1 ends a text, which is not allowed yet
        weight, written = 1.0, [0]
        for token in text:
            logits = (
                target.model(input_ids=ids, decoder_input_ids=torch.tensor([written])).logits[0, -1]
                / 0.7
            )
            logits[1] = -torch.inf
            weight *= float(logits.softmax(-1)[token])
            written.append(token)
        assert found.get(text, 0.0) == pytest.approx(weight, abs=1e-9)


def test_a_text_that_was_not_shown_is_refused(target):
    small = Seq2SeqTarget(build_t5(VOCAB, 1, layers=1))
    lm = SpeculativeLM(target, make_drafter(target, small, "chain:1|chain:3"))
    with pytest.raises(ValueError, match="was not given its input"):
        target.model.generate(
            source(6), custom_generate=lm.decoding_method(Call(RandomSampler())), max_new_tokens=20
        )


def test_what_an_encoder_decoder_cannot_is_refused(target, tiny_target):
    decoder_only = tiny_target(vocab_size=VOCAB)
    with pytest.raises(ValueError, match="one of them is an encoder-decoder"):
        make_drafter(decoder_only, target)
    sizes = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1}
    sizes |= {
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "src_vocab_size": 12,
        "tgt_vocab_size": 12,
    }
    fsmt = FSMTForConditionalGeneration(FSMTConfig(**sizes))
    with pytest.raises(ValueError, match="of type 'fsmt'; choose from t5, mt5"):
        SpeculativeLM.from_pretrained(fsmt)


SIZES = {
    "vocab_size": 40,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 48,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "forced_eos_token_id": None,
    "decoder_start_token_id": 2,
}
OTHERS = {
    "bart": lambda: tf.BartForConditionalGeneration(tf.BartConfig(**SIZES)),
    "mbart": lambda: tf.MBartForConditionalGeneration(tf.MBartConfig(**SIZES)),
    "pegasus": lambda: tf.PegasusForConditionalGeneration(tf.PegasusConfig(**SIZES)),
    "marian": lambda: tf.MarianMTModel(tf.MarianConfig(**SIZES)),
    "blenderbot": lambda: tf.BlenderbotForConditionalGeneration(tf.BlenderbotConfig(**SIZES)),
    "umt5": lambda: tf.UMT5ForConditionalGeneration(
        tf.UMT5Config(
            vocab_size=40,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
        )
    ),
}


def other(name):
    torch.manual_seed(0)
    model = OTHERS[name]().double().eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, 0.15)
    start = model.config.decoder_start_token_id
    model.generation_config = tf.GenerationConfig(
        decoder_start_token_id=start, pad_token_id=0, eos_token_id=1
    )
    return model


@pytest.mark.versions
@pytest.mark.parametrize("name", OTHERS)
def test_other_families_write_what_generate_writes(tools, name):
    model = other(name)
    target = Seq2SeqTarget(model)
    for length in (3, 17):
        ids = source(length, vocab=40)
        settings = {
            "max_new_tokens": 30,
            "min_new_tokens": 30,
            "do_sample": False,
            "no_repeat_ngram_size": 1,
        }
        expected = model.generate(ids, **settings)
        truth = expected[0, 1:].tolist()
        assert len(set(truth)) > 3
        lm = SpeculativeLM(target, tools.Oracle(TreeShape.chain(3), [truth], 40, wrong=0.1))
        output = lm.generate(ids, **settings)
        assert torch.equal(output.sequences, expected)
        assert output.stats.acceptance_length > 2
        lm = SpeculativeLM.from_pretrained(model, drafter="prompt-lookup", adaptive=False)
        assert torch.equal(lm.generate(ids, **settings).sequences, expected)


def test_drafts_of_a_model_end_at_the_last_position():
    """Beyond it its table of learned positions has no entry."""
    model = other("bart")
    new = SIZES["max_position_embeddings"] - 1  # the decoder's first token has a position, too
    settings = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
    lm = SpeculativeLM.from_pretrained(model, drafter=model, tree="chain:5", adaptive=False)
    ids = source(3, vocab=40)
    assert torch.equal(lm.generate(ids, **settings).sequences, model.generate(ids, **settings))
