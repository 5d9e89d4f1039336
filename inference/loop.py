"""The speculative decoding loop: prefill, speculation steps, continuous batching.

    tree   = drafter.propose(roots)                # what may follow each row's newest token, the root
    output = target.forward_tree(tree, cache)      # one forward over all nodes
    scores = process(output.logits, tree)          # logits processors, each node with its own prefix
    step   = verify_and_commit(tree, scores)       # accepted path and one token more; the KV cache keeps the path
    drafter.observe(step)

Letters in tensor names: B batch, T time, N nodes, A accepted, R rows that the target reads, K chosen positions,
V vocabulary, D hidden size, F width of the chosen layers' features.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..heads.layers.constants import counting, upload
from .drafters.base import BatchDrafter, DraftContext, NoDraft, PrefillChunk, StepResult
from .engines.base import Runner, TargetOutput
from .kv_cache import TreeCache
from .logits import (
    PositionNoise,
    PositionSampler,
    PrecomputedSampler,
    RandomSampler,
    Sampler,
    TreeLogitsProcessor,
    sampler_by,
)
from .observers import ObservedCall, RoundObserver, observing
from .sequences import Conversation, Sequences, shared_length
from .stats import Stats
from .target import Target
from .target_limits import at_border, forward_without_spoiled, reread, verifiable
from .tree import DraftTree
from .verify import AcceptanceRule, emitted_tokens, greedy, point_mass

SHARED_TOKENS = 32
"""Shortest common prefix of a batch that is read once for all rows: it takes a forward more, which must pay."""
PREFILL_TOKENS = 2048
"""Tokens of each prompt that one forward reads, so that memory beyond the KV cache does not grow with long prompts."""
AS_IT_IS = Runner()
UNUSED = RandomSampler()
"""Sampler for rules that draw no random numbers."""


@dataclass(frozen=True)
class Decoding:
    """Everything that stays the same from a call's first token to its last."""

    target: Target
    verification: Verification
    process_logits: TreeLogitsProcessor
    sampler: Sampler
    """Source of randomness for drafts and for the acceptance rule."""
    noise: PositionNoise | None = None
    """Random numbers that are fixed for each position of each row, whatever was drafted; None where the rule draws anew
    in each step."""
    prompt_inputs: dict[str, Any] | None = None
    """What `model.generate` prepared for a prompt with images; None for text alone."""
    observers: Sequence[RoundObserver] = ()
    """What watches the call."""
    feature_layers: tuple[int, ...] = ()
    """Where observers read features: the layers that the target computes features of, the drafter's first. Empty for
    those of the drafter alone."""


@torch.inference_mode()
def speculate(
    decoding: Decoding, drafter: BatchDrafter, sequences: Sequences, past: Conversation | None = None
) -> Stats:
    """Generate until every sequence has ended; `past`, the state of one row's text, is updated in place."""
    stats = Stats(rows=[[] for _ in sequences.rows])
    if not decoding.observers:
        decode(decoding, drafter, sequences, past, stats)
        return stats
    layers = drafter.feature_layers
    for observer in decoding.observers:
        decoding.target.check_layers(observer.feature_layers)
        layers = (*layers, *(layer for layer in observer.feature_layers if layer not in layers))
    if len(layers) > len(drafter.feature_layers):
        decoding = replace(decoding, feature_layers=layers)
    call = ObservedCall(
        decoding.target,
        drafter,
        decoding.verification.rule,
        decoding.process_logits,
        sequences,
        stats,
        past,
        decoding.prompt_inputs,
        layers,
    )
    with ExitStack() as observing_all:
        for observer in decoding.observers:
            observing_all.enter_context(observing(observer, call))
        try:
            decode(decoding, drafter, sequences, past, stats)
        except BaseException:
            stats.drop_unfinished()
            raise
    return stats


def decode(
    decoding: Decoding, drafter: BatchDrafter, sequences: Sequences, past: Conversation | None, stats: Stats
) -> None:
    """Read the prompts, then one round after the other until every sequence has ended."""
    sampler, target = decoding.sampler, decoding.target
    if decoding.verification.one_draw_per_node and type(sampler) is RandomSampler:
        positions, vocab_size = drafter.max_nodes + 1, target.info.vocab_size
        noise = PositionNoise(sampler, sequences.rows, positions, vocab_size, target.device)
        decoding = replace(decoding, noise=noise)
    with timed(stats, "prefill"):
        began = time.perf_counter()
        cache, roots_B = prefill_all(decoding, drafter, sequences, past)
        stats.first_token_seconds = [time.perf_counter() - began]
        roots_B = replace_ended(decoding, drafter, sequences, cache, roots_B)
    node_limit = drafter.max_nodes
    ran_out = False
    while sequences.active:
        began = time.perf_counter()
        lengths_B = cache.lengths_B
        calls = decoding.process_logits.calls
        try:
            step = speculation_step(decoding, drafter, sequences, cache, roots_B, stats, node_limit)
        except torch.OutOfMemoryError:
            repeatable = cache.lengths_B is lengths_B and decoding.process_logits.calls == calls
            if not repeatable or node_limit < 2:  # committed, processors advanced, or nothing to save
                raise
            # The next round begins where this one did: what it left behind, in the cache's free slots and in the
            # drafter, cannot change the output.
            ran_out = True
            node_limit = smaller(node_limit, drafter)
            if node_limit < 2:
                drafter = NoDraft("out_of_memory")
            continue
        stats.round_seconds.append(time.perf_counter() - began)
        stats.max_depth = max(stats.max_depth, step.tree.max_depth)
        for observer in decoding.observers:
            observer.round(step)
        roots_B = step.next_tokens_B
        del step  # so that its logits and scores make room for the next round's
        if sequences.leaving:
            with timed(stats, "prefill"):
                roots_B = replace_ended(decoding, drafter, sequences, cache, roots_B)
    stats.cache_bytes = cache.nbytes
    if past is None:
        cache.release()
    else:
        past.tokens = sequences.text(0).tolist()
        segments = target.segments
        if segments is not None and target.rereads_at_border and segments.of(len(past.tokens) - 2) > 0:
            past.segment = 1
        past.cache = cache
        past.draft_state = None if ran_out else drafter.saved_state()


def smaller(node_limit: int, drafter: BatchDrafter) -> int:
    """Half as many nodes of each tree, for the rest of a generation that ran out of memory.

    A part of a sampled tree would have another distribution: it shrinks to the root at once.
    """
    kept = node_limit // 2 if drafter.kind == "top_k" else 1
    warnings.warn(
        f"memory ran out with trees of {node_limit} nodes; this generation goes on with {kept}",
        stacklevel=4,
    )
    return kept


def first_nodes(tree: DraftTree, kept: int) -> DraftTree:
    """The first `kept` nodes of a top-k tree, which are a tree, as parents stand before their children."""
    if tree.tokens_BN.shape[1] <= kept:
        return tree
    return DraftTree(
        tree.tokens_BN[:, :kept].contiguous(),
        tree.parents_BN[:, :kept].contiguous(),
        tree.sizes_B.clamp(max=kept),
        max_depth=min(tree.max_depth, kept - 1),
        padding=tree.padding,
        in_order=tree.in_order,
    )


def speculation_step(
    decoding: Decoding,
    drafter: BatchDrafter,
    sequences: Sequences,
    cache: TreeCache,
    roots_B: Tensor,
    stats: Stats,
    node_limit: int,
) -> StepResult:
    """One draft, one target forward, one verification, for all active rows; a tree keeps `node_limit` nodes at most."""
    with timed(stats, "draft"):
        if decoding.noise is not None:
            decoding.noise.move_to(sequences.active)
        tree = first_nodes(drafter.propose(roots_B), node_limit)
        tree = verifiable(decoding.target, tree, text_lengths(sequences))
    before_B = cache.lengths_B
    step = forward_and_verify(decoding, drafter, sequences, cache, tree, stats)
    if step is None or not all_emitted(sequences, step):
        # The target's own numbers may be in order: a plain step tells. Sampled drafts must be verified all the same: to
        # drop them because of what was sampled would change the distribution.
        drafter.take_back()
        cache.lengths_B = before_B
        cache.erase_uncommitted(min(text_lengths(sequences)) - 1)
        tree = NoDraft().propose(roots_B) if tree.draft_probs_BNV is None else tree
        tree = replace(tree, fallback="not_finite")
        step = forward_and_verify(decoding, drafter, sequences, cache, tree, stats)
        assert step is not None
    with timed(stats, "host"):
        sequences.add(sequences.decoded, step, stats)
    with timed(stats, "draft"):
        drafter.observe(shown_to_drafter(decoding, drafter, step))
    return step


def all_emitted(sequences: Sequences, step: StepResult) -> bool:
    """Whether every row that is being decoded has got a token."""
    return all(tokens for row, tokens in zip(sequences.decoded, step.tokens, strict=True) if row is not None)


def forward_and_verify(
    decoding: Decoding, drafter: BatchDrafter, sequences: Sequences, cache: TreeCache, tree: DraftTree, stats: Stats
) -> StepResult | None:
    """Verify a tree by one forward of the target, and commit what was accepted.

    A row emits no token where the target's scores after its root are invalid, see `StepResult.cut_B`. Attention
    multiplies by 0 what a node does not see, and 0 x NaN is NaN: so a draft whose keys or values are not finite, in
    this tree or left in the cache by an earlier one, spoils all nodes. It never makes wrong scores that are finite.

    Returns None for such a tree where processors read the text: these see only what plain decoding shows them. Also
    for sampled drafts of which some cannot be verified.
    """
    repeated = tree.fallback == "not_finite"
    with timed(stats, "target"):
        lengths, target = text_lengths(sequences), decoding.target
        layers = decoding.feature_layers or drafter.feature_layers
        given = (tree, max(lengths) - 1, cache, layers)
        if at_border(target, lengths):
            output = reread(target, sequences.text(sequences.active[0]), cache, layers)
        elif repeated and tree.max_depth > 0:
            output = forward_without_spoiled(target, min(lengths) - 1, *given)
        else:
            output = target.forward_tree(*given)
    if decoding.process_logits.reads_text and not repeated:
        # Of a sampled tree all nodes must be in order: a processor that keeps a state may see a text only once.
        nodes_BNV = output.logits_BNV[:, :1] if tree.draft_probs_BNV is None else output.logits_BNV
        invalid_BN = nodes_BNV.isnan().all(-1)
        if sequences.live_B is not None:
            invalid_BN = invalid_BN & (sequences.live_B > 0)[:, None]
        if bool(invalid_BN.any()):  # sync: these processors wait for the tokens anyway
            return None
    sampler = decoding.sampler if decoding.noise is None else decoding.noise.sampler(tree)
    with timed(stats, "processors"):
        scores_BNV = output.logits_BNV.to(torch.promote_types(output.logits_BNV.dtype, torch.float32))
        if decoding.process_logits.processors:
            scores_BNV = decoding.process_logits(scores_BNV, tree, sequences.text, sequences.decoded)
        if decoding.process_logits.one_by_one and tree.max_depth > 0:
            sampler = decoding.verification.drawn(tree, scores_BNV, sampler)
            score_accepted(decoding, tree, scores_BNV, sequences, sampler)
    runner = decoding.target.engine.runner
    verified = decoding.verification.verify_and_commit(
        tree, output, scores_BNV, sampler, cache, stats, runner, sequences.live_B
    )
    meanwhile = None
    if runner.replays:
        meanwhile = partial(drafter.observe_ahead, shown_to_drafter(decoding, drafter, verified))
    with timed(stats, "host"):
        step = sequences.read(verified, drafter.host_values(verified), meanwhile)
    if any(step.cut) and tree.draft_probs_BNV is not None and not repeated:
        return None
    return step


def drafters_part(decoding: Decoding, drafter: BatchDrafter, features: Tensor) -> Tensor:
    """The columns of features [..., F] that the drafter asked for: the first ones, see `Decoding.feature_layers`."""
    layers = decoding.feature_layers
    if not layers:
        return features
    width = features.shape[-1] // len(layers)
    return features[..., : width * len(drafter.feature_layers)].contiguous()


def shown_to_drafter(decoding: Decoding, drafter: BatchDrafter, step: StepResult) -> StepResult:
    """A step without the features that only observers asked for."""
    if not decoding.feature_layers:
        return step
    features_BNF = drafters_part(decoding, drafter, step.output.features_BNF)
    features_BAF = drafters_part(decoding, drafter, step.features_BAF)
    return replace(step, output=replace(step.output, features_BNF=features_BNF), features_BAF=features_BAF)


def show_prompts(
    decoding: Decoding, drafter: BatchDrafter, rows: Sequence[int], starts: Sequence[int], chunk: PrefillChunk
) -> None:
    """Let the drafter and the observers read a chunk of the prompts; see `RoundObserver.prefill`."""
    for observer in decoding.observers:
        observer.prefill(rows, starts, chunk)
    if decoding.feature_layers:
        chunk = replace(chunk, features_BTF=drafters_part(decoding, drafter, chunk.features_BTF))
    drafter.prefill(chunk)


def text_lengths(sequences: Sequences) -> list[int]:
    """Tokens of each row that is being decoded, the prompt's and new ones, its root included."""
    rows = [row for row in sequences.decoded if row is not None]
    return [len(sequences.prompts[row]) + len(sequences.rows[row]) for row in rows]


def score_accepted(
    decoding: Decoding, tree: DraftTree, scores_BNV: Tensor, sequences: Sequences, sampler: Sampler
) -> None:
    """Score the nodes that the rule accepts, one after another, in place; the roots are scored already.

    A processor may keep a state that each call advances by the newest token. So it is called as plain decoding calls
    it: once for each token of a row, in the text's order, never after the row's end and never with a rejected draft.
    The rule, which must be top-down, is asked after every node which child follows: what it says of nodes below those
    that are scored is not used.
    """
    rows, tokens_BN = sequences.decoded, tree.tokens_BN.tolist()  # sync: these processors run on the host
    scored: list[list[int]] = [[0] for _ in rows]  # the nodes of each row's path so far

    def score(slot: int, i: int) -> Tensor:
        return scores_BNV[slot, scored[slot][i]]

    growing = [slot for slot, row in enumerate(rows) if row is not None]
    while growing:
        result = decoding.verification.rule(tree, scores_BNV, sampler.from_start())
        paths, lengths = result.path_BA.tolist(), result.lengths_B.tolist()
        grown = []
        for slot in growing:
            row, path = sequences.active[slot], paths[slot]
            known = len(scored[slot])
            if lengths[slot] == known:
                continue
            more = [tokens_BN[slot][node] for node in path[1 : known + 1]]
            if sequences.ends(row, more, partial(score, slot)):
                continue
            node = path[known]
            text_T = sequences.text(row, more)
            scores_BNV[slot, node] = decoding.process_logits.score_next(row, text_T, scores_BNV[slot, node])
            scored[slot].append(node)
            grown.append(slot)
        growing = grown


class Verification:
    """Verification step: run the acceptance rule and commit the accepted KV entries.

    A rule is dozens of small operations, which take an accelerator far longer to launch than to run: there they are
    recorded and replayed together with the compaction of the KV cache. Random numbers are drawn beforehand.
    """

    def __init__(self, rule: AcceptanceRule) -> None:
        self.rule = rule
        self.samples = rule is not greedy
        """Whether it is a rule for sampling."""
        self.one_draw_per_node = rule is point_mass

    def verify_and_commit(
        self,
        tree: DraftTree,
        output: TargetOutput,
        scores_BNV: Tensor,
        sampler: Sampler,
        cache: TreeCache,
        stats: Stats,
        runner: Runner = AS_IT_IS,
        live_B: Tensor | None = None,
    ) -> StepResult:
        """The accepted path of each row, and the token after it; none of rows where `live_B` is 0, which are idle."""
        with timed(stats, "verify"):
            numbers = self._random_numbers(tree, scores_BNV, sampler) if self.samples else None
            recorded = runner.replays and numbers is not sampler  # a test's sampler draws for itself
            if recorded:
                given = (cache.slots_BN, tree, output.features_BNF, scores_BNV, numbers)
                verified = runner(self.verify_and_compact, (cache,), *given)
            else:
                verified = self.verify(tree, output.features_BNF, scores_BNV, numbers)
            step = StepResult(tree, output, *verified, scores_BNV=scores_BNV, numbers=numbers)
            if live_B is not None:
                step = replace(step, lengths_B=step.lengths_B * live_B, cut_B=step.cut_B & (live_B > 0))
        with timed(stats, "cache"):
            if recorded:
                cache.advance(step.lengths_B)
            else:
                cache.accept(step.path_BA, step.lengths_B, tree.in_order)
        return step

    def verify_and_compact(
        self,
        cache: TreeCache,
        slots_BN: Tensor,
        tree: DraftTree,
        features_BNF: Tensor,
        scores_BNV: Tensor,
        numbers: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Verify, and move the accepted nodes' entries together; this function is recorded."""
        verified = self.verify(tree, features_BNF, scores_BNV, numbers)
        if not tree.in_order:
            cache.slots_BN = slots_BN
            cache.compact(verified[0])
        return verified

    def verify(
        self, tree: DraftTree, features_BNF: Tensor, scores_BNV: Tensor, numbers: Tensor | Sampler | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The fields of a `StepResult` from `path_BA` to `cut_B`."""
        sampler = sampler_by(numbers) if isinstance(numbers, Tensor) else numbers
        result = self.rule(tree, scores_BNV, sampler or UNUSED)
        path_BA = result.path_BA
        emitted_BA = emitted_tokens(tree, result) if result.emitted_BA is None else result.emitted_BA
        if tree.in_order:
            best_BA = scores_BNV.amax(-1)
            features_BAF = features_BNF
        else:
            rows_B1 = counting(len(path_BA), path_BA.device, column=True)
            best_BA = scores_BNV[rows_B1, path_BA].amax(-1)
            features_BAF = features_BNF[rows_B1, path_BA]
        # An infinite logit is the best one; but there are no probabilities to sample from.
        finite_BA = best_BA.isfinite() if self.samples else best_BA > -torch.inf
        # A path ends before the first node after which no token can be chosen; with 3 accepted of A = 4 nodes:
        #     finite                             1 0 1 1
        #     accepted, or the node's number     3 1 3 3
        #     length                             1, so the path is cut
        number_A = counting(path_BA.shape[1], path_BA.device)
        lengths_B = torch.where(finite_BA, result.lengths_B[:, None], number_A).amin(1)
        cut_B = lengths_B < result.lengths_B
        return path_BA, lengths_B, result.next_tokens_B, emitted_BA, features_BAF, cut_B

    def drawn(self, tree: DraftTree, scores_BNV: Tensor, sampler: Sampler) -> Sampler:
        """A sampler with all random numbers of a round, so that the rule can be asked several times."""
        if not self.samples or isinstance(sampler, PositionSampler):
            return sampler
        rows, nodes = tree.tokens_BN.shape
        return PrecomputedSampler(uniform_BU=sampler.uniform((rows, nodes * tree.max_depth + 1), scores_BNV.device))

    def _random_numbers(self, tree: DraftTree, scores_BNV: Tensor, sampler: Sampler) -> Tensor | Sampler:
        """Random numbers for a rule; a sampler of another class (a test's) draws for itself."""
        if type(sampler) is PositionSampler:
            return sampler.exponential_BNV
        if type(sampler) is not RandomSampler:
            return sampler
        # Each row needs at most one number per node and depth, and one for the bonus token.
        rows, nodes = tree.tokens_BN.shape
        return sampler.uniform((rows, nodes * tree.max_depth + 1), scores_BNV.device)


@lru_cache(maxsize=32)
def verification_by(rule: AcceptanceRule) -> Verification:
    """The verification by a rule, the same object each time: what was recorded for it serves every generation."""
    return Verification(rule)


def replace_ended(
    decoding: Decoding, drafter: BatchDrafter, sequences: Sequences, cache: TreeCache, roots_B: Tensor
) -> Tensor:
    """Continuous batching: waiting rows take the slots of those that have ended, or the batch shrinks.

    Where rounds are replayed, it shrinks to a few sizes alone, each of which is recorded once; in between, rows that
    have ended stay as idle ones.

    Returns the roots of all rows that are active now.
    """
    while sequences.leaving and sequences.waiting:
        slots = [slot for slot, row in enumerate(sequences.active) if row in sequences.leaving]
        slots = slots[: len(sequences.waiting)]
        sequences.leaving -= {sequences.active[slot] for slot in slots}
        slot_of = {sequences.waiting.popleft(): slot for slot in slots}
        for rows in similar_lengths(sequences, [*slot_of], decoding.target):
            group = [slot_of[row] for row in rows]
            roots_B = prefill_slots(decoding, drafter, sequences, rows, group, cache, roots_B)
            for row, slot in zip(rows, group, strict=True):
                sequences.active[slot] = row
    if not sequences.leaving:
        return roots_B
    ended = sequences.leaving | sequences.idle
    sequences.leaving = set()
    kept = [slot for slot, row in enumerate(sequences.active) if row not in ended]
    if not kept:
        sequences.active = []
        return roots_B
    # 1 As many of the ended rows stay as fill the batch up to a size that is recorded.
    size = min(decoding.target.engine.runner.rounded_rows(len(kept)), len(sequences.active))
    others = [slot for slot, row in enumerate(sequences.active) if row in ended]
    stay = sorted(kept + others[: size - len(kept)])
    if size < len(sequences.active):
        sequences.active = [sequences.active[slot] for slot in stay]
        stay_R = upload(stay, roots_B.device)
        cache.select(stay_R)
        drafter.select(stay_R)
        roots_B = roots_B[stay_R]
    # 2 They are idle: they emit and draw nothing, and attend to one token.
    sequences.idle = ended & set(sequences.active)
    if sequences.idle:
        live = tuple(row is not None for row in sequences.decoded)
        sequences.live_B = upload(live, roots_B.device, torch.int64)
        decoding.sampler.draw_for(live)
        cache.lengths_B = torch.where(sequences.live_B > 0, cache.lengths_B, 1)
    elif sequences.live_B is not None:
        sequences.live_B = None
        decoding.sampler.draw_for(None)
    return roots_B


def prefill_all(
    decoding: Decoding, drafter: BatchDrafter, sequences: Sequences, past: Conversation | None
) -> tuple[TreeCache, Tensor]:
    """Read the prompts of all active rows, those of similar lengths together; return the KV cache and the roots [B]."""
    batch = len(sequences.active)
    first, *others = similar_lengths(sequences, sequences.active, decoding.target)
    sequences.active = first
    cache, roots_B = prefill(decoding, drafter, sequences, first, past, batch)
    if not others:
        return cache, roots_B
    # The rows of the other groups begin as copies of a row that has been read.
    copied_B = torch.tensor([*range(len(first)), *[0] * (batch - len(first))], device=roots_B.device)
    cache.select(copied_B)
    drafter.select(copied_B)
    roots_B = roots_B[copied_B]
    for rows in others:
        slots = range(len(sequences.active), len(sequences.active) + len(rows))
        roots_B = prefill_slots(decoding, drafter, sequences, rows, slots, cache, roots_B)
        sequences.active = [*sequences.active, *rows]
    return cache, roots_B


def similar_lengths(sequences: Sequences, rows: list[int], target: Target) -> list[list[int]]:
    """Rows in groups whose prompts are read together, padded to the longest of the group.

    A group is split where that saves the most padding, if what it saves, less a common prefix that is then read again,
    is worth another forward.
    """
    prompts = sequences.prompts
    if not target.engine.pads_prompts:
        by_length: dict[int, list[int]] = {}
        for row in rows:
            by_length.setdefault(len(prompts[row]), []).append(row)
        return list(by_length.values())
    needed = target.engine.least_padding
    longest = max(len(prompts[row]) for row in rows)
    if sum(longest - len(prompts[row]) for row in rows) < needed:
        return [rows]
    # sync: once a batch whose prompts differ in length
    texts = {row: tuple(prompts[row].tolist()) for row in rows}
    read = sorted(set(texts.values()) if target.shares_prompts else texts.values(), key=len, reverse=True)

    def split(longest_first: list[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
        count, longest = len(longest_first), len(longest_first[0])
        saved = [(count - at) * (longest - len(text)) for at, text in enumerate(longest_first)]
        again = shared_length(longest_first) if target.shares_prompts else 0
        if max(saved) < needed + again:
            return [longest_first]
        at = saved.index(max(saved))
        return [*split(longest_first[:at]), *split(longest_first[at:])]

    groups = [{*group} for group in split(read)]
    return [[row for row in rows if texts[row] in group] for group in groups]


def prefill_slots(
    decoding: Decoding,
    drafter: BatchDrafter,
    sequences: Sequences,
    rows: list[int],
    slots: Sequence[int],
    cache: TreeCache,
    roots_B: Tensor,
) -> Tensor:
    """Read the prompts of rows that take these slots of the batch; return the roots [B]."""
    fresh = drafter.fresh()
    into_R = upload(slots, roots_B.device)
    fresh_cache, fresh_roots = prefill(decoding, fresh, sequences, rows)
    cache.replace(into_R, fresh_cache)
    drafter.replace(into_R, fresh)
    return roots_B.index_copy(0, into_R, fresh_roots)


def prefill(
    decoding: Decoding,
    drafter: BatchDrafter,
    sequences: Sequences,
    rows: list[int],
    past: Conversation | None = None,
    batch_size: int | None = None,
) -> tuple[TreeCache, Tensor]:
    """Read the prompts of `rows`, chunk by chunk; return the KV cache, and the token [B] that follows each prompt.

    The cache has room for new tokens in `batch_size` rows; with None, where another takes its entries, for the prompts.
    """
    target, prompts = decoding.target, [sequences.prompts[row] for row in rows]
    lengths = [len(prompt) for prompt in prompts]
    capacity = max(map(len, sequences.prompts)) + sequences.new_tokens + drafter.max_nodes
    draft_probs = decoding.process_logits.draft_probs if decoding.verification.samples else None
    noise, temperature = decoding.noise, decoding.process_logits.temperature
    # One position more is computed, which the rule needs.
    gumbel = None if noise is None else lambda count: noise.next(count + 1)[:, :count].log().mul_(-temperature)
    context = DraftContext(
        len(prompts),
        capacity,
        decoding.sampler,
        draft_probs,
        gumbel,
        rows,
        prompt_tokens=max(lengths),
        new_tokens=sequences.new_tokens,
    )
    if past is not None and target.segments is not None and target.segments.by_last:
        past.stay_in(target.segments.of(lengths[0] - 1))
    cache, kept = (None, 0) if past is None else past.resume(context, drafter, prompts[0])
    if not kept:
        drafter.begin(context)
    tokens_BT = padded_prompts(prompts, target.device)
    whole = target.segments is not None and target.segments.reads_whole(max(lengths))
    stages = _stages(tokens_BT, lengths, kept, target.shares_prompts and not whole)
    if cache is None:
        room = (max(lengths), len(prompts)) if batch_size is None else (capacity, batch_size)
        cache = target.new_cache(len(stages[0].rows), *room)
    last: dict[int, tuple[Tensor, Tensor]] = {}
    for number, stage in enumerate(stages):
        if number:
            cache.select(torch.zeros(len(stage.rows), dtype=torch.int64, device=target.device))
        last |= _read_stage(decoding, drafter, stage, rows, tokens_BT, lengths, cache)
    if len(stage.rows) < len(prompts):
        cache.select(torch.tensor(stage.of_row, device=target.device))
    lengths_B = torch.tensor(lengths, device=target.device)
    cache.lengths_B = lengths_B
    if past is not None:
        cache.keep_snapshot()
    last_tokens_B1 = tokens_BT.gather(1, lengths_B[:, None] - 1)
    tree = NoDraft().propose(last_tokens_B1[:, 0])
    output = TargetOutput(*(torch.stack([last[row][i] for row in stage.of_row])[:, None] for i in (0, 1)))
    scores_B1V = decoding.process_logits(output.logits_BNV, tree, sequences.text, rows)
    sampler = decoding.sampler
    if noise is not None:
        noise.move_to(rows)
        sampler = noise.sampler(tree)
    verified = decoding.verification.verify(tree, output.features_BNF, scores_B1V, sampler)
    step = sequences.read(StepResult(tree, output, *verified, scores_BNV=scores_B1V))
    sequences.add(rows, step)
    last_chunk = PrefillChunk(last_tokens_B1, step.next_tokens_B[:, None], output.features_BNF, step.lengths_B)
    show_prompts(decoding, drafter, rows, [length - 1 for length in lengths], last_chunk)
    return cache, step.next_tokens_B


def padded_prompts(prompts: Sequence[Tensor], device: torch.device) -> Tensor:
    """Prompts [T] as one batch [B, T] on a device, each padded on the right with its last token.

    Padding is read, and weighted by 0 where rows attend: a token that is not in the text could be one for which the
    target computes NaN, as for an embedding that was never trained.
    """
    tokens_BT = pad_sequence(list(prompts), batch_first=True).to(device)
    last_B1 = torch.tensor([[len(prompt) - 1] for prompt in prompts], device=device)
    return tokens_BT.gather(1, torch.minimum(counting(tokens_BT.shape[1], device), last_B1))


@dataclass(frozen=True)
class Stage:
    """Part of the prompts, from position `begin` to `end`, that the target reads together."""

    begin: int
    end: int
    rows: list[int]
    """Rows of the batch that the target reads, which are those of the KV cache."""
    of_row: list[int]
    """For each row of the batch, the index in `rows` of the one with the same tokens."""


def _stages(tokens_BT: Tensor, lengths: list[int], kept: int, shares: bool) -> list[Stage]:
    """Stages that read a common prefix once, and equal prompts once if the target `shares` them.

    `tokens_BT` are the right-padded prompts, the first `kept` tokens of which are in the KV cache already.
    """
    every, longest = list(range(len(lengths))), max(lengths)
    if len(lengths) == 1 or not shares:
        return [Stage(kept, longest, every, every)]
    # sync: once a batch
    texts = [tuple(row[:length]) for row, length in zip(tokens_BT.tolist(), lengths, strict=True)]
    different = list(dict.fromkeys(texts))
    rows, of_row = [texts.index(text) for text in different], [different.index(text) for text in texts]
    # The token after each shared one must be the same, too: a head reads both together.
    shared = shared_length(different) - 1
    if len(different) == 1 or shared < SHARED_TOKENS:
        return [Stage(0, longest, rows, of_row)]
    return [Stage(0, shared, [0], [0] * len(lengths)), Stage(shared, longest, rows, of_row)]


def _read_stage(
    decoding: Decoding,
    drafter: BatchDrafter,
    stage: Stage,
    rows: list[int],
    tokens_BT: Tensor,
    lengths: list[int],
    cache: TreeCache,
) -> dict[int, tuple[Tensor, Tensor]]:
    """Read a stage in chunks; return logits and features of each last prompt token in it, by index in `stage.rows`."""
    target, inputs = decoding.target, decoding.prompt_inputs
    layers = decoding.feature_layers or drafter.feature_layers
    lengths_B = torch.tensor(lengths, device=target.device)
    together = stage.rows == stage.of_row
    of_row_B = torch.tensor(stage.of_row, device=target.device)
    read_RT = tokens_BT if together else tokens_BT[torch.tensor(stage.rows, device=target.device)]
    last: dict[int, tuple[Tensor, Tensor]] = {}
    whole = inputs is not None or (target.segments is not None and target.segments.reads_whole(stage.end))
    size = stage.end if whole else PREFILL_TOKENS
    for start in range(stage.begin, stage.end, size):
        stop = min(start + size, stage.end)
        prompt_ends = {index: lengths[row] - 1 - start for index, row in enumerate(stage.rows)}
        prompt_ends = {index: end for index, end in prompt_ends.items() if 0 <= end < stop - start}
        # Where prompts end at different positions, the logits of all rows at all ends would grow with their square.
        # Without a head no hidden states are requested: transformers would add hooks to the user's model.
        reads_states = layers or target.engine.features_are_free
        apart = len(set(prompt_ends.values())) > 1 and reads_states and target.computes_logits
        kept = [] if apart else sorted(set(prompt_ends.values()))
        wanted = (*layers, -1) if apart and -1 not in layers else layers
        if inputs is None:
            output = target.read_chunk(read_RT[:, start:stop], stage.end, cache, wanted, kept)
        else:
            output = target.engine.read_prompt(read_RT, cache, wanted, kept, inputs)
        features_BTF = output.features_BNF
        if apart:
            width = target.info.hidden_size
            states_BTD = features_BTF.split(width, dim=-1)[wanted.index(-1)]
            chosen_KD = torch.stack([states_BTD[index, end] for index, end in prompt_ends.items()])
            logits = target.logits(chosen_KD).unbind()
            features_BTF = features_BTF[..., : len(layers) * width]
        else:
            logits = tuple(output.logits_BNV[index, kept.index(end)] for index, end in prompt_ends.items())
        for (index, end), logits_V in zip(prompt_ends.items(), logits, strict=True):
            last[index] = logits_V, features_BTF[index, end]
        next_BT = tokens_BT[:, start + 1 : stop + 1]
        known = next_BT.shape[1]
        if known:  # the token after a prompt's last one is not known yet
            features_BTF = features_BTF[:, :known] if together else features_BTF[of_row_B, :known]
            known_B = (lengths_B - 1 - start).clamp(0, known)
            chunk = PrefillChunk(tokens_BT[:, start : start + known], next_BT, features_BTF, known_B)
            show_prompts(decoding, drafter, rows, [start] * len(rows), chunk)
    return last


@contextmanager
def timed(stats: Stats, part: str) -> Iterator[None]:
    """Add the time spent inside to `stats.seconds[part]`.

    On a GPU this is the time to launch the work, except for the part that waits for its result.
    """
    start = time.perf_counter()
    yield
    stats.seconds[part] = stats.seconds.get(part, 0.0) + time.perf_counter() - start
