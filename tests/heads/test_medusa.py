"""Medusa heads: what is trained is what drafts, and the loss covers exactly the drafts that lie in
one answer."""

from __future__ import annotations

import dataclasses
import itertools

import helpers
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headstart.heads import MedusaConfig, MedusaHead, TargetFeatures, TargetModules

VOCAB, WIDTH = 23, 12
INFO = dataclasses.replace(helpers.INFO, hidden_size=WIDTH, vocab_size=VOCAB)
CLOSE = {"rtol": 0.0, "atol": 1e-10}

SHAPES = [
    MedusaConfig(num_heads=3, num_layers=layers, bias=bias, lm_head=lm_head, draft_vocab_size=size)
    for layers, bias in itertools.product((1, 2), (True, False))
    for lm_head, size in (("own", None), ("own", 9), ("shared", None))
]


def name_of(config: MedusaConfig) -> str:
    bias = "bias" if config.bias else "plain"
    return f"{config.num_layers}layers-{bias}-{config.lm_head}-{config.draft_vocab_size}"


def build_modules(seed: int = 0) -> TargetModules:
    torch.manual_seed(seed)
    embed, lm_head = (
        nn.Embedding(VOCAB, WIDTH).double(),
        nn.Linear(WIDTH, VOCAB, bias=False).double(),
    )
    return TargetModules(embed, lm_head, nn.Identity(), ())


def build_medusa(config: MedusaConfig, seed: int = 0) -> MedusaHead:
    """A float64 head with random parameters and a draft vocabulary of random tokens."""
    torch.manual_seed(seed)
    head = MedusaHead(config, INFO).double()
    for parameter in head.parameters():
        nn.init.normal_(parameter)
    if head.token_map is not None:
        head.token_map.copy_(torch.randperm(VOCAB)[: len(head.token_map)].sort().values)
    return head


def build_features(mask_BT: Tensor, modules: TargetModules, seed: int = 0) -> TargetFeatures:
    torch.manual_seed(seed)
    last_BTD = torch.randn(*mask_BT.shape, WIDTH, dtype=torch.float64)
    return TargetFeatures(last_BTD, last_BTD, torch.randint(VOCAB, mask_BT.shape), mask_BT, modules)


def draft_logits(
    head: MedusaHead,
    modules: TargetModules,
    features_BTF: Tensor,
    tokens_BT: Tensor,
    lengths_B: Tensor,
):
    """Logits of decoding at each depth after `observe`: logits_BKV."""
    state = head.begin(modules, len(tokens_BT), tokens_BT.shape[1], head.max_depth, head.max_depth)
    state = head.observe(state, features_BTF, tokens_BT, lengths_B)
    logits = []
    frontier, parents = tokens_BT[:, :1], torch.full((len(tokens_BT), 1), -1)
    for _ in range(head.max_depth):
        logits_B1V, state = head.expand(state, frontier, parents)
        logits.append(logits_B1V)
        frontier, parents = head.target_tokens(logits_B1V.argmax(-1)), torch.zeros_like(parents)
    return torch.cat(logits, dim=1)


# Training and drafting are the same function.


@pytest.mark.parametrize("config", SHAPES, ids=name_of)
def test_the_loss_at_every_position_is_that_of_the_logits_that_draft_there(
    config: MedusaConfig, tiny_target
) -> None:
    """Positions are singled out by masks; the target's own features, as each side is given them."""
    target = tiny_target(vocab_size=40)
    torch.manual_seed(1)
    head = MedusaHead(config, target.info).double()
    for parameter in head.parameters():
        nn.init.normal_(parameter)
    if head.token_map is not None:
        head.token_map.copy_(torch.randperm(40)[: len(head.token_map)].sort().values)
    time = 9
    tokens_BT = torch.randint(40, (1, time))
    features_BTF, last_BTD = target.read(tokens_BT, head.feature_layers)
    ranks = head.draft_vocab_size
    outside = 0
    for place in range(time - 2):
        drafted_KV = draft_logits(
            head,
            target.modules,
            features_BTF[:, : place + 1],
            tokens_BT[:, 1 : place + 2],
            torch.tensor([place + 1]),
        )[0]
        for depth in range(min(head.max_depth, time - 2 - place)):
            label = int(tokens_BT[0, place + 2 + depth])
            mask_BT = torch.zeros(1, time, dtype=torch.bool)
            mask_BT[:, place + 1 : place + 3 + depth] = True
            output = head(
                TargetFeatures(features_BTF, last_BTD, tokens_BT, mask_BT, target.modules),
                ranks=ranks,
            )
            assert int(output.counts_K[depth]) == 1
            classes = head.target_tokens(torch.arange(ranks)).tolist()
            if label not in classes:
                outside += 1
                assert output.losses_K[depth] == 0 and output.hits_KI[depth].sum() == 0
                continue
            logits_V = drafted_KV[depth]
            expected = F.cross_entropy(logits_V, torch.tensor(classes.index(label)))
            torch.testing.assert_close(output.losses_K[depth], expected.detach(), **CLOSE)
            rank = int((logits_V > logits_V[classes.index(label)]).sum())
            assert output.hits_KI[depth].tolist() == [int(i == rank) for i in range(ranks)]
    assert (outside > 0) == (config.draft_vocab_size is not None)


@pytest.mark.parametrize("config", SHAPES, ids=name_of)
def test_observe_reads_each_row_at_its_own_length_and_nothing_behind_it(
    config: MedusaConfig,
) -> None:
    head, modules = build_medusa(config), build_modules()
    lengths = [3, 1, 5]
    features_BTF = torch.randn(3, 5, WIDTH, dtype=torch.float64)
    tokens_BT = torch.randint(VOCAB, (3, 5))
    together = draft_logits(head, modules, features_BTF, tokens_BT, torch.tensor(lengths))
    for row, length in enumerate(lengths):
        features_BTF[row, length:] = float("nan")
        alone = draft_logits(
            head,
            modules,
            features_BTF[row : row + 1, :length],
            tokens_BT[row : row + 1, :length],
            torch.tensor([length]),
        )
        torch.testing.assert_close(together[row : row + 1], alone, **CLOSE)
    assert not torch.allclose(together[0], together[2])


def test_a_new_round_starts_again_at_the_root() -> None:
    head, modules = build_medusa(SHAPES[0]), build_modules()
    features, tokens = (
        torch.randn(2, 4, 1, WIDTH, dtype=torch.float64),
        torch.zeros(2, 4, 1, dtype=torch.int64),
    )
    length = torch.ones(4, dtype=torch.int64)
    root = torch.full((4, 1), -1)
    state = head.observe(
        head.begin(modules, 4, 8, max_depth=2, nodes=2), features[0], tokens[0], length
    )
    for _ in range(2):
        _, state = head.expand(state, tokens[0], root)
    second, _ = head.expand(head.observe(state, features[1], tokens[1], length), tokens[1], root)
    fresh, _ = head.expand(
        head.observe(
            head.begin(modules, 4, 8, max_depth=2, nodes=2), features[1], tokens[1], length
        ),
        tokens[1],
        root,
    )
    torch.testing.assert_close(second, fresh, **CLOSE)


# What the loss counts.


@pytest.mark.parametrize("time", [1, 2, 3])
def test_a_sequence_of_three_trains_the_first_head_and_a_shorter_one_none(time: int) -> None:
    """A step that teaches nothing still hands every parameter a gradient: other ranks wait for
    it."""
    head = build_medusa(MedusaConfig(num_heads=4))
    output = head(build_features(torch.ones(1, time, dtype=torch.bool), build_modules()))
    assert output.counts_K.tolist() == [int(time == 3), 0, 0, 0]
    output.loss.backward()
    for name, parameter in head.named_parameters():
        learns = time == 3 and name.split(".")[1] == "0"
        assert parameter.grad is not None and parameter.grad.any() == learns, name


# How a head begins.


@pytest.mark.parametrize("config", SHAPES, ids=name_of)
def test_a_new_head_drafts_what_the_lm_head_does(config: MedusaConfig) -> None:
    head, modules = MedusaHead(config, INFO).double(), build_modules()
    head.initialize(modules, torch.arange(1, VOCAB + 1))
    features_BTF = torch.randn(4, 1, WIDTH, dtype=torch.float64)
    tokens_BT, lengths_B = torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, dtype=torch.int64)
    logits_BKV = draft_logits(head, modules, features_BTF, tokens_BT, lengths_B)
    kept = head.target_tokens(torch.arange(head.draft_vocab_size))
    expected = modules.lm_head(features_BTF)[..., kept].expand(-1, head.max_depth, -1)
    torch.testing.assert_close(logits_BKV, expected, **CLOSE)


@pytest.mark.parametrize(
    "counts", [torch.randperm(VOCAB) + 1, torch.arange(VOCAB), torch.arange(VOCAB).flip(0) ** 2]
)
def test_the_draft_vocabulary_is_the_most_frequent_tokens_in_order(counts: Tensor) -> None:
    head, modules = MedusaHead(MedusaConfig(draft_vocab_size=5), INFO).double(), build_modules()
    head.initialize(modules, counts)
    expected = sorted(sorted(range(VOCAB), key=lambda token: -int(counts[token]))[:5])
    assert head.target_tokens(torch.arange(5)).tolist() == expected
    for lm_head in head.lm_heads:
        assert torch.equal(lm_head.weight, modules.lm_head.weight[expected])


@pytest.mark.parametrize("config", SHAPES, ids=name_of)
def test_heads_share_no_parameters(config: MedusaConfig) -> None:
    head, modules = MedusaHead(config, INFO).double(), build_modules()
    head.initialize(modules, torch.arange(1, VOCAB + 1))
    parameters = list(head.parameters())
    per_head = config.num_layers * (1 + config.bias) + (config.lm_head == "own")
    assert len(parameters) == config.num_heads * per_head
    places = [
        parameter.data_ptr()
        for parameter in (*parameters, modules.lm_head.weight, modules.embed.weight)
    ]
    assert len(set(places)) == len(places)


@pytest.mark.parametrize("lm_head", ["own", "shared"])
def test_training_leaves_the_target_alone(lm_head: str, tiny_target) -> None:
    """The target's modules are neither parameters nor in the state, and no gradient is gathered on
    them."""
    target = tiny_target(vocab_size=40)
    head = MedusaHead(MedusaConfig(num_heads=2, lm_head=lm_head), target.info).double()
    head.initialize(target.modules, torch.ones(40))
    tokens_BT = torch.randint(40, (2, 8))
    features_BTF, last_BTD = target.read(tokens_BT, head.feature_layers)
    head(
        TargetFeatures(
            features_BTF, last_BTD, tokens_BT, torch.ones(2, 8, dtype=torch.bool), target.modules
        )
    ).loss.backward()
    assert all(parameter.grad is not None for parameter in head.parameters())
    frozen = {id(parameter) for parameter in target.model.parameters()}
    assert not any(id(parameter) in frozen for parameter in head.parameters())
    assert any(name.startswith("lm_heads") for name in head.state_dict()) == (lm_head == "own")
    assert not any("embed" in name or name.startswith("lm_head.") for name in head.state_dict())
    gathered = [
        name for name, parameter in target.model.named_parameters() if parameter.grad is not None
    ]
    assert not gathered, f"the frozen target gathers gradients: {gathered}"
