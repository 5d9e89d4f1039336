"""Targets that compute tokens by where a forward lies: longrope and dynamic angles, Llama 4's
chunks and steps."""

from __future__ import annotations

import itertools

import pytest
import torch
import transformers as tf
from helpers import Oracle, check_identity, head_for, random_ids, written_alone
from messages import refused
from packaging.version import Version

from headstart.inference import Conversation, SpeculativeLM, Target, TreeShape
from headstart.inference.engines import cpu_decoder
from headstart.inference.rounds import prefill
from headstart.inference.targets.segments import Segments, segments_of

VOCAB = 60
BORDER = 24
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [20.0, 30.0, 8.0, 5.0],
    "original_max_position_embeddings": BORDER,
}
PHI = {**BASE, "rope_parameters": LONGROPE, "original_max_position_embeddings": BORDER}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}
LLAMA4 = {
    **BASE,
    "head_dim": 8,
    "intermediate_size_mlp": 48,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 4,
    "attn_temperature_tuning": True,
    "attn_scale": 2.0,
    "floor_scale": BORDER,
    "attention_chunk_size": 10,
}
PHIMOE = {
    **PHI,
    "num_local_experts": 2,
    "rope_parameters": {**LONGROPE, "short_mscale": 1.1, "long_mscale": 1.3},
}
ALL_CHUNKED = {"layer_types": ["chunked_attention"] * 4, "no_rope_layers": [1] * 4}


def phi3(**rope):
    options = {**PHI, "rope_parameters": LONGROPE | rope, "sliding_window": None}
    return tf.Phi3ForCausalLM(tf.Phi3Config(**options))


def phimoe():
    return tf.PhimoeForCausalLM(tf.PhimoeConfig(**PHIMOE, sliding_window=None))


def llama_with(rope):
    return tf.LlamaForCausalLM(tf.LlamaConfig(**BASE, rope_parameters=rope))


def llama4(**options):
    return tf.Llama4ForCausalLM(tf.Llama4TextConfig(**LLAMA4, **options))


MODELS = {
    "longrope": lambda: llama_with(LONGROPE),
    "longrope, read again at the border": phi3,
    "longrope, with experts": phimoe,
    "dynamic": lambda: llama_with(DYNAMIC),
    "llama 4": llama4,
    "llama 4, all chunked": lambda: llama4(**ALL_CHUNKED),
}
TREE = TreeShape.from_paths([(0,), (1,), (0, 0), (1, 0), (1, 1), (1, 0, 0), (1, 0, 0, 0)])
PENALTIES = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2}
"""Settings by which a random model says more than one word."""


def segmented(name, dtype=torch.float64):
    torch.manual_seed(0)
    model = MODELS[name]().to(dtype).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.data *= 12 if parameter.ndim > 1 else 1  # far tokens matter
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the faster ones know no float64
    return model


def prompt_of_length(length):
    return random_ids(VOCAB, length, seed=length, first=1)


def check_text(lm, prompt, new_tokens):
    return check_identity(lm, [prompt], max_new_tokens=new_tokens, **PENALTIES).stats


def true_drafts(target, prompt, new_tokens):
    """Drafts trees that mostly hold the true text."""
    settings = {"max_new_tokens": new_tokens, "do_sample": False, **PENALTIES}
    truth = written_alone(target.model, prompt, **settings)
    return SpeculativeLM(target, Oracle(TREE, [truth], VOCAB, wrong=0.1))


REREAD = ("longrope, read again at the border", "longrope, with experts")
"""Models whose `generate` drops its cache at the border."""
LENGTHS = {
    "before": (5, BORDER - 6),
    "up to the border": (8, BORDER - 8),
    "one beyond it": (8, BORDER - 7),
    "across": (9, 40),
    "from the border": (BORDER, 20),
    "after it": (BORDER + 1, 20),
    "up to it": (BORDER - 4, 12),
    "far beyond it": (2 * BORDER + 5, 40),
}
"""Tokens of a prompt, and new ones."""


@pytest.mark.versions
@pytest.mark.parametrize("chunk", [7, 1024])
@pytest.mark.parametrize("name", MODELS)
def test_a_text_is_that_of_generate_wherever_it_lies(name, chunk, monkeypatch):
    """Prompts are read whole, or in pieces."""
    monkeypatch.setattr(prefill, "PREFILL_TOKENS", chunk)
    target = Target(segmented(name))
    forgets = name in REREAD and Version(tf.__version__) < Version("5.20")
    plain = []
    for where, (length, new_tokens) in LENGTHS.items():
        prompt = prompt_of_length(length)
        if forgets and length <= BORDER and length + new_tokens > BORDER + 1:
            with refused(f"{BORDER} tokens"):
                check_text(SpeculativeLM(target), prompt, new_tokens)
            continue
        stats = check_text(true_drafts(target, prompt, new_tokens), prompt, new_tokens)
        assert stats.acceptance_length > 1.3, where
        plain += [record.fallback for record in stats.rows[0]]
    assert ("segment_border" in plain) == (target.segments is not None) or forgets


@pytest.mark.parametrize("name", MODELS)
def test_a_conversation_that_crosses_the_border_and_comes_back(name):
    target = Target(segmented(name))
    lm = SpeculativeLM.from_pretrained(
        target, drafter="prompt-lookup", adaptive=False, compile=False
    )
    past = Conversation()
    for length, new_tokens in ((8, 6), (20, 20), (19, 4), (30, 20), (34, 4), (9, 5), (23, 9)):
        prompt = prompt_of_length(60)[:length]
        settings = {"max_new_tokens": new_tokens, "past_key_values": past, **PENALTIES}
        check_identity(lm, [prompt], **settings)
        assert past.get_seq_length() == length + new_tokens - 1


@pytest.mark.parametrize(("name", "compile"), list(zip(MODELS, itertools.cycle([True, False]))))
def test_a_generation_does_not_depend_on_those_before_it(name, compile):
    model = segmented(name)
    lm = SpeculativeLM.from_pretrained(
        model, drafter="prompt-lookup", adaptive=False, compile=compile
    )
    for length in (6, 2 * BORDER, 6):
        check_text(lm, prompt_of_length(length), 8)
        far = prompt_of_length(100)[None]  # of the user's own, beyond all positions
        model.generate(far, attention_mask=torch.ones_like(far), max_new_tokens=40)


def test_the_kernels_read_a_prompt_beyond_the_border_whole(monkeypatch):
    monkeypatch.setattr(cpu_decoder, "PIECE", 8)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "head_dim": 32}
    factors = {"short_factor": [1.0] * 16, "long_factor": [8.0] * 16}
    torch.manual_seed(0)
    config = tf.LlamaConfig(**BASE | sizes, rope_parameters=LONGROPE | factors)
    model = tf.LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data *= 4 if parameter.ndim > 1 else 1
    lm = SpeculativeLM.from_pretrained(model, drafter="prompt-lookup", adaptive=False)
    for length in (8, BORDER + 9):
        check_text(lm, prompt_of_length(length), 30)


def test_factors_for_a_part_of_the_dimensions_are_none_for_a_head():
    """As Phi-4-mini's: a head rotates all dimensions, for which there are more pairs than
    factors."""
    factors = {"short_factor": [1.0, 1.2, 1.4], "long_factor": [2.0, 3.0, 4.0]}
    model = phi3(**factors, partial_rotary_factor=0.75)
    target = Target(model.double().eval().requires_grad_(False))
    head = head_for(target, "eagle3", depth=3, feature_layers=[0, -1])
    lm = SpeculativeLM.from_pretrained(target, head, tree="chain:3", adaptive=False, compile=False)
    check_text(lm, prompt_of_length(9), 30)


def test_segments_of_a_text():
    longrope = Segments(24, None, by_last=True)
    assert [longrope.of(position) for position in (0, 23, 24, 1000)] == [0, 0, 1, 1]
    assert longrope.together([3, 20], 4)
    assert not longrope.together([3, 20], 5)
    assert longrope.together([25, 100], 500)
    assert not longrope.reads_whole(24) and longrope.reads_whole(25)
    steps = Segments(23, 24, by_last=False)
    assert [steps.of(position) for position in (22, 23, 46, 47)] == [0, 1, 1, 2]
    assert not steps.reads_whole(1000)


def test_layers_that_change_at_different_positions_are_refused():
    config = tf.LlamaConfig(**BASE)
    config.rope_parameters = {
        "full_attention": LONGROPE,
        "sliding_attention": {**LONGROPE, "original_max_position_embeddings": 8},
    }
    with refused("longrope [8, 24]"):
        segments_of(config)
