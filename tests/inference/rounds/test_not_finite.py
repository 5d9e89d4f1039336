"""NaN and inf in heads, in drafted tokens and in what they leave behind: the text is the target's
all the same."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from helpers import (
    Oracle,
    Proposals,
    build_model,
    check_identity,
    continued,
    head_for,
    pairs,
    random_rows,
    written_alone,
)
from messages import refused
from transformers import LogitsProcessor

from headstart.heads import HEADS
from headstart.heads.layers.masked_attention import masked_attention
from headstart.inference import Conversation, SpeculativeLM, Target, TreeShape
from headstart.inference.drafters.by_name import make_drafter
from headstart.inference.drafters.history import Trie, draft_tree, with_tries
from headstart.inference.engines.cpu_decoder import CpuEngine, is_packed, packed_head
from headstart.inference.rounds.prefill import padded_prompts

VOCAB = 24
BAD = 0
"""`BAD`: a token that the target never says, and whose embedding was never trained."""
TREES = (
    "dynamic:8:3:3",
    "branch:2x1",
    "stop:0.1:chain:3",
    "drawn:branch:2x1",
    "independent:branch:2x1",
)


def kernel_model(dtype=torch.float32):
    """A random model of dimensions that the CPU kernels take."""
    model = build_model(
        VOCAB, layers=3, dtype=dtype, head_dim=32, hidden_size=64, intermediate_size=96
    )
    return model.requires_grad_(False)


def spoil(model, value=math.nan) -> None:
    """Plain decoding never reads the token's embedding, because it never says the token."""
    model.get_input_embeddings().weight.data[BAD] = value
    model.lm_head.weight.data[BAD] = 0
    model.lm_head.weight.data[BAD, 0] = -1e-30  # below the best of the others


class Poisoned(Oracle):
    """The last draft is the token that the target must not be asked about."""

    poisons = True

    def _row(self, root, written, truth):
        row = super()._row(root, written, truth)
        if self.poisons:
            row[-1] = BAD
        return row


# Heads


@functools.cache
def healthy(compile):
    """A target that no test changes, its greedy texts, and its samples by a seed."""
    target = Target(kernel_model())
    if compile:
        target.compile()
    rows = random_rows(VOCAB, [6, 3])
    lm = SpeculativeLM(target)
    return target, rows, continued(lm, rows)[0], sampled(lm, rows)


def sampled(lm, rows):
    """The texts of a seed."""
    return continued(lm, rows, do_sample=True, generator=torch.Generator().manual_seed(3))[0]


@pytest.mark.parametrize(
    ("kind", "value", "compile"), pairs(HEADS, [math.nan, math.inf], [False, True])
)
def test_a_head_whose_weights_are_not_finite_changes_nothing(kind, value, compile):
    target, rows, greedy, samples = healthy(compile)
    assert greedy == [written_alone(target.model, row) for row in rows]
    head = head_for(target, kind)
    matrices = [weight for weight in head.parameters() if weight.ndim == 2]
    matrices[0 if value == math.inf else -1].data[-1] = value
    for tree in TREES:
        lm = SpeculativeLM.from_pretrained(target, head, tree=tree, compile=compile, adaptive=False)
        assert continued(lm, rows)[0] == greedy, tree
        if not tree.startswith(("drawn", "independent")):
            assert sampled(lm, rows) == samples, tree
    lm = SpeculativeLM.from_pretrained(
        target, head, tree=TREES[0], drafter="prompt-lookup", compile=compile
    )
    assert continued(lm, rows)[0] == greedy


# Drafted tokens


SHAPES = {
    "chain": TreeShape.chain(3),
    "branches": TreeShape.from_paths([[0], [1], [0, 0], [1, 0], [1, 1]]),
}


ENGINES = ("float64", "sdpa", "eager", "kernels", "bfloat16 kernels")


@pytest.mark.parametrize(
    ("options", "value", "shape"), pairs(ENGINES, [math.nan, math.inf, -math.inf], SHAPES)
)
def test_a_draft_for_which_the_target_computes_nan_leaves_nothing_behind(options, shape, value):
    dtype = {"float64": torch.float64, "bfloat16 kernels": torch.bfloat16}.get(
        options, torch.float32
    )
    model = kernel_model(dtype)
    spoil(model, value)
    if options == "eager":
        model.set_attn_implementation("eager")
    target = Target(model)
    if "kernels" in options:
        target.compile()
        assert isinstance(target.engine, CpuEngine)
    for rows in (random_rows(VOCAB, [7]), random_rows(VOCAB, [9, 2, 5])):
        truths = [continued(SpeculativeLM(target), [row])[0][0] for row in rows]
        if dtype != torch.bfloat16:
            assert truths == [written_alone(model, row) for row in rows]
        assert not any(BAD in truth for truth in truths)
        drafter = Poisoned(SHAPES[shape], truths, VOCAB, wrong=0.3)
        lm = SpeculativeLM(target, drafter)
        shown = Proposals()
        lm.observers.append(shown)
        found, output = continued(lm, rows)
        assert found == truths
        assert {record.fallback for row in output.stats.rows for record in row} == {"not_finite"}
        assert {len(nodes) for roots in shown.drafts for nodes in roots} == {1}  # the round again
        drafter.poisons = False
        found, output = continued(lm, rows)  # in the blocks of the call before
        assert found == truths and output.stats.acceptance_length > 1.3


@pytest.mark.parametrize("compile", [False, True])
def test_a_conversation_goes_on_where_nan_was_left_after_its_text(compile):
    """By a prompt that the packed or causal prefill reads, after a text that was cut or goes on."""
    model = kernel_model()
    lm = SpeculativeLM.from_pretrained(Target(model), compile=compile)
    row = random_rows(VOCAB, [9])[0]
    past = Conversation()
    [first], _ = continued(lm, [row], past_key_values=past)
    longer = torch.cat([row, torch.tensor([*first, 4, 5])])
    shorter = torch.cat([row[:6], torch.tensor([3, 3])])
    for prompt in (longer, shorter):
        with torch.inference_mode():
            for states in (*past.cache.keys, *past.cache.values):
                states[:, :, len(past.tokens) - 1 :] = math.nan
        check_identity(lm, [prompt], past_key_values=past)


def test_a_path_is_cut_before_a_node_that_is_not_finite(tiny_target, monkeypatch):
    """Where attention skips what is masked, NaN stays in one path: what was accepted before it
    stands."""
    target = tiny_target(vocab_size=VOCAB)
    row = random_rows(VOCAB, [6])[0]
    truth = written_alone(target.model, row)
    forward, broken = target.engine.forward_tree, []

    def spoiled(tree, *given):
        output = forward(tree, *given)
        if tree.tokens_BN.shape[1] > 3:
            output.logits_BNV[:, 2] = math.nan
            broken.append(1)
        return output

    monkeypatch.setattr(target.engine, "forward_tree", spoiled)
    lm = SpeculativeLM(target, Oracle(TreeShape.chain(4), [truth], VOCAB, wrong=0.0))
    found, output = continued(lm, [row])
    assert found == [truth] and broken
    assert {record.accepted for record in output.stats.rows[0][:-1]} == {1}
    assert len(broken) == len(output.stats.rows[0])


# What heads and draft models keep


CACHED = {kind: head for kind, head in HEADS.items() if kind not in ("medusa", "hydra")}


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("kind", CACHED)
def test_a_head_keeps_nothing_of_rejected_nan(kind, compile):
    """Neither of a draft's embedding, nor of features and tokens after what a row accepted."""
    model = kernel_model()
    model.get_input_embeddings().weight.data[BAD] = math.nan
    target = Target(model)
    options = {"num_layers": 2} if kind == "eagle" else {}
    head = head_for(target, kind, 0.05, **options)
    if compile:
        head = packed_head(head)
        assert is_packed(head)
    width = len(head.feature_layers) * target.info.hidden_size
    torch.manual_seed(3)
    prompt_1TF, accepted_1AF = torch.randn(1, 6, width), torch.randn(1, 4, width)

    @torch.inference_mode()
    def drafts(broken):
        """Logits of a healthy sibling of a broken draft, and of the next round's first drafts."""
        token = BAD if broken else 7
        state = head.begin(target.modules, 1, 40, 3, 9)
        state = head.observe(
            state, prompt_1TF, torch.tensor([[5, 6, 7, 8, 9, 3]]), torch.tensor([6])
        )
        _, state = head.expand(state, torch.tensor([[3]]), torch.tensor([[-1]]))
        logits_BWV, state = head.expand(state, torch.tensor([[token, 4]]), torch.tensor([[0, 0]]))
        sibling_V = logits_BWV[0, -1]
        _, state = head.expand(state, torch.tensor([[2, token]]), torch.tensor([[0, 1]]))
        features_1AF = accepted_1AF.clone()
        features_1AF[:, 2] = math.nan if broken else 0
        state = head.observe(
            state, features_1AF, torch.tensor([[4, 2, token, token]]), torch.tensor([2])
        )
        first_BWV, state = head.expand(state, torch.tensor([[2]]), torch.tensor([[-1]]))
        second_BWV, _ = head.expand(state, torch.tensor([[6, 5]]), torch.tensor([[0, 0]]))
        return sibling_V, first_BWV, second_BWV

    for mine, its in zip(drafts(True), drafts(False), strict=True):
        assert bool(its.isfinite().all())
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6)


def test_a_draft_model_drafts_again_after_a_token_that_is_nan_for_it(tiny_target):
    target, small = tiny_target(vocab_size=VOCAB), tiny_target(vocab_size=VOCAB)
    small.model.get_input_embeddings().weight.data[BAD] = math.nan
    row = random_rows(VOCAB, [7])[0]
    truth = written_alone(target.model, row)
    assert BAD not in truth
    drafter = make_drafter(target, small, "branch:3x2x1", adaptive=False)
    expand, calls = drafter.head.expand, []

    def expanded(state, tokens_BW, parents_BW):
        logits_BWV, state = expand(state, tokens_BW, parents_BW)
        calls.append(1)
        # in the first round it drafts the token beside the best one, and reads both
        if len(calls) == 2:
            logits_BWV = logits_BWV.clone()
            logits_BWV[..., BAD] = logits_BWV.amax(-1) + 1
        return logits_BWV, state

    drafter.head.expand = expanded
    found, output = continued(SpeculativeLM(target, drafter), [row])
    assert found == [truth]
    assert output.stats.rows[0][1].accepted == 3  # of 3: the model is the target


def test_padding_is_a_token_of_the_text():
    """Which is read: another token might be one for which the target computes NaN."""
    rows = [torch.tensor([5, 6, 7]), torch.tensor([8])]
    assert padded_prompts(rows, torch.device("cpu")).tolist() == [[5, 6, 7], [8, 8, 8]]
    large = Trie([4])
    large.add([1, 2])
    large.add([3])
    tree = draft_tree([Trie([9]), large], torch.device("cpu"))
    assert tree.tokens_BN[0].tolist() == [9] * 4 and tree.sizes_B.tolist() == [1, 4]
    plain = draft_tree([Trie([9]), Trie([4])], torch.device("cpu"))
    assert with_tries(plain, [None, large], 6).tokens_BN[0].tolist() == [9] * 6


# The target's own numbers


@pytest.mark.parametrize("compile", [False, True])
def test_an_infinite_logit_is_the_best_one_and_cannot_be_sampled(compile):
    model = kernel_model()
    model.lm_head = torch.nn.Linear(64, VOCAB).requires_grad_(False)
    model.lm_head.bias.data[9] = math.inf
    lm = SpeculativeLM.from_pretrained(Target(model), drafter="prompt-lookup", compile=compile)
    row = random_rows(VOCAB, [5])[0]
    assert written_alone(model, row) == [9] * 20
    assert continued(lm, [row])[0] == [[9] * 20]
    with refused("target logits 0 row infinite"):
        continued(lm, [row], do_sample=True)


def test_nan_of_a_processor_is_not_said_to_be_the_targets(tiny_target):
    class Broken(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return torch.full_like(scores, math.nan)

    target = tiny_target(vocab_size=VOCAB)
    with refused("processors 0 row NaN"):
        continued(SpeculativeLM(target), random_rows(VOCAB, [4]), logits_processor=[Broken()])


def test_what_a_draft_spoiled_is_not_mended(tiny_target):
    """Beside a processor of text; the target's own NaN would be."""
    target = tiny_target(vocab_size=VOCAB)
    spoil(target.model)
    row = random_rows(VOCAB, [7])[0]
    settings = {"remove_invalid_values": True, "repetition_penalty": 1.01}
    truth = continued(SpeculativeLM(target), [row], **settings)[0]
    lm = SpeculativeLM(target, Poisoned(SHAPES["branches"], truth, VOCAB, wrong=0.3))
    found, output = continued(lm, [row], **settings)
    assert found == truth and {record.fallback for record in output.stats.rows[0]} == {"not_finite"}


def test_a_masked_key_as_large_as_float16_goes_is_not_seen(tiny_target):
    """Added to such a score, the lowest float16 would not hide it."""
    target = tiny_target(vocab_size=VOCAB, dtype=torch.float16)
    seen_BNS = torch.ones(1, 2, 6, dtype=torch.bool).tril(3)
    mask = target.engine.attention_masks({"full_attention": seen_BNS})
    query = torch.full((1, 4, 2, 8), 30.0, dtype=torch.float16)
    key, value = torch.zeros(2, 1, 2, 6, 8, dtype=torch.float16)
    key[:, :, -2:] = 60000.0
    value[:, :, -2:] = 1.0
    out = masked_attention(query, key, value, mask)
    assert bool((out[:, :, 0] == 0).all())
