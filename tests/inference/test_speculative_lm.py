"""The loop: greedy identity with `model.generate`, stopping, batches, streaming, refusals."""

from __future__ import annotations

import functools
import gc
import random
import threading
import time

import pytest
import torch
from helpers import GREEDY, EachRound, Oracle, check_identity, continued, head_for, written_alone
from messages import refused
from transformers import MaxLengthCriteria

from headstart.inference import SpeculativeLM, Target, TreeShape
from headstart.inference.cache import kv_cache
from headstart.inference.cache.kv_cache import POOLED
from headstart.inference.trees.stats import PARTS

VOCAB = 20
ROW = torch.tensor([3, 1, 2, 7, 5])


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
def test_a_length_that_is_no_int_means_what_it_means_in_generate(target, length):
    settings = length | {"do_sample": False, "pad_token_id": 0}
    lm = SpeculativeLM.from_pretrained(target, drafter="prompt-lookup", adaptive=False)
    expected = target.model.generate(ROW[None], **settings)
    assert torch.equal(lm.generate(ROW[None], **settings).sequences, expected)
    method = lm.custom_generate()
    assert torch.equal(
        target.model.generate(ROW[None], custom_generate=method, **settings), expected
    )


@pytest.mark.parametrize("name", ["lossy", "compile", "adaptive", "allow_adapter"])
@pytest.mark.parametrize("value", ["false", 1, None])
def test_a_flag_is_true_or_false(target, name, value):
    with refused(name, "True False", repr(value)):
        SpeculativeLM.from_pretrained(target, **{name: value})


def test_nothing_asked_is_nothing_done(target):
    output = SpeculativeLM(target).generate(ROW[None], max_new_tokens=0)
    assert output.sequences.tolist() == [ROW.tolist()]
    assert output.stats.rounds == 0


class Collect:
    """A streamer that keeps everything."""

    def __init__(self):
        self.tokens = []
        self.ended = False

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended = True


def test_a_streamer_gets_the_prompt_and_then_every_returned_token_once(target):
    truth = written_alone(target.model, ROW)
    lm = SpeculativeLM(target, Oracle(TreeShape.chain(4), [truth], VOCAB, wrong=0.0))
    for new_tokens in range(1, 12):  # the last round is cut at any place
        streamer = Collect()
        _, output = continued(lm, [ROW], streamer=streamer, max_new_tokens=new_tokens)
        assert streamer.tokens == output.sequences[0].tolist()
        assert streamer.ended


@pytest.mark.parametrize(
    ("rows", "settings", "words"),
    [
        ([torch.ones(1010, dtype=torch.int64)], {}, "1010 20 1024 positions"),
        ([ROW, ROW], {"streamer": Collect()}, "2"),
        ([ROW], {"max_new_tokens": torch.nan}, "max_new_tokens nan"),
        ([ROW], {"max_new_tokens": False}, "max_new_tokens"),
        ([ROW], {"max_batch_size": 1.5}, "max_batch_size int 1 1.5"),
        ([ROW], {"max_batch_size": 0}, "max_batch_size int 1 0"),
        ([ROW], {"max_batch_size": True}, "max_batch_size int 1 True"),
        ([ROW], {"generator": 3}, "generator torch.Generator None"),
        ([ROW], {"acceptance": 3}, "acceptance '3'"),
        ([ROW], {"tree": 1.5}, "tree"),
        (
            [ROW],
            {"output_attentions": True, "return_dict_in_generate": True},
            "output_attentions",
        ),
    ],
)
def test_bad_input_is_refused_by_name_and_leaves_the_model_usable(target, rows, settings, words):
    lm = SpeculativeLM.from_pretrained(target, head=medusa(target))
    with refused(words):
        continued(lm, rows, **settings)
    check_identity(lm, [ROW])


def test_a_cache_that_does_not_fit_is_refused_with_its_size(target, monkeypatch):
    rows = [ROW] * 4
    head = head_for(target, "eagle3", depth=3, feature_layers=[0])
    lm = SpeculativeLM.from_pretrained(target, head, tree="chain:2", adaptive=False, compile=False)
    slots = len(ROW) + 20 + 3
    heads_bytes = head.cache_bytes(2, slots)
    logits_bytes = 2 * 3 * VOCAB * 4 * 8
    free = target.cache_bytes(2, 256) + heads_bytes + logits_bytes
    monkeypatch.setattr(kv_cache, "free_host_memory", lambda: float(free))
    with refused(f"4 rows {slots} GiB target drafts logits cpu"):
        continued(lm, rows)
    _, output = continued(lm, rows, max_batch_size=2)
    assert output.stats.cache_bytes == target.cache_bytes(2, 256)  # slots come by 256
    kept = lm.drafter.model_state.catch_up().cache
    held = sum(states[:, :, kept.nodes :].nbytes for states in (*kept.keys, *kept.values))
    assert held == heads_bytes


def test_a_cache_serves_the_next_call_of_its_size(target, monkeypatch):
    """Where it was, whatever is left in it, until memory is short."""
    lm = SpeculativeLM.from_pretrained(target, medusa(target), tree="branch:2x2", adaptive=False)
    check_identity(lm, [ROW])
    for _ in range(3):
        [blocks] = target.pool.blocks
        places = [block.data_ptr() for block in blocks]
        with torch.inference_mode():
            for block in blocks:
                block.fill_(torch.nan)
        check_identity(lm, [ROW])
        assert [block.data_ptr() for block in target.pool.blocks[0]] == places
    for rows in (2, 3, 4):
        continued(lm, [ROW] * rows)
    assert len(target.pool.blocks) == POOLED

    def only_without_the_pool():
        return 0.0 if target.pool.blocks else 2.0**40

    monkeypatch.setattr(kv_cache, "free_host_memory", only_without_the_pool)
    check_identity(lm, [ROW])


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
    rows = [torch.arange(length) % 7 + row for row, length in enumerate((3, 9, 5, 7))]
    read = []
    target.model.lm_head.register_forward_hook(lambda *call: read.append(call[-1]))
    for _ in range(2):  # the first looks at the model: it has changed
        read.clear()
        continued(lm, rows, max_new_tokens=1)
    assert sum(logits.shape[:-1].numel() for logits in read) == (4 if known else 16)
    check_identity(lm, rows, max_new_tokens=12)


def test_a_tree_that_the_head_cannot_fill_is_refused(target):
    head = medusa(target, draft_vocab_size=8)
    with refused("9 8"):
        SpeculativeLM.from_pretrained(target, head, tree=[[i] for i in range(9)], adaptive=False)


def test_statistics_split_the_time(target):
    _, output = continued(SpeculativeLM(target), [ROW])
    assert (
        set(output.stats.seconds) == {"prefill", *PARTS} == {"prefill", *output.stats.round_parts}
    )
    assert all(seconds > 0 for seconds in output.stats.seconds.values())


def test_a_call_may_ask_for_another_tree_or_rule(target):
    lm = SpeculativeLM.from_pretrained(target, medusa(target), tree="chain:1", adaptive=False)
    trees = {"chain:3": 3, "dynamic:6:2:3": 2, "root": 0, "drawn:chain:2": 2}
    for tree, depth in [*trees.items(), ([[0], [1]], 1)]:
        assert check_identity(lm, [ROW], tree=tree).stats.max_depth == depth
        sampled = []
        for _ in range(2):
            draws = torch.Generator().manual_seed(1)
            sampled.append(continued(lm, [ROW], tree=tree, do_sample=True, generator=draws)[0])
        assert sampled[0] == sampled[1]
    assert check_identity(lm, [ROW]).stats.max_depth == 1  # and only for the call
    _, output = continued(lm, [ROW], tree="drawn:chain:2", acceptance="token", do_sample=True)
    assert output.stats.max_depth == 2


def test_another_tree_or_rule_that_does_not_fit_is_refused(target):
    lm = SpeculativeLM.from_pretrained(target, medusa(target), tree="chain:1", adaptive=False)
    with refused("block biased"):
        continued(lm, [ROW], acceptance="block")
    with refused("3"):
        continued(lm, [ROW], tree="chain:4")
    with refused("tree drafter"):
        continued(SpeculativeLM(target, lm.drafter), [ROW], tree="chain:2")


@pytest.mark.parametrize("seconds", [3, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("compile", [False, True])
def test_threads_share_a_decoder_and_the_users_own_model(tiny_target, compile, seconds):
    """Two of ours, of two drafters, and stock `generate` of padded prompts on the same model."""
    target = tiny_target(vocab_size=VOCAB, dtype=torch.float32, head_dim=16)
    padded = torch.tensor([[0, 0, 5, 6], [3, 1, 2, 4]])
    settings = GREEDY | {"attention_mask": (padded > 0).long()}
    calls = [functools.partial(target.model.generate, padded, **settings)]
    for tree in ("chain:3", "auto"):
        lm = SpeculativeLM.from_pretrained(target, medusa(target), tree=tree, compile=compile)
        calls.append(functools.partial(lm.generate, padded, **settings))
    expected = target.model.generate(padded, **settings)
    wrong = []
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


def everything_of(model):
    """All of a user's model that a call might leave changed."""
    hooks = {}
    modules = {}
    for name, module in model.named_modules():
        modules[name] = (sorted(vars(module)), module.training, type(module).forward)
        for key, value in vars(module).items():
            if "hooks" in key and isinstance(value, dict):
                hooks[name, key] = len(value)
    weights = {
        name: (id(weight), weight._version, weight.dtype, weight.device, weight.requires_grad)
        for name, weight in model.named_parameters()
    }
    configs = (model.config.to_dict(), model.generation_config.to_dict())
    return configs, model.config._attn_implementation, modules, hooks, weights


REFUSED_CALLS = [
    ({"num_beams": 2}, "beam"),
    ({"max_new_tokens": 10**6}, "1000000 1024"),
    ({"tree": "dynamic:9"}, "7 3"),
    ({"acceptance": "token"}, "token"),
    ({"past_key_values": 3}, "past_key_values int"),
    ({"temperatur": 3}, "'temperatur' 'temperature'"),
]
REFUSED_OPTIONS = [
    ({"tree": "chain:99"}, "3"),
    ({"dtype": "float16"}, "dtype float16"),
    ({"revision": "main"}, "revision main"),
    ({"attn_implementation": "eager"}, "attn_implementation eager"),
]


@pytest.mark.parametrize("compile", [False, True])
def test_the_users_model_is_left_as_it_was(tiny_target, compile):
    """By answers, by refusals and by failures in the midst of a text."""
    model = tiny_target(vocab_size=VOCAB, dtype=torch.float32, head_dim=16).model
    # by which transformers installs hooks of its own for good
    model(ROW[None], output_hidden_states=True)
    before = everything_of(model)
    head = medusa(Target(model))
    lm = SpeculativeLM.from_pretrained(model, head=head, compile=compile)
    continued(lm, [ROW])
    continued(lm, [ROW], do_sample=True, tree="chain:2")
    list(lm.stream(ROW[None], **GREEDY))
    for wrong, words in REFUSED_CALLS:
        with refused(words):
            continued(lm, [ROW], **wrong)
    lm.observers.append(EachRound(lambda out: 1 / 0))
    with pytest.raises(ZeroDivisionError):
        continued(lm, [ROW])
    for options, words in REFUSED_OPTIONS:
        with refused(words):
            SpeculativeLM.from_pretrained(model, head=head, **options)
    assert everything_of(model) == before


def test_a_thousand_calls_keep_no_memory(tiny_target):
    """Of random lengths: no tensors are left, nor anything else that grows."""
    target = tiny_target(vocab_size=VOCAB, layers=1)
    lm = SpeculativeLM.from_pretrained(target, medusa(target), tree="chain:2|branch:2x2")
    chance = random.Random(0)

    def call():
        row = torch.randint(1, VOCAB, (chance.randint(1, 40),))
        sampling = chance.random() < 0.5
        continued(lm, [row], max_new_tokens=chance.randint(1, 6), do_sample=sampling)

    def tensors():
        gc.collect()
        # Not those of torch's compiler, which have no numbers.
        sizes = [
            each.nbytes
            for each in gc.get_objects()
            if type(each) is torch.Tensor and each.device.type == "cpu"
        ]
        return len(sizes), sum(sizes)

    for _ in range(200):  # which fill the caches of constants
        call()
    count, size = tensors()
    for _ in range(800):
        call()
    later, grown = tensors()
    assert later <= count + 100  # one kept by every call would be 800
    assert grown <= 1.2 * size


def test_what_processors_would_forbid_behind_the_end_is_nobodys_matter(target):
    """No token twice: after as many as there are, none is left; drafts reach further than that."""
    tokens = VOCAB - len(ROW)
    settings = {"no_repeat_ngram_size": 1, "eos_token_id": None}
    truth = written_alone(target.model, ROW, max_new_tokens=tokens, **settings)
    lm = SpeculativeLM(target, Oracle(TreeShape.chain(5), [truth], VOCAB, wrong=0.0))
    assert continued(lm, [ROW], max_new_tokens=tokens, **settings)[0] == [truth]
    with refused(f"forbid {tokens} 0"):
        continued(lm, [ROW], max_new_tokens=tokens + 1, **settings)
