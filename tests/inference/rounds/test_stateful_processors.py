"""Logits processors that keep a state are called as in plain decoding: once a token, in order, on
accepted text."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
import torch
from helpers import (
    Oracle,
    check_identity,
    continued,
    head_for,
    other_model,
    random_rows,
    written_alone,
)
from messages import refused
from transformers import InfNanRemoveLogitsProcessor, LogitsProcessor, StoppingCriteria

from headstart.inference import SpeculativeLM, TreeShape, custom_generate
from headstart.inference.drafters.base import NoDraft
from headstart.inference.rounds.loop import score_accepted
from headstart.inference.rounds.observers import DecodingCall
from headstart.inference.rounds.sequences import Sequences
from headstart.inference.trees.logits import TreeLogitsProcessor
from headstart.inference.trees.sampling import RandomSampler, sampler_by
from headstart.inference.trees.tree import DraftTree
from headstart.inference.trees.verify import RULES, greedy

VOCAB = 40
ROWS = random_rows(VOCAB, [3, 12, 1, 7])
SHAPE = TreeShape.from_paths([[0], [1], [0, 0], [1, 0], [1, 1], [1, 0, 0], [1, 0, 0, 0]])
ENDS = {"repetition_penalty": 1.4, "min_new_tokens": 6, "eos_token_id": [8, 15, 22, 39]}


@pytest.fixture
def target40(tiny_target):
    return tiny_target(vocab_size=VOCAB)


@pytest.fixture
def eagle3(target40):
    return head_for(target40, "eagle3", depth=4)


def only_tens(scores, state):
    """Scores without the tokens outside of 10 * state to 10 * state + 9."""
    tens = slice(state * 10, state * 10 + 10)
    allowed = torch.full_like(scores, -torch.inf)
    allowed[:, tens] = scores[:, tens]
    return allowed


class Cycle(LogitsProcessor):
    """Allows tokens of 0 to 9, 10 to 19, 20 to 29 and 30 to 39 in turn; counts its calls, as a
    matcher does."""

    def __init__(self):
        self.state = 0
        self.seen = []

    def __call__(self, input_ids, scores):
        assert input_ids.shape[0] == scores.shape[0] == 1
        if self.seen:
            assert int(input_ids[0, -1]) // 10 == self.state, "it was shown a token that it forbids"
            self.state = (self.state + 1) % 4
        self.seen.append(input_ids[0].tolist())
        return only_tens(scores, self.state)


class CycleByText(LogitsProcessor):
    """The same without a state."""

    def __init__(self, prompt):
        self.prompt = prompt

    def __call__(self, input_ids, scores):
        return only_tens(scores, (input_ids.shape[1] - self.prompt) % 4)


def in_cycle(target, row, **settings):
    """What `generate` writes for one row alone."""
    return written_alone(target.model, row, logits_processor=[Cycle()], **settings)


class Long(StoppingCriteria):
    """Ends a text of so many tokens; counts its calls."""

    def __init__(self, tokens):
        self.tokens = tokens
        self.calls = 0

    def __call__(self, input_ids, scores, **_):
        self.calls += 1
        return input_ids.shape[1] >= self.tokens


@pytest.mark.parametrize("others", [{}, {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3}])
@pytest.mark.parametrize("end", ["length", "token", "criterion"])
def test_the_calls_are_those_of_generate(target40, others, end):
    """Also with processors of transformers' own before it, up to an end token, and with a
    criterion."""
    row = ROWS[1]
    free = in_cycle(target40, row, **others)
    lm = SpeculativeLM(target40, Oracle(SHAPE, [free], VOCAB, wrong=0.2))
    processors = [Cycle(), Cycle()]
    criteria = [Long(len(row) + 11), Long(len(row) + 11)]
    settings = []
    for processor, criterion in zip(processors, criteria, strict=True):
        ends = {
            "length": {},
            "token": {"eos_token_id": [free[9], 39]},
            "criterion": {"stopping_criteria": [criterion]},
        }
        settings.append({**others, **ends[end], "logits_processor": [processor]})
    expected = written_alone(target40.model, row, **settings[0])
    texts, output = continued(lm, [row], **settings[1])
    assert texts == [expected]
    assert processors[0].seen == processors[1].seen and criteria[0].calls == criteria[1].calls
    assert output.stats.acceptance_length > 1.5
    assert len(expected) == (11 if end == "criterion" else 20) or end == "token"


@pytest.mark.parametrize(
    ("side", "slots", "others"), [("left", None, {}), ("right", 2, ENDS), ("left", 1, ENDS)]
)
def test_each_row_of_a_batch_has_a_state_of_its_own(target40, eagle3, side, slots, others):
    truths = [in_cycle(target40, row, **others) for row in ROWS]
    assert len({*map(len, truths)}) == (4 if others else 1)
    for spec in (
        {"head": eagle3, "tree": "dynamic:9:3:3"},
        {"head": head_for(target40, "medusa", num_heads=3), "tree": "branch:2x2"},
        {"drafter": "prompt-lookup"},
        {"head": eagle3, "tree": "drawn:branch:2x2"},
    ):
        lm = SpeculativeLM.from_pretrained(target40, adaptive=False, **spec)
        settings = {**others, "logits_processor": [Cycle()], "max_batch_size": slots}
        texts, _ = continued(lm, ROWS, side, **settings)
        for text, truth in zip(texts, truths, strict=True):
            assert text[: len(truth)] == truth and not any(text[len(truth) :])


@pytest.mark.parametrize("tree", ["chain:3", "dynamic:9:3:3", "drawn:chain:3", "drawn:branch:2x2"])
def test_sampled_text_is_that_of_a_processor_without_a_state(target40, eagle3, tree):
    row = ROWS[3]
    lm = SpeculativeLM.from_pretrained(target40, eagle3, tree=tree, adaptive=False)

    def sampled(lm, processor):
        draws = torch.Generator().manual_seed(5)
        settings = {"do_sample": True, "temperature": 1.5, "generator": draws}
        return continued(lm, [row], logits_processor=[processor], **settings)[0]

    expected = sampled(lm, CycleByText(len(row)))
    assert sampled(lm, Cycle()) == expected
    if not tree.startswith("drawn"):  # the text of a seed is the same whatever was drafted
        assert sampled(SpeculativeLM(target40), Cycle()) == expected


def random_chain(rows, depth, draws):
    """A chain with the distributions that its tokens were drawn from."""
    probs_BNV = torch.rand(rows, depth + 1, VOCAB, generator=draws).softmax(-1)
    tokens_BN = torch.randint(VOCAB, (rows, depth + 1), generator=draws)
    return DraftTree.of_shape(TreeShape.chain(depth), tokens_BN, "sampled_chain", probs_BNV)


class Shifted(LogitsProcessor):
    """Adds scores that depend on the newest token."""

    def __init__(self, shift_VV):
        self.shift_VV = shift_VV

    def __call__(self, input_ids, scores):
        return scores + self.shift_VV[input_ids[:, -1]]


@pytest.mark.parametrize(
    "name", ["greedy", *[name for name, rule in RULES.items() if rule.top_down]]
)
def test_scoring_one_by_one_leads_to_the_verdict_of_scoring_all_nodes(target40, name):
    rule = greedy if name == "greedy" else RULES[name].verify
    accepting_rows = 0
    for seed in range(30):
        draws = torch.Generator().manual_seed(seed)
        tree = random_chain(2, 4, draws)
        logits_BNV = torch.randn(2, 5, VOCAB, generator=draws)
        for node in range(1, 5):  # likely to be accepted
            logits_BNV[torch.arange(2), node - 1, tree.tokens_BN[:, node]] += 4
        shift_VV = torch.randn(VOCAB, VOCAB, generator=draws)
        process = TreeLogitsProcessor([Shifted(shift_VV)], [0, 0])
        sequences = Sequences(ROWS[:2], 50, frozenset())
        for row in range(2):
            sequences.rows[row] = [int(tree.tokens_BN[row, 0])]
        uniform_BU = torch.rand(2, 99, generator=draws, dtype=torch.float64)
        scores_BNV = process(logits_BNV, tree, sequences.text, [0, 1])
        call = DecodingCall(target40, NoDraft(), rule, process, RandomSampler(), sequences)
        score_accepted(call, tree, scores_BNV, uniform_BU)
        ours = rule(tree, scores_BNV, sampler_by(uniform_BU))
        whole = rule(tree, logits_BNV + shift_VV[tree.tokens_BN], sampler_by(uniform_BU))
        assert torch.equal(ours.lengths_B, whole.lengths_B)
        assert torch.equal(ours.next_tokens_B, whole.next_tokens_B)
        assert process.calls == int(ours.lengths_B.sum())
        accepting_rows += int((ours.lengths_B > 1).sum())
    assert accepting_rows > 10


@pytest.mark.parametrize("acceptance", ["block", "traversal", "typical"])
def test_rules_that_need_the_scores_of_rejected_drafts_are_refused(target40, eagle3, acceptance):
    options = {"acceptance": acceptance, "lossy": True, "adaptive": False}
    lm = SpeculativeLM.from_pretrained(target40, eagle3, tree="drawn:chain:2", **options)
    for own in (
        {"logits_processor": [Cycle()]},
        {"prefix_allowed_tokens_fn": lambda row, text: [1, 2, 3]},
    ):
        with refused(f"'{acceptance}' 'token'"):
            continued(lm, ROWS[:1], do_sample=True, **own)
    continued(lm, ROWS[:1], do_sample=True)  # they are fine without
    continued(lm, ROWS[:1], logits_processor=[Cycle()])


class Locked(Cycle):
    """Cannot be copied."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


class LockedRows(Locked):
    """Makes one for each row."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def for_row(self, row):
        self.rows.append(row)
        return Locked()


def test_a_processor_that_cannot_be_copied_gives_one_for_each_row(target40):
    lm = SpeculativeLM.from_pretrained(target40, drafter="prompt-lookup", adaptive=False)
    expected = [in_cycle(target40, row) for row in ROWS]
    assert continued(lm, ROWS[:1], logits_processor=[Locked()])[0] == expected[:1]
    with refused("Locked 4 for_row"):
        continued(lm, ROWS, logits_processor=[Locked()])
    makes_rows = LockedRows()
    assert continued(lm, ROWS, logits_processor=[makes_rows])[0] == expected
    assert makes_rows.rows == [0, 1, 2, 3]


def test_models_and_tokenizers_of_a_processor_are_not_copied(target40, tokenizer):
    parts = []

    class Heavy(Cycle):
        def __init__(self):
            super().__init__()
            self.model = target40.model
            self.tokenizer = tokenizer
            self.table = [1, 2]

        def __call__(self, input_ids, scores):
            parts.append((id(self.model), id(self.tokenizer), id(self.table)))
            return super().__call__(input_ids, scores)

    continued(SpeculativeLM(target40), ROWS[:2], logits_processor=[Heavy()])
    models, tokenizers, tables = map(set, zip(*parts, strict=True))
    assert models == {id(target40.model)} and tokenizers == {id(tokenizer)}
    assert len(tables) == 2


def test_by_plain_generate_it_is_called_alike(target40):
    method = custom_generate(drafter="prompt-lookup", adaptive=False)
    written = in_cycle(target40, ROWS[1], custom_generate=method)
    assert written == in_cycle(target40, ROWS[1])


def test_memory_that_runs_out_after_a_call_is_told(target40, eagle3):
    """The round cannot begin again: the processor has read the newest token."""

    class Full(Cycle):
        def __call__(self, input_ids, scores):
            allowed = super().__call__(input_ids, scores)
            if len(self.seen) == 5:
                raise torch.OutOfMemoryError
            return allowed

    lm = SpeculativeLM.from_pretrained(target40, eagle3, tree="chain:3", adaptive=False)
    with pytest.raises(torch.OutOfMemoryError):
        continued(lm, ROWS[:1], logits_processor=[Full()])
    check_identity(lm, ROWS[:1])


def test_logits_that_are_no_numbers_are_shown_to_no_processor():
    """It could not be shown the same text again; only where `remove_invalid_values` mends them it
    sees them."""
    cycle = Cycle()
    broken_V = torch.full((VOCAB,), torch.nan)
    process = TreeLogitsProcessor([cycle], [0])
    assert process.score_next(0, torch.tensor([1]), broken_V).isnan().all()
    assert cycle.seen == [] and process.calls == 0
    mending = TreeLogitsProcessor([InfNanRemoveLogitsProcessor(), cycle], [0])
    assert not mending.score_next(0, torch.tensor([1]), broken_V).isnan().any()
    assert cycle.seen == [[1]]


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_grammar_of_xgrammar_writes_what_it_writes_with_generate(
    tiny_target, tokenizer, rows, dtype
):
    xgrammar = pytest.importorskip("xgrammar")
    from xgrammar.contrib.hf import LogitsProcessor as Grammar

    target = tiny_target(dtype=dtype)
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=258, stop_token_ids=[257])
    compiler = xgrammar.GrammarCompiler(info)
    grammars = [
        compiler.compile_regex(text)
        for text in (r"(yes|no), [a-z ]{5,40}\.", r"[0-9]+(, [0-9]+){3,9}")
    ][:rows]
    prompts = torch.randint(0, 256, (rows, 9), generator=torch.Generator().manual_seed(3))
    given = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 256, "eos_token_id": 257}
    expected = [
        target.model.generate(
            row[None],
            attention_mask=torch.ones_like(row[None]),
            logits_processor=[Grammar(one)],
            **given,
        )
        for row, one in zip(prompts, grammars)
    ]
    for spec in (
        {"head": None, "drafter": other_model(target)},
        {"drafter": "prompt-lookup"},
        {"drafter": other_model(target), "tree": "branch:2x2"},
    ):
        lm = SpeculativeLM.from_pretrained(target, adaptive=False, **spec)
        given["logits_processor"] = [Grammar(list(grammars))]
        written = lm.generate(prompts, attention_mask=torch.ones_like(prompts), **given).sequences
        for ours, theirs in zip(written, expected):
            assert ours[: theirs.shape[1]].tolist() == theirs[0].tolist()
    text = tokenizer.decode(written[0, 9:], skip_special_tokens=True)
    assert text.startswith(("yes, ", "no, "))


def test_the_example_of_the_documentation(tiny_target, tokenizer):
    pytest.importorskip("xgrammar")
    page = (Path(__file__).parents[3] / "docs" / "decoding.md").read_text("utf-8")
    (block,) = re.findall(r"```python\n(import xgrammar.*?)```", page, re.DOTALL)
    target = tiny_target(dtype=torch.float32)
    target.model.generation_config.eos_token_id = target.model.generation_config.pad_token_id = 257
    lm = SpeculativeLM.from_pretrained(target, drafter="history", adaptive=False)
    inputs = tokenizer("wind?", return_tensors="pt")
    names = {
        "lm": lm,
        "tokenizer": tokenizer,
        "inputs": {name: inputs[name] for name in ("input_ids", "attention_mask")},
    }
    exec(block, names)
    answer = tokenizer.decode(names["out"].sequences[0, 5:], skip_special_tokens=True)
    assert re.match(r'\{\s*"wind"\s*:\s*-?\d', answer)
