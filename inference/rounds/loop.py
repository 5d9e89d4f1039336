"""The speculative decoding loop.

A round (`speculation_round`) has these steps, which are numbered in the code:

    1  proposed = drafter.propose(roots)                 what may follow each row's newest token,
                                                         the root
    2  verified, nodes = limits.cut(proposed)            the part that the target can verify now
    3  output = engine.forward_tree(verified, cache)     one forward over all nodes
    4  scores = process(output.logits, verified)         logits processors, each node with its own
                                                         prefix
    5  verdict = verify_and_commit(verified, scores)     the accepted path and one token more;
                                                         the KV cache keeps it
    6  finished = read_by_host(Round(...))               the only wait for the device,
                                                         if no processor reads the text
    7  sequences.add(finished)                           text, stopping, streaming
    8  drafter.observe(finished)                         the head reads what was accepted

For example, after the text "the cat", whose last token is the root of this tree:

    0 cat ──┬── 1 sat ──── 3 on
            └── 2 is

One forward reads [cat, sat, is, on] at positions [1, 2, 2, 3], each node seeing its own path. The
target says "sat" after node 0, "on" after 1 and "a" after 3: the path is [0, 1, 3], "sat on a" is
emitted, and "a" is the next root.

The same steps run on every device; the engine decides how (`engines.target.chosen_engine`). On a
GPU its runner records four functions at their second call and replays them (`engines.cuda_graph`):
the draft, the target's forward, the verdict with the compaction of the cache, and the head's
`observe`. Step 8, and step 1 of the next round, are then launched within step 6, before the host
knows the tokens (`observe_ahead`); in a plain round, in which nothing is drafted, step 3 of the
next one is, too. On a CPU nothing is recorded; the forward and the head's layers are C++.

Letters in tensor names: B batch, T time, N nodes, A accepted, R rows, V vocabulary, F width of the
chosen layers' features.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ...heads.layers.constants import upload
from ..cache.kv_cache import TreeCache
from ..drafters.base import NoDraft
from ..drafters.round import Ahead, Round, read_by_host
from ..engines.base import TargetOutput
from ..trees.sampling import RandomSampler, sampler_by
from ..trees.stats import Stats
from ..trees.tree import DraftTree
from ..trees.verify import point_mass
from .limits import Limits, at_border, forward_without_spoiled, reread
from .noise import PositionNoise
from .observers import DecodingCall, observing
from .prefill import prefill_all, prefill_slots, similar_lengths
from .sequences import Sequences
from .verification import random_numbers, verify_and_commit


@torch.inference_mode()
def speculate(call: DecodingCall) -> Stats:
    """Generate until every sequence has ended.

    The call's conversation, the state of one row's text, is updated in place.
    """
    call = replace(call, stats=Stats(rows=[[] for _ in call.sequences.rows]))
    if not call.observers:
        decode(call)
        return call.stats

    # 1. The target computes the drafter's layers and, after them, those that only observers read.
    #    For example: the drafter reads (1, 12), an observer (12, 20): layers = (1, 12, 20).
    layers = call.drafter.feature_layers
    for observer in call.observers:
        call.target.check_layers(observer.feature_layers)
        layers = (*layers, *(layer for layer in observer.feature_layers if layer not in layers))
    # Set for the whole call: the layers stay even if memory runs out and the drafter leaves.
    call = replace(call, feature_layers=layers)

    # 2. Every observer is told when the call begins and when it ends, also by an exception.
    with ExitStack() as observing_all:
        for observer in call.observers:
            observing_all.enter_context(observing(observer, call))
        try:
            decode(call)
        except BaseException:
            call.stats.drop_unfinished()
            raise
    return call.stats


def decode(call: DecodingCall) -> None:
    """Read the prompts, then one round after the other until every sequence has ended."""
    target = call.target
    sequences = call.sequences
    stats = call.stats
    # 1. Fix the random numbers of every position in advance: a seed then gives the same text
    #    whatever is drafted. Only the rule that draws one token a node can work from them.
    if call.rule is point_mass and type(call.sampler) is RandomSampler:
        # A path of all nodes decides as many positions, and the bonus token one more.
        positions = call.drafter.max_nodes + 1
        noise = PositionNoise(
            call.sampler, sequences.rows, positions, target.info.vocab_size, target.device
        )
        call = replace(call, noise=noise)

    # 2. Read the prompts. They yield the first new token of each row, with which it may end.
    with stats.timed("prefill"):
        began = time.perf_counter()
        cache, roots_B = prefill_all(call)
        stats.first_token_seconds = [time.perf_counter() - began]
        roots_B = replace_ended(call, cache, roots_B)

    # 3. Rounds. The newest token of a row, its root, is part of the text but not of the KV cache.
    limits = Limits(target, call.drafter.max_nodes)
    ahead: Ahead | None = None
    while sequences.active:
        began = time.perf_counter()
        finished = speculation_round(call, cache, roots_B, ahead, limits)
        stats.round_seconds.append(time.perf_counter() - began)
        stats.max_depth = max(stats.max_depth, finished.verified.max_depth)
        for observer in call.observers:
            observer.round(finished)
        roots_B = finished.verdict.next_tokens_B
        ahead = finished.ahead
        del finished  # frees its logits and scores before the next round allocates its own
        if limits.gave_up:
            call = replace(call, drafter=NoDraft("out_of_memory"))
            ahead = None
        if sequences.leaving:
            ahead = None  # it is of the rows before
            with stats.timed("prefill"):
                roots_B = replace_ended(call, cache, roots_B)

    # 4. A conversation takes the cache over; otherwise its memory goes back to the pool.
    stats.cache_bytes = cache.nbytes
    past = call.past
    if past is None:
        cache.release()
        return
    past.tokens = sequences.text(0).tolist()
    segments = target.segments
    # The newest of n tokens is not in the cache: the last entry belongs to position n - 2.
    if segments is not None and target.rereads_at_border and segments.of(len(past.tokens) - 2) > 0:
        past.segment = 1
    past.cache = cache
    past.draft_state = None if limits.ran_out else call.drafter.saved_state()


def speculation_round(
    call: DecodingCall, cache: TreeCache, roots_B: Tensor, ahead: Ahead | None, limits: Limits
) -> Round:
    """One draft, one target forward, one verification, for all active rows.

    `ahead` is what the round before has launched of this one.
    """
    drafter = call.drafter
    sequences = call.sequences
    stats = call.stats
    committed_B = cache.lengths_B
    if call.noise is not None:
        call.noise.move_to(sequences.active)

    # 1 to 6 A draft, and the target's verdict on it.
    proposed, finished = draft_and_verify(call, cache, roots_B, ahead, limits)
    if finished is None:
        # A draft has made the target's scores invalid: undo the attempt. The slots after the
        # committed tokens may hold NaN, which attention would spread to every node, so they are
        # erased, from the shortest row's end on.
        drafter.take_back()
        cache.lengths_B = committed_B
        cache.erase_uncommitted(min(sequences.lengths) - 1)
        # A plain step shows whether the target's own scores are valid. Sampled drafts have to be
        # verified nevertheless: dropping them because of what was sampled would change the
        # distribution.
        if proposed.draft_probs_BNV is None:
            proposed = NoDraft().propose(roots_B)
        again = Ahead(replace(proposed, fallback="not_finite"))
        _, finished = draft_and_verify(call, cache, roots_B, again, limits, repeated=True)
        assert finished is not None, "a repeated round is final"

    # 7 The tokens are appended to the text, which may end.
    with stats.timed("host"):
        sequences.add(sequences.decoded, finished, stats)
    # 8 The drafter reads what was accepted.
    if not limits.gave_up:
        with stats.timed("draft"):
            drafter.observe(shown_to_drafter(call, finished))
    return finished


def draft_and_verify(
    call: DecodingCall,
    cache: TreeCache,
    roots_B: Tensor,
    ahead: Ahead | None,
    limits: Limits,
    repeated: bool = False,
) -> tuple[DraftTree, Round | None]:
    """Run steps 1 to 6 of a round, with ever smaller trees where memory runs out.

    `ahead` is what exists already. What a failed attempt leaves in the cache's free slots and in
    the drafter cannot change the output.

    Returns the proposal and what `verify_round` returns for it.
    """
    # Compared after an error: a new lengths tensor, or another call of the processors, means that
    # the attempt went too far to be repeated.
    committed_B = cache.lengths_B
    calls = call.process_logits.calls
    proposed = None if ahead is None else ahead.proposed
    output = None if ahead is None else ahead.output
    while True:
        try:
            # 1 What may follow each row's newest token. After an error in the forward, the proposal
            #   is cut smaller, not drafted again.
            if proposed is None:
                with call.stats.timed("draft"):
                    proposed = call.drafter.propose(roots_B)
            # 2 to 6 The target's verdict on as much of it as it can verify.
            return proposed, verify_round(call, cache, proposed, output, limits, repeated)
        except torch.OutOfMemoryError:
            processors_advanced = call.process_logits.calls != calls
            if cache.lengths_B is not committed_B or processors_advanced or limits.most_nodes < 2:
                raise  # the round cannot be repeated, or a root alone did not fit
            limits.shrink(proposed, call.drafter.kind)
            if limits.gave_up:
                proposed = NoDraft("out_of_memory").propose(roots_B)
        output = None


def verify_round(
    call: DecodingCall,
    cache: TreeCache,
    proposed: DraftTree,
    output: TargetOutput | None,
    limits: Limits,
    repeated: bool,
) -> Round | None:
    """Run steps 2 to 6 of a round: cut the tree, verify it in one forward, commit what it accepts.

    `output` is the target's if the round before has launched step 3.

    A row emits no token where the target's scores after its root are invalid
    (`Verdict.spoiled_B`). One draft with NaN or infinite keys or values turns the scores of all
    nodes into NaN, even of those that do not attend to it, because 0 x NaN is NaN; so does an old
    one that is left in the cache. Such scores are always NaN, never finite and wrong: NaN is a
    complete test.

    Returns None if the round must be repeated: a row got no token, or some sampled drafts could not
    be verified. The result of a repeated round is final.
    """
    sequences = call.sequences
    stats = call.stats
    process_logits = call.process_logits
    sampled = proposed.draft_probs_BNV is not None

    # 2 The part that the target can verify now.
    with stats.timed("draft"):
        verified, nodes = limits.cut(proposed, sequences.lengths)

    # 3 One forward over all nodes: logits_BNV, features_BNF.
    if output is None:
        with stats.timed("target"):
            output = forward(call, cache, verified)
    if process_logits.reads_text and not repeated and is_spoiled(output, sequences, sampled):
        return None  # before a processor sees logits that plain decoding would not show it

    # 4 Scores: each node's logits after the processors, by the text that ends with the node. The
    #   round's random numbers are drawn before, as a rule may be asked several times. They are
    #   drawn outside of what is recorded, or each replay would repeat them.
    with stats.timed("verify"):
        sampler = call.sampler if call.noise is None else call.noise.sampler(verified)
        device = output.logits_BNV.device
        numbers = random_numbers(call.rule, verified, sampler, device)
    with stats.timed("processors"):
        # At least float32, as in transformers' own loop; float64 stays float64.
        scores_BNV = output.logits_BNV.to(
            torch.promote_types(output.logits_BNV.dtype, torch.float32)
        )
        if process_logits.processors:
            scores_BNV = process_logits(scores_BNV, verified, sequences.text, sequences.decoded)
        # Processors with a state may see accepted tokens only, so they score node by node.
        if process_logits.one_by_one and verified.max_depth > 0:
            score_accepted(call, verified, scores_BNV, numbers)

    # 5 The accepted path of each row; the cache keeps its entries.
    verdict = verify_and_commit(call, verified, output.features_BNF, scores_BNV, numbers, cache)

    # 6 Its tokens on the host. While the host waits, the device already runs what needs no token on
    #   the host.
    finished = Round(proposed, verified, nodes, output, verdict, scores_BNV, numbers)
    meanwhile = None
    if call.target.engine.runner.replays:
        meanwhile = partial(launch_ahead, call, cache, finished)
    with stats.timed("host"):
        finished = read_by_host(finished, meanwhile)
    if repeated:
        return finished
    # Idle rows (None) emit nothing, which is not a failure.
    decoded = zip(sequences.decoded, finished.tokens, strict=True)
    every_row_got_a_token = all(tokens for row, tokens in decoded if row is not None)
    if not every_row_got_a_token or (sampled and any(finished.spoiled)):
        return None
    return finished


def launch_ahead(call: DecodingCall, cache: TreeCache, finished: Round) -> Ahead | None:
    """Launch what the host need not know a round's tokens for, so that the device does not wait.

    That is the drafter's `observe`, the next proposal, and where two plain rounds follow each other
    the target's next forward. Where a row ends, the latter two are lost.
    """
    drafter = call.drafter
    sequences = call.sequences
    drafter.observe_ahead(shown_to_drafter(call, finished))
    # 1. What the next round computes lies where this round's results lie: none of them may be read
    #    later. Nor is there a next round if every row gets its last token.
    if call.observers or sequences.scores is not None or sequences.logits is not None:
        return None
    if sequences.in_last_round:
        return None
    try:
        # 2. The next proposal.
        roots_B = finished.verdict.next_tokens_B
        proposed = drafter.propose_ahead(roots_B)
        if proposed is None:
            return None
        if finished.drafted or proposed.max_depth > 0:
            return Ahead(proposed)
        # 3. The forward of the next plain round. This one has committed one token of each row: the
        #    longest row had `longest` tokens, the root included, and all of these now count.
        longest = max(sequences.lengths)
        output = call.target.engine.forward_tree(proposed, longest, cache, call.layers)
        return Ahead(proposed, output)
    except torch.OutOfMemoryError:
        return None  # the round itself shrinks its tree


def forward(call: DecodingCall, cache: TreeCache, tree: DraftTree) -> TargetOutput:
    """The target's output at all nodes of a tree, which it attends to."""
    lengths = call.sequences.lengths
    # Beyond some length the model computes even the old tokens differently: read them again.
    if at_border(call.target, lengths):
        return reread(call, cache)
    # The second attempt at sampled drafts of which one spoiled the first.
    if tree.fallback == "not_finite" and tree.max_depth > 0:
        return forward_without_spoiled(call, tree, cache)
    longest = max(lengths) - 1  # committed tokens: all but the root
    return call.target.engine.forward_tree(tree, longest, cache, call.layers)


def is_spoiled(output: TargetOutput, sequences: Sequences, sampled: bool) -> bool:
    """Whether the logits after a row's root are all NaN; with sampled drafts, after any node.

    A processor with a state may see a text only once. Sampled drafts may not be dropped later, so
    all their nodes must be valid before it sees the first.
    """
    logits_BNV = output.logits_BNV if sampled else output.logits_BNV[:, :1]
    invalid_BN = logits_BNV.isnan().all(-1)
    # Idle rows emit nothing: their logits do not matter.
    if sequences.live_B is not None:
        invalid_BN = invalid_BN & (sequences.live_B > 0)[:, None]
    return bool(invalid_BN.any())  # sync: processors that read the text wait for the tokens anyway


def shown_to_drafter(call: DecodingCall, finished: Round) -> Round:
    """A round without the features that only observers asked for."""
    if not call.adds_layers:
        return finished
    features_BNF = call.of_drafter(finished.output.features_BNF)
    features_BAF = call.of_drafter(finished.verdict.features_BAF)
    output = replace(finished.output, features_BNF=features_BNF)
    verdict = replace(finished.verdict, features_BAF=features_BAF)
    return replace(finished, output=output, verdict=verdict)


def score_accepted(
    call: DecodingCall,
    tree: DraftTree,
    scores_BNV: Tensor,
    numbers: Tensor | RandomSampler | None,
) -> None:
    """Score the nodes that the rule accepts, one after another, in place.

    The roots are scored already.

    A processor may keep a state that each call advances by the newest token. So it is called as
    plain decoding calls it: once for each token of a row, in the text's order, never after the
    row's end and never with a rejected draft. After every node the rule, which must be top-down, is
    asked which child follows. What it says of nodes below the scored ones is not used.

    For example, the draft is the chain 0 the - 1 cat - 2 sat and the target wants "cat ran":

        scored [0]       the rule accepts node 1: score it, by the text "... the cat"
        scored [0, 1]    the rule accepts nothing after node 1: the row stops growing
    """
    sequences = call.sequences
    rows = sequences.decoded
    tokens_BN = tree.tokens_BN.tolist()  # sync: these processors run on the host
    scored: list[list[int]] = [[0] for _ in rows]  # the nodes of each row's path so far

    def score(slot: int, i: int) -> Tensor:
        return scores_BNV[slot, scored[slot][i]]

    growing = [slot for slot, row in enumerate(rows) if row is not None]
    while growing:
        # 1. Ask the rule about all rows at once, each time with the same random numbers.
        result = call.rule(tree, scores_BNV, sampler_by(numbers))
        paths = result.path_BA.tolist()
        lengths = result.lengths_B.tolist()
        grown = []
        for slot in growing:
            row = sequences.active[slot]
            path = paths[slot]
            known = len(scored[slot])
            # 2. The path ends with the last scored node: this row is complete.
            if lengths[slot] == known:
                continue
            # 3. The next node is accepted. Its text is the row's, and all drafts up to it.
            more = [tokens_BN[slot][node] for node in path[1 : known + 1]]
            if sequences.ends(row, more, partial(score, slot)):
                continue
            # 4. Score it by that text.
            node = path[known]
            text_T = sequences.text(row, more)
            scores_BNV[slot, node] = call.process_logits.score_next(
                row, text_T, scores_BNV[slot, node]
            )
            scored[slot].append(node)
            grown.append(slot)
        growing = grown


def replace_ended(call: DecodingCall, cache: TreeCache, roots_B: Tensor) -> Tensor:
    """Give the slots of ended rows to waiting ones, or shrink the batch (continuous batching).

    Where rounds are replayed, the batch has only a few sizes, each of which is recorded once. In
    between, rows that have ended stay as idle ones.

    A slot is an index in the batch, a row the number of a sequence in the call. For example, rows
    0, 1 and 2 are in the slots 0, 1 and 2, and row 3 waits. Row 1 ends: row 3 is read into slot 1
    and `active` is [0, 3, 2]. Row 0 ends: the batch shrinks to [3, 2], or row 0 stays as an idle
    one.

    Returns the roots of all rows that are active now.
    """
    sequences = call.sequences
    # 1. Waiting rows get the slots of ended ones. A loop: a row may end with its first token.
    while (leaving := sequences.leaving) and sequences.waiting:
        slots = [slot for slot, row in enumerate(sequences.active) if row in leaving]
        slots = slots[: len(sequences.waiting)]
        slot_of = {sequences.waiting.popleft(): slot for slot in slots}
        for rows in similar_lengths(sequences, [*slot_of], call.target):
            group = [slot_of[row] for row in rows]
            roots_B = prefill_slots(call, rows, group, cache, roots_B)
            for row, slot in zip(rows, group, strict=True):
                sequences.active[slot] = row
    if not sequences.leaving:
        return roots_B
    # 2. No row waits any more: only rows that have not ended keep a slot, if any are left.
    ended = sequences.ended
    live_slots = [slot for slot, row in enumerate(sequences.active) if row not in ended]
    if not live_slots:
        sequences.active = []
        return roots_B
    # 3. Some ended rows stay, to fill the batch up to a size that is recorded: with recorded sizes
    #    1, 2, 4 and 8, three live rows of five are filled up to four.
    size = min(call.target.engine.runner.rounded_rows(len(live_slots)), len(sequences.active))
    ended_slots = [slot for slot, row in enumerate(sequences.active) if row in ended]
    stay = sorted(live_slots + ended_slots[: size - len(live_slots)])
    if size < len(sequences.active):
        sequences.active = [sequences.active[slot] for slot in stay]
        stay_R = upload(stay, roots_B.device)
        cache.select(stay_R)
        call.drafter.select(stay_R)
        roots_B = roots_B[stay_R]
    # 4. They are idle: they emit and draw nothing, and attend to one token, which costs least.
    sequences.idle = ended & set(sequences.active)
    if sequences.idle:
        live = tuple(row is not None for row in sequences.decoded)
        sequences.live_B = upload(live, roots_B.device, torch.int64)
        call.sampler.draw_for(live)
        cache.lengths_B = torch.where(sequences.live_B > 0, cache.lengths_B, 1)
    elif sequences.live_B is not None:
        sequences.live_B = None
        call.sampler.draw_for(None)
    return roots_B
