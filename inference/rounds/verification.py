"""A round's verification: the acceptance rule, its random numbers, and the commit of its path.

A rule is dozens of small operations, which take an accelerator far longer to launch than to run:
there they are recorded and replayed together with the compaction of the KV cache. Random numbers
are drawn beforehand.

Letters in tensor names: B batch, N nodes, A nodes of a path, U uniform numbers, V vocabulary, F
width of the chosen layers' features side by side.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...heads.layers.constants import counting
from ..cache.kv_cache import TreeCache
from ..drafters.round import Verdict
from ..trees.sampling import PositionSampler, RandomSampler, sampler_by
from ..trees.tree import DraftTree
from ..trees.verify import AcceptanceRule, emitted_tokens, greedy
from .observers import DecodingCall


def random_numbers(
    rule: AcceptanceRule, tree: DraftTree, sampler: RandomSampler, device: torch.device
) -> Tensor | RandomSampler | None:
    """Draw all random numbers that a rule may use in a round; None for greedy decoding.

    They are the exponential ones of the nodes' positions [B, N, V], or uniform ones [B, U]: one for
    each node and depth, and one for the bonus token. A sampler of another class, such as a test's
    that enumerates, is returned itself and supplies its own numbers.
    """
    if rule is greedy:
        return None
    if isinstance(sampler, PositionSampler):
        return sampler.exponential_BNV
    if type(sampler) is not RandomSampler:
        return sampler
    rows, nodes = tree.tokens_BN.shape
    return sampler.uniform((rows, nodes * tree.max_depth + 1), device)


def verify_and_commit(
    call: DecodingCall,
    tree: DraftTree,
    features_BNF: Tensor,
    scores_BNV: Tensor,
    numbers: Tensor | RandomSampler | None,
    cache: TreeCache,
) -> Verdict:
    """Return the verdict by these random numbers and commit it.

    Idle rows accept nothing.
    """
    # A sampler counts on the host which numbers were used, so it cannot be recorded.
    runner = call.target.engine.runner
    recorded = runner.replays and isinstance(numbers, Tensor | None)
    live_B = call.sequences.live_B
    with call.stats.timed("verify"):
        if recorded:
            tensors = (cache.slots_BN, tree, features_BNF, scores_BNV, numbers)
            verdict = runner(verify_and_compact, (cache,), call.rule, *tensors)
        else:
            verdict = verify(call.rule, tree, features_BNF, scores_BNV, numbers)
        # Idle rows: length 0, so that nothing is committed or emitted.
        if live_B is not None:
            lengths_B = verdict.lengths_B * live_B
            spoiled_B = verdict.spoiled_B & (live_B > 0)
            verdict = replace(verdict, lengths_B=lengths_B, spoiled_B=spoiled_B)
    with call.stats.timed("cache"):
        if recorded:
            cache.advance(verdict.lengths_B)
        else:
            cache.accept(verdict.path_BA, verdict.lengths_B, tree.in_order)
    return verdict


def verify_and_compact(
    cache: TreeCache,
    rule: AcceptanceRule,
    slots_BN: Tensor,
    tree: DraftTree,
    features_BNF: Tensor,
    scores_BNV: Tensor,
    numbers: Tensor | None,
) -> Verdict:
    """Verify, and move the accepted nodes' entries together; this function is recorded."""
    verdict = verify(rule, tree, features_BNF, scores_BNV, numbers)
    # A chain's accepted entries lie together already.
    if not tree.in_order:
        cache.slots_BN = slots_BN
        cache.compact(verdict.path_BA)
    return verdict


def verify(
    rule: AcceptanceRule,
    tree: DraftTree,
    features_BNF: Tensor,
    scores_BNV: Tensor,
    numbers: Tensor | RandomSampler | None,
) -> Verdict:
    """The verdict on a tree by its scores."""
    result = rule(tree, scores_BNV, sampler_by(numbers))
    path_BA = result.path_BA
    emitted_BA = result.emitted_BA
    if emitted_BA is None:
        emitted_BA = emitted_tokens(tree, result)
    # The best score after each accepted node, and its features. On a chain the path is the
    # nodes in their order: A = N, and nothing is gathered.
    if tree.in_order:
        best_BA = scores_BNV.amax(-1)
        features_BAF = features_BNF
    else:
        rows_B1 = counting(len(path_BA), path_BA.device, column=True)
        best_BA = scores_BNV[rows_B1, path_BA].amax(-1)
        features_BAF = features_BNF[rows_B1, path_BA]
    # An infinite logit is the best one for greedy decoding, but leaves no probabilities to
    # sample from.
    finite_BA = best_BA > -torch.inf if rule is greedy else best_BA.isfinite()
    # A path ends before the first node after which no token can be chosen. With 3 accepted
    # nodes of A = 4:
    #     finite                             1 0 1 1
    #     accepted, or the node's number     3 1 3 3
    #     least of them, the length          1: the path is spoiled
    number_A = counting(path_BA.shape[1], path_BA.device)
    lengths_B = torch.where(finite_BA, result.lengths_B[:, None], number_A).amin(1)
    spoiled_B = lengths_B < result.lengths_B
    return Verdict(path_BA, lengths_B, result.next_tokens_B, emitted_BA, features_BAF, spoiled_B)
