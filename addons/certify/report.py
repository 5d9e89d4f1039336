"""The figures of a certificate, as a JSON value."""

from __future__ import annotations

import statistics
from typing import Any

from transformers import PreTrainedTokenizerBase

from ...heads.checkpoints.files import json_ready
from .certificate import ALPHA, POWER, Divergence, SamplingResult
from .engines import Asked
from .judging import Generated, Judgement, Weights


def report_of(
    judgement: Judgement,
    generated: Generated,
    weights: Weights,
    asked: Asked,
    engine: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase,
) -> dict[str, Any]:
    """All figures of a judgement, with its verdict and reasons; `engine` says what was judged."""
    greedy = judgement.greedy
    sampling = judgement.sampling
    reasons = [*greedy.reasons, *(sampling.reasons if sampling is not None else [])]
    if engine["lossy"]:
        reasons.insert(0, f"the engine calls itself lossy: {engine['lossy']}")
    reference = f"the target in {weights.dtype}"
    if weights.dtype not in ("float32", "float64"):
        reference = (
            f"the target's weights rounded to {weights.dtype}, as the engine has them, in float32"
            " arithmetic"
        )
    return json_ready(
        {
            "verdict": "not lossless" if reasons else greedy.verdict,
            "reasons": reasons,
            "engine": engine,
            "target": weights.provenance,
            "reference": reference,
            "greedy": _greedy_figures(judgement, tokenizer),
            "sampling": None if sampling is None else _sampling_figures(sampling, asked, tokenizer),
            "untested": generated.untested,
        }
    )


def _greedy_figures(judgement: Judgement, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Figures of the greedy answers for the report; prompts and tokens are counted from 1."""
    greedy = judgement.greedy

    def shown(divergence: Divergence) -> dict[str, Any]:
        return {
            "prompt": divergence.answer + 1,
            "token": divergence.position + 1,
            "chosen": str(tokenizer.decode([divergence.token])),
            "best": str(tokenizer.decode([divergence.best])),
            "margin": divergence.margin,
        }

    margins = sorted(divergence.margin for divergence in greedy.divergences)
    # By its own log-probabilities: how far the engine's tokens lie below its own best ones.
    own_margins: list[float] = []
    for answer in judgement.answers:
        own_margins += answer.own_margins or []
    differences = sorted(judgement.log_prob_differences)
    engine: dict[str, Any] = {"tokens_with_log_probs": len(differences)}
    if differences:
        engine["log_prob_difference"] = {
            "median": statistics.median(differences),
            "largest": differences[-1],
        }
    if own_margins:
        engine["tokens_that_it_calls_best"] = sum(margin <= 1e-6 for margin in own_margins)
        engine["tokens_with_a_best_one"] = len(own_margins)
    return {
        "verdict": greedy.verdict,
        "answers": greedy.answers,
        "exact_answers": greedy.exact_answers,
        "tokens": greedy.tokens,
        "not_best": len(greedy.divergences),
        "margins": margins,
        "tie": greedy.tie,
        "beyond_ties": len(greedy.unexplained),
        "first_divergences": [shown(divergence) for divergence in greedy.first_divergences],
        "unexplained": [shown(divergence) for divergence in greedy.unexplained[:20]],
        "rounding": greedy.rounding,
        "engine_tells": engine,
        "reasons": greedy.reasons,
    }


def _sampling_figures(
    sampling: SamplingResult, asked: Asked, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """Figures of the draws for the report; prompts and tokens are counted from 1."""
    positions = []
    for position, surprise in enumerate(sampling.surprise):
        # At most one test each of all prompts together: of the tokens' counts, and of the surprise.
        tests = [test for test in sampling.tests if test.position == position]
        together = [test for test in sampling.of_tokens(position) if test.prompt is None]
        surprising = [test for test in tests if test.kind == "surprise"]
        positions.append(
            {
                "token": position + 1,
                "draws": surprise.draws,
                "chi_square": together[0].statistic if together else None,
                "freedom": together[0].freedom if together else 0,
                "allowance": together[0].allowance if together else None,
                "p": together[0].p_value if together else None,
                "smallest_p_of_a_prompt": min(
                    (test.p_value for test in tests if test.prompt is not None), default=None
                ),
                "rejected": sum(test.rejected for test in tests),
                "nats_less_likely": surprise.mean,
                "p_of_the_surprise": surprising[0].p_value if surprising else None,
                "standard_error": surprise.standard_error,
                "detectable_everywhere": sampling.detectable_everywhere(position),
                "detectable_at_one_prompt": sampling.detectable_at_one_prompt(position),
            }
        )
    impossible = []
    for drawn in sampling.impossible[:20]:
        impossible.append(
            {
                "prompt": drawn.prompt + 1,
                "after": str(tokenizer.decode(list(drawn.path))),
                "token": str(tokenizer.decode([drawn.token])),
                "draws": drawn.draws,
            }
        )
    return {
        "lossless": sampling.lossless,
        "prompts": min(asked.sample_prompts, sampling.draws // max(asked.draws, 1)),
        "draws_of_each": asked.draws,
        "temperature": asked.temperature,
        "top_k": asked.top_k,
        "top_p": asked.top_p,
        "false_alarms": ALPHA,
        "power": POWER,
        "tests": len(sampling.tests),
        "positions": positions,
        "impossible": impossible,
        "impossible_draws": sum(drawn.draws for drawn in sampling.impossible),
        "reasons": sampling.reasons,
    }
