"""A head that follows a policy: it learns from the rollouts of a target whose weights are being trained.

    adapter = OnlineAdapter(lm)
    model.generate = functools.partial(model.generate, custom_generate=adapter)

Every call records its answers, and the head learns from them before the weights change again, so that the recorded
states, the embedding and the LM head are of the same policy. A copy of the head learns. It takes the place of the head
that drafts once it drafts better, beyond chance, along rollouts from which it has not learned. Tokens are the target's,
whichever head drafts.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..files import recorded_files
from ..heads.by_name import build_objective, head_name
from ..inference.feature_cache import MANIFEST, FeatureCache
from ..inference.models.as_loaded import as_loaded
from ..inference.models.loading import load_tokenizer
from ..inference.output import GenerateDictOutput, GenerateOutput
from ..inference.recorded_folder import recorded_rows
from ..inference.recording import MAX_LENGTH
from ..inference.speculative_lm import SpeculativeLM
from ..inference.tuning.tree_spec import TreeShape
from .data.batches import collate
from .data.chat_template import Example
from .evaluate import greedy_answers, prompt_of
from .features.online import CachedFeatures
from .features.stored import FolderStates, StoredReplay
from .judging import Comparison

SHORTEST = 2
"""Tokens of an answer, at least, along which heads can be compared."""
COMPARED = 8
"""Comparisons that decide together, at most: the rollouts of one step are few."""


@dataclass(frozen=True)
class Learned:
    """Figures of one recording from which a head has learned."""

    answers: int
    """Recorded answers, each text once."""
    loss: float
    """Mean loss of an answer token, summed over depths; NaN without an answer token."""
    comparison: Comparison | None
    """Acceptance of the head that drafted and of the copy, before it learned, over the newest comparisons; None
    if they were not compared."""
    swapped: bool
    """Whether the copy drafts from now on."""


class OnlineAdapter:
    """Adapts the head of a decoder to its target, whose weights change between the calls of `generate`.

    It is a decoding method for `model.generate(custom_generate=...)` of the decoder's own model.
    """

    def __init__(
        self,
        lm: SpeculativeLM,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        lr: float = 2e-4,
        epochs: int = 1,
        batch_size: int = 8,
        learn_every: int = 1,
        judge_every: int = 4,
        max_length: int = MAX_LENGTH,
        generator: torch.Generator | None = None,
        seed: int = 0,
    ) -> None:
        """Copy the decoder's head; nothing is recorded before the first call.

        Args:
            lm: a decoder with a head.
            tokenizer: the target's; loaded if the target has a name.
            lr: learning rate of AdamW, which keeps its means from one recording to the next.
            epochs: times that the head learns from each answer.
            batch_size: answers of an optimizer step.
            learn_every: calls of which one is recorded and learned from.
            judge_every: recordings of which one is used to compare the copy with the head that drafts; the newest
                comparisons decide together.
            max_length: tokens of a prompt and its answer that are learned from, the first ones.
            generator: source of randomness of the rollouts; None for torch's global one, which learning leaves as it
                was.
            seed: of what a head draws while it learns.

        Raises:
            ValueError: a decoder without a head, or numbers that are too small.
        """
        numbers = {"epochs": epochs, "batch_size": batch_size, "learn_every": learn_every, "judge_every": judge_every}
        for name, number in numbers.items():
            if number < 1:
                raise ValueError(f"{name} must be at least 1, not {number}")
        if lr <= 0:
            raise ValueError(f"lr must be above 0, not {lr}")
        if lm.head is None:
            raise ValueError(
                "a decoder without a head has none to adapt: SpeculativeLM.from_pretrained(target, head=...)"
            )
        self.lm = lm
        self.tokenizer = tokenizer or load_tokenizer(lm.target.name)
        self.epochs = epochs
        self.batch_size = batch_size
        self.learn_every = learn_every
        self.judge_every = judge_every
        self.max_length = max_length
        self.seed = seed
        self.dtype = torch.promote_types(lm.target.dtype, torch.float32)
        """Of the copy's weights."""
        self.head = copy.deepcopy(lm.head).to(self.dtype).train().requires_grad_(True)
        """The copy that learns."""
        self.objective = build_objective(head_name(self.head), dataclasses.asdict(self.head.config), {})
        self.optimizer = torch.optim.AdamW(self.head.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
        self.history: list[Learned] = []
        """What was learned from each recording."""
        self._comparisons: deque[Comparison] = deque(maxlen=COMPARED)
        """The newest ones with the head that drafts."""
        self._calls = 0
        self._decode = lm.custom_generate(generator)

    def __call__(
        self, model: PreTrainedModel, *args: Any, **inputs: Any
    ) -> Tensor | GenerateOutput | GenerateDictOutput:
        """Decode what `model.generate` has prepared, and learn from it."""
        self._calls += 1
        if self._calls % self.learn_every:
            return self._decode(model, *args, **inputs)
        with TemporaryDirectory(prefix="headstart-rollouts-") as folder:
            options: dict[str, Any] = {
                "tokenizer": self.tokenizer,
                # As exact as the target's states.
                "format": "bfloat16" if self.lm.target.dtype == torch.bfloat16 else "float32",
                "max_length": self.max_length,
            }
            with self.lm.record(folder, **options) as recording:
                output = self._decode(model, *args, **inputs)
            if recording.written:
                self.learn(folder)
        return output

    def learn(self, folder: str | Path) -> Learned:
        """Learn from a recording of the target as it is now, and draft with the copy if that is better.

        Raises:
            ValueError: a folder without answers, or a recording of other weights.
        """
        target = self.lm.target
        cache = self._cache(Path(folder))
        examples = [Example.of_row(row) for row in recorded_rows(recorded_files(folder))]
        if not examples:
            raise ValueError(f"no recorded answers in {str(folder)!r}")
        number = len(self.history)
        comparison = None
        swapped = False
        devices = [target.device] if target.device.type == "cuda" else []
        with (
            torch.inference_mode(False),
            torch.random.fork_rng(devices),  # a seed gives the same rollouts with and without adapting
            target.lock,
            as_loaded(target.model),
        ):
            torch.manual_seed(self.seed + number)
            if number > 0 and number % self.judge_every == 0:
                candidate = copy.deepcopy(self.head).to(target.dtype).eval().requires_grad_(False)
                newest = self._compare(cache, examples, candidate)
                chain = TreeShape.chain(candidate.max_depth)
                if newest is not None:
                    self._comparisons.append(newest)
                    comparison = Comparison.merged("rollouts", self._comparisons, [chain])
                if comparison is not None and comparison.better(chain):
                    self.lm.swap_head(candidate)
                    self._comparisons.clear()
                    swapped = True
            loss = self._train(CachedFeatures(target, self.head, cache), examples)
        learned = Learned(len(examples), loss, comparison, swapped)
        self.history.append(learned)
        return learned

    def _cache(self, folder: Path) -> FeatureCache:
        """The states of a recording; a ValueError if they are not those of the target's weights."""
        manifest = folder / MANIFEST
        if not manifest.exists():
            raise ValueError(f"no recorded answers in {str(folder)!r}; `lm.record(folder)` writes them")
        recorded = json.loads(manifest.read_text(encoding="utf-8"))
        now = self.lm.target.current_provenance()["weights"]
        if recorded["weights"] != now:
            raise ValueError(
                f"{str(folder)!r} was recorded with weights {recorded['weights']}, and the target has {now} now: learn "
                "from a recording before the weights change, or record the new ones in a folder of their own"
            )
        return FeatureCache(folder, recorded)

    def _compare(self, cache: FeatureCache, examples: list[Example], candidate: Any) -> Comparison | None:
        """Let both heads draft along recorded answers; None if they are too short for that."""
        target = self.lm.target
        longest = max(len(example.tokens) - len(example.prompt) for example in examples)
        whole = []
        for example in examples:
            if len(example.tokens) - len(example.prompt) == longest or example.tokens[-1] in target.end_tokens:
                whole.append(example)
        answered, new_tokens = distinct(whole, longest)
        if new_tokens < SHORTEST:
            return None
        tree = TreeShape.chain(candidate.max_depth)
        serving = self.lm.head
        assert serving is not None
        prompts = [prompt_of(example) for example in answered]
        replay = StoredReplay(target, FolderStates(cache, target.max_positions), answered)
        old = greedy_answers(replay, serving, tree, prompts, new_tokens).stats
        new = greedy_answers(replay, candidate, tree, prompts, new_tokens).stats
        return Comparison("rollouts", {tree: old}, {tree: new})

    def _train(self, features: CachedFeatures, examples: list[Example]) -> float:
        """Make the optimizer steps of a recording; return the mean loss of an answer token."""
        target = self.lm.target
        parameters = [parameter for parameter in self.head.parameters() if parameter.requires_grad]
        short = target.dtype.itemsize < torch.float32.itemsize
        total = 0.0
        tokens = 0
        for start in [*range(0, len(examples), self.batch_size)] * self.epochs:
            batch = collate(examples[start : start + self.batch_size])
            answer_tokens = int(batch.loss_mask_BT.sum())
            with torch.enable_grad(), torch.autocast(target.device.type, target.dtype, enabled=short):
                output = self.head(features(batch, self.dtype), self.objective)
                loss = output.loss / max(answer_tokens, 1)
            # Only with regard to the head: the policy's embedding and LM head, by which the loss is computed, collect
            # gradients of their own.
            loss.backward(inputs=parameters)
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            total += float(output.loss.detach())  # sync: once a step, after the target has been read
            tokens += answer_tokens
        return total / tokens if tokens else float("nan")


def distinct(examples: list[Example], longest: int) -> tuple[list[Example], int]:
    """Answers with prompts that differ, as a replay knows one answer to a prompt, and the tokens to answer each with.

    As many of the first tokens of every answer go to its prompt as it takes; an answer that is no longer is left out.

    Args:
        examples: answers, of which several may be to one prompt.
        longest: tokens of the longest answer.
    """
    for first in range(longest):
        found = []
        for example in examples:
            begin = len(example.prompt) + first
            if len(example.tokens) > begin:
                found.append(Example(example.tokens, [False] * begin + example.loss_mask[begin:]))
        if len({tuple(example.prompt) for example in found}) == len(found):
            return found, longest - first
    return [], 0
