"""The judgement: the target rereads an engine's output in the engine's dtype and in float32.

The reading in the engine's dtype measures rounding.
"""

from __future__ import annotations

import dataclasses
import gc
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ...console import counted
from ...heads.base import dtype_name
from .certificate import (
    BestScores,
    GreedyResult,
    NextToken,
    SamplingResult,
    TokenPath,
    judge_answer,
    judge_greedy,
    judge_sampling,
)
from .engines import IDS_BY, Answer, Asked, Engine, Prompt
from .reference import (
    greedy_processors,
    next_tokens,
    one_token_scores,
    processed,
    sampling_processors,
    whole_logits,
)


@dataclass(frozen=True)
class Generated:
    """All that an engine generated."""

    answers: list[Answer]
    rows: list[list[TokenPath]]
    """Continuations of the sampled prompts."""
    untested: list[str]
    """What could not be asked of the engine."""


@dataclass(frozen=True)
class Weights:
    """The judging target: its model in the engine's dtype, without what an engine adds to it."""

    model: Any
    end_tokens: frozenset[int]
    provenance: dict[str, Any]

    @property
    def dtype(self) -> str:
        """The dtype in which the engine computes, as its provenance states it."""
        return str(self.provenance["dtype"])


def generate_all(engine: Engine, prompts: list[Prompt], asked: Asked) -> Generated:
    """The engine's greedy answers to all prompts, and its continuations of the first ones."""
    answers = [engine.greedy(prompt) for prompt in counted(prompts, "greedy answers")]
    if not asked.draws:
        return Generated(answers, [], ["sampling: no draws were asked for"])
    rows: list[list[TokenPath]] = []
    for prompt in counted(prompts[: asked.sample_prompts], "sampled prompts"):
        drawn = engine.draws(prompt, asked.draws)
        if drawn is None:
            reason = (
                "sampling: the server gives neither token ids nor log-probabilities, and the tokens"
                " of a text are not known for certain"
            )
            return Generated(answers, [], [reason])
        rows.append(drawn)
    return Generated(answers, rows, [])


@dataclass(frozen=True)
class Judgement:
    """Both parts of it, and what servers tell of themselves."""

    greedy: GreedyResult
    sampling: SamplingResult | None
    answers: list[Answer]
    log_prob_differences: list[float]
    """Between the engine's own log-probabilities of its tokens and the reference's, where the
    engine gives them."""


def judge(
    prompts: list[Prompt],
    generated: Generated,
    weights: Weights,
    asked: Asked,
    tokenizer: PreTrainedTokenizerBase,
) -> Judgement:
    """Read all that was generated twice: in the engine's dtype, for its rounding, and in float32.

    The same weights are converted in between, so that the model is held once.
    """
    gc.collect()  # frees the engine's memory
    model = weights.model
    greedily = greedy_processors(asked.repetition_penalty)
    warped = sampling_processors(
        asked.temperature or 1.0, asked.top_k, asked.top_p, asked.repetition_penalty
    )
    sampled = list(zip(prompts, generated.rows, strict=False))
    answered = list(zip(prompts, generated.answers, strict=True))

    # 1. In the engine's dtype, token by token, as an engine without drafts would read.
    answers: list[Answer] = []
    rounded: list[BestScores] = []
    for prompt, answer in counted(answered, f"answers read token by token in {weights.dtype}"):
        by_text = tokenizer if answer.ids_by == IDS_BY[-1] else None
        tokens, scores = one_token_scores(model, prompt.ids, answer.tokens, greedily, by_text)
        answers.append(dataclasses.replace(answer, tokens=tokens))
        rounded.append(scores)
    rounded_next: list[dict[TokenPath, NextToken]] = []
    for prompt, rows in counted(sampled, f"continuations read in {weights.dtype}"):
        rounded_next.append(next_tokens(model, prompt.ids, rows, warped, asked.sample_tokens))

    # 2. The greedy answers in at least float32, each in one forward.
    exact = torch.promote_types(getattr(torch, weights.dtype), torch.float32)
    model.to(exact)
    judged = []
    differences: list[float] = []
    for index, prompt in enumerate(counted(prompts, f"answers judged in {dtype_name(exact)}")):
        answer = answers[index]
        logits_TV = whole_logits(model, prompt.ids, answer.tokens).to(exact)
        text_T = torch.tensor([*prompt.ids, *answer.tokens[:-1]], device=logits_TV.device)
        scores_TV = processed(greedily, text_T, logits_TV)
        # The engine stopped and did not say at which end token: the likeliest of them.
        if answer.end_added:
            end = max(weights.end_tokens, key=lambda token: float(scores_TV[-1, token]))
            answer = dataclasses.replace(answer, tokens=[*answer.tokens[:-1], end])
            answers[index] = answer
        judged.append(
            judge_answer(
                answer.tokens,
                scores_TV,
                logits_TV,
                rounded[index],
                weights.end_tokens,
                asked.new_tokens,
            )
        )
        # Before the logits processors, as vLLM reports them by default.
        if answer.log_probs is not None and len(answer.log_probs) == len(answer.tokens):
            chosen_T1 = torch.tensor(answer.tokens, device=logits_TV.device)[:, None]
            log_probs = logits_TV.log_softmax(-1).gather(1, chosen_T1)[:, 0].tolist()
            for target_value, engine_value in zip(log_probs, answer.log_probs, strict=True):
                differences.append(abs(target_value - engine_value))
    greedy = judge_greedy(judged)
    if not sampled:
        return Judgement(greedy, None, answers, differences)
    # 3. The sampled continuations.
    exact_next: list[dict[TokenPath, NextToken]] = []
    for prompt, rows in counted(sampled, f"continuations judged in {dtype_name(exact)}"):
        exact_next.append(next_tokens(model, prompt.ids, rows, warped, asked.sample_tokens))
    sampling = judge_sampling(generated.rows, exact_next, rounded_next, asked.sample_tokens)
    return Judgement(greedy, sampling, answers, differences)
