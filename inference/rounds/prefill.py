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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ...heads.layers.constants import counting, upload
from ..cache.kv_cache import TreeCache
from ..drafters.base import DraftContext, NoDraft, PrefillChunk
from ..drafters.round import Round, read_by_host
from ..engines.base import TargetOutput
from ..engines.target import Target
from ..trees.verify import greedy
from .observers import DecodingCall
from .sequences import Sequences, shared_length
from .verification import verify

SHARED_TOKENS = 32
"""Shortest common prefix of a batch, in tokens, that is read once for all rows: that takes an extra
forward, which must pay."""
PREFILL_TOKENS = 2048
"""Tokens of each prompt that one forward reads, so that memory beyond the KV cache does not grow
with long prompts."""


def prefill_all(call: DecodingCall) -> tuple[TreeCache, Tensor]:
    """Read the prompts of all active rows; return the KV cache and the roots [B].

    Prompts of similar lengths are read together.
    """
    sequences = call.sequences
    batch = len(sequences.active)
    first, *others = similar_lengths(sequences, sequences.active, call.target)
    sequences.active = first
    cache, roots_B = prefill(call, first, batch)
    if not others:
        return cache, roots_B
    # The rows of the other groups begin as copies of row 0, which later prompts overwrite. With 4
    # rows of which 2 have been read: [0, 1, 0, 0].
    copied_B = torch.tensor(
        [*range(len(first)), *[0] * (batch - len(first))], device=roots_B.device
    )
    cache.select(copied_B)
    call.drafter.select(copied_B)
    roots_B = roots_B[copied_B]
    for rows in others:
        # Each group takes the next free slots.
        slots = range(len(sequences.active), len(sequences.active) + len(rows))
        roots_B = prefill_slots(call, rows, slots, cache, roots_B)
        sequences.active = [*sequences.active, *rows]
    return cache, roots_B


def similar_lengths(sequences: Sequences, rows: list[int], target: Target) -> list[list[int]]:
    """Rows in groups whose prompts are read together, padded to the longest of the group.

    A group is split where that saves the most padding, if what it saves, less a common prefix that
    is then read again, is worth another forward.

    For example, prompts of 900, 850 and 20 tokens: read together, the shorter ones take 50 and 880
    tokens of padding. A split before the third saves 880 of them, one before the second 2 x 50.
    """
    prompts = sequences.prompts
    # 1. Padding would change the state of a recurrent target: only equal lengths go together.
    if not target.engine.pads_prompts:
        by_length: dict[int, list[int]] = {}
        for row in rows:
            by_length.setdefault(len(prompts[row]), []).append(row)
        return list(by_length.values())
    # 2. All padding together is not worth another forward.
    needed = target.engine.least_padding
    longest = max(len(prompts[row]) for row in rows)
    if sum(longest - len(prompts[row]) for row in rows) < needed:
        return [rows]
    # 3. The texts that the target reads, the longest first; equal ones may be read once.
    # sync: once a batch whose prompts differ in length
    texts = {row: tuple(prompts[row].tolist()) for row in rows}
    to_read = [*texts.values()]
    if target.shares_prompts:
        to_read = [*set(to_read)]
    to_read.sort(key=len, reverse=True)

    def split(longest_first: list[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
        count = len(longest_first)
        longest = len(longest_first[0])
        # Split before text i, each of the count - i texts from there on is read without the padding
        # up to `longest`, of which text i needs the least.
        saved = [(count - i) * (longest - len(text)) for i, text in enumerate(longest_first)]
        again = shared_length(longest_first) if target.shares_prompts else 0
        if max(saved) < needed + again:
            return [longest_first]
        best = saved.index(max(saved))
        return [*split(longest_first[:best]), *split(longest_first[best:])]

    # 4. The rows of each group of texts.
    groups = []
    for texts_of_group in split(to_read):
        group = set(texts_of_group)
        groups.append([row for row in rows if texts[row] in group])
    return groups


def prefill_slots(
    call: DecodingCall, rows: list[int], slots: Sequence[int], cache: TreeCache, roots_B: Tensor
) -> Tensor:
    """Read the prompts of rows that take these slots of the batch; return the roots [B]."""
    # A second cache and drafter read the prompts, then their rows take the slots.
    fresh = call.drafter.fresh()
    into_R = upload(slots, roots_B.device)
    fresh_cache, fresh_roots = prefill(replace(call, drafter=fresh, past=None), rows)
    cache.replace(into_R, fresh_cache)
    call.drafter.replace(into_R, fresh)
    return roots_B.index_copy(0, into_R, fresh_roots)


def prefill(
    call: DecodingCall, rows: list[int], batch_size: int | None = None
) -> tuple[TreeCache, Tensor]:
    """Read the prompts of `rows` in chunks; return the KV cache and each prompt's next token [B].

    The cache has room for the new tokens of `batch_size` rows. With None, where another cache will
    take its entries, it has room for the prompts.
    """
    # 1. The drafter's settings.
    target = call.target
    drafter = call.drafter
    sequences = call.sequences
    past = call.past
    prompts = [sequences.prompts[row] for row in rows]
    lengths = [len(prompt) for prompt in prompts]
    capacity = max(map(len, sequences.prompts)) + sequences.new_tokens + drafter.max_nodes
    draft_probs = None if call.rule is greedy else call.process_logits.draft_probs
    noise = call.noise
    temperature = call.process_logits.temperature
    gumbel: Callable[[int], Tensor] | None = None
    if noise is not None:
        # The target takes the token v with the least E_v / p_v, which has the largest logit_v -
        # temperature x log E_v. One more position than asked for is computed, as the rule needs it.
        def gumbel_noise(count: int) -> Tensor:
            return noise.next(count + 1)[:, :count].log().mul_(-temperature)

        gumbel = gumbel_noise
    context = DraftContext(
        len(prompts),
        capacity,
        call.sampler,
        draft_probs,
        gumbel,
        rows,
        prompt_tokens=max(lengths),
        new_tokens=sequences.new_tokens,
    )
    # 2. What a conversation knows already of the text: the first `known` tokens, a single row's.
    if past is not None and target.segments is not None and target.segments.by_last:
        past.stay_in(target.segments.of(lengths[0] - 1))
    cache: TreeCache | None = None
    known = 0
    if past is not None:
        cache, known = past.resume(context, drafter, prompts[0])
    if not known:
        drafter.begin(context)

    # 3. Read the rest, in one stage or two: a shared prefix, and what follows it.
    tokens_BT = padded_prompts(prompts, target.device)
    whole = target.segments is not None and target.segments.reads_whole(max(lengths))
    stages = _stages(tokens_BT, lengths, known, target.shares_prompts and not whole)
    if cache is None:
        room = (max(lengths), len(prompts)) if batch_size is None else (capacity, batch_size)
        cache = target.engine.new_cache(len(stages[0].rows), *room)
    last: dict[int, tuple[Tensor, Tensor]] = {}
    for number, stage in enumerate(stages):
        if number:
            # The prefix was read as one row: each row of the second stage begins as its copy.
            cache.select(torch.zeros(len(stage.rows), dtype=torch.int64, device=target.device))
        last |= _read_stage(call, stage, rows, tokens_BT, lengths, cache)
    # Equal prompts were read once: give each row of the batch its copy.
    if len(stage.rows) < len(prompts):
        cache.select(torch.tensor(stage.of_row, device=target.device))
    # Entries of padding lie after a row's length and are overwritten by its new tokens.
    lengths_B = torch.tensor(lengths, device=target.device)
    cache.lengths_B = lengths_B
    if past is not None:
        cache.keep_snapshot()

    # 4. The token after each prompt, by the acceptance rule: a round whose tree is the root alone.
    #    The root is the prompt's last token, the only one here that the cache holds already.
    last_tokens_B1 = tokens_BT.gather(1, lengths_B[:, None] - 1)
    tree = NoDraft().propose(last_tokens_B1[:, 0])
    logits_BV = torch.stack([last[index][0] for index in stage.of_row])
    features_BF = torch.stack([last[index][1] for index in stage.of_row])
    output = TargetOutput(logits_BV[:, None], features_BF[:, None])
    scores_B1V = call.process_logits(output.logits_BNV, tree, sequences.text, rows)
    sampler = call.sampler
    if noise is not None:
        noise.move_to(rows)
        sampler = noise.sampler(tree)
    verdict = verify(call.rule, tree, output.features_BNF, scores_B1V, sampler)
    first = read_by_host(Round(tree, tree, None, output, verdict, scores_B1V))
    sequences.add(rows, first)

    # 5. The drafter gets the last prompt token only now, since a head reads each token with its
    #    successor.
    roots_B = first.verdict.next_tokens_B
    last_chunk = PrefillChunk(
        last_tokens_B1, roots_B[:, None], output.features_BNF, first.verdict.lengths_B
    )
    show_prompts(call, rows, [length - 1 for length in lengths], last_chunk)
    return cache, roots_B


def show_prompts(
    call: DecodingCall, rows: Sequence[int], starts: Sequence[int], chunk: PrefillChunk
) -> None:
    """Show a chunk of the prompts to the drafter and the observers (`RoundObserver.prefill`)."""
    for observer in call.observers:
        observer.prefill(rows, starts, chunk)
    features_BTF = call.of_drafter(chunk.features_BTF)
    call.drafter.prefill(replace(chunk, features_BTF=features_BTF))


def padded_prompts(prompts: Sequence[Tensor], device: torch.device) -> Tensor:
    """Prompts [T] as one batch [B, T] on a device, each padded on the right with its last token.

    The target reads padding, too, and attention weights it by 0. A token that is not in the text
    could be one for which the target computes NaN, such as an embedding that was never trained, and
    0 x NaN is NaN.
    """
    tokens_BT = pad_sequence(list(prompts), batch_first=True).to(device)
    # Position t takes the token at min(t, length - 1): [5, 7, 9] in a batch of T = 5 becomes
    # [5, 7, 9, 9, 9].
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


def _stages(tokens_BT: Tensor, lengths: list[int], known: int, shares: bool) -> list[Stage]:
    """Stages that read a common prefix once, and equal prompts once if the target `shares` them.

    `tokens_BT` are the right-padded prompts, the first `known` tokens of which are in the KV cache
    already.

    For example, four prompts A, B, A, C that share their first 100 tokens, the longest of 130:

        Stage(0, 99, rows=[0], of_row=[0, 0, 0, 0])
        Stage(99, 130, rows=[0, 1, 3], of_row=[0, 1, 0, 2])
    """
    every = list(range(len(lengths)))
    longest = max(lengths)
    if len(lengths) == 1 or not shares:
        return [Stage(known, longest, every, every)]
    # sync: once a batch
    texts = [tuple(row[:length]) for row, length in zip(tokens_BT.tolist(), lengths, strict=True)]
    different = list(dict.fromkeys(texts))  # each text once, in order
    rows = [texts.index(text) for text in different]
    of_row = [different.index(text) for text in texts]
    # One less: the token after each shared one must be the same, too, as a head reads both
    # together.
    shared = shared_length(different) - 1
    if len(different) == 1 or shared < SHARED_TOKENS:
        return [Stage(0, longest, rows, of_row)]
    return [Stage(0, shared, [0], [0] * len(lengths)), Stage(shared, longest, rows, of_row)]


def _read_stage(
    call: DecodingCall,
    stage: Stage,
    rows: list[int],
    tokens_BT: Tensor,
    lengths: list[int],
    cache: TreeCache,
) -> dict[int, tuple[Tensor, Tensor]]:
    """Read a stage in chunks; return logits and features of the prompts' last tokens in it.

    The keys are indices in `stage.rows`.
    """
    target = call.target
    inputs = call.prompt_inputs
    layers = call.layers
    lengths_B = torch.tensor(lengths, device=target.device)
    one_to_one = stage.rows == stage.of_row  # the target reads every row of the batch
    of_row_B = torch.tensor(stage.of_row, device=target.device)
    read_RT = tokens_BT
    if not one_to_one:
        read_RT = tokens_BT[torch.tensor(stage.rows, device=target.device)]
    last: dict[int, tuple[Tensor, Tensor]] = {}
    # Images, and positions that a forward computes by its last one, need a single forward.
    whole = inputs is not None or (
        target.segments is not None and target.segments.reads_whole(stage.end)
    )
    size = stage.end if whole else PREFILL_TOKENS
    for start in range(stage.begin, stage.end, size):
        stop = min(start + size, stage.end)
        # 1. Where prompts end in this chunk, counted from its start. Prompts of 3000, 4000 and 5000
        #    tokens in the chunk from 2048 to 4096: {0: 951, 1: 1951}.
        prompt_ends = {}
        for index, row in enumerate(stage.rows):
            end = lengths[row] - 1 - start
            if 0 <= end < stop - start:
                prompt_ends[index] = end
        # 2. The logits to compute. A forward gives all rows' logits at the same positions: with R
        #    different ends, R x R of which R are needed. So they are computed from the final hidden
        #    states of the ends alone. Without a head no hidden states are requested: transformers
        #    would add hooks to the user's model.
        reads_states = layers or target.engine.features_are_free
        from_states = len(set(prompt_ends.values())) > 1 and reads_states and target.computes_logits
        logit_positions = [] if from_states else sorted(set(prompt_ends.values()))
        read_layers = (*layers, -1) if from_states and -1 not in layers else layers
        # 3. The forward.
        if inputs is None:
            output = target.engine.read_chunk(
                read_RT[:, start:stop], stage.end, cache, read_layers, logit_positions
            )
        else:
            output = target.engine.read_prompt(read_RT, cache, read_layers, logit_positions, inputs)
        features_BTF = output.features_BNF
        # 4. Logits and features of the last tokens.
        if from_states:
            width = target.info.hidden_size
            states_BTD = features_BTF.split(width, dim=-1)[read_layers.index(-1)]
            chosen_KD = torch.stack([states_BTD[index, end] for index, end in prompt_ends.items()])
            logits = target.engine.logits(chosen_KD).unbind()
            features_BTF = features_BTF[..., : len(layers) * width]  # without a layer -1 of ours
        else:
            logits = tuple(
                output.logits_BNV[index, logit_positions.index(end)]
                for index, end in prompt_ends.items()
            )
        for (index, end), logits_V in zip(prompt_ends.items(), logits, strict=True):
            last[index] = logits_V, features_BTF[index, end]
        # 5. Show the chunk with each token's successor. The last token of the longest prompt has
        #    none yet: the last chunk is one shorter, and empty if it holds that token alone.
        next_BT = tokens_BT[:, start + 1 : stop + 1]
        known = next_BT.shape[1]
        if known:
            features_BTF = features_BTF[:, :known] if one_to_one else features_BTF[of_row_B, :known]
            # Of a row of 5 tokens, 4 have a successor: 4 - start of them lie in this chunk.
            known_B = (lengths_B - 1 - start).clamp(0, known)
            chunk = PrefillChunk(
                tokens_BT[:, start : start + known], next_BT, features_BTF, known_B
            )
            show_prompts(call, rows, [start] * len(rows), chunk)
    return last
