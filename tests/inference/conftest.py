"""Drafters and draws with which the decoder can be driven into every corner."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from headstart.inference import DraftTree, TreeShape
from headstart.inference.rounds import Prefill, Round


class Oracle:
    """Drafts trees of a shape that hold the true continuation, but for a share of wrong tokens.

    `truths` are the continuations of each row; past its end, or where a text has left it, guesses are random.
    """

    feature_layers: tuple[int, ...] = ()

    def __init__(self, shape: TreeShape, truths: list[list[int]], vocab_size: int, wrong: float, seed: int = 0) -> None:
        self.shape, self.truths, self.vocab_size, self.wrong = shape, truths, vocab_size, wrong
        self.max_nodes = shape.size
        self.random = torch.Generator().manual_seed(seed)

    def begin(self, prompt: Prefill, roots_B: Tensor) -> None:
        self.written = [[root] for root in roots_B.tolist()]

    def propose(self, roots_B: Tensor) -> DraftTree:
        rows = [
            self._row(root, written, truth) for root, written, truth in zip(roots_B.tolist(), self.written, self.truths)
        ]
        batch = len(rows)
        parents = torch.tensor(self.shape.parents).expand(batch, -1)
        return DraftTree(torch.tensor(rows), parents, torch.full((batch,), self.shape.size), self.shape.depth)

    def observe(self, finished: Round) -> None:
        for written, tokens, length in zip(
            self.written, finished.emitted_BA.tolist(), finished.verdict.lengths_B.tolist()
        ):
            written.extend(tokens[:length])

    def _row(self, root: int, written: list[int], truth: list[int]) -> list[int]:
        """Each node's children are distinct; one of them is true where the parent's path is."""
        tokens, on_truth = {(): root}, {(): truth[: len(written)] == written}
        for parent in ((), *self.shape.paths):
            children = [path for path in self.shape.paths if path[:-1] == parent]
            if not children:
                continue
            place = len(written) + len(parent)
            drawn = torch.randperm(self.vocab_size, generator=self.random).tolist()
            true = truth[place] if on_truth[parent] and place < len(truth) else None
            if true is not None and torch.rand((), generator=self.random) >= self.wrong:
                lucky = int(torch.randint(len(children), (), generator=self.random))
                drawn = [token for token in drawn if token != true]
                drawn.insert(lucky, true)
            for path, token in zip(children, drawn):
                tokens[path], on_truth[path] = token, token == true
        return [tokens[path] for path in ((), *self.shape.paths)]


class AllDraws:
    """Every outcome of the categorical draws at N nodes at once, as a batch of V^N rows, with its probability."""

    def __init__(self) -> None:
        self.weights = torch.ones(())

    def categorical(self, probs: Tensor) -> Tensor:
        nodes, vocab = probs.shape[1:]
        outcomes = torch.tensor(list(itertools.product(range(vocab), repeat=nodes)))
        assert len(outcomes) == len(probs)
        self.weights = probs.gather(2, outcomes[:, :, None])[..., 0].prod(-1)
        return outcomes


class Branch:
    """One path through a tree of random choices; `every_branch` takes them all."""

    def __init__(self, script: list[tuple[int, int]]) -> None:
        self.script, self.place, self.weight = script, 0, 1.0

    def categorical(self, probs: Tensor) -> Tensor:
        return torch.tensor([self._choose(row) for row in probs.reshape(-1, probs.shape[-1])]).reshape(probs.shape[:-1])

    def _choose(self, row: Tensor) -> int:
        options = row.nonzero().flatten().tolist()
        if self.place == len(self.script):
            self.script.append((0, len(options)))
        choice, _ = self.script[self.place]
        self.place += 1
        self.weight *= float(row[options[choice]])
        return int(options[choice])


def every_branch(run: Callable[[Branch], tuple[int, ...]]) -> dict[tuple[int, ...], float]:
    """The exact distribution of what a random program returns."""
    script: list[tuple[int, int]] = []
    found: dict[tuple[int, ...], float] = {}
    while True:
        branch = Branch(script)
        result = run(branch)
        found[result] = found.get(result, 0.0) + branch.weight
        while script and script[-1][0] + 1 == script[-1][1]:
            script.pop()
        if not script:
            return found
        script[-1] = (script[-1][0] + 1, script[-1][1])


def random_shape(seed: int, max_nodes: int = 12, max_depth: int = 4, max_children: int = 3) -> TreeShape:
    """A random static tree."""
    random = torch.Generator().manual_seed(seed)
    paths: list[tuple[int, ...]] = [()]
    for _ in range(int(torch.randint(1, max_nodes, (), generator=random))):
        parent = paths[int(torch.randint(len(paths), (), generator=random))]
        children = sum(path[:-1] == parent and path != () for path in paths)
        if len(parent) < max_depth and children < max_children:
            paths.append((*parent, children))
    return TreeShape.from_paths(paths[1:])


@pytest.fixture
def tools() -> Any:
    """The helpers above, by name."""

    class Tools:
        pass

    Tools.Oracle, Tools.AllDraws, Tools.every_branch, Tools.random_shape = (
        Oracle,
        AllDraws,
        staticmethod(every_branch),
        staticmethod(random_shape),
    )
    return Tools
