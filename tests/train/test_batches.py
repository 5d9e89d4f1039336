"""The order of the data: everything once an epoch, the same on any number of processes, little padding."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from headstart.train.batches import Order, Share, packed

LENGTHS = random.Random(0).choices(range(5, 500), k=1003)


def conversations(step):
    return list(itertools.chain.from_iterable(step))


def order(seed=0, epoch=0, batch_size=8, lengths=LENGTHS, **options):
    return Order(lengths, batch_size, seed, **options).epoch(epoch)


@pytest.mark.parametrize("pack", [None, 500, 2000])
@pytest.mark.parametrize("count", [1, 7, 8, 9, 256, 257, 1003])
def test_every_conversation_comes_exactly_once_an_epoch(count, pack):
    for epoch in range(2):
        steps = order(epoch=epoch, lengths=LENGTHS[:count], pack=pack)
        assert sorted(itertools.chain.from_iterable(map(conversations, steps))) == list(range(count))
        assert sorted(len(rows) for rows in steps)[1:] == [8] * (len(steps) - 1)
        assert pack or all(len(row) == 1 for rows in steps for row in rows)


def test_the_order_is_fixed_by_seed_and_epoch():
    assert order(seed=1, epoch=2) == order(seed=1, epoch=2)
    assert order(seed=1, epoch=2) != order(seed=1, epoch=3)
    assert order(seed=1, epoch=2) != order(seed=2, epoch=2)


def test_epochs_put_other_conversations_together_and_short_ones_do_not_come_first():
    first, second = ({frozenset(conversations(rows)) for rows in order(epoch=epoch)} for epoch in range(2))
    assert first != second
    means = [sum(LENGTHS[i] for i in conversations(rows)) / len(rows) for rows in order()]
    assert means != sorted(means)


def test_a_step_holds_conversations_of_similar_length():
    def padding(steps):
        return sum(max(LENGTHS[i] for i in step) * len(step) for step in steps) - sum(LENGTHS)

    shuffled = [list(range(i, min(i + 8, 1003))) for i in range(0, 1003, 8)]
    assert padding(list(map(conversations, order()))) < 0.15 * padding(shuffled)


def test_packed_rows_keep_their_budget_and_waste_little():
    rows = packed(list(range(300)), LENGTHS, 600)
    sizes = [sum(LENGTHS[i] for i in row) for row in rows]
    assert sorted(itertools.chain.from_iterable(rows)) == list(range(300))
    assert max(sizes) <= 600 and sum(sizes) > 0.95 * 600 * len(rows)


@pytest.mark.parametrize("pack", [None, 700])
@pytest.mark.parametrize("step", [0, 1, 125, 126, 127, 300])
def test_going_on_from_a_step_is_what_would_have_come(step, pack):
    whole = Order(LENGTHS, 8, 3, pack)
    expected = list(itertools.islice(whole.from_step(0), step, step + 9))
    assert list(itertools.islice(whole.from_step(step), 9)) == expected


@pytest.mark.parametrize(("epochs", "steps"), [(1, 126), (2, 252), (0.5, 63), (2.01, 254)])
def test_the_steps_of_epochs_are_counted(epochs, steps):
    assert Order(LENGTHS, 8, 0).count(epochs) == steps  # 1,003 conversations, 8 a step


@pytest.mark.parametrize("processes", [1, 2, 4])
@pytest.mark.parametrize("micro_batch", [None, 1, 2])
@pytest.mark.parametrize("count", [8, 5, 1])
def test_the_processes_share_every_step(processes, micro_batch, count):
    rows = [[i] for i in range(count)]
    shares = [Share.of(8, micro_batch, process, processes).of_step(rows) for process in range(processes)]
    assert sorted(row for share in shares for part in share for row in part) == rows
    size = micro_batch or 8 // processes
    for share in shares:
        assert len(share) == 8 // processes // size  # as many forwards everywhere, some of them empty
        assert all(len(part) <= size for part in share)
    sizes = [sum(map(len, share)) for share in shares]
    assert max(sizes) - min(sizes) <= len(shares[0])


@pytest.mark.parametrize(
    ("batch_size", "micro_batch", "processes", "words"),
    [
        (9, None, 2, "batch_size 9 cannot be divided among 2 processes; choose a multiple of 2, such as 8"),
        (8, 3, 2, "among 2 processes in forwards of loop.micro_batch 3; choose a multiple of 6, such as 6"),
        (2, None, 8, "batch_size 2 cannot be divided among 8 processes; choose a multiple of 8, such as 8"),
    ],
)
def test_a_step_that_cannot_be_divided_is_refused(batch_size, micro_batch, processes, words):
    with pytest.raises(ValueError, match=words):
        Share.of(batch_size, micro_batch, 0, processes)


def test_weights_say_how_often_an_epoch_passes_over_a_source():
    sources = [0] * 40 + [1] * 60 + [2] * 3
    mixed = Order([10] * 103, 8, 0, sources=sources, weights=[0.25, 1.0, 2.0])
    seen = Counter()
    for epoch in range(4):
        found = [i for rows in mixed.epoch(epoch) for i in conversations(rows)]
        assert Counter(sources[i] for i in found) == {0: 10, 1: 60, 2: 6}
        seen.update(found)
    assert {seen[i] for i in range(40)} == {1}  # four quarters are the whole source, each of its conversations once
    assert {seen[i] for i in range(40, 100)} == {4}
    assert {seen[i] for i in range(100, 103)} == {8}
