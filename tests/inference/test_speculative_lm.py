"""The loop: greedy identity with `model.generate`, stopping, batches, streaming, refusals."""

from __future__ import annotations

import functools
import gc
import random
import threading
import time

import pytest
import torch
from helpers import EachRound, check_identity, head_for, padded_batch
from transformers import (
    MaxLengthCriteria,
)

from headstart.inference import SpeculativeLM, Stats, Target, TreeShape
from headstart.inference.cache import kv_cache
from headstart.inference.cache.kv_cache import POOLED
from headstart.inference.trees.stats import PARTS

VOCAB = 31


def prompt(length, seed=0, vocab=VOCAB):
    return torch.randint(1, vocab, (1, length), generator=torch.Generator().manual_seed(seed))


def stock(target, input_ids, **settings):
    settings = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0, **settings}
    return target.model.generate(input_ids, attention_mask=torch.ones_like(input_ids), **settings)


def ours(lm, input_ids, **settings):
    settings = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0, **settings}
    return lm.generate(input_ids, attention_mask=torch.ones_like(input_ids), **settings)


def oracle(tools, target, shape, input_ids, wrong=0.3, seed=0, length=48):
    truth = stock(target, input_ids, max_new_tokens=length)[:, input_ids.shape[1] :].tolist()
    return SpeculativeLM(target, tools.Oracle(shape, truth, VOCAB, wrong, seed))


def medusa(target, **options):
    return head_for(target, "medusa", 0.3, **{"num_heads": 3} | options)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "length",
    [
        {"max_new_tokens": 1.5},
        {"max_new_tokens": torch.tensor(2)},
        {"max_length": 8.5},
        {"max_new_tokens": 8, "stopping_criteria": [MaxLengthCriteria(7.2)]},
    ],
)
def test_a_length_that_is_no_int_means_what_it_means_in_generate(tiny_target, length):
    target, input_ids = tiny_target(vocab_size=VOCAB), prompt(5)
    settings = length | {"do_sample": False, "attention_mask": torch.ones_like(input_ids)}
    settings |= {"pad_token_id": 0}
    expected = target.model.generate(input_ids, **settings)
    lm = SpeculativeLM.from_pretrained(target, drafter="prompt-lookup", adaptive=False)
    assert torch.equal(lm.generate(input_ids, **settings).sequences, expected)
    plain = target.model.generate(input_ids, custom_generate=lm.custom_generate(), **settings)
    assert torch.equal(plain, expected)


@pytest.mark.parametrize("name", ["lossy", "compile", "adaptive", "allow_adapter"])
@pytest.mark.parametrize("value", ["false", 1, None])
def test_a_flag_is_true_or_false(tiny_target, name, value):
    with pytest.raises(ValueError, match=f"{name} must be True or False, not {value!r}"):
        SpeculativeLM.from_pretrained(tiny_target(vocab_size=VOCAB), **{name: value})


def test_nothing_asked_is_nothing_done(tiny_target):
    input_ids = prompt(5)
    output = SpeculativeLM(tiny_target(vocab_size=VOCAB)).generate(input_ids, max_new_tokens=0)
    assert torch.equal(output.sequences, input_ids)
    assert output.stats.rounds == 0


class Collect:
    """A streamer that keeps everything."""

    def __init__(self):
        self.tokens, self.ended = [], False

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended = True


def test_a_streamer_gets_the_prompt_and_then_every_returned_token_once(tiny_target, tools):
    target, input_ids = tiny_target(vocab_size=VOCAB), prompt(5)
    for new_tokens in range(1, 12):  # the last round is cut at any place
        streamer = Collect()
        lm = oracle(tools, target, TreeShape.chain(4), input_ids, wrong=0.0)
        output = ours(lm, input_ids, streamer=streamer, max_new_tokens=new_tokens)
        assert streamer.tokens == output.sequences[0].tolist()
        assert streamer.ended


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"input_ids": prompt(1000)}, "1000 tokens and 40 new ones do not fit the 1024 positions"),
        (
            {"input_ids": prompt(3).repeat(2, 1), "streamer": Collect()},
            "takes one row, not a batch of 2",
        ),
        ({"input_ids": prompt(3), "max_new_tokens": torch.nan}, "max_new_tokens together, is nan"),
        ({"input_ids": prompt(3), "max_new_tokens": False}, "max_new_tokens. must be greater than"),
        ({"input_ids": prompt(3), "max_batch_size": 1.5}, "an int of at least 1, not 1.5"),
        ({"input_ids": prompt(3), "max_batch_size": 0}, "an int of at least 1, not 0"),
        ({"input_ids": prompt(3), "max_batch_size": True}, "an int of at least 1, not True"),
        ({"input_ids": prompt(3), "generator": 3}, "generator must be a torch.Generator or None"),
        ({"input_ids": prompt(3), "acceptance": 3}, "unknown acceptance rule '3'"),
        ({"input_ids": prompt(3), "tree": 1.5}, "tree"),
        (
            {"input_ids": prompt(3), "output_attentions": True, "return_dict_in_generate": True},
            "output_attentions is not supported; the output",
        ),
    ],
)
def test_bad_input_is_refused_by_name_and_leaves_the_model_usable(tiny_target, call, message):
    target = tiny_target(vocab_size=VOCAB)
    lm = SpeculativeLM.from_pretrained(target, head=medusa(target))
    with pytest.raises(ValueError, match=message):
        lm.generate(**{"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0, **call})
    assert torch.equal(ours(lm, prompt(4)).sequences, stock(target, prompt(4)))


def test_a_cache_that_does_not_fit_is_refused_with_its_size(tiny_target, monkeypatch):
    target, rows = tiny_target(), torch.ones(4, 6, dtype=torch.int64)
    head = head_for(target, "eagle3", depth=3, feature_layers=[0])
    lm = SpeculativeLM.from_pretrained(target, head, tree="chain:2", adaptive=False, compile=False)
    free = (
        target.cache_bytes(2, 256)
        + head.cache_bytes(2, 6 + 20 + 3)
        + 2 * 3 * target.info.vocab_size * 4 * 8
    )
    monkeypatch.setattr(kv_cache, "_free_host_memory", lambda: float(free))
    message = (
        r"4 rows of 29 tokens takes .* GiB \(the target's cache .*, the drafts' .*, logits .*\),"
        r" and cpu has"
    )
    with pytest.raises(ValueError, match=message):
        lm.generate(rows, attention_mask=torch.ones_like(rows), max_new_tokens=20)
    output = lm.generate(
        rows, attention_mask=torch.ones_like(rows), max_new_tokens=20, max_batch_size=2
    )
    assert output.stats.cache_bytes == target.cache_bytes(2, 256)  # slots come by 256
    kept = lm.drafter.model_state.catch_up().cache
    held = sum(states[:, :, kept.nodes :].nbytes for states in (*kept.keys, *kept.values))
    assert held == head.cache_bytes(len(kept.keys[0]), 6 + 20 + 3)


def test_a_cache_serves_the_next_call_of_its_size(tiny_target, monkeypatch):
    """Where it was, whatever is left in it, until memory is short."""
    target = tiny_target(vocab_size=VOCAB)
    lm = SpeculativeLM.from_pretrained(target, medusa(target), tree="branch:2x2", adaptive=False)
    expected = ours(lm, prompt(6)).sequences
    for _ in range(3):
        [blocks] = target.pool.blocks
        places = [block.data_ptr() for block in blocks]
        with torch.inference_mode():
            for block in blocks:
                block.fill_(torch.nan)
        assert torch.equal(ours(lm, prompt(6)).sequences, expected)
        assert [block.data_ptr() for block in target.pool.blocks[0]] == places
    for rows in (2, 3, 4):
        ours(lm, prompt(6).repeat(rows, 1))
    assert len(target.pool.blocks) == POOLED
    monkeypatch.setattr(
        kv_cache, "_free_host_memory", lambda: 0.0 if target.pool.blocks else 2.0**40
    )
    assert torch.equal(ours(lm, prompt(6)).sequences, expected)


@pytest.mark.parametrize("layers", [[-1], [0], [1, -1]])
@pytest.mark.parametrize("known", [True, False])
def test_a_batch_of_prompts_asks_for_one_row_of_logits_each(tiny_target, known, layers):
    """But where the model does something to its logits that we do not know."""
    target = tiny_target(vocab_size=VOCAB, dtype=torch.float32, layers=3)
    if not known:

        def bent(model, inputs, output):
            output.logits = output.logits - output.logits.tanh()

        target.model.register_forward_hook(bent)
    kind = "medusa" if layers == [-1] else "eagle3"
    options = {} if layers == [-1] else {"depth": 2, "feature_layers": layers}
    head = head_for(target, kind, **options)
    lm = SpeculativeLM.from_pretrained(target, head, compile=False, adaptive=False)
    assert target.computes_logits == known
    assert target.engine.own_attention and target.first_block_index == 1
    rows = [prompt(length, row)[0] for row, length in enumerate((3, 9, 5, 7))]
    read = []
    target.model.lm_head.register_forward_hook(lambda *call: read.append(call[-1]))
    for _ in range(2):  # the first looks at the model: it has changed
        read.clear()
        padded, mask = padded_batch(rows)
        lm.generate(padded, attention_mask=mask, max_new_tokens=1, do_sample=False)
    assert sum(found.shape[:-1].numel() for found in read) == (4 if known else 16)
    check_identity(lm, rows, max_new_tokens=12)


def test_a_tree_that_the_head_cannot_fill_is_refused(tiny_target):
    target = tiny_target(vocab_size=VOCAB)
    with pytest.raises(
        ValueError, match="9 tokens after one node, but the head's draft vocabulary has 8"
    ):
        SpeculativeLM.from_pretrained(
            target,
            head=medusa(target, draft_vocab_size=8),
            tree=[[i] for i in range(9)],
            adaptive=False,
        )


def test_statistics_split_the_time(tiny_target):
    stats = ours(SpeculativeLM(tiny_target(vocab_size=VOCAB)), prompt(3)).stats
    assert isinstance(stats, Stats)
    assert set(stats.seconds) == {"prefill", *PARTS} == {"prefill", *stats.round_parts}
    assert all(seconds > 0 for seconds in stats.seconds.values())


def test_a_call_may_ask_for_another_tree_or_rule(tiny_target):
    target, input_ids = tiny_target(vocab_size=VOCAB), prompt(6)
    lm = SpeculativeLM.from_pretrained(target, medusa(target), tree="chain:1", adaptive=False)
    assert ours(lm, input_ids).stats.max_depth == 1
    for tree, depth in (
        ("chain:3", 3),
        ("dynamic:6:2:3", 2),
        ([[0], [1]], 1),
        ("root", 0),
        ("drawn:chain:2", 2),
    ):
        found = ours(lm, input_ids, tree=tree)
        assert found.stats.max_depth == depth and torch.equal(
            found.sequences, stock(target, input_ids)
        )
        one, other = (
            ours(
                lm, input_ids, tree=tree, do_sample=True, generator=torch.Generator().manual_seed(1)
            ).sequences
            for _ in range(2)
        )
        assert torch.equal(one, other)
    assert ours(lm, input_ids).stats.max_depth == 1  # and only for the call
    assert (
        ours(lm, input_ids, tree="drawn:chain:2", acceptance="token", do_sample=True).stats.rounds
        > 0
    )
    with pytest.raises(ValueError, match="would be biased"):
        ours(lm, input_ids, acceptance="block")
    with pytest.raises(ValueError, match="at most 3"):
        ours(lm, input_ids, tree="chain:4")
    with pytest.raises(ValueError, match="with a drafter object"):
        ours(SpeculativeLM(target, lm.drafter), input_ids, tree="chain:2")


@pytest.mark.parametrize("seconds", [3, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("compile", [False, True])
def test_threads_share_a_decoder_and_the_users_own_model(tiny_target, compile, seconds):
    """Two of ours, of two drafters, and stock `generate` of padded prompts on the same model."""
    target = tiny_target(vocab_size=VOCAB, dtype=torch.float32, head_dim=16)
    lms = [
        SpeculativeLM.from_pretrained(target, medusa(target), tree=tree, compile=compile)
        for tree in ("chain:3", "auto")
    ]
    padded = torch.tensor([[0, 0, 5, 6], [3, 1, 2, 4]])
    settings = {
        "attention_mask": (padded > 0).long(),
        "max_new_tokens": 24,
        "do_sample": False,
        "pad_token_id": 0,
    }
    calls = [functools.partial(lm.generate, padded, **settings) for lm in lms]
    calls.append(functools.partial(target.model.generate, padded, **settings))
    expected, wrong = target.model.generate(padded, **settings), []
    until = time.monotonic() + seconds

    def ask(call):
        while time.monotonic() < until and not wrong:
            try:
                found = call()
                if not torch.equal(getattr(found, "sequences", found), expected):
                    wrong.append(found)
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=ask, args=[call]) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and target.config._attn_implementation == "sdpa"


def seen(model):
    """All of a user's model that a call might leave changed."""
    modules = dict(model.named_modules())
    hooks = {
        name: [
            len(each)
            for key, each in vars(module).items()
            if "hooks" in key and isinstance(each, dict)
        ]
        for name, module in modules.items()
    }
    weights = {
        name: (id(w), w._version, w.dtype, w.device, w.requires_grad)
        for name, w in model.named_parameters()
    }
    attributes = {name: sorted(vars(module)) for name, module in modules.items()}
    training = {name: module.training for name, module in modules.items()}
    forwards = {name: type(module).forward for name, module in modules.items()}
    configs = (
        model.config.to_dict(),
        model.generation_config.to_dict(),
        model.config._attn_implementation,
    )
    return configs, hooks, weights, attributes, training, forwards


@pytest.mark.parametrize("compile", [False, True])
def test_the_users_model_is_left_as_it_was(tiny_target, compile):
    """By answers, by refusals and by failures in the midst of a text."""
    model = tiny_target(vocab_size=VOCAB, dtype=torch.float32, head_dim=16).model
    row = torch.tensor([[3, 1, 2]])
    # by which transformers installs hooks of its own for good
    model(row, output_hidden_states=True)
    before = seen(model)
    target = Target(model)
    lm = SpeculativeLM.from_pretrained(model, head=medusa(target), compile=compile)
    settings = {"max_new_tokens": 9, "do_sample": False}
    lm.generate(row, **settings)
    lm.generate(row, **settings | {"do_sample": True}, tree="chain:2")
    list(lm.stream(row, **settings))
    lm.observers.append(EachRound(lambda out: 1 / 0))
    for wrong, error in (
        ({}, ZeroDivisionError),
        ({"num_beams": 2}, ValueError),
        ({"max_new_tokens": 10**6}, ValueError),
        ({"tree": "dynamic:9"}, ValueError),
        ({"acceptance": "token"}, ValueError),
        ({"past_key_values": 3}, ValueError),
        ({"temperatur": 3}, ValueError),
    ):
        with pytest.raises(error):
            lm.generate(row, **settings | wrong)
    loaded = "was given with a target that is already loaded"
    for options, message in (
        ({"tree": "chain:99"}, "at most 3"),
        ({"dtype": "float16"}, "already loaded"),
        ({"revision": "main"}, "revision"),
        ({"attn_implementation": "eager"}, f"attn_implementation eager {loaded}"),
    ):
        with pytest.raises(ValueError, match=message):
            SpeculativeLM.from_pretrained(model, head=medusa(target), **options)
    assert seen(model) == before


def test_a_thousand_calls_keep_no_memory(tiny_target):
    """Of random lengths: no tensors are left, nor anything else that grows."""
    target = tiny_target(vocab_size=VOCAB, layers=1)
    lm, chance = (
        SpeculativeLM.from_pretrained(target, head=medusa(target), tree="chain:2|branch:2x2"),
        random.Random(0),
    )

    def call():
        row = torch.randint(1, VOCAB, (1, chance.randint(1, 40)))
        lm.generate(
            row,
            max_new_tokens=chance.randint(1, 6),
            do_sample=chance.random() < 0.5,
            pad_token_id=0,
        )

    def tensors():
        gc.collect()
        # Not those of torch's compiler, which have no numbers.
        found = [
            each
            for each in gc.get_objects()
            if type(each) is torch.Tensor and each.device.type == "cpu"
        ]
        return len(found), sum(each.nbytes for each in found)

    for _ in range(200):  # which fill the caches of constants
        call()
    count, size = tensors()
    for _ in range(800):
        call()
    later, grown = tensors()
    assert later <= count + 100  # one kept by every call would be 800
    assert grown <= 1.2 * size


def test_what_processors_would_forbid_behind_the_end_is_nobodys_matter(tiny_target, tools):
    """No token twice: after as many as there are, none is left; drafts reach further than that."""
    target, tokens = tiny_target(vocab_size=VOCAB), VOCAB - 3
    settings = {
        "max_new_tokens": tokens,
        "do_sample": False,
        "no_repeat_ngram_size": 1,
        "eos_token_id": None,
    }
    row = torch.tensor([[3, 1, 2]])
    truth = target.model.generate(row, attention_mask=torch.ones_like(row), **settings)[
        0, 3:
    ].tolist()
    lm = SpeculativeLM(target, tools.Oracle(TreeShape.chain(5), [truth], VOCAB, wrong=0.0))
    assert lm.generate(row, **settings).sequences[0, 3:].tolist() == truth
    with pytest.raises(ValueError, match=f"forbid every token at new token {tokens} of row 0"):
        lm.generate(row, **settings | {"max_new_tokens": tokens + 1})
