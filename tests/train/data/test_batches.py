"""The order of the data: everything once an epoch, the same on any number of processes, little
padding."""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import signal
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from messages import refused
from torch.utils.data._utils.pin_memory import pin_memory

from headstart.train.config import LoopConfig
from headstart.train.data.batches import (
    LOST,
    Order,
    Share,
    Steps,
    loaded,
    packed,
    worker_deaths_explained,
)
from headstart.train.data.chat_template import Example

LENGTHS = random.Random(0).choices(range(5, 500), k=1003)


def conversations_in(step):
    return list(itertools.chain.from_iterable(step))


def steps_of(seed=0, epoch=0, batch_size=8, lengths=LENGTHS, **options):
    return Order(lengths, batch_size, seed, **options).epoch(epoch)


def first_steps(order, start, count):
    return list(itertools.islice(order.from_step(start), count))


@pytest.mark.parametrize("pack", [None, 500, 2000])
@pytest.mark.parametrize("count", [1, 7, 8, 9, 256, 257, 1003])
def test_every_conversation_comes_exactly_once_an_epoch(count, pack):
    for epoch in range(2):
        steps = steps_of(epoch=epoch, lengths=LENGTHS[:count], pack=pack)
        found = [number for rows in steps for number in conversations_in(rows)]
        assert sorted(found) == list(range(count))
        assert sorted(len(rows) for rows in steps)[1:] == [8] * (len(steps) - 1)
        assert pack or all(len(row) == 1 for rows in steps for row in rows)


def test_a_step_holds_conversations_of_similar_length():
    def padding(steps):
        return sum(max(LENGTHS[i] for i in step) * len(step) for step in steps) - sum(LENGTHS)

    shuffled = [list(range(i, min(i + 8, 1003))) for i in range(0, 1003, 8)]
    assert padding(list(map(conversations_in, steps_of()))) < 0.15 * padding(shuffled)


def test_packed_rows_keep_their_budget_and_waste_little():
    rows = packed(list(range(300)), LENGTHS, 600)
    sizes = [sum(LENGTHS[i] for i in row) for row in rows]
    assert sorted(itertools.chain.from_iterable(rows)) == list(range(300))
    assert max(sizes) <= 600 and sum(sizes) > 0.95 * 600 * len(rows)


@pytest.mark.parametrize("options", [{}, {"pack": 700}, {"batch_tokens": 2000}])
@pytest.mark.parametrize("step", [0, 1, 125, 126, 127, 300, 700])
def test_going_on_from_a_step_is_what_would_have_come(step, options):
    whole = Order(LENGTHS, 8, 3, **options)
    assert first_steps(whole, step, 9) == first_steps(whole, 0, step + 9)[step:]


@pytest.mark.parametrize("processes", [1, 2, 4])
@pytest.mark.parametrize("micro_batch", [None, 1, 2])
@pytest.mark.parametrize("count", [8, 5, 1])
def test_the_processes_share_every_step(processes, micro_batch, count):
    rows = [[i] for i in range(count)]
    shares = [
        Share.of(8, micro_batch, process, processes).of_step(rows) for process in range(processes)
    ]
    assert sorted(row for share in shares for part in share for row in part) == rows
    size = micro_batch or 8 // processes
    for share in shares:
        # as many forwards everywhere, some of them empty
        assert len(share) == 8 // processes // size
        assert all(len(part) <= size for part in share)
    sizes = [sum(map(len, share)) for share in shares]
    assert max(sizes) - min(sizes) <= len(shares[0])


@pytest.mark.parametrize(
    ("batch_size", "micro_batch", "processes", "words"),
    [
        (9, None, 2, "batch_size 9 2 8"),
        (8, 3, 2, ("2 loop.micro_batch 3 6")),
        (2, None, 8, "batch_size 2 8"),
    ],
)
def test_a_step_that_cannot_be_divided_is_refused(batch_size, micro_batch, processes, words):
    with refused(words):
        Share.of(batch_size, micro_batch, 0, processes)


def test_weights_say_how_often_an_epoch_passes_over_a_source():
    sources = [0] * 40 + [1] * 60 + [2] * 3
    mixed = Order([10] * 103, 8, 0, sources=sources, weights=[0.25, 1.0, 2.0])
    seen = Counter()
    for epoch in range(4):
        found = [i for rows in mixed.epoch(epoch) for i in conversations_in(rows)]
        assert Counter(sources[i] for i in found) == {0: 10, 1: 60, 2: 6}
        seen.update(found)
    # four quarters are the whole source, each of its conversations once
    times = {0: 1, 1: 4, 2: 8}
    assert seen == {i: times[source] for i, source in enumerate(sources)}


SOURCES = [i * 3 // 1003 for i in range(1003)]


@pytest.mark.parametrize(
    ("options", "digest", "count"),
    [
        ({}, "f5f9dea0461cf9cf", 290),
        ({"pack": 700}, "8e66072913b04493", 106),
        ({"sources": SOURCES, "weights": [0.3, 1.0, 2.5]}, "67d5fa4a5ec1bd41", 366),
        ({"pack": 600, "sources": SOURCES, "weights": [0.5, 1.5, 1.0]}, "13b0f7885f5f4b7e", 124),
    ],
)
def test_runs_that_began_earlier_go_on_in_their_order(options, digest, count):
    """Digests of the first version's order: another one would have a resumed run see other data."""
    order = Order(LENGTHS, 8, 3, **options)
    steps = [first_steps(order, step, 40) for step in (0, 120, 300)]
    assert hashlib.sha256(repr(steps).encode()).hexdigest()[:16] == digest
    assert Order(LENGTHS, 8, 3, **options).count(2.3) == count


@pytest.mark.parametrize(
    "options", [{}, {"pack": 700}, {"weights": [0.3, 1.0, 2.5]}, {"batch_tokens": 2000}]
)
def test_an_epochs_steps_are_counted_without_making_them(options):
    order = Order(LENGTHS, 8, 3, sources=SOURCES, **options)
    for epoch in (3, 0, 1):
        made = steps_of(seed=3, epoch=epoch, sources=SOURCES, **options)
        assert order.steps_in(epoch) == len(made)


@pytest.mark.parametrize("budget", [500, 2000, 10_000])
def test_steps_of_a_token_budget_keep_it_and_waste_little(budget):
    steps = steps_of(batch_tokens=budget)
    assert sorted(i for step in steps for i in conversations_in(step)) == list(range(1003))
    padded = [len(step) * max(LENGTHS[i] for i in conversations_in(step)) for step in steps]
    assert max(padded) <= budget
    # A multiple of eight rows leaves some of the budget.
    assert sum(padded) > (0.8 if budget > 500 else 0.6) * budget * len(steps)
    assert steps != steps_of(batch_tokens=budget, epoch=1)
    assert steps == steps_of(batch_tokens=budget)


@pytest.mark.parametrize("processes", [2, 4, 8])
def test_processes_have_equally_many_rows_of_a_step_of_tokens(processes):
    steps = steps_of(batch_tokens=4000)
    shares = [Share(process, processes, 1) for process in range(processes)]
    counts = [{len(share.of_step(step)[0]) for share in shares} for step in steps]
    # All but the last step of each window, and those of few long conversations.
    assert sum(len(rows) == 1 for rows in counts) > 0.85 * len(steps)
    assert all(steps)


@pytest.mark.parametrize(
    ("processes", "micro_tokens", "forwards"),
    [(1, None, 1), (1, 1000, 4), (2, 1000, 2), (4, 1000, 1), (8, 1000, 1)],
)
def test_a_step_of_tokens_has_as_many_forwards_as_keep_each_small(
    processes, micro_tokens, forwards
):
    rows = [[i] for i in range(10)]
    loop = LoopConfig(batch_tokens=4000, micro_tokens=micro_tokens)
    shares = [Share.of_loop(loop, process, processes) for process in range(processes)]
    assert {share.forwards for share in shares} == {forwards}
    assert sorted(row for share in shares for part in share.of_step(rows) for row in part) == rows


def random_answers():
    """Of any length; some begin with an answer token."""
    draw = random.Random(1)
    found = []
    for i in range(40):
        length = draw.randrange(2, 30)
        mask = [draw.random() < 0.4 for _ in range(length - 1)] + [True]
        found.append(Example([draw.randrange(90) for _ in range(length)], mask, i))
    return found


DATA = random_answers()
FOURS = Order([len(example.tokens) for example in DATA], 4, 0)


def children():
    return {
        int(pid)
        for path in Path("/proc/self/task").glob("*/children")
        for pid in path.read_text().split()
    }


@pytest.fixture
def two_workers():
    """Steps that two workers read, after the first of each; and the workers."""
    before = children()
    steps = loaded(Steps(DATA, Share.of(4, None, 0, 1), 1), FOURS, 0, 2, pin=False)
    next(steps), next(steps)  # one of each worker, which then is ready for signals
    workers = children() - before
    yield steps, workers
    steps.close()
    assert len(workers) == 2 and not workers & children()


def comparable(step):
    batches = [
        (batch.tokens_BT.tolist(), batch.loss_mask_BT.tolist(), batch.lengths, batch.conversations)
        for batch in step.batches
    ]
    return step.epoch, step.answer_tokens, batches


@pytest.mark.parametrize("pack", [None, 40])
@pytest.mark.parametrize("processes", [1, 2])
def test_answer_tokens_of_all_processes_are_those_of_their_batches(pack, processes):
    lengths = [len(example.tokens) for example in DATA]
    sides = [Steps(DATA, Share.of(4, None, process, processes), 1) for process in range(processes)]
    for key in first_steps(Order(lengths, 4, 0, pack), 0, 12):
        steps = [side[key] for side in sides]
        marked = sum(int(batch.loss_mask_BT.sum()) for step in steps for batch in step.batches)
        assert [step.answer_tokens for step in steps] == [marked] * processes


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("first", [0, 7])
def test_workers_read_the_same_steps_in_the_same_order_and_draw_nothing(workers, first):
    steps = Steps(DATA, Share.of(4, 2, 0, 1), 5)
    expected = [comparable(steps[key]) for key in first_steps(FOURS, first, 25)]
    torch.manual_seed(3)
    before = torch.get_rng_state()
    read = loaded(steps, FOURS, first, workers, pin=False)
    assert [comparable(step) for step in itertools.islice(read, 25)] == expected
    assert torch.equal(torch.get_rng_state(), before)


def test_a_worker_that_dies_is_told_with_what_to_do(two_workers):
    steps, workers = two_workers
    words = "died data.workers"

    def go_on():
        os.kill(min(workers), signal.SIGKILL)
        return list(itertools.islice(steps, 1000))

    # torch tells of it at any moment
    with refused(words, error=RuntimeError), worker_deaths_explained():
        go_on()
    for lost in (ConnectionResetError(), EOFError()):  # what it was about to hand over
        with refused(words, error=RuntimeError), worker_deaths_explained(*LOST):
            raise lost


def test_workers_end_with_the_loop_and_signals_to_the_group_leave_them_alone(two_workers):
    steps, workers = two_workers
    for worker in workers:
        os.kill(worker, signal.SIGINT)
        os.kill(worker, signal.SIGTERM)
    assert len(list(itertools.islice(steps, 60))) == 60


def test_a_worker_that_waits_ends_with_the_loop(monkeypatch):
    """For a server, say: what it was asked for may take minutes."""
    # how long torch lets a worker end by itself, and then by SIGTERM
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)

    def read(batches, epoch):
        if 0 not in batches[0].conversations:
            time.sleep(120)
        return batches

    before = children()
    keys = [(0, [[0], [1]]), (0, [[2], [3]]), (0, [[4], [5]])]
    order = SimpleNamespace(from_step=lambda first: iter(keys))
    steps = loaded(Steps(DATA, Share.of(2, None, 0, 1), 1, read), order, 0, 1, pin=False)
    next(steps)
    steps.close()
    assert not children() - before


def test_everything_of_a_step_is_pinned(monkeypatch):
    """As torch's loader asks for it, on machines with a GPU."""
    pinned = []

    def pin(tensor, *_):
        pinned.append(tensor)
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    step = Steps(DATA, Share.of(2, 1, 0, 1), 1)[0, [[0, 1], [2]]]
    states = {"states_BTLD": torch.ones(1), "scales_BTL": torch.ones(1)}
    step = replace(step, batches=[replace(batch, **states) for batch in step.batches])
    found = pin_memory(step)
    assert len(pinned) == 3 + 3 + 1  # tokens, states, scales of both; positions of the packed one
    assert comparable(found) == comparable(step)
    for one, other in zip(found.batches, step.batches, strict=True):
        assert one.tokens_BT is not other.tokens_BT
    assert torch.equal(found.batches[0].positions_BT, step.batches[0].positions_BT)
