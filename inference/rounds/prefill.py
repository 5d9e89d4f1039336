"""How target and drafter read prompts, at the start and when a waiting row gets a slot.

    1 groups     rows whose prompts are about as long are read together, the shorter ones padded
    2 stages     a prefix that all rows of a group share is read once, and equal prompts are
    3 chunks     of `PREFILL_TOKENS` at a time, each shown to the drafter and the observers
    4 verdict    the acceptance rule chooses the token after each prompt, from a tree that is the
                 root alone

Letters in tensor names: B batch, T time, R rows that the target reads, K chosen positions, N nodes,
A accepted, V vocabulary, D hidden size, F width of the chosen layers' features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ...heads.layers.constants import counting, upload
from ..cache.kv_cache import TreeCache
from ..drafters.base import BatchDrafter, DraftContext, NoDraft, PrefillChunk
from ..drafters.round import Round, read_by_host
from ..engines.base import TargetOutput
from ..engines.target import Target
from .decoding import Decoding
from .sequences import Conversation, Sequences, shared_length

SHARED_TOKENS = 32
"""Shortest common prefix of a batch that is read once for all rows: it takes a forward more, which
must pay."""
PREFILL_TOKENS = 2048
"""Tokens of each prompt that one forward reads, so that memory beyond the KV cache does not grow
with long prompts."""


def prefill_all(
    decoding: Decoding, drafter: BatchDrafter, sequences: Sequences, past: Conversation | None
) -> tuple[TreeCache, Tensor]:
    """Read the prompts of all active rows; return the KV cache and the roots [B].

    Prompts of similar lengths are read together.
    """
    batch = len(sequences.active)
    first, *others = similar_lengths(sequences, sequences.active, decoding.target)
    sequences.active = first
    cache, roots_B = prefill(decoding, drafter, sequences, first, past, batch)
    if not others:
        return cache, roots_B
    # The rows of the other groups begin as copies of a row that has been read.
    copied_B = torch.tensor(
        [*range(len(first)), *[0] * (batch - len(first))], device=roots_B.device
    )
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

    A group is split where that saves the most padding, if what it saves, less a common prefix that
    is then read again, is worth another forward.
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
    read = sorted(
        set(texts.values()) if target.shares_prompts else texts.values(), key=len, reverse=True
    )

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
    """Read the prompts of `rows` in chunks; return the KV cache and each prompt's next token [B].

    The cache has room for new tokens in `batch_size` rows; with None, where another takes its
    entries, for the prompts.
    """
    target, prompts = decoding.target, [sequences.prompts[row] for row in rows]
    lengths = [len(prompt) for prompt in prompts]
    capacity = max(map(len, sequences.prompts)) + sequences.new_tokens + drafter.max_nodes
    draft_probs = decoding.process_logits.draft_probs if decoding.verification.samples else None
    noise, temperature = decoding.noise, decoding.process_logits.temperature
    # One position more is computed, which the rule needs.
    gumbel = (
        None
        if noise is None
        else lambda count: noise.next(count + 1)[:, :count].log().mul_(-temperature)
    )
    context = DraftContext(
        len(prompts),
        capacity,
        decoding.sampler,
        draft_probs,
        gumbel,
        rows,
        prompt_tokens=max(lengths),
        new_tokens=sequences.new_tokens,
        chains_only=target.engine.chains_only,
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
        cache = target.engine.new_cache(len(stages[0].rows), *room)
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
    output = TargetOutput(
        *(torch.stack([last[row][i] for row in stage.of_row])[:, None] for i in (0, 1))
    )
    scores_B1V = decoding.process_logits(output.logits_BNV, tree, sequences.text, rows)
    sampler = decoding.sampler
    if noise is not None:
        noise.move_to(rows)
        sampler = noise.sampler(tree)
    verdict = decoding.verification.verify(tree, output.features_BNF, scores_B1V, sampler)
    first = read_by_host(Round(tree, tree, None, output, verdict, scores_B1V))
    sequences.add(rows, first)
    roots_B = first.verdict.next_tokens_B
    last_chunk = PrefillChunk(
        last_tokens_B1, roots_B[:, None], output.features_BNF, first.verdict.lengths_B
    )
    show_prompts(decoding, drafter, rows, [length - 1 for length in lengths], last_chunk)
    return cache, roots_B


def show_prompts(
    decoding: Decoding,
    drafter: BatchDrafter,
    rows: Sequence[int],
    starts: Sequence[int],
    chunk: PrefillChunk,
) -> None:
    """Show a chunk of the prompts to the drafter and the observers (`RoundObserver.prefill`)."""
    for observer in decoding.observers:
        observer.prefill(rows, starts, chunk)
    features_BTF = decoding.features_for(drafter, chunk.features_BTF)
    drafter.prefill(replace(chunk, features_BTF=features_BTF))


def padded_prompts(prompts: Sequence[Tensor], device: torch.device) -> Tensor:
    """Prompts [T] as one batch [B, T] on a device, each padded on the right with its last token.

    Padding is read, and weighted by 0 where rows attend: a token that is not in the text could be
    one for which the target computes NaN, as for an embedding that was never trained.
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

    `tokens_BT` are the right-padded prompts, the first `kept` tokens of which are in the KV cache
    already.
    """
    every, longest = list(range(len(lengths))), max(lengths)
    if len(lengths) == 1 or not shares:
        return [Stage(kept, longest, every, every)]
    # sync: once a batch
    texts = [tuple(row[:length]) for row, length in zip(tokens_BT.tolist(), lengths, strict=True)]
    different = list(dict.fromkeys(texts))
    rows, of_row = (
        [texts.index(text) for text in different],
        [different.index(text) for text in texts],
    )
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
    """Read a stage in chunks; return logits and features of the prompts' last tokens in it.

    The keys are indices in `stage.rows`.
    """
    target, inputs = decoding.target, decoding.prompt_inputs
    layers = decoding.layers_for(drafter)
    lengths_B = torch.tensor(lengths, device=target.device)
    together = stage.rows == stage.of_row
    of_row_B = torch.tensor(stage.of_row, device=target.device)
    read_RT = tokens_BT if together else tokens_BT[torch.tensor(stage.rows, device=target.device)]
    last: dict[int, tuple[Tensor, Tensor]] = {}
    whole = inputs is not None or (
        target.segments is not None and target.segments.reads_whole(stage.end)
    )
    size = stage.end if whole else PREFILL_TOKENS
    for start in range(stage.begin, stage.end, size):
        stop = min(start + size, stage.end)
        prompt_ends = {index: lengths[row] - 1 - start for index, row in enumerate(stage.rows)}
        prompt_ends = {index: end for index, end in prompt_ends.items() if 0 <= end < stop - start}
        # Where prompts end at different positions, the logits of all rows at all ends would grow
        # with their square. Without a head no hidden states are requested: transformers would add
        # hooks to the user's model.
        reads_states = layers or target.engine.features_are_free
        apart = len(set(prompt_ends.values())) > 1 and reads_states and target.computes_logits
        kept = [] if apart else sorted(set(prompt_ends.values()))
        wanted = (*layers, -1) if apart and -1 not in layers else layers
        if inputs is None:
            output = target.engine.read_chunk(
                read_RT[:, start:stop], stage.end, cache, wanted, kept
            )
        else:
            output = target.engine.read_prompt(read_RT, cache, wanted, kept, inputs)
        features_BTF = output.features_BNF
        if apart:
            width = target.info.hidden_size
            states_BTD = features_BTF.split(width, dim=-1)[wanted.index(-1)]
            chosen_KD = torch.stack([states_BTD[index, end] for index, end in prompt_ends.items()])
            logits = target.engine.logits(chosen_KD).unbind()
            features_BTF = features_BTF[..., : len(layers) * width]
        else:
            logits = tuple(
                output.logits_BNV[index, kept.index(end)] for index, end in prompt_ends.items()
            )
        for (index, end), logits_V in zip(prompt_ends.items(), logits, strict=True):
            last[index] = logits_V, features_BTF[index, end]
        next_BT = tokens_BT[:, start + 1 : stop + 1]
        known = next_BT.shape[1]
        if known:  # the token after a prompt's last one is not known yet
            features_BTF = features_BTF[:, :known] if together else features_BTF[of_row_B, :known]
            known_B = (lengths_B - 1 - start).clamp(0, known)
            chunk = PrefillChunk(
                tokens_BT[:, start : start + known], next_BT, features_BTF, known_B
            )
            show_prompts(decoding, drafter, rows, [start] * len(rows), chunk)
    return last
