"""The loop of speculative decoding, from the prompts to the last token.

tree    = a drafter's guesses of what follows the newest token
output  = one forward of the target over all nodes of the tree
verdict = the path that the acceptance rule lets stand, and one token more from the target
"""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from .cache import TreeCache
from .deciding import Decider
from .guessing import RootOnly
from .rounds import Drafter, Passage, Start
from .sampling import Draw, RandomDraw, ReadyDraw, Scorer, place_numbers
from .stats import Stats
from .target import Target
from .tree import DraftTree
from .written import Written

PREFILL_TOKENS = 2048
"""Tokens of each prompt that are read at once: what a long prompt needs beyond its cache does not grow with it."""


@dataclass(frozen=True)
class Rules:
    """What stays the same from the first token to the last."""

    target: Target
    decide: Decider
    """The acceptance rule, and what follows from it."""
    score: Scorer
    """Logits to scores, with all processors."""
    draw: Draw
    """Of drafts and verdicts."""
    sampling: bool
    """False for greedy decoding."""
    uniform_RP: Tensor | None = None
    """One number for every place of every row of the call, by which the rule draws the token there; None where the
    rule draws round by round."""

    def draw_at(self, tree: DraftTree, out: Written) -> Draw:
        """What the rule draws by: a node at depth d of a row with n new tokens decides the token at place n + d.

        So the same numbers give the same text whatever was drafted: another tree asks for the same places.
        """
        if self.uniform_RP is None:
            return self.draw
        places_B2 = torch.tensor([[row, len(out.rows[row])] for row in out.active], device=self.uniform_RP.device)
        rows_B1, written_B1 = places_B2.split(1, dim=1)
        places_BN = (written_B1 + tree.depths_BN).clamp(max=self.uniform_RP.shape[1] - 1)  # deeper is not returned
        return ReadyDraw(self.uniform_RP[rows_B1, places_BN])


@torch.inference_mode()
def speculate(rules: Rules, drafter: Drafter, out: Written) -> Stats:
    """Write on until every row has ended; what was written is in `out`, as are the prompts and when to stop."""
    stats = Stats(rows=[[] for _ in out.rows])
    if rules.decide.by_place and type(rules.draw) is RandomDraw:
        numbers = place_numbers(rules.draw, len(out.rows), out.new_tokens, rules.target.device)
        rules = replace(rules, uniform_RP=numbers)
    with stats.clock("prefill"):
        cache, roots_B = _begin(rules, drafter, out)
        roots_B = _turn_over(rules, drafter, out, cache, roots_B)
    while out.active:
        began = time.perf_counter()
        with stats.clock("draft"):
            tree = drafter.propose(roots_B)
        with stats.clock("target"):
            output = rules.target.forward_tree(tree, out.longest, cache, drafter.feature_layers)
        with stats.clock("processors"):
            scores_BNV = rules.score(output.logits_BNV, tree, out)
        finished = rules.decide(tree, output, scores_BNV, rules.draw_at(tree, out), cache, stats)
        with stats.clock("host"):
            finished = out.add(finished, scores_BNV, stats, drafter.asks(finished))
        with stats.clock("draft"):
            drafter.observe(finished)
        stats.round_seconds.append(time.perf_counter() - began)
        with stats.clock("prefill"):
            roots_B = _turn_over(rules, drafter, out, cache, finished.verdict.next_tokens_B)
        stats.max_depth = max(stats.max_depth, tree.max_depth)
    return stats


def _turn_over(rules: Rules, drafter: Drafter, out: Written, cache: TreeCache, roots_B: Tensor) -> Tensor:
    """Rows that have ended leave the batch: waiting ones take their places, or it shrinks; return all rows' roots."""
    while (places := out.ended_places()) and out.waiting:
        held = out.active
        out.active = [out.waiting.popleft() for _ in range(min(len(places), len(out.waiting)))]
        fresh = copy.copy(drafter)
        fresh_cache, fresh_roots = _begin(rules, fresh, out)
        into_R = torch.tensor(places[: len(out.active)], device=roots_B.device)
        cache.replace(into_R, fresh_cache)
        drafter.replace(into_R, fresh)
        roots_B = roots_B.index_copy(0, into_R, fresh_roots)
        for place, row in zip(places, out.active, strict=False):
            held[place] = row
        out.active = held
    rows = out.drop_ended()
    if not rows:
        return roots_B
    rows_R = torch.tensor(rows, device=roots_B.device)
    cache.select(rows_R)
    drafter.select(rows_R)
    return roots_B[rows_R]


def _begin(rules: Rules, drafter: Drafter, out: Written) -> tuple[TreeCache, Tensor]:
    """Read the active rows' prompts, chunk by chunk; return the cache, and the token that the target chooses next."""
    target, prompts = rules.target, [out.prompts[row] for row in out.active]
    capacity = max(map(len, out.prompts)) + out.new_tokens + drafter.max_nodes
    drafter.begin(Start(len(prompts), capacity, rules.draw, rules.score.draft_probs if rules.sampling else None))
    cache = target.new_cache(len(prompts))
    tokens_BT = pad_sequence(prompts, batch_first=True).to(target.device)
    lengths, layers = [len(prompt) for prompt in prompts], drafter.feature_layers
    lengths_B = torch.tensor(lengths, device=target.device)
    logits: dict[int, Tensor] = {}
    features: dict[int, Tensor] = {}
    for start in range(0, max(lengths), PREFILL_TOKENS):
        chunk_BT = tokens_BT[:, start : start + PREFILL_TOKENS]
        size = chunk_BT.shape[1]
        ends = {row: length - 1 - start for row, length in enumerate(lengths) if 0 < length - start <= size}
        kept = sorted(set(ends.values()))
        output = target.read_chunk(chunk_BT, max(lengths), cache, layers, kept)
        for row, place in ends.items():
            logits[row], features[row] = output.logits_BNV[row, kept.index(place)], output.features_BNF[row, place]
        if max(lengths) - 1 > start:  # what follows a prompt's last token is not known yet
            next_BT = tokens_BT[:, start + 1 : start + 1 + size]
            known = next_BT.shape[1]
            known_B = (lengths_B - 1 - start).clamp(0, known)
            drafter.read(Passage(chunk_BT[:, :known], next_BT, output.features_BNF[:, :known], known_B))
    cache.rewind(lengths_B)
    last_B1 = tokens_BT.gather(1, lengths_B[:, None] - 1)
    tree = RootOnly().propose(last_B1[:, 0])
    rows = range(len(lengths))
    logits_B1V = torch.stack([logits[row] for row in rows])[:, None]
    features_B1F = torch.stack([features[row] for row in rows])[:, None]
    scores_B1V = rules.score(logits_B1V, tree, out)
    roots_B = rules.decide.verify(tree, scores_B1V, rules.draw_at(tree, out)).next_tokens_B
    out.first(roots_B, scores_B1V, logits_B1V)
    drafter.read(Passage(last_B1, roots_B[:, None], features_B1F, torch.ones_like(lengths_B)))
    return cache, roots_B
