"""A text that several calls go on with: what was read of it once is kept, and each call reads only what is new.

past = Conversation()
first = lm.generate(prompt, past_key_values=past)
second = lm.generate(first_and_more, past_key_values=past)      # the answer of a fresh call, sooner

chat = lm.chat(tokenizer, max_new_tokens=256)                   # the same by a chat template
print(chat.say("What is speculative decoding?"))
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from .drafters.base import DraftContext, Drafter, PrefillChunk
from .kv_cache import TreeCache

if TYPE_CHECKING:
    from .speculative_lm import SpeculativeLM


def shared_length(texts: Sequence[Sequence[int]]) -> int:
    """Tokens with which all of some texts begin."""
    places = enumerate(zip(*texts, strict=False))
    return next((place for place, tokens in places if len(set(tokens)) > 1), min(map(len, texts)))


class Conversation:
    """Keys and values of one text, of the target and of what drafts for it; the calls that it is given to change it."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        """The text: the last call's prompt and what was written after it."""
        self._cache: TreeCache | None = None
        self._memory: Any = None
        self._of: Hashable = None

    def __repr__(self) -> str:
        return f"Conversation({len(self.tokens)} tokens)"

    def get_seq_length(self) -> int:
        """Tokens of the text whose keys and values are kept: all but the newest one."""
        return max(len(self.tokens) - 1, 0) if self._cache is not None else 0

    def forget(self) -> None:
        """Begin anew."""
        self.tokens, self._cache, self._memory = [], None, None

    def belong(self, to: Hashable) -> None:
        """Forget what another decoder has read, or the same one with other weights: it is of no use."""
        if self._of != to:
            self.forget()
        self._of = to

    def resume(self, start: DraftContext, drafter: Drafter, prompt_T: Tensor) -> tuple[TreeCache | None, int]:
        """Go back to where a prompt leaves the text, and tell the drafter; it has begun if something is kept.

        Args:
            start: of the drafter.
            drafter: of this call.
            prompt_T: the text to go on with.

        Returns:
            the target's cache and how many tokens it holds; None and 0 if the prompt must be read from its start.
        """
        prompt: list[int] = prompt_T.tolist()  # sync: once a call
        # The token after each that stays must be known: a head has read the two together.
        kept = min(shared_length([self.tokens, prompt]), len(prompt)) - 1
        if self._cache is None or kept < 1 or (drafter.feature_layers and self._memory is None):
            self.forget()
            return None, 0
        device = self._cache.lengths_B.device
        tokens_1T = torch.tensor([prompt[: kept + 1]], device=device)
        read_B = torch.tensor([kept], device=device)
        empty_1TF = torch.empty(1, kept, 0, device=device)
        passage = PrefillChunk(tokens_1T[:, :-1], tokens_1T[:, 1:], empty_1TF, read_B)
        drafter.resume(start, passage, self._memory, kept == len(self.tokens) - 1)
        self._cache.reserve(start.capacity)
        self._cache.rewind(read_B)
        self._cache.read = kept
        return self._cache, kept

    def keep(self, tokens: list[int], cache: TreeCache, drafter: Drafter) -> None:
        """What a call has read and written."""
        self.tokens, self._cache, self._memory = tokens, cache, drafter.saved_state()


class Chat:
    """Turns by a chat template, whose answers read only what is new."""

    def __init__(
        self, lm: SpeculativeLM, tokenizer: PreTrainedTokenizerBase, system: str | None = None, **settings: Any
    ) -> None:
        """Begin.

        Args:
            lm: which answers.
            tokenizer: with a chat template.
            system: the system's message.
            settings: of every answer; see `SpeculativeLM.generate`.

        Raises:
            ValueError: a tokenizer without a chat template.
        """
        if not tokenizer.chat_template:
            raise ValueError(f"{type(tokenizer).__name__} has no chat template; give generate the whole text instead")
        self.lm, self.tokenizer, self.settings = lm, tokenizer, settings
        self.messages: list[dict[str, str]] = [] if system is None else [{"role": "system", "content": system}]
        self.past = Conversation()

    def say(self, text: str, **settings: Any) -> str:
        """The answer to a message; settings are for this answer. A call that fails leaves the messages as they were."""
        return "".join(self.stream(text, **settings))

    def stream(self, text: str, **settings: Any) -> Iterator[str]:
        """As `say`, in parts, as soon as each is there; who stops listening has not been answered."""
        asked = [*self.messages, {"role": "user", "content": text}]
        prompt: Any = self.tokenizer.apply_chat_template(
            asked, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        written: list[int] = []
        told = ""
        rounds = self.lm.stream(
            prompt["input_ids"].to(self.lm.target.device), past_key_values=self.past, **{**self.settings, **settings}
        )
        for tokens in rounds:
            written += tokens
            answer = self._decoded(written)
            if len(answer) > len(told) and not answer.endswith("\ufffd"):  # the bytes of a character may come apart
                yield answer[len(told) :]
                told = answer
        answer = self._decoded(written)
        if len(answer) > len(told):
            yield answer[len(told) :]
        self.messages = [*asked, {"role": "assistant", "content": answer}]

    def _decoded(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))
