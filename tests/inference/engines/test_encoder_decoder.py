"""Encoder-decoders: a T5 with random weights, with a smaller one or with counts as its draft, one
row and chains."""

from __future__ import annotations

import itertools

import pytest
import torch
import transformers as tf
from helpers import Oracle, build_t5, every_branch, random_ids
from messages import refused

from headstart.inference import SpeculativeLM, TreeShape
from headstart.inference.drafters.by_name import make_drafter
from headstart.inference.engines.encoder_decoder import Seq2SeqTarget
from headstart.inference.speculative_lm import Call
from headstart.inference.trees.sampling import RandomSampler

VOCAB = 12


@pytest.fixture
def seq2seq():
    return Seq2SeqTarget(build_t5(VOCAB, layers=3))


def source_ids(length, vocab=VOCAB):
    return random_ids(vocab, 1, length, seed=length, first=2)


@pytest.mark.versions
def test_a_model_that_drafts_for_itself_reads_what_the_encoder_may(seq2seq):
    lm = SpeculativeLM(seq2seq, make_drafter(seq2seq, seq2seq, "chain:3"))
    for length in (1, 5, 40):
        ids = source_ids(length)
        mask = torch.ones_like(ids)
        mask[0, : length // 3] = 0  # padding that the encoder must not see
        for given in (mask, torch.ones_like(ids)):
            settings = {"max_new_tokens": 30, "do_sample": False, "min_new_tokens": 20}
            expected = seq2seq.model.generate(ids, attention_mask=given, **settings)
            output = lm.generate(ids, attention_mask=given, **settings)
            assert torch.equal(output.sequences, expected)
            # it may want to end where that is forbidden
            assert output.stats.acceptance_length > 2.5


@pytest.mark.parametrize("name", ["smaller", "smaller, drawn", "lookup"])
def test_what_is_drawn_has_the_targets_distribution(name):
    vocab = 3
    target = Seq2SeqTarget(build_t5(vocab, layers=3))
    small = Seq2SeqTarget(build_t5(vocab, 1, layers=1))
    ids = source_ids(4, vocab=vocab)
    settings = {"max_new_tokens": 2, "min_new_tokens": 2, "do_sample": True}
    settings |= {"top_k": 0, "temperature": 0.7}

    def run(branch):
        if name == "lookup":
            drafter = make_drafter(target, "prompt-lookup:2:1")
        else:
            tree = "drawn:chain:2" if name == "smaller, drawn" else "chain:2"
            drafter = make_drafter(target, small, tree)
        method = SpeculativeLM(target, drafter).decoding_method(Call(branch))
        outputs = target.encode(ids, None)
        small.encode(ids, None)
        found = target.model.generate(
            ids, encoder_outputs=outputs, custom_generate=method, **settings
        )
        return tuple(found.sequences[0, 1:].tolist())

    found = every_branch(run)
    for text in itertools.product((0, 2), repeat=2):  # 1 ends a text, which is not allowed yet
        weight = 1.0
        written = [0]
        for token in text:
            decoded = torch.tensor([written])
            logits = target.model(input_ids=ids, decoder_input_ids=decoded).logits[0, -1] / 0.7
            logits[1] = -torch.inf
            weight *= float(logits.softmax(-1)[token])
            written.append(token)
        assert found.get(text, 0.0) == pytest.approx(weight, abs=1e-9)


def test_a_text_that_was_not_shown_is_refused(seq2seq):
    small = Seq2SeqTarget(build_t5(VOCAB, 1, layers=1))
    lm = SpeculativeLM(seq2seq, make_drafter(seq2seq, small, "chain:1|chain:3"))
    method = lm.decoding_method(Call(RandomSampler()))
    with refused("input"):
        seq2seq.model.generate(source_ids(6), custom_generate=method, max_new_tokens=20)


def test_a_type_that_is_not_known_is_refused():
    sizes = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    vocab = {"src_vocab_size": 12, "tgt_vocab_size": 12}
    config = tf.FSMTConfig(**sizes, **heads, **vocab)
    with refused("'fsmt' t5 mt5"):
        SpeculativeLM.from_pretrained(tf.FSMTForConditionalGeneration(config))


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
UMT5 = {
    "vocab_size": 40,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
OTHERS = {
    "bart": lambda: tf.BartForConditionalGeneration(tf.BartConfig(**SIZES)),
    "mbart": lambda: tf.MBartForConditionalGeneration(tf.MBartConfig(**SIZES)),
    "pegasus": lambda: tf.PegasusForConditionalGeneration(tf.PegasusConfig(**SIZES)),
    "marian": lambda: tf.MarianMTModel(tf.MarianConfig(**SIZES)),
    "blenderbot": lambda: tf.BlenderbotForConditionalGeneration(tf.BlenderbotConfig(**SIZES)),
    "umt5": lambda: tf.UMT5ForConditionalGeneration(tf.UMT5Config(**UMT5)),
}


def of_family(name):
    torch.manual_seed(0)
    model = OTHERS[name]().double().eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, 0.15)
    special = {"pad_token_id": 0, "eos_token_id": 1}
    special["decoder_start_token_id"] = model.config.decoder_start_token_id
    model.generation_config = tf.GenerationConfig(**special)
    return model


@pytest.mark.versions
@pytest.mark.parametrize("name", OTHERS)
def test_other_families_write_what_generate_writes(name):
    model = of_family(name)
    target = Seq2SeqTarget(model)
    for length in (3, 17):
        ids = source_ids(length, vocab=40)
        settings = {"max_new_tokens": 30, "min_new_tokens": 30, "do_sample": False}
        settings["no_repeat_ngram_size"] = 1
        expected = model.generate(ids, **settings)
        truth = expected[0, 1:].tolist()
        assert len(set(truth)) > 3
        lm = SpeculativeLM(target, Oracle(TreeShape.chain(3), [truth], 40, wrong=0.1))
        output = lm.generate(ids, **settings)
        assert torch.equal(output.sequences, expected)
        assert output.stats.acceptance_length > 2
        lm = SpeculativeLM.from_pretrained(model, drafter="prompt-lookup", adaptive=False)
        assert torch.equal(lm.generate(ids, **settings).sequences, expected)


def test_drafts_of_a_model_end_at_the_last_position():
    """Beyond it its table of learned positions has no entry."""
    model = of_family("bart")
    new = SIZES["max_position_embeddings"] - 1  # the decoder's first token has a position, too
    settings = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
    lm = SpeculativeLM.from_pretrained(model, drafter=model, tree="chain:5", adaptive=False)
    ids = source_ids(3, vocab=40)
    assert torch.equal(lm.generate(ids, **settings).sequences, model.generate(ids, **settings))
