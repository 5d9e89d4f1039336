"""Settings mean what they mean for `model.generate`, in the call, in a config that is given, and in
the model's own."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers import check_identity, written_alone
from transformers import (
    GenerationConfig,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)

from headstart.heads import CheckpointMetadata, build_head
from headstart.heads.checkpoints.save_load import save_head
from headstart.inference import SpeculativeLM, TreeShape, custom_generate, generate_from

VOCAB = 258
PROMPT = torch.randint(0, 256, (1, 9), generator=torch.Generator().manual_seed(3))
SHAPE = TreeShape.from_paths([[0], [1], [0, 0], [1, 0], [1, 1], [1, 0, 0], [1, 0, 0, 0]])
PLAIN = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 257}
BEST = {"do_sample": True, "top_k": 1}
"""Sampling that always takes the best token, so that it can be compared."""
SOURCES = pytest.mark.parametrize("source", ["call", "config", "model"])

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
    "guidance": ({"guidance_scale": 1.5}, "ClassifierFreeGuidance"),
    "beams": ({"num_beams": 2}, "beam search is not supported"),
    "lookup": ({"prompt_lookup_num_tokens": 3}, "assisted generation(;| is not supported)"),
    "synth id": (
        {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[3, 4, 5], ngram_len=3), **BEST},
        "SynthIDTextWatermarkLogitsProcessor is not supported",
    ),
}


def stop_in(text):
    """Two letters in a row of a text of bytes, past its beginning."""
    letters = [LETTERS[token] for token in text]
    pairs = ["".join(pair) for pair in itertools.pairwise(letters)]
    return next(
        pair
        for place, pair in enumerate(pairs)
        if place > 7 and pair.isascii() and pairs.index(pair) == place
    )


LETTERS: dict[int, str] = {}


@pytest.fixture
def target(tiny_target, tokenizer):
    target = tiny_target()
    target.model.generation_config.pad_token_id = 257
    LETTERS.update({token: tokenizer.decode([token]) for token in range(256)})
    return target


@pytest.fixture
def plain_text(target):
    """What the model writes without the settings."""
    return target.model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), **PLAIN)[
        0, 9:
    ].tolist()


def given_by(source, target, field):
    """Arguments of `generate` for a setting that stands in one of the three places."""
    whole = {**PLAIN, **field}
    if source == "call":
        return whole
    if source == "config":
        return {
            "generation_config": GenerationConfig(
                **{name: value for name, value in whole.items() if value is not None}
            )
        }
    for name, value in whole.items():
        setattr(target.model.generation_config, name, value)
    return {}


def texts(output):
    return (output if isinstance(output, torch.Tensor) else output.sequences).tolist()


@SOURCES
@pytest.mark.parametrize("name", FIELDS)
def test_a_setting_is_resolved_as_generate_resolves_it(
    target, tools, tokenizer, plain_text, name, source
):
    field = FIELDS[name](plain_text)
    more = {"tokenizer": tokenizer} if "stop_strings" in field else {}
    given = given_by(source, target, field)
    mask = torch.ones_like(PROMPT)
    theirs = target.model.generate(PROMPT, attention_mask=mask, **given, **more)
    truth = texts(theirs)[0][9:]
    if name not in NO_EFFECT and not field.get("do_sample"):
        assert truth != plain_text, "the setting has nothing to do"
    lm = SpeculativeLM(target, tools.Oracle(SHAPE, [truth], VOCAB, wrong=0.1))
    ours = lm.generate(PROMPT, attention_mask=mask, **given, **more)
    assert texts(ours) == texts(theirs)
    if name == "scores":
        assert len(ours.scores) == len(theirs.scores) and len(ours.logits) == len(theirs.logits)


@SOURCES
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_wherever_it_stands(target, name, source):
    field, message = REFUSED[name]
    given = given_by(source, target, field)
    with pytest.raises(ValueError, match=message):
        SpeculativeLM(target).generate(PROMPT, attention_mask=torch.ones_like(PROMPT), **given)


def test_the_call_comes_before_a_given_config_and_that_before_the_models(
    target, tokenizer, plain_text
):
    stops = {
        "model": stop_in(plain_text),
        "config": stop_in(plain_text[4:]),
        "call": stop_in(plain_text[6:]),
    }
    target.model.generation_config.stop_strings = [stops["model"]]
    lm, mask = SpeculativeLM(target), torch.ones_like(PROMPT)
    lengths = []
    for given in (
        PLAIN,
        {"generation_config": GenerationConfig(**PLAIN)},
        {"generation_config": GenerationConfig(**PLAIN, stop_strings=[stops["config"]])},
        {
            "generation_config": GenerationConfig(**PLAIN, stop_strings=["?"]),
            "stop_strings": [stops["call"]],
        },
        {**PLAIN, "stop_strings": None},
    ):
        theirs = target.model.generate(PROMPT, attention_mask=mask, tokenizer=tokenizer, **given)
        assert torch.equal(
            lm.generate(PROMPT, attention_mask=mask, tokenizer=tokenizer, **given).sequences, theirs
        )
        lengths.append(theirs.shape[1])
    assert lengths[0] == lengths[1] < lengths[-1] == 9 + 30
    assert (
        lm.generate(PROMPT, attention_mask=mask, **PLAIN, stop_strings=[]).sequences.shape[1]
        == 9 + 30
    )


def test_stop_strings_of_the_model_in_a_batch_a_stream_a_chat_and_a_warmup(
    target, tokenizer, plain_text
):
    stop = stop_in(plain_text)
    target.model.generation_config.stop_strings = [stop]
    lm = SpeculativeLM.from_pretrained(target, drafter="prompt-lookup", adaptive=False).warmup()
    settings = {**PLAIN, "tokenizer": tokenizer}
    for slots in (None, 2):
        rows = [PROMPT[0], PROMPT[0, 4:], PROMPT[0, :5]]
        check_identity(lm, rows, max_batch_size=slots, **settings)
    rounds = lm.stream(PROMPT, attention_mask=torch.ones_like(PROMPT), **settings)
    streamed = list(itertools.chain.from_iterable(rounds))
    assert streamed == written_alone(target.model, PROMPT[0], **settings) and len(streamed) < 30
    assert isinstance(lm.chat(tokenizer, max_new_tokens=5, do_sample=False).say("hi"), str)
    with pytest.raises(
        ValueError,
        match=r"stop_strings=.* needs the tokenizer; give generate\(\.\.\., tokenizer=\.\.\.\)",
    ):
        lm.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), **PLAIN)


def test_stop_strings_of_a_model_with_files_need_no_tokenizer(
    target, tokenizer, plain_text, tmp_path
):
    target.model.generation_config.stop_strings = [stop_in(plain_text)]
    target.model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    lm, mask = (
        SpeculativeLM.from_pretrained(tmp_path, dtype="float64", compile=False),
        torch.ones_like(PROMPT),
    )
    theirs = lm.target.model.generate(PROMPT, attention_mask=mask, tokenizer=tokenizer, **PLAIN)
    assert theirs.shape[1] < 39 and torch.equal(
        lm.generate(PROMPT, attention_mask=mask, **PLAIN).sequences, theirs
    )


@pytest.mark.parametrize("source", ["call", "model"])
def test_stop_strings_by_the_functions_for_plain_generate(
    target, tokenizer, plain_text, tmp_path, source
):
    """transformers hides the tokenizer from a function, so there they are a criterion; a head's
    folder is given it."""
    strings, mask = [stop_in(plain_text)], torch.ones_like(PROMPT)
    theirs = target.model.generate(
        PROMPT, attention_mask=mask, stop_strings=strings, tokenizer=tokenizer, **PLAIN
    )
    given = {**PLAIN, "attention_mask": mask}
    if source == "model":
        target.model.generation_config.stop_strings = strings
    else:
        given["stop_strings"] = strings
    save_head(
        build_head("medusa", {"num_heads": 2}, target.info).double(), tmp_path, CheckpointMetadata()
    )
    ours = generate_from(str(tmp_path), target.model, inputs=PROMPT, tokenizer=tokenizer, **given)
    assert torch.equal(ours, theirs)
    criteria = StoppingCriteriaList([StopStringCriteria(tokenizer, strings)])
    method = custom_generate(drafter="prompt-lookup")
    given |= {"stop_strings": None, "stopping_criteria": criteria}
    assert torch.equal(target.model.generate(PROMPT, custom_generate=method, **given), theirs)


# of its own config transformers cannot heal by itself
@pytest.mark.parametrize("source", ["call", "config"])
def test_tokens_are_healed_as_by_generate(tiny_target, tools, source):
    target, tokenizer = tiny_target(vocab_size=262), tools.build_tokenizer()
    tokenizer.bos_token, changed = "<|im_start|>", 0
    tokenizer.add_tokens(["song", "sun", "sit", "s?"])
    given = given_by(source, target, {"token_healing": True})
    lm = SpeculativeLM.from_pretrained(target, drafter="prompt-lookup", adaptive=False)
    for prompt in ("a text of letters", "some words", "this is"):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        mask = torch.ones_like(ids)
        theirs = target.model.generate(ids, attention_mask=mask, tokenizer=tokenizer, **given)
        assert torch.equal(
            lm.generate(ids, attention_mask=mask, tokenizer=tokenizer, **given).sequences, theirs
        )
        assert torch.equal(lm.generate(ids, tokenizer=tokenizer, **given).sequences, theirs)
        changed += not torch.equal(theirs[:, : ids.shape[1]], ids)
    assert changed
    with pytest.raises(ValueError, match="token_healing=True needs the tokenizer"):
        lm.generate(ids, attention_mask=mask, **given)
    spaces = tokenizer("a  ", return_tensors="pt")["input_ids"]
    with pytest.raises(
        ValueError, match="token_healing made prompts of 1 tokens out of 3, which attention_mask"
    ):
        lm.generate(spaces, attention_mask=torch.ones_like(spaces), tokenizer=tokenizer, **given)


@pytest.mark.parametrize("ends", [[39, 18], [18, 39], 18, None])
@pytest.mark.parametrize("padding", [None, 0, 7])
def test_rows_that_have_ended_are_padded_as_by_generate(tiny_target, ends, padding):
    target = tiny_target(vocab_size=40)
    ids = torch.randint(1, 40, (3, 6), generator=torch.Generator().manual_seed(2))
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 20, "do_sample": False}
    plain = target.model.generate(ids, pad_token_id=0, **given)[:, 6:].tolist()
    early = plain[0][3]
    ends = (
        [39 if end == 39 else early for end in ends] if isinstance(ends, list) else ends and early
    )
    given |= {"eos_token_id": ends, "pad_token_id": padding}
    theirs = target.model.generate(ids, **given)
    assert torch.equal(SpeculativeLM(target).generate(ids, **given).sequences, theirs)


class Confident(StoppingCriteria):
    """Stops when the best tokens' probabilities sum up to a limit; keeps what it was shown."""

    def __init__(self, limit):
        self.limit, self.shown = limit, []

    def __call__(self, input_ids, scores, **_):
        self.shown.append(
            (input_ids.tolist(), None if scores is None else [each.clone() for each in scores])
        )
        if scores is None:
            return torch.zeros(len(input_ids), dtype=torch.bool)
        return sum(each.softmax(-1).amax(-1) for each in scores) >= self.limit


@pytest.mark.parametrize(
    "asked", [("output_scores", "return_dict_in_generate"), ("return_dict_in_generate",), ()]
)
@pytest.mark.parametrize("others", [{}, {"repetition_penalty": 1.3}, BEST])
def test_a_criterion_is_shown_the_scores_so_far(target, tools, asked, others):
    mask = torch.ones_like(PROMPT)
    given = {**PLAIN, **others, "attention_mask": mask, **dict.fromkeys(asked, True)}
    keep = {"output_scores": True, "return_dict_in_generate": True}
    whole = target.model.generate(PROMPT, **{**given, **keep})
    limit = 0.6 * sum(float(each.softmax(-1).max()) for each in whole.scores)
    theirs, ours = Confident(limit), Confident(limit)
    expected = target.model.generate(
        PROMPT, stopping_criteria=StoppingCriteriaList([theirs]), **given
    )
    lm = SpeculativeLM(
        target, tools.Oracle(SHAPE, [whole.sequences[0, 9:].tolist()], VOCAB, wrong=0.1)
    )
    output = lm.generate(PROMPT, stopping_criteria=StoppingCriteriaList([ours]), **given)
    assert texts(output) == texts(expected) and output.stats.acceptance_length > 1.3
    assert [text for text, _ in ours.shown] == [text for text, _ in theirs.shown]
    assert len(ours.shown) == 30 if len(asked) < 2 else len(ours.shown) < 30
    for (_, our_scores), (_, their_scores) in zip(ours.shown, theirs.shown):
        assert (our_scores is None) == (their_scores is None) == (len(asked) < 2)
        if our_scores is not None:
            assert len(our_scores) == len(their_scores)
            torch.testing.assert_close(our_scores[-1], their_scores[-1], rtol=1e-5, atol=1e-5)
