"""Whether a head reads a prompt: by what that takes, what drafts would save, and how many tokens
are still to come."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import check_identity
from torch import Tensor

from headstart.inference import Conversation, SpeculativeLM, Target
from headstart.inference.drafters import adaptive
from headstart.inference.drafters.adaptive import AdaptiveDrafter, AnswerLengths
from headstart.inference.drafters.base import PrefillChunk
from headstart.inference.drafters.by_name import make_drafter
from headstart.inference.drafters.draft_model_state import DraftModelState
from headstart.inference.drafters.next_step import Choice
from headstart.inference.drafters.round import Round, Verdict
from headstart.inference.trees.tree import DraftTree
from headstart.inference.trees.tree_spec import TreeShape
from headstart.inference.tuning.round_costs import RoundCosts

VOCAB = 20
SETTINGS: dict[str, Any] = {"do_sample": False, "eos_token_id": [], "pad_token_id": 0}


def test_how_long_answers_are_is_learned() -> None:
    answers = AnswerLengths()
    assert answers.expected(2000) == 2000
    for _ in range(5):
        answers.add(50, 2000)
    assert 45 < answers.expected(2000) <= 50
    assert answers.expected(10) < 10
    cut = AnswerLengths()
    for _ in range(5):
        cut.add(64, 64)
    assert cut.expected(256) == 256, "answers that were cut tell nothing of their ends"


def test_of_rejected_drafts_nothing_is_read_later() -> None:
    """Another drafter drafted two tokens in each of three rounds, and none was accepted."""
    read: list[list[int]] = []

    def observe(state: Any, features_BAF: Tensor, tokens_BA: Tensor, lengths_B: Tensor) -> Any:
        read.append(tokens_BA[0, : int(lengths_B)].tolist())
        return state

    rows = DraftModelState(SimpleNamespace(reads_from_start=False, observe=observe), None)
    rows.read_when_needed()
    nothing_BTF = torch.zeros(1, 3, 0)
    text_1T = torch.tensor([[1, 2, 3, 4]])
    rows.prefill(PrefillChunk(text_1T[:, :3], text_1T[:, 1:], nothing_BTF, torch.tensor([3])))
    for root in (4, 5, 6):
        tree = DraftTree.of_shape(TreeShape.chain(2), torch.tensor([[root, 8, 9]]))
        one_1 = torch.tensor([1])
        emitted_1A = torch.tensor([[root + 1, 9, 9]])
        path_1A = torch.tensor([[0, 1, 2]])
        verdict = Verdict(path_1A, one_1, one_1 + root, emitted_1A, nothing_BTF, one_1 < 0)
        rows.observe(Round(tree, tree, None, None, verdict, None, tokens=[[root + 1]]))
    rows.catch_up()
    assert read == [[2, 3, 4], [5, 6], [7]]


# The engine, with a clock of the test's own.


class Clock:
    """A forward takes a second, and a tenth of one for each node beyond the first; a token that is
    read `reading`."""

    def __init__(self, target: Target, monkeypatch: pytest.MonkeyPatch, reading: float) -> None:
        self.now = 0.0
        self.read = 0
        forward_tree = target.engine.forward_tree
        read = DraftModelState.read

        def over_a_tree(tree: Any, *rest: Any) -> Any:
            self.now += 1.0 + 0.1 * (tree.tokens_BN.shape[1] - 1)
            return forward_tree(tree, *rest)

        def reads(rows: DraftModelState, chunk: Any) -> None:
            self.read += chunk.tokens_BT.numel()
            self.now += reading * chunk.tokens_BT.numel()
            read(rows, chunk)

        monkeypatch.setattr(target.engine, "forward_tree", over_a_tree)
        monkeypatch.setattr(DraftModelState, "read", reads)

    def __call__(self) -> float:
        return self.now


def prompt(tokens: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, (1, tokens), generator=torch.Generator().manual_seed(seed))


def of_itself(target: Target, clock: Clock, costs: RoundCosts | None = None) -> SpeculativeLM:
    """The target drafts for itself, in chains of three: it is right about everything, if it has
    read everything."""
    drafter = make_drafter(target, target, "chain:3")
    return SpeculativeLM(target, AdaptiveDrafter([drafter], costs=costs, clock=clock))


COSTS = RoundCosts({1: 1.0, 2: 1.1}, draft=0.0, reading=0.1)


@pytest.mark.parametrize(("tokens", "reads"), [(8, False), (128, True)])
def test_a_long_prompt_is_read_for_long_answers_alone(
    target: Target, monkeypatch: pytest.MonkeyPatch, tokens: int, reads: bool
) -> None:
    """A prompt of 200 tokens takes 20 s to read; drafts are expected to save a quarter of one a
    token."""
    clock = Clock(target, monkeypatch, 0.1)
    lm = of_itself(target, clock, COSTS)
    for seed in range(3):
        check_identity(lm, [prompt(200, seed)[0]], max_new_tokens=tokens, **SETTINGS)
    assert (clock.read > 0) == reads


def test_what_reading_took_is_remembered(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expected to cost nothing, and far too dear: one prompt is read, and no more."""
    clock = Clock(target, monkeypatch, 1.0)
    lm = of_itself(target, clock, RoundCosts({1: 1.0, 2: 1.1}, draft=0.0))
    read = []
    for seed in range(3):
        check_identity(lm, [prompt(100, seed)[0]], max_new_tokens=40, **SETTINGS)
        read.append(clock.read)
    assert read[0] >= 100
    assert read[-1] == read[0]


def test_answers_that_end_early_earn_less(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is 500 tokens; after answers of twenty no prompt is read whose reading costs as
    much."""
    clock = Clock(target, monkeypatch, 0.1)
    lm = of_itself(target, clock, COSTS)
    input_ids = prompt(200)
    settings = {**SETTINGS, "attention_mask": torch.ones_like(input_ids), "max_new_tokens": 500}
    lengths = iter([20] * 6)

    def stops_after(length: int) -> Any:
        return lambda ids, scores: ids.shape[1] >= 200 + length

    read = []
    for length in lengths:
        lm.generate(input_ids, **settings, stopping_criteria=[stops_after(length)])
        read.append(clock.read)
    assert read[0] >= 200
    assert read[-1] == read[2]


def test_a_turn_that_was_decoded_plainly_is_read_in_its_order(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head reads both prompts and the answer between them, when it drafts in the second turn."""
    clock = Clock(target, monkeypatch, 0.0)
    lm = of_itself(target, clock)
    chosen = 0
    monkeypatch.setattr(adaptive, "choose", lambda record: Choice(chosen))
    past = Conversation()
    first = prompt(9)
    found = lm.generate(
        first,
        attention_mask=torch.ones_like(first),
        max_new_tokens=8,
        past_key_values=past,
        **SETTINGS,
    )
    chosen = 1
    second = torch.cat([found.sequences, prompt(7, 1)], dim=1)
    settings = {**SETTINGS, "attention_mask": torch.ones_like(second), "max_new_tokens": 17}
    stats = lm.generate(second, past_key_values=past, **settings).stats
    assert {record.returned for record in stats.rows[0]} == {4}
