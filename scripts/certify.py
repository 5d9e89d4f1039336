"""Certify lossless decoding: `headstart certify --target MODEL --head HEAD --prompts FILE.jsonl`.

The engine is headstart with a head or a drafter, transformers' own `generate` (with neither;
`--assistant MODEL` for its assisted decoding), or an OpenAI-compatible server (`--server URL
--model NAME --dtype DTYPE`). It answers greedily, and draws short continuations; then the target
judges both in float32 (`addons/certify/certificate.py`).

The exit status is 0 if the answers are identical, or identical up to ties that rounding explains, 1
if the engine is not lossless, 2 if it could not be judged, and 130 after Ctrl-C.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from headstart.console import console, log
from headstart.options import limited
from headstart.scripts.command_line import PromptFiles, SamplingOptions, options

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from headstart.addons.certify.engines import Asked, Prompt
    from headstart.addons.certify.judging import Generated, Weights

ONLY_OF = {
    "server": ("server", "model"),
    "headstart": ("head", "drafter", "acceptance"),
    "transformers": ("assistant",),
}
"""Options that one engine alone takes."""
SECONDS = 600.0
"""Longest time for one answer of a server."""


@dataclass(frozen=True)
class CertifyConfig(PromptFiles, SamplingOptions):
    """An engine, and the prompts by which it is judged."""

    required = ("target", "prompts")
    most_used = ("target", "head", "prompts", "server", "output")

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
    max_new_tokens: int = limited(64, minimum=1)
    """Tokens of each greedy answer."""
    temperature: float = limited(1.0, minimum=0)
    """Temperature of the draws; 0 for greedy answers alone."""
    samples: int = limited(200, minimum=0)
    """Continuations drawn after each sampled prompt; 0 for greedy answers alone."""
    sample_prompts: int = limited(8, minimum=1)
    """Number of prompts, the first ones, after which continuations are drawn."""
    sample_tokens: int = limited(4, minimum=1)
    """Tokens of each continuation; those after the first come from drafts."""
    repetition_penalty: float = limited(1.0, minimum=0.01)
    """Penalty of tokens that the text has, greedily and in draws; 1 for none."""
    seed: int = 0
    """Seed of the draws; a server takes its own where it is 0."""
    adaptive: bool = False
    """Let headstart decode without drafts where they cost more time than they save; false to draft
    in every round."""
    output: str | None = None
    """JSON file for all figures; a page for reading is written beside it, with the suffix .md."""

    def __post_init__(self) -> None:
        super().__post_init__()
        from headstart.inference.trees.verify import choose_rule

        kind = self.engine_kind
        for engine, names in ONLY_OF.items():
            for name in names:
                if kind != engine and getattr(self, name) not in (None, "", "auto"):
                    raise ValueError(
                        f"{name} was given for the engine {kind!r}; only {engine} takes one"
                    )
        if kind == "server":
            self._check_server()
        if self.acceptance != "auto":
            # Called for its error: every rule that exists fits a sampled chain.
            choose_rule(self.acceptance, "sampled_chain", self.lossy)
        if self.output and Path(self.output).suffix != ".json":
            raise ValueError(
                f"output must end in .json, not {self.output!r}; the page is written beside it"
                " as .md"
            )

    def _check_server(self) -> None:
        """Refuse a server whose answers could not be requested, or not be judged."""
        from headstart.addons.openai_client import OpenAIClient

        if not self.server or not self.model:
            raise ValueError(
                "a server needs both its URL (server) and the target's name there (model)"
            )
        OpenAIClient.at(self.server, SECONDS)
        if self.dtype in ("fastest", "auto"):
            raise ValueError(
                f"dtype {self.dtype!r} cannot be resolved for a server: say in which one it"
                " computes (float32, bfloat16, float16), as rounding is judged by it"
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


def main(arguments: list[str]) -> None:
    """Run `headstart certify` with these command-line arguments."""
    report = certify(options(CertifyConfig, "certify", __doc__, arguments))
    if report["verdict"] == "not lossless":
        sys.exit(1)


def certify(config: CertifyConfig) -> dict[str, Any]:
    """Let the engine generate, judge it, print and write the report, and return it."""
    from headstart.addons.certify.engines import Asked, Prompt
    from headstart.addons.certify.judging import judge
    from headstart.addons.certify.page import page, summary
    from headstart.addons.certify.report import report_of
    from headstart.files import write_whole
    from headstart.inference.targets.provenance import provenance
    from headstart.inference.text.chat_template import load_chat_tokenizer, prompt_ids
    from headstart.scripts.measuring.comparison import read_prompt_files

    # 1. The prompts, and what is asked.
    files = read_prompt_files(config.prompts, config.limit)
    tokenizer = load_chat_tokenizer(config.target)
    prompts = []
    for rows in files.values():
        for messages in rows:
            ids_1T = prompt_ids(tokenizer, messages, config.thinking)
            prompts.append(Prompt(messages, ids_1T[0].tolist()))
    asked = Asked(
        new_tokens=config.max_new_tokens,
        repetition_penalty=config.repetition_penalty,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        sample_tokens=config.sample_tokens,
        seed=config.seed,
        draws=config.draws,
        sample_prompts=config.sample_prompts,
    )

    # 2. The engine answers, and the target judges.
    generated, weights, about = _generate(config, asked, prompts, tokenizer)
    judgement = judge(prompts, generated, weights, asked, tokenizer)

    # 3. The report. A server's URL is shown without its password and query.
    shown_options = dataclasses.asdict(config)
    if config.server:
        shown_options["server"] = about["url"]
    report = {
        **report_of(judgement, generated, weights, asked, about, tokenizer),
        "prompts": {"files": config.prompts, "count": len(prompts)},
        "options": shown_options,
        **provenance(),
    }
    for line in summary(report):
        console.print(line, markup=False, highlight=False)
    if config.output:
        path = Path(config.output)
        path.parent.mkdir(parents=True, exist_ok=True)
        # the same JSON, in which a server's words begin no HTML
        write_whole(path, json.dumps(report, indent=2).replace("<", "\\u003c") + "\n")
        write_whole(path.with_suffix(".md"), page(report))
        log.info(f"written: {path}, {path.with_suffix('.md')}")
    return report


def _generate(
    config: CertifyConfig, asked: Asked, prompts: list[Prompt], tokenizer: PreTrainedTokenizerBase
) -> tuple[Generated, Weights, dict[str, Any]]:
    """Run the engine; return its output, the target's weights and the report's engine entry."""
    from headstart.addons.certify.engines import headstart_engine, transformers_engine
    from headstart.addons.certify.judging import Weights, generate_all
    from headstart.heads.base import dtype_name
    from headstart.inference import Target
    from headstart.inference.targets.loading import config_of
    from headstart.inference.trees.verify import is_lossy

    model_config = config_of(config.target)
    if model_config is not None and model_config.is_encoder_decoder:
        raise ValueError(
            f"{config.target!r} is an encoder-decoder model; certify judges decoders alone"
        )
    if config.engine_kind == "server":
        return _by_server(config, asked, prompts, tokenizer)

    # An engine in this process: transformers' own, or headstart.
    log.info(f"loading {config.target}")
    about: dict[str, Any] = {"kind": config.engine_kind, "lossy": ""}
    if config.engine_kind == "transformers":
        target = Target.from_pretrained(config.target, config.dtype)
        assistant = None
        if config.assistant:
            log.info(f"loading {config.assistant}")
            assistant = Target.from_pretrained(config.assistant, target.dtype, target.device)
            about["assistant"] = config.assistant
        engine = transformers_engine(target, asked, assistant)
    else:
        lm, _ = config.load()
        target = lm.target
        engine = headstart_engine(lm, asked)
        about |= {
            "head": config.head,
            "drafter": config.drafter,
            "tree": config.tree,
            "acceptance": config.acceptance,
            "compiled": target.compiled,
        }
        if is_lossy(config.acceptance) and config.draws:
            about["lossy"] = (
                f"the acceptance rule {config.acceptance!r} does not keep the target's distribution"
            )
    about["dtype"] = dtype_name(target.dtype)

    # Refuse prompts without room for the answers before any is generated.
    needed = max(config.max_new_tokens, config.sample_tokens)
    longest = max(len(prompt.ids) for prompt in prompts)
    if longest + needed > target.max_positions:
        raise ValueError(
            f"a prompt of {longest} tokens and {needed} new ones do not fit the"
            f" {target.max_positions} positions of {config.target!r}"
        )
    weights = Weights(target.model, target.end_tokens, target.provenance)
    return generate_all(engine, prompts, asked), weights, about


def _by_server(
    config: CertifyConfig, asked: Asked, prompts: list[Prompt], tokenizer: PreTrainedTokenizerBase
) -> tuple[Generated, Weights, dict[str, Any]]:
    """Do the same with a server, which answers before the target is loaded."""
    from headstart.addons.certify.engines import ServerEngine, end_tokens_of
    from headstart.addons.certify.judging import Weights, generate_all
    from headstart.addons.openai_client import OpenAIClient
    from headstart.inference import Target

    assert config.server is not None and config.model is not None
    template = {} if config.thinking is None else {"enable_thinking": config.thinking}
    ends = end_tokens_of(config.target, tokenizer)
    server = OpenAIClient.at(config.server, SECONDS)
    engine = ServerEngine(server, config.model, config.endpoint, asked, tokenizer, ends, template)
    generated = generate_all(engine, prompts, asked)
    log.info(f"loading {config.target}")
    target = Target.from_pretrained(config.target, config.dtype)
    about = {
        "kind": "server",
        "url": server.name,
        "told": engine.told,
        "model": config.model,
        "endpoint": config.endpoint,
        "dtype": config.dtype,
        "ids_by": sorted({answer.ids_by for answer in generated.answers}),
        "lossy": "",
    }
    return generated, Weights(target.model, target.end_tokens, target.provenance), about
