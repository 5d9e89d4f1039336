"""Batches whose rows end one after another: few sizes are recorded, and each row writes what it
writes alone."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from helpers import DEVICE, VOCAB, Proposals, continued, head_for
from messages import refused

from headstart.inference import SpeculativeLM, inputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("error:.*launched operation by operation"),
]
BUCKETS = {1, 2, 4, 8, 16, 24, 32}
FIRST, STEP = 4, 2
"""New tokens of the row that ends first, and by how many more each of the others ends."""
SETTINGS = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.9, "top_k": 20},
    "penalty": {"do_sample": True, "repetition_penalty": 1.3, "no_repeat_ngram_size": 4},
}


def new_tokens(ones: int) -> int:
    """New tokens of the row whose prompt has so many ones."""
    return FIRST + (ones - 1) * STEP


def ends_in_turn(text_1T, scores, **_):
    """A stopping criterion: the longer a prompt, the later its row ends."""
    text = text_1T[0].tolist()
    ones = text.index(2)
    assert len(text) - ones - 1 <= new_tokens(ones)  # it is not asked about a row that has ended
    return len(text) - ones - 1 == new_tokens(ones)


def ones_and_a_two(count):
    """Prompts of different lengths, in a shuffled order."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(3)).tolist()
    return [torch.tensor([1] * (number + 1) + [2]) for number in order]


def ending_in_turn(lm, prompts, **settings):
    """The output, and the text of each row up to its end."""
    torch.manual_seed(5)
    settings |= {
        "max_new_tokens": 100,
        "eos_token_id": [],
        "stopping_criteria": [ends_in_turn],
        "max_batch_size": len(prompts),
    }
    texts, output = continued(lm, prompts, **settings)
    lengths = [new_tokens(len(prompt) - 1) for prompt in prompts]
    return output, [text[:length] for text, length in zip(texts, lengths, strict=True)]


@pytest.mark.parametrize(
    ("kind", "tree", "name", "count"),
    [
        (None, "auto", "greedy", 32),
        (None, "auto", "sampled", 32),
        ("eagle3", "chain:2", "greedy", 32),
        ("eagle3", "dynamic:6:3:2", "sampled", 13),
        ("medusa", "chain:2", "penalty", 13),
    ],
)
def test_rows_that_end_in_turn_are_recorded_in_few_sizes(lms, monkeypatch, kind, tree, name, count):
    """At most one recording of the forward for each bucket."""
    here, away = lms(kind, tree=tree)
    engine = away.target.engine
    sizes = []
    lengths = []
    record = engine.runner.record
    forward_tree = engine.forward_tree

    def noted(function, fixed, *rest):
        if function == engine.tree_forward:
            sizes.append(len(fixed[0].lengths_B))
        return record(function, fixed, *rest)

    def watched(tree, longest, cache, layers):
        lengths.append(cache.lengths_B.tolist())
        return forward_tree(tree, longest, cache, layers)

    monkeypatch.setattr(engine.runner, "record", noted)
    monkeypatch.setattr(engine, "forward_tree", watched)
    prompts = ones_and_a_two(count)
    _, expected = ending_in_turn(SpeculativeLM(here.target), prompts, **SETTINGS[name])
    output, texts = ending_in_turn(away, prompts, **SETTINGS[name])
    if DEVICE == "sim" or name == "greedy":
        assert texts == expected
    assert sizes and len(sizes) == len(set(sizes)) and set(sizes) <= {*BUCKETS, count}
    for before, after in itertools.pairwise(lengths):
        if len(before) == len(after):  # an idle row has one token in the cache, and gets no more
            assert all(now == 1 for was, now in zip(before, after, strict=True) if was == 1)
    returned = [1 + sum(record.returned for record in row) for row in output.stats.rows]
    assert returned == [len(text) for text in texts]  # idle rows count nowhere


@pytest.mark.skipif(DEVICE != "sim", reason="a GPU draws other numbers")
@pytest.mark.parametrize(
    ("tree", "acceptance"),
    [
        ("drawn:chain:2", "token"),
        ("drawn:chain:2", "block"),
        ("drawn:branch:2x2", "without_replacement"),
        ("independent:branch:2x2", "with_replacement"),
        ("drawn:branch:2x2", "traversal"),
    ],
)
def test_draws_do_not_depend_on_idle_rows(lms, tree, acceptance):
    """The numbers come from one generator, row by row: as on the CPU, where the batch shrinks at
    once."""
    texts = []
    for lm in lms("eagle3", tree=tree, acceptance=acceptance):
        texts.append(ending_in_turn(lm, ones_and_a_two(7), do_sample=True)[1])
    assert texts[0] == texts[1]


def test_a_head_that_reads_later_what_plain_steps_emitted(lms):
    """Candidates are chosen by the clock, so a head may have read nothing when rows end."""
    here, away = lms("eagle3", tree="auto", adaptive=True)
    _, expected = ending_in_turn(SpeculativeLM(here.target), ones_and_a_two(9))
    for _ in range(2):
        assert ending_in_turn(away, ones_and_a_two(9))[1] == expected


def test_a_head_with_a_window_drafts_what_it_drafts_on_a_cpu(on_cpu, there):
    options = {"sliding_window": 5, "num_layers": 2, "depth": 3}
    head = head_for(on_cpu, "eagle3", 0.2, seed=2, **options)
    prompt = torch.randint(1, VOCAB, (30,), generator=torch.Generator().manual_seed(0))
    drafts = []
    for target in (on_cpu, there):
        own = copy.deepcopy(head).to(target.device)
        lm = SpeculativeLM.from_pretrained(target, own, tree="dynamic:8:3:2", adaptive=False)
        lm.observers.append(Proposals())
        continued(lm, [prompt], max_new_tokens=60, eos_token_id=[])
        drafts.append(lm.observers[0].drafts)
    assert drafts[0] == drafts[1] and len(drafts[0]) > 10


@pytest.mark.parametrize(("tokens", "slots"), [(700, 1024), (1000, 2048)])
def test_a_batch_is_refused_by_what_is_allocated(lms, monkeypatch, tokens, slots):
    """Caches come in powers of two: more than is used, which the check must count."""
    _, lm = lms("eagle3", tree="chain:2")
    prompts = ones_and_a_two(3)
    target = lm.target
    heads_rows = lm.drafter.model_state
    exact = 3 * (tokens + 3)
    logits = 3 * 3 * VOCAB * 4 * target.dtype.itemsize
    used = target.cache_bytes(1, exact) + heads_rows.model.cache_bytes(1, exact) + logits
    allocated = target.cache_bytes(3, slots) + heads_rows.model.cache_bytes(3, 1023) + logits

    def generate(free):
        monkeypatch.setattr(inputs, "free_memory", lambda _: float(free))
        new = tokens - max(map(len, prompts))
        _, output = continued(
            lm, prompts, max_new_tokens=new, stopping_criteria=[lambda text, _: True]
        )
        return output

    for free in (used, allocated - 1):
        with refused(f"3 rows {tokens + 3} GiB"):
            generate(free)
    assert generate(allocated).stats.cache_bytes == target.cache_bytes(3, slots)
    cache = heads_rows.catch_up().cache
    held = sum(states[:, :, cache.nodes :].nbytes for states in (*cache.keys, *cache.values))
    assert held == heads_rows.model.cache_bytes(3, 1023)
