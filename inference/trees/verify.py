"""Acceptance rules: pure functions of a draft tree and the target's scores at its nodes.

With target_probs p = softmax(scores) and draft_probs q, the distribution that a node's children
were sampled from:

    greedy                 go to the child that is the best token: what greedy decoding generates
    point_mass             draw y from p; go to the child that is y           (any tree; 2408.07978)
    token                  accept a sampled x with min(1, p(x)/q(x)),
                           else draw from norm((p - q)+)                                (2211.17192)
    with_replacement       the same child by child: after a rejection
                           p becomes norm((p - q)+)                                     (2305.09781)
    without_replacement    and x leaves q, which is renormalised            (2402.12374, 2402.14160)
    block                  the whole chain, from its end:
                           accept the longest prefix that may stand                     (2403.10444)
    traversal              the same for trees, leaf by leaf                             (2505.12398)
    typical                accept x if p(x) > min(epsilon, delta exp(-entropy of p))    (2401.10774)

All but `typical` are exact: emitted tokens have the target's distribution (greedy: are its best
text). `typical` is lossy: it emits what the target finds plausible, and more of it.

No rule waits for the device: those for sampled trees walk the tree's `shape`, which the host knows.
A node whose token has draft probability 0 was not sampled, because its siblings took all tokens of
positive probability: it is skipped.

Letters in tensor names: B batch, N nodes, A accepted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ...heads.layers.constants import constants, counting
from .sampling import RandomSampler
from .tree import DraftTree
from .tree_spec import ROOT, TreeKind, TreeShape


@dataclass(frozen=True)
class VerifyResult:
    """Outcome of an acceptance rule."""

    path_BA: Tensor
    """The accepted nodes, the root first, as indices into the tree; A is its depth + 1, the rest is
    padding."""
    lengths_B: Tensor
    """Valid nodes of each path, the root counted; also the number of emitted tokens: the path
    without its root, then `next_tokens_B`."""
    next_tokens_B: Tensor
    """The bonus token: the target's own choice after the path, and the next round's root."""
    emitted_BA: Tensor | None = None
    """The emitted tokens, padded; None where `emitted_tokens` reads them from the path."""


AcceptanceRule = Callable[[DraftTree, Tensor, RandomSampler], VerifyResult]
"""An acceptance rule: (tree, scores_BNV, sampler) to its result. It draws at most nodes × depth + 1
numbers a row."""
EPSILON = 0.09
DELTA = 0.3
"""Medusa's thresholds for typical acceptance."""


def emitted_tokens(tree: DraftTree, result: VerifyResult) -> Tensor:
    """Return the tokens that follow each accepted node, [B, A], padded.

    They are the rest of the path, then the bonus token.
    """
    # The path's tokens [root, cat, sat, padding], length 3, rolled: [cat, sat, padding, root]. The
    # bonus token goes to index length - 1: [cat, sat, bonus, root].
    ordered_BA = tree.tokens_BN if tree.in_order else tree.tokens_BN.gather(1, result.path_BA)
    return ordered_BA.roll(-1, 1).scatter(
        1, result.lengths_B[:, None] - 1, result.next_tokens_B[:, None]
    )


def greedy(tree: DraftTree, scores_BNV: Tensor, sampler: RandomSampler) -> VerifyResult:
    """Accept what equals the target's best token; lossless with respect to greedy decoding.

    `sampler` is not used.
    """
    return follow(tree, scores_BNV.argmax(-1))


def point_mass(tree: DraftTree, scores_BNV: Tensor, sampler: RandomSampler) -> VerifyResult:
    """Accept drafts that equal a token drawn from the target.

    The rule is lossless for any tree made independently of the draws.

    With random numbers fixed for each position of the text (`PositionNoise`) it is lossless for any
    tree, also one that was drafted with these numbers, and the text is the same whatever was
    drafted.
    """
    return follow(tree, sampler.categorical(scores_BNV.softmax(-1)))


def follow(tree: DraftTree, choices_BN: Tensor) -> VerifyResult:
    """Walk from the root along children that equal the token chosen at their parent.

    The choices at all nodes are `choices_BN`.
    """
    batch, nodes = tree.tokens_BN.shape
    index_N = counting(nodes, choices_BN.device)

    # 1. The root alone: its choice is the bonus token.
    if nodes == 1:
        return VerifyResult(index_N.expand(batch, -1), tree.sizes_B, choices_BN[:, 0], choices_BN)

    # 2. A chain: the draft at n + 1 must equal the choice at n. cumprod stops at the first that
    # does not: right [1, 1, 0, 1] gives [1, 1, 0, 0], 2 accepted.
    if tree.in_order:
        right_BD = tree.tokens_BN[:, 1:] == choices_BN[:, :-1]
        if tree.padding:
            right_BD = right_BD & (index_N[1:] < tree.sizes_B[:, None])
        accepted_B1 = right_BD.cumprod(1).sum(1, keepdim=True)
        next_tokens_B = choices_BN.gather(1, accepted_B1)[:, 0]
        return VerifyResult(
            index_N.expand(batch, -1), accepted_B1[:, 0] + 1, next_tokens_B, choices_BN
        )

    # 3. A tree: a node is chosen if its token equals the choice at its parent. Of equal siblings
    # only the first counts: else the draws below both would compete for the longer path.
    chosen_BN = tree.tokens_BN == choices_BN.gather(1, tree.structure.above_BN)
    if tree.kind == "sampled_independent":
        siblings_BNN = tree.parents_BN[:, :, None] == tree.parents_BN[:, None]
        earlier_NN = index_N < index_N[:, None]  # [n, m]: m stands before n
        chosen_BN = chosen_BN & ~(siblings_BNN & chosen_BN[:, None] & earlier_NN).any(-1)

    # 4. Chosen nodes whose ancestors are all chosen form one path. Its last node is the deepest; if
    # nothing was accepted, all depths are 0, and argmax takes the first node, the root.
    last_B = tree.structure.depths_BN.masked_fill(_rejected(tree, chosen_BN), 0).argmax(-1)
    path_BA, lengths_B = tree.path_to(last_B)
    next_tokens_B = choices_BN[counting(batch, last_B.device), last_B]
    return VerifyResult(path_BA, lengths_B, next_tokens_B, choices_BN.gather(1, path_BA))


def without_replacement(
    tree: DraftTree, scores_BNV: Tensor, sampler: RandomSampler, replace: bool = False
) -> VerifyResult:
    """Accept or reject child by child against the target's residual.

    The rule is lossless for children that were sampled without replacement.

    Walk from the root: accept a child x with min(1, p(x)/q(x)), or take q out of p and try the next
    one. All rows walk together, each with a mask for whether it still does.
    """
    _, draft_BNV = _sampled_children(tree)
    target_BNV = scores_BNV.softmax(-1)
    rows_B = torch.arange(len(target_BNV), device=target_BNV.device)
    table_NW = _children_table(tree.shape or ROOT, target_BNV.device)
    node_B = torch.zeros_like(rows_B)  # where each row stands: at the root
    walking_B = torch.ones_like(rows_B, dtype=torch.bool)
    p_BV = target_BNV[:, 0]  # what the next token is drawn from if no child is accepted
    for _ in range(tree.max_depth):
        next_B = torch.zeros_like(node_B)  # the accepted child; 0, the root, while there is none
        q_BV = draft_BNV[rows_B, node_B]
        # Children in draw order. The table's padding is 0, the root, which is no node's child.
        for child_B in table_NW[node_B].unbind(1):
            tokens_B1 = tree.tokens_BN.gather(1, child_B[:, None])
            p_B = p_BV.gather(1, tokens_B1)[:, 0]
            q_B = q_BV.gather(1, tokens_B1)[:, 0]
            # Accept x with min(1, p(x) / q(x)); rows that do not try get probability 0.
            tried_B = walking_B & (next_B == 0) & (child_B > 0) & (q_B > 0)
            accepted_B = sampler.accept(torch.where(tried_B, (p_B / q_B).clamp(max=1), 0.0))
            next_B = torch.where(accepted_B, child_B, next_B)
            # After a rejection p becomes norm((p - q)+). Without replacement x cannot be drawn
            # again, so it leaves q, too.
            rejected_B1 = (tried_B & ~accepted_B)[:, None]
            p_BV = torch.where(rejected_B1, normalized((p_BV - q_BV).clamp(min=0), p_BV), p_BV)
            if not replace:
                q_BV = torch.where(rejected_B1, normalized(q_BV.scatter(1, tokens_B1, 0.0)), q_BV)
        # Go to the accepted child, where p is the target's own again. Other rows stay for good.
        walking_B = next_B > 0
        node_B = torch.where(walking_B, next_B, node_B)
        p_BV = torch.where(walking_B[:, None], target_BNV[rows_B, node_B], p_BV)
    return VerifyResult(*tree.path_to(node_B), sampler.categorical(p_BV))


with_replacement: AcceptanceRule = partial(without_replacement, replace=True)
"""The same, lossless for children that were sampled independently."""


def traversal(tree: DraftTree, scores_BNV: Tensor, sampler: RandomSampler) -> VerifyResult:
    """Accept the whole path to a leaf, or remove the leaf and continue with the rest of the tree.

    For children sampled without replacement. weight_B[n] is the probability with which the path to
    n may stand, were n a leaf; on a chain it is block verification.
    """
    # 1. For each node: p and q, the target's and the draft's distribution of its children, and the
    # weight. They change as children are removed.
    children, draft_BNV = _sampled_children(tree)
    target_BNV = scores_BNV.softmax(-1)
    nodes = range(len(children))
    p = [target_BNV[:, node] for node in nodes]
    q = [draft_BNV[:, node] for node in nodes]
    weight_B = [torch.ones_like(p[0][:, 0])] * len(p)
    last_B = torch.zeros_like(tree.sizes_B)
    open_B = torch.ones_like(last_B, dtype=torch.bool)  # rows whose path is not yet decided
    for parent, node, leaving in depth_first(children):
        tokens_B1 = tree.tokens_BN[:, node, None]
        p_B = p[parent].gather(1, tokens_B1)[:, 0]
        q_B = q[parent].gather(1, tokens_B1)[:, 0]

        # 2. On the way down: the path to the node may stand with min(1, its parent's weight * p/q).
        if not leaving:
            ratio_B = torch.where(q_B > 0, p_B / q_B, 0.0)
            weight_B[node] = (weight_B[parent] * ratio_B).clamp(max=1)
            continue

        # 3. On leaving, all below the node is gone, so it is a leaf: accept the path to it, or not.
        accepted_B = sampler.accept(torch.where(open_B, weight_B[node], 0.0))
        last_B = torch.where(accepted_B, node, last_B)
        open_B = open_B & ~accepted_B

        # 4. Not accepted: the node leaves the tree. At its parent p becomes the residual, q loses
        # the token, and the weight becomes the share of the residual in what is left.
        residual_BV = (weight_B[parent][:, None] * p[parent] - q[parent]).clamp(min=0)
        mass_B = residual_BV.sum(-1)
        # 0 where p and q agree: then the child was accepted for certain
        left_B = mass_B + 1 - weight_B[parent]
        # Unused where a path was accepted; nothing changes for a child that was not sampled.
        p[parent] = normalized(residual_BV, p[parent])
        # all 0 after the last possible token
        q[parent] = normalized(q[parent].scatter(1, tokens_B1, 0.0))
        weight_B[parent] = torch.where(left_B > 0, mass_B / left_B, weight_B[parent])

    # 5. The bonus token comes from what is left of p at the last accepted node.
    rows_B = torch.arange(len(last_B), device=last_B.device)
    next_tokens_B = sampler.categorical(torch.stack(p, dim=1)[rows_B, last_B])
    return VerifyResult(*tree.path_to(last_B), next_tokens_B)


def typical(
    tree: DraftTree,
    scores_BNV: Tensor,
    sampler: RandomSampler,
    epsilon: float = EPSILON,
    delta: float = DELTA,
) -> VerifyResult:
    """LOSSY: accept whatever the target finds plausible; does not keep the target's distribution.

    A child x stands if p(x) > min(epsilon, delta exp(-H(p))); of the longest paths the likeliest
    wins, and the target's best token follows (Medusa, section 2.3.1). `sampler` is not used: with
    the same drafts a prompt has one text, whatever the seed, and that is closer to the greedy one
    than a sample is (benchmarks/typical.md).
    """
    # 1. Which nodes are plausible at their parents, together with all their ancestors.
    log_p_BNV = scores_BNV.log_softmax(-1)
    threshold_BN = typical_threshold(log_p_BNV, epsilon, delta)
    parents_BN = tree.structure.above_BN
    log_p_BN = log_p_BNV[
        torch.arange(len(parents_BN), device=parents_BN.device)[:, None], parents_BN, tree.tokens_BN
    ]
    index_N = torch.arange(parents_BN.shape[1], device=parents_BN.device)
    plausible_BN = log_p_BN.exp() > threshold_BN.gather(1, parents_BN)
    depths_BN = tree.structure.depths_BN.masked_fill(_rejected(tree, plausible_BN), -1)

    # 2. The log probability of each path: the sum over its nodes. The product with the ancestors
    # [N, N] sums them; implausible nodes become 0 first, since -inf * 0 is NaN.
    log_p_BN = torch.where((index_N > 0) & plausible_BN, log_p_BN, 0.0)
    paths_BN = (tree.structure.ancestors_BNN.to(log_p_BN.dtype) @ log_p_BN[:, :, None])[..., 0]

    # 3. Of the longest paths the likeliest; the target's best token follows.
    longest_BN = depths_BN == depths_BN.amax(-1, keepdim=True)
    last_B = torch.where(longest_BN, paths_BN, -torch.inf).argmax(-1)
    next_tokens_B = scores_BNV.argmax(-1).gather(1, last_B[:, None])[:, 0]
    return VerifyResult(*tree.path_to(last_B), next_tokens_B)


def typical_threshold(log_p_BNV: Tensor, epsilon: float = EPSILON, delta: float = DELTA) -> Tensor:
    """The probability that a child of each node must exceed to be accepted by `typical`, [B, N]."""
    entropy_BN = -(log_p_BNV.exp() * log_p_BNV.nan_to_num(neginf=0.0)).sum(-1)
    return (delta * (-entropy_BN).exp()).clamp(max=epsilon)


@dataclass(frozen=True)
class Rule:
    """An acceptance rule, and for which trees it keeps the target's distribution."""

    verify: AcceptanceRule
    kinds: frozenset[TreeKind]
    """Kinds of trees for which the rule is exact."""
    top_down: bool
    """Whether a node's verdict depends on the scores of the node and its ancestors alone."""
    lossy: bool = False


ANY: frozenset[TreeKind] = frozenset(
    ("top_k", "sampled_chain", "sampled_independent", "sampled_without_replacement")
)
RULES: dict[str, Rule] = {
    "point_mass": Rule(point_mass, ANY, top_down=True),
    "token": Rule(without_replacement, frozenset(("sampled_chain",)), top_down=True),
    "with_replacement": Rule(
        with_replacement, frozenset(("sampled_chain", "sampled_independent")), top_down=True
    ),
    "without_replacement": Rule(
        without_replacement,
        frozenset(("sampled_chain", "sampled_without_replacement")),
        top_down=True,
    ),
    "block": Rule(traversal, frozenset(("sampled_chain",)), top_down=False),
    "traversal": Rule(
        traversal, frozenset(("sampled_chain", "sampled_without_replacement")), top_down=False
    ),
    "typical": Rule(typical, ANY, top_down=False, lossy=True),
}
"""Acceptance rules for sampling by name; greedy decoding has one rule, whatever the tree."""
BEST: dict[TreeKind, str] = {
    "top_k": "point_mass",
    "sampled_chain": "block",
    "sampled_independent": "with_replacement",
    "sampled_without_replacement": "traversal",
}
"""The exact rule that accepts most, by the kind of tree."""
BEST_TOP_DOWN: dict[TreeKind, str] = BEST | {
    "sampled_chain": "token",
    "sampled_without_replacement": "without_replacement",
}
"""The same among the rules that go from the root down."""


def is_lossy(name: str) -> bool:
    """Whether the rule of this name, or of "auto", changes the output distribution."""
    return name != "auto" and RULES[name.partition(":")[0]].lossy


def is_lossy_rule(rule: AcceptanceRule) -> bool:
    """Whether a rule, perhaps with options, changes the output distribution."""
    return any(known.lossy and is_rule(rule, known.verify) for known in RULES.values())


def is_rule(rule: AcceptanceRule, *rules: AcceptanceRule) -> bool:
    """Whether a rule is one of these, perhaps with options."""
    return (rule.func if isinstance(rule, partial) else rule) in rules


def check_rule_name(name: str) -> None:
    """Refuse a name that no rule has.

    Raises:
        ValueError: an unknown name; says which names there are.
    """
    known = isinstance(name, str) and name.partition(":")[0] in ("auto", *RULES)
    if not known:
        raise ValueError(
            f"unknown acceptance rule {str(name).partition(':')[0]!r}; choose from auto,"
            f" {', '.join(RULES)}"
        )


def choose_rule(name: str, kind: TreeKind, lossy: bool) -> AcceptanceRule:
    """Return the rule for sampling of this name; for "auto" the exact rule that accepts most.

    `typical:EPSILON:DELTA` sets the thresholds of typical acceptance.

    Raises:
        ValueError: an unknown name, a rule that would be biased for such trees, or a lossy rule
            without agreement.
    """
    check_rule_name(name)
    if name == "auto":
        return RULES[BEST[kind]].verify
    name, *thresholds = name.split(":")
    rule = RULES[name]
    if kind not in rule.kinds:
        fitting = ", ".join(
            other_name
            for other_name, other in RULES.items()
            if kind in other.kinds and not other.lossy
        )
        raise ValueError(
            f"the acceptance rule {name!r} would be biased for trees whose nodes are"
            f" {_SPOKEN[kind]}; choose from {fitting}"
        )
    if rule.lossy and not lossy:
        raise ValueError(
            f"the acceptance rule {name!r} is lossy: it does not keep the target's distribution;"
            f" say lossy=True if that is wanted, or choose {BEST[kind]!r}"
        )
    return rule.verify if not thresholds else _with_thresholds(name, thresholds)


def top_down_rule(name: str, kind: TreeKind) -> AcceptanceRule:
    """Return the rule of this name, or the exact one for "auto".

    It needs no scores of nodes that it rejects.

    Raises:
        ValueError: a rule that needs them.
    """
    if name == "auto":
        return RULES[BEST_TOP_DOWN[kind]].verify
    if not RULES[name.partition(":")[0]].top_down:
        raise ValueError(
            f"the acceptance rule {name!r} needs the scores of rejected drafts, and logits"
            " processors of your own (or prefix_allowed_tokens_fn) are called with accepted tokens"
            " alone, since they may keep a state; choose the acceptance rule 'auto' or"
            f" {BEST_TOP_DOWN[kind]!r}"
        )
    return RULES[name].verify


def _with_thresholds(name: str, thresholds: list[str]) -> AcceptanceRule:
    try:
        epsilon, delta = map(float, thresholds)
    except ValueError:
        epsilon = delta = -1.0
    if name != "typical" or not (0 < epsilon <= 1 and delta > 0):
        raise ValueError(
            f"unknown options {':'.join(thresholds)!r} of the acceptance rule {name!r}; only"
            " typical takes any: typical:EPSILON:DELTA with 0 < epsilon <= 1 and delta > 0, by"
            f" default typical:{EPSILON}:{DELTA}"
        )
    return partial(typical, epsilon=epsilon, delta=delta)


_SPOKEN: dict[TreeKind, str] = {
    "top_k": "top-k tokens and not sampled",
    "sampled_chain": "sampled, one child each",
    "sampled_independent": "sampled independently",
    "sampled_without_replacement": "sampled without replacement",
}


def _rejected(tree: DraftTree, accepted_BN: Tensor) -> Tensor:
    """Return whether each node, or an ancestor, is not accepted.

    The root is always accepted, padding never.
    """
    accepted_BN = accepted_BN | (tree.parents_BN < 0)  # the root's parent is -1
    if tree.padding:
        accepted_BN = accepted_BN & (
            counting(accepted_BN.shape[1], accepted_BN.device) < tree.sizes_B[:, None]
        )
    # [b, n, m]: m is an ancestor of n, or n itself, and not accepted.
    return (tree.structure.ancestors_BNN & ~accepted_BN[:, None]).any(-1)


@constants
def _children_table(shape: TreeShape, device: torch.device) -> Tensor:
    """The children of each node, [N, W], padded with 0, the root."""
    children = _children(shape)
    most = max(map(len, children))
    return torch.tensor([nodes + [0] * (most - len(nodes)) for nodes in children], device=device)


def _sampled_children(tree: DraftTree) -> tuple[list[list[int]], Tensor]:
    """Return the children of each node of a sampled tree, and their distributions [B, N, V].

    The children are in draw order and were sampled from these distributions.
    """
    if tree.max_depth == 0:  # the root alone: a tree of every kind, without draft probabilities
        return [[]], tree.tokens_BN.new_zeros(len(tree.tokens_BN), 1)
    assert tree.shape is not None and tree.draft_probs_BNV is not None
    return _children(tree.shape), tree.draft_probs_BNV


def _children(shape: TreeShape) -> list[list[int]]:
    """The children of every node, in draw order."""
    children: list[list[int]] = [[] for _ in shape.parents]
    for node, parent in enumerate(shape.parents[1:], start=1):
        children[parent].append(node)
    return children


def depth_first(children: list[list[int]], parent: int = 0) -> list[tuple[int, int, bool]]:
    """Depth-first tour: (parent, node, False) on the way down, (parent, node, True) on leaving."""
    tour: list[tuple[int, int, bool]] = []
    for node in children[parent]:
        tour += [(parent, node, False), *depth_first(children, node), (parent, node, True)]
    return tour


def normalized(mass_BV: Tensor, otherwise_BV: Tensor | None = None) -> Tensor:
    """Scale mass to sum 1; rows of zeros become `otherwise_BV`, or stay."""
    total_B1 = mass_BV.sum(-1, keepdim=True)
    if otherwise_BV is None:
        otherwise_BV = mass_BV
    return torch.where(total_B1 > 0, mass_BV / total_B1, otherwise_BV)
