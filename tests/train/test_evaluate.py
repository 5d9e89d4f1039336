"""Teacher-forced accuracy against a naive count; evaluation as the head will be served."""

from __future__ import annotations

import copy

import pytest
import torch
from accelerate import Accelerator
from torch.nn import functional as F

from headstart.heads import MedusaConfig, MedusaHead
from headstart.heads.objective import Objective
from headstart.inference import DynamicShape, Stats, TreeShape, tree_policy
from headstart.inference.replay import TOKENS_AT_ONCE
from headstart.inference.tuning.tree_search import best_static_tree
from headstart.stopping import StopFlag
from headstart.train.config import DataConfig, EvalConfig, LoopConfig, TrainConfig
from headstart.train.data.chat_template import Example
from headstart.train.evaluate import (
    RANKS,
    evaluate,
    forward_tokens,
    greedy_answers,
    prompt_of,
    teacher_forced,
)

VOCAB = 24


@pytest.fixture
def target(tiny_target):
    return tiny_target(vocab_size=VOCAB)


@pytest.fixture
def examples():
    """Random tokens with masks of one or two answers, some too short for the deepest head."""
    random = torch.Generator().manual_seed(1)
    found = []
    for i in range(11):
        tokens = torch.randint(
            VOCAB, (int(torch.randint(8, 20, (), generator=random)),), generator=random
        ).tolist()
        mask = [(i % 3 == 0 and 1 < t < 4) or t >= 5 + i % 4 for t in range(len(tokens))]
        found.append(Example(tokens, mask))
    return found


def build_head(target, draft_vocab_size=None):
    """A head with random weights, so that its ranks are all over the place."""
    head = MedusaHead(MedusaConfig(num_heads=3, draft_vocab_size=draft_vocab_size), target.info)
    counts = torch.zeros(VOCAB, dtype=torch.int64)
    counts[::2] = 1  # every other token, if the draft vocabulary is half of all
    head.initialize(target.modules, counts)
    torch.manual_seed(5)
    for parameter in head.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return head.to(target.dtype).eval()


@torch.no_grad()
def naive(target, head, examples):
    """One position at a time, by what decoding calls: observe the text so far, expand along the
    true path."""
    losses, hits, counts = [0.0] * 3, [[0] * RANKS for _ in range(3)], [0] * 3
    for example in examples:
        tokens = torch.tensor(example.tokens)
        for here in range(len(tokens)):
            features, _ = target.read(tokens[None, : here + 1], head.feature_layers)
            for depth in range(3):
                label = here + depth + 2
                if label >= len(tokens) or not all(example.loss_mask[here + 1 : label + 1]):
                    continue
                state = head.begin(target.modules, 1, len(tokens), 3, 3)
                state = head.observe(
                    state, features, tokens[None, 1 : here + 2], torch.tensor([here + 1])
                )
                for level in range(depth + 1):
                    parent = torch.tensor([[-1 if level == 0 else 0]])
                    logits, state = head.expand(state, tokens[None, here + 1 + level, None], parent)
                drafted = head.target_tokens(torch.arange(head.draft_vocab_size)).tolist()
                counts[depth] += 1
                if int(tokens[label]) in drafted:
                    place = drafted.index(int(tokens[label]))
                    rank = int((logits[0, 0] > logits[0, 0, place]).sum())
                    if rank < RANKS:
                        hits[depth][rank] += 1
                    losses[depth] += F.cross_entropy(logits[0, 0], torch.tensor(place)).item()
    return losses, hits, counts


@pytest.mark.parametrize("draft_vocab_size", [None, VOCAB // 2])
def test_teacher_forced_figures_are_those_of_decoding_position_by_position(
    target, examples, draft_vocab_size
):
    head = build_head(target, draft_vocab_size)
    losses, hits, counts = naive(target, head, examples)
    assert min(counts) > 20 and len(set(counts)) == 3  # deeper heads are judged on fewer positions
    loss_K, accuracy_KI = teacher_forced(target, head, examples, tokens=60)
    for depth in range(3):
        assert loss_K[depth] == pytest.approx(losses[depth] / counts[depth], rel=1e-5)
        assert accuracy_KI[depth] == pytest.approx(
            [hit / counts[depth] for hit in hits[depth]], rel=1e-5
        )


def test_teacher_forced_rows_are_as_many_as_their_tokens_allow(target, examples, monkeypatch):
    shapes = []
    read = target.read
    monkeypatch.setattr(
        target, "read", lambda tokens, *given: shapes.append(tokens.shape) or read(tokens, *given)
    )
    teacher_forced(target, build_head(target), examples, tokens=40)
    assert sum(rows for rows, _ in shapes) == len(examples)
    assert max(rows * time for rows, time in shapes) <= 40
    assert max(rows for rows, _ in shapes) > 2  # short ones more at once


def test_a_forward_of_an_evaluation_is_no_larger_than_one_of_training():
    def tokens(length, **loop):
        return forward_tokens(
            TrainConfig(
                target="t",
                output="o",
                data=DataConfig(sources=["s"], max_length=length),
                loop=LoopConfig(**loop),
            )
        )

    assert tokens(300, batch_size=16, micro_batch=2) == 600
    assert tokens(300, batch_tokens=4000, micro_tokens=500) == 500
    assert tokens(2048, batch_size=16) == TOKENS_AT_ONCE


def test_evaluation_measures_a_copy_in_the_targets_dtype(target, examples):
    head = build_head(target).float().train()
    before = copy.deepcopy(head.state_dict())
    found = evaluate(
        target,
        head,
        Objective({"ce": 1.0}),
        examples,
        EvalConfig(prompts=4, max_new_tokens=6, conversations=8, nodes=7),
        Accelerator(),
        StopFlag(),
    )
    assert head.training and all(
        torch.equal(before[name], tensor) for name, tensor in head.state_dict().items()
    )
    assert found.policies == {
        "chain": TreeShape.chain(3),
        "static": best_static_tree(found.accuracy_KI, 7),
        "dynamic": DynamicShape(7, 3, 2),
    }
    assert {name: (len(stats.rows), stats.max_depth) for name, stats in found.trees.items()} == {
        name: (4, policy.depth) for name, policy in found.policies.items()
    }
    lengths = {name: stats.acceptance_length for name, stats in found.trees.items()}
    assert found.acceptance_length == lengths[found.best] == max(lengths.values())
    assert tree_policy(found.tree) == found.policies[found.best]
    served = copy.deepcopy(head).to(target.dtype).eval()
    loss_K, accuracy_KI = teacher_forced(target, served, examples[:8])
    assert (found.loss_K, found.accuracy_KI) == (loss_K, accuracy_KI)
    prompts = [prompt_of(example) for example in examples[:4]]
    for name, policy in found.policies.items():
        alone = [greedy_answers(target, served, policy, [prompt], 6).stats for prompt in prompts]
        # prompts of many lengths in one batch: the same
        assert Stats.merged(alone).rows == found.trees[name].rows


def test_a_prompt_is_what_comes_before_the_first_answer():
    assert prompt_of(Example([4, 5, 6, 7, 8], [False, False, True, False, True])).tolist() == [4, 5]
