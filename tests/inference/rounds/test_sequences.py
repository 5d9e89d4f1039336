"""A text that several calls go on with: the answers of fresh calls, the same drafts, and nothing is
read twice."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers import EachRound, accepted, calls_of, check_identity, head_for, random_ids

from headstart.inference import Conversation, Drafter, DraftTree, SpeculativeLM, TreeShape
from headstart.inference.drafters import adaptive
from headstart.inference.drafters.by_name import make_drafter
from headstart.inference.drafters.next_step import Choice
from headstart.inference.rounds.sequences import shared_length

VOCAB, NEW = 20, 11
HEADS = {
    "medusa": {"num_heads": 3},
    "hydra++": {"num_heads": 3},
    "eagle": {"depth": 3},
    "eagle3": {"depth": 3, "feature_layers": [0, -1]},
    "mtp": {"depth": 3, "num_layers": 3},
}
TURNS = [
    ("goes on", [4, 5, 6, 7]),
    ("goes on", [1]),
    ("edited", [9, 8]),
    ("goes on", []),
    ("shorter", []),
    ("other", []),
]


def decoder_of(target, kind, tree="dynamic:9:3:3", **options):
    """With a head whose drafts are now right, now wrong."""
    options = {"adaptive": False} | options
    if kind in HEADS:
        head = head_for(target, kind, 0.1, seed=2, **HEADS[kind])
        return SpeculativeLM.from_pretrained(target, head, tree=tree, **options)
    if kind == "a model":
        return SpeculativeLM(target, make_drafter(target, target, "branch:2x2"))
    return SpeculativeLM.from_pretrained(target, drafter=kind, **options)


def prompts(texts):
    """What each turn asks, of what the turns before have made."""
    text = yield [3, 1, 4, 1, 5, 9, 2, 6]
    for kind, more in texts:
        if kind == "edited":
            text = text[: len(text) // 2]
        if kind == "shorter":
            text = text[:5]
        if kind == "other":
            text = [13, 12, 11]
        text = yield [*text, *more]


def turn(lm, text, past=None, **settings):
    settings = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None} | settings
    return lm.generate(torch.tensor([text]), past_key_values=past, **settings)


@pytest.mark.parametrize("kind", [*HEADS, "prompt-lookup", "a model", None])
def test_every_turn_is_that_of_a_fresh_call(target, monkeypatch, kind):
    lm, fresh, past = decoder_of(target, kind), decoder_of(target, kind), Conversation()
    read = calls_of(monkeypatch, target.engine, "read_chunk")
    asked, text, best = prompts(TURNS), None, 0.0
    before: list[int] = []
    for _ in range(len(TURNS) + 1):
        text = asked.send(text)
        expected = turn(fresh, text)
        read.clear()
        output = turn(lm, text, past)
        assert torch.equal(output.sequences, expected.sequences)
        assert output.stats.rows == expected.stats.rows  # so the drafts were the same
        shared = shared_length([before, text])
        known = shared - 1 if shared > 1 else 0
        assert sum(tokens.shape[1] for tokens, *_ in read) == len(text) - known
        text = before = output.sequences[0].tolist()
        assert past.tokens == text and past.get_seq_length() == len(text) - 1
        best = max(best, output.stats.acceptance_length)
    assert kind is None or best > 1.1


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_what_a_head_was_not_shown_yet_goes_along(target, monkeypatch, kind):
    """Drafts are asked for in the third turn first, whose state is that of a head that has read all
    at once."""
    lm = SpeculativeLM(target, decoder_of(target, kind, "chain:3", adaptive=True).drafter.other)
    eager = decoder_of(target, kind, "chain:3")
    past = Conversation()
    choices = itertools.chain([0] * (2 * NEW - 2), itertools.repeat(1))
    monkeypatch.setattr(adaptive, "choose", lambda record: Choice(next(choices)))
    text = [3, 1, 4, 1, 5]
    for number in range(3):
        output, expected = turn(lm, text, past), turn(eager, text)
        assert torch.equal(output.sequences, expected.sequences)
        assert output.stats.plain_rounds == (NEW - 1 if number < 2 else 0)
        text = [*output.sequences[0].tolist(), 7]
    assert output.stats.rows == expected.stats.rows


def test_other_weights_or_another_decoder_read_the_text_again(target):
    lm, past = decoder_of(target, "eagle3"), Conversation()
    text = turn(lm, [3, 1, 4], past).sequences[0].tolist()
    with torch.no_grad():
        target.model.get_parameter("lm_head.weight")[5] += 1
        target.model.get_parameter("model.layers.0.self_attn.v_proj.weight").mul_(1.5)
    second = turn(lm, [*text, 5], past)
    assert torch.equal(second.sequences, turn(lm, [*text, 5]).sequences)
    other, text = decoder_of(target, "medusa"), second.sequences[0].tolist()
    assert torch.equal(turn(other, [*text, 2], past).sequences, turn(other, [*text, 2]).sequences)


def test_a_call_that_failed_leaves_nothing_behind(target):
    lm, past = decoder_of(target, "eagle3"), Conversation()
    text = turn(lm, [3, 1, 4], past).sequences[0].tolist()
    lm.observers.append(EachRound(lambda out: 1 / 0 if out.tokens > 4 else None))
    with pytest.raises(ZeroDivisionError):
        turn(lm, [*text, 5], past)
    lm.observers.clear()
    assert past.get_seq_length() == 0
    assert torch.equal(turn(lm, [*text, 5], past).sequences, turn(lm, [*text, 5]).sequences)


class Reads(Drafter):
    """A drafter of somebody else's, that keeps what it read to itself."""

    max_nodes = 2

    def __init__(self, feature_layers):
        self.feature_layers = feature_layers

    def begin(self, context):
        self.read = []

    def prefill(self, chunk):
        assert not self.feature_layers or chunk.features_BTF.shape[-1] > 0
        self.read += chunk.next_tokens_BT[0, : int(chunk.lengths_B[0])].tolist()

    def propose(self, roots_B):
        return DraftTree.of_shape(
            TreeShape.chain(1), torch.stack([roots_B, (roots_B + 1) % VOCAB], dim=1)
        )


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("layers", [(0,), ()])
def test_a_drafter_without_a_memory_is_shown_the_text_again(target, layers):
    drafter, past = Reads(layers), Conversation()
    lm = SpeculativeLM.from_pretrained(target, drafter=drafter)
    text = [*turn(lm, [3, 1, 4], past).sequences[0].tolist(), 5]
    output = turn(lm, text, past).sequences
    assert drafter.read == output[0, 1 : len(text) + 1].tolist()
    assert torch.equal(output, turn(lm, text).sequences)


@pytest.mark.parametrize(
    ("kind", "slots"),
    [
        *((kind, None) for kind in (*HEADS, "prompt-lookup", "a model", None)),
        *((kind, 2) for kind in ("eagle3", "a model", None)),
    ],
)
def test_what_prompts_share_is_read_once(target, monkeypatch, kind, slots):
    """A long beginning that all have, and prompts that are alike; every row writes what it writes
    alone."""
    beginning = random_ids(VOCAB, 40).tolist()
    rows = [[*beginning, *more] for more in ([1], [2, 3, 4], [1], [2, 3, 4], [5, 6])]
    lm, alone = decoder_of(target, kind), decoder_of(target, kind)
    expected = [accepted(turn(alone, row))[0] for row in rows]
    read = calls_of(monkeypatch, target.engine, "read_chunk")
    settings = {"max_new_tokens": NEW, "eos_token_id": None, "max_batch_size": slots}
    output = check_identity(lm, list(map(torch.tensor, rows)), **settings)
    assert sorted(accepted(output)) == sorted(expected)
    if slots is None:
        longest = max(map(len, rows))
        assert sum(tokens.numel() for tokens, *_ in read) == 39 + 3 * (longest - 39)
