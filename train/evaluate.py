"""How good a head is: teacher-forced accuracy by rank, and real acceptance through the decoder itself.

Several processes share out the conversations and the prompts, and each gets all results, in the order of one process.
A target that is cut over the processes gathers its blocks in every forward, which all of them must take part in: there
each process evaluates everything.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from ..heads import DraftHead
from ..inference import GenerateOutput, SpeculativeLM, Stats, Target, TreePolicy, TreeShape, tree_word
from ..inference.tuning.tree_search import best_static_tree, default_dynamic_tree
from .config import EvalConfig
from .console import ProgressBar, StopRequest
from .data.batches import collate
from .data.chat_template import Example
from .engines import shared_out
from .features.online import online_features
from .features.placement import cut_over_processes

RANKS = 10
"""How many of a head's best tokens are counted; a node of a calibrated tree has at most so many children."""


@dataclass(frozen=True)
class Evaluation:
    """What one evaluation found."""

    loss_K: list[float]
    """Teacher-forced loss per depth, in nats per token."""
    accuracy_KI: list[list[float]]
    """At each depth, how often the true token is the head's i-th best."""
    policies: dict[str, TreePolicy]
    """A chain as deep as the head, the best static tree for these accuracies, and a dynamic one of the same size."""
    trees: dict[str, Stats]
    """Real greedy acceptance on held-out prompts with each of them."""

    @property
    def best(self) -> str:
        """The tree with the longest acceptance."""
        return max(self.trees, key=lambda name: self.trees[name].acceptance_length)

    @property
    def acceptance_length(self) -> float:
        """With that tree: what the best checkpoint is chosen by."""
        return self.trees[self.best].acceptance_length

    @property
    def tree(self) -> str | list[list[int]]:
        """That tree, as a checkpoint holds it."""
        return tree_word(self.policies[self.best])

    def measured(self, config: EvalConfig) -> dict[str, Any]:
        """For a checkpoint and its model card."""
        return {
            "prompts": len(self.trees["chain"].rows),
            "new_tokens": config.new_tokens,
            "accuracy": self.accuracy_KI,
            "trees": {
                name: {"nodes": self.policies[name].size, **summary(stats)} for name, stats in self.trees.items()
            },
        }


def evaluate(
    target: Target,
    head: DraftHead,
    held_out: list[Example],
    config: EvalConfig,
    accelerator: Accelerator | None = None,
    stop: StopRequest | None = None,
) -> Evaluation:
    """Measure a head on conversations that it was not trained on.

    The head is copied to the target's dtype first: that is how it will be used.

    Args:
        target: the frozen model.
        head: the same on every process.
        held_out: the same on every process.
        config: how much is measured.
        accelerator: of the processes that share out the work; None for this one alone.
        stop: Ctrl-C and SIGTERM, which end the evaluation.

    Raises:
        Stopped: on every process, if one of them was stopped.
    """
    served = copy.deepcopy(head).to(target.dtype).eval()

    def shared(items: Sequence[Any], work: Callable[[Sequence[Any], Callable[[], None]], list[Any]]) -> list[Any]:
        if accelerator is None or stop is None:
            return work(items, _nothing)
        return shared_out(accelerator, items, work, stop, together=cut_over_processes(target))

    def answered(policy: TreePolicy) -> Stats:
        def work(part: Sequence[Tensor], between: Callable[[], None]) -> list[Stats]:
            return [real_acceptance(target, served, policy, list(part), config.new_tokens, between)] if part else []

        return Stats.merged(shared(prompts, work))

    batches, prompts = in_batches(held_out[: config.conversations]), eval_prompts(target, held_out, config)
    sums = shared(batches, lambda part, between: sums_of(target, served, part, between))
    loss_K, accuracy_KI = means(sums, head.max_depth)
    policies: dict[str, TreePolicy] = {
        "chain": TreeShape.chain(len(accuracy_KI)),
        "static": best_static_tree(accuracy_KI, config.nodes),
        "dynamic": default_dynamic_tree(head.max_depth, config.nodes),
    }
    trees = {name: answered(policy) for name, policy in policies.items()}
    return Evaluation(loss_K, accuracy_KI, policies, trees)


def eval_prompts(target: Target, held_out: list[Example], config: EvalConfig) -> list[Tensor]:
    """The first held-out prompts that leave room for an answer.

    Raises:
        ValueError: none does.
    """
    prompts = [prompt_of(example) for example in held_out]
    fitting = [prompt for prompt in prompts if 0 < len(prompt) <= target.max_positions - config.new_tokens]
    if not fitting:
        raise ValueError(
            f"none of the {len(held_out)} held-out prompts leaves room for {config.new_tokens} new tokens in the "
            f"{target.max_positions} positions of {target.name!r}; lower eval.new_tokens or hold out more"
        )
    return fitting[: config.prompts]


Sums = tuple[Tensor, Tensor, Tensor]
"""Of a batch: losses_K, counts_K and hits_KI, on the CPU."""


def _nothing() -> None:
    """Between two forwards of a process by itself."""


def in_batches(examples: list[Example], batch_size: int = 8) -> list[list[Example]]:
    """The conversations of every teacher-forced forward."""
    return [examples[start : start + batch_size] for start in range(0, len(examples), batch_size)]


def teacher_forced(
    target: Target, head: DraftHead, examples: list[Example], batch_size: int = 8
) -> tuple[list[float], list[list[float]]]:
    """Loss per depth, and accuracy per depth and rank, over conversations."""
    return means(sums_of(target, head, in_batches(examples, batch_size)), head.max_depth)


@torch.no_grad()
def sums_of(
    target: Target, head: DraftHead, batches: Sequence[list[Example]], between: Callable[[], None] = _nothing
) -> list[Sums]:
    """What a head got right in each of some batches; `between` is called before each."""
    ranks, sums = min(RANKS, head.draft_vocab_size), []
    with ProgressBar("accuracy, by conversations", sum(map(len, batches))) as bar:
        for examples in batches:
            between()
            output = head(online_features(target, head, collate(examples), target.dtype), ranks=ranks)
            sums.append((output.losses_K.cpu(), output.counts_K.cpu(), output.hits_KI.cpu()))
            bar.update(bar.done + len(examples))
    return sums


def means(sums: list[Sums], max_depth: int) -> tuple[list[float], list[list[float]]]:
    """Loss per depth, and accuracy per depth and rank, of batches; those of short conversations have fewer depths."""
    losses, counts = torch.zeros(2, max_depth)
    hits = torch.zeros(max_depth, sums[0][2].shape[1])
    for losses_K, counts_K, hits_KI in sums:
        depths = len(counts_K)
        losses[:depths] += losses_K
        counts[:depths] += counts_K
        hits[:depths] += hits_KI
    counts = counts.clamp(min=1)
    return (losses / counts).tolist(), (hits / counts[:, None]).tolist()


def real_acceptance(
    target: Target,
    head: DraftHead,
    tree: TreePolicy,
    prompts: list[Tensor],
    new_tokens: int,
    between: Callable[[], None] = _nothing,
) -> Stats:
    """What rounds did while the head answered prompts greedily; `between` is called after each round."""
    return greedy_answers(target, head, tree, prompts, new_tokens, between).stats


def greedy_answers(
    target: Target,
    head: DraftHead,
    tree: TreePolicy,
    prompts: list[Tensor],
    new_tokens: int,
    between: Callable[[], None] = _nothing,
) -> GenerateOutput:
    """Answer prompts greedily with the head, all in one batch, padded on the left."""
    # Not compiled: the head goes on learning.
    lm = SpeculativeLM.from_pretrained(target, head=head, tree=tree, fallback=False, compile=False)
    input_ids = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True, padding_side="left").to(target.device)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=target.device)
    mask = torch.arange(input_ids.shape[1], device=target.device) >= input_ids.shape[1] - lengths[:, None]
    with ProgressBar("acceptance, by tokens", len(prompts) * new_tokens) as bar:
        lm.round_callbacks += [lambda out: bar.update(out.tokens), lambda _: between()]
        return lm.generate(input_ids, attention_mask=mask.long(), max_new_tokens=new_tokens, do_sample=False)


def prompt_of(example: Example) -> Tensor:
    """The tokens before the first answer."""
    return torch.tensor(example.tokens[: example.loss_mask.index(True)])


def summary(stats: Stats) -> dict[str, Any]:
    """Acceptance statistics as plain numbers."""
    return {
        "acceptance_length": stats.acceptance_length,
        "interval": list(stats.acceptance_length_interval),
        "acceptance_rate_by_depth": stats.acceptance_rate_by_depth,
        "rounds": stats.rounds,
        "plain_rounds": stats.plain_rounds,
    }
