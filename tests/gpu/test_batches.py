"""Batches whose rows end one after another: few sizes are recorded, and each row writes what it
writes alone."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from helpers import DEVICE, VOCAB, head_for
from messages import refused

from headstart.inference import RoundObserver, SpeculativeLM, inputs
from headstart.inference.engines.cuda_graph import GraphRunner

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


def prompts_of(count):
    """Prompts of some ones and a two, in a shuffled order, padded on the left."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(3)).tolist()
    rows = [torch.tensor([1] * (number + 1) + [2]) for number in order]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side="left")


def written(lm, prompts, slots=None, seed=5, **settings):
    """The output, and the text that follows each row's prompt."""
    torch.manual_seed(seed)
    settings = {"pad_token_id": 0, "eos_token_id": [], **settings}
    count = len(prompts) if slots is None else slots
    output = lm.generate(
        prompts,
        attention_mask=(prompts != 0).long(),
        max_new_tokens=100,
        stopping_criteria=[ends_in_turn],
        max_batch_size=count,
        **settings,
    )
    texts = []
    for prompt, row in zip(
        prompts.tolist(), output.sequences[:, prompts.shape[1] :].tolist(), strict=True
    ):
        texts.append(row[: new_tokens(prompt.count(1))])
    return output, texts


@pytest.fixture
def lms(there, on_cpu):
    """Builds a decoder on the CPU and one there, whose rounds are recorded."""

    def build(kind=None, **options):
        head = None if kind is None else head_for(on_cpu, kind)
        away = None if head is None else copy.deepcopy(head).to(there.device)
        options = {"adaptive": False, **options}
        here = SpeculativeLM.from_pretrained(on_cpu, head, compile=False, **options)
        return here, SpeculativeLM.from_pretrained(there, away, **options)

    there.compile(False)
    yield build
    there.compile(False)


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
    runner, sizes = away.target.engine.runner, []
    assert isinstance(runner, GraphRunner)
    record = runner._record

    def noted(function, fixed, *rest):
        if function.__name__ == "_tree_forward":
            sizes.append(len(fixed[0].lengths_B))
        return record(function, fixed, *rest)

    monkeypatch.setattr(runner, "_record", noted)
    forward_tree, lengths = away.target.engine.forward_tree, []

    def watched(tree, longest, cache, layers):
        lengths.append(cache.lengths_B.tolist())
        return forward_tree(tree, longest, cache, layers)

    monkeypatch.setattr(away.target.engine, "forward_tree", watched)
    prompts = prompts_of(count)
    _, expected = written(SpeculativeLM(here.target), prompts, **SETTINGS[name])
    output, found = written(away, prompts.to(away.target.device), **SETTINGS[name])
    if DEVICE == "sim" or name == "greedy":
        assert found == expected
    assert len(sizes) == len(set(sizes)) and set(sizes) <= {*BUCKETS, count}
    for before, after in itertools.pairwise(lengths):
        if len(before) == len(after):  # an idle row has one token in the cache, and gets no more
            assert all(now == 1 for was, now in zip(before, after, strict=True) if was == 1)
    returned = [1 + sum(record.returned for record in row) for row in output.stats.rows]
    assert returned == [len(row) for row in found]  # idle rows count nowhere


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
    here, away = lms("eagle3", tree=tree, acceptance=acceptance)
    prompts = prompts_of(7)
    _, expected = written(here, prompts, do_sample=True)
    _, found = written(away, prompts.to(away.target.device), do_sample=True)
    assert found == expected


def test_a_head_that_reads_later_what_plain_steps_emitted(lms, there):
    """Candidates are chosen by the clock, so a head may have read nothing when rows end."""
    here, away = lms("eagle3", tree="auto", adaptive=True)
    prompts = prompts_of(9)
    _, expected = written(SpeculativeLM(here.target), prompts, do_sample=False)
    for _ in range(2):
        _, found = written(away, prompts.to(away.target.device), do_sample=False)
        assert found == expected


class Drafts(RoundObserver):
    """Keeps the tokens of every round's tree."""

    def __init__(self):
        self.seen = []

    def round(self, finished):
        self.seen.append(finished.proposed.tokens_BN.tolist())


def test_a_head_with_a_window_drafts_what_it_drafts_on_a_cpu(on_cpu, there):
    options = {"sliding_window": 5, "num_layers": 2, "depth": 3}
    head = head_for(on_cpu, "eagle3", 0.2, seed=2, **options)
    prompt = torch.randint(1, VOCAB, (1, 30), generator=torch.Generator().manual_seed(0))
    settings = {"max_new_tokens": 60, "do_sample": False, "pad_token_id": 0, "eos_token_id": []}
    drafts = []
    for target in (on_cpu, there):
        own = copy.deepcopy(head).to(target.device)
        lm = SpeculativeLM.from_pretrained(target, own, tree="dynamic:8:3:2", adaptive=False)
        lm.observers.append(Drafts())
        lm.generate(prompt.to(target.device), **settings)
        drafts.append(lm.observers[0].seen)
    assert drafts[0] == drafts[1] and len(drafts[0]) > 10


@pytest.mark.parametrize("tokens", [700, 1000])
def test_a_batch_is_refused_by_what_is_allocated(lms, monkeypatch, tokens):
    """Caches come in powers of two: more than is used, which the check must count."""
    _, lm = lms("eagle3", tree="chain:2")
    prompts = prompts_of(3).to(lm.target.device)
    target, rows = lm.target, lm.drafter.model_state
    exact = 3 * (tokens + 3)
    slots = 1024 if tokens == 700 else 2048
    caches = target.cache_bytes(3, slots) + rows.model.cache_bytes(3, 1023)
    logits = 3 * 3 * target.info.vocab_size * 4 * target.dtype.itemsize

    def generate(free):
        monkeypatch.setattr(inputs, "free_memory", lambda _: float(free))
        settings = {
            "attention_mask": torch.ones_like(prompts),
            "do_sample": False,
            "pad_token_id": 0,
        }
        new = tokens - prompts.shape[1]
        return lm.generate(
            prompts, max_new_tokens=new, stopping_criteria=[lambda text, _: True], **settings
        )

    too_few = target.cache_bytes(1, exact) + rows.model.cache_bytes(1, exact) + logits
    for free in (too_few, caches + logits - 1):
        with refused(f"3 rows {tokens + 3} GiB"):
            generate(free)
    output = generate(caches + logits)
    assert output.stats.cache_bytes == target.cache_bytes(3, slots)
    cache = rows.catch_up().cache
    held = sum(states[:, :, cache.nodes :].nbytes for states in (*cache.keys, *cache.values))
    assert held == rows.model.cache_bytes(3, 1023)
