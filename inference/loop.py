"""The loop of speculative decoding, from the prompts to the last token.

tree    = a drafter's guesses of what follows the newest token
output  = one forward of the target over all nodes of the tree
verdict = the path that the acceptance rule lets stand, and one token more from the target
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from .conversation import Conversation, shared_length
from .drafters.base import DraftContext, Drafter, NoDraft, PrefillChunk
from .kv_cache import TreeCache
from .logits import PositionNoise, PositionSampler, RandomSampler, Sampler, TreeLogitsProcessor
from .sequences import Sequences
from .stats import Stats
from .target import Target, TargetOutput
from .tree import DraftTree
from .verify_step import Decider

SHARED_TOKENS = 32
"""With which all prompts of a batch must begin to be read once: a forward more must not cost more than it saves."""
PREFILL_TOKENS = 2048
"""Tokens of each prompt that are read at once: what a long prompt needs beyond its cache does not grow with it."""


@dataclass(frozen=True)
class Rules:
    """What stays the same from the first token to the last."""

    target: Target
    decide: Decider
    """The acceptance rule, and what follows from it."""
    score: TreeLogitsProcessor
    """Logits to scores, with all processors."""
    draw: Sampler
    """Of drafts and verdicts."""
    sampling: bool
    """False for greedy decoding."""
    noise: PositionNoise | None = None
    """By which the token at each place of each row is drawn, whatever was drafted; None where the rule draws round by
    round."""

    def draw_at(self, tree: DraftTree) -> Sampler:
        """What the rule draws by: a node at depth d of a row with n new tokens decides the token at place n + d."""
        return self.draw if self.noise is None else PositionSampler(self.noise.of(tree))

    def gumbel(self, count: int) -> Tensor:
        """See `DraftContext.gumbel`."""
        assert self.noise is not None
        return self.noise.next(count + 1)[:, :count].log().mul_(-self.score.temperature)  # one more: for the rule

    def at_places_of(self, out: Sequences) -> None:
        """The places that the next round decides are the next ones of the active rows."""
        if self.noise is not None:
            self.noise.move([(row, len(out.rows[row])) for row in out.active])


@torch.inference_mode()
def speculate(rules: Rules, drafter: Drafter, out: Sequences, past: Conversation | None = None) -> Stats:
    """Write on until every row has ended; what was written is in `out`, as are the prompts and when to stop.

    Args:
        rules: that hold throughout.
        drafter: what guesses.
        out: the texts.
        past: of one row: what was read of its text before, and where what is read now is kept.
    """
    stats = Stats(rows=[[] for _ in out.rows])
    if rules.decide.by_place and type(rules.draw) is RandomSampler:
        target = rules.target
        noise = PositionNoise(rules.draw, len(out.rows), drafter.max_nodes + 1, target.info.vocab_size, target.device)
        rules = replace(rules, noise=noise)
    with stats.clock("prefill"):
        cache, roots_B = _begin(rules, drafter, out, past)
        roots_B = _turn_over(rules, drafter, out, cache, roots_B)
    while out.active:
        began = time.perf_counter()
        rules.at_places_of(out)
        with stats.clock("draft"):
            tree = drafter.propose(roots_B)
        with stats.clock("target"):
            output = rules.target.forward_tree(tree, out.longest, cache, drafter.feature_layers)
        with stats.clock("processors"):
            scores_BNV = rules.score(output.logits_BNV, tree, out)
        finished = rules.decide(tree, output, scores_BNV, rules.draw_at(tree), cache, stats)
        with stats.clock("host"):
            finished = out.add(finished, scores_BNV, stats, drafter.host_values(finished))
        with stats.clock("draft"):
            drafter.observe(finished)
        stats.round_seconds.append(time.perf_counter() - began)
        with stats.clock("prefill"):
            roots_B = _turn_over(rules, drafter, out, cache, finished.verdict.next_tokens_B)
        stats.max_depth = max(stats.max_depth, tree.max_depth)
    if past is not None:
        past.keep(out.text(0).tolist(), cache, drafter)
    else:
        cache.release()
    return stats


def _turn_over(rules: Rules, drafter: Drafter, out: Sequences, cache: TreeCache, roots_B: Tensor) -> Tensor:
    """Rows that have ended leave the batch: waiting ones take their places, or it shrinks; return all rows' roots."""
    while (places := out.ended_places()) and out.waiting:
        held = out.active
        out.active = [out.waiting.popleft() for _ in range(min(len(places), len(out.waiting)))]
        fresh = drafter.fresh()
        fresh_cache, fresh_roots = _begin(rules, fresh, out)
        into_R = torch.tensor(places[: len(out.active)], device=roots_B.device)
        cache.replace(into_R, fresh_cache)
        fresh_cache.release()
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


def _begin(
    rules: Rules, drafter: Drafter, out: Sequences, past: Conversation | None = None
) -> tuple[TreeCache, Tensor]:
    """Read the active rows' prompts, chunk by chunk; return the cache, and the token that the target chooses next."""
    target, prompts = rules.target, [out.prompts[row] for row in out.active]
    lengths = [len(prompt) for prompt in prompts]
    capacity = max(map(len, out.prompts)) + out.new_tokens + drafter.max_nodes
    probs = rules.score.draft_probs if rules.sampling else None
    gumbel = None if rules.noise is None else rules.gumbel
    start = DraftContext(len(prompts), capacity, rules.draw, probs, gumbel)
    cache, kept = (None, 0) if past is None else past.resume(start, drafter, prompts[0])
    if not kept:
        drafter.begin(start)
    tokens_BT = pad_sequence(prompts, batch_first=True).to(target.device)
    stages = _stages(tokens_BT, lengths, kept, target.shares_prompts)
    cache = cache or target.new_cache(len(stages[0].rows), capacity, len(prompts))
    found: dict[int, tuple[Tensor, Tensor]] = {}
    for number, stage in enumerate(stages):
        if number:
            cache.select(torch.zeros(len(stage.rows), dtype=torch.int64, device=target.device))
        found |= _read(stage, tokens_BT, lengths, target, cache, drafter)
    if len(stage.rows) < len(prompts):
        cache.select(torch.tensor(stage.of_row, device=target.device))
    lengths_B = torch.tensor(lengths, device=target.device)
    cache.rewind(lengths_B)
    last_B1 = tokens_BT.gather(1, lengths_B[:, None] - 1)
    tree = NoDraft().propose(last_B1[:, 0])
    logits_B1V, features_B1F = (torch.stack([found[row][i] for row in stage.of_row])[:, None] for i in (0, 1))
    scores_B1V = rules.score(logits_B1V, tree, out)
    rules.at_places_of(out)
    roots_B = rules.decide.verify(tree, scores_B1V, rules.draw_at(tree)).next_tokens_B
    out.first(roots_B, scores_B1V, logits_B1V)
    drafter.prefill(PrefillChunk(last_B1, roots_B[:, None], features_B1F, torch.ones_like(lengths_B)))
    return cache, roots_B


@dataclass(frozen=True)
class Stage:
    """A part of the prompts that is read together."""

    begin: int
    end: int
    rows: list[int]
    """The rows that the target reads: the cache has as many."""
    of_row: list[int]
    """For each row of the batch which of these, by its place in `rows`, has its prompt."""


def _stages(tokens_BT: Tensor, lengths: list[int], kept: int, shares: bool) -> list[Stage]:
    """How prompts are read: what all of them begin with once, and each of those that are alike once.

    Args:
        tokens_BT: right-padded.
        lengths: of the prompts.
        kept: tokens that were read before.
        shares: whether rows may share what is read.
    """
    every, longest = list(range(len(lengths))), max(lengths)
    if len(lengths) == 1 or not shares:
        return [Stage(kept, longest, every, every)]
    # sync: once a batch
    texts = [tuple(row[:length]) for row, length in zip(tokens_BT.tolist(), lengths, strict=True)]
    different = list(dict.fromkeys(texts))
    rows, of_row = [texts.index(text) for text in different], [different.index(text) for text in texts]
    # What follows each token that is read together must be the same, too: a head reads it.
    shared = shared_length(different) - 1
    if len(different) == 1 or shared < SHARED_TOKENS:
        return [Stage(0, longest, rows, of_row)]
    return [Stage(0, shared, [0], [0] * len(lengths)), Stage(shared, longest, rows, of_row)]


def _read(
    stage: Stage, tokens_BT: Tensor, lengths: list[int], target: Target, cache: TreeCache, drafter: Drafter
) -> dict[int, tuple[Tensor, Tensor]]:
    """Read a part of the prompts; for each row of the stage that ends in it, by its place, last logits and features."""
    layers = drafter.feature_layers
    lengths_B = torch.tensor(lengths, device=target.device)
    together = stage.rows == stage.of_row
    of_row_B = torch.tensor(stage.of_row, device=target.device)
    read_RT = tokens_BT if together else tokens_BT[torch.tensor(stage.rows, device=target.device)]
    found: dict[int, tuple[Tensor, Tensor]] = {}
    for start in range(stage.begin, stage.end, PREFILL_TOKENS):
        stop = min(start + PREFILL_TOKENS, stage.end)
        ends = {place: lengths[row] - 1 - start for place, row in enumerate(stage.rows)}
        ends = {place: end for place, end in ends.items() if 0 <= end < stop - start}
        # Where rows end at different places, logits of all rows at all of these would be the square of what is wanted.
        # Without a head nobody asks for states: transformers would hook the user's model to give them.
        apart = len(set(ends.values())) > 1 and (layers or target.packed is not None) and target.computes_logits
        kept = [] if apart else sorted(set(ends.values()))
        wanted = (*layers, -1) if apart and -1 not in layers else layers
        output = target.read_chunk(read_RT[:, start:stop], stage.end, cache, wanted, kept)
        if apart:
            width = target.info.hidden_size
            of_last, of_layers = wanted.index(-1) * width, len(layers) * width
            states_BTD = output.features_BNF[..., of_last : of_last + width]
            logits = target.logits(torch.stack([states_BTD[place, end] for place, end in ends.items()])).unbind()
            output = TargetOutput(output.logits_BNV, output.features_BNF[..., :of_layers])
        else:
            logits = tuple(output.logits_BNV[place, kept.index(end)] for place, end in ends.items())
        for (place, end), logits_V in zip(ends.items(), logits, strict=True):
            found[place] = logits_V, output.features_BNF[place, end]
        next_BT = tokens_BT[:, start + 1 : stop + 1]
        known = next_BT.shape[1]
        if known:  # what follows a prompt's last token is not known yet
            features_BTF = output.features_BNF[:, :known] if together else output.features_BNF[of_row_B, :known]
            known_B = (lengths_B - 1 - start).clamp(0, known)
            drafter.prefill(PrefillChunk(tokens_BT[:, start : start + known], next_BT, features_BTF, known_B))
    return found
