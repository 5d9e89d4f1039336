"""Certify that an engine is lossless: `headstart certify --target MODEL --head HEAD --prompts FILE.jsonl`.

The engine is headstart with a head or a drafter, transformers' own `generate` (with neither;
`--assistant MODEL` for its assisted decoding), or an OpenAI-compatible server (`--server URL
--model NAME --dtype DTYPE`). It answers greedily, and draws short continuations; then the target
judges both in float32 (`inference/certificate.py`).

The exit status is 0 if the answers are identical, or identical up to ties that rounding explains, 1
if the engine is not lossless, 2 if it could not be judged, and 130 after Ctrl-C.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from headstart.console import console, counted, log
from headstart.scripts.command_line import SamplingOptions, options

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from headstart.inference import Target
    from headstart.inference.certificate import BestScores, GreedyResult, NextToken, SamplingResult
    from headstart.scripts.measuring.engines import Answer, Asked, Engine, Prompt


@dataclass(frozen=True)
class CertifyConfig(SamplingOptions):
    """An engine, and the prompts by which it is judged."""

    required = ("target", "prompts")
    most_used = ("target", "head", "prompts", "server", "output")
    minimum: ClassVar[dict[str, float]] = {
        "limit": 1,
        "max_new_tokens": 1,
        "samples": 0,
        "sample_prompts": 1,
        "sample_tokens": 1,
        "temperature": 0,
        "top_k": 0,
        "repetition_penalty": 0.01,
    }

    prompts: list[str] = field(default_factory=list)
    """JSONL files of prompts."""
    limit: int | None = None
    """Use only the first prompts of each file; null for all."""
    engine: Literal["auto", "headstart", "transformers", "server"] = "auto"
    """What generates; auto is a server if one is given, headstart with a head or a drafter, else
    transformers."""
    assistant: str | None = None
    """A smaller model, for the assisted decoding of transformers' generate."""
    server: str | None = None
    """URL of an OpenAI-compatible server of the target (vLLM, SGLang, llama.cpp:
    http://HOST:8000/v1). Its key is read from OPENAI_API_KEY; passwords and queries in the URL are
    sent and shown nowhere."""
    model: str | None = None
    """The target's name on the server."""
    endpoint: Literal["completions", "chat"] = "completions"
    """The server's endpoint: completions takes the prompts' token ids, chat renders the messages
    itself."""
    max_new_tokens: int = 64
    """Tokens of each greedy answer."""
    temperature: float = 1.0
    """Temperature of the draws; 0 for greedy answers alone."""
    samples: int = 200
    """Continuations drawn after each sampled prompt; 0 for greedy answers alone."""
    sample_prompts: int = 8
    """Number of prompts, the first ones, after which continuations are drawn."""
    sample_tokens: int = 4
    """Tokens of each continuation; those after the first come from drafts."""
    repetition_penalty: float = 1.0
    """Penalty of tokens that the text has, greedily and in draws; 1 for none."""
    seed: int = 0
    """Seed of the draws; a server takes its own where it is 0."""
    fallback: bool = False
    """Let headstart decode plainly where drafts cost more time than they save; false to draft in
    every round."""
    output: str | None = None
    """JSON file for all figures; a page for reading is written beside it, with the suffix .md."""

    def __post_init__(self) -> None:
        super().__post_init__()
        from headstart.inference.verify import choose_rule

        kind = self.engine_kind
        if kind == "server":
            self._check_server()
        elif self.model or self.server:
            raise ValueError(f"server and model were given for the engine {kind!r}; leave them out, or choose 'server'")
        drafts = [name for name in ("head", "drafter") if getattr(self, name)]
        if kind != "headstart" and drafts:
            raise ValueError(f"{drafts[0]} was given for the engine {kind!r}; only headstart takes one")
        if kind != "transformers" and self.assistant:
            raise ValueError(f"assistant was given for the engine {kind!r}; only transformers takes one")
        if self.acceptance != "auto":
            if kind != "headstart":
                raise ValueError(f"acceptance was given for the engine {kind!r}; only headstart takes one")
            choose_rule(self.acceptance, "sampled_chain", self.lossy)  # every rule fits a sampled chain
        if self.output and Path(self.output).suffix != ".json":
            raise ValueError(f"output must end in .json, not {self.output!r}; the page is written beside it as .md")

    def _check_server(self) -> None:
        from headstart.scripts.measuring.engines import Address

        if not self.server or not self.model:
            raise ValueError("a server needs both its URL (server) and the target's name there (model)")
        Address.of(self.server)
        if self.dtype in ("fastest", "auto"):
            raise ValueError(
                f"dtype {self.dtype!r} cannot be resolved for a server: say in which one it computes (float32, "
                "bfloat16, float16), as rounding is judged by it"
            )

    @property
    def engine_kind(self) -> str:
        """The engine, with "auto" resolved."""
        if self.engine != "auto":
            return self.engine
        if self.server:
            return "server"
        return "headstart" if self.head or self.drafter else "transformers"

    @property
    def draws(self) -> int:
        """Continuations of each sampled prompt."""
        return 0 if self.temperature == 0 else self.samples


@dataclass(frozen=True)
class Generated:
    """All that an engine generated."""

    answers: list[Answer]
    rows: list[list[tuple[int, ...]]]
    """Continuations of the sampled prompts."""
    untested: list[str]
    """What could not be asked of the engine."""


@dataclass(frozen=True)
class Weights:
    """The target as it judges: its model in the engine's dtype, without what an engine adds to it."""

    model: Any
    end_tokens: frozenset[int]
    provenance: dict[str, Any]

    @classmethod
    def of(cls, target: Target) -> Weights:
        """Those of a target."""
        return cls(target.model, target.end_tokens, target.provenance)

    @property
    def dtype(self) -> str:
        """The engine's dtype."""
        return str(self.provenance["dtype"])


def main(arguments: list[str]) -> None:
    """Run `headstart certify` with these command-line arguments."""
    report = certify(options(CertifyConfig, "certify", __doc__, arguments))
    if report is not None and report["verdict"] == "not lossless":
        sys.exit(1)


def certify(config: CertifyConfig) -> dict[str, Any]:
    """Let the engine generate, judge it, print and write the report, and return it."""
    from headstart.files import write_whole
    from headstart.heads.checkpoints.files import json_ready
    from headstart.inference.chat_template import load_chat_tokenizer, prompt_ids
    from headstart.inference.provenance import provenance
    from headstart.scripts.measuring.certificate_page import page, summary
    from headstart.scripts.measuring.comparison import read_prompt_files
    from headstart.scripts.measuring.engines import Prompt

    read = read_prompt_files(config.prompts, config.limit)
    tokenizer = load_chat_tokenizer(config.target)
    prompts = []
    for rows in read.values():
        for messages in rows:
            prompts.append(Prompt(messages, prompt_ids(tokenizer, messages, config.thinking)[0].tolist()))
    generated, weights, about = _generate(config, prompts, tokenizer)
    judgement = _judge(config, prompts, generated, weights, tokenizer)
    greedy = judgement.greedy
    sampling = judgement.sampling
    reasons = [*greedy.reasons, *(sampling.reasons if sampling is not None else [])]
    if about["lossy"]:
        reasons.insert(0, f"the engine calls itself lossy: {about['lossy']}")
    report: dict[str, Any] = json_ready(
        {
            "verdict": "not lossless" if reasons else greedy.verdict,
            "reasons": reasons,
            "engine": about,
            "target": weights.provenance,
            "reference": _reference_words(weights.dtype),
            "prompts": {"files": config.prompts, "count": len(prompts)},
            "greedy": _greedy_figures(judgement, tokenizer),
            "sampling": None if sampling is None else _sampling_figures(sampling, config, tokenizer),
            "untested": generated.untested,
            "options": _shown_options(config),
            **provenance(),
        }
    )
    for line in summary(report):
        console.print(line, markup=False, highlight=False)
    if config.output:
        path = Path(config.output)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(report, indent=2) + "\n")
        write_whole(path.with_suffix(".md"), page(report))
        log.info(f"written: {path}, {path.with_suffix('.md')}")
    return report


def _shown_options(config: CertifyConfig) -> dict[str, Any]:
    """The options, without what a server's URL holds beside its address."""
    from headstart.scripts.measuring.engines import Address

    shown = dataclasses.asdict(config)
    if config.server:
        shown["server"] = Address.of(config.server).base
    return shown


def _reference_words(dtype: str) -> str:
    if dtype in ("float32", "float64"):
        return f"the target in {dtype}"
    return f"the target's weights rounded to {dtype}, as the engine has them, in float32 arithmetic"


def _generate(
    config: CertifyConfig, prompts: list[Prompt], tokenizer: PreTrainedTokenizerBase
) -> tuple[Generated, Weights, dict[str, Any]]:
    """Let the engine generate; return that, the target's weights, and the report's lines about the engine."""
    from headstart.scripts.measuring.engines import Asked

    asked = Asked(
        new_tokens=config.max_new_tokens,
        repetition_penalty=config.repetition_penalty,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        sample_tokens=config.sample_tokens,
        seed=config.seed,
    )
    if config.engine_kind == "server":
        return _by_server(config, asked, prompts, tokenizer)
    _check_decoder(config.target)
    makers = {"transformers": _transformers, "headstart": _headstart}
    engine, target, about = makers[config.engine_kind](config, asked)
    needed = max(config.max_new_tokens, config.sample_tokens)
    longest = max(len(prompt.ids) for prompt in prompts)
    if longest + needed > target.max_positions:
        raise ValueError(
            f"a prompt of {longest} tokens and {needed} new ones do not fit the {target.max_positions} positions of "
            f"{config.target!r}"
        )
    return _answers(config, prompts, engine), Weights.of(target), about


def _check_decoder(source: str) -> None:
    from headstart.inference.models.loading import config_of

    found = config_of(source)
    if found is not None and found.is_encoder_decoder:
        raise ValueError(f"{source!r} is an encoder-decoder model; certify judges decoders alone")


def _by_server(
    config: CertifyConfig, asked: Asked, prompts: list[Prompt], tokenizer: PreTrainedTokenizerBase
) -> tuple[Generated, Weights, dict[str, Any]]:
    from headstart.inference import Target
    from headstart.scripts.measuring.engines import Address, ServerEngine

    assert config.server is not None and config.model is not None
    _check_decoder(config.target)
    template = {} if config.thinking is None else {"enable_thinking": config.thinking}
    ends = _end_tokens_of(config.target, tokenizer)
    address = Address.of(config.server)
    server = ServerEngine(address, config.model, config.endpoint, asked, tokenizer, ends, template)
    generated = _answers(config, prompts, server)
    log.info(f"loading {config.target}")
    target = Target.from_pretrained(config.target, config.dtype)
    about = {
        "kind": "server",
        "url": address.base,
        "told": server.told,
        "model": config.model,
        "endpoint": config.endpoint,
        "dtype": config.dtype,
        "ids_by": sorted({answer.ids_by for answer in generated.answers}),
        "lossy": "",
    }
    return generated, Weights.of(target), about


def _end_tokens_of(source: str, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The tokens at which a target ends a text, before it is loaded."""
    from transformers import GenerationConfig

    from headstart.inference.models.loading import locate

    folder, gguf = locate(source)
    found: Any = None
    if gguf is None:
        try:
            found = GenerationConfig.from_pretrained(folder).eos_token_id
        except OSError:  # a model need not have one
            found = None
    if found is None:
        found = tokenizer.eos_token_id
    if found is None:
        return frozenset()
    return frozenset(found if isinstance(found, list) else [found])


def _without_defaults(target: Target) -> None:
    """Take a model's own logits processors away: some engines would apply them and others would not."""
    from transformers import GenerationConfig

    ends = target.end_tokens
    target.model.generation_config = GenerationConfig(
        eos_token_id=sorted(ends) or None, pad_token_id=min(ends, default=0)
    )


def _transformers(config: CertifyConfig, asked: Asked) -> tuple[Engine, Target, dict[str, Any]]:
    """The `generate` of transformers, assisted or not."""
    import torch

    from headstart.inference import Target
    from headstart.scripts.measuring.engines import LocalEngine

    log.info(f"loading {config.target}")
    target = Target.from_pretrained(config.target, config.dtype)
    _without_defaults(target)
    model: Any = target.model
    about: dict[str, Any] = {"kind": "transformers", "dtype": _name(target.dtype), "lossy": ""}
    more: dict[str, Any] = {}
    if config.assistant:
        log.info(f"loading {config.assistant}")
        assistant = Target.from_pretrained(config.assistant, about["dtype"], target.device)
        more["assistant_model"] = assistant.model
        about["assistant"] = config.assistant
    torch.manual_seed(config.seed)  # it samples with the global generator

    def generate(ids_BT: Any, **settings: Any) -> Any:
        return model.generate(ids_BT, **settings, **more)

    most_rows = 1 if config.assistant else LocalEngine.most_rows  # assisted decoding takes a single row
    return LocalEngine(generate, asked, target.end_tokens, target.device, most_rows), target, about


def _headstart(config: CertifyConfig, asked: Asked) -> tuple[Engine, Target, dict[str, Any]]:
    """This package's decoder."""
    import torch

    from headstart.inference.verify import is_lossy
    from headstart.scripts.measuring.engines import LocalEngine

    log.info(f"loading {config.target}")
    lm, _ = config.load()
    target = lm.target
    _without_defaults(target)
    generator = torch.Generator(target.device).manual_seed(config.seed)

    def generate(ids_BT: Any, **settings: Any) -> Any:
        return lm.generate(ids_BT, generator=generator, **settings).sequences

    about = {
        "kind": "headstart",
        "dtype": _name(target.dtype),
        "head": config.head,
        "drafter": config.drafter,
        "tree": config.tree,
        "acceptance": config.acceptance,
        "compiled": target.compiled,
        "lossy": "",
    }
    if is_lossy(config.acceptance) and config.draws:
        about["lossy"] = f"the acceptance rule {config.acceptance!r} does not keep the target's distribution"
    return LocalEngine(generate, asked, target.end_tokens, target.device), target, about


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _answers(config: CertifyConfig, prompts: list[Prompt], engine: Engine) -> Generated:
    """The engine's greedy answers to all prompts, and its continuations of the first ones."""
    from headstart.scripts.measuring.engines import UnknownTokens

    answers = [engine.greedy(prompt) for prompt in counted(prompts, "greedy answers")]
    if not config.draws:
        return Generated(answers, [], ["sampling: no draws were asked for"])
    rows: list[list[tuple[int, ...]]] = []
    try:
        for prompt in counted(prompts[: config.sample_prompts], "sampled prompts"):
            rows.append(engine.draws(prompt, config.draws))
    except UnknownTokens as error:
        return Generated(answers, [], [f"sampling: {error}, and the tokens of a text are not known for certain"])
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


def _judge(
    config: CertifyConfig,
    prompts: list[Prompt],
    generated: Generated,
    weights: Weights,
    tokenizer: PreTrainedTokenizerBase,
) -> Judgement:
    """Read all that was generated twice: in the engine's dtype, for its rounding, and in float32.

    The same weights are converted in between, so that the model is held once.
    """
    import torch

    from headstart.inference.certificate import judge_answer, judge_greedy, judge_sampling
    from headstart.scripts.measuring.engines import IDS_BY
    from headstart.scripts.measuring.reference import (
        greedy_processors,
        next_tokens,
        one_token_scores,
        processed,
        sampling_processors,
        whole_logits,
    )

    gc.collect()  # the engine is gone
    model = weights.model
    greedily = greedy_processors(config.repetition_penalty)
    warped = sampling_processors(config.temperature or 1.0, config.top_k, config.top_p, config.repetition_penalty)
    sampled = list(zip(prompts, generated.rows, strict=False))
    answered = list(zip(prompts, generated.answers, strict=True))

    answers: list[Answer] = []
    rounded: list[BestScores] = []
    for prompt, answer in counted(answered, f"answers read token by token in {weights.dtype}"):
        by_text = tokenizer if answer.ids_by == IDS_BY[-1] else None
        tokens, scores = one_token_scores(model, prompt.ids, answer.tokens, greedily, by_text)
        answers.append(dataclasses.replace(answer, tokens=tokens))
        rounded.append(scores)
    rounded_next: list[dict[tuple[int, ...], NextToken]] = []
    for prompt, rows in counted(sampled, f"continuations read in {weights.dtype}"):
        rounded_next.append(next_tokens(model, prompt.ids, rows, warped, config.sample_tokens))

    exact = torch.promote_types(getattr(torch, weights.dtype), torch.float32)
    model.to(exact)
    judged = []
    differences: list[float] = []
    for index, prompt in enumerate(counted(prompts, f"answers judged in {_name(exact)}")):
        answer = answers[index]
        logits_TV = whole_logits(model, prompt.ids, answer.tokens).to(exact)
        text_T = torch.tensor([*prompt.ids, *answer.tokens[:-1]], device=logits_TV.device)
        scores_TV = processed(greedily, text_T, logits_TV)
        if answer.end_added:
            end = max(weights.end_tokens, key=lambda token: float(scores_TV[-1, token]))
            answer = dataclasses.replace(answer, tokens=[*answer.tokens[:-1], end])
            answers[index] = answer
        judged.append(
            judge_answer(answer.tokens, scores_TV, logits_TV, rounded[index], weights.end_tokens, config.max_new_tokens)
        )
        if answer.log_probs is not None and len(answer.log_probs) == len(answer.tokens):
            chosen_T1 = torch.tensor(answer.tokens, device=logits_TV.device)[:, None]
            own_T = logits_TV.log_softmax(-1).gather(1, chosen_T1)[:, 0].tolist()
            differences += [abs(one - other) for one, other in zip(own_T, answer.log_probs, strict=True)]
    greedy = judge_greedy(judged)
    if not sampled:
        return Judgement(greedy, None, answers, differences)
    exact_next: list[dict[tuple[int, ...], NextToken]] = []
    for prompt, rows in counted(sampled, f"continuations judged in {_name(exact)}"):
        exact_next.append(next_tokens(model, prompt.ids, rows, warped, config.sample_tokens))
    sampling = judge_sampling(generated.rows, exact_next, rounded_next, config.sample_tokens)
    return Judgement(greedy, sampling, answers, differences)


def _greedy_figures(judgement: Judgement, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Figures of the greedy answers for the report; prompts and tokens are counted from 1."""
    from headstart.scripts.measuring.comparison import quartiles

    greedy = judgement.greedy

    def told(divergence: Any) -> dict[str, Any]:
        return {
            "prompt": divergence.answer + 1,
            "token": divergence.position + 1,
            "chosen": str(tokenizer.decode([divergence.token])),
            "best": str(tokenizer.decode([divergence.best])),
            "margin": divergence.margin,
        }

    margins = sorted(each.margin for each in greedy.divergences)
    own = [margin for answer in judgement.answers for margin in answer.own_margins or []]
    differences = sorted(judgement.log_prob_differences)
    engine: dict[str, Any] = {"tokens_with_log_probs": len(differences)}
    if differences:
        engine["log_prob_difference"] = {**quartiles(differences), "largest": differences[-1]}
    if own:
        engine["tokens_that_it_calls_best"] = sum(margin <= 1e-6 for margin in own)
        engine["tokens_with_a_best_one"] = len(own)
    return {
        "verdict": greedy.verdict,
        "answers": greedy.answers,
        "exact_answers": greedy.exact_answers,
        "tokens": greedy.tokens,
        "not_best": len(greedy.divergences),
        "margins": margins,
        "tie": greedy.tie,
        "beyond_ties": len(greedy.unexplained),
        "first_divergences": [told(each) for each in greedy.first_divergences],
        "unexplained": [told(each) for each in greedy.unexplained[:20]],
        "rounding": {
            "change_of_a_gap": greedy.changes,
            "one_token_forwards_not_best": greedy.rounded_divergences,
            "one_token_forwards_largest_margin": greedy.rounded_largest,
            "engine_alone": greedy.engine_only,
            "one_token_forwards_alone": greedy.rounded_only,
            "p_more_than_rounding": greedy.p_more_than_rounding,
        },
        "engine_tells": engine,
        "reasons": greedy.reasons,
    }


def _sampling_figures(
    sampling: SamplingResult, config: CertifyConfig, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """Figures of the draws for the report; prompts and tokens are counted from 1."""
    from headstart.inference.certificate import ALPHA, POWER

    positions = []
    for position, surprise in enumerate(sampling.surprise):
        tests = [test for test in sampling.tests if test.position == position]
        together = [test for test in sampling.of_tokens(position) if test.prompt is None]
        likely = [test for test in tests if test.kind == "surprise"]
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
                "p_of_the_surprise": likely[0].p_value if likely else None,
                "standard_error": surprise.standard_error,
                "detectable_everywhere": sampling.detectable_everywhere(position),
                "detectable_at_one_prompt": sampling.detectable_at_one_prompt(position),
            }
        )
    impossible = []
    for each in sampling.impossible[:20]:
        impossible.append(
            {
                "prompt": each.prompt + 1,
                "after": str(tokenizer.decode(list(each.path))),
                "token": str(tokenizer.decode([each.token])),
                "draws": each.draws,
            }
        )
    return {
        "lossless": sampling.lossless,
        "prompts": min(config.sample_prompts, sampling.draws // max(config.draws, 1)),
        "draws_of_each": config.draws,
        "temperature": config.temperature,
        "top_k": config.top_k,
        "top_p": config.top_p,
        "false_alarms": ALPHA,
        "power": POWER,
        "tests": len(sampling.tests),
        "positions": positions,
        "impossible": impossible,
        "impossible_draws": sum(each.draws for each in sampling.impossible),
        "reasons": sampling.reasons,
    }
