"""The loop of speculative decoding, from the prompts to the last token.

tree    = a drafter's guesses of what follows the newest token
output  = one forward of the target over all nodes of the tree
verdict = the path that the acceptance rule lets stand, and one token more from the target
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from .cache import TreeCache
from .grow import RootOnly
from .rounds import Drafter, Passage, Round, Start
from .sampling import Draw, Scorer
from .stats import Stats
from .target import Target
from .verify import Verifier
from .written import Written

PREFILL_TOKENS = 1024
"""Tokens of each prompt that are read at once: what a long prompt needs beyond its cache does not grow with it."""


@torch.inference_mode()
def speculate(
    target: Target, drafter: Drafter, verify: Verifier, score: Scorer, draw: Draw, out: Written, sampling: bool
) -> Stats:
    """Write on until every row has ended; what was written is in `out`.

    Args:
        target: the frozen model.
        drafter: what guesses.
        verify: the acceptance rule.
        score: logits to scores, with all processors.
        draw: of drafts and verdicts.
        out: the prompts, when to stop, and what was written.
        sampling: False for greedy decoding.
    """
    stats = Stats(rows=[[] for _ in out.rows])
    with stats.clock("prefill"):
        cache = target.new_cache(len(out.rows))
        capacity = out.longest + out.new_tokens + drafter.max_nodes
        drafter.begin(Start(len(out.rows), capacity, draw, score.draft_probs if sampling else None))
        roots_B = _prefill(target, drafter, verify, score, draw, out, cache)
        roots_B = _drop_ended(out, cache, drafter, roots_B)
    while out.active:
        with stats.clock("draft"):
            tree = drafter.propose(roots_B)
        with stats.clock("target"):
            output = target.forward_tree(tree, out.longest, cache, drafter.feature_layers)
        with stats.clock("verify"):
            scores_BNV = score(output.logits_BNV, tree, out)
            finished = Round(tree, output, verify(tree, scores_BNV, draw))
            out.add(finished, scores_BNV, stats)
        with stats.clock("rest"):
            cache.keep(finished.verdict.path_BA, finished.verdict.lengths_B)
        with stats.clock("draft"):
            drafter.observe(finished)
            roots_B = _drop_ended(out, cache, drafter, finished.verdict.next_tokens_B)
        stats.max_depth = max(stats.max_depth, tree.max_depth)
    return stats


def _prefill(
    target: Target, drafter: Drafter, verify: Verifier, score: Scorer, draw: Draw, out: Written, cache: TreeCache
) -> Tensor:
    """Read the prompts, chunk by chunk; return the token that the target chooses after each."""
    tokens_BT = pad_sequence(out.prompts, batch_first=True).to(target.device)
    lengths, layers = [len(prompt) for prompt in out.prompts], drafter.feature_layers
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
    scores_B1V = score(logits_B1V, tree, out)
    roots_B = verify(tree, scores_B1V, draw).next_tokens_B
    out.first(roots_B, scores_B1V, logits_B1V)
    drafter.read(Passage(last_B1, roots_B[:, None], features_B1F, torch.ones_like(lengths_B)))
    return roots_B


def _drop_ended(out: Written, cache: TreeCache, drafter: Drafter, roots_B: Tensor) -> Tensor:
    """Take the rows that have ended out of the batch, so that they cost nothing more; return the others' roots."""
    rows = out.drop_ended()
    if rows is None or not rows:
        return roots_B
    rows_R = torch.tensor(rows, device=roots_B.device)
    cache.select(rows_R)
    drafter.select(rows_R)
    return roots_B[rows_R]
