"""The objectives: what a plain computation over whole tensors gives, without those tensors."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from messages import refused
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headstart.heads import HeadOutput, TargetFeatures, TargetModules, losses
from headstart.heads.draft_positions import DraftPositions
from headstart.heads.losses import draft_loss, with_feature_loss
from headstart.heads.objective import LOSSES, NEED_MASS, Objective

WIDTH, TARGET_WIDTH, VOCAB, ROWS = 5, 6, 21, 64
"""A draft's states may be narrower than the target's; no chunk is smaller than ROWS."""
MIX = {"ce": 0.25, "reverse_kl": 0.5, "lk_lambda": 2.0, "soft_ce": 0.0}
EXACT = {"rtol": 0.0, "atol": 1e-9}


@dataclass(frozen=True)
class Problem:
    """A batch with the drafts of all its positions."""

    features: TargetFeatures
    positions: DraftPositions
    hiddens: list[Tensor]
    lm_heads: list[Tensor]
    vocabulary_V: Tensor | None

    def solve(
        self,
        loss: dict[str, float],
        weights: str = "decay",
        decay: float = 1.0,
        ranks: int = 1,
        top_k: int | None = None,
    ) -> HeadOutput:
        objective = Objective(loss, weights, decay, top_k)
        arguments = (
            self.hiddens,
            self.lm_heads,
            self.vocabulary_V,
            self.features,
            self.positions,
            objective,
            ranks,
        )
        return draft_loss(*arguments)

    def leaves(self) -> list[Tensor]:
        return [*self.hiddens, *{id(weight): weight for weight in self.lm_heads}.values()]


def problem_of(
    mask_BT: Tensor,
    depths: int = 3,
    drafted: int | None = None,
    shared: bool = True,
    vocab: int = VOCAB,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Problem:
    """Random states and LM heads; `drafted` tokens of the vocabulary can be drafted."""
    random = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=random).to(dtype)

    lm_head = nn.Linear(TARGET_WIDTH, vocab, bias=False)
    lm_head.weight = nn.Parameter(draw(vocab, TARGET_WIDTH), requires_grad=False)
    last_BTD = draw(*mask_BT.shape, TARGET_WIDTH)
    tokens_BT = torch.randint(vocab, mask_BT.shape, generator=random)
    modules = TargetModules(nn.Embedding(vocab, TARGET_WIDTH), lm_head, nn.Identity(), ())
    features = TargetFeatures(last_BTD, last_BTD, tokens_BT, mask_BT, modules)
    positions = DraftPositions.of(features, depths)
    hiddens = [draw(len(positions.index_N), WIDTH).requires_grad_() for _ in range(depths)]
    lm_heads = [
        draw(drafted or vocab, WIDTH).requires_grad_() for _ in range(1 if shared else depths)
    ]
    chosen = torch.randperm(vocab, generator=random)[:drafted].sort().values if drafted else None
    return Problem(features, positions, hiddens, lm_heads * depths if shared else lm_heads, chosen)


def random_mask(time: int, seed: int = 0) -> Tensor:
    """A loss mask of three rows with answers of many lengths, one of them without any end."""
    random = torch.Generator().manual_seed(seed)
    mask_BT = torch.rand(3, time, generator=random) < 0.9
    mask_BT[2] = True
    return mask_BT


# The reference, from the definitions.


def judged_places(mask_BT: Tensor, depth: int) -> Iterator[tuple[int, int, int]]:
    """Index, row and time of every draft position whose draft at `depth` is judged."""
    number, (batch, time) = 0, mask_BT.shape
    for row, here in itertools.product(range(batch), range(time - 2)):
        if not mask_BT[row, here + 1 : here + 3].all():
            continue
        if here + 2 + depth < time and mask_BT[row, here + 1 : here + 3 + depth].all():
            yield number, row, here
        number += 1


def one_loss(name: str, q_V: Tensor, p_V: Tensor, label: int, top_k: int | None = None) -> Tensor:
    """Of one position. `p_V` sums to what the target gives to the draft vocabulary."""
    if name == "ce":
        return -q_V[label].log()
    if top_k is not None:
        chosen = sorted(range(len(p_V)), key=lambda token: -float(p_V[token]))[:top_k]
        p_V, q_V = p_V[chosen], q_V[chosen]
    own_V = p_V / p_V.sum()
    overlap = torch.min(p_V, q_V).sum()
    if name == "lk_lambda":
        share = math.exp(-3 * overlap.item())
        return share * (own_V * (own_V / q_V).log()).sum() + (1 - share) * (1 - overlap)
    return {
        "soft_ce": -(own_V * q_V.log()).sum(),
        "kl": (own_V * (own_V / q_V).log()).sum(),
        "reverse_kl": (q_V * (q_V / own_V).log()).sum(),
        "tv": 1 - overlap,
        "lk_alpha": -overlap.log(),
    }[name]


def naive(
    problem: Problem,
    loss: dict[str, float],
    weights: str,
    decay: float,
    ranks: int,
    top_k: int | None = None,
) -> HeadOutput:
    """Position by position and depth by depth."""
    features, depths = problem.features, len(problem.hiddens)
    drafted = list(range(VOCAB)) if problem.vocabulary_V is None else problem.vocabulary_V.tolist()
    target_BTV = features.modules.lm_head(features.last_BTD).softmax(-1)
    rows: dict[tuple[int, int], tuple[Tensor, int, Tensor]] = {}
    hits = [[0] * ranks for _ in range(depths)]
    for depth in range(depths):
        q_NV = (problem.hiddens[depth] @ problem.lm_heads[depth].T).softmax(-1)
        for number, row, here in judged_places(features.loss_mask_BT, depth):
            token = int(features.tokens_BT[row, here + 2 + depth])
            label = drafted.index(token) if token in drafted else -1
            p_V = target_BTV[row, here + 1 + depth]
            q_V = q_NV[number]
            parts = [
                weight * one_loss(name, q_V, p_V[drafted], label, top_k)
                for name, weight in loss.items()
            ]
            rows[number, depth] = (
                sum(parts, q_V.sum() * 0) if label >= 0 else q_V.sum() * 0,
                label,
                q_V.detach(),
            )
            if label >= 0:
                rank = int((q_V > q_V[label]).sum())
                if rank < ranks:
                    hits[depth][rank] += 1

    def chance(number: int, depth: int) -> float:
        """That the true token would be drafted."""
        _, label, q_V = rows.get((number, depth), (None, -1, None))
        return float(q_V[label]) if label >= 0 else 0.0

    def weight_of(number: int, depth: int) -> float:
        if weights == "decay":
            return decay**depth
        reached = [math.prod(chance(number, i) for i in range(k + 1)) for k in range(depths)]
        return sum(reached[depth:])

    total = sum(
        (weight_of(*place) * value for place, (value, _, _) in rows.items()),
        problem.hiddens[0].sum() * 0,
    )
    by_depth = [
        torch.stack(
            [value.detach() for (_, d), (value, _, _) in rows.items() if d == depth]
            or [torch.zeros(())]
        ).sum()
        for depth in range(depths)
    ]
    counts = [sum(d == depth for _, d in rows) for depth in range(depths)]
    return HeadOutput(total, torch.stack(by_depth), torch.tensor(counts), torch.tensor(hits))


def assert_as_defined(
    problem: Problem,
    loss: dict[str, float],
    weights: str = "decay",
    decay: float = 0.7,
    top_k: int | None = None,
) -> None:
    """Values and gradients."""
    arguments = (loss, weights, decay, 4, top_k)
    found = problem.solve(*arguments)
    wanted = naive(problem, *arguments)
    torch.testing.assert_close(found.loss, wanted.loss, **EXACT)
    torch.testing.assert_close(found.losses_K, wanted.losses_K, check_dtype=False, **EXACT)
    assert not found.losses_K.requires_grad
    assert found.counts_K.tolist() == wanted.counts_K.tolist()
    assert found.hits_KI.dtype == torch.int64 and found.hits_KI.tolist() == wanted.hits_KI.tolist()
    leaves = problem.leaves()
    ours = torch.autograd.grad(3 * found.loss, leaves)
    plain = torch.autograd.grad(3 * wanted.loss, leaves, allow_unused=True, materialize_grads=True)
    assert plain[0].any() and plain[-1].any()
    for mine, theirs in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, theirs, **EXACT)


# Values and gradients.


@pytest.mark.parametrize("drafted", [None, 9], ids=["whole", "truncated"])
@pytest.mark.parametrize(
    ("loss", "top_k"),
    [
        (MIX, None),
        *(({word: 1.5}, None) for word in LOSSES),
        *(({word: 1.5}, k) for word in LOSSES if word != "reverse_kl" for k in (1, 4, 9, 100)),
    ],
    ids=lambda part: "+".join(part) if isinstance(part, dict) else f"top {part}",
)
def test_every_loss_is_that_of_its_definition(
    loss: dict[str, float], top_k: int | None, drafted: int | None
) -> None:
    assert_as_defined(problem_of(random_mask(14), drafted=drafted), loss, top_k=top_k)


@pytest.mark.parametrize("loss", LOSSES)
def test_logits_outside_the_draft_vocabulary_are_made_only_for_losses_that_need_them(
    loss: str,
) -> None:
    problem = problem_of(random_mask(14), drafted=9)
    undrafted_V = torch.ones(VOCAB, dtype=torch.bool)
    undrafted_V[problem.vocabulary_V] = False
    problem.features.modules.lm_head.weight[undrafted_V] = math.nan
    assert problem.solve({loss: 1.0}).loss.isnan() == (loss in NEED_MASS)


@pytest.mark.parametrize("weights", ["decay", "d_pace"])
@pytest.mark.parametrize("shared", [True, False], ids=["one LM head", "an LM head each"])
@pytest.mark.parametrize("drafted", [None, 15, 1], ids=["whole", "truncated", "one token"])
@pytest.mark.parametrize("depths", [1, 2, 5])
def test_depths_are_weighted_and_lm_heads_learn_from_all_of_theirs(
    depths: int, drafted: int | None, shared: bool, weights: str
) -> None:
    problem = problem_of(random_mask(30), depths, drafted, shared)
    # certain of its only token: no loss can move it, and only the weights are at stake
    if drafted == 1:
        found = problem.solve({"tv": 1.0}, weights, 0.7)
        wanted = naive(problem, {"tv": 1.0}, weights, 0.7, 1)
        torch.testing.assert_close(found.loss, wanted.loss, **EXACT)
    else:
        assert_as_defined(problem, MIX, weights)


def test_two_depths_may_share_an_lm_head_and_the_third_have_its_own() -> None:
    problem = problem_of(random_mask(14), shared=False)
    first, _, last = problem.lm_heads
    assert_as_defined(dataclasses.replace(problem, lm_heads=[first, last, first]), MIX, "d_pace")


@pytest.mark.parametrize("weights", ["decay", "d_pace"])
@pytest.mark.parametrize("elements", [1, 70 * VOCAB, 2 * 70 * VOCAB - 1, 2**24])
def test_chunks_add_up(elements: int, weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts fall into the middle of answers, whose deeper drafts are judged by positions of the next
    chunk."""
    problem = problem_of(random_mask(80), drafted=9)
    assert len(problem.positions.index_N) > 2 * 70
    monkeypatch.setattr(losses, "VOCABULARY_ON_CPU", elements)
    assert_as_defined(problem, {"kl": 1.0, "ce": 0.5}, weights)


@pytest.mark.parametrize("ranks", [1, 12], ids=["the best", "more than can be drafted"])
def test_hits_count_how_often_the_true_token_is_the_ith_best(ranks: int) -> None:
    problem = problem_of(random_mask(30), drafted=9)
    found = problem.solve({"tv": 1.0}, ranks=ranks).hits_KI
    assert found.any()
    assert found.tolist() == naive(problem, {"tv": 1.0}, "decay", 1.0, ranks).hits_KI.tolist()


@pytest.mark.parametrize(
    "frozen", [slice(3), slice(3, 4), slice(4)], ids=["hiddens", "the LM head", "both"]
)
def test_what_is_frozen_gets_no_gradient_and_the_rest_the_same(frozen: slice) -> None:
    problem = problem_of(random_mask(14))
    leaves = problem.leaves()
    expected = list(torch.autograd.grad(problem.solve(MIX).loss, leaves))
    for number in range(4)[frozen]:
        leaves[number].requires_grad_(False)
        expected[number] = None
    loss = problem.solve(MIX).loss
    assert loss.requires_grad == any(leaf.requires_grad for leaf in leaves)
    if loss.requires_grad:
        loss.backward()
    for leaf, gradient in zip(leaves, expected, strict=True):
        torch.testing.assert_close(leaf.grad, gradient, **EXACT)


@pytest.mark.parametrize("weights", ["decay", "d_pace"])
def test_a_backward_may_be_repeated_and_scaled(weights: str) -> None:
    """Each backward through a retained graph adds the same gradient, times its own scale."""
    problem = problem_of(random_mask(14), shared=False)
    loss = problem.solve(MIX, weights).loss
    once = torch.autograd.grad(loss, problem.leaves(), retain_graph=True)
    (0.5 * loss).backward(retain_graph=True)
    (3 * loss).backward(retain_graph=True)
    for leaf, gradient in zip(problem.leaves(), once, strict=True):
        torch.testing.assert_close(leaf.grad, 3.5 * gradient, **EXACT)


def test_a_derivative_of_the_gradient_is_refused() -> None:
    problem = problem_of(random_mask(14))
    loss = problem.solve(MIX).loss
    (gradient,) = torch.autograd.grad(loss.square(), problem.hiddens[:1], create_graph=True)
    with refused("once_differentiable", error=RuntimeError):
        gradient.sum().backward()


def test_the_target_learns_nothing() -> None:
    problem = problem_of(random_mask(14))
    last_BTD = problem.features.last_BTD.requires_grad_()
    weight = problem.features.modules.lm_head.weight.requires_grad_()
    problem.solve(MIX).loss.backward()
    assert last_BTD.grad is None and weight.grad is None


def test_evaluation_sees_the_same_figures_without_a_graph() -> None:
    problem = problem_of(random_mask(14))
    trained = problem.solve(MIX, ranks=3)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            evaluated = problem.solve(MIX, ranks=3)
        assert not evaluated.loss.requires_grad
        for figure, in_training in zip(evaluated, trained, strict=True):
            assert torch.equal(figure, in_training.detach())


# What carries a loss.


def test_depths_that_no_position_reaches_give_zero_gradients() -> None:
    mask_BT = torch.tensor([[True, True, True, False] * 5])
    problem = problem_of(mask_BT, depths=4, shared=False)
    found = problem.solve(MIX)
    found.loss.backward()
    assert found.counts_K.tolist() == [9, 4, 0, 0]
    learned = [bool(leaf.grad.any()) for leaf in problem.leaves()]
    assert learned == [True, True, False, False] * 2


def test_a_loss_that_is_not_computed_here_still_counts_hits() -> None:
    problem = problem_of(random_mask(14))
    found, wanted = problem.solve({"smooth_l1": 1.0}, ranks=3), problem.solve({"ce": 1.0}, ranks=3)
    assert found.hits_KI.tolist() == wanted.hits_KI.tolist() and found.hits_KI.any()
    assert found.loss == 0 and not found.losses_K.any()
    found.loss.backward()
    assert not any(leaf.grad.any() for leaf in problem.leaves())


def test_the_distance_of_predicted_features_is_that_of_eagles_paper() -> None:
    """Smooth L1 to the target's feature at t + 1 + k, the mean over its width."""
    mask_BT = random_mask(14)
    problem = problem_of(mask_BT)
    random = torch.Generator().manual_seed(1)
    shape = (len(problem.positions.index_N), TARGET_WIDTH)
    predicted = [
        torch.randn(shape, generator=random, dtype=torch.float64).requires_grad_() for _ in range(3)
    ]
    objective = Objective({"smooth_l1": 0.5, "ce": 2.0}, "decay", 0.8)
    other = problem.solve({"ce": 2.0}, decay=0.8)

    expected_K = torch.zeros(3, dtype=torch.float64)
    for k in range(3):
        for number, row, time in judged_places(mask_BT, k):
            far_D = predicted[k][number] - problem.features.last_BTD[row, time + 1 + k]
            near = far_D.abs() < 1
            distance_D = torch.where(near, far_D.square() / 2, far_D.abs() - 0.5)
            expected_K[k] += 0.5 * distance_D.mean()
    expected = (expected_K * 0.8 ** torch.arange(3)).sum()

    context = (problem.features, problem.positions)
    found = with_feature_loss(other, predicted, *context, objective)
    torch.testing.assert_close(found.loss - other.loss, expected)
    torch.testing.assert_close(found.losses_K - other.losses_K, expected_K.detach())
    gradients = torch.autograd.grad(found.loss, predicted)
    for gradient, wanted in zip(gradients, torch.autograd.grad(expected, predicted), strict=True):
        torch.testing.assert_close(gradient, wanted)
    without = with_feature_loss(other, predicted, *context, Objective({"ce": 1.0}, "decay", 0.8))
    assert without is other


@pytest.mark.parametrize("scale", [50.0, 1e3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_distributions_that_have_nothing_in_common_give_finite_losses(
    dtype: torch.dtype, scale: float
) -> None:
    problem = problem_of(random_mask(14), dtype=dtype)
    far = [(scale * hidden).detach().requires_grad_() for hidden in problem.hiddens]
    problem = dataclasses.replace(problem, hiddens=far)
    problem.features.modules.lm_head.weight.mul_(scale)
    for name, weights in itertools.product(LOSSES, ("decay", "d_pace")):
        found = problem.solve({name: 1.0}, weights)
        assert found.loss.isfinite() and found.losses_K.isfinite().all(), name
        assert all(
            gradient.isfinite().all()
            for gradient in torch.autograd.grad(found.loss, problem.leaves())
        ), name


# Precision and memory.


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str
)
@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_at_least_float32(name: str, dtype: torch.dtype) -> None:
    """And summed there: a loss of several hundred has no digits left in bfloat16. Only logits are
    as narrow."""
    problem = problem_of(random_mask(30), dtype=dtype)
    found = problem.solve({name: 1.0}, decay=0.5)
    wanted = torch.promote_types(dtype, torch.float32)
    assert found.loss.dtype == wanted and found.losses_K.dtype == wanted
    # the same logits, but everything after them in float64
    features = problem.features
    one_to_one = nn.Linear(VOCAB, VOCAB, bias=False)
    one_to_one.weight = nn.Parameter(torch.eye(VOCAB, dtype=torch.float64), requires_grad=False)
    plain = dataclasses.replace(
        problem,
        features=dataclasses.replace(
            features,
            last_BTD=features.modules.lm_head(features.last_BTD).double(),
            modules=dataclasses.replace(features.modules, lm_head=one_to_one),
        ),
        hiddens=[
            (hidden @ weight.T).double()
            for hidden, weight in zip(problem.hiddens, problem.lm_heads, strict=True)
        ],
        lm_heads=[one_to_one.weight] * 3,
    )
    exact = plain.solve({name: 1.0}, decay=0.5).loss
    torch.testing.assert_close(found.loss.double(), exact, rtol=2e-5, atol=0)
    found.loss.backward()
    assert all(leaf.grad.dtype == dtype for leaf in problem.leaves())


class Wide(TorchDispatchMode):
    """Watches every tensor with a vocabulary's width that any operation returns, backward
    included."""

    def __init__(self, widths: set[int]) -> None:
        super().__init__()
        self.widths = widths
        self.largest, self.most = 0, 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def alive(self) -> int:
        """Elements of those that still exist."""
        self._alive = {
            key: (ref, size) for key, (ref, size) in self._alive.items() if not ref.expired()
        }
        return sum(size for _, size in self._alive.values())

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        result = function(*arguments, **(options or {}))
        for leaf in tree_leaves(result):
            if not isinstance(leaf, Tensor) or leaf.ndim < 2 or leaf.shape[-1] not in self.widths:
                continue
            # no LM head, which some products see with its sides swapped
            if leaf.shape[0] > TARGET_WIDTH:
                self.largest = max(self.largest, leaf.shape[0])
                ref = StorageWeakRef(leaf.untyped_storage())
                self._alive[ref.cdata] = (ref, leaf.numel())
        self.most = max(self.most, self.alive())
        return result


def widest(count: int, name: str, weights: str, dtype: torch.dtype) -> tuple[int, int]:
    """Rows of the largest wide tensor, and the most elements at any time, with `count`
    positions."""
    problem = problem_of(
        torch.ones(1, count + 2, dtype=torch.bool), drafted=151, vocab=301, dtype=dtype
    )
    with Wide({151, 301}) as wide:
        loss = problem.solve({name: 1.0}, weights, ranks=2).loss
        assert wide.alive() == 0, "something as wide as the vocabulary outlives the forward"
        loss.backward()
    assert all(leaf.grad is not None for leaf in problem.leaves())
    return wide.largest, wide.most


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("weights", ["decay", "d_pace"])
@pytest.mark.parametrize("name", LOSSES)
def test_nothing_as_wide_as_the_vocabulary_is_larger_than_a_chunk(
    name: str, weights: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All together, too: twice the positions need no more memory."""
    monkeypatch.setattr(losses, "VOCABULARY_ON_CPU", 1)
    rows, elements = widest(3 * ROWS, name, weights, dtype)
    # the target is read at the chunk's positions and up to the deepest draft's
    assert ROWS <= rows <= ROWS + 2
    assert widest(6 * ROWS, name, weights, dtype) == (rows, elements)


def test_a_chunk_is_as_large_as_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """The larger of both vocabularies counts, if the loss looks at it."""
    monkeypatch.setattr(losses, "VOCABULARY_ON_CPU", 100 * 301)
    rows, _ = widest(400, "tv", "decay", torch.float32)
    assert 100 <= rows <= 102
    rows, _ = widest(400, "kl", "decay", torch.float32)
    assert 100 * 301 // 151 <= rows <= 100 * 301 // 151 + 2


# Anchors.


def every_mask(time: int) -> Tensor:
    """All masks of a length are the rows of one batch, so that no row's drafts may reach into the
    next."""
    return torch.tensor(list(itertools.product((False, True), repeat=time)))


@pytest.mark.parametrize("depths", [1, 2, 3])
@pytest.mark.parametrize("time", range(1, 8))
def test_positions_are_those_of_brute_force_for_every_mask(time: int, depths: int) -> None:
    mask_BT = every_mask(time)
    found = DraftPositions.of(problem_of(mask_BT).features, depths)
    drafting = [row * time + here for _, row, here in judged_places(mask_BT, 0)]
    assert found.index_N.tolist() == drafting
    assert found.valid_NK.shape == (len(drafting), depths)
    for depth in range(depths):
        places = list(judged_places(mask_BT, depth))
        valid_N = found.valid_NK[:, depth]
        assert valid_N.nonzero()[:, 0].tolist() == [number for number, _, _ in places]
        judging = [row * time + here + 1 + depth for _, row, here in places]
        assert found.rows_NK[valid_N, depth].tolist() == judging


@pytest.mark.parametrize("time", range(1, 8))
def test_a_model_is_judged_on_every_answer_token_that_has_a_token_before_it(time: int) -> None:
    mask_BT = every_mask(time)
    found = DraftPositions.of_answers(problem_of(mask_BT).features)
    before_answers = mask_BT.roll(-1, dims=1)
    before_answers[:, -1] = False
    assert found.index_N.tolist() == before_answers.flatten().nonzero()[:, 0].tolist()
    assert found.rows_NK.tolist() == found.index_N[:, None].tolist()
    assert found.valid_NK.all() and found.valid_NK.shape == found.rows_NK.shape


# What is refused.


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        (({"kll": 1.0}, "decay", 1.0), "unknown eagle3 'kll' soft_ce reverse_kl"),
        (({"ce": -0.5}, "decay", 1.0), "eagle3 'ce' needs 0 -0.5"),
        (({"ce": True}, "decay", 1.0), "eagle3 'ce' needs 0 True"),
        (({"ce": "1"}, "decay", 1.0), "eagle3 'ce' needs 0 '1'"),
        (({"ce": 0.0, "kl": 0}, "decay", 1.0), "eagle3 needs 0"),
        (({}, "decay", 1.0), "eagle3 needs 0"),
        (({"smooth_l1": 1.0}, "decay", 1.0), "eagle3 'smooth_l1'"),
        (({"l1": 1.0}, "decay", 1.0), "unknown 'l1'"),
        (({"ce": 1.0}, "pace", 1.0), "eagle3 depth_weights 'pace' decay d_pace"),
        (({"ce": 1.0}, "decay", 0.0), "eagle3 0 0.0"),
        (({"kl": 1.0}, "decay", 1.0, 0), "eagle3 target_top_k 1 0"),
        (({"reverse_kl": 0.1}, "decay", 1.0, 8), "eagle3 target_top_k reverse_kl"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_what_cannot_be_trained_on_is_refused_by_name(objective: Any, message: str) -> None:
    with refused(message):
        Objective(*objective).check("eagle3")


def test_what_can_be_trained_on_is_taken() -> None:
    Objective({"kl": 1.0}, target_top_k=8).check("eagle")
    Objective({"reverse_kl": 0.1}).check("eagle")
    Objective({"smooth_l1": 1.0, "soft_ce": 0.1}).check("eagle", ("smooth_l1",))


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("drafted", [None, 7])
@pytest.mark.parametrize("loss", [*LOSSES])
def test_positions_that_are_left_out_change_nothing_for_the_others(
    loss: str, drafted: int | None, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft position's gradient is its own, whichever others share its chunk and the target's
    states."""
    monkeypatch.setattr(losses, "positions_at_once", lambda *_: size)
    whole = problem_of(random_mask(12), drafted=drafted)
    whole.solve({loss: 1.0}, decay=0.7).loss.backward()
    torch.manual_seed(0)
    positions = DraftPositions.of(whole.features, 3, at_most=4)
    assert positions.on_host_NK is not None and whole.positions.on_host_NK is None
    chosen = [whole.positions.index_N.tolist().index(place) for place in positions.index_N.tolist()]
    hiddens = [hidden_ND.detach()[chosen].requires_grad_() for hidden_ND in whole.hiddens]
    some = dataclasses.replace(whole, positions=positions, hiddens=hiddens)
    some.solve({loss: 1.0}, decay=0.7).loss.backward()
    for own, hidden in zip(hiddens, whole.hiddens, strict=True):
        torch.testing.assert_close(own.grad, hidden.grad[chosen])


@pytest.mark.parametrize(
    "objective",
    [
        Objective({"soft_ce": 1.0}),
        Objective({"kl": 1.0, "lk_lambda": 0.5, "confidence": 0.1}),
        Objective({"ce": 1.0, "tv": 1.0}, target_top_k=6),
    ],
    ids=lambda objective: "-".join(objective.loss),
)
def test_what_is_fused_on_a_gpu_is_one_graph(objective):
    """torch traces it whole, for other numbers of positions too, and gradients are the same."""
    plain = (losses.depth_loss.__wrapped__, losses.probabilities.__wrapped__)
    traced = [
        torch.compile(function, dynamic=True, backend="aot_eager", fullgraph=True)
        for function in plain
    ]
    for positions in (7, 5):
        torch.manual_seed(positions)
        logits_NV = torch.randn(positions, VOCAB, dtype=torch.bfloat16).requires_grad_()
        target_NV = torch.randn(positions, VOCAB, dtype=torch.bfloat16)
        labels_N = torch.randint(-1, VOCAB, (positions,))
        valid_N = labels_N >= 0
        leaves = [logits_NV]
        confidence_N = None
        if "confidence" in objective.loss:
            confidence_N = torch.randn(positions).requires_grad_()
            leaves.append(confidence_N)
        results = []
        for depth_loss, probabilities in (plain, traced):
            target_probs_NV = probabilities(target_NV, None, objective)
            reached_N = torch.ones_like(valid_N)
            truth = losses.Truth(target_probs_NV, labels_N, reached_N, valid_N, valid_N * 0.5, 0.8)
            loss, metrics = depth_loss(logits_NV, None, confidence_N, truth, objective, 2)
            results.append([loss.detach(), *metrics, *torch.autograd.grad(loss, leaves)])
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other)
