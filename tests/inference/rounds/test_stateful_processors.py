"""Logits processors that keep a state are called as in plain decoding: once a token, in order, on
accepted text."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
import torch
from helpers import head_for, other_model, padded_batch, written_alone
from messages import refused, warned
from transformers import (
    InfNanRemoveLogitsProcessor,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from headstart.inference import SpeculativeLM, TreeShape, custom_generate
from headstart.inference.drafters.base import NoDraft
from headstart.inference.rounds import loop
from headstart.inference.rounds.loop import score_accepted
from headstart.inference.rounds.observers import DecodingCall
from headstart.inference.rounds.sequences import Sequences
from headstart.inference.trees.logits import TreeLogitsProcessor
from headstart.inference.trees.sampling import RandomSampler, sampler_by
from headstart.inference.trees.tree import DraftTree
from headstart.inference.trees.verify import RULES, greedy

VOCAB = 40
ROWS = [
    torch.randint(1, VOCAB, (n,), generator=torch.Generator().manual_seed(n)) for n in (3, 12, 1, 7)
]
SHAPE = TreeShape.from_paths([[0], [1], [0, 0], [1, 0], [1, 1], [1, 0, 0], [1, 0, 0, 0]])
PLAIN = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
ENDS = {"repetition_penalty": 1.4, "min_new_tokens": 6, "eos_token_id": [8, 15, 22, 39]}


class Cycle(LogitsProcessor):
    """Allows tokens of 0 to 9, 10 to 19, 20 to 29 and 30 to 39 in turn; counts its calls, as a
    matcher does."""

    def __init__(self):
        self.state, self.started, self.seen = 0, False, []

    def __call__(self, input_ids, scores):
        assert input_ids.shape[0] == scores.shape[0] == 1
        self.seen.append(input_ids[0].tolist())
        if self.started:
            assert int(input_ids[0, -1]) // 10 == self.state, "it was shown a token that it forbids"
            self.state = (self.state + 1) % 4
        self.started = True
        allowed = torch.full_like(scores, -torch.inf)
        allowed[:, self.state * 10 : self.state * 10 + 10] = scores[
            :, self.state * 10 : self.state * 10 + 10
        ]
        return allowed


class CycleByText(LogitsProcessor):
    """The same without a state."""

    def __init__(self, prompt):
        self.prompt = prompt

    def __call__(self, input_ids, scores):
        state = (input_ids.shape[1] - self.prompt) % 4
        allowed = torch.full_like(scores, -torch.inf)
        allowed[:, state * 10 : state * 10 + 10] = scores[:, state * 10 : state * 10 + 10]
        return allowed


def stock(target, row, processor, **settings):
    """What `generate` writes for one row alone."""
    given = {**PLAIN, **settings, "logits_processor": LogitsProcessorList([processor])}
    return written_alone(target.model, row, **given)


def a_head(target):
    return head_for(target, "eagle3", depth=4)


@pytest.mark.parametrize("others", [{}, {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3}])
def test_the_calls_are_those_of_generate(tiny_target, tools, others):
    """Also with processors of transformers' own before it, up to an end token, and with a
    criterion."""
    target, row = tiny_target(vocab_size=VOCAB), ROWS[1]
    free = stock(target, row, Cycle(), **others)

    class Long(StoppingCriteria):
        def __init__(self):
            self.calls = 0

        def __call__(self, input_ids, scores, **_):
            self.calls += 1
            return input_ids.shape[1] - len(row) >= 11

    for more in ({}, {"eos_token_id": [free[9], 39]}, {"stopping_criteria": True}):
        theirs, ours = Cycle(), Cycle()
        criteria = [Long(), Long()]
        settings = [{**others, **more} for _ in range(2)]
        if more.get("stopping_criteria"):
            for each, criterion in zip(settings, criteria):
                each["stopping_criteria"] = StoppingCriteriaList([criterion])
        expected = stock(target, row, theirs, **settings[0])
        lm = SpeculativeLM(target, tools.Oracle(SHAPE, [free], VOCAB, wrong=0.2))
        given = {**PLAIN, **settings[1], "logits_processor": LogitsProcessorList([ours])}
        output = lm.generate(row[None], attention_mask=torch.ones_like(row[None]), **given)
        assert output.sequences[0, len(row) :].tolist() == expected
        assert ours.seen == theirs.seen and criteria[0].calls == criteria[1].calls
        assert output.stats.acceptance_length > 1.5
    assert len(expected) == 11


@pytest.mark.parametrize(
    ("side", "slots", "others"), [("left", None, {}), ("right", 2, ENDS), ("left", 1, ENDS)]
)
def test_each_row_of_a_batch_has_a_state_of_its_own(tiny_target, side, slots, others):
    target = tiny_target(vocab_size=VOCAB, layers=3)
    truths = [stock(target, row, Cycle(), **others) for row in ROWS]
    assert len({*map(len, truths)}) == (3 if others else 1)
    input_ids, mask = padded_batch(ROWS, side)
    for spec in (
        {"head": a_head(target), "tree": "dynamic:9:3:3"},
        {"head": head_for(target, "medusa", num_heads=3), "tree": "branch:2x2"},
        {"drafter": "prompt-lookup"},
        {"head": a_head(target), "tree": "drawn:branch:2x2"},
    ):
        lm = SpeculativeLM.from_pretrained(target, adaptive=False, **spec)
        given = {**PLAIN, **others, "logits_processor": LogitsProcessorList([Cycle()])}
        written = lm.generate(input_ids, attention_mask=mask, max_batch_size=slots, **given)
        for found, truth in zip(written.sequences[:, input_ids.shape[1] :].tolist(), truths):
            assert found[: len(truth)] == truth and not any(found[len(truth) :])


@pytest.mark.parametrize("tree", ["chain:3", "dynamic:9:3:3", "drawn:chain:3", "drawn:branch:2x2"])
def test_sampled_text_is_that_of_a_processor_without_a_state(tiny_target, tree):
    target, row = tiny_target(vocab_size=VOCAB, layers=3), ROWS[3][None]
    lm = SpeculativeLM.from_pretrained(target, head=a_head(target), tree=tree, adaptive=False)
    texts = []
    for processor in (Cycle(), CycleByText(row.shape[1]), Cycle()):
        given = {
            **PLAIN,
            "do_sample": True,
            "temperature": 1.5,
            "generator": torch.Generator().manual_seed(5),
        }
        texts.append(
            lm.generate(
                row, **given, logits_processor=LogitsProcessorList([processor])
            ).sequences.tolist()
        )
    assert texts[0] == texts[1] == texts[2]
    if not tree.startswith("drawn"):  # the text of a seed is the same whatever was drafted
        plain = SpeculativeLM(target)
        given["generator"] = torch.Generator().manual_seed(5)
        assert (
            texts[0] == plain.generate(row, **given, logits_processor=[Cycle()]).sequences.tolist()
        )


def chain_tree(rows, depth, draws):
    """A chain with the distributions that its tokens were drawn from."""
    probs_BNV = torch.rand(rows, depth + 1, VOCAB, generator=draws).softmax(-1)
    tokens_BN = torch.randint(VOCAB, (rows, depth + 1), generator=draws)
    parents_BN = torch.arange(-1, depth).expand(rows, -1)
    sizes_B = torch.full((rows,), depth + 1)
    shape = TreeShape.chain(depth)
    return DraftTree(
        tokens_BN, parents_BN, sizes_B, depth, "sampled_chain", probs_BNV, shape, False, True
    )


@pytest.mark.parametrize(
    "name", ["greedy", *[name for name, rule in RULES.items() if rule.top_down]]
)
def test_scoring_one_by_one_leads_to_the_verdict_of_scoring_all_nodes(tiny_target, name):
    target, prompts, moved = tiny_target(vocab_size=VOCAB), ROWS[:2], 0
    rule = greedy if name == "greedy" else RULES[name].verify
    for seed in range(30):
        draws = torch.Generator().manual_seed(seed)
        tree = chain_tree(2, 4, draws)
        logits_BNV = torch.randn(2, 5, VOCAB, generator=draws)
        for node in range(1, 5):  # likely to be accepted
            logits_BNV[torch.arange(2), node - 1, tree.tokens_BN[:, node]] += 4
        shift_VV = torch.randn(VOCAB, VOCAB, generator=draws)

        class Own(LogitsProcessor):
            def __call__(self, input_ids, scores):
                return scores + shift_VV[input_ids[:, -1]]  # noqa: B023 - used within this turn of the loop

        process = TreeLogitsProcessor(LogitsProcessorList([Own()]), [0, 0])
        sequences = Sequences(prompts, 50, frozenset())
        for row in range(2):
            sequences.rows[row] = [int(tree.tokens_BN[row, 0])]
        uniform_BU = torch.rand(2, 99, generator=draws, dtype=torch.float64)
        scores_BNV = process(logits_BNV, tree, sequences.text, [0, 1])
        call = DecodingCall(target, NoDraft(), rule, process, RandomSampler(), sequences)
        score_accepted(call, tree, scores_BNV, uniform_BU)
        ours = rule(tree, scores_BNV, sampler_by(uniform_BU))
        whole = rule(tree, logits_BNV + shift_VV[tree.tokens_BN], sampler_by(uniform_BU))
        assert torch.equal(ours.lengths_B, whole.lengths_B) and torch.equal(
            ours.next_tokens_B, whole.next_tokens_B
        )
        moved += int((ours.lengths_B > 1).sum())
        assert process.calls == int(ours.lengths_B.sum())
    assert moved > 10


@pytest.mark.parametrize("acceptance", ["block", "traversal", "typical"])
def test_rules_that_need_the_scores_of_rejected_drafts_are_refused(tiny_target, acceptance):
    target = tiny_target(vocab_size=VOCAB, layers=3)
    lm = SpeculativeLM.from_pretrained(
        target,
        head=a_head(target),
        tree="drawn:chain:2",
        acceptance=acceptance,
        lossy=True,
        adaptive=False,
    )
    sampled = {**PLAIN, "do_sample": True}
    for own in (
        {"logits_processor": [Cycle()]},
        {"prefix_allowed_tokens_fn": lambda row, text: [1, 2, 3]},
    ):
        with refused(f"'{acceptance}' 'token'"):
            lm.generate(ROWS[0][None], **sampled, **own)
    lm.generate(ROWS[0][None], **sampled)  # they are fine without
    lm.generate(ROWS[0][None], **PLAIN, logits_processor=[Cycle()])


def test_a_processor_that_cannot_be_copied_gives_one_for_each_row(tiny_target):
    target = tiny_target(vocab_size=VOCAB)
    input_ids, mask = padded_batch(ROWS)

    class Locked(Cycle):
        def __init__(self):
            super().__init__()
            self.lock = threading.Lock()

    class Rows(Locked):
        def for_row(self, row):
            assert 0 <= row < len(ROWS)
            return Locked()

    lm = SpeculativeLM.from_pretrained(target, drafter="prompt-lookup", adaptive=False)
    one = stock(target, ROWS[0], Cycle())
    assert (
        lm.generate(ROWS[0][None], logits_processor=[Locked()], **PLAIN).sequences[0, 3:].tolist()
        == one
    )
    with refused("Locked 4 for_row"):
        lm.generate(input_ids, attention_mask=mask, logits_processor=[Locked()], **PLAIN)
    written = lm.generate(
        input_ids, attention_mask=mask, logits_processor=[Rows()], **PLAIN
    ).sequences[:, input_ids.shape[1] :]
    assert written.tolist() == [stock(target, row, Cycle()) for row in ROWS]


def test_models_and_tokenizers_of_a_processor_are_not_copied(tiny_target, tokenizer):
    class Heavy(Cycle):
        def __init__(self, model):
            super().__init__()
            self.model, self.tokenizer, self.table = model, tokenizer, [1, 2]

    one, two = TreeLogitsProcessor([Heavy(tiny_target().model)], [0, 1])._own_of_rows.popitem()[1]
    assert one.model is two.model and one.tokenizer is two.tokenizer and one.table is not two.table


def test_a_constraint_may_keep_a_state(tiny_target, tools):
    target, row = tiny_target(vocab_size=VOCAB), ROWS[1]

    def counting():
        calls = []

        def allowed(_, text):
            calls.append(len(text))
            return [(7 * len(calls) + step) % VOCAB for step in range(6)]

        return allowed, calls

    (theirs, their_calls), (ours, our_calls) = counting(), counting()
    given = {"attention_mask": torch.ones_like(row[None]), **PLAIN}
    expected = target.model.generate(row[None], prefix_allowed_tokens_fn=theirs, **given)
    lm = SpeculativeLM(
        target, tools.Oracle(SHAPE, [expected[0, len(row) :].tolist()], VOCAB, wrong=0.1)
    )
    assert torch.equal(
        lm.generate(row[None], prefix_allowed_tokens_fn=ours, **given).sequences, expected
    )
    assert our_calls == their_calls


def test_by_plain_generate_it_is_called_alike(tiny_target):
    target, row = tiny_target(vocab_size=VOCAB), ROWS[1][None]
    expected = stock(target, ROWS[1], Cycle())
    method = custom_generate(drafter="prompt-lookup", adaptive=False)
    given = {**PLAIN, "attention_mask": torch.ones_like(row)}
    written = target.model.generate(
        row, custom_generate=method, logits_processor=LogitsProcessorList([Cycle()]), **given
    )
    assert written[0, row.shape[1] :].tolist() == expected


def test_memory_that_runs_out_after_a_call_is_told(tiny_target, monkeypatch):
    """The round cannot begin again: the processor has read the newest token."""
    target = tiny_target(vocab_size=VOCAB, layers=3)
    lm = SpeculativeLM.from_pretrained(target, head=a_head(target), tree="chain:3", adaptive=False)
    verify, calls = loop.verify_and_commit, []

    def full(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise torch.OutOfMemoryError
        return verify(*arguments)

    monkeypatch.setattr(loop, "verify_and_commit", full)
    with pytest.raises(torch.OutOfMemoryError):
        lm.generate(ROWS[0][None], logits_processor=[Cycle()], **PLAIN)
    calls.clear()
    with warned("memory"):
        lm.generate(ROWS[0][None], **PLAIN)


def test_logits_that_are_no_numbers_are_shown_to_no_processor(tiny_target):
    """It could not be shown the same text again; only where `remove_invalid_values` mends them it
    sees them."""
    cycle = Cycle()
    process = TreeLogitsProcessor(LogitsProcessorList([cycle]), [0])
    broken_V = torch.full((VOCAB,), torch.nan)
    assert process.score_next(0, torch.tensor([1]), broken_V).isnan().all()
    assert cycle.seen == [] and process.calls == 0
    mending = TreeLogitsProcessor(LogitsProcessorList([InfNanRemoveLogitsProcessor(), cycle]), [0])
    assert not mending.score_next(0, torch.tensor([1]), broken_V).isnan().any() and cycle.seen == [
        [1]
    ]


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
