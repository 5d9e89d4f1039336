"""Engines that a certificate judges: a `generate` in this process, or an OpenAI-compatible server.

A server is asked with the prompts' token ids, and for those of its answer: `token_ids` (vLLM),
`tokens` (llama.cpp), or the token ids or texts in its log-probabilities. Where it gives none of
these, the answer's text is tokenized here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase

from ...files import one_line
from ...inference.engines.target import Target
from ...inference.speculative_lm import SpeculativeLM
from ...inference.targets.loading import generation_config_of, locate
from ...inference.text.messages import Messages
from ..openai_client import OpenAIClient, ServerError
from .certificate import TokenPath

RETRIES = 3
"""Repetitions of a request after a transient error, with exponential backoff."""
TOKENS = 16384
"""Tokens of all rows that are generated at once in this process."""
LARGEST = torch.finfo(torch.float64).max
TEXT_TOKENS = 4
"""Tokens that a text may become here for each token that was generated, at most."""
SHOWN = 300
"""Characters of what a server sent that an error shows."""
IDS_BY = ("token ids", "token texts", "text")
"""How the tokens of an answer are known, best first."""


@dataclass(frozen=True)
class Prompt:
    """A prompt as messages, and as the token ids that the target's chat template makes of them."""

    messages: Messages
    ids: list[int]


@dataclass(frozen=True)
class Answer:
    """An answer that an engine generated."""

    tokens: list[int]
    log_probs: list[float] | None = None
    """The engine's own log-probabilities of its tokens, if it gives them."""
    own_margins: list[float] | None = None
    """By how much they lie below the engine's own best ones, if it gives these."""
    ids_by: str = IDS_BY[0]
    end_added: bool = False
    """Whether the last token is one of the target's end tokens that the engine left out, though it
    says it stopped."""


@dataclass(frozen=True)
class Asked:
    """Settings that every engine is asked for."""

    new_tokens: int
    """Longest greedy answer."""
    repetition_penalty: float
    temperature: float
    top_k: int
    """0 for all tokens."""
    top_p: float
    sample_tokens: int
    """Tokens of each sampled continuation."""
    seed: int
    """Of draws; a server chooses its own where it is 0."""
    draws: int
    """Continuations of each sampled prompt; 0 for greedy answers alone."""
    sample_prompts: int
    """Number of prompts, the first ones, after which continuations are drawn."""


class Engine(Protocol):
    """Answers greedily, and draws continuations."""

    def greedy(self, prompt: Prompt) -> Answer:
        """The greedy answer to a prompt."""

    def draws(self, prompt: Prompt, count: int) -> list[TokenPath] | None:
        """Independent continuations of a prompt; shorter ones have ended.

        None if the engine gives text alone, whose tokens are not known for certain.
        """


@dataclass(frozen=True)
class LocalEngine:
    """A `generate` of this process."""

    generate: Callable[..., Tensor]
    """Prompts [batch, time] and settings of `model.generate`, to whole sequences padded on the
    right."""
    asked: Asked
    end_tokens: frozenset[int]
    device: torch.device
    most_rows: int = 64
    """Rows that it generates at once, fewer after long prompts."""

    def greedy(self, prompt: Prompt) -> Answer:
        (tokens,) = self._new_tokens(
            prompt, 1, do_sample=False, max_new_tokens=self.asked.new_tokens
        )
        return Answer(tokens)

    def draws(self, prompt: Prompt, count: int) -> list[TokenPath]:
        fitting = max(1, min(self.most_rows, TOKENS // len(prompt.ids)))
        found: list[TokenPath] = []
        while len(found) < count:
            rows = self._new_tokens(
                prompt,
                min(fitting, count - len(found)),
                do_sample=True,
                max_new_tokens=self.asked.sample_tokens,
                temperature=self.asked.temperature,
                top_k=self.asked.top_k,
                top_p=self.asked.top_p,
            )
            found += [self._until_end(row) for row in rows]
        return found

    def _new_tokens(self, prompt: Prompt, rows: int, **settings: Any) -> list[list[int]]:
        ids_BT = torch.tensor([prompt.ids], device=self.device).expand(rows, -1)
        sequences_BT = self.generate(
            ids_BT,
            attention_mask=torch.ones_like(ids_BT),
            repetition_penalty=self.asked.repetition_penalty,
            **settings,
        )
        return sequences_BT[:, len(prompt.ids) :].tolist()

    def _until_end(self, row: list[int]) -> TokenPath:
        """The tokens of a row without the padding after its end token."""
        for place, token in enumerate(row):
            if token in self.end_tokens:
                return tuple(row[: place + 1])
        return tuple(row)


def transformers_engine(target: Target, asked: Asked, assistant: Target | None) -> LocalEngine:
    """The `generate` of transformers, assisted by a smaller model or not."""
    without_defaults(target)
    generate: Any = target.model.generate
    most_rows = LocalEngine.most_rows
    if assistant is not None:
        generate = partial(generate, assistant_model=assistant.model)
        most_rows = 1  # assisted decoding takes a single row
    torch.manual_seed(asked.seed)  # it samples with the global generator
    return LocalEngine(generate, asked, target.end_tokens, target.device, most_rows)


def headstart_engine(lm: SpeculativeLM, asked: Asked) -> LocalEngine:
    """Return a `SpeculativeLM` as a certificate's engine, without generation config defaults."""
    target = lm.target
    without_defaults(target)
    generator = torch.Generator(target.device).manual_seed(asked.seed)

    def generate(ids_BT: Tensor, **settings: Any) -> Tensor:
        return lm.generate(ids_BT, generator=generator, **settings).sequences

    return LocalEngine(generate, asked, target.end_tokens, target.device)


def without_defaults(target: Target) -> None:
    """Remove a model's own logits processors, which only some engines would apply."""
    ends = target.end_tokens
    target.model.generation_config = GenerationConfig(
        eos_token_id=sorted(ends) or None, pad_token_id=min(ends, default=0)
    )


def end_tokens_of(source: str, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The tokens at which a target ends a text, before it is loaded."""
    _, gguf = locate(source)
    ends: Any = None
    if gguf is None:
        generation = generation_config_of(source)
        ends = None if generation is None else generation.eos_token_id
    if ends is None:
        ends = tokenizer.eos_token_id
    listed = ends if isinstance(ends, list) else [ends]
    return frozenset(token for token in listed if token is not None)


class ServerEngine:
    """An OpenAI-compatible server (vLLM, SGLang), asked for answers and log-probabilities."""

    def __init__(
        self,
        server: OpenAIClient,
        model: str,
        endpoint: Literal["completions", "chat"],
        asked: Asked,
        tokenizer: PreTrainedTokenizerBase,
        end_tokens: frozenset[int],
        template: dict[str, Any],
    ) -> None:
        """Connect to the server.

        `template` holds chat template variables, for a server that renders prompts itself.

        Raises:
            ValueError: the server cannot be reached, or does not serve the model.
        """
        self.server = server
        self.model = model
        self.endpoint = endpoint
        self.asked = asked
        self.tokenizer = tokenizer
        self.end_tokens = end_tokens
        self.template = template
        self.told = ""
        """What the server says it is."""
        served = [row.get("id") for row in _rows(self._request("/models"), "data")]
        if model not in served:
            names = shortened(", ".join(map(str, served[:SHOWN]))) or "none"
            raise ValueError(f"{server.name} does not serve {model!r}; choose from {names}")

    def greedy(self, prompt: Prompt) -> Answer:
        body = {"temperature": 0.0, "max_tokens": self.asked.new_tokens, **self._logprobs()}
        (choice,) = self._choices(prompt, body)[:1]
        return self._answer(choice, self.asked.new_tokens)

    def draws(self, prompt: Prompt, count: int) -> list[TokenPath] | None:
        found: list[TokenPath] = []
        while len(found) < count:
            # vLLM on a CPU ends at some requests with a seed, and draws without one are as
            # independent.
            seed = {"seed": self.asked.seed + len(found)} if self.asked.seed else {}
            body = {
                "temperature": self.asked.temperature,
                "top_p": self.asked.top_p,
                "top_k": self.asked.top_k or -1,
                "min_p": 0.0,  # llama.cpp's default is not
                "max_tokens": self.asked.sample_tokens,
                "n": count - len(found),
                **seed,
                "ignore_eos": True,  # servers may leave out an end token
                **self._logprobs(),
            }
            answers = [
                self._answer(choice, self.asked.sample_tokens)
                for choice in self._choices(prompt, body)
            ]
            if any(answer.ids_by == IDS_BY[-1] for answer in answers):
                return None
            found += [tuple(answer.tokens[: self.asked.sample_tokens]) for answer in answers]
        return found[:count]

    def _logprobs(self) -> dict[str, Any]:
        return {"logprobs": True, "top_logprobs": 1} if self.endpoint == "chat" else {"logprobs": 1}

    def _choices(self, prompt: Prompt, body: dict[str, Any]) -> list[Any]:
        body = {
            "model": self.model,
            "repetition_penalty": self.asked.repetition_penalty,
            "return_token_ids": True,
            "return_tokens": True,
            **body,
        }
        if self.endpoint == "chat":
            body["messages"] = prompt.messages
            if self.template:
                body["chat_template_kwargs"] = self.template
            reply = self._request("/chat/completions", body)
        else:
            body["prompt"] = prompt.ids
            reply = self._request("/completions", body)
        self.told = shortened(str(reply.get("system_fingerprint") or self.told))
        choices = _rows(reply, "choices")
        if not choices:
            raise self._malformed(reply)
        read = reply.get("prompt_token_ids") or choices[0].get("prompt_token_ids")
        if isinstance(read, list) and read != prompt.ids:
            raise ValueError(
                f"{self.server.name} read a prompt as {len(read)} other tokens than the target's"
                f" chat template makes here ({len(prompt.ids)}); is it the same model, and the same"
                " chat template?"
            )
        return choices

    def _request(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The JSON object that the server answers; a ValueError in one line for anything else."""
        try:
            return self.server.ask_object(path, body, RETRIES)
        except ServerError as error:
            told = shortened(error.told)
            if error.answered:
                raise ValueError(
                    f"{self.server.name} did not answer with a completion: {told}"
                ) from None
            if error.status is None:
                raise ValueError(f"{self.server.name} {told}") from None
            raise ValueError(
                f"{self.server.name}{path} answered with status {error.status}: {told}"
            ) from None

    def _malformed(self, reply: Any) -> ValueError:
        shown = shortened(str(reply))
        return ValueError(f"{self.server.name} did not answer with a completion: {shown!r}")

    def _answer(self, choice: dict[str, Any], most: int) -> Answer:
        """An answer of at most `most` tokens, by the server's best description of them."""
        logprobs = choice.get("logprobs")
        texts, values, best = log_probs_of(logprobs)
        finished = choice.get("finish_reason") == "stop"
        ids = _ids(choice, logprobs, texts)
        ids_by = IDS_BY[0]
        if ids is None and texts is not None:
            known = [self._id_of_text.get(text) for text in texts]
            ids = None if None in known else [token for token in known if token is not None]
            ids_by = IDS_BY[1]
        if ids is None:
            message = choice.get("message")
            text = message.get("content") if isinstance(message, dict) else choice.get("text")
            if not isinstance(text, str):
                raise self._malformed(choice)
            # lone surrogates, which JSON can hold, are no text
            text = text.encode("utf-8", "replace").decode()
            ids = self.tokenizer.encode(text, add_special_tokens=False)
            ids_by = IDS_BY[2]
            most *= TEXT_TOKENS
        if len(ids) > most:
            raise ValueError(
                f"{self.server.name} answered with {len(ids):,} tokens, and was asked for at most"
                f" {most:,}"
            )
        size = max(len(self.tokenizer), self.tokenizer.vocab_size)
        for token in ids:
            if not 0 <= token < size:
                raise ValueError(
                    f"{self.server.name} answered with token {shortened(str(token))}, outside of"
                    f" the target's {size}: another model?"
                )
        if values is None or len(values) != len(ids):
            values = None
            best = None
        margins = None
        if values is not None and best is not None:
            margins = [max(0.0, top - value) for value, top in zip(values, best, strict=True)]
        end_added = finished and bool(self.end_tokens) and not self.end_tokens & set(ids[-1:])
        if end_added:
            ids = [*ids, min(self.end_tokens)]
            values = None
            margins = None
        if not ids:
            raise self._malformed(choice)
        return Answer(ids, values, margins, ids_by, end_added)

    @cached_property
    def _id_of_text(self) -> dict[str, int]:
        """Tokens by their text, those alone whose text no other one has."""
        found: dict[str, int] = {}
        twice = set()
        for token in range(len(self.tokenizer)):
            text = str(self.tokenizer.decode([token]))
            if text in found or "\ufffd" in text or not text:
                twice.add(text)
            found[text] = token
        return {text: token for text, token in found.items() if text not in twice}


def shortened(text: str) -> str:
    """The beginning of a server's text, in one line and without control characters."""
    return one_line(text[: 2 * SHOWN], SHOWN)


def _rows(reply: dict[str, Any], key: str) -> list[dict[str, Any]]:
    rows = reply.get(key)
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _ids(choice: dict[str, Any], logprobs: Any, texts: list[str] | None) -> list[int] | None:
    """Token ids, in any of the forms in which servers give them; None where there are none."""
    for name in ("token_ids", "tokens"):
        if _numbers(choice.get(name), int):
            return list(choice[name])
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    if isinstance(content, list) and content and all(isinstance(row, dict) for row in content):
        ids = [row.get("id") for row in content]
        if _numbers(ids, int):
            return ids
    if texts and all(text.startswith("token_id:") and text[9:].isdigit() for text in texts):
        return [int(text[9:]) for text in texts]
    return None


def log_probs_of(logprobs: Any) -> tuple[list[str] | None, list[float] | None, list[float] | None]:
    """Return an answer's token texts, log-probabilities and best log-probabilities.

    The last are those of the best token at each position. None stands for what is missing.
    """
    if not isinstance(logprobs, dict):
        return None, None, None
    texts: Any = logprobs.get("tokens")
    values: Any = logprobs.get("token_logprobs")
    rows = logprobs.get("top_logprobs")
    tops: Any = None
    if isinstance(rows, list):
        tops = [_highest(row) for row in rows if row is not None]
    content = logprobs.get("content")
    if isinstance(content, list) and all(isinstance(row, dict) for row in content):
        texts = [row.get("token") for row in content]
        values = [row.get("logprob") for row in content]
        tops = [_highest(row.get("top_logprobs")) for row in content]
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        texts = None
    if not _numbers(values, float):
        values = None
    if not _numbers(tops, float) or values is None or len(tops) != len(values):
        tops = None
    return texts, values, tops


def _highest(row: Any) -> float | None:
    """The highest log-probability in a row of `top_logprobs`, a mapping or a list."""
    if isinstance(row, dict):
        values: Sequence[Any] = list(row.values())
    elif isinstance(row, list):
        values = [each.get("logprob") if isinstance(each, dict) else None for each in row]
    else:
        return None
    return max(values) if _numbers(values, float) else None


def _numbers(values: Any, kind: type) -> bool:
    """Whether this is a list of numbers that is not empty."""
    kinds = (int, float) if kind is float else (int,)
    if not isinstance(values, (list, tuple)) or not values:
        return False
    if not all(isinstance(value, kinds) and not isinstance(value, bool) for value in values):
        return False
    # NaN is no log-probability, and 10**400 no float
    return kind is int or all(-LARGEST <= value <= LARGEST for value in values)
