"""Teacher-forced figures; evaluation as the head will be served."""

from __future__ import annotations

import copy

import pytest
import torch
from accelerate import Accelerator
from helpers import calls_of
from runs import same_tensors

from headstart.heads import MedusaConfig, MedusaHead
from headstart.heads.objective import Objective
from headstart.inference import DynamicShape, Stats, TreeShape, tree_policy
from headstart.inference.drafters.acceptance import RANKS, means
from headstart.inference.replay import TOKENS_AT_ONCE
from headstart.inference.tuning.tree_search import best_static_tree
from headstart.stopping import StopFlag
from headstart.train.config import DataConfig, EvalConfig, LoopConfig, TrainConfig
from headstart.train.data.batches import collate
from headstart.train.data.chat_template import Example
from headstart.train.evaluate import (
    batched,
    evaluate,
    forward_tokens,
    greedy_answers,
    prompt_of,
    sums_of,
)
from headstart.train.features.online import online_features

VOCAB = 24


def random_conversations():
    """Random tokens with masks of one or two answers, some too short for the deepest head."""
    random = torch.Generator().manual_seed(1)
    found = []
    for i in range(11):
        length = int(torch.randint(8, 20, (), generator=random))
        tokens = torch.randint(VOCAB, (length,), generator=random).tolist()
        mask = [(i % 3 == 0 and 1 < t < 4) or t >= 5 + i % 4 for t in range(length)]
        found.append(Example(tokens, mask))
    return found


EXAMPLES = random_conversations()


@pytest.fixture
def small(tiny_target):
    return tiny_target(vocab_size=VOCAB)


def noisy_medusa(target, draft_vocab_size=None):
    """A head with random weights, so that its ranks are all over the place."""
    head = MedusaHead(MedusaConfig(num_heads=3, draft_vocab_size=draft_vocab_size), target.info)
    counts = torch.zeros(VOCAB, dtype=torch.int64)
    counts[::2] = 1  # every other token, if the draft vocabulary is half of all
    head.initialize(target.modules, counts)
    torch.manual_seed(5)
    for parameter in head.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return head.to(target.dtype).eval()


def teacher_forced(target, head, examples, tokens=TOKENS_AT_ONCE):
    """Loss by depth, and accuracy by depth and rank."""
    sums = sums_of(target, head, Objective({"ce": 1.0}), batched(examples, tokens))
    return means(sums, head.max_depth)


@pytest.mark.parametrize("draft_vocab_size", [None, VOCAB // 2])
def test_teacher_forced_figures_are_means_over_the_positions_of_all_examples(
    small, draft_vocab_size
):
    """Of what the head finds in each example by itself."""
    head = noisy_medusa(small, draft_vocab_size)
    found = []
    for example in EXAMPLES:
        features = online_features(small, head, collate([example]), small.dtype)
        found.append(head(features, Objective({"ce": 1.0}), ranks=RANKS))
    counts_K = sum(output.counts_K for output in found)
    assert counts_K.min() > 20 and len(set(counts_K.tolist())) == 3  # fewer for deeper heads
    loss_K, accuracy_KI = teacher_forced(small, head, EXAMPLES, tokens=60)
    expected_K = sum(output.losses_K for output in found) / counts_K
    assert loss_K == pytest.approx(expected_K.tolist(), rel=1e-5)
    expected_KI = sum(output.hits_KI for output in found) / counts_K[:, None]
    assert accuracy_KI == [pytest.approx(row, rel=1e-5) for row in expected_KI.tolist()]


def test_teacher_forced_rows_are_as_many_as_their_tokens_allow(small, monkeypatch):
    reads = calls_of(monkeypatch, small, "read")
    teacher_forced(small, noisy_medusa(small), EXAMPLES, tokens=40)
    shapes = [tokens_BT.shape for tokens_BT, *_ in reads]
    assert sum(rows for rows, _ in shapes) == len(EXAMPLES)
    assert max(rows * time for rows, time in shapes) <= 40
    assert max(rows for rows, _ in shapes) > 2  # short ones more at once


@pytest.mark.parametrize(
    ("length", "loop", "tokens"),
    [
        (300, {"batch_size": 16, "micro_batch": 2}, 600),
        (300, {"batch_tokens": 4000, "micro_tokens": 500}, 500),
        (2048, {"batch_size": 16}, TOKENS_AT_ONCE),
    ],
)
def test_a_forward_of_an_evaluation_is_no_larger_than_one_of_training(length, loop, tokens):
    data = DataConfig(sources=["s"], max_length=length)
    config = TrainConfig(target="t", output="o", data=data, loop=LoopConfig(**loop))
    assert forward_tokens(config) == tokens


def test_evaluation_measures_a_copy_in_the_targets_dtype(small):
    head = noisy_medusa(small).float().train()
    before = copy.deepcopy(head.state_dict())
    config = EvalConfig(prompts=4, max_new_tokens=6, conversations=8, nodes=7)
    objective = Objective({"ce": 1.0})
    found = evaluate(small, head, objective, EXAMPLES, config, Accelerator(), StopFlag())
    assert head.training and same_tensors(before, head.state_dict())
    assert found.policies == {
        "chain": TreeShape.chain(3),
        "static": best_static_tree(found.accuracy_KI, 7),
        "dynamic": DynamicShape(7, 3, 2),
    }
    lengths = {name: stats.acceptance_length for name, stats in found.trees.items()}
    assert found.acceptance_length == lengths[found.best] == max(lengths.values())
    assert tree_policy(found.tree) == found.policies[found.best]
    served = copy.deepcopy(head).to(small.dtype).eval()
    assert (found.loss_K, found.accuracy_KI) == teacher_forced(small, served, EXAMPLES[:8])
    prompts = [prompt_of(example) for example in EXAMPLES[:4]]
    for name, policy in found.policies.items():
        alone = [greedy_answers(small, served, policy, [prompt], 6).stats for prompt in prompts]
        # prompts of many lengths in one batch: the same
        assert Stats.merged(alone).rows == found.trees[name].rows
        assert found.trees[name].max_depth == policy.depth


def test_a_prompt_is_what_comes_before_the_first_answer():
    assert prompt_of(Example([4, 5, 6, 7, 8], [False, False, True, False, True])).tolist() == [4, 5]
