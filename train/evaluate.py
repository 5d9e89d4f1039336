"""Evaluation of a head: teacher-forced accuracy by rank, and acceptance by decoding.

Acceptance is measured through the decoder itself.

Processes share the conversations and the prompts, and each gets all results, in the order of a
single process. A target that is sharded gathers its blocks in every forward, in which all processes
take part: there each evaluates everything, and the number of forwards must not depend on what a
process computes (see `ReplayTarget`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from ..console import ProgressBar
from ..heads.base import DraftHead
from ..heads.objective import Objective
from ..inference.drafters.acceptance import RANKS, Sums, means
from ..inference.drafters.round import Round
from ..inference.engines.target import Target
from ..inference.output import GenerateOutput
from ..inference.replay import BEYOND, TOKENS_AT_ONCE, ReplayTarget, rows_at_once
from ..inference.rounds.observers import DecodingCall, RoundObserver
from ..inference.rounds.sequences import left_padded
from ..inference.speculative_lm import SpeculativeLM
from ..inference.trees.stats import Stats, acceptance_figures
from ..inference.trees.tree_spec import TreePolicy, TreeShape, spec_of
from ..inference.tuning.tree_search import best_static_tree, default_dynamic_tree
from ..stopping import StopFlag
from .config import EvalConfig, TrainConfig
from .data.batches import budgeted, collate
from .data.chat_template import Example
from .engines import any_process, distributed
from .features.online import OnlineFeatures
from .features.placement import is_sharded
from .features.stored import StoredFeatures, StoredReplay

NODES_AT_ONCE = 512
"""Nodes of trees that are looked up at once, over all prompts: their logits take memory."""
FEWEST_NEW_TOKENS = 2
"""Tokens of the answer that is tried before the first step; the first is the prefill's."""


@dataclass
class Evaluation:
    """Results of one evaluation."""

    loss_K: list[float]
    """Teacher-forced loss per depth, in nats per token."""
    accuracy_KI: list[list[float]]
    """Share of positions at each depth at which the true token is the head's i-th best."""
    policies: dict[str, TreePolicy]
    """A chain as deep as the head, the best static tree for these accuracies, and a dynamic one of
    the same size."""
    trees: dict[str, Stats]
    """Statistics of greedy decoding on held-out prompts with each of them."""
    best: str = field(init=False)
    """Name of the tree with the longest acceptance length."""
    acceptance_length: float = field(init=False)
    """Tokens per round with the best tree, by which the best checkpoint is chosen."""
    tree: str | list[list[int]] = field(init=False)
    """Spec of the best tree, as a checkpoint holds it."""

    def __post_init__(self) -> None:
        lengths = {name: stats.acceptance_length for name, stats in self.trees.items()}
        self.best = max(lengths, key=lambda name: lengths[name])
        self.acceptance_length = lengths[self.best]
        self.tree = spec_of(self.policies[self.best])

    @property
    def prompts(self) -> list[list[int]]:
        """Tokens and rounds of each prompt with the best tree."""
        return self.trees[self.best].tokens_and_rounds

    def shorter_than(self, others: list[list[int]]) -> bool:
        """Whether acceptance is significantly shorter than in an earlier evaluation.

        `others` are the `prompts` of the earlier one. It is shorter if the 95 % confidence interval
        of the difference, over the prompts that both answered, lies below 0. With one such prompt
        the difference itself decides.
        """
        _, high = difference_interval(self.prompts, others)
        return high < 0  # NaN compares as False: without a common prompt nothing is shorter

    def measured(self, config: EvalConfig) -> dict[str, Any]:
        """Figures for a checkpoint and its model card."""
        return {
            "prompts": len(self.trees["chain"].rows),
            "new_tokens": config.max_new_tokens,
            "accuracy": self.accuracy_KI,
            "trees": {
                name: {"nodes": self.policies[name].size, **acceptance_figures(stats)}
                for name, stats in self.trees.items()
            },
        }


def evaluate(
    target: Target,
    head: DraftHead,
    objective: Objective,
    held_out: list[Example],
    config: EvalConfig,
    accelerator: Accelerator,
    stop: StopFlag,
    tokens: int = TOKENS_AT_ONCE,
) -> Evaluation | None:
    """Measure a head, copied to the target's dtype, on conversations that it was not trained on.

    Args:
        config: how many conversations and prompts, and how long the answers are.
        accelerator: the processes that share the work; all have the same head and conversations.
        stop: looked at before the losses and before each tree.
        tokens: of a teacher-forced forward, padding included, at most.

    Returns:
        The evaluation, the same on all processes; None if `stop` was wanted on any.
    """
    # Decoding runs in the target's dtype, so accuracy is measured in it too.
    served = copy.deepcopy(head).to(target.device, target.dtype).eval()
    together = is_sharded(target)

    # 1. Teacher-forced loss and accuracy.
    if any_process(accelerator, stop.wanted):
        return None
    batches = batched(held_out[: config.conversations], tokens)
    sums = distributed(accelerator, batches, partial(sums_of, target, served, objective), together)
    loss_K, accuracy_KI = means(sums, head.max_depth)

    # 2. Acceptance, by greedy decoding with three trees. The static one follows from the accuracy.
    policies: dict[str, TreePolicy] = {
        "chain": TreeShape.chain(len(accuracy_KI)),
        "static": best_static_tree(accuracy_KI, config.nodes),
        "dynamic": default_dynamic_tree(head.max_depth, config.nodes),
    }
    prompts = eval_prompts(target, held_out, config)
    trees: dict[str, Stats] = {}
    for name, policy in policies.items():
        if any_process(accelerator, stop.wanted):
            return None
        answer = partial(_stats_of, target, served, policy, config.max_new_tokens)
        trees[name] = Stats.merged(distributed(accelerator, prompts, answer, together))
    return Evaluation(loss_K, accuracy_KI, policies, trees)


def difference_interval(
    prompts: list[list[int]], others: list[list[int]], confidence: float = 0.95
) -> tuple[float, float]:
    """Confidence interval of the difference of two acceptance lengths on the same prompts, paired.

    Each of `prompts` and `others` holds [tokens, rounds]. Prompts are clusters of two ratio
    estimates, as in `Stats.acceptance_length_interval`. With one prompt both ends are the
    difference; NaN without a round.
    """
    # Prompts in which both evaluations drafted. An answer that ends with its first token has no
    # round.
    pairs = [
        (prompt, other)
        for prompt, other in zip(prompts, others, strict=False)
        if prompt[1] and other[1]
    ]
    if not pairs:
        return float("nan"), float("nan")
    means = []
    # The influence of each prompt on the difference: by the delta method prompt n moves the ratio
    # r = sum(tokens) / sum(rounds) by (tokens_n - r * rounds_n) / sum(rounds).
    influence_N = torch.zeros(len(pairs), dtype=torch.float64)
    for side, sign in ((0, 1), (1, -1)):
        tokens_N, rounds_N = torch.tensor([pair[side] for pair in pairs], dtype=torch.float64).T
        mean = tokens_N.sum() / rounds_N.sum()
        influence_N += sign * (tokens_N - mean * rounds_N) / rounds_N.sum()
        means.append(float(mean))
    difference = means[0] - means[1]
    count = len(pairs)
    if count == 1:
        return difference, difference
    deviations = student_t(confidence, count - 1)  # 1.98 for 95 % and 100 prompts, 12.7 for two
    half_width = deviations * float((influence_N.square().sum() * count / (count - 1)).sqrt())
    return difference - half_width, difference + half_width


def student_t(confidence: float, degrees: int) -> float:
    """Return t, within +-t of which Student's distribution has this share.

    By Abramowitz and Stegun, 26.7: with x = atan(t / sqrt(n)), n degrees of freedom, c = cos(x) and
    s = sin(x) the share is
    2/pi (x + s (c + 2/3 c^3 + 2/3 4/5 c^5 ...)) for odd n, s (1 + 1/2 c^2 + 1/2 3/4 c^4 ...) for
    even n, with powers up to n - 2.
    """

    def share(x: float) -> float:
        odd = degrees % 2
        term = math.cos(x) if odd else 1.0
        total = 0.0
        for power in range(odd, degrees - 1, 2):
            total += term
            term *= math.cos(x) ** 2 * (power + 1) / (power + 2)
        return 2 / math.pi * (x + math.sin(x) * total) if odd else math.sin(x) * total

    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if share(middle) < confidence else (low, middle)
    return math.sqrt(degrees) * math.tan(low)


def _stats_of(
    target: Target, head: DraftHead, tree: TreePolicy, new_tokens: int, prompts: Sequence[Tensor]
) -> list[Stats]:
    """Statistics of greedy answers to prompts, which may be an empty list."""
    if not prompts:  # more processes than prompts
        return []
    return [greedy_answers(target, head, tree, list(prompts), new_tokens).stats]


def judged(held_out: list[Example], config: EvalConfig) -> list[Example]:
    """The held-out conversations whose states an evaluation reads."""
    return held_out[: max(config.conversations, config.prompts)]


def eval_prompts(target: Target, held_out: list[Example], config: EvalConfig) -> list[Tensor]:
    """Return the first held-out prompts that leave room for an answer; a ValueError if none do."""
    if isinstance(target, StoredReplay):
        held_out = target.usable(held_out, config)
    prompts = [prompt_of(example) for example in held_out]
    room = target.max_positions - config.max_new_tokens
    fitting = [prompt for prompt in prompts if 0 < len(prompt) <= room]
    if not fitting:
        raise ValueError(
            f"none of the {len(held_out)} held-out prompts leaves room for"
            f" {config.max_new_tokens} new tokens in the {target.max_positions} positions of"
            f" {target.name!r}; lower eval.max_new_tokens or hold out more"
        )
    return fitting[: config.prompts]


def batched(examples: list[Example], tokens: int) -> list[list[Example]]:
    """Divide conversations into batches of similar length and at most so many padded tokens.

    The longest come first: a batch that does not fit in memory fails at once.
    """
    lengths = [len(example.tokens) for example in examples]
    longest_first = sorted(range(len(examples)), key=lambda i: -lengths[i])
    return [[examples[i] for i in batch] for batch in budgeted(longest_first, lengths, tokens)]


def forward_tokens(config: TrainConfig) -> int:
    """Tokens of a teacher-forced forward: at most as many as a forward of training has."""
    loop = config.loop
    row = config.data.pack or config.data.max_length
    rows = (loop.micro_batch or loop.batch_size) * row
    return min(loop.micro_tokens or loop.batch_tokens or rows, TOKENS_AT_ONCE)


@torch.no_grad()
def try_evaluation(
    target: Target,
    head: DraftHead,
    objective: Objective,
    held_out: list[Example],
    config: EvalConfig,
    tokens: int = TOKENS_AT_ONCE,
) -> None:
    """Do the largest forward of an evaluation, and begin an answer to its longest prompt.

    What cannot be evaluated is then known before the first step. Every process calls this; the
    arguments are those of `evaluate`.
    """
    served = copy.deepcopy(head).to(target.device, target.dtype).eval()
    read = features_for(target, served)
    largest = batched(held_out[: config.conversations], tokens)[0]
    served(read(collate(largest), target.dtype), objective, min(RANKS, head.draft_vocab_size))
    longest = max(eval_prompts(target, held_out, config), key=len)
    if isinstance(target, ReplayTarget):
        target.learn([longest], FEWEST_NEW_TOKENS)
    _answers(target, served, TreeShape.chain(head.max_depth), [longest], FEWEST_NEW_TOKENS)


def features_for(target: Target, head: DraftHead) -> OnlineFeatures:
    """The features of held-out conversations, which a source has if the target has no blocks."""
    if isinstance(target, StoredReplay):
        return StoredFeatures(target.original, head, target.source)
    return OnlineFeatures(target, head)


@torch.no_grad()
def sums_of(
    target: Target, head: DraftHead, objective: Objective, batches: Sequence[list[Example]]
) -> list[Sums]:
    """Sum a head's losses and hits over each batch."""
    read = features_for(target, head)
    ranks = min(RANKS, head.draft_vocab_size)
    sums: list[Sums] = []
    with ProgressBar("accuracy, by conversations", sum(map(len, batches))) as bar:
        for examples in batches:
            features = read(collate(examples), target.dtype)
            # losses_K and counts_K: summed over the batch's positions, by depth. hits_KI: how often
            # the true token was the head's i-th best.
            output = head(features, objective, ranks)
            sums.append((output.losses_K.cpu(), output.counts_K.cpu(), output.hits_KI.cpu()))
            bar.update(bar.done + len(examples))
    return sums


def greedy_answers(
    target: Target,
    head: DraftHead,
    tree: TreePolicy,
    prompts: list[Tensor],
    new_tokens: int,
) -> GenerateOutput:
    """Answer prompts greedily with the head, as many at a time as memory should allow.

    With a `ReplayTarget`, prompts that it knows cost drafts alone.
    """
    # The target alone answers prompts that it does not know yet. BEYOND tokens past the answer's
    # end are there to verify the drafts of its last round.
    if isinstance(target, ReplayTarget) and (unknown := target.unknown(prompts, new_tokens)):
        with ProgressBar(
            "answers without drafts, by tokens", len(unknown) * (new_tokens + BEYOND)
        ) as bar:
            target.learn(unknown, new_tokens, [TokensShown(bar)])
    with ProgressBar("acceptance, by tokens", len(prompts) * new_tokens) as bar:
        return _answers(target, head, tree, prompts, new_tokens, [TokensShown(bar)])


def _answers(
    target: Target,
    head: DraftHead,
    tree: TreePolicy,
    prompts: list[Tensor],
    new_tokens: int,
    observers: Sequence[RoundObserver] = (),
) -> GenerateOutput:
    """`greedy_answers` to prompts that a `ReplayTarget` knows."""
    # No fallback to plain decoding where drafts do not pay: acceptance is what is measured. Not
    # compiled: the head's weights change before the next evaluation.
    lm = SpeculativeLM.from_pretrained(target, head=head, tree=tree, adaptive=False, compile=False)
    lm.observers += observers
    fitting = rows_at_once(target, prompts, new_tokens, tree.size, head)
    rows = min(fitting, max(1, NODES_AT_ONCE // tree.size))
    input_ids, mask = left_padded(prompts, target.device)
    return lm.generate(
        input_ids,
        attention_mask=mask,
        max_new_tokens=new_tokens,
        max_batch_size=rows,
        do_sample=False,
    )


class TokensShown(RoundObserver):
    """Shows in a progress bar how many tokens a generation has decoded."""

    def __init__(self, bar: ProgressBar) -> None:
        self.bar = bar
        self._call: DecodingCall

    def begin(self, call: DecodingCall) -> None:
        self._call = call

    def round(self, finished: Round) -> None:
        self.bar.update(self._call.sequences.tokens)


def prompt_of(example: Example) -> Tensor:
    """Return the tokens before the first answer."""
    return torch.tensor(example.prompt)
