"""Observers: they are told everything that a round computed, once and in order, and decoding
notices nothing."""

from __future__ import annotations

import pytest
import torch
from helpers import GREEDY, Ended, continued, head_for, random_rows
from messages import refused

from headstart.inference import Conversation, RoundObserver, SpeculativeLM
from headstart.inference.text.streaming import StreamClosed
from headstart.inference.trees.sampling import sampler_by


def observed(target, observer, kind="medusa", tree="chain:3", **options):
    """A decoder with a head, which tells an observer of its rounds."""
    head = head_for(target, kind, **({"feature_layers": [0, -1]} if kind == "eagle3" else {}))
    options = {"adaptive": False, "lossy": True, **options}
    lm = SpeculativeLM.from_pretrained(target, head, tree=tree, **options)
    lm.observers.append(observer)
    return lm


ROWS = random_rows(20, [9, 6, 8, 5, 7])
SETTINGS = {"max_new_tokens": 8, "eos_token_id": [], "max_batch_size": 2}


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
    reader = Reader(*layers)
    lm = observed(target, reader, kind)
    texts, output = continued(lm, ROWS, **SETTINGS)
    assert reader.stats.rows == output.stats.rows
    assert reader.told[:2] == ["begin", "prefill"] and reader.told[-1] == "end"
    assert reader.told.count("round") == len(output.stats.round_seconds)
    lm.observers.clear()
    unobserved, expected = continued(lm, ROWS, **SETTINGS)
    assert unobserved == texts
    assert expected.stats.rows == output.stats.rows
    if not layers:
        return
    for row, (prompt_T, text) in enumerate(zip(ROWS, texts, strict=True)):
        text_T = torch.cat([prompt_T, torch.tensor(text)])
        states_TF = torch.cat(reader.states[row])[: len(text_T) - 1]
        expected_TF = target.read(text_T[None], layers)[0][0, :-1]
        torch.testing.assert_close(states_TF, expected_TF, atol=1e-5, rtol=0)


def test_the_first_chunk_of_a_conversation_begins_where_its_text_goes_on(target):
    reader = Reader(-1)
    lm = observed(target, Ended())
    past = Conversation()
    _, first = continued(lm, [torch.tensor([3, 1, 4])], past_key_values=past)
    lm.observers.append(reader)
    prompt_T = torch.cat([first.sequences[0], torch.tensor([5, 9])])
    _, second = continued(lm, [prompt_T], past_key_values=past)
    known = reader.starts[0]
    assert known == first.sequences.shape[1] - 1
    states_TF = torch.cat(reader.states[0])[: second.sequences.shape[1] - 1 - known]
    expected_TF = target.read(second.sequences, (-1,))[0][0, known:-1]
    torch.testing.assert_close(states_TF, expected_TF, atol=1e-5, rtol=0)


class Again(RoundObserver):
    """Lets the rule decide once more, by what it is told of a round."""

    def begin(self, call):
        self.rule = call.rule
        self.rounds = 0

    def round(self, finished):
        sampler = sampler_by(finished.numbers)
        verdict = self.rule(finished.verified, finished.scores_BNV, sampler)
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
    again = Again()
    lm = observed(target, again, "eagle3", tree, acceptance=acceptance)
    continued(lm, ROWS[:3], **SETTINGS | {"do_sample": True, "max_new_tokens": 12})
    assert again.rounds > 3


class FailingAt(RoundObserver):
    """Raises in one of its methods."""

    def __init__(self, name):
        setattr(self, name, lambda *_: 1 / 0)


@pytest.mark.parametrize(("name", "ends"), [("begin", [1, 0]), ("round", [1, 1]), ("end", [1, 1])])
def test_the_end_is_told_to_all_that_know_of_the_begin_whatever_ended_the_call(target, name, ends):
    before = Ended()
    after = Ended()
    lm = observed(target, before)
    lm.observers += [FailingAt(name), after]
    with pytest.raises(ZeroDivisionError):
        continued(lm, ROWS[:1], **SETTINGS)
    assert [len(before.stats), len(after.stats)] == ends
    assert isinstance(before.errors[0], ZeroDivisionError)


def test_the_end_of_a_stream_that_was_left_is_told(target):
    ended = Ended()
    lm = observed(target, ended)
    stream = lm.stream(ROWS[0][None], **GREEDY | {"max_new_tokens": 500, "eos_token_id": []})
    for _ in range(3):  # the prompt's and two rounds' tokens
        next(stream)
    stream.close()
    assert isinstance(ended.errors[0], StreamClosed) and 0 < ended.stats[0].rounds < 100
    continued(lm, ROWS[:1], **SETTINGS)
    assert ended.errors[1] is None and ended.stats[1].tokens == 7


def test_a_round_that_an_error_ended_is_not_counted(target):
    """In its first row it was complete."""

    def broken(ids, scores):
        is_second_row = ids[0, : len(ROWS[1])].tolist() == ROWS[1].tolist()
        # at its seventh new token
        return 1 / 0 if is_second_row and ids.shape[1] == len(ROWS[1]) + 7 else False

    ended = Ended()
    lm = observed(target, ended)
    with pytest.raises(ZeroDivisionError):
        continued(lm, ROWS[:2], **SETTINGS | {"max_new_tokens": 40, "stopping_criteria": [broken]})
    (stats,) = ended.stats
    assert len(stats.rows[0]) == len(stats.rows[1]) == len(stats.round_seconds) > 0
    assert len(stats.token_seconds) == stats.tokens


def test_a_layer_that_the_target_lacks_is_refused(target):
    with refused("99"):
        continued(observed(target, Reader(99)), ROWS[:1])
