"""Drafters of the user's own: whatever they do, the text is the target's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import Useless, check_identity, one_row_tree
from messages import refused, warned

from headstart.inference import Drafter, DraftTree, SpeculativeLM

VOCAB = Useless.vocab_size
ROW = torch.tensor([1, 2, 3])


def test_a_drafter_of_ones_own_may_not_sample(target):
    class Sampling(Useless):
        kind = "sampled_chain"

    with refused("top-k Sampling.kind 'sampled_chain'"):
        SpeculativeLM.from_pretrained(target, drafter=Sampling())


@pytest.mark.parametrize("where", ["begin", "prefill", "propose", "observe"])
def test_a_drafter_that_raises_is_reported_once_and_nothing_is_lost(target, where):
    calls = []

    def fail(*_):
        calls.append(where)
        raise RuntimeError("its file is gone")

    broken = type("Broken", (Useless,), {where: fail})
    lm = SpeculativeLM.from_pretrained(target, drafter=broken(), adaptive=False)
    for _ in range(2):
        calls.clear()
        with warned("Broken its file is gone") as told:
            check_identity(lm, [ROW])
        assert len(told) == len(calls) == 1


class Alone:
    """A chain of the newest token, by a class that inherits nothing."""

    max_nodes = 3

    def __init__(self):
        self.emitted = []

    def propose(self, roots_B):
        tokens = roots_B[:, None].repeat(1, 3)
        parents = torch.tensor([-1, 0, 1]).expand(len(roots_B), -1)
        return DraftTree(tokens, parents, torch.full_like(roots_B, 3), max_depth=2)

    def observe(self, finished):
        self.emitted += finished.tokens


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "make", [SpeculativeLM, lambda target, own: SpeculativeLM.from_pretrained(target, drafter=own)]
)
def test_two_methods_are_enough(target, make):
    own = Alone()
    check_identity(make(target, own), [ROW])
    assert sum(map(len, own.emitted)) >= 19


@pytest.mark.filterwarnings("error")
def test_rows_that_come_and_go_are_told_to_one_that_keeps_them(target):
    """Its rows are the texts of the batch, whichever of them have ended and begun."""

    class Rows(Alone):
        def begin(self, context):
            self.rows = [[] for _ in range(context.batch_size)]

        def prefill(self, chunk):
            texts = zip(self.rows, chunk.next_tokens_BT.tolist(), chunk.lengths_B.tolist())
            for row, tokens, length in texts:
                row += tokens[:length]

        def propose(self, roots_B):
            assert [row[-1] for row in self.rows] == roots_B.tolist()
            return super().propose(roots_B)

        def observe(self, finished):
            for row, tokens in zip(self.rows, finished.tokens, strict=True):
                row += tokens

        def select(self, rows_R):
            self.rows = [list(self.rows[row]) for row in rows_R.tolist()]

        def replace(self, rows_R, other):
            for row, text in zip(rows_R.tolist(), other.rows, strict=True):
                self.rows[row] = text

    prompts = list(torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9], [2, 4, 6]]))
    lm = SpeculativeLM.from_pretrained(target, drafter=Rows(), adaptive=False)
    settings = {"max_new_tokens": 30, "eos_token_id": [3, 7]}
    output = check_identity(lm, prompts, max_batch_size=2, **settings)
    assert len({len(row) for row in output.stats.rows}) > 1, "all rows end together"


@pytest.mark.parametrize(
    "own",
    [3, type("Half", (), {"max_nodes": 2, "propose": None})(), type("Mine", (Drafter,), {})()],
)
def test_what_is_not_a_drafter_is_refused(target, own):
    with refused("max_nodes propose(roots_B) observe(round)", type(own).__name__):
        SpeculativeLM(target, own)


def of_size(tree, size):
    return replace(tree, sizes_B=torch.tensor([size]))


@pytest.mark.parametrize(
    ("proposed", "words"),
    [
        (lambda root: one_row_tree([root, VOCAB], [-1, 0], 1), f"node 1 token {VOCAB}"),
        (lambda root: one_row_tree([root, -1], [-1, 0], 1), f"node 1 token -1 {VOCAB}"),
        (lambda root: one_row_tree([root] * 9, range(-1, 8), 8), "9 nodes max_nodes 8"),
        (lambda root: one_row_tree([root, 1, 2], [-1, 2, 0], 2), "node 1 parent 2"),
        (lambda root: one_row_tree([(root + 1) % VOCAB, 1], [-1, 0], 1), "node 0 token"),
        (lambda root: one_row_tree([root, 1, 2], [-1, 0, 1], 1), "2 3 nodes max_depth 1"),
        (lambda root: one_row_tree([root, 1, 1], [-1, 0, 0], 1), "children node 0 token"),
        (lambda root: one_row_tree([root], [-1], 3), "0 1 nodes max_depth 3"),
        (lambda root: of_size(one_row_tree([root, 1], [-1, 0], 1), 3), "sizes_B 3 2 nodes"),
        (lambda root: of_size(one_row_tree([root, 1], [-1, 0], 1), 0), "sizes_B 0 2 nodes"),
        (
            lambda root: one_row_tree([root, 1], [-1, 0], 1, kind="sampled_chain"),
            "sampled_chain top-k",
        ),
    ],
)
def test_what_is_no_tree_is_not_decoded_with(target, proposed, words):
    class Odd(Useless):
        def propose(self, roots_B):
            return proposed(int(roots_B[0]))

    lm = SpeculativeLM.from_pretrained(target, drafter=Odd(), adaptive=False)
    with warned(words):
        check_identity(lm, [ROW])


@pytest.mark.filterwarnings("error")
def test_padding_may_repeat_a_token(target):
    class Ragged(Useless):
        def propose(self, roots_B):
            return of_size(one_row_tree([int(roots_B[0]), 1, 1], [-1, 0, 0], 1), 2)

    lm = SpeculativeLM.from_pretrained(target, drafter=Ragged(), adaptive=False)
    check_identity(lm, [ROW])
