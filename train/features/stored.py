"""Training and evaluation without the target's blocks: all states come from files or a source.

`StoredFeatures` trains on them. `StoredReplay` measures acceptance: it replays texts whose states
are known, as `ReplayTarget` does, and runs no forward either.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ...files import read_json, reading_back, text_shards, write_whole
from ...heads.base import DraftHead, TargetFeatures
from ...inference.engines.target import Target
from ...inference.feature_cache import FeatureCache, decoded, key_of, text_row
from ...inference.probe import PROBE_ENDS, probe_drafts, probe_text
from ...inference.replay import BEYOND, ReplayTarget
from ...inference.rounds.observers import RoundObserver
from ..config import EvalConfig
from ..data.batches import Batch
from ..data.chat_template import Example
from ..data.token_cache import tokens_of
from .online import OnlineFeatures, chosen_states, features_of_states, with_states
from .sources import States, StateSource, own_answer

PROBE_TOKENS = PROBE_ENDS[-1] + 64
"""Tokens of the probe's text whose states are kept; a deeper head has no probe."""
ANSWERS = "answers"
"""Folder, in that of the states, of the target's answers to held-out prompts: a file for each,
named by its key."""


class FolderStates(StateSource):
    """A folder of states from `headstart features`, or of texts stored with their states."""

    def __init__(self, cache: FeatureCache, max_length: int) -> None:
        """Read a folder for sequences of at most `max_length` tokens; cut stored texts to that."""
        self.cache = cache
        self.layers = cache.layers
        self.max_length = max_length
        self.greedy = (cache.folder / ANSWERS).is_dir()

    @cached_property
    def _whole(self) -> dict[bytes, bytes]:
        """Keys of stored texts by those of their first tokens, where they are too long.

        States do not depend on what follows.
        """
        keys: dict[bytes, bytes] = {}
        for path in text_shards(self.cache.folder):
            tokens_T = torch.tensor(text_row(path)["input_ids"])
            if len(tokens_T) > self.max_length:
                keys[key_of(tokens_T[: self.max_length])] = key_of(tokens_T)
        return keys

    def states(self, tokens_T: Tensor, conversation: int) -> States:
        key = self._key_of(tokens_T)
        if key is None:
            raise ValueError(
                f"{self.cache.folder} holds no states of conversation {conversation}; {FILL}"
            )
        states_TLD, scales_TL = self.cache.stored(key)
        length = len(tokens_T)  # fewer than the states, if the text was cut
        return states_TLD[:length], None if scales_TL is None else scales_TL[:length]

    def _key_of(self, tokens_T: Tensor | NDArray[Any]) -> bytes | None:
        """The key of the states that begin with those of these tokens; None if there are none."""
        key = key_of(tokens_T)
        if key not in self.cache:  # then all texts are opened
            key = self._whole.get(key, key)
        return key if key in self.cache else None

    def text_of(self, example: Example) -> Tensor | None:
        if not self.greedy:
            return super().text_of(example)
        path = answer_path(self.cache.folder, example.prompt)
        # The prompt alone is too short to replay, which `StoredReplay.usable` refuses.
        if not path.exists():
            return torch.tensor(example.prompt)
        with reading_back(path, "remove it; `headstart features` writes it again"):
            text = read_json(path)["text"]
            if not isinstance(text, list) or not all(type(token) is int for token in text):
                raise ValueError("its text is not a list of tokens")
            return torch.tensor(text)

    def answer(self, example: Example, new_tokens: int) -> tuple[Tensor, States]:
        if self.greedy:
            return super().answer(example, new_tokens)
        # Only whole conversations have states; those of the first answer do not depend on what
        # follows.
        text_T = own_answer(example)
        states_TLD, scales_TL = self.states(torch.tensor(example.tokens), example.conversation)
        length = len(text_T)
        return text_T, (states_TLD[:length], None if scales_TL is None else scales_TL[:length])

    def probe(self, tokens_T: Tensor) -> States | None:
        key = key_of(tokens_T)
        return self.cache.stored(key) if key in self.cache else None

    def require(self, accelerator: Accelerator, examples: Sequence[Example], what: str) -> None:
        share = range(accelerator.process_index, len(examples), accelerator.num_processes)
        lacking = [index for index in share if self._key_of(tokens_of(examples, index)) is None]
        if lacking:
            raise ValueError(
                f"{self.cache.folder} lacks the states of {len(lacking)} of {len(share)} sequences"
                f" {what}; the first is of conversation {examples[lacking[0]].conversation}; {FILL}"
            )


FILL = (
    "write them by `headstart features` with the same options (data.max_length and data.held_out,"
    " too)"
)


def answer_path(folder: Path, prompt: Sequence[int]) -> Path:
    """The file of the target's answer to a prompt."""
    return folder / ANSWERS / f"{key_of(torch.tensor(list(prompt))).hex()}.json"


def write_answer(folder: Path, prompt: Sequence[int], text: Sequence[int]) -> None:
    """Keep the target's answer: a text that begins with the prompt."""
    path = answer_path(folder, prompt)
    path.parent.mkdir(exist_ok=True)
    write_whole(path, json.dumps({"prompt": len(prompt), "text": list(text)}))


@dataclass
class StoredFeatures(OnlineFeatures):
    """Features of which every state comes from a source."""

    source: StateSource

    def __call__(self, batch: Batch, dtype: torch.dtype = torch.float32) -> TargetFeatures:
        if batch.failure is not None:
            raise ValueError(batch.failure)
        if batch.states_BTLD is None:
            (batch,) = self._filled([batch])
        source = self.source
        return features_of_states(
            self.target, self.head, batch, source.layers, dtype, source.before_norm
        )

    def read_ahead(self, batches: list[Batch], epoch: int) -> list[Batch]:
        try:
            return self._filled(batches)
        # The step raises it, in the process that the user sees.
        except ValueError as error:
            return [replace(batch, failure=str(error)) for batch in batches]

    def _filled(self, batches: list[Batch]) -> list[Batch]:
        """Return batches with the states of their sequences, all asked for at once."""
        sequences: list[tuple[Tensor, int]] = []
        for batch in batches:
            for (row, span), conversation in zip(batch.places(), batch.conversations, strict=True):
                sequences.append((batch.tokens_BT[row, span], conversation))
        states = iter(self.source.many(sequences))
        layers = len(self.source.layers)
        width = self.target.info.hidden_size
        filled = []
        for batch in batches:
            own = list(itertools.islice(states, len(batch.conversations)))
            filled.append(with_states(batch, own, layers, width))
        return filled


class StoredReplay(ReplayTarget):
    """A target that repeats texts whose states a source has."""

    def __init__(self, target: Target, source: StateSource, held_out: list[Example]) -> None:
        """`held_out` are the conversations whose prompts may be answered."""
        super().__init__(target)
        # Next tokens come from the texts: logits of stored states, which are rounded, could differ.
        self.computes_logits = False
        self.source = source
        self._examples = {tuple(example.prompt): example for example in held_out}
        self._states: dict[tuple[int, ...], Tensor] = {}
        """By prompt, the states [T, L, D] of its text."""

    def usable(self, held_out: list[Example], config: EvalConfig) -> list[Example]:
        """Return the first held-out conversations whose prompts can be answered.

        Raises:
            ValueError: the source has answers of the target, and lacks some of those that are to be
                replayed; or no conversation can be used.
        """
        answerable: list[Example] = []
        for example in held_out:
            if len(answerable) == config.prompts:
                break
            # Prompts that leave no room are passed over, as with a target that is loaded.
            if not 0 < len(example.prompt) <= self.max_positions - config.max_new_tokens:
                continue
            text_T = self.source.text_of(example)
            if text_T is None or self._reaches(
                text_T.tolist(), len(example.prompt), config.max_new_tokens
            ):
                answerable.append(example)
            elif self.source.greedy:
                raise ValueError(
                    f"no answer of {config.max_new_tokens} tokens (eval.max_new_tokens) to the"
                    f" held-out conversation {example.conversation} is stored; {FILL}, or lower"
                    " eval.prompts or eval.max_new_tokens"
                )
        if not answerable:
            raise ValueError(
                f"none of the {len(held_out)} held-out conversations has an answer of"
                f" {config.max_new_tokens} tokens (eval.max_new_tokens) whose states are stored;"
                " lower eval.max_new_tokens or hold out more"
            )
        return answerable

    def unknown(self, prompts: Sequence[Tensor], new_tokens: int) -> list[Tensor]:
        lacking: dict[tuple[int, ...], Tensor] = {}  # a prompt that comes twice is listed once
        for prompt_T in prompts:
            prompt = tuple(prompt_T.tolist())
            text = self.texts.get(prompt)
            if text is None or not self._reaches(text.tolist(), len(prompt), new_tokens):
                lacking[prompt] = prompt_T
        return list(lacking.values())

    def learn(
        self,
        prompts: Sequence[Tensor],
        new_tokens: int,
        observers: Sequence[RoundObserver] = (),
    ) -> None:
        """Ask the source for the answers to those prompts that are not known yet."""
        for prompt_T in self.unknown(prompts, new_tokens):
            prompt = tuple(prompt_T.tolist())
            room = self.max_positions - len(prompt)
            text_T, (states, scales) = self.source.answer(
                self._examples[prompt], min(new_tokens + BEYOND, room)
            )
            self._states[prompt] = decoded(states, scales)
            self.keep(prompt_T, text_T)

    def features_of(self, texts_RT: Tensor, layers: tuple[int, ...]) -> Tensor:
        # In the order of `ReplayTarget`'s rows: by length of the prompt.
        rows: list[Tensor] = []
        for prompt in sorted(self.texts, key=len):
            states_TLD = self._states[prompt].to(self.device)
            features_TF, _ = chosen_states(
                self.original,
                states_TLD,
                self.source.layers,
                layers,
                self.dtype,
                self.source.before_norm,
            )
            rows.append(features_TF.cpu())
        return pad_sequence(rows, batch_first=True)

    def probe(self, head: DraftHead) -> dict[str, list[float]] | None:
        """Draft as `probe_drafts` does; None where the states of its text are not known."""
        if head.max_depth > PROBE_TOKENS - PROBE_ENDS[-1]:
            return None
        text_T = probe_text(self.info.vocab_size, PROBE_TOKENS)
        text = tuple(text_T.tolist())
        if text not in self.texts:
            # The probe's text is a prompt without an answer.
            known = self.source.probe(text_T)
            if known is None:
                return None
            self._states[text] = decoded(*known)
            self.keep(text_T, text_T)
        return probe_drafts(self, head)

    def _reaches(self, text: list[int], prompt: int, new_tokens: int) -> bool:
        """Whether a text covers a whole answer: up to its last token, or to an end token."""
        needed = min(prompt + new_tokens, self.max_positions)
        return len(text) >= needed or bool(self.end_tokens.intersection(text[prompt:]))
