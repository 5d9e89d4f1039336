"""Recording of one row's rounds, as they are decoded.

No model runs a second time: the target's probabilities are those that the acceptance rule saw, and
the draft's logits are shown by `DraftModelState.watched`. The rule alone decides once more, by the
same random numbers (`RecordingSampler`). What is recorded of a round is copied to the host once,
after the round and outside of its time.

Letters in tensor names: B batch (one row), N nodes, V vocabulary, D draft vocabulary, W width of
the frontier.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...heads.base import DraftHead, dtype_name
from ...heads.layers.decoder_layer import at_least_fp32
from ...inference.drafters.draft_model_state import DraftModel
from ...inference.drafters.round import Round
from ...inference.drafters.tree_policies import model_states
from ...inference.rounds.observers import DecodingCall, RoundObserver
from ...inference.trees.sampling import PositionSampler, RandomSampler, finest, sampler_by
from ...inference.trees.stats import PARTS, Stats
from ...inference.trees.tree_spec import TreeKind
from ...inference.trees.verify import (
    greedy,
    is_lossy_rule,
    is_rule,
    point_mass,
    traversal,
    typical,
    typical_threshold,
    with_replacement,
    without_replacement,
)
from .draws import (
    Draw,
    HostTree,
    best_draws,
    node_status,
    sampled_draws,
    toured_draws,
    typical_draws,
    walked_draws,
)

BEST = 10
"""Tokens that are kept of a distribution."""
WHOLE_ROUNDS = 300
"""Rounds of which the distributions at all nodes are kept; of later ones, only those on the
accepted path."""


class RecordingSampler(RandomSampler):
    """A sampler that keeps another's random numbers and the probabilities that they decided on."""

    def __init__(self, inner: RandomSampler) -> None:
        super().__init__(inner.generator)
        self.inner = inner
        self.trials: list[tuple[Tensor, Tensor, Tensor]] = []
        """Of each call of `accept`: the uniform numbers, the probabilities, and whether they were
        accepted."""
        self.probs: Tensor | None = None
        """What `categorical` drew from."""
        self.drawn: Tensor | None = None
        """What it drew."""
        self.numbers: Tensor | None = None
        """The newest random numbers: uniform, or the exponential ones of a race."""

    def uniform(self, shape: Sequence[int], device: torch.device) -> Tensor:
        self.numbers = self.inner.uniform(shape, device)
        return self.numbers

    def accept(self, probs: Tensor) -> Tensor:
        accepted = super().accept(probs)
        assert self.numbers is not None
        self.trials.append((self.numbers, probs, accepted))
        return accepted

    def categorical(self, probs: Tensor) -> Tensor:
        # A race by exponential numbers, or an inverse cumulative distribution by a uniform one.
        if isinstance(self.inner, PositionSampler):
            drawn = self.inner.categorical(probs)
            self.numbers = self.inner.exponential_BNV
        else:
            drawn = super().categorical(probs)
        self.probs = probs
        self.drawn = drawn
        return drawn


class Tracer(RoundObserver):
    """Records each `generate` call of one row, nested ones (of a streamer, say) included."""

    def __init__(self) -> None:
        self.running: list[Recorder | None] = []
        """The calls that have begun, the innermost last; None for one of several rows."""
        self.ended: list[Recorder] = []

    def begin(self, call: DecodingCall) -> None:
        single_row = len(call.sequences.rows) == 1
        self.running.append(Recorder(call) if single_row else None)

    def round(self, finished: Round) -> None:
        recorder = self.running[-1]
        if recorder is not None:
            recorder.record(finished)

    def end(self, stats: Stats, error: BaseException | None) -> None:
        recorder = self.running.pop()
        if recorder is not None:
            recorder.close()
            self.ended.append(recorder)


class Recorder:
    """The rounds of one generation, as they are recorded."""

    def __init__(self, call: DecodingCall) -> None:
        """Begin to record a call of one row."""
        self.call = call
        self.rounds: list[dict[str, Any]] = []
        """Rounds as in `Trace.data`."""
        self.drafted: list[tuple[int, int]] = [(-1, 0)]
        """Of each new token: its round, -1 for the prefill, and the depth of its draft, 0 for the
        target's own."""
        self.vocab: dict[int, int] = {}
        """Index in `Trace.data` of each token that occurs."""
        self.tokens = call.sequences.rows[0]
        """New tokens."""
        heads = [state.model for state in model_states(call.drafter)]
        has_head = bool(heads) and isinstance(heads[0], DraftHead)
        self.about = {
            "target": call.target.name,
            "head": type(heads[0]).__name__ if has_head else None,
            "drafter": repr(call.drafter),
            "dtype": dtype_name(call.target.dtype),
            "rule": rule_name(call.rule, call.drafter.kind),
            "lossy": is_lossy_rule(call.rule),
            "temperature": 0.0 if call.rule is greedy else call.process_logits.temperature,
        }
        """Fields of `Trace.data` that say how the text was decoded."""
        self._seconds: dict[str, float] = {}
        self._model: DraftModel | None = None
        self._expansions: list[tuple[Tensor, Tensor, Tensor]] = []
        """Of each call of a draft model in the round: tokens [W] and parents [W] of the frontier,
        -1 for the root, and the logits [W, D] after it, W = 1 where they are the same for all."""
        self._own_D = self._index_V = torch.empty(0, dtype=torch.float32)
        """The draft vocabulary as the target's tokens, and the index of each of the target's tokens
        in it or -1."""
        self._watching = ExitStack()
        for state in model_states(call.drafter):
            if self._model is None:
                self._model = state.model
            self._watching.enter_context(state.watched(self._watch))

    def close(self) -> None:
        """Stop watching the draft models."""
        self._watching.close()

    def _watch(self, tokens_BW: Tensor, parents_BW: Tensor, logits_BWD: Tensor) -> None:
        """Keep what a draft model was asked, and its answer."""
        self._expansions.append((tokens_BW[0], parents_BW[0], logits_BWD[0]))

    def record(self, finished: Round) -> None:
        """Record a round that has ended."""
        # 1. Its milliseconds, part by part: the statistics hold sums over all rounds.
        stats = self.call.stats
        rule = self.call.rule
        done = stats.rows[0][-1]
        number = len(self.rounds)
        parts = {
            part: 1000 * (stats.seconds.get(part, 0.0) - self._seconds.get(part, 0.0))
            for part in PARTS
        }
        self._seconds = dict(stats.seconds)

        # 2. Its tree and what was accepted of it, on the host.
        columns = on_host(self._columns(finished))
        # A round that was repeated without drafts has been expanded for nothing.
        levels = len(self._expansions) if finished.drafted else 0
        self._expansions = []
        path = [int(node) for node in columns["path"][: int(columns["length"])]]
        tokens = [int(token) for token in columns["tokens"]]
        parents = [int(parent) for parent in columns["parents"]]
        tree = HostTree(
            tokens,
            parents,
            int(columns["size"]),
            path,
            int(columns["next"]),
            finished.verified.max_depth,
        )

        # 3. What was drafted with which probability, and why it was accepted or not.
        q, likely = drafts_of(tree, columns, levels)
        draws = draws_of(rule, tree, columns, q)
        follows = draws[0]["kind"] in ("best", "sample") and is_rule(rule, greedy, point_mass)
        status = node_status(tree, draws, follows)
        # After a rejection at the path's end, the bonus token comes from the residual distribution.
        redrawn = any(
            draw["kind"] == "accept" and draw["n"] == path[-1] and not draw["ok"] for draw in draws
        )

        # 4. The round as the page shows it; docs/trace.md describes the fields. The root's token
        #    was not drafted here, so it has no probabilities.
        nodes = []
        for node in range(tree.size):
            nodes.append(
                {
                    "v": self.index(tokens[node]),
                    "u": parents[node],
                    "q": rounded(q[node]),
                    "p": rounded(columns["p"][node]) if node else None,
                    "s": status[node],
                }
            )
        shown_nodes = range(tree.size) if number < WHOLE_ROUNDS else path
        draft = {}
        for node in shown_nodes:
            if node in likely:
                draft[str(node)] = self._pairs(*likely[node])
        best = {}
        for node in shown_nodes:
            best[str(node)] = self._pairs(columns["best"][node], columns["best p"][node])
        shown_draws = [self._shown(draw) for draw in draws]
        residual = None
        if redrawn:
            residual = self._pairs(columns["residual"], columns["residual p"])
        self.rounds.append(
            {
                "ms": rounded(1000 * stats.round_seconds[-1]),
                "parts": {part: rounded(value) for part, value in parts.items()},
                "fallback": done.fallback,
                "nodes": nodes,
                "draft": draft,
                "best": best,
                "draws": shown_draws,
                "residual": residual,
                "next": self.index(tree.next_token),
                "emitted": done.returned,
            }
        )
        # Round 4 accepted two drafts: [(4, 1), (4, 2), (4, 0)], the bonus token last.
        for depth in range(1, done.returned + 1):
            self.drafted.append((number, depth if depth <= done.accepted else 0))

    def _columns(self, finished: Round) -> dict[str, Tensor]:
        """Tensors to record of a round, on its device."""
        # 1. The tree, the verdict, and the target's probabilities: of each node's token, which are
        #    computed at its parent, and of the best tokens after each node.
        tree = finished.verified
        rule = self.call.rule
        scores_NV = finished.scores_BNV[0]
        probs_NV = scores_NV.softmax(-1)
        above_N = tree.parents_BN[0].clamp(min=0)  # the root's parent, -1, becomes 0
        tokens_N = tree.tokens_BN[0]
        columns = {
            "tokens": tokens_N,
            "parents": tree.parents_BN[0],
            "size": tree.sizes_B[0],
            "path": finished.verdict.path_BA[0],
            "length": finished.verdict.lengths_B[0],
            "next": finished.verdict.next_tokens_B[0],
            "p": probs_NV[above_N, tokens_N],
            **best_of("best", probs_NV),
        }
        # 2. The draft's probabilities: sampled trees hold them, others were watched.
        if tree.draft_probs_BNV is not None:
            columns |= {
                "q": tree.draft_probs_BNV[0, above_N, tokens_N],
                **best_of("draft", tree.draft_probs_BNV[0]),
            }
        elif tree.max_depth > 0 and self._model is not None:
            for level, (tokens_W, parents_W, logits_WD) in enumerate(self._expansions):
                columns[f"tokens {level}"] = tokens_W
                columns[f"parents {level}"] = parents_W
                columns |= self._expansion_columns(level, logits_WD, tokens_N)
        # 3. What the rule decided by: thresholds, uniform numbers, or the times of a race.
        if is_rule(rule, typical):
            options = rule.keywords if isinstance(rule, partial) else {}
            columns["threshold"] = typical_threshold(scores_NV.log_softmax(-1), **options)
        numbers = finished.numbers
        if numbers is None:
            return columns
        # The rule decides once more, by the same random numbers.
        sampler = RecordingSampler(sampler_by(numbers))
        rule(tree, finished.scores_BNV, sampler)
        if sampler.probs is None:
            return columns
        assert sampler.numbers is not None and sampler.drawn is not None
        if sampler.trials:
            trials = []
            for uniform, probability, accepted in sampler.trials:
                trial = [part[0].to(probs_NV.dtype) for part in (uniform, probability, accepted)]
                trials.append(torch.stack(trial))
            columns["trials"] = torch.stack(trials)
        if isinstance(sampler.inner, PositionSampler):
            # Each token's time is E / p; the first to arrive wins.
            race_NV = sampler.numbers[0] / probs_NV
            columns["won"] = race_NV.gather(1, sampler.drawn[0][:, None])[:, 0]
            columns["times"] = race_NV[above_N, tokens_N]
        else:
            columns["uniform"] = sampler.numbers.flatten()
            if not is_rule(rule, point_mass):
                columns |= best_of("residual", sampler.probs[0])
        return columns

    def _expansion_columns(
        self, level: int, logits_WD: Tensor, tokens_N: Tensor
    ) -> dict[str, Tensor]:
        """Return the ten best after each frontier node, and each tree token's probability there."""
        assert self._model is not None
        head = self._model
        device = logits_WD.device
        if len(self._own_D) == 0 or self._own_D.device != device:
            self._own_D = head.target_tokens(torch.arange(head.draft_vocab_size, device=device))
            self._index_V = self._own_D.new_full((head.target.vocab_size,), -1)
            self._index_V[self._own_D] = torch.arange(len(self._own_D), device=device)
        # -1 marks tokens that the draft vocabulary lacks: their probability is 0.
        probs_WD = at_least_fp32(logits_WD).softmax(-1)
        index_N = self._index_V[tokens_N.to(device)]
        best = best_of(f"draft {level}", probs_WD)
        best[f"draft {level}"] = self._own_D[best[f"draft {level}"]]
        of_node_WN = torch.where(index_N >= 0, probs_WD[:, index_N.clamp(min=0)], 0.0)
        return {f"q {level}": of_node_WN, **best}

    def index(self, token: int) -> int:
        return self.vocab.setdefault(token, len(self.vocab))

    def _pairs(self, tokens: Sequence[float], probs: Sequence[float]) -> list[list[float | None]]:
        """[token, probability] of the possible tokens."""
        pairs: list[list[float | None]] = []
        for token, prob in zip(tokens, probs, strict=True):
            if prob > 0:
                pairs.append([self.index(int(token)), rounded(prob)])
        return pairs

    def _shown(self, draw: Draw) -> Draw:
        """A draw with tokens by their index and rounded numbers."""
        shown = {
            name: rounded(value) if isinstance(value, float) else value
            for name, value in draw.items()
        }
        if "token" in draw:
            shown["token"] = self.index(draw["token"])
        if "times" in draw:
            shown["times"] = [[node, rounded(time)] for node, time in draw["times"]]
        return shown


def rule_name(rule: Any, kind: TreeKind) -> str:
    """The name of a rule; on chains some have a name of their own."""
    if rule is with_replacement:
        return "with_replacement"
    if kind == "sampled_chain" and is_rule(rule, without_replacement, traversal):
        return "token" if is_rule(rule, without_replacement) else "block"
    # A rule with options is a `partial`, which has no name.
    for known_rule in (greedy, point_mass, without_replacement, traversal, typical):
        if is_rule(rule, known_rule):
            return known_rule.__name__
    return str(getattr(rule, "__name__", repr(rule)))


def best_of(name: str, probs: Tensor) -> dict[str, Tensor]:
    """Return the `BEST` likeliest tokens of distributions [..., V], with their probabilities.

    The tokens are stored under `name`, the probabilities under "name p".
    """
    best = probs.topk(min(BEST, probs.shape[-1]))
    return {name: best.indices, f"{name} p": best.values}


def on_host(columns: dict[str, Tensor]) -> dict[str, Any]:
    """Tensors as numbers and nested lists, all copied at once."""
    # One flat tensor of floats: token ids fit exactly, below 2^24 even in float32.
    device = columns["p"].device
    flat = [tensor.to(device, finest(device)).flatten() for tensor in columns.values()]
    whole = torch.cat(flat).cpu().split([len(part) for part in flat])  # sync: once a round
    return {
        name: part.reshape(tensor.shape).tolist()
        for (name, tensor), part in zip(columns.items(), whole, strict=True)
    }


def drafts_of(
    tree: HostTree, columns: dict[str, Any], levels: int
) -> tuple[list[float | None], dict[int, tuple[list[float], list[float]]]]:
    """Return each node token's draft probability, and the best children by node.

    The probability is None where no draft model gave one.
    """
    q: list[float | None] = [None] * len(tree.tokens)
    likely: dict[int, tuple[list[float], list[float]]] = {}
    nodes = range(len(tree.tokens))
    # 1. A sampled tree holds the distributions itself; leaves have none.
    if "q" in columns:
        for node in nodes[1:]:
            q[node] = columns["q"][node]
        for node in {tree.parents[node] for node in nodes[1:]}:
            if max(columns["draft p"][node]) > 0:
                likely[node] = (columns["draft"][node], columns["draft p"][node])
        return q, likely
    # 2. The expansions of another tree are matched with its nodes by their paths, the tokens below
    #    the root: the draft may have expanded nodes that the tree does not hold.
    by_path: dict[tuple[int, ...], int] = {}
    paths: list[tuple[int, ...]] = []
    for node in nodes[: tree.size]:
        paths.append((*paths[tree.parents[node]], tree.tokens[node]) if node else ())
        by_path.setdefault(paths[-1], node)
    above: list[tuple[int, ...]] = []  # paths of the frontier before
    for level in range(levels if "q 0" in columns else 0):
        frontier: list[tuple[int, ...]] = []
        tokens = columns[f"tokens {level}"]
        for token, parent in zip(tokens, columns[f"parents {level}"], strict=True):
            frontier.append((*above[int(parent)], int(token)) if parent >= 0 else ())
        above = frontier
        for i, path in enumerate(frontier):
            if path not in by_path:
                continue
            # A head with independent depths has one row for the whole frontier.
            node = by_path[path]
            row = min(i, len(columns[f"q {level}"]) - 1)
            likely[node] = columns[f"draft {level}"][row], columns[f"draft {level} p"][row]
            for child in tree.children[node]:
                q[child] = columns[f"q {level}"][row][child]
    return q, likely


def draws_of(
    rule: Any, tree: HostTree, columns: dict[str, Any], q: Sequence[float | None]
) -> list[Draw]:
    """The draws of a round, by its rule."""
    if is_rule(rule, greedy):
        return best_draws(tree)
    if is_rule(rule, typical):
        return typical_draws(tree, columns["p"], columns["threshold"])
    if is_rule(rule, point_mass):
        return sampled_draws(
            tree, columns.get("uniform"), columns.get("times", ()), columns.get("won", ())
        )
    sampled = [value or 0.0 for value in q]
    draws = toured_draws if is_rule(rule, traversal) else walked_draws
    return draws(tree, sampled, columns.get("trials", ()), columns["uniform"][0])


def rounded(value: float | None) -> float | None:
    """Four significant digits; None for None, NaN and infinities, which JSON lacks."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.4g}")
