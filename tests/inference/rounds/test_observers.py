"""Observers: they are told everything that a round computed, once and in order, and decoding
notices nothing."""

from __future__ import annotations

import pytest
import torch
from helpers import Ended, build_model, head_for
from messages import refused

from headstart.inference import Conversation, RoundObserver, SpeculativeLM, Target
from headstart.inference.rounds import loop
from headstart.inference.text.streaming import StreamClosed
from headstart.inference.trees.sampling import PositionSampler, PrecomputedSampler


@pytest.fixture(scope="module")
def target():
    return Target(build_model().requires_grad_(False))


def decoder(target, kind="medusa", tree="chain:3", **options):
    head = head_for(target, kind, **({"feature_layers": [0, -1]} if kind == "eagle3" else {}))
    return SpeculativeLM.from_pretrained(
        target, head, tree=tree, adaptive=False, lossy=True, **options
    )


def prompts(rows):
    """Prompts of different lengths, padded on the left."""
    ids = torch.randint(0, 250, (rows, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, : (3 * row) % 5] = 0
    return {"inputs": ids, "attention_mask": mask}


SETTINGS = {
    "max_new_tokens": 8,
    "do_sample": False,
    "eos_token_id": [],
    "pad_token_id": 0,
    "max_batch_size": 2,
}


class Reader(RoundObserver):
    """Keeps the features of all rows, in layers that the drafter may not read, and the order of
    what it is told."""

    def __init__(self, *layers):
        self.feature_layers = layers
        self.told = []
        self.states = {}
        self.starts = {}

    def begin(self, call):
        self.call = call
        self.told.append("begin")

    def keep(self, rows, features_BTF, lengths):
        """The features of the next tokens of each row."""
        layers = self.call.feature_layers
        features_BTLD = features_BTF.unflatten(-1, (len(layers), -1))
        columns = [layers.index(layer) for layer in self.feature_layers]
        for row, states_TLD, length in zip(rows, features_BTLD, lengths, strict=True):
            self.states.setdefault(row, []).append(states_TLD[:length, columns].flatten(1))

    def prefill(self, rows, starts, chunk):
        self.told.append("prefill")
        for row, start in zip(rows, starts, strict=True):
            before = sum(map(len, self.states.get(row, [])))
            assert start == self.starts.setdefault(row, start) + before
        self.keep(rows, chunk.features_BTF, chunk.lengths_B.tolist())

    def round(self, finished):
        self.told.append("round")
        self.keep(
            self.call.sequences.active,
            finished.verdict.features_BAF,
            [len(tokens) for tokens in finished.tokens],
        )
        assert finished.output.features_BNF.shape[-1] == finished.verdict.features_BAF.shape[-1]

    def end(self, stats, error):
        self.told.append("end")
        self.stats = stats


@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
@pytest.mark.parametrize("layers", [(-1, 0), (-1,), ()])
def test_an_observer_reads_the_targets_states_and_changes_nothing(target, kind, layers):
    lm = decoder(target, kind)
    expected = lm.generate(**prompts(5), **SETTINGS)
    reader = Reader(*layers)
    lm.observers.append(reader)
    found = lm.generate(**prompts(5), **SETTINGS)
    assert torch.equal(found.sequences, expected.sequences)
    assert found.stats.rows == expected.stats.rows == reader.stats.rows
    assert reader.told[:2] == ["begin", "prefill"] and reader.told[-1] == "end"
    assert reader.told.count("round") == len(found.stats.round_seconds)
    if not layers:
        return
    for row, (ids_T, mask_T) in enumerate(
        zip(found.sequences, prompts(5)["attention_mask"], strict=True)
    ):
        text_T = ids_T[int((1 - mask_T).sum()) :]
        states_TF = torch.cat(reader.states[row])[: len(text_T) - 1]
        assert len(states_TF) == len(text_T) - 1
        expected_TF = target.read(text_T[None], layers)[0][0, :-1]
        torch.testing.assert_close(states_TF, expected_TF, atol=1e-5, rtol=0)


def test_the_first_chunk_of_a_conversation_begins_where_its_text_goes_on(target):
    lm = decoder(target)
    past = Conversation()
    given = {**SETTINGS, "past_key_values": past}
    text = lm.generate(torch.tensor([[3, 1, 4]]), **given).sequences
    reader = Reader(-1)
    lm.observers.append(reader)
    longer = lm.generate(torch.cat([text, torch.tensor([[5, 9]])], dim=1), **given).sequences
    known = reader.starts[0]
    assert known == text.shape[1] - 1
    states_TF = torch.cat(reader.states[0])[: longer.shape[1] - 1 - known]
    expected_TF = target.read(longer, (-1,))[0][0, known:-1]
    torch.testing.assert_close(states_TF, expected_TF, atol=1e-5, rtol=0)


class Again(RoundObserver):
    """Lets the rule decide once more, by what it is told of a round."""

    def begin(self, call):
        self.rule = call.rule
        self.rounds = 0

    def round(self, finished):
        numbers = finished.numbers
        if isinstance(numbers, torch.Tensor):
            by_position = numbers.ndim == 3
            numbers = (
                PositionSampler(exponential_BNV=numbers)
                if by_position
                else PrecomputedSampler(uniform_BU=numbers)
            )
        verdict = self.rule(finished.verified, finished.scores_BNV, numbers)
        assert torch.equal(verdict.lengths_B, finished.verdict.lengths_B)
        assert torch.equal(verdict.next_tokens_B, finished.verdict.next_tokens_B)
        self.rounds += 1


@pytest.mark.parametrize(
    ("tree", "acceptance"),
    [
        ("branch:2x2", "auto"),
        ("branch:2x2", "typical"),
        ("drawn:branch:2x1", "auto"),
        ("drawn:chain:3", "token"),
    ],
)
def test_a_rounds_scores_and_random_numbers_decide_it(target, tree, acceptance):
    lm = decoder(target, "eagle3", tree, acceptance=acceptance)
    again = Again()
    lm.observers.append(again)
    lm.generate(**prompts(3), **{**SETTINGS, "do_sample": True, "max_new_tokens": 12})
    assert again.rounds > 3


class Failing(RoundObserver):
    def __init__(self, name):
        setattr(self, name, lambda *_: 1 / 0)


def test_the_end_is_told_to_all_that_know_of_the_begin_whatever_ended_the_call(target):
    lm = decoder(target)
    for name, ends in (("begin", [1, 0]), ("round", [1, 1]), ("end", [1, 1])):
        before, after = Ended(), Ended()
        lm.observers[:] = [before, Failing(name), after]
        with pytest.raises(ZeroDivisionError):
            lm.generate(**prompts(1), **SETTINGS)
        assert [len(each.stats) for each in (before, after)] == ends, name
        assert isinstance(before.errors[0], ZeroDivisionError)
    ended = Ended()
    lm.observers[:] = [ended]
    for number, _ in enumerate(
        lm.stream(prompts(1)["inputs"], **{**SETTINGS, "max_new_tokens": 500})
    ):
        if number == 2:  # after the prompt's and the first round's tokens
            break
    assert isinstance(ended.errors[0], StreamClosed) and 0 < ended.stats[0].rounds < 100
    lm.generate(**prompts(1), **SETTINGS)
    assert ended.errors[1] is None and ended.stats[1].tokens == 7


def test_a_round_that_an_error_ended_is_not_counted(target):
    """In its first row it was complete."""

    def broken(ids, scores):
        is_second_row = ids[0, 0] == prompts(2)["inputs"][1, 3]
        # at its seventh new token
        return 1 / 0 if is_second_row and ids.shape[1] == 6 + 7 else False

    lm = decoder(target)
    ended = Ended()
    lm.observers.append(ended)
    with pytest.raises(ZeroDivisionError):
        lm.generate(**prompts(2), **SETTINGS, stopping_criteria=[broken])
    (stats,) = ended.stats
    assert len(stats.rows[0]) == len(stats.rows[1]) == len(stats.round_seconds) > 0
    assert len(stats.token_seconds) == stats.tokens


def test_a_layer_that_the_target_lacks_is_refused(target):
    lm = decoder(target)
    lm.observers.append(Reader(99))
    with refused("99"):
        lm.generate(**prompts(1), **SETTINGS)


def test_without_observers_nothing_is_done_for_them(target, monkeypatch):
    monkeypatch.setattr(loop, "observing", None)
    decoder(target).generate(**prompts(3), **SETTINGS)
