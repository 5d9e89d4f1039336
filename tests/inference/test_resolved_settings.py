"""Settings mean what they mean for `model.generate`, in the call, in a config that is given, and in
the model's own."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers import Oracle, build_tokenizer, check_identity, saved_head, written_alone
from messages import refused
from transformers import (
    GenerationConfig,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)

from headstart.inference import SpeculativeLM, TreeShape, custom_generate, generate_from

VOCAB = 258
PROMPT = torch.randint(0, 256, (1, 9), generator=torch.Generator().manual_seed(3))
SHAPE = TreeShape.from_paths([[0], [1], [0, 0], [1, 0], [1, 1], [1, 0, 0], [1, 0, 0, 0]])
PLAIN = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 257}
BEST = {"do_sample": True, "top_k": 1}
"""Sampling that always takes the best token, so that it can be compared."""
SOURCES = pytest.mark.parametrize("source", ["call", "config", "model"])
TOKENIZER = build_tokenizer()


def stop_in(text):
    """Two letters in a row of a text of bytes, past its beginning."""
    letters = [TOKENIZER.decode([token]) for token in text]
    pairs = ["".join(pair) for pair in itertools.pairwise(letters)]
    for place, pair in enumerate(pairs):
        if place > 7 and pair.isascii() and pairs.index(pair) == place:
            return pair
    raise AssertionError("no two letters come first together past the beginning")


FIELDS = {
    "one end": lambda text: {"eos_token_id": text[12]},
    "several ends": lambda text: {"eos_token_id": [255, text[9], text[12]]},
    "stop strings": lambda text: {"stop_strings": [stop_in(text), "never said"]},
    "one stop string": lambda text: {"stop_strings": stop_in(text)},
    "forced end": lambda text: {"forced_eos_token_id": 6},
    "forced first": lambda text: {"forced_bos_token_id": 6},
    "suppressed": lambda text: {"suppress_tokens": text[3:9]},
    "suppressed first": lambda text: {"begin_suppress_tokens": text[:1]},
    "least length": lambda text: {"min_length": 24, "eos_token_id": text[5]},
    "least new tokens": lambda text: {"min_new_tokens": 11, "eos_token_id": text[5]},
    "most tokens": lambda text: {"max_length": 20, "max_new_tokens": None},
    "most new tokens": lambda text: {"max_new_tokens": 7},
    "no time": lambda text: {"max_time": 1e-9},
    "repetition": lambda text: {"repetition_penalty": 1.4},
    "n-grams": lambda text: {"no_repeat_ngram_size": 1},
    "bias": lambda text: {"sequence_bias": {(text[4],): -9.0, (text[8], text[9]): -9.0}},
    "bad words": lambda text: {"bad_words_ids": [[text[4]], [text[9], text[10]]]},
    "end wanted": lambda text: {
        "exponential_decay_length_penalty": (3, 1.9),
        "eos_token_id": text[15],
    },
    "watermark": lambda text: {
        "watermarking_config": WatermarkingConfig(bias=6.0, seeding_scheme="selfhash")
    },
    "renormalised": lambda text: {"renormalize_logits": True, "repetition_penalty": 1.2},
    "invalid values": lambda text: {"remove_invalid_values": True},
    "no cache": lambda text: {"use_cache": False},
    "static cache": lambda text: {"cache_implementation": "static"},
    "best sampled": lambda text: BEST,
    "coldest": lambda text: {"do_sample": True, "temperature": 1e-5, "top_k": 50},
    "least mass": lambda text: {"do_sample": True, "top_p": 1e-6},
    "least probability": lambda text: {"do_sample": True, "min_p": 1.0},
    "top_h": lambda text: {**BEST, "top_h": 0.5},
    "typical and cutoffs": lambda text: {
        **BEST,
        "typical_p": 0.9,
        "epsilon_cutoff": 1e-3,
        "eta_cutoff": 1e-3,
    },
    "scores": lambda text: {
        "output_scores": True,
        "output_logits": True,
        "return_dict_in_generate": True,
    },
}
NO_EFFECT = ("forced first", "invalid values", "no cache", "static cache", "scores")
"""Settings that change nothing here; a first token is forced after a prompt of one."""
REFUSED = {
    "guidance": ({"guidance_scale": 1.5}, "UnbatchedClassifierFreeGuidanceLogitsProcessor"),
    "beams": ({"num_beams": 2}, "beam greedy sampling"),
    "lookup": ({"prompt_lookup_num_tokens": 3}, "assisted generation"),
    "synth id": (
        {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[3, 4, 5], ngram_len=3), **BEST},
        "SynthIDTextWatermarkLogitsProcessor",
    ),
}


@pytest.fixture
def bytes_target(tiny_target):
    """A target whose tokens are bytes."""
    target = tiny_target()
    target.model.generation_config.pad_token_id = 257
    return target


@pytest.fixture
def plain_text(bytes_target):
    """What the model writes without the settings."""
    return written_alone(bytes_target.model, PROMPT[0], **PLAIN)


def given_by(source, target, field):
    """Arguments of `generate` for a setting that stands in one of the three places."""
    whole = {**PLAIN, **field}
    if source == "call":
        return whole
    if source == "config":
        chosen = {name: value for name, value in whole.items() if value is not None}
        return {"generation_config": GenerationConfig(**chosen)}
    for name, value in whole.items():
        setattr(target.model.generation_config, name, value)
    return {}


def texts_in(output):
    return (output if isinstance(output, torch.Tensor) else output.sequences).tolist()


def check_same(lm, ids=PROMPT, **settings):
    """A call writes what `generate` writes, with the same tokenizer; returns these texts."""
    settings = {"attention_mask": torch.ones_like(ids), "tokenizer": TOKENIZER, **settings}
    theirs = texts_in(lm.target.model.generate(ids, **settings))
    assert texts_in(lm.generate(ids, **settings)) == theirs
    return theirs


@SOURCES
@pytest.mark.parametrize("name", FIELDS)
def test_a_setting_is_resolved_as_generate_resolves_it(bytes_target, plain_text, name, source):
    field = FIELDS[name](plain_text)
    given = given_by(source, bytes_target, field)
    if "stop_strings" in field:
        given["tokenizer"] = TOKENIZER
    theirs = bytes_target.model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), **given)
    truth = texts_in(theirs)[0][9:]
    if name not in NO_EFFECT and not field.get("do_sample"):
        assert truth != plain_text, "the setting has nothing to do"
    lm = SpeculativeLM(bytes_target, Oracle(SHAPE, [truth], VOCAB, wrong=0.1))
    ours = lm.generate(PROMPT, **given)
    assert texts_in(ours) == texts_in(theirs)
    if name == "scores":
        assert len(ours.scores) == len(theirs.scores) and len(ours.logits) == len(theirs.logits)


@SOURCES
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_wherever_it_stands(bytes_target, name, source):
    field, words = REFUSED[name]
    given = given_by(source, bytes_target, field)
    with refused(words):
        SpeculativeLM(bytes_target).generate(PROMPT, **given)


def test_the_call_comes_before_a_given_config_and_that_before_the_models(bytes_target, plain_text):
    bytes_target.model.generation_config.stop_strings = [stop_in(plain_text)]
    lm = SpeculativeLM(bytes_target)
    config_alone = GenerationConfig(**PLAIN)
    config_stops = GenerationConfig(**PLAIN, stop_strings=[stop_in(plain_text[4:])])
    config_overruled = GenerationConfig(**PLAIN, stop_strings=["?"])
    lengths = []
    for given in (
        PLAIN,
        {"generation_config": config_alone},
        {"generation_config": config_stops},
        {"generation_config": config_overruled, "stop_strings": [stop_in(plain_text[6:])]},
        {**PLAIN, "stop_strings": None},
    ):
        (text,) = check_same(lm, **given)
        lengths.append(len(text))
    assert lengths[0] == lengths[1] < lengths[-1] == 9 + 30
    assert lm.generate(PROMPT, **PLAIN, stop_strings=[]).sequences.shape[1] == 9 + 30


def test_stop_strings_of_the_model_in_a_batch_a_stream_a_chat_and_a_warmup(
    bytes_target, plain_text
):
    bytes_target.model.generation_config.stop_strings = [stop_in(plain_text)]
    lm = SpeculativeLM.from_pretrained(bytes_target, drafter="prompt-lookup", adaptive=False)
    lm.warmup()
    settings = {**PLAIN, "tokenizer": TOKENIZER}
    rows = [PROMPT[0], PROMPT[0, 4:], PROMPT[0, :5]]
    for slots in (None, 2):
        check_identity(lm, rows, max_batch_size=slots, **settings)
    streamed = list(itertools.chain.from_iterable(lm.stream(PROMPT, **settings)))
    assert streamed == written_alone(bytes_target.model, PROMPT[0], **settings)
    assert len(streamed) < 30
    assert isinstance(lm.chat(TOKENIZER, max_new_tokens=5, do_sample=False).say("hi"), str)
    with refused("stop_strings tokenizer generate(..., tokenizer=...)"):
        lm.generate(PROMPT, **PLAIN)


def test_stop_strings_of_a_model_with_files_need_no_tokenizer(bytes_target, plain_text, tmp_path):
    bytes_target.model.generation_config.stop_strings = [stop_in(plain_text)]
    bytes_target.model.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    lm = SpeculativeLM.from_pretrained(tmp_path, dtype="float64", compile=False)
    theirs = written_alone(lm.target.model, PROMPT[0], tokenizer=TOKENIZER, **PLAIN)
    assert len(theirs) < 30
    assert lm.generate(PROMPT, **PLAIN).sequences[0, 9:].tolist() == theirs


@pytest.mark.parametrize("source", ["call", "model"])
def test_stop_strings_by_the_functions_for_plain_generate(
    bytes_target, plain_text, tmp_path, source
):
    """transformers hides the tokenizer from a function, so there they are a criterion; a head's
    folder is given it."""
    model = bytes_target.model
    strings = [stop_in(plain_text)]
    given = {**PLAIN, "attention_mask": torch.ones_like(PROMPT)}
    theirs = model.generate(PROMPT, stop_strings=strings, tokenizer=TOKENIZER, **given)
    if source == "model":
        model.generation_config.stop_strings = strings
    else:
        given["stop_strings"] = strings
    saved_head(tmp_path, bytes_target, num_heads=2)
    ours = generate_from(str(tmp_path), model, inputs=PROMPT, tokenizer=TOKENIZER, **given)
    assert torch.equal(ours, theirs)
    criteria = StoppingCriteriaList([StopStringCriteria(TOKENIZER, strings)])
    method = custom_generate(drafter="prompt-lookup")
    given |= {"stop_strings": None, "stopping_criteria": criteria}
    assert torch.equal(model.generate(PROMPT, custom_generate=method, **given), theirs)


# of its own config transformers cannot heal by itself
@pytest.mark.parametrize("source", ["call", "config"])
def test_tokens_are_healed_as_by_generate(tiny_target, source):
    tokenizer = build_tokenizer()
    tokenizer.bos_token = "<|im_start|>"
    tokenizer.add_tokens(["song", "sun", "sit", "s?"])
    target = tiny_target(vocab_size=262)
    given = given_by(source, target, {"token_healing": True})
    lm = SpeculativeLM.from_pretrained(target, drafter="prompt-lookup", adaptive=False)
    changed_prompts = 0
    for prompt in ("a text of letters", "some words", "this is"):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        theirs = check_same(lm, ids, tokenizer=tokenizer, **given)
        assert lm.generate(ids, tokenizer=tokenizer, **given).sequences.tolist() == theirs
        changed_prompts += theirs[0][: ids.shape[1]] != ids[0].tolist()
    assert changed_prompts
    with refused("token_healing tokenizer"):
        lm.generate(ids, **given)
    spaces = tokenizer("a  ", return_tensors="pt")["input_ids"]
    with refused("token_healing 1 3 attention_mask"):
        lm.generate(spaces, attention_mask=torch.ones_like(spaces), tokenizer=tokenizer, **given)


@pytest.mark.parametrize("ends", ["unused, early", "early, unused", "early", "none"])
@pytest.mark.parametrize("padding", [None, 0, 7])
def test_rows_that_have_ended_are_padded_as_by_generate(tiny_target, ends, padding):
    target = tiny_target(vocab_size=40)
    ids = torch.randint(1, 40, (3, 6), generator=torch.Generator().manual_seed(2))
    early = written_alone(target.model, ids[0])[3]
    tokens = {
        "unused, early": [39, early],
        "early, unused": [early, 39],
        "early": early,
        "none": None,
    }
    settings = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": tokens[ends]}
    check_same(SpeculativeLM(target), ids, pad_token_id=padding, **settings)


class Confident(StoppingCriteria):
    """Stops when the best tokens' probabilities sum up to a limit; keeps what it was shown."""

    def __init__(self, limit):
        self.limit = limit
        self.texts = []
        self.newest_scores = []

    def __call__(self, input_ids, scores, **_):
        self.texts.append(input_ids.tolist())
        if scores is None:
            return torch.zeros(len(input_ids), dtype=torch.bool)
        assert len(scores) == len(self.texts)
        self.newest_scores.append(scores[-1].clone())
        return sum(each.softmax(-1).amax(-1) for each in scores) >= self.limit


@pytest.mark.parametrize(
    "asked", [("output_scores", "return_dict_in_generate"), ("return_dict_in_generate",), ()]
)
@pytest.mark.parametrize("others", [{}, {"repetition_penalty": 1.3}, BEST])
def test_a_criterion_is_shown_the_scores_so_far(bytes_target, asked, others):
    model = bytes_target.model
    given = {**PLAIN, **others, "attention_mask": torch.ones_like(PROMPT)}
    whole = model.generate(PROMPT, **given, output_scores=True, return_dict_in_generate=True)
    limit = 0.6 * sum(float(each.softmax(-1).max()) for each in whole.scores)
    theirs = Confident(limit)
    ours = Confident(limit)
    given |= dict.fromkeys(asked, True)
    expected = model.generate(PROMPT, stopping_criteria=StoppingCriteriaList([theirs]), **given)
    oracle = Oracle(SHAPE, [whole.sequences[0, 9:].tolist()], VOCAB, wrong=0.1)
    lm = SpeculativeLM(bytes_target, oracle)
    output = lm.generate(PROMPT, stopping_criteria=StoppingCriteriaList([ours]), **given)
    assert texts_in(output) == texts_in(expected) and output.stats.acceptance_length > 1.3
    assert ours.texts == theirs.texts
    assert len(ours.texts) < 30 if len(asked) == 2 else len(ours.texts) == 30
    assert len(ours.newest_scores) == (len(ours.texts) if len(asked) == 2 else 0)
    torch.testing.assert_close(ours.newest_scores, theirs.newest_scores, rtol=1e-5, atol=1e-5)
