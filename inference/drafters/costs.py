"""Costs of a round on this machine: target forwards by number of tokens, and a head's drafts.

`measured_costs` takes about a second when it is first needed, and is kept (see `machine`) for all
models of the same dimensions: so a tree can fit the machine although nobody calibrated it there.
`costs_of_rounds` derives them from rounds that were decoded, which `headstart tree` does.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...heads.base import DraftHead, dtype_name
from ..engines.cpu_decoder import is_packed
from ..engines.encoder_decoder import Seq2SeqTarget
from ..engines.target import Target
from ..trees.sampling import RandomSampler
from ..trees.stats import Stats
from ..trees.tree import DraftTree
from ..trees.tree_spec import DynamicShape, TreePolicy, TreeShape
from ..tuning.machine import Key, measured_once, seconds_in_turns
from ..tuning.round_costs import SIZES, RoundCosts
from .base import DraftContext, PrefillChunk
from .draft_model_state import DraftModelState
from .round import Round, Verdict
from .tree_policies import StaticTree

TEXT = 16
"""Tokens of the text that they follow."""
READ = 256
"""Tokens of a prompt by which a head's reading is timed."""
DEPTH = 4
"""Depth of the chain by which drafts are timed, at most."""
REPEATS, LIMIT = 5, 0.8
"""Calls of each function, at most, and seconds after which there are no more."""
TOGETHER = 4
"""Calls that are timed together where functions are replayed, so that the host launches one while
the device runs another. The first such calls are not measured: they compile kernels, run the
functions as they are and record them."""
TIMED_NODES = 8
"""Nodes of the trees by whose rounds drafting is timed."""
TIMED_WIDTHS = (2, 8)
"""Their widths."""
CHUNK_TOKENS = 2048
"""Tokens of a text that are read at once."""
EIGHT_BITS = ", 8 bits"
"""End of the name of what a head costs that drafts with weights of 8 bits."""


def measured_costs(target: Target, head: DraftHead | None = None) -> RoundCosts:
    """Return the costs of steps on this machine, measured now or earlier.

    Models of the same dimensions cost the same.
    """
    name = f"{target_shape(target)}, {target.engine.name}; "
    if head is None:
        name += "no head"
    else:
        name += head_shape(head) + (EIGHT_BITS if is_packed(head) else "")

    def measure() -> dict[str, Any]:
        with target.lock:  # another thread may be generating with the same kernels
            return time_rounds(target, head).kept()

    return measured_once(target.device, name, measure, RoundCosts.read)


def head_shape(head: DraftHead) -> str:
    """Describe everything of a head that the cost of its drafts depends on."""
    weights = sum(weight.numel() for weight in head.parameters())
    return (
        f"{type(head).__name__}, {weights} weights, depth {head.max_depth}, layers"
        f" {list(head.feature_layers)}"
    )


def target_shape(target: Target) -> str:
    """Describe everything of a target, except its engine, that the cost depends on."""
    info = target.info
    model = target.model
    kinds = ", ".join(sorted({type(weight).__name__ for weight in model.parameters()}))
    return (
        f"seconds of a round: {type(model).__name__}, {info.num_layers} layers of"
        f" {info.hidden_size} and {info.intermediate_size}, {info.num_attention_heads} heads in"
        f" {info.num_key_value_heads} groups of {info.head_dim}, {info.vocab_size} tokens,"
        f" {sum(weight.numel() for weight in model.parameters())} weights ({kinds}),"
        f" {dtype_name(target.dtype)}, {model.config._attn_implementation}"
    )


@torch.inference_mode()
def time_rounds(target: Target, head: DraftHead | None) -> RoundCosts:
    """Time the parts of a round on this machine, for trees of all `SIZES`."""
    # 1. The target's forward over trees of each size, after a random text.
    random = torch.Generator().manual_seed(0)
    text_1T = torch.randint(target.info.vocab_size, (1, TEXT), generator=random).to(target.device)
    if isinstance(target, Seq2SeqTarget):
        target.encode(text_1T, None)  # every generation sets its own
    layers = () if head is None else head.feature_layers
    check = checker(target, text_1T, layers)
    calls: dict[int | str, Callable[[], Tensor]] = {size: partial(check, size) for size in SIZES}
    depth = 0 if head is None else min(head.max_depth, DEPTH)
    if head is not None:
        # 2. A chain by the head, as in a round: the drafter gets a round in which nothing was
        #    accepted, with the text's own features, and drafts after it.
        drafter = StaticTree(DraftModelState(head, target.draft_modules), TreeShape.chain(depth))
        one_1 = torch.ones_like(text_1T[0, :1])
        drafter.model_state.use(target.engine)
        # Every timed call adds a token to the head's cache.
        capacity = TEXT + TOGETHER * (REPEATS + 2) + drafter.max_nodes
        drafter.begin(DraftContext(1, capacity, RandomSampler(None), None))
        output = target.engine.read_chunk(text_1T, TEXT, target.engine.new_cache(1), layers, [])
        features = output.features_BNF
        drafter.prefill(
            PrefillChunk(text_1T[:, :-1], text_1T[:, 1:], features[:, :-1], one_1 * (TEXT - 1))
        )
        chain = DraftTree.of_shape(TreeShape.chain(depth), text_1T[:, : depth + 1])
        verdict = Verdict(
            path_BA=torch.zeros_like(text_1T[:, :1]),
            lengths_B=one_1,
            next_tokens_B=text_1T[:, 0],
            emitted_BA=text_1T[:, :1],
            features_BAF=features[:, -1:],
            spoiled_B=torch.zeros_like(text_1T[:, 0], dtype=torch.bool),
        )
        finished = Round(chain, chain, None, output, verdict, output.logits_BNV, tokens=[[0]])

        def draft() -> Tensor:
            """Read a token, as after a round, and draft a chain."""
            drafter.observe(finished)
            return drafter.propose(text_1T[:, 0]).tokens_BN

        # 3. The same after a prompt of `READ` tokens, which repeats the text: what it takes longer
        #    is reading.
        context = DraftContext(1, READ + 1 + drafter.max_nodes, RandomSampler(None), None)
        reader = drafter.fresh()
        repeated_T = torch.arange(READ, device=target.device) % (TEXT - 1)
        prompt = PrefillChunk(
            text_1T[:, repeated_T],
            text_1T[:, repeated_T + 1],
            features[:, repeated_T],
            one_1 * READ,
        )

        def read_and_draft() -> Tensor:
            """Read a prompt and draft a chain after it."""
            reader.begin(context)
            reader.prefill(prompt)
            return reader.propose(text_1T[:, 0]).tokens_BN

        calls["draft"] = draft
        calls["read and draft"] = read_and_draft
    # 4. What disturbs a call makes it slower, never faster: the fastest of few calls is the cost.
    taken = {call: min(times) for call, times in seconds_of(target, calls, REPEATS, LIMIT).items()}
    # More tokens never take less time, so a larger size costs at least what a smaller one does.
    forward = dict(
        zip(SIZES, itertools.accumulate((taken[size] for size in SIZES), max), strict=True)
    )
    if head is None:
        return RoundCosts(forward, draft=0.0)
    reading = max(taken["read and draft"] - taken["draft"], 0.0) / READ
    return RoundCosts(forward, taken["draft"] / depth, reading=reading)


def timed_trees(head: DraftHead) -> list[DynamicShape]:
    """Trees by whose rounds drafting is timed.

    They are a shallow tree, a deeper one, and one that expands more nodes.
    """
    narrow, wide = (min(width, head.draft_vocab_size) for width in TIMED_WIDTHS)
    deep = min(head.max_depth, DEPTH)
    trees = []
    for depth, width in ((1, narrow), (deep, narrow), (deep, wide)):
        most = 1 + width + (depth - 1) * width**2  # nodes that it can have
        trees.append(DynamicShape(min(TIMED_NODES, most), depth, width))
    return trees


def costs_of_rounds(
    target: Target,
    head: DraftHead,
    timed: Mapping[TreePolicy | None, Stats],
    text_1T: Tensor,
    sizes: Sequence[int],
) -> RoundCosts:
    """Derive costs from rounds that were decoded.

    Where rounds are replayed, the times of a round's parts are those of launches, which say
    nothing: there a draft takes what a round takes besides its forward.

    Args:
        target: the model.
        head: the head that drafted.
        timed: statistics of decoding with each of `timed_trees` and, at None, without drafts.
        text_1T: forwards over trees are timed after this text.
        sizes: nodes of those trees.
    """
    trees = timed_trees(head)
    shallow, deep, wide = trees

    # 1 Forwards, and what each of the rounds takes for its draft and for what no tree changes.
    forward_sizes = {1, 2, *sizes}
    if target.engine.runner.replays:
        forward_sizes |= {tree.size for tree in trees}
    forward = forward_seconds(target, text_1T, sorted(forward_sizes), head.feature_layers)
    if target.engine.runner.replays:
        # The first rounds compile and record: the median leaves them out.
        plain_step = statistics.median(timed[None].round_seconds)
        drafts = [
            statistics.median(timed[tree].round_seconds) - forward[tree.size] for tree in trees
        ]
        others = 0.0
    else:
        step = timed[None].round_parts
        plain_step = sum(step.values())
        # What the processors, the verdict, the cache and the host take is the same for all trees.
        parts = [timed[tree].round_parts for tree in trees]
        drafts = [part["draft"] for part in parts]
        others = statistics.mean(
            sum(part.values()) - part["draft"] - part["target"] for part in parts
        )
        # On a CPU a forward takes longer in a round than alone.
        if target.device.type == "cpu":
            scale = step["target"] / forward[1]
            forward = {size: scale * seconds for size, seconds in forward.items()}

    # 2 What a depth adds to a draft, and what a node that is expanded adds: three drafts, three
    #   unknowns, draft = constant + depth * tree.depth + node * tree.expanded. Disturbed times may
    #   give negative costs, which become 0.
    shallow_draft, deep_draft, wide_draft = drafts
    node = 0.0
    if wide.expanded > deep.expanded:
        node = max(0.0, wide_draft - deep_draft) / (wide.expanded - deep.expanded)
    depth = 0.0
    if deep.depth > shallow.depth:
        by_nodes = node * (deep.expanded - shallow.expanded)
        depth = max(0.0, deep_draft - shallow_draft - by_nodes) / (deep.depth - shallow.depth)
    constant = shallow_draft - depth * shallow.depth - node * shallow.expanded
    return RoundCosts(forward, depth, node, constant + others, plain_step)


def forward_seconds(
    target: Target, text_1T: Tensor, sizes: Sequence[int], layers: tuple[int, ...]
) -> dict[int, float]:
    """Return the median seconds of a forward over a chain after a text, by the chain's nodes.

    The sizes are timed in turns.
    """
    check = checker(target, text_1T, layers)
    taken = seconds_of(target, {size: partial(check, size) for size in sizes}, repeats=9)
    return {size: statistics.median(times) for size, times in taken.items()}


def seconds_of(
    target: Target, calls: Mapping[Key, Callable[[], Tensor]], repeats: int, limit: float = math.inf
) -> dict[Key, list[float]]:
    """Return the seconds of calls by `seconds_in_turns`, each with the wait for its result.

    Where functions are replayed, these are the device's seconds: the host waits for it once in
    `TOGETHER` calls.
    """
    replays = target.engine.runner.replays
    together = TOGETHER if replays else 1

    def call_and_wait(call: Callable[[], Tensor]) -> None:
        for _ in range(together):
            result = call()
        result[(0,) * result.ndim].item()  # sync: to take the time

    sides = {name: partial(call_and_wait, call) for name, call in calls.items()}
    taken = seconds_in_turns(sides, repeats, limit, unmeasured=int(replays))
    seconds_of_calls = {}
    for name, times in taken.items():
        seconds_of_calls[name] = [seconds / together for seconds in times]
    return seconds_of_calls


@torch.inference_mode()
def checker(target: Target, text_BT: Tensor, layers: tuple[int, ...]) -> Callable[[int], Tensor]:
    """Read texts, and return a function that runs a forward over chains of N nodes after them.

    It returns their logits [B, N, V].
    """
    length = text_BT.shape[1]
    cache = target.engine.new_cache(len(text_BT))
    for chunk_BT in text_BT.split(CHUNK_TOKENS, dim=1):
        target.engine.read_chunk(chunk_BT, length, cache, layers, [])

    @torch.inference_mode()
    def check(size: int) -> Tensor:
        # Different tokens: a mixture of experts would send equal ones to the same experts.
        tokens_BN = text_BT[:, torch.arange(size, device=text_BT.device) % length]
        return target.engine.forward_chain(tokens_BN, length, cache, layers).logits_BNV

    return check
