"""States from a running vLLM: its method `extract_hidden_states`, with a connector to files.

A request holds a sequence's token ids and asks for one new token. The answer names the file that
the server writes, in the folder that the user names. It is read once its lock is free, compared
with what was asked for, and only then removed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...inference.engines.target import Target
from ...train.data.chat_template import Example
from ...train.features.sources import States, StateSource
from ..openai_client import OpenAIClient, ServerError
from .state_files import NAME, ServerLayers, wait_until_written

TOGETHER = 32
"""Most requests of a process at once."""
PAUSE = 1.0
"""Seconds before a request is repeated that the server did not answer."""
LOGPROB_NOISE = {torch.float32: 0.02, torch.bfloat16: 0.25, torch.float16: 0.1}
"""Largest difference, in nats, of a token's log-probability by the server and by the target's LM
head on its states, by the dtype of these."""
LARGEST = 1e6
"""Nats of a log-probability, at most."""
SHOWN = 300
"""Characters of a server's error that are shown."""


@dataclass
class StateServer(StateSource):
    """A running vLLM that serves the target."""

    url: str
    """Address of its API, such as http://HOST:8000/v1."""
    given: ServerLayers
    model: str | None
    """Its name of the model; None for the one that it serves."""
    seconds: float
    """Longest time that a sequence may take."""
    folder: Path
    """Where this machine sees the folder to which the server writes: nothing else is opened."""

    before_norm = True
    greedy = True

    def __post_init__(self) -> None:
        self.layers = self.given.layers
        self.server = OpenAIClient.at(self.url, self.seconds, "features.server")

    def try_first(self, target: Target, example: Example) -> None:
        """Find the server's model and try one sequence.

        Raises:
            ValueError: no server, one without states, or one of another model, tokenizer or list of
                layers.
        """
        served = self._repeated(lambda: self.server.ask_object("/models")).get("data")
        if not isinstance(served, list) or not all(
            isinstance(model, dict) and isinstance(model.get("id"), str) for model in served
        ):
            raise ValueError(f"{self.where} answers /models without a list of its models")
        names = {model["id"]: Path(str(model.get("root") or model["id"])).name for model in served}
        shown = ", ".join(map(repr, names))[:SHOWN]
        if self.model is None:
            own = [
                name
                for name, root in names.items()
                if Path(target.name).name in (root, Path(name).name)
            ]
            if not own:
                raise ValueError(
                    f"{self.where} serves {shown}, and the target is"
                    f" {target.name!r}; start it with this target, or name the same weights by"
                    " features.server_model"
                )
            self.model = own[0]
        elif self.model not in names:
            raise ValueError(
                f"{self.where} serves {shown}, not features.server_model {self.model!r}"
            )
        modules = target.modules
        tokens_T = torch.tensor(example.tokens)
        reply, states_TLD = self._answer(tokens_T, 1, logprobs=1)
        self.given.check_last(states_TLD, example, modules, self.where)
        token = self._new_tokens(reply, 1, target.info.vocab_size)[0]
        theirs = self._log_prob(reply)
        like = modules.lm_head.weight
        last_D = modules.norm(states_TLD[-1, self.layers.index(-1)].to(like)[None])[0]
        ours = float(modules.logits(last_D).float().log_softmax(-1)[token])
        # in this order NaN is refused, too
        if not abs(ours - theirs) <= LOGPROB_NOISE.get(states_TLD.dtype, 0.25):
            raise ValueError(
                f"{self.where} gives token {token} a log-probability of {theirs:.2f}, and the LM"
                f" head of {target.name!r} gives it {ours:.2f} on the server's states: it serves"
                f" other weights, or features.server_layers {list(self.given.given)} are not in its"
                " order"
            )

    @property
    def where(self) -> str:
        """The server, for messages."""
        return f"features.server {self.server.name}"

    def states(self, tokens_T: Tensor, conversation: int) -> States:
        try:
            return self._answer(tokens_T, 1)[1], None
        except ValueError as error:
            raise ValueError(f"conversation {conversation}: {error}") from None

    def many(self, sequences: Sequence[tuple[Tensor, int]]) -> list[States]:
        # the server batches them
        with ThreadPoolExecutor(max(1, min(TOGETHER, len(sequences)))) as threads:
            return list(threads.map(lambda each: self.states(*each), sequences))

    def text_of(self, example: Example) -> Tensor | None:
        return None

    def answer(self, example: Example, new_tokens: int) -> tuple[Tensor, States]:
        # The last token was never read, and has no states.
        reply, states_TLD = self._answer(torch.tensor(example.prompt), new_tokens + 1)
        new = self._new_tokens(reply, new_tokens + 1, self.given.info.vocab_size)
        text = [*example.prompt, *new]
        return torch.tensor(text[: len(states_TLD)]), (states_TLD, None)

    def probe(self, tokens_T: Tensor) -> States | None:
        return self.states(tokens_T, -1)

    def _answer(
        self, tokens_T: Tensor, new_tokens: int, **more: Any
    ) -> tuple[dict[str, Any], Tensor]:
        """The server's greedy answer, and states of all tokens but the last one of it."""
        request = {
            "model": self.model,
            "prompt": tokens_T.tolist(),
            "max_tokens": new_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "kv_transfer_params": {"include_output_tokens": new_tokens > 1},
            **more,
        }
        return self._repeated(lambda: self._once(request, tokens_T))

    def _once(self, request: dict[str, Any], tokens_T: Tensor) -> tuple[dict[str, Any], Tensor]:
        reply = self.server.ask_object("/completions", request)
        parameters = reply.get("kv_transfer_params")
        named = parameters.get("hidden_states_path") if isinstance(parameters, dict) else None
        if not isinstance(named, str) or not named:
            raise ValueError(
                f"{self.where} answers without states: start it with --speculative-config of the"
                " method extract_hidden_states and a --kv-transfer-config that writes them"
                " (docs/training.md)"
            )
        name = Path(named).name
        # hs_NUMBER.safetensors is a file of `features.from_server`, which is nobody's to remove
        if not name.endswith(".safetensors") or "\0" in name or NAME.fullmatch(name):
            raise ValueError(
                f"{self.where} names {named[:SHOWN]!r} as the file of its states, which vLLM's"
                " connector does not write"
            )
        path = self.folder / name
        if not wait_until_written(path, self.seconds) or not path.exists():
            raise ValueError(
                f"{self.where} wrote states to {named[:SHOWN]!r}, which this machine does not see"
                f" at {path}: share that folder, and name it by features.server_folder as it is"
                " here"
            )
        if path.is_symlink():
            raise ValueError(f"{path} is a link, which vLLM's connector does not write")
        read_T, states_TLD = self.given.read(path)
        longest = len(tokens_T) + request["max_tokens"]
        asked_for = torch.equal(read_T[: len(tokens_T)], tokens_T) and len(read_T) <= longest
        if not asked_for:
            raise ValueError(f"{self.where} gave the states of other tokens than it was asked for")
        path.unlink()
        Path(f"{path}.lock").unlink(missing_ok=True)
        return reply, states_TLD

    def _new_tokens(self, reply: dict[str, Any], most: int, vocab_size: int) -> list[int]:
        """The tokens of an answer, of which at least one and at most `most` were asked for."""
        tokens = self._choice(reply).get("token_ids")
        if (
            not isinstance(tokens, list)
            or not 0 < len(tokens) <= most
            or not all(type(token) is int and 0 <= token < vocab_size for token in tokens)
        ):
            raise ValueError(
                f"{self.where} answers with token_ids {str(tokens)[:SHOWN]!r}, not with up to"
                f" {most} of the target's {vocab_size} tokens"
            )
        return tokens

    def _log_prob(self, reply: dict[str, Any]) -> float:
        """The log-probability of an answer's first token."""
        logprobs = self._choice(reply).get("logprobs")
        values = logprobs.get("token_logprobs") if isinstance(logprobs, dict) else None
        value = values[0] if isinstance(values, list) and values else None
        if not isinstance(value, int | float) or not abs(value) < LARGEST:
            raise ValueError(f"{self.where} answers with log-probabilities {str(values)[:SHOWN]!r}")
        return float(value)

    def _choice(self, reply: dict[str, Any]) -> dict[str, Any]:
        choices = reply.get("choices")
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            raise ValueError(f"{self.where} answers without choices: {str(reply)[:SHOWN]!r}")
        return choices[0]

    def _repeated(self, work: Callable[[], Any]) -> Any:
        """Do what asks the server, again while it does not answer, for at most `seconds`."""
        deadline = time.monotonic() + self.seconds
        while True:
            try:
                return work()
            except ServerError as error:
                told = error.told[:SHOWN]
                if error.answered:
                    raise ValueError(f"{self.where}: {told}") from None
                if not error.may_pass:
                    raise ValueError(
                        f"{self.where} refuses a request ({error.status}): {told!r}"
                    ) from None
                failure = told if error.status is None else f"{error.status} {told!r}"
            except OSError as error:  # of its files
                failure = str(error) or type(error).__name__
            if time.monotonic() + PAUSE > deadline:
                raise ValueError(
                    f"{self.where} gave nothing for {self.seconds:g} s (features.server_seconds):"
                    f" {failure}. Start it again, or give it more time; the same command then"
                    " resumes from the newest checkpoint"
                ) from None
            time.sleep(PAUSE)
