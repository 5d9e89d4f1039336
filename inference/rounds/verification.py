"""A round's verification: the acceptance rule, its random numbers, and the commit of its path.

A rule is dozens of small operations, which take an accelerator far longer to launch than to run:
there they are recorded and replayed together with the compaction of the KV cache. Random numbers
are drawn beforehand.

Letters in tensor names: B batch, N nodes, A nodes of a path, U uniform numbers, V vocabulary, F
width of the chosen layers' features side by side.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from ...heads.layers.constants import counting
from ..cache.kv_cache import TreeCache
from ..drafters.round import Verdict
from ..engines.base import Runner
from ..trees.sampling import PositionSampler, PrecomputedSampler, RandomSampler, Sampler, sampler_by
from ..trees.stats import Stats
from ..trees.tree import DraftTree
from ..trees.verify import AcceptanceRule, emitted_tokens, greedy, point_mass

AS_IT_IS = Runner()
"""Runs functions directly, without recordings."""
UNUSED = RandomSampler()
"""Sampler for rules that draw no random numbers."""


class Verification:
    """An acceptance rule as the decoding loop runs it."""

    def __init__(self, rule: AcceptanceRule) -> None:
        self.rule = rule
        self.samples = rule is not greedy
        """Whether it is a rule for sampling."""
        self.one_draw_per_node = rule is point_mass

    def random_numbers(
        self, tree: DraftTree, scores_BNV: Tensor, sampler: Sampler
    ) -> Tensor | Sampler | None:
        """Return the random numbers for the rule; None if nothing is sampled.

        A sampler of another class, such as that from `drawn`, is returned itself and supplies its
        own numbers.
        """
        if not self.samples:
            return None
        if type(sampler) is PositionSampler:
            return sampler.exponential_BNV
        if type(sampler) is not RandomSampler:
            return sampler
        return uniform_numbers(tree, sampler, scores_BNV.device)

    def drawn(self, tree: DraftTree, scores_BNV: Tensor, sampler: Sampler) -> Sampler:
        """Return a sampler that holds all random numbers of a round.

        The rule can then be asked several times.
        """
        if not self.samples or isinstance(sampler, PositionSampler):
            return sampler
        return PrecomputedSampler(uniform_BU=uniform_numbers(tree, sampler, scores_BNV.device))

    def verify_and_commit(
        self,
        tree: DraftTree,
        features_BNF: Tensor,
        scores_BNV: Tensor,
        numbers: Tensor | Sampler | None,
        cache: TreeCache,
        stats: Stats,
        runner: Runner = AS_IT_IS,
        live_B: Tensor | None = None,
    ) -> Verdict:
        """Return the verdict by these random numbers and commit it.

        Rows where `live_B` is 0 are idle and accept nothing.
        """
        # A sampler counts on the host which numbers were used, so it cannot be recorded.
        recorded = runner.replays and not isinstance(numbers, Sampler)
        with stats.timed("verify"):
            if recorded:
                tensors = (cache.slots_BN, tree, features_BNF, scores_BNV, numbers)
                verdict = runner(self.verify_and_compact, (cache,), *tensors)
            else:
                verdict = self.verify(tree, features_BNF, scores_BNV, numbers)
            # Idle rows: length 0, so that nothing is committed or emitted.
            if live_B is not None:
                lengths_B = verdict.lengths_B * live_B
                cut_B = verdict.cut_B & (live_B > 0)
                verdict = replace(verdict, lengths_B=lengths_B, cut_B=cut_B)
        with stats.timed("cache"):
            if recorded:
                cache.advance(verdict.lengths_B)
            else:
                cache.accept(verdict.path_BA, verdict.lengths_B, tree.in_order)
        return verdict

    def verify_and_compact(
        self,
        cache: TreeCache,
        slots_BN: Tensor,
        tree: DraftTree,
        features_BNF: Tensor,
        scores_BNV: Tensor,
        numbers: Tensor | None,
    ) -> Verdict:
        """Verify, and move the accepted nodes' entries together; this function is recorded."""
        verdict = self.verify(tree, features_BNF, scores_BNV, numbers)
        # A chain's accepted entries lie together already.
        if not tree.in_order:
            cache.slots_BN = slots_BN
            cache.compact(verdict.path_BA)
        return verdict

    def verify(
        self,
        tree: DraftTree,
        features_BNF: Tensor,
        scores_BNV: Tensor,
        numbers: Tensor | Sampler | None,
    ) -> Verdict:
        """The verdict on a tree by its scores."""
        sampler = sampler_by(numbers) if isinstance(numbers, Tensor) else numbers
        result = self.rule(tree, scores_BNV, sampler or UNUSED)
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
        finite_BA = best_BA.isfinite() if self.samples else best_BA > -torch.inf
        # A path ends before the first node after which no token can be chosen. With 3 accepted
        # nodes of A = 4:
        #     finite                             1 0 1 1
        #     accepted, or the node's number     3 1 3 3
        #     least of them, the length          1, so the path is cut
        number_A = counting(path_BA.shape[1], path_BA.device)
        lengths_B = torch.where(finite_BA, result.lengths_B[:, None], number_A).amin(1)
        cut_B = lengths_B < result.lengths_B
        return Verdict(path_BA, lengths_B, result.next_tokens_B, emitted_BA, features_BAF, cut_B)


def uniform_numbers(tree: DraftTree, sampler: Sampler, device: torch.device) -> Tensor:
    """Return all the uniform numbers [B, U] that a rule may draw.

    There is one for each node and depth, and one for the bonus token.
    """
    rows, nodes = tree.tokens_BN.shape
    return sampler.uniform((rows, nodes * tree.max_depth + 1), device)


@lru_cache(maxsize=32)
def verification_by(rule: AcceptanceRule) -> Verification:
    """Return the verification by a rule, the same object each time.

    Its recordings then serve every generation.
    """
    return Verification(rule)
