"""What is given to `generate`: token ids and masks that are wrong, models in train mode, calls
inside of calls."""

from __future__ import annotations

import itertools
import threading
import time

import pytest
import torch
from helpers import (
    GREEDY,
    EachRound,
    build_model,
    build_t5,
    check_identity,
    continued,
    head_for,
    other_model,
    pairs,
    warnings_of,
    written_alone,
)
from messages import refused, warned
from transformers import BatchEncoding

from headstart.heads import HEADS
from headstart.inference import (
    Conversation,
    SpeculativeLM,
    Target,
    custom_generate,
    speculative_lm,
)

VOCAB = 20
ROW = torch.randint(1, VOCAB, (1, 9), generator=torch.Generator().manual_seed(3))
OTHER = (ROW + 5) % VOCAB
GIVEN = {"attention_mask": torch.ones_like(ROW), **GREEDY}


def row_with(value, place=4):
    ids = ROW.clone()
    ids[0, place] = value
    return ids


WRONG_IDS = {
    "beyond the vocabulary": (row_with(VOCAB), "input_ids[0, 4] 20 0 19"),
    "far beyond": (row_with(2**40), "input_ids[0, 4] 1099511627776 0 19"),
    "negative": (row_with(-1), "input_ids[0, 4] -1"),
    "of labels": (row_with(-100, 8), "input_ids[0, 8] -100 attention_mask"),
    "in another row": (torch.cat([ROW, row_with(77)]), "input_ids[1, 4] 77"),
}
WRONG_TENSORS = {
    "floats": (ROW.float(), "int64 int32 torch.float32"),
    "truth values": (ROW > 5, "torch.bool"),
    "bytes": (ROW.to(torch.uint8), "torch.uint8"),
    "a list": (ROW.tolist(), "tensor [batch, time] list"),
    "a text": ("hello", "str generate(**tokenizer("),
    "texts": (["hello"], "list tokenize"),
    "nothing": (None, "NoneType"),
    "what a tokenizer returns": (BatchEncoding({"input_ids": ROW}), "BatchEncoding generate(**"),
    "one row without a batch": (ROW[0], "[9] input_ids[None]"),
    "too many dimensions": (ROW[None], "[1, 1, 9]"),
    "an empty prompt": (ROW[:, :0], "[1, 0]"),
    "an empty batch": (ROW[:0], "[0, 9]"),
    "no values": (ROW.to("meta"), "meta"),
}


@pytest.mark.parametrize("name", WRONG_IDS | WRONG_TENSORS)
def test_wrong_token_ids_are_named(lookup, name):
    ids, words = (WRONG_IDS | WRONG_TENSORS)[name]
    with refused(words):
        lookup.generate(ids, **GREEDY)
    if name != "in another row":
        with refused(words):
            list(lookup.stream(ids, **GREEDY))
    if name in WRONG_IDS and name != "far beyond":
        with refused(words):
            lookup.target.model.generate(ids, custom_generate=custom_generate(), **GREEDY)


def test_int32_is_taken_as_by_generate(lookup):
    ours = lookup.generate(ROW.int(), **GREEDY).sequences
    assert ours.dtype == torch.int32
    assert ours[0, 9:].tolist() == written_alone(lookup.target.model, ROW[0])


def mask_without(*zeros):
    mask = torch.ones_like(ROW)
    mask[0, list(zeros)] = 0
    return mask


HOLES = (0, 3, 4, 8)


@pytest.mark.parametrize(
    ("zeros", "dtype"),
    [
        *((zeros, torch.int64) for zeros in ((), (0, 1), (7, 8), (4,), HOLES)),
        *((HOLES, dtype) for dtype in (torch.int32, torch.uint8, torch.bool, torch.float32)),
    ],
)
def test_masks_of_any_type_and_with_holes(lookup, dtype, zeros):
    """What is masked is not read: the text is that of the prompt without it."""
    mask = mask_without(*zeros)
    model = lookup.target.model
    expected = written_alone(model, ROW[mask.bool()])
    for ids in (ROW, ROW.masked_fill(mask == 0, -100)):
        output = lookup.generate(ids, **GREEDY | {"attention_mask": mask.to(dtype)})
        assert torch.equal(output.sequences[:, :9], ids)
        assert output.sequences[0, 9:].tolist() == expected
    if 8 not in zeros:
        assert expected == written_alone(model, ROW[0], attention_mask=mask)


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (mask_without(*range(9)), "prompt 0"),
        (torch.ones(1, 8), "attention_mask [1, 8] input_ids [1, 9]"),
        (torch.ones(9), "attention_mask [9]"),
        (torch.ones(1, 1, 9, 9), "attention_mask [1, 1, 9, 9]"),
        (torch.full((1, 9), -torch.inf), "0 -inf"),
        (mask_without() * 2, "0 2"),
        (torch.full((1, 9), torch.nan), "0 nan"),
        ([[1] * 9], "attention_mask tensor [batch, time] input_ids list"),
    ],
)
def test_wrong_masks_are_named(lookup, mask, words):
    with refused(words):
        lookup.generate(ROW, **GREEDY | {"attention_mask": mask})


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
    expected = written_alone(in_training().eval(), ROW[0])
    model = in_training()
    if checkpointing:
        model.gradient_checkpointing_enable()
    modes = [module.training for module in model.modules()]
    # measures rounds, where drafts may not pay
    lm = SpeculativeLM.from_pretrained(model, compile=compile, **spec)
    assert continued(lm, [ROW[0]])[0] == [expected]
    method = custom_generate(compile=compile, **spec)
    assert written_alone(model, ROW[0], custom_generate=method) == expected
    assert [module.training for module in model.modules()] == modes
    with pytest.raises(ZeroDivisionError):
        lm.generate(ROW, logits_processor=[lambda ids, scores: 1 / 0], **GREEDY)
    assert [module.training for module in model.modules()] == modes
    model(input_ids=ROW, labels=ROW).loss.backward()  # it can be trained on
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("compile", [False, True])
def test_autocast_is_off_while_it_decodes(compile):
    model = in_training().eval()
    expected = written_alone(model, ROW[0])
    options = {"drafter": "prompt-lookup", "adaptive": False, "compile": compile}
    method = custom_generate(compile=compile)
    with torch.autocast("cpu", torch.bfloat16):
        lm = SpeculativeLM.from_pretrained(model, **options)
        with warned("autocast torch.bfloat16 torch.float32"):
            assert continued(lm, [ROW[0]])[0] == [expected]
        with warned("autocast torch.bfloat16"):
            assert written_alone(model, ROW[0], custom_generate=method) == expected
        assert torch.is_autocast_enabled("cpu")
    assert warnings_of(lambda: continued(lm, [ROW[0]])) == []


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
    target = Target(in_training().eval().requires_grad_(False))

    def texts():
        draft = {"drafter": other_model(target) if kind == "model" else kind}
        if kind in HEADS:
            draft = {"head": head_for(target, kind)}
        lm = SpeculativeLM.from_pretrained(target, adaptive=False, compile=compile, **draft)
        draws = torch.Generator().manual_seed(0)
        greedy, _ = continued(lm, [ROW[0]])
        sampled, _ = continued(lm, [ROW[0]], generator=draws, do_sample=True)
        return greedy, sampled

    expected = texts()
    default_dtype(default)
    assert texts() == expected
    assert torch.get_default_dtype() == default


class Calls:
    """A streamer that calls something in the middle of a generation."""

    def __init__(self, call):
        self.call = call
        self.count = 0
        self.returned = []

    def put(self, tokens):
        self.count += 1
        if self.count == 3:
            self.returned.append(self.call())

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
    expected = [written_alone(target.model, OTHER[0])]
    streamer = Calls(lambda: continued(lm, [OTHER[0]])[0])
    check_identity(lm, [ROW[0]], streamer=streamer)
    in_third_round = Calls(lambda: continued(lm, [OTHER[0]])[0])
    lm.observers.append(EachRound(in_third_round.put))
    check_identity(lm, [ROW[0], OTHER[0], ROW[0].flip(0)], max_batch_size=2)
    assert streamer.returned + in_third_round.returned == [expected, expected]
    lm.observers.clear()
    check_identity(lm, [ROW[0]])


def test_what_would_wait_for_itself_is_refused(lookup):
    with refused("stream generation target"):
        lookup.generate(ROW, streamer=Calls(lambda: list(lookup.stream(ROW, **GREEDY))), **GREEDY)
    past = Conversation()
    inside = Calls(lambda: lookup.generate(ROW, past_key_values=past, **GREEDY))
    with refused("past_key_values Conversation generation generate"):
        lookup.generate(ROW, streamer=inside, past_key_values=past, **GREEDY)
    inside = Calls(lambda: lookup.generate(ROW, past_key_values=Conversation(), **GREEDY))
    check_identity(lookup, [ROW[0]], streamer=inside, past_key_values=past)
    check_identity(lookup, [ROW[0]], past_key_values=past)


@pytest.fixture
def seq2seq():
    return build_t5(VOCAB, eos_token_id=None, dropout_rate=0.3)


SHORT = ROW[:, :5]
LONG = ROW.repeat(1, 2)


def test_an_encoder_decoder_inside_another_generation_and_in_train_mode(seq2seq):
    """The outer one attends to its own input, of which a part is padding, after the inner one."""
    padded = GREEDY | {"attention_mask": torch.tensor([[1, 1, 0, 1, 0]])}
    expected = seq2seq.generate(SHORT, **padded)
    expected_inside = seq2seq.generate(LONG, **GREEDY)
    assert not torch.equal(expected, seq2seq.generate(SHORT, **GREEDY))
    seq2seq.train()
    lm = SpeculativeLM.from_pretrained(seq2seq, drafter="prompt-lookup", adaptive=False)
    with refused("input_ids[0, 4] 20 0 19"):
        lm.generate(row_with(VOCAB), **GREEDY)
    method = custom_generate(drafter="prompt-lookup")
    for call in (
        lambda: lm.generate(LONG, **GREEDY).sequences,
        lambda: seq2seq.generate(LONG, custom_generate=method, **GREEDY),
    ):
        streamer = Calls(call)
        assert torch.equal(lm.generate(SHORT, streamer=streamer, **padded).sequences, expected)
        assert torch.equal(streamer.returned[0], expected_inside)
    assert seq2seq.training


def test_threads_do_not_show_each_others_input_to_an_encoder_decoder(seq2seq, monkeypatch):
    """The second one comes when the first has begun, and not read its input yet."""
    prompts = {"first": SHORT, "second": LONG}
    expected = {name: seq2seq.generate(ids, **GREEDY).tolist() for name, ids in prompts.items()}
    method = custom_generate(drafter="prompt-lookup", adaptive=False)
    begun = threading.Event()
    second_waits = threading.Event()
    check_size = speculative_lm.check_size

    def waiting(*arguments):
        if threading.current_thread().name == "first":
            begun.set()
            second_waits.wait(10)
        return check_size(*arguments)

    monkeypatch.setattr(speculative_lm, "check_size", waiting)
    written = {}

    def write(name):
        output = seq2seq.generate(prompts[name], custom_generate=method, **GREEDY)
        written[name] = output.tolist()

    threads = [threading.Thread(target=write, args=[name], name=name) for name in prompts]
    threads[0].start()
    assert begun.wait(60)
    threads[1].start()
    time.sleep(0.5)
    second_waits.set()
    for thread in threads:
        thread.join()
    assert written == expected
