"""How good a head is: teacher-forced accuracy by rank, and real acceptance through the decoder itself."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..heads import DraftHead
from ..inference import GenerateOutput, SpeculativeLM, Stats, Target, TreePolicy, TreeShape, tree_word
from ..inference.machine import turns
from ..inference.planning import best_static_tree, default_dynamic_tree
from .config import EvalConfig
from .console import ProgressBar
from .data import Example, collate
from .features import online_features

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


def evaluate(target: Target, head: DraftHead, held_out: list[Example], config: EvalConfig) -> Evaluation:
    """Measure a head on conversations that it was not trained on.

    The head is copied to the target's dtype first: that is how it will be used.
    """
    served = copy.deepcopy(head).to(target.dtype).eval()
    loss_K, accuracy_KI = teacher_forced(target, served, held_out[: config.conversations])
    policies: dict[str, TreePolicy] = {
        "chain": TreeShape.chain(len(accuracy_KI)),
        "static": best_static_tree(accuracy_KI, config.nodes),
        "dynamic": default_dynamic_tree(head.max_depth, config.nodes),
    }
    prompts = eval_prompts(target, held_out, config)
    trees = {
        name: real_acceptance(target, served, policy, prompts, config.new_tokens) for name, policy in policies.items()
    }
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


@torch.no_grad()
def teacher_forced(
    target: Target, head: DraftHead, examples: list[Example], batch_size: int = 8
) -> tuple[list[float], list[list[float]]]:
    """Loss per depth, and accuracy per depth and rank, over conversations."""
    ranks = min(RANKS, head.draft_vocab_size)
    losses, counts = torch.zeros(2, head.max_depth)
    hits = torch.zeros(head.max_depth, ranks)
    with ProgressBar("accuracy, by conversations", len(examples)) as bar:
        for start in range(0, len(examples), batch_size):
            batch = collate(examples[start : start + batch_size])
            output = head(online_features(target, head, batch, target.dtype), ranks=ranks)
            depths = len(output.counts_K)
            losses[:depths] += output.losses_K.cpu()
            counts[:depths] += output.counts_K.cpu()
            hits[:depths] += output.hits_KI.cpu()
            bar.update(min(start + batch_size, len(examples)))
    counts = counts.clamp(min=1)
    return (losses / counts).tolist(), (hits / counts[:, None]).tolist()


def real_acceptance(target: Target, head: DraftHead, tree: TreePolicy, prompts: list[Tensor], new_tokens: int) -> Stats:
    """What rounds did while the head answered prompts greedily."""
    return greedy_answers(target, head, tree, prompts, new_tokens).stats


def greedy_answers(
    target: Target, head: DraftHead, tree: TreePolicy, prompts: list[Tensor], new_tokens: int
) -> GenerateOutput:
    """Answer prompts greedily with the head, all in one batch, padded on the left."""
    # Not compiled: the head goes on learning.
    lm = SpeculativeLM.from_pretrained(target, head=head, tree=tree, fallback=False, compile=False)
    input_ids = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True, padding_side="left").to(target.device)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=target.device)
    mask = torch.arange(input_ids.shape[1], device=target.device) >= input_ids.shape[1] - lengths[:, None]
    with ProgressBar("acceptance, by tokens", len(prompts) * new_tokens) as bar:
        lm.round_listeners.append(lambda out: bar.update(out.tokens))
        return lm.generate(input_ids, attention_mask=mask.long(), max_new_tokens=new_tokens, do_sample=False)


Key = TypeVar("Key")


def in_turns(engines: Mapping[Key, SpeculativeLM], prompts: list[Tensor], settings: dict[str, Any]) -> dict[Key, Stats]:
    """Answer each prompt with every engine before the next, so that a machine whose speed drifts treats them alike.

    Args:
        engines: any names to engines; each answers the first prompt once more before, to be warm and compiled.
        prompts: token ids, each [1, time].
        settings: of `generate`.
    """
    found: dict[Key, list[Stats]] = {name: [] for name in engines}
    with ProgressBar("answers", len(engines) * (1 + len(prompts))) as bar:
        for lm in engines.values():
            lm.generate(prompts[0], **settings)
            bar.update(bar.done + 1)
        for number, ids in enumerate(prompts):
            for name in turns(list(engines), number):
                found[name].append(engines[name].generate(ids, **settings).stats)
                bar.update(bar.done + 1)
    return {name: Stats.merged(parts) for name, parts in found.items()}


def prompt_of(example: Example) -> Tensor:
    """The tokens before the first answer."""
    return torch.tensor(example.tokens[: example.loss_mask.index(True)])


def answer_settings(new_tokens: int, temperature: float) -> dict[str, Any]:
    """How `generate` is asked for an answer that is compared: greedy, or from the whole distribution."""
    if temperature == 0:
        return {"max_new_tokens": new_tokens, "do_sample": False}
    return {"max_new_tokens": new_tokens, "do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}


def summary(stats: Stats) -> dict[str, Any]:
    """Acceptance statistics as plain numbers."""
    return {
        "acceptance_length": stats.acceptance_length,
        "interval": list(stats.acceptance_length_interval),
        "acceptance_rate_by_depth": stats.acceptance_rate_by_depth,
        "rounds": stats.rounds,
        "plain_rounds": stats.plain_rounds,
    }
