"""What is given to `generate`: token ids and masks that are wrong, models in train mode, calls
inside of calls."""

from __future__ import annotations

import itertools
import threading
import time
import warnings

import pytest
import torch
from helpers import EachRound, build_model, build_t5, check_identity, head_for, other_model, pairs
from transformers import BatchEncoding

from headstart.heads import HEADS
from headstart.inference import (
    Conversation,
    SpeculativeLM,
    Target,
    custom_generate,
    speculative_lm,
)

VOCAB = 40
ROW = torch.randint(1, VOCAB, (1, 9), generator=torch.Generator().manual_seed(3))
PLAIN = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}


@pytest.fixture
def lm(tiny_target):
    target = tiny_target(vocab_size=VOCAB, layers=3)
    return SpeculativeLM.from_pretrained(target, drafter="prompt-lookup", adaptive=False)


def stock(lm, ids, mask=None, **settings):
    mask = torch.ones_like(ids) if mask is None else mask
    return lm.target.model.generate(ids, attention_mask=mask, **{**PLAIN, **settings})


def changed(value, place=(0, 4)):
    ids = ROW.clone()
    ids[place] = value
    return ids


WRONG = {
    "beyond the vocabulary": (
        lambda: changed(VOCAB),
        r"input_ids\[0, 4\] is 40; .* has the tokens 0 to 39",
    ),
    "far beyond": (lambda: changed(2**40), r"input_ids\[0, 4\] is 1099511627776; .* 0 to 39"),
    "negative": (lambda: changed(-1), r"input_ids\[0, 4\] is -1; "),
    "of labels": (
        lambda: changed(-100, (0, 8)),
        r"input_ids\[0, 8\] is -100; .*attention_mask 0 there",
    ),
    "in another row": (lambda: torch.cat([ROW, changed(77)]), r"input_ids\[1, 4\] is 77; "),
    "floats": (lambda: ROW.float(), r"int64 or int32, .* not of torch.float32"),
    "truth values": (lambda: ROW > 5, "not of torch.bool"),
    "bytes": (lambda: ROW.to(torch.uint8), "not of torch.uint8"),
    "a list": (lambda: ROW.tolist(), r"tensor \[batch, time\] .* not a list"),
    "a text": (lambda: "hello", r"not a str; tokenize a text first: generate\(\*\*tokenizer\("),
    "texts": (lambda: ["hello"], r"not a list; tokenize a text first"),
    "nothing": (lambda: None, "not a NoneType"),
    "what a tokenizer returns": (
        lambda: BatchEncoding({"input_ids": ROW}),
        r"BatchEncoding; unpack it: generate\(\*\*",
    ),
    "one row without a batch": (
        lambda: ROW[0],
        r"not one of shape \[9\]; for one prompt give input_ids\[None\]",
    ),
    "too many dimensions": (lambda: ROW[None], r"not one of shape \[1, 1, 9\]"),
    "an empty prompt": (lambda: ROW[:, :0], r"at least one token, not one of shape \[1, 0\]"),
    "an empty batch": (lambda: ROW[:0], r"at least one token, not one of shape \[0, 9\]"),
    "no values": (lambda: ROW.to("meta"), "not on the device meta"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_token_ids_are_named(lm, name):
    made, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        lm.generate(made(), **PLAIN)
    if name != "in another row":
        with pytest.raises(ValueError, match=message):
            list(lm.stream(made(), **PLAIN))
    if name in ("beyond the vocabulary", "negative", "of labels", "in another row"):
        with pytest.raises(ValueError, match=message):
            lm.target.model.generate(made(), custom_generate=custom_generate(), **PLAIN)


def test_int32_is_taken_as_by_generate(lm):
    ours = lm.generate(ROW.int(), attention_mask=torch.ones_like(ROW), **PLAIN).sequences
    assert ours.dtype == torch.int32 and torch.equal(ours.long(), stock(lm, ROW))


def masked(*zeros, dtype=torch.int64):
    mask = torch.ones_like(ROW)
    mask[0, list(zeros)] = 0
    return mask.to(dtype)


HOLES = (0, 3, 4, 8)


@pytest.mark.parametrize(
    ("zeros", "dtype"),
    [
        *((zeros, torch.int64) for zeros in ((), (0, 1), (7, 8), (4,), HOLES)),
        *((HOLES, dtype) for dtype in (torch.int32, torch.uint8, torch.bool, torch.float32)),
    ],
)
def test_masks_of_any_type_and_with_holes(lm, dtype, zeros):
    """What is masked is not read: the text is that of the prompt without it."""
    mask = masked(*zeros, dtype=dtype)
    written = lm.generate(ROW, attention_mask=mask, **PLAIN).sequences
    assert torch.equal(written[:, :9], ROW)
    assert torch.equal(written[:, 9:], stock(lm, ROW[:, mask[0].bool()])[:, 9 - len(zeros) :])
    if 8 not in zeros:
        assert torch.equal(written, stock(lm, ROW, mask.long()))


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (lambda: masked(*range(9)), "prompt 0 of the batch is all padding"),
        (lambda: torch.ones(1, 8), r"attention_mask has shape \[1, 8\], input_ids \[1, 9\]"),
        (lambda: torch.ones(9), r"attention_mask has shape \[9\]"),
        (lambda: torch.ones(1, 1, 9, 9), r"attention_mask has shape \[1, 1, 9, 9\]"),
        (
            lambda: torch.zeros(1, 9).masked_fill(masked(0) == 0, -torch.inf),
            "0 for padding; it holds -inf",
        ),
        (lambda: masked() * 2, "0 for padding; it holds 2"),
        (lambda: torch.full((1, 9), torch.nan), "it holds nan"),
        (
            lambda: [[1] * 9],
            r"attention_mask must be a tensor \[batch, time\] like input_ids, .* not a list",
        ),
    ],
)
def test_wrong_masks_are_named(lm, mask, message):
    with pytest.raises(ValueError, match=message):
        lm.generate(ROW, attention_mask=mask(), **PLAIN)


def test_ids_under_a_mask_are_not_read(lm):
    ids, mask = changed(-100, (0, 0)), masked(0)
    assert torch.equal(
        lm.generate(ids, attention_mask=mask, **PLAIN).sequences[:, 9:],
        stock(lm, ROW[:, 1:])[:, 8:],
    )


def in_training(dropout=0.3):
    """A model with dropout, in train mode but for one part, whose weights want gradients."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "head_dim": 32}
    model = build_model(VOCAB, 0, 3, torch.float32, attention_dropout=dropout, **sizes).train()
    model.model.layers[1].eval()
    return model


@pytest.mark.parametrize(
    ("checkpointing", "compile", "spec"),
    pairs([False, True], [False, True], [{}, {"drafter": "prompt-lookup"}]),
)
def test_a_model_in_train_mode_decodes_as_in_eval_mode_and_stays_in_train_mode(
    checkpointing, compile, spec
):
    model = in_training().eval()
    expected = model.generate(ROW, attention_mask=torch.ones_like(ROW), **PLAIN)
    model = in_training()
    if checkpointing:
        model.gradient_checkpointing_enable()
    modes = [module.training for module in model.modules()]
    # measures rounds, where drafts may not pay
    lm = SpeculativeLM.from_pretrained(model, compile=compile, **spec)
    written = [
        lm.generate(ROW, attention_mask=torch.ones_like(ROW), **PLAIN).sequences,
        model.generate(ROW, custom_generate=custom_generate(compile=compile, **spec), **PLAIN),
    ]
    assert all(torch.equal(each, expected) for each in written)
    assert [module.training for module in model.modules()] == modes
    with pytest.raises(ZeroDivisionError):
        lm.generate(ROW, logits_processor=[lambda ids, scores: 1 / 0], **PLAIN)
    assert [module.training for module in model.modules()] == modes
    model(input_ids=ROW, labels=ROW).loss.backward()  # it can be trained on
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("compile", [False, True])
def test_autocast_is_off_while_it_decodes(compile):
    model = in_training().eval()
    expected = model.generate(ROW, attention_mask=torch.ones_like(ROW), **PLAIN)
    given = {"attention_mask": torch.ones_like(ROW), **PLAIN}
    method = custom_generate(compile=compile)
    with torch.autocast("cpu", torch.bfloat16):
        lm = SpeculativeLM.from_pretrained(
            model, drafter="prompt-lookup", adaptive=False, compile=compile
        )
        with pytest.warns(
            UserWarning, match="autocast to torch.bfloat16 is off .* own torch.float32"
        ):
            inside = lm.generate(ROW, **given).sequences
        with pytest.warns(UserWarning, match="autocast to torch.bfloat16 is off"):
            plain = model.generate(ROW, custom_generate=method, **given)
        assert torch.is_autocast_enabled("cpu")
    assert torch.equal(inside, expected) and torch.equal(plain, expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(
            lm.generate(ROW, attention_mask=torch.ones_like(ROW), **PLAIN).sequences, expected
        )


@pytest.fixture
def default_dtype():
    """Sets torch's default dtype until the test ends."""
    yield torch.set_default_dtype
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("kind", "compile"),
    list(zip([*HEADS, "prompt-lookup", "model"], itertools.cycle([False, True]))),
)
def test_torchs_default_dtype_changes_no_token(default_dtype, kind, compile):
    """That no tensor is made without a dtype, tests/test_rooms.py reads in the source."""
    default = torch.bfloat16 if compile else torch.float64
    given = {"attention_mask": torch.ones_like(ROW), **PLAIN}
    sampled = given | {"do_sample": True}
    target = Target(in_training().eval().requires_grad_(False))

    def texts():
        draft = {"drafter": other_model(target) if kind == "model" else kind}
        if kind in HEADS:
            draft["drafter"] = None
            draft["head"] = head_for(target, kind)
        lm = SpeculativeLM.from_pretrained(target, adaptive=False, compile=compile, **draft)
        draws = torch.Generator().manual_seed(0)
        return [
            lm.generate(ROW, **given).sequences.tolist(),
            lm.generate(ROW, generator=draws, **sampled).sequences.tolist(),
        ]

    expected = texts()
    default_dtype(default)
    assert texts() == expected
    assert torch.get_default_dtype() == default


class Calls:
    """A streamer that calls something in the middle of a generation."""

    def __init__(self, call):
        self.call, self.count, self.found = call, 0, []

    def put(self, tokens):
        self.count += 1
        if self.count == 3:
            self.found.append(self.call())

    def end(self):
        pass


DRAFTERS = {
    "chain": {"head": "eagle3", "tree": "chain:3"},
    "dynamic": {"head": "eagle3", "tree": "dynamic:8:3:3"},
    "drawn": {"head": "eagle3", "tree": "drawn:chain:3"},
    "adaptive": {"head": "eagle3", "adaptive": True},
    "lookup": {"drafter": "prompt-lookup"},
    "model": {"drafter": "model"},
    "head and lookup": {"head": "eagle3", "tree": "chain:2", "drafter": "prompt-lookup"},
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_generate_may_be_called_from_inside_a_generation(tiny_target, name):
    target = tiny_target(vocab_size=VOCAB, layers=3)
    spec = {"adaptive": False, **DRAFTERS[name]}
    if "head" in spec:
        spec["head"] = head_for(target, "eagle3", depth=4)
    if spec.get("drafter") == "model":
        spec["drafter"] = other_model(target)
    lm = SpeculativeLM.from_pretrained(target, **spec)
    other = (ROW + 5) % VOCAB
    given, expected = {"attention_mask": torch.ones_like(ROW), **PLAIN}, stock(lm, other)
    streamer = Calls(lambda: lm.generate(other, **given).sequences)
    check_identity(lm, [ROW[0]], streamer=streamer)
    inner = Calls(lambda: lm.generate(other, **given).sequences)
    lm.observers.append(EachRound(lambda sequences: inner.put(None)))
    check_identity(lm, [ROW[0], other[0], ROW[0].flip(0)], max_batch_size=2)
    for found in (*streamer.found, *inner.found):
        assert torch.equal(found, expected)
    lm.observers.clear()
    check_identity(lm, [ROW[0]])


def test_what_would_wait_for_itself_is_refused(lm):
    given = {"attention_mask": torch.ones_like(ROW), **PLAIN}
    with pytest.raises(
        ValueError, match="stream was called inside a generation with the same target"
    ):
        lm.generate(ROW, streamer=Calls(lambda: list(lm.stream(ROW, **given))), **given)
    past = Conversation()
    inside = Calls(lambda: lm.generate(ROW, past_key_values=past, **given))
    with pytest.raises(
        ValueError,
        match="past_key_values is the Conversation of the generation that calls generate",
    ):
        lm.generate(ROW, streamer=inside, past_key_values=past, **given)
    inside = Calls(lambda: lm.generate(ROW, past_key_values=Conversation(), **given).sequences)
    assert torch.equal(
        lm.generate(ROW, streamer=inside, past_key_values=past, **given).sequences, stock(lm, ROW)
    )
    assert torch.equal(lm.generate(ROW, past_key_values=past, **given).sequences, stock(lm, ROW))


def t5():
    return build_t5(VOCAB, eos_token_id=None, dropout_rate=0.3)


def test_an_encoder_decoder_inside_another_generation_and_in_train_mode():
    """The outer one attends to its own input, of which a part is padding, after the inner one."""
    model, short, long = t5(), ROW[:, :5], ROW.repeat(1, 2)
    mask = torch.tensor([[1, 1, 0, 1, 0]])
    one = model.generate(short, attention_mask=mask, **PLAIN)
    two = model.generate(long, attention_mask=torch.ones_like(long), **PLAIN)
    assert not torch.equal(
        one, model.generate(short, attention_mask=torch.ones_like(short), **PLAIN)
    )
    model.train()
    lm = SpeculativeLM.from_pretrained(model, drafter="prompt-lookup", adaptive=False)
    with pytest.raises(ValueError, match=r"input_ids\[0, 4\] is 40; .* 0 to 39"):
        lm.generate(changed(VOCAB), **PLAIN)
    streamer = Calls(
        lambda: lm.generate(long, attention_mask=torch.ones_like(long), **PLAIN).sequences
    )
    assert torch.equal(
        lm.generate(short, attention_mask=mask, streamer=streamer, **PLAIN).sequences, one
    )
    assert torch.equal(streamer.found[0], two)
    inner = Calls(
        lambda: model.generate(
            long, custom_generate=custom_generate(drafter="prompt-lookup"), **PLAIN
        )
    )
    assert torch.equal(
        lm.generate(short, attention_mask=mask, streamer=inner, **PLAIN).sequences, one
    )
    assert torch.equal(inner.found[0], two)
    assert model.training


def test_threads_do_not_show_each_others_input_to_an_encoder_decoder(monkeypatch):
    """The second one comes when the first has begun, and not read its input yet."""
    model, short, long = t5(), ROW[:, :5], ROW.repeat(1, 2)
    expected = [
        model.generate(ids, attention_mask=torch.ones_like(ids), **PLAIN) for ids in (short, long)
    ]
    method, written = custom_generate(drafter="prompt-lookup", adaptive=False), {}
    begun, second_waits, check = threading.Event(), threading.Event(), speculative_lm.check_size

    def waiting(*arguments):
        if threading.current_thread().name == "first":
            begun.set()
            second_waits.wait(10)
        return check(*arguments)

    monkeypatch.setattr(speculative_lm, "check_size", waiting)

    def write(name, ids):
        written[name] = model.generate(
            ids, attention_mask=torch.ones_like(ids), custom_generate=method, **PLAIN
        )

    threads = [
        threading.Thread(target=write, args=(name, ids), name=name)
        for name, ids in (("first", short), ("second", long))
    ]
    threads[0].start()
    assert begun.wait(60)
    threads[1].start()
    time.sleep(0.5)
    second_waits.set()
    for thread in threads:
        thread.join()
    assert torch.equal(written["first"], expected[0]) and torch.equal(
        written["second"], expected[1]
    )
